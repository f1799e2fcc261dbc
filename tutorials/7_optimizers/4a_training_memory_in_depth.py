r"""
Every byte of a training step, in depth
=======================================

The lesson `one gradient at a time <4_in_backward.ipynb>`_ frees each gradient as soon as it is used. When does that
lower the memory that a training step needs, and when does it save nothing? To answer this, we count every byte of a
step, operation by operation.

How the bytes are counted
-------------------------

The memory of a process is a poor measure of a small model: allocators keep what they once had. We count tensors
instead. Memory belongs to a *storage*; several tensors may be views of one.

A dispatch mode of PyTorch is called for every operation, of the forward pass, the backward pass and the optimizer. Ours
keeps a weak reference to each new storage. After every operation it adds up the bytes of those that still exist,
by what they are.
"""

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
        self.fixed = [*self.params, *model.buffers()]
        self.optimizer = optimizer
        self.seen, self.rows, self.alive, self.marks = {}, [], [], []

    def see(self, x):
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.seen:
            self.seen[key] = StorageWeakRef(storage), storage.nbytes()
        return key

    def bytes(self):
        states = self.optimizer.state.values()
        grads = [p.grad for p in self.params if p.grad is not None]
        kind = {self.see(x): 0 for x in self.fixed}
        kind |= {self.see(x): 1 for state in states for x in state.values()}
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
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.see(x)
        self.rows.append(self.bytes())
        self.alive.append([p.grad is not None for p in self.params])
        return out

    def mark(self):  # the end of a phase
        self.marks.append(len(self.rows))


# %%
# Two things are not seen: what a kernel allocates inside one operation and frees again, and tensors from before that
# are only read, such as the batch.
#
# The model is a Qwen2 with four blocks. Bytes depend on shapes alone, so random tokens will do.

from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.instruments.record import record_saved
from lm_from_scratch.models.qwen2 import SIZES, Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.choose import make_optimizer
from lm_from_scratch.optim.in_backward import update_in_backward
from lm_from_scratch.runs.config import TrainConfig
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.gradient_checkpointing import (
    use_gradient_checkpointing_,
)
from lm_from_scratch.training.loss import causal_lm_loss, chunked_causal_lm_loss


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
                loss = loss_of(model, tokens(rows), chunked)
                watch.mark()
                loss.backward()
                watch.mark()
                optimizer.step()
                optimizer.zero_grad()
    return watch


# %%
# Is the count right? There is a second way to find what the forward pass leaves behind. ``record_saved`` of the package
# records each tensor that autograd saves for the backward pass. Their distinct storages, without the weights, plus the
# loss itself, must be all that our count calls *everything else*.

model = fresh_model()
watch = Timeline(model, adamw(model))
with record_saved(model) as saved, watch:
    loss = loss_of(model, tokens(2))

held = [*model.parameters(), *model.buffers()]
for x in model.buffers():
    saved.pop(x.untyped_storage()._cdata, None)
by_hooks = sum(saved.values()) + loss.nbytes
by_count = watch.bytes()
print(f"saved for backward: {by_hooks} bytes, counted {by_count[3]}")
assert by_count == [size(held), 0, 0, by_hooks]

# %%
# The two agree to the byte.
#
# One step of AdamW
# -----------------

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["peak memory", "memory snapshot", "memory timeline", "gradient checkpointing memory", "activation memory", "max_memory_allocated"]
plain = timeline(adamw)
MB = 1e6


AREAS = [COLOURS[i] for i in (0, 5, 3, 1)]
HATCHES = ["", "..", "//", ""]


def draw(ax, watch, title, top):
    rows = torch.tensor(watch.rows).T / MB
    look = dict(labels=KINDS, colors=AREAS, hatch=HATCHES, edgecolor="white")
    ax.stackplot(range(rows.shape[1]), rows, linewidth=0, **look)
    for mark in watch.marks:
        ax.axvline(mark, color=COLOURS[7], linewidth=0.8, linestyle=":")
    ax.set(title=title, ylim=(0, top), xlim=(0, rows.shape[1] - 1))


made, (ax,) = figure(6.4, 4.0)
draw(ax, plain, "AdamW: forward, backward, step", 27)
ax.set(xlabel="operation", ylabel="MB alive")
ax.legend(frameon=False, loc="upper left", ncols=2)
plt.show()

# %%
# The dotted lines separate the forward pass, the backward pass and the step. Weights and state are always there. The
# forward pass adds activations, saved for the backward pass. The backward pass uses them up from the last to the first,
# and leaves gradients in their place.
#
# With M weights in float32, the gradients are as large as the weights, and the two moments twice that. At the end of
# the backward pass we hold
#
# .. math::
#
#    \underbrace{4 M}_{\text{weights}} + \underbrace{8 M}_{\text{moments}} + \underbrace{4 M}_{\text{gradients}} = 16 M
#
# bytes. The count adds the step numbers (4 bytes for each tensor) and a small buffer of the rotation.

params = list(model.parameters())
M = sum(p.numel() for p in params)
W = size([*params, *model.buffers()])
G = size(params)
largest = max(p.nbytes for p in params)
rows = torch.tensor(plain.rows)
held = rows[:, :3].sum(1)
assert held.max() == 16 * M + 4 * len(params) + size(model.buffers())

peak = rows.sum(1).argmax().item()
where = sum(peak >= mark for mark in plain.marks)
print("weights", M, "in", len(params), "tensors")
print("peak during the", ("forward pass", "backward pass", "step")[where])
for kind, count in zip(KINDS, rows[peak].tolist()):
    print(f"{kind:16} {count / MB:5.2f} MB")
assert where == 1 and rows[peak, 2] > 0.75 * G

# %%
# The peak comes near the end of the backward pass, when nearly all gradients are there. They are a quarter of the 16
# bytes, and all they do is wait for the last one.
#
# The order of the gradients
# --------------------------
#
# A hook of ``register_post_accumulate_grad_hook`` is called when the gradient of a weight is complete and stored in
# ``p.grad``. It shows the order.

name_of = {p: name for name, p in model.named_parameters()}
order = []
for p in params:
    p.register_post_accumulate_grad_hook(lambda p: order.append(name_of[p]))
loss.backward()
print(*order[:4], "...", *order[-3:], sep="\n")
assert order[0] == "lm_head.weight"
assert order[-1] == "model.embed_tokens.weight"
assert len(order) == len(params)

# %%
# The head comes first and the embedding last.
#
# Four timelines
# --------------

runs = {
    "AdamW": plain,
    "GaLore": timeline(galore),
    "AdamW in backward": timeline(adamw, inside=True),
    "GaLore in backward": timeline(galore, inside=True),
}

made, axes = figure(6.4, 5.4, rows=2, columns=2)
for ax, (name, watch) in zip(axes, runs.items()):
    draw(ax, watch, name, 24)
axes[0].set(ylabel="MB alive")
axes[2].set(ylabel="MB alive", xlabel="operation")
axes[3].set(xlabel="operation")
handles, labels = axes[3].get_legend_handles_labels()
axes[3].legend(handles, labels, frameon=False, fontsize=8, loc="upper right")
plt.show()

# %%
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
# are alive at once. Somebody `asked its authors <https://github.com/jiaweizzhao/GaLore/issues/53>`_ about that. These
# steps made no new basis; exercise 2 counts one that does.
#
# The next figure shows which gradients exist, one line for each weight.

made, axes = figure(6.4, 4.2, columns=2)
index = {name: i for i, name in enumerate(name_of.values())}
for ax, name in zip(axes, ("AdamW", "AdamW in backward")):
    alive = torch.tensor(runs[name].alive).T  # (weights, operations)
    alive = alive[[index[n] for n in order]]
    start, end = runs[name].marks
    alive = alive[:, start - 20 : end + 20]
    for row, line in enumerate(alive):
        times = line.nonzero()
        first, last = times.min().item(), times.max().item()
        ax.plot([first, last + 1], [row, row], color=COLOURS[3])
    ax.set(title=name, xlabel="operation of the backward pass")
    ax.invert_yaxis()
axes[0].set(ylabel="weight, in the order of completion")
plt.show()

together = torch.tensor(runs["AdamW in backward"].alive).sum(1).max()
print("gradients alive at the same time:", together.item())
assert together == 1
assert torch.tensor(plain.alive).sum(1).max() == len(params)

# %%
# One gradient at a time. The largest single gradient sets the floor, and in a language model that is the embedding or
# the head.
#
# Sizes that hurt
# ~~~~~~~~~~~~~~~
#
# The formula needs no memory, so we can apply it to published models, on the ``meta`` device. The rank is a quarter of
# the width.

for name in ("Qwen2-0.5B", "Qwen2-7B"):
    with torch.device("meta"):
        big = Qwen2ForCausalLM(Qwen2Config(**SIZES[name]))
    sizes = [p.nbytes for p in big.parameters()]
    quarter = galore(big, rank=big.config.n_embd // 4)
    GB = {
        "weights": sum(sizes) / 1e9,
        "AdamW's state": state_bytes(adamw(big)) / 1e9,
        "GaLore's state": state_bytes(quarter) / 1e9,
        "largest gradient": max(sizes) / 1e9,
    }
    whole = 2 * GB["weights"] + GB["AdamW's state"]
    small = GB["weights"] + GB["GaLore's state"] + GB["largest gradient"]
    print(f"{name}, GB:", {kind: round(n, 1) for kind, n in GB.items()})
    print(f"    AdamW {whole:.1f}, GaLore in backward {small:.1f}")
assert 120 < whole < 125 and small < whole / 2

# %%
# AdamW's 16 bytes for each weight make more than 120 GB for the 7B model, before the first activation. GaLore with
# updates in backward holds less than half of that.
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

made, (ax,) = figure(6.4, 3.6)
left = torch.zeros(len(parts))
for i, kind in enumerate(KINDS):
    width = torch.tensor([rows[i] / MB for rows in parts.values()])
    look = dict(color=AREAS[i], hatch=HATCHES[i], edgecolor="white")
    ax.barh(list(parts), width, left=left, label=kind, **look)
    left += width
ax.invert_yaxis()
ax.set(xlabel="MB alive at the peak", title="512 tokens: six ways to train")
ax.legend(frameon=False, loc="lower right", fontsize=8)
plt.show()

# %%
# Rows three to five add one thing at a time. With many tokens, the peak of AdamW is at the start of the backward
# pass, where there is no gradient to free: updates in backward save nothing at all. Gradient checkpointing and the loss
# in chunks cut the activations.
#
# When they are small, the gradients matter again: in the last row they are a part of the peak. Look for the peak first,
# then choose what to reduce.

total = {name: rows.sum().item() for name, rows in parts.items()}
assert total["AdamW in backward"] == total["AdamW"]
assert early["AdamW"] and early["AdamW in backward"]  # before any gradient
assert total["... checkpointing"] < 0.8 * total["GaLore in backward"]
assert total["... chunked loss"] < 0.9 * total["... checkpointing"]
assert parts["AdamW, both knobs"][2] > 0.4 * G

# %%
# Between two passes
# ------------------
#
# If several batches make one step, something has to wait for the next pass. With AdamW, it is all gradients. GaLore
# needs only their projections, as `what is lost <4b_what_is_lost_in_depth.ipynb>`_ explains. What is alive between two
# passes?

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
        _, _, grads, rest = watch.bytes()
        sums = rest - data[1].nbytes  # the batch is alive too
        optimizer.step()
    projected = [s["exp_avg"] for s in optimizer.state.values() if "age" in s]
    others = [p for p, s in optimizer.state.items() if "age" not in s]
    print(
        f"{type(optimizer).__name__:6} between two passes:"
        f" gradients {grads / MB:.2f} MB, projected sums {sums / MB:.2f} MB"
    )
    assert grads == size(others) and sums == size(projected)
    assert len(projected) == (7 * 4 if make is galore else 0)

# %%
# The matrices of the blocks cost a fraction now. The embedding, the head, the norms and the biases keep full gradients,
# because GaLore does not project them.
#
# Exercises
# ---------
#
# 1. *Easy.* Draw the timeline for 1, 2, 4, ..., 64 rows, and find where updates in backward stop saving anything. A
#    right answer shows that it is where the activations reach about the size of the gradients. Hint: ``peak_of``.
# 2. *Medium.* Count a step of GaLore that makes a new basis. A right answer names the largest tensors that it makes
#    besides the gradient. Hint: ``update_proj_gap=1``, count the second step, and note ``function`` and the
#    sizes of ``out``.
# 3. *Hard.* Free the gradients of the small tensors later: let the hook wait until 1 MB has gathered, and update those
#    together. A right answer has equal weights and fewer calls of ``optimizer.update``, and predicts the peak from the
#    limit. Hint: a list in the closure, and a last call after ``backward``.
#
# Summary
# -------
#
# * AdamW in float32 holds 16 bytes for each weight at the end of the backward pass: weights, two moments and all
#   gradients.
# * The bytes held are weights, state and the largest single gradient, counted and by formula. With many tokens the peak
#   is elsewhere: checkpointing and a loss in chunks come first.
# * GaLore forms every gradient in full. Between two passes it holds projected sums, AdamW holds full gradients.
#
# Sources
# -------
#
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
