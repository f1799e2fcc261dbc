r"""
SwiGLU: the first kernel
========================

A *kernel* is a function that a GPU runs many times at once, each time on another part of the data. Below, a kernel
works on 37 numbers. It runs as three *programs*. Each program has its own *block* of 16 numbers, and a *mask* cuts off
the end of the last block, where no numbers are left.

Here you write your first kernel, for SwiGLU, a step in every layer of Qwen2. At the end our small Qwen2 runs on it. You
need Linux and the package ``triton``, but no GPU.
"""

# sphinx_gallery_needs = ["../2_qwen2/3_swiglu"]
# sphinx_gallery_words = ["first Triton kernel", "what is a kernel", "tl.load", "tl.store", "program_id", "BLOCK_SIZE", "TRITON_INTERPRET", "fused SwiGLU", "stride", "contiguous", "kernel fusion"]
from lm_from_scratch.drawings import gpu_programs as drawings

drawings.programs_on_a_vector(37, 16)

# %%
# What is slow about a GPU
# ------------------------
#
# The numbers of a tensor lie in the GPU's memory. To compute with them, the chip first has to fetch them; then it
# writes results back.
#
# `SwiGLU <../2_qwen2/3_swiglu.ipynb>`_ takes two tensors of one shape, the gate g and u ("up"). With :math:`\sigma` the
# logistic function,
#
# .. math::
#
#    y = \operatorname{silu}(g) \, u, \qquad \operatorname{silu}(g) = g \, \sigma(g) = \frac{g}{1 + e^{-g}}
#
# Any code must read g and u once and write y once: 3 tensors, with 2 bytes a number in bfloat16. Each number of y costs
# 5 operations: an exponential, an addition and a division for :math:`\sigma`, and two products.
#
# **Predict first.** While one byte arrives, an H100, a large GPU, could do 20 operations. It computes SwiGLU for 8192
# tokens of Qwen2-0.5B. For what share of the time is it busy calculating?
#
# * about 4 %
# * about half
# * nearly all the time

from lm_from_scratch.instruments.roofline import GPUS, Cost, show

n = 8192 * 4864  # numbers in one tensor
cost = Cost(bytes=3 * 2 * n, operations=5 * n)
H100 = GPUS["H100"]
needed = H100.scalar / H100.bandwidth
print(f"{cost.bytes:,} bytes, {cost.operations:,} operations")
print(f"{cost.intensity:.2f} operations for each byte")
print(f"an H100 has time for {needed:.0f} operations for each byte")
print(f"busy calculating: {cost.intensity / needed:.0%} of the time")

assert cost.floor(H100) == cost.bytes / H100.bandwidth
assert cost.intensity < 1 and needed >= 20
assert round(100 * cost.intensity / needed) == 4

# %%
# About 4 %: less than one operation for each byte. (An exponential takes longer than a product, but memory takes
# longest.) Arithmetic is nearly free here. To be faster, move fewer bytes.
#
# PyTorch moves more than it has to. It has one kernel for silu and one for the product, and in between, the result of
# silu goes to memory and back.

drawings.round_trips(
    {
        "two kernels": [
            ("silu", ["g"], ["silu(g)"]),
            ("product", ["silu(g)", "u"], ["y"]),
        ],
        "one kernel": [("silu, product", ["g", "u"], ["y"])],
    }
)

# %%
# Doing both steps in one kernel is called *fusing*. It saves no operation, but 2 trips of 5.
#
# One block, and what a pointer is
# --------------------------------
#
# We write kernels in Triton, a language that looks like Python and is compiled for the GPU. If there is no GPU, the
# line with ``TRITON_INTERPRET`` makes NumPy carry out each line of a kernel, slowly and one program after the other.

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# %%
# Start with one block of a sum of two vectors. ``@triton.jit`` turns a function into a kernel, and ``tl`` is Triton's
# language. A tensor comes as a *pointer*: the address of its first number.


@triton.jit
def add_one_block(x, y, out, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)  # 0, 1, ... BLOCK - 1
    a = tl.load(x + offsets)  # (BLOCK,)
    b = tl.load(y + offsets)
    tl.store(out + offsets, a + b)


# %%
# The pointer plus an *offset* is the address of another number. A vector of offsets makes a vector of addresses. Here
# the block has 5 places, and x begins at address 1000; a float32 number fills 4 bytes. (The size of a real block is a
# power of two.)

drawings.pointer([0.5, -1.2, 3.0, 0.1, 2.2, -0.6, 0.7, 1.8], block=5)

# %%
# ``tl.load`` fetches what lies at these addresses, and ``tl.store`` writes. Between the two, the block is inside the
# chip, in *registers*. ``tl.constexpr`` marks a number that the compiler must know in advance.
#
# We have 48 numbers and start one program, with a block of 16. The square brackets say how many programs.

x = torch.arange(48.0, device=DEVICE)
y = 100 * x
out = torch.zeros_like(x)
add_one_block[(1,)](x, y, out, BLOCK=16)
print(out[12:20].int().tolist())
assert torch.equal(out[:16], (x + y)[:16]) and (out[16:] == 0).all()

# %%
# The first 16 sums are there, the rest is 0.
#
# A grid of programs
# ------------------
#
# Now three programs. All run the same lines, so each asks ``tl.program_id`` for its number, and shifts its offsets by
# that many blocks.


@triton.jit
def add_blocks(x, y, out, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + offsets)
    b = tl.load(y + offsets)
    tl.store(out + offsets, a + b)


add_blocks[(3,)](x, y, out, BLOCK=16)
print("matches torch:", torch.equal(out, x + y))
assert torch.equal(out, x + y)

# %%
# All 48 sums are right. The number of programs is called the *grid*. A large GPU has more than a hundred *processors*.
# They take programs until all have run, many at a time and in no promised order.
#
# Which program does which part? Let each store its own number.


@triton.jit
def write_owner(out, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.full([BLOCK], tl.program_id(0), tl.int32))


owner = torch.zeros(48, dtype=torch.int32, device=DEVICE)
write_owner[(3,)](owner, BLOCK=16)
print(owner.view(3, 16)[:, ::5].tolist())
assert torch.equal(owner.cpu(), torch.arange(48, dtype=torch.int32) // 16)

# %%
# These are the rows of the first picture.
#
# A mask for the rest
# -------------------
#
# Lengths are rarely multiples of 16. With 37 numbers, the third program has only 5 to do.
#
# **Predict first.** The 37 results go to the beginning of a longer buffer. After them, a neighbour keeps 11 numbers of
# its own, all -1. What does ``add_blocks`` do to them?
#
# * nothing: the tensors end at 37
# * it raises an error
# * it overwrites them

x, y = x[:37], y[:37]
buffer = torch.full((48,), -1.0, device=DEVICE)
add_blocks[(3,)](x, y, buffer, BLOCK=16)
print("results:  ", buffer[34:37].int().tolist())
print("neighbour:", buffer[37:40].int().tolist(), "...")
assert torch.equal(buffer[:37], x + y) and (buffer[37:] != -1).all()

# %%
# It overwrites them, without an error. The kernel has an address, and does not know where the tensor ends.
#
# So we pass the length ``n``. The *mask* ``inside`` is False for offsets beyond it, and where a mask is False, no memory
# is touched.


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    a = tl.load(x + offsets, mask=inside)
    b = tl.load(y + offsets, mask=inside)
    tl.store(out + offsets, a + b, mask=inside)


# %%
# ``triton.cdiv`` divides and rounds up: 37 numbers need 3 programs. The drawing shows the block of the third.

buffer = torch.full((48,), -1.0, device=DEVICE)
add[(triton.cdiv(37, 16),)](x, y, buffer, 37, BLOCK=16)
print("neighbour:", buffer[37:40].int().tolist(), "...")

assert triton.cdiv(37, 16) == 3
assert torch.equal(buffer[:37], x + y) and (buffer[37:] == -1).all()
drawings.masked_store(37, 16)

# %%
# SwiGLU
# ------
#
# Only the arithmetic between load and store changes. Numbers of 2 bytes (*half precision*) are widened to float32 after
# the load, and rounded once, by the store.


@triton.jit
def swiglu_step(gate, up, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    g = tl.load(gate + offsets, mask=inside).to(tl.float32)
    u = tl.load(up + offsets, mask=inside).to(tl.float32)
    tl.store(out + offsets, g * tl.sigmoid(g) * u, mask=inside)


# %%
# This function makes room for the result and starts the programs, with blocks of 1024.


def fused(gate, up):
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    n = out.numel()
    swiglu_step[(triton.cdiv(n, 1024),)](gate, up, out, n, BLOCK=1024)
    return out


# %%
# For real numbers, our small Qwen2 reads a sentence, and we keep g and u of its first layer.

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.layers.gated_mlp import swiglu as reference

torch.set_grad_enabled(False)
model, tokenizer = load_shipped("qwen2-docs")
model.to(DEVICE)
text = "If the file does not exist, an"
ids = torch.tensor([tokenizer.start(text)], device=DEVICE)
kept = []


def keep(gate, up):
    kept.append((gate, up))
    return reference(gate, up)


model.model.layers[0].mlp.product = keep
logits = model(ids)[0, -1]
gate, up = kept[0]  # (1, 9, 384)

# %%
# Does the kernel agree with PyTorch, up to rounding?

expected = reference(gate, up)


def right(up):
    return torch.allclose(fused(gate, up), expected, atol=1e-5, rtol=1e-5)


print("matches torch:", right(up))

assert gate.shape == (1, 9, 384) and gate.numel() == 3456 == 3 * 1024 + 384
assert right(up)

# %%
# 9 tokens with 384 features are 3456 numbers: three full blocks, and a last one with 384. The kernel does not see rows
# and columns. Where no number needs another of its row, a tensor is one long vector.
#
# Strides: the order in memory
# ----------------------------
#
# A tensor has a shape, and *strides*: how many numbers further in memory the next row is, and the next column. Three
# tables, where each cell shows its offset:

drawings.strides(
    {
        "a table": ((2, 3), (3, 1)),
        "its transpose": ((3, 2), (1, 3)),
        "one number, expanded": ((2, 3), (0, 0)),
    }
)

# %%
# The first table is *contiguous*: read row by row, its offsets are 0, 1, 2 and so on.
#
# **Predict first.** ``turned`` has the shape of ``up`` and the same numbers in each cell, but its strides are those of
# a transpose. (``mT`` swaps rows and columns.) Does the kernel get SwiGLU right?
#
# * yes, the numbers are the same
# * no, Triton raises an error
# * no, and there is no error

turned = up.mT.contiguous().mT
print("same numbers:", torch.equal(turned, up))
print("strides:", up.stride()[1:], turned.stride()[1:])
print("matches torch:", right(turned))
print("contiguous matches:", right(turned.contiguous()))

assert torch.equal(turned, up) and turned.stride()[1:] == (1, 9)
assert not right(turned) and right(turned.contiguous())

# %%
# The kernel counts offsets upwards, and meets the numbers of ``turned`` in the wrong order. ``contiguous()`` copies
# them into row order, if they are not in it already. Call it before the kernel.
#
# In the model
# ------------
#
# We put the kernel into all eight layers, and look at the next word.


def safe(gate, up):
    return fused(gate.contiguous(), up.contiguous())


for layer in model.model.layers:
    layer.mlp.product = safe
ours = model(ids)[0, -1]
print("PyTorch:", tokenizer.pieces([logits.argmax().item()]))
print("kernel: ", tokenizer.pieces([ours.argmax().item()]))

assert ours.argmax() == logits.argmax()
assert torch.allclose(ours, logits, atol=1e-3)

# %%
# The same word, from fewer bytes. Last, a *roofline*: how fast a GPU can compute, by operations per byte. On the slope,
# memory is the limit, on the flat parts the chip. SwiGLU, dotted, is far to the left. (*Matrix units* only multiply
# matrices.)

show("swiglu", cost)

# %%
# In depth: `the gradient, the package's kernel, and what else goes wrong <1a_swiglu_in_depth.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* Write GeGLU, where the tanh form of GELU takes the place of silu. A right answer equals ``F.gelu(gate,
#    approximate="tanh") * up`` on 37 numbers, and leaves a neighbour of NaN intact. Hint: :math:`\tanh(z) = 2\sigma(2z) - 1`.
# 2. *Medium.* Many models compute gate and up in one product, as the two halves of a row. Write a kernel that takes this
#    one tensor of shape (rows, 2C). A right answer needs no copy, and equals the reference on odd C. Hint: the row of a number
#    is its offset divided by C.
#
# Summary
# -------
#
# * A kernel describes the work on one block. A grid of programs covers the tensor, and a mask guards its end.
# * A pointer plus offsets is a block of addresses. They follow the order in memory, so inputs are made contiguous.
# * SwiGLU needs less than one operation for each byte, so bytes decide: fusing moves 3 tensors instead of 5.
