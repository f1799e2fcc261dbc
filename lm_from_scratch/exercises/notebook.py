"""An exercise as a notebook: for students with a hole, for teachers with solution or marks.

The same source gives the same bytes: ids of cells are hashes, and no time is stored.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import Exercise
from lm_from_scratch.exercises.source import Cell

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def as_source(cell: Cell) -> str:
    """A cell as the author wrote it: solution and hidden tests between nbgrader's markers."""
    return cell.text


def as_student(cell: Cell) -> str:
    """A cell as a student gets it."""
    return source.student(cell.text).rstrip("\n")


def as_solution(cell: Cell) -> str:
    """A cell with the solution, without markers; the hidden tests are left out."""
    return source.HIDDEN.sub("", source.solved(cell.text)).rstrip("\n")


def notebook(exercise: Exercise, text: Callable[[Cell], str] = as_student) -> dict[str, Any]:
    """An exercise in the format of Jupyter, version 4.5; `text` says what stands in its cells."""
    cells: list[dict[str, Any]] = []
    for number, cell in enumerate(source.source(exercise.name)):
        record = {
            "cell_type": cell.kind,
            "id": hashlib.sha256(f"{exercise.name} {number}".encode()).hexdigest()[:8],
            "metadata": grading(exercise, cell, number),
            "source": text(cell).splitlines(keepends=True),
        }
        cells.append(record | ({"execution_count": None, "outputs": []} if cell.is_code else {}))
    return {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def grading(exercise: Exercise, cell: Cell, number: int) -> dict[str, Any]:
    """What nbgrader wants to know about a cell. It finds cells by their `grade_id`."""
    role = "solution" if cell.is_solution else "check" if cell.is_check else f"text-{number}"
    tags: dict[str, Any] = {
        "cell_type": cell.kind,
        "grade": cell.is_check,
        "grade_id": f"{exercise.name}-{role}",
        "locked": not cell.is_solution,
        "schema_version": 3,
        "solution": cell.is_solution,
        "task": False,
    }
    return {"nbgrader": tags | ({"points": exercise.points} if cell.is_check else {})}


def dump(record: dict[str, Any]) -> str:
    """A notebook as the text of its file."""
    return json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
