"""A cache as one safetensors file: the tensors as the codec keeps them, and JSON that says what
they are.

Nothing is unpickled, and everything is checked before a cache is returned.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lm_from_scratch.attention.visibility import PADDING
from lm_from_scratch.cache.buffer import BufferCache, Track
from lm_from_scratch.cache.codec import EXACT, Exact, Quantized
from lm_from_scratch.cache.growing import GrowingCache, GrowingTrack
from lm_from_scratch.cache.interface import Cache
from lm_from_scratch.cache.kv import KVCache
from lm_from_scratch.cache.paged import BlockPool, PagedCache, Row
from lm_from_scratch.cache.slots import (
    SlidingCache,
    SlidingTrack,
    SlotTrack,
    StaticCache,
    StaticTrack,
)
from lm_from_scratch.checkpoint.folders import save_file
from lm_from_scratch.interop.caches import check_no_states

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
    check_no_states(cache)
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
        SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError,
        MemoryError,
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
        is_own = torch.isin(slots, own)[:, None, None]
        tensors["keys"] = pool.keys[:, slots].where(is_own, 0)
        tensors["values"] = pool.values[:, slots].where(is_own, 0)
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
