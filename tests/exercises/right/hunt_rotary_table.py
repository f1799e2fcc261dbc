"""Other right answers to hunt_rotary_table."""

import torch
from torch import nn

from lm_from_scratch.exercises.catalogue.hunt_rotary_table.checks import Rebuilt, Table


class Numbers(nn.Module):
    """Speeds as numbers of Python, and a column for each."""

    def __init__(self, dim, theta=10000.0):
        super().__init__()
        self.speeds = [theta ** (-2 * i / dim) for i in range(dim // 2)]

    def forward(self, x, positions, key_length):
        angles = torch.stack([positions * speed for speed in self.speeds], dim=-1).unsqueeze(1)
        return torch.cos(angles).type_as(x), torch.sin(angles).type_as(x)


class Complex(nn.Module):
    """Real and imaginary part of a number of length 1, in float64."""

    def __init__(self, dim, theta=10000.0):
        super().__init__()
        self.dim, self.theta = dim, theta

    def forward(self, x, positions, key_length):
        i2 = torch.arange(0, self.dim, 2, dtype=torch.float64)
        angles = torch.einsum("bt,f->btf", positions.double(), self.theta ** (-i2 / self.dim))
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        return turn.real.to(x.dtype), turn.imag.to(x.dtype)


RIGHT = [Table, Rebuilt, Numbers, Complex]

# Automatic mutants of the solution that no case rejects, and why.
SURVIVORS = {
    "i2 = torch.arange(0, self.dim, 2, device=positions.device): "
    "torch.arange(0, self.dim, 2, device=positions.device) => torch.arange(0, self.dim, 2)": (
        "the processor is the default device; a GPU would show it"
    )
}
