r"""
Tokens in depth: does every text come back?
===========================================

A tokenizer that loses one character in a million works in every demonstration. How do you know that
yours loses none? This page belongs to the lesson `tokens <1_tokens.ipynb>`_.

It sends every Unicode character through and back, compares our merges with those of the library
``tokenizers``, one by one, streams texts without ever showing half a character, and follows the ids into the rows that a
model trains on.

Text is bytes
-------------

A text is a list of Unicode characters, and each character is a number. UTF-8 writes a character as
one to four bytes: one for the letters of English, more for the rest.
"""

# sphinx_gallery_words = ["UTF-8", "surrogate", "bytes_to_unicode", "encode_special_tokens", "TextStreamer", "special tokens", "allowed_special", "disallowed_special", "endoftext", "eos_token", "UnicodeDecodeError", "replacement character", "pre-tokenization regex", "train a tokenizer", "add_special_tokens", "prompt injection", "document_ids", "emoji", "unicode characters"]

import json
import operator
from collections import Counter
from itertools import pairwise

for character in "aß中😀":
    utf8 = character.encode("utf-8")
    print(
        f"{character}  U+{ord(character):05X}  {len(utf8)} bytes: {utf8.hex(' ')}"
    )

# %%
# Every character has bytes, and no two characters have the same bytes. We can check all of them. The gap
# in the numbers holds the *surrogates*: halves of a pair from another encoding, which are not
# characters.

characters = [chr(n) for n in range(0x110000) if not 0xD800 <= n <= 0xDFFF]
bytes_of = [character.encode("utf-8") for character in characters]
lengths = Counter(map(len, bytes_of))
for length, count in sorted(lengths.items()):
    print(f"{count:9,d} characters of length {length}")

assert len(characters) == 1_112_064
assert len(set(bytes_of)) == len(characters)
assert set(lengths) == {1, 2, 3, 4}

# %%
# So 256 numbers are enough to write every text there is.
#
# Ties between pairs
# ------------------
#
# Here are the four words of the lesson, and their first four merges.

from lm_from_scratch.text.tokenizer import (
    Tokenizer,
    apply_merges,
    count_pairs,
    learn_merges,
    merge_pair,
)

counts = {"low": 5, "lower": 2, "newest": 6, "widest": 3}
toy = {tuple(word): count for word, count in counts.items()}
assert count_pairs(toy)["e", "s"] == counts["newest"] + counts["widest"] == 9

step, by_hand = toy, []
for _ in range(4):
    pair, count = count_pairs(step).most_common(1)[0]
    step = {merge_pair(pieces, pair): n for pieces, n in step.items()}
    by_hand.append(pair)
    print(
        count,
        "+".join(pair).ljust(5),
        " ".join("·".join(pieces) for pieces in step),
    )

assert by_hand == learn_merges(toy, 4)

# %%
# For the fifth merge three pairs are equally frequent. Any rule will do, as long as everybody follows the
# same one. The package and the library give each piece an id when it first appears, letters in alphabetical order,
# and take the pair with the smaller ids. So the result does not depend on the order of the words.

pairs = count_pairs(step)
tied = [pair for pair, count in pairs.items() if count == max(pairs.values())]
print(tied, "->", learn_merges(toy, 5)[-1])

assert len(tied) == 3
assert learn_merges(toy, 5)[-1] == min(tied)
assert learn_merges(dict(reversed(toy.items())), 12) == learn_merges(toy, 12)

# %%
# The same merges as the library
# ------------------------------
#
# ``transformers`` uses the library ``tokenizers``. Give it the same four words and let it merge until
# nothing is left. It learns the same merges in the same order.

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from lm_from_scratch.text import corpora

train, held_out = corpora.split(corpora.reference())
texts = [document.text for document in train]
rule = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's


def words_of(text):
    return [word for word, _ in rule.pre_tokenize_str(text)]


def merges_of(backend):
    return [
        tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]
    ]


backend = tokenizers.Tokenizer(models.BPE())
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
text = " ".join(" ".join([word] * count) for word, count in counts.items())
backend.train_from_iterator([text], trainers.BpeTrainer(show_progress=False))

assert learn_merges(toy, 1000) == merges_of(backend)
print(len(merges_of(backend)), "merges, all equal")

# %%
# Four words are an easy test. Here are the words of the whole training text, and the first 30
# merges. The pieces are bytes now; the library shows each byte as a printable character, and the
# space as Ġ.

word_counts = Counter(tuple(word) for text in texts for word in words_of(text))
learned = learn_merges(word_counts, 30)
by_library = Tokenizer.train(texts, vocab_size=256 + 1 + 30)

assert learned == merges_of(by_library.backend)
print(" ".join("".join(pair) for pair in learned))

# %%
# The same tokens as the library
# ------------------------------
#
# The tokenizer that ships with the package was made the same way, with more merges. Our readable
# ``apply_merges`` gives exactly the tokens that the library gives, for every different held-out word.

from lm_from_scratch.checkpoint.folders import SHIPPED

tokenizer = Tokenizer.load(SHIPPED)
merges = merges_of(tokenizer.backend)
held_out_text = "\n".join(document.text for document in held_out)
held_out_words = sorted(set(words_of(held_out_text)))
for word in held_out_words:
    by_library = tuple(
        token.value for token in tokenizer.backend.model.tokenize(word)
    )
    assert apply_merges(word, merges) == by_library
print(f"{len(merges)} merges, {len(held_out_words)} words, all equal")

assert apply_merges("lowest", learn_merges(toy, 10)) == ("low", "est")

# %%
# Merges stay inside a word, and a word carries the space before it. So the place where you cut a
# text matters: cut before the space and the tokens are the same, cut after it and they are not.

print(tokenizer.pieces(tokenizer.encode("the") + tokenizer.encode(" list")))
print(tokenizer.pieces(tokenizer.encode("the ") + tokenizer.encode("list")))

assert tokenizer.encode("the list") == tokenizer.encode(
    "the"
) + tokenizer.encode(" list")
assert tokenizer.encode("the list") != tokenizer.encode(
    "the "
) + tokenizer.encode("list")

# %%
# The lesson shows how a space at the end of a prompt leads a model astray. Here is the number: in the
# training text, less than one in ten tokens of a single space comes before a letter. So the model has
# rarely seen what it is to continue.

(space,) = tokenizer.encode(" ")
after_space = [
    tokenizer.pieces([b])[0]
    for ids in tokenizer.encode_batch(texts)
    for a, b in pairwise(ids)
    if a == space
]
share = sum(piece[0].isalpha() for piece in after_space) / len(after_space)
print(f"{len(after_space)} single spaces, {share:.1%} of them before a letter")

assert share < 0.1

# %%
# How large a vocabulary
# ----------------------
#
# The lesson draws the curve: each doubling of the vocabulary adds less. The price is parameters and arithmetic. The
# embedding has V rows of C numbers, and the model computes one score for each of the V tokens at every step. At C = 128
# and V = 4096 the embedding has 524,288 numbers.
#
# Published models often have more rows than their tokenizer has tokens, up to the next multiple of 64
# or 128, because processors multiply such matrices fastest: Qwen2-0.5B has 151,936 rows for 151,646
# tokens. A row without a token is never a target in training; if it is drawn, it decodes to nothing.
#
# Without merges the tokens are the bytes. When no pair is left to merge, every training word is one token: byte-pair
# encoding has become a vocabulary of words, but one that can still spell what it has never seen. The merges are greedy, so
# those of a small tokenizer are the first merges of a large one.

smallest, largest = Tokenizer.train(texts, 257), Tokenizer.train(texts, 10**6)
print(
    f"V = {smallest.vocab_size}: tokens are bytes; V = {largest.vocab_size}: tokens are words"
)

assert len(smallest.encode(held_out_text)) == len(held_out_text.encode("utf-8"))
n_words = sum(word_counts.values())
assert sum(len(ids) for ids in largest.encode_batch(texts)) == n_words
assert learned == merges_of(largest.backend)[: len(learned)]
assert 128 * 4096 == 524_288
assert 151_936 % 128 == 0 and tokenizer.decode([151_935]) == ""

# %%
# The printable name of a byte
# ----------------------------
#
# In the lesson, ``vocab.json`` shows ``è¿Ļ`` instead of 这. The rule is GPT-2's. A byte
# that is a visible character in Latin-1 keeps it. The others, in order, get the characters from number
# 256 on.

visible_bytes = [*range(33, 127), *range(161, 173), *range(174, 256)]
others = [byte for byte in range(256) if byte not in visible_bytes]
name_of = {byte: chr(byte) for byte in visible_bytes}
name_of |= {byte: chr(256 + i) for i, byte in enumerate(others)}
print({f"{byte:02x}": name_of[byte] for byte in "这 \n".encode()})

assert len(set(name_of.values())) == 256
assert set(name_of.values()) == set(pre_tokenizers.ByteLevel.alphabet())
assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("这")] == [
    name_of[byte] for byte in "这".encode()
]

# %%
# Every string comes back
# -----------------------
#
# ``decode(encode(text)) == text`` holds for every string, because no step loses anything: characters to
# bytes, bytes to pieces, pieces to ids. Some published tokenizers rewrite the text first. Qwen2's
# *normalizer* joins a letter and its accent into one character, and one character comes back. Ours has
# no such step. Here are strings that break weaker tokenizers.

wild = {
    "nothing": "",
    "only spaces": "   \t  ",
    "line ends": "\n\r\n\r\n\n",
    "the byte zero": "a\x00b",
    "composed, decomposed": "é e\u0301",
    "right to left": "שלום \u202bمرحبا\u202c",
    "a family of emoji": "👨\u200d👩\u200d👧\u200d👦",
    "a flag": "🇨🇳",
    "byte order mark": "\ufefftext",
    "no character": "\uffff \U0010ffff",
    "Latin-1, all of it": "".join(map(chr, range(256))),
    "a long word": "a" * 10_000,
}
for name, text in wild.items():
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    print(f"{name:21} {len(text):6d} characters {len(ids):5d} tokens")

# %%
# A table of examples proves little. But there are only so many characters: send all of them through, a
# thousand at a time.

rows = [
    "".join(characters[i : i + 1000]) for i in range(0, len(characters), 1000)
]
encoded = tokenizer.encode_batch(rows)
assert all(tokenizer.decode(ids) == row for ids, row in zip(encoded, rows))
print(
    f"{len(characters):,d} characters as {sum(map(len, encoded)):,d} tokens and back"
)

# %%
# A Python string can hold half of a surrogate pair, which is not a character and has no bytes. The
# tokenizer refuses it with a message, and does not quietly replace it.

try:
    tokenizer.encode("half \ud83d")
    raise AssertionError("half of a pair must be refused")
except ValueError as error:
    print(error)

# %%
# The other direction does not hold. A model can produce any list of ids, and the bytes of some lists are
# not valid UTF-8. They decode to a replacement character, without an error.

half = tokenizer.encode("😀")[:2]
assert tokenizer.decode(half) == "\ufffd"
assert tokenizer.encode(tokenizer.decode(half)) != half

# %%
# Streaming never shows half a character
# --------------------------------------
#
# A chat window shows each token as it arrives. Decoding the tokens one by one breaks every character
# that has several of them. ``Tokenizer.stream`` keeps the bytes back until the character is whole.

ids = tokenizer.encode("ok 😀中")
naive = [tokenizer.decode([token]) for token in ids]
streamed = list(tokenizer.stream(ids))
print("one by one", naive)
print("streamed  ", streamed)

assert "".join(naive) != "ok 😀中"
assert streamed[-2:] == ["😀", "中"]
for text in wild.values():
    assert "".join(tokenizer.stream(tokenizer.encode(text))) == text

# %%
# What a token says depends on those before it
# --------------------------------------------
#
# Other tokenizers need more care. SentencePiece writes a space as ``▁`` in front of each word, also of
# the first, and decoding drops that one. So ``▁sat`` alone is ``sat``: an answer decoded by itself is
# glued to its prompt. The answer is what the whole text gains, so give ``stream`` what came before.

backend = tokenizers.Tokenizer(models.Unigram())
backend.pre_tokenizer = pre_tokenizers.Metaspace()
backend.decoder = tokenizers.decoders.Metaspace()
backend.train_from_iterator(
    ["the cat sat on the mat"] * 9,
    trainers.UnigramTrainer(
        vocab_size=40,
        special_tokens=["<unk>"],
        unk_token="<unk>",
        show_progress=False,
    ),
)
pieces = Tokenizer(backend)
asked, said = pieces.encode("the cat"), pieces.encode("sat")
print("alone    ", repr("the cat" + "".join(pieces.stream(said))))
print("in place ", repr("the cat" + "".join(pieces.stream(said, after=asked))))

assert "".join(pieces.stream(said)) == "sat"
assert "".join(pieces.stream(said, after=asked)) == " sat"

# %%
# Where a document ends
# ---------------------
#
# One token has no text: ``<|endoftext|>``. It separates the documents of the training text, and a model
# that produces it has finished. Only the program may place it, at the end of a document.
#
# But a document can contain its name, as this page does. The package encodes the name letter by letter, unless you set
# ``special=True``. The library in its usual setting does not, so there the *text* decides where a document ends.

end = tokenizer.eos_token_id
document = f"The name {tokenizer.decode([end])} ends nothing."
usual = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())

ours = tokenizer.encode(document)
theirs = usual.encode(document, add_special_tokens=False).ids
print("ours  ", ours)
print("usual ", theirs)

assert tokenizer.decode(ours) == tokenizer.decode(theirs) == document
assert end not in ours
assert theirs.count(end) == 1
assert theirs == tokenizer.encode(document, special=True)

# %%
# A model trains on rows of equal length, but documents have every length. So ``write_tokens`` writes one long line of ids, with
# ``<|endoftext|>`` before and after every document, and a row is a piece of it. Its targets are the same piece, one token
# later. Here is a row with three short documents.

import tempfile
from pathlib import Path

from lm_from_scratch.text import batches
from lm_from_scratch.text.document import Document

short = ["Add one to it.", "No.", "Return the list."]
folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
line = batches.write_tokens(
    [Document(text, text, text) for text in short],
    tokenizer,
    Path(folder.name) / "short.bin",
)
batch = batches.packed_batch(line, starts=[0], block_size=line.n_tokens - 1)
idx, positions, documents = batch.idx[0], batch.positions[0], batch.documents[0]
print("idx      ", idx.tolist())
print("targets  ", batch.targets[0].tolist())
print("positions", positions.tolist())
print("documents", documents.tolist())
folder.cleanup()

assert batch.targets[0, :-1].equal(idx[1:]) and batch.targets[0, -1] == end
assert positions[idx == end].eq(0).all()

# %%
# ``<|endoftext|>`` works twice. It is the target of a document's last token, so the model learns to stop; and it is position 0
# of the next document, so the model has something to start from. Positions restart with every document, and a token sees
# only its own: `packing <../3_attention/3_flex_and_packing.ipynb>`_ draws who sees whom.
#
# Which documents are held out
# ----------------------------
#
# Before you measure anything, documents go to one of two sides: to train on, or held out. ``corpora.split`` decides by a hash
# of the document's name, so the side does not change when you add, repeat or reorder documents.
#
# Names are not enough. Documents share paragraphs, such as a licence, and a paragraph on both sides would
# measure what the model remembers. So ``split`` removes it from the held-out side.

names = {document.name for document in held_out}
mixed = list(reversed(corpora.reference())) * 2
again = corpora.split([*mixed, Document("new", "new", "A new text.")])[1]
assert names <= {document.name for document in again} <= names | {"new"}

licence = "Permission is hereby granted, free of charge, to any person."
notes = [
    Document(
        f"{i}", f"{i}", f"Note {i} says something. " * 6 + f"\n\n{licence}"
    )
    for i in range(40)
]
to_train, kept = corpora.split(notes, held_out=0.25)
print(len(to_train), "notes to train on,", len(kept), "held out")
assert all(licence in note.text for note in to_train)
assert kept and not any(licence in note.text for note in kept)

# %%
# Bug museum
# ----------
#
# The character's number, modulo the vocabulary
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A short tokenizer for a vocabulary of 50000 wrote each character as its Unicode number modulo 50000.
# Its author tried it on English, where it works. (G29)


def old_encode(text):
    return [ord(character) % 50000 for character in text]


def old_decode(ids):
    return "".join(chr(number) for number in ids)


print("'썐' becomes", old_encode("썐"), "the id of padding")
print("'😀' comes back as", old_decode(old_encode("😀")))

assert old_decode(old_encode("plain English")) == "plain English"
assert old_encode("썐") == [0]
assert old_decode(old_encode("😀")) == "潠"

# %%
# More than a million characters share 50000 numbers, so most come back as another character. The check
# ``decode(encode(text)) == text`` finds the mistake at once, if the text is not English. The fixed line
# writes bytes: 256 numbers, and no two characters collide.


def new_encode(text):
    return list(text.encode("utf-8"))


back = old_decode(old_encode("".join(characters)))
lost = sum(map(operator.ne, back, characters))
print(f"{lost:,d} of {len(characters):,d} characters come back as another one")

assert lost > 1_000_000
assert bytes(new_encode("썐😀")).decode("utf-8") == "썐😀"
assert max(new_encode("썐😀")) < 256

# %%
# Exercises
# ---------
#
# 1. *Easy.* Train tokenizers of several sizes on a text in your own language with ``corpora.read_texts``, and draw how many
#    characters a token holds. Hint: split first, and measure on the held-out side.
# 2. *Medium.* Encode by the longest match instead: take the longest token of the vocabulary that the
#    word begins with, then go on with the rest. Count the held-out words whose tokens differ from
#    ``apply_merges``. Hint: work on the words of ``words_of``, and look at words that begin like
#    *assert*.
# 3. *Hard.* ``learn_merges`` counts all pairs again for every merge. Keep the counts, and after a
#    merge change only those of the words that contain the pair. Hint: an index from pair to words;
#    ``learn_merges`` on the training text is your test.
#
# Summary
# -------
#
# * UTF-8 gives every one of the 1,112,064 Unicode characters one to four bytes, so 256 numbers write
#   everything.
# * Our readable functions learn the same merges as the library, and encode every held-out word the same
#   way.
# * Every Unicode character survived the round trip, and a stream shows no half of a character.
# * A token alone has no text of its own: decode an answer after its prompt.
# * Only the program may write ``<|endoftext|>``; a document that contains its name gets the letters. Packed documents are
#   separated by it, and positions restart.
#
# Sources
# -------
#
# * Sennrich, Haddow, Birch: `Neural Machine Translation of Rare Words with Subword Units <https://arxiv.org/abs/1508.07909>`_, 2016. The four words are from there.
# * Radford et al.: `Language Models are Unsupervised Multitask Learners <https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf>`_, 2019. Bytes as the alphabet.
# * Gage: *A New Algorithm for Data Compression*, The C Users Journal, 1994. Byte-pair encoding, before
#   language models used it.
# * Yergeau: `UTF-8, a transformation format of ISO 10646 <https://www.rfc-editor.org/rfc/rfc3629>`_, 2003.
# * The `tokenizers library <https://github.com/huggingface/tokenizers>`_.

import platform

import torch

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("tokenizers", tokenizers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
