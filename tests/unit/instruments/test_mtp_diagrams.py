"""Drawings of multi-token prediction are sound, inside their sheet, and say what they show."""

from __future__ import annotations

import pytest
from drawings import drawing_functions, is_sound, parsed, texts

from lm_from_scratch.instruments import mtp_diagrams as diagrams
from lm_from_scratch.instruments.canvas import Drawing

WORDS = ["If", " the", " file", " does", " not"]
DRAWINGS = {
    "self draft": diagrams.self_draft("If the file does not", [" exist", ",", " an"]),
    "targets": diagrams.targets(WORDS, (0, 1, 2)),
}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


@each_drawing
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(diagrams)) == len(DRAWINGS)


def test_a_draft_comes_from_the_state_and_the_word_before_it() -> None:
    assert DRAWINGS["self draft"].says == (
        "The model reads 'If the file does not'; its state h gives ' exist'. "
        "h and ' exist' give h¹, which drafts ','. h¹ and ',' give h², which drafts ' an'."
    )
    assert texts(parsed(DRAWINGS["self draft"])).count("one block") == 2


def test_targets_end_earlier_with_every_depth() -> None:
    said = DRAWINGS["targets"].says
    assert "Depth 0: after 'If' ' the'," in said
    assert said.endswith("Depth 2: after ' file' ' does', after ' does' ' not'")
    assert texts(parsed(DRAWINGS["targets"])).count("–") == (0 + 1) + (1 + 2) + (2 + 3)
