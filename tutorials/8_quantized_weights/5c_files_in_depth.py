r"""
Numbers in a file
=================

A quantised model is trained, rounded, done. How do you save it so that another program can read it, one that may not
know your classes? The lesson on `loading <5_loading.ipynb>`_ takes a state dict as given. Here it comes from a file: a
pickle that refuses to open, a file of safetensors that refuses to be written, and a way that works in a fresh process.

A pickle knows classes by name
------------------------------

``torch.save`` pickles a state dict. A plain tensor needs no class to come back; ours does. With ``weights_only=True``,
which refuses every class and function that it does not know, the file loads because the package has registered its two
classes with ``torch.serialization.add_safe_globals``. A program that has not done so gets an error. (A checkpoint that
runs a program when it is opened is G17 of the bug museum, one that opens only where its class is known is T8.)
"""

# sphinx_gallery_needs = ["5b_skeletons_in_depth"]
# sphinx_gallery_museum = ["G17", "T8"]
# sphinx_gallery_words = ["torch.load", "weights_only", "safetensors", "pickle", "UnpicklingError", "add_safe_globals", "save quantized model"]
import io
import pickle
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.weights import plain_tensors, save_pretrained
from lm_from_scratch.models.qwen2 import Qwen2Config
from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.quantize import quantize_

sizes = dict(vocab_size=600, block_size=64, n_layer=6, n_embd=128)
sizes |= dict(n_head=4, n_kv_head=2, intermediate_size=352)
sizes |= dict(tie_word_embeddings=True, eos_token_id=None)
config = Qwen2Config(**sizes, initializer_range=0.05)

torch.manual_seed(0)
folder = tempfile.TemporaryDirectory()
model = build(config).eval()
save_pretrained(model, Path(folder.name) / "plain")
file = Path(folder.name) / "plain" / "model.safetensors"
quantize_(model)

idx = torch.arange(2 * 11).view(2, 11)
with torch.no_grad():
    logits = model(idx)

pickled = io.BytesIO()
torch.save(model.state_dict(), pickled)


def unpickle():
    pickled.seek(0)
    return torch.load(pickled, weights_only=True)


with torch.device("meta"):
    again = build(config).eval()
again.load_state_dict(unpickle(), assign=True)
with torch.no_grad():
    assert torch.equal(again(idx), logits)

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
assert torch.equal(theirs, logits)
print("equal logits:", *theirs[0, -1, :3].tolist())

# %%
# Which sentence is false?
# ------------------------
#
# 1. A file of safetensors says of no tensor which class it had.
# 2. ``weights_only=True`` opens any file that holds tensors alone.
# 3. The quantised file has more tensors than the plain one.

small_file = load_file(small / "model.safetensors")
assert {type(t) for t in small_file.values()} == {torch.Tensor}  # 1
print(len(load_file(file)), "tensors plain,", len(small_file), "quantised")
assert len(small_file) > len(load_file(file))  # 3

# %%
# Sentence 2 is false, as the refusal above shows: a tensor of a class that nobody has registered is refused too.
#
# Exercises
# ---------
#
# 1. *Easy.* Save the state dict of the quantised model with ``torch.save``, once as it is and once as
#    ``plain_tensors``. A right answer compares the sizes of both files with that of safetensors, and says what else is
#    in a pickle. Hint: it is a zip archive.
#
# Summary
# -------
#
# * A pickle stores the name of a class, a safetensors file stores numbers. A model written as plain parts gives equal
#   logits in a fresh process, bit for bit.
# * ``weights_only=True`` refuses classes that are not registered. ``weights_only=False`` lets the file run any program.
#
# Sources
# -------
#
# * `The safetensors format <https://huggingface.co/docs/safetensors/index>`_.
# * `torch.load and weights_only <https://docs.pytorch.org/docs/stable/notes/serialization.html>`_.

import platform

import lm_from_scratch

folder.cleanup()
print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
