r"""
A fine-tuning that was killed
=============================

A run with LoRA on 4-bit weights dies in the middle. Can another process go on with it, so that every loss is what it
would have been? The lesson on `LoRA on 4-bit weights <6_lora.ipynb>`_ trains in one process. Here are two, and a third
run that nobody interrupts.

Three things to save
--------------------

A long run must survive its process. The base never changes, so it is saved once, as codes. A checkpoint of the run then
holds what is trained and its moments, and a digest of the frozen weights, so that it cannot go on with others.

The text is that of `LoRA beside full training <6b_lora_training_in_depth.ipynb>`_: names of Unicode characters.
"""

# sphinx_gallery_needs = ["6a_lora_in_depth", "6b_lora_training_in_depth"]
# sphinx_gallery_words = ["resume LoRA training", "LoRA checkpoint", "adapter_model.safetensors", "resume_from_checkpoint", "save adapters"]
import json
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.checkpoint.weights import load_shipped, save_pretrained
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.interop.peft import load_lora_
from lm_from_scratch.runs.checkpoints import with_checkpoints
from lm_from_scratch.runs.config import TrainConfig, train
from lm_from_scratch.text.batches import PackedBatches, write_tokens
from lm_from_scratch.text.corpora import split
from lm_from_scratch.text.document import Document
from lm_from_scratch.weights.lora import add_lora_
from lm_from_scratch.weights.quantize import quantize_


def quantised():
    model, _ = load_shipped()
    quantize_(model, bits=4)
    return model


_, tokenizer = load_shipped()
edition = unicodedata.ucd_3_2_0
groups = {}
for code in range(0x10000):
    name = edition.name(chr(code), "")
    if name and not name.startswith(("CJK", "HANGUL SYLLABLE")):
        groups.setdefault(f"{code // 16:03x}", []).append(name)
documents = [Document(k, k, "\n".join(v)) for k, v in groups.items()]
to_learn, _ = split(documents, held_out=0.1)

folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
root = Path(folder.name)
tokens = write_tokens(to_learn, tokenizer, root / "names.bin")
shape = dict(batch_size=4, block_size=48)
STEPS = 20
recipe = dict(steps=STEPS, lr=1e-2, warmup=3, weight_decay=0.0)

# %%
# The run that nobody interrupts, in this process:

tuned = quantised()
add_lora_(tuned, rank=8, alpha=16.0)
run = train(tuned, PackedBatches(tokens, **shape), TrainConfig(**recipe))
whole = {step.step: step.loss for step in run}
print(f"loss {whole[1]:.2f} in the first step, {whole[STEPS]:.2f} in the last")
assert whole[STEPS] < whole[1] - 0.5

# %%
# A program that starts and resumes
# ---------------------------------
#
# The program below builds the quantised model on the *meta* device, without numbers, fills it from the folder and adds
# adapters. The same program starts a run and resumes one. The first time, an argument makes it die in step 15.

save_pretrained(quantised(), root / "base")

PROGRAM = """
import json, os, sys
from pathlib import Path
import torch
from lm_from_scratch.checkpoint.weights import from_pretrained
from lm_from_scratch.text.batches import PackedBatches, TokenFile
from lm_from_scratch.interop.peft import save_lora
from lm_from_scratch.weights.lora import add_lora_
from lm_from_scratch.runs.checkpoints import with_checkpoints
from lm_from_scratch.runs.config import train, TrainConfig

root, asked = Path(sys.argv[1]), json.loads(sys.argv[2])
torch.set_num_threads(asked["threads"])
model = from_pretrained(root / "base")
add_lora_(model, rank=8, alpha=16.0)
record = json.loads((root / "names.json").read_text())
del record["sha256"]  # of the tokens themselves
tokens = TokenFile(path=root / "names.bin", **record)
batches = PackedBatches(tokens, **asked["shape"])
config = TrainConfig(**asked["recipe"])
for step in with_checkpoints(train(model, batches, config), root / "run", every=10):
    print(step.step, repr(step.loss), flush=True)
    if step.step == asked["die"]:
        os._exit(1)
save_lora(model, root / "adapters")
"""


def in_a_fresh_process(die):
    asked = dict(
        threads=torch.get_num_threads(),
        shape=shape,
        recipe=recipe,
        die=die,
    )
    command = [sys.executable, "-c", PROGRAM, str(root), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == (1 if die else 0) and not done.stderr, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {int(step): float(loss) for step, loss in lines}


killed = in_a_fresh_process(die=15)
for file in sorted((root / "run" / "step-00000010").iterdir()):
    print(file.name, file.stat().st_size, "bytes")
resumed = in_a_fresh_process(die=0)
print("first process: steps", min(killed), "to", max(killed))
print("second process: steps", min(resumed), "to", max(resumed))

# %%

_, (ax,) = figure(4.8, 3.2)
ax.plot(
    *zip(*whole.items()), color=COLOURS[5], linewidth=6, label="one process"
)
ax.plot(*zip(*killed.items()), color=COLOURS[7], label="killed in step 15")
ax.plot(*zip(*resumed.items()), "--", color=COLOURS[3], label="resumed")
ax.axvline(10, color=COLOURS[7], linewidth=0.8, linestyle=":")
ax.set(xlabel="step", ylabel="loss", title="Killed, and resumed at step 10")
ax.legend(frameon=False)
plt.show()

# %%
# The second process begins after the last checkpoint and takes five steps again. Every loss equals that of the run
# that was never interrupted, to the last bit, and so do the adapters in the end.

assert list(killed) == list(range(1, 16))
assert list(resumed) == list(range(11, STEPS + 1))
assert all(loss == whole[step] for step, loss in killed.items())
assert all(loss == whole[step] for step, loss in resumed.items())

tuned.eval()
again = quantised()
idx = torch.tensor([tokenizer.encode("The with statement is used to wrap")])
load_lora_(again, root / "adapters")
assert torch.equal(again(idx), tuned(idx))

files = [
    sum(f.stat().st_size for f in (root / name).rglob("*"))
    for name in ("base", "adapters")
]
full = sum(p.nbytes for p in load_shipped()[0].parameters())
print("bytes of base and adapters", files, "and in float32", full)
assert files[1] < files[0] < full / 4

# %%
# The folder of adapters is all that a new task costs on disk. The ``peft`` library reads it, and ``load_lora_`` reads
# what ``peft`` wrote; the tests of the package hold them to each other.
#
# Another base
# ------------
#
# Adapters are trained beside certain weights. Suppose the base is quantised again, this time in groups of 32 numbers. Its
# shapes are the same, the run is not, and the digest notices.

other, _ = load_shipped()
quantize_(other, bits=4, group_size=32)
add_lora_(other, rank=8, alpha=16.0)
run = train(other, PackedBatches(tokens, **shape), TrainConfig(**recipe))
message = "no refusal"
try:
    next(iter(with_checkpoints(run, root / "run", every=10)))
except ValueError as refusal:
    message = str(refusal)
print(message)
assert "was made by another run: frozen was" in message

# %%
# Exercises
# ---------
#
# 1. *Medium.* Resume the run of this page with another learning rate, and then with ``steps=40``. A right answer quotes
#    what the refusals name, and says why a run that has a schedule cannot simply be made longer.
#
# Summary
# -------
#
# * A run on a quantised base was killed and resumed in a fresh process: every loss was equal bit for bit, and so were
#   the adapters in the end.
# * The base is saved once, as codes. A checkpoint holds the adapters, their moments and a digest of the frozen weights.
# * Adapters take a small folder for each task. They belong to one base.
#
# Sources
# -------
#
# * `QLoRA: Efficient Finetuning of Quantized LLMs <https://arxiv.org/abs/2305.14314>`_, Dettmers et al., 2023.
# * `The documentation of peft <https://huggingface.co/docs/peft/package_reference/lora>`_: the format of the files.

import platform

import lm_from_scratch

folder.cleanup()
print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
