"""Who still holds a parameter after a conversion: a measuring instrument.

:func:`observe` builds a matrix that two modules share, hands it to an optimizer, a view, a weak
reference and the graph of a loss, converts the module, and looks at each of them.
:func:`truth_table` does so for :data:`PATHS`, torch's ways to give a module new numbers.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lm_from_scratch.weights.swap import swap_on_conversion


class Subclass(Tensor):
    """A tensor of a class of our own. Its numbers are in another tensor, ``payload``."""

    payload: Tensor

    def __new__(cls, payload: Tensor) -> "Subclass":
        self = Tensor._make_wrapper_subclass(cls, payload.shape, dtype=payload.dtype)
        self.payload = payload
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args_, kwargs_ = tree_map_only(Subclass, numbers, (args, kwargs or {}))
        result = func(*args_, **kwargs_)
        return args[0] if func._schema.is_mutable else tree_map_only(Tensor, cls, result)


class Traceable(Subclass):
    """The same, with the two methods that tell torch what it holds."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["payload"], None

    @classmethod
    def __tensor_unflatten__(cls, held: dict[str, Tensor], *_: Any) -> "Traceable":
        return cls(held["payload"])


def numbers(tensor: Tensor) -> Tensor:
    """The plain tensor with the numbers of a ``tensor`` (any shape), of a subclass or not."""
    return tensor.payload if isinstance(tensor, Subclass) else tensor.detach()


def share(a: Tensor, b: Tensor) -> bool:
    """Whether the numbers of two tensors ``a`` and ``b`` (any shape) lie in one storage."""
    return numbers(a).untyped_storage().data_ptr() == numbers(b).untyped_storage().data_ptr()


Wrap = Callable[[Tensor], Tensor]


class Tied(nn.Module):
    """An embedding and a head that share ``wrap`` of a matrix (5, 4), and a checkpoint for them.

    The checkpoint is bfloat16, and has each name of the matrix in memory of its own.
    """

    def __init__(self, wrap: Wrap = torch.clone) -> None:
        super().__init__()
        matrix = torch.arange(1.0, 21.0).view(5, 4)
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.embed.weight = self.head.weight = nn.Parameter(wrap(matrix))
        self.checkpoint = {name: -matrix.bfloat16() for name in self.state_dict()}

    @property
    def weight(self) -> Tensor:
        """The parameter of the embedding."""
        return self.embed.weight


# ------------------------------------------------------------------------------------ the paths


@contextmanager
def overwrite_on_conversion() -> Iterator[None]:
    """Within the block ``Module.to`` and its like make new parameters, by torch's other flag."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def assign(module: Tied) -> None:
    """``module.weight = nn.Parameter(...)``."""
    module.embed.weight = nn.Parameter(module.weight.detach().bfloat16())


def swap(module: Tied) -> None:
    """``torch.utils.swap_tensors``."""
    torch.utils.swap_tensors(module.weight, nn.Parameter(module.weight.detach().bfloat16()))


def load(module: Tied) -> None:
    """``load_state_dict``, which copies."""
    module.load_state_dict(module.checkpoint)


def load_assign(module: Tied) -> None:
    """``load_state_dict(assign=True)``."""
    module.load_state_dict(module.checkpoint, assign=True)


#: name -> arguments of :func:`observe`
PATHS: dict[str, Any] = {
    "weight.mul_(2)": (torch.no_grad()(lambda module: module.weight.mul_(2)),),
    "weight = Parameter(...)": (assign,),
    "swap_tensors": (swap,),
    "to": (Tied.bfloat16,),
    "to, overwrite flag": (overwrite_on_conversion()(Tied.bfloat16),),
    "to, swap flag": (swap_on_conversion()(Tied.bfloat16),),
    "to, subclass": (Tied.bfloat16, Subclass),
    "to, subclass, swap flag": (swap_on_conversion()(Tied.bfloat16), Subclass),
    "to, traceable subclass": (Tied.bfloat16, Traceable),
    "load": (load,),
    "load, swap flag": (swap_on_conversion()(load),),
    "load, assign": (load_assign,),
    "load, assign, swap flag": (swap_on_conversion()(load_assign),),
}

# --------------------------------------------------------------------------------- observations


@dataclass(frozen=True)
class Observed:
    """What became of a parameter, and of those who hold it.

    The last four are seen in a conversion of their own each. torch may refuse it because of them:
    then the name of the exception stands there.
    """

    same_object: bool  # the module's parameter is the Python object that it was
    optimizer: bool  # a step of the optimizer moves the module's numbers
    tie: bool  # both modules have one parameter
    old_storage: bool  # the numbers lie where they lay
    new_dtype: bool  # the dtype of the numbers is another one
    checkpoint: bool  # the module and the checkpoint share memory
    view: str  # "follows", or is "left" with the old numbers
    weak: str  # a weak reference "follows", or is "left"
    graph: str  # the gradient of a loss that needs the weight "arrives", or is "lost"
    leaf: str  # that of a loss whose graph ends in the weight, but does not need its numbers


def observe(conversion: Callable[[Tied], object], wrap: Wrap = torch.clone) -> Observed:
    """Convert a :class:`Tied` whose weight is ``wrap(matrix)``, and look at all who hold it."""

    def outcome(hold: Callable[[Tied], Callable[[], str]]) -> str:
        module = Tied(wrap)
        look = hold(module)
        try:
            conversion(module)
        except RuntimeError as error:
            return type(error).__name__
        return look()

    module = Tied(wrap)
    weight, optimizer = module.weight, torch.optim.SGD(module.parameters(), lr=0.5)
    old = numbers(weight)  # detached: no view, so nothing is refused because of it
    conversion(module)
    facts = {
        "same_object": module.weight is weight,
        "tie": module.embed.weight is module.head.weight,
        "old_storage": share(module.weight, old),
        "new_dtype": numbers(module.weight).dtype != old.dtype,
        "checkpoint": any(share(module.weight, t) for t in module.checkpoint.values()),
    }
    before = numbers(module.weight).clone()
    module.weight.grad = torch.ones_like(module.weight, dtype=module.weight.dtype)
    optimizer.step()
    return Observed(
        **facts,
        optimizer=not torch.equal(numbers(module.weight), before),
        view=outcome(view),
        weak=outcome(weak),
        graph=outcome(lambda module: graph(module, torch.ones(2, 4, requires_grad=True))),
        leaf=outcome(lambda module: graph(module, torch.ones(2, 4))),
    )


def view(module: Tied) -> Callable[[], str]:
    """Hold a view of the weight."""
    with torch.no_grad():
        held = module.weight.view(-1)
    return lambda: "follows" if share(held, module.weight) else "left"


def weak(module: Tied) -> Callable[[], str]:
    """Hold a weak reference to the weight."""
    held = weakref.ref(module.weight)
    return lambda: "follows" if held() is module.weight else "left"


def graph(module: Tied, x: Tensor) -> Callable[[], str]:
    """Hold a graph: the gradient of ``x`` (2, 4), if it is wanted, needs the weight's numbers."""
    loss = F.linear(x, module.weight).sum()

    def look() -> str:
        try:
            loss.backward()
        except RuntimeError as error:
            return f"{type(error).__name__} in backward"
        return "lost" if module.weight.grad is None else "arrives"

    return look


def truth_table() -> dict[str, Observed]:
    """What becomes of each holder on each of :data:`PATHS`, with the installed torch."""
    return {name: observe(*arguments) for name, arguments in PATHS.items()}
