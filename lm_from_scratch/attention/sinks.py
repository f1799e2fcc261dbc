r"""Attention with a sink: a learned score that takes part in the softmax and has no value.

The weights of a softmax sum to 1, so a head that finds nothing must spend its weight all the same.
Trained models spend it on a token that says little, mostly the first. A sink :math:`z_h`, one
number for each query head, takes it instead:

.. math::

   a_{ts} = \frac{e^{x_{ts}}}{e^{z_h} + \sum_r e^{x_{tr}}}, \qquad
   x_{ts} = \frac{q_t \cdot k_s}{\sqrt{D}}, \qquad y_t = \sum_s a_{ts} v_s

The weights of the keys sum to less than 1. With :math:`L_t = \log \sum_r e^{x_{tr}}` the result is
that of plain attention times :math:`\sigma(L_t - z_h)`: large where some key fits, near 0 where
none does. The sink is not divided by :math:`\sqrt{D}`. It is no key: it has no position, no window
hides it, and no cache keeps it.

Shapes: B batch, H query heads, Hkv key and value heads, T queries, S keys, D features of a head.

Sources: OpenAI, *gpt-oss-120b & gpt-oss-20b Model Card*, 2025, arXiv:2508.10925; Miller, *Attention
Is Off By One*, 2023 (a sink that is always 0).
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.attention.gqa import repeat_kv
from lm_from_scratch.attention.layer import AttentionFunction, AttentionLayer, check_shapes
from lm_from_scratch.attention.visibility import Visibility

#: As ``AttentionFunction``, with the sinks (H,) after the visibility.
SinkFunction = Callable[[Tensor, Tensor, Tensor, Visibility, Tensor, float], Tensor]

#: More features for queries and keys, so that their number stays a multiple of 8, as kernels want.
WIDER = 8


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raises ``ValueError`` unless ``sinks`` has one number for each head of q (B, H, T, D)."""
    if sinks.shape != q.shape[1:2]:
        raise ValueError(
            f"sinks have shape {tuple(sinks.shape)}; they must have one number for each of the "
            f"{q.shape[1]} query heads"
        )


def sink_weights(q: Tensor, k: Tensor, visibility: Visibility, sinks: Tensor) -> Tensor:
    """The weights (B, H, T, S) of the keys beside ``sinks`` (H,), from q (B, H, T, D) and k
    (B, Hkv, S, D). What is missing from 1 in a row is the sink's; a row that sees no key is 0
    everywhere. Raises ``ValueError`` for sinks of another shape."""
    check_sinks(sinks, q)
    work = torch.promote_types(q.dtype, torch.float32)
    k = repeat_kv(k, q.shape[1])
    device = "cpu" if q.is_meta else q.device.type  # shapes alone have no autocast
    with torch.autocast(device, enabled=False):  # which would round the scores
        scores = q.to(work) @ k.to(work).mT / math.sqrt(q.shape[-1])  # (B, H, T, S)
    scores = scores.masked_fill(~visibility.mask, -torch.inf)  # the sink is never hidden
    sink = sinks.to(work).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([sink, scores], dim=-1), dim=-1)[..., 1:].to(q.dtype)


def formula_sink_attention(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, sinks: Tensor, dropout: float = 0.0
) -> Tensor:
    """Attention with ``sinks`` (H,) as written above, of q (B, H, T, D), k and v (B, Hkv, S, D)."""
    check_shapes(q, k, v, visibility)
    weights = F.dropout(sink_weights(q, k, visibility, sinks), p=dropout)
    return weights @ repeat_kv(v, q.shape[1])


def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, sinks: Tensor, dropout: float = 0.0
) -> Tensor:
    """The same of q (B, H, T, D), k and v (B, Hkv, S, D) through torch's fused kernel, for
    ``sinks`` (H,) that are finite.

    The kernel knows no sinks, but a sink is what one more key in front of the others would be,
    whose value is 0 and whose product with every query of a head is that head's sink. Query and key
    get more features for it: the query has the sink there, the new key 1, and the other keys 0. One
    more query in front, whose result is dropped, keeps the triangle a triangle.
    """
    check_shapes(q, k, v, visibility)
    check_sinks(sinks, q)
    B, H, T, D = q.shape
    if T == 1:
        return one_query_with_sinks(q, k, v, visibility, sinks, dropout)
    causal = visibility.is_causal
    score = (sinks.to(q.dtype) * math.sqrt(D)).view(1, H, 1, 1).expand(B, H, T, 1)
    q = F.pad(torch.cat([q, score], dim=-1), (0, WIDER - 1, int(causal), 0))
    beside = F.one_hot(torch.tensor(D, device=k.device), D + WIDER).to(k.dtype)  # the new key
    k = torch.cat([beside.expand(*k.shape[:2], 1, -1), F.pad(k, (0, WIDER))], dim=2)
    y = F.scaled_dot_product_attention(
        q,
        k,
        F.pad(v, (0, WIDER, 1, 0)),
        None if causal else F.pad(visibility.mask, (1, 0), value=True),
        dropout,
        is_causal=causal,
        scale=1 / math.sqrt(D),
        enable_gqa=k.shape[1] != H,
    )
    return y[:, :, int(causal) :, : v.shape[-1]]


def one_query_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, sinks: Tensor, dropout: float = 0.0
) -> Tensor:
    """The same for q (B, H, 1, D), which reads each key once and copies none: the query heads of a
    key head become queries of one head."""
    (B, H, _, D), Hkv = q.shape, k.shape[1]
    work = torch.promote_types(q.dtype, torch.float32)
    scores = (q.reshape(B, Hkv, -1, D) @ k.mT).to(work) / math.sqrt(D)  # (B, Hkv, H / Hkv, S)
    if not visibility.is_full:
        scores = scores.masked_fill(~visibility.mask, -torch.inf)
    sink = sinks.to(work).view(1, Hkv, -1, 1).expand(B, -1, -1, -1)
    weights = torch.softmax(torch.cat([sink, scores], dim=-1), dim=-1)[..., 1:].to(q.dtype)
    return (F.dropout(weights, p=dropout) @ v).view(B, H, 1, -1)


def with_sinks(sinks: Tensor, compute: SinkFunction = sink_attention) -> AttentionFunction:
    """A function with the signature of all kinds of attention, which has these ``sinks`` (H,)."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
    ) -> Tensor:
        return compute(q, k, v, visibility, sinks, dropout)

    return attend


class SinkLayer(AttentionLayer):
    """An attention layer with ``sinks`` (H,), one for each head. ``compute`` is the function that
    computes it, with sinks."""

    sinks: Tensor
    compute: SinkFunction

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
    ) -> Tensor:
        """Attention (B, H, T, D) with this layer's sinks, of q (B, H, T, D), k and v
        (B, Hkv, S, D)."""
        return self.compute(q, k, v, visibility, self.sinks, dropout)

    def weigh(self, q: Tensor, k: Tensor, visibility: Visibility) -> Tensor:
        """The weights (B, H, T, S) of q (B, H, T, D) and k (B, Hkv, S, D), for a recorder; the rest
        of 1 is the sink's."""
        return sink_weights(q, k, visibility, self.sinks)


#: The kinds by name, as those without sinks.
SINK_KINDS: dict[str, SinkFunction] = {"formula": formula_sink_attention, "sdpa": sink_attention}
