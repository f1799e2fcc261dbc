r"""
Cross-entropy in one pass
=========================

`The lesson on cross-entropy <9_cross_entropy.ipynb>`_ finds the loss of a token in one pass over its logits. What does PyTorch
read and write instead, how does the package's kernel stay exact for large logits, and what goes wrong if the gradient is stored in
their place?

A token has the logits :math:`z` and the target :math:`y`.
"""

# sphinx_gallery_needs = ["9_cross_entropy"]
# sphinx_gallery_words = ["_log_softmax_backward_data", "logits upcast float32", "in-place logits gradient", "TorchDispatchMode"]

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

import inspect

import torch.nn.functional as F

from lm_from_scratch.instruments.roofline import Cost, show
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


# %%
# Six times the least
# -------------------
#
# Forward has to read the logits once. Backward has to read them once and write their gradient: in bfloat16, 6 bytes per logit.
#
# And PyTorch? A *mode* sees each operation with what goes in and comes out. We count those tensors that are as large as the logits,
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


# %%
# Here are forward and backward of PyTorch's loss, on bfloat16 logits.

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

assert traffic.moved["_log_softmax_backward_data"] == [12]

# %%
# Six times the least. A factor of 2 is there in float32 too: each operation writes its result for the next one. The other factor,
# of 3, is the cast to float32, which sums of so many numbers need: wider tensors, and two more operations to make them.
#
# An exact loss
# -------------
#
# The kernel of the lesson: m starts at the lowest finite number.

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


print(inspect.getsource(kernels.cross_entropy_kernel.fn))

# %%
# It never adds m to :math:`\log \ell`. The loss is :math:`\log \ell - (z_y - m)`, and both parts are kept for backward.
# A number added to all logits of a row changes no loss. But near 10,000 float32 holds a log-sum-exp to a thousandth
# only, and a loss made from it would be no more exact.

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
# --------
#
# The m and the :math:`\log \ell` of each row were kept, 2 N numbers. With them a logit becomes its softmax without any sum, so any
# block of any row can be done by any program: the work is element by element. The gradient of the loss comes in as a tensor and is read by the
# kernel, so the host need not know its value.

print(inspect.getsource(kernels.cross_entropy_backward_kernel.fn))

# %%
# Its gradient is that of PyTorch's loss, and rows that do not count get zeros.

count = counts.sum()
leaf = logits.clone().requires_grad_()
mean = kernels.causal_lm_loss(leaf, targets)
(ours,) = torch.autograd.grad(mean * count, leaf)
mean = reference.causal_lm_loss(leaf, targets)
(expected,) = torch.autograd.grad(mean * count, leaf)
verdict("gradient matches torch", matches(ours, expected))
verdict("ignored rows are zero", not ours[::4].any())

# %%
# How fast
# --------
#
# The loss in one pass sits on the slope: memory decides. The cost is that of the lesson, 8192 tokens of Qwen2-0.5B in bfloat16. The
# kernel meets PyTorch in other dtypes and sizes in `the loss without logits in depth <9b_loss_without_logits_in_depth.ipynb>`_.

number = 8192 * 151_936
cost = Cost(bytes=3 * 2 * number, operations=8 * number)
print(
    f"{cost.bytes / 1e9:.1f} GB moved, {cost.intensity:.1f} operations per byte"
)
show("cross_entropy", cost)

# %%
# Bug museum
# ----------
#
# The gradient that overwrote the logits
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The gradient is stored over logits that another backward pass still reads. (M37)
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


# %%
# Around it is an autograd function, whose backward pass returns the logits that it has overwritten.


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


# %%
# Its gradient is compared with PyTorch's, without a tanh before the loss and with one.


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
# Exercises
# ---------
#
# 1. *Medium.* Add label smoothing to both passes: a share of the target is spread evenly over the vocabulary. A right answer matches
#    ``F.cross_entropy(..., label_smoothing=0.1)`` in value and gradient. Hint: forward needs one more running sum.
#
# Summary
# -------
#
# * By count, the loss in one pass moves 6 bytes per logit in bfloat16, PyTorch's 36.
# * The loss is :math:`\log \ell - (z_y - m)`. To form the lse first costs digits, if logits are far from 0.
# * A kernel that writes into its input can be wrong far away from itself. Compare inputs before and after.
#
# Sources
# -------
#
# * Milakov, Gimelshein: `Online normalizer calculation for softmax <https://arxiv.org/abs/1805.02867>`_, 2018.
# * Hsu et al.: `Liger Kernel <https://arxiv.org/abs/2410.10989>`_, 2024. It computes the gradient in chunks during forward.

print("all checks passed")
