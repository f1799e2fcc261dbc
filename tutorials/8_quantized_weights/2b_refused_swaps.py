r"""
Refused swaps
=============

PyTorch does not swap every pair of tensors. A view, a weak reference or a loss that waits for its backward pass is
enough for an error, as the lesson on `swapping two tensors <2_swapping_tensors.ipynb>`_ shows. Why? This page makes the
refused swaps all the same, with the three lines of `what a swap moves <2a_what_a_swap_moves.ipynb>`_, and looks at what
goes wrong. Then it swaps many tensors, all or none.
"""

# sphinx_gallery_needs = ["2a_what_a_swap_moves"]
# sphinx_gallery_words = ["Couldn't swap", "Expected use_count", "AccumulateGrad", "poisoned by swap_tensors", "weakref", "Cannot swap t1 because it has weakref associated with it", "set_swap_module_params_on_conversion"]
import inspect
import weakref

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from lm_from_scratch.weights.swap import is_held, swap_, swap_on_conversion


def three_lines(a, b):
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)


def two():
    return nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.ones(4, 3))


def refusal(function, *args):
    try:
        function(*args)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)


# %%
# Slots
# -----
#
# A slot has a fixed place in the memory of the object. An object whose class lacks the slot has no such place, and
# Python itself does not let it change its class. PyTorch checks first.


class Slotted(Tensor):
    __slots__ = ("unit",)


a, b = torch.zeros(2).as_subclass(Slotted), torch.zeros(3)
a.unit = "metre"
messages = [refusal(swap, a, b) for swap in (swap_tensors, three_lines)]
print(*messages, sep="\n")
assert "different slots" in messages[0] and "layout differs" in messages[1]

# %%
# Weak references
# ---------------
#
# With the three lines a weak reference sees the new numbers, as every strong one does.

a, b = two()
weak = weakref.ref(a)
print(refusal(swap_tensors, a, b))
assert "weakref" in refusal(swap_tensors, a, b) and not a.any()
three_lines(a, b)
assert weak() is a and a.all()

# %%
# The danger is in containers that are built on weak references: they file something under a tensor, and the swap
# changes what it is filed under. A plain dict does that as well, and is not refused. Here is one that you use daily.

for n in (2, 3):
    p = nn.Parameter(torch.zeros(3))
    adamw = torch.optim.AdamW([p])
    p.grad = torch.ones(3)
    adamw.step()
    swap_tensors(p, nn.Parameter(torch.zeros(n)))
    moment = adamw.state[p]["exp_avg"]
    assert moment.shape == (3,) and moment.all()
    p.grad = torch.zeros(n)
    message = refusal(adamw.step)
    moved = bool(p.any())
    print(f"shape {n}: {(message or 'no error')[:52]}; moved {moved}")
    assert ("must match" in message and not moved) if n == 2 else moved

# %%
# The optimizer follows, and its state stays: moments of the weight that has left. With another shape they do not fit.
# With an equal shape they are used, as in the lesson: the weight moved although its gradient was zero.
#
# Weak references are more common than they look. An LSTM keeps them to its own weights.

lstm, layer = nn.LSTM(2, 2), nn.Linear(2, 2)
assert len(weakref.getweakrefs(lstm.weight_ih_l0)) == 1
assert not weakref.getweakrefs(layer.weight)

# %%
# Other holders of the at::Tensor
# -------------------------------
#
# C++ counts who holds an at::Tensor. The Python object is one holder, however many names it has. Autograd can add more.

a, b = two()
view = a[:2]
print(refusal(swap_tensors, a, b)[:76])
assert "use_count" in refusal(swap_tensors, a, b) and not a.any()


def no_grad_view(a):
    with torch.no_grad():
        return a[:2]


def after_backward(a):
    loss = (a * a).sum()
    loss.backward()
    return loss


GRAPHS = {
    "three names": lambda a: [a, a],
    "detach()": Tensor.detach,
    "view, no_grad": no_grad_view,
    "2 * a": lambda a: 2 * a,
    "a * a": lambda a: a * a,
    "a * a, after backward": after_backward,
}

count = {}
for name, hold in GRAPHS.items():
    a, _ = two()
    holder = hold(a)
    count[name] = a._use_count()
    print(f"{name:24}{count[name]}")
assert count["three names"] == count["detach()"] == 1
assert count["2 * a"] == count["a * a, after backward"] == 2
assert count["view, no_grad"] == 2 and count["a * a"] > 2

# %%
# A view keeps its base. In ``2 * a`` the second holder is the node ``AccumulateGrad``: it will add to ``a.grad``, so it
# must know ``a``. In ``a * a`` the graph also saves ``a`` for its derivative. Backward lets go of what was saved, but
# as long as the result lives, the node lives.
#
# What goes wrong if such a tensor is swapped? We look where the gradient arrives.


def gradient_goes(swap, graph):
    a, b = two()
    loss = graph(a).sum()
    if refusal(swap, a, b):
        return "swap refused"
    message = refusal(loss.backward)
    if message:
        assert "poisoned by swap_tensors" in message
        return "backward refused"
    return "to b" if a.grad is None else "to a"


print(f"{'':8}torch             three lines")
goes = {}
for name in ("2 * a", "a * a"):
    row = [gradient_goes(s, GRAPHS[name]) for s in (swap_tensors, three_lines)]
    goes[name] = row
    print(f"{name:8}{row[0]:18}{row[1]}")
assert goes["2 * a"] == ["backward refused", "to b"]
assert goes["a * a"] == ["swap refused", "to b"]

# %%
# The node holds the at::Tensor, and that is the content of ``b`` now. The model and the optimizer hold ``a``. The
# gradient would arrive where no one looks: the very mistake that a swap is meant to avoid. A view has the same problem:
# writing into it would change ``b``.
#
# PyTorch refuses, with one exception. If the node is the only other holder, the swap is allowed, because that is the
# ordinary state after a training step whose loss still has a name. The node is *poisoned*: it raises if a backward pass
# reaches it again.
#
# All or none
# -----------
#
# A model has many weights. Swap them one by one, and let one be refused:


def three_layers():
    layers = (nn.Linear(2, 2, bias=False) for _ in range(3))
    model = nn.Sequential(*layers)
    new = [nn.Parameter(torch.ones(2, 2)) for _ in model]
    return model, list(model.parameters()), new


def swapped(model):
    return [bool((p == 1).all()) for p in model.parameters()]


model, old, new = three_layers()
view = old[1][0]
for p, q in zip(old, new):
    if refusal(swap_tensors, p, q):
        break
print(swapped(model))
assert swapped(model) == [True, False, False]

# %%
# A model swapped in part is worse than one not swapped. The package checks every tensor first.

print(inspect.getsource(swap_).split('"""')[2])
print(inspect.getsource(is_held))

model, old, new = three_layers()
view = old[1][0]
pairs = [(f"layer {i}", *pair) for i, pair in enumerate(zip(old, new))]
message = refusal(swap_, pairs)
print(message)
assert message.startswith("layer 1 ") and swapped(model) == [False] * 3

del view
swap_(pairs)
assert swapped(model) == [True] * 3

# %%
# Without the view all three are swapped. ``quantize_`` of the package works this way: it makes all the new weights,
# then swaps.
#
# Bug museum
# ----------
#
# The flag left on
# ~~~~~~~~~~~~~~~~
#
# ``Module.to`` and ``load_state_dict`` swap ordinary parameters only if a global flag of PyTorch says so. PyTorch's
# tutorial on extension points (see Sources) sets the flag, and its last use never takes it back. What happens to a
# conversion, elsewhere and later? (T3)


def converts(situation):
    module = nn.Linear(2, 1)
    held = situation(module)
    try:
        module.to(torch.bfloat16)
        if isinstance(held, Tensor) and held.dim() == 0:
            held.backward()
    except RuntimeError as error:
        known = ("Couldn't swap", "poisoned")
        reason = next(word for word in known if word in str(error))
        dtypes = ", ".join(str(p.dtype)[6:] for p in module.parameters())
        return f"{reason}: {dtypes}"
    return "runs"


SITUATIONS = {
    "nothing special": lambda m: None,
    "a view is alive": lambda m: m.weight[0],
    "a weak reference": lambda m: weakref.ref(m.bias),
    "before backward": lambda m: m(torch.ones(1, 2)).sum(),
}

results = {}
flag_is_on = torch.__future__.get_swap_module_params_on_conversion
for on in (False, True):
    torch.__future__.set_swap_module_params_on_conversion(on)
    print("flag on" if on else "flag off")
    for name, situation in SITUATIONS.items():
        results[on, name] = converts(situation)
        print(f"  {name:18}{results[on, name]}")
torch.__future__.set_swap_module_params_on_conversion(False)

assert all(v == "runs" for (on, _), v in results.items() if not on)
assert results[True, "nothing special"] == "runs"
assert results[True, "a view is alive"] == "Couldn't swap: float32, float32"
assert results[True, "a weak reference"] == "Couldn't swap: bfloat16, float32"
assert results[True, "before backward"] == "poisoned: bfloat16, bfloat16"

# %%
# Three conversions that ran before now raise, in code that knows nothing of the flag. The third row is worse: the
# weight was converted, then the bias was refused, and the module is left with two dtypes.
#
# The fixed line is a ``with``. It restores what was there, also after an error. The check: after every test, the flag
# is what it was before.


def fails():
    with swap_on_conversion():
        assert flag_is_on()
        raise ValueError


assert refusal(fails) == "" and not flag_is_on()

# %%
# The refusal that left a mark
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Swapping and swapping back after a refusal: all numbers are as before, and a graph is poisoned. (M20)
#
# ``swap_`` looks longer than it need be. Why not try, and swap back what was done when one is refused? The package's
# first version did so, and afterwards all numbers were as before. Here is the smallest case of what is wrong with it:
# one pair, where ``a`` waits for a gradient and ``b`` has a view.


def refused_then_backward(swap):
    a, b = two()
    loss, view = (2 * a).sum(), b[0]
    assert refusal(swap, a, b)
    assert not a.any() and view.all()  # nothing has moved
    return refusal(loss.backward)


def ask_first(a, b):
    swap_([("a", a, b)])


print(refused_then_backward(swap_tensors)[:71])
assert "poisoned" in refused_then_backward(swap_tensors)
assert refused_then_backward(ask_first) is None

# %%
# PyTorch poisons the node of ``a``, then looks at ``b`` and refuses. Swapping back would poison it once more. The fixed
# line is the call of ``is_held`` before any swap.
#
# The check that catches it runs a backward pass after the refusal. To compare numbers is not enough when the promise is
# that nothing was changed.
#
# Summary
# -------
#
# * Views, weak references and graphs that saved the tensor make PyTorch refuse.
# * An optimizer follows a swap, and its state stays: delete ``optimizer.state[p]`` after a swap that changes what a
#   weight means.
# * A node that only waits for a gradient is poisoned, even by a swap that is refused. ``swap_`` asks first, and swaps
#   all or none.
# * The flag that makes ``Module.to`` swap is global. Set it in a ``with`` block.
#
# Sources
# -------
#
# * PyTorch: `Extension points in nn.Module for load_state_dict and tensor subclasses <https://docs.pytorch.org/tutorials/recipes/recipes/swap_tensors.html>`_, the tutorial whose last use leaves the flag on.
# * `Add swap_tensors path to nn.Module._apply <https://github.com/pytorch/pytorch/pull/117167>`_: the flag, and why
#   graphs are in the way.
# * `Relax use_count constraints for swap_tensors <https://github.com/pytorch/pytorch/pull/127313>`_: the exception
#   for a node that waits, and the poison.
# * `Weak references and swapped tensors <https://github.com/pytorch/pytorch/issues/186796>`_: how a compiled module can
#   block a swap, and a discussion whether PyTorch should refuse.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
