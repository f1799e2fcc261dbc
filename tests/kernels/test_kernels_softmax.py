"""kernels/softmax.py: equal to torch.softmax in value and gradient, in one block and in several."""

from typing import Any

import kernel_checks
import pytest
import torch
from kernel_checks import (
    DEVICE,
    check_compiled,
    check_operator,
    each_dtype,
    numbers,
    poisoned,
    strided,
    upstreams,
)
from torch import Tensor

from lm_from_scratch.kernels import softmax as module
from lm_from_scratch.kernels.softmax import softmax, softmax_forward

INF = float("inf")


def reference(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


def by_column(like: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A row sums to 1, so the gradient of sum() is 0 and its rounding is nothing to compare: here
    the gradient with strides of 0 is one row of numbers, for all rows."""
    row = torch.randn(like.shape[-1], generator=generator, dtype=torch.float64)
    row = row.to(like.device, like.dtype)
    return {**upstreams(like, generator), "of sum()": row.expand(like.shape)}


def check(x: Tensor, dtype: torch.dtype, **options: Any) -> None:
    kernel_checks.check(softmax, reference, x, dtype=dtype, upstreams=by_column, **options)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several blocks without long rows."""
    monkeypatch.setattr(module, "BLOCK", 16)


@each_dtype
@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (2, 3, 100)], ids=str)
def test_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = numbers(*shape)
    if shape[-1] == 1:  # the gradient of a constant is 0, and nothing to compare
        x = x.detach()
    check(x, dtype)


@each_dtype
@pytest.mark.parametrize("width", [17, 37, 48])
@pytest.mark.usefixtures("small_blocks")
def test_rows_of_several_blocks(width: int, dtype: torch.dtype) -> None:
    """Ascending and descending rows: the largest number comes last, or first."""
    rising = torch.arange(width, dtype=torch.float64) / 3
    x = torch.stack([rising, -rising, numbers(width, grad=False)])
    check(x.requires_grad_(), dtype)


def test_a_row_longer_than_a_block() -> None:
    """The size that a GPU takes, where several threads share a row."""
    check(numbers(2, module.BLOCK + 37), torch.float32)


@each_dtype
def test_takes_any_strides(dtype: torch.dtype) -> None:
    check(numbers(5, 37), dtype, layout=strided)


@each_dtype
@pytest.mark.usefixtures("small_blocks")
def test_blocks_that_are_masked_out(dtype: torch.dtype) -> None:
    """-inf in whole blocks, in front, in the middle and behind: probability 0, never NaN."""
    x = numbers(4, 48, grad=False)
    x[0, :16] = x[1, 16:32] = x[2, 32:] = x[3, 1:] = -INF
    check(x.requires_grad_(), dtype)


@each_dtype
@pytest.mark.usefixtures("small_blocks")
def test_extreme_numbers(dtype: torch.dtype) -> None:
    """Largest and lowest numbers of the dtype, which stand for -inf in some masks."""
    info = torch.finfo(dtype)
    x = torch.zeros(4, 40, dtype=torch.float64)
    x[0] = info.min  # one value: uniform
    x[1, :20] = info.min
    x[2, 3] = info.max
    x[3] = torch.linspace(-100, 100, 40)
    check(x, dtype)


@each_dtype
@pytest.mark.usefixtures("small_blocks")
def test_nan_where_torch_has_nan(dtype: torch.dtype) -> None:
    """A row of -inf, a row with +inf, a row with NaN; the rows between them are not touched."""
    x = numbers(5, 37, grad=False).to(dtype).to(DEVICE)
    x[0], x[2, 20], x[4, 1] = -INF, INF, torch.nan
    with poisoned():
        y = softmax(x)
    assert torch.equal(y.isnan(), reference(x).isnan())
    assert y.isnan().all(-1).tolist() == [True, False, True, False, True]


def test_nothing_to_do() -> None:
    for shape in [(0, 5), (3, 0)]:
        empty = torch.empty(shape, device=DEVICE, requires_grad=True)
        y = softmax(empty)
        y.sum().backward()
        assert y.shape == empty.grad.shape == shape


def test_is_one_operator() -> None:
    x = numbers(5, 37).detach().float().to(DEVICE).requires_grad_()
    check_operator(softmax_forward, x)
    check_operator(softmax_forward, strided(x))
    check_compiled(softmax, x)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.tensor(1.0), "x is torch.float32 of shape ()"),
        (torch.ones(2, 3, dtype=torch.long), "x is torch.int64 of shape (2, 3)"),
        (torch.ones(2).double(), "x is torch.float64; kernels"),
    ],
)
def test_refuses(x: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match="softmax: ") as error:
        softmax(x.to(DEVICE))
    assert words in str(error.value)
