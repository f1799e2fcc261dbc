r"""
What attention looks at
=======================

Attention is the only place in a GPT-2 where one token can learn from another. Its weights can be drawn,
and the drawings are tempting: a bright cell seems to say *why* the model predicts what it predicts. How
much of that is true?

This page draws maps, but it trusts measurements. It scores every head of a real model, finds a circuit
of two heads in a small one, and then breaks heads to see what they were for.

You will learn
--------------

* to record the maps of a model without changing what it computes, and which laws they must obey,
* to measure what each head looks at, against what a head that looks everywhere would score,
* how two heads in two layers learn to copy, and how suddenly,
* to test a claim about a head by removing the head,
* what a map does not tell.

Before you start
----------------

Read the pages on the model and on training first. You need one CPU core. The model is the small GPT-2
that comes with the package; a second one is trained on this page.

A map is a matrix of weights
----------------------------

Each head computes, for each token :math:`t`, how much of every token :math:`s` flows into it:

.. math::

   a_{ts} &= \mathrm{softmax}_s\!\left(\frac{q_t \cdot k_s}{\sqrt{D}}\right) \\
   y_t &= \sum_s a_{ts} v_s

The T times T numbers :math:`a_{ts}` of one head are its *map*. Row t says where token t looks. The
function ``attention_maps`` runs the model and returns one tensor (B, H, T, T) for each layer. The text
is a passage that the model was not trained on.
"""

# sphinx_gallery_thumbnail_number = 5

import math
from contextlib import contextmanager

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.attention import (
    Visibility,
    attention_layers,
    attention_weights,
    record_attention,
    use_attention_,
)
from lm_from_scratch.checkpoint import SHIPPED, load_shipped
from lm_from_scratch.data import Batch, load_corpus, padded_batch, split
from lm_from_scratch.generate import evaluating
from lm_from_scratch.loss import IGNORE, causal_lm_loss
from lm_from_scratch.plot import COLOURS, attention_map, attention_maps, figure

model, tokenizer = load_shipped()
L, H = model.config.n_layer, model.config.n_head
_, held_out = split(load_corpus("reference"))

document = next(d for d in held_out if d.name == "reference/assert")
text = document.text.split("\n\n")[1]
ids = [tokenizer.eos_token_id, *tokenizer.encode(text)]
idx = torch.tensor([ids])
maps = attention_maps(model, idx)

print(text)
print(f"{len(maps)} layers, each (B, H, T, T) = {tuple(maps[0].shape)}")
assert len(maps) == L
assert all(layer.shape == (1, H, len(ids), len(ids)) for layer in maps)

# %%
# Four laws
# ---------
#
# A recorded map can be wrong in silence. Four laws are cheap to check.
#
# Each row sums to 1, because it is a softmax. Nothing flows from the future, and the weight there is not
# small but exactly 0.

for layer in maps:
    torch.testing.assert_close(layer.sum(-1), torch.ones(1, H, len(ids)))
    assert (layer.triu(1) == 0).all()
print("rows sum to 1; the future has weight 0")

# %%
# Recording must not change the model. ``record_attention`` wraps the function that each layer calls to
# attend, and puts the old one back afterwards. The logits are equal in every bit.

with evaluating(model):
    before = model(idx)
    functions = [layer.attend for layer in attention_layers(model)]
    with record_attention(model) as recorded:
        during = model(idx)
assert torch.equal(before, during)
assert [layer.attend for layer in attention_layers(model)] == functions
assert all(torch.equal(a[0], b) for a, b in zip(recorded, maps))
print("recording changes no logit")

# %%
# The model computes with a fused kernel that never holds a map. The map that we record is computed beside
# it, from the same queries and keys. So the formula must give the same maps, and so must another program:
# ``transformers`` reads the same weights from the same folder.

from transformers import GPT2LMHeadModel
from transformers.utils import logging

logging.disable_progress_bar()

use_attention_(model, "formula")
formula_maps = attention_maps(model, idx)
use_attention_(model, "sdpa")

oracle = GPT2LMHeadModel.from_pretrained(
    SHIPPED, attn_implementation="eager", dtype=torch.float32, local_files_only=True
).eval()
with torch.no_grad():
    oracle_maps = oracle(idx, output_attentions=True).attentions

for fused, formula, theirs in zip(maps, formula_maps, oracle_maps):
    torch.testing.assert_close(fused, formula, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused, theirs, rtol=1e-4, atol=1e-5)
print("fused, formula and transformers: the same maps")

# %%
# Padding is invisible
# --------------------
#
# Sequences of unequal length share a batch by padding. Its map must be the map of the sequence alone,
# moved into the corner. Padding gets a weight of exactly 0, and padding itself looks at nothing.

short = [tokenizer.eos_token_id, *tokenizer.encode("A short one.")]
batch = padded_batch([ids, short], pad_token_id=tokenizer.eos_token_id, side="left")
padded = attention_maps(model, batch.idx, attention_mask=batch.positions >= 0)
alone = attention_maps(model, torch.tensor([short]))

pads = len(ids) - len(short)
for layer, own in zip(padded, alone):
    torch.testing.assert_close(layer[1:, :, pads:, pads:], own, rtol=1e-4, atol=1e-5)
    assert (layer[1, :, :, :pads] == 0).all() and (layer[1, :, :pads] == 0).all()
print(f"{pads} padding tokens: weight 0; the other {len(short)}: the same map as alone")

# %%
# Drawn
# -----
#
# Which of the 32 maps is worth a look? A head that looks everywhere says little, so choose the sharpest
# by measurement. The *entropy* of a row is :math:`\log n` if it spreads over n keys evenly, and 0 if it
# looks at one. Divided by the entropy of looking everywhere, it lies between 0 and 1.
#
# To measure the model and not one sentence, use many rows: B pieces of T = 128 tokens from the held-out
# documents.

T = 128
tokens = [tokenizer.encode(d.text) for d in held_out]
pieces = [t[i : i + T - 1] for t in tokens for i in range(0, len(t) - T + 2, T - 1)][:16]
rows = torch.tensor([[tokenizer.eos_token_id, *piece] for piece in pieces])  # (B, T)
many = torch.stack(attention_maps(model, rows))  # (L, B, H, T, T)


def entropy(maps):
    """The mean entropy of a head's rows, as a share of the entropy of looking everywhere."""
    everywhere = torch.arange(1, maps.shape[-1] + 1.0).log().mean()
    return -torch.special.xlogy(maps, maps).sum(-1).mean((1, 3)) / everywhere  # (L, H)


def head(scores):
    """The layer and the number of the head with the highest score."""
    return divmod(int(scores.argmax()), scores.shape[1])


spread = entropy(many)
layer, number = sharpest = head(-spread)
print(f"the sharpest head: layer {layer}, head {number}, entropy {spread[sharpest]:.2f}")
print(f"the flattest head: entropy {spread.max():.2f}")
assert spread[sharpest] < 0.8 and spread.max() <= 1.0

labels = ["BOS", *tokenizer.pieces(ids[1:])]
fig, (ax,) = figure(5.4, 5.4)
attention_map(ax, maps[layer][0, number], labels, f"The sharpest head: layer {layer}, head {number}")
ax.set(xlabel="looks at", ylabel="token")
plt.show()

# %%
# Here are all heads of that layer. The same text, the same queries' input, and four ways to look.

fig, axes = figure(5.4, 5.6, 2, 2)
for h, ax in enumerate(axes):
    ax.imshow(maps[layer][0, h].numpy(), cmap="Blues", vmin=0.0, vmax=1.0)
    ax.set_title(f"head {h}", fontsize=10)
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
fig.suptitle(f"All heads of layer {layer}")
plt.show()

# %%
# Measure every head
# ------------------
#
# A picture of one sentence invites stories. So turn each story into a number: mark the keys that the story
# talks about, and take the mean weight on them, over all queries that have such a key. The same number
# for a head that looks everywhere, with weight :math:`1/(t+1)` on each visible key, is the baseline.

causal = torch.ones(T, T, dtype=torch.bool).tril()


def score(maps, marked):
    """Mean weight (L, H) on the marked keys (B, T, T), and the same for looking everywhere."""
    _, B, _, _, T = maps.shape
    marked = marked.expand(B, T, T) & torch.ones(T, T, dtype=torch.bool).tril()
    has = marked.any(-1)  # (B, T): queries that have a marked key
    weight = (maps * marked[None, :, None]).sum(-1)  # (L, B, H, T)
    mean = (weight * has[None, :, None]).sum((1, 3)) / has.sum()
    uniform = (marked.sum(-1) / torch.arange(1, T + 1))[has].mean()
    return mean, float(uniform)


line_end = torch.tensor(["\n" in piece for piece in tokenizer.pieces(range(4096))])
same = rows[:, :, None] == rows[:, None, :]
everywhere = torch.ones_like(same)
stories = {
    "previous token": everywhere.tril(-1).triu(-1),
    "itself": everywhere & torch.eye(T, dtype=torch.bool),
    "first token": everywhere.tril(-1) & (torch.arange(T) == 0),
    "line ends": line_end[rows][:, None, :].expand_as(same),
    "same token before": same.tril(-1),
    "after the same token": torch.cat([same[:, :, :1] & False, same[:, :, :-1]], -1),
}
uniform_maps = (causal / causal.sum(-1, keepdim=True)).expand(1, len(rows), 1, T, T)
found = {}
for name, marked in stories.items():
    scores, uniform = found[name] = score(many, marked)
    torch.testing.assert_close(score(uniform_maps, marked)[0].item(), uniform, rtol=1e-4, atol=1e-6)
    best = head(scores)
    print(f"{name:20} uniform {uniform:.3f}   best {scores[best]:.3f}  layer {best[0]} head {best[1]}")

# %%
# The table of the best is one thing; the map of all scores shows whether the best is an exception. Each
# cell is the score of a head divided by the uniform score: 1 means that the story is not true of the head.

fig, axes = figure(5.4, 7.4, 2, 3)
for ax, (name, (scores, uniform)) in zip(axes, found.items()):
    ratio = scores / uniform
    ax.imshow(ratio.numpy(), cmap="Blues", vmin=0.0, vmax=6.0, aspect="auto")
    for l in range(L):
        for h in range(H):
            shade = "white" if ratio[l, h] > 3.6 else "black"
            ax.text(h, l, f"{ratio[l, h]:.1f}", ha="center", va="center", color=shade, fontsize=9)
    ax.set_title(name, fontsize=10)
    ax.set(xticks=range(H), yticks=range(L), xlabel="head", ylabel="layer")
    ax.grid(False)
fig.suptitle("Scores of all heads, in units of looking everywhere")
plt.show()

previous, uniform_previous = found["previous token"]
ends, uniform_ends = found["line ends"]
assert previous.max() > 2 * uniform_previous
assert ends.max() > 2 * uniform_ends

# %%
# Two stories are safe: some head looks at the token before more than twice as much as chance, and some
# head looks at line ends more than twice as much as chance. No head comes close to a pure rule.

assert previous.max() < 0.9 and ends.max() < 0.9

# %%
# Does the model copy?
# --------------------
#
# A model that reads ``A B ... A`` can guess ``B``, whatever ``A`` and ``B`` are, if a head looks at the
# token *after* the first ``A``. Such a head is called an *induction head* (Olsson et al., 2022). The test
# shows a sequence of n random tokens twice: nothing but copying predicts the second copy. The tokens are
# drawn from the 300 most frequent ones, so that each is a token that the model knows well.

flat = torch.tensor([token for t in tokens for token in t])
pool = torch.bincount(flat, minlength=model.config.vocab_size).topk(300).indices


def twice(n, seed, B=8):
    generator = torch.Generator().manual_seed(seed)
    once = pool[torch.rand(B, len(pool), generator=generator).argsort(1)[:, :n]]
    start = torch.full((B, 1), tokenizer.eos_token_id)
    return torch.cat([start, once, once], 1)  # (B, 1 + 2n)


def surprise(model, idx):
    """The loss of every token but the first (B, T - 1), in nats."""
    with evaluating(model):
        log_p = model(idx)[:, :-1].log_softmax(-1)
    return -log_p.gather(-1, idx[:, 1:, None])[..., 0]


n = 40
place = torch.arange(2 * n + 1)
copied_from = (place[:, None] - place[None, :] == n - 1) & (place[:, None] > n)
copies = []
for seed in range(3):
    idx = twice(n, seed)
    assert torch.equal(idx[:, n + 1 :], idx[:, 1 : n + 1])
    nats = surprise(model, idx)
    first, second = nats[:, 1:n].mean().item(), nats[:, n + 1 :].mean().item()
    scores, uniform = score(torch.stack(attention_maps(model, idx)), copied_from[None])
    copies.append((first, second, nats.mean(0)))
    best = head(scores)
    print(f"seed {seed}: loss {first:.2f} -> {second:.2f}", end="   ")
    print(f"best head {best}: {scores[best]:.3f}, uniform {uniform:.3f}")

# %%
# A model that copies would be hardly surprised by the second copy. This one is a little less surprised
# than by the first, and no head looks where an induction head has to look.

for first, second, _ in copies:
    assert 0.5 * first < second < first
assert scores.max() < 0.2

# %%
# A test that finds nothing needs a control: can it find anything? So we make a model that *has* to copy.
#
# A specimen that has to copy
# ---------------------------
#
# The specimen reads texts of 16 letters. Each text has a secret of its own: an order of the letters around
# a circle. The text walks along the circle and jumps to a random letter now and then. What follows a
# letter can be known only from the same text, at the place where that letter stood before. Only those
# targets count.

LETTERS = "abcdefghijklmnop"
V, T = len(LETTERS), 48


def circle_text(B, generator, jump=0.15):
    order = torch.rand(B, V, generator=generator).argsort(1)
    following = torch.empty_like(order).scatter_(1, order, order.roll(-1, 1))  # the secret
    x = [torch.randint(V, (B, 1), generator=generator)]
    for _ in range(T):
        jumps = torch.rand(B, 1, generator=generator) < jump
        letter = torch.randint(V, (B, 1), generator=generator)
        x.append(torch.where(jumps, letter, following.gather(1, x[-1])))
    sequence = torch.cat(x, 1)
    idx, targets = sequence[:, :-1].contiguous(), sequence[:, 1:].clone()
    stood_before = (idx[:, :, None] == idx[:, None, :]).tril(-1).any(-1)
    return Batch(idx, targets.masked_fill(~stood_before, IGNORE))


generator = torch.Generator().manual_seed(0)
example = circle_text(1, generator)
print("text   ", "".join(LETTERS[i] for i in example.idx[0]))
print("targets", "".join(LETTERS[i] if i != IGNORE else "." for i in example.targets[0]))

# %%
# Its shape is that of a GPT-2 with 3 layers of 2 heads. It is trained with the package's
# ``optimizer_step``, at a constant learning rate after a short warm-up. Every 20 steps we measure the loss
# and two scores of every head: the weight on the previous token, and the weight on the tokens that follow
# an earlier copy of the present one.

from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.models.gpt2 import GPT2LMHeadModel as Model
from lm_from_scratch.train import TrainConfig, learning_rate, optimizer_step, parameter_groups

STEPS = 600
config = TrainConfig(steps=STEPS, lr=3e-3, min_lr=3e-3, warmup=30)
shape = dict(vocab_size=V, block_size=T, n_layer=3, n_head=2, n_embd=48)
rest = dict(initializer_range=0.1, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
torch.manual_seed(0)
specimen = Model(GPT2Config(**shape, **rest, bos_token_id=None, eos_token_id=None))
optimizer = torch.optim.AdamW(parameter_groups(specimen, 0.01), betas=(0.9, 0.98), fused=True)

test = circle_text(32, generator)
same = test.idx[:, :, None] == test.idx[:, None, :]
marked = {
    "previous": torch.ones_like(same).tril(-1).triu(-1),
    "induction": torch.cat([same[:, :, :1] & False, same[:, :, :-1]], -1),
}


def examine(model):
    """The loss, and the scores (L, H) of both kinds with their uniform baselines."""
    with evaluating(model):
        loss = float(causal_lm_loss(model(test.idx), test.targets))
    maps = torch.stack(attention_maps(model, test.idx))
    return loss, {name: score(maps, where) for name, where in marked.items()}


history = {0: examine(specimen)}
for step in range(1, STEPS + 1):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, config)
    optimizer_step(specimen, optimizer, [circle_text(24, generator)], config)
    if step % 20 == 0:
        history[step] = examine(specimen)

final_loss, final = history[STEPS]
for name, (scores, uniform) in final.items():
    values = "  ".join(f"layer {i} {row.tolist()[0]:.2f} {row.tolist()[1]:.2f}" for i, row in enumerate(scores))
    print(f"{name:10} {values}  uniform {uniform:.2f}")
