r"""
GPT-2, block by block
=====================

What happens between a list of token ids and a score for every possible next token? In GPT-2 these are two lookups,
some matrix products, and three functions: LayerNorm, softmax and GELU.

This page computes them one after the other from plain tensors. After every step it compares the result with what the
``transformers`` library has at the same point, until the logits are equal. Nothing about the model has to be
believed.

.. live:: break
   :model: gpt2-docs

You will learn
--------------

* what every tensor of a GPT-2 checkpoint is for,
* attention in four forms with one result: loops, matrix products, the package's function, and a fused kernel,
* how one integer per token, its position, decides which tokens see each other,
* where the parameters and the multiplications of GPT-2 are,
* how to test a model so that a wrong part cannot hide.

Before you start
----------------

You need matrix products, the softmax, and the page on `tokens <1_tokens.ipynb>`_, where text becomes integers. A CPU is
enough, and ``transformers`` must be installed (the package's ``test`` extra brings it). Nothing is downloaded: the
model of this page is small, and its weights are random.

Letters name axes, here and in the package: B rows of a batch, T tokens of a row, S keys, C features of a token,
H heads, D = C / H features of a head, V entries of the vocabulary.

.. code-block:: text

   idx                         (B, T)
    |  wte[idx] + wpe[position]
    x                          (B, T, C)
    |---> ln_1 --> attn ---.
    + <--------------------'   \
    |                           } L blocks
    |---> ln_2 --> mlp ----.   /
    + <--------------------'
    |  ln_f
    |  wte, transposed
   logits                      (B, T, V)

A small model with large weights
--------------------------------

``transformers`` builds a GPT-2 with V = 97, C = 32, H = 4, three blocks, and room for 32 tokens. All weights are drawn
from a normal distribution with standard deviation 0.25 (those of the norms around 1), where GPT-2 starts its training
with 0.02. A section below measures why: with small weights, some mistakes all but disappear.
"""

import copy
import inspect
import math
import tempfile

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from lm_from_scratch.models.causal_lm import randomize_

torch.set_grad_enabled(False)
transformers.utils.logging.disable_progress_bar()


def random_gpt2(folder, std):
    sizes = dict(n_layer=3, n_head=4, n_embd=32)
    sizes |= dict(vocab_size=97, n_positions=32)
    no_ids = dict(bos_token_id=None, eos_token_id=None)
    config = transformers.GPT2Config(**sizes, **no_ids)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.set_attn_implementation("eager")  # no fused kernel
    randomize_(model, std=std)
    model.save_pretrained(folder)
    return model


folder = tempfile.TemporaryDirectory()
oracle = random_gpt2(f"{folder.name}/large", std=0.25)
assert transformers.GPT2Config().initializer_range == 0.02

# %%
# The model is now a file. This page reads its tensors and uses nothing else of it.

w = load_file(f"{folder.name}/large/model.safetensors")
w = {name.removeprefix("transformer."): w[name] for name in sorted(w)}
for name in w:
    if not name.startswith(("h.1.", "h.2.")):
        print(f"{name:24} {tuple(w[name].shape)}")
assert len(w) == 4 + 3 * 12

# %%
# There are forty tensors: four outside the blocks, and twelve in each block.
#
# The oracle runs once. Hooks keep what enters and what leaves each of its modules, so that every step below has
# something to be equal to. The function ``check`` demands 5e-5, absolute, in float32.


def listen(model, idx, **options):
    entered, left = {}, {}

    def keep(name):
        def hook(module, args, result):
            entered[name] = args[0]
            left[name] = result[0] if isinstance(result, tuple) else result

        return hook

    hooks = [
        module.register_forward_hook(keep(name))
        for name, module in model.transformer.named_modules()
        if name
    ]
    result = model(idx, **options)
    for hook in hooks:
        hook.remove()
    return result, entered, left


generator = torch.Generator().manual_seed(1)
idx = torch.randint(0, 97, (2, 11), generator=generator)  # (B, T)
expected, entered, left = listen(oracle, idx, output_attentions=True)


def check(name, ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0.0)
    error = (ours - theirs).abs().max().item()
    print(f"{name:16} {tuple(ours.shape)!s:15} largest error {error:.0e}")


# %%
# Two lookups and a sum
# ---------------------
#
# A token id selects a row of ``wte``, and the place of the token selects a row of ``wpe``. The sum of the two
# rows is the state of the token. Here ``left["drop"]`` is what leaves the dropout behind the embeddings, which does
# nothing outside training.
#
# .. math::
#
#    x_t = W_e[i_t] + W_p[t]

B, T = idx.shape
x = w["wte.weight"][idx] + w["wpe.weight"][:T]  # (B, T, C)
check("embeddings", x, left["drop"])
assert torch.equal(left["drop"], entered["drop"])

# %%
# A lookup is a matrix product whose left side has a single 1 in each row. The head at the end of the model is the
# same matrix, used in the other direction.

one_hot = F.one_hot(idx, 97).float()  # (B, T, V)
torch.testing.assert_close(one_hot @ w["wte.weight"], w["wte.weight"][idx])

# %%
# LayerNorm
# ---------
#
# Each token's vector is moved to mean 0 and scaled to variance 1. Then a learnt weight and bias give every feature
# its own scale and level.
#
# .. math::
#
#    \mu &= \frac{1}{C} \sum_c x_c \\
#    \sigma^2 &= \frac{1}{C} \sum_c (x_c - \mu)^2 \\
#    y_c &= \frac{x_c - \mu}{\sqrt{\sigma^2 + \epsilon}} \, w_c + b_c

from lm_from_scratch.layers.norm import LayerNorm, layer_norm

print(inspect.getsource(layer_norm))

p = {name.removeprefix("h.0."): w[name] for name in w}  # block 0
weight, bias = p["ln_1.weight"], p["ln_1.bias"]
h = layer_norm(x, weight, bias)
check("h.0.ln_1", h, left["h.0.ln_1"])
check("torch's", h, F.layer_norm(x, (32,), weight, bias))

# %%
# Here are mean and variance of four tokens, before and after, with weights 1 and biases 0.

normal = layer_norm(x, torch.ones(32), torch.zeros(32))
print("         mean             variance")
for t in range(4):
    before, after = x[0, t], normal[0, t]
    line = f"token {t}  {before.mean():+.2f} -> {after.mean().abs():.2f}    "
    line += f"{before.var(correction=0):.3f} -> {after.var(correction=0):.3f}"
    print(line)
assert normal.mean(-1).abs().max() < 1e-6
assert (normal.var(-1, correction=0) - 1).abs().max() < 1e-3

# %%
# A common factor and a common shift leave no trace, except through :math:`\epsilon`. However large the states
# become, attention and MLP read vectors of one scale.

stretched = layer_norm(3 * x + 5, torch.ones(32), torch.zeros(32))
torch.testing.assert_close(stretched, normal, atol=1e-3, rtol=0.0)

# %%
# Attention, by hand
# ------------------
#
# One matrix product gives each token three vectors: a query for what it looks for, a key for what it can be found
# by, and a value for what it hands over. The file stores matrices as (in, out), so the state stands on the left.

B, T, C = h.shape
H, D = 4, C // 4
qkv = h @ p["attn.c_attn.weight"] + p["attn.c_attn.bias"]  # (B, T, 3C)
check("h.0.attn.c_attn", qkv, left["h.0.attn.c_attn"])

# %%
# The query of token t is compared with the keys of the tokens up to t. The softmax turns the scores into weights
# with sum 1. The result is the mean of the values under these weights.
#
# .. math::
#
#    a_{ts} &= \operatorname{softmax}_{s \le t} \left( \frac{q_t \cdot k_s}{\sqrt{D}} \right) \\
#    y_t &= \sum_{s \le t} a_{ts} \, v_s
#
# A head owns D of the C columns. Here is head 2 of the first row, one query at a time.

head = 2
columns = slice(head * D, (head + 1) * D)
q, k, v = (part[0, :, columns] for part in qkv.split(C, dim=-1))  # (T, D)

a = torch.zeros(T, T)
y = torch.zeros(T, D)
for t in range(T):
    scores = torch.stack([q[t] @ k[s] for s in range(t + 1)])
    scores = scores / math.sqrt(D)
    a[t, : t + 1] = scores.exp() / scores.exp().sum()
    for s in range(t + 1):
        y[t] += a[t, s] * v[s]

check("weights, head 2", a, expected.attentions[0][0, head])
check("values, head 2", y, entered["h.0.attn.c_proj"][0, :, columns])

# %%
# The inner loops end at t. That is the whole causal rule: a token cannot see its future.

for row in a[:5, :5]:
    print("  ".join(f"{weight:.2f}" for weight in row))

# %%
# Why the root of D
# ~~~~~~~~~~~~~~~~~
#
# If the entries of q and k are independent with mean 0 and variance 1, their product has variance 1, and the sum of
# D products has variance D. Without the root, the scores of a wide head are large and the softmax selects one key
# instead of a mean. The next lines draw 500 such queries and 500 keys, and take the mean of each query's largest
# weight.

generator = torch.Generator().manual_seed(0)
print("  D   std   largest weight, with root")
for width in (4, 16, 64, 256):
    queries, keys = torch.randn(2, 500, width, generator=generator)
    scores = queries @ keys.T
    plain = scores.softmax(-1).amax(-1).mean()
    scaled = (scores / math.sqrt(width)).softmax(-1).amax(-1).mean()
    print(f"{width:3}  {scores.std():4.1f}   {plain:14.2f}  {scaled:9.2f}")
    assert abs(scores.std() / math.sqrt(width) - 1) < 0.05
    assert scaled < 0.05
assert plain > 0.8

# %%
# With the root, the weights stay spread over the 500 keys at every width.
#
# All heads at once
# ~~~~~~~~~~~~~~~~~
#
# Heads are a view of the columns, not parameters: the shapes in the file do not tell how many there are. With the
# axis H in front of T, one matrix product computes all scores of all heads.

q, k, v = qkv.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)  # (B, H, T, D)
later = torch.ones(T, T, dtype=torch.bool).triu(1)  # True where s > t
scores = q @ k.mT / math.sqrt(D)  # (B, H, T, T)
scores = scores.masked_fill(later, -torch.inf)
y = scores.softmax(-1) @ v  # (B, H, T, D)
check("weights", scores.softmax(-1), expected.attentions[0])

# %%
# The heads are laid side by side again, and a last matrix mixes them.

merged = y.transpose(1, 2).reshape(B, T, C)
attention = merged @ p["attn.c_proj.weight"] + p["attn.c_proj.bias"]
check("h.0.attn", attention, left["h.0.attn"])

# %%
# A mean does not know the order of what it averages: if the earlier states change places, the last query gets the
# same result. This is why each state carries a position embedding.

order = torch.tensor([7, 2, 9, 0, 5, 1, 8, 3, 6, 4, 10])  # 10 stays last
scores = q[:, :, -1:] @ k[:, :, order].mT / math.sqrt(D)  # (B, H, 1, T)
check("shuffled", scores.softmax(-1) @ v[:, :, order], y[:, :, -1:])

# %%
# Who sees whom
# -------------
#
# The triangle is enough for one text that begins at 0. Batches have padding, caches hold earlier tokens, and
# training packs several documents into a row. The package writes one rule for all of them.
#
# Every token has a position: its place in its own sequence, or -1 for padding. *A key is visible if it is real, not
# after the query, within the window, and in the same document.*

from lm_from_scratch.attention.attention import (
    attention_weights,
    formula_attention,
    sdpa_attention,
)
from lm_from_scratch.attention.visibility import Visibility, positions_from_mask

print(inspect.getsource(Visibility.rule))

# %%
# Six situations follow, each made by the call that the model makes. A cache is asked twice: once for the five tokens
# that it then holds, once for the three new ones.

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE


def after_cache(old, new, old_positions=None, new_positions=None):
    cache = GrowingCache(n_layer=1)
    cache.see(torch.zeros(1, old), old_positions)
    keys = values = torch.zeros(1, 1, old, 1)
    cache[0].update(keys, values)  # what the layer does
    return cache.see(torch.zeros(1, new), new_positions)[0]  # of one layer


row = torch.zeros(1, 8)
plain = torch.arange(8)[None]
padded = positions_from_mask(torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]))
packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])
cases = {
    "causal": NO_CACHE.see(row)[0],
    "left padding": NO_CACHE.see(row, padded)[0],
    "3 after a cache of 5": after_cache(5, 3),
    "the same, padded": after_cache(5, 3, padded[:, :5], padded[:, 5:]),
    "two documents": NO_CACHE.see(row, packed, documents)[0],
    "window of 3": Visibility(plain, plain, window=3),
}

# %%
# In the figure, blue is visible and grey is hidden. The labels are positions, so -1 marks padding.

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_museum = ["G16"]
from lm_from_scratch.instruments.plot import COLOURS, figure, mask_map

made, axes = figure(5.0, 6.8, rows=3, columns=2)
for ax, (title, visibility) in zip(axes, cases.items()):
    queries = visibility.query_positions[0].tolist()
    keys = visibility.key_positions[0].tolist()
    mask_map(ax, visibility.mask[0, 0], queries, keys, title)
    ax.set(xlabel="key", ylabel="query")
plt.show()

# %%
# Three of them can be written with the triangle of ones, and the rule agrees. After a cache, the new queries are the
# *last* rows of the triangle. Its first rows would hide nearly everything from them.

triangle = torch.ones(8, 8, dtype=torch.bool).tril()
band = triangle & ~triangle.tril(-3)
assert torch.equal(cases["causal"].mask[0, 0], triangle)
assert torch.equal(cases["3 after a cache of 5"].mask[0, 0], triangle[5:])
assert torch.equal(cases["window of 3"].mask[0, 0], band)

# %%
# The package's attention takes q, k, v and such a visibility. This is its formula.

print(inspect.getsource(attention_weights))
print(inspect.getsource(formula_attention))

visibility = NO_CACHE.see(idx)[0]
check("formula", formula_attention(q, k, v, visibility), y)
check("fused", sdpa_attention(q, k, v, visibility), y)

# %%
# The fused kernel gives the same in all six situations, for every query that sees at least one key.

generator = torch.Generator().manual_seed(0)
for title, visibility in cases.items():
    Q, S = visibility.query_length, visibility.key_length
    q_new = torch.randn(1, H, Q, D, generator=generator)
    k_all, v_all = torch.randn(2, 1, H, S, D, generator=generator)
    sees = visibility.mask[0, 0].any(-1)  # (T,)
    formula = formula_attention(q_new, k_all, v_all, visibility)
    fused = sdpa_attention(q_new, k_all, v_all, visibility)
    error = (fused - formula)[:, :, sees].abs().max()
    assert error < 1e-5
    print(f"{title:21} {int(sees.sum())} of {Q} queries see a key: equal")

# %%
# What attention costs
# --------------------
#
# Everything else in the model grows in proportion to T, but there is one weight for every pair of tokens. At 1024
# tokens, the twelve heads of one layer of the smallest published GPT-2 hold 48 MiB of them, for one row.

assert 12 * 1024**2 * 4 == 48 * 2**20  # H T T numbers of 4 bytes

# %%
# Training keeps them until the backward pass, unless a kernel computes them in small tiles and forgets them. The page
# on attention, from the formula to tiles, counts both.
#
# The MLP
# -------
#
# The attention output is added to the state. A second LayerNorm reads the sum, and the MLP widens each token's
# vector to 4C features, applies GELU to each of them, and returns to C.
#
# .. math::
#
#    \operatorname{MLP}(h) = \operatorname{GELU}(h W_1 + b_1) \, W_2 + b_2

from lm_from_scratch.layers.activation import gelu, gelu_new

x = x + attention
h = layer_norm(x, p["ln_2.weight"], p["ln_2.bias"])
check("h.0.ln_2", h, left["h.0.ln_2"])


def mlp(h):
    wide = h @ p["mlp.c_fc.weight"] + p["mlp.c_fc.bias"]  # (B, T, 4C)
    return gelu_new(wide) @ p["mlp.c_proj.weight"] + p["mlp.c_proj.bias"]


check("h.0.mlp", mlp(h), left["h.0.mlp"])

# %%
# GELU multiplies u by the probability that a standard normal variable is below u. GPT-2 was trained with an
# approximation of it, and the checkpoint's config says so: ``gelu_new``.
#
# .. math::
#
#    \operatorname{gelu}(u) &= \tfrac{u}{2} \left( 1 + \operatorname{erf}(u / \sqrt{2}) \right) \\
#    \operatorname{gelu\_new}(u) &= \tfrac{u}{2} \left( 1 + \tanh \left( \sqrt{2 / \pi} \, (u + 0.044715 \, u^3) \right) \right)

u = torch.linspace(-5, 5, 1001, dtype=torch.float64)
difference = gelu_new(u) - gelu(u)

made, (above, below) = figure(5.0, 4.8, rows=2)
above.plot(u, gelu(u), label="gelu")
above.plot(u, u.relu(), linestyle="--", label="relu")
above.set(title="GELU and ReLU", xlabel="u")
above.legend(frameon=False)
below.plot(u, 1e4 * difference)
below.set(title="Difference of gelu_new and gelu", xlabel="u", ylabel="1e-4")
plt.show()

# %%
# The two versions differ by less than 5e-4 everywhere, and by more than 4e-4 somewhere. That seems little. It is
# enough to fail a comparison at our tolerance, as a table below shows.

largest, at = difference.abs().max(dim=0)
print(f"largest difference {largest:.1e} at u = {u[at]:.1f}")
assert 4e-4 < largest < 5e-4

# %%
# The MLP looks at one token at a time. With another first token, only the first row of its result changes. In a
# block, attention moves information between tokens and the MLP works on what has arrived.

other = h.clone()
other[:, 0] += 1.0
moved = (mlp(other) - mlp(h)).abs().amax(-1)  # (B, T)
assert moved[:, 1:].max() < 5e-5 < 0.1 < moved[:, 0].min()

# %%
# The residual stream
# -------------------
#
# The MLP output is added, too, and the block is complete.

x = x + mlp(h)
check("h.0", x, left["h.0"])

# %%
# No block replaces the state: each one adds two vectors to it. So the state that leaves the last block is a plain
# sum of the embeddings, three attention outputs and three MLP outputs.
#
# .. math::
#
#    x^{(L)} = x^{(0)} + \sum_{l} \left( \operatorname{attn}_l + \operatorname{mlp}_l \right)

total = left["drop"].clone()
for i in range(3):
    total += left[f"h.{i}.attn"] + left[f"h.{i}.mlp"]
check("sum of all", total, left["h.2"])

# %%
# The head is the embedding
# -------------------------
#
# After a last LayerNorm, the score of vocabulary entry j is the dot product of the state with row j of ``wte``. The
# file has no other matrix for the head, and the oracle shares the one it has.
#
# .. math::
#
#    \operatorname{logits}_{tj} = \operatorname{LayerNorm}(x_t) \cdot W_e[j]

final = layer_norm(left["h.2"], w["ln_f.weight"], w["ln_f.bias"])
check("ln_f", final, left["ln_f"])
check("logits", final @ w["wte.weight"].T, expected.logits)
assert not any("head" in name for name in w)
assert oracle.lm_head.weight is oracle.transformer.wte.weight

# %%
# The whole model
# ---------------
#
# Nothing is missing now. This is GPT-2, from token ids to logits.


def gpt2(idx, w, n_layer, n_head):
    B, T = idx.shape
    x = w["wte.weight"][idx] + w["wpe.weight"][:T]  # (B, T, C)
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    for i in range(n_layer):
        p = {name.removeprefix(f"h.{i}."): w[name] for name in w}
        h = layer_norm(x, p["ln_1.weight"], p["ln_1.bias"])
        qkv = h @ p["attn.c_attn.weight"] + p["attn.c_attn.bias"]
        q, k, v = qkv.view(B, T, 3, n_head, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # (B, H, T, T)
        a = scores.masked_fill(later, -torch.inf).softmax(-1)
        y = (a @ v).transpose(1, 2).reshape(x.shape)
        x = x + y @ p["attn.c_proj.weight"] + p["attn.c_proj.bias"]
        h = layer_norm(x, p["ln_2.weight"], p["ln_2.bias"])
        h = gelu_new(h @ p["mlp.c_fc.weight"] + p["mlp.c_fc.bias"])
        x = x + h @ p["mlp.c_proj.weight"] + p["mlp.c_proj.bias"]
    x = layer_norm(x, w["ln_f.weight"], w["ln_f.bias"])
    return x @ w["wte.weight"].T


logits = gpt2(idx, w, n_layer=3, n_head=4)
check("logits", logits, expected.logits)

# %%
# One forward pass scores the successor of every token, not only of the last one. This is sound because the future
# is hidden: with other tokens from place 6 on, the scores at places 0 to 5 stay what they were.

changed = idx.clone()
changed[:, 6:] = (changed[:, 6:] + 1) % 97
moved = gpt2(changed, w, n_layer=3, n_head=4) - logits
moved = moved.abs().amax((0, 2))  # (T,)
assert moved[:6].max() < 5e-5 < 0.1 < moved[6:].min()

# %%
# The package's model
# -------------------
#
# The package says the same with modules. Their names are those of the file, so the weights load by name; only the
# matrices are transposed, because ``nn.Linear`` stores (out, in).

from lm_from_scratch.models.gpt2 import Attention, Block

print(inspect.getsource(Attention.forward))
print(inspect.getsource(Block.forward))

# %%
# It reads the same folder. The same hooks on both models compare every module that they have in common.

from lm_from_scratch.checkpoint.weights import from_pretrained

model = from_pretrained(f"{folder.name}/large")
logits, _, ours = listen(model, idx)
check("logits", logits, expected.logits)

common = [name for name in left if name in ours]
for name in common:
    torch.testing.assert_close(ours[name], left[name], atol=5e-5, rtol=0.0)
parts = ["ln_1", "c_attn", "attn", "ln_2", "c_fc", "mlp"]
for part in [*parts, "h.0", "h.1", "h.2", "ln_f"]:
    errors = [
        (ours[name] - left[name]).abs().max().item()
        for name in common
        if name == part or name.endswith(f".{part}")
    ]
    print(f"{part:7} compared {len(errors)}, largest error {max(errors):.0e}")
assert len(common) >= 3 * 9

# %%
# Where the parameters are
# ------------------------
#
# A block has :math:`3C^2 + C^2` weights in attention and :math:`4C^2 + 4C^2` in the MLP. Its biases and its two
# norms have 13C numbers. With P positions and L blocks:
#
# .. math::
#
#    N = V C + P C + L \, (12 C^2 + 13 C) + 2 C
#
# On torch's ``meta`` device, tensors have a shape but no memory, so the largest GPT-2 can be built and counted here.


from lm_from_scratch.models.gpt2 import SIZES, GPT2Config, GPT2LMHeadModel


def empty_model(size):
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(**SIZES[size])).eval()


V, P = 50257, 1024
published = [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]
for (size, numbers), count in zip(SIZES.items(), published):
    L, C = numbers["n_layer"], numbers["n_embd"]
    counted = sum(p.numel() for p in empty_model(size).parameters())
    by_formula = V * C + P * C + L * (12 * C**2 + 13 * C) + 2 * C
    assert counted == by_formula == count
    print(f"{size:12} L {L:2}  C {C:4}  parameters {counted:13,}")

# %%
# The formula is exact for all four published sizes: 124, 355, 774 and 1558 million. H does not occur in it.
#
# The multiplications are counted in the same way. A matrix with n weights costs n multiply-adds for each token.
# Scores and means in attention cost :math:`2 T^2 C` more in each block, if the hidden half is computed as well.
#
# .. math::
#
#    M = T \, (12 C^2 L + V C) + 2 T^2 C L
#
# Torch's own counter watches the matrix products of a forward pass and reports two operations per multiply-add.

from torch.utils.flop_counter import FlopCounterMode

from lm_from_scratch.attention.kinds import use_attention_

T = 1024
shares = {}
for size, numbers in SIZES.items():
    L, C = numbers["n_layer"], numbers["n_embd"]
    empty = empty_model(size)
    use_attention_(empty, "formula")
    with FlopCounterMode(display=False) as counter:
        empty(torch.zeros(1, T, dtype=torch.long, device="meta"))
    multiplied = T * (12 * C**2 * L + V * C) + 2 * T**2 * C * L
    assert counter.get_total_flops() == 2 * multiplied

    counts = dict.fromkeys(("wte", "wpe", "attn", "mlp"), 0)
    for name, parameter in empty.named_parameters():
        for part in counts:
            counts[part] += parameter.numel() * (f".{part}." in name)
    embeddings = counts["wte"] + counts["wpe"]
    parameters = [embeddings, counts["attn"], 0, counts["mlp"]]
    weights = 4 * T * C**2 * L  # of attention; the MLP has twice as many
    products = [T * V * C, weights, 2 * T**2 * C * L, 2 * weights]
    total = sum(parameter.numel() for parameter in empty.parameters())
    shares[size, "parameters"] = [n / total for n in parameters]
    shares[size, "multiply-adds"] = [n / multiplied for n in products]

# %%
# The figure compares the smallest and the largest model, at T = 1024.

ends = ("gpt2", "gpt2-xl")
shown = {"\n".join(key): shares[key] for key in shares if key[0] in ends}
labels = ("embedding, head", "attention, weights", "attention, $T^2$", "MLP")
colours = (COLOURS[1], COLOURS[5], "white", COLOURS[0])
box = dict(facecolor="white", edgecolor="none", pad=1.0)

made, (ax,) = figure(5.0, 4.2)
start = [0.0] * len(shown)
for part, label in enumerate(labels):
    width = [100 * share[part] for share in shown.values()]
    style = dict(color=colours[part], hatch=("", "//", "..", "")[part])
    style |= dict(edgecolor="black", label=label)
    bars = ax.barh(list(shown), width, left=start, **style)
    for text, value in zip(ax.bar_label(bars, label_type="center"), width):
        text.set(text=f"{value:.0f}", bbox=box, visible=value > 4)
    start = [a + b for a, b in zip(start, width)]
ax.invert_yaxis()
ax.grid(False)
ax.set(xlabel="percent", xlim=(0, 100), title="Parameters and multiply-adds")
made.legend(loc="outside lower center", ncols=2, frameon=False)
plt.show()

# %%
# Embeddings hold almost a third of the small model and about a twentieth of the largest. In a block, the MLP has
# twice the weights of attention. At 1024 tokens the :math:`T^2` part is less than a seventh of the work in both.

small, large = (shares[size, "parameters"] for size in ends)
assert 0.30 < small[0] < 1 / 3
assert 0.04 < large[0] < 0.06
for size in ends:
    _, attention_share, _, mlp_share = shares[size, "parameters"]
    assert abs(mlp_share / attention_share - 2) < 0.01
    assert shares[size, "multiply-adds"][2] < 1 / 7

# %%
# The :math:`T^2` part overtakes the weights of a block when :math:`2 T^2 C > 12 T C^2`, that is beyond T = 6C. For the
# smallest GPT-2 these are 4608 tokens, more than four times the length that it can read.

assert 6 * SIZES["gpt2"]["n_embd"] == 4608 > 4 * P

# %%
# Positions are an argument
# -------------------------
#
# A text must get the same logits alone, in a padded batch, in pieces through a cache, or packed behind another text.
# The model needs only the positions for that, and a number for each document where several share a row.
#
# First padding: row 0 loses its first four tokens to padding, and row 1 is complete.

attention_mask = torch.ones(2, 11, dtype=torch.long)
attention_mask[0, :4] = 0
positions = positions_from_mask(attention_mask)
print(positions)

batch = model(idx, positions=positions)
alone = model(idx[:1, 4:])
check("padded row", batch[0, 4:], alone[0])
check("full row", batch[1], expected.logits[1])

# %%
# Then a cache: the text comes in pieces of 5, 1, 3 and 2 tokens. The cache knows how many it has seen, so the new
# tokens continue at the right place.

pieces = idx.split([5, 1, 3, 2], dim=1)
cache = GrowingCache(n_layer=3)
answers = [model(piece, cache=cache) for piece in pieces]
check("pieces", torch.cat(answers, dim=1), expected.logits)

# %%
# Then two documents in one row. The second one starts again at position 0 and does not see the first.

packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]])
documents = torch.tensor([[0] * 5 + [1] * 6])
row = model(idx[:1], positions=packed, documents=documents)
check("document 0", row[0, :5], model(idx[:1, :5])[0])
check("document 1", row[0, 5:], model(idx[:1, 5:])[0])

# %%
# A mask alone is not enough. If the padding is hidden but still counted, every real token is read at a wrong place.
# This mistake is G5. The forward pass of ``transformers`` counts this way when it gets no ``position_ids``.

given = dict(attention_mask=attention_mask)
mask_only = oracle(idx, **given).logits[0, 4:]
error = (mask_only - alone[0]).abs().max()
print(f"mask only: a logit is off by {error:.1f}")
assert error > 1

given["position_ids"] = positions.clamp(min=0)
check("with positions", oracle(idx, **given).logits[0, 4:], alone[0])

# %%
# What each part is worth
# -----------------------
#
# How much do the logits move when a part is removed or wrong? Each damage sets one attribute of one kind of part in a
# copy of the built model: a function, a ``forward``, or the class. Replacing the class of a built module replaces its
# ``forward`` and keeps its weights. A second model has the same random numbers with standard deviation 0.02.

random_gpt2(f"{folder.name}/small", std=0.02)
models = {0.25: model, 0.02: from_pretrained(f"{folder.name}/small")}


def unscaled(q, k, v, visibility, dropout=0.0):
    return formula_attention(q * math.sqrt(q.shape[-1]), k, v, visibility)


def sighted(q, k, v, visibility, dropout=0.0):
    return F.scaled_dot_product_attention(q, k, v)


class NoResidual(Block):
    def forward(self, x, visibility, cache):
        x = self.attn(self.ln_1(x), visibility, cache)
        return self.mlp(self.ln_2(x))


class PostNorm(Block):
    def forward(self, x, visibility, cache):
        x = self.ln_1(x + self.attn(x, visibility, cache))
        return self.ln_2(x + self.mlp(x))


class EpsilonOutside(LayerNorm):
    def forward(self, x):
        std, mean = torch.std_mean(x, -1, correction=0, keepdim=True)
        return (x - mean) / (std + self.eps) * self.weight + self.bias


damages = {
    "no position embedding": ("wpe", "forward", lambda positions: 0.0),
    "no causal mask": ("h.{}.attn", "attend", sighted),
    "no residual": ("h.{}", "__class__", NoResidual),
    "norm after the sum": ("h.{}", "__class__", PostNorm),
    "no final norm": ("ln_f", "forward", lambda x: x),
    "no 1/sqrt(D)": ("h.{}.attn", "attend", unscaled),
    "gelu for gelu_new": ("h.{}.mlp", "act", F.gelu),
    "epsilon outside root": ("h.{}.ln_1", "__class__", EpsilonOutside),
}

# %%
# For both models, the table shows the largest movement of a logit and the share of the 22 tokens whose most likely
# successor stays the same.


def damaged_copy(model, path, attribute, value):
    model = copy.deepcopy(model)
    for i in range(len(model.transformer.h)):
        part = model.transformer.get_submodule(path.format(i))
        setattr(part, attribute, value)
    return model


block = model.transformer.h[0]
copied = damaged_copy(model, *damages["no residual"]).transformer.h[0]
assert copied.forward.__func__ is NoResidual.forward
for ours, theirs in zip(copied.parameters(), block.parameters(), strict=True):
    assert torch.equal(ours, theirs)

moved, same = {}, {}
print(f"{'':24}{'std 0.25':>16}{'std 0.02':>17}")
print(f"{'':24}{'moved':>8}{'same':>8}{'moved':>9}{'same':>8}")
for name, damage in damages.items():
    line = f"{name:23}"
    for std, whole in models.items():
        before, after = whole(idx), damaged_copy(whole, *damage)(idx)
        moved[name, std] = (after - before).abs().max().item()
        equal = after.argmax(-1) == before.argmax(-1)  # (B, T)
        same[name, std] = equal.float().mean().item()
        line += f"{moved[name, std]:9.2g}{same[name, std]:8.0%}"
    print(line)

spread = {std: whole(idx).std().item() for std, whole in models.items()}
print(f"standard deviation{spread[0.25]:14.2g}{spread[0.02]:17.2g}")

# %%
# With large weights every damage moves a logit by at least four times the tolerance of this page. With small weights
# the wrong GELU stays below the tolerance.
#
# The logits of the small model are smaller themselves, so compare with their standard deviation in the last line. The missing root
# moves a logit by more than that with large weights, and by less than a fiftieth of it with small ones, where every
# next token stays the same.

assert all(moved[name, 0.25] > 4 * 5e-5 for name in damages)
assert moved["gelu for gelu_new", 0.02] < 5e-5
assert moved["no 1/sqrt(D)", 0.25] > spread[0.25]
assert moved["no 1/sqrt(D)", 0.02] < spread[0.02] / 50
assert same["no 1/sqrt(D)", 0.02] == 1.0

# %%
# The reason is that scores are products of two small vectors. Every softmax of the small model is nearly uniform, so
# its attention is a plain mean whatever the scores are.

from lm_from_scratch.instruments.record import record_attention

uniform = torch.ones(11, 11).tril() / torch.arange(1, 12)[:, None]
for std, whole in models.items():
    with record_attention(whole) as maps:
        whole(idx)
    distance = max((layer[0] - uniform).abs().max() for layer in maps)
    print(f"std {std}: largest distance from a plain mean {distance:.2f}")
    assert distance > 0.5 if std == 0.25 else distance < 0.05

# %%
# Two more lessons are in the table. Next tokens are a poor test: without the final norm a logit moves by more than
# 10, and most of the most likely successors are still the same.
#
# Large weights are not the answer to everything. The last damage moves a logit *more* with small weights, because
# there the variance comes close to epsilon. A norm needs a test with small inputs.

assert moved["no final norm", 0.25] > 10
assert same["no final norm", 0.25] > 0.5
assert moved["epsilon outside root", 0.02] > moved["epsilon outside root", 0.25]

# %%
# Bug museum
# ----------
#
# G25: a mask of -10000
# ~~~~~~~~~~~~~~~~~~~~~
#
# The published code of GPT-2 replaces a hidden score: it multiplies by 0 and subtracts 1e10. Later programs wrote
# -10000, some of them as a replacement and some as a term that is added to the score. Neither hides a key once the
# scores are that large.
#
# Here the weights of ``c_attn`` grow, and the scores grow with the square of the factor. Row 0 is padded as before, and
# other tokens are put under its padding. The real tokens must not notice.


def write_minimum(scores, hidden):
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min)


masks = {
    "add -10000": lambda scores, hidden: scores - 10000.0 * hidden,
    "write -10000": lambda scores, hidden: scores.masked_fill(hidden, -10000.0),
    "write the minimum": write_minimum,
}


def attend_with(mask):
    def attend(q, k, v, visibility, dropout=0.0):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return mask(scores, ~visibility.mask).softmax(-1) @ v

    return attend


other = idx.clone()
other[0, :4] = (other[0, :4] + 50) % 97
noticed = {}
for name, mask in masks.items():
    for factor in (1, 100):
        grown = damaged_copy(model, "h.{}.attn", "attend", attend_with(mask))
        for block in grown.transformer.h:
            block.attn.c_attn.weight.mul_(factor)
        change = (
            grown(other, positions=positions) - grown(idx, positions=positions)
        )[0, 4:]
        noticed[name, factor] = change.abs().max().item()
    ordinary, large = noticed[name, 1], noticed[name, 100]
    print(f"{name:18} factor 1: {ordinary:.1f}   factor 100: {large:.1f}")

assert all(noticed[name, 1] == 0.0 for name in masks)
assert noticed["add -10000", 100] > 0.5
assert noticed["write -10000", 100] > 0.5
assert noticed["write the minimum", 100] == 0.0

# %%
# With ordinary weights all three are right, so an ordinary test passes. The last one is the fixed line, and it is
# the one in ``attention_weights`` above: no score lies below the most negative number.
#
# G4: positions that start again
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# With a cache the model receives only the new tokens. Code that looks up ``torch.arange(T)`` then gives the second
# piece of a text the positions of the first. A hook plants this mistake in a copy of the model.


def start_again(module, args):
    return (torch.arange(args[0].shape[1])[None],)


restarting = copy.deepcopy(model)
restarting.transformer.wpe.register_forward_pre_hook(start_again)

full_error = (restarting(idx) - expected.logits).abs().max().item()
wanted = expected.logits.split([5, 1, 3, 2], dim=1)
cache = GrowingCache(n_layer=3)
errors = [
    (restarting(piece, cache=cache) - part).abs().max().item()
    for piece, part in zip(pieces, wanted)
]
print(f"full pass {full_error:.1f}, pieces", *(f"{e:.1f}" for e in errors))
assert full_error < 5e-5
assert errors[0] < 5e-5
assert min(errors[1:]) > 1

# %%
# The full pass and the first piece are right, and everything after them is wrong. The fixed line belongs to the
# cache, which knows its own length: after eleven tokens, the next three stand at 11, 12 and 13.

from lm_from_scratch.cache.interface import place

place(torch.zeros(1, 3), positions=None, start=cache.length)

# %%
# A test with one full pass does not see G4, and one without padding does not see G5. Three passes find both: a full
# one, one with left padding, and one in uneven pieces through a cache.
#
# Exercises
# ---------
#
# 1. *Easy.* Count the parameters of a model with V = 4096, P = 256, C = 128 and L = 8 by the formula. Compare with
#    ``load_shipped()`` of ``lm_from_scratch.checkpoint``, the trained model of the next pages. What share is in its
#    embeddings? Hint: the share lies above that of the smallest published model or below it; decide first, then count.
# 2. *Easy.* Old checkpoints store the causal triangle as ``h.0.attn.bias``. A popular filter drops every name that
#    ends in ``attn.bias``. Apply it to the forty names of ``w``: which ones go? Set these tensors to zero and measure
#    how far the logits move. Hint: this is G16; ``CONSTANTS`` in ``checkpoint/weights.py`` shows a filter that is right.
# 3. *Medium.* Compute ``y`` of one head without ever holding a row of T weights: read the keys four at a time. Hint:
#    for each query keep the largest score so far, the sum of exponentials, and the weighted sum of values. When the
#    largest score grows, multiply the other two by the exponential of the old one minus the new one. A right answer
#    equals ``formula_attention`` to 1e-5; it is the idea inside the fused kernel.
# 4. *Hard.* With a window of W keys, how many tokens back can a model of L blocks look? Run the three blocks with
#    ``Visibility(plain, plain, window=2)`` and find out by the gradient of the last state with respect to the
#    embeddings. Hint: each block is called as ``block(x, visibility, NO_CACHE)`` inside ``torch.enable_grad()``. A
#    right answer names the formula and shows the first token whose gradient is exactly 0.
#
# Summary
# -------
#
# * GPT-2 is a sum of two lookups, L blocks that each add two vectors to the state, a last norm, and the embedding
#   used backwards. Written with plain tensors it equals ``transformers`` to 5e-5 after every step of a block and in
#   the logits; the package's model equals it in all blocks.
# * Attention is a mean of values. Loops, matrix products, the package's formula and the fused kernel agree.
# * Positions decide who sees whom. The same text gets the same logits alone, padded, in pieces, or packed. With a
#   mask but without positions, a logit is off by more than 1.
# * The four published sizes have 124,439,808, 354,823,168, 774,030,080 and 1,557,611,200 parameters. In a block, the
#   MLP has twice the weights of attention.
# * Test with large weights, logits instead of next tokens, and three passes: full, left-padded, in pieces.
#
# The weights were random here. The next page trains a model of this kind.
#
# Sources
# -------
#
# * Radford et al.: `Language Models are Unsupervised Multitask Learners <https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf>`_, 2019, and `the published code of GPT-2 <https://github.com/openai/gpt-2/blob/master/src/model.py>`_.
# * Vaswani et al.: `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, 2017.
# * Ba, Kiros, Hinton: `Layer Normalization <https://arxiv.org/abs/1607.06450>`_, 2016.
# * Hendrycks, Gimpel: `Gaussian Error Linear Units <https://arxiv.org/abs/1606.08415>`_, 2016.
# * Press, Wolf: `Using the Output Embedding to Improve Language Models <https://arxiv.org/abs/1608.05859>`_, 2016. One matrix for both ends.
# * Elhage et al.: `A Mathematical Framework for Transformer Circuits <https://transformer-circuits.pub/2021/framework/index.html>`_, 2021. The residual stream.
# * Dao et al.: `FlashAttention <https://arxiv.org/abs/2205.14135>`_, 2022. Attention in tiles.
# * G25 in the wild: `a GPT-2 that sees its future <https://github.com/huggingface/transformers/issues/15199>`_ and `the repair <https://github.com/huggingface/transformers/pull/17306>`_.
# * G5 in the wild: `logits with and without position_ids <https://github.com/huggingface/transformers/issues/18388>`_.

import platform

import lm_from_scratch

folder.cleanup()
print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
