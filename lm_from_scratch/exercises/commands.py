"""Commands of a student and a teacher: check, watch, hint, solution, list, next, start, grade."""

import argparse
import contextlib
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lm_from_scratch.commands.options import not_empty
from lm_from_scratch.exercises import progress
from lm_from_scratch.exercises.child import Child, Job, Verdict, start_method, verdict
from lm_from_scratch.exercises.exercise import Exercise, drafts, exercise, exercises
from lm_from_scratch.exercises.grade import (
    SEED,
    SUFFIXES,
    Row,
    csv_text,
    grade,
    submissions,
    summary,
    write_reports,
)
from lm_from_scratch.exercises.progress import write_text
from lm_from_scratch.exercises.report import examine
from lm_from_scratch.exercises.source import script, solution, title

#: Where a file without a name is looked for: beside you, and where `make lab` puts the notebooks.
#:
#: :meta hide-value:
PLACES = (Path("."), Path("build/notebooks/exercises"))
Stamp = tuple[int, int, int]
POLL = 0.25  # seconds: editors and network drives do not always report a change


def find_file(name: str, given: str | None) -> Path:
    """The student's file; Raises ``ValueError`` that says where it was looked for."""
    if given is not None:
        path = Path(given)
        if not path.is_file():
            raise ValueError(
                f"there is no file {path}; python -m lm_from_scratch start {name} {path}"
            )
        return path
    names = [f"{name}.py", f"{name}.ipynb"]
    found = [place / file for place in PLACES for file in names if (place / file).is_file()]
    if not found:
        raise ValueError(
            f"there is no {names[0]} and no {names[1]} here; name the file, or begin with: "
            f"python -m lm_from_scratch start {name}"
        )
    return max(found, key=lambda path: path.stat().st_mtime)


def check_command(args: argparse.Namespace) -> int:
    """Check a file; the exit code is 0 only if all cases pass."""
    wanted = exercise(args.name)
    file = find_file(wanted.name, args.file)
    found = verdict(Job(file, wanted.name, args.seed, args.case), args.seconds)
    show(found, args)
    return 0 if found.passed else 1


def show(found: Verdict, args: argparse.Namespace) -> None:
    """Print a report and keep its result."""
    say(found.text)
    if args.case is None and not progress.keep(
        found.exercise, found.points, found.passed, args.seed
    ):
        print(f"This is not kept: {progress.path()} cannot be written.", flush=True)


def watch_command(args: argparse.Namespace) -> int:
    """Check again after every save, until Ctrl-C."""
    wanted = exercise(args.name)
    file = find_file(wanted.name, args.file)
    warm(wanted)
    print(f"Watching {file}. Enter checks again, Ctrl-C ends.", flush=True)
    try:
        while True:
            now = stamp(file)
            if now is not None:
                report(wanted, file, args, now)
            while stamp(file) in (now, None) and not entered():
                pass
    except KeyboardInterrupt:
        print()
    return 0


def report(wanted: Exercise, file: Path, args: argparse.Namespace, now: Stamp) -> None:
    """One check in a child, so that no loop or crash ends the watch. A save ends it: what it would
    say is about another text."""
    child = Child(Job(file, wanted.name, args.seed, args.case), args.seconds)
    try:
        while not child.is_done():
            if stamp(file) not in (now, None):
                return
            child.pipe.poll(POLL)
        found = child.result()
    finally:
        child.end()
    print(f"\n{time.strftime('%H:%M:%S')}")
    show(found, args)
    if found.passed:
        following = next_exercise()
        if following:
            print(f"Next: {following.name} ({plain_title(following)})", flush=True)


def say(text: str) -> None:
    """Print what a student's code may have made: not every console has every character."""
    coding = sys.stdout.encoding or "utf-8"
    print(text.encode(coding, "backslashreplace").decode(coding), flush=True)


def warm(wanted: Exercise) -> None:
    """Run the reference once, so that a child has all it needs in memory."""
    if start_method() == "fork":
        examine(wanted, wanted.reference)


def stamp(file: Path) -> Stamp | None:
    """What changes when a file is saved; None while an editor replaces it."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def entered() -> bool:
    """Wait a moment; whether Enter was pressed in it."""
    if os.name == "nt" or not sys.stdin or sys.stdin.closed:
        time.sleep(POLL)
        return False
    try:
        readable = bool(select.select([sys.stdin], [], [], POLL)[0])
    except (OSError, ValueError):  # no input at all
        time.sleep(POLL)
        return False
    if readable and not sys.stdin.readline():  # the end of the input
        time.sleep(POLL)
        return False
    return readable


def hint_command(args: argparse.Namespace) -> int:
    """The next hint; each request shows one more."""
    wanted = exercise(args.name)
    hints = wanted.hints
    seen = int(progress.number(progress.load().get(wanted.name, {}).get("hints")))
    seen = len(hints) if args.all else min(max(seen, 0) + 1, len(hints))
    everything = args.all
    if not progress.update(wanted.name, hints=seen):  # without it, this would be the first for ever
        print(f"{progress.path()} cannot be written: here are all hints.")
        everything, seen = True, len(hints)
    for number in range(1 if everything else seen, seen + 1):
        print(f"hint {number} of {len(hints)}: {hints[number - 1]}")
    if seen == len(hints):
        print(f"This was the last one. Then: python -m lm_from_scratch solution {wanted.name}")
    return 0


def solution_command(args: argparse.Namespace) -> int:
    """The solution: after the exercise is solved, or when it is asked for again."""
    wanted = exercise(args.name)
    known = progress.load().get(wanted.name, {})
    first = not known.get("passed") and not progress.number(known.get("asked"))
    if first and progress.update(wanted.name, asked=1):
        left = len(wanted.hints) - int(progress.number(known.get("hints")))
        hints = f"Hints left: {left} (python -m lm_from_scratch hint {wanted.name}). "
        print(f"{wanted.name} is not solved yet. {hints if left > 0 else ''}Ask again to see it.")
        return 1
    print(solution(wanted.name), end="")
    return 0


def list_command(args: argparse.Namespace) -> int:
    """All exercises with what is done."""
    known = progress.load()
    chapter = None
    for found in exercises():
        folder, _, _ = found.page.partition("/")
        if folder != chapter:
            chapter = folder
            print(folder)
        print(row(found, known))
    if waiting := drafts():
        print("drafts, whose checks are not proved and may be wrong")
        print("\n".join(row(found, known) for found in waiting))
    done = sum(bool(known.get(found.name, {}).get("passed")) for found in exercises())
    kept = f"Kept in {progress.path()}" if progress.path().is_file() else "Nothing is kept yet"
    print(f"{done} of {len(exercises())} done; * is easy, *** is hard. {kept}.")
    return 0


def row(found: Exercise, known: dict[str, dict[str, Any]]) -> str:
    """An exercise in a line, with what is done of it."""
    entry = known.get(found.name, {})
    points = progress.number(entry.get("points"))
    mark = "done" if entry.get("passed") else f"{points:g}/{found.points}" if points else "-"
    stars = "*" * found.difficulty
    return f"  {mark:>5}  {found.name:<24} {stars:<3} {found.minutes:>3} min  {plain_title(found)}"


def plain_title(found: Exercise) -> str:
    """The heading of an exercise, without marks of code."""
    return title(found.name).replace("`", "")


def next_exercise() -> Exercise | None:
    """The first exercise of the path that is not solved."""
    known = progress.load()
    return next((e for e in exercises() if not known.get(e.name, {}).get("passed")), None)


def next_command(args: argparse.Namespace) -> int:
    """What to do now."""
    found = next_exercise()
    if found is None:
        print("All exercises are done.")
        return 0
    print(
        f"{found.name}: {plain_title(found)} ({found.minutes} minutes, after the page {found.page})"
    )
    print(f"python -m lm_from_scratch start {found.name}")
    return 0


def start_command(args: argparse.Namespace) -> int:
    """Write the exercise as a script to work in.

    Raises ``ValueError`` for a file that is there already.
    """
    wanted = exercise(args.name)
    path = Path(args.file or f"{wanted.name}.py")
    if path.suffix != ".py":
        raise ValueError(f"{path} must end in .py; notebooks come from: make lab")
    if path.exists():
        raise ValueError(f"{path} exists already; remove it, or name another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    progress.write_text(path, script(wanted.name))
    print(f"Write in {path}, then: python -m lm_from_scratch check {wanted.name} {path}")
    return 0


def grade_command(args: argparse.Namespace) -> int:
    """Grade a folder and write the table."""
    folder, out = Path(args.folder), Path(args.csv)
    reports = Path(args.reports) if args.reports else None
    if out.is_dir():
        raise ValueError(f"--csv {out} is a folder; it must be a file")
    if reports and reports.exists() and not reports.is_dir():
        raise ValueError(f"--reports {reports} is a file; it must be a folder")
    if reports and folder.resolve() in reports.resolve().parents:
        raise ValueError(f"--reports {reports} is in {folder}: the next run would grade it")
    submissions(folder)  # before anything is made
    can_write(out)
    if reports:
        can_write(reports / "report.txt")
    rows: list[Row] = []
    started = time.perf_counter()
    code = 0
    try:
        with tqdm(unit="row", disable=args.quiet) as bar:
            for total, row in grade(folder, args.exercises, args.seed, args.seconds, args.jobs):
                bar.total = total
                bar.update()
                rows.append(row)
    except KeyboardInterrupt:
        if not rows:
            raise
        code, out, reports = 130, out.with_name(f"{out.stem}-unfinished{out.suffix}"), None
        print(f"interrupted: {len(rows)} of {total} rows", file=sys.stderr)
    try:
        write_text(out, csv_text(rows))
    except OSError as error:  # hours of work, and now the disk is full
        say(csv_text(rows))
        raise ValueError(f"cannot write {out}: {error.strerror}; the table is above") from error
    if reports:
        write_reports(rows, reports)
    say(summary(rows))
    others = [p.name for p in sorted(folder.iterdir()) if p.is_file() and p.name != out.name
              and p.suffix.lower() not in SUFFIXES and not p.name.startswith(".")]  # fmt: skip
    if others:
        say(f"not graded, because neither .py nor .ipynb: {', '.join(others)}")
    students = len({row.student for row in rows})
    seconds = time.perf_counter() - started
    print(f"students: {students}, rows: {len(rows)}, {seconds:.1f} s, seed {args.seed}: {out}")
    return code


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


def add_commands(commands: Any, keep: Any) -> None:
    """Add the commands to those of the package."""

    def add(name: str, run: Any, text: str, **options: Any) -> argparse.ArgumentParser:
        p = commands.add_parser(name, help=text, description=text + ".", **options)
        p.set_defaults(run=run)
        return p

    for name, run, text in (
        ("check", check_command, "check your answer to an exercise"),
        ("watch", watch_command, "check it again after every save"),
    ):
        p = add(name, run, text)
        p.add_argument("name", help="of the exercise; list shows all")
        p.add_argument("file", nargs="?", help="script or notebook; default: NAME.py or .ipynb")
        p.add_argument("--seed", type=SEEDS, default=0, help="other numbers; default: 0")
        p.add_argument("--case", type=int, help="one case alone, with all that your code prints")
        p.add_argument(
            "--seconds", type=SECONDS, default=20.0, help="of processor time; default: 20"
        )
    p = add("hint", hint_command, "show the next hint of an exercise")
    p.add_argument("name", help="of the exercise")
    p.add_argument("--all", action="store_true", help="all hints at once")
    p = add("solution", solution_command, "show a solution: when solved, or asked for twice")
    p.add_argument("name", help="of the exercise")
    add("list", list_command, "list all exercises and what is done")
    add("next", next_command, "say which exercise comes next")
    p = add("start", start_command, "write an exercise as a script to work in")
    p.add_argument("name", help="of the exercise")
    p.add_argument("file", nargs="?", help="default: NAME.py")

    p = add(
        "grade",
        grade_command,
        "grade a folder of submissions",
        formatter_class=keep,
        epilog="""FOLDER/student/.../file or FOLDER/student.ipynb; scripts and notebooks, any names.
A student's functions run in processes of their own, with limits on time, memory and files. This
stops accidents, not attacks: run the code of people you do not trust in a container.

examples
  python -m lm_from_scratch grade submitted --csv grades.csv
  python -m lm_from_scratch grade submitted --csv grades.csv --reports feedback --exercises rope
""",
    )
    p.add_argument("folder", type=not_empty, help="with a file or a folder for each student")
    p.add_argument("--csv", type=not_empty, required=True, help="the table to write")
    p.add_argument("--reports", type=not_empty, help="folder for a text for each student")
    p.add_argument("--exercises", nargs="+", metavar="NAME", help="default: all that any file has")
    p.add_argument("--seed", type=SEEDS, default=SEED, help=f"the same for all; default: {SEED}")
    p.add_argument("--seconds", type=SECONDS, default=10.0, help="for one file and exercise; 10")
    p.add_argument(
        "--jobs", type=within(int, 1, 1000), help="processes at a time; default: all processors"
    )
    p.add_argument("--quiet", action="store_true", help="no progress bar")
