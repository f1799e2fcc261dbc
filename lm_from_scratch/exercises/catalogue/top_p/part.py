"""Your cut in the model: what may be drawn, before every token."""

from collections.abc import Callable
from typing import Any

from lm_from_scratch.exercises.parts import Machine, Part


def put(machine: Machine, cut_tail: Callable[..., Any]) -> None:
    machine.cut = lambda logits: cut_tail(logits, top_k=50, top_p=0.9)


PART = Part("what may be drawn", put, apart=("search", "learn"))
