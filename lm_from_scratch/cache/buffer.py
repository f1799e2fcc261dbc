"""Where keys and values lie: tensors of slots, with the position of what is in each."""

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import PADDING
from lm_from_scratch.cache.codec import EXACT, Codec
from lm_from_scratch.cache.interface import KVCache


class Buffer:
    """Slots for one layer's keys, or for its values: (B, H, slots, D), as the codec keeps them."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.parts: list[Tensor] = []  # each (B, H, slots, ...)
        self.held: tuple[int, int, int, torch.dtype] | None = None  # B, H, D, dtype

    def allocate(self, like: Tensor, slots: int) -> None:
        """Make room for ``slots`` entries like ``like`` (B, H, T, D)."""
        self.held = like.shape[0], like.shape[1], like.shape[3], like.dtype
        # zeros: a slot that was never written is hidden, but 0 times NaN is NaN
        self.parts = [
            part.new_zeros(*part.shape[:2], slots, *part.shape[3:])
            for part in self.codec.encode(like[:, :, :1])
        ]

    def grow(self, slots: int) -> None:
        """The same contents, with room for ``slots`` entries."""
        old, self.parts = self.parts, []
        for part in old:
            grown = part.new_zeros(*part.shape[:2], slots, *part.shape[3:])
            grown[:, :, : part.shape[2]] = part
            self.parts.append(grown)

    def fits(self, new: Tensor) -> bool:
        """Whether ``new`` (B, H, T, D) has the batch, heads, features and dtype that are held."""
        return self.held == (new.shape[0], new.shape[1], new.shape[3], new.dtype)

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

    def select(self, rows: Tensor) -> None:
        """Keep the ``rows`` (N,), in that order."""
        self.parts = [part[rows] for part in self.parts]
        if self.held is not None:
            self.held = len(rows), *self.held[1:]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in self.parts)


class BufferCache(KVCache):
    """A cache whose keys and values lie in one pair of buffers a layer.

    ``positions`` (B, slots), or (1, slots) where all rows are alike, says what is in each slot.
    """

    def __init__(self, n_layer: int, codec: Codec = EXACT) -> None:
        super().__init__(n_layer)
        self.codec = codec
        self.keys = [Buffer(codec) for _ in range(n_layer)]
        self.values = [Buffer(codec) for _ in range(n_layer)]
        self.reset()

    def reset(self) -> None:
        """Forget all tokens, and keep the memory for the next ones."""
        self.positions: Tensor | None = None
        self.dense_length = 0
        self._next_layer = None
        for buffer in (*self.keys, *self.values):
            for part in buffer.parts:
                part.zero_()  # a hidden number is multiplied by 0, and 0 times NaN is NaN

    def _pair(self, layer: int, k: Tensor, v: Tensor) -> list[tuple[Buffer, Tensor]]:
        """Each buffer of a layer with what is to be written into it."""
        pairs = [(self.keys[layer], k), (self.values[layer], v)]
        for buffer, new in pairs:
            if self.positions is not None and buffer.held and not buffer.fits(new):
                B, H, D, dtype = buffer.held
                raise ValueError(
                    f"the cache holds (batch, heads, D) = {(B, H, D)} in {dtype}, the new tensor "
                    f"has {(new.shape[0], new.shape[1], new.shape[3])} in {new.dtype}"
                )
        return pairs

    def _finish(self) -> None:
        self.positions, self.dense_length = self._next

    def _await(self, positions: Tensor, new: Tensor, dense: bool) -> None:
        """What will be held when the pass is complete."""
        length = (self.dense_length or 0) + new.shape[1] if dense else None
        self._next = positions, length

    @property
    def batch(self) -> int | None:
        held = self.keys[0].held
        return None if self.positions is None or held is None else held[0]

    @property
    def lengths(self) -> Tensor:
        if self.positions is None or self.batch is None:
            return torch.zeros(0, dtype=torch.long)
        return self.positions.amax(dim=1).expand(self.batch) + 1

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def contents(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        assert self.positions is not None and self.batch is not None
        every = slice(0, self.positions.shape[1])
        positions = self.positions.expand(self.batch, -1)
        return self.keys[layer].read(every), self.values[layer].read(every), positions

    def _crop(self, length: int | Tensor) -> None:
        assert self.positions is not None
        lengths = torch.as_tensor(length, device=self.positions.device).reshape(-1, 1)
        table = self.positions.expand(max(len(lengths), len(self.positions)), -1)
        self.positions = table.masked_fill(table >= lengths, PADDING)
        if isinstance(length, Tensor):
            self.dense_length = None
        elif self.dense_length is not None:
            self.dense_length = length
        if not (self.positions >= 0).any():
            self.reset()

    def _select(self, rows: Tensor) -> None:
        for buffer in (*self.keys, *self.values):
            buffer.select(rows)
        if self.positions is not None and self.positions.shape[0] > 1:
            self.positions = self.positions[rows]
