"""Your mask in the model: which keys each query of every block may see."""

from collections.abc import Callable
from typing import Any

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.exercises.parts import Machine, Part


def put(machine: Machine, visible: Callable[..., Any]) -> None:
    def mask(see: Visibility) -> Any:
        return visible(
            see.query_positions, see.key_positions, see.window, see.query_documents,
            see.key_documents,
        )  # fmt: skip

    machine.mask = mask


PART = Part("what each query sees", put)
