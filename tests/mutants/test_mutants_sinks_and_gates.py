"""Sinks of gpt-oss and gates of Qwen3-Next."""

import pytest
from model_laws import laws_of
from mutation import Mutant, killer, laws_in, mutants

pytestmark = pytest.mark.slow

SINK_LAWS = laws_in("unit/attention/test_sinks.py") | laws_of("sinks")

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
