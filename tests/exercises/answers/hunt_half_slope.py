"""Other right answers to hunt_half_slope."""

import operator
from collections import Counter, defaultdict

from lm_from_scratch.training.autograd import Value

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def by_values(numbers, steps):
    """The numbers of the page."""
    leaves = {name: Value(number) for name, number in numbers.items()}
    known = dict(leaves)
    for name, op, a, b in steps:
        known[name] = OPERATIONS[op](known[a], known[b])
    known[name].backward()
    return {name: value.grad for name, value in leaves.items()}


def by_forward(numbers, steps):
    """One run for each number: every value carries its slope with respect to it."""
    slopes = {}
    for one in numbers:
        x, s = dict(numbers), dict.fromkeys(numbers, 0.0) | {one: 1.0}
        for name, op, a, b in steps:
            x[name] = OPERATIONS[op](x[a], x[b])
            s[name] = s[a] * x[b] + x[a] * s[b] if op == "*" else OPERATIONS[op](s[a], s[b])
        slopes[one] = s[steps[-1][0]]
    return slopes


def by_imaginary_nudge(numbers, steps):
    """A nudge in a direction in which nothing is rounded away."""

    def run(name):
        x = {n: complex(number, 1e-30 * (n == name)) for n, number in numbers.items()}
        for new, op, a, b in steps:
            x[new] = OPERATIONS[op](x[a], x[b])
        return x[new].imag / 1e-30

    return {name: run(name) for name in numbers}


def by_children(numbers, steps):
    """Each number asks who has used it, and adds up what they say."""
    x = {**numbers}
    for name, op, a, b in steps:
        x[name] = OPERATIONS[op](x[a], x[b])
    uses = defaultdict(list)
    for name, op, a, b in steps:
        uses[a].append((name, x[b] if op == "*" else 1))
        uses[b].append((name, {"*": x[a], "+": 1, "-": -1}[op]))
    known = {steps[-1][0]: 1.0}

    def slope(name):
        if name not in known:
            known[name] = sum(slope(child) * own for child, own in uses[name])
        return known[name]

    return {name: float(slope(name)) for name in numbers}


def by_counter(numbers, steps):
    """A Counter begins with 0 and adds."""
    x = dict(numbers)
    for name, op, a, b in steps:
        x[name] = x[a] * x[b] if op == "*" else x[a] + (x[b] if op == "+" else -x[b])
    s = Counter({steps[-1][0]: 1.0})
    for name, op, a, b in steps[::-1]:
        for parent, own in ((a, x[b]), (b, x[a])) if op == "*" else ((a, 1), (b, int(op + "1"))):
            s.update({parent: own * s[name]})
    return {name: s[name] for name in numbers}


RIGHT = [by_values, by_forward, by_imaginary_nudge, by_children, by_counter]

SURVIVORS = {}
