r"""
From GPT-2 to Qwen2 in five changes
===================================

GPT-2 is from 2019, Qwen2 from 2024. What happened in between? Less than you might think: the skeleton is the same, and
five parts are new. You know most of them from the last lessons. Now they become one model.

The course has one small model of each kind, trained on the same text. Here both read the same four words.
"""

# sphinx_gallery_needs = ["../1_gpt2/2_gpt2", "1_rms_norm", "2_rope", "3_swiglu"]
# sphinx_gallery_words = ["Qwen", "from_pretrained", "modeling_qwen2", "config.json", "Qwen2.5", "Qwen2ForCausalLM", "model.safetensors", "load pretrained weights", "Llama architecture", "GPT-2 vs Llama", "difference between GPT-2 and modern models", "what changed since GPT-2", "Llama from scratch", "Qwen2 vs Llama", "implement Llama", "modern transformer", "old and new transformers", "old vs new transformers", "improvements since GPT-2", "implement Qwen", "Qwen from scratch", "Qwen explained", "Llama explained", "open-source model", "open-weight model", "LLaMA", "state of the art architecture", "how do today's models differ from GPT-2", "build Llama"]
# sphinx_gallery_museum = ["Q1"]
# sphinx_gallery_thumbnail_number = 2

import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.plot import figure, printable

torch.set_grad_enabled(False)
gpt2, tokenizer = load_shipped("gpt2-docs")
qwen2, _ = load_shipped("qwen2-docs")
text = "Return the number of"
ids = torch.tensor([tokenizer.start(text)])  # (1, T)
shares = {
    "gpt2-docs": gpt2(ids)[0, -1].softmax(-1),  # (V,)
    "qwen2-docs": qwen2(ids)[0, -1].softmax(-1),
}

fig, axes = figure(4.6, 4.2, rows=2)
for ax, (name, share) in zip(axes, shares.items()):
    best = share.topk(5)
    words = tokenizer.pieces(best.indices.tolist())
    bars = ax.barh([printable(w) for w in words], (100 * best.values).tolist())
    ax.bar_label(bars, fmt="%.0f", padding=3)
    ax.invert_yaxis()
    ax.set(title=f"{name}: what follows {text!r}", xlabel="percent")
    ax.set(xlim=(0, 30))
plt.show()
assert sum(p.numel() for p in gpt2.parameters()) == 2_143_488
assert sum(p.numel() for p in qwen2.parameters()) == 2_101_376

# %%
# The two models have almost the same size, and have read the same text equally often. Still they do not quite agree.
# What is different inside?
#
# Five changes
# ------------
#
# Here is Qwen2, from token ids to logits. Select a coloured part to read what changed. Parts without colour are as in
# GPT-2: the *output head* is the comparison with the table of embeddings, which gives the logits.

from lm_from_scratch.drawings import qwen2 as drawings

sections = [
    "#rmsnorm-instead-of-layernorm",
    "#three-biases-instead-of-all",
    "#a-rotation-instead-of-a-table",
    "#key-heads-that-are-shared",
    "#a-gate-in-the-mlp",
]
drawings.qwen2_blocks(8, sections)

# %%
# RMSNorm instead of LayerNorm
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# `RMSNorm <1_rms_norm.ipynb>`_ divides each token's features by their root mean square. It does not subtract the mean
# first, and it adds no bias.
#
# Three biases instead of all
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# In GPT-2 every ``linear`` of a block adds a bias. In Qwen2 only those for queries, keys and values do. What such a
# bias can change is in depth: `biases on three maps <4a_qwen2_in_depth.ipynb>`_.
#
# A rotation instead of a table
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# GPT-2 adds a row of a table to say where a token is. Qwen2 `rotates <2_rope.ipynb>`_ queries and keys by an angle that
# grows with the position. There is no table that could end.
#
# Key heads that are shared
# ~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Several query heads read `the same key head <3_swiglu.ipynb>`_, which makes the cache small.
#
# A gate in the MLP
# ~~~~~~~~~~~~~~~~~
#
# A third matrix decides how much of each inner feature passes: `SwiGLU <3_swiglu.ipynb>`_ instead of GELU.
#
# Qwen2 in twenty lines
# ---------------------
#
# All five together make a model. First we need its weights by name, and the angles of the rotation.

from lm_from_scratch.layers.norm import rms_norm
from lm_from_scratch.layers.rope import RotaryEmbedding, apply_rope

w = qwen2.model.state_dict()  # 8 blocks, 4 query heads, 2 key heads
rotary = RotaryEmbedding(32, theta=10_000.0)


def weights_of(n):
    prefix = f"layers.{n}."
    return {k.removeprefix(prefix): w[k] for k in w if k.startswith(prefix)}


# %%
# Now the model. Read it beside the drawing; the comments give the shapes. Four parts are arguments (``norm``, ``bias``,
# ``turn`` and ``act``), so that we can exchange them later.


def qwen2_logits(ids, norm=rms_norm, bias=1, turn=apply_rope, act=F.silu):
    T = len(ids)
    x = w["embed_tokens.weight"][ids]  # (T, C)
    cos, sin = (t[0] for t in rotary(torch.arange(T)[None], x.dtype))
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    for n in range(8):
        p = weights_of(n)
        h = norm(x, p["input_layernorm.weight"])
        maps = [f"self_attn.{m}_proj" for m in "qkv"]
        q, k, v = (h @ p[f"{m}.weight"].T + bias * p[f"{m}.bias"] for m in maps)
        q, k, v = (t.view(T, -1, 32).transpose(0, 1) for t in (q, k, v))
        q, k = turn(q, cos, sin), turn(k, cos, sin)  # (4, T, 32), (2, T, 32)
        k, v = (t.repeat_interleave(2, 0) for t in (k, v))  # (4, T, 32)
        scores = (q @ k.mT / 32**0.5).masked_fill(future, -torch.inf)
        y = (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, -1)  # (T, C)
        x = x + y @ p["self_attn.o_proj.weight"].T
        h = norm(x, p["post_attention_layernorm.weight"])
        gate, up = (h @ p[f"mlp.{m}_proj.weight"].T for m in ("gate", "up"))
        x = x + (act(gate) * up) @ p["mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"]) @ w["embed_tokens.weight"].T  # (T, V)


# %%
# Is this the model of the package? We compare all logits of our sentence.

ours = qwen2_logits(ids[0])
print(tuple(ours.shape), tokenizer.pieces([ours[-1].argmax().item()]))
torch.testing.assert_close(ours, qwen2(ids)[0], atol=1e-4, rtol=1e-4)
for module in gpt2.transformer.h.modules():
    assert not isinstance(module, torch.nn.Linear) or module.bias is not None

# %%
# It is: every logit is the same, except for rounding. The in-depth page compares with
# `transformers <4a_qwen2_in_depth.ipynb>`_.
#
# Why compare numbers, and not just read what the model writes? ``transformers`` 4.42, of 2024, had three
# implementations of Qwen2's attention. Only one of them had the *sliding window*, a limit on how far back a token
# looks. The other two printed a warning, and let every token see the whole text. Nothing crashed, and every short text
# was right: `the window that was not there <4a_qwen2_in_depth.ipynb>`_.
#
# Take one change back
# --------------------
#
# How much does the trained model rely on each change? We take back one at a time, and let the model read text that it
# has never seen. We measure *bits per byte*: how much the text surprises the model. Less is better.
#
# * Norm: subtract the mean as well, as LayerNorm does.
# * Biases: leave them out.
# * Rotation: leave it out.
# * Gate: every gate is set to 1, so that up passes as it is.

from lm_from_scratch.text.corpora import load_split

unseen = [d.text[:1000] for d in load_split(["reference"], 0.05)[1]]


def bits_per_byte(**changes):
    nats, n_bytes = 0.0, 0
    for text in unseen:
        ids = torch.tensor(tokenizer.start(text))
        logits = qwen2_logits(ids, **changes)[:-1]  # (T - 1, V)
        nats += F.cross_entropy(logits, ids[1:], reduction="sum").item()
        n_bytes += len(text.encode())
    return nats / n_bytes / math.log(2)  # ln 2 nats are one bit


# %%
# **Predict first.** Which one does the most damage when it is taken back?
#
# * The norm
# * The biases
# * The rotation
# * The gate

bits = {
    "as trained": bits_per_byte(),
    "norm": bits_per_byte(
        norm=lambda x, weight: rms_norm(x - x.mean(-1, keepdim=True), weight)
    ),
    "biases": bits_per_byte(bias=0),
    "rotation": bits_per_byte(turn=lambda x, cos, sin: x),
    "gate = 1": bits_per_byte(act=torch.ones_like),
    "gate = 0.1": bits_per_byte(act=lambda g: torch.full_like(g, 0.1)),
    "gate = 0": bits_per_byte(act=torch.zeros_like),
}

fig, (ax,) = figure(4.6, 2.8)
bars = ax.barh(list(bits), list(bits.values()))
ax.bar_label(bars, fmt="%.2f", padding=3)
ax.invert_yaxis()
ax.set(title="One change taken back", xlabel="bits per byte", xlim=(0, 4.6))
plt.show()

# %%
# The gate, by far. How much it costs depends on the number that replaces the gates, but 0.1, and 0, which is no MLP at
# all, cost more than any other change, too.
#
# Without the rotation the model hardly knows the order of the words, but that costs less. The biases cost less than
# half of that. The mean hardly matters at all: in the rows of the embedding table it is close to 0 already.
#
# And the shared key heads? Give each query head its own copy of a key head, and every score stays the same (exercise
# 1). Only the cache and two matrices grow.

assert min(bits[f"gate = {g}"] for g in (1, 0.1, 0)) > bits["rotation"] + 0.5
cost = {name: b - bits["as trained"] for name, b in bits.items()}
assert 0.1 < cost["biases"] < cost["rotation"] / 2
assert abs(bits["norm"] - bits["as trained"]) < 0.1
assert w["embed_tokens.weight"].mean(-1).std() < 0.2 * 0.09
assert w["embed_tokens.weight"].std() > 0.09

# %%
# This measures how much a *trained* model needs its parts. Which architecture learns better is another question:
# `two trained models <4a_qwen2_in_depth.ipynb>`_.
#
# The published sizes
# -------------------
#
# Qwen2-7B is the same twenty lines. Only the numbers of its configuration are different: L blocks, C features of a
# token, I inner features, H query heads and Hkv key heads. In the drawing each thin bar is a block, as wide as C.

from lm_from_scratch.models.qwen2 import SIZES, Qwen2Config, Qwen2ForCausalLM


def parameters(config):
    with torch.device("meta"):  # shapes without numbers: no memory
        model = Qwen2ForCausalLM(config)
    return sum(p.numel() for p in model.parameters())


configs = {"qwen2-docs": qwen2.config}
configs |= {name: Qwen2Config(**numbers) for name, numbers in SIZES.items()}
counts = {name: parameters(config) for name, config in configs.items()}
drawings.model_sizes(configs, counts)

# %%
# **Predict first.** Qwen2-0.5B has 494 million parameters. Its table of embeddings has 151,936 rows of C = 896 numbers.
# What share of the parameters is that?
#
# * 3 %
# * 28 %
# * 60 %

table = 151_936 * 896  # (V, C)
print(f"{table:,} of 494,032,768: {table / 494_032_768:.0%}")
assert round(100 * table / 494_032_768) == 28
assert counts["Qwen2-0.5B"] == 494_032_768
assert counts["Qwen2-7B"] == 7_615_616_512

# %%
# 28 %, more than a quarter. That is why the small models use the table twice, as embedding and as output head. Qwen2-7B has a
# separate output head.
#
# Open a folder
# -------------
#
# A saved model, a *checkpoint*, is a folder: a config, the weights, a tokenizer. ``from_pretrained`` opens that of any
# Qwen2 or GPT-2 language model, and ``save_pretrained`` writes one that ``transformers`` can open.

import tempfile
from pathlib import Path

from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained

with tempfile.TemporaryDirectory() as folder:
    save_pretrained(qwen2, folder, tokenizer)
    print(*sorted(path.name for path in Path(folder).iterdir()), sep="\n")
    again = from_pretrained(folder)
torch.testing.assert_close(again(ids), qwen2(ids), atol=0, rtol=0)

# %%
# The name of a model on the Hugging Face Hub works like a folder. This line is not run here, because it downloads a
# gigabyte.
#
# .. code-block:: python
#
#    model = from_pretrained("Qwen/Qwen2-0.5B")
#
# Exercises
# ---------
#
# 1. Give each of the four query heads its own key head: repeat the rows of ``k_proj`` and ``v_proj`` in ``w``, with
#    their biases, and drop ``repeat_interleave``. A good answer has the same logits as before.
# 2. Set all gates to 1 in one block only, and try each of the eight blocks. A good answer has eight numbers, and says
#    which block needs its gates least.
# 3. Count the parameters of one block of Qwen2-7B by hand, from the numbers in the picture. A good answer is 28 times
#    that, plus two tables of 152,064 rows and one norm: 7,615,616,512.
#
# Summary
# -------
#
# * Qwen2 keeps GPT-2's skeleton and changes five parts: norm, biases, positions, key heads, MLP.
# * Of the parts that we took back, the trained model misses its gates most. Shared key heads save memory: with a copy
#   for each query head, the scores would be the same.
# * All published sizes run the same code. Only the numbers in ``config.json`` differ.
