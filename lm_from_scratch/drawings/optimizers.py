"""Drawings of chapter 7: ways down a valley, what a training step holds, GaLore, two processes."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from lm_from_scratch.drawings.canvas import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    Canvas,
    Drawing,
    printable,
)


def valley(paths: Mapping[str, Sequence[Sequence[float]]], steepness: float) -> Drawing:
    """Ways down a valley of height (a² + ``steepness`` b²) / 2, seen from above, one below another.

    Each of the ``paths`` has a name and its places (a, b), one for each step.
    """
    places = [place for path in paths.values() for place in path]
    left, right = min(a for a, _ in places) - 0.5, max(1.5, *(a for a, _ in places)) + 0.5
    deep = max(1.5, *(abs(b) for _, b in places)) + 0.2
    unit = 343 / (right - left)
    panel = 2 * deep * unit + 24

    def height(place: Sequence[float]) -> float:
        return (place[0] ** 2 + steepness * place[1] ** 2) / 2

    canvas = Canvas(
        343, panel * len(paths),
        "; ".join(
            f"{name}: from height {height(path[0]):.3g} to {height(path[-1]):.2g} "
            f"in {len(path) - 1} steps"
            for name, path in paths.items()
        ),
    )  # fmt: skip
    for i, (name, path) in enumerate(paths.items()):
        top, colour = panel * i, (RED, PURPLE, BLUE)[i % 3]
        x0, y0 = -left * unit, top + 22 + deep * unit  # the lowest place
        for radius in range(2, round(-left) + 1, 2):  # lines of equal height
            canvas.marks.append(
                f'<ellipse cx="{x0:g}" cy="{y0:g}" rx="{radius * unit:g}" '
                f'ry="{radius * unit / math.sqrt(steepness):g}" fill="{INK}" fill-opacity="0.04" '
                f'stroke="{INK}" stroke-opacity="0.3"/>'
            )
        canvas.text(2, top + 10, name, 13, "start", bold=True)
        end = f"height after {len(path) - 1} steps: {height(path[-1]):.2f}"
        canvas.text(341, top + 10, end, 12, "end")
        dots = [(x0 + a * unit, y0 + b * unit) for a, b in path]
        points = " ".join(f"{x:g},{y:g}" for x, y in dots)
        canvas.marks.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        for x, y in dots:
            canvas.circle(x, y, 2, colour, 1.0, colour)
        canvas.line(x0 - 5, y0, x0 + 5, y0, 2)
        canvas.line(x0, y0 - 5, x0, y0 + 5, 2)
    return canvas.drawing()


def magnitudes(words: Sequence[str], values: Sequence[float]) -> Drawing:
    """A bar for the positive number of each word, ten times as much being one mark further."""
    row, left, full = 22, 92, 172
    written = [f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f}" for value in values]
    said = ", ".join(f"{word!r} {number}" for word, number in zip(words, written, strict=True))
    canvas = Canvas(343, row * len(words) + 22, said)
    low = math.floor(math.log10(min(values)))
    decade = full / (math.ceil(math.log10(max(values))) - low)
    for k in range(round(full / decade) + 1):
        x = left + k * decade
        canvas.line(x, 0, x, row * len(words) + 4, 0.8, opacity=0.25)
        if k < round(full / decade):
            canvas.text(x + decade / 2, row * len(words) + 13, "× 10", 10, opacity=0.8)
    for i, (word, value) in enumerate(zip(words, values, strict=True)):
        y, width = row * (i + 0.5), decade * (math.log10(value) - low)
        canvas.text(left - 8, y, printable(word), 13, "end")
        canvas.box(left, y - 7, max(width, 1), 14, BLUE, 0.55, BLUE, radius=2)
        canvas.text(left + width + 6, y, written[i], 12, "start")
    return canvas.drawing()


def training_memory(
    rows: Mapping[str, Mapping[str, float]], limit: float, limit_name: str
) -> Drawing:
    """What training holds, in gigabytes: a bar for each of the ``rows``, cut into parts by name,
    and a line at the ``limit``."""
    kinds = [*dict.fromkeys(part for parts in rows.values() for part in parts)]
    colours = {kind: (BLUE, ORANGE, GREEN, PURPLE)[i % 4] for i, kind in enumerate(kinds)}
    totals = {name: sum(parts.values()) for name, parts in rows.items()}
    unit, high = 296 / max(totals.values()), 50
    bottom, line = high * len(rows) + 6, 2 + limit * unit
    canvas = Canvas(
        343, bottom + 40,
        "; ".join(
            f"{name}: {totals[name]:.1f} GB, of which "
            + ", ".join(f"{part} {size:.1f}" for part, size in parts.items())
            for name, parts in rows.items()
        ) + f". {limit_name}: {limit:g} GB",
    )  # fmt: skip
    for i, (name, parts) in enumerate(rows.items()):
        x, y = 2.0, high * i + 20
        canvas.text(2, y - 9, name, 12, "start", bold=True)
        for part, size in parts.items():
            canvas.box(x, y, size * unit, 22, colours[part], 0.45, colours[part], radius=0)
            if size * unit > 26:
                canvas.text(x + size * unit / 2, y + 11, f"{size:.1f}", 12)
            x += size * unit
        beside = x < line < x + 42  # of the line, so that it does not cross the number
        x = line + 6 if beside else x + 5
        canvas.text(x, y + 11, f"{totals[name]:.1f}", 13, "start", bold=True)
        canvas.line(line, y - 3, line, y + 25, 1.6, RED, dashes="4 3")
    canvas.text(line + 4, bottom - 1, f"{limit_name}, {limit:g} GB", 11, "start", RED)
    x = 2.0
    for kind in kinds:
        canvas.box(x, bottom + 20, 11, 11, colours[kind], 0.45, colours[kind], radius=1)
        canvas.text(x + 16, bottom + 26, kind, 12, "start")
        x += 32 + 7 * len(kind)
    return canvas.drawing()


def galore_step(m: int, n: int, r: int) -> Drawing:
    """One step of GaLore for a square or tall matrix (m, n), from its gradient to its update, in
    scale. What is kept until the next step is coloured."""
    high = 84.0
    wide, thin, row = high * n / m, max(high * r / m, 4), high + 60
    canvas = Canvas(
        343, 3 * row + 26,
        f"1: the gradient G, {m} × {n}, times the basis Q, {n} × {r}, is R, {m} × {r}. 2: Adam "
        f"makes the direction d of R, with moments m and v, {m} × {r}. 3: d times Q transposed is "
        f"the update, {m} × {n}. Q, m and v are kept until the next step",
    )  # fmt: skip

    def part(
        x: float, line: int, size: tuple[float, float], name: str, shape: tuple[int, int],
        kept: bool = False,
    ) -> None:  # fmt: skip
        """A matrix around the middle (x, y) of a line."""
        y = line * row + 24 + high / 2
        fill, tint = (BLUE, 0.5) if kept else (INK, 0.1)
        canvas.box(x - size[0] / 2, y - size[1] / 2, *size, fill, tint, radius=0)
        canvas.text(x, y + size[1] / 2 + 10, name, 13, bold=True)
        canvas.text(x, y + size[1] / 2 + 24, f"{shape[0]} × {shape[1]}", 11, opacity=0.85)

    def sign(x: float, line: int, text: str) -> None:
        canvas.text(x, line * row + 24 + high / 2, text, 17)

    tall, low, flat = (wide, high), (thin, high), (wide, thin)
    captions = "Project the gradient", "Adam, on fewer numbers", "Project back: the update of W"
    for line, text in enumerate(captions):
        canvas.text(2, line * row + 10, f"{line + 1}. {text}", 13, "start", bold=True)
    part(50, 0, tall, "G", (m, n))
    sign(106, 0, "×")
    part(154, 0, (thin, wide), "Q", (n, r), kept=True)
    sign(206, 0, "=")
    part(262, 0, low, "R", (m, r))

    part(50, 1, low, "R", (m, r))
    sign(106, 1, "→")
    part(140, 1, low, "m", (m, r), kept=True)
    part(200, 1, low, "v", (m, r), kept=True)
    sign(232, 1, "→")
    part(282, 1, low, "d", (m, r))

    part(44, 2, low, "d", (m, r))
    sign(91, 2, "×")
    part(152, 2, flat, "Qᵀ", (r, n), kept=True)
    sign(210, 2, "=")
    part(270, 2, tall, "update", (m, n))

    canvas.box(2, 3 * row + 8, 11, 11, BLUE, 0.5, radius=0)
    canvas.text(20, 3 * row + 14, "kept until the next step", 12, "start")
    return canvas.drawing()


def subspaces(gap: int) -> Drawing:
    """The way of a weight from its start through three planes, ``gap`` steps in each, as a basis
    allows no others until the next one is made."""
    canvas = Canvas(
        343, 214,
        f"A weight moves in a first plane for {gap} steps, then in a second for {gap} steps, then "
        "in a third. It ends outside of the first plane",
    )  # fmt: skip
    # the corners of three planes, and the way in each, as places on the sheet
    planes = (
        ((12, 150), (98, 118), (152, 176), (66, 208)),
        ((112, 122), (138, 60), (200, 92), (174, 154)),
        ((168, 66), (262, 26), (318, 58), (224, 98)),
    )
    ways = (
        ((40, 158), (66, 146), (84, 158), (106, 150), (130, 142)),
        ((130, 142), (134, 124), (152, 116), (156, 96), (178, 84)),
        ((178, 84), (204, 80), (222, 64), (248, 66), (276, 48)),
    )
    colours = BLUE, ORANGE, GREEN
    for plane, colour in zip(planes, colours, strict=True):
        corners = " ".join(f"{x:g},{y:g}" for x, y in plane)
        canvas.marks.append(
            f'<polygon points="{corners}" fill="{colour}" fill-opacity="0.15" stroke="{colour}"/>'
        )
    for way, colour in zip(ways, colours, strict=True):
        for (x1, y1), (x2, y2) in pairwise(way):
            canvas.line(x1, y1, x2, y2, 1.6, INK)
        for x, y in way[1:]:
            canvas.circle(x, y, 3, colour, 1.0, INK)
    canvas.circle(*ways[0][0], 4, INK, 1.0)
    canvas.text(38, 144, "start", 12)
    for i, (x, y) in enumerate(((150, 194), (206, 130), (196, 14))):
        canvas.text(x, y, f"basis {i + 1}, {gap} steps", 12, "start", bold=True)
    return canvas.drawing()


def optimizer_state(m: int, n: int, rank: int) -> Drawing:
    """What training keeps for a weight (m, n), m <= n, with AdamW and with GaLore at a rank: boxes
    in scale. The state of the optimizer is on the right."""
    side = 74.0
    unit = side / n
    totals = 2 * m * n, rank * (m + 2 * n)
    canvas = Canvas(
        343, side + 62 + max(side, 2 * unit * rank + 6) + 58,
        f"Weight and gradient of {m} x {n}; AdamW keeps two moments of this size, {totals[0]:,} "
        f"numbers; GaLore a basis of {m} x {rank} and two moments of {rank} x {n}, {totals[1]:,}",
    )  # fmt: skip

    def part(
        x: float, y: float, name: str, size: tuple[int, int], fill: str, tint: float
    ) -> None:  # fmt: skip
        """A box whose top left is (x, y), and its name below."""
        high, wide = unit * size[0], unit * size[1]
        canvas.box(x, y, wide, high, fill, tint, radius=1)
        canvas.text(x + wide / 2, y + high + 10, name, 11)
        canvas.text(x + wide / 2, y + high + 24, f"{size[0]} × {size[1]}", 11, opacity=0.8)

    for i, (name, total) in enumerate(zip(("AdamW", "GaLore"), totals, strict=True)):
        y = i * (side + 62) + 22
        canvas.text(4, y - 12, name, 13, "start", bold=True)
        canvas.text(341, y - 12, f"state: {total:,} numbers", 12, "end")
        part(4, y, "weight", (m, n), INK, 0.06)
        part(88, y, "gradient", (m, n), ORANGE, 0.35)
        if i:
            part(204, y, "basis", (m, rank), GREEN, 0.4)
            canvas.box(267, y, side, unit * rank, BLUE, 0.4, radius=1)
            part(267, y + unit * rank + 6, "two moments", (rank, n), BLUE, 0.4)
        else:
            part(183, y, "moment", (m, n), BLUE, 0.4)
            part(267, y, "moment", (m, n), BLUE, 0.4)
    return canvas.drawing()


def gradient_lives(names: Sequence[str]) -> Drawing:
    """Which gradients exist at each moment of a backward pass, in the ordinary loop and with
    updates inside of it. ``names`` are the parts of a model in the order in which the pass comes to
    them: a row each, and a column for each moment. The last moment is ``optimizer.step()``."""
    N = len(names)
    left, row = 96, 24
    column = (343 - left) / (N + 1)
    panel = row * N + 52
    canvas = Canvas(
        343, 2 * panel + 16,
        f"A backward pass through {', '.join(names)}. In the ordinary loop, {N} gradients exist at "
        "its end, and the step updates all weights. With updates in backward, one gradient exists "
        "at a time, and each weight is updated before the next gradient comes",
    )  # fmt: skip
    titles = "ordinary loop", "update in backward"
    for i, title in enumerate(titles):
        top = i * panel
        canvas.text(2, top + 10, title, 13, "start", bold=True)
        for t in range(N + 1):
            x = left + column * t
            canvas.text(x + column / 2, top + 29, "step" if t == N else f"{t + 1}", 11, opacity=0.8)
            for k in range(N):
                y = top + 40 + row * k
                gradient = t < N and (t == k if i else t >= k)
                updated = t == N or (bool(i) and t >= k)
                fill = ORANGE if gradient else BLUE if updated else "none"
                canvas.box(x + 1.5, y, column - 3, row - 4, fill, 0.45, radius=2)
                if gradient:
                    canvas.text(x + column / 2, y + row / 2 - 2, "g", 12)
        for k, name in enumerate(names):
            canvas.text(left - 8, top + 50 + row * k, name, 12, "end")
    y, x = 2 * panel + 2, 2.0
    for fill, name in (("none", "waits"), (ORANGE, "has a gradient"), (BLUE, "is updated")):
        canvas.box(x, y, 14, 14, fill, 0.45, radius=2)
        canvas.text(x + 20, y + 7, name, 12, "start")
        if fill == ORANGE:
            canvas.text(x + 7, y + 7, "g", 11)
        x += 36 + 6.6 * len(name)
    return canvas.drawing()


def two_copies(
    rows: Sequence[Sequence[str]], gradients: Sequence[float], name: str
) -> Drawing:  # fmt: skip
    """A step of data parallel training. ``rows`` are the texts of each of two processes, and
    ``gradients`` the gradient of one weight, ``name``, in both."""
    mean = sum(gradients) / 2
    count = max(map(len, rows))
    canvas = Canvas(
        343, 20 * count + 276,
        "; ".join(
            f"process {k} has a copy of the model, reads {list(texts)} and finds {gradient:.3f}"
            for k, (texts, gradient) in enumerate(zip(rows, gradients, strict=True))
        )
        + f"; both replace it by the mean, {mean:.3f}, and take the same step",
    )  # fmt: skip
    wide, middles = 160, (82, 261)
    y0 = 20 * count + 40
    for k, (x, texts, colour) in enumerate(zip(middles, rows, (BLUE, ORANGE), strict=True)):
        left = x - wide / 2
        canvas.text(x, 10, f"process {k}", 13, bold=True)
        for i, text in enumerate(texts):
            canvas.box(left, 22 + 20 * i, wide, 17, colour, 0.25, radius=2)
            canvas.text(left + 5, 30.5 + 20 * i, text, 11, "start")
        canvas.line(x, y0 - 16, x, y0 - 2, arrow=True)
        canvas.box(left + 20, y0, wide - 40, 40, INK, 0.06)
        canvas.text(x, y0 + 13, "copy of the model", 12)
        canvas.text(x, y0 + 28, "same weights", 11, opacity=0.8)
        canvas.line(x, y0 + 41, x, y0 + 58, arrow=True)
        canvas.box(left + 20, y0 + 59, wide - 40, 26, colour, 0.35)
        canvas.text(x, y0 + 72, f"gradient {_number(gradients[k])}", 12)
        canvas.line(x, y0 + 86, 171.5 + (x - 171.5) * 0.3, y0 + 107, arrow=True)
        canvas.line(171.5 + (x - 171.5) * 0.3, y0 + 149, x, y0 + 170, arrow=True)
        canvas.box(left + 20, y0 + 171, wide - 40, 40, INK, 0.06)
        canvas.text(x, y0 + 184, "same step", 12)
        canvas.text(x, y0 + 199, "same weights again", 11, opacity=0.8)
    canvas.box(81, y0 + 108, 181, 40, GREEN, 0.3)
    canvas.text(171.5, y0 + 121, "all-reduce: the mean", 12, bold=True)
    canvas.text(171.5, y0 + 137, f"{_number(mean)}, in both", 12)
    canvas.text(171.5, y0 + 226, f"gradient of one weight of {name}", 11, opacity=0.8)
    return canvas.drawing()


def _number(value: float) -> str:
    """Three digits, with a sign as wide as a plus."""
    return f"{value:+.3f}".replace("-", "−")
