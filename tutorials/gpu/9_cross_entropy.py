r"""
Cross-entropy: the loss without its logits
==========================================

The logits of a language model are often the largest tensor of a training step: one number for each token and each entry of the
vocabulary. The loss reduces each row of them to a single number.

How often must they be read? And if a row is to become one number, must it be in memory at all?

You will learn
--------------

* what PyTorch's loss reads and writes, operation by operation,
* how partial sums of a row merge, so that many programs share it,
* how a matrix product and a loss become one kernel, which holds no logits,
* why backward computes the logits again, and what that costs.

Before you start
----------------

Read the pages on `softmax <2_softmax.ipynb>`_ and on `matrix products <6_matmul.ipynb>`_ as kernels. Without a GPU the
kernels are interpreted.

A token has the logits :math:`z` and the target :math:`y`.
"""

# sphinx_gallery_words = ["fused linear cross entropy", "chunked cross entropy", "logits memory", "Liger"]

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


# %%
# Count first
# -----------
#
# The loss of a token and its gradient:
#
# .. math::
#
#    \mathcal{L} &= \log \sum_j e^{z_j} - z_y \\
#    \frac{\partial \mathcal{L}}{\partial z_j} &= e^{z_j - \mathrm{lse}} - [j = y]
#
# The log-sum-exp, short lse, is all that the loss needs of a row besides the logit of the target. Forward has to read the
# logits once. Backward has to read them once and write their gradient. With 8192 tokens of Qwen2-0.5B, in bfloat16:

FULL_N, FULL_V, FULL_C = 8192, 151_936, 896
number = FULL_N * FULL_V
cost = Cost(bytes=3 * 2 * number, operations=8 * number)
floor = 1e3 * cost.floor(GPUS["H100"])
print(f"the logits hold {2 * number / 1e9:.2f} GB")
print(
    f"{cost.bytes / 1e9:.1f} GB moved, {cost.intensity:.1f} operations per byte"
)
print(f"at least {floor:.1f} milliseconds on an H100")

# %%
# And PyTorch? A mode sees each operation with what goes in and comes out. We count those tensors that are as large as the logits,
# and leave out what the two ``nll_loss`` operations are given, because they read one number of each row.

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    def __init__(self, size):
        super().__init__()
        self.size, self.moved = size, {}

    def bytes_of(self, tree):
        tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
        return sum(t.itemsize for t in tensors if t.numel() == self.size)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        name = operation.__name__.removesuffix(".default")
        read = 0 if "nll_loss" in name else self.bytes_of(args)
        moved = read + self.bytes_of(result)
        if moved and not operation.is_view:
            self.moved.setdefault(name, []).append(moved)
        return result


half = torch.randn(1, 5, 31, dtype=torch.bfloat16, requires_grad=True)
with Traffic(half.numel()) as traffic:
    reference.causal_lm_loss(half, torch.zeros(1, 5).long()).backward()
for name, moved in traffic.moved.items():
    print(f"{name:28} {' and '.join(map(str, moved))} bytes per logit")
torch_bytes = sum(map(sum, traffic.moved.values()))
in_float32 = torch_bytes - sum(traffic.moved["_to_copy"])
print(f"PyTorch {torch_bytes}, the least {3 * 2}")
print(f"float32 logits: PyTorch {in_float32}, the least {3 * 4}")
assert (torch_bytes, in_float32) == (36, 24)

# %%
# Six times the least. A factor of 2 is there in float32 too: each operation writes its result for the next one. The other factor,
# of 3, is the cast to float32, which sums of so many numbers need: wider tensors, and two more operations to make them.
#
# One pass
# --------
#
# The online sum of the page on softmax reads a row once. It keeps m, the largest logit so far, and :math:`\ell`, the sum
# relative to it. After the last block, the lse is :math:`m + \log \ell`. A program takes a row, and m starts at the
# lowest finite number, as there.

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
BLOCK = 128 if DEVICE == "cpu" else 4096


@triton.jit
def log_sum_kernel(logits, log_sums, V, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    m = tl.full((), LOWEST, tl.float32)
    l = tl.zeros((), tl.float32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        at = logits + token * V + columns
        z = tl.load(at, mask=columns < V, other=float("-inf"))
        new_m = tl.maximum(m, tl.max(z, 0))
        l = l * tl.exp(m - new_m) + tl.sum(tl.exp(z - new_m), 0)
        m = new_m
    tl.store(log_sums + token, m + tl.log(l))


ours = torch.empty(N, device=DEVICE)
log_sum_kernel[(N,)](logits, ours, V, BLOCK=BLOCK)
verdict("matches torch", matches(ours, log_sum))

# %%
# A row full of that lowest number is the hardest for the start of ``m``. Its lse is the same number plus :math:`\log V`, which
# rounds to the number itself.

low = torch.full((1, V), LOWEST.value, device=DEVICE)
ours = torch.empty(1, device=DEVICE)
log_sum_kernel[(1,)](low, ours, V, BLOCK=BLOCK)
verdict("a row of the lowest number", ours == low[0, 0])

# %%
# The loss subtracts one more load, the logit of the target. Tokens with the target -100 do not count: their loss is 0, and their
# row need not be read. Here is the package's kernel.

from lm_from_scratch.kernels import loss as kernels

print(inspect.getsource(kernels.cross_entropy_kernel.fn))

# %%
# It never adds m to :math:`\log \ell`. The loss is :math:`\log \ell - (z_y - m)`, and both parts are kept for backward. A number
# added to all logits of a row changes no loss. But float32 knows a log-sum-exp near 10,000 to a thousandth only, and so would it
# know the loss.

counts = targets != IGNORE
far = logits[counts] + 10_000
t = targets[counts]
truth = F.cross_entropy(far.double(), t, reduction="none").float()
ours = torch.empty(len(far), device=DEVICE)
log_sum_kernel[(len(far),)](far, ours, V, BLOCK=BLOCK)
added = ours - far.gather(1, t[:, None])[:, 0]
apart, _, _ = kernels.cross_entropy(far, t)
verdict("m + log l - z matches torch", matches(added, truth), expected=False)
verdict("log l - (z - m) matches torch", matches(apart, truth))

# %%
# It has three things more. The logits may be a view of a larger tensor, such as all but the last token of each sequence: two
# strides say where a row begins, and nothing is copied. Half precision is cast up after the load.
#
# And a target outside the vocabulary makes the loss NaN. PyTorch's loss on a CPU raises an error there. A GPU would have to
# stop and send the targets to the host first.

wrong = targets.clone()
wrong[1] = V
verdict("target V, loss is NaN", kernels.causal_lm_loss(logits, wrong).isnan())

# %%
# Backward
# ~~~~~~~~
#
# The m and the :math:`\log \ell` of each row were kept, 2 N numbers. With them a logit becomes its softmax without any sum, so any
# block of any row can be done by any program: the work is element by element. The gradient of the loss comes in as a tensor and is read by the
# kernel, so the host need not know its value.

print(inspect.getsource(kernels.cross_entropy_backward_kernel.fn))

count = counts.sum()
leaf = logits.clone().requires_grad_()
mean = kernels.causal_lm_loss(leaf, targets)
(ours,) = torch.autograd.grad(mean * count, leaf)
mean = reference.causal_lm_loss(leaf, targets)
(expected,) = torch.autograd.grad(mean * count, leaf)
verdict("gradient matches torch", matches(ours, expected))
verdict("ignored rows are zero", not ours[::4].any())

# %%
# Many programs for one row
# -------------------------
#
# The logits are a product, :math:`z = W x`, with the head W (V, C). A kernel that multiplies tiles has a tile of logits in its
# registers, and could reduce it there. Then no logit goes to memory.
#
# One obstacle remains. If a program took whole rows of logits, there would be few programs, each with a long loop. So the
# vocabulary is split as well, and each program finds m and :math:`\ell` of its part. Parts merge as blocks do: the largest m is the
# m of the whole, and each :math:`\ell` gets its factor.


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
# The program below takes ``BLOCK_N`` tokens and ``SPLIT`` rows of W. Its outer loop walks over tiles of ``BLOCK_V`` rows. The inner
# one multiplies, as on the page on matrix products. Then come the two lines of the online softmax, now for a vector of tokens.


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
# ``tl.where`` before the maximum is not optional. The rows beyond the vocabulary were loaded as 0, and a logit of 0 is a logit: it
# would add :math:`e^0` for a token that does not exist.
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
# Backward needs the softmax, and so the logits, which nobody kept. It makes them again. The gradient of the logits, G, is
# needed twice:
#
# .. math::
#
#    \frac{\partial \mathcal{L}}{\partial x} = G W, \qquad \frac{\partial \mathcal{L}}{\partial W} = G^\top x
#
# Both are large ordinary products, which PyTorch's library does best. So one kernel writes G for a *chunk* of the vocabulary, two
# products use it, and the next chunk overwrites it. These lines are the whole of it.


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


upstream = torch.ones(N, device=DEVICE)  # of the sum of all losses
ours = backward(upstream, x, weight, targets, m, log_l, chunk=100)
leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
plain = reference.causal_lm_loss(F.linear(*leaves), targets)
expected = torch.autograd.grad(plain * count, leaves)
for name, a, b in zip(("x", "W"), ours, expected):
    verdict(f"gradient of {name} matches torch", matches(a, b, 1e-4))

# %%
# What is gained is memory. At the peak of PyTorch's backward pass there are three float32 tensors of N times V numbers: the kept
# log-softmax, the gradient that arrives at it, and the one that leaves. They are the 12 bytes of the table above.
#
# The loss in one pass has the logits and their gradient. The fused loss holds G, the sum for x, and m and :math:`\ell` of each
# part. The gradient of W is not counted, as all three have it.

chunk = inspect.signature(kernels.chunked_causal_lm_loss).parameters["chunk"]
chunk = chunk.default
held = {
    "PyTorch": {
        "float32": traffic.moved["_log_softmax_backward_data"][0] * number
    },
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
# And time? The logits cost a product of 2 N V C operations. Backward makes it 4 products instead of 3. What is saved is the traffic.
# The floors of three ways on an H100, where products run on matrix units:

product = 2 * FULL_N * FULL_V * FULL_C / GPUS["H100"].matrix
traffic_of = lambda size: size * number / GPUS["H100"].bandwidth  # noqa: E731
floors = {
    "product, PyTorch's loss": 3 * product + traffic_of(torch_bytes),
    "product, loss in one pass": 3 * product + traffic_of(3 * 2),
    "fused": 4 * product,
}
for name, seconds in floors.items():
    print(f"{name:26} {1e3 * seconds:5.1f} milliseconds at least")
first, second, third = floors.values()
assert first > 2 * second and abs(second - third) < 0.1 * second

# %%
# The fused loss pays with one product for what the loss in one pass pays with traffic, and by count the two are equal. So the
# reason to compute again is memory. Time is a draw.
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

none = torch.full_like(targets, IGNORE)
verdict("no target, loss 0", kernels.causal_lm_loss(logits, none) == 0)
wrong = kernels.chunked_causal_lm_loss(x, weight, torch.full_like(none, V))
verdict("target V, loss is NaN", wrong.isnan())

# %%
# How fast
# --------
#
# The loss in one pass sits on the slope: memory decides. The fused loss sits far to the right under the ceiling of the matrix
# units. The bytes are those of x, W and their gradients.

tensors = 2 * (FULL_N + FULL_V) * FULL_C
fused = Cost(bytes=2 * tensors, operations=8 * number * FULL_C)
print(f"{fused.intensity:,.0f} operations per byte")
show("cross_entropy", cost)
show("linear_cross_entropy", fused)

# %%
# Bug museum
# ----------
#
# The gradient that overwrote the logits
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The gradient is stored over logits that another backward pass still reads.
#
# The gradient has the size of the logits, and the logits seem of no further use. A kernel that stores it in their place saves
# gigabytes. Two bug reports follow from that line, `the first <https://github.com/linkedin/Liger-Kernel/issues/272>`_ and
# `the second <https://github.com/linkedin/Liger-Kernel/issues/343>`_. Gemma 2 passes its logits through a tanh, and the backward pass of
# tanh reads its *output*, which is the tensor that was overwritten.


@triton.jit
def in_place_kernel(
    logits, targets, log_sums, n_targets, V, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    at = logits + token * V + columns
    z = tl.load(at, mask=columns < V, other=0.0)
    p = tl.exp(z - tl.load(log_sums + token))
    hit = columns == tl.load(targets + token)
    tl.store(at, tl.where(hit, p - 1, p) / n_targets, mask=columns < V)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        ctx.save_for_backward(logits, targets)
        return F.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx, grad):
        z, targets = ctx.saved_tensors
        n, V = z.shape
        block = triton.next_power_of_2(V)
        in_place_kernel[(n,)](z, targets, z.logsumexp(1), n, V, BLOCK=block)
        return z, None


def gradient(loss, capped):
    raw = 2 * torch.linspace(-1, 1, 5 * 31, device=DEVICE).sin().view(5, 31)
    raw.requires_grad_()
    z = raw.tanh() if capped else raw * 1.0
    before = z.detach().clone()
    value = loss(z, torch.arange(5, device=DEVICE))
    (grad,) = torch.autograd.grad(value, raw)
    return grad, torch.equal(z, before)


for capped in (False, True):
    expected, _ = gradient(F.cross_entropy, capped)
    name = "with tanh   " if capped else "without tanh"
    for kind, loss in (
        ("in place", InPlace.apply),
        ("package ", kernels.causal_lm_loss),
    ):
        ours, untouched = gradient(loss, capped)
        right = matches(ours, expected)
        print(
            f"{name} {kind} gradient right: {right}, logits as before: {untouched}"
        )
        assert right == (kind == "package " or not capped)
        assert untouched == (kind == "package ")

# %%
# Nothing raises an error. PyTorch counts its own writes to a tensor and would refuse; the store of a kernel it cannot see. A plain
# model trains well, so most tests pass. The fixed line is ``torch.empty_like(logits)``. The check: clone every input before, and
# compare after backward.
#
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

shuffled = logits[:, torch.randperm(V).to(DEVICE)].contiguous()
ours = torch.empty(N, device=DEVICE)
log_sum_kernel[(N,)](shuffled, ours, V, BLOCK=BLOCK)
above = log_sum - logits.amax(1)
mean = kernels.causal_lm_loss(leaf, targets)
(grad,) = torch.autograd.grad(mean * count, leaf)
answers = [
    matches(ours, log_sum),
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
# 1. *Easy.* Let ``log_sum_kernel`` start with m and :math:`\ell` of 0 instead. A right answer gives a row for which that is exact, and
#    one for which it gives infinity or 0. Hint: what if all logits are -1000?
# 2. *Easy.* Count bytes and operations for 16 tokens instead of 8192. A right answer says which floor decides for the fused loss then, and from
#    how many tokens on it is the other one. Hint: W is read once, whatever N is.
# 3. *Medium.* Add label smoothing to both passes: a share of the target is spread evenly over the vocabulary. A right answer matches
#    ``F.cross_entropy(..., label_smoothing=0.1)`` in value and gradient. Hint: forward needs one more running sum.
# 4. *Hard.* Most entries of G are tiny. Skip a tile of G whose softmax is below :math:`2^{-12}` everywhere and that holds no target, in
#    both products. A right answer says how many tiles of a trained model are skipped, and bounds the error of the gradient. Hint: the paper
#    on losses in large vocabularies, below.
#
# Summary
# -------
#
# * The loss needs m and :math:`\log \ell` of a row, which an online sum finds in one pass.
# * By count, the loss in one pass moves 6 bytes per logit in bfloat16, PyTorch's 36.
# * The sums of parts merge, so a row can be shared by many programs.
# * Fused with the head, the loss holds no logits: less than a hundredth of PyTorch's memory, for a fourth product.
# * A kernel that writes into its input can be wrong far away from itself. Compare inputs before and after.
#
# A running maximum, a running sum, a product that never reaches memory: the next page puts a second product behind them, and has
# attention.
#
# Sources
# -------
#
# * Milakov, Gimelshein: `Online normalizer calculation for softmax <https://arxiv.org/abs/1805.02867>`_, 2018.
# * Hsu et al.: `Liger Kernel <https://arxiv.org/abs/2410.10989>`_, 2024. It computes the gradient in chunks during forward.
# * Wijmans et al.: `Cut Your Losses in Large-Vocabulary Language Models <https://arxiv.org/abs/2411.09009>`_, 2024.

print("all checks passed")
