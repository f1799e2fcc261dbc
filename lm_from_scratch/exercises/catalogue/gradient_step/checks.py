"""A step of gradient descent: what comes after what, and which numbers move."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import decimals, integer
from lm_from_scratch.training.autograd import Value

Numbers = dict[str, float]


class Loss:
    """A formula of numbers by name. Called, it gives the loss as a ``Value``."""

    def __init__(self, formula: str, numbers: Numbers) -> None:
        self.formula, self.calls = formula, 0
        self.values = {name: Value(number) for name, number in numbers.items()}

    def __call__(self) -> Value:
        self.calls += 1
        return eval(self.formula, {}, self.values)


def reference(parameters: list[Value], loss_of: Callable[[], Value], lr: float) -> float:
    """The slopes by torch, in float64."""
    assert isinstance(loss_of, Loss)
    loss_of.calls += 1
    tensors = {
        name: torch.tensor(value.data, dtype=torch.float64, requires_grad=value in parameters)
        for name, value in loss_of.values.items()
    }
    loss = eval(loss_of.formula, {}, tensors)
    loss.backward()
    for name, value in loss_of.values.items():
        if (slope := tensors[name].grad) is not None:
            value.data -= lr * slope.item()
    return float(loss.detach())


# -------------------------------------------------------------------------------- how it is used


def taken(
    function: Callable[..., Any],
    formula: str,
    numbers: Numbers,
    parameters: str,
    lr: float,
    before: float = 0.0,
    steps: int = 1,
) -> dict[str, Any]:
    """One step or several. ``parameters`` are names, ``before`` is in all ``grad`` at first."""
    loss = Loss(formula, numbers)
    listed = [loss.values[name] for name in parameters]
    given, results = list(listed), dict[str, Any]()
    for value in loss.values.values():
        value.grad = before
    for n in range(1, steps + 1):
        result = function(listed, loss, lr)
        if result is None:
            raise TypeError("the result is None: is there a return statement?")
        if isinstance(result, Value):
            raise TypeError("the result is a Value; it must be a plain number")
        results[f"the result of step {n}"] = result
    after = f"after step {steps}"
    for name in parameters:
        results[f"{name} {after}"] = loss.values[name].data
    for name in numbers.keys() - {*parameters}:
        results[f"{name}, which is no parameter, {after}"] = loss.values[name].data
    same = len(listed) == len(given) and all(a is b for a, b in zip(listed, given, strict=True))
    return results | {
        "the list of parameters": "holds the same Values" if same else "holds others",
        f"calls of loss_of in {steps} {'step' if steps == 1 else 'steps'}": loss.calls,
    }


# ------------------------------------------------------------------------------------- arguments


def given(g: Generator, formula: str, names: str, parameters: str = "", **options: Any) -> Call:
    """Different numbers from -1.4 to 1.4 with one digit after the point, none of them near 0."""
    return call(
        formula=formula,
        numbers=decimals(g, names),
        parameters=parameters or names,
        **{"lr": integer(g, 2, 9) / 100} | options,
    )


def one(g: Generator) -> Call:
    return given(g, "(a - 3) ** 2", "a")


def two(g: Generator) -> Call:
    return given(g, "(a * b - 2) ** 2 + (a + 1) ** 2", "ab")


def old_slopes(g: Generator) -> Call:
    return given(g, "(a * b - 2) ** 2", "ab", before=integer(g, 2, 9) / 2)


def unused(g: Generator) -> Call:
    return given(g, "(a - 2) ** 2", "ab", before=integer(g, 2, 9) / 2)


def no_parameter(g: Generator) -> Call:
    return given(g, "(a * c - b) ** 2", "abc", parameters="ab")


def ten(g: Generator) -> Call:
    return given(g, "(a - 2) ** 2 + (a * b + 1) ** 2", "ab", steps=10)


def network(g: Generator) -> Call:
    """A network of two units, on three points."""
    errors = (f"(v * ({x} * w + b).tanh() + u * ({x} * w - b).tanh() - {y}) ** 2" for x, y in
              ((-1, 0.5), (0.5, -0.5), (2, 1.5)))  # fmt: skip
    return given(g, f"({' + '.join(errors)}) * (1 / 3)", "wbvu", steps=3)


# ------------------------------------------------------------------------------- wrong answers

ONE, TWO, OLD = "one parameter", "two parameters", "slopes from before"
UNUSED, OTHER = "a parameter that the loss does not depend on", "a number that is no parameter"
TEN, NETWORK = "ten steps", "a small network"

LOSS, RETURN = "loss = loss_of()\n", "return loss.data"
ZERO = "    for p in parameters:\n        p.grad = 0.0\n"
BACK = "    loss.backward()\n"
MOVE = "    for p in parameters:\n        p.data -= lr * p.grad\n"
STEP = "p.data -= lr * p.grad"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the slopes are not set to 0: those from before count as well", {ZERO: ""}, OLD),
    ("the slopes are set to 0 after the move alone: the first step has those from before",
     {ZERO: "", MOVE: MOVE + ZERO}, OLD),
    ("moved before `backward`, by the slopes of the step before",
     {ZERO + BACK: "", MOVE: MOVE + ZERO + BACK}, ONE),
    ("the slopes are set to 0 after `backward`: nothing moves",
     {ZERO + BACK: BACK + ZERO}, ONE),
    ("uphill: the slope is added", {STEP: "p.data += lr * p.grad"}, ONE),
    ("the learning rate counts twice", {STEP: "p.data -= lr * lr * p.grad"}, ONE),
    ("the learning rate is left out", {STEP: "p.data -= p.grad"}, ONE),
    ("the learning rate is always 0.1", {STEP: "p.data -= 0.1 * p.grad"}, ONE),
    ("new Values in the list: the loss goes on with the old ones",
     {MOVE: "    for i, p in enumerate(parameters):\n"
      "        parameters[i] = Value(p.data - lr * p.grad)\n"}, ONE),
    ("new Values under a name of the loop, which nobody sees", {STEP: "p = Value(p.data - lr * "
      "p.grad)"}, ONE, "nothing moves, as where the slopes are 0"),
    ("the loss after the move", {RETURN: "return loss_of().data"}, ONE),
    ("the loss is computed twice", {BACK: "    loss_of().backward()\n"}, ONE),
    ("`backward` is called twice: twice the slope", {BACK: BACK + BACK}, ONE),
    ("the result is a Value", {RETURN: "return loss"}, ONE),
    ("the new number is the step alone: the old one is lost",
     {STEP: "p.data = -lr * p.grad"}, ONE),
    ("only the direction of a slope counts, not its size",
     {STEP: "p.data -= lr * ((p.grad > 0) - (p.grad < 0))"}, ONE),
    ("a slope is cut off at 1",
     {STEP: "p.data -= lr * max(-1.0, min(1.0, p.grad))"}, ONE),
    ("moved by the loss, not by its slope", {STEP: "p.data -= lr * loss.data"}, ONE),
    ("multiplied, not moved", {STEP: "p.data *= 1 - lr * p.grad"}, ONE),
    ("one parameter after the other, each with a loss of its own",
     {LOSS: "before = loss_of().data\n", ZERO + BACK: "",
      MOVE: "    for p in parameters:\n        loss = loss_of()\n        p.grad = 0.0\n"
      "        loss.backward()\n        p.data -= lr * p.grad\n", RETURN: "return before"}, TWO),
    ("divided by the number of parameters", {STEP: "p.data -= lr * p.grad / len(parameters)"},
     TWO),
    ("only the first parameter moves", {MOVE: MOVE.replace("parameters:", "parameters[:1]:")},
     TWO),
    ("the last parameter does not move",
     {MOVE: MOVE.replace("parameters:", "parameters[:-1] or parameters:")}, TWO),
    ("all move by the same slope: that of the last one",
     {MOVE: "    slope = [p.grad for p in parameters][-1]\n" + MOVE.replace("p.grad", "slope")},
     TWO),
    ("every number that the loss depends on moves",
     {MOVE: "    from lm_from_scratch.training.autograd import topological_order\n\n"
      "    for p in topological_order(loss):\n        if not p.parents:\n"
      "            p.data -= lr * p.grad\n"}, OTHER),
    ("a parameter whose slope is not found anew moves by its old one",
     {ZERO: "    from lm_from_scratch.training.autograd import topological_order\n\n"
      "    for p in topological_order(loss):\n        p.grad = 0.0\n"}, UNUSED),
    ("the parameters are set to 0, not their slopes",
     {ZERO: ZERO.replace("p.grad", "p.data")}, ONE),
]  # fmt: skip

CASES = (
    Case(ONE, one, "compute (a - 3) ** 2 and its slope by hand, and then the step", points=2,
         use=taken, teaching="small enough to compute by hand"),
    Case(TWO, two, "both slopes belong to the same place: where the step begins", points=2,
         use=taken, teaching="the slope of one depends on where the other is"),
    Case(OLD, old_slopes, "`backward` adds to what is in `grad`: what must be there before it?",
         points=2, use=taken, teaching="the smallest case with an old slope"),
    Case(UNUSED, unused, "`backward` does not reach b: what is in its `grad` is an old slope",
         use=taken),
    Case(OTHER, no_parameter, "c has a slope, but only what is in the list is learned", use=taken),
    Case(TEN, ten, "each step begins where the last one ended", points=2, use=taken,
         teaching="the loop of the page"),
    Case(NETWORK, network, "a network of two units learns by the same step", use=taken,
         teaching="what it is for"),
)  # fmt: skip

EXERCISE = Exercise(
    name="gradient_step", function="gradient_step", page="0_from_zero/2_line_and_bend",
    minutes=15, difficulty=1,
    outcome="Write a step of gradient descent whose parts come in the right order.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Which three lines does a step need at least? Write them down in the order in which they "
        "must come, then think of what `grad` may hold at the beginning.",
        "`backward` adds. So which line stands before it, and for whom?",
        "`p = ...` gives a name to something new, and `p.data = ...` changes the number itself. "
        "Which of the two does `loss_of` see?",
    ),
)  # fmt: skip
