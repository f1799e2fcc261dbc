r"""
The SwiGLU kernel in depth
==========================

The lesson on `SwiGLU as a kernel <1_swiglu.ipynb>`_ ends with a forward pass that is right. What does it take to train
with it: a gradient, an operator that PyTorch knows, and tests that find what goes wrong without an error?

The sizes are small without a GPU, where the kernels are interpreted, and every verdict on this page is the same.
"""

# sphinx_gallery_needs = ["1_swiglu"]
# sphinx_gallery_words = ["Triton backward kernel", "torch.library.custom_op", "register_fake", "register_autograd", "TorchDispatchMode", "int32 overflow", "Liger"]

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

import inspect

from lm_from_scratch.instruments.roofline import GPUS, Cost
from lm_from_scratch.layers.gated_mlp import swiglu as reference

SHAPE = (7, 701) if DEVICE == "cpu" else (8192, 4863)
torch.manual_seed(0)


def matches(ours, theirs, tolerance=1e-5):
    """Shapes, and numbers within a rounding or two."""
    return ours.shape == theirs.shape and bool(
        torch.allclose(ours, theirs, atol=tolerance, rtol=tolerance)
    )


# %%
# What PyTorch moves
# ------------------
#
# The least is 3 tensors forward: g and u in, y out. PyTorch does it in two kernels, one for silu and one for the
# product. A mode that sees every operation adds up the tensors that go in and come out.

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Bytes of all tensors that operations read and write."""

    bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view:
            leaves = tree_leaves((args, kwargs, result))
            self.bytes += sum(
                leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)
            )
        return result


# %%
# On the ``meta`` device tensors have a shape and no numbers, so the full size costs nothing. It is that of Qwen2-0.5B on
# 8192 tokens, in bfloat16. A kernel that takes no longer than the floor has nothing left to gain.

n = 8192 * 4864
cost = Cost(bytes=3 * 2 * n, operations=5 * n)
print(f"at least {1e6 * cost.floor(GPUS['H100']):.0f} microseconds on an H100")

gate, up = (
    torch.empty(n, dtype=torch.bfloat16, device="meta", requires_grad=True)
    for _ in range(2)
)
with Traffic() as forward:
    y = reference(gate, up)
upstream = torch.empty_like(y)
with Traffic() as backward:
    torch.autograd.grad(y, (gate, up), upstream)
tensor = 2 * n  # bytes
print(f"PyTorch moves {forward.bytes / tensor:.0f} tensors forward")
print(f"PyTorch moves {backward.bytes / tensor:.0f} tensors backward")
assert forward.bytes == 5 * tensor and backward.bytes == 9 * tensor

# %%
# Forward, the result of silu is written by the first kernel and read again by the second. That is 5 tensors instead
# of 3. Backward it is 9, where 5 would do: the gradient, g and u in, two gradients out.
#
# What the interpreter shows, and hides
# -------------------------------------
#
# The first block of code set ``TRITON_INTERPRET=1`` if it found no GPU. Then no compiler is at work: NumPy carries out
# each line of the kernel, on whole blocks, one program after the other. It tells you
# whether the *logic* is right: which numbers are read, what is computed, where it is written.
#
# Two more things are possible in the interpreter only. ``print`` in a kernel shows the numbers of a block, and a debugger
# can stop there. This page does neither, because it must print the same on both machines. It lets kernels *store* what it
# wants to know, as ``write_owner`` does in the lesson. That works everywhere.
#
# Some faults stay hidden. The interpreter has one program at a time, so that programs never disturb each other. It has
# as many registers and as much memory in a processor as you like. It has no speed worth measuring. And it computes
# bfloat16 wrongly, so the page uses float32 and float16.
#
# On a GPU, programs go to its processors, which NVIDIA calls *streaming multiprocessors*. Unless told otherwise, Triton
# shares the block of a program among 128 threads: 4 *warps* of 32, which execute one instruction together. Triton needs
# the size of the block to lay it out. So ``BLOCK`` is a ``tl.constexpr``, and a power of two.
#
# The forward pass, once more
# ---------------------------
#
# This is the kernel of the lesson.


@triton.jit
def swiglu_step(gate, up, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    g = tl.load(gate + offsets, mask=inside).to(tl.float32)
    u = tl.load(up + offsets, mask=inside).to(tl.float32)
    tl.store(out + offsets, g * tl.sigmoid(g) * u, mask=inside)


gate, up = torch.randn(2, *SHAPE, device=DEVICE)
out = torch.empty_like(gate)
n = out.numel()
swiglu_step[(triton.cdiv(n, 1024),)](gate, up, out, n, BLOCK=1024)
print("matches torch:", matches(out, reference(gate, up)))
assert matches(out, reference(gate, up))

# %%
# The gradient
# ------------
#
# Let :math:`y'` be the gradient of the result. The product rule gives both gradients. The derivative of the logistic function is
# :math:`\sigma (1 - \sigma)`.
#
# .. math::
#
#    u' &= y' \, g \, \sigma \\
#    g' &= y' \, u \, \sigma \, (1 + g (1 - \sigma))
#
# The kernel below computes :math:`\sigma` again instead of reading a stored one. Operations are free here, bytes are not.


@triton.jit
def swiglu_backward_step(
    grad, gate, up, grad_gate, grad_up, n, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    dy = tl.load(grad + offsets, mask=inside).to(tl.float32)
    g = tl.load(gate + offsets, mask=inside).to(tl.float32)
    u = tl.load(up + offsets, mask=inside).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(grad_up + offsets, dy * g * s, mask=inside)
    tl.store(grad_gate + offsets, dy * u * s * (1 + g * (1 - s)), mask=inside)


# %%
# Against autograd, on random numbers:


def gradients(function, gate, up, upstream):
    leaves = [t.detach().requires_grad_() for t in (gate, up)]
    return torch.autograd.grad(function(*leaves), leaves, upstream)


upstream = torch.randn_like(out)
grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
swiglu_backward_step[(triton.cdiv(n, 1024),)](
    upstream, gate, up, grad_gate, grad_up, n, BLOCK=1024
)
expected = gradients(reference, gate, up, upstream)
verdicts = [*map(matches, (grad_gate, grad_up), expected)]
print("gradients match torch:", verdicts)
assert all(verdicts)

# %%
# The kernel of the package
# -------------------------
#
# It is the one you have just seen, with one addition: the number of the program becomes a 64-bit number before it is
# multiplied. The museum says why.

from lm_from_scratch.kernels import swiglu as package
from lm_from_scratch.kernels.swiglu import swiglu, swiglu_kernel

# %%
# Its source:

print(inspect.getsource(swiglu_kernel.fn))

# %%
# ``BLOCK`` is 1024, which gives each of the 128 threads of a program 8 numbers. In half precision these are 16 bytes, the
# largest piece that a thread of an H100 can load at once.
#
# A launch is not yet an operation of PyTorch: autograd cannot see through it. ``torch.library.custom_op`` gives it a name, and
# two registrations say what others must know. The whole file is short, and its page in the API shows it.

print(inspect.getsource(package.swiglu_forward._init_fn))
print(inspect.getsource(package.backward))

# %%
# ``register_autograd`` names the backward function. ``register_fake`` names one that returns an empty tensor of the right
# shape. With it, ``torch.compile`` can plan around the operator without running it. The wrapper makes its inputs contiguous, because
# the kernel takes their numbers one after the other.
#
# Correct
# -------
#
# The package's function against the reference: value and both gradients, odd sizes, layouts, float16, an empty tensor.


def same(shape, dtype=torch.float32, layout=lambda t: t, tolerance=1e-5):
    gate, up, upstream = (
        layout(torch.randn(shape, device=DEVICE).to(dtype)) for _ in range(3)
    )
    ours = [swiglu(gate, up), *gradients(swiglu, gate, up, upstream)]
    theirs = [reference(gate, up), *gradients(reference, gate, up, upstream)]
    return all(matches(a, b, tolerance) for a, b in zip(ours, theirs))


verdicts = {
    "one number": same((1,)),
    "odd sizes": same((5, 37)),
    "several blocks": same((2, 3, 700)),
    "transposed": same((37, 5), layout=lambda t: t.T),
    "every second number": same((37, 10), layout=lambda t: t[:, ::2]),
    "empty": same((0, 5)),
    "float16": same((5, 37), torch.float16, tolerance=4e-3),
}
for name, verdict in verdicts.items():
    print(f"{name}: {verdict}")
assert all(verdicts.values())

# %%
# In float16 the tolerance is a few roundings, which are :math:`2^{-11}` of a number each. PyTorch rounds the result of silu before the
# product, and the kernel does not, so that the two need not agree to the bit.
#
# Bug museum
# ----------
#
# The tensor with two thousand million numbers
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Offsets in 32 bits wrap around in large tensors, below the mask. (M23)
#
# ``tl.program_id`` is a 32-bit number. Times the size of a block, it passes :math:`2^{31}` for large tensors, and wraps
# around. You need no such tensor to see it. The arithmetic is enough.


@triton.jit
def first_offset(program, out, BLOCK: tl.constexpr):
    tl.store(out, (program * BLOCK).to(tl.int64))
    tl.store(out + 1, program.to(tl.int64) * BLOCK)


pair = torch.zeros(2, dtype=torch.int64, device=DEVICE)
for program in (2**20, 2**21):
    first_offset[(1,)](program, pair, BLOCK=1024)
    print(program, pair.tolist())
assert pair.tolist() == [-(2**31), 2**31]

# %%
# A negative offset passes the test ``offsets < n``, so the mask does not help: the program reads and writes far before
# the tensor. Long contexts and large vocabularies reach this size. It was met in
# `a kernel for cross-entropy <https://github.com/linkedin/Liger-Kernel/issues/1483>`_. The fixed line is
# ``tl.program_id(0).to(tl.int64) * BLOCK``. The check is the little kernel above, with a large number instead of a large tensor.
#
# The gradient that is one number
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A gradient with strides of 0 is read as if it were contiguous. (M24)
#
# ``y.sum().backward()`` sends back a tensor of ones that owns a single number. Its strides are 0, so that all
# places have the same address. A kernel that counts addresses upwards leaves it at the second number. Here the one is the
# beginning of a longer buffer of sevens, which stands for whatever lies after it.

sevens = torch.full((n,), 7.0, device=DEVICE)
sevens[0] = 1
ones = sevens[:1].expand(n).view(SHAPE)
print("looks like ones:", bool((ones == 1).all()), "strides:", ones.stride())
assert ones.stride() == (0, 0)
expected = gradients(reference, gate, up, ones)
for name, dy in (("as it comes", ones), ("contiguous", ones.contiguous())):
    swiglu_backward_step[(triton.cdiv(n, 1024),)](
        dy, gate, up, grad_gate, grad_up, n, BLOCK=1024
    )
    right = matches(grad_up, expected[1])
    print(f"{name}, matches torch: {right}")
    assert right == (name == "contiguous")
ours = gradients(swiglu, gate, up, ones)
print("package matches torch:", all(map(matches, ours, expected)))
assert all(map(matches, ours, expected))

# %%
# The fixed line is ``grad.contiguous()`` in the wrapper. The check is to send such a gradient in every test of a backward
# kernel. A gradient of random numbers, which most tests use, is contiguous and finds nothing.
#
# Which sentence is false?
# ------------------------
#
# 1. Where the mask of a store is False, memory stays as it is.
# 2. In float16, the fused kernel gives the same bits as silu followed by the product.
# 3. A kernel must compute the same whatever the size of its blocks.
# 4. The number of programs may depend on the length of the input.
#
# The first needs the masked sum of the lesson.


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    a = tl.load(x + offsets, mask=inside)
    b = tl.load(y + offsets, mask=inside)
    tl.store(out + offsets, a + b, mask=inside)


# %%
# 37 numbers are in front of a neighbour, which is -1.

buffers = torch.randn(2, 48, device=DEVICE)
x, y = buffers[:, :37]
grid = (triton.cdiv(37, 16),)  # 3, rounded up
buffer = torch.full((48,), -1.0, device=DEVICE)
add[grid](x, y, buffer, 37, BLOCK=16)
assert matches(buffer[:37], x + y) and (buffer[37:] == -1).all()
halves = [t.half() for t in (gate, up)]
results = []
for BLOCK in (16, 64):
    out = torch.empty(37, device=DEVICE)
    add[(triton.cdiv(37, BLOCK),)](x, y, out, 37, BLOCK=BLOCK)
    results.append(out)
programs = {triton.cdiv(length, 16) for length in (16, 37, 48)}
answers = [
    bool((buffer[37:] == -1).all()),
    torch.equal(swiglu(*halves), reference(*halves)),
    torch.equal(*results),
    programs == {1, 3},
]
print(answers)
assert answers == [True, False, True, True]

# %%
# The second is false: between its two kernels PyTorch rounds the result of silu to float16, and the fused kernel does not.
# Fusing saves bytes, and one rounding. It saves no operation.
#
# Exercises
# ---------
#
# 1. *Easy.* Count the bytes that a training step of one SwiGLU keeps between its passes, with the kernel and with PyTorch. A right
#    answer is 2 tensors and 3. Hint: which results does ``backward`` of the product need?
# 2. *Hard.* Start a fixed number of programs, and let each walk over blocks in a loop. A right answer equals the reference
#    for fewer blocks than programs, for as many, and for more. Hint: ``range(tl.program_id(0), blocks, tl.num_programs(0))``.
#
# Summary
# -------
#
# * Backward, the kernel computes :math:`\sigma` again, and moves 5 tensors instead of 9.
# * ``torch.library.custom_op`` makes one operator of a launch, and two registrations tell autograd and the compiler of it.
# * A 32-bit offset wrapped around, and a gradient with strides of 0 was misread. Neither raised an error.
#
# Sources
# -------
#
# * Tillet, Kung, Cox: `Triton <https://doi.org/10.1145/3315508.3329973>`_, 2019. The language of blocks.
# * Hsu et al.: `Liger Kernel <https://arxiv.org/abs/2410.10989>`_, 2024. Fused kernels for training.
# * Williams, Waterman, Patterson: `Roofline <https://doi.org/10.1145/1498765.1498785>`_, 2009. Counting before measuring.
# * Shazeer: `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_, 2020.

print("all checks passed")
