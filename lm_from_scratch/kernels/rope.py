r"""RoPE in one pass over memory, and its gradient by the same kernel.

A pair of features (a, b) turns by an angle of which the cosine c and the sine s are given:

.. math::

   a' = a c - b s, \qquad b' = b c + a s

In PyTorch it takes several kernels, each with a tensor between it and the next. One kernel reads x
and writes the result: 2 tensors of traffic, and 6 operations for two numbers. The cosines and
sines are read once from memory and many times from the cache, since all heads of a token share
them.

The backward pass is the forward pass with -s. A rotation is undone by its transpose, which is the
rotation by the negative angle, and the gradient of a matrix product is a product with the
transpose. It needs no x.

Queries and keys come as (B, H, T, D) out of a (B, T, H, D) in memory. Strides tell the kernel where
a number is, so that nothing is copied; the result lies in memory as x does.

Source: Su et al., *RoFormer*, 2021, arXiv:2104.09864.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lm_from_scratch.kernels.device import check_device

PAIRS = 1024  # of a program: 8 for each of its 128 threads


@triton.jit(do_not_specialize=["T"])
def rope_kernel(
    x, x_b, x_h, x_t, x_d, out, out_b, out_h, out_t, out_d, cos, sin, cos_b, T,
    H: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A row is one head of one token. Rows of a token are neighbours and share its angles.
    programs = tl.cdiv(T * H, ROWS)  # for each row of the batch
    b = (tl.program_id(0) // programs).to(tl.int64)
    rows = tl.program_id(0) % programs * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    pairs = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    inside = (rows < T * H) & (pairs < HALF)
    t, h = (rows // H).to(tl.int64), (rows % H).to(tl.int64)

    angle = b * cos_b + t * HALF + pairs
    c = tl.load(cos + angle, mask=inside)
    s = tl.load(sin + angle, mask=inside)
    if BACK:
        s = -s
    first = 2 * pairs if INTERLEAVED else pairs
    second = first + (1 if INTERLEAVED else HALF)
    x += b * x_b + t * x_t + h * x_h
    va = tl.load(x + first * x_d, mask=inside).to(tl.float32)
    vb = tl.load(x + second * x_d, mask=inside).to(tl.float32)
    out += b * out_b + t * out_t + h * out_h
    tl.store(out + first * out_d, va * c - vb * s, mask=inside)
    tl.store(out + second * out_d, vb * c + va * s, mask=inside)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`lm_from_scratch.layers.rope.apply_rope` of x (B, H, T, D) with any strides; the result
    lies in memory in the order of x. cos and sin are float32, (B, 1, T, D/2) or (1, 1, T, D/2), and
    constants: there is no gradient for them.

    Half-precision x is turned in float32 and rounded once, at the end.
    """
    check("apply_rope", x, cos, sin)
    return turn(x, cos, sin, False, False)


def apply_rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`apply_rope` of ``x`` (B, H, T, D), ``cos`` and ``sin`` (B or 1, 1, T, D/2) for
    pairs that stand side by side: features 2i and 2i + 1."""
    check("apply_rope_interleaved", x, cos, sin)
    return turn(x, cos, sin, True, False)


def check(kernel: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raises ``ValueError`` for what the kernel cannot turn."""
    check_device(kernel, x=x, cos=cos, sin=sin)
    if x.dim() != 4 or x.shape[-1] % 2 != 0 or not x.is_floating_point():
        raise ValueError(
            f"{kernel}: x is {x.dtype} of shape {tuple(x.shape)}; it must be (B, H, T, D) of "
            "floating point, D even"
        )
    B, _, T, D = x.shape
    for name, angles in ("cos", cos), ("sin", sin):
        if angles.shape not in ((B, 1, T, D // 2), (1, 1, T, D // 2)) or angles.shape != cos.shape:
            raise ValueError(
                f"{kernel}: x has shape {tuple(x.shape)}, {name} {tuple(angles.shape)}; cos and "
                f"sin must both have {(B, 1, T, D // 2)} or {(1, 1, T, D // 2)}"
            )
        if angles.dtype != torch.float32:
            raise ValueError(f"{kernel}: {name} is {angles.dtype}; angles must be torch.float32")
        if angles.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{kernel}: {name} requires a gradient, which the kernel does not compute; "
                f"lm_from_scratch.layers.rope.{kernel} does"
            )


@torch.library.custom_op("lm_from_scratch::rope", mutates_args=())
def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    B, H, T, D = x.shape
    out = torch.empty_like(x)  # in the order of x
    cos, sin = cos.contiguous(), sin.contiguous()
    BLOCK = triton.next_power_of_2(max(D // 2, 1))
    ROWS = max(PAIRS // BLOCK, 1)
    rope_kernel[(triton.cdiv(T * H, ROWS) * B,)](
        x, *x.stride(), out, *out.stride(), cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0), T,
        H=H, HALF=D // 2, INTERLEAVED=interleaved, BACK=back, ROWS=ROWS, BLOCK=BLOCK,
    )  # fmt: skip
    return out


@turn.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    return torch.empty_like(x)


def keep_angles(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.interleaved, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    cos, sin = ctx.saved_tensors
    return turn(grad, cos, sin, ctx.interleaved, not ctx.back), None, None, None, None


turn.register_autograd(backward, setup_context=keep_angles)
