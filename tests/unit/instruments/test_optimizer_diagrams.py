"""Drawings of optimizers are sound SVG, inside their sheet, and say what they show."""

from __future__ import annotations

import re

import pytest
from drawings import is_sound

from lm_from_scratch.instruments import optimizer_diagrams as diagrams
from lm_from_scratch.instruments.canvas import Drawing

PATH = [(-10.0, 1.0), (-9.0, -1.2), (0.4, 0.1)]
PARTS = {"weights": 13.5, "gradients": 13.5, "moments": 27.0}
DRAWINGS = {
    "valley": diagrams.valley({"<a>": PATH, "b": PATH[:2]}, 50.0),
    "magnitudes": diagrams.magnitudes([" the", "<b>"], [0.011, 2.2e-6]),
    "memory": diagrams.memory({"<a>": PARTS, "b": {"weights": 13.5}}, 24.0, "a card"),
    "step": diagrams.galore_step(384, 128, 32),
    "square step": diagrams.galore_step(128, 128, 32),
    "subspaces": diagrams.subspaces(200),
}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


@each_drawing
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)


def test_a_valley_says_where_each_way_ends() -> None:
    says = DRAWINGS["valley"].says
    assert says.startswith("<a>: from height 75 to 0.33 in 2 steps; b: from height 75")


def test_small_numbers_are_written_with_two_digits() -> None:
    assert DRAWINGS["magnitudes"].says == "' the' 0.011, '<b>' 0.0000022"
    assert "0.0000022" in DRAWINGS["magnitudes"].html


def test_memory_adds_up() -> None:
    says = DRAWINGS["memory"].says
    assert "<a>: 54.0 GB, of which weights 13.5, gradients 13.5, moments 27.0" in says
    assert says.endswith("a card: 24 GB")
    assert ">54.0<" in DRAWINGS["memory"].html


def test_a_step_is_in_scale() -> None:
    """A box of a matrix is as wide to its height as the matrix."""
    boxes = re.findall(r'width="([\d.]+)" height="([\d.]+)"', DRAWINGS["step"].html)
    ratios = {round(float(width) / float(height), 2) for width, height in boxes[1:]}
    assert {round(128 / 384, 2), round(32 / 384, 2), 0.25, 4.0} <= ratios
