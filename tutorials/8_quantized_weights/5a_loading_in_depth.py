r"""
Loading in depth: who wins, module or checkpoint?
=================================================

A model has weights of 8 bits in bfloat16. A checkpoint has float32, or 8 bits, or 4 bits. ``load_state_dict`` brings the
two together, and they disagree about class, dtype and memory. The lesson on `a checkpoint that does not fit
<5_loading.ipynb>`_ says who wins in the simplest case. Here are five combinations of classes, two values of ``assign``
and a global flag: all twenty, and five laws that they follow.

Three ways into a module
------------------------

For each parameter, ``load_state_dict`` takes the checkpoint's tensor ``x`` and does one of three things.

* By default it calls ``param.copy_(x)``. The numbers go into the tensor that is there.
* With ``assign=True`` it calls ``setattr(module, name, x)``. The module gets another tensor.
* With the swap flag on, it calls ``new = param.module_load(x, assign=assign)`` and then ``swap_tensors(param, new)``.
  The object stays and becomes ``new``.

To see what each does, we load plain and int8 into a plain module, and plain, int8 and int4 into an int8 one. (The four
combinations that are left are exercise 1.) The module computes in bfloat16 and the checkpoint is float32, so that the
dtype tells who won.
"""

import inspect
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lm_from_scratch.weights import quantized_weight
from lm_from_scratch.weights.int4 import Int4Weight
from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.quantized_weight import QuantizedWeight
from lm_from_scratch.weights.swap import swap_on_conversion

FORMS = {
    "plain": lambda w: w,
    "int8": Int8Weight.quantize,
    "int4": lambda w: Int4Weight.quantize(w, 16),
}


def matrix(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 32, generator=generator).to(dtype)


def module_with(form):
    layer = nn.Linear(32, 6, bias=False)
    weight = FORMS[form](matrix(0, torch.bfloat16))
    layer.weight = nn.Parameter(weight, requires_grad=form == "plain")
    return layer


def held(x):  # the plain tensors that hold the numbers
    return [getattr(x, name) for name in getattr(x, "held", ())] or [x]


def share(a, b):
    starts = [x.untyped_storage().data_ptr() for x in held(a)]
    return any(x.untyped_storage().data_ptr() in starts for x in held(b))


# %%
# After loading we look at four things: the class of the weight and its dtype, whether its memory is the checkpoint's,
# and whether an optimizer that was built earlier still holds the module's weight.


class Loaded(NamedTuple):
    kind: str
    dtype: torch.dtype
    memory: str
    optimizer: str


def kind_of(tensor):
    names = {Int8Weight: "int8", Int4Weight: "int4"}
    return names.get(type(tensor), "plain")


def load(into, source, assign, flag):
    layer, x = module_with(into), FORMS[source](matrix(1))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with swap_on_conversion(flag):
        layer.load_state_dict({"weight": x}, assign=assign)
    (known,) = optimizer.param_groups[0]["params"]
    return Loaded(
        kind_of(layer.weight),
        layer.weight.dtype,
        "shared" if share(layer.weight, x) else "own",
        "follows" if known is layer.weight else "lost",
    )


SOURCES = {"plain": ("plain", "int8"), "int8": ("plain", "int8", "int4")}


def fill_table():
    return {
        (into, source, assign, flag): load(into, source, assign, flag)
        for into, sources in SOURCES.items()
        for source in sources
        for assign in (False, True)
        for flag in (False, True)
    }


table = fill_table()
print("module file   assign flag | class dtype    memory optimizer")
for (into, source, assign, flag), row in table.items():
    dtype = str(row.dtype).removeprefix("torch.")
    print(
        f"{into:6} {source:6} {assign!s:6} {'on' if flag else 'off':4} | "
        f"{row.kind:5} {dtype:8} {row.memory:6} {row.optimizer}"
    )

# %%
# Five laws
# ---------
#
# 1. Without ``assign`` the module wins: class and dtype stay, the memory is its own, and the optimizer follows. The flag
#    changes none of the four. (The exception is a state dict that was loaded with ``assign=True`` before, T11 below.)
# 2. With ``assign`` the checkpoint's dtype wins, always.
# 3. With ``assign`` and no flag, its class wins as well, and so does its memory. The optimizer is lost: what it holds is
#    no longer part of the module.
# 4. With both, the optimizer follows. A quantised checkpoint brings its class and its memory.
# 5. With both, a plain checkpoint is quantised on arrival if the module is quantised.

assert len(table) == 20
for (into, source, assign, flag), row in table.items():
    if not assign:
        assert row == (into, torch.bfloat16, "own", "follows")  # 1
        continue
    assert row.dtype == torch.float32  # 2
    if not flag:
        assert row == (source, torch.float32, "shared", "lost")  # 3
    elif into != "plain" and source == "plain":
        assert row == (into, torch.float32, "own", "follows")  # 5
    else:
        assert row == (source, torch.float32, "shared", "follows")  # 4

# %%
# One row is a trap. A quantised module, a plain checkpoint, ``assign=True`` and no flag: the module loads without a
# word and is not quantised any more.

trap = table["int8", "plain", True, False]
print(trap)
assert trap.kind == "plain" and trap.optimizer == "lost"

# %%
# The numbers
# -----------
#
# Which numbers arrive? From int8 to int8, the codes themselves, and scales that are rounded to the module's dtype. From
# int4 to int8, the values are decoded and rounded to codes a second time. A plain checkpoint is rounded once.

layer, x = module_with("int8"), Int8Weight.quantize(matrix(1))
layer.load_state_dict({"weight": x})
assert torch.equal(layer.weight.codes, x.codes)
assert torch.equal(layer.weight.scale, x.scale.bfloat16())


def error(weight):
    return (weight.dequantize() - matrix(1)).abs().mean().item()


print("mean error of the weights")
errors = {}
for source in ("plain", "int8", "int4"):
    x = FORMS[source](matrix(1))
    layer = module_with("int8").float()
    layer.load_state_dict({"weight": x})
    before = 0.0 if source == "plain" else error(x)
    errors[source] = error(layer.weight)
    print(f"{source:5} {before:.4f} -> int8 {errors[source]:.4f}")
assert errors["plain"] == errors["int8"] < errors["int4"] / 5

# %%
# Rounding cannot be undone: what came as int4 stays as wrong as int4, though it has 8 bits now.
#
# One more thing comes from the module in every case: ``requires_grad``. A plain weight that is trained becomes an int8
# weight that asks for a gradient, and can have none. The package refuses at the first use.

layer = module_with("plain")
with swap_on_conversion():
    layer.load_state_dict({"weight": x}, assign=True)
assert isinstance(layer.weight, Int4Weight) and layer.weight.requires_grad
try:
    layer(torch.ones(1, 32))
except ValueError as refusal:
    print(refusal)
layer.requires_grad_(False)
assert layer(torch.ones(1, 32)).shape == (1, 6)

# %%
# The extension point
# -------------------
#
# Law 5 is not torch's. A class of tensors may answer ``Tensor.module_load`` in its ``__torch_function__``: the method is
# called with the module's tensor, the checkpoint's and ``assign``, if either of them has such a class. What it returns
# is swapped in. It must be a new object.

print(inspect.getsource(quantized_weight.module_load))

# %%
# Everything else is left to torch, which returns ``self.copy_(other).detach()``, or ``other.detach()`` with ``assign``.
# Our ``copy_`` and ``detach`` do the rest. How much does the handler matter? Take it away and fill the table again.

from unittest.mock import patch

with patch.dict(quantized_weight.FUNCTIONS):
    del quantized_weight.FUNCTIONS[Tensor.module_load]
    without = fill_table()
changed = [case for case in table if table[case] != without[case]]
for case in changed:
    print(case, "->", without[case].kind)
law_5 = ("plain", True, True)
assert changed == [c for c in table if c[0] != "plain" and c[1:] == law_5]

# %%
# Two lines of code change one row of twenty. Without them a plain weight would be left in the quantised module.
# `Quantised files in depth <5b_skeletons_in_depth.ipynb>`_ needs that row.
#
# In which order
# --------------
#
# The lesson has five places for your code. A module can also override ``_load_from_state_dict``, which does the work
# for one module, without its children. Let each of them report.

events = []


class Reporting(nn.Linear):
    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        version = metadata.get("version")
        events.append(f"_load_from_state_dict, version {version}")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def before(module, state, prefix, *rest):
    events.append("pre-hook")


def after(module, keys):
    events.append("post-hook")


def reporting(self, other, assign=False):
    events.append("module_load")
    return original(self, other, assign)


original = quantized_weight.module_load
layer = Reporting(32, 6, bias=False)
layer.weight = nn.Parameter(Int8Weight.quantize(matrix(0)), False)
layer.register_load_state_dict_pre_hook(before)
layer.register_load_state_dict_post_hook(after)
saved_by_old_code = {"weight": matrix(1)}
with (
    patch.dict(quantized_weight.FUNCTIONS, {Tensor.module_load: reporting}),
    swap_on_conversion(),
):
    layer.load_state_dict(layer.state_dict())
    layer.load_state_dict(saved_by_old_code)
print(*events, sep="\n")
versions = "_load_from_state_dict, version "
assert events == [
    *(versions + "2", "pre-hook", "module_load", "post-hook"),
    *(versions + "None", "pre-hook", "module_load", "post-hook"),
]

# %%
# The pre-hook is called by torch's own ``_load_from_state_dict``, so an override comes before it.
#
# ``_version`` of a class is saved with its state dict, and tells an old form from a new one. Torch's BatchNorm uses it.
# But it is in the metadata of torch's own state dict alone: a plain dictionary has none, and neither has a file of
# safetensors. Old names are a safer sign.
#
# A hook that gets the dictionary gets a copy of it, but one that holds the same tensors. To change a tensor in place
# would change yours.


def double(module, state, prefix, *rest):
    state[f"{prefix}weight"].mul_(2)
    del state[f"{prefix}bias"]


plain = nn.Linear(3, 2)
mine = {name: t.clone() for name, t in plain.state_dict().items()}
was = mine["weight"].clone()
plain.register_load_state_dict_pre_hook(double)
keys = plain.load_state_dict(mine, strict=False)
print(keys.missing_keys, "your dictionary still has", list(mine))
assert keys.missing_keys == ["bias"] and list(mine) == ["weight", "bias"]
assert torch.equal(mine["weight"], 2 * was)

# %%
# Bug museum
# ----------
#
# A handler that ignores assign
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A handler of ``module_load`` that ignores ``assign`` breaks law 1. PyTorch's tutorial on ``swap_tensors`` has one:
# whatever comes is wrapped and swapped in. ``assign`` is False, and yet the bfloat16 module turns float32, and shares
# its memory with the checkpoint. If you change the checkpoint later, you change the model. (T4)


def careless(self, other, assign=False):
    if isinstance(other, QuantizedWeight):
        return other.detach()
    return type(self).quantize(other)


def load_with(handler, module, x):
    with (
        patch.dict(quantized_weight.FUNCTIONS, {Tensor.module_load: handler}),
        swap_on_conversion(),
    ):
        module.load_state_dict({"weight": x})
    return module.weight


for handler in (careless, quantized_weight.module_load):
    x = Int8Weight.quantize(matrix(1))
    weight = load_with(handler, module_with("int8"), x)
    before = weight.dequantize()
    x.scale.zero_()
    moved = not torch.equal(weight.dequantize(), before)
    print(
        f"{handler.__name__:12} {weight.dtype}, changed from outside: {moved}"
    )
    assert moved == (weight.dtype == torch.float32) == (handler is careless)

# %%
# The check that finds it: load a checkpoint of another dtype without ``assign``, look at the dtype, change the checkpoint
# and look at the module.
#
# A handler for one class
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# The same handler begins with ``assert type(other) is Tensor``. So it knows one of three combinations. A module cannot
# even load what it has saved. (T5)


def strict(self, other, assign=False):
    assert type(other) is Tensor
    return type(self).quantize(other)


def outcome(handler, into, x):
    try:
        return kind_of(load_with(handler, module_with(into), x))
    except RuntimeError:
        return "fails"


for name, into, x in (
    ("quantised <- plain", "int8", matrix(1)),
    ("quantised <- a plain Parameter", "int8", nn.Parameter(matrix(1))),
    ("quantised <- its own state", "int8", module_with("int8").weight.data),
    ("plain     <- quantised", "plain", Int8Weight.quantize(matrix(1))),
):
    theirs = outcome(strict, into, x)
    ours = outcome(quantized_weight.module_load, into, x)
    print(f"{name:30} strict: {theirs:6} ours: {ours}")
    assert theirs == ("int8" if type(x) is Tensor else "fails")
    assert ours == into

# %%
# A state dict that remembers
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# This one is in torch itself. A state dict carries ``_metadata``, one small dictionary for each module, and
# ``load_state_dict(assign=True)`` notes there that it assigns. The note stays in *your* state dict. The next model that
# loads it by default finds the note, and assigns too. See
# `pytorch#188166 <https://github.com/pytorch/pytorch/issues/188166>`_. (T11)


def two_models(checkpoint_of):
    state = nn.Linear(3, 2).state_dict()
    first, second = nn.Linear(3, 2), nn.Linear(3, 2, dtype=torch.float64)
    first.load_state_dict(checkpoint_of(state), assign=True)
    second.load_state_dict(checkpoint_of(state))  # copies, says the default
    return share(first.weight, second.weight), second.weight.dtype


for name, way in (("state", lambda s: s), ("dict(state)", dict)):
    shared, dtype = two_models(way)
    print(f"{name:12} two models share weights: {shared!s:6} {dtype}")
assert two_models(lambda state: state) == (True, torch.float32)
assert two_models(dict) == (False, torch.float64)

# %%
# Two models share their weights, and a float64 module turned float32. The fixed line is ``dict(state)``: a plain
# dictionary has no ``_metadata``. The package loads from plain dictionaries alone. The check: load the same state dict
# twice, with ``assign`` and without, and ask whether the two modules share memory.
#
# Which sentence is false?
# ------------------------
#
# 1. Without ``assign``, an optimizer never loses a weight by loading.
# 2. If the parameter is the same object before and after loading, it has the same dtype.
# 3. ``assign=True`` unties two modules that share a weight, and with the swap flag on it does not.

assert all(  # 1
    row.optimizer == "follows"
    for (_, _, assign, _), row in table.items()
    if not assign
)

row = table["int8", "int8", True, True]  # 2
print("same object:", row.optimizer == "follows", "but", row.dtype)
assert row.optimizer == "follows" and row.dtype != torch.bfloat16


def stays_tied(flag):  # 3
    pair = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pair[1].weight = pair[0].weight
    with swap_on_conversion(flag):
        pair.load_state_dict(dict(pair.state_dict()), assign=True)
    return pair[1].weight is pair[0].weight


print("tied, flag off and on:", stays_tied(False), stays_tied(True))
assert not stays_tied(False) and stays_tied(True)

# %%
# Sentence 2 is false. A swap keeps the object and changes what it is; its id says nothing about its class or its dtype.
#
# Exercises
# ---------
#
# 1. *Easy.* Complete the table: int4 into a plain module, and an int4 module. A good answer finds the five laws
#    unchanged, and one more row that the handler makes. Hint: ``SOURCES``, and the line that counts twenty rows.
# 2. *Medium.* Load a plain checkpoint into a quantised module with ``assign=True`` and the flag off, so that it stays
#    quantised. A good answer replaces the tensors of the state dict before loading, and says who still loses. Hint: a
#    pre-hook of ``load_state_dict``.
# 3. *Hard.* Write a handler that refuses to round codes a second time (int4 into int8), and names the weight's form and
#    group. A good answer shows that this weight stays as it was, and what happened to the others. Hint: ``load_state_dict``
#    gathers the exceptions of ``module_load`` and raises at the end.
#
# Summary
# -------
#
# * ``load_state_dict`` copies, assigns or swaps. Twenty combinations of classes, ``assign`` and the flag follow five
#   laws, all read from a table that the page filled.
# * Without ``assign`` the module wins. With it the checkpoint's dtype wins, and only the flag keeps the optimizer.
# * ``module_load`` decides what is swapped in. Two lines make a plain checkpoint arrive as codes.
#
# Sources
# -------
#
# * `PyTorch's tutorial on swap_tensors and module_load <https://docs.pytorch.org/tutorials/recipes/recipes/swap_tensors.html>`_.
# * `Module.load_state_dict and its hooks <https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html>`_.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
