"""Automatic differentiation: what ``loss.backward()`` does, one number at a time.

A ``Value`` is a number that remembers its parents, the values that it was computed from, and how
fast it changes with each of them. By the chain rule the slope of a loss L with respect to a parent
p is the sum over its children c, the values computed from it, of dL/dc * dc/dp. So ``backward``
begins at the loss and goes to the parents, and every value passes its slope on when all its
children have done so. (Baydin et al., *Automatic differentiation in machine learning: a survey*,
2018.) Torch does the same with tensors in the place of numbers.
"""

import math
import operator
from collections.abc import Sequence
from typing import Self


class Value:
    """A number, ``data``, with ``grad``, the slope of the last loss with respect to it.

    ``slopes[i]`` is the derivative of this number with respect to ``parents[i]``. As in torch,
    ``grad`` of a value without parents adds up over calls of ``backward`` until it is set to 0.
    """

    __slots__ = ("data", "grad", "parents", "slopes")

    def __init__(
        self, data: float, parents: Sequence[Self] = (), slopes: Sequence[float] = ()
    ) -> None:
        self.data, self.grad = float(data), 0.0
        self.parents, self.slopes = parents, slopes

    def __repr__(self) -> str:
        return f"Value({self.data:.4g}, grad={self.grad:.4g})"

    def __add__(self, other: "Value | float") -> "Value":
        other = as_value(other)
        return Value(self.data + other.data, (self, other), (1.0, 1.0))

    def __mul__(self, other: "Value | float") -> "Value":
        other = as_value(other)
        return Value(self.data * other.data, (self, other), (other.data, self.data))

    def __pow__(self, power: "Value | float") -> "Value":
        """Raises ``TypeError`` for a power that is a ``Value``, ``ValueError`` below 0 for a
        power that is not a whole number, ``ZeroDivisionError`` at 0 for a power below 1 other
        than 0 (the root of 0 exists, but has no slope)."""
        if isinstance(power, Value):
            raise TypeError(f"the power must be a number, not {power}")
        if self.data < 0 and power != int(power):
            raise ValueError(f"{self.data:.4g} ** {power}: below 0 the power must be whole")
        slope = power * self.data ** (power - 1) if power else 0.0
        return Value(self.data**power, (self,), (slope,))

    def exp(self) -> "Value":
        """e to this power, which is its own slope."""
        return Value(y := math.exp(self.data), (self,), (y,))

    def log(self) -> "Value":
        """The natural logarithm. Raises ``ValueError`` for a number that is not above 0."""
        if not self.data > 0:
            raise ValueError(f"log({self.data:.4g}): the number must be above 0")
        return Value(math.log(self.data), (self,), (1 / self.data,))

    def relu(self) -> "Value":
        """The number if it is above 0, else 0."""
        return Value(max(self.data, 0.0), (self,), (float(self.data > 0),))

    def tanh(self) -> "Value":
        """The hyperbolic tangent, between -1 and 1."""
        return Value(y := math.tanh(self.data), (self,), (1 - y * y,))

    def __neg__(self) -> "Value":
        return self * -1.0

    def __sub__(self, other: "Value | float") -> "Value":
        return self + -other

    def __rsub__(self, other: float) -> "Value":
        return -self + other

    def __truediv__(self, other: "Value | float") -> "Value":
        return self * as_value(other) ** -1

    def __rtruediv__(self, other: float) -> "Value":
        return self**-1 * other

    __radd__, __rmul__ = __add__, __mul__

    def backward(self) -> None:
        """Add the slope of this value with respect to each value that it depends on to its
        ``grad``."""
        order = [value for value in topological_order(self) if value.parents]
        for value in order:  # what is computed anew has no slope from before
            value.grad = 0.0
        self.grad += 1.0
        for value in reversed(order):
            grad = value.grad
            for parent, slope in zip(value.parents, value.slopes, strict=True):
                parent.grad += slope * grad


def as_value(number: Value | float) -> Value:
    """A number as a value without parents; a value as it is."""
    return number if isinstance(number, Value) else Value(number)


def dot(a: Sequence[Value], b: Sequence[Value]) -> Value:
    """The sum over i of ``a[i] * b[i]`` as one value with 2 n parents, for a and b of shape (n):
    much faster than n products and n sums. Raises ``ValueError`` for two lengths."""
    if len(a) != len(b):
        raise ValueError(f"dot of {len(a)} and {len(b)} values: the lengths must be equal")
    x, y = [value.data for value in a], [value.data for value in b]
    return Value(sum(map(operator.mul, x, y)), (*a, *b), (*y, *x))


def topological_order(root: Value) -> list[Value]:
    """The root and all that it depends on, parents before their children. (A stack and not a
    recursion: a long sum is deeper than Python's limit.)"""
    order, seen, stack = [], set(), [(root, False)]
    while stack:
        value, parents_done = stack.pop()
        if parents_done:
            order.append(value)
        elif value not in seen:
            seen.add(value)
            stack.append((value, True))
            for parent in value.parents:
                if parent in seen:
                    continue
                if parent.parents:
                    stack.append((parent, False))
                else:  # most are weights: they need not wait on the stack
                    seen.add(parent)
                    order.append(parent)
    return order
