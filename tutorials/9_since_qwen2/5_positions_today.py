r"""
Positions today: what has to turn?
==================================

RoPE rotates all features of all queries and keys, in all blocks. Many models since then rotate fewer: half of the
features, or three blocks of four. Which features and which blocks need to know where they are?

Here is a game for a small model. In each row of tokens, every letter has a number. Two kinds of token ask a question:
``b?`` asks for the number of the letter b, and ``←3`` for the number three places back.
"""

# sphinx_gallery_needs = ["../2_qwen2/2_rope", "1_qwen3"]
# sphinx_gallery_thumbnail_number = 2
# sphinx_gallery_words = ["partial RoPE", "partial_rotary_factor", "NoPE", "no_rope_layers", "rope_local_base_freq", "SmolLM3", "rotary_dim", "length extrapolation", "iRoPE", "no position embedding", "without positional encoding", "no positional encoding", "rotate half the dimensions", "half of the dimensions", "part of the features", "local and global layers", "position encoding in new models", "Gemma 3", "Llama 4", "long context positions"]

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from lm_from_scratch.drawings import since_qwen2_attention as drawings
from lm_from_scratch.instruments.plot import COLOURS, GREY, figure

row = ["a3", "b7", "d1", "a3", "c0", "d1", "b?", "a3", "d1", "c0", "a3", "←3"]
drawings.two_questions(row, key=(6, 1), back=(11, 8))

# %%
# The first question is about *what*, the second about *where*. This code makes rows, and the right answers:

from lm_from_scratch.text.targets import IGNORE


def game(B, T, generator):
    number = torch.randint(8, (B, 8), generator=generator)  # of 8 letters
    letter = torch.randint(8, (B, T), generator=generator)
    draw = torch.rand(B, T, generator=generator)
    what, where = draw < 0.2, draw > 0.8  # the two questions, (B, T) each
    said = number.gather(1, letter)  # (B, T)
    idx = torch.where(what, 64 + letter, 8 * letter + said)
    idx = torch.where(where, 72, idx)
    plain = ~(what | where)
    before = F.pad(torch.where(plain, said, IGNORE), (3, 0), value=IGNORE)
    seen = (F.one_hot(letter, 8) * plain[..., None]).cumsum(1)
    known = seen.gather(2, letter[..., None])[..., 0] > 0
    what_answer = torch.where(what & known, said, IGNORE)
    where_answer = torch.where(where, before[:, :T], IGNORE)
    return idx, what_answer, where_answer


# %%
# The players are Qwen2 models with a single block and heads of 16 features. They differ only in what turns: all features,
# half of them, none, or all of them with a base :math:`\theta` that is a hundred times larger.

from lm_from_scratch.layers.rope import (
    RotaryEmbedding,
    apply_partial_rope,
    apply_rope,
    unrotated,
)
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

sizes = dict(vocab_size=73, n_layer=1, n_head=2, n_kv_head=2, n_embd=32)
sizes |= dict(intermediate_size=64, qkv_bias=False, initializer_range=0.1)
sizes |= dict(tie_word_embeddings=False, eos_token_id=None)


def player(turned, theta, seed):
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    attention = model.model.layers[0].self_attn
    attention.rotate = apply_partial_rope if turned else unrotated
    model.model.rotary_emb = RotaryEmbedding(turned or 16, theta)
    generator = torch.Generator().manual_seed(seed)
    adamw = torch.optim.AdamW(model.parameters(), 1e-2, (0.9, 0.98), fused=True)
    for _ in range(90):
        idx, *answers = game(16, 64, generator)
        loss = F.cross_entropy(model(idx).mT, torch.maximum(*answers))
        adamw.zero_grad()
        loss.backward()
        adamw.step()
    return model


# %%
# Each player answers the questions of 32 test rows. We average its loss over 32 positions at a time.

tests = game(32, 256, torch.Generator().manual_seed(99))


@torch.no_grad()
def by_position(model):
    logits, curves = model(tests[0]).mT, []
    for answer in tests[1:]:
        loss = F.cross_entropy(logits, answer, reduction="none")
        asked = (answer != IGNORE).float()
        parts = (x.view(32, 8, 32).sum((0, 2)) for x in (loss, asked))
        curves.append(torch.div(*parts))
    return torch.stack(curves)  # (2 questions, 8 parts of the row)


# %%
# **Predict first.** All players learn from rows of 64 tokens and then read rows of 256. After token 64, which one
# answers ``←3`` worst? (A player that guesses among 8 numbers has a loss of 2.08.)
#
# * the one in which nothing turns
# * the one in which everything turns
# * the one with the larger base

kinds = {
    "all features": (16, 10_000.0),
    "half of them": (8, 10_000.0),
    "none": (0, 10_000.0),
    "all, larger base": (16, 1_000_000.0),
}
result = {  # (3 seeds, 2, 8) each
    name: torch.stack([by_position(player(*kind, seed)) for seed in range(3)])
    for name, kind in kinds.items()
}

first = {name: curves[..., 0] for name, curves in result.items()}  # (3, 2)
later = {name: curves[..., 2:].mean((0, 2)) for name, curves in result.items()}

middle = torch.arange(16, 256, 32)
drawn, axes = figure(4.8, 5.6, rows=2)
for i, (name, curves) in enumerate(result.items()):
    line = dict(color=COLOURS[i], marker="os^D"[i], label=name)
    band = dict(color=COLOURS[i], alpha=0.2, linewidth=0)
    for q, ax in enumerate(axes):
        ax.plot(middle, curves[:, q].mean(0), **line)
        ends = curves[:, q].amin(0), curves[:, q].amax(0)
        ax.fill_between(middle, *ends, **band)
for ax in axes:
    ax.axvline(64, color=GREY, linewidth=1)
    ax.set(xlabel="position in the row", ylabel="loss")
axes[0].set(title="b?, mean and range of 3 seeds")
axes[1].set(title="←3, mean and range of 3 seeds")
drawn.legend(
    *axes[0].get_legend_handles_labels(),
    loc="outside lower center", ncols=2, frameon=False,
)  # fmt: skip
plt.show()

assert first["all features"].max() < 0.3 and first["half of them"].max() < 0.4
assert first["all, larger base"].max() < 0.3
assert (result["none"][:, 0] < 0.1).all() and (result["none"][:, 1] > 1.3).all()
assert all(curves[:, 1, -1].mean() > 1.4 for curves in result.values())
assert later["all, larger base"][1] > 2.7 > 2.08
assert all(
    loss[1] < later["all, larger base"][1] - 0.5
    for name, loss in later.items()
    if name != "all, larger base"
)
assert later["half of them"][0] < min(0.1, 0.7 * later["all features"][0])

# %%
# The one with the larger base, which is even worse than guessing.
#
# If nothing turns, the player never learns ``←3``, not even within 64 tokens, but it answers ``b?`` wherever the letter
# is. The player that turns half of its features learns both questions, and beyond token 64 its answers to ``b?`` stay as
# good. With all features, they get worse. In the end all players fail at ``←3``: turning less keeps *what* apart from
# *where*, but it does not teach a model distances that it never saw.
#
# Half of the features
# --------------------
#
# Why does it help to turn less? A score is a sum over pairs of features. A pair that turns compares content *at a
# distance*: it changes when the same two words move apart. A pair that does not turn compares content alone. A head that
# has both can use each where it needs it.

drawings.turned_features(
    {
        "RoPE: 8 of 8 features turn": 8,
        "partial RoPE: the first 4 turn": 4,
        "NoPE: none": 0,
    },
    head_dim=8,
)

# %%
# In code, the first R features turn, and the rest is passed on as it is. The speeds are those of a head of R features.


def partial_rope(x, positions, R, theta=10_000.0):
    speeds = theta ** -(torch.arange(0, R, 2) / R)  # (R/2,): R, not D
    angles = positions[:, None] * speeds  # (T, R/2)
    cos, sin = angles.cos(), angles.sin()
    a, b, rest = x.tensor_split([R // 2, R], dim=-1)
    turned_a = a * cos - b * sin
    turned_b = b * cos + a * sin
    return torch.cat([turned_a, turned_b, rest], dim=-1)  # (..., T, D)


x, where = torch.randn(1, 2, 7, 16), torch.arange(7)
theirs = apply_partial_rope(x, *RotaryEmbedding(8)(where[None], x.dtype))
torch.testing.assert_close(partial_rope(x, where, 8), theirs)

# %%
# How much turning does a real model use? Our small Qwen2 was trained with RoPE on all 32 features, 16 pairs, and texts
# of 256 tokens. We stop some pairs from turning, in all blocks, and train nothing.
#
# **Predict first.** The loss is 4.18. What happens to it if the eight *slow* pairs stop turning?
#
# * nothing that you would notice
# * it rises by about 0.1
# * the model writes nonsense

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.text.corpora import load_split
from lm_from_scratch.training.loss import causal_lm_loss

model, tokenizer = load_shipped("qwen2-docs")
_, documents = load_split(["reference"], held_out=0.05)
ids = [i for text in documents for i in tokenizer.encode(text.text)]
rows = torch.tensor(ids)[: 6 * 257].view(6, 257)


@torch.no_grad()
def loss_with(rotations):
    for block, rotate in zip(model.model.layers, rotations):
        block.self_attn.rotate = rotate
    return causal_lm_loss(model(rows[:, :-1]), rows[:, 1:]).item()


def turning(pairs):
    on = torch.isin(torch.arange(16), torch.tensor([*pairs]))

    def rotate(x, cos, sin):
        return apply_rope(x, torch.where(on, cos, 1), torch.where(on, sin, 0))

    return [rotate] * 8


chosen = {"all": range(16), "fast": range(8), "slow": range(8, 16)}
losses = {name: loss_with(turning(pairs)) for name, pairs in chosen.items()}
for name, loss in losses.items():
    print(f"{name:4} pairs turn: loss {loss:.2f}")

assert abs(losses["all"] - 4.18) < 0.01
assert abs(losses["all"] - loss_with([apply_rope] * 8)) < 1e-5
assert 0 < losses["fast"] - losses["all"] < 0.08
assert losses["slow"] - losses["all"] > 1

# %%
# Nothing that you would notice: within 256 tokens the slow pairs hardly turn, and the model uses them as if they did not
# turn at all. Without the fast pairs it is lost.
#
# So partial RoPE gives up little, and its still features can compare content at any distance. GLM-4.5 turns half of its
# features, Qwen3-Next a quarter.
#
# Blocks without positions
# ------------------------
#
# The same can be tried with whole blocks. A block without positions (*NoPE*) uses queries and keys as they are. We switch
# off the rotation in one block at a time.

without = [
    loss_with([unrotated if i == block else apply_rope for i in range(8)])
    for block in range(8)
]
rise = [loss - losses["all"] for loss in without]
drawn, (ax,) = figure(4.8, 2.6)
ax.bar(range(8), rise)
ax.set(title="Loss added without rotation in one block")
ax.set(xlabel="block", ylabel="loss")
plt.show()

assert abs(rise[0]) < 0.01 and min(rise[1:]) > 0.03
assert rise.index(max(rise)) == 4 and 2 < max(rise) / sorted(rise)[4] < 3

# %%
# Block 4 needs its rotation most, more than twice as much as a typical block. Block 0 hardly needs it. All other blocks
# do: this model was trained with rotation in all of them.
#
# SmolLM3 was trained without rotation in every fourth block. Such a block is not blind to order: the blocks below it
# have mixed order into the tokens, and the causal mask shows each token only what came before it. Other models give
# their blocks different bases: in Gemma 3, five blocks of six look at the latest tokens only and have a base of 10,000;
# the sixth sees all tokens and has a base of 1,000,000.

stack = {"Qwen2": "RRRRRR", "SmolLM3": "RRRNRR", "Gemma 3": "LLLLLG"}
drawings.layer_kinds(
    stack,
    {
        "R": "rotates",
        "N": "does not rotate (NoPE)",
        "L": "sees the latest tokens, base 10,000",
        "G": "sees all tokens, base 1,000,000",
    },
)

# %%
# Why does Gemma's larger base not fail as it did in the game? Because Gemma was trained further on long texts. A larger
# base makes room for more distances, but the model has to learn each of them.
#
# One is zero
# -----------
#
# A config calls a block a *layer*.
#
# **Predict first.** The config of a SmolLM3 says ``"no_rope_layers": [1, 1, 1, 0]``. Which layers rotate?
#
# * the last one: the first three are marked as layers without RoPE
# * the first three

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.configs import config_from_dict

said = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}
said |= {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 96}
smol = build(config_from_dict({"model_type": "smollm3", **said}))
for block in smol.model.layers:
    print(block.self_attn.rotate.__name__)

assert [b.self_attn.rotate for b in smol.model.layers] == [apply_rope] * 3 + [
    unrotated
]

# %%
# The first three: in spite of the name, 1 means "rotates".
#
# In 2026 a reader `reported <https://github.com/huggingface/transformers/issues/43756>`_ that ``transformers`` had it the
# wrong way round. In another project a reviewer asked for `a clearer name
# <https://github.com/elixir-nx/bumblebee/pull/422>`_. Our config calls it ``rope_layers``. If you read the key the wrong
# way, all shapes fit, all weights load, and three blocks of four lose their positions.
#
# `Positions in depth <5a_positions_in_depth.ipynb>`_ shows what published models chose, what a block without positions
# still knows of order, and the same experiment on real text. To make a trained model read longer texts, see `longer than
# it was trained for <../2_qwen2/2a_longer_contexts.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* Let a player turn 4 of its 16 features. A good answer compares its loss for ``←3`` with that of 8
#    features, within the first 64 tokens and at the end, for three seeds, and says what too few pairs cost.
# 2. *Medium.* Find the smallest number of fast pairs that keeps the shipped model within 0.1 of its loss, and print by
#    what angle the fastest pair that you left out would turn in 256 tokens. A good answer says why it does not matter
#    here, and would in a longer text.
# 3. *Hard.* Switch off the rotation in two blocks of the shipped model at a time. A good answer shows whether the two
#    rises add up, for all 28 pairs of blocks, and names the pair furthest from its sum.
#
# Summary
# -------
#
# * A pair that turns compares content at a distance; a pair that does not turn compares content alone. Partial RoPE puts
#   both kinds into each head, NoPE into different blocks.
# * Beyond the trained length, features that do not turn still find content. A larger base alone makes matters worse.
# * Config files say it in many ways. In ``no_rope_layers`` a 1 means that the block rotates.
