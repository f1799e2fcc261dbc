"""Your learning rate in a run. Its schedule ends when two thirds of the steps are done."""

from collections.abc import Callable
from typing import Any

from lm_from_scratch.exercises.parts import Machine, Part


def put(machine: Machine, learning_rate: Callable[..., Any]) -> None:
    def rate(step: int, steps: int) -> Any:
        return learning_rate(step, steps * 2 // 3, 1e-2, 1e-3, warmup=5)

    machine.rate = rate


PART = Part("the learning rate", put, loop="learn")
