"""Drawings of what a training step holds, frees and sends."""

from collections.abc import Sequence

from lm_from_scratch.instruments.canvas import BLUE, GREEN, INK, ORANGE, Canvas, Drawing


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
