"""What a training loop asks of the processes it runs in, and the answers of a single one.

Several processes answer the same questions in :mod:`lm_from_scratch.runs.distributed`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn


class SingleProcess:
    """A process that takes every row of a batch, and whose sums are the sums."""

    rank: int = 0  # which one of ``size`` it is
    size: int = 1

    def check(self, batch_size: int, update_in_backward: bool) -> None:
        """Raises ``ValueError`` if the processes cannot share such a run."""

    def wrap(self, module: nn.Module, blocks: nn.ModuleList) -> nn.Module:
        """``module``, whose forward returns a loss, so that its gradients meet in backward."""
        return module

    def optimizer(self, kind: type[Any]) -> type[Any]:
        """The class that takes the steps of ``kind`` on the parameters that :meth:`wrap` leaves."""
        return kind

    def share(self, batch: Any) -> Any:
        """The rows of a batch that this process takes."""
        return batch

    def accumulating(self, module: nn.Module, last: bool) -> AbstractContextManager[None]:
        """For one of several backward passes: only in the last one of a step do gradients meet."""
        return nullcontext()

    def evaluated(self, module: nn.Module) -> None:
        """After forward passes without a backward pass."""

    def total(self, *numbers: float) -> list[float]:
        """Each number summed over the processes."""
        return list(numbers)

    def number(self, x: Tensor) -> float:
        """The one number in ``x`` (any shape), which was computed from weights or gradients."""
        return x.item()


#: The process of a run that does not say otherwise.
SINGLE_PROCESS = SingleProcess()
