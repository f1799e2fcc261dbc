"""The chapter of exercises: a page for each, their index, and the proof of their checks.

Everything is made from the sources, the catalogue and the stored proofs, which tests compute again.
Nothing on these pages is run, and no solution is on them: what is shown is what `exercises.py`
gives to a student.
"""

import json
import re
from string import ascii_lowercase
from typing import Any

import exercises
import gallery
import museum
import rst

from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import Exercise, folder


def kind(found: Exercise) -> str:
    if found.hunt:
        return f"bug hunt ({museum.with_links(found.hunt)})"
    return "kernel" if found.key[0] == 9 else "write"


def text(given: str) -> str:
    """A sentence of the catalogue in Markdown: only what stands in backticks is marked up."""
    parts = re.split(r"(`[^`]*`)", given)
    return "".join(
        p if i % 2 else re.sub(r"([\\*_$\[\]<>|])", r"\\\1", p) for i, p in enumerate(parts)
    )


def strip(wrong: dict[str, Any], table: dict[str, Any]) -> str:
    """The checks in a row: the number of each that rejects, a dot for each that accepts."""
    marks = []
    for number, name in enumerate(("123456789" + ascii_lowercase)[: len(table["cases"])], start=1):
        mark = name if number in wrong["rejected by"] else "·"
        marks.append(f"[{mark}]" if number == wrong["case"] else mark)
    return "".join(marks)


rst.PAGES.filters |= {
    "as_student": exercises.as_student,
    "kind": kind,
    "lower_first": lambda sentence: sentence[:1].lower() + sentence[1:],
    "upper_first": lambda sentence: sentence[:1].upper() + sentence[1:],
    "mistake": lambda found: text(museum.with_links(found.hunt)),
    "strip": strip,
    "text": text,
    "without_title": lambda markdown: re.sub(r"\A# .*\n+", "", markdown),
}


def page(found: Exercise) -> str:
    return rst.render("exercise.md", found=found, exercises=exercises, source=source)


# -- the proof -------------------------------------------------------------------------------


def stored() -> dict[str, dict[str, Any]]:
    """The stored proofs by exercise, in the order of the learning path."""
    return {
        one.name: json.loads((folder(one.name) / "proof.json").read_text(encoding="utf-8"))
        for one in exercises.written()
    }


def proof() -> str:
    """The page on the proofs; the answers of a second person are in `tests/slow/exercise_proof`."""
    path = gallery.ROOT / "tests/slow/exercise_proof/second_person/diagnosis.json"
    answers = json.loads(path.read_text(encoding="utf-8")).values()
    proofs = stored()
    return rst.render(
        "proof.md",
        tables=[(found, proofs[found.name]) for found in exercises.written()],
        proofs=list(proofs.values()),
        wrong=[wrong["named"] for table in proofs.values() for wrong in table["wrong"]],
        right_runs=sum(len(table["right"]) * table["right seeds"] for table in proofs.values()),
        kinds=[kind for told in answers for kind in told.values()],
    )
