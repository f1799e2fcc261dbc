r"""
The engine in depth: memory in blocks, and who runs when
========================================================

The lesson on `continuous batching <3_continuous_batching.ipynb>`_ serves twelve requests with a loop of 19 lines. What
does a whole engine gain on a mixed load? How do rows share memory without disturbing each other? And what happens when
the memory runs out, when a long prompt arrives, or when many prompts begin alike?

A load of requests
------------------

Twenty prompts are pieces of the Python language reference, 3 to 32 tokens long, for our small GPT-2. Each request
has its own limit of new tokens, drawn so that it is at least :math:`x` with the probability :math:`10 / x`, and at most
64: most are short, a few are long. An answer may end earlier, with the end of the document or with a blank line.

``generate`` answers them one by one, in float64, and every other way on this page has to give exactly these answers.
"""

# sphinx_gallery_words = ["prefix caching", "chunked prefill", "preemption", "max_num_seqs", "time to first token", "TTFT", "inter-token latency", "RadixAttention", "block_size", "copy-on-write", "memory fragmentation", "gpu_memory_utilization", "num_gpu_blocks"]

import inspect
import math
import statistics
import time
from dataclasses import replace

import torch

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.paged import BlockPool, PagedCache
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.generation.engine import Engine
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.requests import Request
from lm_from_scratch.generation.sampling import GREEDY, Sampler
from lm_from_scratch.text.corpora import reference

torch.set_grad_enabled(False)
model, tokenizer = load_shipped()
model.double()
config, end = model.config, tokenizer.eos_token_id
texts = [tokenizer.encode(document.text) for document in reference()[:20]]
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
        max_new_tokens=int(min(64, 10 / (1 - u))),
        sampler=Sampler(temperature=0.8),
        stop_tokens=[end, *blank],
        seed=seed,
    )


def alone(r):
    how = (r.max_new_tokens, r.sampler, r.stop_tokens)
    return complete(generate(model, [r.prompt], *how, seed=r.seed))[0]


load = [draw_request(seed) for seed in range(20)]
answers = [alone(request) for request in load]
lengths = sorted(len(answer) for answer in answers)
print("tokens of the answers, shortest first:", *lengths)

assert statistics.median(lengths) * 3 < max(lengths)

# %%
# The longest answer has more than three times as many tokens as the median one. Whatever is reserved or computed for
# the longest one is wasted on most others.
#
# Blocks that several rows share
# ------------------------------
#
# One pool owns the memory, and a row is a list of block numbers, its *table*. A block may belong to several rows: the
# pool counts the users of every block, and to copy a row is to copy its table. Only writing needs care. Before a row
# writes into a block that has other users, it copies the block and leaves the old one to them. This is *copy on write*.


def new_pool(n_blocks, block_size=16):
    sizes = (config.n_layer, config.n_head, config.head_dim)
    dtype = model.head.weight.dtype
    return BlockPool(*sizes, n_blocks, block_size, dtype)


print(inspect.getsource(BlockPool.own))

# %%
# A prompt of 10 tokens fills two blocks of 4 and half of a third. Each line below says how many users the first six
# blocks have.

pool = new_pool(12, block_size=4)
cache, prompt = (
    PagedCache(pool),
    torch.randint(4096, (1, 10), generator=generator),
)
seen = {}


def show(event):
    seen[event] = pool.users[:6]
    print(f"{event:24}", *pool.users[:6])


model(prompt, cache=cache)
show("prompt")
cache.repeat(3)
show("three rows")
model(torch.randint(4096, (3, 1), generator=generator), cache=cache)
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
# Attention, however, needs the keys of a row in one tensor. The package's ``PagedCache`` gathers them for every pass: a
# copy of all that the rows hold, and for eight rows of 160 tokens more bytes than all the weights have. A kernel
# follows the table instead, and copies nothing: `decoding in depth <../gpu/11a_decoding_in_depth.ipynb>`_ has one.

gathered = 2 * 8 * 160 * config.n_layer * config.n_embd
assert gathered > sum(p.numel() for p in model.parameters())

# %%
# Batches that start and end together
# -----------------------------------
#
# The static batching of the lesson puts several requests into one padded batch, waits for the longest answer, and takes
# the next ones. The *places* of a pass are its rows times its columns, padding included.


def in_batches(requests, size):
    written, passes, places = [], [], 0
    for first in range(0, len(requests), size):
        group = requests[first : first + size]
        rows, prompts = [[] for _ in group], [r.prompt for r in group]
        most = max(r.max_new_tokens for r in group)
        how = (group[0].sampler, group[0].stop_tokens)
        steps = generate(model, prompts, most, *how, seed=group[0].seed)
        passes.append(0)
        for step in steps:
            passes[-1] += 1
            for row, new, request in zip(rows, step, group):
                if new is not None and len(row) < request.max_new_tokens:
                    row.append(new)
            if all(ended(r, row) for r, row in zip(group, rows)):
                break
        written += rows
        places += len(group) * (max(map(len, prompts)) + passes[-1] - 1)
    return written, passes, places


def ended(request, row):
    return len(row) == request.max_new_tokens or bool(
        row and row[-1] in request.stop_tokens
    )


# %%
# One step of an engine
# ---------------------
#
# The engine decides anew at every step which requests it runs. It admits those for which there is room. It reads a
# piece of each prompt that is not read yet, and puts pieces of similar length into one pass. Then it runs one pass over
# the requests that are writing, one token each. A request that has finished gives its row and its blocks back at once.

print(inspect.getsource(Engine.step))


def in_engine(requests, n_blocks=512, **options):
    options = dict(share_prefixes=False) | options
    engine = Engine(model, new_pool(n_blocks), **options)
    for request in requests:
        engine.submit(request)
    steps = list(engine.run())
    return [engine.results[n] for n in range(len(requests))], steps


# %%
# Each way runs the same twenty requests. A place is useful if it runs a token of a prompt or of an answer for the first
# time.

by_batch, passes, batch_places = in_batches(load, 4)
by_engine, steps = in_engine(load, max_batch=4)
assert by_engine == answers

useful = sum(len(r.prompt) + len(a) - 1 for r, a in zip(load, answers))
engine_passes = sum(step.passes for step in steps)
engine_places = sum(step.places for step in steps)
print("                passes  places  useful")
for name, n_passes, places in (
    ("one by one", sum(lengths), useful),
    ("batches of 4", sum(passes), batch_places),
    ("engine, 4 rows", engine_passes, engine_places),
):
    print(f"{name:15}{n_passes:7}{places:8}{useful / places:8.0%}")

assert useful < 0.7 * batch_places and useful > 0.85 * engine_places
assert engine_passes < sum(passes) < 0.6 * sum(lengths)

# %%
# One by one, no place is wasted, but nearly every pass reads all weights for one token. In padded batches, rows that
# have finished wait for the last one, and three in ten places or more are wasted. In the engine the next request
# takes the row: it wastes far fewer places, and needs fewer passes.
#
# Throughput and latency
# ----------------------
#
# How many rows should run together? Three quantities give different answers: the tokens of all requests per second
# (*throughput*), the time between two tokens of one request (a *latency*), and the wait for its first token when all
# requests arrive at once. The table is relative to one row, in processor time.

widths, measured = [1, 4, 12], []
for max_batch in widths:
    engine = Engine(model, new_pool(512), max_batch, share_prefixes=False)
    for request in load[:12]:
        engine.submit(request)
    now, gaps, first, n_tokens = 0.0, [], {}, 0
    while engine.waiting or engine.running:
        begin = time.process_time()
        step = engine.step()
        taken = time.process_time() - begin
        now += taken
        n_tokens += len(step.tokens)
        gaps += [taken for number in step.tokens if number in first]
        first |= {number: now for number in step.tokens if number not in first}
    waits = statistics.mean(first.values())
    measured.append((n_tokens / now, statistics.median(gaps), waits))

print("rows                ", *(f"{width:6}" for width in widths))
names = ["tokens per second", "time between tokens", "wait for the first"]
for name, values in zip(names, zip(*measured)):
    print(f"{name:20}", *(f"{v / values[0]:6.2f}" for v in values))
rates, gaps, waits = zip(*measured)
assert rates[2] > rates[0] and gaps[2] > 1.2 * gaps[0] > 0
assert waits[2] < 0.6 * waits[0]

# %%
# More rows raise the throughput and shorten the queue. They do not make a request write faster: each of its tokens
# waits for a pass over all rows. An operator chooses ``max_batch`` by the time between tokens that readers accept.
#
# The memory decides
# ------------------
#
# How many rows can run depends on the memory. Give the engine 1,024 slots, which is four rows of 256, or 64 blocks of
# 16. Then make the pool smaller, down to the blocks that the longest request needs by itself.

least = max(-(-(len(r.prompt) + r.max_new_tokens - 1) // 16) for r in load)
print("blocks  most rows  put back  read again")
for n_blocks in (64, least):
    texts_of_all, steps = in_engine(load, n_blocks, max_batch=24)
    most = max(len(step.fed) for step in steps)
    back = sum(len(step.put_back) for step in steps)
    again = sum(sum(step.fed.values()) for step in steps) - useful
    print(f"{n_blocks:6}{most:11}{back:10}{again:12}")
    assert texts_of_all == answers and (n_blocks < 64 or most > 8)
assert back > 0 and again > 0

# %%
# In the memory of four fixed rows, more than eight requests run at a time. In the smallest pool the youngest requests
# give their blocks back (vLLM calls this *preemption*), wait, and read their tokens again. No answer is lost, and none
# changes.
#
# Long prompts in pieces
# ----------------------
#
# Three requests are writing when a prompt of 200 tokens arrives. If the engine reads it in one pass, the next tokens of
# the three have to wait for all of it. If it reads pieces of ``prefill_chunk`` tokens, they wait for one piece.

words = [token for ids in texts for token in ids]
writing = [
    replace(r, prompt=r.prompt[:3], max_new_tokens=30, stop_tokens=())
    for r in load[:3]
]
long = replace(load[3], prompt=[end, *words[:199]], max_new_tokens=5)
expected = [alone(r) for r in (*writing, long)]
print("piece  most places between two tokens  steps to the first token")
for chunk in (256, 32, 8):
    engine = Engine(model, new_pool(64), prefill_chunk=chunk)
    for request in writing:
        engine.submit(request)
    for _ in range(4):
        engine.step()
    number = engine.submit(long)
    steps = list(engine.run())
    most = max(step.places for step in steps)
    first = next(i for i, s in enumerate(steps, 1) if number in s.tokens)
    print(f"{chunk:5}{most:31}{first:26}")
    assert [engine.results[n] for n in range(4)] == expected
    assert most == min(chunk, 200) + 3 and first == math.ceil(200 / chunk)

# %%
# The three wait for 203 places, or for 35, or for 11. The long prompt pays for it: it needs 1, 7 or 25 steps to its
# first token. vLLM calls this *chunked prefill*. Pieces of similar length are read in one pass, so that little of it is
# padding.
#
# A common beginning
# ------------------
#
# Eight requests begin with the same 100 tokens, as chats begin with one system prompt. With ``share_prefixes`` the
# engine remembers every full block, and shares it with requests that begin alike. It finds a block by the tokens in it
# and *the number of the prefix before it*, that is, of all tokens up to the block. Link by link, this key stands for
# everything from the beginning of the text to the end of the block.

print(inspect.getsource(Engine._find))

system = [end, *words[300:399]]
chats = [
    replace(r, prompt=[*system, *r.prompt[1:]], max_new_tokens=8)
    for r in load[:8]
]
expected = [alone(r) for r in chats]
prompts = sum(len(r.prompt) for r in chats)
total = prompts + sum(len(answer) - 1 for answer in expected)
runs = {}
for name, sharing, ahead in (
    ("not shared", False, 0),
    ("shared, all at once", True, 0),
    ("shared, one goes ahead", True, 1),
):
    options = dict(max_batch=4, share_prefixes=sharing)
    engine, steps = Engine(model, new_pool(128), **options), []
    for part in (chats[:ahead], chats[ahead:]):
        for request in part:
            engine.submit(request)
        steps += engine.run()
    assert [engine.results[n] for n in range(8)] == expected
    saved = total - sum(sum(step.fed.values()) for step in steps)
    runs[name] = saved
    print(f"{name:23} {prompts - saved} of {prompts} prompt tokens are run")

assert list(runs.values()) == [0, 4 * 96, 7 * 96]

# %%
# Each request that finds the beginning saves 96 of its 100 tokens: six full blocks of 16. If all arrive at once,
# the first four save nothing, because none of them has filled a block when they are admitted.
#
# What vLLM does beyond this
# --------------------------
#
# * *A kernel that follows the table.* The paper reports that its attention alone is 20 to 26 % slower than a kernel
#   for rows in one piece, and that larger batches make up for it.
# * *One pass for reading and writing.* Orca and vLLM lay the tokens of all requests end to end, without padding, and
#   vLLM gives each step a budget of tokens. Our engine runs padded passes, and limits the piece of each request.
#   Sarathi-Serve studies how large a piece should be.
# * *Swapping.* The system of the paper can also move the blocks of a request that is put back to the memory of the
#   CPU. The documentation of version 0.17 describes reading again, as here.
# * *Hashes.* vLLM finds a block by a hash of the hash before it and its own tokens. SGLang keeps the prefixes in a
#   radix tree. Our chain of numbers is such a tree: exact, since no number is given twice, and linear in the tokens.
# * *CUDA graphs*, several GPUs, quantised caches, and sampling for all rows at once.
#
# Bug museum
# ----------
#
# The shared block that was not copied
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Two rows with a common prompt write into one block. (M13)
#
# Without ``own``, both rows write their first tokens into the same slot of the last block of the prompt.

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
# The block that was known by its own tokens only
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A block is found again by its tokens alone, though its keys depend on all tokens before. (M14)
#
# Keys and values depend on the token, on its position, and above the first layer on all tokens before it. A lookup by
# the block's own tokens finds a block that belongs to another beginning, at other positions.


class OwnTokensOnly(Engine):
    def _key(self, before, tokens):
        return 0, tuple(tokens)


a, b, c = ([*words[i : i + 16]] for i in (500, 600, 700))
requests = [
    Request(prompt=prompt, max_new_tokens=8, sampler=GREEDY)
    for prompt in (
        a + b + c + [end],
        *(a + c + words[i : i + 3] for i in range(4)),
    )
]
expected = [alone(request) for request in requests]
for kind in (Engine, OwnTokensOnly):
    engine = kind(model, new_pool(64), max_batch=1)
    for request in requests:
        engine.submit(request)
    found = {}
    for step in engine.run():
        found |= step.shared
    wrong = sum(engine.results[n] != expected[n] for n in range(5))
    print(
        f"{kind.__name__:14} {found[1]} tokens found, {wrong} of 5 answers wrong"
    )
    assert found[1] == (16 if kind is Engine else 32)
    assert (wrong > 0) == (kind is OwnTokensOnly)

# %%
# The wrong engine finds more, so it looks faster. The fixed line is ``return before, tuple(tokens)``. The check that
# finds the mistake compares with each answer alone, on prompts that hold the same block after different beginnings.
#
# Exercises
# ---------
#
# 1. *Medium.* Give the padded batches their best chance: sort the load by limit before it is cut into groups. Which
#    share of the places is useful now, and which request pays? Hint: ``sorted(load, key=...)``, and keep the numbers.
#    A good answer shows that the known limit helps, and that early stops still leave places empty.
# 2. *Medium.* Admit the request with the smallest limit first, and measure after how many passes each request ends.
#    Hint: reorder ``engine.waiting`` between two steps. A good answer shows a better mean, and that the eight largest
#    requests pay for it.
# 3. *Hard.* Give a step a budget of tokens instead of a piece for each request: every writing request takes one, and
#    the rest goes to the oldest prompts. Hint: ``_piece``, and the groups in ``_begin``. A good answer bounds the
#    tokens of a step when three long prompts arrive at once, where ``prefill_chunk`` does not, and every answer is
#    still the one alone.
#
# Summary
# -------
#
# * Padded batches wasted three in ten places or more, the engine far fewer, in fewer passes.
# * Rows share blocks, and copy one before they write into it. Copying a row or reordering a batch moves no key.
# * Every answer was what the request says alone: with requests put back, prompts in pieces, and shared beginnings.
# * More rows raise the throughput, and the time between two tokens.
#
# Sources
# -------
#
# * Yu, Jeong, Kim, Kim, Chun: `Orca <https://www.usenix.org/conference/osdi22/presentation/yu>`_, OSDI 2022. Batches that change at every step.
# * Kwon et al.: `Efficient Memory Management for Large Language Model Serving with PagedAttention <https://arxiv.org/abs/2309.06180>`_, 2023. Blocks, tables, copy on write; the numbers that this page cites.
# * Zheng et al.: `SGLang <https://arxiv.org/abs/2312.07104>`_, 2023. Prefixes in a radix tree.
# * Agrawal et al.: `Sarathi-Serve <https://arxiv.org/abs/2403.02310>`_, 2024. Prompts in pieces beside writing requests.
# * vLLM: `design of the prefix cache <https://docs.vllm.ai/en/latest/design/prefix_caching/>`_ and `optimization and tuning <https://docs.vllm.ai/en/v0.17.1/configuration/optimization/>`_.


import sys

import lm_from_scratch

print("python", sys.version.split()[0], "torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
