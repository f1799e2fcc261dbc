"""Drawings of the GPU chapter: products, losses and attention in tiles."""

from collections.abc import Mapping, Sequence

from lm_from_scratch.drawings.canvas import (
    BLUE,
    COLOURS,
    GREEN,
    INK,
    ORANGE,
    RED,
    Canvas,
    Drawing,
    printable,
    slides,
)
from lm_from_scratch.drawings.gpu_programs import lane_box


def tile_steps(
    M: int, K: int, N: int, block: int, block_k: int, tile: tuple[int, int], first: int = 0
) -> Drawing:
    """The program of one ``tile`` of C = A B, step by step along K: which numbers of A (M, K) and
    of B (K, N) it loads, and what its masks cut off. Step ``first`` is shown at the beginning."""
    reach_m, reach_n, reach_k = (
        side * -(-size // side) for size, side in ((M, block), (N, block), (K, block_k))
    )
    cell = min(17.0, (343 - 62) / (reach_k + reach_n))
    left, top, gap = 24, 24, 26
    right, below = left + cell * reach_k + gap, top + cell * reach_k + gap
    rows = range(block * tile[0], block * (tile[0] + 1))
    columns = range(block * tile[1], block * (tile[1] + 1))
    frames, labels = [], []
    for start in range(0, K, block_k):
        ks = range(start, start + block_k)
        canvas = Canvas(
            343, below + cell * reach_m + 28,
            f"rows {rows[0]} to {rows[-1]} of A and columns {columns[0]} to {columns[-1]} of B, "
            f"of which {ks[0]} to {ks[-1]} along K are multiplied, and added to the tile of C; "
            f"{sum(k >= K for k in ks)} of {block_k} lie beyond K, and are loaded as 0",
        )  # fmt: skip

        def matrix(
            x: float, y: float, height: int, width: int, reach: tuple[int, int],
            read: tuple[range, range], strip: tuple[range, range], colour: str,
            sheet: Canvas = canvas,
        ) -> None:  # fmt: skip
            for i in range(reach[0]):
                for j in range(reach[1]):
                    inside = i < height and j < width
                    here = x + cell * j, y + cell * i, cell - 2, cell - 2
                    if i in read[0] and j in read[1]:
                        lane_box(sheet, *here, colour, inside, 0.75)
                    elif inside:
                        shade = 0.16 if i in strip[0] and j in strip[1] else 0.07
                        edge = colour if shade > 0.1 else "none"
                        sheet.box(*here, colour if shade > 0.1 else INK, shade, edge, radius=1.5)

        along = range(reach_k)
        matrix(left, below, M, K, (reach_m, reach_k), (rows, ks), (rows, along), BLUE)
        matrix(right, top, K, N, (reach_k, reach_n), (ks, columns), (along, columns), ORANGE)
        matrix(right, below, M, N, (reach_m, reach_n), (rows, columns), (rows, columns), GREEN)
        canvas.text(left + cell * K / 2, below - 13, f"A: {M} × {K}", 12, bold=True)
        canvas.text(right + cell * N / 2, top - 13, f"B: {K} × {N}", 12, bold=True)
        canvas.text(right + cell * N / 2, below - 13, f"C: {M} × {N}", 12, bold=True)
        foot = canvas.height - 12
        canvas.text(left, foot, "✕ masked", 12, "start")
        frames.append(canvas.drawing())
        labels.append(str(start // block_k))
    return slides("Step along K", frames, labels, first)


def first_programs(
    orders: Mapping[str, Sequence[tuple[int, int]]], rows: int, columns: int, busy: int
) -> Drawing:
    """The tiles of the first ``busy`` programs in each of some ``orders`` of ``rows`` x ``columns``
    tiles, and above and beside them the rows of A and the columns of B that they need."""
    cell = (343 / len(orders) - 24) / columns
    wide, left, top = 343 / len(orders), 14, 58
    says = []
    canvas = Canvas(343, top + cell * rows + 26, "")
    for i, (title, tiles) in enumerate(orders.items()):
        x = wide * i + left
        first = tiles[:busy]
        of_a, of_b = {m for m, _ in first}, {n for _, n in first}
        canvas.text(x, 10, title, 13, "start", bold=True)
        canvas.text(x, 28, f"{len(of_a)} of A + {len(of_b)} of B", 12, "start")
        canvas.box(x, top, cell * columns, cell * rows, INK, 0.04, INK, radius=0)
        for n in of_b:
            canvas.box(x + cell * n, top - 12, cell, 7, ORANGE, 0.7, ORANGE, radius=0)
        for m in of_a:
            canvas.box(x - 12, top + cell * m, 7, cell, BLUE, 0.7, BLUE, radius=0)
        for m, n in first:
            canvas.box(x + cell * n, top + cell * m, cell, cell, GREEN, 0.45, GREEN, radius=0)
        says.append(f"{title}: {len(first)} programs need {len(of_a)} rows and {len(of_b)} columns")
    canvas.text(left, canvas.height - 12, "blue: rows of A, orange: columns of B", 11, "start")
    canvas.says = "; ".join(says)
    return canvas.drawing()


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
        edge, anchor = (at_x, "start") if at_x == left else (at_x + columns * scale, "end")
        canvas.text(edge, at_y - 9, f"{name} ({rows}, {columns})", 11, anchor)
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


def causal_tiles(
    pieces: Sequence[str], tile: int, keeps: str = "queries", first: int = 1
) -> Drawing:
    """Causal attention of a text in tiles of ``tile`` x ``tile`` scores. Of the programs a reader
    chooses one: it ``keeps`` a tile of "queries" or "keys", and the tiles of the other one pass by.
    Program ``first`` is shown at the beginning."""
    T, count = len(pieces), -(-len(pieces) // tile)
    left, top = 84, 42
    cell = min(21.0, (341 - left) / (count * tile))
    side, whole = tile * cell, count * tile * cell
    other = "keys" if keeps == "queries" else "queries"
    frames = []
    for program in range(count):
        own = range(program * tile, min((program + 1) * tile, T))
        visited = range(program + 1) if keeps == "queries" else range(program, count)
        passing = ", ".join(_span(range(i * tile, min((i + 1) * tile, T))) for i in visited)
        used = masked = 0
        canvas = Canvas(343, top + whole + 82, "")
        canvas.text(left - 8, 12, "queries ↓", 11, "end", opacity=0.8)
        canvas.text(left, 12, "keys: the same tokens, from left to right", 11, "start", opacity=0.8)
        for i in range(count):
            span = _span(range(i * tile, min((i + 1) * tile, T)))
            mine = keeps == "keys" and i == program
            canvas.text(left + side * (i + 0.5), top - 12, span, 12, bold=mine)
        for t in range(count * tile):
            y, mine = top + cell * t, keeps == "queries" and t in own
            if t < T:
                word = printable(pieces[t].removeprefix(" ") or pieces[t])
                canvas.text(left - 8, y + cell / 2, word, 12, "end", bold=mine)
            for s in range(count * tile):
                row, column = t // tile, s // tile
                on = (row == program and column in visited) if keeps == "queries" else (
                    column == program and row in visited)  # fmt: skip
                seen = s <= t < T
                fill, shade = ("none", 0.0) if not seen else (INK, 0.1)
                if on:
                    used, masked = used + seen, masked + (not seen)
                    fill, shade = (BLUE, 0.55) if seen else (ORANGE, 0.5)
                canvas.box(left + cell * s + 1, y + 1, cell - 3, cell - 3, fill, shade,
                           fill if fill != "none" else INK, 2)  # fmt: skip
                if on and not seen:
                    canvas.text(left + cell * (s + 0.5) - 0.5, y + cell / 2 - 0.5, "×", 12)
        for i in visited:
            row, column = (program, i) if keeps == "queries" else (i, program)
            _frame(canvas, left + side * column - 1, top + side * row - 1, side, side, INK)
        foot = top + whole + 14
        verb = "writes their results" if keeps == "queries" else "writes their gradients"
        canvas.text(4, foot, f"program {program} keeps {keeps} {_span(own)}, {verb}", 12, "start")
        canvas.text(4, foot + 18, f"{other} pass by: {passing}", 12, "start")
        x = 4.0
        for colour, shade, text in (
            (BLUE, 0.55, "used"), (ORANGE, 0.5, "computed, masked ×"),
            ("none", 0.0, "hidden or empty"),
        ):  # fmt: skip
            canvas.box(x, foot + 36, 13, 13, colour, shade, colour if shade else INK, 2)
            canvas.text(x + 18, foot + 43, text, 11, "start")
            x += 32 + 6.2 * len(text)
        canvas.says = (
            f"program {program} keeps {keeps} {_span(own)}; tiles of {other} pass by: {passing}. "
            f"{used} scores are used, {masked} are computed and masked"
        )
        frames.append(canvas.drawing())
    return slides("Program", frames, [str(i) for i in range(count)], first)


def split_keys(keys: int, tile: int, splits: int) -> Drawing:
    """One query and its ``keys`` in ``splits`` of whole tiles. Each split is a program that writes
    a result y and a log-sum-exp L; a second kernel merges them."""
    tiles = -(-keys // tile)
    each = -(-tiles // splits) * tile
    parts = [range(i * each, min((i + 1) * each, keys)) for i in range(splits)]
    parts = [part for part in parts if part]
    cell = 335 / (len(parts) * each)
    canvas = Canvas(
        343, 236,
        f"{keys} keys in tiles of {tile}, in {len(parts)} splits: "
        + "; ".join(f"program {i} reads keys {_span(part)}" for i, part in enumerate(parts))
        + f". {len(parts) * each - keys} places after the last key are masked; a second kernel "
        "merges the results",
    )  # fmt: skip
    canvas.box(121, 4, 100, 26, ORANGE, 0.4, ORANGE)
    canvas.text(171, 17, "one query", 13, bold=True)
    canvas.box(91, 204, 160, 28, GREEN, 0.3, GREEN)
    canvas.text(171, 218, "merge: one result y", 13, bold=True)
    for i, part in enumerate(parts):
        colour, middle = COLOURS[(0, 4, 2, 3)[i % 4]], 4 + cell * each * (i + 0.5)
        canvas.line(171, 30, middle, 56, 1.2, arrow=True)
        canvas.text(middle, 66, f"program {i}", 12, bold=True)
        for s in range(part[0], i * each + each):
            x, real = 4 + cell * s, s < keys
            canvas.box(x + 1, 80, cell - 2.5, 26, colour if real else ORANGE, 0.45,
                       colour if real else ORANGE, 1)  # fmt: skip
            if not real:
                canvas.text(x + cell / 2, 93, "×", 12)
            if s % tile == 0 and s > part[0]:
                canvas.line(x, 76, x, 110, 1.6)
        canvas.text(middle, 120, f"keys {_span(part)}", 11)
        canvas.line(middle, 130, middle, 144, arrow=True)
        width = min(96.0, cell * each - 10)
        canvas.box(middle - width / 2, 146, width, 26, colour, 0.25, colour)
        canvas.text(middle, 159, "its y and L", 12)
        canvas.line(middle, 172, 171 + (middle - 171) * 0.45, 202, 1.2, arrow=True)
    return canvas.drawing()


def paged_keys(table: Sequence[int], page: int, length: int, tile: int, pages: int) -> Drawing:
    """The keys of a row, ``tile`` in a tile, and where its ``table`` of pages says that they are in
    a memory of ``pages`` pages of ``page`` slots each. After ``length`` keys all is masked."""
    places = -(-length // tile) * tile
    cell = 335 / places
    column = 335 / pages
    canvas = Canvas(
        343, 232,
        f"{length} keys; page table {list(table)}; "
        + "; ".join(f"keys {_span(range(i * page, min((i + 1) * page, length)))} in page {number}"
                    for i, number in enumerate(table))
        + f"; {places - length} places of the last tile are masked",
    )  # fmt: skip
    canvas.text(4, 9, f"keys of the row, a tile holds {tile}", 11, "start", opacity=0.8)
    for s in range(places):
        x, real = 4 + cell * s, s < length
        colour = COLOURS[(0, 4, 2, 3)[s // page % 4]] if real else ORANGE
        canvas.box(x + 1, 20, cell - 2.5, 24, colour, 0.45, colour, 1)
        canvas.text(x + cell / 2 - 0.5, 32, str(s) if real else "×", 11)
        if s % tile == 0 and s:
            canvas.line(x - 0.5, 15, x - 0.5, 49, 2)
    canvas.text(339, 62, "page table", 11, "end", opacity=0.8)
    canvas.text(4, 214, f"memory: {pages} pages of {page} slots", 11, "start", opacity=0.8)
    for number in range(pages):
        x = 4 + column * number
        used = number in table
        i = list(table).index(number) if used else 0
        colour = COLOURS[(0, 4, 2, 3)[i % 4]]
        canvas.text(x + column / 2, 194, str(number), 12, bold=used)
        for slot in range(page):
            filled = used and i * page + slot < length
            width = (column - 8) / page
            canvas.box(x + 3 + width * slot, 158, width - 1.5, 24, colour if filled else "none",
                       0.45, colour if filled else INK, 1)  # fmt: skip
            if filled:
                canvas.text(x + 3 + width * (slot + 0.5) - 0.5, 170, str(i * page + slot), 10)
    for i, number in enumerate(table):
        middle, colour = 4 + cell * page * (i + 0.5), COLOURS[(0, 4, 2, 3)[i % 4]]
        canvas.line(middle, 44, middle, 74, 1, opacity=0.6)
        canvas.box(middle - 15, 75, 30, 24, colour, 0.25, colour)
        canvas.text(middle, 87, str(number), 13, bold=True)
        canvas.line(middle, 100, 4 + column * (number + 0.5), 155, 1.6, colour, arrow=True)
    return canvas.drawing()


def _frame(canvas: Canvas, x: float, y: float, width: float, height: float, colour: str) -> None:
    """A thick border."""
    for x1, y1, x2, y2 in (
        (x, y, x + width, y), (x + width, y, x + width, y + height),
        (x + width, y + height, x, y + height), (x, y + height, x, y),
    ):  # fmt: skip
        canvas.line(x1, y1, x2, y2, 2.2, colour)


def _span(numbers: range) -> str:
    return f"{numbers[0]}–{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
