r"""
RoPE: positions as rotations
============================

Attention is a mean, and a mean does not know the order of what it averages. GPT-2 adds a learnt vector for each
position. Qwen2, Llama and many others turn queries and keys instead, by an angle that grows with the position.

Why does a rotation tell attention how far apart two tokens are, and nothing else? What happens at distances that
training never showed? And why do two programs with the same weights disagree, although both are right? This page
answers with proofs, a trained model, and old mistakes.

.. live:: clock

You will learn
--------------

* what the rotation does to a query, pair by pair, and why scores depend on the distance alone,
* which pairs tell neighbours apart, and which ones never complete a turn in training,
* what fails beyond the trained length, and what linear, dynamic NTK, YaRN and Llama 3 scaling do about it,
* the two layouts of pairs, the converter between them, and its proof,
* which numbers must stay in float32.

Before you start
----------------

Read the page on `GPT-2 <../1_gpt2/2_gpt2.ipynb>`_, for attention, and the one on `RMSNorm <1_rms_norm.ipynb>`_. You
need sine and cosine; complex numbers help. A CPU is enough, ``transformers`` must be installed, and nothing is
downloaded.

Letters name axes: B rows, T tokens, C features of a token, H query heads, Hkv key heads, D features of a head.

A pair is an arrow
------------------

The D features of a head are D/2 pairs. A pair (a, b) is an arrow in a plane. At position t, pair i is turned by the
angle :math:`t \, \omega_i`, with one speed for each pair:

.. math::

   a' &= a \cos t\omega_i - b \sin t\omega_i \\
   b' &= a \sin t\omega_i + b \cos t\omega_i \\
   \omega_i &= \theta^{-2i/D}

For D = 8 and :math:`\theta = 10000` there are four speeds, in radians per token.
"""

import inspect
import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from lm_from_scratch.instruments.plot import COLOURS, GREY, figure
from lm_from_scratch.layers.rope import (
    RotaryEmbedding,
    apply_rope,
    apply_rope_interleaved,
    inverse_frequencies,
    rotation,
)

torch.set_grad_enabled(False)
transformers.utils.logging.set_verbosity_error()

inv_freq = inverse_frequencies(8, theta=10000.0)
print([round(speed, 4) for speed in inv_freq.tolist()])
torch.testing.assert_close(inv_freq, torch.tensor([1.0, 0.1, 0.01, 0.001]))

# %%
# The figure turns one arrow of length 1 in three of these pairs. The labels are positions.

x = torch.zeros(8)
x[:4] = 1.0  # a = 1 and b = 0 in every pair
positions = torch.arange(7)[None]  # (B, T)
cos, sin = rotation(positions, inv_freq)  # (B, 1, T, D/2)
turned = apply_rope(x.expand(1, 1, 7, 8), cos, sin)[0, 0]  # (T, D)

made, axes = figure(7.0, 2.8, columns=3)
for ax, pair in zip(axes, (0, 1, 2)):
    for t, (a, b) in enumerate(turned[:, [pair, pair + 4]].tolist()):
        ax.annotate("", (a, b), (0, 0), arrowprops=dict(arrowstyle="->"))
        if t % (1, 3, 6)[pair] == 0 and (t > 0 or pair < 2):
            ax.text(1.18 * a, 1.18 * b, t, ha="center", va="center")
    ax.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal")
    ax.set(xticks=(-1, 0, 1), yticks=(-1, 0, 1), xlabel="a", ylabel="b")
    ax.set_title(f"Pair {pair}: {inv_freq[pair]:.2g} rad")
plt.show()

# %%
# The first pair turns almost once in six tokens. The third has moved by 0.06 radians, so its seven arrows are nearly
# one. A rotation changes no length, so the size of a query does not depend on where it stands.

torch.testing.assert_close(turned.norm(dim=-1), torch.full((7,), 2.0))
assert 0.9 < 6 * inv_freq[0] / (2 * math.pi) < 1
assert abs(6 * inv_freq[2] - 0.06) < 1e-6

# %%
# The package says it in two functions. ``rotation`` makes the cosines and sines, once for all layers. ``apply_rope``
# uses them on the queries and on the keys. Values are not turned.

print(inspect.getsource(rotation))
print(inspect.getsource(apply_rope))

# %%
# Only the distance is left
# -------------------------
#
# Write a pair as the complex number :math:`z = a + ib`. To turn it by an angle is to multiply it with a number of
# length 1, and the dot product of two pairs is a real part:
#
# .. math::
#
#    z' &= e^{i t \omega} z \\
#    q \cdot k &= \operatorname{Re}(q \, \overline{k})
#
# Let the query stand at position m and the key at position n. The conjugate turns the sign of the key's angle, and
# the two angles join to one:
#
# .. math::
#
#    q' \cdot k' = \operatorname{Re}\left( e^{i m \omega} q \; \overline{e^{i n \omega} k} \right)
#    = \operatorname{Re}\left( e^{i (m - n) \omega} \, q \, \overline{k} \right)
#
# A head adds this over its pairs. The positions m and n are gone, and :math:`m - n` is left. That is the proof; here
# it is in numbers. One query and one key, random and in float64, are put at each of 48 positions.

D, T = 32, 48
generator = torch.Generator().manual_seed(0)
q_half, k_half = torch.randn(2, D, dtype=torch.float64, generator=generator)
inv_freq = inverse_frequencies(D, 10000.0, dtype=torch.float64)
positions = torch.arange(T)[None]
cos, sin = rotation(positions, inv_freq)

q_turned = apply_rope(q_half.expand(1, 1, T, D), cos, sin)[0, 0]  # (T, D)
k_turned = apply_rope(k_half.expand(1, 1, T, D), cos, sin)[0, 0]
scores = q_turned @ k_turned.T  # (T, T): row m, column n

# %%
# Every diagonal of this matrix holds one number, and the formula gives that number.

distance = positions.T - positions  # (T, T): m - n
z_q = torch.complex(*q_half.view(2, D // 2))  # halves a and b
z_k = torch.complex(*k_half.view(2, D // 2))
turn = torch.polar(torch.ones(()).double(), distance[..., None] * inv_freq)
formula = (turn * z_q * z_k.conj()).real.sum(-1)  # (T, T)
torch.testing.assert_close(scores, formula, atol=1e-12, rtol=0.0)

spread = [scores.diagonal(d).max() - scores.diagonal(d).min() for d in range(T)]
print(f"largest difference within a diagonal {max(spread):.0e}")
assert max(spread) < 1e-12

# %%
# On the left is that matrix. On the right, the score is followed over longer distances: a sum of sixteen waves.

far = torch.arange(400.0, dtype=torch.float64)[:, None] * inv_freq
wave = (torch.polar(torch.ones(()).double(), far) * z_q * z_k.conj()).real

# sphinx_gallery_thumbnail_number = 2
# sphinx_gallery_museum = ["Q11"]
made, (left, right) = figure(7.0, 3.2, columns=2)
limit = scores.abs().max()
image = scores.numpy()
shown = left.imshow(image, cmap="RdBu", vmin=-limit, vmax=limit)
made.colorbar(shown, ax=left, shrink=0.7)
left.grid(False)
left.set(title="Score", xlabel="position of the key, n")
left.set(ylabel="position of the query, m")
right.plot(wave.sum(-1), label="all 16 pairs")
right.plot(wave[:, 8:].sum(-1), linestyle="--", label="the 8 slow pairs")
right.set(title="Score by distance", xlabel="m - n")
right.legend(frameon=False)
plt.show()

# %%
# It is sometimes said that scores shrink with distance. They need not: for this query and key the score is larger in size
# at some distance of 100 or more than at distance 0.

assert wave[100:].sum(-1).abs().max() > wave[0].sum().abs()

# %%
# So a model with RoPE cannot tell a text from the same text further on. Here is a trained one: the small Qwen2 that
# comes with the package, which read texts of up to 256 tokens of Python's documentation. It reads held-out text twice,
# in float64, at its own positions and 100,000 further on.

import copy

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.text.corpora import load_split

trained, tokenizer = load_shipped("qwen2-docs")
L = trained.config.block_size
_, held_out = load_split(["reference"], held_out=0.05)
texts = [tokenizer.encode(document.text) for document in held_out]
rows = [
    torch.tensor(ids[start : start + 4 * L + 1])
    for ids in texts
    for start in list(range(0, len(ids) - 4 * L, 4 * L))[:3]
]
rows = torch.stack(rows[:4])  # (B, 4 L + 1)
print(f"{len(rows)} rows of {4 * L} tokens and the token after")
assert L == 256 and len(rows) > 2

# %%

exact = copy.deepcopy(trained).double()
idx = rows[:1, :L]
here = exact(idx, positions=torch.arange(L)[None])
there = exact(idx, positions=torch.arange(L)[None] + 100_000)
print(f"a logit moves by {(there - here).abs().max():.0e}")
assert (there - here).abs().max() < 1e-7

# %%
# So RoPE adds nothing about *where* a token is. It says how far away another one is, with no table and no parameter,
# and only the precision of numbers ends the range of positions.
#
# Fast pairs and slow pairs
# -------------------------
#
# Pair i has turned once after :math:`2\pi / \omega_i` tokens, its wavelength. Wavelengths grow geometrically, from
# :math:`2\pi` tokens to :math:`2\pi\theta^{1 - 2/D}`. A pair with a short one tells neighbours apart, but
# cannot tell a distance from the same distance plus a turn. A pair with a long one hardly moves.


def whole_turns(head_dim, theta, length):
    """How many pairs complete at least one turn within the length."""
    speeds = inverse_frequencies(head_dim, theta, dtype=torch.float64)
    return int((speeds * length >= 2 * math.pi).sum())


from lm_from_scratch.models.qwen2 import SIZES, Qwen2Config

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
# complete a turn in 32,768 tokens. In our trained model, 9 of 16 do not complete one in 256.
#
# Past the trained length
# -----------------------
#
# A pair that has turned at least once in training has shown every angle. A slower pair has shown only a part of the
# circle. At a longer distance it reaches angles that no query and key have ever met.
#
# The next test cuts the same held-out text into pieces of 256, 512 and 1024 tokens, which is one, two and four times
# the trained length. Every length predicts the same tokens. Longer pieces give more context, so a model that could
# use it would only get better.


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

# %%
# Is the place of a token the trouble, or its distance to others? A model with a sliding window of 256 keys reads the
# same 1024 tokens, with the same weights and the same positions, and sees no distance above 255.

import dataclasses

from lm_from_scratch.models.causal_lm import build

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
# With fewer keys the model predicts better, at the same positions. So the places are not the trouble. Two suspects are
# left: the unseen angles, and the mere number of keys. In the first 256 tokens the two models agree.
#
# Slowing the pairs down
# ----------------------
#
# If the angles are the trouble, slower pairs are a cure, with all keys in sight. To read s times the trained length L,
# the slow pairs must turn s times slower: then they stay within what they have shown. Four ways are in use:
#
# * *Linear*: all pairs turn s times slower. The slow pairs are saved, but the fast ones now see neighbours s times
#   closer than in training.
# * *Dynamic NTK*: a larger base :math:`\theta`, chosen for the length at hand. The last pair slows by s and the first
#   keeps its speed. Up to the length L nothing changes. (With ``factor=1``, s is the length of the row divided by L.)
# * *YaRN*: pairs that turn often within L keep their speed, those that do not complete a turn slow by s, with a ramp
#   between. Scores are stretched a little, by the square of :math:`0.1 \ln s + 1`.
# * *Llama 3*: the same idea with another ramp, and no stretching.

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
# The upper figure has the wavelengths before scaling, with the trained length as a line. The lower one divides each
# pair's speed by its speed before, for rows of 1024 tokens.

D, theta = trained.config.head_dim, trained.config.rope_theta
before = inverse_frequencies(D, theta)
positions = torch.arange(4 * L)[None]
ratio, stretch = {}, {}
for name, scaling in scalings.items():
    speeds, stretch[name] = scaling.frequencies(positions, D, theta)
    ratio[name] = (speeds / before).flatten()

styles = dict(zip(scalings, ("-", "--", "-.", ":")))
markers = dict(zip(scalings, "os^x"))
made, (above, below) = figure(5.6, 5.4, rows=2)
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
# Do we have them right? ``transformers`` has all four. Its rotary embedding turns random queries as ours does, within
# the trained length and beyond it.

from transformers.models.qwen2 import modeling_qwen2 as oracle

from lm_from_scratch.checkpoint.configs import scaling_to_dict

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


table = {"none": plain}
for name, scaling in scalings.items():
    table[name] = {n: losses(rescaled(scaling), n) for n in lengths}

print("loss" + " " * 10 + "".join(f"{n:8}" for n in lengths) + "   2nd half")
for name, row in table.items():
    numbers = "".join(f"{row[n].mean():8.3f}" for n in lengths)
    print(f"{name:14}{numbers}{second_half(row[4 * L]):11.3f}")
print(f"{'only 256 keys':14}{'':16}{near.mean():8.3f}{second_half(near):11.3f}")

# %%
# The columns are the pieces of 256, 512 and 1024 tokens, and then the second half of the longest rows. The figure shows
# these rows from left to right: the mean loss of 128 tokens, minus that of the model that sees 256 keys.

made, (ax,) = figure(6.0, 3.6)
middle = torch.arange(64, 4 * L, 128)
colours = (COLOURS[7], *COLOURS[:2], COLOURS[2], COLOURS[3])
for (name, row), colour in zip(table.items(), colours):
    gap = (row[4 * L] - near).view(len(rows), -1, 128).mean((0, 2))
    line = dict(linestyle=styles.get(name, "-"), color=colour)
    ax.plot(middle, gap, marker=markers.get(name, "D"), label=name, **line)
ax.axvline(L, color=GREY, linewidth=1)
ax.axhline(0, color=GREY, linewidth=1)
ax.set(title="Loss minus loss with 256 keys", xlabel="position in the row")
made.legend(loc="outside lower center", ncols=3, frameon=False)
plt.show()

# %%
# Dynamic NTK costs nothing up to the trained length. Linear scaling costs most there: without more training, every
# neighbour seems to stand at a quarter of its distance.
#
# In the second half of the long rows, the three scalings that spare the fast pairs are better than none, and better
# than linear. They see all 1024 keys, and win back more than half of what the window wins back. So the angles were the
# trouble, more than the number of keys.

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
# Two layouts
# -----------
#
# Which features are a pair? The paper takes neighbours, 2i and 2i + 1: *interleaved*. The code of ``transformers`` for
# Qwen2 and Llama takes i and i + D/2: *half-split*. Turn the first unit vector by one token in both, and see which
# features move.

unit = torch.zeros(1, 1, 1, 8)
unit[..., 0] = 1.0
one_token = rotation(torch.tensor([[1]]), inverse_frequencies(8, 10000.0))
split = apply_rope(unit, *one_token).flatten()
interleaved = apply_rope_interleaved(unit, *one_token).flatten()
print("half-split ", split.nonzero().flatten().tolist())
print("interleaved", interleaved.nonzero().flatten().tolist())
assert split.nonzero().flatten().tolist() == [0, 4]
assert interleaved.nonzero().flatten().tolist() == [0, 1]

# %%
# Both are RoPE. They differ in the *order* of the features, so a checkpoint for one can be turned into a checkpoint for
# the other: move the rows of the query and key projections. That is a permutation P of the D rows of each head, the
# same for q and k.
#
# .. math::
#
#    (P q) \cdot (P k) = q^\top P^\top P \, k = q \cdot k
#
# A permutation changes no dot product, and P takes pair i of one layout to pair i of the other. So scores stay, and
# with them everything after. The package's converter cuts the rows of each head into two halves of D/2, and lays them out
# in turn.

from lm_from_scratch.layers.rope import to_half_split, to_interleaved

print(inspect.getsource(to_interleaved))
order = to_interleaved(torch.arange(16), n_head=2)
print(order.tolist())
assert order[:8].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
assert torch.equal(to_half_split(order, n_head=2), torch.arange(16))

# %%
# The test takes a Qwen2 with random weights of standard deviation 0.25, with 6 query heads on 2 key heads. Its query and
# key weights are converted, biases too, and its rotation is replaced by the other one.

from lm_from_scratch.models import qwen2
from lm_from_scratch.models.causal_lm import randomize_


def random_qwen2(std):
    config = qwen2.Qwen2Config(
        vocab_size=97, block_size=64, n_layer=3, n_head=6, n_kv_head=2,
        n_embd=48, intermediate_size=112, eos_token_id=None,
    )  # fmt: skip
    model = qwen2.Qwen2ForCausalLM(config).eval()
    randomize_(model, std=std)
    return model


def converted(model):
    model = copy.deepcopy(model)
    for block in model.model.layers:
        attention, config = block.self_attn, model.config
        for layer, heads in (
            (attention.q_proj, config.n_head),
            (attention.k_proj, config.n_kv_head),
        ):
            for parameter in (layer.weight, layer.bias):
                parameter.copy_(to_interleaved(parameter, heads))
    return model


generator = torch.Generator().manual_seed(1)
idx = torch.randint(0, 97, (2, 33), generator=generator)
model = random_qwen2(std=0.25)
expected = model(idx)
turned_otherwise = converted(model)
for block in turned_otherwise.model.layers:
    block.self_attn.rotate = apply_rope_interleaved
other_layout = turned_otherwise(idx)
print(f"largest error {(other_layout - expected).abs().max():.0e}")
torch.testing.assert_close(other_layout, expected, atol=5e-5, rtol=0.0)

# %%
# Precision
# ---------
#
# An angle is a position times a speed, and a cosine only cares for the angle modulo :math:`2\pi`. So the *absolute*
# error of the angle counts, and it grows with the position. Here is the largest error of a cosine near position t, for
# the trained model's speeds in three formats, against float64.

whole = inverse_frequencies(D, theta, dtype=torch.float64)
kept = {}
formats = (torch.float32, torch.float16, torch.bfloat16)
print(
    "     t " + "".join(f"{str(f).removeprefix('torch.'):>10}" for f in formats)
)
for t in (10, 100, 257, 1000, 2000):
    near_t = torch.arange(t, t + 10, dtype=torch.float64)[:, None]
    right = (near_t * whole).cos()
    for low in formats:
        angles = (near_t.to(low) * whole.to(low)).double()
        kept[t, low] = (angles.cos() - right).abs().max().item()
    print(f"{t:6} " + "".join(f"{kept[t, f]:10.0e}" for f in formats))

assert kept[2000, torch.float32] < 1e-3
assert kept[100, torch.float16] > 1e-2
assert kept[257, torch.bfloat16] > 0.5

# %%
# In bfloat16 a position of 257 does not even exist: a number with 8 significant bits has steps of 2 between 256 and
# 512. Therefore ``rotation`` computes in float32 or better, whatever the model's format is. Only the turned queries
# and keys are rounded, once.

seen = torch.tensor([255, 256, 257, 258, 259]).bfloat16()
print(seen.int().tolist())
assert seen[2:4].tolist() == [256.0, 258.0]

# %%
# ``transformers`` rounds the cosines to the model's format first and turns in that format. The next lines compare both
# ways with float64, on bfloat16 queries.

generator = torch.Generator().manual_seed(0)
positions = torch.arange(512)[None]
q = torch.randn(2, 4, 512, D, generator=generator).bfloat16()
right = apply_rope(q.double(), *rotation(positions, whole))
cos, sin = rotation(positions, before)
once = (apply_rope(q, cos, sin) - right).square().mean().sqrt()
half = [torch.cat([part, part], dim=-1)[:, 0].bfloat16() for part in (cos, sin)]
many, _ = oracle.apply_rotary_pos_emb(q, q, *half)
many = (many - right).square().mean().sqrt()
print(f"cosines rounded first: error {many / once:.2f} times ours")
assert many > 1.2 * once

# %%
# Bug museum
# ----------
#
# Q9, Q10, Q12: a table that was kept
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The first Qwen2 code of ``transformers``, like most code of its time, kept a table of cosines in each layer (Q11).
# This is its logic, with the sines left out.


class TableRotary(nn.Module):
    def __init__(self, dim, length, base=10000.0):
        super().__init__()
        speeds = 1.0 / base ** (torch.arange(0, dim, 2) / dim)
        self.register_buffer("inv_freq", speeds, persistent=False)
        self.grow(length, torch.float32)

    def grow(self, length, dtype):
        self.length = length
        t = torch.arange(length).type_as(self.inv_freq)
        cos = torch.outer(t, self.inv_freq).cos().to(dtype)
        self.register_buffer("cos", cos, persistent=False)

    def forward(self, x, length):
        if length > self.length:
            self.grow(length, x.dtype)
        return self.cos[:length].to(x.dtype)


# %%
# *Q10.* A buffer follows ``.to(torch.bfloat16)``. When the table then grows, positions and speeds are in bfloat16, and
# position 257 gets the row of 256. Even a module that stays in float32 is spoilt by one call with bfloat16 states.


def cos_error(found):
    t = torch.arange(len(found), dtype=torch.float64)[:, None]
    return (found.double() - (t * whole).cos()).abs().max().item()


low, high = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
table_rows = TableRotary(D, 128).to(torch.bfloat16)(low, 1024)
assert torch.equal(table_rows[257], table_rows[256])

used = TableRotary(D, 128)
used(low, 1024)
fresh = TableRotary(D, 1024)
for name, found in {
    "moved to bfloat16": table_rows,
    "called once in bfloat16": used(high, 1024),
    "untouched": fresh(high, 1024),
}.items():
    print(f"{name:24} cosine off by {cos_error(found):.0e}")
assert cos_error(table_rows) > 1
assert cos_error(used(high, 1024)) > 1e-3
assert cos_error(fresh(high, 1024)) < 1e-3

# %%
# Two cosines differ by 2 at most, so the first error is more than half of what is possible.
#
# *Q9.* The table was cut to the number of keys, and then asked for the positions. These are not the same thing: a
# batch may start at position 5, or skip some.

positions = torch.tensor([[5, 6, 7, 8]])
try:
    fresh(high, length=4)[positions]
except IndexError as error:
    print("IndexError:", str(error)[:48])
else:
    raise AssertionError("positions beyond the table must fail")

# %%
# *Q12.* A buffer that is not saved is not loaded either. A model that is built on the ``meta`` device and filled from
# a file is complete, except for the speeds and the table.

with torch.device("meta"):
    empty = TableRotary(D, 128)
empty.load_state_dict(fresh.state_dict(), assign=True)
print("keys in the file:", list(fresh.state_dict()))
print("speeds after loading are on:", empty.inv_freq.device)
assert empty.inv_freq.is_meta

# %%
# The fix is to keep nothing. The package has no table and no buffer: it computes from the positions it gets, in float32,
# at every call. There is nothing to round, to outgrow, or to lose.

print(inspect.getsource(RotaryEmbedding.forward))
ours = RotaryEmbedding(D, theta).to(torch.bfloat16)
assert not list(ours.buffers()) and not list(ours.parameters())
cos, _ = ours(torch.arange(1024)[None], torch.bfloat16)
assert cos.dtype == torch.float32
assert cos_error(cos[0, 0]) < 1e-3

# %%
# A test finds Q10 if it runs in the format in use and lets the table grow. The version of ``transformers`` in use keeps no
# table. Its speeds are still a buffer, so look at what becomes of them when a built model is moved.

config = transformers.Qwen2Config(hidden_size=4 * D, num_attention_heads=4)
theirs = oracle.Qwen2RotaryEmbedding(config).to(torch.bfloat16)
print("speeds in", theirs.inv_freq.dtype)
error = cos_error(theirs(high, torch.arange(1024)[None])[0][0, :, : D // 2])
print(f"cosine off by {error:.0e} within 1024 tokens")

# %%
# The wrong layout
# ~~~~~~~~~~~~~~~~
#
# Weights for interleaved pairs meet code for half-split ones: every shape fits, and later positions are wrong.
#
# Meta's files of Llama 2 are interleaved. Loaded into half-split code without the converter, every shape fits,
# and the model is wrong. `This happened to the notebooks of LLMs-from-scratch
# <https://github.com/rasbt/LLMs-from-scratch/issues/747>`_, and `explaining it took a longer thread
# <https://github.com/rasbt/LLMs-from-scratch/issues/751>`_.
#
# Here the weights are converted and the rotation is not. The error is shown by position, for large weights and for
# small ones.

error = {}
print("position   " + "".join(f"{t:9}" for t in (0, 1, 2, 8, 32)))
for std in (0.25, 0.02):
    model = random_qwen2(std)
    moved = (converted(model)(idx) - model(idx)).abs().amax((0, 2))  # (T,)
    error[std] = moved
    numbers = "".join(f"{moved[t]:9.1g}" for t in (0, 1, 2, 8, 32))
    print(f"std {std:<7}{numbers}")
assert error[0.25][0] < 5e-5 < 1 < error[0.25][1:].max()
assert error[0.02].max() < 0.02

# %%
# The first token sees only itself, at distance 0, where every layout is right. So it looks fine, and with small weights
# the rest does too. The scores of one query and one key show the same: right on the diagonal, wrong beside it.

cos, sin = rotation(torch.arange(48)[None], whole)
q_other, k_other = (
    apply_rope_interleaved(x.expand(1, 1, 48, D), cos, sin)[0, 0]
    for x in (q_half, k_half)
)
wrong = (q_other @ k_other.T - scores).abs()
print(f"diagonal {wrong.diagonal().max():.0e}, beside it ", end="")
print(f"{wrong.diagonal(1).max():.1f} and {wrong.diagonal(-1).max():.1f}")
assert wrong.diagonal().max() < 1e-12
assert wrong.diagonal(1).max() > 0.1

# %%
# The fixed line is ``to_half_split`` for each query and key weight; the check is a comparison of
# logits with large weights, at later positions.
#
# The trained model shows what it costs.

wrong_layout = losses(converted(trained), L).mean().item()
print(f"loss {plain[L].mean():.2f}, in the wrong layout {wrong_layout:.2f}")
assert wrong_layout > plain[L].mean() + 0.1

# %%
# Which sentence is false?
# ------------------------
#
# Three of these four are.
#
# 1. ``inv_freq`` holds positions that were normalised and exponentiated.
# 2. RoPE splits the vector into two halves and gives each its own frequency.
# 3. RoPE needs the number of keys, so that the positions fit.
# 4. Values are not turned, and the output of attention still depends on distances.

inv_freq = inverse_frequencies(8, 10000.0)
features = torch.arange(0, 8, 2)
torch.testing.assert_close(inv_freq, 10000.0 ** -(features / 8))  # 1
assert len(inv_freq) == 8 // 2  # 2: four speeds for eight features
assert split.nonzero().flatten().tolist() == [0, 4]

far_away = rotation(torch.tensor([[7, 1_000_000]]), inv_freq)  # 3: no length
assert far_away[0].shape == (1, 1, 2, 4)

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.visibility import Visibility

v = torch.randn(1, 1, 3, 8, generator=generator)
ones = torch.ones(1, 1, 3, 8)
outputs = []
for places in ([[0, 1, 2]], [[5, 6, 7]], [[0, 1, 9]]):
    places = torch.tensor(places)
    turned = apply_rope(ones, *rotation(places, inv_freq))
    seen = Visibility(places, places)
    outputs.append(formula_attention(turned, turned, v, seen)[..., -1, :])
same, moved = ((y - outputs[0]).abs().max().item() for y in outputs[1:])
print(f"all moved by 5: {same:.0e}, last one moved by 7: {moved:.1g}")
assert same < 1e-6 and moved > 0.01  # 4

# %%
# The fourth is true. ``inv_freq`` comes from *feature* indices; each pair has its own speed; and a position needs no
# table to fit into.
#
# Exercises
# ---------
#
# 1. *Easy.* What is the largest :math:`\theta` with which all 16 pairs of the trained model turn at least once in 256
#    tokens? Solve for it, then check with ``whole_turns``. A right answer lies between 50 and 55. Hint: only the last
#    pair matters.
# 2. *Easy.* Turn the queries and leave the keys as they are. Which assertion about ``scores`` fails? A right answer
#    shows that the score depends on m and not on n, so a model of this kind cannot see distances. Hint: replace
#    ``k_turned``.
# 3. *Medium.* GPT-NeoX turns a quarter of the features and leaves the rest. Build this from ``apply_rope`` and show that
#    scores still depend on the distance alone. Hint: split, turn, join; for half-split pairs the quarter is one block.
# 4. *Medium.* Give the trained model dynamic NTK, and let it read 200 tokens with ``GrowingCache`` in pieces of 100 and in
#    one pass; then 300. A right answer shows equal logits for 200, and for 300 a difference from the second token on.
#    Hint: the docstring of ``DynamicNTKScaling`` says why; print the frequencies of each piece.
# 5. *Hard.* Train the shipped model for a hundred steps on two rows of 1024 tokens each, with ``LinearScaling(factor=4)``
#    and, as a control, with no scaling. A right answer shows that the loss of linear scaling in the second half falls by
#    more than half a nat, and says what the control adds. Hint: ``PackedBatches`` over the training side of ``load_split``,
#    AdamW, a learning rate of 2e-4; save the models and compare them with ``losses``.
#
# Summary
# -------
#
# * RoPE turns pair i of queries and keys by the angle position times speed. Scores depend on the distance alone: equal
#   on every diagonal to 1e-12, and a trained model gives the same logits 100,000 tokens further on, to 1e-7 in float64.
# * Slow pairs do not complete a turn in training: 9 of 16 in the shipped model, 12 of 32 in the smallest published
#   Qwen2. Beyond the trained length the loss is worse than with a window of 256 keys.
# * Scaling slows pairs down. Dynamic NTK changes nothing up to the trained length; keeping the fast pairs is better than
#   slowing all of them. All four equal ``transformers`` to 1e-5.
# * Layouts differ by a permutation of rows. The converter is exact, and the mistake is invisible at position 0.
# * Angles need float32. In bfloat16, position 257 is 256.
#
# The next page gates the MLP.
#
# Sources
# -------
#
# * Su et al.: `RoFormer <https://arxiv.org/abs/2104.09864>`_, 2021.
# * Chen et al.: `Position Interpolation <https://arxiv.org/abs/2306.15595>`_, 2023. Linear scaling.
# * Peng et al.: `YaRN <https://arxiv.org/abs/2309.00071>`_, 2023. Also describes dynamic NTK.
# * Grattafiori et al.: `The Llama 3 Herd of Models <https://arxiv.org/abs/2407.21783>`_, 2024. The models; the scaling is in Meta's code.
# * Barbero et al.: `Round and Round We Go <https://arxiv.org/abs/2410.06205>`_, 2024. What trained models do with fast and slow pairs.
# * Biderman et al.: `Rotary Embeddings, A Relative Revolution <https://blog.eleuther.ai/rotary-embeddings/>`_, 2021. The complex form, explained.
# * `Llama 2's own rotation <https://github.com/meta-llama/llama/blob/main/llama/model.py>`_. Interleaved, with complex numbers.
# * `The rotation of Qwen2 in transformers <https://github.com/huggingface/transformers/blob/main/src/transformers/models/qwen2/modeling_qwen2.py>`_. Half-split.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
