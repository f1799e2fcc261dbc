r"""
Swaps in depth: what moves, and what PyTorch refuses
====================================================

The lesson on `swapping two tensors <2_swapping_tensors.ipynb>`_ exchanges the contents of two tensors, and everything
that holds one of them follows. What exactly are the contents? Why does PyTorch refuse some swaps, and what would go wrong
if it did not? And how do you swap the tensors of a whole model, all or none?

Three layers
------------

What Python calls a tensor is three things, each of which leads to the next.

* The **Python object** has an identity, a class and a ``__dict__`` of attributes. Names, lists and optimizers hold
  the Python object.
* The **at::Tensor** is a C++ object. It has shape, strides and dtype, and all that autograd knows: ``requires_grad``,
  the gradient, the node that computed it.
* The **storage** is the memory. Several at::Tensors may share it: ``detach`` makes a new Python object with a new
  at::Tensor over the same storage.

You can read the addresses of all three; ``_cdata`` is that of the at::Tensor. Names with one leading underscore, here
and below, are private to PyTorch: learn with them, but build nothing on them.

Here are two tensors before and after a swap, with a list that holds the first and an alias from ``detach``. Every
arrow of the figure is read from the addresses.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["../7_optimizers/4_in_backward"]
# sphinx_gallery_words = ["swap_tensors", "torch.utils.swap_tensors", "_swap_tensor_impl", "TensorImpl", "at::Tensor", "storage", "detach", "data_ptr", "tensor subclass", "Couldn't swap", "Expected use_count", "AccumulateGrad", "poisoned by swap_tensors", "weakref", "Cannot swap t1 because it has weakref associated with it", "set_swap_module_params_on_conversion"]
import weakref
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.weights.swap import swap_, swap_on_conversion


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


_, axes = figure(6.4, 5.4, rows=2)
draw(axes[0], before, "Before the swap")
draw(axes[1], after, "After: the dashed arrows are new")
plt.show()

changed = {link for chain in after for link in pairwise(chain)} - kept
assert changed == {(before[0][1], before[3][2]), (before[3][1], before[0][2])}
assert before[2] == after[2]  # the alias does not follow

# %%
# Exactly two arrows have changed. Names still lead to the same objects, and each at::Tensor keeps its storage. The
# alias has an at::Tensor of its own: it still shows the old memory, which now belongs to ``t2``.
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
# ``_swap_tensor_impl`` checks little. PyTorch's function also exchanges attributes in slots, and it refuses some pairs
# before it starts. In everything else the two agree.
#
# What moves
# ----------
#
# Each row below reads one property of a pair, swaps, and reads again. If the two readings have changed places, the
# property *moves*; if they are as before, it *stays*. The pair is a parameter with a gradient, an attribute, a hook and
# one change in place, which its *version counter* has counted, and a plain tensor of another shape and dtype.


def unlike():
    a = nn.Parameter(torch.arange(2.0))
    a.grad = torch.ones(2)
    a.unit = "metre"
    a.register_hook(lambda g: 10 * g)
    with torch.no_grad():
        a.add_(1)
    return a, torch.arange(3, dtype=torch.float64)


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
assert all(x == y for x, y in moves.values())

# %%
# The contents of the object move, and its identity stays. The last two rows contradict each other. A hook acts on the
# gradient, so it belongs to the at::Tensor and moves. The Python list of hooks does not move with it: a hook that you
# register on ``a`` after the swap goes into that list, and acts on ``b``. So register hooks after the swap, on a tensor
# that had none.
#
# Which holders follow
# --------------------
#
# ``a`` holds zeros and ``b`` ones. Something takes hold of ``a``; then we swap, and look through the holder. It sees the
# *new* numbers, or the *old* ones, or the swap is refused.


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
# warning. A ``state_dict`` belongs to this second group: its values are detached.
#
# Three rows are refused, though the three lines would swap all of them. A weak reference would even follow, as a strong
# one does. The danger is in containers built on weak references: they file something under a tensor, and the swap
# changes what it is filed under.
#
# Why graphs are in the way
# -------------------------
#
# C++ counts who holds an at::Tensor. The Python object is one holder, however many names it has. Autograd can add more.


def refusal(function, *args):
    try:
        function(*args)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)


def after_backward(a):
    loss = (a * a).sum()
    loss.backward()
    return loss


GRAPHS = {
    "three names": lambda a: [a, a],
    "detach()": Tensor.detach,
    "view, no_grad": no_grad_view,
    "2 * a": lambda a: 2 * a,
    "a * a": lambda a: a * a,
    "a * a, after backward": after_backward,
}

count = {}
for name, hold in GRAPHS.items():
    a, _ = two()
    holder = hold(a)
    count[name] = a._use_count()
    print(f"{name:24}{count[name]}")
assert count["three names"] == count["detach()"] == 1
assert count["2 * a"] == count["a * a, after backward"] == 2
assert count["view, no_grad"] == 2 and count["a * a"] > 2

# %%
# A view keeps its base. In ``2 * a`` the second holder is the node ``AccumulateGrad``: it will add to ``a.grad``, so it
# must know ``a``. In ``a * a`` the graph also saves ``a`` for its derivative. Backward frees what was saved, but the
# node lives as long as the result.
#
# What goes wrong if such a tensor is swapped? We look where the gradient arrives.


def gradient_goes(swap, graph):
    a, b = two()
    loss = graph(a).sum()
    if refusal(swap, a, b):
        return "swap refused"
    message = refusal(loss.backward)
    if message:
        assert "poisoned by swap_tensors" in message
        return "backward refused"
    return "to b" if a.grad is None else "to a"


print(f"{'':8}torch             three lines")
goes = {}
for name in ("2 * a", "a * a"):
    row = [gradient_goes(s, GRAPHS[name]) for s in (swap_tensors, three_lines)]
    goes[name] = row
    print(f"{name:8}{row[0]:18}{row[1]}")
assert goes["2 * a"] == ["backward refused", "to b"]
assert goes["a * a"] == ["swap refused", "to b"]

# %%
# The node holds the at::Tensor, which is now the content of ``b``. The model and the optimizer hold ``a``. The gradient
# would arrive where nobody looks: the very mistake that a swap is meant to avoid. A view has the same problem:
# writing into it would change ``b``.
#
# PyTorch refuses, with one exception. If the node is the only other holder, the swap is allowed, because that is the
# ordinary state after a training step whose loss still has a name. The node is *poisoned*: it raises if a backward pass
# reaches it again.
#
# All or none
# -----------
#
# A model has many weights. If you swap them one by one and one of them is refused, the model is left half converted. The
# package's ``swap_`` checks every tensor before it swaps the first. ``quantize_`` works this way.

layers_ = [nn.Linear(2, 2, bias=False) for _ in range(3)]
pairs = [
    (f"layer {i}", layer.weight, nn.Parameter(torch.ones(2, 2)))
    for i, layer in enumerate(layers_)
]


def swapped():
    return [bool((layer.weight == 1).all()) for layer in layers_]


view = layers_[1].weight[0]
message = refusal(swap_, pairs)
print(message)
assert message.startswith("layer 1 ") and swapped() == [False] * 3

del view
swap_(pairs)
assert swapped() == [True] * 3

# %%
# Bug museum
# ----------
#
# The flag left on
# ~~~~~~~~~~~~~~~~
#
# ``Module.to`` and ``load_state_dict`` swap ordinary parameters only if a global flag of PyTorch says so. PyTorch's
# tutorial on extension points (see Sources) sets the flag, and its last use never takes it back. What happens to a
# conversion, elsewhere and later? (T3)


def converts(situation):
    module = nn.Linear(2, 1)
    held = situation(module)
    try:
        module.to(torch.bfloat16)
        if isinstance(held, Tensor) and held.dim() == 0:
            held.backward()
    except RuntimeError as error:
        known = ("Couldn't swap", "poisoned")
        reason = next(word for word in known if word in str(error))
        dtypes = ", ".join(str(p.dtype)[6:] for p in module.parameters())
        return f"{reason}: {dtypes}"
    return "runs"


SITUATIONS = {
    "nothing special": lambda m: None,
    "a view is alive": lambda m: m.weight[0],
    "a weak reference": lambda m: weakref.ref(m.bias),
    "before backward": lambda m: m(torch.ones(1, 2)).sum(),
}

results = {}
flag_is_on = torch.__future__.get_swap_module_params_on_conversion
for on in (False, True):
    torch.__future__.set_swap_module_params_on_conversion(on)
    print("flag on" if on else "flag off")
    for name, situation in SITUATIONS.items():
        results[on, name] = converts(situation)
        print(f"  {name:18}{results[on, name]}")
torch.__future__.set_swap_module_params_on_conversion(False)

assert all(v == "runs" for (on, _), v in results.items() if not on)
assert results[True, "nothing special"] == "runs"
assert results[True, "a view is alive"] == "Couldn't swap: float32, float32"
assert results[True, "a weak reference"] == "Couldn't swap: bfloat16, float32"
assert results[True, "before backward"] == "poisoned: bfloat16, bfloat16"

# %%
# Three conversions that ran before now raise, in code that knows nothing of the flag. The third row is worse: the
# weight was converted, then the bias was refused, and the module is left with two dtypes.
#
# The fix is a ``with`` block, which restores the flag even after an error. The check: after every test, the flag is what
# it was before.


def fails():
    with swap_on_conversion():
        assert flag_is_on()
        raise ValueError


assert refusal(fails) == "" and not flag_is_on()

# %%
# The refusal that left a mark
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Swapping and swapping back after a refusal: all numbers are as before, and a graph is poisoned. (M20)
#
# Why does ``swap_`` ask first? It could try, and swap back if one pair is refused. The package's first version did so, and
# afterwards all numbers were as before. Here is the smallest case of what is wrong with that: one pair, where ``a``
# waits for a gradient and ``b`` has a view.


def refused_then_backward(swap):
    a, b = two()
    loss, view = (2 * a).sum(), b[0]
    assert refusal(swap, a, b)
    assert not a.any() and view.all()  # nothing has moved
    return refusal(loss.backward)


def ask_first(a, b):
    swap_([("a", a, b)])


print(refused_then_backward(swap_tensors)[:71])
assert "poisoned" in refused_then_backward(swap_tensors)
assert refused_then_backward(ask_first) is None

# %%
# PyTorch poisons the node of ``a``, then looks at ``b`` and refuses. Swapping back would poison it once more. The fix is
# to ask before any swap.
#
# The check runs a backward pass after the refusal. If you promise that nothing was changed, comparing numbers is not
# enough.
#
# Which sentence is false?
# ------------------------
#
# 1. A swap copies no number, however large the tensors are.
# 2. Every holder of ``p`` also sees ``p.data = x``.
# 3. A swap is refused if another tensor shares the memory.

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
# The third is false: what counts for a refusal is the at::Tensor, not the memory. The second is true, and still no way
# to quantise: setting ``.data`` reaches every holder, but leaves class and attributes as they were.
#
# Exercises
# ---------
#
# 1. *Easy.* Add a row to the table of holders: a tuple, a ``functools.partial``, an ``nn.ParameterList``, an entry of
#    ``dict(module.named_parameters())``. A good answer predicts each verdict first. Hint: which layer does it hold?
#
# Summary
# -------
#
# * A tensor is a Python object, an at::Tensor and a storage. A swap exchanges class, attributes and at::Tensor of two
#   objects, and copies no number. Whatever holds the object follows: lists, closures, tied modules, optimizers.
# * ``detach``, ``.data``, ``numpy`` and an older ``state_dict`` keep the old numbers, without a warning.
# * Views, weak references and graphs that saved the tensor make PyTorch refuse. A node that only waits for a gradient is
#   poisoned, even by a swap that is refused. So ``swap_`` asks first, and swaps all or none.
# * The flag that makes ``Module.to`` swap is global. Set it in a ``with`` block.
#
# Sources
# -------
#
# * PyTorch: `Extension points in nn.Module for load_state_dict and tensor subclasses <https://docs.pytorch.org/tutorials/recipes/recipes/swap_tensors.html>`_, the tutorial whose last use leaves the flag on.
# * PyTorch: `torch.utils.swap_tensors <https://docs.pytorch.org/docs/stable/generated/torch.utils.swap_tensors.html>`_.
# * `Add swap_tensors path to nn.Module._apply <https://github.com/pytorch/pytorch/pull/117167>`_: the flag, and why
#   graphs are in the way.
# * `Relax use_count constraints for swap_tensors <https://github.com/pytorch/pytorch/pull/127313>`_: the exception
#   for a node that waits, and the poison.
# * `Weak references and swapped tensors <https://github.com/pytorch/pytorch/issues/186796>`_: how a compiled module can
#   block a swap, and a discussion whether PyTorch should refuse.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
