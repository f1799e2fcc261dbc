r"""
RoPE in depth
=============

Why does a rotation tell attention how far apart two tokens are, and nothing else? And why do two programs with
the same weights disagree, although both are right?

This page deepens the lesson on `RoPE <2_rope.ipynb>`_: the proof, the two layouts and the conversion between them, the
precision of angles, a comparison with ``transformers``, and old mistakes. You need sine and cosine; complex numbers
help. `Longer contexts <2a_longer_contexts.ipynb>`_ have a page of their own.

The package's code
------------------

``rotation`` makes the cosines and sines, once for all blocks. ``apply_rope`` turns the queries and the keys with them.
"""

# sphinx_gallery_museum = ["Q11"]
# sphinx_gallery_words = ["rotate_half", "repeat_interleave", "permute", "freqs_cis", "interleaved", "permute q_proj k_proj", "GPT-NeoX style", "GPT-J style", "cos_cached", "complex numbers"]
import copy
import inspect

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from lm_from_scratch.instruments.plot import figure
from lm_from_scratch.layers.rope import (
    RotaryEmbedding,
    apply_rope,
    apply_rope_interleaved,
    inverse_frequencies,
    rotation,
)

torch.set_grad_enabled(False)
transformers.utils.logging.set_verbosity_error()

print(inspect.getsource(rotation))
print(inspect.getsource(apply_rope))

# %%
# Only the distance is left
# -------------------------
#
# Write the pair (a, b) as the complex number :math:`z = a + ib`. To turn it by an angle is to multiply it with a
# number of length 1, and the dot product of two pairs is a real part:
#
# .. math::
#
#    z' &= e^{i t \omega} z \\
#    q \cdot k &= \operatorname{Re}(q \, \overline{k})
#
# Let the query be at position m and the key at position n. The conjugate turns the sign of the key's angle, and the two
# angles become one:
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
# The upper figure shows that matrix. The lower one follows the score over longer distances: it is a sum of sixteen
# waves.

far = torch.arange(400.0, dtype=torch.float64)[:, None] * inv_freq
wave = (torch.polar(torch.ones(()).double(), far) * z_q * z_k.conj()).real

drawn, (above, below) = figure(4.8, 6.4, rows=2)
limit = scores.abs().max()
shown = above.imshow(scores.numpy(), cmap="RdBu", vmin=-limit, vmax=limit)
drawn.colorbar(shown, ax=above, shrink=0.7)
above.grid(False)
above.set(title="Score", xlabel="position of the key, n")
above.set(ylabel="position of the query, m")
below.plot(wave.sum(-1), label="all 16 pairs")
below.plot(wave[:, 8:].sum(-1), linestyle="--", label="the 8 slow pairs")
below.set(title="Score by distance", xlabel="m - n")
below.legend(frameon=False)
plt.show()

# %%
# It is sometimes said that scores shrink with distance. They need not: for this query and key the score is larger in
# size at some distance of 100 or more than at distance 0.

assert wave[100:].sum(-1).abs().max() > wave[0].sum().abs()

# %%
# A trained model cannot tell a text from the same text further on, either. The small Qwen2 of the course reads 256
# tokens of held-out text in float64, at their own positions and 100,000 further on.

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.text.corpora import load_split

trained, tokenizer = load_shipped("qwen2-docs")
L = trained.config.block_size
_, held_out = load_split(["reference"], held_out=0.05)
texts = [tokenizer.encode(document.text) for document in held_out]
rows = torch.stack(
    [torch.tensor(ids[: L + 1]) for ids in texts if len(ids) > L][:8]
)  # (B, L + 1)
assert L == 256 and len(rows) > 2

exact = copy.deepcopy(trained).double()
idx = rows[:1, :L]
here = exact(idx, positions=torch.arange(L)[None])
there = exact(idx, positions=torch.arange(L)[None] + 100_000)
print(f"a logit moves by {(there - here).abs().max():.0e}")
assert (there - here).abs().max() < 1e-7

# %%
# RoPE adds nothing about *where* a token is. It says how far away another token is, with no table and no parameter, and
# only the precision of numbers ends the range of positions.
#
# Equal to transformers
# ---------------------
#
# The rotary embedding of ``transformers`` turns random queries and keys as ours does.

from transformers.models.qwen2 import modeling_qwen2 as oracle

D, theta = trained.config.head_dim, trained.config.rope_theta
config = transformers.Qwen2Config(hidden_size=4 * D, num_attention_heads=4)
theirs, ours = oracle.Qwen2RotaryEmbedding(config), RotaryEmbedding(D, theta)
positions = torch.arange(500)[None]
q = torch.randn(2, 4, 500, D, generator=generator)  # (B, H, T, D)
k = torch.randn(2, 2, 500, D, generator=generator)  # (B, Hkv, T, D)
pair = oracle.apply_rotary_pos_emb(q, k, *theirs(q, positions))
for x, expected in zip((q, k), pair):
    turned = apply_rope(x, *ours(positions, x.dtype))
    print(f"largest error {(turned - expected).abs().max():.0e}")
    torch.testing.assert_close(turned, expected, atol=1e-5, rtol=0.0)

# %%
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
# Both are RoPE. They differ in the *order* of the features, so a checkpoint for one layout becomes a checkpoint for
# the other if you reorder the rows of the query and key projections. That is a permutation P of the D rows of each
# head, the same for q and k.
#
# .. math::
#
#    (P q) \cdot (P k) = q^\top P^\top P \, k = q \cdot k
#
# A permutation changes no dot product, and P takes pair i of one layout to pair i of the other. So the scores stay the
# same, and with them all that follows. The package's converter cuts the rows of each head into two halves of D/2, and
# takes a row from each half in turn.

from lm_from_scratch.layers.rope import to_half_split, to_interleaved

print(inspect.getsource(to_interleaved))
order = to_interleaved(torch.arange(16), n_head=2)
print(order.tolist())
assert order[:8].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
assert torch.equal(to_half_split(order, n_head=2), torch.arange(16))

# %%
# The test takes a Qwen2 with random weights of standard deviation 0.25, with 6 query heads on 2 key heads. Its query
# and key weights are converted, biases too, and its rotation is replaced by the other one.

from lm_from_scratch.models import qwen2
from lm_from_scratch.models.randomize import randomize_


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
# An angle is a position times a speed, and its cosine depends on the angle modulo :math:`2\pi`. So the *absolute* error
# of the angle counts, and it grows with the position. Here is the largest error of a cosine near position t, for
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
# 512. Therefore ``rotation`` computes in float32 or better, whatever the model's format is. Only the turned queries and
# keys are rounded, and only once.

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
cos, sin = rotation(positions, inverse_frequencies(D, theta))
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
# A table that was kept
# ~~~~~~~~~~~~~~~~~~~~~
#
# The first Qwen2 code of ``transformers``, like most code of its time, kept a table of cosines in each block (Q11).
# This is its logic, with the sines left out. (Q9, Q10, Q12)


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
# position 257 gets the row of 256. Even in a module that stays in float32, one call with bfloat16
# states spoils the table.


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
# *Q9.* The table was cut to the number of keys, and then read at the positions. The two are not the same: a batch may
# start at position 5, or skip some.

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
# The fix is to keep nothing. The package has no table and no buffer: it computes from the positions it gets, in
# float32, at every call. There is nothing to round, to outgrow, or to lose.

print(inspect.getsource(RotaryEmbedding.forward))
ours = RotaryEmbedding(D, theta).to(torch.bfloat16)
assert not list(ours.buffers()) and not list(ours.parameters())
cos, _ = ours(torch.arange(1024)[None], torch.bfloat16)
assert cos.dtype == torch.float32
assert cos_error(cos[0, 0]) < 1e-3

# %%
# A test finds Q10 if it runs in the format in use and lets the table grow. Today's ``transformers`` keeps no table. But
# its speeds are still a buffer, so look at what becomes of them when a model is moved to bfloat16 after it was built.

config = transformers.Qwen2Config(hidden_size=4 * D, num_attention_heads=4)
theirs = oracle.Qwen2RotaryEmbedding(config).to(torch.bfloat16)
print("speeds in", theirs.inv_freq.dtype)
error = cos_error(theirs(high, torch.arange(1024)[None])[0][0, :, : D // 2])
print(f"cosine off by {error:.0e} within 1024 tokens")

# %%
# The wrong layout
# ~~~~~~~~~~~~~~~~
#
# Weights for interleaved pairs meet code for half-split ones: every shape fits, and later positions are wrong. (M3)
#
# Meta's files of Llama 2 are interleaved. They were loaded into half-split code without the converter: `this happened
# to the notebooks of LLMs-from-scratch <https://github.com/rasbt/LLMs-from-scratch/issues/747>`_, and `explaining it
# took a longer thread <https://github.com/rasbt/LLMs-from-scratch/issues/751>`_.
#
# Here the weights are converted and the rotation is not. The table shows the error by position, for large weights and
# for small ones.

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
# The first token sees only itself, at distance 0, where every layout is right. So its logits look fine, and with small
# weights the later ones do too. The scores of one query and one key show the same: right on the diagonal, wrong beside it.

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
# The fix is one call of ``to_half_split`` for each query and key weight. The check is a comparison of logits with large
# weights, at later positions.
#
# The trained model shows what the mistake costs.


def mean_loss(model):
    logits = model(rows[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, rows[:, 1:].flatten()).item()


right_layout, wrong_layout = mean_loss(trained), mean_loss(converted(trained))
print(f"loss {right_layout:.2f}, in the wrong layout {wrong_layout:.2f}")
assert wrong_layout > right_layout + 0.1

# %%
# Exercises
# ---------
#
# 1. *Easy.* Many programs write ``x * cos + rotate_half(x) * sin``, with ``rotate_half(x) = cat((-b, a))`` and each
#    cosine twice, as ``cat((cos, cos))``. Write it. A good answer equals ``apply_rope`` to 1e-6, and shows that with
#    ``repeat_interleave`` instead of the second ``cat`` the length of a query changes.
# 2. *Medium.* GPT-NeoX turns a quarter of the features. In which layout is that quarter one block, and which features
#    is it in the other? Convert the weights of such a model from one layout to the other. A good answer has equal
#    logits, and leaves the rows that do not turn where they are.
# 3. *Medium.* Meta's code turns with complex numbers. Write ``apply_rope`` with ``torch.view_as_complex`` and
#    ``torch.polar`` for both layouts. A good answer equals the package's functions to 1e-6, and says which layout
#    needs no copy.
#
# Summary
# -------
#
# * The proof is one line with complex numbers. Scores are equal on every diagonal to 1e-12, and a trained model gives
#   the same logits 100,000 tokens further on, to 1e-7 in float64.
# * Layouts differ by a permutation of rows. The converter is exact, and the mistake is invisible at position 0.
# * Angles need float32. In bfloat16, position 257 is 256. A table that is kept can be rounded, outgrown or lost.
#
# Sources
# -------
#
# * Su et al.: `RoFormer <https://arxiv.org/abs/2104.09864>`_, 2021.
# * Barbero et al.: `Round and Round We Go <https://arxiv.org/abs/2410.06205>`_, 2024. What trained models do with
#   fast and slow pairs.
# * Biderman et al.: `Rotary Embeddings, A Relative Revolution <https://blog.eleuther.ai/rotary-embeddings/>`_, 2021.
#   The complex form, explained.
# * `Llama 2's own rotation <https://github.com/meta-llama/llama/blob/main/llama/model.py>`_. Interleaved, with
#   complex numbers.
# * `The rotation of Qwen2 in transformers
#   <https://github.com/huggingface/transformers/blob/main/src/transformers/models/qwen2/modeling_qwen2.py>`_.
#   Half-split.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
