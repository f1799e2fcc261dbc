r"""
RoPE: positions as rotations
============================

*The dog bit the man* and *the man bit the dog* have the same words. A model must know which word comes first.
Attention alone can hardly tell: it takes an average, and an average has no order.

Today's models turn each query and each key like the hand of a clock. Suppose a query and a key have only two numbers
each, so that each is an arrow. It turns by one hour for each position. The smaller the angle between two hands, the
higher their score in attention.
"""

# sphinx_gallery_needs = ["1_rms_norm", "../1_gpt2/2_gpt2"]
# sphinx_gallery_words = ["rotary", "rotate_half", "position_ids", "freqs_cis", "rope_theta", "relative position", "apply_rotary_pos_emb", "inv_freq", "positional encoding", "word order", "order of the words", "how does the model know the position", "rotary embeddings explained", "absolute vs relative position", "why positional encoding", "position embedding", "rope base", "base 10000", "10000", "theta", "complex numbers", "sinusoidal", "sine and cosine", "sinusoidal positional encoding", "learned positions", "rotate queries and keys", "why rotate", "distance between words", "shuffle the words", "permutation", "relative vs absolute", "RoPE formula", "angle", "angles", "frequency", "frequencies"]

import copy

import torch

from lm_from_scratch.drawings import qwen2 as drawings

torch.set_grad_enabled(False)
drawings.clock_hands((3, 5))

# %%
# **Predict first.** Both tokens move on by ten places, to 13 and 15. What happens to the angle between the hands?
#
# * It grows: both hands have turned further
# * It stays
# * It shrinks

drawings.clock_hands((3, 5), (13, 15))

# %%
# It stays. Both hands turn by the same ten hours. So a score that comes from the angle depends on the *distance* of the
# two tokens, here 2, and not on where they are.
#
# This is RoPE, the rotary position embedding.
#
# The other way: learned positions
# --------------------------------
#
# GPT-2 adds a learned vector to each token, one for each position. The table of these vectors has a last row, and no
# text can be longer. Our small GPT-2 has 256 rows, so it refuses a text that begins at position 250.

from lm_from_scratch.checkpoint.weights import load_shipped

gpt2, _ = load_shipped("gpt2-docs")
print(gpt2.transformer.wpe.weight.shape)  # (positions, C)

text = "If the file does not exist, an"
model, tokenizer = load_shipped("qwen2-docs")
idx = torch.tensor([tokenizer.start(text)])  # (B, T)
positions = torch.arange(idx.shape[1])  # (T,)

try:
    gpt2(idx, positions=positions[None] + 250)
except ValueError as error:
    refused = str(error)
    print(refused)
assert "no embeddings for the later positions" in refused

# %%
# And GPT-2 has to learn "one place apart" again at every place: nothing ties places 3 and 4 to 13 and 14. Move a text and
# watch both models:
#
# .. live:: clock
#
# Why rotate and not add? Add the vectors :math:`p_m` and :math:`p_n` of two places to a query and a key, and the score
# has four parts:
#
# .. math::
#
#    (q + p_m) \cdot (k + p_n) = q \cdot k + q \cdot p_n + p_m \cdot k + p_m \cdot p_n
#
# Three of them change when the text moves. A rotation keeps the length of each vector and changes only the angle
# between the two. The score depends on nothing else.
#
# Seconds, minutes, hours
# -----------------------
#
# One hand is not enough. On a clock of twelve hours, a distance of 1 looks like a distance of 13. A real clock
# has several hands with different speeds, and so has RoPE.
#
# A query with D features has D/2 *pairs* of features, and each pair is a hand. Pair i turns by :math:`\theta^{-2i/D}`
# radians at each position. Here D is 32 and the base :math:`\theta` is 10,000, so pair 0 turns by 1 radian, pair 1 by
# 0.56, and the last by 0.0002.
#
# A whole turn is :math:`2\pi`, or 6.28, radians. How many tokens does each of the 16 hands need for it?

D, theta = model.config.head_dim, model.config.rope_theta
speeds = theta ** -(torch.arange(0, D, 2) / D)  # (D/2,)
tokens_a_turn = 2 * torch.pi / speeds
print(tokens_a_turn.round().int().tolist())
assert (D, theta) == (32, 10_000.0)

drawings.hand_speeds(
    {f"pair {i}": tokens_a_turn[i].item() for i in (0, 4, 8)}, 6
)

# %%
# The clocks show three of the hands at positions 0 to 6. Pair 0 is almost around: it tells neighbours apart. Pair 8 has
# hardly moved: it tells near from far. These speeds are fixed and not learned.
#
# Seven lines of code
# -------------------
#
# Turning a pair (a, b) by an angle :math:`\alpha` is the rotation that you may know from school:
#
# .. math::
#
#    a' &= a \cos \alpha - b \sin \alpha \\
#    b' &= b \cos \alpha + a \sin \alpha
#
# The code of Qwen2 takes all a from the first half of the features and all b from the second, so that it can turn all
# pairs at once.


def rope(x, positions):  # (..., T, D), (T,)
    angles = positions[:, None] * speeds  # (T, D/2)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)  # (..., T, D/2) each
    turned_a = a * cos - b * sin
    turned_b = b * cos + a * sin
    return torch.cat([turned_a, turned_b], dim=-1)  # (..., T, D)


from lm_from_scratch.layers.rope import apply_rope, rotation

assert torch.allclose(
    rope(torch.eye(D), torch.arange(D)),
    apply_rope(
        torch.eye(D)[None, None], *rotation(torch.arange(D)[None], speeds)
    )[0, 0],
    atol=1e-6,
)

# %%
# Let us try it on words. Real hands do not start at 12 o'clock: each query and key has its own directions, and the turn
# is added to them. Here the query of ``␣exist`` meets the key of ``␣does``, in block 0: three times at distance 2,
# then further apart.

block = model.model.layers[0]
x = block.input_layernorm(model.model.embed_tokens(idx))  # (B, T, C)
q = block.self_attn.q_proj(x)[0, :, :D]  # (T, D), of head 0
k = block.self_attn.k_proj(x)[0, :, :D]
words = tokenizer.pieces(idx[0].tolist())
query, key = q[words.index(" exist")], k[words.index(" does")]


def score(query_at, key_at):
    at_m, at_n = torch.tensor([query_at]), torch.tensor([key_at])
    return (rope(query[None], at_m) @ rope(key[None], at_n).T).item()


for m, n in ((5, 3), (15, 13), (105, 103), (5, 1), (5, 0)):
    print(f"query at {m:3}, key at {n:3}: {score(m, n):.3f}")
assert abs(score(15, 13) - score(5, 3)) < 1e-4
assert abs(score(105, 103) - score(5, 3)) < 1e-4
assert abs(score(5, 1) - score(5, 3)) > 0.1

# %%
# The first three scores are equal: same distance, same score. Here is the score of the two words at every distance up
# to 100. It is a sum of 16 waves, one for each pair. Fast pairs make the ripples, and slow pairs the slope.

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import figure

apart = torch.arange(101)
drawn, (ax,) = figure(4.6, 2.6)
ax.plot(rope(query.expand(101, -1), apart) @ key)
ax.set(title="Score of ␣exist and ␣does", xlabel="distance, m - n")
plt.show()

# %%
# **Predict first.** The whole model was trained on texts of 256 tokens. What happens to its logits if we pretend that
# this text begins at position 100,000?
#
# * They hardly change
# * They get somewhat worse, as in a long text
# * The model writes nonsense, because it never saw such positions

here = model(idx, positions=positions[None])
there = model(idx, positions=positions[None] + 100_000)
print(
    f"largest logit {here.max():.1f}, moved by {(there - here).abs().max():.3f}"
)
assert (there - here).abs().max() < 0.02
assert torch.equal(here.argmax(-1), there.argmax(-1))

# %%
# They hardly change, and that little is rounding: attention never sees a position, only distances.
#
# *Distances* that the model was not trained on are another matter: `longer contexts <2a_longer_contexts.ipynb>`_ shows what happens there.
#
# Queries and keys, not values
# ----------------------------
#
# Attention also has values: what a token hands over. They are not turned. Here is the output of one head for the last
# token. If ``turn_values`` is True, it turns the values too.

v = block.self_attn.v_proj(x)[0, :, :D]  # (T, D)


def output(positions, turn_values):
    scores = rope(q, positions)[-1] @ rope(k, positions).T / D**0.5  # (T,)
    values = rope(v, positions) if turn_values else v
    return scores.softmax(-1) @ values  # (D,)


# %%
# **Predict first.** We turn the values and move the text by ten places. Does the output of the head change?
#
# * No: queries, keys and values all turn by the same angle
# * Yes: the output now depends on where the text is
# * Only in the last digits

changes = []
for turn_values in (False, True):
    still = output(positions, turn_values)
    moved = output(positions + 10, turn_values)
    changes.append((moved - still).norm() / still.norm())
    print(f"values turned: {turn_values!s:5}  change {changes[-1]:.0%}")
assert changes[0] < 1e-4 and changes[1] > 0.5

# %%
# Yes: the output now depends on where the text is. A query is compared with a key, so a turn that both share cancels. A value is compared with nothing. It is
# passed on as it is, so its turn stays in the output.
#
# Fluent and wrong
# ----------------
#
# Which two features are a pair? The code of ``transformers`` takes i and i + D/2, as we did (its name for this is
# ``rotate_half``). The paper and Meta's own Llama take neighbours, 2i and 2i + 1. Here are eight features, each with
# the number of its pair.

drawings.feature_pairs(
    {
        "half-split: i and i + D/2": [0, 1, 2, 3, 0, 1, 2, 3],
        "interleaved: 2i and 2i + 1": [0, 0, 1, 1, 2, 2, 3, 3],
    }
)

# %%
# Both are right, if the weights were trained with the same layout. In 2025 the notebooks of a popular book loaded
# Meta's weights of Llama 2 into half-split code. Every shape was right, and nothing failed. A reader `compared numbers
# with two other programs <https://github.com/rasbt/LLMs-from-scratch/pull/747>`_ and found the mistake. Here it is in
# our model.

from lm_from_scratch.generation.generate import generate
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.layers.rope import apply_rope_interleaved

greedy = Sampler(temperature=0.0)


def with_rotation(rotate):
    other = copy.deepcopy(model)
    for block in other.model.layers:
        block.self_attn.rotate = rotate
    return other


wrong = with_rotation(apply_rope_interleaved)
prompt = tokenizer.start("The function returns a list of")
written = {}
for name, which in {"right": model, "wrong": wrong}.items():
    ids = [row[0] for row in generate(which, [prompt], 24, greedy)]
    written[name] = tokenizer.decode(ids)
    print(f"{name}: {written[name]!r}")
assert written["right"] != written["wrong"]
assert torch.allclose(
    (q[-1] @ k.T / D**0.5).softmax(-1) @ v,
    (q[-1] @ k.flip(0).T / D**0.5).softmax(-1) @ v.flip(0),
    atol=1e-5,
)
assert not torch.allclose(
    with_rotation(lambda x, cos, sin: x)(idx)[0, -1],
    with_rotation(lambda x, cos, sin: x)(idx[:, [0, 7, 6, 5, 4, 3, 2, 1, 8]])[
        0, -1
    ],
    atol=1.0,
)

# %%
# The wrong text looks like English, too; it only says "function" again and again. At position 0 nothing is turned. So a
# test that looks only at the first token, or asks only whether the output looks like English, lets the mistake pass.
#
# How to convert one layout into the other, and what bfloat16 does to positions, is in
# `RoPE in depth <2b_rope_in_depth.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* Draw ``clock_hands`` for two distances that a hand of one hour a position cannot tell apart. A good answer
#    names all distances that look like 2, and says how a second, slower hand would tell them apart.
# 2. *Easy.* Change ``score`` so that only the query is turned. A good answer shows that the score now depends on m
#    and not on n, so a model of this kind cannot see distances.
# 3. *Medium.* Replace ``rope`` by a function that returns x as it is, and shuffle the words before the last one. A
#    good answer shows that the output of this head of block 0 does not change for the last token, and says
#    what this means for the dog and the man. (Later blocks can tell a little: each token saw only the words before it,
#    so its state gives away some of the order.)
#
# Summary
# -------
#
# * RoPE turns each pair of features of queries and keys by position times speed. Two words at the same distance then
#   have the same score, wherever they are.
# * Fast pairs tell neighbours apart, slow pairs near from far. Nothing is learned, and no table ends.
# * Weights and code must agree on the pairs: half-split or interleaved. The wrong layout raises no error.
