r"""Floats of four bits: MXFP4 and NVFP4, from the bits up.

Four bits are a sign, two bits of exponent and one of mantissa (E2M1). With e the exponent and m the
mantissa, the number is :math:`2^{e-1} (1 + m/2)`, and below the first power of two, where e is 0,
it is m / 2: eight magnitudes, 0, 0.5, 1, 1.5, 2, 3, 4 and 6, close together near 0 and far apart
away from it. (An int4's levels are all equally far apart.)

Six is not much, so neighbours in a row share a *scale*, itself a small float:

===========  =========  ==================================  ====================================
             block      scale                               bytes a weight
===========  =========  ==================================  ====================================
MXFP4        32         a power of two, 8 bits (E8M0)       0.5 + 1 / 32 = 0.53125
NVFP4        16         E4M3, 8 bits, times one float32     0.5 + 1 / 16 = 0.5625, and 4 a tensor
===========  =========  ==================================  ====================================

E8M0 is an exponent alone, from -127 to 127; 255 is no number. E4M3 has a mantissa of three bits, so
a block's largest number can be met within 1 part in 16; its largest is 448.

Both round to the nearest magnitude, and to the even mantissa where two are equally near.

Shapes: (..., K) numbers; codes (..., K) as bytes of 0 to 15, or packed (..., K / 2), the first of
two neighbours in the low bits; scales (..., K / block).

Sources: Open Compute Project, *OCP Microscaling Formats (MX) Specification*, version 1.0, 2023,
which rounds scales down as here; Rouhani et al., *Microscaling Data Formats for Deep Learning*,
2023, arXiv:2310.10537; NVIDIA, *Pretraining Large Language Models with NVFP4*, 2025,
arXiv:2509.25149.
"""

from typing import NamedTuple

import torch
from torch import Tensor

#: What the codes stand for; the fourth bit is the sign.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

#: Numbers that share a scale.
MX_BLOCK, NV_BLOCK = 32, 16

E4M3_MAX = 448.0


class MXFP4(NamedTuple):
    """``codes`` (..., K / 2), two in a byte, and ``scales`` (..., K / 32), exponents plus 127."""

    codes: Tensor
    scales: Tensor


class NVFP4(NamedTuple):
    """``codes`` (..., K / 2), two in a byte, ``scales`` (..., K / 16) of ``float8_e4m3fn``, and one
    ``factor`` () in float32 for all of them."""

    codes: Tensor
    scales: Tensor
    factor: Tensor


# ------------------------------------------------------------------------------ the four bits


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that ``codes`` (any shape, bytes of 0 to 15) stand for."""
    return torch.tensor(VALUES, dtype=dtype, device=codes.device)[codes.long()]


def encode_e2m1(x: Tensor) -> Tensor:
    """The codes of the nearest of :data:`VALUES`, for ``x`` of any shape; beyond 6 it is 6.

    Between two powers of two the levels are equally far apart, half a power: dividing by that
    distance makes them whole numbers, and rounding to the even one is rounding to the even
    mantissa."""
    size = x.abs().to(torch.promote_types(x.dtype, torch.float32)).clamp(max=6.0)
    exponent = torch.frexp(size).exponent.clamp(min=1) - 1  # 0 for all below 2
    steps = torch.ldexp(size, 1 - exponent).round()  # 0 to 4, in halves of a power of two
    code = (steps + 2 * exponent).to(torch.uint8)  # a step of 4 is the next exponent's first
    return code | x.signbit().to(torch.uint8) << 3


def pack(codes: Tensor) -> Tensor:
    """Two neighbours of ``codes`` (..., K) in a byte, the first in the low bits: (..., K / 2)."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """The inverse of :func:`pack`: from ``packed`` (..., K / 2) to (..., K)."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def decode_packed(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers (..., K) that ``packed`` (..., K / 2) stands for, a pair looked up at once."""
    pairs = decode_e2m1(unpack(torch.arange(256, device=packed.device)[:, None]), dtype)  # (256, 2)
    return pairs[packed.int()].flatten(-2)


def blocks(x: Tensor, size: int) -> Tensor:
    """``x`` (..., K) as (..., K / size, size), in float32 at least. Raises ``ValueError`` for a K
    that is no multiple."""
    if not x.is_floating_point() or x.dim() < 1 or not x.shape[-1] or x.shape[-1] % size:
        raise ValueError(
            f"x is {x.dtype} of shape {tuple(x.shape)}; it must be numbers whose rows divide into "
            f"blocks of {size}"
        )
    return x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, size))


# ----------------------------------------------------------------- a power of two for 32 numbers


def encode_mxfp4(x: Tensor) -> MXFP4:
    """``x`` (..., K) in MXFP4. A block's scale is its largest power of two over that of 6, which is
    4: so the largest number becomes 4 to 8, and what is above 6 becomes 6."""
    groups = blocks(x, MX_BLOCK)
    largest = groups.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - 2  # floor(log2(largest)) - log2(4)
    exponent = exponent.where(largest > 0, -127).clamp(-127, 127)
    codes = encode_e2m1(torch.ldexp(groups, -exponent[..., None]))
    return MXFP4(pack(codes.flatten(-2)), (exponent + 127).to(torch.uint8))


def decode_mxfp4(packed: MXFP4, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers (..., K); also in bfloat16 they are exact, up to a scale of 2 ** 125. A block
    whose scale is 255 is NaN."""
    ones = torch.ones_like(packed.scales, dtype=torch.float32)
    scales = torch.ldexp(ones, packed.scales.int() - 127)
    scales = scales.masked_fill(packed.scales == 255, torch.nan).to(dtype)
    numbers = decode_packed(packed.codes, dtype).unflatten(-1, (-1, MX_BLOCK))
    return numbers.mul_(scales[..., None]).flatten(-2)


# ---------------------------------------------------------------- an E4M3 scale for 16 numbers


def encode_nvfp4(x: Tensor) -> NVFP4:
    """``x`` (..., K) in NVFP4. The factor makes the largest scale 448, E4M3's largest; a block's
    scale makes its largest number 6, as nearly as E4M3 can say it."""
    groups = blocks(x, NV_BLOCK)
    largest = groups.abs().amax(-1)
    factor = (largest.max() / (6.0 * E4M3_MAX)).float()
    factor = factor.where(factor > 0, 1.0)
    scales = (largest / 6.0 / factor).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = scales.to(groups.dtype) * factor
    codes = encode_e2m1((groups / step[..., None]).where(step[..., None] > 0, 0.0))
    return NVFP4(pack(codes.flatten(-2)), scales, factor)


def decode_nvfp4(packed: NVFP4, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers (..., K)."""
    codes, scales, factor = packed
    numbers = decode_packed(codes).unflatten(-1, (-1, NV_BLOCK))
    return (numbers * (scales.float() * factor)[..., None]).flatten(-2).to(dtype)
