r"""Qwen3-Next: three layers with a state of fixed size for each layer with keys and values.

The block is that of :mod:`~lm_from_scratch.models.qwen2`, with one of two layers that move
information between tokens. Three of four are a
:class:`~lm_from_scratch.models.gated_delta_net.GatedDeltaNet`, whose memory does not grow with the
text; the fourth is attention, which can still look up any token exactly. That one differs from
Qwen3's in two ways:

* each head's output is multiplied by the sigmoid of a *gate*, a second half of the query
  projection, so that a head can say nothing without a token to attend to;
* only the first quarter of a head's features is turned to its position.

The norms are *zero-centred*: they multiply by :math:`1 + w`, so weight decay pulls them towards 1.

For an MLP, layers have :mod:`~lm_from_scratch.layers.experts`, as those of
:mod:`~lm_from_scratch.models.qwen3_moe`, and a shared one with a gate of its own.

Sources: Yang et al., *Gated Delta Networks*, 2024, arXiv:2412.06464; Qiu et al., *Gated Attention
for Large Language Models*, 2025, arXiv:2505.06708; the code of Qwen3-Next in ``transformers``.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import NO_CACHE, Cache, LayerCache, known
from lm_from_scratch.layers.activation import Activation
from lm_from_scratch.layers.experts import Experts, GatedSharedExpert, SoftmaxRouter, TopK
from lm_from_scratch.layers.gated_mlp import GatedMLP
from lm_from_scratch.layers.norm import ZeroCentredRMSNorm
from lm_from_scratch.layers.rope import RopeScaling, Theta, apply_partial_rope
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
from lm_from_scratch.models.gated_attention import GatedAttention
from lm_from_scratch.models.gated_delta_net import GatedDeltaNet
from lm_from_scratch.models.qwen2 import FULL, Block, Qwen2Config, Qwen2ForCausalLM, Qwen2Model
from lm_from_scratch.models.qwen3_moe import check_dense_layers

LINEAR = "linear_attention"  # the word of published configs for a layer with a state


@dataclass(frozen=True, kw_only=True)
class HybridConfig(Qwen2Config):
    """The numbers of a model whose layers have a state or see all keys. ``layer_types`` says which;
    without it every fourth sees all keys. Qwen2's checks of numbers hold."""

    partial_rotary_factor: Positive = 0.25  # of the features of a head
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Annotated[Count, multiple_of("linear_num_key_heads")] = 32
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_conv_kernel_dim: Count = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        share, D = self.partial_rotary_factor, self.head_dim
        if share > 1 or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"partial_rotary_factor={share} of head_dim={D} is {self.rotary_dim} features: "
                f"they turn in pairs, at most {D} of them"
            )

    def _check_layers(self) -> None:
        if self.sliding_window is not None or self.max_window_layers is not None:
            raise ValueError(
                f"sliding_window={self.sliding_window} and max_window_layers="
                f"{self.max_window_layers} are not supported: no layer slides"
            )
        if self.layer_types is None:
            words = tuple(LINEAR if (n + 1) % 4 else FULL for n in range(self.n_layer))
            object.__setattr__(self, "layer_types", words)
        types = self.layer_types
        if type(types) is not tuple or len(types) != self.n_layer:
            raise ValueError(f"layer_types={types!r} must be a tuple of n_layer={self.n_layer}")
        if unknown := set(types) - {FULL, LINEAR}:
            raise ValueError(f"layer_types has {sorted(unknown)}, not {FULL!r} or {LINEAR!r}")

    @property
    def recurrent_layers(self) -> list[int]:
        """The numbers of the layers with a state."""
        return [n for n, word in enumerate(self.layer_types or ()) if word == LINEAR]

    @property
    def windows(self) -> list[int | None]:
        """``None`` for a layer that sees all keys; 1 for one with a state: it sees its own token,
        and the state says the rest."""
        return [1 if word == LINEAR else None for word in self.layer_types or ()]

    @property
    def kinds(self) -> list[str]:
        """The word of each layer in a published config."""
        return list(self.layer_types or ())

    @property
    def rotary_dim(self) -> int:
        """How many features of a head are turned."""
        return int(self.head_dim * self.partial_rotary_factor)


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(HybridConfig):
    """The numbers that define a Qwen3-Next. The defaults have the shape of the published one."""

    vocab_size: Count = 151936
    block_size: Count = 262144
    n_layer: Count = 48
    n_head: Annotated[Count, multiple_of("n_kv_head")] = 16
    n_kv_head: Computed = 2
    n_embd: Count = 2048
    intermediate_size: Count = 5120  # of layers without experts
    head_dim: Computed = 256
    qkv_bias: bool = False
    activation: Activation = "silu"
    n_expert: Count = 512
    top_k: TopK = 10  # experts that a token visits
    expert_size: Count = 512
    shared_expert_size: Count = 512  # the width of the one that all tokens visit
    norm_topk_prob: bool = True  # whether the weights of these experts sum to 1
    decoder_sparse_step: Count = 1  # every how many layers there are experts
    mlp_only_layers: tuple[int, ...] = ()
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
    eos_token_id: TokenIds | None = 151645

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dense_layers(self.mlp_only_layers)

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of that number has experts."""
        return (layer + 1) % self.decoder_sparse_step == 0 and layer not in self.mlp_only_layers


#: Published sizes: what differs from the defaults.
SIZES: dict[str, dict[str, int]] = {"Qwen3-Next-80B-A3B": {}}


class RecurrentBlock(nn.Module):
    """One layer of ``x`` (B, T, C) whose ``linear_attn`` carries a state from token to token, in
    the place of attention; then an MLP. It needs no rotation."""

    def __init__(self, config: HybridConfig, linear_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = ZeroCentredRMSNorm(config.n_embd, config.rms_norm_eps)
        self.linear_attn = linear_attn
        self.post_attention_layernorm = ZeroCentredRMSNorm(config.n_embd, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        visibility: Visibility,
        cache: LayerCache,
    ) -> Tensor:
        x = x + self.linear_attn(self.input_layernorm(x), visibility, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class HybridModel(Qwen2Model):
    """From token ids, or embeddings, to hidden states, for layers with a state among layers that
    see all keys. An architecture says what each layer has for an MLP."""

    config: HybridConfig
    delta_net = GatedDeltaNet  # the layer with a state

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config, norm=ZeroCentredRMSNorm)

    def block(self, layer: int) -> nn.Module:
        config = self.config
        if layer not in config.recurrent_layers:
            attention = GatedAttention(config, rotate=apply_partial_rope)
            return Block(config, attention, self.mlp(layer), norm=ZeroCentredRMSNorm)
        linear_attn = self.delta_net(
            config.n_embd, config.linear_num_key_heads, config.linear_num_value_heads,
            config.linear_key_head_dim, config.linear_value_head_dim,
            config.linear_conv_kernel_dim, config.activation, config.rms_norm_eps,
        )  # fmt: skip
        return RecurrentBlock(config, linear_attn, self.mlp(layer))

    @abstractmethod
    def mlp(self, layer: int) -> nn.Module:
        """What follows attention or the state in that layer."""

    @torch.no_grad()
    def init_weights(self) -> None:
        """As Qwen2; zero-centred norms 0, and the gates of the states as they fade."""
        super().init_weights()
        for module in self.modules():
            if isinstance(module, ZeroCentredRMSNorm):
                module.weight.zero_()
            elif isinstance(module, GatedDeltaNet):
                module.init_gates()

    def forward(
        self,
        idx: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache = NO_CACHE,
    ) -> Tensor:
        """As :class:`~lm_from_scratch.models.qwen2.Qwen2Model`, of ``idx`` (B, T) or embeddings.

        A state reads the tokens in the order in which they stand there: ``ValueError`` is raised
        where ``positions`` (B, T) do not rise along a row, or along each of its ``documents`` (B,
        T)."""
        if positions is not None and positions.shape == idx.shape[:2]:
            check_order(positions, documents)
        return super().forward(idx, positions=positions, documents=documents, cache=cache)


def check_order(positions: Tensor, documents: Tensor | None) -> None:
    """Raises ``ValueError`` where the ``positions`` (B, T) of real tokens do not rise, or a new
    document (of ``documents`` (B, T)) does not begin at 0."""
    order = (positions < 0).int().argsort(dim=1, stable=True)  # real tokens first
    places = positions.gather(1, order)
    before, after = places[:, :-1], places[:, 1:]
    fits = after > before
    if documents is not None and documents.shape == positions.shape:
        number = documents.gather(1, order)
        fits = torch.where(number[:, 1:] == number[:, :-1], fits, after == 0)
    wrong = ~fits & (after >= 0)
    if known(wrong.any(), otherwise=0):
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"row {row} has position {int(after[row, column])} after {int(before[row, column])}: a "
            "layer with a state reads tokens in order, each document from position 0 to its end"
        )


class Qwen3NextModel(HybridModel):
    """From token ids, or embeddings, to hidden states: everything but the head."""

    config: Qwen3NextConfig

    def mlp(self, layer: int) -> nn.Module:
        """Experts and a shared one, or a gated MLP."""
        config = self.config
        C, E, act = config.n_embd, config.n_expert, config.activation
        if not config.has_experts(layer):
            return GatedMLP(C, config.intermediate_size, act)
        gate = SoftmaxRouter(C, E, config.top_k, config.norm_topk_prob)
        experts = Experts(E, C, config.expert_size, act)
        return GatedSharedExpert(gate, experts, GatedMLP(C, config.shared_expert_size, act))


class Qwen3NextForCausalLM(Qwen2ForCausalLM):
    """Qwen3-Next with its language-model head, tied or not."""

    backbone_class = Qwen3NextModel  # type: ignore[assignment]
