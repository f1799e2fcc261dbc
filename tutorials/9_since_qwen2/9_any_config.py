r"""
Read any config
===============

A model comes as weights, a tokenizer, and a ``config.json``: a page of keys and numbers. Here is the config of
Qwen3-Next, a model of 80 billion parameters. Each coloured group is an idea, and each idea has a lesson.
"""

# sphinx_gallery_needs = ["1_qwen3", "../5_caching/1_why_cache"]
# sphinx_gallery_words = ["config.json", "AutoConfig", "architecture", "Qwen3-Next", "DeepSeek-V3", "gpt-oss", "SmolLM3", "active parameters", "A3B", "num_experts_per_tok", "kv_lora_rank", "layer_types", "no_rope_layers", "what do the fields of a config mean", "read a model card", "compare architectures", "which layers does a model have", "Qwen vs Llama", "head_dim", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "meaning of config fields", "number of parameters from a config", "memory of a model from its config", "which models use MLA", "which models use MoE", "model zoo", "size of a model", "total parameters", "understand an architecture", "Kimi", "MiniMax", "GLM", "Gemma"]
# sphinx_gallery_thumbnail_number = 1

import matplotlib.pyplot as plt

from lm_from_scratch.checkpoint.cache_sizes import cached_numbers, states
from lm_from_scratch.checkpoint.families import families
from lm_from_scratch.checkpoint.ideas import IDEAS, counts, describe
from lm_from_scratch.drawings.since_qwen2_models import (
    cache_sizes,
    config_lines,
)
from lm_from_scratch.instruments.plot import COLOURS, figure

config = families()["qwen3_next"].config
found = describe(config)
labels = {key: line.idea.label for line in found for key in line.keys}
labels["rms_norm_eps"] = ""  # since chapter 2, every model has it
labels |= {key: "Delta rule" for key in config if key.startswith("linear_")}
labels["moe_intermediate_size"] = "Experts"
flat = {"model_type": "", **config, "partial_rotary_factor": 0.25}
hidden = (
    "rope_parameters",
    "mlp_only_layers",
    "decoder_sparse_step",
    "norm_topk_prob",
)
config_lines({k: v for k, v in flat.items() if k not in hidden}, labels)

# %%
# Lines without a colour are sizes and switches that you know from Qwen2: ``hidden_size`` is C, ``vocab_size`` V,
# ``head_dim`` D. A config calls a block a *layer*. The numbers are the defaults of ``transformers``; they will turn out
# to give a model of the published size.
#
# From keys to ideas
# ------------------
#
# ``describe`` reads the config of any model. For each idea it shows what the config says about it, and which keys say so.

for line in found:
    print(f"{line.idea.label:25} {line.text:36} {', '.join(line.keys) or '-'}")

assert {line.name for line in found} >= {"delta", "experts", "gate", "qk_norm"}

# %%
# Look at the lines with a dash. We will come back to them.
#
# Which config belongs to which model?
# ------------------------------------
#
# Here are some lines of three configs. One belongs to DeepSeek-V3, one to gpt-oss-120b, and one to SmolLM3.

quiz = {"A": "gpt_oss", "B": "smollm3", "C": "deepseek_v3"}
telling = ("kv_lora_rank", "num_nextn_predict_layers", "no_rope_layers")
telling += ("sliding_window", "num_local_experts", "n_routed_experts")
for letter, name in quiz.items():
    numbers = dict(families()[name].config)
    if "no_rope_layers" in numbers:
        numbers["no_rope_layers"] = (
            str(numbers["no_rope_layers"][:8])[:-1] + ", ..."
        )
    print(
        letter,
        *(f"   {key}: {numbers[key]}" for key in telling if key in numbers),
        sep="\n",
    )

# %%
# **Predict first.** Which is which?
#
# * A is DeepSeek-V3, B is gpt-oss, C is SmolLM3
# * A is gpt-oss, B is SmolLM3, C is DeepSeek-V3
# * A is SmolLM3, B is DeepSeek-V3, C is gpt-oss

for letter, name in quiz.items():
    ideas = [line.idea.label for line in describe({"model_type": name})]
    print(f"{letter} is {name}: {', '.join(ideas)}")

latent, sinks = (
    describe({"model_type": "deepseek_v3"}),
    describe({"model_type": "gpt_oss"}),
)
assert "latent" in {line.name for line in latent} and "sinks" in {
    line.name for line in sinks
}
assert "unrotated" in {
    line.name for line in describe({"model_type": "smollm3"})
}
assert set(families()["smollm3"].config["no_rope_layers"][3::4]) == {0}
assert "sinks" in families()["gpt_oss"].code

# %%
# A is gpt-oss, with a window of 128 tokens and 128 experts. B is SmolLM3: every fourth layer does not rotate. C is
# DeepSeek-V3, with a latent, and a layer that predicts one more token.
#
# The sinks of gpt-oss have no key at all.
#
# How many parameters?
# --------------------
#
# A config should be enough to count them. A layer has two norms, experts, and either attention or the delta rule.

C, E, I = (
    config["hidden_size"],
    config["num_experts"],
    config["moe_intermediate_size"],
)
H, Hkv, D = (
    config["num_attention_heads"],
    config["num_key_value_heads"],
    config["head_dim"],
)
few, V = config["num_experts_per_tok"], config["vocab_size"]

expert = 3 * C * I  # gate, up and down
shared = 3 * C * config["shared_expert_intermediate_size"]
attention = H * D * C + 2 * Hkv * D * C + H * D * C  # q; k and v; output

Hk, Hv = config["linear_num_key_heads"], config["linear_num_value_heads"]
keys = Hk * config["linear_key_head_dim"]
values = Hv * config["linear_value_head_dim"]
conv = (2 * keys + values) * config["linear_conv_kernel_dim"]
delta = (2 * keys + values) * C + conv + values * C  # q, k, v; output

# %%

full = config["layer_types"].count("full_attention")
layers = config["num_hidden_layers"]
block = 2 * C + E * C + E * expert + shared  # norms, router, experts
total = (
    2 * V * C + C + layers * block + full * attention + (layers - full) * delta
)
true = families()["qwen3_next"].parameters  # counted on the meta device
print(
    f"from the config {total:,}\nof the model    {true:,}\nmissing         {true - total:,}"
)

assert true == 79_674_391_296
assert (full, layers, Hkv) == (12, 48, 2)

# %%
# **Predict first.** Our count is 0.5 % too small. What did we forget?
#
# * Biases
# * Weights that no key of the config mentions
# * The parameters of softmax

silent = {
    "gate of attention": full * H * D * C,  # q_proj is twice as wide
    "QK-norm": full * 2 * D,
    "gate of the delta rule": (layers - full) * values * C,
    "decay and writing strength": (layers - full) * (2 * Hv * C + 2 * Hv),
    "norm of its heads": (layers - full) * config["linear_value_head_dim"],
    "gate of the shared expert": layers * C,
}
for name, count in silent.items():
    print(f"{name:27} {count:>12,}")
assert total + sum(silent.values()) == true
assert 0.004 < (true - total) / true < 0.006

# %%
# Weights that no key mentions: three gates, two kinds of norm, and the weights that decide how much the delta rule forgets
# and writes. Add them, and the count is exact.
#
# This is the limit of a config. **It holds what can change between the sizes of a family. What all sizes share is in the
# code.** Qwen3 has no key for its QK-norm, and gpt-oss has none for its sinks. So ``describe`` looks up the families that
# it knows: this is where the lines with a dash come from. About an unknown family it can tell you only what the keys say.
#
# How many are active?
# --------------------
#
# In each layer a token meets 10 of the 512 experts, and the shared one. The rest cost memory, but no time.

active = true - layers * (E - few) * expert
print(
    f"{true / 1e9:.1f} billion in memory, {active / 1e9:.1f} billion for a token"
)
assert round(active / 1e9, 1) == 3.9 and round(2 * V * C / 1e9, 1) == 0.6

# %%
# The published name says *80B-A3B*: 80 billion parameters, about 3 billion of them active. (Our 3.9 billion include 0.6
# billion for embedding and head, which many counts leave out; 3.3 billion remain.)
#
# What does a long text cost?
# ---------------------------
#
# The other number to read off a config is the memory of the cache. In each layer, keys and values take 2 Hkv D numbers a
# token; a latent takes its rank plus the rotated features; a window stops growing; the delta rule keeps a state.
#
# **Predict first.** Which of these needs the least memory for 32,768 tokens?
#
# * Llama, with 32 layers and 6.7 billion parameters
# * DeepSeek-V3, with 61 layers and 671 billion
# * Qwen3-Next, with 48 layers and 80 billion

T, names = 32_768, ("llama", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next")
numbers = {name: families()[name].config for name in names}
memory = {
    name: (2 * cached_numbers(one, T), 2 * states(one))  # two bytes each
    for name, one in numbers.items()
}
assert min(memory, key=lambda name: sum(memory[name])) == "qwen3_next"
assert sum(memory["llama"]) / sum(memory["qwen3_next"]) > 15
assert sum(memory["deepseek_v3"]) < sum(memory["mixtral"])
assert (
    min(families()[name].parameters for name in names)
    == families()["llama"].parameters
)
cache_sizes(memory, T)

# %%
# Qwen3-Next: only twelve of its 48 layers have a cache, with two key heads. The other 36 keep no more than the orange end
# of its bar.
#
# Llama, the smallest model here, needs the most memory, because its 32 heads share nothing.
#
# Which families use an idea?
# ---------------------------
#
# Read the default config of every decoder family in ``transformers`` in the same way:

number = counts()
new = [
    name for name in IDEAS if IDEAS[name].page.startswith("9_") and number[name]
]
new.sort(key=lambda name: number[name])
fig, (ax,) = figure(4.6, 5.8)
ax.barh(
    [IDEAS[name].label for name in new],
    [number[name] for name in new],
    color=COLOURS[0],
)
ax.set(title="Families that use an idea", xlabel=f"of {len(families())}")
plt.show()
assert (
    number["experts"] > number["qk_norm"] > number["latent"] > number["delta"]
)
assert number["experts"] > len(families()) / 3

# %%
# These are families, not models in use: an old family counts as much as this year's. But experts and QK-norm are clearly
# what you will meet first in today's models. On the site, *Which model uses what*, below "Look up", lists every family.
#
# The shortest bars are the newest ideas. The next lessons are about three of them: `several residual streams
# <10_residual_streams.ipynb>`_, `keys shared across layers <11_shared_keys.ipynb>`_ and a `cache that compresses
# <12_compressed_cache.ipynb>`_. Two ideas have no lesson, and both are in Inkling 2. Its small model runs some layers
# *again*: the same weights three times, each time with keys of its own. And in place of a rotation it has a *bias by
# distance*: each token computes a number for every head and distance, which is added to the score.
#
# For a model on your disk, ``python -m lm_from_scratch describe FOLDER`` prints the list, and what its cache takes. It reads
# only the config, so it also describes models that this package cannot load.
#
# Exercises
# ---------
#
# 1. *Easy.* Describe ``{"model_type": "gemma3_text"}``. Which of its ideas have no key?
# 2. *Medium.* Count the parameters of ``mixtral`` from its config. Does it have weights that no key mentions?
# 3. *Hard.* At how many tokens does the cache of Qwen3-Next become larger than its states?
#
# Summary
# -------
#
# * A key of a config names an idea; the sizes beside it give parameters, active parameters and bytes of the cache.
# * What all models of a family share has no key. To find it, read the code or count the weights.
# * Experts and QK-norm are the most common changes since Qwen2.
