r"""
Paged memory in depth
=====================

The lesson on `continuous batching <3_continuous_batching.ipynb>`_ keeps its rows in blocks of a pool, and a block table
says where each token is. How much memory does that save, with small blocks and with large ones? Does a row in scattered
blocks see the same keys as a row in one piece? What do sharing and reading cost?

Letters name axes: B rows, S keys, H heads, D features of a head, P slots of a block.

A load of requests
------------------

Forty-eight prompts are pieces of the Python language reference, 3 to 32 tokens long, for our small GPT-2. Each request
has its own limit of new tokens, drawn so that it is at least :math:`x` with the probability :math:`10 / x`, and at most
96: most are short, a few are long. An answer may end earlier, with the end of the document or with a blank line.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["block_size", "copy-on-write", "memory fragmentation", "gpu_memory_utilization", "num_gpu_blocks", "paged attention kernel"]

import inspect
import math
import statistics
import time
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.paged import BlockPool, PagedCache, Row
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings.generation import page_table
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.requests import Request
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.text.corpora import reference

torch.set_grad_enabled(False)
model, tokenizer = load_shipped()
config, end = model.config, tokenizer.eos_token_id
texts = [tokenizer.encode(document.text) for document in reference()]
texts = [ids for ids in texts if len(ids) > 40]
vocabulary = range(config.vocab_size)
blank = [i for i in vocabulary if "\n\n" in tokenizer.decode([i])]
generator = torch.Generator().manual_seed(0)


def integer(low, high):
    return int(torch.randint(low, high, (1,), generator=generator))


def draw_request(seed):
    ids, n = texts[integer(0, len(texts))], integer(3, 33)
    start = integer(0, len(ids) - n)
    u = torch.rand(1, generator=generator, dtype=torch.float64).item()
    return Request(
        prompt=[end, *ids[start : start + n]],
        max_new_tokens=int(min(96, 10 / (1 - u))),
        sampler=Sampler(temperature=0.8),
        stop_tokens=[end, *blank],
        seed=seed,
    )


def alone(r):
    how = (r.max_new_tokens, r.sampler, r.stop_tokens)
    return complete(generate(model, [r.prompt], *how, seed=r.seed))[0]


load = [draw_request(seed) for seed in range(48)]
answers = [alone(request) for request in load]
lengths = sorted(len(said) for said in answers)
stopped = sum(len(a) < r.max_new_tokens for a, r in zip(answers, load))
print("tokens of the answers, shortest first:", *lengths)
print(f"{sum(lengths)} tokens; {stopped} answers ended before their limit")

assert statistics.median(lengths) * 4 < max(lengths)

# %%
# The longest answer has more than four times as many tokens as the median one. Whatever is reserved or computed for the
# longest one is wasted on most others.
#
# What fixed rows waste
# ---------------------
#
# A row that cannot move or grow needs room for the longest text that it may reach: here the model's 256 positions. While
# an answer is written, its row holds n tokens, one more in each pass. Summed over all passes of all requests, the share
# of the reserved slots in use is
#
# .. math::
#
#    \frac{\sum n}{\sum \text{reserved}(n)}
#
# If the server knows the limit of a request, it can reserve the prompt and the limit, and no more. Blocks of P slots
# reserve :math:`P \lceil n / P \rceil`.


def share(reserved):
    pairs = [
        (n, reserved(n, request))
        for request, said in zip(load, answers)
        for n in range(len(request.prompt), len(request.prompt) + len(said))
    ]
    return sum(n for n, _ in pairs) / sum(slots for _, slots in pairs)


sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
in_blocks = [share(lambda n, _, P=P: -(-n // P) * P) for P in sizes]
fixed = share(lambda n, _: config.block_size)
known = share(lambda n, r: len(r.prompt) + r.max_new_tokens - 1)

fig, (ax,) = figure(5.2, 3.4)
ax.plot(sizes, in_blocks, "o-", label="blocks of P slots")
ax.axhline(known, linestyle="--", color=COLOURS[3], label="prompt and limit")
ax.axhline(fixed, linestyle=":", color=COLOURS[7], label="256 slots a row")
ax.set_xscale("log", base=2)
ax.set_xticks(sizes, [str(P) for P in sizes])
ax.set(xlabel="P", ylabel="share of slots in use", ylim=(0, 1.05))
ax.set_title("Reserved slots that hold a token")
fig.legend(loc="outside lower center", ncols=2)
plt.show()

print(f"256 slots a row {fixed:.2f}, prompt and limit {known:.2f}")
print(f"blocks of 16: {in_blocks[4]:.2f}")
assert in_blocks[0] == 1 and in_blocks[-1] == fixed
assert fixed < 0.25 and in_blocks[4] > 0.75 and known < in_blocks[4]
assert in_blocks == sorted(in_blocks, reverse=True)

# %%
# With rows of 256 slots, less than a quarter of the reserved memory holds a token. With blocks of 16, more than three
# quarters do, without knowing any limit.
#
# A row wastes less than one block, whatever its length, because only its last block has free slots. With blocks as long
# as the longest row, the curve ends on the dotted line: that is one fixed row again.
#
# Blocks and a block table
# ------------------------
#
# One pool owns the memory. A row is a list of block numbers, its *table*. As the lesson says, the token at position p is
# in block ``table[p // P]``, and there in slot ``p % P``.
#
# Rows come and go. Here B leaves, D takes the blocks of B, and A continues in whichever block is free. In the drawing,
# numbers are positions.


def new_pool(n_blocks, block_size=16):
    sizes = (config.n_layer, config.n_head, config.head_dim)
    dtype = model.head.weight.dtype
    return BlockPool(*sizes, n_blocks, block_size, dtype)


def random_tokens(rows, columns):
    shape = (rows, columns)
    return torch.randint(0, config.vocab_size, shape, generator=generator)


pool, rows, fed = new_pool(16, block_size=4), {}, {}


def feed(name, n):
    row, idx = rows.setdefault(name, Row()), random_tokens(1, n)
    model(idx, cache=PagedCache(pool, [row]))
    fed[name] = fed.get(name, []) + idx[0].tolist()


for name, n in (("A", 10), ("B", 6), ("C", 13)):
    feed(name, n)
pool.cut(rows.pop("B"), 0)
for name, n in (("D", 9), ("A", 5), ("E", 3)):
    feed(name, n)
for name, row in rows.items():
    print(name, "has", row.length, "tokens in the blocks", row.table)

wasted = [4 * len(row.table) - row.length for row in rows.values()]
assert rows["A"].table == [0, 1, 2, 10] and rows["D"].table == [4, 3, 9]
assert max(wasted) < 4

tables = {name: row.table for name, row in rows.items()}
numbers = {
    name: [f"{p}\N{EN SPACE}" for p in range(row.length)]
    for name, row in rows.items()
}
page_table(numbers, tables, 16, 4)

# %%
# Where a block lies in the pool means nothing; the table gives the order. The keys of A, in all layers, are those of a
# ``GrowingCache``, which keeps each row in one piece and has read the same tokens.

growing = GrowingCache(config.n_layer)
model(torch.tensor([fed["A"]]), cache=growing)
for layer in range(config.n_layer):
    keys = pool.keys[layer, pool.slots(rows["A"])]  # (S, H, D)
    expected = growing.contents(layer)[0][0].transpose(0, 1)
    torch.testing.assert_close(keys, expected, atol=1e-3, rtol=0)

block, slot = rows["A"].table[13 // 4], 13 % 4
print(f"position 13 of A: block {block}, slot {slot}")
assert pool.slots(rows["A"])[13] == 4 * block + slot

# %%
# Sharing, and copy on write
# --------------------------
#
# A block may belong to several rows. The pool counts the users of every block, and to copy a row is to copy its table.
# Only writing needs care: before a row writes into a block that has other users, it copies the block, and leaves the old
# one to them. This is *copy on write*.

print(inspect.getsource(BlockPool.own))

# %%
# A prompt of 10 tokens fills two blocks of 4 and half of a third. Each line below says how many users the first six
# blocks have.

pool = new_pool(12, block_size=4)
cache, prompt = PagedCache(pool), random_tokens(1, 10)
seen = {}


def show(event):
    seen[event] = pool.users[:6]
    print(f"{event:24}", *pool.users[:6])


model(prompt, cache=cache)
show("prompt")
cache.repeat(3)
show("three rows")
model(random_tokens(3, 1), cache=cache)
show("one token each")
memory = pool.keys.clone()
cache.reorder(torch.tensor([2, 2, 0]))
show("rows 2, 2, 0")
assert torch.equal(memory, pool.keys)
cache.reset()
show("reset")

assert seen["prompt"] == [1, 1, 1, 0, 0, 0]
assert seen["three rows"] == [3, 3, 3, 0, 0, 0]
assert seen["one token each"] == [3, 3, 1, 1, 1, 0]
assert sorted(seen["rows 2, 2, 0"]) == [0, 0, 1, 2, 3, 3]
assert not any(pool.users)

# %%
# Three rows instead of one cost no memory. Their first tokens cost two copies of the half-filled block; the last row
# keeps the original. Reordering rows, which `beam search <1_beam_search.ipynb>`_ does at every step, moves no key: the
# bytes of the pool are the same as before. A cache that keeps rows in one piece copies all keys.

dense = GrowingCache(config.n_layer)
model(prompt, cache=dense)
before = dense.nbytes
dense.repeat(3)
assert dense.nbytes == 3 * before

# %%
# What reading costs
# ------------------
#
# The attention of this package needs the keys (B, H, S, D) in one tensor. A ``GrowingCache`` gives it a view of its
# memory, without a copy. A ``PagedCache`` gathers the blocks of every row into one tensor, in every layer, for every
# token: a copy of all that it holds. The times are processor times, with quartiles in brackets.

B, S = 8, 160
caches = {
    "growing": GrowingCache(config.n_layer, reserve=S + 32),
    "paged": PagedCache(new_pool(B * 12)),
}
idx = random_tokens(B, S)
for cache in caches.values():
    model(idx, cache=cache)
ratios, token = [], random_tokens(B, 1)
for _ in range(15):
    seconds = []
    for cache in caches.values():  # in turn
        begin = time.process_time()
        model(token, cache=cache)
        seconds.append(time.process_time() - begin)
    ratios.append(seconds[1] / seconds[0])
low, ratio, high = statistics.quantiles(ratios, n=4)
copied = 2 * B * S * config.n_layer * config.n_embd * 4
weights = sum(p.nbytes for p in model.parameters())
print(f"bytes gathered over bytes of weights: {copied / weights:.1f}")
print(f"time, paged over growing: {ratio:.2f} ({low:.2f} to {high:.2f})")

assert copied > weights
view, again = (caches["growing"].contents(0)[0] for _ in range(2))
assert view.data_ptr() == again.data_ptr()

# %%
# Eight rows of 160 tokens gather more bytes than all the weights have. A kernel for paged attention does not gather: it
# follows the table, reads one block after another where it is, and keeps a running softmax, as `attention in tiles
# <../3_attention/1_attention.ipynb>`_ does. Here is one row of such a kernel in PyTorch. Its result is that of attention
# over the gathered keys.


def along_the_table(q, layer, row, pool):
    P = pool.block_size
    top = q.new_full(q.shape[:1], -math.inf)  # (H,)
    total, mean = torch.zeros_like(top), torch.zeros_like(q)
    for first, block in zip(range(0, row.length, P), row.table):
        place = slice(block * P, block * P + min(P, row.length - first))
        k, v = pool.keys[layer, place], pool.values[layer, place]  # views
        scores = torch.einsum("hd,phd->hp", q, k) / math.sqrt(q.shape[1])
        new = torch.maximum(top, scores.amax(1))
        weight, old = (scores - new[:, None]).exp(), (top - new).exp()
        total = total * old + weight.sum(1)
        mean = mean * old[:, None] + torch.einsum("hp,phd->hd", weight, v)
        top = new
    return mean / total[:, None]  # (H, D)


pool, row = caches["paged"].pool, caches["paged"].rows[3]
q = torch.randn(config.n_head, config.head_dim, generator=generator)
place = pool.slots(row)
k, v = (m[2, place].transpose(0, 1) for m in (pool.keys, pool.values))
gathered = F.scaled_dot_product_attention(q[:, None], k, v)[:, 0]
torch.testing.assert_close(along_the_table(q, 2, row, pool), gathered)
print("attention along the table: equal")

# %%
# Bug museum
# ----------
#
# The shared block that was not copied
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Two rows with a common prompt write into one block. (M13)
#
# Without ``own``, both rows write their first tokens into the same slot of the last block of the prompt. Answers are
# computed in float64, so that they can be compared for equality.

model.double()
prompt = [end, *tokenizer.encode("The value of the")]
assert len(prompt) % 4


def two_rows(pool):
    sampler, cache = Sampler(temperature=0.8), PagedCache(pool)
    options = dict(num_return_sequences=2, cache=cache)
    rows = complete(generate(model, [prompt], 12, sampler, **options))
    for row in rows:
        print("   ", repr(tokenizer.decode(row)))
    return rows


print("copied first")
right = two_rows(new_pool(16, block_size=4))
print("not copied")
broken = new_pool(16, block_size=4)
broken.own = lambda block: block
wrong = two_rows(broken)

request = Request(
    prompt=prompt, max_new_tokens=12, sampler=Sampler(temperature=0.8)
)
expected = [alone(replace(request, seed=seed)) for seed in (0, 1)]
assert right == expected and wrong != expected

# %%
# Nothing crashes, but one row has a token of the other in its past. The fixed line asks ``pool.own`` for the last block
# before any write into it. The check that finds the mistake compares each row with the same row alone; a test of a
# single row cannot, because its blocks have one user.
#
# Which sentence is false?
# ------------------------
#
# 1. A row in a pool wastes less than one block, however long it is.
# 2. Paged memory makes the keys and values of a token smaller.
# 3. A copy of a row costs no copied key until one of the two is written into.
# 4. A request that loses its blocks and reads its text again says what it would have said otherwise, up to rounding.

per_token = 2 * config.n_layer * config.n_embd * 8  # bytes, in float64
pool = new_pool(4, block_size=16)
cache = GrowingCache(config.n_layer, reserve=64)
model(random_tokens(1, 64), cache=cache)
print(pool.nbytes // 64, cache.nbytes // 64, "bytes per token")
assert pool.nbytes == cache.nbytes == 64 * per_token

# %%
# Sentence 2 is false: a token costs the same bytes in a block as in a row. What paging saves is memory that is
# reserved and empty. Sentence 4 is tested in `the engine in depth <3b_engine_in_depth.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* Blocks of one slot waste nothing. Why does nobody use them? Hint: count the entries of all tables for the
#    load, and the beginnings that the engine keeps (``engine.prefixes``), for P = 1, 4, 16. A right answer shows what
#    grows as P shrinks.
#
# Summary
# -------
#
# * Rows of fixed length held tokens in less than a quarter of their slots; blocks of 16, in more than three quarters.
# * A block table says where the token at a position is. Rows share blocks, count their users, and copy one before they
#   write into it; a copied row and a reordered batch move no key.
# * Gathering copied more bytes in a step than the model has weights. A kernel follows the table and copies nothing.
#
# Sources
# -------
#
# * Kwon et al.: `Efficient Memory Management for Large Language Model Serving with PagedAttention <https://arxiv.org/abs/2309.06180>`_, 2023. Blocks, tables, copy on write.

import sys

import lm_from_scratch

print("python", sys.version.split()[0], "torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
