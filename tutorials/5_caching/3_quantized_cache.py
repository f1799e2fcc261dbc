r"""
Keys and values in 8 and 4 bits
===============================

For every token of a text, a cache keeps keys and values in each block. In our small Qwen2 these are 1,024 numbers a
token, of 32 bits each. How many of the bits does the model need?

Below, it continues *If the file does not exist, a* three times. The cache is exact the first time, then rounded to 8
and to 4 bits. Orange marks what the model writes differently.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["2_kinds_of_cache"]
# sphinx_gallery_words = ["QuantizedCache", "KV cache quantization", "cache_implementation", "KIVI", "int8 cache", "reduce KV cache", "kv cache int4", "q8_0 cache", "compress the KV cache", "save cache memory", "long chat out of memory", "cache larger than the model", "KV cache in 8 bits", "KV cache in 4 bits", "quantise keys and values", "fp8 cache", "does a quantised cache hurt", "less memory for long texts"]
# sphinx_gallery_museum = ["M9"]
import torch
import torch.nn.functional as F

from lm_from_scratch.cache.codec import EXACT, Quantized
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NoCache
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import caching as drawings
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY

torch.set_grad_enabled(False)
model, tokenizer = load_shipped("qwen2-docs")
prompt = tokenizer.start("If the file does not exist, a")


def write(codec, n=40):
    cache = GrowingCache(8, codec, reserve=len(prompt) + n - 1)  # 8 blocks
    steps = generate(model, [prompt], n, GREEDY, cache=cache)
    pieces = tokenizer.pieces(complete(steps)[0])
    return pieces, cache.nbytes // cache.length


texts, sizes = {}, {}
codecs = {"32 bits": EXACT, "8 bits": Quantized(8), "4 bits": Quantized(4)}
for name, codec in codecs.items():
    pieces, sizes[name] = write(codec)
    texts[f"{name}, {sizes[name]:,} bytes a token"] = pieces
exact, eight, four = texts.values()

assert eight == exact and drawings.same_tokens(exact, four) in range(4, 40)
assert [*sizes.values()] == [4096, 1280, 768] and 1280 < 4096 / 3
drawings.versions(texts)

# %%
# With 8 bits the model writes the same 40 tokens, and the cache is less than a third as large. With 4 bits the text
# takes another turn after a while, and still reads as well as before.
#
# Numbers on a ruler
# ------------------
#
# How does a number fit into b = 4 bits? Lay a ruler over several numbers, with :math:`2^b` marks from the smallest to
# the largest. Keep the smallest number and the *step* between two marks. For each number, keep only the index of the
# nearest mark, its *code*. Rounding of this kind is called *quantisation*.
#
# Here are 8 of the 32 features of a real key, that of ``␣file`` in head 0 of block 1. The dots are the numbers, and
# the arrows lead to their marks.

cache = GrowingCache(8)
model(torch.tensor([prompt]), cache=cache)
keys, values, _ = cache.contents(1)  # (B, Hkv, S, D)
row = keys[0, 0, 3, 8:16].tolist()

assert tokenizer.pieces(prompt)[3] == " file"
drawings.ruler(row, [2, 4])

# %%
# A number moves by at most half a step. With 4 bits there are 15 steps from end to end, with 2 bits there are 3, so a
# step is 5 times as long. In code, for all rows at once:


class Rounded:
    def __init__(self, bits):
        self.steps = 2**bits - 1

    def encode(self, x):  # (B, Hkv, T, D)
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step = (high - low) / self.steps
        return [((x - low) / step).round(), low, step]

    def decode(self, parts):
        codes, low, step = parts
        return low + step * codes


# %%
# Such a pair of functions is a *codec*, and it is all that a cache needs: ``encode`` what comes in, ``decode`` what
# attention asks for. The package's codec ``Quantized`` also packs two codes of 4 bits into a byte.
#
# **Predict first.** What does the model write with 2 bits for each number, and with 1 bit?
#
# * with both, a sensible text
# * with 2 bits another sentence, with 1 bit nonsense
# * with both, nonsense

rounded = {
    "2 bits": write(Rounded(2))[0],
    "1 bit": write(Rounded(1))[0],
}

for one, other in zip(Quantized(8).encode(keys), Rounded(8).encode(keys)):
    assert torch.equal(one.flatten(-2).float(), other)  # one group a head
assert drawings.same_tokens(exact, rounded["2 bits"]) < 5
assert len("".join(rounded["1 bit"])) < 0.75 * len("".join(rounded["2 bits"]))
assert (
    (Rounded(4).decode(Rounded(4).encode(keys)) - keys).abs()
    < 0.501 * Rounded(4).encode(keys)[2]
).all()
drawings.versions({"32 bits": exact} | rounded)

# %%
# With 2 bits the text begins with another whole sentence and ends in a loop. With 1 bit, each number is the
# smallest or the largest of its row, and the text falls apart.
#
# One large number
# ----------------
#
# What if one number is far from the others?
#
# **Predict first.** One of the eight numbers becomes six times as large. What happens to the other seven with 2 bits?
#
# * nothing, they keep their marks
# * each of them has a mark of its own now
# * all of them share one or two marks

outlier = [6 * row[0], *row[1:]]

assert len(Rounded(2).encode(torch.tensor(row))[0].unique()) == 4
assert len(Rounded(2).encode(torch.tensor(outlier))[0][1:].unique()) == 2
drawings.ruler(outlier, [2, 4], shown=[0])

# %%
# All of them share two marks, because the ruler has to reach its largest number.
#
# Such a number is an *outlier*: it stretches the ruler, and what was different becomes equal. So it matters which
# numbers share a ruler.
#
# Which numbers share a ruler
# ---------------------------
#
# In this package, the features of one token do: one ruler for each head and token, or several shorter ones. Each box in
# the drawing is a ruler. When a new token arrives, the rulers of earlier tokens stay as they are.

drawings.shared_rulers(tokenizer.pieces(prompt)[1:8], 8, 4)

# %%
# The other way, a ruler over several tokens of *one* feature, is how `KIVI <https://arxiv.org/abs/2402.02750>`_ rounds
# keys. Its authors report that in large models a few features of the keys are large for every token. With KIVI, such a
# feature has rulers of its own. The price: a group of tokens has to wait for its last.
#
# One ruler for everything
# ------------------------
#
# A simple way to round *weights* takes one step for a whole tensor. Suppose you use it for a cache, and test it with
# one text. It works. Later, the texts of several people are read in one batch. (The model computes in float64, where
# rounding of its own is too small to matter.)

from lm_from_scratch.text.batches import pieces as cut
from lm_from_scratch.text.corpora import reference, split


class OneStep:
    def encode(self, x):
        step = x.abs().amax() / 127  # codes from -127 to 127
        return [(x / step).round(), step.expand(*x.shape[:3], 1)]

    def decode(self, parts):
        return parts[0] * parts[1]


held_out = split(reference())[1]  # text that the model was not trained on
batch = cut(held_out, tokenizer, length=256, count=8)
double = load_shipped("qwen2-docs")[0].double()
moved = []
for codec in (OneStep(), Rounded(8)):
    alone = double(batch.idx[:1, :64], cache=GrowingCache(8, codec))[0]
    beside = double(batch.idx[:3, :64], cache=GrowingCache(8, codec))[0]
    moved.append((alone - beside).abs().max().item())
    print(f"{type(codec).__name__}: logits of row 0 move by {moved[-1]:.3f}")

assert moved[0] > 0.05 and moved[1] < 1e-9
assert (
    double(batch.idx[:1, :64], cache=GrowingCache(8, OneStep()))
    - double(batch.idx[:1], cache=GrowingCache(8, OneStep()))[:, :64]
).abs().max() > 0.05

# %%
# With one step for all, a larger number in somebody else's row changes what row 0 reads. So does a larger number in a
# later token. No error is raised. With a ruler for each token, row 0 says what it says alone.
#
# Keys or values?
# ---------------
#
# Now round only one of the two. The next class keeps nothing. In each block it encodes keys and values and decodes them
# at once, so one pass over a text shows what rounding does.


class RoundTrip(NoCache):
    def __init__(self, keys=EXACT, values=EXACT):
        self.keys, self.values = keys, values

    def update(self, k, v):
        k = self.keys.decode(self.keys.encode(k))
        return k, self.values.decode(self.values.encode(v))


def loss(**codecs):
    logits = model(batch.idx, cache=RoundTrip(**codecs))
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).item()


# %%
# **Predict first.** The loss on the held-out text, in nats, rises when we round. What does more damage with 2 bits?
#
# * rounded keys
# * rounded values
# * both the same

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import figure

plain = loss()
rise = {
    part: [loss(**{part: Rounded(b)}) - plain for b in (2, 3, 4, 8)]
    for part in ("keys", "values")
}
_, (ax,) = figure(4.6, 3.0)
for i, (part, numbers) in enumerate(rise.items()):
    places = [x + 0.4 * i - 0.2 for x in range(4)]
    ax.bar(places, numbers, 0.38, label=part, hatch=("", "//")[i])
ax.set_xticks(range(4), ["2 bits", "3 bits", "4 bits", "8 bits"])
ax.set(title="Rise of the loss when one of the two is rounded", ylabel="nats")
ax.legend(frameon=False)
plt.show()

assert rise["keys"][0] > 2 * rise["values"][0] > 0

# %%
# Rounded keys: they do more than twice the damage of rounded values.
#
# Yet both are rounded equally well, in proportion to their size:

for name, x in (("keys", keys), ("values", values)):
    error = Rounded(2).decode(Rounded(2).encode(x)) - x
    print(f"error of the {name}: {error.norm() / x.norm():.0%}")
    assert 0.3 < error.norm() / x.norm() < 0.45

# %%
# A rounded value is still the value of the right token, slightly off. A rounded key changes *which* token is
# read. Here is a query that it hits hard, that of ``␣is`` after *an exception*, in head 2 of block 6.

from lm_from_scratch.instruments.record import record_attention

ids = tokenizer.start("If the file does not exist, an exception is raised.")
weights = []
for codec in (EXACT, Rounded(2)):
    with record_attention(model) as maps:
        model(torch.tensor([ids]), cache=RoundTrip(keys=codec))
    weights.append(maps[6][0][0, 2, 10, :11].tolist())  # head 2, token 10
words = ["⊢", *tokenizer.pieces(ids)[1:11]]

_, (ax,) = figure(4.4, 3.8)
for i, name in enumerate(("exact keys", "keys of 2 bits")):
    places = [x + 0.4 * i - 0.2 for x in range(11)]
    shares = [100 * weight for weight in weights[i]]
    ax.barh(places, shares, 0.38, label=name, hatch=("", "//")[i])
ax.set_yticks(range(11), [word.strip() for word in words])
ax.invert_yaxis()
ax.set(title='Where "is" looks', xlabel="weight in %")
ax.legend(frameon=False)
plt.show()

assert tokenizer.pieces(ids)[10] == " is" and len(tokenizer.pieces(ids)) == 13
assert words[9] == " exception" and weights[1][9] < weights[0][9] / 2
assert words[8] == " an" and weights[1][8] == max(weights[1])
assert weights[0][9] == max(weights[0]) and weights[0][8] < 0.1

# %%
# ``␣exception`` loses more than half of its weight, and ``␣an`` now has the most: the query reads another word.
#
# What it saves and costs
# -----------------------
#
# A code of b bits takes b/8 bytes. A ruler takes two numbers of w bytes each: its smallest mark and its step. If 32
# codes share a ruler, each number takes
#
# .. math::
#
#    \frac{b}{8} + \frac{2 w}{32} \text{ bytes}
#
# Models usually work in bfloat16, whose numbers take w = 2 bytes. This is the cache of Qwen2-7B, which keeps 28,672
# numbers a token, for a text of 32,768 tokens.

numbers = 2 * 28 * 4 * 128 * 32_768
each = {"bfloat16": 2, "8 bits": 1 + 4 / 32, "4 bits": 0.5 + 4 / 32}
for name, size in each.items():
    print(f"{name:8} {numbers * size / 2**30:.2f} GiB")

assert numbers == 28_672 * 32_768
assert sizes == {"32 bits": 4 * 1024, "8 bits": 1280, "4 bits": 768}
assert 1280 == 1024 * (1 + 8 / 32) and 768 == 1024 * (1 / 2 + 8 / 32)
assert round(2 / (1 + 4 / 32), 1) == 1.8 and round(2 / (0.5 + 4 / 32), 1) == 3.2

# %%
# The saving is 1.8 times with 8 bits and 3.2 times with 4, not 2 and 4, because of the rulers. The cost is time: at
# every step, all keys and values are decoded again. On a CPU with plain tensor operations, a rounded cache is slower
# than an exact one. On a GPU, the memory it saves can be spent on a larger batch.
#
# `Quantised caches in depth <3a_quantized_cache_in_depth.ipynb>`_ tests the cache, measures its time, and follows the
# error to the text.
#
# Exercises
# ---------
#
# 1. *Easy.* A model has L = 24, Hkv = 2 and D = 64, and works in bfloat16. How many tokens fit into 1 GiB of cache
#    exactly, with 8 bits and with 4 bits, with 32 numbers to a ruler? Compute it, then check with ``nbytes`` of a small
#    cache. A good answer shows both factors, and why they are not 2 and 4.
# 2. *Easy.* Write five texts, from prompts of your own, with ``Quantized(4, 8)``, whose rulers have 8 features each, and
#    with ``Quantized(4, 32)``. A good answer says how many tokens stay as they are in each, and what the shorter rulers
#    cost in bytes.
# 3. *Medium.* Give ``Rounded`` one more number: with 2 bits, keep the largest of each row exactly, and lay the ruler
#    over the others. A good answer shows the text and the loss before and after, and the bytes. Hint: set the largest
#    to the mean before you encode, and put it back at the end of ``decode``.
#
# Summary
# -------
#
# * A number becomes the index of a mark on a ruler. It moves by at most half a step, and an outlier makes the step
#   long.
# * Each token and head has a ruler of its own, so a row depends neither on other rows nor on later tokens.
# * Our model writes the same with 8 bits. Rounded keys do more damage than rounded values, since they change which
#   token is read.
