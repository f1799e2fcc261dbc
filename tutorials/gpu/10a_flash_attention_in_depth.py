r"""
Flash attention in depth
========================

The lesson on `flash attention <10_flash_attention.ipynb>`_ keeps a tile of queries in a program while the keys pass by.
What does one kernel need to be *the* attention of a model: with a cache before it, with windows, packed documents and
padding, and with gradients? This page adds one thing after another, reads the kernel of the package, and compares it
with the formula.

Count first
-----------

The shape is that of Qwen2-0.5B: 14 query heads share 2 key heads of 64 features. There are 8,192 tokens, in bfloat16.
Three operations write the scores, read them, write the weights and read those, while flash attention reads its inputs
and writes its result.
"""

# sphinx_gallery_needs = ["10_flash_attention"]
# sphinx_gallery_words = ["bottom right causal mask", "sliding window attention kernel", "varlen attention", "cu_seqlens", "is_causal wrong with kv cache"]

import inspect
import math
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import matplotlib.pyplot as plt
import torch.nn.functional as F
import triton
import triton.language as tl

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.instruments.plot import COLOURS, LIGHT_GREY, figure
from lm_from_scratch.instruments.roofline import GPUS, Cost, show

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# %%
# The operations are the same in both: two products of 2 T S D each. Causality hides half of the pairs. A program that
# works in tiles of 64 queries and 64 keys can leave out whole tiles only. So count tiles.

H, HKV, D, T, TILE = 14, 2, 64, 8192, 64
ends = 2 * (2 * H + 2 * HKV) * T * D  # queries, result, keys, values
scores = 2 * H * T * T
tiles = T // TILE
visited = sum(range(1, tiles + 1))  # the tiles on and below the diagonal
diagonal = tiles
print(f"tiles: {tiles * tiles:,}, visited: {visited:,}")
print(f"share visited: {visited / tiles**2:.3f}")
print(f"visited tiles that hide something: {diagonal / visited:.3f}")

# %%
# With the operations and the bytes we know what each way waits for.

cost = Cost(bytes=ends, operations=4 * H * D * visited * TILE * TILE)
H100 = GPUS["H100"]
apart = Cost(bytes=ends + 4 * scores, operations=4 * H * D * T * T)
for name, each in (("three operations", apart), ("flash", cost)):
    floor = 1e6 * each.floor(H100, "matrix")
    print(
        f"{name:16} {each.intensity:6.0f} operations per byte, "
        f"at least {floor:5.0f} microseconds on an H100"
    )
ridge = H100.matrix / H100.bandwidth
assert apart.intensity < ridge < cost.intensity

# %%
# An H100 can do some 300 operations while a byte arrives. Three operations need fewer, so they wait for memory. Flash
# attention needs thousands: it waits for the matrix units, and half of their work is skipped.
#
# One thing is not counted. Every tile of queries reads the keys of its head again. All keys and values together are
# 4 MiB, which stay in the L2 cache.

assert 2 * 2 * HKV * T * D == 4 * 2**20

# %%
# Queries that see all keys
# -------------------------
#
# These are the two helpers of the lesson. ``tile_of`` reads some rows of a matrix, with 0 after the last one.
# ``pass_by`` is the online softmax of one tile of keys.


@triton.jit
def tile_of(x, start, n, D: tl.constexpr, ROWS: tl.constexpr):
    """Rows from ``start`` on of x (n, D), with 0 after the last."""
    row = start + tl.arange(0, ROWS)[:, None]
    return tl.load(x + row * D + tl.arange(0, D), mask=row < n, other=0.0)


@triton.jit
def pass_by(q_tile, k_tile, v_tile, seen, m, l, a, scale):
    """One tile of keys: the online softmax."""
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
    scores = tl.where(seen, scores, -float("inf"))  # (queries, keys)
    new_m = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp(scores - new_m[:, None])
    fade = tl.exp(m - new_m)
    l = fade * l + tl.sum(p, 1)
    a = fade[:, None] * a
    a = tl.dot(p.to(v_tile.dtype), v_tile, a, input_precision="ieee")
    return new_m, l, a


# %%
# Without causality the last tile may still be partly empty. Places after the last key get the score minus infinity.
# That is the whole mask, ``s < S``.


@triton.jit
def attend_to_all(
    q, k, v, out, T, S, scale, D: tl.constexpr, BLOCK: tl.constexpr
):
    start, h = tl.program_id(0) * BLOCK, tl.program_id(1)
    q_tile = tile_of(q + h * T * D, start, T, D, BLOCK)
    m = tl.full((BLOCK,), -3.4e38, tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    a = tl.zeros((BLOCK, D), tl.float32)
    for first in range(0, S, BLOCK):
        k_tile = tile_of(k + h * S * D, first, S, D, BLOCK)
        v_tile = tile_of(v + h * S * D, first, S, D, BLOCK)
        s = first + tl.arange(0, BLOCK)
        m, l, a = pass_by(
            q_tile, k_tile, v_tile, (s < S)[None, :], m, l, a, scale
        )
    row = start + tl.arange(0, BLOCK)[:, None]
    at = out + (h * T + row) * D + tl.arange(0, D)
    tl.store(at, a / l[:, None], mask=row < T)


# %%
# The sizes are real on a GPU, and small in the interpreter. Here T is no multiple of a tile.

SMALL = DEVICE == "cpu"
generator = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(shape, generator=generator).to(DEVICE)


def same(ours, theirs, atol=2e-5):
    return ours.shape == theirs.shape and bool(
        torch.allclose(ours, theirs, rtol=0, atol=atol)
    )


T, D, BLOCK = (100, 16, 32) if SMALL else (1000, 64, 32)
q, k, v = normal(1, 4, T, D), normal(1, 4, T, D), normal(1, 4, T, D)
out = torch.full_like(q, torch.nan)
grid = (triton.cdiv(T, BLOCK), 4)
attend_to_all[grid](q, k, v, out, T, T, D**-0.5, D=D, BLOCK=BLOCK)
expected = F.scaled_dot_product_attention(q, k, v)
print("matches torch:", same(out, expected))
assert same(out, expected)

# %%
# No tensor has T times S numbers. The sum of weights comes out of the same loop as the mean, and one division at the
# end makes it a mean.
#
# ``exp(-inf - m)`` must be 0, so m starts far below every score, at a finite number. The page on
# `softmax <2_softmax.ipynb>`_ shows what happens otherwise.
#
# Causality after a cache
# -----------------------
#
# After a cache there are T queries and more keys, S. Query t is at position S - T + t: the queries are the last of the
# keys. A key is seen if its position is not later. That is one line of the mask and one bound of the loop: the tiles
# after the last query of the program are not visited.
#
# The next kernel has this and three more things. Each is a line or two, and they are turned on one after the other.


@triton.jit
def attend(
    q, k, v, out, documents, T, S, group, window, scale,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start, h = tl.program_id(0) * BLOCK, tl.program_id(1)
    shared = h // group  # the key head of this query head
    t = S - T + start + tl.arange(0, BLOCK)  # positions of the queries
    q_tile = tile_of(q + h * T * D, start, T, D, BLOCK)
    m = tl.full((BLOCK,), -3.4e38, tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    a = tl.zeros((BLOCK, D), tl.float32)
    oldest = tl.maximum(S - T + start - window + 1, 0)
    end = tl.minimum(S - T + start + BLOCK, S)
    for first in range(oldest // BLOCK * BLOCK, end, BLOCK):
        k_tile = tile_of(k + shared * S * D, first, S, D, BLOCK)
        v_tile = tile_of(v + shared * S * D, first, S, D, BLOCK)
        s = first + tl.arange(0, BLOCK)
        seen = s[None, :] <= t[:, None]
        seen = seen & (s[None, :] > t[:, None] - window)
        if documents is not None:
            of_t = tl.load(documents + t, mask=t < S, other=-1)
            of_s = tl.load(documents + s, mask=s < S, other=-1)
            seen = seen & (of_t[:, None] == of_s[None, :])
        m, l, a = pass_by(q_tile, k_tile, v_tile, seen, m, l, a, scale)
    row = start + tl.arange(0, BLOCK)[:, None]
    at = out + (h * T + row) * D + tl.arange(0, D)
    tl.store(at, a / l[:, None], mask=row < T)


# %%
# ``documents`` is ``None`` where there are none: then the compiled kernel has no instruction for them. A window as long
# as the text hides nothing.


def run(q, k, v, window=None, documents=None):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    H, T, D = q.shape[1:]
    out = torch.full_like(q, torch.nan)
    S, group = k.shape[2], H // k.shape[1]
    attend[(triton.cdiv(T, BLOCK), H)](
        q, k, v, out, documents, T, S, group, window or S, D**-0.5,
        D=D, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def known(T, S, window=None):
    """The last T of S tokens."""
    positions = torch.arange(S, device=DEVICE)[None]
    return Visibility(
        positions[:, S - T :], positions, window=window, dense=True
    )


# %%
# The reference is the package's formula. A chunk of 7 queries, as after a cache, must give what the same queries gave
# in the whole.

causal = run(q, k, v)
print("matches torch:", same(causal, formula_attention(q, k, v, known(T, T))))
chunk = run(q[:, :, -7:], k, v)
print("the last 7 queries match:", same(chunk, causal[:, :, -7:]))
assert same(causal, formula_attention(q, k, v, known(T, T)))
assert same(chunk, causal[:, :, -7:])

# %%
# What is not visited is not read. To see it, let the values after the first tile be NaN. The product of NaN and a
# weight of 0 is NaN, so a mask alone would not help.

later = v.clone()
later[:, :, BLOCK:] = torch.nan
first_tile = run(q, k, later)[:, :, :BLOCK]
print(
    "the first tile of queries matches:", same(first_tile, causal[:, :, :BLOCK])
)
assert same(first_tile, causal[:, :, :BLOCK])

# %%
# Shared heads
# ------------
#
# With grouped queries, head h reads key head ``h // group``. The reference repeats the keys for it. A kernel only has
# to compute the address. Here two query heads share one.

grouped = run(q, k[:, :2], v[:, :2])
expected = formula_attention(q, k[:, :2], v[:, :2], known(T, T))
print("shared heads match:", same(grouped, expected))
assert same(grouped, expected)

# %%
# A window
# --------
#
# A window hides what is too old: one more line of the mask, and the other bound of the loop.

windowed = run(q, k, v, window=40)
expected = formula_attention(q, k, v, known(T, T, window=40))
print("window matches:", same(windowed, expected))
assert same(windowed, expected)


# %%
# The number of visited tiles now grows with T, and no longer with its square.


def tiles_visited(T, window, tile=64):
    return sum(
        i - max(0, i * tile - window + 1) // tile + 1 for i in range(T // tile)
    )


for length in (8192, 16384):
    print(
        f"{length} tokens: {tiles_visited(length, length):,} tiles, "
        f"{tiles_visited(length, 1024):,} in a window of 1024"
    )
assert tiles_visited(8192, 8192) == visited

# %%
# Documents
# ---------
#
# Several documents can be packed into one row. Each token carries the number of its document, and sees only its own.

documents = torch.arange(T, device=DEVICE) // 37
positions = torch.arange(T, device=DEVICE) % 37
packed = Visibility(
    positions[None], positions[None], documents[None], documents[None]
)
ours = run(q, k, v, documents=documents)
print("documents match:", same(ours, formula_attention(q, k, v, packed)))
assert same(ours, formula_attention(q, k, v, packed))

# %%
# Which tiles hide something
# --------------------------
#
# Here are 512 tokens in tiles of 64, for three rules. A tile is hidden as a whole, or in part, or not at all. The
# kernel above leaves out what causality and the window hide. It visits the tiles of other documents, only to hide all
# that is in them.

places = torch.arange(512)[None]
numbers = torch.tensor([0] * 200 + [1] * 120 + [2] * 192)[None]
rules = {
    "causal": Visibility(places, places),
    "window of 130": Visibility(places, places, window=130),
    "three documents": Visibility(places, places, numbers, numbers),
}
counted, states = {}, {}
for name, rule in rules.items():
    mask = rule.mask[0, 0].view(8, 64, 8, 64).float().mean(dim=(1, 3))
    states[name] = (mask > 0).int() + (mask == 1).int()  # 0, 1 or 2
    counted[name] = [(states[name] == i).sum().item() for i in range(3)]

_, axes = figure(4.2, 9.6, rows=3)
for ax, (name, state) in zip(axes, states.items()):
    colours = LIGHT_GREY, COLOURS[1], COLOURS[0]
    cmap = plt.matplotlib.colors.ListedColormap(colours)
    ax.imshow(state.numpy(), cmap=cmap, vmin=0, vmax=2)
    for i, j in (state == 1).nonzero().tolist():
        ax.text(j, i, "/", ha="center", va="center")
    ax.grid(False)
    ax.set(title=name, xlabel="tile of keys", ylabel="tile of queries")
plt.show()
for name, (hidden, part, whole) in counted.items():
    print(f"{name:16} hidden {hidden}, in part {part}, seen as a whole {whole}")
assert counted["causal"] == [28, 8, 28]

# %%
# Grey tiles are hidden, tiles with a stroke are seen in part, and the others are seen as a whole.
#
# The kernel of the package
# -------------------------
#
# The package has one forward kernel for all of it. ``rule`` holds the tensors of a visibility, or nothing where the
# positions are known without looking, and ``sees`` is the mask. ``key_tiles`` gives the bounds of the loop.

from lm_from_scratch.kernels.attention import (
    flash_attention,
    flash_forward_kernel,
    key_tiles,
    sees,
)

# %%
# Read the loop first: it is that of ``attend``.

print(inspect.getsource(sees.fn))
print(inspect.getsource(key_tiles.fn))
print(inspect.getsource(flash_forward_kernel.fn))

# %%
# It has more than ``attend``:
#
# * **Two loops.** ``MASKED`` is 0 and then 1, and the compiler writes the body twice. The first loop goes over the
#   tiles seen as a whole, and has no mask. The second takes the rest, on both sides of them.
# * **Ranges.** Where positions are arithmetic, so are the bounds. Otherwise they come from a small table, made from the
#   smallest and the largest position of each tile. Padding and other documents are skipped by it.
# * **Powers of 2.** The hardware computes :math:`2^x`. The scores are multiplied by :math:`\log_2 e` together with the
#   scale.
# * **The log-sum-exp.** One number for each query, for the backward pass.
# * **The longest first.** The last queries see most keys. Programs that start first take them, so that no long one is
#   left over at the end.
# * Strides, rows of a batch, any D up to 256, and queries that see nothing. Their sum is 0, and so is their result.
#
# Correct
# -------
#
# The package's function against the formula, with gradients.


def judge(vis, H=4, HKV=2, D=20, B=1, dtype=torch.float32, atol=2e-5):
    T, S = vis.query_length, vis.key_length
    inputs = normal(B, H, T, D), normal(B, HKV, S, D), normal(B, HKV, S, D)
    upstream = normal(B, H, T, D).to(dtype)
    results = []
    for attention in (flash_attention, formula_attention):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        y = attention(*leaves, vis)
        grads = torch.autograd.grad(y, leaves, upstream)
        results.append([y.detach(), *grads])
    return all(same(a, b, atol) for a, b in zip(*results))


# %%
# The cases are those in which kernels go wrong: odd sizes, a chunk after a cache, padding, documents, a mask besides,
# float16.

padding = torch.ones(2, 43, dtype=torch.long)
padding[0, :11] = 0
left = positions_from_mask(padding).to(DEVICE)
besides = torch.rand(1, 1, 43, 43, generator=generator) < 0.5
rows = torch.arange(43, device=DEVICE)[None]
verdicts = {
    "causal": judge(known(70, 70)),
    "one query": judge(known(1, 70)),
    "chunk, window": judge(known(9, 70, window=33)),
    "left padding": judge(Visibility(left, left), B=2),
    "documents": judge(
        Visibility(rows % 13, rows % 13, rows // 13, rows // 13)
    ),
    "a mask besides": judge(Visibility(rows, rows, allowed=besides.to(DEVICE))),
    "float16": judge(known(70, 70), dtype=torch.float16, atol=1e-2),
}
for name, verdict in verdicts.items():
    print(f"{name}: {verdict}")
assert all(verdicts.values())

# %%
# What remains for the `backward pass <12_flash_backward.ipynb>`_ is the log-sum-exp: 4 bytes for each query of each head.

q, k, v = normal(1, 4, 40, 16), normal(1, 2, 40, 16), normal(1, 2, 40, 16)
y = flash_attention(q.requires_grad_(), k, v, known(40, 40))
saved = [x.shape for x in y.grad_fn.saved_tensors if x is not None]
print("largest saved tensor:", max(math.prod(shape) for shape in saved))
print("weights would have:", 4 * 40 * 40)
kept = 4 * H * 8192
print(
    f"at full size: {kept / 2**20:.2f} MiB, the weights {scores / 2**20:,.0f}"
)
assert max(math.prod(shape) for shape in saved) == q.numel() < 4 * 40 * 40

# %%
# How fast
# --------
#
# Torch's fused attention for a GPU works the same way, so it has the same floor. The first bound is the matrix units
# here, not memory. The exponentials are not counted: other units compute them.

show("flash_attention", cost)

# %%
# Bug museum
# ----------
#
# The wrong corner
# ~~~~~~~~~~~~~~~~
#
# A causal kernel without the offset of earlier keys. (M38)
#
# After a cache, 7 queries meet many keys. A triangle that begins at the upper left corner gives query 0 only key 0.
# Here is the kernel with the position t instead of S - T + t. It is the triangle that ``is_causal=True`` means in
# torch, and users met it with caches: `the wrong alignment <https://github.com/pytorch/pytorch/issues/108108>`_.


@triton.jit
def attend_from_the_corner(
    q, k, v, out, T, S, scale, D: tl.constexpr, BLOCK: tl.constexpr
):
    start, h = tl.program_id(0) * BLOCK, tl.program_id(1)
    t = start + tl.arange(0, BLOCK)  # wrong: S - T is missing
    q_tile = tile_of(q + h * T * D, start, T, D, BLOCK)
    m = tl.full((BLOCK,), -3.4e38, tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    a = tl.zeros((BLOCK, D), tl.float32)
    for first in range(0, start + BLOCK, BLOCK):
        k_tile = tile_of(k + h * S * D, first, S, D, BLOCK)
        v_tile = tile_of(v + h * S * D, first, S, D, BLOCK)
        s = first + tl.arange(0, BLOCK)
        seen = s[None, :] <= t[:, None]
        m, l, a = pass_by(q_tile, k_tile, v_tile, seen, m, l, a, scale)
    row = start + tl.arange(0, BLOCK)[:, None]
    at = out + (h * T + row) * D + tl.arange(0, D)
    tl.store(at, a / l[:, None], mask=row < T)


# %%
# It runs with 40 queries for 40 keys, and with the last 7 of them.

q, k, v = normal(1, 2, 40, 16), normal(1, 2, 40, 16), normal(1, 2, 40, 16)
for queries in (40, 7):
    chunk, out = (
        q[:, :, -queries:].contiguous(),
        torch.zeros_like(q[:, :, -queries:]),
    )
    attend_from_the_corner[(triton.cdiv(queries, BLOCK), 2)](
        chunk, k, v, out, queries, 40, 16**-0.5, D=16, BLOCK=BLOCK
    )
    corner = F.scaled_dot_product_attention(chunk, k, v, is_causal=True)
    right = formula_attention(chunk, k, v, known(queries, 40))
    verdicts = same(out, right), same(out, corner)
    print(f"{queries} queries: right {verdicts[0]}, torch's {verdicts[1]}")
    assert verdicts == (queries == 40, True)
    assert same(run(chunk, k, v), right)

# %%
# With as many queries as keys the two corners are the same, so training and a first prompt are right. The check is one
# more test: a chunk gives what the same queries gave in the whole.
#
# A low number instead of minus infinity
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A query that sees nothing gets a mean of what it must not see. (M39)
#
# Hidden scores are often set to a low number such as -1e9. For a query that sees something this is as good. A query of
# padding sees nothing: all its scores are the same low number, and the softmax of equal numbers is a mean.

low = torch.full((1, 1, 40, 40), -1e9, device=DEVICE)
mean = F.scaled_dot_product_attention(q, k, v, attn_mask=low)
nothing = Visibility(
    torch.full((1, 40), -1, device=DEVICE),
    torch.arange(40, device=DEVICE)[None],
)
print(
    "a mean of hidden values:",
    same(mean, v.mean(2, keepdim=True).expand_as(q), 1e-4),
)
print(
    "the package gives 0:", bool((flash_attention(q, k, v, nothing) == 0).all())
)
assert same(mean, v.mean(2, keepdim=True).expand_as(q), 1e-4)
assert (flash_attention(q, k, v, nothing) == 0).all()

# %%
# The fixed line is ``tl.where(seen, scores, -float("inf"))`` with an m that starts above minus infinity. The check is a
# row of padding alone.
#
# Which sentence is false?
# ------------------------
#
# 1. Flash attention without causality does fewer products than the formula does.
# 2. At 8192 tokens and tiles of 64, fewer than two in a hundred of the visited tiles need a mask.
# 3. In a window, twice as many tokens take little more than twice as many tiles.
# 4. The size of the tiles changes the result by no more than rounding.
#
# The first sentence is about the multiplications of both products, over all pairs of tiles.


def products(T, S, D, tile):
    """Multiplications of both products, over all pairs of tiles."""
    pairs = triton.cdiv(T, tile) * triton.cdiv(S, tile)
    return 2 * pairs * tile * tile * D


out = torch.empty_like(q)
attend_to_all[(triton.cdiv(40, 16), 2)](
    q, k, v, out, 40, 40, 0.25, D=16, BLOCK=16
)
answers = [
    products(8192, 8192, 64, 64) < 2 * 8192 * 8192 * 64,
    diagonal / visited < 0.02,
    2 < tiles_visited(16384, 1024) / tiles_visited(8192, 1024) < 2.1,
    same(out, F.scaled_dot_product_attention(q, k, v)),
]
print(answers)
assert answers == [False, True, True, True]

# %%
# The first is false: it does the same products, and only moves fewer bytes.
#
# Exercises
# ---------
#
# 1. *Easy.* Count the visited tiles of three documents of 200, 120 and 192 tokens for tiles of 16, 64 and 128. A right answer shows
#    which share of the scores in them is hidden. Hint: the figure has the code.
# 2. *Hard.* Let ``attend`` skip the tiles of other documents. A right answer stays right when the keys of another document are NaN, as long as they fill whole tiles.
#    Hint: documents are in order, so the first key of the first query's document is enough.
#
# Summary
# -------
#
# * Without scores in memory attention needs thousands of operations per byte, and waits for the matrix units.
# * Causality, windows and documents are lines of a mask and bounds of a loop. Shared heads are an address.
# * Positions count from the last key, or a chunk after a cache sees the wrong keys.
#
# All of this needs many queries. While a model writes there is only one, and the page on
# `decoding <11_decoding.ipynb>`_ cuts the keys instead.
#
# Sources
# -------
#
# * Dao et al.: `FlashAttention <https://arxiv.org/abs/2205.14135>`_, 2022.
# * Dao: `FlashAttention-2 <https://arxiv.org/abs/2307.08691>`_, 2023. A program takes queries, and the keys pass by.
# * Milakov, Gimelshein: `Online normalizer calculation for softmax <https://arxiv.org/abs/1805.02867>`_, 2018.
# * The `fused attention <https://triton-lang.org/main/getting-started/tutorials/06-fused-attention.html>`_ of the Triton tutorials.
