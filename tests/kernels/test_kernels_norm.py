"""kernels/norm.py: equal to norm.rms_norm in value and gradient, the same bits at every run."""

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
from torch import Tensor

from lm_from_scratch.kernels import norm as module
from lm_from_scratch.kernels.norm import rms_norm, rms_norm_forward
from lm_from_scratch.layers.norm import rms_norm as reference


@pytest.fixture
def two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward walks over several blocks of rows in each program."""
    monkeypatch.setattr(module, "PROGRAMS", 2)


@each_dtype
@pytest.mark.parametrize("shape", [(37,), (5, 20), (2, 3, 700)], ids=str)
def test_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(rms_norm, reference, numbers(*shape), numbers(shape[-1], seed=1), dtype=dtype)


@each_dtype
@pytest.mark.parametrize("rows", [31, 32, 65, 97])
@pytest.mark.usefixtures("two_programs")
def test_programs_that_walk(rows: int, dtype: torch.dtype) -> None:
    """32 rows of 37 numbers are a block: 1 to 4 blocks, the last one partly empty."""
    assert module.blocks(37)["ROWS"] == 32
    check(rms_norm, reference, numbers(rows, 37), numbers(37, seed=1), dtype=dtype)


@pytest.mark.usefixtures("two_programs")
def test_a_wide_row() -> None:
    check(rms_norm, reference, numbers(3, 8190), numbers(8190, seed=1), dtype=torch.float32)


@each_dtype
def test_takes_any_strides(dtype: torch.dtype) -> None:
    def layout(x: Tensor) -> Tensor:  # of a weight: every second number
        return x.repeat_interleave(2)[::2] if x.dim() == 1 else strided(x)

    check(rms_norm, reference, numbers(2, 5, 37), numbers(37, seed=1), dtype=dtype, layout=layout)


@each_dtype
def test_short_and_long_tokens(dtype: torch.dtype) -> None:
    """Where eps is most of the root, where squares overflow float16, and a token of zeros."""
    weight = numbers(301, seed=1)
    one_of_zeros = numbers(9, 301, grad=False)
    one_of_zeros[4] = 0
    for x in (numbers(9, 301, scale=1e-3), numbers(9, 301, scale=3000.0), one_of_zeros):
        for eps in (1e-6, 1e-4):
            x = x.detach().requires_grad_()
            check(rms_norm, reference, x, weight, eps, dtype=dtype)


@each_dtype
def test_rounds_before_the_weight(dtype: torch.dtype) -> None:
    """As the published models do; torch's own function rounds once, at the end."""
    x, weight = (x.detach().to(dtype).to(DEVICE) for x in (numbers(64, 37), numbers(37, seed=1)))
    ours, want = rms_norm(x, weight), reference(x, weight)
    if dtype != torch.float32:
        other = torch.nn.functional.rms_norm(x, (37,), weight, 1e-6)
        assert (ours == want).float().mean() > 0.99
        assert (other == want).float().mean() < 0.9


def test_a_weight_of_another_dtype() -> None:
    """Half-precision activations and a float32 weight, as mixed precision has them."""

    def mixed(function):
        return lambda x, weight: function(x, weight.to(torch.promote_types(x.dtype, torch.float32)))

    check(mixed(rms_norm), mixed(reference), numbers(5, 37), numbers(37, seed=1),
          dtype=torch.float16, name="rms_norm with a float32 weight")  # fmt: skip
    x = torch.ones(2, 3, dtype=torch.half, device=DEVICE)
    assert rms_norm(x, torch.ones(3, device=DEVICE)).dtype == torch.float32


@pytest.mark.usefixtures("two_programs")
def test_the_same_bits_each_time() -> None:
    x, weight = (x.detach().float().to(DEVICE) for x in (numbers(97, 37), numbers(37, seed=1)))
    x.requires_grad_()
    weight.requires_grad_()
    y = rms_norm(x, weight)
    first, second = (
        torch.autograd.grad(y.square().sum(), (x, weight), retain_graph=True) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_one_gradient_of_two() -> None:
    x, weight = (x.detach().float().to(DEVICE) for x in (numbers(5, 37), numbers(37, seed=1)))
    for leaf in (x, weight):
        leaf.requires_grad_()
        (got,) = torch.autograd.grad(rms_norm(x, weight).square().sum(), leaf)
        (want,) = torch.autograd.grad(reference(x, weight).square().sum(), leaf)
        torch.testing.assert_close(got, want)
        leaf.requires_grad_(False)


def test_nothing_to_do() -> None:
    empty = torch.empty(0, 5, device=DEVICE, requires_grad=True)
    weight = torch.ones(5, device=DEVICE, requires_grad=True)
    y = rms_norm(empty, weight)
    y.sum().backward()
    assert y.shape == empty.grad.shape == (0, 5)
    assert torch.equal(weight.grad, torch.zeros(5, device=DEVICE))


def test_is_one_operator() -> None:
    x, weight = (x.detach().float().to(DEVICE) for x in (numbers(5, 37), numbers(37, seed=1)))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    check_operator(rms_norm_forward, x, weight, 1e-6)
    check_operator(rms_norm_forward, strided(x), weight, 1e-6)
    check_compiled(rms_norm, x, weight)


@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        (torch.ones(2, 3), torch.ones(4), "x has shape (2, 3), weight (4,)"),
        (torch.ones(2, 3), torch.ones(1, 3), "weight (1, 3)"),
        (torch.tensor(1.0), torch.ones(1), "x has shape (), weight (1,)"),
        (torch.ones(2, 8193), torch.ones(8193), "rows of 8193 numbers; the kernel holds"),
        (torch.ones(2, 0), torch.ones(0), "rows of 0 numbers; the kernel holds a row of 1 to 8192"),
        (torch.ones(2, 3).double(), torch.ones(3), "x is torch.float64; kernels"),
        (torch.ones(2, 3), torch.ones(3, device="meta"), "weight on meta; they must be on one"),
    ],
)
def test_refuses(x: Tensor, weight: Tensor, words: str) -> None:
    x, weight = (t if t.is_meta else t.to(DEVICE) for t in (x, weight))
    with pytest.raises(ValueError, match="rms_norm: ") as error:
        rms_norm(x, weight)
    assert words in str(error.value)
