"""What a cache is to a model, and the one that keeps nothing.

A forward pass asks its cache two things. ``see`` says which keys the new tokens will see in every
layer, before anything is computed. ``cache[layer].update(k, v)`` hands over a layer's new keys and
values, and returns all that its queries need. A recurrent layer has no keys: it asks for its
``state`` after the tokens so far, and hands over the new one with ``keep``. A layer that pools its
older keys has both: it hands over a state with ``note``, and then its keys. Any object that does
this is a cache: this file is all that models know of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility


class LayerCache(Protocol):
    """One layer of a cache, as its attention or its recurrence sees it."""

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Hand over the new keys k and values v (B, Hkv, T, D); get all that the queries may
        see, (B, Hkv, S, D), in memory that the next layer's may take."""

    def state(self, *initial: Tensor) -> tuple[Tensor, ...]:
        """The tensors (B, ...) of a layer with a state after the tokens so far: the ``initial``
        ones if there are none. A size that is 0 in these may have grown."""

    def keep(self, *state: Tensor) -> None:
        """Hand over the tensors (B, ...) after the new tokens, in the same order."""

    def note(self, *state: Tensor) -> None:
        """The same, for a layer whose keys follow."""


class Cache(ABC):
    """Anything that can be passed to a model as ``cache``."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens in the longest row: where a row that is given no positions goes on."""

    @abstractmethod
    def see(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        windows: Sequence[int | None] = (None,),
        *,
        siblings: bool = False,
    ) -> list[Visibility]:
        """Which keys the new tokens ``x`` (B, T, ...) at ``positions`` (B, T) and ``documents``
        (B, T) see in each layer of a model, whose layers have these ``windows``: those held, and
        one another. Raises ``ValueError`` for tokens that this cache cannot take.

        Tokens of a row at one position would see each other: they are refused, unless they are
        ``siblings``, which a mask keeps apart."""

    @abstractmethod
    def __getitem__(self, layer: int) -> LayerCache:
        """What the attention of that layer is given."""


class NoCache(Cache):
    """Keeps nothing: every forward pass stands alone. The same object serves every layer."""

    length = 0

    def see(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        windows: Sequence[int | None] = (None,),
        *,
        siblings: bool = False,
    ) -> list[Visibility]:
        placed = place(x, positions, start=0)
        if documents is not None:
            if positions is None:
                raise ValueError("documents need positions, which start at 0 in each document")
            check_integers("documents", documents, x)
        if positions is not None and documents is None and not siblings:
            check_different(positions, "documents packed into a row are numbered (documents=)")
        dense = positions is None
        return by_layer(Visibility(placed, placed, documents, documents, dense=dense), windows)

    def __getitem__(self, layer: int) -> "NoCache":
        return self

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (B, H, T, D) as they are."""
        return k, v

    def state(self, *initial: Tensor) -> tuple[Tensor, ...]:
        """The ``initial`` tensors (B, ...): every pass begins anew."""
        return initial

    def keep(self, *state: Tensor) -> None:
        """Nothing is kept of the tensors (B, ...)."""

    def note(self, *state: Tensor) -> None:
        """Nor of these (B, ...)."""


#: What training passes: the one object that keeps nothing.
NO_CACHE = NoCache()


def by_layer(visibility: Visibility, windows: Sequence[int | None]) -> list[Visibility]:
    """The same tokens seen by layers with these ``windows``; layers that are alike share one
    object, and so its mask."""
    within = {window: visibility.within(window) for window in set(windows)}
    return [within[window] for window in windows]


def place(x: Tensor, positions: Tensor | None, start: int) -> Tensor:
    """Positions for the tokens ``x`` (B, T, ...): the ``positions`` (B, T) given, or ``start``,
    ``start + 1``, ... (1, T), since all rows are alike. Raises ``ValueError`` if there is no token,
    or the positions do not fit."""
    B, T = x.shape[:2]
    if B == 0 or T == 0:
        raise ValueError(f"the tokens have shape {(B, T)}: there must be at least one")
    if positions is None:
        return torch.arange(start, start + T, device=x.device)[None]
    check_integers("positions", positions, x)
    return positions.long()


def check_cache(cache: Cache) -> None:
    """Raises ``ValueError`` for what is no cache."""
    if not hasattr(cache, "see"):
        raise ValueError(f"the cache is a {type(cache).__name__}, not one as GrowingCache(n_layer)")


def check_integers(name: str, given: Tensor, x: Tensor) -> None:
    """Raises ``ValueError`` for what is no tensor of integers (B, T), one for each of the tokens
    ``x`` (B, T, ...). A mask of integers cannot be told from positions, and passes."""
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} are a {type(given).__name__}; they must be a tensor (B, T)")
    if given.shape != x.shape[:2]:
        raise ValueError(
            f"{name} have shape {tuple(given.shape)}, the tokens {tuple(x.shape[:2])}; "
            "they must agree"
        )
    if given.dtype.is_floating_point or given.dtype == torch.bool:
        raise ValueError(
            f"{name} have dtype {given.dtype}; they must be integers (of a mask, "
            "positions_from_mask makes positions)"
        )


def check_different(positions: Tensor, documents: str) -> None:
    """Raises ``ValueError`` where two tokens of a row have one of its ``positions`` (B, T): they
    would see each other. ``documents`` says what to do with several documents."""
    ordered = positions.sort(dim=1).values
    again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if known(again.any(), otherwise=0):
        row, column = again.nonzero()[0].tolist()
        raise ValueError(
            f"row {row} has two tokens at position {int(ordered[row, column])}: {documents}; if "
            "these are no positions but a mask, positions_from_mask makes some"
        )


def known(x: Tensor, otherwise: int) -> int:
    """What ``x`` (one number) holds, or another where nobody can look: while a graph is traced, in
    ``vmap``, on the meta device."""
    if torch.compiler.is_compiling():
        return otherwise
    try:
        return int(x)
    except RuntimeError:
        return otherwise
