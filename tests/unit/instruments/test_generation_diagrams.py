"""Drawings of generation are sound SVG or HTML, inside their sheet, and say what they show."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
from drawings import SVG, drawing_functions, is_sound, parsed

from lm_from_scratch.instruments import generation_diagrams as diagrams
from lm_from_scratch.instruments.canvas import Drawing

PIECES = [" a", "<b>", "\n", "&", "."]


def candidate(tokens: tuple[int, ...], p: float, parent: int, fate: str) -> SimpleNamespace:
    total = math.log(p)
    return SimpleNamespace(
        tokens=tokens, log_probability=total, score=total / len(tokens), parent=parent, fate=fate
    )


STEPS = [
    [
        candidate((0,), 0.4, 0, "kept"),
        candidate((1,), 0.3, 0, "kept"),
        candidate((2,), 0.2, 0, "dropped"),
        candidate((3,), 0.1, 0, "dropped"),
    ],
    [
        candidate((1, 3), 0.28, 1, "finished"),
        candidate((0, 4), 0.2, 0, "finished"),
        candidate((0, 2), 0.1, 0, "dropped"),
    ],
]  # fmt: skip
DRAWINGS = {
    "tree": diagrams.beam_tree("a <b>", STEPS, PIECES.__getitem__),
    "unfinished": diagrams.beam_tree("a", STEPS[:1], PIECES.__getitem__, dropped=0),
    "surprise": diagrams.surprise({"<real>": (["a", " &", "\n"], [0.0, 3.5, 20.0])}),
    "drafts": diagrams.drafts([([" a", "\n"], 1, "<b>"), ([], 0, " "), (["c"], 1, "d")], "if"),
    "overlap": diagrams.overlap(["<a>", " b", "c"], [0.5, 0.3, 0.2], [0.2, 0.8, 0.0]),
}  # fmt: skip
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


@each_drawing
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(diagrams)) == len(DRAWINGS) - 1  # one of them twice


def test_the_thick_line_of_a_tree_leads_to_the_best_that_finished() -> None:
    svg = next(parsed(DRAWINGS["tree"]).iter(f"{SVG}svg"))
    bold = [mark.text for mark in svg if mark.get("font-weight")]
    assert bold == ["a␣<b>", "<b>", "&"]
    widths = [mark.get("stroke-width") for mark in svg if mark.tag.endswith("line")]
    assert widths.count("3") == 2
    dashed = [mark for mark in svg if mark.get("stroke-dasharray")]
    assert len(dashed) == 3


def test_a_tree_shows_as_many_dropped_ones_as_wanted() -> None:
    assert "dropped" not in repr(DRAWINGS["unfinished"])
    assert repr(DRAWINGS["tree"]).count("dropped") == 3


def test_what_surprises_more_is_darker_up_to_the_end_of_the_scale() -> None:
    html = DRAWINGS["surprise"].html
    tints = [float(one) for one in re.findall(r"0, ([\d.]+)\); border", html)]
    assert tints[0] == 0 < tints[1] < tints[2] == tints[-1]
    assert "7.8 bits a token" in html


def test_a_rejected_draft_is_struck_and_what_follows_it_left_out() -> None:
    drawing = diagrams.drafts([([" a", " b", " c"], 1, " d")])
    (struck,) = parsed(drawing).iter("s")
    (own,) = parsed(drawing).iter("b")
    assert (struck.text, own.text) == (" b", " d")
    assert "c" not in "".join(parsed(drawing).itertext())
    assert repr(drawing) == " a[ b] d"


def test_bars_of_what_comes_out_are_as_long_as_p() -> None:
    """Blue and orange together, in units of the largest probability."""
    svg = next(parsed(DRAWINGS["overlap"]).iter(f"{SVG}svg"))
    bars = [mark for mark in svg if mark.tag.endswith("rect") and mark.get("x") != "226"]
    lengths: dict[str, float] = {}
    for bar in bars:
        if bar.get("fill") != "none" and bar.get("height") == "16":
            row = str(bar.get("y"))
            lengths[row] = lengths.get(row, 0.0) + float(bar.get("width", 0))
    assert [round(one / 178 * 0.8, 2) for one in lengths.values()] == [0.5, 0.3, 0.2]
