"""Drawings of chapter 2: rotation as hands of clocks, gates, shared heads, the parts of Qwen2."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing, Grid
from lm_from_scratch.drawings.colours import BLUE, COLOURS, INK, ORANGE
from lm_from_scratch.drawings.labels import printable


class _Clock:
    """The face of a clock, with a mark at each hour. A turn of 0.25 is 3 o'clock."""

    def __init__(self, canvas: Canvas, x: float, y: float, radius: float) -> None:
        self.canvas, self.x, self.y, self.radius = canvas, x, y, radius
        canvas.circle(x, y, radius)
        for hour in range(12):
            canvas.line(*self.at(0.92, hour / 12), *self.at(1.0, hour / 12))

    def at(self, share: float, turn: float) -> tuple[float, float]:
        """A place at a ``share`` of the radius."""
        long, angle = share * self.radius, 2 * math.pi * turn
        return self.x + long * math.sin(angle), self.y - long * math.cos(angle)

    def hand(
        self, turn: float, colour: str, width: float = 2.4, opacity: float = 1.0, arrow: bool = True
    ) -> None:
        end = self.at(0.88, turn)
        self.canvas.line(self.x, self.y, *end, width, colour, opacity, arrow)


def clock_hands(*places: tuple[int, int]) -> Drawing:
    """Keys and queries as hands of clocks, turned by one hour for each position.

    A clock for each of the ``places``: the position of a key, and that of a query after it.
    """
    wide, radius = WIDTH / max(2, len(places)), 60
    says = (
        f"a key at position {key} and a query at position {query}, {30 * (query - key)} degrees "
        "apart"
        for key, query in places
    )
    canvas = Canvas(round(wide * len(places)), 198, "; ".join(says))
    for i, (key, query) in enumerate(places):
        x, low = wide * (i + 0.5), 2 * radius + 18
        clock = _Clock(canvas, x, radius + 18, radius)
        for hour in range(1, 13):
            canvas.note(*clock.at(7 / 6, hour / 12), hour, "middle", 10)
        clock.hand(key / 12, ORANGE)
        clock.hand(query / 12, BLUE)
        (x1, y1), (x2, y2) = clock.at(0.36, key / 12), clock.at(0.36, query / 12)
        large = int((query - key) % 12 > 6)
        canvas.marks.append(
            f'<path d="M{x1:g} {y1:g}A21.6 21.6 0 {large} 1 {x2:g} {y2:g}" fill="none" '
            f'stroke="{INK}"/>'
        )
        canvas.text(*clock.at(0.58, (key + query) / 24), f"{30 * (query - key)}°", 12)
        canvas.box(x - 64, low + 25, 8, 8, ORANGE, 1.0, ORANGE, 1)
        canvas.text(x - 50, low + 29, f"key at position {key}", 12, "start")
        canvas.circle(x - 60, low + 47, 4, BLUE, 1.0, BLUE)
        canvas.text(x - 50, low + 47, f"query at position {query}", 12, "start")
    return canvas.drawing()


def hand_speeds(turns: Mapping[str, float], steps: int) -> Drawing:
    """A clock for each name in ``turns``, with its hand at positions 0 to ``steps``, the last one
    darkest. A number says how many positions a whole turn takes."""
    wide = WIDTH / len(turns)
    radius = min(62.0, wide / 2 - 8)
    speeds = ", ".join(f"{name} turns once in {turn:.0f} positions" for name, turn in turns.items())
    canvas = Canvas(WIDTH, 2 * radius + 56, f"Hands at positions 0 to {steps}; {speeds}")
    for i, (name, turn) in enumerate(turns.items()):
        x, y = wide * (i + 0.5), radius + 8
        clock = _Clock(canvas, x, y, radius)
        for t in range(steps):
            clock.hand(t / turn, BLUE, 1.4, 0.6, False)
        clock.hand(steps / turn, BLUE)
        canvas.text(x, y + radius + 17, name, 12, bold=True)
        canvas.text(x, y + radius + 35, f"{turn:,.0f} tokens a turn", 12)
    return canvas.drawing()


def feature_pairs(layouts: Mapping[str, Sequence[int]]) -> Drawing:
    """The features of a head as boxes, a row for each name in ``layouts``; a number and a colour
    say to which pair a feature belongs."""
    says = (f"{name}: features belong to pairs {pairs}" for name, pairs in layouts.items())
    canvas = Canvas(WIDTH, 62 * len(layouts), "; ".join(says))
    for row, (name, pairs) in enumerate(layouts.items()):
        canvas.title(62 * row + 12, name, size=12)
        grid = Grid(canvas, 2, 62 * row + 24, 339 / len(pairs), 30, 4)
        for i, pair in enumerate(pairs):
            grid.cell(0, i, pair, 13, COLOURS[pair % 5], 0.3, radius=4)
    return canvas.drawing()


def gates(
    pieces: Sequence[str], names: Sequence[object], passed: Sequence[Sequence[float]]
) -> Drawing:
    """How much each of the gates ``names`` lets through at each of the ``pieces`` of a text, as
    disks: ``passed`` are (T, gates), silu of the gate. Nothing is drawn where it is not positive.
    """
    largest = max(map(max, passed))
    widest = [pieces[column.index(max(column))] for column in zip(*passed, strict=True)]
    says = (f"gate {name} at {piece!r}" for name, piece in zip(names, widest, strict=True))
    canvas = Canvas(WIDTH, 22 * (len(pieces) + 1.2), "Gates, open widest: " + ", ".join(says))
    grid = Grid(canvas, 105, 0, 238 / len(names), 22, 0)
    grid.name(0, "gate", 11, away=10, opacity=0.8)
    for i, name in enumerate(names):
        grid.text(0, i, name, 11, opacity=0.8)
    for t, piece in enumerate(pieces):
        grid.name(t + 1.1, printable(piece), 13, away=10)
        y = grid.middle(t + 1.1, 0)[1]
        canvas.line(105, y, WIDTH, y, 0.6, opacity=0.25)
        for i, value in enumerate(passed[t]):
            share = value / largest
            if share > 0.02:
                x = grid.middle(0, i)[0]
                canvas.circle(x, y, 10 * share**0.5, BLUE, 0.15 + 0.75 * share, BLUE)
    return canvas.drawing()


def shared_heads(n_head: int, n_kv_heads: Sequence[int]) -> Drawing:
    """Which of ``n_head`` query heads reads which key head, once for each of ``n_kv_heads``."""
    row, panel = 30, WIDTH / len(n_kv_heads)
    numbers = ", ".join(map(str, n_kv_heads))
    says = f"{n_head} query heads read {numbers} key heads, in groups"
    canvas = Canvas(WIDTH, row * (n_head + 1.4), says)
    for p, n_kv_head in enumerate(n_kv_heads):
        left, right = p * panel + 26, (p + 1) * panel - 30
        canvas.text((left + right) / 2, row / 2, f"H = {n_head}, Hkv = {n_kv_head}", 12, bold=True)
        keys = [row * (0.9 + (k + 0.5) * n_head / n_kv_head) for k in range(n_kv_head)]
        for h in range(n_head):
            head, y = h * n_kv_head // n_head, row * (h + 1.4)
            colour = COLOURS[head % 5]
            canvas.line(left + 11, y, right - 13, keys[head], 1.6, colour, arrow=True)
            canvas.circle(left, y, 11, colour, 0.25)
            canvas.text(left, y, f"q{h}", 11)
        for k, y in enumerate(keys):
            canvas.cell(right - 12, y - 11, 40, 22, f"k{k} v{k}", 11, COLOURS[k % 5], 0.25)
    return canvas.drawing()


def qwen2_blocks(n_layer: int, links: Sequence[str]) -> Drawing:
    """The parts of Qwen2 from ids (top) to logits. The five that GPT-2 has otherwise are coloured,
    numbered from 1, and lead to the addresses ``links``."""
    canvas = Canvas(
        WIDTH, 478, f"ids, embedding, {n_layer} blocks of norm, attention, norm and gated MLP, "
        "whose results are added to the state; a last norm, head, logits; five are marked as "
        "changed",
    )  # fmt: skip
    spine, left, width, middle = 36, 84, 250, 209

    def part(y: float, text: str, note: str, change: int = 0) -> None:
        colour = COLOURS[change - 1] if change else "none"
        if change:
            canvas.begin_link(links[change - 1])
        canvas.box(left, y, width, 34, colour, 0.25)
        if change:
            canvas.circle(left + 16, y + 17, 9, colour, 0.5)
            canvas.text(left + 16, y + 17, change, 11, bold=True)
        canvas.text(left + 32, y + 17, text, 13, "start", bold=bool(change))
        canvas.note(left + width - 8, y + 17, note, "end")
        if change:
            canvas.end_link()

    canvas.text(middle, 10, "ids", 13, bold=True)
    canvas.line(middle, 20, middle, 34, arrow=True)
    part(34, "embedding", "no position table")
    canvas.line(left, 51, spine, 51)
    canvas.line(spine, 51, spine, 393)
    canvas.box(8, 82, 331, 272, radius=8)
    canvas.note(332, 346, f"{n_layer} times", "end")
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
    canvas = Canvas(WIDTH, sum(heights) + y, ", ".join(says))
    for (name, config), height in zip(configs.items(), heights, strict=True):
        for layer in range(config.n_layer):
            canvas.box(4, y + 3 * layer, 150 * config.n_embd / widest, 3, BLUE, 0.35, BLUE, 0)
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
