"""Drawings of the GPU chapter: which program reads which numbers, and what a mask cuts off."""

import math
from collections.abc import Mapping, Sequence
from itertools import product

from lm_from_scratch.drawings.canvas import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    Canvas,
    Drawing,
    slides,
)

#: Of programs 0, 1, 2, ...
PROGRAMS = (BLUE, ORANGE, GREEN, PURPLE)


def _cell(
    canvas: Canvas, x: float, y: float, width: float, height: float, text: str = "",
    colour: str = INK, tint: float = 0.35, size: float = 10,
) -> None:  # fmt: skip
    """A place that a program reads or writes."""
    canvas.box(x, y, width - 2, height - 2, colour, tint, colour, radius=2)
    canvas.text(x + width / 2 - 1, y + height / 2 - 1, text, size)


def _masked(canvas: Canvas, x: float, y: float, width: float, height: float) -> None:
    """A place that a mask cuts off: crossed out."""
    canvas.box(x, y, width - 2, height - 2, tint=0.0, radius=2)
    canvas.line(x + 3, y + height - 5, x + width - 5, y + 3, 1, opacity=0.6)
    canvas.line(x + 3, y + 3, x + width - 5, y + height - 5, 1, opacity=0.6)


def lane_box(
    canvas: Canvas, x: float, y: float, width: float, height: float, colour: str, inside: bool,
    tint: float = 0.35,
) -> None:  # fmt: skip
    """A number that a program works on; one outside of the tensor is masked."""
    if inside:
        canvas.box(x, y, width, height, colour, tint, colour, radius=2)
    else:
        _masked(canvas, x, y, width + 2, height + 2)


def programs_on_a_vector(n: int, block: int, note: str = "a mask cuts these off") -> Drawing:
    """The places of ``n`` numbers in blocks of ``block``, one row for each program."""
    programs = -(-n // block)
    left, row = 66, 34
    cell = (343 - left) / block
    canvas = Canvas(
        343, row * programs + 26,
        f"{n} numbers and {programs} programs with blocks of {block}. "
        + "; ".join(
            f"program {p}: offsets {p * block} to {min((p + 1) * block, n) - 1}"
            for p in range(programs)
        )
        + f"; {programs * block - n} places of the last block are masked",
    )  # fmt: skip
    for p in range(programs):
        y = row * p + 4
        canvas.text(0, y + 11, f"program {p}", 11, "start")
        for i in range(block):
            offset, x = p * block + i, left + cell * i
            if offset < n:
                colour = PROGRAMS[p % len(PROGRAMS)]
                _cell(canvas, x, y, cell, 24, str(offset), colour, size=min(10, 0.6 * cell))
            else:
                _masked(canvas, x, y, cell, 24)
    if n < programs * block:
        canvas.text(341, canvas.height - 12, f"✕ {note}", 12, "end")
    return canvas.drawing()


def round_trips(
    ways: Mapping[str, Sequence[tuple[str, Sequence[str], Sequence[str]]]],
) -> Drawing:
    """What kernels read and write: by title, the kernels as (name, tensors read, written)."""
    high, canvas = 158, Canvas(343, 158 * len(ways), "")
    said = []
    for k, (title, kernels) in enumerate(ways.items()):
        y = high * k
        names = list(dict.fromkeys(t for _, read, made in kernels for t in (*read, *made)))
        trips = sum(len(read) + len(made) for _, read, made in kernels)
        said.append(f"{title}: {trips} tensors go between memory and chip")
        wide = 343 / len(names)
        place = {name: wide * (i + 0.5) for i, name in enumerate(names)}
        canvas.text(2, y + 10, title, 13, "start", bold=True)
        canvas.text(341, y + 10, f"{trips} tensors move", 13, "end", bold=True)
        canvas.text(2, y + 142, "chip", 11, "start", opacity=0.8)
        canvas.text(2, y + 26, "memory", 10, "start", opacity=0.8)
        for name, x in place.items():
            canvas.box(x - 24, y + 35, 48, 24, INK, 0.1)
            canvas.text(x, y + 47, name, 13)
        for i, (name, read, made) in enumerate(kernels):
            middle = 343 * (i + 0.5) / len(kernels)
            canvas.box(middle - 52, y + 112, 104, 30, GREEN, 0.3, GREEN)
            canvas.text(middle, y + 127, name, 13, bold=True)
            ends = [(t, BLUE) for t in read] + [(t, ORANGE) for t in made]
            for j, (tensor, colour) in enumerate(ends):
                low = middle - 36 + 72 * (j + 0.5) / len(ends)
                top = place[tensor] + (6 if colour == BLUE else -6)
                points = (top, y + 60, low, y + 110)
                if colour == ORANGE:
                    points = (low, y + 110, top, y + 60)
                canvas.line(*points, 2, colour, arrow=True)
    canvas.says = "; ".join(said)
    return canvas.drawing()


def pointer(values: Sequence[float], block: int, first: int = 1000) -> Drawing:
    """Numbers of 4 bytes in memory from the address ``first`` on, and what a pointer plus the
    offsets of a block is."""
    cell = 343 / len(values)
    canvas = Canvas(
        343, 148,
        f"A pointer x is the address {first}. x plus the offsets 0 to {block - 1} gives the "
        f"addresses {first} to {first + 4 * (block - 1)}, 4 bytes apart",
    )  # fmt: skip
    canvas.text(cell / 2, 10, "x", 15, bold=True)
    canvas.line(cell / 2, 20, cell / 2, 38, 2, BLUE, arrow=True)
    canvas.text(341, 10, "memory", 11, "end", opacity=0.8)
    for i, value in enumerate(values):
        x, inside = cell * i, i < block
        number = f"{value:.1f}".replace("-", "−")
        _cell(
            canvas, x, 40, cell, 30, number, BLUE if inside else INK, 0.35 if inside else 0.05, 13
        )
        canvas.text(x + cell / 2 - 1, 80, str(first + 4 * i), 11, opacity=0.8)
        if inside:
            canvas.line(x + cell / 2 - 1, 108, x + cell / 2 - 1, 90, 1.5, BLUE, arrow=True)
            canvas.text(x + cell / 2 - 1, 118, str(i), 13, bold=True)
    canvas.text(cell * block / 2, 138, f"offsets = tl.arange(0, {block})", 12)
    return canvas.drawing()


def masked_store(n: int, block: int) -> Drawing:
    """The last program's block of ``n`` results in front of memory that belongs to a neighbour:
    stored without a mask, and with one."""
    program = (n - 1) // block
    start, cell = program * block, 343 / block
    canvas = Canvas(
        343, 140,
        f"Program {program} has {n - start} results. Without a mask it also overwrites "
        f"{start + block - n} numbers of a neighbour, with a mask none",
    )  # fmt: skip
    for k, title in enumerate(("without a mask", "with a mask")):
        y = 70 * k
        canvas.text(2, y + 10, title, 13, "start", bold=True)
        note = ("the neighbour's numbers are lost", "the neighbour keeps its numbers")[k]
        canvas.text(341, y + 10, note, 12, "end", RED if not k else INK)
        for i in range(block):
            x = cell * i
            if start + i < n:
                _cell(canvas, x, y + 22, cell, 26, "y", BLUE)
            elif k:
                _cell(canvas, x, y + 22, cell, 26, "−1", INK, 0.05)
            else:
                _cell(canvas, x, y + 22, cell, 26, "?", RED, 0.25)
            canvas.text(x + cell / 2 - 1, y + 56, str(start + i), 9, opacity=0.8)
    return canvas.drawing()


def strides(layouts: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> Drawing:
    """Tables over one memory: by title, (rows, columns) and how many numbers further in memory the
    next row and the next column are. A cell holds its offset."""
    rows = [shape[0] for shape, _ in layouts.values()]
    canvas = Canvas(343, sum(34 * n + 68 for n in rows), "")
    said, y = [], 0.0
    for title, ((high, wide), (down, right)) in layouts.items():
        offsets = [[i * down + j * right for j in range(wide)] for i in range(high)]
        said.append(f"{title}: strides ({down}, {right}), offsets {offsets}")
        canvas.text(2, y + 10, title, 13, "start", bold=True)
        canvas.text(341, y + 10, f"strides ({down}, {right})", 13, "end")
        for i, j in product(range(high), range(wide)):
            colour = PROGRAMS[i % len(PROGRAMS)]
            _cell(canvas, 90 + 44 * j, y + 24 + 34 * i, 44, 34, f"{offsets[i][j]}", colour, size=14)
        canvas.text(2, y + 24 + 17 * high, "the table", 12, "start")
        below = y + 34 + 34 * high
        canvas.text(2, below + 11, "in memory", 12, "start")
        cells = [*product(range(high), range(wide))]
        used = {offsets[i][j]: i for i, j in reversed(cells)}
        for offset in range(6):
            colour = PROGRAMS[used[offset] % len(PROGRAMS)] if offset in used else INK
            strength = 0.35 if offset in used else 0.03
            _cell(canvas, 90 + 40 * offset, below, 40, 24, str(offset), colour, strength, 12)
        y += 34 * high + 68
    canvas.says = "; ".join(said)
    return canvas.drawing()


def row_programs(rows: Sequence[Sequence[float]], words: Sequence[str], block: int) -> Drawing:
    """A program for each row. Places of minus infinity in it are hidden, places after its end are
    padding; darker is larger."""
    left, row = 78, 24
    cell = (343 - left) / block
    known = [v for each in rows for v in each if v > float("-inf")]
    low, high = min(known), max(known)
    width = len(rows[0])
    canvas = Canvas(
        343, row * len(rows) + 60,
        f"{len(rows)} programs, one for each row of {width} numbers, in a block of {block}: the "
        f"last {block - width} places of each are padding of minus infinity",
    )  # fmt: skip
    canvas.text(left + cell * width / 2, 10, f"the row: {width}", 12)
    if block > width:
        canvas.text(left + cell * (width + block) / 2, 10, f"padding: {block - width}", 12)
    for p, (values, word) in enumerate(zip(rows, words, strict=True)):
        y, colour = 22 + row * p, PROGRAMS[p % len(PROGRAMS)]
        canvas.text(left - 6, y + 11, word.strip(" ") or word, 12, "end", bold=True)
        for i in range(block):
            x = left + cell * i
            if i >= width:
                _masked(canvas, x, y, cell, row)
            elif values[i] == float("-inf"):
                _cell(canvas, x, y, cell, row, "−∞", INK, 0.03, 10)
            else:
                share = (values[i] - low) / ((high - low) or 1)
                _cell(canvas, x, y, cell, row, "", colour, round(0.1 + 0.8 * share, 1))
    foot = canvas.height - 26
    canvas.text(left, foot, "−∞: hidden, the row holds it", 12, "start")
    canvas.text(left, foot + 17, "✕: masked, the load puts −∞ there", 12, "start")
    return canvas.drawing()


def online_sum_frames(row: Sequence[float], block: int, first: int = 0) -> Drawing:
    """A row read block by block: the largest number so far, and the sum relative to it. Frame
    ``first`` is shown at the beginning."""
    starts = range(0, len(row), block)
    cell = 343 / (block * len(starts))
    low, high = min(row), max(row)
    frames, top, total = [], -math.inf, 0.0
    for start in starts:
        part = row[start : start + block]
        raised = max(top, *part)
        factor = math.exp(top - raised)
        new = sum(math.exp(v - raised) for v in part)
        after = total * factor + new
        canvas = Canvas(
            343, 188,
            f"The block has the maximum {max(part):.1f}. m is now {raised:.1f}, the old sum "
            f"{total:.2f} is multiplied by {factor:.2f}, and the new sum is {after:.2f}",
        )  # fmt: skip
        canvas.line(0, 102, 343, 102, opacity=0.5)
        for i, value in enumerate(row):
            now = start <= i < start + block
            tall = round(10 + 62 * (value - low) / ((high - low) or 1))
            colour, strength = (BLUE, 0.6) if now else (INK, 0.15 if i < start else 0.0)
            canvas.box(cell * i, 102 - tall, cell - 2, tall, colour, strength, radius=1)
        level = 102 - round(10 + 62 * (raised - low) / ((high - low) or 1))
        canvas.line(0, level, 343, level, 1.5, RED, dashes="4 3")
        canvas.text(2, level - 10, f"m = {raised:.1f}", 13, "start", RED, bold=True)
        note = "the maximum rises" if raised > top else "the maximum stays"
        canvas.text(2, 122, note, 13, "start", bold=raised > top)
        canvas.text(2, 144, f"old sum {total:.2f} × e^(m − m′) = {total * factor:.2f}", 13, "start")
        canvas.text(2, 164, f"this block adds {new:.2f}", 13, "start")
        canvas.text(341, 164, f"ℓ = {after:.2f}", 15, "end", bold=True)
        frames.append(canvas.drawing())
        top, total = raised, after
    labels = [str(i + 1) for i in range(len(starts))]
    return slides("Block", frames, labels, first)


def row_blocks(rows: int, width: int, rows_of_a_block: int, block: int) -> Drawing:
    """A program for each ``rows_of_a_block`` rows, with blocks of ``block`` columns."""
    programs = -(-rows // rows_of_a_block)
    left, cell = 70, min(30.0, (343 - 70) / block)
    canvas = Canvas(
        343, 30 * programs * rows_of_a_block + 10 * programs + 40,
        f"{rows} rows of {width} numbers, {programs} programs with {rows_of_a_block} rows and "
        f"{block} columns each: the mask cuts off {block - width} columns, and "
        f"{programs * rows_of_a_block - rows} rows of the last program",
    )  # fmt: skip
    y = 4.0
    for p in range(programs):
        canvas.text(0, y + 15 * rows_of_a_block, f"program {p}", 11, "start")
        for i in range(rows_of_a_block):
            row = p * rows_of_a_block + i
            for column in range(block):
                if row < rows and column < width:
                    colour = PROGRAMS[p % len(PROGRAMS)]
                    text = str(row * width + column)
                    _cell(canvas, left + cell * column, y, cell, 30, text, colour, size=12)
                else:
                    _masked(canvas, left + cell * column, y, cell, 30)
            y += 30
        y += 10
    canvas.text(left, y + 8, f"row < {rows} and column < {width}; else ✕", 12, "start")
    return canvas.drawing()


def sums_across(blocks: int, programs: int) -> Drawing:
    """Two ways for programs to add to one vector: atomic additions by a program for each of the
    ``blocks``, and a fixed number of ``programs`` with partial sums of their own."""
    canvas = Canvas(
        343, 326,
        f"Atomic: {blocks} programs add to one vector, in the order in which they finish. Partial "
        f"sums: {programs} programs take blocks "
        + ", ".join(str([*range(p, blocks, programs)]) for p in range(programs))
        + ", write a row each, and the rows are added",
    )  # fmt: skip
    canvas.text(2, 10, "atomic: order of arrival", 13, "start", bold=True)
    wide = 343 / blocks
    for b in range(blocks):
        x, colour = wide * b, PROGRAMS[b % len(PROGRAMS)]
        _cell(canvas, x, 24, wide, 26, f"block {b}", colour, size=min(12, wide / 5))
        canvas.line(
            x + wide / 2, 52, 171 + (b - blocks / 2 + 0.5) * 16, 84, 1.5, colour, arrow=True
        )
    _cell(canvas, 86, 86, 172, 28, "one vector w′", RED, 0.2, 13)
    y = 140
    canvas.text(2, y, "partial sums: always the same order", 13, "start", bold=True)
    wide = 343 / programs
    for p in range(programs):
        x, colour = wide * p, PROGRAMS[p % len(PROGRAMS)]
        canvas.text(x + wide / 2, y + 22, f"program {p}", 12, bold=True)
        mine = [*range(p, blocks, programs)]
        for i, b in enumerate(mine):
            part = (wide - 6) / len(mine)
            _cell(
                canvas,
                x + 2 + part * i,
                y + 34,
                part,
                26,
                f"block {b}",
                colour,
                size=min(12, part / 5),
            )
        canvas.line(x + wide / 2, y + 62, x + wide / 2, y + 80, 1.5, colour, arrow=True)
        _cell(canvas, x + 4, y + 82, wide - 8, 26, f"partial row {p}", colour, 0.2, 12)
        canvas.line(
            x + wide / 2, y + 110, 171 + (p - programs / 2 + 0.5) * 30, y + 138, 1.5, arrow=True
        )
    _cell(canvas, 86, y + 140, 172, 28, "sum of the rows: w′", GREEN, 0.2, 13)
    canvas.height = y + 176
    return canvas.drawing()


def rope_rows(T: int, H: int, half: int, rows: int, block: int) -> Drawing:
    """RoPE of ``T`` tokens with ``H`` heads of two halves, ``half`` pairs: a program turns ``rows``
    rows, and its blocks are ``block`` pairs wide. Heads of a token share its angles."""
    programs = -(-T * H // rows)
    high, lane, top, left = 17, 14, 44, 118
    gap = 20
    second = left + block * lane + gap
    angle = second + block * lane + gap
    canvas = Canvas(
        343, top + high * rows * programs + 30,
        f"{T} tokens with {H} heads are {T * H} rows, in {programs} programs of {rows} rows. Each "
        f"loads {block} numbers of either half of a row, of which {block - half} are masked, and "
        f"{programs * rows - T * H} rows of the last program are masked. "
        f"{H} rows share the angles of their token",
    )  # fmt: skip
    for x, name in ((left, "a"), (second, "b")):
        canvas.text(x + half * lane / 2, 12, f"half {name}", 12, bold=True)
        canvas.text(x + half * lane / 2, 29, f"{half} features", 10, opacity=0.8)
    canvas.text(angle + 18, 12, "angles", 12, bold=True)
    canvas.text(2, 29, "program", 10, "start", opacity=0.8)
    for r in range(rows * programs):
        y, program = top + high * r, r // rows
        colour = PROGRAMS[program % 2]
        if r % rows == 0:
            canvas.line(24, y + 1, 24, y + high * rows - 5, 3, colour)
            canvas.text(12, y + high * rows / 2, str(program), 14, bold=True)
        if r < T * H:
            label = f"token {r // H}, head {r % H}"
            canvas.text(left - 6, y + 7, label, 10, "end")
        for x in (left, second):
            for i in range(block):
                lane_box(
                    canvas, x + lane * i, y, lane - 2, high - 4, colour, r < T * H and i < half
                )
    for t in range(T):
        y = top + high * H * t
        tall = high * H - 5
        canvas.box(angle, y, 36, tall, GREEN, 0.3, GREEN, radius=3)
        canvas.text(angle + 18, y + tall / 2, str(t), 12)
        canvas.line(angle - 5, y, angle - 5, y + tall, 1.2, GREEN)
    foot = canvas.height - 12
    canvas.text(left, foot, "✕ masked: neither read nor written", 12, "start")
    return canvas.drawing()


def memory_places(tables: Mapping[str, Sequence[Sequence[int]]]) -> Drawing:
    """Where in memory each row of a tensor lies, by its head and its token; a table for each
    layout, by its title."""
    first = next(iter(tables.values()))
    H, T = len(first), len(first[0])
    left, cell, high = 70, min(42.0, 270 / T), 26
    part = high * H + 62
    says = []
    canvas = Canvas(343, part * len(tables), "")
    for i, (title, places) in enumerate(tables.items()):
        top = part * i + 40
        canvas.text(2, top - 28, title, 13, "start", bold=True)
        canvas.text(left - 8, top - 9, "token", 11, "end", opacity=0.8)
        for t in range(T):
            canvas.text(left + cell * (t + 0.5) - 1, top - 9, str(t), 11, opacity=0.8)
        for h, row in enumerate(places):
            canvas.text(left - 8, top + high * (h + 0.5) - 1, f"head {h}", 12, "end")
            for t, place in enumerate(row):
                x, y = left + cell * t, top + high * h
                tint = 0.08 + 0.6 * place / (H * T)
                canvas.box(x, y, cell - 3, high - 3, BLUE, tint, BLUE, radius=2)
                canvas.text(x + cell / 2 - 1.5, y + high / 2 - 1.5, str(place), 12)
        says.append(
            f"{title}: " + "; ".join(f"head {h} {list(row)}" for h, row in enumerate(places))
        )
    canvas.says = ". ".join(says)
    return canvas.drawing()


def optimizer_blocks(
    tensors: Mapping[str, tuple[str, bool]], n: int, block: int, each: str = "weights"
) -> Drawing:
    """An optimizer's step in programs of ``block`` of ``n`` numbers: what each reads and writes.

    ``tensors``, by a letter: what it is, and whether it is written.
    """
    programs = -(-n // block)
    left, high, top = 82, 46, 46
    lane = min(18.0, (290 - left) / (programs * block))
    canvas = Canvas(
        343, top + high * len(tensors) + 26,
        f"{n} {each} in {programs} programs of {block}: each reads its block of "
        f"{', '.join(tensors)} and writes over its block of "
        f"{', '.join(name for name, (_, written) in tensors.items() if written)}; "
        f"{programs * block - n} numbers of the last program are masked",
    )  # fmt: skip
    canvas.text(2, 16, "program", 11, "start", opacity=0.8)
    for program in range(programs):
        x, colour = left + lane * block * program, PROGRAMS[program % len(PROGRAMS)]
        canvas.text(x + lane * block / 2 - 2, 16, str(program), 14, bold=True)
        canvas.line(x + 2, 29, x + lane * block - 6, 29, 3, colour)
    for i, (name, (what, written)) in enumerate(tensors.items()):
        y = top + high * i
        canvas.text(2, y + 8, name, 14, "start", bold=True)
        canvas.text(2, y + 24, what, 10, "start", opacity=0.85)
        for k in range(programs * block):
            gap = -4 if k % block == block - 1 else 0
            colour = PROGRAMS[k // block % len(PROGRAMS)]
            lane_box(canvas, left + lane * k + 2 * (gap == 0) - 1, y, lane - 3, 18, colour, k < n)
        canvas.text(341, y + 2, "read", 11, "end")
        if written:
            canvas.text(341, y + 17, "written", 11, "end", bold=True)
    foot = canvas.height - 12
    canvas.text(left, foot, "✕ masked: beyond the last weight", 12, "start")
    return canvas.drawing()
