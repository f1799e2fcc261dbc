r"""Caches of a fixed size: the position of a token says where it is kept.

A static cache keeps position :math:`p` in slot :math:`p`, and is full when the slots are. A sliding
cache keeps it in slot :math:`p \bmod S`, over the token S positions before it, which a window of
:math:`W \le S` keys does not reach any more. Padding has no position, so it takes no slot.

Source of the ring: Jiang et al., *Mistral 7B*, 2023, arXiv:2310.06825.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import PADDING, Visibility
from lm_from_scratch.cache.buffer import Buffer, BufferCache
from lm_from_scratch.cache.codec import EXACT, Codec


class SlotCache(BufferCache):
    """What both have in common: a table of positions, with one more slot for what is not kept."""

    def __init__(self, n_layer: int, slots: int, codec: Codec = EXACT) -> None:
        self.slots = slots
        super().__init__(n_layer, codec)

    def _table(self, rows: int, device: torch.device) -> Tensor:
        """The positions of all slots and of the one behind them, in a tensor of its own."""
        if self.positions is None:
            return torch.full((rows, self.slots + 1), PADDING, device=device)
        return self.positions.repeat(rows // self.positions.shape[0], 1)

    def _put(self, buffer: Buffer, where: slice | Tensor, new: Tensor) -> None:
        if not buffer.fits(new):
            buffer.allocate(new, self.slots + 1)
        buffer.write(where, new)


class StaticCache(SlotCache):
    """``capacity`` slots, made once; slot ``p`` holds position ``p``.

    Every pass returns all slots, so the shapes are the same in every step, and a compiled graph can
    be used again. (Give positions then: without them the length would be compiled in.) Unused slots
    are hidden by their position, -1. Attention reads them all the same: a long cache for a short
    text costs time, where :class:`GrowingCache` with ``reserve`` does not. Raises ``ValueError``
    for a ``capacity`` below 1, and for a token beyond it.
    """

    def __init__(self, n_layer: int, capacity: int, codec: Codec = EXACT) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1")
        self.capacity = capacity
        super().__init__(n_layer, capacity, codec)

    def _plan(self, new: Tensor, batch: int, dense: bool) -> Visibility:
        if dense:
            start = self.dense_length or 0
            self._check_room(start + new.shape[1])
            self._where: slice | Tensor = slice(start, start + new.shape[1])
            table = self._table(1, new.device)
            table[:, self._where] = new
        else:
            if not torch.compiler.is_compiling():  # reading the positions would break the graph
                self._check_room(int(new.max()) + 1)
            # the slot behind the last is for padding: no position leads there, even unchecked
            self._where = torch.where(new >= 0, new + (new >= self.slots), self.slots)
            table = self._table(new.shape[0], new.device).scatter_(1, self._where, new)
        self._await(table, new, dense)
        return Visibility(new, table[:, : self.slots])

    def _check_room(self, length: int) -> None:
        if length > self.capacity:
            raise ValueError(f"{length} tokens do not fit into a cache of capacity={self.capacity}")

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        seen = []
        for buffer, new in self._pair(layer, k, v):
            self._put(buffer, self._where, new)
            seen.append(buffer.read(slice(0, self.slots)))
        return seen[0], seen[1]


class SlidingCache(SlotCache):
    """A ring of ``window + slack`` slots, for layers that see ``window`` keys, their own included.

    Memory does not grow with the text. A model with a layer that sees further is refused. ``slack``
    tokens can be taken back with ``crop``; what they pushed out is gone without it. Raises
    ``ValueError`` for a ``window`` below 1 and a negative ``slack``.
    """

    def __init__(self, n_layer: int, window: int, slack: int = 0, codec: Codec = EXACT) -> None:
        if window < 1:
            raise ValueError(f"window={window} must be at least 1: a query sees its own key")
        if slack < 0:
            raise ValueError(f"slack={slack} must not be negative")
        self.window, self.slack = window, slack
        self._narrowest = 0  # the window of a layer, not known yet
        super().__init__(n_layer, window + slack, codec)

    def see_by_layer(
        self,
        x: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
        windows: Sequence[int | None],
    ) -> list[Visibility]:
        """Which keys the new tokens ``x`` (B, T, ...) at ``positions`` (B, T) see, layer by layer.
        Raises ``ValueError`` for a layer that sees further than the ring, and for ``documents``
        (B, T)."""
        for layer, window in enumerate(windows):
            if window is None or window > self.window:
                keys = "all keys" if window is None else f"{window} keys"
                raise ValueError(f"layer {layer} sees {keys}, the cache keeps window={self.window}")
        self._narrowest = min(w for w in windows if w is not None)
        return super().see_by_layer(x, positions, documents, windows)

    def _plan(self, new: Tensor, batch: int, dense: bool) -> Visibility:
        """One token is written before the slots are read: what it pushes out, it does not see.
        Several read the slots first, because the first of them still sees what the last pushes out;
        then the slots and the new tokens stand side by side."""
        T, slots = new.shape[1], self.slots
        kept = (new >= 0) & (new > new.amax(dim=1, keepdim=True) - slots)
        where = torch.where(kept, new % slots, slots)
        rows = 1 if dense else new.shape[0]
        before = self._table(rows, new.device)
        after = before.scatter(1, where, torch.where(kept, new, PADDING))
        self._await(after, new, dense)
        start = self.dense_length or 0
        self._where: slice | Tensor = where[0] if dense else where
        self._late: list[tuple[Buffer, Tensor]] | None = None if T == 1 else []
        if T == 1:
            # rows that are alike fill the slots in order: those after the last one are unused
            self._seen = slice(0, min(start + 1, slots)) if dense else slice(0, slots)
            # the slots are in order, or every layer sees every slot
            known = dense and (start < slots or self._seen.stop <= self._narrowest)
            return Visibility(new, after[:, self._seen], dense=known)
        held = 0 if self.positions is None else slots
        self._seen = slice(0, min(start, slots) if dense else held)
        known = dense and start <= slots  # the slots are in order
        keys = torch.cat([before[:, self._seen], new], dim=1)
        return Visibility(new, keys, dense=known)

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        seen = []
        for buffer, new in self._pair(layer, k, v):
            if self._late is None:
                self._put(buffer, self._where, new)
                seen.append(buffer.read(self._seen))
            else:
                self._late.append((buffer, new))
                new = self.codec.decode(self.codec.encode(new))  # as later queries will see it
                old = [] if self.positions is None else [buffer.read(self._seen)]
                seen.append(torch.cat([*old, new], dim=2))
        return seen[0], seen[1]

    def _finish(self) -> None:
        for buffer, new in self._late or []:  # a pass that failed before has pushed nothing out
            self._put(buffer, self._where, new)
        self._late = None
        super()._finish()

    def check_crop(self, length: int | Tensor) -> None:
        """Raises ``ValueError`` for more tokens than ``slack`` lets take back."""
        super().check_crop(length)
        if self.positions is None:
            return
        back = self.lengths - length
        end = (self.lengths - back)[:, None]  # where each row would go on, (B, 1)
        # the next query sees the W - 1 keys before it; the last one also says where the row ends
        first = (end - max(self.window - 1, 1)).clamp(min=0)
        there = ((self.positions >= first) & (self.positions < end)).sum(dim=1)
        lost = there < (end - first)[:, 0]
        # a pass of one token that failed may have written over the oldest key
        lost |= (self.lengths > self.slots) & (back > self.slack)
        if ((back > 0) & lost).any():
            raise ValueError(
                f"{int(back.max())} tokens cannot be taken back, only slack={self.slack} in all: "
                "the keys that they pushed out are gone"
            )
