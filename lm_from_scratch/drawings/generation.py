"""Drawings of chapter 6: the tree of a beam search, drafts and their judge, requests in a batch."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing, Grid
from lm_from_scratch.drawings.colours import BLUE, COLOURS, GREEN, INK, ORANGE, RED, tint
from lm_from_scratch.drawings.labels import printable, span


def beam_tree(
    start: str, steps: Sequence[Sequence[Any]], piece: Callable[[int], str], dropped: int = 2
) -> Drawing:
    """The tree of a beam search after ``start``: a row for each step, the likeliest candidate on
    the left, each with the probability of its whole text.

    ``steps`` are the candidates of one prompt, as `beam_steps` of the package gives them, and
    ``piece`` makes text of a token. Of those that were dropped, each step shows the best
    ``dropped``. The thick line leads to the best that has finished, or else to the likeliest.
    """
    looks = {"kept": (BLUE, 0.15), "finished": (GREEN, 0.4), "dropped": ("none", 0.0)}
    ended = [beam for step in steps for beam in step if beam.fate == "finished"]
    best = max(ended, key=lambda beam: beam.score) if ended else steps[-1][0]
    rows = []
    for step in steps:
        lost = [beam for beam in step if beam.fate == "dropped"][:dropped]
        rows.append([beam for beam in step if beam.fate != "dropped" or beam in lost])
    columns = max(map(len, rows))
    wide, high = min(WIDTH / columns, 96), 62
    canvas, says = Canvas(max(wide * columns, 110), high * len(rows) + 34), []
    canvas.text(4, 14, printable(start), 13, "start", bold=True)
    ends = [(wide / 2, 24.0)]
    for depth, row in enumerate(rows, 1):
        below, captions = [], []
        for i, beam in enumerate(row):
            x, y = wide * (i + 0.5), high * depth - 12.0
            lost, won = beam.fate == "dropped", beam.tokens == best.tokens[:depth]
            text, share = piece(beam.tokens[-1]), f"{100 * math.exp(beam.log_probability):.2g}%"
            thick, colour, faint = (3.0, BLUE, 1.0) if won else (1.2, INK, 0.45)
            dashes = "3 3" if lost else ""
            x0, y0 = ends[beam.parent]
            canvas.line(x0, y0, x, y, thick, colour, faint, dashes=dashes)
            if not lost:
                colour, strength = looks[beam.fate]
                canvas.box(x - wide / 2 + 2, y, wide - 4, 36, colour, strength, colour, 4)
            size = min(13.0, (wide - 8) / (0.64 * len(text)))
            canvas.text(x, y + 11, printable(text), size, bold=won, opacity=0.75 if lost else 1.0)
            canvas.note(x, y + 26, share, "middle")
            captions.append(f"{text!r} {share} {beam.fate}")
            if beam.fate == "kept":
                below.append((x, y + 36))
        ends = below
        says.append(f"Step {depth}: {', '.join(captions)}.")
    return canvas.drawing(f"The tree of a beam search after {start!r}. " + " ".join(says))


def surprise(
    texts: Mapping[str, tuple[Sequence[str], Sequence[float]]], full: float = 12
) -> Drawing:
    """Texts by name, each as its tokens and their surprise in bits: the less likely a token, the
    darker its ground and the thicker the line below it. ``full`` bits are as dark as it gets."""

    def marked(piece: str, bits: float) -> str:
        share = min(bits / full, 1.0)
        line = f"border-bottom: {4 * share:.1f}px solid {RED}"
        return span(piece, f"background: {tint(ORANGE, 0.45 * share)}; {line}")

    parts, says = [], []
    for name, (pieces, bits) in texts.items():
        mean = f"{sum(bits) / len(bits):.1f} bits a token"
        says.append(f"{name}, {mean}: {''.join(pieces)}")
        parts.append(
            f'<div style="margin-top: 8px"><b>{escape(name)}</b> <small>{mean}</small></div>'
            f'<div style="white-space: pre-wrap; line-height: 1.7">'
            f"{''.join(map(marked, pieces, bits))}</div>"
        )
    steps = "".join(marked(f" {bits:g} ", bits) for bits in (0, full / 4, full / 2, full))
    key = f'<div style="margin-top: 8px"><small>bits: {steps}</small></div>'
    return Drawing(f'<div class="diagram">{"".join(parts)}{key}</div>', "\n".join(says))


def drafts(passes: Sequence[tuple[Sequence[str], int, str]], start: str = "") -> Drawing:
    """A text after ``start``, written by a model and a drafter. A pass is the pieces of a draft,
    how many of them were accepted, and the model's own piece after them.

    Accepted pieces have a blue ground. The one that was rejected is struck, and the model's own is
    bold and underlined. A bar stands after each pass; what followed a rejected piece is left out.
    """

    def seen(piece: str) -> str:
        """What would not be seen within a line of text is made visible."""
        return piece.replace("\n", "↵") if piece.strip(" ") else printable(piece)

    says, spans = [], []
    for pieces, n, own in passes:
        accepted, struck = pieces[:n], pieces[n : n + 1]
        says.append("".join([*accepted, *(f"[{piece}]" for piece in struck), own]))
        spans += [span(seen(piece), f"background: {tint(BLUE, 0.3)}") for piece in accepted]
        spans += [span(seen(piece), f"text-decoration: line-through 2px {RED}", "s")
                  for piece in struck]  # fmt: skip
        spans += [span(seen(own), f"border-bottom: 2px solid {ORANGE}", "b")]
        spans += ['<span style="opacity: 0.6; margin: 0 1px">|</span><wbr/>']
    return Drawing(
        f'<div class="diagram" style="white-space: pre-wrap; overflow-wrap: anywhere; '
        f'line-height: 1.8">{escape(seen(start))}{"".join(spans)}</div>',
        start + "|".join(says),
    )


def overlap(words: Sequence[str], p: Sequence[float], q: Sequence[float]) -> Drawing:
    """Two distributions over ``words``: what both share is accepted (blue), what only the draft's
    ``q`` has is rejected (an empty box), and what only the model's ``p`` has replaces it
    (orange)."""
    row, left, unit = 26, 92, 178 / max(*p, *q)
    canvas = Canvas(
        WIDTH, row * len(words) + 30,
        f"Of these tokens p and q share {sum(map(min, p, q)):.0%}: "
        + ", ".join(f"{w!r} p {a:.1%} q {b:.1%}" for w, a, b in zip(words, p, q, strict=True)),
    )  # fmt: skip
    kinds = (BLUE, 0.5, "accepted"), (ORANGE, 0.5, "replacement"), ("none", 0.0, "rejected")
    canvas.legend(11, *kinds, x=8)
    canvas.note(341, 11, "p / q", "end")
    for i, (word, a, b) in enumerate(zip(words, p, q, strict=True)):
        y, both = row * (i + 0.5) + 30, unit * min(a, b)
        canvas.text(left - 6, y, printable(word), 13, "end")
        canvas.box(left, y - 8, max(both, 0.5), 16, BLUE, 0.5, BLUE, 0)
        more = (ORANGE, 0.6, ORANGE) if a > b else ("none", 0.0, INK)
        canvas.box(left + both, y - 8, unit * abs(a - b), 16, *more, 0)
        canvas.text(341, y, f"{100 * a:.0f}  /  {100 * b:.0f} %", 11, "end")
    return canvas.drawing()


def batch_timelines(
    ways: Mapping[str, Sequence[Sequence[int | None]]], names: Sequence[str]
) -> Drawing:
    """Which request each row of a batch works on, pass by pass. ``ways`` holds, by title, the
    passes in order: for each row the number of its request, or None where the row is idle. The
    first pass of a request reads its prompt. ``names`` are those of the requests.
    """
    left, high, gap = 44, 24, 64
    cell = (WIDTH - left - 2) / max(map(len, ways.values()))
    says, y = [], 0.0
    canvas = Canvas(WIDTH, sum(high * len(passes[0]) + gap for passes in ways.values()) + 14)
    for title, passes in ways.items():
        idle = sum(seat is None for seats in passes for seat in seats)
        caption = f"{len(passes)} passes, {idle} places idle"
        says.append(f"{title}: {caption}")
        canvas.title(y + 10, title, caption)
        grid = Grid(canvas, left, y + 24, cell, high, 1)
        for r, seats in enumerate(zip(*passes, strict=True)):
            canvas.note(left - 6, y + 22 + high * (r + 0.5), f"row {r}", "end")
            start = 0
            for request, run in groupby(seats):
                length = len(list(run))
                if request is None:
                    text = "idle" if cell * length > 24 else ""
                    grid.cell(r, start, text, 11, INK, 0.14, "none", 2, False, 0.7, length, 21 / 24)
                else:
                    colour = COLOURS[request % 6]
                    grid.cell(r, start, "", 0, colour, 0.35, across=length, down=21 / 24)
                    grid.cell(r, start, "", 0, colour, 0.8, down=21 / 24)
                    middle = start + (length / 2 if length > 2 else (length - 1) / 2)
                    x, at = grid.middle(r, middle)
                    canvas.text(x, at - 1.5, names[request], 12, bold=True)
                start += length
        y += 22 + high * len(passes[0])
        for number in range(0, len(passes) + 1, 10):
            x = left + cell * number
            canvas.line(x, y, x, y + 4, 1)
            canvas.note(x, y + 12, number, "middle", 10)
        y += gap - 22
    kinds = (COLOURS[0], 0.8, "reads its prompt"), (COLOURS[0], 0.35, "writes, a token a pass")
    canvas.legend(y - 1, *kinds, x=left)
    return canvas.drawing("; ".join(says))


def page_table(
    texts: Mapping[str, Sequence[str]], tables: Mapping[str, Sequence[int]], n_blocks: int, P: int,
    kept: Collection[int] = (),
) -> Drawing:  # fmt: skip
    """The blocks of each row, in order, and where the pool keeps them. ``texts`` are the tokens in
    the memory of each row, by its name, and ``tables`` its blocks of P slots. A block of several
    rows has a colour for each; slots without a token have none. ``kept`` are blocks without a row
    that are not free.
    """
    high, wide, left, right = 23, 132, 2, 209
    users = {block: [name for name in tables if block in tables[name]] for block in range(n_blocks)}
    colours = {name: COLOURS[i % 6] for i, name in enumerate(tables)}
    rows = max(sum(map(len, tables.values())) + len(tables), n_blocks + 1)
    canvas = Canvas(
        WIDTH, high * rows + 6,
        f"{sum(map(bool, users.values()))} of {n_blocks} blocks in use; "
        + "; ".join(f"{name} is in the blocks {list(table)}" for name, table in tables.items()),
    )  # fmt: skip
    canvas.text(right, 10, f"the pool, {n_blocks} blocks", 12, "start", bold=True)
    inside: dict[int, tuple[str, float]] = {}  # the text of a block, and how full it is

    def block_at(x: float, y: float, block: int, names: Sequence[str]) -> None:
        text, full = inside[block]
        part = wide / len(names)
        for k, name in enumerate(names):
            canvas.box(x + k * part, y + 2, full * part, high - 4, colours[name], 0.25, "none", 2)
        edge = INK if names[1:] else colours[names[0]]
        canvas.box(x, y + 2, wide, high - 4, edge=edge, radius=2)
        canvas.text(x + 4, y + high / 2, text, 10, "start")

    y = 0.0
    for name, table in tables.items():
        canvas.text(left, y + 10, f"{name}: {len(texts[name])} tokens", 12, "start", bold=True)
        y += high
        for k, block in enumerate(table):
            held = texts[name][k * P : (k + 1) * P]
            text = printable("".join(held))
            inside[block] = text if len(text) <= 21 else text[:20] + "…", len(held) / P
            block_at(left, y, block, [name])
            end = right - 24, high * (block + 1.5)
            canvas.line(left + wide + 1, y + high / 2, *end, 1.6, colours[name])
            y += high
    for block, names in users.items():
        y = high * (block + 1)
        canvas.note(right - 6, y + high / 2, block, "end")
        if names:
            block_at(right, y, block, names)
        else:
            canvas.box(right, y + 2, wide, high - 4, INK, 0.05, "none", 2)
            state = "kept" if block in kept else "free"
            canvas.text(right + 4, y + high / 2, state, 10, "start", opacity=0.7)
    return canvas.drawing()
