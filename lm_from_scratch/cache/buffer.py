"""Where keys and values lie: tensors of slots, and for each slot the position of what is in it.

A cache has a pair of *buffers* for every layer. Layers that keep the same tokens in the same slots
share a *track*: one table of positions, and one plan for each pass. A model has a track for each
distinct window of its layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import PADDING, Visibility
from lm_from_scratch.cache.codec import EXACT, Codec
from lm_from_scratch.cache.kv import KVCache


class Buffer:
    """Slots for one layer's keys, or for its values: (B, H, slots, D), as the codec keeps them."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.parts: list[Tensor] = []  # each (B, H, slots, ...)
        self.held: tuple[int, int, int, torch.dtype] | None = None  # B, H, D, dtype

    def make_room(self, new: Tensor, slots: int, empty: bool) -> None:
        """So many slots at least, for entries like ``new`` (B, H, T, D). What is held is kept, in
        buffers that double; an ``empty`` one has nothing to keep."""
        if self.slots >= slots and self.fits(new):
            return
        if empty or self.held is None:
            self.allocate(new, slots)
        else:
            self.check(new)
            self.grow(max(2 * self.slots, slots))

    @torch.inference_mode(False)  # what is kept can be written into later, in whatever mode
    def allocate(self, like: Tensor, slots: int) -> None:
        """Make room for ``slots`` entries like ``like`` (B, H, T, D)."""
        self.held = like.shape[0], like.shape[1], like.shape[3], like.dtype
        # zeros: a slot that was never written is hidden, but 0 times NaN is NaN
        self.parts = [
            part.new_zeros(*part.shape[:2], slots, *part.shape[3:])
            for part in self.codec.encode(like[:, :, :1])
        ]

    @torch.inference_mode(False)
    def grow(self, slots: int) -> None:
        """The same contents, with room for ``slots`` entries."""
        old, self.parts = self.parts, []
        for part in old:
            grown = part.new_zeros(*part.shape[:2], slots, *part.shape[3:])
            grown[:, :, : part.shape[2]] = part
            self.parts.append(grown)

    def fits(self, new: Tensor) -> bool:
        """Whether ``new`` (B, H, T, D) has the batch, heads, features and dtype that are held."""
        B, H, _, D = new.shape
        return self.held == (B, H, D, new.dtype)

    def check(self, new: Tensor) -> None:
        """Raises ``ValueError`` for ``new`` (B, H, T, D) unlike what is held."""
        if self.held is not None and not self.fits(new):
            B, H, D, dtype = self.held
            raise ValueError(
                f"the cache holds (batch, heads, D) = {(B, H, D)} in {dtype}, the new tensor "
                f"has {(new.shape[0], new.shape[1], new.shape[3])} in {new.dtype}"
            )

    @property
    def slots(self) -> int:
        """How many there are."""
        return self.parts[0].shape[2] if self.parts else 0

    def write(self, where: slice | Tensor, new: Tensor) -> None:
        """Put ``new`` (B, H, T, D) into slots: the same for all rows (a slice, or a tensor (T,)),
        or others in each row, (B, T)."""
        for part, value in zip(self.parts, self.codec.encode(new), strict=True):
            if isinstance(where, slice) or where.dim() == 1:
                part[:, :, where] = value
            else:
                rows = torch.arange(part.shape[0], device=part.device)[:, None]  # (B, 1)
                part[rows, :, where] = value.transpose(1, 2)  # (B, T, H, ...)

    def read(self, where: slice) -> Tensor:
        """What is in these slots, (B, Hkv, S, D)."""
        return self.codec.decode([part[:, :, where] for part in self.parts])

    def read_beside(self, where: slice, new: Tensor) -> Tensor:
        """The same, and behind it ``new`` (B, H, T, D) as it will be read later."""
        new = self.codec.decode(self.codec.encode(new))
        return torch.cat([self.read(where), new], dim=2) if where.stop else new

    @torch.inference_mode(False)
    def select(self, rows: Tensor) -> None:
        """Keep the ``rows`` (N,), in that order."""
        self.parts = [part[rows] for part in self.parts]
        if self.held is not None:
            self.held = len(rows), *self.held[1:]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in self.parts)


@dataclass
class Plan:
    """What one pass does to a track: found before anything is computed, followed by its layers."""

    visibility: Visibility  # of a layer without a window
    table: Tensor  # the position in each slot after the pass, (B or 1, slots)
    write: slice | Tensor  # the slots of the new tokens: for all rows, or (B, T)
    read: slice  # the slots that are seen
    room: int  # slots that a buffer must have
    read_first: bool = False  # the slots as they were, and the new tokens beside them


class Track(ABC):
    """Where the tokens of a pass go: one answer for all layers that keep the same tokens.

    ``positions`` (B, slots), or (1, slots) where all rows are alike, says what is in each slot;
    ``None`` while nothing is held.
    """

    positions: Tensor | None = None
    window: int | None = None  # keys that are kept for a query, its own included; None: all
    slack: int | None = None  # tokens that can always be taken back; None: all

    @abstractmethod
    def plan(self, new: Tensor, start: int | None, windows: Collection[int | None]) -> Plan:
        """The pass of tokens at the positions ``new`` (B, T) through layers with these ``windows``.
        Rows that are alike come as one, (1, T), and go on at ``start``; otherwise it is ``None``.
        What is held does not change. Raises ``ValueError`` where there is no room."""

    def check_crop(self, length: int | Tensor) -> None:  # noqa: B027  # most can go back to any
        """Raises ``ValueError`` for a length (one, or (B,)) to which the track cannot go back."""

    def crop(self, length: int | Tensor) -> None:
        """Hide what stands at position ``length`` (one, or (B,)) or after it."""
        assert self.positions is not None
        lengths = torch.as_tensor(length, device=self.positions.device).reshape(-1, 1)
        table = self.positions.expand(max(len(lengths), len(self.positions)), -1)
        self.positions = table.masked_fill(table >= lengths, PADDING)

    def select(self, rows: Tensor) -> None:
        """Keep the ``rows`` (N,), in that order."""
        if self.positions is not None and self.positions.shape[0] > 1:
            self.positions = self.positions[rows]


@dataclass
class Pass:
    """The plans of all tracks for one pass, and what waits for its end."""

    plans: list[Plan]
    empty: bool  # nothing is held yet
    dense_length: int | None  # afterwards
    waiting: list[tuple[Buffer, slice | Tensor, Tensor]] = field(default_factory=list)


class BufferCache(KVCache):
    """A cache whose layers belong to tracks: layer ``i`` to ``tracks[owner[i]]``.

    ``keys[i]`` and ``values[i]`` are its buffers.
    """

    def __init__(self, tracks: Sequence[Track], owner: Sequence[int], codec: Codec = EXACT) -> None:
        super().__init__(len(owner))
        if set(owner) != set(range(len(tracks))):
            raise ValueError(f"owner={list(owner)} must name each of the {len(tracks)} tracks")
        self.tracks, self.owner, self.codec = list(tracks), list(owner), codec
        self.keys = [Buffer(codec) for _ in owner]
        self.values = [Buffer(codec) for _ in owner]
        self.reset()

    def reset(self) -> None:
        """Forget all tokens, and keep the memory for the next ones."""
        super().reset()
        self.dense_length = 0
        for track in self.tracks:
            track.positions = None
        for buffer in (*self.keys, *self.values):
            for part in buffer.parts:
                part.zero_()  # a hidden number is multiplied by 0, and 0 times NaN is NaN

    def _plan(
        self, new: Tensor, batch: int, dense: bool, windows: Sequence[int | None]
    ) -> tuple[Pass, list[Visibility]]:
        start = self.dense_length if dense else None
        layers = list(zip(self.owner, windows, strict=True))
        kinds = set(layers)
        plans = [
            track.plan(new, start, {window for owner, window in kinds if owner == number})
            for number, track in enumerate(self.tracks)
        ]
        # layers that are alike share one visibility, and so its mask
        seen = {(owner, w): plans[owner].visibility.within(w) for owner, w in kinds}
        end = None if start is None else start + new.shape[1]
        return Pass(plans, self.batch is None, end), [seen[layer] for layer in layers]

    def _store(self, plan: Pass, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        own, keys, values = plan.plans[self.owner[layer]], self.keys[layer], self.values[layer]
        keys.make_room(k, own.room, plan.empty)  # both, before the first is written
        values.make_room(v, own.room, plan.empty)
        if not own.read_first:
            keys.write(own.write, k)
            values.write(own.write, v)
            return keys.read(own.read), values.read(own.read)
        plan.waiting += [(keys, own.write, k), (values, own.write, v)]
        return keys.read_beside(own.read, k), values.read_beside(own.read, v)

    def _commit(self, plan: Pass) -> None:
        for buffer, where, new in plan.waiting:  # a pass that failed has pushed nothing out
            buffer.write(where, new)
        for track, own in zip(self.tracks, plan.plans, strict=True):
            track.positions = own.table
        self.dense_length = plan.dense_length

    @property
    def windows(self) -> list[int | None]:
        return [self.tracks[number].window for number in self.owner]

    @property
    def slack(self) -> int | None:
        slacks = [t.slack for t in self.tracks] + [super().slack]
        return min((n for n in slacks if n is not None), default=None)

    @property
    def batch(self) -> int | None:
        if self.tracks[0].positions is None:
            return None
        for state in self.states.values():  # then the first layer may have no keys
            return state[0].shape[0]
        held = self.keys[0].held
        return None if held is None else held[0]

    @property
    def lengths(self) -> Tensor:
        positions = self.tracks[0].positions
        if positions is None or self.batch is None:
            return torch.zeros(0, dtype=torch.long)
        return positions.amax(dim=1).expand(self.batch) + 1

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in (*self.keys, *self.values)) + self.state_nbytes

    def _contents(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        positions = self.tracks[self.owner[layer]].positions
        assert positions is not None and self.batch is not None
        every = slice(0, positions.shape[1])
        positions = positions.expand(self.batch, -1)
        return self.keys[layer].read(every), self.values[layer].read(every), positions

    def check_crop(self, length: int | Tensor) -> None:
        """Raises ``ValueError`` for a length (one, or (B,)) to which a track cannot go back."""
        super().check_crop(length)
        for track in self.tracks:  # all of them, before the first is changed
            track.check_crop(length)

    def _crop(self, length: int | Tensor) -> None:
        for track in self.tracks:
            track.crop(length)
        if isinstance(length, Tensor):
            self.dense_length = None
        elif self.dense_length is not None:
            self.dense_length = length
        if not any((t.positions >= 0).any() for t in self.tracks if t.positions is not None):
            self.reset()

    def _select(self, rows: Tensor) -> None:
        for buffer in (*self.keys, *self.values):
            buffer.select(rows)
        for track in self.tracks:
            track.select(rows)
