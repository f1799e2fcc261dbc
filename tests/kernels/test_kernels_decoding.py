"""kernels/decoding.py: one query per row, equal to the reference however the keys are split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_checks import (
    DEVICE,
    Guarded,
    check,
    check_compiled,
    check_operator,
    each_dtype_of_which_float16_is_slow,
    numbers,
    poisoned,
    strided,
)
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids
from torch import Tensor

from lm_from_scratch.attention.kinds import attention_layers
from lm_from_scratch.attention.online_softmax import tiled_attention
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.slots import SlidingCache, StaticCache
from lm_from_scratch.kernels import decoding
from lm_from_scratch.kernels.decoding import decode_attention, decode_forward, number_of_splits


def last(S: int, window: int | None = None) -> Visibility:
    """The query is the last of S tokens; nothing is padding."""
    positions = torch.arange(S, device=DEVICE)[None]
    return Visibility(positions[:, -1:], positions, window=window, dense=True)


def inputs(B: int, H: int, Hkv: int, S: int, D: int, scale: float = 1.0) -> tuple[Tensor, ...]:
    q = numbers(B, H, 1, D, scale=scale, grad=False)
    k = numbers(B, Hkv, S, D, seed=1, scale=scale, grad=False)
    return q, k, numbers(B, Hkv, S, D, seed=2, grad=False)


def compare(
    tensors: tuple[Tensor, ...],
    visibility: Visibility,
    references: tuple[Callable[..., Tensor], ...] = (tiled_attention,),
    **how: Any,
) -> None:
    for reference in references:
        check(decode_attention, reference, *tensors, visibility, **how)


SHAPES = {
    "one-key": (2, 4, 2, 1, 16),
    "one-tile": (1, 6, 2, 37, 20),
    "four-tiles": (2, 14, 2, 200, 64),
    "own-keys": (2, 3, 3, 70, 8),
    "many-heads": (1, 20, 1, 100, 48),
    "still-more": (2, 34, 2, 40, 16),
    "wide": (1, 4, 2, 37, 100),
}


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=name, marks=[pytest.mark.slow] * (name == "still-more"))
        for name, shape in SHAPES.items()
    ],
)
def test_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Two of them, so that neither is believed alone."""
    both = sdpa_attention, tiled_attention
    compare(inputs(*shape), last(shape[3]), both, dtype=dtype)


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize("window", [1, 64, 65, 130, 200, 500])
def test_window(window: int, dtype: torch.dtype) -> None:
    compare(inputs(1, 4, 2, 200, 16), last(200, window), dtype=dtype)


@each_dtype_of_which_float16_is_slow
def test_takes_any_strides(dtype: torch.dtype) -> None:
    compare(inputs(2, 4, 2, 70, 16), last(70), dtype=dtype, layout=strided)
    as_cached = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
    compare(inputs(2, 4, 2, 70, 16), last(70), dtype=dtype, layout=as_cached)

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return decode_attention(q, k, as_cached(v), last(70))

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa_attention(q, k, v, last(70))

    check(mixed, reference, *inputs(2, 4, 2, 70, 16), dtype=dtype, name="decode_attention")


@each_dtype_of_which_float16_is_slow
def test_large_scores(dtype: torch.dtype) -> None:
    """Scores of some hundreds: one split has nearly all the weight, the others none."""
    compare(inputs(1, 4, 2, 200, 16, scale=8.0), last(200), dtype=dtype)


HIDDEN: dict[str, dict[str, Any]] = {
    "left padding": dict(
        query_positions=[[149], [99]],
        key_positions=[list(range(150)), [-1] * 50 + list(range(100))],
    ),
    "unused slots": dict(
        query_positions=[[20]], key_positions=[[*range(21), *[-1] * 129]], window=7
    ),
    "a ring": dict(query_positions=[[200]], key_positions=[[*range(150, 201), *range(51, 150)]]),
    "a row without keys": dict(
        query_positions=[[-1], [149]], key_positions=[[-1] * 150, list(range(150))]
    ),
    "documents": dict(
        query_positions=[[49], [149]],
        key_positions=[[*range(100), *range(50)], list(range(150))],
        query_documents=[[1], [0]],
        key_documents=[[0] * 100 + [1] * 50, [0] * 150],
    ),
}


def hidden(**rows: Any) -> Visibility:
    on_device = {
        name: torch.tensor(value, device=DEVICE) if isinstance(value, list) else value
        for name, value in rows.items()
    }
    return Visibility(**on_device)


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize("case", HIDDEN, ids=HIDDEN.keys())
def test_mask(case: str, dtype: torch.dtype) -> None:
    compare(inputs(2, 4, 2, 150, 16), hidden(**HIDDEN[case]), dtype=dtype)


@pytest.mark.parametrize("rows", [1, 2])
def test_allowed(rows: int) -> None:
    allowed = numbers(rows, 1, 1, 150, grad=False).to(DEVICE) > 0
    positions = torch.arange(150, device=DEVICE)[None]
    visibility = Visibility(positions[:, -1:], positions, allowed=allowed)
    compare(inputs(2, 4, 2, 150, 16), visibility, dtype=torch.float32)


def test_a_row_that_sees_nothing_is_zero() -> None:
    q, k, v = (x.float().to(DEVICE) for x in inputs(2, 4, 2, 150, 16))
    with poisoned():
        y = decode_attention(q, k, v, hidden(**HIDDEN["a row without keys"]))
    assert y[0].eq(0).all() and y[1].ne(0).all()


def test_no_rows() -> None:
    q, k, v = (x.float().to(DEVICE) for x in inputs(0, 4, 2, 37, 16))
    assert decode_attention(q, k, v, last(37)).shape == (0, 4, 1, 16)


def test_hidden_keys_are_not_read() -> None:
    """They may hold anything, where the reference multiplies them by 0."""
    q, k, v = (x.float().to(DEVICE) for x in inputs(1, 4, 2, 150, 16))
    visibility = hidden(**HIDDEN["unused slots"])
    want = decode_attention(q, k, v, visibility)
    for x in (k, v):
        x[:, :, :14] = torch.nan  # too old for the window
        x[:, :, 21:] = torch.nan  # unused
    assert torch.equal(decode_attention(q, k, v, visibility), want)


@pytest.mark.parametrize(
    "splits", [1, 3, 6, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 7, 16))]
)
def test_the_number_of_splits_does_not_matter(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where some are empty, or hold hidden keys alone."""
    monkeypatch.setattr(decoding, "number_of_splits", lambda *_: splits)
    tensors = inputs(1, 4, 2, 200, 16)
    compare(tensors, last(200), dtype=torch.float32)
    compare(tensors, last(200, 90), dtype=torch.float32)
    half_hidden = [[*[-1] * 130, *range(70)]]
    compare(tensors, hidden(query_positions=[[69]], key_positions=half_hidden), dtype=torch.float32)


def test_how_many_splits() -> None:
    """All multiprocessors of an H100 have work, no split is empty, the merge can hold them."""
    cpu = torch.device("cpu")
    assert number_of_splits(64, 2, cpu) == 64
    assert number_of_splits(1000, 2, cpu) == 64  # what the merge holds
    assert number_of_splits(3, 2, cpu) == 3  # a tile each
    assert number_of_splits(64, 16, cpu) == 17  # 272 programs on 132 multiprocessors
    assert number_of_splits(64, 264, cpu) == 1
    assert number_of_splits(0, 0 + 1, cpu) == 1


@torch.no_grad()
@pytest.mark.parametrize(
    "kind",
    [
        "padded",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("growing", "static", "sliding")),
    ],
)
def test_generation_equals_the_reference(kind: str) -> None:
    """A Qwen2 whose last layer slides, and its caches: logits at every step, as S grows past a
    tile."""
    caches = {
        "growing": lambda: GrowingCache(3),
        "static": lambda: StaticCache(3, capacity=80),
        "sliding": lambda: SlidingCache(3, window=10),
        "padded": lambda: GrowingCache(3),
    }
    kinds = ("full_attention", "full_attention", "sliding_attention")
    if kind == "sliding":
        kinds = ("sliding_attention",) * 3
    model = tiny_qwen2(sliding_window=10, layer_types=kinds).to(DEVICE)
    idx = token_ids(2, 65).to(DEVICE)
    positions = torch.arange(65, device=DEVICE).expand(2, -1).clone()
    if kind == "padded":
        positions[1] = (positions[1] - 5).clamp(min=-1)
    logits = {}
    for attend in (sdpa_attention, decode_attention):
        cache = caches[kind]()
        steps = []
        for piece in (slice(0, 63), slice(63, 64), slice(64, 65)):
            for layer in attention_layers(model):  # a prompt is none of its business
                layer.attend = sdpa_attention if piece.start == 0 else attend
            where = positions[:, piece] if kind == "padded" else None
            steps.append(model(idx[:, piece], positions=where, cache=cache, keep=slice(-1, None)))
        logits[attend] = torch.cat(steps, dim=1)
    want, got = logits.values()
    assert not torch.equal(want[:, 0], want[:, 1])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_gpt2_equals_the_reference() -> None:
    model = tiny_gpt2().to(DEVICE)
    idx, cache = token_ids(2, 20).to(DEVICE), GrowingCache(3)
    want = model(idx)[:, -1]
    model(idx[:, :-1], cache=cache)
    for layer in attention_layers(model):
        layer.attend = decode_attention
    torch.testing.assert_close(model(idx[:, -1:], cache=cache)[:, -1], want, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_is_one_operator() -> None:
    q, k, v = (x.float().to(DEVICE) for x in inputs(2, 4, 2, 70, 16))
    visibility = hidden(query_positions=[[69]], key_positions=[[-1, *range(69)]])
    check_operator(decode_forward, q, k, v, None, None)
    check_operator(decode_forward, q, k, strided(v), None, 9)
    check_operator(decode_forward, q, k, v, visibility.mask, None)
    check_compiled(lambda *x: decode_attention(*x, last(70)), q, k, v)
    check_compiled(lambda *x: decode_attention(*x, visibility), q, k, v)


def test_inputs_are_not_written() -> None:
    guards = [Guarded(x.float().to(DEVICE)) for x in inputs(2, 4, 2, 70, 16)]
    with poisoned():
        q, k, v = (guard.tensor for guard in guards)
        decode_attention(q, k, v, last(70))
    for guard in guards:
        guard.assert_untouched()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(T=2), "q has T=2 queries in a row, the kernel takes 1: use flash_attention"),
        (dict(dropout=0.1), "no dropout, but dropout=0.1"),
        (dict(D=300), "D=300 features, the kernel takes at most 256"),
        (dict(k_dtype=torch.float16), "q is torch.float32, k torch.float16"),
        (dict(grad=True), "under torch.no_grad(), or use flash_attention"),
        (dict(S=8), "the visibility is for 1 and 7"),
        (dict(dtype=torch.float64), "q is torch.float64; kernels compute in"),
    ],
)
def test_refuses(changes: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = (
        dict(T=1, S=7, D=16, dtype=torch.float32, dropout=0.0, grad=False) | changes
    )
    S, D, dtype = given["S"], given["D"], given["dtype"]
    q = torch.ones(1, 2, given["T"], D, dtype=dtype, device=DEVICE, requires_grad=given["grad"])
    k = torch.ones(1, 2, S, D, dtype=given.get("k_dtype", dtype), device=DEVICE)
    v = torch.ones(1, 2, S, D, dtype=dtype, device=DEVICE)
    positions = torch.arange(7, device=DEVICE)[None]
    visibility = Visibility(positions[:, -given["T"] :], positions, dense=True)
    with pytest.raises(ValueError) as error:
        decode_attention(q, k, v, visibility, given["dropout"])
    assert words in str(error.value)
    if given["grad"]:
        with torch.no_grad():
            assert decode_attention(q, k, v, visibility).eq(1).all()
