r"""
Learning curves in depth: what has the model learned?
=====================================================

The loss falls. Is the model good? Which of two numbers is better, and by how much must they differ? This page
deepens the lesson on `training <4_training.ipynb>`_: it puts models that you can count by hand, compressors,
several seeds and a control beside the curve. Whether the loop itself is right is the question of
`training in depth <4a_training_in_depth.ipynb>`_.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["perplexity", "bits per byte", "nats", "baseline", "unigram", "bigram", "memorization", "seed", "evaluate a language model", "evaluation metric", "how good is my model", "compare two losses", "compression", "bits per character", "how to compare models", "train and test split", "does the model store its training text", "store the texts"]

import json
import math
import re
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from lm_from_scratch.instruments.plot import COLOURS, GREY, figure
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.text.batches import (
    PackedBatches,
    sequential_batches,
    write_tokens,
)
from lm_from_scratch.text.corpora import load_corpus, split
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.text.tokenizer import Tokenizer

train_documents, held_out_documents = split(load_corpus("reference"))
tokenizer = Tokenizer.train(
    [document.text for document in train_documents], 1024
)
V = tokenizer.vocab_size
assert V == 1024

folder = tempfile.TemporaryDirectory()
work = Path(folder.name)
train_file = write_tokens(train_documents, tokenizer, work / "train.bin")
held_out_file = write_tokens(
    held_out_documents, tokenizer, work / "held_out.bin"
)
for name, documents, file in [
    ("train", train_documents, train_file),
    ("held out", held_out_documents, held_out_file),
]:
    print(
        f"{name:9} {len(documents):3} documents {file.n_bytes:7} bytes {file.n_tokens:7} tokens"
    )

# %%
# One loss, four units
# --------------------
#
# The same number is quoted in four units. *Perplexity* is :math:`e^{\mathcal{L}}`: a model with
# perplexity 20 is as surprised as one that chooses evenly among 20 tokens. *Bits* use the logarithm to
# the base 2. *Bits per byte* spread the bits over the bytes of the text instead of over the tokens.
#
# .. math::
#
#    \text{bits per byte} = \frac{\mathcal{L}}{\log 2} \cdot \frac{\text{tokens}}{\text{bytes}}
#
# The first token of the file has no target, so the number of predicted tokens is one less than the
# number of tokens.


def bits_per_byte(loss, file):
    return loss / math.log(2) * (file.n_tokens - 1) / file.n_bytes


uniform = math.log(V)
bits = uniform / math.log(2)
print(
    f"uniform: {uniform:.2f} nats = {bits:.2f} bits a token, perplexity {math.exp(uniform):.0f}"
)
print(f"uniform: {bits_per_byte(uniform, held_out_file):.2f} bits a byte")

torch.testing.assert_close(
    math.exp(uniform), float(V)
)  # perplexity of the uniform model
torch.testing.assert_close(2**bits, math.exp(uniform))
torch.testing.assert_close(bits, 10.0)  # 1024 = 2 ** 10

# %%
# Why four? A loss per token depends on what a token is. Take a tokenizer that knows the 256 bytes and
# the end of the text, nothing else. Its uniform model has a *lower* loss per token, because it chooses
# among fewer tokens. In bits per byte, it is the worse one by far.

byte_tokenizer = Tokenizer.train(["x"], 257)
byte_file = write_tokens(held_out_documents, byte_tokenizer, work / "bytes.bin")
assert (
    byte_file.n_tokens == byte_file.n_bytes + len(held_out_documents) + 1
)  # a token is a byte

for name, n, file in [("bytes", 257, byte_file), ("BPE", V, held_out_file)]:
    each = math.log(n)
    print(
        f"{name:5}  {each:.2f} nats a token  {bits_per_byte(each, file):.2f} bits a byte"
    )
assert math.log(257) < math.log(V)
assert bits_per_byte(math.log(257), byte_file) > 1.5 * bits_per_byte(
    math.log(V), held_out_file
)

# %%
# So: compare losses per token only between models with the same tokenizer. For everything else, and
# for compressors, use bits per byte.
#
# A run to look at
# ----------------
#
# ``train`` of the package is a generator: it does one step, yields what it measured, and waits. So the
# loop below belongs to you, and between two steps you can look at the model. Every 50 steps the
# generator measures the held-out loss; we add samples, and a number that is explained below.

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.models.modes import evaluating
from lm_from_scratch.runs.config import TrainConfig, train
from lm_from_scratch.training.train import evaluate

batches = PackedBatches(train_file, batch_size=8, block_size=64)
nano = GPT2Config(
    vocab_size=V,
    block_size=64,
    n_layer=2,
    n_head=4,
    n_embd=64,
    initializer_range=0.04,
    embd_pdrop=0.0,
    resid_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=tokenizer.eos_token_id,
    eos_token_id=tokenizer.eos_token_id,
)

config = TrainConfig(steps=200, lr=5e-3, min_lr=5e-4, warmup=40, eval_every=50)
torch.manual_seed(0)
model = GPT2LMHeadModel(nano)

held_out = list(sequential_batches(held_out_file, batch_size=32, block_size=64))
prompt = [tokenizer.eos_token_id, *tokenizer.encode("The")]


def speak(model):
    steps = generate(
        model, [prompt], 60, Sampler(temperature=0.8), num_return_sequences=8
    )
    return [tokenizer.decode(prompt[1:] + row) for row in complete(steps)]


def entropy(p):
    return -torch.special.xlogy(p, p).sum(-1)


def context_used(model, batch):
    with evaluating(model):
        p = (
            model(
                batch.idx, positions=batch.positions, documents=batch.documents
            )
            .softmax(-1)
            .flatten(0, 1)
        )  # (N, V)
    return float(entropy(p.mean(0)) - entropy(p).mean())


history, context, samples = (
    [],
    {0: context_used(model, held_out[0])},
    {0: speak(model)},
)
for step in train(model, batches, config, held_out):
    history.append(step)
    if step.step == 30 or step.step % 50 == 0:
        context[step.step] = context_used(model, held_out[0])
    if step.step in (30, 100, 200):
        samples[step.step] = speak(model)
    if step.step in (1, 30, 100, 200):
        print(
            f"step {step.step:3}  loss {step.loss:.2f}  gradient norm {step.grad_norm:.2f}"
        )

# %%
# Reading the curve
# -----------------
#
# A loss alone means little. Compare it with models that you can count by hand. The *unigram* knows how
# often each token occurs. The *bigram* knows how often each token follows each other token:
#
# .. math::
#
#    p(b \mid a) = \frac{n_{ab} + k\, p(b)}{n_a + k}
#
# The constant :math:`k` mixes the unigram in where pairs are rare. We choose it on the held-out text
# itself, which is unfair in favour of the bigram.

seen = np.asarray(train_file.tokens, dtype=np.int64)
new = np.asarray(held_out_file.tokens, dtype=np.int64)
p_one = (np.bincount(seen, minlength=V) + 1.0) / (len(seen) + V)
pairs = np.zeros((V, V))
np.add.at(pairs, (seen[:-1], seen[1:]), 1.0)


def bigram_loss(k):
    p = (pairs + k * p_one) / (pairs.sum(1, keepdims=True) + k)
    np.testing.assert_allclose(p.sum(1), 1.0)
    return -np.log(p[new[:-1], new[1:]]).mean()


levels = {
    "uniform": math.log(V),
    "unigram": -np.log(p_one[new[1:]]).mean(),
    "bigram": min(bigram_loss(k) for k in (1, 3, 10, 30, 100, 300)),
}
final = history[-1].held_out_loss
for name, level in [*levels.items(), ("model", final)]:
    print(
        f"{name:8} {level:.2f} nats a token   perplexity {math.exp(level):5.1f}"
    )
assert levels["bigram"] + 0.1 < final < levels["unigram"] - 0.7

# %%
# Seconds are enough to beat the unigram by far, but not the bigram, which has counted every pair of the text: a strong
# baseline. Only a model that beats it has learned more than pairs.

measured = [step for step in history if step.held_out_loss is not None]
fig, (ax,) = figure(5.6, 4.0)
ax.plot(
    [s.step for s in history],
    [s.loss for s in history],
    color=GREY,
    linewidth=0.8,
)
ax.plot(
    [s.step for s in measured],
    [s.held_out_loss for s in measured],
    "o-",
    markersize=3,
)
ax.text(
    206,
    np.mean([s.loss for s in history[-50:]]),
    "batch",
    va="center",
    color=GREY,
)
ax.text(206, final, "held out", va="center", color=COLOURS[0])
for colour, (name, level) in zip(
    (COLOURS[2], COLOURS[3], COLOURS[7]), levels.items()
):
    ax.axhline(level, linestyle="--", linewidth=1.2, color=colour)
    ax.text(206, level + 0.02, name, va="bottom", color=colour)
ax.set(xlabel="step", ylabel="loss, nats per token", xlim=(0, 250))
ax.set_title("A model learns: the loss and three baselines")
plt.show()

# %%
# Is there a moment at which the model has learned the frequencies and nothing else? A number makes it visible. Compare the
# entropy :math:`H` of the *mean* prediction with the *mean entropy* of the predictions:
#
# .. math::
#
#    I = H\Bigl(\frac{1}{N} \sum_t p_t\Bigr) - \frac{1}{N} \sum_t H(p_t)
#
# If the model says the same thing whatever it has read, the two are equal and :math:`I` is 0. The more the
# predictions differ from context to context, the larger it is.

early = history[29].loss
fig, (ax,) = figure(5.4, 3.2)
ax.plot(list(context), list(context.values()), color=COLOURS[3])
ax.axvline(30, color=COLOURS[7], linestyle=":", linewidth=1.2)
ax.text(36, 0.6, "step 30:\nonly frequencies")
ax.set(xlabel="step", ylabel="context used I, nats", ylim=(-0.05, None))
ax.set_title("How much the predictions depend on the context")
plt.show()

print(
    f"step 30:  loss {early:.2f}, unigram {levels['unigram']:.2f}, context {context[30]:.3f}"
)
print(f"step 200: context {context[200]:.2f}")
assert min(context.values()) > -1e-4  # never negative, up to rounding
assert abs(early - levels["unigram"]) < 0.3
assert context[30] < context[0] < 0.2 and context[30] < 0.05
assert context[200] > 0.5

# %%
# At step 30 the loss is within 0.3 nats of the unigram, and :math:`I` is below 0.05 nats: less than in the
# random model, whose predictions depended on the context without any sense. At the end it is more than 0.5
# nats. The model learned *what is frequent*, then *what follows what*.
#
# What the model says on the way
# ------------------------------
#
# The same prompt and the same random numbers at four moments; ``▯`` is a byte that is no character. Above each is
# a number measured on eight such samples: the share of the words of three letters or more that occur in
# the training text.

known = set(
    re.findall("[A-Za-z]{3,}", "\n".join(d.text for d in train_documents))
)
share = {}
for number, texts in samples.items():
    words = [
        word for text in texts for word in re.findall("[A-Za-z]{3,}", text)
    ]
    share[number] = sum(word in known for word in words) / len(words)
    print(f"--- step {number}: {share[number]:.0%} of the words are known")
    print(re.sub(r"[^ -~\n]", "▯", texts[0][:140]))
assert share[200] > share[0] + 0.2

# %%
# Two hundred steps do not make an author.
#
# How much is luck?
# -----------------
#
# Another seed gives other random weights and other batches, and so another loss. Before you call one learning rate
# better than another, look at how far apart runs of the *same* setting end. Three seeds for each of two rates, 24
# steps each:

ends = {}
for lr in (2e-3, 3e-3):
    short = TrainConfig(steps=24, lr=lr, warmup=12, eval_every=24)
    for seed in range(3):
        torch.manual_seed(seed)
        data = PackedBatches(train_file, batch_size=4, block_size=64, seed=seed)
        steps = list(train(GPT2LMHeadModel(nano), data, short, held_out[:1]))
        ends.setdefault(lr, []).append(steps[-1].held_out_loss)

fig, (ax,) = figure(4.8, 2.4)
for row, (lr, losses) in enumerate(ends.items()):
    ax.plot(losses, [row] * 3, "o", alpha=0.5, label=f"lr = {lr}")
    ax.plot([np.mean(losses)], [row], "|", color=GREY, markersize=24)
ax.set_yticks(range(2), [f"lr {lr}" for lr in ends])
ax.set(xlabel="held-out loss, nats per token", ylim=(-0.7, 1.7))
ax.set_title("Three seeds, two learning rates")
plt.show()
for lr, losses in ends.items():
    print(f"lr {lr}: mean {np.mean(losses):.3f}, spread {np.std(losses):.3f}")
    assert 0.002 < np.std(losses) < 0.2

# %%
# The grey line is the mean. A difference that is smaller than the spread of the dots says nothing: run more seeds, or
# run longer.
#
# The model that ships with this package
# --------------------------------------
#
# The package contains a GPT-2 of 8 layers that was trained on the language reference and on the
# docstrings of the standard library: for longer, with dropout, and with the optimizer `Muon
# <../7_optimizers/6_muon.ipynb>`_ in place of AdamW. Every step of that run is recorded; the lesson draws it.

from lm_from_scratch.checkpoint.folders import SHIPPED
from lm_from_scratch.checkpoint.weights import load_shipped

log = [
    json.loads(line)
    for line in (SHIPPED / "log.jsonl").read_text().splitlines()
]
record = json.loads((SHIPPED / "record.json").read_text())
shipped, shipped_tokenizer = load_shipped()
shipped_uniform = math.log(shipped.config.vocab_size)
assert shipped.config.n_layer == 8
assert [line["step"] for line in log] == list(range(1, len(log) + 1))
assert (
    abs(log[0]["loss"] - shipped_uniform) < 0.1
)  # check 1: the run began at log V

begin = [shipped_tokenizer.eos_token_id, *shipped_tokenizer.encode("The")]
said = complete(generate(shipped, [begin], 50, Sampler(temperature=0.8)))[0]
print(shipped_tokenizer.decode(begin[1:] + said))

# %%
# Its vocabulary has 4096 tokens, so its loss per token cannot be compared with that of our nano model.
# Bits per byte can. We measure both models, now, on the held-out part of the reference, and put
# compressors beside them: a model that predicts a text well can compress it, to just its bits per byte. The
# compressor ``xz`` is measured twice. The second time it has read the training text first, as the models
# have.

import gzip
import lzma

shipped_files = {
    name: write_tokens(
        documents, shipped_tokenizer, work / f"shipped-{name}.bin"
    )
    for name, documents in [
        ("train", train_documents),
        ("held out", held_out_documents),
    ]
}
block = shipped.config.block_size
shipped_loss = evaluate(
    shipped, sequential_batches(shipped_files["held out"], 16, block)
)

text = "".join(document.text for document in held_out_documents).encode()
before = "".join(document.text for document in train_documents).encode()
assert len(text) == held_out_file.n_bytes
after = len(lzma.compress(before + text)) - len(lzma.compress(before))
bpb = {
    "unigram": bits_per_byte(levels["unigram"], held_out_file),
    "gzip": 8 * len(gzip.compress(text, 9)) / len(text),
    "xz": 8 * len(lzma.compress(text)) / len(text),
    "bigram": bits_per_byte(levels["bigram"], held_out_file),
    "xz + training": 8 * after / len(text),
    "nano model": bits_per_byte(final, held_out_file),
    "shipped model": bits_per_byte(shipped_loss, shipped_files["held out"]),
}
bpb = dict(sorted(bpb.items(), key=lambda item: item[1], reverse=True))

fig, (ax,) = figure(5.4, 3.2)
colours = [COLOURS[0] if "model" in name else GREY for name in bpb]
bars = ax.barh(list(bpb), list(bpb.values()), color=colours)
ax.bar_label(bars, fmt="%.2f", padding=3)
ax.invert_yaxis()
ax.grid(False, axis="y")
ax.set(
    xlabel="bits per byte of held-out text", xlim=(0, 1.15 * max(bpb.values()))
)
ax.set_title("Predicting and compressing on one scale")
plt.show()

recorded = record["held_out"]["reference"]["bits_per_byte"]
print(f"{bpb['shipped model']:.2f} measured now, {recorded:.2f} recorded")
assert abs(bpb["shipped model"] - recorded) < 0.15
assert min(bpb, key=bpb.get) == "shipped model"
assert bpb["bigram"] < bpb["nano model"] < bpb["unigram"]
assert bpb["xz + training"] < bpb["xz"] < bpb["nano model"]

# %%
# The figure goes from the worst to the best. The shipped model comes out ahead of everything else, even of
# ``xz + training``, which may look phrases up in the training text, while a model has only its weights. (But
# the shipped model has also read the docstrings.) The nano model beats the unigram alone.
#
# What the model knows by heart
# -----------------------------
#
# A model does better on text that it was trained on. But texts differ in difficulty, so the unigram
# is a control: it is too simple to know a text by heart, and its gap says how much of the
# difference comes from the frequency of the tokens.


def every(file, block, n):
    return list(sequential_batches(file, 16, block))[::n]


def unigram_loss(file, batches):
    counts = np.bincount(file.tokens) + 1.0
    log_p = torch.tensor(np.log(counts / counts.sum()))
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    return float(-log_p[targets[targets != IGNORE]].mean())


easy = every(shipped_files["train"], block, 40)
hard = every(shipped_files["held out"], block, 1)
known = bits_per_byte(evaluate(shipped, easy), shipped_files["train"])
new = bpb["shipped model"]  # measured above
gap = bits_per_byte(
    unigram_loss(shipped_files["train"], hard), shipped_files["held out"]
) - bits_per_byte(
    unigram_loss(shipped_files["train"], easy), shipped_files["train"]
)
print(
    f"train {known:.2f}, held out {new:.2f} bits a byte: {new - known:.2f} more"
)
print(f"the unigram: {gap:.2f} more")
assert new - known > max(gap, 0.0) + 0.1

paragraphs = {
    part.strip() for d in train_documents for part in d.text.split("\n\n")
}
for part in (
    part.strip() for d in held_out_documents for part in d.text.split("\n\n")
):
    assert len(part) < 40 or part not in paragraphs

# %%
# The gap of the model is larger than that of the unigram. The rest is not explained by the frequency of the
# tokens, and the likely cause is memory: the model knows a part of the training text by heart.
#
# The training loss alone would not have shown this. That is **check 5**: measure on text that the model has not
# seen, and whose paragraphs are not in the training text either.
#
# Exercises
# ---------
#
# 1. *Easy.* Print the held-out loss of the nano model in all four units. Two tokenizers give two models
#    the same perplexity: what else do you need to know before you call them equally good? Hint: the
#    length of the text in bytes is the same for both.
# 2. *Easy.* Train the nano model with ``lr=3e-2``. Between which two baselines does it end? Hint:
#    ``replace(config, lr=3e-2)``, and a fresh model.
# 3. *Medium.* Write a trigram that mixes the bigram in. Does it beat the bigram? What does a
#    model still have ahead of it? Hint: count with a ``Counter``, and choose both constants on the
#    held-out text.
#
# Summary
# -------
#
# * Compare losses per token only between models with the same tokenizer; bits per byte compare everything.
# * The nano model learned frequencies first and context second. A bigram is a strong baseline for a short run.
# * Differences smaller than the spread between seeds say nothing.
# * On the training text the shipped model does better than on held-out text, by more than the frequency of the tokens
#   explains. So measure on text that the model has not seen (check 5).
#
# Sources
# -------
#
# * Radford et al.: `Language Models are Unsupervised Multitask Learners <https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf>`_, 2019. GPT-2.
# * Delétang et al.: `Language Modeling Is Compression <https://arxiv.org/abs/2309.10668>`_, 2023.
# * Karpathy: `A Recipe for Training Neural Networks <https://karpathy.github.io/2019/04/25/recipe/>`_, 2019. The loss at the start, and overfitting one batch.

import platform

import lm_from_scratch

folder.cleanup()
print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
