"""The command of a teacher: grade a folder of submissions."""

import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from lm_from_scratch.exercises.book import Book, merged
from lm_from_scratch.exercises.feedback import write_reports
from lm_from_scratch.exercises.grade import SEED, SUFFIXES, Row, grade, submissions
from lm_from_scratch.exercises.marks import points, summary
from lm_from_scratch.exercises.options import GradeOptions
from lm_from_scratch.exercises.report import say
from lm_from_scratch.exercises.seal import can_seal


def grade_command(options: GradeOptions) -> int:
    """Grade a folder and write the tables. Raises ``ValueError`` for one that cannot be written."""
    folder = Path(options.folder)
    files = submissions(folder)  # first: without any, nothing is written
    book = opened(options)
    reports = Path(options.reports) if options.reports else None
    if reports:
        make_writable(reports / "report.txt")
    seed = book.seed = SEED if book.seed is None else book.seed
    before = book.remembered()
    again = {*(options.students or ())}
    known = {r.digest: r.verdict for r in [*book.rows, *before] if r.digest and not again}
    if before and not again:
        say(f"{book.unfinished}: {len(before)} verdicts of a run that was interrupted count")
    rows: list[Row] = []
    started, total = time.perf_counter(), 0
    try:
        with tqdm(unit="file", disable=options.quiet) as bar:
            for total, row in grade(
                folder,
                options.exercises,
                seed,
                options.seconds,
                options.jobs,
                options.students,
                known,
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
    if not (before and again):  # else the interrupted run has more verdicts than these students'
        book.unfinished.unlink(missing_ok=True)
    if reports:
        write_reports([s for s in book.lines() if s.name in files], book.due, reports)
    say(summary(rows))
    tell(book, folder)
    n_students = len({row.student for row in rows})
    seconds = time.perf_counter() - started
    print(f"students: {n_students}, rows: {len(rows)}, {seconds:.1f} s, seed {seed}: {book.table}")
    return 0


def opened(options: GradeOptions) -> Book:
    """The tables as they are now. Checks all paths and options first; raises ``ValueError`` if one
    cannot be written, or would overwrite or mix results."""
    folder, book = Path(options.folder), Book(Path(options.csv))
    if book.table.is_dir():
        raise ValueError(f"--csv {book.table} is a folder; it must be a file")
    if book.table.suffix.lower() == ".json":
        raise ValueError(f"--csv {book.table} must not end in .json, which is written beside it")
    reports = Path(options.reports) if options.reports else None
    if reports and reports.exists() and not reports.is_dir():
        raise ValueError(f"--reports {reports} is a file; it must be a folder")
    if reports and folder.resolve() in reports.resolve().parents:
        raise ValueError(f"--reports {reports} is in {folder}: the next run would grade it")
    there = book.existing()
    if there and not options.update and not options.students:
        raise ValueError(
            f"{there[0]} is there already. --update keeps what is in it, your own columns too, and "
            "grades what is new or changed. Or name another file with --csv"
        )
    book.read()
    if book.seed not in (None, options.seed) and options.seed is not None:
        raise ValueError(f"{book.all} has seed {book.seed}: one seed for a class, not two")
    book.seed = options.seed if book.seed is None else book.seed
    book.due = options.due or book.due
    for path in (book.table, book.students, book.all, book.unfinished):
        make_writable(path)
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
        say("This system cannot sandbox a process: submitted code could use the network and "
            "delete files. The teacher's guide has a command for a container.")  # fmt: skip


def make_writable(path: Path) -> None:
    """Make the folder of a file. Raises ``ValueError`` if the file cannot be written: to be known
    before the work, not after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():  # on Windows a spreadsheet keeps it to itself
            path.open("r+b").close()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
