"""Parents before children: an order is right by its properties, and found without recursion."""

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers
from lm_from_scratch.training.autograd import Value, topological_order

Numbers = dict[str, float]
#: How often `parents` may be read for each value, on average.
READS = 50


class Count:
    """How often ``parents`` was read in a computation of ``values`` values."""

    def __init__(self) -> None:
        self.values = self.reads = 0

    def add(self) -> None:
        """Raises ``RuntimeError`` for one read too many."""
        self.reads += 1
        if self.reads > READS * self.values:
            raise RuntimeError(
                f"parents has been read {self.reads - 1:,} times for {self.values:,} values: is a "
                "value looked at again on every way to it, or for every other value?"
            )


class Watched(Value):
    """A value with a name, whose ``parents`` are counted when they are read."""

    __slots__ = ("count", "kept", "name", "number")

    def __init__(
        self, name: str, number: float, parents: "tuple[Watched, ...]", count: Count
    ) -> None:
        self.name, self.count, self.kept = name, count, parents
        self.data, self.grad, self.slopes = number, 0.0, (1.0,) * len(parents)
        self.number = count.values = count.values + 1

    @property  # type: ignore[override]
    def parents(self) -> "tuple[Watched, ...]":
        self.count.add()
        return self.kept

    @parents.setter
    def parents(self, parents: "tuple[Watched, ...]") -> None:
        self.kept = parents


# -------------------------------------------------------------------------------- how it is used


def made(program: str, numbers: Numbers) -> Watched:
    """The root of a program of sums and products."""
    count, floats = Count(), dict(numbers)
    values = {name: Watched(name, number, (), count) for name, number in numbers.items()}
    for line in filter(None, program.split("; ")):
        exec(line, {}, floats)
        name, _, formula = line.partition(" = ")
        parents = tuple(values[parent] for parent in re.findall(r"\w+", formula))
        values[name] = Watched(name, floats[name], parents, count)
    return values["root"]


def below(root: Watched) -> dict[Watched, tuple[Any, ...]]:
    """The root and all that it was computed from, each with its parents."""
    found, waiting = {root: root.kept}, [root]
    while waiting:
        new = dict.fromkeys(parent for parent in waiting.pop().kept if parent not in found)
        found |= {parent: parent.kept for parent in new}
        waiting += new
    return found


def judged(function: Callable[..., Any], root: Watched) -> dict[str, str]:
    """What an order has too much, too little, and at the wrong place."""
    parents, limit = below(root), sys.getrecursionlimit()
    try:
        order = function(root)
        after = sys.getrecursionlimit()
    finally:
        sys.setrecursionlimit(limit)
    if order is None:
        raise TypeError("the result is None: is there a return statement?")
    if not isinstance(order, list):
        raise TypeError(f"the result must be a list of values; it is a {type(order).__name__}")
    if strange := [value for value in order if not isinstance(value, Watched)]:
        raise TypeError(f"the result must hold values only; it holds a {type(strange[0]).__name__}")
    place = {value: i for i, value in reversed([*enumerate(order)])}  # the first one
    early = [v for v in place if any(place.get(p, -1) > place[v] for p in parents.get(v, ()))]
    changed = [v for v in parents if v.kept != parents[v] or v.grad]
    return {
        "what is missing": names([v for v in parents if v not in place]),
        "what is there more than once": names([v for v in place if order.count(v) > 1])
        if len(place) < len(order)
        else "nothing",
        "what does not belong there": names([v for v in place if v not in parents]),
        "what comes before one of its parents": names(early),
        "what was changed": names(changed),
        "Python's limit of calls": "as it was" if after == limit else "changed",
    }


def names(values: list[Watched]) -> str:
    """Of a few values, in the order in which they were made."""
    few = [value.name for value in sorted(values, key=lambda value: value.number)]
    return ", ".join(few[:6]) + ", ..." * (len(few) > 6) if few else "nothing"


def order_of(function: Callable[..., Any], program: str, numbers: Numbers) -> dict[str, str]:
    return judged(function, made(program, numbers))


def order_of_sum(function: Callable[..., Any], additions: int) -> dict[str, str]:
    """Of `root = x + x + x + ...`."""
    count = Count()
    x = root = Watched("x", 1.0, (), count)
    for i in range(1, additions + 1):
        root = Watched(f"sum {i}", i + 1.0, (root, x), count)
    return judged(function, root)


# ------------------------------------------------------------------------------------- arguments


def given(g: Generator, program: str, names: str = "ab") -> Call:
    numbers = [round(number, 1) for number in (integers(g, 2, 30, len(names)) / 10).tolist()]
    numbers[0] *= -1  # so that a product is less than its parent
    return call(program=program, numbers=dict(zip(names, numbers, strict=True)))


def small(g: Generator) -> Call:
    return given(g, "c = a * b; root = c + a")


def alone(g: Generator) -> Call:
    return call(program="", numbers={"root": round(float(integers(g, 2, 30)) / 10, 1)})


def same_twice(g: Generator) -> Call:
    return given(g, "b = a * a; root = b * b", "a")


def equal(g: Generator) -> Call:
    return call(program="c = a + b; d = a * b; root = c + d", numbers={"a": 2.0, "b": 2.0})


def short_way_first(g: Generator) -> Call:
    return given(g, "c = a * b; d = c + b; e = d * b; root = c + e")


def short_way_last(g: Generator) -> Call:
    return given(g, "c = b * a; d = b + c; e = b * d; root = e + c")


def doublings(g: Generator) -> Call:
    names = ["a", *(f"x{i}" for i in range(1, 16)), "root"]
    steps = zip(names[1:], names, strict=False)
    return given(g, "; ".join(f"{name} = {x} + {x}" for name, x in steps), "a")


def long_sum(g: Generator) -> Call:
    return call(additions=5_000)


def any_one(g: Generator) -> Call:
    """Twenty steps, each from two of the last five numbers."""
    letters, lines = "abcdefghijklmnopqrstuvwx", []
    for n in range(4, len(letters)):
        i, j = (max(n - 5, 0) + torch.randperm(min(n, 5), generator=g)[:2]).tolist()
        lines.append(f"{letters[n]} = {letters[i]} {'+*'[n % 2]} {letters[j]}")
    lines.append("root = x + w")
    return given(g, "; ".join(lines), "abcd")


# ------------------------------------------------------------------------------- wrong answers

SMALL, ALONE, SAME, EQUAL = "a small one", "a number alone", "the same parent twice", \
    "equal numbers"  # fmt: skip
FIRST, LAST = "a short way and a long one", "a long way and a short one"
DOUBLE, LONG, ANY = "16 doublings", "5,000 additions", "twenty steps"

BODY = """\
    order, done, stack = [], set(), [root]
    while stack:
        value = stack[-1]
        missing = [parent for parent in value.parents if parent not in done]
        if missing:
            stack += missing
        else:
            stack.pop()
            if value not in done:
                order.append(value)
            done.add(value)
    return order
"""
CALLS = """\
    order = []

    def add(value):
        if value not in order:
            for parent in value.parents:
                add(parent)
            order.append(value)

    add(root)
    return order
"""
BREADTH = """\
    order, seen = [root], {root}
    for value in order:
        new = dict.fromkeys(parent for parent in value.parents if parent not in seen)
        order += new
        seen |= new.keys()
    return order[::-1]
"""
ALL_LEVELS = """\
    order, level = [], [root]
    while level:
        order += level
        level = [parent for value in level for parent in value.parents]
    return list(dict.fromkeys(reversed(order)))
"""
DEPTH = """\
    order, stack = {}, [root]
    while stack:
        value = stack.pop()
        if value not in order:
            order[value] = None
            stack += reversed(value.parents)
    return [*order][::-1]
"""
EARLY = """\
    order, seen, stack = [], {root}, [(root, False)]
    while stack:
        value, ready = stack.pop()
        if ready:
            order.append(value)
            continue
        stack.append((value, True))
        for parent in value.parents:
            if parent not in seen:
                seen.add(parent)
                stack.append((parent, False))
    return order
"""
SCAN = """\
    left, order = {root: None}, {}
    for value in (found := [root]):
        new = dict.fromkeys(p for p in value.parents if p not in left)
        left |= new
        found += new
    while left:
        value = next(v for v in left if all(p in order for p in v.parents))
        del left[value]
        order[value] = None
    return list(order)
"""
FEWEST = """\
    steps, order = {root: 0}, [root]
    for value in order:
        for parent in value.parents:
            if parent not in steps:
                steps[parent] = steps[value] + 1
                order.append(parent)
    return sorted(order, key=steps.get, reverse=True)
"""
WAITS = """\
    children, found = {root: set()}, [root]
    for value in found:
        for parent in value.parents:
            if parent not in children:
                children[parent] = set()
                found.append(parent)
            children[parent].add(value)
    missing = {value: len(value.parents) for value in found}
    order = [value for value in found if not missing[value]]
    for value in order:
        for child in children[value]:
            missing[child] -= 1
            if not missing[child]:
                order.append(child)
    return order
"""
RETURN = "return order"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("a function that calls itself for each parent", {BODY: CALLS}, LONG),
    ("breadth-first from the root, reversed: a short way to a number hides a long one",
     {BODY: BREADTH}, FIRST),
    ("a value is added before its parents, and the list reversed", {BODY: DEPTH}, FIRST),
    ("children before their parents", {RETURN: "return order[::-1]"}, SMALL),
    ("a value is there once for each way to it",
     {BODY: CALLS.replace("if value not in order:", "if True:")}, SMALL),
    ("a value is there once for each child, where both wait at once",
     {"            if value not in done:\n                order": "            order"}, SAME),
    ("a value is marked when it is first seen, not when it is done", {BODY: EARLY}, FIRST),
    ("a value is marked when it is first seen, and the last parent comes first",
     {BODY: EARLY.replace("in value.parents", "in reversed(value.parents)")}, LAST),
    ("Python's limit is raised, and stays so",
     {BODY: "    import sys\n\n    sys.setrecursionlimit(100_000)\n" + CALLS}, LONG),
    ("a list that a call leaves behind is there in the next one",
     {BODY: CALLS.replace("    order = []\n\n    def add(value):",
                          "    def add(value, order=topological_order.__dict__.setdefault('kept', "
                          "[])):").replace("add(root)", "order = topological_order.kept\n    "
                                           "add(root)")}, SMALL),
    ("equal numbers are taken for the same value",
     {"parent not in done": "parent.data not in done",
      "value not in done": "value.data not in done",
      "done.add(value)": "done.add(value.data)"}, EQUAL),
    ("sorted by the numbers", {RETURN: "return sorted(order, key=lambda value: value.data)"},
     SMALL),
    ("values without parents are left out", {RETURN: "return [v for v in order if v.parents]"},
     SMALL),
    ("the root is left out", {RETURN: "return order[:-1]"}, ALONE),
    ("only the first parent is followed", {"in value.parents if": "in value.parents[:1] if"},
     FIRST),
    ("the root and its parents, without theirs",
     {BODY: "    return list(dict.fromkeys((*root.parents, root)))\n"}, LAST),
    ("all ways are walked, level by level: right, but it takes too long", {BODY: ALL_LEVELS},
     DOUBLE),
    ("for each place all values are looked at again", {BODY: SCAN}, LONG),
    ("by the smallest number of steps from the root", {BODY: FEWEST}, FIRST),
    ("a child waits for its parent twice where it is there twice", {BODY: WAITS}, SAME),
    ("a set has no order", {RETURN: "return set(order)"}, SMALL),
    ("an iterator, not a list", {RETURN: "return iter(order)"}, SMALL),
    ("the numbers, not the values", {RETURN: "return [value.data for value in order]"}, SMALL),
    ("parents are taken away from the values",
     {RETURN: "for value in order:\n        value.parents = ()\n    return order"}, SMALL),
    ("slopes are set on the way", {RETURN: "root.grad = 1.0\n    return order"}, SMALL),
    ("an order for the first 1,000 values only", {"while stack:": "while stack and len(order) < "
      "1_000:"}, LONG),
]  # fmt: skip

CASES = (
    Case(SMALL, small, "a is a parent of c and of the root: it is in the list once, before both",
         use=order_of, teaching="small enough to write all orders down"),
    Case(ALONE, alone, "a number without parents is an order of one", use=order_of,
         teaching="where every loop begins"),
    Case(SAME, same_twice, "of a * a both parents are a: one entry", use=order_of,
         teaching="the smallest repetition; the doublings have sixteen"),
    Case(EQUAL, equal, "a and b are two values, also where their numbers are the same",
         use=order_of, teaching="where nothing else is alike"),
    Case(FIRST, short_way_first, "c is needed for d: it comes before d, although the root names c "
         "first", points=2, use=order_of, teaching="small enough to draw"),
    Case(LAST, short_way_last, "b comes before c and c before d, whoever is found first",
         points=2, use=order_of, teaching="the same, seen from the other side"),
    Case(ANY, any_one, "any order is right in which each value comes after its parents",
         points=2, use=order_of, teaching="what nobody has made up to catch a mistake"),
    Case(DOUBLE, doublings, "65,536 ways lead through 17 values: how do you know that you have "
         "been somewhere?", points=2, use=order_of,
         teaching="so many ways, and so few values"),
    Case(LONG, long_sum, "a loop with a list of what is still to do needs no nested calls",
         points=2, use=order_of_sum),
)  # fmt: skip

EXERCISE = Exercise(
    name="topological_order", function="topological_order", page="0_from_zero/1_autograd",
    minutes=30, difficulty=2, after=("value_backward",),
    outcome="Order the numbers of a computation so that parents come first, without recursion.",
    reference=topological_order, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Draw `c = a * b; root = c + a` with an arrow from each parent to its child. Which value "
        "can you write down first, and when may you write down the root?",
        "Keep a list of values that are still to do, with the root in it. Look at the last one: "
        "what must be true before it may go into the order? What do you do if it is not?",
        "A value may be put on the list of what is to do by several children. A set of those that "
        "are done says whether there is anything left to do when its turn comes.",
        "If parents that are not done are put on top of their child, and the child stays below "
        "them, its turn comes again when they are done.",
    ),
)  # fmt: skip
