# %% [markdown]
# # A number that passes its slope back
#
# The page made numbers that remember their parents, with two operations and a `relu`. Here is such a class again, with a
# sum as the example. Write three other operations for it: minus, times, and `tanh`, a smooth bend that turns any number
# into one between -1 and 1. Then write `backward`, which finds all slopes in one pass.
#
# With `a = Value(3.0)` and `b = Value(5.0)`, the result of `a * a - b` is 4. After `backward()` the slope in `a.grad` is
# 6, and that in `b.grad` is -1.
#
# What holds for your class:
#
# - `Value(number)` has no parents. `data` is the number, and `grad` is 0 at first.
# - `a - b`, `a * b` and `a.tanh()` are new `Value`s, whose `data` is the result. Both sides of an operation are `Value`s.
#   They may be one and the same, as in `a * a`.
# - Where the input of tanh is $x$, its slope is $1 - \tanh(x)^2$.
# - After `result.backward()`, `grad` of the result is 1. `grad` of any number that it was computed from is the slope of
#   the result with respect to that number, over all ways from one to the other.
# - `backward` *adds* to the `grad` of numbers that you made yourself. Two results may be made of the same numbers, and
#   share nothing that was computed: after `backward` of both, these numbers hold the sums of both slopes.
# - `backward` runs once for each result. It changes nothing but `grad`.
#
# The function `topological_order(result)` is given: a list of the result and of all numbers that it was computed from,
# parents before their children. It looks at `parents` of each number.

# %%
import math

from lm_from_scratch.training.autograd import topological_order


# %%
class Value:
    """A number that remembers its parents, and a slope for each of them."""

    def __init__(self, data, parents=(), slopes=()):
        self.data, self.grad = data, 0.0
        self.parents, self.slopes = parents, slopes

    def __add__(self, other):
        return Value(self.data + other.data, (self, other), (1.0, 1.0))

    def __sub__(self, other):
        ### BEGIN SOLUTION
        return Value(self.data - other.data, (self, other), (1.0, -1.0))
        ### END SOLUTION

    def __mul__(self, other):
        ### BEGIN SOLUTION
        slopes = other.data, self.data
        return Value(self.data * other.data, (self, other), slopes)
        ### END SOLUTION

    def tanh(self):
        ### BEGIN SOLUTION
        y = math.tanh(self.data)
        return Value(y, (self,), (1 - y * y,))
        ### END SOLUTION

    def backward(self):
        """Add the slopes of this number to `grad` of all that it came from."""
        ### BEGIN SOLUTION
        self.grad = 1.0
        for value in reversed(topological_order(self)):
            for parent, slope in zip(value.parents, value.slopes):
                parent.grad += slope * value.grad
        ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("value_backward", Value)
### BEGIN HIDDEN TESTS
points = min(points, check("value_backward", Value, seed=7341))
### END HIDDEN TESTS
float(points)
