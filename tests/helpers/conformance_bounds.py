"""How far a kind of attention may be from the formula in float64, by case and dtype."""

import torch

from lm_from_scratch.instruments.conformance import Cell

ORDINARY = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# A score of n carries an error of n * eps, and so do the weights. In bfloat16 the backward pass of
# the fused kernels reads the rounded result (as delta), times keys of size 15.
LARGE = {torch.float64: 1e-11, torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 0.15}


def bound(cell: Cell) -> float:
    if cell.case == "dropout":
        return 0.1  # the noise of a mean over 4000 draws
    return (LARGE if cell.case.startswith("scores") else ORDINARY)[cell.dtype]
