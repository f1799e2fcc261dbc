"""Drawings of the GPU chapter: products, losses and attention in tiles."""

from collections.abc import Mapping, Sequence

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing, Grid, slides
from lm_from_scratch.drawings.colours import BLUE, COLOURS, GREEN, INK, ORANGE, RED
from lm_from_scratch.drawings.labels import span_of, word


def tile_steps(
    M: int, K: int, N: int, block: int, block_k: int, tile: tuple[int, int], first: int = 0
) -> Drawing:
    """The program of one ``tile`` of C = A B, step by step along K: which numbers of A (M, K) and
    of B (K, N) it loads, and what its masks cut off. Step ``first`` is shown at the beginning."""
    down, across, along = (
        side * -(-size // side) for size, side in ((M, block), (N, block), (K, block_k))
    )
    cell = min(17.0, 281 / (along + across))
    left, top = 24, 24
    right, below = left + cell * along + 26, top + cell * along + 26
    rows, columns = (range(block * i, block * (i + 1)) for i in tile)
    frames, all_of_k = [], range(along)
    for start in range(0, K, block_k):
        ks = range(start, start + block_k)
        canvas = Canvas(
            WIDTH, below + cell * down + 28,
            f"rows {rows[0]} to {rows[-1]} of A and columns {columns[0]} to {columns[-1]} of B, "
            f"of which {ks[0]} to {ks[-1]} along K are multiplied, and added to the tile of C; "
            f"{sum(k >= K for k in ks)} of {block_k} lie beyond K, and are loaded as 0",
        )  # fmt: skip
        for x, y, shape, reach, read, strip, colour in (
            (left, below, (M, K), (down, along), (rows, ks), (rows, all_of_k), BLUE),
            (right, top, (K, N), (along, across), (ks, columns), (all_of_k, columns), ORANGE),
            (right, below, (M, N), (down, across), (rows, columns), (rows, columns), GREEN),
        ):
            grid = Grid(canvas, x, y, cell, cell, 2)
            for i in range(reach[0]):
                for j in range(reach[1]):
                    inside = i < shape[0] and j < shape[1]
                    if i in read[0] and j in read[1]:
                        if inside:
                            grid.cell(i, j, "", 0, colour, 0.75)
                        else:
                            grid.masked(i, j)
                    elif inside and i in strip[0] and j in strip[1]:
                        grid.cell(i, j, "", 0, colour, 0.16, radius=1.5)
                    elif inside:
                        grid.cell(i, j, "", 0, INK, 0.07, "none", 1.5)
        canvas.text(left + cell * K / 2, below - 13, f"A: {M} × {K}", 12, bold=True)
        canvas.text(right + cell * N / 2, top - 13, f"B: {K} × {N}", 12, bold=True)
        canvas.text(right + cell * N / 2, below - 13, f"C: {M} × {N}", 12, bold=True)
        canvas.text(left, canvas.height - 12, "✕ masked", 12, "start")
        frames.append(canvas.drawing())
    return slides("Step along K", frames, [str(i) for i in range(len(frames))], first)


def first_programs(
    orders: Mapping[str, Sequence[tuple[int, int]]], rows: int, columns: int, busy: int
) -> Drawing:
    """The tiles of the first ``busy`` programs in each of some ``orders`` of ``rows`` x ``columns``
    tiles, and above and beside them the rows of A and the columns of B that they need."""
    wide, top = WIDTH / len(orders), 58
    cell = (wide - 24) / columns
    canvas, says = Canvas(WIDTH, top + cell * rows + 26), []
    for i, (title, tiles) in enumerate(orders.items()):
        x, first = wide * i + 14, tiles[:busy]
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
    canvas.text(14, canvas.height - 12, "blue: rows of A, orange: columns of B", 11, "start")
    return canvas.drawing("; ".join(says))


def matrix_units() -> Drawing:
    """Where the factors A and B and the sums of a matrix product lie on three generations of GPU,
    and who starts a multiplication."""
    canvas = Canvas(
        WIDTH, 294,
        "On an A100 each warp multiplies for itself, with factors and sums in registers; on an "
        "H100 four warps multiply together, factors in shared memory and sums in registers; on a "
        "B200 one thread starts it, factors in shared memory and sums in tensor memory",
    )  # fmt: skip
    parts = {"A": (24, BLUE), "B": (24, ORANGE), "sums": (44, GREEN)}
    for x, name in ((62, "shared memory"), (174, "registers"), (286, "tensor memory")):
        canvas.note(x, 10, name, "middle")
    for i, (gpu, who, threads, places) in enumerate((
        ("A100", "each warp for itself", 4, ((), ("A", "B", "sums"))),
        ("H100", "four warps together", 4, (("A", "B"), ("sums",))),
        ("B200", "one thread for all", 1, (("A", "B"), (), ("sums",))),
    )):  # fmt: skip
        y = 24 + 92 * i
        for k, held in enumerate(places):
            x = 8 + 112 * k
            canvas.box(x, y, 108, 38, INK, 0.04)
            at = x + {0: 0, 1: 32, 2: 30, 3: 6}[len(held)]
            for j, part in enumerate(held):
                wide, colour = parts[part]
                canvas.cell(at + 28 * j, y + 7, wide, 24, part, 12, colour, 0.35, colour)
        canvas.text(8, y + 55, gpu, 13, "start", bold=True)
        apart, radius = (22, 0) if gpu == "H100" else (25, 4)
        for w in range(4):
            look = (RED, 0.35) if w < threads else ("none", 0.0)
            canvas.box(54 + apart * w, y + 46, 22, 17, *look, radius=radius)
        canvas.text(164, y + 55, who, 12, "start")
    return canvas.drawing()


def _dashed(canvas: Canvas, x: float, y: float, width: float, height: float) -> None:
    """The outline of a tile: above, below, left and right."""
    for ends in ((x, y, x + width, y), (x, y + height, x + width, y + height),
                 (x, y, x, y + height), (x + width, y, x + width, y + height)):  # fmt: skip
        canvas.line(*ends, 0.8, opacity=0.45, dashes="3 3")


def tiled_product(
    names: Sequence[str], sizes: tuple[int, int, int], block: int, chosen: tuple[int, int] = (0, 0)
) -> Drawing:
    """A product with ``sizes`` (rows, inner, columns) in square tiles of ``block``, one program for
    each tile of the result. ``names`` are those of the two factors and the result. The ``chosen``
    program and what it reads are coloured; what a mask cuts off lies outside the frames."""
    height, inner, width = sizes
    tiles = [-(-size // block) for size in sizes]
    scale = min(2.4, 300 / (block * (tiles[1] + tiles[2])))
    high, along, across = (scale * block * count for count in tiles)
    left, top, side = 14.0, 22.0, scale * block
    x, y = left + along + 18, top + along + 26
    row, column = chosen
    canvas = Canvas(
        x + across + 8, y + high + 24,
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
        for i in range(-(-rows // block)):
            for j in range(-(-columns // block)):
                place = at_x + j * side, at_y + i * side
                if (i, j) in read:
                    long = min(block, columns - j * block) * scale
                    tall = min(block, rows - i * block) * scale
                    canvas.box(*place, long, tall, colour, 0.45, "none", 0)
                _dashed(canvas, *place, side, side)
        canvas.box(at_x, at_y, columns * scale, rows * scale, radius=0)
        edge, anchor = (at_x, "start") if at_x == left else (at_x + columns * scale, "end")
        canvas.text(edge, at_y - 9, f"{name} ({rows}, {columns})", 11, anchor)
    canvas.note(left, y + high + 12, "dashed beyond a frame: masked, read as 0")
    return canvas.drawing()


def rows_of_logits(tokens: int, V: int, block: int) -> Drawing:
    """Logits (tokens, V): a program for each row, which reads it in blocks. The last block is drawn
    again below, with what its mask cuts off."""
    blocks = -(-V // block)
    inside = V - (blocks - 1) * block
    canvas = Canvas(
        WIDTH, 192,
        f"{tokens:,} programs, one for each row of {V:,} logits; a program walks over {blocks} "
        f"blocks of {block:,}; the last holds {inside:,} logits, and the mask cuts off "
        f"{block - inside:,}",
    )  # fmt: skip
    left, long, share = 92, 245, inside / block
    cell = long / blocks
    for r, program in enumerate((0, 1, 2, None, tokens - 1)):
        y = 8 + 20 * r
        if program is None:
            canvas.text(left / 2, y + 7, "...", 12)
            continue
        canvas.text(left - 8, y + 7, f"program {program:,}", 11, "end")
        look = (BLUE, 0.5) if r == 1 else (INK, 0.06)
        for j in range(blocks):
            width = cell * (share if j == blocks - 1 else 1)
            canvas.box(left + j * cell, y, width, 14, *look, radius=0)
    canvas.text(left, 112, f"{blocks} blocks of {block:,} along V = {V:,}", 11, "start")
    canvas.text(left - 8, 150, "last block", 11, "end")
    canvas.box(left, 138, long * inside / block, 24, BLUE, 0.5, radius=0)
    canvas.box(left + long * inside / block, 138, long * (1 - share), 24, INK, 0.03, radius=0)
    canvas.text(left, 174, f"{inside:,} read", 11, "start")
    canvas.text(left + long, 174, f"{block - inside:,} masked, read as -inf", 11, "end")
    return canvas.drawing()


def split_vocabulary(
    tokens: int, V: int, block: int, split: int, block_v: int, chosen: tuple[int, int] = (0, 0)
) -> Drawing:
    """A product of hidden states and head whose result, the logits, is reduced where it is made: a
    program has ``block`` tokens and ``split`` entries of the vocabulary, in tiles of ``block_v``,
    and stores m and l of each token. The ``chosen`` program is coloured."""
    down, across = -(-tokens // block), -(-V // split)
    row, column = chosen
    left, top, high = 46.0, 62.0, 44.0
    foot = top + down * high
    canvas = Canvas(
        WIDTH, foot + 74,
        f"Logits of {tokens} tokens and {V} entries in {down} x {across} programs, each with "
        f"{block} tokens and {split} entries, in tiles of {block_v} entries. Program ({row}, "
        f"{column}) reads its rows of x and its rows of W, and stores m and l of each token",
    )  # fmt: skip
    cell, unit, scale = 288 / across, high / block, 288 / (across * split)
    inside = min(high, (tokens - row * block) * unit)
    canvas.text(left, 10, f"W: {V} rows", 11, "start")
    canvas.box(left, 20, V * scale, 22, radius=0)
    start = column * cell
    canvas.box(left + start, 20, min(cell, V * scale - start), 22, ORANGE, 0.45, radius=0)
    canvas.text(20, top - 9, f"x: {tokens}", 11)
    canvas.box(8, top, 24, tokens * unit, radius=0)
    canvas.box(8, top + row * high, 24, inside, BLUE, 0.45, radius=0)
    canvas.note(left, top - 9, "logits: in registers only")
    for i in range(down):
        for j in range(across):
            if (i, j) == chosen:
                for k in range(split // block_v):
                    first = j * split + k * block_v
                    wide = min(block_v, V - first) * scale
                    if wide > 0:
                        box = left + first * scale, top + i * high, wide, inside
                        canvas.box(*box, GREEN, 0.45 if k % 2 else 0.25, radius=0)
            _dashed(canvas, left + j * cell, top + i * high, cell, high)
    canvas.box(left, top, V * scale, tokens * unit, radius=0)
    canvas.note(left + 288, foot + 12, "dashed beyond the frame: masked", "end")
    canvas.text(left, foot + 37, "stored: m and l of each token, from every part", 11, "start")
    for j in range(across):
        middle = left + (j + 0.5) * cell
        for x, name in ((middle - 28, "m"), (middle + 2, "l")):
            canvas.cell(x, foot + 46, 26, 20, name, 12, GREEN, 0.45 if j == column else 0.1)
    return canvas.drawing()


def causal_tiles(
    pieces: Sequence[str], tile: int, keeps: str = "queries", first: int = 1
) -> Drawing:
    """Causal attention of a text in tiles of ``tile`` x ``tile`` scores. Of the programs a reader
    chooses one: it ``keeps`` a tile of "queries" or "keys", and the tiles of the other one pass by.
    Program ``first`` is shown at the beginning."""
    T, count = len(pieces), -(-len(pieces) // tile)
    left, top, by_query = 84, 42, keeps == "queries"
    cell = min(21.0, 257 / (count * tile))
    side, foot = tile * cell, top + count * tile * cell + 14
    other, what = ("keys", "results") if by_query else ("queries", "gradients")
    spans = [span_of(range(i * tile, min((i + 1) * tile, T))) for i in range(count)]
    frames = []
    for program in range(count):
        visited = range(program + 1) if by_query else range(program, count)
        tiles = {(program, i) if by_query else (i, program) for i in visited}
        passing = ", ".join(spans[i] for i in visited)
        used = masked = 0
        canvas = Canvas(WIDTH, foot + 68)
        canvas.note(left - 8, 12, "queries ↓", "end")
        canvas.note(left, 12, "keys: the same tokens, from left to right")
        for i, text in enumerate(spans):
            mine = not by_query and i == program
            canvas.text(left + side * (i + 0.5), top - 12, text, 12, bold=mine)
        grid = Grid(canvas, left + 1, top + 1, cell, cell)
        for t in range(count * tile):
            if t < T:
                mine, y = by_query and t // tile == program, top + cell * (t + 0.5)
                canvas.text(left - 8, y, word(pieces[t]), 12, "end", bold=mine)
            for s in range(count * tile):
                seen = s <= t < T
                if (t // tile, s // tile) not in tiles:
                    grid.cell(t, s, "", 0, *((INK, 0.1) if seen else ("none", 0.0)))
                elif seen:
                    used += 1
                    grid.cell(t, s, "", 0, BLUE, 0.55)
                else:
                    masked += 1
                    grid.cell(t, s, "×", 12, ORANGE, 0.5)
        for i, j in sorted(tiles):
            canvas.frame(left + side * j - 1, top + side * i - 1, side, side)
        text = f"program {program} keeps {keeps} {spans[program]}, writes their {what}"
        canvas.text(4, foot, text, 12, "start")
        canvas.text(4, foot + 18, f"{other} pass by: {passing}", 12, "start")
        x = 4.0
        for fill, tint, text in (
            (BLUE, 0.55, "used"), (ORANGE, 0.5, "computed, masked ×"),
            ("none", 0.0, "hidden or empty"),
        ):  # fmt: skip
            canvas.box(x, foot + 36, 13, 13, fill, tint, fill if tint else INK, 2)
            canvas.text(x + 18, foot + 43, text, 11, "start")
            x += 32 + 6.2 * len(text)
        frames.append(canvas.drawing(
            f"program {program} keeps {keeps} {spans[program]}; tiles of {other} pass by: "
            f"{passing}. {used} scores are used, {masked} are computed and masked"
        ))  # fmt: skip
    return slides("Program", frames, [str(i) for i in range(count)], first)


def _part_colour(i: int) -> str:
    return COLOURS[(0, 4, 2, 3)[i % 4]]


def split_keys(keys: int, tile: int, splits: int) -> Drawing:
    """One query and its ``keys`` in ``splits`` of whole tiles. Each split is a program that writes
    a result y and a log-sum-exp L; a second kernel merges them."""
    tiles = -(-keys // tile)
    each = -(-tiles // splits) * tile
    parts = [range(start, min(start + each, keys)) for start in range(0, keys, each)]
    cell = 335 / (len(parts) * each)
    canvas = Canvas(
        WIDTH, 236,
        f"{keys} keys in tiles of {tile}, in {len(parts)} splits: "
        + "; ".join(f"program {i} reads keys {span_of(part)}" for i, part in enumerate(parts))
        + f". {len(parts) * each - keys} places after the last key are masked; a second kernel "
        "merges the results",
    )  # fmt: skip
    canvas.cell(121, 4, 100, 26, "one query", 13, ORANGE, 0.4, ORANGE, bold=True)
    canvas.cell(91, 204, 160, 28, "merge: one result y", 13, GREEN, 0.3, GREEN, bold=True)
    grid = Grid(canvas, 5, 80, cell, 28.5, 2.5)
    for i, part in enumerate(parts):
        colour, middle = _part_colour(i), 4 + cell * each * (i + 0.5)
        canvas.line(171, 30, middle, 56, 1.2, arrow=True)
        canvas.text(middle, 66, f"program {i}", 12, bold=True)
        for s in range(part[0], part[0] + each):
            x = 4 + cell * s
            look = ("", 12, colour, 0.45) if s < keys else ("×", 12, ORANGE, 0.45)
            grid.cell(0, s, *look, radius=1)
            if s % tile == 0 and s > part[0]:
                canvas.line(x, 76, x, 110, 1.6)
        canvas.text(middle, 120, f"keys {span_of(part)}", 11)
        canvas.line(middle, 130, middle, 144, arrow=True)
        width = min(96.0, cell * each - 10)
        canvas.cell(middle - width / 2, 146, width, 26, "its y and L", 12, colour, 0.25, colour)
        canvas.line(middle, 172, 171 + (middle - 171) * 0.45, 202, 1.2, arrow=True)
    return canvas.drawing()


def paged_keys(table: Sequence[int], page: int, length: int, tile: int, pages: int) -> Drawing:
    """The keys of a row, ``tile`` in a tile, and where its ``table`` of pages says that they are in
    a memory of ``pages`` pages of ``page`` slots each. After ``length`` keys all is masked."""
    places = -(-length // tile) * tile
    cell, column = 335 / places, 335 / pages
    says = (
        f"keys {span_of(range(i * page, min((i + 1) * page, length)))} in page {number}"
        for i, number in enumerate(table)
    )
    canvas = Canvas(
        WIDTH, 232, f"{length} keys; page table {list(table)}; {'; '.join(says)}; "
        f"{places - length} places of the last tile are masked",
    )  # fmt: skip
    canvas.note(4, 9, f"keys of the row, a tile holds {tile}")
    keys = Grid(canvas, 5, 20, cell, 26.5, 2.5)
    for s in range(places):
        real = s < length
        text, colour = (s, _part_colour(s // page)) if real else ("×", ORANGE)
        keys.cell(0, s, text, 11, colour, 0.45, radius=1)
        if s % tile == 0 and s:
            x = 3.5 + cell * s
            canvas.line(x, 15, x, 49, 2)
    canvas.note(339, 62, "page table", "end")
    canvas.note(4, 214, f"memory: {pages} pages of {page} slots")
    for number in range(pages):
        x, used = 4 + column * number, number in table
        i = list(table).index(number) if used else 0
        canvas.text(x + column / 2, 194, number, 12, bold=used)
        memory = Grid(canvas, x + 3, 158, (column - 8) / page, 25.5, 1.5)
        for slot in range(page):
            key = i * page + slot
            filled = used and key < length
            fill = _part_colour(i) if filled else "none"
            memory.cell(0, slot, key if filled else "", 10, fill, 0.45, radius=1)
    for i, number in enumerate(table):
        middle, colour = 4 + cell * page * (i + 0.5), _part_colour(i)
        canvas.line(middle, 44, middle, 74, 1, opacity=0.6)
        canvas.cell(middle - 15, 75, 30, 24, number, 13, colour, 0.25, colour, bold=True)
        canvas.line(middle, 100, 4 + column * (number + 0.5), 155, 1.6, colour, arrow=True)
    return canvas.drawing()
