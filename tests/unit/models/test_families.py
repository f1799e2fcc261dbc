"""What families have of their own that are Qwen2 with other numbers, and Qwen3. That they compute
what transformers does: tests/parity."""

import pytest
import torch
from tiny_models import enlarge_, hf_twin, token_ids

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.models.qwen2 import Qwen2Config
from lm_from_scratch.models.qwen3 import Qwen3Config

QWEN3 = dict(
    vocab_size=97, n_layer=2, n_head=6, n_kv_head=2, n_embd=20, head_dim=8, intermediate_size=28,
    eos_token_id=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "family"),
    [({}, "llama"), ({"sliding_window": 4, "max_window_layers": 0}, "mistral")],
)
def test_a_model_without_biases_is_written_as_a_llama_or_a_mistral(changes, family) -> None:
    sizes = {name: n for name, n in QWEN3.items() if name != "head_dim"} | {"n_embd": 24}
    model = build(Qwen2Config(**sizes, qkv_bias=False, **changes)).eval()
    enlarge_(model)
    twin, idx = hf_twin(model), token_ids(2, 9)
    assert twin.config.model_type == family
    torch.testing.assert_close(twin(idx).logits, model(idx), atol=5e-5, rtol=0)


def test_a_score_is_bounded_by_the_weights_of_the_norms() -> None:
    """What the normalisation is for: inputs a thousand times larger change no score."""
    model = build(Qwen3Config(**QWEN3)).eval()
    enlarge_(model)
    attention = model.model.layers[0].self_attn
    x, scores = torch.randn(1, 5, 20), []
    for scale in (1.0, 1000.0):
        q = attention.q_norm(attention.q_proj(scale * x).view(1, 5, -1, 8))
        k = attention.k_norm(attention.k_proj(scale * x).view(1, 5, -1, 8))
        scores.append((q[:, :, 0] @ k[:, :, 0].mT) / 8**0.5)
    torch.testing.assert_close(scores[0], scores[1], atol=1e-3, rtol=1e-3)
    largest = (attention.q_norm.weight * attention.k_norm.weight).abs().max() * 8**0.5
    assert scores[1].abs().max() <= largest
