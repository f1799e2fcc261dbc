r"""
A number that knows its parents
===============================

Here is a small machine with three dials, ``a``, ``b`` and ``c``, and one result. Say that we want the result to be
larger. Which dial should we turn, and which way?

The simplest way to find out is to *nudge* one dial at a time: turn it up by 0.01, and see what the result does.
"""

# sphinx_gallery_words = ["automatic differentiation", "autodiff", "backpropagation from scratch", "micrograd", "calculus", "derivative", "derivatives", "chain rule", "how does autograd work", "computation graph", "partial derivative", "reverse mode", "Zero to Hero", "gradient from scratch", "finite differences", "numerical gradient"]


def machine(a, b, c):
    product = a * b
    total = product + c
    bent = max(total, 0)  # a negative total becomes 0
    return bent * product


dials = dict(a=2.0, b=-1.5, c=5.0)
print("result:", machine(**dials))
for name in dials:
    nudged = machine(**{**dials, name: dials[name] + 0.01})
    print(f"{name} + 0.01: {nudged - machine(**dials):+.4f}")

# %%
# Turn ``a`` up, and turn ``b`` and ``c`` down. The curves show more of it: one dial is turned, the two others stay.

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import figure

turns = [turn / 20 for turn in range(-26, 27)]
fig, (ax,) = figure(4.8, 3.2)
for name, dashes in zip(dials, ("-", "--", "-.")):
    results = [machine(**{**dials, name: dials[name] + t}) for t in turns]
    ax.plot(turns, results, dashes, label=name)
ax.plot(0, machine(**dials), "o", color="black")
ax.set(xlabel="turned by", ylabel="result", title="Turn one dial")
ax.legend(frameon=False)
plt.show()

# %%
# How steep a curve is at the dot is its *slope*. A slope of 1.5 means: when the dial goes up by 0.01, the result goes up
# by about 0.01 × 1.5. A negative slope leads down.
#
# Nudging computes the whole machine once more for each dial. A language model has millions of dials. There is a way to
# get all slopes at once.
#
# A number that remembers
# -----------------------
#
# Let every number remember its *parents*, the numbers that it was computed from, and a *slope* for each of them: how fast
# it grows when that parent grows.
#
# * ``x + y`` grows as fast as ``x`` does: both slopes are 1.
# * ``x * y`` grows ``y`` times as fast as ``x``, and ``x`` times as fast as ``y``.
# * ``relu`` keeps a number above 0, where its slope is 1, and turns any other into 0, where its slope is 0.


class Value:
    def __init__(self, data, parents=(), slopes=()):
        self.data, self.grad = data, 0.0
        self.parents, self.slopes = parents, slopes

    def __add__(self, y):  # Python calls it for x + y
        return Value(self.data + y.data, (self, y), (1.0, 1.0))

    def __mul__(self, y):  # and this one for x * y
        return Value(self.data * y.data, (self, y), (y.data, self.data))

    def relu(self):
        return Value(max(self.data, 0), (self,), (float(self.data > 0),))


a, b, c = (Value(number) for number in dials.values())
product = a * b
total = product + c
bent = total.relu()
result = bent * product
print([parent.data for parent in result.parents], result.slopes)

assert result.data == machine(**dials)

# %%
# Pass it on
# ----------
#
# ``grad`` will be the slope of the *result* with respect to a number. That of the result itself is 1. Every number passes
# its own slope on to its parents, multiplied by the slope that it has remembered.
#
# **Predict first.** ``product`` was used twice. ``result`` passes 2 on to it, and ``total`` passes -3. What is its slope?
#
# * -3: the last one counts.
# * -1: they are added.
# * -6: they are multiplied.


def topological_order(value, order=None):
    order = [] if order is None else order
    if value not in order:
        for parent in value.parents:
            topological_order(parent, order)
        order.append(value)  # after all its parents
    return order


def backward(result):
    result.grad = 1.0
    for value in reversed(topological_order(result)):
        for parent, slope in zip(value.parents, value.slopes):
            parent.grad += value.grad * slope


backward(result)
print(f"product: {product.grad}")
print(f"a: {a.grad}, b: {b.grad}, c: {c.grad}")

assert product.grad == -1
assert [value.grad for value in (a, b, c)] == [1.5, -2, -3]
for name, value in zip(dials, (a, b, c)):
    nudged = machine(**{**dials, name: dials[name] + 1e-6})
    assert abs((nudged - result.data) / 1e-6 - value.grad) < 1e-4

# %%
# They are added. When ``product`` grows, the result changes in two ways at once, and both changes count.
#
# Exercises
# ---------
#
# 1. In ``backward``, write ``=`` in the place of ``+=``. Which slopes are wrong, and what would turning the dials by them do?
#    A good answer says which number is used twice.
#
# Summary
# -------
#
# * A slope says how fast the result grows when one number grows.
# * A number that remembers its parents can pass its slope back to them. Slopes multiply along a path, and add up over
#   paths.
# * One pass from the result back to the dials finds all slopes at once.
