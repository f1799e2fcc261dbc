"""Random weights large enough that a mistake shows."""

import torch
from torch import nn


@torch.no_grad()
def randomize_(model: nn.Module, seed: int = 0, std: float = 0.25) -> None:
    """Fill every parameter with large random numbers, so that a mistake shows in the logits.

    Normal with deviation ``std``; the weights of norms are around 1. The usual 0.02 makes the
    logits of all tokens nearly equal, and hides most mistakes. Equal names and shapes get equal
    numbers from one ``seed``, whatever order the parameters were registered in.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        parameter.normal_(0.0, std, generator=generator)
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.add_(1.0)
