r"""Paged caches: memory in blocks, handed out as rows grow, and shared by rows that begin alike.

One pool owns all memory, cut into blocks of :math:`P` slots. A row has a *block table*: its
position :math:`p` lives in slot :math:`p \bmod P` of block :math:`\text{table}[\lfloor p / P
\rfloor]`. A row wastes less than one block, whatever its length; rows with the same beginning hold
the same blocks, which are counted and copied only when one of the rows writes into them.

Reading gathers the blocks of every row into one tensor: a copy, which a kernel that follows the
block table avoids.

Source: Kwon et al., *Efficient Memory Management for Large Language Model Serving with
PagedAttention*, 2023, arXiv:2309.06180.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lm_from_scratch.attention.visibility import PADDING, Visibility
from lm_from_scratch.cache.interface import by_layer
from lm_from_scratch.cache.kv import KVCache
from lm_from_scratch.limits import Count, Whole, require


@dataclass(eq=False)
class Row:
    """One sequence in a pool: which blocks it holds, and how many tokens are in them."""

    table: list[int] = field(default_factory=list)
    length: int = 0


class BlockPool:
    """``n_blocks`` blocks of ``block_size`` slots for every layer, and who uses them. Keys have
    ``head_dim`` features, and so have values that are given no ``value_dim`` of their own."""

    def __init__(
        self,
        n_layer: int,
        n_kv_head: int,
        head_dim: int,
        n_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        value_dim: int | None = None,
    ) -> None:
        require(
            Count,
            n_layer=n_layer,
            n_kv_head=n_kv_head,
            head_dim=head_dim,
            n_blocks=n_blocks,
            block_size=block_size,
        )
        value_dim = head_dim if value_dim is None else value_dim
        require(Whole, value_dim=value_dim)  # 0 where a key is the value, too
        self.block_size = block_size
        shape = (n_layer, n_blocks * block_size, n_kv_head)
        with torch.inference_mode(False):  # it can be written into later, in whatever mode
            self.keys = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
            self.values = torch.zeros(*shape, value_dim, dtype=dtype, device=device)
            self._gathered = [self.keys.new_empty(0) for _ in range(2)]
        self.users = [0] * n_blocks  # rows, or others, that hold each block
        self.free = list(range(n_blocks))[::-1]

    def allocate(self) -> int:
        """A block that nobody uses. Raises ``ValueError`` if there is none."""
        if not self.free:
            raise ValueError(f"all {len(self.users)} blocks of the pool are in use")
        block = self.free.pop()
        self.users[block] = 1
        return block

    def share(self, block: int) -> int:
        """One more user of a block."""
        if self.users[block] < 1:
            raise ValueError(f"block {block} is shared, but nobody uses it")
        self.users[block] += 1
        return block

    def release(self, block: int) -> None:
        """One user less; the last one frees the block."""
        if self.users[block] < 1:
            raise ValueError(f"block {block} is released, but nobody uses it")
        self.users[block] -= 1
        if not self.users[block]:
            self.free.append(block)

    def own(self, block: int) -> int:
        """The block itself for its only user; a copy of it for one of several."""
        if self.users[block] == 1:
            return block
        copy = self.allocate()
        P = self.block_size
        for memory in (self.keys, self.values):
            memory[:, copy * P : (copy + 1) * P] = memory[:, block * P : (block + 1) * P]
        self.release(block)
        return copy

    def fork(self, row: Row) -> Row:
        """A second row with the same tokens, in the same blocks."""
        needed = -(-row.length // self.block_size)  # a pass that failed may have left more
        return Row([self.share(block) for block in row.table[:needed]], row.length)

    def slots(self, row: Row) -> Tensor:
        """Where the tokens of a row lie in ``keys[layer]`` and ``values[layer]``, (length,)."""
        table = torch.tensor(row.table, dtype=torch.long, device=self.keys.device)[:, None]
        inside = torch.arange(self.block_size, device=self.keys.device)
        return (table * self.block_size + inside).flatten()[: row.length]

    def cut(self, row: Row, length: int) -> None:
        """Shorten a row, and give back the blocks that it does not need any more."""
        if not 0 <= length <= row.length:
            raise ValueError(f"length={length} is not in 0 ... {row.length}, the row's length")
        needed = -(-length // self.block_size)
        for block in row.table[needed:]:
            self.release(block)
        row.table, row.length = row.table[:needed], length

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The keys (B, H, S, D) and the values (B, H, S, Dv) in ``slots`` (B, S), in memory that
        the next call writes over: fresh memory for every layer would cost more time than the copy.
        """
        seen = []
        for i, memory in enumerate((self.keys, self.values)):
            H, D = memory.shape[2:]
            size = slots.numel() * H * D
            if not D:  # a key is the value, too
                seen.append(memory.new_empty(len(slots), H, slots.shape[1], 0))
                continue
            if len(self._gathered[i]) < size:
                with torch.inference_mode(False):
                    self._gathered[i] = memory.new_empty(2 * size)  # rows grow
            out = self._gathered[i][:size].view(-1, H * D)
            torch.index_select(memory[layer].flatten(1), 0, slots.flatten(), out=out)
            seen.append(out.view(*slots.shape, H, D).transpose(1, 2))
        return seen[0], seen[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, used or not, without what a pass gathers."""
        return self.keys.nbytes + self.values.nbytes


@dataclass
class PagedPlan:
    """One pass through some rows of a pool: their blocks, and the positions in them."""

    tables: Tensor  # the blocks of each row, (B, most)
    block_size: int
    queries: Tensor  # positions of the new tokens, (B, T)
    keys: Tensor  # positions that are read, (B, S)
    counts: list[int]  # new tokens of each row
    ends: list[int]  # tokens that each row holds afterwards

    def slots(self, positions: Tensor) -> Tensor:
        """Where the rows keep ``positions`` (B, N); padding counts as their first one, since no
        other row's will do. (A row without any token has none, and only its padding looks there.)
        """
        P, positions = self.block_size, positions.clamp(min=0)
        return self.tables.gather(1, positions // P) * P + positions % P

    @cached_property
    def real(self) -> Tensor:
        """Which of the new tokens are not padding, (B, T): N of them."""
        return self.queries >= 0

    @cached_property
    def write(self) -> Tensor:
        """The slots of the N new tokens."""
        return self.slots(self.queries)[self.real]

    @cached_property
    def read(self) -> Tensor:
        """The slots of the keys, (B, S)."""
        return self.slots(self.keys)


class PagedCache(KVCache):
    """Some rows of a pool, as a cache. Between two passes rows may come and go.

    The tokens of a row go on where the row ends; padding among them takes no slot. Without ``rows``
    the first pass makes them. ``reset`` gives the blocks back. Raises ``ValueError`` where a row
    stands there twice, tokens do not follow on it, or the pool is full. A state belongs to the
    cache, not to a row of the pool: rows go on with it in the same cache alone.
    """

    plan_type: type[PagedPlan] = PagedPlan

    def __init__(self, pool: BlockPool, rows: list[Row] | None = None) -> None:
        super().__init__(len(pool.keys))
        self.pool = pool
        self.rows = rows or []
        self._fixed = rows is not None
        if len({id(row) for row in self.rows}) < len(self.rows):
            raise ValueError("the same row stands twice in a batch: fork it first")

    @property
    def dense_length(self) -> int | None:  # type: ignore[override]
        """The length of all rows, if they are equally long."""
        lengths = {row.length for row in self.rows} or {0}
        return lengths.pop() if len(lengths) == 1 else None

    def _plan(
        self, new: Tensor, batch: int, dense: bool, windows: Sequence[int | None]
    ) -> tuple[PagedPlan, list[Visibility]]:
        if len(self.rows) != batch:  # the first pass, or one after a pass that failed
            if self._fixed:
                raise ValueError(f"the cache has {len(self.rows)} rows, the tokens {batch}")
            self.reset()
            self.rows = [Row() for _ in range(batch)]
        rows = self.rows
        starts = [row.length for row in rows]
        if dense:
            counts = [new.shape[1]] * batch
        else:
            placed = [[p for p in line if p >= 0] for line in new.tolist()]
            counts = [len(line) for line in placed]
            for number, (line, start) in enumerate(zip(placed, starts, strict=True)):
                if line != list(range(start, start + len(line))):
                    raise ValueError(
                        f"row {number} holds {start} tokens and goes on there, not with {line[:3]}"
                    )
        self._make_room(counts)
        P, device = self.pool.block_size, new.device
        ends = [start + n for start, n in zip(starts, counts, strict=True)]
        S = max(ends)
        most = -(-S // P)  # blocks of the longest row
        blocks = [(row.table + [0] * most)[:most] for row in rows]
        tables = torch.tensor(blocks, device=device)  # (B, most)
        length = torch.tensor(ends, device=device)[:, None]  # (B, 1)
        positions = torch.arange(S, device=device).expand(batch, S)
        keys = torch.where(positions < length, positions, PADDING)  # (B, S)
        alike = len(set(ends)) == 1 and min(counts) == new.shape[1]
        seen = by_layer(Visibility(new, keys, dense=alike), windows)
        return self.plan_type(tables, P, new.expand(batch, -1), keys, counts, ends), seen

    def _make_room(self, counts: list[int]) -> None:
        """Give every row the blocks for so many new tokens, none of which it shares; or refuse,
        before anything has changed."""
        rows, pool, P = self.rows, self.pool, self.pool.block_size
        wanted = [
            max(0, -(-(row.length + n) // P) - len(row.table))
            for row, n in zip(rows, counts, strict=True)
        ]
        shared: dict[int, int] = {}  # blocks that are written into, and by how many rows
        for row, n in zip(rows, counts, strict=True):
            if n and row.length % P:
                block = row.table[row.length // P]
                shared[block] = shared.get(block, 0) + 1
        copies = sum(min(writers, pool.users[block] - 1) for block, writers in shared.items())
        if sum(wanted) + copies > len(pool.free):
            raise ValueError(
                f"{sum(wanted) + copies} more blocks are needed, {len(pool.free)} of the pool's "
                f"{len(pool.users)} are free"
            )
        for row, n, more in zip(rows, counts, wanted, strict=True):
            if n and row.length % P:
                row.table[row.length // P] = pool.own(row.table[row.length // P])
            row.table += [pool.allocate() for _ in range(more)]

    def _store(self, plan: PagedPlan, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for memory, new in ((self.pool.keys[layer], k), (self.pool.values[layer], v)):
            _, H, D = memory.shape
            if new.dtype != memory.dtype or (new.shape[1], new.shape[3]) != (H, D):
                raise ValueError(
                    f"the pool holds (heads, D) = {(H, D)} in {memory.dtype}, the new tensor has "
                    f"{(new.shape[1], new.shape[3])} in {new.dtype}"
                )
            memory[plan.write] = new.transpose(1, 2)[plan.real]  # (N, H, D)
        return self.pool.gather(layer, plan.read)

    def _commit(self, plan: PagedPlan) -> None:
        for row, n in zip(self.rows, plan.counts, strict=True):
            row.length += n

    @property
    def batch(self) -> int | None:
        return len(self.rows) if any(row.length for row in self.rows) else None

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([row.length for row in self.rows], dtype=torch.long)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that the rows hold, a shared one counted once, and of states."""
        blocks = {block for row in self.rows for block in row.table}
        return self.pool.nbytes * len(blocks) // len(self.pool.users) + self.state_nbytes

    def _contents(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        slots = [self.pool.slots(row) for row in self.rows]
        keys = pad_sequence([self.pool.keys[layer, s] for s in slots], batch_first=True)
        values = pad_sequence([self.pool.values[layer, s] for s in slots], batch_first=True)
        places = [torch.arange(len(s), device=s.device) for s in slots]
        positions = pad_sequence(places, batch_first=True, padding_value=PADDING)
        return keys.transpose(1, 2), values.transpose(1, 2), positions

    def reset(self) -> None:
        """Forget all tokens, and give their blocks back."""
        for row in self.rows:
            self.pool.cut(row, 0)
        super().reset()
        if not self._fixed:
            self.rows = []

    def _crop(self, length: int | Tensor) -> None:
        lengths = length.tolist() if isinstance(length, Tensor) else [length] * len(self.rows)
        for row, n in zip(self.rows, lengths, strict=True):
            self.pool.cut(row, min(n, row.length))

    def _select(self, rows: Tensor) -> None:
        """No key is copied: the new rows share the blocks of the old ones."""
        chosen = [self.pool.fork(self.rows[i]) for i in rows.tolist()]
        for row in self.rows:
            self.pool.cut(row, 0)
        self.rows = chosen
