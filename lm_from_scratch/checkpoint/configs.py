"""A ``config.json`` and a config of ours: the same numbers under published names.

Keys that this file does not know pass; one that would change what the model computes is refused.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from lm_from_scratch.checkpoint.dialects import DIALECTS, SWITCHES, Dialect
from lm_from_scratch.checkpoint.layer_kinds import Layers
from lm_from_scratch.checkpoint.rope_configs import (
    apart,
    built,
    rotation_from_dict,
    scaling_to_dict,
)
from lm_from_scratch.layers.rope_scaling import DynamicNTKScaling, ProportionalScaling
from lm_from_scratch.limits import require, shown
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config

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

#: What ``transformers`` may switch on in any family, and the value that means "off".
ANYWHERE = {"is_causal": True}

#: What a GPT-2 config may switch on that ours does not do, and the value that means "off".
NOT_SUPPORTED = ANYWHERE | {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}

#: What single families do, and the value that means "off", as null does. ``transformers`` passes
#: over most of these keys in a family that has no code for them; a file with one switched on is
#: another model's.
ELSEWHERE = {
    "per_layer_config": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "attention_chunk_size": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "index_topk": None,
    "rope_local_base_freq": None,
    "use_bidirectional_attention": False,
    "add_cross_attention": False,
}


def config_from_dict(config: Mapping[str, Any]) -> GPT2Config | Qwen2Config:
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


def config_to_dict(
    config: GPT2Config | Qwen2Config, model_type: str | None = None
) -> dict[str, Any]:
    """The contents of a ``config.json`` that ``transformers`` understands. Where several families
    could have this config, ``model_type`` says which."""
    if isinstance(config, GPT2Config):
        return gpt2_config_to_dict(config)
    return decoder_config_to_dict(config, model_type or family(config))


def family(config: Qwen2Config) -> str:
    """The ``model_type`` under which a config that was made here is published. That of Llama must
    have whole heads: their number divides the features. Raises ``ValueError`` for one that is not
    published."""
    if type(config) is Qwen2Config and config.qkv_bias == config.o_bias:
        plain = config.sliding_window is None and config.n_embd % config.n_head == 0
        return "llama" if plain else "mistral"
    kind = type(config)
    name = next((name for name, dialect in DIALECTS.items() if dialect.config is kind), None)
    if name is None:
        raise ValueError(f"a {kind.__name__} cannot be written: no published family has it")
    return name


def gpt2_config_from_dict(config: Mapping[str, Any]) -> GPT2Config:
    """The config of a GPT-2 ``config.json``."""
    headless = "Classification" in str(config.get("architectures"))  # so nothing could be tied
    only = {k: v for k, v in NOT_SUPPORTED.items() if not (headless and k == "tie_word_embeddings")}
    refuse_others(config, ELSEWHERE, only)
    aliases = {our: alias for our, alias in GPT2_ALIASES.items() if alias in config}
    return _make(GPT2Config, GPT2_NAMES | aliases, config)


def gpt2_config_to_dict(config: GPT2Config) -> dict[str, Any]:
    """The inverse of :func:`gpt2_config_from_dict`."""
    values = _written(config, GPT2_NAMES)
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **values}


def decoder_config_from_dict(config: Mapping[str, Any], dialect: Dialect) -> Qwen2Config:
    """The config of a decoder's ``config.json``. Raises ``ValueError`` for a switch that stands
    otherwise than here."""
    switches = {switch: switch in dialect.switched_on for switch in SWITCHES}
    elsewhere = {key: value for key, value in ELSEWHERE.items() if key not in dialect.absent}
    refuse_others(config, elsewhere | switches, ANYWHERE | {**dialect.only})
    config, given = dialect.read({**dialect.absent, **config}), dict[str, Any]()
    if dialect.thetas:
        config, given["rope_local_theta"] = apart(config)
    if dialect.rope and config["rope_parameters"] is None and not config["rope_scaling"]:
        config["rope_parameters"] = dialect.rope
    if dialect.partial:
        config = _without_share(config)
        theta, scaling = rotation_from_dict({**config, "partial_rotary_factor": None})
        if isinstance(scaling, ProportionalScaling):
            raise ValueError(
                "rope_type='proportional' is not supported where partial_rotary_factor has another "
                "meaning: the share of a head that turns"
            )
    else:
        theta, scaling = rotation_from_dict(config)
    given |= {"rope_theta": theta, "rope_scaling": scaling} | dialect.layers(config)
    return _make(dialect.config, dialect.names, config, **given, **dialect.biases(config))


def refuse_others(
    config: Mapping[str, Any], or_null: Mapping[str, Any], only: Mapping[str, Any]
) -> None:
    """Raises ``ValueError`` for a key that is there with another value than the one of these."""
    for key, value in {**or_null, **only}.items():
        if config.get(key, value) not in ((value,) if key in only else (value, None)):
            raise ValueError(f"{key}={shown(config[key])} is not supported, only {key}={value}")


def _without_share(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with ``partial_rotary_factor`` taken out of the dictionaries of the rotation. What
    ``rope_parameters`` has of it does not count beside a ``rope_scaling``."""
    config, otherwise = dict(config), config["partial_rotary_factor"]
    for key in ("rope_parameters", "rope_scaling"):
        if config[key] and isinstance(config[key], Mapping):
            config[key] = dict(config[key])
            share = config[key].pop("partial_rotary_factor", otherwise)
            config["partial_rotary_factor"] = share
    return config


def _make(
    kind: type[AnyConfig], names: Mapping[str, str], config: Mapping[str, Any], **given: Any
) -> AnyConfig:
    """A config of that kind, of what a file says under its names and what is ``given``."""
    names = {field.name: names.get(field.name, field.name) for field in fields(kind)}
    values = {our: config[name] for our, name in names.items() if name in config} | given
    if "n_layer" in values:
        require(Layers, **{names["n_layer"]: values["n_layer"]})
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


def _written(config: GPT2Config | Qwen2Config, names: Mapping[str, str]) -> dict[str, Any]:
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
    written_biases = {"attention_bias": config.o_bias, "mlp_bias": config.mlp_bias}
    for name, value in dialect.biases({**dialect.absent, **written_biases}).items():
        if (stored := values.pop(name)) != value:
            raise ValueError(f"{name}={stored} cannot be written: in a {model_type} it is {value}")
    rope = scaling_to_dict(config.rope_theta, scaling)
    if dialect.partial:
        rope["partial_rotary_factor"] = values.pop("partial_rotary_factor")
    slowed = rope["rope_type"] != "default" and not dialect.thetas
    kinds = {FULL: rope, SLIDING: scaling_to_dict(values.pop("rope_local_theta", 0.0), None)}
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
        "rope_parameters": kinds if dialect.thetas else rope,
        "rope_scaling": rope if slowed else None,
        **{k: v for k, v in (windows | written_biases).items() if k in dialect.absent},
        **dialect.only,
    }
    written = dialect.write(written)
    if decoder_config_from_dict(written, dialect).windows != config.windows:
        raise ValueError(f"windows={shown(config.windows)} cannot be those of a {model_type}")
    return written
