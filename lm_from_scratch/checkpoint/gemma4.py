"""The ``config.json`` of a Gemma 4, in the words of the other families and back.

Layers that see everything have heads of another width, and maybe another number of key heads. A
published file says so with two keys; ``transformers`` writes a table of the layers that differ.
"""

from collections.abc import Mapping
from typing import Any

from lm_from_scratch.checkpoint.layer_kinds import Layers
from lm_from_scratch.limits import require, shown
from lm_from_scratch.models.gemma4 import all_but_every
from lm_from_scratch.models.qwen2 import FULL, SLIDING

Contents = Mapping[str, Any]

#: Our names and those of the file, where they differ.
NAMES = {
    "activation": "hidden_activation",
    "global_n_kv_head": "num_global_key_value_heads",
    "keys_are_values": "attention_k_eq_v",
    "kv_shared_layers": "num_kv_shared_layers",
    "wide_shared_mlp": "use_double_wide_mlp",
    "per_layer_width": "hidden_size_per_layer_input",
    "per_layer_vocab_size": "vocab_size_per_layer_input",
}
#: The rotation of a file that names none.
ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}


def layers(config: Contents) -> dict[str, Any]:
    """The kinds of layers, listed or five of six that slide. The last one sees everything, whatever
    the list says, as in ``transformers``. Raises ``ValueError`` for what is no list of words."""
    n_layer, types = config["num_hidden_layers"], config["layer_types"]
    require(Layers, num_hidden_layers=n_layer)
    if types is None:
        types = [*all_but_every(6, n_layer)]
    if not isinstance(types, list) or not all(isinstance(t, str) for t in types):
        raise ValueError(f"layer_types={shown(types)} must be a list of words")
    types = (*types[:-1], FULL) if types else ()
    return {
        "layer_types": types,
        "sliding_window": config["sliding_window"],
        "max_window_layers": None,
    }


def read(config: Contents) -> dict[str, Any]:
    """The contents with the two keys, and a rotation for each kind of layer. Raises ``ValueError``
    for layers of one kind that differ, and for texts that are seen as a whole."""
    if (seen := config["use_bidirectional_attention"]) not in (None, "vision"):  # of pictures alone
        raise ValueError(f"use_bidirectional_attention={shown(seen)} is not supported, only None")
    contents = dict(config) | {"rope_local_base_freq": config["rope_theta"]}
    if contents["rope_parameters"] is None:
        contents["rope_parameters"] = ROPE
    require(bool, attention_k_eq_v=contents["attention_k_eq_v"])
    if not contents["attention_k_eq_v"]:  # the key says nothing then
        contents["num_global_key_value_heads"] = None
    if (table := contents.pop("per_layer_config")) is not None:
        contents |= _of_layers(table, contents)
    return contents


def _of_layers(table: Any, config: Contents) -> dict[str, Any]:
    """The numbers of layers that see everything, from the table of what differs in which layer."""
    full = [n for n, kind in enumerate(layers(config)["layer_types"]) if kind == FULL]
    wrong = f"per_layer_config={shown(table)} must say the same of all layers that see everything"
    if not isinstance(table, Mapping) or not all(isinstance(t, Mapping) for t in table.values()):
        raise ValueError(wrong)
    own = {int(n): dict(changes) for n, changes in table.items() if str(n).isdecimal()}
    alike = [own.get(n, {}) for n in full]
    changed = alike[0] if alike else {}
    if len(own) < len(table) or own.keys() - {*full} or any(one != changed for one in alike):
        raise ValueError(wrong)
    if others := changed.keys() - {"head_dim", "num_key_value_heads"}:
        raise ValueError(f"per_layer_config: {sorted(others)} cannot differ between layers here")
    return {
        "global_head_dim": changed.get("head_dim", config.get("head_dim", 256)),
        "num_global_key_value_heads": changed.get("num_key_value_heads"),
    }


def write(written: Contents) -> dict[str, Any]:
    """The contents in the words of a Gemma 4. Raises ``ValueError`` for fewer keys in layers whose
    keys are no values: no file says that."""
    contents = {key: value for key, value in written.items() if key != "rope_scaling"}
    same = contents["num_global_key_value_heads"] == contents["num_key_value_heads"]
    if not same and not contents["attention_k_eq_v"]:
        raise ValueError("global_n_kv_head cannot be written without keys_are_values")
    return contents
