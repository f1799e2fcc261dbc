r"""
GPT-2, from token ids to the next word
======================================

You type the beginning of a sentence, and GPT-2 says how likely each next word is. What does it compute in between?
Two table lookups, weighted sums, and three small functions. On this page you write all of them, and the whole model
fits into 17 lines.

.. live:: next
   :model: gpt2-docs

Our model is a small GPT-2 that was trained on Python's documentation. Here is the whole of it. Each part is a link
to the section that explains it.
"""

# sphinx_gallery_needs = ["1_tokens"]
# sphinx_gallery_words = ["transformer", "decoder", "model.py", "nanoGPT", "forward pass", "logit lens", "unembedding", "transformer block", "transformer diagram", "transformer architecture", "self-attention", "multi-head attention", "nn.Embedding", "wte", "wpe", "lm_head", "c_attn", "positional embedding", "position_ids", "transformer from scratch", "124M parameters", "layer norm", "what is inside a language model", "how does GPT work", "how does a transformer work", "residual connection", "skip connection", "why residual", "architecture of GPT", "what is an embedding", "layers of a model", "next word prediction", "parts of a transformer", "implement GPT-2", "implement GPT-2 in PyTorch", "build a GPT", "inside GPT", "hidden state", "hidden states", "feed-forward network", "feedforward", "what is the MLP for", "n_embd", "n_layer", "n_head", "output layer", "word vectors", "vector of a word", "neural network of GPT", "what do the weights do", "role of the feed-forward layer", "what is a layer", "dimension of the embedding", "hidden size", "deep network", "depth", "intuition of a transformer"]
import torch
import torch.nn.functional as F

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import gpt2 as drawings

torch.set_grad_enabled(False)  # we read the model, we do not train it
model, tokenizer = load_shipped("gpt2-docs")

drawings.gpt2_blocks(
    8,
    {
        "lookups": "#two-lookups",
        "norm": "#layernorm",
        "attention": "#attention",
        "mlp": "#the-mlp",
        "stream": "#the-residual-stream",
        "logits": "#a-score-for-every-token",
    },
)

# %%
# A sentence becomes ids
# ----------------------
#
# With ``<|endoftext|>`` in front (⊢ in pictures), the token that starts a document, the text has T = 9 tokens. Their ids
# go into a *tensor*, PyTorch's array of numbers. A comment says its shape: ``(T,)`` is a row of T numbers, ``(T, C)`` a table with T rows and C
# columns.

text = "If the file does not exist, an"
ids = torch.tensor(tokenizer.start(text))  # (T,)
pieces = tokenizer.pieces(ids.tolist())

drawings.tokens(pieces, ids.tolist())

# %%
# Two lookups
# -----------
#
# All that the model has learned is in its tensors. We put them into a dictionary, by name.

w = {
    name.removeprefix("transformer."): tensor
    for name, tensor in model.state_dict().items()
}
V, C = w["wte.weight"].shape
print(f"{len(w)} tensors, V = {V}, C = {C}")

# %%
# The table ``wte`` (*word token embedding*) has one row of C = 128 numbers for each of the V = 4096 tokens in the
# vocabulary. An id chooses a row, and from now on this row, a *vector*, represents the token.
#
# Think of a vector as an arrow. Tokens that are used alike have rows that point in similar directions, and
# ``cosine_similarity`` compares directions: 1 is the same, 0 a right angle. These tokens are nearest to ``␣file`` (``␣`` is
# a space):

file = w["wte.weight"][ids[3]]  # ids[0] is <|endoftext|>, ids[3] " file"
similar = F.cosine_similarity(w["wte.weight"], file)  # (V,)
tokenizer.pieces(similar.topk(6).indices.tolist())

# %%
# A second table, ``wpe`` (*word position embedding*), has a row for each place in the text. The sum of both rows
# carries both: which token it is, and where. Indexing with ``ids`` picks T rows at once.

T = len(ids)
x = w["wte.weight"][ids] + w["wpe.weight"][:T]  # (T, C)

# %%
# **Predict first.** The tables have 4096 and 256 rows. The model has 2.1 million numbers. What share is in the tables?
#
# * about 1 %
# * about 26 %
# * about 90 %

tables = w["wte.weight"].numel() + w["wpe.weight"].numel()
total = sum(tensor.numel() for tensor in w.values())
print(f"{tables:,} of {total:,}: {tables / total:.0%}")

assert round(100 * tables / total) == 26
assert round(100 * (50257 + 1024) * 768 / 124_439_808) == 32

# %%
# About 26 %, nearly all of it in the table of tokens. In the smallest GPT-2 that OpenAI published, the two tables have
# 32 %.
#
# LayerNorm
# ---------
#
# Every part of the model reads a normalised copy of ``x``: each token's vector is shifted to mean 0, and scaled so that
# the mean of its squares is 1. Then each of the C columns gets a scale and a shift, both learned. In the names, ``h.0``
# is block 0, the first of eight.


def norm(x, name):
    x = x - x.mean(-1, keepdim=True)  # -1: one mean for each row, (T, 1)
    x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()  # never 0
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


h = norm(x, "h.0.ln_1")  # (T, C)

# %%
# Why? Vectors grow on their way through the model: that of our last token becomes more than 50 times as large. Thanks
# to the norm, every part meets vectors of the same size.
#
# Attention
# ---------
#
# So far each vector comes from its own token and place alone. In attention, tokens look back. Each receives a weighted
# mean of vectors that come from itself and from the tokens before it.
#
# Our tool is ``linear``. ``@`` is a *matrix product*: each number of the result is a weighted sum of one token's
# numbers, and the weights are learned. So is the *bias*, a number added to each sum, whatever the
# token. For now, take ``attention`` as a closed box and skip its lines. The next lesson,
# `who sees whom <3_who_sees_whom.ipynb>`_, explains each of them.


def linear(x, name):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def attention(h, i):  # of block i
    T, C = h.shape
    qkv = linear(h, f"h.{i}.attn.c_attn")  # (T, 3C)
    q, k, v = qkv.view(T, 3, 4, C // 4).permute(1, 2, 0, 3)  # (H, T, D)
    scores = q @ k.mT / (C // 4) ** 0.5  # (H, T, T)
    scores = scores + torch.full((T, T), -torch.inf).triu(1)
    y = scores.softmax(-1) @ v  # (H, T, D)
    y = y.transpose(0, 1).reshape(T, C)
    return linear(y, f"h.{i}.attn.c_proj")


# %%
# Attention happens in H = 4 *heads* side by side. Here are the weights of one head of block 5. The first token can
# look only at itself. The strongest of the other lines says: ``␣not`` takes 97 % of its mean from ``␣does``.

from lm_from_scratch.instruments.plot import attention_maps

maps = attention_maps(model, ids[None])  # [None]: a batch of one text
weights = maps[5][0, 1]  # block 5, text 0, head 1: (T, T)

assert round(100 * weights[5, 4].item()) == 97
assert weights[1:].max() == weights[5, 4]
drawings.lines(pieces, pieces, weights.tolist())

# %%
# The MLP
# -------
#
# The MLP (multilayer perceptron) works on what attention has brought. It makes each vector four times as wide,
# `bends <../0_from_zero/2_line_and_bend.ipynb>`_ each number by GELU, and goes back to C numbers. GELU keeps large
# numbers and turns negative ones into almost 0, so each of the 4C numbers acts as a switch.


def mlp(h, i):
    wide = linear(h, f"h.{i}.mlp.c_fc")  # (T, 4C)
    wide = F.gelu(wide, approximate="tanh")  # GPT-2's formula for GELU
    return linear(wide, f"h.{i}.mlp.c_proj")


# %%
# The MLP sees one token at a time. Change the vector of one token, and only this token's row of the result changes.
# In attention, the rows of all later tokens change too, because they look back at it.


def changed_rows(part):
    other = h.clone()
    other[3] += 1.0  # as if " file" were another token
    moved = (part(other, 0) - part(h, 0)).abs().amax(-1)  # (T,)
    return (moved > 1e-5).nonzero().flatten().tolist()


print("MLP      ", changed_rows(mlp))
print("attention", changed_rows(attention))

assert changed_rows(mlp) == [3]
assert changed_rows(attention) == [3, 4, 5, 6, 7, 8]

# %%
# The residual stream
# -------------------
#
# A block replaces nothing. It *adds* the results of attention and MLP to ``x``, and the sum flows on to the next
# block. This sum is the residual stream.


def run_blocks(x):
    stream = [x]
    for i in range(8):
        x = x + attention(norm(x, f"h.{i}.ln_1"), i)
        x = x + mlp(norm(x, f"h.{i}.ln_2"), i)
        stream.append(x)
    return stream


stream = run_blocks(x)  # 9 times (T, C)

assert 50 < stream[-1][-1].std() / stream[0][-1].std() < 70

# %%
# A score for every token
# -----------------------
#
# How does a vector become a word? After a last norm, we compare it with every row of ``wte``, the table from the
# beginning, by a *dot product*: multiply number by number, and add up. The better a row fits, the higher the score.
# These V scores are the *logits*.
#
# **Predict first.** What is the shape of the logits of our sentence?
#
# * (4096,)
# * (9, 128)
# * (9, 4096)


def score(x):
    return norm(x, "ln_f") @ w["wte.weight"].T


logits = score(stream[-1])
print(tuple(logits.shape))

# %%
# (9, 4096): each of the nine tokens guesses the one after it, so there are 9 rows of scores.
#
# Training uses all rows. To continue the text we need the last one. ``softmax`` turns its scores into probabilities:
# positive, with the sum 1.


def show_top(logits, n=5):
    best = logits[-1].softmax(-1).topk(n)
    words = tokenizer.pieces(best.indices.tolist())
    return drawings.bars(words, best.values.tolist())


show_top(logits)

# %%
# *If the file does not exist, an exception …* The model has learned how documentation goes on. ``␣error`` is almost
# as likely. (The tour shows another model, a Qwen2, which gives ``␣exception`` more than twice as much.)
#
# Here is the best guess before the first block (0) and after each block.

guesses = [score(x)[-1].softmax(-1).max(-1) for x in stream]
words = tokenizer.pieces([guess.indices.item() for guess in guesses])
shares = [100 * guess.values.item() for guess in guesses]

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import figure, printable

_, (ax,) = figure(4.4, 3.2)
ax.barh(range(9), shares)
ax.set_yticks(
    range(9), [f"{i}  {printable(word)}" for i, word in enumerate(words)]
)
ax.invert_yaxis()
ax.set(xlabel="probability in %", ylabel="blocks so far")
ax.set_title("Best guess after each block")
plt.show()

assert words[0] == " an" and shares[0] > 95
assert words[1] == " integer" and words[-3:] == ["\n"] + 2 * [" exception"]

# %%
# Before any block, the vector says only ``␣an``. One block later it guesses what often follows this word. Only the
# last two blocks make it ``␣exception``.
#
# **Predict first.** What happens to the guess if we leave out the positions, ``wpe``?
#
# * Nothing: the words are the same.
# * Another token becomes the best guess.
# * All tokens become equally likely.

without = score(run_blocks(w["wte.weight"][ids])[-1])

show_top(without)

# %%
# Another token, the end of a line, becomes the best guess. Every block was trained on the sum of a token's row and a
# place's row, and has never met one without the other.
#
# The whole model
# ---------------
#
# Here it is in one piece, with ``norm`` and ``linear`` from above.


def gpt2(ids):
    T = len(ids)
    x = w["wte.weight"][ids] + w["wpe.weight"][:T]  # (T, C)
    future = torch.full((T, T), -torch.inf).triu(1)
    for i in range(8):
        h = norm(x, f"h.{i}.ln_1")
        qkv = linear(h, f"h.{i}.attn.c_attn")  # (T, 3C)
        q, k, v = qkv.view(T, 3, 4, -1).permute(1, 2, 0, 3)  # (H, T, D)
        scores = q @ k.mT / q.shape[-1] ** 0.5  # (H, T, T)
        y = (scores + future).softmax(-1) @ v  # (H, T, D)
        y = y.transpose(0, 1).reshape(T, C)
        x = x + linear(y, f"h.{i}.attn.c_proj")
        h = norm(x, f"h.{i}.ln_2")
        h = linear(h, f"h.{i}.mlp.c_fc")  # (T, 4C)
        h = F.gelu(h, approximate="tanh")
        x = x + linear(h, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T  # (T, V)


# %%
# Its logits are those of the package's model, up to rounding.

mine = gpt2(ids)
theirs = model(ids[None])[0]  # the package's model
print(f"largest difference: {(mine - theirs).abs().max():.0e}")

assert tokenizer.pieces([without[-1].argmax().item()]) == ["\n"]
assert len({line for *_, line in gpt2.__code__.co_lines()}) == 17
torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0.0)
assert w["h.0.attn.c_proj.weight"].shape == (C, C)

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import Sampler

# exercise 1
assert tokenizer.pieces(
    complete(generate(model, [ids.tolist()], 6, Sampler(temperature=0)))[0][-6:]
) == [
    *tokenizer.pieces(tokenizer.encode(" exception\nis returned.")),
    "<|endoftext|>",
]

# %%
# The GPT-2 models that OpenAI published have other sizes, and their files store the matrices of ``linear`` as
# (inputs, outputs): drop the ``.T``. If you forget that, ``c_proj`` of attention, a square matrix, gives wrong
# numbers without an error. See `where libraries disagree <../2_qwen2/4b_conventions.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* Let the model write. In six steps, append the most likely token to ``ids`` and call ``gpt2`` again.
#    The right answer is *exception is returned*, with a line break in it, and the end of the document.
# 2. *Easy.* Leave out one block at a time, and print the best guess. Which block can the sentence spare least? A good
#    answer names the one without which ``␣exception`` gets less than 0.1 %, and says what only this block reads.
# 3. *Medium.* Count the numbers of one block on paper, from C alone. A good answer is a formula in C that gives
#    198,272 for C = 128, as do the sizes of the tensors whose names begin with ``h.0.``.
#
# Summary
# -------
#
# * An id chooses a row of ``wte``, and its place a row of ``wpe``. Their sum enters the residual stream.
# * Each block adds two things to the stream: attention, in which tokens look at earlier ones, and an MLP, which works
#   on each token alone. Both read a normalised copy.
# * The logits compare each token's last vector with all rows of ``wte``: (T, V), a guess after every token.
