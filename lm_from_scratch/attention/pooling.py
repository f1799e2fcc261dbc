r"""Compressed attention: the keys of m neighbouring tokens are pooled to one.

A text is cut into blocks of m tokens. When the last token of a block is there, the block becomes
one *entry*: a weighted mean of what its tokens say, where every feature has weights of its own. A
token s offers values :math:`c_s` and gates :math:`z_s`, both of D features, and

.. math::

   e_w = \sum_{s \in w} \frac{\exp z_s}{\sum_{r \in w} \exp z_r} \odot c_s

An entry is a key like any other, at the position of the last token of its block. So the rule of
:mod:`~lm_from_scratch.attention.visibility` makes its mask too: a query sees the entries of blocks
that end before it, or with it. Where entries *overlap*, each is pooled from its own block and the
one before, in which the tokens have other values and gates: the first halves of 2 D features.

Positions decide which tokens are a block: padding has none, so an entry is the same in a padded
row, and blocks of packed documents do not mix. Tokens whose block is not complete wait.

Shapes: B batch, A tokens in a row, N entries, W tokens of an entry, D features of it.

Source: DeepSeek-AI, *DeepSeek-V4*, 2026, sections 2.3.1 and 2.3.2, as in ``transformers``.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.attention.visibility import PADDING


class Blocks(NamedTuple):
    """Blocks that are complete: the ``columns`` (B, N, W) of the tokens of each, which of them are
    ``inside`` it (B, N, W), the position of its last token ``ends`` (B, N), and its document
    ``documents`` (B, N). A row of fewer blocks has ends of -1 in the places that are left."""

    columns: Tensor
    inside: Tensor
    ends: Tensor
    documents: Tensor | None


def in_order(positions: Tensor, documents: Tensor | None) -> Tensor:
    """The columns (B, A) of each row by ``documents`` and ``positions`` (B, A); padding comes
    first."""
    if documents is not None:
        positions = torch.where(positions < 0, positions, positions + (documents.long() << 32))
    return positions.argsort(dim=1, stable=True)


def completes(positions: Tensor, documents: Tensor | None, size: int) -> Tensor:
    """Which tokens (B, A) are the last of a block of ``size`` that is there as a whole, where
    ``positions`` and ``documents`` (B, A) are :func:`in_order`."""
    A = positions.shape[1]
    first = F.pad(positions, (size - 1, 0), value=-size - 1)[:, :A]  # what is so far before
    whole = (positions % size == size - 1) & (positions - first == size - 1) & (positions >= 0)
    if documents is not None:
        whole = whole & (documents == F.pad(documents, (size - 1, 0))[:, :A])
    return whole


def blocks_of(
    complete: Tensor, count: int, positions: Tensor, documents: Tensor | None, width: int
) -> Blocks:
    """The ``count`` blocks whose last tokens are ``complete`` (B, A), as :func:`completes` says of
    ``positions`` and ``documents`` (B, A), each with ``width`` tokens: those of the block, and as
    many before it as it overlaps with."""
    last = complete.int().argsort(dim=1, descending=True, stable=True)[:, :count]  # (B, N)
    ends = torch.where(complete.gather(1, last), positions.gather(1, last), PADDING)
    steps = torch.arange(1 - width, 1, device=last.device)
    columns = (last[..., None] + steps).clamp(min=0)  # (B, N, W)

    def of(x: Tensor) -> Tensor:
        return x.gather(1, columns.flatten(1)).view_as(columns)

    inside = (of(positions) == ends[..., None] + steps) & (ends[..., None] + steps >= 0)
    if documents is None:
        return Blocks(columns, inside | (steps == 0), ends, None)
    own = documents.gather(1, last)
    inside = inside & (of(documents) == own[..., None])
    return Blocks(columns, inside | (steps == 0), ends, own)


def pool(values: Tensor, gates: Tensor, blocks: Blocks, size: int) -> Tensor:
    """The entries (B, N, D) of blocks of ``size`` tokens, from ``values`` and ``gates`` (B, A, D);
    where they overlap (W = 2 size), these have 2 D features, the first D for the block after the
    token's own."""
    rows = torch.arange(len(values), device=values.device)[:, None, None]
    spans = blocks.columns.split(size, dim=-1)

    def of_each(x: Tensor) -> Tensor:
        parts = zip(x.chunk(len(spans), dim=-1), spans)
        return torch.cat([part[rows, span] for part, span in parts], dim=2)  # (B, N, W, D)

    work = torch.promote_types(gates.dtype, torch.float32)
    hidden = of_each(gates).to(work).masked_fill(~blocks.inside[..., None], -torch.inf)
    return (hidden.softmax(dim=2).to(values.dtype) * of_each(values)).sum(dim=2)
