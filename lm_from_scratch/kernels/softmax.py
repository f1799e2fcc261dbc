r"""Softmax over the last dimension, in one pass over memory.

.. math::

   p_c = \frac{e^{x_c - m}}{\sum_i e^{x_i - m}}, \qquad m = \max_i x_i

PyTorch's elementary functions make five kernels of it: maximum, difference, exponential, sum and
quotient. They move 8 tensors through memory. One kernel moves 2: a program takes a row, reads it
and writes the result. It spends 7 operations on a number, far fewer than a GPU has time for
while the number travels.

A row that is longer than a block is read block by block. Its maximum is known only at the end, so
the sum :math:`s` is kept relative to the largest number so far, :math:`m`, and is corrected when a
block :math:`B` raises that to :math:`m'`:

.. math::

   s' = s \, e^{m - m'} + \sum_{i \in B} e^{x_i - m'}

The second loop reads the row again, from the cache, where the first has left it.

The backward pass needs only the result. With :math:`p'` its gradient:

.. math::

   \frac{\partial L}{\partial x_c} = p_c \Bigl(p'_c - \sum_i p_i \, p'_i\Bigr)

Source: Milakov, Gimelshein, *Online normalizer calculation for softmax*, 2018, arXiv:1805.02867.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lm_from_scratch.kernels.device import check_device

BLOCK = 4096  # numbers of a block at most: 32 for each of the 128 threads, held in registers

#: Where a maximum starts. From -inf, a block of -inf would give -inf - -inf, which is NaN.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def softmax_kernel(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    top = LOWEST
    total = 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        value = tl.load(x + row + column, mask=inside, other=-float("inf")).to(tl.float32)
        raised = tl.maximum(top, tl.max(value, axis=0))
        total = total * tl.exp(top - raised) + tl.sum(tl.exp(value - raised), axis=0)
        top = raised
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        value = tl.load(x + row + column, mask=inside, other=-float("inf")).to(tl.float32)
        tl.store(out + row + column, tl.exp(value - top) / total, mask=inside)


@triton.jit
def softmax_backward_kernel(grad, out, grad_x, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    mean = 0.0  # of the gradient, weighted by the probabilities
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        p = tl.load(out + row + column, mask=inside, other=0.0).to(tl.float32)
        dp = tl.load(grad + row + column, mask=inside, other=0.0).to(tl.float32)
        mean += tl.sum(p * dp, axis=0)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        p = tl.load(out + row + column, mask=inside).to(tl.float32)
        dp = tl.load(grad + row + column, mask=inside).to(tl.float32)
        tl.store(grad_x + row + column, p * (dp - mean), mask=inside)


def softmax(x: Tensor) -> Tensor:
    """``torch.softmax(x, dim=-1)`` of a tensor (..., C). A row of -inf becomes a row of NaN.

    Half-precision inputs are computed in float32 and rounded once, at the end. Raises
    ``ValueError`` for other dtypes, and where kernels do not run.
    """
    check_device("softmax", x=x)
    if not x.is_floating_point() or x.dim() == 0:
        raise ValueError(
            f"softmax: x is {x.dtype} of shape {tuple(x.shape)}; "
            "it needs floating point and at least one dimension"
        )
    return softmax_forward(x)


def launch(kernel: Any, *tensors: Tensor) -> None:
    """One program for each row of the tensors, which have one shape and are contiguous."""
    width = tensors[0].shape[-1]
    if tensors[0].numel():
        grid = (tensors[0].numel() // width,)
        kernel[grid](*tensors, width, BLOCK=min(triton.next_power_of_2(width), BLOCK))


@torch.library.custom_op("lm_from_scratch::softmax", mutates_args=())
def softmax_forward(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    launch(softmax_kernel, x, out)
    return out


@torch.library.custom_op("lm_from_scratch::softmax_backward", mutates_args=())
def softmax_backward(grad: Tensor, out: Tensor) -> Tensor:
    grad, out = grad.contiguous(), out.contiguous()
    grad_x = torch.empty_like(out)
    launch(softmax_backward_kernel, grad, out, grad_x)
    return grad_x


@softmax_forward.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@softmax_backward.register_fake
def _(grad: Tensor, out: Tensor) -> Tensor:
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def keep_output(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def backward(ctx: Any, grad: Tensor) -> Tensor:
    (out,) = ctx.saved_tensors
    return softmax_backward(grad, out)


softmax_forward.register_autograd(backward, setup_context=keep_output)
