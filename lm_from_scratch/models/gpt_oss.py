r"""gpt-oss: Qwen2's skeleton with sinks, windows in every other layer, and clamped experts.

Four things differ from :mod:`~lm_from_scratch.models.qwen2`:

* every head has a *sink*, a learned score without a value, so that it may look at nothing
  (:mod:`~lm_from_scratch.attention.sinks` has the formula);
* of each two layers the first sees 128 keys, the second all of them;
* the MLP is a mixture of experts. The router has a bias, and its softmax is over the chosen k
  alone;
* an expert's gated product is *clamped*, and its up has one added, so that an expert whose up is 0
  still passes its gate:

.. math::

   \mathrm{product}(g, u) = (\bar u + 1) \; \bar g \, \sigma(\alpha \bar g), \qquad
   \bar g = \min(g, L), \quad \bar u = \min(\max(u, -L), L)

with :math:`\alpha = 1.702`, which makes :math:`g \, \sigma(\alpha g)` nearly a GELU, and
:math:`L = 7`. The columns of gate and up take turns: 2i is gate i, and 2i + 1 is up i.

The experts are published in four bits (:mod:`~lm_from_scratch.weights.float4`). They are 9 of 10
parameters, and here they are numbers again, as in ``transformers``.

Shapes: B batch, T tokens, S keys, N = B T tokens, C = n_embd, H = n_head, D = head_dim,
E = n_expert, F = intermediate_size.

Source: OpenAI, *gpt-oss-120b & gpt-oss-20b Model Card*, 2025, arXiv:2508.10925.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from lm_from_scratch.attention.sinks import SinkLayer, sink_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import LayerCache
from lm_from_scratch.layers.activation import Activation
from lm_from_scratch.layers.experts import Router, Routing, TopK, best, routed_sum
from lm_from_scratch.layers.rope import RopeScaling, Rotate, Theta, apply_rope
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
from lm_from_scratch.models.qwen2 import (
    FULL,
    SLIDING,
    Block,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
)

#: Of both published models: trained on 4,096 tokens, and 32 times slower where pairs turn slowly.
#: The ramp between is not rounded to whole pairs.
YARN = YaRNScaling(factor=32.0, original_length=4096, truncate=False)


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(Qwen2Config):
    """The numbers that define a gpt-oss. The defaults have the shape of the larger published one,
    of 120 billion parameters. Without ``layer_types`` every other layer slides, the first too.
    Qwen2's checks hold.
    """

    vocab_size: Count = 201088
    block_size: Count = 131072
    n_layer: Count = 36
    n_head: Annotated[Count, multiple_of("n_kv_head")] = 64
    n_kv_head: Computed = 8
    n_embd: Count = 2880
    intermediate_size: Count = 2880  # the width of an expert
    head_dim: Computed = 64
    qkv_bias: bool = True
    o_bias: bool = True
    activation: Activation = "silu"
    n_expert: Count = 128
    top_k: TopK = 4  # experts that a token visits
    swiglu_alpha: Positive = 1.702
    swiglu_limit: Positive = 7.0
    rms_norm_eps: Positive = 1e-5
    rope_theta: Theta = 150_000.0
    rope_scaling: RopeScaling | None = YARN
    sliding_window: Count = 128
    layer_types: tuple[str, ...] | None = None
    max_window_layers: Whole | None = None
    tie_word_embeddings: bool = False
    attention_dropout: Share = 0.0
    initializer_range: Positive = 0.02
    pad_token_id: TokenId | None = 199999
    bos_token_id: TokenId | None = 199998
    eos_token_id: TokenIds | None = 200002

    def _check_layers(self) -> None:
        if self.layer_types is None:
            object.__setattr__(self, "layer_types", alternating(self.n_layer))
        super()._check_layers()


def alternating(n_layer: int) -> tuple[str, ...]:
    """The kinds of so many layers: the first slides, and every other one after it."""
    return tuple(FULL if layer % 2 else SLIDING for layer in range(n_layer))


#: Published sizes: what differs from the defaults.
SIZES: dict[str, dict[str, int]] = {
    "gpt-oss-20b": dict(n_layer=24, n_expert=32),
    "gpt-oss-120b": {},
}


class Attention(SinkLayer):
    """Causal self-attention of ``x`` (B, T, C) with a sink for each of its H heads."""

    rotate: Rotate

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        C, D = config.n_embd, config.head_dim
        self.head_dim = D
        self.q_proj = nn.Linear(C, config.n_head * D, config.qkv_bias)
        self.k_proj = nn.Linear(C, config.n_kv_head * D, config.qkv_bias)
        self.v_proj = nn.Linear(C, config.n_kv_head * D, config.qkv_bias)
        self.o_proj = nn.Linear(config.n_head * D, C, config.o_bias)
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


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """The gated product above, elementwise, of ``gate`` and ``up`` (..., F)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


class TopKRouter(Router):
    """The k experts of tokens (N, C) with the largest scores; the weights are the softmax of these
    k scores, so they sum to 1."""

    def __init__(self, n_embd: int, n_expert: int, top_k: int) -> None:
        super().__init__(n_embd, n_expert, top_k)
        self.bias = nn.Parameter(torch.zeros(n_expert))

    def forward(self, x: Tensor) -> Routing:
        logits = nn.functional.linear(x, self.weight, self.bias)  # (N, E)
        experts = best(logits, self.top_k)
        work = torch.promote_types(logits.dtype, torch.float32)
        return Routing(logits, experts, logits.gather(-1, experts).softmax(-1, dtype=work))


class Experts(nn.Module):
    """E gated MLPs with biases, stacked, for tokens ``x`` (N, C): ``gate_up_proj`` (E, C, 2F) and
    ``down_proj`` (E, F, C). They lie as in a file: an input to a row, gate and up in turns."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        E, C, F = config.n_expert, config.n_embd, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, C, 2 * F))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(E, 2 * F))
        self.down_proj = nn.Parameter(torch.empty(E, F, C))
        self.down_proj_bias = nn.Parameter(torch.empty(E, C))
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def expert(self, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor, x: Tensor) -> Tensor:
        """What one expert says of ``x`` (N, C), with maps ``W1`` (C, 2F) and ``W2`` (F, C) and
        biases ``b1`` (2F,) and ``b2`` (C,)."""
        gate, up = torch.addmm(b1, x, W1).unflatten(-1, (-1, 2)).unbind(-1)  # (N, F) each
        return torch.addmm(b2, clamped_swiglu(gate, up, self.alpha, self.limit), W2)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """:func:`~lm_from_scratch.layers.experts.routed_sum` of ``x`` (N, C)."""
        maps = zip(*(p.unbind() for p in self.parameters()), strict=True)
        return routed_sum(x, routing, [partial(self.expert, *one) for one in maps])


class MLP(nn.Module):
    """A router and its experts, for ``x`` (..., C)."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.router = TopKRouter(config.n_embd, config.n_expert, config.top_k)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # (N, C)
        return self.experts(tokens, self.router(tokens)).view_as(x)


class GptOssModel(Qwen2Model):
    """From token ids, or embeddings, to hidden states: everything but the head."""

    config: GptOssConfig

    def block(self, layer: int) -> nn.Module:
        return Block(self.config, Attention(self.config), MLP(self.config))

    @torch.no_grad()
    def init_weights(self) -> None:
        """As in Qwen2; sinks and the biases of routers are drawn like the weights."""
        super().init_weights()
        for name, parameter in self.named_parameters():
            if name.endswith(("sinks", "router.bias")):
                parameter.normal_(0.0, self.config.initializer_range)


class GptOssForCausalLM(Qwen2ForCausalLM):
    """gpt-oss with its language-model head, tied or not."""

    backbone_class = GptOssModel
