r"""
GaLore in depth: directions, coordinates, and is yours right?
=============================================================

`GaLore <2_galore.ipynb>`_ relies on two things: a gradient has few directions, and they stay good for a while. Is that
so, and where do they come from? And if you have written a GaLore of your own: in which coordinates does Adam work in it,
does it take the steps of the code that its authors published, and where does rounding become a step?

Letters: a weight :math:`W` and its gradient :math:`G` have the shape (m, n), a rank is r. The output size is m, as in
``torch.nn.Linear``. A left basis is :math:`P`, a right one :math:`Q`.

Gradients of a model in training
--------------------------------

The model is a Qwen2 with two blocks, and AdamW trains it on Python's language reference. Three matrices of block 1 keep
all their gradients for us: one is square, one is *tall* (m > n), one is *wide* (m < n).
"""

# sphinx_gallery_needs = ["2_galore", "1b_adamw_in_depth"]
# sphinx_gallery_words = ["galore-torch", "proj_type", "reverse_std", "galore scale", "random projection", "intrinsic rank", "gradient rank", "SVD of gradients", "stable rank", "singular values of gradients"]
import copy
import math
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.adamw import AdamW, adam_direction
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.optim.galore_basis import (
    captured_energy,
    project,
    project_back,
    sides,
    singular_basis,
)
from lm_from_scratch.text.batches import PackedBatches, write_tokens
from lm_from_scratch.text.corpora import load_corpus, load_split
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.loss import causal_lm_loss

documents = load_split(["reference"], 0.05)[0][:40]
tokenizer = Tokenizer.train([d.text for d in documents], 512)
folder = tempfile.TemporaryDirectory()
file = write_tokens(documents, tokenizer, Path(folder.name) / "train.bin")
batches = PackedBatches(file, batch_size=12, block_size=64)

torch.manual_seed(0)
model = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=512, block_size=64, n_layer=2, n_head=4, n_kv_head=2,
        n_embd=64, intermediate_size=176, rope_theta=10000.0, eos_token_id=None,
    )
)  # fmt: skip
block = model.model.layers[1]
weights = {
    "o_proj": block.self_attn.o_proj.weight,
    "gate_proj": block.mlp.gate_proj.weight,
    "down_proj": block.mlp.down_proj.weight,
}
start = {name: w.detach().clone() for name, w in weights.items()}
gradients = {name: [] for name in weights}


def loss_of(model, batch):
    logits = model(
        batch.idx, positions=batch.positions, documents=batch.documents
    )
    return causal_lm_loss(logits, batch.targets)


steps = 130
optimizer = AdamW(model.parameters(), lr=0.003, weight_decay=0.0)
for t in range(steps):
    optimizer.zero_grad()
    loss_of(model, batches[t]).backward()
    for name, w in weights.items():
        gradients[name].append(w.grad.clone())
    optimizer.step()

gradients = {name: torch.stack(g) for name, g in gradients.items()}
for name, g in gradients.items():
    print(f"{name:10} {tuple(g.shape)}")

# %%
# Few directions, and not always the same number
# ----------------------------------------------
#
# The SVD writes a matrix as :math:`G = \sum_i \sigma_i u_i v_i^\top`, a sum of outer products with
# :math:`\sigma_1 \ge \sigma_2 \ge \dots` and orthonormal :math:`u_i` and :math:`v_i`. The *energy*
# :math:`\lVert G \rVert^2` is :math:`\sum_i \sigma_i^2`. How many directions hold 90 per cent of it?


def shares(matrix):
    """The share of energy in the first 1, 2, 3, ... directions."""
    energies = torch.linalg.svdvals(matrix.double()).square()
    return energies.cumsum(-1) / energies.sum(-1, keepdim=True)


def needed(matrix, share=0.9):
    """How many directions hold this share of the energy."""
    return (shares(matrix) < share).sum(-1) + 1


print("directions for 90 % of the energy, of 64")
print("           gradient in step          weight   Adam's")
print("              1   10   40  130      at last  direction")
counts = {}
for name, w in weights.items():
    state = optimizer.state[w]
    d = state["exp_avg"] / state["exp_avg_sq"].sqrt()
    row = [gradients[name][t - 1] for t in (1, 10, 40, 130)]
    counts[name] = [needed(x).item() for x in (*row, w.detach(), d)]
    row = "".join(f"{count:5}" for count in counts[name][:4])
    print(f"{name:10}{row}{counts[name][4]:12}{counts[name][5]:11}")

# %%
# The gradients do have few directions, and the weights do not. The history is less simple: the very first gradients of
# the MLP are broad, around step 10 very few directions hold 90 per cent, and from then on the number grows again.
#
# The last column is a warning. Adam divides by the size of each entry, which lifts the weak directions. Its direction
# is broader than the gradient, so the share of a gradient that r directions hold is not the share of Adam's step.

for name in weights:
    first, ten, *_, last, weight, direction = counts[name]
    assert ten <= 2 < last < 24 and weight > last + 5 and direction > last
assert counts["gate_proj"][0] > 20 and counts["down_proj"][0] > 20

# %%
# Where the directions come from
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A linear layer computes :math:`y_t = W x_t` for each token t. With :math:`\delta_t` for the gradient of the loss with
# respect to :math:`y_t`, the gradient of the weight is a sum of outer products, one for each token:
#
# .. math::
#
#    G = \sum_{t=1}^{T} \delta_t \, x_t^\top
#
# So T tokens give a rank of at most T, however large the matrix. A batch of a few tokens would have a gradient of low
# rank for this reason alone. We take the trained model in float64, and batches of 1 to 3,072 tokens.

exact = copy.deepcopy(model).double()
layer = exact.model.layers[1].mlp.gate_proj
seen = {}
layer.register_forward_hook(lambda _, x, y: seen.update(x=x[0]))
layer.register_full_backward_hook(lambda _, dx, dy: seen.update(dy=dy[0]))
idx = torch.cat([batches[steps + i].idx for i in range(4)])  # (48, 64)
targets = torch.cat([batches[steps + i].targets for i in range(4)])
by_tokens = {}
for tokens in (1, 4, 16, 64, 192, 768, 3072):
    rows, T = -(-tokens // 64), min(tokens, 64)
    exact.zero_grad()
    logits = exact(idx[:rows, :T])
    causal_lm_loss(logits, targets[:rows, :T]).backward()
    g = layer.weight.grad
    x, dy = seen["x"].flatten(0, 1), seen["dy"].flatten(0, 1)  # (tokens, .)
    torch.testing.assert_close(g, dy.mT @ x)
    by_tokens[tokens] = torch.linalg.matrix_rank(g).item(), needed(g).item()
    assert by_tokens[tokens][0] <= min(tokens, 64)

ranks, nineties = zip(*by_tokens.values())
print("tokens        ", *(f"{tokens:5}" for tokens in by_tokens))
print("rank          ", *(f"{rank:5}" for rank in ranks))
print("90 % of energy", *(f"{count:5}" for count in nineties))
assert ranks[-1] == 64 and max(nineties) < 32
assert abs(nineties[-1] - nineties[-3]) < 8

# %%
# With many tokens the rank is full: strictly, the gradient of a real batch has no low rank. But most of its energy
# stays in a part of the directions, and more tokens do not change that. The paper proves a low rank for certain
# networks; here it is an approximation, to be measured.
#
# The shipped model
# ~~~~~~~~~~~~~~~~~
#
# Is that only so at the beginning of training? The shipped Qwen2 has been trained for 2650 steps on documentation. The
# next lines give it 16 pieces of Python code, make a basis of a quarter of the directions for each of its 56 matrices,
# and ask how much the basis holds: of the gradient that made it, and of the gradient of 16 other pieces.

shipped, its_tokenizer = load_shipped("qwen2-docs")
texts = [
    its_tokenizer.start(d.text[:1000])[:128]
    for d in load_corpus("source")[:100]
]
texts = torch.tensor([ids for ids in texts if len(ids) == 128])


def gradients_of(idx):
    shipped.zero_grad()
    causal_lm_loss(shipped(idx), next_token_targets(idx)).backward()
    matrices = dict(shipped.model.layers.named_parameters()).items()
    return {name: p.grad.clone() for name, p in matrices if p.dim() == 2}


one, other = gradients_of(texts[:16]), gradients_of(texts[16:32])
held = {"all": []}
for name, g in one.items():
    quarter = min(g.shape) // 4
    basis = singular_basis(g, quarter, *sides(g.shape, "std"))
    pair = [captured_energy(project(x, *basis), x) for x in (g, other[name])]
    held["all"].append(pair)
    held.setdefault(name.split(".")[-2], []).append(pair)

for name, pairs in held.items():
    own, others = torch.tensor(pairs).mean(0).tolist()
    print(f"{name:10} own batch {own:.2f}   another batch {others:.2f}")
own, others = torch.tensor(held["all"]).mean(0).tolist()
assert len(held["all"]) == 56
assert 0.85 < own < 0.97 and 0.5 < others < own - 0.1

# %%
# A random quarter would hold 0.25. So gradients of a trained model have few directions as well, and a basis knows its
# own batch better than the next one.
#
# How long does a basis stay good?
# --------------------------------
#
# Between two bases the gradient moves on. We make a basis in every fifth step from step 21 to 56, and follow how much
# of the later gradients it captures.

rank = 16


def old_and_new(every, ages):
    """The mean captured share of gradients that are 0, 1, ... steps younger."""
    left, right = sides(every[0].shape, "std")
    table = []
    for t in range(20, 60, 5):
        basis = singular_basis(every[t], rank, left, right)
        later = [every[t + age] for age in ages]
        table.append([captured_energy(project(g, *basis), g) for g in later])
    return torch.tensor(table).mean(0)


ages = range(0, 71, 2)
_, (ax,) = figure(4.8, 3.6)
at_once = {}
for (name, every), style in zip(gradients.items(), ("-", "--", "-.")):
    line = old_and_new(every, ages)
    ax.plot(ages, line, style, label=name)
    assert line[0] > 0.9 and line[10:].min() > rank / 64 + 0.1
    assert line[1:6].mean() > line[-10:].mean()
    at_once[name] = (line[0] - line[1]).item()  # within two steps
assert max(at_once, key=at_once.get) == "down_proj"
ax.axhline(rank / 64, color=COLOURS[7], ls=":", label="random basis")
ax.set(xlabel="age of the basis (steps)", ylabel="captured share", ylim=(0, 1))
ax.set_title(f"A basis of rank {rank} grows old")
ax.legend(frameon=False)
plt.show()

# %%
# Even after 70 steps all three capture far more than random directions do. There are two losses. A basis fits the noise
# of its own batch, and pays at the very next gradient: ``down_proj`` most. The other loss is slow, and a new basis
# cures it. `Bases in depth <3c_galore_bases_in_depth.ipynb>`_ has the ways to find one.
#
# In which coordinates does Adam work?
# ------------------------------------
#
# A tall matrix has a basis :math:`Q` on its right, a wide one :math:`P` on its left. In general there may be both:
#
# .. math::
#
#    R_t = P^\top G_t \, Q, \qquad d_t = \mathrm{Adam}(R_t), \qquad
#    W_t = (1 - \eta \lambda) \, W_{t-1} - \eta \, \alpha \, P \, d_t \, Q^\top
#
# The factor :math:`\alpha` is the option ``scale``. It multiplies the step and not the decay.
#
# Adam divides each coordinate by that coordinate's own size, so its direction depends on the coordinate system. Even at
# full rank GaLore is therefore not AdamW. With a fixed basis it is Adam on the rotated weight :math:`W Q`. We feed the
# first 30 gradients of the square matrix to both, in float64, and to momentum without division, which is linear and
# cannot tell the difference.

square = gradients["o_proj"][:30].double()
w0 = start["o_proj"].double()
options = dict(lr=0.01, weight_decay=0.0)


def moved(optimizer_class, w, grads, **more):
    p = nn.Parameter(w.clone())
    optimizer = optimizer_class([p], **options, **more)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    return p.detach()


_, Q = singular_basis(square[0], 64, False, True)  # (64, 64)
fixed = dict(rank=64, scale=1.0, update_proj_gap=None)
galore = moved(GaLore, w0, square, **fixed)
rotated = moved(torch.optim.AdamW, w0 @ Q, square @ Q) @ Q.mT
plain = moved(torch.optim.AdamW, w0, square)

sums = torch.zeros(2, 64, 64, dtype=torch.float64)  # plain, projected
for g in square:
    sums = 0.9 * sums + torch.stack([g, g @ Q])
momentum = sums[0] - sums[1] @ Q.mT

print(f"GaLore - Adam on W Q   {(galore - rotated).abs().max():.0e}")
print(f"GaLore - Adam on W     {(galore - plain).abs().max():.2f}")
print(f"momentum, both ways    {momentum.abs().max():.0e}")
assert (galore - rotated).abs().max() < 1e-6
assert (galore - plain).abs().max() > 0.02
assert momentum.abs().max() < 1e-12

# %%
# AdamW's coordinates are the neurons of a layer, those of GaLore are directions of a gradient. Which are better is a
# question for measurements.
#
# The published code
# ------------------
#
# ``galore-torch`` is the authors' own. Its step for a tall matrix, written anew below, differs from the formula above
# in three places. The corrections are folded into the learning rate, so that :math:`\epsilon` is added to the
# uncorrected root (L7 on the page on `AdamW <1b_adamw_in_depth.ipynb>`_). The decay comes last, and so shrinks the step
# too. And nothing fixes the signs of the singular vectors.


def published(grads, w, rank, gap, decay=0.0, eps=0.0, signs=1.0):
    m = v = 0.0
    for t, g in enumerate(grads):
        if t % gap == 0:  # steps 1, 1 + gap, ...
            Q = torch.linalg.svd(g, full_matrices=False)[2][:rank].mT
            Q = Q * (signs if t > 0 else 1.0)
        m = 0.9 * m + 0.1 * (g @ Q)
        v = 0.999 * v + 0.001 * (g @ Q) ** 2
        lr = 0.01 * math.sqrt(1 - 0.999 ** (t + 1)) / (1 - 0.9 ** (t + 1))
        w = w - lr * 0.25 * (m / (v.sqrt() + eps)) @ Q.mT
        w = w - 0.01 * decay * w
    return w


def ours(grads, w, rank, gap, decay=0.0, eps=0.0):
    options = dict(lr=0.01, weight_decay=decay, eps=eps, basis="svd")
    p = nn.Parameter(w.clone())
    optimizer = GaLore([p], rank=rank, update_proj_gap=gap, **options)
    for g in grads:
        p.grad = g
        optimizer.step()
    return p.detach()


grads = gradients["gate_proj"][40:46].double()
w0 = start["gate_proj"].double()
cases = {
    "one basis, no decay, eps 0": dict(gap=200),
    "eps 1e-6": dict(gap=200, eps=1e-6),
    "decay 0.1": dict(gap=200, decay=0.1),
}
apart = {}
for name, options in cases.items():
    theirs = published(grads, w0, 16, **options)
    apart[name] = (theirs - ours(grads, w0, 16, **options)).abs().max().item()
    print(f"{name:28} largest difference {apart[name]:.0e}")

signs = torch.tensor([-1.0, 1.0] * 8, dtype=torch.float64)
flipped = published(grads, w0, 16, gap=3, signs=signs)
sign = (flipped - published(grads, w0, 16, gap=3)).abs().max().item()
print(f"{'other signs, new basis':28} largest difference {sign:.0e}")
assert apart["one basis, no decay, eps 0"] < 1e-12
assert apart["eps 1e-6"] > 1e-6 and 1e-9 < apart["decay 0.1"] < 1e-4
assert sign > 1e-4

# %%
# In float64 and without the three places, both agree to twelve digits. In the last line one program runs with two
# correct SVDs: half of the vectors of the second basis point the other way. Within one basis the signs make no
# difference, because Adam takes the opposite step for the opposite gradient. But the kept moments are from the first
# basis, and now half of their columns count with another sign.
#
# The package makes the largest entry of a vector positive, so that two machines agree. (``subspace`` bases continue the
# old ones.)
#
# Steps made of rounding
# ----------------------
#
# With ``full``, the columns of :math:`P` and :math:`Q` are singular vectors of the first gradient, and its coordinates
# :math:`R = P^\top G \, Q` are the diagonal matrix of :math:`\sigma_1, \dots, \sigma_r`. The other entries are zero on
# paper and rounding noise in float32. Adam divides the noise by its own size.

g = gradients["o_proj"][-1]
off = ~torch.eye(rank, dtype=torch.bool)  # 240 entries
differences = {}
single, double = torch.float32, torch.float64
for dtype, eps in ((single, 1e-8), (single, 1e-5), (double, 1e-8)):
    updates = []
    for method in ("svd", "gram"):
        basis = singular_basis(g.to(dtype), rank, True, True, method)
        low = project(g.to(dtype), *basis)
        d = adam_direction(low, 0 * low, 0 * low, 1, eps=eps)[0]
        updates.append(project_back(d, *basis))
    differs = (updates[0] - updates[1]).norm() / updates[0].norm()
    differences[dtype, eps] = differs.item()
    print(
        f"{dtype!s:13} eps {eps:.0e}   off the diagonal: "
        f"R {low[off].abs().max():.0e}, d {d[off].abs().max():.0e}"
        f"   SVD against Gram {differs:.0e}"
    )
assert differences[single, 1e-8] > 0.1 > differences[single, 1e-5]
assert differences[double, 1e-8] < 1e-4
assert off.sum() == 240

# %%
# In float32 with the usual :math:`\epsilon`, 240 entries of the first direction are noise, and only 16 mean something.
# The SVD and the eigenvectors of :math:`G G^\top`, two correct methods, then disagree about the first step. A larger
# :math:`\epsilon` or float64 removes the noise. The next gradients are not diagonal in this basis, so the trap is only
# there in the first step and after ``reset``. The package's optimizer takes the noise away: in a new basis it sets to
# zero what is below 100 roundings of the largest entry.
#
# Bug museum
# ----------
#
# Moments of the full shape
# ~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The GaLore of ``pytorch_optimizer`` 3.1.2 made its moments like the weight and fed them the projected gradient. Here
# is the same mistake, for a weight of shape (8, 5). (L1, L2)


def broken_step(g, rank):
    _, Q = singular_basis(g, rank, False, True)
    exp_avg = torch.zeros_like(g)  # fixed: zeros_like(g @ Q)
    exp_avg.mul_(0.9).add_(g @ Q, alpha=0.1)
    return exp_avg @ Q.mT


g = torch.randn(8, 5)
for rank, words in ((1, "8x5 and 1x5"), (3, "must match"), (5, "no error")):
    try:
        broken_step(g, rank)
        outcome = "no error"
    except RuntimeError as error:
        outcome = str(error)
    print(f"rank {rank}: {outcome}")
    assert words in outcome

# %%
# At full rank it runs, and saves nothing. At rank 1 broadcasting hides the mistake until the projection back, which
# then gets the blame. The check asks for the shape of the state at a rank between, in both orientations.

for shape, low_shape in (((8, 5), (8, 3)), ((5, 8), (3, 8))):
    p = nn.Parameter(torch.zeros(shape))
    p.grad = torch.randn(shape)
    optimizer = GaLore([p], rank=3)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].shape == low_shape

# %%
# Back with the wrong transpose
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The same code projected back with :math:`Q` where :math:`Q^\top` belongs. The product of (8, 3) and (5, 3) does not
# exist, so this fails at once, except when :math:`Q` is square. (L3)

g = torch.randn(6, 6)
_, Q = singular_basis(g, 6, False, True)
right, wrong = g @ Q @ Q.mT, g @ Q @ Q
print(f"right: error {(right - g).abs().max():.0e}", end="   ")
print(f"wrong: error {(wrong - g).abs().max():.1f}")
assert (right - g).abs().max() < 1e-5 and (wrong - g).abs().max() > 0.5
torch.testing.assert_close(wrong.norm(), g.norm())

# %%
# The shape is right, and so is the norm. A test with a square matrix at full rank must compare numbers: with all
# directions in the basis, there and back is the identity. A relative of this defect, the side guessed from a projected
# shape that happens to be square, was found in `another copy of the code
# <https://github.com/modelscope/ms-swift/pull/10146>`_.
#
# A slice that keeps the whole factor
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The first columns of :math:`U` are a view. As long as the optimizer holds it, the whole factor stays in memory. (L11)

g = torch.randn(512, 256)
U, _, _ = torch.linalg.svd(g, full_matrices=False)
for name, basis in (("slice", U[:, :8]), ("clone", U[:, :8].clone())):
    needs, keeps = basis.nbytes, basis.untyped_storage().nbytes()
    print(f"{name}: needs {needs} bytes, keeps {keeps}")
    assert keeps == needs * (32 if name == "slice" else 1)

# %%
# ``numel`` and ``nbytes`` do not see it. The check is the line above: for every tensor in the state, the storage is no
# larger than its numbers.
#
# Exercises
# ---------
#
# 1. *Easy.* Make bases from the mean of four successive gradients, and draw the figure of ages again. A good answer says
#    for which matrix this helps, and names what it costs: a full gradient that is held.
# 2. *Easy.* Move the decay of ``published`` before the step. A good answer gets a difference below 1e-12 in the line of
#    decay, and says with which factor the two steps differ otherwise.
# 3. *Medium.* Change ``published`` to ``left`` for a wide matrix and try ``down_proj``. A good answer agrees with the
#    package to 1e-12, and says how its author could tell the side without looking at the shape of R. Hint: L3.
#
# Summary
# -------
#
# * Fewer than 24 of 64 directions held 90 per cent of a gradient's energy at the end; the weights needed more. Strictly
#   the rank is full as soon as there are enough tokens.
# * A basis loses a part at once, to the noise of its batch, and the rest slowly.
# * Adam depends on the coordinates. GaLore at full rank is Adam in rotated ones, to 1e-6; momentum alone does not care.
# * With one basis and without decay and :math:`\epsilon`, the published code takes the same steps, to 1e-12 in float64.
# * With two bases, rounding noise fills the first step in float32.
#
# Sources
# -------
#
# * Zhao et al.: `the GaLore paper <https://arxiv.org/abs/2403.03507>`_, 2024. The method, and the theorem on low rank.
# * The authors' code, `galore-torch <https://github.com/jiaweizzhao/GaLore>`_: ``adamw.py`` and ``galore_projector.py``.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
folder.cleanup()
