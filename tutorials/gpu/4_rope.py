r"""
RoPE: the gradient is a turn back
=================================

RoPE turns each pair of features like the hand of a clock. It does so to all queries and keys, in every layer, before
attention compares them. The turning is cheap. What costs time is to fetch the numbers and to put them back.

One kernel does it here. A *row* is one head of one token, and a program turns a few rows: for each it loads two halves
and the angles of the token. What is crossed out is masked.
"""

# sphinx_gallery_needs = ["../2_qwen2/2_rope", "1_swiglu", "3_rms_norm"]
# sphinx_gallery_words = ["triton RoPE", "fused rotary", "strides", "non-contiguous"]

from lm_from_scratch.drawings import gpu_programs as drawings

drawings.rope_rows(T=4, H=3, half=3, rows=8, block=4)

# %%
# Before we write it: what do PyTorch's operations cost? The least *traffic*, the bytes between memory and chip, reads x
# once and writes the result once, plus a little for the angles.
#
# PyTorch calls ``__torch_dispatch__`` for every operation inside ``with Traffic()``. We let it add up the bytes of all
# tensors that go in and come out; ``tree_leaves`` finds them among the arguments. A view, such as a transpose, moves
# nothing.

import os

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view:
            leaves = tree_leaves((args, kwargs, result))
            self.bytes += sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
        return result


# %%
# **Predict first.** The package's function in PyTorch turns the queries of Qwen2-0.5B: 8 texts of 1,024 tokens, 14
# heads of 64 features, in bfloat16. How much does it move?
#
# * about the least that is possible
# * two or three times as much
# * more than eight times as much

from lm_from_scratch.layers import rope as reference

with torch.device("meta"):  # shapes without numbers
    q = torch.empty(8, 14, 1024, 64, dtype=torch.bfloat16)  # (B, H, T, D)
    angle = torch.empty(1, 1, 1024, 32)  # float32
with Traffic() as traffic:
    reference.apply_rope(q, angle, angle)
least = 2 * q.nbytes + 2 * angle.nbytes
print(f"{traffic.bytes / least:.1f} times the least")

assert traffic.bytes > 8 * least
assert 2 * angle.nbytes < 0.01 * least

# %%
# The reference widens x to float32, multiplies and adds each half, narrows both to bfloat16 and joins them. Each of these
# is a pass over memory, and most of them move four bytes a number instead of two.
#
# A kernel widens, turns and narrows in registers, where nothing is fetched. All heads and all texts share the angles,
# so the angles are less than a hundredth of the traffic.
#
# Two loads make a pair
# ---------------------
#
# A pair (a, b) turns by an angle with cosine c and sine s:
#
# .. math::
#
#    a' &= a c - b s \\
#    b' &= b c + a s
#
# In `Qwen2's RoPE <../2_qwen2/2_rope.ipynb>`_, feature i turns together with feature i + D/2. So a program loads the two
# halves of a row as two blocks, a and b. The first kernel turns a single head, and its row is a token t.

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl


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


# %%
# The reference cuts x into halves and joins them again, which is a copy. The kernel just loads from two addresses and
# stores to two. ``first`` is the offset of each a, and its b is HALF numbers further.

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, H, T, D = (2, 3, 37, 20) if DEVICE == "cpu" else (4, 14, 1000, 80)
torch.manual_seed(0)


def angles(T, D):
    positions = torch.arange(T, device=DEVICE)[None]
    speeds = reference.inverse_frequencies(D, 10000.0, device=DEVICE)
    return reference.rotation(positions, speeds)  # two of (1, 1, T, D/2)


cos, sin = angles(T, 16)
x = torch.randn(T, 16, device=DEVICE)
out = torch.empty_like(x)
turn_tokens[(triton.cdiv(T, 32),)](x, out, cos, sin, T, HALF=8, ROWS=32)
expected = reference.apply_rope(x[None, None], cos, sin)[0, 0]
print("matches torch:", torch.allclose(out, expected, atol=1e-5, rtol=1e-5))

assert out.shape == expected.shape
assert torch.allclose(out, expected, atol=1e-5, rtol=1e-5)

# %%
# Where is the next token?
# ------------------------
#
# A model has several heads. A projection gives each token the features of all its heads, one head after the other:
# (B, T, H, D). Attention wants (B, H, T, D), and ``transpose`` gives it this shape.
#
# **Predict first.** Take one text with six tokens and three heads. After the ``transpose``, the rows of head 0 are
# tokens 0 to 5 of that head. Where do they lie in memory, if we count in rows?
#
# * at places 0, 1, 2, 3, 4, 5
# * at places 0, 3, 6, 9, 12, 15
# * it depends on the GPU

plain = torch.arange(18).view(1, 3, 6, 1)  # (B, H, T, D): rows are numbers
projected = torch.arange(18).view(1, 6, 3, 1).transpose(1, 2)
assert plain.shape == projected.shape
assert plain.stride() != projected.stride()

drawings.memory_places(
    {
        "contiguous (B, H, T, D)": plain[0, :, :, 0].tolist(),
        "(B, T, H, D), transposed": projected[0, :, :, 0].tolist(),
    }
)

# %%
# They lie three places apart. ``transpose`` moves no number: it swaps two `strides <1_swiglu.ipynb>`_.
#
# Strides instead of copies
# -------------------------
#
# A kernel that wants contiguous input makes the caller copy first, which reads and writes a tensor: the traffic
# doubles. A kernel that takes the strides as arguments needs no copy.
#
# This one turns all heads of all texts. Its grid has two axes: ``tl.program_id(1)`` is the text b, and
# ``tl.program_id(0)`` counts blocks of rows as before. ``x_b``, ``x_h`` and ``x_t`` are the strides of x from one text,
# head and token to the next. The features of a row are taken to be neighbours. The pair is (va, vb) here,
# because b is the text.
#
# Row r is head ``r % H`` of token ``r // H``, as in the first picture, so H neighbours load the same angles. The first
# load brings them into a *cache*, a small memory on the chip, and the next ones find them there.


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


# %%
# The mask has two parts. A head of 20 features has 10 pairs, and ``tl.arange`` wants a power of 2, so the block is 16
# wide and six of its pairs are masked. In the picture it was one of four. Texts, tokens and heads become 64-bit numbers,
# since a product with a stride can exceed 32 bits.
#
# The kernel writes with strides, too. ``torch.empty_like`` gives the result those of x, so nothing that follows has to
# copy either.


def turn(x, cos, sin):
    B, H, T, D = x.shape
    out = torch.empty_like(x)  # with the strides of x
    turn_strided[(triton.cdiv(T * H, 64), B)](
        x, *x.stride()[:3], out, *out.stride()[:3], cos, sin, T, H=H,
        HALF=D // 2, ROWS=64, BLOCK=triton.next_power_of_2(D // 2),
    )  # fmt: skip
    return out


def matches(ours, theirs, off=1e-5):
    close = torch.allclose(ours, theirs, atol=off, rtol=off)
    return ours.shape == theirs.shape and close


# %%
# As in a model, its input is a transposed tensor.

q = torch.randn(B, T, H, D, device=DEVICE).transpose(1, 2)  # (B, H, T, D)
cos, sin = angles(T, D)
turned = turn(q, cos, sin)
expected = reference.apply_rope(q, cos, sin)
print("matches torch:", matches(turned, expected))
print("laid out as x:", turned.stride() == q.stride())

assert matches(turned, expected) and turned.stride() == q.stride()
assert not turned.is_contiguous()
assert matches(turn(q.contiguous(), cos, sin), expected)

# %%
# The gradient is a turn back
# ---------------------------
#
# Training needs a second kernel, for the gradient. Or does it? For one pair the forward pass is a product with a matrix
# R, and the gradient of a product with R is a product with its transpose:
#
# .. math::
#
#    R &= \begin{pmatrix} c & -s \\ s & c \end{pmatrix} \\
#    R^\top &= \begin{pmatrix} c & s \\ -s & c \end{pmatrix}
#
# **Predict first.** The kernel is given and works. What must be written for the backward pass, and what must the
# forward pass keep for it?
#
# * a second kernel, and x
# * the same kernel with :math:`-s`, and the angles
# * the same kernel with :math:`-s`, the angles and x

q = q.detach().requires_grad_()
upstream = torch.randn_like(q)
result = reference.apply_rope(q, cos, sin)
(expected,) = torch.autograd.grad(result, q, upstream)
gradient = turn(upstream, cos, -sin)
print("gradient matches torch:", matches(gradient, expected))
print("there and back:", matches(turn(turned, cos, -sin), q.detach()))

assert matches(gradient, expected)
assert matches(turn(turned, cos, -sin), q.detach())

# %%
# The transpose is R with the other sign of s. So the backward kernel is the forward kernel, given :math:`-\sin`. It
# needs the gradient and the angles, and nothing of the size of x is kept between the passes.
#
# The last line is the same fact seen from x: turn forward, turn back, and every hand is where it was.
#
# Does a model notice?
# --------------------
#
# Each attention layer of our small Qwen2 holds the function that turns its queries and keys. We put ours in its place.

from lm_from_scratch.checkpoint.weights import load_shipped

model, tokenizer = load_shipped("qwen2-docs")
model.to(DEVICE)
idx = torch.tensor([tokenizer.start("Return the number of")], device=DEVICE)
with torch.no_grad():
    before = model(idx)
    for block in model.model.layers:
        block.self_attn.rotate = turn
    after = model(idx)
print("logits stay:", matches(after, before, 1e-3))
print(repr(tokenizer.decode([after[0, -1].argmax().item()])))

assert matches(after, before, 1e-3)
assert after[0, -1].argmax() == before[0, -1].argmax()

# %%
# It does not: the next word is the same. In training it would need one thing more, since autograd does not see into
# a kernel.
#
# In depth: `the package's kernel, which autograd knows, and an input that is overwritten <4a_rope_in_depth.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* Some models turn only the first R features of a head. Change ``turn_strided`` for it. A right answer equals
#    the reference on these features, and leaves the others equal bit by bit. Hint: which number says where b is?
# 2. *Medium.* Make ``turn_strided`` work on interleaved pairs. A right answer changes the address of a and of b and
#    nothing else, and equals ``apply_rope_interleaved``. Hint: the package needs two lines.
#
# Summary
# -------
#
# * One kernel moves x twice, in and out. PyTorch's operations move more than eight times as much.
# * Strides let a kernel read a transposed tensor, and write one, without a copy.
# * The backward pass is the forward pass with the other sign of the sine, and keeps nothing of the size of x.
