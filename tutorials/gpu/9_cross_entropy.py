r"""
Cross-entropy: the loss without its logits
==========================================

The logits of a language model are often the largest tensor of a training step: one number for each token and each entry of the
vocabulary. The loss reduces each row of them to a single number.

Here are the programs of a kernel that does so, for 8192 tokens and the vocabulary of Qwen2. Each program walks along its row in
blocks, and a mask cuts off the end of the last one.
"""

# sphinx_gallery_needs = ["2_softmax", "6_matmul"]
# sphinx_gallery_words = ["fused linear cross entropy", "chunked cross entropy", "logits memory", "Liger", "CUDA out of memory loss", "cut cross entropy", "log-sum-exp"]

from lm_from_scratch.drawings import gpu_tiles as drawings

FULL_N, FULL_V, FULL_C = 8192, 151_936, 896  # Qwen2-0.5B
drawings.rows_of_logits(FULL_N, FULL_V, 4096)

# %%
# How often must the logits be read? And if all that is wanted of a row is one number, must the row be in memory at all?
#
# Count first
# -----------
#
# A token has the logits :math:`z` and the target :math:`y`, the token that really follows. The first term of its loss
# is called the log-sum-exp, lse for short:
#
# .. math::
#
#    \mathcal{L} &= \mathrm{lse} - z_y, \qquad \mathrm{lse} = \log \sum_j e^{z_j} \\
#    \frac{\partial \mathcal{L}}{\partial z_j} &= e^{z_j - \mathrm{lse}} - [j = y]
#
# The gradient is the softmax, minus 1 at the target: :math:`[j = y]` is 1 there and 0 elsewhere. Forward has to read the
# logits once. Backward has to read them once and write their gradient.
#
# **Predict first.** How many bytes are the logits of those 8192 tokens in bfloat16, at 2 bytes a number?
#
# * 25 MB
# * 250 MB
# * 2.5 GB

from lm_from_scratch.instruments.roofline import GPUS, Cost

number = FULL_N * FULL_V
cost = Cost(bytes=3 * 2 * number, operations=8 * number)
floor = 1e3 * cost.floor(GPUS["H100"])
print(f"the logits hold {2 * number / 1e9:.2f} GB")
print(f"at least {cost.bytes / 1e9:.1f} GB moved, both ways")
print(f"at least {floor:.1f} milliseconds on an H100")

assert round(2 * number / 1e9, 2) == 2.49
assert number / 2 > 494_032_768  # the weights of Qwen2-0.5B

# %%
# The weights of the whole model take less than half of that. PyTorch moves six times the least number of bytes, as
# `cross-entropy in one pass <9a_cross_entropy_in_one_pass.ipynb>`_ counts.
#
# One pass
# --------
#
# For real logits, the shipped Qwen2 reads a sentence. The targets are the next tokens. Without a GPU the kernels are interpreted.

import os

import torch

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.training import loss as reference

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
model, tokenizer = load_shipped("qwen2-docs")
text = "If the file does not exist, an exception is raised."
ids = torch.tensor(tokenizer.start(text), device=DEVICE)
targets = ids[1:]
with torch.no_grad():
    x = model.to(DEVICE).model(ids[None])[0, :-1].contiguous()  # (N, C)
weight = model.model.embed_tokens.weight.detach()  # (V, C), the output head
logits = x @ weight.T  # (N, V)
N, V = logits.shape

# %%
# The *online* sum of the page on `softmax <2_softmax.ipynb>`_ reads a row once. It keeps m, the largest logit so far, and
# :math:`\ell`, the sum of :math:`e^{z - m}`. After the last block, the lse is :math:`m + \log \ell`.
#
# A program takes a row, and m starts at the lowest finite number. Large offsets need 64 bits, so the number of the token has them.

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def log_sum_kernel(logits, log_sums, V, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    m = tl.full((), LOWEST, tl.float32)
    l = tl.zeros((), tl.float32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        at = logits + token * V + columns
        z = tl.load(at, mask=columns < V, other=float("-inf"))
        new_m = tl.maximum(m, tl.max(z, 0))
        l = l * tl.exp(m - new_m) + tl.sum(tl.exp(z - new_m), 0)
        m = new_m
    tl.store(log_sums + token, m + tl.log(l))


# %%
# The masked places hold minus infinity, whose exponential is 0. From the lse, the loss subtracts the logit of the target.

log_sums = torch.empty(N, device=DEVICE)
log_sum_kernel[(N,)](logits, log_sums, V, BLOCK=1024)
losses = log_sums - logits.gather(1, targets[:, None])[:, 0]
plain = reference.causal_lm_loss(logits, targets)
print(f"{losses.mean():.2f} nats, PyTorch {plain:.2f}")

torch.testing.assert_close(losses.mean(), plain, atol=1e-4, rtol=1e-4)
torch.testing.assert_close(log_sums, logits.logsumexp(1), atol=1e-4, rtol=1e-4)

# %%
# The logits of the sentence were read once, and this is its loss. (A *nat* is the unit of a natural logarithm.)
#
# Many programs for one row
# -------------------------
#
# The logits of a token are a product, :math:`z = W x`: x is its hidden state, C numbers, and W (V, C) is the head. A kernel
# that multiplies tiles has a tile of logits in its registers, and could reduce it there. Then no logit goes to memory.
#
# If a program took whole rows of logits, there would be few programs, each with a long loop. So the vocabulary is split as
# well, and each program finds m and :math:`\ell` of its part. Here are 45 tokens and a vocabulary of 301:

drawings.split_vocabulary(45, 301, 32, 128, 64, (1, 2))

# %%
# **Predict first.** Each part has its own m and :math:`\ell`. How do you get those of the row?
#
# * Take the largest m, and add up the sums as they are.
# * Take the largest m, and multiply each sum by :math:`e^{m_{part} - m}` first.
# * It is not possible without the logits.


def merged(maxima, sums, factor):
    """m and log l of each token, from those of P parts: (P, N) to (N,)."""
    m = maxima.amax(0)
    return m, (sums * factor(maxima - m)).sum(0).log()


parts = logits.split(1000, 1)
maxima = torch.stack([part.amax(1) for part in parts])
sums = [(z - m[:, None]).exp().sum(1) for z, m in zip(parts, maxima)]
for name, factor in (("as they are", torch.ones_like), ("factor", torch.exp)):
    m, log_l = merged(maxima, torch.stack(sums), factor)
    right = torch.allclose(m + log_l, log_sums, atol=1e-4)
    print(f"{name}: the same lse: {right}")
    assert right == (factor is torch.exp)

# %%
# Parts merge as blocks do. Each sum is relative to its own maximum, and one factor makes it relative to the largest.
#
# The kernel without logits
# -------------------------
#
# The kernel below is that of the package. A program takes ``BLOCK_N`` tokens and ``SPLIT`` rows of W, and walks over these rows
# in tiles of ``BLOCK_V``. ``logits_tile`` multiplies, as on the page on `matrix products <6_matmul.ipynb>`_. Then come the lines
# of the online sum, now for a vector of tokens.

import inspect

from lm_from_scratch.kernels import loss as kernels

# %%
# ``target_logits`` gets the logit of the target, from the one tile that has it. (``do_not_specialize`` tells the compiler not
# to look at N, so that another number of tokens is not another kernel.)

print(inspect.getsource(kernels.linear_cross_entropy_kernel.fn))

# %%
# The ``tl.where`` before the maximum is needed. Where the vocabulary has ended and the tile has not, ``logits_tile`` reads the last
# row of W again, and these copies must not count.
#
# Compute it again
# ----------------
#
# The backward pass needs the softmax, and so the logits, which were not kept. It computes them again. The gradient of
# the logits, G (N, V), is then needed in two products. For all N tokens at once, with x (N, C):
#
# .. math::
#
#    \frac{\partial \mathcal{L}}{\partial x} = G W, \qquad \frac{\partial \mathcal{L}}{\partial W} = G^\top x
#
# So a kernel writes G for one *chunk* of the vocabulary, the two products use it, and the next chunk overwrites it. We compare
# the package's function, which does all this, with a loss that makes the logits.


def without_logits(x, weight, targets):
    return kernels.chunked_causal_lm_loss(x, weight, targets, chunk=1000)


def with_logits(x, weight, targets):
    return reference.causal_lm_loss(x @ weight.T, targets)


results = []
for loss in (without_logits, with_logits):
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    value = loss(*leaves, targets)
    results.append([value, *torch.autograd.grad(N * value, leaves)])

for name, a, b in zip(("loss", "gradient of x", "gradient of W"), *results):
    print(f"{name:13} matches: {torch.allclose(a, b, atol=1e-4, rtol=1e-4)}")
    assert torch.allclose(a, b, atol=1e-4, rtol=1e-4)

# %%
# The numbers are the same, and the logits of the sentence were never in memory. How much does that save?
#
# **Predict first.** At the peak of PyTorch's backward pass there are three float32 tensors of N times V numbers: the
# logarithm of the softmax, which was kept, the gradient that arrives there, and the gradient of the logits. The *fused*
# loss, without logits, holds G for one chunk of 4096 entries, the gradient of x, and m and :math:`\ell` of each part.
# For the 8192 tokens above, what share of PyTorch's memory is that?
#
# * half
# * a tenth
# * less than a hundredth

chunk = inspect.signature(kernels.chunked_causal_lm_loss).parameters["chunk"]
G = 2 * FULL_N * chunk.default
of_x = 4 * FULL_N * FULL_C
of_parts = 2 * 4 * FULL_N * triton.cdiv(FULL_V, kernels.SPLIT)
fused, pytorch = G + of_x + of_parts, 3 * 4 * number
print(f"PyTorch {pytorch / 1e9:.2f} GB, fused {fused / 1e9:.2f} GB")

assert pytorch > 100 * fused and chunk.default == 4096

# %%
# The price is one more product: with the logits computed again, forward and backward make 4 instead of 3. On paper, that takes
# an H100 about as long as moving the logits and their gradient, so the reason to do it is memory, not time.
# `The loss without logits in depth <9b_loss_without_logits_in_depth.ipynb>`_ builds the kernel and counts both.
#
# Exercises
# ---------
#
# 1. *Easy.* Let ``log_sum_kernel`` start with m and :math:`\ell` of 0 instead. A right answer gives a row for which that is exact, and
#    one for which it gives infinity or 0. Hint: what if all logits are -1000?
# 2. *Easy.* Count bytes and operations of the fused loss for 16 tokens instead of 8192. A right answer says whether memory or
#    arithmetic sets its floor, and from how many tokens on it is the other. Hint: W is read once, whatever N is.
#
# Summary
# -------
#
# * The loss needs m and :math:`\log \ell` of a row, which an online sum finds in one pass.
# * The sums of parts merge, so many programs can share a row.
# * Fused with the head, the loss holds no logits: less than a hundredth of PyTorch's memory, for a fourth product.
#
# A running maximum, a running sum, a product that never reaches memory: add a second product after them, and you have
# attention, on the next page.
