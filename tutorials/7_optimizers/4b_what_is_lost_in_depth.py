r"""
Updates in backward: what is kept and what is lost, in depth
============================================================

The lesson `one gradient at a time <4_in_backward.ipynb>`_ takes optimizer steps inside the backward pass. Is the result
always that of the ordinary loop, and what can no longer be done?

Equal, bit for bit
------------------

This is the lesson's loop. Values do not matter here, so random tokens will do.
"""

# sphinx_gallery_words = ["register_post_accumulate_grad_hook", "LOMO", "clip_grad_norm_", "GradScaler", "fused optimizer step", "No inf checks were recorded", "modified by an inplace operation"]
import inspect
import math
from contextlib import nullcontext

import torch

from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.choose import make_optimizer
from lm_from_scratch.optim.in_backward import update_in_backward
from lm_from_scratch.runs.config import TrainConfig
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss

MB = 1e6


def fresh_model(tied=False, n_layer=4):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2000,
        block_size=64,
        n_layer=n_layer,
        n_head=4,
        n_kv_head=2,
        n_embd=128,
        intermediate_size=352,
        tie_word_embeddings=tied,
        initializer_range=0.05,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def tokens(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2000, (rows, 16), generator=generator)  # (B, T)


def loss_of(model, idx):
    return causal_lm_loss(model(idx), next_token_targets(idx))


def adamw(model):
    return AdamW(model.parameters(), fused=True)


def galore(model, rank=16, **options):
    """The matrices of the blocks are projected."""
    config = TrainConfig(steps=1, optimizer="galore", rank=rank, **options)
    return make_optimizer(model, config)


def size(tensors):
    return sum(x.nbytes for x in tensors)


model = fresh_model()
optimizers = {p: AdamW([p]) for p in model.parameters()}


def update(p):
    optimizers[p].step()
    p.grad = None


for p in model.parameters():
    p.register_post_accumulate_grad_hook(update)

for step in range(3):
    loss_of(model, tokens(2, step)).backward()

# %%
# That was the whole training loop. Here is the ordinary one, for comparison.


def ordinary_loop(model, optimizer, steps):
    for step in range(steps):
        loss_of(model, tokens(2, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def same(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


reference = fresh_model()
ordinary_loop(reference, AdamW(reference.parameters()), 3)
assert same(model, reference) and not same(model, fresh_model())

# %%
# The weights are equal bit for bit: as the lesson explains, a weight has served the backward pass for the last time when
# its hook runs. A weight that is used twice, as a tied embedding is, has a complete gradient only after both uses.
#
# Autograd, PyTorch's machine for gradients, guards this rule. It raises if a weight that is still needed was changed in
# place.

broken = fresh_model()
first_block = broken.model.layers[0]


def too_early(_):
    first_block.mlp.up_proj.weight.mul_(0.9)


broken.lm_head.weight.register_post_accumulate_grad_hook(too_early)
try:
    loss_of(broken, tokens(2)).backward()
except RuntimeError as error:
    noticed = str(error).split(":")[0]
print(noticed)
assert "inplace operation" in noticed

# %%
# The package's version
# ---------------------
#
# One optimizer for each weight makes schedulers and checkpoints awkward. The package keeps one optimizer and makes the
# change a context. It also counts passes, for a later section.

print(inspect.getsource(update_in_backward.after))

# %%
# Inside the context the loop can stay as it is: ``optimizer.step()`` finds no gradients and does nothing. Equality
# again, with AdamW and GaLore, head tied and not, over a change of the basis.


def short_gap(model):
    return galore(model, update_proj_gap=2)


for make in (adamw, short_gap):
    for tied in (False, True):
        ends = []
        for inside in (False, True):
            model = fresh_model(tied, n_layer=2)
            optimizer = make(model)
            with update_in_backward(optimizer) if inside else nullcontext():
                ordinary_loop(model, optimizer, 4)
            ends.append(model)
        equal = same(*ends)
        print(f"{type(optimizer).__name__:6} tied {tied!s:5} equal {equal}")
        assert equal

# %%
# Several batches, one step
# -------------------------
#
# A cure for large activations is *gradient accumulation*: run small parts of a batch one after another, and step from
# the sum of their gradients. The lesson's hook steps at once and takes four steps for four parts. Real code did so, too:
# `a user found it <https://github.com/jiaweizzhao/GaLore/issues/78>`_ in the code published with GaLore.

data = [tokens(2, seed) for seed in range(4)]


def distance(model):
    pairs = zip(model.parameters(), fresh_model(n_layer=2).parameters())
    return torch.stack([(p - q).norm() for p, q in pairs]).norm().item()


def four_parts(passes):
    """One batch in four parts, with a step in every ``passes``-th."""
    model = fresh_model(n_layer=2)
    with update_in_backward(adamw(model), passes):
        for part in data:
            (loss_of(model, part) / 4).backward()
    return model


reference = fresh_model(n_layer=2)
optimizer = adamw(reference)
for part in data:
    (loss_of(reference, part) / 4).backward()
optimizer.step()

ratio = distance(four_parts(passes=1)) / distance(reference)
print(f"a step in every pass: the weights move {ratio:.1f} times as far")
assert ratio > 1.5
assert same(four_parts(passes=4), reference)

# %%
# With ``update_in_backward(optimizer, 4)`` the passes are counted, and the result is that of the ordinary loop, bit for
# bit. But now the full gradients live between the passes, and nothing is saved there.
#
# GaLore can do better. The projection is linear, so the sum of projections is the projection of the sum:
#
# .. math::
#
#    P^\top G_1 Q + P^\top G_2 Q = P^\top (G_1 + G_2) \, Q
#
# The full gradient of each part is projected and freed. What waits for the next part has the size of a moment, as the
# bytes `between two passes <4a_training_memory_in_depth.ipynb>`_ show.
#
# Is it the same step? In float64, with a basis that was made before, up to rounding:

ends = []
for inside in (False, True):
    model = fresh_model(n_layer=2).double()
    optimizer = galore(model)
    loss_of(model, data[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    with update_in_backward(optimizer, 2) if inside else nullcontext():
        for part in data[1:3]:
            loss_of(model, part).backward()
        optimizer.step()
    ends.append(torch.cat([p.flatten() for p in model.parameters()]))
print(f"largest difference {(ends[0] - ends[1]).abs().max().item():.0e}")
torch.testing.assert_close(*ends, rtol=1e-7, atol=1e-9)

# %%
# One thing differs. A step that needs a new basis makes it from the gradient of the *first* pass, because the sum does
# not exist yet. How much of the sum does such a basis capture? The gradients are now those of a trained model on real
# text, in four parts of 256 tokens.

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.optim.galore_basis import (
    captured_energy,
    project,
    singular_basis,
)
from lm_from_scratch.text.corpora import load_corpus, split

shipped, tokenizer = load_shipped("qwen2-docs")
documents = split(load_corpus("reference"))[0]
text = next(d.text for d in documents if len(d.text) > 10_000)
ids = tokenizer.encode(text)[:1024]
real = torch.tensor(ids).view(4, 2, 128)  # four parts (B, T)
params = list(shipped.parameters())
gradients = [
    torch.autograd.grad(loss_of(shipped, part), params) for part in real
]

name_of = {p: name for name, p in shipped.named_parameters()}
print("energy of the sum, rank 16         first pass   the sum itself")
for p, *grads in zip(params, *gradients):
    if ".3." not in name_of[p] or p.dim() < 2:
        continue
    share = []
    for g in (grads[0], sum(grads)):
        tall = g.shape[0] >= g.shape[1]
        basis = singular_basis(g, 16, not tall, tall)
        low = project(sum(grads), *basis)
        share.append(captured_energy(low, sum(grads)).item())
    name = name_of[p].removeprefix("model.layers.")
    print(f"{name:36} {share[0]:6.2f} {share[1]:12.2f}")
    assert 0.3 * share[1] < share[0] < share[1] < 1.0

# %%
# The basis of one part is worse, and still useful: it sees a part of the same text. It is used for the rest of the
# gap, against gradients that it has not seen either.
#
# What is lost
# ------------
#
# The norm of all gradients
# ~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Clipping shortens a gradient that is too long. The factor is the same for all weights, so the direction stays:
#
# .. math::
#
#    g \leftarrow g \cdot \min \left( 1, \frac{c}{\lVert g \rVert} \right)
#
# A hook comes too early to know the norm of all gradients. It could clip each gradient by its own norm, but that is
# something else.


def flat(tensors):
    return torch.cat([x.flatten() for x in tensors])


grads = gradients[0]
g = flat(grads)
c = g.norm() / 8
by_all = g * c / g.norm()
by_own = flat([x * (c / x.norm()).clamp(max=1.0) for x in grads])
for name, x in (("all together", by_all), ("each alone", by_own)):
    cosine = (x @ g / x.norm() / g.norm()).item()
    print(f"{name:12}: norm {x.norm() / c:.2f} c, cosine {cosine:.3f}")
torch.testing.assert_close(by_all.norm(), c)
assert by_own.norm() > 1.5 * c and cosine < 0.99

# %%
# Clipped alone, the result is longer than c, and it points elsewhere: large gradients were cut, small ones were not.
# Training in this package refuses the combination instead of doing something similar.

try:
    TrainConfig(steps=200, update_in_backward=True)
except ValueError as error:
    refusal = str(error)
print(refusal)

# %%
# The exact norm can be bought with a second forward and backward pass, which is the way of LOMO (see the sources). The
# first one only measures. The loss of the second carries the factor, and with it every gradient. Dropout must draw the
# same random numbers in both.


def clipped_step(model, optimizer, idx, c):
    squares = []

    def measure(p):
        squares.append(p.grad.square().sum())
        p.grad = None

    hooks = [
        p.register_post_accumulate_grad_hook(measure)
        for p in model.parameters()
    ]
    loss_of(model, idx).backward()
    for hook in hooks:
        hook.remove()
    norm = torch.stack(squares).sum().sqrt()
    with update_in_backward(optimizer):
        (loss_of(model, idx) * (c / norm).clamp(max=1.0)).backward()
    return norm


twice, once = (fresh_model(n_layer=2).double() for _ in range(2))
optimizers = adamw(twice), adamw(once)
for i, c in enumerate((math.inf, 0.5, 0.1)):
    norm = clipped_step(twice, optimizers[0], data[i], c)
    loss_of(once, data[i]).backward()
    expected = torch.nn.utils.clip_grad_norm_(once.parameters(), c)
    optimizers[1].step()
    optimizers[1].zero_grad()
    print(f"norm {norm:.3f}, clipped to {c}")
    torch.testing.assert_close(norm, expected)
    assert c == math.inf or norm > 1.5 * c
for p, q in zip(twice.parameters(), once.parameters()):
    # clip_grad_norm_ adds 1e-6 to the norm
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)

# %%
# All or nothing
# ~~~~~~~~~~~~~~
#
# An ordinary step checks all gradients first. If one is not finite, nothing has happened, and the run can go on from
# the weights in memory. In backward, the layers after the bad gradient have been updated already. Let the very last
# gradient overflow:

changed = {}
for inside in (False, True):
    model = fresh_model()
    optimizer = adamw(model)
    before = [p.detach().clone() for p in model.parameters()]
    embedding = model.model.embed_tokens.weight
    embedding.register_hook(lambda g: g * math.inf)
    try:
        with update_in_backward(optimizer) if inside else nullcontext():
            loss_of(model, tokens(2)).backward()
            optimizer.step()
    except FloatingPointError as error:
        print(error)
    pairs = list(zip(before, model.parameters()))
    changed[inside] = sum(not torch.equal(p, q) for p, q in pairs)
    print(f"tensors changed: {changed[inside]} of {len(pairs)}\n")
assert changed == {False: 0, True: len(pairs) - 1}

# %%
# Such a run restarts from its last checkpoint.
#
# Loss scaling
# ~~~~~~~~~~~~
#
# Training in float16 multiplies the loss by a large number, so that small gradients do not vanish. The scaler then
# divides all gradients by it, and skips the step if one is infinite. In backward, the weights have moved before the
# scaler looks, and it finds no gradient to look at.

model = fresh_model()
optimizer = adamw(model)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
with update_in_backward(optimizer):
    scaler.scale(loss_of(model, tokens(2))).backward()
    try:
        scaler.step(optimizer)
    except AssertionError as error:
        refusal = str(error)
print(refusal)
assert "inf checks" in refusal and not same(model, fresh_model())

# %%
# bfloat16 has the exponents of float32 and needs no scaler.
#
# Several processes
# ~~~~~~~~~~~~~~~~~
#
# If two processes train on halves of a batch, the step must be made from the *mean* of their gradients. An update at
# once uses the gradient of one half, and the two copies of the model part ways. Here are both processes in one.

halves = data[0][:1], data[0][1:]
copies = [fresh_model(n_layer=2) for _ in halves]
for model, half in zip(copies, halves):
    with update_in_backward(adamw(model)):
        loss_of(model, half).backward()
p, q = (model.model.layers[0].mlp.up_proj.weight for model in copies)
apart = ((p - q).abs().max() / 1e-3).item()
print(f"after one step, weights differ by up to {apart:.1f} learning rates")
assert apart > 1.5

# %%
# The gradient must be reduced over the processes first, and freed after that. The package updates in backward in one
# process only.
#
# Bug museum
# ----------
#
# The gradient that nobody freed
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# An optimizer step in a hook that leaves the gradient: no memory is saved, and gradients add up. (M15)
#
# Leave out ``p.grad = None``. The hook steps, the loop needs no ``zero_grad``, and nothing complains.


def train(steps, free=True, kind="register_post_accumulate_grad_hook"):
    model = fresh_model(n_layer=2)
    optimizers = {p: AdamW([p]) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        if free:
            p.grad = None

    for p in model.parameters():
        getattr(p, kind)(lambda _, p=p: update(p))
    for step in range(steps):
        loss_of(model, tokens(2, step)).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return model, size(grads)


all_of_them = size(fresh_model(n_layer=2).parameters())
for steps in (1, 2):
    right, freed = train(steps)
    wrong, kept = train(steps, free=False)
    equal = same(right, wrong)
    print(f"steps {steps}: equal {equal}, gradients kept {kept / MB:.2f} MB")
    assert equal == (steps == 1) and freed == 0 and kept == all_of_them

# %%
# No memory is saved, and from the second step on every gradient is added to all those before it. A test of one step
# cannot see it. Two checks do: two steps, compared with the ordinary loop; and no gradient is left after
# ``backward``.
#
# The hook before the gradient
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# ``register_hook`` runs before the gradient is stored: every update is one pass late. (M16)
#
# ``register_hook`` has a similar name and is older. On a weight it runs *before* the gradient is stored. It finds in
# ``p.grad`` what the pass before left there.

early = "register_hook"
print(f"gradients alive after backward: {train(2, kind=early)[1] / MB:.2f} MB")
assert same(train(1, kind=early)[0], fresh_model(n_layer=2))  # no update
assert same(train(2, kind=early)[0], train(1)[0])  # late by one pass
assert train(2, kind=early)[1] == all_of_them

# %%
# Every weight is updated one pass late, and all gradients stay alive in between. The fixed line is
# ``register_post_accumulate_grad_hook``. The check: after one backward pass, every weight has moved.
#
# Which sentence is false?
# ------------------------
#
# 1. GaLore shrinks the gradients.
# 2. Updates in backward change the result a little, because later layers move before earlier gradients exist.
# 3. A tied weight gets two updates in one backward pass.
# 4. A weight used in two segments of *reentrant* checkpointing (which runs a backward pass inside the backward pass)
#    gets two updates in one backward pass.
#
# The `timelines <4a_training_memory_in_depth.ipynb>`_ decide 1, and equality bit for bit decided 2. The code counts for
# 3 and 4.

model = fresh_model(tied=True)
calls = []
model.head.weight.register_post_accumulate_grad_hook(calls.append)
loss_of(model, tokens(2)).backward()
assert len(calls) == 1  # 3

from torch.utils.checkpoint import checkpoint

for reentrant in (False, True):
    shared = torch.nn.Parameter(torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    calls = []
    shared.register_post_accumulate_grad_hook(calls.append)

    def segment(x, weight=shared):
        return (weight * x).sin()

    for _ in range(2):
        x = checkpoint(segment, x, use_reentrant=reentrant)
    x.sum().backward()
    print(f"reentrant {reentrant!s:5}: the hook ran {len(calls)} times")
    assert len(calls) == (2 if reentrant else 1)  # 4

# %%
# Sentences 1, 2 and 3 are false, and 4 is true. GaLore forms every gradient in full; an update comes after the last use
# of the weight; and autograd sums the uses of a tied weight before the hook runs. The reentrant kind starts a backward
# pass of its own in each segment, and each of them completes a gradient. The package uses the other kind.
#
# Exercises
# ---------
#
# 1. *Easy.* Let a hook of your own, registered before the context is entered, clip each value of the gradient to a
#    range instead of its norm. A right answer says whether this needs to know other gradients, and whether the
#    direction stays. Hint: ``p.grad.clamp_(-c, c)``.
#
# Summary
# -------
#
# * A hook that runs when a gradient is complete updates its weight and frees it. The result is equal bit for bit, and
#   one gradient is alive at a time.
# * Over several passes GaLore sums projected gradients. AdamW has to keep full ones.
# * Clipping by the norm of all gradients takes a second pass. All-or-nothing steps and loss scaling are lost.
#
# Sources
# -------
#
# * `Full Parameter Fine-tuning for Large Language Models with Limited Resources <https://arxiv.org/abs/2306.09782>`_,
#   Lv et al., 2023 (LOMO): updates in backward, and the second pass for the norm.
# * `GaLore <https://arxiv.org/abs/2403.03507>`_, Zhao et al., 2024: per-layer updates with projected moments.
# * `How to save memory by fusing the optimizer step into the backward pass
#   <https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html>`_, PyTorch's tutorial,
#   with snapshots of a GPU's memory.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
