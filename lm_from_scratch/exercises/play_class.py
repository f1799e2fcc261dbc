"""A class plays: which parts of the model are a student's, and whether it says the same with them.

The answers that pass their checks run a model in a process of their own, so that no student's file
ends the others' turn.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lm_from_scratch.exercises import playing
from lm_from_scratch.exercises.card import has_part
from lm_from_scratch.exercises.child import NOTHING, Child
from lm_from_scratch.exercises.exercise import exercise, exercises
from lm_from_scratch.exercises.grade import grade
from lm_from_scratch.exercises.submission import defined, read

SECONDS = 120.0  # of processor time for what one student's answers do together


@dataclass(frozen=True)
class Answers:
    """The file of each answer that has passed its checks, by exercise."""

    files: Mapping[str, str]


@dataclass
class Played:
    """What came of one student's answers.

    * ``agreements``: by what the model does, as "writes": (same, of, error)
    * ``reason``: why there are none
    """

    agreements: dict[str, playing.Agreement] = field(default_factory=dict)
    reason: str = ""


@dataclass
class Student:
    """A student's part in the model.

    * ``parts``: exercises whose answer passes its checks
    * ``missing``: of the others that were handed in: why not, in words
    """

    name: str
    parts: list[str]
    missing: dict[str, str]
    played: Played = field(default_factory=Played)

    def line(self) -> str:
        """All of it in one line."""
        of = sum(has_part(e.name) for e in exercises())
        clauses = [f"{self.name}: {len(self.parts)} of {of} parts"]
        if 0 < len(self.parts) < of:
            clauses[0] += f" ({', '.join(self.parts)})"
        for title, result in self.played.agreements.items():
            if result.error:
                clauses.append(f"{title}: stopped by {result.error}")
            else:
                clauses.append(
                    f"{title}: {'all' if result.complete else result.same} of {result.of}"
                )
        clauses += [self.played.reason] if self.played.reason else []
        clauses += [f"{name}: {reason}" for name, reason in self.missing.items()]
        return " ".join("; ".join(clauses).split())

    def as_json(self) -> dict[str, Any]:
        """The same for a program."""
        return {"student": self.name, "parts": self.parts, "missing": self.missing,
                **asdict(self.played)}  # fmt: skip


def play_class(folder: Path, seconds: float, limit: float = SECONDS) -> Iterator[Student]:
    """Check and play what each student has handed in, a student after the other.

    * ``folder``: with a folder or a file for each student, as ``grade`` takes it
    * ``seconds``: of processor time for each check; ``limit`` for what the answers do together

    Raises ``ValueError`` if there is nothing.
    """
    names = [e.name for e in exercises() if has_part(e.name)]
    students: dict[str, Student] = {}
    files: dict[str, dict[str, str]] = {}
    for _, row in grade(folder, names, seed=0, seconds=seconds):
        name, verdict = row.verdict.exercise, row.verdict
        student = students.setdefault(row.student, Student(row.student, [], {}))
        if verdict.passed:
            files.setdefault(row.student, {})[name] = str((folder / row.file).absolute())
        elif row.file:
            student.missing[name] = verdict.reason or f"{verdict.points:g} of {verdict.of:g} points"
    for student in sorted(students.values(), key=lambda student: student.name):
        own = files.get(student.name, {})
        student.parts = [name for name in names if name in own]
        others = [name for name in names if name in student.missing and name not in own]
        student.missing = {name: student.missing[name] for name in others}
        if own:
            for _, loop, chosen in playing.stages(student.parts):
                playing.with_references(loop, tuple(chosen))  # here, where no answer has run
            student.played = received(Child(Answers(own), limit, work=played))
        yield student


def played(answers: Answers, seconds: float) -> Played:
    """In the child: what a model does with all of them."""
    functions = {
        e.name: defined(read(Path(answers.files[e.name])), e.function)
        for e in map(exercise, answers.files)
    }
    ordered = {e.name: functions[e.name] for e in exercises() if e.name in functions}
    stages = playing.together(ordered)
    return Played({t: playing.agreement(own, right) for t, (own, right, _) in stages.items()})


def received(child: Child) -> Played:
    """What a child has sent, if it can be used."""
    sent, reason = child.message()
    if not sent:
        return Played(reason=reason)
    try:
        record = json.loads(sent)
        agreements = record.get("agreements", {}).items()
        shown = {str(title): playing.Agreement(**numbers) for title, numbers in agreements}
        return Played(shown, str(record["reason"]))
    except (ValueError, TypeError, RecursionError, AttributeError, KeyError):
        return Played(reason=NOTHING)
