"""What the numbers of a config may be: a line for each limit, and one wording for all configs.

Each function reads the named ones of some ``numbers`` (``vars(self)`` of a dataclass), and raises
``ValueError`` with name, value and limit for the first that is outside.
"""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

Numbers = Mapping[str, Any]


def require(numbers: Numbers, limit: str, holds: Callable[[Any], bool], *names: str) -> None:
    """Raises ``ValueError`` unless ``holds`` of each; ``limit`` says in words what that means."""
    for name in names:
        if not holds(numbers[name]):
            raise ValueError(f"{name}={numbers[name]!r} {limit}")


def integers(numbers: Numbers, least: int, *names: str) -> None:
    """Whole numbers, ``least`` or more."""
    limit = f"must be an integer, at least {least}"
    require(numbers, limit, lambda n: type(n) is int and n >= least, *names)


def positive(numbers: Numbers, *names: str) -> None:
    """Finite numbers above 0."""
    require(numbers, "must be a positive number", lambda x: is_plain(x) and x > 0, *names)


def shares(numbers: Numbers, *names: str) -> None:
    """Shares of a whole that leave something of it, as of dropout."""
    require(numbers, "must be in [0, 1)", lambda x: is_plain(x) and 0 <= x < 1, *names)


def token_ids(numbers: Numbers, *names: str) -> None:
    """Tokens that the vocabulary has."""
    vocab_size = numbers["vocab_size"]
    limit = f"is not below vocab_size={vocab_size}: the model could never produce it"
    require(numbers, limit, lambda n: type(n) is int and 0 <= n < vocab_size, *names)


def is_number(x: Any) -> bool:
    """Whether ``x`` is a finite number, of Python or of NumPy; True and False are none."""
    return not isinstance(x, bool) and isinstance(x, Real) and math.isfinite(x)


def is_plain(x: Any) -> bool:
    """Whether ``x`` is a finite number of Python's own, as a config's must be: JSON holds them."""
    return isinstance(x, int | float) and is_number(x)


def said(numbers: Numbers, *names: str) -> list[str]:
    """Those that are not None, which stands for a number that is computed, or for none."""
    return [name for name in names if numbers[name] is not None]
