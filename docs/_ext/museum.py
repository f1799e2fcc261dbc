"""The index of the bug museum: every mistake, where it is shown, and the tests that find it.

`museum.toml` says of a mistake with a number what was wrong and what one saw. A page shows the
numbers in the headings of its section "Bug museum", or mentions them (page.py); a test has them in
its name (`test_Q4_...`), a hunt in its exercise.
"""

import re
import tomllib
from functools import cache
from typing import Any

import exercises
import gallery
import page
import rst
from page import Section

from lm_from_scratch.exercises.exercise import Exercise

NUMBER = re.compile(r"\b([GQKLT][1-9]\d?)\b")


@cache
def data() -> dict[str, Any]:
    return tomllib.loads((gallery.DOCS / "museum.toml").read_text(encoding="utf-8"))


@cache
def numbers() -> dict[str, list[str]]:
    """What was wrong and what one saw, by number."""
    return {
        f"{letter}{number}": said
        for letter in data()["sources"]
        for number, said in data()[letter].items()
    }


@cache
def exhibits() -> list[Section]:
    """Every mistake of every page's museum, in the order of the pages."""
    sections = [section for name in gallery.in_order() for section in page.sections(name)]
    return [section for section in sections if section.inside == "Bug museum"]


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


def hunts(number: str) -> list[Exercise]:
    return [one for one in exercises.written() if number in NUMBER.findall(one.hunt)]


def label(number: str) -> str:
    return f"bug-{number.lower()}"


def with_links(text: str) -> str:
    """The numbers of a text in MyST become links to their place in the index."""
    return NUMBER.sub(lambda found: f"{{ref}}`{found[1]} <{label(found[1])}>`", text)


# -- the page --------------------------------------------------------------------------------


def link(exhibit: Section) -> str:
    """Its title is not escaped: it holds no markup."""
    return f"`{exhibit.plain} <{gallery.document(exhibit.page)[1:]}.html#{exhibit.anchor}>`__"


def about(exhibit: Section) -> str:
    """Its first paragraph. A page names each of its links once; here two pages may share a name."""
    first = page.LINK.sub(r"\1", exhibit.text.partition("\n\n")[0])
    return " ".join(first.split()).replace(">`_", ">`__")


def hunt_line(one: Exercise) -> str:
    title = exercises.title(one).removeprefix("Bug hunt: ")
    return f"Hunt: :doc:`{title} </exercises/{one.name}>`."


def where(number: str) -> str:
    lines = [f"Shown: {link(one)}." for one in exhibits() if number in NUMBER.findall(one.title)]
    named = [name for name in gallery.in_order() if number in page.comment(name, "museum")]
    lines += [f"Mentioned: :doc:`{gallery.document(name)}`." for name in named]
    lines = lines or ["Not shown on a page."]
    lines += map(hunt_line, hunts(number))
    names = ", ".join(f"``{name}``" for name in tests().get(number, []))
    lines.append(f"Found by {names}." if names else "No test of the package: see the page.")
    return "\n\n".join(lines)


def table(letter: str) -> str:
    rows = [["number", "what was wrong", "what one saw", "where"]]
    for number in (number for number in numbers() if number[0] == letter):
        # The label stands before a paragraph, so that the paragraph carries the id.
        place = f".. _{label(number)}:\n\n{number}"
        rows.append([place, *numbers()[number], where(number)])
    return rst.table(rows, ":widths: 10 27 27 36", ":class: museum")


def index() -> str:
    return rst.render(
        "museum.rst",
        numbers=len(numbers()),
        numbered={source: table(letter) for letter, source in data()["sources"].items()},
        others=[exhibit for exhibit in exhibits() if not NUMBER.search(exhibit.title)],
        hunts=[one for one in exercises.written() if one.hunt and not NUMBER.search(one.hunt)],
        chapters=gallery.by_chapter(),
        link=link,
        about=about,
        hunt_line=hunt_line,
    )
