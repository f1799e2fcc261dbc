"""Your rule in the model: which of the tokens that another model proposes are kept."""

from collections.abc import Callable
from typing import Any

from lm_from_scratch.exercises.parts import Machine, Part


def put(machine: Machine, accept_drafts: Callable[..., Any]) -> None:
    machine.accept = accept_drafts


PART = Part("which drafts are kept", put, loop="draft")
