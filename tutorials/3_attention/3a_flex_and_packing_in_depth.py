r"""
Packing and FlexAttention in depth
==================================

The lesson on `packing <3_flex_and_packing.ipynb>`_ puts documents into rows and skips blocks that are hidden. Do loss
*and gradients* stay what they were? And besides a mask, how else can attention be given the boundaries of documents?
This page answers both, with cumulative lengths and with FlexAttention.

Two paths exist for GPUs only and **were not run here**: the compiled FlexAttention, and the fused ``varlen_attn`` of
PyTorch.

Letters name axes: B rows, T queries, S keys, H query heads, Hkv key heads, D features of a head, N tokens of all
documents together.

Targets follow from positions
-----------------------------

The lesson names three things that a packed document needs: positions, document numbers and targets. The third follows
from the first: ``next_token_targets`` counts a target only if the next position is one higher.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["score_mod", "ALiBi", "flash_attn_varlen_func", "cu_seqlens", "position_ids reset", "FlexAttention slow", "padding-free"]

import copy
import inspect
import math

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.text.corpora import docstrings

gpt2, tokenizer = load_shipped()
texts = [document.text for document in docstrings()]
generator = torch.Generator().manual_seed(0)
order = torch.randperm(len(texts), generator=generator).tolist()
start = tokenizer.eos_token_id
encoded = tokenizer.encode_batch([texts[i] for i in order[:1000]])
LIMIT = 512
sequences = [[start, *ids][:LIMIT] for ids in encoded]  # shuffled, cut


def first_fit(sequences, size):
    rows, room = [], []
    for ids in sorted(sequences, key=len, reverse=True):
        fits = (r for r in range(len(rows)) if room[r] >= len(ids))
        r = next(fits, len(rows))
        if r == len(rows):
            rows.append([])
            room.append(size)
        rows[r].append(ids)
        room[r] -= len(ids)
    return rows


from lm_from_scratch.text.batch import Batch, padded_batch
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss


def packed(rows, size):
    idx = torch.full((len(rows), size), start)
    positions = torch.full((len(rows), size), -1)
    documents = torch.full((len(rows), size), -1)
    for r, row in enumerate(rows):
        first = 0
        for number, ids in enumerate(row):
            at = slice(first, first + len(ids))
            idx[r, at] = torch.tensor(ids)
            positions[r, at] = torch.arange(len(ids))
            documents[r, at] = number
            first += len(ids)
    targets = next_token_targets(idx, positions=positions)
    return Batch(idx, targets, positions, documents)


some = [ids[:60] for ids in sequences if len(ids) > 10][:20]
small = [ids[:n] for ids, n in zip(some, (7, 4, 9, 3))]
batch = packed(first_fit(small, 13), 13)
print(batch.positions)
print(batch.documents)
print(batch.targets)
counted = (batch.targets != -100).sum().item()
assert counted == sum(len(ids) - 1 for ids in small) == 19

# %%
# Here the last token of every document has no target. In the stream of ``PackedBatches`` it predicts the end-of-text
# token with which the next document begins.
#
# The same loss, the same gradients
# ---------------------------------
#
# A Qwen2 of three blocks, one of them with a window, computes twenty documents in three ways: one at a time, as a padded
# batch, and packed. The weights are large and the numbers are float64, so that even a small mistake would show.

from lm_from_scratch.attention.kinds import use_attention_
from lm_from_scratch.models.qwen2 import (
    FULL,
    SLIDING,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from lm_from_scratch.models.randomize import randomize_

tiny = Qwen2Config(
    vocab_size=tokenizer.vocab_size,
    block_size=LIMIT,
    n_layer=3,
    n_head=6,
    n_kv_head=2,
    n_embd=48,
    intermediate_size=112,
    sliding_window=8,
    layer_types=(FULL, SLIDING, FULL),
    eos_token_id=None,
)


qwen2 = Qwen2ForCausalLM(tiny)
randomize_(qwen2)
qwen2.double()


def loss_and_gradients(*batches):
    counts = [int((b.targets != -100).sum()) for b in batches]
    qwen2.zero_grad()
    total = 0.0
    for b, count in zip(batches, counts):
        logits = qwen2(b.idx, positions=b.positions, documents=b.documents)
        loss = causal_lm_loss(logits, b.targets) * count / sum(counts)
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in qwen2.parameters()]


layouts = {
    "alone": [padded_batch([ids], start) for ids in some],
    "padded": [padded_batch(some, start)],
    "packed": [packed(first_fit(some, 128), 128)],
}
results = {name: loss_and_gradients(*b) for name, b in layouts.items()}
wanted, wanted_gradients = results["alone"]
for name, batches in layouts.items():
    loss, gradients = results[name]
    errors = [(g - w).abs().max() for g, w in zip(gradients, wanted_gradients)]
    largest = max(w.abs().max() for w in wanted_gradients)
    tokens = sum(b.idx.numel() for b in batches)
    print(f"{name:7} {tokens:5} tokens   loss {loss:.6f}", end="   ")
    print(f"gradients within {max(errors) / largest:.0e}")
    assert abs(loss - wanted) < 1e-9 and max(errors) / largest < 1e-9

# %%
# The loss of one document is weighted by the number of its targets, because all three layouts take the mean over
# tokens.
#
# What happens when one is missing
# --------------------------------
#
# The lesson draws such losses; here they are compared with each document alone. (Without document numbers, tokens of
# the lesson see earlier slots; here they see lower positions, in later documents too.) The shipped GPT-2 was trained on
# packed rows with positions and document numbers. It reads 30 documents, with one thing taken away at a time. The
# targets stay right, so that the same tokens are counted.

short = [ids for ids in sequences if len(ids) <= 200][:30]
batch = packed(first_fit(short, 256), 256)
real = batch.positions >= 0
running = torch.where(real, torch.arange(256), -1)
one = torch.zeros_like(batch.documents)  # all tokens in one document
versions = {
    "positions and documents": (batch.positions, batch.documents),
    "one document number": (batch.positions, one),
    "positions run on": (running, batch.documents),
    "neither": (running, one),
}
nats = {}
with torch.no_grad():
    for name, (places, numbers) in versions.items():
        logits = gpt2(batch.idx, positions=places, documents=numbers)
        nats[name] = causal_lm_loss(logits, batch.targets).item()
    each = []
    for ids in short:
        idx = torch.tensor([ids])
        loss = causal_lm_loss(gpt2(idx), next_token_targets(idx))
        each.append((loss.item(), len(ids) - 1))
total = sum(loss * count for loss, count in each)
nats["each document alone"] = total / sum(count for _, count in each)

for name, loss in nats.items():
    print(f"{name:24} {loss:.3f} nats per token")
right = nats["each document alone"]
assert abs(nats["positions and documents"] - right) < 1e-4
assert all(nats[name] > right + 0.1 for name in list(versions)[1:])
assert nats["one document number"] == max(nats.values())

# %%
# Packed in the right way, the loss is that of each document alone. Half of the repair is the worst: a token sees the
# beginnings of all documents in its row, earlier and later ones, at the same positions as its own text.
#
# The leak can be measured as a derivative. How much does the last state of the second document depend on the tokens of
# the first? The only right answer is 0.

first, second = some[0][:5], some[1][:6]
pair = packed([[first, second]], 11)
x = torch.randn(1, 11, 48, generator=generator, dtype=torch.float64)
same = torch.zeros_like(pair.documents)
for name, numbers in {"own": pair.documents, "equal": same}.items():
    leaf = x.clone().requires_grad_()
    states = qwen2.model(leaf, positions=pair.positions, documents=numbers)
    states[0, -1].sum().backward()
    leak = leaf.grad[0, :5].norm().item()
    print(f"{name:5} document numbers: gradient {leak:.1f}")
    assert leak == 0.0 if name == "own" else leak > 0.1

# %%
# Lengths instead of a mask
# -------------------------
#
# A mask over a packed row of N tokens has :math:`N^2` entries, nearly all of them False. The documents themselves have
#
# .. math::
#
#    \sum_i n_i^2 \le \Big(\sum_i n_i\Big)^2 = N^2
#
# scores. A kernel that computes only these needs no mask. It needs to know where each document begins: the **cumulative
# lengths**, which are 0 and then the sum of the lengths so far.

from lm_from_scratch.attention.varlen import (
    fused_varlen_attention,
    packed_attention,
    varlen_attention,
)
from lm_from_scratch.attention.visibility import Visibility

parts = [len(ids) for ids in short]
N = sum(parts)
bounds = torch.tensor([0, *parts]).cumsum(0)
places = torch.cat([torch.arange(n) for n in parts])[None]
numbers = torch.repeat_interleave(torch.arange(30), torch.tensor(parts))[None]


def packed_row(window=None):
    return Visibility(places, places, numbers, numbers, window=window)


inside = sum(n * n for n in parts)
print("cumulative lengths", bounds[:6].tolist(), "...", N)
print(f"N x N scores are {N * N / inside:.1f} times those of the documents")
same = packed_row().query_documents[0, :, None] == numbers
assert same.sum() == inside
assert N * N / inside > 5

# %%
# ``varlen_attention`` takes queries (N, H, D), keys and values (N, Hkv, D) and these bounds. Its result equals that of
# the mask, also with a window.

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.kinds import ATTENTION_KINDS
from lm_from_scratch.attention.sdpa import sdpa_attention

H, Hkv, D = 6, 2, 8
q = torch.randn(1, H, N, D, generator=generator)
k, v = torch.randn(2, 1, Hkv, N, D, generator=generator)
flat = [x[0].transpose(0, 1) for x in (q, k, v)]  # (N, heads, D)
for window in (None, 8):
    y = varlen_attention(*flat, bounds, bounds, window)
    masked = formula_attention(q, k, v, packed_row(window))
    torch.testing.assert_close(y, masked[0].transpose(0, 1))
    error = (y - masked[0].transpose(0, 1)).abs().max().item()
    print(f"window {window}: largest difference {error:.0e}")

# %%
# On a CPU ``varlen_attention`` is a loop of fused calls, one for each document. On CUDA in half precision the package calls
# PyTorch's ``varlen_attn`` instead, one kernel for all documents. That function has no CPU kernel and **was not run
# here**; this is how it would be called.

source = inspect.getsource(fused_varlen_attention)
print(source[source.index("    y: Any") :])

# %%
# From a batch to lengths and back
# --------------------------------
#
# ``packed_attention`` has the signature of all kinds of attention. It reads from the visibility which columns belong
# together, takes them out, calls ``varlen_attention``, and puts the results back. Padding gets 0. So any padded batch computes its attention without padding, and nothing else in the model changes. The loss and the
# gradients are the same.

padded = layouts["padded"][0]
packing = copy.deepcopy(qwen2)
use_attention_(packing, "packed")
both = [m(padded.idx, positions=padded.positions) for m in (qwen2, packing)]
losses = [causal_lm_loss(logits, padded.targets) for logits in both]
print(f"sdpa {losses[0].item():.6f}   packed {losses[1].item():.6f}")
packing.zero_grad()
losses[1].backward()
for p, w in zip(packing.parameters(), wanted_gradients):
    torch.testing.assert_close(p.grad, w, rtol=0.0, atol=1e-9 * largest.item())

# %%
# Lengths say less than positions. What they cannot express, such as a ring buffer whose keys are in any order, is
# refused.

from lm_from_scratch.instruments.conformance import CASES

case = CASES["keys in any order"]
try:
    tensors = case.tensors(torch.float32)[:3]
    packed_attention(*tensors, case.visibility())
    refused = False
except ValueError as error:
    refused = True
    print(error)
assert refused

# %%
# A mask that is a function
# -------------------------
#
# FlexAttention goes the opposite way: it accepts any rule. A mask is a function of four indices, (batch, head, query,
# key), that says whether the key is visible. In this package the function is the rule of the lesson on masks, with
# indices.

from lm_from_scratch.attention.flex import mask_function, uncompiled

print(inspect.getsource(mask_function))

# %%
# On a GPU, the compiler builds this function into the attention kernel, which then reads no mask of T times S entries.
# On a CPU the package runs FlexAttention as plain PyTorch, which shows that the rule is right, and says nothing about
# speed.

for name in (
    "packed documents, window",
    "keys in any order",
    "chunk, left padding",
):
    case = CASES[name]
    tensors = case.tensors(torch.float32)[:3]
    ways = [
        ATTENTION_KINDS[kind](*tensors, case.visibility(), 0.0)
        for kind in ("formula", "flex")
    ]
    error = (ways[0] - ways[1]).abs().max().item()
    print(f"{name:26} largest difference {error:.0e}")
    assert error < 1e-5

# %%
# Blocks
# ~~~~~~
#
# The lesson draws the **block mask** of one packed row: for each block of queries and keys it records whether nothing
# is visible, something, or everything. Here are three of them.
#
# The usual block has 128 queries and 128 keys. To see something, we take blocks of 16 and a row of 192 tokens.

from matplotlib.colors import ListedColormap
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

SIZE, T = 16, 192
column = torch.arange(T)[None]
brief = [ids for ids in short if len(ids) <= 60]
row = packed(first_fit(brief, T), T)
some_row = row.documents.amax(1).argmax()  # the one with most documents
at = row.positions[some_row : some_row + 1]
docs = row.documents[some_row : some_row + 1]
causal = Visibility(column, column)
rules = {
    "causal": causal,
    "window, W = 40": Visibility(column, column, window=40),
    "packed documents": Visibility(at, at, docs, docs),
}
blocks = {
    name: create_block_mask(
        mask_function(seen, 1), 1, None, T, T, device="cpu", BLOCK_SIZE=SIZE
    )
    for name, seen in rules.items()
}


def grid(found):  # 0 hidden, 1 mixed, 2 fully visible
    kinds = torch.zeros(T // SIZE, T // SIZE, dtype=torch.long)
    for counts, columns, kind in (
        (found.kv_num_blocks, found.kv_indices, 1),
        (found.full_kv_num_blocks, found.full_kv_indices, 2),
    ):
        for r, n in enumerate(counts[0, 0].tolist()):
            kinds[r, columns[0, 0, r, :n].long()] = kind
    return kinds


# %%
# The block mask agrees with one counted from the rule. The picture shows the blocks, and in dark the scores that are
# visible.

shades = ListedColormap(["none", COLOURS[1], COLOURS[5]])
_, axes = figure(3.6, 9.0, rows=3)
for ax, (name, found) in zip(axes, blocks.items()):
    kinds = grid(found)
    mask = rules[name].mask[0, 0]
    tiles = mask.unflatten(0, (-1, SIZE)).unflatten(2, (-1, SIZE))
    tiles = tiles.transpose(1, 2).flatten(2)  # (blocks, blocks, scores)
    assert torch.equal(kinds, tiles.any(-1).long() + tiles.all(-1).long())
    hidden = (kinds == 0).float().mean().item()
    assert abs(found.sparsity() / 100 - hidden) < 1e-6
    scores = 1 - mask.float().mean().item()
    print(f"{name:17} hidden: {scores:.0%} of scores, {hidden:.0%} of blocks")
    extent = (0, T, T, 0)
    ax.imshow(kinds.numpy(), cmap=shades, vmin=0, vmax=2, extent=extent)
    dark = mask.float().numpy()
    ax.imshow(dark, cmap="Greys", vmin=0, alpha=0.35 * dark, extent=extent)
    ax.set_xticks(range(0, T + 1, 64))
    ax.set_yticks(range(0, T + 1, 64))
    ax.grid(False)
    ax.set_title(name, fontsize=10)
    ax.set(xlabel="key", ylabel="query")
plt.show()

# %%
# Empty blocks are skipped. Orange blocks are mixed, and the function decides inside them. Blue blocks are fully
# visible. Only whole blocks can be skipped: the coarser the blocks, the fewer of them are empty.

skipped = []
for size in (16, 32, 64):
    found = create_block_mask(
        mask_function(rules["packed documents"], 1),
        *(1, None, T, T),
        device="cpu",
        BLOCK_SIZE=size,
    )
    skipped.append(found.sparsity())
    print(f"blocks of {size}: {found.sparsity():.0f} % skipped")
assert skipped == sorted(skipped, reverse=True)
usual = create_block_mask(mask_function(causal, 1), 1, None, T, T, device="cpu")
assert usual.BLOCK_SIZE == (128, 128)

# %%
# Scores that are a function
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A second function may change the scores. Gemma 2 keeps them within a soft cap, :math:`c \tanh(s / c)`. Without
# FlexAttention this needs a new fused kernel; with it, one line. A plain formula agrees.

cap = 5.0
seen = rules["window, W = 40"]
q, k, v = torch.randn(3, 1, 2, T, D, generator=generator)
with uncompiled():
    y = flex_attention(
        q,
        k,
        v,
        score_mod=lambda score, b, h, t, s: cap * torch.tanh(score / cap),
        block_mask=blocks["window, W = 40"],
    )
scores = cap * torch.tanh(q @ k.mT / math.sqrt(D) / cap)
by_hand = scores.masked_fill(~seen.mask, -torch.inf).softmax(-1) @ v
torch.testing.assert_close(y, by_hand, atol=1e-5, rtol=0.0)
capless = sdpa_attention(q, k, v, seen)
print(f"the cap moves the result by {(y - capless).abs().max():.2f}")
assert (y - capless).abs().max() > 0.01

# %%
# On a CPU there is no backward pass, and FlexAttention has no argument for dropout. The package refuses both, and
# PyTorch refuses gradients on a CPU as well.

leaf = q.clone().requires_grad_()
attempts = {
    "gradients": lambda: ATTENTION_KINDS["flex"](leaf, k, v, seen, 0.0),
    "gradients, torch": lambda: flex_attention(leaf, k, v),
    "dropout": lambda: ATTENTION_KINDS["flex"](q, k, v, seen, 0.1),
}
for name, attempt in attempts.items():
    try:
        with uncompiled():
            attempt()
        refused = False
    except (ValueError, NotImplementedError) as error:
        refused = True
        print(f"{name}: {str(error)[:62]}")
    assert refused

# %%
# Bug museum
# ----------
#
# Positions that run on
# ~~~~~~~~~~~~~~~~~~~~~
#
# Packed documents are isolated, and their positions or targets still run across the border. (M6)
#
# The lesson shows the opposite half of the repair. Which test notices that the restart is missing? In a Qwen2 the
# logits do not show it, because rotation depends only on differences of positions. In a GPT-2 they do.

learned = copy.deepcopy(gpt2)
randomize_(learned)
batch = packed(first_fit(some, 128), 128)
real = batch.positions >= 0
running = torch.where(real, torch.arange(128), -1)
numbers = batch.documents
with torch.no_grad():
    for name, model in {"Qwen2": qwen2, "GPT-2": learned}.items():
        right = model(batch.idx, positions=batch.positions, documents=numbers)
        wrong = model(batch.idx, positions=running, documents=numbers)
        error = (right - wrong)[real].abs().max().item()
        print(f"{name}: logits off by {error:.0e}")
        assert error < 1e-9 if name == "Qwen2" else error > 1
extra = (next_token_targets(batch.idx, positions=running) != -100).sum()
extra = (extra - (batch.targets != -100).sum()).item()
print("targets across a border:", extra)
assert extra == len(some) - len(batch.idx)

# %%
# The targets show it in every model: each document of a row but the last now predicts the first token of the next one.
# The fixed line is ``positions[r, at] = torch.arange(len(ids))``, and the check is *packed equals alone*, on the loss.
#
# Cumulative lengths, off by one
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Bounds count targets, not tokens: each document's last token becomes the next one's first. (M7)
#
# A document of n tokens has n - 1 targets. Bounds that count targets everywhere do not end at N, and are refused. The
# dangerous version ends at N: only the inner bounds are one too low, so that the last token of each document becomes the
# first of the next. No error is raised.

off = bounds.clone()
off[1:-1] -= 1
right = varlen_attention(*flat, bounds, bounds)
wrong = varlen_attention(*flat, off, off)
moved = (right - wrong).abs().amax((1, 2)) > 1e-6  # (N,)
print(f"{moved.sum().item()} of {N} tokens are wrong, no error is raised")
changed = [x.clone() for x in flat]
changed[1][parts[0] - 1] += 1.0  # the last key of document 0
changed[2][parts[0] - 1] += 1.0
leak = (varlen_attention(*changed, off, off) - wrong).abs().amax((1, 2))
leak_right = varlen_attention(*changed, bounds, bounds) - right
touched = (leak[parts[0] :] > 0).sum().item()
print("tokens of other documents that notice:", touched)
assert moved[parts[0] : -1].float().mean() > 0.9
assert touched == parts[1] - 1
assert leak_right[parts[0] :].abs().max() == 0.0

# %%
# The check that finds it changes the last token of one document and demands that no other document
# changes. The fixed line builds the bounds from the tokens: ``cumulative`` in ``varlen.py``.
#
# Exercises
# ---------
#
# 1. *Medium.* Add ALiBi to FlexAttention: the score of a key that is d tokens back is lowered by :math:`d \,
#    2^{-8(h+1)/H}` in head h. Hint: ``score_mod`` gets h, t and s as tensors. A good answer equals the formula with
#    the same term to 1e-5, also for packed documents.
# 2. *Medium.* Replace ``first_fit`` by *best fit*: the row with the least room that still fits. Count rows and padding
#    on groups of 64, 250 and 1000. Hint: only the choice of r changes. A good answer compares both with the smallest
#    possible number of rows, the tokens divided by the size.
# 3. *Hard.* Decode a batch of unequal prompts with ``varlen_attention``: one query for each sequence, all its keys.
#    Hint: ``cu_seq_q`` is 0, 1, 2, ... and the queries are the *last* of their sequences. A good answer equals
#    ``sdpa_attention`` on the left-padded batch, and says which alignment of the triangle this needs.
#
# Summary
# -------
#
# * Packed rows have the loss and the gradients of the padded batch and of each document alone, within 1e-9 in float64.
# * Without positions or document numbers, a trained GPT-2 loses at least 0.1 nats per token, and most when positions
#   start again and all documents of a row share one number.
# * Cumulative lengths need :math:`\sum n_i^2` scores instead of :math:`N^2`, here more than five times fewer.
# * FlexAttention takes any rule as a function and skips hidden blocks. On a CPU it has no gradients.
#
# Sources
# -------
#
# * Krell et al.: `Efficient Sequence Packing without Cross-contamination <https://arxiv.org/abs/2107.02027>`_, 2021.
# * Dong et al.: `Flex Attention <https://arxiv.org/abs/2412.05496>`_, 2024, and PyTorch's `flex_attention
#   <https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html>`_.
# * Dao: `FlashAttention-2 <https://arxiv.org/abs/2307.08691>`_, 2023. Its library takes cumulative lengths.
# * Gemma Team: `Gemma 2 <https://arxiv.org/abs/2408.00118>`_, 2024. The soft cap.
# * Press et al.: `ALiBi <https://arxiv.org/abs/2108.12409>`_, 2021.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
