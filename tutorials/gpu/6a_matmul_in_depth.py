r"""
The matrix product as a kernel, in depth
========================================

The lesson on the `matrix product <6_matmul.ipynb>`_ computes C = A B tile by tile. What does float32 mean for a unit
that multiplies matrices? What does the package's kernel add? And why do two of its mistakes pass the tests on a CPU?
"""

# sphinx_gallery_needs = ["6_matmul"]
# sphinx_gallery_words = ["TF32", "allow_tf32", "input_precision", "tensor cores", "autotune", "addmm", "NaN in matmul"]

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

import inspect

from lm_from_scratch.instruments.roofline import GPUS, Cost, show
from lm_from_scratch.kernels.matmul import (
    GROUP,
    NARROW_TILES,
    TILES,
    matmul,
    matmul_kernel,
    tile_of,
)

M, K, N = (13, 300, 11) if DEVICE == "cpu" else (500, 1000, 700)
torch.manual_seed(0)
a = torch.randn(M, K, device=DEVICE)
b = torch.randn(K, N, device=DEVICE)


def matches(ours, theirs, tolerance=1e-3):
    """Sums of K products of normal numbers, in another order."""
    return ours.shape == theirs.shape and bool(
        torch.allclose(ours, theirs, atol=tolerance, rtol=1e-4)
    )


# %%
# Count first
# -----------
#
# A number of C is a sum of K products, so there are 2 M N K operations. The least traffic reads A and B once and writes
# C once. The sizes are those of a map of Qwen2-0.5B, 4096 tokens at a time, in bfloat16.

FULL = dict(M=4096, K=896, N=4864)


def least(M, K, N):
    return Cost(bytes=2 * (M * K + K * N + M * N), operations=2 * M * N * K)


cost = least(**FULL)
h100 = GPUS["H100"]
print(f"{cost.operations:,} operations, {cost.bytes:,} bytes")
print(f"{cost.intensity:.0f} operations per byte")
print(f"an H100 needs {h100.matrix / h100.bandwidth:.0f} to be busy")
print(f"at least {1e6 * cost.floor(h100, 'matrix'):.0f} microseconds")
assert cost.intensity > h100.matrix / h100.bandwidth
assert cost.floor(h100, "matrix") == cost.operations / h100.matrix

# %%
# The floor is that of the operations. A GPU shows how near the kernel of the package comes.

show("matmul", cost)

# %%
# The kernel of the package
# -------------------------
#
# It is ``tile_of_c`` of the lesson with strides, in the order of groups. The order is five lines of arithmetic on the
# number of a program.

print(inspect.getsource(tile_of.fn))

# %%
# The product calls it first, to know its tile.

print(inspect.getsource(matmul_kernel.fn))

# %%
# * A and B have a stride for each dimension, so a transposed matrix is read as it lies. Both gradients need one, with
#   :math:`A' = C' B^\top` and :math:`B' = A^\top C'`, and both are this kernel.
# * Addresses are moved along K by a step, in 64 bits, instead of being computed anew.
# * ``ADD`` makes a second form of the kernel, which adds to what is there. The step of an optimizer needs it: see
#   `GaLore <8_galore.ipynb>`_.
#
# The sizes of tiles are a table. Half precision has tiles of 128 by 128. float32 has small ones: without matrix units,
# the operands occupy registers, too. Both are smaller where a matrix cannot be read 16 bytes at a time. The page on
# `the machine code <7_gpu_code.ipynb>`_ shows why.

for size, name in ((2, "half precision"), (4, "float32")):
    for table in (TILES, NARROW_TILES):
        tile = {k: v for k, v in table[size].items() if "BLOCK" in k}
        print(name, tile)

# %%
# What float32 means
# ------------------
#
# The matrix units of these GPUs do not multiply float32 numbers. They take TF32: the same sign and exponent, and 10 of
# the 23 bits that follow. Unless it is given another option, ``tl.dot`` may round float32 to it, on a GPU. The
# interpreter never does. The next lines drop the bits by hand, so that you see on any machine what is left.


def tf32(x):
    """The nearest numbers with 10 bits after the first."""
    return ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


# %%
# The package's ``matmul`` multiplies both: the numbers as they are, and what TF32 leaves of them. The truth is float64.

truth = a.double() @ b.double()


def error(c):
    return (c - truth).abs().max().item()


exact, rounded = matmul(a, b), matmul(tf32(a), tf32(b))
half = a.half().double() @ b.half().double()
print("ieee matches torch:", matches(exact, a @ b))
print("TF32 matches torch:", matches(rounded, a @ b))
print("TF32 is 20 times worse:", error(rounded) > 20 * error(exact))
print("as wrong as float16:", 0.5 < error(rounded) / error(half) < 2)
assert matches(exact, a @ b) and not matches(rounded, a @ b)
assert error(rounded) > 20 * error(exact)
assert 0.5 < error(rounded) / error(half) < 2
assert h100.matrix > 10 * h100.scalar

# %%
# TF32 has as many bits as float16, and a wider range. For training that can be good enough. For a kernel that says
# float32 it is another function, so the package asks for ``ieee``. Then ordinary units compute the product, many times
# more slowly. Half precision is not affected: the product of two such numbers is exact in float32.
#
# Correct
# -------
#
# The package's function against ``torch.matmul``: odd sizes, transposed inputs, forward and gradient, and half
# precision. What half precision may differ by is a rounding or two.


def same(ours, theirs, *inputs, tolerance=1e-5):
    results = []
    for function in (ours, theirs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = function(*leaves)
        grads = torch.autograd.grad(y, leaves, y.detach())
        results.append([y.detach(), *grads])
    return all(
        matches(
            mine.float(), their.float(), tolerance * float(their.abs().max())
        )
        for mine, their in zip(*results)
    )


# %%
# The second matrix is a transposed one, as the weight of a linear layer.

shapes = {
    "one number": (1, 1, 1),
    "one token": (1, 40, 33),
    "odd": (35, 37, 70),
}
for name, (m, k, n) in shapes.items():
    p = torch.randn(m, k, device=DEVICE)
    q = torch.randn(n, k, device=DEVICE).T
    verdicts = {
        "float32": same(matmul, torch.matmul, p, q),
        "float16": same(
            matmul, torch.matmul, p.half(), q.half(), tolerance=4e-3
        ),
    }
    print(f"{name}:", verdicts)
    assert all(verdicts.values())

# %%
# Bug museum
# ----------
#
# Exact on the CPU, wrong on the GPU
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A product of float32 numbers runs in TF32 on a GPU, and a generous tolerance hides it. (M32)
#
# The product of ``tf32(a)`` and ``tf32(b)`` is what ``tl.dot(left, right)`` can become on a GPU. A user found that
# results with ``TRITON_INTERPRET=1`` and without it differ in the third digit:
# `larger error in one mode <https://github.com/triton-lang/triton/issues/5895>`_.
# The fixed line has ``input_precision="ieee"``. A tolerance chosen so that the kernel passes hides it. The check
# compares errors: the kernel may be at most twice as far from a float64 truth as torch is.

for name, result in (("ieee", exact), ("TF32", rounded)):
    print(f"{name} passes: {error(result) <= 2 * error(a @ b) + 1e-4}")
assert error(exact) <= 2 * error(a @ b) + 1e-4 < error(rounded)

# %%
# Zero times what?
# ~~~~~~~~~~~~~~~~
#
# Only one of two factors is masked: 0 times NaN is NaN. (M33)
#
# The last step along K is only partly inside. If A is loaded as 0 there, then B need not be masked, because 0 times
# anything is 0. This kernel believes it.


@triton.jit
def half_masked(a, b, out, M, N, K, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        ks = k + tl.arange(0, BLOCK)
        in_a = (rows < M) & (ks < K)[None, :]
        left = tl.load(a + rows * K + ks[None, :], mask=in_a, other=0.0)
        right = tl.load(
            b + ks[:, None] * N + columns, mask=columns < N, other=0.0
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    inside = (rows < M) & (columns < N)
    tl.store(out + rows * N + columns, total, mask=inside)


# %%
# B is the upper part of a larger tensor, whose lower part is somebody else's: once it holds sevens, once NaN.

p = torch.randn(5, 20, device=DEVICE)
for below in (7.0, torch.nan):
    memory = torch.full((32, 6), below, device=DEVICE)
    memory[:20] = torch.randn(20, 6, device=DEVICE)
    q, out = memory[:20], torch.empty(5, 6, device=DEVICE)
    half_masked[(1,)](p, q, out, 5, 6, 20, BLOCK=32)
    whole = matmul(p, q)
    print(
        f"{below} after B: {matches(out, p @ q)}, masked: {matches(whole, p @ q)}"
    )
    assert matches(out, p @ q) == (below == 7.0) and matches(whole, p @ q)

# %%
# Zero times NaN is NaN. Fresh memory often holds finite numbers, so the bug shows once in many runs. The fixed line has
# both masks, ``(ks < K)[:, None] & (columns < N)``. The check: tests put each tensor between margins of NaN.
#
# Which sentence is false?
# ------------------------
#
# 1. A transposed matrix must be copied before this kernel can multiply with it.
# 2. Twice the side of a tile halves what A and B cost.
# 3. The order of the programs changes no number of the result.
# 4. float16 loses nothing of a whole number from -128 to 127.


def read(M, K, N, side):
    """Numbers of A and B that programs ask for, in tiles of one side."""
    return -(-N // side) * M * K + -(-M // side) * K * N


@triton.jit
def write_tile_of(out, tiles_m, tiles_n, GROUP: tl.constexpr):
    program = tl.program_id(0)
    m, n = tile_of(program, tiles_m, tiles_n, GROUP)
    tl.store(out + 2 * program, m)
    tl.store(out + 2 * program + 1, n)


orders = []
for group in (1, GROUP):  # row by row, and in groups: every tile once
    out = torch.empty(32 * 38, 2, dtype=torch.int32, device=DEVICE)
    write_tile_of[(len(out),)](out, 32, 38, GROUP=group)
    orders.append({tuple(tile) for tile in out.tolist()})

p, q = torch.randn(7, 40, device=DEVICE), torch.randn(9, 40, device=DEVICE)
strided_view = q.T
assert not strided_view.is_contiguous()
must_copy = not matches(matmul(p, strided_view), p @ q.T, 1e-5)
halves = read(**FULL, side=64) == 2 * read(**FULL, side=128)
unchanged = orders[0] == orders[1] and len(orders[0]) == 32 * 38
every = torch.arange(-128, 128).to(torch.int8)
exact_cast = torch.equal(every.half().to(torch.int8), every)
answers = [must_copy, halves, unchanged, exact_cast]
print(answers)
assert answers == [False, True, True, True]

# %%
# The first is false: a transpose is another pair of strides, and the same numbers meet in the same order.
#
# Summary
# -------
#
# * At full size a product is bound by operations, not by memory.
# * TF32 keeps 10 bits after the first. ``ieee`` is an option that a kernel must ask for, and the interpreter hides it.
# * Strides let one kernel compute the product and both of its gradients.
# * Numbers beyond K are 0 on both sides, because 0 times NaN is NaN.
#
# Sources
# -------
#
# * Tillet, Kung, Cox: `Triton <https://www.eecs.harvard.edu/~htk/publication/2019-mapl-tillet-kung-cox.pdf>`_, 2019.
#   Its first example is a product.
# * The `tutorial of Triton <https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html>`_ on
#   matrix products, with the order in groups.
# * Williams, Waterman, Patterson: `Roofline <https://doi.org/10.1145/1498765.1498785>`_, 2009.

print("all checks passed")
