"""What configs and files refuse, by name and value; and published sizes have their parameters."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import DEEPSEEK_V3, QWEN2, TINY

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.configs import config_from_dict, config_to_dict
from lm_from_scratch.layers.experts import active_parameters
from lm_from_scratch.models import (
    gemma3,
    gemma4,
    gpt2,
    gpt_oss,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from lm_from_scratch.models.deepseek_v3 import DeepseekV3Config
from lm_from_scratch.models.gemma3 import Gemma3Config
from lm_from_scratch.models.gemma4 import Gemma4Config
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.models.gpt_oss import GptOssConfig
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config
from lm_from_scratch.models.qwen3 import Qwen3Config
from lm_from_scratch.models.qwen3_5 import Qwen3_5Config, Qwen3_5MoeConfig
from lm_from_scratch.models.qwen3_moe import Qwen3MoeConfig
from lm_from_scratch.models.qwen3_next import LINEAR, Qwen3NextConfig
from lm_from_scratch.models.smollm3 import SmolLM3Config

SMALL = dict(vocab_size=97, n_layer=4, n_head=4, n_kv_head=2, n_embd=24, intermediate_size=28)
EXPERTS = dict(n_expert=6, top_k=2, expert_size=8)

#: A config that is whole, and what may not stand in it.
CONFIGS: list[tuple[type[Any], dict[str, Any], list[tuple[dict[str, Any], str]]]] = [
    (GPT2Config, TINY, [
        ({"n_layer": 0}, "n_layer=0"),
        ({"n_layer": 3.0}, "n_layer=3.0"),
        ({"n_layer": True}, "n_layer=True"),
        ({"n_head": "4"}, "n_head='4'"),
        ({"n_head": 3}, "n_embd=28 is not a multiple of n_head=3"),
        ({"n_embd": None}, "n_embd=None"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"attn_pdrop": 1.0}, "attn_pdrop=1.0"),
        ({"resid_pdrop": math.nan}, "resid_pdrop=nan"),
        ({"resid_pdrop": None}, "resid_pdrop=None"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps=0.0"),
        ({"layer_norm_eps": math.nan}, "layer_norm_eps=nan"),
        ({"layer_norm_eps": math.inf}, "layer_norm_eps=inf"),
        ({"initializer_range": math.nan}, "initializer_range=nan"),
        ({"intermediate_size": 0}, "intermediate_size=0"),
        ({"bos_token_id": -1}, "bos_token_id=-1"),
        ({"eos_token_id": [2]}, "eos_token_id="),
        ({"vocab_size": 50000, "eos_token_id": 50000},
         "eos_token_id=50000 is not below vocab_size=50000"),
        ({"pad_token_id": 97}, "pad_token_id=97 is not below vocab_size=97"),
    ]),
    (Qwen2Config, QWEN2, [
        ({"n_layer": 0}, "n_layer=0"),
        ({"n_head": True}, "n_head=True"),
        ({"n_kv_head": 4}, "n_head=6 is not a multiple of n_kv_head=4"),
        ({"n_embd": 47}, "n_embd=47 is not a multiple of n_head=6"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"activation": "swish9"}, "swish9"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
        ({"rope_theta": 0.5}, "rope_theta=0.5 must be above 1"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling"),
        ({"sliding_window": 4}, "needs layer_types or max_window_layers"),
        ({"max_window_layers": 1}, "need a sliding_window"),
        ({"sliding_window": 0, "max_window_layers": 1}, "sliding_window=0"),
        ({"layer_types": (FULL,) * 2}, "n_layer=3"),
        ({"layer_types": (FULL, FULL, "local"), "sliding_window": 3}, "local"),
        ({"layer_types": (FULL,) * 3, "max_window_layers": 1, "sliding_window": 3}, "both"),
        ({"layer_types": [FULL] * 3}, "tuple"),
        ({"attention_dropout": 1.0}, "attention_dropout=1.0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan"),
        ({"eos_token_id": 97}, "eos_token_id=97 is not below vocab_size=97"),
    ]),
    (SmolLM3Config, SMALL | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2), [
        ({"rope_layers": (1, 0)}, "rope_layers=(1, 0) must be a tuple of n_layer=4"),
        ({"rope_layers": [1, 1, 1, 0]}, "rope_layers=[1, 1, 1, 0] must be a tuple"),
        ({"rope_layers": (1, 1, 2, 0)}, "rope_layers=(1, 1, 2, 0) must be 1 (rotates) or 0"),
        ({"rope_layers": (1, 1, True, 0)}, "must be 1 (rotates) or 0 (does not)"),
    ]),
    (Gemma3Config, SMALL | dict(head_dim=6), [
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be an integer, at least 1"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping=-1.0 must be a positive"),
        ({"rope_local_theta": 1.0}, "rope_local_theta=1.0 must be above 1"),
        ({"sliding_window": None, "layer_types": (SLIDING,) * 4}, "need a sliding_window"),
        ({"layer_types": ("mamba",) * 4}, "layer_types has ['mamba'], not 'full_attention' or"),
    ]),
    (Gemma4Config, SMALL | dict(head_dim=6, global_head_dim=8, kv_shared_layers=0), [
        ({"global_head_dim": 7}, "global_head_dim=7 is odd: rotation works on pairs"),
        ({"global_n_kv_head": 5}, "n_head=|is not a multiple of global_n_kv_head=5"),
        ({"kv_shared_layers": 4}, "4 of 4 layers|the first 0 must have each kind"),
        ({"layer_types": (SLIDING,) * 3 + (FULL,), "kv_shared_layers": 1}, "cannot share keys"),
        ({"per_layer_width": -1}, "per_layer_width=-1 must be an integer, at least 0"),
        ({"sliding_window": None}, "need a sliding_window"),
    ]),
    (Qwen3MoeConfig, SMALL | EXPERTS | dict(head_dim=6, eos_token_id=2), [
        ({"top_k": 7}, "top_k=7 exceeds n_expert=6"),
        ({"n_expert": 0}, "n_expert=0 must be an integer, at least 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be an integer, at least 1"),
        ({"mlp_only_layers": (-1,)}, "mlp_only_layers=(-1,) must be a tuple of layers"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers=[1] must be a tuple of layers"),
        ({"norm_topk_prob": 1}, "norm_topk_prob=1 is not a bool"),
    ]),
    (DeepseekV3Config, DEEPSEEK_V3, [
        ({"n_kv_head": 2}, "n_kv_head=2 is not supported, only n_kv_head=4"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0 must be an integer, at least 1"),
        ({"q_lora_rank": -1}, "q_lora_rank=-1 must be an integer, at least 1"),
        ({"rope_interleave": 1}, "rope_interleave=1 is not a bool"),
        ({"v_head_dim": 2.5}, "v_head_dim=2.5 must be an integer, at least 1"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace=-1 must be an integer, at least 0"),
        ({"n_group": 3}, "n_group=3 does not divide n_expert=8 into"),
        ({"n_group": 8}, "n_group=8 does not divide n_expert=8 into groups of 2"),
        ({"top_group": 5}, "top_group=5 groups of 2 have no top_k=3 experts in n_group=4"),
        ({"top_k": 5}, "top_group=2 groups of 2 have no top_k=5 experts"),
        ({"top_k": 9}, "top_k=9 exceeds n_expert=8"),
        ({"n_shared_experts": 0}, "n_shared_experts=0 must be an integer, at least 1"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor=0.0 must be a positive number"),
    ]),
    (Qwen3NextConfig, SMALL | EXPERTS | dict(head_dim=16, linear_num_key_heads=2, eos_token_id=2), [
        ({"linear_num_value_heads": 5}, "linear_num_value_heads=5 is not a multiple of linear_num"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 of head_dim=16 is 3 features"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor=2.0 of head_dim=16 is 32 features"),
        ({"layer_types": (LINEAR,)}, "layer_types=('linear_attention',) must be a tuple of n_la"),
        ({"layer_types": ("mamba",) * 4}, "layer_types has ['mamba'], not 'full_attention' or"),
        ({"sliding_window": 4}, "sliding_window=4 and max_window_layers=None are not supported"),
    ]),
]  # fmt: skip

#: What may not stand in a config.json; named as it is there.
FILES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "qwen2": [
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' must be an object"),
        ({"rope_parameters": [1]}, "rope_parameters="),
        ({"layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"use_sliding_window": True, "sliding_window": None, "layer_types": [SLIDING] * 32},
         "use_sliding_window=True and sliding_window=None"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false'"),
    ],
    "llama": [
        ({"attention_bias": 1}, "attention_bias=1 is not a bool"),
        ({"mlp_bias": None}, "mlp_bias=None is not a bool"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000 is more layers than any"),
    ],
    "smollm3": [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0] must have a number for each of"),
        ({"no_rope_layers": "1110"}, "no_rope_layers='1110' must have a number"),
        ({"no_rope_layers": [1] * 35 + ["x"]}, "must be 1 (rotates) or 0"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 must be an integer, at least 1"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None must be an integer"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 must be 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 must be"),
        ({"rope_parameters": {FULL: {"rope_theta": 1e4}}}, "['full_attention'] is a dictionary"),
    ],
    "gemma3_text": [
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters=|must have an object for each"),
        ({"rope_parameters": {FULL: 1e6}}, "rope_parameters=|must have an object for each of"),
        ({"rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 8.0}}},
         "rope_parameters: sliding_attention has LinearScaling(factor=8.0), and only full_"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
        ({"rope_local_base_freq": 0.5}, "rope_local_theta=0.5 must be above 1"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be an integer, at least 1"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not"),
    ],
    "gemma4_text": [
        ({"enable_moe_block": True}, "enable_moe_block=True is not supported, only enable_moe_"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not"),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v=1 is not a bool"),
        ({"layer_types": "full"}, "layer_types='full' must be a list of words"),
        ({"num_kv_shared_layers": 25}, "25 of 30 layers|cannot share keys: the first 5 must"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config=|must say the same of"),
        ({"per_layer_config": [1]}, "per_layer_config=[1] must say the same of all layers"),
        ({"per_layer_config": {f"{n:02}": {"skip": ["mlp"]} for n in range(5, 30, 6)}},
         "per_layer_config: ['skip'] cannot differ between layers here"),
        ({"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 2}}},
         "ProportionalScaling: partial_rotary_factor=2 must be a number from 0 to 1"),
    ],
    "qwen3_moe": [
        ({"mlp_only_layers": 3}, "mlp_only_layers=3 must be a list of layers"),
        ({"mlp_only_layers": ["a"]}, "mlp_only_layers=('a',) must be a tuple of layers"),
        ({"num_experts": 4, "num_local_experts": 8}, "num_experts=4 and num_local_experts=8"),
        ({"num_experts": 4},
         "top_k=8 exceeds n_expert=4 (num_experts_per_tok, num_experts in the file)"),
        ({"num_experts": 0}, "n_expert=0 must be|(num_experts in the file)"),
        ({"use_sliding_window": 1}, "use_sliding_window=1 is not a bool"),
    ],
    "deepseek_v3": [
        ({"qk_rope_head_dim": 7}, "head_dim=7 is odd|(qk_rope_head_dim in the file)"),
        ({"topk_group": 9}, "top_group=9 groups|(topk_group, "),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
         "mscale_all_dim=1.0 is not supported with rope_type="),
    ],
    "qwen3_next": [
        ({"num_experts": 8},
         "top_k=10 exceeds n_expert=8 (num_experts_per_tok, num_experts in the file)"),
        ({"num_experts": -1}, "n_expert=-1 must be|(num_experts in the file)"),
        ({"num_experts": False}, "n_expert=False must be|(num_experts in the file)"),
        ({"mlp_only_layers": 3}, "mlp_only_layers=3 must be a list of layers"),
        ({"mlp_only_layers": ["a"]}, "mlp_only_layers=('a',) must be a tuple of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be an integer, at least 1"),
        ({"shared_expert_intermediate_size": 0},
         "shared_expert_size=0 must|(shared_expert_intermediate_size in the file)"),
        ({"layer_types": ["linear_attention"]}, "layer_types=|must be a tuple of n_layer=48"),
        ({"full_attention_interval": 0}, "full_attention_interval=0 must be an integer, at least"),
    ],
}  # fmt: skip


def says(error: pytest.ExceptionInfo[ValueError], parts: str) -> None:
    for part in parts.split("|"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("kind", "whole", "change", "message"),
    [(kind, whole, *case) for kind, whole, cases in CONFIGS for case in cases],
)
def test_a_config_refuses_by_name_and_value(
    kind: type[Any], whole: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    kind(**whole)
    with pytest.raises(ValueError) as error:
        kind(**{**whole, **change})
    says(error, message)


@pytest.mark.parametrize(
    ("family", "contents", "message"),
    [(family, *case) for family, cases in FILES.items() for case in cases],
)
def test_a_file_is_refused_by_name(family: str, contents: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        config_from_dict({"model_type": family, **contents})
    says(error, message)


MOE = SMALL | EXPERTS | dict(head_dim=6, eos_token_id=2)


@pytest.mark.parametrize(
    ("config", "family", "message"),
    [
        (Qwen2Config(qkv_bias=False, sliding_window=8, max_window_layers=3), None,
         "windows=|cannot be those of a mistral"),
        (Qwen2Config(), "llama", "qkv_bias=True cannot be written: in a llama it is False"),
        (Qwen2Config(o_bias=True), "mistral", "=True cannot be written: in a mistral it is False"),
        (Qwen2Config(mlp_bias=True), "qwen2", "mlp_bias=True cannot be written: in a qwen2 it is"),
        (Qwen3MoeConfig(**MOE, sliding_window=8, max_window_layers=1), None,
         "cannot be those of a qwen3_moe"),
        (DeepseekV3Config(sliding_window=8, max_window_layers=0), None,
         "windows=|cannot be those of a deepseek_v3"),
        (Gemma4Config(global_n_kv_head=2), None, "global_n_kv_head cannot be written without"),
    ],
)  # fmt: skip
def test_what_no_file_can_say_is_not_written(config: Any, family: str | None, message: str) -> None:
    with pytest.raises(ValueError) as error:
        config_to_dict(config, family)
    says(error, message)


PUBLISHED_SIZES = [
    (GPT2Config(**gpt2.SIZES["gpt2"]), "0.124", None),
    (GPT2Config(**gpt2.SIZES["gpt2-medium"]), "0.355", None),
    (GPT2Config(**gpt2.SIZES["gpt2-large"]), "0.774", None),
    (GPT2Config(**gpt2.SIZES["gpt2-xl"]), "1.558", None),
    (Qwen2Config(**qwen2.SIZES["Qwen2-0.5B"]), "0.494", None),
    (Qwen2Config(**qwen2.SIZES["Qwen2-1.5B"]), "1.544", None),
    (Qwen2Config(**qwen2.SIZES["Qwen2-7B"]), "7.616", None),
    (Qwen3Config(**qwen3.SIZES["Qwen3-0.6B"]), "0.6", None),
    (Qwen3Config(**qwen3.SIZES["Qwen3-1.7B"]), "1.7", None),
    (Qwen3Config(**qwen3.SIZES["Qwen3-4B"]), "4.0", None),
    (Qwen3Config(**qwen3.SIZES["Qwen3-8B"]), "8.2", None),
    (SmolLM3Config(), "3.08", None),
    (Gemma3Config(**gemma3.SIZES["Gemma-3-270M"]), "0.268", None),
    (Gemma3Config(**gemma3.SIZES["Gemma-3-1B"]), "1.000", None),
    (Gemma3Config(**gemma3.SIZES["Gemma-3-4B"]), "3.88", None),
    (Gemma3Config(**gemma3.SIZES["Gemma-3-27B"]), "27.0", None),
    (Gemma4Config(), "4.63", None),
    (Gemma4Config(**gemma4.SIZES["Gemma-4-E4B"]), "7.5", None),
    (Gemma4Config(**gemma4.SIZES["Gemma-4-31B"]), "30.7", None),
    (Qwen3MoeConfig(**qwen3_moe.SIZES["Qwen3-30B-A3B"]), "31", "3"),
    (Qwen3MoeConfig(**qwen3_moe.SIZES["Qwen3-235B-A22B"]), "235", "22"),
    (Qwen3NextConfig(**qwen3_next.SIZES["Qwen3-Next-80B-A3B"]), "80", "3.6"),  # its name says 3
    (Qwen3_5Config(**qwen3_5.SIZES["Qwen3.5-0.8B"]), "0.8", None),
    (Qwen3_5Config(), "9.0", None),
    (Qwen3_5Config(**qwen3_5.SIZES["Qwen3.5-27B"]), "27", None),
    (Qwen3_5MoeConfig(), "35", "3"),
    (Qwen3_5MoeConfig(**qwen3_5.MOE_SIZES["Qwen3.5-397B-A17B"]), "396", "16"),  # its name says 397
    (DeepseekV3Config(), "671", "37"),
    (GptOssConfig(**gpt_oss.SIZES["gpt-oss-20b"]), "20.9", "3.6"),
    (GptOssConfig(), "116.8", "5.1"),
]  # fmt: skip


def first_of_each_class() -> Iterator[Any]:
    """In `make test`: modules without memory take time, too."""
    seen: set[type] = set()
    for row in PUBLISHED_SIZES:
        yield pytest.param(*row, marks=[pytest.mark.slow] * (type(row[0]) in seen))
        seen.add(type(row[0]))


@pytest.mark.parametrize(("config", "total", "active"), [*first_of_each_class()])
def test_published_sizes_have_their_billions_of_parameters(
    config: Any, total: str, active: str | None
) -> None:
    """Of the embedding a token meets one row."""
    with torch.device("meta"):
        model = build(config)

    def billions(count: int, like: str) -> str:
        return f"{count / 1e9:.{len(like.partition('.')[2])}f}"

    assert billions(sum(p.numel() for p in model.parameters()), total) == total
    if active is not None:
        embedding = model.backbone.embedding.weight.numel()
        assert billions(active_parameters(model) - embedding, active) == active


def test_every_published_size_is_in_the_table() -> None:
    modules = (gpt2, qwen2, qwen3, qwen3_moe, qwen3_next, qwen3_5, gemma3, gemma4, gpt_oss)
    assert [len(module.SIZES) for module in modules] == [4, 3, 4, 2, 1, 3, 4, 3, 2]


def test_the_defaults_of_deepseek_are_those_of_its_file() -> None:
    assert config_from_dict({"model_type": "deepseek_v3"}) == DeepseekV3Config()
