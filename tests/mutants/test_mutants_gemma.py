"""Norms on both sides, scaled embeddings, and a rotation for each kind of layer."""

import pytest
from model_laws import laws_of
from mutation import Mutant, killer, mutants

pytestmark = pytest.mark.slow

LAWS = laws_of("gemma3")

TURNED = "self.rotate(self.q_norm(q), *rotation)"

MISTAKES = {
    "models.gemma3:ScaledEmbedding.forward": [
        ("embeddings as they are", "math.sqrt(self.embedding_dim)", "1.0"),
        ("times the width", "math.sqrt(self.embedding_dim)", "self.embedding_dim"),
    ],
    "models.gemma3:Block.forward": [
        ("no norm after attention", "self.post_attention_layernorm(y)", "y"),
        ("the sum is normalised", "x + self.post_attention_layernorm(y)",
         "self.post_attention_layernorm(x + y)"),
        ("the norm of Qwen2 before the MLP", "self.pre_feedforward_layernorm",
         "self.post_attention_layernorm"),
    ],
    "models.gemma3:Attention.forward": [
        ("scores over the root of D", "q * self.sharpness", "q"),
        ("keys are scaled as well", "q = q * self.sharpness",
         "q, k = q * self.sharpness, k * self.sharpness"),
        ("turned before the norm", TURNED, "self.q_norm(self.rotate(q, *rotation))"),
    ],
    "models.gemma3:Gemma3Model.forward": [
        ("one theta for all layers", "rotations[kind]", "rotations[FULL]"),
        ("no layer slides", "self.config.windows", "[None] * len(self.layers)"),
    ],
    "layers.norm:zero_centred_rms_norm": [("norms count from 0", "1.0 + weight", "weight")],
    "layers.head:Head.forward": [
        ("no cap", "self.cap is None", "True"),
        ("a cap that cuts", "self.cap * (logits / self.cap).tanh()",
         "logits.clamp(-self.cap, self.cap)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(MISTAKES))
def test_a_law_finds_the_mistake_in_gemma(mutant: Mutant) -> None:
    assert killer(mutant, LAWS)
