"""Mixtures of experts against transformers, at drawn sizes, and the laws in float64."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import enlarge_
from torch import Tensor, nn

from lm_from_scratch.layers.experts import (
    Experts,
    GatedSharedExpert,
    MixtureOfExperts,
    Routing,
    SharedExperts,
    SigmoidRouter,
    SoftmaxRouter,
    active_parameters,
    best,
    expert_sum,
    sigmoid_routing,
    softmax_routing,
)
from lm_from_scratch.layers.gated_mlp import PRODUCTS, GatedMLP

N, C = 23, 12  # tokens, features


def give_same_weights_(ours: nn.Module, theirs: nn.Module, seed: int) -> None:
    """Both with the same large weights; a correction bias among them."""
    enlarge_(theirs, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in theirs.named_buffers():
        assert name == "gate.e_score_correction_bias"
        buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
    ours.load_state_dict(theirs.state_dict())


def check_equal(ours: nn.Module, theirs: nn.Module, seed: int) -> None:
    """Results and gradients, of the input too."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, N, C, generator=generator)
    grad = torch.randn(2, N, C, generator=generator)
    logits = ours.gate(x.flatten(0, 1)).logits
    no_ties(logits.sigmoid() if isinstance(ours.gate, SigmoidRouter) else logits.softmax(-1))
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    y, want = ours(mine), theirs(other)
    torch.testing.assert_close(y, want, atol=5e-5, rtol=0)
    y.backward(grad)
    want.backward(grad)
    torch.testing.assert_close(mine.grad, other.grad, atol=1e-4, rtol=1e-4)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], atol=1e-4, rtol=1e-4, msg=name)


def no_ties(scores: Tensor) -> None:
    """Of equal scores ``topk`` takes any: then two right answers differ, and nothing is tested."""
    ordered = scores.sort(dim=-1).values
    assert (ordered.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("seed", range(25))
def test_a_softmax_layer_is_that_of_qwen3_moe_or_mixtral(seed: int) -> None:
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    draw = random.Random(seed)
    E, width = draw.choice([2, 5, 8]), draw.choice([4, 7])
    k, normalize = draw.randint(1, E), draw.choice([False, True])
    sizes: dict[str, Any] = dict(hidden_size=C, num_experts_per_tok=k, num_local_experts=E)
    if seed % 2:
        normalize = True
        theirs = MixtralSparseMoeBlock(MixtralConfig(**sizes, intermediate_size=width))
    else:
        sizes |= dict(moe_intermediate_size=width, norm_topk_prob=normalize)
        theirs = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes))
    ours = MixtureOfExperts(SoftmaxRouter(C, E, k, normalize), Experts(E, C, width))
    give_same_weights_(ours, theirs, seed)
    check_equal(ours, theirs, seed)


@pytest.mark.parametrize("seed", range(25))
def test_a_sigmoid_layer_is_that_of_deepseek_v3(seed: int) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    draw = random.Random(seed)
    n_group, size = draw.choice([1, 2, 4]), draw.choice([2, 3, 4])
    E, top_group, width = n_group * size, draw.randint(1, n_group), draw.choice([4, 7])
    k, shared = draw.randint(1, top_group * size), draw.choice([1, 2])
    normalize, scale = draw.choice([False, True]), draw.choice([1.0, 2.5])
    config = DeepseekV3Config(
        hidden_size=C, n_routed_experts=E, num_experts_per_tok=k, n_group=n_group,
        topk_group=top_group, moe_intermediate_size=width, n_shared_experts=shared,
        norm_topk_prob=normalize, routed_scaling_factor=scale,
    )  # fmt: skip
    theirs = DeepseekV3MoE(config)
    gate = SigmoidRouter(C, E, k, normalize, scale, n_group, top_group)
    ours = SharedExperts(gate, Experts(E, C, width), GatedMLP(C, width * shared))
    give_same_weights_(ours, theirs, seed)
    assert gate.e_score_correction_bias.abs().max() > 0.1
    check_equal(ours, theirs, seed)


@pytest.mark.parametrize("seed", range(25))
def test_a_gated_shared_expert_is_that_of_qwen3_next(seed: int) -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

    draw = random.Random(seed)
    E, width, shared = draw.choice([3, 6]), draw.choice([4, 7]), draw.choice([5, 9])
    k, normalize = draw.randint(1, E), draw.choice([False, True])
    config = Qwen3NextConfig(
        hidden_size=C, num_experts=E, num_experts_per_tok=k, moe_intermediate_size=width,
        shared_expert_intermediate_size=shared, norm_topk_prob=normalize,
    )  # fmt: skip
    theirs = Qwen3NextSparseMoeBlock(config)
    gate = SoftmaxRouter(C, E, k, normalize)
    ours = GatedSharedExpert(gate, Experts(E, C, width), GatedMLP(C, shared))
    give_same_weights_(ours, theirs, seed)
    check_equal(ours, theirs, seed)


def by_loop(x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, name: str) -> Tensor:
    """One token and one expert at a time."""
    rows = []
    for n, token in enumerate(x):
        y = torch.zeros_like(token)
        for e, weight in zip(routing.experts[n], routing.weights[n], strict=True):
            gate, up = (gate_up[e] @ token).chunk(2)
            y = y + weight * (down[e] @ PRODUCTS[name](gate, up))
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["silu", "gelu"])
@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_sorting_changes_nothing(tokens: int, k: int, name: str) -> None:
    """In float64: values, and gradients of input, weights and experts. One token leaves most
    experts alone, whose gradients are 0."""
    torch.manual_seed(tokens + k)
    sizes = [(tokens, 5), (tokens, 6), (6, 14, 5), (6, 5, 7)]
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in sizes]
    grad = torch.randn(tokens, 5, dtype=torch.float64)
    results = []
    for grouped in (True, False):
        x, logits, gate_up, down = leaves
        routing = softmax_routing(logits, k, True)
        if grouped:
            y = expert_sum(x, routing, gate_up, down, PRODUCTS[name])
        else:
            y = by_loop(x, routing, gate_up, down, name)
        results.append([y, *torch.autograd.grad(y, leaves, grad)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_the_numbering_of_experts_means_nothing(sigmoid: bool) -> None:
    torch.manual_seed(3)
    E, k = 8, 3
    gate = SigmoidRouter(C, E, k, scale=2.5) if sigmoid else SoftmaxRouter(C, E, k, False)
    layer = MixtureOfExperts(gate, Experts(E, C, 5)).double()
    enlarge_(layer)
    if sigmoid:
        gate.e_score_correction_bias.normal_(0, 0.3)
    x = torch.randn(N, C, dtype=torch.float64)
    y, chosen = layer(x), gate(x).experts
    order = torch.randperm(E)
    state = {name: t[order] if len(t) == E else t for name, t in layer.state_dict().items()}
    layer.load_state_dict(state)
    torch.testing.assert_close(layer(x), y, atol=1e-12, rtol=0)
    assert torch.equal(order[gate(x).experts], chosen)


def test_tokens_do_not_see_each_other() -> None:
    layer = MixtureOfExperts(SoftmaxRouter(C, 8, 2, True), Experts(8, C, 5)).double()
    enlarge_(layer)
    x = torch.randn(3, 7, C, dtype=torch.float64)
    alone = torch.stack([torch.stack([layer(token[None])[0] for token in row]) for row in x])
    torch.testing.assert_close(layer(x), alone, atol=1e-12, rtol=0)


def test_with_all_experts_it_is_their_weighted_sum() -> None:
    """Nothing is chosen, so nothing can be lost: a mixture of E out of E is dense."""
    layer = MixtureOfExperts(SoftmaxRouter(C, 4, 4, False), Experts(4, C, 5)).double()
    enlarge_(layer)
    x = torch.randn(N, C, dtype=torch.float64)
    p = (x @ layer.gate.weight.T).softmax(-1)
    gate, up = torch.einsum("nc,efc->nef", x, layer.experts.gate_up_proj).chunk(2, dim=-1)
    dense = torch.einsum("ne,nef,ecf->nc", p, F.silu(gate) * up, layer.experts.down_proj)
    torch.testing.assert_close(layer(x), dense, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_of_16_bits_are_computed_in_32(dtype: torch.dtype) -> None:
    logits = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    half, whole = (softmax_routing(x, 4, normalize=False) for x in (logits, logits.float()))
    assert half.weights.dtype == torch.float32
    assert torch.equal(half.weights, whole.weights) and torch.equal(half.experts, whole.experts)


def test_of_equal_scores_the_first_expert_is_chosen() -> None:
    for E in (3, 8, 64, 130):
        assert best(torch.zeros(2, E), 3).tolist() == [[0, 1, 2]] * 2
    scores = torch.tensor([[1.0, 5.0, 5.0, 2.0, 5.0]])
    assert best(scores, 2).tolist() == [[1, 2]] and best(scores, 4).tolist() == [[1, 2, 4, 3]]
    # two experts of a group tie, and two groups
    logits, bias = torch.zeros(1, 8), torch.zeros(8)
    assert sigmoid_routing(logits, bias, 2, n_group=4, top_group=2).experts.tolist() == [[0, 1]]
    # a sigmoid of float32 is 1 from 17 on, and then scores are equal that were not
    logits = torch.tensor([[18.0, 30.0, 19.0]])
    assert sigmoid_routing(logits, torch.zeros(3), 1).experts.tolist() == [[0]]
    with pytest.raises(AssertionError):
        no_ties(logits.sigmoid())


def test_the_bias_chooses_and_does_not_weigh() -> None:
    """Also not in a group whose scores are all negative with it: a closed group is -inf, not 0."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([-9.0, -9.0, 0.5, 0.0])
    plain, biased = (sigmoid_routing(logits, b, 2, normalize=False) for b in (torch.zeros(4), bias))
    assert plain.experts.tolist() == [[0, 1]] and biased.experts.tolist() == [[2, 3]]
    assert torch.equal(biased.weights, logits.sigmoid()[:, 2:])
    below = sigmoid_routing(logits, torch.full((4,), -9.0), 2, n_group=2, top_group=1)
    assert below.experts.tolist() == [[0, 1]]
    logits.requires_grad_()
    bias.requires_grad_()
    sigmoid_routing(logits, bias, 2).weights.square().sum().backward()
    assert bias.grad is None and logits.grad.abs().max() > 0


def test_weights_sum_to_one_or_to_the_scale() -> None:
    logits = torch.randn(N, 8)
    assert torch.allclose(softmax_routing(logits, 3, True).weights.sum(-1), torch.ones(N))
    assert (softmax_routing(logits, 3, False).weights.sum(-1) < 1).all()
    scaled = sigmoid_routing(logits, torch.zeros(8), 3, True, 2.5).weights.sum(-1)
    assert torch.allclose(scaled, torch.full((N,), 2.5))
    lost = sigmoid_routing(torch.full((1, 4), -200.0), torch.zeros(4), 2)  # sigmoids of 0
    assert lost.weights.isfinite().all()


def test_no_token_is_no_trouble() -> None:
    layer = MixtureOfExperts(SoftmaxRouter(C, 4, 2, True), Experts(4, C, 5))
    assert layer(torch.zeros(2, 0, C)).shape == (2, 0, C)


def test_low_precision_is_routed_in_float32() -> None:
    layer = SharedExperts(SigmoidRouter(C, 8, 2), Experts(8, C, 5), GatedMLP(C, 5))
    enlarge_(layer)
    x = torch.randn(N, C)
    y = layer(x)
    half = layer.bfloat16()
    assert half.gate(x.bfloat16()).weights.dtype == torch.float32
    assert half(x.bfloat16()).dtype == torch.bfloat16
    error = (half(x.bfloat16()).float() - y).abs()
    assert error.median() < 0.02 * y.abs().median()


def test_the_correction_bias_keeps_its_digits_in_16_bits() -> None:
    gate, bias = SigmoidRouter(C, 8, 2), 0.3 + 1e-4 * torch.arange(8)
    gate.e_score_correction_bias.copy_(bias)
    assert torch.equal(gate.bfloat16().e_score_correction_bias, bias)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(n_group=3), "n_group=3 does not divide n_expert=8 into"),
        (dict(n_group=8, top_group=8), "n_group=8 does not divide n_expert=8 into groups of 2"),
        (dict(n_group=4, top_group=1), "top_group=1 groups of 2 have no top_k=3 experts"),
        (dict(n_group=2, top_group=3), "top_group=3 groups of 4 have no top_k=3 experts"),
        (dict(n_group=2, top_group=0), "top_group=0 groups"),
    ],
)
def test_groups_that_cannot_be_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SigmoidRouter(C, 8, 3, **options)


@pytest.mark.parametrize("k", [0, 9])
def test_more_visits_than_experts_are_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"top_k={k} must be at least 1, at most 8"):
        MixtureOfExperts(SoftmaxRouter(C, 8, k, True), Experts(8, C, 5))


def test_active_parameters_are_those_that_a_token_meets() -> None:
    layer = SharedExperts(SigmoidRouter(C, 8, 2), Experts(8, C, 5), GatedMLP(C, 7))
    assert active_parameters(layer) == 8 * C + 2 * 3 * C * 5 + 3 * C * 7
    assert active_parameters(nn.Linear(3, 4)) == 16
