"""Gradient checkpointing: compute again in the backward pass instead of remembering.

The backward pass needs what the forward pass computed. Normally every layer keeps all of it. A
checkpointed layer keeps its input alone and runs forward once more when its gradient is due: the
memory of one layer at a time, for about a third more computation. Gradients are the same.

Source: Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016, arXiv:1604.06174.
"""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lm_from_scratch.cache.interface import NoCache
from lm_from_scratch.models.blocks import blocks


@cache
def _checkpointed(kind: Any) -> Any:
    """The same class of block, whose forward is run again in the backward pass."""

    class Checkpointed(kind):
        def forward(self, *args: Any) -> Any:
            if torch.is_grad_enabled() and not isinstance(args[-1], NoCache):
                raise ValueError("a checkpointed block runs twice, and would write its cache twice")
            return checkpoint(super().forward, *args, use_reentrant=False)

    Checkpointed.__name__ = Checkpointed.__qualname__ = f"Checkpointed{kind.__name__}"
    return Checkpointed


def use_gradient_checkpointing_(model: nn.Module) -> None:
    """Checkpoint every block of a built model. Parameters, names and results stay the same.

    Without gradients nothing changes. With gradients no cache may be given: a block that runs twice
    would write its keys twice. Recorders see both runs. The model can be copied and its state dict
    saved, but not pickled as a whole.
    """
    for block in blocks(model):
        if not type(block).__name__.startswith("Checkpointed"):
            kind: Any = type(block)
            block.__class__ = _checkpointed(kind)
