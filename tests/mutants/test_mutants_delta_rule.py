"""The gated delta rule, its layer, and a model in which two of three layers have it."""

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from model_laws import DOUBLE, ROWS, exact, laws_of, load, near, noise
from mutation import Mutant, killer, mutants
from tiny_models import token_ids
from torch import Tensor

from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.layers import delta_rule

B, H, DK, DV, T = 2, 3, 5, 7, 70
RULES = {
    "recurrent": delta_rule.recurrent_delta_rule, "chunk": delta_rule.chunk_delta_rule
}  # fmt: skip


def rule_inputs() -> list[Tensor]:
    """q, k, v, g, beta and a state that is not empty."""
    shapes = (B, H, T, DK), (B, H, T, DK), (B, H, T, DV), (B, H, T), (B, H, T), (B, H, DK, DV)
    q, k, v, g, beta, state = (noise(*s, seed=i, dtype=DOUBLE) for i, s in enumerate(shapes))
    return [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, -g.abs(), beta.sigmoid(), state]


@cache
def by_definition() -> tuple[Tensor, Tensor]:
    """S <- alpha (I - beta k k^T) S + beta k v^T, and o = S^T q."""
    q, k, v, g, beta, S = rule_inputs()
    outputs = []
    for t in range(T):
        key, rate = k[:, :, t, :, None], beta[:, :, t, None, None]
        keep = torch.eye(DK, dtype=DOUBLE) - rate * key @ key.mT
        S = g[:, :, t, None, None].exp() * keep @ S + rate * key @ v[:, :, t, None]
        outputs.append((S.mT @ q[:, :, t, :, None])[..., 0])
    return torch.stack(outputs, dim=2), S


@cache
def of_transformers() -> tuple[Tensor, Tensor]:
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    *tokens, state = (x.float() for x in rule_inputs())
    y, last = hf.torch_recurrent_gated_delta_rule(
        *(x.transpose(1, 2) for x in tokens), initial_state=state, output_final_state=True
    )
    return y.transpose(1, 2), last


def rule(name: str) -> None:
    y, state = RULES[name](*rule_inputs())
    exact((y, state), by_definition())
    near((y.float() * DK**-0.5, state.float()), of_transformers(), 5e-5)


def in_parts(name: str) -> None:
    *tokens, state = rule_inputs()
    outputs = []
    for part in (slice(0, 33), slice(33, 34), slice(34, T)):
        y, state = RULES[name](*(x[:, :, part] for x in tokens), state)
        outputs.append(y)
    exact((torch.cat(outputs, dim=2), state), by_definition())


def documents(name: str) -> None:
    """Each begins with nothing."""
    *tokens, state = rule_inputs()
    forget = torch.zeros(B, T, dtype=torch.bool)
    forget[:, [0, 40, 66]] = True
    y, last = RULES[name](*tokens, state, forget)
    for start, end in ((0, 40), (40, 66), (66, T)):
        part = [x[:, :, start:end] for x in tokens]
        alone, after = RULES["recurrent"](*part, torch.zeros_like(state))
        exact(y[:, :, start:end], alone)
    exact(last, after)


@torch.no_grad()
def padding_anywhere() -> None:
    """Real tokens are what they are alone, and so is the state after them."""
    model = load("hybrid").double()
    real = noise(2, 30, seed=4) < 0.5
    idx, positions = token_ids(2, 30), torch.where(real, real.cumsum(1) - 1, -1)
    logits, cache = model(idx, positions=positions), cache_for(model.config.windows)
    model(idx, positions=positions, cache=cache)
    for row in range(2):
        own, text = cache_for(model.config.windows), idx[row, real[row]][None]
        exact(logits[row, real[row]], model(text, cache=own)[0])
        exact([state[row] for state in cache.states[0]], [state[0] for state in own.states[0]])


@torch.no_grad()
def memory_keeps_its_digits() -> None:
    """In a model of 16 bits, too, the memory is float32: it adds up many tokens."""
    model = load("hybrid").bfloat16()
    cache = cache_for(model.config.windows)
    model(torch.tensor(ROWS[:1]), cache=cache)
    assert cache.states[0][1].dtype == torch.float32


LAWS = {
    **{f"{law.__name__} {name}": partial(law, name)
       for law in (rule, in_parts, documents) for name in RULES},
    **laws_of("hybrid"),
    "padding anywhere": padding_anywhere,
    "16 bits": memory_keeps_its_digits,
}  # fmt: skip

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
