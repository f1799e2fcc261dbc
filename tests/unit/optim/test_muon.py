"""optim/muon.py: torch's Muon bit for bit, laws of a polar factor, and what it refuses."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.muon import COEFFICIENTS, Muon, orthogonalize, scale_of

F64 = torch.float64
SHAPES = {"tall": (48, 16), "wide": (16, 48), "square": (32, 32), "odd": (7, 13), "thin": (2, 65)}
DTYPES = (torch.float32, torch.bfloat16, F64)

#: Where five steps take singular values between a hundredth and all of the Frobenius norm.
LOW, HIGH = 0.68, 1.14


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*s, seed=i, dtype=dtype)) for i, s in enumerate(SHAPES.values())]


def set_gradients(params: list, step: int) -> None:
    for i, p in enumerate(params):
        p.grad = normal(*p.shape, seed=1000 * step + i, dtype=p.dtype) * 10.0 ** (i % 4 - 2)


def feed(optimizer: torch.optim.Optimizer, first: int, last: int) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, last):
        set_gradients(params, step)
        optimizer.step()
    return [p.detach().clone() for p in params]


def matrix(m: int, n: int, values: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix with these singular values, and its polar factor U V^T."""
    k = min(m, n)
    u, v = (torch.linalg.qr(normal(size, k, seed=seed + i)).Q for i, size in enumerate((m, n)))
    return u * values @ v.mT, u @ v.mT


# ---------------------------------------------------------------------- torch's, step by step

PLAIN: dict[str, Any] = dict(lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True)


def against_torch(dtype: torch.dtype = torch.float32, steps: int = 5, **options: object) -> None:
    """Weights and momentum equal those of ``torch.optim.Muon`` in every bit."""
    options = {"adjust_lr_fn": "original", **PLAIN, **options}
    ours, theirs = weights(dtype), weights(dtype)
    a = Muon(ours, ns_dtype="bfloat16", **options)
    b = torch.optim.Muon(theirs, **options)
    for step in range(steps):
        for params, optimizer in ((ours, a), (theirs, b)):
            set_gradients(params, step)
            optimizer.step()
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p, q), (tuple(p.shape), step)
            assert torch.equal(a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_equals_torch_bit_for_bit(dtype, nesterov, adjust_lr_fn) -> None:
    # torch divides a momentum that is in bfloat16 already by its norm, in place: see below
    if dtype != torch.bfloat16 or nesterov:
        against_torch(dtype, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_direction_does_not_write_into_the_momentum(dtype, nesterov) -> None:
    (p,) = (nn.Parameter(normal(6, 4, dtype=dtype)) for _ in range(1))
    optimizer = Muon([p], momentum=0.9, nesterov=nesterov, ns_dtype="bfloat16")
    want = torch.zeros_like(p)
    for step in range(4):
        set_gradients([p], step)
        optimizer.step()
        want = want.lerp(p.grad, 1 - 0.9)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], want)


@given(
    lr=st.floats(1e-4, 0.5), momentum=st.floats(0.0, 0.99), nesterov=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.01, 0.5]), ns_steps=st.integers(1, 8),
    ns_coefficients=st.sampled_from([COEFFICIENTS, (15 / 8, -10 / 8, 3 / 8)]),
)  # fmt: skip
def test_every_combination_of_options_equals_torch(**options: object) -> None:
    against_torch(steps=2, **options)


def in_float32(grad: Tensor, ns_coefficients: tuple, ns_steps: int, eps: float) -> Tensor:
    """torch's iteration on a tensor that will not become bfloat16."""
    X = SimpleNamespace(bfloat16=grad.float().clone, size=grad.size, shape=grad.shape)
    return TORCH_NS(X, ns_coefficients, ns_steps, eps)


TORCH_NS = torch.optim._muon._zeropower_via_newtonschulz


def test_in_float32_equals_torch_s_iteration_in_float32(monkeypatch) -> None:
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", in_float32)
    ours, theirs = weights(), weights()
    a = Muon(ours, adjust_lr_fn="original", **PLAIN)
    b = torch.optim.Muon(theirs, **PLAIN)
    for got, want in zip(feed(a, 0, 4), feed(b, 0, 4), strict=True):
        assert torch.equal(got, want)


def test_float32_and_bfloat16_are_the_same_step_but_for_rounding() -> None:
    ends = [
        feed(Muon(weights(), ns_dtype=dtype, **PLAIN), 0, 4) for dtype in ("float32", "bfloat16")
    ]
    starts = weights()
    for p, a, b in zip(starts, *ends, strict=True):
        moved = (a - p).norm()
        assert 0 < (a - b).norm() < 0.03 * moved


# ----------------------------------------------------------------- laws of the orthogonal factor


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("smallest", [0.05, 0.2, 1.0])
def test_same_directions_and_values_near_1(shape: tuple[int, int], smallest: float) -> None:
    k = min(shape)
    values = torch.linspace(math.log(smallest), 0, k, dtype=F64).exp()
    G, _ = matrix(*shape, values / values.norm())
    for factor in (1.0, 1e-5, 1e5):  # the size of a gradient does not matter
        found = orthogonalize(factor * G)
        u, _, vh = torch.linalg.svd(G, full_matrices=False)
        inside = u.mT @ found @ vh.mT  # diagonal: the same singular vectors
        torch.testing.assert_close(inside, inside.diagonal().diag(), atol=1e-9, rtol=0)
        torch.testing.assert_close(u @ inside @ vh, found, atol=1e-9, rtol=0)  # and no others
        assert inside.diagonal().min() > LOW and inside.diagonal().max() < HIGH


def scalar(x: Tensor, steps: int = 5) -> Tensor:
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        x = a * x + b * x**3 + c * x**5
    return x


def test_the_iteration_is_the_polynomial_of_each_singular_value() -> None:
    values = torch.tensor([1.0, 0.3, 0.03, 3e-3, 3e-4, 0.0], dtype=F64)
    G, _ = matrix(9, 6, values, seed=4)
    for steps in (1, 2, 5):
        found = torch.linalg.svdvals(orthogonalize(G, steps))
        want = scalar(values / values.norm(), steps).sort(descending=True).values
        torch.testing.assert_close(found, want, atol=1e-12, rtol=1e-9)


def test_the_band_of_five_steps() -> None:
    x = torch.linspace(1e-2, 1.0, 100_001, dtype=F64)
    band = scalar(x)
    assert band.min() > LOW and band.max() < HIGH
    assert scalar(torch.tensor(1e-3, dtype=F64)) < 0.5  # weak ones are still on their way
    assert 1.2 < scalar(torch.linspace(0, 1, 100_001, dtype=F64)).max() < 1.21  # and overshoot


def test_coefficients_that_converge_give_the_polar_factor() -> None:
    values = torch.linspace(0.2, 1.0, 12, dtype=F64)
    G, factor = matrix(20, 12, values)
    found = orthogonalize(G, 20, (15 / 8, -10 / 8, 3 / 8))
    torch.testing.assert_close(found, factor, atol=1e-12, rtol=0)


def test_turning_a_gradient_turns_its_direction() -> None:
    G, q = normal(8, 5), torch.linalg.qr(normal(8, 8, seed=1)).Q
    torch.testing.assert_close(orthogonalize(q @ G), q @ orthogonalize(G), atol=1e-12, rtol=0)
    torch.testing.assert_close(orthogonalize(G.mT), orthogonalize(G).mT, atol=1e-12, rtol=0)
    torch.testing.assert_close(orthogonalize(-G), -orthogonalize(G), atol=1e-12, rtol=0)


def test_a_tall_matrix_costs_what_a_wide_one_costs(monkeypatch) -> None:
    """The smaller Gram matrix is the one that is multiplied."""
    sides, addmm = [], torch.addmm

    def watched(x: Tensor, a: Tensor, b: Tensor, **options: float) -> Tensor:
        sides.append(a.shape[0])
        return addmm(x, a, b, **options)

    monkeypatch.setattr(torch, "addmm", watched)
    for shape in ((30, 4), (4, 30)):
        orthogonalize(normal(*shape))
    assert set(sides) == {4}


def test_gradients_flow_through_the_pure_function() -> None:
    assert torch.autograd.gradcheck(orthogonalize, normal(3, 4).requires_grad_())


@pytest.mark.parametrize("shape", [(512, 128), (128, 512), (128, 128)])
def test_steps_have_the_rms_that_the_scale_says(shape: tuple[int, int]) -> None:
    _, factor = matrix(*shape, torch.ones(128, dtype=F64))
    assert (scale_of(*shape) * factor).square().mean().sqrt() == pytest.approx(0.2)
    largest = torch.linalg.matrix_norm(scale_of(*shape, "original") * factor, 2)
    assert largest == pytest.approx(2.0 if shape == (512, 128) else 1.0)


# ------------------------------------------------------------------------ the class, by a formula


def test_the_class_is_the_formula() -> None:
    p = nn.Parameter(normal(6, 4))
    optimizer = Muon([p], lr=0.1, weight_decay=0.5, momentum=0.9, scale=3.0, ns_steps=3)
    want, mean = p.detach().clone(), torch.zeros(6, 4, dtype=F64)
    for step in range(4):
        set_gradients([p], step)
        mean = 0.9 * mean + 0.1 * p.grad
        ahead = 0.9 * mean + 0.1 * p.grad
        direction = orthogonalize(ahead, 3)
        want = (1 - 0.1 * 0.5) * want - 0.1 * 3.0 * 0.2 * math.sqrt(6) * direction
        optimizer.step()
        torch.testing.assert_close(p.detach(), want, atol=1e-12, rtol=1e-12)


def test_decay_alone() -> None:
    p = nn.Parameter(torch.full((3, 2), 2.0, dtype=F64))
    optimizer = Muon([p], lr=0.1, weight_decay=0.5, momentum=0.9)
    for _ in range(10):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3, 2), 2.0 * 0.95**10, dtype=F64))


def test_everything_that_is_no_matrix_is_left_to_AdamW() -> None:
    shapes = ((4,), (), (2, 3, 4, 5), (1, 6), (6, 1), (0, 3))

    def made() -> list[nn.Parameter]:
        return [nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(shapes)]

    options: dict[str, Any] = dict(lr=0.1, betas=(0.8, 0.9), weight_decay=0.2)
    a, b = Muon(made(), momentum=0.95, **options), AdamW(made(), **options)
    for got, want in zip(feed(a, 0, 3), feed(b, 0, 3), strict=True):
        assert torch.equal(got, want)
    (matrix,) = (nn.Parameter(normal(4, 3)) for _ in range(1))
    c, d = Muon([matrix], **options), AdamW([nn.Parameter(normal(4, 3))], **options)
    assert torch.equal(feed(c, 0, 3)[0], feed(d, 0, 3)[0])  # a group without momentum


def test_a_stack_of_experts_is_one_matrix_each() -> None:
    stack = nn.Parameter(normal(3, 6, 4))
    alone = [nn.Parameter(one.clone()) for one in stack.detach()]
    a, b = Muon([stack], momentum=0.9), Muon(alone, momentum=0.9)
    for step in range(3):
        set_gradients([stack], step)
        for one, grad in zip(alone, stack.grad, strict=True):
            one.grad = grad
        a.step()
        b.step()
    assert torch.equal(stack, torch.stack(alone))


# ----------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_only_a_matrix_has_directions(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"a tensor of shape \(.*\) must be a matrix"):
        orthogonalize(torch.ones(shape))


def test_a_gradient_of_zeros_moves_nothing_and_leaves_no_nan() -> None:
    assert torch.equal(orthogonalize(torch.zeros(3, 4)), torch.zeros(3, 4))
    tiny = orthogonalize(torch.full((3, 4), 1e-30))
    assert tiny.abs().max() < 1e-15  # rounding is not blown up
