r"""
LoRA in depth
=============

Is your LoRA right? The lesson on `LoRA on 4-bit weights <6_lora.ipynb>`_ puts two thin matrices beside a frozen weight.
This page derives their gradients and compares them with autograd, tries the four ways to start, counts the bytes of a
training step one by one, and asks whether LoRA saves the memory of activations, too.

Codes have no gradient
----------------------

Take a small linear map with a weight of 4-bit codes, in float64, so that we can compare closely.
"""

# sphinx_gallery_needs = ["../7_optimizers/1_adamw"]
# sphinx_gallery_words = ["LoRA scaling", "LoRA initialization", "lora_A", "lora_B", "LoRA gradient", "target_modules", "prepare_model_for_kbit_training"]
import inspect

import torch
from torch import nn

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.record import record_saved
from lm_from_scratch.optim.choose import make_optimizer
from lm_from_scratch.runs.config import TrainConfig
from lm_from_scratch.text.batches import pieces
from lm_from_scratch.text.corpora import reference, split
from lm_from_scratch.weights.lora import LoRALinear, add_lora_
from lm_from_scratch.weights.quantize import quantize_

torch.manual_seed(0)
N, K, rows = 24, 32, 5  # outputs, inputs, rows of activations
layer = nn.Linear(K, N, bias=False).double()
quantize_(layer, bits=4)
x = torch.randn(rows, K, dtype=torch.float64, requires_grad=True)
g = torch.randn(rows, N, dtype=torch.float64)  # the gradient of y
layer(x).backward(g)

W = layer.weight.dequantize()
print(type(layer.weight).__name__, "has a gradient:", layer.weight.grad)
torch.testing.assert_close(x.grad, g @ W)

# %%
# The gradient passes *through* the weight, to the layers before it. The weight itself gets none, and the package refuses
# to compute with codes that ask for one.
#
# Two thin matrices
# -----------------
#
# Training changes :math:`W` (N, K) into :math:`W + \Delta W`. LoRA replaces :math:`\Delta W` by
# :math:`\frac{\alpha}{r} B A`, with :math:`B` (N, r) and :math:`A` (r, K): r (N + K) numbers instead of N K. Here it is
# as a function of all its parts.


def adapted(x, W, A, B, alpha):
    low = x @ A.T  # (rows, r)
    return x @ W.T + low @ B.T * (alpha / len(A))  # (rows, N)


r, alpha = 3, 6.0
A, B = torch.randn(r, K).double(), torch.randn(N, r).double()
change = alpha / r * B @ A  # (N, K)
torch.testing.assert_close(adapted(x, W, A, B, alpha), x @ (W + change).T)
rank = torch.linalg.matrix_rank(change).item()
print(f"rank {rank}; {A.numel() + B.numel()} numbers instead of {N * K}")
assert rank == r and A.numel() + B.numel() == r * (N + K) == 168

# %%
# One of them starts at zero
# --------------------------
#
# At the start the model should be what it was, so :math:`B A` must be zero, and then it should learn. Two ways to start
# do both. Two others look as good.


def start(a_is_zero, b_is_zero):
    torch.manual_seed(1)
    A = torch.zeros(r, K) if a_is_zero else torch.randn(r, K) / K**0.5
    B = torch.zeros(N, r) if b_is_zero else torch.randn(N, r) / r**0.5
    A, B = (t.double().requires_grad_() for t in (A, B))
    x0 = x.detach()
    y = adapted(x0, W, A, B, alpha)
    y.backward(g)
    return (y - x0 @ W.T).norm().item(), A.grad.norm(), B.grad.norm()


starts = {
    "A random, B zero": start(False, True),
    "A zero, B random": start(True, False),
    "both random": start(False, False),
    "both zero": start(True, True),
}
for name, numbers in starts.items():
    print(f"{name}: y moves by %5.1f, gradients %6.1f %6.1f" % numbers)
zero = [[number == 0 for number in numbers] for numbers in starts.values()]
T, F = True, False
assert zero == [[T, T, F], [T, F, T], [F, F, F], [T, T, T]]

# %%
# Two random matrices damage the model before the first step. Two zeros never move, because each one's gradient is
# multiplied by the other:
#
# .. math::
#
#    \frac{\partial L}{\partial B} = \frac{\alpha}{r} \, g^\top (x A^\top), \qquad
#    \frac{\partial L}{\partial A} = \frac{\alpha}{r} \, B^\top g^\top x, \qquad
#    \frac{\partial L}{\partial x} = g \Bigl( W + \frac{\alpha}{r} B A \Bigr)
#
# LoRA draws A and zeroes B. In the first step A stands still and B moves; from the second on both do. Here are the three
# formulas against autograd:

A.requires_grad_(), B.requires_grad_()
x.grad = None
adapted(x, W, A, B, alpha).backward(g)
with torch.no_grad():
    torch.testing.assert_close(B.grad, alpha / r * g.T @ (x @ A.T))
    torch.testing.assert_close(A.grad, alpha / r * B.T @ g.T @ x)
    torch.testing.assert_close(x.grad, g @ (W + change))

# %%
# Neither formula needs the gradient of W, which has N K numbers. The last one needs W itself: the frozen weight is still
# read in the backward pass.
#
# On a built model
# ----------------
#
# ``add_lora_`` gives adapters to the linear maps of a finished model's *backbone*, which is all but the head, and
# freezes all else. The class of a layer changes, its weight stays where it is, quantised or not.

print(inspect.getsource(LoRALinear.forward))


def shipped(bits=None, rank=0, also_train=lambda name: False):
    model, _ = load_shipped()
    if bits is not None:
        quantize_(model, bits)
    if rank:
        add_lora_(model, rank, alpha=16.0, also_train=also_train)
    return model


_, tokenizer = load_shipped()
idx = torch.tensor([tokenizer.encode("The with statement is used to wrap")])
model = shipped(bits=4)
before = model(idx)
add_lora_(model, rank=8, alpha=16.0)
assert torch.equal(model(idx), before)  # bit for bit

first = model.transformer.h[0].attn.c_attn
print(first)
print(type(first.weight).__name__, first.lora_a.dtype, first.lora_a.shape)
bound = first.in_features**-0.5
assert 0.99 * bound < first.lora_a.abs().max() <= bound
assert not first.lora_b.any()

# %%
# Three choices are worth a word. The paper draws A from a normal distribution; its authors' code and the ``peft``
# library draw it uniformly within :math:`\pm 1 / \sqrt{K}`, and so does the package.
#
# The paper mostly adapts the queries and values of attention. QLoRA found that every linear map of a block should have an
# adapter, and this is the default here; ``select`` narrows it down.
#
# The adapters have the dtype of the weight beside them. ``peft`` makes them float32 by default where the weights have
# 16 bits. This matters if you train in bfloat16: a small step may round away (exercise 2).
#
# What is trained, and what a step holds
# --------------------------------------


def linear_maps(model):
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


def counted(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


P = sum(p.numel() for p in model.parameters())
by_formula = sum(
    8 * (m.in_features + m.out_features) for m in linear_maps(model)
)
print(f"trained {counted(model)} of {P} numbers: {counted(model) / P:.1%}")
assert counted(model) == by_formula and counted(shipped()) == P - by_formula
assert counted(model) / P < 0.06

# %%
# The share falls as models grow, because the weight of a map grows with its width squared, and its adapter with its
# width. Now take one training step with each model and add up the bytes of the tensors that exist at its end.

KINDS = ("weights", "gradients", "state")


def step_bytes(model):
    optimizer = make_optimizer(model, TrainConfig(steps=1))
    model(idx).logsumexp(-1).sum().backward()
    optimizer.step()
    params = list(model.parameters())
    states = optimizer.state.values()
    return (
        sum(p.nbytes for p in params),
        sum(p.grad.nbytes for p in params if p.grad is not None),
        sum(t.nbytes for state in states for t in state.values()),
    )


held = {
    "all weights": step_bytes(shipped()),
    "LoRA": step_bytes(shipped(rank=8)),
    "LoRA, 4 bits": step_bytes(shipped(bits=4, rank=8)),
}
for name, size in held.items():
    parts = " ".join(f"{k} {b / 1e6:5.2f}" for k, b in zip(KINDS, size))
    print(f"{name:12} {parts}, together {sum(size) / 1e6:5.2f} MB")

# %%
# With P weights and Q trained numbers, all in float32, a step of AdamW holds 4 P + 4 Q + 8 Q bytes, and 4 for the step
# number of each tensor. In full training Q is P.

full, lora, lora4 = held.values()
Q = counted(model)
n_full = len(list(shipped().parameters()))
n_lora = 2 * len(linear_maps(model))
base = P - Q
assert full == (4 * base, 4 * base, 8 * base + 4 * n_full)
assert lora == (4 * P, 4 * Q, 8 * Q + 4 * n_lora)
assert lora4[1:] == lora[1:] and sum(lora4) < sum(lora) / 2
assert sum(lora4) < sum(full) / 8

# %%
# The formulas hold to the byte. Activations are not counted here. LoRA does not save those, as the quiz below shows.
#
# Bug museum
# ----------
#
# The optimizer that came first
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The optimizer holds the frozen weights, and no adapter. (M21)
#
# Make the optimizer, then add the adapters. The loop runs, gradients appear, and nothing complains.


def three_steps(adapters_first):
    model, _ = load_shipped()
    if adapters_first:
        add_lora_(model, rank=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if not adapters_first:
        add_lora_(model, rank=8)
    loss = []
    for _ in range(3):
        optimizer.zero_grad()
        loss.append(model(idx).logsumexp(-1).mean())
        loss[-1].backward()
        optimizer.step()
    known = {p for group in optimizer.param_groups for p in group["params"]}
    trainable = {p for p in model.parameters() if p.requires_grad}
    return [f"{value.item():.3f}" for value in loss], trainable <= known


for adapters_first in (False, True):
    loss, complete = three_steps(adapters_first)
    print(loss, "the optimizer knows all that is trained:", complete)
    assert complete == adapters_first and (len(set(loss)) == 1) != complete

# %%
# The optimizer holds the weights that were frozen afterwards. They have no gradient any more, and an optimizer skips
# those. The fix is to move the line below ``add_lora_``, and the check is the one printed: every trainable parameter is in the
# optimizer.
#
# Which sentence is false?
# ------------------------
#
# 1. Frozen weights need no gradient, and yet the backward pass reads them.
# 2. LoRA saves the memory of activations, because most weights have no gradient.
# 3. In the first step, A does not move.
#
# The formula for the gradient of x decided 1, and the table of starts decided 3. For 2, count the bytes that autograd
# keeps for the backward pass, without the parameters.


batch = pieces(split(reference())[1], tokenizer, length=48, count=24)


def kept(model):
    with record_saved(model) as saved:
        loss = model(batch.idx).sum()
    assert loss.requires_grad
    return sum(saved.values())


ratio = kept(shipped(rank=8)) / kept(shipped())
print(f"activations kept with LoRA: {ratio:.2f} times those of full training")
assert 0.95 < ratio < 1.3  # 2

# %%
# Sentence 2 is false: A needs the input of its layer for its own gradient, as W did. And sentence 1 is true, because
# the gradient reaches the layers before only through the frozen weights.
#
# Exercises
# ---------
#
# 1. *Easy.* Train rank 8 with :math:`\alpha` 4, 16 and 64, each with the learning rate 0.005, on the text of the lesson.
#    A right answer says which of them another learning rate could replace. Hint: draw the losses in one figure.
# 2. *Medium.* Turn the model to bfloat16, then add adapters, and train with the learning rate 0.0001. A right answer
#    counts the elements of A that did not move in the second step, in bfloat16 and in float32. (In the first B is zero,
#    and A cannot move.) Hint: near 0.05, neighbours in bfloat16 are 0.0002 apart or more.
#
# Summary
# -------
#
# * A weight of codes gets no gradient and hands one on. LoRA trains two thin matrices beside it, r (N + K) numbers
#   instead of N K.
# * A is random and B is zero: the model starts unchanged, bit for bit, and B moves first. Two zeros never move.
# * With 4-bit weights, one training step held less than an eighth of the bytes of full training, activations aside.
#
# Sources
# -------
#
# * `LoRA: Low-Rank Adaptation of Large Language Models <https://arxiv.org/abs/2106.09685>`_, Hu et al., 2021.
# * `QLoRA: Efficient Finetuning of Quantized LLMs <https://arxiv.org/abs/2305.14314>`_, Dettmers et al., 2023. Its codes
#   are spaced like a normal distribution, and its scales are quantised too; ours are evenly spaced.
# * `The documentation of peft <https://huggingface.co/docs/peft/package_reference/lora>`_: the options of its LoRA and
#   the start of A.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
