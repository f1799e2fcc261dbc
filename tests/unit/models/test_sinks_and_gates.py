"""Attention with sinks and with gates: caches, fresh weights, published widths. That they compute
what gpt-oss and Qwen3-Next of transformers do: tests/parity."""

from typing import Any

import pytest
import torch
from caches import KINDS
from tiny_models import enlarge_, token_ids

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.models.gated_attention import GatedAttention, GatedForCausalLM
from lm_from_scratch.models.gpt_oss import Attention, GptOssConfig, GptOssForCausalLM
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config

OURS = {"gpt_oss": Attention, "qwen3_next": GatedAttention}
MODELS = {"gpt_oss": GptOssForCausalLM, "qwen3_next": GatedForCausalLM}
CONFIGS = {"gpt_oss": GptOssConfig, "qwen3_next": Qwen2Config}
families = pytest.mark.parametrize("family", OURS)


def model_of(family: str, **changes: Any) -> Any:
    sizes = dict(
        vocab_size=97, n_layer=3, n_head=6, n_kv_head=2, n_embd=48, intermediate_size=56,
        head_dim=8, tie_word_embeddings=False, eos_token_id=2,
    )  # fmt: skip
    sizes |= dict(n_expert=5, top_k=2) if family == "gpt_oss" else {}
    model = MODELS[family](CONFIGS[family](**{**sizes, **changes})).eval()
    enlarge_(model)
    return model.double()


WINDOWS = {
    "full": dict(layer_types=(FULL,) * 3),
    "W = 4": dict(sliding_window=4, layer_types=(SLIDING,) * 3),
    "W = 3 in two layers": dict(sliding_window=3, layer_types=(FULL, SLIDING, SLIDING)),
}
EXACT = [kind for kind in KINDS if "bits" not in kind]


@families
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("kind", EXACT)
@torch.no_grad()
def test_every_kind_of_cache_gives_one_full_pass(family: str, windows: str, kind: str) -> None:
    """A sink takes no slot, and a gate belongs to the token that looks: neither is cached."""
    model = model_of(family, **WINDOWS[windows])
    if not (cache := KINDS[kind](model)):
        return
    idx = token_ids(2, 16)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, :3] = 0
    positions = positions_from_mask(mask)
    alone = model(idx[1:, 3:])[0]
    parts, start = [], 0
    for n in (6, 1, 1, 5, 1, 2):
        at = slice(start, start := start + n)
        parts.append(model(idx[:, at], positions=positions[:, at], cache=cache))
    fed = torch.cat(parts, dim=1)
    torch.testing.assert_close(fed[0], model(idx[:1])[0], atol=1e-9, rtol=0)
    torch.testing.assert_close(fed[1, 3:], alone, atol=1e-9, rtol=0)


@families
def test_fresh_weights(family: str) -> None:
    """Sinks are drawn like the weights, norms counted from 1 begin at 0, the others at 1."""
    torch.manual_seed(0)
    model = MODELS[family](
        CONFIGS[family](
            vocab_size=97, n_layer=8, n_head=64, n_kv_head=2, n_embd=128, intermediate_size=64
        )
    )
    for name, p in model.named_parameters():
        if name.endswith(("sinks", "router.bias")):
            assert 0.01 < p.std() < 0.03
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            assert (p == 0).all()
        elif name.endswith("norm.weight"):
            assert (p == 1).all()


@families
def test_published_widths(family: str) -> None:
    """gpt-oss-20b and Qwen3-Next-80B-A3B: parameters of one attention layer."""
    sizes = {
        "gpt_oss": dict(n_embd=2880, n_head=64, n_kv_head=8, head_dim=64, o_bias=True),
        "qwen3_next": dict(n_embd=2048, n_head=16, n_kv_head=2, head_dim=256, qkv_bias=False),
    }[family]
    with torch.device("meta"):
        count = sum(p.numel() for p in OURS[family](Qwen2Config(**sizes)).parameters())
    C, H, Hkv, D = (sizes[key] for key in ("n_embd", "n_head", "n_kv_head", "head_dim"))
    plain = C * D * (2 * H + 2 * Hkv)
    if family == "gpt_oss":
        assert count == plain + D * (H + 2 * Hkv) + C + H
    else:
        assert count == plain + C * H * D + 2 * D
