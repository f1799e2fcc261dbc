r"""Caches of a fixed size: the position of a token says where it is kept.

A static cache keeps position :math:`p` in slot :math:`p`, and is full when the slots are. A sliding
cache keeps it in slot :math:`p \bmod S`, over the token S positions before it, which a window of
:math:`W \le S` keys does not reach any more. Padding has no position, so it takes no slot.

:func:`cache_for` makes the smallest cache for a model, of growing and sliding tracks.

Source of the ring: Jiang et al., *Mistral 7B*, 2023, arXiv:2310.06825.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import PADDING, Visibility
from lm_from_scratch.cache.buffer import BufferCache, Plan, Track
from lm_from_scratch.cache.codec import EXACT, Codec
from lm_from_scratch.cache.growing import GrowingTrack
from lm_from_scratch.limits import Count, Whole, require


class SlotTrack(Track):
    """What both have in common: a table of ``slots`` positions, and one more for a bin, where
    everything goes that is not kept."""

    slots: int

    def _table(self, rows: int, device: torch.device) -> Tensor:
        """The positions of all slots and of the bin behind them, in a tensor of its own."""
        if self.positions is None:
            return torch.full((rows, self.slots + 1), PADDING, device=device)
        return self.positions.repeat(rows // self.positions.shape[0], 1)


class StaticTrack(SlotTrack):
    """Slot ``p`` holds position ``p``, up to ``capacity``. Raises ``ValueError`` for a ``capacity``
    below 1, and for a token beyond it."""

    def __init__(self, capacity: int) -> None:
        require(Count, capacity=capacity)
        self.capacity = self.slots = capacity

    def plan(self, new: Tensor, start: int | None, windows: Collection[int | None]) -> Plan:
        """Tokens at ``new`` (B, T) go to the slots of these numbers; all slots are read. Raises
        ``ValueError`` for a token beyond them."""
        write: slice | Tensor
        if start is not None:
            self._check_room(start + new.shape[1])
            write = slice(start, start + new.shape[1])
            table = self._table(1, new.device)
            table[:, write] = new
        else:
            if not torch.compiler.is_compiling():  # reading the positions would break the graph
                self._check_room(int(new.max()) + 1)
            # padding goes to the bin: no position leads there, even unchecked
            write = torch.where(new >= 0, new + (new >= self.slots), self.slots)
            table = self._table(new.shape[0], new.device).scatter_(1, write, new)
        every = slice(0, self.slots)
        return Plan(Visibility(new, table[:, every]), table, write, every, room=self.slots + 1)

    def _check_room(self, length: int) -> None:
        if length > self.capacity:
            raise ValueError(f"{length} tokens do not fit into a cache of capacity={self.capacity}")


class SlidingTrack(SlotTrack):
    """A ring: slot ``p % slots`` holds position ``p`` until a later token takes its place, with
    ``window + slack`` slots."""

    slack: int
    latest: int  # tokens before the next one that it needs, and itself

    def __init__(self, window: int, slack: int = 0) -> None:
        if type(window) is not int or window < 1:
            raise ValueError(f"window={window} must be at least 1: a query sees its own key")
        require(Whole, slack=slack)
        self.window = self.latest = window
        self.slack, self.slots = slack, window + slack

    def slot(self, positions: Tensor) -> Tensor:
        """Where the ``positions`` (B, T) that are kept lie."""
        return positions % self.slots

    def kept(self, new: Tensor) -> Tensor:
        """Which of the positions ``new`` (B, T) are still there after a pass, as bool (B, T)."""
        return (new >= 0) & (new > new.amax(dim=1, keepdim=True) - self.slots)

    def plan(self, new: Tensor, start: int | None, windows: Collection[int | None]) -> Plan:
        """One token is written before the slots are read: what it pushes out, it does not see.
        Several, at ``new`` (B, T), read the slots first, because the first of them still sees what
        the last pushes out; then the slots and the new tokens stand side by side."""
        T, slots = new.shape[1], self.slots
        kept = self.kept(new)
        write = torch.where(kept, self.slot(new), slots)
        before = self._table(new.shape[0], new.device)
        after = before.scatter(1, write, torch.where(kept, new, PADDING))
        if start is None:  # any slot may be in use
            used, use = slots if self.positions is not None else 0, slots
        else:  # rows that are alike fill the slots in order, and then begin again
            used, use = min(start, slots), min(start + T, slots)
        if T == 1:
            read, keys = slice(0, use), after[:, :use]
            # in order, or all of them seen by every layer, in any order
            full = all(window is None or window >= use for window in windows)
            known = start is not None and (start < slots or full)
        else:
            read, keys = slice(0, used), torch.cat([before[:, :used], new], dim=1)
            known = start is not None and start <= slots
        seen = Visibility(new, keys, dense=known)
        where = write if start is None else write[0]
        return Plan(seen, after, where, read, room=slots + 1, read_first=T > 1)

    def check_crop(self, length: int | Tensor) -> None:
        """Raises ``ValueError`` for more tokens than ``slack`` lets take back, from a length (one,
        or (B,)) on."""
        if self.positions is None:
            return
        held = self.positions.amax(dim=1) + 1  # tokens of each row
        end = torch.as_tensor(length, device=held.device)  # how many are to be left
        held, end = torch.broadcast_tensors(held, end)  # (B,), or (1,) where all rows are alike
        # The next query sees the W - 1 keys before it; the last of them also says where the row
        # ends, so even a window of one needs it.
        first = (end - max(self.latest - 1, 1)).clamp(min=0)
        inside = (self.positions >= first[:, None]) & (self.positions < end[:, None])
        lost = inside.sum(dim=1) < end - first
        # Where the ring has turned, a pass of one token that failed may have written over the
        # oldest key. (Of an empty row nothing can be lost.)
        lost |= (held > self.slots) & (held - end > self.slack) & (end > 0)
        if ((end < held) & lost).any():
            raise ValueError(
                f"{int((held - end).max())} tokens cannot be taken back, only slack={self.slack} "
                "in all: the keys that they pushed out are gone"
            )


class StaticCache(BufferCache):
    """``capacity`` slots, made once; slot ``p`` holds position ``p``.

    Every pass returns all slots, so the shapes are the same in every step, and a compiled graph can
    be used again. (Give positions then: without them the length would be compiled in.) Unused slots
    are hidden by their position, -1. Attention reads them all the same: a long cache for a short
    text costs time, where :class:`~lm_from_scratch.cache.growing.GrowingCache` with ``reserve``
    does not. Raises ``ValueError`` for a ``capacity`` below 1, and for a token beyond it.
    """

    def __init__(self, n_layer: int, capacity: int, codec: Codec = EXACT) -> None:
        super().__init__([StaticTrack(capacity)], [0] * n_layer, codec)


class SlidingCache(BufferCache):
    """A ring of ``window + slack`` slots, for layers that see ``window`` keys, their own included.

    Memory does not grow with the text. A model with a layer that sees further is refused. ``slack``
    tokens can be taken back with ``crop``; what they pushed out is gone without it.
    """

    def __init__(self, n_layer: int, window: int, slack: int = 0, codec: Codec = EXACT) -> None:
        super().__init__([SlidingTrack(window, slack)], [0] * n_layer, codec)


def cache_for(
    windows: Sequence[int | None], codec: Codec = EXACT, reserve: int = 0, slack: int = 0
) -> BufferCache:
    """The smallest cache that loses nothing for a model whose layers have these ``windows``.

    Each distinct window has a track: growing for layers that see everything, a ring for those that
    slide.
    """
    distinct = list(dict.fromkeys(windows))
    tracks = [GrowingTrack(reserve) if w is None else SlidingTrack(w, slack) for w in distinct]
    return BufferCache(tracks, [distinct.index(w) for w in windows], codec)
