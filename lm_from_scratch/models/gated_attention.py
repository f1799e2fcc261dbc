r"""Gated attention: a sigmoid of the input decides how much of each head's result passes.

Softmax attention always returns a mean of values. The gate :math:`g`, computed from the token that
looks, can turn that mean down, feature by feature, and with it whatever a head with nothing to look
at has read:

.. math::

   (q_h, g_h) = W_{q,h}\, x, \qquad
   y = W_o \left[\, \sigma(g_h) \odot \mathrm{Attention}(q_h, k, v) \,\right]_h

One projection makes both: the rows of a head are D for its query and then D for its gate, head
after head. Queries and keys are normalised as in Qwen3, by norms whose weight is counted from 1.

Sources: Qiu et al., *Gated Attention for Large Language Models*, 2025, arXiv:2505.06708; the layout
is that of Qwen3-Next.
"""

import torch
from torch import Tensor, nn

from lm_from_scratch.attention.layer import AttentionLayer
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import LayerCache
from lm_from_scratch.layers.norm import ZeroCentredRMSNorm
from lm_from_scratch.layers.rope import Rotate, apply_rope
from lm_from_scratch.models.qwen2 import Block, Qwen2Config, Qwen2ForCausalLM, Qwen2Model


class GatedAttention(AttentionLayer):
    """Causal self-attention of ``x`` (B, T, C) whose H heads have a gate for each of their D
    features. ``qkv_bias`` of the config is for all four projections, as ``attention_bias`` of
    published configs; ``rotate`` may turn a part of the features alone."""

    rotate: Rotate

    def __init__(self, config: Qwen2Config, rotate: Rotate = apply_rope) -> None:
        super().__init__()
        C, D = config.n_embd, config.head_dim
        self.head_dim = D
        self.q_proj = nn.Linear(C, config.n_head * D * 2, config.qkv_bias)  # and the gate
        self.k_proj = nn.Linear(C, config.n_kv_head * D, config.qkv_bias)
        self.v_proj = nn.Linear(C, config.n_kv_head * D, config.qkv_bias)
        self.o_proj = nn.Linear(config.n_head * D, C, config.qkv_bias)
        self.q_norm = ZeroCentredRMSNorm(D, config.rms_norm_eps)
        self.k_norm = ZeroCentredRMSNorm(D, config.rms_norm_eps)
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
        q, gate = self.q_proj(x).view(B, T, -1, 2 * self.head_dim).chunk(2, dim=-1)  # (B, T, H, D)
        k, v = (p(x).view(B, T, -1, self.head_dim) for p in (self.k_proj, self.v_proj))
        q, k, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), v))
        q, k = self.rotate(q, *rotation), self.rotate(k, *rotation)
        k, v = cache.update(k, v)  # (B, Hkv, S, D)
        y = self.attend(q, k, v, visibility, self.attention_dropout if self.training else 0.0)
        y = y.transpose(1, 2) * gate.sigmoid()  # (B, T, H, D)
        return self.o_proj(y.reshape(B, T, -1))


class GatedModel(Qwen2Model):
    """From token ids, or embeddings, to hidden states: everything but the head. The norms between
    the layers are those of Qwen2."""

    def block(self, layer: int) -> nn.Module:
        return Block(self.config, GatedAttention(self.config))

    @torch.no_grad()
    def init_weights(self) -> None:
        """As in Qwen2; norms whose weight is counted from 1 begin with 0."""
        super().init_weights()
        for module in self.modules():
            if isinstance(module, ZeroCentredRMSNorm):
                module.weight.zero_()


class GatedForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with gated attention, and its language-model head, tied or not."""

    backbone_class = GatedModel
