"""Answers to the exercise rope, written from its text alone."""

import math

import torch


def table(positions, d, theta=10000.0, dtype=torch.float32):
    freq = theta ** (-2 * torch.arange(d // 2, dtype=dtype) / d)
    phi = torch.einsum("bt,f->btf", positions.to(dtype), freq)[:, None]
    return phi.cos(), phi.sin()


def halves(x):
    return x.chunk(2, dim=-1)


def right_complex(x, positions, theta=10000.0):
    wide = x.double() if x.dtype == torch.float64 else x.float()
    cos, sin = table(positions, x.shape[-1], theta, wide.dtype)
    a, b = halves(wide)
    z = torch.complex(a, b) * torch.complex(cos, sin)
    return torch.cat((z.real, z.imag), -1).to(x.dtype)


def right_rotate_half(x, positions, theta=10000.0):
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = table(positions, x.shape[-1], theta, dtype)
    a, b = halves(x)
    other = torch.cat((-b, a), -1)
    return (x * torch.cat((cos, cos), -1) + other * torch.cat((sin, sin), -1)).to(x.dtype)


def even_with_odd(x, positions, theta=10000.0):
    cos, sin = table(positions, x.shape[-1], theta)
    out = torch.empty_like(x)
    even, odd = x[..., ::2], x[..., 1::2]
    out[..., ::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def turned_backwards(x, positions, theta=10000.0):
    cos, sin = table(positions, x.shape[-1], theta)
    a, b = halves(x.float())
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1).to(x.dtype)


def rotate_half_without_sign(x, positions, theta=10000.0):
    cos, sin = table(positions, x.shape[-1], theta)
    swapped = x.float().roll(x.shape[-1] // 2, -1)
    return (x * cos.repeat(1, 1, 1, 2) + swapped * sin.repeat(1, 1, 1, 2)).to(x.dtype)


def counts_tokens_itself(x, positions, theta=10000.0):
    t = torch.arange(x.shape[2]).expand(x.shape[0], -1)
    return right_rotate_half(x, t, theta)


def first_row_for_all(x, positions, theta=10000.0):
    return right_rotate_half(x, positions[:1], theta)


def distance_from_first_token(x, positions, theta=10000.0):
    return right_rotate_half(x, positions - positions[:, :1], theta)


def positions_from_one(x, positions, theta=10000.0):
    return right_rotate_half(x, positions + 1, theta)


def exponent_without_two(x, positions, theta=10000.0):
    d = x.shape[-1]
    phi = positions[:, None, :, None] / theta ** (torch.arange(d // 2) / d)
    a, b = halves(x.float())
    return torch.cat((a * phi.cos() - b * phi.sin(), a * phi.sin() + b * phi.cos()), -1).to(x.dtype)


def slowest_reaches_theta(x, positions, theta=10000.0):
    powers = torch.linspace(0, 1, x.shape[-1] // 2)
    phi = positions[:, None, :, None] * theta**-powers
    a, b = halves(x.float())
    return torch.cat((a * phi.cos() - b * phi.sin(), a * phi.sin() + b * phi.cos()), -1).to(x.dtype)


def always_ten_thousand(x, positions, theta=10000.0):
    return right_complex(x, positions)


def angles_in_the_dtype_of_x(x, positions, theta=10000.0):
    freq = 1 / theta ** (torch.arange(0, x.shape[-1], 2, dtype=torch.float32) / x.shape[-1])
    phi = positions.to(x.dtype)[:, None, :, None] * freq.to(x.dtype)
    a, b = halves(x)
    return torch.cat((a * phi.cos() - b * phi.sin(), a * phi.sin() + b * phi.cos()), -1)


def cosines_rounded(x, positions, theta=10000.0):
    cos, sin = (part.to(x.dtype) for part in table(positions, x.shape[-1], theta))
    a, b = halves(x)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def stays_float32(x, positions, theta=10000.0):
    cos, sin = table(positions, x.shape[-1], theta)
    a, b = halves(x)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def float64_through_float32(x, positions, theta=10000.0):
    return right_rotate_half(x.float(), positions, theta).to(x.dtype)


def only_speeds_are_float32(x, positions, theta=10000.0):
    freq = theta ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    wide = x.float() if x.itemsize < 4 else x
    phi = positions[:, None, :, None].to(wide.dtype) * freq
    a, b = halves(wide)
    return torch.cat((a * phi.cos() - b * phi.sin(), a * phi.sin() + b * phi.cos()), -1).to(x.dtype)


def only_angles_are_float32(x, positions, theta=10000.0):
    cos, sin = table(positions, x.shape[-1], theta)
    wide = x.float() if x.itemsize < 4 else x
    a, b = halves(wide)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def first_half_overwritten(x, positions, theta=10000.0):
    cos, sin = table(positions, x.shape[-1], theta, torch.promote_types(x.dtype, torch.float32))
    out = x.clone()
    h = x.shape[-1] // 2
    out[..., :h] = out[..., :h].clone() * cos - out[..., h:].clone() * sin
    out[..., h:] = out[..., :h].clone() * sin + out[..., h:].clone() * cos
    return out


def writes_into_x(x, positions, theta=10000.0):
    turned = right_complex(x, positions, theta)
    with torch.no_grad():
        x.copy_(turned)
    return turned


@torch.no_grad()
def without_gradient(x, positions, theta=10000.0):
    return right_complex(x, positions, theta)


def pairs_come_out_side_by_side(x, positions, theta=10000.0):
    cos, sin = table(positions, x.shape[-1], theta)
    a, b = halves(x.float())
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def degrees(x, positions, theta=10000.0):
    freq = theta ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    phi = torch.deg2rad(positions[:, None, :, None] * freq)
    a, b = halves(x.float())
    return torch.cat((a * phi.cos() - b * phi.sin(), a * phi.sin() + b * phi.cos()), -1).to(x.dtype)


def speeds_grow(x, positions, theta=10000.0):
    return right_complex(x, positions, 1 / theta)


def table_of_4096(x, positions, theta=10000.0):
    d = x.shape[-1]
    every = torch.arange(4096)[:, None] * torch.exp(-math.log(theta) * torch.arange(0, d, 2) / d)
    cos, sin = every.cos()[positions][:, None], every.sin()[positions][:, None]
    a, b = halves(x.float())
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def rows_flattened_by_view(x, positions, theta=10000.0):
    b, h, t, d = x.shape
    flat = x.view(b * h, 1, t, d)
    return right_complex(flat, positions.repeat_interleave(h, 0), theta).view(x.shape)


def heads_take_positions(x, positions, theta=10000.0):
    b, h, t, d = x.shape
    flat = x.reshape(b * h, 1, t, d)
    return right_complex(flat, positions.repeat(h, 1), theta).reshape(x.shape)


ANSWERS = {
    even_with_odd: "neighbours 2i and 2i + 1 are the pairs, not i and i + D/2",
    turned_backwards: "turned the other way, by minus the angle",
    rotate_half_without_sign: "the halves are swapped without a minus",
    counts_tokens_itself: "positions are ignored: every row is taken to begin at 0",
    first_row_for_all: "all rows are given the positions of the first",
    distance_from_first_token: "positions are counted from the first of each row",
    positions_from_one: "positions are counted from 1",
    exponent_without_two: "the exponent is i / D in the place of 2i / D",
    slowest_reaches_theta: "the exponent runs to 1: divided by D/2 - 1",
    always_ten_thousand: "theta is always 10000",
    angles_in_the_dtype_of_x: "everything is computed in the dtype of x, positions too: "
    "257 becomes 256",
    cosines_rounded: "cosines, sines and products are in the dtype of x",
    stays_float32: "the result stays float32",
    float64_through_float32: "float64 is computed in float32",
    only_speeds_are_float32: "",
    only_angles_are_float32: "",
    first_half_overwritten: "the second half is made from the first half already turned",
    writes_into_x: "written into x itself",
    without_gradient: "x is detached",
    pairs_come_out_side_by_side: "the halves come back alternating, not one after the other",
    degrees: "the angles are taken for degrees",
    speeds_grow: "the speeds grow from pair to pair: the exponent has no minus",
    table_of_4096: "a table of 4096 positions, which further ones are outside of",
    rows_flattened_by_view: "a view of a tensor that is not contiguous",
    heads_take_positions: "",
}
RIGHT = [right_complex, right_rotate_half]
SILENT = [float64_through_float32, table_of_4096, rows_flattened_by_view]
