r"""
What attention looks at
=======================

Attention lets a token read the tokens before it. Which ones does it read? The answer is a table of weights, and you
can look at it: click on a token, then on a head.

.. live:: look
   :prompt: If the file does not exist, an uninitialized object is

In this lesson you find three heads whose habit you can name, test them on many texts, switch them off, and watch a
model learn to copy.

One head, one map
-----------------

A block has several *heads*, and each looks in its own way. ``record_attention`` keeps their weights while the model reads.

The model is the course's small Qwen2, because its heads are the easiest to read. It attends as GPT-2 does;
chapter 2 shows where the two differ.
"""

# sphinx_gallery_needs = ["2_gpt2", "4_training"]
# sphinx_gallery_words = ["visualize attention", "attention weights", "attention heatmap", "output_attentions", "BertViz", "interpretability", "what does each head do", "what is a head in attention", "look inside a model", "which words does the model look at", "explain a prediction", "attention pattern", "pay attention to", "what the model pays attention to", "is attention an explanation", "roles of heads", "jobs of heads", "remove a head", "prune heads", "induction", "in-context learning", "few-shot", "copy a name", "why did the model say that", "visualise", "explainable AI", "XAI", "which words mattered", "saliency"]
# sphinx_gallery_thumbnail_number = 1

import torch
import torch.nn.functional as F

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.record import record_attention
from lm_from_scratch.models.modes import evaluating

model, tokenizer = load_shipped("qwen2-docs")


def look(model, idx):  # (B, T)
    with evaluating(model), record_attention(model) as recorded:
        model(idx)
    return torch.stack([layer[0] for layer in recorded])  # (L, B, H, T, T)


text = """If the file does not exist,
an uninitialized object is
returned by the iterator."""
ids = tokenizer.start(text)
maps = look(model, torch.tensor([ids]))[:, 0]  # (L, H, T, T)
print(maps.shape)

# %%
# There are 8 blocks of 4 heads, and each head has a *map* of 22 by 22 weights. Here is one of the 32.

import matplotlib.pyplot as plt

from lm_from_scratch.drawings import gpt2 as drawings
from lm_from_scratch.instruments import plot

words = tokenizer.pieces(ids)
fig, (ax,) = plot.figure(4.6, 4.6)
plot.attention_map(ax, maps[4, 3], words, "block 4, head 3")
ax.set(xlabel="is looked at", ylabel="looks")
plt.show()
assert maps.shape == (8, 4, 22, 22)

# %%
# Read a map row by row. A row is one token that looks; the dark cells in it are the tokens that it looks at. The row of
# "does" is dark at "file", so a copy of what "file" holds flows into "does".
#
# ⊢ is ``<|endoftext|>``, the start of the document; ``␣`` is a space, ``↵`` the end of a line.
#
# **Predict first.** What is the largest weight above the diagonal, in all 32 maps?
#
# * exactly 0
# * small, but above 0
# * close to 1

print(maps.triu(1).max())
print(maps.sum(-1).min(), maps.sum(-1).max())

assert maps.triu(1).max() == 0
assert ((maps.sum(-1) - 1).abs() < 1e-4).all()

# %%
# Exactly 0: a token above the diagonal is in the future, and the mask hides it. What remains of each row sums
# to 1, so a head that does not look here *must* look there.
#
# Three heads you can name
# ------------------------
#
# The head above looks at the previous token: in 14 of 22 rows, that is the darkest cell. Two others have habits that you
# can name, too.

fig, axes = plot.figure(4.6, 9.0, 2, 1)
for ax, (l, h) in zip(axes, [(7, 3), (1, 0)]):
    plot.attention_map(ax, maps[l, h], words, f"block {l}, head {h}")
    ax.set(xlabel="is looked at", ylabel="looks")
plt.show()
assert (
    sum(s == t - 1 for t, s in enumerate(maps[4, 3].argmax(-1).tolist())) == 14
)
assert words[8] == words[16] == "\n"
assert maps[7, 3, 9:16].argmax(-1).tolist() == [8, 10, 8, 8, 8, 8, 8]
assert (
    sum(s in (t, 0) for t, s in enumerate(maps[1, 0].argmax(-1).tolist())) > 12
)

# %%
# Head 7.3 (block 7, head 3) looks at line ends. Nearly the whole second line looks at the line end above it, whatever
# the token is.
#
# Head 1.0 looks at the token itself, or at the start of the text, in most rows. Inside a word each piece looks most at
# the piece before it. Here is "uninitialized", drawn as lines.

glue = maps[1, 0, 9:16, 9:16]
assert words[10:14] == [" un", "in", "itial", "ized"]
assert glue[2:5].argmax(-1).tolist() == [1, 2, 3]
drawings.lines(words[9:16], words[9:16], glue.tolist())

# %%
# Is it true of other texts?
# --------------------------
#
# One sentence proves nothing: with 32 maps, some will look like something. So turn each habit into a number. Mark the
# cells that the habit predicts, and measure the share of the weight that lies on them, in 24 pieces of text that the
# model was not trained on. ``score`` takes the mean of this share over all rows that have a marked cell.

from lm_from_scratch.text.corpora import load_corpus, split

_, held_out = split(load_corpus("reference"))
T, B = 128, 24
texts = [tokenizer.start(document.text) for document in held_out]
texts = [ids[i : i + T] for ids in texts for i in range(0, len(ids) - T, T)]
texts = torch.tensor(texts)
rows = texts[:B]  # (B, T)
many = look(model, rows)  # (L, B, H, T, T)
past = torch.ones(T, T, dtype=torch.bool).tril()


def score(maps, marked):
    marked = marked & past  # (B, T, T)
    has = marked.any(-1)[:, None]  # is there something to look at?
    weight = (maps * marked[:, None]).sum(-1)  # (L, B, H, T)
    return (weight * has).sum((1, 3)) / has.sum()  # (L, H)


assert rows.shape == (B, T) and len(texts) > 60

# %%
# The marks of the three habits are tensors of true and false: the cell left of the diagonal; all columns of line ends;
# and the cell left of the diagonal again, but only in rows that continue a word.

pieces = tokenizer.pieces(range(tokenizer.vocab_size))
line_end = torch.tensor(["\n" in piece for piece in pieces])[rows]
first = torch.tensor([piece[0].isalpha() for piece in pieces])[rows]
last = torch.tensor([piece[-1].isalpha() for piece in pieces])[rows]
inside = first & last.roll(1, 1)  # (B, T): continues a word
previous = torch.eye(T, dtype=torch.bool).roll(1, 0).expand(B, T, T)
marks = {
    "previous token": previous,
    "line ends": line_end[:, None, :].expand(B, T, T),
    "word pieces": previous & inside[:, :, None],
}
even = (past / past.sum(-1, keepdim=True)).expand(1, B, 1, T, T)
scores = {name: score(many, marked) for name, marked in marks.items()}
chance = {name: score(even, marked) for name, marked in marks.items()}

heads = {"previous token": (4, 3), "line ends": (7, 3), "word pieces": (1, 0)}
for name, (l, h) in heads.items():
    print(f"{name:15} {l}.{h}: {scores[name][l, h]:.2f}", end="   ")
    print(f"even: {chance[name].item():.2f}")

fig, axes = plot.figure(4.8, 4.2, 1, 3)
for ax, (name, found) in zip(axes, scores.items()):
    plot.number_map(ax, found, largest=0.8, decimals=1)
    ax.set_title(name, fontsize=10)
    ax.set(xticks=range(4), yticks=range(8), xlabel="head", ylabel="block")
plt.show()

for name in heads:
    assert divmod(int(scores[name].argmax()), 4) == heads[name]
for name, (l, h) in heads.items():
    assert scores[name][l, h] > 5 * chance[name]
assert scores["word pieces"][1, 0] > 2 * scores["previous token"][1, 0]
assert all(found.max() < 0.8 for found in scores.values())

# %%
# ``even`` is a head that looks at every token alike, and its score is what chance gives. Each of the three
# heads scores more than five times as much, so the habits are real. They are habits and not rules: no score
# reaches 0.8.
#
# Switch a head off
# -----------------
#
# A habit need not be useful. To find out, switch a head off: the heads of a block write their results side
# by side, D numbers each, and one matrix mixes them. Zeros instead of D numbers silence one head. A *hook*, which
# PyTorch calls just before that matrix, puts them there.

from contextlib import contextmanager


@contextmanager
def silenced(mix, head, H):
    def silence(module, inputs):
        y = inputs[0].unflatten(-1, (H, -1)).clone()  # (B, T, H, D)
        y[..., head, :] = 0
        return (y.flatten(-2),)  # (B, T, C)

    hook = mix.register_forward_pre_hook(silence)
    yield
    hook.remove()


def losses(model, idx):
    with evaluating(model):
        logits = model(idx[:, :-1]).flatten(0, 1)
    found = F.cross_entropy(logits, idx[:, 1:].flatten(), reduction="none")
    return found.view(len(idx), -1)  # (B, T - 1)


# %%
# **Predict first.** Which of two heads does the model miss more?
#
# * the one that looks at line ends, with its dark columns
# * the one that glues words together
# * it misses neither

rise = {}
whole = losses(model, texts).mean(1)  # of each text
for name, (l, h) in heads.items():
    with silenced(model.model.layers[l].self_attn.o_proj, h, 4):
        rise[name] = losses(model, texts).mean(1) - whole

for name, by_text in rise.items():
    print(f"without {name:15} loss {by_text.mean():+.3f}")

for gap in [rise["word pieces"] - rise["line ends"]]:
    assert gap.mean() > 2 * gap.std() / len(texts) ** 0.5
assert rise["line ends"].mean() < rise["previous token"].mean()
assert rise["previous token"].mean() < rise["word pieces"].mean()
assert all(by_text.mean() > 0.01 for by_text in rise.values())

# %%
# The one that glues words together. The model misses the head with the dark columns, too, but less: by more than twice the
# standard error. The head for the previous token lies between the two.
#
# A map is not an explanation
# ---------------------------
#
# In 2019 researchers drew the maps of BERT, a model of that time, and found layers with more than half of all weight on
# one token: the separator between two sentences. Was it so important? They measured how much the prediction depended on
# that weight. Hardly at all.
#
# Weights must sum to 1. A head that finds nothing has to leave them somewhere, and a token that is always there makes a
# good resting place: a separator, a line end, or, in many large models, the first token. A dark column says where a
# head looks, and not what the model needs.
#
# A head that learns to copy
# --------------------------
#
# One habit explains a great deal. A model that has read ``A B ... A`` can guess ``B``, whatever A and B are, if a head
# looks at the token *after* the earlier A. That is an *induction head*.
#
# The shipped models have none: `attention maps in depth <6a_attention_maps_in_depth.ipynb>`_ tests all their heads. So
# train the smallest model that needs one: two blocks with one head each, on secrets of 4 to 15 letters, each repeated
# until the line is full.

from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel

LETTERS, T = "abcdefghijklmnop", 48


def secrets(B):
    n = torch.randint(4, 16, (B, 1))
    secret = torch.rand(B, 16).argsort(1)  # (B, 16), no letter twice
    return secret.gather(1, torch.arange(T) % n), n  # (B, T), (B, 1)


torch.manual_seed(1)
idx, n = secrets(2)
for row in idx.tolist():
    print("".join(LETTERS[i] for i in row))

# %%
# We train only on letters that have appeared before; the rest cannot be known. ``cross_entropy`` skips a target of
# -100.

shape = dict(vocab_size=16, block_size=T, n_layer=2, n_head=1, n_embd=48)
rest = dict(initializer_range=0.1, bos_token_id=None, eos_token_id=None)
drop = dict(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
small = GPT2LMHeadModel(GPT2Config(**shape, **rest, **drop))
options = dict(lr=3e-3, betas=(0.9, 0.98), fused=True)
optimizer = torch.optim.AdamW(small.parameters(), **options)
for step in range(160):
    idx, n = secrets(24)
    seen = torch.where(torch.arange(1, T) > n, idx[:, 1:], -100)
    loss = F.cross_entropy(small(idx)[:, :-1].transpose(1, 2), seen)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 39:
        print(f"step {step + 1:3}   loss {loss.item():.2f}")

assert loss < 1.0

# %%
# A guess among 16 letters has a loss of log 16 = 2.77. Now both heads read a new secret of 10 letters, twice.

secret = torch.rand(1, 16).argsort(1)[:, :10]
idx = torch.cat([secret, secret], 1)  # (1, 20)
letters = [LETTERS[i] for i in idx[0]]
both = look(small, idx)[:, 0, 0]  # (2, 20, 20)

fig, axes = plot.figure(4.6, 9.0, 2, 1)
for ax, weights, title in zip(axes, both, ("block 0", "block 1")):
    plot.attention_map(ax, weights, letters, title)
    ax.set(xlabel="is looked at", ylabel="looks")
plt.show()
assert both[1, 10:, 1:11].diagonal().mean() > 0.6

# %%
# The stripe in block 1 is the induction head: each letter of the second copy looks at the letter that
# came *after* it in the first. But how does a head find a place by its neighbour?
#
# **Predict first.** Switch off the head of *block 0*. What happens to the stripe in block 1?
#
# * it stays: each head computes its own map
# * it becomes a little paler
# * it is gone

before = losses(small, idx)[0, 10:].mean()
with silenced(small.transformer.h[0].attn.c_proj, 0, 1):
    blind = look(small, idx)[1, 0, 0]  # (20, 20)
    after = losses(small, idx)[0, 10:].mean()
print(f"loss of the second copy {before:.2f} -> {after:.2f}")

fig, (ax,) = plot.figure(4.6, 4.6)
plot.attention_map(ax, blind, letters, "block 1, with block 0 silenced")
ax.set(xlabel="is looked at", ylabel="looks")
plt.show()
assert (
    blind[10:, 1:11].diagonal().mean()
    < 0.5 * both[1, 10:, 1:11].diagonal().mean()
)
assert after > before + 1 and after > torch.tensor(16.0).log()

# %%
# It is gone, although nobody touched the head of block 1, and the loss is worse than that of a guess. The two heads form a
# circuit: the first adds to each letter's vector which letters came before it, and the second reads that note. An "x" looks
# for a letter that says "I came after x".
#
# Exercises
# ---------
#
# 1. Mark the token itself (the diagonal) as a fourth habit, and run ``score``. A good answer names the head with the
#    highest score, and says whether it is further from ``even`` than the three above.
# 2. Write three lines of your own into ``text``, with a long rare word. A good answer lists the rows in which head 1.0
#    looks more at the token before than at itself, and says how many continue a word.
# 3. Train the small model with ``n_layer=1``. A good answer says how low the loss gets, and why one block
#    cannot do better.
#
# Summary
# -------
#
# * A map has a row for each token that looks; its weights sum to 1, and those of the future are exactly 0.
# * To claim that a head has a habit, mark the cells that the habit predicts, and compare the weight on them with
#   chance, on many texts.
# * A map shows where a head looks. Only switching the head off shows what it is needed for.
