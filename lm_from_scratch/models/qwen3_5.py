r"""Qwen3.5, with experts or without: Qwen3-Next whose layers with a state project in four parts.

Three layers of four keep a state of fixed size, the fourth is gated attention that turns a quarter
of its features: all this is :mod:`~lm_from_scratch.models.qwen3_next`. What changed:

* what a :class:`GatedDeltaNet` computes of a token comes from four matrices, one for q, k and v,
  one each for z and the two gates. Each matrix lists all heads of one kind after the other, so the
  rows need no sorting (in Qwen3-Next two matrices hold them key head by key head);
* the small models have a gated MLP in every layer; the larger ones, *MoE*, have in every layer
  experts, whose weights sum to 1, and a shared one with a gate.

Published folders are models for pictures and text. The text part is read here: a token of text has
one position, while each patch of a picture has three (frame, row, column), to which three shares
of the rotated features turn (``mrope_section``). Where the three are equal, the rotation is RoPE.

Source: the code of Qwen3.5 in ``transformers``.
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from lm_from_scratch.layers.activation import Activation
from lm_from_scratch.layers.experts import Experts, GatedSharedExpert, SoftmaxRouter, TopK
from lm_from_scratch.layers.gated_mlp import GatedMLP
from lm_from_scratch.layers.rope import RopeScaling, Theta
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
from lm_from_scratch.models import gated_delta_net
from lm_from_scratch.models.qwen2 import Qwen2ForCausalLM
from lm_from_scratch.models.qwen3_next import HybridConfig, HybridModel


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(HybridConfig):
    """The numbers that define a Qwen3.5 without experts. The defaults have the shape of the
    published one of 9 billion parameters."""

    vocab_size: Count = 248320
    block_size: Count = 262144
    n_layer: Count = 32
    n_head: Annotated[Count, multiple_of("n_kv_head")] = 16
    n_kv_head: Computed = 4
    n_embd: Count = 4096
    intermediate_size: Count = 12288
    head_dim: Computed = 256
    qkv_bias: bool = False
    activation: Activation = "silu"
    rms_norm_eps: Positive = 1e-6
    rope_theta: Theta = 10_000_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: Count | None = None
    layer_types: tuple[str, ...] | None = None
    max_window_layers: Whole | None = None
    tie_word_embeddings: bool = False
    attention_dropout: Share = 0.0
    initializer_range: Positive = 0.02
    pad_token_id: TokenId | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenIds | None = 248044


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeConfig(Qwen3_5Config):
    """The numbers that define a Qwen3.5 with experts. The defaults have the shape of the smallest
    published one, of 35 billion parameters."""

    n_layer: Count = 40
    n_kv_head: Computed = 2
    n_embd: Count = 2048
    n_expert: Count = 256
    top_k: TopK = 8  # experts that a token visits
    expert_size: Count = 512
    shared_expert_size: Count = 512  # the width of the one that all tokens visit


#: Published sizes: what differs from the defaults.
SIZES: dict[str, dict[str, int | bool]] = {
    "Qwen3.5-0.8B": dict(n_layer=24, n_head=8, n_kv_head=2, n_embd=1024, intermediate_size=3584,
                         linear_num_value_heads=16, tie_word_embeddings=True),
    "Qwen3.5-9B": {},
    "Qwen3.5-27B": dict(n_layer=64, n_head=24, n_embd=5120, intermediate_size=17408,
                        linear_num_value_heads=48),
}  # fmt: skip
#: And those with experts.
MOE_SIZES: dict[str, dict[str, int]] = {
    "Qwen3.5-35B-A3B": {},
    "Qwen3.5-397B-A17B": dict(
        n_layer=60, n_head=32, n_embd=4096, n_expert=512, top_k=10, expert_size=1024,
        shared_expert_size=1024, linear_num_value_heads=64,
    ),
}  # fmt: skip


class GatedDeltaNet(gated_delta_net.GatedDeltaNet):
    """The layer with a state, of ``x`` (B, T, C), with a matrix for each thing that it projects."""

    def add_projections(self, n_embd: int, keys: int, values: int) -> None:
        self.in_proj_qkv = nn.Linear(n_embd, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(n_embd, values, bias=False)
        self.in_proj_b = nn.Linear(n_embd, self.n_value_head, bias=False)
        self.in_proj_a = nn.Linear(n_embd, self.n_value_head, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        z = self.in_proj_z(x).unflatten(-1, (-1, self.value_dim))
        return self.in_proj_qkv(x), z, self.in_proj_a(x), self.in_proj_b(x)


class Qwen3_5Model(HybridModel):
    """From token ids, or embeddings, to hidden states: everything but the head."""

    config: Qwen3_5Config
    delta_net = GatedDeltaNet

    def mlp(self, layer: int) -> nn.Module:
        config = self.config
        return GatedMLP(config.n_embd, config.intermediate_size, config.activation)


class Qwen3_5MoeModel(Qwen3_5Model):
    """The same, with experts and a shared one in every layer."""

    config: Qwen3_5MoeConfig

    def mlp(self, layer: int) -> nn.Module:
        config = self.config
        C, E, act = config.n_embd, config.n_expert, config.activation
        gate = SoftmaxRouter(C, E, config.top_k, normalize=True)
        experts = Experts(E, C, config.expert_size, act)
        return GatedSharedExpert(gate, experts, GatedMLP(C, config.shared_expert_size, act))


class Qwen3_5ForCausalLM(Qwen2ForCausalLM):
    """Qwen3.5 with its language-model head, tied or not."""

    backbone_class = Qwen3_5Model  # type: ignore[assignment]


class Qwen3_5MoeForCausalLM(Qwen2ForCausalLM):
    """Qwen3.5 with experts, and its language-model head."""

    backbone_class = Qwen3_5MoeModel  # type: ignore[assignment]
