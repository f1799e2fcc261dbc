"""Drawings of chapter 6: the tree of a beam search, drafts and their judge, requests in a batch."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from lm_from_scratch.drawings.canvas import (
    BLUE,
    COLOURS,
    GREEN,
    INK,
    ORANGE,
    RED,
    Canvas,
    Drawing,
    printable,
    tint,
)


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
    for x, text, strength, colour in (
        key,
        (key[0] + 116, "writes, a token a pass", 0.35, COLOURS[0]),
    ):
        canvas.box(x, y - 8, 10, 14, colour, strength, colour, 2)
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
