r"""Qwen3: Qwen2 with normalised queries and keys.

A score is a dot product, so it grows with the lengths of query and key, and nothing in Qwen2 limits
these: a large learning rate makes them grow until softmax sees one key alone. Qwen3 divides each
head's query and key by their root mean square before they are turned:

.. math::

   q \leftarrow \mathrm{RoPE}(\mathrm{RMSNorm}(W_q x)), \qquad
   k \leftarrow \mathrm{RoPE}(\mathrm{RMSNorm}(W_k x))

A score is then at most :math:`\sqrt{D}` times the largest product of the two learned weights. The
projections lose their biases, and the width of a head is a number of its own. Block, model and head
are those of :mod:`~lm_from_scratch.models.qwen2`.

Sources: Yang et al., *Qwen3 Technical Report*, 2025, arXiv:2505.09388; Henry et al., *Query-Key
Normalization for Transformers*, 2020, arXiv:2010.04245.
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from lm_from_scratch.attention.layer import AttentionLayer
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import LayerCache
from lm_from_scratch.layers.activation import Activation
from lm_from_scratch.layers.norm import RMSNorm
from lm_from_scratch.layers.rope import RopeScaling, Rotate, Theta, apply_rope
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
from lm_from_scratch.models.qwen2 import Block, Qwen2Config, Qwen2ForCausalLM, Qwen2Model


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """The numbers that define a Qwen3. The defaults have the shape of the smallest published one:
    its 16 heads of 128 features are twice as wide as its 1024 features. Qwen2's checks hold."""

    vocab_size: Count = 151936
    block_size: Count = 40960
    n_layer: Count = 28
    n_head: Annotated[Count, multiple_of("n_kv_head")] = 16
    n_kv_head: Computed = 8
    n_embd: Count = 1024
    intermediate_size: Count = 3072
    head_dim: Computed = 128
    qkv_bias: bool = False
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
    eos_token_id: TokenIds | None = 151645


#: Published sizes: what differs from the defaults.
SIZES: dict[str, dict[str, int | bool]] = {
    "Qwen3-0.6B": dict(n_layer=28, n_head=16, n_embd=1024, intermediate_size=3072),
    "Qwen3-1.7B": dict(n_layer=28, n_head=16, n_embd=2048, intermediate_size=6144),
    "Qwen3-4B": dict(n_layer=36, n_head=32, n_embd=2560, intermediate_size=9728),
    "Qwen3-8B": dict(
        n_layer=36, n_head=32, n_embd=4096, intermediate_size=12288, tie_word_embeddings=False
    ),
}


class Attention(AttentionLayer):
    """Causal self-attention of ``x`` (B, T, C): H query heads share Hkv key and value heads, and
    each query and key of D features is normalised before it is turned. The two norms have one
    weight of D numbers each, for all heads."""

    rotate: Rotate

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        C, D = config.n_embd, config.head_dim
        self.head_dim = D
        self.q_proj = nn.Linear(C, config.n_head * D, config.qkv_bias)
        self.k_proj = nn.Linear(C, config.n_kv_head * D, config.qkv_bias)
        self.v_proj = nn.Linear(C, config.n_kv_head * D, config.qkv_bias)
        self.o_proj = nn.Linear(config.n_head * D, C, config.o_bias)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)
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
        y = self.attend(q, k, v, visibility, self.attention_dropout if self.training else 0.0)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class Qwen3Model(Qwen2Model):
    """From token ids, or embeddings, to hidden states: everything but the head."""

    config: Qwen3Config

    def block(self, layer: int) -> nn.Module:
        return Block(self.config, Attention(self.config))


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Qwen3 with its language-model head, tied or not."""

    backbone_class = Qwen3Model
