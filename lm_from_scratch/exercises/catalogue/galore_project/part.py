"""Your projection in a run: AdamW keeps its means in 8 directions of each matrix of the first
block. The directions are found once, from the first gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.exercises.parts import Machine, Part

RANK = 8


def put(machine: Machine, GradientProjection: Callable[..., Any]) -> None:
    matrices = {p for p in machine.model.model.layers[0].parameters() if p.dim() == 2}
    whole = machine.update

    def update(p: Any, state: dict[str, Any], step: int, lr: float) -> None:
        if p not in matrices:
            return whole(p, state, step, lr)
        if "basis" not in state:
            state.update(basis=GradientProjection(p.grad, RANK), low={})
        low: Tensor = state["basis"].project(p.grad)
        moved = torch.zeros_like(low)  # what the optimizer adds to 0 in these directions
        moved.grad = low
        whole(moved, state["low"], step, lr)
        p.data.add_(state["basis"].project_back(moved))
        return None

    machine.update = update


PART = Part("the optimizer's means, in block 0", put, loop="learn")
