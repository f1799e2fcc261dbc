r"""SmolLM3: a Llama in which every fourth layer has no positions.

A layer that turns its queries and keys compares *what* and *how far* in one number. A layer that
leaves them as they are (NoPE) compares what alone, at any distance, also one that no training text
had:

.. math::

   q_m \cdot k_n = \begin{cases}
   (R_m W_q x_m) \cdot (R_n W_k x_n) & \text{in a layer that rotates} \\
   (W_q x_m) \cdot (W_k x_n) & \text{in a layer that does not}
   \end{cases}

Such a layer is not blind to order: below it are layers that rotate, and the causal mask shows each
token another number of keys. All else is :mod:`~lm_from_scratch.models.qwen2` without biases; the
weights are the same matrices in both kinds of layer.

Sources: Bakouch et al., *SmolLM3: smol, multilingual, long-context reasoner*, 2025,
https://huggingface.co/blog/smollm3; Yang et al., *Rope to Nope and Back Again*, 2025,
arXiv:2501.18795.
"""

from dataclasses import dataclass
from typing import Annotated

from torch import nn

from lm_from_scratch.layers.activation import Activation
from lm_from_scratch.layers.rope import RopeScaling, Theta, apply_rope, unrotated
from lm_from_scratch.limits import (
    Computed,
    Count,
    Positive,
    Share,
    TokenId,
    TokenIds,
    Whole,
    multiple_of,
    shown,
)
from lm_from_scratch.models.qwen2 import Attention, Block, Qwen2Config, Qwen2ForCausalLM, Qwen2Model


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(Qwen2Config):
    """The numbers that define a SmolLM3. The defaults are those of the published one, of 3 billion
    weights.

    ``rope_layers`` has a 1 for each layer that rotates and a 0 for each that does not. (Files call
    it ``no_rope_layers``, and mean the same: a 1 there *is* a rotation.) Qwen2's checks hold.
    """

    vocab_size: Count = 128256
    block_size: Count = 65536
    n_layer: Count = 36
    n_head: Annotated[Count, multiple_of("n_kv_head")] = 16
    n_kv_head: Computed = 4
    n_embd: Count = 2048
    intermediate_size: Count = 11008
    head_dim: Computed = None  # type: ignore[assignment]  # None becomes n_embd / n_head
    qkv_bias: bool = False
    activation: Activation = "silu"
    rms_norm_eps: Positive = 1e-6
    rope_theta: Theta = 5_000_000.0
    rope_scaling: RopeScaling | None = None
    rope_layers: tuple[int, ...] = None  # type: ignore[assignment]  # None: all but every fourth
    sliding_window: Count | None = None
    layer_types: tuple[str, ...] | None = None
    max_window_layers: Whole | None = None
    tie_word_embeddings: bool = True
    attention_dropout: Share = 0.0
    initializer_range: Positive = 0.02
    pad_token_id: TokenId | None = 128004
    bos_token_id: TokenId | None = 128000
    eos_token_id: TokenIds | None = 128012

    def __post_init__(self) -> None:
        super().__post_init__()
        if getattr(self, "rope_layers") is None:  # noqa: B009
            object.__setattr__(self, "rope_layers", all_but_every(4, self.n_layer))
        value = f"rope_layers={shown(self.rope_layers)}"
        if type(self.rope_layers) is not tuple or len(self.rope_layers) != self.n_layer:
            raise ValueError(f"{value} must be a tuple of n_layer={self.n_layer}")
        if any(type(n) is not int or n not in (0, 1) for n in self.rope_layers):
            raise ValueError(f"{value} must be 1 (rotates) or 0 (does not) for a layer")


def all_but_every(interval: int, n_layer: int) -> tuple[int, ...]:
    """1 for each of ``n_layer`` layers, and 0 for the last of each ``interval``."""
    return tuple(int((layer + 1) % interval != 0) for layer in range(n_layer))


class SmolLM3Model(Qwen2Model):
    """From token ids, or embeddings, to hidden states: everything but the head."""

    config: SmolLM3Config

    def block(self, layer: int) -> nn.Module:
        rotate = apply_rope if self.config.rope_layers[layer] else unrotated
        return Block(self.config, Attention(self.config, rotate))


class SmolLM3ForCausalLM(Qwen2ForCausalLM):
    """SmolLM3 with its language-model head, tied or not."""

    backbone_class = SmolLM3Model
