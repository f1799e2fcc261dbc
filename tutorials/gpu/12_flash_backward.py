r"""
The backward pass of attention: compute it again
================================================

The gradient of attention needs the attention weights, and `flash attention <10_flash_attention.ipynb>`_ has not kept
them. So the backward pass computes them again, tile by tile. The gradient of a key is a sum over all queries that see it,
and one program should add it up. In this picture a program keeps a tile of *keys*, and the queries pass by.
"""

# sphinx_gallery_needs = ["10_flash_attention"]
# sphinx_gallery_words = ["FlashAttention backward", "dQ dK dV", "recomputation", "softmax_lse"]

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import gpu_tiles as drawings

model, tokenizer = load_shipped("gpt2-docs")
ids = tokenizer.start("Return the number of items in a container.")
pieces = ["⊢", *tokenizer.pieces(ids)[1:]]  # the start of the text
drawings.causal_tiles(pieces, 4, keeps="keys", first=0)

# %%
# Compare it with the picture of the forward pass: the same scores are used, but a program now has columns, and not
# rows. Early keys have the most work. Orange scores are masked: the query is earlier than the key, or the text has ended.
#
# Keep the weights, or compute them again
# ---------------------------------------
#
# **Predict first.** A layer of Qwen2-0.5B reads 8,192 tokens, on an H100. If the weights had been kept, with 2 bytes each,
# the backward pass could read them. If not, it multiplies queries and keys once more. Which is faster, and by how much?
#
# * reading is four times as fast
# * both take about the same time
# * computing is four times as fast

from lm_from_scratch.instruments.roofline import GPUS

H, D, T, TILE = 14, 64, 8192, 64
visited = sum(range(1, T // TILE + 1))  # tiles on and below the diagonal
product = 2 * H * visited * TILE * TILE * D  # operations
kept = 2 * H * visited * TILE * TILE  # bytes of the weights in those tiles
again = product / GPUS["H100"].matrix
read = kept / GPUS["H100"].bandwidth
print(f"scores once more: {1e6 * again:.0f} microseconds of an H100's products")
print(f"weights read: {1e6 * read:.0f} microseconds of its memory")

assert 4 < read / again < 5

# %%
# Computing is more than four times as fast, and needs no memory. This is one of the few places in programming where it is
# faster to throw a result away and make it again.
#
# A real gradient
# ---------------
#
# To compare with, we take a real gradient. The shipped GPT-2 reads a docstring, and PyTorch computes the gradient of its
# loss. We keep what enters and leaves the attention of the last layer, and the gradients of these tensors. The 33 tokens
# are two tiles of 16, and a third with one token.

import os

import torch
import torch.nn.functional as F

from lm_from_scratch.attention.kinds import attention_layers
from lm_from_scratch.attention.sdpa import sdpa_attention

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
text = (
    "Return the number of items in a container, which is 0 if it is empty. "
    "Items that occur more than once are counted each time."
)
idx = torch.tensor([tokenizer.start(text)], device=DEVICE)

# %%
# ``retain_grad`` keeps the gradient of a tensor in the middle of a model.

seen = []


def keep(q, k, v, visibility, dropout=0.0):  # each (1, H, T, D)
    seen.extend([q, k, v, sdpa_attention(q, k, v, visibility)])
    for x in seen:
        x.retain_grad()
    return seen[-1]


attention_layers(model.to(DEVICE))[-1].attend = keep
F.cross_entropy(model(idx)[0, :-1], idx[0, 1:]).backward()
q, k, v, out = (x.detach().contiguous() for x in seen)
dq, dk, dv, do = (x.grad.contiguous() for x in seen)

assert q.shape == (1, 4, 33, 32)

# %%
# One number brings back a row
# ----------------------------
#
# The forward pass keeps one number for each query t: the log-sum-exp L of its scores :math:`s_{ts}`, over the keys s. It is
# all that a weight needs besides its own score:
#
# .. math::
#
#    P_{ts} = \frac{e^{s_{ts}}}{\sum_j e^{s_{tj}}} = e^{s_{ts} - L_t}, \qquad L_t = \log \sum_j e^{s_{tj}}
#
# So any tile of scores becomes a tile of weights, without its neighbours. Here are queries 16 to 31 and keys 0 to 15.


def same(ours, theirs, atol=1e-5):
    return torch.allclose(ours, theirs, rtol=0, atol=atol)


T, D = q.shape[2:]
hidden = torch.ones(T, T, device=DEVICE).triu(1).bool()
scores = (q @ k.mT * D**-0.5).masked_fill(hidden, -torch.inf)
lse = scores.logsumexp(-1)  # (1, H, T)
weights = (scores[:, :, 16:32, :16] - lse[:, :, 16:32, None]).exp()
print("a tile of weights:", same(weights, scores.softmax(-1)[..., 16:32, :16]))

assert same(weights, scores.softmax(-1)[..., 16:32, :16])

# %%
# Write O for the result of attention, and dX for the gradient of the loss with respect to X. So dS is the gradient of
# the scores, and :math:`dO_t \cdot v_s` is dP, the gradient of a weight. The `gradient of a softmax
# <2a_softmax_in_depth.ipynb>`_ subtracts a mean over *all* keys of the row, weighted by P. This mean is called delta.
# Must a tile wait for it?
#
# .. math::
#
#    dS_{ts} = P_{ts} \, (dO_t \cdot v_s - \delta_t), \qquad
#    \delta_t = \sum_j P_{tj} \, (dO_t \cdot v_j) = dO_t \cdot O_t
#
# It need not. The last step holds because :math:`O_t` is the mean of the values, :math:`\sum_j P_{tj} v_j`. So delta is a sum
# over the D features of a query, known before the loop begins, and no keys are needed.

delta = (do * out).sum(-1)
mean = (scores.softmax(-1) * (do @ v.mT)).sum(-1)
print("delta is the mean:", same(delta, mean))

assert same(delta, mean)

# %%
# A tile of gradients
# -------------------
#
# With L and delta no tile needs another one. The helpers read and write rows of a matrix.


@triton.jit
def tile_of(x, start, n, D: tl.constexpr, ROWS: tl.constexpr):
    row = start + tl.arange(0, ROWS)[:, None]
    return tl.load(x + row * D + tl.arange(0, D), mask=row < n, other=0.0)


@triton.jit
def put(tile, x, start, n, D: tl.constexpr, ROWS: tl.constexpr):
    row = start + tl.arange(0, ROWS)[:, None]
    tl.store(x + row * D + tl.arange(0, D), tile, mask=row < n)


# %%
# This one makes P and dS of a tile, from two products. There is no running maximum, no sum and nothing to repair: these
# weights are final.


@triton.jit
def gradient_of_scores(
    q_tile, k_tile, v_tile, do_tile, lse, delta, first_t, first_s, T,
    BLOCK: tl.constexpr,
):  # fmt: skip
    t = first_t + tl.arange(0, BLOCK)
    s = first_s + tl.arange(0, BLOCK)
    row_lse = tl.load(lse + t, mask=t < T, other=0.0)
    row_delta = tl.load(delta + t, mask=t < T, other=0.0)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    scores = tl.where(s[None, :] <= t[:, None], scores, -float("inf"))
    p = tl.exp(scores - row_lse[:, None])
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
    return p, p * (dp - row_delta[:, None])


# %%
# One program for each tile of keys
# ---------------------------------
#
# The program keeps its keys and values. Queries pass by, from the diagonal to the last one. For each tile of them the
# program adds :math:`P^\top dO` to dV and :math:`dS^\top Q` to dK.


@triton.jit
def dk_dv_of_a_tile(
    q, k, v, do, lse, delta, dk, dv, T, D: tl.constexpr, BLOCK: tl.constexpr
):
    start, head = tl.program_id(0) * BLOCK, tl.program_id(1) * T
    k_tile = tile_of(k + head * D, start, T, D, BLOCK)
    v_tile = tile_of(v + head * D, start, T, D, BLOCK)
    dk_tile = tl.zeros((BLOCK, D), tl.float32)
    dv_tile = tl.zeros((BLOCK, D), tl.float32)
    for first in range(start, T, BLOCK):
        q_tile = tile_of(q + head * D, first, T, D, BLOCK)
        do_tile = tile_of(do + head * D, first, T, D, BLOCK)
        p, ds = gradient_of_scores(
            q_tile, k_tile, v_tile, do_tile, lse + head, delta + head,
            first, start, T, BLOCK,
        )  # fmt: skip
        dv_tile = tl.dot(tl.trans(p), do_tile, dv_tile, input_precision="ieee")
        dk_tile = tl.dot(tl.trans(ds), q_tile, dk_tile, input_precision="ieee")
    put(dk_tile, dk + head * D, start, T, D, BLOCK)
    put(dv_tile, dv + head * D, start, T, D, BLOCK)


# %%
# Every number of dK and dV has exactly one program that adds it up and writes it. The queries are scaled by
# :math:`1/\sqrt{D}` beforehand, which scales the scores and dK at once.


def key_gradients():
    ours = torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
    dk_dv_of_a_tile[triton.cdiv(T, 16), q.shape[1]](
        q * D**-0.5, k, v, do, lse, delta, *ours, T, D=D, BLOCK=16
    )
    return ours


ours = key_gradients()
print("dK matches PyTorch:", same(ours[0], dk))
print("dV matches PyTorch:", same(ours[1], dv))

assert same(ours[0], dk) and same(ours[1], dv)
assert dk.abs().max() > 1e-3 and dv.abs().max() > 1e-3

# %%
# A second kernel finds the gradient of the queries, with the roles of the forward pass: queries stay, keys pass by, and
# :math:`dS\, K` adds up to dQ.
#
# Why not one kernel
# ------------------
#
# The kernel above has dS at hand, and could add its part of dQ too. But then many programs would add to the same numbers,
# in the order in which they happen to finish. And the rounding of a sum `depends on the order <3_rms_norm.ipynb>`_.
#
# **Predict first.** On a GPU thousands of programs run at once. We run our kernel for keys again. Do we get the same gradients?
#
# * the same, bit by bit
# * the same up to rounding
# * it depends on the GPU

second = key_gradients()
repeats = all(torch.equal(a, b) for a, b in zip(ours, second))
print("the same bits in a second run:", repeats)

assert repeats

# %%
# The same bits: inside a program the additions have one order, and no two programs add to the same number. A training step
# that repeats exactly is worth a lot when you look for a bug.
#
# The price is work done twice: both kernels make P and dS for themselves. Here is how many products of two tiles each tile
# of scores takes.

products = {"forward": 2, "needed\nbackward": 5, "two kernels": 7}

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

made, (ax,) = figure(4.8, 3.2)
bars = ax.bar(
    list(products), list(products.values()), color=COLOURS[:3], width=0.6
)
ax.bar_label(bars)
ax.set(ylabel="products of tiles", ylim=(0, 8), title="products for each tile")
plt.show()

assert products["needed\nbackward"] == len({"S", "dP", "dQ", "dV", "dK"})
assert products["two kernels"] == len(
    ["S", "dP", "dQ"] + ["S", "dP", "dV", "dK"]
)

# %%
# The two kernels take 7 products for each tile instead of 5: the scores and dP are computed in both.
#
# In depth: `what one kernel would cost, shared heads, and two gradients that go wrong <12a_flash_backward_in_depth.ipynb>`_.
#
# This was the last kernel. ``use_kernels_`` in ``lm_from_scratch.kernels.model`` puts those that a model calls into a
# GPT-2 or Qwen2. Try it on one that you have trained.
#
# Exercises
# ---------
#
# 1. *Easy.* Write delta as a kernel of its own. A right answer equals ``(do * out).sum(-1)`` for a gradient with the
#    strides that ``y.sum()`` gives it, which are 0. Hint: the page on softmax has a row in a program.
# 2. *Medium.* Write the kernel for dQ, with a tile of queries in each program. A right answer equals ``dq``. Hint: the
#    loop is that of the forward pass, and ``gradient_of_scores`` stays as it is. Scale dQ at the end.
#
# Summary
# -------
#
# * The log-sum-exp of a query gives back any of its weights. Computing them again takes less time than reading them.
# * Delta is dO times O, a sum over D. With it, no tile of dS needs another one.
# * In one kernel a program keeps queries and adds up dQ, in another it keeps keys and adds up dK and dV. That costs 7
#   products instead of 5, and gives the same bits in every run.
