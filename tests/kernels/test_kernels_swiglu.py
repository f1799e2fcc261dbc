"""kernels/swiglu.py: equal to the reference in value and gradient, one operator for torch."""

import pytest
import torch
from kernel_checks import (
    DEVICE,
    check,
    check_compiled,
    check_operator,
    each_dtype,
    numbers,
    strided,
)

from lm_from_scratch.kernels.swiglu import swiglu, swiglu_forward
from lm_from_scratch.layers.gated_mlp import swiglu as reference


@each_dtype
@pytest.mark.parametrize("shape", [(1,), (5, 37), (2, 3, 700)], ids=str)
def test_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(swiglu, reference, numbers(*shape), numbers(*shape, seed=1), dtype=dtype)


@each_dtype
def test_takes_any_strides(dtype: torch.dtype) -> None:
    check(swiglu, reference, numbers(5, 37), numbers(5, 37, seed=1), dtype=dtype, layout=strided)


@each_dtype
def test_large_gates(dtype: torch.dtype) -> None:
    """Where exp(-gate) is infinite or 0, the sigmoid is 0 or 1, never NaN."""
    gate = torch.tensor([-200.0, -100.0, -30.0, 0.0, 30.0, 100.0, 200.0], dtype=torch.float64)
    check(swiglu, reference, gate.requires_grad_(), numbers(7), dtype=dtype)


def test_nothing_to_do() -> None:
    empty = torch.empty(0, 5, device=DEVICE, requires_grad=True)
    y = swiglu(empty, empty)
    y.sum().backward()
    assert y.shape == empty.grad.shape == (0, 5)


def test_is_one_operator() -> None:
    gate, up = (numbers(5, 37, seed=s).detach().float().to(DEVICE).requires_grad_() for s in (0, 1))
    check_operator(swiglu_forward, gate, up)
    check_operator(swiglu_forward, strided(gate), up)
    check_compiled(swiglu, gate, up)


@pytest.mark.parametrize(
    ("gate", "up", "words"),
    [
        (torch.ones(2, 3), torch.ones(3, 2), "gate is torch.float32 of shape (2, 3), up"),
        (torch.ones(2), torch.ones(2, dtype=torch.half), "up torch.float16"),
        (torch.ones(2).double(), torch.ones(2).double(), "gate is torch.float64; kernels"),
        (torch.ones(2), torch.ones(2, device="meta"), "up on meta; they must be on one"),
        (torch.arange(2), torch.arange(2), "gate is torch.int64; kernels compute in"),
        (torch.ones(2) + 1j, torch.ones(2) + 1j, "gate is torch.complex64; kernels"),
    ],
)
def test_refuses(gate: torch.Tensor, up: torch.Tensor, words: str) -> None:
    gate, up = (x if x.is_meta else x.to(DEVICE) for x in (gate, up))
    with pytest.raises(ValueError, match="swiglu: ") as error:
        swiglu(gate, up)
    assert words in str(error.value)


def test_forward_mode_is_refused() -> None:
    """torch would say that the derivative is 0."""
    x = torch.randn(3, device=DEVICE)
    with pytest.raises(ValueError, match="no derivatives in forward mode"):
        torch.func.jvp(lambda x: swiglu(x, x), (x,), (x,))
