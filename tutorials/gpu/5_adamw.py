r"""
AdamW: a whole step in one pass
===============================

An optimizer step touches every weight, its gradient and two running means, and computes next to nothing with them.
So its time is that of the memory. The fewer times it goes over these four tensors, the faster it is.

One kernel goes over them once. Each program owns the same block of all four: it reads four blocks and writes three,
over what it has read. The gradient stays as it is.
"""

# sphinx_gallery_needs = ["../7_optimizers/1_adamw", "1_swiglu"]
# sphinx_gallery_words = ["fused AdamW", "fused optimizer", "foreach", "fused=True", "optimizer kernel", "triton Adam", "recompile"]

from lm_from_scratch.drawings import gpu_programs as drawings

drawings.optimizer_blocks(
    {
        "θ": ("weights", True),
        "g": ("gradient", False),
        "m": ("mean of g", True),
        "v": ("mean of g²", True),
    },
    n=10,
    block=4,
)

# %%
# That is the traffic of 7 tensors. Now look at PyTorch. On a GPU its AdamW takes the *foreach* form by default. It starts,
# or *launches*, one operation for many tensors together: first all weights are decayed, then all m are updated, and so on.
#
# ``Traffic`` adds up bytes as on the page on `RoPE <4_rope.ipynb>`_. A tensor that an operation overwrites counts
# twice: it is read and written. The operation's *schema*, its list of arguments, says which tensors it overwrites.

import os

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def bytes_of(*trees):
    leaves = tree_leaves(trees)
    found = {id(x): x for x in leaves if isinstance(x, torch.Tensor)}
    return sum(tensor.nbytes for tensor in found.values())


class Traffic(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        given = zip(operation._schema.arguments, args)
        overwritten = [
            value
            for argument, value in given
            if argument.alias_info and argument.alias_info.is_write
        ]
        self.bytes += bytes_of(args, kwargs) + bytes_of(overwritten, result)
        return result


# %%
# **Predict first.** One pass moves 7 tensors. How many does foreach move?
#
# * 7 as well: it is one step
# * up to 14
# * more than 14

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
weight = torch.nn.Parameter(torch.randn(10_000, device=DEVICE))
weight.grad = torch.randn_like(weight)
optimizer = torch.optim.AdamW([weight], foreach=True)
optimizer.step()  # makes the running means
with Traffic() as traffic:
    optimizer.step()
moved = round(traffic.bytes / weight.nbytes)
print("more than 14:", moved > 14)

assert moved > 2 * 7

# %%
# More than twice as much. Foreach saves launches, not traffic: each operation reads from memory what the one before it
# has just written there.
#
# PyTorch also has ``fused=True``, its own kernel for the whole step, in one pass. We write ours to see what is in it.
#
# In place
# --------
#
# Begin with the weight decay: :math:`\theta \leftarrow (1 - \eta\lambda) \, \theta`, with the learning rate :math:`\eta`
# and the strength :math:`\lambda` of the decay. The kernel gets one pointer, reads through it and writes through it.

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl


@triton.jit
def decay_in_place(param, decay, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    p = tl.load(param + offsets, mask=inside)
    tl.store(param + offsets, decay * p, mask=inside)


# %%
# Is it safe to overwrite what is still being read? Here it is. A program writes only the numbers that it has read itself,
# and no other program touches them. So the programs may run in any order.

N = 1_500 if DEVICE == "cpu" else 10_000_000  # weights
BLOCK = 1024
torch.manual_seed(0)
p = torch.randn(N, device=DEVICE)
expected = 0.99 * p
decay_in_place[(triton.cdiv(N, BLOCK),)](p, 0.99, N, BLOCK=BLOCK)
print("matches torch:", torch.allclose(p, expected))

assert torch.allclose(p, expected, atol=1e-5, rtol=1e-5)

# %%
# A result in a tensor of its own would take as much memory as the weights. In place, the step needs none.
#
# The whole step
# --------------
#
# This is `AdamW <../7_optimizers/1_adamw.ipynb>`_. Here :math:`g` is the gradient, :math:`m` and :math:`v` are the running
# means of :math:`g` and :math:`g^2`, and :math:`t` is the number of the step, 1 for the first. Both means begin at 0, and
# :math:`c_1` and :math:`c_2` correct them for it:
#
# .. math::
#
#    m' &= \beta_1 m + (1 - \beta_1) \, g \\
#    v' &= \beta_2 v + (1 - \beta_2) \, g^2 \\
#    \theta' &= (1 - \eta\lambda) \, \theta - \eta \, \frac{m' / c_1}{\sqrt{v' / c_2} + \epsilon} \\
#    c_1 &= 1 - \beta_1^t, \qquad c_2 = 1 - \beta_2^t
#
# The kernel is this formula between four loads and three stores. PyTorch calls m and v ``exp_avg`` and ``exp_avg_sq``.
# ``rest1`` is :math:`1 - \beta_1`, and ``rest2`` is :math:`1 - \beta_2`.


@triton.jit
def step_in_place(
    param, grad, exp_avg, exp_avg_sq, n, beta1, rest1, beta2, rest2, eps,
    decay, lr, correction1, correction2, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    p = tl.load(param + offsets, mask=inside)
    g = tl.load(grad + offsets, mask=inside)
    m = tl.load(exp_avg + offsets, mask=inside)
    v = tl.load(exp_avg_sq + offsets, mask=inside)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    direction = m / correction1 / (tl.sqrt(v / correction2) + eps)
    tl.store(param + offsets, decay * p - lr * direction, mask=inside)
    tl.store(exp_avg + offsets, m, mask=inside)
    tl.store(exp_avg_sq + offsets, v, mask=inside)


# %%
# Everything that depends on the step alone is computed once, in Python, and handed over.


def constants(t, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01):
    fixed = beta1, 1 - beta1, beta2, 1 - beta2, eps
    return *fixed, 1 - lr * weight_decay, lr, 1 - beta1**t, 1 - beta2**t


# %%
# The first step and a late one, against the formula in PyTorch:

from lm_from_scratch.optim.adamw import adamw as reference


def matches(ours, theirs, off=1e-5):
    pairs = zip(ours, theirs, strict=True)
    return all(torch.allclose(a, b, atol=off, rtol=off) for a, b in pairs)


for t in (1, 1000):
    p, g, m, v = torch.randn(4, N, device=DEVICE)
    v = v * v
    expected = reference(p, g, m, v, t)
    grid = (triton.cdiv(N, BLOCK),)
    step_in_place[grid](p, g, m, v, N, *constants(t), BLOCK=BLOCK)
    print(f"step {t} matches torch: {matches([p, m, v], expected)}")
    assert matches([p, m, v], expected)

# %%
# Does it train a model? Our small Qwen2 reads a sentence, and a backward pass gives every weight a gradient. PyTorch's
# optimizer and our kernel each take the first step, from the same weights.

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss

model, tokenizer = load_shipped("qwen2-docs")
model.to(DEVICE)
ids = tokenizer.start("A kernel goes over the memory once.")
idx = torch.tensor([ids], device=DEVICE)
before = causal_lm_loss(model(idx), next_token_targets(idx))
before.backward()

weights = list(model.parameters())
ours = [weight.detach().clone() for weight in weights]
torch.optim.AdamW(weights, lr=1e-3).step()
for p, weight in zip(ours, weights):
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    step = p, weight.grad, m, v, p.numel(), *constants(1)
    step_in_place[(triton.cdiv(p.numel(), 4096),)](*step, BLOCK=4096)

# %%
# There are now two sets of new weights. They agree, and the sentence has become more likely.

with torch.no_grad():
    after = causal_lm_loss(model(idx), next_token_targets(idx))
print("weights match torch:", matches(ours, weights))
print("loss falls:", bool(after < before))

assert matches(ours, weights)
assert after < before

# %%
# Why does the host subtract?
# ---------------------------
#
# The *host* is the Python program that launches a kernel. The kernel could compute :math:`1 - \beta_2` itself. But it
# computes in float32, and there 0.999 is rounded.
#
# **Predict first.** float32 has about 7 digits. How many of them are right in 1 - 0.999, if float32 subtracts?
#
# * all 7
# * about 5
# * none

beta2 = torch.tensor(0.999)  # float32
in_float32 = (1 - beta2).item()
error = abs(in_float32 / (1 - 0.999) - 1)
once = abs(torch.tensor(1 - 0.999).item() / (1 - 0.999) - 1)
print(f"subtracted in float32: {in_float32:.9f}, wrong by {error:.0e}")
print("rounded to float32 once, wrong by less than 1e-7:", once < 1e-7)

assert 1e-5 < error < 1e-4 and once < 1e-7

# %%
# About five. The rounding is in the last digits of 0.999, and when it is taken from 1, the first digits cancel and the
# last ones stay. Every v would carry this error, a hundred times larger than the rounding of float32. Python subtracts in
# float64, and the result is rounded once.
#
# A new number is not a new kernel
# --------------------------------
#
# The learning rate and the step change at every call. Triton compiles a version of a kernel when it first meets an
# argument of a new kind. Does a new number need a new version?
#
# * For a ``tl.constexpr``, each value does: it is part of the code.
# * For an integer there are three versions: 1, multiples of 16, and all others. Addresses made of a multiple of 16 allow
#   faster loads, and a 1 can be left out.
# * For a float, none does.
#
# With the step as a ``tl.constexpr``, training would never stop compiling. That is why the host turns the step into
# floats, :math:`c_1` and :math:`c_2`.
#
# In depth: `versions counted, the package's optimizer, and two silent mistakes <5a_adamw_in_depth.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* Add ``maximize`` to ``step_in_place`` without another tensor. A right answer equals the reference with
#    ``-g``. Hint: which constant meets the gradient first? It meets it once more, where the sign does not matter.
# 2. *Medium.* Clip by the norm inside the step: the kernel multiplies the gradient by a factor that is in a tensor of
#    one number. A right answer equals ``clip_grad_norm_`` and then the step, and counts what it saves. Hint:
#    ``of_the_step`` in the package's kernel.
#
# Summary
# -------
#
# * A step of AdamW reads 4 tensors and writes 3. PyTorch's foreach moves more than twice as much.
# * Overwriting is safe where each program writes only what it has read and no other program reads.
# * The host computes the constants of a step in float64, and they are rounded once. As floats they need no new version.
