"""What a layer keeps of a text whose blocks are pooled: the latest tokens, and the entries.

A block of m tokens becomes one entry when its last token is there
(:mod:`~lm_from_scratch.attention.pooling`). Until then its tokens wait, and where entries overlap,
those of the block before it too: never more than W - 1 tokens. The entries stay. So the memory of a
text of T tokens is T / m entries and a few tokens, whatever kind of cache carries it: to that, all
this is a *state*, which is handed over beside the keys.

Rows may end a block at different times. An entry lies in the next free place of its row, and a row
of fewer entries has a position of -1 in the places that are left.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lm_from_scratch.attention.pooling import blocks_of, completes, in_order
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import known


def empty_memory(x: Tensor, tokens: Sequence[int], entries: Sequence[int]) -> tuple[Tensor, ...]:
    """The state before the first token of ``x`` (B, T, C): no token waits, of which numbers of so
    many features would be kept, and no entry of so many is there."""
    none = x.new_zeros(x.shape[0], 0, dtype=torch.long)
    return none, none, *(x.new_zeros(x.shape[0], 0, n) for n in [*tokens, *entries])


class CompressedMemory:
    """One pass through the memory of a layer: its ``state``, the new tokens read, entries added.

    ``waiting`` are the tokens that wait and the new ones, in order: tensors (B, A, F); ``blocks``
    those of them that are complete now. ``entries`` are all there are, (B, N, D), and ``ends``
    (B, N) the positions of their last tokens.
    """

    def __init__(
        self,
        state: Sequence[Tensor],
        new: Sequence[Tensor],
        visibility: Visibility,
        size: int,
        width: int,
    ) -> None:
        positions, self.ends, *held = state
        self.entries, self.seen, self.width = held[len(new) :], visibility, width
        B, documents = len(positions), visibility.query_documents
        positions = torch.cat([positions, visibility.query_positions.expand(B, -1)], dim=1)
        order = in_order(positions, documents)
        self.positions = positions.gather(1, order)
        documents = None if documents is None else documents.gather(1, order)
        rows = torch.arange(B, device=order.device)[:, None]
        self.waiting = [torch.cat(pair, dim=1)[rows, order] for pair in zip(held, new)]
        complete = completes(self.positions, documents, size)
        if self.ends.shape[1]:  # of those the entries are there already
            complete = complete & (self.positions > self.ends.amax(dim=1, keepdim=True))
        count = known(complete.sum(dim=1).amax(), otherwise=self.positions.shape[1] // size)
        self.blocks = blocks_of(complete, count, self.positions, documents, width)

    def add(self, *entries: Tensor) -> None:
        """The entries (B, N, D) of the new blocks."""
        if not self.blocks.ends.shape[1]:
            return
        ends = torch.cat([self.ends, self.blocks.ends], dim=1)
        real = ends >= 0
        count = known(real.sum(dim=1).amax(), otherwise=ends.shape[1])
        order = (~real).int().argsort(dim=1, stable=True)[:, :count]
        rows = torch.arange(len(ends), device=ends.device)[:, None]
        self.ends = ends.gather(1, order)
        self.entries = [
            torch.cat(pair, dim=1)[rows, order] for pair in zip(self.entries, entries, strict=True)
        ]

    @property
    def visibility(self) -> Visibility:
        """Which entries the queries see."""
        documents = self.blocks.documents
        seen, queries = self.seen, None if documents is None else self.seen.query_documents
        return Visibility(seen.query_positions, self.ends, queries, documents)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """What is kept after the pass: of the tokens the latest, as many as the next entries may
        need."""
        first = max(self.positions.shape[1] - self.width + 1, 0)
        latest = [x[:, first:].clone() for x in (self.positions, *self.waiting)]
        return latest[0], self.ends, *latest[1:], *self.entries


def side_by_side(one: Visibility, other: Visibility) -> Visibility:
    """The keys of two, one set after the other, for the same queries."""
    B = max(len(one.key_positions), len(other.key_positions))
    keys = [seen.key_positions.expand(B, -1) for seen in (one, other)]
    documents = None
    if one.key_documents is not None and other.key_documents is not None:
        documents = torch.cat([one.key_documents, other.key_documents], dim=1)
    T, B = one.query_length, max(len(one.mask), len(other.mask))
    masks = [seen.mask.expand(B, 1, T, -1) for seen in (one, other)]
    allowed = torch.cat(masks, dim=-1)
    return Visibility(
        one.query_positions, torch.cat(keys, dim=1), one.query_documents, documents, allowed=allowed
    )
