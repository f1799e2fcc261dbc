"""Drawings of latent attention are sound, inside their sheet, and say what they show."""

from __future__ import annotations

import re

import pytest
from drawings import drawing_functions, is_sound, parsed, texts

from lm_from_scratch.instruments import latent_diagrams as diagrams
from lm_from_scratch.instruments.canvas import BLUE, ORANGE, Drawing

MODELS = [("one", "MHA", 2**20), ("two", "MLA", 2**18), ("three", "MQA", 12)]
DRAWINGS = {
    "bars": diagrams.bars(MODELS),
    "one token": diagrams.one_token(7168, 512, 128, 128, 64, 99),
}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


@each_drawing
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(diagrams)) == len(DRAWINGS)


def test_bars_are_as_long_as_their_bytes_and_those_of_latents_orange() -> None:
    drawing = DRAWINGS["bars"]
    found = re.findall(r'<rect [^>]*width="([\d.]+)" [^>]*fill="(#\w+)"', drawing.html)
    assert [(float(width), colour) for width, colour in found] == [
        (327, BLUE), (pytest.approx(327 / 4), ORANGE), (2, BLUE)
    ]  # fmt: skip
    assert drawing.says.endswith("one (MHA) 1 MiB; two (MLA) 256 KiB; three (MQA) 12 B")


def test_a_token_keeps_the_latent_and_the_turned_key() -> None:
    drawing = DRAWINGS["one token"]
    words = texts(parsed(drawing))
    assert "kept for each token: 576 numbers" in words and words.count("value 99") == 3
    assert f"{128 * (128 + 64 + 99):,} numbers" in drawing.says


@pytest.mark.parametrize(
    ("n", "words"), [(12, "12 B"), (8192, "8 KiB"), (1536, "1.5 KiB"), (2.5 * 2**20, "2.5 MiB")]
)
def test_sizes_are_said_in_one_unit(n: float, words: str) -> None:
    assert diagrams.size(n) == words
