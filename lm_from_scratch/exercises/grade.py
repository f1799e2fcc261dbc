"""Grade a folder of submissions: every file, every exercise, nothing lost."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from lm_from_scratch.exercises.card import folder as place_of
from lm_from_scratch.exercises.child import Child, Job, Verdict, held_signals, ready
from lm_from_scratch.exercises.exercise import Exercise, drafts, exercise, exercises
from lm_from_scratch.exercises.submission import LARGEST, Submission, read

SUFFIXES = (".py", ".ipynb")
EARLIER = "earlier"  # a folder for tables that were written again: nobody's
LINK = "cannot be read: it is a link"
SEED = 7341  # other numbers than a student sees; the same for all students of a course
#: A folder named by its date, as 2026-11-05, 2026-11-05_18-00 or "2026-11-05 second try".
#:
#: :meta hide-value:
DATED = re.compile(r"(\d{4}-\d\d-\d\d)(?:[T_ ](\d\d)[-:.h]?(\d\d))?(?!\d)")


@dataclass
class Row:
    """What one file of a student is worth in one exercise.

    * ``file``: below the folder of submissions; empty if there is none for this exercise
    * ``date``: of the folder that it is in, as 2026-11-05T18:00; empty if none has a date
    * ``digest``: of all that the verdict comes from: the file, the checks, the seed
    """

    student: str
    verdict: Verdict
    file: str = ""
    date: str = ""
    digest: str = ""


def date(name: str) -> str:
    """The date that the name of a folder begins with; empty if it has none."""
    if not (match := DATED.match(name)):
        return ""
    text = f"{match[1]}T{match[2] or '00'}:{match[3] or '00'}"
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return ""
    return text


def submissions(folder: Path) -> dict[str, list[Path]]:
    """Files by student, scripts and notebooks: FOLDER/student/.../file or FOLDER/student.file.

    A folder whose name is a date holds students: FOLDER/2026-11-05/student/file. A link counts as
    a file, never as what it leads to, which may be another's. Raises ``ValueError`` if there are
    none.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    files: dict[str, list[Path]] = {}
    for place in [folder, *(p for p in sorted(folder.iterdir()) if is_dated(p))]:
        for path in sorted(place.iterdir()):
            if path.name.startswith((".", "__")):  # __MACOSX of a zip file, __pycache__
                continue
            if path.is_dir() and path.is_symlink():
                files.setdefault(path.name, []).append(path)
            elif path.is_dir() and not is_dated(path):
                if path.name == EARLIER and not files_in(path):
                    continue
                files.setdefault(path.name, []).extend(files_in(path))
            elif not path.is_dir() and path.suffix.lower() in SUFFIXES:
                files.setdefault(path.stem, []).append(path)
    if not files:
        raise ValueError(f"{folder} holds no .py or .ipynb file, and no folder with one")
    return files


def is_dated(path: Path) -> bool:
    """Whether this is a folder with a date for its name."""
    return path.is_dir() and not path.is_symlink() and bool(date(path.name))


def files_in(path: Path) -> list[Path]:
    """Scripts and notebooks in the folder of a student, and below."""
    inside = (p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
    return sorted(
        p for p in inside if not any(x.startswith(".") for x in p.relative_to(path).parts)
    )


def plan(
    files: dict[str, list[Path]], names: Sequence[str] | None
) -> tuple[list[Exercise], dict[tuple[str, str], list[Path]], dict[str, str]]:
    """Which exercises are graded, in which files each student may have done them, and what could
    not be read of a student's files.

    Without names these are the exercises whose function any file defines, or whose name a file has:
    someone who submitted less than the others gets a row with 0 points for what is missing. Raises
    ``ValueError`` if nothing can be graded.
    """
    wanted = [exercise(name) for name in names] if names else [*exercises(), *drafts()]
    given: dict[tuple[str, str], list[Path]] = {}
    seen = set()
    problems: dict[str, str] = {}
    for student, paths in files.items():
        for path in paths:
            submission = read(path) if not path.is_symlink() else Submission(path, problems=[LINK])
            if submission.problems:
                problem = f"{path.name}: {submission.summary()}"
                problems[student] = "; ".join(filter(None, (problems.get(student), problem)))
            if path.is_symlink():
                continue
            text = submission.defined | submission.imported | submission.left_out
            for e in wanted:
                if e.function in text or path.stem == e.name:
                    given.setdefault((student, e.name), []).append(path)
                    seen.add(e.name)
    graded = wanted if names else [e for e in wanted if e.name in seen]
    if not graded:
        raise ValueError("no file defines the function of any exercise, or has its name")
    return graded, given, problems


def grade(
    folder: Path,
    names: Sequence[str] | None = None,
    seed: int = SEED,
    seconds: float = 10.0,
    jobs: int | None = None,
    students: Sequence[str] | None = None,
    known: Mapping[str, Verdict] | None = None,
) -> Iterator[tuple[int, Row]]:
    """Grade every file of every student; yield (how many rows there are in all, one row), as they
    are done. A student who has no file for an exercise has a row without one.

    * ``folder``: the folder of submissions
    * ``seconds``: of processor time for one file and exercise
    * ``jobs``: processes at a time; None takes the number of processors
    * ``students``: these alone, of all that the folder holds
    * ``known``: verdicts by the digest of their rows: what is there is not run again

    Raises ``ValueError`` if the folder holds nothing to grade.
    """
    files = submissions(folder)
    graded, given, problems = plan(files, names)
    if unknown := {*(students or ())} - files.keys():
        raise ValueError(f"{folder} holds nothing of {', '.join(sorted(unknown))}")
    rows: list[Row] = []
    queue: list[Row] = []
    for student, e in ((s, e) for s in students or files for e in graded):
        for path in given.get((student, e.name), []):
            inside = path.relative_to(folder)
            dates = [date(part) for part in inside.parts[:-1]]
            row = Row(student, Verdict(e.name), inside.as_posix(), next(filter(None, dates), ""),
                      digest(path, e, seed))  # fmt: skip
            if verdict := (known or {}).get(row.digest):
                rows.append(replace(row, verdict=verdict))
            else:
                queue.append(row)
        if (student, e.name) not in given:
            reason = f"no file defines {e.function}"
            if student in problems:
                reason += f" ({problems[student][:500]})"
            text = f"{e.name}: {reason}"
            rows.append(Row(student, Verdict(e.name, of=e.points, reason=reason, text=text)))
    total = len(rows) + len(queue)
    for row in rows:
        yield total, row
    running: dict[Child, Row] = {}
    try:
        while queue or running:
            while queue and len(running) < (jobs or os.cpu_count() or 1):
                row = queue.pop(0)
                job = Job(folder / row.file, row.verdict.exercise, seed)
                with held_signals():  # either it is not there, or it is among those to end
                    running[Child(job, seconds)] = row
            for child in ready(list(running)):
                yield total, replace(running.pop(child), verdict=child.result())
    finally:
        for child in running:
            child.end()


def digest(path: Path, e: Exercise, seed: int) -> str:
    """Of all that a verdict comes from; its name for a file that is not read."""
    parts = [e.name.encode(), b"%d" % seed, (place_of(e.name) / "checks.py").read_bytes()]
    if path.is_file() and path.stat().st_size <= LARGEST:
        parts.append(path.read_bytes())
    else:  # a pipe would be waited for
        parts.append(os.fsencode(path))
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
