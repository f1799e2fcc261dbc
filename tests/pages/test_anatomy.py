"""Every page has the same parts in the same order (CONTRIBUTING.md, "Anatomy")."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import gallery
import page
import pytest
from page import Section

SCRIPTS = [*gallery.scripts(), *gallery.gpu_scripts()]
FIRST = ["You will learn", "Before you start"]
QUIZ = "Which sentence is false?"
LAST = ["Bug museum", QUIZ, "Exercises", "Summary", "Sources"]
LEVELS = "=-~"


def items(text: str, mark: str) -> list[str]:
    """The items of a list, whose first lines begin with ``mark``."""
    parts = re.split(rf"^{mark} +", text, flags=re.M)[1:]
    return [" ".join(re.split(r"\n\n(?! )", part)[0].split()) for part in parts]


def faults(script: Path) -> list[str]:
    sections = page.split(script)
    code = [block.content for block in page.blocks(script) if block.type == "code"]
    if [s.mark for s in sections].count("=") != 1 or sections[0].mark != "=":
        return ["the page does not begin with its one title"]
    found = wrong_order(sections) + wrong_lists(sections)
    if not sections[0].text:
        found.append("no paragraph says why")
    versions = r"lm_from_scratch\.__version__", r"torch\.__version__"
    # What a page on a GPU kernel prints is the same on every machine.
    if script.parent != gallery.GPU and not all(re.search(v, code[-1]) for v in versions):
        found.append("the last block does not print the versions of torch and lm_from_scratch")
    return found


def wrong_order(sections: list[Section]) -> list[str]:
    found = []
    titles = [s.title for s in sections if s.mark == "-"]
    last = [title for title in LAST if title != QUIZ or QUIZ in titles]
    if titles[: len(FIRST)] != FIRST:
        found.append(f"the page begins with {titles[: len(FIRST)]}")
    if titles[-len(last) :] != last:
        found.append(f"the page ends with {titles[-len(last) :]}")
    if len(titles) <= len(FIRST) + len(last):
        found.append("the page has no body")
    if len(set(titles)) < len(titles):
        found.append("two sections have one title")
    levels = [LEVELS.index(s.mark) for s in sections]
    if any(b > a + 1 for a, b in pairwise(levels)):
        found.append("a heading skips a level")
    museum = [i for i, s in enumerate(sections) if s.title == "Bug museum"]
    if museum and sections[museum[0] + 1].mark != "~":
        found.append("a mistake in the museum has no heading")
    for title in (s.title for s in sections):
        if re.match(r"(Part|Chapter|Section|Step) \d|\d|.*\.$", title):
            found.append(f"a heading has a number or a full stop: {title!r}")
    return found


def wrong_lists(sections: list[Section]) -> list[str]:
    found = []
    text = {s.title: s.text for s in sections}
    learn = items(text.get("You will learn", ""), r"\*")
    if not 3 <= len(learn) <= 5:
        found.append(f"{len(learn)} things to learn, not three to five")
    for title, what in (("Exercises", "exercises"), (QUIZ, "sentences")):
        numbers = [int(n) for n in re.findall(r"^(\d+)\. ", text.get(title, ""), flags=re.M)]
        if title in text and (not numbers or numbers != list(range(1, len(numbers) + 1))):
            found.append(f"{what} are numbered {numbers}")
    for title in ("Summary", "Sources"):
        if not items(text.get(title, ""), r"\*"):
            found.append(f"no bullets under {title!r}")
    if "<http" not in text.get("Sources", ""):
        found.append("no links in the sources")
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_page_has_its_parts(script: Path) -> None:
    assert faults(script) == []


def template() -> str:
    """The page that CONTRIBUTING.md offers as a beginning."""
    text = (gallery.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.split(r"^### Template\n+```python\n", text, flags=re.M)[1].split("\n```", 1)[0] + "\n"


def test_template_has_its_parts(tmp_path: Path) -> None:
    script = tmp_path / "1_page.py"
    script.write_text(template())
    assert faults(script) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("\nA sentence says why", "\nWhy\n---\n\nA sentence says why", "no paragraph says why"),
        ("You will learn\n--------------", "What is here\n------------", "the page begins with"),
        ("# Bug museum\n# ----------\n", "# Bugs\n# ----\n", "the page ends with"),
        ("# The wrong axis\n# ~~~~~~~~~~~~~~\n#\n", "", "a mistake in the museum has no"),
        ("# Exercises\n# ---------\n", "# Exercises\n# ~~~~~~~~~\n", "the page ends with"),
        ("One query\n---------", "One query\n~~~~~~~~~", "the page has no body"),
        ("One query\n---------", "Summary\n-------", "two sections have one title"),
        ("One query\n---------", "Part 1: one query\n-----------------", "a heading has a number"),
        ("* how the weights", "* a,\n* b,\n* c,\n* how the weights", "6 things to learn"),
        ("# 1. ", "# 2. ", "exercises are numbered [2]"),
        ("<https://arxiv.org/abs/1706.03762>", "", "no links in the sources"),
        ("torch.__version__", "torch", "the last block does not print"),
    ],
)
def test_faults_are_found(old: str, new: str, fault: str, tmp_path: Path) -> None:
    script = tmp_path / "1_page.py"
    assert template().count(old) == 1
    script.write_text(template().replace(old, new))
    assert any(found.startswith(fault) for found in faults(script)), faults(script)
