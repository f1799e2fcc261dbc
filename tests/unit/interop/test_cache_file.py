"""interop.cache_file: another process goes on as if the cache had never been saved."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filled_caches import (
    CASES,
    HISTORIES,
    KINDS,
    MODELS,
    filled,
    go_on_in_ours,
    in_turn,
    paged,
    positions_after,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import token_ids

from lm_from_scratch.cache.codec import Quantized
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.paged import BlockPool, PagedCache, Row
from lm_from_scratch.checkpoint import folders
from lm_from_scratch.interop import cache_file
from lm_from_scratch.interop.cache_file import load_cache, save_cache
from lm_from_scratch.interop.caches import from_legacy, to_legacy

cases = pytest.mark.parametrize(("name", "kind", "history"), in_turn(CASES))


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


GO_ON = """
import sys, torch
sys.path.insert(0, "tests/helpers")
from filled_caches import MODELS
from pathlib import Path
from safetensors.torch import load_file, save_file
from lm_from_scratch.interop.cache_file import load_cache
folder, out = Path(sys.argv[1]), {}
recipe = load_file(folder / "recipe")
with torch.no_grad():
    for file in sorted(folder.glob("*.cache")):
        name = file.name.split(" | ")[0]
        cache, new = load_cache(file), recipe[file.name + " new"]
        place = recipe[file.name + " place"]
        first = MODELS[name](new[:, :1], positions=place[:, :1], cache=cache)
        rest = MODELS[name](new[:, 1:], positions=place[:, 1:], cache=cache)
        out[file.name] = torch.cat([first, rest], 1)
save_file(out, folder / "logits")
"""


@pytest.mark.slow
def test_a_fresh_process_goes_on_as_if_the_cache_had_never_been_saved(tmp_path) -> None:
    """Bitwise, for every kind, model and history."""
    recipe, want = {}, {}
    for name, kind in CASES:
        for history in HISTORIES:
            cache, rows = filled(name, kind, history)
            file = f"{name} | {kind} | {history}.cache"
            save_cache(cache, tmp_path / file)
            new, place = token_ids(len(rows), 4, seed=11), positions_after(rows, 4)
            recipe |= {f"{file} new": new, f"{file} place": place}
            want[file] = go_on_in_ours(MODELS[name], cache, rows, new)
    save_file(recipe, tmp_path / "recipe")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", GO_ON, tmp_path], cwd=root, env=env, check=True)
    logits = load_file(tmp_path / "logits")
    assert len(logits) == len(want) > 80
    for file, value in want.items():
        assert torch.equal(logits[file], value), file


@cases
def test_contents_are_equal_bit_by_bit(name, kind, history, tmp_path) -> None:
    cache, rows = filled(name, kind, history)
    path = tmp_path / "one"
    save_cache(cache, path)
    other = load_cache(path)
    assert type(other) is type(cache) and other.lengths.tolist() == cache.lengths.tolist()
    assert other.dense_length == cache.dense_length and len(other.layers) == len(cache.layers)
    for layer in range(len(cache.layers)):
        for x, y in zip(cache.contents(layer), other.contents(layer), strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y)
    save_cache(other, tmp_path / "two")
    assert path.read_bytes() == (tmp_path / "two").read_bytes()
    # what comes back is a cache of its own that can do all that the first can
    path.write_bytes(b"")
    chosen = torch.tensor([1, 0, 1])
    for each in (cache, other):
        each.select(chosen)
        each.crop(each.lengths - 1)
    rows = [rows[i][:-1] for i in (1, 0, 1)]
    new = token_ids(3, 2, seed=12)
    assert torch.equal(
        go_on_in_ours(MODELS[name], other, rows, new), go_on_in_ours(MODELS[name], cache, rows, new)
    )
    other.reset()
    assert other.length == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_is_kept(dtype, tmp_path) -> None:
    k = torch.randn(2, 3, 5, 8).to(dtype)
    for into in (GrowingCache(1), GrowingCache(1, Quantized(4, group=4))):
        cache = from_legacy([(k, 2 * k)], into=into)
        save_cache(cache, tmp_path / "cache")
        (k_again, v_again), *_ = to_legacy(load_cache(tmp_path / "cache"))[0]
        (k_here, v_here), *_ = to_legacy(cache)[0]
        assert k_again.dtype == dtype
        assert torch.equal(k_again, k_here) and torch.equal(v_again, v_here)


def test_codes_are_stored_and_not_what_they_decode_to(tmp_path) -> None:
    cache, _ = filled("qwen2", "growing, 8 bits", "padded")
    save_cache(cache, tmp_path / "cache")
    tensors = load_file(tmp_path / "cache")
    assert tensors["0.0"].dtype == torch.uint8
    stored = load_cache(tmp_path / "cache").keys[1].parts
    for one, other in zip(cache.keys[1].parts, stored, strict=True):
        assert torch.equal(one[:, :, : other.shape[2]], other)


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_empty_cache_is_saved_with_its_arguments(kind, tmp_path) -> None:
    empty = KINDS[kind](MODELS["qwen2"])
    save_cache(empty, tmp_path / "cache")
    other = load_cache(tmp_path / "cache")
    assert type(other) is type(empty) and other.batch is None
    for name in ("codec", "owner", "windows", "slack"):
        assert getattr(other, name, None) == getattr(empty, name, None)
    for one, track in zip(getattr(other, "tracks", []), getattr(empty, "tracks", []), strict=True):
        assert type(one) is type(track) and vars(one) == vars(track)
    idx = token_ids(2, 6)
    model = MODELS["qwen2, W = 4" if kind == "sliding" else "qwen2"]
    assert torch.equal(model(idx, cache=other), model(idx, cache=empty))
    if kind == "growing":  # the memory that was asked for is there
        assert empty.keys[0].slots == 7
        save_cache(empty, tmp_path / "cache")
        assert load_cache(tmp_path / "cache").nbytes == empty.nbytes


def test_of_a_pool_the_own_blocks_are_saved_and_shared_again(tmp_path) -> None:
    model = MODELS["qwen2"]
    cache = paged(model)
    pool = cache.pool
    pool.keys.fill_(7.0)  # what others have left in the blocks
    pool.values.fill_(7.0)
    for _ in range(3):  # so that the cache's own are not the first ones
        pool.allocate()
    model(token_ids(1, 9), cache=cache)
    cache.repeat(3)
    save_cache(cache, tmp_path / "cache")
    tensors = load_file(tmp_path / "cache")
    assert tensors["keys"].shape == (3, 3 * 4, 2, 8)  # three blocks, held by three rows each
    assert not (tensors["keys"] == 7).any() and not (tensors["values"] == 7).any()
    other = load_cache(tmp_path / "cache")
    assert sorted(other.pool.users) == [0] * 27 + [3] * 3 and len(other.pool.free) == 27
    new = token_ids(3, 5)
    assert torch.equal(model(new, cache=other), model(new, cache=cache))
    # and into a pool where others live
    shared = BlockPool(3, 2, 8, n_blocks=10, block_size=4)
    neighbour = PagedCache(shared)
    model(token_ids(2, 5, seed=3), cache=neighbour)
    before = to_legacy(neighbour)[0]
    third = load_cache(tmp_path / "cache", pool=shared)
    assert third.pool is shared and len(shared.free) == 10 - 4 - 3
    after = to_legacy(neighbour)[0]
    for pair, pair_after in zip(before, after, strict=True):
        assert torch.equal(pair[0], pair_after[0]) and torch.equal(pair[1], pair_after[1])
    with pytest.raises(ValueError, match="3 blocks of 4 slots are needed, 2 of 4"):
        load_cache(tmp_path / "cache", pool=BlockPool(3, 2, 8, n_blocks=2, block_size=4))
    users = list(shared.users)
    for wrong in (
        BlockPool(3, 2, 8, 20, block_size=2),
        BlockPool(2, 2, 8, 20, block_size=4),
        BlockPool(3, 2, 8, 20, block_size=4, dtype=torch.bfloat16),
        BlockPool(3, 2, 8, 2, block_size=4),
    ):
        with pytest.raises(ValueError, match=r"cache.*is no cache that can be loaded"):
            load_cache(tmp_path / "cache", pool=wrong)
        assert len(wrong.free) == len(wrong.users)
    metadata = {cache_file.FORMAT: json.dumps(about(tmp_path / "cache")[0])}
    save_file({**tensors, "more": torch.zeros(1)}, tmp_path / "changed", metadata)
    roomy = BlockPool(3, 2, 8, n_blocks=5, block_size=4)
    with pytest.raises(ValueError, match="belong to nothing"):
        load_cache(tmp_path / "changed", pool=roomy)
    assert len(roomy.free) == 5
    third.reset()
    assert len(shared.free) == 10 - 4 and shared.users != users
    with pytest.raises(ValueError, match="the cache has 3 rows, the tokens 2") as info:
        fixed = PagedCache(shared, [Row(), Row(), Row()])
        save_cache(fixed, tmp_path / "fixed")
        model(token_ids(2, 1), cache=load_cache(tmp_path / "fixed"))
    assert info.value


def about(path: Path) -> tuple[dict, dict]:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()[cache_file.FORMAT]), load_file(path)


def test_damaged_and_foreign_files_are_refused_with_their_name(tmp_path) -> None:
    path = tmp_path / "my.cache"

    def refused(reason: str) -> None:
        with pytest.raises(ValueError, match=reason) as info:
            load_cache(path)
        assert str(path) in str(info.value)

    refused("No such file|not found")
    cache, _ = filled("qwen2, W = 4 in two layers", "by window", "padded")
    save_cache(cache, path)
    whole = path.read_bytes()
    for end in (0, 3, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        refused("is no cache that can be loaded")
    path.write_bytes(whole[:20] + b"\xff\xff" + whole[22:])
    refused("is no cache that can be loaded")
    path.write_bytes(b"\x80\x04\x95 a pickle")
    refused("is no cache that can be loaded")
    save_file({"weight": torch.zeros(3)}, path)
    refused("it lacks 'lm_from_scratch cache, version 1'")
    save_file({"weight": torch.zeros(3)}, path, {"format": "pt"})
    refused("it lacks 'lm_from_scratch cache, version 1'")
    save_file({}, path, {cache_file.FORMAT: "{"})
    refused("Expecting property name")


@pytest.mark.parametrize(
    ("kind", "key", "value", "reason"),
    [
        ("growing", "kind", "ShrinkingCache", "the kind 'ShrinkingCache' is not known"),
        ("growing", "owner", [0, 0], r"owner=\[0, 0\], but there are 6 sizes"),
        ("growing", "owner", 3, "is no cache"),
        ("growing", "tracks", [{"kind": "growing", "reserve": -1}], "reserve=-1"),
        ("growing", "tracks", [{"kind": "growing", "reserve": 1.5}], "must be integers"),
        ("growing", "tracks", [{"kind": "growing"}], "it lacks 'reserve'"),
        ("growing", "tracks", [{"kind": "shrinking"}], "it lacks 'shrinking'"),
        ("growing", "tracks", [{"kind": "static", "capacity": 11}], "is no cache"),
        ("growing", "kind", "StaticCache", "is no cache"),
        ("growing", "sizes", [[3, 2, 10**15, 8, "float32"]] * 6, "is no cache"),
        ("growing", "dense_length", 11, "dense_length=11"),
        ("growing", "codec", {"bits": 3}, "bits=3"),
        ("growing", "codec", {"bits": 8, "group": 8}, "torch.uint8"),
        ("growing", "codec", {"load": 1}, "load"),
        ("growing", "codec", None, None),
        ("growing", "sizes", [[3, 2, 12, 8, "float32"]], "there are 1 sizes"),
        ("growing", "sizes", [[3, 2, 12, 8, "float16"]] * 6, "not torch.float16"),
        ("growing", "sizes", [[3, 2, 12, 8, "load"]] * 6, "is no cache"),
        ("growing", "sizes", [[3, 2, 12, 8, "nothing"]] * 6, "nothing"),
        ("growing", "sizes", [[3, 2, 12, 6, "float32"]] * 6, r"not .* \(3, 2, 11, 6\)"),
        ("growing", "sizes", [[2, 2, 12, 8, "float32"]] * 6, r"positions is .* not .* \(2, 11\)"),
        ("static", "tracks", [{"kind": "static", "capacity": 0}], "capacity=0"),
        ("static", "tracks", [{"kind": "static", "capacity": 29}], r"not .* \(3, 30\)"),
        ("by window", "tracks", [{"kind": "growing", "reserve": None}], "must be integers"),
        ("layered", "owner", [0, 0, 1], r"0.0 is .* of shape .3, 2, 11, 8., not .* .3, 2, 31, 8."),
        ("layered", "owner", [0, 1, 7], "owner"),
        ("layered", "tracks", [], "owner"),
        ("paged", "tables", [[0, 1, 2], [3], [4, 5, 5]], "is no cache"),
        ("paged", "tables", [[0, 1, 2], [3, 4], [4, 5]], "a row of 4 tokens"),
        ("paged", "tables", [[0, 1, 2], [3], [4, 4]], "is no cache"),
        ("paged", "tables", [[0, 1, 2], [3], [4, 9]], "a row of 7 tokens has the blocks .4, 9."),
        ("paged", "tables", [[0, 1, 2], [3]], "keys is"),
        ("paged", "lengths", [11, 4], "is no cache"),
        ("paged", "lengths", [13, 4, 7], "a row of 13 tokens"),
        ("paged", "lengths", ["11", 4, 7], "a row of 11 tokens"),
        ("paged", "lengths", [10.5, 4, 7], "a row of 10.5 tokens"),
        ("paged", "lengths", [11, -1, 7], "a row of -1 tokens"),
        ("paged", "block_size", 5, "keys is"),
        ("paged", "block_size", 0, "block_size=0"),
        ("paged", "n_blocks", 3, "blocks of 4 slots are needed, 3 of 4 are free"),
    ],
)
def test_descriptions_that_cannot_be_are_refused(kind, key, value, reason, tmp_path) -> None:
    cache, path = filled("qwen2", kind, "padded")[0], tmp_path / "my.cache"
    save_cache(cache, path)
    description, tensors = about(path)
    assert key in description
    description[key] = value
    save_file(tensors, path, {cache_file.FORMAT: json.dumps(description)})
    if reason is None:
        load_cache(path)
        return
    with pytest.raises(ValueError, match=reason) as info:
        load_cache(path)
    assert str(path) in str(info.value)
    del description[key]
    save_file(tensors, path, {cache_file.FORMAT: json.dumps(description)})
    with pytest.raises(ValueError, match="is no cache that can be loaded"):
        load_cache(path)


@pytest.mark.parametrize("kind", ["growing", "static", "by window", "layered", "paged"])
def test_tensors_that_do_not_fit_are_refused(kind, tmp_path) -> None:
    cache, path = filled("qwen2, W = 4 in two layers", kind, "padded")[0], tmp_path / "my.cache"
    save_cache(cache, path)
    metadata = {cache_file.FORMAT: json.dumps(about(path)[0])}
    for name in about(path)[1]:
        for change in (
            lambda x: x[1:],
            lambda x: torch.cat([x, x], dim=1),
            lambda x: x[..., :-1],
            lambda x: x.to(torch.float16),
            lambda x: x[None],
            lambda x: None,
        ):
            tensors = about(path)[1]
            changed = change(tensors.pop(name))
            if changed is not None:
                tensors[name] = changed.contiguous()
            save_file(tensors, tmp_path / "changed", metadata)
            with pytest.raises(ValueError, match="changed is no cache that can be loaded"):
                load_cache(tmp_path / "changed")
    tensors["more"] = torch.zeros(1)
    save_file({**about(path)[1], "more": torch.zeros(1)}, tmp_path / "changed", metadata)
    with pytest.raises(ValueError, match=r"belong to nothing: .'more'"):
        load_cache(tmp_path / "changed")


@pytest.mark.parametrize("history", ["dense", "padded", "holes"])
@pytest.mark.parametrize("kind", ["growing", "static", "by window"])
def test_positions_that_the_kind_never_has_are_refused(kind, history, tmp_path) -> None:
    """A changed position would let a query see a key of another place, without an error."""
    cache, path = filled("qwen2, W = 4 in two layers", kind, history)[0], tmp_path / "my.cache"
    save_cache(cache, path)
    load_cache(path)
    description, whole = about(path)
    for name, positions in whole.items():
        if not name.endswith("positions"):
            continue
        own = description["tracks"][int(name[0])]
        changes = {"below padding": (positions < 0, -2), "moved": (positions == 1, 0)}
        if own["kind"] == "growing" and history != "dense":
            del changes["moved"]  # rows may be fed in any order
        for where, value in changes.values():
            if not where.any():
                continue
            tensors = {**whole, name: positions.masked_fill(where, value)}
            save_file(tensors, path, {cache_file.FORMAT: json.dumps(description)})
            with pytest.raises(ValueError, match=f"holds position {value}, which a"):
                load_cache(path)


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path) -> None:
    class Own(GrowingCache):
        pass

    class Halves:
        def encode(self, x):
            return [x.half()]

        def decode(self, parts):
            return parts[0].float()

    for cache in (Own(1), GrowingCache(1, Halves()), NO_CACHE):
        with pytest.raises(ValueError, match="cannot be saved"):
            save_cache(cache, tmp_path / "cache")
    with pytest.raises(ValueError, match="is a folder"):
        save_cache(GrowingCache(1), tmp_path)
    with pytest.raises(ValueError, match="a GrowingCache has no place in a pool"):
        save_cache(GrowingCache(1), tmp_path / "cache")
        load_cache(tmp_path / "cache", pool=BlockPool(1, 1, 1, 1))
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]


KILLED = """
import os, signal, sys, torch
from lm_from_scratch.interop.cache_file import save_cache
from lm_from_scratch.interop.caches import from_legacy
k = torch.ones(2, 3, 5, 4)
os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
save_cache(from_legacy([(k, k)]), sys.argv[1])
"""


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_old_file(tmp_path) -> None:
    path, k = tmp_path / "cache", torch.randn(1, 1, 2, 3)
    save_cache(from_legacy([(k, k)]), path)
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", KILLED, path], cwd=root, check=False)
    assert done.returncode == -signal.SIGKILL and len(list(tmp_path.iterdir())) == 2
    assert torch.equal(to_legacy(load_cache(path))[0][0][0], k)
    save_cache(from_legacy([(k + 1, k)]), path)
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]  # what was begun is gone
    assert torch.equal(to_legacy(load_cache(path))[0][0][0], k + 1)


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path, k = tmp_path / "cache", torch.randn(1, 1, 2, 3)
    old = from_legacy([(k, k)])
    save_cache(old, path)

    def full(tensors, file, metadata):
        Path(file).write_bytes(b"half of it")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(folders.safetensors, "save_file", full)
        save_cache(old, path)
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]  # nothing else is left
    assert torch.equal(to_legacy(load_cache(path))[0][0][0], k)
    save_cache(from_legacy([(k + 1, k)]), path)
    assert torch.equal(to_legacy(load_cache(path))[0][0][0], k + 1)
