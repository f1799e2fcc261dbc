"""Weights of 4 bits, in blocks of rows as torch's kernel for a CPU reads them.

A block is R rows. For each of the K columns it has R / 2 bytes, which hold the first half of the
block's rows in their low bits and the second half in their high ones. One load then gives the codes
of a whole block. The last block is filled up. R is that of the processor; in a file a byte holds
two neighbours of a row, whatever the processor.

Shapes: N rows of K numbers, G groups in a row.
"""

import functools
from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.weights.quantized_weight import QuantizedWeight, check, nonzero, precise


class Int4Weight(QuantizedWeight):
    """4 bits a number. ``codes`` (N / R, K, R / 2) are bytes, ``scale_and_zero`` is (G, N, 2).

    The rows lie in blocks of R.
    """

    bits = 4
    held = ("codes", "scale_and_zero")
    few_rows = 96
    codes: Tensor
    scale_and_zero: Tensor

    @classmethod
    def quantize(cls, weight: Tensor, group_size: int | None = None) -> Self:
        """Round each number of ``weight`` (N, K) to the nearest code of its group. Raises
        ``ValueError`` as :func:`~lm_from_scratch.weights.quantized_weight.check`, and for
        an odd K."""
        group_size = check(weight, group_size, longest=64)
        if weight.shape[1] % 2:
            raise ValueError(
                f"rows of {weight.shape[1]} numbers cannot be kept in 4 bits: two codes share a "
                "byte, so the number must be even"
            )
        groups = precise(weight).unflatten(1, (-1, group_size))  # (N, G, K / G)
        low, high = groups.amin(dim=2), groups.amax(dim=2)  # (N, G)
        scale = ((high - low) / 15).to(weight.dtype)
        zero = (low + 8 * scale).to(weight.dtype)
        codes = (groups - zero[..., None]) / nonzero(scale)[..., None]
        codes = (codes.round() + 8).clamp(0, 15).flatten(1).to(torch.uint8)  # (N, K)
        return cls._pack(codes, scale, zero)

    @classmethod
    def _pack(cls, codes: Tensor, scale: Tensor, zero: Tensor) -> Self:
        """From codes (N, K), one in a byte, and scale and zero (N, G)."""
        packed, both = pack(codes, scale, zero)
        group_size = codes.shape[1] // scale.shape[1]
        return cls.wrap(codes.shape, group_size, codes=packed, scale_and_zero=both)

    def _unpack(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes (N, K), one in a byte, and scale and zero (N, G)."""
        return unpack(self.codes, self.scale_and_zero, self.shape[0])

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor]) -> Self:
        pairs = parts["codes"]  # (N, K / 2): two neighbours in a byte
        codes = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)
        return cls._pack(codes, parts["scale"], parts["zero"])

    def parts(self) -> dict[str, Tensor]:
        codes, scale, zero = self._unpack()
        return {
            "codes": codes[:, ::2] | codes[:, 1::2] << 4,
            "scale": scale.contiguous(),
            "zero": zero.contiguous(),
        }

    def dequantize(self) -> Tensor:
        return self._decode(*self._unpack())

    def _decode(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """From codes (..., K) and scale and zero (..., G) to numbers (..., K)."""
        groups = codes.to(scale.dtype).unflatten(-1, (-1, self.group_size)).sub_(8)
        return groups.mul_(scale[..., None]).add_(zero[..., None]).flatten(-2)

    def look_up(self, idx: Tensor) -> Tensor:
        return self._decode(*unpack_rows(self.codes, self.scale_and_zero, idx))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A file of another processor has its blocks: the codes are laid out again for this one."""
        self.__dict__.update(state)
        if self.codes.shape[2] != block_rows() // 2:
            here = self.from_parts(self.parts())
            self.codes, self.scale_and_zero = here.codes, here.scale_and_zero
        known_to_read(block_rows() // 2)

    def kernel(self, x: Tensor) -> Tensor | None:
        half = self.codes.shape[2]
        if self.group_size not in (32, 64, 128, 256) or not known_to_read(half):
            return None
        codes = self.codes.view(-1, self.shape[1] // 2)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, codes, self.group_size, self.scale_and_zero
        )
        return y[:, : self.shape[0]].contiguous()


torch.serialization.add_safe_globals([Int4Weight])  # for weights_only=True


# ----------------------------------------------------------------------------------- the layout


@functools.cache
def block_rows() -> int:
    """R, the rows that share bytes: what fills a vector register of this processor."""
    return 32 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 64


def pack(codes: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """From codes (N, K), one in a byte, and scale and zero (N, G) to blocks (N / R, K, R / 2), and
    scale and zero together (G, N, 2)."""
    N, K = codes.shape
    R = block_rows()
    known_to_read(R // 2)
    missing = -N % R
    low, high = F.pad(codes, (0, 0, 0, missing)).view(-1, 2, R // 2, K).unbind(1)
    packed = (low | high << 4).transpose(1, 2).contiguous()  # (N / R, K, R / 2)
    both = F.pad(torch.stack([scale, zero], dim=2), (0, 0, 0, 0, 0, missing))  # (N, G, 2)
    return packed, both.transpose(0, 1).contiguous()


def unpack(packed: Tensor, both: Tensor, N: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of :func:`pack` for blocks ``packed`` (N / R, K, R / 2) and ``both`` (G, N, 2):
    codes (N, K), one in a byte, and scale and zero (N, G)."""
    pairs = packed.transpose(1, 2).contiguous()  # (N / R, R / 2, K)
    codes = torch.stack([pairs & 15, pairs >> 4], dim=1).view(-1, pairs.shape[2])
    scale, zero = both[:, :N].transpose(0, 1).unbind(2)
    return codes[:N], scale, zero


def unpack_rows(packed: Tensor, both: Tensor, idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the rows ``idx`` (...) alone: codes (..., K), and scale and zero (..., G), from ``packed``
    (N / R, K, R / 2) and ``both`` (G, N, 2)."""
    R = 2 * packed.shape[2]
    block, row = idx // R, idx % R
    pairs = packed[block, :, row % (R // 2)]  # (..., K)
    codes = torch.where((row < R // 2)[..., None], pairs & 15, pairs >> 4)
    scale, zero = both[:, idx].movedim(0, -2).unbind(-1)  # (..., G)
    return codes, scale, zero


def kernel_reads(half: int) -> bool:
    """Whether torch's int4 kernel has our layout, with blocks of ``2 * half`` rows, here."""
    codes = torch.arange(4 * half * 32, device="cpu") % 13
    codes = codes.view(4 * half, 32)  # two blocks, no two rows alike
    low, high = codes.view(2, 2, half, 32).unbind(1)
    ours = (low | high << 4).transpose(1, 2).to(torch.uint8).flatten()
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    return torch.equal(ours, theirs.flatten())


#: What :func:`kernel_reads` has said so far, by ``half``.
READS: dict[int, bool] = {}


def known_to_read(half: int) -> bool:
    """:func:`kernel_reads`, computed once. A compiled graph cannot compute it, so it
    is computed when a weight is made."""
    if half not in READS and not torch.compiler.is_compiling():
        READS[half] = kernel_reads(half)
    return READS.get(half, False)
