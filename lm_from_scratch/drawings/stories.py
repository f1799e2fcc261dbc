"""Drawings of the bug museum's stories: NaN on its way, and work that grows."""

import math
from collections.abc import Mapping, Sequence

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing, Grid
from lm_from_scratch.drawings.colours import BLUE, ORANGE, RED
from lm_from_scratch.drawings.labels import printable


def nan_spreads(
    words: Sequence[str], tables: Mapping[str, Sequence[Sequence[float]]], hidden: int
) -> Drawing:
    """Tables of numbers by title, side by side, with a row for each of the ``words``, the first
    ``hidden`` of them padding. What is no number is red."""
    left, gap = 78, 12
    wide = (WIDTH - left) / len(tables)
    canvas, says = Canvas(WIDTH, 30 + 26 * len(words)), []
    for t, word in enumerate(words):
        faint = 0.6 if t < hidden else 1.0
        canvas.text(left - 8, 40 + 26 * t, printable(word), 12, "end", opacity=faint)
    for p, (title, table) in enumerate(tables.items()):
        x = left + wide * p
        canvas.text(x + (wide - gap) / 2, 12, title, 12, bold=True)
        grid = Grid(canvas, x, 30, (wide - gap) / len(table[0]), 26, 2)
        for t, numbers in enumerate(table):
            for i, number in enumerate(numbers):
                look = (BLUE, 0.1 if t < hidden else 0.3)
                text = ""
                if math.isnan(number):
                    look, text = (RED, 0.6), "NaN" if grid.wide > 20 else ""
                grid.cell(t, i, text, 9, *look, down=23 / 26)
        count = sum(any(map(math.isnan, numbers)) for numbers in table)
        says.append(f"{title}: NaN in {count} of {len(words)} rows")
    return canvas.drawing("; ".join(says))


def written(work: Mapping[str, Sequence[int]]) -> Drawing:
    """How much each step writes, as a column, once for each name; one scale for all names. The
    last unit of a column is the step's own and is blue, what it writes again is orange."""
    high, unit = 150, 116 / max(map(max, work.values()))
    canvas, says = Canvas(WIDTH, (high + 16) * len(work)), []
    for p, (name, steps) in enumerate(work.items()):
        top, wide, total = (high + 16) * p, (WIDTH - 4) / len(steps), sum(steps)
        foot = top + high - 4
        canvas.title(top + 12, name, f"{total:,} tokens written")
        for i, count in enumerate(steps):
            x, again = 2 + wide * i, unit * (count - 1)
            if again:
                box = x, foot - unit - again, wide - 1.5, again
                canvas.box(*box, ORANGE, 0.6, ORANGE, radius=0)
            canvas.box(x, foot - unit, wide - 1.5, unit, BLUE, 0.8, BLUE, radius=0)
        canvas.line(2, foot, WIDTH - 2, foot, opacity=0.6)
        canvas.note(2, foot + 10, "token 1")
        canvas.note(WIDTH - 2, foot + 10, f"token {len(steps)}", "end")
        most = f"{total} writes in {len(steps)} steps, at most {max(steps)} in one"
        says.append(f"{name}: {most}")
    return canvas.drawing("; ".join(says))
