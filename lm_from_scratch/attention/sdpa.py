"""Attention through torch's fused kernel, which the models use.

:mod:`~lm_from_scratch.attention.attention` has the equation, and shapes; the tests hold the two
equal. What is more here is speed: no mask where none is needed, and a query alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.attention.layer import check_shapes
from lm_from_scratch.attention.visibility import Visibility

#: Whether torch's bfloat16 kernel for a CPU is slower here than its float32 kernel.
SLOW_BFLOAT16 = torch.backends.cpu.get_cpu_capability() != "AVX512"
#: So many numbers of a tensor, and copies of them, stay in the cache of a processor.
IN_CACHE = 2**18


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
    elif SLOW_BFLOAT16 and q.dtype == torch.bfloat16 and q.device.type == "cpu":
        return one_query_in_float32(q, k, v, mask, dropout)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout).reshape(B, H, 1, -1)


def one_query_in_float32(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> Tensor:
    """Attention of q (B, H, 1, D), k (B, H, S, D) and v (B, H, S, Dv) with a ``mask``
    (B or 1, H or 1, 1, S).

    Without AVX-512, torch's float32 kernel and the copies for it take about half the time of its
    bfloat16 kernel (with AVX-512, three to five times as much); some heads at a time, whose copies
    stay in the processor's cache.
    """
    (B, H, S, _), heads = k.shape, max(1, IN_CACHE // k[0, 0].numel())
    if heads >= B * H:
        y = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask, dropout)
        return y.to(q.dtype)
    mask = torch.ones(1, dtype=torch.bool, device=q.device) if mask is None else mask
    inputs = (q, k, v, mask.expand(B, H, 1, S))
    parts = zip(*(x.reshape(1, B * H, -1, x.shape[3]).split(heads, dim=1) for x in inputs))
    some = [one_query_in_float32(q, k, v, m, dropout) for q, k, v, m in parts]
    return torch.cat(some, dim=1).view(B, H, 1, -1)
