r"""
A memory that does not grow
===========================

At 262,144 tokens, a block of Qwen3-Next with attention holds 512 MiB of keys and values. But three blocks of four have
no attention: each keeps 2 MiB, however long the text is. How does a text of any length fit into that?

In such a block each head has one matrix, its *memory*, and every token corrects it. Here the memory is asked for *path*,
its answer is compared with the new value *bytes*, and the difference is written:
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["../5_caching/1_why_cache"]
# sphinx_gallery_words = ["linear attention", "gated delta rule", "Gated DeltaNet", "DeltaNet", "Qwen3-Next", "hybrid attention", "recurrent state", "fast weights", "state space model", "RNN vs transformer", "alternative to attention", "constant memory", "infinite context", "Mamba", "recurrent", "recurrent transformer", "linear time", "memory of fixed size", "Kimi Linear", "RWKV", "RetNet", "faster than attention", "replace attention", "overwrite a memory", "associative memory", "forget gate", "decay", "very long texts", "no KV cache", "successor of the transformer", "future of transformers"]

import torch
import torch.nn.functional as F

from lm_from_scratch.drawings.since_qwen2_models import delta_rule_step

state = torch.tensor([[0.8, 0, 0.1, 0], [0, 0.9, 0, 0.2], [0.6, 0, 0, 0.1]])
k, v = torch.tensor([0.8, 0, 0.6]), torch.tensor([0.0, 0, 1, 0])
delta_rule_step(state, k, v, ("path", "bytes"))

# %%
# That is the **delta rule**: write the *difference* (delta) between what the memory should say and what it says.
#
# Why read before you write? Take three facts of a manual: *path* is a ``str``, *mode* is an ``int``, and, as of this
# version, *path* is ``bytes``. Each word has a random vector. One memory adds every fact to what it has, the other
# corrects. Then we ask both: what is *path*?

torch.manual_seed(0)
names, types = ["path", "mode"], ["str", "int", "bytes"]
key = dict(zip(names, F.normalize(torch.randn(2, 16), dim=1)))
value = dict(zip(types, F.normalize(torch.randn(3, 16), dim=1)))


def written(correct):
    S = torch.zeros(16, 16)
    for name, kind in [("path", "str"), ("mode", "int"), ("path", "bytes")]:
        k, v = key[name], value[kind]
        said = k @ S  # what the memory says for this key
        S = S + torch.outer(k, v - said if correct else v)
    return S


for correct in (False, True):
    said = key["path"] @ written(correct)
    near = {kind: round(float(said @ v), 1) + 0.0 for kind, v in value.items()}
    print("corrects:" if correct else "adds:    ", near)

added, corrected = (key["path"] @ written(c) for c in (False, True))
assert min(added @ value["str"], added @ value["bytes"]) > 0.8
assert corrected @ value["bytes"] > 0.99 > 0.1 > abs(corrected @ value["str"])

# %%
# A 1.0 means that the answer is this word's vector. The memory that adds says both types at once. The memory that corrects
# knows the new type alone.
#
# The rule
# --------
#
# Why does a matrix remember? To write a fact is to add the outer product :math:`k v^\top`, whose row i is :math:`k_i`
# times :math:`v`. To read is to multiply by a query, and :math:`(k v^\top)^\top q = (q \cdot k) \, v`. So the more a query
# is like a key, the more of that key's value it finds. If all keys are at right angles and of length 1, each key finds
# exactly its own value.
#
# If all facts are added, a query reads :math:`\sum_s (q \cdot k_s) \, v_s`. You know this sum: it is attention without
# the softmax, called *linear attention*. Without the softmax you need not keep the keys: the sum of all outer products,
# :math:`S`, answers every query.
#
# The delta rule corrects this sum. Today's models add two gates, which each token computes for itself:
# :math:`\alpha`, between 0 and 1, lets the whole memory fade, and :math:`\beta` says how much of the correction
# :math:`u` is written:
#
# .. math::
#
#    u_t &= \beta_t \, (v_t - \alpha_t S_{t-1}^\top k_t) \\
#    S_t &= \alpha_t S_{t-1} + k_t u_t^\top \\
#    o_t &= S_t^\top q_t
#
# Keys have length 1, so that with :math:`\beta = 1` the memory answers :math:`k_t` with exactly :math:`v_t` afterwards.
# Here is the whole rule, for one head with keys of Dk features and values of Dv:


def delta_rule(q, k, v, alpha, beta, S):  # q, k: (T, Dk), v: (T, Dv)
    outputs = []
    for t in range(len(k)):
        S = alpha[t] * S  # fade
        u = beta[t] * (v[t] - k[t] @ S)  # read, and correct
        S = S + torch.outer(k[t], u)  # write
        outputs.append(q[t] @ S)
    return torch.stack(outputs), S


# %%
# The package has a second form, ``chunk_delta_rule``, which reads 64 tokens at a time and gives the same numbers. Without
# it, training would take T small steps, one after the other. `The delta rule in depth <6a_delta_rule_in_depth.ipynb>`_
# shows how it works.
#
# Is it the gate, or the correction?
# ----------------------------------
#
# Older layers with a state, such as Mamba-2, had a gate and no correction: what is old fades, so the new fact is louder.
# Is that enough? We train four small memories. A text writes 48 facts, each a pair of one of 16 keys and one of 32
# values. Afterwards we ask for the *latest* value of every key. All memories have the same size, 16 by 16 numbers. The
# vectors are learned, and so is the gate: one number here, where a published layer computes it from each token.

from lm_from_scratch.layers.delta_rule import chunk_delta_rule

T, KEYS, VALUES, D = 48, 16, 32, 16


def final(k, v, fade, correct):  # k, v: (B, T, D); the state after T facts
    B = len(k)
    if not correct:
        left = torch.exp(-fade * torch.arange(T - 1, -1, -1))
        return (k * left[:, None]).mT @ v
    k, v, g = k[:, None], v[:, None], -fade.expand(B, 1, T)
    S = torch.zeros(B, 1, D, D)
    return chunk_delta_rule(k, k, v, g, torch.ones_like(g), S)[1][:, 0]


# %%
# Texts are drawn at random. For each key we record its latest value, and the gap: how many tokens earlier the same key
# had been written.


def texts(n, draw):
    keys = torch.randint(KEYS, (n, T), generator=draw)
    values = torch.randint(VALUES, (n, T), generator=draw)
    latest, when, gap = (torch.full((n, KEYS), -1) for _ in range(3))
    for t in range(T):
        key, value = keys[:, t : t + 1], values[:, t : t + 1]
        past = when.gather(1, key)
        gap.scatter_(1, key, torch.where(past < 0, -1, t - past))
        latest.scatter_(1, key, value)
        when.scatter_(1, key, t)
    return keys, values, latest, gap


# %%
# The training loop is the usual one:


def trained(correct, gate, seed):
    torch.manual_seed(seed)
    draw, sizes = torch.Generator().manual_seed(seed), (KEYS, VALUES, VALUES)
    key, value, head = (torch.randn(n, D, requires_grad=True) for n in sizes)
    fade = torch.tensor(-3.0, requires_grad=True)
    optimizer = torch.optim.Adam([key, value, head, fade], 3e-2)
    for step in range(121):
        keys, values, latest, gap = texts(32 if step < 120 else 200, draw)
        k, strength = F.normalize(key, dim=1), gate * F.softplus(fade)
        S = final(k[keys], value[values], strength, correct)
        logits = k @ S @ head.T / D**0.5  # of each key: (B, KEYS, VALUES)
        if step < 120:
            loss = F.cross_entropy(logits.mT, latest, ignore_index=-1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    right = logits.argmax(-1) == latest
    return right[latest >= 0], gap[latest >= 0]


# %%
# **Predict first.** With neither gate nor correction, the memory names the latest value of about half of the keys. And
# with a learned gate, but no correction?
#
# * about half as well
# * about nine of ten
# * all of them

kinds = {
    "neither": (0, 0),
    "gate": (0, 1),
    "correction": (1, 0),
    "both": (1, 1),
}
results, share = {}, {}
for name, (correct, gate) in kinds.items():
    results[name] = [trained(correct, gate, seed) for seed in range(3)]
    share[name] = torch.stack([r.float().mean() for r, _ in results[name]])
    print(f"{name:12}", *(f"{x:.2f}" for x in share[name]))

assert share["neither"].max() < 0.6
assert share["gate"].min() > 0.8 and share["gate"].max() < 0.97
assert share["correction"].min() > 0.98 and share["both"].min() > 0.98

# %%
# About nine of ten, from each of the three seeds: the gate helps a lot, but the correction gets nearly all keys right.
#
# Where does the gate fail? Sort the keys by the gap between their last two writings:

from itertools import pairwise

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

_, (ax,) = figure(4.8, 3.0)
edges, curves = [1, 2, 3, 5, 9, 17, 48], {}
for (name, runs), style, colour in zip(results.items(), "osd^", (3, 1, 0, 2)):
    rates = torch.tensor(
        [
            [
                right[(gap >= low) & (gap < high)].float().mean()
                for low, high in pairwise(edges)
            ]
            for right, gap in runs
        ]
    )  # (3 seeds, 6 parts)
    curves[name], low, high = rates.mean(0), rates.amin(0), rates.amax(0)
    line = dict(color=COLOURS[colour], label=name)
    ax.plot(edges[:-1], curves[name], style + "-", **line)
    ax.fill_between(edges[:-1], low, high, alpha=0.2, color=COLOURS[colour])
ax.set(
    title="Right answers by gap, mean and range",
    xlabel="tokens between two writings",
    ylabel="share",
)
ax.set_xscale("log", base=2)
ax.set_xticks(edges[:-1], edges[:-1])
ax.set_ylim(0, 1.05)
ax.legend(frameon=False)
plt.show()

assert curves["gate"][0] < 0.7 and curves["gate"][-1] > 0.95
assert min(curves["correction"]) > 0.97

# %%
# If a key is written twice within a few tokens, its two values are almost equally loud. To tell them apart the memory
# would have to fade fast, and then everything older would be gone: a gate fades all keys of a head alike. The correction
# removes exactly what the new fact replaces, and leaves all other facts alone.
#
# What is the gate for, then? Some things should be forgotten all at once, such as the last document. No correction can do
# that.
#
# What it costs
# -------------
#
# Back to the numbers of the first paragraph. Qwen3-Next has three blocks with a memory for each block with attention. In
# each of the three, 32 heads have a memory of 128 by 128 numbers, in float32. In the fourth, each token leaves keys and
# values of two heads with 256 features, in bfloat16.
#
# **Predict first.** After how many tokens is the cache of an attention block larger than the memory of another block?
#
# * about 10
# * about 1,000
# * about 100,000

memory = 32 * 128 * 128 * 4
token = 2 * 2 * 256 * 2
print(
    f"memory {memory / 2**20:.0f} MiB, token {token / 2**10:.0f} KiB: {memory // token:,} tokens"
)

assert memory // token == 1024 and 262_144 * token == 512 * 2**20

# %%
# After about 1,000: for a short chat the memory is the *larger* of the two.
#
# At 262,144 tokens, the longest text that the model accepts by default, the attention block holds 512 MiB, and the memory
# is still 2 MiB. In the package every kind of cache carries such states beside keys and values, and the law of caches
# holds: cut a text into pieces any way you like, and the logits are those of one pass.
#
# Where it loses
# --------------
#
# Why keep any attention at all? A matrix of 32 rows has room for 32 keys at right angles. We draw random keys, write each
# once, and ask for all of them.


def recalled(count, seed):
    torch.manual_seed(seed)
    k, v = (F.normalize(torch.randn(count, 32), dim=1) for _ in range(2))
    ones = torch.ones(count)
    _, S = delta_rule(k, k, v, ones, ones, torch.zeros(32, 32))
    return ((k @ S @ v.T).argmax(1) == torch.arange(count)).float().mean()


lost = {n: [recalled(n, seed) for seed in range(3)] for n in (8, 32, 64, 128)}
for count, shares in lost.items():
    print(f"{count:3} keys:", *(f"{share:.2f}" for share in shares))

assert min(lost[8]) > 0.99 and min(lost[32]) > 0.6 and max(lost[128]) < 0.4

# %%
# Beyond its width the memory fails, and it must: 32 by 32 numbers cannot hold ever more facts. A cache keeps them all. So
# a name or a number from far back needs the one block in four that keeps everything. Nor can a memory take back a token:
# it is a sum, and a sum does not reveal its terms. `Speculative decoding
# <../6_generation/2_speculative_decoding.ipynb>`_ must take back tokens when the model rejects a draft.
#
# Exercises
# ---------
#
# 1. *Easy.* Write *path is bytes* twice with the delta rule. What does the second writing change? A good answer is one
#    line of algebra, and a largest difference.
# 2. *Medium.* Let :math:`\beta = 0.5` in ``written``, and write the last fact n times. How much of ``str`` is left after
#    n = 1, 2, 3? A good answer is a formula and three numbers that agree with it.
# 3. *Medium.* In the last experiment, draw keys at right angles (the rows of a matrix from ``torch.linalg.qr``). Up to
#    how many keys is every answer right, and why?
#
# Summary
# -------
#
# * Where attention keeps keys and values of all tokens, the delta rule keeps one matrix of fixed size in every head.
# * The delta rule reads before it writes, and writes the difference: a key that comes again gets its new value. A gate
#   alone makes everything old quieter.
# * A matrix holds about as many facts as it is wide, and cannot take one back. So published models keep some blocks with
#   attention.
