r"""
Decoding in depth
=================

The lesson on `decoding <11_decoding.ipynb>`_ cuts the keys of one query into splits and merges the results. How close
does that come to the time of reading, is the result exact for any number of splits, and what must the kernel of a real
model know besides?

Count first
-----------

The shape is that of Qwen2-0.5B: 14 query heads share 2 key heads of 64 features. A row has 4,096 keys, in bfloat16.
Each number of a key meets H / Hkv queries, and so does each number of a value: one multiplication and one addition
every time.
"""

# sphinx_gallery_needs = ["11_decoding"]
# sphinx_gallery_words = ["flash decoding merge", "combine partial attention", "log-sum-exp merge", "do_not_specialize"]

import inspect
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from lm_from_scratch.instruments.roofline import GPUS, Cost


def attention_cost(rows, keys, n_head=14, n_kv_head=2, D=64):
    held = 2 * rows * n_kv_head * keys * D  # numbers in keys and values
    queries_and_results = 2 * rows * n_head * D
    return Cost(
        bytes=2 * (held + queries_and_results),
        operations=4 * rows * n_head * keys * D,
    )


H100 = GPUS["H100"]
cost = attention_cost(rows=1, keys=4096)
ridge = H100.matrix / H100.bandwidth
print(f"{cost.bytes:,} bytes, {cost.operations:,} operations")
print(
    f"{cost.intensity:.1f} operations for a byte; an H100 could do {ridge:.0f}"
)
print(f"floor on an H100: {1e6 * cost.floor(H100, 'matrix'):.2f} microseconds")

assert 2 * 2 * 2 * 4096 * 64 == 2 * 2**20  # keys and values: 2 MiB
assert 6.9 < cost.intensity < 14 / 2 < ridge / 40

# %%
# There are seven operations for each byte, one for each query head that shares a key head. An H100 could do forty times as
# many while the byte arrives. So only reading counts, and three rules follow.
#
# Read every key once, for all heads that share it. Keep every processor reading. Never copy what can be read where it
# is: the `page on paged keys <11b_keys_in_pages.ipynb>`_ has that rule.
#
# Readers
# -------
#
# Why does one row need more than two programs? What is on its way to the chip at any moment is the bandwidth times the
# time that one read takes. Suppose a read takes half a microsecond.

on_the_way = H100.bandwidth * 0.5e-6 / 132
tile = 2 * 64 * 64 * 2  # keys and values of 64 positions, 2 bytes each
print(f"must be on its way to each of 132: {on_the_way / 1024:.1f} KiB")
print(f"a tile of 64 keys and values: {tile / 1024:.0f} KiB")
assert 0.7 < on_the_way / tile < 1

# %%
# One tile on its way to each processor is about enough, if all 132 of them ask for one. Two alone would
# have to ask for far more at a time.
#
# The split kernel, whole
# -----------------------
#
# The sizes are real on a GPU, and small in the interpreter.

SMALL = DEVICE == "cpu"
B, HKV, GROUP = 2, 2, 7
S, D, P = (150, 16, 4) if SMALL else (4090, 64, 16)  # P: slots of a page
H = HKV * GROUP
N = HKV * D  # numbers that one token adds to the keys of a layer
generator = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(shape, generator=generator).to(DEVICE)


def same(ours, theirs, atol=1e-4):
    return bool(torch.allclose(ours, theirs, rtol=0, atol=atol))


q = normal(B, H, 1, D)
k, v = normal(B, HKV, S, D), normal(B, HKV, S, D)

# %%
# Here is the lesson's kernel in one piece, with offsets of 64 bits. The seven queries that share a key head are the rows of
# one tile of 16.

BLOCK_G = 16
BLOCK_S = 16 if SMALL else 64
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def split_kernel(
    q, k, v, parts, lse, S, scale, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)  # of the B * Hkv key heads
    split, splits = tl.program_id(1), tl.num_programs(1)
    group, d = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, D)[None, :]
    heads = head * GROUP + group
    real = (group < GROUP) & (d < D)
    queries = tl.load(q + heads * D + d, mask=real, other=0.0)
    each = tl.cdiv(tl.cdiv(S, BLOCK_S), splits) * BLOCK_S  # whole tiles
    start = split * each
    stop = tl.minimum(start + each, S)
    m = tl.full((BLOCK_G,), LOWEST, tl.float32)
    l = tl.zeros((BLOCK_G,), tl.float32)
    a = tl.zeros((BLOCK_G, D), tl.float32)
    for s in range(start, stop, BLOCK_S):
        keys = s + tl.arange(0, BLOCK_S)
        inside = (keys < stop)[:, None] & (d < D)
        at = (head * S + keys[:, None]) * D + d
        k_tile = tl.load(k + at, mask=inside, other=0.0)
        v_tile = tl.load(v + at, mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(k_tile), input_precision="ieee")
        scores = tl.where((keys < stop)[None, :], scores * scale, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp(scores - new_m[:, None])
        rescale = tl.exp(m - new_m)
        l = l * rescale + tl.sum(p, 1)
        a = a * rescale[:, None] + tl.dot(p, v_tile, input_precision="ieee")
        m = new_m
    l = tl.maximum(l, 1.0)  # 0 where there was no key
    part = heads * splits + split
    tl.store(parts + part * D + d, a / l[:, None], mask=real)
    tl.store(lse + part, (m + tl.log(l))[:, None], mask=group < GROUP)


# %%
# The grid has a program for each key head of each row, and each split.


def split_attention(splits):
    parts = torch.empty(B, H, splits, D, device=DEVICE)
    lse = torch.empty(B, H, splits, device=DEVICE)
    tiles = dict(D=D, BLOCK_G=BLOCK_G, BLOCK_S=BLOCK_S)
    split_kernel[(B * HKV, splits)](
        q, k, v, parts, lse, S, D**-0.5, GROUP=GROUP, **tiles
    )
    return parts, lse


# %%
# With one split this is the whole attention. The tolerance of this page, 1e-4, leaves room for sums of thousands of terms
# in another order.

from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility

positions = torch.arange(S, device=DEVICE)
seen = Visibility(positions[None, -1:], positions[None], dense=True)
reference = sdpa_attention(q, k, v, seen)  # (B, H, 1, D)
one_split = same(split_attention(1)[0], reference)
print("one split matches torch:", one_split)
assert one_split

# %%
# The merge
# ---------
#
# The result is the mean of the results of the splits, and its weights are the softmax of their log-sum-exps. The lesson says
# why.

parts, lse = split_attention(splits=4)
weights = torch.softmax(lse, dim=-1)  # (B, H, splits)
merged = (weights[..., None] * parts).sum(2, keepdim=True)
verdicts = same(merged, reference), same(parts.mean(2), reference[:, :, 0])
print("merged matches torch:", verdicts[0])
print("mean without weights matches:", verdicts[1])
assert verdicts == (True, False)

# %%
# And the log-sum-exps merge to that of the whole row.

scores = q @ k.repeat_interleave(GROUP, dim=1).mT * D**-0.5  # (B, H, 1, S)
adds_up = same(lse.logsumexp(-1), scores.logsumexp(-1)[:, :, 0])
print("log-sum-exps add up:", adds_up)
assert adds_up

# %%
# So a merged result can be merged again. The merge is a second kernel, because no program may wait for another. This is the
# one of the package.

from lm_from_scratch.kernels.decoding import decode_kernel, merge_kernel

# %%
# It has one program for each query head.

print(inspect.getsource(merge_kernel.fn))

# %%
# Even more splits than tiles are right: those that get no key have the lowest of all numbers as log-sum-exp, and weight
# 0.

tiles = triton.cdiv(S, BLOCK_S)
verdicts = []
for splits in (1, 2, 3, tiles, tiles + 6):
    parts, lse = split_attention(splits)
    out = torch.empty_like(q)
    merge_kernel[(B * H,)](
        parts, lse, out, splits, D=D, BLOCK_D=D, MAX_SPLITS=128
    )
    verdicts.append(same(out, reference))
empty = int((lse[0, 0] == LOWEST.value).sum())
print("1, 2, 3, a split for each tile, six more:", verdicts)
print("splits without a key:", empty)
assert all(verdicts) and empty == 6

# %%
# The kernel of the package
# -------------------------
#
# It has more than the steps above: strides, so that any cache can be read in place; a window, whose old keys belong to
# no split; a mask for what positions hide; and the table of a paged cache. Where more than 16 query heads share a key
# head, several programs take 16 of them each. What is ``None`` leaves no instruction in the compiled kernel.

print(inspect.getsource(decode_kernel.fn))

# %%
# The number of keys is an ordinary argument, and ``do_not_specialize`` names it. It grows with every token. As a
# ``constexpr`` it would mean to compile again at each of them.
#
# Correct
# -------
#
# ``decode_attention`` has the signature of every attention in the package.

from lm_from_scratch.kernels.decoding import decode_attention


def judge(shape, dtype, window=None, atol=1e-4):
    rows, heads, kv_heads, keys, features = shape
    q = normal(rows, heads, 1, features).to(dtype)
    k, v = (normal(rows, kv_heads, keys, features).to(dtype) for _ in "kv")
    places = torch.arange(keys, device=DEVICE)[None]
    seen = Visibility(places[:, -1:], places, window=window, dense=True)
    theirs = sdpa_attention(q.float(), k.float(), v.float(), seen)
    matches = same(decode_attention(q, k, v, seen).float(), theirs, atol)
    assert matches
    return matches


# %%
# Odd sizes, a window, and half precision:

print("one key:", judge((1, 4, 2, 1, 8), torch.float32))
print("37 keys of 20 features:", judge((3, 6, 2, 37, 20), torch.float32))
print("as many key heads:", judge((1, 3, 3, 70, 16), torch.float32))
print("a window of 65:", judge((1, 4, 2, 200, 16), torch.float32, window=65))
print("float16:", judge((2, 14, 2, 130, 64), torch.float16, atol=2e-3))

# %%
# There is no gradient to compare: decoding has none. A kernel that returned a result without one would cut a model in
# two without an error. So it refuses.

try:
    decode_attention(q.clone().requires_grad_(), k, v, seen)
except ValueError as refusal:
    print(refusal)
else:
    raise AssertionError("a gradient was promised")

# %%
# How fast
# --------
#
# The floor is the time to read keys and values once. Only the share of the bandwidth that is reached counts.

from lm_from_scratch.instruments import roofline

roofline.show("decode_attention", attention_cost(rows=64, keys=8192))

# %%
# Which sentence is false?
# ------------------------
#
# 1. The seven query heads that share a key head are served by one program, in each split.
# 2. Twice as many splits read every key twice as often.
# 3. The order in which the splits are merged does not matter.
#
# A key with a NaN spoils every result whose program reads it. So a NaN at key 30 of the first key head shows who reads
# it. With one split the grid has one program for a key head: if it spoils all seven query heads, it serves them all.

kept = k[0, 0, 30].clone()
k[0, 0, 30] = torch.nan
readers = {}
for splits in (1, 2, 4):
    touched = split_attention(splits)[0].isnan().any(-1)  # (B, H, splits)
    readers[splits] = touched[0, :GROUP].sum(1).tolist()  # of each query head
    assert not touched[0, GROUP:].any() and not touched[1].any()
k[0, 0, 30] = kept
first_holds = readers[1] == 7 * [1]
second_holds = sum(readers[4]) == 2 * sum(readers[2])

parts, lse = (x.flip(2) for x in split_attention(splits=4))  # last one first
backwards = (lse.softmax(-1)[..., None] * parts).sum(2, keepdim=True)
answers = [first_holds, second_holds, same(backwards, reference)]
print(answers)
assert answers == [True, False, True]

# %%
# The second is false: the splits share out the keys, and each key is read once. What grows with the splits is the number
# of partial results.
#
# Exercises
# ---------
#
# 1. *Medium.* Change ``number_of_splits`` so that a split has at least four tiles. A right answer counts programs and
#    bytes for 1, 8 and 64 rows, and says where the rule pays. Hint: the package keeps two programs for a processor.
#
# Summary
# -------
#
# * Reading keys and values once is the floor, and one tile on its way to each processor is about enough to reach it.
# * The splits' results merge exactly, whatever their number. Empty splits start at the lowest number and weigh nothing.
# * A kernel without a gradient must refuse to be asked for one.
#
# Sources
# -------
#
# * Dao, Haziza, Massa, Sizov: `Flash-Decoding for long-context inference <https://pytorch.org/blog/flash-decoding/>`_,
#   2023.
# * Ainslie et al.: `GQA <https://arxiv.org/abs/2305.13245>`_, 2023.
# * Milakov, Gimelshein: `Online normalizer calculation for softmax <https://arxiv.org/abs/1805.02867>`_, 2018.
