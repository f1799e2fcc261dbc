r"""
Four-bit floats
===============

Most weights of gpt-oss, and of other large models since, are published in four bits each. But they are not the int4 of
`int8 and int4 <1_int8_int4.ipynb>`_. Four bits can say sixteen numbers, and you may choose which. The upper row shows the
choices of an int4, the lower row those of a *float* of four bits:
"""

# sphinx_gallery_needs = ["1_int8_int4", "2_swapping_tensors"]
# sphinx_gallery_words = ["MXFP4", "NVFP4", "FP4", "E2M1", "E8M0", "E4M3", "microscaling", "block scale", "quantization-aware training", "QAT", "straight-through estimator", "STE", "gpt-oss weights", "W4A4", "4-bit floating point", "Blackwell", "DeepSeek-V4", "fake quantization"]
# sphinx_gallery_thumbnail_number = 1
import copy
from functools import lru_cache, partial
from itertools import islice, product
from random import Random

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.text.batch import padded_batch
from lm_from_scratch.text.tasks import (
    held_out_questions,
    is_held_out,
    prompt,
    questions,
    task_named,
)
from lm_from_scratch.weights.float4 import (
    VALUES,
    decode_mxfp4,
    decode_nvfp4,
    encode_mxfp4,
    encode_nvfp4,
)
from lm_from_scratch.weights.int4 import Int4Weight

fig, (ax,) = figure(4.8, 1.9)
for y, row, colour in ((1, range(-8, 8), 0), (0, VALUES, 1)):
    ax.plot(list(row), [y] * len(row), "|", ms=22, mew=3, color=COLOURS[colour])
ax.set(
    title="Levels of int4 and of E2M1",
    ylim=(-0.7, 1.7),
    xlabel="in units of the scale",
)
ax.set_yticks([0, 1], ["E2M1", "int4"])
ax.set_xticks([-8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6])
plt.show()

# %%
# The float's levels crowd around zero, where most weights are, and leave wide gaps far out. (They are only fifteen: there
# is a +0 and a -0.) What does that cost, and what is it good for?
#
# The sixteen values
# ------------------
#
# The four bits are a sign, two bits of *exponent* e and one of *mantissa* m, hence the name E2M1. The value is
# :math:`\pm 2^{e-1} (1 + m/2)`; only for e = 0 it is :math:`\pm m/2`, so that there is a zero.
#
# **Predict first.** The largest values are 2, 3 and 4, and then one more. Which?
#
# * 4.5
# * 5
# * 6


def value(code):
    sign, e, m = code >> 3, code >> 1 & 3, code & 1
    size = 2.0 ** (e - 1) * (1 + m / 2) if e else m / 2
    return -size if sign else size


print(*(f"{code:04b} {value(code):+}" for code in range(8)), sep="\n")

assert tuple(map(value, range(16))) == VALUES and value(7) == 6

# %%
# 6. Between two powers of two there is room for one more value, the one in the middle: 1.5, 3, 6. The steps of a float
# grow with its size, those of an int are all equal.
#
# To round to the nearest of them, find the step where a number lies: 0.5 below 2, 1 below 4, and 2 above.


def e2m1(x):
    step = x.abs().log2().floor().clamp(0, 2).exp2() / 2
    return (step * (x / step).round()).clamp(-6, 6)


# %%
# A scale for a few neighbours
# ----------------------------
#
# Weights are far smaller than 6, so they need a scale, and the cheapest scale is the one that many weights share.
# **MXFP4**, a standard of several chip makers, has one for each *block* of 32 neighbours in a row. It is a power of two, so a
# single byte holds its exponent, and multiplying by it only shifts exponents.


def mxfp4(x):  # (..., K)
    block = x.unflatten(-1, (-1, 32))
    top = block.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scale = (top.log2().floor() - 2).exp2()  # the top becomes 4 to 8
    return (scale * e2m1(block / scale)).flatten(-2)


model, tokenizer = load_shipped("tasks")
matrix = model.model.layers[0].mlp.gate_proj.weight.detach()

assert torch.equal(mxfp4(matrix), decode_mxfp4(encode_mxfp4(matrix)))
assert sum(p.nbytes for p in encode_mxfp4(matrix)) / matrix.numel() == 0.53125

# %%
# That is 32 half bytes and one whole byte: 0.53125 bytes a weight. The weak point is the power of two. If the largest
# number of a block is 7.9 times the scale, it is cut to 6, the last value that there is; if it is 4.1 times, 6 is never used.
#
# NVIDIA's **NVFP4** spends more on scales. A block has 16 weights, and its scale is itself a small float of one byte (E4M3: four
# bits of exponent, three of mantissa), which can put the largest number very near to 6. As an E4M3 ends at 448, one float32 for
# the whole tensor brings all scales into its range.


def nvfp4(x):
    block = x.unflatten(-1, (-1, 16))
    top = block.abs().amax(-1, keepdim=True)
    factor = top.max() / (6 * 448)
    scale = (top / 6 / factor).to(torch.float8_e4m3fn).float() * factor
    return (scale * e2m1(block / scale.clamp(min=1e-30))).flatten(-2)


moved = [how(matrix) - matrix for how in (mxfp4, nvfp4)]
errors = [(d.norm() / matrix.norm()).item() for d in moved]
print("relative error: MXFP4 {:.1%}, NVFP4 {:.1%}".format(*errors))

assert 0.1 < errors[0] < 0.13 and 0.08 < errors[1] < 0.1
assert (
    sum(p.nbytes for p in encode_nvfp4(matrix)[:2]) / matrix.numel() == 0.5625
)
torch.testing.assert_close(
    nvfp4(matrix), decode_nvfp4(encode_nvfp4(matrix)), atol=1e-6, rtol=0
)

# %%
# NVFP4 takes 0.5625 bytes a weight, exactly as many as our int4 with groups of 64.
#
# What it costs a model
# ---------------------
#
# The shipped model ``tasks`` sorts letters, ``sort:dbac=abcd``, and one wrong letter makes an answer wrong. That is a
# strict test. We ask 500 questions that it has never seen, and round every matrix of its layers. The embedding, which is
# the head too, stays as it is.


def lines(asked):  # tokens, and where the next one is an answer's
    sort, equals = task_named("sort"), tokenizer.encode("=")[0]
    texts = [prompt("sort", q) + sort.answer(q) for q in asked]
    batch = padded_batch([[*tokenizer.start(t), 0] for t in texts], 0, "right")
    begun = (batch.idx == equals).cumsum(1) > 0
    return batch.idx, begun[:, :-1] & (batch.positions[:, 1:] >= 0)


def answers(model, idx, count):  # the loss in nats, and the share that is right
    logits = torch.cat([*map(model, idx[:, :-1].split(50))])
    wrong = (logits.argmax(-1) != idx[:, 1:]) & count
    loss = F.cross_entropy(logits[count], idx[:, 1:][count])
    return loss, 1 - wrong.any(1).float().mean()


test = lines(held_out_questions("sort", 500))

# %%
# A chip with four-bit floats can multiply four bits by four bits. Then the *activations*, the inputs of each
# layer, have to be rounded too. We give the linear layers of a copy another ``forward``, which rounds either or both. (What
# ``straight`` is for comes later; its value is ``how(x)``.)


def straight(x, how):
    return x + (how(x.detach()) - x).detach()


straight_input = lru_cache(1)(straight)  # q, k and v have the same one


def rounded_linear(layer, how, what, x):
    weight = layer.weight
    if what != "weights":
        x = straight_input(x, how)
    if what != "activations":
        weight = straight(weight, how)
    return F.linear(x, weight, layer.bias)


def in_four_bits(model, how, what="both"):
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = partial(rounded_linear, layer, how, what)
    return model


# %%
# **Predict first.** The model sorts 98 % of the words without rounding. What costs more?
#
# * rounding all its weights
# * rounding all its activations
# * both cost about the same


def int4(x):
    return Int4Weight.quantize(x.detach(), 64).dequantize()


runs = product((mxfp4, nvfp4), ("weights", "activations", "both"))
found = {}
with torch.no_grad():
    plain = [x.item() for x in answers(model, *test)]
    for how, what in [(int4, "weights"), *runs]:
        two = answers(in_four_bits(model, how, what), *test)
        found[how.__name__, what] = [x.item() for x in two]
print(f"{'float32':20} loss {plain[0]:.4f}, right {plain[1]:.1%}")
for (how, what), (loss, right) in found.items():
    print(f"{how:6} {what:13} loss {loss:.4f}, right {right:.1%}")

assert all(found[k, "weights"][1] > plain[1] - 0.02 for k in ("int4", "nvfp4"))
assert found["mxfp4", "weights"][0] < plain[0] + 0.012
assert found["mxfp4", "activations"][0] > found["mxfp4", "weights"][0] + 0.01
assert found["mxfp4", "both"][1] < plain[1] - 0.05
assert found["nvfp4", "both"][1] > found["mxfp4", "both"][1] + 0.04

# %%
# Rounding the activations. Rounded weights alone cost about one answer in a hundred, in each format. With both rounded to
# MXFP4, more than one answer in ten is wrong. NVFP4 loses far less.
#
# Why are activations harder? One large number coarsens the step of its whole block. How far does the largest of a block
# stand out from the typical one, in the weights of an MLP's last layer and in its inputs?


def peak(x):
    block = x.unflatten(-1, (-1, 32))
    return (block.abs().amax(-1) / block.square().mean(-1).sqrt()).mean()


down, peaks = model.model.layers[1].mlp.down_proj, []
hook = down.register_forward_hook(lambda _, x, y: peaks.append(peak(x[0])))
model(test[0][:50])
hook.remove()
print(f"weights {peak(down.weight):.1f} times, inputs {peaks[0]:.1f} times")

assert peak(down.weight) < 2.7 and peaks[0] > 3.5

# %%
# In the inputs it stands out half as far again, and more. NVFP4's blocks are half as long, so a large number spoils fewer
# neighbours.
#
# Here are the losses over the bytes of a weight. Filled marks are rounded weights alone, hollow ones weights and
# activations.

_, (ax,) = figure(4.8, 3.2)
ax.plot(
    [0.5625, 0.53125, 0.5625],
    [found[k, "weights"][0] for k in ("int4", "mxfp4", "nvfp4")],
    "o",
    ms=9,
    color=COLOURS[0],
)
ax.plot(
    [0.53125, 0.5625],
    [found[k, "both"][0] for k in ("mxfp4", "nvfp4")],
    "o",
    ms=9,
    color=COLOURS[0],
    mfc="none",
)
ax.text(0.533, found["mxfp4", "weights"][0], "MXFP4", va="center")
ax.text(0.533, found["mxfp4", "both"][0], "MXFP4", va="center")
ax.text(0.5645, found["nvfp4", "weights"][0] - 0.001, "NVFP4", va="center")
ax.text(0.561, found["int4", "weights"][0] + 0.001, "int4", ha="right")
ax.text(0.5645, found["nvfp4", "both"][0], "NVFP4", va="center")
ax.axhline(plain[0], linestyle=":", color=COLOURS[4])
ax.text(0.5215, plain[0] + 0.0008, "float32")
ax.set(title="Loss of the answers, by bytes", xlim=(0.52, 0.58))
ax.set(xlabel="bytes a weight", ylabel="nats")
plt.show()

# %%
# Look at the two filled marks at 0.5625 bytes: for these *weights*, the int4 with its zero is as good as the float. What
# speaks for the float is hardware. Our int4 must become a wider number, less its zero, before it is multiplied; NVIDIA's
# Blackwell chips multiply MXFP4 and NVFP4 as they are, scales included.
#
# Train with the rounding in place
# --------------------------------
#
# Can the model learn to live with these values? *Quantisation-aware training* rounds in every forward pass, while Adam
# goes on changing weights in float32, of which the rounded ones are made.
#
# There is one obstacle. Rounding is a staircase: flat almost everywhere.
#
# **Predict first.** We sum up a block and send that sum backwards, first through ``mxfp4`` itself, then through
# ``straight``. Without any rounding all gradients would be 1. What are the first ones?
#
# * nearly 1
# * zero
# * random

x = torch.randn(1, 32).requires_grad_()
for through in (mxfp4(x), straight(x, mxfp4)):
    (gradient,) = torch.autograd.grad(through.sum(), x)
    print(gradient[0, :8].tolist())

assert (gradient == 1).all()

# %%
# Zero: nothing would be learned. So backwards we pretend that nothing was rounded. That is all that ``straight`` does: its
# value is ``how(x)``, and as the difference is detached, its gradient is that of ``x``. The trick is called the *straight-through
# estimator*. It is wrong at each step of the staircase, and right about its slope as a whole.
#
# We train for 25 steps, with weights and activations rounded. As a control, we train the same model for as long without
# rounding, and round it afterwards.

asked = islice(questions("sort", Random(1)), 3000)
learn = lines([q for q in asked if not is_held_out("sort", q)])


def train(model, seed, steps=25, lr=2e-4):
    torch.manual_seed(seed)
    adam = torch.optim.Adam(model.parameters(), lr, fused=True)
    for step in range(steps):
        adam.param_groups[0]["lr"] = lr * (1 - step / steps)
        rows = torch.randint(len(learn[0]), (32,))
        adam.zero_grad()
        answers(model, *(part[rows] for part in learn))[0].backward()
        adam.step()
    return model.requires_grad_(False)


# %%
# Two seeds each:

for seed in range(2):
    aware = train(in_four_bits(model, mxfp4), seed)
    control = in_four_bits(train(copy.deepcopy(model), seed), mxfp4)
    rights = [answers(m, *test)[1].item() for m in (aware, control)]
    print("trained in MXFP4 {:.1%}, rounded after {:.1%}".format(*rights))
    lost = plain[1] - found["mxfp4", "both"][1]
    assert plain[1] - rights[0] < 0.5 * lost < plain[1] - rights[1]

# %%
# Training in MXFP4 recovers more than half of the answers that rounding had cost. The same training without rounding
# recovers few: what helps is not more training, but that the loss sees the rounding.
#
# What is published
# -----------------
#
# OpenAI says that gpt-oss was post-trained with the weights of its experts in MXFP4; activations stayed in bfloat16, and so
# did attention, router, embedding and head. But experts are nearly all of the model:

from lm_from_scratch.models import gpt_oss

config = gpt_oss.GptOssConfig(**gpt_oss.SIZES["gpt-oss-20b"])
with torch.device("meta"):
    large = gpt_oss.GptOssForCausalLM(config)
sizes = {name: p.numel() / 1e9 for name, p in large.named_parameters()}
experts = sum(n for name, n in sizes.items() if name.endswith("_proj"))
rest = sum(sizes.values()) - experts
small = experts * 0.53125 + rest * 2
print(f"{small:.1f} GB instead of {2 * (experts + rest):.1f} GB")

assert 19 < experts < 19.2 and 0.9 < experts / (experts + rest) < 0.92
assert round(small, 1) == 13.8

# %%
# So it fits into 16 GB. ``from_pretrained`` reads such a folder, and turns the experts into bfloat16 without rounding a
# single number.
#
# Exercises
# ---------
#
# 1. *Easy.* Let the scale of ``mxfp4`` be ``top / 6``, rounded *up* to a power of two, so that nothing is cut off at 6.
#    A good answer measures the error of the matrix and the share of right answers, and names the blocks that gain.
# 2. *Medium.* Round numbers of three kinds, in blocks of 16: uniform, normal, and normal ones of which each tenth is ten
#    times as large. Compare ``e2m1`` with 15 even levels. A good answer says for which kind a float is the better
#    choice, and why.
# 3. *Medium.* Train with ``nvfp4`` in place. A good answer shows how many answers there were left to recover, over
#    three seeds.
#
# Summary
# -------
#
# * E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6. MXFP4 gives 32 of them a power of two, NVFP4 gives 16 an E4M3.
# * Rounded weights cost little in both formats. Rounded activations cost more: in their blocks, the largest number stands
#   out further.
# * Quantisation-aware training rounds on the way forward, and on the way back pretends that it did not. It recovers what
#   more training alone cannot.
