"""Mistakes in the parts since Qwen2, put in place and run: which laws find them.

    PYTHONPATH=tests/helpers python tests/slow/mutants_since_qwen2.py      # a line for each

As in mutants.py, a *mutant* stands in the place of a function while laws run, and the same code
written again must survive. A file in since_qwen2/ has the laws and the mistakes of an idea: those
that threads report of such code, and those that look like the code that is right.
"""

from __future__ import annotations

from typing import Any

from mutants import Laws, Mutant, judged, show
from since_qwen2 import (
    delta_rules,
    drafts,
    indexers,
    latent_attention,
    mixtures,
    qk_norm,
    rotations,
    sinks_and_gates,
)

IDEAS = (
    qk_norm.IDEAS | mixtures.IDEAS | latent_attention.IDEAS | sinks_and_gates.IDEAS
    | rotations.IDEAS | delta_rules.IDEAS | indexers.IDEAS | drafts.IDEAS
)  # fmt: skip

SURVIVORS: dict[str, str] = {}


def listed(which: int) -> list[tuple[Mutant, Laws]]:
    """Of every idea the right code (1) or the mistakes (2), each with its laws."""
    return [
        (Mutant(f"{idea}: {label}", where, code), found[0])
        for idea, found in IDEAS.items()
        for label, where, code in found[which]
    ]


def prove() -> dict[str, Any]:
    """Every mistake with the laws that find it."""
    for laws, _, _ in IDEAS.values():
        for holds in laws.values():
            holds()  # with all code as it is: what transformers finds is kept from here on
    return judged(listed(1), listed(2), SURVIVORS)


if __name__ == "__main__":
    show(prove())
