"""Every exercise as notebooks: `python docs/exercises.py FOLDER [WEEKS]`.

An exercise has one source, `text.py` in its folder of the catalogue. From it come

    FOLDER/student/NAME.ipynb, NAME.py   with a hole where the solution was
    FOLDER/solution/NAME.ipynb           with the solution
    FOLDER/nbgrader/                     a course folder for nbgrader's own command line

An assignment of nbgrader is a chapter, or with WEEKS a week of the teacher's plan of that length.

The same source gives the same bytes: ids of cells are hashes, and no time is stored. The site pages
come from the same source, in `exercise_pages.py`.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gallery
import nbformat

sys.path.insert(0, str(gallery.ROOT))
from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import Exercise
from lm_from_scratch.exercises.exercise import exercises as catalogue
from lm_from_scratch.exercises.source import Cell

#: nbgrader gives 0 to a cell that wrote to stderr, unless what it wrote contains this pattern.
CONFIG = """c = get_config()

c.CourseDirectory.course_id = "lm_from_scratch"
c.Execute.timeout = 60  # seconds a cell may take; the default is 30

# A warning on stderr is not a wrong answer. Both lines are needed.
c.IgnorePattern.enabled = True
c.IgnorePattern.pattern = ".*([Ww]arning|NNPACK|cpuinfo).*"
"""


def written() -> list[Exercise]:
    """All exercises in the order of the learning path."""
    return list(catalogue())


def as_source(cell: Cell) -> str:
    """A cell as the author wrote it: solution and hidden tests between nbgrader's markers."""
    return cell.text


def as_student(cell: Cell) -> str:
    """A cell as a student gets it."""
    return source.student(cell.text).rstrip("\n")


def as_solution(cell: Cell) -> str:
    """A cell with the solution, without markers; the hidden tests are left out."""
    return source.HIDDEN.sub("", source.solved(cell.text)).rstrip("\n")


def grading(found: Exercise, cell: Cell, number: int) -> dict[str, Any]:
    """What nbgrader wants to know about a cell. It finds cells by `grade_id`, not by place."""
    role, grade, answer = f"text-{number}", cell.is_check, cell.is_solution
    if answer or grade:
        role = "solution" if answer else "check"
    tags: dict[str, Any] = {
        "cell_type": "markdown" if cell.kind == "markdown" else "code",
        "grade": grade,
        "grade_id": f"{found.name}-{role}",
        "locked": not answer,
        "schema_version": 3,
        "solution": answer,
        "task": False,
    }
    if grade:
        tags["points"] = found.points
    return {"nbgrader": tags}


def notebook(found: Exercise, text: Callable[[Cell], str]) -> dict[str, Any]:
    """An exercise as a notebook; `text` says what stands in its cells."""
    cells = []
    for number, cell in enumerate(source.source(found.name)):
        identity = hashlib.sha256(f"{found.name} {number}".encode()).hexdigest()[:8]
        metadata = grading(found, cell, number)
        make = nbformat.v4.new_markdown_cell
        if cell.kind == "code":
            make = nbformat.v4.new_code_cell
        cells.append(make(text(cell), id=identity, metadata=metadata))
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    made = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    made.nbformat_minor = 5
    nbformat.validate(made)
    return json.loads(nbformat.writes(made))


def dump(made: dict[str, Any]) -> str:
    return json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def name(found: Exercise) -> Path:
    """Where a student's notebook lies, relative to the folder of all notebooks."""
    return Path("exercises") / f"{found.name}.ipynb"


def assignments(weeks: int | None = None) -> dict[str, str]:
    """The assignment of nbgrader that an exercise is in: its chapter, or its week of a plan.

    `weeks` is the length of the plan. What the plan leaves out is in the assignment `more`.
    Raises `ValueError` for a length that no plan has.
    """
    if weeks is None:
        return {found.name: f"chapter_{found.key[0]}" for found in written()}
    import teaching  # which imports this file

    if weeks not in teaching.PLANS:
        known = " and ".join(map(str, teaching.PLANS))
        raise ValueError(f"WEEKS={weeks}: the teacher's guide has plans of {known} weeks")
    named = {found.name: "more" for found in written()}
    for number, members in enumerate(teaching.plan(*teaching.PLANS[weeks]), start=1):
        named |= {found.name: f"week_{number:02d}" for found in members}
    return named


def student_files() -> dict[Path, str]:
    """What a student gets: a notebook and a script of each exercise."""
    texts = {}
    for found in written():
        texts[Path(f"{found.name}.ipynb")] = dump(notebook(found, as_student))
        texts[Path(f"{found.name}.py")] = source.script(found.name)
    return texts


def files(weeks: int | None = None) -> dict[Path, str]:
    """Everything that the command writes."""
    assignment = assignments(weeks)
    texts = {"student" / path: text for path, text in student_files().items()}
    for found in written():
        texts[Path("solution") / f"{found.name}.ipynb"] = dump(notebook(found, as_solution))
        folder = Path("nbgrader") / "source" / assignment[found.name]
        texts[folder / f"{found.name}.ipynb"] = dump(notebook(found, as_source))
    texts[Path("nbgrader") / "nbgrader_config.py"] = CONFIG
    return texts


def archive(texts: dict[Path, str]) -> bytes:
    """A zip of files, the same bytes for the same texts."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for path, text in sorted(texts.items()):
            entry = zipfile.ZipInfo(path.as_posix(), (2026, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(entry, text)
    return stream.getvalue()


def main() -> None:
    if len(sys.argv) not in (2, 3) or not all(text.isdecimal() for text in sys.argv[2:]):
        sys.exit("usage: python docs/exercises.py FOLDER [WEEKS]")
    folder = Path(sys.argv[1])
    weeks = int(sys.argv[2]) if len(sys.argv) == 3 else None
    try:
        assignments(weeks)
    except ValueError as error:
        sys.exit(str(error))
    texts = files(weeks)
    for path, text in texts.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    print(f"{len(written())} exercises, {len(texts)} files in {folder}")
    for kind in ("student", "solution", "nbgrader"):
        print(f"  {folder / kind}: {sum(path.parts[0] == kind for path in texts)} files")


if __name__ == "__main__":
    main()
