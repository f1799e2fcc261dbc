r"""
GaLore in training: what it costs and what it gives
===================================================

AdamW keeps two moments for every weight, its *state*. `GaLore <2_galore.ipynb>`_ keeps them for a few directions of
each weight matrix, and a *basis* that says which directions these are. Here is what both keep for a matrix of 64 times 64
weights, with 16 directions:
"""

# sphinx_gallery_needs = ["2_galore"]
# sphinx_gallery_words = ["Adafactor", "GaLore memory", "fine-tuning on one GPU", "GaLore loss", "GaLore vs AdamW", "galore_rank", "galore_scale", "galore_update_proj_gap", "does GaLore work", "GaLore vs full training", "choose the rank of GaLore", "how often to update the projection", "GaLore convergence", "GaLore hyperparameters"]
from lm_from_scratch.drawings import optimizers as drawings

drawings.optimizer_state(64, 64, rank=16)

# %%
# With less than half of the numbers, how much of what AdamW learns will be left? Place your bet. We train the same
# small Qwen2 on the same text, again and again, and change nothing but the optimizer. The text is Python's language
# reference.

import tempfile
from pathlib import Path

import torch

from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.choose import state_bytes
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.runs.config import TrainConfig
from lm_from_scratch.text.batches import (
    PackedBatches,
    sequential_batches,
    write_tokens,
)
from lm_from_scratch.text.corpora import load_corpus, split
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.train import (
    evaluate,
    learning_rate,
    optimizer_step,
)

documents, unread = split(load_corpus("reference"))
tokenizer = Tokenizer.train([d.text for d in documents[:40]], 512)
folder = tempfile.TemporaryDirectory()
train_path, test_path = (Path(folder.name) / f"{i}.bin" for i in range(2))
train_file = write_tokens(documents[:40], tokenizer, train_path)
test_file = write_tokens(unread, tokenizer, test_path)
held_out = list(sequential_batches(test_file, 16, 64))[:3]
sizes = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=64)
config = Qwen2Config(
    vocab_size=512, block_size=64, intermediate_size=176, **sizes,
    rope_theta=10000.0, eos_token_id=None,
)  # fmt: skip

# %%
# A run has two learning rates: ``lr`` for the matrices of attention and MLP, and ``others`` for the embedding and the
# norms, which AdamW trains in every run. Options of GaLore go to the matrices.

# a factor for both: up to 1 in 10 steps, then down to 0.1
schedule = TrainConfig(steps=60, lr=1.0, min_lr=0.1, warmup=10)


def run(lr, others=0.128, seed=1, **galore):
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p not in {*matrices}]
    groups = [{"params": matrices, **galore}, {"params": rest}]
    kind = GaLore if galore else AdamW
    options = dict(betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    optimizer = kind(groups, **options)
    batches = PackedBatches(train_file, 8, 64, seed)
    for step in range(1, 61):
        for group, rate in zip(optimizer.param_groups, (lr, others)):
            group["lr"] = rate * learning_rate(step, schedule)
        optimizer_step(model, optimizer, [batches[step - 1]])
    states = optimizer.state.values()
    held = sum(x.nbytes for state in states for x in state.values())
    return {"loss": evaluate(model, held_out), "bytes": held, "model": model}


# %%
# Each kind gets two runs, with different starting weights and a different order of the text. The loss is measured on
# text that no run has trained on.

galore = dict(scale=1.0, update_proj_gap=20)
kinds = {
    "AdamW": dict(lr=0.008),
    "rank 16": dict(lr=0.016, rank=16, **galore),
    "rank 2": dict(lr=0.064, rank=2, **galore),
}
seeds = 1, 2
runs = {k: [run(seed=s, **kind) for s in seeds] for k, kind in kinds.items()}
frozen = run(lr=0.0)  # the matrices keep their random numbers
loss = {k: sum(one["loss"] for one in own) / 2 for k, own in runs.items()}
megabytes = {k: own[0]["bytes"] / 1e6 for k, own in runs.items()}

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, GREY, figure

_, (ax,) = figure(4.8, 3.8)
for i, (k, own) in enumerate(runs.items()):
    mark, colour = ("o", COLOURS[0]) if i else ("s", COLOURS[3])
    losses = [one["loss"] for one in own]
    ax.plot(2 * [megabytes[k]], losses, mark, color=colour)
    ax.annotate(
        k, (megabytes[k], max(losses)), (0, 9), textcoords="offset points",
        ha="center",
    )  # fmt: skip
ax.axhline(frozen["loss"], color=GREY, linestyle="--", linewidth=1.2)
ax.text(0.6, frozen["loss"] - 0.02, "matrices not trained", color=GREY)
ax.set(title="Loss against the optimizer's memory", xlim=(0, 1.2))
ax.set(xlabel="optimizer's state, MB", ylabel="held-out loss")
plt.show()
assert loss["rank 2"] > loss["rank 16"] and loss["rank 2"] > loss["AdamW"]
assert loss["rank 2"] < frozen["loss"] - 0.05

# %%
# Left is smaller, and down is better. With rank 16, GaLore holds about half of AdamW's state, and its loss is nearly
# that of AdamW. With rank 2 it is not.
#
# A control run
# -------------
#
# The dashed line is one more run. Its matrices keep their random numbers, and only the embedding and the norms learn.
# So the distance below this line is what the *matrices* have learned. Call it the gain, and let AdamW's be 100 %.
# Without the control, you could not say whether a difference of 0.05 is large.

full = frozen["loss"] - loss["AdamW"]
gain = {k: (frozen["loss"] - loss[k]) / full for k in kinds}
share = {k: megabytes[k] / megabytes["AdamW"] for k in kinds}
for k in kinds:
    print(f"{k:8} state {share[k]:4.0%}   gain {gain[k]:4.0%}")

assert gain["rank 16"] > 2 / 3 and share["rank 16"] < 0.55
assert gain["rank 2"] < gain["rank 16"] - 0.15

# %%
# A quarter of the directions, 16 of 64, keeps more than two thirds of the gain. A good first choice is a quarter of the
# model's width. (The state of this tiny model is mostly that of its embedding, which GaLore leaves to AdamW.)
#
# The rates differ as well. They are the best of a search with other starting weights, in which each rate was twice the
# one before. (Why ``others`` is as large as 0.128 comes later.) Small ranks need larger rates: Adam moves each
# coordinate by about the rate, and a small rank has fewer coordinates.
#
# What a rank costs
# -----------------
#
# GaLore keeps a basis for the shorter side of the matrix, and two moments. With s for the shorter side, l for the
# longer one and r for the rank, these are r (s + 2 l) numbers instead of AdamW's 2 s l.
#
# **Predict first.** The matrix of the first picture is square, with s = l = 64. You give GaLore all 64 directions. How
# large is its state, compared with AdamW's?
#
# * the same
# * half as large again
# * a little smaller, because the gradient has few directions

s = l = 64
for r in (2, 16, 42, 43, 64):
    print(f"rank {r:2}: {r * (s + 2 * l) / (2 * s * l):4.0%} of AdamW's")

assert 64 * (s + 2 * l) == 1.5 * 2 * s * l
assert 42 * (s + 2 * l) < 2 * s * l < 43 * (s + 2 * l)

# %%
# Half as large again: the moments are back at full size, and the basis comes on top.
#
# In a square matrix GaLore saves memory below two thirds of the side, here up to rank 42.
#
# The obvious comparison
# ----------------------
#
# Somebody compares both optimizers like this: AdamW gets one learning rate for all weights, the best of a search.
# GaLore gets a rate from a search too, and its option ``scale`` keeps the usual value, 0.25.
#
# **Predict first.** Which one has the lower loss?
#
# * AdamW
# * GaLore
# * neither: they differ by less than 0.1

adamw = run(lr=0.008, others=0.008)
default = run(lr=0.064, others=0.064, rank=16, scale=0.25, update_proj_gap=20)
for name, one in (("AdamW", adamw), ("GaLore", default)):
    print(f"{name:6} loss {one['loss']:.2f}, {one['bytes'] / 1e6:.1f} MB")
print(f"AdamW with two rates: {loss['AdamW']:.2f}")

assert adamw["loss"] - default["loss"] > 0.3
assert loss["AdamW"] < default["loss"] + 0.1
assert config.initializer_range == 0.02
assert all(
    p.std() > 0.3 if len(p) == 512 else p.std() < 0.1
    for one in runs["AdamW"]
    for p in one["model"].parameters()
    if p.dim() == 2
)

# %%
# GaLore, and clearly so, with half of the memory! It is too good to be true. ``scale`` multiplies the steps of the
# projected matrices and of nothing else, so GaLore had *two* learning rates: one for the embedding, and a quarter of it
# for the matrices. AdamW had one for both.
#
# But the embedding has farther to go. In the first figure's AdamW runs, all matrices began with numbers of about 0.02.
# In 60 steps those of the embedding grew to more than 0.3, and all others stayed below 0.1. Give AdamW two rates as
# well, and GaLore's lead is gone. So before you believe a comparison, ask what was tuned, and whether both sides had
# the same freedom.
#
# How often to renew the basis
# ----------------------------
#
# Every ``update_proj_gap`` steps GaLore makes a new basis from the gradient of that step. Our runs did so every 20
# steps.
#
# **Predict first.** Rank 16 once more, but now the first basis serves for all 60 steps. What changes the loss more,
# that, or rank 2 with a new basis every 20 steps?
#
# * One basis: it soon misses the gradient.
# * Rank 2.

forever = dict(lr=0.016, rank=16, scale=1.0, update_proj_gap=None)
groups = {
    "rank 2, gap 20": runs["rank 2"],
    "rank 16, gap 20": runs["rank 16"],
    "rank 16, one basis": [run(seed=seed, **forever) for seed in seeds],
}
folder.cleanup()


def weight_of(model):
    return model.model.layers[1].self_attn.q_proj.weight.detach().double()


torch.manual_seed(1)
start = weight_of(Qwen2ForCausalLM(config))
ends, ranks = [], []
for name, own in groups.items():
    change = weight_of(own[0]["model"]) - start
    ranks.append(torch.linalg.matrix_rank(change, rtol=1e-5).item())
    ends.append(sum(one["loss"] for one in own) / 2)
    print(f"{name:18}  loss {ends[-1]:.2f}  rank of change {ranks[-1]}")

assert ranks == [6, 48, 16]
assert abs(ends[2] - ends[1]) < ends[0] - ends[1]

# %%
# Rank 2. In a run this short, even the first basis will do, although `it grows old <2b_galore_in_depth.ipynb>`_.
#
# The last column counts the directions in which one matrix has moved since the start. With a single basis there are 16,
# as in LoRA of rank 16. Each new basis adds as many, and three bases make 48. That is what the gap is for, in long
# runs. A new basis costs a decomposition, so the paper waits 200 steps; `the page on new bases
# <3c_galore_bases_in_depth.ipynb>`_ counts the cost.
#
# Seven billion weights
# ---------------------
#
# The paper projects attention and MLP, as we do. We build its smallest and its largest model on the ``meta`` device, as
# shapes without memory, and count the optimizer's state in float32. (The smallest has 58 million weights, and is called
# 60M.)


def gigabytes(C, inner, layers, rank):
    sizes = dict(n_layer=layers, n_head=C // 128, n_kv_head=C // 128, n_embd=C)
    config = Qwen2Config(
        vocab_size=32000, block_size=256, intermediate_size=inner, **sizes,
        tie_word_embeddings=False, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    return [
        state_bytes(model, TrainConfig(steps=1, optimizer=kind, rank=rank))
        / 1e9
        for kind in ("adamw", "galore")
    ]


small = gigabytes(512, 1376, layers=8, rank=128)
large = gigabytes(4096, 11008, layers=32, rank=1024)
for name, (before, after) in (("60M", small), ("7B", large)):
    print(f"{name:>3}: {before:5.2f} GB with AdamW, {after:5.2f} with GaLore")

assert 0.64 < 1 - large[1] / large[0] < 0.66 and 53 < large[0] < 55
assert 18 < large[1] < 19.5 and 1 - small[1] / small[0] < 0.32
# embedding and head have 32000 rows each, and AdamW keeps 8 bytes for a weight
assert 0.5 * small[0] < 8 * 2 * 32000 * 512 / 1e9
assert abs(small[0] / 8e-3 - 58) < 1

# %%
# The state of the large model shrinks from 54 GB to about 19. (The 54 GB of the last lesson were weights, gradients and
# moments at two bytes a number; here they are the moments alone, at four.) The small one saves less than a third: more
# than half of it is embedding and output head, which GaLore leaves to AdamW.
#
# When not to use GaLore
# ----------------------
#
# * **Small model, large vocabulary.** You have just seen it: most of the state stays.
# * **Many tokens in a batch.** Then the memory goes to activations, which GaLore does not touch. `The bytes of GaLore
#   <3a_galore_bytes_in_depth.ipynb>`_ counts them.
# * **Fine-tuning on one GPU.** LoRA freezes the matrices and needs no gradient for them. GaLore needs every gradient in
#   full size, and the next lesson attacks that.
#
# The page on bytes also keeps moments in one byte a number, a quarter of their size in float32.
#
# Exercises
# ---------
#
# 1. *Easy.* Add rank 4 to the first figure. A good answer tries two rates, and says where GaLore would end at rank 0.
# 2. *Easy.* Run rank 16 with AdamW's rate, and AdamW with GaLore's. A good answer says what a comparison at one rate for
#    both would have claimed, in each case.
# 3. *Medium.* Make a new basis in every step, with two rates and several seeds. A good answer says whether
#    the better rate has changed, and what such a run costs.
#
# Summary
# -------
#
# * A quarter of the directions keeps most of what AdamW learns, with half of its state here. Full rank costs more than
#   AdamW.
# * Tune both with the same care. Try one learning rate too few, and AdamW looks bad.
# * Gradients and activations stay as large as they were, and so does the state of embedding and head.
