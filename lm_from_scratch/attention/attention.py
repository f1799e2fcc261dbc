r"""Attention: a query takes the mean of the values, weighted by how well their keys match.

.. math::

   a_{ts} = \mathrm{softmax}_s\!\left(\frac{q_t \cdot k_s}{\sqrt{D}}\right), \qquad
   y_t = \sum_s a_{ts} v_s

over the keys that :mod:`~lm_from_scratch.attention.visibility` lets the query see. Every kind of
attention is a function with one signature, ``(q, k, v, visibility, dropout)``, for q (B, H, T, D),
k (B, Hkv, S, D) and v (B, Hkv, S, Dv); the result is (B, H, T, Dv). Nearly always Dv is D.

Two of them stand here: ``formula`` is the equation, ``sdpa`` the fused kernel of torch, which the
models use. :mod:`~lm_from_scratch.attention.kinds` lists all and puts one into a built model:
``tiled`` is in :mod:`~lm_from_scratch.attention.online_softmax`, ``flex`` in
:mod:`~lm_from_scratch.attention.flex`, ``packed`` in :mod:`~lm_from_scratch.attention.varlen`. What
each supports and how exact it is, :mod:`~lm_from_scratch.instruments.conformance` measures.

Shapes: B batch, H query heads, Hkv key and value heads, T queries, S keys, D features of a query
and a key, Dv of a value.

Source: Vaswani et al., *Attention Is All You Need*, 2017, arXiv:1706.03762.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.attention.gqa import check_shapes, repeat_kv
from lm_from_scratch.attention.visibility import Visibility

#: So many numbers of a tensor, and copies of them, stay in the cache of a processor.
IN_CACHE = 2**18

AttentionFunction = Callable[[Tensor, Tensor, Tensor, Visibility, float], Tensor]


def attention_weights(q: Tensor, k: Tensor, visibility: Visibility) -> Tensor:
    """The weights (B, H, T, S) of the formula: each row sums to 1, and is 0 where a key is hidden.

    A row that sees no key at all (a padding token) is 0 everywhere. Hidden scores are *replaced*
    by the most negative number; adding a large negative number to them is not the same, because
    a large score survives it.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    k = repeat_kv(k, q.shape[1])
    device = "cpu" if q.is_meta else q.device.type  # shapes alone have no autocast
    with torch.autocast(device, enabled=False):  # which would round the scores
        scores = q.to(work) @ k.to(work).mT / math.sqrt(q.shape[-1])  # (B, H, T, S)
    hidden = ~visibility.mask
    scores = scores.masked_fill(hidden, torch.finfo(work).min)
    return torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0).to(q.dtype)


def formula_attention(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
) -> Tensor:
    """Attention as written above, (B, H, T, Dv): every weight exists in memory at once."""
    check_shapes(q, k, v, visibility)
    weights = F.dropout(attention_weights(q, k, visibility), p=dropout)
    return weights @ repeat_kv(v, q.shape[1])


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
) -> Tensor:
    """The same through torch's fused kernel, which never holds the (T, S) weights.

    ``is_causal`` is used only when queries and keys are the same tokens: for fewer queries than
    keys torch aligns the triangle to the first key, which is wrong after a cache.
    """
    check_shapes(q, k, v, visibility)
    mask = None if visibility.is_full or visibility.is_causal else visibility.mask
    if mask is not None and visibility.dense and visibility.window is not None:
        # what is too old for the first query is too old for all of them
        old = max(0, k.shape[2] - q.shape[2] - visibility.window + 1)
        k, v, mask = k[:, :, old:], v[:, :, old:], mask[..., old:]
    (B, H, T, D), Hkv = q.shape, k.shape[1]
    if T > 1:
        Dv = v.shape[3]
        if Dv < D:  # the fused kernels know one width alone
            v = F.pad(v, (0, D - Dv))
        y = F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=visibility.is_causal, enable_gqa=Hkv != H
        )
        return y[..., :Dv]
    if Hkv < H:  # the query heads of a key head are queries of one head, which reads its keys once
        q = q.reshape(B, Hkv, -1, D)
    elif q.dtype == torch.bfloat16 and q.device.type == "cpu":
        return one_query_in_float32(q, k, v, mask, dropout)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout).reshape(B, H, 1, -1)


def one_query_in_float32(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> Tensor:
    """Attention of q (B, H, 1, D), k (B, H, S, D) and v (B, H, S, Dv) with a ``mask``
    (B or 1, 1, 1, S).

    For a query alone torch's float32 kernel for a CPU, and the copies for it, take a third of the
    time of its bfloat16 kernel; some heads at a time, whose copies stay in the processor's cache.
    """
    (B, H, S, _), heads = k.shape, max(1, IN_CACHE // k[0, 0].numel())
    if heads >= B * H:
        y = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask, dropout)
        return y.to(q.dtype)
    mask = torch.ones(1, dtype=torch.bool, device=q.device) if mask is None else mask
    inputs = (q, k, v, mask.expand(B, H, 1, S))
    parts = zip(*(x.reshape(1, B * H, -1, x.shape[3]).split(heads, dim=1) for x in inputs))
    some = [
        F.scaled_dot_product_attention(q.float(), k.float(), v.float(), m, dropout)
        for q, k, v, m in parts
    ]
    return torch.cat(some, dim=1).to(q.dtype).view(B, H, 1, -1)
