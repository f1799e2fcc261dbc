r"""
Filling a skeleton
==================

A checkpoint of 4.7 MB becomes a quantised model of 1.2 MB. How much memory does that take on the way? There are three
ways that end with equal logits. One holds the plain model twice, one once, and one never. The lesson on `loading
<5_loading.ipynb>`_ introduces *skeletons*, models on the meta device, and ``module_load``. Here every byte is counted.

A skeleton without numbers
--------------------------

``quantize_`` works on a skeleton: its codes and scales have no numbers either. Copying into such a tensor does nothing.
Torch warns, and the weight stays where it was. Here we catch the warning.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["5a_loading_in_depth"]
# sphinx_gallery_words = ["init_empty_weights", "low_cpu_mem_usage", "meta device", "peak memory while loading", "safe_open", "out of memory loading model"]
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.weights import save_pretrained
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.models.qwen2 import Qwen2Config
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
# * Quantise the skeleton, and load one tensor of the file at a time with the flag on. ``module_load`` turns each into
#   codes as it arrives, and its plain numbers can go.


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
# <../7_optimizers/4_in_backward.ipynb>`_ does. A
# tensor of a safetensors file is a part of the file that the system maps into memory; it counts in full.


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
# and the quantised one beside it. The third never holds more than the quantised model and what it takes to quantise one
# weight.

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
# Which sentence is false?
# ------------------------
#
# 1. A model on the meta device has a state dict, and every tensor in it has its shape.
# 2. ``strict=False`` loads a state dict with one name, and leaves all other parameters as they are.
# 3. Loading one tensor at a time makes other numbers than loading all at once.

bare = skeleton(quantized=False)
shapes = {name: t.shape for name, t in load_file(file).items()}
assert {name: t.shape for name, t in bare.state_dict().items()} == shapes  # 1
some = next(iter(shapes))
bare.load_state_dict({some: load_file(file)[some]}, strict=False, assign=True)
filled = [name for name, t in bare.state_dict().items() if not t.is_meta]
assert filled == [some]  # 2
same = torch.equal(logits["quantize_on_arrival"], logits["build_and_copy"])
print("one at a time makes the same numbers:", same)
assert same  # 3

# %%
# Sentence 3 is false: each matrix is rounded by itself, so it does not matter when it arrives.
#
# Exercises
# ---------
#
# 1. *Easy.* Draw the timeline of ``quantize_on_arrival`` for 4 bits in groups of 32. A right answer explains why its
#    final bytes are not half of those of 8 bits. Hint: scales and zeros of groups, and the tensors that stay plain.
#
# Summary
# -------
#
# * A quantised skeleton on the meta device is filled one tensor at a time, and its peak stays below the bytes of the
#   plain model. The other two ways hold the plain model once and twice.
# * Copying into a meta tensor does nothing but warn. ``assign=True`` is the way to fill it.
#
# Sources
# -------
#
# * `PyTorch's tutorial on load_state_dict and the meta device <https://docs.pytorch.org/tutorials/recipes/recipes/module_load_state_dict_tips.html>`_.

import platform

import lm_from_scratch

folder.cleanup()
print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
