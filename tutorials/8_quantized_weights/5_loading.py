r"""
A checkpoint that does not fit
==============================

A checkpoint and a model can disagree about names, layout and dtype. PyTorch has five places where your code can settle
it. Each is a link to the section that explains it.
"""

# sphinx_gallery_needs = ["4_quantized_weight", "../2_qwen2/4_qwen2"]
# sphinx_gallery_words = ["load_state_dict", "missing keys", "unexpected keys", "Missing key(s) in state_dict", "Unexpected key(s) in state_dict", "size mismatch", "Error(s) in loading state_dict", "strict=False", "assign=True", "meta device", "load_state_dict pre hook", "_load_from_state_dict", "Conv1D", "_orig_mod", "load a checkpoint", "load pretrained weights", "state dict keys do not match", "load a .pt file", "weights do not load", "load only some weights", "rename keys", "key names differ", "map names", "weights from another framework", "TensorFlow checkpoint", "layout differs", "copying a param with shape", "shapes differ", "load partially", "transfer weights", "checkpoint conversion", "old checkpoint", "Cannot copy out of meta tensor", "some weights of the model checkpoint were not used", "newly initialized", "weights not used"]
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
# Say someone has trained a GPT-2 like ours and published it in float16, in the format of OpenAI's own checkpoints. You
# build the model, call ``load_state_dict``, and get this:

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
# The names lack ``transformer.``, the matrices are transposed, and all numbers are float16.
#
# The tempting fix
# ----------------
#
# Search for the error message, and you find ``strict=False``: load the names that fit, and ignore the rest. To see what
# it does, we measure the loss on documentation that the shipped model was not trained on. The shipped model itself has a
# loss of about 4.9 nats per token.
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
# The loss is about 8.3. There is no error, but nothing was loaded either: not one name fits, so the model is as random
# as ``build`` left it. ``strict=False`` does not fix a checkpoint, it switches the alarm off.
#
# Your dictionary
# ---------------
#
# A checkpoint is a dictionary, so change it before PyTorch sees it. Fix the names first.
#
# **Predict first.** The model has 32 linear layers (``nn.Linear``), and all 32 matrices in the file are transposed. Once
# the names fit, how many of the matrices does PyTorch complain about?
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
# 24 of them: a transposed matrix has another shape, unless it is square. Eight are square: ``attn.c_proj``, once in
# each block.
#
# Suppose you transpose the matrices that the error message names, and no others.

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
# With 24 transposed, PyTorch is content and the model is wrong. Shapes cannot reveal this mistake, so compute a loss or
# compare some logits after every conversion.
#
# For a file that you read only once, two loops over a dictionary are all you need.
#
# A layer that has changed
# ------------------------
#
# It is different if *your own* layer has changed and old files are everywhere. Say our attention once had three
# projections, ``q``, ``k`` and ``v``, which are one ``c_attn`` today. Then the layer should know how to read its old
# form, wherever in a model it is. A *pre-hook* is a function that PyTorch calls before it fills a layer. It receives the
# dictionary and the prefix of the layer's names in it, such as ``transformer.h.0.attn.``:


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
# Both forms load, because the hook looks for the old names. Your dictionary stays as it was, because PyTorch hands the
# hooks a copy. (In a class of your own you may override ``_load_from_state_dict`` instead, as PyTorch's BatchNorm does.)
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
# float32 and float16. By default PyTorch *copies* the numbers into the module's own tensors, so the module wins. With
# ``assign=True`` the module takes the file's tensors instead, so the file wins.
#
# Assigning *strands* an `optimizer <3_conversions.ipynb>`_ that was built earlier. So what is it good for? On the ``meta``
# device, tensors have a shape and a dtype but no numbers, so a model of any size is built at once and takes no memory.
# Such a model is a *skeleton*. Copying into it does nothing; assigning fills it.

with torch.device("meta"):
    skeleton = build(shipped.config)
skeleton.load_state_dict(good, assign=True)

assert skeleton.transformer.wte.weight.dtype == torch.float16
assert abs(loss(skeleton.float()) - loss(shipped)) < 0.01

# %%
# The tensor decides
# ------------------
#
# The last disagreement is about the class: the file has plain numbers, and the model should have 4-bit codes. With the
# `swap flag <3_conversions.ipynb>`_ on, PyTorch calls the ``module_load`` of the model's tensor, and swaps in what it
# returns. For plain numbers, the method of the package's quantised weight comes to this:
#
# .. code-block:: python
#
#    def module_load(self, other, assign=False):
#        if assign:
#            return type(self).quantize(other)
#        return self.copy_(other).detach()
#
# So quantise a skeleton, which has no numbers to round, and load with ``assign=True``. Each matrix becomes codes as it
# arrives. `Loading in depth <5a_loading_in_depth.ipynb>`_ tries all combinations, and `quantised files in depth
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
# Old GPT-2 checkpoints also hold the causal mask of each block, ``attn.bias``, which a model can compute. A *post-hook*,
# called after loading, sees which keys were missing and which were unexpected, and may cross out those that it knows:


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
# A misspelled name is still an error. That is the difference from ``strict=False``.
#
# Which of the five do you need?
# ------------------------------
#
# Start at the top. The numbers are those of the first drawing.

rows = {
    "a file with other names\nor another layout": "1 your dictionary",
    "old files of a layer\nthat you have changed": "2 pre-hook of the layer",
    "another dtype: keep yours,\nor take that of the file": "3 copy, or\nassign=True",
    "a model too large\nto build twice": "3 meta device, assign",
    "plain numbers for\nquantised weights": "4 swap flag: the tensor\nhas a module_load",
    "a key that you do not need": "5 post-hook,\nnot strict=False",
}
drawings.choices(rows, ("what does not fit", "what to use"))

# %%
# Exercises
# ---------
#
# 1. *Easy.* Save ``torch.compile(model).state_dict()`` and load it into a plain model. A good answer names the prefix
#    that each name has got, and removes it in one line.
# 2. *Easy.* Make an optimizer, load with ``assign=True``, and take a step. A good answer shows which tensors moved, and
#    fixes it by the order of two lines.
# 3. *Medium.* Write a pre-hook that transposes ``c_proj.weight``, and load ``good`` twice. What is wrong? A good answer
#    says why ``fuse`` does not have this problem, and how a hook could know which form it sees.
#
# Summary
# -------
#
# * Names and layouts are your job: change the dictionary, or let a pre-hook of the layer do it. A transposed square
#   matrix raises no error, so compare a loss.
# * Without ``assign`` the module's dtype and memory win, with it the file's. A model on the meta device needs ``assign``.
# * With the swap flag on, the tensor's class decides in ``module_load`` what the tensor becomes. ``strict=False`` only
#   hides what does not fit.
