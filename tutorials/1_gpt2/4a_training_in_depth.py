r"""
Training: watching a model learn
================================

A new language model is a box of random numbers. A loop of a few lines turns them into something that
knows how Python's documentation sounds. What happens in that loop, and how do you see whether it
works?

Training code that is wrong seldom crashes. It prints a falling number and produces a bad model. So this
page checks each part of the loop by itself, and watches the loop while it runs.

You will learn
--------------

* what the loss says, in nats per token, in perplexity and in bits per byte,
* which token is the target of which, and what padding does to it,
* what the gradient, AdamW, clipping and the schedule do in one step,
* how to read a learning curve with baselines that you compute yourself,
* five checks that tell a healthy run from a broken one.

Before you start
----------------

Read the pages on `tokens <1_tokens.ipynb>`_ and on `the model <2_gpt2.ipynb>`_ first. You need one
CPU core. The text to train on is Python's own language reference, which is already on your disk:
nothing is downloaded.

Text to train on
----------------

The reference is a set of documents. Some are held out: the model never sees them, and what it makes of
them is the measure of success. A tokenizer with a small vocabulary of :math:`V = 1024` is trained on
the rest.
"""

# sphinx_gallery_thumbnail_number = 2
# sphinx_gallery_museum = ["G6", "G18", "G23"]

import inspect
import json
import math
import re
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F

from lm_from_scratch.instruments.plot import COLOURS, GREY, figure
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.text.batches import (
    Batch,
    PackedBatches,
    padded_batch,
    sequential_batches,
    write_tokens,
)
from lm_from_scratch.text.corpora import load_corpus, split
from lm_from_scratch.text.targets import IGNORE, next_token_targets
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.loss import causal_lm_loss

train_documents, held_out_documents = split(load_corpus("reference"))
tokenizer = Tokenizer.train(
    [document.text for document in train_documents], 1024
)
V = tokenizer.vocab_size
assert V == 1024

folder = tempfile.TemporaryDirectory()
work = Path(folder.name)
train_file = write_tokens(train_documents, tokenizer, work / "train.bin")
held_out_file = write_tokens(
    held_out_documents, tokenizer, work / "held_out.bin"
)
for name, documents, file in [
    ("train", train_documents, train_file),
    ("held out", held_out_documents, held_out_file),
]:
    print(
        f"{name:9} {len(documents):3} documents {file.n_bytes:7} bytes {file.n_tokens:7} tokens"
    )

# %%
# The loss is surprise
# --------------------
#
# The model gives each possible next token a probability. The loss is the mean of the negative
# logarithm of the probability that it gave to the token that really came. It is measured in *nats*
# per token, and low means: not surprised.
#
# .. math::
#
#    \mathcal{L} = -\frac{1}{N} \sum_{t} \log p(x_{t+1} \mid x_{\le t})
#
# A model that knows nothing should give each of the :math:`V` tokens the probability :math:`1/V`, and
# be surprised by :math:`\log V`. A fresh GPT-2 does: its initial weights are small, so its logits are
# close to 0.

batches = PackedBatches(train_file, batch_size=16, block_size=64)
batch = batches[0]  # B = 16 rows of T = 64 tokens
nano = GPT2Config(
    vocab_size=V,
    block_size=64,
    n_layer=2,
    n_head=4,
    n_embd=64,
    initializer_range=0.04,
    embd_pdrop=0.0,
    resid_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=tokenizer.eos_token_id,
    eos_token_id=tokenizer.eos_token_id,
)


def loss_of(model, batch):
    return causal_lm_loss(
        model(batch.idx, positions=batch.positions, documents=batch.documents),
        batch.targets,
    )


torch.manual_seed(0)
model = GPT2LMHeadModel(nano)
with torch.no_grad():
    loss = float(loss_of(model, batch))
    logits = model(
        batch.idx, positions=batch.positions, documents=batch.documents
    )  # (B, T, V)

print(
    f"loss {loss:.2f}   log V {math.log(V):.2f}   largest logit {logits.abs().max():.1f}"
)
assert abs(loss - math.log(V)) < 0.1 and logits.std() < 0.5

# %%
# This is **check 1** of any run: before the first step the loss is :math:`\log V`. A higher value means
# that the model is already sure of things that it cannot know. Weights that start five times too large
# do that.

torch.manual_seed(0)
loud = GPT2LMHeadModel(
    replace(nano, initializer_range=5 * nano.initializer_range)
)
with torch.no_grad():
    loud_loss = float(loss_of(loud, batch))
print(f"loss {loud_loss:.2f}   log V {math.log(V):.2f}")
assert loud_loss > math.log(V) + 1.0

# %%
# One loss, four units
# --------------------
#
# The same number is quoted in four units. *Perplexity* is :math:`e^{\mathcal{L}}`: a model with
# perplexity 20 is as surprised as one that chooses evenly among 20 tokens. *Bits* use the logarithm to
# the base 2. *Bits per byte* spread the bits over the bytes of the text instead of over the tokens.
#
# .. math::
#
#    \text{bits per byte} = \frac{\mathcal{L}}{\log 2} \cdot \frac{\text{tokens}}{\text{bytes}}
#
# The first token of the file has no target, so the number of predicted tokens is one less than the
# number of tokens.


def bits_per_byte(loss, file):
    return loss / math.log(2) * (file.n_tokens - 1) / file.n_bytes


uniform = math.log(V)
bits = uniform / math.log(2)
print(
    f"uniform: {uniform:.2f} nats = {bits:.2f} bits a token, perplexity {math.exp(uniform):.0f}"
)
print(f"uniform: {bits_per_byte(uniform, held_out_file):.2f} bits a byte")

torch.testing.assert_close(
    math.exp(uniform), float(V)
)  # perplexity of the uniform model
torch.testing.assert_close(2**bits, math.exp(uniform))
torch.testing.assert_close(bits, 10.0)  # 1024 = 2 ** 10

# %%
# Why four? A loss per token depends on what a token is. Take a tokenizer that knows the 256 bytes and
# the end of the text, nothing else. Its uniform model has a *lower* loss per token, because it chooses
# among fewer tokens. In bits per byte, it is the worse one by far.

byte_tokenizer = Tokenizer.train(["x"], 257)
byte_file = write_tokens(held_out_documents, byte_tokenizer, work / "bytes.bin")
assert (
    byte_file.n_tokens == byte_file.n_bytes + len(held_out_documents) + 1
)  # a token is a byte

for name, n, file in [("bytes", 257, byte_file), ("BPE", V, held_out_file)]:
    each = math.log(n)
    print(
        f"{name:5}  {each:.2f} nats a token  {bits_per_byte(each, file):.2f} bits a byte"
    )
assert math.log(257) < math.log(V)
assert bits_per_byte(math.log(257), byte_file) > 1.5 * bits_per_byte(
    math.log(V), held_out_file
)

# %%
# So: compare losses per token only between models with the same tokenizer. For everything else, and
# for compressors, use bits per byte.
#
# The target is the next token
# ----------------------------
#
# The target of a token is the token to its right. Where nothing follows there is no target, and the
# number -100 says so. Two sequences of unequal length, padded on the right:

padded = padded_batch([[11, 12, 13, 14, 15], [21, 22]], pad_token_id=0)
print("idx\n", padded.idx.numpy())
print("positions\n", padded.positions.numpy())
print("targets\n", padded.targets.numpy())

assert torch.equal(
    padded.targets, next_token_targets(padded.idx, positions=padded.positions)
)
assert int((padded.targets != IGNORE).sum()) == (5 - 1) + (2 - 1)
print(inspect.getsource(next_token_targets))

# %%
# The shift happens here, once, in the open. The model does not shift and the loss does not shift: a
# shift in two places teaches a model to predict the token after the next one.
#
# The rows of a token file are full, and the page on tokens showed one: an end-of-text token is the last target of
# one document and the first input of the next.
#
# The gradient is what was predicted minus what came
# --------------------------------------------------
#
# The loss of one token is :math:`-\log \mathrm{softmax}(z)_y = -z_y + \log \sum_i e^{z_i}`, where
# :math:`z` are the logits and :math:`y` is the target. Its derivative is short:
#
# .. math::
#
#    \frac{\partial \mathcal{L}}{\partial z_i} &= \frac{e^{z_i}}{\sum_j e^{z_j}} - [i = y] \\
#    &= p_i - [i = y]
#
# where :math:`[i = y]` is 1 for the target and 0 for every other token. The mean over N targets divides
# it by N. Autograd agrees.

logits.requires_grad_()
causal_lm_loss(logits, batch.targets).backward()

N = batch.targets.numel()
p = logits.detach().softmax(-1)
expected = (p - F.one_hot(batch.targets, V)) / N
torch.testing.assert_close(logits.grad, expected, rtol=1e-4, atol=1e-9)
print(f"largest difference {float((logits.grad - expected).abs().max()):.0e}")

# %%
# A step against the gradient raises the logit of the target in proportion to :math:`1 - p_y`, and lowers
# every other logit in proportion to the probability that it got. A target that was predicted with
# certainty changes nothing.
#
# Add up the pull of all tokens, and something can be foretold. The sum is the mean prediction minus the
# frequency of each token in the batch. A fresh model predicts about :math:`1/V` everywhere, so
# the first thing it is told is *which tokens are frequent*, whatever comes before them. Remember this for the
# curve below.

frequency = F.one_hot(batch.targets, V).float().mean((0, 1))
pull = logits.grad.sum((0, 1))
torch.testing.assert_close(
    pull, p.mean((0, 1)) - frequency, rtol=1e-4, atol=1e-7
)
torch.testing.assert_close(
    p.mean((0, 1)), torch.full((V,), 1 / V), rtol=0.5, atol=0.0
)

for token in frequency.topk(5).indices.tolist():
    piece = ascii(tokenizer.decode([token]))
    print(
        f"{piece:8} frequency {frequency[token]:.3f}   1/V - pull {1 / V - pull[token]:.3f}"
    )

# %%
# AdamW: one step of the optimizer
# --------------------------------
#
# The gradients of different weights differ a lot in size. (Which weights are not decayed: bug museum, G23.)

loss_of(model, batch).backward()
sizes = {
    name: float(p.grad.square().mean().sqrt())
    for name, p in model.named_parameters()
}
for name in (min(sizes, key=sizes.get), max(sizes, key=sizes.get)):
    print(f"{sizes[name]:.0e}  {name}")
model.zero_grad()
assert max(sizes.values()) > 10 * min(sizes.values())

# %%
# Adam keeps two running means for each weight, of the gradient :math:`g` and of its square, and steps by
# the first over the root of the second, so that the size cancels. The *W* adds weight decay beside the
# gradient: each weight loses a small share of itself.
#
# .. math::
#
#    m &\leftarrow \beta_1 m + (1 - \beta_1)\, g \\
#    v &\leftarrow \beta_2 v + (1 - \beta_2)\, g^2 \\
#    \hat m &= m / (1 - \beta_1^t) \\
#    \hat v &= v / (1 - \beta_2^t) \\
#    \theta &\leftarrow (1 - \eta \lambda)\, \theta - \eta\, \hat m \,/ (\sqrt{\hat v} + \epsilon)
#
# Here :math:`t` counts the steps, :math:`\eta` is the learning rate and :math:`\lambda` the decay. The
# divisions by :math:`1 - \beta^t` correct for means that started at 0. Written down and compared with
# ``torch.optim.AdamW`` over five steps:


def adamw(theta, g, m, v, t, lr, decay, betas=(0.9, 0.95), eps=1e-8):
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g**2
    m_hat = m / (1 - betas[0] ** t)
    v_hat = v / (1 - betas[1] ** t)
    theta = (1 - lr * decay) * theta
    return theta - lr * m_hat / (v_hat.sqrt() + eps), m, v


start = torch.randn(
    5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
)
gradients = torch.randn(
    5, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
)

theirs = torch.nn.Parameter(start.clone())
optimizer = torch.optim.AdamW(
    [theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1
)
ours, m, v = start.clone(), torch.zeros(5, 3), torch.zeros(5, 3)
for t, g in enumerate(gradients, start=1):
    theirs.grad = g.clone()
    optimizer.step()
    ours, m, v = adamw(ours, g, m, v, t, lr=0.1, decay=0.1)
    torch.testing.assert_close(ours, theirs.detach())
print("five steps agree")

# %%
# In the first step the ratio is :math:`g / \lvert g \rvert`. So every weight moves by the full learning rate, up or
# down, however small or large its gradient is. That is one reason why the learning rate starts small.

moved = {}
for scale in (0.001, 1.0, 1000.0):
    after, _, _ = adamw(
        start, scale * gradients[0], 0.0, 0.0, t=1, lr=0.1, decay=0.0
    )
    moved[scale] = start - after
    torch.testing.assert_close(
        moved[scale], 0.1 * gradients[0].sign(), rtol=1e-2, atol=0.0
    )
print("a gradient times 0.001, 1 or 1000: the first step is the same")

# %%
# The trainer makes two groups of parameters. Matrices decay. Biases and the weights of the norms do
# not: they are few, and a norm whose scale is pulled towards 0 switches its features off.

from lm_from_scratch.training.train import parameter_groups

for group in parameter_groups(model, weight_decay=0.1):
    shapes = [tuple(p.shape) for p in group["params"]]
    n = sum(p.numel() for p in group["params"])
    print(
        f"decay {group['weight_decay']}: {len(shapes):2} tensors, {n:6} numbers, e.g. {shapes[0]}"
    )
    assert all(
        (p.dim() >= 2) == (group["weight_decay"] > 0) for p in group["params"]
    )

total = sum(
    p.numel() for g in parameter_groups(model, 0.1) for p in g["params"]
)
assert total == sum(p.numel() for p in model.parameters())

# %%
# The learning rate rises and falls
# ---------------------------------
#
# A linear *warm-up* lets Adam's means settle before they are trusted. Then the rate falls along half a
# cosine and reaches ``min_lr`` in the last step. It is a function of the number of the step and of nothing
# else.

from lm_from_scratch.training.train import TrainConfig, learning_rate

config = TrainConfig(steps=400, lr=3e-3, min_lr=3e-4, warmup=50, eval_every=50)
steps = range(1, config.steps + 1)
rates = [learning_rate(step, config) for step in steps]

assert math.isclose(
    rates[0], config.lr / config.warmup
)  # one 50th of the highest
assert rates[49] == max(rates) == config.lr  # the end of the warm-up
assert math.isclose(
    learning_rate(225, config), (config.lr + config.min_lr) / 2
)  # half-way down
assert math.isclose(rates[-1], config.min_lr)  # it ends where it says

fig, (ax,) = figure(5.4, 2.8)
ax.plot(steps, rates)
ax.axvline(config.warmup, color=COLOURS[7], linestyle=":", linewidth=1.2)
ax.text(config.warmup + 8, 2e-4, "end of warm-up")
ax.set(xlabel="step", ylabel="learning rate", ylim=(0, 3.3e-3))
ax.set_title("Warm-up, then half a cosine")
plt.show()

# %%
# The loop
# --------
#
# Here is everything that happens in one step. The trainer calls it with the batches of the step, each
# of which is weighted by its number of targets. Its docstring is left out.
#
# A run can have several processes, which share the rows of a batch. Here is one: ``processes.share`` returns
# the whole batch, ``processes.size`` is 1, ``whole`` and ``processes.total`` return what they get. The
# chapter on optimizers says more. ``loss_of`` is the model with its loss behind it.

from lm_from_scratch.training.train import optimizer_step

source = inspect.getsource(optimizer_step)
print(re.sub(r' *""".*?"""\n', "", source, count=1, flags=re.DOTALL))

# %%
# One line is left to explain. The gradients of all parameters together are one long vector. If it is longer than
# ``max_grad_norm``, *clipping* shortens it to that length and keeps its direction, so that one strange
# batch cannot outweigh all others.


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


loss_of(model, batch).backward()
whole = gradient(model)
torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
print(f"length {whole.norm():.2f} -> {gradient(model).norm():.2f}")
torch.testing.assert_close(
    gradient(model), whole * 0.5 / whole.norm(), rtol=1e-4, atol=1e-7
)
model.zero_grad()

# %%
# Now the loop runs. ``train`` is a generator: it does one step, yields what it measured, and waits. So
# the loop below belongs to you, and between two steps you can look at the model. Every 50 steps the
# generator measures the held-out loss; we add samples, and a number that is explained below.

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.models.modes import evaluating
from lm_from_scratch.training.train import evaluate, train

held_out = list(sequential_batches(held_out_file, batch_size=32, block_size=64))
prompt = [tokenizer.eos_token_id, *tokenizer.encode("The")]


def speak(model):
    steps = generate(
        model, [prompt], 60, Sampler(temperature=0.8), num_return_sequences=8
    )
    return [tokenizer.decode(prompt[1:] + row) for row in complete(steps)]


def entropy(p):
    return -torch.special.xlogy(p, p).sum(-1)


def context_used(model, batch):
    with evaluating(model):
        p = (
            model(
                batch.idx, positions=batch.positions, documents=batch.documents
            )
            .softmax(-1)
            .flatten(0, 1)
        )  # (N, V)
    return float(entropy(p.mean(0)) - entropy(p).mean())


history, context, samples = (
    [],
    {0: context_used(model, held_out[0])},
    {0: speak(model)},
)
for step in train(model, batches, config, held_out):
    history.append(step)
    if step.step == 30 or step.step % 25 == 0:
        context[step.step] = context_used(model, held_out[0])
    if step.step in (30, 100, 400):
        samples[step.step] = speak(model)
    if step.step in (1, 30, 100, 200, 400):
        print(
            f"step {step.step:3}  loss {step.loss:.2f}  gradient norm {step.grad_norm:.2f}"
        )

# %%
# Reading the curve
# -----------------
#
# A loss alone means little. Compare it with models that you can count by hand. The *unigram* knows how
# often each token occurs. The *bigram* knows how often each token follows each other token:
#
# .. math::
#
#    p(b \mid a) = \frac{n_{ab} + k\, p(b)}{n_a + k}
#
# The constant :math:`k` mixes the unigram in where pairs are rare. We choose it on the held-out text
# itself, which is unfair in favour of the bigram.

seen = np.asarray(train_file.tokens, dtype=np.int64)
new = np.asarray(held_out_file.tokens, dtype=np.int64)
p_one = (np.bincount(seen, minlength=V) + 1.0) / (len(seen) + V)
pairs = np.zeros((V, V))
np.add.at(pairs, (seen[:-1], seen[1:]), 1.0)


def bigram_loss(k):
    p = (pairs + k * p_one) / (pairs.sum(1, keepdims=True) + k)
    np.testing.assert_allclose(p.sum(1), 1.0)
    return -np.log(p[new[:-1], new[1:]]).mean()


levels = {
    "uniform": math.log(V),
    "unigram": -np.log(p_one[new[1:]]).mean(),
    "bigram": min(bigram_loss(k) for k in (1, 3, 10, 30, 100, 300)),
}
final = history[-1].held_out_loss
for name, level in [*levels.items(), ("model", final)]:
    print(
        f"{name:8} {level:.2f} nats a token   perplexity {math.exp(level):5.1f}"
    )
assert final < levels["bigram"] < levels["unigram"] < levels["uniform"]

# %%
# The model ends below the bigram, with fewer numbers than the table of all pairs has entries.

assert sum(p.numel() for p in model.parameters()) < V**2

measured = [step for step in history if step.held_out_loss is not None]
fig, (ax,) = figure(5.6, 4.0)
ax.plot(
    [s.step for s in history],
    [s.loss for s in history],
    color=GREY,
    linewidth=0.8,
)
ax.plot(
    [s.step for s in measured],
    [s.held_out_loss for s in measured],
    "o-",
    markersize=3,
)
ax.text(
    408,
    np.mean([s.loss for s in history[-50:]]),
    "batch",
    va="center",
    color=GREY,
)
ax.text(408, final, "held out", va="center", color=COLOURS[0])
for colour, (name, level) in zip(
    (COLOURS[2], COLOURS[3], COLOURS[7]), levels.items()
):
    ax.axhline(level, linestyle="--", linewidth=1.2, color=colour)
    ax.text(408, level + 0.02, name, va="bottom", color=colour)
ax.set(xlabel="step", ylabel="loss, nats per token", xlim=(0, 500))
ax.set_title("A model learns: the loss and three baselines")
plt.show()

# %%
# Is there a moment at which the model has learnt the frequencies and nothing else? The gradient at the
# logits told us to expect one. A number makes it visible. Compare the entropy :math:`H` of the *mean*
# prediction with the *mean entropy* of the predictions:
#
# .. math::
#
#    I = H\Bigl(\frac{1}{N} \sum_t p_t\Bigr) - \frac{1}{N} \sum_t H(p_t)
#
# If the model says the same thing whatever it has read, the two are equal and :math:`I` is 0. The more the
# predictions differ from context to context, the larger it is.

early = history[29].loss
fig, (ax,) = figure(5.4, 3.2)
ax.plot(list(context), list(context.values()), color=COLOURS[3])
ax.axvline(30, color=COLOURS[7], linestyle=":", linewidth=1.2)
ax.text(40, 1.35, "step 30:\nonly frequencies")
ax.set(xlabel="step", ylabel="context used I, nats", ylim=(-0.05, None))
ax.set_title("How much the predictions depend on the context")
plt.show()

print(
    f"step 30:  loss {early:.2f}, unigram {levels['unigram']:.2f}, context {context[30]:.3f}"
)
print(f"step 400: context {context[400]:.2f}")
assert min(context.values()) > -1e-4  # never negative, up to rounding
assert abs(early - levels["unigram"]) < 0.3
assert context[30] < context[0] < 0.2 and context[30] < 0.05
assert context[400] > 1.0

# %%
# At step 30 the loss is within 0.3 nats of the unigram, and :math:`I` is below 0.05 nats: less than in the
# random model, whose predictions depended on the context without any sense. At the end it is more than 1
# nat. The model learnt *what is frequent*, then *what follows what*.
#
# What the model says on the way
# ------------------------------
#
# The same prompt and the same random numbers at four moments, printed as they came. Beside each stands
# a number measured on eight such samples: the share of the words of three letters or more that occur in
# the training text.

known = set(
    re.findall("[A-Za-z]{3,}", "\n".join(d.text for d in train_documents))
)
share = {}
for number, texts in samples.items():
    words = [
        word for text in texts for word in re.findall("[A-Za-z]{3,}", text)
    ]
    share[number] = sum(word in known for word in words) / len(words)
    print(f"--- step {number}: {share[number]:.0%} of the words are known")
    print(textwrap.fill(ascii(texts[0][:140]), 72))
assert share[400] > share[0] + 0.2

# %%
# Four hundred steps do not make an author. A later section looks at a model that had more of them.
#
# Overfit one batch first
# -----------------------
#
# **Check 2** is quick, and it belongs before every long run: train on a single small batch, again
# and again. A model with far more weights than the batch has tokens must be able to learn it by heart. If the loss
# does not go to 0, something is broken, and no amount of data will repair it.

constant = TrainConfig(steps=80, lr=1e-2)
four = Batch(
    *[
        t[:4, :32]
        for t in (batch.idx, batch.targets, batch.positions, batch.documents)
    ]
)


def fresh(seed=1):
    torch.manual_seed(seed)
    return GPT2LMHeadModel(nano)


def overfit(model, optimizer, batch, steps=80):
    return [
        optimizer_step(model, optimizer, [batch], constant)[0]
        for _ in range(steps)
    ]


student = fresh()
assert sum(p.numel() for p in student.parameters()) > four.idx.numel()
by_heart = overfit(
    student, torch.optim.AdamW(student.parameters(), lr=1e-2), four
)
print(f"loss {by_heart[0]:.2f} -> {by_heart[-1]:.3f}")
assert by_heart[-1] < 0.1

# %%
# A broken run looks like this. The optimizer is built first; then weights are loaded with
# ``assign=True``, which *replaces* the parameters of the model. The optimizer still holds the old ones.
# Each step runs without an error, and the model never changes.

student = fresh()
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
student.load_state_dict(fresh(seed=1).state_dict(), assign=True)
stuck = overfit(student, optimizer, four, steps=20)
print(f"loss {stuck[0]:.2f} -> {stuck[-1]:.2f}")
assert stuck[-1] == stuck[0]

fig, (ax,) = figure(5.4, 2.8)
ax.plot(by_heart)
ax.plot(stuck, linestyle="--", color=COLOURS[3])
ax.text(
    22,
    stuck[-1],
    "optimizer holds other parameters",
    va="center",
    color=COLOURS[3],
)
ax.text(22, 0.4, "learns by heart", color=COLOURS[0])
ax.set(xlabel="step", ylabel="loss, nats", ylim=(0, 7.6))
ax.set_title("One batch, again and again")
plt.show()

# %%
# A big batch in small pieces
# ---------------------------
#
# A batch that does not fit into memory can be cut: add up the gradients of the pieces, then take one
# step. Each piece has to count *by its number of targets*. Pieces of unequal length make the difference
# visible: two long rows, then two short ones.

rows = [
    train_file.tokens[1 + 64 * i : 1 + 64 * i + n].tolist()
    for i, n in enumerate((60, 50, 6, 4))
]
whole = padded_batch(rows, tokenizer.eos_token_id)
pieces = [
    padded_batch(part, tokenizer.eos_token_id) for part in (rows[:2], rows[2:])
]


def big_step(parts):
    model = fresh()
    optimizer_step(
        model, torch.optim.AdamW(model.parameters(), lr=0.0), parts, constant
    )
    return gradient(model)


torch.testing.assert_close(
    big_step(pieces), big_step([whole]), rtol=1e-4, atol=1e-6
)

naive = fresh()
for piece in pieces:
    (loss_of(naive, piece) / len(pieces)).backward()  # the mean of the means
torch.nn.utils.clip_grad_norm_(naive.parameters(), constant.max_grad_norm)
error = (gradient(naive) - big_step([whole])).norm() / big_step([whole]).norm()
print(f"the mean of the means is wrong by {error:.0%} of the gradient")
assert error > 0.2

# %%
# **Check 3** is this equality: one big batch and its pieces give the same gradient. The mean of the means
# gives the few tokens of the short piece as much weight as the many of the long one. A widely used
# trainer had this mistake until 2024; see the sources.
#
# Stop and go on: the same bits
# -----------------------------
#
# Long runs get interrupted. A resumed run should not be *similar* to one that ran through: it should be
# the same. That holds if the data, the learning rate and the random numbers of a step depend on the
# number of the step alone, and the checkpoint holds the weights and both means of Adam (bug museum:
# G18). Dropout is on here, so that random numbers matter.

drop = dict(embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1)
small = replace(nano, block_size=16, n_layer=1, n_embd=16, **drop)
small_data = PackedBatches(train_file, batch_size=4, block_size=16)
six = TrainConfig(steps=6, lr=1e-2, warmup=2)


def new_small():
    torch.manual_seed(0)
    return GPT2LMHeadModel(small)


straight = new_small()
losses = [step.loss for step in train(straight, small_data, six)]

from lm_from_scratch.runs.saved import saved

run = saved(
    train(new_small(), small_data, six), work / "run"
)  # its model is lost ...
first = [next(run).loss for _ in range(3)]
run.close()  # ... but closing the generator wrote a checkpoint

resumed = GPT2LMHeadModel(small)  # other weights: the checkpoint replaces them
torch.manual_seed(12345)  # the caller's random numbers do not matter
second = [
    step.loss for step in saved(train(resumed, small_data, six), work / "run")
]

assert first + second == losses
for ours, theirs in zip(resumed.parameters(), straight.parameters()):
    assert torch.equal(ours, theirs)
print(
    f"{len(first)} + {len(second)} steps equal {len(losses)} steps in every bit"
)

# %%
# **Check 4** is ``torch.equal``, not "about the same". A tolerance could hide a forgotten moment, or a
# schedule that began again.
#
# The model that ships with this package
# --------------------------------------
#
# The package contains a GPT-2 of 8 layers that was trained in the same way on the language reference
# and on the docstrings of the standard library. Every step of that run is recorded.

from lm_from_scratch.checkpoint.folders import SHIPPED
from lm_from_scratch.checkpoint.weights import load_shipped

log = [
    json.loads(line)
    for line in (SHIPPED / "log.jsonl").read_text().splitlines()
]
points = [line for line in log if line["held_out_loss"] is not None]
record = json.loads((SHIPPED / "record.json").read_text())
shipped, shipped_tokenizer = load_shipped()
shipped_uniform = math.log(shipped.config.vocab_size)
assert shipped.config.n_layer == 8
assert [line["step"] for line in log] == list(range(1, len(log) + 1))
assert (
    abs(log[0]["loss"] - shipped_uniform) < 0.1
)  # check 1: the run began at log V

window = 20
smooth = np.convolve(
    [line["loss"] for line in log], np.ones(window) / window, mode="valid"
)
fig, (ax,) = figure(5.6, 3.8)
ax.plot(
    range(window, len(log) + 1),
    smooth,
    color=GREY,
    linewidth=1.0,
    label="batch",
)
steps = [line["step"] for line in points]
ax.plot(
    steps,
    [line["held_out_loss"] for line in points],
    "o-",
    markersize=3,
    label="held out",
)
for colour, name in zip(COLOURS[2:4], ("uniform", "unigram")):
    level = record["baselines"][name]["nats_per_token"]
    ax.axhline(level, linestyle="--", linewidth=1.2, color=colour, label=name)
ax.set(xlabel="step", ylabel="loss, nats per token")
ax.legend(frameon=False, loc="upper right", ncols=2)
ax.set_title("The recorded run of the shipped model")
plt.show()

begin = [shipped_tokenizer.eos_token_id, *shipped_tokenizer.encode("The")]
said = complete(generate(shipped, [begin], 50, Sampler(temperature=0.8)))[0]
print(textwrap.fill(ascii(shipped_tokenizer.decode(begin[1:] + said)), 72))

# %%
# Its vocabulary has 4096 tokens, so its loss per token cannot be compared with that of our nano model.
# Bits per byte can. We measure both models, now, on the held-out part of the reference, and put
# compressors beside them: a model that predicts a text well can compress it, to just its bits per byte. The
# compressor ``xz`` is measured twice. The second time it has read the training text first, as the models
# have.

import gzip
import lzma

shipped_files = {
    name: write_tokens(
        documents, shipped_tokenizer, work / f"shipped-{name}.bin"
    )
    for name, documents in [
        ("train", train_documents),
        ("held out", held_out_documents),
    ]
}
block = shipped.config.block_size
shipped_loss = evaluate(
    shipped, sequential_batches(shipped_files["held out"], 16, block)
)

text = "".join(document.text for document in held_out_documents).encode()
before = "".join(document.text for document in train_documents).encode()
assert len(text) == held_out_file.n_bytes
after = len(lzma.compress(before + text)) - len(lzma.compress(before))
bpb = {
    "unigram": bits_per_byte(levels["unigram"], held_out_file),
    "gzip": 8 * len(gzip.compress(text, 9)) / len(text),
    "xz": 8 * len(lzma.compress(text)) / len(text),
    "bigram": bits_per_byte(levels["bigram"], held_out_file),
    "xz + training": 8 * after / len(text),
    "nano model": bits_per_byte(final, held_out_file),
    "shipped model": bits_per_byte(shipped_loss, shipped_files["held out"]),
}
bpb = dict(sorted(bpb.items(), key=lambda item: item[1], reverse=True))

fig, (ax,) = figure(5.4, 3.2)
colours = [COLOURS[0] if "model" in name else GREY for name in bpb]
bars = ax.barh(list(bpb), list(bpb.values()), color=colours)
ax.bar_label(bars, fmt="%.2f", padding=3)
ax.invert_yaxis()
ax.grid(False, axis="y")
ax.set(
    xlabel="bits per byte of held-out text", xlim=(0, 1.15 * max(bpb.values()))
)
ax.set_title("Predicting and compressing on one scale")
plt.show()

recorded = record["held_out"]["reference"]["bits_per_byte"]
print(f"{bpb['shipped model']:.2f} measured now, {recorded:.2f} recorded")
assert abs(bpb["shipped model"] - recorded) < 0.15
assert bpb["shipped model"] < min(
    bpb["nano model"], bpb["bigram"], bpb["gzip"], bpb["xz"]
)
assert bpb["nano model"] < bpb["bigram"] < bpb["unigram"]
assert bpb["xz + training"] < bpb["nano model"]
assert bpb["xz + training"] < bpb["xz"]

# %%
# The figure goes from the worst to the best. The shipped model beats the nano model, the bigram, and both
# compressors that see only the text itself.
#
# The compressor ``xz + training`` is better than ``xz`` alone, and it is ahead of the nano model. It may look
# phrases up in the training text, while a model has only its weights.
#
# What the model knows by heart
# -----------------------------
#
# Both models do better on text that they were trained on. But texts differ in difficulty, so the unigram
# stands beside them as a control: it is too simple to know a text by heart, and its gap says how much of the
# difference comes from the frequency of the tokens.


def every(file, block, n):
    return list(sequential_batches(file, 16, block))[::n]


def unigram_loss(file, batches):
    counts = np.bincount(file.tokens) + 1.0
    log_p = torch.tensor(np.log(counts / counts.sum()))
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    return float(-log_p[targets[targets != IGNORE]].mean())


gaps = {}
for name, net, files in [
    ("nano", model, (train_file, held_out_file)),
    ("shipped", shipped, (shipped_files["train"], shipped_files["held out"])),
]:
    block = net.config.block_size
    sides = [
        (files[0], every(files[0], block, 20)),
        (files[1], every(files[1], block, 1)),
    ]
    known = bits_per_byte(evaluate(net, sides[0][1]), files[0])
    new = bpb[f"{name} model"]  # measured above
    easy, hard = (
        bits_per_byte(unigram_loss(files[0], b), file) for file, b in sides
    )
    gaps[name] = new - known
    print(
        f"{name:8} train {known:.2f}  held out {new:.2f} bits a byte", end="  "
    )
    print(f"gap {new - known:.2f}  unigram's gap {hard - easy:.2f}")
    assert new - known > max(hard - easy, 0.0)
assert gaps["shipped"] > gaps["nano"]
assert sum(p.numel() for p in shipped.parameters()) > sum(
    p.numel() for p in model.parameters()
)

paragraphs = {
    part.strip() for d in train_documents for part in d.text.split("\n\n")
}
for part in (
    part.strip() for d in held_out_documents for part in d.text.split("\n\n")
):
    assert len(part) < 40 or part not in paragraphs

# %%
# The gap of each model is larger than that of the unigram. The rest is not explained by the frequency of the
# tokens, and the likely cause is memory: the model knows a part of the training text by heart.
#
# The gap of the shipped model is larger than that of the nano model, which has fewer weights to remember
# with.
#
# The training loss alone would not have told. That is **check 5**: measure on text that the model has not
# seen, and whose paragraphs do not stand in the training text either.
#
# Bug museum
# ----------
#
# G7: the labels copy the padding
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# An earlier trainer padded each text to one length and used the ids themselves as targets, padding
# included. (Its mask was no help: it was made from the padded row, and was all ones, which is G6.) Here are sixteen short texts in rows of 64 tokens, with a padding token of their own.

pad = V
short = [document.text.split("\n")[0] for document in train_documents[:16]]
sequences = [
    [tokenizer.eos_token_id, *tokenizer.encode(text)][:64] for text in short
]
T = 64
right = padded_batch([*sequences, [pad] * T], pad)
right = Batch(right.idx[:-1], right.targets[:-1], right.positions[:-1])
real = int((right.targets != IGNORE).sum())

wrong_targets = torch.full_like(right.idx, IGNORE)
wrong_targets[:, :-1] = right.idx[
    :, 1:
]  # the bug: padding is a target like any other
wrong = Batch(right.idx, wrong_targets, right.positions)
share = 1 - real / int((wrong_targets != IGNORE).sum())
print(f"{share:.0%} of the targets are padding")
assert share > 0.7

outcome = {}
for name, shown in [("wrong", wrong), ("right", right)]:
    torch.manual_seed(0)
    pupil = GPT2LMHeadModel(replace(nano, vocab_size=V + 1))
    optimizer = torch.optim.AdamW(pupil.parameters(), lr=2e-3)
    reported = overfit(pupil, optimizer, shown, steps=15)[-1]
    with torch.no_grad():
        true = float(
            causal_lm_loss(
                pupil(right.idx, positions=right.positions), right.targets
            )
        )
    said = complete(
        generate(pupil, [sequences[0][:1]], 10, Sampler(temperature=0.0))
    )[0]
    outcome[name] = reported, true, said
    print(
        f"{name}: reported {reported:.2f}, on real tokens {true:.2f}, greedy {said}"
    )

# %%
# The wrong trainer reports a loss that looks like success. Real tokens cost more than twice as much, and more
# than they cost the model that was trained on real tokens alone. The greedy output is padding.
#
# The fixed line is ``next_token_targets(idx, positions)``: it sees in the positions where the padding is, and
# writes -100 there.

reported, true, said = outcome["wrong"]
assert true > 2 * reported
assert set(said) == {pad}
assert outcome["right"][1] < true - 0.5

values = {
    "wrong,\nreported": reported,
    "wrong,\nreal tokens": true,
    "right,\nreal tokens": outcome["right"][1],
}
fig, (ax,) = figure(5.4, 2.8)
ax.barh(
    list(values),
    list(values.values()),
    color=[COLOURS[1], COLOURS[3], COLOURS[0]],
)
ax.axvline(math.log(V + 1), color=COLOURS[7], linestyle=":", linewidth=1.2)
ax.text(math.log(V + 1) - 0.05, 0, "uniform", ha="right", va="center")
ax.invert_yaxis()
ax.grid(False, axis="y")
ax.set(xlabel="loss, nats per token")
ax.set_title("G7: padding as a target hides the real loss")
plt.show()

# %%
# G19: a cosine of another length
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The same trainer used ``CosineAnnealingLR`` with ``T_max=1000``, whatever the length of the run. Its
# demo had 30 steps, in which the learning rate hardly moved. In a run of 2000 steps it falls to 0 in the
# middle and climbs up again.


def old_schedule(steps):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=5e-5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=1000
    )
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


old = old_schedule(2000)
print(f"after 30 steps: {1 - old[29] / 5e-5:.2%} lower")
print(f"after 1000 and 2000 steps: {old[999]:.1e} and {old[1999]:.1e}")
assert 0.002 < 1 - old[29] / 5e-5 < 0.0025
assert abs(old[999]) < 1e-9 and math.isclose(old[1999], 5e-5, rel_tol=1e-6)

fixed = TrainConfig(steps=2000, lr=5e-5, warmup=100)
new_rates = [learning_rate(step, fixed) for step in range(1, 2001)]
assert new_rates[-1] == 0.0 and new_rates[99:] == sorted(
    new_rates[99:], reverse=True
)

fig, (ax,) = figure(5.4, 2.8)
ax.plot(range(1, 2001), old, color=COLOURS[3], linestyle="--")
ax.plot(range(1, 2001), new_rates, color=COLOURS[0])
ax.text(1650, 4.2e-5, "T_max=1000", color=COLOURS[3], ha="right")
ax.text(700, 4.2e-5, "steps=2000", color=COLOURS[0])
ax.set(xlabel="step", ylabel="learning rate")
ax.set_title("G19: the schedule does not know the run")
plt.show()

# %%
# The fixed line is the schedule of the package. It takes its length from the configuration of the run,
# so a schedule of another length cannot be written down.
#
# Exercises
# ---------
#
# 1. *Easy.* Print the held-out loss of the nano model in all four units. Two tokenizers give two models
#    the same perplexity: what else do you need to know before you call them equally good? Hint: the
#    length of the text in bytes is the same for both.
# 2. *Easy.* Train the nano model with ``lr=3e-2``. Between which two baselines does it end? Hint:
#    ``replace(config, lr=3e-2)``, and a fresh model.
# 3. *Medium.* Write a trigram that mixes the bigram in. Does it beat the nano model? If it does, what does
#    the model still have ahead of it? Hint: count with a ``Counter``, and choose both constants on the
#    held-out text.
# 4. *Hard.* Break the resumption: set the first moment of Adam to 0 in a checkpoint, and resume. Can you
#    see it in the loss, and can ``torch.equal``? Hint: ``optimizer.safetensors`` holds names like
#    ``exp_avg/transformer.wte.weight``; load, change, save.
#
# Summary
# -------
#
# * The loss is the mean surprise. A fresh model scores :math:`\log V` (check 1).
# * The gradient at the logits is prediction minus truth. In the first step AdamW moves every weight by the
#   learning rate, whatever the size of its gradient.
# * A model must be able to learn one batch by heart: the loss went below 0.1 nats (check 2).
# * Pieces of a batch count by their targets (check 3). A resumed run is equal in every bit (check 4).
# * The nano model learnt frequencies first and context second, and ended below every bigram we tried. On the
#   training text both models do better than on held-out text (check 5).
#
# The next page lets a trained model speak.
#
# Sources
# -------
#
# * Loshchilov, Hutter: `Decoupled Weight Decay Regularization <https://arxiv.org/abs/1711.05101>`_, 2019. AdamW.
# * Loshchilov, Hutter: `SGDR <https://arxiv.org/abs/1608.03983>`_, 2017. The cosine schedule.
# * Radford et al.: `Language Models are Unsupervised Multitask Learners <https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf>`_, 2019. GPT-2.
# * Hugging Face: `Fixing Gradient Accumulation <https://huggingface.co/blog/gradient_accumulation>`_, 2024. The mean of the means in a widely used trainer.
# * Delétang et al.: `Language Modeling Is Compression <https://arxiv.org/abs/2309.10668>`_, 2023.
# * Karpathy: `A Recipe for Training Neural Networks <https://karpathy.github.io/2019/04/25/recipe/>`_, 2019. The loss at the start, and overfitting one batch.

import platform

import lm_from_scratch

folder.cleanup()
print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
