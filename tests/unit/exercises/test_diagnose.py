"""exercises/diagnose.py: code of one's own that makes a known mistake is told so by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from exercise_bench import Bench, bench_of
from torch import Tensor

from lm_from_scratch.exercises.compare import GRADIENT_TOLERANCE, TOLERANCES
from lm_from_scratch.exercises.diagnose import diagnose
from lm_from_scratch.exercises.exercise import Case, Wrong
from lm_from_scratch.exercises.run import Outcome, judge
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
    return replace(outcome, value=moved(outcome.value, rounding), gradients=gradients)


def name_of(bench: Bench, wrong: Wrong, factor: float) -> Wrong | None:
    """What is named where someone's answer is a planted one but for so many tolerances."""
    exercise = bench.exercise
    wants = {n: bench.outcome(n, exercise.reference, 0) for n in bench.numbers}
    function = answer(exercise, wrong.answer)
    done = {n: bench.outcome(n, function, 0, 5) for n in bench.numbers}
    failed = {
        n: in_other_words(exercise.cases[n], done[n], factor)
        for n in done
        if judge(exercise.cases[n], done[n], wants[n])
    }
    return diagnose(exercise, failed, wants, 0)[0]


@pytest.mark.parametrize("name", ["rms_norm", pytest.param("rope", marks=pytest.mark.slow)])
def test_a_mistake_is_named_up_to_rounding(name: str) -> None:
    bench = bench_of(name)
    named = [wrong for wrong in bench.exercise.wrong if name_of(bench, wrong, 0.0) == wrong][:3]
    assert len(named) == 3
    for wrong in named:
        assert name_of(bench, wrong, 0.5) == wrong, wrong.label
        assert name_of(bench, wrong, 100.0) != wrong, wrong.label
