"""A cache without a limit: columns in the order in which they were fed.

:class:`CatCache` is the idea in ten lines, for a single layer. :class:`GrowingCache` is the same
for a model: with padding, without the copies, and able to go back.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.buffer import BufferCache, Plan, Track
from lm_from_scratch.cache.codec import EXACT, Codec
from lm_from_scratch.limits import Count, Whole, require


class CatCache:
    """One layer's keys and values, each new one put behind the old ones: the whole idea."""

    held: tuple[Tensor, Tensor] | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Of new k and v (B, Hkv, T, D) all so far, (B, Hkv, S, D)."""
        if self.held is not None:
            k, v = torch.cat([self.held[0], k], dim=2), torch.cat([self.held[1], v], dim=2)
        self.held = k, v
        return self.held


class GrowingTrack(Track):
    """A column for every token that is fed, padding too; ``reserve`` are there from the start."""

    def __init__(self, reserve: int = 0) -> None:
        require(Whole, reserve=reserve)
        self.reserve = reserve

    def plan(self, new: Tensor, start: int | None, windows: Collection[int | None]) -> Plan:
        """Tokens at ``new`` (B, T) get columns behind the old ones; all columns are read."""
        if start is not None:
            table = torch.arange(start + new.shape[1], device=new.device)[None]
        elif self.positions is None:
            table = new.clone()  # the caller may go on writing into the positions
        else:
            rows = max(self.positions.shape[0], new.shape[0])
            table = torch.cat([self.positions.expand(rows, -1), new.expand(rows, -1)], dim=1)
        end = table.shape[1]
        return Plan(
            Visibility(new, table, dense=start is not None),
            table,
            write=slice(end - new.shape[1], end),
            read=slice(0, end),
            room=max(self.reserve, end),
        )

    def crop(self, length: int | Tensor) -> None:
        """Hide what stands at ``length`` (one, or (B,)) or after it; columns that are then empty at
        the end are free."""
        super().crop(length)
        assert self.positions is not None
        used = (self.positions >= 0).any(dim=0).nonzero()
        self.positions = self.positions[:, : int(used[-1]) + 1 if len(used) else 0]


class GrowingCache(BufferCache):
    """Every column that is fed is kept, padding too, in buffers that double when they are full.

    Doubling copies each entry about once over the whole run; concatenating the new token to the old
    tensor would copy all of them at every token. ``reserve`` columns are there from the start:
    if they are enough for the run, nothing is copied.
    """

    def __init__(self, n_layer: int, codec: Codec = EXACT, reserve: int = 0) -> None:
        require(Count, n_layer=n_layer)
        super().__init__([GrowingTrack(reserve)], [0] * n_layer, codec)
