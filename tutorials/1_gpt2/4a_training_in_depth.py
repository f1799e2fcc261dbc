r"""
Training in depth: is the loop right?
=====================================

Training code that is wrong seldom crashes. It prints a falling number and produces a bad model. This
page deepens the lesson on `training <4_training.ipynb>`_: it checks each part of the package's training
loop by itself, with four checks that you can run on a loop of your own. What a learning curve says about the
model is on `another page <4b_learning_curves_in_depth.ipynb>`_.

The loss before the first step
------------------------------

A fresh GPT-2 has small weights, so its logits are close to 0, each token gets about the probability
:math:`1/V`, and the loss is :math:`\log V`.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_museum = ["G6", "G18", "G23"]
# sphinx_gallery_words = ["gradient accumulation", "clip_grad_norm_", "loss spikes", "ignore_index", "-100", "bits per byte", "resume training", "checkpoint", "random seed", "cosine schedule", "overfit one batch", "debug a training loop", "training loop from scratch", "my training does not work"]

import inspect
import math
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.runs.config import TrainConfig
from lm_from_scratch.text.batch import Batch, padded_batch
from lm_from_scratch.text.batches import PackedBatches, write_tokens
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
# that the model is sure of things that it cannot know yet. Weights that start five times too large
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
# Targets where nothing follows
# -----------------------------
#
# Where no token follows there is no target, and the number -100 says so. Two sequences of unequal length, padded on the right:

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
# The shift happens here, once. The model does not shift and the loss does not shift: a
# shift in two places teaches a model to predict the token after the next one.
#
# The rows of a token file are full, as `tokens in depth <1a_tokens_in_depth.ipynb>`_ shows:
# ``<|endoftext|>`` is the last target of one document and the first input of the next.
#
# The gradient is the prediction minus the truth
# ----------------------------------------------
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
# Add up the pull of all tokens. The sum is the mean prediction minus the
# frequency of each token in the batch. A fresh model predicts about :math:`1/V` everywhere, so
# the first thing it learns is *which tokens are frequent*, whatever comes before them. The page on
# `learning curves <4b_learning_curves_in_depth.ipynb>`_ shows that it does.

frequency = F.one_hot(batch.targets, V).float().mean((0, 1))
pull = logits.grad.sum((0, 1))
torch.testing.assert_close(
    pull, p.mean((0, 1)) - frequency, rtol=1e-4, atol=1e-7
)
torch.testing.assert_close(
    p.mean((0, 1)), torch.full((V,), 1 / V), rtol=0.5, atol=0.0
)

# %%
# Which weights decay
# -------------------
#
# `Chapter 7 <../7_optimizers/1_adamw.ipynb>`_ takes AdamW apart. Its *weight decay* takes a small share of itself from each
# weight in each step. (What happens if all of them decay: bug museum, G23.)
#
# The trainer makes two groups of parameters. Matrices decay. Biases and the weights of the norms do
# not: they are few, and a norm whose scale is pulled towards 0 switches its features off.

from lm_from_scratch.optim.choose import parameter_groups

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
# The loop of the package
# -----------------------
#
# Here is everything that happens in one step. The trainer calls it with the batches of the step, each
# of which is weighted by its number of targets. Docstrings are left out.
#
# (``processes`` are those that share the rows of a batch; here there is one. ``objective`` is the model followed by its loss.)

from lm_from_scratch.training.train import accumulate_gradient, optimizer_step

for function in (accumulate_gradient, optimizer_step):
    source = inspect.getsource(function)
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
# Overfit one batch first
# -----------------------
#
# **Check 2** is quick, and it belongs before every long run: train on a single small batch, again
# and again. A model with far more weights than the batch has tokens must be able to learn it by heart. If the loss
# does not go to 0, something is broken, and no amount of data will repair it.

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
    return [optimizer_step(model, optimizer, [batch])[0] for _ in range(steps)]


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
    optimizer_step(model, torch.optim.AdamW(model.parameters(), lr=0.0), parts)
    return gradient(model)


torch.testing.assert_close(
    big_step(pieces), big_step([whole]), rtol=1e-4, atol=1e-6
)

naive = fresh()
for piece in pieces:
    (loss_of(naive, piece) / len(pieces)).backward()  # the mean of the means
torch.nn.utils.clip_grad_norm_(naive.parameters(), 1.0)
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
# Long runs get interrupted. A resumed run should be the same as one that ran through, not similar. That holds if the data, the learning rate and the random numbers of a step depend on the
# number of the step alone, and the checkpoint holds the weights and both means of Adam (bug museum:
# G18). Dropout is on here, so that random numbers matter.

drop = dict(embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1)
small = replace(nano, block_size=16, n_layer=1, n_embd=16, **drop)
small_data = PackedBatches(train_file, batch_size=4, block_size=16)
six = TrainConfig(steps=6, lr=1e-2, warmup=2)


def new_small():
    torch.manual_seed(0)
    return GPT2LMHeadModel(small)


from lm_from_scratch.runs.checkpoints import with_checkpoints
from lm_from_scratch.runs.config import train

straight = new_small()
losses = [step.loss for step in train(straight, small_data, six)]


run = with_checkpoints(
    train(new_small(), small_data, six), work / "run"
)  # its model is lost ...
first = [next(run).loss for _ in range(3)]
run.close()  # ... but closing the generator wrote a checkpoint

resumed = GPT2LMHeadModel(small)  # other weights: the checkpoint replaces them
torch.manual_seed(12345)  # the caller's random numbers do not matter
second = [
    step.loss
    for step in with_checkpoints(train(resumed, small_data, six), work / "run")
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
# Bug museum
# ----------
#
# The labels copy the padding
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# An earlier trainer padded each text to one length and used the ids themselves as targets, padding
# included. (Its mask was no help: it was made from the padded row, and was all ones, which is G6.) Here are sixteen short texts in rows of 64 tokens, with a padding token of their own.
# (G7)

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

# %%
# A cosine of another length
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The same trainer used ``CosineAnnealingLR`` with ``T_max=1000``, whatever the length of the run. Its
# demo had 30 steps, in which the learning rate hardly moved. In a run of 2000 steps it falls to 0 in the
# middle and climbs up again. (G19)


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

from lm_from_scratch.training.train import learning_rate

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
# 1. *Medium.* Write the loop of the lesson with accumulation: two pieces of four rows for one step of eight. A good
#    answer has the gradient of the whole batch, also if the rows of one piece are cut to 8 tokens.
# 2. *Hard.* Break the resumption: set the first moment of Adam to 0 in a checkpoint, and resume. Can you
#    see it in the loss, and can ``torch.equal``? Hint: ``optimizer.safetensors`` holds names like
#    ``exp_avg/transformer.wte.weight``; load, change, save.
#
# Summary
# -------
#
# * A fresh model scores :math:`\log V` (check 1).
# * The gradient at the logits is prediction minus truth, so a model learns first which tokens are frequent.
# * A model must be able to learn one batch by heart: the loss went below 0.1 nats (check 2).
# * Pieces of a batch count by their targets (check 3). A resumed run is equal in every bit (check 4).
# * The fifth check needs text that the model has not seen. It is on the page on
#   `curves <4b_learning_curves_in_depth.ipynb>`_.
#
# Sources
# -------
#
# * Loshchilov, Hutter: `SGDR <https://arxiv.org/abs/1608.03983>`_, 2017. The cosine schedule.
# * Hugging Face: `Fixing Gradient Accumulation <https://huggingface.co/blog/gradient_accumulation>`_, 2024. The mean of the means in a widely used trainer.
# * Karpathy: `A Recipe for Training Neural Networks <https://karpathy.github.io/2019/04/25/recipe/>`_, 2019. The loss at the start, and overfitting one batch.

import platform

import lm_from_scratch

folder.cleanup()
print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
