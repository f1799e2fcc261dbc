"""Drawings of rewards are sound SVG, inside their sheet, and say what they show."""

from __future__ import annotations

import re

import pytest
from drawings import drawing_functions, is_sound

from lm_from_scratch.instruments import reward_diagrams as diagrams
from lm_from_scratch.instruments.canvas import BLUE, GREEN, ORANGE, RED, Drawing

TWO = {"before": (0.0, 0.0), "after": (0.25, -0.75)}
DRAWINGS = {
    "group": diagrams.group("2 3>6", ["2*3", "2<3", "3*2"], [1, 0, 1], [0.33, -0.67, 0.33]),
    "pair": diagrams.pair("2 3>6", "2*3", "2+3", TWO),
}


@pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(diagrams)) == len(DRAWINGS)


def test_right_answers_are_green_and_pull_to_the_right() -> None:
    drawing = DRAWINGS["group"]
    assert drawing.says == "2 3>6: 2 of 3 answers are right: 2*3 +0.33, 2<3 -0.67, 3*2 +0.33"
    fills = re.findall(r'<rect [^>]*fill="([^"]*)"', drawing.html)
    assert fills == [GREEN, BLUE, RED, ORANGE, GREEN, BLUE]
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="12"', drawing.html)]
    assert widths == pytest.approx([46 * 0.33 / 0.67, 46, 46 * 0.33 / 0.67], abs=0.01)


def test_a_group_without_advantages_has_no_bars() -> None:
    drawing = diagrams.group("2 3>6", ["2*3", "3"], [1, 0], word="paid")
    is_sound(drawing)
    assert drawing.says == "2 3>6: 1 of 2 answers are paid: 2*3, 3"
    assert drawing.html.count("<rect") == 2


def test_equal_rewards_are_drawn_too() -> None:
    for rewards in ([0, 0], [1, 1]):
        is_sound(diagrams.group("2 3>6", ["2*3", "3"], rewards, [0, 0]))
    is_sound(diagrams.pair("2 3>6", "2*3", "2+3", {"before": (0.0, 0.0)}))


def test_bars_of_a_pair_begin_at_0_and_are_in_scale() -> None:
    drawing = DRAWINGS["pair"]
    assert drawing.says == "2 3>6: before: 2*3 +0.00, 2+3 +0.00; after: 2*3 +0.25, 2+3 -0.75"
    bars = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', drawing.html)
    starts, widths = zip(*((float(x), float(w)) for x, w in bars), strict=True)
    assert widths[2] == pytest.approx(widths[3] / 3, abs=0.01)
    assert starts[2] == 200 and starts[3] + widths[3] == pytest.approx(200, abs=0.01)
    assert "margin 1.00</text>" in drawing.html
