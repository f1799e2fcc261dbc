"""Other right answers to bigram_model, and wrong ones of a second person."""

import math
from collections import Counter, defaultdict
from fractions import Fraction
from itertools import pairwise

import numpy as np
import torch


def by_one_text(words, new_words, letters):
    """All words in a row: one dot stands for an end and a beginning."""
    seen = Counter(pairwise(f".{'.'.join(words)}.")) if words else Counter()
    before = Counter()
    for (a, _), n in seen.items():
        before[a] += n
    V = len(letters)
    model = {a: {b: (seen[a, b] + 1) / (before[a] + V) for b in letters} for a in letters}
    text = f".{'.'.join(new_words)}."
    return model, math.fsum(math.log(1 / model[a][b]) for a, b in pairwise(text)) / (len(text) - 1)


def by_numpy(words, new_words, letters):
    """A table of counts; the surprise weighs each pair of the table."""

    def table(some):
        counts = np.zeros((len(letters), len(letters)))
        for word in some:
            ids = [letters.index(letter) for letter in f".{word}."]
            np.add.at(counts, (ids[:-1], ids[1:]), 1)
        return counts

    counts = table(words) + 1
    p = counts / counts.sum(axis=1, keepdims=True)
    met = table(new_words)
    model = {a: {b: p[i, j] for j, b in enumerate(letters)} for i, a in enumerate(letters)}
    return model, -(met * np.log(p)).sum() / met.sum()


def by_fractions(words, new_words, letters):
    """Exact probabilities, and one product over all pairs."""
    follows = defaultdict(list)
    for word in words:
        before = "."
        for letter in [*word, "."]:
            follows[before].append(letter)
            before = letter
    model, product, n = {}, Fraction(1), 0
    for a in letters:
        row = follows[a]
        model[a] = {b: Fraction(row.count(b) + 1, len(row) + len(letters)) for b in letters}
    for word in new_words:
        padded = f".{word}."
        for i in range(1, len(padded)):
            product *= model[padded[i - 1]][padded[i]]
            n += 1
    surprise = math.log(product.denominator) - math.log(product.numerator)
    return {a: {b: float(p) for b, p in row.items()} for a, row in model.items()}, surprise / n


def by_learning(words, new_words, letters):
    """Scores whose softmax is the smoothed table: what gradient descent would end at."""
    place = {letter: i for i, letter in enumerate(letters)}
    counts = torch.ones(len(letters), len(letters), dtype=torch.float64)
    for word in words:
        for a, b in zip("." + word, word + "."):
            counts[place[a], place[b]] += 1
    log_p = counts.log().log_softmax(-1)
    chosen = [log_p[place[a], place[b]] for w in new_words for a, b in zip("." + w, w + ".")]
    model = {a: dict(zip(letters, log_p[place[a]].exp().tolist())) for a in letters[::-1]}
    return model, -torch.stack(chosen).mean().item()


class Row(dict):
    """The probabilities after a letter, from a list of all letters that came after it."""

    def __init__(self, after, letters):
        n = len(after) + len(letters)
        super().__init__((b, (after.count(b) + 1) / n) for b in reversed(letters))


def by_running_mean(words, new_words, letters):
    """Rows of a class of their own; the mean is kept up to date."""
    everything = [(a, b) for word in words for a, b in zip(["."] + list(word), list(word) + ["."])]
    model = {a: Row([b for first, b in everything if first == a], letters) for a in letters}
    mean, n = 0.0, 0
    for word in new_words:
        before = "."
        for following in [*word, "."]:
            n += 1
            mean += (-math.log(model[before][following]) - mean) / n
            before = following
    return model, mean


#: Each letter is left as often as it is reached: the end of a word is where the next one begins.
BY_COLUMN = {
    "total = sum(row.values())": "total = sum(other[a] for other in counts.values())",
}

RIGHT = [by_one_text, by_numpy, by_fractions, by_learning, by_running_mean, BY_COLUMN]

MODEL = "return model, sum(surprises) / len(surprises)"

WRONG = [
    ("a list of the two", {MODEL: MODEL.replace("return ", "return [") + "]"}),
    ("the mean surprise alone", {MODEL: MODEL.replace("model, ", "")}),
    ("the surprise is no number but a list", {MODEL: "return model, surprises"}),
    ("keys are pairs",
     {MODEL: MODEL.replace("model,", "{(a, b): p for a in model for b, p in model[a].items()},")}),
    ("the end has a sign of its own",
     {MODEL: MODEL.replace("model,", "{a: row | {'END': row['.']} for a, row in model.items()},")}),
    ("letters are sorted, and the dot is put in front again",
     {"counts = {a: dict": "letters = '.' + ''.join(sorted(letters))\n    counts = {a: dict",
      "total = sum(row.values())": "total = sum(row[b] for b in letters)"}),
    ("the last new word is taken off the caller's list",
     {MODEL: f"new_words.pop()\n    {MODEL}"}),
]  # fmt: skip

SURVIVORS = {}
