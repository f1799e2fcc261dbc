r"""
Which module does this docstring come from?
===========================================

"Return the charset of the message header." Is that from ``asyncio``, ``email``, ``importlib``, ``logging``,
``multiprocessing`` or ``xml``? You guess ``email``. A language model only ever guesses the next token, so it just goes on
talking:

.. live:: next
   :model: gpt2-docs
   :prompt: Return the charset of the message header.

To answer, it needs a *head*: one small matrix, trained in a second. It learns from the docstrings of these packages,
which are on your disk. The name of the function would give the answer away, so we keep only the text below it.
"""

# sphinx_gallery_needs = ["../1_gpt2/2_gpt2", "../1_gpt2/4_training"]
# sphinx_gallery_words = ["sequence classification", "text classification", "AutoModelForSequenceClassification", "spam classifier", "sentiment", "last token", "pad_token_id", "linear probe", "feature extraction", "spam detection", "sentiment analysis", "classify emails", "GPT as a classifier", "intent detection", "classify text", "text classifier", "fine-tune for classification", "label a text", "zero-shot", "customer reviews", "product reviews", "movie reviews", "IMDB", "tweets", "topic classification", "categories", "categorise", "support tickets", "toxic comments", "detect language", "logistic regression", "features from a model", "BERT vs GPT", "decoder for classification", "which token to classify", "classifier head", "few labels", "fake news", "yes or no", "sort emails", "sort into folders", "sort texts", "assign to categories"]
# sphinx_gallery_thumbnail_number = 3

import torch
import torch.nn.functional as F

from lm_from_scratch.text.corpora import docstrings, split
from lm_from_scratch.text.document import Document

PACKAGES = ["asyncio", "email", "importlib"]
PACKAGES += ["logging", "multiprocessing", "xml"]

corpus, found, label = docstrings(), {}, {}
for document in corpus:
    package = document.group.removeprefix("module/").split(".")[0]
    text = document.text.partition("\n\n")[2].strip()
    if package in PACKAGES and len(text) >= 20 and text not in found:
        found[text] = Document(document.name, document.name, text)
        label[document.name] = PACKAGES.index(package)

train, test = split(list(found.values()), held_out=0.3)
y = torch.tensor([label[document.name] for document in train])
y_test = torch.tensor([label[document.name] for document in test])
print(len(train), "texts to learn from,", len(test), "to be tested on")

assert not {d.text for d in train} & {d.text for d in test}
assert 900 < len(train) < 1300 and len(test) > 400

# %%
# The model without its last matrix is the *backbone*: token ids in, a state of 128 numbers out for each token.

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.models.modes import evaluating
from lm_from_scratch.text.batch import padded_batch

model, tokenizer = load_shipped("gpt2-docs")
END = tokenizer.eos_token_id


def batch_of(texts):
    rows = [[END, *tokenizer.encode(text)[:20], END] for text in texts]
    return padded_batch(rows, END)


def states(batch):
    with evaluating(model):
        return model.backbone(batch.idx, positions=batch.positions)


def last(x, positions):  # (B, T, C), (B, T)
    return x[torch.arange(len(x)), positions.argmax(1)]  # (B, C)


# %%
# The head reads one state of each text, the last one, and turns it into six scores.


def fit(x, y, K=6):  # (N, C), (N,)
    head = torch.zeros(K, x.shape[1], requires_grad=True)
    optimizer = torch.optim.AdamW([head], lr=0.01)
    for _ in range(300):
        loss = F.cross_entropy(x @ head.T, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.detach()  # (K, C)


batch = batch_of([document.text for document in train])
x = last(states(batch), batch.positions)  # (1084, 128)
head = fit(x, y)

yours = [
    "Return the charset of the message header.",
    "Parse an element and its attributes.",
    "Start a process that shares the queue.",
]
three = batch_of(yours)
shares = (last(states(three), three.positions) @ head.T).softmax(1)  # (3, K)

import matplotlib.pyplot as plt

from lm_from_scratch.drawings import classification as drawings
from lm_from_scratch.instruments import plot

fig, axes = plot.figure(4.6, 5.6, 3, 1)
for ax, text, share in zip(axes, yours, shares):
    ax.barh(PACKAGES, share.tolist(), color=plot.COLOURS[0])
    ax.invert_yaxis()
    ax.grid(False)
    ax.set(xlim=(0, 1))
    ax.set_title(text, fontsize=10)
plt.show()
assert not any(text in d.text for d in corpus for text in yours)
assert (
    shares[:2].argmax(1).tolist() == [1, 5] and shares[:2].amax(1).min() > 0.8
)
assert PACKAGES[shares[2].argmax()] == "asyncio" and shares[2].max() > 0.8

# %%
# None of these three sentences is in a package, and the model has an opinion on each. Write sentences of your own into
# ``yours``. For the third you may have expected ``multiprocessing``. The model says ``asyncio``, and is almost certain;
# ``asyncio`` starts processes, too. How sure a model is does not tell you whether it is right.
#
# Which state to read
# -------------------
#
# In a causal model a token has seen only what comes before it. The last token is the only one that has seen the whole
# text, so the head reads its state. Here it is ``<|endoftext|>``, END for short, which closes every document. (It also
# begins every document. There we draw it as ⊢.)
#
# Texts differ in length. Short rows of a batch are filled up with padding, whose positions are -1, so the last *real*
# token is in another column in each row. ``last`` finds it: it has the largest position.

words = [["⊢", "Close", " it", ".", "END"], ["⊢", "Stop", "END"]]
rows = [*words, ["⊢", "Read", " the", " next", " line", ".", "END"]]
assert shares.shape == (3, 6) and x.shape == (len(train), 128)
drawings.padded_rows(rows, "pad", [len(row) - 1 for row in rows])

# %%
# **Predict first.** Many programs read ``x[:, -1]``, the last column, instead. The head is right for 4 of 5 test
# texts. How many are left if it reads the last column of this padded batch?
#
# * about 4 of 5: padding is hidden from the text, so it changes nothing
# * about half
# * about 1 of 6, a blind guess

batch_test = batch_of([document.text for document in test])
every = states(batch_test)  # (469, 22, 128)
x_test = last(every, batch_test.positions)


def right(scores):  # (N, K)
    return (scores.argmax(1) == y_test).float().mean().item()


full = (batch_test.positions[:, -1] >= 0).float().mean().item()
rate = {"frozen + head": right(x_test @ head.T)}
print(f"last real token {rate['frozen + head']:.0%}")
print(f"last column     {right(every[:, -1] @ head.T):.0%}")
print(f"rows without padding: {full:.0%}")
assert 0.74 < rate["frozen + head"] < 0.84
assert 0.4 < right(every[:, -1] @ head.T) < 0.6 and 0.4 < full < 0.7

# %%
# About half. Rows that fill the batch are still read at their end; all other rows are read at a place that has seen no
# text.
#
# Nothing crashes. And with one text at a time there is no padding, so a demonstration looks perfect.
#
# Count words first
# -----------------
#
# Before you are proud of a model, try the simplest thing. *Naive Bayes* counts: if ``␣charset`` occurs mostly in texts of
# ``email``, each ``␣charset`` is a point for ``email``. It sees a text as a set of tokens, without their order.


def bag(batch):
    seen = torch.zeros(len(batch.idx), tokenizer.vocab_size)
    return seen.scatter_(1, batch.idx, 1.0)  # (N, V)


def count(bag, y):
    counts = F.one_hot(y, 6).float().T @ bag + 0.1  # (K, V)
    return (counts / counts.sum(1, keepdim=True)).log()


# %%
# The other extreme is *fine-tuning*: train all two million weights together with the head.

import copy

from lm_from_scratch.models.heads import SequenceClassifier

torch.manual_seed(0)
tuned = SequenceClassifier(copy.deepcopy(model.backbone), 6)
optimizer = torch.optim.AdamW(tuned.parameters(), lr=5e-4, fused=True)
for chosen in torch.randperm(len(train)).split(24):
    part = batch_of([train[i].text for i in chosen])
    logits = tuned(part.idx, positions=part.positions)  # (24, 6)
    loss = F.cross_entropy(logits, y[chosen])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(tuned.parameters(), 1.0)
    optimizer.step()

# %%
# **Predict first.** All three methods had the same texts to learn from. How far is the fine-tuned model ahead of the counted
# words?
#
# * by twenty points
# * by ten points
# * by so little that it may be chance

with evaluating(tuned):
    logits = tuned(batch_test.idx, positions=batch_test.positions)
rate["fine-tuned"] = right(logits)
rate["counted words"] = right(bag(batch_test) @ count(bag(batch), y).T)

fig, (ax,) = plot.figure(4.6, 2.2)
ax.barh(list(rate), [100 * value for value in rate.values()])
for place, value in enumerate(rate.values()):
    ax.text(100 * value + 2, place, f"{value:.0%}", va="center")
ax.grid(False)
ax.set(xlim=(0, 100), xlabel="right, %", title=f"{len(test)} test texts")
plt.show()
assert abs(rate["counted words"] - rate["fine-tuned"]) < 0.04
assert rate["fine-tuned"] > rate["frozen + head"]
assert rate["counted words"] > rate["frozen + head"] + 0.02

# %%
# By so little that it may be chance: a few texts make the difference, and the `page in depth
# <1a_sequences_in_depth.ipynb>`_ tests whether that means anything.
#
# On a question that single words decide, with a thousand labels, a model buys next to nothing. So run the simple method
# first: your result means little without it.
#
# What a model is good for
# ------------------------
#
# Labels are expensive, and a thousand of them are a luxury. Take n texts of each package, and train both again.

n_labels = (2, 4, 8, 64)
words, words_test = bag(batch), bag(batch_test)
curves = {"counted words": [], "frozen + head": []}
for n in n_labels:
    both = []
    for _ in range(3):  # other texts each time
        order = torch.randperm(len(y))
        some = torch.cat([order[y[order] == k][:n] for k in range(6)])
        counted = right(words_test @ count(words[some], y[some]).T)
        both.append([counted, right(x_test @ fit(x[some], y[some]).T)])
    for values, mean in zip(curves.values(), torch.tensor(both).mean(0)):
        values.append(100 * mean)

fig, (ax,) = plot.figure(4.6, 3.2)
for (name, values), style in zip(curves.items(), ("s--", "o-")):
    ax.plot(n_labels, values, style, label=name)
ax.set_xscale("log", base=2)
ax.set_xticks(n_labels, [str(n) for n in n_labels])
ax.set(xlabel="texts of each package", ylabel="right, %")
ax.set_title("Few labels: the model is ahead")
ax.legend(frameon=False)
plt.show()
for place, (a, b) in enumerate(zip(*curves.values())):
    assert b - a > 5 if place < 3 else b - a < 20
assert curves["frozen + head"][-1] < curves["counted words"][-1] + 5

# %%
# With two to eight texts of each package the model is far ahead. A word that no labelled text contains tells the count
# nothing; the model has learned from unlabelled text which words go together.
#
# Ask what the model had read
# ---------------------------
#
# That is the usual explanation. Before you believe it, ask what the "unlabelled text" was.

read, _ = split(corpus, held_out=0.05)  # as in the model's training
names = {document.name for document in read}
share = sum(document.name in names for document in test) / len(test)
print(f"test texts that the model had read in training: {share:.0%}")
assert share > 0.9

# %%
# The model was trained on these docstrings, each below its full name: the answer was on the line above. Does it know the
# subject, or remember the text? On modules that it had never read, its lead over counting is much smaller, as the in-depth
# page measures. Large models have read most of the internet, test sets included, so ask this of every result.
#
# Where it goes wrong
# -------------------
#
# Row by row: where do the texts of a package go? The numbers are per cent of the row.

confusion = torch.zeros(6, 6)
for truth, answer in zip(y_test, logits.argmax(1)):
    confusion[truth, answer] += 1
percent = 100 * confusion / confusion.sum(1, keepdim=True)

fig, (ax,) = plot.figure(4.6, 4.2)
plot.number_map(ax, percent, largest=100)
ax.set_xticks(range(6), PACKAGES, rotation=45, ha="right")
ax.set_yticks(range(6), PACKAGES)
ax.set(xlabel="answer", ylabel="package", title="Confusion, fine-tuned")
plt.show()
assert confusion.sum() == len(test)

# %%
# The diagonal is what it gets right. Look for the largest number beside it: which two packages write about the same
# things?
#
# Exercises
# ---------
#
# 1. Read the state of the *first* token instead of the last. A good answer gives the rate, and says why it is that of
#    one constant answer.
# 2. Read the mean of all real states instead of the last one. A good answer shows that a text alone and the same
#    text in a padded batch get the same scores.
# 3. Keep the name in front of the text (``document.text`` as it is). A good answer says which of the three methods
#    profits most, and what such a result would be worth.
#
# Summary
# -------
#
# * A classifier is a backbone and one matrix. In a causal model the matrix reads the last *real* token, found by its
#   position.
# * Reading the last column of a padded batch costs a quarter of the answers, without an error.
# * Count words first, and ask what the model had read: both decide what your result is worth.
