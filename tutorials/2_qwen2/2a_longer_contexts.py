r"""
Longer contexts in depth
========================

RoPE has no table that ends, so a Qwen2 computes at any length. Does it still predict well? And what do linear
scaling, dynamic NTK, YaRN and Llama 3's scaling change?

This page deepens the lesson on `RoPE <2_rope.ipynb>`_. It measures all of them on a model that was trained on L = 256
tokens and reads 1024.

Four times the trained length
-----------------------------

The first test cuts the same held-out text into pieces of 256, 512 and 1024 tokens: one, two and four times the trained
length. Every length predicts the same tokens. Longer pieces give more context, so a model that could use it would only
get better.
"""

# sphinx_gallery_words = ["rope_scaling", "NTK", "position interpolation", "context window", "long context", "linear scaling", "extend context length", "max_position_embeddings", "extrapolation", "maximum context length", "longer prompt than trained", "how long can a prompt be", "read longer documents", "long documents", "longer than in training", "beyond the training length", "train short test long", "128k", "32k", "one million tokens", "extend the context", "context extension", "context length", "increase max_position_embeddings", "Llama 3.1", "dynamic NTK", "token indices sequence length is longer than the specified maximum", "prompt too long", "text too long", "whole book"]

import copy
import dataclasses
import inspect
import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.plot import COLOURS, GREY, figure
from lm_from_scratch.layers.rope import (
    RotaryEmbedding,
    apply_rope,
    inverse_frequencies,
)
from lm_from_scratch.models.qwen2 import SIZES, Qwen2Config
from lm_from_scratch.text.corpora import load_split

torch.set_grad_enabled(False)
transformers.utils.logging.set_verbosity_error()

trained, tokenizer = load_shipped("qwen2-docs")
L = trained.config.block_size
assert L == 256

_, held_out = load_split(["reference"], held_out=0.05)
texts = [tokenizer.encode(document.text) for document in held_out]
rows = [
    torch.tensor(ids[start : start + 4 * L + 1])
    for ids in texts
    for start in list(range(0, len(ids) - 4 * L, 4 * L))[:3]
]
rows = torch.stack(rows[:3])  # (B, 4 L + 1)
print(f"{len(rows)} rows of {4 * L} tokens and the token after")
assert len(rows) > 2


def losses(model, length):
    """The loss of every token (B, 4 L), read in pieces of that length."""
    result = []
    for row in rows:
        idx = row[:-1].view(-1, length)
        logits = model(idx).flatten(0, 1)  # (4 L, V)
        result.append(F.cross_entropy(logits, row[1:], reduction="none"))
    return torch.stack(result)


lengths = [L, 2 * L, 4 * L]
plain = {length: losses(trained, length) for length in lengths}
for length in lengths:
    print(f"{length:5} tokens  loss {plain[length].mean():.3f}")
assert plain[4 * L].mean() > plain[2 * L].mean() > plain[L].mean()

# %%
# The loss rises. Is the place of a token the problem, or its distance to others? A model with a sliding window of 256
# keys reads the same 1024 tokens, with the same weights and the same positions, and sees no distance above 255.

config = dataclasses.replace(
    trained.config, sliding_window=L, max_window_layers=0
)
windowed = build(config).eval()
windowed.load_state_dict(trained.state_dict())
near = losses(windowed, 4 * L)


def second_half(loss):
    return loss[:, 2 * L :].mean().item()


print(f"second half of the rows: all keys {second_half(plain[4 * L]):.3f}")
print(f"                  only {L} keys {second_half(near):.3f}")
torch.testing.assert_close(
    near[:, :L], plain[4 * L][:, :L], atol=1e-4, rtol=0.0
)
assert second_half(plain[4 * L]) > second_half(near)

# %%
# The figure follows the rows of 1024 tokens from left to right. A point is the mean loss of 128 tokens.

middle = torch.arange(64, 4 * L, 128)


def along(loss):
    """The mean loss of each 128 tokens of the rows."""
    return loss.view(len(rows), -1, 128).mean((0, 2))


drawn, (ax,) = figure(4.8, 3.2)
ax.plot(middle, along(plain[4 * L]), "D-", color=COLOURS[3], label="all keys")
ax.plot(middle, along(near), "o--", label=f"the last {L} keys")
ax.axvline(L, color=GREY, linewidth=1)
ax.set(title="Loss, read at 4 times the trained length")
ax.set(xlabel="position in the row", ylabel="loss")
ax.legend(frameon=False)
plt.show()

# %%
# With fewer keys the model predicts better, at the same positions. So large positions are not the problem. Two suspects
# are left: the unseen angles, and the mere number of keys. In the first 256 tokens the two models agree.
#
# Fast pairs and slow pairs
# -------------------------
#
# Which angles are unseen? Pair i turns by :math:`\omega_i = \theta^{-2i/D}` at each position, and has turned once after
# :math:`2\pi / \omega_i` tokens, its *wavelength*. Wavelengths grow geometrically, from :math:`2\pi` tokens to
# :math:`2\pi\theta^{1 - 2/D}`.
#
# A pair with a short wavelength tells neighbours apart, but cannot tell a distance from the same distance plus a turn.
# A pair with a long one hardly moves.


def whole_turns(head_dim, theta, length):
    """How many pairs complete at least one turn within the length."""
    speeds = inverse_frequencies(head_dim, theta, dtype=torch.float64)
    return int((speeds * length >= 2 * math.pi).sum())


small = Qwen2Config(**SIZES["Qwen2-0.5B"])
for name, config in {"shipped": trained.config, "Qwen2-0.5B": small}.items():
    D, theta, length = config.head_dim, config.rope_theta, config.block_size
    count = whole_turns(D, theta, length)
    print(f"{name:11} theta {theta:9,.0f}  length {length:6,}", end="  ")
    print(f"{count} of {D // 2} pairs turn at least once")
assert whole_turns(32, 10_000.0, 256) == 7
assert whole_turns(64, 1_000_000.0, 32_768) == 20

# %%
# The smallest published Qwen2 has a larger base, because it reads longer texts. Even so, 12 of its 32 pairs do not
# complete a turn in 32,768 tokens. In the model that comes with the course, 9 of 16 do not complete one in 256.
#
# A pair that has turned at least once in training has shown every angle. A slower pair has shown only a part of the
# circle. At a longer distance it reaches angles that no query and key have ever met.
#
#
# Slowing the pairs down
# ----------------------
#
# If the angles are the problem, slower pairs are a cure, with all keys in sight. To read s times the trained length L,
# the slow pairs must turn s times slower: then they stay within what they have shown. Four ways are in use:
#
# * *Linear*: all pairs turn s times slower. The slow pairs are saved, but the fast ones now see neighbours s times
#   closer than in training.
# * *Dynamic NTK*: a larger base :math:`\theta`, chosen for the length at hand. The last pair slows by s and the first
#   keeps its speed. Up to the length L nothing changes. (With ``factor=1``, s is the length of the row divided by L.)
# * *YaRN*: pairs that turn often within L keep their speed, those that do not complete a turn slow by s, with a ramp
#   between. Scores are stretched a little, by the square of :math:`0.1 \ln s + 1`.
# * *Llama 3*: the same idea with another ramp, and no stretching.
#
# In formulas, with a share :math:`\kappa_i` between 1 (keep the speed) and 0 (slow down) for the ramps:
#
# .. math::
#
#    \text{linear} &: \quad \omega_i' = \omega_i / s \\
#    \text{dynamic NTK} &: \quad \omega_i' = (\theta \, s^{D/(D-2)})^{-2i/D} \\
#    \text{YaRN, Llama 3} &: \quad \omega_i' = \kappa_i \, \omega_i + (1 - \kappa_i) \, \omega_i / s

from lm_from_scratch.layers.rope_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    YaRNScaling,
)

s = 4.0
scalings = {
    "linear": LinearScaling(factor=s),
    "dynamic NTK": DynamicNTKScaling(factor=1.0, original_length=L),
    "YaRN": YaRNScaling(factor=s, original_length=L),
    "Llama 3": Llama3Scaling(
        factor=s, low_freq_factor=1.0, high_freq_factor=4.0, original_length=L
    ),
}
print(inspect.getsource(YaRNScaling.frequencies))

# %%
# The upper figure shows the wavelengths before scaling, with the trained length as a line. The lower one divides each
# pair's speed by its speed before, for rows of 1024 tokens.

D, theta = trained.config.head_dim, trained.config.rope_theta
before = inverse_frequencies(D, theta)
positions = torch.arange(4 * L)[None]
ratio, stretch = {}, {}
for name, scaling in scalings.items():
    speeds, stretch[name] = scaling.frequencies(positions, D, theta)
    ratio[name] = (speeds / before).flatten()

torch.testing.assert_close(ratio["linear"], torch.full((D // 2,), 1 / s))
ntk = inverse_frequencies(D, theta * s ** (D / (D - 2)))
torch.testing.assert_close(ratio["dynamic NTK"], ntk / before)
assert all((one <= 1 + 1e-6).all() for one in ratio.values())

styles = dict(zip(scalings, ("-", "--", "-.", ":")))
markers = dict(zip(scalings, "os^x"))
drawn, (above, below) = figure(4.8, 5.4, rows=2)
above.semilogy(2 * math.pi / before, marker="o")
above.axhline(L, color=COLOURS[3], linestyle="--", label=f"L = {L}")
above.set(title="Wavelength of a pair, in tokens", xlabel="pair i")
above.legend(frameon=False)
for name in ratio:
    line = dict(linestyle=styles[name], marker=markers[name], markersize=5)
    below.plot(ratio[name], label=name, **line)
below.set(title="Speed after scaling / before", xlabel="pair i")
below.set(ylim=(0, 1.1))
below.legend(frameon=False)
plt.show()

# %%
# At the last pair all four have slowed by 4. At the first pair, linear has slowed by 4 as well, and the other three
# by nothing. YaRN's usual border for a fast pair is 32 turns. In 256 tokens the first pair makes more, the second does
# not, so the ramp begins at once.

turns = L * before / (2 * math.pi)
assert turns[0] > scalings["YaRN"].beta_fast > turns[1]
for name in ratio:
    first, last = ratio[name][0].item(), ratio[name][-1].item()
    assert abs(last - 1 / s) < 1e-5
    assert abs(first - (1 / s if name == "linear" else 1.0)) < 1e-5
assert abs(stretch["YaRN"] - (0.1 * math.log(s) + 1)) < 1e-12
assert all(stretch[name] == 1 for name in stretch if name != "YaRN")

# %%
# Are they right? ``transformers`` has all four. Its rotary embedding turns random queries as ours does, within
# the trained length and beyond it.

from transformers.models.qwen2 import modeling_qwen2 as oracle

from lm_from_scratch.checkpoint.rope_configs import scaling_to_dict

generator = torch.Generator().manual_seed(0)
for name, scaling in {"none": None, **scalings}.items():
    config = transformers.Qwen2Config(
        hidden_size=4 * D,
        num_attention_heads=4,
        max_position_embeddings=L if name == "dynamic NTK" else 4 * L,
        rope_parameters=scaling_to_dict(theta, scaling),
    )
    theirs = oracle.Qwen2RotaryEmbedding(config)
    ours = RotaryEmbedding(D, theta, scaling)
    errors = []
    for T in (L - 7, 4 * L):
        positions = torch.arange(T)[None]
        q = torch.randn(2, 4, T, D, generator=generator)  # (B, H, T, D)
        k = torch.randn(2, 2, T, D, generator=generator)  # (B, Hkv, T, D)
        pair = oracle.apply_rotary_pos_emb(q, k, *theirs(q, positions))
        for x, expected in zip((q, k), pair):
            turned = apply_rope(x, *ours(positions, x.dtype))
            errors.append((turned - expected).abs().max().item())
    print(f"{name:12} largest error {max(errors):.0e}")
    assert max(errors) < 1e-5

# %%
# Now the trained model reads the held-out text with each of them. Nothing is trained again: one object in the model
# gets another scaling.


def rescaled(scaling):
    model = copy.deepcopy(trained)
    model.model.rotary_emb.scaling = scaling
    return model


table, ends = {"none": plain}, (L, 4 * L)
for name, scaling in scalings.items():
    model = rescaled(scaling)
    table[name] = {n: losses(model, n) for n in ends}

print("loss" + " " * 10 + "".join(f"{n:8}" for n in ends) + "   2nd half")
for name, row in table.items():
    numbers = "".join(f"{row[n].mean():8.3f}" for n in ends)
    print(f"{name:14}{numbers}{second_half(row[4 * L]):11.3f}")
print(f"{'only 256 keys':14}{'':8}{near.mean():8.3f}{second_half(near):11.3f}")

# %%
# The columns are the pieces of 256 and of 1024 tokens, and then the second half of the longest rows. The figure shows
# these rows from left to right: the mean loss of 128 tokens, minus that of the model that sees 256 keys.

drawn, (ax,) = figure(4.8, 3.6)
colours = (COLOURS[4], *COLOURS[:4])
for (name, row), colour in zip(table.items(), colours):
    gap = along(row[4 * L] - near)
    line = dict(linestyle=styles.get(name, "-"), color=colour)
    ax.plot(middle, gap, marker=markers.get(name, "D"), label=name, **line)
ax.axvline(L, color=GREY, linewidth=1)
ax.axhline(0, color=GREY, linewidth=1)
ax.set(title="Loss minus loss with 256 keys", xlabel="position in the row")
drawn.legend(loc="outside lower center", ncols=3, frameon=False)
plt.show()

# %%
# Dynamic NTK costs nothing for texts up to the trained length: see the column 256. (Every row of the figure has 1024
# tokens, so there it slows the pairs down from the first token on.) Linear scaling costs most in that column: without
# more training, every neighbour seems to be at a quarter of its distance.
#
# In the second half of the long rows, the three scalings that spare the fast pairs are better than none, and better
# than linear. They see all 1024 keys, and win back more than half of what the window wins back. So the angles were the
# problem, more than the number of keys.

torch.testing.assert_close(
    table["dynamic NTK"][L], plain[L], atol=1e-4, rtol=0.0
)
assert all(
    table["linear"][L].mean() > row[L].mean()
    for name, row in table.items()
    if name != "linear"
)
for name in ("dynamic NTK", "YaRN", "Llama 3"):
    late = second_half(table[name][4 * L])
    assert late < second_half(plain[4 * L])
    assert late < second_half(table["linear"][4 * L])
    lost = second_half(plain[4 * L]) - second_half(near)
    assert 0 < late - second_half(near) < lost / 2

# %%
# .. note::
#
#    Scaling alone limits the damage of long texts: none of the three beats the window of 256 keys here. Position
#    Interpolation, YaRN and Llama 3.1 train further at the new length.
#
# So which scaling is yours? The one in the ``config.json`` of the checkpoint, with which the model was trained. For a
# model that never saw one, dynamic NTK costs nothing on short texts, but its speeds change while a text grows, and
# keys that are already in a cache were turned with the old ones (exercise 2).
#
# Exercises
# ---------
#
# 1. *Easy.* What is the largest :math:`\theta` with which all 16 pairs of the trained model turn at least once in 256
#    tokens? Solve for it, then check with ``whole_turns``. A good answer lies between 50 and 55. Hint: only the last
#    pair matters.
# 2. *Medium.* Give the trained model dynamic NTK, and let it read 200 tokens with ``GrowingCache`` in pieces of 100
#    and in one pass; then 300. A good answer shows equal logits for 200, and for 300 a difference from the second
#    token on. Hint: the docstring of ``DynamicNTKScaling`` says why; print the frequencies of each piece.
# 3. *Hard.* Train the shipped model for a hundred steps on two rows of 1024 tokens each, with
#    ``LinearScaling(factor=4)`` and, as a control, with no scaling. A good answer shows that the loss of linear
#    scaling in the second half falls by more than half a nat, and says what the control adds. Hint: ``PackedBatches``
#    over the training side of ``load_split``, AdamW, a learning rate of 2e-4; save the models and compare them with
#    ``losses``.
#
# Summary
# -------
#
# * Slow pairs do not complete a turn in training: 9 of 16 in the shipped model, 12 of 32 in the smallest published
#   Qwen2. Beyond the trained length the loss is worse than with a window of 256 keys.
# * Scaling slows pairs down. Dynamic NTK changes nothing up to the trained length; keeping the fast pairs is better
#   than slowing all of them. All four equal ``transformers`` to 1e-5.
# * Scaling limits the damage. To use longer texts well, a model must be trained further on them.
#
# Sources
# -------
#
# * Chen et al.: `Position Interpolation <https://arxiv.org/abs/2306.15595>`_, 2023. Linear scaling.
# * Peng et al.: `YaRN <https://arxiv.org/abs/2309.00071>`_, 2023. Also describes dynamic NTK.
# * Grattafiori et al.: `The Llama 3 Herd of Models <https://arxiv.org/abs/2407.21783>`_, 2024. The models; the
#   scaling is in Meta's code.
# * `The rotation of Qwen2 in transformers
#   <https://github.com/huggingface/transformers/blob/main/src/transformers/models/qwen2/modeling_qwen2.py>`_. The
#   oracle of this page.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
