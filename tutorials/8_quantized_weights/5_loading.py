r"""
Loading checkpoints into quantised weights
==========================================

A model has weights of 8 bits in bfloat16. A checkpoint has float32, or 8 bits, or 4 bits. ``load_state_dict`` brings the
two together, and they disagree about everything: class, dtype, memory. Who wins?

There are five combinations of classes, two values of ``assign`` and a global flag. This page tries all twenty, and reads
five laws from the result. Then it fills a model without ever holding its plain weights, and writes files that hold
numbers alone.

You will learn
--------------

* the three things that ``load_state_dict`` can do with a parameter,
* which of module and checkpoint decides the class, the dtype and the memory, in every combination,
* how ``module_load`` lets a class of tensors decide for itself,
* how to quantise a checkpoint tensor by tensor, as it arrives,
* why a pickled weight of a class of your own does not load everywhere, and plain tensors do.

Before you start
----------------

Read the pages on `swapping tensors <2_swapping_tensors.ipynb>`_, on `conversions <3_conversions.ipynb>`_ and on
`a quantised weight <4_quantized_weight.ipynb>`_ first. One CPU core is enough. Nothing is downloaded.

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
from lm_from_scratch.weights.quantize import quantize_
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
# and whether an optimizer that was made before still holds the module's weight.


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
# weight that wants a gradient, and has none. The package refuses at the first use.

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
# Two lines of code change one row of twenty. Without them a plain weight would be left in the quantised module. The next
# section needs that row.
#
# A skeleton without numbers
# --------------------------
#
# On the ``meta`` device a tensor has a shape and a dtype, and no numbers. A model that is built there costs nothing, and
# ``quantize_`` works on it: the codes and scales have no numbers either.
#
# Copying into such a tensor does nothing. torch warns, and the weight stays where it was. Here the warning is an error
# that we catch.

import tempfile
import warnings
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lm_from_scratch.checkpoint.weights import save_pretrained
from lm_from_scratch.models.causal_lm import build
from lm_from_scratch.models.qwen2 import Qwen2Config

sizes = dict(vocab_size=600, block_size=64, n_layer=6, n_embd=128)
sizes |= dict(n_head=4, n_kv_head=2, intermediate_size=352)
sizes |= dict(tie_word_embeddings=True, eos_token_id=None)
config = Qwen2Config(**sizes, initializer_range=0.05)


def skeleton(quantized):
    with torch.device("meta"):
        model = build(config).eval()
    if quantized:
        quantize_(model)
    return model


torch.manual_seed(0)
folder = tempfile.TemporaryDirectory()
plain_folder = Path(folder.name) / "plain"
save_pretrained(build(config), plain_folder)
file = plain_folder / "model.safetensors"

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = skeleton(quantized=True)
    model.load_state_dict(load_file(file))
print(caught[0].message)
assert all(p.is_meta for p in model.parameters())
weight = model.model.layers[0].mlp.up_proj.weight
print(weight)

# %%
# With ``assign=True`` the checkpoint's device wins, like its dtype. So there are three ways from a plain file to a
# quantised model.
#
# * Build the model, copy the file into it, quantise it.
# * Build a plain skeleton, assign the file to it, quantise it.
# * Quantise the skeleton, and load one tensor of the file at a time with the flag on. Law 5 turns each into codes as it
#   arrives, and its plain numbers can go.


def build_and_copy():
    model = build(config).eval()
    model.load_state_dict(load_file(file))
    quantize_(model)
    return model


def assign_plain():
    model = skeleton(quantized=False)
    model.load_state_dict(load_file(file), assign=True)
    quantize_(model)
    return model


def quantize_on_arrival():
    model = skeleton(quantized=True)
    with swap_on_conversion(), safe_open(file, "pt") as tensors:
        for name in sorted(model.state_dict()):
            one = {name: tensors.get_tensor(name)}
            model.load_state_dict(one, strict=False, assign=True)
    return model


# %%
# We count the bytes of all tensors that are alive, after every operation, as the page on one gradient at a time does. A
# tensor of a safetensors file is a part of the file that the system maps into memory; it counts in full.

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Timeline(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen, self.bytes = {}, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            for x in held(leaf):
                if isinstance(x, Tensor) and not x.is_meta:
                    storage = x.untyped_storage()
                    reference = StorageWeakRef(storage)
                    self.seen[storage._cdata] = reference, storage.nbytes()
        self.bytes.append(
            sum(size for x, size in self.seen.values() if not x.expired())
        )
        return out


idx = torch.arange(2 * 11).view(2, 11)
timelines, logits = {}, {}
for way in (build_and_copy, assign_plain, quantize_on_arrival):
    with Timeline() as timeline:
        model = way()
    timelines[way.__name__] = timeline.bytes
    with torch.no_grad():
        logits[way.__name__] = model(idx)

parameters = list(build(config).parameters())
plain = sum(p.nbytes for p in parameters)
largest = max(p.nbytes for p in parameters)
final = sum(p.nbytes for p in model.parameters())
peaks = {name: max(sizes) for name, sizes in timelines.items()}
print(f"plain {plain / 1e6:.2f} MB, quantised {final / 1e6:.2f} MB")
for name, peak in peaks.items():
    print(f"{name:20} peak {peak / 1e6:5.2f} MB")

# %%
# The three models give equal logits, bit for bit. The first way holds the plain model twice. The second holds it once,
# and the quantised one beside it. The third never holds more than the quantised model and what it takes to quantise one
# weight.

for other in logits.values():
    assert torch.equal(other, logits["build_and_copy"])
assert peaks["build_and_copy"] >= 2 * plain
assert plain + final <= peaks["assign_plain"] < 2 * plain
assert peaks["quantize_on_arrival"] < final + 6 * largest < plain

# %%

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["load_state_dict", "missing keys", "unexpected keys", "strict=False", "torch.load", "assign=True", "meta device", "weights_only"]
# sphinx_gallery_museum = ["G17", "T8"]
import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

made, (ax,) = figure(6.4, 3.8)
for (name, sizes), style in zip(
    timelines.items(), ("-", "--", "-."), strict=True
):
    steps = torch.linspace(0, 1, len(sizes))
    ax.plot(steps, [size / 1e6 for size in sizes], style, label=name)
for level, name in ((plain, "plain model"), (final, "quantised model")):
    ax.axhline(level / 1e6, color=COLOURS[7], linewidth=0.8, linestyle=":")
    ax.text(0.29, level / 1e6, name, ha="center", va="top")
ax.set(
    title="Bytes of tensors alive while a model is loaded",
    xlabel="share of the operations",
    ylabel="MB",
    ylim=(0, None),
)
ax.legend(frameon=False)
plt.show()

# %%
# A pickle knows classes by name
# ------------------------------
#
# ``torch.save`` pickles a state dict. A plain tensor needs no class to come back; ours does. With ``weights_only=True``,
# which refuses every class and function that it does not know, the file loads because the package has registered its two
# classes with ``torch.serialization.add_safe_globals``. A program that has not done so gets an error (bug museum: G17, T8).

import io
import pickle

pickled = io.BytesIO()
torch.save(model.state_dict(), pickled)


def unpickle():
    pickled.seek(0)
    return torch.load(pickled, weights_only=True)


again = skeleton(quantized=False)
again.load_state_dict(unpickle(), assign=True)
with torch.no_grad():
    assert torch.equal(again(idx), logits["quantize_on_arrival"])

registered = torch.serialization.get_safe_globals()
torch.serialization.clear_safe_globals()
try:
    unpickle()
except pickle.UnpicklingError as refusal:
    message = str(refusal)
torch.serialization.add_safe_globals(registered)
assert "Int8Weight was not an allowed global" in message
print("refused")

# %%
# The way out that is often taken, ``weights_only=False``, lets the file run any program.
#
# The other way out is to store no class. A safetensors file stores names, dtypes, shapes and numbers. Its ``save_file``
# looks for the memory of a weight, and a wrapper has none. ``parts()`` names the plain tensors that a weight holds, and
# ``from_parts`` makes a weight of them; ``plain_tensors`` takes the parts of a whole state dict, of any ``nn.Module``.

from lm_from_scratch.checkpoint.weights import plain_tensors

state = model.model.layers[0].mlp.state_dict()
by_hand = Path(folder.name) / "mlp.safetensors"
with warnings.catch_warnings(action="ignore"):  # of torch, on the way
    try:
        save_file(state, by_hand)
    except RuntimeError as refusal:
        print("refused:", refusal)
assert not by_hand.exists()

save_file(plain_tensors(state), by_hand)
stored = load_file(by_hand)
parts = {part: stored[f"up_proj.weight.{part}"] for part in ("codes", "scale")}
for part, tensor in parts.items():
    print(f"up_proj.weight.{part:6} {tuple(tensor.shape)} {tensor.dtype}")
back = Int8Weight.from_parts(parts).dequantize()
assert torch.equal(back, state["up_proj.weight"].dequantize())

# %%
# ``save_pretrained`` writes all weights that way, and ``config.json`` says which of them are quantised.
# ``from_pretrained`` builds the skeleton, quantises it as the config says, compares every name, shape and dtype with the
# file, and puts the weights together.

small = Path(folder.name) / "int8"
save_pretrained(model, small)
before = file.stat().st_size
after = (small / "model.safetensors").stat().st_size
print(f"{before} bytes plain, {after} quantised: {after / before:.2f}")
assert after < 0.28 * before

# %%
# Here is the test that counts: another process reads the folder and computes logits, knowing nothing of this page.

import subprocess
import sys

program = """
import sys, torch
from safetensors.torch import load_file, save_file
from lm_from_scratch.checkpoint.weights import from_pretrained
torch.set_num_threads(int(sys.argv[2]))
model = from_pretrained(sys.argv[1] + "/int8")
idx = load_file(sys.argv[1] + "/idx")["idx"]
with torch.no_grad():
    save_file({"logits": model(idx)}, sys.argv[1] + "/logits")
"""
save_file({"idx": idx}, f"{folder.name}/idx")
arguments = [folder.name, str(torch.get_num_threads())]
subprocess.run([sys.executable, "-c", program, *arguments], check=True)
theirs = load_file(f"{folder.name}/logits")["logits"]
assert torch.equal(theirs, logits["quantize_on_arrival"])
print("equal logits:", *theirs[0, -1, :3].tolist())

# %%
# Bug museum
# ----------
#
# T4: a handler that ignores assign
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A handler of ``module_load`` that ignores ``assign`` breaks law 1. PyTorch's tutorial on ``swap_tensors`` has one:
# whatever comes is wrapped and swapped in. Nobody asked to assign, and yet the bfloat16 module turns float32, and
# shares its memory with the checkpoint. Who changes the checkpoint later changes the model.


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
# T5: a handler for one class
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The same handler begins with ``assert type(other) is Tensor``. So it knows one of three combinations. A module cannot
# even load what it has saved.


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
# T11: a state dict that remembers
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# This one is in torch itself. A state dict carries ``_metadata``, one small dictionary for each module, and
# ``load_state_dict(assign=True)`` notes there that it assigns. The note stays in *your* state dict. The next model that
# loads it by default finds the note, and assigns too. See
# `pytorch#188166 <https://github.com/pytorch/pytorch/issues/188166>`_.


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
# 1. *Easy.* Complete the table: int4 into a plain module, and an int4 module. A right answer finds the five laws
#    unchanged, and one more row that the handler makes. Hint: ``SOURCES``, and the line that counts twenty rows.
# 2. *Easy.* Draw the timeline of ``quantize_on_arrival`` for 4 bits in groups of 32. A right answer explains why its
#    final bytes are not half of those of 8 bits. Hint: scales and zeros of groups, and the tensors that stay plain.
# 3. *Medium.* Load a plain checkpoint into a quantised module with ``assign=True`` and the flag off, so that it stays
#    quantised. A right answer replaces the tensors of the state dict before loading, and says who still loses. Hint: a
#    pre-hook of ``load_state_dict``.
# 4. *Hard.* Write a handler that refuses to round codes a second time (int4 into int8), and names the weight's form and
#    group. A right answer shows that this weight stays as it was, and what happened to the others. Hint: ``load_state_dict``
#    gathers the exceptions of ``module_load`` and raises at the end.
#
# Summary
# -------
#
# * ``load_state_dict`` copies, assigns or swaps. Twenty combinations of classes, ``assign`` and the flag follow five
#   laws, all read from a table that the page filled.
# * Without ``assign`` the module wins. With it the checkpoint's dtype wins, and only the flag keeps the optimizer.
# * ``module_load`` decides what is swapped in. Two lines make a plain checkpoint arrive as codes.
# * A quantised skeleton on the meta device is filled one tensor at a time, and its peak stays below the bytes of the
#   plain model. The other two ways hold the plain model once and twice.
# * A pickle stores the name of a class, a safetensors file stores numbers. A model written as plain parts gives equal
#   logits in a fresh process, bit for bit.
#
# The model can now be made, saved and loaded. The next page, int8 and int4, measures what it is worth: bytes, speed and
# held-out loss.
#
# Sources
# -------
#
# * `PyTorch's tutorial on load_state_dict and the meta device <https://docs.pytorch.org/tutorials/recipes/recipes/module_load_state_dict_tips.html>`_.
# * `PyTorch's tutorial on swap_tensors and module_load <https://docs.pytorch.org/tutorials/recipes/recipes/swap_tensors.html>`_.
# * `The safetensors format <https://huggingface.co/docs/safetensors/index>`_.
# * `torch.load and weights_only <https://docs.pytorch.org/docs/stable/notes/serialization.html>`_.

import platform

import lm_from_scratch

folder.cleanup()
print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
