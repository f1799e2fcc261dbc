r"""
Keys shared across layers
=========================

Gemma 4 E4B is made for phones. It has 42 layers, and a text of 32,768 tokens would leave 3.3 GB of keys and values in its
cache: on a phone with 8 GB, two fifths of the memory. Two decisions in its config bring that down to a sixth.
"""

# sphinx_gallery_needs = ["../5_caching/2_kinds_of_cache", "1_qwen3"]
# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["Gemma 4", "Gemma 3n", "num_kv_shared_layers", "KV sharing", "cross-layer attention", "CLA", "YOCO", "per-layer embeddings", "PLE", "hidden_size_per_layer_input", "attention temperature", "log-scaled queries", "shared KV cache"]

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from lm_from_scratch.instruments.plot import COLOURS, GREY, figure

layers = (["sliding"] * 5 + ["full"]) * 7
width = {"sliding": 2 * 2 * 256, "full": 2 * 2 * 512}  # k and v, 2 heads
everywhere = {"sliding": 32_768, "full": 32_768}  # tokens that are kept
windowed = {"sliding": 512, "full": 32_768}


def cache_bytes(own, kept):  # bfloat16: 2 bytes a number
    return sum(2 * width[kind] * kept[kind] for kind in own)


all_of_it = cache_bytes(layers, everywhere)
sliding = cache_bytes(layers, windowed)
shared = cache_bytes(layers[:-18], windowed)

drawn, (ax,) = figure(4.8, 2.6)
bars = ax.barh(
    ["42 layers keep all", "35 keep 512 tokens", "18 keep nothing"],
    [all_of_it / 1e9, sliding / 1e9, shared / 1e9],
    color=COLOURS[0],
)
ax.invert_yaxis()
ax.bar_label(bars, fmt="%.2f GB", padding=3)
ax.set(title="Cache of Gemma 4 E4B, 32,768 tokens", xlabel="GB", xlim=(0, 4.1))
plt.show()

assert round(all_of_it / 1e9, 2) == 3.29 and round(sliding / 1e9, 2) == 0.98
assert round(shared / 1e9, 2) == 0.56
assert 5.8 < all_of_it / shared < 6 and 0.42 < 1 - shared / sliding < 0.44

# %%
# You know the first decision: `sliding windows <../5_caching/2_kinds_of_cache.ipynb>`_. The second is new to us: the last
# 18 layers have no keys and values at all. The config says ``num_kv_shared_layers: 18``. That takes another 43 % away.
#
# Whose keys?
# -----------
#
# A layer without keys still has queries, and reads the keys of an earlier layer. But not of just any layer: a sliding layer
# has kept 512 tokens, a layer that sees everything has kept them all. So each reads from a layer of its own kind.
#
# **Predict first.** The layers count from 0. Which layer's keys does layer 41, the last one, read?
#
# * layer 40, the one before it
# * layer 23
# * layer 5, the first that sees everything


def key_layers(kinds, shared):
    first = len(kinds) - shared  # from here on nobody has keys
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    return [*range(first), *(last[kind] for kind in kinds[first:])]


reads = key_layers(layers, 18)
print("layers 24 ... 41 read from", reads[24:])

from lm_from_scratch.models.gemma4 import sources

assert reads == sources(layers, 18) and reads[41] == 23 and reads[40] == 22

# %%
# Layer 23. It is the last layer with keys of its own that sees everything, and all later ones of its kind read from it.
#
# Why the last one, and not the first? Keys are made from a layer's input. The keys of layer 0 are made from embeddings:
# each knows its own token and nothing of the text around it. By layer 23 the input has been through 23 layers of
# attention, and its keys can say *"the second half of a name"* where those of layer 0 say *"Smith"*.
#
# Count it
# --------
#
# A layer that shares saves three things: the bytes of its cache, its matrices ``k_proj`` and ``v_proj``, and the time to
# multiply by them. Here is a small model of six layers, with its own keys in all of them, and then in three. The cache of
# the second has only three layers.

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.models.gemma4 import Gemma4Config, Gemma4ForCausalLM

sizes = dict(
    vocab_size=128, n_head=2, n_kv_head=1, n_embd=48, head_dim=16, global_head_dim=16,
    intermediate_size=96, per_layer_vocab_size=128, initializer_range=0.08,
)  # fmt: skip


def small_gemma(n_layer, kv_shared_layers=0, per_layer_width=0):
    config = Gemma4Config(
        **sizes, layer_types=("full_attention",) * n_layer, n_layer=n_layer,
        kv_shared_layers=kv_shared_layers, per_layer_width=per_layer_width,
        wide_shared_mlp=False,
    )  # fmt: skip
    return Gemma4ForCausalLM(config)


# %%
# This is Gemma 4 itself, only smaller; all of it is the file ``models/gemma4.py``. Here its layers all see everything.

idx, counted = torch.randint(128, (1, 100)), {}
for shared in (0, 3):
    model = small_gemma(6, shared).eval()
    cache = GrowingCache(6 - shared, reserve=100)
    with torch.no_grad():
        whole = model(idx)
        pieces = [model(part, cache=cache) for part in idx.split(30, dim=1)]
    weights = sum(p.numel() for p in model.parameters())
    counted[shared] = cache.nbytes, weights
    print(
        f"{shared} of 6 share: cache {cache.nbytes:,} bytes, {weights:,} weights"
    )
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-3, rtol=0)

assert counted[0][0] == 2 * counted[3][0] == 6 * 100 * 2 * 16 * 4
assert counted[0][1] - counted[3][1] == 3 * (2 * 48 * 16 + 16)

# %%
# Half the cache, and 4,656 fewer weights. The text went in as four pieces, and the logits are those of a single pass:
# layers that share find the keys of all earlier pieces in the cache of their source.
#
# Can you share afterwards?
# -------------------------
#
# It would be nice to take a model that exists and save half of its cache. Our small Qwen2 has eight layers. Let the last
# four use the keys and values of layer 3, and train nothing.
#
# **Predict first.** Its loss is 4.18. What is it after the surgery?
#
# * about 4.3
# * about 5
# * above 7, as if it had learned nothing

from lm_from_scratch.cache.interface import NoCache
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.text.corpora import load_split

qwen, tokenizer = load_shipped("qwen2-docs")
train, held_out = load_split(["reference"], 0.05)
ids = [i for text in held_out for i in tokenizer.encode(text.text)]
rows = torch.tensor(ids)[: 6 * 257].view(6, 257)


class Shares(NoCache):  # layers above 3 get the keys and values of layer 3
    def __getitem__(self, layer):
        self.layer = layer
        return self

    def update(self, k, v):
        if self.layer <= 3:
            self.held = k, v
        return self.held


@torch.no_grad()
def loss_with(cache):
    logits = qwen(rows[:, :-1], cache=cache)
    return F.cross_entropy(logits.mT, rows[:, 1:]).item()


before, after = loss_with(NoCache()), loss_with(Shares())
print(f"own keys {before:.2f}, shared keys {after:.2f}")

assert abs(before - 4.18) < 0.02 and 4.8 < after < 5.2

# %%
# About 5. That is far from nonsense: all layers write into the same hidden states, so the keys of layer 3 mean something
# to the layers above it. But queries and keys of a layer are trained for each other, and 0.8 nats are a lot: on average
# each token gets less than half the probability it had. So sharing is decided before training.
#
# What does it cost?
# ------------------
#
# We train small models of four layers on the characters of Python's reference manual, for a few seconds each: one with
# keys in all layers, one in which the last two share, and a third kind, explained below. Two seeds each.


def characters(documents):
    text = "".join(document.text for document in documents)
    return torch.tensor([min(ord(c), 127) for c in text])


text = characters(train)
test = characters(held_out)[: 64 * 65].view(64, 65)


def trained(seed, **changes):
    torch.manual_seed(seed)
    model = small_gemma(4, **changes)
    adamw = torch.optim.AdamW(model.parameters(), 1e-2, (0.9, 0.98), fused=True)
    for _ in range(36):
        start = torch.randint(len(text) - 65, (8, 1))
        batch = text[start + torch.arange(65)]
        loss = F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])
        adamw.zero_grad()
        loss.backward()
        adamw.step()
    with torch.no_grad():
        return F.cross_entropy(model(test[:, :-1]).mT, test[:, 1:]).item()


# %%
# **Predict first.** After 36 steps the plain model has a held-out loss of about 3 nats a character. How much worse is
# the one whose last two layers share keys?
#
# * less than 0.2
# * about 0.5
# * it learns nothing

kinds = {
    "own keys": {},
    "last two share": dict(kv_shared_layers=2),
    "per-layer\nembeddings": dict(per_layer_width=16),
}
result = {
    name: torch.tensor([trained(seed, **kind) for seed in range(2)])
    for name, kind in kinds.items()
}
plain, sharing, told = result.values()

drawn, (ax,) = figure(4.8, 2.6)
for i, losses in enumerate(result.values()):
    ax.plot([i] * 2, losses, "osD"[i], color=COLOURS[i])
    ax.hlines(losses.mean(), i - 0.25, i + 0.25, color=COLOURS[i])
ax.set_xticks(range(3), [*result])
ax.set(title="Held-out loss, two seeds and their mean", ylabel="nats")
plt.show()

assert plain.min() > 2.8 and plain.max() < 3.3
assert abs(sharing.mean() - plain.mean()) < plain.max() - plain.min() < 0.2
assert (told < plain).all()

# %%
# Less than 0.2: the difference is smaller than the one between two seeds. At this size half of the cache is nearly
# free. (Four layers and 36 steps cannot say more. In larger experiments, too, sharing between two layers costs
# little, and among many of them more: the paper on `cross-layer attention <https://arxiv.org/abs/2405.12981>`_ has the
# numbers.)
#
# A table instead of a matrix
# ---------------------------
#
# The third model has keys of its own everywhere, and is *better* than the first with both seeds. It also has a
# fifth more weights, nearly half of them in a second embedding: each token has 16 numbers for each layer, and each layer adds
# them, through a gate, to its hidden state. Such *per-layer embeddings* are the other half of Gemma's plan for phones. What
# do they cost there?

read = 42 * 256  # layers, numbers for each
table = 262_144 * read
print(f"table: {table / 1e9:.1f} billion numbers, {2 * table / 1e9:.1f} GB")
print(f"read for a token: {read:,} numbers, {2 * read / 1e3:.1f} kB")

assert round(table / 1e9, 1) == 2.8 and 2 * read == 21_504

# %%
# A table of 2.8 billion numbers, a third of the model, of which a token reads 21.5 kB. No matrix product needs the table,
# so it can stay in the phone's storage while the rest is in RAM. That explains the name: of eight billion weights, 2.8 are
# in this table and 0.7 in the ordinary embedding; about four and a half billion are *effective*, rounded down to E4B.
#
# The limit of a table: its row depends on the token, not on the text. It can remind a layer *which* token it is working
# on; what the token means here, attention must still find out.
#
# Sharp in a long text
# --------------------
#
# Few layers are left that see the whole text. What helps them when it is long? Llama 4 gives them
# `no rotation <5_positions_today.ipynb>`_, so there are no distances that were never trained. And it multiplies their
# queries by a number that grows with the logarithm of the position.
#
# Here is why. One key fits a query, with a score of 8. All others have random scores around 0.

from lm_from_scratch.layers.rope import log_scale

n = 2 ** torch.arange(8, 21)  # keys
noise = torch.randn(2**20, generator=torch.manual_seed(0))


def share(n, scale):
    scores = torch.cat([torch.tensor([8.0]), noise[: n - 1]]) * scale
    return scores.softmax(0)[0].item()


scales = log_scale(n[None] - 1, floor=8192, strength=0.1).flatten()
flat = [share(m, 1.0) for m in n.tolist()]
sharp = [share(m, s) for m, s in zip(n.tolist(), scales)]

drawn, (ax,) = figure(4.8, 2.6)
ax.plot(n, flat, "o-", color=COLOURS[0], label="query as it is")
ax.plot(n, sharp, "s--", color=COLOURS[1], label="query times the log scale")
ax.axvline(8192, color=GREY, linewidth=1)
ax.set(title="Weight of the key that fits", xlabel="keys", xscale="log")
ax.legend(frameon=False)
plt.show()

assert flat[0] > 0.8 and flat[-1] < 0.01 and sharp[-1] > 5 * flat[-1]
assert sharp[:5] == flat[:5] and all(a < b for a, b in zip(flat[6:], sharp[6:]))

# %%
# With 256 keys, the one that fits gets 88 % of the weight. With a million, the others outvote it by their number: 0.2 %
# are left. A query that grows with the logarithm of the length keeps 4 %, which is little, but 25 times as much. It takes
# one line and no parameter, and below 8,192 tokens the factor is exactly 1, so even a trained model can be given it.
#
# Exercises
# ---------
#
# 1. *Easy.* Gemma 4 E4B shares 18 layers. Compute the bytes at 131,072 tokens for 0, 6, 12, 18 and 24 shared layers. A
#    good answer explains why the steps are not equal.
# 2. *Medium.* Train with ``kv_shared_layers=3``: all layers read the keys of layer 0. A good answer compares three seeds
#    with the two models above, and says what those keys cannot know.
# 3. *Hard.* Spend the saved weights: a wider MLP with as many as ``k_proj`` and ``v_proj`` had. A good answer
#    shows at equal weights, with five seeds, which of the two is the better place for them.
#
# Summary
# -------
#
# * The last layers can read the keys of the last layer of their kind that has some. Their part of the cache is gone, and
#   a small model that was trained like that hardly notices.
# * Per-layer embeddings put weights where they are cheap: in a table that is looked up, never multiplied.
# * The more keys there are, the less weight the right one gets. Queries that grow with log t win some of it back.
