r"""
Attention: who sees whom
========================

*If the file does not exist, an …* Which of these words matter for the next one? In attention, tokens look at each other.
Here is one attention head of a trained GPT-2. The wider a line, the more the token on the left takes from the token on
the right.
"""

# sphinx_gallery_needs = ["2_gpt2"]
# sphinx_gallery_words = ["self-attention", "causal mask", "multi-head attention", "masked_fill", "tril", "Q K V", "attention mask", "-inf", "triu", "autoregressive mask", "look-ahead", "attention explained", "what is self-attention", "how do words influence each other", "query key value explained", "causal language model", "why a causal mask", "future tokens", "why softmax in attention", "dot product of query and key", "triangular mask", "lower triangular", "why several heads", "multi-head vs single-head", "intuition behind attention", "context", "words in context", "context of a word", "meaning of a word in its context", "ambiguous word", "pronoun", "look ahead", "cheat", "see the answer", "attention mechanism", "what do query key and value mean"]
# sphinx_gallery_museum = ["G25"]
import torch
import torch.nn.functional as F

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.record import record_hidden_states

torch.set_grad_enabled(False)
model, tokenizer = load_shipped("gpt2-docs")
ids = torch.tensor(tokenizer.start("If the file does not exist, an"))
pieces = tokenizer.pieces(ids.tolist())
T, H, D = len(ids), 4, 32  # tokens, heads, numbers in a query

from lm_from_scratch.drawings import gpt2 as drawings
from lm_from_scratch.instruments.plot import attention_maps

maps = attention_maps(model, ids[None])  # of each block: (1, H, T, T)
assert maps[5][0, 0, 4:].argmax(-1).tolist() == [3, 3, 1, 3, 3]
drawings.lines(pieces, pieces, maps[5][0, 0].tolist())

# %%
# This is head 0 of block 5 (counted from 0), and it likes ``␣file``: of the five tokens after this word,
# four look at it most. The first tokens have little to choose from, and no line goes to a later token. On this page
# you compute these lines.
#
# One word, two meanings
# ----------------------
#
# *set* is a noun in "This is a set", and a verb in "The value is set". Both times its place is 4, so the two lookups
# give it the same vector. What comes next?

for text in ("This is a set", "The value is set"):
    logits = model(torch.tensor([tokenizer.start(text)]))[0, -1]  # (V,)
    p, best = logits.softmax(-1).max(-1)
    print(f"{text}{tokenizer.pieces([best.item()])[0]}: {p:.0%}")

assert tokenizer.pieces([best.item()]) == [" to"]
assert tokenizer.start(text)[4:] == tokenizer.start("This is a set")[4:]

# %%
# A set *of* something, or set *to* something. Every other part sees one token at a time: only attention can tell.
#
# Query, key, value
# -----------------
#
# In a head, each token makes three short vectors from its long one:
#
# * a *query*: what I look for,
# * a *key*: what I offer, so that others find me,
# * a *value*: what I hand over to those who look at me.
#
# Think of a library. The query is what you type into the search box, keys are the titles on the spines, and values are
# what is in the books.
#
# Where do they come from? From three tables of learned numbers, by which the long vector is multiplied. Nobody decided what
# a head should look for: the tables began at random, and training changed them.
#
# In GPT-2 one ``linear``, here called ``c_attn``, holds the three tables of all heads side by side. It reads ``x``, the
# residual stream after blocks 0 to 4, normalised by ``ln_1``:

with record_hidden_states(model) as states:
    model(ids[None])
x = states[5][0][0]  # (T, C), what enters block 5

block = model.transformer.h[5]
qkv = block.attn.c_attn(block.ln_1(x))  # (T, 3C)
Q, K, V = qkv.split(128, dim=-1)  # each (T, C)

# %%
# A head owns D = 32 of the C = 128 columns of each. Head 0, the first of four, owns columns 0 to 31.

q, k, v = Q[:, :32], K[:, :32], V[:, :32]  # each (T, D)

# %%
# One token looks back
# --------------------
#
# Take the last token, ``␣an``. It looks back in three steps:
#
# 1. The dot product of its query with each key, divided by √D, is a *score*. It is large if the two fit.
# 2. Softmax takes e to the power of each score and divides by the sum. This makes *weights*: none is negative, and their
#    sum is 1.
# 3. The token receives the mean of all values, weighted in this way.

scores = k @ q[-1] / D**0.5  # (T,): q[-1] with each row of k
weights = scores.softmax(-1)  # (T,)
y = weights @ v  # (D,)

from lm_from_scratch.drawings.attention import query_steps

vectors = q[-1].tolist(), k.tolist(), v.tolist()
torch.testing.assert_close(weights, maps[5][0, 0, -1])
assert 0.6 < weights[pieces.index(" file")] < 0.66
query_steps(pieces, *vectors, compared=3)

# %%
# Go through the steps. Each row of bars is one vector of 32 numbers: up is positive, down is negative. Only the key of
# ``␣file`` fits, so nearly two thirds of what ``␣an`` receives come from ``␣file``. As a formula, the weight of the token
# at place s is
#
# .. math::
#
#    a_s = \operatorname{softmax}_s \left( \frac{q \cdot k_s}{\sqrt{D}} \right)
#
# Why the *root* of D? A score adds up D products, some positive, some negative. Such a sum is like a walk of D steps, each
# forward or back at random: the distance grows with the root of D. Dividing by the root keeps scores at one size, however
# wide a head is.

undivided = (k @ q[-1]).softmax(-1)
print(f"without the root, file gets {undivided.max():.2%}")

assert undivided.argmax() == pieces.index(" file") and undivided.max() > 0.999

# %%
# No looking ahead
# ----------------
#
# The last token may look at everything. Earlier tokens may not: ``␣does`` has to guess ``␣not``, and could simply
# read it.
#
# Would a model cheat? We train two tiny models, one of which sees the future, on *random* ids between 0 and 15.
# Training makes a number, the *loss*, as small as it can. It is -ln p, where p is the probability that the model gave
# to the right next id. If the model was certain, the loss is 0. Here the past says nothing about the next id, so an
# honest model can only guess among 16: p is 1/16, and the loss is ln 16 = 2.77.

from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel


def see_everything(q, k, v, visibility, dropout=0.0):
    return F.scaled_dot_product_attention(q, k, v)  # PyTorch's, no mask


# %%
# Skip these lines; the next lesson, `training <4_training.ipynb>`_, explains them.


@torch.enable_grad()
def train(sees_future):
    torch.manual_seed(0)
    sizes = dict(vocab_size=16, block_size=16, n_layer=1, n_head=2, n_embd=64)
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    tiny = GPT2LMHeadModel(config).eval()  # no dropout
    if sees_future:
        tiny.transformer.h[0].attn.attend = see_everything
    optimizer = torch.optim.AdamW(tiny.parameters(), lr=5e-3, fused=True)
    losses = []
    for _ in range(150):
        text = torch.randint(16, (32, 17))
        logits = tiny(text[:, :-1])  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
# **Predict first.** What does the training loss of the model that sees the future do?
#
# * It stays at 2.77: nothing can be learned from random ids.
# * It falls almost to 0.
# * It grows, because later tokens confuse the model.

honest, peeking = train(False), train(True)

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import figure

_, (ax,) = figure(4.4, 3.0)
ax.plot(honest, label="sees the past")
ax.plot(peeking, "--", label="sees the future too")
ax.set(title="Loss on random ids", xlabel="step", ylim=(0, 3))
ax.legend(frameon=False)
plt.show()
assert min(honest) > 2.7
assert max(peeking[-10:]) < 0.3

# %%
# It falls almost to 0: each token copies its answer from the one after it. Yet that model is useless: when it writes,
# there is no next token.
#
# Why minus infinity is added
# ---------------------------
#
# So a token must give weight 0 to all tokens after it. A *mask* sees to that.
#
# **Predict first.** Three scores are 2, 1 and 3. To hide the third key, we multiply its score by 0. What is its weight
# after softmax?
#
# * 0
# * 0.09
# * 0.33

scores = torch.tensor([[2, 1, 3], [2, 1, 3 * 0.0], [2, 1, -torch.inf]])

for line, name in zip(
    scores.softmax(-1), ("nothing hidden", "times 0", "plus -inf")
):
    print(f"{name:15}", "  ".join(f"{weight:.2f}" for weight in line))
assert round(scores.softmax(-1)[1, 2].item(), 2) == 0.09

# %%
# 0.09: the hidden key still counts, because :math:`e^0 = 1`. Only :math:`e^{-\infty}` is 0.
#
# So we compute the scores of all queries at once, and add a triangle (``triu(1)``: what lies above the diagonal):
# minus infinity for the future, 0 for the rest.

future = torch.full((T, T), -torch.inf).triu(1)  # row t: query t
scores = q @ k.T / D**0.5 + future  # (T, T)
weights = scores.softmax(-1)

from lm_from_scratch.instruments.plot import attention_map

_, (ax,) = figure(4.2, 3.8)
attention_map(ax, weights, pieces, "Weights: row looks at column")
plt.show()
torch.testing.assert_close(weights, maps[5][0, 0])

# %%
# That is the first drawing as a table. Would -10000 do, instead of minus infinity? The library ``transformers`` once
# used it. A user's model learned to push the scores of the past below -10000, and `it read the future
# <https://github.com/huggingface/transformers/issues/15199>`_.
#
# Heads are slices
# ----------------
#
# Four heads work side by side, each on its own columns. ``view`` cuts the C columns into (H, D), and ``transpose`` puts
# the heads first, so that one product computes all of them. ``mT`` swaps the last two axes, as ``T`` does for a table.

q, k, v = (part.view(T, H, D).transpose(0, 1) for part in (Q, K, V))
weights = (q @ k.mT / D**0.5 + future).softmax(-1)  # (H, T, T)
y = (weights @ v).transpose(0, 1).reshape(T, H * D)  # (T, C)
x = x + block.attn.c_proj(y)  # mix the heads, and add to the stream
after_block = x + block.mlp(block.ln_2(x))
torch.testing.assert_close(weights, maps[5][0])
torch.testing.assert_close(after_block, states[6][0][0], atol=1e-4, rtol=0.0)

# %%
# The results of the heads are laid side by side again, and ``c_proj`` mixes them. Each head has learned to look for
# something different. Choose one:
#
# .. live:: look
#    :model: gpt2-docs
#
# **Predict first.** Why not ``view(H, T, D)`` at once, without ``transpose``? Take three tokens with four features
# each, the numbers 0 to 11, and two heads. What does ``view(2, 3, 2)`` give to head 0?
#
# * the first half of each token: [0, 1], [4, 5], [8, 9]
# * token 0, and half of token 1: [0, 1], [2, 3], [4, 5]
# * nothing: it is an error

numbers = torch.arange(12).view(3, 4)  # (T, C)
right = numbers.view(3, 2, 2).transpose(0, 1)  # (H, T, D)
wrong = numbers.view(2, 3, 2)  # (H, T, D), too

assert right[0].tolist() == [[0, 1], [4, 5], [8, 9]]
assert wrong[0].tolist() == [[0, 1], [2, 3], [4, 5]]
drawings.head_cells(
    ["view(T, H, D), then transpose", "view(H, T, D)"],
    [
        [[0 if i in part[0] else 1 for i in row] for row in numbers]
        for part in (right, wrong)
    ],
)

# %%
# Token 0, and half of token 1. ``view`` moves no numbers: it cuts the same row of memory, 0 to 11, into other pieces. The
# shapes agree and nothing fails, but the heads mix up the tokens.
#
# Exercises
# ---------
#
# 1. *Easy.* Which of the 32 heads looks most at the token just before? Take the mean of
#    ``maps[i][0, j].diagonal(-1)`` for each. A good answer names block and head, and draws its lines.
# 2. *Easy.* Hide all keys that are more than two tokens back. Add a second triangle to ``scores``. In a good answer,
#    each row has at most three weights above 0, and the sum of each is still 1.
# 3. *Medium.* Shuffle the first eight rows of ``k`` and ``v``, both in the same order, and compute ``y`` for ``␣an``
#    again. A good answer shows that nothing changes, and says how the model knows the order of words all the same.
#
# Summary
# -------
#
# * A token compares its query with all keys up to its own. Softmax makes weights, and the token receives the weighted
#   mean of the values.
# * The mask adds minus infinity to the scores of later tokens *before* softmax. Without it a model learns to copy.
# * Heads work side by side, each on its own columns. Each has learned to look for something different.
