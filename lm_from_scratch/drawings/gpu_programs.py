"""Drawings of the GPU chapter: which program reads which numbers, and what a mask cuts off."""

import math
from collections.abc import Mapping, Sequence

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing, Grid, slides
from lm_from_scratch.drawings.colours import BLUE, GREEN, INK, ORANGE, PURPLE, RED
from lm_from_scratch.drawings.labels import minus


def colour_of(program: int) -> str:
    """The colour of a program, whatever it draws."""
    return (BLUE, ORANGE, GREEN, PURPLE)[program % 4]


def programs_on_a_vector(n: int, block: int, note: str = "a mask cuts these off") -> Drawing:
    """The places of ``n`` numbers in blocks of ``block``, one row for each program."""
    programs = -(-n // block)
    says = (
        f"program {p}: offsets {p * block} to {min((p + 1) * block, n) - 1}"
        for p in range(programs)
    )
    canvas = Canvas(
        WIDTH, 34 * programs + 26,
        f"{n} numbers and {programs} programs with blocks of {block}. {'; '.join(says)}; "
        f"{programs * block - n} places of the last block are masked",
    )  # fmt: skip
    grid = Grid(canvas, 66, 4, 277 / block, 24, 2)
    for p in range(programs):
        grid.top = 34 * p + 4
        canvas.text(0, 34 * p + 15, f"program {p}", 11, "start")
        for i in range(block):
            offset = p * block + i
            if offset < n:
                grid.cell(0, i, offset, min(10, 0.6 * grid.wide), colour_of(p), 0.35)
            else:
                grid.masked(0, i)
    if n < programs * block:
        canvas.text(341, canvas.height - 12, f"✕ {note}", 12, "end")
    return canvas.drawing()


def round_trips(
    ways: Mapping[str, Sequence[tuple[str, Sequence[str], Sequence[str]]]],
) -> Drawing:
    """What kernels read and write: by title, the kernels as (name, tensors read, written)."""
    canvas, says = Canvas(WIDTH, 158 * len(ways)), []
    for k, (title, kernels) in enumerate(ways.items()):
        y = 158 * k
        names = list(dict.fromkeys(t for _, read, written in kernels for t in (*read, *written)))
        trips = sum(len(read) + len(written) for _, read, written in kernels)
        says.append(f"{title}: {trips} tensors go between memory and chip")
        place = {name: WIDTH / len(names) * (i + 0.5) for i, name in enumerate(names)}
        canvas.text(2, y + 10, title, 13, "start", bold=True)
        canvas.text(341, y + 10, f"{trips} tensors move", 13, "end", bold=True)
        canvas.note(2, y + 142, "chip")
        canvas.note(2, y + 26, "memory", size=10)
        for name, x in place.items():
            canvas.cell(x - 24, y + 35, 48, 24, name, 13, INK, 0.1)
        for i, (name, read, written) in enumerate(kernels):
            middle = WIDTH * (i + 0.5) / len(kernels)
            canvas.cell(middle - 52, y + 112, 104, 30, name, 13, GREEN, 0.3, GREEN, bold=True)
            ends = [(place[t] + 6, y + 60, BLUE) for t in read]
            ends += [(place[t] - 6, y + 60, ORANGE) for t in written]
            for j, (top, high, colour) in enumerate(ends):
                kernel, tensor = (middle - 36 + 72 * (j + 0.5) / len(ends), y + 110), (top, high)
                way = (*tensor, *kernel) if colour == BLUE else (*kernel, *tensor)
                canvas.line(*way, 2, colour, arrow=True)
    return canvas.drawing("; ".join(says))


def pointer(values: Sequence[float], block: int, first: int = 1000) -> Drawing:
    """Numbers of 4 bytes in memory from the address ``first`` on, and what a pointer plus the
    offsets of a block is."""
    canvas = Canvas(
        WIDTH, 148,
        f"A pointer x is the address {first}. x plus the offsets 0 to {block - 1} gives the "
        f"addresses {first} to {first + 4 * (block - 1)}, 4 bytes apart",
    )  # fmt: skip
    grid = Grid(canvas, 0, 40, WIDTH / len(values), 30, 2)
    canvas.text(grid.wide / 2, 10, "x", 15, bold=True)
    canvas.line(grid.wide / 2, 20, grid.wide / 2, 38, 2, BLUE, arrow=True)
    canvas.note(341, 10, "memory", "end")
    for i, value in enumerate(values):
        look = (BLUE, 0.35) if i < block else (INK, 0.05)
        grid.cell(0, i, minus(f"{value:.1f}"), 13, *look)
        x, _ = grid.middle(0, i)
        canvas.note(x, 80, first + 4 * i, "middle")
        if i < block:
            canvas.line(x, 108, x, 90, 1.5, BLUE, arrow=True)
            canvas.text(x, 118, i, 13, bold=True)
    canvas.text(grid.wide * block / 2, 138, f"offsets = tl.arange(0, {block})", 12)
    return canvas.drawing()


def masked_store(n: int, block: int) -> Drawing:
    """The last program's block of ``n`` results in front of memory that belongs to a neighbour:
    stored without a mask, and with one."""
    program = (n - 1) // block
    start = program * block
    canvas = Canvas(
        WIDTH, 140,
        f"Program {program} has {n - start} results. Without a mask it also overwrites "
        f"{start + block - n} numbers of a neighbour, with a mask none",
    )  # fmt: skip
    for k, (title, note, colour, lost) in enumerate((
        ("without a mask", "the neighbour's numbers are lost", RED, ("?", RED, 0.25)),
        ("with a mask", "the neighbour keeps its numbers", INK, ("−1", INK, 0.05)),
    )):  # fmt: skip
        canvas.text(2, 70 * k + 10, title, 13, "start", bold=True)
        canvas.text(341, 70 * k + 10, note, 12, "end", colour)
        grid = Grid(canvas, 0, 70 * k + 22, WIDTH / block, 26, 2)
        for i in range(block):
            text, fill, strength = ("y", BLUE, 0.35) if start + i < n else lost
            grid.cell(0, i, text, 10, fill, strength)
            canvas.note(grid.middle(0, i)[0], 70 * k + 56, start + i, "middle", 9)
    return canvas.drawing()


def strides(layouts: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> Drawing:
    """Tables over one memory: by title, (rows, columns) and how many numbers further in memory the
    next row and the next column are. A cell holds its offset."""
    canvas = Canvas(WIDTH, sum(34 * rows + 68 for (rows, _), _ in layouts.values()))
    says, y = [], 0.0
    for title, ((rows, columns), (down, right)) in layouts.items():
        offsets = [[i * down + j * right for j in range(columns)] for i in range(rows)]
        says.append(f"{title}: strides ({down}, {right}), offsets {offsets}")
        canvas.text(2, y + 10, title, 13, "start", bold=True)
        canvas.text(341, y + 10, f"strides ({down}, {right})", 13, "end")
        table = Grid(canvas, 90, y + 24, 44, 34, 2)
        owner: dict[int, int] = {}
        for i, row in enumerate(offsets):
            for j, offset in enumerate(row):
                owner.setdefault(offset, i)
                table.cell(i, j, offset, 14, colour_of(i), 0.35)
        below = y + 34 + 34 * rows
        canvas.text(2, y + 24 + 17 * rows, "the table", 12, "start")
        canvas.text(2, below + 11, "in memory", 12, "start")
        memory = Grid(canvas, 90, below, 40, 24, 2)
        for offset in range(6):
            look = (colour_of(owner[offset]), 0.35) if offset in owner else (INK, 0.03)
            memory.cell(0, offset, offset, 12, *look)
        y += 34 * rows + 68
    return canvas.drawing("; ".join(says))


def row_programs(rows: Sequence[Sequence[float]], words: Sequence[str], block: int) -> Drawing:
    """A program for each row. Places of minus infinity in it are hidden, places after its end are
    padding; darker is larger."""
    finite = [value for row in rows for value in row if value > -math.inf]
    low, high = min(finite), max(finite)
    width = len(rows[0])
    canvas = Canvas(
        WIDTH, 24 * len(rows) + 60,
        f"{len(rows)} programs, one for each row of {width} numbers, in a block of {block}: the "
        f"last {block - width} places of each are padding of minus infinity",
    )  # fmt: skip
    grid = Grid(canvas, 78, 22, 265 / block, 24, 2)
    canvas.text(78 + grid.wide * width / 2, 10, f"the row: {width}", 12)
    if block > width:
        canvas.text(78 + grid.wide * (width + block) / 2, 10, f"padding: {block - width}", 12)
    for p, (values, word) in enumerate(zip(rows, words, strict=True)):
        grid.name(p, word.strip(" ") or word, bold=True, away=6)
        for i in range(block):
            if i >= width:
                grid.masked(p, i)
            elif values[i] == -math.inf:
                grid.cell(p, i, "−∞", 10, INK, 0.03)
            else:
                share = (values[i] - low) / ((high - low) or 1)
                grid.cell(p, i, "", 10, colour_of(p), round(0.1 + 0.8 * share, 1))
    foot = canvas.height - 26
    canvas.text(78, foot, "−∞: hidden, the row holds it", 12, "start")
    canvas.text(78, foot + 17, "✕: masked, the load puts −∞ there", 12, "start")
    return canvas.drawing()


def online_sum_frames(row: Sequence[float], block: int, first: int = 0) -> Drawing:
    """A row read block by block: the largest number so far, and the sum relative to it. Frame
    ``first`` is shown at the beginning."""
    starts = range(0, len(row), block)
    cell, low, spread = WIDTH / (block * len(starts)), min(row), (max(row) - min(row)) or 1
    frames, top, total = [], -math.inf, 0.0
    for start in starts:
        part = row[start : start + block]
        raised = max(top, *part)
        factor = math.exp(top - raised)
        new = sum(math.exp(v - raised) for v in part)
        after = total * factor + new
        canvas = Canvas(
            WIDTH, 188,
            f"The block has the maximum {max(part):.1f}. m is now {raised:.1f}, the old sum "
            f"{total:.2f} is multiplied by {factor:.2f}, and the new sum is {after:.2f}",
        )  # fmt: skip
        canvas.line(0, 102, WIDTH, 102, opacity=0.5)
        for i, value in enumerate(row):
            now = start <= i < start + block
            tall = round(10 + 62 * (value - low) / spread)
            look = (BLUE, 0.6) if now else (INK, 0.15 if i < start else 0.0)
            canvas.box(cell * i, 102 - tall, cell - 2, tall, *look, radius=1)
        level = 102 - round(10 + 62 * (raised - low) / spread)
        canvas.line(0, level, WIDTH, level, 1.5, RED, dashes="4 3")
        canvas.text(2, level - 10, f"m = {raised:.1f}", 13, "start", RED, bold=True)
        note = "the maximum rises" if raised > top else "the maximum stays"
        canvas.text(2, 122, note, 13, "start", bold=raised > top)
        canvas.text(2, 144, f"old sum {total:.2f} × e^(m − m′) = {total * factor:.2f}", 13, "start")
        canvas.text(2, 164, f"this block adds {new:.2f}", 13, "start")
        canvas.text(341, 164, f"ℓ = {after:.2f}", 15, "end", bold=True)
        frames.append(canvas.drawing())
        top, total = raised, after
    return slides("Block", frames, [str(i + 1) for i in range(len(starts))], first)


def row_blocks(rows: int, width: int, rows_of_a_block: int, block: int) -> Drawing:
    """A program for each ``rows_of_a_block`` rows, with blocks of ``block`` columns."""
    programs, high = -(-rows // rows_of_a_block), 30 * rows_of_a_block + 10
    canvas = Canvas(
        WIDTH, high * programs + 40,
        f"{rows} rows of {width} numbers, {programs} programs with {rows_of_a_block} rows and "
        f"{block} columns each: the mask cuts off {block - width} columns, and "
        f"{programs * rows_of_a_block - rows} rows of the last program",
    )  # fmt: skip
    for p in range(programs):
        grid = Grid(canvas, 70, high * p + 4, min(30.0, 273 / block), 30, 2)
        canvas.text(0, high * p + 4 + 15 * rows_of_a_block, f"program {p}", 11, "start")
        for i in range(rows_of_a_block):
            row = p * rows_of_a_block + i
            for column in range(block):
                if row < rows and column < width:
                    grid.cell(i, column, row * width + column, 12, colour_of(p), 0.35)
                else:
                    grid.masked(i, column)
    foot = f"row < {rows} and column < {width}; else ✕"
    canvas.text(70, high * programs + 12, foot, 12, "start")
    return canvas.drawing()


def sums_across(blocks: int, programs: int) -> Drawing:
    """Two ways for programs to add to one vector: atomic additions by a program for each of the
    ``blocks``, and a fixed number of ``programs`` with partial sums of their own."""
    canvas = Canvas(
        WIDTH, 316,
        f"Atomic: {blocks} programs add to one vector, in the order in which they finish. Partial "
        f"sums: {programs} programs take blocks "
        + ", ".join(str([*range(p, blocks, programs)]) for p in range(programs))
        + ", write a row each, and the rows are added",
    )  # fmt: skip
    canvas.text(2, 10, "atomic: order of arrival", 13, "start", bold=True)
    wide = WIDTH / blocks
    grid = Grid(canvas, 0, 24, wide, 26, 2)
    for b in range(blocks):
        grid.cell(0, b, f"block {b}", min(12, wide / 5), colour_of(b), 0.35)
        x, end = wide * (b + 0.5), 171 + (b - blocks / 2 + 0.5) * 16
        canvas.line(x, 52, end, 84, 1.5, colour_of(b), arrow=True)
    Grid(canvas, 86, 86, 172, 28, 2).cell(0, 0, "one vector w′", 13, RED, 0.2)
    canvas.text(2, 140, "partial sums: always the same order", 13, "start", bold=True)
    wide = WIDTH / programs
    for p in range(programs):
        x, colour, mine = wide * p, colour_of(p), range(p, blocks, programs)
        middle, end = x + wide / 2, 171 + (p - programs / 2 + 0.5) * 30
        canvas.text(middle, 162, f"program {p}", 12, bold=True)
        grid = Grid(canvas, x + 2, 174, (wide - 6) / len(mine), 26, 2)
        for i, b in enumerate(mine):
            grid.cell(0, i, f"block {b}", min(12, grid.wide / 5), colour, 0.35)
        canvas.line(middle, 202, middle, 220, 1.5, colour, arrow=True)
        row = Grid(canvas, x + 4, 222, wide - 8, 26, 2)
        row.cell(0, 0, f"partial row {p}", 12, colour, 0.2)
        canvas.line(middle, 250, end, 278, 1.5, arrow=True)
    Grid(canvas, 86, 280, 172, 28, 2).cell(0, 0, "sum of the rows: w′", 13, GREEN, 0.2)
    return canvas.drawing()


def rope_rows(T: int, H: int, half: int, rows: int, block: int) -> Drawing:
    """RoPE of ``T`` tokens with ``H`` heads of two halves, ``half`` pairs: a program turns ``rows``
    rows, and its blocks are ``block`` pairs wide. Heads of a token share its angles."""
    programs = -(-T * H // rows)
    high, wide, top, left = 17, 14, 44, 118
    second, angle = left + block * wide + 20, left + 2 * block * wide + 40
    canvas = Canvas(
        WIDTH, top + high * rows * programs + 30,
        f"{T} tokens with {H} heads are {T * H} rows, in {programs} programs of {rows} rows. Each "
        f"loads {block} numbers of either half of a row, of which {block - half} are masked, and "
        f"{programs * rows - T * H} rows of the last program are masked. "
        f"{H} rows share the angles of their token",
    )  # fmt: skip
    for x, name in ((left, "a"), (second, "b")):
        canvas.text(x + half * wide / 2, 12, f"half {name}", 12, bold=True)
        canvas.note(x + half * wide / 2, 29, f"{half} features", "middle", 10)
    canvas.text(angle + 18, 12, "angles", 12, bold=True)
    canvas.note(2, 29, "program", size=10)
    halves = [Grid(canvas, x, top, wide, 15, 2) for x in (left, second)]
    for r in range(rows * programs):
        y, colour = top + high * r, colour_of(r // rows % 2)
        if r % rows == 0:
            canvas.line(24, y + 1, 24, y + high * rows - 5, 3, colour)
            canvas.text(12, y + high * rows / 2, r // rows, 14, bold=True)
        if r < T * H:
            canvas.text(left - 6, y + 7, f"token {r // H}, head {r % H}", 10, "end")
        for grid in halves:
            for i in range(block):
                if r < T * H and i < half:
                    grid.cell(r * high / 15, i, "", 0, colour, 0.35)
                else:
                    grid.masked(r * high / 15, i)
    for t in range(T):
        y, tall = top + high * H * t, high * H - 5
        canvas.cell(angle, y, 36, tall, t, 12, GREEN, 0.3, GREEN, 3)
        canvas.line(angle - 5, y, angle - 5, y + tall, 1.2, GREEN)
    canvas.text(left, canvas.height - 12, "✕ masked: neither read nor written", 12, "start")
    return canvas.drawing()


def memory_places(tables: Mapping[str, Sequence[Sequence[int]]]) -> Drawing:
    """Where in memory each row of a tensor lies, by its head and its token; a table for each
    layout, by its title."""
    H, T = next((len(table), len(table[0])) for table in tables.values())
    part, cell = 26 * H + 62, min(42.0, 270 / T)
    says = (
        f"{title}: " + "; ".join(f"head {h} {list(row)}" for h, row in enumerate(places))
        for title, places in tables.items()
    )
    canvas = Canvas(WIDTH, part * len(tables), ". ".join(says))
    for i, (title, places) in enumerate(tables.items()):
        top = part * i + 40
        canvas.text(2, top - 28, title, 13, "start", bold=True)
        canvas.note(62, top - 9, "token", "end")
        for t in range(T):
            canvas.note(70 + cell * (t + 0.5) - 1, top - 9, t, "middle")
        grid = Grid(canvas, 70, top, cell, 26)
        for h, row in enumerate(places):
            canvas.text(62, top + 26 * (h + 0.5) - 1, f"head {h}", 12, "end")
            for t, place in enumerate(row):
                grid.cell(h, t, place, 12, BLUE, 0.08 + 0.6 * place / (H * T))
    return canvas.drawing()


def optimizer_blocks(
    tensors: Mapping[str, tuple[str, bool]], n: int, block: int, each: str = "weights"
) -> Drawing:
    """An optimizer's step in programs of ``block`` of ``n`` numbers: what each reads and writes.

    ``tensors``, by a letter: what it is, and whether it is written.
    """
    programs, left = -(-n // block), 82
    wide = min(18.0, 208 / (programs * block))
    canvas = Canvas(
        WIDTH, 46 * len(tensors) + 72,
        f"{n} {each} in {programs} programs of {block}: each reads its block of "
        f"{', '.join(tensors)} and writes over its block of "
        f"{', '.join(name for name, (_, written) in tensors.items() if written)}; "
        f"{programs * block - n} numbers of the last program are masked",
    )  # fmt: skip
    canvas.note(2, 16, "program")
    for p in range(programs):
        x, end = left + wide * block * p, left + wide * block * (p + 1)
        canvas.text((x + end) / 2 - 2, 16, p, 14, bold=True)
        canvas.line(x + 2, 29, end - 6, 29, 3, colour_of(p))
    for i, (name, (what, written)) in enumerate(tensors.items()):
        y = 46 * i + 46
        canvas.text(2, y + 8, name, 14, "start", bold=True)
        canvas.text(2, y + 24, what, 10, "start", opacity=0.85)
        for k in range(programs * block):
            last = k % block == block - 1  # it stands nearer, so that blocks stand apart
            grid = Grid(canvas, left + wide * k + (-1 if last else 1), y, wide - 1, 20, 2)
            if k < n:
                grid.cell(0, 0, "", 0, colour_of(k // block), 0.35)
            else:
                grid.masked(0, 0)
        canvas.text(341, y + 2, "read", 11, "end")
        if written:
            canvas.text(341, y + 17, "written", 11, "end", bold=True)
    canvas.text(left, canvas.height - 12, "✕ masked: beyond the last weight", 12, "start")
    return canvas.drawing()
