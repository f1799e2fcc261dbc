r"""
Matrix product: every number read many times, or once
=====================================================

Nearly all operations of a language model are in matrix products. A number of a matrix takes part in thousands of
multiplications. The memory can deliver it thousands of times, or once, if the kernel keeps it where it computes.

How large must a tile be, so that a GPU computes instead of waiting? What does the order of programs change, if each
computes the same? And what does ``float32`` mean for a unit that multiplies matrices?

You will learn
--------------

* how often each byte is read, and why tiles make this a choice,
* how a program walks along K with two tiles of input and one of sums,
* what TF32 leaves of a float32 number, and why a test on a CPU cannot see it,
* why the order of the programs decides what the cache finds,
* how the same kernel multiplies with weights of 8 bits.

Before you start
----------------

Read the pages on `SwiGLU <1_swiglu.ipynb>`_ and on `softmax <2_softmax.ipynb>`_ as kernels. Without
a GPU the kernels are interpreted.

Letters: C = A B, where A is (M, K), B is (K, N) and C is (M, N).
"""

# sphinx_gallery_words = ["triton matmul", "GEMM", "tl.dot", "TF32", "allow_tf32", "L2 cache", "autotune"]

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

import inspect
from functools import partial

import matplotlib.pyplot as plt
import numpy as np

from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.instruments.roofline import GPUS, Cost, show

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
# A number of C is a sum of K products, so there are 2 M N K operations. The least traffic reads A and B once and writes C
# once. The sizes are those of a map of Qwen2-0.5B, 4096 tokens at a time, in bfloat16.

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
# This is the first kernel of the chapter that memory need not hold up. It need not, but it can. Take a program for each
# number of C: it reads a row of A and a column of B for it.

each = 2 * (2 * FULL["K"] + 1) * FULL["M"] * FULL["N"]
print(
    f"a program for each number moves {each / cost.bytes:,.0f} times the least"
)
assert each > 1000 * cost.bytes
assert 0.49 < cost.operations / each < 0.51

# %%
# Half an operation per byte: that kernel waits for numbers which it has read before. A tile of ``BLOCK_M`` by
# ``BLOCK_N`` numbers of C shares them. All columns of a tile use the same rows of A. So A is read once for each column of
# tiles, and B once for each row of tiles.


def tiled(M, K, N, BLOCK_M, BLOCK_N):
    """Bytes that programs ask for, if each computes one tile."""
    tiles_m, tiles_n = -(-M // BLOCK_M), -(-N // BLOCK_N)
    return Cost(2 * (tiles_n * M * K + tiles_m * K * N + M * N), 2 * M * N * K)


blocks = [1, 2, 4, 8, 16, 32, 64, 128, 256]
intensity = [tiled(**FULL, BLOCK_M=s, BLOCK_N=s).intensity for s in blocks]
assert tiled(**FULL, BLOCK_M=1, BLOCK_N=1).bytes == each
made, (ax,) = figure(6.4, 3.6)
ax.plot(blocks, intensity, "o-", color=COLOURS[0], label="counted")
for (name, gpu), colour, style in zip(
    GPUS.items(), COLOURS[2:], ("--", ":", "-.")
):
    if name != "H200":
        needs = gpu.matrix / gpu.bandwidth
        label = f"{name} computes above"
        ax.axhline(needs, linestyle=style, color=colour, label=label)
ax.set(xscale="log", yscale="log", xlabel="side of a tile")
ax.set(ylabel="operations per byte", xticks=blocks, xticklabels=blocks)
ax.set_title("What a tile saves")
ax.minorticks_off()
ax.legend(frameon=False)
plt.show()
print(f"128 by 128: {intensity[7]:.0f} operations per byte")
assert intensity[7] > 100 * intensity[0]
assert intensity[7] < GPUS["A100"].matrix / GPUS["A100"].bandwidth

# %%
# Twice the side is nearly twice the intensity. But the sums of a tile must be in registers: 128 by 128 are 128 for each of
# 128 threads, and a thread can have 255. That is not enough for either GPU. What is missing must come from a cache, and for this the order of the programs
# matters. First the kernels.
#
# A program for each number
# -------------------------
#
# It loads a row and a column, and adds the products. Numbers beyond K are loaded as 0.


@triton.jit
def number_of_c(a, b, out, N, K, BLOCK: tl.constexpr):
    m, n = tl.program_id(0), tl.program_id(1)
    ks = tl.arange(0, BLOCK)
    row = tl.load(a + m * K + ks, mask=ks < K, other=0.0)
    column = tl.load(b + ks * N + n, mask=ks < K, other=0.0)
    tl.store(out + m * N + n, tl.sum(row * column))


out = torch.empty(M, N, device=DEVICE)
number_of_c[(M, N)](a, b, out, N, K, BLOCK=triton.next_power_of_2(K))
print("matches torch:", matches(out, a @ b))
assert matches(out, a @ b)

# %%
# A program for each tile
# -----------------------
#
# A tile needs ``BLOCK_M`` whole rows of A, which do not fit on the chip. So the program walks along K: it loads
# ``BLOCK_K`` columns of them and as many rows of B, multiplies the two, and adds the product to its sums. ``tl.dot`` is
# the product of two tiles; its third argument is what it adds to. The sums are float32, whatever A and B are.


@triton.jit
def tile_of_c(
    a, b, out, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        left = tl.load(
            a + rows * K + ks[None, :],
            mask=(rows < M) & (ks < K)[None, :],
            other=0.0,
        )
        right = tl.load(
            b + ks[:, None] * N + columns,
            mask=(ks < K)[:, None] & (columns < N),
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    inside = (rows < M) & (columns < N)
    tl.store(out + rows * N + columns, total, mask=inside)


def multiply(kernel, a, b, side=32, **options):
    out = torch.full((len(a), b.shape[1]), torch.nan, device=DEVICE)
    grid = triton.cdiv(len(a), side), triton.cdiv(b.shape[1], side)
    blocks = dict(BLOCK_M=side, BLOCK_N=side, BLOCK_K=32)
    kernel[grid](a, b, out, *out.shape, a.shape[1], **blocks, **options)
    return out


wide = torch.randn(K, 3 * N, device=DEVICE)
for right in (b, wide):
    verdict = matches(multiply(tile_of_c, a, right), a @ right)
    print("matches torch:", verdict)
    assert verdict

# %%
# The result was filled with NaN before, so the verdict also says that every number was written.
#
# The masks of rows and columns only keep the program inside of the matrices: what they hide belongs to sums that are
# not stored. The mask of K is another thing. Numbers beyond K would be *added to sums that are stored*, so they must be
# 0. The museum shows that they must be 0 on both sides.
#
# What float32 means
# ------------------
#
# The matrix units of these GPUs do not multiply float32 numbers. They take TF32: the same sign and exponent, and 10 of the 23 bits that
# follow. Unless it is told otherwise, ``tl.dot`` may round float32 to it, on a GPU. The interpreter never does. The
# next lines drop the bits by hand, so that you see on any machine what is left.


def tf32(x):
    """The nearest numbers with 10 bits after the first."""
    return ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


truth = a.double() @ b.double()


def error(c):
    return (c - truth).abs().max().item()


exact, rounded = (
    multiply(tile_of_c, a, b),
    multiply(tile_of_c, tf32(a), tf32(b)),
)
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
# TF32 has as many bits as float16, and a wider range. For training that can be good enough. For a kernel that says float32
# it is another function, so the package asks for ``ieee``. Then ordinary units compute the product, many times more slowly.
# Half precision is not affected: the product of two such numbers is exact in float32.
#
# The order of the programs
# -------------------------
#
# Programs start in the order of their numbers, as many as fit at once: at least 132 on an H100, one for each of its
# processors. What these read at about the same time is read from memory once, and then found in the L2 cache.
#
# Row after row of tiles, they share few rows of A and want nearly all of B. The package walks through *groups* of 8 rows
# of tiles, column by column. The order is five lines of arithmetic on the number of a program.

from lm_from_scratch.kernels.matmul import GROUP, tile_of

print(inspect.getsource(tile_of.fn))


@triton.jit
def write_tile_of(out, tiles_m, tiles_n, GROUP: tl.constexpr):
    program = tl.program_id(0)
    m, n = tile_of(program, tiles_m, tiles_n, GROUP)
    tl.store(out + 2 * program, m)
    tl.store(out + 2 * program + 1, n)


def order(tiles_m, tiles_n, group):
    """Tile by tile, in the order of the programs."""
    out = torch.empty(tiles_m * tiles_n, 2, dtype=torch.int32, device=DEVICE)
    write_tile_of[(len(out),)](out, tiles_m, tiles_n, GROUP=group)
    return [tuple(tile) for tile in out.tolist()]


tiles_m, tiles_n = 32, 38  # 4096 and 4864 over 128
assert (tiles_m * 128, tiles_n * 128) == (FULL["M"], FULL["N"])
by_row, grouped = order(tiles_m, tiles_n, 1), order(tiles_m, tiles_n, GROUP)
print("every tile once:", set(by_row) == set(grouped))
assert len(set(grouped)) == len(grouped) == tiles_m * tiles_n
assert set(by_row) == set(grouped)

# %%
# Count what the programs of one moment need: distinct rows of tiles of A, and columns of tiles of B.

made, axes = figure(8.4, 3.4, columns=2)
need = {}
for ax, name, tiles in zip(axes, ("row by row", "grouped"), (by_row, grouped)):
    first = tiles[:132]
    rows, columns = ({tile[i] for tile in first} for i in (0, 1))
    need[name] = len(rows) + len(columns)
    print(f"{name}: {len(rows)} of A and {len(columns)} of B")
    picture = np.zeros((tiles_m, tiles_n))
    for m, n in first:
        picture[m, n] = 1.0
    ax.imshow(picture, cmap="Blues", vmax=1.5)
    ax.grid(False)
    ax.set(title=f"The first 132 programs, {name}")
    ax.set(xlabel="column of tiles (B)", ylabel="row of tiles (A)")
plt.show()
print(f"{need['row by row'] / need['grouped']:.2f} times less")
assert need["grouped"] < 0.6 * need["row by row"]

# %%
# No result depends on the order, and no kernel may. It is a hint to the cache. The nearer the shape of what runs
# together is to a square, the less it needs.
#
# The kernel of the package
# -------------------------
#
# It is ``tile_of_c`` in this order, with strides.

from lm_from_scratch.kernels import int8
from lm_from_scratch.kernels.matmul import (
    NARROW_TILES,
    TILES,
    matmul,
    matmul_kernel,
)

print(inspect.getsource(matmul_kernel.fn))

# %%
# * A and B have a stride for each dimension, so a transposed matrix is read as it lies. Both gradients need one, with
#   :math:`A' = C' B^\top` and :math:`B' = A^\top C'`, and both are this kernel.
# * Addresses are moved along K by a step, in 64 bits, instead of being computed anew.
# * ``ADD`` is the second form, which adds to what is there: a step of an optimizer needs it (the page on GaLore).
#
# The sizes of tiles are a table. Half precision has tiles of 128 by 128. float32 has small ones: without matrix units,
# the operands occupy registers, too. Both are smaller where a matrix cannot be read 16 bytes at a time. The next page
# shows why.

for size, name in ((2, "half precision"), (4, "float32")):
    for table in (TILES, NARROW_TILES):
        tile = {k: v for k, v in table[size].items() if "BLOCK" in k}
        print(name, tile)

# %%
# Weights of 8 bits
# -----------------
#
# A model that generates multiplies one token with every weight. M is 1, nothing is reused, and only bytes count. The page
# on quantised weights keeps a matrix as 8-bit codes and a scale for each row. The least traffic for the codes is 1 byte
# a number. To decode them first reads 1, writes 2 in bfloat16, and reads these again.

weight_numbers = FULL["K"] * FULL["N"]
plain = least(1, FULL["K"], FULL["N"])
codes = Cost(plain.bytes - weight_numbers + 2 * FULL["N"], plain.operations)
decoded = 5 * weight_numbers
for name, count in (("bfloat16", plain.bytes), ("codes", codes.bytes)):
    print(f"{name}: {count:,} bytes, {1e6 * count / h100.bandwidth:.2f} us")
print(f"decoded first: {decoded / codes.bytes:.1f} times those of the codes")
assert codes.floor(h100, "matrix") == codes.bytes / h100.bandwidth
assert 1.9 < plain.bytes / codes.bytes < 2.1
assert 4.9 < decoded / codes.bytes < 5.0

# %%
# The kernel changes in two lines. A code is loaded as a byte and cast to the dtype of x, which is exact, since it has
# 7 bits and a sign. The scale is the same for all products of a sum, so it multiplies the sum.


@triton.jit
def tile_of_codes(
    x, codes, scale, out, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        in_x = (rows < M) & (ks < K)[None, :]
        in_codes = (ks < K)[:, None] & (columns < N)
        left = tl.load(x + rows * K + ks[None, :], mask=in_x, other=0.0)
        code = tl.load(
            codes + columns * K + ks[:, None], mask=in_codes, other=0
        )
        right = code.to(left.dtype)  # (BLOCK_K, BLOCK_N)
        total = tl.dot(left, right, total, input_precision="ieee")
    total *= tl.load(scale + columns, mask=columns < N, other=0.0)
    inside = (rows < M) & (columns < N)
    tl.store(out + rows * N + columns, total, mask=inside)


from lm_from_scratch.weights import quantized_weight
from lm_from_scratch.weights.int8 import Int8Weight

weight = Int8Weight.quantize(b.T.contiguous())  # (N, K)
out = torch.full((M, N), torch.nan, device=DEVICE)
tile_of_codes[(triton.cdiv(M, 16), triton.cdiv(N, 32))](
    a, weight.codes, weight.scale, out, M, N, K,
    BLOCK_M=16, BLOCK_N=32, BLOCK_K=64,
)  # fmt: skip
expected = quantized_weight.linear(a, weight)
print("matches the decoded weight:", matches(out, expected))
assert matches(out, expected)

# %%
# The matrix units take 16 rows at once, so a single token is padded with 15 rows of zeros. That costs operations, of which
# there are plenty. The package's kernel adds strides, a bias, and scales for groups within a row.

print(inspect.getsource(int8.int8_linear_kernel.fn))

# %%
# Correct
# -------
#
# Both functions against their references: odd sizes, transposed inputs, forward and gradient, and half precision. What
# half precision may differ by is a rounding or two.


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


shapes = {
    "one number": (1, 1, 1),
    "one token": (1, 40, 33),
    "odd": (35, 37, 70),
}
for name, (m, k, n) in shapes.items():
    p = torch.randn(m, k, device=DEVICE)
    q = torch.randn(n, k, device=DEVICE).T
    weight = Int8Weight.quantize(q.T)
    mine = partial(int8.linear, weight=weight)
    theirs = partial(quantized_weight.linear, weight=weight)
    verdicts = {
        "float32": same(matmul, torch.matmul, p, q),
        "float16": same(
            matmul, torch.matmul, p.half(), q.half(), tolerance=4e-3
        ),
        "8 bits": same(mine, theirs, p),
    }
    print(f"{name}:", verdicts)
    assert all(verdicts.values())

# %%
# ``use_int8_kernel_`` puts the second into a built model, and all its weights of 8 bits are multiplied this way.
#
# How fast
# --------
#
# One is bound by operations, the other by bytes. The floors are those of the two counts above.

show("matmul", cost)
show("int8", codes)

# %%
# Bug museum
# ----------
#
# Exact on the CPU, wrong on the GPU
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A product of float32 numbers runs in TF32 on a GPU, and a generous tolerance hides it.
#
# The product of ``tf32(a)`` and ``tf32(b)`` is what ``tl.dot(left, right)`` can become on a GPU. A user found that results with
# ``TRITON_INTERPRET=1`` and without it differ in the third digit: `larger error in one mode <https://github.com/triton-lang/triton/issues/5895>`_.
# The fixed line has ``input_precision="ieee"``. A tolerance chosen so that the kernel passes hides it. The check
# compares errors: the kernel may be at most twice as far from a float64 truth as torch is.

for name, result in (("ieee", exact), ("TF32", rounded)):
    print(f"{name} passes: {error(result) <= 2 * error(a @ b) + 1e-4}")
assert error(exact) <= 2 * error(a @ b) + 1e-4 < error(rounded)

# %%
# Zero times what?
# ~~~~~~~~~~~~~~~~
#
# Only one of two factors is masked: 0 times NaN is NaN.
#
# The last step along K is only partly inside. If A is loaded as 0 there, then B need not be masked, because 0 times
# anything is 0. This kernel believes it. B is the upper part of a larger tensor, whose lower part is somebody else's.


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


p = torch.randn(5, 20, device=DEVICE)
for below in (7.0, torch.nan):
    memory = torch.full((32, 6), below, device=DEVICE)
    memory[:20] = torch.randn(20, 6, device=DEVICE)
    q, out = memory[:20], torch.empty(5, 6, device=DEVICE)
    half_masked[(1,)](p, q, out, 5, 6, 20, BLOCK=32)
    whole = multiply(tile_of_c, p, q)
    print(
        f"{below} behind B: {matches(out, p @ q)}, masked: {matches(whole, p @ q)}"
    )
    assert matches(out, p @ q) == (below == 7.0) and matches(whole, p @ q)

# %%
# Zero times NaN is NaN. Fresh memory often holds finite numbers, so the bug shows once in many runs. The fixed line has both
# masks, ``(ks < K)[:, None] & (columns < N)``. The check: tests put each tensor between margins of NaN.
#
# Which sentence is false?
# ------------------------
#
# 1. A transposed matrix must be copied before this kernel can multiply with it.
# 2. Twice the side of a tile halves what A and B cost.
# 3. The order of the programs changes no number of the result.
# 4. An 8-bit code loses nothing when it is cast to float16.

p, q = torch.randn(7, 40, device=DEVICE), torch.randn(9, 40, device=DEVICE)
strided_view = q.T
assert not strided_view.is_contiguous()
must_copy = not matches(matmul(p, strided_view), p @ q.T, 1e-5)
inputs = [tiled(**FULL, BLOCK_M=s, BLOCK_N=s).bytes for s in (64, 128)]
output = 2 * FULL["M"] * FULL["N"]
halves = inputs[0] - output == 2 * (inputs[1] - output)
unchanged = set(by_row) == set(grouped)
every = torch.arange(-128, 128).to(torch.int8)
exact_cast = torch.equal(every.half().to(torch.int8), every)
answers = [must_copy, halves, unchanged, exact_cast]
print(answers)
assert answers == [False, True, True, True]

# %%
# The first is false: a transpose is another pair of strides, and the same numbers meet in the same order.
#
# Exercises
# ---------
#
# 1. *Easy.* Draw the figure of intensity again for tiles of 128 by ``BLOCK_N``. A right answer shows that a long thin tile
#    is worse than a square one of the same area, and says which sum of two numbers decides. Hint: divide the bytes of
#    A and B by M N K.
# 2. *Easy.* Which ``GROUP`` needs least, for 132 programs of 32 by 38 tiles? A right answer is a table for all groups from
#    1 to 32, and explains where the minimum lies. Hint: 132 tiles in a square.
# 3. *Medium.* Let ``tile_of_c`` apply SiLU to its sums before it stores them. A right answer equals torch, and counts
#    the bytes of ``FULL`` that a second kernel would have moved. Hint: the sums are float32 in registers.
# 4. *Hard.* With one token, N = 896 gives 28 programs of 32 columns, and most of a GPU idles. Split K among programs
#    and add their sums. A right answer writes partial sums in float32 to a tensor of its own and adds them in a second
#    launch, so that it is the same at every run. Hint: the page on RMSNorm does it for a gradient.
#
# Summary
# -------
#
# * A product has operations enough to keep a GPU busy, if each number that is loaded is used many times.
# * A tile of 128 by 128 reads A and B 128 times less often than a program for each number.
# * Numbers beyond K are 0 on both sides, because 0 times NaN is NaN.
# * TF32 keeps 10 bits after the first. ``ieee`` is an option that a kernel must ask for, and the interpreter hides it.
# * Groups of rows make programs that run together share what they read.
# * With codes of 8 bits the same kernel moves half the bytes of bfloat16, and the scale waits until the end.
#
# ``tl.dot`` is one word here. The next page looks at what it becomes, on three generations of GPUs.
#
# Sources
# -------
#
# * Tillet, Kung, Cox: `Triton <https://www.eecs.harvard.edu/~htk/publication/2019-mapl-tillet-kung-cox.pdf>`_, 2019. Its first example is a product.
# * The `tutorial of Triton <https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html>`_ on matrix products, with the order in groups.
# * Williams, Waterman, Patterson: `Roofline <https://doi.org/10.1145/1498765.1498785>`_, 2009.
# * Dettmers et al.: `LLM.int8() <https://arxiv.org/abs/2208.07339>`_, 2022. Weights and activations in 8 bits.

print("all checks passed")
