r"""
SwiGLU and shared key heads
===========================

A model has the same weights for every token, yet it should not do the same with every token. An MLP makes each token's
vector wide, then narrow again. The wide numbers are its *inner features*, and in Qwen2 each of them has a *gate*. The
gate looks at the token and decides how much of the feature passes.

Here are seven of the 384 gates in block 0 of the shipped model, while it reads one sentence. The larger the
disc, the wider the gate is open.
"""

# sphinx_gallery_needs = ["1_rms_norm", "2_rope"]
# sphinx_gallery_words = ["GLU", "gate_proj", "up_proj", "down_proj", "MQA", "intermediate_size", "hidden size 8/3", "swish", "feed-forward", "FFN", "repeat_kv", "num_key_value_heads", "gated MLP", "feed-forward layer", "GELU vs SwiGLU", "grouped-query attention", "MHA vs GQA", "activation function", "activation function in Llama", "ReLU", "SiLU", "ReLU vs GELU vs SiLU", "nonlinearity", "why a gate", "hidden layer", "MLP size", "fewer key heads", "fewer KV heads", "share keys", "num_key_value_heads meaning", "GQA explained", "MQA vs GQA", "GQA vs MHA", "intermediate size"]
# sphinx_gallery_museum = ["M4"]
# sphinx_gallery_thumbnail_number = 1

import torch
import torch.nn.functional as F

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import qwen2 as drawings

torch.set_grad_enabled(False)
model, tokenizer = load_shipped("qwen2-docs")
block = model.model.layers[0]

read = []  # a hook keeps what the first MLP reads
hook = block.mlp.register_forward_pre_hook(lambda _, args: read.append(args[0]))
text = "If the file does not exist, an object of the same type is to be used"
ids = tokenizer.start(text)
model(torch.tensor([ids]))
hook.remove()
x = read[0][0]  # (T, C)
gates = F.silu(block.mlp.gate_proj(x))  # (T, I), I = 384
some = [355, 27, 101, 204, 360, 105, 59]
drawings.gates(tokenizer.pieces(ids)[1:], some, gates[1:, some].tolist())

# %%
# Gate 101 opens wide at ``␣an``, gate 204 at ``␣of``, gate 360 at ``␣to``. Nobody programmed that: training gave these words
# features of their own.

pieces = tokenizer.pieces(ids)
words = [" file", " not", " an", " of", " to", " be", " used"]
assert [pieces[t] for t in gates[:, some].argmax(0).tolist()] == words
assert gates.shape[1] == 384

# %%
# Shut one gate
# -------------
#
# What is gate 101 good for? We remove what passes through it, and compare what the model expects next. It has 8 blocks
# with 384 gates each, 3,072 in all.
#
# **Predict first.** The text so far is "This is an". What changes when gate 101 is shut?
#
# * Nothing that you could see: it is one gate of 3,072
# * The model can no longer write "an"
# * Fewer next words begin with a vowel
# * The model writes noise


def begins_with(letters):
    vocabulary = [tokenizer.pieces([i])[0] for i in range(4096)]
    return torch.tensor([p[:2].lower() in letters for p in vocabulary])


vowel = begins_with([" " + letter for letter in "aeiou"])
consonant = begins_with([" " + letter for letter in "bcdfghjklmnpqrstvwxyz"])
prompt = torch.tensor([tokenizer.start("This is an")])
before = model(prompt)[0, -1].softmax(-1)
column = block.mlp.down_proj.weight[:, 101]
kept = column.clone()
column.zero_()  # nothing that passes gate 101 arrives
after = model(prompt)[0, -1].softmax(-1)
column.copy_(kept)
for name, p in (("open", before), ("shut", after)):
    print(f"{name}: vowel {p[vowel].sum():.0%}", end=", ")
    print(f"consonant {p[consonant].sum():.0%}")
assert before[vowel].sum() > 0.75 and before[consonant].sum() < 0.15
assert after[vowel].sum() < before[vowel].sum() / 3
assert after[consonant].sum() > 0.5

# %%
# Fewer next words begin with a vowel: they lose more than two thirds of their probability, and most of it goes to words
# that begin with a consonant. This one feature helps the model to write "an error" and not "an way". Most
# features are harder to name.
#
# Two matrices, or three
# ----------------------
#
# GPT-2's MLP has two matrices. The first, *up*, makes I inner features from a token's C features. GELU makes almost 0
# of the negative ones. The second, *down*, leads back to C features. (PyTorch stores a matrix as outputs × inputs,
# hence the ``.T``.)


def gpt2_mlp(x, up, down):  # biases left out
    inner = F.gelu(x @ up.T)  # (T, I)
    return inner @ down.T  # (T, C)


# %%
# Qwen2's MLP has a third matrix, the gate:


def gated_mlp(x, gate, up, down):
    inner = F.silu(x @ gate.T) * (x @ up.T)  # (T, I)
    return inner @ down.T  # (T, C)


maps = (block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj)
y = gated_mlp(x, *(m.weight for m in maps))
print(tuple(x.shape), tuple(y.shape))
torch.testing.assert_close(y, block.mlp(x))
assert [tuple(m.weight.shape) for m in maps] == [(384, 128)] * 2 + [(128, 384)]

# %%
# For each inner feature there are two numbers: g from the gate matrix and u from the up matrix. What passes is silu(g)
# times u. Here :math:`\operatorname{silu}(g) = g \, \sigma(g)`, and :math:`\sigma` rises from 0 for very negative g to
# 1 for very positive g. So silu has nearly the shape of GELU.
#
# The name SwiGLU is made of *Swish*, another word for silu, and *gated linear unit*.

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import figure

g = torch.linspace(-6, 6, 241)
fig, (ax,) = figure(4.6, 3.0)
for u, style in zip((2, 1, -1), ("-", "--", "-.")):
    ax.plot(g, F.silu(g) * u, style, label=f"u = {u}")
ax.set(title="What passes: silu(g) u", xlabel="g", ylim=(-5, 9))
ax.legend(frameon=False)
plt.show()

# %%
# On the left the gate is shut: whatever u is, almost nothing passes. On the right it is open: the gate decides *how
# much* passes, and u decides *what*, with its sign.
#
# Three matrices for the price of two
# -----------------------------------
#
# **Predict first.** GPT-2's two matrices are 768 × 3,072 and 3,072 × 768. You want three matrices with as many weights
# in all. How many inner features can you afford?
#
# * 3,072
# * 2,048
# * 1,536

two = 2 * 768 * 3072
inner_features = two // (3 * 768)
inner_features

# %%
# 2,048: three matrices of two thirds the width have as many weights as two. In general, :math:`2 C \cdot 4C = 3 C I`
# gives :math:`I = \tfrac{8}{3} C`.
#
# The `paper on SwiGLU <https://arxiv.org/abs/2002.05202>`_ compared models at this width, that is, at equal cost, and
# those with a gate predicted better. The published Qwen2 models are even `wider <4a_qwen2_in_depth.ipynb>`_.

assert inner_features == 2048 == 2 * 3072 // 3
assert 3 * 768 * inner_features == two

# %%
# Shared key heads
# ----------------
#
# The second change saves memory. When a model writes, it keeps the keys and values of all earlier tokens: the KV cache.
# In GPT-2 every query head has a key head and a value head of its own. In Qwen2, several query heads share one. This is
# *grouped-query attention*, GQA. In the drawing, H is the number of query heads, and Hkv that of key heads.

drawings.shared_heads(4, [4, 2, 1])

# %%
# On the left is the shipped GPT-2, in the middle the shipped Qwen2, on the right the extreme: one key head for all. In
# code, the matrices of keys and values become smaller. Their results are repeated just before they are used, so that
# each query head finds a partner. Here are the keys:

h = block.input_layernorm(model.model.embed_tokens.weight[ids])  # (T, C)
T, attention = len(ids), block.self_attn
q = attention.q_proj(h).view(T, 4, 32).transpose(0, 1)  # (H, T, D)
k = attention.k_proj(h).view(T, 2, 32).transpose(0, 1)  # (Hkv, T, D): cached
k_for_each_query = k.repeat_interleave(2, dim=0)  # (H, T, D): heads 0 0 1 1
print(tuple(q.shape), tuple(k.shape), tuple(k_for_each_query.shape))
assert torch.equal(k_for_each_query[0], k_for_each_query[1])
assert torch.equal(k_for_each_query[2], k[1])

# %%
# The queries still differ, so two heads of a group can look for different things. But they look through the same keys.
# That is the price of sharing.
#
# **Predict first.** Qwen2-7B has 28 blocks, 28 query heads, 4 key heads, 4 value heads, and 128 features in a head. A
# number takes 2 bytes. How much does its cache grow with each token?
#
# * 1 KiB
# * 56 KiB
# * 392 KiB

n_blocks, features = 28, 128
shared = 2 * n_blocks * 4 * features * 2  # keys and values; two bytes
separate = 2 * n_blocks * 28 * features * 2
print(f"one token:      {shared / 2**10:6.0f} KiB {separate / 2**10:6.0f} KiB")
context = 32_768
print(f"{context:,} tokens: {shared * context / 2**30:6.2f} GiB", end=" ")
print(f"{separate * context / 2**30:6.2f} GiB")
assert (shared, separate) == (56 * 2**10, 392 * 2**10)
assert shared * context == 1.75 * 2**30 and separate == 7 * shared

# %%
# 56 KiB. The keys of one block take 4 × 128 × 2 bytes, 1 KiB. Keys and values of all 28 blocks take 56 KiB. With a key head for
# every query head, it would be 392 KiB.

sizes = {"28 key heads": separate, "4 key heads": shared}
fig, (ax,) = figure(4.6, 1.9)
bars = ax.barh(list(sizes), [n * context / 2**30 for n in sizes.values()])
ax.bar_label(bars, fmt="%.2f", padding=3)
ax.set(title="Cache of 32,768 tokens, Qwen2-7B", xlabel="GiB", xlim=(0, 15))
plt.show()

# %%
# For one long text that is 1.75 GiB instead of 12.25. A server keeps such a cache for each person it is answering, so
# the same memory now serves seven times as many people.
#
# The smaller matrices also save weights. The shipped Qwen2 spends them on its MLP, which has 384 inner features instead
# of :math:`\tfrac{8}{3} C`, which is 341. In all, the matrices of its blocks have exactly as many weights as those of
# the shipped GPT-2.


def in_matrices(blocks):
    weights = [w for name, w in blocks.named_parameters() if "weight" in name]
    return sum(w.numel() for w in weights if w.dim() == 2)


gpt2, _ = load_shipped("gpt2-docs")
assert in_matrices(gpt2.transformer.h) == in_matrices(model.model.layers)
assert 8 * 128 // 3 == 341

# %%
# The wrong order of the heads
# ----------------------------
#
# ``repeat_interleave`` gives key heads 0 0 1 1. ``repeat`` gives 0 1 0 1: same shape, no error, and two of four query
# heads read keys that they were not trained with. In November 2024 a change to Apple's axlearn had the second order,
# and `a fix followed <https://github.com/apple/axlearn/pull/842>`_. jax-js had to `fix it too
# <https://github.com/ekzhang/jax-js/pull/180>`_.
#
# Here is our model with either order, the wrong one first:

from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.generation.text import generate_text


def wrong_heads(q, k, v, visibility, dropout=0.0):
    k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
    return sdpa_attention(q, k, v, visibility)


texts = []
for attend in (wrong_heads, sdpa_attention):
    for layer in model.model.layers:
        layer.self_attn.attend = attend
    start = "If the file does not exist, an"
    written = "".join(generate_text(model, tokenizer, start, 24, seed=0))
    texts.append(" ".join((start + written).split()))
    print(texts[-1])
assert texts[0] != texts[1]

# %%
# The first text is made of words too, so a quick look may miss the mistake. Test with more than one key head, and with
# fewer key heads than query heads: in all other cases the two orders are the same.
#
# Exercises
# ---------
#
# 1. Print the ten words with the widest gate for another feature of block 0, over a longer text of yours. A
#    right answer is a list like the columns of the first picture. Can you name the feature?
# 2. Shut gate 105, which opens at ``␣be``, after the text "This method can be". A good answer shows the five likeliest
#    next words before and after, and says in one sentence what the model no longer notices.
# 3. Write ``repeat_kv(k, n_head)`` with ``expand`` and ``reshape`` and without ``repeat_interleave``. A good answer
#    equals ``repeat_interleave`` for 1, 2 and 4 key heads.
#
# Summary
# -------
#
# * A gated MLP multiplies two numbers for each inner feature: silu of the gate says how much passes, and up says what.
# * Three matrices with :math:`I = \tfrac{8}{3} C` have as many weights as GPT-2's two with 4C.
# * If query heads share key heads, the cache is smaller: Qwen2-7B keeps 56 KiB for a token instead of 392.
