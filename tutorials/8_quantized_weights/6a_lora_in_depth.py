r"""
LoRA in depth: gradients, bytes, merging
========================================

Is your LoRA right, and how close does it come to training all weights? The lesson on `LoRA on 4-bit weights
<6_lora.ipynb>`_ puts two thin matrices beside a frozen weight. This page derives their gradients, counts the bytes of a
training step one by one, compares LoRA with full training on a harder text, and asks what is left of it when the result
is rounded to codes again.

Two thin matrices
-----------------

Training changes :math:`W` (N, K) into :math:`W + \Delta W`. LoRA replaces :math:`\Delta W` by
:math:`\frac{\alpha}{r} B A`, with :math:`B` (N, r) and :math:`A` (r, K): r (N + K) numbers instead of N K. Here it is as
a function of all its parts, beside a weight of 4-bit codes, in float64 so that we can compare closely.
"""

# sphinx_gallery_needs = ["../7_optimizers/1_adamw"]
# sphinx_gallery_words = ["LoRA scaling", "LoRA initialization", "lora_A", "lora_B", "LoRA gradient", "target_modules", "prepare_model_for_kbit_training", "LoRA vs full fine-tuning", "merge_and_unload", "LoRA rank", "merge LoRA into quantized model"]
import copy
import unicodedata

import torch
import torch.nn.functional as F
from torch import nn

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.record import record_saved
from lm_from_scratch.text.batches import pieces
from lm_from_scratch.text.corpora import reference, split
from lm_from_scratch.weights.lora import add_lora_, merge_lora_
from lm_from_scratch.weights.quantize import dequantize_, quantize_
from lm_from_scratch.weights.quantized_weight import QuantizedWeight

torch.manual_seed(0)
N, K, rows, r, alpha = 24, 32, 5, 3, 6.0
layer = nn.Linear(K, N, bias=False).double()
quantize_(layer, bits=4)
W = layer.weight.dequantize()
x = torch.randn(rows, K, dtype=torch.float64, requires_grad=True)
g = torch.randn(rows, N, dtype=torch.float64)  # the gradient of y


def adapted(x, W, A, B):
    low = x @ A.T  # (rows, r)
    return x @ W.T + low @ B.T * (alpha / r)  # (rows, N)


A, B = torch.randn(r, K).double(), torch.randn(N, r).double()
change = alpha / r * B @ A  # (N, K)
torch.testing.assert_close(adapted(x, W, A, B), x @ (W + change).T)
print(f"{A.numel() + B.numel()} numbers instead of {N * K}")
assert torch.linalg.matrix_rank(change).item() == r

layer(x).backward(g)
print(type(layer.weight).__name__, "has a gradient:", layer.weight.grad)
torch.testing.assert_close(x.grad, g @ W)

# %%
# The gradient passes *through* the codes, to the layers before them. The codes themselves get none, and the package
# refuses to compute with codes that ask for one.
#
# One of them starts at zero
# --------------------------
#
# At the start the model should be what it was, so :math:`B A` must be zero; and then it should learn. Two ways to start
# do both. Two more look just as good.


def start(a_is_zero, b_is_zero):
    torch.manual_seed(1)
    A = torch.zeros(r, K) if a_is_zero else torch.randn(r, K) / K**0.5
    B = torch.zeros(N, r) if b_is_zero else torch.randn(N, r) / r**0.5
    A, B = (t.double().requires_grad_() for t in (A, B))
    y = adapted(x.detach(), W, A, B)
    y.backward(g)
    return (y - x.detach() @ W.T).norm().item(), A.grad.norm(), B.grad.norm()


starts = {
    "A random, B zero": start(False, True),
    "A zero, B random": start(True, False),
    "both random": start(False, False),
    "both zero": start(True, True),
}
for name, numbers in starts.items():
    print(f"{name}: y moves by %5.1f, gradients %6.1f %6.1f" % numbers)
zero = ["".join("01"[n == 0] for n in numbers) for numbers in starts.values()]
assert zero == ["110", "101", "000", "111"]

# %%
# Two random matrices damage the model before the first step. Two zeros never move, because each gradient is multiplied
# by the other matrix:
#
# .. math::
#
#    \frac{\partial L}{\partial B} &= \frac{\alpha}{r} \, g^\top (x A^\top) \\
#    \frac{\partial L}{\partial A} &= \frac{\alpha}{r} \, B^\top g^\top x \\
#    \frac{\partial L}{\partial x} &= g \Bigl( W + \frac{\alpha}{r} B A \Bigr)
#
# LoRA draws A at random and sets B to zero. In the first step only B moves; from the second on both do. Here are the
# three formulas against autograd:

A.requires_grad_(), B.requires_grad_()
x.grad = None
adapted(x, W, A, B).backward(g)
with torch.no_grad():
    torch.testing.assert_close(B.grad, alpha / r * g.T @ (x @ A.T))
    torch.testing.assert_close(A.grad, alpha / r * B.T @ g.T @ x)
    torch.testing.assert_close(x.grad, g @ (W + change))

# %%
# None of them needs the gradient of W, which has N K numbers. The last one needs W itself: the backward pass still reads
# the frozen weight.
#
# What a step holds
# -----------------
#
# ``add_lora_`` gives adapters to all linear layers of a finished model but the head, and freezes everything else. Take
# one training step with each model, and add up the bytes of the tensors that exist at its end.


def shipped(bits=None, rank=0):
    model, _ = load_shipped()
    if bits is not None:
        quantize_(model, bits)
    if rank:
        add_lora_(model, rank, alpha=16.0)
    return model


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def linear_layers(model):
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


def step_bytes(model):
    optimizer = torch.optim.AdamW(trained(model))
    model(idx).logsumexp(-1).sum().backward()
    optimizer.step()
    params, states = list(model.parameters()), optimizer.state.values()
    return (
        sum(p.nbytes for p in params),
        sum(p.grad.nbytes for p in params if p.grad is not None),
        sum(t.nbytes for state in states for t in state.values()),
    )


_, tokenizer = load_shipped()
idx = torch.tensor([tokenizer.encode("The with statement is used to wrap")])
model = shipped(bits=4)
before = model(idx)
add_lora_(model, rank=8, alpha=16.0)
assert torch.equal(model(idx), before)  # bit for bit

held = {
    "all weights": step_bytes(shipped()),
    "LoRA": step_bytes(shipped(rank=8)),
    "LoRA, 4 bits": step_bytes(model),
}
for name, size in held.items():
    print(f"{name:12} weights %5.2f gradients %5.2f state %5.2f" % tuple(
        b / 1e6 for b in size
    ), f"together {sum(size) / 1e6:5.2f} MB")  # fmt: skip

# %%
# With P weights and Q trained numbers, all in float32, a step of AdamW holds 4 P + 4 Q + 8 Q bytes, and 4 for the step
# number of each tensor. In full training Q is P. The formulas hold to the byte:

full, lora, lora4 = held.values()
P = sum(p.numel() for p in model.parameters())
Q = sum(p.numel() for p in trained(model))
widths = [m.in_features + m.out_features for m in linear_layers(shipped())]
base, n_full = P - Q, len(list(shipped().parameters()))
assert 8 * sum(widths) == Q < 0.06 * P
assert full == (4 * base, 4 * base, 8 * base + 4 * n_full)
assert lora == (4 * P, 4 * Q, 8 * Q + 4 * 2 * len(widths))
assert lora4[1:] == lora[1:] and 8 * sum(lora4) < sum(full)

# %%
# The share of trained numbers falls as models grow, because the weight of a layer grows with its width squared, and its
# adapter with its width. Activations are not counted here: LoRA does not save any, as the quiz below shows.
#
# Three choices differ between programs. The paper draws A from a normal distribution; its authors' code and ``peft`` draw
# it uniformly within :math:`\pm 1 / \sqrt{K}`, and so does the package. The paper mostly adapts queries and values;
# QLoRA found that every linear layer of a block should have an adapter, which is the default here. And the adapters have
# the dtype of the weight beside them, while ``peft`` makes them float32 where the weights have 16 bits.
#
# Beside full training
# --------------------
#
# How close does LoRA come on a harder text than the lesson's? The shipped model has read docstrings and the language
# reference. We teach it the names of all Unicode characters, in capitals, from an old edition that never changes. Full
# training and LoRA need different learning rates; each has one that suited it in a short trial.

edition = unicodedata.ucd_3_2_0
names = [edition.name(chr(code), "") for code in range(0x10000)]
names = [n for n in names if n and not n.startswith(("CJK", "HANGUL SYL"))]
learn, test = (
    torch.tensor(
        tokenizer.encode(
            "\n".join(
                n
                for i, n in enumerate(names)
                if (i // 16 % 10 == 0) == held_out
            )
        )
    )
    for held_out in (False, True)
)
test = test[: 24 * 33].view(24, 33)


def loss_of(model, rows):
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model):
    return loss_of(model.eval(), test).item()


def fine_tuned(seed, lr, **kind):
    torch.manual_seed(seed)
    model = shipped(**kind).train()
    optimizer = torch.optim.AdamW(
        trained(model), lr, weight_decay=0.0, fused=True
    )
    for _ in range(12):
        starts = torch.randint(len(learn) - 33, (4, 1))
        optimizer.zero_grad()
        loss_of(model, learn[starts + torch.arange(33)]).backward()
        optimizer.step()
    return model.eval()


kinds = {
    "all weights": dict(lr=1e-3),
    "LoRA, 4 bits": dict(lr=1e-2, bits=4, rank=8),
    "rank 1": dict(lr=1e-2, bits=4, rank=1),
}
untrained = held_out_loss(shipped(bits=4))
models = {
    k: [fine_tuned(s, **how) for s in range(3)] for k, how in kinds.items()
}
losses = {k: [held_out_loss(m) for m in three] for k, three in models.items()}
print(f"before: {untrained:.2f}")
for name, three in losses.items():
    count = sum(p.numel() for p in trained(models[name][0]))
    print(
        f"{name:12}", *(f"{loss:.2f}" for loss in three), f" {count:9,} numbers"
    )

mean = {name: sum(three) / 3 for name, three in losses.items()}
way = {
    k: (untrained - m) / (untrained - mean["all weights"])
    for k, m in mean.items()
}
print(*(f"{name} {share:.0%}" for name, share in way.items()), sep=", ")
assert way["LoRA, 4 bits"] > 0.6 and 0.3 < way["rank 1"] < way["LoRA, 4 bits"]

# %%
# Six per cent of the numbers go most of the way, beside 4-bit weights. Rank 1, with less than one per cent, falls
# behind. Which rank is enough depends on the task: compare with full training before you believe in a small one.
#
# Merging
# -------
#
# The lesson merges the adapters into weights that are plain afterwards, and judges by the loss. Here are the logits.

tuned = models["LoRA, 4 bits"][0]
merged = copy.deepcopy(tuned)
merge_lora_(merged)
assert all(type(m.weight) is nn.Parameter for m in linear_layers(merged))
assert isinstance(merged.head.weight, QuantizedWeight)  # it had no adapter

for dtype, limit in ((torch.float64, 1e-11), (torch.float32, 1e-2)):
    a, b = (copy.deepcopy(tuned).to(dtype) for _ in range(2))
    merge_lora_(b)
    error = (a(idx) - b(idx)).abs().max().item()
    print(f"{dtype}: logits differ by up to {error:.0e}")
    assert error < limit

# %%
# Both differences are rounding, and fall with the precision. To have a small model again, quantise the merged weights
# once more. (``select`` leaves out the head, which still has codes.) What do the codes keep of the change? We measure the
# error of the new codes relative to the change, and also make the change smaller, by a smaller :math:`\alpha`, as if the
# model had been trained less.


def lost(factor):
    scaled = copy.deepcopy(tuned)
    before = [m.weight.dequantize() for m in linear_layers(scaled)]
    for m in linear_layers(scaled):
        m.alpha = m.alpha * factor
    merge_lora_(scaled)
    wanted = [m.weight.clone() for m in linear_layers(scaled)]
    loss = held_out_loss(scaled)
    quantize_(scaled, 4, select=lambda name: ".h." in name)
    got = [m.weight.dequantize() for m in linear_layers(scaled)]
    error = sum((u - v).square().sum() for u, v in zip(got, wanted)) ** 0.5
    size = sum((u - v).square().sum() for u, v in zip(before, wanted)) ** 0.5
    return (error / size).item(), loss, held_out_loss(scaled)


errors = {factor: lost(factor) for factor in (1.0, 0.1)}
for factor, (error, loss, again) in errors.items():
    print(f"change x {factor}: error {error:4.0%}, ", end="")
    print(f"loss {loss:.3f} merged, {again:.3f} in codes again")
(big, loss, again), (small, small_loss, small_again) = errors.values()
assert big < 0.8 < small and again - loss < 0.15 * (untrained - loss)
assert small_again - small_loss > 0.3 * (untrained - small_loss)

# %%
# The codes keep what a large change does to the loss, although their error is a good part of the change. Of a change
# that is small compared with the step between two codes, most is gone: numbers round back to where they were. So after
# training in small steps, leave the adapters apart or the weights plain.
#
# Bug museum
# ----------
#
# The optimizer that came first
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The optimizer holds the frozen weights, and no adapter. (M21)
#
# Build the optimizer, then add the adapters. The loop runs, gradients appear, and nothing complains.


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
    return [f"{x.item():.3f}" for x in loss], {*trained(model)} <= known


for adapters_first in (False, True):
    loss, complete = three_steps(adapters_first)
    print(loss, "the optimizer knows all that is trained:", complete)
    assert complete == adapters_first and (len(set(loss)) == 1) != complete

# %%
# The optimizer holds the weights that were frozen afterwards. They have no gradient any more, and an optimizer skips
# those. The fix is to build the optimizer after ``add_lora_``, and the check is the one printed: every trainable
# parameter is in the optimizer.
#
# Merged twice
# ~~~~~~~~~~~~
#
# The product is in the weight and still in the adapter. (M22)
#
# Add the product to the weight, and forget to take the adapter away. The layer then adds it a second time.

twice = copy.deepcopy(tuned)
dequantize_(twice)
with torch.no_grad():
    for m in linear_layers(twice):
        m.weight += m.alpha / m.rank * m.lora_b @ m.lora_a  # and it stays
wrong, right = held_out_loss(twice), held_out_loss(merged)
print(f"held-out loss {wrong:.2f} instead of {right:.2f}")
assert right + 0.1 < wrong < untrained + 2
assert abs(right - losses["LoRA, 4 bits"][0]) < 1e-3

# %%
# Nothing fails. The check compares the logits before and after a merge. In the package a merge removes the adapters, and
# a second one has nothing to add: it raises a ``ValueError``.
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

batch = pieces(split(reference())[1], tokenizer, length=48, count=8)


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
#    A good answer says which of them another learning rate could replace. Hint: draw the losses in one figure.
# 2. *Medium.* Turn the model to bfloat16, then add adapters, and train with the learning rate 0.0001. A good answer
#    counts the elements of A that did not move in the second step, in bfloat16 and in float32. (In the first B is zero,
#    and A cannot move.) Hint: near 0.05, neighbours in bfloat16 are 0.0002 apart or more.
# 3. *Hard.* Find the best change of rank r for one layer: train all weights, take :math:`\Delta W` of that layer, and cut
#    its singular values after r. A good answer shows the held-out loss with r = 1, 8 and 64, beside that of LoRA. Hint:
#    ``torch.linalg.svd``.
#
# Summary
# -------
#
# * A weight of codes gets no gradient and passes one on. LoRA trains two thin matrices beside it, r (N + K) numbers
#   instead of N K.
# * A is random and B is zero: the model starts unchanged, bit for bit, and B moves first. Two zeros never move.
# * With 4-bit weights, one training step held less than an eighth of the bytes of full training, activations aside, and
#   went most of its way on a new text.
# * Merged logits equal unmerged ones up to rounding. Codes keep a large change and lose a small one.
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
