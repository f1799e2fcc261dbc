r"""
Flash attention, backward, in depth
===================================

The lesson on the `backward pass <12_flash_backward.ipynb>`_ has the kernel for keys and values. Here are both kernels,
with shared heads. What do they cost, what would one kernel cost instead, and which gradients go wrong?

Count first
-----------

With :math:`P` the weights, :math:`O` the result and :math:`dO` its gradient:

.. math::

   dV = P^\top dO, \qquad dP = dO\, V^\top, \qquad
   dS = P \odot (dP - \delta), \qquad dQ = dS\, K / \sqrt{D}, \qquad
   dK = dS^\top Q / \sqrt{D}

These are four products, and the scores :math:`Q K^\top` are the fifth. The forward pass has two. Take 8,192 tokens of
Qwen2-0.5B in bfloat16, with causal tiles of 64. What do the scores cost once more, and what would it cost to read kept
weights?
"""

# sphinx_gallery_needs = ["12_flash_backward"]
# sphinx_gallery_words = ["deterministic attention backward", "atomic add dQ", "gradient of grouped query attention", "nan gradient of padding"]

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

import inspect

from lm_from_scratch.attention.attention import (
    attention_weights,
    formula_attention,
)
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.instruments.roofline import GPUS, Cost, show

H, HKV, D, T, TILE = 14, 2, 64, 8192, 64
visited = sum(range(1, T // TILE + 1))  # tiles on and below the diagonal
product = 2 * H * visited * TILE * TILE * D  # operations
kept = 2 * H * visited * TILE * TILE  # bytes of the weights in those tiles
H100 = GPUS["H100"]
again, read = product / H100.matrix, kept / H100.bandwidth
print(f"scores once more: {1e6 * again:.0f} microseconds of an H100's products")
print(f"weights read: {1e6 * read:.0f} microseconds of its memory")
print(f"memory for them: {kept / 2**20:,.0f} MiB in each layer")
assert 4 < read / again < 5

# %%
# Reading takes more than four times as long as computing, and the weights would have to be written before. So the
# backward pass takes at least 5 products. The two kernels of this page do 7, because both need the scores and
# :math:`dP`.

ends = 2 * T * D
cost = Cost(
    bytes=ends * (4 * H + 4 * HKV), operations=7 * product
)  # Q, O, dO and dQ; K, V, dK and dV
print(f"{cost.intensity:.0f} operations for a byte")
print(f"at least {1e6 * cost.floor(H100, 'matrix'):.0f} microseconds")
assert cost.intensity > 10 * H100.matrix / H100.bandwidth

# %%
# The weights again
# -----------------
#
# The forward pass keeps :math:`L_t = \log \sum_s e^{s_{ts}}` of each query, and :math:`P_{ts} = e^{s_{ts} - L_t}`. There
# is no maximum to search, and no overflow: a weight is at most 1. Sizes are real on a GPU, and small in the interpreter.

SMALL = DEVICE == "cpu"
generator = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(shape, generator=generator).to(DEVICE)


def same(ours, theirs, atol=5e-5):
    return ours.shape == theirs.shape and bool(
        torch.allclose(ours, theirs, rtol=0, atol=atol)
    )


def known(T, S):
    """The last T of S tokens."""
    positions = torch.arange(S, device=DEVICE)[None]
    return Visibility(positions[:, S - T :], positions, dense=True)


# %%
# Two query heads share each key head.

T, D, BLOCK = (70, 16, 32) if SMALL else (1000, 64, 32)
GROUP, HKV = 2, 2
H = GROUP * HKV
q, k, v = normal(1, H, T, D), normal(1, HKV, T, D), normal(1, HKV, T, D)
do = normal(1, H, T, D)
vis = known(T, T)
scores = q @ k.repeat_interleave(GROUP, 1).mT * D**-0.5
lse = scores.masked_fill(~vis.mask, -torch.inf).logsumexp(-1)  # (1, H, T)
weights = attention_weights(q, k, vis)
tile = slice(32, 64), slice(0, 32)
again = torch.exp(scores - lse[..., None])[..., *tile]
print("a tile of weights:", same(again, weights[..., *tile]))
assert same(again, weights[..., *tile])

# %%
# Delta
# -----
#
# The gradient of a softmax subtracts a mean: :math:`dS_{ts} = P_{ts} (dP_{ts} - \sum_j P_{tj} \, dP_{tj})`. This mean is
# called delta, and as in the lesson it needs no keys: it is :math:`dO_t \cdot O_t`, a sum over D numbers that is known
# before the loop.

out = weights @ v.repeat_interleave(GROUP, 1)
dp = do @ v.repeat_interleave(GROUP, 1).mT
delta = (do * out).sum(-1)
print("delta is the mean:", same((weights * dp).sum(-1), delta))
assert same((weights * dp).sum(-1), delta)

# %%
# The gradient of queries
# -----------------------
#
# A program takes a tile of queries, and the keys pass by as in the forward pass. There is one accumulator, and nothing
# to rescale: the weights are the final ones. The helpers read rows, write rows, and make P and dS of a tile.


@triton.jit
def tile_of(x, start, n, D: tl.constexpr, ROWS: tl.constexpr):
    """Rows from ``start`` on of x (n, D), with 0 after the last."""
    row = start + tl.arange(0, ROWS)[:, None]
    return tl.load(x + row * D + tl.arange(0, D), mask=row < n, other=0.0)


@triton.jit
def put(tile, x, start, n, D: tl.constexpr, ROWS: tl.constexpr):
    row = start + tl.arange(0, ROWS)[:, None]
    tl.store(x + row * D + tl.arange(0, D), tile, mask=row < n)


@triton.jit
def gradient_of_scores(
    q_tile, k_tile, v_tile, do_tile, lse, delta, seen, scale
):
    """P and dS of one tile, (queries, keys)."""
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
    scores = tl.where(seen, scores, -float("inf"))
    p = tl.exp(scores - lse[:, None])
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
    return p, p * (dp - delta[:, None])


# %%
# With shared heads, head h reads key head ``h // group``.


@triton.jit
def dq_of_a_tile(
    q, k, v, do, lse, delta, dq, T, group, scale,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start, h = tl.program_id(0) * BLOCK, tl.program_id(1)
    head, shared = h * T * D, h // group * T * D
    t = start + tl.arange(0, BLOCK)
    q_tile = tile_of(q + head, start, T, D, BLOCK)
    do_tile = tile_of(do + head, start, T, D, BLOCK)
    lse_tile = tl.load(lse + h * T + t, mask=t < T, other=0.0)
    delta_tile = tl.load(delta + h * T + t, mask=t < T, other=0.0)
    total = tl.zeros((BLOCK, D), tl.float32)
    for first in range(0, start + BLOCK, BLOCK):
        k_tile = tile_of(k + shared, first, T, D, BLOCK)
        v_tile = tile_of(v + shared, first, T, D, BLOCK)
        s = first + tl.arange(0, BLOCK)
        _, ds = gradient_of_scores(
            q_tile, k_tile, v_tile, do_tile, lse_tile, delta_tile,
            s[None, :] <= t[:, None], scale,
        )  # fmt: skip
        total = tl.dot(ds, k_tile, total, input_precision="ieee")
    put(total * scale, dq + head, start, T, D, BLOCK)


# %%
# Autograd and the formula say what is right.

leaves = [x.clone().requires_grad_() for x in (q, k, v)]
y = formula_attention(*leaves, vis)
wanted = torch.autograd.grad(y, leaves, do)
dq = torch.full_like(q, torch.nan)
tiles = triton.cdiv(T, BLOCK)
dq_of_a_tile[(tiles, H)](
    q, k, v, do, lse, delta, dq, T, GROUP, D**-0.5, D=D, BLOCK=BLOCK
)
print("dQ matches torch:", same(dq, wanted[0]))
assert same(dq, wanted[0])

# %%
# The gradient of keys and values
# -------------------------------
#
# Now turn the loop round. A program takes a tile of *keys*, and the queries pass by, from the diagonal to the last. With
# shared heads it goes over all query heads of its key head. So every number of dK and dV has one program that adds it
# up, in one order.


@triton.jit
def dk_dv_of_a_tile(
    q, k, v, do, lse, delta, dk, dv, T, group, scale,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start, shared = tl.program_id(0) * BLOCK, tl.program_id(1)
    s = start + tl.arange(0, BLOCK)
    k_tile = tile_of(k + shared * T * D, start, T, D, BLOCK)
    v_tile = tile_of(v + shared * T * D, start, T, D, BLOCK)
    dk_tile = tl.zeros((BLOCK, D), tl.float32)
    dv_tile = tl.zeros((BLOCK, D), tl.float32)
    for h in range(shared * group, (shared + 1) * group):
        for first in range(start, T, BLOCK):
            t = first + tl.arange(0, BLOCK)
            q_tile = tile_of(q + h * T * D, first, T, D, BLOCK)
            do_tile = tile_of(do + h * T * D, first, T, D, BLOCK)
            lse_tile = tl.load(lse + h * T + t, mask=t < T, other=0.0)
            delta_tile = tl.load(delta + h * T + t, mask=t < T, other=0.0)
            p, ds = gradient_of_scores(
                q_tile, k_tile, v_tile, do_tile, lse_tile, delta_tile,
                s[None, :] <= t[:, None], scale,
            )  # fmt: skip
            dv_tile = tl.dot(
                tl.trans(p), do_tile, dv_tile, input_precision="ieee"
            )
            dk_tile = tl.dot(
                tl.trans(ds), q_tile, dk_tile, input_precision="ieee"
            )
    put(dk_tile * scale, dk + shared * T * D, start, T, D, BLOCK)
    put(dv_tile, dv + shared * T * D, start, T, D, BLOCK)


# %%
# It has as many programs as there are tiles of keys, for each *key* head.

dk, dv = torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
dk_dv_of_a_tile[(tiles, HKV)](
    q, k, v, do, lse, delta, dk, dv, T, GROUP, D**-0.5, D=D, BLOCK=BLOCK
)
print("dK matches torch:", same(dk, wanted[1], 2e-4))
print("dV matches torch:", same(dv, wanted[2], 2e-4))
assert same(dk, wanted[1], 2e-4) and same(dv, wanted[2], 2e-4)

# %%
# Why not one kernel
# ------------------
#
# The second kernel has :math:`dS` at hand, and :math:`dS\, K` is what dQ wants. But it is one part of dQ for each tile
# of keys, in as many programs. They would have to add to the same numbers, with atomic additions in float32. Count both
# at full size: what the additions move to and from the L2 cache, and the two products that are saved.

parts = 4 * 14 * visited * TILE * 64  # bytes: a float32 tile of dQ for each
q_bytes = 4 * 14 * 8192 * 64
print(f"added: {parts / 2**20:,.0f} MiB into {q_bytes / 2**20:.0f} MiB of dQ")
print(f"each number of dQ is added to {parts / q_bytes:.1f} times, on average")
saved = 1e6 * 2 * product / H100.matrix
print(f"two products: {saved:.0f} microseconds of an H100")
assert parts == visited * 14 * 64 * 64 * 4

# %%
# Only a GPU can say which is faster. But there is a second reason, the one of the page on
# `RMSNorm <3_rms_norm.ipynb>`_: atomic additions have no order, so two runs of one training step can differ. Without
# them the runs are equal, bit by bit, and a bug can be found by running again. The package pays with two products.
#
# The kernels of the package
# --------------------------
#
# Both have the loop of their counterparts above.

from lm_from_scratch.kernels.attention import (
    flash_attention,
    flash_dk_dv_kernel,
    flash_dq_kernel,
)

# %%
# The kernel for queries comes first.

print(inspect.getsource(flash_dq_kernel.fn))
print(inspect.getsource(flash_dk_dv_kernel.fn))

# %%
# They have more than the kernels above:
#
# * **Delta.** The first kernel computes it on its way, and writes it for the second, which is launched after it.
# * **Transposed scores.** The second computes keys by queries, so that no weights have to be transposed for the products
#   after them.
# * **The same rule.** ``sees``, the two loops, and the ranges are those of the forward pass. ``query_tiles`` gives them
#   from the side of the keys.
# * **One loop for heads and tiles.** A loop within a loop would stop fetching at the end of each head.
# * **Smaller tiles.** Two accumulators of 64 rows fill many registers. So fewer queries pass by at a time.
#
# Correct
# -------
#
# The gradients of the package against the formula.


def gradients(attend, inputs, vis, upstream):
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = attend(*leaves, vis)
    return torch.autograd.grad(y, leaves, upstream.to(y))


def judge(vis, upstream=None, dtype=torch.float32, atol=2e-4):
    T, S = vis.query_length, vis.key_length
    inputs = normal(1, 4, T, 20), normal(1, 2, S, 20), normal(1, 2, S, 20)
    inputs = [x.to(dtype) for x in inputs]
    upstream = normal(1, 4, T, 20) if upstream is None else upstream
    ours = gradients(flash_attention, inputs, vis, upstream)
    theirs = gradients(formula_attention, inputs, vis, upstream)
    return all(same(a, b, atol) for a, b in zip(ours, theirs))


# %%
# ``y.sum()`` sends a gradient whose strides are 0, and a model sends one that lies as (B, T, H, D).

rows = torch.arange(43, device=DEVICE)[None]
numbers = rows // 13
one = torch.ones((), device=DEVICE)
padded = torch.where(rows < 9, -1, rows - 9)
verdicts = {
    "causal": judge(known(70, 70)),
    "chunk after a cache": judge(known(9, 70)),
    "window": judge(
        Visibility(known(43, 43).query_positions, rows, window=20, dense=True)
    ),
    "documents": judge(Visibility(rows % 13, rows % 13, numbers, numbers)),
    "padding": judge(Visibility(padded, padded)),
    "strides of 0": judge(known(43, 43), one.expand(1, 4, 43, 20)),
    "strides of a model": judge(
        known(43, 43), normal(1, 43, 4, 20).transpose(1, 2)
    ),
    "float16": judge(known(43, 43), dtype=torch.float16, atol=2e-2),
}
for name, verdict in verdicts.items():
    print(f"{name}: {verdict}")
assert all(verdicts.values())
# %%
# A second run gives the same bits.

first = gradients(flash_attention, (q, k, v), vis, do)
second = gradients(flash_attention, (q, k, v), vis, do)
repeats = all(torch.equal(a, b) for a, b in zip(first, second))
print("the same bits in a second run:", repeats)
assert repeats

# %%
# How fast
# --------
#
# The 7 products are counted here. ``make gpu`` measures the forward pass and its gradient together, and counts the
# products that are needed.

show("flash_attention with gradient", cost)

# %%
# Bug museum
# ----------
#
# The last head wins
# ~~~~~~~~~~~~~~~~~~
#
# Programs of several query heads write one gradient of their shared key head. (M41)
#
# A program for each *query* head looks natural, and is right as long as each has its own keys. With shared heads several
# programs write the same dV, and each holds a part of it.


@triton.jit
def dv_of_a_head(
    q, k, do, lse, dv, T, group, scale, D: tl.constexpr, BLOCK: tl.constexpr
):
    start, h = tl.program_id(0) * BLOCK, tl.program_id(1)
    shared = h // group * T * D
    s = start + tl.arange(0, BLOCK)
    k_tile = tile_of(k + shared, start, T, D, BLOCK)
    dv_tile = tl.zeros((BLOCK, D), tl.float32)
    for first in range(start, T, BLOCK):
        t = first + tl.arange(0, BLOCK)
        q_tile = tile_of(q + h * T * D, first, T, D, BLOCK)
        do_tile = tile_of(do + h * T * D, first, T, D, BLOCK)
        lse_tile = tl.load(lse + h * T + t, mask=t < T, other=0.0)
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
        p = tl.exp(scores * scale - lse_tile[None, :])
        p = tl.where(s[:, None] <= t[None, :], p, 0.0)
        dv_tile = tl.dot(p, do_tile, dv_tile, input_precision="ieee")
    put(dv_tile, dv + shared, start, T, D, BLOCK)  # wrong: of one head alone


# %%
# It runs with one query head for each key head, and with two.

for group in (1, 2):
    heads = HKV * group
    queries, upstream = q[:, :heads].contiguous(), do[:, :heads].contiguous()
    lse_of = (
        (queries @ k.repeat_interleave(group, 1).mT * D**-0.5)
        .masked_fill(~vis.mask, -torch.inf)
        .logsumexp(-1)
    )
    dv = torch.zeros_like(v)
    dv_of_a_head[(tiles, heads)](
        queries, k, upstream, lse_of, dv, T, group, D**-0.5, D=D, BLOCK=BLOCK
    )
    right = gradients(formula_attention, (queries, k, v), vis, upstream)[2]
    print(
        f"query heads for a key head: {group}, right: {same(dv, right, 2e-4)}"
    )
    assert same(dv, right, 2e-4) == (group == 1)

# %%
# On a GPU it is not even the same head each time. The fixed line is the loop over
# ``range(shared * group, (shared + 1) * group)``. The check is a gradient with two query heads for each key head.
#
# A log-sum-exp of minus infinity
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The backward pass of a query that sees nothing is NaN, in every key. (M42)
#
# A query of padding sees nothing. The logarithm of its empty sum is minus infinity, and so are its scores.

nothing = torch.full((3,), -torch.inf)
lse_of_nothing = nothing.logsumexp(0)
wrong = torch.exp(nothing - lse_of_nothing)
print("weights that are not numbers:", bool(wrong.isnan().all()))
low = torch.tensor(-3.4e38)  # where the maximum began
fixed = torch.exp(nothing - low)
print("weights of 0:", bool((fixed == 0).all()))
assert wrong.isnan().all() and (fixed == 0).all()

# %%
# In dQ the NaN stays in its row, which nobody reads. In dK and dV it is a term of every sum. The fixed line is the finite start
# of m, and ``l`` of such a row set to 1, so that the log-sum-exp is that low number. The check is a row of padding alone, with gradients.
#
# Which sentence is false?
# ------------------------
#
# 1. Reading kept weights would take an H100 longer than the product that makes them again.
# 2. The backward pass needs the maximum of each row.
# 3. Delta needs no keys and no values.
# 4. The sum of the weights of a query is 1, however the tiles are cut.

maximum = scores.masked_fill(~vis.mask, -torch.inf).amax(-1, keepdim=True)
with_maximum = torch.exp(scores - maximum)
total = with_maximum.masked_fill(~vis.mask, 0).sum(-1, keepdim=True)
without = torch.exp(scores - lse[..., None])
parts = torch.exp(scores - lse[..., None]).masked_fill(~vis.mask, 0)
answers = [
    read > 4 * product / H100.matrix,
    not same(without[vis.mask.expand_as(without)],
             (with_maximum / total)[vis.mask.expand_as(without)]),
    same((do * out).sum(-1), (weights * dp).sum(-1)),
    same(sum(x.sum(-1) for x in parts.split(32, -1)), torch.ones_like(lse)),
]  # fmt: skip
print(answers)
assert answers == [True, False, True, True]

# %%
# The second is false: the log-sum-exp holds the maximum and the sum in one number.
#
# Exercises
# ---------
#
# 1. *Easy.* Count the products of both kernels for a window of 1024 at 16,384 tokens. A right answer says how many tiles
#    are visited. Hint: the page on `flash attention in depth <10a_flash_attention_in_depth.ipynb>`_ has the formula.
# 2. *Medium.* Let ``dq_of_a_tile`` go over the tiles seen as a whole first, without a mask. A right answer gives the same
#    dQ and counts the masks that are left. Hint: only the diagonal has one.
# 3. *Hard.* Write the one kernel, with ``tl.atomic_add`` into dQ. A right answer equals the two kernels within rounding,
#    in float32. Hint: dQ begins at 0.
#
# Summary
# -------
#
# * The backward pass needs 5 products, and two kernels do 7. In return nothing is added by two programs.
# * With shared heads one program goes over all query heads of its key head.
# * A query that sees nothing needs a finite log-sum-exp, or its NaN reaches every key.
#
# Sources
# -------
#
# * Dao et al.: `FlashAttention <https://arxiv.org/abs/2205.14135>`_, 2022. Recomputation, and delta.
# * Dao: `FlashAttention-2 <https://arxiv.org/abs/2307.08691>`_, 2023. One kernel with atomic additions into dQ.
# * Rabe, Staats: `Self-attention does not need quadratic memory <https://arxiv.org/abs/2112.05682>`_, 2021.
