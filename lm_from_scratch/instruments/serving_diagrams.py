"""Drawings of how many requests are served: batches over time, blocks of paged memory.

Results are plotted (`plot`); here mechanisms are drawn, on a `canvas`.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

from lm_from_scratch.instruments.canvas import INK, Canvas, Drawing
from lm_from_scratch.instruments.plot import COLOURS, printable


def batch_timelines(
    ways: Mapping[str, Sequence[Sequence[int | None]]], names: Sequence[str]
) -> Drawing:
    """Which request each row of a batch works on, pass by pass. ``ways`` holds, by title, the
    passes in order: for each row the number of its request, or None where the row is idle. The
    first pass of a request reads its prompt. ``names`` are those of the requests.
    """
    left, row, gap = 44, 24, 64
    longest = max(map(len, ways.values()))
    cell = (343 - left - 2) / longest
    says, y = [], 0.0
    height = sum(row * len(passes[0]) + gap for passes in ways.values())
    canvas = Canvas(343, height + 14, "")
    for title, passes in ways.items():
        idle = sum(seat is None for seats in passes for seat in seats)
        said = f"{len(passes)} passes, {idle} places idle"
        says.append(f"{title}: {said}")
        canvas.text(2, y + 10, title, 13, "start", bold=True)
        canvas.text(341, y + 10, said, 12, "end")
        y += 22
        for r, seats in enumerate(zip(*passes, strict=True)):
            canvas.text(left - 6, y + row / 2, f"row {r}", 11, "end", opacity=0.8)
            start = 0
            for request, run in groupby(seats):
                length = len(list(run))
                x, wide = left + cell * start, cell * length
                if request is None:
                    canvas.box(x, y + 2, wide - 1, row - 4, INK, 0.14, "none", 2)
                    if wide > 24:
                        canvas.text(x + wide / 2, y + row / 2, "idle", 11, opacity=0.7)
                else:
                    colour = COLOURS[request % 6]
                    canvas.box(x, y + 2, wide - 1, row - 4, colour, 0.35, colour, 2)
                    canvas.box(x, y + 2, min(cell, wide - 1), row - 4, colour, 0.8, colour, 2)
                    middle = x + (cell + wide) / 2 if length > 2 else x + wide / 2
                    canvas.text(middle, y + row / 2, names[request], 12, bold=True)
                start += length
            y += row
        for number in range(0, len(passes) + 1, 10):
            x = left + cell * number
            canvas.line(x, y, x, y + 4, 1)
            canvas.text(x, y + 12, f"{number}", 10, opacity=0.8)
        y += gap - 22
    key = left, "reads its prompt", 0.8, COLOURS[0]
    for x, text, tint, colour in (key, (key[0] + 116, "writes, a token a pass", 0.35, COLOURS[0])):
        canvas.box(x, y - 8, 10, 14, colour, tint, colour, 2)
        canvas.text(x + 15, y - 1, text, 11, "start", opacity=0.8)
    canvas.says = "; ".join(says)
    return canvas.drawing()


def page_table(
    texts: Mapping[str, Sequence[str]], tables: Mapping[str, Sequence[int]], n_blocks: int, P: int,
    kept: Collection[int] = (),
) -> Drawing:  # fmt: skip
    """The blocks of each row, in order, and where the pool keeps them. ``texts`` are the tokens in
    the memory of each row, by its name, and ``tables`` its blocks of P slots. A block of several
    rows has a colour for each; slots without a token have none. ``kept`` are blocks without a row
    that are not free.
    """
    row, wide, left, right = 23, 132, 2, 209
    users = {block: [name for name in tables if block in tables[name]] for block in range(n_blocks)}
    held = sum(map(bool, users.values()))
    height = row * max(sum(map(len, tables.values())) + len(tables), n_blocks + 1)
    canvas = Canvas(
        343, height + 6,
        f"{held} of {n_blocks} blocks in use; "
        + "; ".join(f"{name} is in the blocks {list(table)}" for name, table in tables.items()),
    )  # fmt: skip
    canvas.text(right, 10, f"the pool, {n_blocks} blocks", 12, "start", bold=True)
    inside: dict[int, str] = {}  # the text of each block
    full: dict[int, float] = {}  # the share of its slots that hold a token
    y = 0.0
    for i, (name, table) in enumerate(tables.items()):
        canvas.text(left, y + 10, f"{name}: {len(texts[name])} tokens", 12, "start", bold=True)
        y += row
        for k, block in enumerate(table):
            tokens = texts[name][k * P : (k + 1) * P]
            piece, full[block] = _shortened("".join(tokens), 21), len(tokens) / P
            inside[block] = piece
            canvas.box(left, y + 2, wide, row - 4, edge=COLOURS[i % 6], radius=2)
            canvas.box(left, y + 2, wide * full[block], row - 4, COLOURS[i % 6], 0.25, "none", 2)
            canvas.text(left + 4, y + row / 2, piece, 10, "start")
            end = row * (block + 1.5)
            canvas.line(left + wide + 1, y + row / 2, right - 24, end, 1.6, COLOURS[i % 6])
            y += row
    for block, names in users.items():
        y = row * (block + 1)
        canvas.text(right - 6, y + row / 2, f"{block}", 11, "end", opacity=0.8)
        if not names:
            canvas.box(right, y + 2, wide, row - 4, INK, 0.05, "none", 2)
            state = "kept" if block in kept else "free"
            canvas.text(right + 4, y + row / 2, state, 10, "start", opacity=0.7)
            continue
        colours = [COLOURS[[*tables].index(name) % 6] for name in names]
        part = wide / len(names)
        for k, colour in enumerate(colours):
            canvas.box(right + k * part, y + 2, full[block] * part, row - 4,
                       colour, 0.25, "none", 2)  # fmt: skip
        canvas.box(right, y + 2, wide, row - 4, edge=INK if names[1:] else colours[0], radius=2)
        canvas.text(right + 4, y + row / 2, inside[block], 10, "start")
    return canvas.drawing()


def _shortened(text: str, length: int) -> str:
    text = printable(text)
    return text if len(text) <= length else text[: length - 1] + "…"
