"""Bug hunt: a tape whose slopes take each other's place where a number is used twice."""

from typing import Any

import torch
from torch import Generator

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import decimals, integers

Numbers = dict[str, float]
Steps = list[tuple[str, str, str, str]]


def reference(numbers: Numbers, steps: Steps) -> Numbers:
    """The slopes by torch, in float64."""
    values = {
        name: torch.tensor(number, dtype=torch.float64, requires_grad=True)
        for name, number in numbers.items()
    }
    known = dict(values)
    operations: dict[str, Any] = {"+": torch.add, "-": torch.sub, "*": torch.mul}
    for name, op, a, b in steps:
        known[name] = operations[op](known[a], known[b])
    known[steps[-1][0]].backward()
    return {name: 0.0 if x.grad is None else x.grad.item() for name, x in values.items()}


# -------------------------------------------------------------------------------- how it is used


def slopes(function: Any, numbers: Numbers, steps: Steps) -> dict[str, Any]:
    """The slopes by name; what is there too much."""
    names = list(numbers)
    found = function(numbers, steps)
    if found is None:
        raise TypeError("the result is None: is there a return statement?")
    if not isinstance(found, dict):
        raise TypeError(f"the result must be a dict; it is a {type(found).__name__}")
    result: dict[str, Any] = {f"the slope of {name}": found.get(name) for name in names}
    more = ", ".join(sorted(map(str, found.keys() - {*names})))
    return result | {"names that are not in numbers": more or "none"}


# ------------------------------------------------------------------------------------- arguments


def given(g: Generator, tape: str, names: str) -> Call:
    """Different numbers with one digit after the point, none of them near 0; steps as "c=a*b"."""
    steps = [(line[0], line[3], line[2], line[4]) for line in tape.split()]
    return call(decimals(g, names, 20), steps)


def once(g: Generator) -> Call:
    return given(g, "d=a*b e=d+c", "abc")


def once_more(g: Generator) -> Call:
    return given(g, "d=b*c e=a-d", "abc")


def square(g: Generator) -> Call:
    return given(g, "y=x*x", "x")


def sums(g: Generator) -> Call:
    """2 x - (y - y)."""
    return given(g, "a=x+x b=y-y c=a-b", "xy")


def two_steps(g: Generator) -> Call:
    return given(g, "d=a*b e=a*c f=d+e", "abc")


def three_ways(g: Generator) -> Call:
    """What was computed is used in three steps: by each operation."""
    return given(g, "d=a*b e=d*c f=d-e g=d+b h=g*f", "abc")


def no_part(g: Generator) -> Call:
    """c plays no part; d and e lead nowhere."""
    return given(g, "d=a*b e=d*c f=a+b", "abc")


def long_tape(g: Generator) -> Call:
    """Twelve steps, each with one of the three numbers before it and any other."""
    names, steps = "abcdefghijklmno", []
    for n in range(3, len(names)):
        near, far = int(integers(g, n - 3, n)), int(integers(g, 0, n))
        steps.append(f"{names[n]}={names[near]}{'*+-'[n % 3]}{names[far]}")
    return given(g, " ".join(steps), "abc")


# ------------------------------------------------------------------------------- wrong answers

ONCE, MORE, SQUARE, SUMS = "each number once", "minus, each number once", "a square", \
    "a number plus itself"  # fmt: skip
TWO, WAYS, NONE, LONG = "one number in two steps", "one number in three steps", \
    "numbers that play no part", "twelve steps"  # fmt: skip

FIRST, BEGIN = "values = dict(numbers)\n", "slopes[name] = 1.0"
BACK, SLOPE = "reversed(steps)", "slope = slopes[name]"
PLUS = '        if op == "+":\n            slopes[a] += slope\n            slopes[b] += slope\n'
MINUS = '        elif op == "-":\n            slopes[a] += slope\n            slopes[b] -= slope\n'
TIMES = "            slopes[a] += slope * values[b]\n            slopes[b] += slope * values[a]\n"
RULES = f"{PLUS}{MINUS}        else:\n{TIMES}"
RETURN = "return {name: slopes[name] for name in numbers}"
FOUND_TIMES = "slopes[a], slopes[b] = slope * values[b], slope * values[a]\n"


def shares(add: str) -> dict[str, str]:
    """The shares of both numbers first, as a list of pairs, and then what is done with each."""
    return {
        RULES: '        if op == "*":\n            pairs = [(a, slope * values[b]), (b, slope * '
        "values[a])]\n        else:\n            pairs = [(a, slope), (b, slope if op == '+' else "
        f"-slope)]\n{add}"
    }


#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found", {FIRST: "return tape_slopes_as_found(numbers, steps)\n"}, SQUARE),
    ("the product is repaired, plus and minus are as found",
     {PLUS: PLUS.replace("+=", "="), MINUS: MINUS.replace("+=", "=").replace("-= ", "= -")}, SUMS),
    ("plus and minus are repaired, the product is as found",
     {TIMES: f"            {FOUND_TIMES}"}, SQUARE),
    ("a square is repaired, and nothing else",
     {RULES: '        if op == "*" and a == b:\n            slopes[a] = 2 * slope * values[a]\n'
      '        elif op == "*":\n            ' + FOUND_TIMES +
      "        else:\n            slopes[a] = slope\n"
      '            slopes[b] = slope if op == "+" else -slope\n'}, SUMS),
    ("a number twice in one step is repaired; one that is in two steps is as found",
     shares("        slopes[a] = slopes[b] = 0.0\n        for name, share in pairs:\n"
            "            slopes[name] += share\n"), TWO),
    ("a number in two steps is repaired; one that is twice in one step is as found",
     shares("        for name, share in dict(pairs).items():\n"
            "            slopes[name] += share\n"), SQUARE),
    ("the slope that comes first stays",
     shares("        for name, share in pairs:\n"
            "            slopes[name] = slopes[name] or share\n"), SQUARE),
    ("the larger slope counts",
     shares("        for name, share in pairs:\n"
            "            slopes[name] = max(slopes[name], share, key=abs)\n"), SQUARE),
    ("the mean of two slopes in the place of the sum",
     shares("        for name, share in pairs:\n            old = slopes[name]\n"
            "            slopes[name] = (old + share) / 2 if old else share\n"), SQUARE),
    ("slopes of several ways are multiplied",
     shares("        for name, share in pairs:\n"
            "            slopes[name] = (slopes[name] or 1.0) * share\n"), SQUARE),
    ("in each step only one of the two numbers gets a slope",
     shares("        for name, share in pairs[:1]:\n            slopes[name] += share\n"), ONCE),
    ("the tape is read forwards for the slopes", {BACK: "steps"}, ONCE),
    ("the slopes of a product are the numbers themselves, not each the other one",
     {TIMES: TIMES.replace("values[b]", "values[?]").replace("values[a]", "values[b]").replace(
         "values[?]", "values[a]")}, ONCE),
    ("minus has the slopes of plus", {"slopes[b] -= slope": "slopes[b] += slope"}, MORE),
    ("the slope that comes from behind is not multiplied in", {SLOPE: "slope = 1.0"}, MORE),
    ("the slopes begin with 1 at every number", {"values, 0.0": "values, 1.0"}, ONCE),
    ("the slopes begin with the last number in the place of 1",
     {BEGIN: "slopes[name] = values[name]"}, ONCE),
    ("slopes by nudging, which are nearly right",
     {FIRST: """\
def run(values):
        for name, op, a, b in steps:
            x, y = values[a], values[b]
            values[name] = {"+": x + y, "-": x - y, "*": x * y}[op]
        return values[name]

    if steps:
        was = run(dict(numbers))
        return {
            name: (run({**numbers, name: number + 0.001}) - was) / 0.001
            for name, number in numbers.items()
        }
    values = dict(numbers)
"""}, SQUARE),
    ("all numbers have a slope in the result, those of the steps too", {RETURN: "return slopes"},
     ONCE),
    ("numbers with the slope 0 are left out",
     {RETURN: "return {name: slopes[name] for name in numbers if slopes[name]}"}, NONE),
    ("the caller's numbers get those of the steps", {FIRST: "values = numbers\n"}, ONCE),
    ("the caller's tape is turned", {f"in {BACK}": "in steps[::-1]",
                                     RETURN: f"steps.reverse()\n    {RETURN}"}, ONCE),
    ("a list of slopes", {RETURN: "return [slopes[name] for name in numbers]"}, ONCE),
    ("slopes are divided by how often a number is used",
     {RETURN: "uses = [n for step in steps for n in step[2:]]\n    return {n: slopes[n] / "
      "max(uses.count(n), 1) for n in numbers}"}, SQUARE),
]  # fmt: skip

CASES = (
    Case(ONCE, once, "what was right stays right: each number is used once", use=slopes,
         guard=True, teaching="where the code as found is right"),
    Case(MORE, once_more, "what was right stays right, with minus too", use=slopes, guard=True,
         teaching="the third operation"),
    Case(SQUARE, square, "x * x has two slopes for x: one for each x in it", points=2, use=slopes,
         teaching="the symptom"),
    Case(SUMS, sums, "plus and minus are used twice as easily as times", points=2, use=slopes,
         teaching="a repair of the symptom alone is none"),
    Case(TWO, two_steps, "a is in d and in e: it gets a slope from each", points=3, use=slopes,
         teaching="two steps, one number"),
    Case(WAYS, three_ways, "what was computed may be used several times, too", points=2,
         use=slopes, teaching="the same for a number of the tape"),
    Case(NONE, no_part, "a step that leads nowhere has the slope 0, and passes on nothing",
         use=slopes, teaching="a slope of 0 that takes the place of another"),
    Case(LONG, long_tape, "all of it, on a longer tape", use=slopes,
         teaching="what nobody has made up to catch a mistake"),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_half_slope", function="tape_slopes", page="0_from_zero/1_autograd",
    minutes=10, difficulty=1,
    outcome="Find where a slope is lost, from a formula in which a number stands twice.",
    reference=reference, hunt="a lecture on backpropagation: Karpathy, 2022", cases=CASES,
    wrong=planted(WRONG),
    hints=(
        "Go through the tape of the square by hand: it has one step. What is in `slopes` before "
        "the last line of the loop, and what after it?",
        "All formulas that were right have something in common: how often does each letter stand "
        "in them?",
        "If two ways lead from a number to the result, each has its own slope, and a nudge goes "
        "both ways at once. What must happen to the slope of the first when the second arrives?",
    ),
)  # fmt: skip
