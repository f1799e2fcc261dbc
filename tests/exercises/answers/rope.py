"""Answers to rope: other right ones, and wrong ones of a second person."""

import math

import torch


def by_complex_numbers(x, positions, theta=10000.0):
    """A pair is a complex number, and a turn a product."""
    wide = x.double()
    a, b = wide.chunk(2, dim=-1)
    i2 = torch.arange(0, x.shape[-1], 2, dtype=torch.float64)
    angles = positions[:, None, :, None] * theta ** (-i2 / x.shape[-1])
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


def by_rotate_half(x, positions, theta=10000.0):
    """The form of transformers, in float32."""
    work = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(work)
    dim = x.shape[-1]
    inv_freq = 1.0 / theta ** (torch.arange(0, dim, 2).to(work) / dim)
    angles = torch.einsum("bt,f->btf", positions.to(work), inv_freq)
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
    a, b = wide[..., : dim // 2], wide[..., dim // 2 :]
    return (wide * angles.cos() + torch.cat([-b, a], dim=-1) * angles.sin()).to(x.dtype)


def by_table(x, positions, theta=10000.0):
    """A table up to the largest position, made for each call."""
    work = torch.promote_types(x.dtype, torch.float32)
    dim = x.shape[-1]
    speeds = torch.exp(-math.log(theta) * torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(int(positions.max()) + 1, dtype=torch.float64), speeds)
    cos, sin = (table.to(work)[positions][:, None] for table in (angles.cos(), angles.sin()))
    a, b = x.to(work).split(dim // 2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def by_matrices(x, positions, theta=10000.0):
    """A matrix of 2 x 2 for each pair."""
    work = torch.promote_types(x.dtype, torch.float32)
    dim = x.shape[-1]
    speeds = theta ** (-2 * torch.arange(dim // 2, dtype=work) / dim)
    angles = positions[..., None] * speeds  # (B, T, D/2)
    matrices = torch.stack(
        [angles.cos(), -angles.sin(), angles.sin(), angles.cos()], dim=-1
    ).unflatten(-1, (2, 2))
    pairs = x.to(work).unflatten(-1, (2, dim // 2))
    return torch.einsum("btirc,bhtci->bhtri", matrices, pairs).flatten(-2).to(x.dtype)


RIGHT = [by_complex_numbers, by_rotate_half, by_table, by_matrices]

WIDE = "x if x.dtype == torch.float64 else x.float()"
ANGLES = "positions[:, None, :, None] * speeds"
SPEEDS = {"dtype=wide.dtype": "dtype=torch.float32"}

WRONG = [
    ("everything is computed in the dtype of x, positions too: 257 becomes 256",
     SPEEDS | {WIDE: "x", ANGLES: "positions[:, None, :, None].to(x.dtype) * speeds.to(x.dtype)"}),
    ("cosines, sines and products are in the dtype of x",
     SPEEDS | {WIDE: "x", "angles.cos(), angles.sin()": "angles.cos().to(x), angles.sin().to(x)"}),
    ("the result stays float32",
     SPEEDS | {WIDE: "x", "return turned.to(x.dtype)": "return turned"}),
    ("the speeds are float32",
     SPEEDS | {ANGLES: "positions[:, None, :, None].to(wide.dtype) * speeds"}),
    ("the angles are float32", SPEEDS),
    ("a table of 4096 positions, in float32",
     SPEEDS | {WIDE: "x.float()", ANGLES: f"torch.arange(4096)[positions]{ANGLES[9:]}"}),
    ("heads get the positions of other rows",
     {ANGLES: "positions.repeat(x.shape[1], 1).reshape(*x.shape[:2], -1, 1) * speeds"}),
]  # fmt: skip

SURVIVORS = {
    "i = torch.arange(half, device=x.device, dtype=wide.dtype): "
    "torch.arange(half, device=x.device, dtype=wide.dtype) => "
    "torch.arange(half, dtype=wide.dtype)": (
        "the processor is the default device; a GPU would show it"
    )
}
