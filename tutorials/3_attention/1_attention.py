r"""
Attention in tiles
==================

In attention, the query of each token is scored against the keys of all tokens. The scores make a table with one row and
one column per token, so it grows with the *square* of the length. How large does it get, and how can fast attention do
without it?

**Predict first.** A text of 32,768 tokens goes through one layer as wide as that of the smallest GPT-2, with 12 heads.
Each head has a table of its own, with 4 bytes for each number. How many bytes are the tables of this one layer?

* 48 MiB
* 1.5 GiB
* 48 GiB
"""

# sphinx_gallery_thumbnail_number = 2
# sphinx_gallery_needs = ["../1_gpt2/3_who_sees_whom"]
# sphinx_gallery_words = ["scaled_dot_product_attention", "F.scaled_dot_product_attention", "online softmax", "tiling", "sqrt(d_k)", "attention memory", "O(n^2)"]

import math

import torch

T, heads, D = 32_768, 12, 64
table = 4 * heads * T * T
print(f"{table / 2**30:.0f} GiB")
print(f"queries: {4 * heads * T * D / 2**20:.0f} MiB")

assert table == 48 * 2**30
assert 4 * heads * T * D == 96 * 2**20

# %%
# That is 4 bytes for each of 12 × 32,768 × 32,768 numbers. The queries take 96 MiB, and so does the result of
# attention: the tables are 512 times as large.

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

lengths = [2**i for i in range(10, 18)]
tables = [4 * heads * T**2 / 2**30 for T in lengths]
queries = [4 * heads * T * D / 2**30 for T in lengths]

_, (ax,) = figure(4.8, 3.4)
ax.plot(lengths, tables, "o-", color=COLOURS[3], label="tables")
ax.plot(lengths, queries, "s--", color=COLOURS[0], label="queries")
ax.axhline(80, linestyle=":", color=COLOURS[4])
ax.text(1024, 100, "a large GPU, 80 GiB")
ax.set_xscale("log", base=2)
ax.set_yscale("log")
ax.set(title="One layer with 12 heads", xlabel="tokens", ylabel="GiB")
ax.legend(frameon=False, loc=(0.02, 0.57))
plt.show()

assert table // (4 * heads * T * D) == 512
assert tables[-1] == 768

# %%
# Each step to the right doubles the length, and each step upwards is ten times as much. At 131,072 tokens the tables of
# one layer would take 768 GiB. And they are only needed on the way, to average the values.
#
# So we would like to read the keys a few at a time: score them, use the scores, forget them. A group of keys that are
# read together is called a **tile**.
#
# Softmax is in the way
# ---------------------
#
# It turns the scores of a query into weights that sum to 1:
#
# .. math::
#
#    P_j = \frac{e^{s_j - m}}{\sum_i e^{s_i - m}}
#
# Here :math:`s_j` is the score of key j. Softmax needs two numbers of the *whole* row: the largest score m, and the
# sum. Why m? The exponential of 100 is already too large for a float32. Subtracting the same number from all scores
# changes no weight, and keeps the exponentials small.

row = torch.tensor([98.0, 99.0, 100.0])
print(row.exp() / row.exp().sum())
safe = (row - row.max()).exp()
print(safe / safe.sum())

assert (row.exp() / row.exp().sum()).isnan().all()
torch.testing.assert_close(safe / safe.sum(), row.softmax(0))

# %%
# This reads the row three times: for the maximum, for the sum, and to divide. So it seems that the row has to be kept
# until the end.
#
# Repair the sum
# --------------
#
# Let us read one score at a time and remember two numbers: the largest score so far, **m**, and the sum of the
# exponentials :math:`e^{s_j - m}` so far, **l**. We say that these exponentials are taken relative to m.
#
# When the next score is larger than m, all exponentials in the sum are relative to the wrong maximum.
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

# %%
# The old exponentials were taken relative to 1, and now they should be relative to 3. All are too large by the same
# factor :math:`e^{3 - 1}`, so one multiplication by :math:`e^{1 - 3}` repairs their sum. The new score is the maximum
# itself and adds :math:`e^0 = 1`.
#
# Attention also averages the values. Their weighted sum so far, **a**, is repaired by the same factor. At the end,
# a / l is the result.
#
# Watch it on a sentence
# ----------------------
#
# The shipped GPT-2 reads a sentence. Each of its layers computes attention with a function called ``attend``. In the
# first layer we put in another one, which also keeps the queries, keys and values.

from lm_from_scratch.attention.kinds import attention_layers
from lm_from_scratch.checkpoint.weights import load_shipped

model, tokenizer = load_shipped("gpt2-docs")
ids = tokenizer.start("Return the number of items in a container.")
kept = []


def keep(q, k, v, visibility, dropout=0.0):  # each (B, H, T, D)
    kept.append((q, k, v))
    return right_attention(q, k, v, visibility, dropout)


layer = attention_layers(model)[0]
right_attention, layer.attend = layer.attend, keep
with torch.no_grad():
    logits = model(torch.tensor([ids]))
layer.attend = right_attention

# %%
# We take one head, and the query of the full stop at the end of the sentence. Where does it look? There are ten keys,
# in tiles of four. Blue cells are the tile being read. Grey cells have been read *and forgotten*. Each value has 32
# features, and we follow the last one. The mark ⊢ is the start of the text.

from lm_from_scratch.drawings.attention import online_softmax_frames

q, k, v = (x[0, 1] for x in kept[0])  # head 1: (T, D)
scores = k @ q[-1] / math.sqrt(32)  # (S,)
words = ["⊢", *tokenizer.pieces(ids)[1:]]
drawing = online_softmax_frames(words, scores.tolist(), v[:, -1].tolist(), 4)
drawing

# %%
# Each tile has a larger score than all tiles before it, so the sums are repaired twice. After the second repair,
# nearly half of the weight belongs to "container".

tiles = scores.split(4)
assert tiles[0].max() < tiles[1].max() < tiles[2].max()
weights = scores.softmax(0)
assert weights.argmax() == 8 and words[8] == " container"
assert 0.45 < weights[8] < 0.5
assert f"a / l = {weights @ v[:, -1]:.2f}".replace("-", "−") in drawing.html

# %%
# The whole loop
# --------------
#
# Here is attention in tiles, for all heads and all queries at once. ``visibility.rule`` is True where a query may see a
# key, so the line with ``masked_fill`` hides later tokens. The maximum m starts at the lowest number there is. Nothing
# in the loop grows with T times T.


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
# **Predict first.** We put this loop into every layer of the shipped model, in place of PyTorch's own attention. What
# happens to the logits?
#
# * they stay the same, up to rounding
# * they move a little, and less with larger tiles
# * they are different numbers

for layer in attention_layers(model):
    layer.attend = in_tiles
with torch.no_grad():
    moved = (model(torch.tensor([ids])) - logits).abs().max()
print(f"logits: up to {logits.abs().max():.0f}")
print("moved by less than 0.0001:", bool(moved < 1e-4))

assert moved < 1e-4

# %%
# They stay the same. Attention in tiles is *not* an approximation. Each repair is exact, so tiles of any size give the
# same result. Only rounding differs, because sums are taken in another order.
#
# What it saves
# -------------
#
# In training, the memory that counts is what the forward pass keeps for the backward pass. Here it is for three ways
# to compute the same attention: the formula with its table, the package's tiles, and PyTorch's function for attention,
# ``sdpa``, a *fused kernel*: one program that does all the steps.

from lm_from_scratch.attention.kinds import ATTENTION_KINDS
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.instruments.record import record_saved


def kept_bytes(kind, T):
    q, k, v = torch.randn(3, 1, 4, T, 32, requires_grad=True)
    places = torch.arange(T)[None]
    causal = Visibility(places, places, dense=True)
    with record_saved() as saved:
        ATTENTION_KINDS[kind](q, k, v, causal, 0.0)
    return sum(saved.values())


lengths = [128, 256, 512, 1024, 2048]
kept = {
    kind: [kept_bytes(kind, T) / 2**20 for T in lengths]
    for kind in ("formula", "tiled", "sdpa")
}

_, (ax,) = figure(4.8, 3.4)
for i, (kind, numbers) in enumerate(kept.items()):
    style = ("o-", "s--", "D:")[i]
    ax.plot(lengths, numbers, style, color=COLOURS[(3, 0, 2)[i]], label=kind)
ax.set(title="Kept for the backward pass", xlabel="tokens", ylabel="MiB")
ax.set_xscale("log", base=2)
ax.set_yscale("log")
ax.legend(frameon=False)
plt.show()

assert kept["formula"][-1] > 3.8 * kept["formula"][-2]
for kind in ("tiled", "sdpa"):
    assert abs(kept[kind][-1] / kept[kind][-2] - 2) < 0.01
assert kept["formula"][-1] > 20 * kept["tiled"][-1]

# %%
# Twice the tokens need four times the memory with the table, and twice the memory without it. At 2,048 tokens the
# table already costs more than twenty times as much.
#
# Fused kernels such as FlashAttention run this very loop. On a GPU, each tile stays in the small, fast memory of the
# chip, and that makes them faster too. The backward pass needs the weights again, and computes them again, tile by
# tile. The in-depth page shows how, and measures time and rounding.
#
# Exercises
# ---------
#
# 1. In a row of S random scores, how often does the running maximum change? Count it for S = 10, 100 and 1000, over
#    many rows. A right answer compares with :math:`1 + 1/2 + \dots + 1/S`. Hint: with what probability is the last of j
#    scores the largest?
# 2. Let ``in_tiles`` return m + log l too. A right answer equals ``torch.logsumexp`` of the visible scores, and
#    explains why this single number is enough to compute any weight of the row again.
# 3. Start m at minus infinity instead of the lowest finite number. The sentence above still works. Find a batch for
#    which the result is NaN. Hint: which tile has no largest score? A right answer names the first line that makes a
#    NaN.
#
# Summary
# -------
#
# * The table of scores grows with the square of the length; everything else in attention grows with the length.
# * Remember the largest score m, the sum l and the weighted values a. When m rises, one factor repairs both sums.
# * The result is exact for tiles of any size, so nobody needs to store the table.
