"""Your loss in a run."""

from collections.abc import Callable
from typing import Any

from lm_from_scratch.exercises.parts import Machine, Part


def put(machine: Machine, cross_entropy: Callable[..., Any]) -> None:
    machine.loss = cross_entropy


PART = Part("the loss", put, loop="learn")
