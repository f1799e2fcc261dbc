r"""
The smallest language model
===========================

Two programs invent words, one letter after another. The first one picks each letter blindly: all are equally likely. The
second one knows a single thing: which letter follows which, and how often, in two thousand English words.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["1_autograd", "2_line_and_bend"]
# sphinx_gallery_words = ["bigram model", "makemore", "character-level language model", "n-gram model", "n-grams", "Markov chain", "letter frequencies", "what is a language model", "simplest language model", "how does a language model work", "name generator", "invent words", "random word generator", "predict the next letter", "negative log-likelihood", "maximum likelihood", "why cross-entropy", "why log", "why minus log probability", "why is the loss a logarithm", "softmax explained", "softmax derivative", "softmax gradient", "gradient of cross-entropy", "p - y", "what are logits", "Laplace smoothing", "add-one smoothing", "zero probability", "log of zero", "why not train on accuracy", "accuracy is not differentiable", "Zero to Hero", "Karpathy"]
import math
import random
import re
from itertools import pairwise

import matplotlib.pyplot as plt

from lm_from_scratch.instruments import plot
from lm_from_scratch.text.corpora import load_corpus

text = " ".join(document.text for document in load_corpus("reference"))
found = {word.strip("(),.;:") for word in text.split()}
english = sorted(word for word in found if re.fullmatch("[a-z]{3,12}", word))
aside = sorted({word[:4] for word in english})[::5]  # not to be counted
words = [word for word in english if word[:4] not in aside]

letters = ".abcdefghijklmnopqrstuvwxyz"  # the dot is the edge of a word
counts = {a: dict.fromkeys(letters, 0) for a in letters}  # 27 rows of 0
for word in words:
    for a, b in zip("." + word, word + "."):  # to: .t, to, o.
        counts[a][b] += 1


def invent(table):
    word = "."
    while len(word) == 1 or word[-1] != ".":
        # draw one letter: twice the count, twice as often
        word += random.choices(letters, table[word[-1]].values())[0]
    return word[1:-1]


random.seed(0)
equal = {a: dict.fromkeys(letters, 1) for a in letters}
print(f"{'from counts':24} blindly (at most 34 letters)\n")
for _ in range(8):
    print(f"{invent(counts):24} {invent(equal)[:34]}")

fig, (ax,) = plot.figure(4.8, 4.9)
ax.imshow(
    [[n / max(row.values()) for n in row.values()] for row in counts.values()],
    cmap=plot.blues(),
)
ax.set_xticks(range(27), letters)
ax.set_yticks(range(27), letters)
ax.tick_params(length=0)
ax.xaxis.tick_top()
ax.grid(False)
ax.set(title="Which letter (column) follows which (row)")
plt.show()
assert 1600 < len(words) < 2400
assert sum(counts["q"].values()) == counts["q"]["u"]

# %%
# You can pronounce much of what the counts invent. The map shows all that the second program knows: the bluer, the
# more often in its row. Row ``.`` says how words begin, column ``.`` how they end,
# and after ``q`` there is only ``u``.
#
# The words come from Python's own manual. A fifth of them, ``aside``, are kept for tests.
#
# A table is a language model
# ---------------------------
#
# A *language model* gives every possible next symbol a probability. In a chatbot the symbols are pieces of words, and
# it looks back over many pages. Ours has 27 symbols, the letters and the dot, and looks back one. Two letters in a row
# are a *bigram*, so it is a bigram model.
#
# Divide each row by its sum, and the counts become probabilities:


def probabilities(row, extra=0):
    total = sum(n + extra for n in row.values())
    return {b: (n + extra) / total for b, n in row.items()}


bigram = {a: probabilities(row) for a, row in counts.items()}
for a in ".qt":
    row = sorted(((p, b) for b, p in bigram[a].items() if p), reverse=True)
    print(f"after {a}  ", "  ".join(f"{b} {p:4.0%}" for p, b in row[:5]))

# %%
# ``invent`` begins in row ``.``, draws a letter with these probabilities, goes to its row, and draws again, until the
# dot. This is *sampling*.
#
# How surprised is it?
# --------------------
#
# The better of two models finds real words more probable. A word needs each of its letters, so multiply their
# probabilities, as for two sixes with dice: 1/6 × 1/6. In a *uniform* model all 27 symbols are equally likely.


def chances(word, model):  # of each letter, and of the dot at its end
    return [model[a][b] for a, b in zip("." + word, word + ".")]


uniform = {a: probabilities(row) for a, row in equal.items()}
print("all words:", math.prod(math.prod(chances(w, bigram)) for w in words))
for name, model in (("uniform", uniform), ("bigram", bigram)):
    print(
        f"sequence, {name:8}"
        f"1 in {1 / math.prod(chances('sequence', model)):17,.0f}"
    )

assert math.prod(chances("sequence", bigram)) > 200 / 27**9

# %%
# The counts are far better. But the product for all words is so small that Python rounds it to
# 0.
#
# A *logarithm* turns products into sums: log (2 × 3) = log 2 + log 3. (It is the ``ln`` of a calculator: the power to
# raise e = 2.718 to.) That of a probability is at most 0, so the *surprise* has a minus:
#
# .. math::
#
#    -\log p(\text{the letter that came})
#
# It is 0 for a certain letter, 0.7 for p = 1/2, 4.6 for 1/100, and log 27 = 3.3 for any letter in the uniform model.
# The mean surprise is our *loss*, called *cross-entropy*.


def surprises(word, model):
    return [-math.log(p) if p else math.inf for p in chances(word, model)]


def loss(words, model):
    values = [s for word in words for s in surprises(word, model)]
    return sum(values) / len(values)


for name, model in (("uniform", uniform), ("bigram", bigram)):
    print(f"{name:8} loss {loss(words, model):.2f}")

fig, (ax,) = plot.figure(4.8, 2.6)
ax.bar(range(9), surprises("sequence", bigram))
ax.set_xticks(range(9), "sequence.")
ax.axhline(math.log(27), color=plot.GREY, linestyle="--")
ax.text(8.4, math.log(27) + 0.06, "log 27", ha="right")
ax.set(ylabel="surprise", title="How much each letter surprises the counts")
ax.grid(False, axis="x")
plt.show()
assert abs(loss(words, uniform) - 3.3) < 0.01
assert 2.25 < loss(words, bigram) < 2.45
assert 9.5 < math.exp(loss(words, bigram)) < 11.5
assert surprises("sequence", bigram)[2] > math.log(27)
assert surprises("sequence", bigram)[3] == 0
assert round(math.log(2), 1) == 0.7 and round(math.log(100), 1) == 4.6

# %%
# The ``q`` is a surprise, and the ``u`` after it is none. Over all words the loss falls from 3.3 to about 2.4: as
# hard as a guess among 11 symbols (log 11 is 2.4), not 27.
#
# **Predict first.** In the words that we counted, ``w`` never follows ``b``. What is the loss of the word *subway*?
#
# * About 2.4: it is only one pair of seven.
# * About 3.3, as for a blind guess.
# * Infinite.

print(loss(["subway"], bigram))

assert counts["b"]["w"] == 0 and loss(["subway"], bigram) == math.inf

# %%
# Infinite. The probability of ``w`` is 0, and −log p grows beyond any limit as p goes to 0. One impossible letter
# spoils the whole mean.
#
# So a model should never say "never". Pretend to have seen every pair a tenth of a time more (*smoothing*), and test
# the words ``aside`` too:

new_words = [word for word in english if word[:4] in aside]
careful = {a: probabilities(row, extra=0.1) for a, row in counts.items()}
for name, model in (("bigram", bigram), ("careful", careful)):
    old, new = loss(words, model), loss(new_words, model)
    print(f"{name:8} counted words {old:.2f}   new words {new:.2f}")

assert loss(new_words, bigram) == math.inf
assert 0 < loss(words, careful) - loss(words, bigram) < 0.005
assert 2.35 < loss(new_words, careful) < 2.55
assert 0.15 < len(new_words) / len(english) < 0.25

# %%
# The same table, learned
# -----------------------
#
# A neural network does not count. It walks downhill, as in `the last lesson <2_line_and_bend.ipynb>`_. Give each pair
# a *score*, any number (such scores are *logits*). *Softmax* makes probabilities of a row: all powers of e are above 0, and
# divided by their sum they add up to 1.
#
# .. math::
#
#    p = \frac{e^{\text{score}}}{S}, \quad S = \text{the sum of all 27 } e^{\text{score}}
#
# What are the slopes of the surprise, say for the pair ``ue``? Nudge ``x``, and you find that :math:`e^x` has the
# slope :math:`e^x`, and log x has 1/x.
#
# * Log turns ÷ into −, and undoes the power: −log p is log S − the score of ``e``.
# * Raise any score of row ``u``: S grows with slope :math:`e^{\text{score}}`. Times 1/S, by the chain rule, that is the
#   p of its letter.
# * For ``e`` itself, "− the score" takes off 1.
#
# So the slope is p − 1 for the letter that came, and its p for any other. In *queue* the pair ``ue`` comes twice, and
# slopes add up: 2p − 2 for ``e``, 2p for others. ``Value``, from `the first lesson <1_autograd.ipynb>`_, finds the
# same. (All scores are 0, so each p is 1/27.)

from lm_from_scratch.training.autograd import Value

scores = {a: {b: Value(0) for b in letters} for a in letters}
total = Value(0)
for a, b in zip(".queue", "queue."):
    S = sum(score.exp() for score in scores[a].values())
    total += S.log() - scores[a][b]
total.backward()
for b, by_hand in (("e", 2 / 27 - 2), ("a", 2 / 27)):
    print(f"{b}: {scores['u'][b].grad:6.3f}, by hand {by_hand:6.3f}")
for a in letters:
    for b in letters:
        assert math.isclose(
            scores[a][b].grad,
            ".queue".count(a) / 27 - ".queue.".count(a + b),
            abs_tol=1e-12,
        )

# %%
# Now all words. If ``u`` comes N times, and ``e`` follows n times, then N times p is added, n times 1 is taken off:
# N p − n. Divide by N: p − n / N. But n / N is the counted table! So a step downhill is a subtraction:


def softmax(row):
    return probabilities({b: math.exp(score) for b, score in row.items()})


def train(steps, lr=4.0):
    scores = {a: dict.fromkeys(letters, 0.0) for a in letters}
    for _ in range(steps):
        for a, row in scores.items():
            p = softmax(row)
            for b in letters:
                row[b] -= lr * (p[b] - bigram[a][b])
    return scores


import torch
import torch.nn.functional as F

torch.testing.assert_close(
    torch.autograd.grad(
        F.cross_entropy(
            (
                z := torch.tensor(
                    [[*row.values()] for row in train(3).values()],
                    dtype=torch.float64,
                    requires_grad=True,
                )
            )[[letters.index(a) for w in words for a in "." + w]],
            torch.tensor([letters.index(b) for w in words for b in w + "."]),
            reduction="sum",
        ),
        z,
    )[0],
    torch.tensor(
        [
            [sum(counts[a].values()) * p - counts[a][b] for b, p in row.items()]
            for a, row in zip(letters, map(softmax, train(3).values()))
        ],
        dtype=torch.float64,
    ),
)

# %%
# **Predict first.** The dashed line below is the loss of the counts. We tune 729 scores to the same words. How low
# does the loss get?
#
# * Far below the line.
# * Down to the line, and never below it.
# * It stops clearly above the line.

curve = {}
for steps in (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
    learned = {a: softmax(row) for a, row in train(steps).items()}
    curve[steps] = loss(words, learned)

fig, (ax, bars) = plot.figure(4.8, 5.2, 2, 1)
ax.plot(range(11), [*curve.values()], "o-")
ax.axhline(loss(words, bigram), color=plot.COLOURS[3], linestyle="--")
ax.text(0, loss(words, bigram) + 0.03, "the counts", color=plot.COLOURS[3])
ax.set_xticks(range(11), [*curve])
ax.set(xlabel="steps", ylabel="loss", title="The learned table")
bars.bar(range(27), bigram["t"].values(), color=plot.COLOURS[5])
bars.plot(range(27), [*learned["t"].values()], "o", color="black", ms=4)
bars.set_xticks(range(27), letters)
bars.set(ylabel="p", title="After t: counted (bars), learned (dots)")
bars.grid(False, axis="x")
plt.show()
assert (
    max(abs(learned[a][b] - bigram[a][b]) for a in letters for b in letters)
    < 0.001
)
assert 0 < curve[512] - loss(words, bigram) < 0.01
assert [*curve.values()] == sorted(curve.values(), reverse=True)
assert all(
    loss(words, {a: probabilities(p) for a, p in nudged.items()})
    > loss(words, bigram)
    for nudged in [
        {
            a: {b: p * random.uniform(0.9, 1) for b, p in row.items()}
            for a, row in bigram.items()
        }
        for _ in range(5)
    ]
)

# %%
# Down to the line, and never below it. After 512 steps each learned probability is within 0.001 of the counted one.
#
# Why not below? At the bottom of a valley all slopes are 0: each p − n / N is 0, so p = n / N. *The least surprise is what
# counting gives*, with a score for each pair. (Softmax gives no p of 0, so the walk only nears it.)
#
# Why not teach by right guesses?
# -------------------------------
#
# Why not make the likeliest letter right more often, directly? Nudge each score of a half-learned table. How often does
# the loss change, how often the number of right guesses?

scores = train(10)


def marks(a):  # of all letters after a: surprise, and right first guesses
    p = softmax(scores[a])
    surprise = -sum(n * math.log(p[b]) for b, n in counts[a].items())
    return surprise, counts[a][max(p, key=p.get)]  # the likeliest


changes = []
for a in letters:
    before = marks(a)
    for b in letters:
        scores[a][b] += 0.001
        changes.append([x != y for x, y in zip(before, marks(a))])
        scores[a][b] -= 0.001
print("loss, right guesses:", [sum(column) for column in zip(*changes)])

nudged = [sum(column) for column in zip(*changes)]
assert nudged == [729, 0]

# %%
# All 729 nudges change the loss, and none changes the right guesses: a guess stays until another score overtakes it.
# Now slide one score, that of ``e`` after ``t``:

slide, results = [k / 20 for k in range(-40, 121)], []
for score in slide:
    scores["t"]["e"] = score
    results.append(marks("t"))

N = sum(counts["t"].values())
fig, axes = plot.figure(4.8, 4.8, 2, 1)
for ax, column, unit in zip(axes, zip(*results), (N, N / 100)):
    ax.plot(slide, [y / unit for y in column])
    ax.plot(0, column[40] / unit, "o", color="black")
axes[0].set(title="Loss after t", ylabel="loss")
axes[1].set(title="Right guesses after t", ylabel="%", ylim=0)
axes[1].set(xlabel="score of e")
plt.show()
assert len({right for _, right in results}) == 2
assert len({surprise for surprise, _ in results}) == 161
assert results[40][0] > results[60][0] and results[40][1] == results[60][1]

# %%
# Right guesses are a staircase, flat at the dot. There the loss still leads downhill, to the right.
#
# New words
# ---------
#
# One letter is a short memory. Why not count what follows two letters, three, or four? (Words with the same
# first four letters went ``aside`` together: once *counted* is read, *counting* is hardly new.)


def contexts(word, n):  # "to", 2: (.., t) (.t, o) (to, .)
    padded = "." * n + word + "."
    return [(padded[i : i + n], padded[i + n]) for i in range(len(word) + 1)]


def count(words, n):
    table = {}
    for word in words:
        for before, b in contexts(word, n):
            row = table.setdefault(before, dict.fromkeys(letters, 0))
            row[b] += 1
    return {a: probabilities(row, extra=0.1) for a, row in table.items()}


def long_loss(words, table, n):
    pairs = [pair for word in words for pair in contexts(word, n)]
    found = [table[a][b] if a in table else 1 / 27 for a, b in pairs]
    return -sum(map(math.log, found)) / len(found)


# %%
# **Predict first.** Look back 0, 1, 2, 3, 4 letters. On the counted words the loss falls and falls. And on new words?
#
# * It falls too, a little above the other line.
# * It falls, then rises.
# * It stays the same.

tables = [count(words, n) for n in range(5)]
losses = {
    name: [long_loss(some, table, n) for n, table in enumerate(tables)]
    for name, some in (("counted words", words), ("new words", new_words))
}

fig = plot.curves(
    {name: (range(5), line) for name, line in losses.items()},
    "letters looked back",
    "loss",
)
fig.axes[0].set_title("A longer memory")
fig.axes[0].set_xticks(range(5))
plt.show()
assert math.isclose(losses["counted words"][1], loss(words, careful))
assert losses["counted words"] == sorted(losses["counted words"], reverse=True)
for (a, b), change in zip(
    pairwise(losses["new words"]), (-0.2, -0.03, 0.04, 0.1)
):
    assert (b - a) / change > 1
assert (
    0.2
    < len(
        [
            before
            for word in new_words
            for before, _ in contexts(word, 4)
            if before not in tables[4]
        ]
    )
    / sum(len(word) + 1 for word in new_words)
    < 0.35
)
assert 475_255 == sum(26**n for n in range(5)) > 100 * len(tables[4])
assert losses["new words"][4] > losses["new words"][1]

# %%
# It falls, then rises. Two letters are best. With four, about a quarter of the places in new words come after letters
# that were never counted, so the table guesses blindly.
#
# The table knows its words *by heart*. This is *overfitting*. It has room for 475,255 rows, our words fill fewer than
# one in a hundred, and a row for *tati* learns nothing from *sati*.
#
# The next lesson, a GPT, keeps softmax, surprise and the steps downhill. But it computes its scores from one set of
# numbers, whatever came before.
#
# Exercises
# ---------
#
# 1. *Easy.* Let ``careful`` invent ten words, then a table with ``extra=1``. A good answer says in which rows they go
#    wrong.
# 2. *Easy.* Begin ``train`` with random scores (``random.gauss(0, 3)``). A good answer compares the tables.
# 3. *Hard.* Let ``tables[3]`` invent words. A good answer says how many of a hundred are in ``words``.
#
# Summary
# -------
#
# * A language model gives each possible next symbol a probability. The smallest is a table of which letter follows
#   which.
# * Cross-entropy is the mean surprise, −log p. Its slope for a score is p, less 1 for the letter that came. Counting
#   makes it smallest.
# * A table that looks back further needs more words than there are. The loss on new words shows it.
