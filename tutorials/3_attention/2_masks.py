r"""
Masks from positions
====================

Which tokens may a token look at? Not the later ones. But a batch also has padding, some blocks see only a window of the
last few tokens, and documents may share a row. One sentence covers all cases: **a key is visible if it is real, not
after the query, within the window, and in the same document.** (Real means that it is not padding.)

Here is "not after the query", for a sentence of nine tokens. A row is a query, the token that looks. A column is a key,
a token that is looked at. Blue is visible.
"""

# sphinx_gallery_thumbnail_number = 4
# sphinx_gallery_needs = ["1_attention", "../2_qwen2/4_qwen2"]
# sphinx_gallery_words = ["attention_mask", "sliding_window", "is_causal", "padding mask", "local attention", "Mistral", "boolean mask", "which tokens may be seen", "sliding window attention", "window of recent tokens", "SWA", "window size", "attention mask explained", "what is an attention mask", "causal and padding mask", "combine masks", "mask shape", "4D mask", "prefix LM", "bidirectional", "which token sees which", "boolean or float mask", "additive mask", "long texts differ", "hide tokens", "which tokens can see which", "who can see what"]
# sphinx_gallery_museum = ["G2", "Q1", "Q2"]

import torch

from lm_from_scratch.checkpoint.weights import load_shipped

model, tokenizer = load_shipped("qwen2-docs")
torch.set_grad_enabled(False)
ids = tokenizer.encode("Return the number of items in a container.")
words = [piece.strip() for piece in tokenizer.pieces(ids)]
positions = torch.arange(9)
causal = positions <= positions[:, None]  # (T, S): not after the query

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import figure, mask_map


def draw(mask, queries, keys, title):
    _, (ax,) = figure(3.6, 0.9 + 2.7 * len(queries) / len(keys))
    mask_map(ax, mask, queries, keys, title)
    ax.tick_params(axis="x", rotation=90)
    plt.show()


draw(causal, words, words, "not after the query")
assert torch.equal(causal, torch.ones(9, 9).tril().bool())

# %%
# Programs often build a separate mask for each case, out of triangles and slices. When one of these masks is wrong, there
# is no error message: the model still writes, only something else.
#
# Positions, not columns
# ----------------------
#
# Each token has a **position**: its place in its own text, counted from 0. Padding has position -1. With these numbers
# the rule becomes code, almost word for word. We write t for the position of a query and s for that of a key.


def visible(t, s, window=None):
    t, s = t[:, None], s[None, :]  # (T, 1), (1, S)
    mask = (s >= 0) & (s <= t)  # (T, S): real, and not after the query
    if window is not None:
        mask = mask & (s > t - window)
    return mask


assert torch.equal(visible(positions, positions), causal)

# %%
# The function never uses the *column* of a token. That is why padding needs no special case. Here a short sentence is
# padded on the left, and the labels show the positions.

short = tokenizer.pieces(tokenizer.encode("Return a new list."))
p = torch.tensor([-1, -1, -1, -1, 0, 1, 2, 3, 4])
labels = [f"{w.strip()} {i}" for w, i in zip(["pad"] * 4 + short, p.tolist())]

draw(visible(p, p), labels, labels, "real")

assert torch.equal(visible(p, p)[4:, 4:], causal[:5, :5])
assert not visible(p, p)[:4].any() and not visible(p, p)[:, :4].any()

# %%
# No token sees padding, and padding sees nothing. The sentence itself has the triangle that it has alone.
#
# **Predict first.** Now the block has a window of 3: a query sees its own key and two before it. Columns are counted
# from 0, so column 5 holds "a". Which columns does it see?
#
# * 3, 4 and 5
# * 4 and 5
# * 4, 5 and 6

windowed = visible(p, p, window=3)
print(windowed[5].nonzero().flatten().tolist())

draw(windowed, labels, labels, "within the window")

assert windowed[5].nonzero().flatten().tolist() == [4, 5]
assert windowed[8].sum() == 3

# %%
# 4 and 5. The window reaches back to column 3, but that is padding. Column 6 comes after the query.
#
# The last part of the rule is for documents that share a row. Positions start again at 0, and each token also has the
# number of its document. Two tokens see each other only if these numbers are equal.

other = tokenizer.pieces(tokenizer.encode("Close the file."))
places = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])
document = torch.tensor([0] * 4 + [1] * 5)
together = visible(places, places) & (document[:, None] == document)

labels = [f"{w.strip()} {i}" for w, i in zip(other + short, places.tolist())]
draw(together, labels, labels, "in the same document")

blocks = torch.block_diag(causal[:4, :4], causal[:5, :5])
assert torch.equal(together, blocks.bool())

# %%
# Six plausible masks
# -------------------
#
# How would you notice a wrong mask? Here are the rule, with a window of 4, and six masks that look right in code. Some
# of them compare columns, here t and s, instead of positions. You need not find the mistakes: the names say what they
# are.


def masks(p_t, p_s):  # positions of queries (B, T, 1) and of keys (B, 1, S)
    T, S = p_t.shape[1], p_s.shape[2]
    t, s = torch.arange(S - T, S)[None, :, None], torch.arange(S)[None, None]
    real, past = p_s >= 0, p_s <= p_t
    rule = real & past & (p_s > p_t - 4)
    i = t - t[:, :1]  # rows, counted from the first query
    return {
        "the rule": rule,
        "True and False swapped": ~rule,
        "window one too long": real & past & (p_s > p_t - 5),
        "no window": real & past,
        "padding not hidden": (s <= t) & (s > t - 4),
        "triangle in the wrong corner": real & (s <= i) & (s > i - 4),
        "one query sees everything": real if T == 1 else rule,
    }


# %%
# The test is one idea: **the same text must get the same logits, however it is laid out.** We put a mask into every
# block of the shipped model. Then the model reads a text in three ways: alone, left-padded in a batch, and in pieces.
# For the pieces it needs a *cache*, which holds the keys and values of the pieces before.

import torch.nn.functional as F

from lm_from_scratch.attention.kinds import attention_layers
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.text.batch import padded_batch

a = tokenizer.encode("Read a line from the file and return it as a string")
batch = padded_batch([ids, a], pad_token_id=0, side="left")


def three_ways(name):
    def attend(q, k, v, seen, dropout=0.0):
        p_t, p_s = seen.query_positions, seen.key_positions  # (B, T), (B, S)
        mask = masks(p_t[:, :, None], p_s[:, None])[name][:, None]
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    for layer in attention_layers(model):
        layer.attend = attend
    text, cache = torch.tensor([a]), GrowingCache(8)
    alone = model(text)[0]  # (T, V)
    padded = model(batch.idx, positions=batch.positions)
    pieces = [model(x, cache=cache)[0] for x in text.split([5, 1, 3, 3], 1)]
    return alone, padded[batch.positions >= 0], torch.cat(pieces)


# %%
# **Predict first.** How many of the six wrong masks does the text *alone* reveal?
#
# * all six
# * five
# * three

right = three_ways("the rule")
caught = {}
for name in masks(positions[None, :, None], positions[None, None]):
    pairs = zip(three_ways(name), right)
    caught[name] = [bool((x - y).abs().max() > 1e-3) for x, y in pairs]
table = torch.tensor(list(caught.values()))
print("revealed by the text alone:", table[:, 0].sum().item())

_, (ax,) = figure(3.6, 3.0)
mask_map(ax, table, list(caught), ["alone", "padded", "pieces"], "noticed")
ax.set_aspect("auto")
plt.show()

torch.testing.assert_close(right[0], right[2], atol=1e-3, rtol=0.0)
torch.testing.assert_close(right[0], right[1][-12:], atol=1e-3, rtol=0.0)
marks = ["".join(".x"[x] for x in row) for row in caught.values()]
assert marks == ["...", "xxx", "xxx", "xxx", ".x.", "..x", "..x"]

# %%
# Three: blue means that the logits changed. A mask that forgets the padding is right where there is no padding, so only
# the padded batch reveals it. The last two go wrong only when there are fewer queries than keys, as with a cache. The
# rule itself passes all three tests.
#
# One warning: the three masks of the first column were noticed because we had the right logits to compare with. A model whose
# window is one too long agrees with itself in all layouts. So compare with a model that other people wrote, too, as
# `masks in depth <2a_masks_in_depth.ipynb>`_ does.
#
# A triangle in the wrong corner
# ------------------------------
#
# In January 2025 someone generated text with a cache and PyTorch's fused attention, one token at a time, with
# ``is_causal=True``. In every step attention returned `the same vector
# <https://github.com/pytorch/pytorch/issues/144858>`_.
#
# **Predict first.** One query comes after a cache of 8 keys, so there are 9 keys. How many of them does it see with
# ``is_causal=True``?
#
# * 9
# * 8
# * 1

q, k, v = torch.randn(1, 1, 32), torch.randn(1, 9, 32), torch.randn(1, 9, 32)
y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
print("only the first value:", torch.equal(y[0, 0], v[0, 0]))

assert torch.equal(y[0, 0], v[0, 0])

# %%
# Only one: PyTorch draws the triangle from the *first* query and key, as the `documentation
# <https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html>`_ says. With as
# many queries as keys that is right. But queries after a cache are the last tokens, so they need the last rows of the
# triangle. Here are three queries after six keys in a cache, in both ways.

right_rows = visible(positions[6:], positions)
wrong_rows = torch.ones(3, 9).tril().bool()

draw(wrong_rows, words[6:], words, "is_causal=True")
draw(right_rows, words[6:], words, "from positions")

assert torch.equal(right_rows, causal[6:])
assert wrong_rows.sum(-1).tolist() == [1, 2, 3]
assert right_rows.sum(-1).tolist() == [7, 8, 9]

# %%
# PyTorch has the right triangle, too. Give ``causal_lower_right`` as the mask:

from torch.nn.attention.bias import causal_lower_right

q, k, v = torch.randn(1, 1, 3, 32), k[None], v[None]
bias = causal_lower_right(3, 9)
y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=right_rows)
print("the last rows:", torch.allclose(y, wanted, atol=1e-5))

torch.testing.assert_close(y, wanted)

# %%
# FlashAttention, another library, had the same corner, and in 2023 `version 2.1 changed it
# <https://github.com/Dao-AILab/flash-attention#21-change-behavior-of-causal-flag>`_. A program that moved from one
# library to the other got another mask. With positions there is no corner to choose.
#
# Exercises
# ---------
#
# 1. Draw the two packed documents for a block with a window of 3. Predict first how many keys each query sees. A good
#    answer starts again at one key in the second document.
# 2. Add 7 to all positions, but leave padding at -1. Which pictures on this page change? A good answer goes through
#    the four parts of the rule and says why none of them notices.
# 3. Write a seventh wrong mask, one that only the padded batch reveals and that is not in the table. A good answer
#    shows its row.
#
# Summary
# -------
#
# * A key is visible if it is real, not after the query, within the window, and in the same document.
# * Give every token its position, -1 for padding, and this one rule makes every mask.
# * Test a mask by layout: alone, padded, and in pieces, the same text must get the same logits.
