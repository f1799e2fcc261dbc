# %% [markdown]
# # Bug hunt: half a slope
#
# A program finds slopes without any class. It is given the steps of a computation as a list, a *tape*: the step
# `("c", "*", "a", "b")` says that `c` is the product of `a` and `b`. It runs the tape forwards for the numbers, and backwards
# for the slopes of the last one.
#
# It was tested against nudging, with `a * b`, with `a * b + c`, with `(a + b) * c` and with `a - b * c`. All slopes were right.
# Then somebody gave it the area of a square, `x * x`. With a side of 3 it says that the slope is 3. Nudging says 6.
#
# Find what is wrong, and write the function again. What holds for it:
#
# - `numbers` is a dict: what each number to begin with is called, and what it is.
# - `steps` is a list of at least one step. A step is a tuple of four texts: the name of a new number, `"+"`, `"-"` or `"*"`, and
#   the names of the two numbers that it is computed from, which are known by then. Both may be the same. A name is given once.
# - The result is a dict: for each name in `numbers` the slope of the number that the *last* step makes. That of a number which
#   plays no part in it is 0.
# - A number may be used in as many steps as you like, and not all steps must lead to the last one.
# - `numbers` and `steps` stay as they are.


# %%
def tape_slopes_as_found(
    numbers: dict[str, float], steps: list[tuple[str, str, str, str]]
) -> dict[str, float]:
    """How fast the last number of a tape grows with each of `numbers`."""
    values = dict(numbers)
    for name, op, a, b in steps:
        if op == "+":
            values[name] = values[a] + values[b]
        elif op == "-":
            values[name] = values[a] - values[b]
        else:
            values[name] = values[a] * values[b]
    slopes = dict.fromkeys(values, 0.0)
    slopes[name] = 1.0
    for name, op, a, b in reversed(steps):
        slope = slopes[name]
        if op == "+":
            slopes[a], slopes[b] = slope, slope
        elif op == "-":
            slopes[a], slopes[b] = slope, -slope
        else:
            slopes[a], slopes[b] = slope * values[b], slope * values[a]
    return {name: slopes[name] for name in numbers}


# %%
from lm_from_scratch.exercises import check

check("hunt_half_slope", tape_slopes_as_found)

# %% [markdown]
# Before you write: the square is the smallest case, and not the only one. What do `x - x` and `a * b + a * c` give? A
# repair that only knows squares is none.


# %%
def tape_slopes(
    numbers: dict[str, float], steps: list[tuple[str, str, str, str]]
) -> dict[str, float]:
    """How fast the last number of a tape grows with each of `numbers`."""
    ### BEGIN SOLUTION
    values = dict(numbers)
    for name, op, a, b in steps:
        if op == "+":
            values[name] = values[a] + values[b]
        elif op == "-":
            values[name] = values[a] - values[b]
        else:
            values[name] = values[a] * values[b]
    slopes = dict.fromkeys(values, 0.0)
    slopes[name] = 1.0
    for name, op, a, b in reversed(steps):
        slope = slopes[name]
        if op == "+":
            slopes[a] += slope
            slopes[b] += slope
        elif op == "-":
            slopes[a] += slope
            slopes[b] -= slope
        else:
            slopes[a] += slope * values[b]
            slopes[b] += slope * values[a]
    return {name: slopes[name] for name in numbers}
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_half_slope", tape_slopes)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_half_slope", tape_slopes, seed=7341))
### END HIDDEN TESTS
float(points)
