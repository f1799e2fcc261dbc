r"""
Codes of 8 and 4 bits, in depth
===============================

Inside the weight of `the lesson <4_quantized_weight.ipynb>`_ are codes. Which number does a code stand for, exactly, how
do two codes share a byte, and how far does rounding move a weight that was trained? The answer is half a step, with one
exception: bfloat16.

A byte for each number
----------------------

Keep for each row its largest absolute value over 127, the *scale*, and for each number the nearest whole multiple of
it, the *code*.

.. math::

   s_n = \frac{\max_k |W_{nk}|}{127}, \qquad
   c_{nk} = \mathrm{round}\!\left(\frac{W_{nk}}{s_n}\right), \qquad
   \hat W_{nk} = s_n c_{nk}
"""

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.plot import error_histogram, figure
from lm_from_scratch.weights.int4 import Int4Weight
from lm_from_scratch.weights.int8 import Int8Weight

generator = torch.Generator().manual_seed(0)
matrix = torch.randn(6, 8, generator=generator)  # (N, K)


def encode(matrix):
    scale = matrix.abs().amax(dim=1, keepdim=True) / 127  # (N, 1)
    return (matrix / scale).round().to(torch.int8), scale


codes, scale = encode(matrix)
print(codes[0].tolist(), f"times {scale[0].item():.4f}")
error = (scale * codes - matrix).abs()
print(f"largest error: {(error / scale).max():.2f} steps")
assert (error <= scale * 0.5001).all()
assert codes.abs().amax(dim=1).tolist() == 6 * [127]

# %%
# Two neighbouring codes are one scale apart, so apart from float32's own rounding, a number moves by at most half of
# it. A quarter of the bytes of float32 remain, and four bytes a row for the scale.
#
# Four bits
# ---------
#
# With 16 codes the steps are large, and two changes make up for some of it. A row is cut into *groups*, each with a
# scale of its own. A group has a *zero* too, the number that the middle code stands for, so that no code is wasted on a
# side where there are no numbers. And since a code is half a byte, two of them share one.
#
# .. math::
#
#    s = \frac{\max W - \min W}{15}, \qquad z = \min W + 8 s, \qquad
#    c = \mathrm{round}\!\left(\frac{W - z}{s}\right) + 8, \qquad
#    \hat W = z + s\,(c - 8)

groups = matrix.unflatten(1, (-1, 4))  # (N, G, K / G) = (6, 2, 4)
low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
scale4 = (high - low) / 15
zero4 = low + 8 * scale4
codes4 = ((groups - zero4) / scale4).round().to(torch.uint8) + 8
codes4 = codes4.flatten(1)  # (N, K)
packed = codes4[:, ::2] | codes4[:, 1::2] << 4  # (N, K / 2)
print("codes ", codes4[0].tolist())
print("bytes ", packed[0].tolist())
assert codes4.min() == 0 and codes4.max() == 15

unpacked = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)
assert torch.equal(unpacked, codes4)
decoded = zero4 + scale4 * (unpacked.unflatten(1, (-1, 4)).float() - 8)
assert ((decoded - groups).abs() <= scale4 * 0.5001).all()

# %%
# The zero is a number like the weights. Many formats have a *zero point* instead, a whole number Z in
# :math:`\hat W = s\,(c - Z)`, so that 0 itself is a level; it takes fewer bits.
#
# The package's ``Int4Weight`` gives these three tensors as its ``parts``. In memory it lays the bytes in another order,
# the one in which torch's kernel reads them.

parts = Int4Weight.quantize(matrix, group_size=4).parts()
for name, tensor in parts.items():
    print(f"{name:6}{tuple(tensor.shape)} {tensor.dtype}")
assert torch.equal(parts["codes"], packed)
assert torch.equal(parts["scale"], scale4[..., 0])
assert torch.equal(parts["zero"], zero4[..., 0])

# %%
# Half a step
# -----------
#
# What does rounding do to weights that were trained? Take the first map of the MLP in the middle of the shipped GPT-2,
# and measure each error in steps of its own group.

model, _ = load_shipped()
trained = model.transformer.h[4].mlp.c_fc.weight.detach().double()
_, axes = figure(6.4, 2.8, columns=2)
for ax, (kind, size) in zip(
    axes, ((Int8Weight, None), (Int4Weight, 64)), strict=True
):
    w = kind.quantize(trained, size)
    step = w.parts()["scale"].repeat_interleave(w.group_size, dim=1)
    moved = (w.dequantize() - trained) / step
    error_histogram(ax, moved, f"{kind.bits} bits")
    relative = (w.dequantize() - trained).norm() / trained.norm()
    print(
        f"{kind.bits} bits: {moved.abs().max():.3f} steps at most, "
        f"relative error {relative:.4f}, {w.parts()['codes'].nbytes} bytes"
    )
    assert moved.abs().max() <= 0.5 + 1e-9
    exact = {8: 1 / 128, 4: 2 / 64}[kind.bits]  # numbers that are on a level
    assert abs(moved.pow(2).mean() * 12 / (1 - exact) - 1) < 0.03
plt.show()

# %%
# `Quantised caches in depth <../5_caching/3a_quantized_cache_in_depth.ipynb>`_ has the same picture, with a proof of the
# bound and of the mean square :math:`s^2/12`. The bar at 0 is the numbers that set the step: one of 128 is its row's
# largest, two of 64 are their group's smallest and largest.
#
# In bfloat16 the decoded number is rounded once more, to 8 binary digits, and for the largest numbers of a group that
# can be half a step again.

low_precision = trained.bfloat16()
w = Int8Weight.quantize(low_precision)
by_formula = (w.scale.double() * w.codes - low_precision) / w.scale.double()
moved = (w.dequantize().double() - low_precision) / w.scale.double()
print(f"bfloat16, by the formula: {by_formula.abs().max():.3f} steps")
print(f"bfloat16, decoded:        {moved.abs().max():.3f} steps")
assert by_formula.abs().max() <= 0.501 and 0.6 < moved.abs().max() < 1.01

# %%
# The codes again
# ---------------
#
# Quantise what a quantised weight decodes to. In float64 the codes are the same: every number is on a level already, and
# the largest of its group is still the largest.

for kind in (Int8Weight, Int4Weight):
    once = kind.quantize(trained)
    twice = kind.quantize(once.dequantize())
    assert torch.equal(once.codes, twice.codes)
    print(f"{kind.__name__}: the same codes")

# %%
# So no digit is lost if you save decoded weights and quantise them again, as long as bits and groups are the same. With
# other groups the levels differ, and the weight is rounded a second time.
#
# Which sentence is false?
# ------------------------
#
# 1. With 4 bits, the smallest and the largest number of a group come back exactly, apart from rounding in floating
#    point.
# 2. A row with 8 bits has 256 different codes.
# 3. Groups of 64 in float32 cost an eighth of a byte for each number, beside its code.

w = Int4Weight.quantize(trained, 64)
back = w.dequantize().unflatten(1, (-1, 64))
exact = trained.unflatten(1, (-1, 64))
for end in (torch.amin, torch.amax):
    torch.testing.assert_close(end(back, dim=2), end(exact, dim=2))  # 1
print("codes:", *Int8Weight.quantize(trained).codes.aminmax())
assert Int8Weight.quantize(trained).codes.aminmax().min == -127  # 2
extra = Int4Weight.quantize(trained.float(), 64).parts()
beside = extra["scale"].nbytes + extra["zero"].nbytes
assert beside / trained.numel() == 2 * 4 / 64 == 0.125  # 3

# %%
# Sentence 2 is false. The code -128 is not used, so that the levels are symmetric about 0: 255 codes are left.
#
# Exercises
# ---------
#
# 1. *Easy.* Quantise ``trained`` with 4 bits and groups of 16, 32, 64 and 128. Plot the relative error against the
#    bytes of ``parts()``. A right answer compares with 8 bits and says which points no other beats on both axes.
# 2. *Medium.* Set the largest number of one row of ``trained`` to 100 times its value. By what factor does the largest
#    error of the others grow, with 8 bits and one scale for the matrix, a row, or a group of 64? A right answer measures
#    the group, the rest of the row and the other rows apart, and explains each factor by the bound. Hint: half a step;
#    ``trained.view(1, -1)`` has one row.
#
# Summary
# -------
#
# * With 8 bits a number is a scale times a code from -127 to 127. With 4 bits it is a zero plus a scale times a code
#   from 0 to 15, and two codes share a byte.
# * In exact numbers a weight moves by at most half a step of its group; in bfloat16, decoding rounds once more.
# * Quantising decoded weights again gives the same codes.
#
# Sources
# -------
#
# * Frantar et al.: `GPTQ <https://arxiv.org/abs/2210.17323>`_, 2022. Groups with a scale and a zero; it chooses codes by data.
# * Dettmers et al.: `LLM.int8() <https://arxiv.org/abs/2208.07339>`_, 2022. One scale a row, and numbers that stand out.
# * Jacob et al.: `Quantization and training of neural networks <https://arxiv.org/abs/1712.05877>`_, 2017. The zero point
#   as a whole number, so that 0 is exact.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
