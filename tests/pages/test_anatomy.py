"""Every page has the parts of its kind in the same order (docs/writing.md, "Anatomy")."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from gallery import folding, pages
from gallery.pages import Section

SOURCES = [*pages.scripts(), *pages.notebooks()]
QUIZ = "Which sentence is false?"
LAST = ["Bug museum", QUIZ, "Exercises", "Summary", "Sources"]
LEVELS = "=-~"


def items(text: str, mark: str) -> list[str]:
    """The items of a list, whose first lines begin with ``mark``."""
    parts = re.split(rf"^{mark} +", text, flags=re.M)[1:]
    return [" ".join(re.split(r"\n\n(?! )", part)[0].split()) for part in parts]


PICTURE = re.compile(r"^\.\. (image|live)::", re.M)
WORDS, LINES, LINES_OF_A_BLOCK, WORDS_BEFORE_A_PICTURE = 1200, 100, 20, 150


def is_lesson(source: Path) -> bool:
    return not pages.number(source)[1]


def faults(source: Path) -> list[str]:
    sections = pages.split(source)
    code = [block.content for block in pages.blocks(source) if block.type == "code"]
    if [s.mark for s in sections].count("=") != 1 or sections[0].mark != "=":
        return ["the page does not begin with its one title"]
    found = wrong_headings(sections) + wrong_order(sections, is_lesson(source))
    found += wrong_lists(sections, is_lesson(source))
    if not sections[0].text:
        found.append("no paragraph says why")
    if is_lesson(source):
        return found + too_long(source)
    versions = r"lm_from_scratch\.__version__", r"torch\.__version__"
    # What a page on a GPU kernel prints is the same on every machine.
    if source.parent != pages.GPU and not all(re.search(v, "".join(code[-1:])) for v in versions):
        found.append("the last block does not print the versions of torch and lm_from_scratch")
    return found


def too_long(source: Path) -> list[str]:
    """What a lesson has too much of: words, visible lines, anything before its first picture."""
    blocks = pages.blocks(source)
    parts = iter(folding.parts(tuple(b.content for b in blocks if b.type == "code")))
    words, visible, first, found = 0, 0, None, []
    for block in blocks:
        if block.type == "text":
            text = block.content
            picture = PICTURE.search(text)
            if picture and first is None:
                first = words + pages.words(text[: picture.start()])
            words += pages.words(text)
        else:
            shown = next(parts)
            lines = sum(folding.lines(part) for part in shown if not part.kinds)
            visible += lines
            if lines > LINES_OF_A_BLOCK:
                found.append(f"a block has {lines} visible lines")
            if first is None and any("figure" in part.kinds for part in shown):
                first = words
    if words > WORDS:
        found.append(f"too many words: {words}")
    if visible > LINES:
        found.append(f"too many visible lines of code: {visible}")
    if first is None or first > WORDS_BEFORE_A_PICTURE:
        found.append(f"words before the first picture: {first}")
    if not any("**Predict first.**" in block.content for block in blocks):
        found.append("nothing to predict")
    return found


def wrong_headings(sections: list[Section]) -> list[str]:
    found = []
    titles = [s.title for s in sections if s.mark == "-"]
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


def wrong_order(sections: list[Section], lesson: bool) -> list[str]:
    found = []
    titles = [s.title for s in sections if s.mark == "-"]
    ends = ["Exercises", "Summary"] if lesson else LAST
    last = [title for title in ends if lesson or title in (*titles, LAST[-1])]
    if titles[-len(last) :] != last:
        found.append(f"the page ends with {titles[-len(last) :]}")
    if len(titles) <= len(last):
        found.append("the page has no body")
    if set(titles) & {"You will learn", "Before you start"}:
        found.append("what is learned and needed is not said in sections of its own")
    return found


def wrong_lists(sections: list[Section], lesson: bool) -> list[str]:
    found = []
    text = {s.title: s.text for s in sections}
    for title, what in (("Exercises", "exercises"), (QUIZ, "sentences")):
        numbers = [int(n) for n in re.findall(r"^(\d+)\. ", text.get(title, ""), flags=re.M)]
        if title in text and (not numbers or numbers != list(range(1, len(numbers) + 1))):
            found.append(f"{what} are numbered {numbers}")
    for title in ("Summary", "Sources"):
        if title in text and not items(text[title], r"\*"):
            found.append(f"no bullets under {title!r}")
    if lesson and len(items(text.get("Summary", ""), r"\*")) != 3:
        found.append("not three lines to keep")
    if not lesson and "<http" not in text.get("Sources", ""):
        found.append("no links in the sources")
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_page_has_its_parts(source: Path) -> None:
    assert faults(source) == []


def template(name: str) -> str:
    """The page that an author begins with."""
    return (pages.DOCS / "_templates" / f"{name}.py").read_text(encoding="utf-8")


#: Where each would be.
PLACES = {"lesson": "1_gpt2/1_page.py", "in_depth": "1_gpt2/1a_page.py"}


def written(name: str, text: str, folder: Path) -> Path:
    script = folder / PLACES[name]
    script.parent.mkdir()
    script.write_text(text)
    return script


@pytest.mark.parametrize("name", PLACES)
def test_template_has_its_parts(name: str, tmp_path: Path) -> None:
    assert faults(written(name, template(name), tmp_path)) == []


IN_DEPTH = [
    ("\nWhich laws must the", "\nWhy\n---\n\nWhich laws must the", "no paragraph says why"),
    ("One query\n---------", "You will learn\n--------------", "what is learned"),
    ("# Sources\n# -------\n", "# Links\n# -----\n", "the page ends with"),
    ("# The wrong axis\n# ~~~~~~~~~~~~~~\n#\n", "", "a mistake in the museum has no"),
    ("# Exercises\n# ---------\n", "# Sources\n# ---------\n", "two sections have one title"),
    ("One query\n---------", "One query\n~~~~~~~~~", "the page has no body"),
    ("One query\n---------", "Part 1: one query\n-----------------", "a heading has a number"),
    ("# 1. ", "# 2. ", "exercises are numbered [2]"),
    ("<https://arxiv.org/abs/1706.03762>", "", "no links in the sources"),
    ("torch.__version__", "torch", "the last block does not print"),
]
LONG = "".join(f"x{i} = {i}\n" for i in range(21))
LESSON = [
    ("# Summary\n# -------\n", "# End\n# ---\n", "the page ends with"),
    ("# * Only differences between scores count.\n", "", "not three lines to keep"),
    ("*Easy.* Multiply", "*Easy.* " + "word " * 1200 + "Multiply", "too many words"),
    ("(scores + 7)", LONG + "\n(scores + 7)", "a block has 22 visible lines"),
    (".. live:: look\n\n", "", "words before the first picture: None"),
    ("Which of the", "word " * 150 + "Which of the", "words before the first picture: 1"),
    ("**Predict first.** You", "You", "nothing to predict"),
]


@pytest.mark.parametrize(
    ("name", "old", "new", "fault"),
    [("in_depth", *case) for case in IN_DEPTH] + [("lesson", *case) for case in LESSON],
)
def test_faults_are_found(name: str, old: str, new: str, fault: str, tmp_path: Path) -> None:
    assert template(name).count(old) == 1
    found = faults(written(name, template(name).replace(old, new), tmp_path))
    assert any(one.startswith(fault) for one in found), found


def test_what_is_not_read_at_first_does_not_count(tmp_path: Path) -> None:
    """Checks, tables, drawings and lists of imports."""
    folded = "".join(f"assert {i} == {i}\n" for i in range(120))
    text = template("lesson").replace("assert (weights > 0).all()\n", folded)
    assert faults(written("lesson", text, tmp_path)) == []
