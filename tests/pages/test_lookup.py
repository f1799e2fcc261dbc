"""The index of the bug museum: its numbers are those of pages, tests and hunts."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from gallery import exercises, pages
from museum import cards
from output import generated


@cache
def names_of_tests() -> set[str]:
    files = [path.read_text(encoding="utf-8") for path in (pages.ROOT / "tests").rglob("test_*.py")]
    return {name for text in files for name in re.findall(r"^def (test_\w+)", text, re.M)}


def test_pages_and_hunts_name_numbers_that_exist() -> None:
    shown = {number for one in cards.exhibits() for number in cards.shown(one)}
    assert shown <= set(cards.numbers())
    for one in exercises.written():
        assert set(cards.NUMBER.findall(one.hunt)) <= set(cards.numbers())


def test_no_heading_has_a_number() -> None:
    """A reader looks for what happened."""
    assert [one for one in cards.exhibits() if cards.NUMBER.search(one.title)] == []


def test_every_card_is_whole() -> None:
    shown = [number for numbers in cards.cards().values() for number in numbers]
    assert sorted(shown) == sorted(cards.numbers())
    for number, mistake in cards.numbers().items():
        assert mistake.old != mistake.new and mistake.saw.endswith(".") and cards.chapters(number)
        for line in (mistake.old, mistake.new):
            assert 3 < len(line) < 90 and "\n" not in line


def test_every_number_names_tests_that_exist() -> None:
    """Those with an M are asserted by their pages, see below."""
    for number, mistake in cards.numbers().items():
        assert bool(mistake.tests) == (number[0] != "M"), number
        assert {*mistake.tests} <= names_of_tests(), number


def asserts(node: ast.AST) -> bool:
    """Whether code asserts something when it runs: a function need not be called."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return False
    return isinstance(node, ast.Assert) or any(map(asserts, ast.iter_child_nodes(node)))


def section_asserts(script: Path, title: str) -> bool:
    """Whether the code between this heading of a page and the next one does."""
    heading = ""
    for block in pages.blocks(script):
        if block.type == "text":
            heading = [heading, *(found[0] for found in pages.HEADING.findall(block.content))][-1]
        elif heading == title and asserts(ast.parse(block.content)):
            return True
    return False


@pytest.mark.parametrize("number", [n for n in cards.numbers() if n[0] == "M"])
def test_its_page_shows_and_asserts_it(number: str) -> None:
    (exhibit,) = (one for one in cards.exhibits() if number in cards.shown(one))
    first = exhibit.text.partition("\n\n")[0]
    assert any(number in cards.NUMBER.findall(found) for found in cards.SHOWN.findall(first))
    assert section_asserts(pages.source(exhibit.page), exhibit.title)


@pytest.mark.parametrize(
    ("code", "holds"),
    [
        ("assert wrong.sum() == 3", True),
        ("for error in errors:\n    assert error > 1", True),
        ("print(wrong.sum())", False),
        ("def check():\n    assert wrong.sum() == 3", False),
    ],
)
def test_a_mistake_that_is_not_asserted_is_found(tmp_path: Path, code: str, holds: bool) -> None:
    template = (pages.DOCS / "_templates" / "in_depth.py").read_text(encoding="utf-8")
    assert template.count("assert wrong.sum() == 3") == 1
    script = tmp_path / "page.py"
    script.write_text(template.replace("assert wrong.sum() == 3", code), encoding="utf-8")
    assert section_asserts(script, "The wrong axis") is holds
    assert not section_asserts(script, "Exercises")


def test_every_mistake_of_a_page_has_a_card() -> None:
    assert [one for one in cards.exhibits() if not cards.shown(one)] == []


def test_every_hunt_leads_to_the_index() -> None:
    for one in exercises.written():
        for number in cards.NUMBER.findall(one.hunt):
            assert f"<{cards.label(number)}>`" in generated.exercise(one)
