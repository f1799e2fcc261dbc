"""Every exercise as a notebook and as a script, for students and for teachers.

The same source gives the same bytes: ids of cells are hashes, and no time is stored. `hand_out.py`
writes the files, `exercise_pages.py` the pages of the site.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gallery
import nbformat
import page
import rst

from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import Exercise
from lm_from_scratch.exercises.exercise import exercises as written
from lm_from_scratch.exercises.source import Cell

TITLE = "11. Exercises"
INTRO = (
    "Write the central functions yourself, and fix bugs that real projects have had. A check says "
    "what is wrong first, and which misconception it looks like."
)
DIFFICULTY = {1: "easy", 2: "medium", 3: "hard"}


def of_page(page: str) -> list[Exercise]:
    """The exercises that belong to a page "CHAPTER/NAME"."""
    return [found for found in written() if found.page == page]


def by_chapter() -> dict[str, list[Exercise]]:
    """The exercises by the title of the chapter to whose pages they belong."""
    found = {
        title: [one for one in written() if one.page in names]
        for title, names in gallery.by_chapter().items()
    }
    return {title: members for title, members in found.items() if members}


def before(found: Exercise) -> list[Exercise]:
    """The exercises that an exercise builds on."""
    return [other for other in written() if other.name in found.after]


def title(found: Exercise) -> str:
    """The title for links, in which backticks cannot stand."""
    return source.title(found.name).replace("`", "")


def link(found: Exercise) -> str:
    return f"{{doc}}`{title(found)} </exercises/{found.name}>`"


rst.PAGES.filters |= {
    "document": gallery.document,
    "in_words": page.in_words,
    "link": link,
    "minutes": page.minutes,
    "title": title,
}
rst.PAGES.tests["lesson"] = gallery.is_lesson


# -- the notebooks ---------------------------------------------------------------------------


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
    role = "solution" if cell.is_solution else "check" if cell.is_check else f"text-{number}"
    tags: dict[str, Any] = {
        "cell_type": cell.kind,
        "grade": cell.is_check,
        "grade_id": f"{found.name}-{role}",
        "locked": not cell.is_solution,
        "schema_version": 3,
        "solution": cell.is_solution,
        "task": False,
    }
    return {"nbgrader": tags | ({"points": found.points} if cell.is_check else {})}


def notebook(found: Exercise, text: Callable[[Cell], str]) -> dict[str, Any]:
    """An exercise as a notebook; `text` says what stands in its cells."""
    make = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}
    cells = []
    for number, cell in enumerate(source.source(found.name)):
        identity = hashlib.sha256(f"{found.name} {number}".encode()).hexdigest()[:8]
        metadata = grading(found, cell, number)
        cells.append(make[cell.kind](text(cell), id=identity, metadata=metadata))
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


# -- the files -------------------------------------------------------------------------------


def student_files() -> dict[Path, str]:
    """What a student gets: a notebook and a script of each exercise."""
    texts = {}
    for found in written():
        texts[Path(f"{found.name}.ipynb")] = dump(notebook(found, as_student))
        texts[Path(f"{found.name}.py")] = source.script(found.name)
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
