"""Drawings of training are sound, inside their sheet, and show what they say."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from lm_from_scratch.instruments import training_diagrams
from lm_from_scratch.instruments.canvas import Drawing

DRAWINGS = {
    "state": training_diagrams.optimizer_state(128, 344, 32),
    "square state": training_diagrams.optimizer_state(64, 64, 64),
    "lives": training_diagrams.gradient_lives(["head", "block <1>", "embedding"]),
    "copies": training_diagrams.two_copies([["a & b", "c"], ["d"]], [-0.25, 0.5], "block 0"),
}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


def parsed(drawing: Drawing) -> ElementTree.Element:
    return ElementTree.fromstring(drawing._repr_html_())


@each_drawing
def test_a_drawing_stays_on_its_sheet_and_says_what_it_shows(drawing: Drawing) -> None:
    (svg,) = parsed(drawing).iter("{http://www.w3.org/2000/svg}svg")
    width, height = float(svg.get("width", 0)), float(svg.get("height", 0))
    assert svg.get("viewBox") == f"0 0 {width:g} {height:g}"
    assert width <= 343 and svg.get("aria-label") == repr(drawing)
    for mark in svg.iter():
        right = float(mark.get("x", 0)) + (
            float(mark.get("width", 0)) if mark.tag.endswith("rect") else 0
        )
        low = float(mark.get("y", 0)) + (
            float(mark.get("height", 0)) if mark.tag.endswith("rect") else 0
        )
        places = {right, *(float(mark.get(name, 0)) for name in ("x", "x1", "x2", "cx"))}
        heights = {low, *(float(mark.get(name, 0)) for name in ("y", "y1", "y2", "cy"))}
        assert all(-1 <= place <= width + 1 for place in places), mark.attrib
        assert all(-1 <= place <= height + 1 for place in heights), mark.attrib


def test_every_drawing_is_tested() -> None:
    functions = [
        name
        for name, one in vars(training_diagrams).items()
        if getattr(one, "__annotations__", {}).get("return") in (Drawing, "Drawing")
    ]
    assert len(functions) == len(DRAWINGS) - 1  # one of them twice


def test_the_state_is_counted() -> None:
    says = repr(DRAWINGS["square state"])
    assert f"{2 * 64 * 64:,} numbers" in says and f"{3 * 64 * 64:,}" in says


def test_one_gradient_lives_at_a_time_in_backward() -> None:
    """Of three weights: 1 + 2 + 3 gradients in the ordinary loop, 3 in the other, 1 in the key."""
    texts = [text.text for text in parsed(DRAWINGS["lives"]).iter() if text.tag.endswith("text")]
    assert texts.count("g") == 6 + 3 + 1


def test_both_copies_get_the_mean() -> None:
    html = DRAWINGS["copies"].html
    assert "−0.250" in html and "+0.500" in html and "+0.125, in both" in html
