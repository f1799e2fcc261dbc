"""Drawings of how text is generated: the tree of a beam search, surprise, drafts and their judges.

They are drawn as those of `diagrams` are, on a `canvas` or as coloured text.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from lm_from_scratch.instruments.canvas import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    RED,
    Canvas,
    Drawing,
    tint,
)
from lm_from_scratch.instruments.plot import printable


def beam_tree(
    start: str,
    steps: Sequence[Sequence[Any]],
    piece: Callable[[int], str],
    dropped: int = 2,
) -> Drawing:
    """The tree of a beam search after ``start``: a row for each step, the likeliest candidate on
    the left, each with the probability of its whole text.

    ``steps`` are the candidates of one prompt, as `beam_steps` of the package gives them, and
    ``piece`` makes text of a token. Of those that were dropped, each step shows the best
    ``dropped``. The thick line leads to the best that has finished, or else to the likeliest.
    """
    ended = [one for step in steps for one in step if one.fate == "finished"]
    best = max(ended, key=lambda one: one.score) if ended else steps[-1][0]
    rows = [_shown(step, dropped) for step in steps]
    columns = max(map(len, rows))
    column, row = min(343 / columns, 96), 62
    canvas = Canvas(
        max(column * columns, 110), row * len(rows) + 34,
        f"The tree of a beam search after {start!r}. "
        + " ".join(f"Step {i}: {_said(step, piece)}." for i, step in enumerate(rows, 1)),
    )  # fmt: skip
    x, y = column / 2, 14.0
    canvas.text(4, y, printable(start), 13, "start", bold=True)
    kept = [(x, y + 10)]
    for depth, shown in enumerate(rows, 1):
        below: list[tuple[float, float]] = []
        for i, one in enumerate(shown):
            x, y = column * (i + 0.5), row * depth - 12.0
            lost = one.fate == "dropped"
            won = one.tokens == best.tokens[:depth]
            above = kept[one.parent]
            canvas.line(above[0], above[1], x, y, 3 if won else 1.2, BLUE if won else INK,
                        1.0 if won else 0.45, dashes="3 3" if lost else "")  # fmt: skip
            fill, strength = _LOOKS[one.fate]
            word = printable(piece(one.tokens[-1]))
            if not lost:
                canvas.box(x - column / 2 + 2, y, column - 4, 36, fill, strength, fill, 4)
            size = min(13.0, (column - 8) / (0.64 * len(word)))
            canvas.text(x, y + 11, word, size, bold=won, opacity=0.75 if lost else 1.0)
            canvas.text(x, y + 26, _percent(one.log_probability), 11, opacity=0.8)
            if one.fate == "kept":
                below.append((x, y + 36))
        kept = below
    return canvas.drawing()


#: How a candidate looks, by what became of it.
_LOOKS = {"kept": (BLUE, 0.15), "finished": (GREEN, 0.4), "dropped": ("none", 0.0)}


def _shown(step: Sequence[Any], dropped: int) -> list[Any]:
    lost = [one for one in step if one.fate == "dropped"][:dropped]
    return [one for one in step if one.fate != "dropped" or one in lost]


def _said(step: Sequence[Any], piece: Callable[[int], str]) -> str:
    return ", ".join(
        f"{piece(one.tokens[-1])!r} {_percent(one.log_probability)} {one.fate}" for one in step
    )


def _percent(log_probability: float) -> str:
    return f"{100 * math.exp(log_probability):.2g}%"


def surprise(
    texts: Mapping[str, tuple[Sequence[str], Sequence[float]]], full: float = 12
) -> Drawing:
    """Texts by name, each as its tokens and their surprise in bits: the less likely a token, the
    darker its ground and the thicker the line below it. ``full`` bits are as dark as it gets."""
    parts, says = [], []
    for name, (pieces, bits) in texts.items():
        mean = f"{sum(bits) / len(bits):.1f} bits a token"
        says.append(f"{name}, {mean}: {''.join(pieces)}")
        words = "".join(_marked(*pair, full) for pair in zip(pieces, bits, strict=True))
        parts.append(
            f'<div style="margin-top: 8px"><b>{escape(name)}</b> <small>{mean}</small></div>'
            f'<div style="white-space: pre-wrap; line-height: 1.7">{words}</div>'
        )
    steps = "".join(_marked(f" {bits:g} ", bits, full) for bits in (0, full / 4, full / 2, full))
    key = f'<div style="margin-top: 8px"><small>bits: {steps}</small></div>'
    return Drawing(f'<div class="diagram">{"".join(parts)}{key}</div>', "\n".join(says))


def _marked(piece: str, bits: float, full: float) -> str:
    share = min(bits / full, 1.0)
    line = f"{4 * share:.1f}px solid {RED}"
    style = f"background: {tint(ORANGE, 0.45 * share)}; border-bottom: {line}"
    return f'<span style="{style}">{escape(piece)}</span>'


def drafts(passes: Sequence[tuple[Sequence[str], int, str]], start: str = "") -> Drawing:
    """A text after ``start``, written by a model and a drafter. A pass is the pieces of a draft,
    how many of them were accepted, and the model's own piece after them.

    Accepted pieces have a blue ground. The one that was rejected is struck, and the model's own is
    bold and underlined. A bar stands after each pass; what followed a rejected piece is left out.
    """
    said, spans = [], []
    for pieces, n, own in passes:
        struck = pieces[n : n + 1]
        said.append("".join([*pieces[:n], *(f"[{piece}]" for piece in struck), own]))
        marks = [("span", f"background: {tint(BLUE, 0.3)}", piece) for piece in pieces[:n]]
        marks += [("s", f"text-decoration: line-through 2px {RED}", piece) for piece in struck]
        marks += [("b", f"border-bottom: 2px solid {ORANGE}", own)]
        spans += [f'<{tag} style="{style}">{escape(_line(p))}</{tag}>' for tag, style, p in marks]
        spans += ['<span style="opacity: 0.6; margin: 0 1px">|</span><wbr/>']
    return Drawing(
        f'<div class="diagram" style="white-space: pre-wrap; overflow-wrap: anywhere; '
        f'line-height: 1.8">{escape(_line(start))}{"".join(spans)}</div>',
        start + "|".join(said),
    )


def _line(piece: str) -> str:
    """A piece within a line of text: what would not be seen there is made visible."""
    return piece.replace("\n", "↵") if piece.strip(" ") else printable(piece)


def overlap(words: Sequence[str], p: Sequence[float], q: Sequence[float]) -> Drawing:
    """Two distributions over ``words``: what both share is accepted (blue), what only the draft's
    ``q`` has is rejected (an empty box), and what only the model's ``p`` has replaces it
    (orange)."""
    row, left, full = 26, 92, 178
    largest = max(*p, *q)
    shared = sum(map(min, p, q))
    canvas = Canvas(
        343, row * len(words) + 30, f"Of these tokens p and q share {shared:.0%}: "
        + ", ".join(f"{w!r} p {a:.1%} q {b:.1%}" for w, a, b in zip(words, p, q, strict=True)),
    )  # fmt: skip
    for x, name, colour in ((10, "accepted", BLUE), (108, "replacement", ORANGE)):
        canvas.box(x, 5, 14, 12, colour, 0.5, colour, 2)
        canvas.text(x + 20, 11, name, 12, "start")
    canvas.box(226, 5, 14, 12, "none", 0, INK, 2)
    canvas.text(246, 11, "rejected", 12, "start")
    canvas.text(341, 11, "p / q", 11, "end", opacity=0.8)
    for i, (word, a, b) in enumerate(zip(words, p, q, strict=True)):
        y = row * (i + 0.5) + 30
        canvas.text(left - 6, y, printable(word), 13, "end")
        both, more = full * min(a, b) / largest, full * abs(a - b) / largest
        canvas.box(left, y - 8, max(both, 0.5), 16, BLUE, 0.5, BLUE, 0)
        if a > b:
            canvas.box(left + both, y - 8, more, 16, ORANGE, 0.6, ORANGE, 0)
        else:
            canvas.box(left + both, y - 8, more, 16, "none", 0, INK, 0)
        canvas.text(341, y, f"{100 * a:.0f}  /  {100 * b:.0f} %", 11, "end")
    return canvas.drawing()
