"""A cache without a limit: columns in the order in which they were fed."""

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.buffer import BufferCache
from lm_from_scratch.cache.codec import EXACT, Codec


class GrowingCache(BufferCache):
    """Every column that is fed is kept, padding too, in buffers that double when they are full.

    Doubling copies each entry about once over the whole run; concatenating the new token to the old
    tensor would copy all of them at every token. ``reserve`` columns are there from the start: who
    knows the length of the run copies nothing. Raises ``ValueError`` for a negative ``reserve``.
    """

    def __init__(self, n_layer: int, codec: Codec = EXACT, reserve: int = 0) -> None:
        if reserve < 0:
            raise ValueError(f"reserve={reserve} must not be negative")
        self.reserve = reserve
        super().__init__(n_layer, codec)

    def _plan(self, new: Tensor, batch: int, dense: bool) -> Visibility:
        table = new.clone()  # the caller may go on writing into the positions
        if self.positions is not None:
            rows = max(self.positions.shape[0], new.shape[0])
            table = torch.cat([self.positions.expand(rows, -1), new.expand(rows, -1)], dim=1)
        self._columns = slice(table.shape[1] - new.shape[1], table.shape[1])
        self._await(table, new, dense)
        return Visibility(new, table, dense=dense)

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self._columns.stop
        pairs = self._pair(layer, k, v)
        for buffer, new in pairs:
            if not buffer.fits(new) or (self.positions is None and buffer.slots < end):
                buffer.allocate(new, max(self.reserve, end))
            elif buffer.slots < end:
                buffer.grow(max(2 * buffer.slots, end))
            buffer.write(self._columns, new)
        keys, values = (buffer.read(slice(0, end)) for buffer, _ in pairs)
        return keys, values

    def _crop(self, length: int | Tensor) -> None:
        super()._crop(length)
        if self.positions is not None:
            used = (self.positions >= 0).any(dim=0).nonzero()
            self.positions = self.positions[:, : int(used[-1]) + 1]
