# %% [markdown]
# # Softmax as a kernel
#
# Write a Triton kernel for the softmax of each row of a matrix:
#
# $$p_c = \frac{e^{x_c - m}}{\sum_i e^{x_i - m}}, \qquad m = \max_i x_i$$
#
# One program computes one row. It reads the row into a block of `BLOCK` places, a power of two, which
# is as long as the row or longer. The exercise needs no GPU: the kernel is interpreted, one program
# after the other. Triton exists for Linux only.
#
# What holds for your kernel:
#
# - `x` and `out` point to the first number of a matrix each, both with rows of `width` numbers and
#   with as many rows as there are programs. `width` is at most `BLOCK`.
# - Neighbours in a row lie side by side. From one row to the next it is `x_stride` numbers in `x` and
#   `out_stride` in `out`. Both are at least `width`, and need not be equal.
# - Other numbers may lie before, between and after the rows of `x`. They must not count. Nothing
#   is written outside the rows of `out`. (The check fills all such places, and `out`, with 7.)
# - The numbers may be large, as 1000 or -30000. A row may have places of minus infinity, whose
#   probability is 0. A row of nothing else becomes NaN, as in `torch.softmax`.
# - `x` is float32 or float16, and `out` is float32. All between load and store is computed in
#   float32; in Triton the maximum of a float16 block is float32 already.
# - `x` stays as it is.
#
# A kernel is not stopped where its memory ends. A wrong address can end the whole Python process.

# %%
import os
import sys

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import triton
import triton.language as tl
from torch import Tensor


def softmax(x: Tensor) -> Tensor:
    """Launch the kernel: one program for each row of x (N, C), whose stride is free."""
    out = torch.empty(x.shape, device=x.device)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    softmax_kernel[(rows,)](
        x, out, x.stride(0), out.stride(0), width, BLOCK=block
    )
    return out


# %%
@triton.jit
def softmax_kernel(x, out, x_stride, out_stride, width, BLOCK: tl.constexpr):
    """The softmax of the row whose number is that of the program."""
    ### BEGIN SOLUTION
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = x + row * x_stride + column
    value = tl.load(place, mask=inside, other=-float("inf"))
    e = tl.exp(value - tl.max(value, axis=0))
    p = e / tl.sum(e, axis=0)
    tl.store(out + row * out_stride + column, p, mask=inside)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("softmax_kernel", softmax_kernel)
### BEGIN HIDDEN TESTS
points = min(points, check("softmax_kernel", softmax_kernel, seed=7341))
### END HIDDEN TESTS
float(points)
