r"""
A number that knows its parents
===============================

A program that learns has dials: numbers that it may change. It turns them until its result is good. How does it know
which way?

Here is a small machine with three dials, ``a``, ``b`` and ``c``. Say that a larger result is better. The simplest way to
find out is to *nudge* one dial at a time: turn it up by 0.01, and see what the result does.
"""

# sphinx_gallery_words = ["autodiff", "backpropagation from scratch", "backprop", "micrograd", "calculus", "derivative", "derivatives", "how does autograd work", "how does loss.backward work", "reverse mode", "Zero to Hero", "gradient from scratch", "finite differences", "numerical gradient", "which way to change a number", "how does a program learn"]


def machine(a, b, c):
    product = a * b
    total = product + c
    bent = max(total, 0)  # anything below 0 becomes 0
    return bent * product


before = machine(2.0, -1.5, 5.0)
print("result:", before)
print(f"a + 0.01: {machine(2.01, -1.5, 5.0) - before:+.4f}")
print(f"b + 0.01: {machine(2.0, -1.49, 5.0) - before:+.4f}")
print(f"c + 0.01: {machine(2.0, -1.5, 5.01) - before:+.4f}")

# %%
# So turn ``a`` up, and turn ``b`` and ``c`` down. Curves show more. Each one turns a single dial, and leaves the two others
# alone.

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import figure

turns = [turn / 20 for turn in range(-26, 27)]
fig, (ax,) = figure(4.8, 3.2)
ax.plot(turns, [machine(2 + t, -1.5, 5) for t in turns], label="a")
ax.plot(turns, [machine(2, -1.5 + t, 5) for t in turns], "--", label="b")
ax.plot(turns, [machine(2, -1.5, 5 + t) for t in turns], "-.", label="c")
ax.plot(0, before, "o", color="black")
ax.set(xlabel="turned by", ylabel="result", title="Turn one of three dials")
ax.legend(frameon=False)
plt.show()

assert round((machine(2.001, -1.5, 5) - before) / 0.001, 3) == 1.502
assert round((machine(2.0001, -1.5, 5) - before) / 0.0001, 4) == 1.5002

# %%
# Close to the dot each curve is nearly a straight line, so it has a *slope*: the change of the result divided by the
# nudge. For ``a`` that is 0.0152 / 0.01, or 1.52. A nudge of 0.001 gives 1.502, and one of 0.0001 gives 1.5002: the
# slope at the dot is 1.5. A negative slope leads down.
#
# Nudging has a price: the whole machine has to run once more for each dial. A language model is a machine with millions
# of dials, or billions. There is a way to get all slopes at once.
#
# A number that remembers
# -----------------------
#
# Let each number remember its *parents*, the numbers that it was computed from. Beside each parent it keeps a slope:
# how fast the number itself grows when that parent grows. These slopes are easy, because each step of the machine is
# small.
#
# * ``x + y`` grows by 0.01 when ``x`` does. Both slopes are 1.
# * ``x * y`` grows by ``0.01 * y`` when ``x`` grows by 0.01. So the slope beside ``x`` is ``y``, and the one beside ``y``
#   is ``x``.
# * The bend, ``max(x, 0)``, keeps ``x`` if it is above 0: the slope is 1. Anything else becomes 0 and stays 0: the slope is
#   0. Its usual name is ``relu``, for *rectified linear unit*.
#
# A ``class`` describes a new kind of object. ``Value(2.0)`` will make a number of this kind: Python calls ``__init__``, and
# ``self`` is the new number.


class Value:
    def __init__(self, data, parents=(), slopes=()):
        self.data, self.grad = data, 0.0
        self.parents, self.slopes = parents, slopes

    def __add__(self, y):  # Python calls this for x + y; self is x
        return Value(self.data + y.data, (self, y), (1.0, 1.0))

    def __mul__(self, y):  # and this for x * y
        return Value(self.data * y.data, (self, y), (y.data, self.data))

    def relu(self):
        slope = 1.0 if self.data > 0 else 0.0
        return Value(max(self.data, 0.0), (self,), (slope,))


# %%
# ``data`` is the number itself. ``grad`` will be what we are looking for: the slope of the *result*, when this number
# changes. The machine runs as before, and writes down where everything came from.

a, b, c = Value(2.0), Value(-1.5), Value(5.0)
product = a * b
total = product + c
bent = total.relu()
result = bent * product

print("result:", result.data)
print("its parents:", [parent.data for parent in result.parents])
print("the slope beside each:", result.slopes)

assert result.data == before
assert result.parents == (bent, product)

# %%
# Numbers, and arrows from parents to what is computed from them: that is a *computation graph*.
#
# Back through the machine
# ------------------------
#
# Now start at the end. The result grows as fast as itself: its ``grad`` is 1. Then every number passes its ``grad`` on to
# its parents, times the slope that it keeps beside each.
#
# An example: ``result`` keeps -3 beside ``bent``, and ``bent`` keeps 1 beside ``total``. When ``total`` grows by 0.01, so
# does ``bent``, and the result falls by 0.03. So the ``grad`` of ``total`` is -3 × 1 = -3.
#
# **Predict first.** ``product`` is used twice. From ``result`` it gets 1 × 2 = 2, and from ``total`` it gets -3 × 1 = -3.
# What is its ``grad``?
#
# * -3: the later one counts.
# * -1: the two are added.
# * -6: the two are multiplied.

p = product.data
nudged = max(p + 0.01 + c.data, 0) * (p + 0.01)  # the machine from there on
print(f"product + 0.01: the result changes by {nudged - result.data:+.4f}")

assert abs((nudged - result.data) - 0.01 * (2 - 3)) < 2e-4
assert 0.01 * 2 == 0.02 and 0.01 * -3 == -0.03
assert -1.5 * 2 == -3 and -1.5 * 1 * 1 * -3 == 4.5 and 4.5 - 3 == 1.5

# %%
# The two are added: 2 - 3 = -1. When ``product`` grows by 0.01, the result changes for two reasons, by about 0.02
# directly, and by about -0.03 through ``total``. Together that is -0.01.
#
# This is the *chain rule*: **slopes multiply along a path, and add up over paths.** From ``a`` two paths lead to the
# result. The short one, through ``product`` alone, has the slopes -1.5 × 2 = -3. The long one goes on through
# ``total`` and ``bent``: -1.5 × 1 × 1 × -3 = 4.5. Their sum is 1.5.
#
# Here is the whole way back. Go through it step by step:

from lm_from_scratch.drawings import zero

numbers = dict(
    a=a, b=b, c=c, product=product, total=total, bent=bent, result=result
)
zero.backward_steps(numbers)

# %%
# One pass, in the right order
# ----------------------------
#
# ``product`` had to wait for ``total``. With only the first part, 2, it would have passed 2 × -1.5 = -3 on to ``a``,
# and that points the wrong way. So a number passes its slope on when all its *children* have done so, the numbers
# that were computed from it.
#
# ``topological_order`` lists a result and all that it was computed from, parents before their children. (Such a list is in
# *topological order*.) To do so, it first calls itself for each parent. ``backward`` goes through it from its end.


def topological_order(value, order):
    if value not in order:
        for parent in value.parents:
            topological_order(parent, order)
        order.append(value)  # after all its parents
    return order


def backward(result):
    result.grad = 1.0
    for value in reversed(topological_order(result, [])):
        for parent, slope in zip(value.parents, value.slopes):
            parent.grad += value.grad * slope


backward(result)
for name, value in numbers.items():
    print(f"{name:8} {value.data:5}  slope {value.grad:4}")

assert [n.grad for n in numbers.values()] == [1.5, -2, -3, -1, -3, -3, 1]
for nudged, slope in (
    (machine(2 + 1e-6, -1.5, 5), a.grad),
    (machine(2, -1.5 + 1e-6, 5), b.grad),
    (machine(2, -1.5, 5 + 1e-6), c.grad),
    (max(-3 + 1e-6 + 5, 0) * (-3 + 1e-6), product.grad),
    (max(2 + 1e-6, 0) * -3, total.grad),
    ((2 + 1e-6) * -3, bent.grad),
):
    assert abs((nudged - before) / 1e-6 - slope) < 1e-4
assert [total.grad * slope for slope in product.slopes] == [
    4.5,
    -6,
]  # exercise 1

# %%
# Going forward computed the numbers. Going back, the *backward pass*, computes all slopes, and again it meets every number
# once. All slopes together are called the *gradient*, hence the name ``grad``.
#
# **Predict first.** ``y`` is ``x`` at first. Then twenty times ``y = y + y``. How many paths lead from ``x`` to ``y``?
#
# * 20
# * 40
# * more than a million

x = y = Value(1.0)
for _ in range(20):
    y = y + y

backward(y)
print(f"slope of x: {x.grad:,.0f}")
print(f"numbers on the way: {len(topological_order(y, []))}")

assert x.grad == 2**20 == 1_048_576
assert len(topological_order(y, [])) == 21

# %%
# More than a million: each sum has two arrows, so every doubling doubles the paths. But ``backward`` does not walk them
# one by one. Each of the 21 numbers adds up what reaches it, and then passes it on once.
#
# Is it right?
# ------------
#
# The course has a package, ``lm_from_scratch``, with a ``Value`` like this one. It knows more operations, such as
# ``-`` and ``**``, and plain numbers may take part: ``100 + 2 * a``. The next lessons use it. `PyTorch
# <https://pytorch.org>`_, the library of the later chapters, does the same. Its numbers come in tables, called
# *tensors*; here each holds a single one. Do all three agree?

import torch

from lm_from_scratch.training import autograd


def run(a, b, c):
    product = a * b
    return (product + c).relu() * product


package = [autograd.Value(number) for number in (2.0, -1.5, 5.0)]
run(*package).backward()

# as exact as Python's own numbers, and with slopes
exact = dict(dtype=torch.float64, requires_grad=True)
tensors = [torch.tensor(number, **exact) for number in (2.0, -1.5, 5.0)]
run(*tensors).backward()

print("this page:", a.grad, b.grad, c.grad)
print("package:  ", *[value.grad for value in package])
print("PyTorch:  ", *[tensor.grad.item() for tensor in tensors])

for value, other, tensor in zip((a, b, c), package, tensors):
    assert value.grad == other.grad == tensor.grad.item()

# %%
# They do. Finding slopes in this way is called *automatic differentiation*. It is decades old, and a
# `survey <https://arxiv.org/abs/1502.05767>`_ by Baydin and others tells its history. Doing it with single numbers became
# popular with Andrej Karpathy's `micrograd <https://github.com/karpathy/micrograd>`_ and his lectures
# `Zero to Hero <https://github.com/karpathy/nn-zero-to-hero>`_.
#
# Turn all dials
# --------------
#
# The gradient says which way each dial should go. Turn all three at once, each by 0.01 times its slope:

for value in (a, b, c):
    value.data += 0.01 * value.grad
after = machine(a.data, b.data, c.data)
promised = sum(0.01 * value.grad**2 for value in (a, b, c))

print(f"{before} becomes {after:.2f}")
print(f"promised: {promised:+.2f}, came: {after - before:+.2f}")

assert abs(promised - 0.1525) < 1e-9
assert 0.155 < after - before < 0.165
assert 2.0 * -1.5 + 2.0 < 0  # exercise 2: the bend is at 0, and all slopes are

# %%
# Each turn promised its own size times its slope, for ``a`` 0.015 × 1.5. Together that is 0.15, and 0.16 came. Slopes
# change a little on the way, because the curves above are not straight. So take a small step, find the new slopes,
# and take the next step.
#
# That is what the next lesson does, in a loop. Its result is an error that should become small, so the loop walks
# *downhill*.
#
# Exercises
# ---------
#
# 1. Copy ``backward``, write ``=`` in the place of ``+=``, and try it on a new machine. Which of the three dials get wrong
#    slopes? A good answer says which number lost a part of its slope.
# 2. Build the machine with 2 in the place of 5 for ``c``. What are the slopes now, and which dial would help? A good answer
#    says what the bend has done.
# 3. Add subtraction to ``Value``: Python calls ``__sub__`` for ``x - y``. A good answer nudges both numbers to check the
#    slopes.
#
# Summary
# -------
#
# * A slope says how fast the result grows when one number grows; its sign says which way to turn.
# * Slopes multiply along a path and add up over paths.
# * Numbers that remember their parents get all slopes in one pass, from the result back to the dials.
