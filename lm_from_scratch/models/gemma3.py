r"""Gemma 3, complete in one file: Qwen2's skeleton with a norm on both sides of every layer.

What a layer adds is normalised before it is added, so no layer can add more than its norm lets it:

.. math::

   x &\leftarrow x + \mathrm{RMSNorm}(\mathrm{Attention}(\mathrm{RMSNorm}(x))) \\
   x &\leftarrow x + \mathrm{RMSNorm}(\mathrm{GatedMLP}(\mathrm{RMSNorm}(x)))

Five layers of six see the latest ``sliding_window`` keys alone and turn fast (a theta of 10,000);
the sixth sees everything and turns slowly (1,000,000). Only that one is slowed down further where a
longer context needs it. Queries and keys are normalised, as in Qwen3. Three smaller changes:

* every norm is *zero-centred*: it multiplies by :math:`1 + w`, computed in float32;
* embeddings are multiplied by :math:`\sqrt{C}`, rounded to the dtype of the weights; the head,
  which is the same matrix, is not;
* scores are divided by the root of ``query_pre_attn_scalar``, which need not be D.

Names of modules are those of the checkpoints. Shapes: B batch, T tokens, S keys, C = n_embd,
H = n_head, Hkv = n_kv_head, D = head_dim, V = vocab_size.

Source: Gemma Team, *Gemma 3 Technical Report*, 2025, arXiv:2503.19786.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from lm_from_scratch.attention.layer import AttentionLayer
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import NO_CACHE, Cache, LayerCache, check_cache
from lm_from_scratch.layers.activation import Activation
from lm_from_scratch.layers.embedding import embedded
from lm_from_scratch.layers.gated_mlp import GatedMLP
from lm_from_scratch.layers.norm import ZeroCentredRMSNorm
from lm_from_scratch.layers.rope import RopeScaling, RotaryEmbedding, Rotate, Theta, apply_rope
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
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config, Qwen2ForCausalLM, Qwen2Model


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Qwen2Config):
    """The numbers that define a Gemma 3. The defaults are those of the published one of a billion
    weights. ``layer_types`` says which layers slide; without it all but every sixth do. Qwen2's
    checks hold."""

    vocab_size: Count = 262144
    block_size: Count = 32768
    n_layer: Count = 26
    n_head: Annotated[Count, multiple_of("n_kv_head")] = 4
    n_kv_head: Computed = 1
    n_embd: Count = 1152
    intermediate_size: Count = 6912
    head_dim: Computed = 256
    query_pre_attn_scalar: Count = 256  # scores are divided by its root
    qkv_bias: bool = False
    activation: Activation = "gelu_pytorch_tanh"
    rms_norm_eps: Positive = 1e-6
    rope_theta: Theta = 1_000_000.0  # of layers that see everything
    rope_scaling: RopeScaling | None = None  # of the same
    rope_local_theta: Theta = 10_000.0  # of layers that slide
    sliding_window: Count | None = 512
    layer_types: tuple[str, ...] | None = None
    max_window_layers: Whole | None = None
    final_logit_softcapping: Positive | None = None  # c in c tanh(logit / c)
    tie_word_embeddings: bool = True
    attention_dropout: Share = 0.0
    initializer_range: Positive = 0.02
    pad_token_id: TokenId | None = 0
    bos_token_id: TokenId | None = 2
    eos_token_id: TokenIds | None = 1

    def _check_layers(self) -> None:
        if self.layer_types is None:
            words = tuple(SLIDING if (n + 1) % 6 else FULL for n in range(self.n_layer))
            object.__setattr__(self, "layer_types", words)
        super()._check_layers()


#: Published sizes: what differs from the defaults.
SIZES: dict[str, dict[str, Any]] = {
    "Gemma-3-270M": dict(n_layer=18, n_embd=640, intermediate_size=2048),
    "Gemma-3-1B": {},
    "Gemma-3-4B": dict(
        n_layer=34, n_head=8, n_kv_head=4, n_embd=2560, intermediate_size=10240,
        sliding_window=1024, vocab_size=262208, block_size=131072,
    ),
    "Gemma-3-27B": dict(
        n_layer=62, n_head=32, n_kv_head=16, n_embd=5376, intermediate_size=21504, head_dim=128,
        query_pre_attn_scalar=168, sliding_window=1024, vocab_size=262208, block_size=131072,
    ),
}  # fmt: skip


class ScaledEmbedding(nn.Embedding):
    """The rows that token ids (B, T) name, times the root of their width: (B, T, C). In bfloat16
    the root of 1152, 33.94, is 34: the published models were trained with that."""

    def forward(self, input: Tensor) -> Tensor:
        rows = super().forward(input)
        root = math.sqrt(self.embedding_dim)
        return rows * torch.full((), root, dtype=rows.dtype, device=rows.device)


class Attention(AttentionLayer):
    """Causal self-attention of ``x`` (B, T, C): H query heads share Hkv key and value heads, and
    each query and key of D features is normalised before it is turned."""

    rotate: Rotate

    def __init__(self, config: Gemma3Config) -> None:
        super().__init__()
        C, D = config.n_embd, config.head_dim
        self.head_dim = D
        self.q_proj = nn.Linear(C, config.n_head * D, config.qkv_bias)
        self.k_proj = nn.Linear(C, config.n_kv_head * D, config.qkv_bias)
        self.v_proj = nn.Linear(C, config.n_kv_head * D, config.qkv_bias)
        self.o_proj = nn.Linear(config.n_head * D, C, config.o_bias)
        self.q_norm = ZeroCentredRMSNorm(D, config.rms_norm_eps)
        self.k_norm = ZeroCentredRMSNorm(D, config.rms_norm_eps)
        self.sharpness = math.sqrt(D / config.query_pre_attn_scalar)  # attend divides by root D
        self.attention_dropout = config.attention_dropout
        self.attend = sdpa_attention
        self.rotate = apply_rope

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
        q, k = self.rotate(self.q_norm(q), *rotation), self.rotate(self.k_norm(k), *rotation)
        k, v = cache.update(k, v)  # (B, Hkv, S, D)
        q = q * self.sharpness
        y = self.attend(q, k, v, visibility, self.attention_dropout if self.training else 0.0)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    """One layer of ``x`` (B, T, C). ``post_attention_layernorm`` is the norm *after* attention; in
    Qwen2 that name is the norm before the MLP."""

    def __init__(self, config: Gemma3Config) -> None:
        super().__init__()
        C, eps = config.n_embd, config.rms_norm_eps
        self.input_layernorm = ZeroCentredRMSNorm(C, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = ZeroCentredRMSNorm(C, eps)
        self.pre_feedforward_layernorm = ZeroCentredRMSNorm(C, eps)
        self.mlp = GatedMLP(C, config.intermediate_size, config.activation)
        self.post_feedforward_layernorm = ZeroCentredRMSNorm(C, eps)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        visibility: Visibility,
        cache: LayerCache,
    ) -> Tensor:
        y = self.self_attn(self.input_layernorm(x), rotation, visibility, cache)
        x = x + self.post_attention_layernorm(y)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3Model(Qwen2Model):
    """From token ids, or embeddings, to hidden states: everything but the head."""

    config: Gemma3Config

    def __init__(self, config: Gemma3Config) -> None:
        nn.Module.__init__(self)  # every part is built here
        self.config = config
        self.embed_tokens = ScaledEmbedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = ZeroCentredRMSNorm(config.n_embd, config.rms_norm_eps)
        self.rotary_embs = nn.ModuleDict({
            FULL: RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling),
            SLIDING: RotaryEmbedding(config.head_dim, config.rope_local_theta),
        })  # fmt: skip
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """As Qwen2; zero-centred norms 0."""
        super().init_weights()
        for module in self.modules():
            if isinstance(module, ZeroCentredRMSNorm):
                module.weight.zero_()

    def forward(
        self,
        idx: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache = NO_CACHE,
    ) -> Tensor:
        """Hidden states (B, T, C) of the token ids ``idx`` (B, T), at ``positions`` and in
        ``documents`` (B, T), or of embeddings (B, T, C), which are not multiplied by the root."""
        x = embedded(idx, self.embed_tokens)
        check_cache(cache)
        seen = cache.see(x, positions, documents, self.config.windows)
        rotations = {
            kind: rotary(seen[0].query_positions, x.dtype)
            for kind, rotary in self.rotary_embs.items()
        }
        for layer, (block, kind) in enumerate(zip(self.layers, self.config.kinds, strict=True)):
            x = block(x, rotations[kind], seen[layer], cache[layer])
        return self.norm(x)


class Gemma3ForCausalLM(Qwen2ForCausalLM):
    """Gemma 3 with its language-model head, tied or not, whose logits may be capped."""

    backbone_class = Gemma3Model  # type: ignore[assignment]

    def __init__(self, config: Gemma3Config) -> None:
        super().__init__(config)
        self.lm_head.cap = config.final_logit_softcapping
