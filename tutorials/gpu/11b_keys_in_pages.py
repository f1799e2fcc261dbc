r"""
Keys in pages, in depth
=======================

The lesson on `decoding <11_decoding.ipynb>`_ reads keys that lie side by side. A service keeps them in a
`paged cache <../6_generation/3_continuous_batching.ipynb>`_: the memory of a layer is cut into pages, and each row has a
table of its pages. How does a kernel write into pages, and read them without a copy?
"""

# sphinx_gallery_needs = ["11_decoding", "../6_generation/3_continuous_batching"]
# sphinx_gallery_words = ["paged attention", "PagedAttention", "block table", "vLLM", "slot mapping"]

from lm_from_scratch.drawings import gpu_tiles as drawings

drawings.paged_keys([4, 1, 5], page=4, length=10, tile=4, pages=6)

# %%
# Ten keys of a row are in pages 4, 1 and 5, in this order. A kernel reads them in tiles. For each key it looks up the
# page, and what is after the last key is masked. Slots without a number are free, or belong to other rows.
#
# The pool of the cache calls a piece of memory a block. In a kernel a block is something else, so here it is a *page*.

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# %%
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


# %%
# One query for each row, and its keys and values.

q = normal(B, H, 1, D)
k, v = normal(B, HKV, S, D), normal(B, HKV, S, D)

# %%
# Write
# -----
#
# A page has P slots. Key s of a row is in slot s mod P of page ``table[s // P]``. Here two rows get their pages in a
# random order, and memory that nobody has written holds NaN.

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


# %%
# The memory must be what indexing would have made of it.

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


# %%
# The grid has a program for each key of each row.

gathered = torch.empty(B, S, N, device=DEVICE)
gather_kernel[(B, S)](memory_of_keys, table, gathered, S, most, P=P, N=N)
gathered = gathered.view(B, S, HKV, D).transpose(1, 2)
print("gathered keys are the keys:", bool(gathered.equal(k)))
assert gathered.equal(k)

# %%
# The copy is right, and expensive. Each number is read from its page, written to the copy, and read again by the
# attention. The shape of Qwen2-0.5B has 14 query heads and 2 key heads of 64 features. For 32 rows of 4,096 keys, in
# one of 24 layers:

from lm_from_scratch.instruments.roofline import GPUS, Cost


def attention_cost(rows, keys, n_head=14, n_kv_head=2, D=64):
    held = 2 * rows * n_kv_head * keys * D  # numbers in keys and values
    queries_and_results = 2 * rows * n_head * D
    return Cost(
        bytes=2 * (held + queries_and_results),
        operations=4 * rows * n_head * keys * D,
    )


H100 = GPUS["H100"]
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
# copy. For one query it is everything. So decoding must follow the table itself.
#
# Follow the page table
# ---------------------
#
# The only question is where a key is. In a tensor, key s is s rows after the first. In pages it is where the table says.
# That is two more lines of a kernel. Here they are alone.

BLOCK_S = 16 if SMALL else 64


@triton.jit
def slots_kernel(table, out, length, P: tl.constexpr, BLOCK_S: tl.constexpr):
    keys = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    visible = keys < length
    page = tl.load(table + keys // P, mask=visible, other=0)
    slots = page.to(tl.int64) * P + keys % P
    tl.store(out + keys, slots, mask=visible)


# %%
# For the second row, its slots must come out.

found = torch.empty(S, dtype=torch.int64, device=DEVICE)
grid = (triton.cdiv(S, BLOCK_S),)
slots_kernel[grid](table[1], found, S, P=P, BLOCK_S=BLOCK_S)
print("the table leads to the slots:", bool(found.equal(slots[1])))
assert found.equal(slots[1])

# %%
# A page need not be as large as a tile: each key of a tile asks the table for itself, and neighbours get the same
# answer from a cache. The mask matters twice. Without it the kernel would read past the end of the table, and then
# follow what it found there.
#
# The package's ``decode_kernel``, whose source is on the page on `decoding in depth <11a_decoding_in_depth.ipynb>`_,
# has these two lines.
#
# Correct
# -------
#
# The memory is that of before, with its NaN. ``Paged`` holds what the kernel needs, and no copy. The second row is cut
# to a third: rows may have any length.

from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
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
# A row may be far shorter than the others, or see nothing. Then most splits have no key. A running maximum that began
# at minus infinity would give them NaN, as the page on `softmax <2_softmax.ipynb>`_ shows, and NaN spoils the mean even
# with weight 0.

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
# of them it got.

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


# %%
# One pass over all tokens is the truth.

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
# Bug museum
# ----------
#
# A page number times a stride
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The offset of a page overflows 32 bits in a large pool. (M40)
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


# %%
# The last page that is right, and the first that is not:

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
# 1. A row that sees 20 keys reads 20 keys, however long the other rows are.
# 2. A page may be smaller than a tile of keys.
# 3. Two rows must not have a page in common.

shared = table[:1].repeat(2, 1)
common = [Paged(x.memory, shared, lengths, P, S) for x in paged]
both = sdpa_attention(q, k[:1].expand_as(k), v[:1].expand_as(v), ragged)
shared_is_wrong = not same(paged_attention(q, *common, ragged), both)

for x in paged:  # what is after the 20th key may hold anything
    x.memory[slots[0, 20:]] = torch.nan
first_holds = same(paged_attention(q, *paged, ragged)[:1], want)
small_pages = P < BLOCK_S and found.equal(slots[1])
answers = [first_holds, small_pages, shared_is_wrong]
print(answers)
assert answers == [True, True, False]

# %%
# The third is false: rows only read, so they may share a page, as rows with the same prompt do.
#
# Exercises
# ---------
#
# 1. *Hard.* Several rows often begin with the same prompt, in the same pages. Read these pages once: attend with the
#    queries of all rows to the common part, with each row to its own rest, and merge. A right answer matches torch, and
#    counts the bytes saved. Hint: the merge does not ask where a split came from.
#
# Summary
# -------
#
# * Gathering pages first triples the traffic. Following the table costs one small read for each key.
# * The mask guards two reads: that of the table, and that of the key.
# * Page numbers become int64 before they are multiplied.
#
# Sources
# -------
#
# * Kwon et al.: `Efficient Memory Management for Large Language Model Serving with PagedAttention
#   <https://arxiv.org/abs/2309.06180>`_, 2023.
# * `vLLM <https://github.com/vllm-project/vllm>`_, whose cache has these pages.
