r"""
Three ways to a basis, in depth
===============================

`GaLore in training <3_galore_training.ipynb>`_ makes a new basis every few steps. There are three ways to find one.
What does each give up, what does it cost, and why does the basis belong on the shorter side?

A weight matrix has shape (m, n); :math:`s` is its shorter side, :math:`l` the longer one, :math:`r` the rank.

Decompose, or square first
--------------------------

The best basis of rank :math:`r` holds the leading singular vectors of :math:`G = U \Sigma V^\top`. A full
decomposition (SVD) finds all of them, and both sides, of which we need a part. The Gram matrix of the shorter side
has the same left vectors, and its eigenvalues are the squares:

.. math::

   G G^\top = U \Sigma V^\top V \Sigma U^\top = U \Sigma^2 U^\top

It is only :math:`s \times s`, and symmetric. The price is the squaring. Float32 holds about 7 digits, so a
direction 3000 times weaker than the strongest has a square at the border of rounding.
"""

# sphinx_gallery_words = ["SVD", "Gram matrix", "subspace iteration", "update_proj_gap", "proj_type", "randomized SVD"]
import inspect
import math
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.utils.flop_counter import FlopCounterMode

from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.galore_basis import (
    captured_energy,
    iterated,
    project,
    random_basis,
    sides,
    singular_basis,
)
from lm_from_scratch.text.batches import PackedBatches, write_tokens
from lm_from_scratch.text.corpora import load_corpus, split
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.train import (
    Schedule,
    learning_rate,
    optimizer_step,
)

assert 0.5 < 3000**-2 / torch.finfo(torch.float32).eps < 1
torch.manual_seed(0)
U = torch.linalg.qr(torch.randn(200, 11, dtype=torch.float64)).Q
V = torch.linalg.qr(torch.randn(300, 11, dtype=torch.float64)).Q
sizes = torch.logspace(0, -5, 11, dtype=torch.float64)
G = ((U * sizes) @ V.mT).float()
found = {}
for method in ("svd", "gram"):
    basis, _ = singular_basis(G, 11, True, False, method)
    found[method] = (basis.double() * U).sum(0).abs()  # 1: the same direction
    low, exact = project(G.double(), basis.double(), None), G.double()
    lost = 1 - low.square().sum() / exact.square().sum()
    assert lost < 1e-6
for i in (0, 4, 10):
    print(
        f"singular value {sizes[i]:.0e}: cosine with the true vector "
        f"{found['svd'][i]:.3f} by svd, {found['gram'][i]:.3f} by gram"
    )
assert found["svd"].min() > 0.9 and found["gram"][:5].min() > 0.99
assert found["gram"][-1] < 0.7

# %%
# The lost directions hold less than a millionth of the energy, as asserted above, so GaLore does not miss them.
#
# Turn the old basis
# ------------------
#
# The third way does not decompose at all. Multiply some basis by the Gram matrix and orthonormalise: every direction
# grows by :math:`\sigma_i^2`, so the leading ones come to the front. Let :math:`\theta` be the largest angle between
# the basis and the leading space. Each such round shrinks it:
#
# .. math::
#
#    \tan \theta_{\text{new}} \le \left( \frac{\sigma_{r+1}}{\sigma_r} \right)^2 \tan \theta
#
# Two singular values in the ratio 2 to 1 give a factor of 4 per round.

r, s = 8, 40
U = torch.linalg.qr(torch.randn(s, s, dtype=torch.float64)).Q
squares = torch.tensor([1.0] * r + [0.25] * (s - r), dtype=torch.float64)
gram = (U * squares) @ U.mT


def tangent(basis):
    a, b = U[:, :r].mT @ basis, U[:, r:].mT @ basis
    return torch.linalg.matrix_norm(b @ a.inverse(), 2).item()


basis = torch.linalg.qr(torch.randn(s, r, dtype=torch.float64)).Q
for _ in range(4):
    before = tangent(basis)
    basis = torch.linalg.qr(gram @ basis).Q
    print(f"tan of the angle {before:7.3f} -> {tangent(basis):.3f}")
    assert math.isclose(tangent(basis), before / 4, rel_tol=1e-6)

# %%
# The inequality also says what a warm start is worth: if the leading space has moved little since the old basis was
# made, the angle is small from the beginning, and few rounds suffice. Often one does. How would the loop know? The
# gradient's energy is known, and so is what the basis holds of it: ``low`` is computed anyway. A basis that holds 99.9
# per cent is good enough, because no other could hold more than the rest. This is the whole function; it begins with
# the basis that is being replaced.

print(inspect.getsource(iterated))

# %%
# Real gradients
# --------------
#
# How good is it on real gradients? Here are those of AdamW, in the run of the lesson: the old basis is 20 steps old.

documents = split(load_corpus("reference"))[0][:40]
tokenizer = Tokenizer.train([d.text for d in documents], 512)
folder = tempfile.TemporaryDirectory()
file = write_tokens(documents, tokenizer, Path(folder.name) / "train.bin")
batches = PackedBatches(file, batch_size=8, block_size=64)
torch.manual_seed(1)
model = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=512, block_size=64, n_layer=2, n_head=4, n_kv_head=2,
        n_embd=128, intermediate_size=344, rope_theta=10000.0, eos_token_id=None,
    )
)  # fmt: skip
matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
others = [p for p in model.parameters() if p not in {*matrices}]
optimizer = AdamW(
    [{"params": matrices}, {"params": others}],
    betas=(0.9, 0.95),
    weight_decay=0.0,
    fused=True,
)
schedule = Schedule(steps=60, lr=1.0, min_lr=0.1, warmup=10)
gradients = {}
for step in range(1, 61):
    for group, peak in zip(optimizer.param_groups, (0.004, 0.128)):
        group["lr"] = peak * learning_rate(step, schedule)
    optimizer_step(model, optimizer, [batches[step - 1]])
    gradients[step] = [p.grad.clone() for p in matrices]
folder.cleanup()

old, new = gradients[40], gradients[60]
energies = {}
for g_old, g in zip(old, new):
    side = sides(tuple(g.shape), "std")
    reverse = sides(tuple(g.shape), "reverse_std")
    stale = singular_basis(g_old, 32, *side)
    made_by = {
        "random basis": random_basis(g, 32, *side, seed=0),
        "old basis": stale,
        "old basis, reverse_std": singular_basis(g_old, 32, *reverse),
        "new basis, reverse_std": singular_basis(g, 32, *reverse),
        "subspace": singular_basis(g, 32, *side, "subspace", stale),
        "gram": singular_basis(g, 32, *side, "gram"),
    }
    best = project(g, *singular_basis(g, 32, *side, "svd"))
    for name, basis in made_by.items():
        share = captured_energy(project(g, *basis), g)
        share = share / captured_energy(best, g)
        energies.setdefault(name, []).append(share.item())
print("energy captured, as a share of the best basis of rank 32")
for name, values in energies.items():
    middle = sorted(values)[len(values) // 2]
    print(f"  {name:23} least {min(values):.4f}, median {middle:.4f}")

_, (ax,) = figure(4.8, 3.2)
for i, values in enumerate(energies.values()):
    ax.plot(values, [i] * len(values), "o", color=COLOURS[i % 5], alpha=0.6)
ax.set_yticks(range(len(energies)), list(energies))
ax.invert_yaxis()
ax.set(xlim=(0, 1.04), xlabel="share of the best basis")
ax.set_title("Energy, a dot for each matrix")
plt.show()
assert min(energies["gram"]) > 0.9999 and min(energies["subspace"]) > 0.99
assert min(energies["new basis, reverse_std"]) > 0.9999
assert all(
    a < b for a, b in zip(energies["random basis"], energies["old basis"])
)

# %%
# What a basis costs
# ------------------
#
# Now the cost, for the MLP of the 60M model. The products are counted by torch; for the rest we take the textbook
# counts of Golub and Van Loan, which are those of one classic algorithm each: :math:`6ls^2 + 20s^3` for an SVD with
# its vectors, :math:`9s^3` for the eigenvectors, :math:`4sr^2 - \frac{4}{3}r^3` for a QR with its factor.

s, l, r = 512, 1376, 128
G = torch.randn(s, 200) @ torch.randn(200, l) + torch.randn(s, l)
start = singular_basis(G + torch.randn(s, l), r, True, False)
products = {}
for method in ("gram", "subspace"):
    with FlopCounterMode(display=False) as counter:
        singular_basis(G, r, True, False, method, start)
    products[method] = counter.get_total_flops()
assert products["gram"] == 2 * s * s * l
rounds = products["subspace"] // (2 * 2 * s * l * r)
assert 1 <= rounds <= 3
flops = {
    "svd": 6 * l * s**2 + 20 * s**3,
    "gram": products["gram"] + 9 * s**3,
    "subspace": products["subspace"] + rounds * (4 * s * r**2 - 4 * r**3 / 3),
}
seconds = {method: [] for method in flops}
for _ in range(6):  # in turn, so that a busy machine slows all of them
    for method in flops:
        begin = time.perf_counter()
        singular_basis(G, r, True, False, method, start)
        seconds[method].append(time.perf_counter() - begin)
median = {}
for method in flops:
    pairs = zip(seconds["svd"][1:], seconds[method][1:])
    ratios = sorted(a / b for a, b in pairs)
    median[method] = ratios[len(ratios) // 2]
    if method != "svd":
        fewer = flops["svd"] / flops[method]
        print(
            f"{method:8} {fewer:.1f} times fewer operations than svd; measured "
            f"{median[method]:.1f} times faster ({ratios[0]:.1f} to {ratios[-1]:.1f})"
        )
assert median["gram"] > 1.1 and median["subspace"] > 1.5

# %%
# Counts are not seconds: a matrix product runs near the speed of the processor, and a decomposition does not. The
# default of our optimizer is ``gram``.
#
# Why the shorter side?
# ---------------------
#
# Why ``std``, if ``reverse_std`` has the smaller `state <3a_galore_bytes_in_depth.ipynb>`_? A new basis captures the
# same energy on either side, the sum of the leading :math:`\sigma_i^2`, as the table shows. But the long side needs one
# more product and a QR of a longer matrix.
#
# And the shorter side leaves more freedom to later gradients: the step has :math:`r \cdot l` coordinates
# instead of :math:`r \cdot s`. Of a gradient without structure it keeps the share :math:`r / s` instead of
# :math:`r / l`. How well an old basis serves a real gradient differs from matrix to matrix, on both sides.

for name in ("old basis", "old basis, reverse_std"):
    assert max(energies[name]) - min(energies[name]) > 0.05

noise = torch.randn(s, l)
for kind, side in (("std", s), ("reverse_std", l)):
    basis = random_basis(noise, r, *sides((s, l), kind), seed=1)
    share = captured_energy(project(noise, *basis), noise).item()
    print(f"{kind:11} keeps {share:.3f} of noise, r / side {r / side:.3f}")
    assert abs(share / (r / side) - 1) < 0.05

# %%
# How often?
# ----------
#
# **A short gap.** The basis comes on top of the training itself, which needs :math:`6mn` operations for each of N
# tokens. For the MLP matrix counted above and 512 tokens in a step:

s, l, N = 512, 1376, 512
for gap in (1, 20, 200):
    svd, gram = (flops[k] / gap / (6 * s * l * N) for k in ("svd", "gram"))
    print(f"gap {gap:3}: {svd:.1%} more operations by svd, {gram:.1%} by gram")
assert flops["svd"] > 6 * s * l * N > flops["gram"]

# %%
# Exercises
# ---------
#
# 1. *Medium.* Plot the captured energy of one, two and three rounds of subspace iteration, from the old basis and from
#    a random one, for every matrix. A right answer says what matters more here: where the rounds start, or the ratio of
#    :math:`\sigma_r` to :math:`\sigma_{r+1}`. Hint: write the round yourself, with ``torch.linalg.qr``.
#
# Summary
# -------
#
# * The Gram matrix gives the space of an SVD in less time; a few rounds from the old basis kept over 99 per cent of
#   the best energy on every matrix of our run.
# * The shorter side needs less work, and leaves more freedom to later gradients.
#
# Sources
# -------
#
# * `GaLore <https://arxiv.org/abs/2403.03507>`_, Zhao et al., 2024: a basis by SVD, every 200 steps.
# * `Finding Structure with Randomness <https://arxiv.org/abs/0909.4061>`_, Halko, Martinsson and Tropp, 2011:
#   subspace iteration.
# * Golub and Van Loan, *Matrix Computations*, fourth edition, 2013: operation counts.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
