# %% [markdown]
# # Bug hunt: the kernel that passed every test
#
# A kernel takes the logits of several texts. For each row it writes the largest logit, and how far
# each logit is from it, 0 for the best and less than 0 for all others:
#
# $$t_r = \max_c x_{rc}, \qquad d_{rc} = x_{rc} - t_r$$
#
# The tests had random numbers of both signs and widths of 64 and 37. All of them passed. They ran in
# the interpreter, which executes one program after the other, row by row.
#
# What users saw later:
#
# - One model has only logits below 0. With 37 of them the largest was 0 in every row, a number that
#   no row has. With 64 it was right.
# - Tensors that have nothing to do with the kernel were changed, by a few numbers at their start.
#
# A reader of the code added that on a GPU, where rows come in any order, the first numbers of a row
# can be wrong as well.
#
# What holds for the fixed kernel:
#
# - `x`, `tops` and `out` point to the first number of each. `x` and `out` have as many rows as there
#   are programs, of `width` numbers, one row right after the other. `tops` has one number for
#   each row. All are float32.
# - `BLOCK` is a power of two, and `width` at most as large.
# - What lies after `x` does not count, and nothing is written after `out` and `tops`. (The check
#   fills all such places, and `out` and `tops`, with 7.)
# - The numbers of a row may all be below 0, as -30000, or the largest may be 0. Some may be minus
#   infinity, but not all. Their distance is minus infinity.
# - `x` stays as it is.
#
# The kernel is interpreted, and no GPU is needed. Triton exists for Linux only.

# %%
import os
import sys

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import triton
import triton.language as tl
from torch import Tensor


def launch(kernel, x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each row of x (N, C), and the distances (N, C) from it."""
    rows, width = x.shape
    tops, out = torch.empty(rows), torch.empty(rows, width)
    block = triton.next_power_of_2(width)
    kernel[(rows,)](x.contiguous(), tops, out, width, BLOCK=block)
    return tops, out


# %%
@triton.jit
def margins_as_found(x, tops, out, width, BLOCK: tl.constexpr):
    """The largest number of a row, and the distance of each number from it."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0)
    top = tl.max(value, axis=0)
    tl.store(tops + row, top)
    tl.store(out + row * width + column, value - top)


# %%
from lm_from_scratch.exercises import check

check("hunt_masked_lanes", margins_as_found)

# %% [markdown]
# Fix it here. There is more than one thing to fix.


# %%
@triton.jit
def margins(x, tops, out, width, BLOCK: tl.constexpr):
    """The largest number of a row, and the distance of each number from it."""
    ### BEGIN SOLUTION
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    value = tl.load(x + place, mask=inside, other=-float("inf"))
    top = tl.max(value, axis=0)
    tl.store(tops + row, top)
    tl.store(out + place, value - top, mask=inside)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_masked_lanes", margins)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_masked_lanes", margins, seed=7341))
### END HIDDEN TESTS
float(points)
