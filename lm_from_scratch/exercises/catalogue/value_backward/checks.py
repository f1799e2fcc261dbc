"""Numbers that remember their parents: the slopes of operations, and how they are passed on."""

from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import decimals

Numbers = dict[str, float]


class Reference:
    """The same numbers and slopes by torch, in float64."""

    def __init__(self, data: float | Tensor) -> None:
        if not isinstance(data, Tensor):
            data = torch.tensor(data, dtype=torch.float64, requires_grad=True)
        self.tensor = data
        self.tensor.retain_grad()

    @property
    def data(self) -> float:
        return self.tensor.item()

    @property
    def grad(self) -> float:
        return 0.0 if self.tensor.grad is None else self.tensor.grad.item()

    def __add__(self, other: "Reference") -> "Reference":
        return Reference(self.tensor + other.tensor)

    def __sub__(self, other: "Reference") -> "Reference":
        return Reference(self.tensor - other.tensor)

    def __mul__(self, other: "Reference") -> "Reference":
        return Reference(self.tensor * other.tensor)

    def tanh(self) -> "Reference":
        return Reference(self.tensor.tanh())

    def backward(self) -> None:
        self.tensor.backward()


# -------------------------------------------------------------------------------- how it is used


def computed(make: Any, program: str, numbers: Numbers) -> dict[str, Any]:
    """All numbers of a program by name, in the order in which they are made."""
    made: dict[str, Any] = {name: make(number) for name, number in numbers.items()}
    for line in program.split("; "):
        exec(line, {}, made)
        name, _, formula = line.partition(" = ")
        if not hasattr(made[name], "data") or not hasattr(made[name], "grad"):
            kind = "None: is there a return statement?" if made[name] is None else made[name]
            raise TypeError(f"{formula} must give a new Value; it gives {kind}")
    return made


def seen(made: dict[str, Any]) -> dict[str, Any]:
    """Numbers first, then slopes from the result back: what is wrong first comes first."""
    numbers = {f"{name}.data": value.data for name, value in made.items()}
    return numbers | {f"{name}.grad": made[name].grad for name in reversed(made)}


def slopes(make: Any, program: str, numbers: Numbers) -> dict[str, Any]:
    """All numbers and slopes after `result.backward()`."""
    made = computed(make, program, numbers)
    made["result"].backward()
    return seen(made)


def two_results(make: Any, program: str, numbers: Numbers) -> dict[str, Any]:
    """The slopes of `first`, then those of `second` on top."""
    made = computed(make, program, numbers)
    made["first"].backward()
    results = {f"{name}.grad after first.backward()": made[name].grad for name in numbers}
    made["second"].backward()
    return results | {f"{name}.grad after both": made[name].grad for name in numbers}


# ------------------------------------------------------------------------------------- arguments


def given(g: Generator, program: str, names: str = "ab") -> Call:
    """Different numbers with one digit after the point, none of them near 0."""
    return call(program=program, numbers=decimals(g, names))


def minus(g: Generator) -> Call:
    return given(g, "result = a - b")


def times(g: Generator) -> Call:
    return given(g, "result = a * b")


def bent(g: Generator) -> Call:
    return given(g, "result = a.tanh()", "a")


def chain(g: Generator) -> Call:
    return given(g, "d = a + b; e = c * d; result = e.tanh()", "abc")


def twice(g: Generator) -> Call:
    return given(g, "result = a * a", "a")


def ways(g: Generator) -> Call:
    return given(g, "d = a * b; e = d + c; f = e.tanh(); result = f * d", "abc")


def ladder(g: Generator) -> Call:
    """The ways from the result to d are of length 1, 2 and 3."""
    return given(g, "d = a * b; e = d * b; f = d - e; g = f * e; result = g - d")


def two(g: Generator) -> Call:
    return given(g, "first = a * b; d = a.tanh(); second = d - b")


# ------------------------------------------------------------------------------- wrong answers

MINUS, TIMES, BENT = "minus", "times", "tanh"
CHAIN, TWICE, WAYS, LADDER, TWO = "a chain", "a number times itself", "several ways", \
    "ways of three lengths", "two results"  # fmt: skip

PRODUCT = "slopes = other.data, self.data"
BEND = "(1 - y * y,)"
BEGIN, ORDER = "self.grad = 1.0", "reversed(topological_order(self))"
PAIRS, ADD = "zip(value.parents, value.slopes)", "parent.grad += slope * value.grad"
LOOP = f"        for value in {ORDER}:\n            for parent, slope in {PAIRS}:\n" \
    f"                {ADD}\n"  # fmt: skip

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the last slope counts: it takes the place of those before",
     {ADD: "parent.grad = slope * value.grad"}, WAYS),
    ("the slopes of a product are the numbers themselves, not each the other one",
     {PRODUCT: "slopes = self.data, other.data"}, TIMES),
    ("both slopes of minus are 1, as those of a sum", {"(1.0, -1.0)": "(1.0, 1.0)"}, MINUS),
    ("minus takes its slopes in the wrong order", {"(1.0, -1.0)": "(-1.0, 1.0)"}, MINUS),
    ("both slopes of a product are 1, as those of a sum", {PRODUCT: "slopes = 1.0, 1.0"}, TIMES),
    ("the slope of tanh from its input: 1 - x², not 1 - tanh(x)²",
     {BEND: "(1 - self.data**2,)"}, BENT),
    ("the slope of tanh without the square", {BEND: "(1 - y,)"}, BENT),
    ("the slope of tanh with a plus", {BEND: "(1 + y * y,)"}, BENT),
    ("the slope of tanh is tanh, as if it were exp", {BEND: "(y,)"}, BENT),
    ("the slope of tanh is always 1", {BEND: "(1.0,)"}, BENT),
    ("tanh remembers no parent: slopes end there", {f"Value(y, (self,), {BEND})": "Value(y)"},
     BENT),
    ("the slope that comes from behind is not multiplied in", {ADD: "parent.grad += slope"}, CHAIN),
    ("slopes along a way are added, not multiplied",
     {ADD: "parent.grad += slope + value.grad"}, TIMES),
    ("the slope of the operation is left out", {ADD: "parent.grad += value.grad"}, TIMES),
    ("multiplied by the number, not by its slope",
     {ADD: "parent.grad += slope * value.data"}, CHAIN),
    ("slopes are multiplied over the ways, not added",
     {ADD: "parent.grad = (parent.grad or 1.0) * slope * value.grad"}, WAYS),
    ("the result begins with slope 0", {f"{BEGIN}\n": "self.grad = 0.0\n"}, MINUS),
    ("the result begins with its number in the place of 1",
     {f"{BEGIN}\n": "self.grad = self.data\n"}, MINUS),
    ("from the parents to the result: only its own parents get a slope",
     {ORDER: "topological_order(self)"}, CHAIN),
    ("only the first parent gets a slope", {PAIRS: "[*zip(value.parents, value.slopes)][:1]"},
     MINUS),
    ("a parent that is there twice gets one slope",
     {PAIRS: "dict(zip(value.parents, value.slopes)).items()"}, TWICE),
    ("each number passes on once, when it is first reached: first parents go first",
     {LOOP: "        waiting, done = [self], set()\n        while waiting:\n"
      "            value = waiting.pop()\n            if value in done:\n"
      "                continue\n            done.add(value)\n"
      "            for parent, slope in zip(value.parents, value.slopes):\n"
      f"                {ADD}\n            waiting += reversed(value.parents)\n"}, LADDER),
    ("each number passes on once, in the order in which they are reached",
     {LOOP: "        waiting, done = [self], set()\n        while waiting:\n"
      "            value = waiting.pop(0)\n            if value in done:\n"
      "                continue\n            done.add(value)\n"
      "            for parent, slope in zip(value.parents, value.slopes):\n"
      f"                {ADD}\n                waiting.append(parent)\n"}, LADDER),
    ("on every way a number passes on all it has, what it passed on before too",
     {LOOP: "        waiting = [self]\n        while waiting:\n"
      "            value = waiting.pop()\n"
      "            for parent, slope in zip(value.parents, value.slopes):\n"
      f"                {ADD}\n                waiting.append(parent)\n"}, WAYS),
    ("all slopes are set to 0 first: those of another result are lost",
     {f"{BEGIN}\n": f"for value in topological_order(self):\n            value.grad = 0.0\n"
      f"        {BEGIN}\n"}, TWO),
    ("a slope is rounded", {ADD: "parent.grad += round(slope * value.grad, 4)"}, BENT),
    ("the numbers move by their slopes",
     {ADD: ADD + "\n                parent.data += 0.01 * parent.grad"}, MINUS),
    ("minus the other way round", {"self.data - other.data": "other.data - self.data"}, MINUS),
    ("tanh of a number that is one already",
     {"y = math.tanh(self.data)": "y = math.tanh(math.tanh(self.data))"}, BENT),
]  # fmt: skip

CASES = (
    Case(MINUS, minus, "when b grows, a - b falls: just as fast", use=slopes,
         teaching="one operation: what backward must do at least"),
    Case(TIMES, times, "when a grows by a little, a * b grows by b times as much", use=slopes,
         teaching="which slope belongs to which number"),
    Case(BENT, bent, "you have tanh(x) already: its slope needs no x", use=slopes,
         teaching="a rule that the page did not have"),
    Case(CHAIN, chain, "a number passes its own slope on, times the slope of the operation",
         points=2, use=slopes, teaching="several operations, one way through them"),
    Case(TWICE, twice, "of a * a both parents are a, and each has its slope", use=slopes),
    Case(WAYS, ways, "d counts in f, and once more in the result: both count", points=2,
         use=slopes, teaching="the smallest case with two ways of different lengths"),
    Case(LADDER, ladder, "a number passes its slope on when all its children have done so",
         points=2, use=slopes),
    Case(TWO, two, "backward adds to the slopes of a and b, so that two results add up",
         use=two_results),
)  # fmt: skip

EXERCISE = Exercise(
    name="value_backward", function="Value", page="0_from_zero/1_autograd",
    minutes=25, difficulty=1,
    outcome="Write the slopes of operations, and pass them back through a computation.",
    reference=Reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Write minus and its slopes first, then `backward` for one operation. The first check "
        "holds then. Nudge a number by 0.01 on paper wherever you doubt a slope.",
        "A product of 3 and 5: what happens to it when the 3 becomes 3.01? That is the slope of "
        "which of the two?",
        "`backward` begins with the slope 1 at the result. Then it goes from child to parents: the "
        "order is given, but it begins with the parents. What does each number add, and to whom?",
        "Does `a * a` come out as half of what it should? Then look for the place where a slope "
        "is replaced. It must be added.",
    ),
)  # fmt: skip
