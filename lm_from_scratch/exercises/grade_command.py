"""The command of a teacher: grade a folder of submissions."""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lm_from_scratch.commands.options import not_empty
from lm_from_scratch.exercises.book import Book, merged
from lm_from_scratch.exercises.feedback import write_reports
from lm_from_scratch.exercises.grade import SEED, SUFFIXES, Row, grade, submissions
from lm_from_scratch.exercises.marks import points, summary
from lm_from_scratch.exercises.report import say
from lm_from_scratch.exercises.seal import can_seal

HELP = """FOLDER/student/.../file or FOLDER/student.ipynb; scripts and notebooks, any names. A date
may be the name of a folder, as FOLDER/2026-11-05/student/file: of all dates the best file counts.

Beside grades.csv (a row for each student and exercise) this writes grades-students.csv (a row for
each student, with columns for your own points and notes) and grades.json. Nothing is overwritten:
--update keeps your columns, and what the files said before is copied to a folder `earlier`.

A student's functions run in processes of their own, with limits on time, memory and files. This
stops accidents, not attacks: run the code of people you do not trust in a container.

examples
  python -m lm_from_scratch grade submitted --csv grades.csv
  python -m lm_from_scratch grade submitted --csv grades.csv --reports feedback --exercises rope
  python -m lm_from_scratch grade submitted --csv grades.csv --reports feedback --update
  python -m lm_from_scratch grade submitted --csv grades.csv --students anna --due 2026-11-05
"""


def grade_command(args: argparse.Namespace) -> int:
    """Grade a folder and write the tables. Raises ``ValueError`` for one that cannot be written."""
    folder, book = Path(args.folder), opened(args)
    reports = Path(args.reports) if args.reports else None
    files = submissions(folder)  # before anything is made
    if reports:
        can_write(reports / "report.txt")
    seed = book.seed = SEED if book.seed is None else book.seed
    before = book.remembered()
    again = {*(args.students or ())}
    known = {r.digest: r.verdict for r in [*book.rows, *before] if r.digest and not again}
    if before and not again:
        say(f"{book.unfinished}: {len(before)} verdicts of a run that was interrupted count")
    rows: list[Row] = []
    started, total = time.perf_counter(), 0
    try:
        with tqdm(unit="file", disable=args.quiet) as bar:
            for total, row in grade(
                folder, args.exercises, seed, args.seconds, args.jobs, args.students, known
            ):
                bar.total = total
                bar.update()
                rows.append(row)
                if row.digest and row.digest not in known:
                    book.remember(row)
    except KeyboardInterrupt:
        print(
            f"interrupted: {len(rows)} of {total} rows are done. The same command goes on from "
            f"there: their verdicts are in {book.unfinished}",
            file=sys.stderr,
        )
        return 130
    present = {s: [p.relative_to(folder).as_posix() for p in paths] for s, paths in files.items()}
    book.rows = merged(book.rows, rows, present)
    try:
        book.write()
    except OSError as error:  # hours of work, and now the disk is full
        say(book.text())
        raise ValueError(
            f"cannot write {book.table}: {error.strerror}; the table is above"
        ) from error
    if not before or not again:
        book.unfinished.unlink(missing_ok=True)
    if reports:
        write_reports([s for s in book.lines() if s.name in files], book.due, reports)
    say(summary(rows))
    tell(book, folder)
    students = len({row.student for row in rows})
    seconds = time.perf_counter() - started
    print(f"students: {students}, rows: {len(rows)}, {seconds:.1f} s, seed {seed}: {book.table}")
    return 0


def opened(args: argparse.Namespace) -> Book:
    """The tables as they are. Raises ``ValueError``, before the work, for what cannot be written or
    should not be."""
    folder, book = Path(args.folder), Book(Path(args.csv))
    if book.table.is_dir():
        raise ValueError(f"--csv {book.table} is a folder; it must be a file")
    if book.table.suffix.lower() == ".json":
        raise ValueError(f"--csv {book.table} must not end in .json, which is written beside it")
    reports = Path(args.reports) if args.reports else None
    if reports and reports.exists() and not reports.is_dir():
        raise ValueError(f"--reports {reports} is a file; it must be a folder")
    if reports and folder.resolve() in reports.resolve().parents:
        raise ValueError(f"--reports {reports} is in {folder}: the next run would grade it")
    there = book.existing()
    if there and not args.update and not args.students:
        raise ValueError(
            f"{there[0]} is there already. --update keeps what is in it, your own columns too, and "
            "grades what is new or changed. Or name another file with --csv"
        )
    book.read()
    if book.seed not in (None, args.seed) and args.seed is not None:
        raise ValueError(f"{book.all} has seed {book.seed}: one seed for a class, not two")
    book.seed = args.seed if book.seed is None else book.seed
    book.due = args.due or book.due
    for path in (book.table, book.students, book.all, book.unfinished):
        can_write(path)
    return book


def tell(book: Book, folder: Path) -> None:
    """What a teacher should know beside the grades."""
    names = {path.name for path in (book.table, book.students, book.all)}
    others = [p.name for p in sorted(folder.iterdir()) if p.is_file() and p.name not in names
              and p.suffix.lower() not in SUFFIXES and not p.name.startswith(".")]  # fmt: skip
    if others:
        say(f"not graded, because neither .py nor .ipynb: {', '.join(others)}")
    if strangers := book.strangers():
        say(f"{book.students}: nobody is called {', '.join(strangers)}; what you wrote is kept")
    for name, own in book.own.items():
        if (cell := own.get("manual", "")).strip() and points(cell) is None:
            say(f"{book.students}: {name} has {cell!r} for points, which is no number")
    if not can_seal():
        say("This system does not let a process be shut in: submitted code could use the network "
            "and delete files. The teacher's guide has a command for a container.")  # fmt: skip


def can_write(path: Path) -> None:
    """Raises ``ValueError`` if a file cannot be written: to be known before the work, not after
    it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():  # on Windows a spreadsheet keeps it to itself
            path.open("r+b").close()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


def due_date(text: str) -> str:
    """The value of --due: a date, or a date and a time."""
    try:
        found = datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no date as 2026-11-05T18:00") from None
    return found.isoformat(timespec="minutes") if ":" in text else found.date().isoformat()


def within(kind: Callable[[str], Any], low: float, high: float) -> Callable[[str], Any]:
    """An option's value that must be a number between two others."""

    def number(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if low <= (value := kind(text)) <= high:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")

    return number


SEEDS = within(int, 0, 2**32)
SECONDS = within(float, 0.1, 86400)


def add_options(p: argparse.ArgumentParser) -> None:
    """The options of the command."""
    p.add_argument("folder", type=not_empty, help="with a file or a folder for each student")
    p.add_argument("--csv", type=not_empty, required=True, help="the table to write")
    p.add_argument("--reports", type=not_empty, help="folder for a page and a text a student")
    p.add_argument("--update", action="store_true", help="grade what is new, keep all the rest")
    p.add_argument("--exercises", nargs="+", metavar="NAME", help="default: all that any file has")
    p.add_argument("--students", nargs="+", metavar="NAME", help="grade these again, nobody else")
    p.add_argument("--due", type=due_date, help="a date, for days late; needs folders by date")
    p.add_argument("--seed", type=SEEDS, help=f"the same for all; default: {SEED}")
    p.add_argument("--seconds", type=SECONDS, default=10.0, help="for one file and exercise; 10")
    p.add_argument(
        "--jobs", type=within(int, 1, 1000), help="processes at a time; default: all processors"
    )
    p.add_argument("--quiet", action="store_true", help="no progress bar")
