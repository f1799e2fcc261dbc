"""Drawings of the bug museum's stories: NaN on its way, and work that grows."""

import math
from collections.abc import Mapping, Sequence

from lm_from_scratch.drawings.canvas import (
    BLUE,
    INK,
    ORANGE,
    RED,
    Canvas,
    Drawing,
    printable,
)


def nan_spreads(
    words: Sequence[str], tables: Mapping[str, Sequence[Sequence[float]]], hidden: int
) -> Drawing:
    """Tables of numbers by title, side by side, with a row for each of the ``words``, the first
    ``hidden`` of them padding. What is no number is red."""
    left, row, gap = 78, 26, 12
    wide = (343 - left) / len(tables)
    counts = {
        title: sum(any(map(math.isnan, numbers)) for numbers in table)
        for title, table in tables.items()
    }
    canvas = Canvas(
        343, 30 + row * len(words),
        "; ".join(f"{title}: NaN in {count} of {len(words)} rows"
                  for title, count in counts.items()),
    )  # fmt: skip
    for t, word in enumerate(words):
        faint = 0.6 if t < hidden else 1.0
        canvas.text(left - 8, 40 + row * t, printable(word), 12, "end", opacity=faint)
    for p, (title, table) in enumerate(tables.items()):
        x = left + wide * p
        canvas.text(x + (wide - gap) / 2, 12, title, 12, bold=True)
        cell = (wide - gap) / len(table[0])
        for t, numbers in enumerate(table):
            for i, number in enumerate(numbers):
                lost = math.isnan(number)
                colour, tint = (RED, 0.6) if lost else (BLUE, 0.1 if t < hidden else 0.3)
                canvas.box(x + cell * i, 30 + row * t, cell - 2, row - 5, colour, tint, radius=2)
                if lost and cell > 20:
                    canvas.text(x + cell * (i + 0.5) - 1, 40 + row * t, "NaN", 9)
    return canvas.drawing()


def written(work: Mapping[str, Sequence[int]]) -> Drawing:
    """How much each step writes, as a column, once for each name; one scale for all names. The
    last unit of a column is the step's own and is blue, what it writes again is orange."""
    width, high, top = 343, 150, 26
    most = max(map(max, work.values()))
    totals = {name: sum(steps) for name, steps in work.items()}
    canvas = Canvas(
        width, (high + 16) * len(work),
        "; ".join(f"{name}: {totals[name]} writes in {len(steps)} steps, at most {max(steps)} in "
                  "one" for name, steps in work.items()),
    )  # fmt: skip
    for p, (name, steps) in enumerate(work.items()):
        foot, wide = (high + 16) * p + high - 4, (width - 4) / len(steps)
        unit = (high - top - 8) / most
        canvas.text(2, (high + 16) * p + 12, name, 13, "start", bold=True)
        for i, count in enumerate(steps):
            x = 2 + wide * i
            if count > 1:
                canvas.box(x, foot - unit * count, wide - 1.5, unit * (count - 1), ORANGE, 0.6,
                           ORANGE, radius=0)  # fmt: skip
            canvas.box(x, foot - unit, wide - 1.5, unit, BLUE, 0.8, BLUE, radius=0)
        canvas.line(2, foot, width - 2, foot, opacity=0.6)
        canvas.text(2, foot + 10, "token 1", 11, "start", INK, opacity=0.8)
        canvas.text(width - 2, foot + 10, f"token {len(steps)}", 11, "end", INK, opacity=0.8)
        total = f"{totals[name]:,} tokens written"
        canvas.text(width - 2, (high + 16) * p + 12, total, 12, "end")
    return canvas.drawing()
