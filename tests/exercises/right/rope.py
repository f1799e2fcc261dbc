"""Other right answers to rope."""

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

# Automatic mutants of the solution that no case rejects, and why.
SURVIVORS = {
    "i = torch.arange(half, device=x.device, dtype=wide.dtype): "
    "torch.arange(half, device=x.device, dtype=wide.dtype) => "
    "torch.arange(half, dtype=wide.dtype)": (
        "the processor is the default device; a GPU would show it"
    )
}
