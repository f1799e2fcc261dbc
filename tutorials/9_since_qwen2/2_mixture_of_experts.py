r"""
Mixture of experts
==================

How can a model have almost four times the weights, and do less work? In a *mixture of experts*, each block has many
small MLPs in place of a large one, and every token visits a few of them. Here are three published models: all their
weights, and those that one token meets.
"""

# sphinx_gallery_needs = ["1_qwen3", "../2_qwen2/3_swiglu"]
# sphinx_gallery_words = ["MoE", "sparse model", "router", "top-k routing", "load balancing", "auxiliary loss", "expert collapse", "active parameters", "Mixtral", "DeepSeekMoE", "shared expert", "softmax router", "MaxVio", "how does the router choose", "dense vs sparse model", "mixture of experts explained", "why experts", "how many experts", "tokens per expert", "active parameters vs total parameters", "A3B", "switch transformer", "Switch", "sparse MoE", "why is a mixture of experts fast", "large model with little compute", "specialists", "dead experts", "unused experts", "gating network", "top-2 routing", "capacity factor", "dropless", "Grok", "Llama 4", "GPT-4 mixture", "faster at the same size", "fewer operations per token"]

from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings.since_qwen2_models import (
    expert_loads,
    mixture,
    visited_experts,
)
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.layers.experts import (
    Experts,
    MixtureOfExperts,
    SharedExperts,
    SigmoidRouter,
    active_parameters,
)
from lm_from_scratch.layers.gated_mlp import GatedMLP
from lm_from_scratch.models.qwen3 import SIZES as DENSE
from lm_from_scratch.models.qwen3 import Qwen3Config
from lm_from_scratch.models.qwen3_moe import SIZES, Qwen3MoeConfig
from lm_from_scratch.text.corpora import load_corpus, split
from lm_from_scratch.training.balance import (
    balanced_bias,
    balancing_loss,
    overload,
    visits,
)

configs = {"Qwen3-8B": Qwen3Config(**DENSE["Qwen3-8B"])}
configs |= {name: Qwen3MoeConfig(**size) for name, size in SIZES.items()}
total, active = {}, {}
for name, config in configs.items():
    with torch.device("meta"):  # shapes without numbers
        whole = build(config)
    total[name] = sum(p.numel() for p in whole.parameters()) / 1e9
    active[name] = active_parameters(whole) / 1e9

fig, (ax,) = figure(4.6, 2.4)
ax.barh(
    [*total],
    [*total.values()],
    color=COLOURS[0],
    alpha=0.3,
    label="all weights",
)
ax.barh([*total], [*active.values()], color=COLOURS[0], label="a token meets")
for row, name in enumerate(configs):
    ax.text(
        total[name] + 3,
        row,
        f"{active[name]:.1f} of {total[name]:.1f}",
        va="center",
    )
ax.set(
    title="Weights of three models",
    xlabel="billions",
    xlim=(0, 345),
    ylim=(2.6, -0.6),
)
ax.legend(frameon=False, loc="center right")
plt.show()
assert [round(n, 1) for n in total.values()] == [8.2, 30.5, 235.1]
assert [round(n, 1) for n in active.values()] == [8.2, 3.4, 22.2]

# %%
# Qwen3-8B is dense: every token meets every weight. Qwen3-30B-A3B has almost four times as many weights, and does less
# than half of the work: each block has 128 experts, of which a token visits 8. The price is memory. All 30 billion
# weights must be loaded, because the next token may need any of them. So experts pay off where many users share the
# weights, and less on a small machine.
#
# Sixteen experts
# ---------------
#
# We give our small Qwen2 sixteen experts in place of its first MLP, and in a few seconds teach them to imitate that MLP.
# First we record what goes into the MLP and what comes out, for 8,192 tokens of Python's documentation.

model, tokenizer = load_shipped("qwen2-docs")
mlp = model.model.layers[0].mlp
del model.model.layers[1:]  # the first is all that is needed


pairs = []
mlp.register_forward_hook(lambda m, x, y: pairs.append((x[0], y)))


@torch.no_grad()
def seen(ids):  # what goes into the MLP, and what comes out
    model.model(ids)
    return [t.flatten(0, 1) for t in pairs[-1]]  # (N, C) each


def rows(documents, B):
    ids = [i for d in documents for i in [0, *tokenizer.encode(d.text)]]
    return torch.tensor(ids[: B * 128]).view(B, 128)


documents, held_out = split(load_corpus("reference"))
x, y = seen(rows(documents, 64))
test_ids = rows(held_out, 32)
x_test, y_test = seen(test_ids)


def loss_of(layer, x, y):  # the share of y that the layer misses
    return (layer(x) - y).square().mean() / y.var()


# %%
# ``extra`` is an additional loss, for later.


def teach(layer, seed, extra=None, steps=60):
    torch.manual_seed(seed)
    for p in layer.parameters():
        torch.nn.init.normal_(p, 0.0, p.shape[-1] ** -0.5)
    optimizer = torch.optim.AdamW(layer.parameters(), betas=(0.9, 0.95))
    for step in range(steps):
        rate = 0.02 * min(1, (step + 1) / 20) * (1 - step / steps)
        optimizer.param_groups[0]["lr"] = rate
        i = torch.randint(len(x), (256,))
        loss = loss_of(layer, x[i], y[i])
        loss = loss + (extra(layer.gate(x[i])) if extra else 0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return layer


# %%
# Each expert is a twelfth of the MLP. We colour each word by the expert that counts most for it:


def sixteen(router=None):
    router = router or SigmoidRouter(128, n_expert=16, top_k=2)
    return MixtureOfExperts(router, Experts(16, 128, 32))


plain = [teach(sixteen(), seed) for seed in range(3)]
text = "If the list is empty, return the first item of the second argument. If it is not a list, raise an error."
ids = torch.tensor([tokenizer.start(text)])
tokens = seen(ids)[0]  # (T, C)
routing = plain[0].gate(tokens)
pieces = tokenizer.pieces(ids[0].tolist())
visited_experts(pieces, routing.experts[:, 0].tolist())

# %%
# (⊢ is ``<|endoftext|>``, the start of the text.) The experts do not know what words are, and yet most copies of *the* go to
# one of them. Here is their share in new text, in three layers that began with different weights:

the = test_ids.flatten() == tokenizer.encode(" the")[0]


def favourite(layer):
    visited = layer.gate(x_test[the]).experts[:, 0].bincount()
    return (visited.max() / visited.sum()).item()


print(*(f"{favourite(layer):.0%}" for layer in plain))
assert min(map(favourite, plain)) > 0.4

# %%
# The authors of `Mixtral <https://arxiv.org/abs/2401.04088>`_ saw something similar: their experts divide tokens by
# syntax more than by topic. There is no expert for poetry.
#
# A score, a choice, a sum
# ------------------------
#
# Follow one token. The *router* is a matrix with one row for each expert. Its product with the token gives each expert a
# score, and the two experts with the best scores are computed. Nothing happens in the other fourteen.

t = pieces.index(" list")
_, experts, weights = (part[t].tolist() for part in routing)
scores = routing.logits[t].sigmoid().tolist()
mixture(pieces[t], scores, dict(zip(experts, weights, strict=True)))

# %%
# The two results are added up, weighted by their scores:
#
# .. math::
#
#    y &= \sum_{e \in \text{best } k} w_e \, \mathrm{MLP}_e(x) \\
#    w_e &= \frac{s_e}{\sum_{j \in \text{best } k} s_j}
#
# In code, for one token after another:


def by_hand(layer, token):  # (C,)
    s = (layer.gate.weight @ token).sigmoid()  # (E,)
    best = s.topk(2).indices  # 1
    y = 0
    for e in best:
        gate, up = (layer.experts.gate_up_proj[e] @ token).chunk(2)
        out = layer.experts.down_proj[e] @ (F.silu(gate) * up)
        y = y + s[e] / s[best].sum() * out  # 2
    return y


y_hand = torch.stack([by_hand(plain[0], token) for token in tokens])
torch.testing.assert_close(y_hand, plain[0](tokens))

# %%
# 1. The choice has no gradient: an expert that was not chosen learns nothing from this token.
# 2. The weights have one. So the router learns which of the *chosen* experts helped.
#
# Two nested loops are slow. The package's layer sorts all visits by expert, so that each expert multiplies its tokens in
# one product.
#
# The busy and the idle
# ---------------------
#
# **Predict first.** Sixteen experts, two visits a token. Over 4,096 tokens of new text, how often is the busiest expert
# visited?
#
# * as often as any other expert, 512 times
# * about one and a half times as often as the average
# * about three times as often

loads_of = [visits(layer.gate(x_test)) for layer in plain]  # (E,) each
print("visits:", [int(n) for n in loads_of[0]])
for counts in loads_of:
    print(f"the busiest has {counts.max() / counts.mean():.1f} times the mean")
    assert counts.sum() == 2 * 4096 and counts.max() > 2.3 * counts.mean()

# %%
# About three times as often, in all three layers. A router that happens to like an expert trains it more, so that
# expert becomes better, and the router likes it even more.
#
# On a machine where each GPU holds some of the experts, all GPUs wait for the busiest. This *overload* (MaxVio) is
# measured as the largest load over the mean, minus 1.
#
# There are two remedies. The older one is an **auxiliary loss**: multiply each expert's share of visits by its mean
# probability, and add up the products. The sum is smallest when all experts are visited equally. The newer remedy, from
# DeepSeek-V3, is a **bias** for each expert, added to its score *for the choice only*. After each step it rises a little
# for experts that had too few tokens, and falls for those that had too many. No gradient pulls the weights away from the
# task.


def moved(gate, routing):
    bias = gate.e_score_correction_bias
    bias.copy_(balanced_bias(bias, visits(routing), rate=0.02))
    return 0.0


layers = {"nothing": plain, "auxiliary loss": [], "bias": []}
for seed in range(3):
    layer = teach(sixteen(), seed, lambda r: 0.1 * balancing_loss([r]))
    layers["auxiliary loss"].append(layer)
    layer = sixteen()
    layers["bias"].append(teach(layer, seed, partial(moved, layer.gate)))
expert_loads(
    {n: visits(ls[0].gate(x_test)).tolist() for n, ls in layers.items()}
)

# %%
# The dashed line is the mean. Here are all three seeds, with the share of the MLP's output that each mixture misses:


@torch.no_grad()
def missed(layers):
    return [loss_of(layer, x_test, y_test).item() for layer in layers]


def spread(numbers):
    return f"{min(numbers):.2f} to {max(numbers):.2f}"


over = {
    name: [overload(visits(layer.gate(x_test))) for layer in three]
    for name, three in layers.items()
}
miss = {name: missed(three) for name, three in layers.items()}
for name in layers:
    print(
        f"{name:14} overload {spread(over[name])}, missed {spread(miss[name])}"
    )
for name in ("auxiliary loss", "bias"):
    assert sum(over[name]) < 0.6 * sum(over["nothing"])
    assert sum(miss[name]) > sum(miss["nothing"])

# %%
# Both remedies work, and neither is free: the balanced mixtures miss more, because some tokens cannot go to the expert
# that would serve them best.
#
# Is it worth it?
# ---------------
#
# **Predict first.** We teach two ordinary MLPs in the same way: a *narrow* one that does the work of two experts, and a
# *wide* one with the weights of all sixteen. Where does the mixture end up?
#
# * it misses more than both
# * between the two
# * it misses as little as the wide one

for name, width in {"narrow MLP": 2 * 32, "wide MLP": 16 * 32}.items():
    miss[name] = missed([teach(GatedMLP(128, width), s) for s in range(3)])
for name in ("narrow MLP", "nothing", "wide MLP"):
    print(f"{name:12} missed {spread(miss[name])}")
assert min(miss["narrow MLP"]) > max(miss["nothing"])
assert min(miss["nothing"]) > max(miss["wide MLP"])

# %%
# Between the two. The mixture is clearly better than the narrow MLP, which does the same work, and clearly worse than the
# wide MLP, which takes the same memory. That is the trade: **memory for quality at the same work.**
#
# Softmax, and an expert for all
# ------------------------------
#
# You will meet two variants in configs. Our router takes the sigmoid of each score, as DeepSeek-V3 does. Mixtral and
# Qwen3 take a *softmax* over all scores, so that the experts compete. And DeepSeek-V3 adds a *shared expert*: a small
# MLP that every token visits, whatever the router says. It should learn what all tokens need, so that the other experts
# do not have to.
#
# **Predict first.** Each token now visits three experts of width 32. Does it help if one of the three is shared?
#
# * yes, clearly
# * no, it misses more
# * the difference is smaller than between seeds

variants = {
    "3 of 16": lambda: sixteen(SigmoidRouter(128, 16, 3)),
    "2 of 15 and a shared one": lambda: SharedExperts(
        SigmoidRouter(128, 15, 2), Experts(15, 128, 32), GatedMLP(128, 32)
    ),
}
for name, make in variants.items():
    miss[name] = missed([teach(make(), seed) for seed in range(3)])
for name in variants:
    print(f"{name:24} missed {spread(miss[name])}")
assert 0 < sum(miss["2 of 15 and a shared one"]) - sum(miss["3 of 16"]) < 0.3

# %%
# No, it misses more: with so few experts, the shared one takes away one of three choices. In DeepSeek-V3 it takes away
# one of nine.
#
# Published models disagree, too: Qwen3 has no shared expert, though the models before it had one. `Routing in depth
# <2a_routing_in_depth.ipynb>`_ shows what differs between softmax and sigmoid.
#
# Exercises
# ---------
#
# 1. *Easy.* Colour the same sentence by the *second* expert of each token. Are words still divided by kind?
# 2. *Medium.* Set ``top_k`` to 1, 2, 4 and 16, and plot what the mixture misses against the number of active weights.
#    A good answer has four points of three seeds each, and says where another expert stops paying off.
# 3. *Medium.* Teach the narrow MLP and the mixture with learning rates of 0.005, 0.01 and 0.04 too. A good answer says at
#    which rate each of them misses least, and whether their order ever changes.
# 4. *Medium.* Balance with the bias at rates 0.001, 0.02 and 0.5. A good answer shows the overload after each step,
#    and explains the curve of the largest rate.
#
# Summary
# -------
#
# * A mixture of experts replaces an MLP by many small ones; a router sends each token to the k best. Memory grows with
#   the number of experts, work with k.
# * Left alone, a router overloads its favourites. An auxiliary loss or a bias for the choice spreads the tokens.
# * At equal work our mixture is better than a dense MLP; at equal memory it is worse.
