r"""
A checkpoint that does not fit
==============================

Someone has trained a GPT-2 like ours and published it in float16, in the form that OpenAI's own checkpoints have. You
build the model, call ``load_state_dict``, and get this:
"""

# sphinx_gallery_needs = ["4_quantized_weight", "../2_qwen2/4_qwen2"]
# sphinx_gallery_words = ["load_state_dict", "missing keys", "unexpected keys", "Missing key(s) in state_dict", "Unexpected key(s) in state_dict", "size mismatch", "Error(s) in loading state_dict", "strict=False", "assign=True", "meta device", "load_state_dict pre hook", "_load_from_state_dict", "Conv1D", "_orig_mod"]
import torch
from torch import nn

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import quantized_weights as drawings
from lm_from_scratch.text.batches import pieces
from lm_from_scratch.text.corpora import reference, split
from lm_from_scratch.training.train import evaluate
from lm_from_scratch.weights.quantize import quantize_
from lm_from_scratch.weights.swap import swap_on_conversion

shipped, tokenizer = load_shipped("gpt2-docs")
maps = [n for n, m in shipped.named_modules() if isinstance(m, nn.Linear)]
published = {}
for name, tensor in shipped.state_dict().items():
    if name.removesuffix(".weight") in maps:
        tensor = tensor.T  # they store (inputs, outputs)
    published[name.removeprefix("transformer.")] = tensor.half()


def try_to_load(state, **options):
    model = build(shipped.config)
    try:
        model.load_state_dict(state, **options)
    except RuntimeError as error:
        for line in str(error).splitlines()[:4]:
            print(line.expandtabs(2)[:75])
    return model


model = try_to_load(published)

assert len(maps) == 32
assert not published.keys() & shipped.state_dict().keys()

# %%
# The names lack ``transformer.``, the matrices are transposed, and all numbers are float16. These are the three usual
# disagreements: name, layout, dtype.
#
# There are five places where your code can settle them. Each is a link to the section that explains it.

drawings.load_stations(
    [
        "#your-dictionary",
        "#a-layer-that-has-changed",
        "#copy-or-assign",
        "#the-tensor-decides",
        "#one-key-too-many",
    ]
)

# %%
# The tempting fix
# ----------------
#
# Search for the error message, and you find ``strict=False``: load the names that fit, and ignore the rest. We measure
# what it does by the loss on documentation that the shipped model was not trained on. The shipped model itself has
# about 4.9 nats per token.
#
# **Predict first.** What happens with ``strict=False``?
#
# * the same error
# * the loss is about 4.9
# * the loss is about 8.3, the logarithm of the vocabulary of 4096 tokens

batch = pieces(split(reference())[1], tokenizer, length=128, count=4)


def loss(model):
    return evaluate(model, [batch])


model = try_to_load(published, strict=False)
print(f"shipped {loss(shipped):.2f}, strict=False {loss(model):.2f}")

assert 4.8 < loss(shipped) < 4.95 and 8.2 < loss(model) < 8.5

# %%
# No error, and nothing loaded: not one name fits. The model is as random as ``build`` made it. ``strict=False`` does
# not fix a checkpoint, it switches the alarm off.
#
# Your dictionary
# ---------------
#
# A checkpoint is a dictionary, so change it before torch sees it. First the names.
#
# **Predict first.** The model has 32 linear maps (``nn.Linear``), and all 32 matrices of the file are transposed. How
# many of them does torch complain about now?
#
# * 32
# * 24
# * none

renamed = {f"transformer.{name}": t for name, t in published.items()}
refused = []
try:
    build(shipped.config).load_state_dict(renamed)
except RuntimeError as error:
    refused = [n for n in maps if f"size mismatch for {n}.weight" in str(error)]
print(len(refused), "of", len(maps))

assert len(refused) == 24

# %%
# A transposed matrix has another shape, unless it is square. Eight are: ``attn.c_proj``, once in each block. Suppose you
# transpose the matrices in the error message, and no others.

halfway = dict(renamed)
for name in refused:
    halfway[f"{name}.weight"] = renamed[f"{name}.weight"].T
good = dict(renamed)
for name in maps:
    good[f"{name}.weight"] = renamed[f"{name}.weight"].T

print(f"24 transposed: loss {loss(try_to_load(halfway)):.2f}")
print(f"32 transposed: loss {loss(try_to_load(good)):.2f}")

assert loss(try_to_load(halfway)) > loss(shipped) + 1
assert abs(loss(try_to_load(good)) - loss(shipped)) < 0.01

# %%
# With 24, torch is content and the model is wrong. Shapes cannot find this mistake, so compute a loss or compare some
# logits after every conversion.
#
# For a file that you read once, this is all you need: two loops over a dictionary.
#
# A layer that has changed
# ------------------------
#
# It is different if a layer of *your own* has changed and old files are everywhere. Say our attention once had three
# maps, ``q``, ``k`` and ``v``, which are one ``c_attn`` today. Then the layer should know how to read its old form,
# wherever in a model it is. A *pre-hook* is a function that torch calls before it fills a layer. It gets the dictionary
# and the prefix of the layer's names in it, such as ``transformer.h.0.attn.``:


def fuse(module, state, prefix, *_):
    for part in ("weight", "bias"):
        old = [f"{prefix}{letter}.{part}" for letter in "qkv"]
        if old[0] in state:
            fused = torch.cat([state.pop(name) for name in old])
            state[f"{prefix}c_attn.{part}"] = fused


old_form = dict(good)
for i in range(8):
    for part in ("weight", "bias"):
        fused = old_form.pop(f"transformer.h.{i}.attn.c_attn.{part}")
        for letter, third in zip("qkv", fused.chunk(3)):
            old_form[f"transformer.h.{i}.attn.{letter}.{part}"] = third

model = build(shipped.config)
for block in model.transformer.h:
    block.attn.register_load_state_dict_pre_hook(fuse)
model.load_state_dict(old_form)
model.load_state_dict(good)  # the new form loads, too

assert abs(loss(model) - loss(shipped)) < 0.01
assert "transformer.h.0.attn.q.weight" in old_form

# %%
# Both forms load, because the hook looks for the old names. Your dictionary stays as it was: torch hands a copy to the
# hooks. (In a class of your own you may override ``_load_from_state_dict`` instead, as torch's BatchNorm does.)
#
# Copy or assign
# --------------
#
# Names and shapes fit now. The dtypes do not: the file is float16, and the model float32.
#
# **Predict first.** What is the dtype of the weights after ``load_state_dict``, and after
# ``load_state_dict(assign=True)``?
#
# * float32 and float32
# * float32 and float16
# * float16 and float16

for assign in (False, True):
    model = try_to_load(good, assign=assign)
    weight = model.transformer.wte.weight
    shared = weight.data_ptr() == good["transformer.wte.weight"].data_ptr()
    print(f"assign={assign!s:5}  {weight.dtype}, file's memory: {shared}")
    assert weight.dtype == (torch.float16 if assign else torch.float32)
    assert shared == assign

# %%
# By default torch *copies* the numbers into the tensors that the module has. The module wins. With ``assign=True`` the
# module takes the file's tensors instead. The file wins, and an optimizer that was built before is `stranded
# <3_conversions.ipynb>`_.
#
# What is assigning good for? On the ``meta`` device, tensors have a shape and a dtype and no numbers, so a model of any
# size is built at once and takes no memory. Such a model is a *skeleton*. Copying into it does nothing; assigning fills
# it.

with torch.device("meta"):
    skeleton = build(shipped.config)
skeleton.load_state_dict(good, assign=True)

assert skeleton.transformer.wte.weight.dtype == torch.float16
assert abs(loss(skeleton.float()) - loss(shipped)) < 0.01

# %%
# The tensor decides
# ------------------
#
# The last disagreement is one of class: the file has plain numbers, and the model should have codes of 4 bits. With the
# `swap flag <3_conversions.ipynb>`_ on, torch asks the model's tensor what to become: it calls ``module_load``, and
# swaps in the result. The answer of the package's quantised weight to plain numbers comes to this:
#
# .. code-block:: python
#
#    def module_load(self, other, assign=False):
#        if assign:
#            return type(self).quantize(other)
#        return self.copy_(other).detach()
#
# So quantise a skeleton, which has no numbers to round, and load with ``assign=True``. Each matrix becomes codes as it
# arrives. `Who wins, module or checkpoint? <5a_loading_in_depth.ipynb>`_ tries all combinations, and `filling a skeleton
# <5b_skeletons_in_depth.ipynb>`_ counts the memory on the way.

with torch.device("meta"):
    skeleton = build(shipped.config)
quantize_(skeleton, bits=4)
with swap_on_conversion():
    skeleton.load_state_dict(shipped.state_dict(), assign=True)

held = sum(p.nbytes for p in skeleton.parameters())
plain = sum(p.nbytes for p in shipped.parameters())
print(f"{plain / 1e6:.1f} MB arrive, {held / 1e6:.1f} MB are in the model")

assert not any(p.is_meta for p in skeleton.parameters()) and held < plain / 5
assert abs(loss(skeleton) - loss(shipped)) < 0.1

# %%
# One key too many
# ----------------
#
# Old checkpoints of GPT-2 also hold the causal mask of each block, ``attn.bias``, which a model can compute. A
# *post-hook*, called after loading, sees what was missing and what was unexpected, and may strike out what it knows:


def forgive(module, keys):
    known = [k for k in keys.unexpected_keys if k.endswith(".attn.bias")]
    for key in known:
        keys.unexpected_keys.remove(key)


model = build(shipped.config)
model.register_load_state_dict_post_hook(forgive)
with_mask = good | {"transformer.h.0.attn.bias": torch.ones(256, 256).tril()}
print(model.load_state_dict(with_mask))

assert abs(loss(model) - loss(shipped)) < 0.01

# %%
# A misspelled name is still an error. That is the difference from ``strict=False``. (How a file comes to hold numbers
# alone, or codes, is in `numbers in a file <5c_files_in_depth.ipynb>`_.)
#
# Which one?
# ----------
#
# Begin at the top. The numbers are those of the first drawing.

rows = {
    "a file with other names\nor another layout": "1 your dictionary",
    "old files of a layer\nthat you have changed": "2 pre-hook of the layer",
    "another dtype: keep yours,\nor take that of the file": "3 copy, or\nassign=True",
    "a model too large\nto build twice": "3 meta device, assign",
    "plain numbers for\nquantised weights": "4 swap flag: the tensor\nhas a module_load",
    "a key that nobody needs": "5 post-hook,\nnot strict=False",
}
drawings.choices(rows, ("what does not fit", "what to use"))

# %%
# Exercises
# ---------
#
# 1. *Easy.* Save ``torch.compile(model).state_dict()`` and load it into a plain model. A right answer says what was put
#    in front of each name, and removes it in one line.
# 2. *Easy.* Make an optimizer, load with ``assign=True``, and take a step. A right answer shows which tensors moved, and
#    fixes it by the order of two lines.
# 3. *Medium.* Write a pre-hook that transposes ``c_proj.weight``, and load ``good`` twice. What is wrong? A right answer
#    says why ``fuse`` does not have this problem, and how a hook could know which form it sees.
#
# Summary
# -------
#
# * Names and layouts are your job: change the dictionary, or let a pre-hook of the layer do it. A square matrix that is
#   transposed raises no error, so compare a loss.
# * Without ``assign`` the module's dtype and memory win, with it those of the file. A model on the meta device needs it.
# * With the swap flag a tensor's class decides what it becomes, in ``module_load``. ``strict=False`` only hides what does
#   not fit.
