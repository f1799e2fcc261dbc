"""Your step of beam search in the model: it looks for the best sentence after each prompt."""

from collections.abc import Callable
from typing import Any

from lm_from_scratch.exercises.parts import Machine, Part


def put(machine: Machine, beam_step: Callable[..., Any]) -> None:
    machine.choose = beam_step


PART = Part("which beams go on", put, loop="search")
