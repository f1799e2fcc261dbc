"""Drawings of chapter 2: rotation as hands of clocks, gates, shared heads, the parts of Qwen2."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lm_from_scratch.drawings.canvas import (
    BLUE,
    COLOURS,
    INK,
    ORANGE,
    Canvas,
    Drawing,
    printable,
)


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


def _tip(x: float, y: float, radius: float, turn: float) -> tuple[float, float]:
    """Where a hand ends that has turned clockwise from 12 o'clock: 0.25 is 3 o'clock."""
    return x + radius * math.sin(2 * math.pi * turn), y - radius * math.cos(2 * math.pi * turn)


def _dial(canvas: Canvas, x: float, y: float, radius: float) -> None:
    """The face of a clock, with a mark at each hour."""
    canvas.circle(x, y, radius)
    for hour in range(12):
        canvas.line(*_tip(x, y, 0.92 * radius, hour / 12), *_tip(x, y, radius, hour / 12))


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
