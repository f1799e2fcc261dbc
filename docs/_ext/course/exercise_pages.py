"""What the pages of the exercises show: each one, and `play` with right and wrong answers.

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

from gallery import exercises
from museum import cards

from lm_from_scratch.exercises import playing, source
from lm_from_scratch.exercises.child import Job, verdict
from lm_from_scratch.exercises.exercise import Exercise, exercise
from lm_from_scratch.exercises.notebook import as_student
from lm_from_scratch.exercises.parts import part
from lm_from_scratch.exercises.play_class import Answers, Student, played

#: Where each planted wrong answer shows when a model plays it, as a test has measured it.
PLAYS = Path(__file__).resolve().parents[3] / "tests" / "exercises" / "plays.json"


def kind(one: Exercise) -> str:
    if one.hunt:
        return f"bug hunt ({cards.with_links(one.hunt)})"
    if one.name.startswith("measure_"):
        return "decide"
    return "kernel" if one.key[0] == 99 else "write"


def mistake(hunt: Exercise) -> str:
    return exercises.text(cards.with_links(hunt.hunt))


def values(one: Exercise) -> dict[str, Any]:
    """What the page of an exercise shows."""
    return {
        "one": one,
        "exercises": exercises,
        "source": source,
        "part": part(one.name),
        "kind": kind(one),
        "as_student": as_student,
    }


#: The exercises that a beginner has solved on the page about `play`.
FIVE = ("top_p", "rms_norm", "rope", "swiglu", "attention")
#: Kinds of mistakes, by words of what is mistaken and of the case that rejects it.
MISTAKES = {
    "half precision, or float64": r"\bb?float16|\bfloat64|half precision",
    "gradients": r"detached|graph of|without a gradient",
    "anything else": "",
}
#: What an exercise's place in a model helps it to do, by the loop in which it runs.
LOOPS = {
    "write": "the model that writes",
    "other": "and writes in other ways",
    "learn": "and learns",
}


def your_package(name: str = "rms_norm") -> dict[str, Any]:
    """The page on `play`: what it prints for right answers, and what it shows of wrong ones."""
    parts = [
        {"exercise": one, "part": place} for one in exercises.written() if (place := part(one.name))
    ]
    groups: dict[str, list[Any]] = {title: [] for title in LOOPS.values()}
    for one in parts:
        groups[LOOPS.get(one["part"].loop, LOOPS["other"])].append(one)
    references = {name: exercise(name).reference for name in FIVE}
    return {
        "parts": parts,
        "groups": groups,
        "shown": name,
        "five": FIVE,
        "played": printed(playing.play, name, exercise(name).reference),
        "played_together": printed(playing.play_together, references, {}),
        "played_class": a_class(),
        "lengths": playing.LENGTHS,
        "exercises": exercises,
        **where_wrong_answers_show(),
    }


def printed(function: Any, *args: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        function(*args)
    return output.getvalue().strip()


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
        missing = {name: verdict(Job(files[name], name)).reason for name in ("rope", "swiglu")}
        answers = Answers({"rms_norm": str(files["rms_norm"])})
        ben = Student("ben", ["rms_norm"], missing, played(answers, 0))
    return f"{ana.line()}\n{ben.line()}"


def where_wrong_answers_show() -> dict[str, Any]:
    """How many planted wrong answers change a text or a run; of a kind, how many are visible."""
    plays = json.loads(PLAYS.read_text(encoding="utf-8"))
    kinds = {kind: [0, 0] for kind in MISTAKES}
    places = []
    for name, table in plays.items():
        for wrong in exercise(name).wrong:
            places.append(table["wrong"][wrong.label])
            text = f"{wrong.label}, {wrong.case}"
            kind = next(kind for kind, words in MISTAKES.items() if re.search(words, text))
            kinds[kind][0] += 1
            kinds[kind][1] += places[-1] != "not visible"
    changed, hidden = sum(isinstance(at, int) for at in places), places.count("not visible")
    return {
        "wrong": len(places), "changed": changed, "hidden": hidden,
        "raised": len(places) - changed - hidden, "kinds": kinds,
    }  # fmt: skip
