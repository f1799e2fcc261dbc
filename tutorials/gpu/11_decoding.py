r"""
Decoding: one query, many keys
==============================

While a model writes, each row of a batch has one new token: one query, and all the keys before it. The page on flash
attention gave each program a tile of queries. Here there is no tile to give. What keeps a GPU busy now, and where
should the keys lie?

You will learn
--------------

* how a kernel writes new keys into pages, and what it costs to gather them again,
* why one query leaves most of a GPU idle, counted in programs,
* how to cut the keys into splits, and why the log-sum-exp is all that the merge needs,
* how attention follows a page table, and copies nothing.

Before you start
----------------

Read the pages on `paged caches <../6_generation/3_continuous_batching.ipynb>`_ and on
`flash attention <10_flash_attention.ipynb>`_. Without a GPU the kernels are interpreted, at small sizes.
"""

# sphinx_gallery_words = ["Flash-Decoding", "paged attention", "split-k", "decode attention", "block table"]

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# %%
# Count first
# -----------
#
# The shape is that of Qwen2-0.5B: 14 query heads share 2 key heads of 64 features. A row has 4096 keys, in bfloat16.
# Each number of a key meets H / Hkv queries, and so does each number of a value: one multiplication and one addition
# every time.

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
# Seven operations for each byte: as many as query heads share a key head. An H100 could do forty times as many while
# the byte arrives. So nothing but reading counts, and three rules follow.
#
# Read every key once, for all heads that share it. Keep every processor reading. Never copy what can be read where it lies.
#
# The sizes below are real on a GPU, and small in the interpreter.

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
# Write
# -----
#
# A paged cache cuts the memory of a layer into pieces of P slots. The pool calls a piece a block. In a kernel a block is
# something else, so here it is a *page*. A row has a table of its pages: key s lies in slot
# s mod P of page ``table[s // P]``. Here two rows get their pages in a random order, and memory that nobody has written
# holds NaN.

most = triton.cdiv(S, P)  # pages of a row
pages = torch.randperm(B * most + 3, generator=generator)
table = pages[: B * most].view(B, most).to(DEVICE, torch.int32)
positions = torch.arange(S, device=DEVICE)
slots = table.long()[:, positions // P] * P + positions % P  # (B, S)
memory_of_keys = torch.full(((B * most + 3) * P, N), torch.nan, device=DEVICE)
memory_of_values = memory_of_keys.clone()

# %%
# One program takes one token, and stores its N numbers in one slot. The slot is computed outside, once for all layers.
# A token that is padding has slot -1, and goes nowhere.


@triton.jit
def write_kernel(new, memory, slots, N: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    n = tl.arange(0, N)
    if slot >= 0:
        numbers = tl.load(new + token * N + n)
        tl.store(memory + slot * N + n, numbers)


for x, memory in ((k, memory_of_keys), (v, memory_of_values)):
    tokens = x.transpose(1, 2).contiguous()  # (B, S, Hkv, D)
    write_kernel[(B * S,)](tokens, memory, slots, N=N)

expected = torch.full_like(memory_of_keys, torch.nan)
expected[slots] = k.transpose(1, 2).reshape(B, S, N)
written = memory_of_keys.nan_to_num(7).equal(expected.nan_to_num(7))
print("matches indexing:", written)
print("unused slots are NaN:", bool(memory_of_keys.isnan().any()))
assert written and memory_of_keys.isnan().any()

# %%
# No two tokens have one slot, so the programs need no order among them. ``PagedCache`` writes with
# ``memory[slots[real]] = new[real]``. That has the same result, but a tensor of booleans as an index makes the CPU wait
# until the GPU has counted them. A condition in the kernel does not.
#
# Gather
# ------
#
# An attention that wants one tensor needs the keys of each row side by side. A program finds one key through the table.


@triton.jit
def gather_kernel(
    memory, table, out, S, most, P: tl.constexpr, N: tl.constexpr
):
    row, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page = tl.load(table + row * most + s // P).to(tl.int64)
    n = tl.arange(0, N)
    numbers = tl.load(memory + (page * P + s % P) * N + n)
    tl.store(out + (row * S + s) * N + n, numbers)


gathered = torch.empty(B, S, N, device=DEVICE)
gather_kernel[(B, S)](memory_of_keys, table, gathered, S, most, P=P, N=N)
gathered = gathered.view(B, S, HKV, D).transpose(1, 2)
print("gathered keys are the keys:", bool(gathered.equal(k)))
assert gathered.equal(k)

# %%
# The copy is right, and dear. Each number is read from its page, written to the copy, and read again by the attention.
# For 32 rows of 4096 keys, in one of 24 layers:

one_layer = attention_cost(rows=32, keys=4096)
held = 2 * 2 * 32 * 2 * 4096 * 64
with_gather = Cost(one_layer.bytes + 2 * held, one_layer.operations)
print(f"read where they lie: {one_layer.bytes / 2**20:.1f} MiB")
print(f"gathered first:      {with_gather.bytes / 2**20:.1f} MiB")
for name, cost_of in (("in place", one_layer), ("gathered", with_gather)):
    milliseconds = 24e3 * cost_of.floor(H100, "matrix")
    print(f"{name}: at least {milliseconds:.2f} ms for each token on an H100")

assert 2.99 < with_gather.bytes / one_layer.bytes < 3

# %%
# Three times the traffic is three times the floor. While a prompt is read, that hardly matters: many queries share one
# copy. For one query it is everything. So decoding must follow the table itself. First it needs a kernel that is fast
# without any pages.
#
# One query leaves a GPU idle
# ---------------------------
#
# A program that takes a key head reads its keys once, for all query heads that share it. One row of Qwen2-0.5B has two
# key heads, so two programs run. An H100 has 132 processors, and 130 of them do nothing. More rows help, but a
# conversation has one.
#
# And reading fast needs many readers: what is on its way at any moment is the bandwidth times the time that one read
# takes. Suppose a read takes half a microsecond.

on_the_way = H100.bandwidth * 0.5e-6 / 132
tile = 2 * 64 * 64 * 2  # keys and values of 64 positions, 2 bytes each
print(f"must be on its way to each of 132: {on_the_way / 1024:.1f} KiB")
print(f"a tile of 64 keys and values: {tile / 1024:.0f} KiB")
assert 0.7 < on_the_way / tile < 1

# %%
# One tile on its way to each processor is about enough, if all of them ask for one.
#
# Split the keys
# --------------
#
# So a second axis of the grid cuts the keys into splits. A program attends to its own split, as if there were no other
# keys, and writes its result and its log-sum-exp. The loop is the online softmax of the page on flash attention.
#
# The seven queries that share a key head are the rows of one tile. A tile of ``tl.dot`` has at least 16 rows, so nine of
# them are idle. That costs nothing that counts.

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
    y = tl.zeros((BLOCK_G, D), tl.float32)
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
        y = y * rescale[:, None] + tl.dot(p, v_tile, input_precision="ieee")
        m = new_m
    l = tl.maximum(l, 1.0)  # 0 where there was no key
    part = heads * splits + split
    tl.store(parts + part * D + d, y / l[:, None], mask=real)
    tl.store(lse + part, (m + tl.log(l))[:, None], mask=group < GROUP)


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

from lm_from_scratch.attention.attention import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility

seen = Visibility(positions[None, -1:], positions[None], dense=True)
reference = sdpa_attention(q, k, v, seen)  # (B, H, 1, D)
one_split = same(split_attention(1)[0], reference)
print("one split matches torch:", one_split)
assert one_split

# %%
# Write :math:`L_i` for the log-sum-exp of split i. Then :math:`e^{L_i}` is the sum of the exponentials of its scores,
# before any division. The whole softmax divides by the sum of these sums. So the result is the mean of the results,
# and its weights are the softmax of the log-sum-exps.
#
# .. math::
#
#    y = \frac{\sum_i e^{L_i} y_i}{\sum_i e^{L_i}} = \sum_i \operatorname{softmax}(L)_i \, y_i

parts, lse = split_attention(splits=4)
weights = torch.softmax(lse, dim=-1)  # (B, H, splits)
merged = (weights[..., None] * parts).sum(2, keepdim=True)
verdicts = same(merged, reference), same(parts.mean(2), reference[:, :, 0])
print("merged matches torch:", verdicts[0])
print("mean without weights matches:", verdicts[1])
assert verdicts == (True, False)

scores = q @ k.repeat_interleave(GROUP, dim=1).mT * D**-0.5  # (B, H, 1, S)
adds_up = same(lse.logsumexp(-1), scores.logsumexp(-1)[:, :, 0])
print("log-sum-exps add up:", adds_up)
assert adds_up

# %%
# One number for each split is all that the merge needs. It does not matter how the keys were cut, or in which order.
# Even more splits than tiles are right: those that get no key have the lowest of all numbers as log-sum-exp, and weight 0.
#
# The merge is a second kernel, because no program may wait for another. This is the one of the package.

import inspect

from lm_from_scratch.kernels import decoding

merge_kernel = decoding.merge_kernel
print(inspect.getsource(merge_kernel.fn))

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
# How many splits? Enough that there are two programs for each processor, and no more: each split adds a result that
# is written and read again. The package stops at 64 splits, and at one tile for each. The figure counts what share of an
# H100 has work.

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

cpu = torch.device("cpu")  # counts as an H100
made, (ax,) = figure(6.4, 3.6)
counts = [2**i for i in range(7)]
for rows, colour, marker in zip((1, 8, 64), COLOURS, "osD"):
    share = [min(1.0, rows * 2 * splits / 132) for splits in counts]
    ax.plot(
        counts, share, marker, linestyle="-", color=colour, label=f"B = {rows}"
    )
    chosen = decoding.number_of_splits(tiles=64, groups=2 * rows, device=cpu)
    reached = min(1.0, rows * 2 * chosen / 132)
    ax.plot(chosen, reached, marker, color=colour, ms=13, fillstyle="none")
    print(f"B = {rows}: {chosen} splits, {2 * rows * chosen} programs")
    assert chosen == 64 or 2 * rows * chosen >= 2 * 132
ax.set(title="Processors that have a program", xscale="log")
ax.set(xlabel="splits", ylabel="share of 132")
ax.set(xticks=counts, xticklabels=counts)
ax.legend(frameon=False)
plt.show()

# %%
# Large hollow markers are what the package chooses. With one row a split is one tile of 64 keys, and 128 of 132 processors
# have a program. With 64 rows three splits are enough.
#
# Follow the page table
# ---------------------
#
# One thing is left: where a key lies. In a tensor, key s is s rows behind the first. In pages it is where the table says.
# That is two more lines of a kernel. Here they stand alone.


@triton.jit
def slots_kernel(table, out, length, P: tl.constexpr, BLOCK_S: tl.constexpr):
    keys = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    visible = keys < length
    page = tl.load(table + keys // P, mask=visible, other=0)
    slots = page.to(tl.int64) * P + keys % P
    tl.store(out + keys, slots, mask=visible)


found = torch.empty(S, dtype=torch.int64, device=DEVICE)
grid = (triton.cdiv(S, BLOCK_S),)
slots_kernel[grid](table[1], found, S, P=P, BLOCK_S=BLOCK_S)
print("the table leads to the slots:", bool(found.equal(slots[1])))
assert found.equal(slots[1])

# %%
# A page need not be as large as a tile: each key of a tile asks the table for itself, and neighbours get the same answer
# from a cache. The mask matters twice. Without it the kernel would read behind the table, and then follow what it found
# there.
#
# Now read the kernel of the package. It has more than the steps above: strides, so that any cache can be read in place; a
# window, whose old keys belong to no split; a mask for what positions hide; and the table. Where more than 16 query heads
# share a key head, several programs take 16 of them each. What is ``None`` leaves no
# instruction in the compiled kernel.

print(inspect.getsource(decoding.decode_kernel.fn))

# %%
# The number of keys is an ordinary argument, and ``do_not_specialize`` names it. It grows with every token. As a
# ``constexpr`` it would mean to compile again at each of them.
#
# Correct
# -------
#
# ``decode_attention`` has the signature of every attention in the package. Odd sizes, a window, and half precision:

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


print("one key:", judge((1, 4, 2, 1, 8), torch.float32))
print("37 keys of 20 features:", judge((3, 6, 2, 37, 20), torch.float32))
print("as many key heads:", judge((1, 3, 3, 70, 16), torch.float32))
print("a window of 65:", judge((1, 4, 2, 200, 16), torch.float32, window=65))
print("float16:", judge((2, 14, 2, 130, 64), torch.float16, atol=2e-3))

# %%
# There is no gradient to compare: decoding has none. A kernel that returned a result without one would cut a model in
# two, and nobody would notice. So it refuses.

try:
    decode_attention(q.clone().requires_grad_(), k, v, seen)
except ValueError as refusal:
    print(refusal)
else:
    raise AssertionError("a gradient was promised")

# %%
# In pages, next to the memory of before, with its NaN. ``Paged`` holds what the kernel needs, and no copy. The second row
# is cut to a third: rows may have any length.

from lm_from_scratch.kernels.paged import Paged, paged_attention

lengths = torch.tensor([S, S // 3], dtype=torch.int32, device=DEVICE)
ends = lengths.long()[:, None]
ragged = Visibility(
    ends - 1, torch.where(positions < ends, positions, -1)
)  # -1: no key
paged = [
    Paged(memory.view(-1, HKV, D), table, lengths, P, S)
    for memory in (memory_of_keys, memory_of_values)
]
y = paged_attention(q, *paged, ragged)
in_pages = same(y, sdpa_attention(q, k, v, ragged))
print("pages match torch:", in_pages)
print("no NaN was read:", bool(y.isfinite().all()))
assert in_pages and y.isfinite().all()

# %%
# A row may be far shorter than the others, or see nothing. Then most splits have no key. A running maximum that began at
# minus infinity would give them NaN, as the page on softmax shows, and NaN spoils the mean even with weight 0.

short = torch.tensor([20, 0], dtype=torch.int32, device=DEVICE)
paged = [Paged(x.memory, x.table, short, P, S) for x in paged]
y = paged_attention(q, *paged, ragged)
first = Visibility(positions[None, 19:20], positions[None, :20], dense=True)
want = sdpa_attention(q[:1], k[:1, :, :20], v[:1, :, :20], first)
print("20 keys match torch:", same(y[:1], want))
print("no keys give 0:", bool(y[1].eq(0).all()))
assert same(y[:1], want) and y[1].eq(0).all()

# %%
# And in a model: a small Qwen2 with random weights reads a prompt, and then one token after the other.
# ``KernelPagedCache`` returns gathered tensors for the prompt, and ``Paged`` for one token; the function below sees which
# of them it got. One pass over all tokens is the truth.

from lm_from_scratch.attention.kinds import attention_layers
from lm_from_scratch.cache.paged import BlockPool
from lm_from_scratch.kernels.paged import KernelPagedCache
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

sizes = dict(vocab_size=97, n_layer=2, n_head=6, n_kv_head=2, n_embd=48)
config = Qwen2Config(**sizes, intermediate_size=56, eos_token_id=2)
model = Qwen2ForCausalLM(config).eval().to(DEVICE)
idx = torch.randint(0, 97, (2, 14), generator=generator).to(DEVICE)


def attend_by_kernel(q, k, v, visibility, dropout=0.0):
    kernel = paged_attention if isinstance(k, Paged) else sdpa_attention
    return kernel(q, k, v, visibility, dropout)


cache = KernelPagedCache(BlockPool(2, 2, 8, 12, block_size=4, device=DEVICE))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(0.3 * normal(*parameter.shape))
    truth = model(idx)
    for layer in attention_layers(model):
        layer.attend = attend_by_kernel
    steps = [model(idx[:, :9], cache=cache)]
    steps += [model(idx[:, t : t + 1], cache=cache) for t in range(9, 14)]
matches = same(torch.cat(steps, dim=1), truth, 1e-3)
print("logits of the model match:", matches)
assert matches

# %%
# How fast
# --------
#
# The floor is the time to read keys and values once. What counts is the share of the bandwidth that is reached, and
# nothing else.

from lm_from_scratch.instruments import roofline

roofline.show("decode_attention", attention_cost(rows=64, keys=8192))

# %%
# Bug museum
# ----------
#
# A page number times a stride
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The offset of a page overflows 32 bits in a large pool.
#
# A table holds int32 numbers, to be small. In `vLLM, pull request 47671
# <https://github.com/vllm-project/vllm/pull/47671>`_, a page has 480 slots of 576 numbers. The product of page number and
# stride was taken in int32, and above page 7767 it became negative. A server crashed, but only once so many pages were
# in use. This kernel computes the offsets, and touches nothing there.


@triton.jit
def offset_kernel(table, out, stride, WIDE: tl.constexpr):
    i = tl.arange(0, 2)
    page = tl.load(table + i)
    if WIDE:
        page = page.to(tl.int64)
    tl.store(out + i, (page * stride).to(tl.int64))


some = torch.tensor([7_767, 7_768], dtype=torch.int32, device=DEVICE)
right = some.long() * 480 * 576
for wide in (False, True):
    offsets = torch.empty(2, dtype=torch.int64, device=DEVICE)
    offset_kernel[(1,)](some, offsets, 480 * 576, WIDE=wide)
    print(f"int64 before the product: {wide}, offsets {offsets.tolist()}")
    assert offsets.equal(right) == wide

# %%
# The fixed line is ``page.to(tl.int64)`` before the product, not after it. No test with a small pool finds this. The
# check needs no large one either: it computes the last offset of the largest pool, as here.
#
# Which sentence is false?
# ------------------------
#
# 1. The seven query heads that share a key head are served by one program, in each split.
# 2. Twice as many splits read every key twice as often.
# 3. A row that sees 20 keys reads 20 keys, however long the other rows are.
# 4. A page may be smaller than a tile of keys.
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

for x in paged:  # what is behind the 20th key may hold anything
    x.memory[slots[0, 20:]] = torch.nan
third_holds = same(paged_attention(q, *paged, ragged)[:1], want)
small_pages = P < BLOCK_S and found.equal(slots[1])
answers = [first_holds, second_holds, third_holds, small_pages]
print(answers)
assert answers == [True, False, True, True]

# %%
# The second is false: the splits share the keys among them, and each key is read once. What grows with the splits are the
# partial results.
#
# Exercises
# ---------
#
# 1. *Easy.* Count the bytes of ``parts`` and ``lse``, written and read, for one row of 4096 keys and 64 splits. A right
#    answer compares them with the 2 MiB of keys and values. Hint: they are float32, and belong to query heads.
# 2. *Medium.* Let ``split_kernel`` write y without division, with m and l instead of the log-sum-exp. A right answer
#    merges them, and matches torch for 1 to 16 splits. Hint: rescale both y and l by :math:`e^{m_i - \max_j m_j}`.
# 3. *Medium.* Change ``number_of_splits`` so that a split has at least four tiles. A right answer counts programs and
#    bytes for 1, 8 and 64 rows, and says where the rule pays. Hint: the package keeps two programs for a processor.
# 4. *Hard.* Several rows often begin with the same prompt, in the same pages. Read these pages once: attend with the
#    queries of all rows to the common part, with each row to its own rest, and merge. A right answer matches torch, and
#    counts the bytes saved. Hint: the merge does not ask where a split came from.
#
# Summary
# -------
#
# * One query does H / Hkv operations for each byte in bfloat16, so the time of decoding is the time of reading.
# * Gathering pages first triples the traffic. Following the table costs one small read for each key.
# * A row gives Hkv programs. Splits of the keys give nearly every processor one, and the softmax of their
#   log-sum-exps merges them exactly.
# * Empty splits start at the lowest number, and page numbers become int64 before they are multiplied.
#
# Decoding only reads. The next page writes gradients: the backward pass of flash attention.
#
# Sources
# -------
#
# * Dao, Haziza, Massa, Sizov: `Flash-Decoding for long-context inference <https://pytorch.org/blog/flash-decoding/>`_,
#   2023.
# * Kwon et al.: `Efficient Memory Management for Large Language Model Serving with PagedAttention
#   <https://arxiv.org/abs/2309.06180>`_, 2023.
# * Ainslie et al.: `GQA <https://arxiv.org/abs/2305.13245>`_, 2023.
# * Milakov, Gimelshein: `Online normalizer calculation for softmax <https://arxiv.org/abs/1805.02867>`_, 2018.

print("all checks passed")
