"""The blocks of a built model, the norm after them, and which of them carry a state."""

from typing import Any

from torch import nn

from lm_from_scratch.attention.layer import AttentionLayer
from lm_from_scratch.layers.recurrent import RecurrentLayer
from lm_from_scratch.limits import shown


def blocks(model: nn.Module) -> nn.ModuleList:
    """The blocks of a built model, in order: its list of modules that hold an attention layer, or
    one with a state in its place.

    Raises ``ValueError`` if there is none.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and has(module, (AttentionLayer, RecurrentLayer)):
            return module
    raise ValueError(f"{type(model).__name__} has no attention layer")


def final_norm(model: nn.Module) -> nn.Module:
    """The norm after the last block of a built model: what stands behind the blocks in it."""
    layers = blocks(model)
    siblings = next(list(m.children()) for m in model.modules() if layers in m.children())
    return siblings[siblings.index(layers) + 1]


def check_no_states(model: nn.Module, what: str) -> None:
    """Raises ``ValueError`` for a ``model`` whose layers keep a state in place of keys, named by
    ``what`` would take tokens back or share them."""
    layers = [number for number, block in enumerate(blocks(model)) if has(block, RecurrentLayer)]
    if layers:
        raise ValueError(
            f"{what} is not supported for a {type(model).__name__}: layers {shown(layers)} keep a "
            "state, which cannot go back to an earlier token"
        )


def has(module: nn.Module, kind: Any) -> bool:
    """Whether a module of that kind, or of those, is within this one."""
    return any(isinstance(part, kind) for part in module.modules())
