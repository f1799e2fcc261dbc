r"""Sparse attention: each query reads the few keys that a small indexer chooses for it.

The *lightning indexer* has a few heads of its own. They share one key for each token, and every
query weighs the heads as it likes:

.. math::

   I_{ts} = \sum_j w_{tj} \, \mathrm{ReLU}\!\left(q_{tj} \cdot k_s\right)

A query then attends to the visible keys with the highest scores, and to no others. Many scores are
*equal*: where every product is negative, the sum is exactly 0. Of equal scores the latest key wins,
so that the choice depends on scores and positions alone, not on where a key lies in memory or
on how many others lie beside it (``torch.topk`` promises nothing of the kind).

A choice has no gradient. The indexer learns from the attention of the model that it serves:
:func:`indexer_loss` is the divergence of its scores from those weights.

Shapes: B batch, H query heads, Hkv key and value heads, J heads of the indexer, T queries, S keys,
D features of a head, K keys that a query may read.

Source: DeepSeek-AI, *DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models*, 2025,
arXiv:2512.02556.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from lm_from_scratch.attention.layer import check_shapes
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.limits import Count, require

NO_KEY = -1  # where a query sees fewer keys than it may read


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """The scores (B, T, S) of keys ``k`` (B, 1, S, D), shared by all heads, for queries ``q``
    (B, J, T, D), whose heads are weighed by ``weights`` (B, T, J).

    At least float32, and divided by the root of D J as in published models. A weight may be
    negative, and so may a score. Raises ``ValueError`` for shapes that do not fit together.
    """
    (B, J, T, D), S = q.shape, k.shape[2]
    if k.shape != (B, 1, S, D) or weights.shape != (B, T, J):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, weights {tuple(weights.shape)}: they must be "
            "(B, J, T, D), (B, 1, S, D) and (B, T, J)"
        )
    work = torch.promote_types(q.dtype, torch.float32)
    products = (q.to(work) @ k.to(work).mT).relu()  # (B, J, T, S)
    return torch.einsum("btj,bjts->bts", weights.to(work) / math.sqrt(D * J), products)


def choose(scores: Tensor, visibility: Visibility, count: int) -> Tensor:
    """The columns of the ``count`` visible keys with the highest ``scores`` (B, T, S), best first:
    (B, T, K), with K = ``count`` or S if that is less.

    Of equal scores the key at the later position comes first. A query that sees fewer keys has -1
    in the places that are left. Raises ``ValueError`` for scores of other queries and keys than
    those of the visibility, and for a ``count`` below 1.
    """
    require(Count, count=count)
    if scores.shape[1:] != (visibility.query_length, visibility.key_length):
        raise ValueError(
            f"the scores are {tuple(scores.shape)}, but the visibility is for "
            f"{visibility.query_length} queries and {visibility.key_length} keys"
        )
    seen = visibility.mask[:, 0].expand_as(scores)
    latest = visibility.key_positions.argsort(dim=-1, descending=True)
    latest = latest[:, None].expand_as(scores)  # (B, T, S): columns, the latest position first
    ordered = scores.masked_fill(~seen, -math.inf).gather(-1, latest)
    best = ordered.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    chosen = latest.gather(-1, best)
    return chosen.masked_fill(~seen.gather(-1, chosen), NO_KEY)


def restrict(visibility: Visibility, chosen: Tensor) -> Visibility:
    """The same tokens, where each query sees the ``chosen`` columns (B, T, K) alone."""
    B, T, _ = chosen.shape
    marks = torch.zeros(B, T, visibility.key_length + 1, dtype=torch.bool, device=chosen.device)
    marks.scatter_(-1, chosen % marks.shape[-1], True)  # -1 marks a last column that is cut off
    allowed = marks[:, None, :, :-1]
    if visibility.allowed is not None:
        allowed = allowed & visibility.allowed
    return replace(visibility, allowed=allowed)


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, chosen: Tensor, dropout: float = 0.0
) -> Tensor:
    """Attention of q (B, H, T, D) to those of k and v (B, Hkv, S, D) that are visible *and*
    ``chosen`` (B, T, K): (B, H, T, D). All keys are multiplied, and most are hidden: simple, and
    as fast as any mask."""
    return sdpa_attention(q, k, v, restrict(visibility, chosen), dropout)


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, chosen: Tensor
) -> Tensor:
    """:func:`sparse_attention` of q (B, H, T, D), k and v (B, Hkv, S, D) that reads the ``chosen``
    keys (B, T, K) alone. It copies them for each query, which pays for few queries and many
    keys: in decoding."""
    check_shapes(q, k, v, visibility)
    (B, H, T, D), Hkv, K = q.shape, k.shape[1], chosen.shape[-1]
    columns = chosen.clamp(min=0)
    seen = visibility.mask[:, 0].expand(B, T, -1).gather(-1, columns) & (chosen >= 0)
    rows = torch.arange(B, device=q.device)[:, None]
    k, v = (x.transpose(1, 2)[rows, columns.view(B, -1)].view(B, T, K, Hkv, D) for x in (k, v))
    work = torch.promote_types(q.dtype, torch.float32)
    groups = q.transpose(1, 2).reshape(B, T, Hkv, -1, D).to(work)  # (B, T, Hkv, H / Hkv, D)
    scores = torch.einsum("btgnd,btkgd->btgnk", groups, k.to(work)) / math.sqrt(D)
    hidden = ~seen[:, :, None, None]
    weights = scores.masked_fill(hidden, torch.finfo(work).min).softmax(-1).masked_fill(hidden, 0.0)
    y = torch.einsum("btgnk,btkgd->btgnd", weights, v.to(work))
    return y.reshape(B, T, H, D).transpose(1, 2).to(q.dtype)


def mean_weights(weights: Tensor, visibility: Visibility) -> Tensor:
    """What an indexer learns from: the ``weights`` (B, H, T, S) of all heads together, (B, T, S),
    with sum 1 over the keys that are visible; 0 for a query that sees none."""
    mass = weights.sum(1).masked_fill(~visibility.mask[:, 0], 0.0)
    return mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)


def indexer_loss(scores: Tensor, weights: Tensor, visibility: Visibility) -> Tensor:
    r"""How far the ``scores`` (B, T, S) are from the attention ``weights`` (B, H, T, S) of the
    model, in nats: the mean over queries of

    .. math::

       \mathrm{KL}\left(p_t \,\|\, \mathrm{softmax}(I_t)\right) =
       \sum_s p_{ts} \log \frac{p_{ts}}{\mathrm{softmax}(I_t)_s}

    where p is the mean over heads. Only the scores get a gradient. With a visibility that
    :func:`restrict` made, both sides count the chosen keys alone, as in the second stage of
    training. Queries that see no key do not count.
    """
    hidden = ~visibility.mask[:, 0].expand_as(scores)
    p = mean_weights(weights.detach(), visibility)
    log_q = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).log_softmax(-1)
    divergence = (torch.xlogy(p, p) - p * log_q.masked_fill(hidden, 0.0)).sum(-1)  # (B, T)
    real = ~hidden.all(-1)
    return (divergence * real).sum() / real.sum()


def recalled(weights: Tensor, visibility: Visibility, chosen: Tensor) -> Tensor:
    """The share (B, T) of the attention ``weights`` (B, H, T, S), as a mean over heads, that is on
    the ``chosen`` keys (B, T, K): from 0, nothing, to 1, all of it."""
    mass = mean_weights(weights, visibility)
    return (mass.gather(-1, chosen.clamp(min=0)) * (chosen >= 0)).sum(-1)
