r"""
AdamW in depth: is yours right, and how large are its steps?
============================================================

An AdamW that is slightly wrong still trains. This page deepens the lesson on `AdamW <1_adamw.ipynb>`_. It compares the
package's with PyTorch's, measures how far a step goes, and visits the places where correct-looking code goes wrong: low
precision, weights without a gradient, gradients that come late, and the place of :math:`\epsilon`.

Letters: :math:`\theta` is a weight, :math:`g` its gradient, :math:`\eta` the learning rate, :math:`t` the number of
the step, 1 for the first.

Equal to PyTorch's
------------------

The formula is a pure function in the package, in two parts: `GaLore <2_galore.ipynb>`_ needs the first part alone.
"""

# sphinx_gallery_needs = ["1_adamw"]
# sphinx_gallery_words = ["adam epsilon", "amsgrad", "bf16 training", "sparse gradients", "unfreeze layers", "foreach", "bias correction", "learning rate warmup", "no_decay", "parameter groups", "gradient noise", "mixed precision", "bfloat16 training", "warm-up needed"]
import inspect
import math
import tempfile
from pathlib import Path

import torch

from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.optim.adamw import AdamW, adam_direction, adamw
from lm_from_scratch.optim.choose import parameter_groups
from lm_from_scratch.text.batches import PackedBatches, write_tokens
from lm_from_scratch.text.corpora import load_corpus, split
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.loss import causal_lm_loss

print(inspect.getsource(adam_direction))
print(inspect.getsource(adamw).split('"""')[-1])

# %%
# For comparison, here is the lesson's rule as a direction. The model is a GPT-2 with two blocks, and the text is
# Python's language reference.

documents = split(load_corpus("reference"))[0][:40]
tokenizer = Tokenizer.train([d.text for d in documents], 512)
folder = tempfile.TemporaryDirectory()
file = write_tokens(documents, tokenizer, Path(folder.name) / "train.bin")
batches = PackedBatches(file, batch_size=12, block_size=32)
C = 48
config = GPT2Config(
    vocab_size=512,
    block_size=32,
    n_layer=2,
    n_head=4,
    n_embd=C,
    initializer_range=0.04,
    embd_pdrop=0.0,
    resid_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=tokenizer.eos_token_id,
    eos_token_id=tokenizer.eos_token_id,
)


def fresh_model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def loss_of(model, batch):
    logits = model(
        batch.idx, positions=batch.positions, documents=batch.documents
    )
    return causal_lm_loss(logits, batch.targets)


def rms(x):
    return x.square().mean().sqrt().item()


def adam(g, state, t, beta1=0.9, beta2=0.999, eps=1e-8):
    state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g * g
    m_hat = state["m"] / (1 - beta1**t)
    v_hat = state["v"] / (1 - beta2**t)
    return m_hat / (v_hat.sqrt() + eps)


# %%
# Fifteen steps with the package's optimizer, with torch's own, and with this rule give the same model, in float64.


def train_with(make, steps=15):
    model = fresh_model().double()
    optimizer = make(parameter_groups(model, 0.1), lr=0.003)
    for t in range(steps):
        optimizer.zero_grad()
        loss_of(model, batches[t]).backward()
        optimizer.step()
    return model, optimizer


class OurRule(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "t": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["t"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                d = adam(p.grad, self.state[p], group["t"])
                p *= 1 - group["lr"] * group["weight_decay"]
                p -= group["lr"] * d


ours, our_optimizer = train_with(AdamW)
for make in (torch.optim.AdamW, OurRule):
    theirs, _ = train_with(make)
    pairs = list(zip(ours.parameters(), theirs.parameters()))
    largest = max((p - q).abs().max().item() for p, q in pairs)
    print(
        f"{make.__module__:20} {make.__name__:8} largest difference {largest:.0e}"
    )
    assert largest < 1e-6

# %%
# How large is a step?
# --------------------
#
# In step 1 the direction is :math:`g_1 / \lvert g_1 \rvert`: every weight moves by the whole :math:`\eta`, however
# uncertain the sign that one batch gave it. After that the size is a ratio of signal to noise. If the gradient is the
# same in every step, the direction stays :math:`\pm 1`. If it is pure noise of mean 0, the variance of the running mean
# :math:`m` is a geometric series of squared weights:
#
# .. math::
#
#    \frac{\operatorname{var} m}{\operatorname{var} g} = \sum_{i \ge 0} (1 - \beta_1)^2 \beta_1^{2i}
#    = \frac{1 - \beta_1}{1 + \beta_1}
#
# With :math:`\beta_1 = 0.9` its root is 0.23.

generator = torch.Generator().manual_seed(0)
signal, noise = {}, {}
for t in range(1, 301):
    d_signal = adam(torch.full((5000,), 1e-4), signal, t)
    d_noise = adam(torch.randn(5000, generator=generator), noise, t)

floor = math.sqrt((1 - 0.9) / (1 + 0.9))
print(
    f"signal {rms(d_signal):.3f}   noise {rms(d_noise):.3f}   formula {floor:.3f}"
)
assert abs(rms(d_signal) - 1) < 1e-3 and abs(rms(d_noise) / floor - 1) < 0.05
assert round(floor, 2) == 0.23

# %%
# Now the model's own gradients, with the bias correction and without it. Both means start at 0 and are too small at
# first. But :math:`m` recovers in about 10 steps and :math:`v` in about 1000, so without the correction the direction
# is too *large*, by the factor :math:`(1 - \beta_1^t) / \sqrt{1 - \beta_2^t}`.


def sizes_of_steps(corrected, steps=100):
    model, sizes = fresh_model(), []
    params = list(model.parameters())
    states = [{} for _ in params]
    for t in range(1, steps + 1):
        gs = torch.autograd.grad(loss_of(model, batches[t - 1]), params)
        late = t if corrected else 10**6  # then both corrections are 1
        with torch.no_grad():
            ds = [adam(g, s, late) for g, s in zip(gs, states)]
            for p, d in zip(params, ds):
                p -= 0.003 * d
        sizes.append(rms(torch.cat([d.flatten() for d in ds])))
    return sizes, model


sizes, trained = sizes_of_steps(corrected=True)
uncorrected, _ = sizes_of_steps(corrected=False, steps=30)

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

_, (ax,) = figure(4.8, 3.4)
ax.plot(uncorrected, ":", color=COLOURS[3], label="uncorrected")
ax.plot(sizes, color=COLOURS[0], label="Adam")
ax.axhline(1.0, color=COLOURS[7], lw=1, ls="--", label="pure signal")
ax.axhline(floor, color=COLOURS[4], lw=1, ls="-.", label="pure noise")
ax.set(xlabel="step", ylabel="rms of the direction", ylim=(0, None))
ax.set_title("The size of the steps on real gradients")
ax.legend(frameon=False)
plt.show()

factors = [(1 - 0.9**t) / math.sqrt(1 - 0.999**t) for t in range(1, 141)]
print(f"without the correction: up to {max(factors):.1f} times too large")
assert 6 < max(factors) < 7 and max(uncorrected) > 2.5
assert sizes[0] == max(sizes) > 0.95 and sum(sizes[-20:]) / 20 < 0.5

# %%
# The first step is the largest, and soon the steps are near the floor: the gradient of so small a batch is mostly
# noise. This is the reason for a *warm-up*, a learning rate that rises from 0 over the first steps. It keeps the steps
# short while the means rest on few batches.
#
# What decay settles on
# ---------------------
#
# Noise pushes weights apart, and decay pulls them back. In each step noise adds :math:`\eta^2` to the mean square of
# the weights, and decay takes :math:`2 \eta \lambda \theta^2`. The two balance at
#
# .. math::
#
#    \theta_{\text{rms}} = \sqrt{\frac{\eta}{2 \lambda}}
#
# after about :math:`1 / (\eta \lambda)` steps. Here that is 100 steps, and we take 600, from two starts.

theta = torch.zeros(2, 5000)
theta[1] = 1.0
state = {}
for t in range(1, 601):
    g = torch.randn(5000, generator=generator)
    theta = (1 - 0.02 * 0.5) * theta - 0.02 * adam(g, state, t)
print(
    f"measured {rms(theta[0]):.3f} and {rms(theta[1]):.3f}   formula {math.sqrt(0.02 / 1):.3f}"
)
assert 0.9 < rms(theta[0]) / math.sqrt(0.02) < 1.0
assert abs(rms(theta[1]) / rms(theta[0]) - 1) < 0.05

# %%
# The start is forgotten: learning rate and decay choose the size of weights that see noise alone. The measured size is
# a little lower, because decay also acts during the ten steps over which momentum spreads a gradient.
#
# The weight of a norm belongs near 1 and not near 0, and biases are few. By custom, decay is for matrices alone.

for group in parameter_groups(fresh_model(), weight_decay=0.1):
    axes = {p.dim() for p in group["params"]}
    count = sum(p.numel() for p in group["params"])
    print(
        f"decay {group['weight_decay']}: {count:6} weights in tensors of {axes} axes"
    )
    assert axes == ({2} if group["weight_decay"] else {1})

# %%
# Moments in bfloat16 never shrink
# --------------------------------
#
# A bfloat16 number has 8 significant bits. The next number below 1 is 0.996, so 0.999 rounds back to 1. A second moment
# in bfloat16 therefore never shrinks: after one large gradient the steps of that weight stay small forever. (AMSGrad
# keeps the largest v on purpose. Here rounding does it.)

for dtype in (torch.float32, torch.bfloat16):
    v = torch.ones(1000, dtype=dtype)
    for _ in range(3000):  # gradients of zero
        v = 0.999 * v
    print(f"{dtype!s:15} v after 3000 steps: {v[0].item():.3f}")
    assert (v[0] == 1.0) == (dtype == torch.bfloat16)
assert torch.finfo(torch.bfloat16).eps == 2**-7

# %%
# The weights suffer likewise: 1 - 0.001 is 1 again. Keep weights and moments in float32, and let
# ``torch.autocast`` run the matrix products in bfloat16.

assert torch.tensor(1.0, dtype=torch.bfloat16) - 0.001 == 1.0

# %%
# Weights without a true gradient
# -------------------------------
#
# A bias on the keys adds the same number to all scores of a query, and the softmax ignores it. Its gradient is
# exactly 0 on paper. In floating point it is rounding noise, and Adam divides the noise by the size of the noise.

trained.zero_grad()
loss_of(trained, batches[0]).backward()
bias = trained.transformer.h[0].attn.c_attn.bias
q_part, k_part, _ = bias.grad.split(C)
print(f"rms of the gradient: queries {rms(q_part):.0e}, keys {rms(k_part):.0e}")
for eps in (0.0, 1e-8):
    d = adam(k_part[k_part != 0], {}, 1, eps=eps)
    print(f"eps {eps:5}: rms of the first step for the keys {rms(d):.3f}")
    assert abs(rms(d) - 1) < 1e-5 if eps == 0.0 else rms(d) < 0.5
assert rms(k_part) < 1e-3 * rms(q_part)

# %%
# No harm comes to this model, because the bias has no effect at all. But two correct programs sum in different
# orders, get different noise, and soon hold different weights. This is why the comparison above ran in float64, and
# why :math:`\epsilon` must not be below the noise.

with torch.no_grad():
    before = trained(batches[0].idx)
    bias[C : 2 * C] += torch.randn(C)
    after = trained(batches[0].idx)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=0.0)

# %%
# A step that is refused
# ----------------------
#
# An embedding can make *sparse* gradients, which list only the rows that were looked up. Adam would have to shrink the
# moments of all other rows too, so AdamW refuses them. When? Here the second of two groups has a sparse gradient.


def refused(make, gradient):
    first, second = (torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2))
    optimizer = make([{"params": [first]}, {"params": [second]}], lr=0.1)
    first.grad, second.grad = torch.ones(4, 2), gradient
    try:
        optimizer.step()
        error = "no error"
    except (RuntimeError, ValueError, FloatingPointError) as found:
        error = type(found).__name__
    return error, bool((first == 1).all()), bool(second.isfinite().all())


sparse = torch.ones(4, 2).to_sparse()
infinite = torch.full((4, 2), math.inf)
for make in (torch.optim.AdamW, AdamW):
    for kind, gradient in (("sparse", sparse), ("infinite", infinite)):
        error, unmoved, finite = refused(make, gradient)
        print(
            f"{make.__module__:27} {kind:8} {error:18} "
            f"first unmoved: {unmoved!s:5}  second finite: {finite}"
        )
        if make is AdamW:
            assert unmoved and finite and error != "no error"
assert refused(torch.optim.AdamW, sparse) == ("RuntimeError", False, True)
assert refused(torch.optim.AdamW, infinite) == ("no error", False, False)

# %%
# PyTorch moves the first group and then raises. A program that catches the error and goes on has taken half a step. It
# accepts an infinite gradient without an error, and the weights are NaN from then on. The package looks at all
# gradients first, and changes nothing if one of them is refused. For sparse gradients there is
# ``torch.optim.SparseAdam``.
#
# Bug museum
# ----------
#
# Epsilon outside the correction
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Some optimizers fold both corrections into the learning rate. The code published with GaLore does, and
# :math:`\epsilon` is then added to the uncorrected root. It acts as
# :math:`\epsilon / \sqrt{1 - \beta_2^t}`, which in step 1 is 31.6 times the number that you set. (L7)


def epsilon_outside(g, state, t, beta1=0.9, beta2=0.999, eps=1e-6):
    state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g * g
    correction = math.sqrt(1 - beta2**t) / (1 - beta1**t)
    return correction * state["m"] / (state["v"].sqrt() + eps)


for size in (1.0, 1e-6):
    g = torch.tensor([size], dtype=torch.float64)
    wrong = epsilon_outside(g, {}, 1).item()
    right = adam(g, {}, 1, eps=1e-6).item()
    print(
        f"gradient {size:5}: direction {right:.3f}, with the defect {wrong:.3f}"
    )
    factor = 1 / math.sqrt(1 - 0.999)
    assert math.isclose(right, size / (size + 1e-6))
    assert math.isclose(wrong, size / (size + factor * 1e-6), rel_tol=1e-6)
assert round(factor, 1) == 31.6 and right > 10 * wrong

# %%
# Gradients of size 1 hide it. The check that finds it takes a gradient as small as :math:`\epsilon` and compares the
# first step with the formula.
#
# One step count for a whole group
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The ``OurRule`` above counts steps in the group, as the GaLore of ``pytorch_optimizer`` 4.1 does. That is right as
# long as all parameters get a gradient in every step. An expert that is routed to late, or a layer that is unfrozen,
# gets its first gradient in step 10 and is corrected as if nine had been there. (L8)

late = {}
for make in (OurRule, AdamW):
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    group = {"params": [first, second], "weight_decay": 0.0}
    optimizer = make([group], lr=0.01)
    for t in range(1, 11):
        first.grad = torch.ones(1)
        second.grad = torch.ones(1) if t == 10 else None
        optimizer.step()
    late[make] = second.item()
    print(f"{make.__name__:8} first step of the late weight {late[make]:.4f}")
assert abs(late[AdamW] + 0.01) < 1e-6 and abs(late[OurRule] + 0.0048) < 1e-4

# %%
# The fixed line is ``state["step"] += 1``, with a step in the state of each parameter. The check is this test, or the
# law behind it: with its first gradient, whenever that comes, a weight moves by :math:`\eta` apart from its decay.
#
# Exercises
# ---------
#
# 1. *Easy.* Give the pure noise of "How large is a step?" other values of :math:`\beta_1`: 0, 0.5 and 0.99. A good
#    answer agrees with the formula within 5 per cent, and says how many steps 0.99 needs until it does. Hint: how long
#    is the memory of the mean?
# 2. *Medium.* Train with moments in bfloat16. A good answer plots the rms of :math:`\sqrt{v}` of one block beside that
#    of float32. Hint: convert what the rule writes into ``state``.
#
# Summary
# -------
#
# * The package's AdamW equals torch's and counts steps per parameter.
# * The direction has rms 1 for a pure signal and 0.23 for pure noise. The first step is the largest; without the bias
#   correction the steps are up to more than six times too large.
# * Under pure noise and decoupled decay, weights settle at :math:`\sqrt{\eta / (2 \lambda)}`.
# * In bfloat16 the second moment never shrinks and small steps are rounded away. Keep weights and moments in float32.
# * Where the true gradient is 0, Adam divides rounding noise by its own size. Compare programs in float64.
#
# Sources
# -------
#
# * `Adam <https://arxiv.org/abs/1412.6980>`_, Kingma and Ba, 2015.
# * `Decoupled Weight Decay Regularization <https://arxiv.org/abs/1711.05101>`_, Loshchilov and Hutter, 2019.
# * `On the Convergence of Adam and Beyond <https://arxiv.org/abs/1904.09237>`_, Reddi, Kale and Kumar, 2018 (AMSGrad).
# * `Rotational Equilibrium <https://arxiv.org/abs/2305.17212>`_, Kosson, Messmer and Jaggi, 2023: what decay settles
#   on.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
folder.cleanup()
