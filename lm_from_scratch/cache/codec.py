r"""How a cache keeps numbers: exactly, or rounded to 8 or 4 bits.

Quantisation cuts the features of a head into groups, and lays a ruler with :math:`2^b` marks over
each group, from its smallest to its largest number:

.. math::

   s = \frac{\max x - \min x}{2^b - 1}, \qquad
   c = \mathrm{round}\!\left(\frac{x - \min x}{s}\right), \qquad
   \hat x = \min x + s\,c

A number moves by at most half a step, :math:`|\hat x - x| \le s / 2`, and what its dtype rounds.
The codes ``c`` take b bits; each group keeps its minimum and its step in the dtype of ``x``, at
:math:`2 \cdot \text{bits of the dtype} / \text{group}` bits a number.

Source for the idea, with a better choice of groups for keys: Liu et al., *KIVI: A Tuning-Free
Asymmetric 2bit Quantization for KV Cache*, 2024, arXiv:2402.02750.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """From numbers (B, H, T, D) to what is kept, tensors (B, H, T, ...), and back."""

    def encode(self, x: Tensor) -> list[Tensor]:
        """What is kept of ``x`` (B, H, T, D)."""
        ...

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """The numbers (B, H, T, D) of what was kept, or of some of its T columns."""
        ...


@dataclass(frozen=True)
class Exact:
    """Keep every number as it is."""

    def encode(self, x: Tensor) -> list[Tensor]:
        """``x`` (B, H, T, D) itself."""
        return [x]

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """The only part."""
        return parts[0]


EXACT = Exact()


@dataclass(frozen=True)
class Quantized:
    """Keep ``bits`` bits of each number, with a minimum and a step for each ``group`` of features.

    A head with fewer features than ``group`` is one group.
    """

    bits: int = 8
    group: int = 32

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits={self.bits} must be 4 or 8")
        if type(self.group) is not int or self.group < 1 or (self.bits == 4 and self.group % 2):
            raise ValueError(
                f"group={self.group} must be at least 1, and even for 4 bits (two codes a byte)"
            )

    def encode(self, x: Tensor) -> list[Tensor]:
        """Of ``x`` (B, H, T, D) the codes (B, H, T, G, N) of G groups of N features, two in a byte
        for 4 bits (N / 2), and minimum and step (B, H, T, G, 1)."""
        group = min(self.group, x.shape[-1]) or 2  # a value that is its key has no features
        if x.shape[-1] % group or (self.bits == 4 and group % 2):
            raise ValueError(
                f"heads of D={x.shape[-1]} features cannot be cut into groups of {group}"
                + (" with two codes in a byte" if self.bits == 4 else "")
            )
        x = x.unflatten(-1, (x.shape[-1] // group, group))  # (B, H, T, G, N)
        work = torch.promote_types(x.dtype, torch.float32)
        low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
        step = ((high.to(work) - low.to(work)) / (2**self.bits - 1)).to(x.dtype)
        # from the minimum and step as they are kept; a group of equal numbers has no step
        divisor = step.to(work).clamp(min=torch.finfo(x.dtype).tiny)
        codes = ((x.to(work) - low.to(work)) / divisor).round()
        codes = codes.clamp(0, 2**self.bits - 1).to(torch.uint8)
        if self.bits == 4:
            codes = codes[..., ::2] | codes[..., 1::2] << 4
        return [codes, low, step]

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """The numbers (B, H, T, D), each at most half a step from what it was."""
        codes, low, step = parts
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        work = torch.promote_types(low.dtype, torch.float32)
        x = low.to(work) + step.to(work) * codes.to(work)
        return x.to(low.dtype).flatten(-2)
