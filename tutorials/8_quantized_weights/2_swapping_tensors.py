r"""
Swapping two tensors
====================

You have rounded a weight to 8 bits, and want to put it into a model that is already built. ``layer.weight = new`` looks
like the obvious way. But the layer is not the only holder of its weight.

Here the shipped GPT-2's table of tokens has five *holders*: a variable, a list, the embedding, an output head that is
*tied* to it (both share one tensor), and an optimizer, which keeps its tensors in ``param_groups``.
"""

# sphinx_gallery_needs = ["1_int8_int4", "../1_gpt2/4_training"]
# sphinx_gallery_words = ["swap_tensors", "torch.utils.swap_tensors", "replace a parameter", "tied weights lost", "weight.data =", "change the weights of a model", "optimizer holds the old parameter", "change a weight in place", "set a weight by hand", "set the weight of a layer", "overwrite weights", "assign a new tensor", "assign a tensor to a module", "in-place change of a weight", "edit weights", "modify weights", "references to the old tensor", "cannot assign as parameter", "copy_"]
import torch
from torch import nn

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import quantized_weights as drawings

embedding = load_shipped("gpt2-docs")[0].transformer.wte
weight = embedding.weight.requires_grad_()  # (4096, 128)
params = [weight]
head = nn.Linear(128, 4096, bias=False)
head.weight = weight  # tied
optimizer = torch.optim.SGD([weight], lr=0.1)

drawings.holders(
    "At first",
    {
        "weight": weight,
        "list": params[0],
        "embedding": embedding.weight,
        "head": head.weight,
        "optimizer": optimizer.param_groups[0]["params"][0],
    },
    {"tensor 1": weight},
)

# %%
# The new tensor has codes of 8 bits, and a scale as an attribute. (In PyTorch a layer of weights such as the head is an
# ``nn.Linear``, and a tensor that belongs to a layer is an ``nn.Parameter``.)

scale = weight.detach().abs().amax(1, keepdim=True) / 127
codes = (weight.detach() / scale).round().to(torch.int8)
new = nn.Parameter(codes, requires_grad=False)
new.scale = scale


def places():
    return {
        "weight": weight,
        "list": params[0],
        "embedding": embedding.weight,
        "head": head.weight,
        "optimizer": optimizer.param_groups[0]["params"][0],
    }


tensors = {"tensor 1": weight, "tensor 2": new}

# %%
# **Predict first.** We assign ``head.weight = new``. How many of the five holders have the codes then?
#
# * one
# * two: the head, and the embedding that is tied to it
# * all five


def have_codes():
    return [name for name, x in places().items() if x.dtype == torch.int8]


head.weight = new
print("after the assignment:", have_codes())

assert have_codes() == ["head"]
drawings.holders("head.weight = new", {**places(), "new": new}, tensors)

# %%
# One: the head. An assignment changes where *one* name leads, and a tensor does not know who else holds it.
#
# The tie is broken, and the optimizer still holds a tensor that the head no longer uses. None of this is an error.
# (The `next lesson <3_conversions.ipynb>`_ shows what becomes of such a training run.)
#
# Change the object
# -----------------
#
# So let us undo the assignment. All five holders lead to one object, so we can change that object instead. PyTorch has
# an old way to do this, ``.data =``, which gives a tensor new numbers:

head.weight = weight


def error_of(function, *arguments):
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error)


def set_data(tensor, other):
    tensor.data = other


print("codes:", error_of(set_data, weight, new))
rounded = codes * scale
rounded.scale = scale
print("numbers:", error_of(set_data, weight, rounded))
print("has a scale:", hasattr(weight, "scale"))

assert "must be floating point" in error_of(set_data, weight, new)
assert torch.equal(embedding.weight, rounded) and embedding.weight is weight
assert not hasattr(weight, "scale")
drawings.holders(
    "weight.data = rounded",
    {**places(), "rounded": rounded},
    {"tensor 1": weight, "tensor 3": rounded},
)

# %%
# PyTorch refuses codes, because a tensor that needs a gradient must be floating point. It accepts rounded numbers, and
# they reach all five holders. But the scale has not come along: ``.data =`` pours numbers into the old object, which
# keeps its class and its attributes. For a quantised weight that is not enough: codes without their scale are worthless.
#
# Swap
# ----
#
# ``torch.utils.swap_tensors`` exchanges everything that two tensors *are*: numbers, shape, dtype, class, attributes and
# gradient.

torch.utils.swap_tensors(weight, new)
print("after the swap:", have_codes(), hasattr(weight, "scale"))

assert have_codes() == list(places()) and hasattr(weight, "scale")
assert new.dtype == torch.float32 and new.requires_grad
assert weight.scale is scale and not weight.requires_grad
drawings.holders("After the swap", {**places(), "new": new}, tensors)

# %%
# Compare with the first drawing: no arrow has moved. The same holders lead to the same objects, and the objects have
# exchanged their contents. It is as if two families swapped flats: the addresses in your notebook stay the same, but
# somebody else opens the door. (No number is copied, so a large tensor takes no longer than a small one.)
#
# Even the shapes may differ:

t1, t2 = torch.arange(2), torch.arange(3)
torch.utils.swap_tensors(t1, t2)
print(t1, t2)

assert (t1.tolist(), t2.tolist()) == ([0, 1, 2], [0, 1])

# %%
# Which tensors keep the old numbers
# ----------------------------------
#
# **Predict first.** Before the swap you took the ``state_dict`` of a head, the dictionary of its tensors, by name.
# Which numbers does it have after the swap?
#
# * the new ones: it holds ``head.weight``
# * the old ones
# * none: the swap is refused

weight = nn.Parameter(torch.zeros(4, 3))
head = nn.Linear(3, 4, bias=False)
head.weight = weight
saved = head.state_dict()
torch.utils.swap_tensors(weight, nn.Parameter(torch.ones(4, 3)))
print("head: ", head.weight[0].tolist())
print("saved:", saved["weight"][0].tolist())

assert head.weight.all() and not saved["weight"].any()

# %%
# The old ones. A ``state_dict`` holds *detached* tensors: separate objects that look at the same memory. A swap takes
# ``weight`` to other memory, and the detached tensors stay where they are.
#
# The same is true of ``weight.detach()``, ``weight.data`` and a NumPy array that shares a weight's memory. So take them
# after the swap.
#
# A *view*, such as one row of a weight, is another such object, and PyTorch is stricter with it. A view remembers the
# tensor that it is a part of, because changes and gradients of one must reach the other. After a swap it would belong
# to the wrong tensor.

zeros = nn.Parameter(torch.zeros(4, 3))
row = weight[0]  # a view
message = error_of(torch.utils.swap_tensors, weight, zeros)
print(message[:75])
del row
print(error_of(torch.utils.swap_tensors, weight, zeros))

assert "Expected use_count of t1 to be 1" in message and not weight.any()

# %%
# As long as the view exists, PyTorch refuses the swap. Once the view is gone, the swap goes through. (``use_count``
# counts the holders inside PyTorch.) A weak reference, one that does not keep its object alive, blocks a swap too. If a
# loss still waits for its backward pass, PyTorch refuses either the swap or the backward pass.
#
# In practice: swap before the forward pass or after the backward pass, and delete views first.
#
# What the optimizer remembers
# ----------------------------
#
# An optimizer follows a swap, because it holds the object. But AdamW also keeps *state* for each weight: running means
# of its earlier gradients.
#
# **Predict first.** AdamW takes one step. Then we swap in a weight of zeros, and set its gradient to zero. Does the
# next step move the weight?
#
# * No: a gradient of zero changes nothing.
# * Yes, by weight decay.
# * Yes, by the gradients of the weight that was there before.

p = nn.Parameter(torch.ones(3))
adamw = torch.optim.AdamW([p])
p.grad = torch.ones(3)
adamw.step()

torch.utils.swap_tensors(p, nn.Parameter(torch.zeros(3)))
p.grad = torch.zeros(3)
adamw.step()
print(p.data)

assert p.all()

# %%
# Yes, by the gradients of the old weight. Decay cannot be the reason, since it shrinks 0 to 0. But the state belongs to
# the object, so the old weight's mean gradient still pushes the new one.
#
# If a swap changes what a weight means, delete its state:

torch.utils.swap_tensors(p, nn.Parameter(torch.zeros(3)))
del adamw.state[p]
p.grad = torch.zeros(3)
adamw.step()
print(p.data)

assert not p.any()

# %%
# A whole model
# -------------
#
# A model has many weights, and one refusal in the middle would leave it half converted. So the package checks every
# tensor first, and swaps all of them or none. ``quantize_`` of the last lesson works this way: an optimizer that was built
# earlier holds the quantised weights afterwards.
#
# `Swaps in depth <2a_what_a_swap_moves.ipynb>`_ lists what moves and what stays, and shows what would go wrong if
# PyTorch refused nothing.
#
# Exercises
# ---------
#
# 1. *Easy.* Add a sixth place to ``places``: a tuple, a closure, or an ``nn.ParameterList``. A good answer predicts
#    first whether it follows the assignment, ``.data =`` and the swap.
# 2. *Easy.* Swap a buffer, the running mean of a BatchNorm layer, and then swap a parameter for a plain tensor. A good
#    answer says what ``named_parameters`` lists in the second case, and why. Hint: ``module._parameters``.
# 3. *Hard.* Write a swap that moves an optimizer's state along, for equal shapes. A good answer goes on exactly like a
#    run in which the optimizer held the other tensor from the start. Hint: both tensors need a key in ``state``.
#
# Summary
# -------
#
# * ``module.weight = new`` reaches one holder of a weight. A tied head, a list and an optimizer keep the old tensor,
#   without an error.
# * ``torch.utils.swap_tensors`` exchanges everything that two objects are: class, attributes, shape and numbers. Every
#   holder of the object follows.
# * Detached tensors keep the old numbers, a view makes PyTorch refuse, and an optimizer keeps its state.
