r"""
RMSNorm: a gradient from all programs
=====================================

Train a model twice from the same seed, on one GPU, and you may get two models. One reason is a sum: the gradient of a
norm's weight adds up all tokens, and the programs that add need not finish in the same order.

On this page programs work together, and get the same bits in every run. First, here is how they share the work. Each
program has two rows, and the mask has two parts: one for columns, one for rows.
"""

# sphinx_gallery_needs = ["2_softmax", "../2_qwen2/1_rms_norm"]
# sphinx_gallery_words = ["triton RMSNorm", "fused RMSNorm", "LayerNorm kernel", "atomic_add", "Liger-Kernel", "deterministic", "race condition", "reproducible training"]
from lm_from_scratch.drawings import gpu_programs as drawings

drawings.row_blocks(rows=5, width=6, rows_of_a_block=2, block=8)

# %%
# Rows in a block
# ---------------
#
# Forward, the work is like that of a softmax: a program reduces its row to one number, and scales the row with it.
# `RMSNorm <../2_qwen2/1_rms_norm.ipynb>`_ divides each row by its root mean square, and multiplies by a weight. With C
# features, w the weight, and r one number for each row,
#
# .. math::
#
#    r &= \frac{1}{\sqrt{\frac{1}{C} \sum_c x_c^2 + \epsilon}} \\
#    y_c &= x_c \, r \, w_c

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# %%
# A row of a small model is short, and a program with a single row would have little to do. So each takes a table of
# several rows. Its offsets combine a *column* of row numbers, ``[:, None]``, with a *row* of column numbers,
# ``[None, :]``: as in PyTorch's broadcasting, each of the first meets each of the second.


@triton.jit
def forward_step(
    x, weight, out, rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    offsets = row[:, None] * width + column[None, :]  # (ROWS, BLOCK)
    value = tl.load(x + offsets, mask=inside, other=0.0)
    w = tl.load(weight + column, mask=column < width, other=0.0)
    mean_square = tl.sum(value * value, axis=1) / width  # (ROWS,)
    r = tl.rsqrt(mean_square + eps)
    tl.store(out + offsets, value * r[:, None] * w[None, :], mask=inside)


# %%
# ``axis=1`` adds up each row, and ``tl.rsqrt`` is one over the square root. The padding holds 0, which is neutral for a
# sum of squares. The mean divides by ``width``, the number of real features, and not by the size of the block.
#
# For real numbers, our small Qwen2 reads a sentence, and one backward pass follows. Of its first norm we keep x, the
# result y, and the gradients of y and of the weight. (``retain_grad`` keeps a gradient that PyTorch would throw away.)

import torch.nn.functional as F

from lm_from_scratch.checkpoint.weights import load_shipped

model, tokenizer = load_shipped("qwen2-docs")
norm = model.model.layers[0].input_layernorm
kept = {}


def keep(norm, inputs, y):
    y.retain_grad()
    kept.update(x=inputs[0][0], y=y)


norm.register_forward_hook(keep)
ids = torch.tensor([tokenizer.start("If the file does not exist, an")])
F.cross_entropy(model(ids)[0, :-1], ids[0, 1:]).backward()
x, y = kept["x"].detach().to(DEVICE), kept["y"].detach()[0].to(DEVICE)
upstream = kept["y"].grad[0].to(DEVICE)  # the gradient of y
weight = norm.weight.detach().to(DEVICE)

# %%
# 9 tokens with 128 features each make 5 programs. The last has one row.


def matches(ours, theirs):
    return bool((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max())


N, C = x.shape  # 9, 128
size = dict(ROWS=2, BLOCK=triton.next_power_of_2(C))
programs = triton.cdiv(N, 2)
out = torch.empty_like(x)
forward_step[(programs,)](x, weight, out, N, C, 1e-6, **size)
print(f"{programs} programs, matches torch: {matches(out, y)}")

assert (N, C, programs) == (9, 128, 5) and matches(out, y)

# %%
# The weight has a gradient
# -------------------------
#
# One weight serves all rows, so its gradient is a sum over all rows. With :math:`y'` the gradient of y,
#
# .. math::
#
#    w'_c = \sum_{\text{rows}} y'_c \, x_c \, r
#
# Each program has a part of this sum, and all add their parts to one vector. With a load, an addition and a store, two
# programs could load the same old value, and one part would be lost: a *race*.
#
# An *atomic* addition does the three in one step that no other program can interrupt, so nothing is lost.


@triton.jit
def grad_weight_atomic(
    grad, x, inverse, grad_w, rows, width, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    offsets = row[:, None] * width + column[None, :]
    r = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
    h = tl.load(x + offsets, mask=inside, other=0.0) * r
    dy = tl.load(grad + offsets, mask=inside, other=0.0)
    part = tl.sum(dy * h, axis=0)  # (BLOCK,)
    tl.atomic_add(grad_w + column, part, mask=column < width)


# %%
# ``inverse`` holds r, one number for each row.

inverse = torch.rsqrt(x.square().mean(dim=-1) + 1e-6)
expected = norm.weight.grad.to(DEVICE)
grad_w = torch.zeros_like(weight)
grad_weight_atomic[(programs,)](upstream, x, inverse, grad_w, N, C, **size)
print("atomic sum matches torch:", matches(grad_w, expected))

assert matches(grad_w, expected)

# %%
# So it is right. Where is the catch? Programs add in the order in which they happen to finish.
#
# **Predict first.** Three programs add 100 million, minus 100 million, and 1, in float32. What are (a + b) + c and
# a + (b + c)?
#
# * 1 and 1
# * 1 and 0
# * 0 and 0

a, b, c = torch.tensor([1e8, -1e8, 1.0])
print(((a + b) + c).item(), (a + (b + c)).item())

assert (a + b) + c == 1 and a + (b + c) == 0
assert a.nextafter(2 * a) - a == 8

# %%
# 1 and 0. Near 100 million, float32 numbers are 8 apart, so minus 100 million plus 1 is rounded back. A sum depends on
# its order.
#
# On a GPU, the last bits of an atomic sum may differ from run to run. Two training runs from one seed drift apart, and you
# cannot tell a bug from noise. Triton's interpreter does not show it: its programs run in a fixed order. The in-depth
# page on SwiGLU says `what else it hides <1a_swiglu_in_depth.ipynb>`_.
#
# Partial sums
# ------------
#
# The remedy is a *fixed number* of programs. Each walks over many blocks of rows, keeps its sum in registers, and in the
# end writes it into a row of its own. PyTorch adds up these partial rows, always in the same order.

drawings.sums_across(blocks=6, programs=3)

# %%
# Program i takes the blocks i, i + P, i + 2P and so on, where P is the number of programs. So ``range`` begins at the
# first row of block i, ends at the last row, and steps over P blocks. The rest is as before.


@triton.jit
def grad_weight_partial(
    grad, x, inverse, partial, rows, width, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i, P = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(i * ROWS, rows, P * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        offsets = row[:, None] * width + column[None, :]
        r = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        h = tl.load(x + offsets, mask=inside, other=0.0) * r
        dy = tl.load(grad + offsets, mask=inside, other=0.0)
        total += tl.sum(dy * h, axis=0)
    tl.store(partial + i * width + column, total, mask=column < width)


# %%
# Three programs for our five blocks, twice:


def grad_weight():
    partial = torch.empty(3, C, device=DEVICE)
    grad_weight_partial[(3,)](upstream, x, inverse, partial, N, C, **size)
    return partial.sum(dim=0)


first, second = grad_weight(), grad_weight()
print("matches torch:", matches(first, expected))
print("same bits at each run:", torch.equal(first, second))

assert matches(first, expected) and torch.equal(first, second)

# %%
# In the interpreter the second line proves little, because the atomic sum has the same bits each time, too. The kernel
# proves it: no two programs write to the same place, so there is no race, and no order that could change.
#
# How many programs?
# ------------------
#
# Too few leave processors of the GPU idle. Each partial row is written and read once, in float32. The backward pass
# itself moves 3 tensors: it reads x and :math:`y'`, and writes the gradient of x.
#
# **Predict first.** Take 8192 tokens of Qwen2-0.5B in bfloat16, and one program for each token. How much do the partial
# rows add to the bytes of the backward pass?
#
# * less than 1 %
# * about 10 %
# * more than the pass itself moves

rows, width = 8192, 896
least = 3 * 2 * rows * width  # bytes
for programs in (rows, 512):
    extra = 2 * 4 * programs * width / least
    print(f"{programs} programs: {extra:.0%} more bytes")
    assert extra < 0.09 if programs == 512 else extra > 1

# %%
# More than the pass itself. The package starts at most 512 programs, whatever the GPU, so that every machine splits the
# sums in the same way. Its function also has the gradient of x, and works with *autograd*, the part of PyTorch that
# computes gradients.

from lm_from_scratch.kernels.norm import rms_norm

w = weight.clone().requires_grad_()
rms_norm(x, w).backward(upstream)
print("package matches torch:", matches(w.grad, expected))

assert matches(w.grad, expected)

# %%
# Forward, memory decides, as it does for softmax.

from lm_from_scratch.instruments.roofline import Cost, show

show("rms_norm", Cost(bytes=2 * 2 * rows * width, operations=4 * rows * width))

# %%
# In depth: `rounding, the gradient of x, and a gradient that somebody else needs <3a_rms_norm_in_depth.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* Divide by ``BLOCK`` instead of ``width`` in ``forward_step``. A right answer names widths for which no test
#    notices. Hint: which widths leave no padding?
# 2. *Medium.* Add the residual: one kernel for :math:`s = x + z` and the norm of s, which returns both. A right
#    answer counts tensors with and without it, and its backward adds a second incoming gradient. Hint: 4 tensors instead of 5.
#
# Summary
# -------
#
# * A block can hold several rows. Its mask has a part for rows and one for columns.
# * Atomic additions lose nothing and have no fixed order. Float sums depend on order, so their last bits vary.
# * Partial sums of a fixed number of programs give the same bits at each run, for less than a tenth more traffic.
