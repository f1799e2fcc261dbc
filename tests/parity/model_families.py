"""The families of models, each beside the same model in transformers.

A row says how a config is drawn in the words of transformers, no two sizes alike by chance, and how
a model of transformers becomes ours. Families that are published are read from a folder. Of the
others transformers has models whose rest is ours: a GLM-4.5 of dense layers is Qwen2 with partial
RoPE, a Mellum 2 of dense layers is Qwen3 with a theta for each kind of layer, and a Qwen3-Next of
attention alone is Qwen2 with gates. Their weights load by name.
"""

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import ROPES, enlarge_, ours_from_hf
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from lm_from_scratch.checkpoint.rope_configs import scaling_from_dict
from lm_from_scratch.layers.rope import RotaryEmbedding, apply_partial_rope
from lm_from_scratch.models.deepseek_v3 import DeepseekV3ForCausalLM
from lm_from_scratch.models.deepseek_v4 import (
    HASHED,
    HEAVY,
    SCORED,
    SPARSE,
    DeepseekV4ForCausalLM,
)
from lm_from_scratch.models.gated_attention import GatedForCausalLM
from lm_from_scratch.models.gemma3 import Gemma3ForCausalLM
from lm_from_scratch.models.gemma4 import Gemma4ForCausalLM
from lm_from_scratch.models.gpt2 import GPT2LMHeadModel
from lm_from_scratch.models.gpt_oss import GptOssForCausalLM
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.models.qwen3 import Qwen3ForCausalLM
from lm_from_scratch.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from lm_from_scratch.models.qwen3_moe import Qwen3MoeForCausalLM
from lm_from_scratch.models.qwen3_next import LINEAR, Qwen3NextForCausalLM
from lm_from_scratch.models.smollm3 import SmolLM3ForCausalLM

# --------------------------------------------------------------------------------- drawn configs

SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
YARN = ROPES[4]
#: Families of which transformers pools the columns of a row, its padding among them.
POOLING = {"deepseek_v4"}
#: YaRN as DeepSeek has it: the sharpness of scores apart from the rotation's size.
DEEPSEEK_ROPES = [
    *ROPES,
    {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
    {**YARN, "mscale_all_dim": 2.0},
    {**YARN, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
]


def numbers(draw: Random) -> dict[str, Any]:
    """What every family after GPT-2 has."""
    n_kv_head, shared = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    return SPECIAL | dict(
        vocab_size=97, hidden_size=n_kv_head * shared * draw.choice([4, 6, 8]),
        intermediate_size=draw.choice([20, 33, 56]), num_hidden_layers=draw.choice([1, 2, 3, 4]),
        num_attention_heads=n_kv_head * shared, num_key_value_heads=n_kv_head,
        max_position_embeddings=draw.choice([64, 128]),
        rms_norm_eps=draw.choice([1e-6, 1e-5, 1e-2]), rope_parameters=draw.choice(ROPES),
        tie_word_embeddings=draw.choice([False, True]),
        hidden_act=draw.choice(["silu", "silu", "gelu", "relu"]),
    )  # fmt: skip


def own_width(draw: Random, widths: tuple[int, ...] = (4, 10, 16)) -> dict[str, Any]:
    """Heads that do not share out the hidden states, and hidden states of any width."""
    return dict(head_dim=draw.choice(widths), hidden_size=draw.choice([14, 24, 33]))


def biases(draw: Random, *keys: str) -> dict[str, Any]:
    return {key: draw.choice([False, True]) for key in keys}


def kinds_of_layers(draw: Random, config: dict[str, Any], kinds: tuple[str, ...]) -> list[str]:
    return [draw.choice(kinds) for _ in range(config["num_hidden_layers"])]


def gpt2(draw: Random) -> dict[str, Any]:
    heads = draw.choice([1, 2, 3, 4, 5])
    return dict(
        vocab_size=97, n_positions=draw.choice([24, 40]), n_layer=draw.choice([1, 2, 3, 4]),
        n_head=heads, n_embd=heads * draw.choice([2, 5, 7, 9]),
        n_inner=draw.choice([None, 13, 50]),
        activation_function=draw.choice(["gelu_new", "gelu_new", "gelu", "relu"]),
        layer_norm_epsilon=draw.choice([1e-5, 1e-3]), embd_pdrop=0.0, resid_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=2, eos_token_id=2,
    )  # fmt: skip


def llama(draw: Random) -> dict[str, Any]:
    """Transformers wants a hidden width that the heads share out, whatever their own width."""
    config, width = numbers(draw), own_width(draw)["head_dim"]
    config |= dict(head_dim=width) if draw.choice([False, True]) else {}
    return config | biases(draw, "attention_bias", "mlp_bias")


def plain(draw: Random) -> dict[str, Any]:
    return numbers(draw) | (own_width(draw) if draw.choice([False, True]) else {})


def mistral(draw: Random) -> dict[str, Any]:
    return plain(draw) | dict(sliding_window=draw.choice([None, 3, 7]))


def qwen2(draw: Random) -> dict[str, Any]:
    config = plain(draw)
    slides = draw.choice(["no", "from a layer on", "some layers"])
    if slides != "no":
        config |= dict(use_sliding_window=True, sliding_window=draw.choice([2, 3, 6]))
    if slides == "from a layer on":
        config["max_window_layers"] = draw.randint(0, config["num_hidden_layers"])
    if slides == "some layers":
        config["layer_types"] = kinds_of_layers(draw, config, (FULL, SLIDING))
    return config


def qwen3(draw: Random) -> dict[str, Any]:
    config = numbers(draw) | own_width(draw)
    if draw.choice([False, True]):
        config |= dict(use_sliding_window=True, sliding_window=draw.choice([3, 6]))
        config["layer_types"] = kinds_of_layers(draw, config, (FULL, SLIDING))
    return config | biases(draw, "attention_bias")


def qwen3_moe(draw: Random) -> dict[str, Any]:
    config, n_expert = plain(draw), draw.choice([2, 5, 12])
    if draw.choice([False, False, True]):
        config |= dict(use_sliding_window=True, sliding_window=draw.choice([3, 6]))
    return config | dict(
        num_experts=n_expert, num_experts_per_tok=draw.randint(1, n_expert),
        moe_intermediate_size=draw.choice([5, 9, 12]), norm_topk_prob=draw.choice([False, True]),
        decoder_sparse_step=draw.choice([1, 1, 2]),
        mlp_only_layers=draw.choice([None, [], [0], [config["num_hidden_layers"] - 1]]),
        **biases(draw, "attention_bias"),
    )  # fmt: skip


def deepseek_v3(draw: Random) -> dict[str, Any]:
    heads = draw.choice([1, 2, 3, 4])
    n_group, size = draw.choice([1, 2, 4]), draw.choice([2, 3, 5])
    topk_group = draw.randint(1, n_group)
    return numbers(draw) | dict(
        hidden_size=draw.choice([20, 31, 48]), first_k_dense_replace=draw.choice([0, 0, 1]),
        n_routed_experts=n_group * size, n_shared_experts=draw.choice([1, 2]),
        num_experts_per_tok=draw.randint(1, topk_group * size),
        moe_intermediate_size=draw.choice([5, 9, 12]), n_group=n_group, topk_group=topk_group,
        norm_topk_prob=draw.choice([False, True]), routed_scaling_factor=draw.choice([1.0, 2.5]),
        num_attention_heads=heads, num_key_value_heads=heads,
        q_lora_rank=draw.choice([None, 9, 14]), kv_lora_rank=draw.choice([3, 8, 16, 24]),
        qk_nope_head_dim=draw.choice([5, 8, 12]), qk_rope_head_dim=draw.choice([4, 6, 8]),
        v_head_dim=draw.choice([5, 7, 12]), rope_interleave=draw.choice([False, True, True]),
        rope_parameters=draw.choice(DEEPSEEK_ROPES), **biases(draw, "attention_bias"),
    )  # fmt: skip


def hybrid(draw: Random) -> dict[str, Any]:
    """Layers with a state among layers that turn a part of each head."""
    config, keys = numbers(draw), draw.choice([1, 2, 3])
    D, factor = draw.choice([(16, 0.25), (24, 0.25), (12, 0.5), (10, 1.0)])
    if draw.choice([False, True]):
        config["layer_types"] = kinds_of_layers(draw, config, (FULL, LINEAR))
    return config | dict(
        hidden_size=draw.choice([20, 24, 33]), head_dim=D,
        rope_parameters=config["rope_parameters"] | {"partial_rotary_factor": factor},
        linear_num_key_heads=keys, linear_num_value_heads=keys * draw.choice([1, 2, 3]),
        linear_key_head_dim=draw.choice([8, 12, 16]),
        linear_value_head_dim=draw.choice([10, 16, 24]),
        linear_conv_kernel_dim=draw.choice([2, 3, 4]), **biases(draw, "attention_bias"),
    )  # fmt: skip


def experts(draw: Random, several: tuple[int, ...] = (2, 5, 12)) -> dict[str, Any]:
    """And one that all tokens visit."""
    n_expert = draw.choice(several)
    return dict(
        num_experts=n_expert, num_experts_per_tok=draw.randint(1, max(n_expert, 1)),
        moe_intermediate_size=draw.choice([5, 9, 12]),
        shared_expert_intermediate_size=draw.choice([6, 11]),
    )  # fmt: skip


def qwen3_next(draw: Random) -> dict[str, Any]:
    config = hybrid(draw) | experts(draw, (0, 2, 5, 12))
    return config | dict(
        norm_topk_prob=draw.choice([False, True]), decoder_sparse_step=draw.choice([1, 1, 2]),
        mlp_only_layers=draw.choice([None, [], [0], [config["num_hidden_layers"] - 1]]),
    )  # fmt: skip


def qwen3_5(draw: Random) -> dict[str, Any]:
    """Files name three shares of the turned features, one each for frame, row and column."""
    config = hybrid(draw)
    if draw.choice([False, True]):
        sections = dict(mrope_section=[2, 1, 1], mrope_interleaved=True)
        config["rope_parameters"] = config["rope_parameters"] | sections
    return config


def qwen3_5_moe(draw: Random) -> dict[str, Any]:
    return qwen3_5(draw) | experts(draw)


def deepseek_v4(draw: Random) -> dict[str, Any]:
    """An indexer of few heads scores many entries exactly 0, and ``topk`` breaks ties by layout: so
    it has many. Layers that slide, and the lists of kinds, may be left to the defaults."""
    config, groups = numbers(draw), draw.choice([1, 2, 3])
    D, R = draw.choice([(12, 4), (16, 8), (16, 16), (24, 6)])
    rope = dict(draw.choice([rope for rope in ROPES if rope["rope_type"] != "dynamic"]))
    n_expert, kinds = draw.choice([2, 5, 8]), (SLIDING, SPARSE, HEAVY)
    if draw.choice([False, True, True]):
        config["layer_types"] = kinds_of_layers(draw, config, kinds)
    if draw.choice([False, True, True]):
        config["mlp_layer_types"] = kinds_of_layers(draw, config, (HASHED, SCORED))
    del config["num_key_value_heads"], config["intermediate_size"]
    return config | dict(
        hidden_size=draw.choice([20, 31, 48]), head_dim=D, partial_rotary_factor=R / D,
        num_attention_heads=groups * draw.choice([1, 2]), o_groups=groups,
        q_lora_rank=draw.choice([9, 14]), o_lora_rank=draw.choice([5, 8]), rope_parameters=rope,
        compress_rope_theta=draw.choice([16e4, 500.0]), sliding_window=draw.choice([2, 3, 6]),
        compress_rates={SPARSE: draw.choice([2, 3]), HEAVY: draw.choice([2, 5])},
        index_n_heads=24, index_head_dim=R + draw.choice([0, 6]), index_topk=draw.choice([1, 2, 9]),
        hc_mult=draw.choice([1, 2, 4]), hc_sinkhorn_iters=draw.choice([1, 3, 20]),
        hc_eps=draw.choice([1e-6, 1e-2]), n_routed_experts=n_expert,
        num_experts_per_tok=draw.randint(1, n_expert), moe_intermediate_size=draw.choice([5, 9]),
        routed_scaling_factor=draw.choice([1.0, 2.5]), swiglu_limit=draw.choice([0.5, 10.0]),
    )  # fmt: skip


def smollm3(draw: Random) -> dict[str, Any]:
    config = numbers(draw) | own_width(draw)
    if draw.choice([False, True]):
        config |= dict(no_rope_layers=kinds_of_layers(draw, config, (0, 1)))
    else:
        config |= dict(no_rope_layer_interval=draw.choice([1, 2, 3, 4]))
    return config | biases(draw, "attention_bias", "mlp_bias")


def gemma3(draw: Random) -> dict[str, Any]:
    """A theta for each kind of layer. Transformers wants hidden states that the heads share out."""
    config = numbers(draw)
    if draw.choice([False, True]):
        config["layer_types"] = kinds_of_layers(draw, config, (FULL, SLIDING, SLIDING))
    else:
        config["sliding_window_pattern"] = draw.choice([1, 2, 3])
    return config | dict(
        head_dim=draw.choice([4, 10, 16]), hidden_activation=config.pop("hidden_act"),
        query_pre_attn_scalar=draw.choice([1, 9, 16, 24]), sliding_window=draw.choice([2, 3, 6]),
        final_logit_softcapping=draw.choice([None, None, 3.0]),
        rope_parameters={
            FULL: config["rope_parameters"],
            SLIDING: {"rope_type": "default", "rope_theta": draw.choice([100.0, 1e4])},
        },
        **biases(draw, "attention_bias"),
    )  # fmt: skip


def gemma4(draw: Random) -> dict[str, Any]:
    """Wider heads where all is seen, layers that read the keys of others of their kind (of which
    transformers has none without a table for every layer), and maybe keys that are values."""
    config = numbers(draw) | dict(num_hidden_layers=draw.choice([1, 2, 3, 4, 5]))
    n_layer, heads = config["num_hidden_layers"], config["num_attention_heads"]
    kinds = [*kinds_of_layers(draw, config, (FULL, SLIDING, SLIDING))[1:], FULL]
    shared = draw.randint(0, n_layer - 1)
    if not {*kinds} <= {*kinds[: n_layer - shared]}:
        shared = 0
    rotation = {"rope_type": "proportional", "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0])}
    rotation |= {"rope_theta": 1e4, "factor": draw.choice([1.0, 4.0])}
    return config | dict(
        head_dim=draw.choice([4, 10, 16]), global_head_dim=draw.choice([6, 12, 16]),
        hidden_size=draw.choice([14, 24, 33]), hidden_activation=config.pop("hidden_act"),
        num_global_key_value_heads=draw.choice([None, 1, heads]), layer_types=kinds,
        attention_k_eq_v=draw.choice([False, True]), num_kv_shared_layers=shared,
        use_double_wide_mlp=draw.choice([False, True]), sliding_window=draw.choice([2, 3, 6]),
        hidden_size_per_layer_input=draw.choice([5, 6] if shared else [0, 6]),
        vocab_size_per_layer_input=97, final_logit_softcapping=draw.choice([None, 3.0]),
        rope_parameters={
            FULL: draw.choice([rotation, rotation, config["rope_parameters"]]),
            SLIDING: {"rope_type": "default", "rope_theta": draw.choice([100.0, 1e4])},
        },
        **biases(draw, "attention_bias"),
    )  # fmt: skip


def glm4_moe(draw: Random) -> dict[str, Any]:
    """All layers dense; the first part of each head turns."""
    config, factor = numbers(draw) | own_width(draw, (16, 24)), draw.choice([0.25, 0.5, 0.75, 1.0])
    return config | dict(
        first_k_dense_replace=config["num_hidden_layers"],
        attention_bias=True,
        num_mtp_layers=0,
        rope_parameters=config["rope_parameters"] | {"partial_rotary_factor": factor},
    )


def alone(draw: Random) -> dict[str, Any]:
    """A kind of attention, with or without biases, in a model whose rest is plain."""
    return numbers(draw) | dict(
        hidden_size=draw.choice([12, 20, 36]),
        head_dim=draw.choice([4, 10, 16]),
        attention_bias=draw.choice([False, True]),
        tie_word_embeddings=False,
        hidden_act="silu",
        rope_parameters={
            "rope_type": "default",
            "rope_theta": draw.choice([1e4, 1.5e5]),
            "partial_rotary_factor": 1.0,
        },
    )


def gpt_oss(draw: Random) -> dict[str, Any]:
    config, n_expert = numbers(draw) | own_width(draw), draw.choice([2, 3, 5, 12])
    if draw.choice([False, True]):
        config["layer_types"] = kinds_of_layers(draw, config, (FULL, SLIDING))
    return config | dict(
        hidden_act="silu", sliding_window=draw.choice([2, 3, 6]), num_local_experts=n_expert,
        num_experts_per_tok=draw.randint(1, n_expert), intermediate_size=draw.choice([5, 9, 12]),
        swiglu_limit=draw.choice([7.0, 1.5]), swiglu_alpha=draw.choice([1.702, 1.0]),
        rope_parameters=draw.choice([*ROPES, *[{**YARN, "truncate": False}] * 3]),
        **biases(draw, "attention_bias"),
    )  # fmt: skip


def gated(draw: Random) -> dict[str, Any]:
    config, n_layer = alone(draw), draw.choice([2, 3])
    dense = dict(mlp_only_layers=list(range(n_layer)), layer_types=[FULL] * n_layer)
    return config | dense | dict(num_hidden_layers=n_layer)


# ------------------------------------------------------------------ ours, where no folder is read


def with_partial_rope_(model: Qwen2ForCausalLM, factor: float) -> Qwen2ForCausalLM:
    """The first int(factor * D) features of each head turn."""
    rotary = model.model.rotary_emb
    width = int(model.config.head_dim * factor)
    model.model.rotary_emb = RotaryEmbedding(width, rotary.theta, rotary.scaling)
    for block in model.model.layers:
        block.self_attn.rotate = apply_partial_rope
    return model


def in_our_words(c: Any) -> dict[str, Any]:
    """The numbers of a config of transformers that do not concern positions."""
    return dict(
        vocab_size=c.vocab_size, block_size=c.max_position_embeddings, n_layer=c.num_hidden_layers,
        n_head=c.num_attention_heads, n_kv_head=c.num_key_value_heads, n_embd=c.hidden_size,
        head_dim=c.head_dim, intermediate_size=c.intermediate_size, activation=c.hidden_act,
        rms_norm_eps=c.rms_norm_eps, tie_word_embeddings=c.tie_word_embeddings, eos_token_id=2,
    )  # fmt: skip


def by_name(model: Any, theirs: nn.Module) -> Any:
    weights = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    if theirs.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    model.load_state_dict(weights)
    return model.eval()


def partial_rope(theirs: Any) -> Any:
    rope = dict(theirs.config.rope_parameters)
    factor = rope.pop("partial_rotary_factor")
    theta, scaling = scaling_from_dict(rope, theirs.config.max_position_embeddings)
    config = Qwen2Config(**in_our_words(theirs.config), rope_theta=theta, rope_scaling=scaling)
    return by_name(with_partial_rope_(Qwen2ForCausalLM(config), factor), theirs)


def plain_config(c: Any) -> Qwen2Config:
    theta, bias = c.rope_parameters["rope_theta"], c.attention_bias
    slides = dict(sliding_window=c.sliding_window) if SLIDING in c.layer_types else {}
    slides |= dict(layer_types=tuple(c.layer_types))
    return Qwen2Config(**in_our_words(c), rope_theta=theta, qkv_bias=bias, **slides)


def with_gates(theirs: Any) -> Any:
    """Between the layers, Qwen3-Next counts the weights of norms from 1."""
    model = by_name(GatedForCausalLM(plain_config(theirs.config)), theirs).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("layernorm.weight") or name == "model.norm.weight":
                parameter.add_(1.0)
    return model


# -------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Family:
    """How a config is drawn, the class of ours, and how it is made where no folder is read."""

    draw: Callable[[Random], dict[str, Any]]
    ours: type[nn.Module]
    convert: Callable[[Any], Any] = ours_from_hf
    model_type: str = ""  # of transformers, where it is not the name of the row

    @property
    def published(self) -> bool:
        return self.convert is ours_from_hf


FAMILIES: dict[str, Family] = {
    "gpt2": Family(gpt2, GPT2LMHeadModel),
    "llama": Family(llama, Qwen2ForCausalLM),
    "mistral": Family(mistral, Qwen2ForCausalLM),
    "qwen2": Family(qwen2, Qwen2ForCausalLM),
    "qwen3": Family(qwen3, Qwen3ForCausalLM),
    "qwen3_moe": Family(qwen3_moe, Qwen3MoeForCausalLM),
    "deepseek_v3": Family(deepseek_v3, DeepseekV3ForCausalLM),
    "qwen3_next": Family(qwen3_next, Qwen3NextForCausalLM),
    "qwen3_5_text": Family(qwen3_5, Qwen3_5ForCausalLM),
    "qwen3_5_moe_text": Family(qwen3_5_moe, Qwen3_5MoeForCausalLM),
    "deepseek_v4": Family(deepseek_v4, DeepseekV4ForCausalLM),
    "smollm3": Family(smollm3, SmolLM3ForCausalLM),
    "gemma3_text": Family(gemma3, Gemma3ForCausalLM),
    "gemma4_text": Family(gemma4, Gemma4ForCausalLM),
    "gpt_oss": Family(gpt_oss, GptOssForCausalLM),
    "partial RoPE": Family(glm4_moe, Qwen2ForCausalLM, partial_rope, "glm4_moe"),
    "gates": Family(gated, GatedForCausalLM, with_gates, "qwen3_next"),
}
PUBLISHED = [name for name, family in FAMILIES.items() if family.published]


def drawn(family: str, seed: int) -> dict[str, Any]:
    """A config of that family in the words of transformers, its model_type among them."""
    row = FAMILIES[family]
    return {"model_type": row.model_type or family, **row.draw(Random(f"{family} {seed}"))}


#: The classifiers that transformers has: a family, and what gets a label.
CLASSIFIERS = [
    (family, task)
    for family in PUBLISHED
    for task in ("Sequence", "Token")
    if family in getattr(modeling_auto, f"MODEL_FOR_{task.upper()}_CLASSIFICATION_MAPPING_NAMES")
]


def several_seeds(seeds: Iterable[int], quick: int = 3) -> list[Any]:
    """These seeds of drawn configs, of which all but a few take their time in `make test-all`."""
    return [
        pytest.param(seed, marks=[pytest.mark.slow] * (i >= quick)) for i, seed in enumerate(seeds)
    ]


def kinds(config: dict[str, Any]) -> list[str]:
    """Those of its layers: a hybrid has attention in every fourth, if it names none."""
    if "linear_num_key_heads" in config:
        every = [FULL if n % 4 == 3 else LINEAR for n in range(config["num_hidden_layers"])]
        return config.get("layer_types", every)
    return [FULL]


def theirs(family: str, seed: int, **changes: Any) -> Any:
    """A model of transformers with a drawn config and large weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**drawn(family, seed) | changes)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped one needs rows of whole 16 bytes
    model = AutoModelForCausalLM.from_config(config).eval()
    enlarge_(model, seed)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.mul_(8)  # std 1
    enlarge_biases_(model, seed)
    return model


def enlarge_biases_(model: nn.Module, seed: int = 0) -> list[Tensor]:
    """Correction biases of routers, large enough to change which experts are chosen; and what else
    is no parameter."""
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for layer, bias in enumerate(biases):
        generator = torch.Generator().manual_seed(seed + layer)
        bias.copy_(0.3 * torch.randn(len(bias), generator=generator))
    for name, table in model.named_buffers():
        if name.endswith("layer_scalar"):
            generator = torch.Generator().manual_seed(seed + len(name))
            table.fill_(0.5 + torch.rand(1, generator=generator).item())
        if name.endswith("tid2eid"):  # as many experts of a token as it has, all different
            E = len(model.get_submodule(name.removesuffix(".tid2eid")).weight)
            order = torch.rand(len(table), E, generator=torch.Generator().manual_seed(seed))
            table.copy_(order.argsort(dim=1)[:, : table.shape[1]])
    return biases


# ---------------------------------------------------------------------------------- in float64


class Double:
    """``torch``, in which float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_float64() -> Iterator[None]:
    """What transformers computes in float32 whatever the dtype of a model, in float64."""
    from transformers import CONFIG_MAPPING, modeling_rope_utils

    types = {row.model_type or name for name, row in FAMILIES.items()}
    files = {CONFIG_MAPPING[t].__module__.replace(".configuration_", ".modeling_") for t in types}
    modules = [importlib.import_module(file) for file in files]
    with pytest.MonkeyPatch.context() as patch:
        for module in (modeling_rope_utils, *modules):
            patch.setattr(module, "torch", Double())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


@dataclass(frozen=True)
class Pair:
    """Ours and theirs, in float64, with the same weights."""

    ours: Any
    twin: Any

    def __post_init__(self) -> None:
        """Gemma's scale of embeddings is a buffer, which was rounded to float32."""
        for module in self.twin.modules():
            if hasattr(module, "scalar_embed_scale"):
                module.embed_scale.fill_(module.scalar_embed_scale)

    def theirs(self, idx: Tensor, positions: Tensor | None = None, **options: Any) -> Any:
        """What transformers computes; padding is told by ``positions`` of -1."""
        if positions is not None and self.twin.config.model_type in POOLING:
            return self._theirs_alone(idx, positions, **options)
        if positions is not None:
            options |= dict(attention_mask=(positions >= 0).long())
            options |= dict(position_ids=positions.clamp(min=0))
        with in_float64():
            return self.twin(idx, use_cache=False, **options)

    def _theirs_alone(self, idx: Tensor, positions: Tensor, labels: Tensor | None = None) -> Any:
        """Each row by itself: padding in front would be pooled."""
        logits, losses, counts = [], [], []
        for n, row in enumerate(idx):
            real = positions[n] >= 0
            own = {} if labels is None else {"labels": labels[n][real][None]}
            with in_float64():
                out = self.twin(row[real][None], use_cache=False, **own)
            whole = out.logits.new_zeros(len(row), out.logits.shape[-1])
            logits.append(whole.masked_scatter(real[:, None], out.logits))
            if labels is not None and (count := int((own["labels"][:, 1:] >= 0).sum())):
                losses.append(out.loss * count)
                counts.append(count)
        loss = torch.stack(losses).sum() / sum(counts) if counts else None
        return SimpleNamespace(logits=torch.stack(logits), loss=loss)

    def gradients(self) -> dict[str, Tensor]:
        """Of theirs, by our names and in our layout: GPT-2 has its linear maps transposed there."""
        transposed = re.compile(r"transformer.*\.(c_attn|c_proj|c_fc)\.weight$")
        return {
            name.replace("classifier.", "score."): p.grad.T if transposed.match(name) else p.grad
            for name, p in self.twin.named_parameters()
        }


@cache
def pair(family: str, seed: int) -> Pair:
    """The same for every test: nothing may be written into it but gradients, which are cleared."""
    with in_float64():
        twin = theirs(family, seed)
        ours = FAMILIES[family].convert(twin)
        assert type(ours) is FAMILIES[family].ours
        return Pair(ours.double(), twin.double())


def near(ours: Tensor, theirs: Tensor, label: str = "", bound: float = 1e-9) -> None:
    """Up to rounding at the size of the largest number."""
    top = max(1.0, float(theirs.detach().abs().max()))
    torch.testing.assert_close(
        ours, theirs, atol=bound * top, rtol=0, msg=lambda text: f"{label}\n{text}"
    )


def near_gradients(both: Pair, loss: Tensor, their_loss: Tensor) -> None:
    """The losses, and the gradient of every parameter."""
    near(loss, their_loss)
    for model in (both.ours, both.twin):
        model.zero_grad()
    loss.backward()
    their_loss.backward()
    gradients = both.gradients()
    for name, p in both.ours.named_parameters():
        if (gradient := gradients.pop(name)) is None:  # of what only chooses
            assert p.grad is None, name
        else:
            near(p.grad, gradient, name)
    assert not gradients
