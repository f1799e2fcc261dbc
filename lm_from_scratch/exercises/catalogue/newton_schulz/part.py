"""Your step of Muon in a run: it moves the matrices of the second block, and AdamW all others."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.exercises.parts import Machine, Part


def put(machine: Machine, newton_schulz: Callable[..., Any]) -> None:
    matrices = {p for p in machine.model.model.layers[1].parameters() if p.dim() == 2}
    others = machine.update

    def update(p: Any, state: dict[str, Any], step: int, lr: float) -> None:
        if p not in matrices:
            return others(p, state, step, lr)
        mean: Tensor = state.setdefault("mean", torch.zeros_like(p))
        mean.lerp_(p.grad, 0.05)
        p.data.sub_(newton_schulz(mean.clone()), alpha=lr)
        return None

    machine.update = update


PART = Part("the step of matrices, in block 1", put, loop="learn")
