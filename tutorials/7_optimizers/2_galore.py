r"""
GaLore step by step
===================

AdamW keeps two numbers beside every weight, which is twice the memory of the weights. Can the two moments of a weight
matrix be much smaller than the matrix?

GaLore says yes, if gradients point into few directions: keep the moments in the coordinates of these directions. This
page looks at the gradients of a model in training, and builds the optimizer from what it finds.

You will learn
--------------

* how many directions real gradients have, and how this changes during training,
* how a gradient is projected, and in which coordinates Adam then works,
* what the projection types share, and where they differ,
* how long a basis stays good, and what to do with the moments when it changes,
* why GaLore at full rank is not AdamW.

Before you start
----------------

Read the page on `AdamW <1_adamw.ipynb>`_ first. You need matrix products, orthonormal bases and the singular value
decomposition (SVD). One CPU core is enough.

Letters: a weight :math:`W` and its gradient :math:`G` have the shape (m, n), a rank is r. The output size is m, as in
``torch.nn.Linear``.

Real gradients
--------------

The model is a Qwen2 with two blocks, and AdamW trains it on Python's language reference. Three matrices of the
second block keep all their gradients for us: one is square, one is *tall* (m > n), one is *wide* (m < n).
"""

import copy
import inspect
import math
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.adamw import AdamW, adam_direction
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.optim.galore_basis import (
    captured_energy,
    project,
    project_back,
    random_basis,
    rotate_moments,
    sides,
    singular_basis,
)
from lm_from_scratch.text.batches import PackedBatches, write_tokens
from lm_from_scratch.text.corpora import load_split
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.loss import causal_lm_loss

documents, _ = load_split(["reference"], 0.05)
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


steps, losses = 160, []
optimizer = AdamW(model.parameters(), lr=0.003, weight_decay=0.0)
for t in range(steps):
    optimizer.zero_grad()
    loss = loss_of(model, batches[t])
    loss.backward()
    for name, w in weights.items():
        gradients[name].append(w.grad.clone())
    optimizer.step()
    losses.append(loss.item())

gradients = {name: torch.stack(g) for name, g in gradients.items()}
for name, g in gradients.items():
    print(f"{name:10} {tuple(g.shape)}")
print(f"loss {losses[0]:.2f} at first, {sum(losses[-20:]) / 20:.2f} at last")
assert sum(losses[-20:]) / 20 < losses[0] - 1.5

# %%
# How many directions has a gradient?
# -----------------------------------
#
# The SVD writes a matrix as :math:`G = \sum_i \sigma_i u_i v_i^\top`, a sum of outer products with
# :math:`\sigma_1 \ge \sigma_2 \ge \dots` and orthonormal :math:`u_i` and :math:`v_i`. The *energy*
# :math:`\lVert G \rVert^2` is :math:`\sum_i \sigma_i^2`, so that the first r terms hold the share
#
# .. math::
#
#    e_r = \frac{\sigma_1^2 + \dots + \sigma_r^2}{\sigma_1^2 + \dots + \sigma_{\min(m, n)}^2}
#
# These terms are the matrix of rank r that is closest to :math:`G`. Here are the singular values of an attention and an MLP
# gradient, at three steps, and those of the weights after training.


def shares(matrix):
    """The share of energy in the first 1, 2, 3, ... directions."""
    energies = torch.linalg.svdvals(matrix.double()).square()
    return energies.cumsum(-1) / energies.sum(-1, keepdim=True)


def needed(matrix, share=0.9):
    """How many directions hold this share of the energy."""
    return (shares(matrix) < share).sum(-1) + 1


# sphinx_gallery_thumbnail_number = 3
# sphinx_gallery_words = ["low-rank gradient", "GaLoreAdamW", "SVD", "update_proj_gap", "galore_rank", "ReLoRA"]
# sphinx_gallery_museum = ["L6"]
made, axes = figure(6.4, 3.8, columns=2)
for ax, name in zip(axes, ("o_proj", "gate_proj")):
    for t, style in ((1, ":"), (10, "-."), (160, "-")):
        s = torch.linalg.svdvals(gradients[name][t - 1])
        ax.plot(range(1, 65), s / s[0], style, label=f"gradient, step {t}")
    s = torch.linalg.svdvals(weights[name].detach())
    ax.plot(range(1, 65), s / s[0], "--", color=COLOURS[7], label="weight")
    ax.set(title=name, xlabel="i", yscale="log", ylim=(1e-4, 1.5))
axes[0].set_ylabel(r"$\sigma_i \;/\; \sigma_1$")
axes[1].legend(frameon=False, fontsize=8)
plt.show()

print("directions for 90 % of the energy, of 64")
print("           gradient in step               weight   Adam's")
print("              1   10   40   80  160     at last  direction")
table = {}
for name, w in weights.items():
    state = optimizer.state[w]
    d = state["exp_avg"] / state["exp_avg_sq"].sqrt()
    row = [gradients[name][t - 1] for t in (1, 10, 40, 80, 160)]
    table[name] = [needed(x).item() for x in (*row, w.detach(), d)]
    row = "".join(f"{count:5}" for count in table[name][:5])
    print(f"{name:10}{row}{table[name][5]:12}{table[name][6]:11}")

# %%
# The gradients do have few directions, and the weights do not. The history is less simple: the very first gradients of
# the MLP are broad, around step 10 one direction holds 90 per cent, and from then on the number grows again.
#
# The last column is a warning. Adam divides by the size of each entry, which lifts the weak directions. Its direction is
# broader than the gradient, so the share of a gradient that r directions hold is not the share of Adam's step.

for name in weights:
    first, ten, *_, last, weight, direction = table[name]
    assert ten == 1 < last < 24 and weight > last + 5 and direction > last
assert table["gate_proj"][0] > 20 and table["down_proj"][0] > 20

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
counts = {}
for tokens in (1, 2, 4, 8, 16, 32, 64, 192, 768, 3072):
    rows, T = -(-tokens // 64), min(tokens, 64)
    exact.zero_grad()
    logits = exact(idx[:rows, :T])
    causal_lm_loss(logits, targets[:rows, :T]).backward()
    g = layer.weight.grad
    x, dy = seen["x"].flatten(0, 1), seen["dy"].flatten(0, 1)  # (tokens, .)
    torch.testing.assert_close(g, dy.mT @ x)
    counts[tokens] = torch.linalg.matrix_rank(g).item(), needed(g).item()
    assert counts[tokens][0] <= min(tokens, 64)

made, axes = figure(6.4, 3.6, columns=2)
for name, style in (("o_proj", "-"), ("gate_proj", "--")):
    axes[0].plot(range(1, 161), needed(gradients[name]), style, label=name)
axes[0].set(title="During training", xlabel="step", ylabel="directions")
ranks, nineties = zip(*counts.values())
x = list(counts)
axes[1].plot(x, ranks, "o:", color=COLOURS[7], label="rank")
axes[1].plot(x, nineties, "s-", color=COLOURS[1], label="90 % of energy")
axes[1].set(title="By size of the batch", xlabel="tokens", xscale="log")
for ax in axes:
    ax.legend(frameon=False, fontsize=8)
plt.show()

print("tokens        ", *(f"{tokens:5}" for tokens in counts))
print("rank          ", *(f"{rank:5}" for rank in ranks))
print("90 % of energy", *(f"{count:5}" for count in nineties))
assert ranks[-1] == 64 and max(nineties) < 32
assert abs(nineties[-1] - nineties[-3]) < 8

# %%
# With many tokens the rank is full: strictly, the gradient of a real batch has no low rank. But most of its energy stays
# in a part of the directions, and more tokens do not change that. The paper proves a low rank for certain networks; here
# it is an approximation, to be measured.
#
# Project, step, project back
# ---------------------------
#
# Take r orthonormal directions of the rows, as the columns of :math:`Q` of shape (n, r). This is one step of GaLore:

g = gradients["gate_proj"][-1]  # (176, 64)
_, Q = singular_basis(g, rank=16, left=False, right=True)  # (64, 16)

R = g @ Q  # (176, 16)
zeros = torch.zeros_like(R)  # the moments have this shape
direction, m, v = adam_direction(R, zeros, zeros, step=1)  # (176, 16)
update = direction @ Q.mT  # (176, 64)

full_size, small = 2 * g.numel(), m.numel() + v.numel() + Q.numel()
print(f"AdamW keeps {full_size} numbers, GaLore {small}")
assert small < 0.31 * full_size
torch.testing.assert_close(Q.mT @ Q, torch.eye(16), atol=1e-5, rtol=0.0)
assert torch.linalg.matrix_rank(update) <= 16

# %%
# Only the moments are small, and the basis; weight and gradient stay whole. One step changes the weight in r directions,
# and the next basis allows others.
#
# A tall matrix has the shorter basis on its right, a wide one on its left, :math:`P` of shape (m, r), with moments of
# shape (r, n). In general there may be both:
#
# .. math::
#
#    R_t = P^\top G_t \, Q, \qquad d_t = \mathrm{Adam}(R_t), \qquad
#    W_t = (1 - \eta \lambda) \, W_{t-1} - \eta \, \alpha \, P \, d_t \, Q^\top
#
# The factor :math:`\alpha` is the option ``scale``, and the decay does not feel it.
#
# A picture in three dimensions
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Let a gradient have m = 3 rows and 40 columns, and take r = 2. Each column is a point in space, and :math:`P` spans the
# plane that lies closest to all points. Adam sees the two coordinates in the plane. Its first direction is
# :math:`\pm 1` in each coordinate, so that every column goes to one of four corners, and never leaves the plane.

generator = torch.Generator().manual_seed(4)
across = torch.tensor([[1.2, 0.0, -0.1], [0.0, 0.8, -0.15], [0.4, 0.35, 0.25]])
points = across @ (3 * torch.rand(3, 40, generator=generator) - 1.5)  # G
P, _ = singular_basis(points, 2, True, False)  # (3, 2)
low = P.mT @ points  # (2, 40)
flat = P @ low  # (3, 40)
corners = P @ adam_direction(low, 0 * low, 0 * low, 1)[0]

made, (ax,) = figure(5.2, 4.4)
ax.remove()
ax = made.add_subplot(projection="3d")
edge = P @ torch.tensor([[-2.6, 2.6, 2.6, -2.6], [-1.8, -1.8, 1.8, 1.8]])
ax.plot_trisurf(
    *edge.numpy(), triangles=[[0, 1, 2], [0, 2, 3]], color=COLOURS[5], alpha=0.2
)
for a, b in zip(points.T, flat.T):
    ax.plot(*torch.stack([a, b]).T.numpy(), color="#888888", linewidth=0.8)
for x, marker, size, colour, label in (
    (points, "o", 16, COLOURS[0], "columns of G"),
    (flat, "s", 16, COLOURS[1], "projected"),
    (corners, "*", 110, COLOURS[3], "Adam, step 1"),
):
    ax.scatter(*x.numpy(), color=colour, s=size, marker=marker, label=label)
ax.set(xticklabels=[], yticklabels=[], zticklabels=[])
ax.set(xlim=(-2, 2), ylim=(-2, 2), zlim=(-2, 2))
ax.set_box_aspect((1, 1, 1), zoom=1.05)
ax.set_title("A gradient of 3 rows, and its plane", fontsize=10)
ax.legend(frameon=False, fontsize=8, loc="lower left")
ax.view_init(38, -60)
plt.show()

best = shares(points)[1].float()  # the share of two directions
torch.testing.assert_close(captured_energy(low, points), best)
torch.testing.assert_close(P @ (P.mT @ corners), corners)
assert len({tuple(c) for c in corners.T.mul(1e3).round().int().tolist()}) == 4

# %%
# The corners depend on the axes of the plane. Here it is seen from above, with the axes of :math:`P` and with axes
# turned by 30 degrees, which span the same plane. The longest column is sent to two different corners: Adam divides each
# coordinate by that coordinate's own size, so its direction depends on the coordinate system.

c, s = math.cos(math.pi / 6), math.sin(math.pi / 6)
turn = torch.tensor([[c, -s], [s, c]])
ours = low.sign()  # Adam's first direction, without eps
theirs = turn @ (turn.mT @ low).sign()
one = low.norm(dim=0).argmax()  # the longest column

made, (ax,) = figure(5.2, 4.2)
ax.plot(*low.numpy(), "o", color=COLOURS[0], ms=4, label="columns of R")
ax.plot(*ours.numpy(), "*", color=COLOURS[3], ms=13, label="axes of P")
ax.plot(*theirs.numpy(), "D", color=COLOURS[2], ms=8, label="turned axes")
for ends, colour in ((ours, COLOURS[3]), (theirs, COLOURS[2])):
    line = torch.stack([low[:, one], ends[:, one]])
    ax.plot(*line.T.numpy(), color=colour, linewidth=1.2)
ax.set(xlabel="coordinate 1", ylabel="coordinate 2", aspect="equal")
ax.set(ylim=(-2, 2.3))
ax.set_title("Adam's first direction in two systems", fontsize=10)
ax.legend(frameon=False, fontsize=8, loc="upper center", ncols=3)
plt.show()
torch.testing.assert_close(P @ ours, corners, atol=1e-4, rtol=0.0)
assert (ours[:, one] - theirs[:, one]).norm() > 0.3

# %%
# So even at full rank GaLore is not AdamW. With a fixed basis it is Adam on the rotated weight :math:`W Q`. We feed the
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
# Six ways to choose a basis
# --------------------------
#
# ``left`` has :math:`P`, ``right`` has :math:`Q`, ``full`` has both. ``std`` takes the shorter side and ``reverse_std``
# the longer one. ``random`` takes random directions of the shorter side, and needs no SVD at all. Each line of the table
# gives the shape of the moments and the captured share :math:`\lVert R \rVert^2 / \lVert G \rVert^2`, of the gradient in
# step 140, from which the basis is made, and of the next.

rank, kinds = 16, ("std", "reverse_std", "left", "right", "full", "random")
captured = {}
print(f"{'':12}" + "".join(f"{name:^22}" for name in gradients))
for kind in kinds:
    line = f"{kind:12}"
    for name, every in gradients.items():
        g, following = every[139], every[140]
        left, right = sides(g.shape, kind)
        if kind == "random":
            basis = random_basis(g, rank, left, right, seed=0)
        else:
            basis = singular_basis(g, rank, left, right, "svd")
        low = project(g, *basis)
        now = captured_energy(low, g).item()
        later = captured_energy(project(following, *basis), following).item()
        captured[kind, name] = now, later
        line += f"  {tuple(low.shape)!s:9}{now:5.2f}{later:6.2f}"
        if kind != "random":
            U, s, Vh = torch.linalg.svd(g, full_matrices=False)
            U, s, Vh = U[:, :rank], s[:rank], Vh[:rank]
            closed = U @ U.mT @ g if left else g
            closed = closed @ Vh.mT @ Vh if right else closed
            for same in (project_back(low, *basis), U * s @ Vh):
                torch.testing.assert_close(same, closed, atol=1e-6, rtol=1e-3)
    print(line)

# %%
# The code checked the closed forms :math:`U U^\top G` for ``left``, :math:`G V V^\top` for ``right`` and
# :math:`U U^\top G \, V V^\top` for ``full``. On the gradient that made the basis they are one matrix, the first 16
# terms of the SVD: all five types capture the same share there.
#
# They part at the next gradient. What ``full`` captures is inside of what each side captures, so it loses most. In this
# run ``std`` kept more than ``reverse_std`` for all three matrices; a square one counts as tall. A random basis captures
# r out of 64 on average, now and later, because the mean of :math:`Q Q^\top` over such bases is :math:`r / 64` times the
# identity.

for name in gradients:
    now, later = zip(*(captured[kind, name] for kind in kinds[:5]))
    assert max(now) - min(now) < 1e-4 and later[0] < now[0]
    assert later[0] > later[1] and later[4] < min(later[2:4])
g, total = gradients["down_proj"][139], 0.0
for seed in range(100):
    basis = random_basis(g, rank, True, False, seed)
    total += captured_energy(project(g, *basis), g).item()
print(f"random, mean of 100: {total / 100:.3f}, r / 64 = {rank / 64}")
assert abs(total / 100 - rank / 64) < 0.03

# %%
# The optimizer
# -------------
#
# In the package's ``GaLore``, ``low_gradient`` projects, and makes a basis when one is due. ``update_projected`` takes
# Adam's step from there, and ``move`` turns it back into a matrix. (``coordinates`` is ``project``.)

for method in (GaLore.low_gradient, GaLore.update_projected, GaLore.move):
    print(inspect.getsource(method))

# %%
# Four steps by hand, with a new basis every second step and moments that stay as they are, end at the same weight.

p = nn.Parameter(start["gate_proj"].clone())
optimizer = GaLore([p], lr=0.01, weight_decay=0.1, rank=4, update_proj_gap=2)
W, m, v = p.detach().clone(), torch.zeros(176, 4), torch.zeros(176, 4)
for t in range(4):
    p.grad = gradients["gate_proj"][40 + t]
    optimizer.step()
    if t % 2 == 0:
        _, Q = singular_basis(p.grad, 4, False, True, "gram")
    direction, m, v = adam_direction(p.grad @ Q, m, v, t + 1)
    W = (1 - 0.01 * 0.1) * W - 0.01 * 0.25 * direction @ Q.mT
torch.testing.assert_close(p.detach(), W)
for name, tensor in optimizer.state[p].items():
    print(f"{name:11}{tuple(tensor.shape)}")

# %%
# How long does a basis stay good?
# --------------------------------
#
# Between two bases the gradient moves on. We make a basis in every fifth step from step 21 to 56, and follow what it
# captures of the gradients that come after.


def old_and_new(every, ages):
    """The mean captured share of gradients that are 0, 1, ... steps younger."""
    left, right = sides(every[0].shape, "std")
    table = []
    for t in range(20, 60, 5):
        basis = singular_basis(every[t], rank, left, right)
        later = [every[t + age] for age in ages]
        table.append([captured_energy(project(g, *basis), g) for g in later])
    return torch.tensor(table).mean(0)


ages = range(0, 101, 2)
made, (ax,) = figure(6.4, 3.8)
at_once = {}
for (name, every), style in zip(gradients.items(), ("-", "--", "-.")):
    line = old_and_new(every, ages)
    ax.plot(ages, line, style, label=name)
    assert line[0] > 0.9 and line[10] > line[50] > rank / 64 + 0.1
    at_once[name] = (line[0] - line[1]).item()  # within two steps
assert max(at_once, key=at_once.get) == "down_proj"
ax.axhline(rank / 64, color=COLOURS[7], ls=":", label="random basis")
ax.set(xlabel="age of the basis (steps)", ylabel="captured share", ylim=(0, 1))
ax.set_title(f"A basis of rank {rank} grows old")
ax.legend(frameon=False)
plt.show()

# %%
# Even after 100 steps all three capture more than random directions do. But ``down_proj`` loses most at once. Is that age?
# We take four batches and the trained model, without a step between them: each basis meets the gradients of the other
# three.

others = {name: [] for name in weights}
for i in range(4):
    model.zero_grad()
    loss_of(model, batches[steps + i]).backward()
    for name, w in weights.items():
        others[name].append(w.grad.clone())

for name, every in others.items():
    left, right = sides(every[0].shape, "std")
    bases = [singular_basis(g, rank, left, right) for g in every]
    table = torch.tensor(
        [[captured_energy(project(g, *b), g) for g in every] for b in bases]
    )
    own, other = table.diagonal().mean(), (table.sum() - table.trace()) / 12
    print(f"{name:10} own batch {own:.2f}   another batch {other:.2f}")
    assert own > other + (0.1 if "down" in name else 0.0)

# %%
# So there are two losses. A basis fits the noise of its own batch, and pays at the very next gradient. The other loss is
# slow, and is the one that a new basis cures.
#
# When to make a new one
# ~~~~~~~~~~~~~~~~~~~~~~
#
# The paper waits a fixed number of steps, ``update_proj_gap``, 200 by default. Q-GaLore gives each layer a gap of its
# own, longer where the basis hardly turns. Our option ``max_drift`` makes a new basis as soon as the captured share has
# fallen by this part of what it was at first.
#
# The recorded gradients go through an optimizer with each rule. The table counts bases and gives the mean captured share
# over all 160 steps.

rules = {
    "one basis": dict(update_proj_gap=None),
    "gap 40": dict(update_proj_gap=40),
    "gap 10": dict(update_proj_gap=10),
    "drift 0.5": dict(update_proj_gap=None, max_drift=0.5),
    "drift 0.3": dict(update_proj_gap=None, max_drift=0.3),
}
results = {}
print(f"{'':11}" + "".join(f"{name:>15}" for name in gradients))
for rule, options in rules.items():
    line = f"{rule:11}"
    for name, every in gradients.items():
        p = nn.Parameter(torch.zeros_like(every[0]))
        optimizer = GaLore([p], rank=rank, **options)
        state, total = optimizer.state, 0.0
        for g in every:
            p.grad = g
            optimizer.step()
            low = project(g, state[p].get("left"), state[p].get("right"))
            total += captured_energy(low, g).item() / steps
        results[rule, name] = int(state[p]["bases"]), total
        line += f"{results[rule, name][0]:9}{total:6.2f}"
    print(line)

# %%
# The first basis is a poor one to keep: the figures above show how different the first gradients are. For ``o_proj`` and
# ``gate_proj`` a drift of 0.3 makes few bases, and captures far more than the first one alone.
#
# For ``down_proj`` it makes a basis in every second step or so. The rule compares with the basis's own gradient, and
# so takes the noise of the batch for drift. The number for ``max_drift`` has to leave room for it.

for name in gradients:
    assert results["gap 10", name][1] > results["one basis", name][1] + 0.1
for name in ("o_proj", "gate_proj"):
    assert results["drift 0.3", name][0] < 13
    gained = results["drift 0.3", name][1] - results["one basis", name][1]
    assert gained > 0.08
assert 60 < results["drift 0.3", "down_proj"][0] < 100

# %%
# The moments, when the basis changes
# -----------------------------------
#
# A new basis gives new meanings to the columns of the moments. The paper *keeps* the numbers all the same (bug museum: L6), and a reader
# asked `why they are not projected anew <https://github.com/jiaweizzhao/GaLore/issues/54>`_. An experiment shows
# what happens to the first moment. The gradient is constant but for a little noise, has rank 2 and two equal singular
# values, so that every new basis is another one of the same plane.

generator = torch.Generator().manual_seed(0)
a = torch.linalg.qr(torch.randn(12, 2, generator=generator)).Q
b = torch.linalg.qr(torch.randn(9, 2, generator=generator)).Q
true = a @ b.mT  # (12, 9), singular values 1 and 1
noisy = true + 0.01 * torch.randn(100, 12, 9, generator=generator)

made, (ax,) = figure(6.4, 3.6)
worst = {}
for choice, method, style in (
    ("keep", "gram", ":"),
    ("rotate", "gram", "-"),
    ("reset", "gram", "--"),
    ("keep", "subspace", "-."),
):
    p = nn.Parameter(torch.zeros(12, 9))
    optimizer = GaLore(
        [p], rank=2, update_proj_gap=10, moments=choice, basis=method
    )
    cosines = []
    for g in noisy:
        p.grad = g
        optimizer.step()
        state = optimizer.state[p]
        mean = project_back(state["exp_avg"], None, state["right"])
        cosines.append(torch.cosine_similarity(mean.view(-1), true.view(-1), 0))
    label = choice if method == "gram" else f"{choice}, {method}"
    worst[label] = min(cosines).item()
    ax.plot(range(1, 101), cosines, style, label=label)
    print(f"{label:15} worst cosine {worst[label]:.4f}")
ax.set(xlabel="step", ylabel="cosine of momentum and gradient")
ax.set_title("Moments at a new basis, every 10 steps")
ax.legend(frameon=False)
plt.show()
assert worst["keep"] < 0.5
assert worst["rotate"] > 0.998 and worst["reset"] > 0.998
assert worst["keep, subspace"] > 0.99

# %%
# Kept moments point into a wrong direction after a change, until newer gradients outweigh them. The memory of the first
# is :math:`1 / (1 - \beta_1) = 10` steps, that of the second :math:`1 / (1 - \beta_2) = 1000`, more than the usual gap.
#
# The fourth line keeps its moments too. Its bases are made by subspace iteration, which starts from the old basis and
# turns it only as far as the gradient asks; the next page has the details. Column 1 stays near column 1, and what is
# kept keeps its meaning.
#
# Turning them
# ~~~~~~~~~~~~
#
# The first moment stands for the matrix :math:`P_{old} \, m`. Its coordinates in the new basis are
#
# .. math::
#
#    m' = P_{new}^\top P_{old} \, m = C m
#
# and nothing is lost if the new basis spans what the old one did. The second moment is a mean of squares. Coordinate i of
# the new basis is :math:`x'_i = \sum_j C_{ij} x_j`. If the old coordinates are uncorrelated, variances add up with the
# squares of the factors, and a mean square is the variance plus the squared mean:
#
# .. math::
#
#    v'_i = \sum_j C_{ij}^2 (v_j - m_j^2) + \Big( \sum_j C_{ij} m_j \Big)^2
#
# LDAdam does this. The assumption is its weak point: v does not say how two coordinates vary together. Many samples show
# where the formula holds.

C = torch.linalg.qr(torch.randn(3, 3, generator=generator)).Q
noise = torch.randn(3, 200_000, generator=generator)
mean = torch.tensor([[1.0], [-0.5], [0.2]])
mixed = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.1, 0.0], [0.3, 0.0, 0.1]])
errors = {}
for name, mix in (("uncorrelated", mixed.diag().diag()), ("correlated", mixed)):
    x = mean + mix @ noise  # samples of three coordinates
    m, v = x.mean(1, keepdim=True), x.square().mean(1, keepdim=True)
    m, v = rotate_moments(m, v, (torch.eye(3), None), (C.mT, None))
    turned = C @ x
    torch.testing.assert_close(m[:, 0], turned.mean(1), atol=1e-4, rtol=1e-4)
    ratio = v[:, 0] / turned.square().mean(1)
    errors[name] = (ratio - 1).abs().max().item()
    print(f"{name:13} largest relative error of v: {errors[name]:.3f}")
assert errors["uncorrelated"] < 0.02 and errors["correlated"] > 0.2

# %%
# The third choice, ``reset``, starts from zero, with the step count. Its next direction is :math:`\pm 1` everywhere, like
# that of the first step of all. What the choice does to a loss is a question for the next page.
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
# In float32 with the usual :math:`\epsilon`, 240 entries of the first direction are made of noise, beside 16 that mean
# something. The SVD and the eigenvectors of :math:`G G^\top`, two correct methods, then disagree about the first step. A
# larger :math:`\epsilon` or float64 removes the noise. The next gradients are not diagonal in this basis, so that the
# trap is only there in the first step and after ``reset``.
#
# One basis has the same trap when the gradient has fewer directions than the basis: a batch of few tokens, as above.
# The coordinates along the other directions should be zero.
#
# Our optimizer takes the noise away: in a new basis, it sets to zero what is below 100 roundings of the largest, entries
# with two bases, whole directions with one. Its first steps by the two methods then agree in float32.

U, S, Vh = torch.linalg.svd(g, full_matrices=False)
few_tokens = U[:, :2] @ S[:2].diag() @ Vh[:2]  # rank 2 of 16
for kind, gradient in (("full", g), ("std", few_tokens)):
    firsts = []
    for method in ("svd", "gram"):
        p = nn.Parameter(torch.zeros_like(g))
        p.grad = gradient
        GaLore([p], rank=rank, projection_type=kind, basis=method).step()
        firsts.append(p.detach())
    differs = (firsts[0] - firsts[1]).norm() / firsts[0].norm()
    print(f"{kind}: the optimizer's first steps differ by {differs:.0e}")
    assert differs < 1e-2
print(f"std, rank of the first step: {torch.linalg.matrix_rank(firsts[0])}")
assert torch.linalg.matrix_rank(firsts[0]) == 2

# %%
# Bug museum
# ----------
#
# L1, L2: moments of the full shape
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The GaLore of ``pytorch_optimizer`` 3.1.2 made its moments like the weight and fed them the projected gradient. Here is
# the same mistake, for a weight of shape (8, 5).


def broken_step(g, rank):
    _, Q = singular_basis(g, rank, False, True)
    exp_avg = torch.zeros_like(g)  # fixed: zeros_like(g @ Q)
    exp_avg.mul_(0.9).add_(g @ Q, alpha=0.1)
    return exp_avg @ Q.mT


g = torch.randn(8, 5, generator=generator)
for rank, words in ((1, "8x5 and 1x5"), (3, "must match"), (5, "no error")):
    try:
        broken_step(g, rank)
        outcome = "no error"
    except RuntimeError as error:
        outcome = str(error)
    print(f"rank {rank}: {outcome}")
    assert words in outcome

# %%
# At full rank it runs, and saves nothing. At rank 1 broadcasting hides the mistake until the projection back, which then
# gets the blame. The check asks for the shape of the state at a rank between, in both orientations.

for shape, low_shape in (((8, 5), (8, 3)), ((5, 8), (3, 8))):
    p = nn.Parameter(torch.zeros(shape))
    p.grad = torch.randn(shape, generator=generator)
    optimizer = GaLore([p], rank=3)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].shape == low_shape

# %%
# L3: back with the wrong transpose
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The same code projected back with :math:`Q` where :math:`Q^\top` belongs. The product of (8, 3) and (5, 3) does not exist,
# so this fails at once, except when :math:`Q` is square.

g = torch.randn(6, 6, generator=generator)
_, Q = singular_basis(g, 6, False, True)
right, wrong = g @ Q @ Q.mT, g @ Q @ Q
print(f"right: error {(right - g).abs().max():.0e}", end="   ")
print(f"wrong: error {(wrong - g).abs().max():.1f}")
assert (right - g).abs().max() < 1e-5 and (wrong - g).abs().max() > 0.5
torch.testing.assert_close(wrong.norm(), g.norm())

# %%
# The shape is right, and so is the norm. A test with a square matrix at full rank must compare numbers: with all
# directions in the basis, there and back is the identity. A relative of this defect, the side guessed from a projected
# shape that happens to be square, was found in `another copy of the code <https://github.com/modelscope/ms-swift/pull/10146>`_.
#
# L11: a slice that keeps the whole factor
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The first columns of :math:`U` are a view. As long as the optimizer holds it, the whole factor stays in memory.

g = torch.randn(512, 256, generator=generator)
U, _, _ = torch.linalg.svd(g, full_matrices=False)
for name, basis in (("slice", U[:, :8]), ("clone", U[:, :8].clone())):
    needs, keeps = basis.nbytes, basis.untyped_storage().nbytes()
    print(f"{name}: needs {needs} bytes, keeps {keeps}")
    assert keeps == needs * (32 if name == "slice" else 1)

# %%
# ``numel`` and ``nbytes`` do not see it. The check is the line above: for every tensor in the state, the storage is no
# larger than its numbers.
#
# Which sentence is false?
# ------------------------
#
# 1. At full rank GaLore is AdamW.
# 2. What GaLore changes in a weight has at most rank r.
# 3. A basis captures at least as much of its own gradient as any other basis of that rank does.
# 4. With momentum instead of Adam, projecting at full rank changes nothing.
#
# Sentences 1 and 4 were tried above. For the second, decay is off, the rank is 2, and each basis serves two steps. The
# third is tried with the bases of other steps.

p = nn.Parameter(torch.zeros(176, 64))
optimizer = GaLore([p], weight_decay=0.0, rank=2, update_proj_gap=2)
every, ranks = gradients["gate_proj"].double(), []
for g in every[60:66]:
    p.grad = g.float()
    optimizer.step()
    ranks.append(torch.linalg.matrix_rank(p.detach()).item())
print("rank of the change after each step", ranks)
assert ranks == [2, 2, 4, 4, 6, 6]

for t in range(20, 160, 10):
    basis = singular_basis(every[t], 16, False, True)
    other = captured_energy(project(every[60], *basis), every[60])
    assert other < shares(every[60])[15] + 1e-6

# %%
# Sentences 1 and 2 are false. Adam at full rank works in rotated coordinates, and the change of a weight gains rank with
# every basis: all weights are trained, a few directions at a time.
#
# Exercises
# ---------
#
# 1. *Easy.* Repeat the table of directions for ``q_proj`` of the first block and for the embedding. A right answer says
#    for which of them rank 16 captures 90 per cent in step 160. Hint: record two more gradients.
# 2. *Easy.* Make bases from the mean of four successive gradients, and draw the figure of ages again. A right answer
#    says for which matrix this helps, and names what it costs: a full gradient that is held.
# 3. *Medium.* Write ``rotate_moments`` with correlations: keep the whole matrix of second moments of one column. A right
#    answer has no error in both lines of the experiment, and says why the memory rules it out.
# 4. *Hard.* Correct the optimism of ``max_drift``: let ``energy`` be the share at age 1 instead of age 0. A right answer
#    makes far fewer bases for ``down_proj`` at 0.3, and says what the other two matrices lose. Hint: override
#    ``low_gradient``; at age 0 and 1 the comparison has to wait, so let ``energy`` be tiny until then.
#
# Summary
# -------
#
# * In our run, fewer than 24 of 64 directions held 90 per cent of a gradient's energy at the end, and the weights needed
#   more. Strictly the rank is full as soon as there are enough tokens.
# * GaLore projects, lets Adam work on the small matrix, and projects back. At rank 16 our tall matrix needed less than
#   31 per cent of AdamW's numbers, basis included.
# * Adam depends on the coordinates. GaLore at full rank is Adam in rotated ones, to 1e-6; momentum alone does not care.
# * All types capture the same of their own gradient, and not of the next. Here ``std`` kept more than ``reverse_std``.
# * A basis loses a part at once, to the noise of its batch, and the rest slowly. Gradients of the first steps make a poor
#   basis to keep.
# * At a new basis kept moments may point the wrong way; in our experiment, turned ones have a cosine above 0.998 with the
#   gradient.
# * With two bases, rounding noise fills the first step in float32.
#
# What does this save in a whole model, what does a basis cost, and what does the loss say? The next page, GaLore in
# training, counts and measures.
#
# Sources
# -------
#
# * Zhao et al.: `GaLore <https://arxiv.org/abs/2403.03507>`_, 2024. The method, and the theorem on low rank.
# * Robert et al.: `LDAdam <https://arxiv.org/abs/2410.16103>`_, 2025. Moments turned into the new basis.
# * Zhang et al.: `Q-GaLore <https://arxiv.org/abs/2407.08296>`_, 2024. Gaps that differ from layer to layer.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
folder.cleanup()
