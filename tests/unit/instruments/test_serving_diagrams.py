"""Drawings of generation are sound, inside their sheet, and say what they show."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from drawings import SVG, drawing_functions, is_sound, parsed

from lm_from_scratch.instruments import serving_diagrams
from lm_from_scratch.instruments.canvas import Drawing

PASSES: list[list[int | None]] = [[0, 1], [0, None], [0, 2]]
TABLES = {"<A>": [2, 0], "B": [2, 1]}
TEXTS = {"<A>": ["a", " b", "c", "d", "<e>"], "B": ["a", " b", *"cdefgh"]}
DRAWINGS = {
    "batches": serving_diagrams.batch_timelines({"<one>": PASSES, "two": PASSES[:1]}, "abc"),
    "blocks": serving_diagrams.page_table(TEXTS, TABLES, 5, 4, kept=[3]),
}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


def marks(drawing: Drawing, kind: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(drawing.html).iter(f"{SVG}{kind}"))


@each_drawing
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing, beyond=0)
    (svg,) = parsed(drawing).iter(f"{SVG}svg")
    assert svg.get("aria-label") == repr(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(serving_diagrams)) == len(DRAWINGS)


def test_passes_and_idle_places_are_counted() -> None:
    said = repr(DRAWINGS["batches"])
    assert said == "<one>: 3 passes, 1 places idle; two: 1 passes, 0 places idle"


def test_a_bar_is_as_long_as_its_request() -> None:
    boxes = re.findall(r'<rect x="([\d.]+)" y="24" width="([\d.]+)"', DRAWINGS["batches"].html)
    (start, whole), (_, prompt) = [tuple(map(float, box)) for box in boxes]
    assert (start, whole, prompt) == (44, 296, 99)  # three passes, one of them over the prompt


def test_a_block_says_what_is_in_it() -> None:
    words = [mark.text for mark in marks(DRAWINGS["blocks"], "text")]
    assert words.count("a␣bcd") == 3  # in two rows, and once in the pool
    assert words.count("<e>") == 2
    assert words.count("kept") == words.count("free") == 1
    assert repr(DRAWINGS["blocks"]).startswith("3 of 5 blocks in use; <A> is in the blocks [2, 0]")


def test_slots_without_a_token_have_no_colour() -> None:
    filled = [
        float(mark.get("width", 0))
        for mark in marks(DRAWINGS["blocks"], "rect")
        if mark.get("fill-opacity") == "0.25"
    ]
    assert min(filled) == max(filled) / 4
