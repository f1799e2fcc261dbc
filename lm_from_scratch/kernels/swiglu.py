r"""SwiGLU in one pass over memory: :math:`\mathrm{silu}(\mathrm{gate}) \odot \mathrm{up}`.

In PyTorch the product is two kernels: ``silu`` reads one tensor and writes another, which the
multiplication reads again. One kernel reads gate and up once and writes the result once: 3 tensors
of traffic instead of 5. Nothing else can make it faster, since a GPU does its few operations per
number while the next numbers arrive.

The backward pass computes the sigmoid again from the gate. With :math:`\sigma = \sigma(g)`:

.. math::

   \frac{\partial L}{\partial u} = y' \, g \sigma, \qquad
   \frac{\partial L}{\partial g} = y' \, u \, \sigma \bigl(1 + g (1 - \sigma)\bigr)

with :math:`y'` the gradient of the result: 3 tensors read, 2 written.

Source: Hsu et al., *Liger Kernel: Efficient Triton Kernels for LLM Training*, 2024,
arXiv:2410.10989, which fuses the same functions.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lm_from_scratch.kernels.device import check_alike, check_device

BLOCK = 1024  # numbers of a program: 8 for each of its 128 threads


@triton.jit
def swiglu_kernel(gate, up, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    g = tl.load(gate + offsets, mask=inside).to(tl.float32)
    u = tl.load(up + offsets, mask=inside).to(tl.float32)
    tl.store(out + offsets, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def swiglu_backward_kernel(grad, gate, up, grad_gate, grad_up, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    dy = tl.load(grad + offsets, mask=inside).to(tl.float32)
    g = tl.load(gate + offsets, mask=inside).to(tl.float32)
    u = tl.load(up + offsets, mask=inside).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(grad_gate + offsets, dy * u * s * (1 + g * (1 - s)), mask=inside)
    tl.store(grad_up + offsets, dy * g * s, mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """:func:`lm_from_scratch.layers.gated_mlp.swiglu` of ``gate`` and ``up``, of one shape (...)
    and dtype.

    Half-precision inputs are computed in float32 and rounded once, at the end.
    """
    check_device("swiglu", gate=gate, up=up)
    check_alike("swiglu", gate=gate, up=up)
    return swiglu_forward(gate, up)


@torch.library.custom_op("lm_from_scratch::swiglu", mutates_args=())
def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    n = out.numel()
    swiglu_kernel[(triton.cdiv(n, BLOCK),)](gate, up, out, n, BLOCK=BLOCK)
    return out


@torch.library.custom_op("lm_from_scratch::swiglu_backward", mutates_args=())
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    n = gate.numel()
    swiglu_backward_kernel[(triton.cdiv(n, BLOCK),)](
        grad, gate, up, grad_gate, grad_up, n, BLOCK=BLOCK
    )
    return grad_gate, grad_up


@swiglu_forward.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    like = torch.empty_like(gate, memory_format=torch.contiguous_format)
    return like, torch.empty_like(like)


def keep_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    return swiglu_backward(grad, gate, up)


swiglu_forward.register_autograd(backward, setup_context=keep_inputs)
