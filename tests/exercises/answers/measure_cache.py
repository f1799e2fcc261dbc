"""Other right answers to measure_cache."""

from bisect import bisect_right
from collections.abc import Callable
from fractions import Fraction

from lm_from_scratch.exercises.catalogue.measure_cache.checks import LONGEST, nbytes


def by_bisection(layers, budget, rows=1, number=2):
    """The first length that is too long, from the standard library."""

    def needed(tokens):
        return nbytes(layers, tokens, rows, number)

    if needed(2 * LONGEST) == needed(0):
        return None if needed(0) <= budget else 0
    return max(bisect_right(range(LONGEST), budget, key=needed) - 1, 0)


def by_slope(layers, budget, rows=1, number=2):
    """Two lengths give the line: what is there at the start, and what a token adds."""
    start = nbytes(layers, 0, rows, number)
    slope = nbytes(layers, 1, rows, number) - start
    if budget < start:
        return 0
    return int(Fraction(budget - start, slope)) if slope else None


def by_table(layers, budget, rows=1, number=2):
    """Numbers of a layer as a pair: at the start, and for each token."""
    pairs: dict[str, Callable[..., tuple[int, int]]] = {
        "full": lambda heads, width: (0, heads * width * 2),
        "sliding": lambda heads, width, window: (heads * width * 2 * window, 0),
        "latent": lambda width: (0, width),
        "state": lambda numbers: (numbers, 0),
    }
    told = [pairs[kind](*sizes) for kind, *sizes in layers]
    room = budget // (rows * number) - sum(start for start, _ in told)
    token = sum(each for _, each in told)
    return 0 if room < 0 else room // token if token else None


def by_doubling(layers, budget, rows=1, number=2):
    """Steps that double, and then halve."""
    length, step = 0, 1
    while step and length < LONGEST:
        fits = nbytes(layers, length + step, rows, number) <= budget
        length, step = (length + step, step * 2) if fits else (length, step // 2)
        if not fits and step > 1:
            step = step // 2
    return length if length < LONGEST else None


RIGHT = [by_bisection, by_slope, by_table, by_doubling]
