r"""Layers that read the keys of an earlier layer, and an embedding for every layer: Gemma 4's two
ways to spend less memory where it is dear, in a decoder like Qwen3.

*Shared keys.* The last ``kv_shared_layers`` layers have queries and no keys. Each reads those that
the last layer of its kind before them (full or sliding) keeps. A cache has no place for them: its
layers are those with keys, ``len(config.windows)`` of them.

*Per-layer embeddings.* A second table has a row of P numbers for each token and layer. It is looked
up, never multiplied, and may stay on a disk. A gate says how much of each number a layer adds:

.. math::

   p_l &= \tfrac{1}{\sqrt 2} \bigl(\mathrm{RMSNorm}(W_l\, x_0 / \sqrt{C})
   + \sqrt{P}\, E_l[\text{token}]\bigr) \\
   x &\leftarrow x + \mathrm{RMSNorm}\bigl(W_{out}(\mathrm{gelu}(W_{gate}\, x) \odot p_l)\bigr)

Shapes: B batch, T tokens, S keys, C = n_embd, H = n_head, Hkv = n_kv_head, D = head_dim,
L = n_layer, P = per_layer_width.

Sources: the code of Gemma 4 in ``transformers``; Brandon et al., *Reducing Transformer Key-Value
Cache Size with Cross-Layer Attention*, 2024, arXiv:2405.12981.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.attention.layer import AttentionLayer
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import NO_CACHE, Cache, LayerCache, check_cache
from lm_from_scratch.layers.embedding import embedded
from lm_from_scratch.layers.gated_mlp import GatedMLP
from lm_from_scratch.layers.norm import RMSNorm
from lm_from_scratch.layers.rope import Rotate, apply_rope
from lm_from_scratch.limits import Whole
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2ForCausalLM, Qwen2Model
from lm_from_scratch.models.qwen3 import Qwen3Config

KeysAndValues = tuple[Tensor, Tensor]


def sources(kinds: Sequence[str], shared: int) -> list[int]:
    """Of each layer the number of the layer whose keys it reads: its own, and for the last
    ``shared`` layers the last of its kind before them. Raises ``ValueError`` where there is none.
    """
    first = len(kinds) - shared
    if not 0 <= shared < len(kinds) or not set(kinds) <= set(kinds[:first]):
        raise ValueError(
            f"{shared} of the layers {list(kinds)} cannot share keys: the first {max(first, 0)} "
            f"must have each kind"
        )
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    return [layer if layer < first else last[kind] for layer, kind in enumerate(kinds)]


def log_scale(positions: Tensor, floor: int = 8192, strength: float = 0.1) -> Tensor:
    r"""What queries at ``positions`` (B, T) are multiplied by, (B, 1, T, 1): :math:`1 + s \log(1 +
    \lfloor (t + 1) / f \rfloor)`, as in Llama 4. More keys make softmax flatter; a query that
    grows with their logarithm stays as sharp. Up to position f - 2 nothing changes."""
    steps = torch.floor((positions[:, None, :, None] + 1) / floor)
    return 1.0 + strength * torch.log1p(steps)


@dataclass(frozen=True, kw_only=True)
class SharedConfig(Qwen3Config):
    """A Qwen3's numbers, and how many layers share keys and how wide a layer's embedding is."""

    kv_shared_layers: Whole = 0
    per_layer_width: Whole = 0  # 0: none

    def __post_init__(self) -> None:
        super().__post_init__()
        sources(self.kinds, self.kv_shared_layers)

    @property
    def sources(self) -> list[int]:
        """Of each layer the number of the layer whose keys it reads."""
        return sources(self.kinds, self.kv_shared_layers)

    @property
    def kinds(self) -> list[str]:
        return [FULL if window is None else SLIDING for window in super().windows]

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer with keys of its own, which are the layers of a cache."""
        return super().windows[: self.n_layer - self.kv_shared_layers]


class Attention(AttentionLayer):
    """Causal self-attention of ``x`` (B, T, C). A layer that ``shares`` has no keys of its own: it
    is ``given`` those of another, (B, Hkv, S, D) each. What was read comes back with the result."""

    rotate: Rotate

    def __init__(self, config: SharedConfig, shares: bool) -> None:
        super().__init__()
        C, D = config.n_embd, config.head_dim
        self.head_dim = D
        self.q_proj = nn.Linear(C, config.n_head * D, config.qkv_bias)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        if not shares:
            self.k_proj = nn.Linear(C, config.n_kv_head * D, config.qkv_bias)
            self.v_proj = nn.Linear(C, config.n_kv_head * D, config.qkv_bias)
            self.k_norm = RMSNorm(D, config.rms_norm_eps)
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
        cache: LayerCache,
        given: KeysAndValues | None,
    ) -> tuple[Tensor, KeysAndValues]:
        q = self.rotate(self.q_norm(self.heads(self.q_proj(x))), *rotation)
        if given is None:
            k = self.rotate(self.k_norm(self.heads(self.k_proj(x))), *rotation)
            given = cache.update(k, self.heads(self.v_proj(x)))
        y = self.attend(q, *given, visibility, self.attention_dropout if self.training else 0.0)
        return self.o_proj(y.transpose(1, 2).flatten(2)), given


class PerLayerEmbedding(nn.Module):
    """What every layer is told of a token, (B, T, L, P), from its id ``idx`` (B, T) and its
    embedding ``x`` (B, T, C)."""

    def __init__(self, config: SharedConfig) -> None:
        super().__init__()
        L, P = config.n_layer, config.per_layer_width
        self.shape = L, P
        self.table = nn.Embedding(config.vocab_size, L * P)
        self.projection = nn.Linear(config.n_embd, L * P, bias=False)
        self.norm = RMSNorm(P, config.rms_norm_eps)

    def forward(self, idx: Tensor, x: Tensor) -> Tensor:
        of_token = self.table(idx).unflatten(-1, self.shape) * math.sqrt(self.shape[1])
        projected = (self.projection(x) / math.sqrt(x.shape[-1])).unflatten(-1, self.shape)
        return (self.norm(projected) + of_token) / math.sqrt(2)


class PerLayerInput(nn.Module):
    """What a layer adds to ``x`` (B, T, C) of its part ``p`` (B, T, P) of those embeddings."""

    def __init__(self, config: SharedConfig) -> None:
        super().__init__()
        C, P = config.n_embd, config.per_layer_width
        self.gate = nn.Linear(C, P, bias=False)
        self.projection = nn.Linear(P, C, bias=False)
        self.norm = RMSNorm(C, config.rms_norm_eps)

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        return self.norm(self.projection(F.gelu(self.gate(x), approximate="tanh") * p))


class Block(nn.Module):
    """One layer of ``x`` (B, T, C): attention, an MLP, and what it is told of the token."""

    def __init__(self, config: SharedConfig, shares: bool) -> None:
        super().__init__()
        C, eps = config.n_embd, config.rms_norm_eps
        self.input_layernorm = RMSNorm(C, eps)
        self.self_attn = Attention(config, shares)
        self.post_attention_layernorm = RMSNorm(C, eps)
        self.mlp = GatedMLP(C, config.intermediate_size, config.activation)
        self.per_layer_input = PerLayerInput(config) if config.per_layer_width else None

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        visibility: Visibility,
        cache: LayerCache,
        given: KeysAndValues | None = None,
        p: Tensor | None = None,
    ) -> tuple[Tensor, KeysAndValues]:
        y, read = self.self_attn(self.input_layernorm(x), rotation, visibility, cache, given)
        x = x + y
        x = x + self.mlp(self.post_attention_layernorm(x))
        if self.per_layer_input is not None and p is not None:
            x = x + self.per_layer_input(x, p)
        return x, read


class SharedModel(Qwen2Model):
    """From token ids to hidden states: everything but the head."""

    config: SharedConfig

    def __init__(self, config: SharedConfig) -> None:
        super().__init__(config)
        if config.per_layer_width:
            self.per_layer = PerLayerEmbedding(config)
        self.init_weights()

    def block(self, layer: int) -> nn.Module:
        return Block(self.config, shares=self.config.sources[layer] != layer)

    def forward(
        self,
        idx: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache = NO_CACHE,
    ) -> Tensor:
        """Hidden states (B, T, C) of the token ids ``idx`` (B, T), at ``positions`` and in
        ``documents`` (B, T). Embeddings in their place have no rows in the second table: raises
        ``ValueError`` where there is one."""
        x = embedded(idx, self.embed_tokens)
        check_cache(cache)
        if self.config.per_layer_width and idx.is_floating_point():
            raise ValueError("embeddings for every layer need token ids")
        told = self.per_layer(idx, x).unbind(2) if self.config.per_layer_width else None
        seen = cache.see(x, positions, documents, self.config.windows)
        rotation = self.rotary_emb(seen[0].query_positions, x.dtype)
        read: dict[int, KeysAndValues] = {}
        later = {*self.config.sources[len(self.config.windows) :]} - {len(self.config.windows) - 1}
        for layer, (block, source) in enumerate(zip(self.layers, self.config.sources, strict=True)):
            x, read[layer] = block(
                x, rotation, seen[source], cache[source], read.get(source), told and told[layer]
            )
            if layer in later and cache is not NO_CACHE:  # which may write over them
                read[layer] = read[layer][0].clone(), read[layer][1].clone()
        return self.norm(x)


class SharedForCausalLM(Qwen2ForCausalLM):
    """The model with its language-model head, tied or not."""

    backbone_class = SharedModel  # type: ignore[assignment]
