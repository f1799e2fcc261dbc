"""The dialects of ``config.json``: the published names of a model's numbers, and ours.

Keys that this file does not know pass; one that would change what the model computes is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from lm_from_scratch.checkpoint.rope_configs import built, rotation_from_dict, scaling_to_dict
from lm_from_scratch.layers.rope_scaling import DynamicNTKScaling
from lm_from_scratch.limits import Count, is_integer, require, shown
from lm_from_scratch.models.causal_lm import Config
from lm_from_scratch.models.deepseek_v3 import DeepseekV3Config
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config
from lm_from_scratch.models.qwen3 import Qwen3Config
from lm_from_scratch.models.qwen3_moe import Qwen3MoeConfig
from lm_from_scratch.models.qwen3_next import LINEAR, Qwen3NextConfig
from lm_from_scratch.models.smollm3 import SmolLM3Config, all_but_every

AnyConfig = TypeVar("AnyConfig", GPT2Config, Qwen2Config)

#: Our names and the names in a checkpoint's ``config.json``; the others are the same.
GPT2_NAMES = {
    "block_size": "n_positions",
    "intermediate_size": "n_inner",
    "activation": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
}

#: Other names that ``transformers`` has for keys of GPT-2; they go before the usual ones.
GPT2_ALIASES = {
    "block_size": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
}

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

#: What a GPT-2 config may switch on that ours does not do, and the value that means "off".
NOT_SUPPORTED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Dialect:
    """How a family of decoders since Qwen2 is published, under its ``model_type``."""

    config: type[Qwen2Config]
    architecture: str
    layers: Callable[[Mapping[str, Any]], dict[str, Any]]  # which slide or rotate, in our fields
    absent: Mapping[str, Any]  # what `transformers` takes for a key that a file leaves out
    silent: Mapping[str, Any]  # our fields that no file has
    only: Mapping[str, Any] = field(default_factory=dict)  # switches that stand as they are here
    extra_names: Mapping[str, str] = field(default_factory=dict)  # of fields that Qwen2 has not
    partial: bool = False  # whether the file says what share of a head is turned

    @property
    def names(self) -> dict[str, str]:
        """Our names and those of the file, where they differ."""
        return {**DECODER_NAMES, **self.extra_names}


def _some_slide(config: Mapping[str, Any]) -> dict[str, Any]:
    """Listed in new files; in old ones two numbers and a switch. A window that no layer uses is
    none."""
    slides, window, types = (
        config[key] for key in ("use_sliding_window", "sliding_window", "layer_types")
    )
    require(bool, use_sliding_window=slides)
    if not isinstance(types, list | None) or not all(isinstance(t, str) for t in types or ()):
        raise ValueError(f"layer_types={shown(types)} must be a list of words")
    if types is not None and len(types) != (n_layer := config["num_hidden_layers"]):
        raise ValueError(
            f"layer_types={shown(types)} must have a word for each of "
            f"num_hidden_layers={shown(n_layer)}"
        )
    types = tuple(types) if types is not None else None
    if slides and window is not None:
        if types is not None:
            return {**NONE_SLIDES, "sliding_window": window, "layer_types": types}
        first = config["max_window_layers"]
        return {**NONE_SLIDES, "sliding_window": window, "max_window_layers": first}
    if others := set(types or ()) - {FULL}:
        raise ValueError(
            f"layer_types has {shown(sorted(others))}, but use_sliding_window={slides} and "
            f"sliding_window={shown(window)}"
        )
    return NONE_SLIDES


def _all_slide(config: Mapping[str, Any]) -> dict[str, Any]:
    """One number: every layer has this window, or none has."""
    window = config["sliding_window"]
    first = None if window is None else 0
    return {**NONE_SLIDES, "sliding_window": window, "max_window_layers": first}


def _some_recurrent(config: Mapping[str, Any]) -> dict[str, Any]:
    """Listed, or every layer but each ``full_attention_interval``-th. No experts at all are any
    number of them in no layer."""
    n_layer, types = config["num_hidden_layers"], config["layer_types"]
    require(Count, num_hidden_layers=n_layer)
    dense: dict[str, Any] = {"mlp_only_layers": _dense(config)}
    if is_integer(config["num_experts"], 0) and config["num_experts"] == 0:
        dense = {"mlp_only_layers": tuple(range(n_layer)), "n_expert": Qwen3NextConfig.n_expert}
    if types is None:
        interval = config["full_attention_interval"]
        require(Count, full_attention_interval=interval)
        types = [LINEAR if (n + 1) % interval else FULL for n in range(n_layer)]
    if not isinstance(types, list) or not all(isinstance(t, str) for t in types):
        raise ValueError(f"layer_types={shown(types)} must be a list of words")
    return {**NONE_SLIDES, **dense, "layer_types": tuple(types)}


def _dense(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """The layers without experts, from a list or nothing."""
    dense = config["mlp_only_layers"] or []
    if not isinstance(dense, list):
        raise ValueError(f"mlp_only_layers={shown(dense)} must be a list of layers")
    return tuple(dense)


def _without_share(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with ``partial_rotary_factor`` taken out of the dictionaries of the rotation."""
    config = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(config[key], Mapping):
            config[key] = dict(config[key])
            share = config[key].pop("partial_rotary_factor", config["partial_rotary_factor"])
            config["partial_rotary_factor"] = share
    return config


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """A switch for the windows of all layers, a list of those without experts, and how many experts
    there are, for which ``transformers`` has two names."""
    require(bool, use_sliding_window=config["use_sliding_window"])
    window = config["sliding_window"] if config["use_sliding_window"] else None
    n_expert = config.get("num_experts", config.get("num_local_experts", 128))
    if config.get("num_local_experts", n_expert) != n_expert:
        raise ValueError(
            f"num_experts={shown(n_expert)} and "
            f"num_local_experts={shown(config['num_local_experts'])} name the same number"
        )
    layers = _all_slide({"sliding_window": window})
    return {**layers, "mlp_only_layers": _dense(config), "n_expert": n_expert}


def _none_slides(config: Mapping[str, Any]) -> dict[str, Any]:
    """No layer has a window."""
    return NONE_SLIDES


def _latent_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """No layer has a window. The scale of scores is read from any rotation there, and is YaRN's
    here: raises ``ValueError`` for another that has it."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = config[key] or {}
        name = rope.get("rope_type", rope.get("type", "default"))
        if rope.get("mscale_all_dim") and name not in ("default", "yarn"):
            raise ValueError(
                f"mscale_all_dim={shown(rope['mscale_all_dim'])} is not supported with "
                f"rope_type={shown(name)}, only with rope_type='yarn'"
            )
    return NONE_SLIDES


def _some_rotate(config: Mapping[str, Any]) -> dict[str, Any]:
    """A 1 for each layer that rotates, by name or by interval. The list may be longer than the
    model, as for one that was cut."""
    listed, n_layer = config["no_rope_layers"], config["num_hidden_layers"]
    require(Count, num_hidden_layers=n_layer)
    if listed is None:
        require(Count, no_rope_layer_interval=config["no_rope_layer_interval"])
        rotate = all_but_every(config["no_rope_layer_interval"], n_layer)
    elif isinstance(listed, list) and len(listed) >= n_layer:
        rotate = tuple(listed[:n_layer])
    else:
        raise ValueError(
            f"no_rope_layers={shown(listed)} must have a number for each of "
            f"num_hidden_layers={n_layer}"
        )
    return {**_some_slide(config), "rope_layers": rotate}


NONE_SLIDES = {"sliding_window": None, "layer_types": None, "max_window_layers": None}

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
_QWEN3_MOE = _ABSENT | {
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
_PLAIN = {"attention_bias": False}
_NO_BIAS = {"qkv_bias": False}

#: The families by their ``model_type``.
DIALECTS = {
    "qwen2": Dialect(Qwen2Config, "Qwen2ForCausalLM", _some_slide, _QWEN, {"qkv_bias": True}),
    "llama": Dialect(
        Qwen2Config,
        "LlamaForCausalLM",
        _none_slides,
        _LLAMA,
        _NO_BIAS,
        only=_PLAIN | {"mlp_bias": False},
    ),
    "mistral": Dialect(Qwen2Config, "MistralForCausalLM", _all_slide, _MISTRAL, _NO_BIAS),
    "qwen3": Dialect(Qwen3Config, "Qwen3ForCausalLM", _some_slide, _QWEN, _NO_BIAS, only=_PLAIN),
    "qwen3_next": Dialect(
        Qwen3NextConfig,
        "Qwen3NextForCausalLM",
        _some_recurrent,
        _QWEN3_NEXT,
        _NO_BIAS,
        only=_PLAIN,
        extra_names=EXPERT_NAMES | {"shared_expert_size": "shared_expert_intermediate_size"},
        partial=True,
    ),
    "qwen3_moe": Dialect(
        Qwen3MoeConfig,
        "Qwen3MoeForCausalLM",
        _experts,
        _QWEN3_MOE,
        _NO_BIAS,
        only=_PLAIN,
        extra_names=EXPERT_NAMES,
    ),
    "deepseek_v3": Dialect(
        DeepseekV3Config,
        "DeepseekV3ForCausalLM",
        _latent_layers,
        _DEEPSEEK,
        _NO_BIAS,
        only=_PLAIN,
        extra_names=EXPERT_NAMES
        | {
            "head_dim": "qk_rope_head_dim",
            "n_expert": "n_routed_experts",
            "top_group": "topk_group",
        },
    ),
    "smollm3": Dialect(
        SmolLM3Config,
        "SmolLM3ForCausalLM",
        _some_rotate,
        _SMOLLM3,
        _NO_BIAS,
        only=_PLAIN | {"mlp_bias": False, "use_sliding_window": False},
        extra_names={"rope_layers": "no_rope_layers"},
    ),
}


def config_from_dict(config: Mapping[str, Any]) -> Config:
    """A config from the contents of a ``config.json``; keys that it does not know pass.

    A token id that the vocabulary does not have means none: the model can never produce it. (A
    GPT-2 of another vocabulary often says 50256, and files of Qwen2 pad with -1.)

    Raises ``ValueError`` for another ``model_type``, for what our models do not do, and for a value
    that means nothing.
    """
    model_type = config.get("model_type")
    if model_type == "gpt2":
        return gpt2_config_from_dict(config)
    if isinstance(model_type, str) and model_type in DIALECTS:
        return decoder_config_from_dict(config, DIALECTS[model_type])
    raise ValueError(
        f"model_type is {shown(model_type)}; only {', '.join(map(repr, ['gpt2', *DIALECTS]))} can "
        "be loaded"
    )


def config_to_dict(config: Config, model_type: str | None = None) -> dict[str, Any]:
    """The contents of a ``config.json`` that ``transformers`` understands. Where several families
    could have this config, ``model_type`` says which."""
    if isinstance(config, GPT2Config):
        return gpt2_config_to_dict(config)
    return decoder_config_to_dict(config, model_type or family(config))


def family(config: Qwen2Config) -> str:
    """The ``model_type`` under which a config that was made here is published."""
    if type(config) is Qwen2Config and not config.qkv_bias:
        return "llama" if config.sliding_window is None else "mistral"
    return next(name for name, dialect in DIALECTS.items() if dialect.config is type(config))


def gpt2_config_from_dict(config: Mapping[str, Any]) -> GPT2Config:
    """The config of a GPT-2 ``config.json``."""
    headless = "Classification" in str(config.get("architectures"))  # so nothing could be tied
    for key, off in NOT_SUPPORTED.items():
        if config.get(key, off) != off and not (headless and key == "tie_word_embeddings"):
            raise ValueError(f"{key}={shown(config[key])} is not supported, only {key}={off}")
    aliases = {our: alias for our, alias in GPT2_ALIASES.items() if alias in config}
    return _make(GPT2Config, GPT2_NAMES | aliases, config)


def gpt2_config_to_dict(config: GPT2Config) -> dict[str, Any]:
    """The inverse of :func:`gpt2_config_from_dict`."""
    values = _written(config, GPT2_NAMES)
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **values}


def decoder_config_from_dict(config: Mapping[str, Any], dialect: Dialect) -> Qwen2Config:
    """The config of a decoder's ``config.json``. Raises ``ValueError`` for a switch that stands
    otherwise than here."""
    for key, value in dialect.only.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key}={shown(config[key])} is not supported, only {key}={value}")
    config = {**dialect.absent, **config}
    if dialect.partial:
        config = _without_share(config)
        theta, scaling = rotation_from_dict({**config, "partial_rotary_factor": None})
    else:
        theta, scaling = rotation_from_dict(config)
    layers = dialect.layers(config)
    rotation = {"rope_theta": theta, "rope_scaling": scaling}
    return _make(dialect.config, dialect.names, config, **rotation, **layers, **dialect.silent)


def _make(
    kind: type[AnyConfig], names: Mapping[str, str], config: Mapping[str, Any], **given: Any
) -> AnyConfig:
    """A config of that kind, of what a file says under its names and what is ``given``."""
    names = {field.name: names.get(field.name, field.name) for field in fields(kind)}
    values = {our: config[name] for our, name in names.items() if name in config} | given
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if key in values and key in names:
            values[key] = _possible(values[key], values.get("vocab_size", kind.vocab_size))
    return built(kind, values, names)


def _possible(ids: Any, vocab_size: Any) -> Any:
    """Of the token id, or of a list of some, what the vocabulary has, or None; what is no id at all
    is left as it is, to be refused by name."""
    several = ids if isinstance(ids, list) else [ids]
    if not several or type(vocab_size) is not int or any(type(n) is not int for n in several):
        return ids
    there = tuple(n for n in several if 0 <= n < vocab_size)
    return (there if isinstance(ids, list) else there[0]) if there else None


def _written(config: Config, names: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a config under the names of a file; tuples are lists there."""
    values = {names.get(f.name, f.name): getattr(config, f.name) for f in fields(config)}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def decoder_config_to_dict(config: Qwen2Config, model_type: str) -> dict[str, Any]:
    """The inverse of :func:`decoder_config_from_dict`. Raises ``ValueError`` for what the file of
    that ``model_type`` cannot express."""
    dialect = DIALECTS[model_type]
    values = _written(config, dialect.names)
    scaling = values.pop("rope_scaling")
    if isinstance(scaling, DynamicNTKScaling) and scaling.original_length != config.block_size:
        raise ValueError(
            f"original_length={scaling.original_length} of the dynamic scaling is not "
            f"block_size={config.block_size}: transformers would take the latter for it"
        )
    for name, value in dialect.silent.items():
        if (said := values.pop(name)) != value:
            raise ValueError(f"{name}={said} cannot be written: in a {model_type} it is {value}")
    rope = scaling_to_dict(config.rope_theta, scaling)
    if dialect.partial:
        rope["partial_rotary_factor"] = values.pop("partial_rotary_factor")
    layers = config.kinds
    windows = {
        "sliding_window": config.sliding_window,
        "use_sliding_window": SLIDING in layers,
        "layer_types": layers,
        "max_window_layers": layers.index(SLIDING) if SLIDING in layers else config.n_layer,
    }
    written = {
        "model_type": model_type,
        "architectures": [dialect.architecture],
        **{name: value for name, value in values.items() if name not in windows},
        "rope_parameters": rope,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        **{name: value for name, value in windows.items() if name in dialect.absent},
        **dialect.only,
    }
    if decoder_config_from_dict(written, dialect).windows != config.windows:
        raise ValueError(f"windows={shown(config.windows)} cannot be those of a {model_type}")
    return written
