"""The blocks of a built model."""

from torch import nn


def blocks(model: nn.Module) -> nn.ModuleList:
    """The blocks of a built model, in order: its list of modules that hold an attention layer, or
    one with a state in its place.

    Raises ``ValueError`` if there is none.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and any(
            hasattr(m, "attend") or hasattr(m, "delta_rule") for m in module.modules()
        ):
            return module
    raise ValueError(f"{type(model).__name__} has no attention layer (no module with `attend`)")
