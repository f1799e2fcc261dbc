"""Answers to yarn: other right ones, and wrong ones of a second person."""

import math

import torch


def as_in_transformers(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    """Two sets of speeds and a mask; a step is a very short ramp."""

    def correction(turns):
        return (head_dim * math.log(original_length / (turns * 2 * math.pi))) / (
            2 * math.log(theta)
        )

    low = max(math.floor(correction(beta_fast)), 0)
    high: float = min(math.ceil(correction(beta_slow)), head_dim - 1)
    if low == high:
        high += 0.001
    periods = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    ramp = torch.clamp((torch.arange(head_dim // 2).float() - low) / (high - low), 0, 1)
    mask = 1 - ramp
    speeds = (1.0 / (factor * periods)) * (1 - mask) + (1.0 / periods) * mask
    return speeds, 0.1 * math.log(factor) + 1.0


def by_loop(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    """Pair by pair, with the numbers of Python."""
    periods = math.log(original_length / (2 * math.pi))
    per_pair = 2 * math.log(theta) / head_dim
    first = max(math.floor((periods - math.log(beta_fast)) / per_pair), 0)
    last = math.ceil((periods - math.log(beta_slow)) / per_pair)
    speeds = []
    for i in range(head_dim // 2):
        speed = math.exp(-i * per_pair)
        if i <= first:
            speeds.append(speed)
        elif i >= last:
            speeds.append(speed / factor)
        else:
            share = (i - first) / (last - first)
            speeds.append(speed * (1 - share * (1 - 1 / factor)))
    return torch.tensor(speeds), 1 + math.log(factor) / 10


def by_lerp(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    """A straight line from one tensor to the other, in float64."""
    i = torch.arange(head_dim // 2, dtype=torch.float64)
    speeds = theta ** (-2 * i / head_dim)
    turns = torch.tensor([beta_fast, beta_slow], dtype=torch.float64)
    ends = head_dim / 2 * torch.log(original_length / (2 * math.pi * turns)) / math.log(theta)
    first, last = ends[0].floor().clamp(min=0), ends[1].ceil()
    share = torch.where(last > first, (i - first) / (last - first).clamp(min=1), (i > first) * 1.0)
    new = torch.lerp(speeds, speeds / factor, share.clamp(0, 1))
    return new.float(), math.log(factor**0.1 * math.e)


def by_pieces(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    """The pieces before, on and after the ramp, one after the other."""
    pairs = head_dim // 2
    first, last = (
        pairs * math.log2(original_length / turns / math.tau) / math.log2(theta)
        for turns in (beta_fast, beta_slow)
    )
    low, high = max(0, math.floor(first)), math.ceil(last)
    ramp = torch.linspace(1, 1 / factor, high - low + 1) if high > low else torch.ones(1)
    share = torch.cat([torch.ones(low), ramp, torch.full((pairs,), 1 / factor)])[:pairs]
    speeds = torch.logspace(0, -2 * (pairs - 1) / head_dim, pairs, base=theta)
    return speeds * share, 1.0 + 0.1 * math.log(factor)


RIGHT = [as_in_transformers, by_loop, by_lerp, by_pieces]

FIRST, LAST = "max(math.floor(pair(beta_fast)), 0)", "math.ceil(pair(beta_slow))"
WIDTH, FACTOR = "max(last - first, 1)", "0.1 * math.log(factor) + 1.0"

WRONG = [
    ("the factor of cosines and sines upside down", {FACTOR: f"1 / ({FACTOR})"}),
    ("the ends of the ramp are not rounded",
     {FIRST: "max(pair(beta_fast), 0)", LAST: "pair(beta_slow)", WIDTH: "(last - first)"}),
    ("beta_fast and beta_slow have changed places",
     {FIRST: FIRST.replace("fast", "slow"), LAST: LAST.replace("slow", "fast"),
      WIDTH: "(last - first)"}, "the ramp falls, where that of the table is a step"),
    ("the last pair of the ramp is at most D / 2", {LAST: f"min({LAST}, head_dim // 2)"}),
    ("always the length of Qwen2", {"original_length / (": "32768 / ("}),
    ("the speeds are float64", {"return speeds,": "return speeds.double(),"}),
]  # fmt: skip
