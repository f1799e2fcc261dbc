r"""
GaLore: Adam with a third of its state
======================================

AdamW needs four numbers for every weight: the weight, its gradient, and the two *moments* m and v, which it keeps until
the next step. For Llama 7B, at two bytes a number, that is 54 GB. **GaLore** shrinks the moments. Two more ideas, one on
top of the other, bring training down to one consumer card:
"""

# sphinx_gallery_needs = ["1_adamw"]
# sphinx_gallery_words = ["low-rank gradient", "GaLoreAdamW", "galore_adamw", "optim_target_modules", "galore_rank", "update_proj_gap", "subspace switching", "7B on 24 GB", "RTX 4090", "GaLore explained", "train with less memory", "optimizer memory", "memory-efficient full fine-tuning", "full fine-tuning on one GPU", "full-parameter training", "alternative to LoRA", "not LoRA", "consumer GPU", "gaming GPU", "project the gradient", "singular value decomposition", "SVD", "low-rank training", "pretrain with little memory", "compress the optimizer", "large model small GPU"]
import torch

from lm_from_scratch.drawings import optimizers as drawings

adamw = {"weights": 13.477, "gradients": 13.477, "moments": 26.954}  # GB
galore = adamw | {"moments": 7.53, "bases": 1.88}
byte = galore | {"moments": 3.82}
one = byte | {"gradients": 0.26}
names = "AdamW", "GaLore", "… moments of one byte", "… one gradient at a time"
rows = dict(zip(names, (adamw, galore, byte, one)))

# The numbers are those of Llama 7B: width, MLP, vocabulary and rank.
for C, I, V, r in [(4096, 11008, 32000, 1024)]:
    for others in [2 * V * C + 65 * C]:  # embedding, head and norms
        for n in [32 * (4 * C * C + 3 * I * C) + others]:
            assert abs(2e-9 * n - adamw["weights"]) < 0.005
        for n in [32 * 2 * r * (4 * C + 3 * I) + 2 * others]:
            assert abs(2e-9 * n - galore["moments"]) < 0.005
            assert abs(2e-9 * 8.125 / 16 * n - byte["moments"]) < 0.005
    assert abs(2e-9 * 32 * 7 * r * C - galore["bases"]) < 0.005
    assert abs(2e-9 * V * C - one["gradients"]) < 0.005
assert round(100 * (7.53 + 1.88) / 26.954) == 35
assert sum(one.values()) < 20 < 24 < sum(byte.values())
drawings.training_memory(rows, 24, "a large consumer card")

# %%
# This lesson is about the second bar. GaLore keeps small moments, and *bases* to translate them. Together they take 9.4
# GB instead of AdamW's 27.0, about a third (the `paper <https://arxiv.org/abs/2403.03507>`_: 65.5 % less). Weights and
# gradients stay as they are, so the sum falls from 53.9 to 36.4 GB.
#
# The third bar has `a page in depth <3a_galore_bytes_in_depth.ipynb>`_, the last one `a lesson <4_in_backward.ipynb>`_.
# What the forward pass keeps, the activations, comes on top.
#
# A gradient looks like tartan
# ----------------------------
#
# Nearly all weights are in matrices, and the gradient of a matrix is a matrix. Let us look at one. The shipped Qwen2,
# which was trained on documentation, reads 16 pieces of Python *code*. We take the gradient of the first output
# matrix of attention, ``o_proj``.

import matplotlib.pyplot as plt

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.text.corpora import load_corpus
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss

model, tokenizer = load_shipped("qwen2-docs")
texts = [
    tokenizer.start(d.text[:1000])[:128] for d in load_corpus("source")[:100]
]
texts = torch.tensor([ids for ids in texts if len(ids) == 128])
causal_lm_loss(model(texts[:16]), next_token_targets(texts[:16])).backward()

G = model.model.layers[0].self_attn.o_proj.weight.grad  # (128, 128)
U, s, Vh = torch.linalg.svd(G)
energy = s.square().cumsum(0) / s.square().sum()  # share of the first 1, 2, ...

from matplotlib.colors import LinearSegmentedColormap

signed = LinearSegmentedColormap.from_list(
    "", [COLOURS[1], COLOURS[1] + "00", COLOURS[0] + "00", COLOURS[0]]
)
norm = plt.Normalize(-G.abs().quantile(0.95), G.abs().quantile(0.95))
_, axes = figure(4.6, 4.9, rows=2, columns=2)
for ax, r in zip(axes, (128, 1, 4, 8)):
    shown = (U[:, :r] * s[:r] @ Vh[:r])[:64, :64]
    ax.imshow(shown.numpy(), cmap=signed, norm=norm)
    ax.set_title("the gradient" if r == 128 else f"{r} of 128")
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
plt.show()

assert 0.3 < energy[0] < 0.9 < energy[31] and energy[7] > 0.8

# %%
# Stripes! Where a row is strong, it is strong in many columns. A column of numbers times a row of numbers makes a
# perfect tartan, the cloth of a kilt, and we call such a pattern a *direction*. The singular value decomposition,
# ``svd``, writes a matrix as a sum of 128 of them, the strongest first: their columns are in ``U``, their strengths in
# ``s``, their rows in ``Vh``. The titles say how many are added. Eight already look like the gradient.
#
# Why is that? Each token adds one tartan to the gradient: its error, times its input. And many tokens of a text have
# similar errors and similar inputs.
#
# **Predict first.** The model has 56 such matrices. The *energy* of a gradient is the sum of its squares. A random quarter
# of the directions would hold 25 % of it. What does the strongest quarter hold, on average?
#
# * about 30 %
# * about 60 %
# * about 90 %

shares = []
for p in model.model.layers.parameters():
    if p.dim() == 2:
        squares = torch.linalg.svdvals(p.grad).square()
        best = squares[: len(squares) // 4].sum() / squares.sum()
        shares.append(best.item())
print(f"mean {sum(shares) / 56:.0%}, smallest {min(shares):.0%}")

assert (
    len(shares) == 56 and 0.85 < sum(shares) / 56 < 0.97 and min(shares) > 0.7
)

# %%
# About 90 %, because the tokens of a text are so much alike. That is of the gradient from which the directions were
# made. Of the *next* one they hold less, but far more than 25 %: `the in-depth page <2b_galore_in_depth.ipynb>`_
# measures it.
#
# One step
# --------
#
# GaLore, short for gradient low-rank projection, describes a gradient by a few directions. Adam sees only this
# description.

drawings.galore_step(128, 128, 32)

# %%
# The *basis* Q holds 32 directions; their number is called the *rank*. Of each direction it needs only the row, which
# becomes a column of Q. The columns have length 1 and are at right angles to each other. G times Q says how much of
# each direction is in each row of G. Adam sees these 32 numbers a row instead of 128, so its moments are smaller too.
# Adam's result times the transposed Q is a matrix of full size again. In code, these are three lines:

from lm_from_scratch.optim.adamw import adam_direction


def galore_step(W, G, Q, m, v, t, lr, scale=0.25):
    R = G @ Q  # (128, 32)
    d, m, v = adam_direction(R, m, v, t)  # Adam, as in the last lesson
    return W - lr * scale * d @ Q.T, m, v  # (128, 128)


W = model.model.layers[0].self_attn.o_proj.weight.detach()
Q = Vh[:32].T.clone()  # the 32 strongest directions
m = v = torch.zeros(128, 32)
new, m, v = galore_step(W, G, Q, m, v, t=1, lr=0.01)

assert torch.linalg.matrix_rank((new - W).double(), rtol=1e-5) == 32
torch.testing.assert_close(Q.T @ Q, torch.eye(32), atol=1e-5, rtol=0.0)

# %%
# A square or tall matrix has the basis on its right, as here. A wide one has it on its left, where it is smaller. The
# paper's factor :math:`\alpha`, ``scale``, makes the step of these matrices shorter: their learning rate is ``lr``
# times :math:`\alpha`.
#
# **Predict first.** For this matrix AdamW keeps :math:`2 \cdot 128 \cdot 128` = 32,768 numbers. What does GaLore keep?
#
# * 8,192 numbers
# * 12,288 numbers
# * 16,384 numbers

m.numel() + v.numel() + Q.numel()

# %%
# 12,288: two moments of 128 times 32 numbers, and Q, which must be kept too. Without Q, the numbers in m and v would mean
# nothing.
#
# One library made m and v as large as W, `by mistake <2b_galore_in_depth.ipynb>`_. With all directions it ran, and
# saved nothing.
#
# New directions, every now and then
# ----------------------------------
#
# If Q never changed, W could only move in 32 directions. So GaLore computes a new basis from time to time, from the
# gradient of that step. The paper does so every 200 steps.

assert m.numel() + v.numel() + Q.numel() == 12_288

drawings.subspaces(200)

# %%
# Each plane is what one basis can reach. W moves within it until the next basis is made.
#
# **Predict first.** Now take two directions, and a new basis after every second step. Look at the sum of all steps so
# far. How many directions does this sum need, after each of six steps? (This is the *rank* of a matrix.)
#
# * 2, 2, 2, 2, 2, 2
# * 2, 2, 4, 4, 6, 6
# * 2, 4, 6, 8, 10, 12

from lm_from_scratch.optim.galore import GaLore

p = torch.nn.Parameter(torch.zeros(128, 128))
optimizer = GaLore([p], lr=0.01, rank=2, update_proj_gap=2, weight_decay=0.0)
ranks = []
for _ in range(6):
    p.grad = torch.randn(128, 128)
    optimizer.step()
    ranks.append(torch.linalg.matrix_rank(p.detach(), rtol=1e-5).item())
print(ranks)

assert ranks == [2, 2, 4, 4, 6, 6]

# %%
# 2, 2, 4, 4, 6, 6: a basis serves two steps, and each new one adds two directions. So all of W is trained, a few
# directions at a time.
#
# `LoRA <../8_quantized_weights/6_lora.ipynb>`_ is different: it freezes W and trains two thin matrices beside it, and
# the rank of their product never grows. But LoRA never needs the large gradient.
#
# Does it learn?
# --------------
#
# ``GaLore`` above is the optimizer of the package. A group of weights that names a ``rank`` is projected, all others
# get AdamW: the embedding, the output head and the norms, as in the paper. A small Qwen2 learns documentation, with a
# quarter of its directions.

from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.text.tokenizer import Tokenizer

documents = load_corpus("reference")[:40]
tokenizer = Tokenizer.train([d.text for d in documents], 512)
stream = [i for d in documents for i in tokenizer.start(d.text)]
windows = torch.tensor(stream).unfold(0, 64, 1)  # all pieces of 64 tokens
heads = dict(n_layer=2, n_head=4, n_kv_head=2, eos_token_id=None)
sizes = dict(vocab_size=512, block_size=64, n_embd=64, intermediate_size=176)

# %%
# The optimizer gets two groups of weights: the matrices of the blocks, with options of their own, and all others.


def train(make, steps=120, **options):
    torch.manual_seed(0)
    model, losses = Qwen2ForCausalLM(Qwen2Config(**heads, **sizes)), []
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    others.append(model.model.embed_tokens.weight)  # the head, too
    groups = [{"params": matrices, **options}, {"params": others}]
    optimizer = make(groups, lr=0.003, weight_decay=0.0, fused=True)
    for _ in range(steps):
        idx = windows[torch.randint(len(windows), (12,))]  # (B, T)
        loss = causal_lm_loss(model(idx), next_token_targets(idx))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    kept = [x for p in matrices for x in optimizer.state[p].values()]
    mean = torch.tensor(losses).unfold(0, 20, 1).mean(-1)  # of 20 steps
    return mean, sum(x.nbytes for x in kept)


# %%
# The third run is a control: its matrices keep their random values.

full, full_bytes = train(AdamW, lr=0.002)
low, low_bytes = train(GaLore, lr=0.008, rank=16, update_proj_gap=50)
frozen, _ = train(AdamW, lr=0.0)
print(f"kept for the matrices: {low_bytes / full_bytes:.0%} of AdamW's")
gained = (frozen[-1] - low[-1]) / (frozen[-1] - full[-1])
print(f"of what training the matrices gains: {gained:.0%}")

_, (ax,) = figure(4.8, 3.4)
for i, losses in enumerate([frozen, low, full]):
    label = ("matrices not trained", "GaLore, rank 16 of 64", "AdamW")[i]
    style, colour = (":", "-", "--")[i], COLOURS[(4, 0, 3)[i]]
    ax.plot(range(20, 121), losses, style, color=colour, label=label)
ax.set(title="Loss, mean of 20 steps", xlabel="step", ylabel="loss")
ax.legend(frameon=False)
plt.show()

assert gained > 0.6 and 0.3 < low_bytes / full_bytes < 0.37

# %%
# The dotted line is what embedding and norms learn alone. Of what the matrices add to that, GaLore gets most, with
# about a third of AdamW's state. Its learning rate is 0.008, because 0.008 times the usual ``scale`` of 0.25 is the
# 0.002 of AdamW.
#
# What to choose
# --------------
#
# * **rank**: a quarter of the width is a good start. `The next lesson <3_galore_training.ipynb>`_ compares ranks.
# * **update_proj_gap**: 50 to 1000 steps; the paper has 200. An SVD is slow. The package takes `a quicker way
#   <3c_galore_bases_in_depth.ipynb>`_ to the same directions.
# * **8 bits**: ``optim_bits=8`` keeps each number of a moment in one byte.
# * **Gradients**: they are still full size. `Using each as soon as it exists <4_in_backward.ipynb>`_ frees them.
# * In ``transformers``: ``optim="galore_adamw"``, with ``optim_target_modules``.
#
# If you write a GaLore yourself, `GaLore in depth <2b_galore_in_depth.ipynb>`_ has the checks. And when Q changes, the
# numbers in m and v get another meaning: `the page on new bases <3c_galore_bases_in_depth.ipynb>`_ tries what can be
# done.
#
# Exercises
# ---------
#
# 1. *Easy.* Which gradient of the shipped model needs the most directions for 90 per cent of its energy, and which the
#    fewest? A good answer names both matrices. Hint: ``(energy < 0.9).sum() + 1``.
# 2. *Medium.* Train the small model with rank 4, with ``update_proj_gap`` of 10, 50 and ``None``, and three seeds. A
#    good answer says whether the gap matters more than the seed, and why a run of 120 steps cannot settle it.
# 3. *Medium.* Write ``galore_step`` for a wide matrix, with a basis on the left. A good answer gives the numbers of
#    the function above for the transposed matrix and gradient.
#
# Summary
# -------
#
# * The gradient of a matrix is mostly in a few directions: the strongest quarter held about 90 % of it.
# * GaLore projects the gradient to a basis of such directions, keeps Adam's moments there, and projects the step back.
# * A new basis every few hundred steps lets all of W change. Weights and gradients stay as large as they were.
