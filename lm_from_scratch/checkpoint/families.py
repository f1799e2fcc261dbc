"""The families of ``transformers``, and what each takes for a key that a config leaves out.

``families.json`` beside this file holds, for every family of a release, its default config and what
only its code says.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]
#: What the config of a model for pictures too says beside that of its part for text.
OF_BOTH = (
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


@dataclass(frozen=True)
class Family:
    """A family of ``transformers``: its default config, without what no idea needs, the number of
    parameters of that, None where the defaults are not complete, and what its code alone says."""

    config: Config
    parameters: int | None
    code: Mapping[str, str]


@cache
def stored() -> dict[str, Any]:
    """``families.json``: the release of ``transformers``, and its families."""
    path = Path(__file__).with_name("families.json")
    return json.loads(path.read_text(encoding="utf-8"))


@cache
def families() -> dict[str, Family]:
    """What is known of each family, by its ``model_type``."""
    return {name: Family(**one) for name, one in stored()["families"].items()}


def complete(config: Config) -> tuple[dict[str, Any], Family | None]:
    """A config with the defaults of its family, and that family, None if it is not known. Raises
    ``ValueError`` for what is no config."""
    if not isinstance(config, Mapping):
        raise ValueError(f"a config is a dictionary, not a {type(config).__name__}")
    config = of_text(config)
    family = families().get(str(config.get("model_type")))
    if family is None:
        return dict(config), None
    defaults = dict(family.config)
    layers = defaults.get("num_hidden_layers")
    if config.get("num_hidden_layers", layers) != layers:  # lists with a word for each layer
        defaults = {k: v for k, v in defaults.items() if not isinstance(v, list)}
    if {"rope_theta", "rope_scaling", "partial_rotary_factor"} & set(config):  # an older file
        defaults.pop("rope_parameters", None)
    return defaults | dict(config), family


def of_text(config: Config) -> Config:
    """Of the config of a model for pictures or sound too that of its part for text, with what the
    outer one alone says of that; any other as it is."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    outer = {key: config[key] for key in OF_BOTH if config.get(key) is not None}
    return {"model_type": f"{config.get('model_type')}_text"} | outer | dict(inner)
