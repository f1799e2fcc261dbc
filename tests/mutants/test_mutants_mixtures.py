"""Layers of experts: routers, the sum over experts, shared experts, balance."""

import pytest
from mutation import Mutant, killer, laws_in, mutants

pytestmark = pytest.mark.slow

LAWS = laws_in("unit/layers/test_experts.py", "unit/training/test_balance.py")

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
        ("softmax instead of sigmoid", "score(logits)", "logits.softmax(-1)"),
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
    "layers.experts:routed_sum": [
        ("results in the order of experts", "y[order.argsort()]", "y"),
        ("the order for its inverse", "y[order.argsort()]", "y[order]"),
        ("a visit taken for a token", "x[order // k]", "x[order % len(x)]"),
        ("all experts weigh alike", "routing.weights.to", "torch.ones_like(routing.weights).to"),
    ],
    "layers.experts:expert_sum": [
        ("gate and up exchanged", ".chunk(2, dim=-1)", ".chunk(2, dim=-1)[::-1]"),
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
