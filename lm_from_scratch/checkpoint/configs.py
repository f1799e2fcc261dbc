"""The dialects of ``config.json``: the published names of a model's numbers, and ours.

Keys that this file does not know pass; one that would change what the model computes is refused.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from lm_from_scratch.layers.rope import RopeScaling
from lm_from_scratch.layers.rope_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    YaRNScaling,
)
from lm_from_scratch.models.causal_lm import Config
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config

#: Our names and the names in a checkpoint's ``config.json``; the others are the same.
GPT2_NAMES = {
    "block_size": "n_positions",
    "intermediate_size": "n_inner",
    "activation": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
}

QWEN2_NAMES = {
    "block_size": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "activation": "hidden_act",
}

#: What a GPT-2 config may switch on that ours does not do, and the value that means "off".
NOT_SUPPORTED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}

#: What ``transformers`` takes for a key that a Qwen2 ``config.json`` leaves out, where it is not
#: our default.
QWEN2_ABSENT: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "tie_word_embeddings": False,
    "max_window_layers": 28,
    "sliding_window": 4096,
    "eos_token_id": None,
}


def config_from_dict(config: Mapping[str, Any]) -> Config:
    """A config from the contents of a ``config.json``; keys that it does not know pass.

    Raises ``ValueError`` for another ``model_type``, and for what our models do not do.
    """
    model_type = config.get("model_type")
    if model_type == "gpt2":
        return gpt2_config_from_dict(config)
    if model_type == "qwen2":
        return qwen2_config_from_dict(config)
    raise ValueError(f"model_type is {model_type!r}; only 'gpt2' and 'qwen2' can be loaded")


def config_to_dict(config: Config) -> dict[str, Any]:
    """The contents of a ``config.json`` that ``transformers`` understands."""
    return (
        gpt2_config_to_dict(config)
        if isinstance(config, GPT2Config)
        else qwen2_config_to_dict(config)
    )


def gpt2_config_from_dict(config: Mapping[str, Any]) -> GPT2Config:
    """The config of a GPT-2 ``config.json``."""
    for key, off in NOT_SUPPORTED.items():
        if config.get(key, off) != off:
            raise ValueError(f"{key}={config[key]} is not supported, only {key}={off}")
    names = {f.name: GPT2_NAMES.get(f.name, f.name) for f in fields(GPT2Config)}
    return GPT2Config(**{our: config[name] for our, name in names.items() if name in config})


def gpt2_config_to_dict(config: GPT2Config) -> dict[str, Any]:
    """The inverse of :func:`gpt2_config_from_dict`."""
    values = {GPT2_NAMES.get(f.name, f.name): getattr(config, f.name) for f in fields(config)}
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **values}


def qwen2_config_from_dict(config: Mapping[str, Any]) -> Qwen2Config:
    """Old configs say ``rope_theta`` and ``rope_scaling``, new ones ``rope_parameters``; the layers
    that slide are listed in new ones, and follow from two numbers and a switch in old ones.
    """
    config = {**QWEN2_ABSENT, **config}
    names = {f.name: QWEN2_NAMES.get(f.name, f.name) for f in fields(Qwen2Config)}
    for derived in (
        "rope_theta",
        "rope_scaling",
        "sliding_window",
        "layer_types",
        "max_window_layers",
    ):
        del names[derived]
    known = {our: config[name] for our, name in names.items() if name in config}
    length = config.get("max_position_embeddings", Qwen2Config.block_size)
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key) or {}, Mapping):
            raise ValueError(f"{key}={config[key]!r} must be an object")
        rope |= config.get(key) or {}
    theta, known["rope_scaling"] = scaling_from_dict(rope, length)
    known["rope_theta"] = theta or config.get("rope_theta", 10000.0)
    if isinstance(known.get("eos_token_id"), list):
        known["eos_token_id"] = known["eos_token_id"][0]  # of several ends the model's own
    types = config.get("layer_types")
    if config.get("use_sliding_window") and config["sliding_window"] is not None:
        known["sliding_window"] = config["sliding_window"]
        key = "max_window_layers" if types is None else "layer_types"
        known[key] = config["max_window_layers"] if types is None else tuple(types)
    elif others := set(types or ()) - {FULL}:
        raise ValueError(
            f"layer_types has {sorted(others)}, but "
            f"use_sliding_window={config.get('use_sliding_window', False)} and "
            f"sliding_window={config['sliding_window']}"
        )
    return Qwen2Config(**known)


def qwen2_config_to_dict(config: Qwen2Config) -> dict[str, Any]:
    """The inverse of :func:`qwen2_config_from_dict`. Raises ``ValueError`` for a scaling that the
    file cannot express."""
    values = {QWEN2_NAMES.get(f.name, f.name): getattr(config, f.name) for f in fields(config)}
    scaling = values.pop("rope_scaling")
    if isinstance(scaling, DynamicNTKScaling) and scaling.original_length != config.block_size:
        raise ValueError(
            f"original_length={scaling.original_length} of the dynamic scaling is not "
            f"block_size={config.block_size}: transformers would take the latter for it"
        )
    rope = scaling_to_dict(config.rope_theta, scaling)
    layers = [FULL if window is None else SLIDING for window in config.windows]
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        **values,
        "rope_parameters": rope,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "use_sliding_window": SLIDING in layers,
        "layer_types": layers,
        "max_window_layers": layers.index(SLIDING) if SLIDING in layers else config.n_layer,
    }


#: The scalings of RoPE by their ``rope_type``.
SCALINGS: dict[str, type[Any]] = {
    "linear": LinearScaling,
    "dynamic": DynamicNTKScaling,
    "yarn": YaRNScaling,
    "llama3": Llama3Scaling,
}

#: Our names of their fields and those in a ``config.json``; the others are the same.
SCALING_NAMES = {"original_length": "original_max_position_embeddings"}


def scaling_from_dict(
    rope_parameters: Mapping[str, Any], block_size: int | None = None
) -> tuple[float | None, RopeScaling | None]:
    """Theta (None where absent) and scaling of the ``rope_parameters`` of a ``config.json``, or of
    the older ``rope_scaling``.

    ``block_size`` is the config's ``max_position_embeddings``: the original length where the
    dictionary names none, and for ``dynamic`` in any case, as in transformers. Keys that no scaling
    has are ignored.
    """
    given = {key: value for key, value in rope_parameters.items() if value is not None}
    for key, value in given.items():
        if isinstance(value, Mapping):
            raise ValueError(f"rope_parameters[{key!r}] is a dictionary: one rotation per model")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor={given['partial_rotary_factor']} must be 1: all features turn"
        )
    theta = given.get("rope_theta")
    name = given.get("rope_type", given.get("type", "default"))
    if name == "default":
        return theta, None
    if name not in SCALINGS:
        raise ValueError(f"rope_type={name!r} is not one of {['default', *SCALINGS]}")

    if block_size is not None:
        given.setdefault("original_max_position_embeddings", block_size)
        if name == "dynamic":
            given["original_max_position_embeddings"] = block_size
        if name == "yarn":
            given.setdefault("factor", block_size / given["original_max_position_embeddings"])
    values = {}
    for field in fields(SCALINGS[name]):
        key = SCALING_NAMES.get(field.name, field.name)
        if key in given:
            values[field.name] = given[key]
        elif field.default is MISSING:
            raise ValueError(f"rope_type={name!r} needs {key!r}, which is not in {sorted(given)}")
    return theta, SCALINGS[name](**values)


def scaling_to_dict(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """``rope_parameters`` as transformers writes them: the inverse of :func:`scaling_from_dict`."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    name = next(name for name, kind in SCALINGS.items() if isinstance(scaling, kind))
    given = {SCALING_NAMES.get(k, k): v for k, v in vars(scaling).items() if v is not None}
    return {"rope_type": name, "rope_theta": theta, **given}
