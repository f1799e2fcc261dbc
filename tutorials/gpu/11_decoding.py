r"""
Decoding: one query, many keys
==============================

While a model writes, every step has one new token: one query, and the keys of all tokens so far.
`Flash attention <10_flash_attention.ipynb>`_ gives each program a tile of queries, but here there is no tile to give.
So we deal out the *keys*. Each program attends to a part of them, a *split*, and in the end the results are merged.
"""

# sphinx_gallery_needs = ["10_flash_attention", "../6_generation/3_continuous_batching"]
# sphinx_gallery_words = ["Flash-Decoding", "split-k", "decode attention", "slow token generation"]

from lm_from_scratch.drawings import gpu_tiles as drawings

drawings.split_keys(keys=22, tile=4, splits=3)

# %%
# Three programs share 22 keys, in tiles of 4. A program takes whole tiles, so the two orange places after the last key
# are masked. What is L, and why is it enough for the merge? First let us see why we split the keys at all.
#
# A GPU with nothing to do
# ------------------------
#
# **Predict first.** One person talks to Qwen2-0.5B, which has 14 query heads and 2 key heads. Without splits, a program
# reads one key head, for all query heads that share it. An H100 has 132 processors. How many of them work in the
# attention of one layer?
#
# * 132
# * 14
# * 2

programs, processors = 1 * 2, 132  # rows times key heads
print(f"{programs} work, {processors - programs} wait")

assert (programs, processors - programs) == (2, 130)

# %%
# Two programs, two processors. With more conversations there would be more rows, and more programs. One conversation is
# a single row.
#
# And these two have little to do but read. A key has 64 features. Each is multiplied and added once for each of the 7
# query heads that share it, and so is each feature of a value. Here is the count for 4,096 keys of 2 bytes a number.

from lm_from_scratch.instruments.roofline import GPUS

size = 2 * 2 * 2 * 4096 * 64  # bytes of the keys and values of two heads
operations = 4 * 14 * 4096 * 64  # 14 query heads: q k, and weights times v
could = GPUS["H100"].matrix / GPUS["H100"].bandwidth
print(f"for each byte: {operations / size:.0f} operations of {could:.0f}")

assert size == 2 * 2**20  # 2 MiB
assert operations / size == 14 / 2
assert could > 40 * operations / size

# %%
# An H100 could do more than forty times as many operations while the bytes arrive. So this attention takes as long as it
# takes to read keys and values, and it takes many readers to read fast.
#
# Keys and a query of a real text
# -------------------------------
#
# The shipped Qwen2 reads the beginning of a docstring. We keep the queries, keys and values of its last layer. The
# query of the last token is the one that predicts the next word.

import os

import torch

from lm_from_scratch.attention.kinds import attention_layers
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.checkpoint.weights import load_shipped

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
model, tokenizer = load_shipped("qwen2-docs")
text = (
    "Return the number of items in a container. If the container is empty, "
    "the result is 0. Items that occur more than once are counted each time. "
    "Raise a TypeError if the container"
)
ids = torch.tensor([tokenizer.start(text)], device=DEVICE)

# %%
# The model's four query heads share two key heads.

kept = {}


def keep(q, k, v, visibility, dropout=0.0):  # (B, H, T, D), (B, Hkv, S, D)
    out = sdpa_attention(q, k, v, visibility)
    kept.update(q=q[:, :, -1:], k=k, v=v, out=out[:, :, -1:])
    return out


attention_layers(model)[-1].attend = keep
with torch.no_grad():
    model.to(DEVICE)(ids)
for name, x in kept.items():
    print(name, tuple(x.shape))

assert kept["k"].shape == (1, 2, 43, 32)

# %%
# The programs of one part
# ------------------------
#
# A program reads its part of the keys tile by tile. The loop is that of flash attention, with the largest score m, the
# sum l and the weighted values a. The mask ``row < stop`` is the orange end of the picture.


@triton.jit
def rows_of(x, head, start, stop, n, D: tl.constexpr, ROWS: tl.constexpr):
    row = start + tl.arange(0, ROWS)[:, None]
    at = x + (head * n + row) * D + tl.arange(0, D)
    return tl.load(at, mask=row < stop, other=0.0)


@triton.jit
def pass_by(q_tile, k_tile, v_tile, seen, m, l, a, scale):
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp(scores - new_m[:, None])
    fade = tl.exp(m - new_m)
    a = fade[:, None] * a
    a = tl.dot(p, v_tile, a, input_precision="ieee")
    return new_m, fade * l + tl.sum(p, 1), a


# %%
# The queries that share a key head are the rows of one tile, so their keys are read once. A tile of ``tl.dot`` has at
# least 16 rows, and most of them are empty here. That hardly matters, because we wait for memory anyway.


@triton.jit
def attend_to_part(
    q_tile, k, v, head, start, stop, S, scale,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.full((BLOCK,), -3.4e38, tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    a = tl.zeros((BLOCK, D), tl.float32)
    for first in range(start, stop, BLOCK):
        k_tile = rows_of(k, head, first, stop, S, D, BLOCK)
        v_tile = rows_of(v, head, first, stop, S, D, BLOCK)
        seen = (first + tl.arange(0, BLOCK) < stop)[None, :]
        m, l, a = pass_by(q_tile, k_tile, v_tile, seen, m, l, a, scale)
    return m, l, a


# %%
# The kernel decides which part is whose. The grid has one axis for the key heads and one for the splits. For each of its
# queries, a program attends to its part as if there were no other keys. It writes the result y = a / l, and one more
# number, L: the log-sum-exp of its scores, :math:`m + \log l`.
#
# The largest score adds :math:`e^0 = 1` to l. So l is below 1 only where a split got no key, and ``tl.maximum`` makes
# the result 0 there, instead of 0 / 0.


@triton.jit
def split_kernel(
    q, k, v, parts, lse, S, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(0), tl.program_id(1)
    each = tl.cdiv(tl.cdiv(S, BLOCK), tl.num_programs(1)) * BLOCK
    start = split * each
    stop = tl.minimum(start + each, S)
    q_tile = rows_of(q, head, 0, GROUP, GROUP, D, BLOCK)
    m, l, a = attend_to_part(
        q_tile, k, v, head, start, stop, S, scale, D, BLOCK
    )
    l = tl.maximum(l, 1.0)  # 0 where a split got no key
    row = tl.arange(0, BLOCK)
    part = (head * GROUP + row) * tl.num_programs(1) + split
    at = parts + part[:, None] * D + tl.arange(0, D)
    tl.store(at, a / l[:, None], mask=(row < GROUP)[:, None])
    tl.store(lse + part, m + tl.log(l), mask=row < GROUP)


# %%
# Merge
# -----
#
# This function starts the programs. For each query head it returns a result and an L from each split.


def split_attention(q, k, v, splits):
    (B, H, _, D), (HKV, S) = q.shape, k.shape[1:3]
    parts = torch.empty(B, H, splits, D, device=DEVICE)
    lse = torch.empty(B, H, splits, device=DEVICE)
    q, k, v = (x.contiguous() for x in (q, k, v))
    split_kernel[(B * HKV, splits)](
        q, k, v, parts, lse, S, D**-0.5, GROUP=H // HKV, D=D, BLOCK=16
    )
    return parts, lse


# %%
# **Predict first.** The 43 keys are three tiles, of 16, 16 and 11 keys. We give each of them to a split. Which mean
# of the three results is the attention of PyTorch?
#
# * the plain mean
# * the mean in which a split counts as many times as it has keys
# * the mean weighted by the softmax of L

q, k, v, reference = kept.values()
parts, lse = split_attention(q, k, v, splits=3)
weights = {
    "plain mean": torch.full((3,), 1 / 3, device=DEVICE),
    "by number of keys": torch.tensor([16, 16, 11], device=DEVICE) / 43,
    "softmax of L": lse.softmax(-1),  # (B, H, splits)
}
for name, weight in weights.items():
    merged = (weight[..., None] * parts).sum(2, keepdim=True)
    same = torch.allclose(merged, reference, rtol=0, atol=1e-4)
    print(f"{name}: {same}")
    assert same == (name == "softmax of L")

# %%
# The softmax of L. Write :math:`L_i` for the L of split i. Then :math:`e^{L_i}` is the sum of the exponentials of its scores,
# by which the split has divided. The whole softmax divides by the sum of these sums:
#
# .. math::
#
#    y = \frac{\sum_i e^{L_i} y_i}{\sum_i e^{L_i}} = \sum_i \operatorname{softmax}(L)_i \, y_i
#
# A split with high scores counts more, just as its keys would in the whole softmax. It does not matter where the keys are
# split, or in which order the results are merged. Here PyTorch merges. The package has a second kernel for it. The whole idea
# is known as *Flash-Decoding*, or split-KV.
#
# How many splits
# ---------------
#
# Enough for two programs on each processor, so that one can work while the other waits. More would only add results that
# are written and read again. The package stops at 64 splits, and at one tile for each. The figure counts how many of an
# H100's processors have work, with B conversations at once. Large hollow markers are what the package chooses for 4,096
# keys, which are 64 tiles of 64.

from lm_from_scratch.kernels.decoding import number_of_splits

cpu = torch.device("cpu")  # counts as an H100
chosen = {B: number_of_splits(64, 2 * B, cpu) for B in (1, 8, 64)}
for rows, splits in chosen.items():
    print(f"B = {rows}: {splits} splits, {2 * rows * splits} programs")
    assert splits == 64 or 2 * rows * splits >= 2 * 132

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

_, (ax,) = figure(4.8, 3.6)
for rows, colour, marker in zip(chosen, COLOURS, "osD"):
    counts = [2**i for i in range(7)]
    share = [min(1.0, rows * 2 * splits / 132) for splits in counts]
    ax.plot(counts, share, f"-{marker}", color=colour, label=f"B = {rows}")
    reached = min(1.0, rows * 2 * chosen[rows] / 132)
    ax.plot(
        chosen[rows], reached, marker, color=colour, ms=13, fillstyle="none"
    )
ax.set(title="Processors that have a program", xscale="log")
ax.set(xlabel="splits", ylabel="share of 132")
ax.set(xticks=[1, 2, 4, 8, 16, 32, 64], xticklabels=[1, 2, 4, 8, 16, 32, 64])
ax.legend(frameon=False)
plt.show()

# %%
# With one conversation a split is one tile of 64 keys, and 128 of 132 processors have a program instead of 2. With 64
# conversations three splits are enough.
#
# In depth: `the package's kernels, and splits without a key <11a_decoding_in_depth.ipynb>`_, and
# `keys in the pages of a paged cache <11b_keys_in_pages.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* Count the bytes of ``parts`` and ``lse``, written and read, for one row of 4096 keys and 64 splits. A right
#    answer compares them with the 2 MiB of keys and values. Hint: they are float32, and belong to query heads.
# 2. *Medium.* Let ``split_kernel`` write a, m and l instead of y and L. A right answer merges them, and matches torch for 1 to
#    16 splits. Hint: rescale both a and l by :math:`e^{m_i - \max_j m_j}`.
#
# Summary
# -------
#
# * A single query needs only H / Hkv operations for each byte in bfloat16. Its attention waits for keys and values.
# * A row gives only Hkv programs. With its keys in splits, nearly every processor has one.
# * The results merge exactly. Their weights are the softmax of the splits' log-sum-exps.
