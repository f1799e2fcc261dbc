r"""
LoRA on 4-bit weights
=====================

Our GPT-2 has read Python's documentation, and now its weights are rounded to 4 bits. Can it still learn something new,
say the names of the characters in Unicode?

It can, and the 4-bit weights do not even change. We add two thin matrices beside each of them and train only these.
Here is one weight, drawn to scale:
"""

# sphinx_gallery_needs = ["1_int8_int4", "4_quantized_weight", "../7_optimizers/1_adamw"]
# sphinx_gallery_words = ["QLoRA", "PEFT", "lora_alpha", "lora_r", "LoRA rank", "LoRA alpha", "target_modules", "fine-tuning", "fine-tune a quantized model", "merge_and_unload", "low-rank adaptation", "adapter", "LoRA from scratch", "parameter-efficient fine-tuning", "fine-tune on one GPU", "cheap fine-tuning", "LoRA explained", "fine-tune a large model on a small GPU", "LoRA for Llama", "LoRA for Qwen", "choose the rank", "LoRA vs full fine-tuning", "what is LoRA", "fine-tune without forgetting", "fine-tune on a CPU", "train few parameters", "train only a few parameters", "trainable parameters", "small fine-tuning", "fine-tune without much memory", "fine-tuning in 4 bits", "learn something new", "new knowledge", "add knowledge", "low-rank matrices", "LoRA adapters", "swap adapters", "fine-tune Llama", "LoRA memory", "LoRA inference", "LoRA at run time", "speed of LoRA", "cost of LoRA", "LoRA vs QLoRA", "QLoRA memory", "merged or separate", "does LoRA slow down inference"]
import unicodedata

import torch
import torch.nn.functional as F
from torch import nn

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import quantized_weights as drawings
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.generation.text import generate_text
from lm_from_scratch.weights.lora import LoRALinear, add_lora_, merge_lora_
from lm_from_scratch.weights.quantize import quantize_

model, tokenizer = load_shipped("gpt2-docs")
weight = model.transformer.h[0].mlp.c_fc.weight
drawings.low_rank(*weight.shape, 8, "4 bits")

# %%
# Before this training, the model continues ``latin`` like this. In front of each line is the character of that name, or
# ``?`` if there is none.

unicode = unicodedata.ucd_3_2_0  # an edition that never changes
characters = {unicode.name(chr(i), "").lower(): chr(i) for i in range(0x3000)}
del characters[""]


def write(model):
    text = generate_text(model, tokenizer, "latin", 90, sampler, seed=0)
    for line in ("latin" + "".join(text)).split("\n")[:5]:
        print(characters.get(line, "?"), "", line)


def shipped(bits=32, rank=0):
    model, _ = load_shipped("gpt2-docs")
    if bits < 32:
        quantize_(model, bits)
    if rank:
        add_lora_(model, rank)
    return model


sampler = Sampler(temperature=0.6)
write(shipped(bits=4))

# %%
# Sixteen neighbouring names form a document. We leave out every tenth document, for a test.

script = ("latin", "greek", "cyrillic")
names = [name for name in characters if name.startswith(script)]
learn = [name for i, name in enumerate(names) if i // 16 % 10]
ids = torch.tensor(tokenizer.encode("\n".join(learn)))

# %%
# Now ``add_lora_`` puts two thin matrices, an *adapter*, beside the weight of each linear layer. Training moves only
# these.


def loss_of(model, rows):
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def fine_tune(model, steps, lr=5e-3):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr, fused=True)
    for _ in range(steps):
        starts = torch.randint(len(ids) - 65, (4, 1))
        loss_of(model, ids[starts + torch.arange(65)]).backward()
        optimizer.step()
        optimizer.zero_grad()


torch.manual_seed(0)
model = shipped(bits=4, rank=8)
fine_tune(model, steps=70)
write(model)

# %%
# A line without a ``?`` names a character that exists. The other names are invented, but they could exist. The 4-bit
# codes are the same as before: we trained only the adapters, 6 % of all numbers.

numbers = sum(p.numel() for p in model.parameters())
trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
layer = model.transformer.h[0].mlp.c_fc
print(f"{trained:,} of {numbers:,} numbers: {trained / numbers:.1%}")

assert round(100 * trained / numbers) == 6 and trained / 8 / numbers < 0.01
assert torch.equal(
    layer.weight.codes,
    shipped(bits=4).transformer.h[0].mlp.c_fc.weight.codes,
)

# %%
# Two thin matrices
# -----------------
#
# Why not train the codes? A training step moves a weight by very little, and between two codes there is nowhere to go.
# So a weight of codes gets no gradient.
#
# LoRA (low-rank adaptation) leaves the weight :math:`W`, (N, K), as it is. It bets that the *change* that a new task
# needs is simple enough to be the product of a tall matrix :math:`B`, (N, r), and a flat one, :math:`A`, (r, K). On
# 4-bit weights, the method is known as QLoRA.
#
# .. math::
#
#    y = W x + \frac{\alpha}{r} B A x
#
# You choose the *rank* r (8 in the drawing) and :math:`\alpha`. Their quotient, :math:`\alpha / r`, is a convention: it
# lets you try another rank with about the same learning rate. A linear layer with its adapter is short:


class LoRA(nn.Module):
    def __init__(self, linear, rank=8, alpha=16.0):
        super().__init__()
        N, K = linear.weight.shape
        self.linear, self.factor = linear, alpha / rank
        self.A = nn.Parameter(torch.randn(rank, K) / K**0.5)
        self.B = nn.Parameter(torch.zeros(N, rank))

    def forward(self, x):
        low = x @ self.A.T  # (..., r)
        return self.linear(x) + low @ self.B.T * self.factor  # (..., N)


adapted = LoRA(shipped(bits=4).transformer.h[0].mlp.c_fc)
adapted.A, adapted.B = layer.lora_a, layer.lora_b
x = torch.randn(3, 128)
print("as the package's:", torch.allclose(adapted(x), layer(x), atol=1e-4))

assert torch.allclose(adapted(x), layer(x), atol=1e-4)
assert isinstance(layer, LoRALinear) and adapted.factor == 2.0

# %%
# The code never forms :math:`B A`, which would be as large as W. It multiplies by the flat matrix first.
#
# Why does B start at zero? So that the model begins exactly as it was. The matrix A could be zero instead.
#
# **Predict first.** Start with *both* at zero, and train for five steps. What happens?
#
# * It learns, but more slowly.
# * It learns just as fast.
# * Nothing moves.

zeros = shipped(rank=8)
adapters = [p for p in zeros.parameters() if p.requires_grad]
for p in adapters:
    nn.init.zeros_(p)
fine_tune(zeros, steps=5)
print("largest number:", max(p.abs().max().item() for p in adapters))

assert not any(p.any() for p in adapters)

# %%
# Nothing moves, ever. The gradient of A is multiplied by B, and that of B by A. With A random and B zero, B moves in the
# first step and A follows from the second.
#
# What a training step holds
# --------------------------
#
# A step of `AdamW <../7_optimizers/1_adamw.ipynb>`_ holds the weights, and for each trained number a gradient and two
# running means.
#
# **Predict first.** Training all weights in float32 holds 34 MB at the end of a step. How much does LoRA on 4 bits hold?
#
# * 25 MB
# * 10 MB
# * 4 MB


def bytes_held(model):
    weights = sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return weights, trained, 2 * trained


held = {
    "all weights": bytes_held(shipped()),
    "LoRA": bytes_held(shipped(rank=8)),
    "LoRA, 4 bits": bytes_held(shipped(bits=4, rank=8)),
}

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

_, (ax,) = figure(4.8, 2.4)
for i, kind in enumerate(("weights", "gradients", "running means")):
    style = {"label": kind, "hatch": ("", "//", "..")[i], "color": COLOURS[i]}
    size = [each[i] / 1e6 for each in held.values()]
    start = [sum(each[:i]) / 1e6 for each in held.values()]
    ax.barh(list(held), size, left=start, **style)
ax.set(xlabel="MB", title="Held at the end of a step")
ax.invert_yaxis()
ax.legend(frameon=False, loc="lower right")
plt.show()

assert round(sum(held["all weights"]) / 1e6) == 34
assert round(sum(held["LoRA"]) / 1e6) == 11
assert 3 < sum(held["LoRA, 4 bits"]) / 1e6 < 4.2
assert sum(held["all weights"]) > 8 * sum(held["LoRA, 4 bits"])

# %%
# About 4 MB. LoRA removes nearly all gradients and running means. What is left is mostly weights, and 4 bits make those
# small.
#
# The activations, which are kept for the backward pass, come on top, and LoRA saves none of them. The in-depth page
# measures that, and counts the rest byte by byte.
#
# Which rank?
# -----------
#
# **Predict first.** Rank 1 trains less than 1 % of the numbers. How much of the improvement of full training (which has
# its own learning rate) does it reach on names that it has not seen?
#
# * about 10 %
# * about half
# * more than 75 %

test = [name for i, name in enumerate(names) if not i // 16 % 10]
rows = torch.tensor(tokenizer.encode("\n".join(test)))[: 32 * 33].view(32, 33)


@torch.no_grad()
def held_out(model):
    return loss_of(model, rows).item()


after = {"before": held_out(shipped(bits=4))}
learner = shipped(bits=4, rank=1)
fine_tune(learner, steps=20)
after["rank 1"] = held_out(learner)
learner = shipped()
fine_tune(learner, steps=20, lr=1e-3)
after["all weights"] = held_out(learner)

_, (ax,) = figure(4.8, 2.2)
ax.barh(list(after), list(after.values()))
ax.invert_yaxis()
ax.set(title="Held-out loss after 20 steps", xlabel="nats per token")
plt.show()

full = after["before"] - after["all weights"]
share = (after["before"] - after["rank 1"]) / full
assert 0.75 < share < 0.97, share

# %%
# More than 75 %: rank 1 is enough for most of this task.
#
# But names in small letters are easy. On harder text rank 1 falls behind (`LoRA in depth <6a_lora_in_depth.ipynb>`_), so
# compare with full training before you trust a small rank.
#
# And for a model of billions of weights? The `code of QLoRA <https://github.com/artidoro/qlora>`_ begins with r = 64 and
# :math:`\alpha` = 16 beside every linear layer but the head, and with a learning rate of 0.0002, or 0.0001 above 13
# billion.
#
# Merging
# -------
#
# An adapter costs two extra small products in each linear layer. After training you can add
# :math:`\frac{\alpha}{r} B A` to W, and the layer is an ordinary one again.

before_merge = held_out(model)
merge_lora_(model)
print(f"merged: loss {before_merge:.3f} -> {held_out(model):.3f}")
print("the weight is now", type(layer.weight).__name__)
quantize_(model, bits=4, select=lambda name: ".h." in name)
print(f"4 bits again: {held_out(model):.3f}")

assert type(layer) is nn.Linear
assert before_merge < 1.9 and held_out(model) - before_merge < 0.2

# %%
# Merging changes the loss by no more than rounding does. But the sum no longer lies on the levels of the codes, so the
# weight is a plain one. Rounding it to 4 bits again costs little here, because this training was a large change. A
# change much smaller than the step between two levels would be lost. In that case keep the adapters apart: they are
# small files, one for each task.
#
# On the command line ``train --lora 8`` trains adapters, also beside weights that ``quantize --dtype float32`` wrote.
# ``generate --model`` opens their folder, or one that the ``peft`` library wrote, and ``convert --merge`` adds them to
# the weights.
#
# Exercises
# ---------
#
# 1. *Easy.* Give adapters to the attention alone, then to the MLPs alone, and choose the ranks so that both train about
#    as many numbers. A good answer names the better half for this text. Hint: ``add_lora_(model,
#    select=lambda name: "mlp" in name)``.
# 2. *Easy.* Replace the linear layers of a plain model by your ``LoRA`` and freeze everything else. A good answer
#    reaches the loss of ``add_lora_``, up to the random start.
# 3. *Medium.* Measure the loss on Python's documentation before and after fine-tuning. A good answer says how much the
#    model has forgotten, with rank 8 and with all weights.
#
# Summary
# -------
#
# * Codes cannot be trained. LoRA trains a tall and a flat matrix beside each, r (N + K) numbers instead of N K.
# * A is random and B is zero, so the model begins as it was. A step on 4-bit weights holds less than an eighth of the
#   bytes of full training, activations aside.
# * Merging adds the product to the weight, which is plain afterwards. If you round it to codes again, a large change
#   survives and a small one does not.
