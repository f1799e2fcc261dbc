r"""
GaLore: two products around Adam
================================

`GaLore <../7_optimizers/2_galore.ipynb>`_ describes a gradient by a few directions, so Adam's moments need little memory. Its
step has three parts: project the gradient to these directions, let Adam work there, project back.

On a GPU that is three kernels. Here are the programs of the first: each computes a *tile* of the projected gradient R, 32 by
32 numbers, from a row of tiles and a column of tiles.
"""

# sphinx_gallery_needs = ["../7_optimizers/2_galore", "5_adamw", "6_matmul"]
# sphinx_gallery_words = ["GaLore kernel", "fused GaLore", "low-rank optimizer on a GPU", "epilogue fusion"]

import inspect

from lm_from_scratch.drawings import gpu_tiles as drawings
from lm_from_scratch.instruments.roofline import GPUS, Cost

m, n, r = 128, 384, 20
drawings.tiled_product(("P transposed", "G", "R"), (r, m, n), 32, (0, 5))

# %%
# The weight :math:`W` and its gradient :math:`G` are (m, n). Here the weight is wide, so its *basis* is on the left: :math:`P`
# (m, r) holds r directions, where r is the rank. The projected gradient :math:`R = P^\top G` is (r, n), and so are both moments.
# From them Adam makes the direction d, and the weight changes by a multiple of :math:`P d`.
#
# Count first
# -----------
#
# The example is a down projection of Qwen2-0.5B, 896 by 4864, in float32. For each weight `AdamW <5_adamw.ipynb>`_ moves 7
# numbers and has about 15 operations.
#
# GaLore reads the gradient, and reads and writes the weight: 3 numbers. Then come the small tensors. P is read twice. R, d
# and both moments are written and read. There are two products, and one of an (a, b) with a (b, c) matrix has 2abc operations.
#
# **Predict first.** At rank 128 GaLore moves fewer bytes than AdamW. How many operations does it have?
#
# * a sixth as many, as its moments are that small
# * about as many
# * more than 30 times as many

M, N = 896, 4864


def galore_cost(m, n, r):
    large, small = 3 * m * n, 8 * r * n + 2 * m * r
    products, adam = 4 * m * n * r + 3 * m * n, 15 * r * n
    return Cost(bytes=4 * (large + small), operations=products + adam)


adamw = Cost(bytes=7 * 4 * M * N, operations=15 * M * N)
cost = galore_cost(M, N, 128)
moments = 2 * 4 * M * N, 4 * (2 * 128 * N + M * 128)
for name, c in (("AdamW", adamw), ("GaLore", cost)):
    print(
        f"{name:7} {c.bytes / 1e6:6.1f} MB {c.operations / 1e6:8.1f} million "
        f"operations, {c.intensity:5.2f} per byte"
    )
print(f"{'moments and basis':18} {moments[0]:,} and {moments[1]:,} bytes")

assert moments[1] < moments[0] / 6
assert cost.bytes < 0.7 * adamw.bytes
assert cost.operations > 30 * adamw.operations

# %%
# GaLore keeps less than a sixth of the memory, and moves fewer bytes. But its two products have 512 operations for each weight.
#
# The next figure has two times for each rank: the bytes divided by the bandwidth, the operations by the rate of float32. The
# larger one is the *floor*, the least time that a step can take.

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

ranks = [2**i for i in range(2, 10)]
drawn, axes = figure(4.8, 6.6, rows=2)
for ax, name in zip(axes, ("A100", "H100")):
    gpu = GPUS[name]
    costs = [galore_cost(M, N, k) for k in ranks]
    memory = [1e6 * c.bytes / gpu.bandwidth for c in costs]
    compute = [1e6 * c.operations / gpu.scalar for c in costs]
    limit = 1e6 * adamw.floor(gpu)
    ax.plot(ranks, memory, "o-", label="GaLore, memory")
    ax.plot(ranks, compute, "s--", label="GaLore, operations")
    ax.axhline(limit, color=COLOURS[3], linestyle=":", label="AdamW")
    ax.set(xscale="log", yscale="log", ylim=(1, 700), xlabel="rank")
    ax.set(ylabel="microseconds")
    ax.set_title(f"floors on {name}")
axes[0].legend(frameon=False, fontsize=8, loc="upper left")
plt.show()

assert 2 * (2 * M * 128 * N) / (M * N) == 512
for gpu in (GPUS["A100"], GPUS["H100"]):
    assert cost.operations / gpu.scalar > cost.bytes / gpu.bandwidth
assert cost.floor(GPUS["A100"]) > 1.5 * adamw.floor(GPUS["A100"])
assert cost.floor(GPUS["H100"]) < adamw.floor(GPUS["H100"])

# %%
# At rank 128 the operations decide on both GPUs. The floor of GaLore is a little lower than AdamW's on an H100, and almost
# twice as high on an A100. So what GaLore gives you is memory, not time.
#
# A gradient to project
# ---------------------
#
# To have a real gradient, the shipped Qwen2 reads a page of Python's documentation. We take the down projection of its first
# block. Without a GPU the kernels are interpreted.

import os

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.optim.galore import galore_step
from lm_from_scratch.text.corpora import load_corpus

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
model, tokenizer = load_shipped("qwen2-docs")
text = load_corpus("reference")[0].text[:1000]
ids = torch.tensor([tokenizer.start(text)], device=DEVICE)
weight = model.to(DEVICE).model.layers[0].mlp.down_proj.weight
log_p = model(ids)[0, :-1].log_softmax(-1)
loss = -log_p.gather(1, ids[0, 1:, None]).sum()
(gradient,) = torch.autograd.grad(loss, weight)

G = gradient.half()  # (m, n)
P = torch.linalg.svd(G.float()).U[:, :r].contiguous()  # (m, r)

assert weight.shape == (m, n) and P.shape == (m, r)

# %%
# The basis holds the r = 20 directions in which this gradient is largest.
#
# Launch 1: a transpose is two strides
# ------------------------------------
#
# As in the `matrix product <6_matmul.ipynb>`_, a program walks along the inner dimension and multiplies tiles. Here the first
# factor is :math:`P^\top`, (r, m). Its row i and column k hold what :math:`P` has in row k and column i, at the offset
# ``k * r + i``. Nothing is transposed: the tile is only read in that order.
#
# The gradient has half precision, and the basis is float32. The tile of G is widened after the load, in registers.


@triton.jit
def project_tile(G, P, R, m, n, r, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]  # rows of R
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, m, BLOCK):
        k = start + tl.arange(0, BLOCK)
        across, down = k[None, :], k[:, None]
        p = tl.load(P + across * r + i, mask=(i < r) & (across < m), other=0.0)
        g = tl.load(G + down * n + j, mask=(down < m) & (j < n), other=0.0)
        total = tl.dot(p, g.to(tl.float32), total, input_precision="ieee")
    tl.store(R + i * n + j, total, mask=(i < r) & (j < n))


# %%
# ``input_precision="ieee"`` means full float32, as in the count above. Without it, Triton uses the matrix units, which
# `round the factors <6a_matmul_in_depth.ipynb>`_.
#
# Of the 32 rows the mask lets 20 through. The rest is read as 0, which adds nothing.

BLOCK = 32


def project(G, P):
    R = torch.empty(r, n, device=DEVICE)
    grid = triton.cdiv(r, BLOCK), triton.cdiv(n, BLOCK)
    project_tile[grid](G, P, R, m, n, r, BLOCK=BLOCK)
    return R


def matches(ours, theirs, rtol=1e-4):
    atol = rtol * theirs.float().abs().max().item()
    return torch.allclose(ours.float(), theirs.float(), rtol, atol)


R = project(G, P)
print("matches torch:", matches(R, P.mT @ G.float()))
kept = (R.square().sum() / G.float().square().sum()).item()
print(f"{kept:.0%} of the sum of squares is kept")
assert matches(R, P.mT @ G.float())
assert round(100 * r / m) == 16 and 0.75 < kept < 0.85

# %%
# 16 % of the directions keep more than four fifths of the energy, the sum of squares, of the gradient that they were made from.
# GaLore relies on that.
#
# Launch 2: Adam, where the numbers are few
# -----------------------------------------
#
# The kernel of the package is that of AdamW without the weight. Instead, it stores the direction d.

from lm_from_scratch.kernels.galore import adam_direction_kernel

# %%
# A program has a block of the (r, n) numbers.

print(inspect.getsource(adam_direction_kernel.fn))

# %%
# Python computes :math:`1 - \beta` and what depends on the step, such as :math:`1 - \beta^t`, and hands them over as floats.
# The page on AdamW says why.

step, beta1, beta2, eps = 10, 0.9, 0.999, 1e-8


def adam(R, exp_avg, exp_avg_sq):
    d, size = torch.empty_like(R), R.numel()
    adam_direction_kernel[(triton.cdiv(size, 1024),)](
        R, exp_avg, exp_avg_sq, d, size,
        beta1, 1 - beta1, beta2, 1 - beta2, 1 - beta1**step, 1 - beta2**step,
        eps, BLOCK=1024,
    )  # fmt: skip
    return d


# %%
# Launch 3: the weight waits at the end of the product
# ----------------------------------------------------
#
# A program that has finished its tile of :math:`P d` holds it in registers. It does not store it. It loads the same tile of
# the weight, shrinks it by the weight decay, subtracts, and stores the new weight. Such work at the end of a product, in the
# same kernel, is its *epilogue*.

drawings.tiled_product(("P", "d", "W"), (m, r, n), 32, (1, 5))

# %%
# The update is in place. That is safe, because every number of the weight belongs to one program, and to no other.


@triton.jit
def update_tile(W, P, d, m, n, r, kept, rate, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]  # rows of W
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, r, BLOCK):
        k = start + tl.arange(0, BLOCK)
        across, down = k[None, :], k[:, None]
        p = tl.load(P + i * r + across, mask=(i < m) & (across < r), other=0.0)
        b = tl.load(d + down * n + j, mask=(down < r) & (j < n), other=0.0)
        total = tl.dot(p, b, total, input_precision="ieee")
    inside = (i < m) & (j < n)
    w = tl.load(W + i * n + j, mask=inside).to(tl.float32)
    tl.store(W + i * n + j, kept * w - rate * total, mask=inside)


# %%
# The sum is float32, and the new weight is rounded once.

lr, decay, scale = 0.01, 0.1, 0.25


def update_(W, P, d):
    grid = triton.cdiv(m, BLOCK), triton.cdiv(n, BLOCK)
    kept, rate = 1 - lr * decay, lr * scale
    update_tile[grid](W, P, d, m, n, r, kept, rate, BLOCK=BLOCK)


# %%
# Large tensors made on the way
# -----------------------------
#
# A *mode*, as on the page on AdamW, sees each operation of PyTorch. This one counts the new tensors that are as large as the
# weight.


class Large(TorchDispatchMode):
    made = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        new = all(result is not x for x in args) and not operation.is_view
        self.made += new and result.numel() == m * n
        return result


# %%
# **Predict first.** The weight has half precision. Our three launches should make no tensor of its size. How many does plain
# PyTorch make?
#
# * 1: the product :math:`P d`
# * 2: the product, and the new weight
# * 7

guarded = torch.constant_pad_nd(weight.half(), (0, 0, 1, 1), torch.nan)
W = guarded.detach()[1:-1]  # between two rows of NaN
torch.manual_seed(0)
moments = 0.1 * torch.randn_like(R), 0.5 + torch.rand_like(R)
with Large() as plain:
    options = step, lr, (beta1, beta2), eps, decay, scale
    expected = galore_step(W, G, P, None, *moments, *options)
with Large() as ours:
    update_(W, P, adam(project(G, P), *moments))

same = matches(W, expected[0], rtol=2e-3)
same &= all(map(matches, moments, expected[1:]))
print(f"PyTorch {plain.made}, three launches {ours.made}, alike: {same}")
assert (plain.made, ours.made) == (7, 0) and same
assert guarded[0].isnan().all() and guarded[-1].isnan().all()

# %%
# Copies of gradient and weight in float32 are two of the seven, and :math:`P d` is another. In the kernels all of them
# exist as tiles, in registers. The rows of NaN around the weight are still there, so nothing was written outside it.
#
# `GaLore's step in depth <8a_galore_in_depth.ipynb>`_ lists the seven, and says what autograd must know of a kernel that
# overwrites a weight.
#
# Exercises
# ---------
#
# 1. *Easy.* Count the step for bfloat16 weights and gradients. A right answer changes one line of ``galore_cost``, and
#    shows that on an H100 operations decide from a smaller rank on than before. Hint: bases and moments stay float32.
# 2. *Easy.* Remove ``other=0.0`` and the mask of one tile in ``project_tile``, with the tensors inside a buffer of NaN. A right
#    answer shows NaN in R, and says why zeros in the other tile do not help. Hint: what is 0 times NaN?
# 3. *Medium.* Give ``update_tile`` a basis on the right, Q (n, r). A right answer equals the reference, and makes no copy of Q
#    to transpose it. Hint: :math:`d` is (m, r) now.
#
# Summary
# -------
#
# * At rank 128 GaLore keeps less than a sixth of what AdamW's moments take, moves fewer bytes, and has more than 30 times the
#   operations. In full float32 these decide how fast it can be.
# * Plain PyTorch makes seven tensors as large as the weight, and three launches make none: a kernel transposes by its offsets, and
#   widens in registers.
# * An epilogue finishes the work where the numbers are: in the registers of the program that has the tile.
#
# The step now needs little memory besides weight and gradient. An even larger tensor of training is the logits. The next page
# does without them.
