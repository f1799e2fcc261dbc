r"""
One gradient at a time: the memory of a training step
=====================================================

GaLore makes the state of the optimizer small. The gradients stay as they were: one full-size tensor for every
weight, all of them alive when ``optimizer.step()`` begins. Must they all exist at the same time?

The backward pass finishes them one after another. This page counts every byte of a training step, uses each gradient
as soon as it is complete, and frees it. Then it lists what cannot be done any more.

You will learn
--------------

* what a training step holds at each moment, and where its peak is,
* how a hook takes an optimizer step inside the backward pass, with the same result bit for bit,
* when this lowers the peak and when it does not,
* how GaLore adds up several batches without full gradients,
* what is lost: one norm of all gradients, all-or-nothing steps, loss scaling.

Before you start
----------------

Read the pages on `AdamW <1_adamw.ipynb>`_ and on `GaLore <2_galore.ipynb>`_ first. You need to know what the backward
pass does, and one CPU core.

Every byte of a step
--------------------

The memory of a process is a poor measure of a small model: allocators keep what they once had. We count tensors
instead. Memory belongs to a *storage*; several tensors may be views of one.

A dispatch mode of PyTorch is called for every operation, of the forward pass, the backward pass and the optimizer. Ours
keeps a weak reference to each new storage. After every operation it adds up the bytes of those that still exist,
by what they are.
"""

import inspect
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
from lm_from_scratch.optim.in_backward import update_in_backward
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.gradient_checkpointing import (
    use_gradient_checkpointing_,
)
from lm_from_scratch.training.loss import causal_lm_loss, chunked_causal_lm_loss
from lm_from_scratch.training.train import TrainConfig, make_optimizer


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
        return chunked_causal_lm_loss(x, model.head_weight, targets, 64)
    return causal_lm_loss(model(idx), targets)


def adamw(model):
    return AdamW(model.parameters(), fused=True)


def galore(model, rank=16, **options):
    """The matrices of the blocks are projected, as on the page before."""
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
# hears of each tensor that autograd saves for the backward pass. Their distinct storages, without the weights, plus the
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
# sphinx_gallery_words = ["CUDA out of memory", "OutOfMemoryError", "OOM", "training memory", "peak memory", "register_post_accumulate_grad_hook", "LOMO", "zero_grad"]
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
# Six lines
# ---------
#
# So let each weight have an optimizer of its own, and let the hook call it. The line ``p.grad = None`` frees the
# gradient.

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
# The weights are equal bit for bit. Is that luck? The last layer has already moved when the gradient of the first one
# is computed.
#
# It is not. The gradient of the first layer needs the *old* weights of all layers behind it. But each of them served
# the backward pass for the last time when its own gradient was computed, and only then does the hook run. A weight
# that is used twice, as a tied embedding is, has a complete gradient only after both uses.
#
# Autograd guards this rule. It raises if a weight that is still needed was changed in place.

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
# steps made no new basis; exercise 3 counts one that does.
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
# When they are small, the gradients matter again: in the last row they are a part of the peak. Look for the peak
# first, then choose the knob.

total = {name: rows.sum().item() for name, rows in parts.items()}
assert total["AdamW in backward"] == total["AdamW"]
assert early["AdamW"] and early["AdamW in backward"]  # before any gradient
assert total["... checkpointing"] < 0.8 * total["GaLore in backward"]
assert total["... chunked loss"] < 0.9 * total["... checkpointing"]
assert parts["AdamW, both knobs"][2] > 0.4 * G

# %%
# Several batches, one step
# -------------------------
#
# The other cure for large activations is *gradient accumulation*: run small parts of a batch one after another, and
# step from the sum of their gradients. Updates in backward seem to exclude it, because a hook that steps at once has
# nothing left to sum.
#
# Our six lines would take four steps for four parts. Dividing each loss by 4 does not help: Adam divides by the size
# of the gradient, so a quarter of a gradient gives a whole step. This is a real defect:
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
# The full gradient of each part is projected and freed. What waits for the next part has the size of a moment.

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
# The norm of all gradients is known when the last one is complete. By then the first ones are gone. A hook could clip
# each gradient by its own norm, but that is something else.


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
# the weights in memory. In backward, the layers behind the bad gradient have been updated already. Let the very last
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
# An optimizer step in a hook that leaves the gradient: no memory is saved, and gradients add up.
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
# ``register_hook`` runs before the gradient is stored: every update is one pass late.
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
# The table of peaks decided 1, and equality bit for bit decided 2. The code counts for 3 and 4.

model = fresh_model(tied=True)
calls = []
model.head_weight.register_post_accumulate_grad_hook(calls.append)
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
# 1. *Easy.* Draw the timeline for 1, 2, 4, ..., 64 rows, and find where updates in backward stop saving anything. A
#    right answer shows that it is where the activations reach about the size of the gradients. Hint: ``peak_of``.
# 2. *Easy.* Let a hook of your own, registered before the context is entered, clip each value of the gradient to a range
#    instead of its norm. A right answer says whether this needs to know other gradients, and whether the direction
#    stays. Hint: ``p.grad.clamp_(-c, c)``.
# 3. *Medium.* Count a step of GaLore that makes a new basis. A right answer names the largest tensors that it makes
#    besides the gradient. Hint: ``update_proj_gap=1``, count the second step, and note ``function`` and the
#    sizes of ``out``.
# 4. *Hard.* Free the gradients of the small tensors later: let the hook wait until 1 MB has gathered, and update those
#    together. A right answer has equal weights and fewer calls of ``optimizer.update``, and predicts the peak from the
#    limit. Hint: a list in the closure, and a last call after ``backward``.
#
# Summary
# -------
#
# * AdamW in float32 holds 16 bytes for each weight at the end of the backward pass: weights, two moments and all
#   gradients.
# * A hook that runs when a gradient is complete updates its weight and frees it. The result is equal bit for bit, and
#   one gradient is alive at a time.
# * The bytes held are weights, state and the largest single gradient, counted and by formula. With many tokens the peak
#   is elsewhere: checkpointing and a loss in chunks come first.
# * Over several passes GaLore sums projected gradients. AdamW has to keep full ones.
# * Clipping by the norm of all gradients takes a second pass. All-or-nothing steps and loss scaling are lost.
#
# All this was one process. Many models are trained by several at once, and each gradient is then a mean over all of
# them. The next page, One model, two processes, shows what they hold and what they send.
#
# Sources
# -------
#
# * `Full Parameter Fine-tuning for Large Language Models with Limited Resources <https://arxiv.org/abs/2306.09782>`_, Lv
#   et al., 2023 (LOMO): updates in backward, and the second pass for the norm.
# * `GaLore <https://arxiv.org/abs/2403.03507>`_, Zhao et al., 2024: per-layer updates with projected moments.
# * `Training Deep Nets with Sublinear Memory Cost <https://arxiv.org/abs/1604.06174>`_, Chen et al., 2016: gradient
#   checkpointing.
# * `How to save memory by fusing the optimizer step into the backward pass <https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html>`_,
#   PyTorch's tutorial, with snapshots of a GPU's memory.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
