"""Drawings of the museum's stories are sound, inside their sheet, and say what they show."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

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
SVG = "{http://www.w3.org/2000/svg}"


def marks(drawing: Drawing, kind: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(drawing.html).iter(f"{SVG}{kind}"))


@each_drawing
def test_a_drawing_stays_on_its_sheet(drawing: Drawing) -> None:
    (svg,) = marks(drawing, "svg")
    width, height = float(svg.get("width", 0)), float(svg.get("height", 0))
    assert svg.get("viewBox") == f"0 0 {width:g} {height:g}"
    assert width <= 343 and svg.get("aria-label") == repr(drawing) != ""
    for mark in svg.iter():
        for name, limit in (("x", width), ("x1", width), ("x2", width), ("y", height),
                            ("y1", height), ("y2", height)):  # fmt: skip
            assert -1 <= float(mark.get(name, 0)) <= limit + 1, mark.attrib
        if mark.tag == f"{SVG}rect":
            assert float(mark.get("x", 0)) + float(mark.get("width", 0)) <= width
            assert float(mark.get("y", 0)) + float(mark.get("height", 0)) <= height


def test_every_drawing_is_tested() -> None:
    functions = [
        name
        for name, one in vars(story_diagrams).items()
        if getattr(one, "__annotations__", {}).get("return") in (Drawing, "Drawing")
    ]
    assert len(functions) == len(DRAWINGS)


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
