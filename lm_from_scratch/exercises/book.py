"""The book of a class: tables in files, of which nothing is lost.

``grades.csv`` has a row for each student and exercise, ``grades-students.csv`` a row for each
student, ``grades.json`` all of it and every file that was graded. A teacher writes into the table
of students: the columns `manual` and `note`, and any of their own, are read before it is written
again. What a file said before is copied to the folder `earlier`.

While a class is graded, every verdict goes into ``grades-unfinished.jsonl`` at once. After Ctrl-C
or a power cut the same command goes on from there.
"""

import csv
import io
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lm_from_scratch.exercises.child import Verdict
from lm_from_scratch.exercises.exercise import drafts, exercises
from lm_from_scratch.exercises.grade import EARLIER, Row
from lm_from_scratch.exercises.marks import Student, best, days_late, mark, students
from lm_from_scratch.exercises.progress import write_text
from lm_from_scratch.limits import check

COLUMNS = ["student", "exercise", "points", "of", "passed", "mark", "date", "late", "failed",
           "looks like", "reason", "file", "seconds"]  # fmt: skip
STUDENTS = ["student", "done", "marks", "of", "late", "in time", "manual", "total", "note"]
OWN = ("manual", "note")  # of these, a teacher's


@dataclass
class Book:
    """The files beside a table, and what stood in them.

    * ``rows``: of `grades.json`, of every file that was graded
    * ``own``: a teacher's cells, by the student as the table writes it
    """

    table: Path
    rows: list[Row] = field(default_factory=list)
    own: dict[str, dict[str, str]] = field(default_factory=dict)
    seed: int | None = None
    due: str = ""

    @property
    def students(self) -> Path:
        """The table with a row for each student."""
        return self.table.with_name(f"{self.table.stem}-students.csv")

    @property
    def all(self) -> Path:
        """All of it, for programs."""
        return self.table.with_suffix(".json")

    @property
    def unfinished(self) -> Path:
        """What a run that was interrupted had done."""
        return self.table.with_name(f"{self.table.stem}-unfinished.jsonl")

    def existing(self) -> list[Path]:
        """Which of the three files are there."""
        return [path for path in (self.table, self.students, self.all) if path.exists()]

    def read(self) -> None:
        """Take in what is there. Raises ``ValueError`` for a file that makes no sense."""
        if self.all.exists():
            try:
                record = json.loads(self.all.read_text(encoding="utf-8"))
                self.rows = [as_row(given) for given in record["rows"]]
                self.seed, self.due = int(record["seed"]), str(record["due"])
                for row in self.rows:
                    days_late(row, self.due)
            except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
                raise ValueError(f"{self.all} is no table of grades ({error}): move it") from error
        if self.students.exists():
            self.own = read_own(self.students)

    def remembered(self) -> list[Row]:
        """The rows of a run that was interrupted. The last line may be half of one."""
        rows = []
        if self.unfinished.exists():
            for line in self.unfinished.read_text(encoding="utf-8").splitlines():
                try:
                    rows.append(as_row(json.loads(line)))
                except (ValueError, LookupError, TypeError, RecursionError):
                    continue
        return rows

    def remember(self, row: Row) -> None:
        """Keep a row of the run in progress."""
        with self.unfinished.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(asdict(row))}\n")

    def lines(self) -> list[Student]:
        """A line for each student, with what a teacher has written by now."""
        if self.students.exists():
            self.own = read_own(self.students)
        own = {row.student: self.own.get(safe(row.student), {}) for row in self.rows}
        return students(self.rows, self.due, own)

    def strangers(self) -> list[str]:
        """Names in the table of students that are nobody's, beside which a teacher has written."""
        names = {safe(row.student) for row in self.rows}
        return [name for name, own in self.own.items() if name not in names and any(own.values())]

    def write(self) -> None:
        """All three files."""
        lines, counting = self.lines(), best(self.rows)
        replace(self.table, self.text())
        replace(self.students, self.students_text(lines))
        counts = {id(row) for row in counting}
        rows = [asdict(row) | {"mark": mark(row.verdict), "late": days_late(row, self.due),
                               "counts": id(row) in counts} for row in self.rows]  # fmt: skip
        by_student = [
            {"student": s.name, "done": s.done, "marks": s.marks, "of": s.of, "late": s.late,
             "in time": s.in_time, "total": s.total, **{k: v for k, v in s.own.items() if v}}
            for s in lines
        ]  # fmt: skip
        everything = {"seed": self.seed, "due": self.due, "students": by_student, "rows": rows}
        replace(self.all, json.dumps(everything, indent=1) + "\n")

    def text(self) -> str:
        """The table with a row for each student and exercise."""
        return csv_text(COLUMNS, [cells(row, self.due) for row in best(self.rows)])

    def students_text(self, lines: list[Student]) -> str:
        """The table of students; what a teacher wrote beside a name that is no student's stays."""
        names = list(dict.fromkeys(row.verdict.exercise for line in lines for row in line.rows))
        more = list(dict.fromkeys(name for own in self.own.values() for name in own))
        more = [name for name in more if name not in OWN]
        table = []
        for s in lines:
            marks = {row.verdict.exercise: f"{mark(row.verdict):g}" for row in s.rows}
            late = [str(s.late), f"{s.in_time:g}"] if self.due else ["", ""]
            table.append(
                [safe(s.name), str(s.done), f"{s.marks:g}", f"{s.of:g}", *late,
                 s.own.get("manual", ""), f"{s.total:g}", s.own.get("note", ""),
                 *(marks.get(name, "") for name in names), *(s.own.get(name, "") for name in more)]
            )  # fmt: skip
        for name in self.strangers():
            given = {"student": name, **self.own[name]}
            table.append([given.get(column, "") for column in [*STUDENTS, *names, *more]])
        return csv_text([*STUDENTS, *names, *more], table)


def as_row(given: Mapping[str, Any]) -> Row:
    """A row as it was written. Raises ``ValueError``, ``LookupError`` or ``TypeError`` for
    others."""
    verdict = Verdict(**given["verdict"])
    row = Row(given["student"], verdict, given["file"], given["date"], given["digest"])
    check(verdict)
    check(row)
    days_late(row, "2026-11-05")
    return row


def read_own(path: Path) -> dict[str, dict[str, str]]:
    """A teacher's cells in a table of students, which a spreadsheet may have written.

    Raises ``ValueError`` for a table without the column `student`.
    """
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252", "replace")
    head = text.partition("\n")[0]
    table = csv.DictReader(
        io.StringIO(text, newline=""), delimiter=max(",;\t", key=head.count), restval=""
    )
    columns = [name for name in table.fieldnames or () if name]
    if "student" not in columns:
        raise ValueError(f"{path} has no column student: fix its first line, or move it")
    computed = {*STUDENTS, *(e.name for e in (*exercises(), *drafts()))} - {*OWN}
    own = [name for name in columns if name not in computed]
    try:
        return {
            row["student"]: {name: row[name] for name in own} for row in table if row["student"]
        }
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {table.line_num + 1}: {error}: fix it, or move it"
        ) from error


def merged(old: list[Row], new: list[Row], present: Mapping[str, Iterable[str]]) -> list[Row]:
    """Old and new rows: of what was graded now, the new ones. An old row stays if its file is not
    among those that are `present`, by student, or if nothing of its exercise was graded now. A row
    that says that there is no file gives way to any other."""
    graded = {(row.student, row.verdict.exercise) for row in new}
    older = [
        row
        for row in old
        if (row.student, row.verdict.exercise) not in graded
        or (row.file and row.file not in present.get(row.student, ()))
    ]
    with_file = {(row.student, row.verdict.exercise) for row in [*older, *new] if row.file}
    rows = [
        row
        for row in [*older, *new]
        if row.file or (row.student, row.verdict.exercise) not in with_file
    ]
    return sorted(rows, key=lambda row: (row.student, row.verdict.exercise, row.file))


def replace(path: Path, text: str) -> None:
    """Write a file. What it said before, if that is something else, is copied to `earlier` first,
    under a number that is free."""
    if path.exists():
        if path.read_bytes() == text.encode("utf-8", "backslashreplace"):
            return
        place = path.parent / EARLIER
        place.mkdir(exist_ok=True)
        number = 1
        while (copy := place / f"{path.stem} {number}{path.suffix}").exists():
            number += 1
        shutil.copy2(path, copy)
    write_text(path, text)


def cells(row: Row, due: str) -> list[str]:
    """As in the table of rows."""
    v = row.verdict
    passed, failed = "yes" if v.passed else "no", "; ".join(v.failed)
    late = str(days_late(row, due)) if due and row.date else ""
    date = row.date.removesuffix("T00:00").replace("T", " ")
    return [safe(row.student), v.exercise, f"{v.points:g}", f"{v.of:g}", passed, f"{mark(v):g}",
            date, late, safe(failed), safe(v.wrong), safe(v.reason), safe(row.file),
            f"{v.seconds:.2f}"]  # fmt: skip


def csv_text(columns: list[str], rows: Iterable[list[str]]) -> str:
    """A table that every spreadsheet reads."""
    text = io.StringIO("\ufeff", newline="")  # by which a spreadsheet knows that it is UTF-8
    text.seek(1)
    table = csv.writer(text)
    table.writerow(columns)
    table.writerows(rows)
    return text.getvalue()


def safe(text: str) -> str:
    """A cell that no spreadsheet takes for a formula, on one line, of what can be printed."""
    text = " ".join(text.split())
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
