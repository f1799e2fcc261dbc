r"""
Swapping two tensors
====================

You want to give a built model other weights: 8-bit ones, ones of another shape, ones from a file. But the model is not
alone. An optimizer, a tied head, a list and a variable of yours hold the same tensors. If one of them gets the new
weight and the others keep the old one, training goes on without an error, and does nothing.

How can everyone who holds one tensor get another at the same time? PyTorch exchanges the *contents* of two tensor
objects. This page takes the exchange apart: what moves, what stays, and what is refused. A table tells, and the page
fills it by trying.

You will learn
--------------

* the three layers of a tensor: Python object, ``at::Tensor``, storage,
* what ``torch.utils.swap_tensors`` does, in three lines of your own,
* who follows a swap, and who keeps the old numbers in silence,
* why PyTorch refuses some swaps, shown by making them all the same,
* how to swap many tensors, all or none.

Before you start
----------------

Read the page on `GPT-2 <../1_gpt2/2_gpt2.ipynb>`_ for tied weights, and the page on
`updates in backward <../7_optimizers/4_in_backward.ipynb>`_ for hooks. One CPU core is enough.

One name is not enough
----------------------

Five places hold one weight here.
"""

import inspect
import weakref
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.swap import is_held, swap_, swap_on_conversion

weight = nn.Parameter(torch.zeros(5, 3))
embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
embedding.weight = head.weight = weight  # tied
optimizer = torch.optim.SGD([weight], lr=0.1)
watched = [weight]


def places():
    return {
        "name": weight,
        "list": watched[0],
        "embedding": embedding.weight,
        "head": head.weight,
        "optimizer": optimizer.param_groups[0]["params"][0],
    }


def have_ones():
    return [k for k, x in places().items() if torch.equal(x, torch.ones(5, 3))]


new = nn.Parameter(torch.ones(5, 3))
head.weight = new
print("after assignment:", have_ones())
assert have_ones() == ["head"]

# %%
# An assignment changes one place, and an object does not know the others that hold it. So we undo it, and leave every
# place as it is. We change the object.

head.weight = weight
swap_tensors(weight, new)
print("after a swap:", have_ones())
assert have_ones() == list(places()) and not new.any()

# %%
# All five have the ones, and ``new`` has the zeros. The two tensors need not be alike. These differ in shape.

t1, t2 = torch.arange(2), torch.arange(3)
swap_tensors(t1, t2)
print(t1, t2)
assert (t1.tolist(), t2.tolist()) == ([0, 1, 2], [0, 1])

# %%
# Three layers
# ------------
#
# What Python calls a tensor is three things, one behind the other.
#
# * The **Python object** has an identity, a class and a ``__dict__`` of attributes. Names, lists and optimizers hold
#   this one.
# * The **at::Tensor** is a C++ object. It has shape, strides and dtype, and all that autograd knows: ``requires_grad``,
#   the gradient, the node that made it.
# * The **storage** is the memory. Several at::Tensors may share it: ``detach`` makes a new Python object with a new
#   at::Tensor over the same storage.
#
# The addresses of all three can be read; ``_cdata`` is that of the at::Tensor. Names with one leading underscore, here
# and below, are private to PyTorch: learn with them, and build nothing on them.
#
# Here are two tensors before and after a swap, with a list that holds the first and an alias from ``detach``. Every
# arrow of the figure is read from the addresses.


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

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["swap_tensors", "torch.utils.swap_tensors", "weakref", "tensor subclass"]
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
# Two arrows have changed, and only these. Names still lead to the same objects, and each at::Tensor keeps its storage.
# The alias has an at::Tensor of its own; it still shows the old memory, which is that of ``t2`` now.
#
# The swap in three lines
# -----------------------
#
# The class and the attributes belong to the Python object. So they must change places too: a quantised weight without
# its class would be nonsense.


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
# What the object *is* moves; which object it is stays. Our three lines differ from PyTorch in the slots alone. A slot is
# an attribute that a class keeps outside ``__dict__``.
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
# Who follows
# -----------
#
# Now the holders. ``a`` holds zeros and ``b`` ones. Something takes hold of ``a``; then we swap, and look through it. It
# sees the *new* numbers, or the *old* ones, or the swap is refused.


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
    except RuntimeError as error:
        return "refused", str(error)
    return ("old", "new")[int(look(holder).max())], ""


print(f"{'':20}torch   three lines")
seen, ours, reasons = {}, {}, {}
for name, row in HOLDERS.items():
    seen[name], reasons[name] = sees(swap_tensors, *row)
    ours[name], _ = sees(three_lines, *row)
    print(f"{name:20}{seen[name]:8}{ours[name]}")

follow = {"list", "key of a dict", "closure", "two tied modules", "optimizer"}
refused = {"view", "view, no_grad", "weak reference"}
aliases = {"detach()", ".data", "numpy()", "state_dict()"}
assert {k for k, v in seen.items() if v == "new"} == follow
assert {k for k, v in seen.items() if v == "old"} == aliases
assert {k for k, v in seen.items() if v == "refused"} == refused
assert all(ours[k] == seen[k] for k in follow | aliases)

# %%
# Whoever holds the object follows. Whoever has another at::Tensor over the same storage does not, and nobody is told.
# A ``state_dict`` belongs to this second group: its values are detached, so one from before the swap holds the old
# numbers.
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
# Why PyTorch refuses
# -------------------
#
# There are three reasons.
#
# **Slots.** A slot has a fixed place in the memory of the object. A class without that slot has no such place, and
# Python itself will not assign it. PyTorch asks first.


def refusal(function, *args):
    try:
        function(*args)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)


a, b = with_slots()[0], torch.zeros(3)
messages = [refusal(swap, a, b) for swap in (swap_tensors, three_lines)]
print(*messages, sep="\n")
assert "different slots" in messages[0] and "layout differs" in messages[1]

# %%
# **Weak references.** With our three lines a weak reference saw the new numbers, as every strong one does. The danger
# is in containers that are built on them: they file something under a tensor, and the swap changes what it is filed
# under. A plain dict does that as well, and is not refused. Here is one that you use daily.

print(reasons["weak reference"])

for n in (2, 3):
    p = nn.Parameter(torch.zeros(3))
    adamw = torch.optim.AdamW([p])
    p.grad = torch.ones(3)
    adamw.step()
    swap_tensors(p, nn.Parameter(torch.zeros(n)))
    moment = adamw.state[p]["exp_avg"]
    assert moment.shape == (3,) and moment.all()
    p.grad = torch.zeros(n)
    message = refusal(adamw.step)
    moved = bool(p.any())
    print(f"shape {n}: {(message or 'no error')[:52]}; moved {moved}")
    assert ("must match" in message and not moved) if n == 2 else moved

# %%
# The optimizer follows, and its state stays: moments of the weight that has left. With another shape they do not fit.
# With an equal shape they are used: the weight moved although its gradient was zero. After a swap that changes what a
# weight means, delete ``optimizer.state[p]``.
#
# Weak references are more common than they look. An LSTM keeps them to its own weights.

lstm, layer = nn.LSTM(2, 2), nn.Linear(2, 2)
assert len(weakref.getweakrefs(lstm.weight_ih_l0)) == 1
assert not weakref.getweakrefs(layer.weight)

# %%
# **Other holders of the at::Tensor.** C++ counts them. The Python object is one holder, whatever number of names it has.
# Autograd can be others.

print(reasons["view"][:76])


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
# must know ``a``. In ``a * a`` the graph also saves ``a`` for its derivative. Backward lets go of what was saved, but as
# long as the result lives, the node lives.
#
# What goes wrong if these are swapped? We ask where the gradient arrives.


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
# The node holds the at::Tensor, and that is the content of ``b`` now. The model and the optimizer hold ``a``. The
# gradient would arrive where no one looks: the very silence that a swap was to cure. A view has the same trouble;
# writing into it would change ``b``.
#
# PyTorch refuses, with one exception. If the node is the only other holder, the swap is allowed, because that is the
# ordinary state after a training step whose loss still has a name. The node is *poisoned*: it raises if a backward pass
# reaches it again.
#
# All or none
# -----------
#
# A model has many weights. Swap them one by one, and let one be refused:


def three_layers():
    layers = (nn.Linear(2, 2, bias=False) for _ in range(3))
    model = nn.Sequential(*layers)
    new = [nn.Parameter(torch.ones(2, 2)) for _ in model]
    return model, list(model.parameters()), new


def swapped(model):
    return [bool((p == 1).all()) for p in model.parameters()]


model, old, new = three_layers()
view = old[1][0]
for p, q in zip(old, new):
    if refusal(swap_tensors, p, q):
        break
print(swapped(model))
assert swapped(model) == [True, False, False]

# %%
# A model swapped in part is worse than one not swapped. The package asks every tensor first.

print(inspect.getsource(swap_).split('"""')[2])
print(inspect.getsource(is_held))

model, old, new = three_layers()
view = old[1][0]
pairs = [(f"layer {i}", *pair) for i, pair in enumerate(zip(old, new))]
message = refusal(swap_, pairs)
print(message)
assert message.startswith("layer 1 ") and swapped(model) == [False] * 3

del view
swap_(pairs)
assert swapped(model) == [True] * 3

# %%
# Without the view all three are swapped. ``quantize_`` of the package works this way: it makes all the new weights, then
# swaps.
#
# Bug museum
# ----------
#
# T3: the flag left on
# ~~~~~~~~~~~~~~~~~~~~
#
# Old defects have numbers in this chapter; this is T3. ``Module.to`` and ``load_state_dict`` swap ordinary parameters
# only if a global flag of PyTorch says so. PyTorch's tutorial on extension points (see Sources) sets the flag, and its
# last use never takes it back. What happens to a conversion, elsewhere and later?


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
# Three conversions that used to run now raise, in code that never heard of the flag. The third row is worse: the
# weight was converted, then the bias was refused, and the module is left with two dtypes.
#
# The fixed line is a ``with``. It restores what was there, also after an error. The check: after every test, the flag
# is what it was before.


def fails():
    with swap_on_conversion():
        assert flag_is_on()
        raise ValueError


assert refusal(fails) == "" and not flag_is_on()

# %%
# The refusal that left a mark
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Swapping and swapping back after a refusal: all numbers are as before, and a graph is poisoned.
#
# ``swap_`` looks longer than it need be. Why not try, and swap back what was done when one is refused? Our first version
# did so, and afterwards all numbers were as before. Here is the smallest case of what is wrong with it: one pair, where
# ``a`` waits for a gradient and ``b`` has a view.


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
# PyTorch poisons the node of ``a``, then looks at ``b`` and refuses. Swapping back would poison it once more. The fixed
# line is the call of ``is_held`` before any swap.
#
# The check that catches it runs a backward pass after the refusal. To compare numbers is not enough when the promise is
# that nothing was changed.
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
# 2. *Easy.* Swap a buffer, the running mean of a BatchNorm layer, and then swap a parameter for a plain tensor. A right
#    answer says what ``named_parameters`` lists in the second case, and why. Hint: ``module._parameters``.
# 3. *Medium.* Give the three lines the missing loop over slots. A right answer moves the row *a slot*, also when only
#    one of the two has set it. Hint: ``copyreg._slotnames`` and ``hasattr``.
# 4. *Hard.* Write a swap that moves an optimizer's state along, for equal shapes. A right answer goes on exactly like a
#    run in which the optimizer held the other tensor from the start. Hint: both tensors need a key in ``state``.
#
# Summary
# -------
#
# * A tensor is a Python object, an at::Tensor and a storage. A swap exchanges class, attributes and at::Tensor of two
#   objects, and copies no number.
# * Identity stays, and with it whoever holds the object: lists, closures, tied modules, optimizers. An optimizer's
#   state stays too.
# * Views, weak references and graphs that saved the tensor make PyTorch refuse. ``detach``, ``.data``, ``numpy`` and an
#   older ``state_dict`` keep the old numbers in silence.
# * A node that only waits for a gradient is poisoned, even by a swap that is refused. ``swap_`` asks first, and swaps
#   all or none.
#
# As a rule PyTorch converts and loads modules by other means, unless you ask for a swap. The next page follows an optimizer
# through each of them, and finds the one that updates nothing.
#
# Sources
# -------
#
# * PyTorch: `Extension points in nn.Module for load_state_dict and tensor subclasses <https://docs.pytorch.org/tutorials/recipes/recipes/swap_tensors.html>`_, the tutorial that this chapter takes up.
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
