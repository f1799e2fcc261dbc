r"""
Routing in depth
================

The lesson on the `mixture of experts <2_mixture_of_experts.ipynb>`_ puts many experts in place of one MLP. What differs
between softmax and sigmoid, what happens when scores tie, what does the balancing loss of ``transformers`` pool, and which
mistakes stay unnoticed? (The tests compare our layer with those of Mixtral, Qwen3, DeepSeek-V3 and Qwen3-Next, and the
parameters of whole models with the published numbers.)

Softmax or sigmoid
------------------

Softmax makes the scores of a token compete: when one expert rises, all others fall. A sigmoid looks at each expert
alone. With normalised weights there is less between them than it seems: for softmax, dividing k probabilities by
their sum is the same as a softmax over the k chosen logits, so what the other experts score does not matter.
"""

# sphinx_gallery_words = ["norm_topk_prob", "e_score_correction_bias", "routed_scaling_factor", "n_group", "topk_group", "load_balancing_loss_func", "router_aux_loss_coef", "shared_experts", "shared_expert_gate", "DeepseekV3MoE"]

import torch
from transformers import Qwen3MoeConfig

from lm_from_scratch.layers.experts import (
    best,
    sigmoid_routing,
    softmax_routing,
)

E, k = 16, 4
logits = torch.randn(200, E, dtype=torch.float64)
soft = softmax_routing(logits, k, normalize=True)
chosen = logits.gather(1, soft.experts).softmax(-1)
torch.testing.assert_close(soft.weights, chosen)
plain = softmax_routing(logits, k, normalize=False)
sig = sigmoid_routing(logits, torch.zeros(E), k)
assert torch.equal(soft.experts, sig.experts)  # both are monotone
print(f"largest weight, softmax: {soft.weights[:, 0].mean():.2f} on average")
print(f"largest weight, sigmoid: {sig.weights[:, 0].mean():.2f}")
print(f"sum of weights, not normalised: {plain.weights.sum(-1).mean():.2f}")
assert soft.weights[:, 0].mean() > sig.weights[:, 0].mean() > 1 / k

# %%
# Both choose the same experts, because both functions rise with the logit. The weights differ: the sigmoid's are
# flatter. And a bias that is added for the choice means the same for all tokens with a sigmoid, whose scores are
# between 0 and 1 for each expert alone; beside 16 or 256 probabilities that sum to 1 its size would depend on E.
#
# Where k experts of 16 are not normalised, the layer's output shrinks to the share of the probability that was chosen.
# In Mixtral and in the published Qwen3 models the weights sum to 1; the default of ``Qwen3MoeConfig`` is not to
# normalise, which matters only for a file that leaves the key out.

assert Qwen3MoeConfig().norm_topk_prob is False

# %%
# Some groups first
# -----------------
#
# DeepSeek-V3 has 256 experts in 8 groups, one for each machine. A token may go to 4 groups, so its vector travels to at
# most 4 machines. A group is worth the sum of its two best scores. That changes the choice of most tokens:

free = sigmoid_routing(logits, torch.zeros(E), k)
tied_down = sigmoid_routing(logits, torch.zeros(E), k, n_group=4, top_group=2)
same = (free.experts.sort().values == tied_down.experts.sort().values).all(-1)
groups = (tied_down.experts // 4).sort().values
print(f"same choice with groups: {same.double().mean():.0%} of the tokens")
assert same.double().mean() < 0.5
assert all(len(row.unique()) <= 2 for row in groups)

# %%
# Ties
# ----
#
# A sigmoid in float32 is exactly 1 for every logit above 17, so scores *can* be equal, and a rule has to decide.
# ``torch.topk`` promises no order. Ours takes the expert with the lower number:

equal = torch.zeros(1, 8)
print("topk:", equal.topk(3).indices.tolist()[0])
print("ours:", best(equal, 3).tolist()[0])
assert torch.tensor([18.0, 30.0]).sigmoid().tolist() == [1.0, 1.0]
assert best(equal, 3).tolist() == [[0, 1, 2]]

# %%
# A test that compares two implementations on tied scores compares two right answers. Ours make sure first that no two
# scores of a token are equal.
#
# What the loss pools
# -------------------
#
# The auxiliary loss is :math:`E \sum_e f_e P_e`, with visits and mean probabilities of each expert. For several layers
# ``transformers`` adds up visits and probabilities *first*. Then one layer can hide what another has too much of. Here
# each of two layers sends all tokens to one expert, and not to the same:

from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    load_balancing_loss_func,
)

from lm_from_scratch.training.balance import balancing_loss

crowds = [40.0 * torch.eye(2)[[e] * 100] for e in range(2)]
routings = [softmax_routing(z, 1, True) for z in crowds]
pooled = balancing_loss(routings)
torch.testing.assert_close(
    pooled, load_balancing_loss_func(tuple(crowds), num_experts=2, top_k=1)
)
each = [balancing_loss([routing]).item() for routing in routings]
print(f"pooled: {pooled:.1f} (perfect is 1), each layer: {each}")
assert abs(pooled - 1) < 1e-6 and each == [2.0, 2.0]

# %%
# The pooled loss is perfect, and each layer as uneven as can be. Call it once for each layer, and add up.

# %%
# Bug museum
# ----------
#
# A bias that weighs
# ~~~~~~~~~~~~~~~~~~
#
# The correction bias belongs to the choice (M48). If the weights are taken from the biased scores, the output changes
# with every step of the balance, and an expert with few tokens weighs more *because* it had few. It happened in
# `vLLM <https://github.com/vllm-project/vllm/pull/12002>`_, and later, when code that had been right was rearranged, in
# `transformers <https://github.com/huggingface/transformers/pull/41647>`_.

bias = torch.zeros(E).index_fill(0, torch.tensor([3]), 2.0)
right = sigmoid_routing(logits, bias.double(), k)
scores = logits.sigmoid() + bias
wrong = scores.gather(1, right.experts)
wrong = wrong / wrong.sum(-1, keepdim=True)
third = right.experts == 3
print(f"weight of the expert that waited: {right.weights[third].mean():.2f}")
print(f"with the bias in the weight:      {wrong[third].mean():.2f}")
assert wrong[third].mean() > 1.5 * right.weights[third].mean()
shifted = sigmoid_routing(logits, bias.double() + 1.0, k)
torch.testing.assert_close(shifted.weights, right.weights)

# %%
# Nothing crashes, and the weights still sum to 1. The check: add a constant to the bias of all experts. No output may
# change.
#
# Closed groups that score zero
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# If scores of closed groups become 0, and not minus infinity, all is well until the biases make the scores of an open
# group negative (M49). Then 0 wins, and the token goes where it may not. The same line was in several libraries, for
# one in `transformers until 2026 <https://github.com/huggingface/transformers/issues/45440>`_. A reader who looked up
# the biases of DeepSeek-V3 found none below 2 (`its fix <https://github.com/huggingface/transformers/pull/45441>`_): that
# model could not show the mistake, and another that is built from the same class could.

below = torch.full((E,), -3.0, dtype=torch.float64)
good = sigmoid_routing(logits, below, k, n_group=4, top_group=1)
choice = (logits.sigmoid() + below).unflatten(-1, (4, 4))
worth = choice.topk(2).values.sum(-1)
closed = worth < worth.max(-1, keepdim=True).values
bad = best(choice.masked_fill(closed[..., None], 0.0).flatten(1), k)


def how_many(experts):
    return max(len(row.unique()) for row in experts // 4)


in_closed = closed.gather(1, bad // 4).double().mean()
print(f"groups of a token: {how_many(good.experts)}")
print(f"with 0, visits to closed groups: {in_closed:.0%}")
assert how_many(good.experts) == 1 and in_closed == 1

# %%
# The bad choice takes experts of closed groups alone, and needs biases to do it: with fresh ones, at 0, every test passes.
#
# Padding that counts
# ~~~~~~~~~~~~~~~~~~~
#
# All padding tokens are equal, so they go to the same experts (M50). Counted along with real tokens they look like an
# overload, and the balance works against experts that have nothing to do. The loss of Mixtral in ``transformers`` counted
# them until a reader `asked for a mask <https://github.com/huggingface/transformers/issues/28505>`_.

from lm_from_scratch.training.balance import overload, visits

rows = torch.cat([logits[:100], logits[:1].expand(100, -1)])
real = torch.arange(200) < 100
routing = softmax_routing(rows, k, True)
print(f"overload with padding: {overload(visits(routing)):.2f}")
print(f"without:               {overload(visits(routing, real)):.2f}")
assert overload(visits(routing)) > 1.0 > overload(visits(routing, real))

# %%
# Exercises
# ---------
#
# 1. *Easy.* Print how often softmax and sigmoid choose the same experts if each has a bias of 0.1 on expert 3. A good
#    answer says why that bias moves one of them more, for E = 16 and for E = 256.
# 2. *Medium.* Let the balance of the lesson count visits of three layers together, as the pooled loss does. A good answer
#    has the overload of each layer, with and without pooling, for three seeds.
#
# Summary
# -------
#
# * Mixtral, Qwen3 and DeepSeek-V3 differ in the scores, in what is normalised, in groups of experts, and in an expert for
#   all tokens.
# * Equal scores need a rule, and a loss of several layers is taken layer by layer.
# * A bias takes part in the choice alone; closed groups score minus infinity; padding is no visit.
#
# Sources
# -------
#
# * `Outrageously Large Neural Networks <https://arxiv.org/abs/1701.06538>`_: the sparsely gated mixture
# * `Switch Transformers <https://arxiv.org/abs/2101.03961>`_: the auxiliary loss
# * `Mixtral of Experts <https://arxiv.org/abs/2401.04088>`_
# * `DeepSeekMoE <https://arxiv.org/abs/2401.06066>`_: many small experts, and shared ones
# * `Auxiliary-Loss-Free Load Balancing <https://arxiv.org/abs/2408.15664>`_
# * `DeepSeek-V3 <https://arxiv.org/abs/2412.19437>`_
# * `Qwen3 <https://arxiv.org/abs/2505.09388>`_

import lm_from_scratch

print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
