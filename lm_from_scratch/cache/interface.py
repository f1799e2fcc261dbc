"""What every cache does, and the one that keeps nothing.

A forward pass asks its cache three things. ``see`` says which keys the new tokens will see, before
anything is computed. ``cache[layer].update(k, v)`` hands over a layer's new keys and values, and
returns all that its queries need. With the last layer the pass is complete, and only then do the
new tokens count: a pass that fails half-way leaves the cache as it was.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility


def check_positions(positions: Tensor, x: Tensor) -> None:
    """Raises ``ValueError`` for positions that do not fit the tokens ``x`` (B, T, ...), and for
    masks of bool or floats.

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
    """Positions for the tokens ``x`` (B, T, ...): the ``positions`` (B, T) given, or ``start``,
    ``start + 1``, ...

    The result is (B, T), or (1, T) where no positions were given and all rows are alike. Raises
    ``ValueError`` if there is no token, or the positions do not fit.
    """
    B, T = x.shape[:2]
    if B == 0 or T == 0:
        raise ValueError(f"the tokens have shape {(B, T)}: there must be at least one")
    if positions is None:
        return torch.arange(start, start + T, device=x.device)[None]
    check_positions(positions, x)
    return positions.long()


def check_documents(x: Tensor, positions: Tensor | None, documents: Tensor | None) -> None:
    """Raises ``ValueError`` for document numbers that do not fit the tokens ``x`` (B, T, ...)."""
    if documents is None:
        return
    if positions is None:
        raise ValueError("documents need positions, which start again at 0 in each document")
    if documents.shape != x.shape[:2] or documents.dtype.is_floating_point:
        raise ValueError(
            f"documents have shape {tuple(documents.shape)} and dtype {documents.dtype}; they must "
            f"be integers of shape {tuple(x.shape[:2])}"
        )


class Cache(ABC):
    """Anything that can be passed to a model as ``cache``."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens in the longest row: where a row that is given no positions goes on."""

    @abstractmethod
    def see(
        self, x: Tensor, positions: Tensor | None, documents: Tensor | None, n_layer: int
    ) -> Visibility:
        """Which keys the new tokens ``x`` (B, T, ...) at ``positions`` (B, T) and ``documents``
        (B, T) see: those held, and one another. Raises ``ValueError`` for tokens that this cache
        cannot take."""

    def see_by_layer(
        self,
        x: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
        windows: Sequence[int | None],
    ) -> list[Visibility]:
        """The same of ``x`` (B, T, ...), ``positions`` (B, T) and ``documents`` (B, T) for every
        layer of a model, whose layers have these ``windows``. Raises ``ValueError`` as :meth:`see`,
        and for a window that the cache does not keep."""
        visibility = self.see(x, positions, documents, len(windows))
        within = {window: visibility.within(window) for window in set(windows)}
        return [within[window] for window in windows]

    @abstractmethod
    def __getitem__(self, layer: int) -> "NoCache | Layer":
        """What the attention of that layer is given."""


class NoCache(Cache):
    """Keeps nothing: every forward pass stands alone. The same object serves every layer."""

    length = 0

    def see(
        self, x: Tensor, positions: Tensor | None, documents: Tensor | None, n_layer: int
    ) -> Visibility:
        check_documents(x, positions, documents)
        placed = place(x, positions, start=0)
        return Visibility(placed, placed, documents, documents, dense=positions is None)

    def __getitem__(self, layer: int) -> "NoCache":
        return self

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (B, H, T, D) as they are."""
        return k, v


#: What training passes: the one object that keeps nothing.
NO_CACHE = NoCache()


class Restricted(Cache):
    """Another cache, with fewer visible keys: those for which ``allowed`` is True as well.

    ``allowed`` (B or 1, 1, T, S) is for the one forward pass of T tokens that it is passed to. It
    serves what positions cannot say: a tree of drafts, or a prefix that is read in blocks::

        model(idx, cache=Restricted(NO_CACHE, allowed))

    Its S columns are the keys in the order in which the other cache returns them.
    """

    def __init__(self, cache: Cache, allowed: Tensor) -> None:
        self.cache, self.allowed = cache, allowed

    @property
    def length(self) -> int:
        return self.cache.length

    def see(
        self, x: Tensor, positions: Tensor | None, documents: Tensor | None, n_layer: int
    ) -> Visibility:
        return self._restrict(self.cache.see(x, positions, documents, n_layer))

    def see_by_layer(
        self,
        x: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
        windows: Sequence[int | None],
    ) -> list[Visibility]:
        seen = self.cache.see_by_layer(x, positions, documents, windows)
        restricted = {id(visibility): self._restrict(visibility) for visibility in seen}
        return [restricted[id(visibility)] for visibility in seen]

    def _restrict(self, visibility: Visibility) -> Visibility:
        others = visibility.allowed
        return replace(
            visibility, allowed=self.allowed if others is None else others & self.allowed
        )

    def __getitem__(self, layer: int) -> "NoCache | Layer":
        return self.cache[layer]


class Layer:
    """One layer of a cache, as its attention sees it."""

    def __init__(self, cache: "KVCache", index: int) -> None:
        self.cache, self.index = cache, index

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Hand over the new keys k and values v (B, H, T, D); get all that the queries may see.

        The result may be a view of the cache: do not write into it.
        """
        return self.cache.update(self.index, k, v)


class KVCache(Cache):
    """A cache that keeps: what subclasses store, and how, they say themselves.

    The rows are either alike and fed without positions (then ``dense_length`` is their length), or
    the tokens came with their positions (then it is ``None``), and padding stays hidden for ever.

    ``len(cache)`` is not defined on purpose: an empty cache must not be falsy. Use ``length``.

    Raises ``ValueError`` for ``n_layer`` below 1, and for a layer that is not there.
    """

    dense_length: int | None

    def __init__(self, n_layer: int) -> None:
        if n_layer < 1:
            raise ValueError(f"n_layer={n_layer} must be at least 1")
        self.layers = [Layer(self, index) for index in range(n_layer)]
        self._next_layer: int | None = None  # while a pass runs
        self._complete = False  # every layer of the pass has been updated
        self.together: list[KVCache] = [self]  # caches whose passes end together

    # ---------------------------------------------------------------------------- a forward pass

    def see(
        self, x: Tensor, positions: Tensor | None, documents: Tensor | None, n_layer: int
    ) -> Visibility:
        """Which keys the new tokens ``x`` (B, T, ...) at ``positions`` (B, T) see: those held, and
        one another.

        Raises ``ValueError`` for another number of layers or rows, for ``documents`` (B, T), and
        where positions are missing.
        """
        if n_layer != len(self.layers):
            raise ValueError(f"the cache has {len(self.layers)} layers, the model {n_layer}")
        if documents is not None:
            raise ValueError("packed documents cannot be cached: give each its own row")
        if self.batch is not None and self.batch != x.shape[0]:
            raise ValueError(f"the cache holds {self.batch} rows, the tokens {x.shape[0]}")
        if positions is None and self.dense_length is None:
            raise ValueError(
                "positions are needed: the cache was filled with explicit positions, so where its "
                "rows end is not known"
            )
        new = place(x, positions, start=self.dense_length or 0)
        visibility = self._plan(new, x.shape[0], dense=positions is None)
        self._next_layer, self._complete = 0, False
        return visibility

    @abstractmethod
    def _plan(self, new: Tensor, batch: int, dense: bool) -> Visibility:
        """Choose where tokens at the positions ``new`` (B or 1, T) will be kept, and say what they
        will see. What is held already does not change."""

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What :meth:`Layer.update` does with k and v (B, H, T, D), for the layer of that number.
        Raises ``ValueError`` out of turn, for tensors with gradients, and for k and v that do not
        agree."""
        if layer != self._next_layer:
            wanted = "see" if self._next_layer is None else f"layer {self._next_layer}"
            raise ValueError(
                f"layer {layer} was updated, but {wanted} is next: a pass calls `see` once, and "
                "then updates every layer in order"
            )
        if (k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
            raise ValueError("a cache keeps no gradients: call the model under torch.no_grad()")
        if k.dtype != v.dtype or k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"the keys are {tuple(k.shape)} in {k.dtype}, the values {tuple(v.shape)} in "
                f"{v.dtype}: they must agree"
            )
        seen = self._store(layer, k, v)
        self._next_layer = layer + 1
        if self._next_layer == len(self.layers):
            self._next_layer, self._complete = None, True
            if all(cache._complete for cache in self.together):
                for cache in self.together:
                    cache._complete = False
                    cache._finish()
        return seen

    @abstractmethod
    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new keys and values of a layer; return those that the queries may see."""

    @abstractmethod
    def _finish(self) -> None:
        """Every layer has been updated: from now on the new tokens are held."""

    def __getitem__(self, layer: int) -> Layer:
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer {layer} is not below the cache's {len(self.layers)} layers")
        return self.layers[layer]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    # ------------------------------------------------------------------------------ between them

    @property
    @abstractmethod
    def batch(self) -> int | None:
        """Rows, or ``None`` while the cache is empty."""

    @property
    @abstractmethod
    def lengths(self) -> Tensor:
        """Tokens of each row, padding not counted, (B,)."""

    @property
    def length(self) -> int:
        if self.dense_length is not None:
            return self.dense_length
        return int(self.lengths.max())

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held for keys and values, used or not."""

    @abstractmethod
    def contents(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a layer that is not empty holds: keys and values (B, Hkv, S, D), in the order in
        which they lie there, and the position of each, (B, S); -1 where nothing is."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens."""

    def crop(self, length: int | Tensor) -> None:
        """Forget every token that stands at position ``length`` or after it.

        A number for all rows, or a tensor (B,) with one for each. What follows is as if these
        tokens had never been fed. Raises ``ValueError`` as :meth:`check_crop`.
        """
        self.check_crop(length)
        self._next_layer = None  # a pass that has begun is over
        if self.batch is not None:
            self._crop(length)

    def check_crop(self, length: int | Tensor) -> None:
        """Raises ``ValueError`` for a length to which the cache cannot go back."""
        if not isinstance(length, Tensor):
            if type(length) is not int:
                raise ValueError(f"length={length!r} must be an integer, or a tensor of them")
            if not 0 <= length <= self.length:
                raise ValueError(f"length={length} is not in 0 ... {self.length}, what is held")
        elif length.shape != (self.batch or 0,) or length.is_floating_point():
            raise ValueError(
                f"length has shape {tuple(length.shape)} and dtype {length.dtype}; it must be an "
                f"integer for each of the {self.batch or 0} rows"
            )
        elif not ((length >= 0) & (length <= self.lengths)).all():
            raise ValueError(
                f"length={length.tolist()} is not in 0 ... {self.lengths.tolist()}, what is held"
            )

    @abstractmethod
    def _crop(self, length: int | Tensor) -> None: ...

    def select(self, rows: Tensor) -> None:
        """Keep the given ``rows`` (N,), in that order; one may stand there twice. Raises
        ``ValueError`` for rows that are not there."""
        if self.batch is None:
            raise ValueError("the cache is empty: it has no rows to select")
        rows = torch.as_tensor(rows)
        known = rows.dim() == 1 and rows.numel() > 0 and rows.dtype in (torch.int32, torch.int64)
        if not known or not ((rows >= 0) & (rows < self.batch)).all():
            raise ValueError(f"rows={rows.tolist()} must be a list of rows below {self.batch}")
        self._next_layer = None
        self._select(rows)

    @abstractmethod
    def _select(self, rows: Tensor) -> None: ...

    def reorder(self, rows: Tensor) -> None:
        """:meth:`select` as beam search needs it: the number of ``rows`` (B,) stays. Raises
        ``ValueError`` for another number."""
        if self.batch is not None and rows.shape != (self.batch,):
            raise ValueError(f"rows={rows.tolist()} must name {self.batch} rows")
        self.select(rows)

    def repeat(self, times: int) -> None:
        """Every row ``times`` times, side by side: several continuations of one prompt.

        Raises ``ValueError`` for ``times`` below 1.
        """
        if times < 1:
            raise ValueError(f"times={times} must be at least 1")
        self.select(torch.arange(self.batch or 0).repeat_interleave(times))
