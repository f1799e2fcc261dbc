"""exercises/diagnose.py: code of one's own that makes a known mistake is told so by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from exercise_bench import bench_of
from torch import Tensor

from lm_from_scratch.exercises.compare import GRADIENT_TOLERANCE, TOLERANCES
from lm_from_scratch.exercises.diagnose import diagnose
from lm_from_scratch.exercises.exercise import Case, Wrong
from lm_from_scratch.exercises.run import Outcome
from lm_from_scratch.exercises.source import answer


def moved(x: Any, by: Callable[[Tensor], Tensor]) -> Any:
    """A result whose every number that is not whole is another by so much."""
    if isinstance(x, (list, tuple)):
        return type(x)(moved(part, by) for part in x)
    return x + by(x) if isinstance(x, Tensor) and x.is_floating_point() else x


def in_other_words(case: Case, outcome: Outcome, factor: float) -> Outcome:
    """What other code with the same mistake does: the numbers differ by ``factor`` tolerances."""

    def rounding(x: Tensor) -> Tensor:
        relative, absolute = case.tolerance or TOLERANCES[x.dtype]
        return factor * (absolute + relative * x.abs())

    relative, absolute = GRADIENT_TOLERANCE
    gradients = {
        name: None if g is None else g + factor * (absolute + relative * g.abs())
        for name, g in outcome.gradients.items()
    }
    again = outcome.again and in_other_words(case, outcome.again, factor)
    value = moved(outcome.value, rounding)
    return replace(outcome, value=value, gradients=gradients, again=again)


@pytest.mark.parametrize("name", ["rms_norm", pytest.param("rope", marks=pytest.mark.slow)])
def test_a_mistake_is_named_up_to_rounding(name: str) -> None:
    bench = bench_of(name)
    exercise, named = bench.exercise, 0
    wants = {n: bench.wanted(n, 0) for n in bench.numbers}
    for wrong in exercise.wrong:
        function = answer(exercise, wrong.answer)
        outcomes = {n: bench.outcome(n, function, 0) for n in bench.numbers}
        failed = {n: o for n, o in outcomes.items() if o.wrong}

        def name_at(factor: float, failed: dict[int, Outcome] = failed) -> list[Wrong]:
            """What is named where somebody's numbers are so many tolerances away."""
            moved = {n: in_other_words(exercise.cases[n], o, factor) for n, o in failed.items()}
            return diagnose(exercise, moved, wants, 0)[0]

        if name_at(0.0) == [wrong]:
            assert name_at(0.5) == [wrong], wrong.label
            assert name_at(100.0) != [wrong], wrong.label
            named += 1
        if named == 3:
            return
    pytest.fail(f"{named} of the planted answers are named, of 3 that are looked at")
