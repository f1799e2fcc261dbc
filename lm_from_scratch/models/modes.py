"""The mode of a built model: learning, or being asked."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout) and no gradients inside; each module's own mode afterwards.

    A decoder does this for every token, so the modules are walked a floor at a time, with nothing
    on the way: ``model.modules()``, and setting an attribute of a module, take ten times as long.
    """
    training, floor = [], [model]
    while floor:
        training += [vars(module) for module in floor if module.training]
        floor = [
            child for module in floor for child in module._modules.values() if child is not None
        ]
    try:
        for attributes in training:
            attributes["training"] = False
        with torch.no_grad():
            yield
    finally:
        for attributes in training:
            attributes["training"] = True
