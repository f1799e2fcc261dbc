r"""
Qwen2, assembled
================

The parts of the last three pages now stand in one file of the package. Is that file Qwen2? "It prints sensible text"
is no answer: a model with a wrong mask prints sensible text, too.

This page reads the file and holds it against ``transformers`` on everything that a caller can ask for. Then it takes
the published half-billion model apart, and compares two small trained models, a GPT-2 and a Qwen2.

You will learn
--------------

* what Qwen2 changes in GPT-2, and what each change costs or saves in parameters,
* how to prove that a model equals another one, and which test sees which mistake,
* what ``hidden_states[-1]`` is, which layers slide, and what checkpointing keeps,
* where the 494 million parameters of Qwen2-0.5B are, and what a token of its cache weighs.

Before you start
----------------

Read the page on `GPT-2 <../1_gpt2/2_gpt2.ipynb>`_ and the three pages before this one, on
`RMSNorm <1_rms_norm.ipynb>`_, `rotary positions <2_rope.ipynb>`_ and `SwiGLU <3_swiglu.ipynb>`_. You need a CPU and
``transformers``. Nothing is downloaded.

Letters name axes: B rows, T tokens, S keys, C features, H query heads, Hkv key heads, D features of a head, V
vocabulary. L is the number of layers and I the width of the MLP.

Two files side by side
----------------------

``models/gpt2.py`` and ``models/qwen2.py`` each have an attention, a block, a model and a head of their own. So the
difference of the two files is the history from 2019 to 2024. Minus marks GPT-2, plus marks Qwen2.
"""

# sphinx_gallery_thumbnail_number = 3
# sphinx_gallery_museum = ["Q27", "Q29"]

import copy
import difflib
import inspect
import json
import math
import tempfile
import textwrap
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers

from lm_from_scratch.models import gpt2, qwen2
from lm_from_scratch.models.causal_lm import randomize_

torch.set_grad_enabled(False)
transformers.utils.logging.disable_progress_bar()


def difference(name):
    old, new = (getattr(file, name).forward for file in (gpt2, qwen2))
    old, new = (inspect.getsource(f).splitlines() for f in (old, new))
    lines = difflib.ndiff(old, new)
    return [line for line in lines if line[0] in "+-"]


print(*difference("Attention"), sep="\n")

# %%
# Three things changed. One product became three, and two of them may have fewer heads. Queries and keys turn before the
# keys enter the cache. The dropout of what a layer adds is gone.
#
# The block kept its shape: only names and one argument differ. Norm and MLP are other classes behind the same call.

print(*difference("Block"), sep="\n")

# %%
# The model is where positions come in. The embedding no longer knows them: the angles are computed once for all layers,
# from the same integers that decide who sees whom. There is one mask for each window length, not one for each layer.

from lm_from_scratch.models.qwen2 import Qwen2ForCausalLM, Qwen2Model

source = inspect.getsource(Qwen2Model.forward)
print(source[source.index("        seen =") :])
source = inspect.getsource(Qwen2ForCausalLM.forward)
print(source[source.index("        x =") :])

# %%
# What each change costs
# ----------------------
#
# Take the smallest GPT-2 and give it the parts of Qwen2. Three models are built on the ``meta`` device: GPT-2, a Qwen2 of
# its size with as many key heads as query heads, and one with two.

from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.models.qwen2 import Qwen2Config

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
# the :math:`8 C^2` of GPT-2, and only the biases go. (The published Qwen2 models are wider than that.)
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
# A tiny model with large weights
# -------------------------------
#
# The proof needs a model in which a mistake cannot hide: weights with standard deviation 0.25, two rows that differ,
# six query heads on two key heads, and odd lengths. The package writes it to a folder, and ``transformers`` loads the
# folder.

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained

temporary = tempfile.TemporaryDirectory()
work = Path(temporary.name)
tiny = Qwen2Config(
    vocab_size=97,
    n_layer=4,
    n_head=6,
    n_kv_head=2,
    n_embd=48,
    intermediate_size=113,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    eos_token_id=None,
)


def random_model(config):
    model = Qwen2ForCausalLM(config).eval()
    randomize_(model)
    return model


def twin(model):
    save_pretrained(model, work / "ours")
    return transformers.AutoModelForCausalLM.from_pretrained(
        work / "ours", attn_implementation="eager", dtype="auto"
    )


model = random_model(tiny)
oracle = twin(model)
idx = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(1))
logits, expected = model(idx), oracle(idx).logits
print(tuple(logits.shape), f"standard deviation {logits.std():.2f}")
print(f"largest difference {(logits - expected).abs().max():.0e}")
torch.testing.assert_close(logits, expected, atol=5e-5, rtol=0.0)
assert logits.std() > 1

# %%
# The logits agree to 5e-5 where their standard deviation is above 1. This is one question out of many; more follow,
# first those that need a word.
#
# The last hidden state
# ~~~~~~~~~~~~~~~~~~~~~
#
# ``transformers`` returns L + 1 hidden states. One expects the embeddings and the result of each layer. The recorder
# of the package returns L + 2. Which of them are equal?

from lm_from_scratch.instruments.record import (
    record_attention,
    record_hidden_states,
    record_saved,
)

asked = dict(output_hidden_states=True, output_attentions=True)
with record_hidden_states(model) as recorded:
    model(idx)
    theirs = oracle(idx, **asked).hidden_states
names = ["embeddings", *(f"layer {n}" for n in range(4)), "final norm"]
equal = []
for name, (ours,) in zip(names, recorded, strict=True):
    close = [torch.allclose(h, ours, atol=1e-4, rtol=1e-4) for h in theirs]
    equal.append([j for j in range(len(theirs)) if close[j]])
    print(f"ours, {name:10} = theirs {equal[-1]}")
assert equal == [[0], [1], [2], [3], [], [4]]

# %%
# The last entry of ``transformers`` has been through the final norm, and the raw result of the last layer is nowhere.
# This is Q29 in the numbering of these pages. Whoever compares layers by their hidden states compares the last one in
# another scale.
#
# Which layers slide
# ~~~~~~~~~~~~~~~~~~
#
# A config says ``sliding_window`` and ``max_window_layers``. Layers with that index *and above* see the latest W keys,
# their own included; the others see all. A new config has a word for each layer instead, which leaves no doubt.

sliding = replace(tiny, sliding_window=4, max_window_layers=2)
words = (qwen2.SLIDING, qwen2.FULL) * 2
mixed = replace(tiny, sliding_window=3, layer_types=words, head_dim=12)
print("windows", sliding.windows, mixed.windows)


def visible(weights):  # by the last token, in any head
    return [int((a[0, :, -1] > 0).any(0).sum()) for a in weights]


slider = random_model(sliding)
with record_attention(slider) as maps:
    slider(idx)
ours = visible([layer[0] for layer in maps])
theirs = visible(twin(slider)(idx, **asked).attentions)
print("keys that the last of 12 tokens sees, per layer:", ours, theirs)
assert ours == theirs == [12, 12, 4, 4]

# %%
# The maps of one head show the same: a triangle in two layers, a band in the others.

from lm_from_scratch.instruments.plot import COLOURS, attention_map, figure

made, axes = figure(5.4, 5.6, rows=2, columns=2)
places = [str(t) for t in range(12)]
for i, (ax, (weights,)) in enumerate(zip(axes, maps)):
    window = sliding.windows[i]
    title = f"Layer {i}, " + (f"window {window}" if window else "no window")
    attention_map(ax, weights[0, 0], places, title)
    ax.tick_params(axis="x", rotation=0)
    ax.set(xlabel="key", ylabel="query")
    older = torch.arange(12)[:, None] - torch.arange(12) >= (window or 12)
    assert not weights[:, :, older].any() and not weights.triu(1).any()
plt.show()

# %%
# Everything at once
# ------------------
#
# One function asks everything else, of any config. Each answer is the largest difference. The left-padded batch has
# five pads in row 0; only real tokens are compared. The pieces have 5, 1, 3 and 3 tokens and share a cache.

from lm_from_scratch.attention.kinds import ATTENTION_KINDS, use_attention_
from lm_from_scratch.attention.visibility import positions_from_mask
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss

attention_mask = torch.ones_like(idx)
attention_mask[0, :5] = 0
positions = positions_from_mask(attention_mask)
real = attention_mask.bool()
padded = dict(
    attention_mask=attention_mask, position_ids=positions.clamp(min=0)
)
targets = next_token_targets(idx)
embeddings = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(2))


def in_pieces(model, sizes=(5, 1, 3, 3)):
    cache = GrowingCache(model.config.n_layer)
    return torch.cat([model(x, cache=cache) for x in idx.split(sizes, 1)], 1)


def pairs(model):
    oracle = twin(model)
    with torch.enable_grad():
        expected = oracle(idx, labels=idx, **asked)
        logits = model(idx)
        loss = causal_lm_loss(logits, targets)
        loss.backward()
        expected.loss.backward()
    yield "logits", logits, expected.logits
    yield "loss", loss, expected.loss
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert gradients.keys() == dict(oracle.named_parameters()).keys()
    for name, parameter in oracle.named_parameters():
        yield "gradients", gradients[name], parameter.grad
    with record_attention(model) as maps, record_hidden_states(model) as h:
        model(idx)
    yield "hidden states", h[-1][0], expected.hidden_states[-1]
    for (ours,), theirs in zip(h[:-2], expected.hidden_states):
        yield "hidden states", ours, theirs
    for (ours,), theirs in zip(maps, expected.attentions, strict=True):
        yield "attention weights", ours, theirs
    left = oracle(idx, **padded).logits
    yield "left padding", model(idx, positions=positions)[real], left[real]
    yield "5 + 1 + 3 + 3", in_pieces(model), expected.logits
    last = model(idx, keep=slice(-2, None))
    yield "the last 2", last, expected.logits[:, -2:]
    ours = model.model(embeddings)
    theirs = oracle.model(inputs_embeds=embeddings).last_hidden_state
    yield "embeddings in", ours, theirs
    for kind in ATTENTION_KINDS:
        changed = copy.deepcopy(model)
        use_attention_(changed, kind)
        yield f"kind: {kind}", changed(idx), expected.logits
    oracle.save_pretrained(work / "theirs")
    back = from_pretrained(work / "theirs")
    yield "there and back", back(idx), model(idx)


variants = dict(
    tied=tiny,
    untied=replace(tiny, tie_word_embeddings=False),
    sliding=sliding,
    mixed=mixed,
)
errors = {}
for column, config in variants.items():
    for row, ours, theirs in pairs(random_model(config)):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=5e-5)
        error = (ours - theirs).abs().max().item()
        errors[row, column] = max(error, errors.get((row, column), 0.0))

print(f"{'':18}", *(f"{name:>8}" for name in variants))
for row in dict.fromkeys(row for row, _ in errors):
    print(f"{row:18}", *(f"{errors[row, name]:8.0e}" for name in variants))

# %%
# All columns agree within 5e-5, absolute plus relative: tied and untied heads, windows from a number and from a list,
# and heads whose width is not C / H. What was saved, loaded by ``transformers``, saved and loaded again gives the same
# bits.

assert all(errors["there and back", name] == 0.0 for name in variants)

# %%
# Memory: which logits, which activations
# ---------------------------------------
#
# Generation needs one row of logits and no more. Old code computed all of them in float32 (Q27). ``keep`` selects
# before the product with the head, so the rest never exists.

everything, last = model(idx), model(idx, keep=slice(-1, None))
assert everything.nbytes == 2 * 12 * 97 * 4
assert last.nbytes == everything.nbytes / 12
print(f"all {everything.nbytes} bytes, the last column {last.nbytes}")
V = Qwen2Config().vocab_size
print(f"Qwen2-0.5B, 32768 tokens: {4 * V * 32768 / 2**30:.1f} GiB")
print(f"the last of them: {4 * V / 2**20:.2f} MiB")

# %%
# Training keeps what the layers computed until the gradients are due. A checkpointed layer keeps its input and
# computes the rest again. Here is the function that changes the blocks of a built model, and what torch really
# keeps. Weights are not counted: they are there anyway.

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
# Half precision
# ~~~~~~~~~~~~~~
#
# Two right programs differ in bfloat16, because they round at different places. So each of them is compared with
# float32 on the same rounded weights. Ours may not be much further away than ``transformers``.

half = copy.deepcopy(model).bfloat16()
half_oracle = twin(half)
assert from_pretrained(work / "ours").head_weight.dtype == torch.bfloat16
assert half_oracle.dtype == torch.bfloat16
exact = copy.deepcopy(half).float()(idx)
rounding = {
    "ours": (half(idx) - exact).abs(),
    "theirs": (half_oracle(idx).logits - exact).abs(),
}
for name, error in rounding.items():
    print(f"{name:6}  largest {error.max():.2f}  mean {error.mean():.3f}")
assert rounding["ours"].mean() < 1.5 * rounding["theirs"].mean()
assert rounding["ours"].mean() < 0.1 * exact.std()

# %%
# Three passes, six mistakes
# --------------------------
#
# Which of these tests does a model need? Six mistakes are planted in copies of the tiny model, and three passes look
# for each: a full one, a left-padded one, and one in pieces. The first four concern the mask, or where a token
# stands. The last two change the arithmetic.

from lm_from_scratch.attention.attention import sdpa_attention
from lm_from_scratch.attention.gqa import repeat_kv
from lm_from_scratch.layers.norm import RMSNorm


def first_triangle(q, k, v, visibility, dropout=0.0):
    k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def visible_padding(q, k, v, visibility, dropout=0.0):
    keys = visibility.key_positions.clamp(min=0)
    return sdpa_attention(q, k, v, replace(visibility, key_positions=keys))


def minus_infinity(q, k, v, visibility, dropout=0.0):
    k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visibility.mask, -torch.inf)
    return scores.softmax(-1) @ v


def tiled_heads(q, k, v, visibility, dropout=0.0):
    k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
    return sdpa_attention(q, k, v, visibility)


def restart(module, args):
    positions, dtype = args
    return torch.arange(positions.shape[1])[None], dtype


class EpsilonOutside(RMSNorm):
    def forward(self, x):
        root = x.square().mean(-1, keepdim=True).sqrt()
        return x / (root + self.eps) * self.weight


def plant(model, mistake):
    model = copy.deepcopy(model)
    if mistake is restart:
        model.model.rotary_emb.register_forward_pre_hook(restart)
    for module in model.modules():
        if mistake is EpsilonOutside and isinstance(module, RMSNorm):
            module.__class__ = EpsilonOutside
        elif inspect.isfunction(mistake) and hasattr(module, "attend"):
            module.attend = sdpa_attention if mistake is restart else mistake
    return model


mistakes = {
    "no mistake": sdpa_attention,
    "triangle from the first key": first_triangle,
    "padding is visible": visible_padding,
    "hidden is minus infinity": minus_infinity,
    "positions restart": restart,
    "key heads tiled": tiled_heads,
    "epsilon outside the root": EpsilonOutside,
}


def three_passes(model):
    full = (model(idx) - expected).abs().max().item()
    left = (
        (model(idx, positions=positions) - expected_left)[real]
        .abs()
        .max()
        .item()
    )
    cached = (in_pieces(model) - expected).abs().max().item()
    return full, left, cached


seen = []
print(f"{'':28}{'full':>8}{'left':>8}{'pieces':>8}")
expected_left = oracle(idx, **padded).logits
for name, mistake in mistakes.items():
    found = three_passes(plant(model, mistake))
    print(f"{name:28}", *(f"{error:7.1e}" for error in found))
    caught = [not error < 5e-5 for error in found]  # NaN is caught, too
    seen.append("".join(mark for mark, yes in zip("FLP", caught) if yes))

# %%
# The full pass is blind to four of the six: it has no cache and no padding. The padded pass misses one, the pieces miss
# two, and together these two find all six. The full pass tells where to look: here it fails exactly for the two mistakes
# in the arithmetic.
#
# The last mistake needs a tight tolerance as well. With 1e-2 it passes everywhere.

assert max(three_passes(plant(model, EpsilonOutside))) < 1e-2
assert seen == ["", "LP", "L", "L", "P", "FLP", "FLP"]

# %%
# A tour of Qwen2-0.5B
# --------------------
#
# This is what the ``config.json`` of the published model says. Newer files put the base of the rotation into a
# dictionary of its own. Both forms give one config.

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
# Two fields differ from the defaults of ``Qwen2Config``, and neither shapes a weight. (The file allows four times the
# length that the report gives for training, which is our default.) There is a trap, too: the file
# gives a window, and a switch that is off. No layer slides.
#
# Here is every tensor of the file. The layers are alike, so one stands for all.

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
# There are 494,032,768 parameters, and 136,134,656 of them, 27.6 %, are the embedding, which is also the head. Almost
# two thirds are in the MLP. Attention has less than a tenth; in GPT-2 it has more than a fifth.

assert counts["embedding"] == 136_134_656
assert round(100 * counts["embedding"] / counts.total(), 1) == 27.6
assert 0.62 < counts["MLP"] / counts.total() < 2 / 3
assert counts["attention"] / counts.total() < 0.1
assert old["attention"] / old.total() > 0.2

parts = ("embedding", "positions", "attention", "MLP")
hatches = dict(zip(parts, ("", "//", "..", "xx")))
made, (ax,) = figure(5.4, 2.4)
for row, (name, c) in enumerate({"GPT-2": old, "Qwen2-0.5B": counts}.items()):
    start = 0.0
    for part, colour in zip(parts, COLOURS[:4]):
        width = 100 * c[part] / c.total()
        style = dict(color=colour, edgecolor="white", hatch=hatches[part])
        ax.barh(name, width, left=start, label=part if row else None, **style)
        start += width
ax.invert_yaxis()
ax.grid(False)
ax.set(xlabel="percent", xlim=(0, 100), title="Where the parameters are")
made.legend(loc="outside lower center", ncols=4, frameon=False)
plt.show()

# %%
# What it costs to run
# ~~~~~~~~~~~~~~~~~~~~
#
# The page on SwiGLU counted the cache: :math:`2 L H_{kv} D` numbers for each token. With a key head for every query head
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
# tokens, scores and means cost :math:`2 T^2 H D` multiply-adds more in each layer. Torch's counter reports two
# operations for each multiply-add.

from torch.utils.flop_counter import FlopCounterMode


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
# To run it, count: the weights in bfloat16, the cache, and the logits if you ask for all of them. To train it, count
# 16 bytes for each parameter in float32: weight, gradient, and the two moments of AdamW.

weights = 2 * counts.total()
print(f"weights, bfloat16     {weights / 2**30:.2f} GiB")
print(f"cache, 4096 tokens    {4096 * grouped / 2**30:.2f} GiB")
print(f"logits, 4096 tokens   {2 * 4096 * V / 2**30:.2f} GiB")
print(f"training, float32     {8 * weights / 2**30:.2f} GiB + activations")

# %%
# This block is not run here, because it downloads about a gigabyte. The name on the hub stands where a folder stood
# before.
#
# .. code-block:: python
#
#    model = from_pretrained("Qwen/Qwen2-0.5B")
#    print(sum(p.numel() for p in model.parameters()))
#
# Two trained models
# ------------------
#
# The package ships a GPT-2 and a Qwen2 that were trained on the same text, for the same number of steps and tokens, with
# the same tokenizer, schedule and dropout. Here is what the two records say.

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
# The curves show the loss on the held-out documents during training; the bars, bits per byte at the end, in the whole
# text and its two kinds.

made, (above, below) = figure(5.4, 6.0, rows=2)
kinds = ("all", "reference", "docstrings")
for i, (title, log) in enumerate(logs.items()):
    tokens = recipes[i]["batch_size"] * recipes[i]["block_size"]
    points = [line for line in log if line["held_out_loss"] is not None]
    x = [line["step"] * tokens / 1e6 for line in points]
    y = [line["held_out_loss"] for line in points]
    above.plot(x, y, marker="os"[i], linestyle=("-", "--")[i], label=title)
    bits = [records[title]["held_out"][kind]["bits_per_byte"] for kind in kinds]
    places = [k + 0.4 * i - 0.2 for k in range(3)]
    style = dict(hatch=("", "//")[i], edgecolor="white", label=title)
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
# The Qwen2 run falls faster and is at its lowest about half-way. From there its held-out loss rises, while its training
# loss goes on falling: it overfits. So the lowest points of the two runs differ by more than 0.05 nats, and their ends
# by less than 0.01.

lowest, last, read = {}, {}, {}
for title, log in logs.items():
    points = {line["step"]: line["held_out_loss"] for line in log}
    points = {step: loss for step, loss in points.items() if loss is not None}
    best = min(points, key=points.get)
    lowest[title], last[title] = points[best], points[3000]
    losses = [line["loss"] for line in log]
    read[title] = [sum(losses[s - 100 : s]) / 100 for s in (best, 3000)]
    print(f"{title}  lowest {lowest[title]:.3f} at step {best}", end="  ")
    print(f"end {last[title]:.3f}  training loss", end=" ")
    print("{:.2f}, then {:.2f}".format(*read[title]))
    if title == "Qwen2":
        assert 1400 <= best <= 1800
        assert last[title] > points[best] + 0.05
        assert read[title][1] < read[title][0] - 0.3
assert lowest["Qwen2"] < lowest["GPT-2"] - 0.05
fall = [
    [x["held_out_loss"] for x in log if x["held_out_loss"] is not None][:7]
    for log in logs.values()
]
assert all(new < old for old, new in zip(*fall, strict=True))
assert abs(last["Qwen2"] - last["GPT-2"]) < 0.01

# %%
# These are two runs with one seed each, at one size, on a small text. They show that both programs learn, and that the
# last step need not be the best one. They do not show which architecture is better. The certain difference is the
# cache: with two key heads instead of four, it holds half as much.

held = {}
for title, trained in shipped.items():
    cache = GrowingCache(trained.config.n_layer)
    trained(torch.zeros(1, 8, dtype=torch.long), cache=cache)
    held[title] = cache.nbytes
assert held["GPT-2"] == 2 * held["Qwen2"]

# %%
# Both continue one text. They know the tone of documentation, not its content.

from lm_from_scratch.generation.generate import generate_text
from lm_from_scratch.generation.sampling import Sampler

prompt = "Return a list of"
for title, trained in shipped.items():
    sampler = Sampler(temperature=0.7)
    pieces = generate_text(trained, tokenizer, prompt, 40, sampler, seed=1)
    text = " ".join((prompt + "".join(pieces)).split())
    print(textwrap.fill(f"{title}: {text}", 70))

# %%
# Bug museum
# ----------
#
# Q1: the window that was not there
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The Qwen2 of ``transformers`` 4.42 knew the window in one of its three kinds of attention. The others printed a warning
# and computed full attention. Here the weights stay, and the window goes. (Where it was known, the wrong layers had it.
# That is Q3, on the next page.)


def with_windows(config, **changes):
    changed = Qwen2ForCausalLM(replace(config, **changes)).eval()
    changed.load_state_dict(slider.state_dict())
    return changed


none = dict(sliding_window=None, max_window_layers=None)
exhibits = {
    "right": with_windows(sliding),
    "Q1, ignored": with_windows(sliding, **none),
}
wrong = {}
slider_oracle = twin(slider)
for name, exhibit in exhibits.items():
    with record_attention(exhibit) as maps:
        long_row = exhibit(idx) - slider_oracle(idx).logits
    short_row = exhibit(idx[:, :4]) - slider_oracle(idx[:, :4]).logits
    wrong[name] = [x.abs().max().item() for x in (long_row, short_row)]
    keys = visible([layer[0] for layer in maps])
    print(f"{name:17} keys {keys!s:17}", end=" ")
    print("T = 12: {:.0e}   T = 4: {:.0e}".format(*wrong[name]))
assert wrong["right"][0] < 5e-5
assert wrong["Q1, ignored"][0] > 0.5
assert all(short < 5e-5 for _, short in wrong.values())

# %%
# With four tokens and a window of four both are right: a test of windows needs more tokens than the window has keys. The
# fixed line is ``visibility.within(window)`` above, for every kind of attention.
#
# Q30: minus infinity
# ~~~~~~~~~~~~~~~~~~~
#
# The same code took a ready mask from the caller and added it as it was. For hidden keys minus infinity looks right: the
# weight is exactly 0. But a padding token sees no key at all. Its softmax is 0 / 0, and its state becomes NaN.
#
# Does that matter, when nobody sees the padding? Watch the rows layer by layer.

spoilt = []
planted = plant(model, minus_infinity)
with record_hidden_states(planted) as states:
    planted(idx, positions=positions)
for depth, (state,) in enumerate(states[:-1]):
    bad = state.isnan().any(-1)  # (B, T)
    row = [int(part.sum()) for part in (bad[0, :5], bad[0, 5:], bad[1])]
    spoilt.append(row)
    print(f"after {depth} layers: NaN in {row[0]} of 5 pads", end=", ")
    print(f"{row[1]} of 7 tokens, {row[2]} of 12 in row 1")
assert spoilt == [[0, 0, 0], [5, 0, 0], [5, 7, 0], [5, 7, 0], [5, 7, 0]]

# %%
# After one layer every real token is fine. In the second layer it gives the padding a weight of 0, and 0 times NaN is
# NaN. So a batch without padding does not show the mistake, and neither does a model with a single layer.
#
# The fixed line replaces a hidden score with the most negative *finite* number, and makes the weights of hidden keys
# 0 afterwards. A query without keys then gets the value 0.

from lm_from_scratch.attention.attention import attention_weights

print("hidden =" + inspect.getsource(attention_weights).split("hidden =")[1])
with record_attention(model) as maps:
    fine = model(idx, positions=positions)
assert not fine.isnan().any()
assert maps[0][0][0, :, :5].abs().max() == 0.0

# %%
# Which sentence is false?
# ------------------------
#
# 1. Adding 7 to all positions of a row does not change the logits of a Qwen2.
# 2. With one new token for each row no mask is needed, because nothing comes after it.
# 3. A checkpoint of Qwen2 holds no tensor for its positions.
# 4. In a model of 4 layers, ``max_window_layers=3`` makes one layer slide.


def no_mask_for_one(q, k, v, visibility, dropout=0.0):
    if q.shape[2] > 1:
        return sdpa_attention(q, k, v, visibility)
    k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    return F.scaled_dot_product_attention(q, k, v)


def last_step(model):
    cache = GrowingCache(4)
    model(idx[:, :11], positions=positions[:, :11], cache=cache)
    return model(idx[:, 11:], positions=positions[:, 11:], cache=cache)


places = torch.arange(12).expand(2, -1)
shift = (
    (model(idx, positions=places + 7) - model(idx, positions=places))
    .abs()
    .max()
)
step = last_step(plant(model, no_mask_for_one)) - last_step(model)
padded_row, full_row = step.abs().amax((1, 2)).tolist()
print(f"1. moved by {shift:.0e}")
print(f"2. padded row off by {padded_row:.0e}, full row by {full_row:.0e}")
print("3.", [name for name in model.state_dict() if "rotary" in name])
print("4.", replace(tiny, sliding_window=4, max_window_layers=3).windows)
assert shift < 2e-4
assert padded_row > 0.5 and full_row < 5e-5
assert not any("rotary" in name for name in model.state_dict())
assert replace(sliding, max_window_layers=3).windows == [None] * 3 + [4]

# %%
# The second sentence is false: what must be hidden from the one new token is the padding before it.
#
# Exercises
# ---------
#
# 1. *Easy.* Count Qwen2-1.5B and Qwen2-7B on the meta device from ``SIZES``, by parts and by formula. Which share is the
#    embedding, and why does one of them have V times C parameters twice? Hint: look at what ``SIZES`` says about the
#    head. A right answer has two ways of counting that agree.
# 2. *Medium.* Plant a window of W + 1 keys (Q2) in the sliding model and run the three passes. Which of them see it, and
#    from which length on? Hint: ``visibility.within(5)`` inside an ``attend``, where the window is 4; ``expected`` and
#    ``expected_left`` must come from ``slider_oracle``. A right answer explains why a row of
#    4 tokens cannot show it, and a row of 5 can.
# 3. *Medium.* Turn a model with 6 key heads into one with 2: average the rows of ``k_proj`` and ``v_proj`` over each
#    group of three heads. Hint: ``weight.view(2, 3, D, C).mean(1)``. A right answer leaves the logits as they were if the
#    three heads of every group are equal, and shows how much they move if not.
# 4. *Hard.* A layer that slides never looks back further than W keys, and yet ``GrowingCache`` keeps all of them. Write
#    a layer cache that keeps the latest W - 1 and the new ones. Hint: the visibility of such a layer must lose the same
#    columns. A right answer gives the logits of the pieces 5, 1, 3, 3 to 5e-5, and its bytes stop growing.
#
# Summary
# -------
#
# * Qwen2 is GPT-2's skeleton with other parts. Rotation saves the position table, and two key heads for twelve save most
#   of two matrices in each layer. A gated MLP with :math:`I = \tfrac{8}{3} C` has as many weights as GPT-2's.
# * The package's file equals ``transformers`` to 5e-5, absolute plus relative, in logits, loss, gradients, hidden states
#   and attention weights, padded, in pieces, with windows, tied and untied.
# * The last of L + 1 hidden states is after the final norm. Layers with index ``max_window_layers`` and above slide.
# * A full pass was blind to four of six planted mistakes; a left-padded pass and one in pieces found all six.
# * At equal tokens and operations, the shipped Qwen2 was more than 0.05 nats below GPT-2 at its best step, and within
#   0.01 of it at the end, after overfitting.
# * Qwen2-0.5B has 494,032,768 parameters, 27.6 % of them in the embedding. A token of its cache takes 12,288 bytes in
#   bfloat16, a seventh of what 14 key heads would take.
#
# Everything here followed one convention out of several: which features make a pair, what a window counts, where the
# padding stands. The next page puts the conventions of the libraries side by side.
#
# Sources
# -------
#
# * Yang et al.: `Qwen2 Technical Report <https://arxiv.org/abs/2407.10671>`_, 2024.
# * The published model: `Qwen2-0.5B on the hub <https://huggingface.co/Qwen/Qwen2-0.5B>`_, whose ``config.json`` is quoted above.
# * Ainslie et al.: `GQA <https://arxiv.org/abs/2305.13245>`_, 2023. Key heads shared by groups, and how to make them from a trained model.
# * Shazeer: `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_, 2020. The gated MLP, and the factor 8/3 that keeps its size.
# * Chen et al.: `Training Deep Nets with Sublinear Memory Cost <https://arxiv.org/abs/1604.06174>`_, 2016. Checkpointing.

import platform

import lm_from_scratch

temporary.cleanup()
print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
