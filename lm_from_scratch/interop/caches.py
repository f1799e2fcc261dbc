"""Caches in other forms: tuples of tensors, arrays of other libraries, the caches of
``transformers``. (:mod:`~lm_from_scratch.interop.cache_file` writes one to a file.)

The *legacy* form that other code exchanges is a tuple with a pair for each layer: keys and values
(B, Hkv, S, D) in the order of their positions. A row that holds fewer keys than others is padded on
the left, with zeros. The positions (B, S) say which key is which, -1 for padding, so that
``positions >= 0`` is the mask. A layer that slides may hold fewer keys, S' < S; they belong to the
last S' columns of the positions. A key that it lacks there is zero, and too old for its window.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import PADDING
from lm_from_scratch.cache.buffer import BufferCache, Pass
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import Cache, check_integers
from lm_from_scratch.cache.kv import KVCache
from lm_from_scratch.cache.slots import cache_for


def to_legacy(cache: Cache) -> tuple[tuple[tuple[Tensor, Tensor], ...], Tensor]:
    """The keys and values of every layer, and their positions (B, S).

    They are copies, contiguous, and decoded where the cache is quantised. A sliding cache gives
    what it still holds.
    """
    if not isinstance(cache, KVCache) or cache.batch is None:
        raise ValueError(f"the {type(cache).__name__} is empty: there is nothing to convert")
    check_no_states(cache)
    layers = [_in_order(*cache.contents(layer)) for layer in range(len(cache.layers))]
    positions = max((places for _, _, places in layers), key=lambda places: places.shape[1])
    pairs = []
    for k, v, places in layers:
        held = (places >= 0) & (places == positions[:, -places.shape[1] :])  # (B, S')
        hidden = ~held[:, None, :, None]
        pairs.append((k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)))
    return tuple(pairs), positions


def check_no_states(cache: Cache) -> None:
    """Raises ``ValueError`` for a cache of a recurrent model."""
    if isinstance(cache, KVCache) and cache.states:
        raise ValueError(
            f"the {type(cache).__name__} holds a state in layers {list(cache.states)}: only keys "
            "and values can be taken elsewhere"
        )


def _in_order(k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values (B, Hkv, S, D) and positions (B, S) in the order of the positions, padding
    first, without the columns in which every row is padding."""
    longest = int((positions >= 0).sum(dim=1).max())
    order = positions.argsort(dim=1, stable=True)[:, -longest:]
    columns = order[:, None, :, None]  # (B, 1, S, 1)
    return k.take_along_dim(columns, 2), v.take_along_dim(columns, 2), positions.gather(1, order)


def from_legacy(
    pairs: Sequence[Sequence[Tensor]],
    positions: Tensor | None = None,
    into: KVCache | None = None,
) -> KVCache:
    """A cache that holds such pairs: a new :class:`~lm_from_scratch.cache.growing.GrowingCache`, or
    ``into``, any empty cache.

    ``positions`` (B, S) are those of the layers with the most keys; without them, 0, ..., S - 1.
    Where all rows of all layers hold just these, the cache goes on without positions.
    """
    cache = GrowingCache(len(pairs)) if into is None else into
    if len(pairs) != len(cache.layers) or cache.batch is not None:
        raise ValueError(
            f"there are {len(pairs)} pairs for a cache of {len(cache.layers)} layers that holds "
            f"{cache.batch or 0} rows; it must be empty, with a layer for each pair"
        )
    widest = max((k for k, _ in pairs), key=lambda k: k.shape[2] if k.dim() == 4 else 0)
    for number, (k, _) in enumerate(pairs):  # what else a pair must be, `update` says
        if k.dim() != 4 or k.shape[0] != widest.shape[0]:
            raise ValueError(
                f"layer {number} has keys of shape {tuple(k.shape)}; they must be (batch, heads, "
                f"keys, D), and the batch {widest.shape[0]}"
            )
        if not k.is_floating_point():
            raise ValueError(f"layer {number} has keys of {k.dtype}; they must be floating point")
    B, _, S, _ = widest.shape
    counted = torch.arange(S, device=widest.device).expand(B, S)
    positions = counted if positions is None else positions.to(widest.device)
    check_integers("positions", positions, counted)
    positions = positions.long()
    before = positions.cummax(dim=1).values[:, :-1]
    if not ((positions[:, 1:] > before) | (positions[:, 1:] == PADDING)).all():
        raise ValueError(
            "positions must grow along each row, apart from -1 for padding; positions_from_mask "
            "makes them of a mask"
        )
    if all(k.shape[2] == S for k, _ in pairs):
        dense = torch.equal(positions, counted)
        cache.see(counted, None if dense else positions, windows=cache.windows)
    else:
        _begin_unequal(cache, [k.shape[2] for k, _ in pairs], positions)
    for layer, (k, v) in zip(cache.layers, pairs, strict=True):
        layer.update(k, v)
    return cache


def _begin_unequal(cache: KVCache, sizes: Sequence[int], positions: Tensor) -> None:
    """A pass in which each layer gets so many keys, those of the last ``positions`` (B, S)."""
    owner = cache.owner if isinstance(cache, BufferCache) else [0] * len(sizes)
    of_track = dict(zip(owner, sizes, strict=True))
    if not isinstance(cache, BufferCache) or [of_track[number] for number in owner] != list(sizes):
        raise ValueError(
            f"the layers of a {type(cache).__name__} cannot hold {list(sizes)} keys; "
            "cache_for(model.config.windows) makes a cache that can"
        )
    plans = [
        track.plan(positions[:, positions.shape[1] - of_track[number] :], None, ())
        for number, track in enumerate(cache.tracks)
    ]
    cache._begin(Pass(plans, empty=True, dense_length=None))


#: The orders of axes that libraries use (B rows, H heads, S keys, D features), as permutations of
#: ours, the first. Each undoes itself.
ORDERS = {"BHSD": (0, 1, 2, 3), "BSHD": (0, 2, 1, 3)}


def to_arrays(
    cache: Cache, give: Callable[[Tensor], Any], order: str = "BHSD"
) -> tuple[tuple[tuple[Any, Any], ...], Any]:
    """What :func:`to_legacy` says, as arrays of another library: pairs, and positions (B, S).

    ``give`` is the library's own function that takes a tensor by DLPack: ``numpy.from_dlpack``,
    ``jax.dlpack.from_dlpack``. Where it lacks the dtype, let it take another one:
    ``lambda x: numpy.from_dlpack(x.float())``.

    Keys and values are brought into ``order`` (one of :data:`ORDERS`) and laid out in it *before*
    they are handed over. A library that takes pointer and shape, and forgets the strides, would
    read a permuted view in the old order, without an error.
    """
    axes = _axes(order)
    pairs, positions = to_legacy(cache)
    arrays = tuple(
        (give(k.permute(axes).contiguous()), give(v.permute(axes).contiguous())) for k, v in pairs
    )
    return arrays, give(positions)


def from_arrays(
    pairs: Sequence[Sequence[Any]],
    positions: Any = None,
    order: str = "BHSD",
    into: KVCache | None = None,
) -> KVCache:
    """The way back: a cache with copies of such arrays, of any library that speaks DLPack, made as
    :func:`from_legacy` makes it. Raises ``ValueError`` as it does, and for what is no array."""
    axes = _axes(order)
    back = []
    for number, pair in enumerate(pairs):
        k, v = (_tensor(f"layer {number}", x) for x in pair)
        if k.dim() != 4 or v.dim() != 4:
            raise ValueError(f"layer {number} has keys of shape {tuple(k.shape)}, not {order}")
        back.append((k.permute(axes).contiguous(), v.permute(axes).contiguous()))
    return from_legacy(back, None if positions is None else _tensor("positions", positions), into)


def _axes(order: str) -> tuple[int, ...]:
    if order not in list(ORDERS):
        raise ValueError(f"order={order!r} is not one of {list(ORDERS)}")
    return ORDERS[order]


def _tensor(name: str, array: Any) -> Tensor:
    """A copy of an array, by DLPack alone: of an array that is a buffer as well, ``torch.asarray``
    takes the bytes, of JAX in another dtype."""
    if isinstance(array, Tensor):
        return array.detach().clone()
    if not hasattr(array, "__dlpack__"):
        raise ValueError(f"{name} holds a {type(array).__name__}, which does not speak DLPack")
    if any(stride < 0 for stride in getattr(array, "strides", None) or ()):
        array = array.copy()  # torch would end the program
    try:
        return torch.from_dlpack(array).clone()
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise ValueError(f"{name} holds a {type(array).__name__}: {error}") from error


def to_transformers(cache: Cache) -> Any:
    """A ``transformers.DynamicCache`` with copies of the keys and values.

    It counts columns, where ours counts positions; the rows stand in it with padding on the left.
    To go on, the model needs ``position_ids``, and an ``attention_mask`` over ``cache.length``
    earlier columns and the new ones, 0 in the first ``cache.length - cache.lengths`` of each row.
    Raises ``ValueError`` for an empty cache, and for rows with gaps where a layer slides.
    """
    from transformers import DynamicCache

    pairs, positions = to_legacy(cache)
    assert isinstance(cache, KVCache)
    windows = cache.windows
    length, S = cache.length, positions.shape[1]
    ends = cache.lengths.to(positions.device)[:, None]  # (B, 1)
    columns = torch.arange(-S, 0, device=positions.device) + ends
    gaps = bool(((positions >= 0) & (positions != columns)).any())
    if 1 in windows or (any(windows) and gaps):
        raise ValueError(
            "layers of transformers that slide need a window of at least 2, and rows without gaps; "
            f"the windows are {windows}, the positions {positions.tolist()}"
        )
    sizes = [torch.tensor(window) if window else None for window in windows]
    theirs: Any = DynamicCache([(*pair, size) for pair, size in zip(pairs, sizes, strict=True)])
    for layer, window in zip(theirs.layers, windows, strict=True):
        if window:
            layer.cumulative_length = length  # with what it does not hold any more
    return theirs


def from_transformers(
    theirs: Any, *, positions: Tensor | None = None, into: KVCache | None = None
) -> KVCache:
    """A cache with the keys and values of a ``DynamicCache`` or ``StaticCache`` of transformers.

    ``positions`` (B, ``theirs.get_seq_length()``) are those of all columns that it was fed; without
    them no column is padding. The result is what
    :func:`~lm_from_scratch.cache.slots.cache_for` makes for its windows, or ``into``. Where a layer
    has lost keys, it goes on with positions: ``cache.lengths``.
    """
    from transformers import cache_utils as hf

    sizes: dict[type, str | None] = {  # the attribute that holds the window
        hf.DynamicLayer: None,
        hf.StaticLayer: None,
        hf.DynamicSlidingWindowLayer: "sliding_window",
        hf.StaticSlidingWindowLayer: "max_cache_len",
    }
    pairs, windows, length = [], [], 0
    for number, layer in enumerate(getattr(theirs, "layers", [])):
        fed = int(layer.get_seq_length()) if type(layer) in sizes else 0
        if not fed:
            raise ValueError(f"layer {number}, {layer}, is empty or of a kind that is not known")
        length = max(length, fed)
        pairs.append((layer.keys[:, :, :fed], layer.values[:, :, :fed]))  # no unused slots
        size = sizes[type(layer)]
        windows.append(getattr(layer, size) if size else None)
    if not pairs:
        raise ValueError(f"the {type(theirs).__name__} has no layers")
    S = max(k.shape[2] for k, _ in pairs)
    B, device = len(pairs[0][0]), pairs[0][0].device
    counted = torch.arange(length, device=device).expand(B, length)
    positions = counted if positions is None else positions
    check_integers("positions", positions, counted)
    into = cache_for(windows) if into is None else into
    return from_legacy(pairs, positions=positions[:, length - S :], into=into)
