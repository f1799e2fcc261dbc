"""Drawings of configs are sound SVG, inside their sheet, and say what they show."""

from __future__ import annotations

import re

import pytest
from drawings import drawing_functions, is_sound, parsed, texts

from lm_from_scratch.instruments import config_diagrams as diagrams
from lm_from_scratch.instruments.canvas import Drawing

CONFIG = {
    "hidden_size": 2048, "num_experts": 512, "head_dim": 256, "num_experts_per_tok": 10,
    "tie_word_embeddings": False, "layer_types": ["linear", "linear", "linear", "full"] * 2,
}  # fmt: skip
LABELS = {"num_experts": "Experts", "num_experts_per_tok": "Experts", "layer_types": "Delta rule"}
DRAWINGS = {
    "explained": diagrams.explained(CONFIG, LABELS),
    "kept": diagrams.kept({"a": (2**31, 0), "b": (2**22, 2**21)}, 1000),
}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


@each_drawing
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(diagrams)) == len(DRAWINGS)


def test_lines_of_one_idea_are_together() -> None:
    found = [text for text in texts(parsed(DRAWINGS["explained"])) if ":" in text]
    keys = [text.partition(":")[0] for text in found]
    assert keys == [
        "hidden_size", "head_dim", "tie_word_embeddings", "num_experts", "num_experts_per_tok",
        "layer_types",
    ]  # fmt: skip
    assert found[2] == "tie_word_embeddings: false"
    assert found[-1] == "layer_types: 6 linear, 2 full"


def test_bars_are_as_long_as_their_bytes() -> None:
    html = DRAWINGS["kept"].html
    widths = [float(w) for w in re.findall(r'<rect [^>]*?width="([\d.]+)"', html)]
    assert widths[0] == 284 and widths[1] == pytest.approx(284 * 2**22 / 2**31, abs=0.1)
    assert DRAWINGS["kept"].says.endswith("a 2.00 GiB; b 6 MiB, of which 2 MiB state")
