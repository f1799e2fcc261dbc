r"""
Where spare attention goes
==========================

The weights of an attention head sum to 1. Always, even when nothing in the text helps. Below, a query meets four keys
(⊢ begins the text), and none of them fits. It spends all its weight on them all the same. Only if a *sink* takes part, one
more score without a value, does most of the weight go to nothing:
"""

# sphinx_gallery_needs = ["../2_qwen2/4_qwen2", "../1_gpt2/6_attention_maps", "../5_caching/2_kinds_of_cache"]
# sphinx_gallery_words = ["attention sink", "StreamingLLM", "gpt-oss", "learned sink", "s_aux", "softmax off by one", "gated attention", "Qwen3-Next", "massive activations", "null attention", "sliding window first token", "attention to the first token", "attend to nothing", "nothing to look at", "head with nothing to do", "softmax sums to one", "infinite streaming", "streaming", "streaming LLM", "endless text", "first token gets attention", "sigmoid gate", "bias in softmax", "off by one softmax", "BOS attention"]
# sphinx_gallery_thumbnail_number = 1

import torch
import torch.nn.functional as F

from lm_from_scratch.drawings.since_qwen2_attention import (
    pinned_window,
    softmax_budget,
)
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

softmax_budget(["⊢", "k", "e", "r"], [-0.5, -1.2, -1.0, -1.4], 1.4)

# %%
# Most models have no sink. So where does their spare weight go?
#
# We train a tiny model, with one block and one head, on an invented language of letters. Only one of its rules needs a
# memory: after a capital, the letter before the capital comes again (*kAk*). At capitals the head has work. At all other
# letters it has none, and its weight must still go somewhere.

LETTERS = "⊢ABCDEFGHabcdefghijklmnopqrstuvw"
torch.manual_seed(0)
follows = torch.rand(32, 32).pow(6)  # which letter likes to follow which
follows[:, 0] = 0  # ⊢ begins a text, and comes nowhere else


def write(rows, length):
    ids = torch.zeros(rows, length, dtype=torch.long)
    ids[:, 1] = torch.randint(9, 32, (rows,))
    for t in range(2, length):
        usual = torch.multinomial(follows[ids[:, t - 1]], 1)[:, 0]
        capital = (ids[:, t - 1] >= 1) & (ids[:, t - 1] <= 8)
        ids[:, t] = torch.where(capital, ids[:, t - 2], usual)
    return ids


rows, test = write(2000, 33), write(128, 97)

# %%
# We train three models, from three seeds:


def train(kind, seed):
    torch.manual_seed(seed)
    sizes = dict(vocab_size=32, n_layer=1, n_head=1, n_kv_head=1, head_dim=8)
    sizes |= dict(n_embd=16, intermediate_size=32, rope_theta=1e4)
    model = kind(
        Qwen2Config(**sizes, tie_word_embeddings=False, eos_token_id=None)
    )
    adamw = torch.optim.AdamW(model.parameters(), 2e-2, fused=True)
    for step in range(200):
        adamw.param_groups[0]["lr"] = (
            2e-2 * min(1, (step + 1) / 50) * (1 - step / 200)
        )
        x = rows[torch.randint(len(rows), (16,))]
        loss = F.cross_entropy(model(x)[:, :-1].mT, x[:, 1:])
        adamw.zero_grad()
        loss.backward()
        adamw.step()
    return model.eval().requires_grad_(False)


plain = [train(Qwen2ForCausalLM, seed) for seed in range(3)]

# %%
# Here is the attention map of the first model. Each row is one letter that looks back:

import matplotlib.pyplot as plt

from lm_from_scratch.instruments import plot
from lm_from_scratch.instruments.record import record_attention


def look(model, ids):
    with record_attention(model) as maps:
        model(ids)
    return maps[0][0][:, 0]  # (B, T, T)


def capitals(ids):
    return (ids >= 1) & (ids <= 8)


short = test[:, :33]
row = int(capitals(short[:, 5:21]).sum(1).argmax())
words = [LETTERS[i] for i in short[row, :21]]
fig, (ax,) = plot.figure(4.6, 4.6)
plot.attention_map(
    ax, look(plain[0], short)[row, :21, :21], words, "the only head"
)
ax.set(xlabel="is looked at", ylabel="looks")
plt.show()

# %%
# Capitals look one letter back, as they must. Most other rows share a dark column: the first. The start token ⊢ says
# nothing, and it is always there.

late = torch.arange(33) >= 8
idle, busy = ~capitals(short) & late, capitals(short) & late
first = [look(model, short)[:, :, 0] for model in plain]  # (B, T) each
print(f"spread evenly: {(1 / torch.arange(9, 34.0)).mean():.0%}")
for f in first:
    print(f"idle rows {f[idle].mean():.0%}, at capitals {f[busy].mean():.0%}")
    assert f[idle].mean() > 0.4 > 4 * f[busy].mean()

# %%
# These are the weights on the first token, in three models. Such a token is called an *attention sink*. The task did not
# ask for one; each training run invented it.
#
# Why the first token is harmless
# -------------------------------
#
# A head reads weight times *value*.
#
# **Predict first.** How long is the value vector of ⊢, compared with those of the letters?
#
# * about as long
# * much longer
# * much shorter


def lengths(model):  # of the value vectors of all 32 tokens
    layer = model.model.layers[0]
    x = layer.input_layernorm(model.model.embed_tokens.weight)
    return layer.self_attn.v_proj(x).norm(dim=1)


for v in map(lengths, plain):
    print(f"⊢ {v[0]:.2f}, letters on average {v[1:].mean():.2f}")
    assert v[0] < 0.7 * v[1:].mean()

# %%
# Much shorter. The model needed a way to say "nothing", and softmax has none. So it learned to use a bin: a key that idle
# queries like, with a value near zero.
#
# Large models do the same: in most of their blocks much of the weight lies on the first token (Xiao et al., 2023). In the
# `attention maps <../1_gpt2/6_attention_maps.ipynb>`_ of our GPT-2, heads with nothing to find rested on line ends. Do
# its heads, or those of our Qwen2, use the first token as well?
#
# **Predict first.** In 250 tokens of documentation, how much of the weight is on the first token?
#
# * about half
# * about a tenth
# * no more than its even share

import pydoc_data.topics

from lm_from_scratch.checkpoint.weights import load_shipped

for name in ("gpt2-docs", "qwen2-docs"):
    model, tokenizer = load_shipped(name)
    texts = map(tokenizer.start, sorted(pydoc_data.topics.topics.values()))
    ids = torch.tensor([text[:250] for text in texts if len(text) > 250][:8])
    with torch.no_grad(), record_attention(model) as maps:
        model(ids)
    share = torch.stack([layer[0][:, :, 100:, 0].mean() for layer in maps])
    print(name, "share in % by block:", *[f"{100 * s:.1f}" for s in share])
    assert share.mean() < (1 / torch.arange(101, 251.0)).mean() < 0.007

# %%
# No more than its even share, which is 0.6 %: only one block of the 16 spends twice that. Neither model has a sink there,
# so look at a model before you believe that it has one.
#
# A window that forgets it
# ------------------------
#
# A sliding window keeps the latest keys and drops the oldest ones, the first token before all. StreamingLLM keeps the
# first token, in a slot of its own beside the window.

pinned_window(words[:9], window=3, first=1)

# %%
# Our models were trained on 33 letters. We test them on 97, with 4 keys in all:

from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.streaming import Streaming


def losses(model):
    found = []
    for window, first in ((97, 0), (4, 0), (3, 1)):
        seen = Streaming(NO_CACHE, window, first)
        logits = model(test, cache=seen)[:, 32:-1]
        found.append(F.cross_entropy(logits.mT, test[:, 33:]).item())
    return found


# %%
# **Predict first.** Which of the three has the lowest loss beyond the 33rd letter?
#
# * all keys
# * the latest 4
# * the first and the latest 3

print("all keys, latest 4, first and latest 3")
for everything, window, pinned in map(losses, plain):
    print(f"{everything:8.3f} {window:9.3f} {pinned:10.3f}")
    assert pinned < window - 0.005 and window < everything - 0.5

# %%
# The first and the latest 3. With all keys each model fails, because nothing in training was that far away. A window
# fixes that, and keeping the first token gains a few hundredths of a nat more.
#
# The shipped GPT-2 loses 0.08 nats when a window of 64 keys drops its first token; the shipped Qwen2 loses nothing
# (`Sinks and gates in depth <4a_sinks_and_gates_in_depth.ipynb>`_).
#
# A sink of its own
# -----------------
#
# If models need to say "nothing", give them a word for it. In gpt-oss every head has a learned number, the *sink*
# :math:`z`. It takes part in the softmax and has no value:
#
# .. math::
#
#    a_s = \frac{e^{x_s}}{e^z + \sum_r e^{x_r}}
#
# In the first picture :math:`z` is 1.4. In code a sink is one more column, dropped after the softmax:

from lm_from_scratch.attention.sinks import sink_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.models.gated_attention import GatedForCausalLM
from lm_from_scratch.models.gpt_oss import Attention as SinkAttention


def with_sink(q, k, v, z):  # q, k, v: (H, T, D), z: (H,)
    H, T, D = q.shape
    future = torch.full((T, T), -torch.inf).triu(1)
    column = z.view(H, 1, 1).expand(H, T, 1)
    scores = torch.cat([q @ k.mT / D**0.5 + future, column], dim=-1)
    weights = scores.softmax(-1)
    return weights[..., :-1] @ v


q, k, v = torch.randn(3, 2, 5, 8)
z, at = torch.randn(2), torch.arange(5)[None]
ours = sink_attention(q[None], k[None], v[None], Visibility(at, at), z)
torch.testing.assert_close(with_sink(q, k, v, z), ours[0])

# %%
# A gate
# ------
#
# Qwen3-Next solves it in another way. The weights still sum to 1, but each token computes a *gate* along with its query,
# and multiplies what the head has read by the gate's sigmoid, feature by feature:
#
# .. math::
#
#    y = W_o \left( \sigma(W_g\, x) \odot \textstyle\sum_s a_s v_s \right)
#
# A gate near 0 silences the head. It depends on the token that looks, while a sink is the same number for all tokens. We
# train both:


def with_sinks(config):
    model = Qwen2ForCausalLM(config)
    for block in model.model.layers:
        block.self_attn = SinkAttention(config)
    model.model.init_weights()
    return model


models = {"plain": plain}
for name, kind in (("sink", with_sinks), ("gate", GatedForCausalLM)):
    models[name] = [train(kind, seed) for seed in range(3)]


def measured(model):
    weights = look(model, short)
    loss = F.cross_entropy(model(short)[:, :-1].mT, short[:, 1:])
    spent = weights.sum(-1)[idle].mean()
    return weights[..., 0][idle].mean(), spent, loss


found = {n: torch.tensor([*map(measured, ms)]) for n, ms in models.items()}
print("three seeds:       first token         spent            loss")
for name, three in found.items():
    low, high = three.amin(0).tolist(), three.amax(0).tolist()
    print(f"{name:6}", *(f"{a:9.3f} to {b:.3f}" for a, b in zip(low, high)))

assert found["sink"][:, 0].max() < 0.25 and found["sink"][:, 1].max() < 0.5
assert found["gate"][:, 0].max() < found["plain"][:, 0].min()
assert max(x[:, 2].max() for x in found.values()) < 0.03 + min(
    x[:, 2].min() for x in found.values()
)

# %%
# With a sink, idle rows spend less than half of their weight on letters, and the first token is an ordinary token again.
# With a gate the first token's share is smaller, too; how much smaller differs from seed to seed.
#
# The loss is the same for all nine models, within 0.03 nats: at this size, a bin that a model builds for itself is as
# good as one that you build in. There are other reasons to build one in: a window may then drop any token, and
# large models mark their bin with huge features, which are hard to quantise. Qiu et al. (2025) report that gates remove
# both the bin and those features.
#
# Exercises
# ---------
#
# 1. *Easy.* Set the trained sink to -10 with ``copy_``, and look again. A good answer explains why the loss rises at
#    idle letters alone. Hint: ``models["sink"][0].model.layers[0].self_attn.sinks``.
# 2. *Medium.* Train without ⊢: drop the first column of ``rows`` and ``test``. Which token becomes the sink? A good
#    answer shows a map of three seeds.
# 3. *Medium.* Remove the rule, so that no letter comes back, and train ``plain`` again. How large is the first token's
#    share when the head never has work? Explain what you see by gradients.
#
# Summary
# -------
#
# * Softmax weights sum to 1, so idle heads make themselves a bin: a key that they like, mostly the first, with a small value.
# * A window that keeps the first token costs one slot. Measure whether it helps.
# * A sink is a score without a value; a gate turns down what was read. Both let an idle head say nothing.
