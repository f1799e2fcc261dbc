"""Attention through torch's fused kernel, which the models use.

:mod:`~lm_from_scratch.attention.attention` has the equation, and shapes; the tests hold the two
equal. What is more here is speed: no mask where none is needed, and a query alone.
"""

import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.attention.layer import check_shapes
from lm_from_scratch.attention.visibility import Visibility


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
) -> Tensor:
    """Attention (B, H, T, Dv) of q (B, H, T, D), k (B, Hkv, S, D) and v (B, Hkv, S, Dv) that never
    holds the weights (B, H, T, S).

    ``is_causal`` is used only when queries and keys are the same tokens: for fewer queries than
    keys torch aligns the triangle to the first key, which is wrong after a cache.
    """
    check_shapes(q, k, v, visibility)
    mask = None if visibility.is_full or visibility.is_causal else visibility.mask
    if mask is not None and visibility.dense and visibility.window is not None:
        # what is too old for the first query is too old for all of them
        old = max(0, k.shape[2] - q.shape[2] - visibility.window + 1)
        k, v, mask = k[:, :, old:], v[:, :, old:], mask[..., old:]
    (B, H, T, D), (_, Hkv, _, Dv) = q.shape, v.shape
    if T > 1:
        if Dv < D:  # the fused kernels know one width alone
            v = F.pad(v, (0, D - Dv))
        y = F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=visibility.is_causal, enable_gqa=Hkv != H
        )
        return y[..., :Dv]
    if Hkv < H:  # the query heads of a key head are queries of one head, which reads its keys once
        q = q.reshape(B, Hkv, -1, D)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout).reshape(B, H, 1, -1)
