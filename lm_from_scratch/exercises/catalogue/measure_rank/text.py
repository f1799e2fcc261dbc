# %% [markdown]
# # Measure: which rank fits
#
# You fine-tune a model, and weights, gradients and activations leave so many bytes for the state of the optimizer. AdamW
# keeps two moments for each number. GaLore keeps a basis and two smaller moments for each matrix, and a higher rank loses
# less of the gradient. **AdamW or GaLore, and with which rank?** The check builds the package's optimizer, takes a step,
# and counts the bytes of its state.
#
# | weight | state |
# |---|---|
# | vector, or any weight under AdamW | two moments of its shape, in the dtype of the weight |
# | matrix $(m, n)$ under GaLore | a basis of its smaller side, in float32: $\min(m, n) \cdot r$ numbers |
# | | two moments of shape $(r, n)$ if $m < n$, else $(m, r)$, in float32 |
#
# What holds for your function:
#
# - `shapes` is a list of tuples, with one number (a vector) or two (a matrix). At least one is a matrix.
# - `number` is how many bytes a number of a weight takes: 4, which is the default, or 2.
# - All matrices have the same rank, but where it is above the smaller side of a matrix, that side is the rank there.
# - The result is a pair: the rank and the bytes of the state, all weights together. If AdamW fits, it is the better
#   choice, and its rank is `None`. Otherwise the rank is the largest one that fits. If not even rank 1 fits, the result is
#   `(0, 0)`. A state of exactly `budget` bytes fits.
# - Counters of steps are not counted.
#
# By hand: a matrix (6, 4) and a vector (5,) in float32. AdamW keeps 2 · (24 + 5) = 58 numbers, 232 bytes. With rank 1 it
# is a basis of 4, moments of 2 · 6 and 2 · 5 for the vector: 26 numbers, 104 bytes. Each further rank takes
# 4 + 2 · 6 = 16 numbers, 64 bytes. If the budget is 200, the answer is `(2, 168)`.

# %%
import math


# %%
def choose_rank(
    shapes: list[tuple[int, ...]], budget: int, number: int = 4
) -> tuple[int | None, int]:
    """The best rank whose state fits into the budget, and the bytes of that state."""
    ### BEGIN SOLUTION
    adam = sum(2 * number * math.prod(shape) for shape in shapes)
    if adam <= budget:
        return None, adam
    sides = [sorted(shape) for shape in shapes if len(shape) == 2]
    fixed = sum(2 * number * shape[0] for shape in shapes if len(shape) == 1)
    for rank in range(max(short for short, _ in sides), 0, -1):
        numbers = 0
        for short, long in sides:
            numbers += min(rank, short) * (short + 2 * long)
        if fixed + 4 * numbers <= budget:
            return rank, fixed + 4 * numbers
    return 0, 0
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("measure_rank", choose_rank)
### BEGIN HIDDEN TESTS
points = min(points, check("measure_rank", choose_rank, seed=7341))
### END HIDDEN TESTS
float(points)
