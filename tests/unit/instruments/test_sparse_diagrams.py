"""Drawings of sparse attention are sound, and say and mark what they show."""

from __future__ import annotations

import pytest
from drawings import drawing_functions, is_sound

from lm_from_scratch.instruments import sparse_diagrams as diagrams
from lm_from_scratch.instruments.canvas import ORANGE, Drawing

PIECES = ["⊢", "Note", "\n", " that <b>", " it"]
DRAWINGS = {
    "where it looks": diagrams.where_it_looks(PIECES, [0.5, 0.1, 0.0, 0.3, 0.1], [0, 3]),
    "scoring": diagrams.scoring(
        PIECES, [[1.0, -2.0, 0.5, -1.0, -0.1], [-1.0, -1.0, 2.0, 1.0, -3.0]], [1.0, -0.5], 2
    ),
}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


@each_drawing
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(diagrams)) == len(DRAWINGS)


def test_the_share_of_the_framed_tokens_is_said() -> None:
    drawing = DRAWINGS["where it looks"]
    assert drawing.says.startswith("5 tokens; the framed 2 have 80% of the attention")
    assert drawing.html.count(f"outline: 1.5px solid {ORANGE}") == 2


def test_what_is_below_zero_counts_as_zero_and_the_latest_of_equal_scores_wins() -> None:
    """Scores 1, 0, -0.5, -0.5, 0: the best is the first, and of the two zeros the last."""
    drawing = DRAWINGS["scoring"]
    assert drawing.says.endswith("chosen: '⊢', ' it'")
    assert drawing.html.count(f'fill="{ORANGE}"') == 2
