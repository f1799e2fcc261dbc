"""Prove the checks of an exercise: they pass what is right and reject what is wrong, always.

A check without planted wrong answers is a draft. `prove` runs every gate over one exercise:

1. the stub gets no points and hears only "not written yet"; the reference gets all, at 100 seeds
2. every planted wrong answer is rejected by the case named for it, at each of 30 seeds
3. every right answer gets all points, at 100 seeds: this fixes the tolerances
4. every automatic mutant of the solution is rejected, or its survival has a written reason
5. each case alone rejects some wrong answer or mutant, or says what it teaches
6. every wrong answer is named by its own label, or says why it cannot be told apart
7. trivial answers, an argument returned or zeros, get no points

    python tests/slow/exercise_proof/prove.py [NAME ...] [--store]

says what does not hold, and with ``--store`` writes `proof.json` into the folder of each exercise
where nothing is left.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from mutate import mutants
from torch import Tensor

from lm_from_scratch.exercises.exercise import Exercise, Wrong, exercise, exercises, folder
from lm_from_scratch.exercises.report import examine, missing
from lm_from_scratch.exercises.run import (
    Outcome,
    OutOfTime,
    judge,
    outcome,
    time_limit,
)
from lm_from_scratch.exercises.source import answer, load, solution, stub

RIGHT_SEEDS, WRONG_SEEDS = 100, 30
LEAST_WRONG, LEAST_RIGHT = 12, 4
MUTANT_SECONDS = 5


class Proof:
    """The gates over one exercise; `run` returns the table and fills `problems`."""

    def __init__(
        self,
        exercise: Exercise,
        right_seeds: int = RIGHT_SEEDS,
        wrong_seeds: int = WRONG_SEEDS,
    ):
        self.exercise = exercise
        self.right_seeds, self.wrong_seeds = right_seeds, wrong_seeds
        self.wants: dict[tuple[int, int], Outcome] = {}
        self.problems: list[str] = []
        self.killers: dict[str, list[int]] = {}  # cases that reject each wrong answer or mutant

    def run(self) -> dict[str, Any]:
        """All gates. The result holds no times, so that it is the same on every machine."""
        exercise = self.exercise
        self.right()
        wrong = [self.wrong(planted) for planted in exercise.wrong]
        table = self.mutants()
        self.cases()
        self.trivial()
        shares = [row.pop("points") / exercise.points for row in wrong]
        return {
            "exercise": exercise.name,
            "cases": [
                {"name": c.name, "points": 0 if c.guard else c.points, "guard": c.guard,
                 "teaching": c.teaching, "kills": self.kills(n), "alone": self.alone(n)}
                for n, c in enumerate(exercise.cases)
            ],
            "wrong": wrong,
            "right": ["the solution", *exercise.right],
            "right seeds": self.right_seeds,
            "wrong seeds": self.wrong_seeds,
            "highest share of points for a wrong answer": round(max(shares, default=0.0), 3),
            **table,
        }  # fmt: skip

    def want(self, number: int, seed: int) -> Outcome:
        """What the reference does, computed once."""
        if (number, seed) not in self.wants:
            self.wants[number, seed] = outcome(self.exercise, number, self.exercise.reference, seed)
        return self.wants[number, seed]

    def rejects(self, number: int, function: Callable[..., Any], seed: int) -> str:
        """Why a case rejects a function; empty if it does not."""
        got = outcome(self.exercise, number, function, seed, MUTANT_SECONDS)
        fault = judge(self.exercise.cases[number], got, self.want(number, seed))
        return f"{fault.kind}: {fault.text}" if fault else ""

    def numbers(self) -> range:
        """Of all cases."""
        return range(len(self.exercise.cases))

    def right(self) -> None:
        """Gates 1 and 3: the stub, the reference, the solution and every other right answer."""
        exercise = self.exercise
        report = examine(exercise, self.stub())
        if report.written or report.points or "not written yet" not in report.text():
            self.problems.append(f"the stub is not taken for one: {report.text()}")
        if len(exercise.right) < LEAST_RIGHT:
            self.problems.append(
                f"{len(exercise.right)} right answers beside the solution, {LEAST_RIGHT} are needed"
            )
        answers = {"the reference": exercise.reference, "the solution": answer(exercise)}
        answers |= {label: answer(exercise, given) for label, given in exercise.right.items()}
        for label, function in answers.items():
            for seed in range(self.right_seeds):
                for number in self.numbers():
                    if why := self.rejects(number, function, seed):
                        name = exercise.cases[number].name
                        self.problems.append(f"seed {seed}: {name!r} rejects {label!r}: {why}")
                        break
                else:
                    continue
                break

    def stub(self) -> Callable[..., Any]:
        """The function as a student finds it. Raises ``ValueError`` where the script has none."""
        defined = load(stub(self.exercise.name), f"<stub {self.exercise.name}>")
        if self.exercise.function not in defined:
            raise ValueError(f"the script defines no {self.exercise.function}")
        return defined[self.exercise.function]

    def wrong(self, planted: Wrong) -> dict[str, Any]:
        """Gates 2 and 6 for one wrong answer."""
        exercise = self.exercise
        function = answer(exercise, planted.answer)
        expected = next(n for n in self.numbers() if exercise.cases[n].name == planted.case)
        for seed in range(self.wrong_seeds):
            if not self.rejects(expected, function, seed):
                self.problems.append(f"seed {seed}: {planted.case!r} accepts {planted.label!r}")
                break
        said = {number: self.rejects(number, function, 0) for number in self.numbers()}
        if any("NameError: " in why for why in said.values()):
            self.problems.append(f"{planted.label!r} is broken: a name is not defined")
        by = [number for number, why in said.items() if why]
        self.killers[planted.label] = by
        report = examine(exercise, function)
        label = report.wrong.label if report.wrong else ""
        silent = all(result.outcome.fault for result in report.failed)
        if label != planted.label and not silent and not planted.unnamed:
            self.problems.append(f"{planted.label!r} is named {label!r}")
        if label == planted.label and planted.unnamed:
            self.problems.append(f"{planted.label!r} is named, but has a reason not to be")
        how = "named" if label == planted.label else "error" if silent else planted.unnamed
        return {
            "label": planted.label, "case": expected + 1, "rejected by": [n + 1 for n in by],
            "named": how, "points": report.points,
        }  # fmt: skip

    def mutants(self) -> dict[str, Any]:
        """Gate 4."""
        exercise = self.exercise
        own = solution(exercise.name, whole=False)
        given = solution(exercise.name)[: -len(own)]
        survived, total = [], 0
        for label, code in mutants(own):
            total += 1
            self.killers[f"mutant {label}"] = by = self.killed(given + code, total)
            if not by:
                survived.append(label)
        for label in survived:
            if label not in exercise.survivors:
                self.problems.append(f"a mutant survives without a reason: {label!r}")
        for label in exercise.survivors:
            if label not in survived:
                self.problems.append(f"no mutant survives as {label!r}")
        if len(exercise.wrong) < LEAST_WRONG:
            self.problems.append(f"{len(exercise.wrong)} wrong answers, {LEAST_WRONG} are needed")
        return {
            "mutants": total,
            "killed": total - len(survived),
            "explained": {label: exercise.survivors.get(label, "") for label in survived},
        }

    def killed(self, code: str, number: int) -> list[int]:
        """The cases that reject a changed program; all of them if it cannot even be loaded."""
        try:
            with time_limit(MUTANT_SECONDS):
                function = load(code, f"<mutant {number} of {self.exercise.name}>")[
                    self.exercise.function
                ]
        except (Exception, OutOfTime):
            return list(self.numbers())
        by = []
        for n in self.numbers():
            if why := self.rejects(n, function, 0):
                by.append(n)
                if why.startswith("time"):  # it would take as long in the others
                    return list(self.numbers())
        return by

    def kills(self, number: int) -> int:
        """How many wrong answers and mutants a case rejects."""
        return sum(number in by for by in self.killers.values())

    def alone(self, number: int) -> int:
        """How many of them no other case rejects."""
        return sum(by == [number] for by in self.killers.values())

    def cases(self) -> None:
        """Gate 5."""
        for number, case in enumerate(self.exercise.cases):
            alone = self.alone(number)
            if not alone and not case.teaching:
                self.problems.append(f"{case.name!r} is the only killer of nothing: say `teaching`")
            if alone and case.teaching:
                self.problems.append(f"{case.name!r} alone rejects {alone}: it needs no `teaching`")

    def trivial(self) -> None:
        """Gate 7."""
        for label, function in trivial_answers():
            points = examine(self.exercise, function).points
            if points:
                self.problems.append(f"the trivial answer {label!r} gets {points:g} points")


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


def prove(name: str) -> dict[str, Any]:
    """The proof of an exercise. Raises ``ValueError`` with all that does not hold."""
    proof = Proof(exercise(name))
    table = proof.run()
    if proof.problems:
        raise ValueError("\n".join(proof.problems))
    return table


def dump(table: dict[str, Any]) -> str:
    """The stored form of a proof: a line for each case and each wrong answer."""
    parts = []
    for key, value in table.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list):
            rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in value)
            text = f"[\n{rows}\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    """Prove exercises by name and say what does not hold; --store writes the tables."""
    store = "--store" in sys.argv
    names = [name for name in sys.argv[1:] if name != "--store"]
    bad = 0
    chosen = [exercise(name) for name in names] or exercises()
    lacks = {found.name: missing(found) for found in chosen}  # before an optimizer imports Triton
    for found in chosen:
        if lacks[found.name]:
            print(f"{found.name}: not proved: {lacks[found.name]}")
            continue
        start = time.perf_counter()
        proof = Proof(found)
        try:
            table = proof.run()
        except ValueError as error:  # a change that is not found in the solution
            print(f"{found.name}: {error}")
            bad += 1
            continue
        print(
            f"{found.name}: {len(table['wrong'])} wrong and {len(table['right'])} right answers, "
            f"{table['killed']} of {table['mutants']} mutants, {time.perf_counter() - start:.1f} s"
        )
        for problem in proof.problems:
            print(f"  {problem}")
        bad += len(proof.problems)
        if store and not proof.problems:
            (folder(found.name) / "proof.json").write_text(dump(table), encoding="utf-8")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
