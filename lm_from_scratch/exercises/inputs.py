"""What the cases of exercises are made of: numbers from a generator, and a call to be refused."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor


def normal(
    g: Generator, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normal numbers of a shape, made in float32 and then converted."""
    return (torch.randn(shape, generator=g) * scale).to(dtype)


def integers(g: Generator, low: int, high: int, *shape: int) -> Tensor:
    """Whole numbers from low to high - 1."""
    return torch.randint(low, high, shape, generator=g)


def integer(g: Generator, low: int, high: int) -> int:
    """A whole number from low to high - 1."""
    return int(torch.randint(low, high, (), generator=g))


def strided(x: Tensor) -> Tensor:
    """The same numbers in another order in memory: its last two dimensions are transposed."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def refusal(error: type[Exception] = ValueError) -> Callable[..., str]:
    """A `use` that makes a call which must be refused: its result names what was raised.

    NotImplementedError passes through: it says that nothing was written yet.
    """

    def use(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
        try:
            function(*args, **kwargs)
        except NotImplementedError:
            raise
        except error:
            return f"raises {error.__name__}"
        return f"raises no {error.__name__}"

    return use
