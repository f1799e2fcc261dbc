r"""
The delta rule in depth
=======================

The lesson on `a memory that does not grow <6_delta_rule.ipynb>`_ writes one token after the other. How can 64 of them
be written at once, with the same result? What does the layer need of a cache, and what goes wrong?

Many tokens at once
-------------------

Take C tokens that find the state :math:`S_0`. Let :math:`c_i` be the sum of the first i logarithms of the gate, so
that :math:`\gamma_{ij} = e^{c_i - c_j}` is left at token i of what token j wrote. Each state of the chunk is what is
left of :math:`S_0`, and of all corrections :math:`u_j` so far:

.. math::

   S_i = e^{c_i} S_0 + \sum_{j \le i} \gamma_{ij} \, k_j u_j^\top

The corrections are not known yet. But put this into the rule :math:`u_i = \beta_i (v_i - \alpha_i S_{i-1}^\top k_i)`:
:math:`\alpha_i S_{i-1}` is the same sum without its last term. What is unknown goes to the left:

.. math::

   u_i + \beta_i \sum_{j < i} \gamma_{ij} (k_i \cdot k_j) \, u_j = \beta_i (v_i - e^{c_i} S_0^\top k_i)

These are C equations for C rows of :math:`U`, and each knows only the rows above it: a *triangular* system. Here it is
for four tokens.
"""

# sphinx_gallery_words = ["chunkwise parallel", "WY representation", "UT transform", "triangular solve", "Mamba-2", "Qwen3NextGatedDeltaNet", "causal conv1d", "torch_chunk_gated_delta_rule"]

import time

import torch
import torch.nn.functional as F

from lm_from_scratch.layers.delta_rule import (
    chunk_delta_rule,
    recurrent_delta_rule,
)


def tokens(T, Dk=16, Dv=16, seed=0):
    torch.manual_seed(seed)
    q, k = (F.normalize(torch.randn(T, Dk).double(), dim=1) for _ in range(2))
    v, S = torch.randn(T, Dv).double(), torch.randn(Dk, Dv).double()
    return q, k, v, torch.rand(T).double().log(), torch.rand(T).double(), S


def system(k, g, beta):
    c = g.cumsum(0)
    future = torch.ones(len(g), len(g), dtype=torch.bool).triu(1)
    gamma = (c[:, None] - c).masked_fill(future, -torch.inf).exp()
    return gamma, beta[:, None] * gamma * (k @ k.T)  # its diagonal counts as 1


torch.set_printoptions(precision=2, sci_mode=False)
q, k, v, g, beta, S = tokens(4)
print(system(k, g, beta)[1].tril(-1) + torch.eye(4))

# %%
# Solved, it gives all corrections. The outputs are then two matrix products, and so is the next state.


def chunk(q, k, v, g, beta, S):
    gamma, A = system(k, g, beta)
    before = g.cumsum(0).exp()[:, None]  # what is left of S at each token
    wanted = beta[:, None] * (v - before * (k @ S))
    u = torch.linalg.solve_triangular(
        A, wanted, upper=False, unitriangular=True
    )
    y = before * (q @ S) + (gamma * (q @ k.T)) @ u
    return y, before[-1] * S + (gamma[-1][:, None] * k).T @ u


def one_by_one(q, k, v, g, beta, S):
    outputs = []
    for t in range(len(k)):
        S = g[t].exp() * S
        S = S + torch.outer(k[t], beta[t] * (v[t] - k[t] @ S))
        outputs.append(q[t] @ S)
    return torch.stack(outputs), S


many = tokens(64)
for mine, want in zip(chunk(*many), one_by_one(*many)):
    print(f"{(mine - want).abs().max():.0e}")
    assert (mine - want).abs().max() < 1e-12

# %%
# The system is small (C by C), and a solver for it is part of every library of linear algebra. The papers write the same
# solution as a product with the inverse of the triangle, found by forward substitution, and call it the *UT
# transform*: there the right side has one part for :math:`v` and one for :math:`k`, which need no :math:`S_0`, so that all
# chunks can be solved together before the first state is known. Ours solves one chunk after the other.
#
# **The law of the two forms**: they agree for every length, chunk size and initial state.


def batch(*xs):
    return [x[None, None] for x in xs]


for T, size in [
    (1, 64),
    (63, 64),
    (64, 64),
    (65, 64),
    (200, 7),
    (200, 1),
    (50, 999),
]:
    given = batch(*tokens(T, seed=T))
    have, want = (
        chunk_delta_rule(*given, chunk=size),
        recurrent_delta_rule(*given),
    )
    error = max((a - b).abs().max() for a, b in zip(have, want))
    print(f"T {T:3}, chunk {size:3}: {error:.0e}")
    assert error < 1e-12

# %%
# And this is what it is for: 256 tokens in four heads of 64 features, forward and backward.


def seconds(rule, T=256):
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(1, 4, T, 64), dim=-1) for _ in range(2))
    v, g, beta = (
        torch.randn(1, 4, T, 64),
        -torch.rand(1, 4, T),
        torch.rand(1, 4, T),
    )
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta)]
    best = torch.inf
    for _ in range(3):
        start = time.perf_counter()
        rule(*leaves, torch.zeros(1, 4, 64, 64))[0].sum().backward()
        best = min(best, time.perf_counter() - start)
    return best


ratio = seconds(recurrent_delta_rule) / seconds(chunk_delta_rule)
print(f"chunks are {ratio:.0f} times as fast")
assert ratio > 2

# %%
# What the layer adds
# -------------------
#
# ``GatedDeltaNet`` projects queries, keys and values, and lets every feature pass a short convolution over its last
# four values, so that a key can depend on the token before. Queries and keys get length 1. The gates are
#
# .. math::
#
#    \alpha_t &= \exp\bigl(-e^{A} \operatorname{softplus}(a_t + b)\bigr) \\
#    \beta_t &= \operatorname{sigmoid}(b_t)
#
# with :math:`a_t` and :math:`b_t` from the token, :math:`A` and :math:`b` learned for each head. Each output is
# normalised, and multiplied by the silu of one more projection.
#
# The tests draw 50 configs of the whole model, and compare logits and gradients in float64, where ``transformers``
# computes in float32 by itself. In float32 neither is exact: where an output is nearly 0, the norm after it enlarges its
# rounding.
#
# In a cache
# ----------
#
# A layer with a state needs two things of a cache: ``state(*initial)`` before a pass, and ``keep(*new)`` after it.
# Every kind of cache does both, by the rules that keys obey: the new state counts when the *last* layer of the pass is
# done, and a pass that fails leaves the old one. Here is a model of four blocks, three of them with a state.

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.slots import StaticCache, cache_for
from lm_from_scratch.models.qwen3_next import (
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

sizes = dict(linear_num_key_heads=2, linear_num_value_heads=6)
widths = dict(linear_key_head_dim=8, linear_value_head_dim=12)
config = Qwen3NextConfig(
    vocab_size=97, n_layer=4, n_embd=24, n_head=2, n_kv_head=1, head_dim=16,
    intermediate_size=40, mlp_only_layers=(0, 1, 2, 3), **sizes, **widths,
    eos_token_id=None,
)  # fmt: skip
model = Qwen3NextForCausalLM(config).double()
print(*config.layer_types)
text = torch.randint(97, (2, 90))
torch.set_grad_enabled(False)
whole = model(text)
for cache in (GrowingCache(4), StaticCache(4, 90), cache_for(config.windows)):
    parts = [
        model(piece, cache=cache) for piece in text.split([70, 1, 1, 18], dim=1)
    ]
    error = (torch.cat(parts, dim=1) - whole).abs().max()
    print(
        f"{type(cache).__name__:13} {error:.0e}, {cache.state_nbytes:,} bytes of states"
    )
    assert error < 1e-12

# %%
# Rows can be chosen and repeated, as beam search does. But no token can be taken back. Speculative decoding needs
# that, so it is refused for such a model, before anything is computed:

from lm_from_scratch.generation.speculative import PromptLookup, speculate

try:
    cache.crop(80)
except ValueError as error:
    print(error)
try:
    speculate(model, PromptLookup(), text.tolist(), 5)
except ValueError as error:
    print(error)

# %%
# Some servers keep a copy of the state for every drafted token instead, and go back to the right one.
#
# What the published model chose
# ------------------------------
#
# Qwen3-Next has 48 blocks: 36 with a state, 12 with attention. A state takes as much memory as the keys and values of how
# many tokens?

from lm_from_scratch.checkpoint.cache_sizes import cached_numbers
from lm_from_scratch.checkpoint.ideas import families
from lm_from_scratch.models.gated_delta_net import GatedDeltaNet

layer = GatedDeltaNet(2048, 16, 32, 128, 128).to("meta")
x = torch.empty(1, 1, 2048, dtype=torch.bfloat16, device="meta")
state = sum(part.nbytes for part in layer.initial_state(x))
token = 2 * cached_numbers(families()["qwen3_next"].config, 1) / 12
print(f"a state takes as much as {state / token:.0f} tokens")
for T in (256, 1024, 16_384, 262_144):
    times = 48 * T * token / (12 * T * token + 36 * state)
    print(f"{T:9,} tokens: attention alone takes {times:.2f} times as much")

assert 1040 < state / token < 1060 and 3.9 < times < 4

# %%
# The hybrid is never more than four times smaller, since one block in four still grows. Below about 1,050 tokens it is
# *larger*. What it saves besides is time: the work of a token in 36 blocks does not grow with the text.
#
# How far the memory reaches
# --------------------------
#
# A matrix with Dk rows holds exactly Dk values of keys at right angles. One key more must be a sum of the others, and is
# not free any more. Keys that are drawn at random are nearly at right angles, and the memory fails gently.

print(
    "keys  at right angles  at random, three seeds   (right answers, Dk = 32)"
)
for count in (16, 32, 33, 40, 64):
    right = []
    for angles in (True, False):
        runs = []
        for seed in range(3):
            _, k, v, g, beta, _ = tokens(count, 32, 32, seed)
            if angles:
                rows = torch.linalg.qr(torch.randn(32, 32).double())[0]
                k = rows[
                    torch.arange(count) % 32
                ]  # from 33 on a key comes again
            ones, empty = (
                torch.ones(count).double(),
                torch.zeros(32, 32).double(),
            )
            _, S = one_by_one(k, k, v, 0 * ones, ones, empty)
            runs.append(
                ((k @ S @ v.T).argmax(1) == torch.arange(count)).double().mean()
            )
        right.append(torch.stack(runs))
    print(f"{count:4} {right[0].mean():16.2f}      ", end="")
    print(*(f"{share:.2f}" for share in right[1]))
    # From 33 on, the last of each key.
    torch.testing.assert_close(right[0].mean().item(), min(1.0, 32 / count))

# %%
# **Mamba-2** is the same layer with the gate and without the correction: :math:`S_t = \alpha_t S_{t-1} + k_t v_t^\top`, with
# one :math:`\alpha_t` for a whole head. Its chunks need no system of equations, because nothing that is written depends on
# what was written before; the matrix :math:`\gamma`, times the scores, is all. The lesson shows what that costs where keys come
# again.
#
# Bug museum
# ----------
#
# The memory is read before it has faded
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The correction is taken against :math:`S_{t-1}`, and the gate applied afterwards (M70). Without a gate the two agree,
# so a test with ``g = 0`` passes. Draw the gates.


def late_gate(q, k, v, g, beta, S):
    outputs = []
    for t in range(len(k)):
        u = beta[t] * (v[t] - k[t] @ S)
        S = g[t].exp() * S + torch.outer(k[t], u)
        outputs.append(q[t] @ S)
    return torch.stack(outputs), S


q, k, v, g, beta, S = tokens(20)
for gate in (0 * g, g):
    error = (
        (
            late_gate(q, k, v, gate, beta, S)[0]
            - one_by_one(q, k, v, gate, beta, S)[0]
        )
        .abs()
        .max()
    )
    print(f"{error:.0e}")

assert error > 0.01

# %%
# Exponents of the other sign
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# :math:`\gamma_{ij}` can be written as :math:`e^{c_i} e^{-c_j}`, which saves the C by C exponentials (M71). With
# gates of -2, the second factor of the 64th token is :math:`e^{128}`, more than float32 can hold; and 0 times infinity
# is no number. Subtract first.

c = (-2.0 * torch.ones(64)).cumsum(0)
split = c.exp()[:, None] * (-c).exp()
print(
    "numbers:",
    split.isfinite().all().item(),
    (c[:, None] - c).tril().exp().isfinite().all().item(),
)

assert (
    not split.isfinite().all()
    and (c[:, None] - c).tril().exp().isfinite().all()
)

# %%
# The convolution starts anew
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The memory is kept between two passes, and the last three inputs of the convolution are not (M72). Generated text
# stays fluent, because only the first three tokens of a pass are read wrongly; but when tokens are written one by one,
# that is all of them. In ``transformers``, nine models `forgot both <https://github.com/huggingface/transformers/pull/45513>`_
# when several tokens came after a cache. Plain generation feeds one token at a time, so its text did not show it.


class Forgetful(GrowingCache):
    def state(self, layer, *initial):
        inputs, memory = super().state(layer, *initial)
        return torch.zeros_like(inputs), memory


cache = Forgetful(4)
parts = [model(piece, cache=cache) for piece in text.split([70, 20], dim=1)]
wrong = (torch.cat(parts, dim=1) - whole).abs().amax(dim=(0, 2))
print(f"before the cut {wrong[:70].max():.0e}, after it {wrong[70:].max():.0e}")

assert wrong[:70].max() < 1e-12 < 1e-6 < wrong[70:].max()

# %%
# Padding fades the memory
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# A program sets the inputs of the layer to 0 at padding, and lets it run (M73). On the left that is enough: zeros write
# nothing, and an empty memory has nothing to fade. On the right or inside, as when rows end at different places, it is
# not. The gate of a zero is not 1, so the memory fades, and the convolution carries the last tokens into the padding. The
# states of a padded row must be those of the row alone.

layer = model.model.layers[0].linear_attn
x = torch.randn(1, 8, 24).double()
places = torch.tensor([[0, 1, 2, 3, 4, -1, -1, -1]])


def memory_after(x, positions):
    cache = GrowingCache(1)
    seen = cache.see(x, positions, windows=[1])[0]
    layer(x, seen, cache[0])
    return cache.states[0][1]


alone = memory_after(x[:, :5], None)
right = (memory_after(x, places) - alone).abs().max()
zeros, all_eight = torch.zeros(1, 3, 24).double(), torch.arange(8)[None]
rows = {
    "left": torch.cat([zeros, x[:, :5]], dim=1),
    "right": torch.cat([x[:, :5], zeros], dim=1),
}
faded = {
    side: (memory_after(row, all_eight) - alone).abs().max()
    for side, row in rows.items()
}
print(f"padding is skipped {right:.0e}", end="; ")
print(*(f"zeros on the {side}: {error:.0e}" for side, error in faded.items()))

assert max(right, faded["left"]) < 1e-12 and faded["right"] > 1e-9

# %%
# The zeros themselves can be lost, too: in ``transformers`` they were `left out for a batch of one row
# <https://github.com/huggingface/transformers/pull/46773>`_.

# %%
# Which sentence is false?
# ------------------------
#
# 1. With keys at right angles, each written once, the delta rule and linear attention have the same state.
# 2. A larger chunk changes the result, because the memory is corrected less often.
# 3. In a hybrid of 12 and 36 blocks the cache still grows with the text.
#
# The second: the equations are those of one token after the other, and the solution is theirs.
#
# Exercises
# ---------
#
# 1. *Easy.* Print the share of a chunk's time that the triangular solver takes, for chunks of 16, 64 and 256. A good
#    answer explains why neither very small nor very large chunks are fast.
# 2. *Medium.* Write ``chunk`` with the inverse of the triangle in place of the solver, and compare the errors in
#    float32 for keys that are nearly equal. A good answer shows both errors for :math:`k_i \cdot k_j = 0.9`.
# 3. *Hard.* Give a cache a copy of the state for each of the last n tokens, so that ``crop`` can go back by n. A good
#    answer passes the law of ``crop`` in ``tests/unit/cache/test_cache_laws.py``, and says what n costs in bytes.
#
# Summary
# -------
#
# * A chunk of the delta rule is a triangular system, then matrix products; it agrees with the recurrence for any size.
# * A cache treats a state as it treats keys, but for one thing: it cannot go back.
# * A hybrid of one attention block in four saves at most three quarters of the cache, and needs more below a thousand
#   tokens.
#
# Sources
# -------
#
# * Schlag et al., `Linear Transformers Are Secretly Fast Weight Programmers <https://arxiv.org/abs/2102.11174>`_, 2021
# * Yang et al., `Parallelizing Linear Transformers with the Delta Rule over Sequence Length
#   <https://arxiv.org/abs/2406.06484>`_, 2024
# * Yang et al., `Gated Delta Networks: Improving Mamba2 with Delta Rule <https://arxiv.org/abs/2412.06464>`_, 2024
# * Dao, Gu, `Transformers are SSMs (Mamba-2) <https://arxiv.org/abs/2405.21060>`_, 2024

import lm_from_scratch

print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
