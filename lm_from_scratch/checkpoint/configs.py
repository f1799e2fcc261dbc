"""The dialects of ``config.json``: the published names of a model's numbers, and ours.

Keys that this file does not know pass; one that would change what the model computes is refused.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from lm_from_scratch.layers.rope import RopeScaling
from lm_from_scratch.layers.rope_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    YaRNScaling,
)
from lm_from_scratch.limits import Count, Positive, require, shown
from lm_from_scratch.models.causal_lm import Config
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
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "use_sliding_window": False,
    "layer_types": None,
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
    if model_type == "qwen2":
        return qwen2_config_from_dict(config)
    raise ValueError(f"model_type is {shown(model_type)}; only 'gpt2' and 'qwen2' can be loaded")


def config_to_dict(config: Config) -> dict[str, Any]:
    """The contents of a ``config.json`` that ``transformers`` understands."""
    return (
        gpt2_config_to_dict(config)
        if isinstance(config, GPT2Config)
        else qwen2_config_to_dict(config)
    )


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


def qwen2_config_from_dict(config: Mapping[str, Any]) -> Qwen2Config:
    """Old configs say ``rope_theta`` and ``rope_scaling``, new ones ``rope_parameters``; the layers
    that slide are listed in new ones, and follow from two numbers and a switch in old ones.
    """
    config = {**QWEN2_ABSENT, **config}
    theta, scaling = _rotation(config)
    layers = _layers(config)
    return _make(Qwen2Config, QWEN2_NAMES, config, rope_theta=theta, rope_scaling=scaling, **layers)


def _rotation(config: Mapping[str, Any]) -> tuple[Any, RopeScaling | None]:
    """Theta and scaling. Of two dictionaries ``rope_scaling`` counts, and the other not at all, as
    in ``transformers``: so a theta that only the other has would be lost, and is refused."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config[key] or {}, Mapping):
            raise ValueError(f"{key}={shown(config[key])} must be an object")
    parameters = config["rope_parameters"] or {}
    rope = {**(config["rope_scaling"] or parameters)}
    if config["rope_scaling"] and parameters and not {"rope_type", "type"} & rope.keys():
        raise ValueError(f"rope_scaling={shown(rope)} names no rope_type")
    length = config.get("original_max_position_embeddings")
    if length is not None and rope.get("rope_type", rope.get("type")) in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = length  # which goes before the one inside
    theta, scaling = scaling_from_dict(rope, config["max_position_embeddings"])
    if theta is not None:
        return theta, scaling
    lost = parameters.get("rope_theta", config["rope_theta"])
    if lost not in (None, config["rope_theta"]):
        raise ValueError(
            f"rope_scaling={shown(rope)} takes the place of rope_parameters={shown(parameters)}: "
            f"rope_theta={shown(lost)} must stand in it too"
        )
    return config["rope_theta"], scaling


def _layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers slide, in our fields. A window that no layer uses is none."""
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
    none = {"sliding_window": None, "layer_types": None, "max_window_layers": None}
    if slides and window is not None:
        if types is not None:
            return {**none, "sliding_window": window, "layer_types": types}
        first = config["max_window_layers"]
        return {**none, "sliding_window": window, "max_window_layers": first}
    if others := set(types or ()) - {FULL}:
        raise ValueError(
            f"layer_types has {shown(sorted(others))}, but use_sliding_window={slides} and "
            f"sliding_window={shown(window)}"
        )
    return none


def _make(
    kind: type[AnyConfig], names: Mapping[str, str], config: Mapping[str, Any], **given: Any
) -> AnyConfig:
    """A config of that kind, of what a file says under its names and what is ``given``."""
    names = {field.name: names.get(field.name, field.name) for field in fields(kind)}
    values = {our: config[name] for our, name in names.items() if name in config} | given
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if key in values and key in names:
            values[key] = _possible(values[key], values.get("vocab_size", kind.vocab_size))
    return _build(kind, values, names)


def _build(kind: type[Any], values: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    """``kind`` of these values. What is refused has two names, ours and that of the file."""
    try:
        return kind(**values)
    except ValueError as error:
        our = str(error).partition("=")[0].rpartition(" ")[2]
        if names.get(our, our) == our:
            raise
        raise ValueError(f"{error} ({names[our]} in the file)") from error


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


def qwen2_config_to_dict(config: Qwen2Config) -> dict[str, Any]:
    """The inverse of :func:`qwen2_config_from_dict`. Raises ``ValueError`` for a scaling that the
    file cannot express."""
    values = _written(config, QWEN2_NAMES)
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
        factor = shown(given["partial_rotary_factor"])
        raise ValueError(f"partial_rotary_factor={factor} must be 1: all features turn")
    theta = given.get("rope_theta")
    name = rope_parameters.get("rope_type", rope_parameters.get("type", "default"))
    if name == "default":
        return theta, None
    if not isinstance(name, str) or name not in SCALINGS:
        raise ValueError(f"rope_type={shown(name)} is not one of {['default', *SCALINGS]}")

    if block_size is not None:
        original = given.setdefault("original_max_position_embeddings", block_size)
        if name == "dynamic":
            given["original_max_position_embeddings"] = block_size
        if name == "yarn" and "factor" not in given:
            require(Count, max_position_embeddings=block_size)
            require(Positive, original_max_position_embeddings=original)
            given["factor"] = block_size / original
    values = {}
    for field in fields(SCALINGS[name]):
        key = SCALING_NAMES.get(field.name, field.name)
        if key in given:
            values[field.name] = given[key]
        elif field.default is MISSING:
            raise ValueError(
                f"rope_type={name!r} needs {key!r}, which is not in {shown(sorted(given))}"
            )
    return theta, _build(SCALINGS[name], values, SCALING_NAMES)


def scaling_to_dict(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """``rope_parameters`` as transformers writes them: the inverse of :func:`scaling_from_dict`."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    name = next(name for name, kind in SCALINGS.items() if isinstance(scaling, kind))
    given = {SCALING_NAMES.get(k, k): v for k, v in vars(scaling).items() if v is not None}
    return {"rope_type": name, "rope_theta": theta, **given}
