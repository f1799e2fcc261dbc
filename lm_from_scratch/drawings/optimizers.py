"""Drawings of chapter 7: ways down a valley, what a training step holds, GaLore, two processes."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing, Grid
from lm_from_scratch.drawings.colours import BLUE, GREEN, INK, ORANGE, PURPLE, RED
from lm_from_scratch.drawings.labels import minus, printable


def valley(paths: Mapping[str, Sequence[Sequence[float]]], steepness: float) -> Drawing:
    """Ways down a valley of height (a² + ``steepness`` b²) / 2, seen from above, one below another.

    Each of the ``paths`` has a name and its places (a, b), one for each step.
    """
    places = [place for path in paths.values() for place in path]
    left, right = min(a for a, _ in places) - 0.5, max(1.5, *(a for a, _ in places)) + 0.5
    deep = max(1.5, *(abs(b) for _, b in places)) + 0.2
    unit = WIDTH / (right - left)
    panel = 2 * deep * unit + 24
    canvas, says = Canvas(WIDTH, panel * len(paths)), []
    for i, (name, path) in enumerate(paths.items()):
        top, colour = panel * i, (RED, PURPLE, BLUE)[i % 3]
        x0, y0 = -left * unit, top + 22 + deep * unit  # the lowest place
        for radius in range(2, round(-left) + 1, 2):  # lines of equal height
            canvas.marks.append(
                f'<ellipse cx="{x0:g}" cy="{y0:g}" rx="{radius * unit:g}" '
                f'ry="{radius * unit / math.sqrt(steepness):g}" fill="{INK}" fill-opacity="0.04" '
                f'stroke="{INK}" stroke-opacity="0.3"/>'
            )
        first, last = ((a**2 + steepness * b**2) / 2 for a, b in (path[0], path[-1]))
        steps = len(path) - 1
        canvas.title(top + 10, name, f"height after {steps} steps: {last:.2f}")
        says.append(f"{name}: from height {first:.3g} to {last:.2g} in {steps} steps")
        dots = [(x0 + a * unit, y0 + b * unit) for a, b in path]
        points = " ".join(f"{x:g},{y:g}" for x, y in dots)
        canvas.marks.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        for x, y in dots:
            canvas.circle(x, y, 2, colour, 1.0, colour)
        canvas.line(x0 - 5, y0, x0 + 5, y0, 2)
        canvas.line(x0, y0 - 5, x0, y0 + 5, 2)
    return canvas.drawing("; ".join(says))


def magnitudes(words: Sequence[str], values: Sequence[float]) -> Drawing:
    """A bar for the positive number of each word, ten times as much being one mark further."""
    row, left, full = 22, 92, 172
    written = [f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f}" for value in values]
    caption = ", ".join(f"{word!r} {number}" for word, number in zip(words, written, strict=True))
    foot = row * len(words)
    canvas = Canvas(WIDTH, foot + 22, caption)
    low = math.floor(math.log10(min(values)))
    decades = math.ceil(math.log10(max(values))) - low
    decade = full / decades
    for k in range(decades + 1):
        x = left + k * decade
        canvas.line(x, 0, x, foot + 4, 0.8, opacity=0.25)
        if k < decades:
            canvas.note(x + decade / 2, foot + 13, "× 10", "middle", 10)
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
    unit, high = 276 / max(totals.values()), 50
    bottom, line = high * len(rows) + 6, 2 + limit * unit
    says = (
        f"{name}: {totals[name]:.1f} GB, of which "
        + ", ".join(f"{part} {size:.1f}" for part, size in parts.items())
        for name, parts in rows.items()
    )
    canvas = Canvas(WIDTH, bottom + 40, "; ".join(says) + f". {limit_name}: {limit:g} GB")
    for i, (name, parts) in enumerate(rows.items()):
        x, y = 2.0, high * i + 20
        canvas.title(y - 9, name, size=12)
        for part, size in parts.items():
            number = f"{size:.1f}" if size * unit > 26 else ""
            canvas.cell(x, y, size * unit, 22, number, 12, colours[part], 0.45, colours[part], 0)
            x += size * unit
        beside = x < line < x + 64  # of the line, so that it does not cross the number
        x = line + 6 if beside else x + 5
        canvas.text(x, y + 11, f"{totals[name]:.1f} GB", 13, "start", bold=True)
        canvas.line(line, y - 3, line, y + 25, 1.6, RED, dashes="4 3")
    canvas.text(line + 4, bottom - 1, f"{limit_name}, {limit:g} GB", 11, "start", RED)
    canvas.legend(bottom + 26, *((colours[kind], 0.45, kind) for kind in kinds))
    return canvas.drawing()


def galore_step(m: int, n: int, r: int) -> Drawing:
    """One step of GaLore for a square or tall matrix (m, n), from its gradient to its update, in
    scale. What is kept until the next step is coloured."""
    high = 84.0
    wide, thin, row = high * n / m, max(high * r / m, 4), high + 60
    canvas = Canvas(
        WIDTH, 3 * row + 26,
        f"1: the gradient G, {m} × {n}, times the basis Q, {n} × {r}, is R, {m} × {r}. 2: Adam "
        f"makes the direction d of R, with moments m and v, {m} × {r}. 3: d times Q transposed is "
        f"the update, {m} × {n}. Q, m and v are kept until the next step",
    )  # fmt: skip
    tall, low = (wide, high, f"{m} × {n}"), (thin, high, f"{m} × {r}")
    down, flat = (thin, wide, f"{n} × {r}"), (wide, thin, f"{r} × {n}")
    rows = {
        "1. Project the gradient": [
            (50, "G", tall), (106, "×", None), (154, "Q", down), (206, "=", None), (262, "R", low),
        ],
        "2. Adam, on fewer numbers": [
            (50, "R", low), (106, "→", None), (140, "m", low), (200, "v", low), (232, "→", None),
            (282, "d", low),
        ],
        "3. Project back: the update of W": [
            (44, "d", low), (91, "×", None), (152, "Qᵀ", flat), (210, "=", None),
            (270, "update", tall),
        ],
    }  # fmt: skip
    for line, (title, parts) in enumerate(rows.items()):
        y = line * row + 24 + high / 2
        canvas.title(line * row + 10, title)
        for x, name, size in parts:
            if size is None:
                canvas.text(x, y, name, 17)
                continue
            w, h, shape = size
            look = (BLUE, 0.5) if name in ("Q", "Qᵀ", "m", "v") else (INK, 0.1)
            canvas.box(x - w / 2, y - h / 2, w, h, *look, radius=0)
            canvas.text(x, y + h / 2 + 10, name, 13, bold=True)
            canvas.text(x, y + h / 2 + 24, shape, 11, opacity=0.85)
    canvas.legend(3 * row + 14, (BLUE, 0.5, "kept until the next step"))
    return canvas.drawing()


def subspaces(gap: int) -> Drawing:
    """The way of a weight from its start through three planes, ``gap`` steps in each, as a basis
    allows no others until the next one is made."""
    canvas = Canvas(
        WIDTH, 214,
        f"A weight moves in a first plane for {gap} steps, then in a second for {gap} steps, then "
        "in a third. It ends outside of the first plane",
    )  # fmt: skip
    # the corners of a plane, the way in it, and where its name stands, as places on the sheet
    planes = (
        (BLUE, "12,150 98,118 152,176 66,208", (150, 194),
         ((40, 158), (66, 146), (84, 158), (106, 150), (130, 142))),
        (ORANGE, "112,122 138,60 200,92 174,154", (206, 130),
         ((130, 142), (134, 124), (152, 116), (156, 96), (178, 84))),
        (GREEN, "168,66 262,26 318,58 224,98", (196, 14),
         ((178, 84), (204, 80), (222, 64), (248, 66), (276, 48))),
    )  # fmt: skip
    for colour, corners, _, _ in planes:
        canvas.marks.append(
            f'<polygon points="{corners}" fill="{colour}" fill-opacity="0.15" stroke="{colour}"/>'
        )
    for i, (colour, _, place, way) in enumerate(planes, 1):
        for start, end in pairwise(way):
            canvas.line(*start, *end, 1.6, INK)
        for x, y in way[1:]:
            canvas.circle(x, y, 3, colour, 1.0, INK)
        canvas.text(*place, f"basis {i}, {gap} steps", 12, "start", bold=True)
    canvas.circle(40, 158, 4, INK, 1.0)
    canvas.text(38, 144, "start", 12)
    return canvas.drawing()


def optimizer_state(m: int, n: int, rank: int) -> Drawing:
    """What training keeps for a weight (m, n), m <= n, with AdamW and with GaLore at a rank: boxes
    in scale. The state of the optimizer is on the right."""
    side = 74.0
    unit = side / n
    totals = {"AdamW": 2 * m * n, "GaLore": rank * (m + 2 * n)}
    canvas = Canvas(
        WIDTH, side + 62 + max(side, 2 * unit * rank + 6) + 58,
        f"Weight and gradient of {m} x {n}; AdamW keeps two moments of this size, "
        f"{totals['AdamW']:,} numbers; GaLore a basis of {m} x {rank} and two moments of {rank} x "
        f"{n}, {totals['GaLore']:,}",
    )  # fmt: skip

    def part(x: float, y: float, name: str, size: tuple[int, int], fill: str, tint: float) -> None:
        """A box whose top left is (x, y), and its name below."""
        high, wide = unit * size[0], unit * size[1]
        canvas.box(x, y, wide, high, fill, tint, radius=1)
        canvas.text(x + wide / 2, y + high + 10, name, 11)
        canvas.note(x + wide / 2, y + high + 24, f"{size[0]} × {size[1]}", "middle")

    for i, (name, total) in enumerate(totals.items()):
        y = i * (side + 62) + 22
        canvas.title(y - 12, name, f"state: {total:,} numbers")
        part(4, y, "weight", (m, n), INK, 0.06)
        part(88, y, "gradient", (m, n), ORANGE, 0.35)
    part(183, 22, "moment", (m, n), BLUE, 0.4)
    part(267, 22, "moment", (m, n), BLUE, 0.4)
    y = side + 84
    part(204, y, "basis", (m, rank), GREEN, 0.4)
    canvas.box(267, y, side, unit * rank, BLUE, 0.4, radius=1)
    part(267, y + unit * rank + 6, "two moments", (rank, n), BLUE, 0.4)
    return canvas.drawing()


def gradient_lives(names: Sequence[str]) -> Drawing:
    """Which gradients exist at each moment of a backward pass, in the ordinary loop and with
    updates inside of it. ``names`` are the parts of a model in the order in which the pass comes to
    them: a row each, and a column for each moment. The last moment is ``optimizer.step()``."""
    N = len(names)
    panel = 24 * N + 52
    canvas = Canvas(
        WIDTH, 2 * panel + 18,
        f"A backward pass through {', '.join(names)}. In the ordinary loop, {N} gradients exist "
        "at its end, and the step updates all weights. With updates in backward, one gradient "
        "exists at a time, and each weight is updated before the next gradient comes",
    )  # fmt: skip
    for inside, title in enumerate(("ordinary loop", "update in backward")):
        canvas.title(inside * panel + 10, title)
        grid = Grid(canvas, 97.5, inside * panel + 40, (WIDTH - 98) / (N + 1), 24)
        for k, name in enumerate(names):
            grid.name(k, name, away=9.5)
        for t in range(N + 1):
            canvas.note(grid.middle(0, t)[0], inside * panel + 29, t + 1 if t < N else "step",
                        "middle")  # fmt: skip
            for k in range(N):
                gradient = t < N and (t == k if inside else t >= k)
                updated = t == N or (bool(inside) and t >= k)
                fill = ORANGE if gradient else BLUE if updated else "none"
                grid.cell(k, t, "g" if gradient else "", 12, fill, 0.45, INK)
    kinds = ("none", 0.45, "waits"), (ORANGE, 0.45, "has a gradient"), (BLUE, 0.45, "is updated")
    canvas.legend(2 * panel + 9, *kinds)
    canvas.text(75, 2 * panel + 9, "g", 11)
    return canvas.drawing()


def two_copies(rows: Sequence[Sequence[str]], gradients: Sequence[float], name: str) -> Drawing:
    """A step of data parallel training. ``rows`` are the texts of each of two processes, and
    ``gradients`` the gradient of one weight, ``name``, in both."""
    mean, wide, low = sum(gradients) / 2, 160, 20 * max(map(len, rows)) + 40
    canvas = Canvas(
        WIDTH, low + 236,
        "; ".join(
            f"process {k} has a copy of the model, reads {list(texts)} and finds {gradient:.3f}"
            for k, (texts, gradient) in enumerate(zip(rows, gradients, strict=True))
        )
        + f"; both replace it by the mean, {mean:.3f}, and take the same step",
    )  # fmt: skip

    def model(x: float, y: float, text: str, note: str) -> None:
        canvas.box(x - 60, y, 120, 40, INK, 0.06)
        canvas.text(x, y + 13, text, 12)
        canvas.note(x, y + 28, note, "middle")

    for k, (x, texts, colour) in enumerate(zip((82, 261), rows, (BLUE, ORANGE), strict=True)):
        near = 171.5 + (x - 171.5) * 0.3
        canvas.text(x, 10, f"process {k}", 13, bold=True)
        for i, text in enumerate(texts):
            canvas.box(x - 80, 22 + 20 * i, wide, 17, colour, 0.25, radius=2)
            canvas.text(x - 75, 30.5 + 20 * i, text, 11, "start")
        canvas.line(x, low - 16, x, low - 2, arrow=True)
        model(x, low, "copy of the model", "same weights")
        canvas.line(x, low + 41, x, low + 58, arrow=True)
        number = minus(f"gradient {gradients[k]:+.3f}")
        canvas.cell(x - 60, low + 59, 120, 26, number, 12, colour, 0.35)
        canvas.line(x, low + 86, near, low + 107, arrow=True)
        canvas.line(near, low + 149, x, low + 170, arrow=True)
        model(x, low + 171, "same step", "same weights again")
    canvas.box(81, low + 108, 181, 40, GREEN, 0.3)
    canvas.text(171.5, low + 121, "all-reduce: the mean", 12, bold=True)
    canvas.text(171.5, low + 137, minus(f"{mean:+.3f}, in both"), 12)
    canvas.note(171.5, low + 226, f"gradient of one weight of {name}", "middle")
    return canvas.drawing()
