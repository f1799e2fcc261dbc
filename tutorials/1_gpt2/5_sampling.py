r"""
Sampling: from scores to words
==============================

A language model does not write. It gives every token a score, and a program of ten lines picks one.
That program decides whether the same model makes sense or noise.

Run the model and press *Write 60 tokens*. Then pull the temperature up to 2 and do it again.

.. live:: next
   :model: gpt2-docs
   :prompt: If an exception is

Always the best token
---------------------

The simplest program takes the token with the highest score, every time. It is called *greedy*. It
never takes a bad token, so its text should be the best that this model can write.

**Predict first.** What does the model write when it always takes the best token?

* A correct but dull paragraph
* The same words, again and again
* Random words
"""

# sphinx_gallery_thumbnail_number = 3
# sphinx_gallery_needs = ["1_tokens", "2_gpt2"]
# sphinx_gallery_museum = ["G9"]
# sphinx_gallery_words = ["top_k", "top_p", "nucleus sampling", "greedy decoding", "do_sample", "repetition_penalty", "torch.multinomial", "argmax", "temperature", "softmax", "repeats itself", "how is the next word chosen", "more creative output", "randomness of the answer", "probability distribution over words", "one token at a time", "autoregressive", "generate text", "decoding strategies", "top-k vs top-p", "greedy vs sampling", "random output", "temperature explained", "boring text", "too random", "crazy text", "less crazy", "creativity", "deterministic answer", "same answer every time", "different answer every time", "why not the most probable word", "pick the next token", "choose the next word", "temperature vs top-p", "settings for generation", "diverse texts", "variety", "min_p", "equally likely words", "choose between words", "a draw", "dice", "choose at random"]

import textwrap

import torch

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import gpt2 as drawings

model, tokenizer = load_shipped("gpt2-docs")


@torch.no_grad()
def scores_after(ids):
    return model(torch.tensor([ids]))[0, -1]  # (1, T, V) -> (V,)


ids = tokenizer.start("The value")
for _ in range(60):
    ids.append(int(scores_after(ids).argmax()))

assert tokenizer.decode(ids).count("he value is a ") > 4
drawings.repeats(tokenizer.pieces(ids[1:]))

# %%
# The same words, again and again. The marks show every run of four tokens that has occurred before.
# (In the widget, this is temperature 0.)
#
# Each repetition makes the next one more likely, because the texts that the model learned from repeat
# themselves, too. And the greedy program never takes the second best token, so it cannot leave the
# loop. People do not write like that: a real text is full of words that nobody would have guessed.
#
# So we let chance in. That takes three steps: turn the scores into probabilities, reshape them, and
# draw one token.
#
# Scores become probabilities
# ---------------------------
#
# The scores are called *logits*. *Softmax* makes probabilities of them: take e to the power of each,
# then divide by the sum. Now all are positive, and their sum is 1.

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, GREY, figure, printable

logits = scores_after(tokenizer.start("If the file does not exist, an"))
p = logits.softmax(-1)  # (V,), sums to 1
best = p.topk(10).indices
names = [printable(piece) for piece in tokenizer.pieces(best.tolist())]

assert abs(p.sum() - 1) < 1e-5
assert names[0] == "␣exception"
assert 0.45 < p[best].sum() < 0.65


def bars(rows):
    _, axes = figure(4.8, 0.9 + 1.25 * len(rows), rows=len(rows))
    for ax, (title, q), colour in zip(axes, rows.items(), COLOURS):
        ax.bar(range(10), q[best].tolist(), color=colour)
        ax.set_xticks(range(10), [""] * 10)
        ax.set_ylim(0, 0.42)
        for i, share in enumerate(q[best]):
            ax.text(i, 0.03, "" if share else "×", ha="center", color=GREY)
        ax.set_title(f"{title}: these ten have {q[best].sum():.0%}")
    axes[-1].set_xticks(range(10), names, rotation=60, ha="right")
    plt.show()


# %%
# These are the ten likeliest tokens after "If the file does not exist, an".

bars({"the model": p})

# %%
# Most of them fit: an exception, an empty, an existing, an error. But only about half of the
# probability is here. The rest belongs to 4,086 other tokens, the *tail*.
#
# Temperature: how bold
# ---------------------
#
# Divide all logits by a number, the *temperature* τ (tau), before the softmax. Below 1, likely tokens
# become more likely still. Above 1, all come closer together. The order stays the same.
#
# **Predict first.** One token is twice as likely as another. How many times as likely is it at
# τ = 0.5?
#
# * Twice: both are divided by the same number.
# * Four times
# * Both are equally likely.

z = torch.tensor([0.2, 0.1]).log()  # their logits
for temperature in (2, 1, 0.5):
    q = (z / temperature).softmax(-1)
    print(f"τ = {temperature:<3}  {q[0] / q[1]:.2f} times as likely")

assert torch.isclose(q[0] / q[1], torch.tensor(4.0))

# %%
# Four times. A *difference* of logits becomes a *ratio* of probabilities. Dividing by 0.5 doubles each
# difference, and that squares the ratio: 2 becomes 4. In general, r becomes :math:`r^{1/\tau}`.
#
# Here are the ten tokens again, at three temperatures.

bars({f"τ = {tau}": (logits / tau).softmax(-1) for tau in (0.5, 1, 2)})

assert (logits / 0.5).softmax(-1)[best].sum() > 0.8
assert (logits / 2).softmax(-1)[best].sum() < 0.3

# %%
# At τ = 2 little is left for the ten. Each token of the tail is unlikely, but there are thousands of
# them, and together they win. That is why bold texts turn into nonsense. One bad token is enough: the
# model reads it, and goes on from there.
#
# Top-k and top-p: cut the tail
# -----------------------------
#
# * *Top-k* keeps the k likeliest tokens. All others get probability 0.
# * *Top-p* keeps tokens, the likeliest first, until their probabilities add up to p. All others get
#   probability 0.
#
# The probabilities that are left are divided by their sum, so that they add up to 1 again. In the
# picture, × is a token that was cut.

from lm_from_scratch.generation.sampling import Sampler, keep_top_k, keep_top_p

bars(
    {
        "top-k 4": keep_top_k(logits[None], 4)[0].softmax(-1),
        "top-p 0.4": keep_top_p(logits[None], 0.4)[0].softmax(-1),
    }
)


# %%
# Why two ways? Because the model is sometimes sure and sometimes not. After ``def __init__(self`` it
# is sure: top-p with p = 0.9 keeps two tokens, a comma and a bracket.
#
# **Predict first.** How many tokens does top-p 0.9 keep after "Return the"?
#
# * 2
# * 20
# * More than 200

for text in ("def __init__(self", "Return the"):
    z = scores_after(tokenizer.start(text))
    kept = keep_top_p(z[None], 0.9).isfinite().sum()  # a cut one has -inf
    print(f"{text!r}: {kept} tokens kept")

assert kept > 200
assert sorted(
    tokenizer.pieces(
        keep_top_p(
            scores_after(tokenizer.start("def __init__(self"))[None], 0.9
        )[0]
        .isfinite()
        .nonzero()[:, 0]
        .tolist()
    )
) == [")", ","]

# %%
# More than 200, because nearly any noun can follow. A fixed k of 50 is too many for the first text
# and too few for the second. Top-p adapts.
#
# The whole sampler
# -----------------
#
# Now the ten lines. The last one draws: imagine the probabilities end to end on a line, and throw a
# dart at it. ``torch.multinomial`` says which token the dart hits.


def choose(logits, temperature=1.0, top_k=50, top_p=0.9):
    if temperature == 0:
        return int(logits.argmax())
    p = (logits / temperature).softmax(-1)  # (V,)
    p, ids = p.sort(descending=True)  # likeliest first
    p[top_k:] = 0
    p /= p.sum()
    before = p.cumsum(-1) - p  # the sum of all likelier ones
    p[before >= top_p] = 0
    return int(ids[torch.multinomial(p, 1)])  # draw


assert choose(logits, temperature=0) == best[0]
assert {choose(logits) for _ in range(500)} <= set(
    Sampler(top_k=50, top_p=0.9)
    .logits(logits[None], torch.zeros(1, len(logits), dtype=torch.bool))[0]
    .isfinite()
    .nonzero()[:, 0]
    .tolist()
)

# %%
# The same beginning at four temperatures, with nothing cut. A text ends after 30 tokens, or where the
# model writes the token that separates documents.

torch.manual_seed(5)
for temperature in (0, 0.7, 1, 1.5):
    ids = tokenizer.start("If an exception is")
    for _ in range(30):
        ids.append(choose(scores_after(ids), temperature, 4096, 1.0))
        if ids[-1] == tokenizer.eos_token_id:
            break
    text = " ".join(tokenizer.decode(ids[1:]).split())
    print(textwrap.fill(f"τ = {temperature}: {text}"), "\n")

assert sum(w.numel() for w in model.parameters()) < 2.5e6

# %%
# A loop, then something like English, then noise. The model has two million parameters, so do not
# expect sense. For large models, τ between 0.7 and 1 with p = 0.9 is a common start. Where only one
# answer is right, as in a calculation, many people stay near 0.
#
# The dog that repeated itself
# ----------------------------
#
# There is another cure for loops: a penalty for tokens that the text already has. At the end of 2019,
# ``transformers`` divided their logits by the penalty. A user gave a small GPT-2 the beginning "The
# dog" and a penalty of 1.5, and got "The dog dog dog dog dog dog" (`issue 2302
# <https://github.com/huggingface/transformers/issues/2302>`_). The higher the penalty, the more it
# repeated.
#
# We can repeat that. In the model of that user all logits were negative, even those of the likely
# tokens. In ours the likely tokens have positive logits, and dividing makes these smaller. So we
# subtract 30 from all logits. No difference changes, so no probability changes.


def old_penalty(z):
    return z / 1.5


def new_penalty(z):
    return torch.where(z > 0, z / 1.5, z * 1.5)


for penalty in (old_penalty, new_penalty):
    ids = tokenizer.start("The list")
    for _ in range(14):
        z = scores_after(ids) - 30
        z[ids] = penalty(z[ids])  # of the tokens in the text
        ids.append(int(z.argmax()))
    text = tokenizer.decode(ids[1:])
    print(textwrap.fill(f"{penalty.__name__}: {text!r}"))

assert torch.allclose((logits - 30).softmax(-1), p, atol=1e-6)
assert (logits < 0).float().mean() > 0.7 and logits[best].min() > 0
assert (logits - 30).max() < 0
assert tokenizer.decode(ids).count("list") == 1

# %%
# Divide -30 by 1.5 and you get -20, which is a *higher* score. The penalty was a reward. The new
# penalty divides positive logits and multiplies negative ones.
#
# Exercises
# ---------
#
# 1. Find the settings at which you like the model's texts best, in the widget or with ``choose``. A
#    good answer says what goes wrong below your temperature, and what above it.
# 2. Add *min-p* to ``choose``: keep the tokens that are at least a tenth as likely as the likeliest
#    one. A good answer keeps two tokens after ``def __init__(self``, and more after "Return the".
# 3. Add 5 to all logits. Which of these change: the probabilities, the greedy token, top-p, the new
#    penalty? A good answer says why one number added to all logits cannot matter to the softmax.
#
# Summary
# -------
#
# * The model gives scores, and the sampler chooses. Always taking the best token leads into loops.
# * Temperature divides the logits: below 1 the choice is safer, above 1 bolder.
# * Top-k keeps a fixed number of tokens. Top-p keeps as many as it takes to reach the probability p:
#   few where the model is sure, many where it is not.
#
# On a first evening, go on with `your own text <7_own_text.ipynb>`_: what attention looks at can wait.
