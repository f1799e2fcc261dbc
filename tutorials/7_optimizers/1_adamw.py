r"""
AdamW: a step of its own size for every weight
==============================================

A gradient says in which direction a weight should move. It does not say how far. Plain gradient descent multiplies
all gradients by one number, although some are many times larger than others.

AdamW is the usual answer for language models. Which part of its formula does what? This page adds the parts one at a
time, and trains the same small model with each.

You will learn
--------------

* what each term of AdamW does, seen on real gradients,
* how large its steps are, and why the loss may be multiplied by 1000,
* what the bias correction and the warm-up repair,
* why decoupled decay is not an L2 penalty, and what size it gives to the weights,
* three traps: bfloat16, weights whose true gradient is zero, and memory.

Before you start
----------------

Read the page on `training <../1_gpt2/4_training.ipynb>`_ first: batches, loss and learning rate come from there. You
need running means and the gradient, and one CPU core.

Letters: :math:`\theta` is a weight, :math:`g` its gradient, :math:`\eta` the learning rate, :math:`t` the number of
the step, 1 for the first.

Real gradients
--------------

The model is a GPT-2 with two blocks, and the text is Python's language reference.
"""

import inspect
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
# The matrices differ by a factor of several. Inside one matrix it is worse: a row of ``wte`` belongs to one token of
# the vocabulary, and gets a gradient as often as its token occurs.

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
# The second is *momentum*, the running mean of the gradients. One batch is a small sample of the text, so its
# gradient is partly noise. The mean keeps what successive batches agree on.
#
# .. math::
#
#    m_t = \beta_1 m_{t-1} + (1 - \beta_1) \, g_t


def sgd(g, state, t):
    return g


def momentum(g, state, t, beta1=0.9):
    state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    return state["m"]


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
# The second idea: keep a running mean of the *squared* gradient as well, and divide by its root. Every weight is
# then measured in its own unit. With the mean of squares alone, the method is called RMSProp.
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
# *Adam* is both: the mean of the gradients over the root of the mean of the squares.


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

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["Adam vs AdamW", "torch.optim.AdamW", "decoupled weight decay", "L2 regularization", "betas", "no_decay", "parameter groups"]
made, (ax,) = figure(6.4, 4.0)
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
# loses its lead at this learning rate.

assert min(ends["SGD"], ends["momentum"]) - ends["RMSProp"] > 0.05
assert min(ends["SGD"], ends["momentum"]) - ends["Adam"] > 0.05
assert ends["Adam, uncorrected"] - ends["Adam"] > 0.15

# %%
# How large is a step?
# --------------------
#
# Here is the last step of the Adam run, tensor by tensor. The bias of ``c_attn`` is cut into its parts for queries,
# keys and values; that of the keys is special, and has its own section.

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
# Both means start at 0. After one step, :math:`m_1 = (1 - \beta_1) g_1` is a tenth of the gradient, and
# :math:`v_1 = (1 - \beta_2) g_1^2` a thousandth of its square. If all gradients are equal, the weights of the terms
# sum up to :math:`1 - \beta^t`, which is what the hats divide by:
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

made, (ax,) = figure(6.4, 3.6)
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
# The figure shows two things. Without the correction the first steps are several times too large. And even with it,
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
# The *W* stands for weight decay: every step also shrinks every weight a little, so that a weight which the loss does
# not hold in its place returns to 0. This happens outside the gradient, which is called *decoupled*:
#
# .. math::
#
#    \theta_t = (1 - \eta \lambda) \, \theta_{t-1} - \eta \, d_t
#
# The older way adds :math:`\lambda \theta` to the gradient, as a penalty :math:`\frac{\lambda}{2} \theta^2` in the
# loss would. For SGD this is the same. For Adam it is not, because the sum is divided by the gradient's own size:
# where gradients are large the penalty is divided away, and where they are small it takes whole steps. Take two
# weights of the same value. The gradients of one flip between 10 and -10, those of the other between 0.01 and -0.01.

flips = torch.tensor([10.0, 0.01])
penalty = torch.tensor([1.0, 1.0])
decoupled = penalty.clone()
state_1, state_2 = {}, {}
for t in range(1, 1001):
    g = flips * (-1) ** t
    penalty -= 0.003 * adam(g + 0.1 * penalty, state_1, t)
    decoupled -= 0.003 * 0.1 * decoupled + 0.003 * adam(g, state_2, t)
print(f"L2 penalty {penalty[0]:.2f} {penalty[1]:.2f}")
print(f"decoupled  {decoupled[0]:.2f} {decoupled[1]:.2f}")
assert penalty[1].abs() < 0.2 and penalty[0] > 0.9
torch.testing.assert_close(
    decoupled, torch.full((2,), (1 - 3e-4) ** 1000), atol=0.01, rtol=0.0
)

# %%
# The penalty leaves one weight nearly as it was and removes the other. The decay shrinks both by the same factor,
# :math:`(1 - \eta \lambda)^t`.
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

from lm_from_scratch.training.train import parameter_groups

for group in parameter_groups(fresh_model(), weight_decay=0.1):
    shapes = {p.dim() for p in group["params"]}
    count = sum(p.numel() for p in group["params"])
    print(
        f"decay {group['weight_decay']}: {count:6} weights in tensors of {shapes} axes"
    )
    assert shapes == ({2} if group["weight_decay"] else {1})

# %%
# The package's AdamW
# -------------------
#
# The same formula is a pure function in the package, in two parts: GaLore, on the next page, needs the first part
# alone.

from lm_from_scratch.optim.adamw import AdamW, adam_direction, adamw

print(inspect.getsource(adam_direction))
print(inspect.getsource(adamw).split('"""')[-1])

# %%
# The optimizer keeps the moments of each parameter and calls this function. Fifteen steps with it, with torch's own,
# and with the rule of this page give the same model, in float64.


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
# Trap 1: bfloat16
# ----------------
#
# A bfloat16 number has 8 significant bits. The next number below 1 is 0.996, so 0.999 rounds back to 1. A second
# moment in bfloat16 therefore never shrinks: after one large gradient the steps of that weight stay small for ever.

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
# Trap 2: weights without a true gradient
# ---------------------------------------
#
# A bias on the keys adds the same number to all scores of a query, and the softmax ignores it. Its gradient is
# exactly 0 on paper. In floating point it is rounding noise, and Adam divides the noise by the size of the noise.

model = last["model"]
loss_of(model, batches[0]).backward()
bias = model.transformer.h[0].attn.c_attn.bias
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
    before = model(batches[0].idx)
    bias[C : 2 * C] += torch.randn(C)
    torch.testing.assert_close(
        model(batches[0].idx), before, atol=1e-4, rtol=0.0
    )

# %%
# Trap 3: memory
# --------------
#
# Two moments for each weight are twice the memory of the weights, held all the time.

weight_bytes = sum(p.nbytes for p in ours.parameters())
states = our_optimizer.state.values()
moment_bytes = sum(s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes for s in states)
assert moment_bytes == 2 * weight_bytes

with torch.device("meta"):  # shapes without memory
    gpt2 = GPT2LMHeadModel(GPT2Config())
optimizer = AdamW(gpt2.parameters())
shapes = [optimizer.state_shapes(p) for p in gpt2.parameters()]
total = 4 * sum(shape.numel() for entry in shapes for shape in entry.values())
weights = 4 * sum(p.numel() for p in gpt2.parameters())
print(
    f"GPT-2 small, float32: weights {weights / 1e6:.0f} MB, AdamW's state {total / 1e6:.0f} MB"
)
assert total == 2 * weights + 4 * len(
    shapes
)  # and one step count for each tensor

# %%
# Bug museum
# ----------
#
# L7: epsilon outside the correction
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Some optimizers fold both corrections into the learning rate. The code published with GaLore does, and
# :math:`\epsilon` is then added to the uncorrected root. It acts as
# :math:`\epsilon / \sqrt{1 - \beta_2^t}`, which in step 1 is 31.6 times the number that you set.


def epsilon_outside(g, state, t, beta1=0.9, beta2=0.999, eps=1e-6):
    m = momentum(g, state, t, beta1)
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g * g
    correction = math.sqrt(1 - beta2**t) / (1 - beta1**t)
    return correction * m / (state["v"].sqrt() + eps)


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
# L8: one step count for a whole group
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The ``OurRule`` above counts steps in the group, as the GaLore of ``pytorch_optimizer`` 4.1 does. That is right as
# long as all parameters get a gradient in every step. An expert that is routed to late, or a layer that is unfrozen,
# gets its first gradient in step 10 and is corrected as if nine had been there.

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
# Which sentence is false?
# ------------------------
#
# 1. Decoupled weight decay is an L2 penalty.
# 2. A weight whose gradient is 0 in this step does not move.
# 3. A weight whose gradient is missing in this step does not move.
#
# The code tries 2 and 3. Sentence 1 was tried above, with two weights and gradients of two sizes.

p = torch.nn.Parameter(torch.ones(1))
optimizer = AdamW([p], lr=0.1, weight_decay=0.0)


def step(gradient):
    p.grad = gradient
    optimizer.step()
    return p.item()


before = step(torch.ones(1))
assert step(torch.zeros(1)) < before - 0.01  # 2: the mean still pushes

before = p.item()
assert step(None) == before  # 3: nothing happened

# %%
# Sentences 1 and 2 are false, and 3 is true. Decay shrinks the weight outside gradient and moments. After a gradient of
# 0 the running mean still moves the weight, while ``None`` leaves weight, moments and step count alone.
#
# Exercises
# ---------
#
# 1. *Easy.* Give SGD and Adam ten times the best of their rates, 3.0 and 0.03. A right answer says which of the two
#    runs ends in NaN, and why the other cannot run away within a few steps. Hint: how large can :math:`d` be?
# 2. *Easy.* Add a warm-up of 20 steps to ``run``, and use three seeds for the weights. A right answer says whether
#    the difference in the last loss exceeds the one between seeds. Hint: plot the first 40 steps too.
# 3. *Medium.* Keep only the sign of :math:`g`, without :math:`v`. A right answer explains why this is Adam with
#    :math:`\beta_1 = \beta_2 = 0`, and checks it in one line. Hint: what is :math:`g / \sqrt{g^2}`?
# 4. *Medium.* Train with moments in bfloat16. A right answer plots the rms of :math:`\sqrt{v}` of one layer beside that
#    of float32. Hint: convert what the rule writes into ``state``.
#
# Summary
# -------
#
# * The mean of squares :math:`v` gives every weight its own unit: on our run, RMSProp and Adam ended below SGD and
#   momentum at the best of three learning rates.
# * The direction has rms 1 for a pure signal and 0.23 for pure noise, whatever the unit of the loss. The first step is
#   the largest.
# * Without the bias correction, the steps are up to more than six times too large.
# * Decoupled decay shrinks all weights by one factor. Under pure noise it settles at
#   :math:`\sqrt{\eta / (2 \lambda)}`.
# * The package's AdamW equals torch's and counts steps per parameter.
# * The state takes twice the memory of the weights.
#
# Two full-size tensors for every weight matrix: are they needed, if the gradient of a matrix has only a few directions
# that matter? The next page, GaLore step by step, keeps the moments of those alone.
#
# Sources
# -------
#
# * `Adam <https://arxiv.org/abs/1412.6980>`_, Kingma and Ba, 2015.
# * `Decoupled Weight Decay Regularization <https://arxiv.org/abs/1711.05101>`_, Loshchilov and Hutter, 2019.
# * `Rotational Equilibrium <https://arxiv.org/abs/2305.17212>`_, Kosson, Messmer and Jaggi, 2023: what decay settles
#   on.
# * `On the Convergence of Adam and Beyond <https://arxiv.org/abs/1904.09237>`_, Reddi, Kale and Kumar, 2018 (AMSGrad).

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
folder.cleanup()
