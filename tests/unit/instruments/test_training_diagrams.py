"""Drawings of training are sound, inside their sheet, and show what they say."""

from __future__ import annotations

import pytest
from drawings import SVG, drawing_functions, is_sound, parsed

from lm_from_scratch.instruments import training_diagrams
from lm_from_scratch.instruments.canvas import Drawing

DRAWINGS = {
    "state": training_diagrams.optimizer_state(128, 344, 32),
    "square state": training_diagrams.optimizer_state(64, 64, 64),
    "lives": training_diagrams.gradient_lives(["head", "block <1>", "embedding"]),
    "copies": training_diagrams.two_copies([["a & b", "c"], ["d"]], [-0.25, 0.5], "block 0"),
}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


@each_drawing
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)
    (svg,) = parsed(drawing).iter(f"{SVG}svg")
    assert svg.get("aria-label") == repr(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(training_diagrams)) == len(DRAWINGS) - 1  # one of them twice


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
