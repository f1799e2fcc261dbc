"""interop.caches: what another library goes on with is what ours would do."""

import ctypes
import math

import numpy as np
import pytest
import torch
from filled_caches import (
    CASES,
    EXACT_CASES,
    HISTORIES,
    KINDS,
    MODELS,
    TOLERANCE,
    filled,
    go_on_alone,
    go_on_in_ours,
    go_on_in_theirs,
    in_turn,
    twin_of,
)
from tiny_models import token_ids
from transformers import DynamicCache, EncoderDecoderCache
from transformers import StaticCache as HFStaticCache
from transformers.cache_utils import Fp8QuantizedLayer

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.slots import SlidingCache, StaticCache, cache_for
from lm_from_scratch.interop.caches import (
    ORDERS,
    from_arrays,
    from_legacy,
    from_transformers,
    to_arrays,
    to_legacy,
    to_transformers,
)
from lm_from_scratch.text.batch import padded_batch

cases = pytest.mark.parametrize(("name", "kind", "history"), in_turn(CASES))


exact_cases = pytest.mark.parametrize(("name", "kind", "history"), in_turn(EXACT_CASES))


histories = pytest.mark.parametrize("history", HISTORIES)


names = pytest.mark.parametrize("name", list(MODELS))


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


# ------------------------------------------------------------------------------------------- pairs


@exact_cases
def test_legacy_is_what_transformers_has_for_each_row_alone(name, kind, history) -> None:
    cache, rows = filled(name, kind, history)
    pairs, positions = to_legacy(cache)
    longest = max(map(len, rows))
    assert positions.shape[1] == longest or kind in ("by window", "sliding")
    for i, row in enumerate(rows):
        theirs = twin_of(name)(torch.tensor([row])).past_key_values
        for (k, v), (want_k, want_v, _) in zip(pairs, theirs, strict=True):
            n = want_k.shape[2]  # where the layer slides, W - 1
            assert positions[i, -n:].tolist() == list(range(len(row) - n, len(row)))
            torch.testing.assert_close(k[i, :, -n:], want_k[0], **TOLERANCE)
            torch.testing.assert_close(v[i, :, -n:], want_v[0], **TOLERANCE)
            padding = positions[i, -k.shape[2] :] < 0
            assert not k[i, :, padding].any() and not v[i, :, padding].any()


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
    logits = go_on_in_theirs(twin_of("qwen2"), DynamicCache(pairs), rows, new)
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
    torch.testing.assert_close(go_on_in_theirs(twin_of(name), theirs, rows, new), want, **TOLERANCE)


def fed_theirs(name: str, make: str, history: str):
    """A cache of transformers after a pass, its rows, and the positions of its columns."""
    twin = twin_of(name)
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
    torch.testing.assert_close(go_on_in_theirs(twin_of(name), theirs, rows, new), want, **TOLERANCE)


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
    theirs, idx = DynamicCache(config=twin_of(name).config), token_ids(2, 9)
    twin_of(name)(idx[:, :tokens], past_key_values=theirs)
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
        from_transformers(DynamicCache(config=twin_of("qwen2").config))
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


class Buffered(bytearray):
    """An array that speaks DLPack and is a buffer of bytes as well, as those of JAX are."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(bytes(x.contiguous().view(torch.uint8).numpy()))
        self.x = x

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **how):
        return self.x.__dlpack__(**how)


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_is_read_by_dlpack_and_not_as_a_buffer(dtype) -> None:
    k, v = torch.randn(2, 1, 2, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    cache = from_arrays([(Buffered(k), Buffered(v))], Buffered(torch.arange(3)[None]))
    ((k_again, v_again),), positions = to_legacy(cache)
    assert k_again.dtype == dtype and torch.equal(k_again, k) and torch.equal(v_again, v)
    assert positions.tolist() == [[0, 1, 2]]
    k[:] = 0  # it was a copy
    assert not torch.equal(to_legacy(cache)[0][0][0], k)


def test_arrays_of_numpy_may_be_read_only_or_go_backwards() -> None:
    k = np.arange(24.0).reshape(1, 2, 3, 4)
    k.flags.writeable = False
    for x in (k, k[..., ::-1], k[:, ::-1], k.swapaxes(0, 1)):
        ((got, _),), _ = to_legacy(from_arrays([(x, x)]))
        assert np.array_equal(got, x)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_keys_and_values_go_to_jax_and_come_back(dtype, order) -> None:
    jax = pytest.importorskip("jax")
    k, v = torch.randn(2, 2, 2, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    places = torch.tensor([[-1, 0, 1], [0, 1, 2]])
    k[0, :, 0] = v[0, :, 0] = 0  # padding
    cache = from_legacy([(k, v)], places)
    arrays, positions = to_arrays(cache, jax.dlpack.from_dlpack, order)
    assert isinstance(arrays[0][0], jax.Array) and str(arrays[0][0].dtype) in str(dtype)
    arrays = [[x + 0 for x in pair] for pair in arrays]  # what JAX has computed
    ((k_again, v_again),), places_again = to_legacy(from_arrays(arrays, positions, order))
    assert torch.equal(k_again, k) and torch.equal(v_again, v) and k_again.dtype == dtype
    assert torch.equal(places_again, places)


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
