"""Launch a student's Triton kernel, in the interpreter or on a GPU, and say plainly what it is not.

Triton is imported when a kernel is launched, not here: it exists for Linux only.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

POISON = 7.0  # what lies around the rows and in out: finite, so that wrong numbers can be seen


@dataclass(frozen=True)
class AsKernel:
    """A function of torch, called as a kernel is: what the package's own kernels are held against,
    and hundreds of times faster than an interpreted one."""

    function: Callable[..., None]  # takes the number of programs first

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self.function, *grid)


def check_kernel(kernel: Any) -> str:
    """The device that a kernel runs on. Raises ``TypeError`` if it is none,
    ``NotImplementedError`` if it is a stub that would only fail to compile."""
    from lm_from_scratch.kernels.device import INTERPRETED

    if not isinstance(kernel, AsKernel):
        if not hasattr(kernel, "fn"):
            raise TypeError("this is no kernel: is @triton.jit missing?")
        # A compiler cannot raise it.
        if not INTERPRETED and "raise NotImplementedError" in inspect.getsource(kernel.fn):
            raise NotImplementedError
    return "cpu" if INTERPRETED else "cuda"


def launch(kernel: Any, programs: int, *args: Tensor | int, **constants: int) -> None:
    """Launch a kernel; what it raises is the student's own exception, not the interpreter's."""
    try:
        kernel[(programs,)](*args, **constants)
    except Exception as error:
        while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
            error = error.__cause__  # type: ignore[assignment]
        raise error
