"""Drawings of attention kernels: sound, inside their sheet, and right about who reads what."""

from __future__ import annotations

import re

import pytest
from drawings import SVG, drawing_functions, is_sound, parsed, texts

from lm_from_scratch.instruments import flash_diagrams
from lm_from_scratch.instruments.canvas import Drawing

WORDS = ["⊢", "If", " <the>", " file", "\n", " does", " not", " exist", " &", "."]
DRAWINGS = {
    "causal tiles": flash_diagrams.causal_tiles(WORDS, 4),
    "split keys": flash_diagrams.split_keys(22, 4, 3),
    "paged keys": flash_diagrams.paged_keys([4, 1, 5], 4, 10, 4, 6),
}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


@each_drawing
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(flash_diagrams)) == len(DRAWINGS)


@pytest.mark.parametrize("keeps", ["queries", "keys"])
def test_programs_use_each_causal_score_once(keeps: str) -> None:
    """Ten tokens in tiles of 4: the programs together use 55 scores, and write no other."""
    drawing = flash_diagrams.causal_tiles(WORDS, 4, keeps)
    frames = list(parsed(drawing).iter(f"{SVG}svg"))
    assert len(frames) == 3
    used = [int(n) for n in re.findall(r"(\d+) scores are used", drawing.says)]
    masked = [int(n) for n in re.findall(r"(\d+) are computed and masked", drawing.says)]
    assert sum(used) == 10 * 11 / 2
    assert [a + b for a, b in zip(used, masked)] == [
        16 * n for n in ((1, 2, 3) if keeps == "queries" else (3, 2, 1))
    ]
    for frame, count in zip(frames, masked):
        assert texts(frame).count("×") == count


def test_splits_share_the_keys() -> None:
    """22 keys in 6 tiles of 4: two tiles for each split, and two masked places at the end."""
    drawing = DRAWINGS["split keys"]
    assert texts(parsed(drawing)).count("×") == 2
    spans = re.findall(r"reads keys (\d+)–(\d+)", drawing.says)
    assert [(int(a), int(b)) for a, b in spans] == [(0, 7), (8, 15), (16, 21)]
    more = flash_diagrams.split_keys(22, 4, 5).says  # the last two of five get no key
    assert "in 3 splits" in more


def test_pages_hold_the_keys_that_the_table_says() -> None:
    drawing = DRAWINGS["paged keys"]
    said = texts(parsed(drawing))
    assert "keys 0–3 in page 4; keys 4–7 in page 1; keys 8–9 in page 5" in drawing.says
    assert said.count("×") == 2  # 12 places of three tiles
    for key in range(10):  # once as a key of the row, once in its slot; some name a page too
        assert said.count(str(key)) >= 2
