"""Grade a folder of submissions: every file, every exercise, nothing lost."""

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from lm_from_scratch.exercises.child import Child, Job, Verdict, ready
from lm_from_scratch.exercises.exercise import Exercise, drafts, exercise, exercises
from lm_from_scratch.exercises.progress import write_text
from lm_from_scratch.exercises.submission import Submission, read

SUFFIXES = (".py", ".ipynb")
LINK = "cannot be read: it is a link"
SEED = 7341  # other numbers than a student sees; the same for all students of a course
COLUMNS = ["student", "exercise", "points", "of", "passed", "failed", "looks like", "reason",
           "file", "seconds"]  # fmt: skip


@dataclass
class Row:
    """One student and one exercise."""

    student: str
    verdict: Verdict
    file: str = ""

    def cells(self) -> list[str]:
        """As in the CSV file."""
        v = self.verdict
        passed = "yes" if v.passed else "no"
        failed = "; ".join(v.failed)
        return [safe(self.student), v.exercise, f"{v.points:g}", f"{v.of:g}", passed, safe(failed),
                safe(v.wrong), safe(v.reason), safe(self.file), f"{v.seconds:.2f}"]  # fmt: skip


def safe(text: str) -> str:
    """A cell that no spreadsheet takes for a formula, on one line, of what can be printed."""
    text = " ".join(text.split())
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def submissions(folder: Path) -> dict[str, list[Path]]:
    """Files by student: FOLDER/student/.../file or FOLDER/student.file, scripts and notebooks.

    A link counts as a file, never as what it leads to, which may be another's. Raises
    ``ValueError`` if there are none.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__")):  # __MACOSX of a zip file, __pycache__
            continue
        if path.is_dir() and path.is_symlink():
            found.setdefault(path.name, []).append(path)
        elif path.is_dir():
            inside = (p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
            found[path.name] = sorted(
                p for p in inside if not any(x.startswith(".") for x in p.relative_to(path).parts)
            )
        elif path.suffix.lower() in SUFFIXES:
            found.setdefault(path.stem, []).append(path)
    if not found:
        raise ValueError(f"{folder} holds no .py or .ipynb file, and no folder with one")
    return found


def plan(
    files: dict[str, list[Path]], names: list[str] | None
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
            found = read(path) if not path.is_symlink() else Submission(path, problems=[LINK])
            if found.problems:
                said = f"{path.name}: {found.summary()}"
                problems[student] = "; ".join(filter(None, (problems.get(student), said)))
            if path.is_symlink():
                continue
            text = found.defined | found.imported | found.left_out
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
    names: list[str] | None = None,
    seed: int = SEED,
    seconds: float = 10.0,
    jobs: int | None = None,
) -> Iterator[tuple[int, Row]]:
    """Grade every student; yield (how many rows there are in all, one row), as they are done.

    * ``seconds``: of processor time for one file and exercise
    * ``jobs``: processes at a time; None takes the number of processors

    Where several files of a student define the function, the best one counts. ValueError if the
    folder holds nothing to grade.
    """
    files = submissions(folder)
    graded, given, problems = plan(files, names)
    pairs = [(student, e) for student in files for e in graded]
    queue = [(pair, path) for pair in pairs for path in given.get((pair[0], pair[1].name), [])]
    best: dict[tuple[str, str], Row] = {}
    left = Counter((student, e.name) for (student, e), _ in queue)
    for student, e in pairs:
        if not left[student, e.name]:
            reason = f"no file defines {e.function}"
            if student in problems:
                reason += f" ({problems[student][:500]})"
            text = f"{e.name}: {reason}"
            yield len(pairs), Row(student, Verdict(e.name, of=e.points, reason=reason, text=text))
    running: dict[Child, tuple[str, str, Path]] = {}
    try:
        while queue or running:
            while queue and len(running) < (jobs or os.cpu_count() or 1):
                (student, e), path = queue.pop(0)
                child = Child(Job(path, e.name, seed), seconds)
                running[child] = (student, e.name, path)
            for child in ready(list(running)):
                student, name, path = running.pop(child)
                row = Row(student, child.result(), path.relative_to(folder).as_posix())
                key = (student, name)
                known = best.get(key)  # of two with equal points the first by name
                if not known or (-row.verdict.points, row.file) < (
                    -known.verdict.points,
                    known.file,
                ):
                    best[key] = row
                left[key] -= 1
                if not left[key]:
                    yield len(pairs), best[key]
    finally:
        for child in running:
            child.end()


def csv_text(rows: list[Row]) -> str:
    """The table of all rows, by student and exercise."""
    text = io.StringIO("\ufeff", newline="")  # by which a spreadsheet knows that it is UTF-8
    text.seek(1)
    table = csv.writer(text)
    table.writerow(COLUMNS)
    table.writerows(row.cells() for row in ordered(rows))
    return text.getvalue()


def write_reports(rows: list[Row], folder: Path) -> None:
    """One text for each student: what the checks said about every exercise."""
    for student in sorted({row.student for row in rows}):
        own = [row for row in ordered(rows) if row.student == student]
        points, of = sum(r.verdict.points for r in own), sum(r.verdict.of for r in own)
        parts = [f"{student}: {points:g} of {of:g} points"]
        for row in own:
            parts.append(row.verdict.text + (f"\nfile: {row.file}" if row.file else ""))
        name = (
            student
            if len(os.fsencode(student)) < 200
            else f"{student[:40]}-{crc32(os.fsencode(student)):08x}"
        )
        write_text(folder / f"{name}.txt", "\n\n".join(parts) + "\n")


def ordered(rows: list[Row]) -> list[Row]:
    """By student, and then in the order of the learning path."""
    place = {e.name: n for n, e in enumerate([*exercises(), *drafts()])}
    return sorted(rows, key=lambda row: (row.student, place[row.verdict.exercise]))


def summary(rows: list[Row]) -> str:
    """For each exercise: who passed, the mean, and what most failed at: what to teach again."""
    lines = []
    for name in dict.fromkeys(row.verdict.exercise for row in ordered(rows)):
        own = [row.verdict for row in rows if row.verdict.exercise == name]
        mean = sum(v.points for v in own) / len(own)
        passed = sum(v.passed for v in own)
        lines.append(f"{name}: {passed} of {len(own)} passed, mean {mean:.1f} of {own[0].of:g}")
        failed = Counter(case for v in own for case in v.failed).most_common(3)
        lines += [f"  {count:>4} fail at {case}" for case, count in failed]
        wrong = Counter(v.wrong for v in own if v.wrong).most_common(3)
        lines += [f"  {count:>4} looks like: {label}" for label, count in wrong]
    return "\n".join(lines)
