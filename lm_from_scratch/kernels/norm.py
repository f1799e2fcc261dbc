r"""RMSNorm in one pass over memory, and its gradient in another.

.. math::

   r = \frac{1}{\sqrt{\frac{1}{C} \sum_c x_c^2 + \epsilon}}, \qquad y_c = x_c \, r \, w_c

A program takes a few whole rows, so that the sum over a row stays inside it. Forward reads ``x``
and writes ``y``, 2 tensors of traffic; PyTorch's elementary functions (square, mean, two products)
move 7. Besides, :math:`r` is written, one float32 number of each row, for the backward pass. With
:math:`h = x r` and :math:`y'` the gradient of the result:

.. math::

   \frac{\partial L}{\partial x_c} =
   r \Bigl(y'_c w_c - h_c \, \tfrac{1}{C} \sum_i y'_i w_i h_i\Bigr), \qquad
   \frac{\partial L}{\partial w_c} = \sum_{\text{rows}} y'_c h_c

The gradient of the weight is a sum across programs. Atomic additions to one vector would give it in
the order in which the programs happen to run, another one each time, and float addition depends on
order. Instead a fixed number of programs walk over all rows, keep their sums in registers and write
one float32 row each; PyTorch adds these few rows. Backward reads 2 tensors and writes 1.

Source: Hsu et al., *Liger Kernel: Efficient Triton Kernels for LLM Training*, 2024,
arXiv:2410.10989, which fuses the same functions.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lm_from_scratch.kernels.device import check_device

WIDEST = 8192  # numbers of a row; wider ones would not fit into the registers of the backward pass
PROGRAMS = 512  # that share the backward pass: a few for each of the 100 to 150 units of a GPU


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x, weight, out, inverse, rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]  # (ROWS, BLOCK)
    offsets = row[:, None] * width + column[None, :]
    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)  # (ROWS,)
    # Rounded before the weight multiplies it, in the order of the reference.
    h = (value * r[:, None]).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + offsets, h * w[None, :], mask=inside)
    tl.store(inverse + row, r, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward_kernel(
    grad, x, weight, inverse, grad_x, partial, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    grad_w = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        offsets = row[:, None] * width + column[None, :]
        r = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        h = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) * r
        dy = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
        grad_w += tl.sum(dy * h, axis=0)
        dh = dy * w[None, :]
        mean = tl.sum(dh * h, axis=1)[:, None] / width
        tl.store(grad_x + offsets, r * (dh - h * mean), mask=inside)
    offsets = tl.program_id(0).to(tl.int64) * width + column
    tl.store(partial + offsets, grad_w, mask=column < width)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """:func:`lm_from_scratch.layers.norm.rms_norm` of ``x`` (..., C) with a ``weight`` (C,).

    The statistics of half-precision inputs are computed in float32; the order of rounding, and the
    dtype of the result where ``x`` and ``weight`` differ, are those of the reference. Raises
    ``ValueError`` for other shapes and dtypes, and where kernels do not run.
    """
    check_device("rms_norm", x=x, weight=weight)
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"rms_norm: x is {x.dtype}, weight {weight.dtype}; both must be floating")
    if weight.dim() != 1 or x.shape[-1:] != weight.shape:
        raise ValueError(
            f"rms_norm: x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}; "
            "weight needs one dimension, the last one of x"
        )
    if not 1 <= len(weight) <= WIDEST:
        raise ValueError(
            f"rms_norm: rows of {len(weight)} numbers; the kernel holds a row of 1 to {WIDEST} "
            "in one program: use lm_from_scratch.layers.norm.rms_norm"
        )
    return rms_norm_forward(x, weight, eps)[0]


def blocks(width: int) -> dict[str, int]:
    """Block sizes for rows of this width: 16 numbers for each thread, of one or more rows."""
    block = triton.next_power_of_2(width)
    return dict(ROWS=max(1, 2048 // block), BLOCK=block, num_warps=max(4, block // 512))


@torch.library.custom_op("lm_from_scratch::rms_norm", mutates_args=())
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The result, and the inverse root mean square of each row, in float32."""
    x, weight = x.contiguous(), weight.contiguous()
    width = len(weight)
    rows = x.numel() // width
    out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    inverse = x.new_empty(rows, dtype=torch.float32)
    size = blocks(width)
    rms_norm_kernel[(triton.cdiv(rows, size["ROWS"]),)](
        x, weight, out, inverse, rows, width, eps, **size
    )
    return out, inverse


@torch.library.custom_op("lm_from_scratch::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    width = len(weight)
    rows = x.numel() // width
    size = blocks(width)
    programs = min(PROGRAMS, triton.cdiv(rows, size["ROWS"]))
    grad_x = torch.empty_like(x)
    partial = x.new_empty(programs, width, dtype=torch.float32)
    rms_norm_backward_kernel[(programs,)](
        grad, x, weight, inverse, grad_x, partial, rows, width, **size
    )
    return grad_x, partial.sum(dim=0).to(weight.dtype)


@rms_norm_forward.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    return out, x.new_empty(x.numel() // len(weight), dtype=torch.float32)


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


def keep_inputs(
    ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]
) -> None:
    x, weight, _ = inputs
    inverse = output[1]
    ctx.mark_non_differentiable(inverse)
    ctx.save_for_backward(x, weight, inverse)


def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, None]:
    return *rms_norm_backward(grad, *ctx.saved_tensors), None


rms_norm_forward.register_autograd(backward, setup_context=keep_inputs)
