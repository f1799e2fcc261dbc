r"""
Attention in depth
==================

The lesson on `attention <1_attention.ipynb>`_ reads keys in tiles and computes a softmax without storing its table. Is
the result exactly that of the formula, and are the gradients too? What does it cost in operations and memory? This page
counts it. Then it looks at what goes wrong without an error message: the scale, the axis, and hidden scores.

The formula, counted
--------------------

.. math::

   s_{tj} &= \frac{q_t \cdot k_j}{\sqrt{D}} \\
   P_{tj} &= \frac{e^{s_{tj}}}{\sum_i e^{s_{ti}}} \\
   y_t &= \sum_j P_{tj} \, v_j

Axes are B rows, H query heads, Hkv key and value heads, T queries, S keys, and D features of a head. A ``Visibility``
says which keys a query may see (the lesson on `masks <2_masks.ipynb>`_ explains it). Here it is causal: the last of S
tokens are the queries, and ``dense`` says that nothing but the future is hidden.
"""

import inspect
import math
import weakref

import matplotlib.pyplot as plt
import torch
from torch.utils.flop_counter import FlopCounterMode

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.kinds import ATTENTION_KINDS
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.instruments.plot import COLOURS, curves, figure

print(inspect.getsource(formula_attention))


def causal(T, S):
    queries = torch.arange(S - T, S)[None]
    return Visibility(queries, torch.arange(S)[None], dense=True)


def draw(B, H, Hkv, T, S, D, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, D)
    options = dict(generator=generator, dtype=dtype)
    return [torch.randn(shape, **options) for shape in shapes]


print(causal(3, 5).mask[0, 0].int())

# %%
# For every pair of a query and a key, each of the two products multiplies and adds D numbers. A multiplication and its
# addition count as two operations, so the formula takes 4 B H T S D operations. In a causal square nearly half of the
# scores are hidden; the formula computes them anyway.

B, H, T, D = 1, 4, 1024, 32
q, k, v = draw(B, H, H, T, T, D)
with FlopCounterMode(display=False) as counter:
    formula_attention(q, k, v, causal(T, T))
print(f"{counter.get_total_flops():,} operations")
assert counter.get_total_flops() == 4 * B * H * T * T * D

# %%
# Parts of a row
# --------------
#
# The lesson adds one tile to what it has read before. Two states (m, l, a), from any two parts of a row, merge by the
# same rule. So several cores can share one row, and merge their results in any order. Here is one query with seven keys
# in three parts, two of them with scores whose exponential would be infinite.

scores = torch.tensor([2.0, 1, 4, 100, 3, 101, 99], dtype=torch.float64)
v = draw(1, 1, 1, 1, 7, 5, torch.float64)[2]


def state(part):
    m = scores[part].max()
    p = torch.exp(scores[part] - m)
    return m, p.sum(), p @ v[0, 0, part]


def merge(one, other):
    m = torch.maximum(one[0], other[0])
    f, g = torch.exp(one[0] - m), torch.exp(other[0] - m)
    return m, f * one[1] + g * other[1], f * one[2] + g * other[2]


x, y, z = state(slice(0, 2)), state(slice(2, 3)), state(slice(3, 7))
for merged in (merge(merge(x, y), z), merge(x, merge(z, y))):
    wanted = scores.softmax(0) @ v[0, 0]
    torch.testing.assert_close(merged[2] / merged[1], wanted)

# %%
# The package's tiles
# -------------------
#
# The lesson's loop takes all queries at once. The package takes one tile of queries at a time, with a state (m, l, a)
# for each query, and then one tile of keys after another. Only the scores of one tile with one tile exist at a time.

from lm_from_scratch.attention.online_softmax import (
    TILE,
    TiledAttention,
    attend_in_tiles,
    key_tiles,
    tile_scores,
    tiled_attention,
)

print(inspect.getsource(tile_scores))
print(inspect.getsource(TiledAttention.forward))

# %%
# The last six lines of the inner loop are the lesson's. Two details are worth a look. The running maximum starts at the
# most negative *finite* number; the museum shows why. And one number of each row is kept for the backward pass, the
# log-sum-exp :math:`L = m + \log l`.
#
# A tile whose keys are all in the future is not visited, so the mask saves work here. The figure has 10 tokens and
# tiles of 3, numbered in the order of their visit.

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["nan in attention", "fully masked row", "attention backward", "logsumexp", "softmax dim", "safe softmax", "is my attention right", "test my attention code", "my attention differs from PyTorch"]
from lm_from_scratch.instruments.plot import attention_map

visibility = causal(10, 10)
_, (ax,) = figure(4.6, 4.6)
names = [str(t) for t in range(10)]
attention_map(ax, 0.25 * visibility.mask[0, 0].float(), names)
visited = 0
for first in range(0, 10, 3):
    rows = slice(first, min(first + 3, 10))
    for columns in key_tiles(visibility, rows, 3):
        visited += 1
        size = columns.stop - columns.start, rows.stop - rows.start
        corner = columns.start - 0.5, rows.start - 0.5
        ax.add_patch(
            plt.Rectangle(corner, *size, fill=False, edgecolor=COLOURS[3], lw=2)
        )
        centre = corner[0] + size[0] / 2, corner[1] + size[1] / 2
        ax.text(*centre, str(visited), ha="center", va="center", fontsize=13)
ax.set(title="Tiles of 3 x 3, in order of visit", xlabel="key", ylabel="query")
plt.show()

assert visited == 4 * 5 / 2

# %%
# With n tiles along each side, n (n + 1) / 2 of :math:`n^2` tiles are visited. The counter of operations agrees: for n
# = 8 it is 9/16 of the formula's count.

q, k, v = draw(B, H, H, T, T, D)
with FlopCounterMode(display=False) as tiled_counter:
    tiled_attention(q, k, v, causal(T, T))
share = tiled_counter.get_total_flops() / counter.get_total_flops()
n = T // TILE
print(f"n = {n}, share {share:.4f}")
assert share == n * (n + 1) / 2 / n**2
assert n == 8 and share == 9 / 16

# %%
# The backward pass
# -----------------
#
# Write dO for the gradient that arrives at the result. Since :math:`y_t = \sum_j P_{tj} v_j`, the gradients of values
# and weights are
#
# .. math::
#
#    dV_j &= \sum_t P_{tj} \, dO_t \\
#    dP_{tj} &= dO_t \cdot v_j
#
# A score acts on all weights of its row: :math:`\partial P_{ti} / \partial s_{tj} = P_{ti} (1_{i = j} - P_{tj})`.
# Therefore
#
# .. math::
#
#    dS_{tj} &= \sum_i dP_{ti} \, P_{ti} \, (1_{i = j} - P_{tj}) \\
#    &= P_{tj} \Bigl( dP_{tj} - \sum_i P_{ti} \, dP_{ti} \Bigr)
#
# The last sum runs over a whole row again. This time there is nothing to repair, because the forward pass has computed
# the sum already:
#
# .. math::
#
#    \delta_t = \sum_i P_{ti} \, dP_{ti} = \sum_i P_{ti} \, dO_t \cdot v_i = dO_t \cdot y_t
#
# And the weights need not be kept: :math:`P_{tj} = e^{s_{tj} - L_t}`, where one product of D numbers gives the score
# again. Here it is for whole matrices in float64, compared with autograd.

q, k, v = draw(2, 3, 3, 7, 7, 5, torch.float64)
hidden = ~causal(7, 7).mask
scores = (q @ k.mT / math.sqrt(5)).masked_fill(hidden, -math.inf)
scores.requires_grad_()
v.requires_grad_()
y = scores.softmax(-1) @ v
generator = torch.Generator().manual_seed(1)
dO = torch.randn(y.shape, generator=generator, dtype=torch.float64)
autograd_dS, autograd_dV = torch.autograd.grad(y, (scores, v), dO)

with torch.no_grad():
    L = scores.logsumexp(-1, keepdim=True)
    P = torch.exp(scores - L)
    delta = (dO * y).sum(-1, keepdim=True)
    dS = P * (dO @ v.mT - delta)
torch.testing.assert_close(dS, autograd_dS)
torch.testing.assert_close(P.mT @ dO, autograd_dV)

# %%
# The rows of dS sum to zero, as they must: adding a constant to all scores of a row changes nothing.
#
# The package does this tile by tile. Each tile of dS adds to the gradients of its queries and of its keys.

assert dS.sum(-1).abs().max() < 1e-12
print(inspect.getsource(TiledAttention.backward))

# %%
# Equal to the formula
# --------------------
#
# Indices go wrong where tiles do not divide the length. So the lengths here are odd, six query heads share two key
# heads, four of the eleven keys come from a cache, and the tiles are tiny. In float64, values and gradients agree with
# those of the formula and of the fused kernel to 1e-12.


def value_and_gradients(attend, inputs, visibility):
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = attend(*leaves, visibility)
    upstream = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


inputs = draw(2, 6, 2, 7, 11, 5, torch.float64)
worst = 0.0
for window in (None, 3):
    visibility = causal(7, 11).within(window)
    want = value_and_gradients(formula_attention, inputs, visibility)
    kinds = {
        f"tile {tile}": lambda *x, tile=tile: attend_in_tiles(*x, tile)
        for tile in (1, 2, 3, 5, TILE)
    }
    for attend in (*kinds.values(), sdpa_attention):
        have = value_and_gradients(attend, inputs, visibility)
        for ours, theirs in zip(have, want, strict=True):
            worst = max(worst, (ours - theirs).abs().max().item())
print(f"largest difference {worst:.0e}")
assert worst < 1e-12

# %%
# In exact arithmetic all of them are equal; here they round in another order.
#
# The four keys from the cache would reveal a triangle in the wrong corner, whose story is in the lesson on masks:
# ``sdpa_attention`` sets torch's ``is_causal`` only where queries and keys are the same tokens.
#
# Memory, counted
# ---------------
#
# In training, the memory that counts is what the forward pass keeps for the backward pass, and the peak. A dispatch mode
# sees the result of every operation, from the inputs to their gradients, and adds up the bytes that are alive. It
# cannot see what a kernel allocates inside itself.

from torch.utils._python_dispatch import TorchDispatchMode

from lm_from_scratch.instruments.record import record_saved


class Peak(TorchDispatchMode):
    """Bytes of the storages that operations made, while they are alive."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage.data_ptr() not in self.alive:
                    self.alive[storage.data_ptr()] = storage.nbytes()
                    forget = self.alive.pop, storage.data_ptr(), None
                    weakref.finalize(storage, *forget)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def counted(attend, T):
    with Peak() as mode:
        leaves = [x.requires_grad_() for x in draw(1, 4, 4, T, T, 32)]
        with record_saved() as saved:
            y = attend(*leaves, causal(T, T))
        y.sum().backward()
    return sum(saved.values()), mode.peak


lengths = [128, 256, 512, 1024, 2048]
kinds = ("formula", "tiled", "sdpa")
saved, peak = {}, {}
print("             saved MiB                peak MiB")
print("   T " + 2 * "  formula  tiled   sdpa")
for T in lengths:
    for kind in kinds:
        saved[kind, T], peak[kind, T] = counted(ATTENTION_KINDS[kind], T)
    numbers = [
        count[kind, T] / 2**20 for count in (saved, peak) for kind in kinds
    ]
    print(f"{T:4} ", "".join(f"{number:8.1f}" for number in numbers))

# %%
# At the end of the table, twice the length takes nearly four times the memory with the formula, and at most twice the
# memory with tiles and with the fused kernel.

series = {
    kind: (lengths, [peak[kind, T] / 2**20 for T in lengths]) for kind in kinds
}
chart = curves(series, "T", "peak, MiB")
(ax,) = chart.axes
for line, marker in zip(ax.lines, "osD"):
    line.set(marker=marker, markersize=5)
ax.set_xscale("log", base=2)
ax.set_yscale("log")
ax.set(title="Peak memory, forward and backward")
ax.legend(frameon=False)
plt.show()

growth = {
    (count, kind): numbers[kind, 2048] / numbers[kind, 1024]
    for count, numbers in (("saved", saved), ("peak", peak))
    for kind in kinds
}
assert growth["saved", "formula"] > 3.8
assert growth["peak", "formula"] > 3.8
for kind in ("tiled", "sdpa"):
    assert abs(growth["saved", kind] - 2) < 0.01
    assert growth["peak", kind] < 2.01

weights = 4 * 4 * 2048**2
print(f"formula: {saved['formula', 2048] / weights:.2f} times (T, S) saved")
assert saved["formula", 2048] > 2 * weights
assert saved["tiled", 2048] < weights / 10

# %%
# At 2048 tokens the formula keeps more than two tables of weights: softmax needs its own result, and the product with
# the values needs the masked one. The tiles keep less than a tenth of one table: queries, keys, values, the result, and
# L.
#
# Operations, forward and backward
# --------------------------------
#
# The backward pass of the tiles computes the scores again. The formula takes two products forward and four backward,
# the tiles two and five. In exchange, the tiles skip what is hidden.


def both_ways(attend, inputs, visibility):
    leaves = [x.detach().requires_grad_() for x in inputs]
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(attend(*leaves, visibility).sum(), leaves)
    return counter.get_total_flops()


T = 1024
inputs = draw(B, H, H, T, T, D)
by_formula = both_ways(formula_attention, inputs, causal(T, T))
by_tiles = both_ways(tiled_attention, inputs, causal(T, T))
print(f"formula {by_formula:,}, tiles {by_tiles:,}")
assert by_formula == (2 + 4) * 2 * B * H * T * T * D
assert by_tiles == (2 + 5) * 2 * B * H * T * T * D * share

# %%
# A fused kernel runs the same steps as compiled code, and on a GPU it keeps the tile in the fast memory of the chip.
#
# A wrong scale
# -------------
#
# The lesson shows why scores are divided by :math:`\sqrt{D}`. A wrong scale raises no error, and the text may still look
# right. The next lines put two wrong functions into the shipped GPT-2: one without the root, one with the root of the
# model's width C instead of D. They print the loss and the share of positions with the same most likely next token.

from lm_from_scratch.attention.kinds import attention_layers, use_attention_
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.text.corpora import load_corpus
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss

torch.set_grad_enabled(False)
gpt2, tokenizer = load_shipped()
texts = [
    [tokenizer.eos_token_id, *tokenizer.encode(document.text[:2000])][:128]
    for document in load_corpus("reference")
]
idx = torch.tensor([ids for ids in texts if len(ids) == 128][:4])
right = gpt2(idx)


def damaged(attend):
    for layer in attention_layers(gpt2):
        layer.attend = attend
    logits = gpt2(idx)
    use_attention_(gpt2, "sdpa")
    loss = causal_lm_loss(logits, next_token_targets(idx)).item()
    return loss, (logits.argmax(-1) == right.argmax(-1)).float().mean().item()


def scaled_by(factor):
    def attend(q, k, v, visibility, dropout=0.0):
        return formula_attention(factor * q, k, v, visibility)

    return attend


C = gpt2.config.n_embd
D = C // gpt2.config.n_head
results = {
    "1 / root of D": damaged(scaled_by(1.0)),
    "1 / root of C": damaged(scaled_by(math.sqrt(D / C))),
    "no root": damaged(scaled_by(math.sqrt(D))),
}
for name, (loss, same) in results.items():
    print(f"{name:15} loss {loss:.2f}   same next token {same:.0%}")
assert results["1 / root of D"][1] > 0.99
assert results["1 / root of C"][1] > 0.5
losses = [loss for loss, _ in results.values()]
assert losses == sorted(losses)

# %%
# With the root of C, more than half of the most likely next tokens stay the same. Compare logits, not text.
#
# The axis of the softmax
# -----------------------
#
# A softmax over the queries instead of the keys is one digit away: ``-2`` for ``-1``. The shapes fit, and columns sum
# to 1 where rows should. The divisor of a column contains later queries, so a token sees its future. And a single
# query, as in generation, gives every key the weight 1.


def over_queries(q, k, v, visibility, dropout=0.0):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~visibility.mask, -torch.inf).softmax(-2) @ v


q, k, v = draw(2, 3, 3, 7, 7, 5)
changed = q.clone()
changed[:, :, -1] += 1.0  # the last query; the results of the others must stay
leaks = []
for attend in (formula_attention, over_queries):
    difference = attend(changed, k, v, causal(7, 7)) - attend(
        q, k, v, causal(7, 7)
    )
    leaks.append(difference[:, :, :-1].abs().max())
    print(f"{attend.__name__:18} results before it move by {leaks[-1]:.2f}")
assert leaks[0] < 1e-5 and leaks[1] > 0.05
first = attend(q[:, :, -1:], k, v, causal(1, 7))
torch.testing.assert_close(first, v.sum(2, keepdim=True))
print(f"in the shipped model: loss {damaged(over_queries)[0]:.2f}")

# %%
# Hidden scores
# -------------
#
# A hidden key must get the weight 0. In exact arithmetic a score of :math:`-\infty` does that. In floating point,
# infinity becomes NaN in two ways: infinity times 0, and infinity minus infinity.
#
# The first happens where a mask is built by a product, as in older code: a triangle of large negative numbers, times
# the condition that the key is in the future. The second happens in a row in which all keys are hidden.

minimum = torch.finfo(torch.float32).min
later = (
    torch.arange(7) > torch.arange(4, 7)[:, None]
)  # 3 queries after 4 tokens
padded = torch.tensor([[False, False], [False, True]])  # a row of padding
print("fill      product, chunk   row without keys")
for fill in (-math.inf, minimum):
    product = torch.full((3, 7), fill).triu(1) * later
    empty = torch.zeros(2, 2).masked_fill(~padded, fill).softmax(-1)
    print(f"{fill:8.1e} {product.isnan().sum():7} NaN      {empty[0].tolist()}")
assert product.isfinite().all()
assert torch.equal(empty[0], torch.tensor([0.5, 0.5]))
infinite = torch.full((3, 7), -math.inf).triu(1) * later
assert infinite.isnan().any()
assert torch.full((2,), -math.inf).softmax(-1).isnan().all()

# %%
# With the most negative finite number no NaN appears, but the row without keys becomes a plain mean over hidden keys.
# So ``attention_weights`` sets hidden weights to 0 after the softmax. A sum over no keys is 0, a result of 0 contains
# nothing that is hidden, and its gradient is 0. Here is the first row, which is padding, from five functions.

from transformers.models.qwen2.modeling_qwen2 import eager_attention_forward

positions = torch.tensor([[-1, -1, 0, 1, 2, 3, 4]])
left_padded = Visibility(positions, positions)
q, k, v = draw(1, 3, 3, 7, 7, 5)
module = torch.nn.Module().eval()
module.num_key_value_groups = 1
added = torch.zeros(1, 1, 7, 7).masked_fill(~left_padded.mask, minimum)
scores = (q @ k.mT / math.sqrt(5)).masked_fill(~left_padded.mask, -math.inf)
first_rows = {
    "softmax of -inf": scores.softmax(-1) @ v,
    "transformers, eager": eager_attention_forward(
        module, q, k, v, added, 1 / math.sqrt(5)
    )[0].transpose(1, 2),
    "package, formula": formula_attention(q, k, v, left_padded),
    "package, tiled": tiled_attention(q, k, v, left_padded),
    "package, sdpa": sdpa_attention(q, k, v, left_padded),
}
for name, y in first_rows.items():
    print(f"{name:20}", *(f"{number:6.2f}" for number in y[0, 0, 0, :4]))
assert first_rows["softmax of -inf"][0, 0, 0].isnan().all()
torch.testing.assert_close(
    first_rows["transformers, eager"][0, 0, 0], v[0, 0].mean(0)
)
for name in ("formula", "tiled", "sdpa"):
    assert (first_rows[f"package, {name}"][0, 0, :2] == 0).all()

# %%
# NaN is not harmless, even in a row that nobody reads: the next layer multiplies it by a weight of 0, and 0 times NaN is
# NaN. The plain mean of ``transformers`` is finite, but it contains padding and the future.
#
# Five kinds in one model
# -----------------------
#
# The package has five kinds of attention, functions with one signature. One call changes the kind of a model, and its
# logits stay the same.

for kind in ATTENTION_KINDS:
    use_attention_(gpt2, kind)
    error = (gpt2(idx) - right).abs().max().item()
    print(f"{kind:8} logits differ by {error:.0e}")
    assert error < 2e-4
use_attention_(gpt2, "sdpa")

# %%
# Bug museum
# ----------
#
# Minus infinity, minus minus infinity
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A fill of minus infinity gives NaN where a row sees no key; in tiles, a *tile* without a visible key is enough. (Q30)
#
# The section on hidden scores shows the first case. In the second, the loop on paper starts
# with :math:`m = -\infty`. If the first tile is hidden, the new maximum is :math:`-\infty` too, and the factor is
# :math:`e^{-\infty + \infty}`. The next lines plant this start in a copy of the package's source.

from lm_from_scratch.attention import online_softmax

line = "torch.full_like(q_tile[..., :1], torch.finfo(work).min)"
source = inspect.getsource(online_softmax)
assert source.count(line) == 1
planted = source.replace(
    line, line.replace("torch.finfo(work).min", "-torch.inf")
)
mutant = {"__name__": "mutant"}
exec(planted, mutant)

q, k, v = draw(2, 3, 3, 7, 7, 5)
print("padding   NaN in real rows: planted, package   (tiles of 2)")
for padding in (0, 1, 2, 3):
    positions = torch.arange(7)[None] - padding
    positions = positions.clamp(min=-1)  # padding has position -1
    visibility = Visibility(positions, positions)
    counts = [
        attend(q, k, v, visibility, 2)[:, :, padding:].isnan().sum().item()
        for attend in (mutant["attend_in_tiles"], attend_in_tiles)
    ]
    print(f"{padding:7} {counts[0]:20} {counts[1]:8}")
    assert counts[0] == (0 if padding < 2 else q[:, :, padding:].numel())
    assert counts[1] == 0

# %%
# The mutant passes without padding, and with less padding than a tile. With more, every real token is NaN. The package
# starts at the most negative finite number instead: :math:`e^{-\infty - m}` is 0 for every finite m. The check that
# finds the mistake is padding that fills a tile.
#
# The minimum plus a little less
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Earlier code made a mask of ``finfo.min`` and *added* it to the scores. In float16 the most negative finite number is
# -65504, and the next step down is infinite. A score of -16 or less takes it. (Q23)

half = torch.finfo(torch.float16).min
for score in (0.0, -15.0, -16.0, -100.0):
    total = torch.tensor(half).half() + torch.tensor(score).half()
    print(f"{half:.0f} + ({score:.0f}) = {total.item():.0f}")
    assert total.isinf() == (score <= -16)
row = torch.full((3,), -16.0).half()
assert (row + half).softmax(0).isnan().all()
assert row.masked_fill(torch.ones(3) > 0, half).softmax(0).isfinite().all()

# %%
# So the row of a padding token, which should become a plain mean, becomes NaN if its scores are negative enough. With
# small scores, and in bfloat16, the mistake does not show. The fixed line *replaces* hidden scores, in float32. The
# check combines padding with large negative scores, in float16, and looks at all rows, including those of padding.
#
# Exercises
# ---------
#
# 1. *Easy.* Call ``attend_in_tiles`` with tiles of 8, 64 and 512 for T = 512, and count the peak with ``Peak``. A good
#    answer shows which size has the smallest peak, and says what the smallest tiles cost instead. Hint: count the calls
#    of ``tile_scores`` too.
# 2. *Medium.* Compute the cross-entropy of T tokens over a vocabulary of V without ever holding T V logits: read the
#    head's weight in slices of the vocabulary. A good answer equals ``F.cross_entropy`` to 1e-5, and its largest
#    tensor is counted. Hint: the loss is the log-sum-exp minus the logit of the target; no accumulator is needed.
# 3. *Hard.* Give each head a *sink*: one number that joins the sum l like a score, but has no value. Change the tiled
#    forward, derive what changes in the backward pass, and give the gradient of the sink. Hint: a sink is a key with
#    the value 0; which of L, :math:`\delta` and dS notice it? A good answer equals the formula with such a key, in
#    value and gradient.
#
# Summary
# -------
#
# * The formula takes 4 B H T S D operations. Tiles skip what is hidden, and compute the scores again in backward.
# * Any two parts of a row merge by the rule that adds one tile.
# * Backward needs L and the result, because :math:`\sum_i P_{ti} \, dP_{ti} = dO_t \cdot y_t`. Values and gradients
#   equal the formula's to 1e-12 in float64, for five sizes of tiles.
# * From 1024 to 2048 tokens, the peak of the formula grows by more than 3.8, that of tiles and of the fused kernel by
#   at most 2.01.
# * A wrong scale, a wrong axis and infinity fail without an error message. Padding that fills a tile reveals the last.
#
# Sources
# -------
#
# * Vaswani et al.: `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, 2017.
# * Milakov, Gimelshein: `Online normalizer calculation for softmax <https://arxiv.org/abs/1805.02867>`_, 2018. The
#   recurrence.
# * Rabe, Staats: `Self-attention Does Not Need O(n2) Memory <https://arxiv.org/abs/2112.05682>`_, 2021.
# * Dao et al.: `FlashAttention <https://arxiv.org/abs/2205.14135>`_, 2022. Tiles in the fast memory of a GPU, and the
#   backward pass.
# * `Flash-Decoding <https://pytorch.org/blog/flash-decoding/>`_, 2023. Merging parts of one row.
# * NaN in the wild: `rows without any key <https://github.com/pytorch/pytorch/issues/103749>`_.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
