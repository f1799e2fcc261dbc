r"""
What Qwen2 costs, in depth
==========================

Where are the 494 million parameters of Qwen2-0.5B, and how many bytes and operations does a token need? This page deepens
`from GPT-2 to Qwen2 in five changes <4_qwen2.ipynb>`_. It counts each change, takes the published model apart without downloading it, and
compares the two small models that the package ships.

What each change costs
----------------------

Take the smallest GPT-2 and give it the parts of Qwen2. Three models are built on the ``meta`` device, where tensors have shapes but no
numbers: GPT-2, a Qwen2 of its size with as many key heads as query heads, and one with two key heads.
"""

# sphinx_gallery_museum = ["Q27"]

import copy
import inspect
import json
import textwrap
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.models.randomize import randomize_

torch.set_grad_enabled(False)

PARTS = dict(
    wte="embedding", embed_tokens="embedding", lm_head="head", wpe="positions"
)
PARTS |= dict(attn="attention", self_attn="attention", mlp="MLP")


def count(model):
    counts = Counter()
    for name, parameter in model.named_parameters():
        part = next((PARTS[p] for p in name.split(".") if p in PARTS), "norms")
        counts[part] += parameter.numel()
    return counts


V, P, C, L, H, D = 50257, 1024, 768, 12, 12, 64
sizes = dict(vocab_size=V, n_layer=L, n_head=H, n_embd=C)
with torch.device("meta"):
    old = count(GPT2LMHeadModel(GPT2Config(**sizes)))
    sizes |= dict(intermediate_size=8 * C // 3, eos_token_id=None)
    full = count(Qwen2ForCausalLM(Qwen2Config(n_kv_head=H, **sizes)))
    shared = count(Qwen2ForCausalLM(Qwen2Config(n_kv_head=2, **sizes)))

print(f"{'':10}{'GPT-2':>12}{'12 key heads':>14}{'2 key heads':>13}")
for part in [*old, "all"]:
    counts = [
        c.total() if part == "all" else c[part] for c in (old, full, shared)
    ]
    print(f"{part:10}{counts[0]:12,}{counts[1]:14,}{counts[2]:13,}")

# %%
# A gated MLP has three matrices where GPT-2 has two. With :math:`I = \tfrac{8}{3} C` its :math:`3 C I` weights are
# the :math:`8 C^2` of GPT-2, and only the biases disappear. (The published Qwen2 models are wider than that.)
#
# The other changes save parameters: the table of P positions, the biases of the norms, the bias of the attention output,
# and, with two key heads, most of two matrices in each layer.

assert full["positions"] == old["positions"] - P * C == 0
assert full["norms"] == old["norms"] - (2 * L + 1) * C
assert full["attention"] == old["attention"] - L * C
assert full["MLP"] == old["MLP"] - L * 5 * C
saved = 2 * L * (H - 2) * D * (C + 1)  # rows of k_proj and v_proj, with biases
assert shared["attention"] == full["attention"] - saved
assert old.total() == 124_439_808

# %%
# Memory: which logits, which activations
# ---------------------------------------
#
# Generation needs one row of logits and no more. Old code computed all of them in float32 (bug museum: Q27). With ``keep`` the model
# selects positions before the product with the head, so the other rows never exist.

tiny = Qwen2Config(
    vocab_size=97,
    n_layer=4,
    n_head=6,
    n_kv_head=2,
    n_embd=48,
    intermediate_size=113,
    rope_theta=10000.0,
    eos_token_id=None,
)


def random_model(config):
    model = Qwen2ForCausalLM(config).eval()
    randomize_(model)
    return model


model = random_model(tiny)
idx = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(1))
everything, last = model(idx), model(idx, keep=slice(-1, None))
assert everything.nbytes == 2 * 12 * 97 * 4
assert last.nbytes == everything.nbytes / 12
print(f"all {everything.nbytes} bytes, the last column {last.nbytes}")
V = Qwen2Config().vocab_size
print(f"Qwen2-0.5B, 32768 tokens: {4 * V * 32768 / 2**30:.1f} GiB")
print(f"the last of them: {4 * V / 2**20:.2f} MiB")

# %%
# Training keeps what the layers computed until the gradients need it. A checkpointed layer keeps its input and
# computes the rest again. Here is the function that changes the blocks of a built model, and then the bytes that torch
# keeps. Weights are not counted: they are there anyway.

from lm_from_scratch.instruments.record import record_saved
from lm_from_scratch.training.gradient_checkpointing import (
    use_gradient_checkpointing_,
)

print(inspect.getsource(use_gradient_checkpointing_))


def kept_bytes(model, tokens):
    with torch.enable_grad(), record_saved(model) as saved:
        loss = model(tokens).square().mean()
    loss.backward()
    return sum(saved.values())


long = torch.arange(2 * 128).view(2, 128) % 97
grads, kept = {}, {}
for L in (4, 8, 16):
    for kind in ("plain", "checkpointed"):
        deep = random_model(replace(tiny, n_layer=L))
        if kind == "checkpointed":
            use_gradient_checkpointing_(deep)
        kept[kind, L] = kept_bytes(deep, long) / 2**20
        grads[kind] = [p.grad for p in deep.parameters()]
    for a, b in zip(grads["plain"], grads["checkpointed"], strict=True):
        assert torch.equal(a, b)
    plain, checkpointed = kept["plain", L], kept["checkpointed", L]
    print(f"L {L:2}  plain {plain:5.2f} MiB  checkpointed {checkpointed:.2f}")

# %%
# The gradients are equal to the last bit. From 8 to 16 layers the plain model keeps 8 layers more; the checkpointed
# one keeps 8 inputs (B, T, C) more, exactly.

more = kept["checkpointed", 16] - kept["checkpointed", 8]
assert more * 2**20 == 8 * 2 * 128 * 48 * 4
ratio = (kept["plain", 16] - kept["plain", 8]) / more
print(f"a plain layer keeps {ratio:.0f} times its input")
assert ratio > 10

# %%
# A tour of Qwen2-0.5B
# --------------------
#
# This is the ``config.json`` of the published model. Newer files put the base of the rotation into a dictionary of its own. Both forms
# give the same config.

from lm_from_scratch.checkpoint.configs import config_from_dict

published = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 24,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "torch_dtype": "bfloat16",
}
newer = dict(published)
rope = {"rope_type": "default", "rope_theta": newer.pop("rope_theta")}
newer["rope_parameters"] = rope

config = config_from_dict(published)
assert config == config_from_dict(newer)
usual = Qwen2Config()
names = [field.name for field in fields(usual)]
names = [n for n in names if getattr(config, n) != getattr(usual, n)]
for name in names:
    print(f"{name}: {getattr(config, name)}, default {getattr(usual, name)}")
assert names == ["block_size", "bos_token_id"]
assert config.block_size == 4 * usual.block_size
assert config.windows == [None] * 24

# %%
# Two fields differ from the defaults of ``Qwen2Config``, and neither changes the shape of a weight. (The file allows four times the
# length that the report gives for training, which is our default.) There is a trap, too: the file
# has a window, and a switch that turns it off. No layer slides.
#
# Here is every tensor of the file. All layers have the same shapes, so only the first is printed.

with torch.device("meta"):
    qwen = Qwen2ForCausalLM(config).eval()
for name, parameter in qwen.named_parameters():
    if ".layers." not in name or ".layers.0." in name:
        print(f"{name:47} {tuple(parameter.shape)}")

counts = count(qwen)
V, C, I, L = config.vocab_size, config.n_embd, config.intermediate_size, 24
H, Hkv, D = config.n_head, config.n_kv_head, config.head_dim
in_attention = 2 * C * H * D + 2 * C * Hkv * D  # q and o, k and v
assert counts["embedding"] == V * C
assert counts["attention"] == L * (in_attention + H * D + 2 * Hkv * D)
assert counts["MLP"] == L * 3 * C * I
assert counts["norms"] == (2 * L + 1) * C
assert counts.total() == 494_032_768

# %%
# There are 494,032,768 parameters, and 136,134,656 of these, 27.6 %, are in the embedding, which is also the head. Almost
# two thirds are in the MLP. Attention has less than a tenth. In GPT-2 it has more than a fifth.

assert counts["embedding"] == 136_134_656
assert round(100 * counts["embedding"] / counts.total(), 1) == 27.6
assert 0.62 < counts["MLP"] / counts.total() < 2 / 3
assert counts["attention"] / counts.total() < 0.1
assert old["attention"] / old.total() > 0.2

parts = ("embedding", "positions", "attention", "MLP")
hatches = dict(zip(parts, ("", "//", "..", "xx")))
# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["memory usage", "logits memory", "gradient checkpointing", "num_logits_to_keep", "parameter count", "FLOPs"]
fig, (ax,) = figure(4.8, 2.6)
for row, (name, c) in enumerate({"GPT-2": old, "Qwen2-0.5B": counts}.items()):
    start = 0.0
    for part, colour in zip(parts, COLOURS[:4]):
        width = 100 * c[part] / c.total()
        style = dict(color=colour, edgecolor="none", hatch=hatches[part])
        ax.barh(name, width, left=start, label=part if row else None, **style)
        start += width
ax.invert_yaxis()
ax.grid(False)
ax.set(xlabel="percent", xlim=(0, 100), title="Where the parameters are")
fig.legend(loc="outside lower center", ncols=2, frameon=False)
plt.show()

# %%
# What it costs to run
# ~~~~~~~~~~~~~~~~~~~~
#
# The lesson on `shared key heads <3_swiglu.ipynb>`_ counts the cache: :math:`2 L H_{kv} D` numbers for each token. With a key head for every query head
# it would be H / Hkv = 7 times as much.


def cache_bytes(config, tokens=5):
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).bfloat16().eval()
        cache = GrowingCache(config.n_layer)
        model(torch.zeros(1, tokens, dtype=torch.long), cache=cache)
    return cache.nbytes // tokens


grouped = cache_bytes(config)
every_head = cache_bytes(replace(config, n_kv_head=H))
assert grouped == 2 * L * Hkv * D * 2 == 12_288
assert every_head == 7 * grouped
for name, size in (("2 key heads", grouped), ("14 key heads", every_head)):
    print(f"{name:12}  a token {size / 2**10:3.0f} KiB", end="  ")
    print(f"32768 tokens {size * 32768 / 2**30:.3f} GiB")

# %%
# A forward pass multiplies each token with every matrix once, the embedding included, because it is the head. With T
# tokens, scores and means cost another :math:`2 T^2 H D` multiply-adds in each layer. Torch's counter reports two
# operations for each multiply-add.

from torch.utils.flop_counter import FlopCounterMode

from lm_from_scratch.attention.kinds import use_attention_


def operations_per_token(model, tokens):
    model = copy.deepcopy(model).to("meta")
    use_attention_(model, "formula")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.long, device="meta"))
    return counter.get_total_flops() / tokens


T = 1024
matrices = L * (in_attention + 3 * C * I) + V * C
assert operations_per_token(qwen, T) == 2 * (matrices + L * 2 * T * H * D)
print(f"{2 * matrices / 1e9:.3f} GFLOP a token in the matrices")
print(f"{4 * L * T * H * D / 1e9:.3f} GFLOP in scores and means, T = {T}")
assert abs(matrices / counts.total() - 1) < 1e-3

# %%
# Twice the number of parameters is a good estimate of the work for a short text.
#
# To run the model you need memory for the weights in bfloat16, the cache, and the logits if you want all of them. To train it, count
# 16 bytes for each parameter in float32: weight, gradient, and the two moments of AdamW.

weights = 2 * counts.total()
print(f"weights, bfloat16     {weights / 2**30:.2f} GiB")
print(f"cache, 4096 tokens    {4096 * grouped / 2**30:.2f} GiB")
print(f"logits, 4096 tokens   {2 * 4096 * V / 2**30:.2f} GiB")
print(f"training, float32     {8 * weights / 2**30:.2f} GiB + activations")

# %%
# Two trained models
# ------------------
#
# The package ships a GPT-2 and a Qwen2 that were trained on the same text, for the same number of steps and tokens, with
# the same tokenizer, schedule and dropout. Each folder has a record of its training.

from lm_from_scratch import pretrained
from lm_from_scratch.checkpoint.weights import load_shipped

shipped, records, logs, files = {}, {}, {}, set()
for title, name in (("GPT-2", "gpt2-docs"), ("Qwen2", "qwen2-docs")):
    folder = Path(pretrained.__file__).parent / name
    shipped[title], tokenizer = load_shipped(name)
    records[title] = json.loads((folder / "record.json").read_text())
    lines = (folder / "log.jsonl").read_text().splitlines()
    logs[title] = [json.loads(line) for line in lines]
    files.add((folder / "tokenizer.json").read_bytes())
assert len(files) == 1

recipes = [record["arguments"] for record in records.values()]
for key in ("corpus", "held_out", "vocab_size", "block_size", "batch_size"):
    assert recipes[0][key] == recipes[1][key]
for key in ("steps", "lr", "min_lr", "warmup", "dropout", "dtype", "seed"):
    assert recipes[0][key] == recipes[1][key]
for key in ("held_out_sha256", "tokens_trained_on"):
    assert len({record[key] for record in records.values()}) == 1

operations = {}
for title, trained in shipped.items():
    n = sum(p.numel() for p in trained.parameters())
    assert n == records[title]["parameters"]
    operations[title] = operations_per_token(trained, 256)
    loss = records[title]["held_out"]["all"]["nats_per_token"]
    print(f"{title}  parameters {n:,}", end="  ")
    print(f"MFLOP a token {operations[title] / 1e6:.2f}", end="  ")
    print(f"held-out loss {loss:.3f}")
    assert loss < records[title]["baselines"]["unigram"]["nats_per_token"] - 1

# %%
# The matrices have the same number of weights, so a token costs exactly the same number of operations in both. The
# parameters differ by less than two percent: GPT-2 has a position table and more biases.

assert operations["GPT-2"] == operations["Qwen2"]
sizes = [record["parameters"] for record in records.values()]
assert 0.98 < sizes[1] / sizes[0] < 1

# %%
# The curves show the loss on the held-out documents during training. The bars show bits per byte at the end, for the whole
# text and for its two kinds.

fig, (above, below) = figure(4.8, 6.0, rows=2)
kinds = ("all", "reference", "docstrings")
for i, (title, log) in enumerate(logs.items()):
    tokens = recipes[i]["batch_size"] * recipes[i]["block_size"]
    points = [line for line in log if line["held_out_loss"] is not None]
    x = [line["step"] * tokens / 1e6 for line in points]
    y = [line["held_out_loss"] for line in points]
    above.plot(x, y, marker="os"[i], linestyle=("-", "--")[i], label=title)
    bits = [records[title]["held_out"][kind]["bits_per_byte"] for kind in kinds]
    places = [k + 0.4 * i - 0.2 for k in range(3)]
    style = dict(hatch=("", "//")[i], edgecolor="none", label=title)
    bars = below.bar(places, bits, 0.36, **style)
    below.bar_label(bars, fmt="%.2f", fontsize=8)
above.set(title="Held-out loss during training")
above.set(xlabel="million tokens", ylabel="nats per token")
below.set_xticks(range(3), kinds)
below.set(title="Held-out text, at the end")
below.set(ylabel="bits per byte", ylim=(0, 2.9))
above.legend(frameon=False)
below.legend(frameon=False, ncols=2, loc="upper center")
plt.show()

# %%
# The loss of Qwen2 falls faster, and stays lower at every step that was measured. In the last 650 steps both curves
# are almost flat, while the training losses go on falling: this text has little more to teach.

seen = {}
for title, log in logs.items():
    points = {line["step"]: line["held_out_loss"] for line in log}
    points = {step: loss for step, loss in points.items() if loss is not None}
    losses = [line["loss"] for line in log]
    seen[title] = points
    read = [sum(losses[s - 100 : s]) / 100 for s in (2000, 2650)]
    print(
        f"{title}  held out {points[2000]:.3f}, then {points[2650]:.3f}",
        end="  ",
    )
    print("training loss {:.2f}, then {:.2f}".format(*read))
    assert points[2650] > points[2000] - 0.03 and read[1] < read[0] - 0.2
assert all(seen["Qwen2"][step] < loss for step, loss in seen["GPT-2"].items())
assert seen["Qwen2"][2650] < seen["GPT-2"][2650] - 0.03

# %%
# These are two training runs with one seed each, at one size, on a small text. They show that both programs learn, and where
# a small text runs out. They do not show which architecture is better. One difference is certain: with two key heads
# instead of four, the cache holds half as much.

held = {}
for title, trained in shipped.items():
    cache = GrowingCache(trained.config.n_layer)
    trained(torch.zeros(1, 8, dtype=torch.long), cache=cache)
    held[title] = cache.nbytes
assert held["GPT-2"] == 2 * held["Qwen2"]

# %%
# Both continue one text. They know the tone of documentation, not its content.

from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.generation.text import generate_text

prompt = "Return a list of"
for title, trained in shipped.items():
    sampler = Sampler(temperature=0.7)
    pieces = generate_text(trained, tokenizer, prompt, 40, sampler, seed=1)
    text = " ".join((prompt + "".join(pieces)).split())
    print(textwrap.fill(f"{title}: {text}", 70))

# %%
# Exercises
# ---------
#
# 1. *Easy.* Count Qwen2-1.5B and Qwen2-7B on the meta device from ``SIZES``, by parts and by formula. Which share is the
#    embedding, and why does one of them have V times C parameters twice? Hint: look at what ``SIZES`` says about the
#    head. A right answer has two ways of counting that agree.
# 2. *Easy.* How long must a text be until the cache of Qwen2-0.5B is larger than its weights, both in bfloat16? A right answer is above
#    80,000 tokens, and a seventh of that with 14 key heads.
#
# Summary
# -------
#
# * Rotation saves the position table, and two key heads for twelve save most of two matrices in each layer. A gated MLP
#   with :math:`I = \tfrac{8}{3} C` has as many weights as GPT-2's.
# * Qwen2-0.5B has 494,032,768 parameters, 27.6 % of them in the embedding. A token of its cache takes 12,288 bytes in
#   bfloat16, a seventh of what 14 key heads would take.
# * A checkpointed layer keeps its input alone, less than a tenth of what a plain layer keeps.
# * At equal tokens and operations, the shipped Qwen2 ended more than 0.03 nats below GPT-2, with one seed each.
#
# Sources
# -------
#
# * Yang et al.: `Qwen2 Technical Report <https://arxiv.org/abs/2407.10671>`_, 2024.
# * The published model: `Qwen2-0.5B on the hub <https://huggingface.co/Qwen/Qwen2-0.5B>`_, whose ``config.json`` is quoted above.
# * Ainslie et al.: `GQA <https://arxiv.org/abs/2305.13245>`_, 2023. Key heads shared by groups.
# * Shazeer: `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_, 2020. The gated MLP, and the factor 8/3 that keeps its size.
# * Chen et al.: `Training Deep Nets with Sublinear Memory Cost <https://arxiv.org/abs/1604.06174>`_, 2016. Checkpointing.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
