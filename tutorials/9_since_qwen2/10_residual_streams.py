r"""
Several residual streams
========================

A block adds its result to what it was given: that sum is the residual stream. DeepSeek-V4 has *four* such streams, and in
every block it mixes them, with a matrix of 4 by 4 numbers. Here the streams pass 32 random matrices, of three kinds:
"""

# sphinx_gallery_needs = ["../2_qwen2/4_qwen2"]
# sphinx_gallery_words = ["hyper-connections", "hyper connections", "mHC", "manifold-constrained hyper-connections", "Sinkhorn", "Sinkhorn-Knopp", "doubly stochastic matrix", "residual stream", "residual connection", "skip connection", "attention residuals", "hc_mult", "DeepSeek V4", "DeepSeek-V4", "exploding gradients", "vanishing gradients", "very deep networks"]

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.drawings import since_qwen2_models as drawings
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.layers.hyper_connections import (
    HyperConnection,
    Mix,
    collapse,
    connect,
    sinkhorn,
)
from lm_from_scratch.models.deepseek_v4 import DeepseekV4Config

L, n = 32, 4  # blocks, streams
KINDS = {
    "one sum, as before": lambda z: torch.eye(n).expand(L, n, n),
    "free mix": lambda z: torch.eye(n) + 0.5 * z,
    "doubly stochastic mix": lambda z: sinkhorn((2 * torch.eye(n) + z).exp()),
}


def noise(seed):
    torch.manual_seed(seed)
    return torch.randn(L, n, n)


def longest(matrices):
    """How much longer their product can make a vector."""
    product = torch.linalg.multi_dot([torch.eye(n), torch.eye(n), *matrices])
    return float(torch.linalg.matrix_norm(product, 2))


growth = {  # after k of the blocks, for five seeds
    kind: torch.tensor(
        [[longest(of(noise(s))[:k]) for k in range(L + 1)] for s in range(5)]
    )
    for kind, of in KINDS.items()
}
_, (ax,) = figure(4.8, 3.4)
for i, (kind, lines) in enumerate(growth.items()):
    style = (":", "--", "-")[i]
    ax.plot(lines.median(0).values, style, color=COLOURS[i], label=kind)
    ends = lines.amin(0), lines.amax(0)
    ax.fill_between(range(L + 1), *ends, color=COLOURS[i], alpha=0.25)
ax.set(title="How much streams can grow", xlabel="blocks", yscale="log")
ax.legend(frameon=False)
plt.show()

# %%
# With free matrices the streams can become thousands of times larger (the bands are five seeds). The solid line lies on
# the dotted one: these mixes are as calm as a plain sum. They meet one condition, *doubly stochastic*, which we come to.
#
# Why several?
# ------------
#
# One stream is one place for everything. When block 32 reads the sum, 28 later results have been added to what block 3
# found. Several streams are several places. The idea is called *hyper-connections*
# (`Zhu et al., 2024 <https://arxiv.org/abs/2409.19606>`_). With n streams a block *reads* a weighted sum of them, *writes*
# its result to each with another weight, and *carries* them on through an n by n matrix M:
#
# .. math::
#
#    x = \sum_j a_j X_j, \qquad X'_i = b_i \, F(x) + \sum_j M_{ji} X_j
#
# With one stream, and all weights 1, that is the sum you know. Here are random weights for one block. The thicker an
# arrow, the larger its weight; the table below is M:

read, write = torch.randn(n).softmax(0), 2 * torch.randn(n).sigmoid()
carry = KINDS["doubly stochastic mix"](noise(0))
drawings.residual_streams(read.tolist(), write.tolist(), carry[0].tolist())

# %%
# The block F, attention or an MLP, still sees one vector, so it does not get any larger.
#
# Thirty-two free matrices
# ------------------------
#
# The trouble is in M. A stream passes all matrices one after the other, so what counts is their *product*.
#
# **Predict first.** Each M is the identity, plus random numbers of size 0.3 in every place. How much longer can the
# product of 32 of them make a vector, in the middle of 21 tries?
#
# * about 3 times: errors of both signs cancel
# * some 10 to 100 times
# * a million times

zs = [noise(seed) for seed in range(21)]
for size in (0.1, 0.3, 0.5):
    times = sorted(longest(torch.eye(n) + size * z) for z in zs)
    print(f"{size}: {times[10]:6,.0f}, {times[0]:.0f} to {times[-1]:,.0f}")
    low, high = {0.1: (1, 10), 0.3: (15, 90), 0.5: (1e3, 1e5)}[size]
    assert low < times[10] < high

# %%
# Some 10 to 100 times. Numbers of 0.5 already make it thousands. A matrix that makes a vector 1.2 times longer is
# harmless, but 1.2 to the power of 32 is 342.
#
# The plain residual connection is safe because its "matrix" is the number 1. DeepSeek trained a model of 27 billion
# parameters with free matrices: their product could make a stream 3,000 times larger, and training became unstable
# (`Xie et al., 2025 <https://arxiv.org/abs/2512.24880>`_; their cure, which is next, is called *mHC*).
#
# Doubly stochastic
# -----------------
#
# So give M a condition that a product of matrices cannot lose. No entry may be negative, and every row *and* every column
# must sum to 1. Such a matrix is *doubly stochastic*.
#
# Any matrix of positive numbers can be made into one: divide each column by its sum, then each row, then the columns
# again. That is Sinkhorn's algorithm, and it takes three lines.

matrix = noise(0)[0].exp()  # positive
for step in range(1, 21):
    matrix = matrix / matrix.sum(0)  # columns sum to 1
    rows = matrix.sum(1)  # and rows, do they?
    if step in (1, 2, 3, 5, 20):
        print(
            f"after {step:2}: rows sum to {rows.min():.5f} ... {rows.max():.5f}"
        )
    matrix = matrix / rows[:, None]

assert (rows - 1).abs().max() < 1e-5
for z in zs:
    done = sinkhorn(z.exp(), rounds=20)
    assert (done.sum(-1) - 1).abs().max() < 0.05
    assert (done.sum(-2) - 1).abs().max() < 1e-4

# %%
# Each division spoils what the one before it has repaired, but less every time. DeepSeek-V4 does 20 rounds for every
# token, twice in every block, and the gradient flows through all of them.
#
# What does the condition buy?
#
# * Columns that sum to 1: each new stream is a weighted *mean* of the old ones, so it cannot be larger than the largest.
# * Rows that sum to 1: each old stream is handed on once in all, so the mean of the streams passes unchanged.
# * A product of doubly stochastic matrices is doubly stochastic. So both hold for 32 blocks as for one.

streams = torch.randn(n, 64)
for M in carry:
    streams, before = M.T @ streams, streams
    torch.testing.assert_close(
        streams.mean(0), before.mean(0), atol=1e-4, rtol=0
    )

assert max(longest(KINDS["doubly stochastic mix"](z)) for z in zs) < 1.001

# %%
# **Predict first.** Multiply 32 of these random mixes. What does the product look like?
#
# * near the identity
# * a permutation: each stream ends in another place
# * one quarter everywhere

print(torch.linalg.multi_dot([*carry]).mul(100).round().div(100))

for z in zs:
    product = torch.linalg.multi_dot([*KINDS["doubly stochastic mix"](z)])
    torch.testing.assert_close(
        product, torch.full((n, n), 0.25), atol=0.01, rtol=0
    )

# %%
# One quarter everywhere: whatever was in one stream at the start is now in all four, in equal parts. Nothing explodes, but
# a model that mixes so much in every block has one stream again, and stores it four times. To keep its streams apart it
# must keep most mixes near the identity. It can: the identity is doubly stochastic, too.
#
# The gradient
# ------------
#
# **Predict first.** The gradient runs backwards, through the transposed matrices. Is it safe too?
#
# * yes: the transpose of such a matrix is one as well
# * no: only the forward pass has the condition

back = torch.linalg.multi_dot([M.T for M in carry.flip(0)])
print("sums of rows:", back.sum(1).tolist())
print("sums of columns:", back.sum(0).tolist())

assert (back.sum(0) - 1).abs().max() < 1e-3 and (
    back.sum(1) - 1
).abs().max() < 0.01

# %%
# Yes: transposing swaps rows and columns, and both sum to 1. Here we need the second condition. With columns alone the
# streams would stay small, but the rows of a product could sum to anything from 0 to 4: the gradient of one stream may
# become four times as large, and that of another vanish.
#
# With blocks in between
# ----------------------
#
# So far there were only matrices. Now a whole stack: 32 random blocks, each a small MLP after a norm, which read and write
# the streams of 16 tokens. We record the size of the streams, and of the gradient of a random loss.

C, T = 64, 16  # features, tokens


def rms(x):
    return x.square().mean(-1, keepdim=True).sqrt()


def through(seed, kind):
    carry, seen = KINDS[kind](noise(seed)).expand(T, L, n, n), []
    up, down = torch.randn(L, C, C) / 8, torch.randn(L, C, C) / 8
    read = torch.randn(L, n).softmax(-1).expand(T, L, n)
    write = 2 * torch.randn(L, n).sigmoid().expand(T, L, n)
    streams = torch.randn(T, 1, C, requires_grad=True).expand(T, n, C)
    for i in range(L):
        seen.append(streams := streams * 1)
        streams.retain_grad()
        x = collapse(streams, read[:, i])
        y = (x / rms(x) @ up[i]).relu() @ down[i]
        mix = Mix(read[:, i], write[:, i], carry[:, i])
        streams = connect(streams, y, mix)
    (streams.mean(1) * torch.randn(T, C)).sum().backward()
    sizes = [float(rms(s.detach()).mean()) for s in seen]
    return sizes, [float(s.grad.norm()) for s in seen]


# %%
# Streams grow from left to right, and gradients from right to left:

runs = {  # (5 seeds, 2, L)
    kind: torch.tensor([through(seed, kind) for seed in range(5)])
    for kind in KINDS
}
plain, mixed = runs["one sum, as before"], runs["doubly stochastic mix"]
_, axes = figure(4.8, 5.4, 2)
for part, title in enumerate(("Size of the streams", "Size of the gradient")):
    for i, (kind, both) in enumerate(runs.items()):
        style, middle = (":", "--", "-")[i], both[:, part].median(0).values
        axes[part].plot(middle, style, color=COLOURS[i], label=kind)
    axes[part].set(title=title, xlabel="block", yscale="log")
axes[0].legend(frameon=False)
plt.show()

for part, end in ((0, -1), (1, 0)):
    assert (runs["free mix"] / plain)[:, part, end].min() > 8
    assert (mixed / plain)[:, part, end].log().abs().max() < 0.3

# %%
# The doubly stochastic mix stays near the plain sum in both.
#
# In the model
# ------------
#
# In a real model the weights differ from token to token. All n · C numbers of a token's streams are normalised and go
# through one linear map. Its result becomes the reading and writing weights by a sigmoid, and the mix by a softmax and
# Sinkhorn's rounds.

hyper = HyperConnection(C, n)
mix = hyper(torch.randn(1, 2, n, C))  # two tokens
for part, weights in mix._asdict().items():
    print(f"{part:6}{list(weights.shape)}")

config = DeepseekV4Config()
each = (2 + config.hc_mult) * config.hc_mult * config.hc_mult * config.n_embd
total = 2 * config.n_layer * each
print(
    f"in DeepSeek-V4-Flash: {each:,} weights at each place, {total / 1e6:.0f} million in all"
)

assert hyper.fn.numel() == (2 + n) * n * n * C
assert mix.carry.shape == (1, 2, n, n) and 30e6 < total < 40e6

# %%
# Of 284 billion weights, that is nothing. But each token now has four vectors where it had one. They are read and written
# twice in every block, and in training they must be kept. With kernels written for it, DeepSeek still pays 6.7 % of the
# training time.
#
# Do four streams make a model better? For models of billions of parameters both papers report a lower loss. Our stack is
# random: it shows that the condition makes depth safe, and says nothing about quality.
#
# Attention residuals
# -------------------
#
# There is another way for block 32 to find what block 3 wrote: keep all results apart, and let each block *attend* to
# them. It has a learned query q; the results, normalised, are keys and values. Inkling 2 does this, with the sum of six
# layers as one result.


def attended(results, q):
    stack = torch.stack(results)  # (blocks so far, T, C)
    stack = stack / rms(stack)
    weights = (stack @ q / C**0.5).softmax(0)  # (blocks so far, T)
    return (weights[..., None] * stack).sum(0)


results = [torch.randn(T, C)]
for _ in range(L):
    x = attended(results, torch.randn(C))
    results.append((x @ torch.randn(C, C) / 8).relu())
    assert rms(x).max() < 1.001

# %%
# The weights of a softmax sum to 1, so this is a weighted mean again, and again nothing can grow. The price is memory: one
# vector for each result, where streams need four in all.
#
# Exercises
# ---------
#
# 1. *Easy.* Divide the columns alone, once, in place of ``sinkhorn``. A good answer prints the sums of the rows of the
#    product of all 32 mixes, and says what they do to the gradients of the four streams.
# 2. *Medium.* Begin with 6 · I where the page has 2 · I. A good answer prints the product of all 32 mixes for both, and
#    says which model still knows at the end what was in stream 1.
# 3. *Medium.* Write all streams with the weight 1, and start them alike. A good answer explains why the doubly stochastic
#    mix is then *exactly* one plain sum.
#
# Summary
# -------
#
# * Hyper-connections give a model several residual streams: a block reads their weighted sum, writes to each, and mixes
#   them by a matrix.
# * Products of free matrices explode with depth. Doubly stochastic ones keep streams and gradients small, since rows and
#   columns of every product of them sum to 1.
# * Sinkhorn's algorithm makes any positive matrix doubly stochastic. Mixing too much makes all streams alike.
