r"""
Sparse attention in depth: ties, laws and costs
===============================================

The lesson on `sparse attention <7_sparse_attention.ipynb>`_ trains an indexer that chooses the keys of each query. Is
ours that of DeepSeek-V3.2? Why does a test of causality fail for the published code, although its mask is right? When
does an indexer pay off, and which mistakes would a fluent text not show?

The published module
--------------------

``transformers`` holds DeepSeek's indexer as a module. Ours has the same names, so the weights load as they are.
"""

# sphinx_gallery_needs = ["7_sparse_attention", "../5_caching/1_why_cache"]
# sphinx_gallery_words = ["DeepseekV32Indexer", "DSA indexer", "topk ties not deterministic", "torch.topk equal values", "index_n_heads", "indexer cache", "sparse attention cost"]

import torch
import transformers
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as hf

from lm_from_scratch.attention.attention import attention_weights
from lm_from_scratch.attention.indexer import (
    choose,
    gathered_attention,
    index_scores,
    indexer_loss,
    recalled,
    sparse_attention,
)
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.growing import CatCache
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.layers.rope import RotaryEmbedding
from lm_from_scratch.models.compressor import Compressor
from lm_from_scratch.models.indexed_attention import Indexer
from lm_from_scratch.models.randomize import randomize_

no_ids = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)


def config(heads):
    tiny = hf.DeepseekV32Config(
        vocab_size=97, hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, first_k_dense_replace=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        n_routed_experts=8, index_topk=8, index_head_dim=16,
        index_n_heads=heads, **no_ids,
    )  # fmt: skip
    tiny._attn_implementation = "eager"
    return tiny


def causal(T, S=None):
    places = torch.arange(S or T)[None]
    return Visibility(places[:, -T:], places, dense=True)


theirs = hf.DeepseekV32Indexer(config(16), layer_idx=0)
randomize_(theirs)
ours = Indexer(n_embd=32, n_head=16, head_dim=16, count=8, q_rank=16)
ours.load_state_dict(theirs.state_dict())
generator = torch.Generator().manual_seed(0)
x = torch.randn(2, 40, 32, generator=generator)
latent = torch.randn(2, 40, 16, generator=generator)  # of the query, in MLA
seen, rotary = causal(40), RotaryEmbedding(8)
rotation = rotary(seen.query_positions, torch.float32)
cos, sin = (torch.cat([part, part], -1)[:, 0] for part in rotation)

with torch.no_grad():
    wanted = theirs(x, latent, (cos, sin), seen.mask[:, 0], None)
    chosen = ours(x, rotation, seen, latent=latent)  # (B, T, K)
same = wanted[:, 7:].sort(-1).values == chosen[:, 7:].sort(-1).values
print(f"queries with the same eight keys: {same.all(-1).float().mean():.0%}")
assert same.all()

# %%
# The first eight features of each head turn with the position, as many as the rotation has. Queries come from the
# latent of `latent attention <3_latent_attention.ipynb>`_; a model without one takes the hidden state. DeepSeek's own
# kernel also turns queries and keys by one orthogonal matrix and rounds them to 8 bits: the first changes no product,
# and the second is for speed.
#
# Laws
# ----
#
# The tests repeat the comparison for 50 drawn configs, half of them with left padding. These laws need no other
# library.
#
# * Hiding what is not chosen and copying what is chosen give the same result.
# * As many keys as there are give full attention.
# * A text in chunks chooses what one pass chooses. For this an indexer keeps its own small cache, one key for each
#   token.

q, k, v = torch.randn(3, 2, 4, 40, 8, generator=generator, dtype=torch.float64)
hidden = sparse_attention(q, k[:, :2], v[:, :2], seen, chosen)
copied = gathered_attention(q, k[:, :2], v[:, :2], seen, chosen)
torch.testing.assert_close(hidden, copied)

every = choose(torch.randn(2, 40, 40, generator=generator), seen, count=40)
full = sdpa_attention(q, k, v, seen)
torch.testing.assert_close(sparse_attention(q, k, v, seen, every), full)

ours.double()
cache, start = CatCache(), 0
with torch.no_grad():
    whole = ours(x.double(), rotation, seen, latent=latent.double())
    for size in (9, 1, 1, 20, 9):
        part, end = slice(start, start + size), start + size
        now = rotary(seen.query_positions[:, part], torch.float32)
        inputs = x[:, part].double(), now, causal(size, end), cache
        piece = ours(*inputs, latent=latent[:, part].double())
        K = piece.shape[-1]
        assert torch.equal(piece, whole[:, part, :K])
        start = end
print("keys held for the indexer:", tuple(cache.held[0].shape))

# %%
# The test of causality fails, the mask is right
# ----------------------------------------------
#
# Here is a test that every causal model passes: read 40 tokens, then the first 30 alone, and compare the logits of
# these 30. We run it on tiny random models of ``transformers`` that differ in one number, the heads of the indexer.


@torch.no_grad()
def prefix_error(heads):
    model = hf.DeepseekV32ForCausalLM(config(heads)).eval()
    randomize_(model)
    idx = torch.randint(97, (4, 40), generator=torch.Generator().manual_seed(1))
    long, short = model(idx).logits[:, :30], model(idx[:, :30]).logits
    return (long - short).abs().max().item()


errors = {heads: prefix_error(heads) for heads in (1, 2, 16)}
for heads, error in errors.items():
    print(f"{heads:2} heads: the logits of one prefix differ by {error:.0e}")

assert min(errors[1], errors[2]) > 0.01 and errors[16] < 1e-4

# %%
# Ten later tokens seem to change the logits of earlier ones. It is natural to search the mask for a leak, and there is
# none. Replace the later tokens by others, and keep the length:


@torch.no_grad()
def later_tokens_error(heads):
    model = hf.DeepseekV32ForCausalLM(config(heads)).eval()
    randomize_(model)
    idx = torch.randint(97, (4, 40), generator=torch.Generator().manual_seed(1))
    other = torch.cat([idx[:, :30], idx[:, 30:].flip(1)], dim=1)
    return (model(idx).logits - model(other).logits)[:, :30].abs().max().item()


for heads in (1, 2, 16):
    print(
        f"{heads:2} heads: other later tokens, {later_tokens_error(heads):.0e}"
    )
    assert later_tokens_error(heads) < 1e-4

# %%
# So what the later tokens *are* does not matter; *how many* there are does. With few heads many scores are exactly 0,
# more keys are equal than there are places left, and ``torch.topk`` breaks ties as its algorithm comes across them.
# That depends on the length of the row. Its documentation says so: the indices of equal elements may vary.


def beginning(n):
    """Query 23 of a text with n tokens: its scores, of which two are not 0."""
    scores = torch.zeros(1, 1, n)
    scores[..., [5, 20]] = 1.0
    view = Visibility(torch.tensor([[23]]), torch.arange(n)[None])
    return scores.masked_fill(~view.mask[0], -torch.inf), view


for n in (24, 64, 1000):
    scores, view = beginning(n)
    by_topk = scores.topk(6).indices[0, 0].sort().values.tolist()
    by_rule = choose(scores, view, 6)[0, 0].tolist()
    print(f"{n:4} tokens: topk {by_topk}, our rule {by_rule}")
    assert by_rule == [20, 5, 23, 22, 21, 19]

# %%
# Our rule is that of equal scores the latest *position* wins. A ring buffer, padding or a longer text then cannot
# change a choice. There we differ from ``transformers`` on purpose; with the 64 heads of the published model such a tie
# is rare. What no rule removes is rounding: two scores that differ in their last bit may change places when another
# kernel adds them up.
#
# What it costs
# -------------
#
# One query of DeepSeek-V3.2 in decoding, in multiplications. Each of 128 heads compares 576 numbers of a key and adds
# 512 of a value. The indexer compares 128 numbers in 64 heads, and adds up 64.

published = hf.DeepseekV32Config()
H, latent_width = published.num_attention_heads, published.kv_lora_rank
full_key = H * (2 * latent_width + published.qk_rope_head_dim)
index_key = published.index_n_heads * (published.index_head_dim + 1)
k_keys = published.index_topk
print(f"a key: {full_key:,} in attention, {index_key:,} in the indexer")
assert (full_key, index_key, k_keys) == (139_264, 8_256, 2_048)

print("      S      full   indexer   chosen   ratio")
for S in (1024, 2048, 4096, 16_384, 65_536, 131_072):
    full_cost, indexing = S * full_key, S * index_key
    reading = min(S, k_keys) * full_key
    ratio = full_cost / (indexing + reading)
    parts = [f"{cost / 1e6:9.0f}" for cost in (full_cost, indexing, reading)]
    print(f"{S:7,}", *parts, f"{ratio:7.2f}")
assert 13 < ratio < 14

even = k_keys * full_key / (full_key - index_key)
index_share = published.index_head_dim / (latent_width + 64)
print(
    f"even at {even:.0f} keys; at most {full_key / index_key:.0f} times fewer"
)
print(f"the indexer's keys: {index_share:.0%} more numbers in the cache")
assert round(even) == 2177 and round(full_key / index_key) == 17
assert round(100 * index_share) == 22

# %%
# Millions of multiplications, for one block. Below 2,177 keys the indexer costs more than it saves. Beyond, the ratio
# grows towards 17 and no further: the indexer reads every key, so the cost stays linear for each new token and
# quadratic for a text. And it makes the cache larger: sparse attention reads less memory, it does not need less.
#
# What published models chose
# ---------------------------
#
# These are the defaults in ``transformers``.

names = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "deepseek_v4")
print("               heads  features    keys")
for name in names:
    c = transformers.AutoConfig.for_model(name)
    print(
        f"{name:14} {c.index_n_heads:5} {c.index_head_dim:9} {c.index_topk:7}"
    )
block = transformers.AutoConfig.for_model("minimax_m3_vl_text")
print(f"minimax_m3_vl: {block.index_topk_blocks} blocks", end=" ")
print(f"of {block.index_block_size} keys")
assert block.index_topk_blocks * block.index_block_size == 2048

# %%
# MiniMax-M3 keeps the sum of 2,048 keys and chooses them as blocks of 128, by the best key of each, one choice for each
# group of query heads. A GPU reads a block in one piece. The blocks lie at absolute places in the cache, so left
# padding moves their borders.
#
# Two stages of learning
# ----------------------
#
# DeepSeek first trains the indexer alone, beside full attention, and then lets the model read the chosen keys, where
# the divergence counts these keys only. The inputs of the indexer are cut from the graph in both. The gradient of the
# divergence is as simple as that of any softmax: prediction minus target.

q, k = (part.float() for part in (q, k))
weights = attention_weights(q, k, seen)  # (B, H, T, S)
scores = torch.randn(2, 40, 40, generator=generator, requires_grad=True)
indexer_loss(scores, weights, seen).backward()
visible = seen.mask[:, 0]
predicted = scores.detach().masked_fill(~visible, -torch.inf).softmax(-1)
difference = (predicted - weights.mean(1)) / (2 * 40)  # a mean over 80 queries
torch.testing.assert_close(scores.grad, difference)

# %%
# Bug museum
# ----------
#
# Each of these runs, trains and writes text.
#
# The ReLU was forgotten
# ~~~~~~~~~~~~~~~~~~~~~~
#
# Without it a sum of products is one product: all heads together are a single head with the query
# :math:`\sum_j w_{tj} q_{tj}` (M74). The test that finds it compares the score with the formula, or sixteen heads with
# one. In `another library <https://github.com/ml-explore/mlx-lm/pull/531>`_ both the ReLU and the sum over heads were
# missing. Short prompts were right, because all keys were read; long ones ended in repetition.

generator = torch.Generator().manual_seed(2)
iq = torch.randn(2, 16, 40, 16, generator=generator)
ik = torch.randn(2, 1, 40, 16, generator=generator)
iw = torch.randn(2, 40, 16, generator=generator)
linear = torch.einsum("btj,bjts->bts", iw, iq @ ik.mT) / 16
one_query = torch.einsum("btj,bjtd->btd", iw, iq)
torch.testing.assert_close(
    linear, one_query @ ik[:, 0].mT / 16, atol=1e-4, rtol=1e-4
)
right = index_scores(iq, ik, iw)
print(f"the scores differ by {(linear - right).abs().max():.1f}")
assert (linear - right).abs().max() > 1

# %%
# One set of weights for all queries
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The weights of the heads were averaged over the text, "because they hardly differ" (M75). Now a query depends on what
# comes after it. This leak is real, and the test with other later tokens finds it.


def averaged(w):
    return index_scores(iq, ik, w.mean(1, keepdim=True).expand_as(w))


changed = torch.cat([iw[:, :30], iw[:, 30:].flip(1) + 1], dim=1)
leak = (averaged(iw) - averaged(changed))[:, :30].abs().max()
clean = (right - index_scores(iq, ik, changed))[:, :30].abs().max()
print(
    f"with one set of weights {leak:.2f}, with one for each query {clean:.0f}"
)
assert leak > 0.01 and clean == 0

# %%
# Eight keys were chosen, one was read
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The best keys were taken first, and the causal mask came after (M76). Places go to keys of the future, which are then
# hidden. Nothing leaks; early queries read too little. Count the keys that each query reads: it must be k, or all that
# it sees.

early = right.topk(8).indices  # no mask
read = (early <= torch.arange(40)[:, None]).sum(-1)  # (B, T)
should = torch.arange(1, 41).clamp(max=8)
counted = (choose(right, seen, 8) >= 0).sum(-1)
print("keys of queries 10, 20, 39:", read[0, [10, 20, 39]].tolist())
assert (counted == should).all() and not (read == should).all()
assert read[0, 10] == 1

# %%
# Padding moved the choice
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# A row was padded on the left by four, and the columns that had been chosen for the unpadded row were used again (M77).
# Each is four too low. Compare the padded row with the row alone.

padded = torch.cat([torch.full((1, 4), -1), torch.arange(40)[None]], dim=1)
view = Visibility(padded, padded)
q2, k2, v2 = (torch.nn.functional.pad(p, (0, 0, 4, 0)) for p in (iq, ik, ik))
w2 = torch.nn.functional.pad(iw, (0, 0, 4, 0))
moved = choose(index_scores(q2, k2, w2), view, 8)[:, 4:]
alone = choose(right, seen, 8)
assert torch.equal(moved[:, 7:], alone[:, 7:] + 4)
y = sparse_attention(iq, ik, ik, seen, alone)
late = torch.nn.functional.pad(alone, (0, 0, 4, 0), value=-1)
wrong = sparse_attention(q2, k2, v2, view, late)[:, :, 4:]
good = torch.where(late >= 0, late + 4, -1)
fixed = sparse_attention(q2, k2, v2, view, good)[:, :, 4:]
print(f"off by {(wrong - y).abs().max():.1f}")
torch.testing.assert_close(fixed, y)
assert (wrong - y).abs().max() > 0.5

# %%
# Padding was pooled with the first tokens
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# DeepSeek-V4 `pools blocks of tokens to entries <12_compressed_cache.ipynb>`_. Where blocks are cut by the columns of the
# batch, padding on the left shares a block with the first tokens, and all later borders move (M128). ``transformers`` does
# so. Padding of whole blocks does not help: it becomes entries, and the others are turned by the wrong positions. Ours cuts
# by positions, of which padding has none.

rates = dict.fromkeys(
    ("compressed_sparse_attention", "heavily_compressed_attention"), 4
)
tiny = dict(hidden_size=32, head_dim=16, partial_rotary_factor=0.5)
settings = transformers.DeepseekV4Config(**tiny, compress_rates=rates)
by_columns = v4.DeepseekV4HCACompressor(settings)
randomize_(by_columns)
by_positions = Compressor(32, 4, 16, 1e-6, RotaryEmbedding(8, 160_000.0))
by_positions.load_state_dict(by_columns.state_dict())

for n in range(5):
    places = torch.cat([torch.full((1, n), -1), torch.arange(40)[None]], 1)
    row = torch.nn.functional.pad(x[:1], (0, 0, n, 0), value=1.0)
    with torch.no_grad():
        columns = by_columns(row, None, places.clamp(min=0), None, 0)[0][:, 0]
        view = Visibility(places, places)
        ours, _ = by_positions(row, row, rotation, view, NO_CACHE[0])
    if n == 0:
        alone = ours
    errors = [(e[:, -10:] - alone).abs().max() for e in (columns, ours)]
    print(f"padded by {n}: columns {errors[0]:.1f}, positions {errors[1]:.0e}")
    assert errors[1] < 1e-4 and (errors[0] > 0.5) == (n > 0)

# %%
# The divergence the wrong way round
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# ``KL(softmax(I) || p)`` also falls to 0 at the right answer, and it forgives an indexer that covers one of two keys,
# if only it covers nothing else (M78). An indexer must not miss a key. Here a query looks at two keys equally; one
# indexer knows both and adds a third, the other has lost one.

p = torch.tensor([0.499, 0.499, 0.002])
generous, narrow = torch.tensor([[0.34, 0.34, 0.32], [0.97, 0.01, 0.02]])


def kl(a, b):
    return (a * (a / b).log()).sum().item()


print(f"right way: generous {kl(p, generous):.2f}, narrow {kl(p, narrow):.2f}")
print(f"wrong way: generous {kl(generous, p):.2f}, narrow {kl(narrow, p):.2f}")
assert kl(p, generous) < kl(p, narrow) and kl(generous, p) > kl(narrow, p)

both = torch.stack([generous, narrow]).log()[:, None]  # (2, 1, 3): scores
target = p.expand(2, 1, 1, 3)
last = causal(1, 3)
assert indexer_loss(both[:1], target[:1], last) < 0.5
recall = recalled(target, last, choose(both, last, 2))
print("recalled by two keys:", recall[:, 0].tolist())
assert recall[0] > 0.99 and recall[1] < 0.51

# %%
# The model learned to please its indexer
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The inputs of the indexer were not cut from the graph, and neither were the weights that it imitates (M79). Then the
# divergence also falls when the *model* changes: its attention becomes what is easy to predict. Look where gradients
# arrive.

inputs = torch.randn(1, 6, 32, requires_grad=True)
attention = torch.rand(1, 2, 6, 6, requires_grad=True)
learner, six = Indexer(32, n_head=2, head_dim=16, count=2), causal(6)
turns = rotary(six.query_positions, torch.float32)
indexer_loss(learner.scores(inputs, turns), attention, six).backward()
assert inputs.grad is None and attention.grad is None
assert all(p.grad is not None for p in learner.parameters())

queries = inputs.view(1, 6, 2, 16).transpose(1, 2)
leaking = index_scores(queries, inputs[:, None, :, :16], inputs[..., :2])
indexer_loss(leaking, attention, six).backward()
print("gradient in the model:", inputs.grad is not None)
assert inputs.grad is not None

# %%
# Exercises
# ---------
#
# 1. *Easy.* At which length does an indexer with 16 heads pay, in place of 64? A good answer is computed as above.
# 2. *Medium.* Let the *earliest* of equal scores win, and repeat the lesson's training. A good answer says how the
#    loss of the model at k = 4 changes, for three seeds.
# 3. *Hard.* Choose blocks of eight keys by their best score, as MiniMax-M3 does, with borders that depend on positions.
#    A good answer passes the test of left padding.
#
# Summary
# -------
#
# * Scores that are sums of ReLUs are often equal. A choice needs a rule that depends on scores and positions alone.
# * If a prefix changes with the *number* of later tokens and not with *what* they are, look for ties, not for a leak.
# * An indexer pays off beyond about k keys, gains at most a constant factor, and makes the cache larger.
#
# Sources
# -------
#
# * DeepSeek-AI: `DeepSeek-V3.2 <https://arxiv.org/abs/2512.02556>`_, 2025. The indexer, its loss, two stages of
#   training.
# * Yuan et al.: `Native Sparse Attention <https://arxiv.org/abs/2502.11089>`_, 2025. Blocks that are chosen, and kernels
#   that read them.
# * `torch.topk <https://docs.pytorch.org/docs/stable/generated/torch.topk.html>`_: what is promised of equal elements.

import lm_from_scratch

print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
