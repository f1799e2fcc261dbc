"""Drawings of chapter 3: a softmax in tiles, and documents packed into a row."""

import math
from collections.abc import Sequence

from lm_from_scratch.drawings.canvas import (
    BLUE,
    COLOURS,
    INK,
    RED,
    Canvas,
    Drawing,
    printable,
)


def online_softmax_frames(
    words: Sequence[str], scores: Sequence[float], values: Sequence[float], tile: int
) -> Drawing:
    """A softmax in tiles, one frame per tile of keys: the scores it reads, the factor that corrects
    what was added up before, and m, l, a after it. ``values`` is one feature of each key."""
    width, high, top, left = (
        343,
        163,
        4,
        44,
    )  # the first frame corrects nothing: there is room above it
    count = -(-len(words) // tile)
    states: list[tuple[float, float, float]] = []
    canvas = Canvas(width, top + count * high + 16, "")
    columns = 44.0, 155.0, 279.0
    for x, name, meaning in zip(
        columns, "mla", ("largest score", "sum of exponentials", "weighted values")
    ):
        canvas.text(x, 8, name, 13, bold=True)
        canvas.text(x, 23, meaning, 11, opacity=0.8)
    for i in range(count):
        y, keys = top + i * high, range(i * tile, min((i + 1) * tile, len(words)))
        y = y if states else y + 30
        canvas.line(0, y + 4, width, y + 4, opacity=0.3)
        canvas.text(2, y + 20, f"tile {i + 1}", 12, "start", bold=True)
        cell = 240 / len(words)
        for j in range(len(words)):  # read and forgotten, in work, not yet read
            fill, tint = (INK, 0.15) if j < keys[0] else (BLUE, 0.6) if j in keys else ("none", 0)
            canvas.box(width - 241 + j * cell, y + 14, cell - 3, 12, fill, tint, radius=2)
        for j in keys:
            x = left + (width - left) * (j - keys[0] + 0.5) / tile
            canvas.text(x, y + 46, printable(words[j]), 12, bold=True)
            canvas.text(x, y + 63, _signed(scores[j]), 12)
            canvas.text(x, y + 80, _signed(values[j]), 12)
        for k, row in enumerate(("key", "score", "value")):
            canvas.text(2, y + 46 + 17 * k, row, 11, "start", opacity=0.8)
        m = max(scores[j] for j in keys)
        if states:
            m = max(m, states[-1][0])
        weights = [math.exp(scores[j] - m) for j in keys]
        l, a = sum(weights), sum(w * values[j] for w, j in zip(weights, keys))
        if states:
            before, factor = states[-1], math.exp(states[-1][0] - m)
            power = f"{_signed(before[0])} − {_signed(m)}".replace("− −", "+ ")
            canvas.text(2, y + 103, f"factor  exp({power}) = {factor:.2f}", 12, "start", RED)
            parts = [f"{factor:.2f} × {_signed(old)} + {_signed(new)}".replace("+ −", "− ")
                     for old, new in zip(before[1:], (l, a))]  # fmt: skip
            steps = f"{_signed(before[0])} → {_signed(m)}", *parts
            l, a = factor * before[1] + l, factor * before[2] + a
            for x, text in zip(columns, steps):
                canvas.text(x, y + 123, text, 11)
        states.append((m, l, a))
        for x, name, number in zip(columns, "mla", states[-1]):
            canvas.text(x, y + (143 if i else 113), f"{name} = {_signed(number)}", 13, bold=True)
    result = states[-1][2] / states[-1][1]
    canvas.text(columns[2], top + count * high + 6, f"a / l = {_signed(result)}", 13, bold=True)
    canvas.says = f"{count} tiles of keys; after each, " + "; ".join(
        f"m = {m:.1f}, l = {l:.2f}, a = {a:.2f}" for m, l, a in states
    )
    return canvas.drawing()


def _signed(number: float) -> str:
    """Two digits, with a minus sign as wide as a plus."""
    return f"{number:.2f}".replace("-", "−")


def packed_row(pieces: Sequence[Sequence[str]], width: int, a_line: int = 6) -> Drawing:
    """Documents, each a list of pieces, end to end in a row of ``width`` slots. Under each slot are
    its position, the number of its document, and the piece that it is to predict. The row is broken
    into lines of ``a_line`` slots."""
    slots = [(piece, p, d) for d, each in enumerate(pieces) for p, piece in enumerate(each)]
    targets = [target for each in pieces for target in [*each[1:], "–"]]
    empty = width - len(slots)
    left, high = 62, 94
    cell = (343 - left) / a_line
    canvas = Canvas(
        343, high * -(-width // a_line) - 14,
        f"{len(pieces)} documents in a row of {width} slots, {empty} of them empty. Positions "
        "start again at 0 in each document, each has a number, and its last token has no target",
    )  # fmt: skip
    for i, (piece, position, number) in enumerate([*slots, *[("", -1, -1)] * empty]):
        x, y = left + i % a_line * cell, i // a_line * high + 2
        if i % a_line == 0:
            for k, name in enumerate(("position", "document", "target")):
                canvas.text(left - 6, y + 36 + 16 * k, name, 11, "end", opacity=0.8)
        canvas.box(x + 1, y, cell - 2, 24, COLOURS[number % 5] if piece else "none", 0.25)
        canvas.text(x + cell / 2, y + 12, piece.strip(), 11)
        for k, value in enumerate((position, number)):
            canvas.text(x + cell / 2, y + 36 + 16 * k, str(value).replace("-", "−"), 12)
        if piece:
            canvas.text(x + cell / 2, y + 68, targets[i].strip(), 11, opacity=0.8)
    return canvas.drawing()
