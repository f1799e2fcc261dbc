r"""
int8 and int4: bytes, speed and loss
====================================

A weight of 4 bits can be one of 16 numbers. What does a model lose by that, and what does it win?

This page answers with counted bytes, with the held-out loss and the logits of two trained models, and with the time of
a token beside the time that memory alone would need.

.. live:: bits

You will learn
--------------

* what a group of weights costs in bytes, scales included,
* how far a weight moves, and what one outlier does to its group,
* what 8 and 4 bits do to logits and loss, and which matrices that comes from,
* why activations are rounded, too, and why a row of a batch does not notice the others,
* how many bytes a token reads, how close decoding comes to that limit, and where int4 is slow.

Before you start
----------------

Read the pages on `the quantised weight <4_quantized_weight.ipynb>`_ and on
`loading <5_loading.ipynb>`_. You need a CPU; nothing is downloaded.

The two models come with the package: 2.1 million parameters, trained on Python's documentation. The text is held-out
documentation, in pieces of 256 tokens that each begin as a document.
"""

import collections
import copy
import functools
import itertools
import math
import statistics
import time

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.text.batches import pieces
from lm_from_scratch.text.corpora import reference, split
from lm_from_scratch.training.train import evaluate
from lm_from_scratch.weights import int4, packed_int8, quantize
from lm_from_scratch.weights.int4 import Int4Weight
from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.packed_int8 import PackedInt8Weight, largest_code
from lm_from_scratch.weights.quantize import quantize_

torch.set_grad_enabled(False)

models = {}
for name in ("gpt2-docs", "qwen2-docs"):
    model, tokenizer = load_shipped(name)
    models[name] = model.eval()
    size = sum(parameter.numel() for parameter in model.parameters())
    assert abs(size / 2.1e6 - 1) < 0.05

batch = pieces(split(reference())[1], tokenizer, length=256, count=6)
idx, targets = batch.idx, batch.targets  # (B, T)
idx.shape

# %%
# Half a step
# -----------
#
# The page on the quantised weight lays evenly spaced marks over each group: for int8 symmetric about 0 in a whole row,
# for int4 from the smallest to the largest number of 64. Here are both rules in seven lines, for any number of bits and
# any group. They equal the package's classes, and in float64 no weight moves by more than half a step.


def steps_of(weight, bits, group, symmetric):
    groups = weight.reshape(-1, group)  # (N K / group, group)
    if symmetric:
        top = 2 ** (bits - 1) - 1
        return groups, groups.abs().amax(1, keepdim=True) / top, 0.0
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    return groups, (high - low) / (2**bits - 1), low


def rounded(weight, bits, group, symmetric):
    groups, step, low = steps_of(weight, bits, group, symmetric)
    return (low + step * ((groups - low) / step).round()).view_as(weight)


generator = torch.Generator().manual_seed(0)
weight = torch.randn(96, 512, dtype=torch.float64, generator=generator)
N, K = weight.shape
rules = {Int8Weight: (8, K, True), Int4Weight: (4, 64, False)}
for kind, rule in rules.items():
    back = rounded(weight, *rule)
    torch.testing.assert_close(kind.quantize(weight).dequantize(), back)
    step = steps_of(weight, *rule)[1]
    moved = (back - weight).view(len(step), -1).abs() / step
    rms = moved.pow(2).mean().sqrt().item()
    print(f"{kind.__name__}: median step {step.median():.4f},", end=" ")
    print(f"largest error {moved.max():.3f} steps, rms {rms:.3f}")
    assert moved.max() < 0.5 + 1e-9
    assert abs(rms * math.sqrt(12) - 1) < 0.05

# %%
# So the step decides, and the step is decided by the extremes of the group.
#
# One outlier
# -----------
#
# Take a row of 512 normal numbers and let one of them grow. All that share its step pay for it: this is the rms error
# of the *other* 511 numbers.

row = weight[0].clone()
others = torch.arange(512) != 100
rules = {
    "int8, one group": (8, 512, True),
    "int4, one group": (4, 512, False),
    "int4, groups of 64": (4, 64, False),
    "int4, groups of 16": (4, 16, False),
}
sizes = [1, 2, 4, 8, 16, 32, 64]
backs, errors = {}, {title: [] for title in rules}
for title, size in itertools.product(rules, sizes):
    row[100] = size
    backs[title, size] = rounded(row[None], *rules[title])[0]
    moved = (backs[title, size] - row)[others]
    errors[title].append(moved.pow(2).mean().sqrt().item())

made, (ax,) = figure(6.0, 3.4)
for title, look in zip(rules, ("o-", "s--", "^-.", "v:"), strict=True):
    ax.loglog(sizes, errors[title], look, label=title)
ax.set(title="Error of the other 511", xlabel="size of the outlier")
ax.set(ylabel="rms error", xticks=sizes, xticklabels=sizes)
ax.minorticks_off()
ax.legend(frameon=False)
plt.show()

assert 1.8 < errors["int8, one group"][6] / errors["int8, one group"][5] < 2.2
marks = backs["int4, one group", 64][others].unique()
near = [f"{mark:.2f}" for mark in marks.tolist()]
print("int4, one group, outlier 64: the others become", *near)
assert 2 <= len(marks) <= 3
assert 3 * errors["int4, groups of 16"][6] < errors["int4, one group"][6]
far = torch.arange(512) // 64 != 100 // 64
one, big = (backs["int4, groups of 64", size] for size in (1, 64))
assert torch.equal(one[far], big[far])

# %%
# For int8 in one group the error doubles with the outlier. With 4 bits an outlier of 64 leaves two or three marks for
# all the others. Groups build walls: outside the outlier's own group nothing changes at all.
#
# How far do the rows of trained models reach? Of normal numbers, half of the rows of 128 stay within 2.8 of their rms.


def kind_of(title):
    return title.split(".")[-2]


def reach(weight):
    return weight.abs().amax(1) / weight.pow(2).mean(1).sqrt()  # (N,)


normal = reach(torch.randn(4096, 128))
assert abs(normal.median() - 2.8) < 0.1
print(f"{'normal':24} median {normal.median():.1f}, most {normal.max():.1f}")
for name, model in models.items():
    rows = {}
    for title, parameter in quantize.multiplied(model).items():
        rows.setdefault(kind_of(title), []).append(reach(parameter))
    for kind, r in rows.items():
        r = torch.cat(r)
        print(f"{name:11}{kind:13}", end=" ")
        print(f"median {r.median():.1f}, most {r.max():.1f}")

# %%
# Bytes, all of them
# ------------------
#
# A number costs :math:`b/8` bytes for its code and its share of what the group keeps: one number of w bytes for int8,
# two for int4.
#
# .. math::
#
#    \text{int8:} \quad 1 + \frac{w}{g}, \qquad\qquad \text{int4:} \quad \frac{1}{2} + \frac{2w}{g}
#
# The formula and what the class holds agree to the byte for a matrix whose rows fill the kernel's blocks.

print("scales     class         g  formula  measured")
kinds = [(Int8Weight, 1, 512)] + [(Int4Weight, 2, g) for g in (128, 64, 32, 16)]
for dtype, (kind, kept, g) in itertools.product(
    (torch.float32, torch.bfloat16), kinds
):
    weight = torch.randn(128, 512).to(dtype)
    formula = kind.bits / 8 + kept * dtype.itemsize / g
    measured = kind.quantize(weight, g).nbytes / weight.numel()
    line = f"{str(dtype)[6:]:9}{kind.__name__:11}{g:5}{formula:9.4f}"
    print(line + f"{measured:10.4f}")
    assert measured == formula

# %%
# In bfloat16, int4 with groups of 64 takes 0.5625 bytes. In float32 with groups of 16 it takes 1 byte, as many as the
# codes of int8: half of them are scales and zeros.
#
# Logits and loss
# ---------------
#
# Now the models read the held-out text with each kind of weight. Everything that a token is multiplied with is
# quantised: every linear map, and the embedding, which is the head. Most rows compute in float32, so that only the
# weights differ; the last three compute in bfloat16. ``weight_only`` leaves activations as they are. "dynamic" is the
# default of 8 bits: activations are rounded to 8 bits in each product, a row at a time.


def with_weights(name, dtype=torch.float32, **options):
    model = copy.deepcopy(models[name]).to(dtype)
    if options:
        quantize_(model, **options)
    return model


forms = {
    "float32": {},
    "int8": dict(bits=8, weight_only=True),
    "int8 dynamic": dict(bits=8),
    "int8, g 32": dict(bits=8, group_size=32),
    "int4, g 128": dict(bits=4, group_size=128),
    "int4, g 64": dict(bits=4, group_size=64),
    "int4, g 32": dict(bits=4, group_size=32),
    "int4, g 16": dict(bits=4, group_size=16),
    "bfloat16": dict(dtype=torch.bfloat16),
    "int8 in bf16": dict(dtype=torch.bfloat16, bits=8, weight_only=True),
    "int4 in bf16": dict(dtype=torch.bfloat16, bits=4),
}

# %%
# For each form the table shows the bytes of the whole model, the largest and the rms error of a logit, and, as on the
# page on quantised caches, the divergence KL(exact, quantised) and the rise of the loss with its standard error.


def bytes_read(p):
    if isinstance(p, Int8Weight):  # not as a kernel lays them out
        return p.numel() + p.scale.nbytes
    return p.nbytes


def losses(logits):
    return -logits.log_softmax(-1).gather(-1, targets[..., None])  # (B, T, 1)


exact = {name: model(idx) for name, model in models.items()}
log_exact = {name: logits.log_softmax(-1) for name, logits in exact.items()}


def judge(name, model):
    logits = model(idx).float()
    moved = logits - exact[name]
    apart = log_exact[name] - logits.log_softmax(-1)  # (B, T, V)
    kl = (log_exact[name].exp() * apart).sum(-1).mean()
    rise = apart.gather(-1, targets[..., None])
    return {
        "bytes": sum(map(bytes_read, model.parameters())),
        "largest": moved.abs().max().item(),
        "rms": moved.pow(2).mean().sqrt().item(),
        "kl": kl.item(),
        "rise": rise.mean().item(),
        "error": rise.std().item() / math.sqrt(rise.numel()),
    }


results = {}
for name in models:
    loss = losses(exact[name]).mean().item()
    print(f"{name}, loss {loss:.4f}")
    print(f"{'':13}    MB largest    rms      KL    rise")
    for title, options in forms.items():
        r = results[name, title] = judge(name, with_weights(name, **options))
        print(
            f"{title:13}{r['bytes'] / 1e6:6.2f}{r['largest']:8.3f}"
            f"{r['rms']:7.3f}{r['kl']:8.0e}{r['rise']:+8.4f} ± {r['error']:.4f}"
        )
    assert abs(evaluate(models[name], [batch]) - loss) < 1e-4

# %%
# With weights of 8 bits and activations as they are, a model moves about as little as one that computes in bfloat16,
# and the loss stays within 0.005 nats. Rounding the activations too keeps the loss within 0.01 nats, at less than half
# the divergence of the best int4 row. With 4 bits and groups of 64 the divergence is more than 50 times that of 8-bit
# weights alone, and the loss moves by less than 0.1 nats. Smaller groups lower the divergence at every step, and cost bytes at every step. They do not make up for bits: with
# groups of 16 the float32 model holds nearly the bytes of int8, at more than 30 times its divergence.
#
# The rise of the loss is noisy on so little text: its standard error is of its own size in many rows. The divergence
# and the logits compare with the exact model token by token, and tell forms apart that the loss does not.

for name in models:
    of = {title: results[name, title] for title in forms}
    assert of["int8"]["kl"] < 3 * of["bfloat16"]["kl"]
    assert abs(of["int8"]["rise"]) < 0.005
    assert abs(of["int8 dynamic"]["rise"]) < 0.01
    assert of["int8 dynamic"]["kl"] < 0.5 * of["int4, g 16"]["kl"]
    assert abs(of["int4, g 64"]["rise"]) < 0.1
    assert of["int4, g 64"]["kl"] > 50 * of["int8"]["kl"]
    kls = [of[f"int4, g {g}"]["kl"] for g in (128, 64, 32, 16)]
    sizes = [of[f"int4, g {g}"]["bytes"] for g in (128, 64, 32, 16)]
    assert kls == sorted(kls, reverse=True) and sizes == sorted(sizes)
    assert abs(sizes[-1] / of["int8"]["bytes"] - 1) < 0.05
    assert kls[-1] > 30 * of["int8"]["kl"]
    assert abs(of["int4 in bf16"]["kl"] / of["int4, g 64"]["kl"] - 1) < 0.2
    smaller = of["float32"]["bytes"] / of["int4 in bf16"]["bytes"]
    print(f"{name}: int4 in bf16 is {smaller:.1f} times smaller than float32")
    assert smaller > 6

# sphinx_gallery_thumbnail_number = 2
# sphinx_gallery_words = ["load_in_4bit", "load_in_8bit", "NF4", "group_size", "zero point", "GPTQ", "AWQ", "post-training quantization", "asymmetric"]
made, (ax,) = figure(6.2, 3.8)
lines = {
    "bfloat16": ["bfloat16"],
    "int8": ["int8", "int8, g 32"],
    "int4": [f"int4, g {g}" for g in (128, 64, 32, 16)],
}
for (name, colour), (title, mark) in itertools.product(
    zip(models, COLOURS), zip(lines, "Dso")
):
    dots = [results[name, form] for form in lines[title]]
    megabytes, kls = [r["bytes"] / 1e6 for r in dots], [r["kl"] for r in dots]
    line = ("-", "--")[name == "qwen2-docs"] + mark
    ax.loglog(megabytes, kls, line, color=colour, label=f"{name}, {title}")
ax.set(title="What bytes buy", xlabel="MB", ylabel="KL in nats")
ax.set_xticks([1, 2, 4], ["1", "2", "4"])
ax.minorticks_off()
ax.legend(frameon=False, fontsize=8)
plt.show()

# %%
# Which matrices?
# ---------------
#
# ``select`` quantises one kind of matrix at a time.


shares = {}
for name, model in models.items():
    counts, kls = collections.Counter(), {}
    for title, parameter in quantize.multiplied(model).items():
        counts[kind_of(title)] += parameter.numel()
    for kind in counts:
        only = dict(select=lambda title, kind=kind: kind_of(title) == kind)
        kls[kind] = judge(name, with_weights(name, bits=4, **only))["kl"]
    total = results[name, "int4, g 64"]["kl"]
    summed = sum(kls.values())
    print(f"{name}: sum of the kinds {summed:.4f}, all at once {total:.4f}")
    assert abs(summed / total - 1) < 0.25
    numbers = [count / counts.total() for count in counts.values()]
    shares[name] = list(counts), numbers, [kl / total for kl in kls.values()]

made, axes = figure(6.4, 3.4, columns=2)
for ax, (name, (kinds, numbers, kls)) in zip(axes, shares.items(), strict=True):
    where = torch.arange(len(kinds)) * 1.0
    ax.barh(where - 0.2, numbers, 0.4, label="of the numbers")
    ax.barh(where + 0.2, kls, 0.4, hatch="//", label="of KL")
    ax.set(title=name, xlabel="share", yticks=where)
    ax.set_yticklabels(kinds, fontsize=8)
    ax.invert_yaxis()
axes[0].legend(frameon=False, fontsize=8)
plt.show()

# %%
# (Both maps that end a block of GPT-2 are called ``c_proj``, and count as one kind.) The divergences of the kinds add up
# to the divergence of all, within a quarter, as those of independent errors would.
#
# One matrix takes more than its share, the embedding. It is used twice: a row is looked up for each token, and all rows
# are the head. Each use alone:

for name, model in models.items():
    table = model.head_weight
    back = Int4Weight.quantize(table.detach()).dequantize()
    as_head, as_table = copy.deepcopy(model), copy.deepcopy(model)
    as_head.project = lambda x, _, back=back: F.linear(x, back)
    as_table.project = lambda x, _, table=table: F.linear(x, table)
    as_table.head_weight.copy_(back)
    head, looked_up = judge(name, as_head)["kl"], judge(name, as_table)["kl"]
    print(f"{name}: as the head {head:.4f}, looked up {looked_up:.4f}")
    kinds, numbers, kls = shares[name]
    assert kinds[0] in ("wte", "embed_tokens") and kls[0] > 1.2 * numbers[0]

# %%
# A common remedy is to leave the head at 8 bits. It is an exercise below.
#
# Symmetric marks, or no groups
# -----------------------------
#
# int4 pays for a zero in each group. Symmetric marks need none; but they use 15 of 16 codes, and waste the side on
# which a group does not reach as far. This is the divergence with other rules for the same 4 bits, in float32.

rules = {
    "groups of 64": lambda K: (64, False),
    "symmetric, of 64": lambda K: (64, True),
    "symmetric, of 32": lambda K: (32, True),
    "one per row": lambda K: (K, False),
    "one per matrix": lambda K: (None, False),
}
kls = {}
for name, (title, rule) in itertools.product(models, rules.items()):
    other = copy.deepcopy(models[name])
    for parameter in quantize.multiplied(other).values():
        group, symmetric = rule(parameter.shape[1])
        group = group or parameter.numel()
        parameter.copy_(rounded(parameter, 4, group, symmetric))
    kls[name, title] = judge(name, other)["kl"]
for title in rules:
    print(f"{title:17}", *(f"{kls[name, title]:8.3f}" for name in models))
for name in models:
    assert kls[name, "symmetric, of 64"] > 1.2 * kls[name, "groups of 64"]
    assert kls[name, "one per row"] > kls[name, "groups of 64"]
    assert kls[name, "one per matrix"] > 3 * kls[name, "groups of 64"]
    ours = results[name, "int4, g 64"]["kl"]
    assert abs(kls[name, "groups of 64"] / ours - 1) < 0.05

# %%
# At the same group, symmetric marks cost more than a fifth. Symmetric groups of 32 take the bytes of groups of 64 with
# a zero, so compare these two rows. One step for a whole matrix is the worst, by a factor of more than 3.
#
# All of these round to the nearest mark, which is best for each weight alone and not for the sum that a row computes.
# GPTQ chooses codes one column after another, and lets the columns that follow make up for the error; AWQ scales the
# columns that meet large activations before it rounds. Both need text to calibrate, and neither runs here.
#
# Activations of 8 bits
# ---------------------
#
# A processor multiplies bytes faster than it turns bytes into numbers. So the fast product for int8 weights rounds the
# activations, too. Each row m has a step of its own,
#
# .. math::
#
#    y_{mn} = s_m \, s_n \sum_k q_{mk} \, c_{nk}, \qquad q_{mk} = \mathrm{round}(x_{mk} / s_m), \quad
#    s_m = \max_k |x_{mk}| / 127
#
# and the sum is one of integers, which is exact in any order. One step for the whole batch would be simpler, and an
# outlier in one text would coarsen the others. (On a processor with AVX2 alone the largest code is 63, because the sum of
# two products must fit into 16 bits there. ``largest_code`` tries it out.)

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
# What rounding leaves over is at most half a step. It can be rounded again, with a step that is 254 times finer (126
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
# A token reads every weight
# --------------------------
#
# To compute one token, a step reads each matrix once and uses each number once. No step can be faster than
#
# .. math::
#
#    t \ge \frac{\text{bytes of the weights}}{\text{bytes that memory delivers in a second}}
#
# Here is a model with the width and the vocabulary of GPT-2 small, with random weights and 2 layers instead of 12 to
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
# Every byte is accounted for: int8 keeps a scale for each of 9 C rows of a layer and V rows of the head, and int4 fills
# the last block of the head up. int4 reads less than a seventh of float32.
#
# A model holds more than it reads where the fast int8 kernel has a layout of its own. It fills rows of 768 up to 1024,
# and the embedding is held twice: packed for the head, and by rows to look them up.
#
# Now decode, in turns, so that a slow moment of the machine meets all of them. The bandwidth of memory is measured in
# the same turns, as the product of a matrix of 256 MB with a vector. The page prints its numbers and asserts none of
# them: they are those of one machine at one moment.

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
for _ in range(7):
    memory = min(milliseconds(lambda: matrix @ vector) for _ in range(2))
    delivered.append(matrix.nbytes / memory)  # bytes in a millisecond
    for title, model in runners.items():
        token = functools.partial(decode, model, prompt[:, 0])
        token = functools.partial(token, cache=caches[title])
        took[title].append(milliseconds(token, times=3))

# the rows above that compute as these do, for the loss beside the speed
losses_of = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "int8": "int8 dynamic",
    "weight only": "int8",
    "int4": "int4 in bf16",
}
print(
    "             MB held  over float32 (range)  of limit  GB/s  rise of loss"
)
for title, each in took.items():
    over = [a / b for a, b in zip(took["float32"], each, strict=True)]
    share = [read[title] / d / t for d, t in zip(delivered, each, strict=True)]
    line = f"{title:12}{held[title] / 1e6:7.1f} {statistics.median(over):6.2f}"
    line += f" ({min(over):.2f} to {max(over):.2f})"
    line += f"{statistics.median(share):10.0%}"
    line += f"{read[title] / statistics.median(each) / 1e6:7.1f}"
    rises = (results[name, losses_of[title]]["rise"] for name in models)
    print(line, *(f"{rise:+.4f}" for rise in rises))

# %%
# The last two columns are the rise of the held-out loss of ``gpt2-docs`` and ``qwen2-docs``, from the table above.
#
# A share below 100 % means that something other than memory takes time. int4's kernel must turn each code into a number again before it can multiply. On a processor
# with wide registers that is quick enough for one row; on others its arithmetic takes longer than the bytes it saves,
# and memory is its point, not speed. int8 multiplies codes as they are. Attention, norms and Python do not shrink with
# the codes. float32 has no codes, but torch's product of one row need not reach the
# bandwidth either. Another order of the weights in memory can come closer;
# ``instruments.layout.lay_out_`` chooses one by measuring.

made, (ax,) = figure(6.2, 2.8)
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
# The package measures the whole GPT-2 small and Qwen2-0.5B with ``tests/benchmarks/bench_quantize.py``, beside ``transformers``
# and beside bfloat16 in oneDNN's own layout, and says where the time of a step goes.
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

made, (ax,) = figure(6.2, 3.4)
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
# Bug museum
# ----------
#
# Bytes that nobody counts
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# The size of a quantised model is asked from tensors that answer for the matrix they stand for.
#
# Three ways to state the size of the same model. The first is in many scripts; it asks a tensor for its number of
# elements and the size of one, and a quantised weight answers for the matrix it stands for. The second counts codes
# and forgets the scales.

model = with_weights("gpt2-docs", bits=4, group_size=16)
found = [p for p in model.parameters() if hasattr(p, "codes")]
count = sum(p.numel() for p in found)
ways = {
    "numel x element_size": sum(p.numel() * p.element_size() for p in found),
    "codes alone": sum(p.codes.nbytes for p in found),
    "all that is held": sum(p.nbytes for p in found),
}
for title, size in ways.items():
    print(f"{title:21} {4 * count / size:.2f} times smaller than float32")
assert [4 * count / size for size in ways.values()] == [1.0, 8.0, 4.0]

# %%
# Neither 1 nor 8, but 4. The check: write the file, and look at its size.
#
# Which sentence is false?
# ------------------------
#
# 1. To cut a group into smaller ones makes the step of no weight larger.
# 2. The nearest code for each weight is not always the best for their sum.
# 3. When activations are rounded, an outlier in one row of a batch coarsens the other rows.

plain = models["gpt2-docs"].transformer.h[0].mlp.c_fc.weight.detach()
large, small = (steps_of(plain, 4, group, False)[1] for group in (64, 16))
assert (small.view(-1, 4) <= large).all()

pair, inputs = torch.tensor([0.4, 0.4]), torch.ones(2)
nearest, other = pair.round(), torch.tensor([1.0, 0.0])
assert (inputs @ (other - pair)).abs() < (inputs @ (nearest - pair)).abs()

x = torch.randn(4, plain.shape[1], generator=torch.Generator().manual_seed(2))
held_in_8 = PackedInt8Weight.of(Int8Weight.quantize(plain))
before = F.linear(x, held_in_8)
x[1, 7] = 1e6
after = F.linear(x, held_in_8)
print(
    "rows that changed:", (before != after).any(1).nonzero().flatten().tolist()
)
assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])

# %%
# The third one is false: each row has a step of its own. It would be true with one step for the batch, as
# ``torch.ao.nn.quantized.dynamic.Linear`` has it.
#
# Exercises
# ---------
#
# 1. *Easy.* Quantise to 4 bits and leave the head at 8. How many bytes does that cost, and what does it win? Hint: call
#    ``quantize_`` twice, with ``select``. The head is ``transformer.wte.weight`` in ``gpt2-docs`` and
#    ``model.embed_tokens.weight`` in ``qwen2-docs``. A right answer stands as a new point in the figure of bytes.
# 2. *Easy.* How many tokens a second could a machine with 100 GB/s decode at most with Qwen2-7B in bfloat16, int8 and
#    int4? It has 28 layers, hidden size 3584, intermediate size 18944, 28 heads and 4 key-value heads of 128 numbers, a
#    vocabulary of 152064 and an untied head. A right answer counts the bytes with a model on the ``meta`` device, and
#    leaves the looked-up embedding out.
# 3. *Medium.* Give each group of 64 the step that makes its squared error smallest, instead of the one that reaches
#    its extremes. Try steps from 0.5 to 1 times that. A right answer shows the error of the weights, the divergence,
#    and the models that lose by it, if any.
# 4. *Hard.* Write GPTQ for one linear map: choose codes column by column, and correct the columns that follow with the
#    inverse of :math:`X^T X`. A right answer has a larger error of the weights and a smaller one of the products, on
#    text that it was not calibrated with.
#
# Summary
# -------
#
# * In float64 a weight moves by at most half a step, and the extremes of its group set the step. Groups keep an
#   outlier's damage to itself.
# * int4 with groups of 64 takes 0.5625 bytes a number in bfloat16, scales and zeros included.
# * With 8-bit weights alone the held-out loss of both models moves by less than 0.005 nats, with activations rounded
#   too by less than 0.01, with 4 bits by less than 0.1. The divergence tells more: from 8-bit weights alone to 4 bits it
#   grows more than 50 times.
# * Divergences of the kinds of matrices add up within a quarter, and the embedding has more than its share.
# * A token reads every weight: int4 reads less than a seventh of float32. What is left of that factor in speed is
#   measured, not derived.
# * int8 is fast because products are computed in 8 bits, with activations rounded row by row; a row of a batch is what
#   it is alone. ``weight_only`` keeps the precision of activations by splitting them into two or three digits; with many
#   rows that costs time.
# * int4's kernel decodes in every product. Where arithmetic binds, memory is its point, not speed.
#
# These weights cannot be trained. The next page puts small matrices beside them that can.
#
# Sources
# -------
#
# * Frantar et al.: `GPTQ <https://arxiv.org/abs/2210.17323>`_, 2022. Codes chosen column by column, with data.
# * Lin et al.: `AWQ <https://arxiv.org/abs/2306.00978>`_, 2023. Columns scaled by the activations they meet.
# * Dettmers et al.: `LLM.int8() <https://arxiv.org/abs/2208.07339>`_, 2022. Outliers in the activations of large models.
# * Khudia et al.: `FBGEMM <https://arxiv.org/abs/2101.05615>`_, 2021. The kernel that multiplies 8-bit codes on a CPU.
# * Ootomo et al.: `DGEMM on integer matrix multiplication units <https://arxiv.org/abs/2306.11975>`_, 2023. Digits.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
