r"""The product of two matrices, tile by tile: :math:`C = A B`.

A number of :math:`C` (M, N) needs a row of :math:`A` (M, K) and a column of :math:`B` (K, N). If
each is computed alone, A is read N times and B M times. A program computes a *tile* of ``BLOCK_M``
by ``BLOCK_N`` numbers instead: it walks along K, and each number that it loads serves a whole row
or column of the tile. A is read N / ``BLOCK_N`` times then, B M / ``BLOCK_M`` times. 2 M N K
operations meet M K + K N + M N numbers that must be moved at least once: what a large product
waits for is not the memory.

Programs run in the order of their numbers, as many at once as fit. A *group* of ``GROUP`` rows of
tiles is walked column by column, so that programs that run together share rows of A and columns of
B, and find them in the L2 cache.

Both gradients are products of the same kind, :math:`A' = C' B^\top` and :math:`B' = A^\top C'`. A
transpose is a pair of strides, and the kernel takes any.

Source: Tillet, Kung, Cox, *Triton: An Intermediate Language and Compiler for Tiled Neural Network
Computations*, 2019, whose first example it is.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lm_from_scratch.kernels.device import check_device

GROUP = 8  # rows of tiles that are walked together

#: Sizes of a tile by the bytes of a number. Half precision: the sums take 128 of the 255 registers
#: of a thread, and the four steps along K that are in flight fit into any shared memory. float32 is
#: multiplied without matrix units, from operands in registers, which leaves fewer for sums.
TILES = {
    2: dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=32, num_warps=4, num_stages=4),
    4: dict(BLOCK_M=64, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=3),
}

#: The same where a matrix is not aligned (:func:`is_aligned`): a thread loads and stores number by
#: number then, and the address of each takes two registers.
NARROW_TILES = {
    2: dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=3),
    4: dict(BLOCK_M=32, BLOCK_N=16, BLOCK_K=16, num_warps=4, num_stages=3),
}


@triton.jit
def tile_of(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a program's tile: group by group, and column by column within one."""
    first = program // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)  # the last group may have fewer rows
    within = program % (GROUP * tiles_n)
    return first + within % height, within // height


@triton.jit
def matmul_kernel(
    a, b, out_in, out, M, N, K, beta, alpha,
    a_m, a_k, b_k, b_n, in_m, in_n, out_m, out_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    m, n = tile_of(program, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    rows = (m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]  # (BLOCK_M, 1)
    columns = (n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]  # (1, BLOCK_N)
    ks = tl.arange(0, BLOCK_K).to(tl.int64)
    a += rows * a_m + ks[None, :] * a_k  # (BLOCK_M, BLOCK_K) addresses
    b += ks[:, None] * b_k + columns * b_n  # (BLOCK_K, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = ks < K - k  # both: 0 times what lies beyond could be NaN
        left = tl.load(a, mask=(rows < M) & inside[None, :], other=0.0)
        right = tl.load(b, mask=inside[:, None] & (columns < N), other=0.0)
        total = tl.dot(left.to(right.dtype), right, total, input_precision="ieee")
        a += BLOCK_K * tl.cast(a_k, tl.int64)
        b += BLOCK_K * tl.cast(b_k, tl.int64)
    inside = (rows < M) & (columns < N)
    if ADD:
        read = inside & (beta != 0)  # as in torch, beta = 0 ignores even NaN
        before = tl.load(out_in + rows * in_m + columns * in_n, mask=read, other=0.0)
        total = beta * before.to(tl.float32) + alpha * total
    tl.store(out + rows * out_m + columns * out_n, total, mask=inside)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """:func:`torch.matmul` of two matrices ``a`` (M, K) and ``b`` (K, N) of one dtype, with any
    strides.

    Sums are float32, of products that are not rounded; the result is rounded once.
    """
    check_device("matmul", a=a, b=b)
    check_shapes("matmul", a, b)
    return matmul_forward(a, b)


def addmm(out_in: Tensor, a: Tensor, b: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """``beta * out_in + alpha * (a @ b)`` of ``out_in`` (M, N), ``a`` (M, K) and ``b`` (K, N), as
    :func:`torch.addmm`, without a gradient.

    ``out_in`` and the result (M, N) may have another dtype than ``a`` and ``b``; the sum is
    float32, and rounded once. Raises ``ValueError`` for others, for gradients, and where kernels do
    not run.
    """
    check_device("addmm", out_in=out_in, a=a, b=b)
    check_shapes("addmm", a, b)
    shape = a.shape[0], b.shape[1]
    if out_in.shape != shape or not out_in.is_floating_point():
        raise ValueError(
            f"addmm: out_in is {out_in.dtype} of shape {tuple(out_in.shape)}, a @ b {a.dtype} of "
            f"shape {shape}; the shapes must agree, and out_in be of floating point"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (out_in, a, b)):
        raise ValueError("addmm: it has no gradient; call it under torch.no_grad(), or use matmul")
    return addmm_forward(out_in, a, b, float(beta), float(alpha))


def check_shapes(kernel: str, a: Tensor, b: Tensor) -> None:
    """Raises ``ValueError`` unless a (M, K) and b (K, N) can be multiplied."""
    fit = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0]
    if not fit or a.dtype != b.dtype or not a.is_floating_point():
        raise ValueError(
            f"{kernel}: a is {a.dtype} of shape {tuple(a.shape)}, b {b.dtype} of shape "
            f"{tuple(b.shape)}; they must be matrices (M, K) and (K, N) of one dtype of floating "
            "point"
        )


def is_aligned(x: Tensor) -> bool:
    """Whether a matrix ``x`` (M, N) can be moved 16 bytes at a time: Triton must find its
    address, its length along memory and its other stride to be multiples of 16."""
    return x.data_ptr() % 16 == 0 and any(
        x.stride(i) == 1 and x.shape[i] % 16 == x.stride(1 - i) % 16 == 0 for i in (0, 1)
    )


def launch(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    out_in: Tensor | None = None,
    beta: float = 0.0,
    alpha: float = 1.0,
) -> None:
    """Write ``a @ b`` of ``a`` (M, K) and ``b`` (K, N), or ``beta * out_in + alpha * (a @ b)``,
    into ``out`` (M, N); ``out_in`` is (M, N), too.

    ``out`` may be ``out_in``, but not share memory with ``a`` or ``b``. ``a`` may be narrower than
    ``b``, as a gradient of bfloat16 is that meets a basis of float32. Nothing is checked, and
    autograd is not told: it is for an operator that declares what it writes.
    """
    (M, K), N = a.shape, b.shape[1]
    matrices = [a, b, out] if out_in is None else [a, b, out, out_in]
    tiles = TILES if all(map(is_aligned, matrices)) else NARROW_TILES
    tile = tiles[b.element_size()]
    grid = (triton.cdiv(M, tile["BLOCK_M"]) * triton.cdiv(N, tile["BLOCK_N"]),)
    like = out if out_in is None else out_in
    matmul_kernel[grid](
        a, b, out_in, out, M, N, K, float(beta), float(alpha),
        *a.stride(), *b.stride(), *like.stride(), *out.stride(),
        GROUP=GROUP, ADD=out_in is not None, **tile,
    )  # fmt: skip


@torch.library.custom_op("lm_from_scratch::matmul", mutates_args=())
def matmul_forward(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    launch(a, b, out)
    return out


@matmul_forward.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def keep_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad
    return (
        matmul_forward(grad, b.mT) if needs_a else None,
        matmul_forward(a.mT, grad) if needs_b else None,
    )


matmul_forward.register_autograd(backward, setup_context=keep_inputs)


@torch.library.custom_op("lm_from_scratch::addmm", mutates_args=())
def addmm_forward(out_in: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    out = out_in.new_empty(out_in.shape)
    launch(a, b, out, out_in, beta, alpha)
    return out


@addmm_forward.register_fake
def _(out_in: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    return out_in.new_empty(out_in.shape)
