"""What the cases of exercises are made of: numbers from a generator, and a call to be refused."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import Parameter


def normal(
    g: Generator, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normal numbers of a shape: in float64 with all digits of it, else drawn in float32."""
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    return (torch.randn(shape, generator=g, dtype=drawn) * scale).to(dtype)


def integers(g: Generator, low: int, high: int, *shape: int) -> Tensor:
    """Whole numbers from low to high - 1."""
    return torch.randint(low, high, shape, generator=g)


def integer(g: Generator, low: int, high: int) -> int:
    """A whole number from low to high - 1."""
    return int(torch.randint(low, high, (), generator=g))


def decimals(g: Generator, names: str, sizes: int = 12) -> dict[str, float]:
    """A number for each letter of ``names``, with one digit after the point and either sign: none
    near 0, no two of one size. There are so many ``sizes``, from 0.3 on."""
    size = (3 + torch.randperm(sizes, generator=g)[: len(names)]) / 10
    sign = 1 - 2 * integers(g, 0, 2, len(names))
    numbers = [round(number, 1) for number in (size * sign).tolist()]
    return dict(zip(names, numbers, strict=True))


def scattered(x: Tensor) -> Tensor:
    """The same numbers in another order in memory: all axes the other way round; where that is
    their usual order, what is no number lies between them."""
    order = tuple(range(x.dim()))[::-1]
    other = x.permute(order).contiguous().permute(order)
    if not other.is_contiguous():
        return other
    between = torch.full_like(x, torch.nan if x.is_floating_point() else 1)
    return torch.stack([x, between], dim=-1)[..., 0]


def turned(value: Any, seen: dict[int, Tensor] | None = None) -> Any:
    """Arguments whose tensors are scattered, those in lists and dicts too. One that is there twice
    is one afterwards."""
    seen = {} if seen is None else seen
    is_weight = type(value) is Parameter
    if is_weight or (type(value) is Tensor and not value.requires_grad):
        if id(value) not in seen:
            other = scattered(value.detach())
            seen[id(value)] = Parameter(other, value.requires_grad) if is_weight else other
        return seen[id(value)]
    if type(value) in (list, tuple):
        return type(value)(turned(part, seen) for part in value)
    if type(value) is dict:
        return {key: turned(part, seen) for key, part in value.items()}
    return value


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
