r"""
RoPE: the gradient is a turn back
=================================

RoPE turns pairs of features by an angle. Attention does it to all queries and keys, in every layer. PyTorch needs
several kernels for it, and autograd several more for the gradient.

One kernel does both passes here. What does the backward pass have to compute, and what must the forward pass remember
for it? And how does a kernel read queries that lie in memory in another order than their shape says?

You will learn
--------------

* how a program loads two halves of a row, and turns them,
* how the heads of a token share its angles, and what that does to the count of bytes,
* how strides replace copies, on the way in and on the way out,
* why the backward pass is the forward pass with the other sign of the sine.

Before you start
----------------

Read the pages on `positions as rotations <../2_qwen2/2_rope.ipynb>`_, on `SwiGLU <1_swiglu.ipynb>`_ and on
`RMSNorm <3_rms_norm.ipynb>`_ as a kernel. Without a GPU the kernels are interpreted, which is slow and exact enough.
"""

# sphinx_gallery_words = ["triton RoPE", "fused rotary", "strides", "non-contiguous"]

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

import inspect

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import figure
from lm_from_scratch.instruments.roofline import GPUS, Cost, show
from lm_from_scratch.layers import rope as reference

B, H, T, D = (2, 3, 37, 20) if DEVICE == "cpu" else (4, 14, 1000, 80)
torch.manual_seed(0)


def angles(T, D):
    """Cosines and sines (1, 1, T, D/2), float32."""
    positions = torch.arange(T, device=DEVICE)[None]
    speeds = reference.inverse_frequencies(D, 10000.0, device=DEVICE)
    return reference.rotation(positions, speeds)


def matches(ours, theirs, tolerance=1e-5):
    """Shapes, and numbers within a rounding or two."""
    return ours.shape == theirs.shape and bool(
        torch.allclose(ours, theirs, atol=tolerance, rtol=tolerance)
    )


# %%
# Count first
# -----------
#
# A pair (a, b) turns by an angle with cosine c and sine s:
#
# .. math::
#
#    a' &= a c - b s \\
#    b' &= b c + a s
#
# That is 6 operations for two numbers. The least traffic reads x once and writes the result once. The angles are float32,
# but all heads and all rows of the batch share them, so they are read once. The sizes are the queries of a Qwen2-0.5B in
# bfloat16, 8 rows of 1024 tokens.

FULL = dict(B=8, H=14, T=1024, D=64)
x_bytes = 2 * FULL["B"] * FULL["H"] * FULL["T"] * FULL["D"]
angle_bytes = 2 * 4 * FULL["T"] * FULL["D"] // 2
cost = Cost(
    bytes=2 * x_bytes + angle_bytes,
    operations=3 * x_bytes // 2,  # 6 for a pair
)
print(f"{cost.bytes:,} bytes, of them {angle_bytes:,} for the angles")
print(f"{cost.operations:,} operations, {cost.intensity:.2f} per byte")
print(f"at least {1e6 * cost.floor(GPUS['H100']):.1f} microseconds on an H100")
assert angle_bytes < 0.01 * cost.bytes
assert cost.floor(GPUS["H100"]) == cost.bytes / GPUS["H100"].bandwidth

# %%
# Less than one operation per byte: memory decides, as with SwiGLU. The angles are less than a hundredth of the traffic.
#
# What does PyTorch move? The mode of the page on SwiGLU counts it, at full size.

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


with torch.device("meta"):
    q = torch.empty(tuple(FULL.values()), dtype=torch.bfloat16)
    angle = torch.empty(1, 1, FULL["T"], FULL["D"] // 2)
with Traffic() as traffic:
    reference.apply_rope(q, angle, angle)
print(f"PyTorch moves {traffic.bytes / cost.bytes:.1f} times the least")
assert traffic.bytes > 8 * cost.bytes

# %%
# The reference widens x to float32, multiplies and adds each half, narrows both and joins them. Each of these is a pass
# over memory, and most of them move four bytes a number instead of two.
#
# Two loads make a pair
# ---------------------
#
# Feature i turns together with feature i + D/2, so a program loads the two halves of a row as two tensors. Here is one head:
# x is (T, D), and a row is a token. A program takes ``ROWS`` tokens.


@triton.jit
def turn_tokens(x, out, cos, sin, T, HALF: tl.constexpr, ROWS: tl.constexpr):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    pairs = tl.arange(0, HALF)[None, :]  # (1, HALF)
    inside = t < T
    c = tl.load(cos + t * HALF + pairs, mask=inside)
    s = tl.load(sin + t * HALF + pairs, mask=inside)
    first = t * 2 * HALF + pairs  # (ROWS, HALF)
    a = tl.load(x + first, mask=inside)
    b = tl.load(x + first + HALF, mask=inside)
    tl.store(out + first, a * c - b * s, mask=inside)
    tl.store(out + first + HALF, b * c + a * s, mask=inside)


x = torch.randn(T, 16, device=DEVICE)
cos, sin = angles(T, 16)
out = torch.empty_like(x)
turn_tokens[(triton.cdiv(T, 32),)](x, out, cos, sin, T, HALF=8, ROWS=32)
expected = reference.apply_rope(x[None, None], cos, sin)[0, 0]
print("matches torch:", matches(out, expected))
assert matches(out, expected)

# %%
# The reference cuts x into halves and joins them again, which is a copy. The kernel just loads from two addresses and
# stores to two.
#
# Heads share an angle
# --------------------
#
# A projection gives each token the features of all its heads, one head after the other: (T, H, D) in memory. Let a row be one
# head of one token. Then row r belongs to token ``r // H``, and H rows in turn load the same angles. The first load
# brings them into the cache of the processor, the others find them there.
#
# A head of 20 features has 10 pairs, and ``tl.arange`` wants a power of 2. So the block is 16 wide, and the mask has two
# parts.


@triton.jit
def turn_heads(
    x, out, cos, sin, T, H: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    pairs = tl.arange(0, BLOCK)[None, :]
    inside = (rows < T * H) & (pairs < HALF)
    angle = rows // H * HALF + pairs
    c = tl.load(cos + angle, mask=inside)
    s = tl.load(sin + angle, mask=inside)
    first = rows * 2 * HALF + pairs
    a = tl.load(x + first, mask=inside)
    b = tl.load(x + first + HALF, mask=inside)
    tl.store(out + first, a * c - b * s, mask=inside)
    tl.store(out + first + HALF, b * c + a * s, mask=inside)


x = torch.randn(T, H, D, device=DEVICE)
cos, sin = angles(T, D)
out = torch.empty_like(x)
ROWS, HALF = 64, D // 2
BLOCK = triton.next_power_of_2(HALF)
turn_heads[(triton.cdiv(T * H, ROWS),)](
    x, out, cos, sin, T, H=H, HALF=HALF, ROWS=ROWS, BLOCK=BLOCK
)
expected = reference.apply_rope(x.transpose(0, 1)[None], cos, sin)
print("matches torch:", matches(out.transpose(0, 1)[None], expected))
assert matches(out.transpose(0, 1)[None], expected)

# %%
# H is a ``tl.constexpr``: a model has one number of heads, and the compiler turns a division by a constant into a
# multiplication. T is not, since it changes with every batch.
#
# Strides instead of copies
# -------------------------
#
# Attention wants (B, H, T, D). ``transpose`` gives this shape without moving a number: it changes the *strides*, the steps
# in memory from one index to the next. The figure shows the place in memory of each row, for 3 heads and 6 tokens.

plain = torch.arange(18).view(1, 3, 6, 1)  # (B, H, T, D): rows are numbers
projected = torch.arange(18).view(1, 6, 3, 1).transpose(1, 2)
made, axes = figure(8.0, 2.6, columns=2)
for ax, tensor, name in zip(
    axes,
    (plain, projected),
    ("contiguous (B, H, T, D)", "transposed (B, T, H, D)"),
):
    place = tensor[0, :, :, 0].numpy()  # (H, T)
    ax.imshow(place, cmap="Blues", vmax=30)
    for h in range(3):
        for t in range(6):
            ax.text(t, h, place[h, t], ha="center", va="center")
    ax.grid(False)
    ax.set(title=name, xlabel="token", ylabel="head", yticks=range(3))
plt.show()
assert plain.shape == projected.shape
assert plain.stride() != projected.stride()

# %%
# A kernel that wants contiguous input makes the caller copy first, which reads and writes a tensor: the traffic doubles.
# A kernel that takes the strides as arguments costs nothing more. It writes with strides, too. ``torch.empty_like``
# gives the result those of x, so that nothing behind it has to copy either.


@triton.jit
def turn_strided(
    x, x_b, x_h, x_t, out, out_b, out_h, out_t, cos, sin, T, H: tl.constexpr,
    HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    pairs = tl.arange(0, BLOCK)[None, :]
    inside = (rows < T * H) & (pairs < HALF)
    t, h = (rows // H).to(tl.int64), (rows % H).to(tl.int64)
    c = tl.load(cos + t * HALF + pairs, mask=inside)
    s = tl.load(sin + t * HALF + pairs, mask=inside)
    first = x + b * x_b + h * x_h + t * x_t + pairs
    va = tl.load(first, mask=inside)
    vb = tl.load(first + HALF, mask=inside)
    first = out + b * out_b + h * out_h + t * out_t + pairs
    tl.store(first, va * c - vb * s, mask=inside)
    tl.store(first + HALF, vb * c + va * s, mask=inside)


def turn(x, cos, sin):
    B, H, T, D = x.shape
    out = torch.empty_like(x)  # with the strides of x
    BLOCK = triton.next_power_of_2(D // 2)
    turn_strided[(triton.cdiv(T * H, ROWS), B)](
        x, *x.stride()[:3], out, *out.stride()[:3], cos, sin, T, H=H,
        HALF=D // 2, ROWS=ROWS, BLOCK=BLOCK,
    )  # fmt: skip
    return out


q = torch.randn(B, T, H, D, device=DEVICE).transpose(1, 2)  # (B, H, T, D)
turned = turn(q, cos, sin)
expected = reference.apply_rope(q, cos, sin)
print("matches torch:", matches(turned, expected))
print("laid out as x:", turned.stride() == q.stride())
print("contiguous:", turned.is_contiguous())
assert matches(turned, expected) and turned.stride() == q.stride()
assert not turned.is_contiguous()
assert matches(turn(q.contiguous(), cos, sin), expected)

# %%
# The token and the head become 64-bit numbers before they are multiplied with a stride: a product above
# :math:`2^{31}` would be a wrong address.
#
# The gradient is a turn back
# ---------------------------
#
# For one pair the forward pass is a product with a matrix R, and the gradient of a product with R is a product with
# its transpose:
#
# .. math::
#
#    R &= \begin{pmatrix} c & -s \\ s & c \end{pmatrix} \\
#    R^\top &= \begin{pmatrix} c & s \\ -s & c \end{pmatrix}
#
# The transpose is R with the other sign of s. So the backward kernel is the forward kernel, given :math:`-\sin`. It needs
# the gradient and the angles. It does not need x, so nothing of the size of x is kept between the passes.

q = q.detach().requires_grad_()
upstream = torch.randn_like(q)
(expected,) = torch.autograd.grad(
    reference.apply_rope(q, cos, sin), q, upstream
)
gradient = turn(upstream, cos, -sin)
print("gradient matches torch:", matches(gradient, expected))
print("there and back:", matches(turn(turned, cos, -sin), q.detach()))
assert matches(gradient, expected)
assert matches(turn(turned, cos, -sin), q.detach())

# %%
# The last line is the same fact seen from x: a rotation is undone by the rotation with the negative angle.
#
# The kernel of the package is this one, with four additions.

from lm_from_scratch.kernels.rope import (
    apply_rope,
    apply_rope_interleaved,
    rope_kernel,
)

print(inspect.getsource(rope_kernel.fn))

# %%
# * ``BACK`` changes the sign of the sine in a register, which saves a negated copy of it.
# * ``INTERLEAVED`` pairs features 2i and 2i + 1, the other convention.
# * The stride of the last dimension is an argument, because a gradient may come with any strides. Triton compiles a version
#   of its own for an integer argument that is 1, so the usual case pays nothing.
# * The grid has one axis, since the others end at 65,535 programs. ``cos_b`` is 0 where all rows of the batch share their
#   angles.
#
# ``T`` is in ``do_not_specialize``: no length gets a compiled version of its own.
#
# Correct
# -------
#
# The package's function against the reference: odd sizes, every layout, both conventions, forward and gradient.


def same(ours, theirs, x, tolerance=1e-5):
    """Value and gradient, for a transposed gradient as well."""
    angle = angles(*x.shape[2:])
    results = []
    for function in (ours, theirs):
        leaf = x.detach().requires_grad_()
        y = function(leaf, *angle)
        ones = torch.ones_like(y).mT.contiguous().mT
        grads = [
            torch.autograd.grad(y, leaf, g, retain_graph=True)[0]
            for g in (y.detach(), ones)
        ]
        results.append([y.detach(), *grads])
    return all(matches(a, b, tolerance) for a, b in zip(*results))


layouts = {
    "contiguous": torch.randn(2, 3, 7, 20, device=DEVICE),
    "transposed": torch.randn(2, 7, 3, 20, device=DEVICE).transpose(1, 2),
    "part of a wider tensor": torch.randn(2, 3, 7, 60, device=DEVICE)[
        ..., 20:40
    ],
    "one token, one head, one pair": torch.randn(1, 1, 1, 2, device=DEVICE),
}
for name, example in layouts.items():
    verdict = same(apply_rope, reference.apply_rope, example)
    verdict &= same(
        apply_rope_interleaved, reference.apply_rope_interleaved, example
    )
    print(f"{name}: {verdict}")
    assert verdict
verdict = same(
    apply_rope, reference.apply_rope, layouts["transposed"].half(), 4e-3
)
print(f"float16: {verdict}")
assert verdict

# %%
# How fast
# --------
#
# The floor is the time that memory needs for two passes over x. A GPU shows how near the kernel comes.

show("rope", cost)

# %%
# Bug museum
# ----------
#
# One head, and the input is gone
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# ``contiguous`` returns the tensor itself where nothing is to be copied, and a kernel turns the caller's keys.
#
# A kernel may write its result over its input. That saves memory, and it is safe as long as the input is its own
# copy. Is it? This wrapper transposes, calls ``contiguous``, and turns the copy in place. With two heads it works.


def turn_the_copy(x, cos, sin):
    copy = x.transpose(1, 2).contiguous()  # (B, T, H, D)
    view = copy.transpose(1, 2)
    turn_strided[(triton.cdiv(x.shape[1] * x.shape[2], ROWS), x.shape[0])](
        view, *view.stride()[:3], view, *view.stride()[:3], cos, sin,
        x.shape[2], H=x.shape[1], HALF=x.shape[3] // 2, ROWS=ROWS, BLOCK=BLOCK,
    )  # fmt: skip
    return view


for heads in (2, 1):
    k = torch.randn(1, heads, T, D, device=DEVICE)
    before = k.clone()
    result = turn_the_copy(k, cos, sin)
    right = matches(result, reference.apply_rope(before, cos, sin))
    kept = torch.equal(k, before)
    print(f"heads: {heads}, right: {right}, input kept: {kept}")
    assert right and kept == (heads == 2)

# %%
# With one head, the transposed tensor is contiguous already. Then ``contiguous`` returns the tensor itself, and the
# caller's keys are overwritten. The result is right, so a test of results passes. It was met in a widely used kernel:
# `Rope fails when num_head = 1 <https://github.com/linkedin/Liger-Kernel/issues/342>`_.
#
# The fixed line is ``out = torch.empty_like(x)``. The check: keep a clone of every input, compare after both passes,
# and have sizes of 1 among the cases.

k = torch.randn(1, 1, T, D, device=DEVICE)
before = k.clone()
apply_rope(k, cos, sin)
print("input kept:", torch.equal(k, before))
assert torch.equal(k, before)

# %%
# Which sentence is false?
# ------------------------
#
# 1. The backward pass of RoPE must keep x.
# 2. Turning by the angles of a token and then with the other sign of the sine gives x again.
# 3. All heads of a token turn by the same angles.
# 4. Reading through strides gives the same numbers as copying first.

q = torch.randn(B, T, H, D, device=DEVICE).transpose(1, 2).requires_grad_()
y = apply_rope(q, cos, sin)
saved = y.grad_fn.saved_tensors
keeps_x = any(kept.numel() >= q.numel() for kept in saved)
assert len(saved) == 2
upstream = torch.randn_like(y)
with torch.no_grad():
    back = apply_rope(apply_rope(q, cos, sin), cos, -sin)
    one_token = q[:, :1].expand(-1, H, -1, -1)  # each head the same numbers
    same_heads = apply_rope(one_token, cos, sin)
    copied = apply_rope(q.contiguous(), cos, sin)
answers = [
    keeps_x,
    matches(back, q.detach()),
    matches(same_heads, same_heads[:, :1].expand_as(same_heads)),
    matches(copied, y.detach()),
]
print(answers)
assert answers == [False, True, True, True]

# %%
# The first is false: the gradient of a rotation does not depend on what was turned, so only the angles are kept.
#
# Exercises
# ---------
#
# 1. *Easy.* Some models turn only the first R features of a head. Change ``turn_strided`` for it. A right answer equals the
#    reference on these features, and leaves the others equal bit by bit. Hint: which number tells where b is?
# 2. *Easy.* Let the kernel compute the angles from the positions. Count the bytes of ``FULL`` that this saves. A right answer
#    says why it is not worth a cosine for every number. Hint: the share is printed above.
# 3. *Medium.* Make ``turn_strided`` work on interleaved pairs. A right answer changes the address of a and of b and nothing
#    else, and equals ``apply_rope_interleaved``. Hint: the package needs two lines.
# 4. *Hard.* Turn queries and keys in one launch. A right answer equals two calls, with fewer key heads than query heads, and
#    counts the bytes of one generated token, to say when a launch costs more than the traffic. Hint: let rows of the keys
#    follow those of the queries.
#
# Summary
# -------
#
# * RoPE has less than one operation per byte. One kernel moves x twice, and PyTorch moves more than eight times as much.
# * A row is one head of one token. Rows of a token are neighbours, and share the angles through the cache.
# * Strides let a kernel read a transposed tensor, and write one, without a copy.
# * The backward pass is the forward pass with the other sign of the sine, and keeps nothing of the size of x.
#
# RoPE reads one tensor and writes one. The next page reads four and writes three, over themselves: the step of AdamW.
#
# Sources
# -------
#
# * Su et al.: `RoFormer <https://arxiv.org/abs/2104.09864>`_, 2021.
# * Hsu et al.: `Liger Kernel <https://arxiv.org/abs/2410.10989>`_, 2024. A kernel for queries and keys together.
# * The `documentation of strides <https://docs.pytorch.org/docs/stable/tensor_view.html>`_ in PyTorch.

print("all checks passed")
