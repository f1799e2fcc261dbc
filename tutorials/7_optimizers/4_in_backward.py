r"""
One gradient at a time
======================

You are fine-tuning a model, and it nearly fits: a training step runs out of memory by a little. All gradients together
are as large as the model, and most of the time they only wait. Here is a backward pass through four parts of a model, as
in every training loop, and below it the same pass without waiting.
"""

# sphinx_gallery_needs = ["1_adamw", "2_galore"]
# sphinx_gallery_words = ["CUDA out of memory", "OutOfMemoryError", "OOM", "training memory", "peak memory", "register_post_accumulate_grad_hook", "LOMO", "zero_grad", "optimizer in backward", "fused backward pass", "fit a larger model on my GPU", "not enough GPU memory", "reduce training memory", "save memory in training", "out of memory", "free gradients", "gradients take memory", "release memory", "memory of gradients", "fits almost", "bigger batch", "bigger model", "backward hook", "update during backward", "gradient accumulation memory", "set_to_none", "less memory without slower training"]
from lm_from_scratch.drawings import optimizers as drawings

drawings.gradient_lives(["block 2", "block 1", "block 0", "embedding"])

# %%
# The pass goes from the last block to the embedding, one column after the other. In the upper half every gradient (g)
# is kept until the step. In the lower half each weight is updated as soon as its gradient is complete, and nothing is
# left for the step to do.
#
# How much memory is that?
# ------------------------
#
# AdamW in float32 holds 16 bytes for each weight: the weight, its two moments and its gradient, four bytes each. Let us
# watch the gradients of our small Qwen2, on a few rows of real text.

import math

import torch
import torch.nn.functional as F

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.text.corpora import load_corpus

tokenizer = load_shipped("qwen2-docs")[1]
text = "\n".join(document.text for document in load_corpus("reference")[:9])
ids = torch.tensor(tokenizer.encode(text)[: 4 * 4 * 65])
batches = ids.view(4, 4, 65)  # four batches of four rows


def loss_of(model, rows):
    logits = model(rows[:, :-1])  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


# %%
# Whenever a gradient is complete, PyTorch calls our function ``look``, which adds up the bytes of all gradients that
# exist.


def gradients_alive(afterwards=None):
    model, alive = load_shipped("qwen2-docs")[0], []

    def look(p):
        grads = [q.grad for q in model.parameters() if q.grad is not None]
        alive.append(sum(grad.nbytes for grad in grads) / 1e6)
        if afterwards:
            afterwards(p)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(look)
    loss_of(model, batches[0]).backward()
    return alive


def free(p):
    p.grad = None


usual, freed = gradients_alive(), gradients_alive(free)

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

_, (ax,) = figure(4.8, 3.4)
x = range(1, len(usual) + 1)
ax.fill_between(x, usual, color=COLOURS[3], alpha=0.25)
ax.plot(x, usual, color=COLOURS[3], label="kept until the step")
ax.plot(x, freed, "--", color=COLOURS[0], label="used and freed at once")
ax.set(title="Gradients in memory", ylabel="MB")
ax.set(xlabel="gradients that are complete")
ax.legend(frameon=False, loc="upper left")
plt.show()

for model in [load_shipped("qwen2-docs")[0]]:
    assert sum(p.nbytes for p in model.parameters()) == round(1e6 * usual[-1])
    assert len(list(model.parameters())) == len(usual) == 98
    assert freed[-1] == model.model.embed_tokens.weight.nbytes / 1e6
assert max(freed) == freed[-1] < 0.26 * usual[-1]

# %%
# At the end of the ordinary backward pass, all 98 gradients exist, and together they are as large as the model. If each
# were used and freed as soon as it is complete, one would exist at a time. The highest point of the dashed line is the
# largest single gradient, that of the embedding.
#
# What are the gradients waiting for?
# -----------------------------------
#
# For ``optimizer.step()``. But AdamW updates each weight by itself: for the step of one weight it needs the gradient of
# this weight, and no other. So why not take the step right there, inside the backward pass?
#
# The hook
# --------
#
# A *hook* is a function that PyTorch calls at a certain moment, such as ``look`` above. Here each weight gets an
# optimizer of its own, and the hook lets it step.


def train_inside(steps):
    model = load_shipped("qwen2-docs")[0]
    optimizers = {p: AdamW([p]) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        p.grad = None  # frees the memory

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for step in range(steps):
        loss_of(model, batches[step]).backward()
    return model


# %%
# The whole training loop is now one line, ``backward()``. Here is the ordinary one.


def train_as_usual(steps, clip=math.inf):
    model = load_shipped("qwen2-docs")[0]
    optimizer = AdamW(model.parameters())
    for step in range(steps):
        loss_of(model, batches[step]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


# %%
# **Predict first.** With the hook, the last block has already moved when the gradient of the first block is computed.
# After three steps, how do the weights of both loops compare?
#
# * They differ, because later gradients saw weights that had moved.
# * They differ by rounding.
# * They are the same, to the last bit.


def same(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


print("same weights:", same(train_inside(3), train_as_usual(3)))

assert same(train_inside(3), train_as_usual(3))
assert not same(train_inside(3), load_shipped("qwen2-docs")[0])

# %%
# They are the same, to the last bit. The gradient of an early block needs the *old* weights of all blocks after it. But
# the backward pass has come through those blocks already: it used their weights for the last time when it computed
# their own gradients, and the hook runs after that.
#
# (If a hook changes a weight that is still needed, PyTorch raises an error.)
#
# What that saves
# ---------------
#
# Instead of all gradients you hold the largest one. For a model of seven billion weights, in float32:

from lm_from_scratch.models.qwen2 import SIZES, Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.choose import state_bytes
from lm_from_scratch.runs.config import TrainConfig

with torch.device("meta"):  # shapes without memory
    large = Qwen2ForCausalLM(Qwen2Config(**SIZES["Qwen2-7B"]))
W = sum(p.nbytes for p in large.parameters()) / 1e9
one = max(p.nbytes for p in large.parameters()) / 1e9
config = TrainConfig(steps=1, optimizer="galore", rank=896)  # width / 4
S = state_bytes(large, config) / 1e9
held = {
    "AdamW": W + 2 * W + W,
    "AdamW in backward": W + 2 * W + one,
    "GaLore in backward": W + S + one,
}
for name, total in held.items():
    print(f"{name:18} {total:6.1f} GB")

assert 120 < held["AdamW"] < 125 and 90 < held["AdamW in backward"] < 96
assert held["GaLore in backward"] < held["AdamW"] / 2
assert 0.76 < held["AdamW in backward"] / held["AdamW"] < 0.78

# %%
# Almost a quarter less. Together with `GaLore <2_galore.ipynb>`_, which shrinks the moments, less than half of
# the memory is left.
#
# Activations come on top, the results of the forward pass. With many tokens in a batch they are the largest part, and
# they peak before any gradient exists: then updates in backward save nothing at all. `Every byte of a training step
# <4a_training_memory_in_depth.ipynb>`_ measures when they help.
#
# A loop that clips
# -----------------
#
# The package has a ``with`` block for all this, ``update_in_backward``, with one optimizer for all weights. Somebody
# puts it around a loop that works, and changes nothing else. The loop clips gradients to the length 0.5, and logs the
# norm that ``clip_grad_norm_`` returns.
#
# **Predict first.** What does the log say?
#
# * the same norms as before
# * an error
# * 0.00

from lm_from_scratch.optim.in_backward import update_in_backward

model, norms = load_shipped("qwen2-docs")[0], []
optimizer = AdamW(model.parameters())
with update_in_backward(optimizer):
    for step in range(3):
        loss_of(model, batches[step]).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()

print("norms:", *(f"{norm:.2f}" for norm in norms))
print("as if never clipped:", same(model, train_as_usual(3)))

assert norms == [0.0, 0.0, 0.0]
assert same(model, train_as_usual(3))
assert not same(model, train_as_usual(3, clip=0.5))

# %%
# 0.00, and no error. When ``clip_grad_norm_`` runs, there are no gradients: all have been used. The loop trains without
# clipping, exactly as if that line were not there.
#
# It goes well until one strange batch ruins the run. This is not a bug, but the price of the hook. Clipping shortens
# *all* gradients by one factor, which comes from the norm of them all. That norm is known only when the last gradient
# is complete, and by then the first ones are gone. The package's training refuses the combination instead:

try:
    TrainConfig(steps=200, update_in_backward=True, max_grad_norm=0.5)
except ValueError as error:
    print(error)
    refused = True

assert refused

# %%
# Clipping each gradient by its own norm changes the direction of the step. The exact norm can be bought with a second
# backward pass. `The in-depth page <4a_training_memory_in_depth.ipynb>`_ has both.
#
# Several batches, one step
# -------------------------
#
# The same price is paid for *accumulation*: running a large batch in small parts, and stepping once from the sum of
# their gradients. A hook that steps at once has nothing to sum. Four parts become four steps.


def four_parts(passes):
    model = load_shipped("qwen2-docs")[0]
    with update_in_backward(AdamW(model.parameters()), passes):
        for part in batches:
            (loss_of(model, part) / 4).backward()
    start = load_shipped("qwen2-docs")[0]
    moved = zip(model.parameters(), start.parameters())
    return torch.stack([(p - q).norm() for p, q in moved]).norm().item()


ratio = four_parts(passes=1) / four_parts(passes=4)
print(f"four steps move the weights {ratio:.1f} times as far as one")

assert ratio > 1.5

# %%
# Dividing the loss by 4 does not help: Adam divides by the size of the gradient, so a quarter of a gradient gives a
# whole step. Give ``update_in_backward`` the number of passes that make a step, and it waits for the last one. But then
# the gradients wait too. (Those of GaLore can wait `as small projections <4a_training_memory_in_depth.ipynb>`_.)
#
# Exercises
# ---------
#
# 1. *Easy.* Leave out ``p.grad = None``. A good answer shows that one step is still right and two are not, and says
#    why.
# 2. *Easy.* The dashed line in the figure ends in a peak. Draw it for ``load_shipped("gpt2-docs")``. A good
#    answer names the weight that makes the peak, and says why its gradient is complete so late.
# 3. *Medium.* Write a hook that adds up the squares of all gradients and frees them, so that one backward pass measures
#    the norm and changes nothing. A good answer equals the norm that ``clip_grad_norm_`` reports in the ordinary loop.
#
# Summary
# -------
#
# * A gradient can be used and freed as soon as it is complete: a hook takes the step of its weight, and the result is
#   the same to the last bit.
# * All gradients together are 4 of the 16 bytes for each weight. Now only the largest one exists. Activations stay.
# * Whatever needs all gradients before the first update is lost: clipping by their norm is switched off silently.
