"""Caches in other forms: tuples of tensors, arrays of other libraries, the caches of
``transformers``, and files.

The *legacy* form that other code exchanges is a tuple with a pair for each layer: keys and values
(B, Hkv, S, D) in the order of their positions. A row that holds fewer keys than others is padded on
the left, with zeros. The positions (B, S) say which key is which, -1 for padding, so that
``positions >= 0`` is the mask. A layer that slides may hold fewer keys, S' < S; they belong to the
last S' columns of the positions. A key that it lacks there is zero, and too old for its window.

A file is one safetensors file: the tensors as the codec keeps them, and JSON that says what they
are. Nothing is unpickled, and everything is checked before a cache is returned.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lm_from_scratch.attention.visibility import PADDING
from lm_from_scratch.cache.buffer import BufferCache, Pass, Track
from lm_from_scratch.cache.codec import EXACT, Exact, Quantized
from lm_from_scratch.cache.growing import GrowingCache, GrowingTrack
from lm_from_scratch.cache.interface import Cache, check_positions
from lm_from_scratch.cache.kv import KVCache
from lm_from_scratch.cache.paged import BlockPool, PagedCache, Row
from lm_from_scratch.cache.slots import (
    SlidingCache,
    SlidingTrack,
    SlotTrack,
    StaticCache,
    StaticTrack,
    cache_for,
)
from lm_from_scratch.checkpoint.folders import save_file

# -------------------------------------------------------------------------------------- in memory


def to_legacy(cache: Cache) -> tuple[tuple[tuple[Tensor, Tensor], ...], Tensor]:
    """The keys and values of every layer, and their positions (B, S).

    They are copies, contiguous, and decoded where the cache is quantised. A sliding cache gives
    what it still holds.
    """
    if not isinstance(cache, KVCache) or cache.batch is None:
        raise ValueError(f"the {type(cache).__name__} is empty: there is nothing to convert")
    _check_no_states(cache)
    layers = [_in_order(*cache.contents(layer)) for layer in range(len(cache.layers))]
    positions = max((places for _, _, places in layers), key=lambda places: places.shape[1])
    pairs = []
    for k, v, places in layers:
        held = (places >= 0) & (places == positions[:, -places.shape[1] :])  # (B, S')
        hidden = ~held[:, None, :, None]
        pairs.append((k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)))
    return tuple(pairs), positions


def _check_no_states(cache: Cache) -> None:
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
    check_positions(positions, counted)
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
    if not hasattr(array, "__dlpack__"):
        raise ValueError(f"{name} holds a {type(array).__name__}, which does not speak DLPack")
    try:
        return torch.asarray(array, copy=True)
    except (TypeError, RuntimeError) as error:
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
    check_positions(positions, counted)
    into = cache_for(windows) if into is None else into
    return from_legacy(pairs, positions=positions[:, length - S :], into=into)


# ------------------------------------------------------------------------------------------ on disk

#: The name under which the file's metadata hold the description.
FORMAT = "lm_from_scratch cache, version 1"

#: The kinds of track, and the numbers that make one.
TRACKS: dict[str, tuple[type[Track], tuple[str, ...]]] = {
    "growing": (GrowingTrack, ("reserve",)),
    "static": (StaticTrack, ("capacity",)),
    "sliding": (SlidingTrack, ("window", "slack")),
}
#: The caches with one track, made from its numbers.
KINDS: dict[str, Any] = {
    "GrowingCache": GrowingCache,
    "StaticCache": StaticCache,
    "SlidingCache": SlidingCache,
}


def save_cache(cache: KVCache, path: str | Path) -> None:
    """Write a cache of any kind to one file, of a pool only the blocks that its rows hold.

    The file gets its name when it is complete: a program that is killed leaves the old one. Raises
    ``ValueError`` for a kind or a codec that is not of this package, and for a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a file")
    _check_no_states(cache)
    tensors: dict[str, Tensor] = {}
    about = json.dumps(_describe(cache, tensors))
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {FORMAT: about})


def load_cache(
    path: str | Path, device: torch.device | str = "cpu", pool: BlockPool | None = None
) -> KVCache:
    """A cache from a file that :func:`save_cache` wrote.

    The rows of a paged cache go to ``pool``, or to a new one as large as the old. Raises
    ``ValueError``, with the reason, for a file that is damaged, or that describes what cannot be.
    """
    try:
        with safe_open(path, "pt", str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        cache = _build(json.loads(metadata[FORMAT]), tensors, pool)
        if tensors:
            cache.reset()
            raise ValueError(f"it has tensors that belong to nothing: {sorted(tensors)[:3]}")
        return cache
    except (
        SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError
    ) as error:  # fmt: skip
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is no cache that can be loaded: {reason}") from error


def _describe(cache: Cache, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What JSON can say of a cache; its tensors go to ``tensors``."""
    kind = type(cache).__name__
    if isinstance(cache, PagedCache):
        pool, P = cache.pool, cache.pool.block_size
        tables = [row.table[: -(-row.length // P)] for row in cache.rows]
        number = {block: i for i, block in enumerate({b: 0 for table in tables for b in table})}
        slots = pool.slots(Row(list(number), len(number) * P))
        # the end of a block may hold what others have left there
        own = torch.cat([slots[:0], *(pool.slots(row) for row in cache.rows)])
        kept = torch.isin(slots, own)[:, None, None]
        tensors["keys"] = pool.keys[:, slots].where(kept, 0)
        tensors["values"] = pool.values[:, slots].where(kept, 0)
        return {
            "kind": kind,
            "n_blocks": len(pool.users),
            "block_size": P,
            "widths": [pool.keys.shape[-1], pool.values.shape[-1]],
            "tables": [[number[block] for block in table] for table in tables],
            "lengths": [row.length for row in cache.rows],
            "fixed": cache._fixed,
        }
    if type(cache) not in (BufferCache, *KINDS.values()):
        raise ValueError(f"a {kind} cannot be saved")
    assert isinstance(cache, BufferCache)
    if not isinstance(cache.codec, Exact | Quantized):
        raise ValueError(f"a cache with the codec {cache.codec} cannot be saved")
    tracks = []
    for track in cache.tracks:
        known = [name for name, (make, _) in TRACKS.items() if type(track) is make]
        if not known:
            raise ValueError(f"a cache with a {type(track).__name__} cannot be saved")
        numbers = {number: getattr(track, number) for number in TRACKS[known[0]][1]}
        tracks.append({"kind": known[0], **numbers})
    codec = vars(cache.codec)
    about: dict[str, Any] = {"kind": kind, "owner": cache.owner, "tracks": tracks, "codec": codec}
    if cache.batch is None:
        return about
    about |= {"dense_length": cache.dense_length, "sizes": []}
    for i, track in enumerate(cache.tracks):
        assert track.positions is not None
        tensors[f"{i}.positions"] = track.positions
    for i, buffer in enumerate((*cache.keys, *cache.values)):
        assert buffer.held is not None
        B, H, D, dtype = buffer.held
        about["sizes"].append([B, H, buffer.slots, D, str(dtype).removeprefix("torch.")])
        columns = tensors[f"{cache.owner[i % len(cache.owner)]}.positions"].shape[1]
        for j, part in enumerate(buffer.parts):
            tensors[f"{i}.{j}"] = part[:, :, :columns]
    return about


def _build(about: dict[str, Any], tensors: dict[str, Tensor], pool: BlockPool | None) -> KVCache:
    """What :func:`_describe` described. It takes its tensors out of ``tensors``."""
    kind = about["kind"]
    if kind == "PagedCache":
        return _build_paged(about, tensors.pop("keys"), tensors.pop("values"), pool)
    if kind != "BufferCache" and kind not in KINDS:
        raise ValueError(f"the kind {kind!r} is not known")
    if pool is not None:
        raise ValueError(f"a {kind} has no place in a pool")
    owner, sizes = about["owner"], about.get("sizes")  # of the keys of all layers, then the values
    if sizes is not None and len(sizes) != 2 * len(owner):
        raise ValueError(f"owner={owner}, but there are {len(sizes)} sizes")
    tracks, numbers = [], {}
    for track in about["tracks"]:
        make, names = TRACKS[track["kind"]]
        numbers = {name: track[name] for name in names}
        if any(type(number) is not int for number in numbers.values()):
            raise ValueError(f"{numbers} must be integers")
        tracks.append(make(**numbers))
    codec = Quantized(**about["codec"]) if about["codec"] else EXACT
    cache = BufferCache(tracks, owner, codec)
    if kind in KINDS:  # the numbers are those of its only track
        cache = KINDS[kind](n_layer=len(owner), codec=codec, **numbers)
    if sizes is None:
        return cache
    length, batch = about["dense_length"], sizes[0][0]
    for number, track in enumerate(cache.tracks):
        positions = tensors.pop(f"{number}.positions")
        _check_table(track, f"{number}.positions", positions, batch, length)
        track.positions = positions.clone()
    cache.dense_length = length
    for i, (buffer, (_, H, slots, D, dtype)) in enumerate(
        zip([*cache.keys, *cache.values], sizes, strict=True)
    ):
        positions = cache.tracks[owner[i % len(owner)]].positions
        like = torch.zeros(batch, H, 1, D, dtype=getattr(torch, dtype), device=positions.device)
        columns = positions.shape[1]
        buffer.allocate(like, max(columns, slots))
        for j, part in enumerate(buffer.parts):
            stored, room = tensors.pop(f"{i}.{j}"), part[:, :, :columns]
            _expect(f"{i}.{j}", stored, room.shape, room.dtype)
            room.copy_(stored)
    return cache


def _check_table(
    track: Track, name: str, positions: Tensor, batch: int, length: int | None
) -> None:
    """Raises ``ValueError`` for ``positions`` (B, slots) that no track of that kind makes."""
    columns = track.slots + 1 if isinstance(track, SlotTrack) else positions.shape[-1]
    _expect(name, positions, (1 if len(positions) == 1 else batch, columns), torch.long)
    last = int(positions.max())
    if last < 0 or (length is not None and (len(positions), length) != (1, last + 1)):
        raise ValueError(f"positions up to {last} do not fit to dense_length={length}")
    places = torch.arange(columns, device=positions.device)
    held = positions >= 0
    if isinstance(track, SlidingTrack):
        wrong = held & (positions % track.slots != places)
    elif isinstance(track, SlotTrack):
        wrong = held & (positions != places)
    else:  # where rows are alike, nothing is padding
        wrong = (positions != places) & (length is not None)
    wrong |= positions < PADDING
    if isinstance(track, SlotTrack):
        wrong |= held & (places == track.slots)  # the bin
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"slot {column} of row {row} holds position {int(positions[row, column])}, which a "
            f"{type(track).__name__} never keeps there"
        )


def _expect(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tensor.shape != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, not {dtype} of shape "
            f"{tuple(shape)}"
        )


def _build_paged(
    about: dict[str, Any], keys: Tensor, values: Tensor, pool: BlockPool | None
) -> PagedCache:
    """Rows in ``pool``, or in a new one; the blocks that they shared are shared again."""
    P, tables, lengths, fixed = (about[k] for k in ("block_size", "tables", "lengths", "fixed"))
    n_blocks = len({block for table in tables for block in table})
    n_layer, _, H, D = keys.shape
    width, value_width = about.get("widths", (D, D))  # older files: values as wide as keys
    if pool is None:
        pool = BlockPool(
            n_layer, H, width, about["n_blocks"], P, keys.dtype, keys.device, value_width
        )
    for name, new, memory in (("keys", keys, pool.keys), ("values", values, pool.values)):
        shape = (len(memory), n_blocks * pool.block_size, *memory.shape[2:])
        _expect(name, new, shape, memory.dtype)
    for table, length in zip(tables, lengths, strict=True):
        known = length in range(P * n_blocks + 1) and -(-length // P) == len(table)
        if not known or len(set(table) & set(range(n_blocks))) != len(table):
            raise ValueError(f"a row of {length} tokens has the blocks {table} of {n_blocks}")
    if pool.block_size != P or n_blocks > len(pool.free):
        raise ValueError(
            f"{n_blocks} blocks of {P} slots are needed, {len(pool.free)} of {pool.block_size} are "
            "free in the pool"
        )
    blocks = [pool.allocate() for _ in range(n_blocks)]
    slots = pool.slots(Row(blocks, n_blocks * pool.block_size))
    for memory, new in ((pool.keys, keys), (pool.values, values)):
        memory[:, slots] = new.to(memory.device)
    rows = [
        Row([pool.share(blocks[block]) for block in table], int(length))
        for table, length in zip(tables, lengths, strict=True)
    ]
    for block in blocks:
        pool.release(block)  # each row counts itself
    cache = PagedCache(pool, rows)
    cache._fixed = bool(fixed)
    return cache
