r"""
Qwen3, Llama and Mistral in depth
=================================

Does ``from_pretrained`` read a Qwen3, a Llama and a Mistral as ``transformers`` does? What does it refuse, and what goes
wrong when queries are normalised? The idea is in the lesson `Qwen3 <1_qwen3.ipynb>`_.
"""

# sphinx_gallery_needs = ["1_qwen3"]
# sphinx_gallery_words = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "attention_bias", "mlp_bias", "model_type", "OLMo QK norm"]

import tempfile
from pathlib import Path

import torch

from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.models.randomize import randomize_

torch.set_grad_enabled(False)

# %%
# Equal to transformers
# ---------------------
#
# ``transformers`` makes a small model of each family, with weights large enough to show mistakes. This package reads its
# folder. Both models see the same tokens.

import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
sizes = dict(
    vocab_size=97,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
)
ids = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
differs = {
    "llama": {},
    "mistral": dict(sliding_window=4),
    "qwen3": dict(use_sliding_window=False),
}


def theirs(family):
    config = transformers.AutoConfig.for_model(
        family, **sizes, **ids, **differs[family]
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize_(model)
    return model


def read_back(model):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return from_pretrained(folder)


torch.manual_seed(0)
idx = torch.randint(3, 97, (2, 12))
pairs = {}
for family in differs:
    published = theirs(family)
    ours = read_back(published)
    pairs[family] = published, ours
    error = (published(idx).logits - ours(idx)).abs().max().item()
    windows = {str(window) for window in ours.config.windows}
    print(f"{family:8} {type(ours).__name__:18} windows {windows}", end=" ")
    print(f"largest difference {error:.0e}")
    assert error < 5e-5

# %%
# Llama and Mistral are read into the class ``Qwen2ForCausalLM``, without its biases. The tests do the same with 50
# configs drawn at random for each family: losses, gradients, padded batches, caches, packed rows, tied and untied heads,
# and every scaling of RoPE.
#
# A folder stays what it was
# --------------------------
#
# A Llama that was read, trained and saved is a Llama again: what this package knows goes back into the file under the
# names that its family uses, and what it does not know goes back as it was.

for family, (_, ours) in pairs.items():
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(ours, Path(folder) / "model")
        again = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model"
        )
    print(f"{family:8} comes back as {type(again).__name__}")
    assert again.config.model_type == family
    torch.testing.assert_close(again(idx).logits, ours(idx), atol=5e-5, rtol=0)

# %%
# What is refused
# ---------------
#
# Most keys of a ``config.json`` do not change what is computed, and pass. One that would is refused by name, because a
# model that is nearly right is worse than none.

from lm_from_scratch.checkpoint.configs import config_from_dict

for family, key, value in (
    ("llama", "is_causal", False),
    ("mistral", "final_logit_softcapping", 30.0),
    ("qwen3", "use_qk_norm", False),
):
    try:
        config_from_dict({"model_type": family, key: value})
    except ValueError as refused:
        print(f"{family}: {refused}")
    else:
        raise AssertionError(key)

# %%
# Where others put the norm
# -------------------------
#
# * *Per head*, before the rotation, one weight for all heads: Qwen3, Gemma 3 (whose weight is stored as a difference
#   from 1).
# * *Over all heads together*, before they are cut apart: OLMo 2 and 3. One loud head then makes all other heads quieter.
# * *After the rotation*, without a weight, so that the order does not matter: Llama 4 in its layers that rotate.
#
# Bug museum
# ----------
#
# Each mistake is put into the model above, and compared with ``transformers``.


published, model = pairs["qwen3"]
want = published(idx).logits
attentions = [block.self_attn for block in model.model.layers]


def largest_error():
    return (model(idx) - want).abs().max().item()


right = largest_error()
assert right < 5e-5

# %%
# The keys were forgotten
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# Queries are normalised, keys are not (M44). Scores can still grow with the keys. Training runs, and looks calmer than
# without both norms. Loaded weights give other logits.

from torch import nn

kept = [a.k_norm for a in attentions]
for a in attentions:
    a.k_norm = nn.Identity()
wrong = largest_error()
for a, norm in zip(attentions, kept):
    a.k_norm = norm
print(f"right: {right:.0e}, keys left out: {wrong:.2f}")
assert wrong > 0.1 and largest_error() == right

# %%
# Normalised after the rotation
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# With weights of 1, as in a fresh model, the order does not matter (M45). So a test with a fresh model passes, and
# trained weights show the mistake. In torchtune a user `found it by its logits
# <https://github.com/meta-pytorch/torchtune/issues/2809>`_.

from lm_from_scratch.layers.norm import rms_norm
from lm_from_scratch.layers.rope import apply_rope

norms = [(a.q_norm, a.k_norm) for a in attentions]


def after_rotation(a, queries):
    weight = (a.q_norm if queries else a.k_norm).weight
    return lambda x, cos, sin: rms_norm(apply_rope(x, cos, sin), weight)


class Late:
    """Rotation and norm of queries, then of keys, as they are called."""

    def __init__(self, attention):
        self.turns = [after_rotation(attention, q) for q in (True, False)]
        self.calls = 0

    def __call__(self, x, cos, sin):
        self.calls += 1
        return self.turns[(self.calls - 1) % 2](x, cos, sin)


for a in attentions:
    a.rotate = Late(a)
for a in attentions:
    a.q_norm = a.k_norm = nn.Identity()
trained = largest_error()
for a, (q_norm, k_norm) in zip(attentions, norms):
    a.q_norm, a.k_norm, a.rotate = q_norm, k_norm, apply_rope
print(f"late, with learned weights: {trained:.2f}")
assert trained > 0.1 and largest_error() == right

# %%
# One norm over all heads
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# The mean square is taken over H·D features and not over the D of each head (M46). Shapes fit, if the weight is
# repeated.


class OverAllHeads(nn.Module):
    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x):  # (B, H, T, D)
        joined = x.transpose(1, 2).flatten(2)  # (B, T, H D)
        repeated = self.weight.repeat(x.shape[1])
        return (
            rms_norm(joined, repeated, self.eps)
            .view(x.transpose(1, 2).shape)
            .transpose(1, 2)
        )


for a, (q_norm, k_norm) in zip(attentions, norms):
    a.q_norm = OverAllHeads(q_norm.weight, q_norm.eps)
    a.k_norm = OverAllHeads(k_norm.weight, k_norm.eps)
wrong = largest_error()
for a, (q_norm, k_norm) in zip(attentions, norms):
    a.q_norm, a.k_norm = q_norm, k_norm
print(f"over all heads: {wrong:.2f}")
assert wrong > 0.1 and largest_error() == right

# %%
# Scores divided by the wrong width
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The width of a head is taken to be C / H, as in Qwen2 (M47). Here that is 4, and a head has 8 features: scores are
# divided by 2 instead of 2.83.

for a in attentions:
    attend = a.attend
    a.attend = lambda q, k, v, visibility, dropout=0.0, attend=attend: attend(
        q * (8 / 4) ** 0.5, k, v, visibility, dropout
    )
wrong = largest_error()
for a in attentions:
    a.attend = attend
print(f"divided by the root of C / H: {wrong:.2f}")
assert wrong > 0.1 and largest_error() == right

# %%
# Exercises
# ---------
#
# 1. *Medium.* Make a Llama with ``attention_bias=True`` in ``transformers``, and open it here. Which of its weights does a
#    Qwen2 not have?
# 2. *Hard.* Read a family that is only numbers away: add a dialect for it to
#    ``lm_from_scratch/checkpoint/dialects.py``, and let the tests of the other families hold it.
#
# Summary
# -------
#
# * Llama, Mistral and Qwen3 agree with ``transformers`` within 5e-5, and come back as what they were.
# * What a family could switch on and this package does not compute is refused by name.
# * A mistake in a norm shows with trained weights, and rarely with fresh ones.
#
# Sources
# -------
#
# * Yang et al., `Qwen3 Technical Report <https://arxiv.org/abs/2505.09388>`_, 2025.
# * Henry et al., `Query-Key Normalization for Transformers <https://arxiv.org/abs/2010.04245>`_, 2020.
# * OLMo team, `2 OLMo 2 Furious <https://arxiv.org/abs/2501.00656>`_, 2024.

import lm_from_scratch

print(
    "torch", torch.__version__, "lm_from_scratch", lm_from_scratch.__version__
)
