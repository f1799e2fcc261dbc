r"""
Kinds of KV cache: growing, static, sliding
===========================================

A cache keeps the key and the value of every token that may still be looked at. Its memory, in each block and head, is a
row of *slots*, each with room for one key and one value. Which slot does a token get? Three answers are in use. Step
through a sentence, and watch all three:
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["1_why_cache", "../3_attention/2_masks"]
# sphinx_gallery_words = ["DynamicCache", "StaticCache", "SlidingWindowCache", "rolling buffer", "ring buffer", "sliding window cache", "preallocated cache", "cache_position", "HybridCache", "forget old tokens", "cache that does not grow", "fixed size cache", "cache too large", "endless chat", "limit the cache", "which cache", "choose a cache", "which cache class", "out of space", "cache is full", "long chat", "infinite chat", "evict tokens", "drop old tokens", "preallocate", "torch.compile cache", "cuda graph", "maximum length of the cache"]

from dataclasses import replace

import torch

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.slots import SlidingCache, StaticCache
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings.caching import (
    slot_masks,
    slot_steps,
    writing_order,
)

torch.set_grad_enabled(False)
model, tokenizer = load_shipped("qwen2-docs")
sentence = "If the file does not exist, an exception is\nto be raised."
ids = tokenizer.start(sentence)
pieces = ["⊢", *tokenizer.pieces(ids)[1:]]
slot_steps(pieces[:12], capacity=16, window=4, first=5)

# %%
# * **Growing** (also called dynamic): token p, counted from 0, goes to slot p. When the slots are full, twice as many are
#   made, and the old contents are copied.
# * **Static**: token p goes to slot p, too, but all slots are made at the beginning. The text must not become longer.
# * **Sliding** (also called rolling): there are W slots, and token p goes to slot p modulo W, ``p % W``. It overwrites the
#   token W before it. The slots form a *ring*: after the last comes the first again.
#
# A ring is for layers with a `window <../3_attention/2_masks.ipynb>`_, which see only the last W tokens: such layers
# *slide*. What they no longer see, they need not keep.
#
# **Predict first.** A ring has 6 slots. Where does token 20 go, and which token does it overwrite?
#
# * slot 2, token 14
# * slot 3, token 15
# * slot 2, token 19

ring = {}  # slot: the token in it
for p in range(20):
    ring[p % 6] = p
print(ring)
print(f"token 20 goes to slot {20 % 6}, over token {ring[20 % 6]}")

assert (20 % 6, ring[20 % 6]) == (2, 14)

# %%
# Slot 2, token 14: 20 is 3 · 6 + 2, so it goes to slot 2, and the token in that slot came exactly 6 tokens earlier.
#
# Copy, double or reserve
# -----------------------
#
# ``torch.cat`` is the shortest growing cache: the last lesson used it. But it makes a new tensor for every token and
# copies all old ones into it.

N = 1024
print(f"copies for each token kept: {sum(range(1, N + 1)) / N:.0f}")

assert sum(range(1, N + 1)) == N * (N + 1) // 2 == 512.5 * N
assert sum(2**i for i in range(10)) == N - 1  # doubling from 1 to N slots

# %%
# To hold 1,024 tokens, it writes 512 times as much as it holds. A cache that doubles copies each token about once. If you
# know how long the text will be, reserve the slots, and nothing is copied.
#
# A static cache goes one step further: it always *returns* all of its slots, used or not. So every step has the same
# shapes. Compilers such as ``torch.compile`` want that: they prepare a program for one set of shapes, and run it again
# and again. The price is that attention reads the empty slots, too.
#
# One mask for all
# ----------------
#
# In a ring, tokens are out of order. How can a mask find the right ones? Each slot also remembers the *position* of its
# token, its place in the text, and the `rule for masks <../3_attention/2_masks.ipynb>`_ looks at positions alone:


def visible(query, key, window=None):  # an empty slot has position -1
    return 0 <= key <= query and (window is None or query - key < window)


# %%
# For a ring we need a model whose layers slide. This function makes one: the shipped Qwen2, with a window in all layers.
# (Layers slide from number ``max_window_layers`` on.)

from lm_from_scratch.models.qwen2 import Qwen2ForCausalLM


def sliding(window):
    config = replace(model.config, sliding_window=window, max_window_layers=0)
    slides = Qwen2ForCausalLM(config).eval()
    slides.load_state_dict(model.state_dict())
    return slides


# %%
# Three caches read eight tokens, and then two more arrive. ``see`` says, before the pass, which keys the new tokens will
# see. It is given the window of each layer.

x = torch.tensor([ids])
seen = {}
for name, net, cache in (
    ("growing", model, GrowingCache(8)),
    ("static, 12 slots", model, StaticCache(8, capacity=12)),
    ("sliding, W = 4", sliding(4), SlidingCache(8, window=4)),
):
    net(x[:, :8], cache=cache)
    plan = cache.see(x[:, 8:10], windows=net.config.windows)[0]  # of layer 0
    keys, queries = plan.key_positions[0], plan.query_positions[0]
    seen[name] = keys.tolist(), queries.tolist(), plan.mask[0, 0].tolist()

for name, (keys, queries, mask) in seen.items():
    window = 4 if "sliding" in name else None
    assert mask == [[visible(q, k, window) for k in keys] for q in queries]
assert seen["sliding, W = 4"][0] == [4, 5, 6, 7, 8, 9]
assert [len(keys) for keys, *_ in seen.values()] == [10, 12, 6]
slot_masks(seen)

# %%
# Blue cells are visible, and they are what our rule says. The static cache carries empty slots along, which stay grey in
# every row.
#
# But look at the ring. It has four slots, and the mask has six columns. Why are the two new tokens beside the ring, and
# not in it?
#
# Read or write first?
# --------------------
#
# **Predict first.** A ring of four slots holds tokens 4 to 7. Tokens 8, 9 and 10 come together, and are written first.
# Each of them should see itself and the three tokens before it. Which keys do they miss?
#
# * none
# * token 8 misses two keys, and token 9 misses one
# * each of them misses three keys

ring = {p % 4: p for p in range(8)}
ring |= {p % 4: p for p in (8, 9, 10)}  # written first
for q in (8, 9, 10):
    print(q, "misses", [p for p in range(q - 3, q) if p not in ring.values()])

missed = [
    [p for p in range(q - 3, q) if p not in ring.values()] for q in (8, 9, 10)
]
assert missed == [[5, 6], [6], []]

# %%
# Token 8 misses two keys, and token 9 misses one. Token 9 was written over 5, and token 10 over 6, before anybody had
# looked at those two.

writing_order(pieces[:11], window=4, T=3)

# %%
# The mask shows the keys that are there, so nothing crashes: a query only sees fewer keys than it should. The right order
# is to read the ring as it was, beside the new tokens, and to write at the end of the pass. A *single* token may be
# written first, since it overwrites the one that it no longer sees. That is why such a mistake survives a test that
# feeds one token at a time.
#
# Whatever was overwritten is gone, too, if you want to go *back*. `Speculative decoding
# <../6_generation/2_speculative_decoding.ipynb>`_, in the next chapter, adds tokens on trial and often takes some back.
# Its rings get a few more slots than the window, as *slack*.
#
# A ring for a model that never slid
# ----------------------------------
#
# A ring looks like a cheap way to save memory in any model. Our Qwen2 was trained to see everything. Here it writes as
# it is, and then with a window of 16 and rings of 16 slots. ``generate`` yields one token after another, and ``complete``
# collects them.

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY

prompt = tokenizer.start("If the file does not exist, an")
texts = []
for net in (model, sliding(16)):
    written = complete(generate(net, [prompt], 44, GREEDY))[0]
    texts.append(tokenizer.decode(written))
    print(texts[-1], end="\n---\n")

try:
    model(x, cache=SlidingCache(8, window=16))
    refused = ""
except ValueError as error:
    refused = str(error)
assert texts[0] != texts[1] and texts[0][:18] == texts[1][:18]
assert "layer 0 sees all keys, the cache keeps window=16" in refused

# %%
# Both begin alike. Then the ring drops the beginning, and the second text goes another way. A cache must keep
# all that its *layers* see, so the window is a property of the model and not a setting of the cache. (The package
# refuses a cache that is too small.) Many newer models mix both kinds of layer. In `Gemma 3
# <https://arxiv.org/abs/2503.19786>`_, one layer sees everything for every five that slide. A *layered* cache grows for
# the first kind and has rings for the second.
#
# What each kind costs
# --------------------
#
# **Predict first.** In the shape of Qwen2-7B, 32,768 tokens take 1.75 GiB. How much would they take if all 28 layers
# slid with W = 4096?
#
# * 0.9 GiB
# * 0.2 GiB
# * 0.05 GiB

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

slot = 2 * 4 * 128 * 2 / 2**30  # GiB: a key and a value of 4 heads, bfloat16
n = [256 * i for i in range(129)]  # tokens


def next_power(t):  # of 2
    return 2 ** (max(t, 1) - 1).bit_length()


gib = {
    "static, 32,768 slots": [28 * 32768 * slot for _ in n],
    "growing": [28 * next_power(t) * slot for t in n],
    "14 of 28 layers slide": [14 * (t + min(t, 4096)) * slot for t in n],
    "all layers slide": [28 * min(t, 4096) * slot for t in n],
}
for name, values in gib.items():
    print(f"{values[-1]:.2f} GiB: {name}")

_, (ax,) = figure(4.8, 3.4)
for i, (name, values) in enumerate(gib.items()):
    ax.plot(n, values, ("-", "--", "-.", ":")[i], color=COLOURS[i], label=name)
ax.set(title="One text, shape of Qwen2-7B", xlabel="tokens", ylabel="GiB")
ax.set_xticks([0, 8192, 16384, 24576, 32768])
ax.legend(frameon=False, fontsize=8, loc=(0.02, 0.58))
plt.show()

assert [round(v[-1], 2) for v in gib.values()] == [1.75, 1.75, 0.98, 0.22]

# %%
# 0.2 GiB. A ring stops growing at W tokens, however long the text becomes, and 4,096 tokens are an eighth of 32,768.
#
# In the picture, the steps of the growing cache are its doublings.
#
# Which kind should you take? *Growing* is the default, with a reserve if you know the length. *Static* pays where a
# compiled program runs thousands of steps; choose a capacity near the real length. *Sliding* is for layers that slide,
# and *layered* for models that mix.
#
# In depth: `kinds of cache <2a_kinds_of_cache_in_depth.ipynb>`_ predicts every slot, counts the graphs of a compiler,
# and moves a cache to a file and to another library.
#
# Exercises
# ---------
#
# 1. *Easy.* A ring of W slots gets T tokens at once, and reads first. How many keys does attention get? A good answer
#    is W + T, or W for T = 1, and says up to which T a piece costs at most 2 W keys.
# 2. *Medium.* Give the ring ``slack`` more slots than the window, and write first. For which T does no query miss a key?
#    A good answer is a rule in T and ``slack``, checked by the loop above for slack 0 to 3 and T from 1 to 5.
# 3. *Medium.* Count the numbers that a doubling cache writes to hold N tokens, copies included. A good answer stays
#    below 3 N for every N up to 10,000.
#
# Summary
# -------
#
# * Token p goes to slot p (growing, static) or to slot p modulo W (sliding). The mask compares positions, not slots.
# * Several tokens must read a ring before they are written into it; a single one need not.
# * A cache must keep what its layers see. Only layers that slide can have a ring, whose memory stops growing.
