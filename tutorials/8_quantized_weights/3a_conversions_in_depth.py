r"""
Conversions in depth: who still holds a parameter
=================================================

The lesson on `an optimizer that updates nothing <3_conversions.ipynb>`_ finds one conversion that keeps all holders, and
one that loses the optimizer. Which holders does each way to give a module new numbers keep? This page measures that,
prints a table for 13 ways, and compares it with what PyTorch's own tutorial says.

`Swaps in depth <2a_what_a_swap_moves.ipynb>`_ takes the exchange itself apart, and shows what happens when the swap flag
is left on.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["2a_what_a_swap_moves"]
# sphinx_gallery_museum = ["T1", "T2"]
# sphinx_gallery_words = ["Module._apply", "set_overwrite_module_params_on_conversion", "set_swap_module_params_on_conversion", "tensor subclass", "__tensor_flatten__", "load_state_dict assign", "to_empty"]

import inspect
from dataclasses import astuple, fields

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import swap_tensors

from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.instruments.references import (
    PATHS,
    Observed,
    Subclass,
    Tied,
    Traceable,
    observe,
    truth_table,
)
from lm_from_scratch.weights.quantize import quantize_
from lm_from_scratch.weights.quantized_weight import QuantizedWeight
from lm_from_scratch.weights.swap import swap_on_conversion, swap_parameters_

# %%
# Half a weight, in three ways
# ----------------------------
#
# A model with a single weight learns :math:`y = 3x`. At step 15 its weight is halved: in place, by an assignment, or by
# a swap. It should recover each time.

x = torch.linspace(-1, 1, 16)[:, None]
y = 3 * x


@torch.no_grad()
def in_place(module):
    module.weight.mul_(0.5)


def assignment(module):
    module.weight = nn.Parameter(0.5 * module.weight.detach())


def swap(module):
    new = 0.5 * module.weight.detach()
    swap_parameters_(module, {"weight": new.requires_grad_()})


def train(change):
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    losses = []
    for step in range(40):
        if step == 15:
            change(module)
        loss = F.mse_loss(module(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, module, optimizer


runs = {way.__name__: train(way) for way in (in_place, assignment, swap)}
losses = {name: run[0] for name, run in runs.items()}
_, (ax,) = figure(6.4, 3.0)
for i, (name, values) in enumerate(losses.items()):
    style = {"ls": ("-", "--", ":")[i], "lw": (1.8, 1.8, 4)[i]}
    ax.plot(values, color=COLOURS[i], label=name, **style)
ax.set(title="A weight is halved at step 15", xlabel="step", ylabel="loss")
ax.set_yscale("log")
ax.legend()
plt.show()

assert losses["in_place"] == losses["swap"]
assert losses["swap"][-1] < 1e-2 * losses["swap"][15]
assert losses["assignment"][15:] == [losses["assignment"][15]] * 25

# %%
# After the assignment the loss does not move at all. The optimizer holds the tensor that was ``module.weight`` before.
# That tensor gets no gradient any more, and an optimizer passes over a tensor whose gradient is ``None``.
#
# The module's own weight does get a gradient. It is never set to zero, so it is the sum over 25 steps.

_, module, optimizer = runs["assignment"]
(held,) = optimizer.param_groups[0]["params"]
once = torch.autograd.grad(F.mse_loss(module(x), y), module.weight)[0]
print("the optimizer's tensor:", held.grad)
print("the module's:", module.weight.grad / once, "gradients")
assert held is not module.weight and held.grad is None
assert torch.allclose(module.weight.grad, 25 * once)

# %%
# The optimizer saw the change in place. People often say that it cannot; but what it cannot see is a new object.
#
# The lesson's check compares objects, by name.


def stranded(module, optimizer):
    groups = optimizer.param_groups
    held = {id(p) for group in groups for p in group["params"]}
    return [n for n, p in module.named_parameters() if id(p) not in held]


for name, (_, module, optimizer) in runs.items():
    print(f"{name:11} stranded: {stranded(module, optimizer)}")
    assert bool(stranded(module, optimizer)) == (name == "assignment")

# %%
# Three ways of ``Module.to``
# ---------------------------
#
# ``module.to``, ``bfloat16``, ``cuda``, ``to_empty`` and their like run one function over all parameters. What comes
# out must get into the module. PyTorch has three ways to put it there, here without its checks and without gradients.


def apply_(module, function, way):
    for child in module.children():
        apply_(child, function, way)
    for name, old in module._parameters.items():
        if old is None:  # a layer without bias
            continue
        new = function(old.detach())
        if way == ".data =":
            old.data = new
        elif way == "overwrite flag":
            module._parameters[name] = nn.Parameter(new)
        elif way == "swap flag":
            swap_tensors(old, nn.Parameter(new))


# %%
# The first way is the default. A global flag in ``torch.__future__`` chooses each of the other two. The package has a
# ``with`` block for the swap.
#
# To compare the three you need an instrument. ``observe`` builds a matrix that an embedding and a head share, hands it
# to several holders, converts the module and looks at every holder.

print(inspect.getsource(Observed))

# %%
# PyTorch's three ways are three of its ``PATHS``. Our few lines must do the same.

NAMES = {
    ".data =": "to",
    "overwrite flag": "to, overwrite flag",
    "swap flag": "to, swap flag",
}
ways = {way: observe(*PATHS[name]) for way, name in NAMES.items()}
for way, seen in ways.items():
    assert seen == observe(lambda m, way=way: apply_(m, Tensor.bfloat16, way))

print(f"{'':12}", *(f"{way:15}" for way in ways))
for field in fields(Observed):
    values = [str(getattr(seen, field.name)) for seen in ways.values()]
    print(f"{field.name:12}", *(f"{v:15}" for v in values))

# %%
# In words:
#
# * ``.data =`` keeps the object and pours new contents into it. Optimizer, tie and weak reference follow. A view does
#   not: it shows the old numbers from now on, without a warning.
# * **Overwriting** makes a new parameter for each name. It is the assignment of the first section, done to the whole
#   model. The tie goes too, because each of the two modules gets a parameter of its own.
# * **Swapping** keeps the object and exchanges the contents. If a holder cannot follow, PyTorch refuses the conversion.

data, overwrite, swapped = ways.values()
assert (data.optimizer, data.tie, data.view) == (True, True, "left")
assert (overwrite.optimizer, overwrite.tie) == (False, False)
assert (swapped.optimizer, swapped.tie) == (True, True)
assert swapped.view == swapped.weak == "RuntimeError"

# %%
# The flag swaps *instead of* ``.data =``, not on top of it. An attribute tells the two apart: it stays on an object
# whose contents change, and leaves with the contents in a swap.

for on in (False, True):
    module = nn.Linear(2, 2)
    module.weight.unit = "metre"
    with swap_on_conversion(on):
        module.bfloat16()
    print(f"swap flag {on!s:6} has its unit: {hasattr(module.weight, 'unit')}")
    assert hasattr(module.weight, "unit") is not on

# %%
# There are contents that ``.data =`` cannot pour: those of the meta device into a CPU tensor or the other way round,
# and sparse ones into a dense tensor. PyTorch does not complain then. It makes new parameters.

EMPTY = nn.Linear(2, 2, device="meta")
CONVERSIONS = {
    "bfloat16": (nn.Linear(2, 2), lambda m: m.bfloat16()),
    "to meta": (nn.Linear(2, 2), lambda m: m.to("meta")),
    "to_empty": (EMPTY, lambda m: m.to_empty(device="cpu")),
    "to_sparse": (nn.Linear(2, 2), lambda m: m._apply(lambda t: t.to_sparse())),
}
lost = {}
for name, (module, convert) in CONVERSIONS.items():
    optimizer = torch.optim.SGD(module.parameters())
    convert(module)
    lost[name] = stranded(module, optimizer)
    print(f"{name:10} stranded: {lost[name]}")
assert not lost.pop("bfloat16")
assert all(names == ["weight", "bias"] for names in lost.values())

# %%
# So an optimizer that is built on a meta-device skeleton holds nothing of the module after ``to_empty``. With the swap
# flag it holds all of it, as the lesson shows.
#
# A loss that waits
# -----------------
#
# Between forward and backward the graph holds parameters as well: a node that needs the numbers for a gradient, and
# ``AccumulateGrad``, at which the gradient arrives.
#
# ``.data =`` takes no notice of either. The graph was recorded in float32 and delivers float32, to a parameter that is
# bfloat16 by then.

module = Tied()
loss = F.linear(torch.ones(1, 4), module.weight).sum()
module.bfloat16()
loss.backward()
dtypes = module.weight.dtype, module.weight.grad.dtype
print("parameter and gradient:", *dtypes)
assert dtypes == (torch.bfloat16, torch.float32)

# %%
# A swap is stricter, for the reasons on the page on swaps: it is refused, or the node at which the gradient would arrive
# is poisoned.

for name, x_needs in (("the graph needs it", True), ("it ends there", False)):
    module = Tied()
    inputs = torch.ones(1, 4, requires_grad=x_needs)
    loss = F.linear(inputs, module.weight).sum()
    try:
        with swap_on_conversion():
            module.bfloat16()
        print(f"{name:19} converted")
        loss.backward()
    except RuntimeError as error:
        reason = str(error.__cause__ or error)
        print(f"{name:19} {reason[:56]}")
    assert (module.weight.dtype == torch.float32) is x_needs
    assert ("poisoned" in reason) is not x_needs

# %%
# Convert before the forward pass, or after the backward pass. A loss that is still in a variable then does no harm: its
# graph was freed, and the next forward pass makes a new node. The gradient is converted along.

module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
loss = module(torch.ones(2, 4)).sum()
loss.backward()
with swap_on_conversion():
    module.bfloat16()
assert {p.grad.dtype for p in module.parameters()} == {torch.bfloat16}
module(torch.ones(2, 4).bfloat16()).sum().backward()
assert loss.grad_fn is not None  # the old loss is still there

# %%
# The table
# ---------
#
# Now everything in one table. Its rows are all paths of the instrument. ``yes`` means that the holder follows or the
# statement is true, ``-`` that it does not, ``!`` that the conversion is refused, ``!!`` that the backward pass is. A
# *subclass* wraps a tensor of numbers, its *payload*; a *traceable* one has two methods that tell PyTorch what it
# holds.

YES = (True, "follows", "arrives")
REFUSED = {"RuntimeError": "!", "RuntimeError in backward": "!!"}
COLUMNS = "same  opt   tie   mem   dtype file  view  weak  graph leaf"


def as_text(table):
    lines = [f"{'':24}{COLUMNS}"]
    for name, seen in table.items():
        cells = ["yes" if v in YES else "-" for v in astuple(seen)]
        cells = [REFUSED.get(v, c) for v, c in zip(astuple(seen), cells)]
        lines.append(f"{name:24}" + "".join(f"{cell:6}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


table = truth_table()
computed = as_text(table)
print(computed)

# %%
# The columns are the fields of ``Observed``: same object, optimizer, tie, old memory, new dtype, memory of the file's
# tensors, a view, a weak reference, a loss that needs the weight, and one that ends in it.
#
# Read it by rows. All rows of swaps agree in their last four columns, whoever asked for the swap. And no row has only
# good news: a way that refuses nothing leaves a holder behind, or keeps the dtype. (After a change in place, autograd's
# version counter stops a backward pass that needs the old numbers.)

last = {name: astuple(seen)[-4:] for name, seen in table.items()}
swaps = {name for name in table if "swap" in name or "traceable" in name}
assert len({last[name] for name in swaps}) == 1
for name in set(table) - swaps:
    assert "RuntimeError" not in last[name]
    stays_behind = {"left", "lost"} & set(last[name])
    assert stays_behind or not table[name].new_dtype

# %%
# The last four rows are ``load_state_dict``. ``assign`` says whose properties count: the module's, which takes values
# only, or the checkpoint's, here bfloat16 for a float32 module. The flag says how they get in.
#
# ``assign`` without the flag is the assignment of the first section again. With the flag the optimizer and the tie
# stay. With the flag or without, what was assigned lies in the memory of the checkpoint: a step of training changes the
# checkpoint too, and every other module that loaded it in this way.

loads = {name: seen for name, seen in table.items() if "load" in name}
assert [n for n, s in loads.items() if not s.optimizer] == ["load, assign"]
assert [n for n, s in loads.items() if not s.tie] == ["load, assign"]
for name, seen in loads.items():
    assert seen.checkpoint == seen.new_dtype == ("assign" in name)

# %%
# Is that PyTorch, or this version of it? The same table was recorded with torch 2.11.

RECORDED_WITH_2_11 = """
                        same  opt   tie   mem   dtype file  view  weak  graph leaf
weight.mul_(2)          yes   yes   yes   yes   -     -     yes   yes   !!    yes
weight = Parameter(...) -     -     -     -     yes   -     -     -     -     -
swap_tensors            yes   yes   yes   -     yes   -     !     !     !     !!
to                      yes   yes   yes   -     yes   -     -     yes   yes   yes
to, overwrite flag      -     -     -     -     yes   -     -     -     -     -
to, swap flag           yes   yes   yes   -     yes   -     !     !     !     !!
to, subclass            yes   yes   yes   yes   -     -     yes   yes   yes   yes
to, subclass, swap flag yes   yes   yes   -     yes   -     !     !     !     !!
to, traceable subclass  yes   yes   yes   -     yes   -     !     !     !     !!
load                    yes   yes   yes   yes   -     -     yes   yes   !!    yes
load, swap flag         yes   yes   yes   yes   -     -     !     !     !     !!
load, assign            -     -     -     -     yes   yes   -     -     -     -
load, assign, swap flag yes   yes   yes   -     yes   yes   !     !     !     !!
""".strip("\n")

before, now = RECORDED_WITH_2_11.splitlines(), computed.splitlines()
changed = [new for old, new in zip(before, now, strict=True) if old != new]
print("rows that changed since torch 2.11:", changed)
assert not changed

# %%
# Nothing has changed between the two.
#
# What PyTorch's tutorial says
# ----------------------------
#
# The tutorial that introduced all this is for torch 2.3 and later (bug museum: T1, T2). These sentences are still true,
# as this page or one of those on swaps shows:
#
# * A swap exchanges class, attributes, slots and ``at::Tensor``.
# * A change out of place strands the optimizer, without an error. Retellings that say *in place* are wrong.
# * ``.data =`` does not do for sparse tensors, nor for a subclass. The museum below has one.
# * With the flag, conversions swap, and ``assign`` keeps the references.
#
# Two things are different today. The tutorial says that without the flag and without ``assign`` both tensors must be of
# one class; it is enough that one of the two knows ``copy_``, as ``QuantizedWeight`` does. And it does not say that a
# subclass that says what it holds is swapped without the flag.

layer = nn.Linear(8, 4, bias=False)
quantize_(layer)
weight, new = layer.weight, torch.ones(4, 8)
layer.load_state_dict({"weight": new})  # flag off, no assign
assert layer.weight is weight and isinstance(weight, QuantizedWeight)
torch.testing.assert_close(weight.dequantize(), new)

layer.bfloat16()  # flag off
print(weight)
assert layer.weight is weight and weight.scale.dtype == torch.bfloat16
assert table["to, traceable subclass"] == table["to, swap flag"]

# %%
# The two methods are ``__tensor_flatten__`` and ``__tensor_unflatten__``, PyTorch's protocol for subclasses that wrap
# other tensors; ``torch.compile`` reads them too. PyTorch swaps traceable classes by itself, and so refuses them by
# itself: a view or a weak reference stops ``layer.to``, with the flag off.
#
# Bug museum
# ----------
#
# A dtype that is not true
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# PyTorch's tutorial begins with a class that is not traceable. ``Subclass`` of the package is such a class;
# ``Traceable`` adds the two methods. (T9)

for kind in (Subclass, Traceable):
    module = Tied(kind)
    identity = id(module.weight)
    module.bfloat16()
    payload = module.weight.payload.dtype
    print(f"{kind.__name__:10}{module.weight.dtype}, payload {payload}")
    assert id(module.weight) == identity
    assert module.weight.dtype == torch.bfloat16
    assert (payload == torch.bfloat16) is (kind is Traceable)

# %%
# ``.data =`` pours one ``at::Tensor`` into another, and with it the dtype. The payload is an attribute of the Python
# object, which ``.data =`` never sees. So the module says bfloat16, and its numbers are float32, with twice the bytes.
#
# The fix is the two methods, or the flag. The check looks at the payload: the id is the same in both cases, and so is the
# dtype that the module prints.
#
# The checkpoint that came after the optimizer
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# ``assign=True`` is the usual way to fill a skeleton. Here it fills a module that an optimizer holds already. (T10)


def resume(flag):
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with swap_on_conversion(flag):
        module.load_state_dict(module.checkpoint, assign=True)
    loaded = module.weight.detach().clone()
    for _ in range(5):
        out = module.head(module.embed(torch.tensor([1, 2])))
        out.float().pow(2).mean().backward()
        optimizer.step()
    return not torch.equal(module.weight, loaded), stranded(module, optimizer)


for flag in (False, True):
    moved, names = resume(flag)
    print(f"flag {flag!s:6} moved {moved!s:6} stranded {names}")
    assert moved == (not names) == flag

# %%
# Five steps change nothing, and there are two names where there was one: the tie is gone. The fixed line sets the flag,
# or builds the optimizer after loading, as PyTorch's documentation asks, and ties again. The check is ``stranded``.
#
# Which sentence is false?
# ------------------------
#
# 1. An optimizer sees changes that are made to a weight in place.
# 2. ``load_state_dict(assign=True)`` copies nothing, with the flag or without.
# 3. A conversion to the dtype that a module has already is never refused.
#
# The table answers the first two. The code below tries the third.

assert table["weight.mul_(2)"].optimizer  # 1
assert all(table[name].checkpoint for name in loads if "assign" in name)  # 2

module = Tied()
view = module.weight[:2]
try:
    with swap_on_conversion():
        module.float()  # 3
    raise AssertionError("converted")
except RuntimeError as error:
    print(error, "-", str(error.__cause__)[:31])

# %%
# The third is false: the flag swaps even where there is nothing to convert. The first is true, because an optimizer
# sees the object, whatever happens in it.
#
# Exercises
# ---------
#
# 1. *Easy.* Call ``observe`` with a function that sets ``module.weight.data`` to a bfloat16 copy of the weight. A good
#    answer predicts the ten fields first. Which row of the table are they equal to?
# 2. *Medium.* Give the weight of a ``Tied`` a hook that doubles its gradient, convert, and look at the gradient of
#    ``module.weight.sum()``. Do so for all ``PATHS``: each is a tuple of the conversion and, for some, the argument of
#    ``Tied``. A good answer has a cell for each row, and explains those of the swaps with the page on swaps.
#
# Summary
# -------
#
# * A change in place is seen by an optimizer, a swap too; an assignment is not, and there is no error.
# * ``Module.to`` pours new contents into the old object, makes a new parameter, or swaps. The first way leaves views
#   behind, the second loses the optimizer and ties, the third refuses.
# * Where contents cannot be poured, on the way to or from the meta device, PyTorch makes new parameters without a
#   warning.
# * A traceable subclass is swapped without the flag. One that is not keeps its payload, whatever the dtype says.
# * All 13 paths behave alike in torch 2.11 and in the version printed below.
#
# Sources
# -------
#
# * PyTorch: `Extension points in nn.Module for load_state_dict and tensor subclasses <https://docs.pytorch.org/tutorials/recipes/recipes/swap_tensors.html>`_. The tutorial that this page checks.
# * PyTorch: `torch.__future__ <https://docs.pytorch.org/docs/stable/future_mod.html>`_, with both flags, `Module.load_state_dict <https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict>`_ on ``assign``, and `torch.utils.swap_tensors <https://docs.pytorch.org/docs/stable/generated/torch.utils.swap_tensors.html>`_.
# * PyTorch: the swap in `Module.to <https://github.com/pytorch/pytorch/pull/117167>`_, `for subclasses without the flag <https://github.com/pytorch/pytorch/pull/122755>`_, and `after a backward pass <https://github.com/pytorch/pytorch/pull/127313>`_, 2024.

import platform

import lm_from_scratch

assert len(table) == 13

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
