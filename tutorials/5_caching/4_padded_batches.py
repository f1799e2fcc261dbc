r"""
Batches of unequal prompts
==========================

Two prompts are read in one batch. One has three tokens, the other nine, and a tensor needs rows of one length. So a
program fills the short row up with padding, and lets GPT-2 continue both. This is what it says to *Raise an*.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["../3_attention/2_masks", "1_why_cache", "2_kinds_of_cache"]
# sphinx_gallery_words = ["padding_side", "left padding", "pad_token_id", "position_ids", "attention_mask", "batch inference", "batched generation", "generate several prompts at once", "prompts of different lengths", "variable length batch", "a decoder-only architecture is being used but right-padding was detected", "right padding", "right-padding warning", "decoder-only padding", "pad token id is not set", "pad left or right", "several prompts", "list of prompts", "batch of prompts", "batched results wrong", "generate in batches", "batch generation", "expected sequence of length", "unable to create tensor padding", "lists of different length", "ragged", "sequences of different length"]
import torch

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import caching as drawings
from lm_from_scratch.generation.generate import decode, prefill

torch.set_grad_enabled(False)
model, tokenizer = load_shipped("gpt2-docs")
end = tokenizer.eos_token_id  # GPT-2 has no other token to pad with
prompts = ["Raise an", "If the file does not exist, an"]
prompts = [tokenizer.start(text) for text in prompts]


def naive(prompts, n=14):
    T = max(len(prompt) for prompt in prompts)
    idx = torch.tensor([p + [end] * (T - len(p)) for p in prompts])
    for _ in range(n):
        best = model(idx)[:, -1].argmax(-1, keepdim=True)
        idx = torch.cat([idx, best], dim=1)
    return [tokenizer.pieces(row) for row in idx[:, T:].tolist()]


alone, padded = naive(prompts[:1])[0], naive(prompts)[0]

assert [len(prompt) for prompt in prompts] == [3, 9]
assert alone[:2] == [" exception", "."] and padded[0] != alone[0]
assert naive(prompts)[1] == naive(prompts[1:])[0]  # the long row is right
drawings.versions({"alone": alone, "in a batch": padded})

# %%
# Alone, the prompt gets a sensible answer; beside the longer one it gets nonsense. No error is raised. In a service, row
# 0 and row 1 belong to two people, and what one of them reads depends on what the other wrote.
#
# The last column
# ---------------
#
# Here is the batch. ⊢ is ``<|endoftext|>``, the start of a document. The program reads the logits of the last column,
# in blue, and in the short row that is padding. It gave no mask and no positions, so to the model every column is a
# real token (mask 1), and its position is the number of its column.

T = max(len(prompt) for prompt in prompts)
words = [["⊢", *tokenizer.pieces(prompt)[1:]] for prompt in prompts]
pads = [["pad"] * (T - len(prompt)) for prompt in prompts]
right = [row + pad for row, pad in zip(words, pads)]
drawings.padded_batch(right, [range(T), range(T)], read=[T - 1, T - 1])

# %%
# So generation pads on the **left**: then the last column holds the last token of every row.

idx = torch.tensor([[end] * (T - len(p)) + p for p in prompts])  # (B, T)
mask = torch.tensor([[0] * (T - len(p)) + [1] * len(p) for p in prompts])
columns = torch.arange(T).expand_as(idx)

# %%
# ``write`` continues such a batch with a cache. ``positions`` says where each token is in its text. The first pass, the
# *prefill*, reads the prompts. Then every row gets one new token at a time, at the position after its last.


def write(model, idx, positions, n=14):
    cache = GrowingCache(8)  # for 8 blocks
    logits = prefill(model, idx, cache, positions=positions)  # (B, V)
    last, said = positions[:, -1], []
    for _ in range(n):
        said.append(logits.argmax(-1))
        last = last + 1
        logits = decode(model, said[-1], cache, positions=last)
    return [tokenizer.pieces(row) for row in torch.stack(said, 1).tolist()]


# %%
# **Predict first.** The padding is on the left now, and the position of a token is its column. Does the short row say
# what it says alone?
#
# * yes
# * no, but the first token is right
# * no, not even the first token

seen = write(model, idx, columns)[0]

assert seen[0] != alone[0]
drawings.versions({"alone": alone, "padded on the left": seen})

# %%
# No, not even the first token. The program reads the right column now, but its query sees six tokens that are not in
# the prompt: to the model, padding is text.
#
# Hide the padding
# ----------------
#
# The mask says what is real: 1 for a token, 0 for padding. In this package, `padding is at position -1
# <../3_attention/2_masks.ipynb>`_, and no query sees its key. The cache keeps the position beside the key, so the
# padding stays hidden from all later tokens.

hidden = columns.where(mask == 1, -1)
left = [pad + row for row, pad in zip(words, pads)]
drawings.padded_batch(left, hidden.tolist(), read=[T - 1, T - 1])

# %%
# **Predict first.** Nothing sees the padding now. But the first token of the short row is at position 6, not 0. GPT-2
# has a learned row for each position, and Qwen2 rotates queries and keys. Which of them says what it says alone?
#
# * both
# * only GPT-2
# * only Qwen2

models = {"GPT-2": model, "Qwen2": load_shipped("qwen2-docs")[0]}
short = torch.tensor(prompts[:1])
for name, each in models.items():
    one = write(each, short, torch.arange(3)[None])[0]
    two = write(each, idx, hidden)[0]
    print(f"{name}: the same text: {one == two}")
    assert (one == two) == (name == "Qwen2")

# %%
# Only Qwen2. Its `rotation <../2_qwen2/2_rope.ipynb>`_ tells attention the *distance* between two tokens, and all
# distances in the row are right. GPT-2 adds the row of position 6 instead of that of position 0.
#
# This is the mistake of the `prompt that changed in a batch <../1_gpt2/3_who_sees_whom.ipynb>`_.
#
# Count real tokens
# -----------------
#
# The fix is one line. Count along the mask, so that each text starts at 0: ``cumsum`` adds up the ones so far.
# ``transformers`` calls the mask ``attention_mask`` and the count ``position_ids``.

positions = (mask.cumsum(1) - 1).where(mask == 1, -1)
drawings.padded_batch(left, positions.tolist(), read=[T - 1, T - 1])

# %%
# With these positions, the short row says in the batch what it says alone.

fixed = write(model, idx, positions)[0]
steps = {"right": padded, "left": seen, "hidden": write(model, idx, hidden)[0]}

assert fixed == alone
assert all(text != alone for text in steps.values())
drawings.versions({"alone": alone} | steps | {"counted": fixed})

# %%
# Three mistakes give three different texts, and the last of them reads well. So do not judge padding by how the text
# looks.
#
# In ``transformers``, set ``tokenizer.padding_side = "left"`` and pass the ``attention_mask``: ``generate`` counts the
# positions from it. A forward pass of its GPT-2 does not, so it needs ``position_ids`` too.
#
# Who sees whom follows from the positions alone, as in the lesson on masks. In row 0 only three tokens see anything.

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import figure, mask_map

visible = Visibility(positions, positions).mask  # (B, 1, T, S)

_, (ax,) = figure(4.0, 4.0)
mask_map(ax, visible[0, 0], left[0], left[0], "Row 0: blue is seen")
ax.set(xlabel="key", ylabel="query")
ax.tick_params(axis="x", rotation=90)
plt.show()

assert visible[0, 0].sum() == 1 + 2 + 3
assert visible[1, 0].sum() == 9 * 10 / 2

# %%
# The law: a batch equals its rows
# --------------------------------
#
# To test padding, compare logits: each row of a padded batch with the same prompt alone. Compute in float64, so that
# rounding cannot hide a mistake. Here are five prompts.

from lm_from_scratch.text.batch import padded_batch

texts = ["Open", "Raise an", "Return a list of the", "The default value is"]
five = [tokenizer.start(text) for text in texts] + prompts[1:]
batch = padded_batch(five, pad_token_id=end, side="left")
for name, each in models.items():
    each = each.double()
    together = each(batch.idx, positions=batch.positions)[:, -1]  # (B, V)
    rows = [each(torch.tensor([prompt]))[0, -1] for prompt in five]
    error = (together - torch.stack(rows)).abs().max()
    print(f"{name}: within 1e-10: {bool(error < 1e-10)}")
    assert error < 1e-10

# %%
# A test that passes
# ------------------
#
# A developer of the translation program OpenNMT-py `noticed in 2023 <https://github.com/OpenNMT/OpenNMT-py/pull/2532>`_
# that its language models wrote worse texts in batches of unequal prompts. The mask was right, and it was applied when
# the prompts were read. At the steps after that, it was not. Let us forget it at the same place: after the first pass,
# we overwrite the positions that our cache has kept (they are in ``tracks[0]``).
#
# **Predict first.** After the first pass, the padding is no longer hidden. Which new token of the short row is the
# first to be wrong?
#
# * the first
# * the second or a later one
# * none, since the prompts have been read already

cache = GrowingCache(8)
logits = prefill(model, idx, cache, positions=positions)
cache.tracks[0].positions.clamp_(min=0)  # no token is at -1 any more
said, last = [], positions[:, -1]
for _ in range(4):
    said.append(logits.argmax(-1))
    last = last + 1
    logits = decode(model, said[-1], cache, positions=last)
forgot = tokenizer.pieces(torch.stack(said, 1)[0].tolist())

assert forgot[:2] == alone[:2] and forgot != alone[:4]
drawings.versions({"alone": alone[:4], "mask forgotten": forgot})

# %%
# The second or a later one. The first token is right, because the padding was hidden when the prompts were read. But
# its keys are still in the cache, and every later query sees them.
#
# So a test that generates one token passes. Here the second token is right as well, by luck.
#
# What is left
# ------------
#
# In float32, a larger matrix product may add its terms in another order, so the logits of a row can differ in the last
# digits. Where two tokens are almost equally likely, these digits can decide which of them is written.
#
# And padding costs time: the model computes it like everything else. A row that has finished waits for the others, too.
# `Continuous batching <../6_generation/3_continuous_batching.ipynb>`_ puts a new prompt in its place.
#
# `Seven ways to get padding wrong <4a_padding_mistakes.ipynb>`_ measures each mistake alone, compares with
# ``transformers``, and shows what rounding can still change.
#
# Exercises
# ---------
#
# 1. *Easy.* Pad on the right and keep the mask and the positions. Which column has to be read in each row? A good
#    answer gives the logits that each prompt has alone. Hint: ``positions.argmax(1)``.
# 2. *Easy.* Take ten prompts of 1 to 40 tokens. How many padding tokens are in two batches of five, as they come and
#    sorted by length? A good answer shows both counts and the same greedy texts.
# 3. *Medium.* In a chat, both rows get a second message, again of unequal lengths. Read it into the same cache. A good
#    answer equals each whole conversation alone. Hint: padding may be anywhere, if its position is -1 and real
#    tokens go on counting from ``cache.lengths``.
#
# Summary
# -------
#
# * To generate, pad on the left: the last column then holds the last token of every row.
# * Padding must be hidden from all later tokens, and each text counts its own tokens from 0. Both follow from the mask.
# * Test with logits in float64: a row in a batch equals the row alone, at the first new token and at later ones.
