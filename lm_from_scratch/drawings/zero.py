"""Drawings of chapter 0: slopes on their way back through a small machine, a line that rolls down
its loss, a network that learns a curve."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing, slides
from lm_from_scratch.drawings.colours import BLUE, INK, ORANGE
from lm_from_scratch.drawings.labels import minus
from lm_from_scratch.training.autograd import Value

#: The machine of the lesson, parents first: how each number is made, the middle of its box and how
#: wide the box is.
MACHINE: dict[str, tuple[str, float, float, float]] = {
    "a": ("", 51, 44, 98),
    "b": ("", 162, 44, 108),
    "c": ("", 290, 124, 96),
    "product": (" = a × b", 102, 124, 116),
    "total": (" = product + c", 216, 204, 134),
    "bent": (" = relu(total)", 216, 284, 134),
    "result": (" = bent × product", 112, 364, 162),
}
HIGH = 42  # of a box
FORWARD = (
    "An arrow leads from a parent to what is computed from it.",
    "Beside it is the slope that was remembered for this parent.",
)


def backward_steps(numbers: Mapping[str, Value]) -> Drawing:
    """A backward pass through the machine of the lesson, a frame for each number that passes its
    slope on. ``numbers`` are those of the machine by name: a, b, c, product, total, bent, result.

    Every box has a number and the slope of the result with respect to it, as far as it is known.
    Beside each arrow is the slope that was remembered on the way forward.
    """
    names = {id(number): name for name, number in numbers.items()}
    uses = {name: 0 for name in MACHINE}  # slopes that are still to come
    for number in numbers.values():
        for parent in number.parents:
            uses[names[id(parent)]] += 1
    slopes: dict[str, float] = {"result": 1.0}
    frames = [_machine(numbers, names, {}, uses, "", [], "Forward: the numbers")]
    for name in reversed(MACHINE):
        number, lines = numbers[name], []
        for parent, local in zip(number.parents, number.slopes, strict=True):
            to, part = names[id(parent)], slopes[name] * local
            line = f"{_short(slopes[name])} × {_short(local)}"
            line = f"{_short(slopes[to])} + ({line})" if to in slopes else line
            slopes[to] = slopes.get(to, 0.0) + part
            uses[to] -= 1
            so_far = ", so far" if uses[to] else ""
            lines.append(f"{to}: {line} = {_short(slopes[to])}{so_far}")
        if lines:
            title = f"{name} passes its slope on to {' and '.join(_parents(number, names))}"
            frames.append(_machine(numbers, names, slopes, uses, name, lines, title))
    labels = ["forward", *(name for name in reversed(MACHINE) if numbers[name].parents)]
    return slides("Step", [frame.drawing() for frame in frames], labels)


def _parents(number: Value, names: Mapping[int, str]) -> list[str]:
    return [names[id(parent)] for parent in number.parents]


def _machine(
    numbers: Mapping[str, Value], names: Mapping[int, str], slopes: Mapping[str, float],
    uses: Mapping[str, int], now: str, lines: Sequence[str], title: str,
) -> Canvas:  # fmt: skip
    """The machine with the slopes that are known, at the moment when ``now`` has passed its own."""
    known = ", ".join(f"{name} {_short(slopes[name])}" for name in MACHINE if name in slopes)
    says = [title, "; ".join(lines), f"Slopes: {known or 'none yet'}"]
    canvas = Canvas(WIDTH, 430, ". ".join(filter(None, says)))
    canvas.title(8, title, size=12)
    for name, number in numbers.items():
        for parent, local in zip(number.parents, number.slopes, strict=True):
            _edge(canvas, names[id(parent)], name, f"× {_short(local)}", name == now)
    for name, (formula, x, y, wide) in MACHINE.items():
        given = now and name in _parents(numbers[now], names)
        colour, tint = (BLUE, 0.4) if name == now else (ORANGE, 0.35) if given else ("none", 0.0)
        left, top = x - wide / 2, y - HIGH / 2
        canvas.box(left, top, wide, HIGH, colour, tint)
        canvas.text(left + 7, top + 13, name + formula, 11, "start", bold=not formula)
        canvas.text(left + 7, top + 30, _short(numbers[name].data), 12, "start", bold=True)
        if name in slopes:
            kind = "so far" if uses[name] else "slope"
            canvas.text(left + wide - 7, top + 30, f"{kind} {_short(slopes[name])}", 11, "end")
    for k, line in enumerate(lines or FORWARD):
        canvas.text(2, 402 + 18 * k, line, 12 if lines else 11, "start", bold=bool(lines))
    return canvas


def _edge(canvas: Canvas, start: str, end: str, label: str, back: bool) -> None:
    """The arrow from a parent to its child, or back, with the slope that the child remembers."""
    (_, x1, y1, _), (_, x2, y2, _) = MACHINE[start], MACHINE[end]
    y1, y2 = y1 + HIGH / 2, y2 - HIGH / 2
    if (start, end) == ("product", "result"):  # past the two numbers between
        x1 = x2 = 66
    else:
        x1, x2 = x1 + (x2 - x1) * 0.25, x2 - (x2 - x1) * 0.35
    ends = (x2, y2, x1, y1) if back else (x1, y1, x2, y2)
    canvas.line(*ends, 3 if back else 1.2, ORANGE if back else INK, 1.0 if back else 0.5, True)
    right = x1 >= x2 and (start, end) != ("product", "result")
    middle = (x1 + x2) / 2
    canvas.text(
        middle + (9 if right else -9), (y1 + y2) / 2, label, 11, "start" if right else "end"
    )


def _short(number: float) -> str:
    return minus(f"{number:.4g}")


@dataclass
class Plot:
    """A part of a canvas where x and y are numbers of data, in the ranges (low, high)."""

    canvas: Canvas
    left: float
    top: float
    wide: float
    high: float
    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is on the canvas."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + self.wide * across, self.top + self.high * (1 - up)

    def axes(
        self, xticks: Sequence[float], yticks: Sequence[float], xlabel: str, ylabel: str
    ) -> None:
        """A line below and one at the left, with some of their numbers, and a name for each."""
        low = self.top + self.high
        self.canvas.line(self.left, low, self.left + self.wide, low, 1, opacity=0.6)
        self.canvas.line(self.left, self.top, self.left, low, 1, opacity=0.6)
        for tick in xticks:
            x, _ = self.place(tick, 0)
            self.canvas.line(x, low, x, low + 4, 1, opacity=0.6)
            self.canvas.note(x, low + 12, minus(f"{tick:g}"), "middle")
        for tick in yticks:
            _, y = self.place(0, tick)
            self.canvas.line(self.left - 4, y, self.left, y, 1, opacity=0.6)
            self.canvas.note(self.left - 7, y, minus(f"{tick:g}"), "end")
        self.canvas.note(self.left + self.wide, low + 28, xlabel, "end")
        self.canvas.note(0, self.top - 12, ylabel)

    def curve(
        self, xs: Sequence[float], ys: Sequence[float], colour: str = INK, width: float = 2.2,
        opacity: float = 1.0,
    ) -> None:  # fmt: skip
        """A curve through points, where it is inside."""
        pieces: list[list[str]] = [[]]
        for x, y in zip(xs, ys, strict=True):
            if self.y[0] <= y <= self.y[1]:
                pieces[-1].append(",".join(f"{at:.1f}" for at in self.place(x, y)))
            elif pieces[-1]:
                pieces.append([])
        for piece in filter(None, pieces):
            self.canvas.marks.append(
                f'<polyline points="{" ".join(piece)}" fill="none" stroke="{colour}" '
                f'stroke-width="{width:g}" stroke-opacity="{opacity:g}"/>'
            )

    def dots(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        """A dot for each point."""
        for x, y in zip(xs, ys, strict=True):
            self.canvas.circle(*self.place(x, y), 3.5, INK, 0.85)


def squared_error(x: Sequence[float], y: Sequence[float], start: float, a: float) -> float:
    """The mean squared error of the line ``start`` + a x for the points (x, y)."""
    return sum((start + a * p - q) ** 2 for p, q in zip(x, y, strict=True)) / len(x)


def descent(
    x: Sequence[float], y: Sequence[float], start: float, lr: float, steps: int
) -> list[float]:
    """The slope a of the line ``start`` + a x before each step of gradient descent, from 0 on,
    and after the last."""
    path = [0.0]
    for _ in range(steps):
        a = path[-1]
        slope = sum(2 * p * (start + a * p - q) for p, q in zip(x, y, strict=True)) / len(x)
        path.append(a - lr * slope)
    return path


def descending_line(
    x: Sequence[float], y: Sequence[float], start: float, lr: float, shown: Sequence[int]
) -> Drawing:
    """The line ``start`` + a x among the points (x, y), of hours and percent, after each number of
    steps of gradient descent in ``shown``; below it a ball on the loss as a function of a."""
    path = descent(x, y, start, lr, max(shown))
    best = sum(p * (q - start) for p, q in zip(x, y, strict=True)) / sum(p * p for p in x)
    valley = [best + abs(best) * (k / 25 - 1) * 1.12 for k in range(51)]
    heights = [squared_error(x, y, start, a) for a in valley]
    floor = int(min(y) // 10) * 10
    percents = range(floor, 101, 20 if floor < 80 else 10)
    ticks = range(int(valley[0] / 2) * 2, int(valley[-1]) + 1, 2)

    def frames() -> Iterator[Drawing]:
        for step in shown:
            a = path[step]
            loss = squared_error(x, y, start, a)
            words = f"a = {minus(f'{a:.2f}')}, loss {loss:.1f}"
            steps = f"{step} step{'s' * (step != 1)}"
            canvas = Canvas(WIDTH, 384, f"after {steps} {words}")
            canvas.title(8, steps, words)
            above = Plot(canvas, 40, 42, WIDTH - 50, 130, (-0.2, max(x) + 0.2), (floor - 4, 105))
            above.axes(x, percents, "hours since seven o'clock", "percent left")
            for hour, percent in zip(x, y, strict=True):
                guess = above.place(hour, start + a * hour)
                canvas.line(*guess, *above.place(hour, percent), 3, ORANGE, 0.7)
            ends = -0.2, max(x) + 0.2
            above.curve(ends, [min(start + a * end, 105) for end in ends], BLUE)
            above.dots(x, y)
            below = Plot(
                canvas, 40, 234, WIDTH - 50, 112, (valley[0], valley[-1]), (0, 1.05 * max(heights))
            )
            below.axes(ticks, (0, 200, 400), "a, percent an hour", "loss")
            below.curve(valley, heights, INK, 1.4, 0.7)
            for earlier in path[:step]:
                place = below.place(earlier, squared_error(x, y, start, earlier))
                canvas.circle(*place, 3, BLUE, 0.15, BLUE)
            canvas.circle(*below.place(a, loss), 6.5, BLUE, 1.0, BLUE)
            yield canvas.drawing()

    return slides("Steps", [*frames()], [str(step) for step in shown])


def learned_curves(
    x: Sequence[float], y: Sequence[float], grid: Sequence[float],
    curves: Mapping[str, tuple[Sequence[float], str]],
) -> Drawing:  # fmt: skip
    """What a network says after different numbers of steps: a frame for each, with the points
    (x, y) of o'clock and percent, its guesses along the ``grid``, and a few words on them."""

    def frames() -> Iterator[Drawing]:
        for steps, (guesses, words) in curves.items():
            canvas = Canvas(WIDTH, 236, f"after {steps} steps {words}")
            canvas.title(8, f"{steps} steps", words)
            plot = Plot(canvas, 40, 42, WIDTH - 54, 156, (grid[0], grid[-1]), (-10, 112))
            plot.axes(range(7, int(grid[-1]) + 1, 3), (0, 50, 100), "o'clock", "percent left")
            plot.curve(grid, guesses, BLUE)
            plot.dots(x, y)
            yield canvas.drawing()

    return slides("Steps", [*frames()], [*curves])
