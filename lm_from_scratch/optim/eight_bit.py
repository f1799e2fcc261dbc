r"""Moments in 8 bits: one byte a number, and one scale for every 256 numbers.

AdamW's two moments take eight bytes a weight. Two digits of each would do: a moment is a mean over
many noisy gradients. What it needs is range, because inside one matrix the moments differ by a
factor of a million and more. So the 256 values of a byte stand close together near 1, and reach
below :math:`10^{-6}`. The leading zeros of the byte tell the decade, and the bits behind the
first one divide the decade into equal parts, of which the middle is taken. Without a sign:

.. math::

   \underbrace{0 \cdots 0}_{z} \; 1 \; \underbrace{b}_{7 - z \text{ bits}}
   \;\mapsto\; 10^{-z} \left( 0.1 + 0.9 \, \frac{b + 1/2}{2^{7 - z}} \right)

A sign takes one bit. Of the bytes that are left, one means 0 and one means 1. The codes count these
values from the smallest to the largest.

A moment is cut into blocks of 256 numbers. Each block is divided by its largest absolute value,
which is kept in float32, and every quotient becomes the nearest value. An outlier then costs
precision in its own block alone; numbers of very different sizes that share a block do pay.
Together this is 8 + 32 / 256 = 8.125 bits a number.

The step is the same as ever: the moments of one parameter are decoded, used, and encoded again.
What is lost are changes of less than half the distance to the next value. So a moment whose
gradient has become 0 falls with every step, but not to 0 while the largest number of its block
stays: a first moment with :math:`\beta_1 = 0.9` stops at 0.2 % of it, a second moment with
:math:`\beta_2 = 0.95` at 1.4 %. With :math:`\beta_2 = 0.999` it may not fall at all.

Sources: Dettmers, Lewis, Shleifer, Zettlemoyer, *8-bit Optimizers via Block-wise Quantization*,
2022, arXiv:2110.02861 (with blocks of 2048; bitsandbytes has 256 today); Dettmers, *8-Bit
Approximations for Parallelism in Deep Learning*, 2016, arXiv:1511.04561 (the values); Li, Chen,
Zhu, *Memory Efficient Optimizers with 4-bit States*, 2023, arXiv:2309.01507 (no value of 0).
"""

from functools import cache
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Numbers that share a scale.
BLOCK = 256

#: A moment of fewer numbers is kept in 32 bits, as in bitsandbytes: norms and biases need little.
SMALLEST = 4096

MOMENTS = ("exp_avg", "exp_avg_sq")


def dynamic_values(signed: bool) -> Tensor:
    """The 256 values of a byte, sorted, shape (256,): from -1 to 1, or from 0 to 1."""
    decades = []
    for zeros in range(7):
        parts = 2 ** ((6 if signed else 7) - zeros)
        edges = torch.linspace(0.1, 1.0, parts + 1, dtype=torch.float64, device="cpu")
        decades.append(10.0**-zeros * (edges[:-1] + edges[1:]) / 2)
    above_0 = torch.cat(decades)
    below_0 = -above_0 if signed else above_0[:0]
    return torch.cat([below_0, above_0.new_tensor([0.0, 1.0]), above_0]).sort().values.float()


class Table(NamedTuple):
    """Values, and what finds the nearest one: a search among ``middles`` is slow on a CPU, so
    ``first`` has the code of the smallest number whose first 16 bits are the same (of float32:
    what bfloat16 keeps). Among the numbers that share them there is at most one middle."""

    values: Tensor  # (256,), sorted
    middles: Tensor  # (V,), between a value and the next; the last is infinite
    first: Tensor  # (2**16,)

    @classmethod
    def of(cls, values: Tensor) -> "Table":
        middles = torch.cat([(values[:-1] + values[1:]) / 2, values.new_tensor([torch.inf])])
        bits = torch.arange(2**16, device=values.device) << 16
        smallest = (bits | (bits >> 31) * (2**16 - 1)).to(torch.int32).view(torch.float32)
        first = torch.bucketize(smallest, middles).clamp(max=len(values) - 1)
        values = torch.cat([values, values[-1:].expand(256 - len(values))])  # one for every byte
        return cls(values, middles, first.to(torch.uint8))


@cache
def table_for(moment: str, device: torch.device) -> Table:
    """The table of ``exp_avg``, with signs, or of ``exp_avg_sq``, without, and without 0: a second
    moment rounded to 0 would leave its first moment to be divided by epsilon alone."""
    values = dynamic_values(signed=True) if moment == "exp_avg" else dynamic_values(False)[1:]
    return Table.of(values.to(device))


def numbers_at_once(device: torch.device) -> int:
    """Whole blocks whose intermediate results fit into the cache of a CPU, or take little of a
    GPU's memory."""
    return 2**18 if device.type == "cpu" else 2**24


def encode(x: Tensor, table: Table) -> tuple[Tensor, Tensor]:
    """The codes of ``x``, uint8 of the same shape (any), and the largest absolute value of every
    block in float32, shape (B,) for B blocks. They go row by row, and the last may be shorter."""
    codes, scales = [], []
    for piece in x.reshape(-1).split(numbers_at_once(x.device)):
        n = len(piece)
        blocks = pad(piece, (0, -n % BLOCK)).view(-1, BLOCK).float()
        largest = blocks.abs().amax(1).clamp(max=torch.finfo(torch.float32).max)
        quotients = blocks / torch.where(largest == 0, 1.0, largest)[:, None]  # (B, BLOCK)
        quotients = quotients.view(-1)[:n]
        begin = (quotients.view(torch.int32) >> 16) & (2**16 - 1)
        nearest = table.first.index_select(0, begin)
        nearest += quotients > table.middles.index_select(0, nearest.int())
        codes.append(nearest)
        scales.append(largest)
    return torch.cat(codes).view(x.shape), torch.cat(scales)


def decode(codes: Tensor, largest: Tensor, table: Table) -> Tensor:
    """The numbers behind the ``codes`` (any shape) of B blocks with these ``largest`` (B,), in
    float32."""
    numbers = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    n = numbers_at_once(codes.device)
    parts = numbers.view(-1).split(n), codes.reshape(-1).split(n), largest.split(n // BLOCK)
    for part, piece, scales in zip(*parts, strict=True):
        quotients = table.values.index_select(0, piece.int())
        torch.mul(quotients, scales.repeat_interleave(BLOCK)[: len(piece)], out=part)
    return numbers


def is_coded(state: dict[str, Tensor], bits: int) -> bool:
    """Whether the moments in ``state`` are codes, or are to be in ``bits``."""
    return "exp_avg_absmax" in state or (bits == 8 and state["exp_avg"].numel() >= SMALLEST)


def stored(state: dict[str, Tensor], bits: int) -> dict[str, Tensor]:
    """The ``state`` of a parameter as it is kept in ``bits``, 32 or 8: large moments as codes, and
    the scales of their blocks beside them, as ``exp_avg_absmax`` and ``exp_avg_sq_absmax``."""
    encoded = dict(state)
    for name in MOMENTS:
        if bits == 8 and state[name].numel() >= SMALLEST:
            table = table_for(name, state[name].device)
            encoded[name], encoded[f"{name}_absmax"] = encode(state[name], table)
    return encoded


def stored_shapes(shapes: dict[str, torch.Size], bits: int) -> dict[str, torch.Size]:
    """The shapes of what :func:`stored` makes of a state with these ``shapes``."""
    sizes = {name: shapes[name].numel() for name in MOMENTS}
    return shapes | {
        f"{name}_absmax": torch.Size([-(-size // BLOCK)])
        for name, size in sizes.items()
        if bits == 8 and size >= SMALLEST
    }


class decoded:  # a context, and so in small letters, as torch.no_grad
    """Inside this context the moments in ``state`` are numbers, of the dtype ``wide`` where they
    were codes; behind it they are kept in ``bits``, whatever they were. After an exception
    codes are what they were."""

    def __init__(self, state: dict[str, Tensor], bits: int, wide: torch.dtype) -> None:
        self.state, self.bits, self.wide = state, bits, wide
        self.before = dict(state)

    def __enter__(self) -> None:
        for name in MOMENTS:
            if (largest := self.state.pop(f"{name}_absmax", None)) is not None:
                table = table_for(name, largest.device)
                self.state[name] = decode(self.state[name], largest, table).to(self.wide)

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.state.update(stored(self.state, self.bits) if kind is None else self.before)
