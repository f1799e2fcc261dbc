r"""
GPU code in depth: is a kernel fit to start?
============================================

`The lesson on GPU code <7_gpu_code.ipynb>`_ compiles one product for three GPUs. Which faults can only a compiler see? This
page reads more of the assembly: how numbers arrive, what float32 becomes, which tile runs out of registers, and how many programs
fit on a processor. Here, too, nothing runs.

The kernel and its tile are those of the lesson.
"""

# sphinx_gallery_needs = ["7_gpu_code"]
# sphinx_gallery_words = ["SASS", "occupancy", "cp.async", "TMA", "TF32 tl.dot", "input_precision", "K >= 16", "shared memory Required Hardware limit"]

import os

os.environ.pop("TRITON_INTERPRET", None)  # this page compiles

import torch
import triton
import triton.language as tl

from lm_from_scratch.instruments.roofline import Cost, show
from lm_from_scratch.kernels.compilation import SHARED_LIMIT, compiled_for
from lm_from_scratch.kernels.matmul import TILES, matmul, matmul_kernel

M, K, N = 4096, 896, 4864  # a map of Qwen2-0.5B, 4096 tokens
a = torch.zeros(M, K, dtype=torch.bfloat16)
b = torch.zeros(K, N, dtype=torch.bfloat16)
compiled = {}
for arch in (80, 90, 100):
    with compiled_for(arch) as kernels:
        matmul(a, b)
    (compiled[arch],) = kernels

tile = dict(TILES[2])
rows, columns, step, warps, stages = tile.values()
threads = 32 * warps
sums = rows * columns // threads  # of one thread
step_bytes = 2 * (rows + columns) * step
print(f"{step_bytes:,} bytes of A and B in a step")
assert step_bytes == 16_384

# %%
# What waits, and where the sums are
# ----------------------------------
#
# The instructions around the multiplications show how the three generations differ.


def using(instruction):
    return {arch: k.count(instruction) > 0 for arch, k in compiled.items()}


asynchronous, tensor_memory = using("wgmma.wait_group"), using("tcgen05.ld")
print("waits for groups of multiplications:", asynchronous)
print("loads from tensor memory:", tensor_memory)
assert compiled[80].count("ldmatrix.sync")  # operands, to registers
assert asynchronous == {80: False, 90: True, 100: False}
assert tensor_memory == {80: False, 90: False, 100: True}

# %%
# The A100 has neither: ``ldmatrix`` brings its operands from shared memory to registers.
#
# How numbers arrive
# ------------------
#
# A thread copies 16 bytes at once by ``cp.async``, so a step needs as many copies as this. The first steps are requested before
# the loop, and each round of the loop requests one more.

copies = step_bytes // (16 * threads)
ahead = stages - 1
for arch, kernel in compiled.items():
    found = kernel.count("cp.async.cg")
    print(f"sm_{arch}: {found % copies == 0}, ahead: {found >= ahead * copies}")
    assert found % copies == 0 and found >= ahead * copies
    assert not kernel.count("ld.global") and not kernel.count("cp.async.bulk")
assert compiled[80].count("cp.async.cg") == stages * copies

# %%
# No thread loads a number itself: there is no ``ld.global``. There is no ``cp.async.bulk`` either, the unit of the H100 and
# later which fetches a whole tile for one thread. It needs a *tensor descriptor* instead of pointers, and the package uses
# pointers, which all architectures have.
#
# Now the product of the lesson whose A has rows of 895 numbers, which are not aligned to 16 bytes.


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
# instead of 4 copies.
#
# What float32 becomes
# --------------------
#
# `The matrix product in depth <6a_matmul_in_depth.ipynb>`_ says that float32 is rounded to TF32 unless the kernel asks for
# ``ieee``. And ``ieee`` uses no matrix unit. Here is a product with and without the option.


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
# The same word of Python calls two different parts of the chip. An ``fma`` multiplies and adds one number at a time.
#
# Addresses need registers too
# ----------------------------
#
# The lesson runs out of registers with a tile that is too large, and 8 warps fix it.

wide = dict(BLOCK_N=256, BLOCK_K=16, num_stages=2)
spilled = {arch: product(arch, **wide) for arch in (90, 100)}
more_warps = product(90, **wide, num_warps=8)
print("spills:", spilled[90].spills > 0, "8 warps:", more_warps.spills > 0)
assert spilled[90].spills > 0
assert spilled[100].spills == more_warps.spills == 0

# %%
# There is another way to run out. Let a linear map have 895 inputs and 4863 outputs. Numbers move one by one now, and
# each needs an address of its own, which takes two registers. Beside 128 sums there is no room for them.

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
# Where a matrix is not aligned, the package takes a smaller tile.
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
# of shared memory for each of its processors.

kernel = compiled[90]
by_registers = 65_536 // (kernel.registers * threads)
by_memory = 228 * 1024 // (kernel.shared + 1024)  # 1 KiB is the system's
print("two programs or more fit:", min(by_registers, by_memory) >= 2)
assert min(by_registers, by_memory) >= 2

# %%
# Two programs or more can hide the waiting of one behind the work of another. The share of that capacity which a kernel uses is
# called *occupancy*.
#
# The roof says what is possible at most.

show("matmul", Cost(2 * (M * K + K * N + M * N), 2 * M * N * K))

# %%
# Bug museum
# ----------
#
# The tile of another GPU
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# A kernel that needs more shared memory than another card has. (M34)
#
# A kernel is tuned on an H100 and published. On a desktop card it stops at the first launch: `Required: 131072, Hardware
# limit: 101376 <https://github.com/triton-lang/triton/issues/8182>`_. The interpreter has no such limit, and neither has the
# machine of the author. Here is one that fits on one card only, and the fixed line, with fewer stages.

too_big = dict(BLOCK_N=256, BLOCK_K=64, num_warps=8)
needed = product(86, **too_big).shared
for stages in (4, 2):
    shared = product(86, **too_big, num_stages=stages).shared
    print(f"{stages} stages fit on sm_86: {shared <= SHARED_LIMIT[86]}")
    assert (shared <= SHARED_LIMIT[86]) == (stages == 2)

# %%
# The check is the table of the lesson: compile for each architecture that you name, and compare.
#
# Eight is too few
# ~~~~~~~~~~~~~~~~
#
# A block as short as the sequence is below what a matrix instruction takes. (M35)
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
# 2. One ``wgmma`` of the lesson multiplies 64 times as much as one ``mma.sync``.
# 3. With fewer stages a program needs less shared memory.
# 4. A product in ``ieee`` float32 uses no matrix unit.

newest = product(120)
has_all = newest.count("tcgen05.mma") > 0
assert newest.count("mma.sync") == compiled[80].count("mma.sync")
ratio = compiled[80].count("mma.sync") * warps / compiled[90].count("wgmma.mma")
less = shared < needed
answers = [has_all, ratio == 64, less, not exact.count("mma.sync")]
print(answers)
assert answers == [False, True, True, True]

# %%
# The first is false. The desktop card gets the ``mma.sync`` of the A100, as many of them. A number does not say what is inside.
#
# Exercises
# ---------
#
# 1. *Medium.* Compile the package's product with 8-bit weights for ``sm_90``. A right answer counts the bytes of codes that one
#    step copies, and finds the instructions that make bfloat16 of them. Hint: ``prmt`` moves bytes within a register.
# 2. *Hard.* Find the largest tile without a spill on ``sm_80``, over sides of 64, 128 and 256, and 4 or 8 warps. A right
#    answer gives registers and shared memory of each, and the bytes that each reads for the product of these pages. Hint: the
#    count on the page on the matrix product.
#
# Summary
# -------
#
# * An operand arrives by copies of 16 bytes, several steps ahead. An operand that is not aligned arrives number by number.
# * ``ieee`` products of float32 use no matrix unit; the default rounds to TF32.
# * Sums, operands and addresses share 255 registers. What finds none is spilled.
# * A tile that fits on one GPU may not start on another, and a tile that is too small does not compile. The interpreter notices
#   neither.
#
# Sources
# -------
#
# * NVIDIA: `PTX ISA <https://docs.nvidia.com/cuda/parallel-thread-execution/>`_. The reference of ``mma``, ``wgmma`` and ``tcgen05``.
# * NVIDIA: `CUDA programming guide <https://docs.nvidia.com/cuda/cuda-c-programming-guide/>`_. Its tables of compute capabilities list registers and shared memory.
# * Tillet, Kung, Cox: `Triton paper <https://www.eecs.harvard.edu/~htk/publication/2019-mapl-tillet-kung-cox.pdf>`_, 2019.

print("all checks passed")
