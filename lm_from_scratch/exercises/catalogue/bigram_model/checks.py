"""Bigrams by counting: what is a pair, what is added, and over what the surprise is a mean."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer, integers

Words = list[str]
Model = dict[str, dict[str, float]]


def pairs(words: Words, letters: str) -> torch.Tensor:
    """The places in `letters` of both letters of each pair, (2, n)."""
    found = [(a, b) for word in words for a, b in zip(f".{word}", f"{word}.", strict=True)]
    places = [[letters.index(letter) for letter in pair] for pair in found]
    return torch.tensor(places, dtype=torch.int64).view(-1, 2).T


def reference(words: Words, new_words: Words, letters: str) -> tuple[Model, float]:
    """By torch, in float64: the surprise is a cross-entropy."""
    counts = torch.ones(len(letters), len(letters), dtype=torch.float64)
    first, second = pairs(words, letters)
    counts.index_put_((first, second), torch.ones((), dtype=torch.float64), accumulate=True)
    table = counts / counts.sum(1, keepdim=True)
    first, second = pairs(new_words, letters)
    surprise = torch.nn.functional.cross_entropy(table.log()[first], second)
    rows = [dict(zip(letters, row, strict=True)) for row in table.tolist()]
    return dict(zip(letters, rows, strict=True)), surprise.item()


# -------------------------------------------------------------------------------- how it is used


def parts(result: Any) -> tuple[Any, Any]:
    """Model and surprise. Raises ``TypeError`` for any other result."""
    if result is None:
        raise TypeError("the result is None: is there a return statement?")
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError("the result must be a tuple of two things: the model and the surprise")
    model, surprise = result
    if not isinstance(model, dict) or not all(isinstance(row, dict) for row in model.values()):
        raise TypeError("the first part of the result must be a dict of dicts")
    return model, surprise


def model(function: Callable[..., Any], words: Words, new_words: Words, letters: str) -> Any:
    """Each probability by name."""
    found, _ = parts(function(words, new_words, letters))
    return {
        "too many letters": sorted(map(str, found.keys() - {*letters}))
        or sorted({str(b) for row in found.values() for b in row.keys() - {*letters}}),
        **{f"model[{a!r}][{b!r}]": found.get(a, {}).get(b) for a in letters for b in letters},
    }


def surprise(function: Callable[..., Any], words: Words, new_words: Words, letters: str) -> Any:
    """The second part alone."""
    _, mean = parts(function(words, new_words, letters))
    return {"the mean surprise": mean}


# ------------------------------------------------------------------------------------- arguments


def letters_of(g: Generator, text: str) -> list[str]:
    """In any order."""
    return [text[i] for i in torch.randperm(len(text), generator=g)]


def shuffled(g: Generator, text: str) -> str:
    return "".join(letters_of(g, text))


def drawn(g: Generator, letters: str, *lengths: int) -> Words:
    """Words of so many letters; each letter of the first is another one than its neighbours."""
    words = []
    for length in lengths:
        word = shuffled(g, letters)[:1]
        while len(word) < length:
            word += shuffled(g, letters.replace(word[-1], ""))[0]
        words.append(word)
    return words


def one_word(g: Generator) -> Call:
    """A letter begins it and no other place, another ends it and no other place."""
    a, b, c = letters_of(g, "abc")
    return call([a + b * integer(g, 3, 6) + c], drawn(g, "abc", 3), ".abc")


def several(g: Generator) -> Call:
    """Words that begin and end in other letters; one is there three times."""
    a, b, c, d = letters_of(g, "abcd")
    words = [a + b, c + a, d + c + b, a + b, a + b, c + d]
    words = [words[i] for i in torch.randperm(6, generator=g)]
    return call(words, drawn(g, "abcd", 2, 4), shuffled(g, ".abcd"))


def short(g: Generator) -> Call:
    """Words of one letter, learned and new."""
    a, b, c = letters_of(g, "abc")
    return call([a, b, c], [b, c], shuffled(g, ".abc"))


def nothing(g: Generator) -> Call:
    return call([], drawn(g, "xyz", 2, 3), shuffled(g, ".xyz"))


def unknown(g: Generator) -> Call:
    """Letters that are in no word."""
    a, b, c, *_ = letters_of(g, "abcde")
    return call([a + b, a + c + b], [a + b], shuffled(g, ".abcde"))


def seen_pairs(g: Generator) -> Call:
    """New words of one length, all pairs of which came."""
    a, b, c = letters_of(g, "abc")
    words = [a + b + c, b + c + a, c + a + b, a + c, b + b + a]
    return call(words, [a + b + c, b + c + a], shuffled(g, ".abc"))


def unseen_pairs(g: Generator) -> Call:
    a, b, c = letters_of(g, "abc")
    return call([a + b + b + c, a + b], [c + b + a, a + c + a], shuffled(g, ".abc"))


def unlike(g: Generator) -> Call:
    """New words of one letter and of many; all their pairs came."""
    a, b, c = letters_of(g, "abc")
    words = [c + b + a + b, b + c, a + b]
    return call(words, [c, (a + b) * integer(g, 3, 6), b], shuffled(g, ".abc"))


def many(g: Generator) -> Call:
    """Forty words, and ten new ones, of a dozen letters."""
    words = drawn(g, "abcdefghijkl", *integers(g, 3, 9, 50).tolist())
    return call(words[:40], words[40:], ".abcdefghijkl")


# ------------------------------------------------------------------------------- wrong answers

ONE, SEVERAL, SHORT, NOTHING = "one word", "several words", "words of one letter", "no words"
UNKNOWN = "letters that never came"
SEEN, UNSEEN, UNLIKE, MANY = "the surprise of known pairs", "the surprise of new pairs", \
    "a long word among short ones", "fifty words"  # fmt: skip

COUNTS, START = "counts = {a: dict.fromkeys(letters, 1) for a in letters}", \
    "dict.fromkeys(letters, 1)"  # fmt: skip
LEARN = 'for word in words:\n        for a, b in zip("." + word, word + "."):'
NEW = 'for word in new_words:\n        for a, b in zip("." + word, word + "."):'
ADD, TOTAL, ROW = "counts[a][b] += 1", "total = sum(row.values())", \
    "model[a] = {b: n / total for b, n in row.items()}"  # fmt: skip
SURPRISE, MEAN = "-math.log(model[a][b])", "sum(surprises) / len(surprises)"


def learned(pairs: str) -> str:
    return LEARN.replace('zip("." + word, word + ".")', pairs)


def met(pairs: str) -> str:
    return NEW.replace('zip("." + word, word + ".")', pairs)


#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("nothing is added: a pair that never came has the probability 0",
     {START: "dict.fromkeys(letters, 0)", "n / total": "(n / total if total else 0.0)"}, ONE),
    ("1 is added only to pairs that came",
     {ROW: "model[a] = {b: (n if n > 1 else 0) / total for b, n in row.items()}",
      TOTAL: "total = sum(n for n in row.values() if n > 1) or 1",
      SURPRISE: "-math.log(model[a][b] or 1e-12)"}, ONE),
    ("1 is added above, and the sum below is that of the counts",
     {TOTAL: "total = max(sum(row.values()) - len(letters), 1)"}, ONE),
    ("1 is added below, not 1 for each letter",
     {TOTAL: "total = sum(row.values()) - len(letters) + 1"}, ONE),
    ("the dot is not counted among the letters: one too few below",
     {TOTAL: "total = sum(row.values()) - 1"}, ONE),
    ("0.1 is added, not 1", {START: "dict.fromkeys(letters, 0.1)"}, ONE),
    ("first and second letter are exchanged: which letter comes before?",
     {ADD: "counts[b][a] += 1"}, ONE),
    ("divided by how often the second letter came, not the first",
     {ROW: "model[a] = {b: n / sum(counts[b].values()) for b, n in row.items()}"}, ONE),
    ("divided by all pairs: the probability of a pair, not of a letter after another",
     {TOTAL: "total = sum(sum(other.values()) for other in counts.values())"}, ONE),
    ("words have no beginning", {LEARN: learned('zip(word, word[1:] + ".")')}, ONE),
    ("words have no end", {LEARN: learned('zip("." + word, word)')}, ONE),
    ("pairs inside of words only", {LEARN: learned("zip(word, word[1:])")}, ONE),
    ("a pair reaches from the end of a word to the beginning of the next",
     {LEARN: learned('zip("." + "".join(words), "".join(words) + ".")').replace(
         "for word in words:", "for _ in words[:1]:")}, SEVERAL),
    ("words stand between two dots each: a dot follows a dot",
     {LEARN: learned("zip(text, text[1:])").replace(
         "for word in words:", 'for text in ["".join(f".{word}." for word in words)]:')}, SEVERAL),
    ("a word that is there several times counts once",
     {LEARN: LEARN.replace("in words", "in dict.fromkeys(words)")}, SEVERAL),
    ("a pair counts once for each word",
     {LEARN: learned('{*zip("." + word, word + ".")}')}, ONE),
    ("words of one letter are left out",
     {LEARN: learned('zip("." + word, word + ".") if len(word) > 1 else ()')}, SHORT),
    ("the new words are learned, too", {LEARN: LEARN.replace("in words", "in words + new_words")},
     ONE),
    ("letters that never came have no row",
     {COUNTS: COUNTS.replace("in letters}", 'in letters if a in ".".join(["", *words, ""])}'),
      SURPRISE: "-math.log(model.get(a, {}).get(b, 1 / len(letters)))"}, UNKNOWN),
    ("no words give no model",
     {COUNTS: f"{COUNTS}\n    if not words:\n        return {{}}, math.log(len(letters))"},
     NOTHING),
    ("the surprise of the words that were learned",
     {NEW: NEW.replace("in new_words", "in words or new_words")}, SEEN),
    ("the mean of the means of the words, where a short word weighs as much as a long one",
     {NEW: f"for word in new_words:\n        n = len(word) + 1\n        {NEW.splitlines()[1][8:]}",
      SURPRISE: "-math.log(model[a][b]) / n", MEAN: "sum(surprises) / len(new_words)"}, UNLIKE),
    ("the surprise of a word: a sum over its pairs, divided by the number of words",
     {MEAN: "sum(surprises) / len(new_words)"}, SEEN),
    ("the sum of all surprises", {MEAN: "sum(surprises)"}, SEEN),
    ("divided by the number of letters: the end of each word is forgotten",
     {MEAN: "sum(surprises) / sum(map(len, new_words))"}, SEEN),
    ("the beginning of a word is no surprise", {NEW: met('zip(word, word[1:] + ".")')}, SEEN),
    ("the end of a word is no surprise", {NEW: met('zip("." + word, word)')}, SEEN),
    ("minus is missing", {SURPRISE: "math.log(model[a][b])"}, SEEN),
    ("bits, by the logarithm to base 2", {SURPRISE: "-math.log2(model[a][b])"}, SEEN),
    ("the perplexity, which is exp of the mean surprise",
     {f"model, {MEAN}": f"model, math.exp({MEAN})"}, SEEN),
    ("the surprise of the mean probability",
     {SURPRISE: "model[a][b]", f"model, {MEAN}": f"model, -math.log({MEAN})"}, SEEN),
    ("the mean of 1 - p", {SURPRISE: "1 - model[a][b]"}, SEEN),
    ("pairs that never came are left out of the mean",
     {NEW + "\n            surprises.append":
      NEW + "\n            if counts[a][b] > 1:\n                surprises.append",
      MEAN: "sum(surprises) / max(len(surprises), 1)"}, UNSEEN),
    ("probabilities are rounded", {"n / total": "round(n / total, 3)"}, MANY),
    ("percent", {"n / total": "100 * n / total"}, ONE),
]  # fmt: skip

CASES = (
    Case(ONE, one_word, "write down all pairs of the word, with its beginning and its end, and "
         "one more of each", points=2, use=model, teaching="small enough to count by hand"),
    Case(SEVERAL, several, "each word has its own beginning and end, as often as it is there",
         points=2, use=model),
    Case(SHORT, short, "`a` has two pairs, `.a` and `a.`", use=model),
    Case(NOTHING, nothing, "where nothing was counted all letters have the same probability",
         use=model),
    Case(UNKNOWN, unknown, "all of `letters` have a row, and are in each row", use=model,
         teaching="letters without a count, beside others"),
    Case(SEEN, seen_pairs, "-log p of each pair, and then the mean", points=2, use=surprise,
         teaching="the mean alone: words of one length, and pairs that came"),
    Case(UNSEEN, unseen_pairs, "a pair that never came has a probability, so it has a surprise",
         use=surprise),
    Case(UNLIKE, unlike, "each pair weighs the same, in a long word and in a short one",
         use=surprise),
    Case(MANY, many, "a larger table: the same rules", use=model,
         teaching="what nobody has made up to catch a mistake"),
)  # fmt: skip

EXERCISE = Exercise(
    name="bigram_model", function="bigram_model", page="0_from_zero/3_bigrams",
    minutes=25, difficulty=1,
    outcome="Count pairs of letters, turn counts into probabilities, and measure the surprise "
            "on new words.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Begin with the counts: a dict that holds, for each letter, a dict of numbers. Print it "
        "for one word, and compare it with what you count by hand.",
        'What do `"." + word` and `word + "."` have in common with the first and the second '
        "letters of all pairs? `zip` goes through two texts at once.",
        "If each count begins with 1 in the place of 0, nothing has to be added later, and the sum "
        "of a row is what to divide by.",
        "For the mean, collect the surprises of all pairs of all words in one list first. How "
        "many are there for a word of n letters?",
    ),
)  # fmt: skip
