"""Norms of queries and keys: what Qwen3 adds to Qwen2."""

import pytest
from model_laws import laws_of
from mutation import Mutant, killer, mutants

pytestmark = pytest.mark.slow

LAWS = laws_of("qwen3")

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
