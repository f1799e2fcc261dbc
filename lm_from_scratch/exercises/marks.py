"""What graded rows are worth: of several files the best, marks, days late, a line for each student.

**The scheme.** An exercise that is done, with every check passed, gives all its points. One that is
not done gives half the points of the checks that passed, and so less than half of all. Points alone
are generous: most checks of an exercise pass a nearly right answer.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from lm_from_scratch.exercises.child import Verdict
from lm_from_scratch.exercises.exercise import drafts, exercises
from lm_from_scratch.exercises.grade import Row


def mark(verdict: Verdict) -> float:
    """All points for an exercise that is done, half of those reached for any other."""
    return verdict.of if verdict.passed else verdict.points / 2


def days_late(row: Row, due: str) -> int:
    """Days after it was due, a begun day counted whole; 0 if a date is not known. What is due on a
    date without a time may come until midnight."""
    if not due or not row.date:
        return 0
    end = datetime.fromisoformat(f"{due}T23:59" if len(due) == len("2026-11-05") else due)
    return max(0, math.ceil((datetime.fromisoformat(row.date) - end) / timedelta(days=1)))


def best(rows: Iterable[Row]) -> list[Row]:
    """The row that counts for each student and exercise, in the order of the learning path: most
    points; of equal ones the earliest, and then the first by the name of its file."""
    rows_of: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row.student, row.verdict.exercise
        if key not in rows_of or rank(row) < rank(rows_of[key]):
            rows_of[key] = row
    place = {e.name: n for n, e in enumerate([*exercises(), *drafts()])}
    last = len(place)  # of an exercise that is no more
    return sorted(rows_of.values(), key=lambda r: (r.student, place.get(r.verdict.exercise, last)))


def rank(row: Row) -> tuple[bool, bool, float, str, str]:
    """The smaller, the better."""
    verdict = row.verdict
    return not row.file, not verdict.passed, -verdict.points, row.date, row.file


@dataclass
class Student:
    """A line of the table of students.

    * ``rows``: those that count, one for each exercise
    * ``marks``, ``of``: the sum, and what a student with every exercise done has
    * ``in_time``: the sum if what came late is left out
    * ``own``: what a teacher has written: `manual` (points), `note`, and any other column
    """

    name: str
    rows: list[Row]
    of: float
    in_time: float
    late: int
    own: Mapping[str, str] = field(default_factory=dict)

    @property
    def marks(self) -> float:
        """The sum of the marks."""
        return sum(mark(row.verdict) for row in self.rows)

    @property
    def done(self) -> int:
        """How many exercises are done."""
        return sum(row.verdict.passed for row in self.rows)

    @property
    def total(self) -> float:
        """Marks and the teacher's own points."""
        return self.marks + (points(self.own.get("manual", "")) or 0.0)


def points(cell: str) -> float | None:
    """The number in a cell, with a point or a comma; None if it holds none."""
    with contextlib.suppress(ValueError):
        value = float(cell.strip().replace(",", "."))
        return value if math.isfinite(value) else None
    return None


def students(
    rows: list[Row], due: str = "", own: Mapping[str, Mapping[str, str]] | None = None
) -> list[Student]:
    """A line for each student, by name."""
    counting = best(rows)
    early = best(row for row in rows if not days_late(row, due))
    worth = {row.verdict.exercise: row.verdict.of for row in counting}
    table = []
    for name in dict.fromkeys(row.student for row in counting):
        mine = [row for row in counting if row.student == name]
        in_time = sum(mark(row.verdict) for row in early if row.student == name)
        late = max(days_late(row, due) for row in mine)
        cells = (own or {}).get(name, {})
        table.append(Student(name, mine, sum(worth.values()), in_time, late, cells))
    return table


def summary(rows: list[Row]) -> str:
    """For each exercise: who passed, the mean, and what most failed at: what to teach again."""
    lines = []
    counting = best(rows)
    for name in dict.fromkeys(row.verdict.exercise for row in counting):
        own = [row.verdict for row in counting if row.verdict.exercise == name]
        mean = sum(v.points for v in own) / len(own)
        passed = sum(v.passed for v in own)
        lines.append(f"{name}: {passed} of {len(own)} passed, mean {mean:.1f} of {own[0].of:g}")
        failed = Counter(case for v in own for case in v.failed).most_common(3)
        lines += [f"  {count:>4} fail at {case}" for case, count in failed]
        wrong = Counter(v.wrong for v in own if v.wrong).most_common(3)
        lines += [f"  {count:>4} looks like: {label}" for label, count in wrong]
    return "\n".join(lines)
