r"""
From text to tokens
===================

A language model never sees your letters. First a small program, the *tokenizer*, cuts the text into
pieces and gives the model a number for each.

Here is a sentence, cut for the model of this course. Each box is one piece, a *token*. The number
below it is its *id*, and the ids are all that the model gets.
"""

# sphinx_gallery_thumbnail_number = 2
# sphinx_gallery_words = ["BPE", "subword", "vocab_size", "vocab.json", "tiktoken", "strawberry", "trailing space", "byte pair encoding", "BPE merges", "merges.txt", "Ġ", "encode", "decode", "input_ids", "how many tokens", "how does a computer read text", "text into numbers", "turn text into numbers", "letters into numbers", "count letters in a word", "what is a token", "tokens per word", "characters per token", "tokens and words", "split text into pieces", "train a tokenizer", "tokenize", "spelling backwards", "reverse a word", "upper case", "capital letters", "size of a vocabulary", "how large a vocabulary", "unknown words", "rare words", "out of vocabulary", "price per token", "cost of a prompt", "other languages", "misspelt words", "why not letters", "why not whole words", "GPT-4 tokenizer", "subwords explained", "numbers as tokens"]

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import gpt2 as drawings

model, tokenizer = load_shipped("gpt2-docs")
sentence = "The function returns 31415 strawberries in 中国."
ids = tokenizer.encode(sentence)

assert tokenizer.decode(ids) == sentence
assert tokenizer.pieces(ids)[3:10] == [
    " 3", "14", "15", " st", "raw", "ber", "ries",
]  # fmt: skip
assert len(tokenizer.encode("中国")) == 2 * 3

drawings.tokens(tokenizer.pieces(ids), ids)

# %%
# Four things to notice (``␣`` is a space):
#
# * **A space belongs to the word after it.** ``␣function`` is one token. (Before 中国 the space stays
#   alone: the tokenizer has never met the two together.)
# * **A rare word falls into parts.** The documents this tokenizer learned from are about Python, not
#   fruit, so *strawberries* takes four tokens. Ask a model how often the letter r occurs in it: the
#   model sees four numbers and no letter.
# * **A number is cut where it makes no sense.** 31415 becomes ``␣3``, ``14`` and ``15``.
# * **One Chinese character takes three tokens.** Each ``▯`` is a third of a character.
#
# Who chose these pieces? Nobody. They come from counting, and this lesson shows how.
#
# Why not letters? Why not words?
# -------------------------------
#
# With letters, a model needs only about a hundred different tokens. But every text gets long, and a
# model spends time on each token.
#
# With words, texts are short. But what about a word that the model has never seen? How often does
# that happen? Our text is the language reference that comes with Python. We keep a few of its
# documents aside and collect all words of the others.

import re

from lm_from_scratch.text import corpora

train, held_out = corpora.split(corpora.reference())
text = "\n".join(document.text for document in train)
new_text = "\n".join(document.text for document in held_out)


def words(text):  # a run of letters, of digits or of signs
    return re.findall(r"[A-Za-z]+|\d+|[^A-Za-z\d\s]+", text)


known = set(words(text))
print(f"{len(words(text)):,} words, {len(known):,} of them different")

# %%
# **Predict first.** How many words of the documents that we kept aside are new?
#
# * None: it is the same manual.
# * About 1 in 1,000
# * More than 1 in 20

new = [word for word in words(new_text) if word not in known]
print(f"{len(new) / len(words(new_text)):.1%} are new")
print([word for word in new if word.isalpha()][:5])

assert len(new) / len(words(new_text)) > 0.05

# %%
# More than 1 in 20, although both texts are parts of one manual. There is always another name,
# another number, another typing error. A model of words can neither read nor write them.
#
# Tokens lie in between: a text has about a quarter as many tokens as letters, and no token is ever
# unknown.

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

lengths = {
    "letters": len(new_text),
    "tokens": len(tokenizer.encode(new_text)),
    "words": len(words(new_text)),
}
known_letters, vocabulary = set(text), range(tokenizer.vocab_size)
unknown = {
    "letters": sum(letter not in known_letters for letter in new_text),
    "tokens": sum(i not in vocabulary for i in tokenizer.encode(new_text)),
    "words": len(new),
}
fig, (ax,) = figure(4.8, 2.2)
ax.barh(list(lengths), list(lengths.values()), color=COLOURS[0])
for i, name in enumerate(lengths):
    ax.text(
        lengths[name] + 600,
        i,
        f"new: {unknown[name] / lengths[name]:.0%}",
        va="center",
    )
ax.invert_yaxis()
ax.set_xlim(0, 52_000)
ax.set_xticks(
    [0, 10_000, 20_000, 30_000, 40_000], ["0", "10k", "20k", "30k", "40k"]
)
ax.set_xlabel("pieces")
ax.set_title("The same text in letters, tokens and words")
plt.show()

assert unknown["letters"] < 0.001 * lengths["letters"]
assert unknown["tokens"] == 0
assert tokenizer.decode(tokenizer.encode(new_text)) == new_text
assert lengths["words"] < lengths["tokens"] < 1.5 * lengths["words"]
assert 3 * lengths["tokens"] < lengths["letters"]

# %%
# One merge
# ---------
#
# The idea is called *byte-pair encoding*, BPE. Start with single letters. Find the two neighbours
# that occur together most often, and *merge* them: glue them into one new piece.
#
# Take a tiny language of four words. In its texts, *low* occurs 5 times, *lower* 2 times, *newest* 6
# times and *widest* 3 times.
#
# **Predict first.** Which pair of neighbours is the most frequent?
#
# * l and o
# * w and e
# * e and s

from collections import Counter
from itertools import pairwise

counts = {"low": 5, "lower": 2, "newest": 6, "widest": 3}
pairs = Counter()
for word, count in counts.items():
    for pair in pairwise(word):
        pairs[pair] += count
print(pairs.most_common(3))

assert pairs["e", "s"] == 6 + 3 == pairs["s", "t"]
assert (pairs["w", "e"], pairs["l", "o"]) == (2 + 6, 5 + 2)

# %%
# e and s: the pair occurs 9 times, 6 times in *newest* and 3 times in *widest*. So ``es`` becomes a
# piece. (The pair *st* is as frequent. A tie goes to the pair that comes first in the alphabet; in
# real tokenizers, and in the exercise below, to the smaller ids.)
#
# Learning is a loop
# ------------------
#
# Now do it again, and again. ``merge_pair`` glues one pair in one word. New pieces can be glued, too,
# so they grow. The list of merges, in the order in which they were learned, *is* the tokenizer.

from lm_from_scratch.text.tokenizer import count_pairs, merge_pair

language = {tuple(word): count for word, count in counts.items()}
merges = []
for _ in range(10):
    pairs = count_pairs(language)  # as above
    best = min(pairs, key=lambda pair: (-pairs[pair], pair))  # ties: a to z
    language = {merge_pair(w, best): n for w, n in language.items()}
    merges.append(best)

print(*("".join(pair) for pair in merges))

assert merges[0] == ("e", "s")
assert {"".join(pair) for pair in merges} >= {"est", "low", "newest"}

# %%
# After ten merges the tiny language has pieces such as ``est`` and ``low``. Nobody said that *-est*
# is an ending of English. The counts found it.
#
# Cutting a new word
# ------------------
#
# To cut a word, start from its letters and apply the merges in the order in which they were
# learned.
#
# **Predict first.** With the ten merges above, how many tokens does "lowest" become?
#
# * 1
# * 2
# * 6

pieces = tuple("lowest")
rows, names = [pieces], ["letters"]
for pair in merges:
    if merge_pair(pieces, pair) != pieces:
        pieces = merge_pair(pieces, pair)
        rows.append(pieces)
        names.append("+".join(pair))

assert pieces == ("low", "est")
drawings.merges(rows, names)

# %%
# 2: ``low`` and ``est``. Each row of the drawing is one merge. The word is new, but its parts are
# not. In the worst case, a tokenizer spells a word letter by letter.
#
# The tokenizer in the first picture was made the same way, from the documentation of Python, with
# 3,839 merges. Ids are given in the order of the merges, so a small id means a frequent pair:
# ``␣the`` is number 266.
#
# Bytes make sure that nothing is unknown
# ---------------------------------------
#
# What if a text has a letter that the tokenizer has never met? A text file (UTF-8) stores each
# character as one to four *bytes*, numbers from 0 to 255. So BPE starts from the 256 bytes and not
# from letters. (Add 3,839 merges and a start token: our model has 4,096 tokens.) An English letter
# is one byte; 这, Chinese for "this", is three.

print("这".encode().hex(" "))
print([tokenizer.backend.id_to_token(i) for i in tokenizer.encode("这")])
print([tokenizer.backend.id_to_token(i) for i in tokenizer.encode(" is")])

assert "这".encode() == bytes([0xE8, 0xBF, 0x99])
assert tokenizer.backend.id_to_token(tokenizer.encode(" is")[0]) == "Ġis"
assert (tokenizer.vocab_size, tokenizer.encode(" the")) == (4096, [266])
assert tokenizer.vocab_size == 3839 + 256 + 1

# %%
# The first line shows the three bytes of 这, written with the digits 0 to f. The next two show how a
# tokenizer's file, ``vocab.json``, lists such tokens: ``è¿Ļ`` for 这 and ``Ġis`` for ``␣is``. A text
# file cannot hold raw bytes, so each is written as some printable character. ``tokenizer.decode``
# gives the real text.
#
# When to stop merging
# --------------------
#
# The number of different tokens, the *vocabulary size* V, is your choice. More merges make longer
# tokens, so a text has fewer of them. But the model must store a row of numbers for each token.

from lm_from_scratch.text.tokenizer import Tokenizer

sizes = [257, 512, 1024, 2048, 4096, 8192]
texts = [document.text for document in train]
trained = [Tokenizer.train(texts, vocab_size=size) for size in sizes]

# %%
# How many characters does a token hold, in English and in Chinese?

other_texts = {
    "English, the same manual": new_text,
    "Chinese": "人人生而自由，在尊严和权利上一律平等。",
}
per_token = {
    name: [len(other) / len(t.encode(other)) for t in trained]
    for name, other in other_texts.items()
}
english, chinese = per_token.values()

fig, (ax,) = figure(4.8, 3.0)
for (name, values), marker in zip(per_token.items(), "o^"):
    ax.plot(sizes, values, marker=marker, label=name)
ax.set_xscale("log", base=2)
ax.set_xticks(sizes, [str(size) for size in sizes])
ax.minorticks_off()
ax.set_ylim(0, 4.6)
ax.set_xlabel("vocabulary size V")
ax.set_ylabel("characters per token")
ax.set_title("A larger vocabulary makes longer tokens")
ax.legend(frameon=False)
plt.show()

assert english[-1] - english[-2] < (english[1] - english[0]) / 2
assert english[4] > 3
assert all(abs(value - 1 / 3) < 1e-9 for value in chinese)

# %%
# With V = 4096, a token holds more than three characters of English. Twice the vocabulary adds
# little.
#
# Chinese gains nothing at all, because there was none in the text that the tokenizer learned from.
# If you pay for a service by the token, you pay more in a language that its tokenizer has rarely
# met.
#
# The space at the end of a prompt
# --------------------------------
#
# In 2020, a user reported poor predictions of a public GPT-2 demo (`allennlp #4484
# <https://github.com/allenai/allennlp/issues/4484>`_). The cause was invisible: a space at the end of
# the text that it was given, the *prompt*.
#
# Try it on our model. It gives each of its V tokens a score, and the three highest are its favourite
# next tokens. (``torch`` is PyTorch; the next lesson explains it.)

import torch

for prompt in ("The value of the", "The value of the "):
    ids = tokenizer.start(prompt)  # with the start token
    scores = model(torch.tensor([ids]))[0, -1]  # V scores
    best = scores.topk(3).indices.tolist()
    print(tokenizer.pieces(ids)[1:], "->", tokenizer.pieces(best))

assert " value" not in tokenizer.pieces(best)
assert "value" not in tokenizer.pieces(best)

# %%
# The model wants to write ``␣value``, but the space is there already, as a token of its own. In the
# texts that the model learned from, a word `hardly ever follows <1a_tokens_in_depth.ipynb>`_ such a
# token. So end a prompt with a word, and leave the space to the model. Type a space here:
#
# .. live:: next
#    :model: gpt2-docs
#    :prompt: The value of the
#
# Exercises
# ---------
#
# 1. Put your own name, your address and a line of your favourite language into the first picture
#    (or the field above). Which parts are single tokens? A good answer says what the documents had
#    to contain for that.
# 2. Find the longest token of our tokenizer that is made of letters only, and the longest of all.
#    Hint: ``tokenizer.pieces([i])[0]`` for every id. A good answer explains from the longest one
#    what a page of Python's documentation looks like.
# 3. Add the word "slow", 4 times, to the tiny language. Work out on paper which pair is merged
#    first now, then run the loop. A good answer says how many tokens "slowest" becomes after ten
#    merges.
#
# Summary
# -------
#
# * A tokenizer cuts text into pieces and gives each an id. The model sees only ids, never letters.
# * It learns by counting: merge the most frequent pair of neighbours, again and again, starting from
#   256 bytes. So every text can be written, and frequent words are short.
# * A space belongs to the word after it: never end a prompt with one.
