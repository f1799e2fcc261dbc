"""GaLore: the closed form in float64, and the laws of a projection."""

import copy
import io
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lm_from_scratch.instruments.onednn import onednn_matmul
from lm_from_scratch.optim.adamw import AdamW, adam_direction
from lm_from_scratch.optim.galore import MOMENTS, GaLore, galore_step
from lm_from_scratch.optim.galore_basis import (
    BASES,
    ENOUGH,
    PROJECTION_TYPES,
    captured_energy,
    project,
    project_back,
    random_basis,
    rotate_moments,
    sides,
    singular_basis,
)

TALL, WIDE, SQUARE = (7, 4), (4, 7), (5, 5)
SHAPES = (TALL, WIDE, SQUARE)
RANKS = (1, 3, 4, 99)
SLOW = pytest.mark.slow
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def gradient(
    shape: tuple[int, int], seed: int = 0, decay: float = 0.7, dtype: torch.dtype = torch.float64
) -> Tensor:
    """A random matrix whose singular values fall by ``decay`` each, so that every gap is wide."""
    rng = np.random.default_rng(seed)
    k = min(shape)
    u = np.linalg.qr(rng.standard_normal((shape[0], k)))[0]
    v = np.linalg.qr(rng.standard_normal((shape[1], k)))[0]
    return torch.from_numpy(u * 3 * decay ** np.arange(k) @ v.T).to(dtype)


def weight(shape: tuple[int, ...], seed: int = 9, dtype: torch.dtype = torch.float32) -> Any:
    return nn.Parameter(random_tensor(*shape, seed=seed, dtype=dtype))


def feed(optimizer: torch.optim.Optimizer, p: Tensor, *gradients: Tensor) -> None:
    """One step per gradient."""
    for g in gradients:
        p.grad = g.to(p.dtype).clone()
        optimizer.step()


def some_gradients(p: Tensor, number: int, seed: int = 0) -> list[Tensor]:
    return [random_tensor(*p.shape, seed=100 * seed + i, dtype=p.dtype) for i in range(number)]


def snapshot(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Every parameter and every entry of the state, copied."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [{k: v.clone() for k, v in optimizer.state.get(p, {}).items()} for p in params]
    return [[p.detach().clone() for p in params], states]


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def through_a_file(state: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


# ---------------------------------------------------------------------------- the closed form


class Reference:
    """GaLore in float64 and numpy, with two bases for every type: an absent one is the identity.

    Singular vectors have a free sign. Kept moments depend on it, so the signs, and nothing else,
    are taken from the optimizer's basis.
    """

    def __init__(
        self, shape: tuple[int, int], kind: str, rank: int, gap: int, moments: str = "keep",
        lr: float = 0.1, decay: float = 0.1, scale: float = 0.5, eps: float = 1e-3,
        betas: tuple[float, float] = (0.8, 0.9),
    ) -> None:  # fmt: skip
        m, n = self.shape = shape
        self.rank, self.gap, self.moments = min(rank, m, n), gap, moments
        self.lr, self.decay, self.scale, self.eps, self.betas = lr, decay, scale, eps, betas
        tall = m >= n
        self.has_left = kind in ("left", "full") or kind == ("reverse_std" if tall else "std")
        self.has_left |= kind == "random" and not tall
        self.has_right = kind == "full" or not self.has_left
        self.t = self.used = self.made = 0
        self.kind = kind

    def step(self, weight: np.ndarray, g: np.ndarray, state: dict[str, Tensor]) -> np.ndarray:
        m, n = self.shape
        if self.made == 0 or self.used == self.gap:
            u, _, vh = np.linalg.svd(g)
            new = [np.eye(m), np.eye(n)]
            for side, mine, name in ((0, u, "left"), (1, vh.T, "right")):
                if not (self.has_left, self.has_right)[side]:
                    assert name not in state
                    continue
                theirs = state[name].double().numpy()
                if self.kind == "random":
                    new[side] = theirs
                    continue
                mine = mine[:, : self.rank]
                overlap = mine.T @ theirs
                assert np.abs(np.abs(overlap) - np.eye(self.rank)).max() < 1e-3
                new[side] = mine * np.sign(np.diag(overlap))
            if self.made == 0 or self.moments == "reset":
                self.t = 0
                self.mean = self.square = np.zeros((new[0].shape[1], new[1].shape[1]))
            elif self.moments == "rotate":
                c1, c2 = (1 - beta**self.t for beta in self.betas)
                turns = [new[0].T @ self.basis[0], new[1].T @ self.basis[1]]
                old = self.mean / c1
                variance = np.maximum(self.square / c2 - old**2, 0)
                mean = turns[0] @ old @ turns[1].T
                self.square = c2 * (turns[0] ** 2 @ variance @ (turns[1] ** 2).T + mean**2)
                self.mean = c1 * mean
            self.basis, self.used, self.made = new, 0, self.made + 1
        self.t, self.used = self.t + 1, self.used + 1
        left, right = self.basis
        low = left.T @ g @ right
        self.mean = self.betas[0] * self.mean + (1 - self.betas[0]) * low
        self.square = self.betas[1] * self.square + (1 - self.betas[1]) * low**2
        corrected = self.mean / (1 - self.betas[0] ** self.t)
        root = np.sqrt(self.square / (1 - self.betas[1] ** self.t))
        back = left @ (corrected / (root + self.eps)) @ right.T
        return weight - self.lr * self.decay * weight - self.lr * self.scale * back

    def optimizer(self, p: Tensor, **options: Any) -> GaLore:
        return GaLore(
            [p], lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.decay,
            rank=self.rank, update_proj_gap=self.gap, scale=self.scale, moments=self.moments,
            projection_type=self.kind, **options,
        )  # fmt: skip


def follow(reference: Reference, p: Tensor, gradients: list[Tensor], **options: Any) -> None:
    """Every step of the optimizer is the reference's, from the weight that it had before."""
    optimizer = reference.optimizer(p, **options)
    for g in gradients:
        before = p.detach().double().numpy().copy()
        g = g.to(p.dtype)
        feed(optimizer, p, g)
        expected = torch.from_numpy(reference.step(before, g.double().numpy(), optimizer.state[p]))
        atol = {torch.float64: 1e-9, torch.float32: 3e-4, torch.bfloat16: 3e-2}[p.dtype]
        torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=atol)


def every_third() -> Iterator[Any]:
    """In the quick tests each two of a shape, a rank and a dtype meet, and each with every kind."""
    for i, shape in enumerate(SHAPES):
        for j, rank in enumerate((1, 3, 99, 4)):
            for k, dtype in enumerate(DTYPES):
                slow = rank == 4 or (i + j + k) % 3
                yield pytest.param(shape, rank, dtype, marks=[SLOW] * bool(slow))


@pytest.mark.parametrize(("shape", "rank", "dtype"), [*every_third()])
@pytest.mark.parametrize("kind", PROJECTION_TYPES)
def test_steps_past_two_refreshes_equal_the_closed_form(kind, shape, rank, dtype) -> None:
    gradients = [gradient(shape, seed) for seed in range(5)]
    for basis, moments in itertools.product(("svd", "gram"), MOMENTS):
        # the rounding noise beside a diagonal R must stay below eps
        reference = Reference(shape, kind, rank, 2, moments, eps=0.03 if kind == "full" else 1e-3)
        follow(reference, weight(shape, dtype=dtype), gradients, basis=basis)


@given(
    m=st.integers(1, 7), n=st.integers(1, 7), rank=st.integers(1, 9), gap=st.integers(1, 4),
    kind=st.sampled_from(PROJECTION_TYPES), moments=st.sampled_from(MOMENTS),
    basis=st.sampled_from(("svd", "gram")), seed=st.integers(0, 99),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)  # fmt: skip
def test_closed_form_of_drawn_shapes(m, n, rank, gap, kind, moments, basis, seed, dtype) -> None:
    reference = Reference((m, n), kind, rank, gap, moments, eps=0.03)
    gradients = [gradient((m, n), 10 * seed + i) for i in range(6)]
    follow(reference, weight((m, n), dtype=dtype), gradients, basis=basis)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", PROJECTION_TYPES)
def test_the_fused_kernel_takes_the_same_steps(kind, dtype) -> None:
    for shape, moments in itertools.product(SHAPES, MOMENTS):
        gradients = [gradient(shape, seed) for seed in range(5)]
        reference = Reference(shape, kind, 3, 2, moments, eps=0.03)
        follow(reference, weight(shape, dtype=dtype), gradients, basis="svd", fused=True)
    for options in (dict(lr=torch.tensor(0.1)), dict(rank=None)):
        p, q = weight(TALL), weight(TALL)
        both: Any = dict(rank=3, update_proj_gap=2, projection_type=kind, lr=0.1, eps=0.03)
        a, b = (GaLore([x], **{**both, **options}, fused=f) for x, f in ((p, True), (q, False)))
        feed(a, p, *some_gradients(p, 5))
        feed(b, q, *some_gradients(p, 5))
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)
        assert {name: value.shape for name, value in a.state[p].items()} == a.state_shapes(p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", PROJECTION_TYPES)
def test_the_function_is_a_step_of_the_optimizer(kind, dtype) -> None:
    options: Any = dict(lr=0.1, betas=(0.8, 0.9), eps=0.03, weight_decay=0.1, scale=0.5)
    for shape in SHAPES:
        p = weight(shape, dtype=dtype)
        optimizer = GaLore([p], rank=3, projection_type=kind, **options)
        first, *others = some_gradients(p, 4)
        feed(optimizer, p, first)
        for step, g in enumerate(others, 2):
            state = optimizer.state[p]
            left, right, m, v = (state.get(x) for x in ("left", "right", "exp_avg", "exp_avg_sq"))
            want = galore_step(p.detach(), g, left, right, m.clone(), v.clone(), step, **options)
            feed(optimizer, p, g)
            got = p.detach(), state["exp_avg"], state["exp_avg_sq"]
            atol = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 0}[dtype]
            torch.testing.assert_close(got, want, rtol=0, atol=atol)


def test_options_of_the_update_reach_it() -> None:
    for options in (dict(lr=0.03), dict(decay=0.0), dict(scale=2.0), dict(betas=(0.0, 0.5))):
        follow(
            Reference(TALL, "std", 2, 2, **options),
            weight(TALL, dtype=torch.float64),
            [gradient(TALL, i) for i in range(5)],
        )


# --------------------------------------------------------------------------- shapes, bases, moments


@pytest.mark.parametrize("kind", PROJECTION_TYPES)
def test_moments_have_the_shape_of_the_projected_gradient(kind) -> None:
    ranks = zip(RANKS, (None, 0.5, None, 0.5), strict=True)
    for shape, (rank, drift), basis, moments in itertools.product(SHAPES, ranks, BASES, MOMENTS):
        p = weight(shape)
        optimizer = GaLore(
            [p], rank=rank, update_proj_gap=2, projection_type=kind, basis=basis, moments=moments,
            max_drift=drift,
        )  # fmt: skip
        r = min(rank, *shape)
        low = {
            "left": (r, shape[1]), "right": (shape[0], r), "full": (r, r)
        }  # fmt: skip
        tall = shape[0] >= shape[1]
        side = {"reverse_std": "left" if tall else "right"}.get(kind, "right" if tall else "left")
        side = kind if kind in low else side
        for g in some_gradients(p, 3):
            feed(optimizer, p, g)
            state = optimizer.state[p]
            assert state["exp_avg"].shape == state["exp_avg_sq"].shape == low[side]
            found = {name: value.shape for name, value in state.items()}
            assert found == optimizer.state_shapes(p)
            for name, size in (("left", shape[0]), ("right", shape[1])):
                assert (name in state) == (side in (name, "full"))
                assert name not in state or state[name].shape == (size, r)


def test_rank_one_is_no_broadcast() -> None:
    for shape, kind in itertools.product(SHAPES, ("left", "right")):
        p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        optimizer = GaLore([p], rank=1, projection_type=kind, weight_decay=0.0)
        feed(optimizer, p, *some_gradients(p, 3))
        assert optimizer.state[p]["exp_avg"].numel() == (shape[1] if kind == "left" else shape[0])
        assert torch.linalg.matrix_rank(p.detach()) == 1


@pytest.mark.parametrize("kind", PROJECTION_TYPES)
def test_projecting_there_and_back_is_the_closed_form(kind) -> None:
    for shape, rank in itertools.product(SHAPES, (1, 3, 4, 5)):
        g = gradient(shape, 3)
        rank = min(rank, *shape)
        has_left, has_right = sides(shape, kind)
        u, _, vh = np.linalg.svd(g.numpy(), full_matrices=False)
        a, b = u[:, :rank], vh[:rank].T
        expected = a @ a.T @ g.numpy() if has_left else g.numpy()
        expected = expected @ b @ b.T if has_right else expected
        for method in ("svd", "gram"):
            bases = singular_basis(g, rank, has_left, has_right, method)
            back = project_back(project(g, *bases), *bases)
            torch.testing.assert_close(back, torch.from_numpy(expected), rtol=0, atol=1e-10)


def test_reverse_std_remembers_its_side_at_every_rank() -> None:
    for shape in ((5, 8), (8, 5), (5, 5)):
        for rank in range(1, 9):
            p = weight(shape, dtype=torch.float64)
            follow(
                Reference(shape, "reverse_std", rank, 2), p, [gradient(shape, i) for i in (1, 2)]
            )
            optimizer = GaLore([p], rank=rank, projection_type="reverse_std")
            expected = "right" if shape[0] < shape[1] else "left"
            assert {"left", "right"} & optimizer.state_shapes(p).keys() == {expected}


@pytest.mark.parametrize("gap", [1, 2, 3, 4, None])
def test_bases_are_made_in_steps_1_and_every_gap_after(gap) -> None:
    p = weight(TALL)
    optimizer = GaLore([p], rank=2, update_proj_gap=gap)
    made, bases = [], [torch.zeros(4, 2)]
    for step, g in enumerate(some_gradients(p, 13), 1):
        feed(optimizer, p, g)
        basis = optimizer.state[p]["right"]
        if not torch.equal(basis, bases[-1]):
            made.append(step)
            bases.append(basis.clone())
            best = singular_basis(g, 2, False, True, "gram")[1]
            torch.testing.assert_close(basis, best)  # of the gradient of this very step
        assert optimizer.state[p]["bases"] == len(made)
        assert optimizer.state[p]["age"] == step - made[-1] + 1
    assert made == ([1] if gap is None else list(range(1, 14, gap)))


def worst_cosine(moments: str, basis: str) -> float:
    """A constant gradient of rank 2 and noise: the first moment, back in the matrix space.

    Its two singular values are equal, so every new basis is another one of the same space.
    """
    true = gradient((12, 9), decay=1.0, dtype=torch.float32)
    true = project_back(*(lambda b: (project(true, *b), *b))(singular_basis(true, 2, False, True)))
    p = weight((12, 9))
    optimizer = GaLore([p], rank=2, update_proj_gap=10, moments=moments, basis=basis)
    cosines = []
    for step in range(100):
        feed(optimizer, p, true + 0.01 * random_tensor(12, 9, seed=step))
        state = optimizer.state[p]
        mean = project_back(state["exp_avg"], None, state["right"])
        cosines.append(torch.cosine_similarity(mean.flatten(), true.flatten(), dim=0).item())
    return min(cosines)


def test_rotated_moments_keep_their_meaning_at_a_refresh() -> None:
    for basis in BASES:
        assert worst_cosine("rotate", basis) >= 0.9997
        assert worst_cosine("reset", basis) >= 0.9997
        # subspace iteration continues the old basis, so that what is kept keeps its meaning too
        kept = worst_cosine("keep", basis)
        assert kept > 0.99 if basis == "subspace" else kept < 0.5


def test_eps_is_added_behind_the_bias_correction() -> None:
    g = 1e-6 * gradient(TALL)
    for scale, kind, lr in ((1.0, "right", 0.1), (0.25, "left", 0.01)):
        p = weight(TALL, dtype=torch.float64)
        before = p.detach().clone()
        optimizer = GaLore(
            [p], lr, rank=4, scale=scale, projection_type=kind, basis="svd", eps=1e-6,
            weight_decay=0.0,
        )  # fmt: skip
        feed(optimizer, p, g)
        u, s, vh = torch.linalg.svd(g, full_matrices=False)
        low = u * s if kind == "right" else s[:, None] * vh
        direction = low / (low.abs() + 1e-6)
        step = direction @ vh if kind == "right" else u @ direction
        torch.testing.assert_close(p.detach(), before - lr * scale * step, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", PROJECTION_TYPES)
def test_state_holds_no_more_memory_than_its_numbers(kind) -> None:
    for shape, rank, basis, moments in itertools.product(
        ((64, 24), (24, 64), (32, 32)), (1, 8), BASES, MOMENTS
    ):
        p = weight(shape)
        optimizer = GaLore(
            [p], rank=rank, update_proj_gap=2, projection_type=kind, basis=basis, moments=moments,
            max_drift=0.9,
        )  # fmt: skip
        for g in some_gradients(p, 3):
            feed(optimizer, p, g)
            for name, value in optimizer.state[p].items():
                held = value.untyped_storage().nbytes()
                assert held == value.numel() * value.itemsize, (name, basis, moments)
                assert value.is_contiguous(), (name, basis, moments)
            storages = {v.untyped_storage().data_ptr() for v in optimizer.state[p].values()}
            assert len(storages) == len(optimizer.state[p])


@pytest.mark.parametrize("basis", [*BASES, "random"])
def test_bases_are_orthonormal_in_the_precision_of_the_gradient(basis) -> None:
    shapes = ((40, 12), (12, 40), (20, 20))
    for shape, dtype, size in itertools.product(shapes, DTYPES, (1e-20, 1.0, 1e20)):
        p = nn.Parameter(torch.zeros(shape, dtype=dtype))
        kind = dict(projection_type="random") if basis == "random" else dict(basis=basis)
        for kinds in ("left", "right", "full") if basis != "random" else ("random",):
            kind["projection_type"] = kinds
            optimizer = GaLore([p], rank=5, update_proj_gap=1, **kind)
            for seed in range(2):
                feed(optimizer, p, size * gradient(shape, seed))
            for name in {"left", "right"} & optimizer.state[p].keys():
                q = optimizer.state[p][name]
                assert q.dtype == torch.promote_types(dtype, torch.float32)
                error = (q.mT.double() @ q.double() - torch.eye(5, dtype=torch.float64)).abs().max()
                assert error < 64 * torch.finfo(q.dtype).eps


@pytest.mark.parametrize("shape", [(6, 3, 2, 2), (3, 5, 4), (2, 3, 1, 2, 2)])
def test_a_convolution_is_the_matrix_out_by_everything_else(shape) -> None:
    for kind, layout in itertools.product(
        PROJECTION_TYPES, (torch.contiguous_format, torch.channels_last)
    ):
        if layout is torch.channels_last and len(shape) != 4:
            continue
        conv = weight(shape)
        flat = nn.Parameter(conv.detach().flatten(1).clone())
        conv = nn.Parameter(conv.detach().to(memory_format=layout))
        options: Any = dict(
            lr=0.1, eps=0.03, weight_decay=0.5, rank=2, update_proj_gap=2, projection_type=kind
        )  # fmt: skip
        a, b = (GaLore([p], **options) for p in (conv, flat))
        for g in some_gradients(conv, 5):
            conv.grad = g.to(memory_format=layout)
            a.step()
            feed(b, flat, g.flatten(1))
        torch.testing.assert_close(conv.detach().flatten(1), flat.detach(), rtol=0, atol=1e-5)
        assert {k: v.shape for k, v in a.state[conv].items()} == a.state_shapes(conv)


def test_reset_forgets_everything() -> None:
    used, unused = weight(TALL, seed=1), weight(WIDE, seed=2)
    optimizer = GaLore([used, unused], rank=2, update_proj_gap=3, projection_type="random")
    feed(optimizer, used, *some_gradients(used, 5))
    optimizer.reset()
    assert not optimizer.state
    fresh = nn.Parameter(used.detach().clone())
    other = GaLore([fresh], rank=2, update_proj_gap=3, projection_type="random")
    for g in some_gradients(used, 5, seed=1):
        feed(optimizer, used, g)
        feed(other, fresh, g)
    assert_same(used.detach(), fresh.detach())
    assert optimizer.state[used]["step"] == 5
    assert unused not in optimizer.state


def test_a_decay_is_no_penalty() -> None:
    """A weight shrinks by lr * decay, whatever scale is, and the moments never see it."""
    p = weight(TALL, dtype=torch.float64)
    before = p.detach().clone()
    optimizer = GaLore([p], lr=0.1, rank=2, weight_decay=0.5, scale=7.0)
    feed(optimizer, p, torch.zeros(TALL))
    torch.testing.assert_close(p.detach(), before * 0.95)
    assert not optimizer.state[p]["exp_avg"].any()


# ---------------------------------------------------------------------------------------- laws

shapes = st.tuples(st.integers(1, 9), st.integers(1, 9))


@given(shape=shapes, rank=st.integers(1, 9), kind=st.sampled_from(PROJECTION_TYPES))
def test_an_update_lies_in_the_span_of_the_basis(shape, rank, kind) -> None:
    p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = GaLore(
        [p], lr=1.0, scale=1.0, weight_decay=0.0, rank=rank, projection_type=kind,
        update_proj_gap=None,
    )  # fmt: skip
    feed(optimizer, p, *some_gradients(p, 3))
    bases = optimizer.state[p].get("left"), optimizer.state[p].get("right")
    inside = project_back(project(p.detach(), *bases), *bases)
    torch.testing.assert_close(inside, p.detach(), rtol=0, atol=1e-12)
    for basis, side in ((bases[0], p.detach()), (bases[1], p.detach().mT)):
        if basis is not None:  # other directions get nothing
            other = random_tensor(side.shape[0], 1, seed=5, dtype=torch.float64)
            other -= basis @ (basis.mT @ other)
            assert (other.mT @ side).abs().max() < 1e-12


@given(shape=shapes, rank=st.integers(1, 9), kind=st.sampled_from(PROJECTION_TYPES))
def test_a_projection_is_idempotent_and_never_longer(shape, rank, kind) -> None:
    g, h = (random_tensor(*shape, seed=i, dtype=torch.float64) for i in (1, 2))
    left, right = sides(shape, kind)
    for bases in (
        *(singular_basis(g, rank, left, right, method) for method in BASES),
        random_basis(g, rank, left, right, seed=3),
    ):
        low = project(h, *bases)
        back = project_back(low, *bases)
        torch.testing.assert_close(project(back, *bases), low)
        torch.testing.assert_close(project_back(project(back, *bases), *bases), back)
        assert low.norm() <= h.norm() * (1 + 1e-12)
        torch.testing.assert_close(low.norm(), back.norm())
        torch.testing.assert_close(project(h + 3 * g, *bases), low + 3 * project(g, *bases))
        share = captured_energy(low, h)
        torch.testing.assert_close(share.double(), (low.norm() / h.norm()) ** 2, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", PROJECTION_TYPES)
def test_a_frozen_basis_of_full_rank_is_adam_in_the_rotated_space(kind) -> None:
    shape = (5, 5) if kind in ("full", "left", "right") else WIDE
    if kind == "reverse_std":
        shape = SQUARE
    gradients = [random_tensor(*shape, seed=i, dtype=torch.float64) for i in range(20)]
    p = weight(shape, dtype=torch.float64)
    start = p.detach().clone()
    optimizer = GaLore(
        [p], lr=0.02, weight_decay=0.3, scale=1.0, rank=min(shape), update_proj_gap=None,
        projection_type=kind,
    )  # fmt: skip
    # off the diagonal, the first R of two bases is rounding noise, which Adam would blow up
    if kind == "full":
        feed(optimizer, p, gradients[0])
        optimizer.state[p].update(step=torch.tensor(0.0))
        optimizer.state[p]["exp_avg"].zero_()
        optimizer.state[p]["exp_avg_sq"].zero_()
        with torch.no_grad():
            p.copy_(start)
    feed(optimizer, p, *gradients[1:])
    bases = optimizer.state[p].get("left"), optimizer.state[p].get("right")
    rotated = nn.Parameter(project(start, *bases))
    feed(
        torch.optim.AdamW([rotated], lr=0.02, weight_decay=0.3),
        rotated,
        *(project(g, *bases) for g in gradients[1:]),
    )
    torch.testing.assert_close(p.detach(), project_back(rotated.detach(), *bases))
    plain = nn.Parameter(start.clone())
    feed(torch.optim.AdamW([plain], lr=0.02, weight_decay=0.3), plain, *gradients[1:])
    assert (p - plain).abs().max() > 0.05


@given(shape=shapes, rank=st.integers(1, 9), kind=st.sampled_from(PROJECTION_TYPES))
def test_momentum_is_unchanged_by_a_projection(shape, rank, kind) -> None:
    """SGD with momentum is linear: in the low space it is the projected run in the whole space."""
    gradients = [random_tensor(*shape, seed=i, dtype=torch.float64) for i in range(5)]
    bases = singular_basis(gradients[0], rank, *sides(shape, kind))
    whole, low = (
        nn.Parameter(project(torch.zeros_like(gradients[0]), *b)) for b in ((None,) * 2, bases)
    )
    feed(torch.optim.SGD([whole], 0.1, momentum=0.9), whole, *gradients)
    feed(torch.optim.SGD([low], 0.1, momentum=0.9), low, *(project(g, *bases) for g in gradients))
    torch.testing.assert_close(project(whole.detach(), *bases), low.detach())
    if all(basis is None or basis.shape[0] == basis.shape[1] for basis in bases):  # nothing is lost
        torch.testing.assert_close(project_back(low.detach(), *bases), whole.detach())


def angle(a: Tensor, b: Tensor) -> float:
    """The sine of the largest principal angle between two spaces."""
    return torch.linalg.matrix_norm(a - b @ (b.mT @ a), ord=2).item()


@given(
    m=st.integers(2, 12), n=st.integers(2, 12), rank=st.integers(1, 6), seed=st.integers(0, 99),
    size=st.sampled_from((1e-20, 1e-10, 1.0, 1e20)),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)  # fmt: skip
def test_the_methods_find_the_same_space_at_a_gap(m, n, rank, seed, size, dtype) -> None:
    """Subspace iteration ends as soon as the rest would hold next to nothing."""
    rank = min(rank, m, n)
    g = gradient((m, n), seed, decay=0.8)
    u, s, vh = torch.linalg.svd(g, full_matrices=False)
    s[rank:] *= 0.01
    g = (size * (u * s @ vh)).to(dtype)
    expected = u[:, :rank], vh[:rank].mT
    near = gradient((m, n), seed + 1, decay=0.8) * 0.03 + u * s @ vh
    start = singular_basis(near.to(dtype), rank, True, True, "svd")
    for method in BASES:
        bases = singular_basis(g, rank, True, True, method, start)
        for basis, best in zip(bases, expected):
            assert basis is not None and basis.dtype is dtype
            if method != "subspace":
                assert angle(basis.double(), best) < (1e-6 if dtype is torch.float64 else 1e-4)
        best_energy = (s[:rank].square().sum() / s.square().sum()).item()
        least = best_energy * (ENOUGH if method == "subspace" else 1 - 1e-5)
        assert captured_energy(project(g, bases[0], None), g) > least
        assert captured_energy(project(g, None, bases[1]), g) > least


def test_subspace_iteration_keeps_nearly_all_energy_that_can_be_kept() -> None:
    """Also from a basis in which the gradient has no part at all."""
    for shape, kind in itertools.product(((48, 24), (24, 48)), ("left", "right")):
        left, right = kind == "left", kind == "right"
        g = gradient(shape, 1, decay=0.8)
        best = captured_energy(project(g, *singular_basis(g, 4, left, right)), g)
        for start, least in (
            (gradient(shape, 2, 0.8), 0.85),
            (gradient(shape, 2, 0.8) + 2 * g, 0.99),
        ):
            old = singular_basis(start, 4, left, right)
            new = singular_basis(g, 4, left, right, "subspace", old)
            assert captured_energy(project(g, *new), g) > least * best
    g = torch.zeros(8, 12)
    g[:4], first = random_tensor(4, 12, seed=1), torch.zeros(8, 12)
    first[4:] = random_tensor(4, 12, seed=2)
    for h, one in ((g, first), (g.mT, first.mT)):
        old = singular_basis(one, 2, h is g, h is not g)
        new = singular_basis(h, 2, h is g, h is not g, "subspace", old)
        best = singular_basis(h, 2, h is g, h is not g)
        assert captured_energy(project(h, *new), h) > 0.7 * captured_energy(project(h, *best), h)


def test_random_bases_differ_by_parameter_and_refresh_and_repeat_by_seed() -> None:
    def bases_of(seed: int) -> list[Tensor]:
        params = [weight(WIDE, seed=i) for i in range(3)]
        optimizer = GaLore(
            [{"params": params[:2]}, {"params": params[2:]}], rank=2, update_proj_gap=1,
            projection_type="random", seed=seed,
        )  # fmt: skip
        found = []
        for step in range(3):
            for p in params:
                p.grad = random_tensor(*p.shape, seed=step)
            optimizer.step()
            found += [optimizer.state[p]["left"].clone() for p in params]
        return found

    torch.manual_seed(1)
    first = bases_of(0)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert_same(bases_of(0), first)
    assert torch.equal(torch.get_rng_state(), before)  # the run's random numbers are not touched
    everything = first + bases_of(1)
    for a, b in itertools.combinations(everything, 2):
        assert (a - b).abs().max() > 1e-2


# ------------------------------------------------------------------------------ rotated moments


@given(shape=shapes, rank=st.integers(1, 9), kind=st.sampled_from(PROJECTION_TYPES))
def test_rotated_moments(shape, rank, kind) -> None:
    gradients = [random_tensor(*shape, seed=i, dtype=torch.float64) for i in range(4)]
    old = singular_basis(gradients[0], rank, *sides(shape, kind), "svd")
    mean = square = torch.zeros_like(project(gradients[0], *old))
    for step, g in enumerate(gradients, 1):
        _, mean, square = adam_direction(project(g, *old), mean, square, step)
    corrections = 1 - 0.9**4, 1 - 0.999**4
    same = rotate_moments(mean, square, old, old, corrections)
    torch.testing.assert_close(same, (mean, square))

    # signs and order of the directions: both moments follow exactly
    order = torch.randperm(old[0].shape[1] if old[0] is not None else old[1].shape[1])  # type: ignore[union-attr]
    signs = torch.where(torch.arange(len(order)) % 2 == 0, -1.0, 1.0).double()
    new = tuple(None if b is None else b[:, order] * signs for b in old)
    if old[0] is not None:
        mean_, square_ = signs[:, None] * mean[order], square[order]
    else:
        mean_, square_ = mean, square
    if old[1] is not None:
        mean_, square_ = mean_[:, order] * signs, square_[:, order]
    turned = rotate_moments(mean, square, old, new, corrections)
    torch.testing.assert_close(turned, (mean_, square_))

    # the same space, other coordinates: the first moment is that of the same gradients
    turn = torch.linalg.qr(random_tensor(len(order), len(order), seed=7, dtype=torch.float64)).Q
    new = tuple(None if b is None else b @ turn for b in old)
    turned = rotate_moments(mean, square, old, new, corrections)
    torch.testing.assert_close(project_back(turned[0], *new), project_back(mean, *old))
    assert (turned[1] >= 0).all()
    # the squares keep their sum over a whole basis (the trace of a covariance)
    torch.testing.assert_close(turned[1].sum(), square.sum())


def test_rotated_variances_add_up_with_squares() -> None:
    """Uncorrelated coordinates: the rotation of the second moment is what it says, exactly."""
    old = torch.eye(3, dtype=torch.float64)
    new = torch.linalg.qr(random_tensor(3, 3, seed=1, dtype=torch.float64)).Q
    mean, deviation = (
        torch.tensor([1.0, -2.0, 0.5]).double(),
        torch.tensor([0.3, 1.0, 2.0]).double(),
    )
    samples = (
        mean + deviation * torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3))).double()
    )  # (8, 3), independent
    got = rotate_moments(
        samples.mean(0)[:, None], samples.square().mean(0)[:, None], (old, None), (new, None)
    )
    turned = samples @ new
    torch.testing.assert_close(got[0][:, 0], turned.mean(0))
    torch.testing.assert_close(got[1][:, 0], turned.square().mean(0))


def test_reset_moments_start_their_step_count_again() -> None:
    for moments, expected in (
        ("reset", [1, 2, 3] * 2),
        ("keep", range(1, 7)),
        ("rotate", range(1, 7)),
    ):
        p = weight(TALL)
        optimizer = GaLore([p], rank=2, update_proj_gap=3, moments=moments)
        steps = []
        for g in some_gradients(p, 6):
            feed(optimizer, p, g)
            steps.append(int(optimizer.state[p]["step"]))
        assert steps == list(expected)


# -------------------------------------------------------------------------- when a basis is made


@pytest.mark.parametrize("size", [1e-23, 1e-20, 1.0, 1e18, 1e20])
def test_a_drifted_basis_is_renewed_when_its_share_has_fallen_and_only_then(size) -> None:
    p = nn.Parameter(torch.zeros(6, 8))
    optimizer = GaLore([p], rank=1, update_proj_gap=None, max_drift=0.3, weight_decay=0.0)
    renewed = []
    # the share of the first direction: 0.8 of it is 0.8, less than 0.7 of it is not enough
    for share in (0.8, 1.0, 0.8, 0.6, 0.57, 0.55, 0.0):
        g = torch.zeros(6, 8)
        g[0, 0], g[1, 1] = share**0.5, (1 - share) ** 0.5
        feed(optimizer, p, size * g)
        renewed.append(int(optimizer.state[p]["bases"]))
    assert renewed == [1, 1, 1, 1, 1, 2, 3]
    assert p.isfinite().all()
    torch.testing.assert_close(optimizer.state[p]["energy"], torch.tensor(1.0))


def test_drift_comes_on_top_of_the_gap() -> None:
    p = weight(TALL)
    optimizer = GaLore([p], rank=2, update_proj_gap=3, max_drift=0.999)
    g = gradient(TALL)
    feed(optimizer, p, *[g] * 7)
    assert optimizer.state[p]["bases"] == 3


@pytest.mark.parametrize("gap", [1, 3, None])
def test_a_gradient_of_zeros_freezes_no_arbitrary_basis(gap) -> None:
    for moments, drift in itertools.product(MOMENTS, (None, 0.5)):
        p = weight(TALL)
        optimizer = GaLore([p], rank=2, update_proj_gap=gap, moments=moments, max_drift=drift)
        g = gradient(TALL, 1)
        feed(optimizer, p, torch.zeros(TALL), torch.zeros(TALL), g)
        best = singular_basis(g.float(), 2, False, True, "gram")[1]
        torch.testing.assert_close(optimizer.state[p]["right"], best)
        assert p.isfinite().all()
        if gap == 3:  # a refresh falls on zeros: the old basis and the momentum stay until the next
            before = optimizer.state[p]["right"].clone()
            feed(optimizer, p, g, g)
            mean = optimizer.state[p]["exp_avg"].clone()
            feed(optimizer, p, torch.zeros(TALL))
            assert_same(optimizer.state[p]["right"], before)
            torch.testing.assert_close(optimizer.state[p]["exp_avg"], 0.9 * mean)
            h = gradient(TALL, 2)
            feed(optimizer, p, h)
            best = singular_basis(h.float(), 2, False, True, "gram")[1]
            torch.testing.assert_close(optimizer.state[p]["right"], best)


def test_a_shorter_gap_takes_effect_on_a_basis_in_use() -> None:
    p = weight(TALL)
    optimizer = GaLore([p], rank=2, update_proj_gap=100)
    feed(optimizer, p, *some_gradients(p, 6))
    optimizer.param_groups[0]["update_proj_gap"] = 3
    feed(optimizer, p, *some_gradients(p, 4))
    assert optimizer.state[p]["bases"] == 3


@pytest.mark.parametrize("size", [1e-20, 1e-8, 1.0, 1e10, 1e18])
@pytest.mark.parametrize("moments", MOMENTS)
def test_very_small_and_large_gradients_leave_finite_weights(size, moments) -> None:
    for kind, basis in itertools.product(PROJECTION_TYPES, BASES):
        p = weight(TALL)
        optimizer = GaLore(
            [p], rank=2, update_proj_gap=2, projection_type=kind, basis=basis, moments=moments
        )
        feed(optimizer, p, *(size * gradient(TALL, i) for i in range(5)))
        assert p.isfinite().all()
        if size != 1.0 and kind != "random":  # the space does not depend on the size
            q = weight(TALL)
            other = GaLore([q], rank=2, update_proj_gap=2, projection_type=kind, basis=basis)
            feed(other, q, *(gradient(TALL, i) for i in range(5)))
            for name in {"left", "right"} & other.state[q].keys():
                assert angle(optimizer.state[p][name], other.state[q][name]) < 1e-4


# ------------------------------------------------------------------- the conventions of torch


def test_vectors_scalars_and_groups_without_rank_are_adamw() -> None:
    shapes: tuple[tuple[int, ...], ...] = ((), (5,), (0, 4), (4, 0), (3, 4))
    ours = [weight(shape, seed=i) for i, shape in enumerate(shapes)]
    twins = [nn.Parameter(p.detach().clone()) for p in ours]
    a = GaLore([{"params": ours[:4], "rank": 2}, {"params": ours[4:]}], lr=0.1, scale=9.0)
    b = AdamW(twins, lr=0.1)
    for step in range(4):
        for p, q in zip(ours, twins, strict=True):
            p.grad = random_tensor(*p.shape, seed=step)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    assert_same(snapshot(a), snapshot(b))
    assert all(a.state_shapes(p) == b.state_shapes(q) for p, q in zip(ours, twins, strict=True))


def test_each_group_has_its_own_projection() -> None:
    p, q, v = weight(TALL), weight(WIDE), weight((3,))
    optimizer = GaLore([p], rank=2)
    optimizer.add_param_group({"params": [q, v], "rank": 3, "projection_type": "full"})
    for x in (p, q, v):
        x.grad = random_tensor(*x.shape)
    optimizer.step()
    moments = [tuple(optimizer.state[x]["exp_avg"].shape) for x in (p, q, v)]
    assert moments == [(7, 2), (3, 3), (3,)]
    with pytest.raises(TypeError, match="set"):
        GaLore([{"params": {p}, "rank": 2}])


# ---------------------------------------------------------------------------- saved and loaded


@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(d, marks=SLOW) for d in (*DTYPES[1:], torch.float16))]
)
@pytest.mark.parametrize("kind", PROJECTION_TYPES)
def test_a_run_resumes_bit_for_bit_in_the_middle_of_a_gap(kind, dtype) -> None:
    for stop, basis, moments in itertools.product((3, 4, 5), BASES, MOMENTS):
        options: Any = dict(
            lr=0.05, rank=2, update_proj_gap=4, projection_type=kind, basis=basis, moments=moments,
            seed=3, max_drift=None if stop == 4 else 0.9, fused=stop == 5,
        )  # fmt: skip
        p = weight(TALL, dtype=dtype)
        optimizer = GaLore([p], **options)
        gradients = some_gradients(p, 10)
        feed(optimizer, p, *gradients[:stop])
        saved = through_a_file([p.detach(), optimizer.state_dict()])
        feed(optimizer, p, *gradients[stop:])
        q = nn.Parameter(saved[0])
        resumed = GaLore([q], **options)
        resumed.load_state_dict(saved[1])
        for name, value in resumed.state[q].items():
            assert value.dtype == torch.promote_types(dtype, torch.float32) or not value.dim(), name
        feed(resumed, q, *gradients[stop:])
        assert_same(snapshot(resumed), snapshot(optimizer))


def test_loaded_state_is_a_copy_on_the_device_of_the_parameter() -> None:
    p = weight(TALL)
    optimizer = GaLore([p], rank=2)
    feed(optimizer, p, *some_gradients(p, 2))
    state = optimizer.state_dict()
    q = nn.Parameter(p.detach().clone())
    loaded = GaLore([q])
    loaded.load_state_dict(state)
    for name, value in loaded.state[q].items():
        assert value.data_ptr() != optimizer.state[p][name].data_ptr()
    m = nn.Parameter(torch.empty(TALL, device="meta"))
    for fused in (False, True):
        optimizer.param_groups[0]["fused"] = fused
        loaded = GaLore([m])
        loaded.load_state_dict(optimizer.state_dict())
        there = {name for name, value in loaded.state[m].items() if value.is_meta}
        # what is read back in every step stays on the CPU
        assert there == {"right", "exp_avg", "exp_avg_sq"} | ({"step"} if fused else set())
    wide = nn.Parameter(p.detach().double())  # a model that was turned to float64
    loaded = GaLore([wide])
    loaded.load_state_dict(state)
    feed(loaded, wide, *some_gradients(wide, 2))
    assert loaded.state[wide]["right"].dtype is torch.float64


def test_state_of_other_shapes_is_refused_and_options_come_with_a_state() -> None:
    def stepped(*shapes: tuple[int, ...], **options: Any) -> GaLore:
        optimizer = GaLore([weight(shape) for shape in shapes], **options)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = random_tensor(*p.shape)
        optimizer.step()
        return optimizer

    optimizer = stepped(TALL, (3,), rank=2)
    before = snapshot(optimizer)
    more = copy.deepcopy(optimizer.state_dict())
    more["state"][0]["left"] = torch.zeros(7, 2)
    for state, message in (
        (stepped(WIDE, (3,), rank=2).state_dict(), r"shape \(7, 4\) has shape"),
        (stepped((3,), TALL, rank=2).state_dict(), "has shape"),
        (more, r"'left' .* has shape \(7, 2\), expected None"),
        (stepped(TALL, rank=2).state_dict(), "size of"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
        assert_same(snapshot(optimizer), before)
    # its own options come with the state, and a parameter may have none yet
    other = GaLore([weight(TALL), weight((3,))], rank=3, projection_type="full")
    other.load_state_dict(stepped(TALL, (3,), rank=2).state_dict())
    assert other.param_groups[0]["rank"] == 2
    other.load_state_dict(GaLore([weight(TALL), weight((3,))], rank=2).state_dict())
    assert not other.state
    # max_drift may be turned on and off between a save and a load
    for first, then in ((None, 0.5), (0.5, None)):
        changed = stepped(TALL, (3,), rank=2, max_drift=first)
        changed.param_groups[0]["max_drift"] = then
        other.load_state_dict(changed.state_dict())


# --------------------------------------------------------------------------------- what it is for


def test_it_trains_a_matrix_of_full_rank_through_changing_bases() -> None:
    """The target has full rank, the steps have rank 2: only new bases reach all of it."""
    target = gradient((12, 8), dtype=torch.float32)
    losses = {}
    for gap in (10, None):
        p = nn.Parameter(torch.zeros(12, 8))
        optimizer = GaLore([p], 0.05, rank=2, scale=1.0, update_proj_gap=gap, weight_decay=0.0)
        for step in range(400):
            optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 400)
            feed(optimizer, p, p.detach() - target)
        losses[gap] = (p - target).square().sum().item()
    rest = torch.linalg.svdvals(target)[2:].square().sum().item()
    assert losses[None] == pytest.approx(rest, rel=0.02)
    assert losses[10] < 0.05 * rest


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_what_it_is_on_a_cpu() -> None:
    for kind, basis, fused in itertools.product(PROJECTION_TYPES, BASES, (False, True)):
        options: Any = dict(
            lr=0.1, rank=2, update_proj_gap=2, projection_type=kind, basis=basis, eps=0.03,
            moments="rotate", max_drift=0.9, fused=fused,
        )  # fmt: skip
        p = weight(TALL, dtype=torch.float64)
        q = nn.Parameter(p.detach().cuda())
        a, b = GaLore([p], **options), GaLore([q], **options)
        for step in range(6):
            if step == 3:  # a checkpoint that was read to the CPU
                b.load_state_dict(through_a_file(b.state_dict(), map_location="cpu"))
            feed(a, p, gradient(TALL, step))
            feed(b, q, gradient(TALL, step).cuda())
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=0, atol=1e-7)


def test_the_first_step_of_two_bases_is_not_rounding_noise() -> None:
    gradient = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    steps = {}
    for dtype in (torch.float64, torch.float32):
        for basis in ("svd", "gram"):
            p = torch.nn.Parameter(torch.zeros(96, 64, dtype=dtype))
            options = dict(rank=16, projection_type="full", basis=basis, weight_decay=0.0)
            optimizer = GaLore([p], **options)
            p.grad = gradient.to(dtype)
            optimizer.step()
            steps[dtype, basis] = p.detach().double()
    want = steps.pop((torch.float64, "svd"))
    for name, got in steps.items():
        assert (got - want).norm() / want.norm() < 1e-3, name
    low = project(gradient, *singular_basis(gradient, 16, True, True))
    assert (low - low.diag().diag()).abs().max() > 0  # there is noise to remove


def test_rounding_does_not_flip_a_basis() -> None:
    gradient = torch.randn(20, 12, generator=torch.Generator().manual_seed(0))
    for method in ("svd", "gram"):
        plain = singular_basis(gradient, 5, True, True, method)
        touched = singular_basis(gradient * (1 + 1e-6), 5, True, True, method)
        for a, b in zip(plain, touched, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
            assert (a.gather(0, a.abs().argmax(0, keepdim=True)) > 0).all()


@pytest.mark.parametrize("moments", ["keep", "rotate", "reset"])
@pytest.mark.parametrize("change", [{"rank": 4}, {"projection_type": "left"}, {"rank": 1}])
def test_options_changed_in_mid_run_take_effect_with_the_next_basis(moments, change) -> None:
    for basis in BASES:
        p = weight((9, 6))
        optimizer = GaLore([p], rank=2, update_proj_gap=3, moments=moments, basis=basis)
        for step, grad in enumerate(some_gradients(p, 7), 1):
            if step == 2:
                optimizer.param_groups[0].update(change)
            feed(optimizer, p, grad)
            shapes = {name: value.shape for name, value in optimizer.state[p].items()}
            assert shapes["right"] == (6, 2) if step < 4 else shapes == optimizer.state_shapes(p)
        assert torch.isfinite(p).all()


@pytest.mark.parametrize("basis", ["svd", "gram", "subspace"])
@pytest.mark.parametrize("shape", [(32, 20), (20, 32)])
def test_a_gradient_of_few_tokens_makes_no_steps_out_of_rounding(basis: str, shape) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(shape[0], 2, generator=generator) @ torch.randn(
        2, shape[1], generator=generator
    )
    p = torch.nn.Parameter(torch.zeros(shape))
    optimizer = GaLore([p], rank=8, lr=1.0, weight_decay=0.0, basis=basis)
    p.grad = gradient
    optimizer.step()
    u, _, vh = torch.linalg.svd(gradient.double(), full_matrices=False)
    step = p.detach().double()
    tall = shape[0] >= shape[1]
    inside = step @ vh[:2].mT @ vh[:2] if tall else u[:, :2] @ u[:, :2].mT @ step
    assert (step - inside).norm() < 1e-3 * step.norm()


def test_a_direction_far_above_rounding_is_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 2, generator=generator)).Q for n in (12, 9))
    for weak in (1e-2, 1e-3):
        p = torch.nn.Parameter(torch.zeros(12, 9))
        p.grad = left @ torch.diag(torch.tensor([1.0, weak])) @ right.mT
        GaLore([p], rank=2, lr=1.0, weight_decay=0.0, basis="svd").step()
        assert torch.linalg.svdvals(p.detach())[1] > 0.1, weak


def test_a_finite_gradient_makes_no_step_that_is_not() -> None:
    for basis in BASES:
        p = torch.nn.Parameter(torch.zeros(8, 6))
        optimizer = GaLore([p], rank=4, basis=basis)
        p.grad = torch.full((8, 6), 3e38)
        optimizer.step()
        assert torch.isfinite(p).all(), basis


def test_a_new_state_is_that_of_a_parameter_that_had_no_gradient() -> None:
    for moments, basis in itertools.product(MOMENTS, ("gram", "subspace")):
        weights = []
        for filled in (False, True):
            p = weight(TALL)
            options = dict(moments=moments, basis=basis)
            optimizer = GaLore([p], rank=2, update_proj_gap=2, **options)
            if filled:
                optimizer.state[p].update(optimizer.new_state(p, optimizer.param_groups[0]))
            feed(optimizer, p, *some_gradients(p, 5))
            weights.append(p)
        assert torch.equal(*weights), (moments, basis)


def test_a_copy_multiplies_as_the_original_does() -> None:
    optimizer = GaLore([weight(TALL)], rank=1)
    assert copy.deepcopy(optimizer).matmul is torch.matmul
    optimizer.matmul = onednn_matmul
    assert copy.deepcopy(optimizer).matmul is onednn_matmul
