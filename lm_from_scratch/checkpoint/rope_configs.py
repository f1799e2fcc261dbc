"""Rotation in a ``config.json``: theta, and what slows it down.

Old files say ``rope_theta`` and ``rope_scaling``, new ones ``rope_parameters``, with an object for
each kind of layer where these differ. What a family cannot have is refused by name. Layers without
any are another key (``no_rope_layers``).
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from lm_from_scratch.layers.rope import RopeScaling
from lm_from_scratch.layers.rope_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    YaRNScaling,
)
from lm_from_scratch.limits import Count, Positive, require, shown
from lm_from_scratch.models.qwen2 import FULL, SLIDING

#: The scalings of RoPE by their ``rope_type``.
SCALINGS: dict[str, type[Any]] = {
    "linear": LinearScaling,
    "dynamic": DynamicNTKScaling,
    "yarn": YaRNScaling,
    "llama3": Llama3Scaling,
    "proportional": ProportionalScaling,
}

#: Our names of their fields and those in a ``config.json``; the others are the same.
SCALING_NAMES = {"original_length": "original_max_position_embeddings"}


def rotation_from_dict(config: Mapping[str, Any]) -> tuple[Any, RopeScaling | None]:
    """Theta and scaling. Of two dictionaries ``rope_scaling`` counts, and the other not at all, as
    in ``transformers``: so ``ValueError`` is raised for a theta that only the other has, which
    would be lost. And for what is no dictionary, or names no kind of rotation beside the other."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config[key] or {}, Mapping):
            raise ValueError(f"{key}={shown(config[key])} must be an object")
    parameters = config["rope_parameters"] or {}
    rope = {**(config["rope_scaling"] or parameters)}
    if config["rope_scaling"] and parameters and not {"rope_type", "type"} & rope.keys():
        raise ValueError(f"rope_scaling={shown(rope)} names no rope_type")
    partial = config.get("partial_rotary_factor")
    if partial is not None and partial != 1:  # beside the dictionary, as GLM and Phi say it
        raise ValueError(f"partial_rotary_factor={shown(partial)} must be 1: all features turn")
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


def apart(config: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """The config with the rotation of layers that see everything as if all had it, and the theta of
    those that slide, which no scaling slows down. Raises ``ValueError`` where that is not so, and
    for one rotation of both. ``rope_scaling`` goes before what the other has, as in
    ``transformers``."""
    parameters, scaling = config["rope_parameters"] or {}, config["rope_scaling"] or {}
    for key, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(value, Mapping):
            raise ValueError(f"{key}={shown(value)} must be an object")
    kinds = {kind: parameters.get(kind) or {} for kind in (FULL, SLIDING)}
    if parameters.keys() - kinds or not all(isinstance(rope, Mapping) for rope in kinds.values()):
        raise ValueError(
            f"rope_parameters={shown(parameters)} must have an object for each of {[*kinds]}"
        )
    theta, slowed = scaling_from_dict(kinds[SLIDING])
    if slowed is not None:
        raise ValueError(f"rope_parameters: {SLIDING} has {slowed}, and only {FULL} may be scaled")
    both = {**kinds[FULL], **scaling}
    local = config["rope_local_base_freq"] if theta is None else theta
    return {**config, "rope_parameters": both, "rope_scaling": None}, local


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
    name = rope_parameters.get("rope_type", rope_parameters.get("type", "default"))
    if name != "proportional" and given.get("partial_rotary_factor", 1.0) != 1.0:
        factor = shown(given["partial_rotary_factor"])
        raise ValueError(f"partial_rotary_factor={factor} must be 1: all features turn")
    theta = given.get("rope_theta")
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
    return theta, built(SCALINGS[name], values, SCALING_NAMES)


def scaling_to_dict(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """``rope_parameters`` as transformers writes them: the inverse of :func:`scaling_from_dict`."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    name = next(name for name, kind in SCALINGS.items() if isinstance(scaling, kind))
    given = {SCALING_NAMES.get(k, k): v for k, v in vars(scaling).items() if v is not None}
    return {"rope_type": name, "rope_theta": theta, **given}


def built(kind: type[Any], values: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    """``kind`` of these values. What it refuses has two names, ours and that of the file: both
    stand in the ``ValueError``, of each field that it speaks of."""
    try:
        return kind(**values)
    except ValueError as error:
        ours = dict.fromkeys(re.findall(r"(\w+)=", str(error)))
        theirs = [names[our] for our in ours if names.get(our, our) != our]
        if not theirs:
            raise
        raise ValueError(f"{error} ({', '.join(theirs)} in the file)") from error
