"""limits.py: what a config's numbers may be."""

import math

import numpy as np
import pytest

from lm_from_scratch.limits import integers, is_number, positive, require, said, shares, token_ids


@pytest.mark.parametrize(
    ("check", "inside", "outside"),
    [
        (lambda n: integers(n, 1, "x"), [1, 2**70], [0, -1, 1.0, True, "1", None, math.nan]),
        (lambda n: integers(n, 0, "x"), [0, 1], [-1, False]),
        (
            lambda n: positive(n, "x"),
            [1e-30, 1, 2.5, np.float64(0.5)],
            [0, -1.0, math.inf, math.nan, np.float32(1), True, "1", None],
        ),
        (lambda n: shares(n, "x"), [0, 0.0, 0.999], [1, 1.0, -0.1, math.nan, "0.5", None]),
        (lambda n: token_ids({**n, "vocab_size": 5}, "x"), [0, 4], [5, -1, 2.0, True, [2], None]),
    ],
)
def test_limits(check, inside, outside) -> None:
    for value in inside:
        check({"x": value, "another": None})
    for value in outside:
        with pytest.raises(ValueError, match=r"^x=") as refused:
            check({"x": value, "another": None})
        assert f"x={value!r} " in str(refused.value)


def test_numpys_numbers_are_numbers_and_truth_is_none() -> None:
    assert all(map(is_number, [0, -1.5, np.float32(0.5), np.float16(2), np.int64(3)]))
    for other in (True, np.True_, np.float32("nan"), np.float64("inf"), np.ones(1), "1", None):
        assert not is_number(other)


def test_the_first_outside_is_named_and_none_is_asked_about_apart() -> None:
    numbers = {"a": 2, "b": 3, "c": None}
    with pytest.raises(ValueError, match=r"^b=3 is odd$"):
        require(numbers, "is odd", lambda n: n % 2 == 0, "a", "b", "c")
    assert said(numbers, "a", "c") == ["a"]
