r"""
Multi-head latent attention
===========================

Each token leaves keys and values in a cache, and the cache of a long chat can be larger than the model. A block of
DeepSeek-V3 has 128 heads of 128 features: a key and a value for each head would be 32,768 numbers a token. It keeps 576.
How is that possible without removing heads?

Here is what one token costs in four published models, in all blocks together, at 2 bytes a number.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["../5_caching/1_why_cache", "../2_qwen2/2_rope", "../2_qwen2/4_qwen2"]
# sphinx_gallery_words = ["MLA", "DeepSeek", "latent attention", "kv_lora_rank", "absorbed weights", "weight absorption", "decoupled RoPE", "compressed KV cache", "DeepSeek KV cache size", "MHA GQA MQA MLA", "q_lora_rank", "smaller KV cache", "how does DeepSeek save memory", "MLA explained", "MHA vs GQA vs MLA", "compress keys and values", "low-rank keys and values", "latent vector", "DeepSeek V2", "DeepSeek V3", "DeepSeek R1", "DeepSeek architecture", "compress the cache", "up-projection", "absorb a matrix", "smaller cache than GQA", "long chat memory"]
import torch
import torch.nn.functional as F

from lm_from_scratch.drawings.since_qwen2_models import (
    latent_token,
    token_bytes,
)

published = [  # (name, kind, blocks, numbers of a token in each)
    ("LLaMA-65B", "MHA", 80, 2 * 64 * 128),
    ("Llama-3-70B", "GQA", 80, 2 * 8 * 128),
    ("DeepSeek-V3", "MLA", 61, 512 + 64),
    ("Falcon-7B", "MQA", 32, 2 * 1 * 64),
]
sizes = {name: 2 * blocks * each for name, _, blocks, each in published}

assert 2 * 128 * 128 == 32_768 and 32_768 // 576 == 56
assert (
    sizes["DeepSeek-V3"] == 70_272
    and round(sizes["Llama-3-70B"] / 70_272, 1) == 4.7
)
assert sizes["LLaMA-65B"] // sizes["DeepSeek-V3"] == 37
token_bytes([(name, kind, sizes[name]) for name, kind, *_ in published])

# %%
# The usual way to a small cache is sharing. In multi-head attention (MHA) every head has its own keys and values. In
# `GQA <../2_qwen2/4_qwen2.ipynb>`_ some heads share them, and in multi-query attention (MQA) all heads do. *Multi-head
# latent attention* (MLA) leaves every head its own keys and values, but does not store them. It stores what they are
# computed from:

latent_token(C=7168, R=512, H=128, Dn=128, Dr=64, Dv=128)

# %%
# One matrix turns the token's state into a short vector c, the *latent*. From c, each head computes its key and its value
# with its own matrices. The small r is a piece of key that all heads share; the end of the page shows what it is for.
#
# How much is in 256 numbers?
# ---------------------------
#
# Can so few numbers replace so many? In our small GPT-2, a token leaves 256 numbers in each block: 4 heads, a key and a
# value, 32 features. All of them are computed from one state of 128 numbers, so 128 numbers must be enough (but for the
# biases). Would fewer do?
#
# We collect keys and values of a training text, and use a singular value decomposition to find the R directions that
# hold most of them. Then the model reads another text, and keeps only R numbers of each token in each block.

from lm_from_scratch.attention.latent import multiplications
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE, NoCache
from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.layers.rope import (
    apply_rope,
    inverse_frequencies,
    rotation,
)
from lm_from_scratch.models.deepseek_v3 import DeepseekV3Config
from lm_from_scratch.models.randomize import randomize_
from lm_from_scratch.text.corpora import load_split

torch.set_grad_enabled(False)
gpt2, tokenizer = load_shipped("gpt2-docs")
train, held_out = load_split(["reference"], 0.05)


def some_text(documents, rows, seed):
    order = torch.randperm(len(documents), generator=torch.manual_seed(seed))
    texts = [tokenizer.start(documents[n].text) for n in order.tolist()[:40]]
    ids = [token for text in texts for token in text]
    return torch.tensor(ids[: rows * 256]).view(rows, 256)


def directions(ids):  # of each block, the most important first: (256, 128)
    gpt2(ids, cache=(cache := GrowingCache(8)))
    both = [torch.cat(cache.contents(i)[:2], 1) for i in range(8)]
    rows = [x.transpose(1, 2).flatten(0, 1).flatten(1) for x in both]
    return [torch.linalg.svd(x, full_matrices=False)[2].T for x in rows]


# %%
# This cache keeps nothing, but squeezes keys and values through R numbers.


class Through(NoCache):
    def __init__(self, bases):
        self.bases = bases

    def __getitem__(self, layer):
        self.basis = self.bases[layer]  # (256, R)
        return self

    def update(self, k, v):
        x = torch.cat([k, v], 1).transpose(1, 2)  # (B, T, 8, 32)
        c = x.flatten(2) @ self.basis  # (B, T, R): the latent
        y = (c @ self.basis.T).view_as(x)
        return y.transpose(1, 2).split(4, dim=1)


# %%
# **Predict first.** The model's loss is about 3.7. By how much does it grow if a token leaves 64 numbers, a quarter of the
# 256?
#
# * by less than 0.1
# * by about 0.5
# * the model writes nonsense


def loss(ids, cache):
    logits = gpt2(ids, cache=cache)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


ranks = 8, 16, 32, 64, 128
lost, whole = [], []
for seed in range(3):
    bases = directions(some_text(train, 16, seed))
    test = some_text(held_out, 6, seed)
    whole.append(loss(test, NoCache()))
    through = [Through([x[:, :R] for x in bases]) for R in ranks]
    lost.append([loss(test, cache) - whole[-1] for cache in through])
lost = torch.tensor(lost)  # (seeds, ranks)
for R, column in zip(ranks, lost.T):
    print(f"R = {R:3}: loss +", *[f"{x:.3f}" for x in column])

assert min(whole) > 3.5 and max(whole) < 4.0
assert lost[:, 3].abs().max() < 0.1 and lost[:, 4].abs().max() < 1e-3
assert lost[:, 2].min() > 0.3 and lost[:, 2].max() < 0.6
assert lost[:, 1].min() > 0.8 and lost[:, 0].min() > 1.2

# %%
# By less than 0.1: a quarter of the numbers is almost enough. With an eighth the loss grows by about half a nat.
#
# And this model was never trained to get by with few numbers. DeepSeek-V3 learns its latents from the first step on, and
# has 512 numbers for what would be 32,768. (Whether it would be a better model with all of them, our experiment cannot
# say.) The figure shows three texts.

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

_, (ax,) = figure(4.8, 2.8)
for row, mark in zip(lost, ("o-", "s--", "^:")):
    ax.plot(ranks, row.clamp(min=1e-4), mark, color=COLOURS[0])
ax.set(
    title="What is lost", xlabel="R", ylabel="loss", xscale="log", yscale="log"
)
ax.set_xticks(ranks, [str(R) for R in ranks], minor=False)
ax.minorticks_off()
plt.show()

# %%
# Write it
# --------
#
# Here is a tiny model of the same kind, with random weights and 8 heads. R is the width of a latent. In a head's key, Dn
# features stay as they are and Dr features are rotated. Dv is the width of a value.

H, R, Dn, Dr, Dv = 8, 16, 12, 4, 10
config = DeepseekV3Config(
    vocab_size=97, n_layer=1, n_head=H, n_embd=64, intermediate_size=64,
    q_lora_rank=None, kv_lora_rank=R, qk_nope_head_dim=Dn, head_dim=Dr,
    v_head_dim=Dv, rope_interleave=False, first_k_dense_replace=1,
)  # fmt: skip
randomize_(model := build(config).eval())
layer = model.model.layers[0].self_attn
w = {name.removesuffix(".weight"): p for name, p in layer.named_parameters()}

# %%
# And here is its attention, for one text. Only the two vectors marked ``# kept`` go into a cache.


def mla(x, cos, sin):  # x: (T, C)
    T = len(x)
    q = F.linear(x, w["q_proj"]).view(T, H, Dn + Dr)
    q, u = q.split([Dn, Dr], dim=-1)
    u = apply_rope(u.transpose(0, 1)[None], cos, sin)[0]  # (H, T, Dr)

    c, r = F.linear(x, w["kv_a_proj_with_mqa"]).split([R, Dr], dim=-1)
    c = F.rms_norm(c, (R,), w["kv_a_layernorm"], 1e-6)  # kept: (T, R)
    r = apply_rope(r[None, None], cos, sin)[0, 0]  # kept: (T, Dr)

    kv = F.linear(c, w["kv_b_proj"]).view(T, H, Dn + Dv)
    k, v = kv.split([Dn, Dv], dim=-1)
    scores = torch.einsum("thd,shd->hts", q, k) + u @ r.T  # (H, T, T)
    future = torch.full((T, T), -torch.inf).triu(1)
    weights = (scores / (Dn + Dr) ** 0.5 + future).softmax(-1)
    y = torch.einsum("hts,shd->thd", weights, v)
    return F.linear(y.flatten(1), w["o_proj"]), (q, u, c, r, y)


# %%
# A score has two parts: one from the head's own key, one from the shared, rotated key. Their sum goes into one softmax,
# divided by the root of the whole width. Compare with the package's layer:

x = torch.randn(9, 64, generator=torch.manual_seed(0))
(seen,) = NO_CACHE.see(x[None])
turns = model.model.rotary_emb(seen.query_positions, x.dtype)
out, (q, u, c, r, y) = mla(x, *turns)
same = layer(x[None], turns, seen, NO_CACHE)[0]
print(f"kept: {R + Dr} numbers a token, of {H * (Dn + Dr + Dv)} in all heads")
print(f"largest difference {(out - same).abs().max():.0e}")

assert (out - same).abs().max() < 1e-4 < 1 < out.abs().max()
assert (R + Dr, H * (Dn + Dr + Dv)) == (20, 208)

# %%
# Decode without a single key
# ---------------------------
#
# There is a catch. The cache holds latents, so each new token would compute the keys and values of *all* earlier tokens
# again. For DeepSeek-V3 and 4,096 tokens, that is 537 million multiplications in each head.
#
# But a score is a product of three things: query, matrix, latent. You can multiply them in either order:
#
# .. math::
#
#    q \cdot (W_K \, c) = (W_K^\top q) \cdot c
#
# On the left, the matrix meets every latent. On the right, it meets the one query, once. The same holds for values:
# average the latents first, then multiply the result by :math:`W_V`. We say that the matrices are *absorbed*.


def decode(q, u, c, r):  # q (H, Dn), u (H, Dr), c (S, R), r (S, Dr)
    w_k, w_v = w["kv_b_proj"].view(H, Dn + Dv, R).split([Dn, Dv], dim=1)
    q = torch.einsum("hd,hdr->hr", q, w_k)  # (H, R)
    scores = (q @ c.T + u @ r.T) / (Dn + Dr) ** 0.5  # (H, S)
    return torch.einsum("hr,hdr->hd", scores.softmax(-1) @ c, w_v)


last = decode(q[-1], u[:, -1], c, r)
print(f"largest difference {(last - y[-1]).abs().max():.0e}")

assert (last - y[-1]).abs().max() < 1e-4 < 1 < y[-1].abs().max()

# %%
# All heads look at the same c. To the cache this is multi-query attention with one wide key; to the model, each head has
# its own keys.
#
# **Predict first.** One new token of DeepSeek-V3 after 4,096: how many times fewer multiplications does the absorbed
# form need?
#
# * 3 times
# * 12 times
# * 117 times

v3 = dict(R=512, Dn=128, Dr=64, Dv=128)
print("            expanded       absorbed")
for T in (1, 64, 4096):
    counts = multiplications(T, 4096, **v3)  # of a head
    print(f"T = {T:4}: {counts[0]:14,} {counts[1]:14,}")

assert 4096 * 512 * 256 == 536_870_912
forms = [multiplications(T, 4096, **v3) for T in (1, 4096)]
assert [round(x / y, 2) for x, y in forms] == [117.31, 0.31]

# %%
# 117 times: the matrix meets one query instead of 4,096 latents.
#
# For a whole prompt the absorbed form would need three times *more*: there each key serves many queries, and keys are
# narrower than latents. So the package counts, and takes the cheaper form: expanded in training and for prompts,
# absorbed for single tokens.
#
# Why a piece of the key is rotated
# ---------------------------------
#
# Why not rotate whole keys, as Qwen2 does? Between query and key there would be a rotation by the distance of the two
# tokens: :math:`q \cdot \mathrm{rotate}(W_K c)`. Then each distance has a different matrix between query and latent.
# Take real weights, those of our small Qwen2:

qwen2, _ = load_shipped("qwen2-docs")
attention = qwen2.model.layers[3].self_attn
w_q, w_k = (p.weight[:32] for p in (attention.q_proj, attention.k_proj))


def between(distance):  # (C, C): the matrix between two states
    turn = rotation(
        torch.tensor([[distance]]), inverse_frequencies(32, 10000.0)
    )
    return apply_rope(w_q.T[None, None], *turn)[0, 0] @ w_k


apart = {
    n: (between(n) - between(0)).norm() / between(0).norm()
    for n in (1, 4, 16, 64)
}
for distance, change in apart.items():
    print(
        f"distance {distance:2}: {100 * change:3.0f} % away from that of distance 0"
    )

assert apart[1] > 0.2 and min(apart[4], apart[16], apart[64]) > 0.5

# %%
# No fixed matrix could be absorbed. So MLA divides the work: most features carry content, without a position, and are
# absorbed. The position is left to Dr features, which are rotated and stored as they are. They are few, and all heads
# share them: 64 numbers.
#
# Exercises
# ---------
#
# 1. *Easy.* A chat has 131,072 tokens. How large is its cache in DeepSeek-V3, and how large would it be with 32,768
#    numbers a block? A good answer has two numbers in GiB, and their ratio.
# 2. *Medium.* Keep the latent *before* its norm in ``mla``, and apply the norm in ``decode``. Is the result the same?
#    What does it cost for each new token?
# 3. *Medium.* Find the T from which the expanded form is cheaper, for S from 256 to 65,536. A good answer is a table, and
#    the T that it approaches. Hint: compare the terms that grow with S.
#
# `Latent attention in depth <3a_latent_attention_in_depth.ipynb>`_ compares with ``transformers``, and measures time and
# memory.
#
# Summary
# -------
#
# * MLA stores one short latent for each token, and each head computes its own keys and values from it.
# * Multiply the matrix between query and latent into the query instead: then no key of an old token is ever computed.
# * A rotation would prevent this, so the position has a small key of its own, shared by all heads.
