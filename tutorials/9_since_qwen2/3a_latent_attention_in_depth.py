r"""
Latent attention in depth: two forms, one result
================================================

The lesson on `latent attention <3_latent_attention.ipynb>`_ stores one short vector for each token, and multiplies
matrices into the query instead of computing keys. Is that what DeepSeek-V3 computes? Which form is cheaper when, what
does it save in bytes and in seconds, and which mistakes does a test of the full text miss?

The same as transformers
------------------------

``transformers`` builds a small DeepSeek-V3 with large random weights, the package reads its folder. No two widths are
alike, so a shape that fits by chance is not possible. YaRN with ``mscale_all_dim`` is on.
"""

# sphinx_gallery_needs = ["3_latent_attention", "../5_caching/2_kinds_of_cache"]
# sphinx_gallery_words = ["DeepseekV3Attention", "kv_a_proj_with_mqa", "kv_b_proj", "MLA decode speed", "MLA absorb", "FlashMLA", "mscale_all_dim", "rope_interleave", "MLA arithmetic intensity"]
import copy
import math
import tempfile
import time

import torch
import transformers

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.latent import (
    absorbed,
    expanded,
    multiplications,
)
from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.weights import from_pretrained
from lm_from_scratch.models.deepseek_v3 import (
    DeepseekV3Config,
    LatentAttention,
)
from lm_from_scratch.models.randomize import randomize_

torch.set_grad_enabled(False)
transformers.utils.logging.disable_progress_bar()

tiny = transformers.DeepseekV3Config(
    vocab_size=97, hidden_size=30, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=14,
    kv_lora_rank=16, qk_nope_head_dim=10, qk_rope_head_dim=4, v_head_dim=9,
    first_k_dense_replace=2, bos_token_id=None, eos_token_id=None,
    max_position_embeddings=128, rope_parameters=dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, mscale=1.0,
        mscale_all_dim=1.0, original_max_position_embeddings=32,
    ),
)  # fmt: skip
theirs = transformers.DeepseekV3ForCausalLM(tiny).eval()
randomize_(theirs)
with tempfile.TemporaryDirectory() as folder:
    theirs.save_pretrained(folder)
    ours = from_pretrained(folder)

generator = torch.Generator().manual_seed(1)
idx = torch.randint(3, 97, (2, 12), generator=generator)
real = torch.ones(2, 12, dtype=torch.long)
real[1, :5] = 0  # the second row is padded on the left
positions = positions_from_mask(real)
wanted = {
    "full": theirs(idx).logits,
    "padded": theirs(
        idx, attention_mask=real, position_ids=positions.clamp(min=0)
    ).logits,
}


def in_pieces(model, sizes=(5, 1, 1, 3, 2), positions=None):
    cache, parts, start = GrowingCache(2), [], 0
    for size in sizes:
        at = slice(start, start + size)
        where = None if positions is None else positions[:, at]
        parts.append(model(idx[:, at], positions=where, cache=cache))
        start += size
    return torch.cat(parts, 1)


def errors(model):
    seen = real.bool()
    found = {
        "full pass": (model(idx) - wanted["full"]),
        "in pieces": (in_pieces(model) - wanted["full"]),
        "padded, in pieces": (
            in_pieces(model, positions=positions) - wanted["padded"]
        )[seen],
    }
    return {name: x.abs().max().item() for name, x in found.items()}


for name, error in errors(ours).items():
    print(f"{name:18} largest error {error:.0e}")
attention = ours.model.layers[0].self_attn
forms = {(5, 5): False, (1, 6): True, (3, 10): True, (12, 12): False}
assert {sizes: attention.absorbs(*sizes) for sizes in forms} == forms
assert max(errors(ours).values()) < 5e-5 < 1 < wanted["full"].abs().max()

# %%
# Prompts went through the expanded form, single tokens through the absorbed one. ``transformers`` always expands: its
# cache is as small as ours, and it makes all keys and values again for every token.
#
# What the caches hold is alike up to one thing. The checkpoint pairs the turned features 2i and 2i + 1, and
# ``transformers`` leaves them in another order than they came. Products of two such vectors are the same.

dynamic, growing = transformers.DynamicCache(), GrowingCache(2)
theirs(idx, past_key_values=dynamic, use_cache=True)
ours(idx, cache=growing)
for layer, held in enumerate(dynamic.layers):
    latent, shared, _ = growing.contents(layer)
    torch.testing.assert_close(latent, held.keys, atol=1e-5, rtol=0)
    reordered = shared[..., [0, 2, 1, 3]]
    torch.testing.assert_close(reordered, held.values, atol=1e-5, rtol=0)
print("latent", tuple(latent.shape), "turned key", tuple(shared.shape))

# %%
# The law
# -------
#
# *Absorbed equals expanded*, in value and in gradient, for every number of queries and keys and every mask. In float64
# the tolerance can be tight. Here are 40 draws of all sizes.

worst = 0.0
draw = torch.Generator().manual_seed(0)
for _ in range(40):
    B, H, R, Dn, Dv, half, S = torch.randint(1, 9, (7,), generator=draw)
    T, Dr = torch.randint(1, S + 1, (1,), generator=draw).item(), 2 * half
    shapes = (B, H, T, Dn + Dr), (B, 1, S, R), (B, 1, S, Dr), (H * (Dn + Dv), R)
    q, latent, shared, weight = inputs = [
        torch.randn(
            *shape, generator=draw, dtype=torch.float64
        ).requires_grad_()
        for shape in shapes
    ]
    places = torch.arange(S).expand(B, -1).clone()
    places[0, : S // 3] = -1  # padding
    how = Visibility(places[:, S - T :], places), formula_attention
    with torch.enable_grad():
        both = [
            expanded(q, latent @ weight.T, shared, *how),
            absorbed(q, latent, shared, weight, *how),
        ]
        upstream = torch.randn(both[0].shape, generator=draw).double()
        grads = [torch.autograd.grad(y, inputs, upstream) for y in both]
    pairs = [both, *zip(*grads)]
    worst = max(worst, *((a - b).abs().max().item() for a, b in pairs))
print(f"largest difference {worst:.0e}")

assert worst < 1e-10

# %%
# Which form is shorter
# ---------------------
#
# For T queries and S keys, a head of DeepSeek-V3 multiplies
#
# .. math::
#
#    \text{expanded:} &\quad S R (D_n + D_v) + T S (D_n + D_r + D_v) \\
#    \text{absorbed:} &\quad T R (D_n + D_v) + T S (2 R + D_r)
#
# times. Without a cache S is T, the first terms are equal, and the second favour narrow keys: a prompt is expanded. For
# a single token only the first term of the expanded form is large. For long texts the two meet at
# :math:`T = R (D_n + D_v) / (2 R - D_n - D_v)`, whatever S is.

v3 = dict(R=512, Dn=128, Dr=64, Dv=128)
print("absorbed / expanded")
print("   T:" + "".join(f"{T:8}" for T in (1, 16, 64, 170, 171, 1024)))
for S in (1024, 4096, 65536):
    row = [multiplications(T, S, **v3) for T in (1, 16, 64, 170, 171, 1024)]
    print(f"{S:5}" + "".join(f"{b / a:8.3f}" for a, b in row))

meet = 512 * 256 / (2 * 512 - 256)
print(f"long texts meet at T = {meet:.1f}")
assert round(meet, 1) == 170.7
shorter = [multiplications(T, 10**7, **v3) for T in (170, 171)]
assert [b < a for a, b in shorter] == [True, False]
assert 117 < 1 / (4587520 / 538181632) < 118

# %%
# A prompt that is read in pieces of 64 tokens after a long text is absorbed, too: the layer counts, and no flag says
# which phase it is in. A few drafted tokens of `speculative decoding <../6_generation/2_speculative_decoding.ipynb>`_
# are as well.
#
# In a narrow model the absorbed form can win everywhere. If 2 R is less than Dn + Dv, latents are narrower than keys.

assert multiplications(99, 99, R=10, Dn=16, Dr=4, Dv=16) == (
    99 * 10 * 32 + 99 * 99 * 36,
    99 * 10 * 32 + 99 * 99 * 24,
)

# %%
# Bytes
# -----
#
# The sizes that published models chose, and the cache of 131,072 tokens in numbers of 2 bytes. The last column is the
# cache that the same heads would have without a latent.

published = {  # layers, H, R, Dn, Dr, Dv, width of the queries' latent
    "DeepSeek-V2-Lite": (27, 16, 512, 128, 64, 128, None),
    "DeepSeek-V2": (60, 128, 512, 128, 64, 128, 1536),
    "DeepSeek-V3": (61, 128, 512, 128, 64, 128, 1536),
    "Kimi-K2": (61, 64, 512, 128, 64, 128, 1536),
    "MiniCPM3-4B": (62, 40, 256, 64, 32, 64, 768),
}
GiB, times = {}, {}
print("model              H    R   Dr  MLA, GiB  heads, GiB")
for name, (L, H, R, Dn, Dr, Dv, _) in published.items():
    with_latent, heads = R + Dr, H * (Dn + Dr + Dv)
    GiB[name] = [2 * L * n * 131072 / 2**30 for n in (with_latent, heads)]
    times[name] = heads / with_latent
    print(
        f"{name:16} {H:3} {R:4} {Dr:4}  {GiB[name][0]:8.1f}{GiB[name][1]:10.0f}"
    )

assert [round(x, 1) for x in GiB["DeepSeek-V3"]] == [8.6, 610.0]
assert [round(times[n], 1) for n in times] == [8.9, 71.1, 71.1, 35.6, 22.2]

# %%
# The latent has the same 512 numbers for 16 heads as for 128: heads cost no memory any more. They still cost time. A
# block of DeepSeek-V3 that decodes reads 1,152 bytes of each old token, and does 128 heads' work with them. An ordinary
# cache has a few operations a byte, so it waits for memory. And here?

operations = 128 * 2 * (2 * 512 + 64)  # a multiplication and an addition
print(f"needed: {operations / 1152:.0f} operations a byte")
print(f"an H200 does {989e12 / 4.8e12:.0f} in the time that it reads one")
assert round(operations / 1152) == 242 > round(989e12 / 4.8e12) == 206

# %%
# So for such a model decoding is bounded by arithmetic: it is one of few cases in which a faster memory would not help.
# (The second number is that of the data sheet, for bfloat16 without sparsity. The weights, which must be read as well,
# are left out: many chats share them.)
#
# Time
# ----
#
# One layer with DeepSeek-V3's widths, but 16 heads and a state of 512, decodes a token after 4,096. The cache is full
# of random numbers, which cost as much as any. ``Expand`` is the same layer, which never absorbs.

config = DeepseekV3Config(
    vocab_size=97, n_layer=1, n_head=16, n_embd=512, intermediate_size=64,
    q_lora_rank=None, first_k_dense_replace=1,
)  # fmt: skip
model = build(config).eval()
layer = model.model.layers[0].self_attn
full = GrowingCache(1, reserve=4200)
full.see(torch.zeros(1, 4096))
full.update(0, torch.randn(1, 1, 4096, 512), torch.randn(1, 1, 4096, 64))


def milliseconds(layer, repeats=3):
    x, best = torch.randn(1, 1, 512), math.inf
    for _ in range(repeats):
        (seen,) = full.see(x)
        turns = model.model.rotary_emb(seen.query_positions, x.dtype)
        start = time.perf_counter()
        layer(x, turns, seen, full[0])
        best = min(best, time.perf_counter() - start)
        full.crop(4096)
    return 1000 * best


class Expand(LatentAttention):
    def absorbs(self, T, S):
        return False


slow = copy.deepcopy(layer)
slow.__class__ = Expand
quick, slowly = milliseconds(layer), milliseconds(slow)
print(f"absorbed {quick:6.1f} ms, expanded {slowly:6.1f} ms")

assert 4 * quick < slowly

# %%
# The factor is smaller than that of the multiplications: the projections and the reading of 4,096 latents are in both.
#
# Bug museum
# ----------
#
# Each mistake is one line of the layer, and is tried on all blocks of the tiny model, with the three checks from above.


class Mistaken(LatentAttention):
    mistake = ""

    def forward(self, x, rotation, visibility, cache):
        (B, T, _), (R, Dn, Dr, _) = x.shape, self.sizes
        q = self.queries(x).view(B, T, self.n_head, -1).transpose(1, 2)
        q, u = q.split([Dn, Dr], dim=-1)
        q = torch.cat([q, self.rotate(u, *rotation)], -1) * self.sharpness
        if self.mistake == "scale":
            q = q * math.sqrt((Dn + Dr) / (R + Dr))
        if self.mistake == "mscale":
            q = q / math.sqrt(self.sharpness)
        c, r = self.kv_a_proj_with_mqa(x)[:, None].split([R, Dr], dim=-1)
        normed, turned = self.kv_a_layernorm(c), self.rotate(r, *rotation)
        if self.mistake == "norm":
            old, turned = cache.update(c, turned)
            latent = torch.cat([old[:, :, :-T], normed], 2)
        elif self.mistake == "late":
            latent, r = cache.update(normed, r)
            slots = torch.arange(r.shape[2])[None]
            turned = self.rotate(r, *ours.model.rotary_emb(slots, r.dtype))
        elif self.mistake == "absorbed":
            latent, turned = cache.update(normed, r)
        elif self.mistake == "shared":
            twice = self.rotate(turned, *rotation)
            latent, turned = cache.update(normed, twice)
        else:
            latent, turned = cache.update(normed, turned)
        y = absorbed(q, latent, turned, self.kv_b_proj.weight, visibility)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


def with_mistake(name):
    model = copy.deepcopy(ours)
    for block in model.model.layers:
        block.self_attn.__class__ = Mistaken
        block.self_attn.mistake = name
    return errors(model)


print("             " + "".join(f"{name:>20}" for name in errors(ours)))
table = {}
for name in ("", "scale", "mscale", "norm", "late", "absorbed", "shared"):
    table[name] = [*with_mistake(name).values()]
    cells = "".join(f"{error:20.0e}" for error in table[name])
    print(f"{name or 'none':13}{cells}")
caught = {name: [error > 0.05 for error in row] for name, row in table.items()}

assert max(table[""]) < 5e-5
assert all(max(row) > 0.05 for name, row in table.items() if name)

# %%
# The root of the wrong width
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# In the absorbed form queries and keys have R + Dr features, and attention divides by the root of the width that it
# sees (M51). The root that the model was trained with is that of Dn + Dr. Both forms must be compared in value; a text
# of a trained model stays readable, with weights that are too even.

assert caught["scale"] == [True, True, True]

# %%
# One factor of two
# ~~~~~~~~~~~~~~~~~
#
# With YaRN, DeepSeek multiplies scores by the *square* of a magnitude, since usually query and key carry one factor
# each (M52). A single one is an error that no test without YaRN can show. Another program `left out both
# <https://github.com/onnxruntime/mobius/pull/548>`_. Its logits at position 0 were right: with one key, softmax gives 1
# whatever the score is.

assert caught["mscale"] == [True, True, True]

# %%
# A latent cached before its norm
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The norm is applied to new tokens, and the cache is given what was before it (M53). The full pass is right to the last
# bit that matters; the second piece already is not.

assert caught["norm"] == [False, True, True]

# %%
# Turned when it is read
# ~~~~~~~~~~~~~~~~~~~~~~
#
# The shared key waits in the cache unturned, and all of them are turned at every token, by their *place in the cache*
# (M54). That is their position while nothing is padding. Only rows with padding on the left are wrong.

assert caught["late"] == [False, False, True]

# %%
# A rotation absorbed
# ~~~~~~~~~~~~~~~~~~~
#
# The query is turned and the key is not, as if its turn were part of a fixed matrix (M55). Scores then depend on where
# the query is, and no longer on the distance. A key that is turned twice is wrong in the same way.

assert caught["absorbed"] == caught["shared"] == [True, True, True]

# %%
# Exercises
# ---------
#
# 1. *Medium.* Write latent attention for one head of DeepSeek-V3's widths with ``torch.float16`` queries of length 100.
#    Which form overflows first, and why? Hint: the absorbed query has passed a matrix.
# 2. *Hard.* Convert the shipped GPT-2 into a model with latents of 64 numbers, as the lesson's directions suggest, and
#    train it for 100 steps. A good answer has three losses: before, after the conversion, after training.
#
# Summary
# -------
#
# * Both forms are one function, to 1e-10 in float64. Counting multiplications chooses between them, by shapes alone.
# * Heads cost no memory in a latent cache. They cost arithmetic: 242 operations for each byte that is read.
# * A latent cache has its own mistakes. Two of six pass every test of a full text.
#
# Sources
# -------
#
# * DeepSeek-AI: `DeepSeek-V2 <https://arxiv.org/abs/2405.04434>`_, 2024. Latent attention in section 2.1, the formulas
#   of it in appendix C, and caches compared in table 1.
# * DeepSeek-AI: `DeepSeek-V3 Technical Report <https://arxiv.org/abs/2412.19437>`_, 2024.
# * Peng et al.: `YaRN <https://arxiv.org/abs/2309.00071>`_, 2023, whose scale of the scores ``mscale_all_dim`` changes.
# * Shazeer: `Fast Transformer Decoding <https://arxiv.org/abs/1911.02150>`_, 2019. Multi-query attention.
# * NVIDIA: `H200 <https://www.nvidia.com/en-us/data-center/h200/>`_, for operations and bytes a second.
# * Ainslie et al.: `GQA <https://arxiv.org/abs/2305.13245>`_, 2023.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
