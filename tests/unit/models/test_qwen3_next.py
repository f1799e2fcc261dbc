"""Qwen3-Next, three layers with a state for one with keys, by laws in float64. That it computes
what transformers does: tests/parity."""

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import drawn, theirs
from safetensors.torch import load_file
from tiny_models import enlarge_, ours_from_hf, token_ids

from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.paged import BlockPool
from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.configs import config_from_dict, config_to_dict
from lm_from_scratch.checkpoint.weights import save_pretrained
from lm_from_scratch.generation.beam_search import beam_search
from lm_from_scratch.generation.engine import Engine
from lm_from_scratch.generation.speculative import ModelDrafter, PromptLookup, speculate
from lm_from_scratch.layers.delta_rule import recurrent_delta_rule
from lm_from_scratch.layers.experts import GatedSharedExpert, SoftmaxRouter
from lm_from_scratch.layers.gated_mlp import GatedMLP
from lm_from_scratch.layers.rope import apply_rope, rotation
from lm_from_scratch.models.blocks import blocks
from lm_from_scratch.models.gated_delta_net import GatedDeltaNet
from lm_from_scratch.models.qwen2 import FULL
from lm_from_scratch.models.qwen3_next import (
    LINEAR,
    SIZES,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    apply_partial_rope,
)

SIZE = dict(
    vocab_size=97, n_layer=4, n_head=4, n_kv_head=2, n_embd=28, head_dim=16, intermediate_size=40,
    linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=12,
    linear_value_head_dim=20, linear_conv_kernel_dim=3, eos_token_id=2, n_expert=6, top_k=2,
    expert_size=8, shared_expert_size=10, decoder_sparse_step=2,
)  # fmt: skip


def tiny(seed: int = 0, **changes: Any) -> Qwen3NextForCausalLM:
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**SIZE | changes)).eval()
    enlarge_(model, seed)
    return model


@pytest.mark.parametrize("types", [(LINEAR, LINEAR, LINEAR, FULL), (LINEAR,) * 4, (FULL, LINEAR)])
@pytest.mark.parametrize("taps", [1, 2, 3, 6])
@torch.no_grad()
def test_documents_in_a_row_are_what_they_are_alone(types: tuple[str, ...], taps: int) -> None:
    """Documents shorter than the convolution too, with padding between them."""
    model = tiny(n_layer=len(types), layer_types=types, linear_conv_kernel_dim=taps).double()
    lengths, idx = [4, 1, 2, 70, 1], token_ids(2, 83)
    positions, documents, start = torch.full((2, 83), -1), torch.zeros(2, 83).long(), 1
    places = []
    for number, n in enumerate(lengths):
        places.append(slice(start, start + n))
        positions[:, places[-1]], documents[:, places[-1]] = torch.arange(n), number
        start += n + 1
    together = model(idx, positions=positions, documents=documents)
    for place in places:
        alone = model(idx[:, place])
        torch.testing.assert_close(together[:, place], alone, atol=1e-9, rtol=0)


@pytest.mark.parametrize("seed", range(8))
@torch.no_grad()
def test_padding_anywhere_changes_no_state(seed: int) -> None:
    model = tiny(seed).double()
    idx = token_ids(3, 75, seed=seed)
    real = torch.rand(3, 75, generator=torch.Generator().manual_seed(seed)) < 0.7
    positions = torch.where(real, real.cumsum(1) - 1, -1)
    logits = model(idx, positions=positions)
    layer, x = model.model.layers[0].linear_attn, torch.randn(3, 75, 28).double()
    cache = cache_for([1])
    seen = cache.see(x, positions, windows=[1])[0]
    layer(x, seen, cache[0])
    for row in range(3):
        alone = model(idx[row, real[row]][None])[0]
        torch.testing.assert_close(logits[row, real[row]], alone, atol=1e-9, rtol=0)
        own = cache_for([1])
        layer(x[row, real[row]][None], own.see(x[row, real[row]][None], windows=[1])[0], own[0])
        for held, want in zip(cache.states[0], own.states[0], strict=True):
            torch.testing.assert_close(held[row], want[0], atol=1e-9, rtol=0)


def test_the_drawn_configs_have_layers_of_both_kinds() -> None:
    models = [build(config_from_dict(drawn("qwen3_next", seed))) for seed in range(25)]
    mlps = [type(block.mlp) for model in models for block in model.model.layers]
    assert {*mlps} == {GatedMLP, GatedSharedExpert} and mlps.count(GatedSharedExpert) > 20
    routers = [m for model in models for m in model.modules() if isinstance(m, SoftmaxRouter)]
    assert {(m.normalize, m.top_k < len(m.weight)) for m in routers} == {
        (normalize, some) for normalize in (False, True) for some in (False, True)
    }


def test_fresh_weights_are_those_that_transformers_would_draw() -> None:
    torch.manual_seed(0)
    model = build(Qwen3NextConfig(**SIZE))
    layer = model.model.layers[0].linear_attn
    assert (model.model.norm.weight == 0).all() and (layer.norm.weight == 1).all()
    assert (layer.dt_bias == 1).all() and (layer.A_log.exp() <= 16).all()
    assert len(layer.A_log.unique()) == 6 and (layer.A_log.exp() >= 0.01).all()


@torch.no_grad()
def test_beams_move_the_states_with_their_rows() -> None:
    """Every hypothesis has the score that the model gives it alone."""
    model, rows = tiny().double(), [token_ids(5).tolist(), token_ids(2, seed=3).tolist()]
    for row, hypotheses in zip(rows, beam_search(model, rows, 6, num_beams=3), strict=True):
        for hypothesis in hypotheses:
            text = torch.tensor([row + list(hypothesis.tokens)])
            scores = model(text).log_softmax(-1)[0, len(row) - 1 : -1]
            new = torch.tensor(hypothesis.tokens)[:, None]
            total = scores.gather(1, new).sum().item()
            assert abs(total - hypothesis.log_probability) < 1e-6


def test_what_would_take_tokens_back_is_refused_by_name() -> None:
    model, plain = tiny(), tiny(layer_types=(FULL,) * 4)
    refusal = r"is not supported for a Qwen3NextForCausalLM: layers \[0, 1, 2\] keep a state"
    with pytest.raises(ValueError, match=f"speculative decoding {refusal}"):
        speculate(model, PromptLookup(), [[5, 6]], 3)
    with pytest.raises(ValueError, match=f"drafting {refusal}"):
        speculate(plain, ModelDrafter(model), [[5, 6]], 3)
    with pytest.raises(ValueError, match=f"continuous batching over shared blocks {refusal}"):
        Engine(model, BlockPool(4, 2, 16, 8))


@torch.no_grad()
def test_positions_out_of_order_are_refused() -> None:
    model, idx = tiny(), token_ids(1, 4)
    with pytest.raises(ValueError, match=r"row 0 has position 1 after 2: a layer with a state"):
        model(idx, positions=torch.tensor([[0, 2, -1, 1]]))
    with pytest.raises(ValueError, match="row 0 has position 2 after 1"):
        model(idx, positions=torch.tensor([[0, 0, 1, 2]]), documents=torch.tensor([[0, 1, 1, 0]]))


def test_partial_rotation_turns_the_first_features_and_passes_the_others() -> None:
    x = torch.randn(2, 3, 5, 12)
    cos, sin = rotation(torch.arange(5)[None], torch.tensor([1.0, 0.1]))
    y = apply_partial_rope(x, cos, sin)
    assert torch.equal(y[..., :4], apply_rope(x[..., :4], cos, sin))
    assert torch.equal(y[..., 4:], x[..., 4:])


@torch.no_grad()
def test_the_layer_alone_is_the_module_of_transformers_and_any_rule_can_be_put_in() -> None:
    twin = theirs("qwen3_next", 3, num_hidden_layers=1, layer_types=[LINEAR])
    theirs_, ours = twin.model.layers[0].linear_attn, ours_from_hf(twin).model.layers[0].linear_attn
    assert isinstance(ours, GatedDeltaNet)
    assert {*ours.state_dict()} == {*theirs_.state_dict()}
    x = torch.randn(2, 70, twin.config.hidden_size)
    seen = NO_CACHE.see(x)[0]
    torch.testing.assert_close(ours(x, seen, NO_CACHE), theirs_(x), atol=5e-5, rtol=0)
    ours.delta_rule = recurrent_delta_rule
    torch.testing.assert_close(ours(x, seen, NO_CACHE), theirs_(x), atol=5e-5, rtol=0)


def test_half_precision_keeps_its_memory_in_float32() -> None:
    model = tiny().to(torch.bfloat16)
    cache = cache_for(model.config.windows)
    with torch.no_grad():
        logits = model(token_ids(2, 9), cache=cache)
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
    inputs, memory = cache.states[0]
    assert inputs.dtype == torch.bfloat16 and memory.dtype == torch.float32


def test_the_blocks_of_a_model_with_states_alone_are_found() -> None:
    assert len(blocks(tiny(layer_types=(LINEAR,) * 4))) == 4


def test_heads_of_values_share_those_of_keys() -> None:
    with pytest.raises(ValueError, match="n_value_head=3 is no multiple of n_key_head=2"):
        GatedDeltaNet(8, 2, 3)


def test_the_interval_says_which_layers_have_attention() -> None:
    file = {"model_type": "qwen3_next", "full_attention_interval": 3, "num_hidden_layers": 4}
    assert config_from_dict(file).layer_types == (LINEAR, LINEAR, FULL, LINEAR)


def test_layers_have_experts_where_the_file_says(tmp_path: Path) -> None:
    """Under their published names, each expert by itself; none at all where it counts none."""
    file = {"model_type": "qwen3_next", "num_hidden_layers": 6}
    sparse = config_from_dict(file | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [sparse.has_experts(n) for n in range(6)] == [n in (1, 5) for n in range(6)]
    dense = config_from_dict(file | {"num_experts": 0})
    assert not any(dense.has_experts(n) for n in range(6))
    assert config_from_dict(config_to_dict(dense)) == dense
    save_pretrained(tiny(), tmp_path / "m")
    shapes = {n: tuple(t.shape) for n, t in load_file(tmp_path / "m/model.safetensors").items()}
    want = {"gate.weight": (6, 28), "shared_expert_gate.weight": (1, 28)}
    for mlp, F in [*((f"experts.{e}", 8) for e in range(6)), ("shared_expert", 10)]:
        want |= {f"{mlp}.gate_proj.weight": (F, 28), f"{mlp}.up_proj.weight": (F, 28)}
        want |= {f"{mlp}.down_proj.weight": (28, F)}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp."
        named = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
        assert (named == want) == (layer % 2 == 1) and ("gate_proj.weight" in named) != layer % 2


def test_the_published_shapes() -> None:
    with torch.device("meta"):
        model = build(Qwen3NextConfig(**SIZES["Qwen3-Next-80B-A3B"]))
    assert [n % 4 == 3 for n in range(48)] == [word == FULL for word in model.config.kinds]
    layer = model.model.layers[0].linear_attn
    assert layer.in_proj_qkvz.weight.shape == (12288, 2048) and layer.A_log.shape == (32,)
    assert layer.conv1d.weight.shape == (8192, 1, 4)
