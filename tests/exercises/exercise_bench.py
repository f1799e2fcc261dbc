"""What the tests of exercises share: an exercise, and what functions do in its cases."""

import runpy
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm_from_scratch.exercises import diagnose, report
from lm_from_scratch.exercises.exercise import Exercise, exercise
from lm_from_scratch.exercises.report import Report, examine, missing
from lm_from_scratch.exercises.run import Outcome, judge, outcome
from lm_from_scratch.exercises.source import answer, load, stub

HERE = Path(__file__).parent
#: Processor time for a case: a mutant may never end.
SECONDS = 5


class Bench:
    """One exercise; what a function does in a case at a seed is run once, and kept."""

    def __init__(self, exercise: Exercise) -> None:
        self.exercise = exercise
        self.numbers = range(len(exercise.cases))
        self.outcome = cache(partial(outcome, exercise))

    def rejects(self, number: int, function: Callable[..., Any], seed: int = 0) -> str:
        """Why a case rejects a function; empty if it does not."""
        want = self.outcome(number, self.exercise.reference, seed)
        got = self.outcome(number, function, seed, SECONDS)
        fault = judge(self.exercise.cases[number], got, want)
        return f"{fault.kind}: {fault.text}" if fault else ""

    def rejected_by(self, function: Callable[..., Any], seed: int = 0) -> list[int]:
        """The numbers of all cases that reject a function."""
        return [number for number in self.numbers if self.rejects(number, function, seed)]

    def examine(self, function: Callable[..., Any]) -> Report:
        """The report of a student. A diagnosis runs every planted answer: here each runs once."""

        def cached(_: Exercise, number: int, function: Any, seed: int, *__: Any) -> Outcome:
            return self.outcome(number, function, seed, SECONDS)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(diagnose, "outcome", cached)
            patch.setattr(report, "outcome", cached)
            return examine(self.exercise, function)

    def stub(self) -> Callable[..., Any]:
        """The function as a student finds it."""
        name = self.exercise.name
        return load(stub(name), f"<stub {name}>")[self.exercise.function]


def bench_of(name: str) -> Bench:
    """The bench of an exercise; without a package that it needs, its tests are skipped."""
    found = exercise(name)
    if lacks := missing(found):
        pytest.skip(lacks)
    return Bench(found)


@cache
def beside(name: str) -> dict[str, Any]:
    """What stands in `right/NAME.py`: RIGHT, other right answers, as functions or changes of the
    solution; SURVIVORS, mutants that no case rejects, with reasons."""
    return runpy.run_path(str(HERE / "right" / f"{name}.py"))


def right_answers(found: Exercise) -> dict[str, Callable[..., Any]]:
    """Every function that must get all points."""
    others = {
        given.__name__ if callable(given) else str(given): answer(found, given)
        for given in beside(found.name)["RIGHT"]
    }
    return {"the reference": found.reference, "the solution": answer(found), **others}


def trivial_answers() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Answers that take no thought. Raises ``ValueError`` from the last of them."""

    def first(args: tuple[Any, ...]) -> Any:
        return next((x for x in args if isinstance(x, Tensor)), torch.zeros(()))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("no")

    for i in range(3):
        yield f"argument {i + 1}", lambda *args, _i=i, **kwargs: args[min(_i, len(args) - 1)]
    yield "zeros", lambda *args, **kwargs: torch.zeros_like(first(args))
    yield "ones", lambda *args, **kwargs: torch.ones_like(first(args))
    yield "the mean", lambda *args, **kwargs: first(args).double().mean().float()
    yield "zero", lambda *args, **kwargs: 0
    yield "nothing", lambda *args, **kwargs: None
    yield "a ValueError", refuse
