"""Your rotation in the model: of the queries and keys of every block.

The model computes cosines and sines once and hands them to every block. Yours makes its own, so the
positions are handed on instead.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lm_from_scratch.exercises.parts import Machine, Part
from lm_from_scratch.models.qwen2 import Attention


def put(machine: Machine, rope: Callable[..., Any]) -> None:
    theta = machine.model.config.rope_theta

    def rotate(x: Tensor, positions: Tensor, _: Tensor) -> Any:
        return rope(x, positions.expand(x.shape[0], -1).clamp(min=0), theta)  # padding is at -1

    machine.model.model.rotary_emb.forward = lambda positions, dtype: (positions, positions)  # type: ignore[method-assign]
    for attention in machine.every(Attention):
        attention.rotate = rotate


PART = Part("rotation of queries and keys", put)
