r"""
Sparse attention: must a query read every key?
==============================================

In full attention a query reads the keys of all tokens before it. Here is where one query of the shipped Qwen2 looks:
that of the last token, in the last block. Darker means more weight. The 16 largest weights are framed.
"""

# sphinx_gallery_needs = ["../2_qwen2/4_qwen2", "../3_attention/2_masks"]
# sphinx_gallery_words = ["DeepSeek sparse attention", "DSA", "lightning indexer", "top-k attention", "index_topk", "long context attention", "attention for very long texts", "skip most keys", "DeepSeek V3.2", "V3.2", "attend to important tokens", "only important tokens", "select keys", "choose keys", "which keys matter", "cheap long context", "ignore most tokens", "pick tokens", "attention cost", "Longformer", "BigBird", "block sparse", "DeepSeek-V3.2"]

import time

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.attention.indexer import (
    choose,
    indexer_loss,
    mean_weights,
    recalled,
)
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import since_qwen2_attention as drawings
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.instruments.record import (
    record_attention,
    record_hidden_states,
)
from lm_from_scratch.models.indexed_attention import Indexer, choosing
from lm_from_scratch.text.batches import pieces
from lm_from_scratch.text.corpora import reference, split
from lm_from_scratch.training.loss import causal_lm_loss

model, tokenizer = load_shipped("qwen2-docs")
train_texts, test_texts = split(reference())
test = pieces(test_texts, tokenizer, length=256, count=8)

with torch.no_grad(), record_attention(model) as maps:
    model(test.idx[:1])
row = maps[-1][0][0].mean(0)[220, :221]  # the mean over four heads: (S,)
best = row.topk(16).indices.tolist()
text = tokenizer.pieces(test.idx[0, :221].tolist())
drawings.where_it_looks(text, row.tolist(), best)

# %%
# The text has 221 tokens (⊢, its start, is ``<|endoftext|>``). The query looks at the line that it ends, and at a few
# tokens of the line before.
#
# **Predict first.** What share of its attention is on the 16 framed keys?
#
# * about 20 %
# * about 70 %
# * about 95 %

print(f"the best 16 of 221 keys: {row[best].sum():.0%}")
print(f"the latest 16 keys:      {row[-16:].sum():.0%}")

assert 0.65 < row[best].sum() < 0.78
assert row[-16:].sum() < row[best].sum() - 0.1

# %%
# About 70 %. So the query read 205 keys for little more than a quarter of the result.
#
# In a text of 100,000 tokens almost all keys would be read for so little. *Sparse attention* reads the k best keys, and
# leaves the rest in memory.
#
# There is a catch. To know the best keys, we took the weights of *all* keys, and that is the work we wanted to save.
#
# Guesses
# -------
#
# Could a fixed rule do it? Take the latest k keys, which is a sliding window; or the first key and the latest ones; or
# any k keys. The *oracle* takes the keys with the largest weights. The table shows what share of the attention each rule
# *recalls*, averaged over all blocks, for queries with at least 128 keys.

places = torch.arange(256)[None]
seen = Visibility(places, places, dense=True)  # each sees all before it


@torch.no_grad()
def read(idx):
    """Each block's input (B, T, C), and where it looks (B, 1, T, S)."""
    with record_attention(model) as maps, record_hidden_states(model) as states:
        model(idx)
    norms = [block.input_layernorm for block in model.model.layers]
    x = [norm(state[0]) for norm, state in zip(norms, states)]
    return x, [mean_weights(m[0], seen)[:, None] for m in maps]


test_x, test_weights = read(test.idx)
counts = [4, 8, 16, 32, 64, 128]

# %%
# Each rule gives scores, which say which keys it prefers.


def shares(scores):
    total = torch.zeros(len(counts))
    for s, weights in zip(scores, test_weights):
        chosen = choose(s, seen, max(counts))  # (B, T, K), the best first
        for i, k in enumerate(counts):
            part = recalled(weights, seen, chosen[..., :k])  # (B, T)
            total[i] += part[:, 128:].mean() / 8
    return total


torch.manual_seed(0)
latest = places.float().expand(8, 256, 256)
rules = {
    "oracle": [weights[:, 0] for weights in test_weights],
    "latest": [latest] * 8,
    "first, latest": [torch.where(places == 0, 999.0, latest)] * 8,
    "random": [torch.rand(8, 256, 256) for _ in range(8)],
}
table = {name: shares(scores) for name, scores in rules.items()}
print("k            " + "".join(f"{k:7}" for k in counts))
for name, line in table.items():
    print(f"{name:13}" + "".join(f"{part:7.2f}" for part in line))

assert (table["oracle"] > table["latest"]).all()
assert (table["latest"] > table["random"]).all()
assert (table["first, latest"] < table["latest"] + 0.01).all()
assert table["oracle"][2] - table["latest"][2] > 0.06

# %%
# This small model looks mostly at what is near, so the window is a strong guess. It has no use for the first key (other
# models `do <4_sinks_and_gates.ipynb>`_). Between the window and the oracle there is room for improvement.
#
# A small scorer
# --------------
#
# DeepSeek-V3.2 puts a small network, the *lightning indexer*, beside the attention of each block. It has a few heads with
# small queries q, *one* key k for each token, and a weight w for each head and query:
#
# .. math::
#
#    I_{ts} = \sum_j w_{tj} \, \mathrm{ReLU}(q_{tj} \cdot k_s)
#
# There is no softmax and there are no values, only a score. Here is an indexer with two heads before any training, at the
# last seven keys.

rotation = model.model.rotary_emb(places, torch.float32)
torch.manual_seed(13)
indexer = Indexer(128, n_head=2, head_dim=32, count=2)
q, k, w = (part[0].detach() for part in indexer.heads(test_x[7], rotation))
products = (q @ k.mT)[:, 220, 214:221] / (2 * 32) ** 0.5  # (J, S)
drawings.indexer_scores(text[-7:], products.tolist(), w[220].tolist(), 2)

# %%
# A product below zero counts as nothing, and the weighted sum decides. The query then attends to the framed keys as
# usual.
#
# Learn where a block looks
# -------------------------
#
# A choice of keys has no gradient, so the loss of the language model cannot teach the indexer. But there is a teacher:
# the attention of the model itself. The indexer's loss is the KL divergence from the attention weights to the softmax of
# its scores. Only the indexer learns.
#
# We train one for each of the eight blocks, one text a step, from two seeds.

x, weights = read(pieces(train_texts, tokenizer, 256, count=24).idx)


def trained(seed):
    torch.manual_seed(seed)
    indexers = [Indexer(128, n_head=2, head_dim=32, count=16) for _ in x]
    parameters = [p for one in indexers for p in one.parameters()]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for step in range(60):
        optimizer.param_groups[0]["lr"] = 0.015 * (1 - step / 60)
        row = torch.randint(24, (1,))
        for one, inputs, target in zip(indexers, x, weights):
            scores = one.scores(inputs[row], rotation)  # (1, T, S)
            indexer_loss(scores, target[row], seen).backward()
        optimizer.step()
        optimizer.zero_grad()
    return indexers


# %%
# And this is their recall on texts that neither model nor indexer has seen:

runs = [trained(seed) for seed in range(2)]
with torch.no_grad():
    scores = [[i.scores(x, rotation) for i, x in zip(r, test_x)] for r in runs]
learned = torch.stack([shares(run) for run in scores])  # (2 seeds, 6 counts)

_, (ax,) = figure(4.8, 3.2)
for colour, name in enumerate(("oracle", "latest", "random")):
    style = ("--", "-.", ":")[colour]
    ax.plot(counts, table[name], style, color=COLOURS[colour + 1], label=name)
ax.plot(counts, learned.mean(0), "o-", color=COLOURS[0], label="learned")
ax.fill_between(
    counts, learned.amin(0), learned.amax(0), color=COLOURS[0], alpha=0.3
)
ax.set(title="Attention recalled", xlabel="k", ylabel="share")
ax.set_xscale("log", base=2)
ax.legend(frameon=False)
plt.show()

# %%
# How much of the way from the window to the oracle is that?

closed = (learned - table["latest"]) / (table["oracle"] - table["latest"])
for i in (0, 2, 4):
    values = " ".join(f"{value:.0%}" for value in closed[:, i])
    print(f"k = {counts[i]:2}: {values}")

assert (closed[:, 2] > 0.15).all() and (closed[:, 2] < 0.5).all()
assert (closed[:, 0] > closed[:, 4]).all() and (closed[:, 0] > 0.25).all()
assert (learned < table["oracle"] + 1e-3).all()
assert (learned.amax(0) - learned.amin(0)).max() < 0.02

# %%
# About a quarter of it at k = 16, more with fewer keys, and less with more keys, from both seeds. Longer training
# closes more of the gap.
#
# What the model loses
# --------------------
#
# We do not want recall; we want predictions. Now every block of the model really reads only k keys.
#
# **Predict first.** The full model has a loss of about 4.18. At k = 64, a quarter of the text, does the learned choice
# beat a window of 64 keys?
#
# * yes, clearly
# * no, there is nothing left to gain
# * it is worse


@torch.no_grad()
def loss(choosers):
    with choosing(model, choosers):
        logits = model(test.idx)
    return causal_lm_loss(logits[:, 128:], test.targets[:, 128:]).item()


def window(k):
    return lambda x, rotation, seen: choose(latest, seen, k)


full, losses = loss([window(256)] * 8), {}
print("  k  window  learned: two seeds")
for k in (4, 16, 64):
    for run in runs:
        for indexer in run:
            indexer.count = k
    losses[k] = loss([window(k)] * 8), torch.tensor([loss(run) for run in runs])
    values = " ".join(f"{value:7.3f}" for value in losses[k][1])
    print(f"{k:3} {losses[k][0]:7.3f} {values}")

assert (losses[4][1] < losses[4][0] - 0.2).all()
assert (losses[64][1] - losses[64][0]).abs().max() < 0.05
assert 4.1 < full < 4.25 and abs(losses[64][0] - full) < 0.05
assert (losses[16][1] - full).max() < 0.1
assert losses[16][0] - full > 0.2

# %%
# No, there is nothing left to gain: the texts have 256 tokens, and this model needs few of them.
#
# With 16 keys the learned choice costs less than 0.1 nats, and the window more than 0.2. With 64 keys both are
# nearly as good as the full model. Sparse attention is for long texts, and for models that make use of them.
#
# Ties
# ----
#
# **Predict first.** How many scores of a trained indexer with two heads are *exactly* zero?
#
# * none: these are floating-point numbers
# * about one in a thousand
# * more than one in fifty

for run in scores:
    zeros = [(s[:, seen.mask[0, 0]] == 0).float().mean() for s in run]
    print("block by block:", " ".join(f"{part:4.0%}" for part in zeros), end="")
    print(f"   all blocks: {sum(zeros) / 8:.0%}")
    assert sum(zeros) / 8 > 0.02 and max(zeros) > 0.05

# %%
# More than one in fifty. A sum is exactly zero when both products are negative, so many keys have equal scores.
#
# Which of them are chosen? A plain ``topk`` decides by the layout in memory, so a *longer text* can change the choice for
# its beginning. Our ``choose`` has a rule: of equal scores, the latest key wins. `Sparse attention in depth
# <7a_sparse_attention_in_depth.ipynb>`_ has a test that fails without it.
#
# What it costs
# -------------
#
# The indexer reads a key of every token, so the work is still quadratic, with a smaller factor. Count the multiplications
# for one query. In DeepSeek-V3.2, whose 128 heads read `a latent <3_latent_attention.ipynb>`_, a key takes 128 · (576 +
# 512) multiplications in attention and 64 · 128 + 64 in the indexer; k is 2,048.

full, small, k = 128 * (576 + 512), 64 * 128 + 64, 2048
for S in (2048, 4096, 32_768, 131_072):
    ratio = S * full / (S * small + k * full)
    print(f"{S:7,} keys: {ratio:5.1f} times fewer")

assert 0.9 < full / (small + full) < 1
assert 13 < ratio < 14

# %%
# At 131,072 keys one multiplication in 13 remains. At 2,048 keys the indexer only costs. And how much time does our small
# model save, counted on the processor?


def seconds(function, *args):
    start = time.process_time()
    function(*args)
    return time.process_time() - start


with torch.no_grad():
    sparse, dense = seconds(loss, runs[0]), seconds(model, test.idx)
print(f"with indexers it takes {sparse / dense:.1f} times as long")

assert sparse > dense

# %%
# None: it takes longer, because we compute all products and then hide most of them, and sorting scores costs more than a
# small attention. To save time you need long texts, and kernels that read only the chosen keys.
#
# Exercises
# ---------
#
# 1. *Easy.* Train with one head, then with eight. A good answer shows recall at k = 4 and 16, three seeds each, and
#    says whether the difference is larger than that between seeds.
# 2. *Medium.* Choose half of the k keys by the indexer, and let the latest keys be the other half. Hint: add a large
#    number to the scores of the latest keys. A good answer compares the loss at k = 8 with that of each rule alone.
# 3. *Medium.* Train a second stage in which only chosen keys count. Hint: ``restrict`` from
#    ``lm_from_scratch.attention.indexer`` makes the visibility for ``indexer_loss``. A good answer says whether recall
#    at 16 rises.
#
# Summary
# -------
#
# * Most of a query's attention is on few keys. A small indexer learns which, from the model's own attention weights.
# * A choice has no gradient, so the indexer has its own loss. And equal scores need a rule.
# * An indexer pays off when the text is much longer than k. For short texts, or for a model that looks only nearby, a window is
#   as good.
