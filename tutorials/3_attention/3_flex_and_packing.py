r"""
Packing documents into rows
===========================

The texts of a batch have different lengths, so short rows are filled up with padding. A mask hides padding from
attention, but every block still computes it, and the result is thrown away.

Here are sixteen docstrings of Python's standard library, cut at 256 tokens, as one batch. Blue slots are tokens, grey
ones are padding.
"""

# sphinx_gallery_thumbnail_number = 5
# sphinx_gallery_needs = ["2_masks"]
# sphinx_gallery_words = ["flex_attention", "create_block_mask", "BlockMask", "mask_mod", "packing", "document mask", "cross-contamination", "sequence packing", "short texts in one row", "avoid padding in training", "several samples in one row", "concatenate samples", "concatenate documents", "waste on padding", "wasted compute", "padding waste", "varlen", "cu_seqlens", "block diagonal mask", "BOS between documents", "several documents", "group by length", "bucketing", "efficient batches"]

import torch

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.text.corpora import docstrings

gpt2, tokenizer = load_shipped("gpt2-docs")
torch.set_grad_enabled(False)
torch.manual_seed(0)
texts = [document.text for document in docstrings()]
order = torch.randperm(len(texts)).tolist()
start = tokenizer.eos_token_id
encoded = tokenizer.encode_batch([texts[i] for i in order[:4096]])
documents = [[start, *ids][:256] for ids in encoded]
batch = documents[:16]

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, LIGHT_GREY, figure


def draw(rows, width, title):
    _, (ax,) = figure(4.4, 0.8 + 0.13 * len(rows))
    for r, row in enumerate(rows):
        ax.broken_barh([(0, width)], (r - 0.4, 0.8), color=LIGHT_GREY)
        ends = [sum(map(len, row[: i + 1])) for i in range(len(row))]
        for i, ids in enumerate(row):
            bar = [(ends[i] - len(ids), len(ids))]
            ax.broken_barh(bar, (r - 0.4, 0.8), color=COLOURS[5 * (i % 2)])
    ax.set(title=title, yticks=[], ylim=(len(rows) - 0.5, -0.5))
    ax.set_xticks(range(0, 257, 64))
    ax.grid(False)
    plt.show()


draw([[ids] for ids in batch], max(map(len, batch)), "16 padded rows")

# %%
# One long document makes all sixteen rows long. Over many random batches, two thirds of all slots are padding:


def padding(rows, width):  # a row is a list of documents
    used = sum(len(ids) for row in rows for ids in row)
    return 1 - used / (len(rows) * width)


groups = [documents[i : i + 16] for i in range(0, len(documents), 16)]
shares = [padding([[x] for x in g], max(map(len, g))) for g in groups]
print(f"{sum(shares) / len(shares):.0%} of the slots are padding")

assert 0.6 < sum(shares) / len(shares) < 0.75

# %%
# You could sort the documents by length, so that each batch has documents of nearly one length. But then a batch is no
# longer a random sample: one has only short notes, the next only long explanations.
#
# Fill the rows
# -------------
#
# **Packing** puts several documents into one row, end to end. A simple rule is called *first-fit decreasing*: take the
# documents from long to short, and put each into the first row that has room.
#
# **Predict first.** How many rows of 256 slots do the sixteen documents need?
#
# * 12 or more
# * 8 to 11
# * fewer than 8


def first_fit(documents, width):
    rows, room = [], []
    for ids in sorted(documents, key=len, reverse=True):
        fits = (r for r in range(len(rows)) if room[r] >= len(ids))
        r = next(fits, len(rows))
        if r == len(rows):  # no row has room: begin a new one
            rows.append([])
            room.append(width)
        rows[r].append(ids)
        room[r] -= len(ids)
    return rows


draw(first_fit(batch, 256), 256, "the same documents, packed")

assert len(first_fit(batch, 256)) < 8

# %%
# Fewer than 8. Two shades of blue tell documents apart.
#
# Over all batches, less than a tenth of the slots is padding now. Long documents were cut at 256 tokens first; packing
# itself splits none.

many = [documents[i : i + 256] for i in range(0, len(documents), 256)]
rows = [row for group in many for row in first_fit(group, 256)]
print("below a tenth:", padding(rows, 256) < 0.1)

assert padding(rows, 256) < 0.1
assert sorted(x for row in rows for x in row) == sorted(documents)
assert max(map(len, encoded)) > 256 and max(map(len, documents)) == 256

# %%
# Three things to carry along
# ---------------------------
#
# The model must compute a packed document as if it were alone. For that the document needs
#
# 1. **positions** that start again at 0,
# 2. a **document number**, so that documents do not see each other,
# 3. **targets** that stop at its end, so that its last token does not have to predict the next document.
#
# Here are two sentences in a row of twelve slots. The last three slots are padding.

from lm_from_scratch.drawings.attention import packed_row

two = ["Close the file.", "Return a new list."]
pieces = [tokenizer.pieces(tokenizer.encode(text)) for text in two]
packed_row(pieces, 12)

# %%
# Suppose you forget the document numbers. The rule of the last lesson then compares only positions.
#
# **Predict first.** Which tokens does "Return" see, the first token of the second document?
#
# * only itself
# * itself and "Close"
# * itself and the whole first document

from lm_from_scratch.instruments.plot import mask_map

words = [piece.strip() for document in pieces for piece in document]
p = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])
leaky = p <= p[:, None]
print([words[s] for s in leaky[4].nonzero().flatten()])

_, (ax,) = figure(3.6, 3.6)
mask_map(ax, leaky, words, words, "without document numbers")
ax.tick_params(axis="x", rotation=90)
plt.show()

assert leaky[4].nonzero().flatten().tolist() == [0, 4]
assert leaky[0].nonzero().flatten().tolist() == [0, 4]

# %%
# Itself and "Close": both first tokens have position 0, so they see each other. "Close" even sees "Return", which comes
# after it in the row.
#
# The models of this package refuse such a row:

try:
    gpt2(torch.tensor([[*range(9)]]), positions=p[None])
except ValueError as error:
    refused = str(error).split(":")[0]
    print(refused)

assert refused == "row 0 has two tokens at position 0"

# %%
# Half a repair
# -------------
#
# Many programs make the mask from slots instead: a token sees all earlier slots of its row. In 2023 a user of
# `transformers <https://github.com/huggingface/transformers/issues/25452>`_ asked how to separate packed documents. It
# is tempting to start the positions again and change nothing else. But then a token still sees all earlier slots, as an
# `open pull request <https://github.com/huggingface/nanoVLM/pull/204>`_ to nanoVLM points out.
#
# What does this half of a repair cost a trained model?


def pack(rows, width):
    idx = torch.full((len(rows), width), start)  # (B, T)
    positions, numbers = torch.full_like(idx, -1), torch.full_like(idx, -1)
    for r, row in enumerate(rows):
        end = 0
        for number, ids in enumerate(row):
            at = slice(end, end + len(ids))
            idx[r, at] = torch.tensor(ids)
            positions[r, at] = torch.arange(len(ids))
            numbers[r, at] = number
            end += len(ids)
    return idx, positions, numbers


# %%
# **Predict first.** The shipped GPT-2 reads 43 packed documents. The targets are right. Which choice for the other two
# raises the loss most?
#
# * neither: positions run on through the row, and tokens see all earlier slots
# * positions only: they start again, but tokens see all earlier slots
# * numbers only: tokens see their own document, but positions run on

import torch.nn.functional as F

from lm_from_scratch.attention.kinds import attention_layers
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss

some = [ids for ids in documents if len(ids) < 200][::90]
idx, positions, numbers = pack(first_fit(some, 256), 256)
targets = next_token_targets(idx, positions=positions)
run_on = torch.where(positions >= 0, torch.arange(256), -1)


def slots(q, k, v, visibility, dropout=0.0):  # sees all earlier slots
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def loss(positions, attend):
    for layer in attention_layers(gpt2):
        layer.attend = attend
    logits = gpt2(idx, positions=positions, documents=numbers)
    return causal_lm_loss(logits, targets).item()


nats = {
    "neither": loss(run_on, slots),
    "positions only": loss(positions, slots),
    "numbers only": loss(run_on, sdpa_attention),
    "both": loss(positions, sdpa_attention),
}
for name, x in nats.items():
    print(f"{name:14} {x:.2f}")

_, (ax,) = figure(4.4, 2.4)
ax.barh(list(nats), list(nats.values()), color=COLOURS[0])
ax.set(title="Loss of packed documents", xlabel="nats per token")
ax.invert_yaxis()
plt.show()

assert len(some) == 43
assert max(nats, key=nats.get) == "positions only"
assert nats["positions only"] > nats["neither"] + 0.1
assert min(nats, key=nats.get) == "both"
assert all(nats[name] > nats["both"] + 0.1 for name in list(nats)[:3])

# %%
# Positions only. Half of the repair is the worst choice of all for this model. With neither, a row still looks like one long
# text. With positions only, several tokens of different documents are at each position, and they get mixed up.
#
# Libraries have changed since. In 2025 `transformers <https://github.com/huggingface/transformers/pull/39194>`_ learned
# to read the documents from positions that start again, if it gets no ``attention_mask``. TRL's `packing
# <https://github.com/huggingface/trl/pull/3526>`_ gives it such positions.
#
# With right positions and numbers, packing changes nothing. The second document of a row gets the logits that it gets
# alone.

at = numbers[0] == 1
row = [x[:1] for x in (idx, positions, numbers)]
packed = gpt2(row[0], positions=row[1], documents=row[2])[0, at]  # (n, V)
alone = gpt2(idx[:1, at])[0]
print("packed equals alone:", bool((packed - alone).abs().max() < 1e-4))

assert at.sum() > 1 and (packed - alone).abs().max() < 1e-4

# %%
# Skip what is hidden
# -------------------
#
# In a packed row most pairs of tokens are hidden, and we would like to skip them. PyTorch's **FlexAttention** takes the
# mask as a function. Given a row b of the batch, a head h, a query t and a key s, it says whether s is visible.

from torch.nn.attention.flex_attention import create_block_mask, flex_attention

p, d = positions[0], numbers[0]  # (256,)


def visible(b, h, t, s):
    return (p[s] >= 0) & (p[s] <= p[t]) & (d[s] == d[t])


size = (1, None, 256, 256)  # rows, heads, T, S
blocks = create_block_mask(visible, *size, device="cpu", BLOCK_SIZE=16)
print("more than half skipped:", blocks.sparsity() > 50)

assert blocks.sparsity() > 50

# %%
# The function is evaluated once, and each block of 16 queries and 16 keys is sorted into one of three kinds. In an
# empty block nothing is visible, and a GPU kernel skips it. In an orange block the kernel calls the function for each
# pair. In a blue block everything is visible, so it need not. Orange blocks lie on the diagonal, and where one document
# ends and the next one begins.

from matplotlib.colors import ListedColormap

at = torch.arange(256)
mask = visible(0, 0, at[:, None], at)  # (T, S)
share = mask.float().view(16, 16, 16, 16).mean((1, 3))  # of each block
kinds = (share > 0).long() + (share == 1).long()
shades = ListedColormap(["none", COLOURS[1], COLOURS[5]])

_, (ax,) = figure(3.8, 3.6)
ax.imshow(kinds.numpy(), cmap=shades, vmin=0, vmax=2, extent=(0, 256, 256, 0))
ax.set(title="Blocks of a packed row", xlabel="key", ylabel="query")
ax.set_xticks(range(0, 257, 64))
ax.set_yticks(range(0, 257, 64))
plt.show()

assert abs((kinds == 0).float().mean() - blocks.sparsity() / 100) < 1e-6

# %%
# On a GPU, the compiler builds the function into the attention kernel. On a CPU we run it uncompiled, which shows that
# the result is right, and says nothing about speed. Each document gets what it would get alone.

from lm_from_scratch.attention.flex import uncompiled

q, k, v = torch.randn(3, 1, 4, 256, 32)
with uncompiled():
    y = flex_attention(q, k, v, block_mask=blocks)  # (1, H, T, D)
at = d == 1
alone = torch.nn.functional.scaled_dot_product_attention(
    q[:, :, at], k[:, :, at], v[:, :, at], is_causal=True
)
print("packed equals alone:", bool((y[:, :, at] - alone).abs().max() < 1e-5))

assert (y[:, :, at] - alone).abs().max() < 1e-5

# %%
# Lengths instead of a mask, gradients, and scores that are a function are in
# `packing and FlexAttention in depth <3a_flex_and_packing_in_depth.ipynb>`_.
#
# Exercises
# ---------
#
# 1. Plot the share of padding for batches of 2, 4, 8, ..., 64 documents. A good answer rises, and explains why.
# 2. Count the rows that ``first_fit`` needs for all groups. Compare with the smallest number of rows that could hold
#    all tokens. A good answer is above it, by less than an eighth.
# 3. Give ``visible`` a window of 16. Predict how many blocks are skipped then, more or fewer. A good answer draws the
#    blocks.
#
# Summary
# -------
#
# * In batches of random documents two thirds of the work can be padding; packed rows waste less than a tenth.
# * A packed document needs its own positions, its own number, and targets that stop at its end. Half a repair can be
#   worse than none.
# * FlexAttention takes the mask as a function and skips the blocks in which nothing is visible.
