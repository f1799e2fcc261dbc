r"""Multi-head latent attention (MLA): keys and values of all heads, remembered as one short vector.

A token leaves a *latent* :math:`c_s` of R numbers, from which two matrices of each head make its
key and its value, and one key :math:`r_s` of Dr features that is turned to its position and shared
by all heads. With a query in two parts, of which the second is turned, head h has the scores

.. math::

   q^h_t \cdot W^h_K c_s + u^h_t \cdot r_s, \qquad
   y^h_t = \sum_s a^h_{ts} \, W^h_V c_s

over :math:`\sqrt{Dn + Dr}`. :func:`expanded` computes them as they are written: first every key and
value, then attention. But a product may be taken in another order:

.. math::

   q^h_t \cdot W^h_K c_s = \bigl(W^{h\top}_K q^h_t\bigr) \cdot c_s, \qquad
   \sum_s a^h_{ts} \, W^h_V c_s = W^h_V \sum_s a^h_{ts} \, c_s

So :func:`absorbed` multiplies the query by :math:`W_K`, attends to the latents as if they were one
key and value head of R + Dr features, and multiplies the result by :math:`W_V`. No key is ever
made. :func:`multiplications` says which form is shorter: the first where many queries share the
keys that are made for them, the second where a query is alone.

The rotation is why there are two parts. Between a query's rotation and that of a key stands a turn
by their distance, another for each pair of tokens, so no one matrix could take it in.

Shapes: B batch, H heads, T queries, S keys, R numbers of a latent, Dn and Dr features of a key that
are not turned and that are, Dv of a value.

Source: DeepSeek-AI, *DeepSeek-V2*, 2024, arXiv:2405.04434, section 2.1 and appendix C.
"""

import math

import torch
from torch import Tensor

from lm_from_scratch.attention.layer import AttentionFunction
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility


def expanded(
    q: Tensor,
    kv: Tensor,
    shared: Tensor,
    visibility: Visibility,
    attend: AttentionFunction = sdpa_attention,
    dropout: float = 0.0,
) -> Tensor:
    """Attention (B, H, T, Dv) of q (B, H, T, Dn + Dr) with keys and values of its own for each
    head: ``kv`` (B, 1, S, H * (Dn + Dv)), made from the latents, and the ``shared`` turned keys
    (B, 1, S, Dr)."""
    (B, H, _, D), (S, Dr) = q.shape, shared.shape[2:]
    kv = kv.view(B, S, H, -1).transpose(1, 2)  # (B, H, S, Dn + Dv)
    k, v = kv.tensor_split([D - Dr], dim=-1)
    k = torch.cat([k, shared.expand(-1, H, -1, -1)], dim=-1)  # (B, H, S, Dn + Dr)
    return attend(q, k, v, visibility, dropout)


def absorbed(
    q: Tensor,
    latent: Tensor,
    shared: Tensor,
    weight: Tensor,
    visibility: Visibility,
    attend: AttentionFunction = sdpa_attention,
    dropout: float = 0.0,
) -> Tensor:
    """The same, (B, H, T, Dv), of the same q (B, H, T, Dn + Dr) and ``shared`` (B, 1, S, Dr), from
    the ``latent`` (B, 1, S, R) of each token and the ``weight`` (H * (Dn + Dv), R) that would make
    ``kv`` of it: one key and value head, which all H query heads share.

    ``attend`` divides scores by the root of the width that it sees, R + Dr. The root that is meant
    is that of Dn + Dr, so the queries are made longer beforehand.
    """
    (H, D), R, Dr = q.shape[1::2], latent.shape[3], shared.shape[3]
    w_k, w_v = weight.view(H, -1, R).tensor_split([D - Dr], dim=1)  # (H, Dn, R), (H, Dv, R)
    q = torch.cat([q[..., : D - Dr] @ w_k, q[..., D - Dr :]], dim=-1)  # (B, H, T, R + Dr)
    k = torch.cat([latent, shared], dim=-1)  # (B, 1, S, R + Dr)
    y = attend(q * math.sqrt((R + Dr) / D), k, latent, visibility, dropout)  # (B, H, T, R)
    return y @ w_v.mT


def multiplications(T: int, S: int, R: int, Dn: int, Dr: int, Dv: int) -> tuple[int, int]:
    """How many multiplications a head needs for T queries and S keys, expanded and absorbed."""
    return (
        S * R * (Dn + Dv) + T * S * (Dn + Dr + Dv),
        T * R * (Dn + Dv) + T * S * (R + Dr + R),
    )
