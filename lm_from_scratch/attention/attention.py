r"""Attention: a query takes the mean of the values, weighted by how well their keys match.

.. math::

   a_{ts} = \mathrm{softmax}_s\!\left(\frac{q_t \cdot k_s}{\sqrt{D}}\right), \qquad
   y_t = \sum_s a_{ts} v_s

over the keys that :mod:`~lm_from_scratch.attention.visibility` lets the query see. Every kind of
attention is a function with one signature, ``(q, k, v, visibility, dropout)``, for q (B, H, T, D),
k (B, Hkv, S, D) and v (B, Hkv, S, Dv); the result is (B, H, T, Dv). Nearly always Dv is D.

Here stands the equation itself, the kind named ``formula``. The models use torch's fused kernel,
:mod:`~lm_from_scratch.attention.sdpa`. :mod:`~lm_from_scratch.attention.kinds` lists all kinds and
puts one into a built model. What each supports and how exact it is,
:mod:`~lm_from_scratch.instruments.conformance` measures.

Shapes: B batch, H query heads, Hkv key and value heads, T queries, S keys, D features of a query
and a key, Dv of a value.

Source: Vaswani et al., *Attention Is All You Need*, 2017, arXiv:1706.03762.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.attention.gqa import repeat_kv
from lm_from_scratch.attention.layer import check_shapes
from lm_from_scratch.attention.visibility import Visibility


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
