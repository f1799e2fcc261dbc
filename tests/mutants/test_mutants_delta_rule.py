"""The gated delta rule, its layer, and a model in which two of three layers have it."""

import pytest
from model_laws import laws_of
from mutation import Mutant, killer, laws_in, mutants

pytestmark = pytest.mark.slow

LAWS = laws_in("unit/layers/test_delta_rule.py") | laws_of("hybrid")

FADE, READ = "state = decay[:, :, t, None, None] * state", "said = key.mT @ state"
WRITE = "state = state + key @ (beta[:, :, t, None, None] * (v[:, :, t, None] - said))"
ANSWER, NEXT = "outputs.append(q[:, :, t, None] @ state)", "\n            "

MISTAKES = {
    "layers.delta_rule:recurrent_delta_rule": [
        ("no correction: linear attention", "(v[:, :, t, None] - said)", "v[:, :, t, None]"),
        ("read before it fades", FADE + NEXT + READ, READ + NEXT + FADE),
        ("beta for the value alone", "(v[:, :, t, None] - said)", "v[:, :, t, None] - said"),
        ("answered before it is written", WRITE + NEXT + ANSWER, ANSWER + NEXT + WRITE),
        ("nothing fades", FADE, "pass"),
    ],
    "layers.delta_rule:_one_chunk": [
        ("no correction inside a chunk", "gamma * (k @ k.mT)", "0 * (k @ k.mT)"),
        ("nothing fades in the system", "gamma * (k @ k.mT)", "(k @ k.mT).tril()"),
        ("beta of the column", "system = beta[..., None]", "system = beta[..., None, :]"),
        ("what was before the chunk does not fade", "before * (k @ state)", "k @ state"),
        ("a token sees the next", "triu(1)", "triu(2)"),
        ("a token does not see itself", "triu(1)", "triu(0)"),
        ("what a chunk wrote does not fade",
         "last = gamma[..., -1, :, None]", "last = torch.ones_like(gamma[..., -1, :, None])"),
        ("the state does not fade", "before[:, :, -1:] * state", "state"),
        ("documents of a chunk read one another",
         "gamma * (document[..., :, None] == document[..., None, :])", "gamma"),
    ],
    "layers.delta_rule:chunk_delta_rule": [
        ("the memory in 16 bits", ".to(dtype), state", ".to(dtype), state.to(dtype)"),
    ],
    "layers.short_convolution:short_convolution": [
        ("taps in the other order", "(_, T, _), K", "weight = weight.flip(1); (_, T, _), K"),
        ("no state for the convolution",
         "(_, T, _), K", "state = torch.zeros_like(state); (_, T, _), K"),
        ("the first inputs kept, not the last", "return y, inputs[:, T:]",
         "return y, inputs[:, : K - 1]"),
        ("the convolution reads padding",
         "if positions is None and documents is None", "if documents is None"),
    ],
    "models.gated_delta_net:GatedDeltaNet.forward": [
        ("padding is written", "g.masked_fill(padding, 0.0), beta.masked_fill(padding, 0.0)",
         "g, beta"),
    ],
    "models.gated_delta_net:GatedDeltaNet.gates": [
        ("A, not its exponential", "-self.A_log.to(work).exp()", "-self.A_log.to(work).abs()"),
        ("no bias for the step", " + self.dt_bias", ""),
        ("a and b exchanged", "work = torch", "a, b = b, a; work = torch"),
    ],
    "models.gated_delta_net:GatedDeltaNet.heads": [
        ("keys of any length", "unit_length(", "("),
        ("queries not scaled", "q * self.key_dim**-0.5", "q"),
        ("key heads tiled", "x.repeat_interleave(shared, dim=1)", "x.repeat(1, shared, 1, 1)"),
    ],
    "models.gated_delta_net:GatedRMSNorm.forward": [
        ("gated before the norm", "y = self.normalise(x, self.weight, self.eps)",
         "return self.normalise(x * F.silu(gate), self.weight, self.eps)"),
        ("the norm gated by sigmoid", "F.silu", "F.sigmoid"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(MISTAKES))
def test_a_law_finds_the_mistake(mutant: Mutant) -> None:
    assert killer(mutant, LAWS)
