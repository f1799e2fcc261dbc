"""The ``config.json`` of a DeepSeek-V4, in the words of the other families and back.

It has two rotations by name, ``main`` and ``compress``, a rate for each kind of layer that pools,
and older words for both and for the kinds of layers.
"""

from collections.abc import Mapping
from typing import Any

from lm_from_scratch.checkpoint.layer_kinds import Layers
from lm_from_scratch.limits import Count, Positive, Whole, require, shown
from lm_from_scratch.models.deepseek_v4 import HASHED, HEAVY, SCORED, SPARSE, DeepseekV4Config
from lm_from_scratch.models.qwen2 import SLIDING

Contents = Mapping[str, Any]

#: What the code in ``transformers`` does, whatever else these keys say.
ONLY = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "attention_bias": False,
    "mlp_bias": False,
}
#: Keys for which there is another name.
ALIASES = {"moe_intermediate_size": "intermediate_size", "n_routed_experts": "num_local_experts"}
#: Our words, the kinds of layers that have these rates, and the older keys for them.
RATES = (("sparse_rate", SPARSE, "compress_rate_csa"), ("heavy_rate", HEAVY, "compress_rate_hca"))
#: The kinds of layers in ``compress_ratios``.
RATIOS = {0: SLIDING, 4: SPARSE, 128: HEAVY}


def read(config: Contents) -> dict[str, Any]:
    """The contents with one rotation, which is scaled as that of the layers that pool. Raises
    ``ValueError`` for what a V4 here does not do."""
    rates = config["compress_rates"]
    rates = {SPARSE: 4, HEAVY: 128} if rates is None else rates
    if not isinstance(rates, Mapping) or not {SPARSE, HEAVY} <= {*rates}:
        raise ValueError(f"compress_rates={shown(rates)} must have a number for {SPARSE}, {HEAVY}")
    contents = {**config, **_rotation(config)}
    for ours, kind, old in RATES:
        key, rate = old, config.get(old)
        if rate is None:
            key, rate = f"compress_rates[{kind!r}]", rates[kind]
        require(Count, **{key: rate})
        contents[ours] = rate
    for name, alias in ALIASES.items():
        value = contents.pop(alias, contents.get(name))
        if name in contents and value != contents[name]:
            raise ValueError(f"{alias}={shown(value)} and {name}={shown(contents[name])} are one")
        if value is not None:
            contents[name] = value
    return contents


def _rotation(config: Contents) -> dict[str, Any]:
    """Theta of the layers that slide, and of the others with their scaling."""
    share, old, D = (
        config.get(k) for k in ("partial_rotary_factor", "qk_rope_head_dim", "head_dim")
    )
    if share is None and old is not None:
        require(Count, qk_rope_head_dim=old, head_dim=D)
        share = old / D
    key = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
    rope = config[key] or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{key}={shown(rope)} must be an object")
    tables = [rope.get(name) for name in ("main", "compress")]
    if all(isinstance(table, Mapping) for table in tables):
        main, compress = ({"rope_theta": config["rope_theta"], **(t or {})} for t in tables)
        theta, otherwise = compress["rope_theta"], share or 1.0
        share, other = (t.get("partial_rotary_factor", otherwise) for t in (main, compress))
        if share != other or main.get("rope_type", main.get("type", "default")) != "default":
            raise ValueError(
                f"{key}={shown(rope)} is not supported: layers that slide are not "
                "scaled, and all turn the same features"
            )
    else:
        main, compress = {"rope_theta": config["rope_theta"]}, dict(rope)
        theta = config["compress_rope_theta"]
        if compress.get("rope_type", compress.get("type")) == "yarn":
            compress.setdefault("attention_factor", 1.0)
    if compress.get("rope_type", compress.get("type")) == "dynamic":
        raise ValueError(f"{key}={shown(rope)}: layers that pool cannot scale by length")
    compress.pop("partial_rotary_factor", None)
    share = DeepseekV4Config.partial_rotary_factor if share is None else share
    require(Positive, partial_rotary_factor=share)
    return {
        "rope_parameters": compress | {"rope_theta": main["rope_theta"]},
        "rope_scaling": None,
        "original_max_position_embeddings": None,  # beside the rotation it says nothing
        "compress_rope_theta": theta,
        "partial_rotary_factor": share,
    }


def layers(config: Contents) -> dict[str, Any]:
    """The kinds of layers, listed or by older words; lists may be longer than the model. Raises
    ``ValueError`` for what is no list of them."""
    n_layer, hashed = config["num_hidden_layers"], config.get("num_hash_layers")
    require(Layers, num_hidden_layers=n_layer)
    types, routes, ratios = (
        config.get(key) for key in ("layer_types", "mlp_layer_types", "compress_ratios")
    )
    if types is None and ratios is not None:
        if not isinstance(ratios, list) or not all(ratio in [*RATIOS] for ratio in ratios):
            raise ValueError(f"compress_ratios={shown(ratios)} must be a list of {[*RATIOS]}")
        types = [RATIOS[ratio] for ratio in ratios]
    if routes is None and hashed is not None:
        require(Whole, num_hash_layers=hashed)
        routes = [HASHED] * min(hashed, n_layer) + [SCORED] * max(n_layer - hashed, 0)
    given = {"layer_types": types, "mlp_layer_types": routes}
    for key, words in given.items():
        if words is not None and not isinstance(words, list):
            raise ValueError(f"{key}={shown(words)} must be a list of words")
    lists = {key: words and (*words[:n_layer],) for key, words in given.items()}
    return {**lists, "sliding_window": config["sliding_window"], "max_window_layers": None}


def write(written: Contents) -> dict[str, Any]:
    """The contents in the words of a V4."""
    contents, rope = dict(written), written["rope_parameters"]
    contents["partial_rotary_factor"] = rope["partial_rotary_factor"]
    main = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}
    compress = rope | {"rope_theta": contents["compress_rope_theta"]}
    contents["rope_parameters"] = {"main": main | {"rope_type": "default"}, "compress": compress}
    contents["rope_scaling"] = None
    contents["compress_rates"] = {kind: contents.pop(ours) for ours, kind, _ in RATES}
    del contents["intermediate_size"]
    return contents
