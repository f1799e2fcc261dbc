r"""
A product with weights of 8 bits
================================

The lesson on the `matrix product <6_matmul.ipynb>`_ multiplies thousands of tokens at a time, and operations decide how
long it takes. A model that generates multiplies *one* token with every weight. What decides then, and what does the
kernel gain if weights have 8 bits instead of 16?
"""

# sphinx_gallery_needs = ["6_matmul", "../8_quantized_weights/1_int8_int4"]
# sphinx_gallery_words = ["int8 matmul", "dequantize", "weight-only quantization", "W8A16", "LLM.int8", "split K", "GEMV"]

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

import inspect
from functools import partial

from lm_from_scratch.instruments.roofline import GPUS, Cost, show
from lm_from_scratch.kernels import int8
from lm_from_scratch.weights import quantized_weight
from lm_from_scratch.weights.int8 import Int8Weight

M, K, N = (13, 300, 11) if DEVICE == "cpu" else (500, 1000, 700)
torch.manual_seed(0)


def matches(ours, theirs, tolerance=1e-3):
    """Sums of K products of normal numbers, in another order."""
    return ours.shape == theirs.shape and bool(
        torch.allclose(ours, theirs, atol=tolerance, rtol=1e-4)
    )


# %%
# Count first
# -----------
#
# With one token M is 1, nothing is reused, and only bytes count. The package keeps a matrix as 8-bit codes and a scale
# for each row of the weight. The least traffic for the codes is 1 byte a number. Decoding them first reads 1 byte, writes
# 2 in bfloat16, and reads these 2 again. The sizes are those of a map of Qwen2-0.5B.

FULL = dict(M=4096, K=896, N=4864)
h100 = GPUS["H100"]


def least(M, K, N):
    return Cost(bytes=2 * (M * K + K * N + M * N), operations=2 * M * N * K)


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
assert 2 < decoded / plain.bytes < 3

# %%
# The codes halve the time, if the kernel reads them and nothing else. Decoded first, they would cost more than twice what
# bfloat16 costs.
#
# Two lines change
# ----------------
#
# A code is loaded as a byte and cast to the dtype of x. That is exact, since a code has 7 bits and a sign. The scale is
# the same for all products of a sum, so it multiplies the sum.


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


# %%
# The weight is (N, K), as in a linear layer, so column n of the product reads row n of the codes.

a = torch.randn(M, K, device=DEVICE)
weight = Int8Weight.quantize(torch.randn(N, K, device=DEVICE))
out = torch.full((M, N), torch.nan, device=DEVICE)
tile_of_codes[(triton.cdiv(M, 16), triton.cdiv(N, 32))](
    a, weight.codes, weight.scale, out, M, N, K,
    BLOCK_M=16, BLOCK_N=32, BLOCK_K=64,
)  # fmt: skip
expected = quantized_weight.linear(a, weight)
print("matches the decoded weight:", matches(out, expected))
assert matches(out, expected)

# %%
# Every number of the result is right, and none is the NaN that was there before. In float16, too, the cast loses nothing:

every = torch.arange(-128, 128).to(torch.int8)
exact_cast = torch.equal(every.half().to(torch.int8), every)
print("float16 holds every code:", exact_cast)
assert exact_cast

# %%
# The matrix units take at least 16 rows at once, so the mask adds 15 rows of zeros to a single token. That costs
# operations, and the chip has time for them.
#
# The kernel of the package
# -------------------------
#
# It adds strides, a bias, and scales for groups within a row.

print(inspect.getsource(int8.int8_linear_kernel.fn))

# %%
# Correct
# -------
#
# The package's function against its reference, which decodes: odd sizes, forward and gradient.


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


# %%
# A gradient reaches x. The codes are whole numbers and get none.

shapes = {
    "one number": (1, 1, 1),
    "one token": (1, 40, 33),
    "odd": (35, 37, 70),
}
for name, (m, k, n) in shapes.items():
    p = torch.randn(m, k, device=DEVICE)
    weight = Int8Weight.quantize(torch.randn(n, k, device=DEVICE))
    mine = partial(int8.linear, weight=weight)
    theirs = partial(quantized_weight.linear, weight=weight)
    verdict = same(mine, theirs, p)
    print(f"{name}: {verdict}")
    assert verdict

# %%
# ``use_int8_kernel_`` puts it into a model, and then all its weights of 8 bits are multiplied this way.
#
# How fast
# --------
#
# The product of one token is bound by bytes. The floor is that of the count above.

show("int8", codes)

# %%
# Exercises
# ---------
#
# 1. *Hard.* With one token, N = 896 gives 28 programs of 32 columns, and most of a GPU idles. Split K among programs and
#    add their sums. A right answer writes partial sums in float32 to a tensor of its own and adds them in a second
#    launch, so that it is the same at every run. Hint: the page on RMSNorm does it for a gradient.
#
# Summary
# -------
#
# * One token reuses no weight, so the time of the product is that of the bytes of the weights.
# * With codes of 8 bits the same kernel moves half the bytes of bfloat16, and the scale waits until the end.
# * Decoding before the product would move nearly five times the bytes of the codes.
#
# Sources
# -------
#
# * Dettmers et al.: `LLM.int8() <https://arxiv.org/abs/2208.07339>`_, 2022. Weights and activations in 8 bits.

print("all checks passed")
