"""Drawings of the museum's stories are sound, inside their sheet, and say what they show."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from drawings import SVG, drawing_functions, is_sound, parsed

from lm_from_scratch.instruments import story_diagrams
from lm_from_scratch.instruments.canvas import BLUE, ORANGE, RED, Drawing

NAN = math.nan
TABLES = {"<one>": [[NAN, NAN], [1.0, -2.0]], "two": [[NAN, NAN], [NAN, 0.0]]}
WORK = {"<A>": [1, 2, 3, 4], "B": [1, 2, 3, 1]}
DRAWINGS = {
    "nan": story_diagrams.nan_spreads(["pad", " <a>"], TABLES, hidden=1),
    "written": story_diagrams.written(WORK),
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
    assert len(drawing_functions(story_diagrams)) == len(DRAWINGS)


def test_each_nan_is_a_red_box() -> None:
    fills = [box.get("fill") for box in marks(DRAWINGS["nan"], "rect")]
    assert fills.count(RED) == 5 and fills.count(BLUE) == 3
    assert repr(DRAWINGS["nan"]) == "<one>: NaN in 1 of 2 rows; two: NaN in 2 of 2 rows"
    assert [text.text for text in marks(DRAWINGS["nan"], "text")].count("NaN") == 5


def test_a_column_is_as_high_as_its_step() -> None:
    boxes = marks(DRAWINGS["written"], "rect")
    high = {colour: [float(box.get("height", 0)) for box in boxes if box.get("fill") == colour]
            for colour in (BLUE, ORANGE)}  # fmt: skip
    assert len(high[BLUE]) == 8 and len({*high[BLUE]}) == 1
    again = [round(height / high[BLUE][0]) for height in high[ORANGE]]
    assert again == [1, 2, 3, 1, 2]
    said = "<A>: 10 writes in 4 steps, at most 4 in one; B: 7 writes in 4 steps, at most 3 in one"
    assert repr(DRAWINGS["written"]) == said
