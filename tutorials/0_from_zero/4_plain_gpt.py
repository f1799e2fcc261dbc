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
new_words = [word for word in english if word[:4] in aside]
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
ax.plot(800, 2.34, "o", color="black", label="GPT: new words")
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
# Untrained, it babbles. The counts do not know how long a word is. The trained GPT does, and you can say much of what it
# invents.
#
# The curve is its mean *surprise* at each letter, and falls while it reads 800 words. The dot is its surprise at *new words*,
# which neither program has read. The dashed line is what the counts reach there. The dotted line is what they reach if they
# look back two letters, the best of all tables in the last lesson. The GPT does better.
#
# All words come from Python's manual, and have 4 to 7 letters, so that training takes seconds. The GPT is made of Python lists
# and of ``Value``, from `the first lesson <1_autograd.ipynb>`_.
#
# Letters become lists
# --------------------
#
# A network computes with numbers. So each letter gets a list of 12 numbers, its *embedding*. It matters where a letter stands,
# too, so each of 8 places (the dot, then up to 7 letters) also gets such a list. All of them
# begin at random near 0, and training will change them.
#
# Lists of one length, one below another, are a *matrix*. This GPT is nine of them:

from lm_from_scratch.training.autograd import Value, dot

rng = random.Random(0)
rng.shuffle(words)
V, T, C, D = 27, 8, 12, 4  # letters and dot, places, list, part of a list


def matrix(rows, columns):
    return [[rng.gauss(0, 0.15) for _ in range(columns)] for _ in range(rows)]


start = {"letter": matrix(V, C), "place": matrix(T, C), "lm_head": matrix(V, C)}
for name in ("query", "key", "value", "output", "mlp_in", "mlp_out"):
    start[name] = matrix(C, C)
model = {m: [[*map(Value, row)] for row in rows] for m, rows in start.items()}
parameters = [p for rows in model.values() for row in rows for p in row]

assert len(parameters) == 1608 and len(model) == 9
assert len(letters) == V and max(map(len, words)) + 1 == T

# %%
# That makes 1,608 parameters. To compute with them we need three tools:
#
# * ``linear`` multiplies a list with a row of a matrix, number by number, and adds up. The sums of all rows are a new list.
#   (``dot`` makes a single ``Value`` of such a sum, which is faster.)
# * ``norm`` makes a list louder or softer, until the mean of its squares is 1. So none drowns the others.
# * ``softmax`` makes probabilities of scores, as in the last lesson.


def linear(x, rows):
    return [dot(row, x) for row in rows]


def norm(x):
    scale = (dot(x, x) / len(x) + 1e-5) ** -0.5  # 1e-5: never divide by 0
    return [number * scale for number in x]


def softmax(scores):
    powers = [score.exp() for score in scores]
    share = 1 / sum(powers)
    return [power * share for power in powers]


assert math.isclose(
    fmean(x.data**2 for x in norm([*map(Value, (30, -40, 10))])),
    1,
    rel_tol=1e-6,
)

# %%
# Each letter asks, earlier letters answer
# ----------------------------------------
#
# A table that looks back far needs more words than there are. *Attention* does without a table. Each letter makes three lists
# from its own, as for a search in a library:
#
# * a *query*: what it looks for;
# * a *key*, like the title of a book: what it can be found by;
# * a *value*, like the pages: what it has to tell. (Not the class ``Value``.)
#
# ``dot`` compares the query with the key of an earlier letter: the better they fit, the higher the score. Softmax turns the
# scores of all keys into *weights*, which sum to 1. The answer is all the values, each times its weight, added up.


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
# before it, but none after it. They are not there yet.
#
# The 12 numbers are shared among three *heads*. Each has 4 of them, so a letter asks three questions at once. The matrix
# ``output`` mixes the answers. (A sum of more products tends to be larger. Dividing by the root of their number, here 2, makes
# up for that.)
#
# The whole model
# ---------------
#
# In attention, letters hear about each other. Then each works on its own. The *MLP* (multi-layer perceptron) is a network as in
# `lesson 2 <2_line_and_bend.ipynb>`_: lines, bends, and sums of them. Both results are *added* to the letter's list, so what was
# in it stays. The last matrix makes 27 scores of the list: one for each letter that may come next, and for the dot.


def add(x, y):
    return [a + b for a, b in zip(x, y)]


def gpt(letter, place, past):
    x = add(model["letter"][letters.index(letter)], model["place"][place])
    x = add(x, attention(norm(x), past))
    hidden = [number.relu() for number in linear(norm(x), model["mlp_in"])]
    x = add(x, linear(hidden, model["mlp_out"]))
    return linear(norm(x), model["lm_head"])


# %%
# That is a GPT. To invent a word, draw a letter by its probability, give it to the model, and draw the next one.


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
# Training is what it was before: read a word, let ``backward`` find all slopes of its mean surprise, take a step downhill. A
# single word says little about all others, so each step goes a bit astray. The learning rate falls from 0.5 to 0; with small
# steps at the end, these errors average out.


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

assert abs(gpt_loss - 2.34) < 0.06
assert [line.get_label()[:8] for line in ax.lines[2:]] == ["counts, "] * 2
assert all(gpt_loss + 0.015 < line.get_ydata()[0] for line in ax.lines[2:])
assert 900 < len(words) < 1050 and 200 < len(new_words) < 300
for recorded, mean in zip(
    ax.lines[0].get_ydata(),
    (fmean(losses[step : step + 50]) for step in range(0, 800, 50)),
):
    assert abs(recorded - mean) < 0.3

# %%
# It has: it beats the counts, though it read 800 words, each once. They had all, more than 900.
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
# Nobody told the head what to look for. Training moved its parameters until the answers helped to guess.
#
# **Predict first.** Now we make the trained GPT *deaf*: each letter finds an empty notebook and can ask only itself. How large
# is the surprise at new words?
#
# * As before: the letter itself is what counts.
# * Larger, but far below a blind guess, which is log 27 = 3.3.
# * About 3.3.

deaf_loss = fmean(s.data for word in new_words for s in surprises(word, True))
print(f"GPT {gpt_loss:.2f}, deaf GPT {deaf_loss:.2f}")

assert gpt_loss + 0.02 < deaf_loss < 2.7
assert round(math.log(27), 1) == 3.3

# %%
# Larger, but far below a blind guess: the GPT still knows the letter and its place. The rest came from earlier letters.
#
# The same in torch
# -----------------
#
# PyTorch computes with whole matrices at once. Here is our model in it, with the same random numbers at the start. It sees all
# letters of a word together, so it must be told that none may ask a later one: ``is_causal``.

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
# * They differ in the third digit: tiny differences grow from step to step.
# * They have little in common: torch trains in its own way.

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
# The two agree to nine digits or more. Both do the same sums, in another order, and only rounding differs. But torch is faster.
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
# And these matrices are only 12 by 12. The larger they are, the more torch gains.
#
# And GPT-2?
# ----------
#
# More of the same:

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
# its MLP is wider, its bend is rounder, and it adds some biases. The rest of `its code <../1_gpt2/2_gpt2.ipynb>`_ you know:
#
# * ``wte`` and ``wpe`` are ``letter`` and ``place``.
# * ``c_attn`` is ``query``, ``key`` and ``value``; the ``c_proj`` after it is ``output``.
# * ``cache.update`` is ``past.append``, and ``attend`` is the loop over the heads.
# * In the MLP, ``c_fc`` is ``mlp_in``, and ``c_proj`` is ``mlp_out``.
# * ``ln_1``, ``ln_2`` and ``ln_f`` are the three calls of ``norm``.
#
# A whole GPT without libraries is Andrej Karpathy's idea. His `microgpt
# <https://karpathy.github.io/2026/02/12/microgpt/>`_ learns names in 200 lines, and you can read all of them now.
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
# * A GPT gives each letter a list of numbers, adds what attention and an MLP make of it, and turns the sum into scores for the
#   next letter.
# * In attention, a query is compared with the keys of earlier letters, and the answer mixes their values.
# * Plain Python and torch do the same sums. GPT-2 is more of the same.
