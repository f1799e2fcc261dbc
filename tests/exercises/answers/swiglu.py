"""Answers to swiglu: other right ones, and wrong ones of a second person."""

import torch
import torch.nn.functional as F
from torch import nn


def by_torch(x, gate, up, down):
    """The library's own silu and linear maps."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def by_einsum(x, gate, up, down):
    """The sigmoid as a softmax of two, by its logarithm."""
    z = torch.einsum("...c,ic->...i", x, gate)
    u = torch.einsum("...c,ic->...i", x, up)
    return torch.einsum("...i,ci->...c", z * F.logsigmoid(z).exp() * u, down)


def by_one_matrix(x, gate, up, down):
    """Gate and up in one matrix, in float64."""
    both = x.double() @ torch.cat([gate, up]).double().T
    z, u = both.chunk(2, dim=-1)
    return (0.5 * z * (1 + torch.tanh(z / 2)) * u @ down.double().T).to(x.dtype)


def by_feature(x, gate, up, down):
    """One of the I features after the other."""
    total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for w, v, out in zip(gate, up, down.T, strict=True):
        share = F.silu((x * w).sum(-1, keepdim=True)) * (x * v).sum(-1, keepdim=True)
        total = total + share * out
    return total.to(x.dtype)


def by_modules(x, gate, up, down):
    """Linear layers without biases, whose weights are replaced for the call."""
    maps = []
    for weight in (gate, up, down):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        maps.append(lambda y, n=layer, w=weight: torch.func.functional_call(n, {"weight": w}, y))
    return maps[2](F.silu(maps[0](x)) * maps[1](x))


RIGHT = [by_torch, by_einsum, by_one_matrix, by_feature, by_modules]

PASSED = "z * torch.sigmoid(z)"

WRONG = [
    ("down is not transposed",
     {"@ down.T": "@ (down if down.shape[0] == down.shape[1] else down.T)"}),
    ("z is limited before exp", {"z = x @ gate.T": "z = (x @ gate.T).clamp(-80, 80)"}),
    ("NaN becomes 0", {PASSED: "(z * z.exp() / (1 + z.exp())).nan_to_num()"}),
    ("the hard swish", {PASSED: "F.hardswish(z)"}),
    ("the weights are detached",
     {"gate.T": "gate.data.T", "up.T": "up.data.T", "down.T": "down.data.T"}),
]  # fmt: skip
