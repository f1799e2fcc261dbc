r"""
GaLore's step in depth
======================

`The lesson on GaLore's kernels <8_galore.ipynb>`_ needs three launches for a step and no tensor as large as the weight. Which are the
seven that plain PyTorch makes, when do operations decide, does the package agree with its reference everywhere, and what must
autograd know of a kernel that overwrites a parameter?

Letters are those of the lesson: a weight :math:`W` and its gradient :math:`G` are (m, n), the rank is r. The basis :math:`P` (m, r) is on the
left, so that the projected gradient :math:`R = P^\top G` and the moments are (r, n).
"""

# sphinx_gallery_needs = ["8_galore"]
# sphinx_gallery_words = ["torch.library.custom_op", "mutates_args", "modified by an inplace operation", "addmm_", "TorchDispatchMode"]

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from torch import nn

from lm_from_scratch.instruments.roofline import GPUS, Cost, show
from lm_from_scratch.optim import galore as reference
from lm_from_scratch.optim.adamw import adam_direction

m, n, r = (37, 70, 9) if DEVICE == "cpu" else (896, 4864, 128)
torch.manual_seed(0)


def matches(ours, theirs, rtol=1e-4, atol=1e-4):
    """Sums of float32 in another order; float16 needs a larger rtol."""
    return ours.shape == theirs.shape and bool(
        torch.allclose(ours.float(), theirs.float(), rtol=rtol, atol=atol)
    )


# %%
# From which rank do operations decide?
# -------------------------------------
#
# The counts are those of the lesson, of a matrix of Qwen2-0.5B in float32. The floor is the larger of two times: bytes over
# bandwidth, operations over the rate of float32.

M, N = 896, 4864


def adamw_cost(m, n):
    return Cost(bytes=7 * 4 * m * n, operations=15 * m * n)


def galore_cost(m, n, r):
    large, small = 3 * m * n, 8 * r * n + 2 * m * r
    products, adam = 4 * m * n * r + 3 * m * n, 15 * r * n
    return Cost(bytes=4 * (large + small), operations=products + adam)


adamw, cost = adamw_cost(M, N), galore_cost(M, N, 128)


def decides(c, gpu):
    """Whether the operations take longer than the traffic."""
    return c.operations / gpu.scalar > c.bytes / gpu.bandwidth


for name in ("A100", "H100"):
    gpu = GPUS[name]
    bound = next(k for k in range(1, M) if decides(galore_cost(M, N, k), gpu))
    floors = [1e6 * c.floor(gpu) for c in (adamw, cost)]
    print(f"{name}: operations decide from rank {bound}")
    print(f"    AdamW {floors[0]:.0f}, GaLore {floors[1]:.0f} microseconds")
    assert 20 < bound < 128
# %%
# Beyond that rank, a step of GaLore waits for the units that compute. The matrix units would be faster, but they round the numbers
# that they multiply, to 11 bits or fewer. The package computes the step as its reference does, in full float32.
#
# What plain PyTorch makes on the way
# -----------------------------------
#
# That count is the least. A mode that sees every operation of PyTorch says what a plain step moves, in bytes for each
# number of the weight. The weight is bfloat16 now, as on a GPU, and bases and moments stay float32.

from torch.utils._python_dispatch import TorchDispatchMode


class Large(TorchDispatchMode):
    """What operations do with tensors as large as the weight."""

    def __init__(self, size):
        super().__init__()
        self.size, self.rows = size, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        reads = sum(x.nbytes for x in tensors if x.numel() == self.size)
        large = not operation.is_view and result.numel() == self.size
        writes = result.nbytes if large else 0
        if (reads or writes) and not operation.is_view:
            new = large and all(result is not x for x in tensors)
            name = operation.overloadpacket.__name__
            self.rows.append(
                (name, reads // self.size, writes // self.size, new)
            )
        return result

    def summary(self):
        moved = sum(reads + writes for _, reads, writes, _ in self.rows)
        return moved, sum(new for *_, new in self.rows)


with torch.device("meta"):
    W, G = (torch.empty(M, N, dtype=torch.bfloat16) for _ in range(2))
    P, moment = torch.empty(M, 128), torch.empty(128, N)
with Large(M * N) as plain:
    reference.galore_step(W, G, P, None, moment, moment, 1)

print("operation   reads  writes  new tensor")
for name, reads, writes, new in plain.rows:
    print(f"{name:10} {reads:6} {writes:7}  {new}")
print("bytes for each weight, new tensors:", plain.summary())
assert plain.summary() == (54, 7)

# %%
# Seven tensors as large as the weight, and 54 bytes for each of its numbers, where 6 would do: read two numbers of two
# bytes, write one. Widened copies of gradient and weight are two of the seven tensors, :math:`P d` is another.
#
# In float32 PyTorch can do better. ``addmm_`` is a product whose result is added to a tensor in place, and the optimizer of
# the package calls it.

with torch.device("meta"):
    W, G = (torch.empty(M, N) for _ in range(2))
with Large(M * N) as fused:
    direction = P.mT @ G
    W.addmm_(P, direction, beta=0.99, alpha=-0.01)
print("bytes for each weight, new tensors:", fused.summary())
assert fused.summary() == (12, 0)

# %%
# Twelve bytes are the least in float32. ``addmm_`` wants one dtype for all, though, so a weight of bfloat16 does not get
# this. The kernels do it for both.
#
# The launches of the package
# ---------------------------
#
# First the pieces, at sizes that fit no tile. The gradient has half precision, the basis is float32, and the projection is compared with
# a product in torch.

from lm_from_scratch.kernels.galore import (
    GaLore,
    adam_direction_kernel,
    galore_step,
    galore_step_,
)
from lm_from_scratch.kernels.matmul import launch

G = torch.randn(m, n, device=DEVICE).half()
P = torch.linalg.qr(torch.randn(m, r, device=DEVICE)).Q.contiguous()
R = torch.empty(r, n, device=DEVICE)
launch(G.mT, P, R.mT)
print("matches torch:", matches(R, P.mT @ G.float()))
assert matches(R, P.mT @ G.float())

# %%
# ``launch`` writes a product to a tensor that is there, and lets its first factor be narrower than its second. That is why
# the projection is written as :math:`(G^\top P)^\top`. It takes every matrix with its strides, so ``G.mT`` and ``P.mT`` cost
# nothing.
#
# Then Adam, whose numbers of a step are floats that the host computes.

step, beta1, beta2, eps = 10, 0.9, 0.999, 1e-8
exp_avg = 0.1 * torch.randn(r, n, device=DEVICE)
exp_avg_sq = 0.5 + torch.rand(r, n, device=DEVICE)
want, want_m, want_v = adam_direction(R, exp_avg, exp_avg_sq, step)

d, size = torch.empty_like(R), R.numel()
adam_direction_kernel[(triton.cdiv(size, 1024),)](
    R, exp_avg, exp_avg_sq, d, size,
    beta1, 1 - beta1, beta2, 1 - beta2, 1 - beta1**step, 1 - beta2**step,
    eps, BLOCK=1024,
)  # fmt: skip
print("direction matches torch:", matches(d, want))
moments_match = matches(exp_avg, want_m) and matches(exp_avg_sq, want_v)
print("moments match torch:", moments_match)
assert matches(d, want) and moments_match

# %%
# Last the epilogue. The weight lies between two margins of NaN here, which must still be there afterwards.

memory = torch.full((m + 2, n), torch.nan, device=DEVICE).half()
W = memory[1:-1]
W.copy_(torch.randn(m, n))
lr, decay, scale = 0.01, 0.1, 0.25
want = ((1 - lr * decay) * W.float() - lr * scale * (P @ d)).half()

launch(P, d, W, W, beta=1 - lr * decay, alpha=-lr * scale)
margins = bool(memory[0].isnan().all() and memory[-1].isnan().all())
print("matches torch:", matches(W, want, rtol=2e-3))
print("margins untouched:", margins)
assert matches(W, want, rtol=2e-3) and margins

# %%
# The package does this with its one kernel for products, whose epilogue is the form ``ADD`` of the
# `matrix product in depth <6a_matmul_in_depth.ipynb>`_. ``launch`` checks nothing, and PyTorch does not learn what it wrote.
# So the package calls it within operators. The museum shows what they are for.
#
# Here is a whole step, and the tensors that PyTorch made meanwhile.

param = torch.randn(m, n, device=DEVICE).half()
expected = galore_step(
    param, G, P, None, exp_avg, exp_avg_sq, step, lr, (beta1, beta2), eps,
    decay, scale,
)  # fmt: skip

with Large(m * n) as ours:
    low = torch.empty(r, n, device=DEVICE)
    launch(G.mT, P, low.mT)
    adam_direction_kernel[(triton.cdiv(size, 1024),)](
        low, exp_avg, exp_avg_sq, d, size,
        beta1, 1 - beta1, beta2, 1 - beta2, 1 - beta1**step, 1 - beta2**step,
        eps, BLOCK=1024,
    )  # fmt: skip
    launch(P, d, param, param, beta=1 - lr * decay, alpha=-lr * scale)
print("large tensors that PyTorch made:", ours.summary()[1])
print("the function does the same:", torch.equal(param, expected[0]))
assert ours.summary()[1] == 0
assert torch.equal(param, expected[0])

# %%
# ``galore_step`` has the arguments and the result of the reference. ``galore_step_`` does it in place, and ``GaLore`` is the
# optimizer. With two bases there are two more launches, each for a small product.
#
# Correct
# -------
#
# First the function: a left basis, a right one and both, odd sizes, both precisions.


def example(m, n, r, left, right, dtype):
    """Parameter, gradient, both bases, and moments that are not zero."""
    bases = [
        torch.linalg.qr(torch.randn(k, r, device=DEVICE)).Q if has else None
        for k, has in ((m, left), (n, right))
    ]
    low = (r if left else m, r if right else n)
    pair = [torch.randn(m, n, device=DEVICE).to(dtype) for _ in range(2)]
    mean, square = torch.randn(low, device=DEVICE), torch.rand(low) + 0.5
    return [*pair, *bases, mean, square.to(DEVICE)]


options = dict(lr=0.1, betas=(0.8, 0.99), weight_decay=0.1, scale=0.5)
sides = {"left": (True, False), "right": (False, True), "both": (True, True)}
for name, (left, right) in sides.items():
    for dtype, rtol in ((torch.float32, 1e-4), (torch.float16, 2e-3)):
        verdict = True
        for shape in ((1, 1, 1), (37, 21, 5), (65, 130, 17)):
            given = example(*shape, left, right, dtype)
            theirs = reference.galore_step(*given, 7, **options)
            for layout in (lambda x: x, lambda x: x.mT.contiguous().mT):
                laid = [x if x is None else layout(x) for x in given]
                ours = galore_step(*laid, 7, **options)
                verdict &= all(
                    matches(a, b, rtol) for a, b in zip(ours, theirs)
                )
        print(f"{name}, {str(dtype)[6:]}: {verdict}")
        assert verdict

# %%
# Then the optimizer, through three bases. PyTorch makes the bases in both, from the same gradients. A bias, which is not
# projected, takes the step of AdamW. In the middle each optimizer goes on from the state of the other.


def train(kinds):
    """12 steps; the second of ``kinds`` takes over after 7."""
    generator = torch.Generator().manual_seed(1)
    shapes = (11, 6), (6, 11), (5, 3, 2), (5,)
    params = [
        nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE))
        for shape in shapes
    ]
    choice = dict(rank=3, update_proj_gap=5, lr=0.05, eps=0.01)
    optimizer = kinds[0](params, **choice)
    for step in range(12):
        if step == 7:
            saved = optimizer.state_dict()
            optimizer = kinds[1](params)
            optimizer.load_state_dict(saved)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(DEVICE)
        optimizer.step()
    assert optimizer.state[params[0]]["bases"] == 3
    return [p.detach() for p in params]


plain = train([reference.GaLore, reference.GaLore])
for name, kinds in (
    ("kernels", [GaLore, GaLore]),
    ("kernels, then plain", [GaLore, reference.GaLore]),
    ("plain, then kernels", [reference.GaLore, GaLore]),
):
    verdict = all(matches(a, b) for a, b in zip(train(kinds), plain))
    print(f"{name}: {verdict}")
    assert verdict

# %%
# How fast
# --------
#
# The roof is the dashed one, of float32 operations.

show("galore_step", cost)

# %%
# Bug museum
# ----------
#
# The step that autograd did not see
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A kernel changes a tensor that autograd kept, and nothing counts the change. (M36)
#
# Autograd keeps tensors of the forward pass for the backward pass. Every tensor counts its changes, and the backward pass
# compares the count: PyTorch raises an error if a kept tensor has been overwritten since. A Triton kernel writes to an
# address, and nobody counts. Here the weight is halved between the two passes, and its square has the gradient 2w.


@triton.jit
def halve_kernel(W, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(W + place, mask=place < size)
    tl.store(W + place, 0.5 * w, mask=place < size)


def outcome(change):
    """Of the sum of squares, where ``change`` comes between the passes."""
    w = nn.Parameter(torch.ones(6, 4, device=DEVICE))
    loss = w.square().sum()
    with torch.no_grad():
        change(w)
    try:
        loss.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return "an error"
    return "the gradient" if bool((w.grad == 2).all()) else "a wrong gradient"


result = outcome(lambda w: halve_kernel[(1,)](w, 24, BLOCK=32))
print("a kernel alone:", result)
assert result == "a wrong gradient"

# %%
# It is the gradient of the new weight, for the loss of the old one: wrong, and silent. Users of kernels that store a
# gradient over their input have met it:
# `In-place operations in triton kernel <https://github.com/linkedin/Liger-Kernel/issues/272>`_.
#
# The fixed line is the declaration of an operator. Its ``mutates_args`` names what is written, and PyTorch counts. The
# package's step is such an operator.


@torch.library.custom_op("gpu_page::halve_", mutates_args=("w",))
def halve_(w: torch.Tensor) -> None:
    halve_kernel[(1,)](w, w.numel(), BLOCK=32)


def galore_change(w):
    given = example(6, 4, 2, True, False, torch.float32)
    galore_step_(w, *given[1:], 1)


for name, change in (("halve_", halve_), ("galore_step_", galore_change)):
    print(f"{name}: {outcome(change)}")
    assert outcome(change) == "an error"

# %%
# The check: run a step between a forward and a backward pass, and expect the error.
#
# Which sentence is false?
# ------------------------
#
# 1. For each number of the weight, GaLore at rank 128 has 512 operations in its two products.
# 2. At rank 128 the floor of GaLore's step is below that of AdamW's, on both GPUs of the figure.
# 3. Projecting after adding up the gradients of several passes gives what adding up the projected ones gives.
# 4. With the rate 0 and no decay, the epilogue leaves every bit of a float16 weight as it was.

products = 2 * (2 * M * 128 * N) / (M * N)
below = [cost.floor(GPUS[g]) < adamw.floor(GPUS[g]) for g in ("A100", "H100")]
G1, G2 = torch.randn(2, m, n, device=DEVICE)
both, each = P.mT @ (G1 + G2), P.mT @ G1 + P.mT @ G2
before = W.clone()
launch(P, d, W, W, beta=1.0, alpha=-0.0)
answers = [
    products == 512,
    all(below),
    matches(both, each),
    torch.equal(W, before),
]
print(answers)
assert answers == [True, False, True, True]
assert below == [False, True]

# %%
# The second is false: on an A100 it is the other way round. Operations decide there, and GaLore has more of them.
#
# Exercises
# ---------
#
# 1. *Hard.* The projection of a square matrix of 896 has fewer tiles of 64 by 64 than a GPU has processors. Let several programs share
#    the sum of a tile. A right answer equals torch for every number of programs, and adds their parts in a fixed order, so that
#    two runs agree bit by bit. Hint: the backward pass of RMSNorm has rows of partial sums.
#
# Summary
# -------
#
# * The floor of a step at rank 128 is set by operations, on an A100 and on an H100.
# * Plain PyTorch makes seven tensors as large as a weight of bfloat16, and moves 54 bytes for each of its numbers where 6 would do. In
#   float32 ``addmm_`` makes none. Three launches make none in either.
# * An operator that writes in place must say so, or gradients become wrong without an error.
#
# Sources
# -------
#
# * Zhao et al.: `GaLore <https://arxiv.org/abs/2403.03507>`_, 2024.
# * Williams, Waterman, Patterson: `Roofline <https://doi.org/10.1145/1498765.1498785>`_, 2009. Floors from bytes and operations.
# * The `documentation of custom operators <https://docs.pytorch.org/tutorials/advanced/python_custom_ops.html>`_ in PyTorch.

print("all checks passed")
