"""Classic mistakes of speculative decoding: the texts are fluent, and not those of the model."""

import pytest
from mutation import Mutant, killer, laws_in, mutants

pytestmark = pytest.mark.slow

LAWS = laws_in(
    "unit/generation/test_speculative.py", names="rows_with_fewer|no_token|equal_quality|sampled"
)

RULE, DRAWN = "u[:, 1:] * q_draft < p_draft", "draw(rest.log(), u[:, 0])"

MISTAKES = {
    "generation.speculative:accept": [
        ("always accepted", RULE, "p_draft >= 0"),
        ("accepted as if it was not drawn", RULE, "u[:, 1:] < p_draft"),
        ("judged one place late", "p[:, :-1].gather", "p[:, 1:].gather"),
        ("one number for both", RULE, "u[:, :1] * q_draft < p_draft"),
        ("replaced from p", "(p - q).clamp(min=0)", "p"),
        ("replaced by the likeliest", DRAWN, "p.argmax(-1)"),
    ],
    "generation.speculative:seen_before": [
        ("a penalty that forgets the draft", "seen[i, k + 1 :, token] = True", "pass"),
    ],
    "generation.speculative:uniform": [
        ("draft and coin drawn from one number",
         "torch.rand(n, generator=g, dtype",
         "torch.rand(n, generator=g.manual_seed(g.initial_seed()), dtype"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(MISTAKES))
def test_a_law_finds_the_mistake(mutant: Mutant) -> None:
    assert killer(mutant, LAWS)
