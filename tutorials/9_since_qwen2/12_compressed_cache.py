r"""
A cache that compresses
=======================

How much memory does the cache of a text with a million tokens take? DeepSeek-V3.2 has short
`latents <3_latent_attention.ipynb>`_ already. Its successor V4-Flash takes a thirteenth of that:
"""

# sphinx_gallery_needs = ["7_sparse_attention", "3_latent_attention", "../5_caching/2_kinds_of_cache"]
# sphinx_gallery_words = ["compressed attention", "CSA", "HCA", "compressed sparse attention", "heavily compressed attention", "KV cache compression", "compress KV cache", "pool keys", "block compression", "compress_rates", "million tokens", "1M context", "DeepSeek V4", "DeepSeek-V4", "native sparse attention", "NSA", "cross-layer index sharing", "IndexShare"]
# sphinx_gallery_museum = ["M128"]

import math

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.attention.gqa import repeat_kv
from lm_from_scratch.attention.indexer import choose, mean_weights, recalled
from lm_from_scratch.attention.kinds import attention_layers
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.checkpoint.families import families
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import since_qwen2_attention as drawings
from lm_from_scratch.drawings.since_qwen2_models import cache_sizes
from lm_from_scratch.instruments.plot import figure
from lm_from_scratch.instruments.record import record_attention
from lm_from_scratch.models.deepseek_v4 import (
    HEAVY,
    SLIDING,
    SPARSE,
    Attention,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    compress_rotary,
)
from lm_from_scratch.models.randomize import randomize_
from lm_from_scratch.text.batches import pieces
from lm_from_scratch.text.corpora import reference, split
from lm_from_scratch.training.loss import causal_lm_loss

T = 2**20  # a million tokens, of two bytes for each number
old = families()["deepseek_v32"].config
latent = old["kv_lora_rank"] + old["qk_rope_head_dim"] + old["index_head_dim"]
v32 = 2 * T * old["num_hidden_layers"] * latent

new = DeepseekV4Config()
window = new.sliding_window * new.head_dim
sparse = window + T // 4 * (new.head_dim + new.index_head_dim)
heavy = window + T // 128 * new.head_dim
v4 = 2 * sum({SPARSE: sparse, HEAVY: heavy}[kind] for kind in new.kinds)
cache_sizes({"DeepSeek-V3.2": (v32, 0), "DeepSeek-V4": (v4, 0)}, T)

# %%
# That is 7.7 %, by the default sizes of both in ``transformers``, at two bytes a number; DeepSeek itself says 7 %.
# V4-Flash also has fewer layers, 43 for 61: layer by layer it takes about a ninth.

print(f"{v32 / 2**30:.1f} GiB, {v4 / 2**30:.1f} GiB: {v4 / v32:.1%}")

assert abs(v4 / v32 - 0.0767) < 0.0005

# %%
# The latent of V3.2 keeps *less of each token*. V4 no longer keeps each token. It keeps the latest 128 as they are; older
# ones are pooled, several to one vector.
#
# From blocks to entries
# ----------------------
#
# The text is cut into blocks of m tokens. As soon as a block's last token has been read, the block is pooled into one
# *entry*, a key and a value for this token's query and all later ones. Here m is 4, and the window has 5 tokens:

model, tokenizer = load_shipped("qwen2-docs")
test = pieces(split(reference())[1], tokenizer, length=256, count=8)
words = tokenizer.pieces(test.idx[0, 40:55].tolist())
drawings.pooled_blocks(words, size=4, window=5)

# %%
# **Predict first.** The query at position 14 is the last one of the picture. How many keys does it read?
#
# * 15, one for each token
# * 8: five of the window and three entries
# * 9: and the block that is not complete

query, ends = torch.tensor([[14]]), torch.tensor([[3, 7, 11, 15]])
entries = Visibility(query, ends).mask[0, 0, 0]
near = Visibility(query, torch.arange(15)[None], window=5).mask[0, 0, 0]
print(
    f"{int(near.sum())} tokens and {int(entries.sum())} entries: {entries.tolist()}"
)

assert near.sum() == 5 and entries.sum() == 3

# %%
# 8: five of the window and three entries. The last block lacks a token, and its three tokens are in the window anyway.
# (Tokens 10 and 11 are read twice, on their own and in entry 2. That does no harm.)
#
# No new rule is needed for this: give an entry the position of the *last* token of its block. The rule that you
# `know <../3_attention/2_masks.ipynb>`_, no key after the query, then says which entries may be seen. (RoPE turns V4's
# entries by the position of the *first* token. That is a matter of distance, not of who may look.)
#
# Pool a model that was never asked
# ---------------------------------
#
# Does attention to entries work at all? Take the shipped Qwen2, which has never seen an entry. Let its queries read
# the latest 8 keys, and for each block of 4 that lies before them the plain *mean* of its keys and of its values. Such an
# entry should weigh as much as four tokens, so its score gets log 4 more: softmax takes exp, which makes that a factor of 4.


def pooling(m, window):
    def attend(q, k, v, visibility, dropout=0.0):
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        t, n = torch.arange(256)[:, None], 256 // m
        mean_k, mean_v = (x.unflatten(2, (n, m)).mean(3) for x in (k, v))
        near = (t >= t.T) & (t - window < t.T)
        far = torch.arange(n) * m + m - 1 <= t - window
        keys = torch.cat([k, mean_k], dim=2)
        scores = q @ keys.mT / math.sqrt(q.shape[-1])
        scores[..., 256:] += math.log(m)
        scores = scores.masked_fill(~torch.cat([near, far], 1), -math.inf)
        return scores.softmax(-1) @ torch.cat([v, mean_v], dim=2)

    return attend


# %%
# And the loss of the model with such layers, in the second half of each text:


@torch.no_grad()
def loss(attend):
    layers = attention_layers(model)
    own = [layer.attend for layer in layers]
    for layer in layers:
        layer.attend = attend or layer.attend
    logits = model(test.idx)[:, 128:]
    for layer, before in zip(layers, own):
        layer.attend = before
    return causal_lm_loss(logits, test.targets[:, 128:]).item()


# %%
# **Predict first.** All keys give a loss of 4.17, the window of 8 alone 4.65. What do the window and the means give?
#
# * worse than the window alone: a mean of turned keys is noise
# * somewhere between, and nearer to all keys
# * the same as all keys

full, alone = loss(None), loss(pooling(256, 8))
pooled = {m: loss(pooling(m, 8)) for m in (2, 4, 8, 16)}
print(f"all keys: {full:.2f}   window alone: {alone:.2f}")
for m, value in pooled.items():
    back = (alone - value) / (alone - full)
    print(f"{m:2} tokens an entry: {value:.2f}, {back:.0%} of the way back")

assert abs(full - 4.17) < 0.03 and abs(alone - 4.65) < 0.03
assert full < pooled[2] < pooled[4] < pooled[8] < pooled[16] < alone
assert 0.5 < (alone - pooled[4]) / (alone - full) < 0.68

# %%
# Somewhere between, and nearer to all keys: more than half of what the window had lost comes back, with a quarter of the
# keys, and without a step of training. Of what is far away, the gist is often enough.
#
# V4 is trained for it, and learns a better mean. Each token brings two vectors, values and *gates*. For each feature, a
# softmax over the gates of the block's tokens gives the weights with which their values are averaged. With m = 4 the blocks
# also overlap: an entry is pooled from its own block and the one before.
#
# Two kinds of layers
# -------------------
#
# In V4 two kinds of layers alternate:
#
# * **128 to 1**, and a query reads every entry: 8,192 for a million tokens.
# * **4 to 1**, and an `indexer <7_sparse_attention.ipynb>`_ chooses the 512 best of 262,144 entries. Its keys are pooled
#   as well.
#
# So at a million tokens, attention in V4 never reads more than 8,320 keys for a query. (The indexer still scores all of
# its 262,144 keys, which are short.) One vector is key *and* value, for all heads.
#
# Laws of such a cache
# --------------------
#
# A text must give the same logits in one pass and in any pieces. Tokens whose block is not complete have to wait, and the
# cache must keep them until its last token comes. Here is a small V4 with random weights, fed in two ways.

config = DeepseekV4Config(
    n_layer=3, layer_types=(SLIDING, SPARSE, HEAVY), mlp_layer_types=("moe",) * 3,
    vocab_size=97, n_embd=32, n_head=4, head_dim=16, partial_rotary_factor=0.25, q_lora_rank=16,
    o_groups=2, o_lora_rank=8, index_n_heads=16, index_head_dim=8, index_topk=6, heavy_rate=16,
    n_expert=4, top_k=2, expert_size=16, sliding_window=8,
)  # fmt: skip
small = DeepseekV4ForCausalLM(config).double().eval()
randomize_(small)
idx = torch.randint(97, (2, 203))
with torch.no_grad():
    whole = small(idx)
    for n in ([50, 1, 1, 99, 52], [1] * 203):
        cache = cache_for(config.windows)
        fed = [(small(x, cache=cache), cache.nbytes) for x in idx.split(n, 1)]
        error = float((torch.cat([y for y, _ in fed], 1) - whole).abs().max())
        print(f"{len(fed):3} pieces: {error:.0e} apart, {cache.nbytes:,} bytes")
        assert error < 1e-9

# %%
# The same, up to rounding. And the bytes? A cache that keeps every token would grow by the same amount with each.

sizes = [held / 1000 for _, held in fed]  # token by token
_, (ax,) = figure(4.8, 2.8)
ax.plot(sizes)
ax.set(title="Bytes of the cache, in thousands", xlabel="tokens")
plt.show()

assert sizes == sorted(sizes) and len(set(sizes[100:])) < 35

# %%
# Steps: nothing is added until a block is complete. (The first rise is the window, and tokens that wait.)
#
# Is the formula behind the first picture right? We can count. Tensors on torch's meta device have shapes and no numbers,
# so an attention layer of full size "runs" on a million tokens in no time, and its cache says how many bytes it would hold.

counted = 0
for kind in (SPARSE, HEAVY):
    cache = cache_for([new.sliding_window])
    with torch.device("meta"), torch.no_grad():
        layer = Attention(new, kind).bfloat16()
        x = torch.empty(1, T, new.n_embd, dtype=torch.bfloat16)
        seen = cache.see(x, windows=[new.sliding_window])[0]
        rotation = compress_rotary(new)(seen.query_positions, x.dtype)
        layer(x, rotation, seen, cache[0])
    counted += new.kinds.count(kind) * cache.nbytes
print(f"by the formula {v4:,} bytes, counted {counted:,}")

assert 1 < counted / v4 < 1.02

# %%
# Less than one percent more: the positions of the entries, and the tokens that wait.
#
# One indexer for several layers
# ------------------------------
#
# At a million tokens, the indexers do most of V4's multiplications. But do neighbouring layers not look at the same tokens
# anyway? In the shipped model, let layer 5 choose the 16 best keys, and ask what share of *another* layer's attention
# they hold.

with torch.no_grad(), record_attention(model) as maps:
    model(test.idx)
places = torch.arange(256)[None]
causal = Visibility(places, places, dense=True)
weights = [mean_weights(layer[0], causal) for layer in maps]


def held(chooser, reader):
    chosen = choose(weights[chooser], causal, 16)
    share = recalled(weights[reader][:, None], causal, chosen)
    return float(share[:, 128:].mean())


for reader in (4, 5, 6, 7):
    own, borrowed = held(reader, reader), held(4, reader)
    print(
        f"layer {reader + 1}: own choice {own:.0%}, that of layer 5 {borrowed:.0%}"
    )
    assert own - 0.25 < borrowed <= own

# %%
# At least half of it, and less with every layer in between. Even a layer's own 16 best hold only about 70 to 90 %, so
# borrowing loses 10 to 20 points. Hy4 and Mistral Large 4 have one indexer for a few layers in a row. They are trained for it, which
# our model is not.
#
# Exercises
# ---------
#
# 1. *Easy.* Leave out the log 4. A good answer says how much of the way back is lost, and why the term is needed.
# 2. *Medium.* Pool with a window of 32 in place of 8. A good answer says how large the gap is now, and what part of it
#    comes back.
# 3. *Medium.* Pad the rows of ``idx`` on the left by 1, 2 and 3 tokens. A good answer shows that our logits stay the same,
#    and explains what would go wrong if blocks were cut by columns instead of positions.
#
# Summary
# -------
#
# * A block of tokens becomes one entry when its last token has been read, and only queries from there on may see it.
# * The latest tokens are kept as they are, older ones several to an entry: V4-Flash's cache takes 7.7 % of V3.2's.
# * A compressed cache must obey the old law: whole, in pieces and token by token, the logits are the same.
