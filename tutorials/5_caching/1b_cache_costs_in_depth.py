r"""
What a cache saves, and what it costs, in depth
===============================================

With `the KV cache <1_why_cache.ipynb>`_ a model reads each token once, but the clock gains much less than the count of
tokens promises. Where is the rest? This page counts the multiplications with and without a cache, times both, counts the
bytes of a token from GPT-2 to Qwen2-7B, and measures why reading a prompt and writing a text have different limits.

Count the work
--------------

A pass of a GPT-2 over T new tokens that see S keys multiplies each of the :math:`12 C^2` weights of a block once for
each new token. The head is needed for the last token only. Attention multiplies each query with S keys, and its
weights with S values. The rest of the model has no matrix products.

.. math::

   M(T, S) = 12 L C^2 \, T + V C + 2 L C \, T S

Without a cache, round n is a pass with T = S = n. With one, T = 1 and S = n. These are the sums over N rounds.

.. math::

   M_{\text{without}} &= 12 L C^2 \, \frac{N (N + 1)}{2} + V C N + 2 L C \, \frac{N (N + 1) (2 N + 1)}{6} \\
   M_{\text{with}} &= 12 L C^2 \, N + V C N + 2 L C \, \frac{N (N + 1)}{2}

The first terms are the linear maps of the blocks, the last ones attention. A cache saves one power of N in both:
from the square to N, and from the cube to the square.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["../2_qwen2/4_qwen2"]
# sphinx_gallery_words = ["KV cache memory", "KV cache size", "kv cache formula", "prefill and decode", "memory bound", "memory bandwidth", "arithmetic intensity", "FLOPs per token", "torch.cat slow", "roofline", "KV cache size calculator", "how many tokens fit into memory"]

import inspect
import time
from dataclasses import replace
from statistics import median

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.buffer import Buffer
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.generation.generate import decode, prefill

torch.set_grad_enabled(False)


def multiplications(config, N, cached):
    """Of the linear maps, and of attention."""
    L, C, V = config.n_layer, config.n_embd, config.vocab_size
    sum_1, sum_2 = N * (N + 1) // 2, N * (N + 1) * (2 * N + 1) // 6
    tokens, pairs = (N, sum_1) if cached else (sum_1, sum_2)
    return 12 * L * C**2 * tokens + V * C * N, 2 * L * C * pairs


# %%
# To check the formula, torch counts the matrix products of the smallest published GPT-2. On the ``meta`` device tensors
# have shapes and no numbers, so nothing is computed.

from torch.utils.flop_counter import FlopCounterMode

from lm_from_scratch.attention.kinds import use_attention_
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel

with torch.device("meta"):
    small = GPT2LMHeadModel(GPT2Config()).eval()
use_attention_(small, "formula")
blank = torch.zeros(1, 16, dtype=torch.long, device="meta")
last = slice(-1, None)  # the column whose logits are wanted


def counted(passes):
    with FlopCounterMode(display=False) as counter:
        for idx, options in passes:
            small(idx, **options)
    operations = counter.get_flop_counts()["Global"]
    attention = operations.pop(torch.ops.aten.bmm)
    return sum(operations.values()) // 2, attention // 2  # half are additions


cache = dict(cache=GrowingCache(n_layer=12), keep=last)
without = counted((blank[:, : n + 1], dict(keep=last)) for n in range(4))
with_cache = counted((blank[:, n : n + 1], cache) for n in range(4))
assert without == multiplications(small.config, 4, cached=False)
assert with_cache == multiplications(small.config, 4, cached=True)

print("   N      without         with   ratio: linear, attention, all")
for N in (8, 128, 1024):
    a, b = (multiplications(small.config, N, cached) for cached in (0, 1))
    ratios = a[0] / b[0], a[1] / b[1], sum(a) / sum(b)
    print(f"{N:4}   {sum(a):.3e}    {sum(b):.3e}", end="   ")
    print("".join(f"{ratio:10.1f}" for ratio in ratios))
assert ratios[1] == (2 * N + 1) / 3 == 683
assert round(ratios[2]) == 376

# %%
# At GPT-2's full length the cache removes 375 of every 376 multiplications. How many are left? *Writing a text with a
# cache takes as many multiplications as reading it in one pass*, if pairs that the mask hides are not counted.

linear, all_pairs = counted([(blank[:, :4], {})])
places = torch.arange(4)[None]
visible = Visibility(places, places).mask.double().mean().item()  # a share
assert with_cache == (linear, visible * all_pairs)

# %%
# Measure it
# ----------
#
# The clock runs on a GPT-2 with L = 4 and C = 192. Each round runs both ways in turn, and does so twice: ``crop``
# takes the token back, and the shorter time counts. So other programs on the computer disturb the times little, and
# both ways alike.

config = GPT2Config(
    n_layer=4, n_head=4, n_embd=192, vocab_size=512, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
torch.manual_seed(0)
model = GPT2LMHeadModel(config).eval()
N = 128
text = torch.randint(0, 512, (1, N))


def seconds(run, *args, **options):
    start = time.perf_counter()
    run(*args, **options)
    return time.perf_counter() - start


clock, cache = {"without": [], "with": []}, GrowingCache(n_layer=4)
model(text)  # the first pass is slower
for n in range(N):
    tries = []
    for _ in range(2):
        without = seconds(model, text[:, : n + 1], keep=last)
        cache.crop(n)
        one = text[:, n : n + 1]
        tries.append((without, seconds(model, one, keep=last, cache=cache)))
    for name, times in zip(clock, zip(*tries)):
        clock[name].append(min(times))

# %%
# One number turns multiplications into seconds: the speed of the last 32 rounds without a cache. The dotted lines
# are the formula at this speed, for both ways.

spent, formula = {}, {}
for name, times in clock.items():
    sums = [multiplications(config, n, name == "with") for n in range(N + 1)]
    work = torch.tensor(sums, dtype=torch.float64).sum(1).diff()  # of round n
    if name == "without":
        speed = work[-32:].sum() / sum(times[-32:])
    spent[name], formula[name] = torch.tensor(times), work / speed

from lm_from_scratch.instruments.plot import COLOURS, figure

chart, (total, each) = figure(6.4, 3.8, columns=2)
n = torch.arange(1, N + 1)
shown = slice(7, None)
for name, line, colour in (("without", "-", 3), ("with", "--", 0)):
    style = dict(ls=line, color=COLOURS[colour], label=name)
    total.plot(n[shown], spent[name].cumsum(0)[shown], **style)
    each.plot(n[7::8], spent[name].view(-1, 8).median(1).values, **style)
    dots = ":" if name == "without" else (0, (1, 3))
    style |= dict(ls=dots, label=f"{name}, formula")
    total.plot(n[shown], formula[name].cumsum(0)[shown], **style)
    each.plot(n[shown], formula[name][shown], **style)
for ax, title in ((total, "Seconds, n tokens"), (each, "Seconds, token n")):
    ax.set(title=title, xlabel="n", xscale="log", yscale="log")
    ax.set_xticks([8, 16, 32, 64, 128], ["8", "16", "32", "64", "128"])
    ax.minorticks_off()
lines = total.get_legend_handles_labels()
chart.legend(*lines, loc="outside lower center", ncols=2, frameon=False)
plt.show()

count_ratio = formula["without"].sum() / formula["with"].sum()
clock_ratio = spent["without"].sum() / spent["with"].sum()
quarters = {name: spent[name].view(4, -1).median(1).values for name in spent}
growth = {name: q[3] / q[0] for name, q in quarters.items()}
print(f"{count_ratio:.0f} times fewer multiplications")
early, *_, late = (spent["without"] / spent["with"]).view(4, -1)
low, middle, high = late.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
print(f"{clock_ratio:.1f} times fewer seconds;", end=" ")
print(f"in the last quarter {middle:.1f} ({low:.1f} to {high:.1f})")
print("time of a token, last quarter over first:", end=" ")
print(*(f"{name} {ratio:.1f}" for name, ratio in growth.items()), sep=", ")
assert 1.5 < clock_ratio < count_ratio
assert spent["with"].sum() > formula["with"].sum()
assert middle > 1.2 * early.median()
assert 0.09 < formula["with"][-1] / formula["with"][0] - 1 < 0.11

# %%
# Without a cache the time of a token grows with the text. With one it grows much less: by formula, the last of 128
# tokens costs about a tenth more than the first.
#
# But the clock saves less than the count. The dashed lines lie above their formula: with one token in a pass, the same
# computer multiplies more slowly. The section on two phases shows what it waits for.
#
# What a token costs in memory
# ----------------------------
#
# By the formula of the lesson, a token takes :math:`2 L H_{kv} D b` bytes, if a number has b bytes. Here it is compared
# with what a cache holds for three published shapes, GPT-2 in float32, Qwen2 in bfloat16. The last column is the number
# of cached tokens that weigh as much as the model.

from lm_from_scratch.models.qwen2 import SIZES, Qwen2Config, Qwen2ForCausalLM

published = {"GPT-2 124M": small}
for name in ("Qwen2-0.5B", "Qwen2-7B"):
    with torch.device("meta"):
        empty = Qwen2ForCausalLM(Qwen2Config(**SIZES[name]))
    published[name] = empty.to(torch.bfloat16)

token = {}
print("            KiB a token   GiB of weights   tokens as heavy")
for name, empty in published.items():
    c, cache = empty.config, GrowingCache(empty.config.n_layer)
    prefill(empty, blank, cache)
    token[name] = cache.nbytes // 16
    Hkv, b = getattr(c, "n_kv_head", c.n_head), empty.head.weight.itemsize
    assert cache.nbytes == 16 * 2 * c.n_layer * Hkv * c.head_dim * b
    weights = sum(p.nbytes for p in empty.parameters())
    print(f"{name:10}{token[name] / 2**10:13.0f}", end="")
    print(f"{weights / 2**30:17.2f}{weights // token[name]:18,}")

assert [n / 2**10 for n in token.values()] == [72, 12, 56]
assert 8 * 32768 * token["Qwen2-7B"] == 14 * 2**30
assert 0.98 < 14 * 2**30 / weights < 0.99

# %%
# A token of the smallest GPT-2 costs 72 KiB, a token of Qwen2-0.5B only 12 KiB, because 14 query heads share two
# key heads and a number takes two bytes. Qwen2-7B pays 56 KiB: eight rows of 32,768 tokens are 14 GiB, nearly as much
# as its weights.
#
# Two phases, two limits
# ----------------------
#
# A pass over a model that is larger than the processor's own memory reads every weight at least once, and multiplies
# it once for each of its B T tokens. In float32:
#
# .. math::
#
#    \frac{\text{multiplications}}{\text{bytes of weights}} = \frac{B \, T}{4}
#
# A step of decode with one row has a quarter of a multiplication for each byte, a prefill of 64 tokens has 16. How many
# could the processor do? The next block measures the speed of a large matrix product, and the speed at which a large
# matrix is read for a product with one vector. The model has more than 160 MiB of weights. Every turn of the loop
# measures everything once.

wide = replace(config, n_layer=6, n_head=12, n_embd=768)
model = GPT2LMHeadModel(wide).eval()
used = 12 * 6 * 768**2 + 512 * 768  # weights in matrix products
assert 4 * used > 160 * 2**20
text = torch.randint(0, 512, (8, 64))
square, tall = torch.randn(1024, 1024), torch.randn(16384, 2048)

rows = (1, 2, 4, 8)
caches = {B: GrowingCache(6, reserve=64) for B in rows}
for B, cache in caches.items():
    prefill(model, text[:B, :16], cache)
assert caches[8].nbytes == 8 * caches[1].nbytes
rate = {name: [] for name in (*rows, "prefill", "multiply", "read")}
for t in range(16, 21):
    for B, cache in caches.items():
        took = seconds(decode, model, text[:B, t], cache)
        rate[B].append(B / took)
    took = seconds(prefill, model, text[:1], GrowingCache(6))
    rate["prefill"].append(64 / took)
    rate["multiply"].append(1024**3 / seconds(torch.mm, square, square))
    rate["read"].append(tall.nbytes / seconds(torch.mv, tall, tall[0]))

middle = {name: median(values) for name, values in rate.items()}
balance = middle["multiply"] / middle["read"]
print(f"{balance:.1f} multiplications for each byte, if it were ideal")
print("tokens per second, one row = 1")
for name in (*rows, "prefill"):
    low, mid, high = (f(rate[name]) / middle[1] for f in (min, median, max))
    print(f"{name!s:8}{mid:5.1f}  ({low:.1f} to {high:.1f})")
assert balance > 0.5
assert middle[8] > 1.3 * middle[1]
assert middle["prefill"] > 2 * middle[1]

# %%
# The figure has both limits: one reading of the weights serves B T tokens, and no pass multiplies faster than a large
# product does. The output says how far each point is below the lower limit: a product of few rows is not a fast one.

_, (ax,) = figure(5.0, 3.6)
x = torch.tensor([1.0, 64.0])
read = x * middle["read"] / (4 * used)
ax.plot(x, read, "--", color=COLOURS[3], label="limit of reading")
multiply = middle["multiply"] / used
ax.axhline(multiply, ls=":", color=COLOURS[2], label="limit of multiplying")
ax.plot(rows, [middle[B] for B in rows], "o-", label="decode, B rows")
ax.plot(64, middle["prefill"], "s", color=COLOURS[7], label="prefill, T = 64")
ax.set(xscale="log", yscale="log", xlabel="B T", ylabel="tokens / s")
ax.set_title("Tokens per second")
ax.set_xticks([1, 2, 4, 8, 64], ["1", "2", "4", "8", "64"])
ax.minorticks_off()
ax.legend(frameon=False)
plt.show()

points = {B: middle[B] for B in rows} | {64: middle["prefill"]}
for tokens, speed in points.items():
    limit = min(tokens * middle["read"] / (4 * used), multiply)
    print(f"B T = {tokens:2}: {speed / limit:.2f} of the lower limit")
    assert speed < 1.3 * limit  # both were measured, at different moments

# %%
# One row waits for memory: the processor could do more than twice the multiplications that it gets. The rows of a
# batch share each reading of the weights, so eight rows write more tokens a second than one. In prefill the tokens of
# a prompt share it. This is why servers decode many texts at once.
#
# The cache is not shared. Eight rows hold eight times its bytes, and read them in every step.
#
# Bug museum
# ----------
#
# A copy of everything for every token
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# ``torch.cat`` makes a new tensor: to add one token it writes all S again. The old module did, and from 200 to 400
# tokens its copies became 3.99 times as many. The fixed line asks for twice the room when there is too little (K11):

from torch.utils._python_dispatch import TorchDispatchMode

print(inspect.getsource(Buffer.make_room))


class PlainCache:
    """Concatenates, for a single layer."""

    held = None  # keys and values, each (B, Hkv, S, D)

    def see(self, *args, **options):
        pass

    def __getitem__(self, layer):
        return self

    def update(self, *new):
        old = self.held or [part[:, :, :0] for part in new]
        self.held = [torch.cat(pair, dim=2) for pair in zip(old, new)]
        return self.held


class Written(TorchDispatchMode):
    """Counts the bytes that operations write into keys and values."""

    bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view and result.is_floating_point():
            self.bytes += result.nbytes
        return result


def bytes_written(cache):
    """After 0, 1, ..., 512 tokens, in one layer of the smallest GPT-2."""
    x, k = torch.empty(1, 1), torch.empty(1, 12, 1, 64, device="meta")
    after = [0]
    with Written() as counter:
        for _ in range(512):
            cache.see(x, None, None, windows=[None])
            cache[0].update(k, k)
            after.append(counter.bytes)
    return after


one = 2 * 12 * 64 * 4  # bytes of a token
plain, double = bytes_written(PlainCache()), bytes_written(GrowingCache(1))
reserved = bytes_written(GrowingCache(1, reserve=512))
print("bytes written / bytes held\n   n   concatenate  double  reserve")
for n in (200, 400, 512):
    shares = [counts[n] / (n * one) for counts in (plain, double, reserved)]
    print(f"{n:4}{shares[0]:14.1f}{shares[1]:8.1f}{shares[2]:9.1f}")
for n in range(1, 513):
    assert plain[n] == n * (n + 1) // 2 * one
    assert double[n] < 7 * n * one
    assert reserved[n] == (512 + n) * one
assert round(plain[400] / plain[200], 2) == 3.99

# %%
# Doubling writes less than 4 n tokens of zeros, 2 n of copies and n new ones: less than 7 n. If you
# reserve the full length up front, every slot is written twice: first a zero, then the real value.
#
# The clock gains less than that. Attention reads S keys and values for every token in any case; concatenation reads and
# writes them once more. It triples the traffic of the cache, and beside the weights a short cache is small.
#
# Exercises
# ---------
#
# 1. *Medium.* A batch does not help attention: in a step of decode, a number of the cache is multiplied H / Hkv times,
#    whatever B is. Show it for Qwen2-0.5B with B = 1 and B = 8. Hint: count on the ``meta`` device, with the kind
#    ``formula``, one step after a prefill. A good answer is 7 for both.
# 2. *Hard.* Keep the normalised states from which keys and values are made, C numbers a token and layer, and compute
#    all S keys and values in every step. For which of the three published shapes is this cache smaller, and what does
#    a step cost? Hint: compare C with :math:`2 H_{kv} D`. A good answer keeps the law, finds one shape, and shows
#    that the linear maps lose the saved power of N again.
#
# Summary
# -------
#
# * A cache saves one power of N. For 1024 tokens of the smallest GPT-2, it removes 375 of every 376
#   multiplications; as many are left as reading the text once takes. The clock saves less.
# * A token takes :math:`2 L H_{kv} D b` bytes: 72 KiB in GPT-2 with float32, 12 KiB in Qwen2-0.5B and 56 KiB in
#   Qwen2-7B with bfloat16.
# * One row of decode waits for the weights to be read. A batch shares the reading, but not the cache.
# * Concatenation writes N (N + 1) / 2 tokens to hold N, a buffer that doubles less than 7 N.
#
# Sources
# -------
#
# * Shazeer: `Fast Transformer Decoding: One Write-Head is All You Need <https://arxiv.org/abs/1911.02150>`_, 2019. Why
#   decoding waits for memory, and fewer key heads as an answer.
# * Pope et al.: `Efficiently Scaling Transformer Inference <https://arxiv.org/abs/2211.05102>`_, 2022. Prefill,
#   decode, and what each costs.
# * Williams, Waterman, Patterson: `Roofline <https://doi.org/10.1145/1498765.1498785>`_, 2009. The figure with two
#   limits.
# * Ainslie et al.: `GQA <https://arxiv.org/abs/2305.13245>`_, 2023. Query heads that share keys.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
