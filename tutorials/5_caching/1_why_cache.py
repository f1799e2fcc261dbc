r"""
The KV cache
============

A language model writes one token at a time, and each new token looks back at all tokens before it. The simplest
program reads the whole text again for every token that it adds. With a *KV cache*, the model reads each token once.
Race the two:

.. live:: race
   :model: gpt2-docs

Here is the race in Python, with the same small GPT-2 and 200 tokens. The two differ only in the last line of the loop.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["../1_gpt2/2_gpt2", "../1_gpt2/3_who_sees_whom", "../3_attention/2_masks"]
# sphinx_gallery_words = ["past_key_values", "past_key_value", "use_cache", "cache size", "KV cache memory", "kv cache formula", "prefill and decode", "key value cache", "KV cache from scratch", "why no query cache", "why is generation slow", "how much memory does a long chat need", "prefill vs decode", "what is a KV cache", "speed up generation", "cache grows", "KV cache explained", "memory of the cache", "prefill phase", "time to first token", "first token slow", "quadratic time", "avoid recomputing", "recompute the prompt", "re-read the prompt", "what is stored", "without a cache", "generation gets slower", "linear time", "remember the prompt", "model memory while writing"]

import time

import torch
import torch.nn.functional as F

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.checkpoint.weights import load_shipped

torch.set_grad_enabled(False)
model, tokenizer = load_shipped("gpt2-docs")
prompt = tokenizer.start("If the file does not exist, it")


def write(count, cache):  # keep: the logits of the last token are enough
    ids, seconds = list(prompt), []
    new = list(prompt)
    for _ in range(count):
        start = time.perf_counter()
        logits = model(torch.tensor([new]), cache=cache, keep=slice(-1, None))
        seconds.append(time.perf_counter() - start)
        ids.append(logits[0, -1].argmax().item())
        new = ids if cache is NO_CACHE else ids[-1:]
    return ids, torch.tensor(seconds)


text, without = write(200, NO_CACHE)
same, with_cache = write(200, GrowingCache(8))  # for 8 blocks
print("the same tokens:", text == same)
for name, seconds in {"without": without, "with": with_cache}.items():
    print(f"{name:8}{200 / seconds.sum():6.0f} tokens a second")
print(f"ratio   {without.sum() / with_cache.sum():6.1f}")

assert text == same
assert with_cache.median() < without.median()

# %%
# The text is the same. How much faster the cache is depends on the length:

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

_, (ax,) = figure(4.8, 3.0)
for seconds, style, colour, name in (
    (without, "o-", 3, "without a cache"),
    (with_cache, "s--", 0, "with a cache"),
):
    middle = 1000 * seconds.view(-1, 20).median(1).values
    ax.plot(
        range(10, 210, 20), middle, style, color=COLOURS[colour], label=name
    )
ax.set(title="Time of a token", xlabel="tokens written", ylabel="ms")
ax.set_ylim(0)
ax.legend(frameon=False)
plt.show()

assert without[150:].median() > without[:50].median()

# %%
# Without a cache, tokens become slower and slower. With one, the time hardly grows.
#
# What is computed again
# ----------------------
#
# In every block, each token makes three vectors: a query q, a key k and a value v. Each *round* writes one token. Go
# through the first rounds; ⊢ is ``<|endoftext|>``, the start of the document. Grey vectors are computed again, blue
# ones were kept.

from lm_from_scratch.drawings.caching import cache_filling, one_query

pieces = ["⊢", *tokenizer.pieces(text)[1:]]
cache_filling(pieces[:12], prompt=9)

# %%
# Without a cache, the work on earlier tokens is done again in every round. With one, their keys and values wait in
# memory, and the model reads one token a round.
#
# **Predict first.** The prompt has 9 tokens, and we write 200. Without a cache, how many tokens does the model read in
# all rounds together? With one it reads 208. (The last token is written and never read.)
#
# * about 400
# * about 2,000
# * about 22,000

rounds = range(9, 209)  # the length of the text in each round
print(f"without: {sum(rounds):,}, with: {9 + 199}")
print(f"ratio: {sum(rounds) / 208:.0f}")

assert sum(rounds) == 21_700 and round(21_700 / 208) == 104

# %%
# About 22,000: the model reads 9 tokens in the first round, 10 in the second, and so on up to 208, which adds up to
# 21,700.
#
# So twice the text takes about four times the work without a cache, and twice the work with one.
#
# Keys and values, but no queries
# -------------------------------
#
# Here is the round in which the model reads *is*, in head 0 of block 4. Darker cells have more weight.

from lm_from_scratch.instruments.plot import attention_maps

ten = torch.tensor([text[:10]])
weights = attention_maps(model, ten)[4][0, 0, -1]  # its row: (S,)
one_query(pieces[:10], weights.tolist())

# %%
# The new token has one query. It is compared with the *keys of all* tokens, and the weights average the *values of all*
# tokens. The grey rows belong to old queries, and nothing reads them again.
#
# And why may old keys and values stay as they are? Look at the last column: only the new row has a cell there, because
# the causal mask hides the new key from earlier tokens. So none of them can notice that the text went on. What a token
# passes to the next block stays the same, and with it its keys and values there, and so on.
#
# Build it
# --------
#
# We take the model from the lesson on `GPT-2 <../1_gpt2/2_gpt2.ipynb>`_, with its weights and two helpers.

w = {n.removeprefix("transformer."): x for n, x in model.state_dict().items()}


def norm(x, name):
    return F.layer_norm(x, (128,), w[f"{name}.weight"], w[f"{name}.bias"])


def linear(x, name):
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


# %%
# Numbers mark what is new or changed. The cache is a dictionary, empty at first, with the keys and values of each block.
# (``transformers`` calls it ``past_key_values``.) T counts the new tokens, S all tokens so far. ``permute`` reorders the
# axes.


def gpt2(ids, start, cache):  # ids: the new tokens (T,)
    T, S = len(ids), len(ids) + (cache[0][0].shape[1] if cache else 0)
    x = w["wte.weight"][ids] + w["wpe.weight"][start : start + T]  # 1
    future = torch.full((S, S), -torch.inf).triu(1)[-T:]  # 2
    for i in range(8):
        h = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        q, k, v = h.view(T, 3, 4, -1).permute(1, 2, 0, 3)  # (H, T, D)
        if S > T:
            k = torch.cat([cache[i][0], k], dim=1)  # 3: (H, S, D)
            v = torch.cat([cache[i][1], v], dim=1)
        cache[i] = k, v  # 4
        scores = q @ k.mT / 32**0.5 + future  # (H, T, S)
        y = (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, -1)
        x = x + linear(y, f"h.{i}.attn.c_proj")
        h = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        x = x + linear(F.gelu(h, approximate="tanh"), f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T  # (T, V)


# %%
# 1. The positions of the new tokens go on where the cache ends, at ``start``.
# 2. The new tokens are the *last* T of S tokens, so they get the `last T rows of the triangle
#    <../3_attention/2_masks.ipynb>`_.
# 3. Old keys and values come before the new ones.
# 4. All of them are kept for the next round.
#
# How do you know that a cache is right? By a law: *cut a text into pieces any way you like, and the logits must be those
# of one pass.* Here are 20 tokens in pieces of 9, 1, 1, 6 and 3.

twenty = torch.tensor(text[:20])
cache, logits = {}, []
for piece in twenty.split([9, 1, 1, 6, 3]):
    start = sum(map(len, logits))
    logits.append(gpt2(piece, start, cache))
full = model(twenty[None])[0]
error = (torch.cat(logits) - full).abs().max()
print(f"logits up to {full.abs().max():.0f}, largest error {error:.0e}")

assert error < 1e-4 < 1 < full.abs().max()

# %%
# Only rounding is left: a matrix product of fewer rows may add its terms in another order.
#
# A position forgotten
# --------------------
#
# An old script of this project read one token a round, but put each new one at position 0, without an error.
#
# **Predict first.** What does the model write?
#
# * the same text
# * another text, of ordinary words
# * random letters


def continued(count, forget=False):
    ids, cache = list(prompt), {}
    new = list(prompt)
    for _ in range(count):
        start = 0 if forget else len(ids) - len(new)
        logits = gpt2(torch.tensor(new), start, cache)
        ids.append(logits[-1].argmax().item())
        new = ids[-1:]
    return tokenizer.decode(ids[9:])


print("right:", continued(10))
print("wrong:", continued(16, forget=True))

right, wrong = continued(16), continued(16, forget=True)
assert right == tokenizer.decode(text[9:25])  # as the model itself
assert wrong != right and len(wrong.split()) > 5
assert all(word.strip(".,").isalpha() for word in wrong.split())
nine = {i: (k[:, :9], v[:, :9]) for i, (k, v) in cache.items()}
assert (gpt2(twenty[9:10], 0, nine) - full[9]).abs().max() > 1

# %%
# Another text, of ordinary words. It is nearly English, and the right text of this small model is no better.
#
# So reading the text proves nothing. The law finds the mistake at the first token after the prompt. Test logits, not
# fluency.
#
# Prefill and decode
# ------------------
#
# Generating has two phases. In **prefill**, one pass reads the whole prompt and fills the cache. In **decode**, each
# pass reads one token.

ids = torch.tensor([text[:200]])
seconds = []
for _ in range(3):
    start = time.perf_counter()
    model(ids, cache=GrowingCache(8), keep=slice(-1, None))
    seconds.append(time.perf_counter() - start)
print(f"prefill {200 / min(seconds):7,.0f} tokens a second")
print(f"decode  {200 / with_cache.sum():7,.0f} tokens a second")

assert min(seconds) / 200 < with_cache.median() / 2

# %%
# Why is decode so much slower per token? Each pass has a fixed price: every weight must come from memory. In prefill,
# 200 tokens share that price; in decode, each token pays it alone. That is also why the race is not won by 104 to 1:
# the passes that a cache saves are wide, and wide passes are efficient.
#
# What it costs
# -------------
#
# A cache trades memory for computation. In each of L blocks, a token adds a key and a value with D features for every
# `key head <../2_qwen2/3_swiglu.ipynb>`_:
#
# .. math::
#
#    \text{bytes of a token} = 2 \cdot L \cdot H_{kv} \cdot D \cdot \text{bytes of a number}
#
# **Predict first.** Qwen2-7B has 7.6 billion weights in 28 blocks, 4 key heads with 128 features, and numbers of 2
# bytes. How many chats of 32,768 tokens does it take until their caches are as large as the weights?
#
# * about 8
# * about 80
# * about 800

from lm_from_scratch.models.qwen2 import SIZES, Qwen2Config, Qwen2ForCausalLM

token = 2 * 28 * 4 * 128 * 2
config = Qwen2Config(**SIZES["Qwen2-7B"])
with torch.device("meta"):  # shapes without numbers
    weights = 2 * sum(p.numel() for p in Qwen2ForCausalLM(config).parameters())
print(f"one token: {token / 2**10:.0f} KiB")
print(f"one chat: {32_768 * token / 2**30:.2f} GiB")
print(f"weights: {weights / 2**30:.2f} GiB")

assert token / 2**10 == 56 and 32_768 * token / 2**30 == 1.75
assert round(weights / 2e9, 1) == 7.6
assert (config.n_layer, config.n_kv_head, config.head_dim) == (28, 4, 128)
assert 8 * 1.75 < weights / 2**30 < 8 * 1.8
assert 130 < 2000e9 / weights < 132
assert config.n_head // config.n_kv_head == 7

# %%
# About 8: eight chats take 14 GiB, about as much as all the weights.
#
# The cache grows with every token and every chat; the weights do not. The next lessons `drop old keys
# <2_kinds_of_cache.ipynb>`_ and `round them to 4 bits <3_quantized_cache.ipynb>`_.
#
# And the time? On a GPU whose memory delivers 2,000 GB a second, those weights allow one chat at most 131 tokens a
# second. So servers `decode many chats at once <../6_generation/3_continuous_batching.ipynb>`_: they share each reading
# of the weights. Each still has its own cache.
#
# When to empty it
# ----------------
#
# A cache belongs to one text and one set of weights. Start the next text with an empty one, or its tokens look at keys
# of the text before. If two texts begin alike, as chats with one system prompt do, the keys of the common beginning can
# be kept: cut the rest off. Training needs no cache: one pass reads a whole text, and no later pass uses the keys.
#
# In depth: `when a cache is right <1a_why_cache_in_depth.ipynb>`_, and `what it saves and costs
# <1b_cache_costs_in_depth.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* How many cached tokens weigh as much as Qwen2-1.5B in bfloat16 (2 bytes a number)? Compute it by the
#    formula, then ask a ``GrowingCache`` on the ``meta`` device. A good answer is one number, both ways.
# 2. *Easy.* Continue *Return the number of items in a* by ``gpt2``, with the cache that another text has left. Then
#    empty it, and write the text again. A good answer shows both texts, and says why the law does not hold.
# 3. *Medium.* Two prompts begin with the same nine tokens. Read these once, and continue each prompt from its own copy
#    of the cache. A good answer has the logits of two full passes, and counts how many tokens were read.
#
# Summary
# -------
#
# * The causal mask hides new keys from earlier tokens, so their keys and values never change. A new token needs all of
#   them, and no old query.
# * With a cache the model reads each token once. However a text is cut, the logits must be those of one full pass.
# * The price is memory: :math:`2 L H_{kv} D` numbers for each token of each text.
