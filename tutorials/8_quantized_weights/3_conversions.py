r"""
An optimizer that updates nothing
=================================

You build a model, then an optimizer, and then fill the model with the weights of a checkpoint, with
``load_state_dict(assign=True)``: the usual steps, in an unlucky order. There is no error. The program computes a loss,
calls ``backward`` and ``step``, and carries on. But look who holds the model's table of tokens after loading:
"""

# sphinx_gallery_needs = ["2_swapping_tensors"]
# sphinx_gallery_words = ["model.to", "optimizer not updating", "weights not updating", "loss does not decrease", "loss not changing", "set_swap_module_params_on_conversion", "load_state_dict assign=True", "optimizer before model.to", "to_empty", "meta device", "loss stays constant", "loss is flat", "loss does not change at all", "parameters not training", "parameters do not update", "nothing is learned", "model.half", "half precision after the optimizer", "model.cuda after optimizer", "move a model to the GPU", "requires_grad but no change", "optimizer has the wrong parameters"]
import torch
import torch.nn.functional as F
from torch import nn

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import quantized_weights as drawings
from lm_from_scratch.text.corpora import reference, split
from lm_from_scratch.weights.swap import swap_on_conversion

model, tokenizer = load_shipped("gpt2-docs")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
saved = {name: x.clone() for name, x in model.state_dict().items()}
model.load_state_dict(saved, assign=True)

held = optimizer.param_groups[0]["params"][0]
ours = model.transformer.wte.weight

drawings.holders(
    "After loading",
    {"optimizer": held, "model": ours},
    {"first tensor": held, "loaded tensor": ours},
)

# %%
# An optimizer keeps a list of tensors when it is built. ``load_state_dict(assign=True)`` is quick because it copies
# nothing: it puts the checkpoint's tensors into the model as *new parameters*. The model computes with these, so these
# receive the gradients. The optimizer holds tensors that nothing uses any more.
#
# Does it matter? The shipped GPT-2 is to learn one text by heart in 15 steps: once after such a start, and once with one
# of PyTorch's switches on while it loads.

text = split(reference())[1][0].text


def train(swap, steps=15):
    model, tokenizer = load_shipped("gpt2-docs")
    model.eval().requires_grad_()  # without dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved = {name: x.clone() for name, x in model.state_dict().items()}
    with swap_on_conversion(swap):  # explained below
        model.load_state_dict(saved, assign=True)
    ids, losses = torch.tensor([tokenizer.start(text)[:97]]), []
    for _ in range(steps):
        loss = F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


runs = {"as it comes": train(swap=False), "with a swap": train(swap=True)}

import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import COLOURS, figure

_, (ax,) = figure(4.8, 3.2)
for i, (name, (losses, _, _)) in enumerate(runs.items()):
    style = ("o-", "s--")[i]
    ax.plot(losses, style, color=COLOURS[(3, 0)[i]], label=name)
ax.set(title="Learning one text", xlabel="step", ylabel="loss")
ax.legend(frameon=False)
plt.show()

assert max(runs["as it comes"][0]) - min(runs["as it comes"][0]) < 1e-4
assert runs["with a swap"][0][-1] < 0.1 * runs["with a swap"][0][0]
assert abs(runs["with a swap"][0][0] - runs["as it comes"][0][0]) < 1e-4

# %%
# The upper line does not move at all. The lower one is the same program with the switch on.
#
# Who is stranded
# ---------------
#
# **Predict first.** AdamW does more than follow gradients: in every step its *weight decay* also shrinks each weight a
# little. What has it done to the tensors that it holds, in 15 steps?
#
# * It has shrunk them a little.
# * It has moved them as if the model still used them.
# * Nothing.

_, model, optimizer = runs["as it comes"]
held = optimizer.param_groups[0]["params"][0]
before = load_shipped("gpt2-docs")[0].transformer.wte.weight
print("still as at first:", torch.equal(held, before))

assert torch.equal(held, before) and held.grad is None
assert optimizer.defaults["weight_decay"] > 0

# %%
# Nothing. The old tensors get no gradient, and an optimizer skips a tensor without a gradient, decay included.
#
# We call the parameters that an optimizer no longer reaches *stranded*. This small function finds them, in your program
# too. It compares objects, not numbers:


def stranded(module, optimizer):
    groups = optimizer.param_groups
    held = {id(p) for group in groups for p in group["params"]}
    return [n for n, p in module.named_parameters() if id(p) not in held]


for name, (_, model, optimizer) in runs.items():
    count = len(list(model.parameters()))
    print(f"{name}: {len(stranded(model, optimizer))} of {count} stranded")

assert len(stranded(*runs["as it comes"][1:])) == len(list(model.parameters()))
assert not stranded(*runs["with a swap"][1:])

# %%
# The rule is simple: load and convert first, then build the optimizer. The rest of this page is for programs in which
# you cannot, and it explains why the wrong order so often works.
#
# Three ways into a module
# ------------------------
#
# ``module.to``, ``bfloat16``, ``cuda`` and the like compute a new tensor for each parameter. PyTorch has three ways to
# put it into the module:
#
# * ``.data =``, the default: the old object gets the new numbers.
# * A new parameter, as in an assignment. One of PyTorch's flags asks for this.
# * A *swap*, if another flag is set.
#
# The package's ``observe`` tries them: it converts a small module whose embedding and head are tied, and looks at every
# holder of the weight. In the table, ``True`` means that a holder follows, and ``left`` that it keeps the old numbers.

from lm_from_scratch.instruments.references import PATHS, observe

ways = {
    ".data =": observe(*PATHS["to"]),
    "new parameter": observe(*PATHS["to, overwrite flag"]),
    "swap": observe(*PATHS["to, swap flag"]),
}
print(f"{'':15}{'optimizer':11}{'tie':7}a view of the weight")
for name, seen in ways.items():
    print(f"{name:15}{seen.optimizer!s:11}{seen.tie!s:7}{seen.view}")

assert [seen.optimizer for seen in ways.values()] == [True, False, True]
assert [seen.tie for seen in ways.values()] == [True, False, True]
assert ways[".data ="].view == ways["new parameter"].view == "left"
assert ways["swap"].view == "RuntimeError"

# %%
# New parameters lose the optimizer *and* the tie: embedding and head become two matrices. The default keeps both, which
# is why ``model.to`` usually works even after you have built the optimizer.
#
# **Predict first.** Large models are often built on the *meta* device, where a tensor has a shape and no memory;
# ``to_empty`` gives it memory later. An optimizer is built in between. Is it stranded?
#
# * No: the default is ``.data =``.
# * Only for weights that are tied.
# * Yes, for every weight.

module = nn.Linear(2, 2, device="meta")
optimizer = torch.optim.SGD(module.parameters())
module.to_empty(device="cpu")
print("stranded:", stranded(module, optimizer))

assert stranded(module, optimizer) == ["weight", "bias"]

# %%
# Yes, for every weight. ``.data =`` cannot pour numbers into a tensor without memory, so PyTorch makes new parameters
# instead, without a warning.
#
# The flag
# --------
#
# Now for the switch of the first picture. ``torch.__future__.set_swap_module_params_on_conversion(True)`` makes
# conversions and ``load_state_dict`` swap. It is global, so the package's ``swap_on_conversion`` sets it for a ``with``
# block and restores the old value afterwards.

module = nn.Linear(2, 2, device="meta")
optimizer = torch.optim.SGD(module.parameters())
with swap_on_conversion():
    module.to_empty(device="cpu")
print("stranded:", stranded(module, optimizer))

assert not stranded(module, optimizer) and not module.weight.is_meta
assert not torch.__future__.get_swap_module_params_on_conversion()

# %%
# The price is in the last column of the table: a view never follows a conversion. Without the flag it keeps the old
# numbers. With the flag you get an error.

module = nn.Linear(2, 2)
row = module.weight[0]
try:
    with swap_on_conversion():
        module.bfloat16()
except RuntimeError as error:
    print("with the flag:", str(error)[:40])

module.bfloat16()
print("without: ", module.weight.dtype, "but the view is", row.dtype)

assert module.weight.dtype == torch.bfloat16 and row.dtype == torch.float32

# %%
# An error is better than a view with wrong numbers. But do not leave the flag on: code that knows nothing of it would
# fail where it used to run. A loss that still waits for its backward pass causes errors, too. `Conversions in depth
# <3a_conversions_in_depth.ipynb>`_ has a table of 13 ways to give a module new numbers.
#
# Quantise what an optimizer holds
# --------------------------------
#
# Here is a case that needs a swap. The shipped GPT-2 is being trained, and AdamW has taken one step. Now every matrix is
# to become 8-bit.

model, tokenizer = load_shipped()
idx = torch.tensor([tokenizer.encode(text)[:97]])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def step():
    logits = model(idx[:, :-1])
    loss = F.cross_entropy(logits[0], idx[0, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


step()
objects = [id(p) for p in model.parameters()]
size = sum(p.nbytes for p in model.parameters())

# %%
# **Predict first.** What does the optimizer do after ``quantize_``?
#
# * It is stranded.
# * It raises an error at the first int8 weight.
# * It trains what is left to train.

from lm_from_scratch.weights.quantize import quantize_

quantize_(model, bits=8)
small = sum(p.nbytes for p in model.parameters())
codes = model.head.weight.codes.clone()
norm = model.transformer.ln_f.weight.detach().clone()

print(f"{size / 1e6:.1f} MB, then {small / 1e6:.1f} MB")
print("stranded:", stranded(model, optimizer))
first, *_, final = [step() for _ in range(8)]
print(f"loss {first:.3f}, then {final:.3f}")

from lm_from_scratch.weights.quantized_weight import QuantizedWeight

assert [id(p) for p in model.parameters()] == objects
assert model.head.weight is model.transformer.wte.weight
assert isinstance(model.head.weight, QuantizedWeight)
assert not stranded(model, optimizer) and 3.5 * small < size
assert final < first
assert not torch.equal(model.transformer.ln_f.weight, norm)
assert torch.equal(model.head.weight.codes, codes)

# %%
# It trains what is left to train. Norms, biases and positions still get gradients and go on learning; the 8-bit weights
# get none, and the optimizer skips them.
#
# Every object is the one it was, and the tie holds. The optimizer still keeps the moments of the 8-bit weights: delete
# them from ``optimizer.state`` if you need the memory.
#
# Exercises
# ---------
#
# 1. *Easy.* ``nn.utils.prune.random_unstructured`` and ``nn.utils.parametrizations.weight_norm`` rename parameters.
#    Which of them strands an optimizer? A good answer shows the names, and explains both by ``id``.
# 2. *Easy.* Fix the first program of this page without any flag, by moving one line. A good answer has an empty list of
#    stranded parameters and a loss that falls.
# 3. *Hard.* Write ``restore_(optimizer, old, new)``, which repairs an optimizer after an assignment, with its state.
#    A good answer continues training with the same losses as after a swap. Hint: AdamW, and two places to repair.
#
# Summary
# -------
#
# * An optimizer holds objects. If you replace a parameter by a new one, the optimizer updates nothing, without an error.
# * ``Module.to`` pours numbers into the old object if it can, and makes new parameters if it cannot.
#   ``load_state_dict(assign=True)`` always makes new ones.
# * Load and convert before you build the optimizer. If you cannot, set the swap flag in a ``with`` block, and compare
#   objects afterwards.
