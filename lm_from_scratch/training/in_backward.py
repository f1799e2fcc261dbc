"""The step of a run whose weights are updated within the backward pass."""

import math

from torch import nn

from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.config import NOT_CLIPPED
from lm_from_scratch.optim.in_backward import update_in_backward
from lm_from_scratch.text.batch import Batch
from lm_from_scratch.training.processes import SINGLE_PROCESS, SingleProcess
from lm_from_scratch.training.train import accumulate_gradient


def step_in_backward(
    model: nn.Module,
    optimizer: AdamW,
    parts: list[Batch],
    max_grad_norm: float = math.inf,
    processes: SingleProcess = SINGLE_PROCESS,
) -> tuple[float, float]:
    """As :func:`~lm_from_scratch.training.train.optimizer_step`, but each weight is updated as soon
    as its gradient is complete. There is no norm of all gradients to clip by or to return: NaN.
    Raises ``ValueError`` for a ``max_grad_norm`` other than infinity."""
    NOT_CLIPPED.check("max_grad_norm", {"max_grad_norm": max_grad_norm, "update_in_backward": True})
    with update_in_backward(optimizer, len(parts)):
        loss = accumulate_gradient(model, optimizer, parts, processes)
        if loss is None:
            return 0.0, 0.0
        optimizer.step()  # for weights that were not in every backward pass
    return loss, math.nan
