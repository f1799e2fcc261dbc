"""The bug museum: a card for every mistake, by what one sees.

`museum.toml` says what is on a card. In its section "Bug museum" a page shows numbers, as "(G4)",
and elsewhere it may mention them (gallery/pages.py); a hunt has them in its exercise. Which tests
find a mistake, its `tests` say. A number with an M needs none: its section asserts it.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from gallery import pages
from gallery.pages import Section

from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import Exercise, exercises

ONE = r"[GQKLTM][1-9]\d{0,2}"
NUMBER = re.compile(rf"\b({ONE})\b")
#: How a page says which mistakes a section of its museum shows: "(G1, G2)".
SHOWN = re.compile(rf"\(((?:{ONE}(?:,\s+)?)+)\)")


@dataclass(frozen=True)
class Mistake:
    """What one sees, what was wrong, the line that fixes it, and the tests that find it."""

    kind: str
    saw: str
    wrong: str
    old: str
    new: str
    tests: Sequence[str] = ()


@cache
def data() -> dict[str, Any]:
    return tomllib.loads((pages.DOCS / "museum.toml").read_text(encoding="utf-8"))


@cache
def numbers() -> dict[str, Mistake]:
    return {key: Mistake(**card) for key, card in data().items() if NUMBER.fullmatch(key)}


@cache
def exhibits() -> list[Section]:
    """Every mistake of every page's museum, in the order of the pages."""
    sections = [section for name in pages.in_order() for section in pages.sections(name)]
    return [section for section in sections if section.inside == "Bug museum"]


def shown(exhibit: Section) -> list[str]:
    """The numbers of a section in a page's museum."""
    return [number for group in SHOWN.findall(exhibit.text) for number in NUMBER.findall(group)]


def mentions(number: str) -> list[str]:
    """The pages that mention a mistake without showing it."""
    return [name for name in pages.in_order() if number in pages.listed(name, "museum")]


def chapters(number: str) -> list[str]:
    """Where a reader looks for a mistake: the chapters of its pages, or the one of its letter."""
    names = [one.page for one in exhibits() if number in shown(one)] + mentions(number)
    return [*dict.fromkeys(name.partition("/")[0] for name in names)] or [
        data()["chapters"][number[0]]
    ]


def label(number: str) -> str:
    return f"bug-{number.lower()}"


def with_links(text: str) -> str:
    """The numbers of a text in MyST become links to their place in the index."""
    return NUMBER.sub(lambda number: f"{{ref}}`{number[1]} <{label(number[1])}>`", text)


def fix(number: str) -> str:
    """The line that fixes a mistake, and the place of its card, for a story."""
    mistake, place = numbers()[number], data()["sources"][number[0]]
    return "\n".join([
        ".. code-block:: diff", "", f"   - {mistake.old}", f"   + {mistake.new}", "",
        ".. rst-class:: bug-number", "",
        f":ref:`{number} <{label(number)}>` in the museum, in {place}", "",
    ])  # fmt: skip


# -- the page --------------------------------------------------------------------------------


def hunt_line(one: Exercise) -> str:
    title = source.title(one.name).replace("`", "").removeprefix("Bug hunt: ")
    return f"Hunt: :doc:`{title} </exercises/{one.name}>`."


def where(number: str, stories: Sequence[Any] = ()) -> str:
    """Where to go on from a card. Each of the ``stories`` knows its numbers. The title of a section
    is not escaped: it holds no markup."""
    lines = [
        f"Story: :doc:`{s.title} </stories/{s.name}>`." for s in stories if number in s.numbers
    ]
    for one in exhibits():
        if number in shown(one):
            address = f"{pages.document(one.page)[1:]}.html#{one.anchor}"
            lines.append(f"Shown: `{one.plain} <{address}>`__.")
    lines += [f"Mentioned: :doc:`{pages.document(name)}`." for name in mentions(number)]
    lines += [hunt_line(one) for one in exercises() if number in NUMBER.findall(one.hunt)]
    return "\n\n".join(lines)


def cards() -> dict[str, list[str]]:
    """The numbers by what one sees, in the order of the course."""
    order = [folder.name for folder in [*pages.chapters(), pages.GPU]]
    in_order = sorted(numbers(), key=lambda number: order.index(chapters(number)[0]))
    return {kind: [n for n in in_order if numbers()[n].kind == kind] for kind in data()["kinds"]}


def index(stories: Sequence[Any]) -> dict[str, Any]:
    """What the page shows, with a list of the ``stories`` (stories.py)."""
    return {
        "mistakes": numbers(),
        "kinds": data()["kinds"],
        "sources": data()["sources"],
        "cards": cards(),
        "label": label,
        "where": partial(where, stories=stories),
        "stories": stories,
        "chapters_of": chapters,
        "hunts": [one for one in exercises() if one.hunt and not NUMBER.search(one.hunt)],
        "folders": {f.name: pages.header_text(f)[0] for f in [*pages.chapters(), pages.GPU]},
        "hunt_line": hunt_line,
    }
