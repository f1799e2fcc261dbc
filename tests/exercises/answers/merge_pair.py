"""Answers to merge_pair: other right ones, and wrong ones of a second person."""

from collections import Counter
from itertools import pairwise

import torch


def by_text(words, counts, new_id):
    """The words as text: str.replace goes from left to right, too."""
    text = ["".join(map(chr, word)) for word in words]
    totals: dict[str, int] = {}
    for word, count in zip(text, counts):
        for i in range(len(word) - 1):
            totals[word[i : i + 2]] = totals.get(word[i : i + 2], 0) + count
    if not totals:
        return None, [list(word) for word in words]
    best = sorted(totals, key=lambda pair: (-totals[pair], pair))[0]
    merged = [[ord(letter) for letter in word.replace(best, chr(new_id))] for word in text]
    return (ord(best[0]), ord(best[1])), merged


def by_slices(words, counts, new_id):
    """Copies of the words that shrink, and a running best pair."""
    total: Counter[tuple[int, int]] = Counter()
    for word, count in zip(words, counts):
        total.update(dict.fromkeys(pairwise(word), 0))
        for pair, times in Counter(pairwise(word)).items():
            total[pair] += times * count
    best: tuple[int, int] | None = None
    for pair in sorted(total):
        if best is None or total[pair] > total[best]:
            best = pair
    merged = [list(word) for word in words]
    for word in merged:
        i = 0
        while i < len(word):
            if best is not None and word[i : i + 2] == [*best]:
                word[i : i + 2] = [new_id]
            i += 1
    return best, merged


def by_index(words, counts, new_id):
    """An index that goes on by one or two. Every word is repeated for counting."""
    repeated = [word for word, n in zip(words, counts) for _ in range(n)]
    every = [pair for word in repeated for pair in pairwise(word)]
    if not every:
        return None, [word[:] for word in words]
    best = max(set(every), key=lambda pair: (every.count(pair), -pair[0], -pair[1]))
    merged = []
    for word in words:
        new, i = [], 0
        while i < len(word):
            hit = tuple(word[i : i + 2]) == best
            new.append(new_id if hit else word[i])
            i += 1 + hit
        merged.append(new)
    return best, merged


def by_recursion(words, counts, new_id):
    """Counts in a table of ids, and a function that merges the head of a word."""
    known = sorted({i for word in words for i in word})
    table = torch.zeros(len(known), len(known), dtype=torch.long)
    for word, count in zip(words, counts):
        for a, b in pairwise(word):
            table[known.index(a), known.index(b)] += count
    if not table.any():
        return None, words
    best = divmod(int(table.flatten().argmax()), len(known))  # the first of the largest
    best = known[best[0]], known[best[1]]

    def merge(word):
        if len(word) < 2:
            return word
        if (word[0], word[1]) == best:
            return [new_id, *merge(word[2:])]
        return [word[0], *merge(word[1:])]

    return best, [merge(word) for word in words]


RIGHT = [by_text, by_slices, by_index, by_recursion]

RESULT, NONE = "return best, merged", "return None, words"

WRONG = [
    ("words of one id are left out",
     {"if not pairs:": "words = [word for word in words if len(word) > 1]\n    if not pairs:"}),
    ("the pair is a list", {RESULT: "return list(best), merged"}),
    ("without a pair there are no words", {NONE: "return None, []"}),
    ("without a pair there is None alone", {NONE: "return None"}),
    ("the count is returned, too",
     {RESULT: "return (best, pairs[best]), merged", NONE: "return (None, 0), words"}),
]  # fmt: skip
