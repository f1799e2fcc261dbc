"""interop.caches: what another library, or another process, goes on with is what ours would do."""

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import hf_twin, tiny_gpt2, tiny_qwen2, token_ids
from transformers import DynamicCache, EncoderDecoderCache
from transformers import StaticCache as HFStaticCache
from transformers.cache_utils import Fp8QuantizedLayer

from lm_from_scratch.cache.buffer import BufferCache
from lm_from_scratch.cache.codec import Quantized
from lm_from_scratch.cache.growing import GrowingCache, GrowingTrack
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.paged import BlockPool, PagedCache, Row
from lm_from_scratch.cache.slots import SlidingCache, StaticCache, StaticTrack, cache_for
from lm_from_scratch.checkpoint import folders
from lm_from_scratch.interop import cache_file
from lm_from_scratch.interop.cache_file import load_cache, save_cache
from lm_from_scratch.interop.caches import (
    ORDERS,
    from_arrays,
    from_legacy,
    from_transformers,
    to_arrays,
    to_legacy,
    to_transformers,
)
from lm_from_scratch.text.batches import padded_batch

TOLERANCE = dict(atol=5e-5, rtol=0)

MODELS = {
    "gpt2": tiny_gpt2(),
    "qwen2": tiny_qwen2(),
    "qwen2, W = 4": tiny_qwen2(sliding_window=4, max_window_layers=0),
    "qwen2, W = 4 in two layers": tiny_qwen2(sliding_window=4, max_window_layers=1),
}
TWINS = {name: hf_twin(model) for name, model in MODELS.items()}


def paged(model) -> PagedCache:
    c = model.config
    heads = getattr(c, "n_kv_head", c.n_head)
    return PagedCache(BlockPool(c.n_layer, heads, c.head_dim, n_blocks=30, block_size=4))


KINDS = {
    "growing": lambda model: GrowingCache(3, reserve=7),
    "static": lambda model: StaticCache(3, capacity=30),
    "by window": lambda model: cache_for(model.config.windows, slack=2),
    "sliding": lambda model: SlidingCache(3, window=30),  # more than any of the models needs
    "layered": lambda model: BufferCache([StaticTrack(30), GrowingTrack()], [1, 0, 1]),
    "paged": paged,
    "growing, 8 bits": lambda model: GrowingCache(3, Quantized(8)),
    "static, 4 bits": lambda model: StaticCache(3, 30, Quantized(4, group=8)),
}
FULL = [None, None, None]
CASES = [
    (name, kind)
    for name, model in MODELS.items()
    for kind in KINDS
    if not (kind == "sliding" and None in model.config.windows)
    and not (kind == "static, 4 bits" and name == "gpt2")  # 7 features a head
]
EXACT_CASES = [(name, kind) for name, kind in CASES if "bits" not in kind]
HISTORIES = ["dense", "padded", "holes"]
cases = pytest.mark.parametrize(("name", "kind"), CASES)
exact_cases = pytest.mark.parametrize(("name", "kind"), EXACT_CASES)
histories = pytest.mark.parametrize("history", HISTORIES)
names = pytest.mark.parametrize("name", list(MODELS))


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def positions_after(rows: list[list[int]], T: int) -> torch.Tensor:
    return torch.tensor([[len(row)] for row in rows]) + torch.arange(T)


def filled(name: str, kind: str, history: str):
    """A cache of that kind, and the tokens that each of its rows holds."""
    model = MODELS[name]
    cache = KINDS[kind](model)
    if history == "dense":
        idx = token_ids(2, 9)
        for start, end in ((0, 5), (5, 6), (6, 9)):
            model(idx[:, start:end], cache=cache)
        return cache, idx.tolist()
    rows = [token_ids(n, seed=n).tolist() for n in (9, 2, 5)]
    batch = padded_batch(rows, pad_token_id=0, side="left" if history == "padded" else "right")
    for columns in torch.arange(batch.idx.shape[1]).split(4):
        model(batch.idx[:, columns], positions=batch.positions[:, columns], cache=cache)
    if history == "holes":
        lengths = torch.tensor([8, 1, 5])
        cache.crop(lengths)
        cache.reorder(torch.tensor([1, 0, 2]))
        rows = [rows[i][: lengths[i]] for i in (1, 0, 2)]
    new = token_ids(3, 2, seed=7)
    for t in range(2):
        place = positions_after(rows, 1)
        model(new[:, t : t + 1], positions=place, cache=cache)
        rows = [[*row, token] for row, token in zip(rows, new[:, t].tolist(), strict=True)]
    return cache, rows


def go_on_alone(model, rows, new) -> torch.Tensor:
    """The logits (B, T, V) of new tokens, each row in one pass of its own."""
    whole = [torch.tensor([[*row, *more]]) for row, more in zip(rows, new.tolist(), strict=True)]
    return torch.cat([model(idx)[:, -new.shape[1] :] for idx in whole])


def go_on_in_theirs(twin, theirs, rows, new) -> torch.Tensor:
    """The same through a cache of transformers, whose rows stand on the right, in two pieces."""
    longest, logits = max(map(len, rows)), []
    for start, end in ((0, 1), (1, new.shape[1])):
        mask = torch.ones(len(rows), longest + end, dtype=torch.long)
        for i, row in enumerate(rows):
            mask[i, : longest - len(row)] = 0
        logits.append(
            twin(
                new[:, start:end],
                attention_mask=mask,
                position_ids=positions_after(rows, end)[:, start:],
                past_key_values=theirs,
            ).logits
        )
    return torch.cat(logits, dim=1)


def go_on_in_ours(model, cache, rows, new) -> torch.Tensor:
    logits = []
    for start, end in ((0, 1), (1, new.shape[1])):
        place = positions_after(rows, end)[:, start:]
        logits.append(model(new[:, start:end], positions=place, cache=cache))
    return torch.cat(logits, dim=1)


# -------------------------------------------------------------------------------------- legacy form


@histories
@exact_cases
def test_legacy_is_what_transformers_has_for_each_row_alone(name, kind, history) -> None:
    cache, rows = filled(name, kind, history)
    pairs, positions = to_legacy(cache)
    longest = max(map(len, rows))
    assert positions.shape[1] == longest or kind in ("by window", "sliding")
    for i, row in enumerate(rows):
        theirs = TWINS[name](torch.tensor([row])).past_key_values
        for (k, v), (want_k, want_v, _) in zip(pairs, theirs, strict=True):
            n = want_k.shape[2]  # where the layer slides, W - 1
            assert positions[i, -n:].tolist() == list(range(len(row) - n, len(row)))
            torch.testing.assert_close(k[i, :, -n:], want_k[0], **TOLERANCE)
            torch.testing.assert_close(v[i, :, -n:], want_v[0], **TOLERANCE)
            padding = positions[i, -k.shape[2] :] < 0
            assert not k[i, :, padding].any() and not v[i, :, padding].any()


@histories
@cases
def test_legacy_round_trips_are_equal(name, kind, history) -> None:
    cache, rows = filled(name, kind, history)
    pairs, positions = to_legacy(cache)
    exact = "by window" if "bits" in kind else kind  # decoded numbers are coded anew elsewhere
    again = from_legacy(pairs, positions=positions, into=KINDS[exact](MODELS[name]))
    pairs_again, positions_again = to_legacy(again)
    for pair, pair_again in zip(pairs, pairs_again, strict=True):
        for one, other in zip(pair, pair_again, strict=True):
            S = min(one.shape[2], other.shape[2])
            assert "bits" in kind or one.shape[2] == S
            assert torch.equal(one[:, :, -S:], other[:, :, -S:])
    assert torch.equal(positions_again, positions[:, -positions_again.shape[1] :])
    assert again.lengths.tolist() == cache.lengths.tolist() == [len(row) for row in rows]


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
@histories
def test_every_kind_can_be_filled_from_every_kind(name, history) -> None:
    model, new, want = MODELS[name], None, None
    for source in KINDS:
        for target in KINDS:
            if (name, source) not in EXACT_CASES or (name, target) not in EXACT_CASES:
                continue
            cache, rows = filled(name, source, history)
            other = from_legacy(*to_legacy(cache), into=KINDS[target](model))
            if want is None:
                new = token_ids(len(rows), 3, seed=11)
                want = go_on_alone(model, rows, new)
            torch.testing.assert_close(go_on_in_ours(model, other, rows, new), want, **TOLERANCE)


@names
def test_a_cache_filled_from_the_first_position_on_needs_no_positions(name) -> None:
    model = MODELS[name]
    cache, rows = filled(name, "growing", "dense")
    other = from_legacy(to_legacy(cache)[0])
    assert isinstance(other, GrowingCache) and other.dense_length == 9
    new = token_ids(2, 3, seed=11)
    torch.testing.assert_close(model(new, cache=other), go_on_alone(model, rows, new), **TOLERANCE)


def test_legacy_is_plain_tuples_of_pairs_that_transformers_takes() -> None:
    cache, rows = filled("qwen2", "static", "padded")
    pairs, _ = to_legacy(cache)
    assert type(pairs) is tuple and len(pairs) == 3
    assert all(type(pair) is tuple and len(pair) == 2 for pair in pairs)
    assert all(x.shape == (3, 2, 11, 8) and x.is_contiguous() for pair in pairs for x in pair)
    new = token_ids(3, 3, seed=11)
    logits = go_on_in_theirs(TWINS["qwen2"], DynamicCache(pairs), rows, new)
    torch.testing.assert_close(logits, go_on_alone(MODELS["qwen2"], rows, new), **TOLERANCE)


def test_a_key_that_a_layer_lacks_is_not_another_one() -> None:
    """Positions 0, 1, 5, 7 leave 0, 5, 7 in a ring of 3; the other layer has a key at 1 there."""
    cache = cache_for([None, 3])
    for places in ([0, 1], [5], [7]):
        k = torch.tensor(places, dtype=torch.float32)[None, None, :, None] + 10
        cache.see(k[:, 0], torch.tensor([places]), None, [None, 3])
        for layer in cache.layers:
            layer.update(k, k)
    (full, sliding), positions = to_legacy(cache)
    assert positions.tolist() == [[0, 1, 5, 7]]
    assert full[0].flatten().tolist() == [10, 11, 15, 17]
    assert sliding[0].flatten().tolist() == sliding[1].flatten().tolist() == [0, 15, 17]


def test_legacy_misuse_is_refused() -> None:
    for empty in (GrowingCache(2), cache_for([None, 3]), NO_CACHE):
        with pytest.raises(ValueError, match=f"the {type(empty).__name__} is empty"):
            to_legacy(empty)
    k = torch.randn(2, 1, 5, 4)
    with pytest.raises(ValueError, match="n_layer=0"):
        from_legacy([])
    with pytest.raises(ValueError, match="2 pairs for a cache of 3 layers that holds 0 rows"):
        from_legacy([(k, k)] * 2, into=GrowingCache(3))
    full = from_legacy([(k, k)] * 2)
    with pytest.raises(ValueError, match="2 pairs for a cache of 2 layers that holds 2 rows"):
        from_legacy([(k, k)] * 2, into=full)
    with pytest.raises(ValueError, match=r"layer 1 has keys of shape \(1, 1, 5, 4\).*batch 2"):
        from_legacy([(k, k), (k[:1], k[:1])])
    with pytest.raises(ValueError, match=r"layer 0 has keys of shape \(2, 5, 4\)"):
        from_legacy([(k[:, 0], k[:, 0])])
    with pytest.raises(ValueError, match=r"positions have shape \(2, 4\), the tokens \(2, 5\)"):
        from_legacy([(k, k)], positions=torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"GrowingCache cannot hold .5, 3. keys; cache_for"):
        from_legacy([(k, k), (k[:, :, 2:], k[:, :, 2:])])
    small = StaticCache(1, 4)
    with pytest.raises(ValueError, match="capacity=4"):
        from_legacy([(k, k)], into=small)
    layered = cache_for([None, 3])
    for wrong in (k[:, :, :4], k.bfloat16()):
        with pytest.raises(ValueError, match="they must agree"):
            from_legacy([(k, k), (k, wrong)], into=layered)
        assert layered.batch is None and small.batch is None  # as they were
    assert torch.equal(to_legacy(from_legacy([(k, k), (k, k)], into=layered))[0][0][0], k)


# ------------------------------------------------------------------------------------ transformers


@histories
@cases
def test_prefill_in_ours_goes_on_in_theirs(name, kind, history) -> None:
    model = MODELS[name]
    cache, rows = filled(name, kind, history)
    new = token_ids(len(rows), 4, seed=11)
    theirs = to_transformers(cache)
    assert isinstance(theirs, DynamicCache) and theirs.get_seq_length() == max(map(len, rows))
    if "bits" in kind:  # what is held is rounded, so a row alone is no oracle
        exact = from_legacy(*to_legacy(cache))
        want = go_on_in_ours(model, exact, rows, new)
    else:
        want = go_on_alone(model, rows, new)
    torch.testing.assert_close(go_on_in_theirs(TWINS[name], theirs, rows, new), want, **TOLERANCE)


def fed_theirs(name: str, make: str, history: str):
    """A cache of transformers after a pass, its rows, and the positions of its columns."""
    twin = TWINS[name]
    rows = [token_ids(n, seed=n).tolist() for n in ((9, 9) if history == "dense" else (9, 2, 5))]
    theirs = {
        "dynamic": lambda: DynamicCache(),
        "dynamic, config": lambda: DynamicCache(config=twin.config),
        "static": lambda: HFStaticCache(config=twin.config, max_cache_len=20),
    }[make]()
    batch = padded_batch(rows, pad_token_id=0, side="left")
    mask = (batch.positions >= 0).long()
    for start, end in ((0, 6), (6, 8), (8, 9)):
        twin(
            batch.idx[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=batch.positions[:, start:end].clamp(min=0),
            past_key_values=theirs,
        )
    return theirs, rows, None if history == "dense" else batch.positions


@pytest.mark.parametrize("history", ["dense", "padded"])
@pytest.mark.parametrize("make", ["dynamic", "dynamic, config", "static"])
@names
def test_prefill_in_theirs_goes_on_in_ours(name, make, history) -> None:
    theirs, rows, positions = fed_theirs(name, make, history)
    new = token_ids(len(rows), 4, seed=11)
    want = go_on_alone(MODELS[name], rows, new)
    cache = from_transformers(theirs, positions=positions)
    torch.testing.assert_close(go_on_in_ours(MODELS[name], cache, rows, new), want, **TOLERANCE)
    # theirs was not touched
    torch.testing.assert_close(go_on_in_theirs(TWINS[name], theirs, rows, new), want, **TOLERANCE)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "bits" not in kind])
@pytest.mark.parametrize("make", ["dynamic", "static"])
def test_theirs_fills_any_kind_of_ours(make, kind) -> None:
    model = MODELS["qwen2"]
    theirs, rows, positions = fed_theirs("qwen2", make, "padded")
    if kind == "sliding":
        model = MODELS["qwen2, W = 4"]
        theirs, rows, positions = fed_theirs("qwen2, W = 4", make, "padded")
    cache = KINDS[kind](model)
    assert from_transformers(theirs, positions=positions, into=cache) is cache
    new = token_ids(len(rows), 4, seed=11)
    want = go_on_alone(model, rows, new)
    torch.testing.assert_close(go_on_in_ours(model, cache, rows, new), want, **TOLERANCE)


@pytest.mark.parametrize("history", ["dense", "padded"])
@pytest.mark.parametrize("make", ["dynamic", "dynamic, config", "static"])
@names
def test_theirs_to_ours_and_back_is_equal(name, make, history) -> None:
    theirs, rows, positions = fed_theirs(name, make, history)
    cache = from_transformers(theirs, positions=positions)
    windows = MODELS[name].config.windows
    lost = 3 if make == "dynamic, config" else 4  # what their layers hold: W - 1, or W
    slides = [window is not None and make != "dynamic" for window in windows]
    for k, slide in zip(to_legacy(cache)[0], slides, strict=True):
        assert k[0].shape[2] == (lost if slide else 9)
    again = to_transformers(cache)
    assert again.get_seq_length() == 9
    for layer, other, slide in zip(theirs.layers, again.layers, slides, strict=True):
        n = 3 if slide else 9
        columns = slice(layer.keys.shape[2] - n, None) if slide else slice(0, 9)
        real = torch.ones(len(rows), n, dtype=torch.bool)
        if positions is not None:
            real = positions[:, -n:] >= 0
        assert other.keys.shape[2] == n
        for x, y in ((layer.keys, other.keys), (layer.values, other.values)):
            x, y = x[:, :, columns].transpose(1, 2), y.transpose(1, 2)
            assert torch.equal(x[real], y[real]) and not y[~real].any()


def test_a_dense_cache_of_theirs_goes_on_without_positions_where_nothing_was_lost() -> None:
    theirs, rows, _ = fed_theirs("qwen2", "static", "dense")
    new = token_ids(2, 3, seed=11)
    got = MODELS["qwen2"](new, cache=from_transformers(theirs))
    torch.testing.assert_close(got, go_on_alone(MODELS["qwen2"], rows, new), **TOLERANCE)
    theirs, _, _ = fed_theirs("qwen2, W = 4", "dynamic, config", "dense")
    with pytest.raises(ValueError, match="positions are needed"):
        MODELS["qwen2, W = 4"](new, cache=from_transformers(theirs))


@pytest.mark.parametrize("tokens", [3, 4, 5])
def test_keys_that_theirs_has_not_kept_are_not_made_up(tokens: int) -> None:
    """Of W tokens theirs keeps W - 1. To crop to W - 1 of them would need the one that is gone."""
    name = "qwen2, W = 4"
    theirs, idx = DynamicCache(config=TWINS[name].config), token_ids(2, 9)
    TWINS[name](idx[:, :tokens], past_key_values=theirs)
    cache = from_transformers(theirs, into=SlidingCache(3, 4, slack=2))
    want = MODELS[name](idx)
    crop = tokens - 2
    if tokens > 3:
        with pytest.raises(ValueError, match="cannot be taken back"):
            cache.crop(crop)
        crop = tokens
    cache.crop(crop)
    place = torch.arange(crop, 9).expand(2, -1)
    got = MODELS[name](idx[:, crop:], positions=place, cache=cache)
    torch.testing.assert_close(got, want[:, crop:], **TOLERANCE)


def test_conversions_that_would_lie_are_refused() -> None:
    with pytest.raises(ValueError, match="the DynamicCache has no layers"):
        from_transformers(DynamicCache())
    with pytest.raises(ValueError, match="the tuple has no layers"):
        from_transformers(())
    with pytest.raises(ValueError, match="the EncoderDecoderCache has no layers"):
        from_transformers(EncoderDecoderCache(DynamicCache(), DynamicCache()))
    with pytest.raises(ValueError, match="layer 0, DynamicLayer, is empty"):
        from_transformers(DynamicCache(config=TWINS["qwen2"].config))
    k = torch.randn(1, 1, 5, 4)
    theirs = DynamicCache([(k, k)])
    theirs.layers.append(Fp8QuantizedLayer())
    theirs.layers[1].update(k, k)
    assert theirs.get_seq_length(1) == 5
    with pytest.raises(ValueError, match=r"layer 1, Fp8QuantizedLayer, is .* not known"):
        from_transformers(theirs)
    with pytest.raises(ValueError, match=r"positions have shape \(1, 4\), the tokens \(1, 5\)"):
        from_transformers(DynamicCache([(k, k)]), positions=torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"window of at least 2.*the windows are \[1\]"):
        to_transformers(from_legacy([(k, k)], into=SlidingCache(1, 1)))
    gap = torch.tensor([[0, 1, 2, 5, 6]])
    with pytest.raises(ValueError, match=r"rows without gaps.*5, 6"):
        to_transformers(from_legacy([(k, k)], positions=gap, into=SlidingCache(1, 9)))
    theirs = to_transformers(from_legacy([(k, k)], positions=gap))
    assert theirs.get_seq_length() == 5  # masks alone count


# ------------------------------------------------------------------------------------------ arrays


class DLTensor(ctypes.Structure):
    """The layout of ``dlpack.h``; ``dtype`` is code, bits and lanes in one number."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    """A tensor, and what its owner is told when nobody reads it any more."""

    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


READ = ctypes.pythonapi.PyCapsule_GetPointer
READ.restype, READ.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
WRAP = ctypes.pythonapi.PyCapsule_New
WRAP.restype = ctypes.py_object
WRAP.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
GIVEN = []  # what others may still read


class Foreign:
    """A tensor library of its own, in bytes: it takes and gives DLPack, and knows pointer and shape
    alone. Whatever strides it is handed, it reads numbers one after another, as the exporter of the
    old defect K2 did."""

    def __init__(self, other) -> None:
        given = other.__dlpack__()
        theirs = Managed.from_address(READ(given, b"dltensor")).tensor
        self.shape, self.dtype = tuple(theirs.shape[: theirs.ndim]), theirs.dtype
        size = math.prod(self.shape) * (theirs.dtype >> 8 & 0xFF) // 8
        start = theirs.data + theirs.byte_offset
        self.bytes = ctypes.create_string_buffer(ctypes.string_at(start, size), size)
        self.sizes = (ctypes.c_int64 * len(self.shape))(*self.shape)

    def __dlpack_device__(self):
        return 1, 0  # the CPU

    def __dlpack__(self, **_):
        start, ndim = ctypes.addressof(self.bytes), len(self.shape)
        self.managed = Managed(DLTensor(start, (1, 0), ndim, self.dtype, self.sizes, None, 0))
        GIVEN.append(self)
        return WRAP(ctypes.addressof(self.managed), b"dltensor", None)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("library", [np.from_dlpack, Foreign], ids=["numpy", "bytes"])
@pytest.mark.parametrize(("name", "kind"), [("gpt2", "growing"), ("qwen2, W = 4", "by window")])
@histories
def test_keys_and_values_go_out_and_come_back(name, kind, library, order, history) -> None:
    """Bitwise, padding too, also by a library that forgets strides (K2)."""
    model = MODELS[name]
    cache, rows = filled(name, kind, history)
    arrays, places = to_arrays(cache, library, order)
    pairs, positions = to_legacy(cache)
    for (k, v), (ours_k, _) in zip(arrays, pairs, strict=True):
        B, H, S, D = ours_k.shape
        want = (B, H, S, D) if order == "BHSD" else (B, S, H, D)
        assert tuple(k.shape) == tuple(v.shape) == want
    other = from_arrays(arrays, places, order, into=KINDS[kind](model))
    again, positions_again = to_legacy(other)
    assert torch.equal(positions, positions_again)
    for (k, v), (k_again, v_again) in zip(pairs, again, strict=True):
        assert torch.equal(k, k_again) and torch.equal(v, v_again)
    new = token_ids(len(rows), 2, seed=3)
    torch.testing.assert_close(
        go_on_in_ours(model, other, rows, new), go_on_alone(model, rows, new), **TOLERANCE
    )


def test_a_permuted_view_is_what_the_other_library_misreads() -> None:
    """The order of K2: handed over first and permuted there, or permuted and not laid out anew."""
    x = torch.arange(24.0).view(1, 2, 3, 4)
    view = x.transpose(1, 2)
    read = torch.from_dlpack(Foreign(view))
    assert read.shape == view.shape and not torch.equal(read, view)
    assert torch.equal(torch.from_dlpack(Foreign(view.contiguous())), view)


def test_what_is_no_array_is_refused() -> None:
    k = np.zeros((1, 2, 3, 4))
    with pytest.raises(ValueError, match="layer 0 holds a list, which does not speak DLPack"):
        from_arrays([([0.0], [0.0])])
    with pytest.raises(ValueError, match=r"layer 0 has keys of shape \(2, 3, 4\), not BSHD"):
        from_arrays([(k[0], k[0])], order="BSHD")
    with pytest.raises(ValueError, match="order='SBHD' is not one of"):
        from_arrays([(k, k)], order="SBHD")
    with pytest.raises(ValueError, match="is empty"):
        to_arrays(GrowingCache(1), np.from_dlpack)


# ------------------------------------------------------------------------------------------- files


GO_ON = """
import sys, torch
sys.path.insert(0, "tests/helpers")
from tiny_models import tiny_gpt2, tiny_qwen2
from pathlib import Path
from safetensors.torch import load_file, save_file
from lm_from_scratch.interop.cache_file import load_cache
folder, out = Path(sys.argv[1]), {}
recipe = load_file(folder / "recipe")
models = {
    "gpt2": tiny_gpt2(), "qwen2": tiny_qwen2(),
    "qwen2, W = 4": tiny_qwen2(sliding_window=4, max_window_layers=0),
    "qwen2, W = 4 in two layers": tiny_qwen2(sliding_window=4, max_window_layers=1),
}
with torch.no_grad():
    for file in sorted(folder.glob("*.cache")):
        name = file.name.split(" | ")[0]
        cache, new = load_cache(file), recipe[file.name + " new"]
        place = recipe[file.name + " place"]
        first = models[name](new[:, :1], positions=place[:, :1], cache=cache)
        rest = models[name](new[:, 1:], positions=place[:, 1:], cache=cache)
        out[file.name] = torch.cat([first, rest], 1)
save_file(out, folder / "logits")
"""


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


@histories
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


def test_a_save_that_is_killed_or_fails_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path, k = tmp_path / "cache", torch.randn(1, 1, 2, 3)
    old = from_legacy([(k, k)])
    save_cache(old, path)
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", KILLED, path], cwd=root, check=False)
    assert done.returncode == -signal.SIGKILL and len(list(tmp_path.iterdir())) == 2
    assert torch.equal(to_legacy(load_cache(path))[0][0][0], k)

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
