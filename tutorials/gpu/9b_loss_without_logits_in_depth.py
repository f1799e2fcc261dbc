r"""
The loss without logits in depth
================================

`The lesson on cross-entropy <9_cross_entropy.ipynb>`_ calls a kernel that multiplies and reduces, so that logits never reach memory.
How is it built, what does its backward pass hold, and what does it cost?

There are N tokens with C numbers each, the hidden states x (N, C), and a head W (V, C).
"""

# sphinx_gallery_needs = ["9_cross_entropy", "9a_cross_entropy_in_one_pass"]
# sphinx_gallery_words = ["fused linear cross entropy kernel", "CCE", "recompute logits in backward", "vocabulary parallel loss", "FlopCounterMode"]

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

import inspect

import torch.nn.functional as F

from lm_from_scratch.instruments.roofline import GPUS, Cost, show
from lm_from_scratch.kernels import loss as kernels
from lm_from_scratch.training import loss as reference

N, V, C = (45, 301, 37) if DEVICE == "cpu" else (1000, 32_001, 240)
IGNORE = -100  # a target that does not count
torch.manual_seed(0)

logits = torch.randn(N, V, device=DEVICE)
targets = torch.randint(0, V, (N,), device=DEVICE)
targets[::4] = IGNORE
log_sum = logits.logsumexp(1)


def matches(a, b, tolerance=1e-5):
    """Float32 sums in another order, or compiled by another compiler."""
    return torch.allclose(a, b, atol=tolerance, rtol=tolerance)


def verdict(text, found, expected=True):
    print(f"{text}: {bool(found)}")
    assert bool(found) == expected


LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
FULL_N, FULL_V, FULL_C = 8192, 151_936, 896
number = FULL_N * FULL_V

# %%
# A program for some tokens and a part of the vocabulary
# ------------------------------------------------------
#
# As in the lesson, each program finds m and :math:`\ell` of its part, and the parts are merged. These lines do it:


def merged(maxima, sums):
    """m and log l of each token, from those of P parts: (P, N) to (N,)."""
    m = maxima.amax(0)
    return m, (sums * (maxima - m).exp()).sum(0).log()


parts = logits.split(100, 1)
maxima = torch.stack([part.amax(1) for part in parts])
sums = [(z - m[:, None]).exp().sum(1) for z, m in zip(parts, maxima)]
m, log_l = merged(maxima, torch.stack(sums))
verdict("parts merge", matches(m + log_l, log_sum))

# %%
# The program below takes ``BLOCK_N`` tokens and ``SPLIT`` rows of W. Its outer loop walks over tiles of ``BLOCK_V`` rows. The
# inner one multiplies, as on the page on `matrix products <6_matmul.ipynb>`_. Then come the lines of the online sum.


@triton.jit
def split_kernel(
    x, weight, maxima, sums, N, V, C,
    SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1).to(tl.int64)
    end = tl.minimum(split * SPLIT + SPLIT, V)
    m = tl.full((BLOCK_N,), LOWEST, tl.float32)
    l = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(split * SPLIT, end, BLOCK_V):
        rows = start + tl.arange(0, BLOCK_V)
        z = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for first in range(0, C, BLOCK_C):
            c = first + tl.arange(0, BLOCK_C)
            x_inside = (tokens < N)[:, None] & (c < C)
            w_inside = (rows < V)[:, None] & (c < C)
            a = tl.load(x + tokens[:, None] * C + c, mask=x_inside, other=0.0)
            b = tl.load(
                weight + rows[:, None] * C + c, mask=w_inside, other=0.0
            )
            z = tl.dot(a, b.T, z, input_precision="ieee")
        z = tl.where(rows < end, z, float("-inf"))  # (BLOCK_N, BLOCK_V)
        new_m = tl.maximum(m, tl.max(z, 1))
        l = l * tl.exp(m - new_m) + tl.sum(tl.exp(z - new_m[:, None]), 1)
        m = new_m
    tl.store(maxima + split * N + tokens, m, mask=tokens < N)
    tl.store(sums + split * N + tokens, l, mask=tokens < N)


# %%
# Here are random states and a random head, compared with a product in float64.

x = torch.randn(N, C, device=DEVICE)
weight = torch.randn(V, C, device=DEVICE) / C**0.5
SPLIT = 128
grid = triton.cdiv(N, 32), triton.cdiv(V, SPLIT)
maxima, sums = torch.empty(2, grid[1], N, device=DEVICE)
sizes = dict(SPLIT=SPLIT, BLOCK_N=32, BLOCK_V=64, BLOCK_C=16)
split_kernel[grid](x, weight, maxima, sums, N, V, C, **sizes)
m, log_l = merged(maxima, sums)
expected = (x.double() @ weight.double().T).logsumexp(1).float()
verdict("matches torch", matches(m + log_l, expected))

# %%
# The ``tl.where`` before the maximum is needed. The rows beyond the vocabulary were loaded as 0, and a logit of 0 is a logit like
# any other: it would add :math:`e^{-m}` for an entry that does not exist.
#
# The package's kernel has the inner loop as a function, because backward needs it too. Beyond the last row it loads that row
# again instead of zeros: that takes fewer registers than a mask, and ``tl.where`` drops the copies as well. It also picks out the
# logit of the target, in the one tile where it appears.

print(inspect.getsource(kernels.logits_tile.fn))
print(inspect.getsource(kernels.linear_cross_entropy_kernel.fn))

# %%
# ``target_logits`` is filled with NaN before the launch. A target that no program finds stays NaN, and so the loss shows a target
# that is not in the vocabulary.
#
# Compute it again
# ----------------
#
# Backward computes the logits again, and from them G, the gradient of the logits. The products G W and :math:`G^\top x` are
# large and ordinary, and PyTorch calls a library for them. So one kernel writes G for a *chunk* of the vocabulary, two
# products use it, and the next chunk overwrites it. Here is all of it.


def backward(grad, x, weight, targets, m, log_l, chunk):
    (N, C), V = x.shape, len(weight)
    G = torch.empty(N, chunk, device=DEVICE)
    grad_x, grad_weight = torch.zeros_like(x), torch.empty_like(weight)
    tile = kernels.tile_sizes(x, weight)
    grid = triton.cdiv(N, tile["BLOCK_N"]), triton.cdiv(chunk, tile["BLOCK_V"])
    for first in range(0, V, chunk):
        kernels.linear_cross_entropy_backward_kernel[grid](
            grad, x, weight, targets, m, log_l, G, first, N, V, C, chunk,
            IGNORE=IGNORE, **tile,
        )  # fmt: skip
        W = weight[first : first + chunk]
        grad_x += G[:, : len(W)] @ W
        grad_weight[first : first + chunk] = G[:, : len(W)].T @ x
    return grad_x, grad_weight


# %%
# Both gradients are those of PyTorch.

upstream = torch.ones(N, device=DEVICE)  # of the sum of all losses
ours = backward(upstream, x, weight, targets, m, log_l, chunk=100)
count = (targets != IGNORE).sum()
leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
plain = reference.causal_lm_loss(F.linear(*leaves), targets)
expected = torch.autograd.grad(plain * count, leaves)
for name, a, b in zip(("x", "W"), ours, expected):
    verdict(f"gradient of {name} matches torch", matches(a, b, 1e-4))

# %%
# What is gained is memory. PyTorch's backward pass has three float32 tensors of N times V numbers at its peak. They are the
# 12 bytes in the table of `cross-entropy in one pass <9a_cross_entropy_in_one_pass.ipynb>`_.
#
# The loss in one pass has the logits and their gradient. The fused loss holds G, the sum for x, and m and :math:`\ell` of each
# part. The gradient of W is not counted, as all three have it.

chunk = inspect.signature(kernels.chunked_causal_lm_loss).parameters["chunk"]
chunk = chunk.default
held = {
    "PyTorch": {"float32": 3 * 4 * number},
    "in one pass": {"logits": 2 * number, "their gradient": 2 * number},
    "fused": {
        "G": 2 * FULL_N * chunk,
        "gradient of x": 4 * FULL_N * FULL_C,
        "parts": 2 * 4 * FULL_N * triton.cdiv(FULL_V, kernels.SPLIT),
    },
}
for name, tensors in held.items():
    print(f"{name:12} {sum(tensors.values()) / 1e9:6.2f} GB")
assert sum(held["PyTorch"].values()) > 100 * sum(held["fused"].values())


# %%
# A mode looks for the largest tensor of the backward pass.

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    size = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                self.size = max(self.size, t.numel())
        return result


with Largest() as seen:
    backward(upstream, x, weight, targets, m, log_l, chunk=100)
verdict("nothing of N x V", seen.size <= max(N * 100, V * C) < N * V)

# %%
# And time? A product has 2 N V C operations. The fused loss makes 4 of them, forward and backward, instead of 3, and saves the
# traffic of the logits. Here are the floors of three ways on an H100, where products run on matrix units, and PyTorch's loss
# moves 36 bytes per logit:

product = 2 * FULL_N * FULL_V * FULL_C / GPUS["H100"].matrix
traffic_of = lambda size: size * number / GPUS["H100"].bandwidth  # noqa: E731
floors = {
    "product, PyTorch's loss": 3 * product + traffic_of(36),
    "product, loss in one pass": 3 * product + traffic_of(3 * 2),
    "fused": 4 * product,
}
for name, seconds in floors.items():
    print(f"{name:26} {1e3 * seconds:5.1f} milliseconds at least")
first, second, third = floors.values()
assert first > 2 * second and abs(second - third) < 0.1 * second

# %%
# The fused loss has one product more, and the loss in one pass more traffic. By count these take about the same time. So the
# reason to compute the logits again is memory.
#
# Correct
# -------
#
# Both functions against PyTorch, in float32 and float16, with sizes that fit no block. For float16 the reference is the float32
# loss of the same rounded numbers; its gradients are rounded to float16 at the end.


def judge(loss, plain, *tensors, targets, tolerance):
    results = []
    for function, cast in ((loss, lambda t: t), (plain, lambda t: t.float())):
        leaves = [cast(t).detach().requires_grad_() for t in tensors]
        value = function(*leaves, targets)
        scaled = value * len(targets)  # the sum, whose gradients are near 1
        results.append([value, *torch.autograd.grad(scaled, leaves)])
    pairs = zip(*results, strict=True)
    return all(matches(a.float(), b, tolerance) for a, b in pairs)


# %%
# One token, a vocabulary of two, odd sizes.

for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 2e-3)):
    print(dtype)
    for rows, entries, width in ((1, 2, 1), (3, 131, 16), (37, 301, 37)):
        z = torch.randn(rows, entries, device=DEVICE).to(dtype)
        s = torch.randn(rows, width, device=DEVICE).to(dtype)
        w = torch.randn(entries, width, device=DEVICE).to(dtype)
        t = torch.randint(0, entries, (rows,), device=DEVICE)
        given = dict(targets=t, tolerance=tolerance)
        pair = kernels.causal_lm_loss, reference.causal_lm_loss
        one = judge(*pair, z, **given)
        pair = kernels.chunked_causal_lm_loss, reference.chunked_causal_lm_loss
        two = judge(*pair, s, w, **given)
        print(f"  {rows:2} tokens, V = {entries:3}, matches torch:", one, two)
        assert one and two

# %%
# Where no token counts the loss is 0, and where a target is outside the vocabulary it is NaN.

none = torch.full_like(targets, IGNORE)
verdict("no target, loss 0", kernels.causal_lm_loss(logits, none) == 0)
wrong = kernels.chunked_causal_lm_loss(x, weight, torch.full_like(none, V))
verdict("target V, loss is NaN", wrong.isnan())

# %%
# How fast
# --------
#
# The fused loss sits far to the right under the ceiling of the matrix
# units. The bytes are those of x, W and their gradients.

tensors = 2 * (FULL_N + FULL_V) * FULL_C
fused = Cost(bytes=2 * tensors, operations=8 * number * FULL_C)
print(f"{fused.intensity:,.0f} operations per byte")
show("linear_cross_entropy", fused)

# %%
# Which sentence is false?
# ------------------------
#
# 1. The blocks of a row may come in any order: up to rounding, the lse is the same.
# 2. The lse of a row is at least its largest logit, and at most :math:`\log V` above it.
# 3. The fused loss needs fewer operations than a product followed by a loss.
# 4. The gradients of a row of logits add up to 0.
#
# For the third, PyTorch counts the operations of products as they are called, forward and backward. It cannot look into a Triton
# kernel, so the fused loss is counted by hand: its backward pass computes the logits once more. The package's loss in plain
# PyTorch never holds all logits either, and PyTorch can count it.

from torch.utils.flop_counter import FlopCounterMode


def operations(loss):
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    with FlopCounterMode(display=False) as counter:
        loss(*leaves, targets.clamp(min=0)).backward()
    return counter.get_total_flops()


separate = operations(
    lambda x, weight, t: reference.causal_lm_loss(F.linear(x, weight), t)
)
by_tokens = operations(reference.chunked_causal_lm_loss)
fused = separate + 2 * N * V * C
assert separate == by_tokens == 3 * 2 * N * V * C

# %%
# And the other three sentences.

shuffled = logits[:, torch.randperm(V).to(DEVICE)].contiguous()
_, top, rest = kernels.cross_entropy(shuffled, targets.clamp(min=0))
above = log_sum - logits.amax(1)
leaf = logits.clone().requires_grad_()
mean = kernels.causal_lm_loss(leaf, targets)
(grad,) = torch.autograd.grad(mean * count, leaf)
answers = [
    matches(top + rest, log_sum),
    bool((above >= 0).all() and (above <= torch.tensor(V).log().item()).all()),
    fused < separate,
    matches(grad.sum(1), torch.zeros_like(grad[:, 0])),
]
print(answers)
assert answers == [True, True, False, True]

# %%
# The third is false: it needs four products instead of three. It saves memory and traffic. The loss in PyTorch gets by with three: it
# takes some tokens at a time, and finds their gradients before it lets their logits go.
#
# Exercises
# ---------
#
# 1. *Hard.* Most entries of G are tiny. Skip a tile of G whose softmax is below :math:`2^{-12}` everywhere and that holds no target, in
#    both products. A right answer says how many tiles of a trained model are skipped, and bounds the error of the gradient. Hint: the paper
#    on losses in large vocabularies, below.
#
# Summary
# -------
#
# * A program reduces its tile of logits in registers, and stores m and :math:`\ell` of its part. The parts merge.
# * Backward computes the logits again, a chunk of the vocabulary at a time: four products instead of three.
# * The fused loss takes less than a hundredth of PyTorch's memory, and by count as long as a loss in one pass.
#
# Sources
# -------
#
# * Hsu et al.: `Liger Kernel <https://arxiv.org/abs/2410.10989>`_, 2024. It computes the gradient in chunks during forward.
# * Wijmans et al.: `Cut Your Losses in Large-Vocabulary Language Models <https://arxiv.org/abs/2411.09009>`_, 2024.

print("all checks passed")
