"""Your optimizer in a run: every weight moves by it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lm_from_scratch.exercises.parts import Machine, Part, adamw_update


def put(machine: Machine, adamw_step: Callable[..., Any]) -> None:
    machine.update = partial(adamw_update, own=adamw_step)


PART = Part("the optimizer", put, loop="learn")
