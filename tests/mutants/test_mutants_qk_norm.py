"""Norms of queries and keys: what Qwen3 adds to Qwen2."""

import pytest
import torch
from model_laws import laws_of, load, near, noise
from mutation import Mutant, killer, mutants
from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.layers.rope import RotaryEmbedding


@torch.no_grad()
def scores_are_bounded() -> None:
    """Inputs a thousand times larger change no result of attention but by the values."""
    attention = load("qwen3").model.layers[0].self_attn
    positions = torch.arange(6)[None]
    rotation = RotaryEmbedding(8)(positions, torch.float32)
    scores: list[Tensor] = []
    attention.attend = lambda q, k, v, *how: scores.append(q @ k.repeat_interleave(3, 1).mT) or q
    attention.q_norm.eps = attention.k_norm.eps = 1e-9
    for scale in (1.0, 1000.0):
        x = scale * noise(1, 6, 20)
        attention(x, rotation, Visibility(positions, positions), NO_CACHE)
    near(scores[1], scores[0], 1e-3)


LAWS = laws_of("qwen3") | {"bounded": scores_are_bounded}

ROTATED = "self.rotate(self.q_norm(q), *rotation), self.rotate(self.k_norm(k), *rotation)"


def both(norm: str) -> str:
    """Queries and keys with that norm."""
    pairs = "(q, self.q_norm), (k, self.k_norm)"
    return f"(self.rotate({norm}, *rotation) for x, norm in ({pairs}))"


MISTAKES = {
    "models.qwen3:Attention.forward": [
        ("no norm", ROTATED, both("x")),
        ("queries alone", "self.k_norm(k)", "k"),
        ("keys alone", "self.q_norm(q)", "q"),
        ("values too", "cache.update(k, v)", "cache.update(k, self.k_norm(v))"),
        ("after the rotation", ROTATED,
         "self.q_norm(self.rotate(q, *rotation)), self.k_norm(self.rotate(k, *rotation))"),
        ("keys again out of the cache", "self.attend(q, k,", "self.attend(q, self.k_norm(k),"),
        ("all heads as one", ROTATED,
         both("x * (x.square().mean((1, 3), True) + norm.eps).rsqrt() * norm.weight")),
        ("length 1, not mean square 1", ROTATED,
         both("x / x.norm(dim=-1, keepdim=True) * norm.weight")),
        ("the norms exchanged", ROTATED,
         "self.rotate(self.k_norm(q), *rotation), self.rotate(self.q_norm(k), *rotation)"),
        ("weights counted from 1", ROTATED, both("norm(x) * (1 + 1 / norm.weight)")),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(MISTAKES))
def test_a_law_finds_the_mistake(mutant: Mutant) -> None:
    assert killer(mutant, LAWS)
