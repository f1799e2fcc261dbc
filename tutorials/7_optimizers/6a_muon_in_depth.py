r"""
Muon in depth: is yours right?
==============================

A Muon that is slightly wrong trains nearly as well as a right one, so a loss curve will not tell you. This page deepens
the lesson on `Muon <6_muon.ipynb>`_. Does the package's Muon take the same steps as ``torch.optim.Muon``? What do other
coefficients, bfloat16 and the shape of a matrix change? What does a step cost, and when is it not worth it?

Equal to PyTorch's
------------------

Muon needs two things: the iteration, which the lesson wrote in five lines, and the momentum, one number for each
weight.
"""

# sphinx_gallery_needs = ["6_muon"]
# sphinx_gallery_words = ["Newton-Schulz coefficients", "adjust_lr_fn", "match_rms_adamw", "Muon learning rate", "Muon bf16", "Muon FSDP", "polar decomposition", "matrix sign", "Muon memory", "Muon fine-tuning", "distributed Muon"]
import inspect
import math
import time

import torch

from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.choose import state_bytes
from lm_from_scratch.optim.muon import Muon, orthogonalize, scale_of
from lm_from_scratch.runs.config import TrainConfig

print(inspect.getsource(orthogonalize).split('"""')[-1].lstrip("\n"))
print(inspect.getsource(Muon.update_matrix).split('"""')[-1].lstrip("\n"))

# %%
# ``addmm`` multiplies and adds in one pass, as in torch's code, so that even the rounding is the same. Here are ten
# steps of both, from the same weights and gradients. Torch always computes the iteration in bfloat16, so we ask the
# package's Muon for the same.

SHAPES = (48, 16), (16, 48), (32, 32), (7, 13)


def weights(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, dtype=dtype)) for s in SHAPES]


def take_steps(optimizer, params, steps=10):
    torch.manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, dtype=p.dtype)
        optimizer.step()
    return [p.detach() for p in params]


for dtype in (torch.float32, torch.float64, torch.bfloat16):
    for scale in ("original", "match_rms_adamw"):
        a, b = weights(dtype), weights(dtype)
        options = dict(lr=0.02, weight_decay=0.1, momentum=0.95)
        ours = Muon(a, ns_dtype="bfloat16", adjust_lr_fn=scale, **options)
        theirs = torch.optim.Muon(b, adjust_lr_fn=scale, **options)
        pairs = zip(take_steps(ours, a), take_steps(theirs, b))
        same = all(torch.equal(x, y) for x, y in pairs)
        print(f"{str(dtype)[6:]:9} {scale:16} same bits: {same}")
        assert same

# %%
# Every bit is the same. But what if torch is wrong? There is a test that needs no other program, best in float64: the
# iteration must do to each singular value what the polynomial does to a number, and leave the singular vectors alone.


def lift(x, rounds=5, coefficients=(3.4445, -4.7750, 2.0315)):
    a, b, c = coefficients
    for _ in range(rounds):
        x = a * x + b * x**3 + c * x**5
    return x


def with_strengths(m, n, s, seed=0):
    """A matrix with the singular values s, and its U and V."""
    torch.manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(k, len(s)).double()).Q for k in (m, n))
    return u * s @ v.T, u, v


s = torch.tensor([1.0, 0.5, 0.1, 0.01, 0.001, 0.0]).double()
for m, n in ((9, 6), (6, 9), (40, 30)):
    G, u, v = with_strengths(m, n, s)
    want = u * lift(s / s.norm()) @ v.T
    worst = (orthogonalize(G) - want).abs().max().item()
    print(f"{m:2} x {n:2}: largest difference {worst:.0e}")
    assert worst < 1e-12

# %%
# Which coefficients?
# -------------------
#
# For coefficients that converge to 1, ask for three things: 1 stays 1, and the polynomial has a slope and a curvature
# of 0 there. That gives 15/8, -10/8 and 3/8. The usual ones were found by a search: as steep at 0 as possible, with a
# result that stays near 1.

x = torch.logspace(-4, 0, 4001, dtype=torch.float64)
kinds = {
    "usual": (3.4445, -4.7750, 2.0315),
    "convergent": (15 / 8, -10 / 8, 3 / 8),
}
print("rounds             from 0.001 on    from 0.01 on     from 0.1 on")
for name, numbers in kinds.items():
    for rounds in (3, 5, 7, 10):
        line = f"{name:11} {rounds:2}"
        for low in (1e-3, 1e-2, 1e-1):
            y = lift(x[x >= 0.999 * low], rounds, numbers)
            line += f"    {y.min():.2f} to {y.max():.2f}"
        print(line)

usual, convergent = (lift(x[x > 0.0099], 5, k) for k in kinds.values())
assert usual.min() > 0.68 and usual.max() < 1.14
assert 0.2 < convergent.min() < 0.25 and convergent.max() < 1 + 1e-9
assert lift(x, 5).max() < 1.21

# %%
# Five rounds of the usual coefficients lift a strength of 0.01 into the band from 0.68 to 1.13; five of the convergent
# ones lift it only to 0.23. The price is precision: with more rounds the usual band stays as wide as it is. Strengths
# below 0.01 are still on their way up, and may overshoot to 1.2.
#
# Why not ten rounds, to be sure? Because there is something that should *not* be lifted. The gradient of a batch with
# few tokens has few directions. All others are rounding errors.

torch.manual_seed(0)
few = torch.randn(64, 8) @ torch.randn(8, 64)  # 8 directions
for rounds in (5, 10, 15, 20):
    s = torch.linalg.svdvals(orthogonalize(few, rounds))
    print(f"{rounds:2} rounds: 8th {s[7]:.2f}, 9th {s[8]:.0e}")

five, twenty = (torch.linalg.svdvals(orthogonalize(few, k)) for k in (5, 20))
assert five[8] < 1e-3 and twenty[8] > 0.5

# %%
# After 20 rounds the 9th direction, which is nothing but rounding errors, moves the weights as far as the others. An
# exact decomposition would do the same: where the strength is 0, :math:`U V^\top` is not defined.
#
# bfloat16
# --------
#
# Torch computes the iteration in bfloat16. On a GPU that is fast; on a CPU it depends on the processor. It makes an
# error of about one percent, in a step that is only near :math:`U V^\top` anyway.

torch.manual_seed(0)
G = torch.randn(512, 128)


def milliseconds(dtype):
    X, times = G.to(dtype), []
    for _ in range(20):
        start = time.perf_counter()
        orthogonalize(X)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


exact, rounded = orthogonalize(G.double()), orthogonalize(G.bfloat16()).double()
error = (rounded - exact).norm() / exact.norm()
print(f"error of bfloat16: {error:.1%}")
for dtype in (torch.float32, torch.bfloat16):
    print(f"{str(dtype)[6:]:9} {milliseconds(dtype):.2f} ms")

assert 1e-3 < error < 0.02
assert (orthogonalize(G) - exact).norm() < 1e-5 * exact.norm()

# %%
# Two scales by shape
# -------------------
#
# If all strengths of a matrix (m, n) are 1, its numbers have a root mean square (*rms*) of
# :math:`1 / \sqrt{\max(m, n)}`. So the weights of larger matrices would move less. Two conventions correct this, with
# different ideas of what should be equal.
#
# * ``original`` multiplies by :math:`\sqrt{\max(1, m / n)}`, where m is the number of outputs. Then a step changes the
#   *output* of every matrix alike. Its learning rates are near 0.02.
# * ``match_rms_adamw`` multiplies by :math:`0.2 \sqrt{\max(m, n)}`. Then every *weight* moves by about 0.2 times the
#   rate, as is usual in AdamW, and the rates of AdamW are a good start.

print("shape          original: norm, rms        matched: norm, rms")
for m, n in ((128, 128), (512, 128), (128, 512), (4096, 4096)):
    line = f"{m:4} x {n:4}"
    for kind in ("original", "match_rms_adamw"):
        norm = scale_of(m, n, kind)
        line += f"      {norm:8.2f} {norm / math.sqrt(max(m, n)):8.4f}"
    print(line)
    assert scale_of(m, n) / math.sqrt(max(m, n)) == 0.2 or m == 512
torch.testing.assert_close(scale_of(512, 128) / math.sqrt(512), 0.2)

# %%
# *Norm* is the largest strength: what a step can add to the output of an input of length 1. A square matrix of width
# 4096 has norm 1 in one convention, and 12.8 in the other. So a rate that was tuned for one is wrong for the other, and
# by a different factor for each shape.

# %%
# The bytes and the work
# ----------------------
#
# Muon keeps one number for each weight, AdamW two. How many bytes is that for Llama 7B in float32? We build the model
# on the meta device, as shapes without memory. Embedding and head stay with AdamW.

config = Qwen2Config(
    vocab_size=32000, n_layer=32, n_head=32, n_kv_head=32, n_embd=4096,
    intermediate_size=11008, block_size=2048, tie_word_embeddings=False,
    eos_token_id=None,
)  # fmt: skip
with torch.device("meta"):
    llama = Qwen2ForCausalLM(config)
held = {
    kind: state_bytes(llama, TrainConfig(steps=1, optimizer=kind, rank=1024))
    for kind in ("adamw", "muon", "galore")
}
for kind, size in held.items():
    print(f"{kind:7} {size / 1e9:5.1f} GB")

assert 0.5 < held["muon"] / held["adamw"] < 0.53
assert held["galore"] < held["muon"]

# %%
# Now the work. With s and l for the shorter and the longer side, a round takes :math:`2 s^2 l` operations for
# :math:`X X^\top`, :math:`2 s^3` for its square, and :math:`2 s^2 l` for the last product. The forward and backward
# passes of this matrix take :math:`6 s l` for each token of the batch. So what counts is the shorter side divided by
# the number of tokens. The number of layers does not matter.


def share(s, l, tokens):
    return 5 * (4 * s * s * l + 2 * s**3) / (6 * s * l * tokens)


for name, s, l, tokens in (
    ("the race of the lesson", 64, 192, 8 * 64),
    ("the shipped models", 128, 512, 16 * 256),
    ("Llama 7B", 4096, 11008, 4 * 2**20),
):
    print(f"{name:23} {share(s, l, tokens):6.1%} of the passes")
    assert 10 / 3 * s / tokens < share(s, l, tokens) <= 5 * s / tokens

assert share(64, 192, 512) > 0.4 > share(128, 512, 4096) > 0.1
assert share(4096, 11008, 4 * 2**20) < 0.005

# %%
# A small model with small batches pays most. A large one pays less than one percent, as long as its matrices are whole.
# With `FSDP <5_data_parallel.ipynb>`_ they are cut into rows, one part for each process, but the singular vectors
# belong to all rows together. ``ShardedMuon`` gathers each matrix and lets every process do the whole iteration, which
# is right and wasteful. Large runs give each matrix to one process.
#
# When it does not help
# ---------------------
#
# * **Weights that do not work as matrices.** Embeddings, output heads, norms and biases, as the lesson shows, and
#   depthwise convolutions. (Experts are a stack of matrices: each is flattened alone.)
# * **Fine-tuning a model that AdamW trained.** The authors of Moonlight tried both orders, and found no clear gain
#   where pretraining and fine-tuning had different optimizers.
# * **Where you lack memory.** Half of AdamW's state is still more than the state of GaLore, or moments of one byte
#   each.
#
# A longer race
# -------------
#
# The GPT-2 that ships with this course was first trained with AdamW: 3,000 steps took 49 core-minutes, and it came to
# 2.016 bits for each byte of held-out text. Then it was trained anew with Muon: 2,650 steps took as long on the same
# machine, and it came to 1.931. So the model that you have is Muon's. Each ran once, from one seed, and with Muon the
# dropout was 0.2 in place of 0.1, so not all of the gain need be Muon's. (The ``core_minutes`` in ``record.json`` are
# fewer, because that run was on a faster machine.)

import json

from lm_from_scratch.checkpoint.folders import PRETRAINED

shipped = json.loads((PRETRAINED / "gpt2-docs" / "record.json").read_text())
assert (shipped["arguments"]["optimizer"], shipped["steps"]) == ("muon", 2650)
assert round(shipped["held_out"]["all"]["bits_per_byte"], 3) == 1.931

# %%
# Bug museum
# ----------
#
# Each of these trains, and the loss falls.
#
# No iteration at all
# ~~~~~~~~~~~~~~~~~~~
#
# In 2026 somebody found that in its default setting the Muon of a large training library ran no Newton-Schulz iteration
# at all (M125): another part of the library was supposed to do that, and was switched off. Loss curves still fell, as
# they do with plain gradient descent. You see it in the weights: the *change* of a matrix in its first step must be
# flat. It is a test for any Muon.


def band_of_a_step(make, shape=(96, 48)):
    torch.manual_seed(0)
    u, s, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    p = torch.nn.Parameter(torch.zeros(shape))
    p.grad = u * torch.linspace(0.1, 1, len(s)) @ v  # known strengths
    make([p]).step()
    change = torch.linalg.svdvals(p.detach())
    return (change[-1] / change[0]).item()


makers = {
    "Muon": lambda p: Muon(p, momentum=0.95, weight_decay=0.0),
    "torch's": lambda p: torch.optim.Muon(p),
    "without the iteration": lambda p: torch.optim.SGD(p, momentum=0.95),
}
for name, make in makers.items():
    print(f"{name:22} weakest / strongest: {band_of_a_step(make):.2f}")
    assert (band_of_a_step(make) > 0.5) == (name != "without the iteration")

# %%
# A copy that is none
# ~~~~~~~~~~~~~~~~~~~
#
# ``G.bfloat16()`` copies a float32 matrix. But if the matrix is bfloat16 already, it returns the matrix itself, and the
# division by the norm, in place, changes the caller's matrix. In torch that was the momentum, for weights in bfloat16
# and without Nesterov (M126): each step shrank to norm 1 what all earlier gradients had left. Training went on, with a
# wrong momentum.


def normalized(G):  # wrong
    X = G.bfloat16()
    return X.div_(X.norm())


for dtype in (torch.float32, torch.bfloat16):
    momentum = torch.full((4, 4), 2.0, dtype=dtype)
    normalized(momentum)
    print(
        f"{str(dtype)[6:]:9} momentum afterwards: {momentum[0, 0].item():.2f}"
    )
    assert (momentum[0, 0] == 2) == (dtype == torch.float32)

# %%
# A test in float32 cannot see this. Run it in bfloat16, too: the momentum must be the running mean of the gradients,
# and nothing else.

p = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
optimizer = Muon([p], momentum=0.9, nesterov=False, ns_dtype="bfloat16")
mean = torch.zeros_like(p)
for _ in range(5):
    p.grad = torch.randn_like(p)
    optimizer.step()
    mean = mean.lerp(p.grad, 1 - 0.9)
assert torch.equal(optimizer.state[p]["momentum_buffer"], mean)

# %%
# The wrong side
# ~~~~~~~~~~~~~~
#
# The original scale must know which side of a weight is the output (M127). ``nn.Linear`` stores (outputs, inputs). The
# ``Conv1D`` of GPT-2 in ``transformers`` stores (inputs, outputs), and there the widening matrix of the MLP gets 1 and
# not 2. The matched scale is the same for both.

for kind in ("original", "match_rms_adamw"):
    print(kind, scale_of(512, 128, kind), scale_of(128, 512, kind))
assert scale_of(512, 128, "original") == 2 * scale_of(128, 512, "original")
assert scale_of(512, 128) == scale_of(128, 512)

# %%
# Exercises
# ---------
#
# 1. *Easy.* Copy ``orthogonalize`` without the line that divides by the norm, and try strengths of 1.2 and 1.5. A good
#    answer says from which strength on the result leaves the band, and from which it explodes.
# 2. *Medium.* The matrix ``c_attn`` of GPT-2 holds queries, keys and values, (3C, C). Compare the strengths of its
#    three parts when they are flattened together, and one by one. A good answer says which part gets less than its
#    share when they are together.
# 3. *Hard.* Write the step for a stack (E, m, n) with ``torch.baddbmm`` and without a loop. A good answer agrees with
#    ``Muon`` on experts, and measures from how many experts on it is faster.
#
# Sources
# -------
#
# * `Jordan et al., Muon <https://kellerjordan.github.io/posts/muon/>`_, 2024: the coefficients, what stays with AdamW.
# * `Liu et al., Muon is Scalable for LLM Training <https://arxiv.org/abs/2502.16982>`_, 2025: the matched scale, decay,
#   fine-tuning, many processes.
# * `Bernstein and Newhouse, Old Optimizer, New Norm <https://arxiv.org/abs/2409.20325>`_, 2024: why a step of norm 1.
# * `PyTorch, pull request 194664 <https://github.com/pytorch/pytorch/pull/194664>`_, 2026: the copy that was none.
# * `DeepSpeed, pull request 8442 <https://github.com/deepspeedai/DeepSpeed/pull/8442>`_, 2026: no iteration by default.

import lm_from_scratch

print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
