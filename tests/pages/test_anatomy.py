"""Every page has the same parts in the same order (CONTRIBUTING.md, "Anatomy")."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

import gallery
import notebooks
import pytest

SCRIPTS = [*gallery.scripts(), *gallery.gpu_scripts()]
FIRST = ["You will learn", "Before you start"]
QUIZ = "Which sentence is false?"
LAST = ["Bug museum", QUIZ, "Exercises", "Summary", "Sources"]
LEVELS = "=-~"
COMMON = set(
    re.findall(
        r"\w+",
        "a an and are as be by each for from has have if in is it its no not of on one or than "
        "that the to what which with",
    )
)
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@dataclass
class Section:
    title: str
    level: int
    text: str


def page(script: Path) -> tuple[list[Section], list[str]]:
    """The sections of a page, with the text directly below each heading, and its code blocks."""
    blocks = notebooks.blocks(script)
    text = "\n\n".join(block.content for block in blocks if block.type == "text")
    heading = re.compile(r"^(\S.*)\n(=+|-+|~+)$", re.M)
    found = [match for match in heading.finditer(text) if len(match[1]) == len(match[2])]
    ends = [match.start() for match in found[1:]] + [len(text)]
    sections = [
        Section(match[1], LEVELS.index(match[2][0]), text[match.end() : end].strip())
        for match, end in zip(found, ends, strict=True)
    ]
    return sections, [block.content for block in blocks if block.type == "code"]


def items(text: str, mark: str) -> list[str]:
    """The items of a list, whose first lines begin with ``mark``."""
    parts = re.split(rf"^{mark} +", text, flags=re.M)[1:]
    return [" ".join(re.split(r"\n\n(?! )", part)[0].split()) for part in parts]


def paragraphs(section: Section) -> list[str]:
    """The paragraphs of running text: no lists, formulas, notes."""
    parts = re.split(r"\n\s*\n", section.text)
    return [" ".join(p.split()) for p in parts if not re.match(r"\.\. |\* |\d+\. |\s", p)]


def words(sentence: str) -> set[str]:
    return set(re.findall(r"\w+", sentence.lower())) - COMMON


def quiz(sections: list[Section]) -> list[str]:
    return [item for s in sections if s.title == QUIZ for item in items(s.text, r"\d+\.")]


def faults(script: Path) -> list[str]:
    sections, code = page(script)
    if [s.level for s in sections].count(0) != 1 or sections[0].level != 0:
        return ["the page does not begin with its one title"]
    found = wrong_order(sections) + wrong_lists(sections)
    if not sections[0].text:
        found.append("no paragraph says why")
    for section in sections:
        for paragraph in paragraphs(section):
            sentences = len(re.findall(r"[.?!]\S?(?= [A-Z`*:]|$)", paragraph))
            if sentences > 5 or len(paragraph) > 480:
                found.append(f"a paragraph of {sentences} sentences: {paragraph[:60]!r}")
    versions = r"lm_from_scratch\.__version__", r"torch\.__version__"
    # What a page on a GPU kernel prints is the same on every machine.
    if script.parent != gallery.GPU and not all(re.search(v, code[-1]) for v in versions):
        found.append("the last block does not print the versions of torch and lm_from_scratch")
    return found


def wrong_order(sections: list[Section]) -> list[str]:
    found = []
    titles = [s.title for s in sections if s.level == 1]
    last = [title for title in LAST if title != QUIZ or QUIZ in titles]
    if titles[: len(FIRST)] != FIRST:
        found.append(f"the page begins with {titles[: len(FIRST)]}")
    if titles[-len(last) :] != last:
        found.append(f"the page ends with {titles[-len(last) :]}")
    if len(titles) <= len(FIRST) + len(last):
        found.append("the page has no body")
    if len(set(titles)) < len(titles):
        found.append("two sections have one title")
    if any(b.level > a.level + 1 for a, b in pairwise(sections)):
        found.append("a heading skips a level")
    museum = [i for i, s in enumerate(sections) if s.title == "Bug museum"]
    if museum and sections[museum[0] + 1].level < 2:
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
    elif not learn[-1].endswith(".") or not all(item.endswith(",") for item in learn[:-1]):
        found.append("the things to learn end with commas, the last with a full stop")
    for title, what in (("Exercises", "exercises"), (QUIZ, "sentences")):
        numbers = [int(n) for n in re.findall(r"^(\d+)\. ", text.get(title, ""), flags=re.M)]
        if title in text and (not numbers or numbers != list(range(1, len(numbers) + 1))):
            found.append(f"{what} are numbered {numbers}")
        stated = re.search(rf"\b({'|'.join(NUMBERS)}) {what}", text.get(title, ""), flags=re.I)
        if stated and NUMBERS.index(stated[1].lower()) + 1 != len(numbers):
            found.append(f"{stated[0]!r}, and {len(numbers)} follow")
    for title in ("Summary", "Sources"):
        if not items(text.get(title, ""), r"\*"):
            found.append(f"no bullets under {title!r}")
    if "<http" not in text.get("Sources", ""):
        found.append("no links in the sources")
    if QUIZ in text and not 3 <= len(quiz(sections)) <= 6:
        found.append(f"{len(quiz(sections))} sentences in the quiz, not three to six")
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_page_has_its_parts(script: Path) -> None:
    assert faults(script) == []


def test_no_quiz_repeats_a_sentence() -> None:
    """Two sentences on different pages share less than half of their words."""
    asked = [(script, sentence) for script in SCRIPTS for sentence in quiz(page(script)[0])]
    assert asked
    assert repeats(asked) == []


def repeats(asked: list[tuple[Path, str]]) -> list[str]:
    found = []
    for (here, a), (there, b) in combinations(asked, 2):
        if here != there and 2 * len(words(a) & words(b)) >= len(words(a) | words(b)):
            found.append(f"{here.stem}: {a!r} - {there.stem}: {b!r}")
    return found


def test_repeated_sentences_are_found() -> None:
    one, two = Path("1_one.py"), Path("2_two.py")
    a = "An optimizer cannot see in-place changes of a weight."
    b = "An optimizer cannot see changes that are made to a weight in place."
    assert len(repeats([(one, a), (two, b)])) == 1
    assert repeats([(one, a), (one, b)]) == []
    assert repeats([(one, a), (two, "A swap copies no numbers.")]) == []


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
        ("among keys,\n", "among keys.\n", "the things to learn end with commas"),
        ("# 1. ", "# 2. ", "exercises are numbered [2]"),
        ("# 1. ", "# Two exercises.\n#\n# 1. ", "'Two exercises', and 1 follow"),
        ("<https://arxiv.org/abs/1706.03762>", "", "no links in the sources"),
        ("sum to 1.\n", "sum to 1. It is. It is. It is. It is. It is.\n", "a paragraph of 6"),
        (
            "# Summary\n",
            "# Which sentence is false?\n# ------------------------\n#\n# 1. One.\n#\n# Summary\n",
            "1 sentences in the quiz",
        ),
        ("torch.__version__", "torch", "the last block does not print"),
    ],
)
def test_faults_are_found(old: str, new: str, fault: str, tmp_path: Path) -> None:
    script = tmp_path / "1_page.py"
    assert template().count(old) == 1
    script.write_text(template().replace(old, new))
    assert any(found.startswith(fault) for found in faults(script)), faults(script)
