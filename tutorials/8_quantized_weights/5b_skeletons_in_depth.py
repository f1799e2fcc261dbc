r"""
Quantised files in depth: loading in little memory, and saving
==============================================================

A checkpoint of 4.7 MB becomes a quantised model of 1.2 MB. How much memory does that take on the way? And how do you save
the result so that another program can read it, even one that does not know your classes? The lesson on `loading
<5_loading.ipynb>`_ introduces *skeletons*, models on the meta device, and ``module_load``. Here every byte is counted.

Three ways to a quantised model
-------------------------------

``quantize_`` works on a skeleton: its codes and scales have no numbers either. So there are three ways from a plain file
to a quantised model.

* Build the model, copy the file into it, quantise it.
* Build a plain skeleton, assign the file to it, quantise it.
* Quantise the skeleton, and load one tensor of the file at a time with the swap flag on. ``module_load`` turns each
  into codes as it arrives, and its plain numbers can go.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["5a_loading_in_depth"]
# sphinx_gallery_museum = ["G17", "T8"]
# sphinx_gallery_words = ["init_empty_weights", "low_cpu_mem_usage", "meta device", "peak memory while loading", "safe_open", "out of memory loading model", "torch.load", "weights_only", "safetensors", "pickle", "UnpicklingError", "add_safe_globals", "save quantized model"]
import io
import pickle
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.weights import (
    from_pretrained,
    plain_tensors,
    save_pretrained,
)
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.models.qwen2 import Qwen2Config
from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.quantize import quantize_
from lm_from_scratch.weights.swap import swap_on_conversion

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
# We count the bytes of all tensors that are alive, after every operation, as the page on `one gradient at a time
# <../7_optimizers/4_in_backward.ipynb>`_ does. A tensor of a safetensors file is a part of the file that the system maps
# into memory; it counts in full.


def held(x):  # the plain tensors that hold the numbers
    return [getattr(x, name) for name in getattr(x, "held", ())] or [x]


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
# beside the quantised one. The third never holds more than the quantised model and what it takes to quantise one weight.

for other in logits.values():
    assert torch.equal(other, logits["build_and_copy"])
assert peaks["build_and_copy"] >= 2 * plain
assert plain + final <= peaks["assign_plain"] < 2 * plain
assert abs(plain / 1e6 - 4.7) < 0.1 and abs(final / 1e6 - 1.2) < 0.1
assert peaks["quantize_on_arrival"] < final + 6 * largest < plain

# %%

_, (ax,) = figure(6.4, 3.8)
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
# classes with ``torch.serialization.add_safe_globals``. A program that has not done so gets an error. (A checkpoint that
# runs a program when it is opened is G17 of the bug museum, one that opens only where its class is known is T8.)

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
# Many people get around this with ``weights_only=False``, which lets the file run any program.
#
# Numbers alone
# -------------
#
# It is better to store no class. A safetensors file stores names, dtypes, shapes and numbers. Its ``save_file`` looks
# for the memory of a weight, and a wrapper has none. ``parts()`` names the plain tensors that a weight holds, and
# ``from_parts`` makes a weight of them; ``plain_tensors`` takes the parts of a whole state dict, of any ``nn.Module``.

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
# The model that is read back computes the same logits, bit for bit. (A test of the package does it in a fresh process.)

with torch.no_grad():
    assert torch.equal(from_pretrained(small)(idx), logits["build_and_copy"])

# %%
# Which sentence is false?
# ------------------------
#
# 1. ``strict=False`` loads a state dict with one name, and leaves all other parameters as they are.
# 2. Loading one tensor at a time gives other numbers than loading all at once.
# 3. The quantised file has more tensors than the plain one.

bare, plain_file = skeleton(quantized=False), load_file(file)
some = next(iter(plain_file))
bare.load_state_dict({some: plain_file[some]}, strict=False, assign=True)
filled = [name for name, t in bare.state_dict().items() if not t.is_meta]
assert filled == [some]  # 1
small_file = load_file(small / "model.safetensors")
print(len(plain_file), "tensors plain,", len(small_file), "quantised")
assert len(small_file) > len(plain_file)  # 3

# %%
# Sentence 2 is false: each matrix is rounded by itself, so it does not matter when it arrives.
#
# Exercises
# ---------
#
# 1. *Easy.* Draw the timeline of ``quantize_on_arrival`` for 4 bits in groups of 32. A good answer explains why its
#    final bytes are not half of those of 8 bits. Hint: scales and zeros of groups, and the tensors that stay plain.
# 2. *Easy.* Save the state dict of the quantised model with ``torch.save``, once as it is and once as
#    ``plain_tensors``. A good answer compares the sizes of both files with that of safetensors, and says what else is
#    in a pickle. Hint: it is a zip archive.
#
# Summary
# -------
#
# * Fill a quantised skeleton on the meta device one tensor at a time: the peak stays below the bytes of the plain model.
#   The other two ways hold the plain model once and twice.
# * A pickle stores the name of a class, a safetensors file stores numbers. A model written as plain parts gives equal
#   logits when it is read, bit for bit.
# * ``weights_only=True`` refuses classes that are not registered. ``weights_only=False`` lets the file run any program.
#
# Sources
# -------
#
# * `PyTorch's tutorial on load_state_dict and the meta device <https://docs.pytorch.org/tutorials/recipes/recipes/module_load_state_dict_tips.html>`_.
# * `The safetensors format <https://huggingface.co/docs/safetensors/index>`_.
# * `torch.load and weights_only <https://docs.pytorch.org/docs/stable/notes/serialization.html>`_.

import platform

import lm_from_scratch

folder.cleanup()
print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
