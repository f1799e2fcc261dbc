"""The chapter of exercises: a page for each, their index, and the proof of their checks.

Everything is made from the sources and the catalogue. Nothing on these pages is run, and no
solution is on them: what is shown is what `exercises.py` gives to a student.
"""

import contextlib
import io
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from gallery import exercises, pages
from museum import cards
from sources import templates

from lm_from_scratch.exercises import playing, source
from lm_from_scratch.exercises.child import Job, verdict
from lm_from_scratch.exercises.exercise import Exercise, exercise
from lm_from_scratch.exercises.notebook import as_student
from lm_from_scratch.exercises.parts import part
from lm_from_scratch.exercises.play_class import Answers, Student, played


def kind(found: Exercise) -> str:
    if found.hunt:
        return f"bug hunt ({cards.with_links(found.hunt)})"
    if found.name.startswith("measure_"):
        return "decide"
    return "kernel" if found.key[0] == 99 else "write"


templates.PAGES.filters |= {
    "as_student": as_student,
    "kind": kind,
    "upper_first": lambda sentence: sentence[:1].upper() + sentence[1:],
    "mistake": lambda found: exercises.text(cards.with_links(found.hunt)),
    "without_title": lambda markdown: re.sub(r"\A# .*\n+", "", markdown),
}


def page(found: Exercise) -> str:
    return templates.render(
        "exercise.md", found=found, exercises=exercises, source=source, part=part
    )


#: The exercises that a beginner has solved on the page about `play`.
FIVE = ("top_p", "rms_norm", "rope", "swiglu", "attention")
#: Kinds of mistakes, by words of what is mistaken and of the case that rejects it.
MISTAKES = {
    "half precision, or float64": r"\bb?float16|\bfloat64|half precision",
    "gradients": r"detached|graph of|without a gradient",
    "anything else": "",
}


def your_package(shown: str = "rms_norm") -> str:
    """The page on `play`: what it prints for right answers, and what it shows of wrong ones."""
    parts = [
        {"exercise": one, "part": found} for one in exercises.written() if (found := part(one.name))
    ]
    other = "and writes in other ways"
    groups: dict[str, list[Any]] = {"the model that writes": [], other: [], "and learns": []}
    for one in parts:
        titles = {"write": "the model that writes", "learn": "and learns"}
        groups[titles.get(one["part"].loop, other)].append(one)
    references = {name: exercise(name).reference for name in FIVE}
    return templates.render(
        "your_package.md",
        parts=parts,
        groups=groups,
        shown=shown,
        five=FIVE,
        played=printed(playing.play, shown, exercise(shown).reference),
        played_together=printed(playing.play_together, references, {}),
        played_class=a_class(),
        lengths=playing.LENGTHS,
        exercises=exercises,
        **where_wrong_answers_show(),
    )


def printed(function: Any, *args: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        function(*args)
    return said.getvalue().strip()


def a_class() -> str:
    """What `play --all` says of a student with five right answers, and of one with two files that
    are not right. (Nothing of theirs can end this process, so that no child is needed.)"""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, f"{name}.py") for name in FIVE}
        for name, path in files.items():
            path.write_text(source.solution(name), encoding="utf-8")
        answers = Answers({name: str(path) for name, path in files.items()})
        ana = Student("ana", [*FIVE], {}, played(answers, 0))
        files["rope"].write_text("def rope(x, positions, theta:\n", encoding="utf-8")
        files["swiglu"].write_text(source.stub("swiglu"), encoding="utf-8")
        handed_in = ("rope", "swiglu")
        missing = {name: verdict(Job(files[name], name)).reason for name in handed_in}
        ben = Student(
            "ben", ["rms_norm"], missing, played(Answers({"rms_norm": str(files["rms_norm"])}), 0)
        )
    return f"{ana.line()}\n{ben.line()}"


def where_wrong_answers_show() -> dict[str, Any]:
    """How many planted wrong answers change a text or a run, as it was measured."""
    path = pages.ROOT / "tests/exercises/plays.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    kinds = {kind: [0, 0] for kind in MISTAKES}
    at = []
    for name, table in found.items():
        for wrong in exercise(name).wrong:
            at.append(table["wrong"][wrong.label])
            told = f"{wrong.label}, {wrong.case}"
            kind = next(kind for kind, words in MISTAKES.items() if re.search(words, told))
            kinds[kind][0] += 1
            kinds[kind][1] += at[-1] != "not visible"
    changed, hidden = sum(isinstance(one, int) for one in at), at.count("not visible")
    return {
        "wrong": len(at), "changed": changed, "hidden": hidden,
        "raised": len(at) - changed - hidden, "kinds": kinds,
    }  # fmt: skip


# -- the proof -------------------------------------------------------------------------------


def proof() -> str:
    """The page on the proofs: which check rejects each wrong answer of the catalogue."""
    return templates.render("proof.md", found=exercises.written())
