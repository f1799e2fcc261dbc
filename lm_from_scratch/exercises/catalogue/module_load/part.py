"""Your answer to `load_state_dict` in the model: each matrix of the blocks is loaded by it, from a
checkpoint of 8 bits or into a module of 8 bits, as in the rows of the exercise's table."""

from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor, nn

from lm_from_scratch.exercises.parts import Machine, Part
from lm_from_scratch.weights.swap import swap_on_conversion

ROWS = [row for row in product((True, False), repeat=3) if row[0] or row[1]]


def put(machine: Machine, Int8Tensor: Any) -> None:
    def weight(matrix: Tensor, coded: bool) -> nn.Parameter:
        contents = Int8Tensor.quantize(matrix) if coded else matrix.clone()
        return nn.Parameter(contents, requires_grad=False)

    for linear, (in_module, in_file, assign) in zip(
        machine.every(nn.Linear), cycle(ROWS), strict=False
    ):
        matrix = linear.weight.detach()
        loaded = nn.Linear(1, 1, bias=False, device="meta")
        loaded.weight = weight(torch.ones_like(matrix), in_module)
        stored: Any = weight(matrix.bfloat16(), in_file)  # checkpoints are
        with swap_on_conversion():
            loaded.load_state_dict({"weight": stored}, assign=assign)
        if not assign:  # the file is closed
            for part in (stored.codes, stored.scale) if in_file else (stored,):
                part.zero_()
        now = loaded.weight
        plain = now.dequantize() if hasattr(now, "codes") else now
        linear.weight.data.copy_(plain)


PART = Part("weights as they are loaded", put, rounds=True)
