r"""Attention in tiles: an exact softmax over scores that never exist all at once.

The mean needs the sum of all exponentials, and for safety the largest score, before the first
value can be weighted. So it seems that the (T, S) scores must be in memory. They need not: what was
added up under the maximum of the first tiles is put right, when a later tile holds a larger score,
by one factor. Each query keeps a running maximum :math:`m`, a running sum :math:`\ell` and an
accumulator :math:`a` (as many numbers as a value); for a tile of keys with scores :math:`s_j`:

.. math::

   m' = \max(m, \max_j s_j), \qquad
   \ell' = e^{m - m'} \ell + \sum_j e^{s_j - m'}, \qquad
   a' = e^{m - m'} a + \sum_j e^{s_j - m'} v_j

After the last tile the result is :math:`a / \ell`, and one number remains of all the scores: the
log-sum-exp :math:`L = m + \log \ell`. From it the backward pass computes the weights of any tile
again, :math:`P_{ts} = e^{s_{ts} - L_t}`, instead of having kept them. With :math:`dO` the gradient
of the result :math:`O`:

.. math::

   dV = P^\top dO, \qquad dP = dO\, V^\top, \qquad
   dS = P \odot (dP - \delta), \qquad \delta_t = \textstyle\sum_d dO_{td}\, O_{td}

and from :math:`dS` the gradients of queries and keys. Memory grows with T + S, not with T times S.
This is what the fused kernels do; here it is PyTorch, to be read. It is not faster than
:func:`~lm_from_scratch.attention.sdpa.sdpa_attention`.

Sources: Milakov & Gimelshein, *Online normalizer calculation for softmax*, 2018, arXiv:1805.02867;
Rabe & Staats, *Self-attention does not need O(n²) memory*, 2021, arXiv:2112.05682; Dao et al.,
*FlashAttention*, 2022, arXiv:2205.14135.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm_from_scratch.attention.gqa import repeat_kv
from lm_from_scratch.attention.layer import check_shapes
from lm_from_scratch.attention.visibility import Visibility

#: Queries, and keys, in a tile. The 128 x 128 scores of eight heads are 512 KiB in float32: half of
#: a core's second cache. Larger tiles leave the cache; smaller ones are more calls than work.
TILE = 128


def slices(start: int, stop: int, size: int) -> Iterator[slice]:
    """``start`` to ``stop`` in pieces of ``size``; the last may be shorter."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def key_tiles(visibility: Visibility, queries: slice, tile: int) -> Iterator[slice]:
    """The tiles of keys to visit for a tile of queries.

    Where the visibility is dense, query ``t`` stands at position ``S - T + t``: keys after the last
    query, or too old for the window of the first, are left out without a look at any position.
    """
    T, S, window = visibility.query_length, visibility.key_length, visibility.window
    if not visibility.dense:
        return slices(0, S, tile)
    oldest = 0 if window is None else max(0, S - T + queries.start - window + 1)
    return slices(oldest, S - T + queries.stop, tile)


def tile_scores(q: Tensor, k: Tensor, visibility: Visibility, at: tuple[slice, slice]) -> Tensor:
    """The scores (B, H, t, s) of one tile, -inf where the key is hidden; ``q`` (B, H, t, D) and
    ``k`` (B, H, s, D) hold the tile alone."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~visibility.rule(*at), -torch.inf)


class TiledAttention(torch.autograd.Function):
    """Attention of q (B, H, T, D) to k (B, H, S, D) and v (B, H, S, Dv), tile by tile in both
    directions."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, tile: int
    ) -> Tensor:
        work = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = torch.empty_like(q[..., :1], dtype=work)  # (B, H, T, 1)
        for queries in slices(0, q.shape[2], tile):
            q_tile = q[:, :, queries].to(work)
            # m starts at the lowest number, not at -inf: exp(-inf - m) is 0, never exp(-inf + inf)
            m = torch.full_like(q_tile[..., :1], torch.finfo(work).min)
            l = torch.zeros_like(m)
            a = q_tile.new_zeros(*q_tile.shape[:3], v.shape[3])
            for keys in key_tiles(visibility, queries, tile):
                k_tile, v_tile = k[:, :, keys].to(work), v[:, :, keys].to(work)
                scores = tile_scores(q_tile, k_tile, visibility, (queries, keys))
                new_m = torch.maximum(m, scores.amax(-1, keepdim=True))
                p = torch.exp(scores - new_m)
                rescale = torch.exp(m - new_m)
                l = rescale * l + p.sum(-1, keepdim=True)
                a = rescale * a + p @ v_tile
                m = new_m
            # The largest score adds exp(0), so l >= 1; it is 0 in a row that sees no key, as is a.
            l = l.clamp(min=1)
            out[:, :, queries] = (a / l).to(q.dtype)
            lse[:, :, queries] = m + l.log()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.visibility, ctx.tile = visibility, tile
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        work, scale = lse.dtype, 1 / math.sqrt(q.shape[-1])
        dq, dk, dv = (torch.zeros_like(x, dtype=work) for x in (q, k, v))
        for queries in slices(0, q.shape[2], ctx.tile):
            q_tile, do = q[:, :, queries].to(work), grad[:, :, queries].to(work)
            delta = (do * out[:, :, queries].to(work)).sum(-1, keepdim=True)
            for keys in key_tiles(ctx.visibility, queries, ctx.tile):
                k_tile, v_tile = k[:, :, keys].to(work), v[:, :, keys].to(work)
                scores = tile_scores(q_tile, k_tile, ctx.visibility, (queries, keys))
                p = torch.exp(scores - lse[:, :, queries])  # the weights, once more
                ds = p * (do @ v_tile.mT - delta)
                dq[:, :, queries] += ds @ k_tile * scale
                dk[:, :, keys] += ds.mT @ q_tile * scale
                dv[:, :, keys] += p.mT @ do
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def attend_in_tiles(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, tile: int = TILE
) -> Tensor:
    """:func:`tiled_attention` of q (B, H, T, D), k (B, Hkv, S, D) and v (B, Hkv, S, Dv) with tiles
    of another size. Raises ``ValueError`` for a ``tile`` below 1, and for shapes that do not fit.
    """
    if tile < 1:
        raise ValueError(f"tile={tile} must be at least 1")
    check_shapes(q, k, v, visibility)
    k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    device = "cpu" if q.is_meta else q.device.type  # shapes alone have no autocast
    with torch.autocast(device, enabled=False):  # which would round the scores
        return TiledAttention.apply(q, k, v, visibility, tile)


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
) -> Tensor:
    """Attention whose (T, S) scores never exist at once, forward or backward, of q (B, H, T, D), k
    (B, Hkv, S, D) and v (B, Hkv, S, Dv). Raises ``ValueError`` for dropout, and for shapes that
    do not fit."""
    if dropout > 0:
        raise ValueError(f"tiled attention has no dropout, but dropout={dropout}: use sdpa")
    return attend_in_tiles(q, k, v, visibility)
