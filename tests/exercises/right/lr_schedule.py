"""Other right answers to lr_schedule."""

import cmath
import math
from functools import cache
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR


def checked(steps, warmup):
    if not warmup < steps:
        raise ValueError("the warm-up is too long")


@cache
def table(steps, lr, min_lr, warmup):
    """All rates of a run by the schedulers of torch."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    cosine = CosineAnnealingLR(optimizer, T_max=steps - warmup, eta_min=min_lr)
    scheduler: Any = cosine
    if warmup:
        rise = LambdaLR(optimizer, lambda t: t / warmup)
        scheduler = SequentialLR(optimizer, [rise, cosine], milestones=[warmup])
    found = []
    for _ in range(steps + 1):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


def by_torch(step, steps, lr, min_lr=0.0, warmup=0):
    """The schedulers of torch, one after the other."""
    checked(steps, warmup)
    return table(steps, lr, min_lr, warmup)[step] if step <= steps else min_lr


def by_half_angle(step, steps, lr, min_lr=0.0, warmup=0):
    """The square of a cosine of half the angle, and a mean of both rates."""
    checked(steps, warmup)
    if step < warmup:
        return step * (lr / warmup)
    share = math.cos(math.pi / 2 * (min(step, steps) - warmup) / (steps - warmup)) ** 2
    return share * lr + (1 - share) * min_lr


def by_list(step, steps, lr, min_lr=0.0, warmup=0):
    """All rates of the run in one tensor."""
    checked(steps, warmup)
    t = torch.arange(steps + 1, dtype=torch.float64)
    cosine = (1 + torch.cos(math.pi * (t - warmup) / (steps - warmup))) / 2
    all_rates = torch.where(t < warmup, lr * t / max(warmup, 1), min_lr + (lr - min_lr) * cosine)
    return all_rates[min(step, steps)].item()


def by_turning(step, steps, lr, min_lr=0.0, warmup=0):
    """A pointer that is turned by the same angle in every step."""
    checked(steps, warmup)
    if step <= warmup:
        return sum(lr / warmup for _ in range(step))
    pointer, turn = 1 + 0j, cmath.exp(1j * math.pi / (steps - warmup))
    for _ in range(min(step, steps) - warmup):
        pointer *= turn
    return (lr + min_lr) / 2 + (lr - min_lr) / 2 * pointer.real


RIGHT = [by_torch, by_half_angle, by_list, by_turning]

# Automatic mutants of the solution that no case rejects, and why.
SURVIVORS = {
    "if step <= warmup:: step <= warmup => step < warmup": (
        "in step `warmup` the cosine has progress 0, and gives lr as well"
    )
}
