"""Drawings of how models work: tokens, blocks, lines of attention.

Results are plotted (`plot`); here mechanisms are drawn, on a `canvas`.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lm_from_scratch.instruments.canvas import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    Canvas,
    Drawing,
    tint,
)
from lm_from_scratch.instruments.plot import COLOURS, printable


def tokens(pieces: Sequence[str], ids: Sequence[int] | None = None) -> Drawing:
    """The pieces of a text in coloured boxes, each above its number if ``ids`` are given."""
    boxes = []
    for i, piece in enumerate(pieces):
        number = "" if ids is None else f"<br><small>{ids[i]}</small>"
        boxes.append(
            f'<span style="display: inline-block; margin: 0 2px 4px 0; padding: 1px 3px; '
            f"border-radius: 4px; text-align: center; white-space: pre; "
            f'background: {tint(COLOURS[i % 5], 0.25)}">{escape(printable(piece))}{number}</span>'
        )
    return Drawing(f'<div class="diagram tokens">{"".join(boxes)}</div>', " | ".join(pieces))


def lines(
    queries: Sequence[str], keys: Sequence[str], weights: Sequence[Sequence[float]],
    chosen: int | None = None,
) -> Drawing:  # fmt: skip
    """Who looks at whom: a line from each of the ``queries`` on the left to each of the ``keys``
    on the right, as wide as its weight. ``weights`` are (T, S); ``chosen`` draws one query alone.
    """
    row, left, right = 24, 120, 223
    rows = range(len(queries)) if chosen is None else [chosen]
    largest = max((weights[t][s], t, s) for t in rows for s in range(len(keys)))
    canvas = Canvas(
        343, row * (max(len(queries), len(keys)) + 1.5),
        f"Lines from {len(rows)} of {len(queries)} tokens to the tokens they look at; the widest, "
        f"{largest[0]:.2f}, from {queries[largest[1]]!r} to {keys[largest[2]]!r}",
    )  # fmt: skip
    canvas.text(left, row / 2, "looks", 11, "end", opacity=0.8)
    canvas.text(right, row / 2, "is looked at", 11, "start", opacity=0.8)
    for t in rows:
        for s in range(len(keys)):
            weight = weights[t][s]
            if weight > 0.01:
                canvas.line(left + 6, row * (t + 1.5), right - 6, row * (s + 1.5),
                            0.5 + 7 * weight, BLUE, 0.25 + 0.75 * weight)  # fmt: skip
    for t, word in enumerate(queries):
        canvas.text(left, row * (t + 1.5), printable(word), 13, "end", bold=t == chosen)
    for s, word in enumerate(keys):
        canvas.text(right, row * (s + 1.5), printable(word), 13, "start")
    return canvas.drawing()


def gates(
    pieces: Sequence[str], names: Sequence[object], passed: Sequence[Sequence[float]]
) -> Drawing:
    """How much each of the gates ``names`` lets through at each of the ``pieces`` of a text, as
    disks: ``passed`` are (T, gates), silu of the gate. Nothing is drawn where it is not positive.
    """
    row, left = 22, 105
    column = (343 - left) / len(names)
    largest = max(map(max, passed))
    widest = (
        pieces[max(range(len(pieces)), key=lambda t: passed[t][i])] for i in range(len(names))
    )
    says = (f"gate {name} at {piece!r}" for name, piece in zip(names, widest, strict=True))
    canvas = Canvas(343, row * (len(pieces) + 1.2), "Gates, open widest: " + ", ".join(says))
    canvas.text(left - 10, row / 2, "gate", 11, "end", opacity=0.8)
    for i, name in enumerate(names):
        canvas.text(left + column * (i + 0.5), row / 2, str(name), 11, opacity=0.8)
    for t, piece in enumerate(pieces):
        y = row * (t + 1.6)
        canvas.text(left - 10, y, printable(piece), 13, "end")
        canvas.line(left, y, 343, y, 0.6, opacity=0.25)
        for i, value in enumerate(passed[t]):
            if value > 0.02 * largest:
                tint = 0.15 + 0.75 * value / largest
                radius = 10 * (value / largest) ** 0.5
                canvas.circle(left + column * (i + 0.5), y, radius, BLUE, tint, BLUE)
    return canvas.drawing()


def shared_heads(n_head: int, n_kv_heads: Sequence[int]) -> Drawing:
    """Which of ``n_head`` query heads reads which key head, once for each of ``n_kv_heads``."""
    row, panel = 30, 343 / len(n_kv_heads)
    numbers = ", ".join(map(str, n_kv_heads))
    canvas = Canvas(
        343, row * (n_head + 1.4), f"{n_head} query heads read {numbers} key heads, in groups"
    )
    for p, n_kv_head in enumerate(n_kv_heads):
        left, right = p * panel + 26, (p + 1) * panel - 30
        canvas.text((left + right) / 2, row / 2, f"H = {n_head}, Hkv = {n_kv_head}", 12, bold=True)
        for h in range(n_head):
            head = h * n_kv_head // n_head
            y, key = row * (h + 1.4), row * (0.9 + (head + 0.5) * n_head / n_kv_head)
            canvas.line(left + 11, y, right - 13, key, 1.6, COLOURS[head % 5], arrow=True)
            canvas.circle(left, y, 11, COLOURS[head % 5], 0.25)
            canvas.text(left, y, f"q{h}", 11)
        for head in range(n_kv_head):
            key = row * (0.9 + (head + 0.5) * n_head / n_kv_head)
            canvas.box(right - 12, key - 11, 40, 22, COLOURS[head % 5], 0.25)
            canvas.text(right + 8, key, f"k{head} v{head}", 11)
    return canvas.drawing()


def qwen2_blocks(n_layer: int, links: Sequence[str]) -> Drawing:
    """The parts of Qwen2 from ids (top) to logits. The five that GPT-2 has otherwise are coloured,
    numbered from 1, and lead to the addresses ``links``."""
    canvas = Canvas(
        343, 478, f"ids, embedding, {n_layer} blocks of norm, attention, norm and gated MLP, whose "
        "results are added to the state; a last norm, head, logits; five are marked as changed",
    )  # fmt: skip
    spine, left, width = 36, 84, 250
    middle = left + width / 2

    def part(y: float, text: str, note: str, change: int = 0) -> None:
        colour = COLOURS[change - 1] if change else "none"
        if change:
            canvas.begin_link(links[change - 1])
        canvas.box(left, y, width, 34, colour, 0.25)
        if change:
            canvas.circle(left + 16, y + 17, 9, colour, 0.5)
            canvas.text(left + 16, y + 17, str(change), 11, bold=True)
        canvas.text(left + 32, y + 17, text, 13, "start", bold=bool(change))
        canvas.text(left + width - 8, y + 17, note, 11, "end", opacity=0.8)
        if change:
            canvas.end_link()

    canvas.text(middle, 10, "ids", 13, bold=True)
    canvas.line(middle, 20, middle, 34, arrow=True)
    part(34, "embedding", "no position table")
    canvas.line(left, 51, spine, 51)
    canvas.line(spine, 51, spine, 393)
    canvas.box(8, 82, 331, 272, radius=8)
    canvas.text(332, 346, f"{n_layer} times", 11, "end", opacity=0.8)
    part(92, "RMSNorm", "was LayerNorm", 1)
    part(132, "q, k, v", "the only biases", 2)
    part(172, "rotate q and k", "was a table", 3)
    part(212, "attention", "fewer key heads", 4)
    part(262, "RMSNorm", "was LayerNorm", 1)
    part(302, "gated MLP", "was GELU", 5)
    part(376, "RMSNorm", "was LayerNorm", 1)
    part(420, "output head", "the embedding again")
    for y in (109, 279, 393):
        canvas.line(spine, y, left, y, arrow=True)
    for y in (229, 319):
        canvas.line(left, y, spine + 10, y, arrow=True)
        canvas.circle(spine, y, 9)
        canvas.text(spine, y, "+", 14)
    for y in (126, 166, 206, 296, 410):
        canvas.line(middle, y, middle, y + (10 if y == 410 else 6))
    canvas.line(middle, 454, middle, 464, arrow=True)
    canvas.text(middle, 471, "logits", 13, bold=True)
    return canvas.drawing()


def model_sizes(configs: Mapping[str, Any], parameters: Mapping[str, int]) -> Drawing:
    """Models by name, each a pile of its layers, in scale, beside the numbers of its config."""
    widest, y = max(config.n_embd for config in configs.values()), 8.0
    heights = [max(3.0 * config.n_layer, 62.0) + 14 for config in configs.values()]
    says = (f"{name}: {c.n_layer} layers of width {c.n_embd}" for name, c in configs.items())
    canvas = Canvas(343, sum(heights) + y, ", ".join(says))
    for (name, config), height in zip(configs.items(), heights, strict=True):
        for layer in range(config.n_layer):
            width = 150 * config.n_embd / widest
            canvas.box(4, y + 3 * layer, width, 3, BLUE, 0.35, BLUE, radius=0)
        canvas.text(166, y + 8, name, 13, "start", bold=True)
        numbers = (
            f"L {config.n_layer}, C {config.n_embd:,}, I {config.intermediate_size:,}",
            f"H {config.n_head}, Hkv {config.n_kv_head}",
            f"{parameters[name] / 1e6:,.0f} million parameters",
        )
        for i, line in enumerate(numbers):
            canvas.text(166, y + 24 + 15 * i, line, 11, "start")
        y += height
    return canvas.drawing()


def _tip(x: float, y: float, radius: float, turn: float) -> tuple[float, float]:
    """Where a hand ends that has turned clockwise from 12 o'clock: 0.25 is 3 o'clock."""
    return x + radius * math.sin(2 * math.pi * turn), y - radius * math.cos(2 * math.pi * turn)


def _dial(canvas: Canvas, x: float, y: float, radius: float) -> None:
    """The face of a clock, with a mark at each hour."""
    canvas.circle(x, y, radius)
    for hour in range(12):
        canvas.line(*_tip(x, y, 0.92 * radius, hour / 12), *_tip(x, y, radius, hour / 12))


def clock_hands(*places: tuple[int, int]) -> Drawing:
    """Keys and queries as hands of clocks, turned by one hour for each position.

    A clock for each of the ``places``: the position of a key, and that of a query after it.
    """
    wide, radius = 343 / max(2, len(places)), 60
    canvas = Canvas(
        round(wide * len(places)), 198,
        "; ".join(
            f"a key at position {key} and a query at position {query}, "
            f"{30 * (query - key)} degrees apart"
            for key, query in places
        ),
    )  # fmt: skip
    for i, (key, query) in enumerate(places):
        x, y = wide * (i + 0.5), radius + 18
        _dial(canvas, x, y, radius)
        for hour in range(1, 13):
            canvas.text(*_tip(x, y, radius + 10, hour / 12), f"{hour}", 10, opacity=0.8)
        canvas.line(x, y, *_tip(x, y, 0.88 * radius, key / 12), 2.4, ORANGE, arrow=True)
        canvas.line(x, y, *_tip(x, y, 0.88 * radius, query / 12), 2.4, BLUE, arrow=True)
        start, end = (_tip(x, y, 0.36 * radius, at / 12) for at in (key, query))
        large = int((query - key) % 12 > 6)
        canvas.marks.append(
            f'<path d="M{start[0]:g} {start[1]:g}A{0.36 * radius:g} {0.36 * radius:g} 0 {large} 1 '
            f'{end[0]:g} {end[1]:g}" fill="none" stroke="{INK}"/>'
        )
        middle = _tip(x, y, 0.58 * radius, (key + query) / 24)
        canvas.text(*middle, f"{30 * (query - key)}°", 12)
        canvas.text(x - 50, y + radius + 29, f"key at position {key}", 12, "start")
        canvas.text(x - 50, y + radius + 47, f"query at position {query}", 12, "start")
        canvas.box(x - 64, y + radius + 25, 8, 8, ORANGE, 1.0, ORANGE, 1)
        canvas.circle(x - 60, y + radius + 47, 4, BLUE, 1.0, BLUE)
    return canvas.drawing()


def hand_speeds(turns: Mapping[str, float], steps: int) -> Drawing:
    """A clock for each name in ``turns``, with its hand at positions 0 to ``steps``, the last one
    darkest. A number says how many positions a whole turn takes."""
    wide, radius = 343 / len(turns), min(62.0, 343 / len(turns) / 2 - 8)
    canvas = Canvas(
        343, 2 * radius + 56,
        f"Hands at positions 0 to {steps}; "
        + ", ".join(f"{name} turns once in {turn:.0f} positions" for name, turn in turns.items()),
    )  # fmt: skip
    for i, (name, turn) in enumerate(turns.items()):
        x, y = wide * (i + 0.5), radius + 8
        _dial(canvas, x, y, radius)
        for t in range(steps + 1):
            last = t == steps
            tip = _tip(x, y, 0.88 * radius, t / turn)
            canvas.line(x, y, *tip, 2.4 if last else 1.4, BLUE, 1.0 if last else 0.6, last)
        canvas.text(x, y + radius + 17, name, 12, bold=True)
        canvas.text(x, y + radius + 35, f"{turn:,.0f} tokens a turn", 12)
    return canvas.drawing()


def feature_pairs(layouts: Mapping[str, Sequence[int]]) -> Drawing:
    """The features of a head as boxes, a row for each name in ``layouts``; a number and a colour
    say to which pair a feature belongs."""
    canvas = Canvas(
        343, 62 * len(layouts),
        "; ".join(f"{name}: features belong to pairs {pairs}" for name, pairs in layouts.items()),
    )  # fmt: skip
    for row, (name, pairs) in enumerate(layouts.items()):
        canvas.text(2, 62 * row + 12, name, 12, "start", bold=True)
        for i, pair in enumerate(pairs):
            wide = 339 / len(pairs)
            colour = COLOURS[pair % 5]
            canvas.box(2 + wide * i, 62 * row + 24, wide - 4, 26, colour, 0.3, colour)
            canvas.text(wide * (i + 0.5), 62 * row + 37, f"{pair}", 13)
    return canvas.drawing()


def merges(rows: Sequence[Sequence[str]], names: Sequence[str]) -> Drawing:
    """A word while its pieces grow together, one merge a row; ``names`` stand beside the rows. A
    piece that the row above does not have is coloured."""
    letter, row = min(34, 250 / max(len("".join(rows[0])), 1)), 38
    canvas = Canvas(343, row * len(rows) + 2, "; ".join("·".join(pieces) for pieces in rows))
    above: set[tuple[int, str]] = {(i, piece) for i, piece in enumerate(rows[0])}
    for r, (pieces, name) in enumerate(zip(rows, names, strict=True)):
        start, now = 0, set()
        for piece in pieces:
            new = (start, piece) not in above
            canvas.box(letter * start + 3, row * r + 3, letter * len(piece) - 4, row - 10,
                       BLUE if new else INK, 0.35 if new else 0.06)  # fmt: skip
            canvas.text(letter * (start + len(piece) / 2) + 1, row * r + 17, piece, 14, bold=new)
            now.add((start, piece))
            start += len(piece)
        above = now
        canvas.text(letter * start + 14, row * r + 17, name, 12, "start", opacity=0.8)
    return canvas.drawing()


def repeats(pieces: Sequence[str], n: int = 4) -> Drawing:
    """A text, given by its tokens, in which every run of ``n`` tokens that has been there before is
    marked: tinted and underlined."""
    runs = [tuple(pieces[i : i + n]) for i in range(len(pieces) - n + 1)]
    again = [i for i, run in enumerate(runs) if run in runs[:i]]
    marks = {place for i in again for place in range(i, i + n)}
    style = f"background: {tint(ORANGE, 0.3)}; border-bottom: 2px solid {ORANGE}"
    spans = "".join(
        f'<span style="{style}">{escape(piece)}</span>' if i in marks else escape(piece)
        for i, piece in enumerate(pieces)
    )
    return Drawing(
        f'<div class="diagram" style="white-space: pre-wrap">{spans}</div>', "".join(pieces)
    )


def gpt2_blocks(n_layer: int, links: Mapping[str, str]) -> Drawing:
    """The parts of GPT-2 from ids (top) to logits. Keys of ``links`` are "lookups", "norm",
    "attention", "mlp", "stream" and "logits", each with the address that the part leads to."""
    canvas = Canvas(
        343, 458, f"ids, two lookups, {n_layer} blocks of LayerNorm, attention, LayerNorm and MLP, "
        "which are added to the state; a last LayerNorm, logits; each part leads to its section",
    )  # fmt: skip
    spine, left, width = 40, 96, 238

    def part(y: float, key: str, text: str, note: str, colour: str, height: float = 34) -> None:
        canvas.begin_link(links[key])
        canvas.box(left, y, width, height, colour, 0.25)
        canvas.text(left + 12, y + height / 2, text, 13, "start", bold=True)
        canvas.text(left + width - 8, y + height / 2, note, 11, "end", opacity=0.85)
        canvas.end_link()

    def branch(y: float, key: str, text: str, note: str, colour: str) -> None:
        """A copy of the state goes through a norm and one more part; the result is added."""
        canvas.line(spine, y + 17, left, y + 17, arrow=True)
        part(y, "norm", "LayerNorm", "one scale for all", PURPLE)
        canvas.line(left + width / 2, y + 34, left + width / 2, y + 46, arrow=True)
        part(y + 46, key, text, note, colour)
        canvas.line(left, y + 63, spine + 10, y + 63, arrow=True)
        canvas.begin_link(links["stream"])
        canvas.circle(spine, y + 63, 9)
        canvas.text(spine, y + 63, "+", 14)
        canvas.end_link()

    canvas.text(spine, 12, "ids", 13, bold=True)
    canvas.line(spine + 16, 12, left, 12, arrow=True)
    part(4, "lookups", "Two lookups", "word + place", ORANGE)
    canvas.line(left, 30, spine, 30)
    canvas.line(spine, 30, spine, 337)
    canvas.text(spine + 5, 45, "x (T, C)", 11, "start", opacity=0.85)
    canvas.box(8, 56, 331, 254, radius=8)
    canvas.text(left + width - 8, 294, f"{n_layer} blocks", 13, "end", bold=True)
    branch(66, "attention", "Attention", "tokens look back", BLUE)
    branch(166, "mlp", "MLP", "each token alone", GREEN)
    canvas.begin_link(links["stream"])
    canvas.text(spine + 16, 270, "x = x + …, the residual stream", 12, "start")
    canvas.end_link()
    canvas.line(spine, 337, left, 337, arrow=True)
    part(320, "norm", "LayerNorm", "once more", PURPLE)
    canvas.line(left + width / 2, 354, left + width / 2, 366, arrow=True)
    part(366, "logits", "Logits", "a score for every token", ORANGE)
    canvas.line(left + width / 2, 400, left + width / 2, 416, arrow=True)
    canvas.text(left + width / 2, 428, "(T, V)", 11, opacity=0.85)
    canvas.text(left + width / 2, 444, "softmax: which token comes next?", 12)
    return canvas.drawing()


def bars(words: Sequence[str], shares: Sequence[float], chosen: Sequence[int] = ()) -> Drawing:
    """A bar for the share (0 to 1) of each word; ``chosen`` words are orange."""
    row, left, full = 24, 122, 160
    said = ", ".join(f"{word!r} {share:.1%}" for word, share in zip(words, shares, strict=True))
    canvas = Canvas(343, row * len(words), said)
    largest = max(shares)
    for i, (word, share) in enumerate(zip(words, shares, strict=True)):
        y, width = row * (i + 0.5), max(full * share / largest, 1)
        canvas.text(left - 8, y, printable(word), 13, "end")
        colour = ORANGE if i in chosen else BLUE
        canvas.box(left, y - 8, width, 16, colour, 0.55, colour, radius=2)
        canvas.text(left + width + 6, y, f"{share:.1%}", 12, "start")
    return canvas.drawing()


def head_cells(titles: Sequence[str], owners: Sequence[Sequence[Sequence[int]]]) -> Drawing:
    """Tables of T tokens x C features, one below another, with each number coloured by the head
    that gets it: ``owners`` holds one table (T, C) of heads for each of the ``titles``."""
    cell, left = 28, 84
    height = sum(28 + cell * len(table) + 12 for table in owners)
    canvas = Canvas(
        343, height, "; ".join(f"{t}: {o}" for t, o in zip(titles, owners, strict=True))
    )
    y = 0.0
    for title, table in zip(titles, owners, strict=True):
        canvas.text(4, y + 13, title, 13, "start", bold=True)
        y += 28
        for t, row in enumerate(table):
            canvas.text(left - 10, y + cell / 2, f"token {t}", 12, "end")
            for c, head in enumerate(row):
                x = left + cell * c
                canvas.box(x, y, cell, cell, COLOURS[head % 5], 0.35, radius=0)
                canvas.text(x + cell / 2, y + cell / 2, str(len(row) * t + c), 12)
            y += cell
        for head in sorted({head for row in table for head in row}):
            x, top = left + cell * len(table[0]) + 24, y - cell * len(table)
            canvas.box(x, top + 26 * head + 2, 18, 18, COLOURS[head % 5], 0.35, radius=2)
            canvas.text(x + 26, top + 26 * head + 11, f"head {head}", 12, "start")
        y += 12
    return canvas.drawing()


def shifted(pieces: Sequence[str], after: str) -> Drawing:
    """The pieces of a text above the target of each: the piece to its right. ``after`` is what
    follows the last one."""
    pairs = list(zip(pieces, [*pieces[1:], after], strict=True))
    lengths = [max(map(len, pair)) for pair in pairs]
    unit = min(8.0, (333 - 14 * len(pairs)) / sum(lengths))
    says = "; ".join(f"target of {piece!r}: {target!r}" for piece, target in pairs)
    canvas = Canvas(343, 118, says)
    canvas.text(5, 9, "the model reads", 11, "start", opacity=0.8)
    canvas.text(5, 110, "the target of each token", 11, "start", opacity=0.8)
    x = 5.0
    for i, (pair, length) in enumerate(zip(pairs, lengths, strict=True)):
        width = unit * length + 10
        for k, y in enumerate((20, 72)):
            canvas.box(x, y, width, 26, COLOURS[(i + k) % 5], 0.25)
            canvas.text(x + width / 2, y + 13, printable(pair[k]), 1.6 * unit)
        canvas.line(x + width / 2, 47, x + width / 2, 71, arrow=True)
        x += width + 4
    return canvas.drawing()


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


def padded_rows(rows: Sequence[Sequence[str]], pad: str, read: Sequence[int]) -> Drawing:
    """Texts of unequal length in one batch: a box for each token, grey where it is ``pad``, blue
    and bold in the column that is ``read`` of each row."""
    T = max(map(len, rows))
    width, row = 339 / T, 32
    canvas = Canvas(
        343, row * len(rows) + 4,
        "; ".join(f"row {r} of {len(words)} tokens is read in column {column}"
                  for r, (words, column) in enumerate(zip(rows, read, strict=True))),
    )  # fmt: skip
    size = min(12, 1.5 * width / max(len(word) for words in rows for word in [*words, pad]))
    for r, (words, column) in enumerate(zip(rows, read, strict=True)):
        for t, word in enumerate([*words, *[pad] * (T - len(words))]):
            chosen, empty = t == column, t >= len(words)
            fill, tint = (BLUE, 0.35) if chosen else (INK, 0.03 if empty else 0.1)
            canvas.box(width * t + 2, row * r + 3, width - 4, row - 8, fill, tint)
            canvas.text(width * (t + 0.5) + 2, row * r + 15, printable(word), size,
                        bold=chosen, opacity=0.45 if empty else 1.0)  # fmt: skip
    return canvas.drawing()


def labelled(pieces: Sequence[str], labels: Sequence[str], truth: Sequence[str] = ()) -> Drawing:
    """A text, each token in the colour of its label, and underlined where the label is not the
    ``truth``. A token with an empty label has no colour. Below it: which colour is which label."""
    shown = [*dict.fromkeys(label for label in [*labels, *truth] if label)]
    tints = (BLUE, ORANGE, GREEN, RED, PURPLE, *COLOURS[5:7])

    def span(text: str, label: str, wrong: bool = False) -> str:
        if not label:
            return escape(text)
        colour = tint(tints[shown.index(label) % 7], 0.35)
        style = f"padding: 1px 0; border-radius: 3px; background: {colour}"
        if wrong:
            style += "; text-decoration: underline wavy; text-underline-offset: 3px"
        return f'<span style="{style}">{escape(text)}</span>'

    wrong = [bool(truth) and a != b for a, b in zip(labels, truth or labels, strict=True)]
    text = "".join(span(*one) for one in zip(pieces, labels, wrong, strict=True))
    key = " ".join(span(f" {label} ", label) for label in shown)
    pairs = zip(pieces, labels, strict=True)
    says = " ".join(f"{piece}[{label}]" for piece, label in pairs if label)
    return Drawing(
        f'<div class="diagram"><div style="white-space: pre-wrap; font-family: monospace; '
        f'line-height: 1.7">{text}</div><div style="margin-top: 6px; line-height: 1.9">'
        f"<small>{key}</small></div></div>",
        says,
    )


def versions(texts: Mapping[str, Sequence[str]]) -> Drawing:
    """One text, given by its tokens, in several versions by name. From the first token on that is
    not that of the first version, a version is marked: tinted and underlined."""
    first = [*next(iter(texts.values()))]
    style = f"background: {tint(ORANGE, 0.3)}; border-bottom: 2px solid {ORANGE}"
    rows, says = [], []
    for name, pieces in texts.items():
        n = same_tokens(first, pieces)
        kept, other = ("".join(part).replace("\n", "↵") for part in (pieces[:n], pieces[n:]))
        marked = f'<span style="{style}">{escape(other)}</span>' if other else ""
        rows.append(
            f'<div style="margin-bottom: 10px"><strong>{escape(name)}</strong><br>'
            f'<span style="white-space: pre-wrap">{escape(kept)}{marked}</span></div>'
        )
        says.append(f"{name}: " + (f"{n} tokens, then {other!r}" if other else repr(kept)))
    return Drawing(f'<div class="diagram">{"".join(rows)}</div>', "\n".join(says))


def same_tokens(first: Sequence[str], second: Sequence[str]) -> int:
    """How many tokens two texts have in common before they differ."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
