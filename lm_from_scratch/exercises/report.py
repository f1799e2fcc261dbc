"""Check a function against all cases of an exercise, and say the result in words."""

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lm_from_scratch.exercises.compare import MEMORY, Fault, describe
from lm_from_scratch.exercises.diagnose import diagnose
from lm_from_scratch.exercises.exercise import Case, Exercise, Wrong
from lm_from_scratch.exercises.run import (
    Outcome,
    argument_names,
    arguments,
    in_other_memory,
    tried,
    values,
    wanted,
)


@dataclass
class Result:
    """One case, and the first thing wrong in it."""

    number: int
    case: Case
    fault: Fault | None
    outcome: Outcome

    @property
    def by_memory(self) -> bool:
        """Whether it holds, but for another order of the arguments in memory."""
        return self.fault is not None and self.fault.kind == MEMORY


@dataclass
class Report:
    """All that is to say about one answer."""

    exercise: Exercise
    seed: int
    results: list[Result]
    wrong: list[Wrong] = field(default_factory=list)  # what it looks like
    written: bool = True
    missing: str = ""  # why nothing was checked
    explains: list[int] = field(default_factory=list)  # the cases that `wrong` explains

    @property
    def failed(self) -> list[Result]:
        """The results with a fault."""
        return [result for result in self.results if result.fault]

    @property
    def looks_like(self) -> str:
        """The misconception, or those that cannot be told apart; empty if none is known."""
        return "; or: ".join(wrong.label for wrong in self.wrong)

    @property
    def passed(self) -> bool:
        """Whether every case passed: this is what "done" means."""
        return self.written and not self.failed

    @property
    def points(self) -> float:
        """Points of the cases that passed; none while a guard fails. Those that fail by an order in
        memory alone have one fault in common: it costs as much as the cheapest of them."""
        if not self.written or any(r.case.guard and not r.by_memory for r in self.failed):
            return 0.0
        counted = [r for r in self.results if not r.case.guard]
        right = sum(r.case.points for r in counted if not r.fault or r.by_memory)
        return float(right - min((r.case.points for r in counted if r.by_memory), default=0))

    def text(self) -> str:
        """The report that a student reads."""
        exercise = self.exercise
        if self.missing:
            return f"{exercise.name}: not checked: {self.missing}"
        if not self.written:
            return f"{exercise.name}: not written yet (0 of {exercise.points} points)"
        good = len(self.results) - len(self.failed)
        lines = [
            f"{exercise.name}: {good} of {len(self.results)} checks, {self.points:g} of "
            f"{exercise.points} points (seed {self.seed})"
        ]
        explained, texts = False, set()
        for result in self.results:
            worth = "must hold" if result.case.guard else f"{result.case.points}"
            mark = "FAIL" if result.fault else "ok  "
            lines.append(f"  {mark} {result.number + 1:>2} {result.case.name} [{worth}]")
            if result.case.shows:
                lines += indent(result.outcome.printed)
            if result.fault:
                repeated = result.fault.text in texts
                lines += indent("the same" if repeated else result.fault.text)
                texts.add(result.fault.text)
                if self.wrong and result.number == min(self.explains):
                    lines += indent(f"looks like: {self.looks_like}")
                if not explained:
                    lines += self.advice(result)
                    explained = True
        if sum(result.by_memory for result in self.failed) > 1:
            lines.append(
                "What only another order in memory brings out costs the points of one check."
            )
        if self.passed and len(self.results) == len(exercise.cases):
            lines.append("All checks hold. A grading run repeats them with other numbers.")
        elif not self.points and any(result.case.guard for result in self.failed):
            lines.append('There are no points while a check that "must hold" fails.')
        return "\n".join(lines)

    def advice(self, result: Result) -> list[str]:
        """Below the first failed case: the call, what the case is about, how to repeat it."""
        lines = indent(f"call: {call_text(self.exercise, result, self.seed)}")
        if result.outcome.again is None:
            lines += indent(f"this case is about: {result.case.hint}")
        most = 10 if len(self.results) > 1 else 1000
        for line in [] if result.case.shows else result.outcome.printed.splitlines()[:most]:
            lines += indent(f"printed: {line[:200]}")
        case, seed = result.number + 1, f", seed={self.seed}" if self.seed else ""
        option = f" --seed {self.seed}" if self.seed else ""
        call = f'check("{self.exercise.name}", {self.exercise.function}, case={case}{seed})'
        return [*lines, *indent(f"again: {call}; in a terminal: --case {case}{option}")]


def say(text: str) -> None:
    """Print what a student's code may have made: not every console has every character."""
    coding = sys.stdout.encoding or "utf-8"
    print(text.encode(coding, "backslashreplace").decode(coding), flush=True)


def indent(text: str) -> list[str]:
    """The lines of a text, below the line of a case."""
    return [f"          {line}" for line in text.splitlines()]


def call_text(exercise: Exercise, result: Result, seed: int) -> str:
    """The call of a failed case in words: names, dtypes, shapes."""
    again = result.outcome.again is not None  # it failed in the second call
    call = arguments(result.case, result.number, result.outcome.seed if again else seed)
    call = in_other_memory(call) if again else call
    pairs = zip(argument_names(exercise, call), values(call), strict=True)
    listed = (f"{name} {describe(value)}" if hasattr(value, "shape") else
              f"{name}={describe(value)}" for name, value in pairs)  # fmt: skip
    text = ", ".join(listed)
    return text if len(text) <= 300 else f"{text[:297]}..."


def missing(exercise: Exercise) -> str:
    """What an exercise needs and this process has not, in words; empty if there is nothing."""
    if not exercise.needs:
        return ""
    if importlib.util.find_spec(exercise.needs) is None:
        linux = ", which exists for Linux only," if exercise.needs == "triton" else ""
        return f"it needs the package {exercise.needs}{linux} and that is not installed here"
    if exercise.needs == "triton":
        # Triton reads this when it is imported, which any optimizer of torch does.
        if "triton" not in sys.modules and not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"
        try:
            from lm_from_scratch.kernels.device import INTERPRETED as interpreted
        except RuntimeError:  # half of it is
            interpreted = False
        if not interpreted and not torch.cuda.is_available():
            return (
                "Triton was imported before TRITON_INTERPRET=1 was set, and there is no GPU: "
                "restart Python, and run the first cell of the exercise before all else"
            )
    return ""


def examine(
    exercise: Exercise,
    function: Callable[..., Any],
    seed: int = 0,
    case: int | None = None,
    seconds: float | None = None,
) -> Report:
    """Check a function against the reference.

    * ``case``: the number of one case, from 1; None runs all of them
    * ``seconds``: processor time: a case that takes a quarter of it is stopped and gets no points,
      and those after it get less. None waits for ever

    A wrong answer never raises here: whatever the function does is in the report. Raises
    ``ValueError`` for a case that does not exist, ``RuntimeError`` where the reference fails.
    """
    if case is not None and not 1 <= case <= len(exercise.cases):
        raise ValueError(f"{exercise.name} has cases 1 to {len(exercise.cases)}, not {case}")
    numbers = range(len(exercise.cases)) if case is None else [case - 1]
    if lacks := missing(exercise):
        return Report(exercise, seed, [], written=False, missing=lacks)
    # First of all, and all of them: the student's code may replace what they are computed with.
    wants = {number: wanted(exercise, number, seed) for number in numbers}
    for fault in (call.fault for want in wants.values() for call in (want, want.again) if call):
        if fault:
            raise RuntimeError(f"{exercise.name}: the reference fails: {fault.text}")
    results = []
    share = None if seconds is None else seconds / 4
    for number in numbers:
        got = tried(exercise, number, function, wants[number], seed, share)
        if share and got.wrong and got.wrong.kind == "time":
            share = max(0.1, share / 4)
        results.append(Result(number, exercise.cases[number], got.wrong, got))
    # a class may have some methods written and others not: only a whole stub says no more
    if all(result.fault and result.fault.kind == "stub" for result in results):
        return Report(exercise, seed, [], written=False)
    failed = {result.number: result.outcome for result in results if result.fault}
    wrong, explains = diagnose(exercise, failed, wants, seed)
    return Report(exercise, seed, results, wrong, explains=explains)
