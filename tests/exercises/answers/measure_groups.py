"""Other right answers to measure_groups."""

import torch

from lm_from_scratch.exercises.catalogue.measure_groups.checks import Choice, error
from lm_from_scratch.weights.int8 import Int8Weight


def by_loop(weight, sizes, bound):
    """From the largest size down, group by group."""
    total = float(weight.double().square().sum())
    for size in sorted(sizes, reverse=True):
        lost, groups = 0.0, 0
        for group in weight.reshape(-1, size):
            wide = group.double()
            scale = (wide.abs().max() / 127).to(weight.dtype).double()
            codes = (wide / scale).round().clamp(-127, 127) if scale else torch.zeros_like(wide)
            lost += float((wide - codes * scale).square().sum())
            groups += 1
        if (lost / total) ** 0.5 <= bound:
            return size, weight.numel() + groups * weight.dtype.itemsize, (lost / total) ** 0.5
    return None


def in_float32(weight, sizes, bound):
    """All of it in float32, with norms."""
    wide = weight.float()
    best: Choice = None
    for size in sizes:
        rows = wide.reshape(-1, size)
        step = (rows.abs().max(1, keepdim=True).values / 127).to(weight.dtype).float()
        back = torch.round(rows / step.where(step > 0, 1.0)).clamp(-127, 127) * step
        price = weight.numel() + len(rows) * weight.element_size()
        lost = float(torch.dist(rows, back) / torch.linalg.vector_norm(rows))
        if lost <= bound and (best is None or price < best[1]):
            best = (size, price, lost)
    return best


def by_the_package(weight, sizes, bound):
    """The weight of the package, and bytes from its parts."""
    prices = {}
    for size in sizes:
        if error(weight, size) <= bound:
            parts = Int8Weight.quantize(weight, size).parts().values()
            prices[sum(part.nbytes for part in parts)] = size
    if not prices:
        return None
    price, size = min(prices.items())
    return size, price, error(weight, size)


def by_remainder(weight, sizes, bound):
    """The error as what is left after the nearest multiple of the scale."""
    wide = weight.double()
    good: dict[int, float] = {}
    for size in sizes:
        groups = wide.reshape(len(wide), -1, size)
        scale = (groups.abs().amax(-1, keepdim=True) / 127).to(weight.dtype).double()
        step = scale.where(scale > 0, torch.inf)
        left = torch.where(
            scale > 0, groups - (groups / step).round().clamp(-127, 127) * scale, groups
        )
        if (lost := float(left.norm() / wide.norm())) <= bound:
            good[size] = lost
    if not good:
        return None
    (N, K), size = weight.shape, max(good)
    return size, N * K + N * (K // size) * weight.element_size(), good[size]


RIGHT = [by_loop, in_float32, by_the_package, by_remainder]

SURVIVORS = {
    "scale = (largest / 127).to(weight.dtype).double(): "
    "(largest / 127).to(weight.dtype).double() => (largest / 127).to(weight.dtype)": (
        "beside float64 groups it is taken as float64"
    ),
    "if error <= bound:: error <= bound => error < bound": "no error is equal to the bound",
    "codes = torch.where(scale == 0, 0, groups / scale).round(): 0 => 1": (
        "any code times a scale of 0 is 0"
    ),
}
