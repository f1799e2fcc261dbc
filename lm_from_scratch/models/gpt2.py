r"""GPT-2, complete.

Token and position embeddings are added; each block adds what attention and the MLP have to say,
each of them reading a normalised copy; the last norm and the transposed token embedding turn the
state of a token into a score for every possible next token:

.. math::

   x &\leftarrow x + \mathrm{Attention}(\mathrm{LayerNorm}(x)) \\
   x &\leftarrow x + \mathrm{MLP}(\mathrm{LayerNorm}(x))

Submodules carry the names of the published checkpoints (``wte``, ``c_attn``, ...), so weights load
by name; the files hold (in, out), so :mod:`~lm_from_scratch.checkpoint.weights` transposes. Shapes:
B batch, T tokens, S keys (with those of the cache), C = n_embd, H = n_head, D = C / H,
V = vocab_size.

Source: Radford et al., *Language Models are Unsupervised Multitask Learners*, 2019.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.attention.layer import AttentionLayer
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import NO_CACHE, Cache, LayerCache, check_cache, known
from lm_from_scratch.layers.activation import ACTIVATIONS, Activation
from lm_from_scratch.layers.embedding import embedded
from lm_from_scratch.layers.head import TiedHead, columns
from lm_from_scratch.layers.layer_norm import LayerNorm
from lm_from_scratch.limits import Count, Positive, Share, TokenId, TokenIds, check, multiple_of
from lm_from_scratch.models.interface import CausalLM


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """The numbers that define a GPT-2. The defaults are those of the smallest published one."""

    vocab_size: Count = 50257  # tokens in the vocabulary
    block_size: Count = 1024  # the longest sequence, in tokens (each position has an embedding)
    n_layer: Count = 12  # blocks
    n_head: Count = 12  # attention heads in each block
    n_embd: Annotated[Count, multiple_of("n_head")] = 768  # features, a multiple of n_head
    intermediate_size: Count | None = None  # width of the MLP (None means 4 * n_embd)
    activation: Activation = "gelu_new"
    embd_pdrop: Share = 0.1
    resid_pdrop: Share = 0.1
    attn_pdrop: Share = 0.1
    layer_norm_eps: Positive = 1e-5
    initializer_range: Positive = 0.02  # deviation of new weights
    bos_token_id: TokenId | None = 50256
    eos_token_id: TokenIds | None = 50256
    pad_token_id: TokenId | None = None

    def __post_init__(self) -> None:
        check(self)

    @property
    def head_dim(self) -> int:
        """D, the features of a head."""
        return self.n_embd // self.n_head

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """What a cache is given of a token in a layer: heads, the width of a key, of a value."""
        return self.n_head, self.head_dim, self.head_dim

    @property
    def windows(self) -> list[int | None]:
        """Keys that each layer sees: all of them."""
        return [None] * self.n_layer

    @property
    def position_limit(self) -> int:
        """The number of positions that have an embedding."""
        return self.block_size


#: The published sizes: what differs from the defaults.
SIZES: dict[str, dict[str, int]] = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),  # 124 M parameters
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),  # 355 M
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),  # 774 M
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),  # 1558 M
}


class Attention(AttentionLayer):
    """Causal self-attention of ``x`` (B, T, C) with H heads. ``visibility`` says which keys a query
    sees: none after itself. ``attend`` is the function that computes it."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.n_head, self.head_dim = config.n_head, config.head_dim
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_pdrop, self.resid_pdrop = config.attn_pdrop, config.resid_pdrop
        self.attend = sdpa_attention

    def forward(self, x: Tensor, visibility: Visibility, cache: LayerCache) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B, H, T, D)
        k, v = cache.update(k, v)  # (B, H, S, D)
        y = self.attend(q, k, v, visibility, self.attn_pdrop if self.training else 0.0)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.resid_pdrop) if self.training else y


class MLP(nn.Module):
    """Two linear maps with an activation between them, applied to every token of ``x`` (B, T, C)
    alone."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        intermediate_size = config.intermediate_size or 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, intermediate_size)
        self.act = ACTIVATIONS[config.activation]
        self.c_proj = nn.Linear(intermediate_size, config.n_embd)
        self.resid_pdrop = config.resid_pdrop

    def forward(self, x: Tensor) -> Tensor:
        y = self.c_proj(self.act(self.c_fc(x)))
        return F.dropout(y, self.resid_pdrop) if self.training else y


class Block(nn.Module):
    """One layer: attention moves information between the tokens of ``x`` (B, T, C), the MLP works
    on each of them."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_eps)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, visibility: Visibility, cache: LayerCache) -> Tensor:
        x = x + self.attn(self.ln_1(x), visibility, cache)
        return x + self.mlp(self.ln_2(x))


class GPT2Model(nn.Module):
    """From token ids to hidden states: everything but the head.

    Raises ``ValueError`` for ids that are not (B, T), and for more tokens than there are positions.
    """

    prefix = "transformer"  # its name in a checkpoint

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, config.layer_norm_eps)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the weights: N(0, initializer_range²); biases 0, LayerNorm weights 1.

        Each block adds two vectors to ``x``, so after L blocks 2L of them are summed. The maps that
        produce them (``c_proj``) start smaller by 1/sqrt(2L), which keeps the sum at one scale.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                layers = 2 * self.config.n_layer if name.endswith("c_proj.weight") else 1
                parameter.normal_(0.0, self.config.initializer_range / math.sqrt(layers))

    def forward(
        self,
        idx: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache = NO_CACHE,
    ) -> Tensor:
        """Hidden states (B, T, C), after the last norm, of the token ids ``idx`` (B, T), or of
        embeddings (B, T, C), which need not be those of tokens.

        ``positions`` (B, T) say where each token stands, -1 for padding; without them every row
        continues where the cache ends. ``documents`` (B, T) number the documents packed into a row,
        whose positions start again at 0 in each.
        """
        x = embedded(idx, self.wte)
        check_cache(cache)
        seen = cache.see(idx, positions, documents, self.config.windows)
        end = cache.length + idx.shape[1] if positions is None else known(positions.max(), -1) + 1
        self._check_length(end)
        x = x + self.wpe(seen[0].query_positions.clamp(min=0))
        x = F.dropout(x, self.config.embd_pdrop) if self.training else x
        for layer, block in enumerate(self.h):
            x = block(x, seen[layer], cache[layer])
        return self.ln_f(x)

    @property
    def embedding(self) -> nn.Embedding:
        """The table of the tokens' vectors."""
        return self.wte

    def _check_length(self, length: int) -> None:
        if length > self.config.block_size:
            raise ValueError(
                f"the sequence has {length} tokens, but block_size={self.config.block_size}: "
                "there are no embeddings for the later positions"
            )


class GPT2LMHeadModel(CausalLM):
    """GPT-2 with its language-model head, which is the token embedding, used the other way
    round."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.transformer = GPT2Model(config)
        self.lm_head = TiedHead(self.transformer)

    @property
    def backbone(self) -> GPT2Model:
        """The model without its head."""
        return self.transformer

    def forward(
        self,
        idx: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache = NO_CACHE,
        keep: slice | Tensor = slice(None),
    ) -> Tensor:
        """Logits (B, T, V) of the token ids ``idx``, at ``positions`` and in ``documents`` (B, T),
        which are as in :class:`GPT2Model`. ``keep`` chooses the columns to compute them for:
        ``slice(-1, None)`` is the last, all that generation needs; a tensor of indices works too.
        """
        x = self.transformer(idx, positions=positions, documents=documents, cache=cache)
        return self.lm_head(columns(x, keep))
