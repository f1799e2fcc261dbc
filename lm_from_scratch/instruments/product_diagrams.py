"""Drawings of products: tiles that programs read, matrix units, and the logits of a vocabulary."""

from collections.abc import Sequence

from lm_from_scratch.instruments.canvas import BLUE, GREEN, INK, ORANGE, RED, Canvas, Drawing

# -- products, losses, matrix units --------------------------------------------------------------


def matrix_units() -> Drawing:
    """Where the factors A and B and the sums of a matrix product lie on three generations of GPU,
    and who starts a multiplication."""
    canvas = Canvas(
        343, 294,
        "On an A100 each warp multiplies for itself, with factors and sums in registers; on an "
        "H100 four warps multiply together, factors in shared memory and sums in registers; on a "
        "B200 one thread starts it, factors in shared memory and sums in tensor memory",
    )  # fmt: skip
    rows = (
        ("A100", "each warp for itself", 4, ("", "A B sums", None)),
        ("H100", "four warps together", 4, ("A B", "sums", None)),
        ("B200", "one thread for all", 1, ("A B", "", "sums")),
    )
    colours = {"A": BLUE, "B": ORANGE, "sums": GREEN}
    for x, name in zip(
        (62, 174, 286), ("shared memory", "registers", "tensor memory"), strict=True
    ):
        canvas.text(x, 10, name, 11, opacity=0.8)
    for i, (gpu, who, threads, places) in enumerate(rows):
        y = 24 + 92 * i
        for k, held in enumerate(places):
            if held is None:
                continue
            x = 8 + 112 * k
            canvas.box(x, y, 108, 38, INK, 0.04)
            for j, part in enumerate(held.split()):
                width = 44 if part == "sums" else 24
                at = x + (6 + 28 * j if len(held) > 4 else (30 + 28 * j if part != "sums" else 32))
                canvas.box(at, y + 7, width, 24, colours[part], 0.35, colours[part])
                canvas.text(at + width / 2, y + 19, part, 12)
        canvas.text(8, y + 55, gpu, 13, "start", bold=True)
        for w in range(4):
            active = w < threads
            together = gpu == "H100"
            canvas.box(
                54 + (22 if together else 25) * w, y + 46, 22, 17, RED if active else "none",
                0.35 if active else 0, radius=0 if together else 4,
            )  # fmt: skip
        canvas.text(164, y + 55, who, 12, "start")
    return canvas.drawing()


def tiled_product(
    names: Sequence[str], sizes: tuple[int, int, int], block: int, chosen: tuple[int, int] = (0, 0)
) -> Drawing:
    """A product with ``sizes`` (rows, inner, columns) in square tiles of ``block``, one program for
    each tile of the result. ``names`` are those of the two factors and the result. The ``chosen``
    program and what it reads are coloured; what a mask cuts off lies outside the frames."""
    height, inner, width = sizes
    tiles = [-(-size // block) for size in sizes]
    wide = [count * block for count in tiles]
    scale = min(2.4, 300 / (wide[1] + wide[2]))
    left, top = 14.0, 22.0
    x, y = left + scale * wide[1] + 18, top + scale * wide[1] + 26
    row, column = chosen
    canvas = Canvas(
        x + scale * wide[2] + 8, y + scale * wide[0] + 24,
        f"{names[2]} ({height} x {width}) in {tiles[0]} x {tiles[2]} programs of {block} x {block}"
        f". Program ({row}, {column}) reads row {row} of tiles of {names[0]} and column {column} "
        f"of tiles of {names[1]}, {tiles[1]} tiles each. A mask cuts off what is outside",
    )  # fmt: skip
    parts = (
        (left, y, height, inner, BLUE, {(row, k) for k in range(tiles[1])}, names[0]),
        (x, top, inner, width, ORANGE, {(k, column) for k in range(tiles[1])}, names[1]),
        (x, y, height, width, GREEN, {(row, column)}, names[2]),
    )
    for at_x, at_y, rows, columns, colour, read, name in parts:
        side = scale * block
        for i in range(-(-rows // block)):
            for j in range(-(-columns // block)):
                hit = (i, j) in read
                high = min(block, rows - i * block) * scale
                long = min(block, columns - j * block) * scale
                if hit:
                    canvas.box(
                        at_x + j * side, at_y + i * side, long, high, colour, 0.45, "none", 0
                    )
                _dashed(canvas, at_x + j * side, at_y + i * side, side)
        canvas.box(at_x, at_y, columns * scale, rows * scale, radius=0)
        canvas.text(at_x, at_y - 9, f"{name} ({rows}, {columns})", 11, "start")
    canvas.text(left, y + scale * wide[0] + 12, "dashed beyond a frame: masked, read as 0", 11,
                "start", opacity=0.8)  # fmt: skip
    return canvas.drawing()


def _dashed(canvas: Canvas, x: float, y: float, side: float) -> None:
    """The outline of a tile."""
    for x1, y1, x2, y2 in (
        (x, y, x + side, y), (x, y + side, x + side, y + side),
        (x, y, x, y + side), (x + side, y, x + side, y + side),
    ):  # fmt: skip
        canvas.line(x1, y1, x2, y2, 0.8, opacity=0.45, dashes="3 3")


def rows_of_logits(tokens: int, V: int, block: int) -> Drawing:
    """Logits (tokens, V): a program for each row, which reads it in blocks. The last block is drawn
    again below, with what its mask cuts off."""
    blocks = -(-V // block)
    inside = V - (blocks - 1) * block
    canvas = Canvas(
        343, 192,
        f"{tokens:,} programs, one for each row of {V:,} logits; a program walks over {blocks} "
        f"blocks of {block:,}; the last holds {inside:,} logits, and the mask cuts off "
        f"{block - inside:,}",
    )  # fmt: skip
    left = 92
    cell = (343 - left - 6) / blocks
    for r, name in enumerate((0, 1, 2, None, tokens - 1)):
        y = 8 + 20 * r
        if name is None:
            canvas.text(left / 2, y + 7, "...", 12)
            continue
        canvas.text(left - 8, y + 7, f"program {name:,}", 11, "end")
        for j in range(blocks):
            fill, tint = (BLUE, 0.5) if r == 1 else (INK, 0.06)
            share = inside / block if j == blocks - 1 else 1
            canvas.box(left + j * cell, y, cell * share, 14, fill, tint, radius=0)
    canvas.text(left, 112, f"{blocks} blocks of {block:,} along V = {V:,}", 11, "start")
    canvas.text(left - 8, 150, "last block", 11, "end")
    canvas.box(left, 138, 245 * inside / block, 24, BLUE, 0.5, radius=0)
    canvas.box(
        left + 245 * inside / block, 138, 245 * (1 - inside / block), 24, INK, 0.03, radius=0
    )
    canvas.text(left, 174, f"{inside:,} read", 11, "start")
    canvas.text(left + 245, 174, f"{block - inside:,} masked, read as -inf", 11, "end")
    return canvas.drawing()


def split_vocabulary(
    tokens: int, V: int, block: int, split: int, block_v: int, chosen: tuple[int, int] = (0, 0)
) -> Drawing:
    """A product of hidden states and head whose result, the logits, is reduced where it is made: a
    program has ``block`` tokens and ``split`` entries of the vocabulary, in tiles of ``block_v``,
    and stores m and l of each token. The ``chosen`` program is coloured."""
    down, across = -(-tokens // block), -(-V // split)
    row, column = chosen
    canvas = Canvas(
        343, 0,
        f"Logits of {tokens} tokens and {V} entries in {down} x {across} programs, each with "
        f"{block} tokens and {split} entries, in tiles of {block_v} entries. Program ({row}, "
        f"{column}) reads its rows of x and its rows of W, and stores m and l of each token",
    )  # fmt: skip
    left, top = 46.0, 62.0
    cell, high, unit = 288 / across, 44.0, 44.0 / block
    scale = 288 / (across * split)
    canvas.text(left, 10, f"W: {V} rows", 11, "start")
    canvas.box(left, 20, V * scale, 22, radius=0)
    start = column * cell
    canvas.box(left + start, 20, min(cell, V * scale - start), 22, ORANGE, 0.45, radius=0)
    canvas.text(20, top - 9, f"x: {tokens}", 11)
    canvas.box(8, top, 24, tokens * unit, radius=0)
    canvas.box(
        8, top + row * high, 24, min(high, (tokens - row * block) * unit), BLUE, 0.45, radius=0
    )
    canvas.text(left, top - 9, "logits: in registers only", 11, "start", opacity=0.8)
    for i in range(down):
        for j in range(across):
            x, y = left + j * cell, top + i * high
            if (i, j) == (row, column):
                inside = min(high, (tokens - i * block) * unit)
                for k in range(split // block_v):
                    first = j * split + k * block_v
                    wide = min(block_v, V - first) * scale
                    if wide > 0:
                        tint = 0.45 if k % 2 else 0.25
                        canvas.box(left + first * scale, y, wide, inside, GREEN, tint, radius=0)
            for one in ((x, y, x + cell, y), (x, y + high, x + cell, y + high),
                        (x, y, x, y + high), (x + cell, y, x + cell, y + high)):  # fmt: skip
                canvas.line(*one, 0.8, opacity=0.45, dashes="3 3")
    canvas.box(left, top, V * scale, tokens * unit, radius=0)
    canvas.text(left + 288, top + down * high + 12, "dashed beyond the frame: masked", 11, "end",
                opacity=0.8)  # fmt: skip
    y = top + down * high + 46
    canvas.text(left, y - 9, "stored: m and l of each token, from every part", 11, "start")
    for j in range(across):
        chosen_part = j == column
        canvas.box(left + (j + 0.5) * cell - 28, y, 26, 20, GREEN, 0.45 if chosen_part else 0.1)
        canvas.text(left + (j + 0.5) * cell - 15, y + 10, "m", 12)
        canvas.box(left + (j + 0.5) * cell + 2, y, 26, 20, GREEN, 0.45 if chosen_part else 0.1)
        canvas.text(left + (j + 0.5) * cell + 15, y + 10, "l", 12)
    canvas.height = y + 28
    return canvas.drawing()
