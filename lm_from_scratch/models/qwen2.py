r"""Qwen2, complete in one file: config, attention, block, model, head.

The skeleton is GPT-2's, with other parts. Positions enter by rotating queries and keys, not by an
embedding; the norms do not subtract a mean; the MLP is gated; several query heads share one key and
value head; and a layer may see the latest keys alone, through a sliding window:

.. math::

   x &\leftarrow x + \mathrm{Attention}(\mathrm{RMSNorm}(x)) \\
   x &\leftarrow x + \mathrm{GatedMLP}(\mathrm{RMSNorm}(x))

Submodules carry the names of the published checkpoints (``embed_tokens``, ``q_proj``, ...), so
weights load by name. Shapes: B batch, T tokens, S keys, C = n_embd, H = n_head, Hkv = n_kv_head,
D = head_dim, V = vocab_size.

Source: Yang et al., *Qwen2 Technical Report*, 2024, arXiv:2407.10671.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from lm_from_scratch.attention.layer import AttentionLayer
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import NO_CACHE, Cache, LayerCache, check_cache
from lm_from_scratch.layers.activation import Activation
from lm_from_scratch.layers.embedding import embedded
from lm_from_scratch.layers.gated_mlp import GatedMLP
from lm_from_scratch.layers.head import Head, TiedHead, columns
from lm_from_scratch.layers.norm import RMSNorm
from lm_from_scratch.layers.rope import RopeScaling, RotaryEmbedding, Rotate, Theta, apply_rope
from lm_from_scratch.limits import (
    Computed,
    Count,
    Positive,
    Share,
    TokenId,
    TokenIds,
    Whole,
    check,
    multiple_of,
)
from lm_from_scratch.models.interface import CausalLM

FULL, SLIDING = "full_attention", "sliding_attention"  # the words of published configs


@dataclass(frozen=True, kw_only=True)
class Qwen2Config:
    """The numbers that define a Qwen2. The defaults have the shape of the smallest published one.

    Which layers slide is said by ``layer_types``, one word for each layer, or by
    ``max_window_layers``: layers with that index *and above* slide (the first releases of the code
    had it the other way round). A layer that slides sees ``sliding_window`` keys, its own included.
    """

    vocab_size: Count = 151936
    block_size: Count = 32768  # the length it was trained for; rotation itself has no limit
    n_layer: Count = 24
    n_head: Annotated[Count, multiple_of("n_kv_head")] = 14
    n_kv_head: Computed = 2  # heads that keys and values have (None becomes n_head)
    n_embd: Count = 896
    intermediate_size: Count = 4864
    head_dim: Computed = None  # type: ignore[assignment]  # None becomes n_embd / n_head
    qkv_bias: bool = True  # Llama, Mistral and Qwen3 have none
    o_bias: bool = False  # nor does the map behind attention; files may say otherwise
    mlp_bias: bool = False
    activation: Activation = "silu"
    rms_norm_eps: Positive = 1e-6
    rope_theta: Theta = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: Count | None = None
    layer_types: tuple[str, ...] | None = None
    max_window_layers: Whole | None = None
    tie_word_embeddings: bool = True
    attention_dropout: Share = 0.0
    initializer_range: Positive = 0.02
    pad_token_id: TokenId | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenIds | None = 151643

    def __post_init__(self) -> None:
        check(self)
        is_shared_out = getattr(self, "head_dim") is None  # noqa: B009
        if is_shared_out:
            needed = multiple_of("n_head", "; give head_dim if that is meant")
            needed.check("n_embd", vars(self))
        for name, value in (("n_kv_head", self.n_head), ("head_dim", self.n_embd // self.n_head)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.head_dim % 2:
            shares = f" = n_embd={self.n_embd} / n_head={self.n_head}" if is_shared_out else ""
            raise ValueError(f"head_dim={self.head_dim}{shares} is odd: rotation works on pairs")
        self._check_layers()

    def _check_layers(self) -> None:
        types, first = self.layer_types, self.max_window_layers
        if types is not None and first is not None:
            raise ValueError("layer_types and max_window_layers both say which layers slide")
        if types is not None:
            if type(types) is not tuple or len(types) != self.n_layer:
                raise ValueError(f"layer_types={types!r} must be a tuple of n_layer={self.n_layer}")
            if unknown := set(types) - {FULL, SLIDING}:
                raise ValueError(f"layer_types has {sorted(unknown)}, not {FULL!r} or {SLIDING!r}")
        if self.sliding_window is None and (first is not None or SLIDING in (types or ())):
            raise ValueError("layers that slide need a sliding_window")
        if self.sliding_window is not None and types is None and first is None:
            raise ValueError(
                f"sliding_window={self.sliding_window} needs layer_types or max_window_layers, "
                "which say for which layers it is"
            )

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer; ``None`` for one that sees everything before it."""
        if self.layer_types is not None:
            slides = [kind == SLIDING for kind in self.layer_types]
        elif self.max_window_layers is not None:
            slides = [layer >= self.max_window_layers for layer in range(self.n_layer)]
        else:
            slides = [False] * self.n_layer
        return [self.sliding_window if slide else None for slide in slides]

    @property
    def kinds(self) -> list[str]:
        """The word of each layer in a published config."""
        return [FULL if window is None else SLIDING for window in self.windows]

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """What a cache is given of a token in a layer: heads, the width of a key, of a value."""
        return self.n_kv_head, self.head_dim, self.head_dim

    @property
    def rotary_dim(self) -> int:
        """How many features of a head are turned: all."""
        return self.head_dim

    @property
    def position_limit(self) -> None:
        """No position is too high for a rotation. Beyond ``block_size`` the model is untrained."""
        return None


#: Published sizes: what differs from the defaults.
SIZES: dict[str, dict[str, int | bool]] = {
    "Qwen2-0.5B": dict(n_layer=24, n_head=14, n_kv_head=2, n_embd=896, intermediate_size=4864),
    "Qwen2-1.5B": dict(n_layer=28, n_head=12, n_kv_head=2, n_embd=1536, intermediate_size=8960),
    "Qwen2-7B": dict(
        n_layer=28, n_head=28, n_kv_head=4, n_embd=3584, intermediate_size=18944,
        vocab_size=152064, tie_word_embeddings=False,
    ),
}  # fmt: skip


class Attention(AttentionLayer):
    """Causal self-attention of ``x`` (B, T, C): H query heads share Hkv key and value heads.

    ``attend`` is the function that computes it, ``rotate`` the one that turns queries and keys to
    their positions. The keys are turned before they enter the cache, and never touched again.
    """

    rotate: Rotate

    def __init__(self, config: Qwen2Config, rotate: Rotate = apply_rope) -> None:
        super().__init__()
        C, D = config.n_embd, config.head_dim
        self.head_dim = D
        self.q_proj = nn.Linear(C, config.n_head * D, config.qkv_bias)
        self.k_proj = nn.Linear(C, config.n_kv_head * D, config.qkv_bias)
        self.v_proj = nn.Linear(C, config.n_kv_head * D, config.qkv_bias)
        self.o_proj = nn.Linear(config.n_head * D, C, config.o_bias)
        self.attention_dropout = config.attention_dropout
        self.attend = sdpa_attention
        self.rotate = rotate

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        visibility: Visibility,
        cache: LayerCache,
    ) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (
            project(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H or Hkv, T, D)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotate(q, *rotation), self.rotate(k, *rotation)
        k, v = cache.update(k, v)  # (B, Hkv, S, D)
        y = self.attend(q, k, v, visibility, self.attention_dropout if self.training else 0.0)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    """One layer: attention moves information between the tokens of ``x`` (B, T, C), the MLP works
    on each of them. Later architectures give an ``attention``, an ``mlp`` or norms of their own."""

    def __init__(
        self,
        config: Qwen2Config,
        attention: nn.Module | None = None,
        mlp: nn.Module | None = None,
        norm: Callable[[int, float], nn.Module] = RMSNorm,
    ) -> None:
        super().__init__()
        C, hidden = config.n_embd, config.intermediate_size
        self.input_layernorm = norm(C, config.rms_norm_eps)
        self.self_attn = Attention(config) if attention is None else attention
        self.post_attention_layernorm = norm(C, config.rms_norm_eps)
        self.mlp = mlp or GatedMLP(C, hidden, config.activation, config.mlp_bias)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        visibility: Visibility,
        cache: LayerCache,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, visibility, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2Model(nn.Module):
    """From token ids, or embeddings, to hidden states: everything but the head."""

    prefix = "model"  # its name in a checkpoint

    def __init__(
        self, config: Qwen2Config, norm: Callable[[int, float], nn.Module] = RMSNorm
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(self.block(layer) for layer in range(config.n_layer))
        self.norm = norm(config.n_embd, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.rotary_dim, config.rope_theta, config.rope_scaling)
        self.init_weights()

    def block(self, layer: int) -> nn.Module:
        """The block of that number; a later architecture builds its own of other parts."""
        return Block(self.config)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the weights: N(0, initializer_range²); biases 0, norms 1, the padding row 0.

        That row learns like any other where its token stands in a text. (In ``transformers`` it
        gets no gradient as an input.)
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, self.config.initializer_range)
        if self.config.pad_token_id is not None:
            self.embed_tokens.weight[self.config.pad_token_id].zero_()

    def forward(
        self,
        idx: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache = NO_CACHE,
    ) -> Tensor:
        """Hidden states (B, T, C), after the last norm, of the token ids ``idx`` (B, T), or of
        embeddings (B, T, C), which need not be those of tokens.

        ``positions`` (B, T) say where each token stands, -1 for padding; without them every row
        continues where the cache ends. ``documents`` (B, T) number the documents packed into a row,
        whose positions start again at 0 in each.
        """
        x = embedded(idx, self.embed_tokens)
        check_cache(cache)
        seen = cache.see(x, positions, documents, self.config.windows)
        rotation = self.rotary_emb(seen[0].query_positions, x.dtype)
        for layer, block in enumerate(self.layers):
            x = block(x, rotation, seen[layer], cache[layer])
        return self.norm(x)

    @property
    def embedding(self) -> nn.Embedding:
        """The table of the tokens' vectors."""
        return self.embed_tokens


class Qwen2ForCausalLM(CausalLM):
    """Qwen2 with its language-model head, which is the token embedding, used the other way round,
    or has a matrix of its own."""

    backbone_class = Qwen2Model

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.config = config
        self.model = self.backbone_class(config)
        if config.tie_word_embeddings:
            self.lm_head: Head = TiedHead(self.model)
        else:
            self.lm_head = Head(config.n_embd, config.vocab_size)
            nn.init.normal_(self.lm_head.weight, 0.0, config.initializer_range)

    @property
    def backbone(self) -> Qwen2Model:
        """The model without its head."""
        return self.model

    def forward(
        self,
        idx: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache = NO_CACHE,
        keep: slice | Tensor = slice(None),
    ) -> Tensor:
        """Logits (B, T, V) of the token ids ``idx``, at ``positions`` and in ``documents`` (B, T),
        which are as in :class:`Qwen2Model`. ``keep`` chooses the columns to compute them for:
        ``slice(-1, None)`` is the last, all that generation needs; a tensor of indices works too.
        """
        x = self.model(idx, positions=positions, documents=documents, cache=cache)
        return self.lm_head(columns(x, keep))
