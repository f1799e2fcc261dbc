"""The command: one answer, all of them, a class of students."""

import json
import re

import pytest

from lm_from_scratch.__main__ import main
from lm_from_scratch.exercises import child as child_module
from lm_from_scratch.exercises import playing as module
from lm_from_scratch.exercises.child import NOTHING, Child
from lm_from_scratch.exercises.play_class import Answers, play_class, received
from lm_from_scratch.exercises.source import script, solution

SAME = {"same": 8, "of": 8, "error": ""}


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    lengths = {"write": 8, "batch": 4, "search": 3, "draft": 6, "learn": 9}
    monkeypatch.setattr(module, "LENGTHS", lengths)


@pytest.fixture
def solved(tmp_path, monkeypatch):
    """A folder with two solved exercises, one that is wrong, and one that is not written."""
    monkeypatch.chdir(tmp_path)
    for name in ("rms_norm", "lr_schedule"):
        (tmp_path / f"{name}.py").write_text(solution(name))
    wrong = solution("swiglu").replace("@", "*")
    assert wrong != solution("swiglu")
    (tmp_path / "swiglu.py").write_text(wrong)
    (tmp_path / "rope.py").write_text(script("rope"))
    return tmp_path


def test_one_by_the_command(solved, capsys) -> None:
    assert main(["play", "rms_norm"]) == 0
    assert "with yours: all 8 are the same" in capsys.readouterr().out
    assert main(["play", "rope", "rope.py"]) == 1
    assert "not written yet" in capsys.readouterr().out


def test_one_for_a_program(solved, capsys) -> None:
    assert main(["play", "rms_norm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"rms_norm": SAME}
    assert main(["play", "swiglu", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["swiglu"]
    assert found["same"] == 0 and found["error"].startswith("RuntimeError: ")


@pytest.mark.slow
def test_all_by_the_command(solved, capsys, monkeypatch) -> None:
    assert main(["play"]) == 0
    said = capsys.readouterr().out
    assert "rms_norm         yours" in said and "lr_schedule      yours" in said
    assert "rope             not written yet" in said and said.count("■") == 2
    monkeypatch.chdir(solved.parent)
    assert main(["play", "--folder", str(solved)]) == 0
    assert capsys.readouterr().out == said


def test_all_for_a_program(solved, capsys) -> None:
    assert main(["play", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parts"] == {"rms_norm": SAME, "lr_schedule": SAME | {"same": 9, "of": 9}}
    assert found["missing"]["rope"] == "not written yet" and "swiglu" in found["missing"]
    assert found["together"] == {"writes": SAME, "learns": SAME | {"same": 9, "of": 9}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["play"], "nothing is solved here; begin with: "),
        (["play", "--folder", "x"], "nothing is solved in x; "),
        (["play", "checker"], "there is no checker.py and no checker.ipynb here; "),
        (["play", "rmsnorm"], "there is no exercise 'rmsnorm'; do you mean rms_norm"),
        (["play", "rope"], "there is no rope.py and no rope.ipynb here; "),
        (["play", "rope", "a.py"], "there is no file a.py"),
        (["play", "rope", "empty.py"], "empty.py: rope is not defined"),
        (["play", "rope", "broken.py"], "broken.py: line 1: syntax error"),
        (["play", "--all", "x"], "x is not a folder"),
        (["play", "rope", "--all", "x"], "give the name of an exercise, or --folder, or --all"),
        (["play", "--folder", "x", "--all", "x"], "give the name of an exercise, or --folder, or"),
    ],
)
def test_what_cannot_be_played_is_one_line(words, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "broken.py").write_text("def rope(\n")
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert message in said.err


# -------------------------------------------------------------------------------------- a class

LATER = """

class State:
    calls = 0


def rms_norm(x, weight, eps=1e-6):
    State.calls += 1
    if State.calls > 60:
        DO
    return own(x, weight, eps)
"""


def later(what: str) -> str:
    """A norm that passes its checks, and does something else in a model."""
    own = solution("rms_norm").replace("def rms_norm", "def own", 1)
    return own + LATER.replace("DO", what)


@pytest.fixture
def submitted(tmp_path):
    files = {
        "ana/norm.py": solution("rms_norm"),
        "ana/later/rope.py": solution("rope"),
        "ben/rms_norm.py": solution("rms_norm").replace("mean", "sum"),
        "ben/rope.py": script("rope"),
        "cid/rms_norm.py": "def rms_norm(\n",
        "dan/rms_norm.py": later("__import__('os')._exit(0)"),
        "eva/rms_norm.py": later("raise KeyError('gone\\nfor good')"),
        "fay/rms_norm.py": later("return 2 * own(x, weight, eps)"),
        "gus/readme.txt": "nothing",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_class_in_a_line_for_each_student(submitted, capsys) -> None:
    assert main(["play", "--all", str(submitted)]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == ["ana", "ben", "cid", "dan", "eva", "fay", "gus"]
    assert lines["ana"] == "2 of 21 parts (rms_norm, rope); writes: all of 8; learns: all of 9"
    assert lines["ben"].startswith("0 of 21 parts; rms_norm: ")
    assert lines["ben"].endswith("; rope: not written yet")
    assert "line 1: syntax error" in lines["cid"]
    assert lines["dan"] == "1 of 21 parts (rms_norm); the code ended the process (exit code 0)"
    assert "writes: stopped by KeyError: " in lines["eva"]
    assert re.search(r"; writes: [0-7] of 8; learns: [0-8] of 9$", lines["fay"])
    assert lines["gus"] == "0 of 21 parts"


@pytest.mark.slow
def test_a_class_for_a_program(submitted, capsys) -> None:
    assert main(["play", "--all", str(submitted), "--json"]) == 0
    found = {one.pop("student"): one for one in json.loads(capsys.readouterr().out)}
    assert found["ana"] == {
        "parts": ["rms_norm", "rope"],
        "missing": {},
        "agreements": {"writes": SAME, "learns": SAME | {"same": 9, "of": 9}},
        "reason": "",
    }
    assert found["dan"]["agreements"] == {} and "exit code 0" in found["dan"]["reason"]
    assert found["fay"]["agreements"]["writes"]["error"] == ""


@pytest.mark.slow
def test_a_loop_that_never_ends_costs_its_own_student_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(child_module, "PATIENCE", 100)  # its processor time decides, on any machine
    (tmp_path / "a.py").write_text(later("while True: pass"))
    (tmp_path / "b.py").write_text(solution("rms_norm"))
    a, b = play_class(tmp_path, seconds=20, limit=2)
    assert a.parts == b.parts == ["rms_norm"]
    assert a.played.reason.startswith("stopped after 2 s") and not a.played.agreements
    assert all(found.complete for found in b.played.agreements.values())


def forged(answers, seconds):
    raise SystemExit("out")


@pytest.mark.parametrize("sent", [b"[]", b"{}", b"nothing", b'{"agreements": {"a": 1}}'])
def test_what_a_child_sends_need_not_be_true(sent, monkeypatch, tmp_path) -> None:
    child = Child(Answers({}), 5, work=forged)
    assert received(child).reason == "SystemExit: out"
    monkeypatch.setattr(child, "message", lambda: (sent, ""))
    assert received(child).reason == NOTHING
