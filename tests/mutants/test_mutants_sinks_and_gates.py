"""Sinks of gpt-oss and gates of Qwen3-Next."""

import pytest
from model_laws import laws_of
from mutation import Mutant, killer, laws_in, mutants

pytestmark = pytest.mark.slow

OSS_LAWS = laws_of("gpt_oss")
SINK_LAWS = laws_in("unit/attention/test_sinks.py") | OSS_LAWS

WEIGHTS = "torch.softmax(torch.cat([sink, scores], dim=-1), dim=-1)[..., 1:]"

SINKS = {
    "attention.sinks:sink_attention": [
        ("a sink over the root of D", "sinks.to(q.dtype) * math.sqrt(D)", "sinks.to(q.dtype)"),
        ("a sink with a value", "(0, WIDER, 1, 0)", "(0, WIDER, 1, 0), value=1.0"),
        ("a mask hides the sink", "value=True", "value=False"),
        ("a triangle shifted by the sink", "int(causal)", "0", 2),
        ("one sink for all heads", "sinks.to(q.dtype)", "sinks.mean().expand_as(sinks)"),
        ("no gradient for sinks", "sinks.to(q.dtype)", "sinks.detach().to(q.dtype)"),
        ("the sign turned", "sinks.to(q.dtype)", "-sinks.to(q.dtype)"),
    ],
    "attention.sinks:sink_weights": [
        ("the same in the formula", "sinks.to(work)", "(sinks.to(work) / math.sqrt(q.shape[-1]))"),
        ("sinks that are always 0", "sinks.to(work)", "torch.zeros_like(sinks)"),
        ("the last key dropped, not the sink", "[..., 1:]", "[..., :-1]"),
        ("weights that sum to 1 again", WEIGHTS, f"F.normalize({WEIGHTS}, p=1.0, dim=-1)"),
    ],
    "attention.sinks:one_query_with_sinks": [
        ("no sink for one query", "sinks.to(work)", "(sinks.to(work) - 1e4)"),
        ("sinks of other heads for one query",
         "sinks.to(work)", "sinks.to(work).view(-1, Hkv).T.reshape(-1)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(SINKS))
def test_a_law_finds_the_mistake_in_sinks(mutant: Mutant) -> None:
    assert killer(mutant, SINK_LAWS)


GATE_AND_UP = ".unflatten(-1, (-1, 2)).unbind(-1)"

OSS = {
    "models.gpt_oss:clamped_swiglu": [
        ("the gate clamped below, too", "gate.clamp(max=limit)", "gate.clamp(-limit, limit)"),
        ("up clamped above alone", "up.clamp(-limit, limit)", "up.clamp(max=limit)"),
        ("nothing added to up", "(up + 1)", "up"),
        ("silu", "torch.sigmoid(alpha * gate)", "torch.sigmoid(gate)"),
    ],
    "models.gpt_oss:Experts.expert": [
        ("gate and up in halves", GATE_AND_UP, ".chunk(2, dim=-1)"),
        ("first up, then gate", GATE_AND_UP, f"{GATE_AND_UP}[::-1]"),
    ],
    "models.gpt_oss:TopKRouter.forward": [
        ("softmax over all experts", "logits.gather(-1, experts).softmax(-1, dtype=work)",
         "logits.softmax(-1, dtype=work).gather(-1, experts)"),
        ("the bias chooses, and weighs nothing", "logits.gather", "(logits - self.bias).gather"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(OSS))
def test_a_law_finds_the_mistake_in_gpt_oss(mutant: Mutant) -> None:
    assert killer(mutant, OSS_LAWS)


GATE_LAWS = laws_of("partial")

SPLIT = ".view(B, T, -1, 2 * self.head_dim).chunk(2, dim=-1)"
TURNED = "self.rotate(gate.transpose(1, 2), *rotation).transpose(1, 2)"
GATED = "q, gate = q * gate.sigmoid(), torch.full_like(gate, torch.inf)"  # and nothing is later

GATES = {
    "models.gated_attention:GatedAttention.forward": [
        ("gates in the second half of all rows",
         SPLIT, ".view(B, T, 2, -1, self.head_dim).unbind(2)"),
        ("first the gate, then the query", SPLIT, f"{SPLIT}[::-1]"),
        ("every second feature", SPLIT, ".view(B, T, -1, self.head_dim, 2).unbind(-1)"),
        ("silu", "gate.sigmoid()", "nn.functional.silu(gate)"),
        ("no gate", " * gate.sigmoid()", ""),
        ("one gate for a head", "gate.sigmoid()", "gate.mean(-1, True).sigmoid()"),
        ("the gate normed as the query", "gate.sigmoid()", "self.q_norm(gate).sigmoid()"),
        ("the gate turned as the query", "gate.sigmoid()", f"{TURNED}.sigmoid()"),
        ("the query gated", "k, v = (p(x)", f"{GATED}\n        k, v = (p(x)"),
        ("heads merged without transpose",
         "y.transpose(1, 2)", "y.reshape(B, T, -1, self.head_dim)"),
    ],
    "layers.norm:zero_centred_rms_norm": [
        ("weights of norms not counted from 1", "1.0 + weight", "weight"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(GATES))
def test_a_law_finds_the_mistake_in_gates(mutant: Mutant) -> None:
    assert killer(mutant, GATE_LAWS)
