"""Answers to lr_schedule: other right ones, and wrong ones of a second person."""

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
    rates = []
    for _ in range(steps + 1):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


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

CHECK = "if warmup >= steps:"
REFUSED = 'raise ValueError(f"warmup={warmup} must be shorter than steps={steps}")'
RISE = "return lr * step / warmup"
PROGRESS = "progress = min((step - warmup) / (steps - warmup), 1.0)"
RESULT = "return min_lr + cosine * (lr - min_lr)"


def a_tensor(*args, **kwargs):
    return torch.tensor(by_half_angle(*args, **kwargs), dtype=torch.float64)


WRONG = [
    ("the cosine ends one step early",
     {PROGRESS: "progress = min((step - warmup) / max(steps - warmup - 1, 1), 1.0)"}),
    ("a long warm-up is refused only where the cosine begins",
     {CHECK: "if step >= warmup >= steps:"}),
    ("a long warm-up is shortened", {REFUSED: "warmup = steps - 1"}),
    ("an assertion", {f"{CHECK}\n        {REFUSED}": "assert warmup < steps"}),
    ("steps are counted by calls",
     {"def learning_rate(": "CALLS = []\n\n\ndef learning_rate(",
      CHECK: f"CALLS.append(step)\n    step = len(CALLS)\n    {CHECK}"}),
    ("a division of whole numbers", {RISE: "return lr * (step // warmup)"}),
    ("a tensor", a_tensor),
    ("a factor for LambdaLR, not a rate",
     {RISE: "return step / warmup", RESULT: "return (min_lr + cosine * (lr - min_lr)) / lr"}),
    ("the cosine begins with step 1, under the warm-up",
     {f"    if step <= warmup:\n        {RISE}\n": "",
      PROGRESS: "progress = min(step / steps, 1.0)",
      RESULT: "return min(step / max(warmup, 1), 1.0) * (min_lr + cosine * (lr - min_lr))"}),
]  # fmt: skip

SURVIVORS = {
    "if step <= warmup:: step <= warmup => step < warmup": (
        "in step `warmup` the cosine has progress 0, and gives lr as well"
    )
}
