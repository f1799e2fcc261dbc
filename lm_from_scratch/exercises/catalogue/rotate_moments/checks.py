"""GaLore at a new basis: the first moment is turned, the second by the squares of the turn."""

from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.optim.galore_basis import rotate_moments

Pair = tuple[Tensor, Tensor]


def basis(g: Generator, size: int, rank: int) -> Tensor:
    """Orthonormal columns."""
    return torch.linalg.qr(torch.randn(size, rank, generator=g, dtype=torch.float64)).Q


def moments(g: Generator, rows: int, columns: int, noise: float = 1.0) -> Pair:
    """Moments that fit together: the mean square is above the squared mean, by a variance of each
    coordinate's own size."""
    mean = torch.randn(rows, columns, generator=g, dtype=torch.float64)
    variance = noise * torch.rand(rows, columns, generator=g, dtype=torch.float64) ** 2
    return mean, mean.square() + variance + 0.01 * noise


def single(value: Any) -> Any:
    """The same numbers in float32."""
    if isinstance(value, Tensor):
        return value.float()
    return tuple(single(part) for part in value) if isinstance(value, tuple) else value


def asked(*args: Any, **kwargs: Any) -> Call:
    return call(*(single(arg) for arg in args), **kwargs)


def both(g: Generator) -> Call:
    old, new = (basis(g, 6, 3), basis(g, 5, 3)), (basis(g, 6, 3), basis(g, 5, 3))
    return call(*moments(g, 3, 3), old, new)


def no_mean(g: Generator) -> Call:
    mean, mean_square = moments(g, 4, 3)
    old, new = basis(g, 3, 3), basis(g, 3, 3)
    return asked(0 * mean, mean_square, (None, old), (None, new))


def fifth_step(g: Generator) -> Call:
    mean, mean_square = moments(g, 4, 3)
    corrections = 1 - 0.9**5, 1 - 0.999**5
    made = mean * corrections[0], mean_square * corrections[1]
    return asked(*made, (None, basis(g, 5, 3)), (None, basis(g, 5, 3)), corrections=corrections)


def below_zero(g: Generator) -> Call:
    mean, mean_square = moments(g, 5, 3)
    shrunk = mean.square() * torch.rand(5, 3, generator=g, dtype=torch.float64)
    first = torch.arange(3) == 0  # this coordinate has a variance, the others a negative one
    mean_square = torch.where(first, mean_square, shrunk)
    return asked(mean, mean_square, (None, basis(g, 6, 3)), (None, basis(g, 6, 3)))


# ------------------------------------------------------------------------------- wrong answers

TURN = "before.mT @ after"
CLAMP = "    variance = torch.clamp(variance, min=0.0)\n"
VARIANCE = "exp_avg_sq / corrections[1] - mean.square()"
RESULT = "project(variance, *squares) + mean.square()"
RETURN = "return mean * corrections[0], mean_square * corrections[1]"
RIGHT, SQUARES = "a right basis", "the second moment of a mean of 0, on the right"
BOTH, CORRECTED, BELOW = "both bases, in float64", "corrected moments, step 5", "a variance below 0"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the moments stay as they are, in the old basis",
     {"turns, squares = [], []": "return exp_avg, exp_avg_sq"}, RIGHT),
    ("the second moment stays as it is, only the first is turned",
     {RETURN: "return mean * corrections[0], exp_avg_sq * 1.0"}, SQUARES),
    ("the moments begin again, from 0", {RETURN: "return 0 * mean, 0 * mean_square"}, SQUARES),
    ("the second moment is turned like the first",
     {RESULT: "project(variance, *turns) + mean.square()"}, SQUARES),
    ("the second moment is turned like the first, mean and all",
     {RETURN: "return mean * corrections[0], project(exp_avg_sq, *turns)"}, RIGHT),
    ("the turn in the other direction, from new to old", {TURN: "after.mT @ before"}, RIGHT),
    ("the second moment as a whole by the squares, its mean not apart",
     {VARIANCE: "exp_avg_sq / corrections[1]", RESULT: "project(variance, *squares)"}, RIGHT),
    ("the mean is added again, but was not taken off",
     {VARIANCE: "exp_avg_sq / corrections[1]"}, RIGHT),
    ("the square of the new mean is not added", {RESULT: "project(variance, *squares)"}, RIGHT),
    ("the square of the old mean is added, not of the new",
     {"mean = project(mean, *turns)": "mean, was = project(mean, *turns), mean",
      RESULT: "project(variance, *squares) + was.square()"}, RIGHT),
    ("sizes of the turn, not squares", {"turn.square()": "turn.abs()"}, SQUARES),
    ("the root of the second moment is turned, then squared",
     {RESULT: "project(variance.sqrt(), *turns).square() + mean.square()"}, SQUARES),
    ("the left basis is left out",
     {"zip(old, new)": "zip((None, old[1]), (None, new[1]))"}, "a left basis"),
    ("with two bases only the left one is turned",
     {"zip(old, new)": "zip((old[0], None if old[0] is not None else old[1]), new)"}, BOTH),
    ("the corrections are not used",
     {"exp_avg / corrections[0]": "exp_avg", "exp_avg_sq / corrections[1]": "exp_avg_sq",
      RETURN: "return mean, mean_square"}, CORRECTED),
    ("the corrected moments are returned", {RETURN: "return mean, mean_square"}, CORRECTED),
    ("the two corrections are exchanged",
     {"mean = exp_avg /": "corrections = corrections[::-1]\n    mean = exp_avg /"}, CORRECTED),
    ("a variance below 0 is taken as it is", {CLAMP: ""}, BELOW),
    ("0 is put in after the turn, not before",
     {CLAMP: "", RESULT: "torch.clamp(project(variance, *squares), min=0) + mean.square()"}, BELOW),
    ("the size of a variance below 0 is used",
     {"torch.clamp(variance, min=0.0)": "torch.abs(variance)"}, BELOW),
    ("float64 is computed in float32",
     {"project(mean, *turns)": "project(mean, *turns).float().to(mean.dtype)",
      RESULT: f"({RESULT}).float().to(variance.dtype)"}, BOTH),
]  # fmt: skip

CASES = (
    Case(SQUARES, no_mean,
         "with a mean of 0 only variances are left: they add up with the squares of the turn",
         points=2, teaching="the squares alone, before the mean comes in"),
    Case(RIGHT, lambda g: asked(*moments(g, 4, 3), (None, basis(g, 5, 3)), (None, basis(g, 5, 3))),
         "a row x of old coordinates stands for x @ Q_old.mT. Its new coordinates are x @ "
         "Q_old.mT @ Q_new. A mean square is a variance plus the square of the new mean", points=2,
         teaching="the whole formula"),
    Case("a left basis",
         lambda g: asked(*moments(g, 3, 5), (basis(g, 4, 3), None), (basis(g, 4, 3), None)),
         "a column x of old coordinates stands for P_old @ x. Its new ones are P_new.mT @ P_old @ "
         "x", points=2, teaching="one left basis, as a wide matrix has it"),
    Case(BOTH, both, "each side has a turn of its own; nothing becomes float32", points=1),
    Case("a new basis of another rank",
         lambda g: asked(*moments(g, 4, 5), (basis(g, 7, 4), None), (basis(g, 7, 2), None)),
         "the turn has as many rows as one basis has columns, and as many columns as the other",
         teaching="shapes that find a turn in the wrong direction by an error"),
    Case(CORRECTED, fifth_step, "divide by the corrections before the formula, multiply after it"),
    Case(BELOW, below_zero, "v - m * m may be negative: make it 0 before it is turned"),
)  # fmt: skip

EXERCISE = Exercise(
    name="rotate_moments", function="rotate_moments", page="7_optimizers/2_galore", minutes=25,
    difficulty=3,
    outcome="Write the change of basis of Adam's moments so that both keep their meaning.",
    after=("galore_project",), reference=rotate_moments, cases=CASES, wrong=planted(WRONG),
    hints=(
        "What matrix do the old coordinates stand for? Write it with the old basis, then take its "
        "coordinates in the new one. Which small matrix remains between the two bases?",
        "`project(mean, left, right)` multiplies by `left.mT` and by `right`. So hand it "
        "`old.mT @ new` of each side, or None. The variance goes the same way, with the squares.",
        "Divide by the corrections first, and multiply by them last. In between: the variance, "
        "nowhere below 0, its turn by squared numbers, and the square of which mean?",
    ),
)  # fmt: skip
