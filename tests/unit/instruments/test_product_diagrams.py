"""Drawings of products: sound, inside their sheet, and right about who reads what."""

from __future__ import annotations

import pytest
from drawings import SVG, drawing_functions, is_sound, parsed

from lm_from_scratch.instruments import product_diagrams
from lm_from_scratch.instruments.canvas import BLUE, GREEN, ORANGE, Drawing

DRAWINGS = {
    "matrix units": product_diagrams.matrix_units(),
    "product": product_diagrams.tiled_product(("A", "B", "C"), (70, 40, 90), 32, (2, 2)),
    "rows": product_diagrams.rows_of_logits(8192, 151_936, 4096),
    "split": product_diagrams.split_vocabulary(45, 301, 32, 128, 64, (1, 2)),
}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


def area(drawing: Drawing, colour: str) -> float:
    boxes = [box for box in parsed(drawing).iter(f"{SVG}rect") if box.get("fill") == colour]
    return sum(float(box.get("width", 0)) * float(box.get("height", 0)) for box in boxes)


@each_drawing
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(product_diagrams)) == len(DRAWINGS)


@pytest.mark.parametrize("sizes", [(70, 40, 90), (20, 128, 384)])
def test_programs_of_a_product_read_each_tile_of_their_row_and_column(
    sizes: tuple[int, int, int],
) -> None:
    """All results are written once; A is read once for each column of tiles, B for each row."""
    block = 32
    down, _, across = (-(-size // block) for size in sizes)
    scale = min(2.4, 300 / (block * (-(-sizes[1] // block) + across))) ** 2
    programs = [
        product_diagrams.tiled_product(("A", "B", "C"), sizes, block, (i, j))
        for i in range(down)
        for j in range(across)
    ]
    read = {c: sum(area(one, c) for one in programs) / scale for c in (BLUE, ORANGE, GREEN)}
    rows, inner, columns = sizes
    assert read[BLUE] == pytest.approx(across * rows * inner, rel=1e-3)
    assert read[ORANGE] == pytest.approx(down * inner * columns, rel=1e-3)
    assert read[GREEN] == pytest.approx(rows * columns, rel=1e-3)


def test_the_last_block_of_a_row_is_masked() -> None:
    assert DRAWINGS["rows"].says.endswith(
        "38 blocks of 4,096; the last holds 384 logits, and the mask cuts off 3,712"
    )
    full = product_diagrams.rows_of_logits(8, 8192, 4096).says
    assert full.endswith("2 blocks of 4,096; the last holds 4,096 logits, and the mask cuts off 0")


def test_programs_share_the_vocabulary() -> None:
    said = [mark.text for mark in parsed(DRAWINGS["split"]).iter(f"{SVG}text")]
    assert said.count("m") == said.count("l") == 3  # one pair for each part
    assert "2 x 3 programs" in DRAWINGS["split"].says
