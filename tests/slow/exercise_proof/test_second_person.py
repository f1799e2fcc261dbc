"""A second person's answers: written from the text of an exercise alone, in other code.

Right ones must pass and wrong ones must fail. Where the mistake is a planted one, the report should
name it: `diagnosis.json` holds how often it does, and the page of proofs shows it.

    python tests/slow/exercise_proof/test_second_person.py     writes diagnosis.json again
"""

import json
import runpy
from pathlib import Path
from typing import Any

from prove import Proof

from lm_from_scratch.exercises.exercise import exercise
from lm_from_scratch.exercises.report import examine

FOLDER = Path(__file__).parent / "second_person"
STORED = FOLDER / "diagnosis.json"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
SEEDS = 10


def answers(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def diagnosis(name: str) -> dict[str, str]:
    """For each wrong answer: named, silent, other (another label), or unplanted.

    An answer is silent too when the report states its fault itself: an error, a NaN.
    """
    e = exercise(name)
    found = {}
    for function, label in answers(name)["ANSWERS"].items():
        report = examine(e, function)
        said = report.wrong.label if report.wrong else ""
        kind = "named" if said == label else "silent" if not said else "other"
        found[function.__name__] = kind if label else "unplanted"
    return found


def prove_answers(name: str) -> None:
    """What is recorded: 20 seeds of each right answer, 10 of each wrong one, and the diagnosis."""
    e, given = exercise(name), answers(name)
    labels = {wrong.label for wrong in e.wrong}
    for function in given["RIGHT"]:
        for seed in range(20):
            report = examine(e, function, seed)
            assert report.passed, f"{function.__name__}: {report.text()}"
    proof = Proof(e)
    for function, label in given["ANSWERS"].items():
        assert not label or label in labels, f"{function.__name__}: no label {label!r}"
        for seed in range(SEEDS):
            rejected = any(proof.rejects(n, function, seed) for n in proof.numbers())
            assert rejected, f"{function.__name__}, seed {seed}"
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert diagnosis(name) == stored[name], "python tests/slow/exercise_proof/test_second_person.py"


def test_most_mistakes_are_named_and_few_by_another_name() -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert sorted(stored) == NAMES
    kinds = [kind for row in stored.values() for kind in row.values() if kind != "unplanted"]
    assert len(kinds) > 100
    assert kinds.count("named") >= 0.8 * len(kinds)
    assert kinds.count("other") <= 0.05 * len(kinds)


if __name__ == "__main__":
    table = {name: diagnosis(name) for name in NAMES}
    STORED.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    kinds = [kind for row in table.values() for kind in row.values()]
    print({kind: kinds.count(kind) for kind in sorted(set(kinds))})
