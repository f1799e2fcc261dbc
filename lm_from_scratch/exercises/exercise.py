"""What an exercise is: seeded cases, hints, and answers that are known to be right or wrong.

A case makes its arguments from a generator, so that every seed gives other numbers, and the same
seed gives the same. The student's function and the reference get equal arguments that were made
twice: neither sees what the other did to them.

The wrong answers are part of the exercise. They prove that the cases can fail, and they name a
student's misconception when a result equals one of them (`diagnose.py`).
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Generator

from lm_from_scratch.exercises import catalogue
from lm_from_scratch.exercises.card import Card, course, known, waiting


@dataclass(frozen=True)
class Call:
    """The arguments of one call; see `call`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Call:
    """What a case's `make` returns: the arguments, written as in the call itself."""
    return Call(args, kwargs)


def direct(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The plain way to use a student's function: one call."""
    return function(*args, **kwargs)


@dataclass(frozen=True)
class Case:
    """One check of an exercise.

    * ``make``: (generator) -> `call(...)`: the arguments, from nothing but the generator
    * ``hint``: shown when this is the first case that fails
    * ``use``: ``(function, *args, **kwargs)`` -> result: what is done with the student's function.
      A cache is filled in several calls, a basis B is turned into B Bᵀ, a refusal into
      the name of its exception. The reference is used in the same way
    * ``tolerance``: (relative, absolute) for floating-point values; None takes that of the dtype
    * ``gradient``: whether gradients of all floating-point arguments are compared too
    * ``guard``: worth no points, but without it there are none: what a bug hunt must not break
    * ``teaching``: why the case is kept although others catch all that it catches
    * ``shows``: whether what ``use`` prints is in the report, also where the case holds
    """

    name: str
    make: Callable[[Generator], Call]
    hint: str
    points: int = 1
    use: Callable[..., Any] = direct
    tolerance: tuple[float, float] | None = None
    gradient: bool = False
    guard: bool = False
    teaching: str = ""
    shows: bool = False


@dataclass(frozen=True)
class Wrong:
    """An answer that must be rejected.

    * ``label``: the misconception, a phrase about the idea: "the mean is subtracted"
    * ``answer``: a function, or changes to the text of the solution: {old: new}, each old once
    * ``case``: the name of the case that rejects it, for every seed
    * ``unnamed``: why its result cannot be told from that of another wrong answer, if it cannot
    """

    label: str
    answer: Callable[..., Any] | Mapping[str, str]
    case: str
    unnamed: str = ""


def planted(table: Iterable[tuple[Any, ...]]) -> tuple[Wrong, ...]:
    """The wrong answers of a table: each row has a label, a change, a case."""
    return tuple(Wrong(*row) for row in table)


@dataclass(frozen=True, kw_only=True)
class Exercise(Card):
    """An exercise without its text, which lies beside its checks. Beside what its card says:

    * ``function``: what the student defines; no other exercise has a function of this name
    * ``outcome``: what a student can do afterwards, for the teacher's guide
    * ``reference``: the package's own function, so that the check cannot drift from the lesson
    * ``wrong``: the planted wrong answers, those first that are most common
    * ``hunt``: of a bug hunt: the ids of its defects in the bug museum
    * ``needs``: a package that the exercise needs beside torch
    """

    function: str
    outcome: str
    reference: Callable[..., Any]
    cases: tuple[Case, ...]
    wrong: tuple[Wrong, ...]
    hunt: str = ""
    needs: str = ""

    def __post_init__(self) -> None:
        names = [case.name for case in self.cases]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: two cases have one name: {names}")
        for wrong in self.wrong:
            if wrong.case not in names:
                raise ValueError(f"{self.name}: {wrong.label!r} names no case: {wrong.case!r}")
        if not self.hints or not all(case.hint for case in self.cases):
            raise ValueError(f"{self.name} needs hints, and so does each of its cases")

    @property
    def points(self) -> int:
        """The sum of the points of all cases."""
        return sum(case.points for case in self.cases if not case.guard)


def exercise(name: str) -> Exercise:
    """One exercise by its name. Raises ``ValueError``, with the nearest names, if there is none."""
    return importlib.import_module(f"{catalogue.__name__}.{known(name)}.checks").EXERCISE


@cache
def exercises() -> tuple[Exercise, ...]:
    """The course: all exercises but drafts in the order of the learning path."""
    return tuple(exercise(card.name) for card in course())


def drafts() -> tuple[Exercise, ...]:
    """The exercises that can be done, and are no part of the course yet."""
    return tuple(exercise(card.name) for card in waiting())
