"""Qwen3 with experts: in chosen layers, a mixture takes the place of the MLP.

Attention, norms and head are those of :mod:`~lm_from_scratch.models.qwen3`, and
:mod:`~lm_from_scratch.layers.experts` is the mixture. Every ``decoder_sparse_step``-th layer has
one, unless ``mlp_only_layers`` names it.

Source: Yang et al., *Qwen3 Technical Report*, 2025, arXiv:2505.09388.
"""

from dataclasses import dataclass
from typing import Annotated

from torch import nn

from lm_from_scratch.layers.activation import Activation
from lm_from_scratch.layers.experts import Experts, MixtureOfExperts, SoftmaxRouter, TopK
from lm_from_scratch.layers.rope import RopeScaling, Theta
from lm_from_scratch.limits import (
    Computed,
    Count,
    Positive,
    Share,
    TokenId,
    TokenIds,
    Whole,
    is_integer,
    multiple_of,
    shown,
)
from lm_from_scratch.models.qwen2 import Block, Qwen2Config, Qwen2ForCausalLM, Qwen2Model
from lm_from_scratch.models.qwen3 import Attention


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(Qwen2Config):
    """The numbers that define a Qwen3 with experts. The defaults have the shape of the smallest
    published one, of 30 billion parameters. Qwen2's checks hold."""

    vocab_size: Count = 151936
    block_size: Count = 40960
    n_layer: Count = 48
    n_head: Annotated[Count, multiple_of("n_kv_head")] = 32
    n_kv_head: Computed = 4
    n_embd: Count = 2048
    intermediate_size: Count = 6144  # of layers without experts
    head_dim: Computed = 128
    qkv_bias: bool = False
    activation: Activation = "silu"
    n_expert: Count = 128
    top_k: TopK = 8  # experts that a token visits
    expert_size: Count = 768  # the width of an expert
    norm_topk_prob: bool = True  # whether the weights of these experts sum to 1
    decoder_sparse_step: Count = 1  # every how many layers there are experts
    mlp_only_layers: tuple[int, ...] = ()
    rms_norm_eps: Positive = 1e-6
    rope_theta: Theta = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: Count | None = None
    layer_types: tuple[str, ...] | None = None
    max_window_layers: Whole | None = None
    tie_word_embeddings: bool = False
    attention_dropout: Share = 0.0
    initializer_range: Positive = 0.02
    pad_token_id: TokenId | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenIds | None = 151645

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dense_layers(self.mlp_only_layers)

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of that number has experts."""
        return (layer + 1) % self.decoder_sparse_step == 0 and layer not in self.mlp_only_layers


def check_dense_layers(layers: object) -> None:
    """Raises ``ValueError`` unless ``mlp_only_layers`` is a tuple of layers."""
    if type(layers) is not tuple or not all(is_integer(n, 0) for n in layers):
        raise ValueError(f"mlp_only_layers={shown(layers)} must be a tuple of layers")


#: Published sizes: what differs from the defaults.
SIZES: dict[str, dict[str, int]] = {
    "Qwen3-30B-A3B": {},
    "Qwen3-235B-A22B": dict(
        n_layer=94, n_head=64, n_embd=4096, intermediate_size=12288, expert_size=1536
    ),
}


class Qwen3MoeModel(Qwen2Model):
    """From token ids, or embeddings, to hidden states: everything but the head."""

    config: Qwen3MoeConfig

    def block(self, layer: int) -> nn.Module:
        config = self.config
        if not config.has_experts(layer):
            return Block(config, Attention(config))
        C, E = config.n_embd, config.n_expert
        gate = SoftmaxRouter(C, E, config.top_k, config.norm_topk_prob)
        experts = Experts(E, C, config.expert_size, config.activation)
        return Block(config, Attention(config), MixtureOfExperts(gate, experts))


class Qwen3MoeForCausalLM(Qwen2ForCausalLM):
    """Qwen3 with experts and its language-model head."""

    backbone_class = Qwen3MoeModel
