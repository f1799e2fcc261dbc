"""Layers of experts: routers, the sum over experts, shared experts, balance."""

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from model_laws import DOUBLE, chunked, exact, full, near, noise
from mutation import Mutant, killer, mutants
from tiny_models import enlarge_
from torch import Tensor, nn

from lm_from_scratch.layers import experts
from lm_from_scratch.layers.activation import PRODUCTS, GatedMLP
from lm_from_scratch.training import balance

N, C, E, K, WIDTH = 23, 12, 8, 3, 5
KINDS = "normalised", "plain", "sigmoid", "gated"


def mixture(kind: str) -> nn.Module:
    """A layer as the code is now."""
    stack = experts.Experts(E, C, WIDTH)
    if kind == "sigmoid":
        gate = experts.SigmoidRouter(C, E, K, True, 2.5, n_group=4, top_group=2)
        return experts.SharedExperts(gate, stack, GatedMLP(C, 2 * WIDTH))
    softmax = experts.SoftmaxRouter(C, E, K, kind == "normalised")
    if kind == "gated":
        return experts.GatedSharedExpert(softmax, stack, GatedMLP(C, 9))
    return experts.MixtureOfExperts(softmax, stack)


@cache
def of_mixture(kind: str) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Tensor]]:
    """Weights, and the result and gradients of the module in transformers."""
    import transformers
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

    sizes: dict[str, Any] = dict(
        hidden_size=C, num_experts_per_tok=K, moe_intermediate_size=WIDTH,
        norm_topk_prob=kind in ("normalised", "sigmoid"),
    )  # fmt: skip
    twin: nn.Module
    if kind == "sigmoid":
        sizes |= dict(n_routed_experts=E, n_group=4, topk_group=2, n_shared_experts=2)
        twin = DeepseekV3MoE(transformers.DeepseekV3Config(**sizes, routed_scaling_factor=2.5))
    elif kind == "gated":
        sizes |= dict(num_experts=E, shared_expert_intermediate_size=9)
        twin = Qwen3NextSparseMoeBlock(transformers.Qwen3NextConfig(**sizes))
    else:
        twin = Qwen3MoeSparseMoeBlock(transformers.Qwen3MoeConfig(**sizes, num_experts=E))
    enlarge_(twin)
    for bias in twin.buffers():  # sums below 0, which a closed group must not beat
        bias.copy_(-1 + 0.3 * noise(E, seed=5))
    x = noise(2, N, C, seed=6).requires_grad_()
    y = twin(x)
    y.backward(noise(2, N, C, seed=7))
    assert x.grad is not None
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    return copy.deepcopy(twin.state_dict()), y.detach(), x.grad, gradients


def as_transformers(kind: str) -> None:
    state, expected, grad, gradients = of_mixture(kind)
    layer, x = mixture(kind), noise(2, N, C, seed=6).requires_grad_()
    layer.load_state_dict(state)
    y = layer(x)
    near(y, expected, 5e-5)
    y.backward(noise(2, N, C, seed=7))
    near(x.grad, grad)
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        near(parameter.grad, gradients[name])


def by_loop() -> None:
    """One token and one expert at a time, in float64."""
    layer = mixture("normalised").double()
    enlarge_(layer)
    x, rows = noise(N, C, seed=8, dtype=DOUBLE), []
    routing, gate_up, down = layer.gate(x), layer.experts.gate_up_proj, layer.experts.down_proj
    for n, token in enumerate(x):
        y = torch.zeros_like(token)
        for e, weight in zip(routing.experts[n], routing.weights[n], strict=True):
            y = y + weight * (down[e] @ PRODUCTS["silu"](*(gate_up[e] @ token).chunk(2)))
        rows.append(y)
    exact(layer(x), torch.stack(rows))


@torch.no_grad()
def first_of_equal() -> None:
    """Of equal scores the expert with the lower number, and of equal groups the first."""
    for kind in ("normalised", "sigmoid"):
        gate = mixture(kind).gate
        gate.weight.zero_()
        assert gate(noise(4, C)).experts.tolist() == [[0, 1, 2]] * 4


@torch.no_grad()
def routed_in_float32() -> None:
    """A router whose model is in 16 bits chooses by float32, and its bias keeps all digits."""
    gate, bias = mixture("sigmoid").gate, 0.3 + 1e-4 * torch.arange(E)
    enlarge_(gate)
    gate.e_score_correction_bias.copy_(bias)
    half = copy.deepcopy(gate).bfloat16()
    assert torch.equal(half.e_score_correction_bias, bias)
    x, single = noise(200, C).bfloat16(), copy.deepcopy(half).float()
    assert torch.equal(half(x).experts, single(x.float()).experts)
    exact(half(x).weights, single(x.float()).weights)


@cache
def of_balance() -> tuple[Tensor, Tensor]:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = noise(2, 12, E).requires_grad_()
    loss = load_balancing_loss_func(tuple(logits), E, K, torch.tensor([[0] * 3 + [1] * 9]))
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def auxiliary_loss() -> None:
    logits = noise(2, 12, E).requires_grad_()
    routings = [experts.softmax_routing(z, K, True) for z in logits]
    loss = balance.balancing_loss(routings, torch.tensor([[0] * 3 + [1] * 9]))
    near((loss, *torch.autograd.grad(loss, logits)), of_balance(), 1e-5)


@torch.no_grad()
def bias_balances() -> None:
    """Experts of which one is preferred are as busy after some steps."""
    gate, x = experts.SigmoidRouter(C, E, 2), noise(400, C)
    enlarge_(gate)
    gate.weight[0] = 0.0
    gate.e_score_correction_bias[1] = 0.4
    before = balance.overload(balance.visits(gate(x)))
    for _ in range(100):
        counts = balance.visits(gate(x))
        bias = balance.balanced_bias(gate.e_score_correction_bias, counts, 0.01)
        gate.e_score_correction_bias.copy_(bias)
    assert balance.overload(counts) < 0.2 < before


LAWS = {
    **{kind: partial(as_transformers, kind) for kind in KINDS},
    "by loop": by_loop,
    "equal scores": first_of_equal,
    "16 bits": routed_in_float32,
    "auxiliary loss": auxiliary_loss,
    "bias": bias_balances,
    "full": partial(full, "qwen3_moe"),
    "chunked": partial(chunked, "qwen3_moe"),
}

BEST = "scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]"
SUM = "weights = weights / (weights.sum("

MISTAKES = {
    "layers.experts:softmax_routing": [
        ("softmax of the chosen scores alone",
         "probabilities.gather(-1, experts)", "logits.gather(-1, experts).softmax(-1)"),
        ("weights always sum to 1", "if normalize:", "if True:"),
        ("weights never sum to 1", "if normalize:", "if False:"),
        ("no gradient for the router", "probabilities.gather", "probabilities.detach().gather"),
    ],
    "layers.experts:best": [
        ("the last of equal experts", "scores.sort", "scores.shape[-1] - 1 - scores.flip(-1).sort"),
        ("topk, which leaves ties open", BEST, "scores.topk(k).indices.flip(-1)"),
    ],
    "layers.experts:sigmoid_routing": [
        ("softmax in the place of sigmoid", "logits.sigmoid()", "logits.softmax(-1)"),
        ("the bias weighs", "scores.gather(-1, experts)", "(scores + bias).gather(-1, experts)"),
        ("the bias chooses nothing", "scores.detach() + bias", "scores.detach()"),
        ("a group is worth its best expert",
         "groups.topk(2, dim=-1).values.sum(dim=-1)", "groups.amax(-1)"),
        ("closed groups have 0", "-torch.inf", "0.0"),
        ("scaled before the sum", SUM, f"weights, scale = weights * scale, 1.0; {SUM}"),
    ],
    "layers.experts:SigmoidRouter._apply": [
        ("the bias in 16 bits", "torch.promote_types(after.dtype, torch.float32)", "after.dtype"),
    ],
    "layers.experts:expert_sum": [
        ("results in the order of experts", "y[order.argsort()]", "y"),
        ("the order for its inverse", "y[order.argsort()]", "y[order]"),
        ("a visit taken for a token", "x[order // k]", "x[order % len(x)]"),
        ("gate and up exchanged", ".chunk(2, dim=-1)", ".chunk(2, dim=-1)[::-1]"),
        ("all experts weigh alike", "routing.weights.to", "torch.ones_like(routing.weights).to"),
    ],
    "layers.experts:SharedExperts.forward": [
        ("the shared expert forgotten", " + self.shared_experts(x)", ""),
    ],
    "layers.experts:GatedSharedExpert.forward": [
        ("the shared expert without its gate", "self.shared_expert_gate(x).sigmoid() * ", ""),
    ],
    "training.balance:balancing_loss": [
        ("padding is balanced", "if not routings:", "real = None\n    if not routings:"),
        ("the loss not times E", "len(counts) * (counts", "(counts"),
        ("probabilities of sharper scores", "logits.softmax", "logits.mul(2).softmax"),
    ],
    "training.balance:balanced_bias": [
        ("the bias falls for experts that wait", "bias + rate", "bias - rate"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(MISTAKES))
def test_a_law_finds_the_mistake(mutant: Mutant) -> None:
    assert killer(mutant, LAWS)
