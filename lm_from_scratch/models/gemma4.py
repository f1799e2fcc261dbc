r"""Gemma 4, complete in one file: Gemma 3 that keeps less of a text, and a table beside its layers.

The skeleton is Gemma 3's: norms on both sides of attention and MLP, layers that slide among layers
that see everything, a theta for each kind. The norms are plain again, and what follows is new.

* *Two widths.* Layers that see everything have wider heads, and may have fewer keys. Their *keys
  may be values, too*: one product with a matrix makes both, of which the key is normalised with
  weights and turned, the value normalised alone.
* *Shared keys.* The last ``kv_shared_layers`` layers have queries and no keys: each reads those of
  the last layer of its kind before them. A cache has no place for them.
* *Per-layer embeddings.* A second table has P numbers of a token for each layer. It is looked up,
  never multiplied, and may stay on a disk. A gate says how much of each number a layer adds:

  .. math::

     p_l &= \tfrac{1}{\sqrt 2} \bigl(\mathrm{RMSNorm}(W_l\, x_0 / \sqrt{C})
     + \sqrt{P}\, E_l[\text{token}]\bigr) \\
     x &\leftarrow x + \mathrm{RMSNorm}\bigl(W_{out}(\mathrm{gelu}(W_{gate}\, x) \odot p_l)\bigr)

* Scores are not divided by :math:`\sqrt{D}`: the weights of the norms before them say how large
  they are. Where all is seen, a quarter of the pairs turns. What leaves a layer is multiplied by a
  number of that layer, which is not trained.

Names of modules are those of the checkpoints. Shapes: B batch, T tokens, S keys, C = n_embd,
H = n_head, Hkv key heads and D features of a head in that kind of layer, L = n_layer,
P = per_layer_width.

Sources: Google's models (2026) and their code in ``transformers``; Brandon et al., *Reducing
Transformer Key-Value Cache Size with Cross-Layer Attention*, 2024, arXiv:2405.12981.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.attention.layer import AttentionLayer
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import NO_CACHE, Cache, LayerCache, check_cache
from lm_from_scratch.layers.activation import Activation
from lm_from_scratch.layers.embedding import embedded
from lm_from_scratch.layers.gated_mlp import PRODUCTS, GatedMLP
from lm_from_scratch.layers.norm import RMSNorm, fast_rms_norm
from lm_from_scratch.layers.rope import RopeScaling, RotaryEmbedding, Rotate, Theta, apply_rope
from lm_from_scratch.layers.rope_scaling import ProportionalScaling
from lm_from_scratch.limits import (
    Computed,
    Count,
    Positive,
    Share,
    TokenId,
    TokenIds,
    Whole,
    multiple_of,
)
from lm_from_scratch.models.gemma3 import Gemma3ForCausalLM, ScaledEmbedding
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config, Qwen2Model

#: Of each kind of layer the keys and values that later layers read, (B, Hkv, S, D) each.
Kept = dict[str, tuple[Tensor, Tensor]]


#: Of all published models: a quarter of the pairs turns.
QUARTER = ProportionalScaling(partial_rotary_factor=0.25)


def sources(kinds: Sequence[str], shared: int) -> list[int]:
    """Of each layer the number of the layer whose keys it reads: its own, and for the last
    ``shared`` layers the last of its kind before them. Raises ``ValueError`` where there is none.
    """
    first = len(kinds) - shared
    if not 0 <= shared < len(kinds) or not set(kinds) <= set(kinds[:first]):
        raise ValueError(
            f"{shared} of {len(kinds)} layers cannot share keys: the first {max(first, 0)} must "
            "have each kind"
        )
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    return [layer if layer < first else last[kind] for layer, kind in enumerate(kinds)]


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(Qwen2Config):
    """The numbers that define a Gemma 4. The defaults are those of the smallest published one, E2B.
    ``layer_types`` says which layers slide; without it all but every fifth do, and the last does
    not. What is ``global`` is of layers that see everything. Qwen2's checks hold."""

    vocab_size: Count = 262144
    block_size: Count = 131072
    n_layer: Count = 35
    n_head: Annotated[Count, multiple_of("n_kv_head"), multiple_of("global_n_kv_head")] = 8
    n_kv_head: Computed = 1
    global_n_kv_head: Computed = None  # type: ignore[assignment]  # None becomes n_kv_head
    n_embd: Count = 1536
    intermediate_size: Count = 6144
    head_dim: Computed = 256
    global_head_dim: Count = 512
    keys_are_values: bool = False  # in layers that see everything
    kv_shared_layers: Whole = 20
    wide_shared_mlp: bool = True  # whether the layers that share have an MLP of twice the width
    per_layer_width: Whole = 256  # 0: no second table
    per_layer_vocab_size: Count = 262144
    qkv_bias: bool = False
    activation: Activation = "gelu_pytorch_tanh"
    rms_norm_eps: Positive = 1e-6
    rope_theta: Theta = 1_000_000.0  # of layers that see everything
    rope_scaling: RopeScaling | None = QUARTER
    rope_local_theta: Theta = 10_000.0  # of layers that slide
    sliding_window: Count | None = 512
    layer_types: tuple[str, ...] | None = None
    max_window_layers: Whole | None = None
    final_logit_softcapping: Positive | None = 30.0  # c in c tanh(logit / c)
    tie_word_embeddings: bool = True
    attention_dropout: Share = 0.0
    initializer_range: Positive = 0.02
    pad_token_id: TokenId | None = 0
    bos_token_id: TokenId | None = 2
    eos_token_id: TokenIds | None = 1

    def _check_layers(self) -> None:
        if self.layer_types is None:
            object.__setattr__(self, "layer_types", all_but_every(5, self.n_layer))
        if getattr(self, "global_n_kv_head") is None:  # noqa: B009
            object.__setattr__(self, "global_n_kv_head", self.n_kv_head)
        if self.global_head_dim % 2:
            raise ValueError(
                f"global_head_dim={self.global_head_dim} is odd: rotation works on pairs"
            )
        super()._check_layers()
        sources(self.kinds, self.kv_shared_layers)

    @property
    def kinds(self) -> list[str]:
        return list(self.layer_types or ())

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer with keys of its own, which are the layers of a cache."""
        return super().windows[: self.n_layer - self.kv_shared_layers]

    @property
    def sources(self) -> list[int]:
        """Of each layer the number of the layer whose keys it reads."""
        return sources(self.kinds, self.kv_shared_layers)

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """As in Qwen2. Raises ``ValueError`` where the two kinds of layers differ."""
        shapes = {self.key_shape(kind) for kind in self.kinds}
        if len(shapes) > 1:
            raise ValueError(
                f"layers keep {sorted(shapes)} (key heads, features), and the blocks of a pool are "
                "alike in all layers"
            )
        heads, D = shapes.pop()
        return heads, D, D

    def key_shape(self, kind: str) -> tuple[int, int]:
        """The key heads of a layer of that kind, and their features."""
        if kind == SLIDING:
            return self.n_kv_head, self.head_dim
        return self.global_n_kv_head, self.global_head_dim


def all_but_every(interval: int, n_layer: int) -> tuple[str, ...]:
    """The kinds of so many layers: all slide but each ``interval``-th, and the last."""
    return *(SLIDING if n % interval else FULL for n in range(1, n_layer)), FULL


_LARGE: dict[str, Any] = dict(
    kv_shared_layers=0, wide_shared_mlp=False, per_layer_width=0, sliding_window=1024,
    keys_are_values=True, block_size=262144,
)  # fmt: skip
#: Published sizes: what differs from the defaults.
SIZES: dict[str, dict[str, Any]] = {
    "Gemma-4-E2B": {},
    "Gemma-4-E4B": dict(
        n_layer=42, layer_types=all_but_every(6, 42), n_kv_head=2, n_embd=2560,
        intermediate_size=10240, kv_shared_layers=18, wide_shared_mlp=False,
    ),
    "Gemma-4-31B": _LARGE | dict(
        n_layer=60, layer_types=all_but_every(6, 60), n_head=32, n_kv_head=16, global_n_kv_head=4,
        n_embd=5376, intermediate_size=21504,
    ),
}  # fmt: skip


def late_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x`` (..., C), times the ``weight`` (C,). Half precision is rounded after the
    product."""
    work = torch.promote_types(x.dtype, torch.float32)
    return fast_rms_norm(x.to(work), weight.to(work), eps).to(x.dtype)


class Norm(RMSNorm):
    """:func:`late_rms_norm` of ``x`` (..., C)."""

    def __init__(self, n_embd: int, eps: float) -> None:
        super().__init__(n_embd, eps)
        self.normalise = late_rms_norm


class Attention(AttentionLayer):
    """Causal self-attention of ``x`` (B, T, C). A layer that shares has no keys of its own: it
    finds those of another among what is ``kept``, where the others leave theirs."""

    rotate: Rotate

    def __init__(self, config: Gemma4Config, layer: int) -> None:
        super().__init__()
        C, eps, self.kind = config.n_embd, config.rms_norm_eps, config.kinds[layer]
        Hkv, D = config.key_shape(self.kind)
        self.head_dim, self.eps = D, eps
        self.q_proj = nn.Linear(C, config.n_head * D, config.qkv_bias)
        self.q_norm = Norm(D, eps)
        own = len(config.windows)
        self.shares, self.lends = layer >= own, layer in config.sources[own:]
        if not self.shares:
            self.k_proj = nn.Linear(C, Hkv * D, config.qkv_bias)
            self.k_norm = Norm(D, eps)
            if self.kind == SLIDING or not config.keys_are_values:
                self.v_proj = nn.Linear(C, Hkv * D, config.qkv_bias)
        self.o_proj = nn.Linear(config.n_head * D, C, config.o_bias)
        self.attention_dropout = config.attention_dropout
        self.attend = sdpa_attention
        self.rotate = apply_rope

    def heads(self, x: Tensor) -> Tensor:
        """The heads (B, H or Hkv, T, D) of ``x`` (B, T, H * D or Hkv * D)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        visibility: Visibility,
        kept: Kept,
        cache: LayerCache,
    ) -> Tensor:
        q = self.rotate(self.q_norm(self.heads(self.q_proj(x))), *rotation)
        q = q * math.sqrt(self.head_dim)  # attend divides by it
        if self.shares:
            k, v = kept[self.kind]
        else:
            k = self.heads(self.k_proj(x))
            v = self.heads(self.v_proj(x)) if hasattr(self, "v_proj") else k
            v = F.rms_norm(v, v.shape[-1:], eps=self.eps)
            k, v = cache.update(self.rotate(self.k_norm(k), *rotation), v)  # (B, Hkv, S, D)
        if self.lends:  # a cache may write over what it gave
            kept[self.kind] = (k, v) if cache is NO_CACHE else (k.clone(), v.clone())
        y = self.attend(q, k, v, visibility, self.attention_dropout if self.training else 0.0)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One layer of ``x`` (B, T, C), told ``p`` (B, T, P) of its tokens by the second table."""

    layer_scalar: Tensor

    def __init__(self, config: Gemma4Config, layer: int) -> None:
        super().__init__()
        C, P, eps = config.n_embd, config.per_layer_width, config.rms_norm_eps
        self.input_layernorm = Norm(C, eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = Norm(C, eps)
        self.pre_feedforward_layernorm = Norm(C, eps)
        wide = config.wide_shared_mlp and self.self_attn.shares
        width = config.intermediate_size * (2 if wide else 1)
        self.mlp = GatedMLP(C, width, config.activation)
        self.post_feedforward_layernorm = Norm(C, eps)
        if P:
            self.per_layer_input_gate = nn.Linear(C, P, bias=False)
            self.per_layer_projection = nn.Linear(P, C, bias=False)
            self.post_per_layer_input_norm = Norm(C, eps)
            self.product = PRODUCTS[config.activation]
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        visibility: Visibility,
        kept: Kept,
        p: Tensor | None,
        cache: LayerCache,
    ) -> Tensor:
        y = self.self_attn(self.input_layernorm(x), rotation, visibility, kept, cache)
        x = x + self.post_attention_layernorm(y)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        if p is not None:
            told = self.per_layer_projection(self.product(self.per_layer_input_gate(x), p))
            x = x + self.post_per_layer_input_norm(told)
        return x * self.layer_scalar


class Gemma4Model(Qwen2Model):
    """From token ids to hidden states: everything but the head."""

    config: Gemma4Config

    def __init__(self, config: Gemma4Config) -> None:
        nn.Module.__init__(self)  # every part is built here
        C, L, P = config.n_embd, config.n_layer, config.per_layer_width
        self.config = config
        self.embed_tokens = ScaledEmbedding(config.vocab_size, C)
        if P:
            self.embed_tokens_per_layer = nn.Embedding(config.per_layer_vocab_size, L * P)
            self.per_layer_model_projection = nn.Linear(C, L * P, bias=False)
            self.per_layer_projection_norm = Norm(P, config.rms_norm_eps)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(L))
        self.norm = Norm(C, config.rms_norm_eps)
        self.rotary_embs = nn.ModuleDict({
            FULL: RotaryEmbedding(config.global_head_dim, config.rope_theta, config.rope_scaling),
            SLIDING: RotaryEmbedding(config.head_dim, config.rope_local_theta),
        })  # fmt: skip
        self.init_weights()

    def told(self, idx: Tensor, x: Tensor) -> Sequence[Tensor | None]:
        """What each layer is told of the tokens, L times (B, T, P): of their ids ``idx`` (B, T),
        and of their embeddings ``x`` (B, T, C). Raises ``ValueError`` where there are no ids."""
        C, L, P = self.config.n_embd, self.config.n_layer, self.config.per_layer_width
        if not P:
            return [None] * L
        if idx.is_floating_point():
            raise ValueError("embeddings have no token ids, which the table of each layer needs")
        rows = embedded(idx, self.embed_tokens_per_layer)
        rows = rows * torch.full((), math.sqrt(P), dtype=rows.dtype, device=rows.device)
        projected = self.per_layer_model_projection(x) * C**-0.5
        projected = self.per_layer_projection_norm(projected.unflatten(-1, (L, P)))
        return ((projected + rows.unflatten(-1, (L, P))) * 2**-0.5).unbind(2)

    def forward(
        self,
        idx: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache = NO_CACHE,
    ) -> Tensor:
        """Hidden states (B, T, C) of the token ids ``idx`` (B, T), at ``positions`` and in
        ``documents`` (B, T). Without a second table ``idx`` may be embeddings (B, T, C), which are
        not multiplied by the root."""
        x = embedded(idx, self.embed_tokens)
        check_cache(cache)
        told = self.told(idx, x)
        seen = cache.see(x, positions, documents, self.config.windows)
        rotations = {
            kind: rotary(seen[0].query_positions, x.dtype)
            for kind, rotary in self.rotary_embs.items()
        }
        kept: Kept = {}
        layers = zip(self.layers, self.config.kinds, self.config.sources, told, strict=True)
        for block, kind, source, p in layers:
            x = block(x, rotations[kind], seen[source], kept, p, cache[source])
        return self.norm(x)


class Gemma4ForCausalLM(Gemma3ForCausalLM):
    """Gemma 4 with its language-model head, tied or not, whose logits may be capped."""

    backbone_class = Gemma4Model  # type: ignore[assignment]
