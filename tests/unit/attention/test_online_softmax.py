"""online_softmax.py: tiles of any size give the formula, and the scores never exist at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.online_softmax import (
    TILE,
    attend_in_tiles,
    key_tiles,
    tiled_attention,
)
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.instruments.conformance import CASES

TILES = (1, 2, 3, 5)
# The matrix covers the others with tiles of the real size.
SHORT = [name for name, case in CASES.items() if len(case.keys[0]) < 20 and not case.dropout]


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def with_gradients(attend, q, k, v) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    y = attend(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, drawn(*y.shape, seed=9).to(y.dtype))]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", SHORT)
def test_every_tile_size_equals_the_formula(name: str, tile: int) -> None:
    case = CASES[name]
    q, k, v, _ = case.tensors(torch.float64)
    vis = case.visibility()
    ours = with_gradients(lambda *x: attend_in_tiles(*x, vis, tile), q, k, v)
    want = with_gradients(lambda *x: formula_attention(*x, vis), q, k, v)
    for a, b in zip(ours, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


@given(
    st.integers(1, 2),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (3, 1)]),
    st.integers(1, 9),
    st.integers(0, 6),
    st.one_of(st.none(), st.integers(1, 12)),
    st.sampled_from(TILES),
    st.sampled_from([0.0, 1.0, 20.0]),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_gradients_equal_those_of_the_formula(
    B, heads, T, past, window, tile, scale, seed, dense
) -> None:
    S = T + past
    if dense:
        vis = Visibility(
            torch.arange(past, S)[None], torch.arange(S)[None], None, None, window, True
        )
    else:
        positions = torch.randint(-1, S, (B, S), generator=torch.Generator().manual_seed(seed))
        vis = Visibility(positions[:, past:], positions, window=window)
    q, k = drawn(B, heads[0], T, 5, seed=seed, scale=scale), drawn(B, heads[1], S, 5, seed=seed + 1)
    v = drawn(B, heads[1], S, 5, seed=seed + 2)
    ours = with_gradients(lambda *x: attend_in_tiles(*x, vis, tile), q, k, v)
    want = with_gradients(lambda *x: formula_attention(*x, vis), q, k, v)
    for a, b in zip(ours, want, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_gradients_are_those_of_finite_differences() -> None:
    vis = CASES["padding inside, window"].visibility()
    inputs = [drawn(2, h, 7, 3, seed=i).requires_grad_() for i, h in enumerate((2, 1, 1))]
    assert torch.autograd.gradcheck(lambda *x: attend_in_tiles(*x, vis, 3), inputs)


def test_a_second_derivative_is_refused_not_wrong() -> None:
    vis = CASES["causal, known"].visibility()
    q, k, v = (drawn(1, 1, 7, 2, seed=i).requires_grad_() for i in range(3))
    loss = tiled_attention(q, k, v, vis).square().sum()
    (grad,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_scores_that_rise_from_tile_to_tile_and_scores_that_fall() -> None:
    """Rising scores rescale at every tile, falling ones never; the exponentials alone overflow."""
    for sign in (1.0, -1.0):
        k = sign * torch.arange(12.0).view(1, 1, 12, 1) * 200
        q, v = torch.ones(1, 1, 12, 1), drawn(1, 1, 12, 1).float()
        vis = Visibility(torch.arange(12)[None], torch.arange(12)[None])
        want = v if sign > 0 else v[:, :, :1].expand_as(v)  # the last key wins, or the first
        torch.testing.assert_close(attend_in_tiles(q, k, v, vis, 2), want, atol=1e-6, rtol=0)


class Largest(TorchDispatchMode):
    """The largest number of elements that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def largest_tensor(attend, vis: Visibility, H: int, T: int, D: int) -> int:
    q, k, v = (torch.randn(1, H, T, D, requires_grad=True) for _ in range(3))
    with Largest() as seen:
        attend(q, k, v, vis).sum().backward()
    return seen.elements


@pytest.mark.parametrize("dense", [True, False])
def test_no_tensor_has_as_many_elements_as_there_are_scores(dense: bool) -> None:
    H, T, D = 1, 600, 3
    positions = torch.arange(T)[None]

    def vis() -> Visibility:
        return Visibility(positions, positions, window=500, dense=dense)

    assert largest_tensor(tiled_attention, vis(), H, T, D) == TILE * TILE
    assert largest_tensor(formula_attention, vis(), H, T, D) == T * T
    assert largest_tensor(sdpa_attention, vis(), H, T, D) == T * T  # its mask


def test_four_times_the_tokens_take_four_times_the_memory() -> None:
    """Not sixteen times: peak of all tensors alive, by the profiler."""

    def peak(T: int) -> int:
        positions = torch.arange(T)[None]
        q, k, v = (torch.randn(1, 1, T, 4, requires_grad=True) for _ in range(3))
        with torch.profiler.profile(profile_memory=True) as profiler:
            attend_in_tiles(
                q, k, v, Visibility(positions, positions, dense=True), 64
            ).sum().backward()
        alive = highest = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                alive += event.nbytes()
                highest = max(highest, alive)
        return highest

    small, large = peak(256), peak(1024)
    assert small > 0
    assert large < 5 * small


def test_tiles_known_to_be_hidden_are_not_visited(monkeypatch) -> None:
    visited = []
    rule = Visibility.rule

    def counting(self, queries=slice(None), keys=slice(None)):
        visited.append((queries.start, keys.start))
        return rule(self, queries, keys)

    monkeypatch.setattr(Visibility, "rule", counting)

    def visits(T: int, S: int, **kwargs) -> list[tuple[int, int]]:
        visited.clear()
        vis = Visibility(torch.arange(S - T, S)[None], torch.arange(S)[None], **kwargs)
        attend_in_tiles(drawn(1, 1, T, 2), drawn(1, 1, S, 2), drawn(1, 1, S, 2), vis, 2)
        return list(visited)

    assert len(visits(6, 6)) == 9
    assert visits(6, 6, dense=True) == [(0, 0), (2, 0), (2, 2), (4, 0), (4, 2), (4, 4)]
    assert visits(2, 6, dense=True) == [(0, 0), (0, 2), (0, 4)]
    assert visits(2, 8, dense=True, window=1) == [(0, 6)]
    assert visits(2, 8, dense=True, window=2) == [(0, 5), (0, 7)]
    assert visits(1, 8, dense=True, window=3) == [(0, 5), (0, 7)]


def test_tiles_cover_every_visible_key_once() -> None:
    for T, S, window, tile in ((5, 9, 3, 2), (9, 9, None, 4), (1, 9, 4, 3), (4, 4, 1, 1)):
        vis = Visibility(
            torch.arange(S - T, S)[None], torch.arange(S)[None], window=window, dense=True
        )
        for start in range(0, T, tile):
            queries = slice(start, min(start + tile, T))
            keys = [s for tile_ in key_tiles(vis, queries, tile) for s in range(S)[tile_]]
            assert keys == sorted(set(keys))
            seen = vis.rule(queries)[0, 0].any(0).nonzero().flatten().tolist()
            assert set(seen) <= set(keys)


def test_autocast_does_not_round_the_scores() -> None:
    vis = CASES["left padding"].visibility()
    q, k, v = (drawn(2, 2, 7, 16, seed=i, scale=3.0).bfloat16() for i in range(3))

    def under_autocast(*x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return tiled_attention(*x, vis)

    ours = with_gradients(under_autocast, q, k, v)
    want = with_gradients(lambda *x: tiled_attention(*x, vis), q, k, v)
    for a, b in zip(ours, want, strict=True):
        assert torch.equal(a, b)


def test_dropout_is_refused() -> None:
    q, k, v, _ = CASES["causal"].tensors(torch.float32)
    with pytest.raises(ValueError, match=r"tiled attention has no dropout, but dropout=0\.1"):
        tiled_attention(q, k, v, CASES["causal"].visibility(), 0.1)


@pytest.mark.parametrize("tile", [0, -1])
def test_a_tile_of_nothing_is_refused(tile: int) -> None:
    q, positions = torch.randn(1, 1, 3, 4), torch.arange(3)[None]
    with pytest.raises(ValueError, match=f"tile={tile}"):
        attend_in_tiles(q, q, q, Visibility(positions, positions), tile)
