"""Drawings of rounding: numbers on a ruler with few marks."""

from collections.abc import Sequence

from lm_from_scratch.instruments.canvas import BLUE, INK, ORANGE, Canvas, Drawing
from lm_from_scratch.instruments.plot import COLOURS, printable


def ruler(values: Sequence[float], bits: Sequence[int], shown: Sequence[int] = ()) -> Drawing:
    """Numbers above a ruler from the smallest to the largest of them, once for each of the ``bits``
    with 2 to that power marks. An arrow leads from each number to its nearest mark; the ``shown``
    ones are orange."""
    left, right, row = 12, 331, 96
    low, high = min(values), max(values)
    place = {value: left + (right - left) * (value - low) / (high - low) for value in values}
    canvas = Canvas(343, row * len(bits), "")
    says = []
    for r, b in enumerate(bits):
        y, step = row * r, (high - low) / (2**b - 1)
        canvas.text(
            left, y + 10, f"{b} bits: {2**b} marks, step {step:.2f}", 12, "start", bold=True
        )
        canvas.line(left, y + 64, right, y + 64, 1.4)
        for code in range(2**b):
            x = left + (right - left) * code / (2**b - 1)
            canvas.line(x, y + 58, x, y + 70)
            if b <= 4:
                canvas.text(x, y + 80, str(code), 11, opacity=0.8)
        codes = [round((value - low) / step) for value in values]
        for i, (value, code) in enumerate(zip(values, codes, strict=True)):
            x, mark = place[value], left + (right - left) * code / (2**b - 1)
            colour = ORANGE if i in shown else BLUE
            canvas.line(x, y + 34, mark, y + 56, 1.4, colour, 0.9, arrow=True)
            canvas.circle(x, y + 30, 4.5, colour, 0.8, colour)
        says.append(f"{b} bits, step {step:.2f}: codes {codes}")
    canvas.says = f"{len(values)} numbers from {low:.2f} to {high:.2f}; " + "; ".join(says)
    return canvas.drawing()


def shared_rulers(words: Sequence[str], features: int, group: int) -> Drawing:
    """Two tables, a row for each of the ``words`` and a column for each of the ``features``; the
    last word has just arrived. Cells in one box share a ruler: ``group`` features of a token
    above, ``group`` tokens of a feature below, where cells wait until their group is full."""
    cell, left = 22, 92
    full, n = len(words) // group * group, len(words)
    high = cell * n + 38
    canvas = Canvas(
        343, 2 * high + 22,
        f"Above, each of {n} tokens has rulers of its own, over {group} features; below, each "
        f"feature has a ruler over {group} tokens, and the last {n - full} tokens have none yet",
    )  # fmt: skip
    titles = "A ruler over features of one token", "A ruler over tokens of one feature"
    for table, title in enumerate(titles):
        top = table * high + 26
        canvas.text(4, top - 14, title, 13, "start", bold=True)
        for t, word in enumerate(words):
            y = top + cell * (t + 0.5)
            canvas.text(left - 8, y, printable(word), 12, "end", bold=t == n - 1)
        canvas.text(left + cell * features + 8, y, "new", 12, "start", bold=True)
        wide, tall = (group, 1) if table == 0 else (1, group)
        for t in range(0, n if table == 0 else full, tall):
            for f in range(0, features, wide):
                colour = COLOURS[(2 * t + f // wide if table == 0 else f + t // tall) % 5]
                box = left + cell * f, top + cell * t, cell * wide - 3, cell * tall - 3
                canvas.box(*box, colour, 0.4)
        for t in range(full if table else n, n):
            for f in range(features):
                canvas.box(left + cell * f, top + cell * t, cell - 3, cell - 3)
        for t in range(n):
            for f in range(features):
                x, y = left + cell * (f + 0.5) - 1.5, top + cell * (t + 0.5) - 1.5
                canvas.circle(x, y, 2, INK, 0.6, "none")
    canvas.text(left, 2 * high + 12, "no ruler yet: kept exactly", 11, "start", opacity=0.8)
    return canvas.drawing()
