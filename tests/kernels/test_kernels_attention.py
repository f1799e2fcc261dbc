"""kernels/attention.py: what each query sees, and every tile that it may skip.

Its conformance matrix is in test_kernels_conformance.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_checks import (
    DEVICE,
    check,
    check_compiled,
    check_operator,
    each_dtype_of_which_float16_is_slow,
    numbers,
    strided,
)
from torch import Tensor

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.online_softmax import tiled_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.kernels.attention import (
    NO_WINDOW,
    flash_attention,
    flash_backward,
    flash_forward,
    ranges_of,
    rule_tensors,
    tiles_needed,
)

NAN = torch.nan


def known(T: int, S: int, window: int | None = None) -> Visibility:
    """The last T of S tokens, without padding."""
    positions = torch.arange(S, device=DEVICE)[None]
    return Visibility(positions[:, S - T :], positions, window=window, dense=True)


def tokens(positions: Tensor, documents: Tensor | None = None, **rest: int | None) -> Visibility:
    """Self-attention of tokens (B, T)."""
    positions = positions.to(DEVICE)
    documents = None if documents is None else documents.to(DEVICE)
    return Visibility(positions, positions, documents, documents, **rest)


def packed(*lengths: int, padding: int = 0) -> Visibility:
    """Documents of these lengths in one row, after some padding."""
    positions = torch.cat([torch.full((padding,), -1), *(torch.arange(n) for n in lengths)])
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return tokens(positions[None], torch.cat([torch.zeros(padding).long(), number])[None])


def heads(vis: Visibility, H: int, Hkv: int, D: int, B: int = 1, grad: bool = True) -> list[Tensor]:
    T, S = vis.query_length, vis.key_length
    shapes = [(B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, D)]
    return [numbers(*shape, seed=i, grad=grad) for i, shape in enumerate(shapes)]


def half_hidden(T: int, S: int) -> Visibility:
    """Causal, with a mask besides that hides half of the keys, and all of them from one query."""
    generator = torch.Generator().manual_seed(0)
    allowed = torch.rand(2, 1, T, S, generator=generator) < 0.5
    allowed[0, 0, 3] = False
    return replace(known(T, S), allowed=allowed.to(DEVICE))


def reference(q: Tensor, k: Tensor, v: Tensor, vis: Visibility) -> Tensor:
    """PyTorch that rounds where the kernel does: weights in half precision before they meet the
    values, and in float32 the log-sum-exp, from which the weights are computed again."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    return (formula_attention if half else tiled_attention)(q, k, v, vis)


SEEN = {
    "three tiles": known(130, 130),
    "chunk, window": known(40, 130, window=50),
    "one query": known(1, 70),
    "padding and documents": packed(40, 20, 7, padding=37),
    "a mask besides": half_hidden(40, 75),
    "documents and a mask": replace(packed(9, 11), allowed=half_hidden(20, 20).allowed[:1]),
}
#: Others have several tiles, or a mask, too.
SLOW_SEEN = ("three tiles", "a mask besides")


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW_SEEN)) for n in SEEN]
)
def test_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    vis = SEEN[name]
    B = 1 if vis.allowed is None else len(vis.allowed)
    check(flash_attention, reference, *heads(vis, 2, 1, 20, B), vis, dtype=dtype,
          name=f"flash_attention, {name}")  # fmt: skip


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize("D", [pytest.param(1, marks=pytest.mark.slow), 64, 80, 136])
def test_any_size_of_a_head(D: int, dtype: torch.dtype) -> None:
    vis = known(16, 21)
    H = max(2, 32 // D)  # of few numbers the reference may round all in its favour
    check(flash_attention, reference, *heads(vis, H, H, D), vis, dtype=dtype)


@each_dtype_of_which_float16_is_slow
def test_takes_any_strides(dtype: torch.dtype) -> None:
    """Also those of a model, whose heads stand side by side: (B, T, H, D)."""
    vis = known(7, 21)
    for layout in (strided, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        check(flash_attention, reference, *heads(vis, 2, 1, 8, 2), vis, dtype=dtype,
              layout=layout)  # fmt: skip


def test_one_key_is_its_value() -> None:
    q, k, v = (x.float().to(DEVICE) for x in heads(known(1, 1), 2, 1, 8))
    for vis in (known(1, 1), tokens(torch.tensor([[3]])), packed(1)):
        assert torch.equal(flash_attention(q, k, v, vis), v.expand(1, 2, 1, 8))


@pytest.mark.slow
def test_every_length_and_window() -> None:
    """The arithmetic of ranges: tiles that end one key before or after what a query sees."""
    for T, S, windows in [
        (31, 32, (None, 1)),
        (34, 96, (None, 31)),
        (34, 97, (None, 33)),
        (1, 65, (None, 64)),
        (65, 65, (None, 1, 62, 63, 64)),
    ]:
        for window in windows:
            vis = known(T, S, window)
            q, k, v = (x.detach().float().to(DEVICE).requires_grad_() for x in heads(vis, 1, 1, 8))
            results = []
            for attend in (flash_attention, formula_attention):
                y = attend(q, k, v, vis)
                results.append([y, *torch.autograd.grad(y, (q, k, v), torch.cos(10 * y.detach()))])
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0, msg=f"{T} {S} {window}")


CUT = {  # tiles of 64: these queries see no key of these
    "the future": (known(128, 128), 0, 1),
    "too old": (known(64, 192, window=33), 0, 0),
    "the future, not known": (tokens(torch.arange(128)[None]), 0, 1),
    "too old, not known": (tokens(torch.arange(192)[None], window=33), 2, 0),
    "another document": (packed(64, 64), 1, 0),
    "padding": (packed(60, padding=64), 1, 0),
}
#: One of each way to say a rule; the tiles of the others are counted in `make test`, too.
QUICK_CUT = ("too old", "another document")


def tile(i: int) -> slice:
    return slice(64 * i, 64 * i + 64)


def without(x: Tensor, i: int) -> Tensor:
    """A copy that holds NaN in one tile."""
    y = x.clone()
    y[:, :, tile(i)] = NAN
    return y


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK_CUT)) for n in CUT]
)
def test_hidden_tiles_are_not_read(name: str, dtype: torch.dtype) -> None:
    """A NaN that is read is seen in the result, though it is multiplied by 0."""
    vis, queries, keys = CUT[name]
    q, k, v = (x.detach().to(DEVICE, dtype) for x in heads(vis, 1, 1, 8))
    rule, window = list(rule_tensors(vis).values()), vis.window or NO_WINDOW
    whole, lse = flash_forward(q, k, v, rule, window)
    cut, _ = flash_forward(q, without(k, keys), without(v, keys), rule, window)
    assert torch.equal(cut[:, :, tile(queries)], whole[:, :, tile(queries)])

    grad = numbers(*q.shape, seed=3).detach().to(q)
    gradients = flash_backward(grad, q, k, v, whole, lse, rule, window)
    dq, _, _ = flash_backward(
        grad, q, without(k, keys), without(v, keys), whole, lse, rule, window
    )  # fmt: skip
    assert torch.equal(dq[:, :, tile(queries)], gradients[0][:, :, tile(queries)])
    _, *cut_gradients = flash_backward(
        without(grad, queries), without(q, queries), k, v, whole, lse, rule, window
    )  # fmt: skip
    for ours, want in zip(cut_gradients, gradients[1:], strict=True):
        assert torch.equal(ours[:, :, tile(keys)], want[:, :, tile(keys)])
    assert gradients[0][:, :, tile(queries)].isfinite().all()


def needed_tiles(vis: Visibility) -> tuple[Tensor, Tensor]:
    """Tiles of 16 queries and 8 keys: those to visit, and those that the mask says."""
    mask = torch.nn.functional.pad(
        vis.mask[:, 0], (0, -vis.key_length % 8, 0, -vis.key_length % 16)
    )
    wanted = mask.unflatten(2, (-1, 8)).unflatten(1, (-1, 16)).any(4).any(2)
    rule = list(rule_tensors(vis).values())
    return tiles_needed(rule, vis.window or NO_WINDOW, 16, 8), wanted


def test_the_tiles_that_are_visited() -> None:
    """None is left out that the rule needs; where tokens are in order, none is in excess."""
    generator = torch.Generator().manual_seed(0)
    for n, window in [(100, None), (100, 20), (64, 5)]:
        positions = torch.randint(-1, 60, (2, n), generator=generator)
        for vis in (
            tokens(positions, positions // 20, window=window),
            packed(30, 33, n, padding=20),
        ):
            needed, wanted = needed_tiles(vis)
            assert needed.shape == wanted.shape and not (wanted & ~needed).any()
    for vis in (
        tokens(torch.arange(100)[None]),
        tokens(torch.arange(100)[None], window=25),
        packed(48, 32, padding=32),
    ):
        needed, wanted = needed_tiles(vis)
        assert torch.equal(needed, wanted) and not needed.all()
        for row, (first, end) in zip(needed[0].tolist(), ranges_of(needed, 1)[0].tolist()):
            assert row == [first <= i < end for i in range(len(row))]


@each_dtype_of_which_float16_is_slow
def test_queries_that_see_nothing(dtype: torch.dtype) -> None:
    """They give 0, and get a gradient of 0, beside others whose gradients stay numbers."""
    vis = packed(5, padding=3)
    q, k, v = (x.detach().to(DEVICE, dtype).requires_grad_() for x in heads(vis, 2, 1, 8))
    y = flash_attention(q, k, v, vis)
    y.backward(torch.ones_like(y))
    assert (y[:, :, :3] == 0).all() and (q.grad[:, :, :3] == 0).all()
    assert y[:, :, 3:].all() and all(x.grad.isfinite().all() for x in (q, k, v))
    assert q.grad.any() and (k.grad[:, :, :3] == 0).all() and (v.grad[:, :, :3] == 0).all()


def test_nothing_to_do() -> None:
    for B, T, S in [(0, 3, 3), (2, 0, 3), (2, 3, 0)]:
        for dense in (True, False):
            places = [torch.arange(n, device=DEVICE)[None] for n in (T, S)]
            vis = Visibility(*places, dense=dense)
            q, k, v = (
                x.detach().float().to(DEVICE).requires_grad_() for x in heads(vis, 2, 1, 8, B)
            )
            y = flash_attention(q, k, v, vis)
            y.sum().backward()
            assert y.shape == q.shape and not y.any() and not q.grad.any() and not k.grad.any()


def test_the_result_lies_as_a_model_reads_it() -> None:
    q, k, v = (x.float().to(DEVICE) for x in heads(known(5, 5), 2, 1, 8, 2))
    assert flash_attention(q, k, v, known(5, 5)).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    "vis",
    [
        pytest.param(known(5, 9, 3), id="known", marks=pytest.mark.slow),
        pytest.param(half_hidden(5, 9), id="looked at"),
    ],
)
def test_is_one_operator(vis: Visibility) -> None:
    q, k, v = (x.detach().float().to(DEVICE).requires_grad_() for x in heads(vis, 1, 1, 8, 2))
    check_operator(flash_forward, q, k, v, list(rule_tensors(vis).values()), 3)
    check_compiled(lambda q, k, v: flash_attention(q, k, v, vis), q, k, v)


@pytest.mark.slow
def test_gives_the_same_numbers_again() -> None:
    """No sum depends on which program comes first."""
    vis = known(100, 100)
    q, k, v = (x.detach().half().to(DEVICE).requires_grad_() for x in heads(vis, 4, 1, 16))
    results = []
    for _ in range(2):
        y = flash_attention(q, k, v, vis)
        results.append([y, *torch.autograd.grad(y.sum(), (q, k, v))])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(dropout=0.1), "no dropout, but dropout=0.1: use sdpa"),
        (dict(D=264), "heads have 264 features, above 256: use sdpa"),
        (dict(v=torch.half), "q is torch.float32, k torch.float32, v torch.float16"),
        (dict(q=torch.double), "q is torch.float64; kernels"),
        (dict(T=4), "there are 5 queries and 5 keys, but the visibility is for 4 and 5"),
        (dict(positions="meta"), "q is on"),
    ],
    ids=str,
)
def test_refuses(change: dict[str, Any], words: str) -> None:
    D = change.get("D", 8)
    q, k, v = (
        torch.ones(1, 2, 5, D, device=DEVICE, dtype=change.get(name, torch.float)) for name in "qkv"
    )
    vis = known(change.get("T", 5), 5)
    if "positions" in change:
        vis = tokens(torch.arange(5)[None])
        vis.key_positions = vis.key_positions.to("meta")
    with pytest.raises(ValueError) as error:
        flash_attention(q, k, v, vis, change.get("dropout", 0.0))
    assert words in str(error.value)
