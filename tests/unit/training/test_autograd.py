"""autograd.py: every slope beside torch's, in float64."""

import random

import pytest
import torch

from lm_from_scratch.training.autograd import Value, dot, topological_order

UNARY = {
    "exp": lambda x: (x * 0.3).exp(),
    "log": lambda x: (x * x + 0.5).log(),
    "relu": lambda x: x.relu(),
    "tanh": lambda x: x.tanh(),
    "square": lambda x: x**2,
    "inverse root": lambda x: (x * x + 1.5) ** -0.5,
    "negative": lambda x: -x,
    "number left": lambda x: 2.5 - x + 3 * x + 1.5 / (x * x + 1),
    "power zero": lambda x: x**0,
}
BINARY = {
    "+": lambda a, b: a + b,
    "*": lambda a, b: a * b,
    "-": lambda a, b: a - b,
    "/": lambda a, b: a / (b * b + 0.7),
    "number": lambda a, b: a * 3 + 2 * b - 1,
    "itself": lambda a, b: a * a + a + b,
}


def tensor(number):
    return torch.tensor(number, dtype=torch.float64, requires_grad=True)


def random_result(rng, values):
    """Thirty operations on the values and on what came of them: what was computed is used again."""
    values = list(values)
    for _ in range(30):
        a, b = rng.choice(values), rng.choice(values)
        values.append(rng.choice(list(BINARY.values()))(a, b).tanh())
        values.append(rng.choice(list(UNARY.values()))(rng.choice(values)).tanh())
    return sum(values[1:], values[0])


@pytest.mark.parametrize("seed", range(40))
def test_slopes_are_those_of_torch(seed):
    numbers = [random.Random(seed).uniform(-2, 2) for _ in range(4)]
    ours, theirs = [Value(n) for n in numbers], [tensor(n) for n in numbers]
    result = random_result(random.Random(seed), ours)
    expected = random_result(random.Random(seed), theirs)
    result.backward()
    expected.backward()
    assert result.data == pytest.approx(expected.item(), rel=1e-12)
    for value, leaf in zip(ours, theirs, strict=True):
        assert value.grad == pytest.approx(leaf.grad.item(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_each_operation(name):
    for numbers in ((1.7, -0.6), (-1.2, 2.5), (0.0, 0.9)):
        ours, theirs = [Value(n) for n in numbers], [tensor(n) for n in numbers]
        operation = UNARY.get(name, BINARY.get(name))
        count = 1 if name in UNARY else 2
        operation(*ours[:count]).backward()
        operation(*theirs[:count]).backward()
        for value, leaf in zip(ours[:count], theirs, strict=False):
            assert value.grad == pytest.approx(leaf.grad.item(), abs=1e-12)


def test_a_dot_product_is_the_sum_of_products():
    numbers = [[0.5, -2.0, 3.0], [1.5, 0.25, -1.0]]
    (a, b), (c, d) = ([[Value(n) for n in row] for row in numbers] for _ in range(2))
    one = dot(a, b).tanh()
    many = sum(x * y for x, y in zip(c, d, strict=True)).tanh()
    one.backward()
    many.backward()
    assert one.data == many.data
    assert [v.grad for v in (*a, *b)] == pytest.approx([v.grad for v in (*c, *d)])
    same = [Value(2.0), Value(3.0)]
    dot(same, same).backward()
    assert [v.grad for v in same] == [4.0, 6.0]
    with pytest.raises(ValueError, match="dot of 2 and 3 values"):
        dot(a[:2], b)
    same[0].data = 4  # a whole number, set by hand
    assert dot(same, same).data == 25


def test_slopes_of_a_leaf_add_up_and_those_of_a_result_do_not():
    x = Value(3.0)
    y = x * x
    for call in (1, 2):
        y.backward()
        assert x.grad == 6 * call and y.grad == 1
    leaf = Value(1.0)
    leaf.backward()
    assert leaf.grad == 1


def test_a_long_sum_is_no_recursion():
    x = total = Value(1.0)
    for _ in range(5000):
        total = total + x
    total.backward()
    assert x.grad == 5001
    order = topological_order(total)
    place = {value: i for i, value in enumerate(order)}
    assert len(place) == len(order) == 5001
    assert all(place[parent] < place[value] for value in order for parent in value.parents)


def test_what_has_no_slope_is_refused():
    with pytest.raises(ValueError, match=r"log\(-1\): the number must be above 0"):
        Value(-1.0).log()
    with pytest.raises(ValueError, match=r"-2 \*\* 0.5: below 0 the power must be whole"):
        Value(-2.0) ** 0.5
    with pytest.raises(TypeError, match="the power must be a number"):
        Value(2.0) ** Value(2.0)
    for of_zero in (lambda x: 1 / x, lambda x: x**0.5):
        with pytest.raises(ZeroDivisionError):
            of_zero(Value(0.0))
