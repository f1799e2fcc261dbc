"""Every exercise is proved, and the proof itself can fail."""

import ast
import json
from dataclasses import replace

import pytest
from mutate import mutants
from prove import Proof

from lm_from_scratch.exercises.exercise import exercise, exercises, folder

NAMES = sorted(found.name for found in exercises())


def stored(name: str) -> str:
    return (folder(name) / "proof.json").read_text(encoding="utf-8")


def test_mutants_change_one_thing_each() -> None:
    code = "def f(x, y):\n    'Text 1.'\n    if x > 1:\n        return x.float() + y\n    return -y"
    found = dict(mutants(code))
    for label in (
        "if x > 1:: x > 1 => x >= 1",
        "if x > 1:: 1 => 2",
        "return x.float() + y: x.float() + y => x.float() - y",
        "return x.float() + y: x.float() => x",
        "return -y: -y => y",
    ):
        assert label in found, found.keys()
        assert found[label] != ast.unparse(ast.parse(code))
    assert len(set(found.values())) == len(found)
    assert not any("Text" in label for label in found)


def test_a_proof_sees_a_weak_check() -> None:
    """Without the case for half precision, wrong answers pass, and the proof says so."""
    e = exercise("rms_norm")
    kept = tuple(c for c in e.cases if "16" not in c.name and "gradients" not in c.name)
    names = {c.name for c in kept}
    planted = (w if w.case in names else replace(w, case=kept[0].name) for w in e.wrong)
    weak = replace(e, cases=kept, wrong=tuple(planted))
    proof = Proof(weak, right_seeds=2, wrong_seeds=2)
    proof.run()
    text = "\n".join(proof.problems)
    assert "accepts 'no float32 for the square'" in text
    assert "accepts 'the root is detached'" in text
    assert "a mutant survives without a reason" in text


def test_a_proof_names_a_function_that_the_script_lacks() -> None:
    e = replace(exercise("rms_norm"), function="norm")
    with pytest.raises(ValueError, match="the script defines no norm"):
        Proof(e, right_seeds=1, wrong_seeds=1).run()


def test_a_proof_sees_a_check_that_is_too_strict() -> None:
    e = exercise("rms_norm")
    strict = replace(e, cases=tuple(replace(c, tolerance=(0.0, 0.0)) for c in e.cases))
    proof = Proof(strict, right_seeds=30, wrong_seeds=1)
    proof.run()
    assert any("rejects 'row by row'" in problem for problem in proof.problems)


def test_stored_proofs_have_the_promised_numbers() -> None:
    for name in NAMES:
        table = json.loads(stored(name))
        assert table["right seeds"] >= 100 and table["wrong seeds"] >= 30
        assert len(table["wrong"]) >= 12 and len(table["right"]) >= 5
        assert table["mutants"] == table["killed"] + len(table["explained"])
        assert all(table["explained"].values())
