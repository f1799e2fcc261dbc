"""A cache that keeps: a pass from its plan to its end, and what can be done between two passes.

``see`` makes a plan and changes nothing that is held. Every layer follows the plan. With the last
layer the pass is complete, and only then do the new tokens count: a pass that fails half-way leaves
the cache as it was. Where keys and values lie, and what a plan is, the kinds of cache say.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import Cache, check_different, place
from lm_from_scratch.limits import Count, require


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
    """

    dense_length: int | None

    def __init__(self, n_layer: int) -> None:
        require(Count, n_layer=n_layer)
        self.layers = [Layer(self, index) for index in range(n_layer)]
        self._pass: tuple[Any, int] | None = None  # its plan, and the layer that is next

    # ---------------------------------------------------------------------------- a forward pass

    @torch.inference_mode(False)  # what it notes of positions can be changed later, in any mode
    def see(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        windows: Sequence[int | None] = (None,),
        *,
        siblings: bool = False,
    ) -> list[Visibility]:
        """Which keys the new tokens ``x`` (B, T, ...) at ``positions`` (B, T) see in layers with
        these ``windows``: those held, and one another. A pass begins.

        Raises ``ValueError`` for ``documents`` (B, T): what is held has none.
        """
        if len(windows) != len(self.layers):
            raise ValueError(f"the cache has {len(self.layers)} layers, the model {len(windows)}")
        for layer, (sees, keeps) in enumerate(zip(windows, self.windows, strict=True)):
            if keeps is not None and (sees is None or sees > keeps):
                keys = "all keys" if sees is None else f"{sees} keys"
                raise ValueError(f"layer {layer} sees {keys}, the cache keeps window={keeps}")
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
        if positions is not None and x.shape[1] > 1 and not siblings:
            check_different(positions, "each document has a row of its own")
        plan, seen = self._plan(new, x.shape[0], dense=positions is None, windows=windows)
        self._begin(plan)
        return seen

    def _begin(self, plan: Any) -> None:
        """From now on the layers follow this plan; a pass that was not completed is over."""
        self._pass = plan, 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What :meth:`Layer.update` does with k and v (B, H, T, D), for the layer of that number.
        Raises ``ValueError`` out of turn, for tensors with gradients, and for k and v that do not
        agree."""
        plan, turn = self._pass or (None, None)
        if layer != turn:
            wanted = "see" if turn is None else f"layer {turn}"
            raise ValueError(
                f"layer {layer} was updated, but {wanted} is next: a pass calls `see` once, and "
                "then updates every layer in order"
            )
        if (k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
            raise ValueError("a cache keeps no gradients: call the model under torch.no_grad()")
        if k.dtype != v.dtype or (k.shape != v.shape and k.shape[:3] != v.shape[:3]):
            raise ValueError(
                f"the keys are {tuple(k.shape)} in {k.dtype}, the values {tuple(v.shape)} in "
                f"{v.dtype}: they must agree"
            )
        seen = self._store(plan, layer, k, v)
        self._pass = plan, layer + 1
        if layer + 1 == len(self.layers):
            self._pass = None
            self._commit(plan)
        return seen

    @abstractmethod
    def _plan(
        self, new: Tensor, batch: int, dense: bool, windows: Sequence[int | None]
    ) -> tuple[Any, list[Visibility]]:
        """Where tokens at the positions ``new`` (B or 1, T) will be kept, in a form of the
        subclass's own, and what each layer will see. What is held already does not change."""

    @abstractmethod
    def _store(self, plan: Any, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new keys and values of a layer; return those that the queries may see."""

    @abstractmethod
    def _commit(self, plan: Any) -> None:
        """Every layer has been updated: from now on the new tokens are held."""

    def __getitem__(self, layer: int) -> Layer:
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer {layer} is not below the cache's {len(self.layers)} layers")
        return self.layers[layer]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    # ------------------------------------------------------------------------------ between them

    @property
    def windows(self) -> list[int | None]:
        """How many keys before a new token each layer keeps for it, its own included; ``None`` for
        all of them."""
        return [None] * len(self.layers)

    @property
    def slack(self) -> int | None:
        """How many tokens ``crop`` can always take back; ``None`` for all of them."""
        return None

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

        A number for all rows, or a tensor (B,) with one for each. A negative number counts from the
        end of each row: -2 takes back two tokens. What follows is as if these
        tokens had never been fed.
        """
        if type(length) is int and length < 0:
            length += self.lengths if self.dense_length is None else self.dense_length
        self.check_crop(length)
        self._pass = None  # one that has begun is over
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
        """Keep the given ``rows`` (N,), in that order; one may stand there twice."""
        if self.batch is None:
            raise ValueError("the cache is empty: it has no rows to select")
        rows = torch.as_tensor(rows)
        known = rows.dim() == 1 and rows.numel() > 0 and rows.dtype in (torch.int32, torch.int64)
        if not known or not ((rows >= 0) & (rows < self.batch)).all():
            raise ValueError(f"rows={rows.tolist()} must be a list of rows below {self.batch}")
        self._pass = None
        self._select(rows)

    @abstractmethod
    def _select(self, rows: Tensor) -> None: ...

    def reorder(self, rows: Tensor) -> None:
        """:meth:`select` as beam search needs it: the number of ``rows`` (B,) stays."""
        rows = torch.as_tensor(rows)
        if self.batch is not None and rows.shape != (self.batch,):
            raise ValueError(f"rows={rows.tolist()} must name {self.batch} rows")
        self.select(rows)

    def repeat(self, times: int) -> None:
        """Every row ``times`` times, side by side: several continuations of one prompt."""
        require(Count, times=times)
        self.select(torch.arange(self.batch or 0).repeat_interleave(times))
