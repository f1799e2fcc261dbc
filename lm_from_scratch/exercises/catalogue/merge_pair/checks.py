"""One merge of byte-pair encoding: what is counted, who wins a tie, and what is replaced."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer
from lm_from_scratch.text.tokenizer import learn_merges, merge_pair

Words = list[list[int]]
Step = tuple[tuple[int, int] | None, Words]


def merge_step(words: Words, counts: list[int], new_id: int) -> Step:
    """The package's functions, with one letter for each id, in the order of the ids."""
    letters: Counter[tuple[str, ...]] = Counter()
    for word, count in zip(words, counts):
        letters[tuple(map(chr, word))] += count
    pairs = learn_merges(letters, 1)
    if not pairs:
        return None, words
    ((a, b),) = pairs
    merged = [merge_pair([chr(i) for i in word], (a, b)) for word in words]
    return (ord(a), ord(b)), [
        [new_id if piece == a + b else ord(piece) for piece in word] for word in merged
    ]


def step(function: Callable[..., Any], words: Words, counts: list[int], new_id: int) -> Any:
    """One step; its results by name."""
    result = function(words, counts, new_id)
    if result is None:
        return None
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError("the result must be a tuple of two things: the pair and the words")
    pair, merged = result
    if not isinstance(merged, list) or not all(isinstance(word, list) for word in merged):
        raise TypeError("the second part of the result must be a list of words, each a list of ids")
    return {
        "the pair": str(pair),
        "the words": [list(word) for word in merged],
    }


def some_ids(g: Generator, n: int) -> list[int]:
    """Different ids in any order, some below 300 and some near 150,000."""
    few = torch.cat([torch.arange(300), torch.arange(150_000, 150_300)])
    return few[torch.randperm(600, generator=g)[:n]].tolist()


def fresh(g: Generator) -> int:
    """An id that is neither in use nor the next one."""
    return 151_700 + 60 * integer(g, 0, 2)


def plain(g: Generator) -> Call:
    a, b, c, d, e = some_ids(g, 5)
    words = [[c, a, b, d], [e], [a, b, e], [d, e, c]]
    return call(words, [integer(g, 6, 10), 1, integer(g, 2, 5), integer(g, 1, 4)], fresh(g))


def frequent_word(g: Generator) -> Call:
    """The most frequent pair is in one word that is listed twice; another is in more words."""
    a, b, c, d, e, f = some_ids(g, 6)
    n = integer(g, 4, 9)
    words = [[a, b], [c, d], [e, f], [d, c, d], [a, b], [c, d, e]]
    return call(words, [n, 1, 2 * n - 2, 1, n, 1], fresh(g))


def twice_in_a_word(g: Generator) -> Call:
    a, b, c, d, e = some_ids(g, 5)
    n = integer(g, 3, 8)
    return call([[a, b, a, b, c, a, b], [d, e]], [n, 2 * n + 1], fresh(g))


def three_equal(g: Generator) -> Call:
    a, b, c = some_ids(g, 3)
    words = [[a, a, a], [b, a, a, a, c], [a, a, a, a, a], [c, a, a, a, a]]
    return call(words, [integer(g, 1, 5) for _ in words], fresh(g))


def overlap(g: Generator) -> Call:
    a, b, c = some_ids(g, 3)
    n = integer(g, 3, 8)
    return call([[b, c], [a, a, a, a]], [3 * n - 1, n], fresh(g))


def tie(g: Generator) -> Call:
    """Ids of two and three digits: as texts they are in another order."""
    a, b, c, d = integer(g, 10, 20), integer(g, 20, 60), integer(g, 60, 100), integer(g, 100, 200)
    words = [[c, d], [b, d], [c, a], [b, c], [d, c], [d, a], [c, b]]
    return call(words, [integer(g, 1, 6)] * 7, fresh(g))


def both_directions(g: Generator) -> Call:
    a, b, c, d, e = some_ids(g, 5)
    n = integer(g, 4, 9)
    return call([[a, b], [b, a], [c, d], [e, c, d], [e, d, c]], [n, n - 1, n, 1, 1], fresh(g))


def borders(g: Generator) -> Call:
    a, b, c, d, e, x, y = some_ids(g, 7)
    n = integer(g, 3, 8)
    return call([[x, a, y], [x, b, y], [x, c, y], [y, d], [e, y, d]], [n, n, n, n - 1, 2], fresh(g))


def digits(g: Generator) -> Call:
    """As text, the pair 12 3 is also in 112 3 and in 12 34."""
    a, b, n = integer(g, 1, 10), integer(g, 1, 10), integer(g, 3, 8)
    near = [[10 * integer(g, 1, 10) + a, b], [a, 10 * b + integer(g, 0, 10)]]
    return call([[a, b], [*near[0], a, b], near[0], near[1]], [n, 2, 1, 1], fresh(g))


def nothing_left(g: Generator) -> Call:
    a, b, c = some_ids(g, 3)
    return call([[a], [b], [c]], [4, integer(g, 1, 9), 2], fresh(g))


# ------------------------------------------------------------------------------- wrong answers

BEST = "min(pairs, key=lambda pair: (-pairs[pair], pair))"
SECOND = "min(pairs, key=lambda pair: (-pairs[pair], pair[::-1]))"
COUNT = "for pair in pairwise(word):"
MERGED, RESULT = "merged.append(new)", "return best, merged"
COUNTED = f"{COUNT}\n            pairs[pair] += count"
MERGE = """\
        new = []
        for i in word:
            if new and (new[-1], i) == best:
                new[-1] = new_id
            else:
                new.append(i)
"""
LOST = (
    "for n, i in enumerate(word):\n"
    "            if n > 1 and tuple(word[n - 2 : n]) == best:\n"
    "                continue\n"
)

PLAIN = "one pair, more frequent than all others"
WEIGHT, TWICE = "a frequent word weighs more than many rare ones", "several times in one word"
THREE, OVERLAP = "three equal ids in a row", "pairs that overlap are all counted"
TIE = "several pairs equally frequent"
DIRECTION, DIGITS = "a pair and its reverse", "ids with the same digits"
BORDER, NONE = "the end of a word and the start of the next", "no pair left"


#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("each word counts once, however frequent it is", {"+= count": "+= 1"}, WEIGHT),
    ("a word that is listed twice has its last count alone",
     {"in zip(words, counts):": "in dict(zip(map(tuple, words), counts)).items():"}, WEIGHT),
    ("a pair has the count of the last word that holds it", {"+= count": "= count"}, PLAIN),
    ("the first pair found wins a tie", {BEST: "max(pairs, key=lambda p: pairs[p])"}, TIE),
    ("only the first occurrence in a word is replaced",
     {"if new and": "if new and new_id not in new and"}, TWICE),
    ("the second id of the pair stays after the new id",
     {"new[-1] = new_id": "new[-1:] = [new_id, i]"}, PLAIN),
    ("an id is used twice: 7 7 7 becomes 300 300",
     {MERGE: """\
        hits = [pair == best for pair in pairwise(word)]
        new = [
            new_id if after else i
            for i, before, after in zip(word, [False, *hits], [*hits, False])
            if after or not before
        ]
"""}, THREE),
    ("the new id swallows what follows: 7 7 7 becomes 300",
     {"(new[-1], i) == best": "new[-1] in (best[0], new_id) and i == best[1]"}, THREE),
    ("of equal first ids the second is not looked at",
     {BEST: "min(pairs, key=lambda pair: (-pairs[pair], pair[0]))"}, TIE),
    ("ids are ordered as texts, 10 before 9",
     {BEST: "min(pairs, key=lambda pair: (-pairs[pair], str(pair)))"}, TIE),
    ("replaced as text: 12 3 is found in 112 3",
     {RESULT: "old = ' '.join(map(str, best))\n"
      "    texts = (' '.join(map(str, word)).replace(old, str(new_id)) for word in words)\n"
      "    return best, [[int(i) for i in text.split()] for text in texts]"}, DIGITS),
    ("equal words become one",
     {"pairs = Counter()": "unique = dict(zip(map(tuple, words), counts))\n"
      "    words, counts = [[*word] for word in unique], unique.values()\n    pairs = Counter()"},
     WEIGHT),
    ("the larger ids win a tie", {BEST: "max(pairs, key=lambda p: (pairs[p], p))"}, TIE),
    ("the second id decides a tie before the first", {BEST: SECOND}, TIE),
    ("the last pair found wins a tie",
     {BEST: "max(reversed(list(pairs)), key=lambda p: pairs[p])"}, TIE),
    ("replaced from right to left",
     {MERGE: """\
        new = list(word)
        for i in reversed(range(len(word) - 1)):
            if tuple(new[i : i + 2]) == best:
                new[i : i + 2] = [new_id]
"""}, THREE),
    ("a pair counts once for each word that holds it",
     {COUNT: "for pair in set(pairwise(word)):"}, TWICE),
    ("pairs that overlap are counted as one",
     {COUNTED: "text = ''.join(map(chr, word))\n"
      "        for a, b in set(pairwise(text)):\n"
      "            pairs[ord(a), ord(b)] += count * text.count(a + b)"}, OVERLAP),
    ("a pair reaches from one word into the next",
     {f"for word, count in zip(words, counts):\n        {COUNTED}":
      "flat = [(i, count) for word, count in zip(words, counts) for i in word]\n"
      "    for (a, count), (b, _) in pairwise(flat):\n        pairs[a, b] += count"}, BORDER),
    ("a pair and its reverse are counted together",
     {"pairs[pair] += count": "pairs[tuple(sorted(pair))] += count"}, DIRECTION),
    ("the reverse of the pair is replaced, too",
     {"i) == best": "i) in (best, best[::-1])"}, DIRECTION),
    ("the id that follows a replaced pair is lost", {"for i in word:\n": LOST}, PLAIN),
    ("the last id of a word is lost", {"for i in word:": "for i in word[:-1]:"}, PLAIN),
    ("words of one id are left out", {MERGED: "merged += [new] if len(word) > 1 else []"}, PLAIN),
    ("the ids of a pair are added, as texts would be",
     {RESULT: "return best, [[sum(best) if i == new_id else i for i in w] for w in merged]"},
     PLAIN),
    ("the new id is the largest plus 1, not the one given",
     {"new[-1] = new_id": "new[-1] = max(max(w) for w in words) + 1"}, PLAIN),
    ("the rarest pair instead of the most frequent", {"-pairs[pair]": "pairs[pair]"}, PLAIN),
    ("the pair's own ids stay, and the new id comes after them",
     {"new[-1] = new_id": "new += [i, new_id]"}, PLAIN),
    ("written into the caller's words",
     {MERGED: "word[:] = new", RESULT: "return best, words"}, PLAIN),
    ("a pair is looked for where there is none",
     {"    if not pairs:\n        return None, words\n": ""}, NONE),
]  # fmt: skip

CASES = (
    Case(PLAIN, plain, "count all pairs of neighbours first, then replace the most frequent one",
         points=2, use=step),
    Case(WEIGHT, frequent_word,
         "a pair of word i counts counts[i] times, and a word that is in the list twice "
         "counts twice", use=step),
    Case(TWICE, twice_in_a_word,
         "a word may hold a pair several times: all of them count, and all are replaced", use=step,
         teaching="counting once a word is told apart from counting no overlaps"),
    Case(THREE, three_equal,
         "go from left to right, and after a replacement go on after both ids: 7 7 7 becomes 300 "
         "7", use=step),
    Case(OVERLAP, overlap,
         "7 7 7 holds the pair (7, 7) at two places: counting looks at every place", use=step),
    Case(TIE, tie,
         "of equal counts the smaller first id wins, then the smaller second id: the order of the "
         "words must not matter", points=2, use=step),
    Case(DIRECTION, both_directions, "(2, 3) and (3, 2) are counted and replaced apart", use=step,
         teaching="the reverse alone; the ties above have it too"),
    Case(DIGITS, digits, "compare ids, not their digits: 12 3 is no part of 112 3", use=step),
    Case(BORDER, borders, "count inside each word: a merge stays in its word", use=step,
         teaching="the border alone, without the ties that it upsets elsewhere"),
    Case(NONE, nothing_left, "if all words have one id, the pair is None", use=step),
)  # fmt: skip

EXERCISE = Exercise(
    name="merge_pair", function="merge_step", page="1_gpt2/1_tokens", minutes=20, difficulty=1,
    outcome="Write one step of byte-pair encoding so that its counts, its ties and its "
            "replacements are those of the library.",
    reference=merge_step, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Two passes over the words: one counts, one replaces. A `Counter` holds the counts.",
        "`pairwise(word)` yields the pairs of a word. `min` with the key "
        "`(-pairs[pair], pair)` finds the most frequent, and of equal ones the smallest.",
        "An index that you move yourself can take one step or two. After a pair that was "
        "replaced, which token is looked at next? Try `aaa` with the pair (a, a) by hand.",
    ),
)  # fmt: skip
