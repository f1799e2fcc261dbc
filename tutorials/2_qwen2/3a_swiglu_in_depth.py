r"""
SwiGLU and the block, in depth
==============================

Is your gated MLP the right one, and your block? This page deepens `SwiGLU and shared key heads <3_swiglu.ipynb>`_. It compares each
part of a Qwen2 block with ``transformers``, in value and in gradient, and shows which mistakes leave no error message.

It also answers what the lesson leaves out: what the biases of queries, keys and values can do, and how the state grows from block to
block in a trained model.

Silu beside its relatives
-------------------------

The lesson shows what a gate lets through. Here is its function silu beside GELU and ReLU, and then its derivative, which backward
computes.
"""

import copy
import inspect
import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers
from transformers.models.qwen2 import modeling_qwen2

from lm_from_scratch.instruments.plot import COLOURS, GREY, figure
from lm_from_scratch.layers.gated_mlp import GatedMLP, swiglu
from lm_from_scratch.models.randomize import randomize_

z = torch.linspace(-6, 6, 1201, dtype=torch.float64)
lines = {"silu": F.silu(z), "gelu": F.gelu(z), "relu": F.relu(z)}
fig, (ax,) = figure(4.6, 3.2)
for (name, y), style in zip(lines.items(), ("-", "--", ":")):
    ax.plot(z, y, style, label=name)
ax.set(xlim=(-4, 4), ylim=(-0.5, 4), xlabel="z", title="Functions of one z")
ax.legend(frameon=False)
plt.show()

torch.testing.assert_close(lines["silu"], z * z.sigmoid())
lowest = lines["silu"].min().item()
print(f"lowest silu {lowest:.3f} at {z[lines['silu'].argmin()]:.2f}")
assert abs(lowest + 0.278) < 1e-3
assert abs(z[lines["silu"].argmin()] + 1.278) < 0.01

# %%
# Silu is smooth. It dips to -0.278 before it returns to 0. Its derivative is short:
#
# .. math::
#
#    \operatorname{silu}'(z) = \sigma(z) \, \bigl(1 + z \, (1 - \sigma(z))\bigr)

leaf = z.clone().requires_grad_()
F.silu(leaf).sum().backward()
sigma = z.sigmoid()
torch.testing.assert_close(leaf.grad, sigma * (1 + z * (1 - sigma)))

# %%
# The gated MLP beside transformers
# ---------------------------------
#
# The reference is one layer of ``transformers`` with C = 48, I = 112, H = 6 and Hkv = 2. Its matrices and biases are drawn with
# standard deviation 0.25, and its norm weights lie around 1. The function by hand and the module of the package both equal its MLP.

print(inspect.getsource(swiglu))
print(inspect.getsource(GatedMLP.forward))

C, width, H, Hkv = 48, 112, 6, 2
D = C // H

config = transformers.Qwen2Config(
    vocab_size=97,
    hidden_size=C,
    intermediate_size=width,
    num_hidden_layers=1,
    num_attention_heads=H,
    num_key_value_heads=Hkv,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    attn_implementation="eager",
)
oracle = modeling_qwen2.Qwen2DecoderLayer(config, layer_idx=0).eval()
randomize_(oracle)
for name, parameter in oracle.named_parameters():
    print(f"{name:32} {tuple(parameter.shape)}")
assert len(list(oracle.parameters())) == 12

generator = torch.Generator().manual_seed(1)
x = torch.randn(2, 11, C, generator=generator)  # (B, T, C)
p = {name: tensor.detach() for name, tensor in oracle.named_parameters()}


def mlp_by_hand(x, gate, up, down):
    return swiglu(x @ gate.T, x @ up.T) @ down.T


matrices = [p[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")]
by_hand = mlp_by_hand(x, *matrices)
expected = oracle.mlp(x).detach()
torch.testing.assert_close(by_hand, expected, atol=5e-5, rtol=0.0)

mlp = GatedMLP(C, width)
mlp.load_state_dict(oracle.mlp.state_dict())
torch.testing.assert_close(mlp(x), expected, atol=5e-5, rtol=0.0)

# %%
# Large states, larger results
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Gate and up both grow with x, so far from 0 their product grows with the square of x. An MLP with one map and GELU grows in
# proportion to x. Here both MLPs get 10 x and then 100 x.


def plain_mlp(x, first, second):
    return F.gelu(x @ first.T) @ second.T


small, large = 10 * x, 100 * x  # far from 0, where silu is z or 0
gated = mlp_by_hand(large, *matrices).norm()
gated = (gated / mlp_by_hand(small, *matrices).norm()).item()
plain = plain_mlp(large, matrices[0], matrices[2]).norm()
plain = (plain / plain_mlp(small, matrices[0], matrices[2]).norm()).item()
print(f"10 times the state: gated {gated:.1f} times, plain {plain:.1f} times")
assert abs(gated - 100) < 1
assert abs(plain - 10) < 0.1

# %%
# A state ten times as large gives a hundred times the result. In a block this does not happen, because the norm before the MLP
# gives it states of one size.
#
# How wide the published models are
# ---------------------------------
#
# With :math:`I = \tfrac{8}{3} C` three matrices have as many weights as GPT-2's two. A model is free to spend more. These are the
# published sizes:

from lm_from_scratch.models.qwen2 import SIZES

print("              C      I   I / C   MLP weights / 8 C^2")
for size, numbers in SIZES.items():
    c, i = numbers["n_embd"], numbers["intermediate_size"]
    with torch.device("meta"):
        weights = sum(t.numel() for t in GatedMLP(c, i).parameters())
    assert weights == 3 * c * i
    print(f"{size:10} {c:5} {i:6} {i / c:7.2f} {weights / (8 * c**2):15.2f}")
    assert 5.2 < i / c < 5.9
    assert 1.9 < weights / (8 * c**2) < 2.2

c = 3 * 256
assert 3 * c * (8 * c // 3) == 2 * c * 4 * c

# %%
# Qwen2's three matrices hold about twice the :math:`8 C^2` weights of a GPT-2 with the same C.
#
# Gate and up are not the same
# ----------------------------
#
# The two matrices have the same shape, and the same distribution when training starts. A loader that swaps them raises no
# error, but computes another function, because only the gate goes through silu.
#
# The order of the I features, on the other hand, means nothing. Permute all three matrices alike, and the result stays the same.

gate, up, down = matrices
swapped = mlp_by_hand(x, up, gate, down)
order = torch.randperm(width, generator=generator)
permuted = mlp_by_hand(x, gate[order], up[order], down[:, order])
print(f"largest entry {expected.abs().max():.1f}")
print(f"swapped  error {(swapped - expected).abs().max():.1f}")
print(f"permuted error {(permuted - expected).abs().max():.0e}")
assert (swapped - expected).abs().max() > 1
assert (permuted - expected).abs().max() < 5e-5

# %%
# Some programs store both in one matrix with 2I rows. Then the order of the halves is a convention that no shape can
# check.
#
# Who reads which key head
# ------------------------
#
# With grouped heads, H / Hkv query heads read the same keys:
#
# .. math::
#
#    \text{query head } h \text{ reads key head } \lfloor h \, H_{kv} / H \rfloor
#
# So each key head is repeated several times in a row.

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.gqa import repeat_kv
from lm_from_scratch.cache.interface import NO_CACHE

print(inspect.getsource(repeat_kv))


def tile_kv(x, n_head):
    return x.repeat(1, n_head // x.shape[1], 1, 1)


heads = torch.arange(Hkv).view(1, Hkv, 1, 1)  # (B, Hkv, S, D)
print("repeated", repeat_kv(heads, H).flatten().tolist())
print("tiled   ", tile_kv(heads, H).flatten().tolist())
assert repeat_kv(heads, H).flatten().tolist() == [0, 0, 0, 1, 1, 1]
assert tile_kv(heads, H).flatten().tolist() == [0, 1, 0, 1, 0, 1]

# %%
# To see whether attention follows this formula, change one value head at a time, run the attention, and mark the query
# heads whose result moves.


def who_reads(attention, n_kv_head):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, H, 11, D, generator=generator)
    k, v = torch.randn(2, 2, n_kv_head, 11, D, generator=generator)
    visibility = NO_CACHE.see(q[:, 0])[0]
    before = attention(q, k, v, visibility)
    moved = torch.zeros(H, n_kv_head)
    for j in range(n_kv_head):
        other = v.clone()
        other[:, j] += 1.0
        change = attention(q, k, other, visibility) - before
        moved[:, j] = change.abs().amax((0, 2, 3)) > 0.5
    return moved


def attend_to_tiled_heads(q, k, v, visibility):
    k, v = tile_kv(k, H), tile_kv(v, H)
    return formula_attention(q, k, v, visibility)


cases = {
    "Hkv = 6": (formula_attention, 6),
    "Hkv = 2": (formula_attention, 2),
    "Hkv = 1": (formula_attention, 1),
    "Hkv = 2, tiled": (attend_to_tiled_heads, 2),
}
# sphinx_gallery_thumbnail_number = 2
# sphinx_gallery_words = ["repeat_interleave", "enable_gqa", "multi-query attention", "q_proj", "k_proj", "qkv bias", "c_proj initialisation"]
fig, axes = figure(4.8, 5.6, rows=2, columns=2)
for ax, (title, (attention, n_kv_head)) in zip(axes, cases.items()):
    moved = who_reads(attention, n_kv_head)
    assert (moved.sum(1) == 1).all()
    for h, j in moved.nonzero().tolist():
        wrong = j != h * n_kv_head // H
        colour = COLOURS[3 if wrong else 0]
        style = ":" if wrong else "-"
        ax.plot(
            [0, 1], [h, (j + 0.5) * H / n_kv_head - 0.5], style, color=colour
        )
    ax.plot([0] * H, range(H), "o", color=GREY)
    ends = [(j + 0.5) * H / n_kv_head - 0.5 for j in range(n_kv_head)]
    ax.plot([1] * n_kv_head, ends, "s", color=GREY)
    ax.set_yticks(range(H))
    ax.set_xticks([0, 1], ["query", "key"])
    ax.set(title=title, xlim=(-0.25, 1.25), ylim=(H - 0.5, -0.5))
    ax.grid(False)
for ax in axes[::2]:
    ax.set_ylabel("head")
plt.show()

right_heads = [h * Hkv // H for h in range(H)]
assert who_reads(formula_attention, Hkv).argmax(1).tolist() == right_heads
tiled_heads = who_reads(attend_to_tiled_heads, Hkv).argmax(1).tolist()
assert [h for h in range(H) if tiled_heads[h] != right_heads[h]] == [1, 4]

# %%
# Solid lines are right. The last panel is the mistake of the museum below: query heads 1 and 4 read another group's key head.
#
# What a cache holds
# ~~~~~~~~~~~~~~~~~~
#
# A cache holds two tensors, keys and values, of Hkv D numbers for each layer and token.
#
# .. math::
#
#    \text{bytes per token} = 2 \, L \, H_{kv} \, D \times \text{bytes per number}
#
# The cache of the package holds exactly that after a model has read B = 2 rows of 11 tokens.

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

sizes = dict(vocab_size=97, n_layer=3, n_head=H, n_embd=C)
sizes |= dict(intermediate_size=width, eos_token_id=2)
idx = torch.randint(3, 97, (2, 11), generator=generator)
for n_kv_head in (6, 2, 1):
    small_config = Qwen2Config(**sizes, n_kv_head=n_kv_head)
    cache = GrowingCache(n_layer=3)
    with torch.no_grad():
        Qwen2ForCausalLM(small_config)(idx, cache=cache)
    print(f"Hkv = {n_kv_head}: {cache.nbytes:6,} bytes")
    assert cache.nbytes == 2 * 3 * n_kv_head * D * 4 * idx.numel()

# %%
# For one text of 32,768 tokens in bfloat16 the formula gives these numbers, with the published numbers of heads and with
# Hkv = H.

text_length = 32_768
print("              H  Hkv   GiB   GiB if Hkv = H")
for size, numbers in SIZES.items():
    full = Qwen2Config(**numbers)
    per_head = 2 * full.n_layer * full.head_dim * 2 * text_length / 2**30
    shared, separate = per_head * full.n_kv_head, per_head * full.n_head
    print(f"{size:12} {full.n_head:2} {full.n_kv_head:4}", end="")
    print(f" {shared:6.3f} {separate:10.3f}")
    if size == "Qwen2-0.5B":
        assert (shared, separate) == (0.375, 2.625)
        assert separate > 2 * 494_032_768 * 2 / 2**30

# %%
# In the smallest model, seven query heads share one key head. Without sharing, the cache of one such text would take 2.625 GiB,
# more than twice the memory of all the weights. With sharing it takes 0.375 GiB.
#
# Biases on three maps
# --------------------
#
# In a Qwen2 block, the maps to queries, keys and values have a bias, and no other map has one.

biases = [name for name in p if name.endswith("bias")]
assert biases == [f"self_attn.{part}_proj.bias" for part in "qkv"]
biases

# %%
# What can these biases do? That of the values is easy. The weights of a query sum to 1, so a constant that is added to every
# value is also added to their mean: it moves every output by the same vector.
#
# The bias b of the keys adds :math:`q_t \cdot b` to every score of query t. The softmax ignores what all scores of a row share, so
# without rotation a key bias does nothing at all. A rotation turns b by a different angle at each key, and then the bias matters.

from lm_from_scratch.layers.rope import RotaryEmbedding
from lm_from_scratch.models.qwen2 import Block

block_config = Qwen2Config(**sizes | {"n_layer": 1}, n_kv_head=Hkv)
block = Block(block_config).eval()
block.load_state_dict(oracle.state_dict())
rotary = RotaryEmbedding(D, theta=10000.0)

visibility = NO_CACHE.see(x)[0]
turned = rotary(visibility.query_positions, x.dtype)
still = torch.ones_like(turned[0]), torch.zeros_like(turned[1])


@torch.no_grad()
def effect(part, rotation):
    attention = copy.deepcopy(block.self_attn)
    before = attention(x, rotation, visibility, NO_CACHE)
    getattr(attention, f"{part}_proj").bias += 1.0
    return attention(x, rotation, visibility, NO_CACHE) - before


print("bias + 1     unrotated     rotated    spread over tokens")
for part in "qkv":
    plain, rotated = effect(part, still), effect(part, turned)
    spread = (rotated - rotated[:1, :1]).abs().max()
    sizes_of = [f"{e.abs().max():11.0e}" for e in (plain, rotated)]
    print(f"{part:10}", *sizes_of, f"{spread:17.0e}")
    if part == "k":
        assert plain.abs().max() < 5e-5
    else:
        assert plain.abs().max() > 0.1
    assert rotated.abs().max() > 0.1
    assert (spread < 5e-5) == (part == "v")

# %%
# With rotation, the biases of query and key together give each head a term of the score that depends on distance alone.
# GPT-2 has a key bias too, but rotates nothing, so its key bias has no effect.
#
# The residual stream
# -------------------
#
# A norm comes before attention and before the MLP, and their results are added to the state. There is no norm on the path from the
# embedding to the last block, so nothing scales the state back.
#
# Let the shipped Qwen2 read four texts of 128 tokens. ``record_hidden_states`` keeps the state before the first block and
# after each block.

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.record import record_hidden_states
from lm_from_scratch.text.corpora import load_corpus

trained, tokenizer = load_shipped("qwen2-docs")
start = tokenizer.eos_token_id
texts = [tokenizer.encode(d.text) for d in load_corpus("reference")]
texts = [[start, *ids][:128] for ids in texts if len(ids) > 127][:4]

added = {"attention": [], "MLP": []}
for layer in trained.model.layers:
    for name, module in zip(added, (layer.self_attn, layer.mlp)):
        module.register_forward_hook(
            lambda module, args, result, name=name: added[name].append(result)
        )
with torch.no_grad(), record_hidden_states(trained) as states:
    trained(torch.tensor(texts))
stream = torch.stack([state[0] for state in states[:-1]])  # (L + 1, B, T, C)


def rms(t):
    return t.square().mean(-1).sqrt()


first = rms(stream)[:, :, 0].mean(1)  # the token that starts a document
later = rms(stream)[:, :, 1:].mean((1, 2))
fig, (ax,) = figure(4.8, 3.8)
n_layer = len(trained.model.layers)
ax.plot(range(n_layer + 1), first, "s:", label="state, first token")
ax.plot(range(n_layer + 1), later, "o-", label="state, later tokens")
for (name, results), style in zip(added.items(), ("^--", "v-.")):
    size = [rms(result)[:, 1:].mean() for result in results]
    places = [i + 1 for i in range(n_layer)]
    ax.plot(places, size, style, label=f"added by {name}, later tokens")
ax.set(xlabel="after block", ylabel="root mean square", yscale="log")
ax.set_title("The state grows from block to block")
ax.legend(frameon=False)
plt.show()

print("later tokens", *(f"{r:.2f}" for r in later))
assert later[-1] > 60 * later[0] and later[1] > 10 * later[0]
assert first[-1] > 6 * later[-1]

# %%
# The state of the later tokens grows more than sixtyfold, more than tenfold in the first block alone. The state of the
# first token ends more than six times as large as theirs.
# What attention and MLP of the last block add is less than half as large as the state after it. That state is a plain
# sum, as in GPT-2.

total = stream[0] + sum(added["attention"]) + sum(added["MLP"])
torch.testing.assert_close(total, stream[-1], atol=1e-4, rtol=1e-4)
for results in added.values():
    assert rms(results[-1])[:, 1:].mean() < later[-1] / 2

# %%
# The block, assembled
# --------------------
#
# This is a whole block of Qwen2, made of functions of the package and the twelve tensors of ``p``.

from lm_from_scratch.layers.norm import rms_norm
from lm_from_scratch.layers.rope import apply_rope


def qwen2_block(x, p, rotation, visibility):
    B, T, _ = x.shape
    h = rms_norm(x, p["input_layernorm.weight"])
    q, k, v = (
        F.linear(h, p[f"self_attn.{m}.weight"], p[f"self_attn.{m}.bias"])
        .view(B, T, -1, D)
        .transpose(1, 2)  # (B, H, T, D), (B, Hkv, T, D) twice
        for m in ("q_proj", "k_proj", "v_proj")
    )
    q, k = apply_rope(q, *rotation), apply_rope(k, *rotation)
    y = formula_attention(q, k, v, visibility)
    y = y.transpose(1, 2).reshape(B, T, -1)
    x = x + y @ p["self_attn.o_proj.weight"].T
    h = rms_norm(x, p["post_attention_layernorm.weight"])
    maps = (p[f"mlp.{m}_proj.weight"] for m in ("gate", "up", "down"))
    return x + mlp_by_hand(h, *maps)


# %%
# Three implementations get the same two rows, of which the first begins with three padding tokens. The layer of
# ``transformers`` takes cosines and sines from its own module, and a mask that it adds to the scores. The loss is a
# weighted sum over the real tokens. We take its gradient for the input and for all twelve tensors.

from lm_from_scratch.attention.masks import positions_from_mask

real = torch.ones(2, 11, dtype=torch.long)
real[0, :3] = 0
positions = positions_from_mask(real)
visibility = NO_CACHE.see(x, positions)[0]
rotation = rotary(positions, x.dtype)
added_mask = torch.zeros(2, 1, 11, 11)
added_mask.masked_fill_(~visibility.mask, torch.finfo(torch.float32).min)
turns = modeling_qwen2.Qwen2RotaryEmbedding(config)
loss_weights = torch.randn(2, 11, C, generator=generator)
loss_weights = loss_weights * real[..., None]


def result_and_gradients(run, parameters):
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    inputs = [leaf, *(parameters[name] for name in sorted(parameters))]
    gradients = torch.autograd.grad((y * loss_weights).sum(), inputs)
    names = ["x", *sorted(parameters)]
    return y.detach()[real == 1], dict(zip(names, gradients))


def run_oracle(x, layer=oracle):
    positions_of_oracle = positions.clamp(min=0)
    return layer(
        x,
        attention_mask=added_mask,
        position_embeddings=turns(x, positions_of_oracle),
    )


leaves = {name: t.clone().requires_grad_() for name, t in p.items()}
runs = {
    "transformers": (run_oracle, dict(oracle.named_parameters())),
    "by hand": (lambda x: qwen2_block(x, leaves, rotation, visibility), leaves),
    "package": (
        lambda x: block(x, rotation, visibility, NO_CACHE),
        dict(block.named_parameters()),
    ),
}
results = {
    name: result_and_gradients(run, parameters)
    for name, (run, parameters) in runs.items()
}
expected, gradients = results.pop("transformers")
print(f"largest result {expected.abs().max():.1f}", end=", ")
print(f"largest gradient {max(g.abs().max() for g in gradients.values()):.0f}")
for name, (ours, our_gradients) in results.items():
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)
    relative = []
    for tensor, g in gradients.items():
        scale = g.abs().max()
        relative.append(
            ((our_gradients[tensor] - g).abs().max() / scale).item()
        )
    print(f"{name:8} error {(ours - expected).abs().max():.0e}", end=", ")
    print(f"gradients, relative {max(relative):.0e}")
    assert len(relative) == 13
    assert max(relative) < 1e-4

# %%
# Result and all thirteen gradients agree. The package's block is the same with modules.

print(inspect.getsource(Block.forward))

# %%
# Bug museum
# ----------
#
# Key heads that do not divide
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Six query heads cannot share four key heads evenly. The code of the first Qwen2 checked that H divides C, but not
# that Hkv divides H. The model was built, and its first forward pass failed inside attention. Here are the shapes of
# that pass, and a repetition without a check. (Q25)


def repeat_unchecked(x, n_head):
    return x.repeat_interleave(n_head // x.shape[1], dim=1)


q = torch.zeros(2, 6, 11, D)
k = torch.zeros(2, 4, 11, D)
try:
    q @ repeat_unchecked(k, 6).mT
except RuntimeError as error:
    print("late: ", error)
    late = str(error)

try:
    Qwen2Config(**sizes, n_kv_head=4)
except ValueError as error:
    print("early:", error)
    early = str(error)
assert "head" not in late
assert early == "n_head=6 is not a multiple of n_kv_head=4"

# %%
# The quotient 6 // 4 is 1, so nothing is repeated, and the message speaks of dimensions instead of heads. The fixed line
# is a check in the config, before any weight exists. The test that finds it builds a config with 6 and 4.
#
# Key heads in tiles
# ~~~~~~~~~~~~~~~~~~
#
# The tiled heads of the figure come from one wrong word, ``repeat`` for ``repeat_interleave`` (M4). Every shape fits. axlearn had
# this mistake and `fixed it <https://github.com/apple/axlearn/pull/842>`_, as did `jax-js <https://github.com/ekzhang/jax-js/pull/180>`_.
# In ONNX, `a pull request of 2025 <https://github.com/onnx/onnx/pull/7274>`_ replaces tiles in the definition of its Attention operator.
#
# The next lines plant the mistake in a block, for each possible number of key heads.

print("Hkv   error of the block")
tiled_error = {}
for n_kv_head in (1, 2, 3, 6):
    numbers = sizes | {"n_layer": 1, "n_kv_head": n_kv_head}
    grouped = Block(Qwen2Config(**numbers)).eval()
    randomize_(grouped)
    wrong = copy.deepcopy(grouped)
    grouped.self_attn.attend = formula_attention
    wrong.self_attn.attend = lambda q, k, v, visibility, dropout: (
        attend_to_tiled_heads(q, k, v, visibility)
    )
    with torch.no_grad():
        change = wrong(x, rotation, visibility, NO_CACHE)
        change -= grouped(x, rotation, visibility, NO_CACHE)
    tiled_error[n_kv_head] = change[real == 1].abs().max().item()
    print(f"{n_kv_head:3} {tiled_error[n_kv_head]:12.1f}")
assert tiled_error[1] == tiled_error[6] == 0.0
assert min(tiled_error[2], tiled_error[3]) > 0.5

# %%
# With one key head, or with as many key heads as query heads, the mistake is *equal* to the right code, bit for bit. A test must
# use 1 < Hkv < H. The fixed line is in ``repeat_kv`` above.
#
# How loud is the mistake in a trained model? The shipped Qwen2 has four query heads and two key heads. On held-out text it needs more
# bits for a byte.

from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.text.corpora import load_split


@torch.no_grad()
def bits_per_byte(model, texts):
    nats = n_bytes = 0.0
    for text in texts:
        ids = torch.tensor([tokenizer.start(text)])
        logits = model(ids)[0, :-1]
        nats += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        n_bytes += len(text.encode())
    return nats / n_bytes / math.log(2)


def sdpa_with_tiles(q, k, v, visibility, dropout=0.0):
    k, v = tile_kv(k, q.shape[1]), tile_kv(v, q.shape[1])
    return sdpa_attention(q, k, v, visibility)


held_out = [d.text[:1000] for d in load_split(["reference"], 0.05)[1]]
bits = {}
for name, attend in (("right", sdpa_attention), ("tiled", sdpa_with_tiles)):
    for layer in trained.model.layers:
        layer.self_attn.attend = attend
    bits[name] = bits_per_byte(trained, held_out)
    print(f"{name}: {bits[name]:.2f} bits per byte")
assert bits["right"] + 0.1 < bits["tiled"] < bits["right"] + 0.6

# %%
# The model is worse, not broken. That is why this mistake can live for a long time.
#
# Which sentence is false?
# ------------------------
#
# 1. A bias on the values adds the same vector to the output of every token.
# 2. With :math:`I = \tfrac{8}{3} C`, a gated MLP has as many weights as two matrices with 4C features.
# 3. The matrices of a new Qwen2 are drawn from a standard normal distribution.
# 4. Permuting the I features of all three matrices alike leaves a gated MLP as it is.

torch.manual_seed(0)
new = Qwen2ForCausalLM(Qwen2Config(**sizes, n_kv_head=Hkv))
drawn = torch.cat([t.flatten() for t in new.parameters() if t.dim() == 2])
moved = effect("v", rotation)[real == 1]
answers = [
    torch.allclose(moved, moved[:1].expand_as(moved), atol=5e-5),
    3 * 768 * 2048 == 2 * 768 * (4 * 768),
    abs(drawn.std().item() - 1) < 0.5,
    torch.allclose(permuted, by_hand, atol=5e-5),
]
print(answers)
print(f"mean {drawn.mean():.3f}, standard deviation {drawn.std():.3f}")
assert answers == [True, True, False, True]
assert abs(drawn.std() - 0.02) < 0.001
for name, t in new.named_parameters():
    assert t.dim() == 2 or (t == float("norm" in name)).all()

# %%
# The third is false: the standard deviation is 0.02, biases start at 0 and norm weights at 1.
#
# Exercises
# ---------
#
# 1. *Easy.* Replace silu by ReLU, by GELU, and by the identity in ``mlp_by_hand``. A right answer names the two with which
#    2 x gives exactly four times the result of x, and the one of them with which -x gives the result of x. Hint: write
#    the product for a single feature.
# 2. *Easy.* By the argument of this page, the key biases of GPT-2 have no effect. Set them to zero in the model of
#    ``load_shipped()``. A right answer shows logits equal to 1e-4, and the same experiment on ``load_shipped("qwen2-docs")``
#    with logits that move. Hint: ``c_attn`` holds queries, keys and values side by side.
# 3. *Hard.* Compute scores with Hkv key heads without repeating them in memory. A right answer equals
#    ``formula_attention`` to 1e-5 and never makes a tensor with H heads and S keys except the weights. Hint: give q the axes
#    (B, Hkv, H / Hkv, T, D).
#
# Summary
# -------
#
# * SwiGLU multiplies one linear map by the silu of another. Ten times a large state gives a hundred times the
#   result; the norm before it keeps states at one size.
# * Qwen2's inner width is more than 5 C, about twice what GPT-2's cost would allow.
# * Gate and up have one shape. Swapped, they compute something else.
# * Query head h reads key head h Hkv / H, rounded down. For the smallest Qwen2, the cache of 32,768 tokens takes 0.375 GiB
#   instead of 2.625.
# * A value bias moves all outputs alike. A key bias does nothing without rotation.
# * In the trained model the state of later tokens grows more than sixtyfold from the embedding to the last block.
# * The assembled block equals the one of ``transformers`` in value, and in thirteen gradients to a relative 1e-4.
# * Tiled key heads are right for Hkv = 1 and Hkv = H. Test between these two.
#
# Sources
# -------
#
# * Shazeer: `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_, 2020. SwiGLU, and the width 8/3 C.
# * Dauphin et al.: `Language Modeling with Gated Convolutional Networks <https://arxiv.org/abs/1612.08083>`_, 2016. The gated linear unit.
# * Ainslie et al.: `GQA <https://arxiv.org/abs/2305.13245>`_, 2023. Grouped heads, and how to make them from a trained model.
# * Xiong et al.: `On Layer Normalization in the Transformer Architecture <https://arxiv.org/abs/2002.04745>`_, 2020. Norms before or after a layer.
# * Xiao et al.: `Efficient Streaming Language Models with Attention Sinks <https://arxiv.org/abs/2309.17453>`_, 2023. The special first token.
# * Yang et al.: `Qwen2 Technical Report <https://arxiv.org/abs/2407.10671>`_, 2024.
# * The block of ``transformers``: `modeling_qwen2.py <https://github.com/huggingface/transformers/blob/main/src/transformers/models/qwen2/modeling_qwen2.py>`_.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
