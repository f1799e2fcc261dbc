r"""DeepSeek-V4, complete in one file: a cache that compresses, and several residual streams.

Nothing of V3's latent is left. A token has *one* vector of D features, which is key and value for
all heads. A layer sees the latest of them through a sliding window, and of the older tokens, by the
layer's kind, nothing, or *entries* that are pooled from blocks of them
(:mod:`~lm_from_scratch.attention.pooling`):

=================================  ====================================================
``sliding_attention``              the window alone
``heavily_compressed_attention``   and an entry for each 128 tokens, all of them
``compressed_sparse_attention``    and an entry for each 4, overlapping, of which an
                                   :mod:`~lm_from_scratch.attention.indexer` chooses 512
=================================  ====================================================

Values are turned as keys are, since they are the same, so the result of a head is turned back at
the query's position; what is left depends on distances alone. Heads have sinks, and their results
are projected in groups, first each group to a few features, then all together.

The residual stream is n streams (:mod:`~lm_from_scratch.layers.hyper_connections`). Experts are
scored by the root of a softplus; in the first layers a table says which experts a *token id*
visits, and the scores are weights alone. Gates and values of experts are clamped.

Shapes: B batch, T tokens, S keys, N entries, C = n_embd, H = n_head, D = head_dim, R features of
the query's latent, G groups of heads, n streams, E experts.

Source: DeepSeek-AI, *DeepSeek-V4*, 2026, and its code in ``transformers``.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lm_from_scratch.attention.sinks import SinkLayer, sink_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.compressed import side_by_side
from lm_from_scratch.cache.interface import NO_CACHE, Cache, LayerCache, check_cache
from lm_from_scratch.layers.embedding import embedded
from lm_from_scratch.layers.experts import Experts, Router, SharedExperts, TopK
from lm_from_scratch.layers.gated_mlp import GatedMLP, clamped
from lm_from_scratch.layers.hash_routing import HashRouter, ScoreRouter
from lm_from_scratch.layers.hyper_connections import (
    HyperConnection,
    HyperHead,
    collapse,
    connect,
    unweighted_rms_norm,
)
from lm_from_scratch.layers.linear import GroupedLinear
from lm_from_scratch.layers.norm import RMSNorm
from lm_from_scratch.layers.rope import RotaryEmbedding, Theta
from lm_from_scratch.limits import (
    Computed,
    Count,
    Positive,
    TokenId,
    TokenIds,
    multiple_of,
)
from lm_from_scratch.models.compressor import Compressor, EntryIndexer, Rotation, turn
from lm_from_scratch.models.qwen2 import SLIDING, Qwen2Config, Qwen2ForCausalLM, Qwen2Model

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
HASHED, SCORED = "hash_moe", "moe"  # how a layer's tokens find their experts


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config(Qwen2Config):
    """The numbers that define a DeepSeek-V4. The defaults have the shape of the published Flash;
    what does not stand here is as in Qwen2, and ``rope_scaling`` for layers that pool alone."""

    vocab_size: Count = 129280
    block_size: Count = 1048576
    n_layer: Count = 43
    n_head: Count = 64
    n_kv_head: Computed = 1
    n_embd: Count = 4096
    head_dim: Computed = 512
    partial_rotary_factor: Positive = 64 / 512  # of the features of a head, the last ones
    q_lora_rank: Count = 1024
    o_groups: Count = 8
    o_lora_rank: Count = 1024  # features that a group of heads becomes
    qkv_bias: bool = False
    sliding_window: Count = 128  # in every layer
    layer_types: tuple[str, ...] | None = None  # None: two heavy, then sparse and heavy in turn
    sparse_rate: Count = 4  # tokens of a block in sparse layers,
    heavy_rate: Count = 128  # and in heavy ones
    index_n_heads: Count = 64
    index_head_dim: Count = 128
    index_topk: Count = 512  # entries that a query of a sparse layer sees
    rope_theta: Theta = 10000.0  # of layers that slide
    compress_rope_theta: Theta = 160000.0  # of the others
    hc_mult: Count = 4  # residual streams
    hc_sinkhorn_iters: Count = 20
    hc_eps: Positive = 1e-6
    mlp_layer_types: tuple[str, ...] | None = None  # None: three by hash, the others by score
    n_expert: Count = 256
    top_k: TopK = 6  # experts that a token visits, beside the shared one
    expert_size: Count = 2048
    routed_scaling_factor: Positive = 1.5
    swiglu_limit: Positive = 10.0
    tie_word_embeddings: bool = False
    bos_token_id: TokenId | None = 0
    eos_token_id: TokenIds | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_kv_head != 1:
            raise ValueError(
                f"n_kv_head={self.n_kv_head} is not supported: all heads share one key"
            )
        multiple_of("o_groups").check("n_head", vars(self))
        share, R = self.partial_rotary_factor, self.rotary_dim
        if R < 2 or R % 2 or min(self.head_dim, self.index_head_dim) < R:
            raise ValueError(
                f"partial_rotary_factor={share} of head_dim={self.head_dim} is {R} features: they "
                f"turn in pairs, and index_head_dim={self.index_head_dim} must have as many"
            )

    def _check_layers(self) -> None:
        n = self.n_layer
        kinds = (HEAVY, HEAVY, *(SPARSE if i % 2 else HEAVY for i in range(n)))
        routes = (*[HASHED] * 3, *[SCORED] * n)
        known = (SLIDING, SPARSE, HEAVY), (HASHED, SCORED)
        names = "layer_types", "mlp_layer_types"
        for name, default, words in zip(names, (kinds, routes), known):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default[:n])
            given = getattr(self, name)
            if type(given) is not tuple or len(given) != n:
                raise ValueError(f"{name}={given!r} must be a tuple of n_layer={n}")
            if unknown := {*given} - {*words}:
                raise ValueError(f"{name} has {sorted(unknown)}, not only {words}")

    @property
    def windows(self) -> list[int | None]:
        """Every layer slides; what some see beside the window is no key of one token."""
        return [self.sliding_window] * self.n_layer

    @property
    def kinds(self) -> list[str]:
        """The word of each layer in a published config."""
        return list(self.layer_types or ())

    @property
    def routes(self) -> list[str]:
        """How the tokens of each layer find their experts."""
        return list(self.mlp_layer_types or ())

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """What a cache is given of a token in a layer: one vector, which is key and value."""
        return 1, self.head_dim, 0

    @property
    def rotary_dim(self) -> int:
        """How many features of a head are turned: the last ones."""
        return int(self.head_dim * self.partial_rotary_factor)


#: Published sizes: what differs from the defaults.
SIZES: dict[str, dict[str, int]] = {
    "DeepSeek-V4-Flash": {},
    "DeepSeek-V4-Pro": dict(n_layer=61, n_head=128, n_embd=7168, o_groups=16),
}


def compress_rotary(config: DeepseekV4Config) -> RotaryEmbedding:
    """The rotation of layers that pool: of their queries, keys and entries."""
    return RotaryEmbedding(config.rotary_dim, config.compress_rope_theta, config.rope_scaling)


def compressor(config: DeepseekV4Config, kind: str) -> Compressor | None:
    """What makes entries in a layer of that kind."""
    C, eps = config.n_embd, config.rms_norm_eps
    wide = config.head_dim, eps, compress_rotary(config)
    if kind == SLIDING:
        return None
    if kind == HEAVY:
        return Compressor(C, config.heavy_rate, *wide)
    size, J, few = config.sparse_rate, config.index_n_heads, config.index_topk
    indexer = EntryIndexer(C, size, config.index_head_dim, eps, config.q_lora_rank, J, few)
    return Compressor(C, size, *wide, indexer)


class Attention(SinkLayer):
    """Causal self-attention of ``x`` (B, T, C), in which a vector of each token is key and value of
    all heads: those in the window, and the entries that a ``compressor`` makes of all tokens."""

    def __init__(self, config: DeepseekV4Config, kind: str) -> None:
        super().__init__()
        C, H, D, R = config.n_embd, config.n_head, config.head_dim, config.q_lora_rank
        G, self.eps, self.head_dim = config.o_groups, config.rms_norm_eps, D
        self.q_a_proj = nn.Linear(C, R, bias=False)
        self.q_a_norm = RMSNorm(R, self.eps)
        self.q_b_proj = nn.Linear(R, H * D, bias=False)
        self.kv_proj = nn.Linear(C, D, bias=False)
        self.kv_norm = RMSNorm(D, self.eps)
        self.o_a_proj = GroupedLinear(G, H * D // G, config.o_lora_rank)
        self.o_b_proj = nn.Linear(G * config.o_lora_rank, C, bias=False)
        self.sinks = nn.Parameter(torch.zeros(H))
        self.compressor = compressor(config, kind)
        self.attention_dropout = config.attention_dropout
        self.compute = sink_attention

    def forward(
        self, x: Tensor, rotation: Rotation, visibility: Visibility, cache: LayerCache
    ) -> Tensor:
        B, T, _ = x.shape
        latent = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_proj(latent).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, D)
        q = turn(unweighted_rms_norm(q, self.eps), *rotation)
        kv = turn(self.kv_norm(self.kv_proj(x))[:, None], *rotation)  # (B, 1, T, D)
        if self.compressor is None:
            kv, _ = cache.update(kv, kv[..., :0])
        else:
            entries, seen = self.compressor(x, latent, rotation, visibility, cache)
            kv, _ = cache.update(kv, kv[..., :0])
            kv = torch.cat([kv, entries[:, None]], dim=2)  # (B, 1, S + N, D)
            visibility = side_by_side(visibility, seen)
        y = self.attend(q, kv, kv, visibility, self.attention_dropout if self.training else 0.0)
        cos, sin = rotation
        y = turn(y, cos, -sin).transpose(1, 2).reshape(B, T, self.o_a_proj.n_group, -1)
        return self.o_b_proj(self.o_a_proj(y).flatten(2))


def mixture(config: DeepseekV4Config, route: str) -> SharedExperts:
    """The experts of a layer whose tokens find them by that ``route``."""
    C, E, F, act = config.n_embd, config.n_expert, config.expert_size, config.activation
    k, scale = config.top_k, config.routed_scaling_factor
    gate: Router = HashRouter(C, E, k, config.vocab_size, scale)
    if route == SCORED:
        gate = ScoreRouter(C, E, k, scale=scale)
    experts, shared = Experts(E, C, F, act), GatedMLP(C, F, act)
    for part in (experts, shared):
        part.product = partial(clamped, part.product, config.swiglu_limit)
    return SharedExperts(gate, experts, shared)


class Block(nn.Module):
    """One layer of the ``streams`` (B, T, n, C): attention and the experts each read them, and
    write their result to them. ``idx`` (B, T) are the ids of the tokens."""

    def __init__(self, config: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        C, n, eps = config.n_embd, config.hc_mult, config.rms_norm_eps
        self.self_attn = Attention(config, config.kinds[layer])
        self.mlp = mixture(config, config.routes[layer])
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(C, eps), RMSNorm(C, eps)
        rounds = config.hc_sinkhorn_iters, config.hc_eps, eps
        self.attn_hc, self.ffn_hc = (HyperConnection(C, n, *rounds) for _ in range(2))

    def forward(
        self,
        streams: Tensor,
        rotation: Rotation,
        visibility: Visibility,
        idx: Tensor,
        cache: LayerCache,
    ) -> Tensor:
        mix = self.attn_hc(streams)
        x = self.input_layernorm(collapse(streams, mix.read))
        streams = connect(streams, self.self_attn(x, rotation, visibility, cache), mix)
        mix = self.ffn_hc(streams)
        x = self.post_attention_layernorm(collapse(streams, mix.read))
        return connect(streams, self.mlp(x, idx.flatten()), mix)


class DeepseekV4Model(Qwen2Model):
    """From token ids to hidden states: everything but the head."""

    config: DeepseekV4Config

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__(config)
        self.rotary_emb = RotaryEmbedding(config.rotary_dim, config.rope_theta)
        self.compress_rotary_emb = compress_rotary(config)
        self.hc_head = HyperHead(config.n_embd, config.hc_mult, config.hc_eps, config.rms_norm_eps)

    def block(self, layer: int) -> nn.Module:
        return Block(self.config, layer)

    @torch.no_grad()
    def init_weights(self) -> None:
        """As in Qwen2. Scales are 1; sinks and what is added to scores and gates is 0."""
        super().init_weights()
        for name, parameter in self.named_parameters():
            if name.endswith(("sinks", "base", "position_bias")):
                parameter.zero_()

    def forward(
        self,
        idx: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache = NO_CACHE,
    ) -> Tensor:
        """Hidden states (B, T, C), after the last norm, of the token ids ``idx`` (B, T) at
        ``positions`` and in ``documents`` (B, T), as
        :class:`~lm_from_scratch.models.qwen2.Qwen2Model` has them. Raises ``ValueError`` for
        embeddings where a layer finds its experts by token id."""
        x, config = embedded(idx, self.embed_tokens), self.config
        if idx.is_floating_point() and HASHED in config.routes:
            raise ValueError(f"embeddings have no token ids, by which {HASHED} finds its experts")
        check_cache(cache)
        seen = cache.see(x, positions, documents, config.windows)
        rotate = {SLIDING: self.rotary_emb, SPARSE: self.compress_rotary_emb}
        rotations = {k: of(seen[0].query_positions, x.dtype) for k, of in rotate.items()}
        rotations[HEAVY] = rotations[SPARSE]
        streams = x[:, :, None].expand(-1, -1, config.hc_mult, -1)  # all alike
        for layer, (block, kind) in enumerate(zip(self.layers, config.kinds, strict=True)):
            streams = block(streams, rotations[kind], seen[layer], idx, cache[layer])
        return self.norm(self.hc_head(streams))


class DeepseekV4ForCausalLM(Qwen2ForCausalLM):
    """DeepSeek-V4 with its language-model head, tied or not."""

    backbone_class = DeepseekV4Model  # type: ignore[assignment]
