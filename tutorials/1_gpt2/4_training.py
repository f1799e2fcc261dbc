r"""
Training: from noise to words
=============================

Two models of one size, 2.1 million numbers each, continue "If the object". In the first model the numbers are random. The
second was trained: it guessed the next tokens of a text, saw the right ones, and changed its numbers a little, 2,650 times.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["1_tokens", "2_gpt2"]
# sphinx_gallery_words = ["cross_entropy", "loss curve", "loss plateau", "perplexity", "initial loss", "overfitting", "validation loss", "learning rate", "warmup", "gradient clipping", "train from scratch", "optimizer.step", "gradient descent", "how does a model learn", "how are language models trained", "train a small GPT on a laptop", "what is a loss", "next token prediction", "pretraining", "training loop", "cross-entropy explained", "how long to train", "learning rate schedule", "what is a gradient", "why does the loss go down", "clip gradients", "where do the weights come from", "who sets the weights", "what is an epoch", "backpropagation", "backprop", "one training step", "training step", "forward and backward", "random weights", "random initialisation", "warm-up", "what does a loss of 3 mean", "good perplexity", "when to stop training", "number of steps", "Adam", "learn from data", "self-supervised learning", "no labels", "machine learning", "train a language model", "train a transformer", "pretrain", "loss function", "why does a model learn", "zero_grad", "optimizer.zero_grad", "loss.backward", "why zero the gradients", "model.train", "order of the examples", "shuffle", "training takes forever", "how long does training take", "training too slow", "why random weights", "train in the browser", "watch a model learn"]
import json
import math
import textwrap

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from lm_from_scratch.checkpoint.folders import SHIPPED
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.generation.text import generate_text
from lm_from_scratch.instruments.plot import COLOURS, GREY, curves, figure
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel

start = "If the object"
trained, tokenizer = load_shipped("gpt2-docs")
torch.manual_seed(0)
fresh = GPT2LMHeadModel(trained.config)

texts = []
for model in (fresh, trained):
    said = generate_text(model, tokenizer, start, 30, Sampler(temperature=0.8))
    texts.append(start + "".join(said).encode("ascii", "replace").decode())
log = (SHIPPED / "log.jsonl").read_text().splitlines()
recorded = [json.loads(line)["loss"] for line in log]  # of each step

for text in texts:
    print(textwrap.fill(text), "\n---")
fig, (ax,) = figure(4.8, 2.6)
ax.plot(range(1, len(recorded) + 1), recorded, linewidth=0.8)
ax.text(120, recorded[0], f"{texts[0][:30]}...", va="center")
ax.text(2650, 4.4, f"{texts[1][:30]}...", ha="right")
ax.set(xlabel="step", ylabel="loss", title="2,650 steps: the loss falls")
plt.show()
assert len(recorded) == 2650 and recorded[0] > 8 and recorded[-1] < 3.5
assert abs(sum(w.numel() for w in trained.parameters()) / 1e6 - 2.1) < 0.05

# %%
# The *loss* says how badly a model guesses. This run took under an hour on one core.
#
# .. live:: train
#
# We take it apart, then do another.
#
# The target of a token is the token to its right
# -----------------------------------------------
#
# The text is Python's language reference. One row of it is many small exercises: from each token, and those before it, guess
# the next one.

from lm_from_scratch.drawings import gpt2 as drawings

pieces = tokenizer.pieces(tokenizer.encode("If the object does not have an"))
drawings.shifted(pieces[:-1], pieces[-1])

# %%
# A *batch* is a number of rows that are computed together. This one has B rows of T = 64 tokens, cut out of the text at
# random places. A few documents are *held out*: no model trains on them; they are for tests.

from lm_from_scratch.text.corpora import load_corpus, split


def as_stream(documents, tokenizer):
    texts = [tokenizer.start(document.text) for document in documents]
    return torch.tensor([i for ids in texts for i in ids])


def batch(stream, B=8, T=64):
    starts = torch.randint(len(stream) - T, (B,))
    rows = torch.stack([stream[i : i + T + 1] for i in starts])  # (B, T + 1)
    return rows[:, :-1], rows[:, 1:]  # tokens, and the one after each


documents, held_out_documents = split(load_corpus("reference"))
stream = as_stream(documents, tokenizer)

# %%
# Shift by one, and only *once*. Here ``batch`` does it; many programs do it in the loss instead, as in the bug hunt
# below. Code that does both teaches the model to predict the token *after* the next one. The loss still falls, so the
# mistake is hard to see.
#
# The loss is surprise
# --------------------
#
# The model gives every possible next token a probability. When the right token comes, its surprise is
#
# .. math::
#
#    -\log p(\text{the right token})
#
# That is 0 for a token that was certain, 0.7 for one chance in two, and 6.9 for one in a thousand. (log is the natural
# logarithm.) Here the trained model reads a sentence. The dashed line is a *uniform guess*: all tokens equally likely.

ids = torch.tensor([tokenizer.start("Return the number of items in the list.")])
with torch.no_grad():
    logits = trained(ids)[0, :-1]  # (T, V): a score for every next token
surprise = F.cross_entropy(logits, ids[0, 1:], reduction="none")  # (T,)

words = tokenizer.pieces(ids[0, 1:].tolist())
fig, (ax,) = figure(4.8, 3.0)
ax.barh([f"{i} {word}" for i, word in enumerate(words)], surprise.tolist())
ax.set_yticks(range(len(words)), [word.replace(" ", "␣") for word in words])
ax.invert_yaxis()
ax.grid(False, axis="y")
ax.axvline(math.log(4096), color=GREY, linestyle="--")
ax.text(math.log(4096) - 0.1, 7.5, "a uniform guess", ha="right", color=GREY)
ax.set(xlabel="surprise", title="How much each token surprises the model")
plt.show()
for chances, value in ((1, 0.0), (2, 0.7), (1000, 6.9)):
    assert abs(math.log(chances) - value) < 0.05

# %%
# *Return* lies beyond the dashed line: the model had expected another beginning. The *loss*, also called
# *cross-entropy*, is the mean surprise over all tokens of the batch.


def loss_of(model, idx, targets):
    logits = model(idx)  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# %%
# **Predict first.** The curve above begins near 8.3, and our vocabulary has 4,096 tokens. The vocabulary of OpenAI's GPT-2 has
# 50,257. Where does the loss of a new GPT-2 begin?
#
# * near 8.3 too
# * near 10.8
# * near 100, because the vocabulary is 12 times as large

print(f"recorded {recorded[0]:.1f}, log V {math.log(4096):.1f}")
print(f"GPT-2: log V {math.log(50257):.1f}")

assert abs(recorded[0] - math.log(4096)) < 0.1
assert round(math.log(4096), 1) == 8.3 and round(math.log(50257), 1) == 10.8

# %%
# Near 10.8. A new model finds all :math:`V` tokens about equally likely, so each has the probability :math:`1/V`, and the
# surprise is :math:`\log V`: 8.3 for 4,096 tokens, 10.8 for 50,257.
#
# Check this first in your own runs: a loss that starts much higher often means that the random numbers are too large.
#
# Downhill, one step at a time
# ----------------------------
#
# A model finds its numbers as a `line finds its points <../0_from_zero/2_line_and_bend.ipynb>`_. Take one *weight*, one
# of the 2.1 million numbers, and move it away from its place: the loss rises. The *gradient* says how much it would grow
# if the weight grew a little, so a step the other way leads back. (The weights of attention are something else: they
# are computed anew for each text.)

rows = stream[: 2 * 65].view(2, 65)
bias = trained.transformer.ln_f.bias  # 128 weights; we move one


def height(place):
    bias.data[46] = place
    return loss_of(trained, rows[:, :-1], rows[:, 1:])


place, path = 6.0, []
for _ in range(9):
    loss = height(place)
    path.append((place, loss.item()))
    (gradient,) = torch.autograd.grad(loss, bias)  # the slope for each weight
    place -= 40 * gradient[46].item()  # downhill; 40 found by trying
heights = [loss for _, loss in path]

hill = {x / 2: height(x / 2).item() for x in range(-6, 15)}
_, (ax,) = figure(4.8, 3.0)
ax.plot(list(hill), list(hill.values()), color=GREY)
ax.plot(*zip(*path), "o-", color=COLOURS[3], linewidth=0.8)
ax.set(xlabel="the weight", ylabel="loss", title="Eight steps downhill")
plt.show()
assert heights == sorted(heights, reverse=True)
assert heights[0] - heights[-1] > 0.95 * (heights[0] - min(hill.values()))

# %%
# The grey line is the loss for each value of the weight. Where it is steep the steps are long, and near the bottom they get
# short by themselves. This is *gradient descent*. Training takes such a step for all weights at once.
#
# ``backward`` computes `all slopes in one go <../0_from_zero/1_autograd.ipynb>`_. *AdamW* turns
# them into steps. Unlike those of the picture, they do not shrink near the bottom: each weight moves by about ``lr``, the
# *learning rate*, whatever its slope. `Chapter 7 <../7_optimizers/1_adamw.ipynb>`_ takes AdamW apart.


def train(model, stream, steps, lr=0.004):
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), fused=True
    )
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = lr * min(1, step / 20)  # warm-up
        loss = loss_of(model, *batch(stream))
        optimizer.zero_grad()  # forget the last gradient
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # clipping
        optimizer.step()
        yield step, loss.item()


# %%
# * *Warm-up* raises the learning rate over the first 20 steps, because AdamW trusts its first few gradients too much.
# * *Clipping* shortens the vector of all gradients to length 1 if it is longer. AdamW's steps are about ``lr`` in any case,
#   but its running means remember one strange batch for many steps.
#
# Now a model of your own. To train in seconds, it has two blocks, vectors of 64 numbers, and 1,024 tokens.

from lm_from_scratch.text.tokenizer import Tokenizer

small = Tokenizer.train([d.text for d in documents], vocab_size=1024)
stream = as_stream(documents, small)
held_out = as_stream(held_out_documents, small)
sizes = dict(vocab_size=1024, block_size=64, n_layer=2, n_head=4, n_embd=64)
fixed = dict(initializer_range=0.04, bos_token_id=0, eos_token_id=0)
no_dropout = dict(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
config = GPT2Config(**sizes, **fixed, **no_dropout)

# %%
# Every ten steps, we test on held-out text. Here is what 200 steps do:


def new_run(stream, steps, **options):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    rows = held_out[: 8 * 65].view(8, 65)
    losses, tests = {}, {}
    for step, loss in train(model, stream, steps, **options):
        losses[step] = loss
        if step % 10 == 0:
            with torch.no_grad():
                test = loss_of(model, rows[:, :-1], rows[:, 1:])
            tests[step] = test.item()
    return model, losses, tests


ours, losses, tests = new_run(stream, 200)
said = generate_text(ours, small, start, 30, Sampler(temperature=0.8))
text = start + "".join(said).encode("ascii", "replace").decode()
print(textwrap.fill(text))


def draw(losses, tests, title):
    drawn = curves(
        {
            "training": (list(losses), list(losses.values())),
            "held out": (list(tests), list(tests.values())),
        },
        "step",
        "loss",
    )
    drawn.axes[0].set_title(title)
    plt.show()


draw(losses, tests, "Our run: 200 steps")
assert tests[200] + 0.3 < tests[100] < tests[30]
assert abs(losses[1] - math.log(1024)) < 0.2
assert small.eos_token_id == 0 and small.vocab_size == 1024

# %%
# Not all of these are words, but some are phrases already. The curve begins near log 1,024 = 6.9.
#
# Learned, or learned by heart?
# -----------------------------
#
# A pupil who has seen the answers gets full marks. So we test on new text.
#
# **Predict first.** A new model gets only the first 2,000 tokens, a small part of the text, again and again. What
# does its *held-out* loss do?
#
# * It falls as before, only more slowly.
# * It falls, then stays where it is.
# * It falls, then rises.

_, parrot, parrot_tests = new_run(stream[:2000], 80)

draw(parrot, parrot_tests, "Too little text: the held-out loss turns up")
assert parrot[80] < 3.5 and len(stream) > 45 * 2000
assert min(parrot_tests.values()) + 0.3 < parrot_tests[80]

# %%
# It falls, then rises. The training loss keeps falling, because the model learns the 2,000 tokens by heart and becomes sure
# of itself. On new text it is wrong. This is *overfitting*.
#
# Keep the weights from the lowest point of the held-out curve. More text helps most. After that: a smaller model, fewer
# steps, *dropout* (in training, a random tenth of the numbers inside the model is set to 0), or a trained model to
# begin with. The lesson on `your own text <7_own_text.ipynb>`_ comes back to them.
#
# Choose the learning rate, then the batch size
# ---------------------------------------------
#
# The learning rate matters most. We train with the rates 0.0001 and 0.1 as well as our 0.004. After 50 steps, the larger two
# have nearly the same loss.
#
# **Predict first.** Which has the lowest loss after 100 steps?
#
# * 0.1: it takes the largest steps
# * 0.004
# * 0.004 and 0.1 are still equal: clipping makes their steps alike

runs = {0.004: losses}
for lr in (0.0001, 0.1):
    _, runs[lr], _ = new_run(stream, 100, lr=lr)

at = {
    (lr, n): sum(list(run.values())[n - 10 : n]) / 10
    for lr, run in runs.items()
    for n in (50, 100)
}
fig, (ax,) = figure(4.8, 3.2)
for (lr, run), dashes in zip(runs.items(), ("-", "--", "-.")):
    ax.plot(range(1, 101), list(run.values())[:100], dashes, label=f"lr = {lr}")
ax.set(xlabel="step", ylabel="loss", title="Three learning rates")
ax.legend(frameon=False)
plt.show()
for lr in runs:
    print(
        f"lr {lr}: {at[lr, 50]:.1f} at step 50, {at[lr, 100]:.1f} at step 100"
    )
assert abs(at[0.1, 50] - at[0.004, 50]) < 0.25
assert at[0.004, 100] + 0.25 < at[0.1, 100] < at[0.0001, 100] < 6.9
assert at[0.1, 100] > at[0.1, 50] - 0.15
assert all(
    (w.abs() < 0.1).float().mean() > 0.95
    for name, w in GPT2LMHeadModel(config).named_parameters()
    if "ln_" not in name
)
# exercise 3: the loss of a model that knows only how frequent each token is
assert (
    abs(
        torch.distributions.Categorical(torch.bincount(stream) / len(stream))
        .entropy()
        .item()
        - at[0.1, 100]
    )
    < 0.4
)

# %%
# 0.004. The rate 0.1 is stuck: a step of AdamW is about as large as the learning rate, clipped or not. Most weights are
# below 0.1, so such steps overwrite them. The rate 0.0001 is safe and slow.
#
# Begin with a rate that worked for a model of your size, try three times more and three times less, and keep the best.
#
# A larger batch gives a less noisy gradient and slower steps. If it does not fit into
# memory, add up the gradients of several small ones, weighted by token count. Until 2024 the trainer of
# ``transformers`` `did not weight them <https://huggingface.co/blog/gradient_accumulation>`_, and got `another gradient
# <4a_training_in_depth.ipynb>`_ than the large batch gives.
#
# Exercises
# ---------
#
# 1. Train the small model on the first 20,000 tokens instead of 2,000. Does the held-out curve still turn up within
#    80 steps? A good answer says why not.
# 2. Shift twice: in ``loss_of``, drop the last logit of each row and the first target. Train 100 steps, then let
#    the model continue "If the object". A good answer explains what the words have to do with each other.
# 3. Count how often each token occurs in ``stream`` (``torch.bincount``). What is the loss of a model that knows only
#    these shares? A good answer is near that of the rate 0.1, and says what that model learned.
#
# Summary
# -------
#
# * The target of a token is the next one; the loss is the mean surprise, and it begins at :math:`\log V`.
# * Each step moves all weights a little downhill. Compare several learning rates over a few hundred steps.
# * Watch the held-out loss: where it turns up, the model has begun to learn by heart.
