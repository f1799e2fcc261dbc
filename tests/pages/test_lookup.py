"""The index of the bug museum: its numbers are those of pages, tests and hunts."""

from __future__ import annotations

import re
from functools import cache

import exercise_pages
import exercises
import gallery
import museum


@cache
def in_names_of_tests() -> set[str]:
    """The numbers that a test carries in its name: "test_Q4_..."."""
    found: set[str] = set()
    for path in (gallery.ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        for carried in re.findall(r"^def test_((?:[gqklt][1-9]\d?_)+)", text, re.M | re.I):
            found.update(carried.upper().strip("_").split("_"))
    return found


def test_pages_hunts_and_tests_name_numbers_that_exist() -> None:
    shown = {number for one in museum.exhibits() for number in museum.shown(one)}
    assert shown <= set(museum.numbers())
    assert in_names_of_tests() <= set(museum.numbers())
    for one in exercises.written():
        assert set(museum.NUMBER.findall(one.hunt)) <= set(museum.numbers())


def test_no_heading_has_a_number() -> None:
    """A reader looks for what happened."""
    assert [one for one in museum.exhibits() if museum.NUMBER.search(one.title)] == []


def test_every_card_is_whole() -> None:
    shown = [number for numbers in museum.cards().values() for number in numbers]
    assert sorted(shown) == sorted(museum.numbers())
    for number, mistake in museum.numbers().items():
        assert mistake.old != mistake.new and mistake.saw.endswith(".") and museum.chapters(number)
        for line in (mistake.old, mistake.new):
            assert 3 < len(line) < 90 and "\n" not in line


def test_every_number_has_a_test() -> None:
    assert set(museum.numbers()) - in_names_of_tests() == set()


def test_every_hunt_leads_to_the_index() -> None:
    for one in exercises.written():
        for number in museum.NUMBER.findall(one.hunt):
            assert f"<{museum.label(number)}>`" in exercise_pages.page(one)
