r"""
Read a model of the year
========================

gpt-oss is a model that many people run at home. Here is its architecture with the weights of our small Qwen2 inside. It
reads our text worse than Qwen2 does: these weights were trained for another model. So we undo what is new in gpt-oss, one
change after the other, and watch the loss. After the fourth, exactly Qwen2 is left.
"""

# sphinx_gallery_needs = ["9_any_config", "4_sinks_and_gates", "6_delta_rule", "2_mixture_of_experts"]
# sphinx_gallery_words = ["gpt-oss", "Gemma 3", "Qwen3.5", "DeepSeek-V4", "gpt-oss architecture", "Gemma 3 architecture", "gpt-oss vs Qwen", "model architectures compared", "what is new in gpt-oss", "clamped SwiGLU", "swiglu_limit", "query_pre_attn_scalar", "post norm", "sandwich norm", "zero-centered RMSNorm", "embedding scale", "normalizer", "latest LLM architecture", "LLM architecture comparison 2026"]
# sphinx_gallery_thumbnail_number = 1

import matplotlib.pyplot as plt
import torch
from torch import nn

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.cache_sizes import cached_numbers, states
from lm_from_scratch.checkpoint.families import families
from lm_from_scratch.checkpoint.ideas import IDEAS, describe
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.layers.gated_mlp import swiglu
from lm_from_scratch.layers.norm import RMSNorm
from lm_from_scratch.layers.rope import RotaryEmbedding
from lm_from_scratch.models.gemma3 import Gemma3Config
from lm_from_scratch.models.gpt_oss import GptOssConfig
from lm_from_scratch.models.qwen2 import Qwen2Config
from lm_from_scratch.text.batches import pieces
from lm_from_scratch.text.corpora import reference, split
from lm_from_scratch.training.loss import causal_lm_loss

qwen2, tokenizer = load_shipped("qwen2-docs")
text = pieces(split(reference())[1], tokenizer, length=256, count=8)
C, L, D = qwen2.config.n_embd, qwen2.config.n_layer, qwen2.config.head_dim
shape = "n_layer n_head n_kv_head n_embd intermediate_size head_dim"
same = {name: getattr(qwen2.config, name) for name in shape.split()}
same |= dict(vocab_size=4096, qkv_bias=True, tie_word_embeddings=True)
same |= dict(rms_norm_eps=1e-6, rope_theta=1e4)
same |= dict(pad_token_id=None, bos_token_id=0, eos_token_id=0)


def loss(model):
    return causal_lm_loss(model(text.idx), text.targets).item()


# %%

torch.manual_seed(0)
gpt_oss = build(GptOssConfig(**same, sliding_window=32, n_expert=4, top_k=2))
gpt_oss.load_state_dict(qwen2.state_dict(), strict=False)  # where names fit
with torch.no_grad():  # each expert gets a copy of Qwen2's MLP
    for new, old in zip(gpt_oss.model.layers, qwen2.model.layers):
        gate, up, down = (weight.T for weight in old.mlp.parameters())
        experts = new.mlp.experts
        experts.gate_up_proj[:] = torch.stack([gate, up], -1).flatten(1)
        experts.down_proj[:] = down


@torch.no_grad()
def undo(model, changes):
    """The loss with all changes, and after each that is undone."""
    losses = {"all changes": loss(model)}
    for name, change in changes.items():
        for layer in model.model.layers:
            change(model.model, layer)
        losses[f"− {name}"] = loss(model)
    return losses


# %%


def no_clamps(_, layer):
    experts = layer.mlp.experts
    experts.alpha, experts.limit = 1.0, float("inf")
    experts.gate_up_proj_bias[:, 1::2] = -1.0  # for the 1 that is added


def no_windows(model, _):
    model.config = Qwen2Config(**same)  # every layer sees everything


def no_yarn(model, _):
    model.rotary_emb = RotaryEmbedding(D, theta=1e4)


def no_sinks(_, layer):
    layer.self_attn.sinks.fill_(-1e4)


steps = {"clamped SwiGLU": no_clamps, "windows": no_windows}
steps |= {"YaRN": no_yarn, "sinks": no_sinks}
losses = undo(gpt_oss, steps)


def draw(title, losses):
    _, (ax,) = figure(5.2, 0.3 * len(losses) + 1)
    names = [*losses][::-1]
    bars = ax.barh(names, [losses[n] for n in names], color=COLOURS[0])
    ax.bar_label(bars, fmt="%.2f", padding=3)
    ax.axvline(loss(qwen2), color=COLOURS[1])
    ax.set(title=title, xlabel="loss (the line: Qwen2)")
    ax.set_xlim(0, 1.15 * max(losses.values()))
    plt.show()


draw("gpt-oss, undone", losses)
assert abs(losses["− sinks"] - loss(qwen2)) < 1e-4
assert losses["all changes"] > loss(qwen2) + 0.4

# %%
# The last bar and the line are the same number. The clamped SwiGLU costs the most; sinks of about 0 cost nothing: one more
# key, with no value. So four things separate gpt-oss from Qwen2, and a fifth that costs
# nothing here: it has experts instead of an MLP. Ours are four copies of one MLP, so any two of them, with weights that
# sum to 1, give what the MLP gives.
#
# Why undo changes, and not make them? Because the last step proves something: a change that is missing from our list would
# still move the loss. (Unless it does nothing yet: gpt-oss has more biases than Qwen2, and in our copy they are 0.)
#
# Three of the changes you know: windows of 128 tokens in every other layer (32 in ours), `sinks
# <4_sinks_and_gates.ipynb>`_, and `YaRN <../2_qwen2/2a_longer_contexts.ipynb>`_, which turns the slow pairs 32 times more
# slowly, for texts 32 times as long. The clamp is new. An expert multiplies
#
# .. math::
#
#    (\bar u + 1) \cdot \bar g \, \sigma(1.702 \, \bar g),
#
# where the bars are clamps: the gate is at most 7, and up between -7 and 7. So no product can explode, and an expert whose
# up is 0 still passes its gate on. In the config these are the keys ``swiglu_limit`` and ``swiglu_alpha``. The 1 has no
# key.
#
# Gemma 3
# -------
#
# Google's Gemma 3 has no experts and no sinks. It changes the norms. Each layer normalises what it reads, as always, and
# *also what it adds*. A norm multiplies by 1 + w instead of w, so a weight of 0 means "leave it as it is". Embeddings are
# multiplied by the root of C. Queries and keys have norms, as in Qwen3. Five of six layers have a sliding window and a
# theta of 10,000; the sixth sees everything, with a theta of a million. And the gate of the MLP goes through a GELU.
#
# **Predict first.** We undo these six, one after the other. Does every step bring the loss nearer to Qwen2's?
#
# * Yes, each change disturbs weights that do not expect it
# * No, some changes need one another

most = Gemma3Config(**same | dict(rope_theta=1e6, query_pre_attn_scalar=D))
gemma = build(most)
gemma.load_state_dict(qwen2.state_dict(), strict=False)
with torch.no_grad():  # a name that means another place: before the MLP
    for new, old in zip(gemma.model.layers, qwen2.model.layers):
        norm = old.post_attention_layernorm.weight
        new.pre_feedforward_layernorm.weight.copy_(norm)
        new.post_attention_layernorm.weight.zero_()


def plain(norm):
    new = RMSNorm(C)
    new.weight = norm.weight
    return new


# %%


def no_centring(model, layer):
    for name in "input_layernorm", "pre_feedforward_layernorm":
        setattr(layer, name, plain(getattr(layer, name)))
    model.norm = plain(model.norm)


def no_root(model, _):
    rows = model.embed_tokens.weight
    model.embed_tokens = nn.Embedding(*rows.shape, _weight=rows)


def no_norms_after(_, layer):
    layer.post_attention_layernorm = nn.Identity()
    layer.post_feedforward_layernorm = nn.Identity()


def no_qk_norm(_, layer):
    layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()


# %%


def no_two_kinds(model, layer):
    no_windows(model, layer)
    both = {kind: RotaryEmbedding(D, theta=1e4) for kind in model.rotary_embs}
    model.rotary_embs = nn.ModuleDict(both)


def no_gelu(_, layer):
    layer.mlp.product = swiglu


steps = {"1 + w": no_centring, "root of C": no_root}
steps |= {"norms after": no_norms_after, "QK-norm": no_qk_norm}
steps |= {"two kinds of layer": no_two_kinds, "GELU": no_gelu}
losses = undo(gemma, steps)
draw("Gemma 3, undone", losses)
assert abs(losses["− GELU"] - loss(qwen2)) < 1e-4
assert losses["− root of C"] > losses["− 1 + w"] + 1
assert losses["− root of C"] > losses["− norms after"] + 2

# %%
# Without the root, the loss *rises*. A norm after a layer fixes the length of what the layer adds: with our weights, the
# root of C in every layer. Embeddings that are scaled up hold their own against it; those of Qwen2 are short, and the first
# layer drowns them out. The two changes belong together, and a model that adopts one of them needs the other.
#
# The scores have a key of their own: ``query_pre_attn_scalar``. In most sizes it is the width of a head, as everywhere;
# in the model of 27 billion it is 168, with heads of 128.
#
# Qwen3.5
# -------
#
# Here we cannot undo everything: three of four layers have no attention. They keep a state of fixed size, by the
# `delta rule <6_delta_rule.ipynb>`_, and Qwen2 has no weights for them. The fourth is attention with a
# `gate <4_sinks_and_gates.ipynb>`_ on its output and with QK-norm, and only a
# `quarter of its features turns <5_positions_today.ipynb>`_: the key ``partial_rotary_factor``. Norms multiply by 1 + w.
#
# Qwen3.5 also reads pictures. In a published ``config.json``, the language model is under ``text_config``. Each token has
# three positions, for time, height and width; in plain text they are equal, and rotation is as you know it.
#
# One table
# ---------
#
# ``describe`` (`Read any config <9_any_config.ipynb>`_) finds the ideas of each model. Here they are, beside Qwen2 and
# DeepSeek-V4.

models = {"qwen2": "Qwen2", "gpt_oss": "gpt-oss"}
models |= {"gemma3_text": "Gemma 3", "qwen3_5_text": "Qwen3.5"}
models |= {"deepseek_v4": "DeepSeek-V4"}
configs = {name: families()[name].config for name in models}
ideas = {n: {i.name for i in describe(c)} for n, c in configs.items()}
rows = [i for i in IDEAS if any(i in found for found in ideas.values())]
rows.sort(key=lambda i: sum(i in found for found in ideas.values()))

_, (ax,) = figure(6, 0.22 * len(rows) + 1)
for x, name in enumerate(models):
    has = [y for y, idea in enumerate(rows) if idea in ideas[name]]
    ax.scatter([x] * len(has), has, color=COLOURS[x % 5], s=45)
ax.set_yticks(range(len(rows)), [IDEAS[idea].label for idea in rows])
ax.set_xticks(range(len(models)), models.values(), rotation=25, ha="right")
ax.grid(alpha=0.3)
ax.set_title("Which model uses which idea")
plt.show()
counts = {name: len(found) for name, found in ideas.items()}
assert max(counts, key=counts.get) == "deepseek_v4"
assert counts["deepseek_v4"] >= 12 and counts["qwen2"] <= 3

# %%
# Every dot is explained in a lesson, and DeepSeek-V4 is the sum of this chapter: experts that are chosen without a softmax
# and balanced by a bias, sinks, windows, a clamp, `four residual streams <10_residual_streams.ipynb>`_, and a `cache that
# compresses <12_compressed_cache.ipynb>`_. Its first three layers do not even choose: the id of a token says which experts
# it meets.
#
# What does a long text cost?
# ---------------------------
#
# **Predict first.** 131,072 tokens, two bytes a number. Which cache is the smallest?
#
# * gpt-oss, with 117 billion parameters
# * Gemma 3, with 2.6 billion
# * Qwen3.5, with 9 billion
# * DeepSeek-V4, with 284 billion

T = 131_072
bytes_of = {
    name: 2 * (cached_numbers(config, T) + states(config))
    for name, config in configs.items()
}
for name, total in bytes_of.items():
    size = families()[name].parameters / 1e9
    print(f"{models[name]:12} {size:6.1f} billion  {total / 2**30:6.2f} GiB")
assert min(bytes_of, key=bytes_of.get) == "deepseek_v4"
assert bytes_of["qwen2"] > 10 * bytes_of["gpt_oss"]

# %%
# DeepSeek-V4, the largest. (The sizes are the defaults of ``transformers``; those of Qwen2 and Gemma 3 belong to no
# published model.) Each of the four saves memory in its own way: few heads for keys, windows, states, or blocks of keys
# pooled into one. `Keys shared across layers <11_shared_keys.ipynb>`_ are one more.
#
# To run one of them, give its folder to the commands: ``python -m lm_from_scratch generate --model FOLDER``. Each of the
# four is one file that you can now read: ``models/gpt_oss.py``, ``gemma3.py``, ``qwen3_5.py`` and ``deepseek_v4.py``. They
# are tested against ``transformers`` on small random models; we have not run published weights of this size.
#
# Exercises
# ---------
#
# 1. *Easy.* Undo the sinks of gpt-oss first. Which bars change, and which does not?
# 2. *Medium.* Undo Gemma's "root of C" last. Does every step help now?
# 3. *Hard.* Undo Qwen3.5. Replace the layers with a state by gated attention, whose ``q_proj`` has for each head D rows
#    of queries and then D of gates. What makes a gate let everything pass?
#
# Summary
# -------
#
# * gpt-oss is Qwen2 with sinks, windows, YaRN, experts and a clamp; Gemma 3 is Qwen2 with other norms, a scale, a GELU and
#   two kinds of layer; Qwen3.5 keeps states in three of four layers. Undo the first two, and exactly Qwen2 is left.
# * Changes come in groups: a norm after a layer needs longer embeddings.
# * What a long text costs depends on the kinds of layers, not on the number of parameters.
