"""The right and the given result beside each other, in shades: for answers that no model shows."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.exercises.compare import compare, describe
from lm_from_scratch.exercises.exercise import Exercise
from lm_from_scratch.exercises.run import tried, wanted

SHADES = " ░▒▓█"
ROWS, COLUMNS = 8, 24  # of a result that are drawn


def show(exercise: Exercise, function: Callable[..., Any]) -> tuple[int, int]:
    """Print the result of the first check in which an answer is wrong, beside the right one; where
    all hold, that of the first. Returns how many checks hold, and of how many."""
    numbers = range(len(exercise.cases))
    wants = [wanted(exercise, number, 0) for number in numbers]  # before any code of yours
    gots = [tried(exercise, number, function, wants[number], 0) for number in numbers]
    wrong = [number for number in numbers if gots[number].wrong]
    first = wrong[0] if wrong else 0
    want, got = wants[first], gots[first]
    if got.again and want.again and got.wrong:  # it was right once
        want, got = want.again, got.again
    print(f"{exercise.name}: no model shows it. Check {first + 1}, {exercise.cases[first].name}")
    if fault := gots[first].wrong:
        print(fault.text)
    if not fault or got.value is not None:
        pairs = [*parts(want.value, got.value), *parts(want.gradients, got.gradients, "gradient")]
        near = exercise.cases[first].tolerance
        unlike = (pair for pair in pairs if compare(pair[2], pair[1], near))
        print("\n".join(beside(*next(unlike, pairs[0]))))
    held = len(numbers) - len(wrong)
    print(f"{held} of {len(numbers)} checks hold")
    return held, len(numbers)


def parts(right: Any, given: Any, name: str = "result") -> Iterator[tuple[str, Any, Any]]:
    """What two results are made of, in pairs, with a name for each."""
    if isinstance(right, dict) and isinstance(given, dict) and right.keys() == given.keys():
        for key in right:
            yield from parts(right[key], given[key], f"{name} {key}")
    elif (
        all(isinstance(one, (list, tuple)) for one in (right, given))
        and len(right) == len(given)
        and any(isinstance(one, Tensor) for one in right)
    ):
        for number, pair in enumerate(zip(right, given, strict=True)):
            yield from parts(*pair, f"{name} [{number}]")
    else:
        yield name, right, given


def beside(name: str, right: Any, given: Any) -> list[str]:
    """The lines of a picture of two results, or what they are in words."""
    kinds = [(x.shape, x.dtype, x.layout, x.device) for x in (right, given) if torch.is_tensor(x)]
    if len(kinds) < 2 or kinds[0] != kinds[1] or right.numel() < 2 or right.is_complex():
        return [f"{name}, right: {describe(right)}", f"{name}, given: {describe(given)}"]
    x, y = (value.detach().double().reshape(-1, value.shape[-1]) for value in (right, given))
    unlike = ~torch.isclose(x, y, rtol=1e-4, atol=1e-7, equal_nan=True)
    row, column = unlike.nonzero()[0].tolist() if unlike.any() else (0, 0)
    top, left = max(0, row - 2), max(0, column - 4)
    x, y = (value[top : top + ROWS, left : left + COLUMNS] for value in (x, y))
    finite = x[x.isfinite()]
    low, high = (finite.min().item(), finite.max().item()) if len(finite) else (0.0, 1.0)
    width = max(x.shape[1], 5)
    fields = shades(x, low, high), shades(y, low, high), unlike[top : top + ROWS]
    rows = zip(*fields, strict=True)
    lines = [f"{'right':{width}}   {'given':{width}}"]
    lines += [f"{a:{width}}   {b:{width}}{'   unlike' * bool(u.any())}" for a, b, u in rows]
    place = f"rows {top} to {top + len(x) - 1}, columns {left} to {left + x.shape[1] - 1}"
    scale = f"from {low:.3g} to {high:.3g} ({SHADES[-1]})"
    return [f"{name} {describe(right)}, {place}; {scale}", *lines]


def shades(x: Tensor, low: float, high: float) -> list[str]:
    """A character for each number of ``x`` (rows, columns); ``?`` for NaN, ``∞`` for infinity."""
    share = ((x - low) / (high - low or 1.0)).clamp(0, 1).nan_to_num(0)
    levels = (share * (len(SHADES) - 1)).round().long()
    names = zip(levels.tolist(), x.isnan().tolist(), x.isinf().tolist(), strict=True)
    return [
        "".join("?" if n else "∞" if i else SHADES[level] for level, n, i in zip(*row, strict=True))
        for row in names
    ]
