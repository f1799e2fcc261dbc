"""How codes of 4 bits lie in memory: in blocks of rows, as torch's kernel for a CPU reads them.

A block is R rows. For each of the K columns it has R / 2 bytes, which hold the first half of the
block's rows in their low bits and the second half in their high ones. One load then gives the codes
of a whole block. The last block is filled up. R is that of the processor; in a file a byte holds
two neighbours of a row, whatever the processor.

Shapes: N rows of K numbers, G groups in a row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

#: R, the rows that share bytes: what fills a vector register of this processor.
BLOCK = 32 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 64


def pack(codes: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """From codes (N, K), one in a byte, and scale and zero (N, G) to blocks (N / R, K, R / 2), and
    scale and zero together (G, N, 2)."""
    N, K = codes.shape
    missing = -N % BLOCK
    low, high = F.pad(codes, (0, 0, 0, missing)).view(-1, 2, BLOCK // 2, K).unbind(1)
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
    codes = torch.arange(4 * half * 32).view(4 * half, 32) % 13  # two blocks, no two rows alike
    low, high = codes.view(2, 2, half, 32).unbind(1)
    ours = (low | high << 4).transpose(1, 2).to(torch.uint8).flatten()
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    return torch.equal(ours, theirs.flatten())


#: Half the rows of the blocks that it reads. (A compiled graph could not find this out.)
KERNEL_HALVES = [half for half in (16, 32) if kernel_reads(half)]
