"""Layers of experts: routers, the sum over experts, shared experts, balance."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from since_qwen2.whole_models import (
    DOUBLE,
    Ideas,
    Laws,
    Rows,
    chunked,
    exact,
    first,
    full,
    near,
    noise,
)
from tiny_models import enlarge_
from torch import Tensor, nn

from lm_from_scratch.layers import experts
from lm_from_scratch.layers.experts import Routing
from lm_from_scratch.layers.gated_mlp import PRODUCTS, GatedMLP
from lm_from_scratch.training import balance

# --------------------------------------------------------------------------------------------- laws

N, C, E, K, WIDTH = 23, 12, 8, 3, 5


def mixture(kind: str) -> nn.Module:
    """A layer as the code makes it now."""
    some = experts.Experts(E, C, WIDTH)
    if kind == "sigmoid":
        gate = experts.SigmoidRouter(C, E, K, True, 2.5, n_group=4, top_group=2)
        return experts.SharedExperts(gate, some, GatedMLP(C, 2 * WIDTH))
    softmax = experts.SoftmaxRouter(C, E, K, kind == "normalised")
    if kind == "gated":
        return experts.GatedSharedExpert(softmax, some, GatedMLP(C, 9))
    return experts.MixtureOfExperts(softmax, some)


@cache
def of_mixture(kind: str) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Tensor]]:
    """Weights, and the result and gradients of the module in transformers."""
    import transformers
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

    sizes: dict[str, Any] = dict(
        hidden_size=C,
        num_experts_per_tok=K,
        moe_intermediate_size=WIDTH,
        norm_topk_prob=kind in ("normalised", "sigmoid"),
    )
    theirs: nn.Module
    if kind == "sigmoid":
        sizes |= dict(n_routed_experts=E, n_group=4, topk_group=2, n_shared_experts=2)
        theirs = DeepseekV3MoE(transformers.DeepseekV3Config(**sizes, routed_scaling_factor=2.5))
    elif kind == "gated":
        sizes |= dict(num_experts=E, shared_expert_intermediate_size=9)
        theirs = Qwen3NextSparseMoeBlock(transformers.Qwen3NextConfig(**sizes))
    else:
        theirs = Qwen3MoeSparseMoeBlock(transformers.Qwen3MoeConfig(**sizes, num_experts=E))
    enlarge_(theirs)
    for buffer in theirs.buffers():
        buffer.copy_(
            -1 + 0.3 * noise(E, seed=5)
        )  # sums below 0, which a closed group must not beat
    x = noise(2, N, C, seed=6).requires_grad_()
    y = theirs(x)
    y.backward(noise(2, N, C, seed=7))
    assert x.grad is not None
    found = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    return copy.deepcopy(theirs.state_dict()), y.detach(), x.grad, found


def is_theirs(kind: str) -> None:
    state, want, grad, found = of_mixture(kind)
    ours, x = mixture(kind), noise(2, N, C, seed=6).requires_grad_()
    ours.load_state_dict(state)
    y = ours(x)
    near(y, want, 5e-5)
    y.backward(noise(2, N, C, seed=7))
    near(x.grad, grad)
    for name, p in ours.named_parameters():
        assert p.grad is not None, name
        near(p.grad, found[name])


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
    gate = mixture("sigmoid").gate
    bias = 0.3 + 1e-4 * torch.arange(E)
    enlarge_(gate)
    gate.e_score_correction_bias.copy_(bias)
    half = copy.deepcopy(gate).bfloat16()
    assert torch.equal(half.e_score_correction_bias, bias)
    x = noise(200, C).bfloat16()
    whole = copy.deepcopy(half).float()
    assert torch.equal(half(x).experts, whole(x.float()).experts)
    exact(half(x).weights, whole(x.float()).weights)


@cache
def of_balance() -> tuple[Tensor, Tensor]:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = noise(2, 12, E).requires_grad_()
    loss = load_balancing_loss_func(tuple(logits), E, K, torch.tensor([[0] * 3 + [1] * 9]))
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def auxiliary_loss() -> None:
    logits = noise(2, 12, E).requires_grad_()
    some = [experts.softmax_routing(z, K, True) for z in logits]
    loss = balance.balancing_loss(some, torch.tensor([[0] * 3 + [1] * 9]))
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


LAWS: Laws = {
    "softmax, normalised": partial(is_theirs, "normalised"),
    "softmax": partial(is_theirs, "plain"),
    "sigmoid": partial(is_theirs, "sigmoid"),
    "shared with a gate": partial(is_theirs, "gated"),
    "by loop": by_loop,
    "equal scores": first_of_equal,
    "16 bits": routed_in_float32,
    "auxiliary loss": auxiliary_loss,
    "bias": bias_balances,
    "full": partial(full, "qwen3_moe"),
    "chunked": partial(chunked, "qwen3_moe"),
}

# ----------------------------------------------------------------------------------------- mistakes


def softmax_routed(
    weigh: Callable[[Tensor, Tensor], Tensor] = lambda z, e: z.softmax(-1).gather(-1, e),
    normalise: Callable[[Tensor, bool], Tensor] = (
        lambda w, yes: w / w.sum(-1, keepdim=True) if yes else w
    ),
    choose: Callable[[Tensor, int], Tensor] = experts.best,
) -> Any:
    """The router by softmax, given the weights of the chosen, their sum, and the choice."""

    def routing(logits: Tensor, k: int, normalize: bool) -> Routing:
        chosen = choose(logits.softmax(-1), k)
        return Routing(logits, chosen, normalise(weigh(logits, chosen), normalize))

    return routing


def sigmoid_routed(
    squash: Callable[[Tensor], Tensor] = torch.sigmoid,
    worth: Callable[[Tensor], Tensor] = lambda groups: groups.topk(2, dim=-1).values.sum(-1),
    closed: float = -math.inf,
    choice: Callable[[Tensor, Tensor], Tensor] = torch.add,
    weigh: Callable[[Tensor, Tensor], Tensor] = first,
    last: Callable[[Tensor, float], Tensor] = lambda w, s: (
        w / (w.sum(-1, keepdim=True) + 1e-20) * s
    ),
) -> Any:
    """The router by sigmoid, given what a group is worth, what closes one, what the bias is for,
    and the end."""

    def routing(
        logits: Tensor, bias: Tensor, k: int, normalize: bool, scale: float, G: int, top: int
    ) -> Routing:
        scores = squash(logits)
        groups = choice(scores.detach(), bias).unflatten(-1, (G, -1))
        is_open = torch.zeros(len(groups), G, dtype=torch.bool)
        is_open.scatter_(1, experts.best(worth(groups), top), True)
        chosen = experts.best(groups.masked_fill(~is_open[..., None], closed).flatten(1), k)
        return Routing(logits, chosen, last(weigh(scores, scores + bias).gather(-1, chosen), scale))

    return routing


def summed(
    token: Callable[[Tensor, int, int], Tensor] = lambda order, k, n: order // k,
    back: Callable[[Tensor], Tensor] = torch.argsort,
    swap: bool = False,
    weights: Callable[[Tensor], Tensor] = lambda w: w,
) -> Any:
    """The sum over experts, given which token a visit is of, how visits come back into order."""

    def expert_sum(x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, product: Any) -> Any:
        k, visits = routing.experts.shape[1], routing.experts.flatten()
        order = visits.argsort(stable=True)
        rows, parts, start = x[token(order, k, len(x))], [], 0
        for W1, W2, n in zip(gate_up, down, torch.bincount(visits, minlength=len(down)).tolist()):
            gate, up = F.linear(rows[start : start + n], W1).chunk(2, dim=-1)
            parts.append(F.linear(product(up, gate) if swap else product(gate, up), W2))
            start += n
        y = torch.cat(parts)[back(order)].unflatten(0, (-1, k))
        return torch.einsum("nk,nkc->nc", weights(routing.weights), y)

    return expert_sum


def last_of_equal(scores: Tensor, k: int) -> Tensor:
    order = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    return scores.shape[-1] - 1 - order[:, :k]


def shared_without_gate(self: Any, x: Tensor) -> Tensor:
    return experts.MixtureOfExperts.forward(self, x) + self.shared_expert(x)


def without_shared(self: Any, x: Tensor) -> Tensor:
    return experts.MixtureOfExperts.forward(self, x)


def auxiliary(
    share: Callable[[Tensor], Tensor] = lambda p: p, padding: bool = False, scale: float = 1.0
) -> Any:
    """The loss for balance, given what stands for the mean probability."""

    def loss(routings: Any, real: Tensor | None = None) -> Tensor:
        real = None if padding else real
        E = routings[0].logits.shape[-1]
        keep = slice(None) if real is None else real.flatten().bool()
        p = torch.cat([share(r.logits).softmax(-1)[keep] for r in routings])
        counts = sum(balance.visits(r, real) for r in routings)
        return scale * E * (counts / len(p) * p.mean(0)).sum()

    return loss


ROUTER, CHOOSER = "layers.experts:softmax_routing", "layers.experts:sigmoid_routing"
SUM, BALANCE = "layers.experts:expert_sum", "training.balance:balancing_loss"
SAME: Rows = [
    ("the router by softmax", ROUTER, softmax_routed()),
    (
        "softmax of the chosen scores, times their share",
        ROUTER,
        softmax_routed(
            lambda z, e: z.gather(-1, e).softmax(-1) * z.softmax(-1).gather(-1, e).sum(-1, True)
        ),
    ),
    ("the router by sigmoid", CHOOSER, sigmoid_routed()),
    ("the sum", SUM, summed()),
    ("the loss for balance", BALANCE, auxiliary()),
]
MUTANTS: Rows = [
    (
        "softmax of the chosen scores alone",
        ROUTER,
        softmax_routed(lambda z, e: z.gather(-1, e).softmax(-1)),
    ),
    (
        "weights always sum to 1",
        ROUTER,
        softmax_routed(normalise=lambda w, yes: w / w.sum(-1, True)),
    ),
    ("weights never sum to 1", ROUTER, softmax_routed(normalise=first)),
    ("the last of equal experts", "layers.experts:best", last_of_equal),
    (
        "topk, which leaves ties open",
        "layers.experts:best",
        lambda s, k: s.topk(k).indices.flip(-1),
    ),
    (
        "no gradient for the router",
        ROUTER,
        softmax_routed(lambda z, e: z.detach().softmax(-1).gather(-1, e)),
    ),
    ("softmax in the place of sigmoid", CHOOSER, sigmoid_routed(lambda z: z.softmax(-1))),
    ("the bias weighs", CHOOSER, sigmoid_routed(weigh=lambda scores, biased: biased)),
    ("the bias chooses nothing", CHOOSER, sigmoid_routed(choice=first)),
    ("a group is worth its best expert", CHOOSER, sigmoid_routed(worth=lambda g: g.amax(-1))),
    ("closed groups have 0", CHOOSER, sigmoid_routed(closed=0.0)),
    (
        "scaled before the sum",
        CHOOSER,
        sigmoid_routed(last=lambda w, s: w * s / (w * s).sum(-1, True)),
    ),
    ("the bias in 16 bits", "layers.experts:SigmoidRouter._apply", nn.Module._apply),
    ("results in the order of experts", SUM, summed(back=lambda order: torch.arange(len(order)))),
    ("the order for its inverse", SUM, summed(back=first)),
    ("a visit taken for a token", SUM, summed(token=lambda order, k, n: order % n)),
    ("gate and up exchanged", SUM, summed(swap=True)),
    ("all experts weigh alike", SUM, summed(weights=torch.ones_like)),
    ("the shared expert forgotten", "layers.experts:SharedExperts.forward", without_shared),
    (
        "the shared expert without its gate",
        "layers.experts:GatedSharedExpert.forward",
        shared_without_gate,
    ),
    ("padding is balanced", BALANCE, auxiliary(padding=True)),
    ("the loss not times E", BALANCE, auxiliary(scale=1 / 8)),
    ("probabilities of sharper scores", BALANCE, auxiliary(share=lambda z: 2 * z)),
    (
        "the bias falls for experts that wait",
        "training.balance:balanced_bias",
        lambda bias, counts, rate: bias - rate * (counts.mean() - counts).sign(),
    ),
]


IDEAS: Ideas = {"experts": (LAWS, SAME, MUTANTS)}
