"""A linear map as the matrix that it multiplies by."""

import torch
from torch import Tensor, nn


def plain_matrix(linear: nn.Linear) -> Tensor | None:
    """The weight (out, in) of a linear map that is nothing but ``x @ weight.T + bias``, so that
    products may be taken in another order. ``None`` for one that surgery has made more of it, or
    whose weight is no plain tensor: it has to be applied."""
    weight = linear.weight
    is_plain = type(linear) is nn.Linear and type(weight) in (Tensor, nn.Parameter)
    return weight if is_plain else None


class GroupedLinear(nn.Module):
    """A linear map for each group of ``x`` (B, T, G, K), to (B, T, G, N): a block-diagonal matrix,
    of which only the blocks are stored, as ``weight`` (G * N, K)."""

    def __init__(self, n_group: int, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.n_group = n_group
        self.weight = nn.Parameter(torch.empty(n_group * fan_out, fan_in))
        nn.init.normal_(self.weight, 0.0, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btgk,gnk->btgn", x, self.weight.unflatten(0, (self.n_group, -1)))
