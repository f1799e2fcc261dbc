"""How many numbers a model keeps of a text, read off its ``config.json``: caches and states.

The numbers are those of the family's class in ``transformers``, which the slow tests build without
memory, run and count.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from lm_from_scratch.checkpoint.families import Config, complete
from lm_from_scratch.checkpoint.ideas import (
    IDEAS,
    LOCAL,
    RECURRENT,
    STATE_SIZES,
    WINDOWS,
    layer_kinds,
    number,
)

#: Layers that keep nothing of each token: those with a state, and those that mix no tokens.
KEEPS_NOTHING = (*RECURRENT, "mlp", "moe")
#: Which layers a token passes several times: the first, how many or the one after the last, and
#: how often.
LOOPS = (
    ("n_input_layers", "n_recurrent_layers", "", "n_recurrent_loops"),
    ("loop_layer_index_start", "", "loop_layer_index_end", "loop_num_passes"),
)
WANTED = "the config must have num_hidden_layers, num_attention_heads, and head_dim or hidden_size"
#: Lists of so many layers are made before anything else is looked at.
MAX_LAYERS = 2**16


def cached_numbers(config: Config, tokens: int) -> int:
    """How many numbers a cache keeps of so many tokens: keys and values, latents, the keys of an
    indexer, vectors that stand for several tokens, or nothing where a layer has a state instead or
    reads the keys of another. Raises ``ValueError`` for a config that does not say it."""
    config, _ = complete(config)
    return sum(times * _kept(kind, one, tokens) for times, kind, one in _caching_layers(config))


def _caching_layers(config: Config) -> Iterator[tuple[int, str, Config]]:
    """Of each layer that keeps something of every token how often a token passes it, its kind, and
    the config that it has."""
    kinds = layer_kinds(config) or _unlisted(config)
    shared = number(config, "num_kv_shared_layers") or (0, "")
    own, lists = (
        config.get("per_layer_config"),
        ("kv_source_layers", "indexer_types", "no_rope_layers"),
    )
    sources, indexed, turned = (
        x if isinstance(x := config.get(key), list) else [] for key in lists
    )
    for n, kind in enumerate(kinds[: max(0, len(kinds) - shared[0])]):
        reads_another = n < len(sources) and sources[n] != n
        if kind in KEEPS_NOTHING or reads_another:
            continue
        one = dict(config)
        if n < len(indexed) and indexed[n] != "full":
            one.pop("index_head_dim", None)
        if isinstance(own, Mapping) and isinstance(changes := own.get(f"{n:02}"), Mapping):
            one |= changes
        if n < len(turned) and turned[n] == 0:
            one.pop("qk_rope_head_dim", None)
        yield _passes(config, n), kind, one


def _unlisted(config: Config) -> list[str]:
    """A word for each layer of a config that does not list them."""
    count = number(config, "num_hidden_layers", "num_layers")
    if not count:
        raise ValueError(WANTED)
    if count[0] > MAX_LAYERS:
        raise ValueError(f"{count[1]}={count[0]} is more layers than any model has")
    layers = range(count[0])
    alike = "indexed_attention" if number(config, "index_head_dim") else "full_attention"
    alike = "sliding_attention" if IDEAS["window"].read(config) else alike
    if not number(config, "num_attention_heads") and number(config, *STATE_SIZES):
        return ["mamba"] * len(layers)
    pattern = config.get("block_types")
    if isinstance(pattern, list) and pattern:
        return [str(pattern[n % len(pattern)]) for n in layers]
    if period := number(config, "attn_layer_period"):
        attention = {n for n in layers if n % period[0] == config.get("attn_layer_offset")}
    elif "mamba_d_head" in config and "mamba_d_ssm" not in config:
        attention = _indices(config.get("attn_layer_indices"))
    else:
        attention = {*layers}
    return [alike if n in attention else "mamba" for n in layers]


def _indices(value: Any) -> set[int]:
    """The whole numbers of a list, or nothing."""
    return {n for n in value if type(n) is int} if isinstance(value, list) else set()


def _passes(config: Config, layer: int) -> int:
    """How often a token passes a layer, each time with keys of its own: twice where a layer of
    LongCat has two attentions, which it counts as ``num_layers``."""
    if "num_layers" in config and "num_hidden_layers" not in config:
        return 2
    for start, size, end, times in LOOPS:
        first, many = number(config, start), number(config, times)
        length, last = number(config, size), number(config, end)
        if first and many and (length or last):
            stop = last[0] if last else first[0] + length[0] if length else 0
            return many[0] if first[0] <= layer < stop else 1
    return 1


def _kept(kind: str, config: Config, tokens: int) -> int:
    """How many numbers a layer of that kind keeps of so many tokens."""
    each, features = _widths(kind, config)
    size = number(config, *WINDOWS)
    window = min(tokens, size[0]) if size else tokens
    chooses = kind not in (*LOCAL, "full_attention")
    index = (number(config, "index_head_dim") or (0, ""))[0] if chooses else 0
    if isinstance(rates := config.get("compress_rates"), Mapping):
        # one vector is key and value, for a token of the window or for several of all; the indexer
        # of sparse layers has a key of its own for each of the latter
        rate = number(rates, kind)
        wide = features + index if kind == "compressed_sparse_attention" else features
        return window * features + (tokens // rate[0] if rate else 0) * wide
    pooled = number(config, "index_kpool")
    summaries = tokens // pooled[0] if pooled else tokens
    return (window if kind in LOCAL else tokens) * each + summaries * index


def _widths(kind: str, config: Config) -> tuple[int, int]:
    """How many numbers a layer of that kind keeps of a token: in all, and of a key of one head."""
    heads = number(config, "num_key_value_heads", "num_attention_heads")
    queries, hidden = number(config, "num_attention_heads"), number(config, "hidden_size")
    width = number(config, "head_dim", "attention_head_dim", "kv_channels")
    if kind in LOCAL:
        heads = number(config, "swa_num_key_value_heads") or heads
        width = number(config, "swa_head_dim") or width
        if heads and config.get("model_type") == "mimo_v2_flash":  # says its code
            heads = 2 * heads[0], heads[1]
    else:
        heads = number(config, "num_global_key_value_heads") or heads
        width = number(config, "global_head_dim") or width
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        heads = 1, "multi_query"
    if not queries or not heads or not (width or hidden):
        raise ValueError(WANTED)
    features = width[0] if width else hidden[0] // queries[0] if hidden else 0
    if rank := number(config, "kv_lora_rank"):
        return rank[0] + (number(config, "qk_rope_head_dim") or (0, ""))[0], features
    return heads[0] * (features + (number(config, "v_head_dim") or (features, ""))[0]), features


def states(config: Config) -> int:
    """How many numbers the states of a model have, whatever the length is: the memory of each head
    or feature, and the last inputs of a short convolution. Raises ``ValueError`` for layers with a
    state of another kind than a delta rule, a convolution or a state space."""
    config, _ = complete(config)
    kinds = layer_kinds(config) or _unlisted(config)
    some = sum(kind in RECURRENT for kind in kinds)
    names = "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads", "conv_kernel_dim"
    sizes = [size[0] for name in names if (size := number(config, f"linear_{name}"))]
    if some and len(sizes) == len(names):
        dk, dv, keys, values, kernel = sizes
        return some * (values * dk * dv + (2 * keys * dk + values * dv) * kernel)
    heads, wide = number(config, "linear_num_heads"), number(config, "linear_head_dim")
    taps = number(config, "linear_conv_kernel_dim", "short_conv_kernel_size", "conv_L_cache")
    if some and heads and wide and taps:  # a decay for each feature of a key
        return some * heads[0] * wide[0] * (wide[0] + 3 * taps[0])
    hidden = number(config, "hidden_size")
    if some and taps and hidden and {*kinds} & {*RECURRENT} == {"conv"}:
        return some * hidden[0] * taps[0]
    if taps := number(config, "cca_time0"):  # over the queries and keys of every layer
        wide = number(config, "head_dim") or (0, "")
        of = "num_attention_heads", "num_key_value_heads"
        return len(kinds) * taps[0] * wide[0] * sum((number(config, one) or (0,))[0] for one in of)
    if (taps := number(config, "conv_kernel_size")) and hidden:  # before and after each sub-layer
        layers = _caching_layers(config)
        features = sum(n * (_widths(kind, one)[0] + 2 * hidden[0]) for n, kind, one in layers)
        return features * taps[0]
    hybrids = kinds.count("hybrid") if number(config, "mamba_d_state") else 0
    if "mamba_d_ssm" in config:  # beside attention, in every layer
        hybrids = len(kinds)
    if not some and not hybrids:
        return 0
    state, taps = number(config, *STATE_SIZES), number(config, "mamba_d_conv", "conv_kernel")
    if not state or not taps or not hidden:
        raise ValueError(f"states of {sorted({*kinds} & {*RECURRENT})} are not counted")
    heads, wide = number(config, "mamba_num_heads"), number(config, "mamba_head_dim")
    times = number(config, "mamba_expand", "expand") or (2, "")
    inner = number(config, "mamba_d_ssm") or (times[0] * hidden[0], "")
    features = heads[0] * wide[0] if heads and wide else inner[0]
    groups = number(config, "mamba_n_groups", "mamba_ngroups", "n_groups")
    inputs = features + (2 * groups[0] * state[0] if groups else 0)
    return (some + hybrids) * (features * state[0] + inputs * taps[0])
