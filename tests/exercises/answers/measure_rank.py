"""Other right answers to measure_rank."""

import math

import torch

from lm_from_scratch.exercises.catalogue.measure_rank.checks import NUMBERS


def by_bisection(shapes, budget, number=4):
    """Half of the ranks at a time."""

    def size(rank):
        held = 0
        for shape in shapes:
            if rank is None or len(shape) == 1:
                held += 2 * number * math.prod(shape)
            else:
                (m, n), r = shape, min(rank, *shape)
                held += 4 * (min(m, n) * r + 2 * (r * n if m < n else m * r))
        return held

    if size(None) <= budget:
        return None, size(None)
    good, bad = 0, 10**9
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if size(middle) <= budget else (good, middle)
    return (good, size(good)) if good else (0, 0)


def by_growth(shapes, budget, number=4):
    """From rank 0 up: what does one rank more take?"""
    whole = 2 * number * sum(map(math.prod, shapes))
    if whole <= budget:
        return None, whole
    matrices = [(min(shape), max(shape)) for shape in shapes if len(shape) > 1]
    used = whole - 2 * number * sum(a * b for a, b in matrices)
    rank = 0
    while True:
        more = sum(4 * a + 8 * b for a, b in matrices if rank < a)
        if used + more > budget or more == 0:
            return rank, used if rank else 0
        rank, used = rank + 1, used + more


def by_meta(shapes, budget, number=4):
    """Tensors on the meta device, which have a size and no memory."""
    dtype = torch.float32 if number == 4 else torch.bfloat16

    def size(rank):
        tensors = []
        for shape in shapes:
            if rank is None or len(shape) == 1:
                tensors += [torch.empty(shape, dtype=dtype, device="meta")] * 2
                continue
            m, n = shape
            r = min(rank, m, n)
            small, moment = ((m, r), (r, n)) if m < n else ((n, r), (m, r))
            tensors += [torch.empty(part, device="meta") for part in (small, moment, moment)]
        return sum(tensor.nbytes for tensor in tensors)

    if size(None) <= budget:
        return None, size(None)
    top = max(min(shape) for shape in shapes if len(shape) == 2)
    fits = [rank for rank in range(1, top + 1) if size(rank) <= budget]
    return (fits[-1], size(fits[-1])) if fits else (0, 0)


RIGHT = [
    by_bisection, by_growth, by_meta,
    # part by part
    {NUMBERS: "sum(side * sorted([short, rank])[0] for side in (short, long, long))"},
]  # fmt: skip

SURVIVORS = {
    "numbers += min(rank, short) * (short + 2 * long): "
    "min(rank, short) => min(short, rank)": "the smaller of two, in either order"
}
