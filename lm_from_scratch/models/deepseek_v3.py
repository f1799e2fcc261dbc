r"""DeepSeek-V3: Qwen2's skeleton around multi-head latent attention (MLA).

Keys and values of all heads come from one *latent* of R numbers a token, and a key cache holds that
latent, normalised, and one turned key of Dr features that all heads share:

.. math::

   c_t = \mathrm{RMSNorm}(W_{DKV}\, x_t), \qquad
   r_t = \mathrm{RoPE}(W_{KR}\, x_t), \qquad
   k^h_t = \bigl[W^h_{UK}\, c_t;\; r_t\bigr], \qquad v^h_t = W^h_{UV}\, c_t

Of V3 that is 512 + 64 numbers, where 128 heads of keys and values have 40,960. Queries may come
from a latent too, which saves parameters, and is not kept.

:mod:`~lm_from_scratch.attention.latent` has the mathematics: two orders of the same products, of
which the layer takes the shorter, by the number of queries and keys alone.

All layers but the first few have :mod:`~lm_from_scratch.layers.experts` for an MLP: a router by
sigmoid with a correction bias, groups, and shared experts. The published model has one more layer,
for the prediction of a second token; it is not here.

Shapes: B batch, T tokens, S keys, C = n_embd, H = n_head, R = kv_lora_rank, Dn = qk_nope_head_dim,
Dr = head_dim, Dv = v_head_dim.

Sources: DeepSeek-AI, *DeepSeek-V2*, 2024, arXiv:2405.04434, and *DeepSeek-V3 Technical Report*,
2024, arXiv:2412.19437.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from lm_from_scratch.attention.latent import absorbed, expanded, multiplications
from lm_from_scratch.attention.layer import AttentionLayer
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import LayerCache
from lm_from_scratch.layers.activation import Activation
from lm_from_scratch.layers.experts import Experts, SharedExperts, SigmoidRouter, TopK, check_groups
from lm_from_scratch.layers.gated_mlp import GatedMLP
from lm_from_scratch.layers.linear import plain_matrix
from lm_from_scratch.layers.norm import RMSNorm
from lm_from_scratch.layers.rope import (
    RopeScaling,
    Rotate,
    Theta,
    apply_rope,
    apply_rope_interleaved,
)
from lm_from_scratch.layers.rope_scaling import YaRNScaling
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
class DeepseekV3Config(Qwen2Config):
    """The numbers that define a DeepSeek-V3. The defaults have the shape of the published one.

    Layers from ``first_k_dense_replace`` on have experts in place of one MLP. Qwen2's checks hold.
    """

    vocab_size: Count = 129280
    block_size: Count = 4096
    n_layer: Count = 61
    n_head: Annotated[Count, multiple_of("n_kv_head")] = 128
    n_kv_head: Computed = None  # type: ignore[assignment]  # n_head: each has keys of its own
    n_embd: Count = 7168
    intermediate_size: Count = 18432  # of layers without experts
    head_dim: Computed = 64  # the features that turn: qk_rope_head_dim in a file
    qk_nope_head_dim: Count = 128  # and those that do not
    v_head_dim: Count = 128
    kv_lora_rank: Count = 512  # numbers of the latent
    q_lora_rank: Count | None = 1536  # None: queries come from the token directly
    rope_interleave: bool = True  # which features make a pair: 2i and 2i + 1, or i and i + Dr / 2
    rope_theta: Theta = 10000.0
    rope_scaling: RopeScaling | None = None
    activation: Activation = "silu"
    first_k_dense_replace: Whole = 3
    n_expert: Count = 256
    n_shared_experts: Count = 1  # that all tokens visit
    top_k: TopK = 8  # experts that a token visits besides
    expert_size: Count = 2048  # the width of an expert
    n_group: Count = 8  # equal groups of experts, of which a token
    top_group: Count = 4  # has so many to choose from
    norm_topk_prob: bool = True  # whether the weights of the chosen sum to 1
    routed_scaling_factor: Positive = 2.5  # times this
    qkv_bias: bool = False
    rms_norm_eps: Positive = 1e-6
    sliding_window: Count | None = None
    layer_types: tuple[str, ...] | None = None
    max_window_layers: Whole | None = None
    tie_word_embeddings: bool = False
    attention_dropout: Share = 0.0
    initializer_range: Positive = 0.02
    pad_token_id: TokenId | None = None
    bos_token_id: TokenId | None = 0
    eos_token_id: TokenIds | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_kv_head != self.n_head:
            raise ValueError(
                f"n_kv_head={self.n_kv_head} is not supported, only n_kv_head={self.n_head}: the "
                "heads share one latent, from which each makes its own key"
            )
        check_groups(self.n_expert, self.top_k, self.n_group, self.top_group)

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """What a cache is given of a token in a layer: one head, of the latent and the turned
        key."""
        return 1, self.kv_lora_rank, self.head_dim


def sharpness(scaling: RopeScaling | None) -> float:
    """What scores are multiplied by in a longer context: the square of YaRN's magnitude by
    ``mscale_all_dim``. (Turned features have it in cosine and sine; here all features get it.)"""
    if not isinstance(scaling, YaRNScaling) or not scaling.mscale_all_dim:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2


class LatentAttention(AttentionLayer):
    """Causal self-attention of ``x`` (B, T, C), whose cache holds a latent and a turned key for
    each token: (B, 1, S, R) instead of keys, (B, 1, S, Dr) instead of values.

    The norms have an ``eps`` of their own, whatever the config says of the others.
    """

    rotate: Rotate

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        C, H, R = config.n_embd, config.n_head, config.kv_lora_rank
        Dn, Dr, Dv = config.qk_nope_head_dim, config.head_dim, config.v_head_dim
        self.sizes = R, Dn, Dr, Dv
        self.n_head, self.q_lora_rank = H, config.q_lora_rank
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(C, H * (Dn + Dr), bias=False)
        else:
            self.q_a_proj = nn.Linear(C, config.q_lora_rank, config.qkv_bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=1e-6)
            self.q_b_proj = nn.Linear(config.q_lora_rank, H * (Dn + Dr), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(C, R + Dr, config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(R, eps=1e-6)
        self.kv_b_proj = nn.Linear(R, H * (Dn + Dv), bias=False)
        self.o_proj = nn.Linear(H * Dv, C, config.o_bias)
        self.attention_dropout = config.attention_dropout
        self.sharpness = sharpness(config.rope_scaling)
        self.attend = sdpa_attention
        self.rotate = apply_rope_interleaved if config.rope_interleave else apply_rope

    def queries(self, x: Tensor) -> Tensor:
        """The queries (B, T, H * (Dn + Dr)) of ``x`` (B, T, C), not turned yet."""
        if self.q_lora_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        visibility: Visibility,
        cache: LayerCache,
    ) -> Tensor:
        (B, T, _), (R, Dn, _, _) = x.shape, self.sizes
        q = self.queries(x).view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, Dn + Dr)
        q, turned = q.tensor_split([Dn], dim=-1)
        q = torch.cat([q, self.rotate(turned, *rotation)], dim=-1)
        latent, shared = self.kv_a_proj_with_mqa(x)[:, None].tensor_split([R], dim=-1)
        latent, shared = self.kv_a_layernorm(latent), self.rotate(shared, *rotation)
        latent, shared = cache.update(latent, shared)  # (B, 1, S, R), (B, 1, S, Dr)
        if self.sharpness != 1.0:
            q = q * self.sharpness
        how = visibility, self.attend, self.attention_dropout if self.training else 0.0
        matrix = plain_matrix(self.kv_b_proj)
        if matrix is not None and self.absorbs(T, latent.shape[2]):
            y = absorbed(q, latent, shared, matrix, *how)
        else:
            y = expanded(q, self.kv_b_proj(latent), shared, *how)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))

    def absorbs(self, T: int, S: int) -> bool:
        """Whether T queries and S keys take fewer multiplications absorbed than expanded."""
        expanding, absorbing = multiplications(T, S, *self.sizes)
        return absorbing < expanding


class DeepseekV3Model(Qwen2Model):
    """From token ids, or embeddings, to hidden states: everything but the head."""

    config: DeepseekV3Config

    def block(self, layer: int) -> nn.Module:
        return Block(self.config, LatentAttention(self.config), self.mlp(layer))

    def mlp(self, layer: int) -> nn.Module | None:
        """What follows attention in that layer: experts, or ``None`` for a gated MLP."""
        config = self.config
        if layer < config.first_k_dense_replace:
            return None
        C, E, F, act = config.n_embd, config.n_expert, config.expert_size, config.activation
        gate = SigmoidRouter(
            C, E, config.top_k, config.norm_topk_prob, config.routed_scaling_factor,
            config.n_group, config.top_group,
        )  # fmt: skip
        shared = GatedMLP(C, F * config.n_shared_experts, act)
        return SharedExperts(gate, Experts(E, C, F, act), shared)


class DeepseekV3ForCausalLM(Qwen2ForCausalLM):
    """DeepSeek-V3 with its language-model head, tied or not."""

    backbone_class = DeepseekV3Model
