r"""Attention, and the one rule that decides who sees whom.

A query :math:`q_t` compares itself with every key :math:`k_s` that it may see and takes the mean of
their values, weighted by how well they match:

.. math::

   a_{ts} = \mathrm{softmax}_s\!\left(\frac{q_t \cdot k_s}{\sqrt{D}}\right), \qquad
   y_t = \sum_s a_{ts} v_s

Which keys a query may see follows from **positions**: one integer for each token that says where it
stands in its own sequence, -1 for padding. *A key is visible if it is real, not after the query,
within the window, and in the same document.* Causal masks, left and right padding, chunks after a
cache, sliding windows and packed documents are all this one sentence.

Shapes: B batch, H heads, T queries, S keys, D features of a head.

Source: Vaswani et al., *Attention Is All You Need*, 2017, arXiv:1706.03762.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PADDING = -1  # the position of a token that is not there


def positions_from_mask(attention_mask: Tensor) -> Tensor:
    """The positions (B, T) of a mask (B, T) of 1 (or True) for tokens and 0 (or False) for padding.

    Real tokens count 0, 1, 2, ... wherever the padding stands; padding gets -1.
    """
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; it must be (batch, tokens)"
        )
    real = attention_mask != 0
    if not torch.equal(real.to(attention_mask.dtype), attention_mask):
        raise ValueError("attention_mask may hold 0 and 1 (or False and True) alone")
    return torch.where(real, real.long().cumsum(dim=1) - 1, PADDING)


@dataclass(eq=False)
class Visibility:
    """Which keys each query may see.

    ``dense`` says what is known *without looking at the positions*: no token is padding, all are in
    one document, and key ``s`` stands at position ``s``, the queries being the last T of the S
    keys. The fast paths of attention are chosen from it alone, so that no tensor value is read for
    it (reading one would make a GPU wait, and a compiled graph break).

    Positions alone do not separate documents: two that are packed into one row both have a token at
    position 0, and see each other unless their document numbers differ.
    """

    query_positions: Tensor  # (B, T), or (1, T) where all rows are alike
    key_positions: Tensor  # (B, S) or (1, S)
    query_documents: Tensor | None = None  # (B, T)
    key_documents: Tensor | None = None  # (B, S)
    window: int | None = None  # keys that a query sees, its own included
    dense: bool = False
    _mask: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1: a query sees its own key")
        if (self.query_documents is None) != (self.key_documents is None):
            raise ValueError("documents are needed for both queries and keys, or for neither")

    @property
    def mask(self) -> Tensor:
        """The rule as a tensor (B, 1, T, S), True where the key is visible; made once."""
        if self._mask is None:
            self._mask = self.rule()
        return self._mask

    def rule(self) -> Tensor:
        """Real, not after the query, within the window, in the same document."""
        query = self.query_positions[:, None, :, None]  # (B, 1, T, 1)
        key = self.key_positions[:, None, None, :]  # (B, 1, 1, S)
        mask = (key >= 0) & (key <= query)
        if self.window is not None:
            mask = mask & (key > query - self.window)
        if self.query_documents is not None and self.key_documents is not None:
            same = self.query_documents[:, :, None] == self.key_documents[:, None, :]
            mask = mask & same[:, None]
        return mask

    @property
    def is_causal(self) -> bool:
        """Known to be the plain lower triangle: as many queries as keys, nothing else hidden."""
        return self.dense and self.window is None and self.query_length == self.key_length

    @property
    def is_full(self) -> bool:
        """Known to hide nothing: the one query is the last token."""
        return self.dense and self.window is None and self.query_length == 1

    @property
    def query_length(self) -> int:
        return self.query_positions.shape[1]

    @property
    def key_length(self) -> int:
        return self.key_positions.shape[1]


def attention_weights(q: Tensor, k: Tensor, visibility: Visibility) -> Tensor:
    """The weights (B, H, T, S) of the formula: each row sums to 1, and is 0 where a key is hidden.

    A row that sees no key at all (a padding token) is 0 everywhere. Hidden scores are *replaced*
    by the most negative number; adding a large negative number to them is not the same, because
    a large score survives it.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(work) @ k.to(work).transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, S)
    hidden = ~visibility.mask
    scores = scores.masked_fill(hidden, torch.finfo(work).min)
    return torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0).to(q.dtype)


def formula_attention(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
) -> Tensor:
    """Attention as written above, (B, H, T, D): every weight exists in memory at once."""
    weights = F.dropout(attention_weights(q, k, visibility), p=dropout)
    return weights @ v


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
) -> Tensor:
    """The same through torch's fused kernel, which never holds the (T, S) weights.

    ``is_causal`` is used only when queries and keys are the same tokens: for fewer queries than
    keys torch aligns the triangle to the first key, which is wrong after a cache.
    """
    needs_mask = not (visibility.is_causal or visibility.is_full)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=visibility.mask if needs_mask else None,
        dropout_p=dropout,
        is_causal=visibility.is_causal,
    )


AttentionFunction = Callable[[Tensor, Tensor, Tensor, Visibility, float], Tensor]

ATTENTION_KINDS: dict[str, AttentionFunction] = {
    "formula": formula_attention,
    "sdpa": sdpa_attention,
}


def attention_layers(model: nn.Module) -> list[Any]:
    """The attention modules of a built model, in order: those with an ``attend`` function."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "attend")]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layer (no module with `attend`)")
    return layers


def use_attention_(model: nn.Module, kind: str) -> None:
    """Make every attention layer of a built model compute with the named kind."""
    if kind not in ATTENTION_KINDS:
        raise ValueError(f"attention kind {kind!r} is not one of {sorted(ATTENTION_KINDS)}")
    for layer in attention_layers(model):
        layer.attend = ATTENTION_KINDS[kind]


@contextmanager
def record_attention(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Record the attention weights of every forward pass of a built model.

    Yields one list per layer; each forward appends its weights (B, H, T, S), detached. The layer's
    result is unchanged, whichever attention kind it uses::

        with record_attention(model) as maps:
            model(idx)
        maps[3][0]  # layer 3, first forward: (B, H, T, S)
    """
    layers = attention_layers(model)
    maps: list[list[Tensor]] = [[] for _ in layers]
    originals = [layer.attend for layer in layers]

    def recording(attend: AttentionFunction, weights: list[Tensor]) -> AttentionFunction:
        def wrapped(
            q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
        ) -> Tensor:
            with torch.no_grad():
                weights.append(attention_weights(q, k, visibility))
            return attend(q, k, v, visibility, dropout)

        return wrapped

    for layer, attend, weights in zip(layers, originals, maps, strict=True):
        layer.attend = recording(attend, weights)
    try:
        yield maps
    finally:
        for layer, attend in zip(layers, originals, strict=True):
            layer.attend = attend
