r"""
int8 and int4: the same model in fewer bytes
============================================

Training ends with weights of 32 or 16 bits. How many of these bits does a model need to *write*? Take some away, and
see:

.. live:: bits

With 8 bits a weight, the text surprises the model barely more than before. With 2 bits, the model is lost. Rounding the
weights of a trained model is called *quantisation*. It is the reason why a model with 7 billion weights, 28 GB in
float32, can run on a laptop.

The function ``rounded`` does it in five lines, which are explained below. First, see what they do to the shipped Qwen2.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["../1_gpt2/2_gpt2", "../1_gpt2/4_training"]
# sphinx_gallery_words = ["load_in_4bit", "load_in_8bit", "NF4", "group_size", "zero point", "GPTQ", "AWQ", "post-training quantization", "absmax", "quantization", "quantized model", "asymmetric", "make a model smaller", "compress a model", "4-bit quantization explained", "run a large model on a small machine", "reduce model size", "shrink a model", "quantise a model", "what is quantization", "8-bit vs 4-bit", "how many bits", "per-channel scale", "per-channel quantization", "per-row scale", "bits per weight", "lower precision", "rounding weights", "low-bit", "lossy compression", "smaller file", "fits on my laptop", "fewer bits", "quality loss of 4 bits", "float32 to int8", "dequantize", "large model on a laptop"]
import copy

import torch

from lm_from_scratch.checkpoint.weights import load_shipped

torch.set_grad_enabled(False)
model, tokenizer = load_shipped("qwen2-docs")


def rounded(weight, bits):  # (N, K)
    top = 2 ** (bits - 1) - 1  # 127 for 8 bits, 7 for 4 bits
    scale = weight.abs().amax(1, keepdim=True) / top  # (N, 1)
    codes = (weight / scale).round()  # whole numbers from -top to top
    return scale * codes


def in_bits(bits):
    other = copy.deepcopy(model)
    for weight in other.parameters():
        if weight.dim() == 2:  # a matrix
            weight.copy_(rounded(weight, bits))
    return other


assert 7e9 * 4 == 28e9

# %%
# **Predict first.** Each model continues *If the file does not exist, an* and always takes the likeliest token. Which
# of them write exactly the text of the 32-bit model?
#
# * all but the one with 2 bits
# * those with 8 and 4 bits
# * only the one with 8 bits

from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.generation.text import generate_text

prompt = "If the file does not exist, an"
models, texts = {32: model}, {}
models |= {bits: in_bits(bits) for bits in (8, 4, 3, 2)}
for bits, other in models.items():
    steps = generate_text(other, tokenizer, prompt, 16, GREEDY)
    texts[bits] = "".join(steps).replace("\n", " ")
    print(f"{bits:2} bits:{texts[bits]}")

assert [bits for bits in texts if texts[bits] == texts[32]] == [32, 8]
assert texts[4].split()[0] != texts[32].split()[0]

# %%
# Only the one with 8 bits: not one of its 16 tokens differs. With 4 bits the model still writes sentences, but different
# ones from the first word on. With 2 bits it babbles.
#
# A scale for each row
# --------------------
#
# What is rounded to what? Each weight moves to the nearest of a few evenly spaced *levels*, like the marks on a ruler.
# (Keys and values do the same in `quantised caches <../5_caching/3_quantized_cache.ipynb>`_.) With 4 bits we allow 15
# levels, from -7 to 7, so that 0 is the one in the middle. These whole numbers are the *codes*.
#
# The *scale* is the step from one level to the next. A matrix has N rows of K weights, and each row has its own scale,
# chosen so that the weight farthest from 0 gets the code 7 or -7. (Libraries call this *absmax*.)
#
# Here are 16 neighbouring weights of the model, in blue, and the levels to which they go.

from lm_from_scratch.drawings import quantized_weights as drawings


def ruler(weights, bits=4):
    top = 2 ** (bits - 1) - 1
    return weights.tolist(), weights.abs().max().item() / top, top


matrix = model.model.layers[0].mlp.gate_proj.weight
neighbours = matrix[0, -16:]

drawings.rounding({"16 weights, 15 levels": ruler(neighbours)})

# %%
# No weight moves by more than half a step. With 8 bits there are 255 levels, and a step is 18 times smaller.
#
# To save memory, keep the codes, of one byte each, and one scale for each row. Multiplied, they are almost the old
# matrix.

scale = matrix.abs().amax(1, keepdim=True) / 127  # (N, 1)
codes = (matrix / scale).round().to(torch.int8)  # (N, K)
print("as float32:", matrix.nbytes, "bytes")
print("as int8:   ", codes.nbytes + scale.nbytes, "bytes")
moved = (scale * codes - matrix).abs() / scale
print(f"largest error: {moved.max():.2f} steps")

assert moved.max() < 0.501
assert 3.8 < matrix.nbytes / (codes.nbytes + scale.nbytes) < 4
torch.testing.assert_close(scale * codes, rounded(matrix, 8))
assert round(127 / 7) == 18

# %%
# One large weight
# ----------------
#
# **Predict first.** In the drawing, the 16 weights use nine levels. We make the largest of them four times as large.
# How many levels do the 16 use then?
#
# * nine, as before
# * four
# * two: one for the large weight, and 0 for all others

outlier = neighbours.clone()
outlier[neighbours.abs().argmax()] *= 4

drawings.rounding({"One weight is 4 times as large": ruler(outlier)})

# %%
# Four. The scale follows the largest weight, so each step is four times as wide, and the 15 other weights share the few
# levels near 0. One *outlier* is enough to make the levels of its whole row coarse.
#
# The cure is to build walls. Cut the row into groups, and give each group its own scale:

walls = {f"Group {i + 1}": ruler(outlier[8 * i : 8 * i + 8]) for i in (0, 1)}

assert [
    len({round(w / ruler(group)[1]) for w in group.tolist()})
    for group in (neighbours, outlier, outlier[8:])
] == [9, 4, 7]
drawings.rounding(walls)

# %%
# The second group never notices the outlier: its eight weights have fine levels again. The price is one more scale.
#
# This matters most for int4, where levels are few. The package's int4 has groups of 64 neighbours in a row. It uses all
# 16 codes that 4 bits can hold, and spreads their levels from the smallest to the largest weight of the group. So it has
# to keep a second number that says where they lie, the group's *zero*. (Many libraries keep a whole number instead, the
# *zero point*.)
#
# In bfloat16, a group of 64 then takes 64 codes of half a byte and two numbers of 2 bytes, 36 bytes in all. That is
# 0.5625 bytes a weight. (The underscore in ``quantize_`` is PyTorch's sign for a function that changes its argument.)

from lm_from_scratch.weights.quantize import quantize_

int4 = copy.deepcopy(model).bfloat16()
quantize_(int4, bits=4)
size, small = (sum(p.nbytes for p in m.parameters()) for m in (model, int4))
print(f"{size:,} bytes in float32, {small:,} in int4")

weight = int4.head.weight
assert (64 * 0.5 + 2 * 2) / 64 == weight.nbytes / weight.numel() == 0.5625
assert size > 6 * small

# %%
# The whole model is more than 6 times smaller. Norms and biases stay as they are: they are few.
#
# What rounding costs
# -------------------
#
# One sentence proves little. So every model reads documentation that it was not trained on, and we take the mean loss:
# how much the true next token surprises it, measured in *nats*, the unit of the natural logarithm.
#
# **Predict first.** Guessing all 4096 tokens with equal probability has a loss of 8.3. The model with 2 bits has
#
# * a lower loss: some of its knowledge is left
# * the same loss: it knows nothing any more
# * a higher loss

from lm_from_scratch.text.batches import pieces
from lm_from_scratch.text.corpora import reference, split
from lm_from_scratch.training.train import evaluate

text = pieces(split(reference())[1], tokenizer, length=256, count=6)
models |= {bits: in_bits(bits) for bits in (6, 5)}
losses = {bits: evaluate(models[bits], [text]) for bits in sorted(models)}
losses["int4"] = evaluate(int4, [text])

import math

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

_, (ax,) = figure(4.8, 3.4)
per_row = sorted(models)
columns = matrix.shape[1]  # each row has a scale of 2 bytes
bytes_of = {bits: bits / 8 + 2 * (bits < 32) / columns for bits in per_row}
ax.plot(bytes_of.values(), [losses[bits] for bits in per_row], "o-")
ax.plot(0.5625, losses["int4"], "D", color=COLOURS[3])
ax.axhline(math.log(4096), linestyle=":", color=COLOURS[4])
ax.text(0.62, 8.45, "all tokens equally likely")
for bits in per_row:
    ax.annotate(
        str(bits),
        (bytes_of[bits], losses[bits]),
        (2, 7),
        textcoords="offset points",
    )
ax.annotate(
    "int4, groups", (0.5625, losses["int4"]), (0.55, 5.9),
    arrowprops={"arrowstyle": "-"},
)  # fmt: skip
ax.set_xscale("log", base=2)
ax.set_xticks([0.25, 0.5, 1, 2, 4], ["1/4", "1/2", "1", "2", "4"])
ax.set(title="Loss, by bits", xlabel="bytes a weight", ylabel="loss in nats")
plt.show()

for bits in (8, 6):
    assert abs(losses[bits] - losses[32]) < 0.01
assert 0.02 < losses[4] - losses[32] < 0.1
assert losses["int4"] < losses[4]
assert losses[3] > losses[32] + 0.3
assert losses[2] > math.log(4096) + 1
assert f"{math.log(4096):.1f}" == "8.3"

# %%
# A higher loss. With 2 bits the model has not become unsure: it is *sure of wrong tokens*, and that costs more than
# guessing.
#
# Read the curve from the right: first flat, then a cliff. Down to 6 bits the loss moves by less than 0.01 nats, with 4
# bits by less than 0.1. The diamond is int4 with groups.
#
# Where the cliff begins depends on the model: large models tolerate 4 bits better than small ones. It also depends on
# the rounding: methods such as GPTQ and AWQ round with the help of example text. `int8 and int4 in depth
# <1a_int8_int4_in_depth.ipynb>`_ has the sources, and finds the matrices that cost the most.
#
# What you gain
# -------------
#
# Memory, always. Here is what 7 billion weights take:

per_weight = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 0.5625}
for name, size in per_weight.items():
    print(f"{name:9}{7 * size:5.1f} GB")

assert 7 * per_weight["int4"] < 4

# %%
# Speed, sometimes. To write one token, a model reads each of its weights once, so fewer bytes can mean less waiting.
# But codes have to be turned into numbers again. With a long prompt or many texts at once, that work may cost more than
# the bytes save.
#
# Fast int8 avoids this work. It also rounds the *activations*, the numbers that the weights are multiplied with, to 8
# bits, and multiplies the bytes themselves. That is what ``quantize_(model, bits=8)`` does; with ``weight_only=True`` the
# activations stay as they are. `The speed of int8 and int4 in depth <1b_speed_of_int8_int4.ipynb>`_ measures both, and
# int4.
#
# Exercises
# ---------
#
# 1. *Easy.* What does ``rounded`` return for a row of zeros, and why? Add a line that fixes it. A good answer changes no
#    other row.
# 2. *Medium.* Give ``rounded`` groups of 64, and levels from the smallest to the largest weight of each group. Try both
#    changes alone and together, with 3 bits. A good answer says which one lowers the loss more, and what each costs
#    in bytes.
# 3. *Easy.* Quantise to 4 bits and leave the head at 8. How many bytes does that cost, and what does it gain? Hint: call
#    ``quantize_`` twice, with ``select``. The head is ``transformer.wte.weight`` in ``gpt2-docs`` and
#    ``model.embed_tokens.weight`` in ``qwen2-docs``. A good answer is a new point in the figure of losses.
#
# Summary
# -------
#
# * A quantised weight is a small whole number, its code, times a scale that it shares with its row or group.
# * The largest weight of a group sets the step for the whole group. So groups confine the damage that an outlier does.
# * 8 bits cost our model next to nothing, 4 bits a little, 2 bits everything. Memory always shrinks; whether time does
#   depends on the program that multiplies.
