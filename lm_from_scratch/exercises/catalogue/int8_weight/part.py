"""Your eight bits in the model: the matrices of every block are rounded to them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lm_from_scratch.exercises.parts import Machine, Part


def put(machine: Machine, Int8Rows: Callable[..., Any]) -> None:
    with torch.no_grad():
        for linear in machine.every(nn.Linear):
            linear.weight.copy_(Int8Rows(linear.weight).dequantize())


PART = Part("the matrices", put, rounds=True)
