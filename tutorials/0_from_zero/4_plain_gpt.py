r"""
A GPT in plain Python
=====================

Two programs invent words, letter by letter. One has counted which letter follows which, as in `the last lesson
<3_bigrams.ipynb>`_. The other is a *GPT*, the kind of program behind ChatGPT, only very small. In an earlier run of this page
they wrote:
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["1_autograd", "2_line_and_bend", "3_bigrams"]
# sphinx_gallery_words = ["microgpt", "GPT without PyTorch", "GPT in pure Python", "GPT from scratch in pure Python", "transformer in pure Python", "transformer from scratch without libraries", "GPT without NumPy", "no dependencies", "smallest GPT", "simplest GPT", "minimal GPT", "tiny GPT", "toy GPT", "GPT in 100 lines", "GPT in 200 lines", "GPT line by line", "character-level GPT", "makemore", "minGPT", "build a GPT", "how does a GPT work", "how does a transformer work", "attention for beginners", "attention without matrices", "attention with for loops", "self-attention in Python lists", "what is inside a language model", "stochastic gradient descent", "SGD", "why is PyTorch fast", "PyTorch vs pure Python", "Karpathy"]
import gc
import math
import random
import re
from collections import Counter
from statistics import fmean

import matplotlib.pyplot as plt

from lm_from_scratch.instruments import plot
from lm_from_scratch.text.corpora import load_corpus

text = " ".join(document.text for document in load_corpus("reference"))
found = {word.strip("(),.;:") for word in text.split()}
english = sorted(word for word in found if re.fullmatch("[a-z]{4,7}", word))
aside = sorted({word[:4] for word in english})[::5]
words = [word for word in english if word[:4] not in aside]
new_words = [word for word in english if word[:4] in aside][::2]
letters = ".abcdefghijklmnopqrstuvwxyz"  # the dot is the edge of a word

for name, invented in zip(
    ("GPT, untrained", "counts", "GPT, trained"),
    (
        "eixoeegj gsgaxpzc u mkcvhyrx uur cfo bmaiefhx fpspejgj",
        "spilins litecoratyntastin intunt se resiant fs nduscalit",
        "camhe ssided anmoned marr ceres lect cepond dopn fogow",
    ),
):
    print(f"{name:15} {invented}")

fig, (ax,) = plot.figure(4.8, 3.6)
ax.plot(
    range(50, 801, 50),
    [3.07, 2.82, 2.67, 2.66, 2.69, 2.58, 2.51, 2.45]
    + [2.48, 2.43, 2.47, 2.33, 2.40, 2.38, 2.38, 2.33],
    label="GPT: words that it reads",
)
ax.plot(800, 2.37, "o", color="black", label="GPT: new words")
for n, extra, dashes in ((1, 0.3, "--"), (2, 0.2, ":")):
    counted, tests = (
        [
            (("." * n + word)[i : i + n], letter)
            for word in some
            for i, letter in enumerate(word + ".")
        ]
        for some in (words, new_words)
    )
    table, sums = Counter(counted), Counter(before for before, _ in counted)
    chances = [(table[a, b] + extra) / (sums[a] + 27 * extra) for a, b in tests]
    ax.axhline(
        fmean(-math.log(p) for p in chances),
        linestyle=dashes,
        color=plot.COLOURS[3],
        label=f"counts, {n} letter{'s' * (n > 1)} back: new words",
    )
ax.set(xlabel="words read", ylabel="surprise", title="A GPT of 1,608 numbers")
ax.legend(frameon=False)
plt.show()

# %%
# The untrained GPT babbles. Trained, it writes words that you can often pronounce, and of the right length.
#
# The curve is its mean *surprise* at each letter, while the GPT reads 800 words. The dot is its surprise at *new words*, which
# neither program has read. The lines are what the counts reach there, looking back one letter or two. Lower is better.
#
# It writes as all GPTs do: from the letters so far it computes a probability for each possible next letter, draws one,
# appends it, and begins again. This page builds the step from letters to probabilities, with lists and the ``Value``
# of `the first lesson <1_autograd.ipynb>`_. (All words are from Python's manual.)
#
# Letters become lists
# --------------------
#
# A network computes with numbers. So each letter gets a list of 12 numbers, its *embedding*. Each of 8 places in a word (the
# dot, then up to 7 letters) also gets one. All begin at random near 0, and training will change them.
#
# Lists of one length, one below another, are a *matrix*. This GPT is nine of them: the lists of the letters, those of the
# places, and seven that get their jobs below.

from lm_from_scratch.training.autograd import Value, dot

rng = random.Random(0)
rng.shuffle(words)
V, T, C, D = 27, 8, 12, 4  # symbols, places, numbers in a list, in a part


def matrix(rows, columns):
    return [[rng.gauss(0, 0.15) for _ in range(columns)] for _ in range(rows)]


start = {"letter": matrix(V, C), "place": matrix(T, C), "lm_head": matrix(V, C)}
for name in ("query", "key", "value", "output", "mlp_in", "mlp_out"):
    start[name] = matrix(C, C)
model = {m: [[*map(Value, row)] for row in rows] for m, rows in start.items()}
parameters = [p for rows in model.values() for row in rows for p in row]

assert len(parameters) == 1608 and len(model) == 9
assert len(letters) == V and max(map(len, words)) + 1 == T
assert [
    [
        word[word.index(pair) + 2] in "aeiou"
        for word in words
        if pair in word[:-1]
    ].count(vowel)
    for pair in ("qu", "su")
    for vowel in (True, False)
] == [12, 0, 3, 20]

# %%
# That makes 1,608 parameters: the dials that training turns. We compute with four tools:
#
# * ``dot`` multiplies two lists number by number, and adds up: (1, 2) and (3, 4) give 3 + 8 = 11.
# * ``linear`` makes a new list from a list: its ``dot`` with each row of a matrix.
# * ``norm`` scales a list until the mean of its squares is 1, so that no list drowns out the others.
# * ``softmax`` turns scores into probabilities, as in the last lesson.


def linear(x, rows):
    return [dot(row, x) for row in rows]


def norm(x):
    scale = (dot(x, x) / len(x) + 1e-5) ** -0.5  # 1e-5: never divide by 0
    return [number * scale for number in x]


def softmax(scores):
    powers = [score.exp() for score in scores]
    share = 1 / sum(powers)
    return [power * share for power in powers]


assert dot([Value(1), Value(2)], [Value(3), Value(4)]).data == 11
assert math.isclose(
    fmean(x.data**2 for x in norm([*map(Value, (30, -40, 10))])),
    1,
    rel_tol=1e-6,
)

# %%
# Each letter asks, earlier letters answer
# ----------------------------------------
#
# What follows ``u``? After *qu*, a vowel in 12 of 12 words. After *su*, in 3 of 23. So ``u`` must find out what came before
# it, by *attention*. Each letter makes three lists from its own, with three matrices, as in a library:
#
# * a *query*: what it looks for;
# * a *key*, like the title of a book: what it can be found by;
# * a *value*, like the pages: what it has to tell. (Not the class ``Value``.)
#
# The ``dot`` of a query and a key is high if both are large, with the same signs, in the same places: they fit. Softmax turns
# such scores into *weights*, which sum to 1. The answer mixes the values: with weights 0.9 and 0.1, nine parts of one to one of
# the other.
#
# The 12 numbers are shared among three *heads*, four each, so a letter asks three questions at once. The matrix ``output``
# mixes the three answers.


def attention(x, past):
    query, key, value = (linear(x, model[m]) for m in ("query", "key", "value"))
    past.append((query, key, value))
    answer = []
    for h in range(0, C, D):  # for each head, D of the C numbers
        q = query[h : h + D]
        scores = [dot(q, k[h : h + D]) / D**0.5 for _, k, _ in past]
        weights = softmax(scores)
        for i in range(h, h + D):
            answer.append(dot(weights, [v[i] for _, _, v in past]))
    return linear(answer, model["output"])


# %%
# ``past`` is the notebook of a word: each letter writes into it when its turn comes. So a letter can ask itself and those
# before it. Later ones are not there yet. (``D**0.5``, here 2, keeps scores small when parts are long.)
#
# The whole model
# ---------------
#
# In attention, letters hear from each other. Then each works on its own, in an *MLP* (multi-layer perceptron): lines, bends,
# and sums of them, as in `lesson 2 <2_line_and_bend.ipynb>`_. Both results are *added* to the letter's list, so what
# was in it stays. The last matrix, ``lm_head``, turns the list into 27 scores: one for each symbol that may come next.


def add(x, y):
    return [a + b for a, b in zip(x, y)]


def gpt(letter, place, past):
    x = add(model["letter"][letters.index(letter)], model["place"][place])
    x = add(x, attention(norm(x), past))
    hidden = [number.relu() for number in linear(norm(x), model["mlp_in"])]
    x = add(x, linear(hidden, model["mlp_out"]))
    return linear(norm(x), model["lm_head"])


# %%
# That is a GPT. Let it write:


def invent():
    word, past = ".", []
    while len(word) <= T and (word == "." or word[-1] != "."):
        p = softmax(gpt(word[-1], len(word) - 1, past))
        word += rng.choices(letters, [share.data for share in p])[0]
    return word.strip(".")


print(*[invent() for _ in range(10)])

# %%
# Downhill
# --------
#
# It babbles. But every word is full of questions with known answers. What follows the start of *cat*? ``c``. What follows
# ``c``? ``a``. At the end: the dot. The loss is the model's mean surprise at these answers. ``backward`` finds its slope
# for each of the 1,608 parameters, and each moves a little downhill.
#
# Then comes the next word. One word says little about others. So the learning rate falls from 0.5 to 0, and errors average
# out.


def surprises(word, deaf=False):  # deaf: for later
    past = []
    for place, (letter, after) in enumerate(zip("." + word, word + ".")):
        p = softmax(gpt(letter, place, [] if deaf else past))
        yield -p[letters.index(after)].log()


gc.disable()  # faster: Python does not look for garbage now and then
rates, losses = [0.5 * (1 - step / 800) for step in range(800)], []
for lr, word in zip(rates, words):
    values = [*surprises(word)]
    loss = sum(values) / len(values)
    loss.backward()
    losses.append(loss.data)
    for p in parameters:
        p.data -= lr * p.grad
        p.grad = 0.0

# %%
# Has it learned?

gpt_loss = fmean(s.data for word in new_words for s in surprises(word))
print(f"surprise at new words: {gpt_loss:.2f}")
print(*[invent() for _ in range(10)])

assert abs(gpt_loss - 2.37) < 0.06
assert [line.get_label()[:8] for line in ax.lines[2:]] == ["counts, "] * 2
assert all(gpt_loss + 0.015 < line.get_ydata()[0] for line in ax.lines[2:])
assert 900 < len(words) < 1050 and 100 < len(new_words) < 150
for recorded, mean in zip(
    ax.lines[0].get_ydata(),
    (fmean(losses[step : step + 50]) for step in range(0, 800, 50)),
):
    assert abs(recorded - mean) < 0.3

# %%
# It has: it beats the counts, which had more than 900 words. It read 800, each once.
#
# Whom does it ask?
# -----------------
#
# The trained GPT reads *qu*. What does ``u`` ask? Step through its first head:

past = []
for place, letter in enumerate(".qu"):
    gpt(letter, place, past)
q, k, v = ([[n.data for n in x[:D]] for x in row] for row in zip(*past))

from lm_from_scratch.drawings.attention import query_steps

query_steps(".qu", q[-1], k, v, compared=1)

# %%
# Most of its weight goes to ``q``. Nobody told the head what to look for: training moved its parameters until the answers
# helped to guess.
#
# **Predict first.** Now we make the trained GPT *deaf*: each letter finds an empty notebook and can ask only itself. How large
# is the surprise at new words?
#
# * As before: the letter itself is what counts.
# * Larger, but far below a blind guess, which is log 27 = 3.3.
# * About 3.3.

deaf_loss = fmean(s.data for word in new_words for s in surprises(word, True))
print(f"GPT {gpt_loss:.2f}, deaf GPT {deaf_loss:.2f}")

assert (
    softmax([dot(past[-1][0][:D], key[:D]) / 2 for _, key, _ in past])[1].data
    > 0.6
)
assert gpt_loss + 0.02 < deaf_loss < 2.7
assert round(math.log(27), 1) == 3.3

# %%
# Larger, but far below a blind guess: it still knows the letter and its place. The rest came from earlier letters.
#
# The same in torch
# -----------------
#
# The GPT is complete. (If PyTorch is new to you, skip the code up to *And GPT-2?*) Here is our model in it, with the same
# random start. It sees all letters of a word together, so ``is_causal`` says that none may ask a later one.

import torch
import torch.nn.functional as F
from torch.nn import RMSNorm

torch.set_default_dtype(torch.float64)  # as many digits as Python's numbers
W = {m: torch.tensor(rows, requires_grad=True) for m, rows in start.items()}
torch_norm = RMSNorm(C, eps=1e-5, elementwise_affine=False)


def torch_gpt(ids):  # a letter's id is its index in letters
    x = W["letter"][ids] + W["place"][: len(ids)]
    lists = [F.linear(torch_norm(x), W[m]) for m in ("query", "key", "value")]
    q, k, v = (y.view(-1, C // D, D).transpose(0, 1) for y in lists)  # heads
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(y.transpose(0, 1).flatten(1), W["output"])
    hidden = F.relu(F.linear(torch_norm(x), W["mlp_in"]))
    x = x + F.linear(hidden, W["mlp_out"])
    return F.linear(torch_norm(x), W["lm_head"])


# %%
# **Predict first.** It learns from the same 800 words. How far from ours is its loss, at the worst of the 800 steps?
#
# * The two agree to nine digits or more.
# * They differ in the third digit: tiny differences grow.
# * They have little in common.

torch_losses = []
for lr, word in zip(rates, words):
    ids = torch.tensor([letters.index(letter) for letter in "." + word + "."])
    loss = F.cross_entropy(torch_gpt(ids[:-1]), ids[1:])
    loss.backward()
    torch_losses.append(loss.item())
    for w in W.values():
        w.data -= lr * w.grad
        w.grad = None
gaps = [abs(a - b) for a, b in zip(losses, torch_losses)]
print(f"largest difference in 800 steps: {max(gaps):.0e}")

assert max(gaps[:20]) < 1e-12 and max(gaps) < 1e-9

# %%
# The two agree to nine digits or more. They do the same sums in another order, so only rounding differs. But torch is faster.
# One word, forward and back, takes:

from time import process_time
from timeit import timeit

for name, run in (
    ("plain Python", lambda: sum(surprises(word)).backward()),
    ("torch", lambda: F.cross_entropy(torch_gpt(ids[:-1]), ids[1:]).backward()),
):
    print(
        f"{name:13} {50 * timeit(run, timer=process_time, number=20):5.1f} ms"
    )

# %%
# With larger matrices torch gains more.
#
# And GPT-2?
# ----------
#
# More of the same. ChatGPT is larger still, and was then trained to answer.

from lm_from_scratch.models.gpt2 import SIZES

print(f"{'':12} blocks heads     C     parameters")
print(f"{'this page':12} {1:6} {C // D:5} {C:5} {len(parameters):14,}")
for name, (blocks, heads, c) in ((m, s.values()) for m, s in SIZES.items()):
    print(
        f"{name:12} {blocks:6} {heads:5} {c:5} "
        f"{(50257 + 1024 + 2) * c + blocks * (12 * c + 13) * c:14,}"
    )
    assert c % heads == 0
assert 51283 * 768 + 12 * (12 * 768 + 13) * 768 == 124_439_808

# %%
# A *block* is attention and MLP, the three middle lines of ``gpt``. In GPT-2 many follow each other. It reads pieces of words,
# its MLP is wider, its bend is rounder, and it adds biases. In `its code <../1_gpt2/2_gpt2.ipynb>`_ you know:
#
# * ``wte`` and ``wpe`` are ``letter`` and ``place``; ``wte`` also ``lm_head``.
# * ``c_attn`` is ``query``, ``key`` and ``value``; the ``c_proj`` after it is ``output``.
# * ``ln_1``, ``ln_2`` and ``ln_f`` are the three calls of ``norm``, after subtracting the mean.
#
# A whole GPT without libraries is Andrej Karpathy's idea: `microgpt
# <https://karpathy.github.io/2026/02/12/microgpt/>`_, in 200 lines.
#
# Train a GPT-2 here, on letters again (*frequencies alone* only counts single letters):
#
# .. live:: train
#
# Exercises
# ---------
#
# 1. *Easy.* Begin with ``random.Random(1)``, then with 2. A good answer says whether the GPT still wins.
# 2. *Medium.* Let it read another list: names, cities, plants. A good answer compares it with counts, on names set aside.
# 3. *Hard.* Add a second block, with six matrices and a ``past`` of its own. A good answer compares surprise and time.
#
# Summary
# -------
#
# * A GPT turns each letter into a list, adds what attention and an MLP make of it, and turns the sum into probabilities of the
#   next letter. It draws one, and begins again.
# * In attention, a query is compared with the keys of earlier letters, and the answer mixes their values.
# * It learns by guessing each next letter of real text: surprise, slopes, a small step, and the next word.
