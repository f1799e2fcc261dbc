"""Drawings of kernels: sound, inside their sheet, and right about programs, masks and traffic."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from drawings import SVG, drawing_functions, is_sound, parsed

from lm_from_scratch.instruments import kernel_diagrams
from lm_from_scratch.instruments.canvas import Drawing

INF = float("inf")
ROW = [0.5, -1.0, 0.0, 2.0, 1.0, -3.0, 1.5, 0.0]
TENSORS = {"θ": ("<weights>", True), "g": ("gradient", False)}
BY_ROW = [(m, n) for m in range(32) for n in range(38)]
TWO = [("silu", ["g"], ["s"]), ("product", ["s", "u"], ["y"])]
ONE = [("both", ["g", "u"], ["y"])]
LAYOUTS = {"a": ((2, 3), (3, 1)), "b": ((3, 2), (1, 3)), "c": ((2, 3), (0, 0))}
DRAWINGS = {
    "rope": kernel_diagrams.rope_rows(4, 3, 3, 8, 4),
    "places": kernel_diagrams.memory_places({"<a>": [[0, 1], [2, 3]], "b": [[0, 2], [1, 3]]}),
    "optimizer": kernel_diagrams.optimizer_blocks(TENSORS, 10, 4),
    "tile": kernel_diagrams.tile_steps(5, 7, 7, 3, 3, (1, 1), 1),
    "order": kernel_diagrams.first_programs({"a": BY_ROW, "b": BY_ROW}, 32, 38, 132),
    "programs": kernel_diagrams.programs_on_a_vector(37, 16),
    "round trips": kernel_diagrams.round_trips({"two": TWO, "one": ONE}),
    "pointer": kernel_diagrams.pointer(ROW, 5),
    "masked store": kernel_diagrams.masked_store(37, 16),
    "strides": kernel_diagrams.strides(LAYOUTS),
    "rows": kernel_diagrams.row_programs([[1.0, -INF], [0.5, 2.0]], ["<If>", " the"], 4),
    "online sum": kernel_diagrams.online_sum_frames(ROW, 3),
    "blocks of rows": kernel_diagrams.row_blocks(5, 6, 2, 8),
    "sums": kernel_diagrams.sums_across(6, 3),
}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


def texts(drawing: Drawing) -> list[str]:
    return [mark.text or "" for mark in parsed(drawing).iter(f"{SVG}text")]


@each_drawing
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(kernel_diagrams)) == len(DRAWINGS)


def masked(frame: ElementTree.Element) -> int:
    """The places that are crossed out, by two lines each."""
    return sum(mark.get("stroke-opacity") == "0.6" for mark in frame.iter(f"{SVG}line")) // 2


def test_rows_and_pairs_outside_are_masked() -> None:
    """Two programs of 8 rows and 2 x 4 numbers; inside are 12 rows of 2 x 3."""
    assert masked(parsed(DRAWINGS["rope"])) == 2 * (2 * 8 * 4 - 12 * 3)
    whole = kernel_diagrams.rope_rows(2, 4, 4, 8, 4)
    assert masked(parsed(whole)) == 0


def test_the_last_program_masks_what_is_beyond_the_last_weight() -> None:
    assert masked(parsed(DRAWINGS["optimizer"])) == len(TENSORS) * (3 * 4 - 10)
    assert "writes over its block of θ;" in DRAWINGS["optimizer"].says
    words = texts(DRAWINGS["optimizer"])
    assert words.count("read") == 2 and words.count("written") == 1


def test_a_tile_masks_rows_columns_and_the_end_of_k() -> None:
    """Rows 3 to 5 of 5, columns 3 to 5 of 7, and three steps over 7 along K."""
    frames = list(parsed(DRAWINGS["tile"]).iter(f"{SVG}svg"))
    assert len(frames) == 3
    for step, frame in enumerate(frames):
        beyond = max(3 * (step + 1) - 7, 0)
        of_a, of_b, of_c = 9 - 2 * (3 - beyond), 3 * beyond, 3
        assert masked(frame) == of_a + of_b + of_c


def test_first_programs_need_what_they_touch() -> None:
    assert DRAWINGS["order"].says.startswith("a: 132 programs need 4 rows and 38 columns;")


def test_every_number_belongs_to_one_program() -> None:
    said = [text for text in texts(DRAWINGS["programs"]) if text.isdigit()]
    assert said == [str(i) for i in range(37)]
    assert DRAWINGS["programs"].html.count("<line") == 2 * (3 * 16 - 37)
    assert "mask" not in " ".join(texts(kernel_diagrams.programs_on_a_vector(32, 16)))


def test_tensors_that_move_are_counted() -> None:
    said = texts(DRAWINGS["round trips"])
    assert "5 tensors move" in said and "3 tensors move" in said
    assert DRAWINGS["round trips"].html.count("<polygon") == 5 + 3


def test_offsets_are_bytes_apart() -> None:
    said = texts(DRAWINGS["pointer"])
    assert "1000" in said and "1028" in said
    assert DRAWINGS["pointer"].says.endswith("the addresses 1000 to 1016, 4 bytes apart")


def test_a_mask_saves_the_neighbour() -> None:
    said = texts(DRAWINGS["masked store"])
    assert said.count("?") == said.count("−1") == 11 and said.count("y") == 10


def test_strides_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    memory = torch.arange(6)
    for shape, strides in LAYOUTS.values():
        table = memory.as_strided(shape, strides).tolist()
        assert f"strides {strides}, offsets {table}" in DRAWINGS["strides"].says


def test_hidden_places_and_padding_differ() -> None:
    assert texts(DRAWINGS["rows"]).count("−∞") == 1
    assert DRAWINGS["rows"].html.count("<line") == 2 * 2 * 2


def test_the_last_sum_is_that_of_the_row() -> None:
    torch = pytest.importorskip("torch")
    row = torch.tensor(ROW)
    total = (row - row.max()).exp().sum()
    assert f"ℓ = {total:.2f}" in texts(DRAWINGS["online sum"])
    frames = parsed(DRAWINGS["online sum"]).find("div[@class='frames']")
    assert frames is not None and len(frames) == 3


def test_a_mask_has_a_part_for_rows_and_one_for_columns() -> None:
    said = [text for text in texts(DRAWINGS["blocks of rows"]) if text.isdigit()]
    assert said == [str(i) for i in range(30)]
    assert DRAWINGS["blocks of rows"].html.count("<line") == 2 * (6 * 8 - 30)


def test_each_block_has_one_program() -> None:
    said = texts(DRAWINGS["sums"])
    assert all(said.count(f"block {b}") == 2 for b in range(6))
    assert "programs take blocks [0, 3], [1, 4], [2, 5]" in DRAWINGS["sums"].says
