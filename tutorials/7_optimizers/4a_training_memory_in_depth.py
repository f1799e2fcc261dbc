r"""
Updates in backward in depth: every byte of a step, and what is lost
====================================================================

The lesson `one gradient at a time <4_in_backward.ipynb>`_ takes optimizer steps inside the backward pass, and frees each
gradient as soon as it is used. When does that lower the memory that a training step needs, and when does it save nothing?
And what can no longer be done? To answer the first question, we count every byte of a step, operation by operation.

How the bytes are counted
-------------------------

The memory of a process is a poor measure of a small model: allocators keep what they once had. We count tensors
instead. Memory belongs to a *storage*; several tensors may be views of one.

A dispatch mode of PyTorch is called for every operation, of the forward pass, the backward pass and the optimizer. Ours
keeps a weak reference to each new storage. After every operation it adds up the bytes of those that still exist,
by what they are.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["4_in_backward"]
# sphinx_gallery_words = ["peak memory", "memory snapshot", "memory timeline", "gradient checkpointing memory", "activation memory", "max_memory_allocated", "register_post_accumulate_grad_hook", "LOMO", "clip_grad_norm_", "GradScaler", "fused optimizer step", "No inf checks were recorded", "modified by an inplace operation", "where does the GPU memory go", "activation checkpointing", "torch.utils.checkpoint", "use_reentrant"]
import math
from contextlib import nullcontext

import matplotlib.pyplot as plt
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("weights", "state", "gradients", "everything else")


class Timeline(TorchDispatchMode):
    def __init__(self, model, optimizer):
        super().__init__()
        self.params = list(model.parameters())
        self.optimizer = optimizer
        self.seen, self.rows, self.marks = {}, [], []
        fixed = *self.params, *model.buffers()
        self.fixed = {self.see(x): 0 for x in fixed}

    def see(self, x):
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.seen:
            self.seen[key] = StorageWeakRef(storage), storage.nbytes()
        return key

    def bytes(self):
        states = self.optimizer.state.values()
        grads = [p.grad for p in self.params if p.grad is not None]
        kind = self.fixed | {
            self.see(x): 1 for state in states for x in state.values()
        }
        kind |= {self.see(grad): 2 for grad in grads}
        total = [0, 0, 0, 0]
        for key, (reference, size) in list(self.seen.items()):
            if reference.expired():
                del self.seen[key]
            else:
                total[kind.get(key, 3)] += size
        return total

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.is_view:  # holds no bytes of its own
            return out
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.see(x)
        self.rows.append(self.bytes())
        return out

    def mark(self):  # the end of a phase
        self.marks.append(len(self.rows))


# %%
# Two things are not seen: what a kernel allocates inside one operation and frees again, and tensors from before that
# are only read, such as the batch.
#
# The model is a Qwen2 with three blocks. Bytes depend on shapes alone, so random tokens will do.

from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.choose import make_optimizer
from lm_from_scratch.optim.in_backward import update_in_backward
from lm_from_scratch.runs.config import TrainConfig
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.gradient_checkpointing import (
    use_gradient_checkpointing_,
)
from lm_from_scratch.training.loss import causal_lm_loss, chunked_causal_lm_loss


def fresh_model(tied=False, n_layer=3):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2000, block_size=64, n_layer=n_layer, n_head=4, n_kv_head=2,
        n_embd=128, intermediate_size=352, tie_word_embeddings=tied,
        initializer_range=0.05, eos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def tokens(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2000, (rows, 16), generator=generator)  # (B, T)


def loss_of(model, idx, chunked=False):
    targets = next_token_targets(idx)
    if chunked:
        x = model.backbone(idx)
        return chunked_causal_lm_loss(x, model.head.weight, targets, 64)
    return causal_lm_loss(model(idx), targets)


def adamw(model):
    return AdamW(model.parameters(), fused=True)


def galore(model, rank=16, **options):
    """The matrices of the blocks are projected."""
    config = TrainConfig(steps=1, optimizer="galore", rank=rank, **options)
    return make_optimizer(model, config)


def same(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def size(tensors):
    return sum(x.nbytes for x in tensors)


def timeline(make, inside=False, rows=2, checkpointing=False, chunked=False):
    model = fresh_model()
    if checkpointing:
        use_gradient_checkpointing_(model)
    optimizer = make(model)
    with update_in_backward(optimizer) if inside else nullcontext():
        for counted in (False, True):  # the first step makes the state
            watch = Timeline(model, optimizer)
            with watch if counted else nullcontext():
                idx = tokens(rows if counted else 1)
                loss = loss_of(model, idx, chunked)
                watch.mark()
                loss.backward()
                watch.mark()
                optimizer.step()
                optimizer.zero_grad()
    return watch


# %%
# Four timelines
# --------------

runs = {
    "AdamW": timeline(adamw),
    "GaLore": timeline(galore),
    "AdamW in backward": timeline(adamw, inside=True),
    "GaLore in backward": timeline(galore, inside=True),
}
MB = 1e6
AREAS = [COLOURS[i] for i in (0, 5, 3, 1)]
HATCHES = ["", "..", "//", ""]

_, axes = figure(6.4, 5.4, rows=2, columns=2)
for ax, (name, watch) in zip(axes, runs.items()):
    rows = torch.tensor(watch.rows).T / MB
    look = dict(labels=KINDS, colors=AREAS, hatch=HATCHES, edgecolor="white")
    ax.stackplot(range(rows.shape[1]), rows, linewidth=0, **look)
    for mark in watch.marks:
        ax.axvline(mark, color=COLOURS[7], linewidth=0.8, linestyle=":")
    ax.set(title=name, ylim=(0, 20), xlim=(0, rows.shape[1] - 1))
axes[0].set(ylabel="MB alive")
axes[2].set(ylabel="MB alive", xlabel="operation")
axes[3].set(xlabel="operation")
handles, labels = axes[3].get_legend_handles_labels()
axes[3].legend(handles, labels, frameon=False, fontsize=8, loc="upper right")
plt.show()

# %%
# The dotted lines separate the forward pass, the backward pass and the step. Weights and state are always there. The
# forward pass adds activations, saved for the backward pass. The backward pass uses them up from the last to the first,
# and leaves gradients in their place: at the end of it, AdamW holds 16 bytes for each weight, four of them gradients.
#
# GaLore takes from the state, updates in backward take from the gradients, and the two add up. In the lower row a
# gradient lives for a few operations; the last spike is that of the embedding.
#
# What is held can be written down before anything runs. With :math:`W` for the bytes of the weights, :math:`S` for
# those of the state and :math:`\lvert g_p \rvert` for those of one gradient, the most is
#
# .. math::
#
#    W + S + \sum_p \lvert g_p \rvert \qquad \text{or} \qquad W + S + \max_p \, \lvert g_p \rvert
#
# The shapes of the state come from ``state_shapes``, before any state exists.


def state_bytes(optimizer):
    params = [p for g in optimizer.param_groups for p in g["params"]]
    shapes = [s for p in params for s in optimizer.state_shapes(p).values()]
    return 4 * sum(shape.numel() for shape in shapes)


def peak_of(watch):
    return max(sum(row) for row in watch.rows)


model = fresh_model()
params = list(model.parameters())
W, G = size([*params, *model.buffers()]), size(params)
largest = max(p.nbytes for p in params)
S = {"AdamW": state_bytes(adamw(model)), "GaLore": state_bytes(galore(model))}
print("MB                formula   held  with everything else")
for name, watch in runs.items():
    formula = W + S[name.split()[0]] + (largest if "backward" in name else G)
    held = max(sum(row[:3]) for row in watch.rows)
    assert held == formula
    numbers = formula, held, peak_of(watch)
    print(f"{name:20}", *(f"{n / MB:5.2f} " for n in numbers))
peaks = {name: peak_of(watch) for name, watch in runs.items()}
assert max(row[2] for row in runs["GaLore"].rows) == G
for name in ("AdamW", "GaLore"):
    assert peaks[f"{name} in backward"] < peaks[name] - 0.4 * G

# %%
# The formula holds to the byte. Note the second row: GaLore alone forms every gradient in full size, and all of them
# are alive at once. Somebody `asked its authors <https://github.com/jiaweizzhao/GaLore/issues/53>`_ about that.
#
# When it does not help
# ---------------------
#
# The formula says nothing about activations. They grow with the number of tokens, and they are at their largest when
# no gradient exists yet. Here are 32 rows instead of 2.

knobs = {
    "AdamW": (adamw, False, False, False),
    "AdamW in backward": (adamw, True, False, False),
    "GaLore in backward": (galore, True, False, False),
    "... checkpointing": (galore, True, True, False),
    "... chunked loss": (galore, True, True, True),
    "AdamW, both knobs": (adamw, False, True, True),
}
parts, early = {}, {}
for name, (make, inside, checkpointing, chunked) in knobs.items():
    watch = timeline(make, inside, 32, checkpointing, chunked)
    rows = torch.tensor(watch.rows)
    peak = rows.sum(1).argmax().item()
    parts[name] = rows[peak]
    early[name] = rows[: peak + 1, 2].max() == 0
    whole, grads = parts[name].sum() / MB, parts[name][2] / MB
    print(f"{name:20} {whole:5.1f} MB, of it gradients {grads:.1f}")

total = {name: rows.sum().item() for name, rows in parts.items()}
assert total["AdamW in backward"] == total["AdamW"]
assert early["AdamW"] and early["AdamW in backward"]  # before any gradient
assert total["... checkpointing"] < 0.8 * total["GaLore in backward"]
assert total["... chunked loss"] < 0.9 * total["... checkpointing"]
assert parts["AdamW, both knobs"][2] > 0.4 * G

# %%
# Rows three to five add one thing at a time. With many tokens, the peak of AdamW is at the start of the backward
# pass, where there is no gradient to free: updates in backward save nothing at all. Gradient checkpointing and the loss
# in chunks cut the activations. When they are small, the gradients matter again: in the last row they are a part of the
# peak. Look for the peak first, then choose what to reduce.
#
# What guards the order
# ---------------------
#
# The package keeps one optimizer for all weights and makes the change a context, ``update_in_backward``. Its result is
# that of the ordinary loop, bit for bit, because a weight has served the backward pass for the last time when its hook
# runs. A weight that is used twice, as a tied embedding is, has a complete gradient only after both uses.
#
# Autograd, PyTorch's machine for gradients, guards the rule. It raises if a weight that is still needed was changed in
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
# Several batches, one step
# -------------------------
#
# A cure for large activations is *gradient accumulation*: run small parts of a batch one after another, and step from
# the sum of their gradients. A hook that steps at once takes four steps for four parts. Real code did so, too: `a user
# found it <https://github.com/jiaweizzhao/GaLore/issues/78>`_ in the code published with GaLore. With
# ``update_in_backward(optimizer, 4)`` the passes are counted, and something has to wait for the next one.
#
# With AdamW, it is all gradients. GaLore can do better. The projection is linear, so the sum of projections is the
# projection of the sum:
#
# .. math::
#
#    P^\top G_1 Q + P^\top G_2 Q = P^\top (G_1 + G_2) \, Q
#
# The full gradient of each part is projected and freed. What waits has the size of a moment.

data = [tokens(2, seed) for seed in range(4)]
for make in (adamw, galore):
    model = fresh_model()
    optimizer = make(model)
    loss_of(model, data[0]).backward()
    optimizer.step()  # makes the state
    optimizer.zero_grad()
    with update_in_backward(optimizer, 2):
        with Timeline(model, optimizer) as watch:
            loss_of(model, data[1]).backward()
        _, _, grads, sums = watch.bytes()
        optimizer.step()
    projected = [s["exp_avg"] for s in optimizer.state.values() if "age" in s]
    others = [p for p, s in optimizer.state.items() if "age" not in s]
    print(
        f"{type(optimizer).__name__:6} between two passes:"
        f" gradients {grads / MB:.2f} MB, projected sums {sums / MB:.2f} MB"
    )
    assert grads == size(others) and sums == size(projected)
    assert len(projected) == (7 * 3 if make is galore else 0)

# %%
# The matrices of the blocks cost a fraction now. The embedding, the head, the norms and the biases keep full gradients,
# because GaLore does not project them. (A step that needs a new basis makes it from the gradient of the *first* pass,
# because the sum does not exist yet.)
#
# The norm of all gradients
# -------------------------
#
# Clipping shortens a gradient that is too long, by one factor for all weights, so the direction stays. A hook comes too
# early to know the norm of all gradients. It could clip each gradient by its own norm, but that is something else.


def flat(xs):
    return torch.cat([x.flatten() for x in xs])


model = fresh_model()
loss_of(model, data[0]).backward()
grads = [p.grad for p in model.parameters()]
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
#
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
# Loss scaling, and all or nothing
# --------------------------------
#
# An ordinary step checks all gradients first; if one is not finite, nothing has happened. In backward, the weights
# after the bad gradient have been updated already, and the run restarts from its last checkpoint.
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

late = "register_hook"
print(f"gradients alive after backward: {train(2, kind=late)[1] / MB:.2f} MB")
assert same(train(1, kind=late)[0], fresh_model(n_layer=2))  # no update
assert same(train(2, kind=late)[0], train(1)[0])  # late by one pass
assert train(2, kind=late)[1] == all_of_them

# %%
# Every weight is updated one pass late, and all gradients stay alive in between. The fixed line is
# ``register_post_accumulate_grad_hook``. The check: after one backward pass, every weight has moved.
#
# Exercises
# ---------
#
# 1. *Easy.* Draw the timeline for 1, 2, 4, ..., 64 rows, and find where updates in backward stop saving anything. A
#    good answer shows that it is where the activations reach about the size of the gradients. Hint: ``peak_of``.
# 2. *Medium.* Count a step of GaLore that makes a new basis. A good answer names the largest tensors that it makes
#    besides the gradient. Hint: ``update_proj_gap=1``, count the second step, and note ``function`` and the
#    sizes of ``out``.
# 3. *Hard.* Free the gradients of the small tensors later: let the hook wait until 1 MB has gathered, and update those
#    together. A good answer has equal weights and fewer calls of ``optimizer.update``, and predicts the peak from the
#    limit. Hint: a list in the closure, and a last call after ``backward``.
#
# Summary
# -------
#
# * The bytes held are weights, state and the largest single gradient, counted and by formula. With many tokens the peak
#   is elsewhere: checkpointing and a loss in chunks come first.
# * The result equals that of the ordinary loop, bit for bit. Over several passes GaLore sums projected gradients; AdamW
#   has to keep full ones.
# * Clipping by the norm of all gradients takes a second pass. All-or-nothing steps and loss scaling are lost.
#
# Sources
# -------
#
# * `Full Parameter Fine-tuning for Large Language Models with Limited Resources <https://arxiv.org/abs/2306.09782>`_,
#   Lv et al., 2023 (LOMO): updates in backward, and the second pass for the norm.
# * `GaLore <https://arxiv.org/abs/2403.03507>`_, Zhao et al., 2024: per-layer updates with projected moments.
# * `Training Deep Nets with Sublinear Memory Cost <https://arxiv.org/abs/1604.06174>`_, Chen et al., 2016: gradient
#   checkpointing.
# * `How to save memory by fusing the optimizer step into the backward pass
#   <https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html>`_, PyTorch's tutorial,
#   with snapshots of a GPU's memory.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
