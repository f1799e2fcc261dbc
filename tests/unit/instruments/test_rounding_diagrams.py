"""Drawings of rounding are sound SVG or HTML, inside their sheet, and say what they show."""

from __future__ import annotations

import re

import pytest
from drawings import drawing_functions, is_sound

from lm_from_scratch.instruments import rounding_diagrams as diagrams
from lm_from_scratch.instruments.canvas import ORANGE, Drawing

VALUES = [-1.2, 0.1, 0.35, 2.1]
DRAWINGS = {
    "ruler": diagrams.ruler(VALUES, [2, 4, 8], shown=[3]),
    "shared rulers": diagrams.shared_rulers(["a", " b", " c", " d", " e"], 4, 2),
}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


@each_drawing
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(diagrams)) == len(DRAWINGS)


def test_arrows_of_a_ruler_lead_to_the_nearest_marks() -> None:
    """2 bits from -1.2 to 2.1 have marks at -1.2, -0.1, 1.0 and 2.1."""
    drawing = diagrams.ruler(VALUES, [2], shown=[3])
    assert drawing.says == "4 numbers from -1.20 to 2.10; 2 bits, step 1.10: codes [0, 1, 1, 3]"
    arrows = re.findall(r'x2="([\d.]+)" y2="56"', drawing.html)
    left, right = 12, 331
    wanted = [left + (right - left) * code / 3 for code in (0, 1, 1, 3)]
    assert [float(x) for x in arrows] == pytest.approx(wanted, abs=0.01)
    assert drawing.html.count(f'<circle cx="331" cy="30" r="4.5" fill="{ORANGE}"') == 1


def test_rulers_over_tokens_leave_the_last_ones_without() -> None:
    """5 tokens of 4 features in groups of 2: 10 boxes above, 2 x 4 below, and 4 cells that wait."""
    drawing = DRAWINGS["shared rulers"]
    assert len(re.findall(r'<rect [^>]*fill="#', drawing.html)) == 10 + 8
    assert len(re.findall(r'<rect [^>]*fill="none"', drawing.html)) == 4
