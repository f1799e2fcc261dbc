"""Gemma 4: keys of another layer, embeddings for every layer, two widths; queries that grow."""

import pytest
from model_laws import laws_of
from mutation import Mutant, killer, laws_in, mutants

pytestmark = pytest.mark.slow

LAWS = laws_in("unit/models/test_gemma4.py") | laws_of("gemma4")

MISTAKES = {
    "models.gemma4:sources": [
        ("from the first of its kind", "enumerate(kinds[:first])}",
         "reversed([*enumerate(kinds[:first])])}"),
    ],
    "models.gemma4:Attention.forward": [
        ("scores over the root of D", "q * math.sqrt(self.head_dim)", "q"),
        ("values as they are", "F.rms_norm(v, v.shape[-1:], eps=self.eps)", "v"),
        ("values are the keys that are turned", "else k\n",
         "else self.rotate(self.k_norm(k), *rotation)\n"),
        ("what is lent may be written over", "(k.clone(), v.clone())", "(k, v)"),
    ],
    "models.gemma4:Block.forward": [
        ("no norm after attention", "self.post_attention_layernorm(y)", "y"),
        ("no norm of what is told", "self.post_per_layer_input_norm(told)", "told"),
        ("no number of the layer", "return x * self.layer_scalar", "return x"),
    ],
    "models.gemma4:Gemma4Model.told": [
        ("the table as it is", "math.sqrt(P), dtype", "1.0, dtype"),
        ("a sum that is not scaled", " * 2**-0.5", ""),
        ("a product that is not scaled", " * C**-0.5", ""),
    ],
    "models.gemma4:Gemma4Model.forward": [
        ("the window of the layer that follows", "seen[source]", "seen[source - 1]"),
        ("one theta for all layers", "rotations[kind]", "rotations[FULL]"),
    ],
    "layers.rope_scaling:ProportionalScaling.frequencies": [
        ("all pairs turn", "int(self.partial_rotary_factor * head_dim // 2) :", "head_dim :"),
        ("a share of the features turns", "* head_dim // 2", "* head_dim"),
    ],
    "layers.rope:log_scale": [
        ("positions counted from 1", "+ 1) / floor", "+ 2) / floor"),
        ("a logarithm of 0", "torch.log1p(steps)", "torch.log(steps.clamp(min=1))"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(MISTAKES))
def test_a_law_finds_the_mistake_in_gemma_4(mutant: Mutant) -> None:
    assert killer(mutant, LAWS)
