r"""Attention: a query takes the mean of the values, weighted by how well their keys match.

.. math::

   a_{ts} = \mathrm{softmax}_s\!\left(\frac{q_t \cdot k_s}{\sqrt{D}}\right), \qquad
   y_t = \sum_s a_{ts} v_s

over the keys that :mod:`~lm_from_scratch.visibility` lets the query see. Every kind of attention is
a function with one signature, ``(q, k, v, visibility, dropout)``, and the same result:
:data:`ATTENTION_KINDS` lists them and :func:`use_attention_` puts one into a built model.

With **grouped-query attention** several query heads share one key and value head: query head ``h``
reads key head ``h // (H / Hkv)``. Hkv = 1 is multi-query attention.

Shapes: B batch, H query heads, Hkv key and value heads, T queries, S keys, D features of a head.

Sources: Vaswani et al., *Attention Is All You Need*, 2017, arXiv:1706.03762; Ainslie et al., *GQA*,
2023, arXiv:2305.13245.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.visibility import Visibility


def repeat_kv(x: Tensor, n_head: int) -> Tensor:
    """(B, Hkv, S, D) to (B, H, S, D): each head ``H / Hkv`` times in a row, as 0 0 0 1 1 1.

    (Tiling, as 0 1 0 1 0 1, would give every query head the keys of another group.)
    """
    if n_head % x.shape[1] != 0:
        raise ValueError(f"{n_head} query heads cannot share {x.shape[1]} key heads evenly")
    return x.repeat_interleave(n_head // x.shape[1], dim=1)


def attention_weights(q: Tensor, k: Tensor, visibility: Visibility) -> Tensor:
    """The weights (B, H, T, S) of the formula: each row sums to 1, and is 0 where a key is hidden.

    A row that sees no key at all (a padding token) is 0 everywhere. Hidden scores are *replaced*
    by the most negative number; adding a large negative number to them is not the same, because
    a large score survives it.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    k = repeat_kv(k, q.shape[1])
    scores = q.to(work) @ k.to(work).transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, S)
    hidden = ~visibility.mask
    scores = scores.masked_fill(hidden, torch.finfo(work).min)
    return torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0).to(q.dtype)


def formula_attention(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
) -> Tensor:
    """Attention as written above, (B, H, T, D): every weight exists in memory at once."""
    weights = F.dropout(attention_weights(q, k, visibility), p=dropout)
    return weights @ repeat_kv(v, q.shape[1])


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
        enable_gqa=q.shape[1] != k.shape[1],
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
