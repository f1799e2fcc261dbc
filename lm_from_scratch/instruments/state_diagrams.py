"""Drawings of a memory of fixed size: a matrix that is read, corrected and written."""

from torch import Tensor

from lm_from_scratch.instruments.canvas import BLUE, INK, ORANGE, Canvas, Drawing

CELL = 27


def correction(
    state: Tensor, key: Tensor, value: Tensor, names: tuple[str, str] = ("key", "value")
) -> Drawing:
    """One step of the delta rule: the ``state`` (Dk, Dv) is read with the ``key`` (Dk,), what it
    says is compared with the ``value`` (Dv,), and the difference is written. Blue is positive,
    orange negative. Up to five features fit."""
    said = key @ state
    error = value - said
    new = state + key[:, None] * error
    rows, columns = state.shape
    tall = rows * CELL
    canvas = Canvas(343, 2 * tall + 5 * CELL + 118, "")
    x, y = 100, 26
    canvas.text(4, y - 14, "1. Read: what does the memory say for the key?", 12, "start", bold=True)
    _cells(canvas, 56, y, key[:, None])
    canvas.text(50, y + tall / 2, names[0], 12, "end")
    _cells(canvas, x, y, state)
    canvas.text(x + columns * CELL + 8, y + tall / 2, "memory", 12, "start")
    y += tall + 8
    _cells(canvas, x, y, said[None])
    canvas.text(x - 8, y + CELL / 2, "it says", 12, "end")
    y += CELL + 26
    canvas.text(4, y - 10, "2. Correct: what should it have said besides?", 12, "start", bold=True)
    for name, vector in ((names[1], value), ("− it says", said), ("correction", error)):
        _cells(canvas, x, y, vector[None])
        canvas.text(x - 8, y + CELL / 2, name, 12, "end", bold=name == "correction")
        y += CELL + 2
    y += 24
    canvas.text(4, y - 10, "3. Write: key times correction is added", 12, "start", bold=True)
    _cells(canvas, 56, y, key[:, None])
    _cells(canvas, x, y, new)
    canvas.text(x + columns * CELL + 8, y + tall / 2, "new memory", 12, "start")
    after = key @ new
    canvas.says = (
        f"A memory of {rows} by {columns} numbers says {_said(said)} for {names[0]}; {names[1]} is "
        f"{_said(value)}; the difference is written, and it says {_said(after)}"
    )
    return canvas.drawing()


def _cells(canvas: Canvas, x: float, y: float, numbers: Tensor) -> None:
    """A table of numbers, tinted by their size."""
    for r, row in enumerate(numbers.tolist()):
        for c, number in enumerate(row):
            left, top = x + c * CELL, y + r * CELL
            colour = BLUE if number >= 0 else ORANGE
            canvas.box(left, top, CELL - 2, CELL - 2, colour, min(1.0, 0.6 * abs(number)))
            text = f"{number:.1f}".replace("-0.0", "0.0").replace("-", "−")
            canvas.text(left + CELL / 2 - 1, top + CELL / 2 - 1, text, 11, colour=INK)


def _said(vector: Tensor) -> str:
    return ", ".join(f"{number:.1f}".replace("-0.0", "0.0") for number in vector.tolist())
