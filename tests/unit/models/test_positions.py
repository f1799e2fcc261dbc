"""Which features and which layers turn: SmolLM3, partial RoPE and a theta for each kind of layer.
Whole models of them are compared with transformers in tests/parity."""

from typing import Any

import pytest
import torch
from model_families import FAMILIES, theirs, with_partial_rope_
from tiny_models import ROPES, enlarge_, token_ids

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.configs import config_from_dict, config_to_dict
from lm_from_scratch.checkpoint.rope_configs import scaling_from_dict
from lm_from_scratch.kernels.model import use_kernels_
from lm_from_scratch.layers.rope import RotaryEmbedding, apply_partial_rope, apply_rope, unrotated
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config
from lm_from_scratch.models.smollm3 import SmolLM3Config

PLAIN = {"rope_type": "default", "rope_theta": 1e4}
TURNS = {
    "smollm3": PLAIN,
    "partial RoPE": PLAIN | {"partial_rotary_factor": 0.5},
    "gemma3_text": {FULL: PLAIN, SLIDING: PLAIN | {"rope_theta": 100.0}},
}


@pytest.mark.parametrize("family", TURNS)
@torch.no_grad()
def test_only_distances_matter_whatever_turns(family: str) -> None:
    """A text moved by 1000 places has the same logits, in float64."""
    twin = theirs(family, 3, rope_parameters=TURNS[family])
    model = FAMILIES[family].convert(twin).double()
    idx, positions = token_ids(2, 12), torch.arange(12).expand(2, -1)
    here, there = model(idx, positions=positions), model(idx, positions=positions + 1000)
    torch.testing.assert_close(there, here, atol=1e-9, rtol=0)


# SmolLM3

SMOLLM3 = dict(
    vocab_size=97, n_layer=4, n_head=6, n_kv_head=2, n_embd=24, intermediate_size=28,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def test_a_1_is_a_layer_that_rotates() -> None:
    """In the file the list is called no_rope_layers all the same."""
    config = config_from_dict(
        {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1, 1]}
    )
    assert config.rope_layers == (1, 1, 0, 1) and sum(SmolLM3Config().rope_layers) == 27
    rotate = [block.self_attn.rotate for block in build(SmolLM3Config(**SMOLLM3)).model.layers]
    assert rotate == [apply_rope, apply_rope, apply_rope, unrotated]
    assert config_to_dict(config)["no_rope_layers"] == [1, 1, 0, 1]


@torch.no_grad()
def test_a_layer_without_rotation_hands_its_cache_the_bare_projection() -> None:
    """Keys of a layer that rotates are turned before they are kept, those of another never."""
    model = build(SmolLM3Config(**SMOLLM3, rope_layers=(0, 1, 1, 1))).eval()
    enlarge_(model)
    for layer in (0, 1):
        bare, cache = [], GrowingCache(4)
        attention = model.model.layers[layer].self_attn
        attention.k_proj.register_forward_hook(lambda *a, kept=bare: kept.append(a[2]))
        model(token_ids(1, 7), cache=cache)
        bare = bare[0].view(1, 7, 2, 4).transpose(1, 2)
        same = torch.allclose(cache.contents(layer)[0], bare, atol=1e-5)
        assert same == (layer == 0)


@torch.no_grad()
def test_a_model_of_such_layers_alone_takes_no_notice_of_positions() -> None:
    model = build(SmolLM3Config(**SMOLLM3, rope_layers=(0, 0, 0, 0))).eval().double()
    enlarge_(model)
    idx = token_ids(2, 9)
    apart = torch.arange(9).expand(2, -1) * 7
    assert torch.equal(model(idx, positions=apart), model(idx, positions=apart // 7))
    # one layer takes a mean over a set: without the mask's help it knows no order
    first = build(SmolLM3Config(**SMOLLM3 | {"n_layer": 1}, rope_layers=(0,))).eval().double()
    enlarge_(first)
    mixed = idx[:, [3, 0, 5, 2, 1, 4, 7, 6, 8]]
    torch.testing.assert_close(first(mixed)[:, -1], first(idx)[:, -1], atol=1e-12, rtol=0)
    assert (model(mixed)[:, -1] - model(idx)[:, -1]).abs().max() > 0.1


def test_kernels_leave_layers_alone_that_do_not_turn_all_features(monkeypatch) -> None:
    from lm_from_scratch.kernels import model as kernels

    monkeypatch.setattr(kernels, "check_device", lambda *a, **k: None)
    model = build(SmolLM3Config(**SMOLLM3))
    assert use_kernels_(model, ["rope"]) == {"rope": 3}
    rotate = [block.self_attn.rotate for block in model.model.layers]
    assert rotate == [kernels.apply_rope] * 3 + [unrotated]
    partial = with_partial_rope_(build(Qwen2Config(**{**SMOLLM3, "n_layer": 2})), 0.5)
    with pytest.raises(ValueError, match=r"has nothing that .*rope.* could replace"):
        use_kernels_(partial, ["rope"])


# The modules alone


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("factor", [0.25, 0.5, 0.75, 1.0])
def test_partial_rope_equals_the_module_of_glm(factor: float, rope: dict[str, Any]) -> None:
    from transformers.models.glm4_moe import modeling_glm4_moe as glm

    D, parameters = 16, {**rope, "partial_rotary_factor": factor}
    config = glm.Glm4MoeConfig(head_dim=D, max_position_embeddings=64, rope_parameters=parameters)
    positions = torch.arange(40)[None] + torch.tensor([[0], [20]])
    q, k = torch.randn(2, 4, 40, D), torch.randn(2, 2, 40, D)
    if rope["rope_type"] == "dynamic":
        positions = positions[:1].expand(2, -1)  # its base is that of the longest row
    want = glm.apply_rotary_pos_emb(q, k, *glm.Glm4MoeRotaryEmbedding(config)(q, positions))
    theta, scaling = scaling_from_dict(rope, 64)
    turn = RotaryEmbedding(int(D * factor), theta, scaling)(positions, q.dtype)
    for x, expected in zip((q, k), want):
        torch.testing.assert_close(apply_partial_rope(x, *turn), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_features_after_the_turned_ones_pass_as_they_are(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, 12, dtype=dtype)
    turn = RotaryEmbedding(8, 1e4)(torch.arange(5)[None] + 3, dtype)
    y = apply_partial_rope(x, *turn)
    assert y.dtype == dtype and y.is_contiguous()
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert torch.equal(y[..., :8], apply_rope(x[..., :8], *turn))
    assert torch.equal(apply_partial_rope(x[..., :8], *turn), apply_rope(x[..., :8], *turn))
    assert unrotated(x, *turn) is x
    with pytest.raises(ValueError, match="x has D=6 features, so cos and sin must have half"):
        apply_partial_rope(x[..., :6], *turn)


@pytest.mark.parametrize("model_type", ["gemma3_text", "olmo3", "mellum"])
def test_two_thetas_equal_the_module_of_gemma(model_type: str) -> None:
    from transformers import AutoConfig
    from transformers.models.gemma3 import modeling_gemma3 as gemma

    config = AutoConfig.for_model(model_type, head_dim=16)
    positions = torch.tensor([[0, 1, 2, 900], [-1, 40, 7, 131_071]])
    rotary = gemma.Gemma3RotaryEmbedding.__new__(gemma.Gemma3RotaryEmbedding)
    config.layer_types = [FULL, SLIDING]
    rotary.__init__(config)
    x = torch.randn(2, 3, 4, 16)
    thetas = {kind: config.rope_parameters[kind]["rope_theta"] for kind in (FULL, SLIDING)}
    if model_type == "gemma3_text":
        assert thetas == {FULL: 1e6, SLIDING: 1e4}
    for kind, theta in thetas.items():
        cos, sin = rotary(x, positions, kind)
        want, _ = gemma.apply_rotary_pos_emb(x, x, cos, sin)
        turn = RotaryEmbedding(16, theta)(positions, x.dtype)
        torch.testing.assert_close(apply_rope(x, *turn), want, atol=2e-4, rtol=0)
