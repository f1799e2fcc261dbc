"""The page that proves the checks of the exercises, from the stored proofs.

A proof is in the folder of its exercise, the answers of a second person are in
`tests/slow/exercise_proof`. Tests compute both again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import exercise_pages  # noqa: F401 - whose filters the page uses
import exercises
import gallery
import rst

from lm_from_scratch.exercises.exercise import folder


def stored() -> dict[str, dict[str, Any]]:
    """The stored proofs by exercise, in the order of the learning path."""
    return {
        one.name: json.loads((folder(one.name) / "proof.json").read_text(encoding="utf-8"))
        for one in exercises.written()
    }


def totals(tables: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums over all exercises."""
    named = [wrong["named"] for table in tables for wrong in table["wrong"]]
    seeds = {
        kind: sorted({table[f"{kind} seeds"] for table in tables}) for kind in ("right", "wrong")
    }
    return {
        "exercises": len(tables),
        "cases": sum(len(table["cases"]) for table in tables),
        "wrong": len(named),
        "named": named.count("named"),
        "errors": named.count("error"),
        "alike": len(named) - named.count("named") - named.count("error"),
        "right": sum(len(table["right"]) for table in tables),
        "mutants": sum(table["mutants"] for table in tables),
        "killed": sum(table["killed"] for table in tables),
        "explained": sum(len(table["explained"]) for table in tables),
        "right_runs": sum(len(table["right"]) * table["right seeds"] for table in tables),
        "right_seeds": spans(seeds["right"]),
        "wrong_seeds": spans(seeds["wrong"]),
    }


def spans(numbers: list[int]) -> str:
    return " to ".join(str(n) for n in dict.fromkeys([*numbers[:1], *numbers[-1:]])) or "0"


def strip(wrong: dict[str, Any], table: dict[str, Any]) -> str:
    """The checks in a row: the number of each that rejects, a dot for each that accepts."""
    marks = []
    for number in range(1, len(table["cases"]) + 1):
        mark = str(number) if number < 10 else chr(ord("a") + number - 10)
        mark = mark if number in wrong["rejected by"] else "·"
        marks.append(f"[{mark}]" if number == wrong["case"] else mark)
    return "".join(marks)


rst.PAGES.filters["strip"] = strip


def proof() -> str:
    tables = stored()
    path = gallery.ROOT / "tests/slow/exercise_proof/second_person/diagnosis.json"
    answers = json.loads(path.read_text(encoding="utf-8")).values()
    kinds = [kind for told in answers for kind in told.values()]
    return rst.render(
        "proof.md",
        n=totals(list(tables.values())),
        tables=[(found, tables[found.name]) for found in exercises.written()],
        kinds=kinds,
        planted=len(kinds) - kinds.count("unplanted"),
    )


def write(app: Any) -> None:
    rst.write({Path(app.srcdir) / "exercises" / "proof.md": proof()})


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
