"""limits.py: what a config's numbers may be."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from lm_from_scratch.limits import (
    Computed,
    Count,
    NotNegative,
    Positive,
    Share,
    TokenId,
    TokenIds,
    Whole,
    check,
    multiple_of,
    require,
)

NO_NUMBERS = [None, True, "1", [], [1], {}, math.nan, math.inf, 10**30, 10**400]


@pytest.mark.parametrize(
    ("kind", "inside", "outside"),
    [
        (Count, [1, 2**30], [0, -1, 1.0, 2**31, *NO_NUMBERS]),
        (Whole, [0, 1, 2**62], [-1, False, *NO_NUMBERS]),
        (Computed, [1, 2**30, None], [0, 1.0, 2**31, *NO_NUMBERS[1:]]),
        (Positive, [1e-30, 1, 2.5, np.float64(0.5)], [0, -1.0, np.float32(1), *NO_NUMBERS]),
        (NotNegative, [0, 0.0, 3], [-1e-9, *NO_NUMBERS]),
        (Share, [0, 0.0, 0.999], [1, 1.0, -0.1, "0.5", *NO_NUMBERS]),
        (int, [0, -5], [0.5, *NO_NUMBERS]),
        (bool, [True, False], [0, 1, None, "true", np.True_]),
        (str, ["", "a"], [None, 1, ["a"]]),
        (Literal["a", "b"], ["a", "b"], ["c", None, [], {}]),
    ],
)
def test_limits(kind: Any, inside: list[Any], outside: list[Any]) -> None:
    for value in inside:
        require(kind, x=value)
    for value in outside:
        with pytest.raises(ValueError, match=r"^x=") as refused:
            require(kind, x=value)
        assert "\n" not in str(refused.value)


@dataclass
class Config:
    n_head: Count = 2
    n_embd: Annotated[Count, multiple_of("n_head")] = 4
    vocab_size: Count = 5
    token: TokenId | None = None
    ends: TokenIds | None = None

    def __post_init__(self) -> None:
        check(self)


@pytest.mark.parametrize(
    "given", [{}, {"n_embd": 6}, {"token": 4}, {"ends": 0}, {"ends": (4,)}, {"ends": (0, 4)}]
)
def test_a_config_inside_its_limits(given: dict[str, Any]) -> None:
    Config(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_embd": 5}, "n_embd=5 is not a multiple of n_head=2"),
        ({"n_embd": None}, "n_embd=None must be an integer, at least 1"),
        ({"n_head": 0}, "n_head=0 must be an integer, at least 1"),  # before dividing by it
        ({"vocab_size": "5", "token": 4}, "vocab_size='5' must be an integer, at least 1"),
        *(
            ({name: value}, f"{name}={value!r} is not below vocab_size=5: ")
            for name, values in {
                "token": [5, -1, 2.0, True, [2], (2,), ()],
                "ends": [5, -1, 2.0, True, [2], (2, 5), (True,), (), ((1,),), "12"],
            }.items()
            for value in values
        ),
    ],
)
def test_a_config_outside_names_field_value_and_limit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        Config(**given)
    assert str(refused.value).startswith(message)


def test_whatever_the_value_the_message_is_one_short_line() -> None:
    nested: Any = 1
    for _ in range(100_000):
        nested = [nested]
    for value in (nested, "a\n" * 10**6, list(range(10**6)), {"a": {"b": {"c": {"d": 1}}}}):
        with pytest.raises(ValueError) as refused:
            require(Count, x=value)
        assert len(str(refused.value)) < 400 and "\n" not in str(refused.value)
    while isinstance(nested, list):  # freed one by one
        nested = nested.pop()
