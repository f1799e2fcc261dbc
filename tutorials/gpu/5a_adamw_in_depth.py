r"""
AdamW as a kernel, in depth
===========================

The lesson on `AdamW as a kernel <5_adamw.ipynb>`_ does a whole step in one pass, in place. What makes Triton compile
such a kernel again? Is the package's optimizer PyTorch's, in every option, dtype and in mid-training? And what breaks a
step without an error message?
"""

# sphinx_gallery_needs = ["5_adamw"]
# sphinx_gallery_words = ["recompilation", "do_not_specialize", "constexpr", "capturable", "CUDA graph optimizer", "load_state_dict"]

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

import inspect
import subprocess
import sys
import tempfile
from pathlib import Path

from lm_from_scratch.instruments.roofline import GPUS, Cost, show
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.adamw import adamw as reference

N = 1_500 if DEVICE == "cpu" else 10_000_000  # weights
BLOCK = 1024
torch.manual_seed(0)


def tensors(n=N, dtype=torch.float32):
    """A weight, its gradient, and its running means."""
    p, g, m, v = torch.randn(4, n, device=DEVICE).to(dtype)
    return [p, g, m, v * v]


def matches(ours, theirs, tolerance=1e-5):
    return all(
        torch.allclose(a, b, atol=tolerance, rtol=tolerance)
        for a, b in zip(ours, theirs, strict=True)
    )


# %%
# Count first
# -----------
#
# Four tensors are read and three written: 7 tensors of traffic, and 15 operations for each weight. Here they are for
# all weights of Qwen2-0.5B in float32.

with torch.device("meta"):
    model = Qwen2ForCausalLM(Qwen2Config())
sizes = [parameter.numel() for parameter in model.parameters()]
FULL = sum(sizes)
cost = Cost(bytes=7 * 4 * FULL, operations=15 * FULL)
floor = cost.floor(GPUS["H100"])
print(f"{FULL:,} weights in {len(sizes)} tensors")
print(f"{cost.bytes:,} bytes, {cost.intensity:.2f} operations per byte")
print(f"at least {1e3 * floor:.2f} milliseconds on an H100")
assert floor == cost.bytes / GPUS["H100"].bandwidth

# %%
# The floor is 7 passes over memory. The package's optimizer launches one kernel for each tensor, and many tensors of a
# model are small: there the launch takes longer than the step.

small = sum(size <= 4864 for size in sizes)
print(f"{small} of {len(sizes)} tensors have at most 4,864 weights")
assert small > len(sizes) / 3
show("adamw", cost)

# %%
# A new number is not a new kernel
# --------------------------------
#
# What does a compiled kernel do with a number that it has not seen? This process may interpret its kernels, so a child
# process compiles them, for an H100 and without running anything. It calls three kernels with the steps 1 to 17, and
# counts the versions that Triton keeps. In each the step is something else: a ``tl.constexpr``, an integer, or a float.

CHILD = """
import torch, triton, triton.language as tl
from lm_from_scratch.kernels.compilation import compiled_for

@triton.jit
def constexpr(x, step: tl.constexpr):
    tl.store(x, tl.load(x) * step)

@triton.jit
def integer(x, step):
    tl.store(x, tl.load(x) * step)

@triton.jit
def floating(x, step):
    tl.store(x, tl.load(x) * step)

x = torch.ones(1)
with compiled_for(90):
    for step in range(1, 18):
        constexpr[(1,)](x, step)
        integer[(1,)](x, step)
        floating[(1,)](x, float(step))
for kernel in (constexpr, integer, floating):
    print(len(kernel.device_caches[90][0]), "compiled versions:", kernel.__name__)
"""

# %%
# **Predict first.** How many versions does the integer have after the steps 1 to 17?
#
# * 1
# * 3
# * 17

compiling = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
with tempfile.TemporaryDirectory() as folder:
    script = Path(folder) / "child.py"
    script.write_text(CHILD)
    child = subprocess.run(
        [sys.executable, str(script)],
        env=compiling,
        capture_output=True,
        text=True,
    )
assert child.returncode == 0, child.stderr
print(child.stdout, end="")
versions = [int(line.split()[0]) for line in child.stdout.splitlines()]
assert versions == [17, 3, 1]

# %%
# With a ``tl.constexpr`` training compiles at every step and never ends doing so. With an integer it stops at steps 1,
# 2 and 16. So the host turns the step into floats. (``do_not_specialize`` would keep an integer from being looked at.)
#
# The interpreter leaves a float argument in the float64 of Python. So it hides a subtraction of :math:`1 - \beta_2` in
# a kernel, which would be float32 on a GPU; the lesson subtracts tensors to show it.
#
# The kernel of the package
# -------------------------
#
# One thing remains. A step that is recorded as a CUDA graph, or compiled by ``torch.compile``, replays the numbers of
# the day it was recorded. Then the step and the learning rate must be tensors, which the kernel reads when it runs.

from lm_from_scratch.kernels.adamw import AdamW, adamw, adamw_, adamw_kernel

# %%
# In the kernel of the package the last argument is such a tensor, or None. None is known when it compiles, so the
# branch costs nothing.

print(inspect.getsource(adamw_kernel.fn))

# %%
# It also widens what it loads to float32: weights in half precision, with means in half precision or in float32, are
# computed in float32 and rounded once, when they are stored.
#
# Correct
# -------
#
# ``adamw`` has the arguments and results of the reference, on copies; ``adamw_`` overwrites. The sizes are odd, the
# options unusual, the step a number or a tensor.

options = dict(lr=0.3, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1)
for n in (1, 1023, 1025):
    given = tensors(n)
    expected = reference(*given, 3, **options)
    verdict = matches(adamw(*given, 3, **options), expected)
    on_device = torch.tensor(3.0, device=DEVICE)
    verdict &= matches(adamw(*given, on_device, **options), expected)
    adamw_(*given, 3, **options)
    verdict &= matches([given[0], *given[2:]], expected)
    print(f"{n} weights: {verdict}")
    assert verdict

# %%
# In half precision the truth is the step in float32, rounded once.

half = tensors(1025, torch.float16)
wide = [x.float() for x in half]
expected = [x.half() for x in reference(*wide, 3, **options)]
verdict = matches(adamw(*half, 3, **options), expected, 4e-3)
print(f"float16: {verdict}")
assert verdict

# %%
# ``AdamW`` is the optimizer around it. It takes 20 steps with a learning rate that falls.


def train(optimizer, parameter, steps):
    for t in steps:
        optimizer.param_groups[0]["lr"] = 0.1 / t
        generator = torch.Generator().manual_seed(t)
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(DEVICE)
        optimizer.step()


# %%
# After ten of the 20 steps another optimizer continues, from the state of the first.


def run(first, second):
    """Ten steps of one optimizer, then ten of the other."""
    start = torch.linspace(-1, 1, 35, device=DEVICE).view(5, 7)
    parameter = torch.nn.Parameter(start)
    before = first([parameter])
    train(before, parameter, range(1, 11))
    after = second([parameter])
    after.load_state_dict(before.state_dict())
    train(after, parameter, range(11, 21))
    return parameter.detach()


expected = run(torch.optim.AdamW, torch.optim.AdamW)
for first, second in (
    (AdamW, AdamW),
    (AdamW, torch.optim.AdamW),
    (torch.optim.AdamW, AdamW),
):
    verdict = matches([run(first, second)], [expected])
    names = ", then ".join(c.__module__.split(".")[0] for c in (first, second))
    print(f"{names}: {verdict}")
    assert verdict

# %%
# Each continues from the state of the other, so a run can change its optimizer at a checkpoint.
#
# Bug museum
# ----------
#
# Rounded through the wrong dtype
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Running means in float32 are cast to the dtype of the weight before they are stored. (M30)
#
# Weights in half precision, running means in float32. A kernel computes in float32 and casts its results to the dtype
# of the weights before it stores them, all three. The means are stored as float32, so nothing looks wrong, and they
# have lost their digits. An optimizer library had this:
# `kernels truncate optimizer states <https://github.com/databricks/flashoptim/issues/2>`_.


@triton.jit
def casts_too_early(param, grad, exp_avg, exp_avg_sq, n, rest1, rest2, eps, lr):
    offsets = tl.arange(0, 1024)
    inside = offsets < n
    p = tl.load(param + offsets, mask=inside)
    g = tl.load(grad + offsets, mask=inside).to(tl.float32)
    m = (rest1 * g).to(p.dtype)  # from means of 0
    v = (rest2 * g * g).to(p.dtype)
    m, v = m.to(tl.float32), v.to(tl.float32)
    direction = m / rest1 / (tl.sqrt(v / rest2) + eps)
    tl.store(param + offsets, p.to(tl.float32) - lr * direction, mask=inside)
    tl.store(exp_avg + offsets, m, mask=inside)
    tl.store(exp_avg_sq + offsets, v, mask=inside)


# %%
# In float16 more than digits is lost: the square of a small gradient becomes 0, and the step divides by epsilon.


def first_step(early):
    """The largest change of a weight in a first step with lr = 0.01."""
    p = torch.ones(100, device=DEVICE, dtype=torch.float16)
    g = torch.full_like(p, 1e-4)
    m, v = (torch.zeros(100, device=DEVICE) for _ in range(2))
    if early:
        casts_too_early[(1,)](p, g, m, v, 100, 0.1, 0.001, 1e-8, 0.01)
    else:
        adamw_(p, g, m, v, 1, lr=0.01, weight_decay=0.0)
    return (1 - p.float()).abs().max().item()


for name, early in (("cast before", True), ("cast while storing", False)):
    print(f"{name}: a step near lr: {abs(first_step(early) - 0.01) < 0.001}")
assert first_step(True) > 10 and abs(first_step(False) - 0.01) < 0.001

# %%
# The wrong step is more than a thousand times as large as the learning rate.
#
# The first step of Adam has the size of the learning rate, whatever the gradient. That law is the check: small
# gradients, every combination of dtypes. The fixed line computes ``m`` and ``v`` without ``.to``; ``tl.store`` casts to
# what it stores into.
#
# A gradient with other strides
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Number i of the gradient is taken for that of number i of the weight. (M31)
#
# The kernel walks over memory in order, and takes for granted that number i of the gradient belongs to number i of the
# weight. PyTorch does not promise that: the `stride of a gradient <https://github.com/pytorch/pytorch/issues/106951>`_
# may differ from the weight's. In that report PyTorch's fused kernel compared the strides and refused. Our kernel does
# not look, and neither does the package's if it is launched without its wrapper.

p, g, m, v = (x.view(5, 7) for x in tensors(35))
g = g.T.contiguous().T  # the same numbers, columns first
expected = reference(p, g, m, v, 1)
careless = [x.clone() for x in (p, g, m, v)]
of_a_step = 0.9, 1 - 0.9, 0.999, 1 - 0.999, 1e-8, 1 - 1e-3 * 0.01, 1e-3
corrections = 1 - 0.9, 1 - 0.999
adamw_kernel[(1,)](*careless, 35, *of_a_step, *corrections, None, BLOCK=BLOCK)
verdict = matches([careless[0], *careless[2:]], expected)
print("strides ignored, matches torch:", verdict)
adamw_(p, g, m, v, 1)
print("package, matches torch:", matches([p, m, v], expected))
assert not verdict and matches([p, m, v], expected)

# %%
# The fixed line is ``grad.contiguous()``, and for a weight that is not contiguous a copy back. The check: a transposed
# gradient among the tests.
#
# Which sentence is false?
# ------------------------
#
# 1. In place, the result depends on the order in which programs run, because they overwrite their input.
# 2. A step count that is a ``tl.constexpr`` makes Triton compile at every step.
# 3. A step count that is passed as an integer is compiled in at most three versions.
# 4. The first step moves a weight by the learning rate, if its gradient is far above epsilon.

given = tensors()
forwards, backwards = ([x.clone() for x in given] for _ in range(2))
adamw_(*forwards, 2)
adamw_(*(x[BLOCK:] for x in backwards), 2)  # the first program last
adamw_(*(x[:BLOCK] for x in backwards), 2)
order_matters = not all(map(torch.equal, forwards, backwards))

p, g, _, _ = tensors()
means = torch.zeros_like(p), torch.zeros_like(p)
g = g.sign() * (0.01 + g.abs())
stepped, *_ = adamw(p, g, *means, 1, lr=0.01, weight_decay=0.0)
answers = [
    order_matters,
    versions[0] == 17,
    versions[1] <= 3,
    matches([(stepped - p).abs()], [torch.full_like(p, 0.01)]),
]
print(answers)
assert answers == [False, True, True, True]

# %%
# The first is false: a program overwrites what it has read itself, and what no other program reads.
#
# Exercises
# ---------
#
# 1. *Easy.* Count the bytes of ``FULL`` for weights and gradients in bfloat16 and means in float32. A right answer is
#    22 bytes for each weight, and says which of the seven tensors are cheaper. Hint: two are read and one is written in
#    bfloat16.
# 2. *Hard.* Update all small tensors in one launch. A right answer equals one launch for each, and says how a program
#    finds its tensor. Hint: a tensor of addresses, and ``.to(tl.pointer_type(tl.float32))`` after it is loaded.
#
# Summary
# -------
#
# * A step moves 7 tensors and computes next to nothing with them, so memory decides.
# * A float is no reason to compile. An integer has three versions, a ``tl.constexpr`` one for each value. Tensors serve
#   steps that are recorded once and replayed.
# * The package's optimizer continues from PyTorch's state, and PyTorch's from its own.
# * Means in float32 must not pass through the dtype of the weights, and a gradient may have strides of its own.
#
# Sources
# -------
#
# * Kingma, Ba: `Adam <https://arxiv.org/abs/1412.6980>`_, 2015.
# * Loshchilov, Hutter: `Decoupled Weight Decay Regularization <https://arxiv.org/abs/1711.05101>`_, 2019.
# * PyTorch: `AdamW <https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html>`_, with the forms foreach and
#   fused.

print("all checks passed")
