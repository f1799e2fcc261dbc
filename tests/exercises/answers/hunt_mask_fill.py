"""Answers to hunt_mask_fill: other right ones, and wrong ones of a second person."""

import math

import torch
import torch.nn.functional as F


def by_torch(q, k, v, visible):
    """The library's kernel, which is told what is visible by a bool mask."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def by_infinity(q, k, v, visible):
    """Minus infinity where a row has a key; the other rows are set aside."""
    empty = ~visible.any(-1, keepdim=True)
    scores = torch.where(visible | empty, q @ k.mT / math.sqrt(q.shape[-1]), -torch.inf)
    return (scores.float().softmax(-1).to(v.dtype) @ v).masked_fill(empty, 0.0)


def by_hand(q, k, v, visible):
    """The maximum over visible keys alone, sums in float64."""
    scores = q.double() @ k.double().mT / q.shape[-1] ** 0.5
    lowest = scores.masked_fill(~visible, -1e30)
    weights = (lowest - lowest.amax(-1, keepdim=True)).exp() * visible
    total = weights.sum(-1, keepdim=True).clamp(min=1e-9)
    return (weights / total @ v.double()).to(q.dtype)


def by_loop(q, k, v, visible):
    """Each query gets its visible keys, and no others."""
    rows = []
    for b in range(q.shape[0]):
        for t in range(q.shape[2]):
            seen = visible[b, 0, t]
            scores = (k[b][:, seen].float() @ q[b, :, t, :, None].float())[..., 0]
            weights = (scores / math.sqrt(q.shape[-1])).softmax(-1)
            rows.append((weights[:, None] @ v[b][:, seen].float())[:, 0])
    return torch.stack(rows).unflatten(0, (q.shape[0], -1)).transpose(1, 2).to(q.dtype)


RIGHT = [
    by_torch, by_infinity, by_hand, by_loop,
    # the NaN of a row without a key becomes 0
    {"torch.finfo(scores.dtype).min": "-torch.inf",
     ".masked_fill(hidden, 0.0)": ".nan_to_num()"},
]  # fmt: skip

FILLED = "scores.masked_fill(hidden, torch.finfo(scores.dtype).min)"
WEIGHTS = "scores.softmax(-1).masked_fill(hidden, 0.0)"
WIDE = {"q @ k.mT": "q.float() @ k.float().mT"}

WRONG = [
    ("rows without a key are a mean of hidden values, as where the lowest number is written",
     WIDE | {FILLED: "scores + hidden * -1e9", WEIGHTS: "scores.softmax(-1).to(v.dtype)"}),
    ("rows without a key are set to 0 at the end, when their gradient is NaN",
     {"torch.finfo(scores.dtype).min": "-torch.inf", ".masked_fill(hidden, 0.0)": "",
      "return weights @ v": "return torch.where(visible.any(-1)[..., None], weights @ v, 0.0)"}),
    ("weights are set to 0, then divided by their sum: the largest may have been hidden",
     WIDE | {FILLED: "scores", WEIGHTS: "scores.softmax(-1) * visible\n    weights = "
             "(weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)).to(v.dtype)"}),
    ("what one query sees, all see", {"~visible": "~visible.any(2, keepdim=True)"}),
]  # fmt: skip
