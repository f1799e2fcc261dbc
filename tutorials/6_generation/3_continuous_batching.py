r"""
Continuous batching and paged memory
====================================

Twelve people send a prompt to one model at the same time. The machine has room for a batch of four rows. How would you
serve them?

The obvious way is *static batching*: take four requests, wait until all four have their answer, take the next four. A
*pass* is one run of the model, and in every pass a request writes one token. Here is what each row of the batch does, for
twelve answers of our small Qwen2. The numbers are the requests.
"""

# sphinx_gallery_needs = ["../5_caching/1_why_cache", "../5_caching/4_padded_batches"]
# sphinx_gallery_words = ["vLLM", "PagedAttention", "in-flight batching", "iteration-level scheduling", "static batching", "serving", "inference server", "concurrent requests", "dynamic batching", "serve many users", "several requests at once", "prefix caching", "paged attention", "how does vLLM work", "throughput", "block size", "many prompts at once", "system prompt shared", "shared prompt", "prompt caching", "cache the prompt", "requests", "queue", "scheduler", "users at the same time", "many users", "latency", "latency vs throughput", "GPU utilisation", "server for a model", "SGLang", "TGI", "batching explained"]
from lm_from_scratch.drawings import generation as drawings

lengths = [4, 24, 7, 4, 24, 6, 24, 6, 4, 3, 15, 4]  # tokens of the answers
static = []  # for each pass: the request that each row works on
for first in (0, 4, 8):
    group = range(first, first + 4)
    for t in range(max(lengths[n] for n in group)):
        static.append([n if t < lengths[n] else None for n in group])

numbers = [str(n) for n in range(1, 13)]
ways = {"static batching": static}
drawings.batch_timelines(ways, numbers)

# %%
# Grey is waste. Request 1 has its answer after 4 passes, and its row stays idle until request 2 has written 24 tokens.
# Sorting the requests by the length of their answers would help, but nobody knows it in advance.
#
# A free row takes the next request
# ---------------------------------
#
# The remedy is *continuous batching*: decide before *every pass* which requests are in the batch. A row that has become
# free takes the next request at once.
#
# Here are the requests. An answer ends with its first sentence, or after 24 tokens.

import torch

from lm_from_scratch.checkpoint.weights import load_shipped

model, tokenizer = load_shipped("qwen2-docs")
model.double()  # so exact that answers can be compared letter by letter

beginnings = (
    "If the file does not exist, an / For example, / It is possible to / "
    "Open a file and / This method / If the list is empty, / The class / "
    "If an exception is raised, / You can use / Return the number of / "
    "The default is / An object"
)
texts = beginnings.split(" / ")
prompts = [tokenizer.start(text) for text in texts]
stops = [i for i in range(4096) if tokenizer.decode([i]).endswith(".")]

# %%
# The rows of a pass are now in different stages. One reads a prompt of nine tokens while its neighbours each read the
# single token that they have just written. Shorter rows are `padded on the left
# <../5_caching/4_padded_batches.ipynb>`_, and ``positions`` say where in its own text each token is. The keys and
# values of a row are in a ``Row``, whose memory comes from a common pool and goes back to it. (The blocks of the pool
# are explained further down.)

from lm_from_scratch.attention.visibility import PADDING
from lm_from_scratch.cache.paged import BlockPool, PagedCache, Row
from lm_from_scratch.generation.generate import complete, generate, prefill
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.text.batch import padded_batch


def new_pool(n_blocks=32, P=4):
    c = model.config
    sizes = c.n_layer, c.n_kv_head, c.head_dim
    return BlockPool(*sizes, n_blocks, P, torch.float64)


def one_pass(unread, rows, pool):
    batch = padded_batch(unread, pad_token_id=0, side="left")
    lengths = torch.tensor([row.length for row in rows])[:, None]  # (B, 1)
    positions = batch.positions + lengths  # (B, T)
    positions = positions.masked_fill(batch.positions == PADDING, PADDING)
    cache = PagedCache(pool, rows)  # what these rows have read before
    # one pass, of which the logits of the last column are returned
    return prefill(model, batch.idx, cache, positions=positions)  # (B, V)


# %%
# With this pass, the loop of a server fits into 19 lines. It puts requests into free rows, runs a pass, gives each
# request its token, and frees the rows of those that have finished.


def serve(prompts, n_rows=4):
    pool, waiting = new_pool(), list(range(len(prompts)))
    ids, rows, passes = [[*prompt] for prompt in prompts], {}, []
    seats = [None] * n_rows  # which request is in which row
    while waiting or rows:
        for i in range(n_rows):
            if seats[i] is None and waiting:
                seats[i] = waiting.pop(0)
                rows[seats[i]] = Row()
        passes.append([*seats])
        active = [n for n in seats if n is not None]
        unread = [ids[n][rows[n].length :] for n in active]
        logits = one_pass(unread, [rows[n] for n in active], pool)
        for n, token in zip(active, logits.argmax(-1).tolist()):
            ids[n].append(token)
            if token in stops or len(ids[n]) == len(prompts[n]) + 24:
                pool.cut(rows.pop(n), 0)  # gives its memory back
                seats[seats.index(n)] = None
    return ids, passes


# %%
# **Predict first.** Static batching took 63 passes. How many does ``serve`` take?
#
# * about 60
# * about 40
# * about 15

ids, passes = serve(prompts)
ways["continuous batching"] = passes
print(f"{len(static)} / {len(passes)} = {len(static) / len(passes):.2f}")

n_tokens = sum(map(len, ids)) - sum(map(len, prompts))
idle = [sum(row.count(None) for row in way) for way in ways.values()]
assert [len(static), len(passes), n_tokens] == [63, 38, 125] and idle[0] == 127
assert -(-n_tokens // 4) == 32
assert None not in [seat for seats in passes[:28] for seat in seats]
assert passes[27] == [4, 11, 6, 10] and all(
    None in seats for seats in passes[28:]
)
assert len({line for *_, line in serve.__code__.co_lines()} - {None}) == 19
drawings.batch_timelines(ways, numbers)

# %%
# About 40, and fewer than 32 are impossible: the answers have 125 tokens, and a pass writes at most four. Rows are idle
# only at the end, when no request is waiting any more. In a busy server that end does not come.
#
# Does an idle row matter, if it does nothing? On a GPU, yes. A pass over four rows takes hardly longer than one over a
# single row, since most of its time goes into `reading the weights <../5_caching/1_why_cache.ipynb>`_. An idle row is
# an empty seat in a bus that has to drive anyway.
#
# Do neighbours change an answer?
# -------------------------------
#
# The answer of request 9 was written beside those of requests 2, 5 and 7. In a real service, these texts belong to
# other people.
#
# **Predict first.** Now ``generate`` answers each prompt alone. How many of the twelve answers are those of ``serve``?
#
# * all twelve
# * only the first four, which started together
# * none, since the neighbours shift all numbers a little

alone = [
    complete(generate(model, [prompt], 24, GREEDY, stops))[0]
    for prompt in prompts
]
same = [p + answer == i for p, answer, i in zip(prompts, alone, ids)]
print(sum(same), "of", len(same), "are equal")
for n in (0, 3, 7, 11):
    print(n + 1, repr(texts[n] + tokenizer.decode(alone[n])))

assert all(same) and [len(answer) for answer in alone] == lengths
assert {n for seats in passes if 8 in seats for n in seats} - {None, 8} == {
    1,
    4,
    6,
}

# %%
# All twelve. Each row attends to its own keys alone, and all else in the model works on one token at a time. Neighbours
# share the weights and nothing else.
#
# This is the test of any server: *each request gets the answer that it gets alone.*
#
# How much memory to reserve?
# ---------------------------
#
# Each token leaves its keys and values in a slot of the row's memory. The model reads texts of up to 256
# tokens. To be safe, a server could reserve 256 slots for each row.
#
# **Predict first.** In a typical pass, what share of these reserved slots holds a token?
#
# * about 5 %
# * about 40 %
# * about 80 %


def share(reserved):
    held = [
        n
        for prompt, answer in zip(prompts, alone)
        for n in range(len(prompt), len(prompt) + len(answer))
    ]
    return sum(held) / sum(reserved(n) for n in held)


print(f"256 slots a row: {share(lambda n: 256):.0%}")
print(f"blocks of four:  {share(lambda n: -(-n // 4) * 4):.0%}")

assert 0.04 < share(lambda n: 256) < 0.05
assert 0.88 < share(lambda n: -(-n // 4) * 4) < 0.90

# %%
# About 5 %: the short requests pay for the longest one that might come. (Ours are very short. The authors of vLLM, a
# widely used server, found `20 to 38 % <https://arxiv.org/abs/2309.06180>`_ in the servers of 2023.)
#
# The second line of the output is their remedy, *paged memory*. All memory is one pool, cut into small *blocks*, here
# of P = 4 slots. (They are also called pages, and are not the blocks of the model.) A row takes another block when its
# last one is full, so it wastes less than one block.
#
# Where is a token?
# -----------------
#
# The blocks of a row can be anywhere in the pool. A list, its *block table*, says where. To see one, we run the
# package's ``Engine``, which does what ``serve`` does and more. Requests of Ann, Ben, Cleo and Dan arrive one after the
# other, and we stop in the middle.

from lm_from_scratch.generation.engine import Engine
from lm_from_scratch.generation.requests import Request

pool = new_pool(14)
engine = Engine(model, pool, max_batch=3)
arriving = [texts[7], texts[4], texts[0], "If the file does not exist, the"]
found = {}  # tokens in blocks that a request shares
how = dict(max_new_tokens=24, sampler=GREEDY, stop_tokens=stops)
for text, steps in zip(arriving, (2, 5, 2, 1)):
    engine.submit(Request(prompt=tokenizer.start(text), **how))
    for _ in range(steps):
        found |= engine.step().shared
people = ["Ann", "Ben", "Cleo", "Dan"]
rows = {people[r.number]: r for r in engine.running}
for name, r in rows.items():
    print(name, "has the blocks", r.row.table)

tables = {name: r.row.table for name, r in rows.items()}
read = {n: tokenizer.pieces(r.tokens[: r.row.length]) for n, r in rows.items()}
read = {name: ["⊢", *pieces[1:]] for name, pieces in read.items()}
held = {block for table in tables.values() for block in table}
kept = [b for b, n in enumerate(pool.users) if n and b not in held]
drawings.page_table(read, tables, 14, 4, kept)

# %%
# On the left is what a request sees: its text, in order (⊢ is its start, the token ``<|endoftext|>``). On the right is
# the memory, where each block took the next free place. The lines are the block tables. With P slots in a block, the
# token at position p is in
#
# .. math::
#
#    \text{block} = \text{table}[\lfloor p / P \rfloor], \qquad \text{slot} = p \bmod P
#
# Position 9 of Ben's row, for example, is in block ``table[2]``, which is 8, and there in slot 1. The pool itself
# numbers its slots from its beginning:

block, slot = rows["Ben"].row.table[9 // 4], 9 % 4
place = pool.slots(rows["Ben"].row)[9].item()
print(f"block {block}, slot {slot}: slot {place} of the pool")

assert (block, slot) == (8, 1)
assert place == 4 * block + slot
assert tables == {"Ben": [2, 4, 8], "Cleo": [5, 6, 7], "Dan": [5, 6, 9]}
assert found == {3: 8} and kept == [0, 1, 3] and 0 in engine.results
assert read["Cleo"][:8] == read["Dan"][:8]
assert pool.users[5] == pool.users[6] == 3  # Cleo, Dan, and the engine

# %%
# Look at blocks 5 and 6: they have two colours. Cleo's and Dan's texts begin with the same eight tokens. So Dan's row
# took two blocks of Cleo's, and never ran these tokens. Chats often begin with the same long instructions; a server
# reads them once.
#
# Ann has her answer already. Her full blocks are *kept*, because another request may begin like hers. When memory is
# short, they go first.
#
# Sharing has one danger. A row must not write into a block that another row reads, so it makes a copy first: *copy on
# write*. Without the copy nothing crashes, but a stranger's word becomes part of somebody's text.
#
# What else a server decides
# --------------------------
#
# * *The memory runs out.* The youngest request gives its blocks back, waits, and reads its text again later. Its answer
#   stays the same.
# * *A long prompt arrives.* Read in one pass, it would hold up everybody's next token. So it is read in pieces.
# * *How many rows?* More rows give the server more tokens a second. But a pass over many rows takes longer, and every
#   reader waits for it.
#
# `The engine in depth <3b_engine_in_depth.ipynb>`_ measures all three, and shows what goes wrong without the copy.

# exercises 1, 2, 3
assert [len(serve(prompts, n)[1]) for n in (1, 2, 8, 12)] == [125, 67, 24, 24]
assert (
    len(serve(sorted(prompts, key=lambda p: -len(alone[prompts.index(p)])))[1])
    == 32
)
assert (
    sum(
        len({*seats} - {None})
        * max([1, *(len(prompts[n]) for n in {*seats} - {*before, None})])
        for before, seats in zip([[], *passes], passes)
    )
    == 261
)
assert 261 - (sum(map(len, prompts)) + 125 - 12) == 89

# %%
# Exercises
# ---------
#
# 1. *Easy.* How many passes does ``serve`` take with 1, 2, 8 and 12 rows? A good answer says why twelve rows do not
#    need only 125 / 12 passes.
# 2. *Medium.* Suppose that you knew the lengths of the answers. In which order of ``prompts`` does ``serve`` take the
#    fewest passes? A good answer needs 32 or fewer, and says which requests wait longer.
# 3. *Medium.* While one row reads a prompt of nine tokens, the other three read one each and are padded. Count the
#    places of all passes, and those that hold padding. A good answer is 89 of 261. It also says what it would cost to
#    read each new prompt in a pass of its own.
#
# Summary
# -------
#
# * Static batching waits for the longest answer. Continuous batching decides before every pass which requests run.
# * The test of any server: each request gets the answer that it gets alone.
# * Paged memory is a pool of small blocks. A block table says where each token is, and requests that begin alike share
#   blocks.
