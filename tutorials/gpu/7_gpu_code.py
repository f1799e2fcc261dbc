r"""
GPU code: what a product becomes
================================

``tl.dot`` is one word of Python. Three generations of GPUs have three kinds of *matrix unit* for it, with different
instructions and a different idea of who computes. The kernel stays the same, and the compiler writes other machine code
for each.

Here are the three. A and B are the tiles that a step multiplies, and the sums are the tile of the result. A program is
run by *threads*. A *warp* is 32 of them, which execute one instruction together. The red boxes start the multiplication.
"""

# sphinx_gallery_needs = ["6_matmul"]
# sphinx_gallery_words = ["PTX", "register spilling", "tensor cores", "num_warps", "num_stages", "ahead-of-time compilation", "shared memory limit", "wgmma", "mma.sync", "tcgen05", "OutOfResources"]

from lm_from_scratch.drawings import gpu_tiles as drawings

drawings.matrix_units()

# %%
# *Shared memory* belongs to a processor, and all threads of a program reach it. *Registers* belong to one thread. On the
# B200, the sums have a *tensor memory* of their own, and come to registers at the end.
#
# Compile instead of launch
# -------------------------
#
# Does a kernel use these units at all? Does its tile fit, and on which GPU? You need no GPU to find out: the compiler
# writes real machine code for any of them, on any machine with Linux.
#
# The package's ``matmul`` gets tensors on the CPU. ``compiled_for`` catches the *launch*, the call that would start the
# programs, and compiles the kernel for the architecture that you name. On this page no kernel runs.

import os

os.environ.pop("TRITON_INTERPRET", None)  # this page compiles

import torch
import triton

from lm_from_scratch.kernels.compilation import SHARED_LIMIT, compiled_for
from lm_from_scratch.kernels.matmul import TILES, matmul, matmul_kernel

M, K, N = 4096, 896, 4864  # a map of Qwen2-0.5B, 4096 tokens
a = torch.zeros(M, K, dtype=torch.bfloat16)
b = torch.zeros(K, N, dtype=torch.bfloat16)
ARCHITECTURES = (80, 90, 100)  # A100, H100, B200
compiled = {}
for arch in ARCHITECTURES:
    with compiled_for(arch) as kernels:
        matmul(a, b)
    (compiled[arch],) = kernels

print({f"sm_{arch}": kernel.name for arch, kernel in compiled.items()})
assert all(kernel.cubin for kernel in compiled.values())
assert isinstance(matmul_kernel, triton.JITFunction)

# %%
# An architecture has a number: ``sm_80`` is the A100, ``sm_90`` the H100, ``sm_100`` the B200. Desktop cards have
# numbers of their own, such as ``sm_86``.
#
# ``cubin`` is the machine code that a GPU would load. ``ptx``, one step before it, is assembly that we can read.
#
# Which instruction multiplies
# ----------------------------
#
# Here are the matrix instructions of the compiled kernel. For each architecture it has one kind, and none of the other two.

KINDS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
for arch, kernel in compiled.items():
    used = [kind for kind in KINDS if kernel.count(kind)]
    print(f"sm_{arch}", *sorted(set(kernel.names(used[0]))))
    assert used == [KINDS[ARCHITECTURES.index(arch)]]

# %%
# The first two names say how much one instruction multiplies, as in ``m16n8k16``: 16 rows, 8 columns, and 16
# products for each sum. So you can count the instructions before the compiler does.
#
# In half precision a program of the package has 4 warps. Its tile has 128 by 128 sums, and it walks along K in steps of 32.

tile = dict(TILES[2])
rows, columns, step, warps, stages = tile.values()
threads = 32 * warps
products = rows * columns * step  # of one step
sums = rows * columns // threads  # of one thread
print(f"{products:,} products in a step")
print(f"{sums} sums for each of {threads} threads")

assert (products, sums) == (524_288, 128)

# %%
# **Predict first.** On the A100 each warp multiplies its quarter of the tile, 16 × 8 × 16 products at a time. On the H100 four
# warps together issue one instruction, of 64 × 128 × 16 products. How many instructions does a warp issue in one step?
#
# * 256 on the A100, 64 on the H100
# * 64 on the A100, 4 on the H100
# * 64 on both

import math
import re

for arch, kind, groups in (
    (80, "mma.sync.", warps),
    (90, KINDS[1], warps // 4),
):
    found = compiled[arch].names(kind)
    size = re.search(r"m(\d+)n(\d+)k(\d+)", found[0]).groups()
    expected = products // math.prod(map(int, size)) // groups
    print(f"sm_{arch}: {expected} expected, {len(found)} found")
    assert len(found) == expected == {80: 64, 90: 4}[arch]
assert compiled[100].count("tcgen05.mma") < compiled[80].count("mma.sync") / 4

# %%
# That is 524,288 products, divided by the size of an instruction, and on the A100 by the 4 warps that share the work. The B200
# also needs less than a quarter of the A100's instructions.
#
# The size is not the only difference:
#
# * ``mma.sync``: the 32 threads of a warp hold A, B and the sums in their registers, and wait for the result.
# * ``wgmma``: A and B stay in shared memory, and only the sums are in registers. It is asynchronous: the warps go
#   on and wait later.
# * ``tcgen05.mma``: one thread issues it for all, and the sums are in tensor memory.
#
# A spill, on purpose
# -------------------
#
# A thread has 255 registers at most. With the package's tile half of them hold sums.
#
# To try another tile or other matrices, we launch the kernel itself. Its arguments are pointers, sizes and strides, as in
# your own kernels. Only the last line matters here: ``tile | changes`` is the package's tile with what you change.


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


# %%
# A tile of 128 by 256 halves what A costs, because every number of A now serves 256 columns. But with 4 warps a thread has 256
# sums, one more than it has registers.
#
# **Predict first.** We compile that tile for the H100 and the B200. On which of them does every number find a place on the chip?
#
# * on neither: 256 numbers do not fit into 255 registers
# * on the H100 alone, because its matrix units are asynchronous
# * on the B200 alone, because its sums are not in registers

wide = dict(BLOCK_N=256, BLOCK_K=16, num_stages=2)
needed = rows * 256 // threads
spilled = {arch: product(arch, **wide) for arch in (90, 100)}
for arch, kernel in spilled.items():
    print(f"sm_{arch}: {needed} sums, spills: {kernel.spills > 0}")

assert needed == 256
assert spilled[90].spills > 0 and spilled[90].registers == 255
assert spilled[100].spills == 0

# %%
# The H100 has to *spill*: numbers that find no register are written to memory and read back. The result is right, but
# it waits for memory. The B200 keeps the sums in tensor memory until the end.
#
# With 8 warps instead of 4, each thread has half as many sums.

more_warps = product(90, **wide, num_warps=8)
print(f"sm_90 with 8 warps: spills: {more_warps.spills > 0}")
assert more_warps.spills == 0

# %%
# No spill any more. The kernel's text does not show the difference: you have to ask the compiler.
#
# What one number fewer costs
# ---------------------------
#
# In the loop ``tl.load`` becomes ``cp.async``: a copy of 16 bytes from memory to shared memory, which passes no register. The
# thread need not wait for it: while one step is multiplied, the next ones are on their way.
#
# Such a copy must begin at an address that is a multiple of 16. Triton concludes from the strides whether each row
# does: it `looks at integers <5_adamw.ipynb>`_, and notes which are multiples of 16.
#
# **Predict first.** A thread brings 32 numbers of A in one step. Now let the rows of A have 895 numbers instead of 896. How do
# they arrive?
#
# * 4 copies of 16 bytes, as before
# * 8 copies of 8 bytes
# * 32 loads of one number

odd = product(80, a[:, :895].contiguous(), b[:895])
single = rows * step // threads  # numbers of A in a step, for a thread
wide_copies = single * 2 // 16
print(f"copies of A in a step: {wide_copies} before")
print("loads of single numbers:", odd.count("ld.global"), "expected:", single)

assert wide_copies == 4 and not compiled[80].count("ld.global")
assert odd.count("ld.global") == single == 32
assert [r for r in range(1, 9) if 2 * 895 * r % 16 == 0] == [8]

# %%
# Now only every eighth row begins at a multiple of 16 bytes, so the wide copy is not safe. A is loaded number by number,
# through registers. That is a good reason to give a model sizes like 896, a multiple of 64.
#
# Does it fit?
# ------------
#
# Shared memory holds the pieces of A and B that are on their way. How many steps these are is the number of *stages*. We
# try three tiles, with steps of 64 numbers and 4 stages.

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
assert max(k.shared for k in compiled.values()) < SHARED_LIMIT[86]
assert needs["128 x 256", 90] < SHARED_LIMIT[90]
assert SHARED_LIMIT[86] < needs["128 x 256", 86] < SHARED_LIMIT[80]

# %%
# A program that asks for more than there is cannot start. The largest tile here fits an A100 and an H100. On a desktop
# card, ``sm_86``, its first launch is an error. The lines are the limits.

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

drawn, (ax,) = figure(4.8, 3.8)
for i, (arch, card) in enumerate(((86, "sm_80, sm_86"), (90, "sm_90"))):
    heights = [needs[name, arch] / 1024 for name in tiles]
    places = [x + 0.36 * i - 0.18 for x in range(len(tiles))]
    ax.bar(places, heights, 0.34, color=COLOURS[i], label=f"needed on {card}")
for (arch, style), colour in zip(
    ((86, ":"), (80, "--"), (90, "-")), COLOURS[2:]
):
    limit = SHARED_LIMIT[arch] / 1024
    ax.axhline(limit, color=colour, linestyle=style)
    ax.text(-0.4, limit + 3, f"limit of sm_{arch}", fontsize=9)
ax.set(xticks=range(len(tiles)), xticklabels=list(tiles), ylim=(0, 250))
ax.set(xlabel="tile, with steps of 64 and 4 stages", ylabel="KiB")
ax.set_title("Shared memory of a program")
ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.38))
plt.show()

# %%
# The H100 needs room for one more step. Its ``wgmma`` reads from shared memory while the next steps arrive. On the other two,
# A and B of that step are in registers by then.
#
# The package's own tile has steps of 32, and fits on all of them.
# `GPU code in depth <7a_gpu_code_in_depth.ipynb>`_ reads more of the assembly, and shows two faults that the interpreter hides.
#
# Exercises
# ---------
#
# 1. *Easy.* Predict how many ``st.global`` ``compiled[80]`` has, then count. A right answer says how many numbers one store writes.
#    Hint: 128 sums for each thread, in bfloat16.
# 2. *Easy.* Let B be the transpose of a contiguous matrix. A right answer names the instruction on ``sm_80`` whose full name
#    changes, and says why ``sm_90`` needs no other. Hint: who reads the operands from shared memory?
#
# Summary
# -------
#
# * Without a GPU you can compile a kernel for any of them, and count its instructions. An A100 multiplies from registers, an
#   H100 from shared memory, a B200 into tensor memory.
# * 256 sums do not fit into 255 registers: the H100 spills, and the B200 does not. Copies of 16 bytes need alignment. Without it a
#   thread loads number by number.
# * Shared memory decides which tile starts on which GPU. The interpreter never notices, the compiler does.
#
# The next page puts two products into a step of an optimizer, GaLore.
