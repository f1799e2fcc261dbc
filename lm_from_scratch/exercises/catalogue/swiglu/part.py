"""Your gated MLP in the model: in every block."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from lm_from_scratch.exercises.parts import Machine, Part
from lm_from_scratch.layers.gated_mlp import GatedMLP


def put(machine: Machine, gated_mlp: Callable[..., Any]) -> None:
    def forward(mlp: GatedMLP, x: Tensor) -> Any:
        return gated_mlp(x, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)

    for mlp in machine.every(GatedMLP):
        mlp.forward = partial(forward, mlp)


PART = Part("the MLP", put)
