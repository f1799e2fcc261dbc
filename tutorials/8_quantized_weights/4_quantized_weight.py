r"""
A weight that is int8 inside
============================

With 8 bits, a weight is two tensors: whole numbers, the *codes*, and a *scale* for each row. The model's code knows
nothing of this. Its layers go on calling ``F.linear``, PyTorch's product with a weight matrix, on ``self.weight``, and
it still runs. How?

Here is one weight of the shipped GPT-2 after ``quantize_`` from the lesson on `int8 and int4 <1_int8_int4.ipynb>`_.
"""

# sphinx_gallery_needs = ["1_int8_int4", "2_swapping_tensors", "3_conversions"]
# sphinx_gallery_words = ["tensor subclass", "__torch_dispatch__", "__torch_function__", "wrapper subclass", "_make_wrapper_subclass", "quantize weights", "torchao", "deepcopy quantized model", "int8 linear layer", "store weights in int8", "custom tensor type", "custom tensor class", "subclass torch.Tensor", "override torch operations", "override operators", "operator overloading", "dequantize on the fly", "quantised linear layer", "int8 Linear", "NotImplementedError"]
import copy

import torch
import torch.nn.functional as F
from torch import nn

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import quantized_weights as drawings
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.generation.text import generate_text
from lm_from_scratch.weights.quantize import quantize_

model, tokenizer = load_shipped("gpt2-docs")
quantize_(model, bits=8, weight_only=True)
weight = model.transformer.h[0].attn.c_attn.weight


def described(tensor):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [str(tuple(tensor.shape)), dtype, f"{tensor.nbytes:,} bytes"]


assert weight.dtype == torch.float32 and weight.nbytes == 49_152 + 1_536
drawings.held_tensors(
    f"Tensor {tuple(weight.shape)}, float32",
    {name: described(getattr(weight, name)) for name in weight.held},
)

# %%
# From outside it is a float32 matrix: ``weight.dtype`` says so. But it holds about a quarter of the bytes. And you can
# do with the model what people do with models: copy it, convert it, save and load its ``state_dict``.

prompt = "The with statement is used to wrap"


def write(model):
    return "".join(generate_text(model, tokenizer, prompt, 12, GREEDY))


half = copy.deepcopy(model).to(torch.bfloat16)
half.load_state_dict(model.state_dict())
print(half.transformer.h[0].attn.c_attn.weight.nbytes, "bytes")
print(prompt + write(half))

assert type(half.transformer.h[0].attn.c_attn.weight) is type(weight)
assert half.transformer.h[0].attn.c_attn.weight.nbytes == 49_152 + 768
assert "without" in write(half) and "without" in write(model)

# %%
# None of this is in the model's code. The *tensor* does it, and on this page you will write such a tensor.
#
# Why not plain int8?
# -------------------
#
# First compute codes and scale as that lesson does: in each row, the number farthest from 0 gets the code 127 or -127.


def encode(matrix):
    scale = matrix.abs().amax(dim=1, keepdim=True) / 127  # (N, 1)
    return (matrix / scale).round().to(torch.int8), scale


plain, _ = load_shipped("gpt2-docs")
layer = plain.transformer.h[0].attn.c_attn
matrix = layer.weight.detach()  # (N, K) = (384, 128)
codes, scale = encode(matrix)
x = torch.randn(3, 128)  # three tokens

assert torch.equal(codes, weight.codes) and torch.equal(scale, weight.scale)

# %%
# **Predict first.** The shortest way would be to put the codes into the layer as a plain int8 tensor. What does
# ``layer(x)`` return?
#
# * numbers about a thousand times too large
# * the right numbers, because torch converts int8 to float32
# * nothing: an error

layer.weight = nn.Parameter(codes, requires_grad=False)
try:
    layer(x)
except RuntimeError as error:
    print(message := str(error))

assert message
layer.weight = nn.Parameter(matrix)

# %%
# Nothing: PyTorch does not multiply float32 by int8, and it knows nothing of a scale. The codes need an object around
# them that does.
#
# A tensor with nothing in it
# ---------------------------
#
# A *tensor subclass* is a Python class that derives from ``torch.Tensor``. ``_make_wrapper_subclass`` makes a
# *wrapper*: a tensor that has a shape, a dtype and a device but no numbers. (Python calls ``__new__`` to make an
# object, and then ``__init__`` to fill it.) Codes and scale are ordinary attributes.
#
# Whenever PyTorch meets such a tensor, it calls two methods of the class: ``__torch_function__`` and
# ``__torch_dispatch__``. Each receives the function that was called, ``func``, and its arguments, and looks up our answer
# in a dictionary. Without an answer, the first method lets PyTorch carry on, and the second refuses. (The ``with`` line
# keeps a call inside the first method from coming back to it.) The dictionaries are still empty.

FUNCTIONS, OPERATORS = {}, {}


class Weight(torch.Tensor):
    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device
        )

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return FUNCTIONS.get(func, func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func not in OPERATORS:
            raise NotImplementedError(f"{func} is not implemented")
        return OPERATORS[func](*args, **(kwargs or {}))


# %%
# **Predict first.** Which of the five calls below work with this weight?
#
# * all but ``F.linear``
# * ``deepcopy`` and ``nn.Parameter``, which compute nothing
# * none

w = Weight(codes, scale)
calls = {
    "F.linear": lambda: F.linear(x, w),
    "nn.Parameter": lambda: nn.Parameter(w, requires_grad=False),
    "deepcopy": lambda: copy.deepcopy(w),
    "to(bfloat16)": lambda: w.to(torch.bfloat16),
    "sum": lambda: w.sum(),
}


def attempt():
    for name, call in calls.items():
        try:
            call()
            yield name, "works"
        except NotImplementedError as error:
            yield name, str(error)


for name, result in attempt():
    print(f"{name:13} {result}")

assert not any(result == "works" for _, result in attempt())

# %%
# None. But the list of failures is a to-do list: each line names the operator that is missing. ``aten`` is PyTorch's
# library of operators, of which every call on a tensor is made. (``default`` is the ordinary variant of an operator.)
#
# Two doors
# ---------
#
# Look at the first line. You called ``F.linear``, and the error names ``aten.t``, a transposition. A call meets your
# class twice: once as you wrote it, and again after autograd, which records operations for the backward pass, has split
# it into operators.

refused = ["everything else is refused by name:", "NotImplementedError"]
drawings.two_doors(["F.linear"], ["detach", "clone", "_to_copy"], refused)

# %%
# The rule is simple. At the upper door, answer calls that you want to see whole. At the lower door, answer operators that
# many calls share: ``nn.Parameter``, ``state_dict`` and ``.data`` all come down to ``detach``.
#
# We answer the product at the upper door: decode, then multiply. At the lower door, ``detach`` and ``clone`` do to codes
# and scale what PyTorch does to a plain tensor. ``_to_copy`` is ``.to``. It must change the scale's dtype, while the
# codes stay int8.

aten = torch.ops.aten


def linear(x, w, bias=None):
    return F.linear(x, w.scale * w.codes, bias)


def to_copy(w, dtype=None, device=None, **_):
    return Weight(w.codes.to(device), w.scale.to(device, dtype))


FUNCTIONS[F.linear] = linear
OPERATORS[aten._to_copy.default] = to_copy
OPERATORS[aten.detach.default] = lambda w: Weight(
    w.codes.detach(), w.scale.detach()
)
OPERATORS[aten.clone.default] = lambda w, **_: Weight(
    w.codes.clone(), w.scale.clone()
)

for name, result in attempt():
    print(f"{name:13} {result}")

assert dict(attempt())["sum"] == "aten.sum.default is not implemented"
assert [result for _, result in attempt()].count("works") == 4
torch.testing.assert_close(F.linear(x, w), x @ (scale * codes).T)
assert (F.linear(x, w) - F.linear(x, matrix)).abs().max() < 0.1
assert copy.deepcopy(w).codes.data_ptr() != w.codes.data_ptr()

# %%
# Four of five work. ``sum`` is still refused, on purpose: an operator that nobody has thought about should say so. It is
# tempting to decode the weight for every other operator instead. But then ``w.add_(1)`` would change a decoded copy and
# throw it away, and an optimizer could run for hours without moving a weight.
#
# A whole module
# --------------
#
# ``w.to(torch.bfloat16)`` is now right. But a model keeps its weights in modules, and one ``module.bfloat16()`` converts
# them all.
#
# **Predict first.** We put the weight into a layer and call ``layer.bfloat16()``. What are the dtypes of the weight and
# of its scale then?
#
# * bfloat16 and bfloat16
# * bfloat16 and float32
# * float32 and float32: a weight of codes is not converted

layer.weight = nn.Parameter(w, requires_grad=False)
layer.bfloat16()
print("weight", layer.weight.dtype)
print("scale ", layer.weight.scale.dtype)

assert layer.weight.dtype == torch.bfloat16
assert layer.weight.scale.dtype == torch.float32

# %%
# bfloat16 and float32: the weight is lying. A module converts with ``weight.data = ...``, which gives the wrapper a new
# dtype and leaves the attributes of the Python object alone. The error comes later and elsewhere, when the scale meets
# bfloat16 activations.
#
# The fix is two more methods: one says which tensors are inside, the other makes a weight of such tensors. (We need no
# ``context``, so ``flatten`` returns None for it.) With them, a module exchanges the whole weight by `swapping
# <2_swapping_tensors.ipynb>`_, and all its holders follow.


def flatten(self):
    return ["codes", "scale"], None


def unflatten(parts, context, shape, stride):
    return Weight(parts["codes"], parts["scale"])


Weight.__tensor_flatten__ = flatten
Weight.__tensor_unflatten__ = staticmethod(unflatten)

layer.float()
layer.weight = nn.Parameter(Weight(codes, scale), requires_grad=False)
layer.bfloat16()
print("scale ", layer.weight.scale.dtype)

assert layer.weight.scale.dtype == layer.weight.dtype == torch.bfloat16

# %%
# Into the shipped model
# ----------------------
#
# That is all a model needs in order to write, and to be copied and converted. Put a ``Weight`` into each of its 32 linear
# layers (``nn.Linear``):

mine, _ = load_shipped("gpt2-docs")
maps = [m for m in mine.modules() if isinstance(m, nn.Linear)]
for m in maps:
    w = Weight(*encode(m.weight.detach()))
    m.weight = nn.Parameter(w, requires_grad=False)

before = sum(m.weight.numel() * 4 for m in maps)
after = sum(m.weight.codes.nbytes + m.weight.scale.nbytes for m in maps)
print(f"{before:,} bytes before, {after:,} after")
print(prompt + write(mine))
print(prompt + write(copy.deepcopy(mine).bfloat16()))

assert len(maps) == 32 and "without" in write(mine)
assert before == 6_291_456 and after == 1_572_864 + 4 * 9_216

# %%
# The matrices take a quarter of the bytes, plus the scales. Copying and conversion work, and no line of the model's code
# has changed.
#
# The package's weight has more answers than this one: values copied in and out, embeddings, a backward pass that keeps
# codes instead of a decoded matrix, and a kernel that reads codes. `A quantised weight in depth
# <4a_operators_in_depth.ipynb>`_ adds them one by one. The next lesson loads checkpoints into such a model.
#
# Exercises
# ---------
#
# 1. *Easy.* Add ``aten.empty_like.default`` to your table, so that ``nn.Linear.to_empty(device="meta")`` works. A good
#    answer shows the devices of wrapper, codes and scale.
# 2. *Easy.* ``mine.load_state_dict(mine.state_dict())`` fails. Add the operator that it names. A good answer copies
#    codes and scale into the memory that is there, and shows with ``data_ptr()`` that the memory stayed the same.
# 3. *Medium.* Quantise the token embedding of ``mine`` too. It is looked up *and* it is the head. A good answer says
#    which two calls meet the weight, adds one operator, and lets the model write.
#
# Summary
# -------
#
# * A tensor subclass can have a shape and a dtype outside and other tensors inside. The model's code stays as it is.
# * Calls arrive at two doors: ``__torch_function__`` sees them whole, ``__torch_dispatch__`` sees PyTorch's operators. An
#   operator without an answer should fail and say its name.
# * A wrapper has a dtype, and so has each tensor inside. ``__tensor_flatten__`` tells PyTorch what is inside, so that both
#   change.
