r"""
AdamW: a step of its own size for every weight
==============================================

Training walks downhill. The gradient is the slope under your feet: it says which way is down, not how far to go.
Here are three ways down a valley, seen from above. The coordinates are two weights, the height is the loss, the cross is
the lowest place. Each dot is a step of an *optimizer*, a rule that turns gradients into steps.
"""

# sphinx_gallery_needs = ["../1_gpt2/4_training"]
# sphinx_gallery_words = ["Adam vs AdamW", "Adam optimizer explained", "torch.optim.AdamW", "decoupled weight decay", "L2 regularization", "betas", "SGD momentum", "RMSProp", "optimizer from scratch", "SGD vs Adam", "momentum explained", "why Adam", "what does an optimizer do", "step size of each weight", "write an optimizer", "custom optimizer", "learning rate of Adam", "bias correction", "first and second moment", "why divide by the root", "weight decay explained", "Adam", "Adam explained", "Adam epsilon", "beta1 beta2", "betas explained", "L2 vs weight decay", "gradient descent with momentum", "SGD", "adaptive learning rate", "how are weights updated", "update rule", "optimizer comparison", "which optimizer", "RMSprop vs Adam", "running average", "moving average", "regularisation", "which optimizer should I take", "which optimizer is best", "choose an optimizer"]
import torch
from torch.optim import SGD, Adam

from lm_from_scratch.drawings import optimizers as drawings


def height(x):
    return (x[0] ** 2 + 50 * x[1] ** 2) / 2


def walk(make, steps=40):
    x = torch.tensor([-10.0, 1.0], requires_grad=True)
    optimizer, path = make([x]), [x.tolist()]
    for _ in range(steps):
        optimizer.zero_grad()
        height(x).backward()
        optimizer.step()
        path.append(x.tolist())
    return path


paths = {
    "gradient descent": walk(lambda x: SGD(x, lr=0.038)),
    "momentum": walk(lambda x: SGD(x, lr=0.005, momentum=0.9)),
    "Adam": walk(lambda x: Adam(x, lr=0.7)),
}
drawings.valley(paths, steepness=50)

# %%
# Across the valley the ground is 50 times as steep as along it. Gradient descent (PyTorch's ``SGD``) zigzags across,
# and creeps along. Momentum does better. Adam walks straight down, rolls a little past the cross, and returns. Each has
# the best of several learning rates.

assert height(paths["gradient descent"][-1]) == min(
    height(walk(lambda x, lr=lr: SGD(x, lr))[-1])
    for lr in (0.03, 0.035, 0.038, 0.039)
)
assert height(paths["momentum"][-1]) == min(
    height(walk(lambda x, lr=lr: SGD(x, lr, 0.9))[-1])
    for lr in (0.003, 0.005, 0.01, 0.02)
)
assert height(paths["Adam"][-1]) == min(
    height(walk(lambda x, lr=lr: Adam(x, lr))[-1])
    for lr in (0.1, 0.3, 0.5, 0.7, 1.0)
)
assert height(paths["gradient descent"][-1]) > 5 * height(paths["momentum"][-1])
assert height(paths["momentum"][-1]) > 5 * height(paths["Adam"][-1])

# %%
# One rate for two slopes
# -----------------------
#
# Gradient descent moves each weight by its gradient times the *learning rate*, one number for all weights. In the
# picture its rate is 0.038.
#
# **Predict first.** Now the rate is 0.042. Where is gradient descent after 40 steps?
#
# * nearer to the lowest place
# * on a wider zigzag that ends there too
# * outside the valley

walk(lambda x: SGD(x, lr=0.042))[-1]

# %%
# Outside the valley: the second number was 1 and is now 45. Its gradient is 50 times the number itself, so each step
# multiplies it by :math:`1 - 50 \cdot 0.042 = -1.1`.
#
# The steepest direction sets the limit for the rate, and every gentler one has to crawl.

assert round(walk(lambda x: SGD(x, lr=0.042))[-1][1]) == 45
assert round(1.1**40) == 45

# %%
# A model has millions of slopes
# ------------------------------
#
# The shipped GPT-2 reads 16 pieces of Python's documentation. Its table ``wte`` holds a row of 128 weights for each
# token. How steep is the loss for the row of a token? We take the *rms* of its gradient, the root of the mean of the
# squares, which is a typical size.

from dataclasses import replace

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.models.gpt2 import GPT2LMHeadModel
from lm_from_scratch.text.corpora import load_corpus
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.loss import causal_lm_loss

documents = load_corpus("reference")
gpt2, tokenizer = load_shipped("gpt2-docs")
texts = [tokenizer.start(d.text[:1000])[:128] for d in documents]
idx = torch.tensor([ids for ids in texts if len(ids) == 128][:16])  # (B, T)
causal_lm_loss(gpt2(idx), next_token_targets(idx)).backward()

rms = gpt2.transformer.wte.weight.grad.square().mean(-1).sqrt()  # (V,)
words = [" the", " class", " string", " thread", " zip", " mail"]

assert rms[tokenizer.encode(" the")] > 1000 * rms[tokenizer.encode(" mail")]
assert (idx == tokenizer.encode(" the")[0]).sum() > 10
assert (idx != tokenizer.encode(" mail")[0]).all()
drawings.magnitudes(
    words, [rms[tokenizer.encode(word)].item() for word in words]
)

# %%
# In these texts ``␣the`` comes often and ``␣mail`` never (``␣`` is a space). The slopes differ by a factor of more than
# 1000, and both rows get the same learning rate. It is too large for one of them, or far too small for the other.
#
# Momentum: average the gradients
# -------------------------------
#
# Across the valley the slopes point left, right, left: their average is nearly 0. Along the valley they agree. So
# *momentum* steps along a running mean m of the gradients g:
#
# .. math::
#
#    m_t = \beta_1 \, m_{t-1} + (1 - \beta_1) \, g_t
#
# With :math:`\beta_1 = 0.9` it remembers about ten steps. In a model it has a second use: the gradient of one
# batch is partly noise, and the mean keeps what the batches agree on.
#
# Divide by the size
# ------------------
#
# Adam keeps a second running mean v, of the *squared* gradients. Its root is the typical size of the gradient of
# this one weight. Divide m by it.


def direction(g, state, beta1=0.9, beta2=0.999):
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g**2
    return state["m"] / state["v"].sqrt()


# %%
# **Predict first.** The gradients of two weights are 1000 and 0.001. What is ``direction`` in the first step?
#
# * 1000 and 0.001
# * 1 and 1
# * about 3 and 3

print(direction(torch.tensor([1000.0, 0.001]), {}))

assert round(0.1 / 0.001**0.5, 1) == 3.2 and round(0.001**0.5, 3) == 0.032

# %%
# About 3 and 3. The factor of a million is gone: every weight is measured in its own unit. But both means start at 0,
# so after one step m has seen a tenth of the gradient, and v a thousandth of its square. The root of a thousandth is
# 0.032, and :math:`0.1 / 0.032` is 3.2.
#
# Adam corrects this by the *bias correction*: it divides each mean by :math:`1 - \beta^t`, the share that has arrived
# after t steps. Then the first directions are 1 and 1.
#
# The whole step
# --------------
#
# Here is all of AdamW. The tiny ``eps`` prevents a division by zero, and ``decay`` is the W, for *weight decay*: every
# step also shrinks the weight a little.


def adamw(w, g, state, t, lr, decay=0.0, beta1=0.9, beta2=0.999, eps=1e-8):
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g**2
    m = state["m"] / (1 - beta1**t)
    v = state["v"] / (1 - beta2**t)
    d = m / (v.sqrt() + eps)
    return (1 - lr * decay) * w - lr * d


# %%
# Ten steps of it, and of PyTorch's (a ``Parameter`` is a tensor that is trained):

w, state = torch.ones(2), {}
p = torch.nn.Parameter(torch.ones(2))
theirs = torch.optim.AdamW([p], lr=0.1, weight_decay=0.1)
for t in range(1, 11):
    p.grad = torch.randn(2)
    w = adamw(w, p.grad, state, t, lr=0.1, decay=0.1)
    theirs.step()
print(w, p.data)

torch.testing.assert_close(w, p.data)

# %%
# Now the learning rate means the same in every model: it is about the farthest that a weight moves in one step. A
# weight whose gradients agree goes all the way. One whose gradients are noise stays near its place.
#
# Why the decay is kept apart
# ---------------------------
#
# For years libraries did it otherwise: they *added* ``decay * w`` to the gradient. In plain gradient descent that is
# the same. In 2017 Ilya Loshchilov and Frank Hutter saw what Adam makes of it.
#
# **Predict first.** Two weights start at 1. The gradients of one flip between 10 and -10, those of the other between
# 0.01 and -0.01. The decay is added to the gradient. Which weight shrinks?
#
# * both alike
# * only the one with large gradients
# * only the one with small gradients

added = apart = torch.ones(2)
state_1, state_2 = {}, {}
for t in range(1, 1001):
    g = torch.tensor([10.0, 0.01]) * (-1) ** t
    added = adamw(added, g + 0.1 * added, state_1, t, lr=0.003)
    apart = adamw(apart, g, state_2, t, lr=0.003, decay=0.1)

print("added", added)
print("apart", apart)

assert added[0] > 0.9 and added[1].abs() < 0.2
torch.testing.assert_close(
    apart, torch.full((2,), (1 - 3e-4) ** 1000), atol=0.01, rtol=0.0
)

# %%
# Only the one with small gradients. Next to a gradient of 10 the decay is small, and Adam divides it by 10.
#
# *Decoupled* decay, apart from the gradient, shrinks both weights by the same factor. That is the difference between
# Adam and AdamW.
#
# The same race in a model
# ------------------------
#
# A GPT-2 with one block learns Python's documentation, three times with each optimizer. Gradient descent and momentum
# have the best rate of a coarse search, 0.3 and 0.1. AdamW has 0.003, without a search.

tokenizer = Tokenizer.train([d.text for d in documents[:40]], 512)
stream = [i for d in documents[:40] for i in tokenizer.start(d.text)]
windows = torch.tensor(stream).unfold(0, 32, 1)  # all pieces of 32 tokens
no_dropout = dict(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
sizes = dict(vocab_size=512, block_size=32, n_layer=1, n_head=4, n_embd=48)
config = replace(gpt2.config, **sizes, **no_dropout, initializer_range=0.04)

# %%
# The seed decides the first weights, and which 12 pieces come in each step.


def train(make, seed, steps=100):
    torch.manual_seed(seed)
    model, losses = GPT2LMHeadModel(config), []
    optimizer = make(model.parameters())
    for _ in range(steps):
        idx = windows[torch.randint(len(windows), (12,))]  # (B, T)
        loss = causal_lm_loss(model(idx), next_token_targets(idx))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses).unfold(0, 20, 1).mean(-1)  # of 20 steps


# %%
# Here are three runs of each.

rules = {
    "gradient descent": lambda p: SGD(p, 0.3, fused=True),
    "momentum": lambda p: SGD(p, 0.1, 0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.003, fused=True),
}
runs = {
    name: torch.stack([train(rule, seed) for seed in range(3)])
    for name, rule in rules.items()
}

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

_, (ax,) = figure(4.8, 3.4)
for i, (name, losses) in enumerate(runs.items()):
    look = dict(color=COLOURS[(3, 4, 0)[i]], ls=(":", "--", "-")[i])
    ax.plot(range(20, 101), losses.mean(0), label=name, **look)
    ax.plot(range(20, 101), losses.T, alpha=0.3, linewidth=1, **look)
ax.set(title="Loss, mean of 20 steps", xlabel="step", ylabel="loss")
ax.legend(frameon=False)
plt.show()

for sgd, pushed, adam in zip(*runs.values()):
    assert adam[-1] < min(sgd[-1], pushed[-1]) - 0.03

# %%
# With every seed AdamW ends below both.
#
# Where to begin
# --------------
#
# * **Learning rate**: 0.001 to 0.004 for models like ours, 0.0003 and less for billions of weights.
# * **Warm-up**: let the rate rise over the first steps. In step 1 every weight goes all the way, in a direction that a
#   single batch decides.
# * **betas**: 0.9 and 0.999 are the defaults. Large models are often trained with 0.95 as the second.
# * **Decay**: 0.1 for matrices, and none for biases and norms. The weight of a norm belongs near 1, not near 0.
#
# `AdamW in depth <1b_adamw_in_depth.ipynb>`_ measures how large a step is, and has the checks for an AdamW of your own.
#
# The price is memory: m and v, the *moments*, are two more numbers for every weight. The next lesson shrinks them.
#
# Exercises
# ---------
#
# 1. *Easy.* Give gradient descent and AdamW ten times the best of their rates, 3.0 and 0.03, in the small model. A good
#    answer says which of the two ends in NaN, and why the other cannot run away within a few steps.
# 2. *Medium.* Turn the valley by 45 degrees, and the start with it. Two of the three optimizers end at the same height
#    as before. A good answer names the third, tries it with a rate of 0.2, and says why it notices. Hint: v belongs to
#    a weight, and a weight is a coordinate.
# 3. *Medium.* Keep only the sign of g, without v. A good answer explains why this is Adam with :math:`\beta_1 =
#    \beta_2 = 0`, and checks it in one line. Hint: what is :math:`g / \sqrt{g^2}`?
#
# Summary
# -------
#
# * One learning rate cannot fit all weights: slopes in a real model differ by a factor of more than 1000.
# * Adam divides a running mean of the gradients by the root of a running mean of their squares, both corrected for
#   their start at 0. So every weight moves in its own unit.
# * The W is for *weight decay*, kept apart from the gradient. If it were added to the gradient, Adam would divide it away.
