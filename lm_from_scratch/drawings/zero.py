"""Drawings of chapter 0: slopes on their way back through a small machine."""

from collections.abc import Mapping, Sequence

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing, slides
from lm_from_scratch.drawings.colours import BLUE, INK, ORANGE
from lm_from_scratch.drawings.labels import minus
from lm_from_scratch.training.autograd import Value

#: The machine of the lesson, parents first: how each number is made, the middle of its box and how
#: wide the box is.
MACHINE = {
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
