"""Answers to hunt_rotary_table: other right ones, and wrong ones of a second person."""

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

INIT = "self.dim, self.theta = dim, theta"
BUFFER = 'self.register_buffer("speeds", 1.0 / theta ** (torch.arange(0, dim, 2) / dim)'
I2 = "i2 = torch.arange(0, self.dim, 2, device=positions.device)"
TURNS = "positions[:, None, :, None]"

WRONG = [
    ("the speeds are a buffer: rounded by .to(bfloat16), and .float() brings nothing back",
     {INIT: f"{BUFFER}, persistent=False)", I2: "",
      "1.0 / self.theta ** (i2 / self.dim)": "self.speeds.float()"}),
    ("the speeds are in the state_dict", {INIT: f"{INIT}\n        {BUFFER})"}),
    ("the last position of a row is taken for its largest",
     {TURNS: "torch.arange(int(positions[0, -1]) + 1)[positions][:, None, :, None]"},
     "an index out of range raises"),
    ("the table is as long as the first row asks",
     {TURNS: "torch.arange(max(int(positions[0].max()) + 1, key_length))"
      "[positions][:, None, :, None]"}),
    ("positions are remembered until their number changes",
     {I2: "if positions.shape[1] != getattr(self, 'T', 0):\n"
      "            self.T, self.positions = positions.shape[1], positions\n"
      f"        positions = self.positions\n        {I2}"}),
    ("an angle for each feature, not for each pair",
     {"return angles.cos()": "angles = torch.cat((angles, angles), -1)\n"
      "        return angles.cos()"}),
]  # fmt: skip

SURVIVORS = {
    "i2 = torch.arange(0, self.dim, 2, device=positions.device): "
    "torch.arange(0, self.dim, 2, device=positions.device) => torch.arange(0, self.dim, 2)": (
        "the processor is the default device; a GPU would show it"
    )
}
