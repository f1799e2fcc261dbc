"""The index of the bug museum: every mistake, where it is shown, and the tests that find it.

`museum.toml` says of a mistake with a number what was wrong and what one saw. All else is read:
what a page shows from its section "Bug museum", the tests from their names (`test_Q4_...`), the
hunts from the exercises.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from typing import Any

import exercises
import gallery
import page
import rst

from lm_from_scratch.exercises.exercise import Exercise

SECTION = "Bug museum"
#: A number of the museum, as G25. "L2 penalty" and "L2 cache" are words of others, and names of
#: tensors (a matrix G1) stand in code or formulas.
NUMBER = re.compile(r"(?<![\w`.])([GQKLT][1-9]\d?)(?![\w`]|\.\d)(?! penalty| cache)")


@dataclass(frozen=True)
class Exhibit:
    """A piece of a page: where a link to it leads, and its text."""

    page: str
    title: str
    anchor: str
    text: str
    in_museum: bool

    def shows(self) -> list[str]:
        """The numbers of its heading, or those of its first paragraph."""
        return numbers_in(self.title) or numbers_in(self.text.strip().partition("\n\n")[0])

    def link(self) -> str:
        """Its title is not escaped: it holds no markup."""
        return f"`{self.title} <{gallery.document(self.page)[1:]}.html#{self.anchor}>`__"

    def about(self) -> str:
        """The first sentences, as many as are short enough."""
        first = " ".join(self.text.strip().partition("\n\n")[0].split())
        taken = ""
        for sentence in re.findall(r"(?:``[^`]+``|`[^`]+`|[^`])+?[.:?!](?=\s|$)\s*", first):
            if taken and len(taken + sentence) > 180:
                break
            taken += sentence
        # A page names each of its links once; here the same name may come from two pages.
        taken = re.sub(r">`_(?!_)", ">`__", page.LINK.sub(r"\1", taken))
        return re.sub(r":\s*$", ".", taken.strip())


def numbers_in(text: str) -> list[str]:
    # "Defects are numbered G1, G2, ..." names none of them.
    return list(dict.fromkeys(NUMBER.findall(re.sub(r"\w1,\s+\w2,\s+\.\.\.", "", text))))


@cache
def data() -> dict[str, Any]:
    return tomllib.loads((gallery.DOCS / "museum.toml").read_text(encoding="utf-8"))


@cache
def numbers() -> dict[str, tuple[str, str]]:
    """What was wrong and what one saw, by number."""
    return {
        f"{letter}{number}": (wrong, seen)
        for letter in data()["sources"]
        for number, (wrong, seen) in data()[letter].items()
    }


@cache
def pieces(name: str) -> list[Exhibit]:
    """The text of a page by headings; a mistake in the museum may begin in bold instead."""
    found, museum = [], False
    for section in page.sections(name):
        if section.mark != "~":
            museum = section.title == SECTION
        parts = [section.text]
        if museum:
            parts = re.split(r"^\*\*(.+?)\.?\*\*", section.text, flags=re.M)
        plain = section.title.replace("``", "")
        heading = museum and section.mark == "~"
        found.append(Exhibit(name, plain, section.anchor, parts[0], heading))
        for bold, text in zip(parts[1::2], parts[2::2], strict=True):
            found.append(Exhibit(name, bold, section.anchor, text, True))
    return found


def exhibits() -> list[Exhibit]:
    """Every mistake of every page's museum, in the order of the pages."""
    return [piece for name in gallery.in_order() for piece in pieces(name) if piece.in_museum]


@cache
def shown() -> dict[str, list[Exhibit]]:
    """For each number the exhibits that show it; the first piece that mentions it, if none does."""
    found: dict[str, list[Exhibit]] = {number: [] for number in numbers()}
    for exhibit in exhibits():
        for number in exhibit.shows():
            found.setdefault(number, []).append(exhibit)
    for piece in (piece for name in gallery.in_order() for piece in pieces(name)):
        for number in numbers_in(f"{piece.title}\n{piece.text}"):
            if number in found and not found[number]:
                found[number].append(piece)
    return found


@cache
def tests() -> dict[str, list[str]]:
    """The tests that carry a number in their name, as "test_FILE.py::NAME"."""
    found: dict[str, list[str]] = {}
    for path in sorted((gallery.ROOT / "tests").rglob("test_*.py"), key=lambda path: path.name):
        text = path.read_text(encoding="utf-8")
        for name, carried in re.findall(
            r"^def (test_((?:[gqklt][1-9]\d?_)+)\w*)", text, re.M | re.I
        ):
            for number in carried.upper().strip("_").split("_"):
                found.setdefault(number, []).append(f"{path.name}::{name}")
    return found


def hunts() -> dict[str, list[Exercise]]:
    """The bug hunts by the numbers of their mistakes; one without a number by its page."""
    found: dict[str, list[Exercise]] = {}
    for one in exercises.written():
        for key in numbers_in(one.hunt) or [one.page] * bool(one.hunt):
            found.setdefault(key, []).append(one)
    return found


def label(number: str) -> str:
    return f"bug-{number.lower()}"


def with_links(text: str) -> str:
    """The numbers of a text in MyST become links to their place in the index."""
    return NUMBER.sub(lambda found: f"{{ref}}`{found[1]} <{label(found[1])}>`", text)


# -- the page --------------------------------------------------------------------------------


def where(number: str) -> str:
    places = shown()[number]
    word = "Shown" if any(piece.in_museum for piece in places) else "Mentioned"
    lines = [f"{word}: {piece.link()}." for piece in places] or ["Not shown on a page."]
    lines += map(hunt_line, hunts().get(number, ()))
    names = ", ".join(f"``{name}``" for name in tests().get(number, []))
    lines.append(f"Found by {names}." if names else "No test of the package: see the page.")
    return "\n\n".join(lines)


def hunt_line(one: Exercise) -> str:
    title = exercises.title(one).removeprefix("Bug hunt: ")
    return f"Hunt: :doc:`{title} </exercises/{one.name}>`."


def index() -> str:
    numbered = {}
    for letter, source in data()["sources"].items():
        rows = [["number", "what was wrong", "what one saw", "where"]]
        for number, (wrong, seen) in numbers().items():
            if number[0] == letter:
                # The label stands before a paragraph, so that the paragraph carries the id.
                name = f".. _{label(number)}:\n\n{number}"
                rows.append([name, wrong, seen, where(number)])
        numbered[source] = rst.table(rows, ":widths: 10 27 27 36", ":class: museum")
    others = [exhibit for exhibit in exhibits() if not exhibit.shows()]
    return rst.render(
        "museum.rst",
        numbers=len(numbers()),
        numbered=numbered,
        others=len(others),
        chapters=[
            (
                chapter,
                [one for one in others if one.page in names],
                [hunt_line(one) for name in names for one in hunts().get(name, ())],
            )
            for chapter, names in gallery.by_chapter().items()
        ],
    )
