r"""Attention that may look at nothing: the sinks of gpt-oss, in a decoder like Qwen2.

Every head has a learned number :math:`z_h` beside its keys' scores, with no value
(:mod:`~lm_from_scratch.attention.sinks` has the formula). The projections have biases, the last one
too. Without its experts a gpt-oss is a Qwen2 with this attention, which is
:class:`SinkForCausalLM`.

Source: OpenAI, *gpt-oss-120b & gpt-oss-20b Model Card*, 2025, arXiv:2508.10925.
"""

import torch
from torch import Tensor, nn

from lm_from_scratch.attention.sinks import SinkLayer, sink_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import LayerCache
from lm_from_scratch.layers.rope import Rotate, apply_rope
from lm_from_scratch.models.qwen2 import Block, Qwen2Config, Qwen2ForCausalLM, Qwen2Model


class SinkAttention(SinkLayer):
    """Causal self-attention of ``x`` (B, T, C) with a sink for each of its H heads.

    ``qkv_bias`` of the config is for all four projections, as ``attention_bias`` of published
    configs.
    """

    rotate: Rotate

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        C, D = config.n_embd, config.head_dim
        self.head_dim = D
        self.q_proj = nn.Linear(C, config.n_head * D, config.qkv_bias)
        self.k_proj = nn.Linear(C, config.n_kv_head * D, config.qkv_bias)
        self.v_proj = nn.Linear(C, config.n_kv_head * D, config.qkv_bias)
        self.o_proj = nn.Linear(config.n_head * D, C, config.qkv_bias)
        self.sinks = nn.Parameter(torch.zeros(config.n_head))
        self.attention_dropout = config.attention_dropout
        self.compute = sink_attention
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
        q, k = self.rotate(q, *rotation), self.rotate(k, *rotation)
        k, v = cache.update(k, v)  # (B, Hkv, S, D)
        y = self.attend(q, k, v, visibility, self.attention_dropout if self.training else 0.0)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class SinkModel(Qwen2Model):
    """From token ids, or embeddings, to hidden states: everything but the head."""

    def block(self, layer: int) -> nn.Module:
        return Block(self.config, SinkAttention(self.config))

    @torch.no_grad()
    def init_weights(self) -> None:
        """As in Qwen2; the sinks are drawn like the weights."""
        super().init_weights()
        for name, parameter in self.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0.0, self.config.initializer_range)


class SinkForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with sinks, and its language-model head, tied or not."""

    backbone_class = SinkModel
