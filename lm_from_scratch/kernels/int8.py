r"""A linear map whose weight stays 8-bit codes until it is in registers.

.. math::

   y_{mn} = s_n \sum_k x_{mk} \, c_{nk} + b_n

A model that decodes one token multiplies a few rows with every weight it has: 2 operations for a
code and a row, and the time is that of reading the weight. PyTorch has no such product on a GPU. It
would decode the whole matrix first: read 1 byte for each number, write 2, and read these 2 again.
The kernel reads the byte.

An int8 code has 7 bits and a sign, which float16 and bfloat16 hold exactly, so the codes are cast
and multiplied as they are. A scale for each row of the weight is a factor of the sum. A scale for
each group of ``group_size`` numbers is a factor of the tile, which is rounded to the dtype of x
then, as :meth:`~lm_from_scratch.weights.quantized_weight.QuantizedWeight.dequantize` does it.

The gradient of x needs every code, too, and has as many operations as the forward pass has with as
many rows as training has: there the decoded matrix costs little, and PyTorch multiplies it.

Source for codes that are decoded inside the product: Frantar et al., *GPTQ*, 2022,
arXiv:2210.17323.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from lm_from_scratch.kernels.device import check_device
from lm_from_scratch.kernels.matmul import GROUP, is_aligned, tile_of
from lm_from_scratch.weights import quantized_weight
from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.quantize import quantized_weights
from lm_from_scratch.weights.swap import swap_parameters_

#: Sizes of a tile, for the few rows of decoding (16 are the fewest that matrix units take) and for
#: many; and the same for float32, which is multiplied without matrix units. A program for few rows
#: reads long pieces of few rows of the weight: N / ``BLOCK_N`` programs must fill the GPU. ``MANY``
#: is for rows that are aligned: addresses of single numbers would need too many registers.
FEW = dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=128, num_warps=4, num_stages=4)
MANY = dict(BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3)
FEW_FLOAT32 = dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=3)
MANY_FLOAT32 = dict(BLOCK_M=64, BLOCK_N=32, BLOCK_K=16, num_warps=4, num_stages=3)


@triton.jit(do_not_specialize=["M"])
def int8_linear_kernel(
    x, codes, scale, bias, out, M, N, K, group_size,
    x_m, x_k, codes_n, codes_k, scale_n, scale_g, out_m, out_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, SCALE_PER_ROW: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    m, n = tile_of(program, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    rows = (m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]  # (BLOCK_M, 1)
    columns = (n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]  # (1, BLOCK_N): rows of the weight
    ks = tl.arange(0, BLOCK_K).to(tl.int64)
    x += rows * x_m + ks[None, :] * x_k  # (BLOCK_M, BLOCK_K) addresses
    codes += ks[:, None] * codes_k + columns * codes_n  # (BLOCK_K, BLOCK_N)
    scale += columns * scale_n
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = ks < K - k
        left = tl.load(x, mask=(rows < M) & inside[None, :], other=0.0)
        code = tl.load(codes, mask=inside[:, None] & (columns < N), other=0)
        if SCALE_PER_ROW:
            right = code.to(left.dtype)  # exact
        else:
            s = tl.load(scale + (k // group_size) * scale_g, mask=columns < N, other=0.0)
            right = (code.to(tl.float32) * s.to(tl.float32)).to(left.dtype)
        total = tl.dot(left, right, total, input_precision="ieee")
        x += BLOCK_K * tl.cast(x_k, tl.int64)
        codes += BLOCK_K * tl.cast(codes_k, tl.int64)
    if SCALE_PER_ROW:
        total *= tl.load(scale, mask=columns < N, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(out + rows * out_m + columns * out_n, total, mask=(rows < M) & (columns < N))


def linear(input: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """:func:`lm_from_scratch.weights.quantized_weight.linear` of ``input`` (..., K), an 8-bit
    ``weight`` (N, K) and a ``bias`` (N,).

    A weight with groups needs those of 16 numbers or a multiple. The sum is float32, of products
    that are not rounded; the result is rounded once, with its scale and bias. Raises ``ValueError``
    for another weight, other groups, and where kernels do not run.
    """
    if not isinstance(weight, Int8Weight):
        raise ValueError(
            f"int8 linear: weight has the class {type(weight).__name__}; the kernel takes an "
            "Int8Weight: use F.linear for others"
        )
    return quantized_weight.linear(input, KernelInt8Weight.of(weight), bias)


class KernelInt8Weight(Int8Weight):
    """An :class:`~lm_from_scratch.weights.int8.Int8Weight` that the kernel multiplies.

    In a saved ``state_dict`` it is an ordinary one, which a machine without Triton reads. A model
    that took its weights from a file needs :func:`use_int8_kernel_`; one that was pickled does not.
    """

    @classmethod
    def of(cls, weight: Int8Weight) -> "KernelInt8Weight":
        """The same codes and scales, in the same memory."""
        return cls.wrap(weight.shape, weight.group_size, codes=weight.codes, scale=weight.scale)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ W.T + bias`` of ``x`` (..., K) and ``bias`` (N,)."""
        check_device("int8 linear", x=x, codes=self.codes, scale=self.scale, bias=bias)
        check_groups(self)
        return int8_linear(x, self.codes, self.scale, bias)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if isinstance(self, nn.Parameter):
            return super().__reduce_ex__(protocol)
        plain = Int8Weight.wrap(self.shape, self.group_size, codes=self.codes, scale=self.scale)
        return plain.__reduce_ex__(protocol)


def use_int8_kernel_(model: nn.Module) -> int:
    """Let the 8-bit weights of a built model be multiplied by the kernel; how many there are.

    All are changed, or none. What else holds a weight, a tied embedding or an optimizer, follows.
    """
    found = {n: w for n, w in quantized_weights(model).items() if isinstance(w, Int8Weight)}
    for name, weight in found.items():
        check_device("use_int8_kernel_", **{name: weight})
        check_groups(weight, name)
    swap_parameters_(model, {name: KernelInt8Weight.of(weight) for name, weight in found.items()})
    return len(found)


def check_groups(weight: Int8Weight, name: str = "weight") -> None:
    """Raises ``ValueError`` for groups that the kernel does not take."""
    if weight.group_size != weight.shape[1] and weight.group_size % 16:
        raise ValueError(
            f"int8 linear: {name} has group_size={weight.group_size}; the kernel takes multiples "
            f"of 16, or a whole row ({weight.shape[1]}): quantise it so, or leave it to PyTorch"
        )


@torch.library.custom_op("lm_from_scratch::int8_linear", mutates_args=())
def int8_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    (N, K), groups = codes.shape, scale.shape[1]
    rows, group_size = x.reshape(-1, K), K // groups
    bias = None if bias is None else bias.contiguous()
    out = x.new_empty(len(rows), N)
    few, many = (FEW_FLOAT32, MANY_FLOAT32) if x.dtype == torch.float32 else (FEW, MANY)
    if not all(is_aligned(matrix) and matrix.stride(1) == 1 for matrix in (rows, codes)):
        many = MANY_FLOAT32
    tile = few if len(rows) <= 16 else many
    if groups > 1:  # a tile along K lies within a group: the power of 2 that divides it
        tile = tile | dict(BLOCK_K=min(tile["BLOCK_K"], group_size & -group_size))
    grid = (triton.cdiv(len(rows), tile["BLOCK_M"]) * triton.cdiv(N, tile["BLOCK_N"]),)
    int8_linear_kernel[grid](
        rows, codes, scale, bias, out, len(rows), N, K, group_size,
        *rows.stride(), *codes.stride(), *scale.stride(), *out.stride(),
        GROUP=GROUP, SCALE_PER_ROW=groups == 1, **tile,
    )  # fmt: skip
    return out.view(*x.shape[:-1], N)


@int8_linear.register_fake
def _(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(codes))
