"""Drawings of spare attention: a softmax that must spend 1, and a window with pinned slots."""

import math
from collections.abc import Sequence

from lm_from_scratch.instruments.canvas import BLUE, GREEN, INK, ORANGE, Canvas, Drawing
from lm_from_scratch.instruments.plot import printable


def budget(words: Sequence[str], scores: Sequence[float], sink: float) -> Drawing:
    """The weights of one query as parts of a bar: above by the softmax of its ``scores`` for the
    ``words``, below with a ``sink`` beside them, whose part is empty."""
    left, wide = 6, 331
    canvas = Canvas(343, 150, "")
    says = []
    for row, name in enumerate(("keys alone", f"with a sink of {sink:g}")):
        y = 74 * row
        spent = [math.exp(score) for score in scores] + ([math.exp(sink)] if row else [])
        shares = [part / sum(spent) for part in spent]
        canvas.text(left, y + 12, name, 12, "start", bold=True)
        x: float = left
        for word, share in zip([*words, "nothing"], shares, strict=False):
            empty = word == "nothing"
            width = wide * share
            canvas.box(x, y + 24, width, 26, "none" if empty else BLUE, 0.35, INK, 1)
            if width > 7 * len(word) + 4:
                canvas.text(x + width / 2, y + 37, printable(word), 12)
                canvas.text(x + width / 2, y + 60, f"{share:.0%}", 11, opacity=0.8)
            x += width
        parts = zip([*words, "nothing"], shares, strict=False)
        says.append(f"{name}: " + ", ".join(f"{word} {share:.0%}" for word, share in parts))
    canvas.says = "; ".join(says)
    return canvas.drawing()


def kept(pieces: Sequence[str], window: int, first: int) -> Drawing:
    """A row for each step of a text, a cell for each of its ``pieces``: blue for the ``first``
    ones, which stay, orange for the latest ``window``; what was pushed out is an empty cell."""
    cell, left, top, n = 24, 34, 30, len(pieces)
    canvas = Canvas(
        min(343, left + cell * n + 6), top + cell * n + 26,
        f"A window of {window} keys that keeps the first {first}: after {n} tokens it holds "
        f"{first} first and {window} latest ones",
    )  # fmt: skip
    canvas.text(4, 12, "read", 11, "start", opacity=0.8)
    for s, piece in enumerate(pieces):
        canvas.text(left + cell * (s + 0.5), 16, printable(piece), 12)
        canvas.text(left - 8, top + cell * (s + 0.5), printable(piece), 12, "end")
    for t in range(n):
        for s in range(t + 1):
            at = left + cell * s + 1, top + cell * t + 1, cell - 3, cell - 3
            if s > t - window:
                canvas.box(*at, ORANGE, 0.45)
            elif s < first:
                canvas.box(*at, BLUE, 0.45)
            else:
                canvas.box(*at, "none", 0, INK, 2)
                canvas.line(at[0], at[1], at[0] + cell - 3, at[1] + cell - 3, 0.8, INK, 0.5)
    y = top + cell * n + 12
    for x, colour, word in ((left, BLUE, "first"), (left + 80, ORANGE, "latest")):
        canvas.box(x, y - 7, 14, 14, colour, 0.45)
        canvas.text(x + 20, y, word, 11, "start")
    return canvas.drawing()


def gate_places(heads: int) -> Drawing:
    """The rows of a projection that makes a query and a gate for each of some ``heads``: above, as
    the checkpoint has them, head after head; below, as a cut in two halves takes them."""
    left, wide, tall = 6, 331, 30
    canvas = Canvas(
        343, 150, f"Above: query and gate of each of {heads} heads in turn; below: a cut in the "
        "middle takes the first heads for queries and the last for gates",
    )  # fmt: skip
    part = wide / (2 * heads)
    for row, name in enumerate(("q_proj, as it is stored", "cut in two halves")):
        y = 74 * row
        canvas.text(left, y + 12, name, 12, "start", bold=True)
        for i in range(2 * heads):
            x, colour = left + part * i, GREEN if i % 2 else BLUE
            canvas.box(x, y + 24, part, tall, colour, 0.35, INK, 1)
            canvas.text(x + part / 2, y + 24 + tall / 2, f"{'gq'[i % 2 == 0]}{i // 2}", 12)
        if row:
            canvas.line(left + wide / 2, y + 20, left + wide / 2, y + 60, 3)
            canvas.text(left + wide / 4, y + 66, "taken for queries", 11)
            canvas.text(left + 3 * wide / 4, y + 66, "taken for gates", 11)
    return canvas.drawing()
