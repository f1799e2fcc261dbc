"""Drawings of spare attention are sound SVG, inside their sheet, and say what they show."""

from __future__ import annotations

import re

import pytest
from drawings import drawing_functions, is_sound, parsed, texts

from lm_from_scratch.instruments import sink_diagrams as diagrams
from lm_from_scratch.instruments.canvas import BLUE, ORANGE, Drawing

DRAWINGS = {
    "budget": diagrams.budget(["a", "b", "c"], [0.0, 0.0, 0.0], 0.0),
    "kept": diagrams.kept(list("abcdefgh"), 3, 1),
    "gate places": diagrams.gate_places(3),
}


@pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(diagrams)) == len(DRAWINGS)


def test_a_sink_takes_its_part_of_the_budget() -> None:
    says = DRAWINGS["budget"].says
    assert says.startswith("keys alone: a 33%, b 33%, c 33%; with a sink of 0: a 25%")
    assert says.endswith("nothing 25%")
    assert "nothing" in texts(parsed(DRAWINGS["budget"]))


def test_a_window_keeps_the_first_and_the_latest() -> None:
    """8 tokens, 3 latest and 1 first: 1 + 2 + 6 x 3 latest cells, 5 rows with the first apart."""
    colours = re.findall(r'<rect [^>]*width="21"[^>]*fill="(#[^"]*|none)"', DRAWINGS["kept"].html)
    assert colours.count(ORANGE) == 1 + 2 + 6 * 3
    assert colours.count(BLUE) == 5
    assert colours.count("none") == 36 - 21 - 5
