r"""
Qwen3: a model that cannot shout
================================

You know Qwen2. Add two lines to its attention, drop its three biases, and you have Qwen3. The two lines keep one kind of
number small: the *scores* that go into softmax. What would large scores do? Here is a head of our small Qwen2 that
looks back from *first*, as it was trained, and then with its scores three and ten times as large.
"""

# sphinx_gallery_needs = ["../2_qwen2/4_qwen2", "../1_gpt2/4_training"]
# sphinx_gallery_words = ["QK-norm", "qk_norm", "q_norm", "k_norm", "query-key normalization", "Qwen3", "Llama", "Mistral", "attention logits explode", "training instability", "loss spike", "head_dim", "Llama config", "Qwen2 vs Qwen3", "attention logits too large", "normalise queries and keys", "why no bias", "bias in q k v", "softcap", "logit soft-capping", "scores explode", "training blows up", "large scores", "unstable training", "attention entropy", "saturated softmax", "one-hot attention"]
# sphinx_gallery_thumbnail_number = 1

import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.families import families
from lm_from_scratch.checkpoint.ideas import counts
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.instruments.record import record_scores
from lm_from_scratch.models.qwen2 import Qwen2Config
from lm_from_scratch.models.qwen3 import Qwen3Config
from lm_from_scratch.text.corpora import load_corpus

model, tokenizer = load_shipped("qwen2-docs")
ids = tokenizer.start("If the list is empty, return the first")
words = [w.replace(" ", "␣") for w in tokenizer.pieces(ids)]
with record_scores(model) as recorded:
    model(torch.tensor([ids]))
scores = recorded[4][0][0, 0, -1]  # block 4, head 0, the last word

fig, panels = figure(4.6, 2.8, 1, 3)
for ax, scale in zip(panels, (1, 3, 10), strict=True):
    ax.barh(range(10), (scale * scores).softmax(-1).tolist(), color=COLOURS[0])
    ax.set(title=f"scores × {scale}", xticks=[0, 1], ylim=(9.6, -0.6))
    ax.set_yticks(range(10), words if scale == 1 else [""] * 10)
fig.supxlabel("attention weight")
plt.show()
assert (10 * scores).softmax(-1).max() > 0.99 > 0.4 > scores.softmax(-1).max()
assert (scores.softmax(-1) > 0.05).sum() >= 6
assert words[scores.argmax()] == "␣list"

# %%
# (⊢ is ``<|endoftext|>``, the start of the text, and ``␣`` a space.) The trained head listens to many words, most of all to
# *list*. Ten times as loud, *list* is all that it hears.
#
# What softmax does with a thousand
# ---------------------------------
#
# Softmax looks at differences. The scores 1, 2 and 3 get the weights 0.09, 0.24 and 0.67. How much does the largest
# weight change when a score does? That is its slope, and training has nothing else to go by.
#
# **Predict first.** For 1, 2 and 3 the largest slope is 0.2. What is it for 1,000, 2,000 and 3,000?
#
# * The same: only the ratio counts
# * A thousand times as large
# * 0

scores = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
for scale in (1, 10, 1000):
    weights = (scale * scores).softmax(-1)
    (slope,) = torch.autograd.grad(weights[2], scores)
    print(f"x {scale:<4}", *(f"{w:.2f}" for w in weights), end="   ")
    print(f"slope {slope.abs().max():.0e}")
assert weights.tolist() == [0.0, 0.0, 1.0] and slope.abs().max() == 0

# %%
# It is 0. One key gets everything, so no gradient comes back through such a row: whatever the loss would like to
# change about it, it cannot.
#
# The head is stuck. If that happens to many heads of a large model, its loss can jump up after weeks of training, and
# not come back down.
#
# Do scores grow that large by themselves?
# ----------------------------------------
#
# A score is a dot product of a query and a key, so it grows with the *lengths* of both. A model can become surer by making
# them longer, and nothing in Qwen2 stops it. We train three small models of each kind much too fast, and record the
# largest score in every step. The models read Python's language reference, byte by byte.

text = "\n".join(document.text for document in load_corpus("reference"))
stream = torch.tensor(list(text.encode()))  # one token per byte
sizes = dict(vocab_size=256, n_layer=2, n_embd=48, intermediate_size=96)
others = dict(rope_theta=10_000.0, initializer_range=0.04, eos_token_id=0)
numbers = sizes | others | dict(n_head=4, n_kv_head=2, head_dim=16)

# %%
# The two configs have the same numbers, and no biases.

configs = {
    "Qwen2": Qwen2Config(**numbers, qkv_bias=False),
    "Qwen3": Qwen3Config(**numbers),
}


def batch():
    starts = torch.randint(len(stream) - 32, (8,))
    rows = torch.stack([stream[i : i + 33] for i in starts])
    return rows[:, :-1], rows[:, 1:]  # tokens, and the one after each


# %%
# Training is that of chapter 1. ``record_scores`` keeps what goes into softmax.


def train(config, seed, lr, steps=50):
    torch.manual_seed(seed)
    model, largest, losses = build(config), [], []
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    for step in range(1, steps + 1):
        idx, targets = batch()
        optimizer.param_groups[0]["lr"] = lr * min(1, step / 10)
        with record_scores(model) as scores:  # a list for each block
            logits = model(idx)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        largest.append(max(block[0].max().item() for block in scores))
        losses.append(loss.item())
    return largest, losses


# %%

fast = {
    name: [train(config, seed, lr=0.1) for seed in range(3)]
    for name, config in configs.items()
}
fig, (ax,) = figure(4.6, 3.0)
for (name, runs), colour, style in zip(fast.items(), COLOURS, "-:"):
    for seed, (largest, _) in enumerate(runs):
        label = name if seed == 0 else None
        ax.plot(largest, style, color=colour, label=label)
ax.set(title="The largest score, three runs each", xlabel="step")
ax.set(yscale="log", ylabel="score")
ax.legend(frameon=False)
plt.show()
assert min(largest[-1] for largest, _ in fast["Qwen2"]) > 300
assert max(largest[-1] for largest, _ in fast["Qwen3"]) < 50

# %%
# Qwen2's scores climb to about a thousand. Qwen3's stay below 50.
#
# Two lines
# ---------
#
# Qwen3 divides each query and each key by its root mean square: the `RMSNorm <../2_qwen2/1_rms_norm.ipynb>`_ that you
# know, over the D features of one head, after the projection and before the rotation.

from lm_from_scratch.layers.norm import rms_norm
from lm_from_scratch.layers.rope import apply_rope


def qwen3_scores(x, rotation, q_proj, k_proj, q_weight, k_weight):
    T, D = len(x), len(q_weight)
    q = (x @ q_proj.T).view(T, -1, D).transpose(0, 1)  # (H, T, D)
    k = (x @ k_proj.T).view(T, -1, D).transpose(0, 1)  # (Hkv, T, D)
    q = rms_norm(q, q_weight)  # the two
    k = rms_norm(k, k_weight)  # new lines
    q, k = (apply_rope(part[None], *rotation)[0] for part in (q, k))
    k = k.repeat_interleave(len(q) // len(k), dim=0)  # shared key heads
    return q @ k.mT / D**0.5  # (H, T, T)


# %%
# Each block has two new weights of D numbers: one for all its query heads, one for all its key heads. That is all that
# Qwen3 adds.

torch.manual_seed(0)
model = build(configs["Qwen3"]).requires_grad_(False)
attention = model.model.layers[0].self_attn
x = torch.randn(6, 48)
rotation = model.model.rotary_emb(torch.arange(6)[None], x.dtype)
projections = attention.q_proj.weight, attention.k_proj.weight
norms = attention.q_norm.weight, attention.k_norm.weight
scores = qwen3_scores(x, rotation, *projections, *norms)
print(tuple(scores.shape), "largest:", f"{scores.max():.2f}")

from lm_from_scratch.cache.interface import NO_CACHE

with record_scores(attention) as recorded:
    (visibility,) = NO_CACHE.see(x[None])
    attention(x[None], rotation, visibility, NO_CACHE)
visible = scores.masked_fill(~visibility.mask[0], -math.inf)
torch.testing.assert_close(visible, recorded[0][0][0])
assert sum(p.numel() for p in norms) == 2 * 16

# %%
# **Predict first.** We make x a thousand times larger. What happens to the scores?
#
# * They are a thousand times larger
# * They are a million times larger
# * They stay the same

loud = qwen3_scores(1000 * x, rotation, *projections, *norms)
print(f"largest change of a score: {(loud - scores).abs().max():.4f}")
assert (loud - scores).abs().max() < 1e-3

# %%
# They stay the same (but for the tiny number that keeps RMSNorm from dividing by 0). Without the norms they would be a
# million times larger: both the query and the key would grow a thousandfold.
#
# Whatever the projections become, they can change the *direction* of a query, but no longer its length.
#
# How large can a score be?
# -------------------------
#
# After the norm, and with weights of 1, a vector of D features has the length :math:`\sqrt{D}`, because its mean square
# is 1. Rotation keeps lengths. The dot product of two vectors is at most the product of their lengths, so
#
# .. math::
#
#    \frac{q \cdot k}{\sqrt{D}} \le \frac{\sqrt{D} \sqrt{D}}{\sqrt{D}} = \sqrt{D}
#
# With 16 features that is 4. With the 128 features of the published models it is 11.3. A model that needs to be surer has
# to learn larger norm weights. Ours did, above: its scores went beyond 4. But a block has only 2D of these weights, and
# no other weight can make a query longer.

assert 16**0.5 == 4 and round(128**0.5, 1) == 11.3
assert scores.abs().max() <= 4 < max(max(s) for s, _ in fast["Qwen3"])

# %%
# **Predict first.** Would the norm give the same scores if it came after the rotation?
#
# * Yes: rotation does not change a length
# * Yes, as long as the learned weights are all 1
# * No, never

q = (x @ projections[0].T).view(1, 6, -1, 16).transpose(1, 2)  # (1, H, T, D)
for name, weight in (("all 1", torch.ones(16)), ("learned", torch.rand(16))):
    before = apply_rope(rms_norm(q, weight), *rotation)
    after = rms_norm(apply_rope(q, *rotation), weight)
    print(f"weights {name}: they differ by {(before - after).abs().max():.2f}")
    assert ((before - after).abs().max() < 1e-5) == (name == "all 1")

# %%
# Yes, as long as the weights are all 1. Learned weights stretch some features more than others, and the rotation mixes
# features in pairs, so then the order matters.
#
# Code that normalises too late therefore passes every test on a fresh model, and fails on a trained one. A published
# library `had this order <https://github.com/meta-pytorch/torchtune/issues/2809>`_, until a user compared its logits
# with those of another library.
#
# Is it better?
# -------------
#
# Here are the final losses of the three runs, at a learning rate ten times smaller and at the large one:

calm = {
    name: [train(config, seed, lr=0.01) for seed in range(3)]
    for name, config in configs.items()
}
for speed, runs_of in (("0.01", calm), ("0.1", fast)):
    ends = {
        name: [sum(losses[-10:]) / 10 for _, losses in runs]
        for name, runs in runs_of.items()
    }
    for name, seeds in ends.items():
        print(f"lr {speed:>4}, {name}: loss", *(f"{e:.2f}" for e in seeds))
    a, b = ends.values()
    assert abs(sum(a) - sum(b)) / 3 < max(max(a) - min(a), max(b) - min(b))

assert max(largest[-1] for largest, _ in calm["Qwen2"]) < 60
assert 0.3 < counts()["qk_norm"] / len(families()) < 0.37

# %%
# Hardly. On average the two models differ by less than two runs of the same model. In so few steps, a model this small
# gets away with scores of a thousand.
#
# The norms are insurance: they cost a little time, and keep the scores of a large model small through months of
# training. The `Qwen3 report <https://arxiv.org/abs/2505.09388>`_ gives stable training as its reason. About a third of
# the decoder families in ``transformers``, old and new, normalise queries and keys.
#
# A head may have any width
# -------------------------
#
# One more line of the config is new. In Qwen2 a head has C / H features, so that all heads together are as wide as the
# model. Qwen3 gives the width itself:

small = Qwen3Config()  # Qwen3-0.6B
print(small.n_head, "heads,", small.head_dim, "features each", end=" ")
print("in a model of", small.n_embd)
assert small.n_head * small.head_dim == 2 * small.n_embd == 2048

# %%
# Together that is 2,048, twice as wide as the model. Nothing in attention needs the two to agree, because the output
# projection leads back to the width of the model.
#
# Llama and Mistral: only numbers
# -------------------------------
#
# What about the model on your disk? Take away Qwen2's three biases, and you have Llama. Give every block a sliding window,
# and you have the first Mistral. There is no code left to write: the package reads the ``config.json`` of such a model
# into numbers that you know.

from lm_from_scratch.checkpoint.configs import config_from_dict

for family in ("llama", "mistral", "qwen2", "qwen3"):
    config = config_from_dict({"model_type": family})
    said = f"biases {config.qkv_bias!s:5}", f"theta {config.rope_theta:,.0f}"
    print(f"{family:7}", *said, f"window {config.windows[0]}", sep="   ")

# %%
# These are the defaults of each family; a published model overrides most of them. ``from_pretrained`` opens its folder,
# and ``python -m lm_from_scratch generate --model FOLDER`` lets it write. `Qwen3 in depth <1a_qwen3_in_depth.ipynb>`_
# compares the results with those of ``transformers``.
#
# Exercises
# ---------
#
# 1. *Easy.* How many numbers do the new weights have in Qwen3-0.6B, with its 28 blocks?
# 2. *Medium.* OLMo normalises all heads together, before they are cut apart. Write it. Which scores can still grow?
# 3. *Hard.* Train with ``lr=0.1``, and instead of the norms cap the scores as Gemma 2 does: :math:`c \tanh(s / c)` with
#    c = 50. Does it help as much?
#
# Summary
# -------
#
# * A score is a dot product, so it grows with the lengths of query and key. When scores are huge, softmax sees one key
#   alone.
# * Qwen3 normalises queries and keys, per head, before the rotation. With weights of 1, no score exceeds
#   :math:`\sqrt{D}`.
# * Llama, Mistral and Qwen2 differ in numbers only.
