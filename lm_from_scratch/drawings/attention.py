"""Drawings of chapter 3: a softmax in tiles, and documents packed into a row."""

import math
from collections.abc import Sequence

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing, Grid
from lm_from_scratch.drawings.colours import BLUE, COLOURS, INK, RED
from lm_from_scratch.drawings.labels import minus, printable


def online_softmax_frames(
    words: Sequence[str], scores: Sequence[float], values: Sequence[float], tile: int
) -> Drawing:
    """A softmax in tiles, one frame per tile of keys: the scores it reads, the factor that corrects
    what was added up before, and m, l, a after it. ``values`` is one feature of each key."""
    high, top, left = 163, 4, 44
    count = -(-len(words) // tile)
    canvas = Canvas(WIDTH, top + count * high + 16)
    columns = 44.0, 155.0, 279.0
    meanings = "largest score", "sum of exponentials", "weighted values"
    for x, name, meaning in zip(columns, "mla", meanings):
        canvas.text(x, 8, name, 13, bold=True)
        canvas.note(x, 23, meaning, "middle")
    m, l, a, captions = -math.inf, 0.0, 0.0, []
    for i in range(count):
        keys = range(i * tile, min((i + 1) * tile, len(words)))
        y = top + i * high + (0 if i else 30)  # the first frame corrects nothing: it is lower
        canvas.line(0, y + 4, WIDTH, y + 4, opacity=0.3)
        canvas.title(y + 20, f"tile {i + 1}", size=12)
        strip = Grid(canvas, WIDTH - 241, y + 14, 240 / len(words), 15)
        for j in range(len(words)):  # read and forgotten, in work, not yet read
            look = (INK, 0.15) if j < keys[0] else (BLUE, 0.6) if j in keys else ("none", 0.0)
            strip.cell(0, j, "", 0, *look, INK)
        for j in keys:
            x = left + (WIDTH - left) * (j - keys[0] + 0.5) / tile
            canvas.text(x, y + 46, printable(words[j]), 12, bold=True)
            canvas.text(x, y + 63, _signed(scores[j]), 12)
            canvas.text(x, y + 80, _signed(values[j]), 12)
        for k, row in enumerate(("key", "score", "value")):
            canvas.note(2, y + 46 + 17 * k, row)
        top_score = max(m, *(scores[j] for j in keys))
        weights = [math.exp(scores[j] - top_score) for j in keys]
        new = sum(weights), sum(w * values[j] for w, j in zip(weights, keys))
        factor = math.exp(m - top_score)
        if i:
            power = f"{_signed(m)} − {_signed(top_score)}".replace("− −", "+ ")
            canvas.text(2, y + 103, f"factor  exp({power}) = {factor:.2f}", 12, "start", RED)
            sums = (
                f"{factor:.2f} × {_signed(before)} + {_signed(more)}".replace("+ −", "− ")
                for before, more in zip((l, a), new)
            )
            for x, text in zip(columns, (f"{_signed(m)} → {_signed(top_score)}", *sums)):
                canvas.text(x, y + 123, text, 11)
        m, l, a = top_score, factor * l + new[0], factor * a + new[1]
        captions.append(f"m = {m:.1f}, l = {l:.2f}, a = {a:.2f}")
        for x, name, number in zip(columns, "mla", (m, l, a)):
            canvas.text(x, y + (143 if i else 113), f"{name} = {_signed(number)}", 13, bold=True)
    canvas.text(columns[2], top + count * high + 6, f"a / l = {_signed(a / l)}", 13, bold=True)
    return canvas.drawing(f"{count} tiles of keys; after each, " + "; ".join(captions))


def _signed(number: float) -> str:
    return minus(f"{number:.2f}")


def packed_row(pieces: Sequence[Sequence[str]], width: int, a_line: int = 6) -> Drawing:
    """Documents, each a list of pieces, end to end in a row of ``width`` slots. Under each slot are
    its position, the number of its document, and the piece that it is to predict. The row is broken
    into lines of ``a_line`` slots."""
    slots = [(piece, p, d) for d, each in enumerate(pieces) for p, piece in enumerate(each)]
    targets = [target for each in pieces for target in [*each[1:], "–"]]
    empty = width - len(slots)
    canvas = Canvas(
        WIDTH, 94 * -(-width // a_line) - 14,
        f"{len(pieces)} documents in a row of {width} slots, {empty} of them empty. Positions "
        "start again at 0 in each document, each has a number, and its last token has no target",
    )  # fmt: skip
    for i, (piece, position, number) in enumerate([*slots, *[("", -1, -1)] * empty]):
        line, column = divmod(i, a_line)
        grid = Grid(canvas, 63, 94 * line + 2, (WIDTH - 62) / a_line, 26, 2)
        if column == 0:
            for k, name in enumerate(("position", "document", "target")):
                canvas.note(56, 94 * line + 38 + 16 * k, name, "end")
        fill = COLOURS[number % 5] if piece else "none"
        grid.cell(0, column, piece.strip(), 11, fill, 0.25, INK, 4)
        x, y = grid.middle(0, column)
        canvas.text(x, y + 24, minus(position), 12)
        canvas.text(x, y + 40, minus(number), 12)
        if piece:
            canvas.note(x, y + 56, targets[i].strip(), "middle")
    return canvas.drawing()
