r"""
Flash attention: scores that are never in memory
================================================

Attention scores every query against every key, uses each score once, and never looks at it again. So
`attention in tiles <../3_attention/1_attention.ipynb>`_ reads the keys a few at a time and remembers three things for
each query: the largest score m, the sum l of the exponentials, and the weighted sum a of the values.

A GPU runs many programs at once, so we deal out the queries. Each program keeps one tile of queries, and the
tiles of keys pass by. Choose a program, and see which scores it computes.
"""

# sphinx_gallery_needs = ["2_softmax", "6_matmul", "../3_attention/2_masks"]
# sphinx_gallery_words = ["FlashAttention", "flash_attn", "FlashAttention-2", "SRAM", "memory-efficient attention", "faster attention"]

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import gpu_tiles as drawings

model, tokenizer = load_shipped("qwen2-docs")
ids = tokenizer.start("Return the number of items in a container.")
pieces = ["⊢", *tokenizer.pieces(ids)[1:]]  # the start of the text
drawings.causal_tiles(pieces, 4)

# %%
# Blue scores are used. Orange scores are computed and then masked, because their key is a later token, or because the
# text has ended and the tile has not. The tiles to the right of the last frame are never computed.
#
# On a GPU a tile has 64 queries and 64 keys rather than 4. Its 4,096 scores are in the registers of the processor that
# runs the program, the fastest memory there is. The scores of the next tile overwrite them.
#
# What the scores would cost
# --------------------------
#
# Without tiles, attention is three operations. One writes the scores. The softmax reads them and writes the weights.
# The last one reads the weights, to average the values. So a table with one number for each query and key is written
# twice and read twice.
#
# **Predict first.** Take 8,192 tokens, and one layer as wide as that of Qwen2-0.5B: 14 query heads share 2 key heads of
# 64 features, and a number has 2 bytes. How many times as much do the three operations move as a kernel that reads
# queries, keys and values once and writes the result?
#
# * 4 times as much
# * 30 times as much
# * more than 200 times as much

H, HKV, D, T = 14, 2, 64, 8192
ends = 2 * (2 * H + 2 * HKV) * T * D  # queries, result, keys, values
scores = 2 * H * T * T
print(f"queries, keys, values and result: {ends / 2**20:.0f} MiB")
print(f"one copy of the scores: {scores / 2**20:,.0f} MiB")
print(f"three operations move {(ends + 4 * scores) / ends:.0f} times as much")

assert scores == 1792 * 2**20
assert (ends + 4 * scores) / ends == 225

# %%
# Each query has 64 features, but 8,192 scores. That is why the scores dominate, and the longer the text, the more. (Every
# program reads keys again. We do not count that, because all keys and values of a layer are small enough for the L2 cache.)
#
# One tile of keys
# ----------------
#
# Without a GPU, Triton interprets the kernels.

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# %%
# Queries, keys and values are read in the same way: some rows of a matrix, beginning at ``start``. Rows past the
# end of the matrix are not read. They become 0.


@triton.jit
def tile_of(x, start, n, D: tl.constexpr, ROWS: tl.constexpr):
    row = start + tl.arange(0, ROWS)[:, None]
    return tl.load(x + row * D + tl.arange(0, D), mask=row < n, other=0.0)


# %%
# When a tile of keys passes by, the program scores it against its queries and updates m, l and a. This is the update of
# the lesson on tiles, for 16 queries and 16 keys at a time. Masked scores become minus infinity, so that their weight
# is :math:`e^{-\infty} = 0`.


@triton.jit
def pass_by(q_tile, k_tile, v_tile, seen, m, l, a, scale):
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
    scores = tl.where(seen, scores, -float("inf"))  # (queries, keys)
    new_m = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp(scores - new_m[:, None])
    fade = tl.exp(m - new_m)
    l = fade * l + tl.sum(p, 1)
    a = fade[:, None] * a
    a = tl.dot(p.to(v_tile.dtype), v_tile, a, input_precision="ieee")
    return new_m, l, a


# %%
# If the tile has a new largest score, the old sums are too large by a common factor, and ``fade`` repairs both of them.
# Otherwise ``fade`` is 1. (``scale`` is :math:`1/\sqrt{D}`, as in every attention.)
#
# One program
# -----------
#
# A program has two numbers: which tile of queries it keeps, and of which head. It loads its queries once. The loop
# ends at its last query, so tiles whose keys are all later are not read. Inside the last tile, ``seen`` is the mask of
# the picture.


@triton.jit
def attend(q, k, v, out, T, group, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    start, h = tl.program_id(0) * BLOCK, tl.program_id(1)
    shared = h // group * T * D  # where its key head begins
    t = start + tl.arange(0, BLOCK)
    q_tile = tile_of(q + h * T * D, start, T, D, BLOCK)
    m = tl.full((BLOCK,), -3.4e38, tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    a = tl.zeros((BLOCK, D), tl.float32)
    for first in range(0, start + BLOCK, BLOCK):
        k_tile = tile_of(k + shared, first, T, D, BLOCK)
        v_tile = tile_of(v + shared, first, T, D, BLOCK)
        seen = first + tl.arange(0, BLOCK)[None, :] <= t[:, None]
        m, l, a = pass_by(q_tile, k_tile, v_tile, seen, m, l, a, scale)
    at = out + h * T * D + t[:, None] * D + tl.arange(0, D)
    tl.store(at, a / l[:, None], mask=t[:, None] < T)


# %%
# Look for the table of scores: there is none. ``pass_by`` makes one tile of it, and forgets it.
#
# Two lines deserve a second look. In Qwen2 several query heads, a ``group``, share one key head, and ``h // group`` is all
# that the kernel needs for that: it reads at another address, and no keys are copied. And m starts at a very low *finite*
# number. Here every query sees a key of its first tile, so minus infinity would do. Where a mask hides all of a first tile,
# it leads to NaN, as on the page on `softmax <2_softmax.ipynb>`_.
#
# In the shipped model
# --------------------
#
# This function starts one program for each tile of queries and each query head. The result is filled with NaN first, so
# a row that no program writes would be seen.

BLOCK = 16
kept = {}


def flash(q, k, v, visibility=None, dropout=0.0):  # q (1, H, T, D)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    H, T, D = q.shape[1:]
    out = torch.full_like(q, torch.nan)
    grid = triton.cdiv(T, BLOCK), H
    group = H // k.shape[1]
    attend[grid](q, k, v, out, T, group, D**-0.5, D=D, BLOCK=BLOCK)
    kept.update(q=q, k=k, v=v, out=out)
    return out


# %%
# The shipped Qwen2 reads a docstring, first with PyTorch's attention and then with our kernel in all of its eight
# layers. 43 tokens are two full tiles of 16, and 11 rows of a third one.

from lm_from_scratch.attention.kinds import attention_layers

text = (
    "Return the number of items in a container. If the container is empty, "
    "the result is 0. Items that occur more than once are counted each time. "
    "Raise a TypeError if the container"
)
ids = tokenizer.start(text)
idx = torch.tensor([ids], device=DEVICE)
with torch.no_grad():
    logits = model.to(DEVICE)(idx)
    for layer in attention_layers(model):
        layer.attend = flash
    ours = model(idx)
print(len(ids), "tokens")
print("logits match:", bool(torch.allclose(ours, logits, rtol=0, atol=1e-3)))
print("next word:", repr(tokenizer.pieces([int(ours[0, -1].argmax())])[0]))

assert torch.allclose(ours, logits, rtol=0, atol=1e-3)
assert len(ids) == 2 * BLOCK + 11

# %%
# The logits are the same up to rounding, because sums are added in another order.
#
# Not read is better than masked
# ------------------------------
#
# Masking a tile costs as much as using it. The queries, keys and values of the last layer show that the loop really
# stops early.
#
# **Predict first.** We replace all values after the first 16 tokens by NaN, which spoils every sum that it is in.
# What happens to the results of the first 16 queries?
#
# * nothing: they never meet those values
# * all are NaN, since 0 times NaN is NaN
# * only the last one is NaN

later = kept["v"].clone()
later[:, :, BLOCK:] = torch.nan
before = kept["out"][:, :, :BLOCK]
after = flash(kept["q"], kept["k"], later)[:, :, :BLOCK]
print("the first 16 results are the same:", torch.equal(before, after))

assert torch.equal(before, after)

# %%
# Nothing happens. With a mask alone, a weight of 0 would have met a NaN, and all of the 16 results would be spoiled. The bound
# of the loop keeps the program from reading those values, and saves the work.
#
# At full length this halves the work.
#
# **Predict first.** 8,192 tokens make 128 by 128 tiles of 64. Of the tiles that are visited, in how many is any score masked?
#
# * about half of them
# * about one in ten
# * fewer than two in a hundred

tiles = 8192 // 64
visited = sum(range(1, tiles + 1))  # on and below the diagonal
diagonal = tiles
print(f"visited: {visited:,} of {tiles**2:,} tiles")
print(f"of these, hide something: {diagonal / visited:.1%}")

assert 0.5 < visited / tiles**2 < 0.51
assert diagonal / visited < 0.02

# %%
# Only the tiles on the diagonal are masked in part. So the package's kernel has its loop twice: without a mask for the
# tiles that are seen as a whole, and with one for the rest.
#
# In depth: `windows, packed documents, caches, and the package's kernel <10a_flash_attention_in_depth.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* Let ``attend`` write the log-sum-exp of each row, too. A right answer equals ``torch.logsumexp`` of the scores in
#    float64. Hint: it is m plus a logarithm.
# 2. *Medium.* Give ``attend`` a bias that falls with the distance, as ALiBi has it. A right answer equals SDPA with the
#    bias as a mask. Hint: the distance is ``t[:, None] - s[None, :]``, where s are the positions of the keys.
#
# Summary
# -------
#
# * The scores of 8,192 tokens take 1,792 MiB a layer. With them in memory, attention moves 225 times as much.
# * A program keeps a tile of queries with m, l and a, while the tiles of keys pass by. The result is exact, up to rounding.
# * Causality ends the loop early. Only tiles on the diagonal need a mask: fewer than two in a hundred.
