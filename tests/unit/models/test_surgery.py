"""Every architecture through every change that is made to a built model, tied and untied: a head, a
layer with a state and an attention layer are found by their types."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_families import near
from tiny_models import enlarge_, token_ids
from torch import nn

from lm_from_scratch.attention.kinds import use_attention_
from lm_from_scratch.checkpoint.architectures import ARCHITECTURES, build
from lm_from_scratch.generation.generate import generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.instruments.layout import lay_out_
from lm_from_scratch.instruments.onednn import use_onednn_
from lm_from_scratch.interop.peft import load_lora_, save_lora
from lm_from_scratch.layers.head import Head, TiedHead
from lm_from_scratch.models.blocks import blocks
from lm_from_scratch.models.deepseek_v3 import DeepseekV3Config
from lm_from_scratch.models.deepseek_v4 import DeepseekV4Config
from lm_from_scratch.models.gemma3 import Gemma3Config
from lm_from_scratch.models.gemma4 import Gemma4Config
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.models.gpt_oss import GptOssConfig
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config
from lm_from_scratch.models.qwen3 import Qwen3Config
from lm_from_scratch.models.qwen3_5 import Qwen3_5Config, Qwen3_5MoeConfig
from lm_from_scratch.models.qwen3_moe import Qwen3MoeConfig
from lm_from_scratch.models.qwen3_next import Qwen3NextConfig
from lm_from_scratch.models.smollm3 import SmolLM3Config
from lm_from_scratch.weights.lora import add_lora_, merge_lora_
from lm_from_scratch.weights.quantize import dequantize_, multiplied, quantize_
from lm_from_scratch.weights.resize import resize_token_embeddings_
from lm_from_scratch.weights.swap import swap_parameters_

SIZES: dict[str, Any] = dict(vocab_size=97, block_size=64, n_layer=4, n_head=4, n_embd=32)
DECODER = SIZES | dict(n_kv_head=2, head_dim=8, intermediate_size=40)
STATES = dict(
    partial_rotary_factor=0.5, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
OWN_IDS = dict(pad_token_id=0)
EXPERTS = DECODER | dict(n_expert=4, top_k=2, expert_size=8)
CONFIGS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "gpt2": (GPT2Config, SIZES | dict(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)),
    "qwen2": (Qwen2Config, DECODER),
    "qwen3": (Qwen3Config, DECODER),
    "qwen3_moe": (Qwen3MoeConfig, EXPERTS),
    "qwen3_next": (Qwen3NextConfig, EXPERTS | STATES | dict(shared_expert_size=8)),
    "qwen3_5_text": (Qwen3_5Config, DECODER | STATES),
    "qwen3_5_moe_text": (Qwen3_5MoeConfig, EXPERTS | STATES | dict(shared_expert_size=8)),
    "deepseek_v3": (
        DeepseekV3Config,
        SIZES | dict(
            intermediate_size=40, q_lora_rank=14, kv_lora_rank=16, qk_nope_head_dim=6, head_dim=4,
            v_head_dim=8, first_k_dense_replace=1, n_expert=4, top_k=2, expert_size=8, n_group=2,
            top_group=1,
        ),
    ),
    "smollm3": (SmolLM3Config, DECODER | dict(pad_token_id=0)),
    "gemma3": (Gemma3Config, DECODER | dict(sliding_window=3)),
    "gemma4": (
        Gemma4Config,
        DECODER | dict(
            sliding_window=3, layer_types=(SLIDING, FULL) * 2, global_head_dim=12,
            kv_shared_layers=2, per_layer_width=6, per_layer_vocab_size=97, keys_are_values=True,
            final_logit_softcapping=None,
        ),
    ),
    "gpt_oss": (GptOssConfig, DECODER | OWN_IDS | dict(n_expert=4, top_k=2, sliding_window=3)),
    "deepseek_v4": (
        DeepseekV4Config,
        SIZES | dict(
            head_dim=8, partial_rotary_factor=0.5, q_lora_rank=12, o_groups=2, o_lora_rank=6,
            sliding_window=3, sparse_rate=2, heavy_rate=4, index_n_heads=4, index_head_dim=8,
            index_topk=3, n_expert=4, top_k=2, expert_size=8,
        ),
    ),
}  # fmt: skip
CASES = [
    (name, tied) for name in CONFIGS for tied in ((True,) if name == "gpt2" else (True, False))
]
#: Heads that are tied and others take turns in `make test`.
every_model = pytest.mark.parametrize(
    ("name", "tied"),
    [
        pytest.param(name, tied, marks=[pytest.mark.slow] * (i % 2 == tied and name != "gpt2"))
        for i, name in enumerate(CONFIGS)
        for tied in (True, False)
        if (name, tied) in CASES
    ],
)
IDX = token_ids(2, 7)


def made(name: str, tied: bool) -> CausalLM:
    """A small model in evaluation mode, with large random weights."""
    config, sizes = CONFIGS[name]
    tie: dict[str, Any] = {} if name == "gpt2" else dict(tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = build(config(**sizes, **tie, bos_token_id=1, eos_token_id=2)).eval()
    enlarge_(model)
    return model


def test_every_architecture_is_here() -> None:
    assert {config.__name__ for config, _ in CONFIGS.values()} == set(ARCHITECTURES)


@every_model
@torch.no_grad()
def test_the_head_turns_hidden_states_into_logits(name: str, tied: bool) -> None:
    model = made(name, tied)
    x = model.backbone(IDX)
    assert isinstance(model, CausalLM) and isinstance(model.head, TiedHead) is tied
    assert model.head.weight.shape == (97, 32)
    assert torch.equal(model.head(x), x @ model.head.weight.T)
    assert torch.equal(model(IDX), model.head(x))
    assert ("lm_head.weight" in model.state_dict()) is not tied
    assert (model.head.weight is model.backbone.embedding.weight) is tied


def replace_weight(model: CausalLM, table: torch.Tensor) -> None:
    model.backbone.embedding.weight = nn.Parameter(table)


def replace_module(model: CausalLM, table: torch.Tensor) -> None:
    name = "wte" if hasattr(model.backbone, "wte") else "embed_tokens"
    setattr(model.backbone, name, nn.Embedding.from_pretrained(table))


def swap(model: CausalLM, table: torch.Tensor) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    swap_parameters_(model, {names[id(model.backbone.embedding.weight)]: table})


CHANGES = (replace_weight, replace_module, swap)
COPIES = (lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)))


@pytest.mark.parametrize(
    ("name", "change", "copied"),
    [  # each model with each change and each copy, and each change with each copy, in `make test`
        pytest.param(name, change, copied, marks=[pytest.mark.slow] * ((n + i + j) % 3 > 0))
        for n, name in enumerate(CONFIGS)
        for i, change in enumerate(CHANGES)
        for j, copied in enumerate(COPIES)
    ],
)
def test_a_tied_head_follows_its_embedding(
    name: str,
    change: Callable[[CausalLM, torch.Tensor], None],
    copied: Callable[[CausalLM], CausalLM],
) -> None:
    original = made(name, tied=True)
    table, before = torch.randn(97, 32), original.head.weight.clone()
    model = copied(original)
    change(model, table)
    assert torch.equal(model.head.weight, table)
    assert model.head.weight is model.backbone.embedding.weight
    assert model is original or torch.equal(original.head.weight, before)
    assert model.double().head.weight.dtype == torch.float64


@every_model
@torch.no_grad()
def test_weights_are_laid_out_and_multiplied_by_another_library(name: str, tied: bool) -> None:
    model, want = made(name, tied), made(name, tied)(IDX)
    layers = sum(isinstance(m, nn.Linear) for m in model.modules())
    for layout in ("columns", "rows"):
        assert lay_out_(model, layouts=[layout]).chosen == {layout: layers + 1}
        near(model(IDX), want, layout, bound=1e-4)
    use_onednn_(model)
    assert model.head.product is not Head(1, 1).product
    near(model(IDX), want, "oneDNN", bound=1e-4)


@every_model
@torch.no_grad()
def test_weights_are_quantised_and_back(name: str, tied: bool) -> None:
    model = made(name, tied)
    assert any(p is model.head.weight for p in multiplied(model).values())
    quantize_(model, 8, weight_only=True)
    assert type(model.head.weight).__name__.endswith("Int8Weight")
    got = model(IDX)
    dequantize_(model)
    assert type(model.head.weight) is nn.Parameter
    torch.testing.assert_close(model(IDX), got, atol=2e-3, rtol=1e-3)


@every_model
@torch.no_grad()
def test_adapters_are_added_stored_and_merged(name: str, tied: bool, tmp_path: Any) -> None:
    model, want = made(name, tied), made(name, tied)(IDX)
    add_lora_(model, rank=2)
    torch.testing.assert_close(model(IDX), want)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1)
    save_lora(model, tmp_path / "adapters")
    other = made(name, tied)
    load_lora_(other, tmp_path / "adapters")
    assert torch.equal(other(IDX), model(IDX)) and not torch.equal(other(IDX), want)
    merge_lora_(model.double())
    torch.testing.assert_close(model(IDX), other.double()(IDX))


@every_model
@torch.no_grad()
def test_the_vocabulary_grows(name: str, tied: bool) -> None:
    model, want = made(name, tied), made(name, tied)(IDX)
    resize_token_embeddings_(model, 100)
    assert model(IDX).shape == (2, 7, 100) and torch.equal(model(IDX)[..., :97], want)


@every_model
def test_text_is_generated_by_any_attention(name: str, tied: bool) -> None:
    model = made(name, tied)
    assert len(blocks(model)) == 4
    want = list(generate(model, IDX, 5, GREEDY))
    use_attention_(model, "formula")
    assert list(generate(model, IDX, 5, GREEDY)) == want
