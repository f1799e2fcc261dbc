r"""
RMSNorm in depth
================

The `lesson on RMSNorm <1_rms_norm.ipynb>`_ says what it does and why a model wants it. Is your own norm right? This
page counts what a norm forgets, finds the place of epsilon and of every rounding, derives the gradient by hand,
counts the memory traffic, and shows which wrong norms a test lets through.

You need derivatives of quotients.

What comes out
--------------

The package writes the formula as it is, with one addition: half precision is widened to float32 first.
"""

# sphinx_gallery_words = ["rms_norm_eps", "variance_epsilon", "eps", "float32 upcast", "fp16 overflow"]

import copy
import inspect
import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from lm_from_scratch.layers.layer_norm import layer_norm
from lm_from_scratch.layers.norm import rms_norm

print(inspect.getsource(rms_norm))

# %%
# Here is a token whose features have mean 5 and standard deviation 2, after LayerNorm and after RMSNorm. All weights
# are 1 and all biases 0.

C = 33
generator = torch.Generator().manual_seed(0)
noise = torch.randn(2, 7, C, generator=generator)  # (B, T, C)
noise = layer_norm(noise, torch.ones(C), torch.zeros(C))
x = 5 + 2 * noise

results = {
    "input": x,
    "LayerNorm": layer_norm(x, torch.ones(C), torch.zeros(C)),
    "RMSNorm": rms_norm(x, torch.ones(C)),
}
print("             mean  variance  mean square")
for name, y in results.items():
    mean, square = y[0, 0].mean(), y[0, 0].square().mean()
    variance = y[0, 0].var(correction=0)
    print(f"{name:10} {mean.abs():6.2f} {variance:9.3f} {square:12.2f}")

mean, variance, square = mean.item(), variance.item(), square.item()
assert abs(mean - 5 / math.sqrt(29)) < 1e-4
assert abs(variance - 4 / 29) < 1e-4
assert abs(square - 1) < 1e-4

# %%
# The mean square of the input is :math:`5^2 + 2^2 = 29`. RMSNorm divides everything by the root of 29, so the mean
# becomes 0.93 and the variance 0.138. Only the mean *square* is 1.
#
# The two norms are related: LayerNorm is RMSNorm of the centred token, plus a bias.

assert round(mean, 2) == 0.93
assert round(variance, 3) == 0.138

weight = 1 + 0.25 * torch.randn(C, generator=generator)
bias = 0.25 * torch.randn(C, generator=generator)
centred = x - x.mean(-1, keepdim=True)
torch.testing.assert_close(
    rms_norm(centred, weight, eps=1e-5) + bias,
    layer_norm(x, weight, bias, eps=1e-5),
    atol=5e-6,
    rtol=0.0,
)

# %%
# What each norm forgets
# ----------------------
#
# In the lesson RMSNorm brought every token of two features to a circle: it forgets the length. LayerNorm also forgets
# the common level of the features, and of two features only a sign is left.

from lm_from_scratch.instruments.plot import COLOURS, GREY, curves, figure

points = torch.randn(24, 2, generator=generator) + torch.tensor([0.8, 0.3])
ones, zeros = torch.ones(2), torch.zeros(2)
by_rms = rms_norm(points, ones)
by_layer = layer_norm(points, ones, zeros, eps=1e-6)
assert (by_rms.norm(dim=-1) - math.sqrt(2)).abs().max() < 1e-3
assert (by_layer.abs() - 1).abs().max() < 0.01

drawn, (ax,) = figure(4.0, 3.6)
for start, end in zip(points, by_layer):
    ax.plot(*zip(start, end), color=GREY, linewidth=0.8)
ax.plot(*points.T, "o", color=COLOURS[0], markersize=4, label="before")
ax.plot(*by_layer.T, "D", color=COLOURS[3], markersize=5, label="after")
ax.set(title="LayerNorm of 24 tokens", xlabel="feature 0", ylabel="feature 1")
ax.set(xlim=(-3, 3.5), ylim=(-3, 3.5), aspect="equal")
ax.legend(frameon=False, loc="lower right")
plt.show()

# %%
# A token of C features can change in C directions. The rank of the Jacobian counts those that a norm does not ignore:
# C - 1 for RMSNorm and C - 2 for LayerNorm.


def sensitive_directions(norm, size):
    token = torch.randn(size, generator=generator, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(norm, token)
    return torch.linalg.matrix_rank(jacobian, atol=1e-9).item()


for size in (2, 7, 33):
    w = torch.ones(size, dtype=torch.float64)
    norms = (
        lambda t, w=w: rms_norm(t, w, 0.0),
        lambda t, w=w: layer_norm(t, w, torch.zeros_like(w), 0.0),
    )
    by_rms, by_layer = (sensitive_directions(norm, size) for norm in norms)
    print(f"C = {size:2}   RMSNorm {by_rms:2}   LayerNorm {by_layer:2}")
    assert (by_rms, by_layer) == (size - 1, size - 2)

# %%
# So the two norms differ in one direction of C, the vector of ones. In the lesson the shipped GPT-2 lost next to nothing
# without the subtraction.
#
# A norm without a favourite direction
# ------------------------------------
#
# RMSNorm gains a symmetry. With weights of 1 it commutes with every rotation of the features, because a rotation keeps
# lengths. LayerNorm singles out the vector of ones, and does not.

random = torch.randn(C, C, generator=generator)
rotation, _ = torch.linalg.qr(random)
ones, zeros = torch.ones(C), torch.zeros(C)
by_rms = rms_norm(x @ rotation, ones) - rms_norm(x, ones) @ rotation
by_layer = (
    layer_norm(x @ rotation, ones, zeros)
    - layer_norm(x, ones, zeros) @ rotation
)
print(f"RMSNorm {by_rms.abs().max():.0e}, LayerNorm {by_layer.abs().max():.1f}")
assert by_rms.abs().max() < 1e-5
assert by_layer.abs().max() > 0.5

# %%
# Methods that cut or quantise trained models use this. They fold the norm weights into the matrices that follow
# (an exercise of the lesson) and rotate the features of the whole model, and the model's function stays the same.
#
# Scale is ignored, down to epsilon
# ---------------------------------
#
# Up to :math:`\epsilon` the law of the lesson is
#
# .. math::
#
#    \operatorname{RMSNorm}(a x) = \operatorname{RMSNorm}(x), \qquad a > 0
#
# Exactly, the root mean square of the result is :math:`\sqrt{a^2 m / (a^2 m + \epsilon)}`. The figure measures
# it on tokens with m = 1.

tokens = noise.double()
one = torch.ones(C, dtype=torch.float64)
scales = torch.logspace(-6, 3, 40, dtype=torch.float64)
series = {}
for eps in (1e-6, 1e-5):
    left = [
        rms_norm(a * tokens, one, eps).square().mean().sqrt() for a in scales
    ]
    law = scales / (scales**2 + eps).sqrt()
    torch.testing.assert_close(torch.stack(left), law, rtol=1e-4, atol=0.0)
    series[f"eps = {eps:g}"] = (scales.tolist(), torch.stack(left).tolist())

drawn = curves(series, "a", "root mean square after the norm")
(ax,) = drawn.axes
ax.set(xscale="log", title="RMSNorm of a x: invariant down to the root of eps")
plt.show()

exact = rms_norm(tokens, one, 0.0)
for a in (1e-6, 1e-3, 1e3):
    torch.testing.assert_close(rms_norm(a * tokens, one, 0.0), exact)

# %%
# With :math:`\epsilon = 0` the law holds at every scale. With :math:`\epsilon > 0` a token much shorter than
# :math:`\sqrt{\epsilon}` stays short, so numerical noise is not blown up to full size, and a token of zeros gives
# zeros.
#
# The law has a price, which the gradient pays. If scaling x changes nothing, then the gradient has no component along
# x. And a small step turns a state by a smaller angle if the state is longer: the gradient at *a* x is 1/*a* times the
# gradient at x. Both are exact for :math:`\epsilon = 0`.

assert rms_norm(torch.zeros(C), torch.ones(C)).eq(0).all()


def gradient(scale, direction):
    leaf = (scale * tokens).requires_grad_()
    (rms_norm(leaf, one, 0.0) * direction).sum().backward()
    return leaf.grad


direction = torch.randn(2, 7, C, generator=generator, dtype=torch.float64)
short, long = gradient(1.0, direction), gradient(10.0, direction)
along = (short * tokens).sum(-1)  # (B, T)
print(f"along x: {along.abs().max():.0e}")
print(f"norm at scale 1: {short.norm():.2f}, at scale 10: {long.norm():.2f}")
assert along.abs().max() < 1e-12
torch.testing.assert_close(long, short / 10)

# %%
# Epsilon is inside the root
# --------------------------
#
# :math:`1/\sqrt{m + \epsilon}` and :math:`1/(\sqrt{m} + \epsilon)` look alike, and for a token of ordinary length they
# are. The difference shows where m is near :math:`\epsilon`.


def epsilon_outside(x, weight, eps=1e-6):
    rms = x.square().mean(-1, keepdim=True).sqrt()
    return x / (rms + eps) * weight


print("size of x   inside   outside")
for size in (1.0, 1e-1, 1e-2, 1e-3):
    token = size * noise[0, 0]
    inside = rms_norm(token, ones).square().mean().sqrt().item()
    outside = epsilon_outside(token, ones).square().mean().sqrt().item()
    print(f"{size:9g} {inside:8.4f}  {outside:8.4f}")
    if size == 1.0:
        assert abs(inside - outside) < 1e-5
assert abs(inside - math.sqrt(0.5)) < 1e-3
assert outside > 0.99

# %%
# At size 0.001 the results differ by a factor near :math:`\sqrt{2}`. Short states exist: Qwen2 draws its embeddings
# with standard deviation 0.02, and the first norm reads them directly. There the results differ by a part in a
# thousand.
#
# The value of :math:`\epsilon` belongs to the checkpoint, too: `conventions <4b_conventions.ipynb>`_ shows what the default
# of ``F.rms_norm`` does.

small = 0.02 * noise
relative = epsilon_outside(small, ones) / rms_norm(small, ones) - 1
print(f"relative difference at 0.02: {relative.abs().mean():.1e}")
assert 1e-3 < relative.abs().mean() < 1.5e-3

# %%
# Low precision
# -------------
#
# The lesson shows why the statistics are computed in float32. When to go back to half precision is another question. The code of the
# published model rounds first and multiplies by the weight afterwards, which rounds again. ``F.rms_norm`` rounds once,
# at the end.
#
# The bfloat16 type has 8 significant bits, so one rounding may be wrong by a relative :math:`2^{-8}`. Two may be
# wrong by twice as much. The truth is computed in float64 from the same bfloat16 numbers.

generator = torch.Generator().manual_seed(2)
many = torch.randn(500, C, generator=generator).bfloat16()
w16 = weight.bfloat16()
hf = Qwen2RMSNorm(C, eps=1e-6)
hf.weight.data = w16
truth = rms_norm(many.double(), w16.double())

orders = {
    "package": rms_norm(many, w16),
    "transformers": hf(many).detach(),
    "F.rms_norm": F.rms_norm(many, (C,), w16, 1e-6),
}
for name, y in orders.items():
    error = (y.double() / truth - 1).abs()
    different = (y != orders["package"]).float().mean()
    print(f"{name:12}  largest error {error.max() * 2**8:.2f} / 256", end="")
    print(f"   differs from ours in {different:.0%}")
    limit = 1.01 if name == "F.rms_norm" else 2.01
    assert error.max() * 2**8 < limit
assert different > 0.1
same = (orders["package"] == orders["transformers"]).float().mean()
assert same > 0.999

# %%
# Neither order is a mistake. The package takes the one of the published models, so that a bfloat16 comparison with them
# tests the model and not the rounding.
#
# Numbers that are wider than float32 must stay wide. The function computes in float32 *or better*, and float64 stays
# float64. The museum shows what happens otherwise.
#
# The gradient, by hand
# ---------------------
#
# Write :math:`r = (m + \epsilon)^{-1/2}` and :math:`h_c = x_c r`, so :math:`y_c = w_c h_c`. Let :math:`g_c` be the
# gradient that arrives at :math:`y_c`. The weight is the easy part:
#
# .. math::
#
#    \frac{\partial L}{\partial w_c} = \sum_{\text{tokens}} g_c h_c
#
# The feature :math:`x_c` acts on its own :math:`h_c`, and through r on all of them:
#
# .. math::
#
#    \frac{\partial r}{\partial x_c} &= -\frac{1}{2} (m + \epsilon)^{-3/2} \, \frac{2 x_c}{C} = -\frac{r^3 x_c}{C} = -\frac{r^2 h_c}{C} \\
#    \frac{\partial L}{\partial x_c} &= r \, g_c w_c + \frac{\partial r}{\partial x_c} \sum_i g_i w_i x_i \\
#    &= r \Bigl( g_c w_c - h_c \, \frac{1}{C} \sum_i g_i w_i h_i \Bigr)
#
# The last step uses :math:`r \, x_i = h_i`, and no step neglects :math:`\epsilon`. The factor r is the 1/*a* of
# above. With :math:`\epsilon = 0` the mean square of h is 1, and the bracket is :math:`g_c w_c` without its component
# along h.
#
# The backward pass needs x, the weight and one number r per token. The package's function keeps just these.

from lm_from_scratch.layers.norm import RMSNormFunction

print(inspect.getsource(RMSNormFunction.backward))

# %%
# Three checks: autograd on the formula, ``F.rms_norm``, and finite differences. Some of the tokens are so short that
# :math:`\epsilon` matters.


def gradients(norm, *tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = norm(*leaves)
    (y * y.detach().sin()).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def by_hand(x, w):
    return RMSNormFunction.apply(x, w, 1e-6)


mixed = tokens.clone()
mixed[:, ::2] *= 1e-3
w64 = weight.double()
expected = gradients(lambda x, w: rms_norm(x, w, 1e-6), mixed, w64)
torchs = gradients(lambda x, w: F.rms_norm(x, (C,), w, 1e-6), mixed, w64)
ours = gradients(by_hand, mixed, w64)
for name, a, b, c in zip(("y", "x", "w"), ours, expected, torchs):
    torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(a, c, atol=1e-10, rtol=1e-10)
    print(f"{name}: largest {a.abs().max():6.1f}", end="")
    print(f"   error {(a - b).abs().max():.0e}")

few = [mixed[:, :3, :5].clone().requires_grad_(), w64[:5].requires_grad_()]
assert torch.autograd.gradcheck(by_hand, few, eps=1e-8, atol=1e-4)

# %%
# Autograd takes the stored r for a constant. A second derivative through this backward would miss a term and look
# healthy, so ``once_differentiable`` refuses it. The formula ``rms_norm`` can be differentiated as often as you like.

(slope,) = torch.autograd.grad(
    by_hand(*few).pow(2).sum(), few[0], create_graph=True
)
try:
    slope.sum().backward()
except RuntimeError as error:
    refused = str(error)
    print(refused)
assert "once_differentiable" in refused
ordinary = [tokens[:, :3, :5].clone(), w64[:5].clone()]
ordinary = [t.detach().requires_grad_() for t in ordinary]
assert torch.autograd.gradgradcheck(rms_norm, ordinary)

# %%
# What it costs: count first
# --------------------------
#
# A norm does a handful of operations per number, so the traffic of numbers is what to count. The least possible is five
# tensors of the size of x: forward reads x and writes y, backward reads x and g and writes the gradient of x.
#
# Two counters show how far three implementations are from that. One sees every operation that torch runs and adds up
# the bytes of its inputs and outputs. The other adds up the bytes that forward keeps for backward.

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lm_from_scratch.instruments.record import record_saved


class Traffic(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for t in tree_leaves((args, kwargs, result)):
            if isinstance(t, torch.Tensor) and not operation.is_view:
                self.count += min(t.nbytes, t.untyped_storage().nbytes())
        return result


def kept_bytes(norm, x):
    with record_saved() as saved:
        norm(x)
    return sum(saved.values())


def step(norm, x, g):
    x.grad = None
    norm(x).backward(g)


C = 896  # of the smallest Qwen2
from lm_from_scratch.layers.norm import RMSNorm

package, hf = RMSNorm(C), Qwen2RMSNorm(C, eps=1e-6)
builtin = torch.nn.RMSNorm(C, eps=1e-6)
peers = {"transformers": hf, "torch.nn": builtin, "package": package}
generator = torch.Generator().manual_seed(0)
batch = torch.randn(2, 256, C, generator=generator).requires_grad_()
g = torch.randn(2, 256, C, generator=generator)

moved, kept = {}, {}
print("              tensors moved   tensors kept   kept in bfloat16")
for name, norm in peers.items():
    with Traffic() as traffic:
        step(norm, batch, g)
    moved[name] = traffic.count / batch.nbytes
    kept[name] = kept_bytes(norm, batch) / batch.nbytes
    low = batch.detach().bfloat16().requires_grad_()
    in_low = kept_bytes(copy.deepcopy(norm).bfloat16(), low) / low.nbytes
    kept[name, "bfloat16"] = in_low
    print(f"{name:12} {moved[name]:14.1f} {kept[name]:14.2f} {in_low:18.2f}")

# %%
# The function with the gradient by hand moves fewer bytes and keeps one tensor, x itself. Autograd on the formula keeps
# x and the normalised x. For a bfloat16 input the x it keeps is a float32 copy, which counts twice.

assert 5 <= moved["package"] < 0.8 * moved["transformers"]
assert 1.0 <= kept["package"] < 1.01
assert 1.9 < kept["transformers"] < 2.1
assert kept["package", "bfloat16"] < 1.01
assert kept["transformers", "bfloat16"] > 2.9

# %%
# Bug museum
# ----------
#
# Float32 for everyone
# ~~~~~~~~~~~~~~~~~~~~
#
# Defects of early Qwen2 code are numbered Q1, Q2, ... on these pages. This one is in today's code, too: it casts to
# float32 whatever it gets. Half precision becomes wider. But float64 becomes narrower, and nobody notices, because the
# result is cast back. (Q24)


def norm_in_float32(x, weight, eps=1e-6):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return h.to(x.dtype) * weight


truth = F.rms_norm(tokens, (33,), w64, 1e-6)
narrow = norm_in_float32(tokens, w64)
wide = rms_norm(tokens, w64)
print(f"{narrow.dtype}, error {(narrow - truth).abs().max():.0e}")
print(f"{wide.dtype}, error {(wide - truth).abs().max():.0e}")
assert 1e-8 < (narrow - truth).abs().max() < 1e-5
hf = Qwen2RMSNorm(33, eps=1e-6)
hf.weight.data = w64
assert 1e-8 < (hf(tokens) - truth).abs().max() < 1e-5
assert (wide - truth).abs().max() < 1e-14

accepted = {}
for norm in (norm_in_float32, rms_norm):
    accepted[norm.__name__] = torch.autograd.gradcheck(
        norm, ordinary, raise_exception=False
    )
print(accepted)
assert accepted == {"norm_in_float32": False, "rms_norm": True}

# %%
# The error looks like nothing. But float64 is how you tell a small mistake from rounding, and this norm takes that tool
# away: finite differences of float32 numbers are noise, and ``gradcheck`` rejects a correct gradient. The fixed line is
# ``torch.promote_types(x.dtype, torch.float32)``, and ``gradcheck`` is the check that finds the mistake.
#
# Epsilon outside, and a subtracted mean
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Two wrong norms in a whole model: which tolerance tells them from rounding? (M1, M2)
#
# The model has four blocks. Its matrices have standard deviation 0.25 and its norm weights are around 1. The row named
# "formula" has no mistake: it is ``rms_norm`` instead of ``RMSNormFunction``.

from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.models.randomize import randomize_

sizes = dict(vocab_size=97, n_layer=4, n_head=6, n_kv_head=2, n_embd=48)
config = Qwen2Config(**sizes, intermediate_size=112, eos_token_id=2)
model = Qwen2ForCausalLM(config)
randomize_(model)
idx = torch.randint(3, 97, (2, 12), generator=generator)


def subtracts_the_mean(x, weight, eps):
    return rms_norm(x - x.mean(-1, keepdim=True), weight, eps)


def with_norm(model, function):
    changed = copy.deepcopy(model)
    for norm in changed.modules():
        if isinstance(norm, RMSNorm):
            norm.forward = lambda x, norm=norm: function(
                x, norm.weight, norm.eps
            )
    return changed


functions = {
    "formula": rms_norm,
    "epsilon outside": epsilon_outside,
    "subtracted mean": subtracts_the_mean,
}
error = {}
print("largest error of a logit   float32   float64")
for name, function in functions.items():
    for dtype in (torch.float32, torch.float64):
        right = copy.deepcopy(model).to(dtype)
        with torch.no_grad():
            wrong = with_norm(right, function)(idx)
            error[name, dtype] = (wrong - right(idx)).abs().max().item()
    low, high = (error[name, d] for d in (torch.float32, torch.float64))
    print(f"{name:24} {low:9.0e} {high:9.0e}")

# %%
# A common test in float32 with a tolerance of 1e-3 accepts the misplaced epsilon. A test with 5e-5 finds it. In float64
# the choice is easier still: rounding stays below 1e-11 there, far from any mistake. Any test finds the subtracted mean.

f32, f64 = torch.float32, torch.float64
assert error["formula", f32] < 5e-5 < error["epsilon outside", f32] < 1e-3
assert error["formula", f64] < 1e-11 < 5e-5 < error["epsilon outside", f64]
assert error["subtracted mean", f32] > 1

# %%
# Exercises
# ---------
#
# 1. *Easy.* The documentation of ``torch.nn.RMSNorm`` says that epsilon is ``torch.finfo(x.dtype).eps`` by default.
#    Find out which one ``F.rms_norm`` takes for a bfloat16 token. Hint: norm a token whose features are all 0.001,
#    and solve for :math:`\epsilon`. A good answer compares it with ``torch.finfo`` of two types.
# 2. *Medium.* Normalise a token whose features lie in two halves, each half by itself. A good answer derives the new
#    backward, and passes ``gradcheck`` in float64. Hint: the mean in the bracket runs over one half.
# 3. *Hard.* Bring the package's count in the table of ``Traffic`` down: find results of ``RMSNormFunction`` that need
#    not be written. A good answer passes the three gradient checks of this page, and reports both the count and the
#    clock. Hint: which tensors does the function own, so that it may overwrite them?
#
# Summary
# -------
#
# * RMSNorm divides by the root of the mean square. An input with mean 5 and standard deviation 2 leaves with mean 0.93,
#   variance 0.138 and mean square 1.
# * It ignores one direction of C, LayerNorm two. With weights of 1 it commutes with rotations.
# * It forgets the scale of a state down to :math:`\sqrt{\epsilon}`, and its gradient is perpendicular to the state.
# * Statistics need at least float32, and float64 must stay float64: a forced float32 breaks ``gradcheck``.
# * The gradient by hand equals autograd to 1e-10 and keeps one tensor instead of two, or instead of three in bfloat16.
# * A misplaced epsilon passes a tolerance of 1e-3. A tolerance of 5e-5, short tokens, or float64 find it.
#
# Sources
# -------
#
# * Zhang, Sennrich: `Root Mean Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_, 2019.
# * Ba, Kiros, Hinton: `Layer Normalization <https://arxiv.org/abs/1607.06450>`_, 2016.
# * Ashkboos et al.: `SliceGPT <https://arxiv.org/abs/2401.15024>`_, 2024. Rotations that leave a model with RMSNorm
#   as it is.
# * Ashkboos et al.: `QuaRot <https://arxiv.org/abs/2404.00456>`_, 2024. The same rotations, for quantisation.
# * Yang et al.: `Qwen2 Technical Report <https://arxiv.org/abs/2407.10671>`_, 2024.
# * The norm of ``transformers``: `modeling_qwen2.py
#   <https://github.com/huggingface/transformers/blob/main/src/transformers/models/qwen2/modeling_qwen2.py>`_.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
