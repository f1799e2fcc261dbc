"""Key-value caches: what attention keeps of the tokens it has already seen.

Keys and values of earlier tokens never change in a causal model, so generation computes them once.
A cache is an argument of the model's forward. It holds the keys and values of every layer and,
once for all layers, the position of every key, so that padding stays hidden for ever.

Training passes :data:`NO_CACHE`, whose ``update`` returns what it was given: no layer asks whether
there is a cache. Layout everywhere: keys and values are (B, H, S, D), in and out.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lm_from_scratch.visibility import Visibility


def check_positions(positions: Tensor, x: Tensor) -> None:
    """Refuse positions that do not fit the tokens ``x`` (B, T, ...), and masks of bool or floats.

    A mask of integers cannot be told from positions without reading them, and passes.
    """
    if positions.shape != x.shape[:2]:
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}, the tokens {tuple(x.shape[:2])}; "
            "they must agree"
        )
    if positions.dtype.is_floating_point or positions.dtype == torch.bool:
        raise ValueError(
            f"positions have dtype {positions.dtype}; they must be integers, -1 for padding "
            "(positions_from_mask makes them from a mask)"
        )


def place(x: Tensor, positions: Tensor | None, start: int) -> Tensor:
    """Positions for the tokens ``x`` (B, T, ...): those given, or ``start``, ``start + 1``, ...

    The result is (B, T), or (1, T) where no positions were given and all rows are alike.
    """
    B, T = x.shape[:2]
    if B == 0 or T == 0:
        raise ValueError(f"the tokens have shape {(B, T)}: there must be at least one")
    if positions is None:
        return torch.arange(start, start + T, device=x.device)[None]
    check_positions(positions, x)
    return positions.long()


def check_documents(x: Tensor, positions: Tensor | None, documents: Tensor | None) -> None:
    """Refuse document numbers that do not fit the tokens ``x`` (B, T, ...)."""
    if documents is None:
        return
    if positions is None:
        raise ValueError("documents need positions, which start again at 0 in each document")
    if documents.shape != x.shape[:2] or documents.dtype.is_floating_point:
        raise ValueError(
            f"documents have shape {tuple(documents.shape)} and dtype {documents.dtype}; they must "
            f"be integers of shape {tuple(x.shape[:2])}"
        )


class NoCache:
    """Keeps nothing: every forward pass stands alone. The same object serves every layer."""

    length = 0

    def see(
        self, x: Tensor, positions: Tensor | None, documents: Tensor | None, n_layer: int
    ) -> Visibility:
        """Which keys the new tokens see: one another."""
        check_documents(x, positions, documents)
        placed = place(x, positions, start=0)
        return Visibility(placed, placed, documents, documents, dense=positions is None)

    def __getitem__(self, layer: int) -> "NoCache":
        return self

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v


#: What training passes: the one object that keeps nothing.
NO_CACHE = NoCache()


class GrowingLayer:
    """The keys and values of one layer, in a buffer that doubles when it is full.

    Doubling copies each entry about once over the whole run; concatenating the new token to the
    old tensor would copy all of them at every token.
    """

    def __init__(self) -> None:
        self.length = 0
        self.keys: Tensor | None = None  # (B, H, capacity, D)
        self.values: Tensor | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``k`` and ``v`` (B, H, T, D); return all so far, (B, H, S, D).

        The result is a view of the cache: do not write into it.
        """
        if k.requires_grad and torch.is_grad_enabled():
            raise ValueError("a cache keeps no gradients: call the model under torch.no_grad()")
        self.keys = self._append(self.keys, k)
        self.values = self._append(self.values, v)
        self.length += k.shape[2]
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def _append(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        B, H, T, D = new.shape
        if buffer is None:
            buffer = new.new_empty(B, H, T, D)
        held = (buffer.shape[0], buffer.shape[1], buffer.shape[3])
        if held != (B, H, D):
            raise ValueError(
                f"the cache holds (batch, heads, D) = {held}, the new tensor has {(B, H, D)}"
            )
        if new.dtype != buffer.dtype:
            raise ValueError(f"the cache holds {buffer.dtype}, the new tensor is {new.dtype}")
        if self.length + T > buffer.shape[2]:
            capacity = max(2 * buffer.shape[2], self.length + T)
            grown = buffer.new_empty(B, H, capacity, D)
            grown[:, :, : self.length] = buffer[:, :, : self.length]
            buffer = grown
        buffer[:, :, self.length : self.length + T] = new
        return buffer


class GrowingCache:
    """A cache without an upper limit, for a model of ``n_layer`` layers.

    ``len(cache)`` is not defined on purpose: an empty cache must not be falsy. Use ``length``.
    """

    def __init__(self, n_layer: int) -> None:
        if n_layer < 1:
            raise ValueError(f"n_layer={n_layer} must be at least 1")
        self.layers = [GrowingLayer() for _ in range(n_layer)]
        self.positions: Tensor | None = None  # (B, S) or (1, S)
        self.dense_length = 0  # columns at the start that were fed without positions

    @property
    def length(self) -> int:
        """The number of columns that every layer holds, padding included."""
        return min(layer.length for layer in self.layers)

    def see(
        self, x: Tensor, positions: Tensor | None, documents: Tensor | None, n_layer: int
    ) -> Visibility:
        """Say which keys the new tokens will see: those held, and one another.

        What a forward pass left behind that failed half-way is dropped first.
        """
        if n_layer != len(self.layers):
            raise ValueError(f"the cache has {len(self.layers)} layers, the model {n_layer}")
        if documents is not None:
            raise ValueError("packed documents cannot be cached: give each its own row")
        held = self.length
        keys = self.layers[0].keys
        if held and keys is not None and keys.shape[0] != x.shape[0]:
            raise ValueError(f"the cache holds {keys.shape[0]} rows, the tokens {x.shape[0]}")
        if positions is None and self.dense_length < held:
            raise ValueError(
                "positions are needed: the cache was filled with explicit positions, so where its "
                "rows end is not known"
            )
        new = place(x, positions, start=held)
        for layer in self.layers:
            layer.length = held
        self.dense_length = (
            held + new.shape[1] if positions is None else min(held, self.dense_length)
        )
        if self.positions is None:
            self.positions = new
        else:
            old = self.positions[:, :held]
            rows = max(old.shape[0], new.shape[0])
            self.positions = torch.cat([old.expand(rows, -1), new.expand(rows, -1)], dim=1)
        return Visibility(new, self.positions, dense=positions is None)

    def reorder(self, rows: Tensor) -> None:
        """Keep the given ``rows``, in that order; one may stand there twice, as in beam search."""
        keys = self.layers[0].keys
        held = rows.numel() if keys is None else keys.shape[0]
        if rows.dim() != 1 or rows.is_floating_point() or not ((rows >= 0) & (rows < held)).all():
            raise ValueError(f"rows={rows.tolist()} must be a list of rows below {held}")
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        if self.positions is not None and self.positions.shape[0] > 1:
            self.positions = self.positions[rows]

    def __getitem__(self, layer: int) -> GrowingLayer:
        return self.layers[layer]


class Restricted:
    """Another cache, with fewer visible keys: those for which ``allowed`` is True as well.

    ``allowed`` (B or 1, 1, T, S) is for the one forward pass of T tokens that it is passed to. It
    serves what positions cannot say: a tree of drafts, or a prefix that is read in blocks::

        model(idx, cache=Restricted(NO_CACHE, allowed))
    """

    def __init__(self, cache: "Cache", allowed: Tensor) -> None:
        self.cache, self.allowed = cache, allowed

    def see(
        self, x: Tensor, positions: Tensor | None, documents: Tensor | None, n_layer: int
    ) -> Visibility:
        visibility = self.cache.see(x, positions, documents, n_layer)
        others = visibility.allowed
        return replace(
            visibility, allowed=self.allowed if others is None else others & self.allowed
        )

    def __getitem__(self, layer: int) -> NoCache | GrowingLayer:
        return self.cache[layer]


Cache = NoCache | GrowingCache | Restricted
