"""Drawings of weights are sound SVG, inside their sheet, and say what they show."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from lm_from_scratch.instruments import weight_diagrams
from lm_from_scratch.instruments.canvas import Drawing

DRAWINGS = {
    "held": weight_diagrams.held_tensors("Tensor (2, 3)", {"codes": ["int8", "<6>"], "scale": []}),
    "doors": weight_diagrams.two_doors(["F.linear"], ["detach", "clone"], ["all else:", "error"]),
    "stations": weight_diagrams.load_stations([f"#{i}" for i in range(5)]),
    "choices": weight_diagrams.choices({"a\nb": "1 c", "<d>": "2 e\nf\ng"}, ("case", "use")),
    "tall": weight_diagrams.low_rank(512, 128, 8, "4 bits"),
    "wide": weight_diagrams.low_rank(128, 512, 1, "4 bits"),
}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


@each_drawing
def test_a_drawing_is_sound_and_says_what_it_shows(drawing: Drawing) -> None:
    assert ElementTree.fromstring(drawing._repr_html_()).tag == "div"
    assert repr(drawing).strip()


@each_drawing
def test_a_drawing_stays_on_its_sheet(drawing: Drawing) -> None:
    (svg,) = ElementTree.fromstring(drawing.html).iter("{http://www.w3.org/2000/svg}svg")
    width, height = float(svg.get("width", 0)), float(svg.get("height", 0))
    assert svg.get("viewBox") == f"0 0 {width:g} {height:g}"
    assert width <= 343 and svg.get("aria-label")
    for mark in svg.iter():
        size = {name: float(mark.get(name, 0)) for name in ("width", "height")}
        if mark is not svg and mark.tag.endswith("rect"):
            assert 0 <= float(mark.get("x", 0)) <= width - size["width"], mark.attrib
            assert 0 <= float(mark.get("y", 0)) <= height - size["height"], mark.attrib
        places = {name: float(mark.get(name, 0)) for name in ("x", "x1", "x2", "cx")}
        heights = {name: float(mark.get(name, 0)) for name in ("y", "y1", "y2", "cy")}
        assert all(-1 <= place <= width + 1 for place in places.values()), mark.attrib
        assert all(-1 <= place <= height + 1 for place in heights.values()), mark.attrib


def test_every_drawing_is_tested() -> None:
    functions = [
        name
        for name, one in vars(weight_diagrams).items()
        if getattr(one, "__annotations__", {}).get("return") in (Drawing, "Drawing")
    ]
    assert len(functions) == len(DRAWINGS) - 1  # one of them twice


def test_matrices_are_in_scale() -> None:
    boxes = [
        (float(mark.get("width", 0)), float(mark.get("height", 0)))
        for mark in ElementTree.fromstring(DRAWINGS["tall"].html).iter()
        if mark.tag.endswith("rect")
    ]
    (wide, high), b, a = boxes
    assert high == 4 * wide
    assert b == pytest.approx((wide / 16, high)) and a == pytest.approx((wide, wide / 16))


def test_stations_lead_to_their_sections() -> None:
    links = [mark.get("href") for mark in ElementTree.fromstring(DRAWINGS["stations"].html).iter()]
    assert [link for link in links if link] == ["#0", "#1", "#2", "#3", "#4"]
