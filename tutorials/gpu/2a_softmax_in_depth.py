r"""
The softmax kernel in depth
===========================

The lesson on `softmax as a kernel <2_softmax.ipynb>`_ ends with a row read in blocks. Is the package's kernel right for
every row: long ones, hidden ones, in half precision, and backward? And how is a missing mask found?

Without a GPU the kernels are interpreted, at small sizes.
"""

# sphinx_gallery_needs = ["2_softmax"]
# sphinx_gallery_words = ["softmax backward", "fused softmax backward", "neutral element", "Triton mask other", "TorchDispatchMode"]

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

import inspect

import matplotlib.pyplot as plt
import numpy as np

from lm_from_scratch.instruments.plot import COLOURS, GREY, figure
from lm_from_scratch.instruments.roofline import GPUS, Cost

ROWS, WIDTH = (5, 300) if DEVICE == "cpu" else (8192, 4000)
INF = float("inf")
torch.manual_seed(0)


def matches(ours, theirs, tolerance=1e-6):
    """Shapes, and numbers within a few roundings of a probability; NaN equals NaN."""
    return ours.shape == theirs.shape and bool(
        torch.allclose(ours, theirs, atol=tolerance, rtol=1e-4, equal_nan=True)
    )


# %%
# What PyTorch moves
# ------------------
#
# The least traffic reads x once and writes p once. Written with elementary functions, PyTorch makes five passes. A mode
# that sees every operation counts their bytes.

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Bytes of all tensors that each operation reads and writes."""

    def __init__(self):
        super().__init__()
        self.passes = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        tensors = [
            leaf
            for leaf in tree_leaves((args, kwargs, result))
            if isinstance(leaf, torch.Tensor)
        ]
        self.passes[operation.__name__] = sum(t.nbytes for t in tensors)
        return result


# %%
# The sizes are 8192 rows of 4096 numbers in bfloat16, on the ``meta`` device.


def five_passes(x):
    m = x.amax(dim=-1, keepdim=True)
    e = torch.exp(x - m)
    return e / e.sum(dim=-1, keepdim=True)


x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
with Traffic() as apart:
    five_passes(x)
with Traffic() as fused:
    torch.softmax(x, dim=-1)
for name, moved in [*apart.passes.items(), *fused.passes.items()]:
    print(f"{name:20} {moved / x.nbytes:.1f} tensors")
cost = Cost(bytes=2 * x.nbytes, operations=7 * x.numel())
moved = sum(apart.passes.values())
print(f"five passes move {moved / cost.bytes:.2f} times the least")
print(f"{cost.intensity:.2f} operations for each byte")
print(f"at least {1e6 * cost.floor(GPUS['H100']):.0f} microseconds on an H100")
assert len(apart.passes) == 5 and 4 <= moved / cost.bytes < 4.01
assert sum(fused.passes.values()) == cost.bytes
assert cost.floor(GPUS["H100"]) == cost.bytes / GPUS["H100"].bandwidth
assert GPUS["H100"].scalar / GPUS["H100"].bandwidth >= 20
assert torch.tensor(89.0).exp().isinf() and torch.tensor(88.0).exp().isfinite()

# %%
# Five passes move 8 tensors, one kernel moves 2, and so does ``torch.softmax``, the reference on this page.
#
# The operations are 7 for a number: comparison, difference, exponential and sum, then difference, exponential and
# quotient. An H100 has time for 20 per byte.
#
# What the padding of a maximum holds
# -----------------------------------
#
# This is the kernel of the lesson, where ``other`` is what the padding holds.


@triton.jit
def row_maximum(x, out, width, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=OTHER)
    tl.store(out + row, tl.max(value, axis=0))


# %%
# Of these three rows, the second has negative numbers only.

x = torch.randn(3, 37, device=DEVICE)
x[1] -= 10  # all numbers of this row are negative
for other in (0.0, -INF):
    out = torch.empty(3, device=DEVICE)
    row_maximum[(3,)](x, out, 37, OTHER=other, BLOCK=64)
    verdicts = (out == x.amax(dim=-1)).tolist()
    print(f"padding {other}: {verdicts}")
    assert verdicts == [True, other != 0, True]

# %%
# Padding with 0 fails in the row of negative numbers: the largest "number" is then the padding.
#
# A row that fits
# ---------------
#
# This is the kernel of the lesson.


@triton.jit
def softmax_of_a_row(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row + column, mask=inside, other=-float("inf"))
    e = tl.exp(value - tl.max(value, axis=0))
    tl.store(out + row + column, e / tl.sum(e, axis=0), mask=inside)


# %%
# The maximum keeps it right where the scores are large: 1000 more changes nothing but rounding.

x = 3 * torch.randn(ROWS, WIDTH, device=DEVICE)
out = torch.empty_like(x)
BLOCK = triton.next_power_of_2(WIDTH)
softmax_of_a_row[(ROWS,)](x, out, WIDTH, BLOCK=BLOCK)
print("matches torch:", matches(out, torch.softmax(x, dim=-1)))
assert matches(out, torch.softmax(x, dim=-1))
softmax_of_a_row[(ROWS,)](x + 1000, out, WIDTH, BLOCK=BLOCK)
expected = torch.softmax(x + 1000, dim=-1)
print("matches torch, 1000 higher:", matches(out, expected))
assert matches(out, expected)

# %%
# The online sum, step by step
# ----------------------------
#
# The kernel of the lesson writes m and :math:`\ell` after each block.


@triton.jit
def online_sum(x, tops, totals, width, BLOCK: tl.constexpr):
    top = -float("inf")
    total = 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        value = tl.load(x + column, mask=inside, other=-float("inf"))
        raised = tl.maximum(top, tl.max(value, axis=0))
        new = tl.sum(tl.exp(value - raised), axis=0)
        total = total * tl.exp(top - raised) + new
        top = raised
        tl.store(tops + start // BLOCK, top)
        tl.store(totals + start // BLOCK, total)


# %%
# A row of 150 numbers in blocks of 16 ends with the maximum and the sum of the row. After each block, the sum is that of
# what was read.

generator = torch.Generator().manual_seed(8)
row = torch.randn(150, generator=generator)
row = (row + torch.linspace(0, 3, 150)).to(DEVICE)
blocks = triton.cdiv(150, 16)
tops, totals = torch.empty(2, blocks, device=DEVICE)
online_sum[(1,)](row, tops, totals, 150, BLOCK=16)
m = row.max()
l = torch.exp(row - m).sum()
print("maximum matches:", bool(tops[-1] == m))
print("sum matches:", matches(totals[-1], l))
assert tops[-1] == m and matches(totals[-1], l)
known = torch.stack([row[: 16 * (i + 1)].exp().sum() for i in range(blocks)])
print("each step matches:", matches(totals * tops.exp(), known, 1e-3))
assert matches(totals * tops.exp(), known, 1e-3)

# %%
# How do both grow?

falls, rises = totals.diff() < 0, tops.diff() > 0
assert falls.any() and rises[falls].all()

steps = range(1, blocks + 1)
made, axes = figure(8.0, 3.0, columns=2)
axes[0].plot(row.cpu(), ".", color=GREY, label="row")
axes[0].step(
    [16 * i for i in range(blocks + 1)],
    [*tops.tolist(), tops[-1].item()],
    where="post",
    color=COLOURS[0],
    label="m",
)
axes[0].set(title="maximum so far", xlabel="place in the row", ylabel="x")
axes[0].legend(frameon=False)
axes[1].plot(steps, totals.cpu(), "o-", color=COLOURS[3])
axes[1].set(title="sum relative to it", xlabel="blocks read", ylabel="ℓ")
plt.show()

# %%
# On the right, :math:`\ell` falls only where m rises. Elsewhere it grows. After each block, :math:`\ell \, e^{m}` is the plain sum of what was
# read. Attention over long contexts rests on the same correction, and so does the loss over a large vocabulary.
#
# Minus infinity in the input
# ---------------------------
#
# Attention sets the scores of hidden keys to minus infinity. A whole block of a row may be hidden. If it is the first,
# m is still :math:`-\infty`, and :math:`x - m = -\infty + \infty` is not a number. The lesson shows it, and so does the museum.
#
# The package lets m start at the lowest finite number of float32 instead. Then :math:`e^{-\infty - m} = 0` as it should be.
# A row in which *all* is hidden has the sum 0, and 0/0 gives NaN, which is what PyTorch returns for it as well.

from lm_from_scratch.kernels.softmax import (
    softmax,
    softmax_backward_kernel,
    softmax_kernel,
)

# %%
# Its source:

print(inspect.getsource(softmax_kernel.fn))

# %%
# Three more things are new.
#
# * The number of the program becomes a 64-bit number before it is multiplied.
# * The second loop reads the row again. The program has just read it, so it comes from a cache and not from
#   memory, as long as the rows at work fit there. The count stays at 2 tensors.
# * One kernel serves both cases. For a row that fits, each loop runs once.
#
# The gradient
# ------------
#
# Let :math:`p'` be the gradient of the result. Each p depends on each x of its row, by :math:`\partial p_i / \partial x_c =
# p_i (\delta_{ic} - p_c)`. Summed up over i:
#
# .. math::
#
#    \frac{\partial L}{\partial x_c} = p_c \Bigl( p'_c - \sum_i p_i \, p'_i \Bigr)
#
# The sum is a mean of :math:`p'`, weighted by the probabilities. So the backward pass is one more reduction of a row. It
# needs p and not x: PyTorch may free x as soon as the forward pass is over.

print(inspect.getsource(softmax_backward_kernel.fn))

# %%
# Value, gradient, and what autograd keeps, against PyTorch:

x = (3 * torch.randn(ROWS, WIDTH, device=DEVICE)).requires_grad_()
upstream = torch.randn(ROWS, WIDTH, device=DEVICE)
p = softmax(x)
saved = p.grad_fn.saved_tensors
(ours,) = torch.autograd.grad(p, x, upstream)
expected = torch.softmax(x, dim=-1)
(theirs,) = torch.autograd.grad(expected, x, upstream)
print("matches torch:", matches(p, expected))
print("gradient matches torch:", matches(ours, theirs, 5e-6))
print("only the result is kept:", len(saved) == 1 and torch.equal(saved[0], p))
assert matches(p, expected) and matches(ours, theirs, 5e-6)
assert len(saved) == 1 and torch.equal(saved[0], p)

# %%
# Correct
# -------
#
# The package's function against ``torch.softmax``: odd sizes, a row of several blocks, layouts, hidden places, float16.


def same(x, tolerance=1e-6):
    results = []
    for function in (softmax, lambda t: torch.softmax(t, dim=-1)):
        leaf = x.detach().requires_grad_()
        p = function(leaf)
        one_row = torch.linspace(-1, 1, x.shape[-1], device=DEVICE).to(x.dtype)
        grads = [
            torch.autograd.grad(p, leaf, upstream, retain_graph=True)[0]
            for upstream in (p.detach().cos(), one_row.expand_as(p))
        ]
        results.append([p.detach(), *grads])
    return all(matches(a, b, tolerance) for a, b in zip(*results))


hidden = torch.randn(4, 5000, device=DEVICE)
hidden[0, :4500] = hidden[1, 100:] = hidden[2, ::2] = hidden[3] = -INF
verdicts = {
    "one number": same(torch.randn(3, 1, device=DEVICE)),
    "odd sizes": same(torch.randn(2, 3, 37, device=DEVICE)),
    "several blocks": same(torch.randn(2, 9001, device=DEVICE)),
    "transposed": same(torch.randn(37, 5, device=DEVICE).T),
    "float16": same(torch.randn(5, 37, device=DEVICE).half(), 1e-3),
    "scores of 30000": same(30000 * torch.randn(5, 37, device=DEVICE)),
}
with np.errstate(invalid="ignore"):  # the last row is 0/0
    verdicts["hidden places"] = same(hidden)
    all_hidden = bool(softmax(hidden)[3].isnan().all())
for name, verdict in verdicts.items():
    print(f"{name}: {verdict}")
print("NaN where all is hidden:", all_hidden)
assert all(verdicts.values()) and all_hidden

# %%
# Bug museum
# ----------
#
# The first block is hidden
# ~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A running maximum that starts at minus infinity, where the first block sees nothing: NaN. (M25)
#
# The online sum above starts m at minus infinity. These two rows hold the same numbers. In the second one, the hidden
# places come first.

last = torch.full((37,), -INF, device=DEVICE)
last[:10] = torch.randn(10, device=DEVICE)
first = last.roll(-10)  # hidden, then ten numbers
verdicts = []
for name, row in (("hidden places last", last), ("first", first)):
    tops, totals = torch.empty(2, 3, device=DEVICE)
    with np.errstate(invalid="ignore"):
        online_sum[(1,)](row, tops, totals, 37, BLOCK=16)
    l = torch.exp(row - row.max()).sum()
    verdicts.append(matches(totals[-1], l))
    print(
        f"{name}, sum matches: {verdicts[-1]}, NaN: {bool(totals[-1].isnan())}"
    )
assert verdicts == [True, False] and totals[-1].isnan()
print("package matches torch:", matches(softmax(first), first.softmax(-1)))
assert matches(softmax(first), first.softmax(-1))

# %%
# Causal masks hide the *end* of a row, so the fault sleeps until somebody adds left padding or a sliding window. The fixed line is
# ``top = LOWEST``. The check is a test with hidden blocks at the beginning, in the middle and at the end, with a block
# size small enough that there are such blocks.
#
# The load without a mask
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# Odd widths add numbers of the next row. (M26)
#
# A load without a mask does not crash here, since each row is followed by the next. Only the last one is followed by
# something else.


@triton.jit
def softmax_without_a_mask(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0) * width
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row + column)
    e = tl.exp(value - tl.max(value, axis=0))
    total = tl.sum(e, axis=0)
    tl.store(out + row + column, e / total, mask=column < width)


for width in (64, 37):
    memory = torch.full((3 * width + 64,), torch.nan, device=DEVICE)
    rows = memory[: 3 * width].view(3, width)
    rows.copy_(torch.randn(3, width))
    out = torch.empty_like(rows)
    softmax_without_a_mask[(3,)](rows, out, width, BLOCK=64)
    right = matches(out, torch.softmax(rows, dim=-1))
    nan = out.isnan().any(dim=-1).tolist()
    one = matches(out[:2].sum(dim=-1), torch.ones(2, device=DEVICE), 1e-2)
    print(f"width {width}, matches torch: {right}")
    print(f"  rows with NaN: {nan}, the first two sum to 1: {one}")
    assert right == one == (width == 64)
    assert nan == [False, False, width != 64]

# %%
# With a width of 64 everything is right. With 37, the next row is added to the sums of the first two. Their results are
# too small, and still look like probabilities. What makes the fault loud is the NaN after the last row.
#
# The fixed line has ``mask=`` and ``other=``. The checks are odd widths, and inputs that lie in a memory full of NaN.
#
# Which sentence is false?
# ------------------------
#
# 1. Five passes move four times the bytes of one kernel.
# 2. Adding 1000 to a row does not change its softmax by more than rounding allows.
# 3. The sum relative to the maximum so far never falls.
# 4. The result of a softmax is enough to compute the gradient.

x = torch.randint(-9, 9, (3, 37), device=DEVICE).float()  # 1000 more is exact
row = torch.zeros(32, device=DEVICE)
row[16] = 9.0  # the second block raises the maximum from 0 to 9
tops, totals = torch.empty(2, 2, device=DEVICE)
online_sum[(1,)](row, tops, totals, 32, BLOCK=16)
answers = [
    4 <= moved / cost.bytes < 4.01,
    matches(softmax(x + 1000), softmax(x)),
    bool(totals[1] >= totals[0]),
    len(saved) == 1 and torch.equal(saved[0], p),
]
print(answers)
assert answers == [True, True, False, True]

# %%
# The third is false: 16 zeros have the sum 16, and relative to a later 9 the same 16 numbers are worth :math:`16 \, e^{-9}`.
#
# Exercises
# ---------
#
# 1. *Easy.* Write the kernel with two loops for the statistics, one for the maximum and one for the sum. A right answer counts the
#    operations of both forms for each number, and says which of its reads the caches must serve. Hint: the online
#    form has 4 + 3.
# 2. *Hard.* Take the kernel apart for one row of a million numbers: the first launch writes m and :math:`\ell` of each part of the row,
#    the second joins them and writes p. A right answer has many programs for a single row. Hint: the correction joins two parts as
#    it joins two blocks.
#
# Summary
# -------
#
# * A maximum that starts at minus infinity makes NaN of a row whose first block is hidden. It starts at the lowest finite number.
# * The backward pass is a weighted mean, and keeps the result only.
# * Without a mask, odd widths add numbers of the next row, and the results still look like probabilities.
#
# Sources
# -------
#
# * Milakov, Gimelshein: `Online normalizer calculation for softmax <https://arxiv.org/abs/1805.02867>`_, 2018.
# * The `fused softmax <https://triton-lang.org/main/getting-started/tutorials/02-fused-softmax.html>`_ of the Triton tutorials, for rows that fit.
# * Dao et al.: `FlashAttention <https://arxiv.org/abs/2205.14135>`_, 2022. The online sum inside attention.

print("all checks passed")
