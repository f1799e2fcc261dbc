r"""
Softmax: a row in one program
=============================

SwiGLU treats each number alone. In a softmax, every number needs two things of its row: the largest number, and a
sum over all of them. So a program gets a whole row.

Here are the scores of one attention head: how well does each word fit the words before it? (⊢ is the start of the
text.) Later words are hidden by minus infinity. Each program reads one row of 9 numbers. But the size of a block is a
power of two, here 16. What should the other 7 places hold?
"""

# sphinx_gallery_needs = ["1_swiglu", "../3_attention/1_attention"]
# sphinx_gallery_words = ["fused softmax", "triton softmax", "online softmax", "tl.max", "tl.sum", "next_power_of_2", "other=-inf"]
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import gpu_programs as drawings
from lm_from_scratch.instruments.plot import attention_maps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_grad_enabled(False)
model, tokenizer = load_shipped("gpt2-docs")
ids = torch.tensor([tokenizer.start("If the file does not exist, an")])
weights = attention_maps(model, ids)[0][0, 0].to(DEVICE)  # (9, 9)
scores = weights.log()  # their softmax is these weights

words = ["⊢", *tokenizer.pieces(ids[0].tolist())[1:]]
INF = float("inf")
assert ((scores == -INF).cpu() == torch.ones(9, 9).triu(1).bool()).all()
drawings.row_programs(scores.tolist(), words, 16)

# %%
# Count first
# -----------
#
# The scores of a row are x, the softmax makes weights p of them, and m is the largest of the scores:
#
# .. math::
#
#    p_c = \frac{e^{x_c - m}}{\ell}, \qquad \ell = \sum_i e^{x_i - m}
#
# Without m the result would be the same on paper. But in float32 an exponential overflows above 88, and with m the
# largest exponent is 0.
#
# (The code above takes logarithms of the weights of the head. These are its scores, all shifted by one number in each
# row, which a softmax does not notice.)
#
# One kernel reads x and writes p: 2 tensors move. Written with PyTorch's elementary functions, it is five passes:
# maximum, difference, exponential, sum and quotient. Each reads its input from memory, and writes its result there.
#
# **Predict first.** How many tensors do the five passes move? One number for each row, as m is, counts as nothing.
#
# * 3
# * 5
# * 8

reads_and_writes = {
    "m = x.amax(-1)": 1,  # m has one number a row: almost nothing
    "d = x - m": 2,
    "e = d.exp()": 2,
    "l = e.sum(-1)": 1,
    "p = e / l": 2,
}
print(sum(reads_and_writes.values()), "tensors")

assert sum(reads_and_writes.values()) == 8
assert torch.tensor(89.0).exp().isinf() and torch.tensor(88.0).exp().isfinite()

# %%
# Eight, four times as much as needed. ``torch.softmax`` is one fused kernel already: nothing can move less, and ours can
# only draw level.
#
# The maximum of a row
# --------------------
#
# ``tl.max`` *reduces* a block to one number. In ``tl.load``, ``other`` says what the masked places hold.


@triton.jit
def row_maximum(x, out, width, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=OTHER)
    tl.store(out + row, tl.max(value, axis=0))


# %%
# **Predict first.** The padding holds 0. Below the first row all our scores are negative: they are logarithms of weights
# below 1. Which of these rows get the right maximum?
#
# * all of them
# * none of them
# * only the last

found = torch.empty(9, device=DEVICE)
for other in (0.0, -INF):
    row_maximum[(9,)](scores, found, 9, OTHER=other, BLOCK=16)
    right = int((found == scores.amax(dim=-1))[1:].sum())
    print(f"padding {other}: {right} of 8 rows are right")
    assert right == (8 if other else 0)

# %%
# None: the largest "number" is the padding. (The first row does not count, because its only score is 0.)
#
# So padding must hold the *neutral* number of the reduction, which changes nothing. For a sum it is 0, for a maximum
# minus infinity. For softmax as a whole, minus infinity is neutral too: :math:`e^{-\infty} = 0` adds nothing to the sum.
#
# A row that fits
# ---------------
#
# The rest follows the formula. All five passes happen in registers, between one load and one store.


@triton.jit
def softmax_of_a_row(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row + column, mask=inside, other=-float("inf"))
    e = tl.exp(value - tl.max(value, axis=0))
    tl.store(out + row + column, e / tl.sum(e, axis=0), mask=inside)


ours = torch.empty_like(scores)
BLOCK = triton.next_power_of_2(9)  # 16
softmax_of_a_row[(9,)](scores, ours, 9, BLOCK=BLOCK)
print("the weights of the model:", torch.allclose(ours, weights, atol=1e-5))

assert BLOCK == 16 and torch.allclose(ours, weights, atol=1e-5)
assert 4096 / 128 == 32 and 65_536 / 128 == 512

# %%
# Our kernel gives the weights with which GPT-2 attends. For most rows this is all you need.
#
# Its limit is the number of registers. The work of a program is shared by *threads*, 128 unless you ask for more, and a
# thread has at most 255 registers. A row of 4096 numbers takes 32 of each thread. One of 65,536 would take 512: what
# does not fit goes to memory and back.
#
# A row in blocks
# ---------------
#
# A longer row is read block by block. But the sum needs the maximum, and the maximum is known only at the end. The
# *online* sum of the lesson on `attention in tiles <../3_attention/1_attention.ipynb>`_ is kept relative to the maximum
# so far. When a block B raises it from m to :math:`m'`, all that was summed is too large by one factor:
#
# .. math::
#
#    \ell' = e^{m - m'} \ell + \sum_{i \in B} e^{x_i - m'}
#
# Step through a row of 12 numbers in blocks of 4.

row = [0.5, 1.0, -0.5, 0.0, 0.8, 2.0, 1.5, -1.0, 3.0, 0.5, 1.0, 2.5]
drawings.online_sum_frames(row, 4, first=1)

# %%
# The sum may *fall*, where m rises. Here is the loop: ``top`` is m, ``raised`` is :math:`m'`, and ``total`` is
# :math:`\ell`. It stores m and :math:`\ell` after each block, so that we can look.


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
# We try it on a long row: the scores of all 4096 tokens for the next word, in blocks of 512.

logits = model(ids)[0, -1].to(DEVICE)  # (4096,)
tops, totals = torch.empty(2, 8, device=DEVICE)
online_sum[(1,)](logits, tops, totals, 4096, BLOCK=512)
best = logits.argmax()
p = torch.exp(logits[best] - tops[-1]) / totals[-1]
print(f"{tokenizer.pieces([best.item()])}: {p:.2f}")

assert torch.allclose(p, logits.softmax(-1)[best])
assert tops[-1] == logits.max()
assert torch.allclose(tops[-1] + totals[-1].log(), logits.logsumexp(-1))

# %%
# One pass over the row gives the probability of the next word. (The probabilities of all 4096 tokens need a second pass,
# which divides.)
#
# The first block is hidden
# -------------------------
#
# Attention hides keys by minus infinity. With a causal mask, these are at the end of a row. In a batch with padding on
# the left, some are at the *beginning*.
#
# **Predict first.** Two rows hold the same ten scores and 27 hidden places: in one they come last, in the other first.
# The kernel has blocks of 16. Which sums does it find?
#
# * the right one, both times
# * the second one is 0
# * the second one is NaN

import numpy as np

ten = torch.tensor([1.0, 2, 0, 1, -1, 3, 0, 2, 1, 0])
hidden = torch.full((27,), -INF)
for parts in ((ten, hidden), (hidden, ten)):
    tops, totals = torch.empty(2, 3, device=DEVICE)
    with np.errstate(invalid="ignore"):  # NumPy would warn of NaN
        online_sum[(1,)](
            torch.cat(parts).to(DEVICE), tops, totals, 37, BLOCK=16
        )
    print(f"sum: {totals[-1]:.2f}")
    assert totals[-1].isnan() == (parts[0] is hidden)

# %%
# NaN: *not a number*. After the hidden block m is still :math:`-\infty`, and :math:`x - m = -\infty + \infty` has no
# value. Under a causal mask alone the bug sleeps, until somebody pads on the left.
#
# In the package's kernel, m starts at the lowest finite number instead. Then :math:`e^{-\infty - m}` is 0, as it should be.

from lm_from_scratch.kernels.softmax import softmax

row = torch.cat((hidden, ten)).to(DEVICE)
print("package sums to 1:", bool((softmax(row).sum() - 1).abs() < 1e-5))

assert torch.allclose(softmax(row), row.softmax(-1), atol=1e-6)

# %%
# How fast can it be? Softmax is on the slope of the roof too, so bytes decide. ``torch.softmax`` has the same limit, and
# the five passes move four times as much.

from lm_from_scratch.instruments.roofline import Cost, show

n = 8192 * 4096  # numbers
show("softmax", Cost(bytes=2 * 2 * n, operations=7 * n))

# %%
# In depth: `the gradient, the package's kernel, and a missing mask <2a_softmax_in_depth.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* Write a kernel for ``torch.logsumexp(x, dim=-1)``. A right answer equals it on rows of several blocks, with hidden
#    places in front. Hint: it is m plus a logarithm.
# 2. *Medium.* A row of 64 numbers gives each of 128 threads half a number. Let a program take several rows, as a block of shape
#    (rows, columns). A right answer equals the reference when the number of rows is odd. Hint: ``tl.max(value, axis=1)``, and a mask with two parts.
#
# Summary
# -------
#
# * A program reduces its row in registers. Five passes move 8 tensors, one kernel moves 2.
# * Padding holds the neutral number of the reduction: 0 for a sum, minus infinity for a maximum.
# * The online sum goes once through a row of any length, and corrects itself by :math:`e^{m - m'}`. Its maximum starts at
#   the lowest finite number.
