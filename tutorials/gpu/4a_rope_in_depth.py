r"""
RoPE as a kernel, in depth
==========================

The lesson on `RoPE as a kernel <4_rope.ipynb>`_ turns a tensor with any strides, and its gradient by the same code. Is
it right for every layout, both conventions and half precision? What does the package's kernel add? And when does a
wrapper destroy its input?
"""

# sphinx_gallery_needs = ["4_rope"]
# sphinx_gallery_words = ["triton RoPE", "fused rotary", "interleaved", "do_not_specialize", "in place"]

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

import inspect

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
# A pair takes 6 operations for two numbers. The least traffic reads x once and writes the result once. The angles are
# float32, but all heads and all texts of the batch share them, so they are read once. The sizes are the queries of
# Qwen2-0.5B in bfloat16, 8 texts of 1024 tokens.

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
# Less than one operation per byte: memory decides, as with SwiGLU. The floor is the time that memory needs for two
# passes over x. A GPU shows how near the kernel of the package comes.

show("rope", cost)

# %%
# Heads share an angle
# --------------------
#
# The lesson goes from one head to strides in one step. Between the two is this kernel: several heads, (T, H, D) in
# memory, and no strides. Row r belongs to token ``r // H``, and H rows in turn load the same angles.


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


# %%
# H is a ``tl.constexpr``: a model has one number of heads, and the compiler turns a division by a constant into a
# multiplication. T is not, since it changes with every batch.

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
# The kernel of the package
# -------------------------
#
# It is ``turn_strided`` of the lesson. The token and the head become 64-bit numbers before they are multiplied with a
# stride: a product above :math:`2^{31}` would be a wrong address.

from lm_from_scratch.kernels.rope import (
    apply_rope,
    apply_rope_interleaved,
    rope_kernel,
)

# %%
# The source has four additions.

print(inspect.getsource(rope_kernel.fn))

# %%
# * ``BACK`` changes the sign of the sine in a register, which saves a negated copy of it.
# * ``INTERLEAVED`` pairs features 2i and 2i + 1, the other convention.
# * The stride of the last dimension is an argument, because a gradient may come with any strides. Triton compiles a
#   version of its own for an integer argument that is 1, so the usual case pays nothing.
# * The grid has one axis, since the others end at 65,535 programs. ``cos_b`` is 0 where all texts share their angles.
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


# %%
# A layout is a shape with strides. The smallest example has a single pair to turn.

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

# %%
# Half precision is turned in float32 and rounded once, at the end.

verdict = same(
    apply_rope, reference.apply_rope, layouts["transposed"].half(), 4e-3
)
print(f"float16: {verdict}")
assert verdict

# %%
# Bug museum
# ----------
#
# One head, and the input is gone
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# ``contiguous`` returns the tensor itself where nothing is to be copied, and a kernel turns the caller's keys. (M29)
#
# A kernel may write its result over its input. That saves memory, and it is safe as long as the input is its own
# copy. Is it? This wrapper transposes, calls ``contiguous``, and turns the copy in place.


def turn_the_copy(x, cos, sin):
    copy = x.transpose(1, 2).contiguous()  # (B, T, H, D)
    T, H, D = copy.shape[1:]
    programs = triton.cdiv(T * H, ROWS)
    for row in copy:  # (T, H, D)
        turn_heads[(programs,)](
            row, row, cos, sin, T, H=H, HALF=D // 2, ROWS=ROWS, BLOCK=BLOCK
        )
    return copy.transpose(1, 2)


# %%
# With two heads it works.

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
# 1. *Easy.* Let the kernel compute the angles from the positions. Count the bytes of ``FULL`` that this saves. A right
#    answer says why it is not worth a cosine for every number. Hint: the share is printed above.
# 2. *Hard.* Turn queries and keys in one launch. A right answer equals two calls, with fewer key heads than query
#    heads, and counts the bytes of one generated token, to say when a launch costs more than the traffic. Hint: let
#    rows of the keys follow those of the queries.
#
# Summary
# -------
#
# * RoPE has less than one operation per byte, so memory decides how long it takes.
# * A row is one head of one token. Rows of a token are neighbours, and share the angles through the cache.
# * The package's function equals the reference for every layout, both conventions, value and gradient.
# * A wrapper that works in place must own its copy. Sizes of 1 among the tests reveal one that does not.
#
# Sources
# -------
#
# * Su et al.: `RoFormer <https://arxiv.org/abs/2104.09864>`_, 2021.
# * Hsu et al.: `Liger Kernel <https://arxiv.org/abs/2410.10989>`_, 2024. A kernel for queries and keys together.
# * The `documentation of strides <https://docs.pytorch.org/docs/stable/tensor_view.html>`_ in PyTorch.

print("all checks passed")
