"""A cache that keeps: a pass from its plan to its end, and what can be done between two passes.

``see`` makes a plan and changes nothing that is held. Every layer follows the plan. With the last
layer the pass is complete, and only then do the new tokens count: a pass that fails half-way leaves
the cache as it was. Where keys and values lie, and what a plan is, the kinds of cache say.

A recurrent layer keeps a *state* in their place: tensors of one size, however long the text is. A
layer that pools older keys keeps one beside them, and of it a size that was 0 may grow. All kinds
hold states here, in the same way. A state is the sum of everything that was read, and a sum does
not say what its terms were: rows can be chosen and repeated, but no token can be taken back.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import Cache, check_different, place
from lm_from_scratch.limits import Count, is_integer, require, shown


class Layer:
    """One layer of a cache, as its attention or its recurrence sees it."""

    def __init__(self, cache: "KVCache", index: int) -> None:
        self.cache, self.index = cache, index

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Hand over the new keys k and values v (B, H, T, D); get all that the queries may see.

        The result may be a view of the cache: do not write into it.
        """
        return self.cache.update(self.index, k, v)

    def state(self, *initial: Tensor) -> tuple[Tensor, ...]:
        """The tensors (B, ...) after the tokens so far, or the ``initial`` ones. They are those of
        the cache: do not write into them."""
        return self.cache.state(self.index, *initial)

    def keep(self, *state: Tensor) -> None:
        """Hand over the tensors (B, ...) after the new tokens."""
        self.cache.keep(self.index, *state)

    def note(self, *state: Tensor) -> None:
        """Hand over the tensors (B, ...) after the new tokens, before the keys."""
        self.cache.note(self.index, *state)


def _continues(held: Tensor, initial: Tensor) -> bool:
    """Whether a state can have become the one that is held: a size of 0 may grow."""
    if held.dtype != initial.dtype or held.dim() != initial.dim():
        return False
    return all(size in (0, now) for size, now in zip(initial.shape, held.shape, strict=True))


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
        self.states: dict[int, tuple[Tensor, ...]] = {}  # (B, ...) of the recurrent layers
        self._new_states: dict[int, tuple[Tensor, ...]] = {}  # which wait for the pass to end

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
        self._new_states = {}

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What :meth:`Layer.update` does with k and v (B, H, T, D), for the layer of that number.
        Raises ``ValueError`` out of turn, for tensors with gradients, and for k and v that do not
        agree."""
        plan = self._check_turn(layer, k, v)
        if layer in self.states and layer not in self._new_states:
            raise ValueError(f"layer {layer} has keys, but the cache holds a state for it")
        if k.dtype != v.dtype or (k.shape != v.shape and k.shape[:3] != v.shape[:3]):
            raise ValueError(
                f"the keys are {tuple(k.shape)} in {k.dtype}, the values {tuple(v.shape)} in "
                f"{v.dtype}: they must agree"
            )
        seen = self._store(plan, layer, k, v)
        self._end_turn(plan, layer)
        return seen

    def state(self, layer: int, *initial: Tensor) -> tuple[Tensor, ...]:
        """What :meth:`Layer.state` does with ``initial`` tensors (B, ...). Raises ``ValueError``
        out of turn, where tokens are held and no state, and for tensors unlike those held."""
        self._check_turn(layer)
        held = self.states.get(layer)
        if held is None:
            if self.batch is not None:
                raise ValueError(
                    f"layer {layer} needs the state after {self.length} tokens, and the "
                    f"{type(self).__name__} holds none"
                )
            return initial
        if len(held) != len(initial) or not all(map(_continues, held, initial)):
            have, want = ([(tuple(x.shape), x.dtype) for x in xs] for xs in (held, initial))
            raise ValueError(f"layer {layer} keeps a state of {want}, the cache holds {have}")
        return held

    def keep(self, layer: int, *state: Tensor) -> None:
        """What :meth:`Layer.keep` does with tensors (B, ...). Raises ``ValueError`` out of turn,
        for tensors with gradients, and for none."""
        self.note(layer, *state)
        self._end_turn(self._check_turn(layer), layer)

    def note(self, layer: int, *state: Tensor) -> None:
        """What :meth:`Layer.note` does with tensors (B, ...). Raises ``ValueError`` as
        :meth:`keep`."""
        self._check_turn(layer, *state)
        if not state:
            raise ValueError(f"layer {layer} handed over no tensors as its state")
        self._new_states[layer] = state

    def _check_turn(self, layer: int, *new: Tensor) -> Any:
        """The plan of the pass. Raises ``ValueError`` if another layer is next, and for ``new``
        tensors with gradients."""
        plan, turn = self._pass or (None, None)
        if layer != turn:
            wanted = "see" if turn is None else f"layer {turn}"
            raise ValueError(
                f"layer {layer} was updated, but {wanted} is next: a pass calls `see` once, and "
                "then updates every layer in order"
            )
        if torch.is_grad_enabled() and any(x.requires_grad for x in new):
            raise ValueError("a cache keeps no gradients: call the model under torch.no_grad()")
        return plan

    def _end_turn(self, plan: Any, layer: int) -> None:
        """The next layer has its turn; after the last one the pass is complete."""
        self._pass = plan, layer + 1
        if layer + 1 == len(self.layers):
            self._pass = None
            self._commit(plan)
            self.states, self._new_states = self.states | self._new_states, {}

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
        """How many tokens ``crop`` can always take back; ``None`` for all of them, 0 where a layer
        keeps a state."""
        return 0 if self.states else None

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
        """Bytes held for keys, values and states, used or not."""

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states alone: as many after any number of tokens."""
        return sum(x.nbytes for state in self.states.values() for x in state)

    def contents(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a layer that is not empty holds: keys and values (B, Hkv, S, D), in the order in
        which they lie there, and the position of each, (B, S); -1 where nothing is. Raises
        ``ValueError`` for a layer that there is not, and where it holds no keys."""
        if not is_integer(layer, 0) or layer >= len(self.layers):
            raise ValueError(f"layer={shown(layer)} is not in 0 ... {len(self.layers) - 1}")
        if self.batch is None or layer in self.states:
            what = "keeps a state" if layer in self.states else "is empty"
            raise ValueError(f"layer {layer} of the cache {what}: it holds no keys")
        return self._contents(layer)

    @abstractmethod
    def _contents(self, layer: int) -> tuple[Tensor, Tensor, Tensor]: ...

    def reset(self) -> None:
        """Forget all tokens."""
        self._pass = None
        self.states, self._new_states = {}, {}

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
            if not torch.as_tensor(length).any():
                self.states = {}
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
        if self.states:
            ends = torch.as_tensor(length, device=self.lengths.device)
            if ends.any() and not (ends >= self.lengths).all():
                raise ValueError(
                    f"length={ends.tolist()} takes tokens back, and a state cannot go back: the "
                    f"cache holds {self.lengths.tolist()} tokens, and can forget all or none"
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
        self.states = {n: tuple(x[rows] for x in state) for n, state in self.states.items()}

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
