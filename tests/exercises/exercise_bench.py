"""What the tests of exercises share: an exercise, its answers, and what they do in its cases."""

import runpy
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm_from_scratch.exercises import diagnose, report
from lm_from_scratch.exercises.compare import Fault
from lm_from_scratch.exercises.exercise import Exercise, exercise
from lm_from_scratch.exercises.report import Report, Result, examine, missing
from lm_from_scratch.exercises.run import Outcome, tried, wanted
from lm_from_scratch.exercises.source import answer, load, stub

ANSWERS = Path(__file__).with_name("answers")
#: Processor time for a case: a mutant may never end.
SECONDS = 5


class Bench:
    """One exercise. What the reference does in a case at a seed is run once, and kept."""

    def __init__(self, exercise: Exercise) -> None:
        self.exercise = exercise
        self.numbers = range(len(exercise.cases))
        self.wanted = cache(partial(wanted, exercise))
        self.outcome = cache(self.tried)

    def tried(self, number: int, function: Callable[..., Any], seed: int = 0) -> Outcome:
        """What a function does in a case."""
        return tried(self.exercise, number, function, self.wanted(number, seed), seed, SECONDS)

    def fault(self, number: int, function: Callable[..., Any], seed: int = 0) -> Fault | None:
        """What is wrong with a function in a case; None where nothing is."""
        return self.tried(number, function, seed).wrong

    def rejects(self, number: int, function: Callable[..., Any], seed: int = 0) -> str:
        """Why a case rejects a function; empty if it does not."""
        fault = self.fault(number, function, seed)
        return f"{fault.kind}: {fault.text}" if fault else ""

    def rejected_by(self, function: Callable[..., Any], seed: int = 0) -> list[int]:
        """The numbers of all cases that reject a function."""
        return [number for number in self.numbers if self.fault(number, function, seed)]

    def points(self, function: Callable[..., Any]) -> float:
        """The points of a student: those of the report, without its search for a reason."""
        results = [
            Result(number, case, self.fault(number, function), Outcome())
            for number, case in enumerate(self.exercise.cases)
        ]
        return Report(self.exercise, 0, results).points

    def examine(self, function: Callable[..., Any]) -> Report:
        """The report of a student. A diagnosis runs every planted answer: here each runs once."""

        def cached(_: Any, number: int, function: Any, want: Any, seed: int, *__: Any) -> Outcome:
            return self.outcome(number, function, seed)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(diagnose, "tried", cached)
            patch.setattr(report, "tried", cached)
            patch.setattr(report, "wanted", lambda _, *given: self.wanted(*given))
            return examine(self.exercise, function)

    def stub(self) -> Callable[..., Any]:
        """The function as a student finds it."""
        name = self.exercise.name
        return load(stub(name), f"<stub {name}>")[self.exercise.function]


def bench_of(name: str) -> Bench:
    """The bench of an exercise; without a package that it needs, its tests are skipped."""
    wanted = exercise(name)
    if lacks := missing(wanted):
        pytest.skip(lacks)
    return Bench(wanted)


@cache
def answers(name: str) -> dict[str, Any]:
    """What stands in `answers/NAME.py`, each answer a function or a change of the solution:

    * RIGHT: other right answers
    * WRONG: what a second person did wrong, who knew the text alone, in rows: what is mistaken,
      the answer. If that is a label of the exercise, the report names it; where it cannot, a third
      word says why
    * SURVIVORS: mutants of the solution that no case rejects, with reasons
    """
    return runpy.run_path(str(ANSWERS / f"{name}.py"))


def right_answers(wanted: Exercise) -> dict[str, Callable[..., Any]]:
    """Every function that must get all points."""
    others = {
        given.__name__ if callable(given) else str(given): answer(wanted, given)
        for given in answers(wanted.name)["RIGHT"]
    }
    return {"the reference": wanted.reference, "the solution": answer(wanted), **others}


def second_person(wanted: Exercise) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """What a second person did wrong: what is mistaken, the function, why it is not named."""
    for label, given, *unnamed in answers(wanted.name).get("WRONG", ()):
        yield label, answer(wanted, given), *(unnamed or [""])


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
