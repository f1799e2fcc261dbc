r"""
GPT-2 in depth
==============

Is your GPT-2 right, and where do its parameters and its time go? This page deepens the lesson
`from token ids to the next word <2_gpt2.ipynb>`_. It computes GPT-2 once more from plain tensors, and after every step
compares the result with what the ``transformers`` library has at the same point, until the logits are equal.

Then it counts the parameters and multiplications of the published sizes, by formulas that are exact. How a wrong part
hides, and what finds it, is a page of its own: `how to test a model <2b_testing_a_model.ipynb>`_.

A small model with large weights
--------------------------------

``transformers`` builds a GPT-2 with V = 97, C = 32, H = 4, three blocks, and room for 32 tokens. Nothing is
downloaded. All weights are drawn from a normal distribution with standard deviation 0.25 (those of the norms around 1),
where GPT-2 starts its training with 0.02. With small weights some mistakes all but disappear, as the page on testing
measures.
"""

# sphinx_gallery_words = ["FLOPs", "parameter count", "weight tying", "GELU", "initialisation", "Conv1D", "tie weights", "tie_weights", "tie_word_embeddings", "number of parameters", "pre-norm", "post-norm", "n_embd", "n_head", "view", "reshape", "contiguous"]
import inspect
import math
import tempfile

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from lm_from_scratch.instruments.record import record_hidden_states
from lm_from_scratch.models.randomize import randomize_

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
oracle = random_gpt2(folder.name, std=0.25)
assert transformers.GPT2Config().initializer_range == 0.02

# %%
# The model is now a file. We read its tensors and use nothing else of it.

w = load_file(f"{folder.name}/model.safetensors")
w = {name.removeprefix("transformer."): w[name] for name in sorted(w)}
for name in w:
    if not name.startswith(("h.1.", "h.2.")):
        print(f"{name:24} {tuple(w[name].shape)}")
assert len(w) == 4 + 3 * 12

# %%
# There are forty tensors: four outside the blocks, and twelve in each block.
#
# The model of ``transformers`` is our oracle, and it runs once. Hooks keep what enters and what leaves each of its
# modules, so that every step below can be compared. The function ``check`` allows an absolute error of 5e-5, in
# float32.


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
# The sum of a row of ``wte`` and a row of ``wpe`` is the state of a token. Here ``left["drop"]`` is what leaves the
# dropout after the embeddings, which does nothing outside training.
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
# Each token's vector is shifted to mean 0 and scaled to variance 1, then each feature is scaled and shifted.
#
# .. math::
#
#    \mu &= \frac{1}{C} \sum_c x_c \\
#    \sigma^2 &= \frac{1}{C} \sum_c (x_c - \mu)^2 \\
#    y_c &= \frac{x_c - \mu}{\sqrt{\sigma^2 + \epsilon}} \, w_c + b_c

from lm_from_scratch.layers.layer_norm import layer_norm

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
# Multiply all features of a token by 3 and add 5: LayerNorm's output stays the same, up to the tiny
# :math:`\epsilon`.

stretched = layer_norm(3 * x + 5, torch.ones(32), torch.zeros(32))
torch.testing.assert_close(stretched, normal, atol=1e-3, rtol=0.0)

# %%
# Attention, by hand
# ------------------
#
# One matrix product gives each token its query, key and value. `Attention: who sees whom <3_who_sees_whom.ipynb>`_
# explains them on a sentence. The file stores matrices as (in, out), so the state stands on the left.

B, T, C = h.shape
H, D = 4, C // 4
qkv = h @ p["attn.c_attn.weight"] + p["attn.c_attn.bias"]  # (B, T, 3C)
check("h.0.attn.c_attn", qkv, left["h.0.attn.c_attn"])

# %%
# The query of token t is compared with the keys of the tokens up to t.
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
# Heads are a view of the columns and have no parameters of their own: from the shapes in the file you cannot know how
# many there are. With the axis H in front of T, one matrix product computes all scores of all heads.

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
# One rule for every mask
# -----------------------
#
# The triangle is enough for one text that begins at 0. Batches have padding, caches hold earlier tokens, and
# training packs several documents into a row. The package writes one rule for all of them.
#
# Every token has a position: its place in its own sequence, or -1 for padding. *A key is visible if it is real, not
# after the query, within the window, and in the same document.*

from lm_from_scratch.attention.attention import (
    attention_weights,
    formula_attention,
)
from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility

print(inspect.getsource(Visibility.rule))

# %%
# Six situations follow, each made by the call that the model makes. A cache is called twice: once for the five tokens
# that it holds from then on, once for the three new ones.

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
from lm_from_scratch.instruments.plot import COLOURS, figure, mask_map

made, axes = figure(5.0, 6.8, rows=3, columns=2)
for ax, (title, visibility) in zip(axes, cases.items()):
    queries = visibility.query_positions[0].tolist()
    keys = visibility.key_positions[0].tolist()
    mask_map(ax, visibility.mask[0, 0], queries, keys, title)
    ax.set(xlabel="key", ylabel="query")
plt.show()

# %%
# Three of the six masks can be written with the triangle of ones, and the rule agrees with it. After a cache, the new
# queries are the *last* rows of the triangle. Its first rows would hide nearly everything from them.

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
# The fused kernel gives the same results in all six situations, for every query that sees at least one key.

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
# Training keeps these weights until the backward pass, unless a kernel computes them in small tiles and forgets them.
# `From the formula to tiles <../3_attention/1_attention.ipynb>`_ counts both.
#
# The MLP
# -------
#
# The attention output is added to the state. A second LayerNorm reads the sum, and the MLP goes from C to 4C features
# and back.
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
# enough to fail a comparison at our tolerance.

largest, at = difference.abs().max(dim=0)
print(f"largest difference {largest:.1e} at u = {u[at]:.1f}")
assert 4e-4 < largest < 5e-4

# %%
# The MLP looks at one token at a time, as the lesson shows. Here it is checked for both rows of the batch: with another
# first token, only the first token's result changes.

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
# file has no other matrix for the head, and the oracle uses one tensor for both.
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
# This is GPT-2 for a batch, from the tensors of a published file.


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
# One forward pass scores the successor of every token. This is sound because the future is hidden: with other tokens
# from place 6 on, the scores at places 0 to 5 stay what they were.

changed = idx.clone()
changed[:, 6:] = (changed[:, 6:] + 1) % 97
moved = gpt2(changed, w, n_layer=3, n_head=4) - logits
moved = moved.abs().amax((0, 2))  # (T,)
assert moved[:6].max() < 5e-5 < 0.1 < moved[6:].min()

# %%
# The package's model
# -------------------
#
# The package writes the same with modules. Their names are those of the file, so the weights load by name; only the
# matrices are transposed, because ``nn.Linear`` stores (out, in).

from lm_from_scratch.models.gpt2 import Attention, Block

print(inspect.getsource(Attention.forward))
print(inspect.getsource(Block.forward))

# %%
# It reads the same folder. The same hooks on both models compare every module that they have in common.

from lm_from_scratch.checkpoint.weights import from_pretrained

model = from_pretrained(folder.name)
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
# smallest GPT-2 this means 4608 tokens, more than four times the length that it can read.

assert 6 * SIZES["gpt2"]["n_embd"] == 4608 > 4 * P

# %%
# How the weights begin
# ---------------------
#
# Before training, biases are 0 and weights are drawn with standard deviation 0.02. There is one exception. A block adds
# two vectors to the stream, so after L blocks it has received 2L of them. If each has variance 1 and they are
# independent, the sum has variance 2L. So the last matrices of attention and MLP, ``c_proj``, start smaller by
# :math:`1 / \sqrt{2L}`.

torch.manual_seed(0)
sizes = dict(vocab_size=97, block_size=32, n_embd=64, n_head=4, n_layer=48)
deep = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
drawn = GPT2LMHeadModel(deep).eval()


def added_variance(model):  # of all that the blocks add to a token
    with record_hidden_states(model) as states:
        model(idx)
    first, last = states[0][0], states[-2][0]
    return (last - first).var(-1).mean().item()


scaled = added_variance(drawn)
for block in drawn.transformer.h:
    block.attn.c_proj.weight.mul_(math.sqrt(2 * 48))
    block.mlp.c_proj.weight.mul_(math.sqrt(2 * 48))

plain = added_variance(drawn)
print(f"added variance {scaled:.1e}, without the factor {plain:.1e}")
assert 2 * 48 / 2 < plain / scaled < 2 * 48 * 2

# %%
# Exercises
# ---------
#
# 1. *Easy.* Count the parameters of a model with V = 4096, P = 256, C = 128 and L = 8 by the formula. Compare with
#    ``load_shipped()`` of ``lm_from_scratch.checkpoint``, the trained model of the lesson. What share is in its
#    embeddings? Hint: the share lies above that of the smallest published model or below it; decide first, then count.
# 2. *Medium.* Compute ``y`` of one head without ever holding a row of T weights: read the keys four at a time. Hint:
#    for each query keep the largest score so far, the sum of exponentials, and the weighted sum of values. When the
#    largest score grows, multiply the other two by the exponential of the old one minus the new one. A right answer
#    equals ``formula_attention`` to 1e-5; it is the idea inside the fused kernel.
# 3. *Hard.* With a window of W keys, how many tokens back can a model of L blocks look? Run the three blocks with
#    ``Visibility(plain, plain, window=2)`` and find out by the gradient of the last state with respect to the
#    embeddings. Hint: each block is called as ``block(x, visibility, NO_CACHE)`` inside ``torch.enable_grad()``. A
#    right answer names the formula and shows the first token whose gradient is exactly 0.
#
# Summary
# -------
#
# * Written with plain tensors, GPT-2 equals ``transformers`` to 5e-5 after every step of a block and in the logits. The
#   package's model equals it in all blocks.
# * Attention is a mean of values. Loops, matrix products, the package's formula and the fused kernel agree.
# * One rule, from positions, makes every mask: causal, padded, after a cache, packed, windowed.
# * The four published sizes have 124,439,808, 354,823,168, 774,030,080 and 1,557,611,200 parameters. In a block, the
#   MLP has twice the weights of attention. The :math:`T^2` part of attention overtakes the weights beyond T = 6C.
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

import platform

import lm_from_scratch

folder.cleanup()
print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
