r"""
Routing in depth
================

The lesson on the `mixture of experts <2_mixture_of_experts.ipynb>`_ puts many experts in place of one MLP. Is our layer
that of Mixtral, Qwen3 and DeepSeek-V3? What differs between softmax and sigmoid, what happens when scores tie, what does
the balancing loss of ``transformers`` pool, and which mistakes stay unnoticed?
"""

# sphinx_gallery_words = ["norm_topk_prob", "e_score_correction_bias", "routed_scaling_factor", "n_group", "topk_group", "load_balancing_loss_func", "router_aux_loss_coef", "shared_experts", "shared_expert_gate", "DeepseekV3MoE"]

import torch

from lm_from_scratch.layers.experts import (
    Experts,
    MixtureOfExperts,
    SharedExperts,
    SigmoidRouter,
    SoftmaxRouter,
    active_parameters,
    best,
    sigmoid_routing,
    softmax_routing,
)
from lm_from_scratch.layers.gated_mlp import GatedMLP
from lm_from_scratch.models.randomize import randomize_

C, E, k, width = 32, 16, 4, 12

# %%
# The same as three families
# --------------------------
#
# Modules carry the names of ``transformers``, so weights load by name. Weights are large, so that a wrong choice shows.

from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeSparseMoeBlock,
)

sizes = dict(hidden_size=C, num_local_experts=E, num_experts_per_tok=k)
deepseek = DeepseekV3Config(
    **{**sizes, "n_routed_experts": E, "n_group": 4, "topk_group": 2},
    moe_intermediate_size=width,
)
theirs = {
    "Mixtral": MixtralSparseMoeBlock(
        MixtralConfig(**sizes, intermediate_size=width)
    ),
    "Qwen3": Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(**sizes, moe_intermediate_size=width)
    ),
    "DeepSeek-V3": DeepseekV3MoE(deepseek),
}
grouped = SigmoidRouter(C, E, k, scale=2.5, n_group=4, top_group=2)
ours = {
    "Mixtral": MixtureOfExperts(
        SoftmaxRouter(C, E, k, normalize=True), Experts(E, C, width)
    ),
    "Qwen3": MixtureOfExperts(
        SoftmaxRouter(C, E, k, normalize=False), Experts(E, C, width)
    ),
    "DeepSeek-V3": SharedExperts(
        grouped, Experts(E, C, width), GatedMLP(C, width)
    ),
}
x = torch.randn(3, 50, C)
for name, layer in ours.items():
    randomize_(theirs[name])
    experts = theirs[name].experts
    experts.config._experts_implementation = "eager"
    if name == "DeepSeek-V3":
        theirs[name].gate.e_score_correction_bias.normal_(0.0, 0.3)
    layer.load_state_dict(theirs[name].state_dict())
    y, want = layer(x), theirs[name](x)
    error = (y - want).abs().max().item()
    print(f"{name:12} outputs up to {y.abs().max():5.1f}, error {error:.0e}")
    assert error < 5e-5 * max(1.0, y.abs().max())

# %%
# Softmax or sigmoid
# ------------------
#
# Softmax makes the scores of a token compete: when one expert rises, all others fall. A sigmoid looks at each expert
# alone. With normalised weights there is less between them than it seems: for softmax, dividing k probabilities by
# their sum is the same as a softmax over the k chosen logits, so what the other experts score does not matter.

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
# What was published
# ------------------
#
# Total and active numbers of published configs, counted without weights.

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.models.qwen3_moe import SIZES
from lm_from_scratch.models.qwen3_moe import Qwen3MoeConfig as Config

for name, size in SIZES.items():
    with torch.device("meta"):
        model = build(Config(**size))
    total = sum(p.numel() for p in model.parameters())
    active = active_parameters(model)
    of_experts = sum(
        p.numel() for n, p in model.named_parameters() if ".experts." in n
    )
    print(
        f"{name:16} {total / 1e9:6.1f} billion, active {active / 1e9:5.1f}, "
        f"in experts {of_experts / total:.0%}"
    )
    assert of_experts / total > 0.9 and 8 < total / active < 12

with torch.device("meta"):
    router = SigmoidRouter(7168, 256, 8, True, 2.5, n_group=8, top_group=4)
    layer = SharedExperts(
        router, Experts(256, 7168, 2048), GatedMLP(7168, 2048)
    )
total = sum(p.numel() for p in layer.parameters())
print(
    f"a layer of DeepSeek-V3: {total / 1e9:.1f} billion, "
    f"active {active_parameters(layer) / 1e9:.2f}"
)
assert 11.3 < total / 1e9 < 11.4 and 0.39 < active_parameters(layer) / 1e9 < 0.4

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
# * Our layer is that of Mixtral, Qwen3 and DeepSeek-V3. They differ in the scores, in what is normalised, in groups of
#   experts, and in an expert for all tokens.
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
