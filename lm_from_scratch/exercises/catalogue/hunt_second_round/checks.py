"""Bug hunt: slopes that add up over the points of a round, and then over the rounds."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import decimals, integer
from lm_from_scratch.training.autograd import Value

Point = tuple[float, float]
Numbers = dict[str, float]


class Loss:
    """A formula of parameters by name and of a point, x and y. Called with a point, it gives its
    loss as a ``Value``."""

    def __init__(self, formula: str, numbers: Numbers) -> None:
        self.formula, self.calls = formula, 0
        self.values = {name: Value(number) for name, number in numbers.items()}

    def __call__(self, point: Point) -> Value:
        self.calls += 1
        return self.at(point, self.values)

    def at(self, point: Point, values: dict[str, Any]) -> Any:
        return eval(self.formula, {}, values | {"x": point[0], "y": point[1]})


def reference(
    parameters: list[Value],
    points: list[Point],
    loss_of: Callable[[Point], Value],
    lr: float,
    rounds: int,
) -> list[float]:
    """Slopes of the mean loss by torch, in float64."""
    assert isinstance(loss_of, Loss)
    loss_of.calls += rounds * len(points)
    tensors = {
        name: torch.tensor(value.data, dtype=torch.float64, requires_grad=True)
        for name, value in loss_of.values.items()
    }
    losses = []
    for _ in range(rounds):
        loss = torch.stack([loss_of.at(point, tensors) for point in points]).mean()
        slopes = torch.autograd.grad(loss, list(tensors.values()))
        for x, slope in zip(tensors.values(), slopes, strict=True):
            x.data -= lr * slope
        losses.append(float(loss.detach()))
    for name, value in loss_of.values.items():
        value.data = tensors[name].item()
    return losses


# -------------------------------------------------------------------------------- how it is used


def trained(
    function: Callable[..., Any],
    formula: str,
    numbers: Numbers,
    points: list[Point],
    lr: float,
    rounds: int,
    before: float = 0.0,
) -> dict[str, Any]:
    """The losses, and what has become of the parameters. ``before`` is in all ``grad`` at first."""
    loss = Loss(formula, numbers)
    listed = list(loss.values.values())
    given = list(listed)
    for value in listed:
        value.grad = before
    losses = function(listed, points, loss, lr, rounds)
    if losses is None:
        raise TypeError("the result is None: is there a return statement?")
    if not isinstance(losses, list) or any(isinstance(value, Value) for value in losses):
        kind = "it holds Values" if isinstance(losses, list) else f"it is a {type(losses).__name__}"
        raise TypeError(f"the result must be a list of plain numbers; {kind}")
    same = len(listed) == len(given) and all(a is b for a, b in zip(listed, given, strict=True))
    after = f"after {rounds} {'round' if rounds == 1 else 'rounds'}"
    return {
        "how many losses": len(losses),
        **{f"the loss of round {n}": loss for n, loss in enumerate(losses, start=1)},
        **{f"{name} {after}": value.data for name, value in loss.values.items()},
        "the list of parameters": "holds the same Values" if same else "holds others",
        "calls of loss_of": loss.calls,
    }


# ------------------------------------------------------------------------------------- arguments

LINE, BENT = "(a * x + b - y) ** 2", "(v * (w * x + b).tanh() - y) ** 2"


def given(g: Generator, formula: str, names: str, n: int, rounds: int, **options: Any) -> Call:
    """Parameters and points with one digit after the point, the parameters not near 0."""
    numbers = decimals(g, names)
    xs = [(i - (n - 1) / 2) / 2 + integer(g, 0, 3) / 10 for i in reversed(range(n))]
    return call(
        formula=formula,
        numbers=numbers,
        points=[(round(x, 2), integer(g, -20, 21) / 10) for x in xs],
        lr=integer(g, 2, 9) / 50,
        rounds=rounds,
        **options,
    )


def one_round(g: Generator) -> Call:
    return given(g, LINE, "ab", 3, 1)


def two_rounds(g: Generator) -> Call:
    return given(g, LINE, "ab", 3, 2)


def three_rounds(g: Generator) -> Call:
    return given(g, BENT, "wbv", 4, 3)


def one_point(g: Generator) -> Call:
    return given(g, LINE, "ab", 1, 3)


def old_slopes(g: Generator) -> Call:
    return given(g, LINE, "ab", 2, 1, before=integer(g, 2, 9) / 2)


def all_of_it(g: Generator) -> Call:
    return given(g, BENT, "wbv", 5, 12)


# ------------------------------------------------------------------------------- wrong answers

ONE, TWO, THREE, POINT = "one round", "two rounds", "three rounds of a bent line", \
    "one point"  # fmt: skip
OLD, ALL = "slopes from before", "twelve rounds"

START = "losses = []\n"
ZERO = "        for p in parameters:\n            p.grad = 0.0  # a round begins with no slopes\n"
TOTAL, EACH = "        total = 0.0\n", "            loss = loss_of(point)\n"
BACK = "            loss.backward()  # its slopes are added to those of the others\n"
NOTED = "losses.append(total / len(points))"
MOVE = "        for p in parameters:\n            p.data -= lr * p.grad / len(points)\n"
INNER = ZERO.replace("    for", "        for").replace("    p.", "        p.")
OUTER = "    for p in parameters:\n        p.grad = 0.0\n"
ROUND = "    for _ in range(rounds):\n"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found",
     {START: "return train_rounds_as_found(parameters, points, loss_of, lr, rounds)\n"}, TWO),
    ("the slopes are set to 0 before each point: the last point alone counts",
     {ZERO: "", EACH: INNER + EACH}, ONE),
    ("the slopes are set to 0 before the move: nothing moves", {ZERO: "", MOVE: ZERO + MOVE}, ONE),
    ("the slopes are set to 0 once, before the first round", {ZERO: "", ROUND: OUTER + ROUND}, TWO),
    ("the slopes are set to 0 after the move alone: the first round has those from before",
     {ZERO: "", MOVE: MOVE + ZERO}, OLD),
    ("only the first parameter is set back",
     {ZERO: ZERO.replace("in parameters", "in parameters[:1]")}, TWO),
    ("the slopes are set back in every second round", {ZERO: ZERO.replace(
        "for p in parameters", "for p in parameters if len(losses) % 2 == 0 else []")}, TWO),
    ("the parameters are set to 0, not their slopes", {ZERO: ZERO.replace("p.grad", "p.data")},
     ONE),
    ("half of the old slopes stays", {ZERO: ZERO.replace("= 0.0", "*= 0.5")}, TWO),
    ("the mean of the slopes of all rounds so far",
     {ZERO: "", MOVE: MOVE.replace("len(points)", "len(points) / len(losses)")}, TWO),
    ("the learning rate is halved after each round",
     {ZERO: "", MOVE: MOVE.replace("lr *", "lr / 2 ** (len(losses) - 1) *")}, TWO),
    ("a parameter moves after each point, not after all",
     {BACK: f"{INNER}{BACK}{INNER.replace('p.grad = 0.0', 'p.data -= lr * p.grad / len(points)')}",
      MOVE: ""}, ONE),
    ("the sum over the points, not their mean", {MOVE: MOVE.replace(" / len(points)", "")}, ONE),
    ("uphill: the slope is added", {MOVE: MOVE.replace("-=", "+=")}, ONE),
    ("new Values, whose slope is 0: the loss goes on with the old ones",
     {ZERO: "        parameters = [Value(p.data) for p in parameters]\n"}, ONE,
     "nothing moves, as where the slopes are 0"),
    ("new Values in the list: the loss goes on with the old ones",
     {ZERO: "        parameters[:] = [Value(p.data) for p in parameters]\n"}, ONE),
    ("the losses are sums, not means", {NOTED: "losses.append(total)"}, ONE),
    ("the losses of the last point", {NOTED: "losses.append(loss.data)"}, ONE),
    ("the loss after the move",
     {NOTED: "pass", MOVE: f"{MOVE}        losses.append(sum(loss_of(point).data for point in "
      "points) / len(points))\n"}, ONE),
    ("the mean loss of all rounds so far", {TOTAL: "        total = 0.0 if not losses else "
      "sum(losses) * len(points)\n", NOTED: "losses.append(total / len(points) / (len(losses) + "
      "1))"}, TWO),
    ("only the last loss", {"return losses": "return losses[-1:]"}, TWO),
    ("the losses are Values", {"total += loss.data": "total = total + loss"}, ONE),
    ("each loss is computed twice", {BACK: "            loss_of(point).backward()\n"}, ONE),
    ("the points are sorted in the caller's list", {START: f"points.sort()\n    {START}"}, ONE),
]  # fmt: skip

CASES = (
    Case(ONE, one_round, "what was right stays right: one round, on all points", use=trained,
         guard=True, teaching="where the code as found is right"),
    Case(TWO, two_rounds, "the second round begins with no slopes, as the first one did", points=3,
         use=trained, teaching="the symptom"),
    Case(POINT, one_point, "a single point, round after round: follow `grad` of a by hand",
         points=2, use=trained, teaching="small enough to compute by hand"),
    Case(THREE, three_rounds, "in a round the slopes of all points count, each once", points=2,
         use=trained, teaching="three parameters, which all have to be set back"),
    Case(OLD, old_slopes, "the first round begins with no slopes, whatever is in `grad`", points=2,
         use=trained),
    Case(ALL, all_of_it, "all of it, for twelve rounds", use=trained,
         teaching="as a run goes"),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_second_round", function="train_rounds", page="0_from_zero/2_line_and_bend",
    minutes=15, difficulty=1, after=("gradient_step",),
    outcome="Tell slopes that should add up from slopes that should not, and put the line that "
            "sets them back where it belongs.",
    reference=reference, hunt="a lecture on backpropagation: Karpathy, 2022", cases=CASES,
    wrong=planted(WRONG),
    hints=(
        "Print `parameters[0].grad` at the beginning of each round. What should it be there, and "
        "what is it?",
        "`loss.grad` is the slope of one loss with respect to itself. Whose slopes move the "
        "parameters?",
        "The slopes of the points of *one* round must add up. So the line must not stand in the "
        "loop over the points, and it must come before the first of them is passed back.",
    ),
)  # fmt: skip
