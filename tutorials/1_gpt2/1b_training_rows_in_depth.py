r"""
Training rows in depth: where does a document end?
==================================================

A model trains on rows of equal length, but documents have every length. If two of them share a row,
does one see the other? And can a document lie about where it ends? This page belongs to the lesson
`tokens <1_tokens.ipynb>`_.

It follows the ids from the documents to the rows that `training <4_training.ipynb>`_ reads: the token
that ends a document, the documents that are held out, the packing, and who sees whom.

Where a document ends
---------------------

One token has no text: the *end of text*. It separates the documents of the training text, and a model
that produces it has finished. Only the program may place it, at the end of a document.

It needs a name in the vocabulary, and a document can contain that name: this page does. The package
encodes the name letter by letter, unless you set ``special=True``. The library in its usual setting
does not.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["eos_token", "endoftext", "add_special_tokens", "prompt injection", "document_ids", "block_size", "dataloader"]

import matplotlib.pyplot as plt
import tokenizers

from lm_from_scratch.checkpoint.folders import SHIPPED
from lm_from_scratch.instruments.plot import figure
from lm_from_scratch.text import batches, corpora
from lm_from_scratch.text.document import Document
from lm_from_scratch.text.tokenizer import Tokenizer

tokenizer = Tokenizer.load(SHIPPED)
train, held_out = corpora.split(corpora.reference())
end = tokenizer.eos_token_id
document = f"The name {tokenizer.decode([end])} ends nothing."
usual = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())

ours = tokenizer.encode(document)
theirs = usual.encode(document, add_special_tokens=False).ids
print("ours  ", ours)
print("usual ", theirs)

assert tokenizer.decode(ours) == document
assert end not in ours
assert theirs.count(end) == 1
assert theirs == tokenizer.encode(document, special=True)

# %%
# In the usual setting the *text* decides where a document ends. Packed into rows, as below, its second
# half becomes a document of its own that cannot see the first. Decoding does not show the difference:
# both lists decode to the same text.

import torch

_, documents = batches.packed_positions(torch.tensor([[end, *theirs]]), end)
print("documents", documents[0].tolist())

assert documents.max() == 2
assert batches.packed_positions(torch.tensor([[end, *ours]]), end)[1].max() == 1
assert tokenizer.decode(theirs) == tokenizer.decode(ours)

# %%
# Which documents are held out
# ----------------------------
#
# Before you measure anything, documents go to one of two sides: to train on, or held out.
# ``corpora.split`` decides by a document's name, so the side does not change when you add, repeat or
# reorder documents.

names = {document.name for document in held_out}
mixed = list(reversed(corpora.reference())) * 2
again = corpora.split([*mixed, Document("new", "new", "A new text.")])[1]

assert names <= {document.name for document in again} <= names | {"new"}
assert not names & {document.name for document in train}

# %%
# Names are not enough. Documents share paragraphs, such as a licence. A paragraph on both sides would
# measure what the model remembers, so ``split`` removes it from the held-out side.
#
# Try it with forty notes that share one licence. A hash of the name decides the side of a document, so
# the share ``held_out=0.25`` is only approximate.

licence = "Permission is hereby granted, free of charge, to any person obtaining a copy."
bodies = {
    f"note {i}": f"Note {i} has something to say. " * 6 for i in range(40)
}
notes = [
    Document(name, name, f"{body}\n\n{licence}")
    for name, body in bodies.items()
]
notes_train, notes_held_out = corpora.split(notes, held_out=0.25)
print(
    len(notes_train), "documents to train on,", len(notes_held_out), "held out"
)

assert all(licence in document.text for document in notes_train)
assert 0 < len(notes_held_out) != 0.25 * len(notes)
assert not any(licence in document.text for document in notes_held_out)

# %%
# One long line of ids
# --------------------
#
# ``write_tokens`` encodes the documents once and writes one long line of ids to a file: an end-of-text
# token first, then every document with an end-of-text token after it. With at most 65536 tokens in the
# vocabulary, an id takes two bytes.

import tempfile
from pathlib import Path

folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
file = batches.write_tokens(train, tokenizer, Path(folder.name) / "train.bin")
texts = [document.text for document in train]
n_ids = sum(len(ids) for ids in tokenizer.encode_batch(texts))
print(len(train), "documents,", file.n_tokens, "tokens")

assert file.n_tokens == n_ids + len(train) + 1
assert file.path.stat().st_size == 2 * file.n_tokens
assert (file.tokens == end).sum() == len(train) + 1

# %%
# Rows, and who sees whom
# -----------------------
#
# A row of training data is a piece of this line, T tokens long. Its targets are the same piece, one token
# later. So a row has no padding, and documents end in it wherever they happen to. Here is a row with
# three short documents.

short = ["Add one to it.", "No.", "Return the list."]
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

assert batch.targets[0, :-1].equal(idx[1:])
assert batch.targets[0, -1] == end
assert positions[idx == end].eq(0).all()

# %%
# The end-of-text token works twice. It is the target of a document's last token, so the model
# learns to stop; and it is position 0 of the next document, so the model has something to start
# from.
#
# Positions restart with every document, and a token sees only its own document, up to itself. The
# picture shows both. Each label is a token and its position; ``⊢`` is the end-of-text token. The two
# shades of blue only separate neighbouring documents.

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.instruments.plot import printable

see = Visibility(
    batch.positions, batch.positions, batch.documents, batch.documents
)
visible = see.mask[0, 0]  # (T, T)
labels = [
    "⊢" if token == end else printable(tokenizer.decode([token]))
    for token in idx.tolist()
]
names = [
    f"{label}  {position}"
    for label, position in zip(labels, positions.tolist())
]
shade = 0.4 + 0.3 * (documents % 2)
assert torch.equal(shade.diff() != 0, documents.diff() != 0)

fig, (ax,) = figure(4.8, 4.8)
ax.imshow((visible * shade[:, None]).numpy(), cmap="Blues", vmin=0, vmax=1)
ax.set_xticks(range(len(names)), names, rotation=90)
ax.set_yticks(range(len(names)), names)
ax.set_xlabel("key: token and position")
ax.set_ylabel("query")
ax.set_title("Three documents in a row: who sees whom")
ax.grid(False)
plt.show()

T = len(idx)
for t in range(T):
    for s in range(T):
        assert visible[t, s] == (s <= t and documents[s] == documents[t])

folder.cleanup()

# %%
# Exercises
# ---------
#
# 1. *Easy.* Read the rows of ``short.bin`` with ``block_size=4`` and ``starts=[0, 4, 8]``. Which tokens can
#    no longer see the beginning of their document? A right answer marks them in the picture.
# 2. *Medium.* Give ``Visibility`` documents that are all zero, and the same positions. Draw the picture
#    again. A right answer explains from the positions why the first token now sees the future, and what
#    that does to the training loss.
# 3. *Hard.* Count how many tokens of the training file share a row of 256 with the end of another
#    document. A right answer says how much of a row a token would see in vain without the mask.
#
# Summary
# -------
#
# * Only the program may write the end-of-text token; a document that contains its name gets the letters.
# * A document's name decides its side, and a paragraph of the training side is removed from the held-out
#   side.
# * Documents are packed into rows: the end-of-text token separates them, positions restart, and no token
#   sees another document.
#
# Sources
# -------
#
# * Radford et al.: `Language Models are Unsupervised Multitask Learners <https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf>`_, 2019. The end-of-text token.
# * The `special tokens of the tokenizers library <https://huggingface.co/docs/tokenizers/api/added-tokens>`_.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("tokenizers", tokenizers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
