"""Weights of 8 bits: one code a byte, and what torch's kernel for a CPU asks of them."""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from lm_from_scratch.weights.quantized_weight import QuantizedWeight, check, nonzero, precise


class Int8Weight(QuantizedWeight):
    """8 bits a number. ``codes`` (N, K) are int8, ``scale`` is (N, G) for G groups in a row.

    Without a ``group_size`` a row is one group, and torch has a kernel for that.
    """

    bits = 8
    held = ("codes", "scale")
    few_rows = 32
    codes: Tensor
    scale: Tensor

    @classmethod
    def quantize(cls, weight: Tensor, group_size: int | None = None) -> Self:
        """Round each number of ``weight`` (N, K) to the nearest code of its group."""
        group_size = check(weight, group_size)
        groups = precise(weight).unflatten(1, (-1, group_size))  # (N, G, K / G)
        scale = (groups.abs().amax(dim=2) / 127).to(weight.dtype)  # (N, G)
        codes = (groups / nonzero(scale)[..., None]).round().clamp(-127, 127)
        codes = codes.flatten(1).to(torch.int8).contiguous()  # (N, K)
        return cls.wrap(weight.shape, group_size, codes=codes, scale=scale)

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor]) -> Self:
        codes, scale = parts["codes"].clone(), parts["scale"]  # aligned: in a file it may not be
        return cls.wrap(codes.shape, codes.shape[1] // scale.shape[1], codes=codes, scale=scale)

    def parts(self) -> dict[str, Tensor]:
        return {"codes": self.codes, "scale": self.scale}

    def dequantize(self) -> Tensor:
        groups = self.codes.to(self.dtype).unflatten(1, (-1, self.group_size))  # (N, G, K / G)
        return groups.mul_(self.scale[..., None]).flatten(1)

    def look_up(self, idx: Tensor) -> Tensor:
        groups = self.codes[idx].unflatten(-1, (-1, self.group_size))
        return (groups * self.scale[idx][..., None]).flatten(-2)

    def kernel(self, x: Tensor) -> Tensor | None:
        if self.scale.shape[1] != 1 or self.shape[1] % 16:  # it reads 16 aligned codes at once
            return None
        # a file or a compiled graph may have put them where it would crash
        if torch.compiler.is_compiling() or self.codes.data_ptr() % 16:
            return None
        x = x.clone() if x.data_ptr() % 32 else x
        return torch._weight_int8pack_mm(x, self.codes, self.scale.view(-1))


torch.serialization.add_safe_globals([Int8Weight])  # for weights_only=True
