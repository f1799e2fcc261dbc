r"""Hyper-connections: several residual streams, mixed in every layer by a doubly stochastic matrix.

A token has n vectors :math:`X` (n, C) where it had one. A layer :math:`F` reads a weighted sum of
them, its result is added to each with a weight, and the streams are mixed on the way:

.. math::

   x = \sum_j a_j X_j, \qquad
   X'_i = b_i \, F(x) + \sum_j M_{ji} X_j

The weights are computed from the streams themselves, for every token. Nothing would keep a product
of dozens of free matrices :math:`M` from growing without end. So M is made *doubly stochastic*: no
entry is negative, and every row and every column sums to 1. Then the mean of the streams passes
unchanged, no stream gets longer than the longest, and products of such matrices are such matrices:
the residual connection is there again. :func:`sinkhorn` makes one of any matrix of positive
numbers, by dividing rows and columns by their sums in turn.

Names are those of published checkpoints. Shapes: B batch, T tokens, n streams, C features.

Sources: Zhu et al., *Hyper-Connections*, 2024, arXiv:2409.19606; Xie et al., *mHC:
Manifold-Constrained Hyper-Connections*, 2025, arXiv:2512.24880; Sinkhorn, Knopp, *Concerning
Nonnegative Matrices and Doubly Stochastic Matrices*, 1967.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sinkhorn(matrix: Tensor, rounds: int = 20, eps: float = 1e-6) -> Tensor:
    """The ``matrix`` (..., n, n) of positive numbers with columns that sum to 1, and rows that
    nearly do: columns are divided by their sums, then rows and columns in turn, ``rounds`` times in
    all. A sum has ``eps`` added, so that no division is by 0."""
    matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    return matrix


def unweighted_rms_norm(x: Tensor, eps: float) -> Tensor:
    """``x`` (..., C) over the root of its mean square, in float32 at least; no weight."""
    work = torch.promote_types(x.dtype, torch.float32)
    return (x * torch.rsqrt(x.to(work).square().mean(-1, keepdim=True) + eps).to(x.dtype)).to(
        x.dtype
    )


class Mix(NamedTuple):
    """How a layer is connected to the streams: the weight ``read`` (B, T, n) with which it reads
    each, ``write`` (B, T, n) with which its result is added to each, and ``carry`` (B, T, n, n),
    row j saying what becomes of stream j."""

    read: Tensor
    write: Tensor
    carry: Tensor


def collapse(streams: Tensor, read: Tensor) -> Tensor:
    """What a layer is given: the sum (B, T, C) of the ``streams`` (B, T, n, C), weighted by
    ``read`` (B, T, n)."""
    return (read[..., None] * streams).sum(dim=-2).to(streams.dtype)


def connect(streams: Tensor, y: Tensor, mix: Mix) -> Tensor:
    """The ``streams`` (B, T, n, C) after a layer whose result is ``y`` (B, T, C)."""
    write, carry = mix.write.to(y.dtype), mix.carry.to(y.dtype)
    return write[..., None] * y[..., None, :] + carry.mT @ streams


class HyperConnection(nn.Module):
    """The :class:`Mix` of a layer, computed from the streams (B, T, n, C) before it.

    All n C numbers of a token, normalised, go through one linear map ``fn`` ((2 + n) n, n C). Its
    results are scaled by ``scale`` (3), one number for each part, and shifted by ``base``. In
    float32 at least.
    """

    def __init__(
        self,
        n_embd: int,
        n_stream: int,
        rounds: int = 20,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        n = n_stream
        self.n_stream, self.rounds, self.eps, self.norm_eps = n, rounds, eps, norm_eps
        self.fn = nn.Parameter(torch.empty((2 + n) * n, n * n_embd))
        self.base = nn.Parameter(torch.zeros((2 + n) * n))
        self.scale = nn.Parameter(torch.ones(3))
        nn.init.normal_(self.fn, 0.0, 0.02)

    def forward(self, streams: Tensor) -> Mix:
        n, work = self.n_stream, torch.promote_types(streams.dtype, torch.float32)
        flat = unweighted_rms_norm(streams.flatten(-2).to(work), self.norm_eps)
        parts = F.linear(flat, self.fn.to(work)).split([n, n, n * n], dim=-1)
        bases, scales = self.base.to(work).split([n, n, n * n]), self.scale.to(work)
        read, write, carry = (x * s + b for x, s, b in zip(parts, scales, bases))
        carry = carry.unflatten(-1, (n, n)).softmax(dim=-1) + self.eps
        return Mix(
            read.sigmoid() + self.eps,
            2 * write.sigmoid(),
            sinkhorn(carry, self.rounds, self.eps),
        )


class HyperHead(nn.Module):
    """The one vector (B, T, C) that the head of a model gets of the streams (B, T, n, C)."""

    def __init__(
        self, n_embd: int, n_stream: int, eps: float = 1e-6, norm_eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.eps, self.norm_eps = eps, norm_eps
        self.hc_fn = nn.Parameter(torch.empty(n_stream, n_stream * n_embd))
        self.hc_base = nn.Parameter(torch.zeros(n_stream))
        self.hc_scale = nn.Parameter(torch.ones(1))
        nn.init.normal_(self.hc_fn, 0.0, 0.02)

    def forward(self, streams: Tensor) -> Tensor:
        work = torch.promote_types(streams.dtype, torch.float32)
        flat = unweighted_rms_norm(streams.flatten(-2).to(work), self.norm_eps)
        weights = F.linear(flat, self.hc_fn.to(work)) * self.hc_scale.to(work)
        return collapse(streams, (weights + self.hc_base.to(work)).sigmoid() + self.eps)
