"""Which layers of a published model slide, rotate, have experts or a state: read off its config.

Families say it in lists, in intervals and in switches. Each function reads one way of saying it,
and returns the fields of our config.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from lm_from_scratch.limits import Count, Limit, is_integer, require, shown
from lm_from_scratch.models.deepseek_v3 import DeepseekV3Config
from lm_from_scratch.models.gpt_oss import GptOssConfig, alternating
from lm_from_scratch.models.qwen2 import FULL, SLIDING
from lm_from_scratch.models.qwen3_next import LINEAR, Qwen3NextConfig
from lm_from_scratch.models.smollm3 import all_but_every

#: Lists of so many are made before the weights of a file are looked at.
Layers = Annotated[Count, Limit("is more layers than any model has", lambda n: n <= 2**16)]
NONE_SLIDES = {"sliding_window": None, "layer_types": None, "max_window_layers": None}


def some_slide(config: Mapping[str, Any]) -> dict[str, Any]:
    """Listed in new files; in old ones two numbers and a switch. A window that no layer uses is
    none. Raises ``ValueError`` for a list that is none of words, or not one for each layer."""
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


def all_slide(config: Mapping[str, Any]) -> dict[str, Any]:
    """One number: every layer has this window, or none has."""
    window = config["sliding_window"]
    first = None if window is None else 0
    return {**NONE_SLIDES, "sliding_window": window, "max_window_layers": first}


def next_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """No experts at all are any number of them in no layer."""
    layers = some_recurrent(config) | {"mlp_only_layers": _dense(config)}
    if is_integer(config["num_experts"], 0) and config["num_experts"] == 0:
        every = tuple(range(config["num_hidden_layers"]))
        layers |= {"mlp_only_layers": every, "n_expert": Qwen3NextConfig.n_expert}
    return layers


def some_recurrent(config: Mapping[str, Any]) -> dict[str, Any]:
    """Listed, or every layer but each ``full_attention_interval``-th."""
    types = _listed(config, LINEAR, "full_attention_interval")
    return {**NONE_SLIDES, "layer_types": types}


def five_of_six_slide(config: Mapping[str, Any]) -> dict[str, Any]:
    """Listed, or every layer but each ``sliding_window_pattern``-th."""
    types = _listed(config, SLIDING, "sliding_window_pattern")
    return {**NONE_SLIDES, "sliding_window": config["sliding_window"], "layer_types": types}


def _listed(config: Mapping[str, Any], word: str, interval: str) -> tuple[str, ...]:
    """The words of ``layer_types``; where there are none, ``word`` for every layer but each whose
    number the key ``interval`` divides."""
    n_layer = config["num_hidden_layers"]
    require(Layers, num_hidden_layers=n_layer)
    if (types := _words(config)) is not None:
        return types
    require(Count, **{interval: config[interval]})
    return tuple(word if (n + 1) % config[interval] else FULL for n in range(n_layer))


def _words(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The words of ``layer_types``; None where a file has none."""
    types = config["layer_types"]
    if types is None:
        return None
    if not isinstance(types, list) or not all(isinstance(t, str) for t in types):
        raise ValueError(f"layer_types={shown(types)} must be a list of words")
    return tuple(types)


def _dense(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """The layers without experts, from a list or nothing."""
    dense = config["mlp_only_layers"] or []
    if not isinstance(dense, list):
        raise ValueError(f"mlp_only_layers={shown(dense)} must be a list of layers")
    return tuple(dense)


def experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """A switch for the windows of all layers, a list of those without experts, and how many experts
    there are, for which ``transformers`` has two names."""
    require(bool, use_sliding_window=config["use_sliding_window"])
    window = config["sliding_window"] if config["use_sliding_window"] else None
    layers = all_slide({"sliding_window": window})
    return {**layers, "mlp_only_layers": _dense(config), "n_expert": _n_expert(config, 128)}


def _n_expert(config: Mapping[str, Any], otherwise: int, name: str = "num_experts") -> Any:
    """How many experts there are, under the ``name`` of the family or the one that all share."""
    given = {key: config[key] for key in (name, "num_local_experts") if key in config}
    if len(given) == 2 and given[name] != given["num_local_experts"]:
        values = " and ".join(f"{key}={shown(value)}" for key, value in given.items())
        raise ValueError(f"{values} name the same number")
    return next(iter(given.values()), otherwise)


def none_slides(config: Mapping[str, Any]) -> dict[str, Any]:
    """No layer has a window."""
    return NONE_SLIDES


def latent_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """No layer has a window; the experts are counted under one of two names. The scale of scores is
    read from any rotation there, and is YaRN's here: raises ``ValueError`` for another that has
    it."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = config[key] or {}
        name = rope.get("rope_type", rope.get("type", "default"))
        if rope.get("mscale_all_dim") and name not in ("default", "yarn"):
            raise ValueError(
                f"mscale_all_dim={shown(rope['mscale_all_dim'])} is not supported with "
                f"rope_type={shown(name)}, only with rope_type='yarn'"
            )
    return {
        **NONE_SLIDES,
        "n_expert": _n_expert(config, DeepseekV3Config.n_expert, "n_routed_experts"),
    }


def some_rotate(config: Mapping[str, Any]) -> dict[str, Any]:
    """A 1 for each layer that rotates, by name or by interval. The list may be longer than the
    model, as for one that was cut. Raises ``ValueError`` for a shorter one."""
    listed, n_layer = config["no_rope_layers"], config["num_hidden_layers"]
    require(Layers, num_hidden_layers=n_layer)
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
    return {**some_slide(config), "rope_layers": rotate}


def every_other_slides(config: Mapping[str, Any]) -> dict[str, Any]:
    """Listed, or every other layer; the window is there, whether a layer uses it or not. The
    experts are counted under one of two names."""
    n_layer = config["num_hidden_layers"]
    require(Layers, num_hidden_layers=n_layer)
    require(Count, sliding_window=config["sliding_window"])
    types = _words(config)
    types = alternating(n_layer) if types is None else types
    n_expert = _n_expert(config, GptOssConfig.n_expert)
    return {"layer_types": types, "max_window_layers": None, "n_expert": n_expert}
