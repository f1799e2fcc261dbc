"""The families of decoders since Qwen2, as their ``config.json`` speaks: a row for each.

What ``transformers`` takes for a key that a file leaves out differs from family to family, and so
do the keys that say which layers slide, rotate or have experts.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lm_from_scratch.checkpoint import deepseek_v4, gemma4
from lm_from_scratch.checkpoint.layer_kinds import (
    all_slide,
    every_other_slides,
    experts,
    five_of_six_slide,
    latent_layers,
    next_layers,
    none_slides,
    some_recurrent,
    some_rotate,
    some_slide,
)
from lm_from_scratch.limits import require
from lm_from_scratch.models.deepseek_v3 import DeepseekV3Config
from lm_from_scratch.models.deepseek_v4 import DeepseekV4Config
from lm_from_scratch.models.gemma3 import Gemma3Config
from lm_from_scratch.models.gemma4 import Gemma4Config
from lm_from_scratch.models.gpt_oss import GptOssConfig
from lm_from_scratch.models.qwen2 import Qwen2Config
from lm_from_scratch.models.qwen3 import Qwen3Config
from lm_from_scratch.models.qwen3_5 import Qwen3_5Config, Qwen3_5MoeConfig
from lm_from_scratch.models.qwen3_moe import Qwen3MoeConfig
from lm_from_scratch.models.qwen3_next import Qwen3NextConfig
from lm_from_scratch.models.smollm3 import SmolLM3Config

#: The same for all decoders since Qwen2.
DECODER_NAMES = {
    "block_size": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "activation": "hidden_act",
}

#: And for the experts of those that have some.
EXPERT_NAMES = {
    "n_expert": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
}

#: What some families always do and others never; a file need not say it.
SWITCHES = ("use_qk_norm", "attn_output_gate")


@dataclass(frozen=True)
class Dialect:
    """How a family of decoders since Qwen2 is published, under its ``model_type``."""

    config: type[Qwen2Config]
    architecture: str
    layers: Callable[[Mapping[str, Any]], dict[str, Any]]  # which slide or rotate, in our fields
    absent: Mapping[str, Any]  # what `transformers` takes for a key that a file leaves out
    qkv_bias: bool = False  # whether q, k and v have biases that no key speaks of
    only: Mapping[str, Any] = field(default_factory=dict)  # switches that stand as they are here
    switched_on: Collection[str] = ()  # of SWITCHES
    extra_names: Mapping[str, str] = field(default_factory=dict)  # of fields that Qwen2 has not
    partial: bool = False  # whether the file says what share of a head is turned
    thetas: bool = False  # whether layers that slide have a theta of their own
    rope: Mapping[str, Any] | None = None  # the rotation of a file that has null for it
    read: Callable[[dict[str, Any]], dict[str, Any]] = dict  # its words into those of other files,
    write: Callable[[dict[str, Any]], dict[str, Any]] = dict  # and back

    @property
    def names(self) -> dict[str, str]:
        """Our names and those of the file, where they differ."""
        return {**DECODER_NAMES, **self.extra_names}

    def biases(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Which maps have biases: a file says it under two keys, or its family has none of them."""
        read = {key: config[key] for key in ("attention_bias", "mlp_bias") if key in self.absent}
        require(bool, **read)
        attention = read.get("attention_bias", False)
        biases = {"qkv_bias": attention or self.qkv_bias, "o_bias": attention}
        return {**biases, "mlp_bias": read.get("mlp_bias", False)}


_ABSENT: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
}
_QWEN = _ABSENT | {
    "num_key_value_heads": 32,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_LLAMA = _ABSENT | {
    "vocab_size": 32000,
    "num_key_value_heads": None,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL = _LLAMA | {
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN3_NEXT = _ABSENT | {
    "attention_bias": False,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "hidden_size": 2048,
    "head_dim": 256,
    "intermediate_size": 5632,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "num_experts": 512,
    "mlp_only_layers": None,
}
_QWEN3_5 = _QWEN3_NEXT | {
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "hidden_size": 4096,
    "intermediate_size": 12288,
}
_QWEN3_5_MOE = _QWEN3_NEXT | {"num_hidden_layers": 40, "num_experts": 256}
_QWEN3_MOE = _ABSENT | {
    "attention_bias": False,
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "head_dim": None,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
}
_DEEPSEEK = _LLAMA | {
    "attention_bias": False,
    "vocab_size": 129280,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "qk_rope_head_dim": 64,
}
_SMOLLM3 = _LLAMA | {
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_theta": 2_000_000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "pad_token_id": 128004,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": None,
    "layer_types": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}
_GEMMA3 = _ABSENT | {
    "attention_bias": False,
    "vocab_size": 262208,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 4096,
    "layer_types": None,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "final_logit_softcapping": None,
}
_GEMMA4 = _GEMMA3 | {
    "vocab_size": 262144,
    "num_hidden_layers": 30,
    "rope_theta": 10000.0,
    "sliding_window": 512,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "use_bidirectional_attention": None,
}
_GPT_OSS = _LLAMA | {
    "attention_bias": True,
    "vocab_size": 201088,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "rope_theta": 150_000.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "sliding_window": 128,
    "layer_types": None,
}
_DEEPSEEK_V4 = _ABSENT | {
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "max_position_embeddings": 1048576,
    "head_dim": 512,
    "sliding_window": 128,
    "layer_types": None,
    "mlp_layer_types": None,
    "compress_rates": None,
    "compress_rope_theta": 160000.0,
    "partial_rotary_factor": None,
    "index_topk": 512,
}
#: How DeepSeek's own code routes; that of ``transformers`` knows no other way, and reads no key.
_ROUTED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}

#: The families by their ``model_type``.
DIALECTS = {
    "qwen2": Dialect(Qwen2Config, "Qwen2ForCausalLM", some_slide, _QWEN, qkv_bias=True),
    "llama": Dialect(
        Qwen2Config,
        "LlamaForCausalLM",
        none_slides,
        _LLAMA | {"attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Dialect(Qwen2Config, "MistralForCausalLM", all_slide, _MISTRAL),
    "qwen3": Dialect(
        Qwen3Config,
        "Qwen3ForCausalLM",
        some_slide,
        _QWEN | {"attention_bias": False},
        switched_on=["use_qk_norm"],
    ),
    "qwen3_next": Dialect(
        Qwen3NextConfig,
        "Qwen3NextForCausalLM",
        next_layers,
        _QWEN3_NEXT,
        switched_on=["use_qk_norm", "attn_output_gate"],
        extra_names=EXPERT_NAMES | {"shared_expert_size": "shared_expert_intermediate_size"},
        partial=True,
    ),
    "qwen3_5_text": Dialect(
        Qwen3_5Config,
        "Qwen3_5ForCausalLM",
        some_recurrent,
        _QWEN3_5,
        switched_on=["use_qk_norm", "attn_output_gate"],
        partial=True,
    ),
    "qwen3_5_moe_text": Dialect(
        Qwen3_5MoeConfig,
        "Qwen3_5MoeForCausalLM",
        some_recurrent,
        _QWEN3_5_MOE,
        switched_on=["use_qk_norm", "attn_output_gate"],
        extra_names=EXPERT_NAMES | {"shared_expert_size": "shared_expert_intermediate_size"},
        partial=True,
    ),
    "qwen3_moe": Dialect(
        Qwen3MoeConfig,
        "Qwen3MoeForCausalLM",
        experts,
        _QWEN3_MOE,
        switched_on=["use_qk_norm"],
        extra_names=EXPERT_NAMES,
    ),
    "deepseek_v3": Dialect(
        DeepseekV3Config,
        "DeepseekV3ForCausalLM",
        latent_layers,
        _DEEPSEEK,
        only=_ROUTED,
        extra_names=EXPERT_NAMES
        | {
            "head_dim": "qk_rope_head_dim",
            "n_expert": "n_routed_experts",
            "top_group": "topk_group",
        },
    ),
    "deepseek_v4": Dialect(
        DeepseekV4Config,
        "DeepseekV4ForCausalLM",
        deepseek_v4.layers,
        _DEEPSEEK_V4,
        only=deepseek_v4.ONLY,
        extra_names=EXPERT_NAMES | {"n_expert": "n_routed_experts"},
        partial=True,
        read=deepseek_v4.read,
        write=deepseek_v4.write,
    ),
    "smollm3": Dialect(
        SmolLM3Config,
        "SmolLM3ForCausalLM",
        some_rotate,
        _SMOLLM3,
        only={"use_sliding_window": False},
        extra_names={"rope_layers": "no_rope_layers"},
    ),
    "gemma3_text": Dialect(
        Gemma3Config,
        "Gemma3ForCausalLM",
        five_of_six_slide,
        _GEMMA3,
        switched_on=["use_qk_norm"],
        extra_names={"activation": "hidden_activation"},
        thetas=True,
    ),
    "gemma4_text": Dialect(
        Gemma4Config,
        "Gemma4ForCausalLM",
        gemma4.layers,
        _GEMMA4,
        only={"enable_moe_block": False},
        switched_on=["use_qk_norm"],
        extra_names=gemma4.NAMES,
        thetas=True,
        read=gemma4.read,
        write=gemma4.write,
    ),
    "gpt_oss": Dialect(
        GptOssConfig,
        "GptOssForCausalLM",
        every_other_slides,
        _GPT_OSS,
        only={"hidden_act": "silu"},
        extra_names={"n_expert": "num_local_experts", "top_k": "num_experts_per_tok"},
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    ),
}
