"""Keys of another layer, embeddings for every layer, queries that grow."""

import pytest
from mutation import Mutant, killer, laws_in, mutants

pytestmark = pytest.mark.slow

LAWS = laws_in("unit/models/test_shared_keys.py")

MISTAKES = {
    "models.shared_keys:sources": [
        ("from the first of its kind", "enumerate(kinds[:first])}",
         "reversed([*enumerate(kinds[:first])])}"),
        ("from the last with keys", "last[kind] for", "first - 1 for"),
    ],
    "models.shared_keys:SharedModel.forward": [
        ("the window of the layer that follows", "seen[source]", "seen[source - 1]"),
        ("one layer is told what another should be", "told[layer]", "told[layer - 1]"),
    ],
    "models.shared_keys:PerLayerEmbedding.forward": [
        ("the table as it is", " * math.sqrt(self.shape[1])", ""),
        ("a sum that is not scaled", "/ math.sqrt(2)", "/ 1.0"),
    ],
    "models.shared_keys:log_scale": [
        ("positions counted from 1", "+ 1) / floor", "+ 2) / floor"),
        ("a logarithm of 0", "torch.log1p(steps)", "torch.log(steps.clamp(min=1))"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(MISTAKES))
def test_a_law_finds_the_mistake_in_shared_keys(mutant: Mutant) -> None:
    assert killer(mutant, LAWS)
