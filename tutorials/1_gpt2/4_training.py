r"""
Training: from noise to words
=============================

A new language model is a box of random numbers. How does it learn to write? It guesses the next token
of a text, sees the right one, and changes its numbers a little, again and again.

We train a small GPT-2 on Python's language reference, which is already on your disk. It has a
vocabulary of 2,048 tokens.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["1_tokens", "2_gpt2"]
# sphinx_gallery_words = ["cross_entropy", "loss curve", "loss plateau", "perplexity", "initial loss", "overfitting", "validation loss", "learning rate", "warmup", "gradient clipping", "train from scratch", "optimizer.step"]
import math

import torch
import torch.nn.functional as F

from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.generation.text import generate_text
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.text.corpora import load_corpus, split
from lm_from_scratch.text.tokenizer import Tokenizer

documents, held_out_documents = split(load_corpus("reference"))
tokenizer = Tokenizer.train([d.text for d in documents], vocab_size=2048)

# %%
# The model has two blocks, and its vectors have 64 numbers. Before it has read anything, it continues "The" like this:

sizes = dict(block_size=64, n_layer=2, n_head=4, n_embd=64)
fixed = dict(initializer_range=0.04, bos_token_id=0, eos_token_id=0)
dropout = dict(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
config = GPT2Config(vocab_size=2048, **sizes, **fixed, **dropout)
torch.manual_seed(0)
model = GPT2LMHeadModel(config)


def say(model, prompt):
    sampler = Sampler(temperature=0.8)
    pieces = generate_text(model, tokenizer, prompt, 50, sampler)
    print(
        prompt, *(p.encode("ascii", "replace").decode() for p in pieces), sep=""
    )


say(model, "The")
assert tokenizer.eos_token_id == 0 and tokenizer.vocab_size == 2048

# %%
# This is the code that changes the model. The rest of the page explains it.


def batch(stream, B=16, T=64):
    starts = torch.randint(len(stream) - T, (B,))
    rows = torch.stack([stream[i : i + T + 1] for i in starts])  # (B, T + 1)
    return rows[:, :-1], rows[:, 1:]  # tokens, and the one after each


def loss_of(model, idx, targets):
    logits = model(idx)  # (B, T, V): a score for every possible next token
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(model, stream, steps, lr=0.004, B=16):
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = lr * min(1, step / 20)
        loss = loss_of(model, *batch(stream, B))
        optimizer.zero_grad()  # forget the last gradient
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield step, loss.item()


# %%
# We run 250 steps. Every 25 steps the model is tested on *held-out* text, which it never trains on. The *loss* says how
# badly it guesses.


def as_stream(documents, tokenizer):
    # token 0 comes before each text
    texts = [[0, *tokenizer.encode(d.text)] for d in documents]
    return torch.tensor([i for ids in texts for i in ids])


@torch.no_grad()
def test(model):
    rows = held_out[: 64 * 65].view(64, 65)
    return loss_of(model, rows[:, :-1], rows[:, 1:]).item()


stream = as_stream(documents, tokenizer)
held_out = as_stream(held_out_documents, tokenizer)
losses, tests = {}, {0: test(model)}
for step, loss in train(model, stream, 250):
    losses[step] = loss
    if step % 25 == 0:
        tests[step] = test(model)
say(model, "The")

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import GREY, curves, figure

drawn = curves(
    {
        "training": (list(losses), list(losses.values())),
        "held out": (list(tests), list(tests.values())),
    },
    "step",
    "loss",
)
drawn.axes[0].set_title("250 steps: the loss falls")
plt.show()
assert tests[250] < tests[100] < tests[25] < tests[0]

# %%
# These are words, in places even phrases. (The held-out curve is higher: that text is new to the model, and
# it is harder, too.) Now for the code, part by part.
#
# The target of a token is the token to its right
# -----------------------------------------------
#
# A *batch* is a number of rows that are computed together. ``batch`` cuts B = 16 rows of T = 64 tokens out of the text,
# at random places. One row is 64 small exercises: from each token, and those before it, guess the next one.

from lm_from_scratch.drawings import gpt2 as drawings

pieces = tokenizer.pieces(tokenizer.encode("If the object does not have an"))
drawings.shifted(pieces[:-1], pieces[-1])

# %%
# The shift by one happens here and nowhere else. Code that shifts again inside the model teaches it to predict the
# token *after* the next one. The loss still falls, so the mistake is hard to see.
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
# logarithm.) Here the trained model of this package reads a sentence. Long bars are tokens that it did not
# expect. The dashed line is a *uniform guess*: all tokens equally likely.

from lm_from_scratch.checkpoint.weights import load_shipped

shipped, its_tokenizer = load_shipped("gpt2-docs")
ids = torch.tensor(
    [its_tokenizer.start("Return the number of items in the list.")]
)
with torch.no_grad():
    logits = shipped(ids)[0, :-1]  # (T, V)
surprise = F.cross_entropy(logits, ids[0, 1:], reduction="none")  # (T,)

words = its_tokenizer.pieces(ids[0, 1:].tolist())
fig, (ax,) = figure(4.8, 3.0)
ax.barh([f"{i} {word}" for i, word in enumerate(words)], surprise.tolist())
ax.set_yticks(range(len(words)), words)
ax.invert_yaxis()
ax.grid(False, axis="y")
ax.axvline(math.log(4096), color=GREY, linestyle="--")
ax.text(math.log(4096) - 0.1, 7.5, "a uniform guess", ha="right", color=GREY)
ax.set(xlabel="surprise", title="How much each token surprises the model")
plt.show()
for chances, value in ((1, 0.0), (2, 0.7), (1000, 6.9)):
    assert abs(math.log(chances) - value) < 0.05

# %%
# The *loss*, also called *cross-entropy*, is the mean surprise over all tokens of the batch.
#
# **Predict first.** Our curve begins near 7.6, with 2,048 tokens in the vocabulary. GPT-2 has 50,257.
# Where does its loss begin?
#
# * near 7.6 too
# * near 10.8
# * near 190, because the vocabulary is 25 times as large

round(math.log(2048), 1), round(losses[1], 1), round(math.log(50257), 1)

# %%
# A fresh model finds all :math:`V` tokens about equally likely. Each has the probability :math:`1/V`, so the
# surprise is :math:`\log V`: the first and the last number above. Check this first: a loss that starts much higher
# often means that the model's random numbers are too large.

assert abs(losses[1] - math.log(2048)) < 0.3
assert round(math.log(2048), 1) == 7.6 and round(math.log(50257), 1) == 10.8

# %%
# One step
# --------
#
# The rest of the loop makes the loss smaller:
#
# * ``loss.backward()`` computes the *gradient*: how much the loss would grow if a *weight*, one of the model's numbers,
#   grew a little. (The weights of attention are something else: they are computed anew for each text.)
# * *AdamW* moves each weight the other way, by about the *learning rate* ``lr``. `Chapter 7
#   <../7_optimizers/1_adamw.ipynb>`_ takes it apart.
# * *Warm-up* raises the learning rate over the first 20 steps, because AdamW trusts its first few gradients too
#   much.
# * *Clipping* takes all gradients together as one long vector, and shortens it to length 1 if it is longer. So one
#   strange batch cannot undo the work of a hundred others.
#
# Learned, or learned by heart?
# -----------------------------
#
# A pupil who has seen the answers gets full marks. So we test on text that the model has not seen.
#
# **Predict first.** A new model gets only the first 3,000 tokens, a small part of the text, again and again. What
# does its *held-out* loss do?
#
# * It falls as before, only more slowly.
# * It falls, then stays where it is.
# * It falls, then rises.

torch.manual_seed(0)
parrot = GPT2LMHeadModel(config)
losses, tests = {}, {0: test(parrot)}
for step, loss in train(parrot, stream[:3000], 140, B=8):
    losses[step] = loss
    if step % 10 == 0:
        tests[step] = test(parrot)

drawn = curves(
    {
        "training": (list(losses), list(losses.values())),
        "held out": (list(tests), list(tests.values())),
    },
    "step",
    "loss",
)
drawn.axes[0].set_title("Too little text: the held-out loss turns up")
plt.show()
assert losses[140] < 3 < min(tests.values()) + 0.5 < tests[140]
assert len(stream) > 30 * 3000 and tests[140] > math.log(2048)

# %%
# The training loss keeps falling. But the model learns the 3,000 tokens by heart and becomes sure of itself. On new
# text it is sure and wrong: it ends up worse than a uniform guess. This is *overfitting*.
#
# Keep the weights from the lowest point of the held-out curve. More text helps most. After that: a smaller model,
# fewer steps, *dropout* (in training, a tenth or a fifth of the numbers inside the model are set to 0 at random), or a
# trained model to begin with. The lesson on `your own text <7_own_text.ipynb>`_ does this.
#
# Choose the learning rate, then the batch size
# ---------------------------------------------
#
# The learning rate matters most. We train three new models, with the rates 0.0001, 0.004 and 0.1. After 50 steps, the
# last two have nearly the same loss.
#
# **Predict first.** Which has the lowest loss after 150 steps?
#
# * 0.1: it takes the largest steps
# * 0.004
# * 0.004 and 0.1 are still equal: clipping makes their steps alike

runs = {}
for lr in (0.0001, 0.004, 0.1):
    torch.manual_seed(0)
    steps = train(GPT2LMHeadModel(config), stream, 150, lr, B=8)
    runs[lr] = [loss for _, loss in steps]
at = {n: {lr: sum(runs[lr][n - 10 : n]) / 10 for lr in runs} for n in (50, 150)}

fig, (ax,) = figure(4.8, 3.2)
for (lr, run), dashes in zip(runs.items(), ("--", "-", "-.")):
    ax.plot(range(1, 151), run, dashes, label=f"lr = {lr}")
ax.set(xlabel="step", ylabel="loss", title="Three learning rates")
ax.legend(frameon=False)
plt.show()
for lr in runs:
    print(
        f"lr {lr}: {at[50][lr]:.1f} at step 50, {at[150][lr]:.1f} at step 150"
    )
assert all(
    (w.abs() < 0.1).float().mean() > 0.95
    for name, w in GPT2LMHeadModel(config).named_parameters()
    if "ln_" not in name
)
assert abs(at[50][0.1] - at[50][0.004]) < 0.3
assert at[150][0.004] + 0.4 < at[150][0.1] < at[150][0.0001] < 7.6
assert at[150][0.1] > at[50][0.1] - 0.15
# exercise 3: the loss of a model that knows only how frequent each token is
assert (
    abs(
        torch.distributions.Categorical(torch.bincount(stream) / len(stream))
        .entropy()
        .item()
        - at[150][0.1]
    )
    < 0.3
)

# %%
# The rate 0.1 is stuck. Clipping limits the gradient, but a step of AdamW is about as large as the learning rate,
# whatever the gradient. Most weights are below 0.1, so such steps overwrite them. The rate 0.0001 is safe and slow.
#
# Fifty steps are too few to judge. Begin with a rate that worked for a model of your size. Try three times more and
# three times less for a few hundred steps, and keep the one with the lowest loss.
#
# The batch is a smaller decision. A larger one gives a less noisy gradient and makes each step slower. If it does not
# fit into memory, add up the gradients of several small ones. Weigh them by their tokens: until 2024 the trainer
# of ``transformers`` `did not <https://huggingface.co/blog/gradient_accumulation>`_, and got `another gradient
# <4a_training_in_depth.ipynb>`_ than the large batch gives.
#
# What loss to expect
# -------------------
#
# That depends on the tokenizer: longer tokens are fewer, and each is harder to guess. So add up the surprise of the
# whole text, divide by log 2 to count in bits, and share it among the bytes of the text. In *bits per byte*, any two
# models can be compared. Even ``gzip`` can take part: a text that is easy to predict is easy to compress.

import gzip

text = "".join(d.text for d in held_out_documents).encode()
to_bits = 1 / math.log(2) / len(text)


@torch.no_grad()
def bits_per_byte(model, ids):
    rows = ids.unfold(0, model.config.block_size + 1, model.config.block_size)
    return loss_of(model, rows[:, :-1], rows[:, 1:]).item() * len(ids) * to_bits


its_ids = as_stream(held_out_documents, its_tokenizer)


values = {
    "a uniform guess": math.log(2048) * len(held_out) * to_bits,
    "gzip": 8 * len(gzip.compress(text)) / len(text),
    "our model": bits_per_byte(model, held_out),
    "the shipped model": bits_per_byte(shipped, its_ids),
}
values = dict(sorted(values.items(), key=lambda pair: -pair[1]))
fig, (ax,) = figure(4.8, 2.4)
bars = ax.barh(list(values), list(values.values()))
ax.bar_label(bars, fmt="%.2f", padding=3)
ax.invert_yaxis()
ax.grid(False, axis="y")
ax.set(xlabel="bits per byte of held-out text", xlim=(0, 4))
ax.set_title("Smaller is better")
plt.show()
assert its_tokenizer.eos_token_id == 0
assert values["the shipped model"] < values["our model"] - 0.3
assert values["our model"] < values["a uniform guess"] - 0.5

# %%
# The shipped model has more weights and was trained for longer. Compare a model of yours with a uniform guess and a
# compressor on *your* text. `Learning curves <4b_learning_curves_in_depth.ipynb>`_ has more comparisons.
#
# Exercises
# ---------
#
# 1. Train the small model on the first 20,000 tokens instead of 3,000. Does the held-out curve still turn up within
#    140 steps? A right answer says why not.
# 2. Shift twice: in ``loss_of``, drop the last logit of each row and the first target. Train 100 steps, then let
#    the model continue "The". A right answer explains what the words have to do with each other.
# 3. Count how often each token occurs in ``stream`` (``torch.bincount``). What is the loss of a model that knows only
#    these shares? A right answer is near that of the rate 0.1, and says what that model learned.
#
# Summary
# -------
#
# * The target of a token is the next one; the loss is the mean surprise, and it begins at :math:`\log V`.
# * Watch the held-out loss: where it turns up, the model has begun to learn by heart.
# * The learning rate comes first: compare several over a few hundred steps. Fifty are too few.
