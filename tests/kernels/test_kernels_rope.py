"""kernels/rope.py: equal to the reference for every layout, and the gradient is a turn back."""

from collections.abc import Callable

import pytest
import torch
from kernel_checks import (
    DEVICE,
    MARGIN,
    Guarded,
    check,
    check_compiled,
    check_operator,
    each_dtype,
    numbers,
    strided,
)
from torch import Tensor

from lm_from_scratch.kernels import rope
from lm_from_scratch.kernels.rope import apply_rope, apply_rope_interleaved, turn
from lm_from_scratch.layers import rope as reference

each_pairing = pytest.mark.parametrize("name", ["apply_rope", "apply_rope_interleaved"])


def angles(rows: int, T: int, D: int) -> tuple[Tensor, Tensor]:
    """Positions that differ between the rows, and large ones."""
    positions = torch.arange(T)[None] + 1000 * torch.arange(rows)[:, None]
    cos, sin = reference.rotation(positions, reference.inverse_frequencies(D, 10000.0))
    return cos.to(DEVICE), sin.to(DEVICE)


def check_rope(
    name: str,
    x: Tensor,
    dtype: torch.dtype,
    rows: int = 1,
    layout: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    guards = [Guarded(angle) for angle in angles(rows, x.shape[2], x.shape[3])]
    cos, sin = (guard.tensor for guard in guards)
    check(
        lambda x: getattr(rope, name)(x, cos, sin),
        lambda x: getattr(reference, name)(x, cos, sin),
        x,
        dtype=dtype,
        name=name,
        layout=layout,
    )
    for guard in guards:
        guard.assert_untouched()


def tokens_first(x: Tensor) -> Tensor:
    """(B, H, T, D) as a projection leaves it: (B, T, H, D) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def between_others(x: Tensor) -> Tensor:
    """The queries of one wide projection: keys and values stand between the tokens."""
    B, H, T, D = x.shape
    wide = torch.empty(B, T, 3 * H * D, dtype=x.dtype, device=x.device)
    queries = wide[..., H * D : 2 * H * D].view(B, T, H, D).transpose(1, 2)
    return queries.copy_(x)


@each_dtype
@each_pairing
@pytest.mark.parametrize(
    ("shape", "rows"),
    [((2, 3, 37, 20), 2), ((2, 3, 5, 20), 1), ((1, 1, 1, 2), 1), ((1, 2, 3, 256), 1)],
    ids=str,
)
def test_equals_the_reference(
    name: str, shape: tuple[int, ...], rows: int, dtype: torch.dtype
) -> None:
    check_rope(name, numbers(*shape), dtype, rows)


@each_dtype
@pytest.mark.parametrize("layout", [tokens_first, between_others, strided])
def test_takes_any_strides(layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    check_rope("apply_rope", numbers(2, 3, 7, 20), dtype, 2, layout)


def test_the_result_lies_as_x_does() -> None:
    """And so does the gradient, so that nothing behind it in the backward pass copies."""
    x = tokens_first(torch.randn(2, 3, 7, 20, device=DEVICE)).requires_grad_()
    y = apply_rope(x, *angles(1, 7, 20))
    (gradient,) = torch.autograd.grad(y, x, tokens_first(torch.ones_like(y)))
    assert y.stride() == gradient.stride() == x.stride() != x.contiguous().stride()


def test_writes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    x, guards, empty_like = torch.randn(2, 3, 7, 20, device=DEVICE), [], torch.empty_like

    def guarded(like: Tensor) -> Tensor:
        guards.append(Guarded(empty_like(like)))
        guards[-1].memory.fill_(7)
        return guards[-1].tensor

    angle = angles(1, 7, 20)
    monkeypatch.setattr(torch, "empty_like", guarded)
    y = apply_rope(tokens_first(x), *angle)
    monkeypatch.undo()
    (guard,) = guards
    assert guard.tensor.data_ptr() == y.data_ptr() and (y != 7).all()
    assert (guard.memory[:MARGIN] == 7).all() and (guard.memory[-MARGIN:] == 7).all()


def test_angles_with_strides() -> None:
    x = torch.randn(2, 3, 7, 20, device=DEVICE)
    cos, sin = angles(1, 7, 20)
    expected = apply_rope(x, cos, sin)
    cos, sin = cos.expand(2, 1, 7, 10), sin.mT.contiguous().mT.expand(2, 1, 7, 10)
    assert torch.equal(apply_rope(x, cos, sin), expected)


@each_pairing
def test_the_gradient_can_be_differentiated(name: str) -> None:
    x, upstream = (torch.randn(1, 2, 5, 6, device=DEVICE, requires_grad=True) for _ in range(2))
    y = getattr(rope, name)(x, *angles(1, 5, 6))
    (gradient,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    (second,) = torch.autograd.grad(gradient, upstream, x)
    torch.testing.assert_close(second, y)  # forth, back and forth


@pytest.mark.parametrize("shape", [(0, 3, 5, 4), (2, 0, 5, 4), (2, 3, 0, 4), (2, 3, 5, 0)])
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device=DEVICE, requires_grad=True)
    angle = torch.empty(1, 1, shape[2], shape[3] // 2, device=DEVICE)
    y = apply_rope(x, angle, angle)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


def test_is_one_operator() -> None:
    x = torch.randn(2, 3, 7, 20, device=DEVICE, requires_grad=True)
    cos, sin = angles(2, 7, 20)
    for leaf in (x, tokens_first(x), between_others(x.detach()).requires_grad_()):
        check_operator(turn, leaf, cos, sin, False, False)
    check_compiled(lambda x: apply_rope(x, cos, sin), x)
    check_compiled(lambda x: apply_rope_interleaved(x, cos, sin), tokens_first(x))


X, ANGLE = torch.ones(2, 3, 5, 4), torch.ones(1, 1, 5, 2)


@pytest.mark.parametrize(
    ("x", "cos", "sin", "words"),
    [
        (X[0], ANGLE, ANGLE, "of shape (3, 5, 4); it must be (B, H, T, D)"),
        (torch.ones(2, 3, 5, 3), ANGLE, ANGLE, "D even"),
        (X.long(), ANGLE, ANGLE, "x is torch.int64"),
        (X.double(), ANGLE, ANGLE, "x is torch.float64; kernels"),
        (X, ANGLE[:, :, :4], ANGLE, "cos (1, 1, 4, 2); cos and sin must both have (2, 1, 5, 2)"),
        (X, ANGLE, ANGLE.expand(2, 1, 5, 2), "sin (2, 1, 5, 2); cos and sin must both"),
        (X, ANGLE.expand(3, 1, 5, 2), ANGLE.expand(3, 1, 5, 2), "cos (3, 1, 5, 2)"),
        (X.half(), ANGLE.half(), ANGLE, "cos is torch.float16; angles must be torch.float32"),
        (X, ANGLE, ANGLE.clone().requires_grad_(), "sin requires a gradient"),
        (X, ANGLE, ANGLE.to("meta"), "sin on meta; they must be on one"),
    ],
)
def test_refuses(x: Tensor, cos: Tensor, sin: Tensor, words: str) -> None:
    x, cos, sin = (
        t if t.is_meta else t.detach().to(DEVICE).requires_grad_(t.requires_grad)
        for t in (x, cos, sin)
    )
    with pytest.raises(ValueError, match="apply_rope: ") as error:
        apply_rope(x, cos, sin)
    assert words in str(error.value)
