"""Other right answers to value_backward."""

import math

import torch

from lm_from_scratch.training.autograd import Value as Ours
from lm_from_scratch.training.autograd import topological_order


class Package(Ours):
    """The package's own class."""


class Functions:
    """Each number keeps a function that passes its slope on."""

    def __init__(self, data, parents=()):
        self.data, self.grad, self.parents = data, 0, parents
        self.pass_on = lambda: None

    def made(self, data, parents, pass_on):
        out = Functions(data, parents)
        out.pass_on = lambda: pass_on(out)
        return out

    def __add__(self, other):
        def pass_on(out):
            self.grad += out.grad
            other.grad += out.grad

        return self.made(self.data + other.data, (self, other), pass_on)

    def __neg__(self):
        def pass_on(out):
            self.grad -= out.grad

        return self.made(-self.data, (self,), pass_on)

    def __sub__(self, other):
        return self + -other

    def __mul__(self, other):
        def pass_on(out):
            self.grad += other.data * out.grad
            other.grad += self.data * out.grad

        return self.made(self.data * other.data, (self, other), pass_on)

    def tanh(self):
        def pass_on(out):
            self.grad += out.grad / math.cosh(self.data) ** 2

        return self.made(math.tanh(self.data), (self,), pass_on)

    def backward(self):
        self.grad = 1
        for number in topological_order(self)[::-1]:
            number.pass_on()


class Paths:
    """Every way back by itself; the order does not matter then."""

    def __init__(self, data, *parents):
        self.data, self.grad, self.parents = data, 0.0, parents

    def __add__(self, other):
        return Paths(self.data + other.data, (self, 1), (other, 1))

    def __sub__(self, other):
        return Paths(self.data - other.data, (self, 1), (other, -1))

    def __mul__(self, other):
        return Paths(self.data * other.data, (self, other.data), (other, self.data))

    def tanh(self):
        power = math.exp(2 * self.data)
        return Paths((power - 1) / (power + 1), (self, 4 * power / (power + 1) ** 2))

    def backward(self, slope=1.0):
        self.grad += slope
        for parent, own in self.parents:
            parent.backward(slope * own)


class Forward:
    """Each number carries its slopes with respect to all others from the beginning."""

    def __init__(self, data, slopes=None):
        self.data, self.grad = data, 0.0
        self.all = {self: 1.0} | (slopes or {})

    def of(self, data, *parts):
        slopes = {}
        for part, slope in parts:
            for source, own in part.all.items():
                slopes[source] = slopes.get(source, 0.0) + slope * own
        return Forward(data, slopes)

    def __add__(self, other):
        return self.of(self.data + other.data, (self, 1), (other, 1))

    def __sub__(self, other):
        return self.of(self.data - other.data, (self, 1), (other, -1))

    def __mul__(self, other):
        return self.of(self.data * other.data, (self, other.data), (other, self.data))

    def tanh(self):
        return self.of(y := math.tanh(self.data), (self, (1 - y) * (1 + y)))

    def backward(self):
        for source, slope in self.all.items():
            source.grad += slope


class Queue:
    """Who has got a slope from all children passes it on: children are counted first."""

    def __init__(self, data, op="", *parents):
        self.data, self.grad, self.op, self.parents = data, 0.0, op, parents

    def __add__(self, other):
        return Queue(self.data + other.data, "+", self, other)

    def __sub__(self, other):
        return Queue(self.data - other.data, "-", self, other)

    def __mul__(self, other):
        return Queue(self.data * other.data, "*", self, other)

    def tanh(self):
        return Queue(torch.tensor(self.data, dtype=torch.float64).tanh().item(), "tanh", self)

    def slopes(self):
        if self.op == "tanh":
            return [1 - self.data**2]
        a, b = (parent.data for parent in self.parents)
        return {"+": [1, 1], "-": [1, -1], "*": [b, a]}[self.op]

    def backward(self):
        children, waiting = {}, [self]
        while waiting:
            for parent in (number := waiting.pop()).parents:
                if parent not in children:
                    waiting.append(parent)
                children.setdefault(parent, []).append(number)
        self.grad, ready = 1.0, [self]
        while ready:
            number = ready.pop()
            for parent, slope in zip(number.parents, number.slopes() if number.op else ()):
                parent.grad += slope * number.grad
                children[parent].remove(number)
                if not children[parent]:
                    ready.append(parent)


RIGHT = [Package, Functions, Paths, Forward, Queue]

SURVIVORS = {}
