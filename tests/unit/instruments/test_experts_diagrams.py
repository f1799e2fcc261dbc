"""Drawings of experts are sound SVG or HTML, inside their sheet, and say what they show."""

from __future__ import annotations

import re

import pytest
from drawings import drawing_functions, is_sound

from lm_from_scratch.instruments import experts_diagrams as diagrams
from lm_from_scratch.instruments.canvas import ORANGE, Drawing

DRAWINGS = {
    "visited": diagrams.visited(["If", " the", " <b>"], [3, 0, 15]),
    "mixture": diagrams.mixture(" list", [0.1 * e - 0.3 for e in range(16)], {15: 0.7, 0: 0.3}),
    "loads": diagrams.loads({"plain": [9, 1, 1, 1], "balanced": [3, 3, 3, 3]}),
}


@pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(diagrams)) == len(DRAWINGS)


def test_words_have_the_numbers_of_their_experts() -> None:
    drawing = DRAWINGS["visited"]
    assert drawing.says == "If[3]  the[0]  <b>[15]"
    assert re.findall(r"<small>(\d+)</small>", drawing.html) == ["3", "0", "15"]


def test_only_chosen_experts_are_filled_and_weighed() -> None:
    drawing = DRAWINGS["mixture"]
    assert drawing.says == "' list' visits 2 of 16 experts: expert 15 with 0.70, expert 0 with 0.30"
    boxes = re.findall(r'<rect [^>]*height="40"[^>]*fill="([^"]*)"', drawing.html)
    assert [e for e, fill in enumerate(boxes) if fill == ORANGE] == [0, 15]
    assert "0.70</text>" in drawing.html and "0.30</text>" in drawing.html


def test_bars_are_relative_to_the_mean() -> None:
    drawing = DRAWINGS["loads"]
    assert drawing.says == (
        "plain: the busiest expert has 3.0 times the mean; "
        "balanced: the busiest expert has 1.0 times the mean"
    )
    heights = [float(h) for h in re.findall(r'<rect [^>]*height="([\d.]+)"', drawing.html)]
    assert heights == pytest.approx([62, 62 / 9, 62 / 9, 62 / 9, *[62 / 3] * 4], abs=0.01)
