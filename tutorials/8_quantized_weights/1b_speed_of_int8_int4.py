r"""
The speed of int8 and int4 in depth
===================================

The lesson on `int8 and int4 <1_int8_int4.ipynb>`_ makes a model more than six times smaller. Is it six times faster?
This page counts the bytes that a token reads, measures how close decoding comes to the time that memory alone would
need, and explains why fast int8 also rounds the *activations*, the numbers that a weight is multiplied with.
"""

# sphinx_gallery_needs = ["../5_caching/1_why_cache"]
# sphinx_gallery_words = ["load_in_8bit slower", "load_in_4bit slower", "quantization slower", "memory bandwidth", "memory-bound", "tokens per second", "dynamic quantization", "int8 matmul", "activation quantization", "W8A8", "roofline"]
import copy
import functools
import statistics
import time

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.weights import int4, packed_int8
from lm_from_scratch.weights.int4 import Int4Weight
from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.packed_int8 import PackedInt8Weight, largest_code
from lm_from_scratch.weights.quantize import quantize_

torch.set_grad_enabled(False)
generator = torch.Generator().manual_seed(0)

# %%
# A token reads every weight
# --------------------------
#
# To compute one token, a step reads each matrix once and uses each number once. No step can be faster than
#
# .. math::
#
#    t \ge \frac{\text{bytes of the weights}}{\text{bytes that memory delivers in a second}}
#
# Here is a model with the width and the vocabulary of GPT-2 small, with random weights and 2 blocks instead of 12 to
# keep the page quick. What it reads can be counted before anything is timed.

from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.generation.generate import decode, prefill
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel

config = GPT2Config(n_layer=2, block_size=256)
plain = GPT2LMHeadModel(config).eval().requires_grad_(False)
half = copy.deepcopy(plain).bfloat16()
runners = {"float32": plain, "bfloat16": half}
for title, options in {
    "int8": dict(bits=8),
    "weight only": dict(bits=8, weight_only=True),
    "int4": dict(bits=4),
}.items():
    runners[title] = copy.deepcopy(half)
    quantize_(runners[title], **options)


def bytes_read(p):
    if isinstance(p, Int8Weight):  # not as a kernel lays them out
        return p.numel() + p.scale.nbytes
    return p.nbytes


read = {
    title: sum(bytes_read(p) for p in model.parameters())
    - model.transformer.wpe.weight.nbytes  # of which a token reads one row
    for title, model in runners.items()
}
held = {
    title: sum(p.nbytes for p in model.parameters())
    for title, model in runners.items()
}
for title, size in read.items():
    less = read["float32"] / size
    print(
        f"{title:12}reads{size / 1e6:7.1f} MB, {less:.2f} times less;", end=" "
    )
    print(f"holds {held[title] / 1e6:.1f} MB")

C, V, L = config.n_embd, config.vocab_size, config.n_layer
numbers = 12 * L * C * C + V * C  # in matrices
small = L * (9 * C + 4 * C) + 2 * C  # biases and norms
assert read["float32"] == 4 * (numbers + small)
assert read["bfloat16"] == 2 * (numbers + small)
assert read["int8"] == numbers + 2 * (V + 9 * L * C) + 2 * small
padded = 0.5625 * (12 * L * C * C + (V + -V % int4.block_rows()) * C)
assert read["int4"] == padded + 2 * small

# %%
# All bytes are accounted for: int8 keeps a scale for each of 9 C rows of a block and V rows of the head, and int4 fills
# up the kernel's last rows of the head. int4 reads less than a seventh of float32.
#
# A model holds more than it reads where the fast int8 kernel has a layout of its own. It fills rows of 768 up to 1024,
# and the embedding is held twice: packed for the head, and by rows to look them up.
#
# Now decode, in turns, so that a slow moment of the machine meets all of them. The bandwidth of memory is measured in
# the same turns, as the product of a matrix of 256 MB with a vector. These numbers belong to one machine at one moment,
# so the page prints them and asserts none.

assert read["float32"] > 7 * read["int4"]
matrix, vector = torch.ones(2**13, 2**13), torch.ones(2**13)
prompt = torch.randint(0, V, (1, 32), generator=generator)
caches = {}
for title, model in runners.items():
    caches[title] = cache_for(config.windows, reserve=128)
    prefill(model, prompt, caches[title])


def milliseconds(run, times=1):
    start = time.perf_counter()
    for _ in range(times):
        run()
    return 1000 * (time.perf_counter() - start) / times


took, delivered = {title: [] for title in runners}, []
for _ in range(5):
    memory = min(milliseconds(lambda: matrix @ vector) for _ in range(2))
    delivered.append(matrix.nbytes / memory)  # bytes in a millisecond
    for title, model in runners.items():
        token = functools.partial(decode, model, prompt[:, 0])
        token = functools.partial(token, cache=caches[title])
        took[title].append(milliseconds(token, times=3))

print("             MB held  over float32 (range)  of limit  GB/s")
for title, each in took.items():
    over = [a / b for a, b in zip(took["float32"], each, strict=True)]
    share = [read[title] / d / t for d, t in zip(delivered, each, strict=True)]
    line = f"{title:12}{held[title] / 1e6:7.1f} {statistics.median(over):6.2f}"
    line += f" ({min(over):.2f} to {max(over):.2f})"
    line += f"{statistics.median(share):10.0%}"
    line += f"{read[title] / statistics.median(each) / 1e6:7.1f}"
    print(line)

# %%
# "Of limit" is the share of that time that memory alone would need. Below 100 %, something else takes time, too.
#
# int4's kernel must turn each code into a number again before it can multiply. On a processor with wide registers that
# is quick enough for one row; on others its arithmetic takes longer than the bytes it saves, and int4 saves memory, not
# time. int8 multiplies codes as they are.
#
# Attention, norms and Python do not shrink with the codes. float32 has no codes, but torch's product of one row need
# not reach the bandwidth either. Another order of the weights in memory can come closer;
# ``instruments.layout.lay_out_`` chooses one by measuring.
#
# What each form costs in loss is in the table of `what rounding costs <1a_int8_int4_in_depth.ipynb>`_. There,
# "int8 dynamic" computes as int8 does here, "int8" as weight only, and "int4 in bf16" as int4.

_, (ax,) = figure(6.2, 2.8)
where = torch.arange(len(took)) * 1.0
medians = [statistics.median(each) for each in took.values()]
limits = [read[title] / statistics.median(delivered) for title in took]
ax.barh(where - 0.2, medians, 0.4, label="measured")
ax.barh(where + 0.2, limits, 0.4, hatch="//", label="memory alone")
ax.set(title="Time of one token", xlabel="milliseconds", yticks=where)
ax.set_yticklabels(list(took))
ax.invert_yaxis()
ax.legend(frameon=False)
plt.show()

# %%
# The package measures the whole GPT-2 small and Qwen2-0.5B with ``tests/benchmarks/bench_quantize.py``, beside
# ``transformers`` and beside bfloat16 in oneDNN's own layout, and says where the time of a step goes.
#
# Activations of 8 bits
# ---------------------
#
# A processor multiplies bytes faster than it turns bytes into numbers. So the fast product for int8 weights rounds the
# activations, too. Each row m has a step of its own,
#
# .. math::
#
#    s_m &= \max_k |x_{mk}| / 127 \\
#    q_{mk} &= \mathrm{round}(x_{mk} / s_m) \\
#    y_{mn} &= s_m \, s_n \sum_k q_{mk} \, c_{nk}
#
# and the sum is one of integers, which is exact in any order. One step for the whole batch would be simpler, but then
# an outlier in one text would coarsen all other texts. (On a processor with AVX2 alone the largest code is 63, because
# the sum of two products must fit into 16 bits there. ``largest_code`` tries it out.)

top = largest_code()
print("largest code of an activation here:", top or "no kernel")
plain = torch.randn(300, 768, generator=generator)
x = torch.randn(6, 768, generator=generator)
x[2] *= 1e20
dynamic = PackedInt8Weight.of(Int8Weight.quantize(plain))
y = F.linear(x, dynamic)

step = x.abs().amax(1, keepdim=True) / (top or 127)  # (M, 1)
q = (x / step).round()
sums = q.double() @ dynamic.codes.double().T
if top:
    by_hand = sums * step * dynamic.scale.T
    torch.testing.assert_close(y.double(), by_hand, rtol=1e-5, atol=1e-4)
for m in range(len(x)):
    assert torch.equal(F.linear(x[m], dynamic), y[m]) or not top
print("each row is what it is alone, beside one that is 1e20 times as large")

# %%
# What is lost by rounding is at most half a step. It can be rounded again, with a step that is 254 times finer (126
# where the largest code is 63), and multiplied as one more row. Watch the error fall with each digit:

if top:
    wanted = F.linear(x.double(), dynamic.dequantize().double())
    for count in (1, 2, 3):
        parts = packed_int8.sum_of_digits(dynamic.packed, x / step, count, top)
        error = (parts * step * dynamic.scale.T - wanted).abs() / step
        print(f"{count} digits: largest error {error.max():.1e} steps")

# %%
# Three digits hold what float32 holds, and two are enough for bfloat16. That is how ``weight_only`` computes where the
# processor has the kernel. While a token waits for the weights, two or three rows cost hardly more than one; a batch
# pays for them.
#
# Few rows, many rows
# -------------------
#
# A prompt is many rows at once, and arithmetic begins to count. Here is the time of each product over that of float32,
# by rows of activations. torch's int4 kernel takes four rows at a time, and turns the codes into numbers again for each
# four; beyond ``few_rows`` the package decodes the whole weight once and multiplies.

plain = torch.randn(2304, 768)
packed = Int8Weight.quantize(plain)
weights = {
    "int8, dynamic": (PackedInt8Weight.of(packed), torch.float32),
    "int8, weight only": (PackedInt8Weight.of(packed, True), torch.float32),
    "int4": (Int4Weight.quantize(plain.bfloat16()), torch.bfloat16),
}
rows = [1, 4, 16, 64, 256]

_, (ax,) = figure(6.2, 3.4)
for (title, (weight, dtype)), look in zip(
    weights.items(), ("o-", "^-.", "s--"), strict=True
):
    found = []
    for M in rows:
        x = torch.randn(M, 768)
        ours = functools.partial(F.linear, x.to(dtype), weight)
        theirs = functools.partial(F.linear, x, plain)
        turns = [
            [milliseconds(run) for run in (ours, theirs)] for _ in range(5)
        ]
        found.append(statistics.median(a / b for a, b in turns))
    print(f"{title:18}", *(f"{M}: {r:.2f} " for M, r in zip(rows, found)))
    ax.loglog(rows, found, look, label=title)
ax.axhline(1.0, color=COLOURS[7], linewidth=1.2)
ax.axvline(Int4Weight.few_rows, color=COLOURS[7], linestyle=":")
ax.set(title="Time over float32", xlabel="rows M", ylabel="time ratio")
ax.set_xticks(rows, [str(M) for M in rows])
ax.minorticks_off()
ax.legend(frameon=False)
plt.show()

# %%
# Below the line at 1 a product is faster than float32's. The dotted line is int4's ``few_rows``. int4 always
# reads the fewest bytes, but the more rows there are, the more arithmetic counts and the less bytes do.

x = torch.randn(5, 768)
for title, (weight, dtype) in weights.items():
    wanted = F.linear(x.to(dtype).double(), weight.dequantize().double())
    error = (F.linear(x.to(dtype), weight).double() - wanted).abs().max()
    print(
        f"{title:18} largest error {error / wanted.abs().max():.1e} of the largest"
    )
    assert error < 0.03 * wanted.abs().max()

# %%
# Exercises
# ---------
#
# 1. *Easy.* How many tokens a second could a machine with 100 GB/s decode at most with Qwen2-7B in bfloat16, int8 and
#    int4? It has 28 blocks, hidden size 3584, intermediate size 18944, 28 heads and 4 key-value heads of 128 numbers, a
#    vocabulary of 152064 and an untied head. A good answer counts the bytes with a model on the ``meta`` device, and
#    leaves the looked-up embedding out.
#
# Summary
# -------
#
# * A token reads every weight: int4 reads less than a seventh of float32. What is left of that factor in speed is
#   measured, not derived.
# * int8 is fast because products are computed in 8 bits, with activations rounded row by row; a row of a batch is what
#   it is alone. ``weight_only`` keeps the precision of activations by splitting them into two or three digits; with
#   many rows that costs time.
# * int4's kernel decodes in every product. Where arithmetic is the limit, it saves memory, not time.
#
# Sources
# -------
#
# * Dettmers et al.: `LLM.int8() <https://arxiv.org/abs/2208.07339>`_, 2022. Outliers in the activations of large models.
# * Khudia et al.: `FBGEMM <https://arxiv.org/abs/2101.05615>`_, 2021. The kernel that multiplies 8-bit codes on a CPU.
# * Ootomo et al.: `DGEMM on integer matrix multiplication units <https://arxiv.org/abs/2306.11975>`_, 2023. Digits.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
