r"""
GPT-2 in depth: is yours right?
===============================

A wrong language model rarely crashes. It writes fluent text that is a little worse than it should be. In the model
below one part is switched off. Can you tell which, from what it writes?

.. live:: break
   :model: gpt2-docs

Comparing numbers is easier than reading text, if you compare the right ones. This page deepens the lesson
`from token ids to the next word <2_gpt2.ipynb>`_. It compares a GPT-2 with ``transformers``, module by module. It damages the
model in many ways, and measures which test notices. And it counts parameters and multiplications of the published sizes.

Two models with random weights
------------------------------

``transformers`` builds a GPT-2 with V = 97, C = 32, H = 4, three blocks, and room for 32 tokens. Nothing is downloaded.
In one version the weights are drawn with standard deviation 0.25, in the other with 0.02, as before training.
"""

# sphinx_gallery_words = ["FLOPs", "parameter count", "weight tying", "GELU", "initialisation", "Conv1D", "tie weights", "tie_weights", "tie_word_embeddings", "number of parameters", "n_embd", "n_head", "view", "reshape", "contiguous", "unit test", "regression test", "tolerance", "assert_close", "position_ids", "left padding", "tiny random model", "torch.allclose", "compare with transformers", "logits differ", "is my implementation right", "test my implementation", "debug a model", "verify a model", "is my code right", "has my code a bug", "find a bug", "check my implementation", "test against a reference", "is my transformer correct"]
# sphinx_gallery_museum = ["G16"]
import copy
import math
import tempfile

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.checkpoint.weights import from_pretrained
from lm_from_scratch.instruments.record import record_attention
from lm_from_scratch.layers.activation import gelu, gelu_new
from lm_from_scratch.layers.layer_norm import LayerNorm, layer_norm
from lm_from_scratch.models.gpt2 import Block
from lm_from_scratch.models.randomize import randomize_

torch.set_grad_enabled(False)
transformers.utils.logging.disable_progress_bar()


def random_gpt2(folder, std):
    sizes = dict(n_layer=3, n_head=4, n_embd=32)
    sizes |= dict(vocab_size=97, n_positions=32)
    no_ids = dict(bos_token_id=None, eos_token_id=None)
    config = transformers.GPT2Config(**sizes, **no_ids)
    model = transformers.GPT2LMHeadModel(config).eval()
    randomize_(model, std=std)
    model.save_pretrained(folder)
    return model


folder = tempfile.TemporaryDirectory()
oracle = random_gpt2(f"{folder.name}/large", std=0.25)
random_gpt2(f"{folder.name}/small", std=0.02)
models = {
    std: from_pretrained(f"{folder.name}/{name}")
    for std, name in ((0.25, "large"), (0.02, "small"))
}
model = models[0.25]

# %%
# The same modules, compared
# --------------------------
#
# The model of ``transformers`` is the oracle, and runs once. Hooks keep what leaves each of its modules. The function
# ``check`` allows an absolute error of 5e-5, in float32.


def listen(model, idx):
    left = {}

    def keep(name):
        def hook(module, args, result):
            left[name] = result[0] if isinstance(result, tuple) else result

        return hook

    hooks = [
        module.register_forward_hook(keep(name))
        for name, module in model.transformer.named_modules()
        if name
    ]
    result = model(idx)
    for hook in hooks:
        hook.remove()
    return result, left


def check(name, ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0.0)
    error = (ours - theirs).abs().max().item()
    print(f"{name:16} {tuple(ours.shape)!s:15} largest error {error:.0e}")


generator = torch.Generator().manual_seed(1)
idx = torch.randint(0, 97, (2, 11), generator=generator)  # (B, T)
expected, of_oracle = listen(oracle, idx)
expected = expected.logits
logits, of_model = listen(model, idx)
for part in ("h.0.ln_1", "h.0.attn.c_attn", "h.0.attn", "h.0.mlp", "h.2"):
    check(part, of_model[part], of_oracle[part])
check("logits", logits, expected)

common = [name for name in of_oracle if name in of_model]
assert len(common) >= 3 * 9
for name in common:
    both = of_model[name], of_oracle[name]
    torch.testing.assert_close(*both, atol=5e-5, rtol=0.0)
assert transformers.GPT2Config().initializer_range == 0.02

# %%
# The first module that differs is the wrong one. Where modules have other names, the tensors of the file are enough. This is
# GPT-2 for a batch. The file stores matrices as (in, out), so the state is on the left of each product.

w = load_file(f"{folder.name}/large/model.safetensors")
w = {name.removeprefix("transformer."): w[name] for name in w}


def gpt2(idx, w, n_layer, n_head):
    B, T = idx.shape
    x = w["wte.weight"][idx] + w["wpe.weight"][:T]  # (B, T, C)
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    for i in range(n_layer):
        p = {name.removeprefix(f"h.{i}."): w[name] for name in w}
        h = layer_norm(x, p["ln_1.weight"], p["ln_1.bias"])
        qkv = h @ p["attn.c_attn.weight"] + p["attn.c_attn.bias"]
        q, k, v = qkv.view(B, T, 3, n_head, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # (B, H, T, T)
        a = scores.masked_fill(later, -torch.inf).softmax(-1)
        y = (a @ v).transpose(1, 2).reshape(x.shape)
        x = x + y @ p["attn.c_proj.weight"] + p["attn.c_proj.bias"]
        h = layer_norm(x, p["ln_2.weight"], p["ln_2.bias"])
        h = gelu_new(h @ p["mlp.c_fc.weight"] + p["mlp.c_fc.bias"])
        x = x + h @ p["mlp.c_proj.weight"] + p["mlp.c_proj.bias"]
    x = layer_norm(x, w["ln_f.weight"], w["ln_f.bias"])
    return x @ w["wte.weight"].T


logits = gpt2(idx, w, n_layer=3, n_head=4)
check("logits", logits, expected)

# %%
# One forward pass scores the successor of every token. This is sound because the future is hidden: with other tokens
# from place 6 on, the scores at places 0 to 5 stay what they were.

changed = idx.clone()
changed[:, 6:] = (changed[:, 6:] + 1) % 97
moved = gpt2(changed, w, n_layer=3, n_head=4) - logits
moved = moved.abs().amax((0, 2))  # (T,)
assert moved[:6].max() < 5e-5 < 0.1 < moved[6:].min()

# %%
# Three passes
# ------------
#
# A text must get the same logits alone, in a padded batch, in pieces through a cache, or packed after another text.
# The model needs only the positions for that, and a number for each document where several share a row.
#
# First padding: row 0 loses its first four tokens to padding, and row 1 is complete.

attention_mask = torch.ones(2, 11, dtype=torch.long)
attention_mask[0, :4] = 0
positions = positions_from_mask(attention_mask)
print(positions)

alone = oracle(idx[:1, 4:]).logits[0]
batch = model(idx, positions=positions)
check("padded row", batch[0, 4:], alone)
check("full row", batch[1], expected[1])

# %%
# Then a cache: the text comes in pieces of 5, 1, 3 and 2 tokens. The cache knows how many it has seen, so the new
# tokens continue at the right place.

pieces = idx.split([5, 1, 3, 2], dim=1)
cache = GrowingCache(n_layer=3)
answers = [model(piece, cache=cache) for piece in pieces]
check("pieces", torch.cat(answers, dim=1), expected)

# %%
# Then two documents in one row. The second one starts again at position 0 and does not see the first.

packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]])
documents = torch.tensor([[0] * 5 + [1] * 6])
row = model(idx[:1], positions=packed, documents=documents)
check("document 0", row[0, :5], model(idx[:1, :5])[0])
check("document 1", row[0, 5:], model(idx[:1, 5:])[0])

# %%
# What each part is worth
# -----------------------
#
# How much do the logits move when a part is removed or wrong? Each damage sets one attribute of one kind of part in a
# copy of the built model: a function, a ``forward``, or the class. Replacing the class of a built module replaces its
# ``forward`` and keeps its weights.


def unscaled(q, k, v, visibility, dropout=0.0):
    return formula_attention(q * math.sqrt(q.shape[-1]), k, v, visibility)


def see_everything(q, k, v, visibility, dropout=0.0):
    return F.scaled_dot_product_attention(q, k, v)


class NoResidual(Block):
    def forward(self, x, visibility, cache):
        x = self.attn(self.ln_1(x), visibility, cache)
        return self.mlp(self.ln_2(x))


class PostNorm(Block):
    def forward(self, x, visibility, cache):
        x = self.ln_1(x + self.attn(x, visibility, cache))
        return self.ln_2(x + self.mlp(x))


class EpsilonOutside(LayerNorm):
    def forward(self, x):
        std, mean = torch.std_mean(x, -1, correction=0, keepdim=True)
        return (x - mean) / (std + self.eps) * self.weight + self.bias


damages = {
    "no position embedding": ("wpe", "forward", lambda positions: 0.0),
    "no causal mask": ("h.{}.attn", "attend", see_everything),
    "no residual": ("h.{}", "__class__", NoResidual),
    "norm after the sum": ("h.{}", "__class__", PostNorm),
    "no final norm": ("ln_f", "forward", lambda x: x),
    "no 1/sqrt(D)": ("h.{}.attn", "attend", unscaled),
    "gelu for gelu_new": ("h.{}.mlp", "act", F.gelu),
    "epsilon outside root": ("h.{}.ln_1", "__class__", EpsilonOutside),
}

# %%
# For both models, the table shows the largest movement of a logit and the share of the 22 tokens whose most likely
# successor stays the same.


def damaged_copy(model, path, attribute, value):
    model = copy.deepcopy(model)
    for i in range(len(model.transformer.h)):
        part = model.transformer.get_submodule(path.format(i))
        setattr(part, attribute, value)
    return model


block = model.transformer.h[0]
copied = damaged_copy(model, *damages["no residual"]).transformer.h[0]
assert copied.forward.__func__ is NoResidual.forward
for ours, theirs in zip(copied.parameters(), block.parameters(), strict=True):
    assert torch.equal(ours, theirs)

moved, same = {}, {}
print(f"{'':24}{'std 0.25':>16}{'std 0.02':>17}")
print(f"{'':24}{'moved':>8}{'same':>8}{'moved':>9}{'same':>8}")
for name, damage in damages.items():
    line = f"{name:23}"
    for std, whole in models.items():
        before, after = whole(idx), damaged_copy(whole, *damage)(idx)
        moved[name, std] = (after - before).abs().max().item()
        equal = after.argmax(-1) == before.argmax(-1)  # (B, T)
        same[name, std] = equal.float().mean().item()
        line += f"{moved[name, std]:9.2g}{same[name, std]:8.0%}"
    print(line)

spread = {std: whole(idx).std().item() for std, whole in models.items()}
print(f"standard deviation{spread[0.25]:14.2g}{spread[0.02]:17.2g}")

# %%
# With large weights every damage moves a logit by at least four times the tolerance of this page. With small weights
# the wrong GELU stays below the tolerance.
#
# The logits of the small model are smaller themselves, so compare with their standard deviation in the last line. The
# missing root moves a logit by more than that with large weights. With small ones it moves a logit by less than a
# fiftieth of it, and every next token stays the same.

assert all(moved[name, 0.25] > 4 * 5e-5 for name in damages)
assert moved["gelu for gelu_new", 0.02] < 5e-5
assert moved["no 1/sqrt(D)", 0.25] > spread[0.25]
assert moved["no 1/sqrt(D)", 0.02] < spread[0.02] / 50
assert same["no 1/sqrt(D)", 0.02] == 1.0

# %%
# The reason is that scores are products of two small vectors. Every softmax of the small model is nearly uniform, so
# its attention is a plain mean whatever the scores are.

uniform = torch.ones(11, 11).tril() / torch.arange(1, 12)[:, None]
for std, whole in models.items():
    with record_attention(whole) as maps:
        whole(idx)
    distance = max((layer[0] - uniform).abs().max() for layer in maps)
    print(f"std {std}: largest distance from a plain mean {distance:.2f}")
    assert distance > 0.5 if std == 0.25 else distance < 0.05

# %%
# The table shows two more things. Next tokens are a poor test: without the final norm a logit moves by more than 10,
# and most of the most likely successors are still the same.
#
# Large weights are not the answer to everything. The last damage moves a logit *more* with small weights, because
# there the variance comes close to epsilon. A norm needs a test with small inputs.

assert moved["no final norm", 0.25] > 10
assert same["no final norm", 0.25] > 0.5
assert moved["epsilon outside root", 0.02] > moved["epsilon outside root", 0.25]

# %%
# Two versions of GELU
# --------------------
#
# GELU multiplies u by the probability that a standard normal variable is below u. GPT-2 was trained with an
# approximation of it, and the checkpoint's config says so: ``gelu_new``.
#
# .. math::
#
#    \operatorname{gelu}(u) &= \tfrac{u}{2} \left( 1 + \operatorname{erf}(u / \sqrt{2}) \right) \\
#    \operatorname{gelu\_new}(u) &= \tfrac{u}{2} \left( 1 + \tanh \left( \sqrt{2 / \pi} \, (u + 0.044715 \, u^3) \right) \right)

u = torch.linspace(-5, 5, 1001, dtype=torch.float64)
difference = gelu_new(u) - gelu(u)
largest, at = difference.abs().max(dim=0)
print(f"largest difference {largest:.1e} at u = {u[at]:.1f}")
assert 4e-4 < largest < 5e-4

# %%
# That seems little. It is enough to fail a comparison at our tolerance.
#
# The head is the embedding
# -------------------------
#
# After a last LayerNorm, the score of vocabulary entry j is the dot product of the state with row j of ``wte``. The
# file has no other matrix for the head, and the oracle uses one tensor for both.
#
# .. math::
#
#    \operatorname{logits}_{tj} = \operatorname{LayerNorm}(x_t) \cdot W_e[j]

final = layer_norm(of_oracle["h.2"], w["ln_f.weight"], w["ln_f.bias"])
check("logits", final @ w["wte.weight"].T, expected)
assert len(w) == 4 + 3 * 12 and not any("head" in name for name in w)
assert oracle.lm_head.weight is oracle.transformer.wte.weight

# %%
# Where the parameters are
# ------------------------
#
# A block has :math:`3C^2 + C^2` weights in attention and :math:`4C^2 + 4C^2` in the MLP. Its biases and its two
# norms have 13C numbers. With P positions and L blocks:
#
# .. math::
#
#    N = V C + P C + L \, (12 C^2 + 13 C) + 2 C
#
# On torch's ``meta`` device, tensors have a shape but no memory, so the largest GPT-2 can be built and counted here.


from lm_from_scratch.models.gpt2 import SIZES, GPT2Config, GPT2LMHeadModel


def empty_model(size):
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(**SIZES[size])).eval()


V, P = 50257, 1024
empty_models = {size: empty_model(size) for size in SIZES}
published = [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]
for (size, numbers), count in zip(SIZES.items(), published):
    L, C = numbers["n_layer"], numbers["n_embd"]
    counted = sum(p.numel() for p in empty_models[size].parameters())
    by_formula = V * C + P * C + L * (12 * C**2 + 13 * C) + 2 * C
    assert counted == by_formula == count
    print(f"{size:12} L {L:2}  C {C:4}  parameters {counted:13,}")

# %%
# The formula is exact for all four published sizes: 124, 355, 774 and 1558 million. H does not occur in it.
#
# The multiplications are counted in the same way. A matrix with n weights costs n multiply-adds for each token.
# Scores and means in attention cost :math:`2 T^2 C` more in each block, if the hidden half is computed as well.
#
# .. math::
#
#    M = T \, (12 C^2 L + V C) + 2 T^2 C L
#
# Torch's own counter watches the matrix products of a forward pass and reports two operations per multiply-add.

from torch.utils.flop_counter import FlopCounterMode

from lm_from_scratch.attention.kinds import use_attention_

T = 1024
for size, numbers in SIZES.items():
    L, C = numbers["n_layer"], numbers["n_embd"]
    empty = empty_models[size]
    use_attention_(empty, "formula")
    with FlopCounterMode(display=False) as counter:
        empty(torch.zeros(1, T, dtype=torch.long, device="meta"))
    multiplied = T * (12 * C**2 * L + V * C) + 2 * T**2 * C * L
    assert counter.get_total_flops() == 2 * multiplied
    parameters = V * C + P * C + L * (12 * C**2 + 13 * C) + 2 * C
    embeddings = (V * C + P * C) / parameters
    quadratic = 2 * T**2 * C * L / multiplied
    print(f"{size:12} embeddings {embeddings:.0%} of the parameters, ", end="")
    print(f"T² part {quadratic:.0%} of the multiply-adds")
    assert quadratic < 1 / 7 and embeddings < 1 / 3

# %%
# Embeddings hold almost a third of the small model and about a twentieth of the largest. At 1024 tokens the :math:`T^2` part
# is less than a seventh of the work in all four. It overtakes the weights of a block when :math:`2 T^2 C > 12 T C^2`, that is
# beyond T = 6C: for the smallest GPT-2, 4608 tokens, more than four times the length that it can read.

assert 0.04 < embeddings < 0.06
assert 6 * SIZES["gpt2"]["n_embd"] == 4608 > 4 * P

# %%
# Bug museum
# ----------
#
# A mask of -10000
# ~~~~~~~~~~~~~~~~
#
# A user trained a GPT-2 and printed its scores. Many were below -10000, the number that hid the future. So the model
# had learned to push down the scores of the past, until the tokens that it must not see got the weight. (G25)
#
# The published code of GPT-2 replaces a hidden score: it multiplies by 0 and subtracts 1e10. Later programs wrote
# -10000, some as a replacement, some as a term that is added to the score. Neither hides a key once the scores are that
# large.
#
# Here the weights of ``c_attn`` grow, and the scores grow with the square of the factor. Row 0 is padded as before, and
# we put other tokens into its padding. The real tokens must not notice.


def write_minimum(scores, hidden):
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min)


masks = {
    "add -10000": lambda scores, hidden: scores - 10000.0 * hidden,
    "write -10000": lambda scores, hidden: scores.masked_fill(hidden, -10000.0),
    "write the minimum": write_minimum,
}


def attend_with(mask):
    def attend(q, k, v, visibility, dropout=0.0):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return mask(scores, ~visibility.mask).softmax(-1) @ v

    return attend


other = idx.clone()
other[0, :4] = (other[0, :4] + 50) % 97
noticed = {}
for name, mask in masks.items():
    for factor in (1, 100):
        grown = damaged_copy(model, "h.{}.attn", "attend", attend_with(mask))
        for block in grown.transformer.h:
            block.attn.c_attn.weight.mul_(factor)
        change = (
            grown(other, positions=positions) - grown(idx, positions=positions)
        )[0, 4:]
        noticed[name, factor] = change.abs().max().item()
    ordinary, large = noticed[name, 1], noticed[name, 100]
    print(f"{name:18} factor 1: {ordinary:.1f}   factor 100: {large:.1f}")

assert all(noticed[name, 1] == 0.0 for name in masks)
assert noticed["add -10000", 100] > 0.5
assert noticed["write -10000", 100] > 0.5
assert noticed["write the minimum", 100] == 0.0

# %%
# With ordinary weights all three are right, so an ordinary test passes. The last one is the fixed line, and it is
# the one in ``attention_weights`` of this package: no score lies below the most negative number.
#
# Padding that is hidden and still counted
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A mask alone is not enough. If the padding is hidden but still counted, every real token is read at a wrong place.
# The forward pass of ``transformers`` counts this way when it gets no ``position_ids``. Its ``generate`` makes them
# from the mask, so the two disagreed, and a user noticed. (G5)

given = dict(attention_mask=attention_mask)
mask_only = oracle(idx, **given).logits[0, 4:]
error = (mask_only - alone).abs().max()
print(f"mask only: a logit is off by {error:.1f}")
assert error > 1

given["position_ids"] = positions.clamp(min=0)
check("with positions", oracle(idx, **given).logits[0, 4:], alone)

# %%
# Positions that start again
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# With a cache the model receives only the new tokens. Code that looks up ``torch.arange(T)`` then gives the second
# piece of a text the positions of the first. A hook puts this mistake into a copy of the model. (G4)


def start_again(module, args):
    return (torch.arange(args[0].shape[1])[None],)


restarting = copy.deepcopy(model)
restarting.transformer.wpe.register_forward_pre_hook(start_again)

full_error = (restarting(idx) - expected).abs().max().item()
wanted = expected.split([5, 1, 3, 2], dim=1)
cache = GrowingCache(n_layer=3)
errors = [
    (restarting(piece, cache=cache) - part).abs().max().item()
    for piece, part in zip(pieces, wanted)
]
print(f"full pass {full_error:.1f}, pieces", *(f"{e:.1f}" for e in errors))
assert full_error < 5e-5
assert errors[0] < 5e-5
assert min(errors[1:]) > 1

# %%
# The full pass and the first piece are right, and everything after them is wrong. The fixed line belongs to the
# cache, which knows its own length: after eleven tokens, the next three have the positions 11, 12 and 13.

from lm_from_scratch.cache.interface import place

place(torch.zeros(1, 3), positions=None, start=cache.length)

# %%
# Now the three passes as one function, for the right model and for both mistakes.


def hidden_but_counted(idx, positions=None, cache=None):
    if positions is not None:
        places = torch.arange(idx.shape[1])
        positions = torch.where(positions < 0, -1, places)
    more = {} if cache is None else dict(cache=cache)
    return model(idx, positions=positions, **more)


def three_passes(call):
    cache = GrowingCache(n_layer=3)
    answers = [call(piece, cache=cache) for piece in pieces]
    errors = (
        call(idx) - expected,
        call(idx, positions=positions)[0, 4:] - alone,
        torch.cat(answers, dim=1) - expected,
    )
    return [error.abs().max().item() for error in errors]


suspects = dict(right=model, G4=restarting, G5=hidden_but_counted)
found = {name: three_passes(call) for name, call in suspects.items()}
print(f"{'':6}{'full':>8}{'padded':>8}{'pieces':>8}")
for name, errors in found.items():
    print(f"{name:6}", "".join(f"{error:8.1f}" for error in errors))

wrong = {name: [e > 1 for e in errors] for name, errors in found.items()}
assert wrong["right"] == [False, False, False]
assert wrong["G4"] == [False, True, True]
assert wrong["G5"] == [False, True, False]
assert max(found["right"]) < 5e-5

# %%
# One full pass finds neither mistake, and one without padding does not see G5. Always run three: a full pass, one with
# left padding, and one in uneven pieces through a cache.
#
# Exercises
# ---------
#
# 1. *Easy.* Old checkpoints store the causal triangle as ``h.0.attn.bias``. A popular filter drops every name that
#    ends in ``attn.bias``. Apply it to the names of ``model.state_dict()``: which ones go? Set these tensors to zero
#    and measure how far the logits move. Hint: this is G16; ``CONSTANTS`` in ``checkpoint/weights.py``
#    shows a filter that is right.
# 2. *Medium.* Add a damage to the table: ``view(B, H, T, D)`` without ``transpose``. Hint: write an ``Attention`` with
#    a wrong ``forward``, like ``NoResidual``. A good answer says how far the logits move, and whether a token still
#    sees only its past.
# 3. *Hard.* With a window of W keys, how many tokens back can a model of L blocks look? Run the three blocks with
#    ``Visibility(plain, plain, window=2)``, where ``plain`` is ``torch.arange(11)[None]``, and take the gradient of the last
#    state with respect to the embeddings. Hint: each block is called as ``block(x, visibility, NO_CACHE)`` inside
#    ``torch.enable_grad()``. A good answer names the formula and shows the first token whose gradient is exactly 0.
#
# Summary
# -------
#
# * Test with large weights: with small ones every softmax is nearly uniform, and wrong scores leave no trace. A norm
#   needs small inputs, too.
# * Compare logits, not next tokens. Most of them survive a missing norm.
# * Three passes find what a full one does not: left-padded, and in pieces. With a mask but without positions, a logit
#   is off by more than 1.
# * The four published sizes have 124,439,808, 354,823,168, 774,030,080 and 1,557,611,200 parameters. The :math:`T^2` part
#   of attention overtakes the weights of a block beyond T = 6C.
#
# Sources
# -------
#
# * Radford et al.: `the published code of GPT-2 <https://github.com/openai/gpt-2/blob/master/src/model.py>`_, 2019.
# * Vaswani et al.: `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, 2017.
# * Hendrycks, Gimpel: `Gaussian Error Linear Units <https://arxiv.org/abs/1606.08415>`_, 2016.
# * Press, Wolf: `Using the Output Embedding to Improve Language Models <https://arxiv.org/abs/1608.05859>`_, 2016. One matrix for both ends.
# * G25 in the wild: `a GPT-2 that sees its future <https://github.com/huggingface/transformers/issues/15199>`_ and `the repair <https://github.com/huggingface/transformers/pull/17306>`_.
# * G5 in the wild: `logits with and without position_ids <https://github.com/huggingface/transformers/issues/18388>`_.

import platform

import lm_from_scratch

folder.cleanup()
print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
