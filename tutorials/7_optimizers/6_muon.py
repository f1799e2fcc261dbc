r"""
Muon: one step size for every direction
=======================================

AdamW sees a weight matrix as a heap of numbers, and gives each number a step of its own size. But a matrix does
something: it turns one vector into another. Its gradient says in which *directions* this should change.

The shipped GPT-2 reads 16 pieces of Python's documentation. Here is the gradient of one matrix, taken apart into its
128 directions, from the strongest to the weakest, and what two optimizers make of it.
"""

# sphinx_gallery_needs = ["3_galore_training"]
# sphinx_gallery_words = ["Newton-Schulz", "orthogonalized momentum", "torch.optim.Muon", "zeropower_via_newtonschulz5", "Muon vs AdamW", "Shampoo", "msign", "Moonlight", "Kimi K2 optimizer", "MuonClip", "better than Adam", "orthogonalise the update", "matrix optimizer", "orthogonal update", "orthogonalize gradient", "newest optimizer", "modern optimizer", "optimizer of nanoGPT speedrun", "which parameters for Muon", "faster than AdamW", "best optimizer", "spectral norm", "singular values of the update"]
import matplotlib.pyplot as plt
import torch

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.optim.muon import orthogonalize
from lm_from_scratch.text.corpora import load_corpus
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss

documents = load_corpus("reference")
gpt2, tokenizer = load_shipped("gpt2-docs")
texts = [tokenizer.start(d.text[:1000])[:128] for d in documents]
idx = torch.tensor([ids for ids in texts if len(ids) == 128][:16])  # (B, T)
causal_lm_loss(gpt2(idx), next_token_targets(idx)).backward()
G = gpt2.transformer.h[3].mlp.c_fc.weight.grad  # (512, 128)

steps = {"the gradient": G, "AdamW": G.sign(), "Muon": orthogonalize(G)}
strength = {name: torch.linalg.svdvals(step) for name, step in steps.items()}

_, (ax,) = figure(4.8, 3.4)
for j, (label, values) in enumerate(strength.items()):
    line, colour = ("-", "--", "-.")[j], COLOURS[(3, 1, 0)[j]]
    ax.semilogy(
        range(1, 129), values / values[0], line, color=colour, label=label
    )
ax.set(title="Strength of 128 directions", xlabel="direction")
ax.set(ylabel="strength, the first = 1")
ax.legend(frameon=False)
plt.show()
assert strength["the gradient"][0] > 50 * strength["the gradient"][-2]
assert strength["the gradient"][0] > 1000 * strength["the gradient"][-1]
assert strength["AdamW"][0] > 10 * strength["AdamW"][-1]
assert (strength["Muon"] > 0.6).sum() > 100
assert strength["Muon"][-2] > 0.5 * strength["Muon"][0]

# %%
# In the gradient the first direction is more than fifty times as strong as the last but one, and the last hardly
# counts. AdamW divides each number by its usual size, so its first step is the sign of each number; there the factor is
# still more than ten. Muon's step is nearly flat. (Only the last direction is too weak.)
#
# What a direction is
# -------------------
#
# Every matrix is a sum of *directions*. Each has an input vector v, an output vector u, both of length 1, and a
# strength s: "if the input points along v, add s times u to the output". The strengths are called *singular values*,
# and ``torch.linalg.svd``, the *singular value decomposition*, finds all three. The optimizer `GaLore
# <2_galore.ipynb>`_ keeps the strongest few directions. **Muon** keeps all, and sets every strength to 1. (The code
# adds up all directions, and compares with G.)

u, s, vh = torch.linalg.svd(G, full_matrices=False)
exact = u @ vh  # without the strengths
print((G - (u * s) @ vh).abs().max() < 1e-6)

torch.testing.assert_close(
    torch.linalg.svdvals(exact), torch.ones(128), atol=1e-4, rtol=0.0
)
torch.testing.assert_close((u * s) @ vh, G, atol=1e-6, rtol=1e-4)

# %%
# Why should that help? One guess: the strong directions are what all texts have in common, and the model learns them in
# a few steps. What is left to learn is rare, and hides in the weak ones.
#
# Five lines instead of a decomposition
# -------------------------------------
#
# A decomposition of every matrix in every step is slow. There is a trick, the *Newton-Schulz iteration*. Multiply a
# matrix X with :math:`X X^\top`: the product has the same u and v, and each strength x has become :math:`x^3`. So if we
# build a polynomial from X, we apply it to each strength alone. We need a polynomial that leads to 1.
#
# **Predict first.** Replace x by :math:`1.5 x - 0.5 x^3`, again and again. Where does x = 0.1 go?
#
# * to 0, because :math:`x^3` is tiny
# * to 1
# * without end, because it grows by half each time

x = 0.1
for _ in range(10):
    x = 1.5 * x - 0.5 * x**3
    print(f"{x:.3f}", end="  ")

assert abs(x - 1) < 1e-3

# %%
# To 1. A small x grows by half each time, and at 1 the two terms balance.
#
# But ten rounds are many. Muon's inventor, Keller Jordan, searched for coefficients that lift small numbers faster, 3.4
# times in each round. The price: they never settle at exactly 1. Here is x after one, two and five rounds.


def lift(x, rounds, a=3.4445, b=-4.7750, c=2.0315):
    for _ in range(rounds):
        x = a * x + b * x**3 + c * x**5
    return x


before = torch.linspace(0, 1, 1001)
_, (ax,) = figure(4.8, 3.2)
for k, line in ((1, ":"), (2, "--"), (5, "-")):
    ax.plot(before, lift(before, k), line, color=COLOURS[0], label=k)
ax.axhspan(0.68, 1.14, color=COLOURS[2], alpha=0.25, linewidth=0)
ax.set(title="Strength before and after", xlabel="x", ylabel="after")
ax.legend(title="rounds", frameon=False)
plt.show()
assert lift(before[10:], 5).min() > 0.68 and lift(before[10:], 5).max() < 1.14

# %%
# After five rounds everything from 0.01 to 1 has become a number between 0.68 and 1.14. That is near enough. On
# matrices, the five lines are:


def newton_schulz(G, a=3.4445, b=-4.7750, c=2.0315):
    X = G / G.norm()  # now all strengths are at most 1
    for _ in range(5):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X


# %%
# There is hardly anything in them but matrix products, which every processor does best. A tall matrix is transposed
# first, so that ``A`` is small.

found = newton_schulz(G.T).T
print("like the exact one:", torch.cosine_similarity(*(found, exact), 0).mean())

torch.testing.assert_close(found, orthogonalize(G), atol=1e-4, rtol=1e-3)

# %%
# The whole step
# --------------
#
# Muon first averages the gradients over the steps, as Adam does, and makes this *average* flat. Then it multiplies by a
# number that depends on the shape alone. With 0.2 times the root of the longer side, each weight moves about as far as
# in AdamW.


def muon(w, g, state, lr, decay=0.1, beta=0.95):
    m = state["m"] = beta * state.get("m", 0) + (1 - beta) * g
    ahead = beta * m + (1 - beta) * g  # Nesterov: as if g came once more
    tall = len(g) > len(g.T)
    flat = newton_schulz(ahead.T).T if tall else newton_schulz(ahead)
    return (1 - lr * decay) * w - lr * 0.2 * max(g.shape) ** 0.5 * flat


# %%
# We compare five steps with those of PyTorch's Muon, which rounds to bfloat16 on the way.

w, state = torch.zeros(64, 32), {}
p = torch.nn.Parameter(torch.zeros(64, 32))
theirs = torch.optim.Muon([p], lr=0.01, adjust_lr_fn="match_rms_adamw")
for _ in range(5):
    p.grad = torch.randn(64, 32)
    w = muon(w, p.grad, state, lr=0.01)
    theirs.step()
print("difference:", (w - p.data).norm() / w.norm())

assert (w - p.data).norm() < 0.02 * w.norm()

# %%
# Look at the state: one number for each weight. AdamW keeps two, so Muon needs half of its memory.
#
# Only matrices, and not all of them
# ----------------------------------
#
# A bias or the weight of a norm is a vector, and has no directions. The embedding is a matrix, but nothing is
# multiplied with it: each token takes its own row. In the `lesson on AdamW <1_adamw.ipynb>`_ the gradients of two of
# its rows, ``␣the`` and ``␣mail`` (``␣`` is a space), differed by a factor of more than 1000. AdamW makes their steps
# equal.
#
# **Predict first.** What does Muon make of them?
#
# * It makes them equal, too.
# * The factor stays above 1000.

table = gpt2.transformer.wte.weight.grad  # (V, C)
step = orthogonalize(table)
rows = [tokenizer.encode(word)[0] for word in (" the", " mail")]
for name, x in (("gradient", table), ("Muon", step)):
    the, mail = x[rows].square().mean(-1).sqrt()
    print(f"{name:9} the {the:.1e}  mail {mail:.1e}  factor {the / mail:.0f}")
    assert the > 1000 * mail

# %%
# The factor stays above 1000. The *directions* have equal strength now, but a direction is a mixture of rows, and
# ``␣mail`` has hardly any part in any of them.
#
# So the row of a rare word would hardly move. Embedding, output head, norms and biases stay with AdamW, and Muon takes
# the matrices of attention and MLP.
#
# The race
# --------
#
# A Qwen2 of one block learns Python's language reference, three times with each optimizer. The three runs differ in
# their first weights and in the order of the text.

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.optim.muon import Muon
from lm_from_scratch.text.batches import (
    PackedBatches,
    sequential_batches,
    write_tokens,
)
from lm_from_scratch.text.corpora import split
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.train import (
    Schedule,
    evaluate,
    learning_rate,
    optimizer_step,
)

read, unread = split(documents)
small = Tokenizer.train([d.text for d in read[:40]], 512)
folder = TemporaryDirectory()
train_path, test_path = (Path(folder.name) / f"{i}.bin" for i in range(2))
train_file = write_tokens(read[:40], small, train_path)
held_out = list(
    sequential_batches(write_tokens(unread, small, test_path), 16, 64)
)[:3]
sizes = dict(n_layer=1, n_head=4, n_kv_head=2, n_embd=64)
config = Qwen2Config(
    vocab_size=512, block_size=64, intermediate_size=192, **sizes,
    rope_theta=10000.0, eos_token_id=None,
)  # fmt: skip

# %%
# As in `GaLore in training <3_galore_training.ipynb>`_, a run has two learning rates: one for the matrices, and
# ``others`` for the embedding and the norms, which AdamW trains in every run.


def run(kind, lr, others=0.128, seed=1, steps=60, **options):
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p not in {*matrices}]
    groups = [{"params": matrices, **options}, {"params": rest}]
    optimizer = kind(groups, betas=(0.9, 0.95), weight_decay=0, fused=True)
    schedule = Schedule(steps=steps, lr=1.0, min_lr=0.1, warmup=10)
    batches = PackedBatches(train_file, 6, 64, seed)
    start = time.process_time()
    for step in range(1, steps + 1):
        for group, rate in zip(optimizer.param_groups, (lr, others)):
            group["lr"] = rate * learning_rate(step, schedule)
        optimizer_step(model, optimizer, [batches[step - 1]])
    return evaluate(model, held_out), (time.process_time() - start) / steps


# %%
# The rates come from a search, with longer runs and other first weights. Muon's step takes longer, because of the
# iteration. So AdamW gets a second chance, with a fifth more steps.
#
# **Predict first.** Which one has the lowest loss on text that no run has read?
#
# * AdamW
# * AdamW with more steps
# * GaLore
# * Muon

kinds = {
    "AdamW": dict(kind=AdamW, lr=0.008),
    "AdamW, 72 steps": dict(kind=AdamW, lr=0.008, steps=72),
    "GaLore, rank 8": dict(
        kind=GaLore, lr=0.016, rank=8, scale=1.0, update_proj_gap=20
    ),
    "Muon": dict(kind=Muon, lr=0.032, momentum=0.95),
}
runs = {
    name: torch.tensor([run(seed=s, **kind) for s in (1, 2, 3)])
    for name, kind in kinds.items()
}
folder.cleanup()
adamw, longer, galore, muons = (results[:, 0] for results in runs.values())
for name, results in runs.items():
    loss, seconds = results.mean(0)
    print(f"{name:16} loss {loss:.2f}   {1e3 * seconds:.0f} ms a step")

_, (ax,) = figure(4.8, 2.6)
for j, points in enumerate(runs.values()):
    ax.plot(points[:, 0], 3 * [j], "os^D"[j], color=COLOURS[(1, 1, 2, 0)[j]])
ax.set(title="Held-out loss, three seeds", xlabel="loss")
ax.set_yticks(range(4), [*runs])
ax.set_ylim(3.5, -0.5)
plt.show()
assert (muons < longer).all() and (longer < adamw).all()
assert muons.mean() < longer.mean() - 0.05 and (galore > adamw).all()

# %%
# Muon, with every seed, and also against the longer runs of AdamW. GaLore is last: with an eighth of the directions it
# saves memory, not steps.
#
# Look at the rates, too. In AdamW and Muon the rate says how far a weight moves, and Muon's best is four times AdamW's.
# But be careful with a race like this one. It says who is ahead after 60 steps of a tiny model, not who wins in the
# end.
#
# What it costs
# -------------
#
# Muon computes five rounds of three products, for every matrix in every step, whether the batch is small or large. Here
# it takes some time. In a large model with millions of tokens in a batch it is less than one percent of the work. Kimi
# K2, a model with a trillion weights, was trained with a variant of Muon. `Muon in depth <6a_muon_in_depth.ipynb>`_
# counts the work and the memory, and says when Muon does not help.
#
# In the package it is one option, ``--optimizer muon``. A second one, ``--muon-scale``, is the factor between the rate
# of the matrices and ``--lr``.
#
# Exercises
# ---------
#
# 1. *Easy.* Run Muon with AdamW's rate, and AdamW with Muon's. A good answer says what a comparison at one rate for
#    both would have claimed, in each case.
# 2. *Easy.* Apply ``lift`` with 1, 3, 5 and 10 rounds to x = 0.001. A good answer says how many rounds this direction
#    needs to come near 1, and how much it grows in each of the first rounds. Hint: look at ``a``.
# 3. *Medium.* Let Muon take the embedding as well: put it among the matrices in ``run``. A good answer compares three
#    seeds, and how far the rows of frequent and of rare tokens have moved. Hint: keep a copy of the first weights.
#
# Summary
# -------
#
# * A gradient has a few strong directions and many weak ones. Muon gives nearly all of them the same strength.
# * Five rounds of a polynomial do that with matrix products alone. A round lifts a weak direction by a factor of 3.4.
# * Muon is for the matrices of attention and MLP. All else stays with AdamW. Search for the best rate of each.
