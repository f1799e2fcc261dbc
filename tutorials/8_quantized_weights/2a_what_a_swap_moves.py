r"""
What a swap moves
=================

The lesson on `swapping two tensors <2_swapping_tensors.ipynb>`_ exchanges the contents of two tensors, and everyone who
holds one of them follows. What exactly are the contents? This page writes the exchange in three lines, lets PyTorch's
own function and these lines move one property after another, and tries every kind of holder.

Three layers
------------

What Python calls a tensor is three things, each of which leads to the next.

* The **Python object** has an identity, a class and a ``__dict__`` of attributes. Names, lists and optimizers hold
  the Python object.
* The **at::Tensor** is a C++ object. It has shape, strides and dtype, and all that autograd knows: ``requires_grad``,
  the gradient, the node that made it.
* The **storage** is the memory. Several at::Tensors may share it: ``detach`` makes a new Python object with a new
  at::Tensor over the same storage.

You can read the addresses of all three; ``_cdata`` is that of the at::Tensor. Names with one leading underscore, here
and below, are private to PyTorch: learn with them, and build nothing on them.

Here are two tensors before and after a swap, with a list that holds the first and an alias from ``detach``. Every
arrow of the figure is read from the addresses.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["../7_optimizers/4_in_backward"]
# sphinx_gallery_words = ["swap_tensors", "torch.utils.swap_tensors", "_swap_tensor_impl", "TensorImpl", "at::Tensor", "storage", "detach", "data_ptr", "tensor subclass"]
import weakref
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.weights.int8 import Int8Weight


def layers(name, x):
    return name, id(x), x._cdata, x.data_ptr()


t1, t2 = torch.arange(2), torch.arange(3)
box, alias = [t1], t1.detach()


def chains():
    named = {"t1": t1, "box[0]": box[0], "alias": alias, "t2": t2}
    return [layers(name, x) for name, x in named.items()]


before = chains()
swap_tensors(t1, t2)
after = chains()

# %%
# The objects stay, and point to the other at::Tensor.

names, objects, tensors, storages = (
    list(dict.fromkeys(c)) for c in zip(*before)
)
levels = (names, objects, tensors, storages)
kept = {link for chain in before for link in pairwise(chain)}


def draw(ax, chains, title):
    at = {}
    for x, (letter, level) in enumerate(zip(("", "P", "A", "S"), levels)):
        for i, key in enumerate(level):
            at[key] = (x, -i * 3 / max(len(level) - 1, 1))
            label = f"{letter}{i + 1}" if letter else key
            patch = {"boxstyle": "round", "fc": "white", "ec": COLOURS[7]}
            ax.text(*at[key], label, ha="center", va="center", bbox=patch)
    for link in {link for chain in chains for link in pairwise(chain)}:
        (x0, y0), (x1, y1) = at[link[0]], at[link[1]]
        colour, dash = (COLOURS[0], "-") if link in kept else (COLOURS[3], "--")
        arrow = {"arrowstyle": "->", "color": colour, "ls": dash, "lw": 1.6}
        ends = {"xy": (x1 - 0.13, y1), "xytext": (x0 + 0.22, y0)}
        ax.annotate("", **ends, arrowprops=arrow)
    heads = ("name", "Python object", "at::Tensor", "storage")
    for x, text in enumerate(heads):
        ax.text(x, 0.75, text, ha="center", fontsize=9)
    ax.set(title=title, xlim=(-0.4, 3.4), ylim=(-3.5, 1.1))
    ax.axis("off")


made, axes = figure(6.4, 5.4, rows=2)
draw(axes[0], before, "Before the swap")
draw(axes[1], after, "After: the dashed arrows are new")
plt.show()

changed = {link for chain in after for link in pairwise(chain)} - kept
assert changed == {(before[0][1], before[3][2]), (before[3][1], before[0][2])}
assert before[2] == after[2]  # the alias does not follow

# %%
# Exactly two arrows have changed. Names still lead to the same objects, and each at::Tensor keeps its storage. The
# alias has an at::Tensor of its own; it still shows the old memory, which is that of ``t2`` now.
#
# The swap in three lines
# -----------------------
#
# The class and the attributes belong to the Python object. So they must change places too: a quantised weight without
# its class would be meaningless.


def three_lines(a, b):
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)


# %%
# ``_swap_tensor_impl`` checks little. PyTorch's function adds one loop, for attributes in slots, and it refuses some
# pairs before it starts. Everything else should be equal.
#
# What moves
# ----------
#
# Each row below reads one property of a pair, swaps, and reads again. If the two readings have changed places the
# property *moves*; if they are as before it *stays*. A row only counts if the two differ at first.
#
# The pair is a parameter with a gradient, an attribute, a hook and one change in place, which its *version counter* has
# counted, and a plain tensor of another shape and dtype.


def unlike():
    a = nn.Parameter(torch.arange(2.0))
    a.grad = torch.ones(2)
    a.unit = "metre"
    a.register_hook(lambda g: 10 * g)
    with torch.no_grad():
        a.add_(1)
    return a, torch.arange(3, dtype=torch.float64)


class Slotted(Tensor):
    __slots__ = ("unit",)


def with_slots():
    a, b = (torch.zeros(n).as_subclass(Slotted) for n in (2, 3))
    a.unit, b.unit = "metre", "second"
    return a, b


def computed():
    x = torch.ones(2, requires_grad=True)
    return x + 1, x * 2


def hooked_gradient(t):
    if t.requires_grad:
        return torch.autograd.grad(t.sum(), t)[0].tolist()


PROPERTIES = {
    "id": (unlike, id),
    "hash": (unlike, hash),
    "class": (unlike, type),
    "__dict__": (unlike, lambda t: dict(t.__dict__)),
    "a slot": (with_slots, lambda t: t.unit),
    "shape": (unlike, lambda t: t.shape),
    "dtype": (unlike, lambda t: t.dtype),
    "storage": (unlike, lambda t: t.data_ptr()),
    "version counter": (unlike, lambda t: t._version),
    "requires_grad": (unlike, lambda t: t.requires_grad),
    "grad": (unlike, lambda t: t.grad is not None),
    "grad_fn": (computed, lambda t: t.grad_fn.name()),
    "what a hook does": (unlike, hooked_gradient),
    "the list of hooks": (unlike, lambda t: id(t._backward_hooks)),
}


def motion(swap, pair, read):
    a, b = pair()
    first = [read(a), read(b)]
    assert first[0] != first[1]
    swap(a, b)
    then = [read(a), read(b)]
    assert then in (first, first[::-1])
    return "stays" if then == first else "moves"


print(f"{'':20}torch   three lines")
moves = {}
for name, row in PROPERTIES.items():
    moves[name] = [motion(swap, *row) for swap in (swap_tensors, three_lines)]
    print(f"{name:20}{moves[name][0]:8}{moves[name][1]}")

stay = {"id", "hash", "the list of hooks"}
assert {k for k, (torchs, _) in moves.items() if torchs == "stays"} == stay
assert {k for k, (x, y) in moves.items() if x != y} == {"a slot"}

# %%
# The contents of the object move, and its identity stays. Our three lines differ from PyTorch in the slots alone. A
# slot is an attribute that a class keeps outside ``__dict__``.
#
# The last two rows contradict each other. A hook acts on the gradient, so it belongs to the at::Tensor and moves. The
# Python list of hooks does not move with it. A hook that you register on ``a`` after the swap goes into that list, and
# acts on ``b``.

a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
a.register_hook(lambda g: 10 * g)
swap_tensors(a, b)
a.register_hook(lambda g: 7 * g)
factors = [hooked_gradient(t)[0] for t in (a, b)]
print("gradient of a times", factors[0], "- gradient of b times", factors[1])
assert factors == [1, 70]

# %%
# So register hooks after the swap, on a tensor that had none.
#
# Which holders follow
# --------------------
#
# Now the holders. ``a`` holds zeros and ``b`` ones. Something takes hold of ``a``; then we swap, and look through it.
# It sees the *new* numbers, or the *old* ones, or the swap is refused.


def linear(a):
    module = nn.Linear(3, 3, bias=False)
    module.weight = a
    return module


def no_grad_view(a):
    with torch.no_grad():
        return a[:2]


def itself(x):
    return x


HOLDERS = {
    "list": (lambda a: [a], lambda x: x[0]),
    "key of a dict": (lambda a: {a: "label"}, lambda x: next(iter(x))),
    "closure": (lambda a: lambda: a, lambda x: x()),
    "two tied modules": (
        lambda a: (linear(a), linear(a)),
        lambda x: x[1].weight,
    ),
    "optimizer": (
        lambda a: torch.optim.AdamW([a]),
        lambda x: x.param_groups[0]["params"][0],
    ),
    "detach()": (Tensor.detach, itself),
    ".data": (lambda a: a.data, itself),
    "numpy()": (lambda a: a.detach().numpy(), itself),
    "state_dict()": (lambda a: linear(a).state_dict(), lambda x: x["weight"]),
    "view": (lambda a: a[:2], itself),
    "view, no_grad": (no_grad_view, itself),
    "weak reference": (weakref.ref, lambda x: x()),
}


def two():
    return nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.ones(4, 3))


def sees(swap, hold, look):
    a, b = two()
    holder = hold(a)
    try:
        swap(a, b)
    except RuntimeError:
        return "refused"
    return ("old", "new")[int(look(holder).max())]


print(f"{'':20}torch   three lines")
seen, ours = {}, {}
for name, row in HOLDERS.items():
    seen[name] = sees(swap_tensors, *row)
    ours[name] = sees(three_lines, *row)
    print(f"{name:20}{seen[name]:8}{ours[name]}")

follow = {"list", "key of a dict", "closure", "two tied modules", "optimizer"}
refused = {"view", "view, no_grad", "weak reference"}
aliases = {"detach()", ".data", "numpy()", "state_dict()"}
assert {k for k, v in seen.items() if v == "new"} == follow
assert {k for k, v in seen.items() if v == "old"} == aliases
assert {k for k, v in seen.items() if v == "refused"} == refused
assert all(ours[k] == seen[k] for k in follow | aliases)

# %%
# A holder of the object follows. A holder of another at::Tensor over the same storage does not, and there is no
# warning. A ``state_dict`` belongs to this second group: its values are detached, so one from before the swap holds the
# old numbers. Why three swaps are refused is the question of `refused swaps <2b_refused_swaps.ipynb>`_.
#
# The two tensors may differ in almost everything.


def kind(x):
    return type(x), x.shape, x.dtype, x.layout, x.device


PAIRS = [
    (nn.Parameter(torch.zeros(3)), torch.zeros(2, device="meta")),
    (torch.zeros(3), torch.eye(3).to_sparse()),
    (nn.Parameter(torch.randn(2, 8)), Int8Weight.quantize(torch.randn(3, 8))),
    (torch.zeros(4)[:2], torch.zeros(3)),
]
for a, b in PAIRS:
    kinds = kind(a), kind(b)
    swap_tensors(a, b)
    print(f"now {type(a).__name__:11} {a.layout} on {a.device}")
    assert (kind(b), kind(a)) == kinds

# %%
# A parameter and an empty tensor of the meta device, dense and sparse, float32 and int8 codes with scales, a view and a
# tensor of its own: all four were swapped.
#
# Which sentence is false?
# ------------------------
#
# 1. A swap of large tensors takes longer, because it copies numbers.
# 2. Everyone who holds ``p`` also sees ``p.data = x``.
# 3. A swap is refused if someone else shares the memory of the tensor.

a, b = torch.zeros(1000, 1000), torch.ones(2000, 1000)
addresses = a.data_ptr(), b.data_ptr()
swap_tensors(a, b)
assert (b.data_ptr(), a.data_ptr()) == addresses  # 1

p = nn.Parameter(torch.zeros(3))
p.unit, box = "metre", [p]
p.data = torch.ones(2, dtype=torch.bfloat16)
assert box[0].shape == (2,) and box[0].dtype == torch.bfloat16  # 2
assert box[0].unit == "metre"
assert seen["detach()"] == seen["numpy()"] == "old"  # 3

# %%
# Sentences 1 and 3 are false, and 2 is true. The numbers stay where they are in memory. Setting ``.data`` reaches
# everyone, but it leaves class and attributes as they were. And what counts for a refusal is the at::Tensor, not the
# memory.
#
# Exercises
# ---------
#
# 1. *Easy.* Add a row to the table of holders: a tuple, a ``functools.partial``, an ``nn.ParameterList``, an entry of
#    ``dict(module.named_parameters())``. A right answer predicts each verdict first. Hint: which layer does it hold?
# 2. *Medium.* Give the three lines the missing loop over slots. A right answer moves the row *a slot*, also when only
#    one of the two has set it. Hint: ``copyreg._slotnames`` and ``hasattr``.
#
# Summary
# -------
#
# * A tensor is a Python object, an at::Tensor and a storage. A swap exchanges class, attributes and at::Tensor of two
#   objects, and copies no number.
# * Identity stays, and with it whoever holds the object: lists, closures, tied modules, optimizers.
# * ``detach``, ``.data``, ``numpy`` and an older ``state_dict`` keep the old numbers silently.
#
# Sources
# -------
#
# * PyTorch: `Extension points in nn.Module for load_state_dict and tensor subclasses <https://docs.pytorch.org/tutorials/recipes/recipes/swap_tensors.html>`_, the tutorial that this chapter takes up.
# * PyTorch: `torch.utils.swap_tensors <https://docs.pytorch.org/docs/stable/generated/torch.utils.swap_tensors.html>`_.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
