"""New weights for a built model that everyone who holds the old ones gets, too.

``module.weight = nn.Parameter(...)`` gives the module a new tensor. An optimizer, a tied head or a
list that holds the old one keeps it, and goes on with it without an error.
``torch.utils.swap_tensors(a, b)`` exchanges what two tensor objects *are*: their class, attributes
and numbers. The objects stay, so everyone who holds one follows, even if float32 becomes int8.

torch converts and loads a module that way only when a global flag is set;
:func:`swap_on_conversion` sets it for a ``with`` block. :func:`swap_` swaps several tensors, all or
none.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def swap_on_conversion(enabled: bool = True) -> Iterator[None]:
    """Within the block ``Module.to`` (and its like) and ``load_state_dict`` swap tensors.

    Without it they write into the old tensor (``.data =``, ``copy_``) or, with ``assign=True``,
    replace the parameter. torch's flag is global, and what stood there before is restored: a flag
    that stays on makes later conversions fail wherever a view or a weak reference is alive.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(enabled)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def swap_(pairs: Iterable[tuple[str, Tensor, Tensor]]) -> None:
    """Swap each tensor with the other of its pair; on failure swap back and raise.

    torch refuses to swap a tensor whose numbers someone else holds as well: a view of it, a weak
    reference, or a graph that still needs it. Raises ``ValueError`` then, with the name of the
    tensor. A graph that only ends in the tensor is no reason to refuse: its backward pass raises
    instead.
    """
    pairs = list(pairs)
    for name, *both in pairs:
        if any(is_held(tensor) for tensor in both):
            raise ValueError(
                f"{name} cannot be swapped while a view of it, a weak reference or a graph that "
                "was not freed holds it: delete the results of earlier forward passes, or compute "
                "them under torch.no_grad(). Nothing was changed"
            )
    done: list[tuple[Tensor, Tensor]] = []
    for name, tensor, other in pairs:
        try:
            torch.utils.swap_tensors(tensor, other)
        except RuntimeError as error:
            for pair in reversed(done):
                torch.utils.swap_tensors(*pair)
            raise ValueError(f"{name} cannot be swapped: {error}. Nothing was changed") from error
        done.append((tensor, other))


def is_held(tensor: Tensor) -> bool:
    """Whether torch will refuse to swap ``tensor`` (any shape) because of who else holds it.

    To try is no way to ask. torch lets a tensor go that only the ``AccumulateGrad`` node of a graph
    holds, and makes that node raise from then on, even if the other tensor is refused.
    """
    if weakref.getweakrefs(tensor):
        return True
    count = tensor._use_count  # type: ignore[attr-defined, unused-ignore]
    holders: int = count()
    if holders == 2 and tensor.is_leaf and tensor.requires_grad:
        # asking for the node makes one, which is one holder more, if it is not the second
        node = torch.autograd.graph.get_gradient_edge(tensor).node  # noqa: F841
        return bool(count() > 2)
    return holders > 1


def swap_parameters_(model: nn.Module, new: dict[str, Tensor]) -> None:
    """Give the named parameters of a built model these contents, which may be of another class.

    Everyone who holds one of them (an optimizer, a tied module) then holds the new contents.
    Gradients of the old contents go with them. Shapes must agree. All are swapped, or none. Raises
    ``ValueError`` for a name that is not there, another shape, and a tensor that cannot be swapped.
    """
    old = dict(model.named_parameters())
    for name, tensor in new.items():
        if name not in old:
            raise ValueError(f"the model has no parameter {name!r}")
        if tensor.shape != old[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(old[name].shape)}, its new contents {tuple(tensor.shape)}"
            )
    fresh = {
        name: nn.Parameter(tensor, requires_grad=tensor.requires_grad)
        for name, tensor in new.items()
    }
    swap_((name, old[name], tensor) for name, tensor in fresh.items())
