r"""
How large is a step of Adam?
============================

In the lesson on `AdamW <1_adamw.ipynb>`_ every weight gets a step of its own size. How large is it? This page measures
steps on real gradients. It adds the parts of Adam one at a time, and then asks what size the weights settle on under
noise and decay.

Letters: :math:`\theta` is a weight, :math:`g` its gradient, :math:`\eta` the learning rate, :math:`t` the number of
the step, 1 for the first.

Gradients of many sizes
-----------------------

The model is a GPT-2 with two blocks, and the text is Python's language reference.
"""

# sphinx_gallery_needs = ["1_adamw"]
# sphinx_gallery_words = ["bias correction", "learning rate warmup", "no_decay", "parameter groups", "gradient noise", "RMSProp vs Adam"]
# sphinx_gallery_thumbnail_number = 1
import math
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.text.batches import PackedBatches, write_tokens
from lm_from_scratch.text.corpora import load_corpus, split
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.loss import causal_lm_loss

documents, _ = split(load_corpus("reference"))
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


model = fresh_model()
names = [
    name.removeprefix("transformer.") for name, _ in model.named_parameters()
]
gradients = torch.autograd.grad(loss_of(model, batches[0]), model.parameters())
for name, g in zip(names, gradients):
    if g.dim() == 2:
        print(
            f"{name:22} {tuple(g.shape)!s:10} rms of the gradient {rms(g):.1e}"
        )

# %%
# The matrices differ by a factor of more than 3. Inside ``wte`` it is worse, as the lesson showed in a trained model. Here
# is one that has learned nothing yet:

rows = gradients[0].square().mean(-1).sqrt().sort().values  # (V,)
for share in (0.0, 0.5, 0.9, 1.0):
    value = rows[round(share * (len(rows) - 1))].item()
    print(f"rows of wte, {share:4.0%} are below {value:.0e}")
sizes = [rms(g) for g in gradients if g.dim() == 2]
assert max(sizes) > 3 * min(sizes) and rows[-1] > 30 * rows[0]

# %%
# No single number is the right step for all of them.
#
# One training loop, many rules
# -----------------------------
#
# A *rule* turns a gradient into a direction :math:`d_t`, and the loop moves the weight by :math:`-\eta \, d_t`. A
# rule may keep tensors in ``state``, a dictionary of each weight tensor. The loop also notes the root mean square
# of all directions, which is the size of the step in units of :math:`\eta`.


def run(rule, lr, steps=140):
    model = fresh_model()
    params = list(model.parameters())
    states = [{} for _ in params]
    losses, sizes = [], []
    for t in range(1, steps + 1):
        loss = loss_of(model, batches[t - 1])
        grads = torch.autograd.grad(loss, params)
        with torch.no_grad():
            ds = [rule(g, s, t) for g, s in zip(grads, states)]
            for p, d in zip(params, ds):
                p -= lr * d
        losses.append(loss.item())
        sizes.append(rms(torch.cat([d.flatten() for d in ds])))
    return {
        "losses": losses,
        "end": sum(losses[-20:]) / 20,
        "sizes": sizes,
        "grads": grads,
        "directions": ds,
        "model": model,
    }


# %%
# The first rule is stochastic gradient descent (SGD): the direction is the gradient.
#
# The second is *momentum*, the lesson's running mean m of the gradients. (``torch.optim.SGD`` leaves out the factor
# :math:`1 - \beta_1`. Its m is ten times as large, and needs a tenth of the learning rate.)


def sgd(g, state, t):
    return g


def momentum(g, state, t, beta1=0.9):
    state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    return state["m"]


p, state, moved = torch.nn.Parameter(torch.zeros(9)), {}, torch.zeros(9)
theirs = torch.optim.SGD([p], lr=0.1, momentum=0.9)
for t in range(1, 6):
    p.grad = torch.randn(9)
    moved = moved - 1.0 * momentum(p.grad, state, t)
    theirs.step()
torch.testing.assert_close(p.data, moved)

# %%
# Both need a learning rate that fits the size of the gradients. To be fair to them, each gets three, and we keep
# the best.

runs = {}
for name, rule, rates in (
    ("SGD", sgd, (0.1, 0.3, 1.0)),
    ("momentum", momentum, (0.3, 1.0, 3.0)),
):
    tried = {lr: run(rule, lr) for lr in rates}
    for lr in rates:
        print(f"{name:9} lr {lr:3}   loss {tried[lr]['end']:.2f}")
    runs[name] = min(tried.values(), key=lambda result: result["end"])

# %%
# Divide by the size
# ------------------
#
# The lesson divides m by the root of v, the running mean of the *squared* gradients. With v alone, and the gradient
# itself instead of m, the method is called RMSProp.
#
# .. math::
#
#    v_t &= \beta_2 v_{t-1} + (1 - \beta_2) \, g_t^2 \\
#    d_t &= \frac{g_t}{\sqrt{\hat v_t} + \epsilon}
#
# The hat is the bias correction, which has its own section below. The number :math:`\epsilon` is tiny and keeps the
# division from failing.


def rms_prop(g, state, t, beta2=0.999, eps=1e-8):
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g * g
    v_hat = state["v"] / (1 - beta2**t)
    return g / (v_hat.sqrt() + eps)


# %%
# *Adam* uses both means, m over the root of v.


def adam(g, state, t, beta1=0.9, beta2=0.999, eps=1e-8):
    m = momentum(g, state, t, beta1)
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g * g
    m_hat = m / (1 - beta1**t)
    v_hat = state["v"] / (1 - beta2**t)
    return m_hat / (v_hat.sqrt() + eps)


def uncorrected_adam(g, state, t):
    m = momentum(g, state, t)
    state["v"] = 0.999 * state.get("v", 0.0) + (1 - 0.999) * g * g
    return m / (state["v"].sqrt() + 1e-8)


# %%
# These three get one learning rate, 0.003.

runs["RMSProp"] = run(rms_prop, 0.003)
runs["Adam"] = run(adam, 0.003)
runs["Adam, uncorrected"] = run(uncorrected_adam, 0.003)
ends = {name: result["end"] for name, result in runs.items()}
for name, end in ends.items():
    print(f"{name:18} loss {end:.2f}")

made, (ax,) = figure(4.8, 3.6)
styles = ((0, (5, 1)), "--", "-.", "-", ":")
for (name, result), style in zip(runs.items(), styles):
    losses = torch.tensor(result["losses"])
    smooth = losses.unfold(0, 10, 1).mean(-1)  # the mean of ten steps
    ax.plot(range(10, len(losses) + 1), smooth, ls=style, label=name)
ax.set(xlabel="step", ylabel="loss (nats per token)")
ax.set_title("One model, one order of batches, five rules")
ax.legend(frameon=False)
plt.show()

# %%
# The division makes the difference: RMSProp and Adam both end lower than SGD and momentum at the best of three
# rates. Read nothing into the order of RMSProp and Adam: one run is one sample. Without the bias correction, Adam
# ends clearly higher at this learning rate.

assert min(ends["SGD"], ends["momentum"]) - ends["RMSProp"] > 0.05
assert min(ends["SGD"], ends["momentum"]) - ends["Adam"] > 0.05
assert ends["Adam, uncorrected"] - ends["Adam"] > 0.15

# %%
# Directions of one size
# ----------------------
#
# Here is the last step of the Adam run, tensor by tensor. The bias of ``c_attn`` is cut into its parts for queries,
# keys and values. That of the keys is left out of the figure: its gradient is rounding noise, as `AdamW in depth
# <1b_adamw_in_depth.ipynb>`_ shows.

parts = {}
last = runs["Adam"]
for name, g, d in zip(names, last["grads"], last["directions"]):
    if name.endswith("c_attn.bias"):
        for letter, a, b in zip("qkv", g.split(C), d.split(C)):
            parts[f"{name} {letter}"] = (rms(a), rms(b))
    else:
        parts[name] = (rms(g), rms(d))
ordinary = {n: pair for n, pair in parts.items() if not n.endswith("bias k")}
gs, ds = zip(*ordinary.values())

made, axes = figure(6.4, 7.2, columns=2)
rows = range(len(ordinary))
axes[0].plot(gs, rows, "o", color=COLOURS[0])
axes[0].set(title="Gradient", xlabel="rms", xscale="log")
axes[0].set_yticks(rows, ordinary, fontsize=9)
axes[1].plot(ds, rows, "s", color=COLOURS[3])
axes[1].set(title="Adam's direction", xlabel="rms", xlim=(0, 1.25))
axes[1].set_yticks(rows, [])
plt.show()

print(f"gradient:  largest / smallest rms {max(gs) / min(gs):.0f}")
print(f"direction: largest / smallest rms {max(ds) / min(ds):.1f}")
assert max(gs) / min(gs) > max(30, 5 * max(ds) / min(ds))
assert min(ds) > 0.02 and max(ds) < 1.2

# %%
# The gradients differ by a factor of more than 30, the directions by far less. So :math:`\eta` has a meaning in every
# model: it is the scale of the distance that a weight moves in one step.
#
# The size of :math:`d` is a ratio of signal to noise. If the gradient is the same in every step, both means find
# it, and :math:`d = \pm 1`. If it is pure noise of mean 0, the variance of the running mean :math:`m` is a
# geometric series of squared weights:
#
# .. math::
#
#    \frac{\operatorname{var} m}{\operatorname{var} g} = \sum_{i \ge 0} (1 - \beta_1)^2 \beta_1^{2i}
#    = \frac{1 - \beta_1}{1 + \beta_1}
#
# With :math:`\beta_1 = 0.9` its root is 0.23. The next lines check both ends. Most tensors in the figure are close to
# this floor: the gradient of so small a batch is mostly noise.

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
assert abs(torch.tensor(ds).median() - floor) < 0.1

# %%
# The unit of the loss cancels, because :math:`m` and :math:`\sqrt{v}` both carry it. With 1000 times the loss SGD
# would need another learning rate, and Adam takes the same steps. Only :math:`\epsilon` knows the difference, so it
# is 0 here. A power of two instead of 1000 leaves even the rounding alone.

g = torch.randn(5, 40, generator=generator)  # five steps
for factor, tolerance in ((1000.0, 1e-4), (1024.0, 0.0)):
    plain, scaled = {}, {}
    for t in range(1, 6):
        d = adam(g[t - 1], plain, t, eps=0.0)
        d_scaled = adam(factor * g[t - 1], scaled, t, eps=0.0)
    torch.testing.assert_close(d_scaled, d, atol=tolerance, rtol=tolerance)

# %%
# The first steps
# ---------------
#
# Both means start at 0. If all gradients are equal, the weights of the terms in a mean sum up to :math:`1 - \beta^t`,
# which is what the hats divide by:
#
# .. math::
#
#    \hat m_t = \frac{m_t}{1 - \beta_1^t}, \qquad \hat v_t = \frac{v_t}{1 - \beta_2^t}
#
# Without the hats the direction is too large by the factor below, because :math:`m` recovers in about 10 steps and
# :math:`v` in about 1000.

ts = range(1, 141)
factors = [(1 - 0.9**t) / math.sqrt(1 - 0.999**t) for t in ts]
worst = max(ts, key=lambda t: factors[t - 1])
print(
    f"too large by {factors[0]:.1f} in step 1, by {factors[worst - 1]:.1f} in step {worst}"
)
assert abs(factors[0] - math.sqrt(10)) < 1e-2 and 6 < factors[worst - 1] < 7

made, (ax,) = figure(4.8, 3.4)
ax.plot(
    ts,
    runs["Adam, uncorrected"]["sizes"],
    ":",
    color=COLOURS[3],
    label="uncorrected",
)
ax.plot(ts, runs["Adam"]["sizes"], color=COLOURS[0], label="Adam")
ax.axhline(
    1.0, color=COLOURS[7], linewidth=1, linestyle="--", label="pure signal"
)
ax.axhline(
    floor, color=COLOURS[4], linewidth=1, linestyle="-.", label="pure noise"
)
ax.set(xlabel="step", ylabel="rms of the direction", ylim=(0, None))
ax.set_title("The size of the steps in two real runs")
ax.legend(frameon=False)
plt.show()

# %%
# Without the correction the first steps are several times too large. And even with it,
# the first step is the largest: the direction is :math:`g_1 / \lvert g_1 \rvert`, so every weight moves by the whole
# :math:`\eta`, however uncertain the sign that one batch gave it.

sizes = runs["Adam"]["sizes"]
print(
    f"rms of the direction: step 1 {sizes[0]:.2f}, last 20 {sum(sizes[-20:]) / 20:.2f}"
)
assert sizes[0] == max(sizes) > 0.95 and sum(sizes[-20:]) / 20 < 0.5
assert max(runs["Adam, uncorrected"]["sizes"][:20]) > 2.5

# %%
# This is the reason for a *warm-up*, a learning rate that rises from 0 over the first steps. It keeps the steps
# short while the means rest on few batches. Warm-up and correction are not the same: one factor is chosen, the other
# is derived.
#
# Decay
# -----
#
# Decoupled decay happens outside the gradient:
#
# .. math::
#
#    \theta_t = (1 - \eta \lambda) \, \theta_{t-1} - \eta \, d_t
#
# In t steps it shrinks every weight by the same factor, :math:`(1 - \eta \lambda)^t`. The lesson shows with two weights
# what happens to the older way, which adds :math:`\lambda \theta` to the gradient, as a penalty
# :math:`\frac{\lambda}{2} \theta^2` in the loss would.
#
# What decay settles on
# ~~~~~~~~~~~~~~~~~~~~~
#
# Noise pushes weights apart, and decay pulls them back. In each step noise adds :math:`\eta^2` to the mean square of
# the weights, since momentum only spreads a gradient over several steps. Decay takes
# :math:`2 \eta \lambda \theta^2`. The two balance at
#
# .. math::
#
#    \theta_{\text{rms}} = \sqrt{\frac{\eta}{2 \lambda}}
#
# after about :math:`1 / (\eta \lambda)` steps. Here that is 100 steps, and we take 800, from two starts.

theta = torch.zeros(2, 10000)
theta[1] = 1.0
state = {}
for t in range(1, 801):
    g = torch.randn(10000, generator=generator)
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

from lm_from_scratch.optim.choose import parameter_groups

for group in parameter_groups(fresh_model(), weight_decay=0.1):
    shapes = {p.dim() for p in group["params"]}
    count = sum(p.numel() for p in group["params"])
    print(
        f"decay {group['weight_decay']}: {count:6} weights in tensors of {shapes} axes"
    )
    assert shapes == ({2} if group["weight_decay"] else {1})

# %%
# Exercises
# ---------
#
# 1. *Easy.* Add a warm-up of 20 steps to ``run``, and use three seeds for the weights. A right answer says whether
#    the difference in the last loss exceeds the one between seeds. Hint: plot the first 40 steps too.
# 2. *Medium.* Give the pure noise of "Directions of one size" other values of :math:`\beta_1`: 0, 0.5 and 0.99. A right
#    answer agrees with the formula within 5 per cent, and says how many steps 0.99 needs until it does. Hint: how long
#    is the memory of the mean?
#
# Summary
# -------
#
# * The mean of squares :math:`v` gives every weight its own unit: on our run, RMSProp and Adam ended below SGD and
#   momentum at the best of three learning rates.
# * The direction has rms 1 for a pure signal and 0.23 for pure noise, whatever the unit of the loss. The first step is
#   the largest.
# * Without the bias correction, the steps are up to more than six times too large.
# * Under pure noise and decoupled decay, weights settle at :math:`\sqrt{\eta / (2 \lambda)}`.
#
# Sources
# -------
#
# * `Adam <https://arxiv.org/abs/1412.6980>`_, Kingma and Ba, 2015.
# * `Decoupled Weight Decay Regularization <https://arxiv.org/abs/1711.05101>`_, Loshchilov and Hutter, 2019.
# * `Rotational Equilibrium <https://arxiv.org/abs/2305.17212>`_, Kosson, Messmer and Jaggi, 2023: what decay settles
#   on.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
folder.cleanup()
