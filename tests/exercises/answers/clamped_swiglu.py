"""Answers to clamped_swiglu: other right ones, and wrong ones of a second person."""

import torch
import torch.nn.functional as F


def by_silu(both, alpha=1.702, limit=7.0):
    """A silu of the gate times alpha, over alpha."""
    pairs = both.unflatten(-1, (-1, 2))
    gate = pairs[..., 0].clamp(max=limit)
    up = F.hardtanh(pairs[..., 1], -limit, limit)
    return F.silu(alpha * gate) / alpha * (1 + up)


def by_minimum(both, alpha=1.702, limit=7.0):
    """Minimum and maximum, in float64."""
    gate, up = both.double().unflatten(-1, (-1, 2)).unbind(-1)
    bound = torch.tensor(limit, dtype=torch.float64)
    gate = torch.minimum(gate, bound)
    up = torch.maximum(torch.minimum(up, bound), -bound) + 1
    return (up * gate * torch.special.expit(alpha * gate)).to(both.dtype)


def by_softmax(both, alpha=1.702, limit=7.0):
    """A sigmoid is a softmax of a number and 0."""
    gate = torch.where(both[..., ::2] > limit, limit, both[..., ::2])
    up = both[..., 1::2]
    up = torch.where(up.abs() > limit, limit * up.sign(), up)
    share = torch.stack([alpha * gate, torch.zeros_like(gate)], -1).softmax(-1)[..., 0]
    return gate * share + up * gate * share


def by_columns(both, alpha=1.702, limit=7.0):
    """One feature after the other."""
    results = []
    for i in range(0, both.shape[-1], 2):
        gate, up = both[..., i].clamp(max=limit), both[..., i + 1].clamp(-limit, limit)
        results.append((1 + up) * gate * F.logsigmoid(alpha * gate).exp())
    return torch.stack(results, dim=-1)


RIGHT = [by_silu, by_minimum, by_softmax, by_columns]

GATE, UP = "gate.clamp(max=limit)", "up.clamp(min=-limit, max=limit)"

WRONG = [
    ("the limit is on the gate times alpha", {GATE: "(alpha * gate).clamp(max=limit) / alpha"}),
    ("up ends at the limit after the 1 is added", {"(up + 1)": "(up + 1).clamp(max=limit)"}),
    ("everything is cut off from above alone", {UP: "up.clamp(max=limit)"}),
    ("the gate has the limits of up, and up those of the gate",
     {GATE: "gate.clamp(-limit, limit)", UP: "up.clamp(max=limit)"}),
    ("NaN becomes 0",
     {"torch.sigmoid(alpha * gate)": "(1 / (1 + torch.exp(-alpha * gate))).nan_to_num()"}),
    ("up is halved: 1 + tanh", {UP: "torch.tanh(up)"}),
]  # fmt: skip
