r"""
Quantised caches in depth
=========================

The lesson on `keys and values in 8 and 4 bits <3_quantized_cache.ipynb>`_ rounds what a cache keeps. Is such a cache
right, what does it cost, and what does it do to the model? A cache that rounds does not equal the model without a
cache, so the usual test fails. This page proves how far a number moves, counts the bytes, finds the law that a rounding
cache obeys exactly, measures its time, and follows the error from the logits to the text.

The two models come with the package. They have 8 blocks, 2.1 million parameters and heads with D = 32, and were
trained on Python's documentation. The text is held-out documentation, in rows of 256 tokens that each begin as a
document.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["QuantizedCache", "residual_length", "q_group_size", "nbits", "quanto", "HQQ", "outlier channels", "per-channel quantization", "per-token quantization", "perplexity of quantized cache"]
import inspect
import itertools
import math
import statistics
import time

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers
from transformers.cache_utils import DynamicLayer, QuantizedLayer

from lm_from_scratch.cache.codec import EXACT, Quantized
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NoCache
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.plot import error_histogram, figure
from lm_from_scratch.text.batches import pieces
from lm_from_scratch.text.corpora import reference, split

torch.set_grad_enabled(False)

models = {}
for name in ("gpt2-docs", "qwen2-docs"):
    model, tokenizer = load_shipped(name)
    models[name] = model.eval()

batch = pieces(split(reference())[1], tokenizer, length=256, count=8)
idx, targets = batch.idx, batch.targets  # (B, T)
idx.shape

# %%
# At most half a step
# -------------------
#
# In formulas, the ruler of the lesson has a smallest mark, a step s, and for each number the code c of its nearest
# mark:
#
# .. math::
#
#    s = \frac{\max x - \min x}{2^b - 1}, \qquad
#    c = \mathrm{round}\!\left(\frac{x - \min x}{s}\right), \qquad
#    \hat x = \min x + s\,c
#
# The number :math:`(x - \min x)/s` lies between 0 and :math:`2^b - 1`, so the nearest whole number is a code, at a
# distance of at most 1/2. Multiply by s:
#
# .. math::
#
#    |\hat x - x| = s \left| c - \frac{x - \min x}{s} \right| \le \frac{s}{2}
#
# The next lines measure the distance on the keys of one block, with one ruler for each token and head.


def read(model, codec, idx, chunk=128):
    cache = GrowingCache(model.config.n_layer, codec, reserve=idx.shape[1])
    logits = [model(part, cache=cache) for part in idx.split(chunk, dim=1)]
    return torch.cat(logits, dim=1), cache


caches = {name: read(models[name], EXACT, idx[:4])[1] for name in models}
keys, _, _ = caches["qwen2-docs"].contents(4)  # (B, Hkv, S, D)
_, axes = figure(6.4, 2.8, columns=2)
for ax, bits in zip(axes, (8, 4), strict=True):
    codec = Quantized(bits, group=32)
    codes, low, step = codec.encode(keys.double())
    moved = (codec.decode([codes, low, step]) - keys).unsqueeze(-2) / step
    error_histogram(ax, moved, f"{bits} bits")
    rms = moved.pow(2).mean().sqrt().item()
    print(f"{bits} bits: largest {moved.abs().max():.3f} steps, rms {rms:.3f}")
    assert moved.abs().max() < 0.5 + 1e-4
    assert abs(rms / math.sqrt((1 - 2 / 32) / 12) - 1) < 0.03
plt.show()

# %%
# The error is spread evenly over one step, and evenly spread numbers have a mean square of :math:`s^2/12`. The bar at
# 0 is the smallest and the largest number of each group: they are marks of the ruler. So the mean square is
# :math:`(1 - 2/N) s^2 / 12`, which the last assertion checks for N = 32.
#
# Bytes
# -----
#
# A shorter ruler has a smaller step. The package lays one over each *group* of N neighbouring features of a token, and
# for 4 bits puts two codes into a byte. No group contains another token, so a token that arrives later changes nothing
# that is there. This is the codec:

print(inspect.getsource(Quantized.encode))

# %%
# A number costs b/8 bytes for its code. The ruler of its group is two numbers of w bytes, shared by N numbers.
#
# .. math::
#
#    \text{bytes per number} = \frac{b}{8} + \frac{2w}{N}
#
# Here is what a cache with D = 128 takes, which is what the formula says. The last column says how many times smaller
# than the exact cache it is.

per_number = {}
print("cache      bits    N   bytes  smaller")
for dtype, bits, N in itertools.product(
    (torch.float32, torch.bfloat16), (8, 4), (8, 32)
):
    k = torch.randn(1, 2, 40, 128).to(dtype)
    cache = GrowingCache(1, Quantized(bits, N))
    cache.see(torch.zeros(1, 40))
    cache[0].update(k, k)
    w, taken = k.element_size(), cache.nbytes / (2 * k.numel())
    per_number[dtype, bits, N] = taken
    print(f"{str(dtype)[6:]:9}{bits:6}{N:5}{taken:8.3f}{w / taken:9.2f}")
    assert taken == bits / 8 + 2 * w / N
assert per_number[torch.float32, 4, 8] == 1.5 and 2 * 4 / 8 / 1.5 == 2 / 3
assert per_number[torch.float32, 8, 8] == k.element_size() == 2

# %%
# Small groups are expensive in float32: at 4 bits and N = 8, two thirds of the bytes are rulers. And 8 bits with N = 8
# take 2 bytes a number, exactly as many as a cache that keeps bfloat16.
#
# The exact law
# -------------
#
# A cache that rounds cannot equal the model without a cache. But it equals another one exactly: the model whose keys
# and values make the round trip through the codec, in one pass without any cache. However the text is cut into pieces,
# the difference is rounding of float64.


class RoundTrip(NoCache):
    def __init__(self, codec):
        self.codec = codec

    def update(self, k, v):
        return [self.codec.decode(self.codec.encode(x)) for x in (k, v)]


double = load_shipped("qwen2-docs")[0].double().eval()
short = idx[:2, :41]
for codec in (Quantized(8, 32), Quantized(4, 16)):
    wanted = double(short, cache=RoundTrip(codec))
    rounding = (wanted - double(short)).abs().max().item()
    for chunk in (41, 17, 1):
        error = (read(double, codec, short, chunk)[0] - wanted).abs().max()
        assert error < 1e-9
    print(f"{codec}: law within 1e-9, exact model {rounding:.2f} away")
    assert rounding > 1e-3

# %%
# Test this law in float64. In float32, pieces of other sizes give sums that differ in their last bits. A number that
# lies so close to the border of two codes then gets the neighbouring code, and a rounding error becomes a whole step.
#
# Time
# ----
#
# Attention needs numbers, not codes. Each step decodes all S keys and values of each block again: :math:`2 H_{kv} S D`
# numbers, where the exact cache hands out a view of its buffer and copies nothing. Here is the time of one token in the
# cache and the attention of one block, divided by that of the exact cache. The three numbers are the quartiles of the
# ratio.


def step_seconds(cache, q, k):
    start = time.perf_counter()
    cache.see(torch.zeros(1, 1))
    keys, values = cache[0].update(k, k)
    F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
    return time.perf_counter() - start


codecs = {"exact": EXACT}
codecs |= {"8 bits, N 32": Quantized(8, 32), "4 bits, N 32": Quantized(4, 32)}
k, q = torch.randn(1, 2, 4096, 32), torch.randn(1, 4, 1, 32)
timed = {}
for title, codec in codecs.items():
    timed[title] = GrowingCache(1, codec, reserve=4096 + 30)
    timed[title].see(torch.zeros(1, 4096))
    timed[title][0].update(k, k)
ratios = {title: [] for title in timed}
for _ in range(25):
    seconds = {t: step_seconds(timed[t], q, k[:, :, :1]) for t in timed}
    for title in timed:
        ratios[title].append(seconds[title] / seconds["exact"])
for title in list(timed)[1:]:
    quartiles = statistics.quantiles(ratios[title], n=4)
    print(f"{title}:", *(f"{ratio:.1f}" for ratio in quartiles))
    assert quartiles[1] > 1.2

# %%
# On a CPU with plain tensor operations a quantised cache saves memory and costs time. While a layer runs, its decoded
# keys and values exist too, but only those of this layer.
#
# What can win time is a kernel that decodes inside attention, so that memory is read in its small form, or a larger
# batch in the memory that was saved. KIVI (see Sources) reports more throughput on GPUs, with larger batches.
#
# What transformers keeps
# -----------------------
#
# ``QuantizedCache`` of ``transformers`` follows KIVI, says its documentation, but groups keys and values alike. Its
# rounding comes from a backend. Three things differ from this page: the first pass sees its own keys exactly; of later
# tokens, up to ``residual_length`` stay exact; when there are more, everything is encoded again. Here our codec is the
# backend of one layer.


class TheirLayer(QuantizedLayer):
    encoded = 0

    def _quantize(self, tensor, axis):
        self.encoded += tensor.shape[2]
        return Quantized(4, 32).encode(tensor)

    def _dequantize(self, parts):
        return Quantized(4, 32).decode(parts)


assert "KIVI" in QuantizedLayer.__doc__
for name in ("nbits", "q_group_size", "residual_length"):
    print(name, inspect.signature(QuantizedLayer).parameters[name].default)
k = torch.randn(1, 2, 40, 32, generator=torch.Generator().manual_seed(0))
for chunks in ([40], [8, 32], [8] + 32 * [1]):
    layer = TheirLayer(residual_length=16)
    for chunk in k.split(chunks, dim=2):
        held, _ = layer.update(chunk, chunk)
    exact = int((held == k).all(-1).all(1).sum())
    line = f"{len(chunks):2} passes: the last sees {exact} of 40 keys exactly,"
    print(line, f"{layer.encoded // 2} keys were encoded")
    assert exact == {1: 40, 2: 32, 33: 16}[len(chunks)]
    assert layer.encoded // 2 == {1: 40, 2: 48, 33: 72}[len(chunks)]

# %%
# A pass over a whole prompt sees exact keys, which is more accurate. The price is the law: what a query sees depends on
# how the text was divided.
#
# From the cache to the text
# --------------------------
#
# Each line of the table is a cache through which a model reads the held-out text: the bytes of a token; the root mean
# square by which the logits move; the divergence KL(exact, quantised) in nats, by which the loss would rise on average
# if the exact model had written the text; the measured rise of the loss; and the share of the tokens at which greedy
# decoding would choose another one.


class Bfloat16:
    def encode(self, x):
        return [x.bfloat16()]

    def decode(self, parts):
        return parts[0].float()


codecs = {"exact": EXACT, "bfloat16": Bfloat16()}
for bits, N in ((8, 8), (8, 16), (8, 32), (4, 8), (4, 32)):
    codecs[f"{bits} bits, N {N}"] = Quantized(bits, N)
results = {}
for name, model in models.items():
    print(f"{name:14}{'bytes':>6}{'rms':>9}{'KL':>10}{'rise':>9}  changed")
    for title, codec in codecs.items():
        logits, cache = read(model, codec, idx[:2])
        log_p = logits.log_softmax(-1)  # (B, T, V)
        loss = -log_p.gather(-1, targets[:2, :, None])  # (B, T, 1)
        if title == "exact":
            exact, exact_p, exact_loss = logits, log_p, loss
        size = cache.nbytes // idx[:2].numel()
        rms = (logits - exact).pow(2).mean().sqrt().item()
        kl = (exact_p.exp() * (exact_p - log_p)).sum(-1).mean().item()
        rise = (loss - exact_loss).mean().item()
        changed = exact.argmax(-1) != logits.argmax(-1)  # (B, T)
        share = changed.float().mean().item()
        results[name, title] = size, rms, kl, rise, share
        line = f"  {title:12}{size:6}{rms:9.4f}{kl:10.1e}{rise:+9.4f}"
        print(line + f"{share:9.1%}")
        best = exact.topk(2, dim=-1).values  # (B, T, 2)
        margin, moved = best[..., 0] - best[..., 1], (logits - exact).abs()
        assert (margin <= 2 * moved.amax(-1) + 1e-4)[changed].all()

for name in models:
    of = {title: results[name, title] for title in codecs}
    for N in (8, 32):
        ratio = of[f"4 bits, N {N}"][1] / of[f"8 bits, N {N}"][1]
        assert abs(ratio / 17 - 1) < 0.25
        assert abs(of[f"8 bits, N {N}"][3]) < 0.003
        assert abs(of[f"4 bits, N {N}"][3]) < 0.05
    assert of["bfloat16"][0] == of["8 bits, N 8"][0]
    assert of["bfloat16"][1] < of["8 bits, N 8"][1]
    assert of["8 bits, N 16"][0] == of["4 bits, N 8"][0]
    assert 4 * of["8 bits, N 16"][1] < of["4 bits, N 8"][1]
    assert of["8 bits, N 32"][4] < 0.03 and of["4 bits, N 32"][4] < 0.15

# %%
# From 8 to 4 bits the step grows by 255/15 = 17, and so does the error of the logits, roughly. For its bytes, bfloat16
# beats 8 bits with N = 8; 8 bits with N = 16 beat 4 bits with N = 8, at the same size, by more than a factor of 4. The
# loss hardly moves, and is a noisy measure: logits and divergence tell caches apart that the loss does not.
#
# Greedy decoding reads only which logit is the largest. If no logit moves by more than e, the choice can change only
# where the best two were within 2e of each other: the first falls by at most e, the second rises by at most e. The last
# assertion in the loop checks it. One changed token is enough, and what follows is another text. So a different text is
# no sign of damage, and an equal text is no test.
#
# Large channels
# --------------
#
# KIVI reports that in large models a few fixed channels of the keys are much larger than all others. A ruler over the
# features of a token then serves these few. Is that so here? The first number is the largest channel, divided by the
# median one, in the worst block.
#
# KIVI's remedy is a ruler over *one channel of several tokens*. The same codec does it on the transposed tensor. Its
# error is printed as a share of ours, at the same bytes (4 bits, 32 numbers in a group); then again, with the tokens
# shuffled before they are grouped.

codec = Quantized(4, 32)


def rms_error(x):
    return (codec.decode(codec.encode(x)) - x).pow(2).mean().sqrt().item()


order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
gain = {}
print(f"{'':18}largest   channel   shuffled")
for (name, cache), part in itertools.product(caches.items(), (0, 1)):
    of = [cache.contents(layer)[part] for layer in range(8)]
    sizes = [x.abs().amax((0, 2)).flatten() for x in of]  # (Hkv * D,)
    spread = max((size.max() / size.median()).item() for size in sizes)
    per_token = [rms_error(x) for x in of]
    channel = [rms_error(x.mT) / e for x, e in zip(of, per_token)]
    mixed = [rms_error(x[:, :, order].mT) / e for x, e in zip(of, per_token)]
    label = ("keys", "values")[part]
    gain[name, label] = 1 - statistics.mean(channel), 1 - statistics.mean(mixed)
    print(f"{name:11}{label:7}{spread:7.1f}", end="")
    print(f"{statistics.mean(channel):10.2f}{statistics.mean(mixed):11.2f}")
    assert spread < 4

for name in models:
    assert gain[name, "keys"][0] > 2 * gain[name, "values"][0]
    assert gain[name, "keys"][1] < 0.75 * gain[name, "keys"][0]

# %%
# No channel is four times as large as the median one. Two small models say nothing about large ones; they only show
# that you have to look.
#
# The remedy helps here for another reason. Rulers along a channel make the error of the keys smaller, and help the values
# less than half as much. But more than a quarter of the gain goes when the tokens are shuffled: in a channel, the keys of
# *neighbouring* tokens are alike. The price is that a group is complete only after 32 tokens, so KIVI keeps the recent
# ones in full precision. The package's groups stay within a token and need no such window.
#
# Bug museum
# ----------
#
# One scale for the whole tensor
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The range of a quantised cache is taken over tokens and rows, so the future and the neighbours change what is read. (M9)
#
# The lesson tells this story with two ways to read a text; here are more. A simple quantiser is symmetric: one scale
# for a whole tensor, from its largest number. Weights allow it, because all of them are there from the start. The next
# lines use it for a cache, and read the same 64 tokens in four ways.


class OneScale:
    def encode(self, x):
        scale = x.abs().amax() / 127
        codes = (x / scale).round().to(torch.int8)
        return [codes, scale.expand(*x.shape[:3], 1)]

    def decode(self, parts):
        return parts[0] * parts[1]


for title, codec in {
    "one scale": OneScale(),
    "the package": Quantized(8),
}.items():
    trip = RoundTrip(codec)
    wanted = double(idx[:1, :64], cache=trip)[0]
    ways = {
        "with the text after it": double(idx[:1], cache=trip)[0, :64],
        "beside two other rows": double(idx[:3, :64], cache=trip)[0],
        "token by token": read(double, codec, idx[:1, :64], chunk=1)[0][0],
    }
    for way, logits in ways.items():
        change = (logits - wanted).abs().max().item()
        print(f"{title:12} {way:23} a logit moves by {change:.3f}")
        assert (change < 1e-9) == (title == "the package")

# %%
# The largest number may be in a later token or in another row, and the more text there is, the longer the ruler. The
# fixed line takes the range over the features of one token, ``x.amax(dim=-1, keepdim=True)``. The check is the law:
# however the text is cut, the logits are the same, and so they are in any batch.
#
# The dtype of another tensor
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A cache module gave the values the dtype of the keys, and joined old and new ones with ``torch.cat``, which promotes.
# ``DynamicLayer`` of ``transformers`` is printed beside it. (K8)

values = k.bfloat16()
held = torch.cat([torch.empty(1, 2, 0, 32, dtype=k.dtype), values], dim=2)
print(f"K8: {values.nbytes} bytes of values take {held.nbytes}")
assert held.nbytes == 2 * values.nbytes

layer = DynamicLayer()
layer.update(k.bfloat16(), values)
before = layer.keys.dtype
layer.update(k[:, :, :1], values[:, :, :1])  # one key in float32
print("transformers, keys:", before, "then", layer.keys.dtype)

# %%
# One number in the wrong dtype doubles the bytes of all others and brings no digit back. In a quantised cache the ruler
# has a dtype too. The fixed line compares and refuses; a test that mixes dtypes on purpose finds the defect.

cache = GrowingCache(1, Quantized(8))
for new in ((k, k), (k, values), (values, values)):
    cache.see(torch.zeros(1, 40))
    try:
        cache[0].update(*new)
    except ValueError as refusal:
        print(refusal)
assert cache.length == 40 and cache.contents(0)[0].dtype == torch.float32

# %%
# Exercises
# ---------
#
# 1. *Easy.* Keep the first token of each row exactly and round the others to 4 bits. How much smaller is the error of
#    the logits? Hint: change ``RoundTrip.update``. A good answer measures both models, and compares with token 100.
# 2. *Medium.* Write a codec that keeps minimum and step of a float32 cache in float16. A good answer shows the bytes
#    by formula and measured, that the law still holds, and that the error bound needs a new term. Hint: compute the
#    codes with the rounded step.
# 3. *Hard.* Build KIVI's cache for keys: groups of 32 tokens in each channel, and the tokens of an incomplete group
#    kept exactly. Which model does it equal, for pieces of one token? A good answer shows where the law of this page
#    fails and states the one that holds. Hint: what a query sees of a key depends on the tokens between them.
#
# Summary
# -------
#
# * A number becomes a code on a ruler; it moves by at most half a step, and a number costs :math:`b/8 + 2w/N` bytes.
#   With 4 bits and N = 32, a float32 cache shrinks to 0.75 bytes a number, 5.33 times smaller.
# * A quantised cache equals the model with rounded keys and values to 1e-9 in float64, in pieces of any size. Every step
#   decodes all that is held, so on this path it is slower than an exact one.
# * From 8 to 4 bits the error of the logits grows about 17 times. Greedy text changes only where the best two logits
#   are within twice the error; after that it is another text.
#
# Sources
# -------
#
# * Liu et al.: `KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache <https://arxiv.org/abs/2402.02750>`_, 2024. Keys by channel, values by token.
# * Hooper et al.: `KVQuant <https://arxiv.org/abs/2401.18079>`_, 2024. Keys before their rotation, and uneven marks.
# * Hugging Face: `KV cache strategies <https://huggingface.co/docs/transformers/kv_cache>`_, and `the post on their quantised cache <https://huggingface.co/blog/kv-cache-quantization>`_, 2024.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
