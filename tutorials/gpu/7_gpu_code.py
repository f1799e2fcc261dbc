r"""
GPU code: what a product becomes
================================

``tl.dot`` is one word of Python. Behind it are three generations of matrix units, which share neither their
instructions nor their idea of who computes. The kernel does not change. The compiler writes another program for each.

Does the kernel use these units at all? Does a tile fit, and on which GPU? The compiler answers without a GPU: it writes
real machine code for any of them, on any machine. On this page nothing is interpreted and nothing runs. It only compiles.

You will learn
--------------

* which instructions multiply on an A100, an H100 and a B200, and how to count them,
* how numbers travel from memory to the matrix units, and what a wrong alignment costs,
* why sums need registers, what a spill is, and which GPU does without,
* how shared memory decides which tile fits on which GPU,
* which faults only a compiler can see.

Before you start
----------------

Read the page on `the matrix product <6_matmul.ipynb>`_. Any machine with Linux will do.

An architecture has a number: ``sm_80`` is the A100, ``sm_86`` a desktop card of its time, ``sm_90`` the H100, ``sm_100``
the B200, ``sm_120`` a desktop card of that time.
"""

# sphinx_gallery_words = ["PTX", "SASS", "register spilling", "occupancy", "tensor cores", "num_warps", "num_stages"]

import os

os.environ.pop("TRITON_INTERPRET", None)  # this page compiles

import math
import re

import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl

from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.instruments.roofline import Cost, show
from lm_from_scratch.kernels.compilation import SHARED_LIMIT, compiled_for
from lm_from_scratch.kernels.matmul import TILES, matmul, matmul_kernel

M, K, N = 4096, 896, 4864  # a map of Qwen2-0.5B, 4096 tokens

# %%
# Count first
# -----------
#
# The tile of the package for half precision has 128 by 128 sums, and walks along K in steps of 32. A program has 4
# *warps* of 32 threads. What must each instruction and each register do?

tile = dict(TILES[2])
rows, columns, step, warps, stages = tile.values()
threads = 32 * warps
products = rows * columns * step  # of one step
sums = rows * columns // threads  # of one thread
step_bytes = 2 * (rows + columns) * step
print(f"{products:,} products in a step")
print(f"{sums} sums for each of {threads} threads")
print(f"{step_bytes:,} bytes of A and B in a step")
assert (products, sums, step_bytes) == (524_288, 128, 16_384)

# %%
# A thread has 255 registers at most. Half of them hold sums, if the sums are in registers.
#
# Compile instead of launch
# -------------------------
#
# Triton compiles a kernel when it is launched. ``compiled_for`` lets the ordinary function of the package run on CPU tensors,
# and catches the launch: the kernel is compiled for the architecture that you name, and not started.

a = torch.zeros(M, K, dtype=torch.bfloat16)
b = torch.zeros(K, N, dtype=torch.bfloat16)
ARCHITECTURES = (80, 90, 100)
compiled = {}
for arch in ARCHITECTURES:
    with compiled_for(arch) as kernels:
        matmul(a, b)
    (compiled[arch],) = kernels
print({f"sm_{arch}": kernel.name for arch, kernel in compiled.items()})
assert all(kernel.cubin for kernel in compiled.values())

# %%
# ``cubin`` is the binary that a driver would load. ``ptx`` is the assembly before it, which can be read.
#
# Who multiplies
# --------------
#
# These are the matrix instructions of the three. Each architecture uses its own, and none of the others.

KINDS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
for arch, kernel in compiled.items():
    used = [kind for kind in KINDS if kernel.count(kind)]
    print(f"sm_{arch}", *sorted(set(kernel.names(used[0]))))
    assert used == [KINDS[ARCHITECTURES.index(arch)]]

# %%
# The first two names say the size of what one instruction multiplies, as ``m16n8k16``. So they can be counted before
# they are counted. On the A100 each *warp* multiplies its part of the tile. On the H100 four warps together issue one
# instruction, a *warp group*.

for arch, kind, groups in ((80, "mma.sync", warps), (90, "wgmma", warps // 4)):
    found = compiled[arch].names(kind + ("." if arch == 80 else ".mma_async"))
    size = re.search(r"m(\d+)n(\d+)k(\d+)", found[0]).groups()
    each = math.prod(map(int, size))
    expected = products // each // groups
    print(f"sm_{arch}: {expected} expected, {len(found)} found")
    assert len(found) == expected
assert compiled[100].count("tcgen05.mma") < compiled[80].count("mma.sync") / 4

# %%
# What differs is more than the size.
#
# * ``mma.sync``: the 32 threads of a warp hold both operands and the sums in their registers, and wait for the result.
# * ``wgmma``: the operands stay in shared memory, and only the sums are in registers. It is asynchronous: the warps go
#   on and wait later.
# * ``tcgen05.mma``: one thread issues it for all. The sums have a memory of their own, the *tensor memory*, and come to
#   registers at the end.
#
# The instructions around them show it.


def using(instruction):
    return {arch: k.count(instruction) > 0 for arch, k in compiled.items()}


asynchronous, tensor_memory = using("wgmma.wait_group"), using("tcgen05.ld")
print("waits for groups of multiplications:", asynchronous)
print("loads from tensor memory:", tensor_memory)
assert compiled[80].count("ldmatrix.sync")  # operands, to registers
assert asynchronous == {80: False, 90: True, 100: False}
assert tensor_memory == {80: False, 90: False, 100: True}

# %%
# How numbers arrive
# ------------------
#
# ``tl.load`` in the loop became ``cp.async``: a copy from memory to shared memory that passes no register and does not
# wait. While one step is multiplied, the next steps are on their way. A thread copies 16 bytes at once, so a step needs
# as many copies as this.

copies = step_bytes // (16 * threads)
ahead = stages - 1
for arch, kernel in compiled.items():
    found = kernel.count("cp.async.cg")
    print(f"sm_{arch}: {found % copies == 0}, ahead: {found >= ahead * copies}")
    assert found % copies == 0 and found >= ahead * copies
    assert not kernel.count("ld.global") and not kernel.count("cp.async.bulk")
assert compiled[80].count("cp.async.cg") == stages * copies

# %%
# The first steps are requested before the loop, and each round of the loop requests one more. No thread loads a number
# itself: there is no ``ld.global``. There is no ``cp.async.bulk`` either, the unit of the H100 and later which fetches a
# whole tile for one thread. It needs a *tensor descriptor* instead of pointers, and the package uses pointers, which
# all architectures have.
#
# Sixteen bytes at once must begin at a multiple of 16. Triton knows that from the arguments: it notes whether a stride is a multiple
# of 16. With rows of 895 numbers, it is not.


def product(arch, a=a, b=b, **changes):
    """The kernel for other matrices or another tile."""
    c = a.new_zeros(len(a), b.shape[1])
    with compiled_for(arch) as kernels:
        matmul_kernel[(1,)](
            a, b, None, c, *c.shape, len(b), 0.0, 1.0,
            *a.stride(), *b.stride(), *c.stride(), *c.stride(),
            GROUP=8, ADD=False, **(tile | changes),
        )  # fmt: skip
    return kernels[0]


odd = product(80, a[:, :895].contiguous(), b[:895])
single = rows * step // threads  # numbers of A in a step, for a thread
print("loads of single numbers:", odd.count("ld.global"), "expected:", single)
print(
    "wide copies left:",
    odd.count("cp.async.cg") / compiled[80].count("cp.async.cg"),
)
assert odd.count("ld.global") == single == 32
assert odd.count("cp.async.cg") == compiled[80].count("cp.async.cg") // 2

# %%
# B still has rows of 4864 numbers and is copied as before. A is loaded number by number, through registers: 32 loads
# instead of 4 copies. That is why models have sizes that are multiples of 64.
#
# What float32 becomes
# --------------------
#
# The page on the matrix product claims that float32 is rounded to TF32 unless the kernel asks for ``ieee``, and that
# ``ieee`` uses no matrix unit. Here is the proof: a product with and without the option.


@triton.jit
def small_product(a, out, K: tl.constexpr, EXACT: tl.constexpr):
    i, ks = tl.arange(0, 32), tl.arange(0, K)
    left = tl.load(a + i[:, None] * K + ks[None, :])
    right = tl.load(a + ks[:, None] + i[None, :] * K)
    if EXACT:
        c = tl.dot(left, right, input_precision="ieee")
    else:
        c = tl.dot(left, right)
    tl.store(out + i[:, None] * 32 + i[None, :], c)


def small(arch, dtype, K=16, EXACT=False):
    with compiled_for(arch) as kernels:
        given = torch.zeros(32 * K, dtype=dtype), torch.zeros(32 * 32)
        small_product[(1,)](*given, K=K, EXACT=EXACT)
    return kernels[0]


by_default, exact = (small(90, torch.float32, EXACT=e) for e in (False, True))
for name, kernel in (("default", by_default), ("ieee", exact)):
    units = kernel.count("mma.sync") > 0
    ordinary = kernel.count("fma.rn.f32") > 0
    print(
        f"{name}: matrix units {units}, tf32 {'tf32' in kernel.ptx}, fma {ordinary}"
    )
assert by_default.count("mma.sync") and "tf32" in by_default.ptx
assert not exact.count("mma.sync") and "tf32" not in exact.ptx
assert exact.count("fma.rn.f32")

# %%
# A spill, on purpose
# -------------------
#
# A tile of 128 by 256 halves what A costs. With 4 warps a thread has 256 sums, and there are 255 registers.

wide = dict(BLOCK_N=256, BLOCK_K=16, num_stages=2)
needed = rows * 256 // threads
spilled = {arch: product(arch, **wide) for arch in (90, 100)}
for arch, kernel in spilled.items():
    print(f"sm_{arch}: {needed} sums, spills: {kernel.spills > 0}")
more_warps = product(90, **wide, num_warps=8)
print(f"sm_90 with 8 warps: spills: {more_warps.spills > 0}")
assert needed == 256
assert spilled[90].spills > 0 and spilled[90].registers == 255
assert spilled[100].spills == more_warps.spills == 0

# %%
# The H100 has to *spill*: numbers that find no register are written to memory and read again, in every step. The result is
# right and late. With 8 warps each thread has half as many sums, and all is well. The B200 keeps them in tensor memory,
# and needs registers for them at the end only.
#
# There is another way to run out. Let a linear map have 895 inputs and 4863 outputs. Numbers move one by one now, and
# each needs an address of its own, which takes two registers. Beside 128 sums there is no room for them. Where a
# matrix is not aligned, the package takes a smaller tile.

x = torch.zeros(M, 895, dtype=torch.bfloat16)
weight = torch.zeros(4863, 895, dtype=torch.bfloat16)
large = product(90, x, weight.T)
with compiled_for(90) as kernels:
    matmul(x, weight.T)
(smaller,) = kernels
print("odd sizes, the large tile spills:", large.spills > 0)
print("odd sizes, the package's tile spills:", smaller.spills > 0)
assert large.spills > 0 and smaller.spills == 0

# %%
# Does it fit?
# ------------
#
# Shared memory holds the steps that are on their way. A program that asks for more than there is cannot start. Three tiles with
# steps of 64 and 4 stages show what an H100 has room for, and a desktop card has not.

tiles = {f"{m} x {n}": (m, n) for m, n in ((64, 64), (128, 128), (128, 256))}
needs = {}
for name, (m, n) in tiles.items():
    for arch in (86, 90):
        changes = dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=64, num_warps=8)
        needs[name, arch] = product(arch, **changes).shared
    fits = {
        f"sm_{arch}": needs[name, 86 if arch in (80, 86) else 90] <= limit
        for arch, limit in SHARED_LIMIT.items()
        if arch in (80, 86, 90)
    }
    print(f"{name:9}", fits)
    one_step = 2 * (m + n) * 64
    assert 0.7 < needs[name, 86] / (3 * one_step) < 1.3
    assert 0.7 < needs[name, 90] / (4 * one_step) < 1.3
assert product(86).shared == compiled[80].shared  # they need the same
assert needs["128 x 256", 90] < SHARED_LIMIT[90]
assert SHARED_LIMIT[86] < needs["128 x 256", 86] < SHARED_LIMIT[80]

made, (ax,) = figure(8.0, 3.8)
for i, (arch, card) in enumerate(((86, "sm_80, sm_86"), (90, "sm_90"))):
    heights = [needs[name, arch] / 1024 for name in tiles]
    places = [x + 0.36 * i - 0.18 for x in range(len(tiles))]
    ax.bar(places, heights, 0.34, color=COLOURS[i], label=f"needed on {card}")
for (arch, style), colour in zip(
    ((86, ":"), (80, "--"), (90, "-")), COLOURS[2:]
):
    limit = SHARED_LIMIT[arch] / 1024
    ax.axhline(
        limit, color=colour, linestyle=style, label=f"limit of sm_{arch}"
    )
ax.set(xticks=range(len(tiles)), xticklabels=list(tiles))
ax.set(xlabel="tile, with steps of 64 and 4 stages", ylabel="KiB")
ax.set_title("Shared memory of a program")
ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %%
# The H100 needs a step more. Its ``wgmma`` reads one step from shared memory while another arrives. The other two have copied
# that step to registers by then.
# The tile of the package needs steps of 32 only, and fits everywhere.
#
# Correct
# -------
#
# No number was computed here, so nothing can be compared with torch. What can be checked is that the package's kernel is fit to
# start: shared memory within the limit, registers within 255, no spill.

for arch, kernel in compiled.items():
    verdicts = (
        kernel.shared <= SHARED_LIMIT[arch],
        sums * (arch < 100) < kernel.registers <= 255,
        kernel.spills == 0,
    )
    print(f"sm_{arch}:", verdicts)
    assert all(verdicts)

# %%
# The tests of the package ask this of every kernel, forward and backward, for three architectures, at the sizes of
# models. They compile products, norms and softmax at odd sizes, too.
#
# How fast
# --------
#
# The code does not say. It says how many programs a processor can hold at a time: an H100 has 65,536 registers and 228 KiB
# of shared memory for each of its processors. Two programs or more can hide the waiting of one behind the work of another.

kernel = compiled[90]
by_registers = 65_536 // (kernel.registers * threads)
by_memory = 228 * 1024 // (kernel.shared + 1024)  # 1 KiB is the system's
print("two programs or more fit:", min(by_registers, by_memory) >= 2)
assert min(by_registers, by_memory) >= 2
show("matmul", Cost(2 * (M * K + K * N + M * N), 2 * M * N * K))

# %%
# Bug museum
# ----------
#
# The tile of another GPU
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# A kernel that needs more shared memory than another card has.
#
# A kernel is tuned on an H100 and published. On a desktop card it stops at the first launch: `Required: 131072, Hardware
# limit: 101376 <https://github.com/triton-lang/triton/issues/8182>`_. The interpreter has no such limit, and neither has the
# machine of the author. Here is one that fits on one card only, and the fixed line, with fewer stages.

too_big = dict(BLOCK_N=256, BLOCK_K=64, num_warps=8)
for stages in (4, 2):
    shared = product(86, **too_big, num_stages=stages).shared
    print(f"{stages} stages fit on sm_86: {shared <= SHARED_LIMIT[86]}")
    assert (shared <= SHARED_LIMIT[86]) == (stages == 2)

# %%
# The check is the table above: compile for each architecture that you name, and compare.
#
# Eight is too few
# ~~~~~~~~~~~~~~~~
#
# A block as short as the sequence is below what a matrix instruction takes.
#
# A kernel takes its block from the length of the sequence, which works until someone calls it with 8 tokens or fewer:
# `compiler error with short sequences <https://github.com/fla-org/flash-linear-attention/issues/88>`_. The matrix
# instructions take 16 numbers of K at least. The interpreter multiplies any two tiles, so a test on a CPU passes.

for K_of_tile in (8, 16):
    try:
        small(90, torch.bfloat16, K=K_of_tile)
        compiles = True
    except triton.CompilationError as error:
        compiles = False
        print("the compiler asks for K >= 16:", "K >= 16" in str(error))
    print(f"K = {K_of_tile} compiles: {compiles}")
    assert compiles == (K_of_tile == 16)

# %%
# The fixed line takes ``max(16, ...)`` as the block, and masks what is beyond the sequence. The check: compile what you launch
# with the smallest sizes, too.
#
# Which sentence is false?
# ------------------------
#
# 1. ``sm_120`` is newer than ``sm_100``, so it has all its instructions.
# 2. One ``wgmma`` of this page multiplies 64 times as much as one ``mma.sync``.
# 3. With fewer stages a program needs less shared memory.
# 4. A product in ``ieee`` float32 uses no matrix unit.

newest = product(120)
has_all = newest.count("tcgen05.mma") > 0
assert newest.count("mma.sync") == compiled[80].count("mma.sync")
ratio = compiled[80].count("mma.sync") * warps / compiled[90].count("wgmma.mma")
less = shared < needs["128 x 256", 86]
answers = [has_all, ratio == 64, less, not exact.count("mma.sync")]
print(answers)
assert answers == [False, True, True, True]

# %%
# The first is false. The desktop card gets the ``mma.sync`` of the A100, as many of them. A number does not say what is inside.
#
# Exercises
# ---------
#
# 1. *Easy.* Count ``st.global`` of ``compiled[80]``, and predict it. A right answer says how many numbers one store writes.
#    Hint: 128 sums for each thread, in bfloat16.
# 2. *Easy.* Let B be the transpose of a contiguous matrix. A right answer names the instruction on ``sm_80`` whose full name
#    changes, and says why ``sm_90`` needs no other. Hint: who reads the operands from shared memory?
# 3. *Medium.* Compile the package's product with 8-bit weights for ``sm_90``. A right answer counts the bytes of codes that one
#    step copies, and finds the instructions that make bfloat16 of them. Hint: ``prmt`` moves bytes within a register.
# 4. *Hard.* Find the largest tile without a spill on ``sm_80``, over sides of 64, 128 and 256, and 4 or 8 warps. A right
#    answer gives registers and shared memory of each, and the bytes that each reads for the product of this page. Hint: the
#    count on the page before.
#
# Summary
# -------
#
# * A kernel compiles for any architecture, on any machine. What it became can be read and counted.
# * An A100 multiplies by warps from registers, an H100 by groups of four warps from shared memory, a B200 by one thread's order,
#   with sums in a memory of their own.
# * Copies of 16 bytes need alignment. Without it a thread loads number by number.
# * 256 sums do not fit into 255 registers: the H100 spills, and the B200 does not.
# * Shared memory decides which tile starts on which GPU, and no test on a CPU sees it.
#
# Product and optimizer have been separate so far. The next page puts two products into a step of GaLore.
#
# Sources
# -------
#
# * NVIDIA: `PTX ISA <https://docs.nvidia.com/cuda/parallel-thread-execution/>`_. The reference of ``mma``, ``wgmma`` and ``tcgen05``.
# * NVIDIA: `CUDA programming guide <https://docs.nvidia.com/cuda/cuda-c-programming-guide/>`_. Its tables of compute capabilities list registers and shared memory.
# * Tillet, Kung, Cox: `Triton paper <https://www.eecs.harvard.edu/~htk/publication/2019-mapl-tillet-kung-cox.pdf>`_, 2019.

print("all checks passed")
