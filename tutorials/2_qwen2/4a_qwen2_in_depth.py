r"""
Qwen2 in depth
==============

How do you know that your Qwen2 is the published one? "It prints sensible text" is no answer: a model with a wrong mask
prints sensible text, too. This page deepens `from GPT-2 to Qwen2 in five changes <4_qwen2.ipynb>`_. It compares the
package's model with ``transformers``, measures which tests find which mistakes, asks what the biases and the residual
stream do, and counts what Qwen2-0.5B costs.

Equal to transformers
---------------------

The comparison needs a model in which a mistake cannot hide: weights with standard deviation 0.25, two rows that differ,
six query heads on two key heads, and odd lengths. The package writes the model to a folder, and ``transformers`` loads
the folder. The left-padded batch has five pads in row 0, and the pieces have 5, 1, 3 and 3 tokens and share a cache.
"""

# sphinx_gallery_museum = ["Q27", "Q29"]
# sphinx_gallery_words = ["compare with transformers", "logits do not match", "wrong output", "gibberish after loading", "enable_gqa", "multi-query attention", "q_proj", "k_proj", "qkv bias", "memory usage", "logits memory", "num_logits_to_keep", "parameter count", "FLOPs", "residual stream grows", "vanishing gradients"]
# sphinx_gallery_thumbnail_number = 2

import copy
import inspect
import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.checkpoint.weights import load_shipped, save_pretrained
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.instruments.record import record_hidden_states
from lm_from_scratch.models.qwen2 import SIZES, Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.models.randomize import randomize_
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss

torch.set_grad_enabled(False)
transformers.utils.logging.disable_progress_bar()
tiny = Qwen2Config(
    vocab_size=97, n_layer=4, n_head=6, n_kv_head=2, n_embd=48,
    intermediate_size=113, rms_norm_eps=1e-5, rope_theta=10000.0,
    eos_token_id=None,
)  # fmt: skip
idx = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(1))
attention_mask = torch.ones_like(idx)
attention_mask[0, :5] = 0
positions = positions_from_mask(attention_mask)
real = attention_mask.bool()
padded = dict(
    attention_mask=attention_mask, position_ids=positions.clamp(min=0)
)


def random_model(config):
    model = Qwen2ForCausalLM(config).eval()
    randomize_(model)
    return model


def in_transformers(model):
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder)
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype="auto"
        )


def in_pieces(model, sizes=(5, 1, 3, 3)):
    cache = GrowingCache(model.config.n_layer)
    return torch.cat([model(x, cache=cache) for x in idx.split(sizes, 1)], 1)


def pairs(model):
    oracle = in_transformers(model)
    with torch.enable_grad():
        expected, logits = oracle(idx, labels=idx), model(idx)
        loss = causal_lm_loss(logits, next_token_targets(idx))
        loss.backward()
        expected.loss.backward()
    yield "logits", logits, expected.logits
    yield "loss", loss, expected.loss
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in oracle.named_parameters():
        yield "gradients", gradients[name], parameter.grad
    left = oracle(idx, **padded).logits
    yield "left padding", model(idx, positions=positions)[real], left[real]
    yield "5 + 1 + 3 + 3", in_pieces(model), expected.logits
    last = model(idx, keep=slice(-1, None))  # one row of logits alone
    yield "the last one", last, expected.logits[:, -1:]


sliding = replace(tiny, sliding_window=4, max_window_layers=2)
variants = dict(
    tied=tiny,
    untied=replace(tiny, tie_word_embeddings=False),
    sliding=sliding,
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
# Everything agrees within 5e-5, absolute plus relative. In bfloat16 two right programs differ more, because they round
# at different places; compare each of them with float32 on the same rounded weights.
#
# One thing to know when you compare block by block: ``transformers`` returns L + 1 hidden states, and the last of them
# has been through the final norm. The raw result of the last block is missing (bug museum: Q29).

model = random_model(tiny)
oracle = in_transformers(model)
with record_hidden_states(model) as states:
    logits = model(idx)
theirs = oracle(idx, output_hidden_states=True).hidden_states
names = ["embeddings", *(f"block {n}" for n in range(4)), "final norm"]
equal = []
for name, (ours,) in zip(names, states, strict=True):
    close = [torch.allclose(h, ours, atol=1e-4, rtol=1e-4) for h in theirs]
    equal.append([j for j in range(len(theirs)) if close[j]])
    print(f"ours, {name:10} = theirs {equal[-1]}")
assert equal == [[0], [1], [2], [3], [], [4]]

# %%
# Three passes, six mistakes
# --------------------------
#
# Which of these tests does a model need? We plant six mistakes in copies of the tiny model, and look for each with three
# passes: a full one, a left-padded one, and one in pieces. The first three mistakes concern the mask or the position of
# a token. The last three change the arithmetic.

from lm_from_scratch.attention.gqa import repeat_kv
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.layers.gated_mlp import GatedMLP
from lm_from_scratch.layers.norm import RMSNorm


def first_triangle(q, k, v, visibility, dropout=0.0):
    k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def visible_padding(q, k, v, visibility, dropout=0.0):
    keys = visibility.key_positions.clamp(min=0)
    return sdpa_attention(q, k, v, replace(visibility, key_positions=keys))


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
        elif mistake is GatedMLP and isinstance(module, GatedMLP):
            gate, up = module.gate_proj, module.up_proj
            module.gate_proj, module.up_proj = up, gate
        elif inspect.isfunction(mistake) and hasattr(module, "attend"):
            module.attend = sdpa_attention if mistake is restart else mistake
    return model


mistakes = {
    "no mistake": sdpa_attention,
    "triangle from the first key": first_triangle,
    "padding is visible": visible_padding,
    "positions restart": restart,
    "key heads tiled": tiled_heads,
    "gate and up swapped": GatedMLP,
    "epsilon outside the root": EpsilonOutside,
}
expected, expected_left = oracle(idx).logits, oracle(idx, **padded).logits


def three_passes(model):
    left = (model(idx, positions=positions) - expected_left)[real]
    found = model(idx) - expected, left, in_pieces(model) - expected
    return [error.abs().max().item() for error in found]


seen = []
print(f"{'':28}{'full':>8}{'left':>8}{'pieces':>8}")
for name, mistake in mistakes.items():
    found = three_passes(plant(model, mistake))
    print(f"{name:28}", *(f"{error:7.1e}" for error in found))
    caught = [not error < 5e-5 for error in found]  # NaN is caught, too
    seen.append("".join(mark for mark, yes in zip("FLP", caught) if yes))
assert seen == ["", "LP", "L", "P", "FLP", "FLP", "FLP"]
assert max(three_passes(plant(model, EpsilonOutside))) < 1e-2

# %%
# The full pass is blind to the first three: it has no cache and no padding. The padded pass and the pieces together find
# all six. The last mistake needs a tight tolerance as well: with 1e-2 it passes everywhere.
#
# Gate and up have the same shape and, before training, the same distribution. A loader that swaps them raises no error.
# The *order* of the inner features, on the other hand, means nothing: permute all three matrices alike, and the result
# stays the same.
#
# Biases on three maps
# --------------------
#
# In a Qwen2 block, the maps to queries, keys and values have a bias, and no other map has one. What can these biases do?
#
# The weights of a query sum to 1, so a constant that is added to every value moves every output by the same vector. The
# bias b of the keys adds :math:`q_t \cdot b` to every score of query t, and softmax ignores what all scores of a row
# share. So without rotation a key bias does nothing at all. A rotation turns b by a different angle at each key, and
# then the bias matters.

from lm_from_scratch.cache.interface import NO_CACHE

x = torch.randn(2, 11, 48, generator=torch.Generator().manual_seed(1))
attention, rotary = model.model.layers[0].self_attn, model.model.rotary_emb
visibility = NO_CACHE.see(x)[0]
turned = rotary(visibility.query_positions, x.dtype)
still = torch.ones_like(turned[0]), torch.zeros_like(turned[1])


def effect(part, rotation):
    changed = copy.deepcopy(attention)
    getattr(changed, f"{part}_proj").bias += 1.0
    before = attention(x, rotation, visibility, NO_CACHE)
    return changed(x, rotation, visibility, NO_CACHE) - before


print("bias + 1     unrotated     rotated    spread over tokens")
for part in "qkv":
    plain, rotated = effect(part, still), effect(part, turned)
    spread = (rotated - rotated[:1, :1]).abs().max()
    sizes = [f"{e.abs().max():11.0e}" for e in (plain, rotated)]
    print(f"{part:10}", *sizes, f"{spread:17.0e}")
    assert (plain.abs().max() < 5e-5) == (part == "k")
    assert rotated.abs().max() > 0.1
    assert (spread < 5e-5) == (part == "v")

# %%
# GPT-2 has a key bias too, but rotates nothing, so its key bias has no effect.
#
# The residual stream
# -------------------
#
# A norm comes before attention and before the MLP, and their results are added to the state. No norm is on the path from
# the embedding to the last block, so nothing scales the state back. Let the shipped Qwen2 read four texts of 128 tokens.

from lm_from_scratch.text.corpora import load_corpus

trained, tokenizer = load_shipped("qwen2-docs")
texts = [tokenizer.start(d.text)[:128] for d in load_corpus("reference")]
texts = [ids for ids in texts if len(ids) == 128][:4]
with record_hidden_states(trained) as states:
    trained(torch.tensor(texts))
stream = torch.stack([state[0] for state in states[:-1]])  # (L + 1, B, T, C)
size = stream.square().mean(-1).sqrt()  # (L + 1, B, T)
first, later = size[:, :, 0].mean(1), size[:, :, 1:].mean((1, 2))

fig, (ax,) = figure(4.8, 3.2)
ax.plot(first, "s:", label="start token")
ax.plot(later, "o-", label="later tokens")
ax.set(xlabel="blocks", ylabel="root mean square", yscale="log")
ax.set_title("The state grows from block to block")
ax.legend(frameon=False)
plt.show()
assert later[-1] > 60 * later[0] and later[1] > 10 * later[0]
assert first[-1] > 6 * later[-1]

# %%
# The state of the later tokens grows more than sixtyfold, more than tenfold in block 0 alone. The state of the start
# token ends more than six times as large as theirs. That is why one more norm comes before the head.
#
# Where the parameters are
# ------------------------
#
# On the ``meta`` device tensors have shapes but no numbers, so a published model can be counted without its weights.

from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel

PARTS = dict(
    wte="embedding", embed_tokens="embedding", lm_head="head",
    wpe="positions", attn="attention", self_attn="attention", mlp="MLP",
)  # fmt: skip


def count(model):
    counts = Counter()
    for name, parameter in model.named_parameters():
        part = next((PARTS[p] for p in name.split(".") if p in PARTS), "norms")
        counts[part] += parameter.numel()
    return counts


config = Qwen2Config()  # of Qwen2-0.5B
with torch.device("meta"):
    old = count(GPT2LMHeadModel(GPT2Config()))
    qwen = Qwen2ForCausalLM(config).eval()
counts = count(qwen)
V, C, I, L = config.vocab_size, config.n_embd, config.intermediate_size, 24
H, Hkv, D = config.n_head, config.n_kv_head, config.head_dim
in_attention = 2 * C * H * D + 2 * C * Hkv * D  # q and o, k and v
assert counts["embedding"] == V * C == 136_134_656
assert counts["attention"] == L * (in_attention + H * D + 2 * Hkv * D)
assert counts["MLP"] == L * 3 * C * I
assert counts["norms"] == (2 * L + 1) * C
assert counts.total() == 494_032_768
assert old.total() == 124_439_808

hatches = dict(embedding="", positions="//", attention="..", MLP="xx")
fig, (ax,) = figure(4.8, 2.6)
for row, (name, c) in enumerate({"GPT-2": old, "Qwen2-0.5B": counts}.items()):
    start = 0.0
    for (part, hatch), colour in zip(hatches.items(), COLOURS):
        width = 100 * c[part] / c.total()
        look = dict(color=colour, edgecolor="none", hatch=hatch)
        ax.barh(name, width, left=start, label=part if row else None, **look)
        start += width
ax.invert_yaxis()
ax.grid(False)
ax.set(xlabel="percent", xlim=(0, 100), title="Where the parameters are")
fig.legend(loc="outside lower center", ncols=2, frameon=False)
plt.show()
assert 0.62 < counts["MLP"] / counts.total() < 2 / 3
assert counts["attention"] / counts.total() < 0.1
assert old["attention"] / old.total() > 0.2
for numbers in SIZES.values():
    assert 5.2 < numbers["intermediate_size"] / numbers["n_embd"] < 5.9

# %%
# Almost two thirds are in the MLP, because the published models are wide: I is more than 5 C, about twice what GPT-2's
# cost would allow. Attention has less than a tenth; in GPT-2 it has more than a fifth.
#
# What it costs to run
# ~~~~~~~~~~~~~~~~~~~~
#
# Each token adds :math:`2 L H_{kv} D` numbers to the cache, and is multiplied with every matrix once. (The embedding
# counts, because it is the head.) With T tokens, scores and averages cost another :math:`2 T H D` multiply-adds a token
# and block. Torch's counter reports two operations for each multiply-add.

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
assert abs(matrices / counts.total() - 1) < 1e-3
cache = 2 * L * Hkv * D * 2  # bytes a token, in bfloat16
assert cache == 12_288
print(f"a token, matrices       {2 * matrices / 1e9:.3f} GFLOP")
print(f"  scores, T = {T}      {4 * L * T * H * D / 1e9:.3f} GFLOP")
print(f"weights, bfloat16       {2 * counts.total() / 2**30:.2f} GiB")
print(f"cache, 32,768 tokens    {32_768 * cache / 2**30:.2f} GiB")
print(f"  with a key head each  {32_768 * cache * H / Hkv / 2**30:.2f} GiB")
print(f"all logits, float32     {32_768 * V * 4 / 2**30:.2f} GiB")
print(f"the last logits alone   {V * 4 / 2**20:.2f} MiB")
print(f"training, float32       {16 * counts.total() / 2**30:.2f} GiB")

# %%
# Twice the number of parameters is a good estimate of the operations. With a key head for each query head, the cache of
# one such text would be larger than all weights.
#
# The largest tensor of a long prompt is the logits, if you compute all of them (bug museum: Q27). Generation needs one
# row, ``keep=slice(-1, None)``. Training needs weight, gradient and two moments of AdamW, 16 bytes for each parameter,
# and the activations besides.
#
# Two trained models
# ------------------
#
# The package ships a GPT-2 and a Qwen2 that were trained on the same text, for the same number of steps and tokens, with
# the same tokenizer and schedule. Each folder has a record of its training.

from lm_from_scratch import pretrained

records, logs = {}, {}
for name in ("gpt2-docs", "qwen2-docs"):
    folder = Path(pretrained.__file__).parent / name
    records[name] = json.loads((folder / "record.json").read_text())
    lines = (folder / "log.jsonl").read_text().splitlines()
    logs[name] = [json.loads(line) for line in lines]
one, two = (record["arguments"] for record in records.values())
for key in ("corpus", "held_out", "vocab_size", "batch_size", "steps", "lr"):
    assert one[key] == two[key]

seen = {}
fig, (ax,) = figure(4.8, 3.2)
for (name, log), style in zip(logs.items(), ("o-", "s--")):
    points = {line["step"]: line["held_out_loss"] for line in log}
    seen[name] = {s: loss for s, loss in points.items() if loss is not None}
    ax.plot(seen[name].keys(), seen[name].values(), style, label=name)
ax.set(title="Held-out loss", xlabel="step", ylabel="nats per token")
ax.legend(frameon=False)
plt.show()
ours, theirs = seen["qwen2-docs"], seen["gpt2-docs"]
assert all(ours[step] < loss for step, loss in theirs.items())
assert ours[2650] < theirs[2650] - 0.03
gpt2, _ = load_shipped("gpt2-docs")
assert operations_per_token(gpt2, 256) == operations_per_token(trained, 256)

# %%
# A token costs exactly the same number of operations in both. The loss of Qwen2 falls faster and stays lower at every
# step that was measured. With one seed each, at one size, on a small text, this does not show which architecture is
# better. One difference is certain: with two key heads instead of four, the cache holds half as much.
#
# Bug museum
# ----------
#
# The window that was not there
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The Qwen2 of ``transformers`` 4.42 knew the window in one of its three kinds of attention. The other two printed a
# warning and computed full attention. Here we keep the weights and leave out the window. (Where the window was known,
# the wrong blocks had it: that is Q3, in `conventions <4b_conventions.ipynb>`_.) (Q1)

slider = random_model(sliding)
ignored = Qwen2ForCausalLM(
    replace(sliding, sliding_window=None, max_window_layers=None)
).eval()
ignored.load_state_dict(slider.state_dict())
slider_oracle = in_transformers(slider)
error = {}
for name, exhibit in {"right": slider, "window ignored": ignored}.items():
    for T in (4, 12):
        change = exhibit(idx[:, :T]) - slider_oracle(idx[:, :T]).logits
        error[name, T] = change.abs().max().item()
    print(f"{name:15} T = 4: {error[name, 4]:.0e}", end="   ")
    print(f"T = 12: {error[name, 12]:.0e}")
assert error["right", 12] < 5e-5 < 0.5 < error["window ignored", 12]
assert error["window ignored", 4] < 5e-5

# %%
# With four tokens and a window of four both models are right: a test of windows needs more tokens than the window has
# keys.
#
# Key heads in tiles
# ~~~~~~~~~~~~~~~~~~
#
# One wrong word, ``repeat`` for ``repeat_interleave``, and query heads read the key heads of another group (M4). Every
# shape fits. axlearn had this mistake and `fixed it <https://github.com/apple/axlearn/pull/842>`_, as did
# `jax-js <https://github.com/ekzhang/jax-js/pull/180>`_, and
# `a pull request of 2025 <https://github.com/onnx/onnx/pull/7274>`_ replaces tiles in ONNX's definition of attention.

heads = torch.arange(2).view(1, 2, 1, 1)  # (B, Hkv, S, D)
print("right", repeat_kv(heads, 6).flatten().tolist())
print("tiled", heads.repeat(1, 3, 1, 1).flatten().tolist())
print("Hkv   largest error of a logit")
for n_kv_head in (1, 2, 3, 6):
    grouped = random_model(replace(tiny, n_kv_head=n_kv_head))
    change = plant(grouped, tiled_heads)(idx) - grouped(idx)
    print(f"{n_kv_head:3} {change.abs().max():12.1f}")
    assert (change.abs().max() > 0.5) == (n_kv_head in (2, 3))

# %%
# With one key head, or with as many key heads as query heads, the mistake is no mistake. A test must use 1 < Hkv < H. In
# the shipped model the text becomes worse, not broken: `the lesson <3_swiglu.ipynb>`_ shows it.
#
# Exercises
# ---------
#
# 1. *Easy.* By the argument of this page, the key biases of GPT-2 have no effect. Set them to zero in the model of
#    ``load_shipped()``. A good answer shows logits equal to 1e-4, and the same experiment on
#    ``load_shipped("qwen2-docs")`` with logits that move. Hint: ``c_attn`` holds queries, keys and values side by side.
# 2. *Medium.* Plant a window of W + 1 keys (Q2) in the sliding model and run the three passes. Which of them see it, and
#    from which length on? Hint: ``visibility.within(5)`` inside an ``attend``, where the window is 4; ``expected`` and
#    ``expected_left`` must come from ``slider_oracle``. A good answer explains why a row of 4 tokens cannot show it.
# 3. *Medium.* Turn a model with 6 key heads into one with 2: average the rows of ``k_proj`` and ``v_proj`` over each
#    group of three heads. Hint: ``weight.view(2, 3, D, C).mean(1)``. A good answer leaves the logits as they were if the
#    three heads of every group are equal, and shows how much they move if not.
#
# Summary
# -------
#
# * The package's file equals ``transformers`` to 5e-5, in logits, loss and gradients, padded, in pieces, and with
#   windows. A full pass alone was blind to three of six planted mistakes.
# * A value bias moves all outputs alike. A key bias does nothing without rotation.
# * In the trained model the state of later tokens grows more than sixtyfold from the embedding to the last block.
# * Qwen2-0.5B has 494,032,768 parameters, almost two thirds in its MLP. A token of its cache takes 12,288 bytes in
#   bfloat16, a seventh of what 14 key heads would take.
# * Tiled key heads are right for Hkv = 1 and Hkv = H. Test between these two.
#
# Sources
# -------
#
# * Yang et al.: `Qwen2 Technical Report <https://arxiv.org/abs/2407.10671>`_, 2024.
# * The model of ``transformers``: `modeling_qwen2.py
#   <https://github.com/huggingface/transformers/blob/main/src/transformers/models/qwen2/modeling_qwen2.py>`_.
# * Ainslie et al.: `GQA <https://arxiv.org/abs/2305.13245>`_, 2023. Key heads shared by groups.
# * Shazeer: `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_, 2020. SwiGLU.
# * Xiong et al.: `On Layer Normalization in the Transformer Architecture <https://arxiv.org/abs/2002.04745>`_, 2020.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
