r"""
Matrix product: every number read many times, or once
=====================================================

Nearly all operations of a language model are in matrix products. Each number of a matrix takes part in thousands of
multiplications. Memory can deliver it thousands of times, or a few times, if the kernel uses it more often while it is
on the chip.

The product is C = A B, where A is (M, K), B is (K, N) and C is (M, N). Here one program computes a *tile* of C, a block
with rows and columns. It walks along K, and at each step it loads a tile of A and a tile of B. Step through it: what is
crossed out lies outside the matrices, and is masked.
"""

# sphinx_gallery_needs = ["1_swiglu", "2_softmax"]
# sphinx_gallery_words = ["triton matmul", "GEMM", "tl.dot", "tiling", "blocked matrix multiplication", "L2 cache", "swizzle", "arithmetic intensity"]

from lm_from_scratch.drawings import gpu_tiles as drawings

drawings.tile_steps(M=5, K=7, N=7, block=3, block_k=3, tile=(1, 1), first=1)

# %%
# Why so complicated? The simple way is one program for each number of C, which reads a row of A and a column of B.
#
# **Predict first.** A linear map in the MLP of Qwen2-0.5B takes 4,096 tokens from 896 to 4,864 features. The least
# traffic reads A and B once and writes C once. How much does a program for each number move?
#
# * the same, since each number of C is written once
# * about twice as much
# * more than a thousand times as much

from lm_from_scratch.instruments.roofline import GPUS, Cost

M, K, N = 4096, 896, 4864
cost = Cost(bytes=2 * (M * K + K * N + M * N), operations=2 * M * N * K)
each = 2 * (2 * K + 1) * M * N  # bytes, in bfloat16
h100 = GPUS["H100"]
print(f"a program for each number: {each / cost.bytes:,.0f} times the least")
print(f"with the least, {cost.intensity:.0f} operations for each byte")
print(f"an H100 needs {h100.matrix / h100.bandwidth:.0f} to be busy")

assert each > 1000 * cost.bytes
assert 0.49 < cost.operations / each < 0.51
assert cost.intensity > h100.matrix / h100.bandwidth

# %%
# Each number of C asks for a whole row and a whole column again. That leaves half an operation for each byte, so this
# kernel would wait for numbers that it has read before. With the least traffic, the GPU would be busy computing.
#
# The GPU of the first lesson needed 20 operations for each byte. Now it needs 295, because products of matrices run on
# units of their own, the *matrix units*, which compute that much faster.
#
# What a tile saves
# -----------------
#
# All columns of a tile use the same rows of A. So A is read once for each column of *tiles*, and B once for each row of
# tiles. (``-(-M // BLOCK_M)`` divides and rounds up.)


def tiled(M, K, N, BLOCK_M, BLOCK_N):
    """Bytes that programs ask for, if each computes one tile."""
    tiles_m, tiles_n = -(-M // BLOCK_M), -(-N // BLOCK_N)
    return Cost(2 * (tiles_n * M * K + tiles_m * K * N + M * N), 2 * M * N * K)


# %%
# Above its line in the figure, a GPU is busy computing. Below it, the matrix units wait for memory.

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

blocks = [1, 2, 4, 8, 16, 32, 64, 128, 256]
intensity = [tiled(M, K, N, side, side).intensity for side in blocks]

_, (ax,) = figure(4.8, 3.6)
ax.plot(blocks, intensity, "o-", color=COLOURS[0], label="counted")
for name, colour, style in zip(("A100", "H100"), COLOURS[2:], ("--", ":")):
    needs = GPUS[name].matrix / GPUS[name].bandwidth
    label = f"{name} computes above"
    ax.axhline(needs, linestyle=style, color=colour, label=label)
ax.set(xscale="log", yscale="log", xlabel="side of a tile")
ax.set(ylabel="operations per byte", xticks=blocks, xticklabels=blocks)
ax.set_title("What a tile saves")
ax.minorticks_off()
ax.legend(frameon=False)
plt.show()

assert tiled(M, K, N, 1, 1).bytes == each
assert intensity[7] > 100 * intensity[0]
assert intensity[7] < GPUS["A100"].matrix / GPUS["A100"].bandwidth
assert round(intensity[7]) == 60

# %%
# Twice the side gives nearly twice the operations for each byte: 60 for a tile of 128 by 128, more than a hundred times
# as many as for a single number. But the sums of a tile must be in registers, and there it ends: 128 by 128 are 128 sums
# for each of 128 threads, and a thread can have 255 registers.
#
# And 60 is not enough for either GPU. The rest must come from a cache, and for this the order of the programs matters.
# First the kernels.
#
# A program for each number
# -------------------------
#
# It loads a row and a column, and adds the products. Numbers beyond K are loaded as 0.

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl


@triton.jit
def number_of_c(a, b, out, N, K, BLOCK: tl.constexpr):
    m, n = tl.program_id(0), tl.program_id(1)
    ks = tl.arange(0, BLOCK)
    row = tl.load(a + m * K + ks, mask=ks < K, other=0.0)
    column = tl.load(b + ks * N + n, mask=ks < K, other=0.0)
    tl.store(out + m * N + n, tl.sum(row * column))


# %%
# The grid has two axes, the rows and the columns of C. From here on we multiply smaller matrices.

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
M, K, N = (13, 300, 11) if DEVICE == "cpu" else (500, 1000, 700)
torch.manual_seed(0)
a, b = torch.randn(M, K, device=DEVICE), torch.randn(K, N, device=DEVICE)


def matches(ours, theirs):  # sums of K products, in another order
    close = torch.allclose(ours, theirs, atol=1e-3, rtol=1e-4)
    return ours.shape == theirs.shape and close


out = torch.empty(M, N, device=DEVICE)
number_of_c[(M, N)](a, b, out, N, K, BLOCK=triton.next_power_of_2(K))
print("matches torch:", matches(out, a @ b))

assert matches(out, a @ b)

# %%
# A program for each tile
# -----------------------
#
# A tile needs whole rows of A, and many long rows do not fit into one processor. So the program walks along K, as in the
# first picture. It loads two tiles, multiplies them, and adds the product to its sums: ``tl.dot`` does both, and its third
# argument is the sums. (``ieee`` asks for the full precision of float32. The in-depth page says why.)


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
        in_a = (rows < M) & (ks < K)[None, :]
        in_b = (ks < K)[:, None] & (columns < N)
        left = tl.load(a + rows * K + ks[None, :], mask=in_a, other=0.0)
        right = tl.load(b + ks[:, None] * N + columns, mask=in_b, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    inside = (rows < M) & (columns < N)
    tl.store(out + rows * N + columns, total, mask=inside)


# %%
# The sums are float32, whatever A and B are. We fill ``out`` with NaN beforehand, so the verdict also says that every
# number was written.


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
# Zero times what?
# ----------------
#
# The masks of rows and columns only keep the program inside the matrices: what they hide belongs to sums that are not
# stored. The mask of K is different. Numbers beyond K would be added to sums that *are* stored.
#
# A programmer thinks: if A is loaded as 0 beyond K, then B needs no mask there, because 0 times anything is 0. All tests
# pass. Weeks later a loss is NaN, once in many runs. What is 0 times NaN? It is NaN, and NaN is what the memory after B
# happened to hold that day. So our kernel has both masks.
#
# The order of the programs
# -------------------------
#
# At full size there are 32 by 38 tiles of 128 by 128. A GPU promises no order, but it usually starts programs in the order
# of their numbers, as many as fit at once: at least 132 on an H100, one for each processor. What these read at about the
# same time comes from memory once, and is then found in the *L2 cache*, which all processors share.
#
# So it matters which tile a program takes. The function ``tile_of`` turns the number of a program into a tile, and
# ``write_tile_of`` stores what it says.
#
# **Predict first.** One order goes row after row of tiles. The other walks through *groups* of 8 rows of tiles, column
# by column. Which one needs fewer rows of tiles from A, and columns from B, for its first 132 programs?
#
# * row after row: 132 tiles are less than four rows
# * in groups
# * the same: 132 tiles are 132 tiles

from lm_from_scratch.kernels.matmul import GROUP, tile_of


@triton.jit
def write_tile_of(out, tiles_m, tiles_n, GROUP: tl.constexpr):
    program = tl.program_id(0)
    m, n = tile_of(program, tiles_m, tiles_n, GROUP)
    tl.store(out + 2 * program, m)
    tl.store(out + 2 * program + 1, n)


def order(tiles_m, tiles_n, group):
    out = torch.empty(tiles_m * tiles_n, 2, dtype=torch.int32, device=DEVICE)
    write_tile_of[(len(out),)](out, tiles_m, tiles_n, GROUP=group)
    return [tuple(tile) for tile in out.tolist()]


by_row, grouped = order(32, 38, 1), order(32, 38, GROUP)
orders = {"row by row": by_row, "in groups of 8": grouped}

need = [
    len({m for m, _ in tiles[:132]}) + len({n for _, n in tiles[:132]})
    for tiles in (by_row, grouped)
]
print(f"{need[0]} or {need[1]}: {need[0] / need[1]:.2f} times less")

assert need[1] < 0.6 * need[0]
assert GROUP == 8 and (32 * 128, 38 * 128) == (4096, 4864)
assert len(set(grouped)) == len(grouped) == 32 * 38
assert set(by_row) == set(grouped)
drawings.first_programs(orders, 32, 38, 132)

# %%
# Row after row, the programs of one moment share few rows of A and want all columns of B. In groups they need a few of
# each: the nearer their shape is to a square, the less they read.
#
# The order changes no result. It only helps the cache.
#
# Let the kernel choose a word
# ----------------------------
#
# Our small Qwen2 ends with its largest product: the vectors of all tokens, times one column for each token of the
# vocabulary. Here our kernel computes it.

from lm_from_scratch.checkpoint.weights import load_shipped

model, tokenizer = load_shipped("qwen2-docs")
model.to(DEVICE)
idx = torch.tensor([tokenizer.start("Return the number of")], device=DEVICE)
with torch.no_grad():
    states, weight = model.model(idx)[0], model.head.weight  # (T, C), (V, C)
    logits = multiply(tile_of_c, states, weight.T.contiguous())
    expected = model(idx)[0]
print("logits match torch:", matches(logits, expected))
print(repr(tokenizer.decode([logits[-1].argmax().item()])))

assert matches(logits, expected)
assert logits[-1].argmax() == expected[-1].argmax()

# %%
# A model spends most of its time like this: on tiles, and sums along K.
#
# In depth: `precision, the package's kernel, and the single mask <6a_matmul_in_depth.ipynb>`_, and a product with
# `weights of 8 bits <6b_int8_product.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* Draw the figure of intensity again for tiles of 128 by ``BLOCK_N``. A right answer shows that a long thin
#    tile is worse than a square one of the same area, and says which sum of two numbers decides. Hint: divide the bytes
#    of A and B by M N K.
# 2. *Easy.* Which ``GROUP`` needs least, for 132 programs of 32 by 38 tiles? A right answer is a table for all groups
#    from 1 to 32, and explains where the minimum lies. Hint: 132 tiles in a square.
# 3. *Medium.* Let ``tile_of_c`` apply SiLU to its sums before it stores them. A right answer equals torch, and counts
#    the bytes that a second kernel would have moved for 4,096 by 4,864 numbers. Hint: the sums are float32 in
#    registers.
#
# Summary
# -------
#
# * A product has enough operations to keep a GPU busy, if each number that is loaded is used many times: a tile of 128
#   by 128 reads A and B 128 times less often than a program for each number.
# * Numbers beyond K are 0 on both sides, because 0 times NaN is NaN.
# * Groups of rows make programs that run together share what they read.
