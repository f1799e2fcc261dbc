"""Drawings are sound SVG or HTML, inside their sheet, and say what they show."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from drawings import drawing_functions, is_sound, parsed

from lm_from_scratch.instruments import diagrams
from lm_from_scratch.instruments.diagrams import Canvas, Drawing

SIZES = SimpleNamespace(
    n_layer=2, n_embd=8, n_head=2, n_kv_head=1, vocab_size=9, intermediate_size=16
)
PARTS = ("lookups", "norm", "attention", "mlp", "stream", "logits")
DRAWINGS = {
    "tokens": diagrams.tokens(["<a>", " b&"], [3, 4]),
    "lines": diagrams.lines(["<a>", " b"], ["<a>", " b"], [[1.0, 0.0], [0.3, 0.7]]),
    "one line": diagrams.lines(["a", " b"], ["a", " b"], [[1.0, 0.0], [0.3, 0.7]], chosen=1),
    "gates": diagrams.gates(["a", " b"], [3, 5], [[0.0, 1.0], [0.5, -0.1]]),
    "shared heads": diagrams.shared_heads(4, [4, 2, 1]),
    "GPT-2": diagrams.gpt2_blocks(2, {part: f"#{part}" for part in PARTS}),
    "Qwen2": diagrams.qwen2_blocks(2, ["#1", "#2", "#3", "#4", "#5"]),
    "sizes": diagrams.model_sizes({"tiny": SIZES}, {"tiny": 1000}),
    "clocks": diagrams.clock_hands((3, 5), (13, 15)),
    "speeds": diagrams.hand_speeds({"pair 0": 6.28, "pair 1": 63.0}, 6),
    "pairs": diagrams.feature_pairs({"half": [0, 1, 0, 1]}),
    "merges": diagrams.merges([("l", "o"), ("lo",)], ["letters", "l+o"]),
    "repeats": diagrams.repeats(["a", " b", "a", " b"], 2),
    "bars": diagrams.bars(["<a>", " b"], [0.75, 0.25]),
    "cells": diagrams.head_cells(["right"], [[[0, 1], [0, 1]]]),
    "shifted": diagrams.shifted(["a", " b"], " c"),
    "frames": diagrams.online_softmax_frames(["a", "b", "c"], [1.0, -2.0, 3.0], [1.0, 2.0, 3.0], 2),
    "packed": diagrams.packed_row([["a", "b"], ["c"]], 4),
    "padded": diagrams.padded_rows([["a", " b"], ["<c>"]], "pad", [1, 0]),
    "versions": diagrams.versions({"<a>": [" one", "\n"], "b": [" one", " <two>"]}),
    "labelled": diagrams.labelled(["if", " <x>"], ["keyword", "name"], ["keyword", "number"]),
}  # fmt: skip
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


@each_drawing
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(diagrams)) == len(DRAWINGS) - 1  # one of them twice


def test_a_sheet_with_links_is_no_image() -> None:
    """The parts of an image cannot be reached; those of a group can."""
    canvas = Canvas(10, 10, "a & b")
    assert 'role="img" aria-label="a &amp; b"' in canvas.drawing().html
    canvas.begin_link("#x")
    canvas.box(1, 1, 5, 5)
    canvas.end_link()
    assert 'role="group"' in canvas.drawing().html
    assert parsed(canvas.drawing()).find(".//*[@href='#x']") is not None


def test_a_wider_line_is_a_larger_weight() -> None:
    drawn = diagrams.lines(["a", "b"], ["a", "b"], [[1.0, 0.0], [0.3, 0.7]]).html
    widths = [float(width) for width in re.findall(r'stroke-width="([\d.]+)"', drawn)]
    assert len(widths) == 3 and widths[0] > widths[2] > widths[1]


def test_an_arrow_points_to_its_end() -> None:
    canvas = Canvas(10, 10, "arrow")
    canvas.line(0, 0, 10, 0, arrow=True)
    points = re.search(r'points="([^"]*)"', canvas.drawing().html)
    assert points and points[1].split()[0] == "10,0"


def test_a_version_is_marked_from_its_first_other_token_on() -> None:
    drawing = diagrams.versions({"a": ["x", "y", "z"], "b": ["x", "y", "z"], "c": ["x", "o", "z"]})
    marked = re.findall(r'<span style="background[^>]*>([^<]*)</span>', drawing.html)
    assert marked == ["oz"]
    assert drawing.says == "a: 'xyz'\nb: 'xyz'\nc: 1 tokens, then 'oz'"


def test_a_text_that_ends_early_is_no_other_text() -> None:
    assert diagrams.same_tokens(["x", "y"], ["x"]) == 1
    assert diagrams.same_tokens([], []) == 0
