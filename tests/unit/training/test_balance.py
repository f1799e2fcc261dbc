"""The two ways of keeping experts busy: against transformers and by law."""

import pytest
import torch
from tiny_models import token_ids

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.layers.experts import Experts, MixtureOfExperts, SigmoidRouter, softmax_routing
from lm_from_scratch.models.qwen2 import Qwen2Config
from lm_from_scratch.models.qwen3_moe import Qwen3MoeConfig
from lm_from_scratch.training.balance import (
    balanced_bias,
    balancing_loss,
    overload,
    record_routing,
    visits,
)

TINY = dict(
    vocab_size=97, n_layer=3, n_head=4, n_kv_head=2, n_embd=20, head_dim=6, intermediate_size=28,
    n_expert=6, top_k=2, expert_size=8, eos_token_id=2,
)  # fmt: skip


def drawn(E: int, k: int, layers: int, seed: int, tokens: int = 12):
    torch.manual_seed(seed)
    logits = [torch.randn(tokens, E, requires_grad=True) for _ in range(layers)]
    return logits, [softmax_routing(z, k, True) for z in logits]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("E", "k", "layers"), [(4, 1, 1), (8, 2, 3), (6, 6, 2)])
def test_the_loss_is_that_of_transformers(E: int, k: int, layers: int, padded: bool) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    for seed in range(10):
        logits, routings = drawn(E, k, layers, seed)
        mask = torch.ones(3, 4)
        if padded:
            mask[0, :3] = mask[2, :1] = 0
        loss = balancing_loss(routings, mask.bool() if padded else None)
        gradients = torch.autograd.grad(loss, logits)
        want = load_balancing_loss_func(tuple(logits), E, k, mask if padded else None)
        torch.testing.assert_close(loss, want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradients, torch.autograd.grad(want, logits))


def test_equal_shares_cost_k_and_one_expert_for_all_costs_most() -> None:
    even = torch.eye(4).repeat(3, 1)
    assert balancing_loss([softmax_routing(40 * even, 1, True)]).item() == pytest.approx(1.0)
    crowd = torch.tensor([[40.0, 0.0, 0.0, 0.0]]).repeat(12, 1)
    assert balancing_loss([softmax_routing(crowd, 1, True)]).item() == pytest.approx(4.0)
    assert overload(visits(softmax_routing(even, 1, True))) == 0.0
    assert overload(visits(softmax_routing(crowd, 1, True))) == 3.0
    assert overload(torch.zeros(4)) == 0.0


def test_pooled_layers_hide_what_each_has_too_much_of() -> None:
    """Two layers, each with one expert for all tokens: not the same one."""
    layers = [softmax_routing(40 * torch.eye(2)[[e] * 10], 1, True) for e in range(2)]
    assert balancing_loss(layers).item() == pytest.approx(1.0)
    assert [balancing_loss([layer]).item() for layer in layers] == pytest.approx([2.0, 2.0])


def test_padding_counts_nowhere() -> None:
    logits, routings = drawn(6, 2, 1, 0)
    real = torch.tensor([True] * 7 + [False] * 5)
    alone = softmax_routing(logits[0][:7], 2, True)
    assert torch.equal(visits(routings[0], real), visits(alone))
    assert balancing_loss(routings, real).item() == pytest.approx(balancing_loss([alone]).item())
    (gradient,) = torch.autograd.grad(balancing_loss(routings, real), logits)
    assert gradient[7:].abs().max() == 0 and gradient[:7].abs().max() > 0
    none = torch.zeros(12, dtype=torch.bool)
    assert balancing_loss(routings, none) == 0 and overload(visits(routings[0], none)) == 0


def test_the_bias_rises_for_experts_that_wait() -> None:
    counts = torch.tensor([8.0, 4.0, 0.0, 4.0])
    bias = balanced_bias(torch.zeros(4), counts, 0.25)
    assert bias.tolist() == [-0.25, 0.0, 0.25, 0.0]
    assert balanced_bias(bias, torch.full((4,), 3.0)).tolist() == bias.tolist()


def test_the_bias_balances_a_router_that_prefers_one_expert() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(SigmoidRouter(10, 8, 2), Experts(8, 10, 4))
    x = torch.randn(400, 10) + 1.0
    layer.gate.weight.data.normal_(0, 0.25)
    layer.gate.weight.data[3] += 0.3
    loads = []
    for _ in range(300):
        with record_routing(layer) as routings:
            layer(x)
        counts = visits(routings[0][0])
        loads.append(overload(counts))
        bias = layer.gate.e_score_correction_bias
        bias.copy_(balanced_bias(bias, counts, 0.01))
    assert loads[0] > 1.0 and loads[-1] < 0.2


def test_a_recorder_sees_each_layer_and_leaves_no_trace() -> None:
    model = build(Qwen3MoeConfig(**TINY, mlp_only_layers=(1,)))
    idx = token_ids(2, 5)
    before = model(idx)
    with record_routing(model) as routings:
        during = model(idx)
        model(idx[:, :3])
    model(idx)
    assert torch.equal(before, during)
    assert [[len(r.experts) for r in layer] for layer in routings] == [[10, 6]] * 2
    assert routings[0][0].experts.shape == (10, 2) and routings[0][0].logits.shape == (10, 6)
    balancing_loss([layer[0] for layer in routings]).backward()
    gradients = {name for name, p in model.named_parameters() if p.grad is not None}
    assert "model.layers.0.mlp.gate.weight" in gradients
    assert "model.layers.2.mlp.gate.weight" in gradients
    assert not any(".experts." in name for name in gradients if ".2." in name)


def test_what_has_no_experts_is_refused() -> None:
    dense = build(Qwen2Config(vocab_size=9, n_layer=1, eos_token_id=None))
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no router"), record_routing(dense):
        pass
    with pytest.raises(ValueError, match="no routing to balance"):
        balancing_loss([])
