r"""
Attention, one query at a time
==============================

*If the file does not exist, an …* What does the token ``␣an`` take from the words before it? Here is one head of a
trained GPT-2, which you may know from `who sees whom <../1_gpt2/3_who_sees_whom.ipynb>`_. The first step shows the
query of ``␣an`` and nine keys, the last step what ``␣an`` receives.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["../1_gpt2/3_who_sees_whom"]
# sphinx_gallery_words = ["scaled_dot_product_attention", "F.scaled_dot_product_attention", "online softmax", "tiling", "sqrt(d_k)", "attention memory", "O(n^2)", "query key value", "W_q W_k W_v", "attention in tiles", "attention step by step", "attention from scratch", "quadratic cost of attention", "memory efficient attention", "implement attention", "how does flash attention work", "attention formula", "scaled dot product attention", "softmax(QK^T/sqrt(d))V", "why is attention quadratic", "cost of attention", "attention without the matrix", "attention without storing the scores", "numerically stable", "where do q k v come from", "projection matrices", "similarity", "cosine similarity", "weighted average", "lookup", "dictionary", "worked example of attention", "attention by hand", "attention with numbers"]

import math

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings.attention import query_steps
from lm_from_scratch.instruments.record import record_hidden_states

torch.set_grad_enabled(False)
model, tokenizer = load_shipped("gpt2-docs")
ids = torch.tensor(tokenizer.start("If the file does not exist, an"))
words = tokenizer.pieces(ids.tolist())
with record_hidden_states(model) as states:
    logits = model(ids[None])
block, D = model.transformer.h[5], 32
x = block.ln_1(states[5][0][0])  # (T, C): what block 5 reads, normalised
Q, K, V = block.attn.c_attn(x).split(128, dim=-1)  # (T, C) each
q, k, v = Q[:, :D], K[:, :D], V[:, :D]  # (T, D) each: head 0

query_steps(words, q[-1].tolist(), k.tolist(), v.tolist(), compared=3)

# %%
# Choose the steps from left to right. The *score* of a key is a sum of 32 products. It is high where query and key
# point up at the same places, and down at the same places, as those of ``␣an`` and ``␣file`` do.
#
# Softmax turns the scores into *weights*: none is negative, and their sum is 1. The result is a mixture of the nine
# values. Nearly two thirds of it come from ``␣file``. In code, all five steps are three lines:

scores = k @ q[-1] / math.sqrt(D)  # (T,): the query with each key
weights = scores.softmax(0)  # (T,)
mixture = weights @ v  # (D,)

from lm_from_scratch.instruments.plot import attention_maps

shown = attention_maps(model, ids[None])[5][0, 0, -1]
torch.testing.assert_close(weights, shown)
assert words[3] == " file" and 0.6 < weights[3] < 0.66
assert torch.allclose(q[-1] @ k[3], torch.tensor(8.0), atol=0.1)

# %%
# What one look is worth
# ----------------------
#
# Does ``␣an`` need to see ``␣file``? We hide this one key from it, in every head of every block.
#
# **Predict first.** Which next word loses most of its probability?
#
# * exception
# * error
# * absolute

from lm_from_scratch.attention.kinds import attention_layers


def without_file(q, k, v, visibility, dropout=0.0):
    scores = q @ k.mT / math.sqrt(D)  # (B, H, T, S)
    scores = scores.masked_fill(~visibility.mask, -torch.inf)
    scores[:, :, -1, 3] = -torch.inf
    return scores.softmax(-1) @ v


def logits_with(attend):
    for layer in attention_layers(model):
        layer.attend = attend
    return model(ids[None])  # (B, T, V)


shares = [y[0, -1].softmax(0) for y in (logits, logits_with(without_file))]
for word in (" exception", " error", " absolute"):
    (i,) = tokenizer.encode(word)
    seen, hidden = (share[i] for share in shares)
    print(f"{word.strip():9}  {seen:.1%}, without file {hidden:.1%}")

(i,) = tokenizer.encode(" absolute")
assert shares[1][i] < shares[0][i] / 4
for word in (" exception", " error"):
    (i,) = tokenizer.encode(word)
    assert shares[1][i] > shares[0][i]

# %%
# Absolute: a *file* can have an absolute path. Without it, the model falls back on words that often follow any ``␣an``.
#
# Where the three matrices come from
# ----------------------------------
#
# Query, key and value are three views of one token: its state x, multiplied by three different matrices of 128 × 32
# numbers. (GPT-2 also adds a bias.) Nobody chose these numbers. They begin as random ones, and then every weight is
# about 1/9: ``␣an`` receives a plain average. Training changes each number a little, again and again, in the direction
# that makes the true next token more likely.
#
# Why two matrices for one comparison? Let us use the query matrix for the keys, too.
#
# **Predict first.** Where does ``␣an`` look most, if keys are made like queries?
#
# * at ``␣file``, as before
# * at itself
# * nowhere: all weights are about the same

from lm_from_scratch.models.gpt2 import GPT2LMHeadModel

torch.manual_seed(0)
fresh = GPT2LMHeadModel(model.config).eval()  # before training
one_matrix = (q @ q[-1] / math.sqrt(D)).softmax(0)  # keys made like queries

from lm_from_scratch.instruments.plot import figure, printable

panels = {
    "before training": attention_maps(fresh, ids[None])[5][0, 0, -1],
    "trained": weights,
    "one matrix": one_matrix,
}
_, axes = figure(4.8, 2.8, columns=3)
names = [printable(word) for word in words]
for ax, (title, bars) in zip(axes, panels.items()):
    ax.barh(names, bars.tolist())
    ax.set_title(title, fontsize=10)
    ax.set(xlim=(0, 0.75), xticks=[0, 0.5])
    ax.invert_yaxis()
    ax.tick_params(labelleft=ax is axes[0])
plt.show()

assert all(0.09 < weight < 0.13 for weight in panels["before training"])
assert one_matrix.argmax() == 8 and one_matrix[8] > 0.6

# %%
# At itself: no other vector points up and down at so many of the same places as the vector itself. With two matrices a
# token can look for something that it is not. The third matrix is for
# the message: what makes ``␣file`` easy to find need not be what ``␣an`` has to know about it.
#
# Why the root of D
# -----------------
#
# We divided each score by the root of D, 5.7. Why?
#
# **Predict first.** A query and a key have 1,024 random features each, and most of these are between -2 and 2. How large
# is q · k, up to its sign?
#
# * about 1
# * about 32
# * about 1,024

torch.manual_seed(0)
some_q, some_k = torch.randn(2, 1000, 1024)  # a thousand pairs
size = (some_q * some_k).sum(-1).square().mean().sqrt()
print(f"about {size:.0f}")

assert 30 < size < 34

# %%
# About 32, which is the root of 1,024. Half of the products are negative and cancel most of the positive ones. Of a sum of D
# random numbers about :math:`\sqrt{D}` remains.
#
# So a wide head has large scores before it has learned anything. Here are the weights of nine random keys for heads of
# three sizes, the largest weight first, averaged over 500 queries.


def mean_weights(D, divisor):
    q, k = torch.randn(500, 1, D), torch.randn(500, 9, D)
    scores = (q * k).sum(-1) / divisor  # (500, 9)
    return scores.softmax(-1).sort(descending=True).values.mean(0)  # (9,)


sizes = 4, 64, 1024
without = [mean_weights(D, 1) for D in sizes]
divided = [mean_weights(D, math.sqrt(D)) for D in sizes]
_, axes = figure(4.8, 4.4, rows=2)
for ax, lines in zip(axes, (without, divided)):
    for size, line, style in zip(sizes, lines, ("o-", "s--", "D:")):
        ax.plot(
            range(1, 10),
            line.tolist(),
            style,
            label=f"D = {size}",
            markersize=5,
        )
    ax.set(ylim=(0, 1.02), xticks=range(1, 10), ylabel="weight")
axes[0].set_title("q · k")
axes[1].set(title="q · k, divided by the root of D", xlabel="key")
axes[0].legend(frameon=False)
plt.show()

assert without[0][0] < 0.7 and without[2][0] > 0.9
assert (
    max(line[0] for line in divided) - min(line[0] for line in divided) < 0.07
)
assert mean_weights(1024, 1024)[0] < 0.13

# %%
# Without the root, a wide head gives nearly everything to one key, by chance. The other keys have weights near 0, and a
# key of weight 0 cannot learn: a small change of its score changes nothing. With the root, heads of every size look at
# several keys. Dividing by D itself would be too much: a wide head would see only averages.
#
# All queries at once
# -------------------
#
# Every token has a query. So the scores are a table, with one row and one column per token, and it grows with the
# *square* of the length.
#
# **Predict first.** A text of 32,768 tokens goes through one block of the smallest GPT-2. Each of its 12 heads has a
# table of its own, with 4 bytes for each number. How many bytes are the tables of this one block?
#
# * 48 MiB
# * 1.5 GiB
# * 48 GiB

T, heads = 32_768, 12
print(f"tables:  {4 * heads * T * T / 2**30:.0f} GiB")
print(f"queries: {4 * heads * T * 64 / 2**30:.2f} GiB")

assert 4 * heads * T * T == 48 * 2**30

# %%
# 48 GiB, 512 times as much as the queries, and only needed on the way to the averages.
#
# Can we read a few keys at a time, a **tile**, use their scores, and forget them? Softmax is in the way:
#
# .. math::
#
#    P_j = \frac{e^{s_j - m}}{\sum_i e^{s_i - m}}
#
# It needs two numbers of the *whole* row: the largest score m, and the sum. (Subtracting m changes no weight, and keeps
# the exponentials within the range of float32.)
#
# Repair the sum
# --------------
#
# We remember the largest score so far, **m**, and the sum of the exponentials :math:`e^{s_j - m}` so far, **l**. When the next score is larger than m, all exponentials in the sum are relative to the wrong maximum.
#
# **Predict first.** After two scores, m is 1 and l is 1.5. The next score is 3. What is the new sum?
#
# * 1.5 + 1
# * 1.5 multiplied by a small number, plus 1
# * you cannot know without the first two scores

m, l = 1.0, 1.5
s = 3.0
new_m = max(m, s)
l = math.exp(m - new_m) * l + math.exp(s - new_m)
print(f"{math.exp(m - new_m):.3f} * 1.5 + 1 = {l:.3f}")

# the scores 1 and 1 + log 0.5 have m = 1 and l = 1.5
assert abs(l - (math.exp(1 - 3) + 0.5 * math.exp(1 - 3) + 1)) < 1e-9
assert torch.tensor(100.0).exp().isinf()

# %%
# 1.5 multiplied by a small number, plus 1. The old exponentials were taken relative to 1 and should be relative to 3.
# But they are all wrong by the same factor, so one multiplication by :math:`e^{1 - 3}` repairs their sum.
#
# The weighted sum of the values so far, **a**, is repaired by the same factor. At the end, a / l is the result. Here
# ``␣an`` meets its nine keys again, three at a time. Blue cells are the tile being read; grey cells have been read *and
# forgotten*. We follow the last of the 32 features of the values.

from lm_from_scratch.drawings.attention import online_softmax_frames

drawing = online_softmax_frames(words, scores.tolist(), v[:, -1].tolist(), 3)
drawing

# %%
# ``␣file`` raises the maximum, so everything before it is multiplied by 0.18. The last tile raises nothing: its factor
# is 1. The result is the last bar of the mixture above.

assert f"a / l = {mixture[-1]:.2f}".replace("-", "−") in drawing.html
assert round(math.exp(scores[:3].max() - scores[3]), 2) == 0.18

# %%
# The whole loop, for all heads and all queries: ``visibility.rule`` is True where a query may see a key. Nothing in it
# grows with T times T.


def in_tiles(q, k, v, visibility, dropout=0.0, tile=4):
    m = torch.full_like(q[..., :1], torch.finfo(q.dtype).min)  # (B, H, T, 1)
    l, a = torch.zeros_like(m), torch.zeros_like(q)
    for start in range(0, k.shape[2], tile):
        keys = slice(start, start + tile)
        s = q @ k[:, :, keys].mT / math.sqrt(q.shape[-1])  # (B, H, T, tile)
        s = s.masked_fill(~visibility.rule(keys=keys), -torch.inf)
        new_m = torch.maximum(m, s.amax(-1, keepdim=True))
        factor, p = torch.exp(m - new_m), torch.exp(s - new_m)
        l = factor * l + p.sum(-1, keepdim=True)
        a = factor * a + p @ v[:, :, keys]
        m = new_m
    return a / l


# %%
# **Predict first.** We put this loop into every block of the shipped model, in place of PyTorch's own attention. What
# happens to the logits?
#
# * they stay the same, up to rounding
# * they move a little, and less with larger tiles
# * they are different numbers

moved = (logits_with(in_tiles) - logits).abs().max()
print(f"logits: up to {logits.abs().max():.0f}")
print("moved by less than 0.0001:", bool(moved < 1e-4))

assert moved < 1e-4

# %%
# They stay the same. Attention in tiles is *not* an approximation: each repair is exact, and only rounding differs.
#
# FlashAttention runs this very loop. On a GPU each tile stays in the small, fast memory of the chip, which makes it
# faster, too. The backward pass, the memory and the time are measured in
# `attention in depth <1a_attention_in_depth.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* Draw the five steps for ``␣exist``, which sees seven keys: ``query_steps(words[:7], ...)``. A good answer
#    names the key with the largest weight.
# 2. *Medium.* In a row of S random scores, how often does the running maximum change? Count it for S = 10, 100 and
#    1000, over many rows. A good answer compares with :math:`1 + 1/2 + \dots + 1/S`. Hint: with what probability is the
#    last of j scores the largest?
#
# Summary
# -------
#
# * A query scores every key. Softmax of the scores, divided by the root of D, weights the values. The three matrices
#   are learned.
# * The table of scores grows with the square of the length; everything else in attention grows with the length.
# * Tiles need no table: when the largest score m rises, one factor repairs the sum l and the weighted values a, exactly.
