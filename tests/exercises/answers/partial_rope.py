"""Other right answers to partial_rope."""

import math

import torch


def by_matrices(x, positions, share, theta=10000.0):
    """A matrix of 2 x 2 for each pair."""
    R = int(share * x.shape[-1])
    work = torch.promote_types(x.dtype, torch.float32)
    angles = positions[..., None] * theta ** (-2 * torch.arange(R // 2, dtype=work) / R)
    rows = [angles.cos(), -angles.sin(), angles.sin(), angles.cos()]
    matrices = torch.stack(rows, dim=-1).unflatten(-1, (2, 2))
    pairs = x[..., :R].to(work).unflatten(-1, (2, R // 2))
    turned = torch.einsum("btirc,bhtci->bhtri", matrices, pairs).flatten(-2).to(x.dtype)
    return torch.cat([turned, x[..., R:]], dim=-1)


def by_complex_numbers(x, positions, share, theta=10000.0):
    """A pair is a complex number, and a turn a product."""
    R = math.floor(share * x.shape[-1])
    a, b = x.double()[..., :R].chunk(2, dim=-1)
    i2 = torch.arange(0, R, 2, dtype=torch.float64)
    angles = positions[:, None, :, None] * theta ** (-i2 / R)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real.to(x.dtype), turned.imag.to(x.dtype), x[..., R:]], dim=-1)


def by_zero_speeds(x, positions, share, theta=10000.0):
    """Features that stay are turned by angle 0, which changes no bit."""
    D = x.shape[-1]
    R = int(share * D)
    work = torch.promote_types(x.dtype, torch.float32)
    speeds = 1.0 / theta ** (torch.arange(0, R, 2).to(work) / R)
    angles = positions[:, None, :, None] * torch.cat([speeds, speeds, torch.zeros(D - R).to(work)])
    wide = x.to(work)
    partner = torch.cat([-wide[..., R // 2 : R], wide[..., : R // 2], wide[..., R:]], dim=-1)
    return (wide * angles.cos() + partner * angles.sin()).to(x.dtype)


def in_place(x, positions, share, theta=10000.0):
    """A copy whose first features are overwritten."""
    R = int(share * x.shape[-1])
    work = torch.promote_types(x.dtype, torch.float32)
    speeds = torch.exp(-math.log(theta) * torch.arange(0, R, 2, dtype=torch.float64) / R)
    angles = (positions[..., None] * speeds)[:, None]
    cos, sin = angles.cos().to(work), angles.sin().to(work)
    a, b = x[..., : R // 2].to(work), x[..., R // 2 : R].to(work)
    y = x.clone()
    y[..., : R // 2] = (a * cos - b * sin).to(x.dtype)
    y[..., R // 2 : R] = (b * cos + a * sin).to(x.dtype)
    return y


RIGHT = [by_complex_numbers, by_zero_speeds, in_place, by_matrices]
