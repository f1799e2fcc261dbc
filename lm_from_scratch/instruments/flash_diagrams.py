"""Drawings of attention kernels: which program reads which keys, and what its masks cut off."""

from collections.abc import Sequence

from lm_from_scratch.instruments.cache_diagrams import steps
from lm_from_scratch.instruments.canvas import BLUE, GREEN, INK, ORANGE, Canvas, Drawing
from lm_from_scratch.instruments.plot import COLOURS, printable


def _frame(canvas: Canvas, x: float, y: float, width: float, height: float, colour: str) -> None:
    """A thick border."""
    for x1, y1, x2, y2 in (
        (x, y, x + width, y), (x + width, y, x + width, y + height),
        (x + width, y + height, x, y + height), (x, y + height, x, y),
    ):  # fmt: skip
        canvas.line(x1, y1, x2, y2, 2.2, colour)


def _span(numbers: range) -> str:
    return f"{numbers[0]}–{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


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
    return steps("Program", frames, [str(i) for i in range(count)], first)


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
