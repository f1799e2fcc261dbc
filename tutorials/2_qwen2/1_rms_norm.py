r"""
RMSNorm: every token at one length
==================================

A Qwen2 of 24 blocks normalises every token 49 times: twice in each block, and once at the end. Each time, it brings
the token's vector to a standard length. The code has three lines. Why does a model need it so often?

Here are 24 tokens with two *features* each: a token's vector is a point, and its length is the distance from (0, 0).
RMSNorm moves every point to the same circle. It keeps the direction of a token and resets its length.
"""

# sphinx_gallery_needs = ["../1_gpt2/2_gpt2"]
# sphinx_gallery_words = ["RMS", "pre-norm", "nn.RMSNorm", "rsqrt", "underflow", "RMSNorm vs LayerNorm", "LlamaRMSNorm", "T5LayerNorm", "why normalise", "normalisation layer", "LayerNorm vs RMSNorm", "normalise activations", "why normalise activations", "layer normalisation", "batch norm", "BatchNorm", "batch normalisation", "gamma", "learnable scale", "epsilon", "eps", "mean subtraction", "why no mean", "root mean square", "RMSNorm explained", "RMSNorm formula", "norm of a vector", "pre-norm vs post-norm", "stabilise training", "fp16 overflow", "normalisation", "normalise the activations", "what does normalisation do", "why does a transformer need normalisation"]
# sphinx_gallery_thumbnail_number = 1
import matplotlib.pyplot as plt
import torch

from lm_from_scratch.layers.norm import rms_norm

torch.set_grad_enabled(False)
generator = torch.Generator().manual_seed(4)
points = torch.randn(24, 2, generator=generator)  # (T, C)
normed = rms_norm(points, weight=torch.ones(2))  # (T, C)

from lm_from_scratch.instruments.plot import COLOURS, GREY, figure

drawn, (ax,) = figure(4.0, 3.6)
ax.add_patch(plt.Circle((0, 0), 2**0.5, fill=False, color=GREY))
for start, end in zip(points, normed):
    ax.plot(*zip(start, end), color=GREY, linewidth=0.8)
ax.plot(*points.T, "o", color=COLOURS[0], markersize=5, label="before")
ax.plot(*normed.T, "D", color=COLOURS[3], markersize=5, label="after")
ax.set(title="RMSNorm of 24 tokens", xlabel="feature 0", ylabel="feature 1")
ax.set(xlim=(-3.2, 3.2), ylim=(-3.2, 3.2), aspect="equal")
ax.legend(frameon=False)
plt.show()
assert (normed.norm(dim=-1) - 2**0.5).abs().max() < 0.01

# %%
# Square, average, root, divide
# -----------------------------
#
# The name is the recipe, read from right to left: *root mean square*. Square the features of a token, take their mean,
# take the root, and divide the features by it.
#
# .. math::
#
#    y_c = \frac{x_c}{\sqrt{m + \epsilon}} \, w_c \qquad m = \frac{1}{C} \sum_c x_c^2
#
# Here C is the number of features. The weight w has one learned number for each feature, and :math:`\epsilon`, in code
# ``eps``, is a tiny number. We will see later what the two are for. The dots in ``(..., C)`` mean any sizes.


def norm(x, weight, eps=1e-6):
    mean_square = x.square().mean(-1, keepdim=True)  # (..., 1)
    r = torch.rsqrt(mean_square + eps)  # one over the root
    return x * r * weight  # (..., C)


norm(torch.tensor([3.0, 4.0]), weight=1)

# %%
# By hand: the squares of 3 and 4 are 9 and 16, their mean is 12.5, and its root is 3.54. So 3 becomes 0.85, and 4
# becomes 1.13. The squares of the *result* have mean 1.
#
# **Predict first.** What does ``norm`` make of (300, 400)?
#
# * 85 and 113: a hundred times as much
# * 0.85 and 1.13: the same
# * 0.0085 and 0.0113: a hundred times less

short, long = torch.tensor([3.0, 4.0]), torch.tensor([300.0, 400.0])
print(norm(long, weight=1))
assert torch.allclose(norm(long, 1), norm(short, 1), atol=1e-6, rtol=0.0)
assert abs(norm(short, 1).square().mean() - 1) < 1e-6
assert torch.allclose(norm(short, 1), torch.tensor([0.85, 1.13]), atol=0.01)
assert torch.allclose(norm(points, 1), normed)

# %%
# 0.85 and 1.13: the same. The token is a hundred times longer, and so is the number that divides it. The norm ignores scale.
#
# Why a model wants that
# ----------------------
#
# Every block *adds* its results to the residual stream. It may add the negative of something, but it never resets the
# stream. Call a token's row of the stream its *state*. What happens to the length of a state? Let the small Qwen2 of
# this course read a sentence. It has 8 blocks, so there are 17 norms.
#
# To see what each norm reads, we give it a *hook*: a function that PyTorch calls just before the norm runs.

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.layers.norm import RMSNorm

model, tokenizer = load_shipped("qwen2-docs")
ids = tokenizer.start("If the file does not exist, an error is raised.")
states = []
for module in model.modules():
    if isinstance(module, RMSNorm):
        module.register_forward_pre_hook(
            lambda module, args: states.append(args[0])
        )
model(torch.tensor([ids]))
states = torch.cat(states)  # (17, T, C)
states.shape

# %%
# **Predict first.** How much longer are the states of the words at the last norm than at the first?
#
# * About as long: the model keeps its states in shape
# * 5 times
# * 30 times or more

before = states.norm(dim=-1)  # (17, T)
words = before[:, 1:].mean(-1)  # (17,), without the token that starts the text
print(f"{words[-1] / words[0]:.0f} times")
assert len(states) == 17 and words[-1] > 70 * words[0]

# %%
# 30 times or more: every block adds to the state, and nothing ever shortens it.
#
# Here are all 17 norms, from left to right. From
# :math:`10^0` to :math:`10^1` the length is ten times as large. The grey line is the length after the norm, before the
# weight is applied.

root = states.shape[-1] ** 0.5
ones = torch.ones(states.shape[-1])
after = rms_norm(states, ones).norm(dim=-1)  # (17, T)

drawn, (ax,) = figure(4.6, 3.2)
ax.semilogy(before[:, 0], "s--", color=COLOURS[1], label="start of the text")
ax.semilogy(words, "o-", label="words (mean)")
ax.semilogy(after.mean(-1), color=GREY, linewidth=3, label="after the norm")
ax.set(title="Length of a token's state", xlabel="norm", ylabel="length")
ax.legend(frameon=False)
plt.show()
assert (after[2:] - root).abs().max() < 0.001
assert (after - root).abs().max() < 0.05
assert before[-1, 0] > 4 * before[-1, 1:].max()

# %%
# Attention and MLP read the state through a norm. Whatever has piled up in the state, they get a copy of
# length :math:`\sqrt{C}`, here :math:`\sqrt{128} = 11.3`. So every block, early or late, is trained on
# inputs of one length. The state itself stays as long as it is.
#
# The state of the start token ``<|endoftext|>`` is by far the longest. Larger models have such tokens too, with single
# features above 1,000 (`Sun et al., 2024 <https://arxiv.org/abs/2402.17762>`_). We will need that number at the end of this page.
#
# After the division, the *weight* says how much each feature counts. In this model the last norm multiplies by 2
# to 3: longer vectors make larger logits, and so more confident predictions.

weight = model.model.norm.weight  # (C,)
print(f"from {weight.min():.1f} to {weight.max():.1f}")
assert 2 < weight.min() < weight.mean() < weight.max() < 3.4

# %%
# What LayerNorm does in addition
# -------------------------------
#
# GPT-2 uses LayerNorm. It subtracts the mean of a token's features before it divides, and adds a learned bias at the
# end. RMSNorm does neither.
#
# Does the model need the subtraction? Let us take it away from a model that was trained with it. This hook runs *after*
# each of the 17 LayerNorms of our small GPT-2, and replaces the result by one without the subtraction.

import copy

from lm_from_scratch.layers.layer_norm import LayerNorm

gpt2, tokenizer = load_shipped("gpt2-docs")
without = copy.deepcopy(gpt2)


shares = []  # size of the mean, by the spread of the features


def keep_the_mean(module, args, result):
    x = args[0]  # (B, T, C)
    shares.append((x.mean(-1).abs() / x.std(-1)).mean())
    return rms_norm(x, module.weight, module.eps) + module.bias


for module in without.modules():
    if isinstance(module, LayerNorm):
        module.register_forward_hook(keep_the_mean)

# %%
# How much worse does GPT-2 predict four texts now?

from lm_from_scratch.text.corpora import load_corpus
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss

for document in load_corpus("reference")[:4]:
    idx = torch.tensor([tokenizer.start(document.text)[:256]])
    targets = next_token_targets(idx)
    loss, loss_without = (
        causal_lm_loss(m(idx), targets) for m in (gpt2, without)
    )
    print(f"loss {loss:.3f}, without the subtraction {loss_without:.3f}")
    assert (loss_without - loss).abs() < 0.02
assert len(shares) == 4 * 17 and max(shares) < 0.04

# %%
# No loss moves by more than 0.02. At each of the 17 norms, the mean of a token's features is less than 4 % of their
# spread, averaged over the tokens: there is hardly anything to subtract. RMSNorm does the part that matters with
# less work, and most models since Llama use it.
#
# A story about squares
# ---------------------
#
# In 2024 somebody `replaced the norm of a Llama <https://github.com/pytorch/pytorch/pull/133085>`_ with PyTorch's own,
# which was new. In float32 the answers were good. In float16, which stores a number in two bytes instead of four, they
# were wrong, and there was no error message.
#
# **Predict first.** The norm squares its input. What are the squares of 0.0001, 1 and 256 in float16?
#
# * 0.00000001, 1 and 65536
# * 0, 1 and infinity
# * 0, 1 and 65504, the largest number there is

torch.tensor([1e-4, 1.0, 256.0], dtype=torch.float16).square()

# %%
# 0, 1 and infinity: both ends are lost. A small square *underflows* to 0. Without epsilon the norm would then divide by zero: that is what
# epsilon is for. A large square becomes infinity, and one over its root is 0. So a token with a feature of 1,000
# becomes a row of zeros.
#
# To see where this begins, we put tokens of 91 sizes through ``norm`` in float16. A token's *size* is the root of its
# mean square, which should be 1 after the norm.


def size_after(norm, x):
    y = norm(x, torch.ones_like(x[0]))
    return y.float().square().mean(-1).sqrt()


sizes = torch.logspace(-5, 4, 91)  # 0.00001 to 10,000
x = (sizes[:, None] * torch.ones(2)).half()
in_float16, in_float32 = size_after(norm, x), size_after(rms_norm, x)

drawn, (ax,) = figure(4.6, 2.8)
ax.semilogx(sizes, in_float32, color=GREY, linewidth=4, label="in float32")
ax.semilogx(sizes, in_float16, "--", color=COLOURS[3], label="in float16")
ax.set(title="Size of a token after the norm", xlabel="size before")
ax.legend(frameon=False, loc="lower center")
plt.show()
assert in_float16[sizes > 257].eq(0).all()
assert (in_float32[sizes > 0.01] - 1).abs().max() < 0.01
assert in_float16[(sizes > 0.1) & (sizes < 200)].gt(0.99).all()
assert torch.nn.functional.rms_norm(x[sizes > 257], x.shape[1:]).eq(1).all()

# %%
# From size 256 on, nothing is left in float16. The fix is to square in float32 and to round only the result. The
# package's ``rms_norm`` does that, Llama's own norm did, and by now PyTorch's norm does, too. On the left, both curves
# fall for a good reason: a token much smaller than :math:`\sqrt{\epsilon}` is noise, and epsilon keeps it small.
#
# The gradient, the cost, rounding, and more mistakes are in
# `RMSNorm in depth <1a_rms_norm_in_depth.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* Normalise (3, 4) and (4, 3), then (8, 9) and (9, 8), with RMSNorm and with LayerNorm (weights 1, biases 0).
#    A good answer names what LayerNorm can no longer tell apart.
# 2. *Easy.* Let a forward hook multiply what ``model.model.embed_tokens`` returns by 10, and compare the logits. A
#    right answer explains why they change although the norm ignores scale. Hint: what do the blocks add to the state?
# 3. *Medium.* Fold the weight of a norm into the ``nn.Linear`` that reads its output: new matrix, norm weight 1, same
#    result. A good answer equals the original to 1e-5, and says why the bias of a LayerNorm needs a bias in the
#    linear layer. Hint: scale the columns of the matrix.
#
# Summary
# -------
#
# * RMSNorm divides a token by the root of the mean of its squares: the direction stays, the length becomes
#   :math:`\sqrt{C}`.
# * States grow from block to block, more than 70 times here. The norm gives every block inputs of one size.
# * Square in float32: in float16 small squares become 0, and large ones infinity.
