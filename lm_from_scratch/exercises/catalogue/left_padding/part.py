"""Your positions in the model: where each token of a padded batch is."""

from collections.abc import Callable
from typing import Any

from lm_from_scratch.exercises.parts import Machine, Part


def put(machine: Machine, padded_positions: Callable[..., Any]) -> None:
    machine.place = padded_positions


PART = Part("positions in a padded batch", put, loop="batch")
