"""The index of the bug museum: every mistake, where it is shown, and the tests that find it.

What was wrong is written in `museum.toml`. All else is read: what pages show from their sections
"Bug museum", the tests from their names (`test_Q4_...`), the hunts from the exercises.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import course
import exercise_pages
import exercises
import gallery
import notebooks
import pages
from docutils import nodes

DATA = gallery.DOCS / "museum.toml"
SECTION = "Bug museum"
#: A number of the museum, as G25. "L2 penalty" and "L2 cache" are words of others.
NUMBER = re.compile(r"(?<![\w`.])([GQKLT][1-9]\d?)(?![\w`]|\.\d)(?! penalty| cache)")
#: Names of tensors that look like numbers.
NOT_NUMBERS = {"gpu/8_galore": {"G1", "G2"}}


@dataclass(frozen=True)
class Section:
    """A piece of a page under one heading: where a link to it leads, and its text."""

    page: str  # "1_gpt2/2_gpt2"
    title: str
    anchor: str
    text: str
    in_museum: bool
    in_bold: bool  # a mistake that begins in bold and has no heading

    def numbers(self, text: str) -> list[str]:
        # "Defects are numbered G1, G2, ..." names none of them.
        found = dict.fromkeys(NUMBER.findall(re.sub(r"\w1,\s+\w2,\s+\.\.\.", "", text)))
        return [number for number in found if number not in NOT_NUMBERS.get(self.page, ())]

    def shows(self) -> list[str]:
        """The numbers of an exhibit: those of its heading, or those of its first paragraph."""
        first = self.text.strip().partition("\n\n")[0]
        return self.numbers(self.title) or self.numbers(first)


@cache
def data() -> dict[str, Any]:
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


@cache
def numbers() -> dict[str, tuple[str, str]]:
    """What was wrong and what one saw, by number."""
    return {
        f"{letter}{number}": (wrong, seen)
        for letter in data()["sources"]
        for number, (wrong, seen) in data()[letter].items()
    }


@cache
def sections(page: str) -> list[Section]:
    """The text of a page by headings; in the museum, by exhibits."""
    blocks = notebooks.blocks(exercise_pages.script(page))
    whole = "\n\n".join(block[1] for block in blocks if block[0] == "text")
    parts = re.split(r"^(\S[^\n]*)\n(-{3,}|~{3,}|={3,})$", whole, flags=re.M)
    found, museum = [], False
    for title, rule, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if rule[0] != "~":
            museum = title == SECTION
        plain = title.replace("``", "")
        anchor = nodes.make_id(plain)
        exhibits = re.split(r"^\*\*(.+?)\.?\*\*", text, flags=re.M) if museum else [text]
        heading = rule[0] == "~"
        found.append(Section(page, plain, anchor, exhibits[0], museum and heading, False))
        for bold, rest in zip(exhibits[1::2], exhibits[2::2], strict=True):
            found.append(Section(page, bold, anchor, rest, True, True))
    return found


def find(place: str) -> Section:
    """The section "PAGE#TITLE"."""
    page, _, title = place.partition("#")
    for section in sections(page):
        if section.title == title:
            return section
    raise ValueError(f"{DATA.name} names {place!r}, which is no heading of that page")


def exhibits() -> Iterator[Section]:
    """Every mistake of every page's museum, in the order of the pages."""
    for page in course.in_order():
        yield from (section for section in sections(page) if section.in_museum)


@cache
def shown() -> dict[str, list[Section]]:
    """For each number the exhibits that show it; the sections that mention it, if none does."""
    found: dict[str, list[Section]] = {number: [] for number in numbers()}
    for section in exhibits():
        for number in section.shows():
            found.setdefault(number, []).append(section)
    for number, places in mentioned().items():
        if not found.get(number):
            found[number] = places[:1]
    return found


@cache
def mentioned() -> dict[str, list[Section]]:
    """Every section of every page that names a number."""
    found: dict[str, list[Section]] = {}
    for page in course.in_order():
        for section in sections(page):
            for number in section.numbers(f"{section.title}\n{section.text}"):
                found.setdefault(number, []).append(section)
    return found


@cache
def tests() -> dict[str, list[str]]:
    """The tests that carry a number in their name, as "test_FILE.py::NAME"."""
    found: dict[str, list[str]] = {}
    for path in sorted((gallery.ROOT / "tests").glob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^def (test_(?:[gqkltGQKLT][1-9]\d?_)+\w*)", text, re.M):
            carried = re.match(r"test_((?:[gqklt][1-9]\d?_)+)", name, re.I)
            assert carried
            for number in carried[1].upper().strip("_").split("_"):
                found.setdefault(number, []).append(f"{path.name}::{name}")
    return found


@cache
def hunts() -> dict[str, list[Any]]:
    """The bug hunts by the numbers of their mistakes."""
    found: dict[str, list[Any]] = {}
    for one in exercises.written():
        for number in NUMBER.findall(one.hunt):
            found.setdefault(number, []).append(one)
    return found


def label(number: str) -> str:
    return f"bug-{number.lower()}"


def with_links(text: str) -> str:
    """The numbers of a text in MyST become links to their place in the index."""
    return NUMBER.sub(lambda found: f"{{ref}}`{found[1]} <{label(found[1])}>`", text)


# -- the page --------------------------------------------------------------------------------


def place(section: Section) -> str:
    """A link to a section of a page. Its title is not escaped: it holds no markup."""
    document = exercise_pages.document(section.page).lstrip("/")
    return f"`{section.title} <{document}.html#{section.anchor}>`__"


def where(number: str) -> list[str]:
    word = "Shown" if any(section.in_museum for section in shown()[number]) else "Mentioned"
    lines = [f"{word}: {place(section)}." for section in shown()[number]]
    if also := data()["see"].get(number):
        lines.append(f"On the subject: {place(find(also))}.")
    if not lines:
        lines = ["Not shown on a page."]
    lines += [hunt_line(one) for one in hunts().get(number, ())]
    found = tests().get(number, [])
    names = ", ".join(f"``{name}``" for name in found)
    lines.append(f"Found by {names}." if found else "No test of the package: see the page.")
    return lines


def hunt_line(one: Any) -> str:
    title = exercise_pages.source_title(one).removeprefix("Bug hunt: ")
    return f"Hunt: :doc:`{title} </exercises/{one.name}>`."


def table(header: list[str], rows: list[list[list[str]]], widths: str) -> list[str]:
    """A table; each cell is a list of paragraphs."""
    lines = [".. list-table::", "   :header-rows: 1", f"   :widths: {widths}"]
    lines += ["   :class: museum", ""]
    for row in [[[cell] for cell in header], *rows]:
        for column, cell in enumerate(row):
            lead = "   * - " if column == 0 else "     - "
            for i, paragraph in enumerate(cell):
                lines += [f"{lead if i == 0 else ' ' * len(lead)}{paragraph}", ""]
    return lines


def index() -> str:
    count = len(numbers())
    lines = [
        ":html_theme.sidebar_secondary.remove:",
        "",
        ".. meta::",
        "   :description: Index of the mistakes that the pages show, by number",
        "   :keywords: bug museum, defects, mistakes, G1, Q1, K1, L1, T1",
        "",
        SECTION,
        "=" * len(SECTION),
        "",
        f"The mistakes of the project, {count} with a number and {len(unnumbered())} without. "
        "Those with a number were found in real programs and texts. Many give no error: the text "
        "reads well, the loss falls, and something is wrong.",
        "",
        "A number is the same on all pages, in the tests and in the exercises. Its letter says in "
        "which kind of program the mistake was found. A page *shows* a mistake when it makes it, "
        "measures it and mends it.",
        "",
    ]
    for letter, source in data()["sources"].items():
        lines += [source, "-" * len(source), ""]
        rows = []
        for number, (wrong, seen) in numbers().items():
            if number[0] == letter:
                # The label stands before a paragraph, so that the paragraph carries the id.
                rows.append([[f".. _{label(number)}:", number], [wrong], [seen], where(number)])
        header = ["number", "what was wrong", "what one saw", "where"]
        lines += table(header, rows, "10 27 27 36")
    title = "Without a number"
    lines += [title, "-" * len(title), "", "Mistakes that one page shows, by chapter.", ""]
    for chapter, members in by_chapter().items():
        lines += [chapter, "~" * len(chapter), ""]
        rows = []
        for section in members:
            text = data()["unnumbered"].get(section.page, {}).get(section.title)
            if text is None:
                raise ValueError(f"{section.page}: {section.title!r} is not in {DATA.name}")
            hunted = [
                hunt_line(one)
                for one in exercises.written()
                if data()["hunts"].get(one.name) == f"{section.page}#{section.title}"
            ]
            rows.append([[place(section)], [text, *hunted]])
        lines += table(["mistake", "what it is about"], rows, "35 65")
    return "\n".join(lines) + "\n"


def unnumbered() -> list[Section]:
    return [section for section in exhibits() if not section.shows()]


def by_chapter() -> dict[str, list[Section]]:
    titles = exercise_pages.chapter_titles()
    found: dict[str, list[Section]] = {}
    for section in unnumbered():
        folder = section.page.partition("/")[0]
        number = 9 if folder == gallery.GPU.name else int(folder.partition("_")[0])
        found.setdefault(titles[number], []).append(section)
    return found


def write(app: Any) -> None:
    pages.write_texts({Path(app.srcdir) / "museum.rst": index()})
