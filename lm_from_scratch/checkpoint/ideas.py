"""Which ideas a published ``config.json`` uses, and the lesson on each.

A config is numbers and switches, and an idea is in it if a key says so: ``kv_lora_rank`` is a
latent cache, ``num_experts`` are experts. Not every idea has a key. Qwen3 normalises its queries
because its code does, whatever its config says. So the families of ``transformers`` have been
looked at, too, built without memory and called once:
:mod:`~lm_from_scratch.checkpoint.families` has what was seen.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from lm_from_scratch.checkpoint.families import Config, Family, complete, families

#: What a config says of an idea, and the keys that say it.
Said = tuple[str, tuple[str, ...]]

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_WIDTHS = (
    "shared_expert_intermediate_size",
    "shared_experts_intermediate_size",
    "shared_intermediate_size",
)
SCORES = ("scoring_func", "router_score_function", "expert_selection_fn", "moe_router_activation")
NEXT = ("num_nextn_predict_layers", "mtp_num_layers", "mtp_num_hidden_layers", "num_mtp_layers")
SINKS = ("add_full_attention_sink_bias", "add_swa_attention_sink_bias")
CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap")
STATE_SIZES = ("mamba_d_state", "ssm_state_size", "state_size")
RECURRENT = ("linear_attention", "recurrent", "mamba", "mamba2", "conv", "kda")
WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "attention_window_size",
)
LOCAL = ("sliding_attention", "chunked_attention", "hybrid_sliding", "attention")


@dataclass(frozen=True)
class Idea:
    """An idea, the page of the course that explains it, and how a config says that it is used."""

    label: str
    page: str
    read: Callable[[Config], Said | None] = lambda config: None


@dataclass(frozen=True)
class Line:
    """An idea that a model uses. Without ``keys`` only the code of its family says so."""

    name: str
    text: str
    keys: tuple[str, ...]

    @property
    def idea(self) -> Idea:
        """What it is, and where it is explained."""
        return IDEAS[self.name]

    def __str__(self) -> str:
        source = ", ".join(self.keys) or "no key: its code"
        where = f" -> {self.idea.page}" if self.idea.page else ""
        return f"{self.idea.label}: {self.text} [{source}]{where}"


def number(config: Config, *keys: str) -> tuple[int, str] | None:
    """The first of the keys that holds a whole number above 0, with its value."""
    for key in keys:
        if type(value := config.get(key)) is int and value > 0:
            return value, key
    return None


def layer_kinds(config: Config) -> list[str]:
    """A word for each layer, or nothing where a config has no such list."""
    types = config.get("layer_types") or config.get("layers_block_type")
    return [str(word) for word in types] if isinstance(types, list) else []


def rotations(config: Config) -> dict[str, Config]:
    """The numbers of each rotation, by the kind of layer that it is for; a single one has none."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    tables: dict[str, Config] = {}
    if isinstance(rope, Mapping):
        inner = {str(k): v for k, v in rope.items() if isinstance(v, Mapping)}
        tables = inner or {"": rope}
    return tables


def _number_of(text: str, *keys: str) -> Callable[[Config], Said | None]:
    """An idea that is used where one of the keys is a whole number, which the text names."""

    def read(config: Config) -> Said | None:
        entry = number(config, *keys)
        return (text.format(entry[0]), (entry[1],)) if entry else None

    return read


def _grouped(config: Config) -> Said | None:
    heads, groups = number(config, "num_attention_heads"), number(config, "num_key_value_heads")
    if not heads or not groups or groups[0] >= heads[0] or "kv_lora_rank" in config:
        return None
    return f"{heads[0]} query heads share {groups[0]}", (heads[1], groups[1])


def _window(config: Config) -> Said | None:
    size = number(config, *WINDOWS)
    kinds = layer_kinds(config)
    some = sum(kind in LOCAL for kind in kinds)
    beside = "compress_rates" in config  # every layer has a window, and what is summed up of all
    if not size or config.get("use_sliding_window") is False or not (some or beside or not kinds):
        return None
    if not some:
        return f"{size[0]} tokens", (size[1],)
    return f"{size[0]} tokens in {some} of {len(kinds)} layers", (size[1], "layer_types")


def _experts(config: Config) -> Said | None:
    many, few = number(config, *EXPERTS), number(config, *CHOSEN)
    if (
        not many
        or not few
        or many[0] < 2
        or config.get("is_moe", config.get("enable_moe_block", 1)) in (False, None)
    ):
        return None
    return f"{many[0]}, {few[0]} for each token", (many[1], few[1])


def _shared(config: Config) -> Said | None:
    if not _experts(config):
        return None
    if entry := number(config, *SHARED):
        return f"{entry[0]} for every token", (entry[1],)
    entry = number(config, *SHARED_WIDTHS)
    return (f"one, {entry[0]} wide", (entry[1],)) if entry else None


def _sigmoid(config: Config) -> Said | None:
    for key in SCORES:
        if isinstance(word := config.get(key), str) and word != "softmax" and _experts(config):
            return f"scores by {word}", (key,)
    return None


def _latent(config: Config) -> Said | None:
    rank, turned = number(config, "kv_lora_rank"), number(config, "qk_rope_head_dim")
    if not rank:
        return None
    own = f" and a key of {turned[0]} for all heads" if turned else ""
    return f"a latent of {rank[0]}{own}", (rank[1], *([turned[1]] if turned else []))


def _partial(config: Config) -> Said | None:
    if "kv_lora_rank" in config:
        return None
    shares = {
        f"{k}: " if k else "": r.get("partial_rotary_factor") for k, r in rotations(config).items()
    }
    if not any(shares.values()):
        shares[""] = config.get("partial_rotary_factor", config.get("rotary_pct"))
    parts = {k: s for k, s in shares.items() if isinstance(s, float | int) and 0 < s < 1}
    if parts:
        same = len(set(parts.values())) == 1 and len(parts) == len(shares)
        text = ", ".join(f"{k}{100 * s:.3g}% of the features turn" for k, s in parts.items())
        one = f"{100 * next(iter(parts.values())):.3g}% of the features turn"
        return one if same else text, ("partial_rotary_factor",)
    turned, width = number(config, "rotary_dim"), number(config, "head_dim")
    if turned and width and turned[0] < width[0]:
        return f"{turned[0]} of {width[0]} features turn", ("rotary_dim", "head_dim")
    return None


def _unrotated(config: Config) -> Said | None:
    flags = config.get("no_rope_layers")
    if isinstance(flags, list) and flags and 0 in flags:
        return f"{flags.count(0)} of {len(flags)} layers do not turn", ("no_rope_layers",)
    rope = config.get("rope_parameters")
    bare = (
        [k for k, v in rope.items() if k in (*LOCAL, "full_attention") and v is None]
        if isinstance(rope, Mapping)
        else []
    )
    if bare:
        return f"{', '.join(bare)} does not turn", ("rope_parameters",)
    return None


def _thetas(config: Config) -> Said | None:
    tables = {
        k: r["rope_theta"]
        for k, r in rotations(config).items()
        if isinstance(r.get("rope_theta"), int | float)
    }
    key = "rope_parameters"
    listed = config.get("layer_rope_theta")
    if isinstance(listed, list):
        tables, key = (
            {str(i): t for i, t in enumerate(listed) if isinstance(t, int | float) and t > 0},
            "layer_rope_theta",
        )
    elif local := config.get("rope_local_base_freq"):
        tables, key = {"": config.get("rope_theta", 0), "local": local}, "rope_local_base_freq"
    thetas = sorted(set(tables.values()))
    if len(thetas) < 2:
        return None
    return f"theta {' and '.join(f'{t:,.0f}' for t in thetas)}", (key,)


def _scaled(config: Config) -> Said | None:
    for rotation in rotations(config).values():
        word = rotation.get("rope_type", rotation.get("type"))
        if isinstance(word, str) and word != "default":
            factor = rotation.get("factor")
            times = f", {factor:g} times" if isinstance(factor, int | float) else ""
            old = "rope_scaling" in config and not config.get("rope_parameters")
            return f"{word}{times}", ("rope_scaling" if old else "rope_parameters",)
    return None


def _recurrent(config: Config) -> Said | None:
    kinds = layer_kinds(config)
    some = sum(kind in RECURRENT for kind in kinds)
    return (f"in {some} of {len(kinds)} layers", ("layer_types",)) if some else None


def _delta(config: Config) -> Said | None:
    width = number(config, "linear_key_head_dim")
    recurrent = _recurrent(config)
    if not width or not recurrent:
        return None
    return f"a state {recurrent[0]}", (*recurrent[1], width[1])


def _sparse(config: Config) -> Said | None:
    entry = number(config, "index_topk", "index_topk_blocks", "indexer_budget")
    if not entry:
        return None
    text = f"{entry[0]} {'blocks' if 'blocks' in entry[1] else 'keys'} for each query"
    kinds = config.get("indexer_types")
    if isinstance(kinds, list) and (few := kinds.count("full")) < len(kinds):
        return f"{text}, chosen in {few} of {len(kinds)} layers", (entry[1], "indexer_types")
    return text, (entry[1],)


def _several(config: Config) -> Said | None:
    entry = number(config, *NEXT)
    return (
        (f"{entry[0]} more token{'s' if entry[0] > 1 else ''} for training", (entry[1],))
        if entry
        else None
    )


def _capped(config: Config) -> Said | None:
    caps = {k: config[k] for k in CAPS if isinstance(config.get(k), int | float) and config[k]}
    return (", ".join(f"{c:g}" for c in caps.values()), tuple(caps)) if caps else None


def _hyper(config: Config) -> Said | None:
    streams, rounds = number(config, "hc_mult", "hc_count"), number(config, "hc_sinkhorn_iters")
    if not streams:
        return None
    if rounds:
        text = f"{streams[0]} residual streams, balanced in {rounds[0]} rounds"
        return text, (streams[1], rounds[1])
    return f"{streams[0]} residual streams", (streams[1],)


def _shared_keys(config: Config) -> Said | None:
    if last := number(config, "num_kv_shared_layers"):
        return f"the last {last[0]} layers have none of their own", (last[1],)
    sources = config.get("kv_source_layers")
    borrow = sum(n != s for n, s in enumerate(sources)) if isinstance(sources, list) else 0
    return (f"{borrow} layers have none of their own", ("kv_source_layers",)) if borrow else None


def _compressed(config: Config) -> Said | None:
    if isinstance(rates := config.get("compress_rates"), Mapping):
        kinds = layer_kinds(config)
        parts = [f"{rate}:1 in {kinds.count(kind)}" for kind, rate in rates.items()]
        return f"{', '.join(parts)} of {len(kinds)} layers", ("compress_rates", "layer_types")
    pooled = number(config, "index_kpool")
    return (f"one key of the indexer for {pooled[0]} tokens", (pooled[1],)) if pooled else None


def _clamped(config: Config) -> Said | None:
    limit = config.get("swiglu_limit")
    known = isinstance(limit, int | float) and not isinstance(limit, bool) and limit > 0
    return (f"gate and up within {limit:g}", ("swiglu_limit",)) if known else None


def _log_scaled(config: Config) -> Said | None:
    start = number(config, "log_scaling_n_floor", "floor_scale")
    on = config.get("log_scaling_alpha") or config.get("attn_temperature_tuning")
    return (
        (f"by the logarithm of the position, from {start[0]}", (start[1],))
        if start and on
        else None
    )


def _switch(text: str, *keys: str) -> Callable[[Config], Said | None]:
    """An idea that is used where one of the keys is true."""

    def read(config: Config) -> Said | None:
        return next(((text, (key,)) for key in keys if config.get(key) is True), None)

    return read


#: Every idea that is looked for, in the order of the lessons.
IDEAS: dict[str, Idea] = {
    "rms_norm": Idea(
        "RMSNorm", "2_qwen2/1_rms_norm",
        lambda c: ("in place of LayerNorm", ("rms_norm_eps",)) if c.get("rms_norm_eps") else None,
    ),
    "norm_after": Idea("Norms after a sub-layer", "2_qwen2/1_rms_norm"),
    "bias": Idea(
        "Biases in attention", "2_qwen2/4_qwen2",
        _switch("q, k and v", "attention_bias", "qkv_bias", "use_qkv_bias", "use_bias"),
    ),
    "grouped": Idea("Shared key heads", "2_qwen2/3_swiglu", _grouped),
    "tied": Idea(
        "Tied head", "1_gpt2/2_gpt2", _switch("the embedding is the head", "tie_word_embeddings")
    ),
    "window": Idea("Sliding window", "3_attention/2_masks", _window),
    "qk_norm": Idea(
        "QK-norm", "9_since_qwen2/1_qwen3",
        _switch("queries and keys are normalised", "use_qk_norm", "qk_layernorm"),
    ),
    "cap": Idea("Capped scores or logits", "9_since_qwen2/1_qwen3", _capped),
    "experts": Idea("Experts", "9_since_qwen2/2_mixture_of_experts", _experts),
    "shared": Idea("Shared experts", "9_since_qwen2/2_mixture_of_experts", _shared),
    "sigmoid": Idea("Router without softmax", "9_since_qwen2/2_mixture_of_experts", _sigmoid),
    "router_bias": Idea("Balance by a bias", "9_since_qwen2/2_mixture_of_experts"),
    "latent": Idea("Latent attention (MLA)", "9_since_qwen2/3_latent_attention", _latent),
    "sinks": Idea(
        "Sinks", "9_since_qwen2/4_sinks_and_gates",
        _switch("a learned number for each head", *SINKS),
    ),
    "gate": Idea(
        "Gated attention", "9_since_qwen2/4_sinks_and_gates",
        _switch("the output of each head is scaled", "use_attention_gate", "attn_output_gate"),
    ),
    "partial": Idea("Partial RoPE", "9_since_qwen2/5_positions_today", _partial),
    "unrotated": Idea("Layers without RoPE", "9_since_qwen2/5_positions_today", _unrotated),
    "thetas": Idea("Several thetas", "9_since_qwen2/5_positions_today", _thetas),
    "scaled": Idea("Scaled rotation", "9_since_qwen2/5_positions_today", _scaled),
    "delta": Idea("Delta rule", "9_since_qwen2/6_delta_rule", _delta),
    "state_space": Idea(
        "State space (Mamba)", "9_since_qwen2/6_delta_rule",
        _number_of("a state of {} for each feature", *STATE_SIZES),
    ),
    "recurrent": Idea("Another recurrent layer", "9_since_qwen2/6_delta_rule"),
    "sparse": Idea("Learned sparse attention", "9_since_qwen2/7_sparse_attention", _sparse),
    "compressed": Idea("A cache that compresses", "9_since_qwen2/12_compressed_cache", _compressed),
    "shared_keys": Idea("Keys shared across layers", "9_since_qwen2/11_shared_keys", _shared_keys),
    "several": Idea("Multi-token prediction", "9_since_qwen2/8_multi_token_prediction", _several),
    "hyper": Idea("Hyper-connections", "9_since_qwen2/10_residual_streams", _hyper),
    "depth": Idea(
        "Attention over depth", "9_since_qwen2/10_residual_streams",
        _number_of("over blocks of {} layers", "n_layers_per_attn_res_block"),
    ),
    "looped": Idea(
        "Layers passed again", "9_since_qwen2/9_any_config",
        _number_of("{} times", "loop_num_passes", "n_recurrent_loops", "H_cycles"),
    ),
    "per_layer": Idea(
        "Embeddings for each layer", "9_since_qwen2/11_shared_keys",
        _number_of("{} wide", "hidden_size_per_layer_input"),
    ),
    "ngrams": Idea(
        "Embeddings of n-grams", "9_since_qwen2/9_any_config",
        lambda c: _number_of("of {} tokens", "ngram_size")(c) if c.get("ple_layer_ids") else None,
    ),
    "distance": Idea(
        "Bias by distance", "9_since_qwen2/9_any_config",
        _number_of("up to {} tokens back", "rel_extent"),
    ),
    "log_scaled": Idea("Scaled queries", "9_since_qwen2/11_shared_keys", _log_scaled),
    "clamped": Idea("Clamped SwiGLU", "9_since_qwen2/13_model_of_the_year", _clamped),
}  # fmt: skip

#: Switches that turn off what the code of a family does by default.
OFF = {
    "qk_norm": ("use_qk_norm", "qk_layernorm"),
    "gate": ("attn_output_gate", "use_attention_gate"),
}


def describe(config: Config) -> list[Line]:
    """The ideas that the model of a ``config.json`` uses, in the order of the lessons.

    Of a model for pictures or sound too, the part for text counts. Keys that a file leaves out have
    the default of its family, if that is known. Raises ``ValueError`` for what is no config.
    """
    return list(_lines(*complete(config)))


def described(family: Family) -> list[Line]:
    """The ideas that the default config of a family uses, or its code."""
    return list(_lines(family.config, family))


def _lines(config: Config, family: Family | None) -> Iterator[Line]:
    code = family.code if family else {}
    for name, idea in IDEAS.items():
        if value := idea.read(config):
            yield Line(name, *value)
        elif name in code and not any(config.get(key) is False for key in OFF.get(name, ())):
            yield Line(name, code[name], ())


def counts(names: Iterable[str] | None = None) -> dict[str, int]:
    """How many of the families use each idea, by their default configs."""
    chosen = list(families()) if names is None else list(names)
    ideas = [line.name for name in chosen for line in describe({"model_type": name})]
    return {name: ideas.count(name) for name in IDEAS}
