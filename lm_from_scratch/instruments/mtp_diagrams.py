"""Drawings of multi-token prediction: who drafts from what, and which token is whose target."""

from collections.abc import Sequence
from itertools import pairwise

from lm_from_scratch.instruments.canvas import BLUE, GREEN, INK, ORANGE, Canvas, Drawing
from lm_from_scratch.instruments.plot import printable


def self_draft(start: str, words: Sequence[str]) -> Drawing:
    """One pass of a model over a text that ends with ``start``, and the drafts after it: the first
    of the ``words`` is the model's own, each later one is drafted from the state before it and the
    word before it."""
    row, middle = 66, 176
    canvas = Canvas(
        343, row * len(words) + 14,
        f"The model reads {start!r}; its state h gives {words[0]!r}. "
        + " ".join(
            f"h{_up(k - 1)} and {before!r} give h{_up(k)}, which drafts {word!r}."
            for k, (before, word) in enumerate(pairwise(words), 1)
        ),
    )  # fmt: skip
    for k, word in enumerate(words):
        y = row * k + 30.0
        given = printable(start if k == 0 else words[k - 1])
        colour, name = (ORANGE, "all blocks") if k == 0 else (BLUE, "one block")
        size = min(13.0, 112 / (0.6 * len(given)))
        canvas.text(4, y, given, size, "start", bold=k == 1)
        canvas.line(118, y, middle - 46, y, 1.4, arrow=True)
        canvas.box(middle - 44, y - 17, 88, 34, colour, 0.25, colour)
        canvas.text(middle, y, name, 12)
        canvas.line(middle + 46, y, 262, y, 1.4, arrow=True)
        canvas.text(242, y - 10, f"h{_up(k)}", 12)
        canvas.text(268, y, printable(word), 13, "start", bold=k == 0)
        if k + 1 < len(words):
            canvas.line(middle + 30, y + 19, middle + 30, y + row - 19, 1.4, arrow=True)
            canvas.text(middle + 44, y + row / 2, f"h{_up(k)}", 12)
    return canvas.drawing()


def _up(depth: int) -> str:
    return "" if depth == 0 else "¹²³⁴⁵⁶⁷⁸⁹"[depth - 1]


def targets(words: Sequence[str], depths: Sequence[int] = (0, 1)) -> Drawing:
    """For each of the ``words`` of a document the newest word that a depth has seen, and its
    target; a dash where the document has no such word."""
    row, names = 24, [name for d in depths for name in (f"depth {d} sees", f"depth {d} target")]
    wide = min(80.0, 250 / len(words))
    height = row * (len(names) + 1) + 8 * len(depths) + 10
    says = [
        f"Depth {d}: "
        + ", ".join(
            f"after {words[i + d]!r} {words[i + d + 1]!r}" for i in range(len(words) - d - 1)
        )
        for d in depths
    ]
    canvas = Canvas(343, height, "Targets. " + "; ".join(says))
    small = min(13.0, *((wide - 4) / (0.6 * max(len(printable(w)), 1)) for w in words))
    for i, word in enumerate(words):
        canvas.text(93 + wide * (i + 0.5), 16, printable(word), small, bold=True)
    canvas.text(4, 16, "column", 12, "start", opacity=0.8)
    y = 18.0
    for j, name in enumerate(names):
        d, target = depths[j // 2], j % 2 == 1
        y += row + (8 if not target else 0)
        canvas.text(4, y, name, 12, "start", opacity=0.8)
        for i in range(len(words)):
            at, x = i + d + target, 93 + wide * i
            known = at < len(words)
            colour = (GREEN if target else BLUE) if known else "none"
            canvas.box(x + 1, y - 10, wide - 2, 20, colour, 0.2, colour if known else INK, 3)
            canvas.text(x + wide / 2, y, printable(words[at]) if known else "–", small)
    return canvas.drawing()
