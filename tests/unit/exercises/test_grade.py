"""Grading a folder: every kind of submission gets its row, and none stops the others."""

import csv
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from lm_from_scratch.__main__ import main
from lm_from_scratch.exercises import child
from lm_from_scratch.exercises.book import COLUMNS, cells, safe
from lm_from_scratch.exercises.child import Child, Job, verdict
from lm_from_scratch.exercises.exercise import exercise, exercises
from lm_from_scratch.exercises.grade import Row, grade, submissions
from lm_from_scratch.exercises.marks import best, summary
from lm_from_scratch.exercises.source import solution, stub
from lm_from_scratch.exercises.submission import read, run

RIGHT = solution("rms_norm")
HEAD = "import torch\n\n\ndef rms_norm(x, weight, eps=1e-6):\n"
HALF = HEAD + "    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight\n"
LAYER = HEAD + "    return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * weight\n"


def cell(text: str, kind: str = "code", **more: object) -> dict[str, object]:
    return {"cell_type": kind, "metadata": {}, "source": text.splitlines(True), **more}


def notebook(*cells: dict[str, object]) -> str:
    return json.dumps({"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


#: The right answer in one expression, to stand behind `return` or `lambda`.
WIDE = "x.to(torch.promote_types(x.dtype, torch.float32))"
VALUE = f"({WIDE} / ({WIDE}.pow(2).mean(-1, True) + eps).sqrt()).to(x.dtype) * weight"
DEF = f"def rms_norm(x, weight, eps=1e-6):\n    return {VALUE}\n"
#: Sends a message instead of the verdict.
FORGE = """
    import json, os, struct, sys, time
    text = json.dumps({"exercise": "rms_norm", "of": 11, "passed": True} | MORE).encode()
    frame = sys._getframe()
    while "word" not in frame.f_locals:
        frame = frame.f_back
    text = frame.f_locals["word"] + text
    os.write(frame.f_locals["pipe"].fileno(), struct.pack("!i", len(text) + LONGER) + text)
    time.sleep(1e6 if LONGER else 0)
    os._exit(0)
"""


def forged(more: str, longer: int = 0) -> str:
    return HEAD + FORGE.replace("MORE", more).replace("LONGER", str(longer))


#: What students hand in: a file, and the points that it must get (None: between 1 and 10).
SUBMISSIONS: dict[str, tuple[str, str, float | None]] = {
    "right": ("rms_norm.py", RIGHT, 11),
    "right_notebook": ("work.ipynb", notebook(cell("# text", "markdown"), cell(RIGHT)), 11),
    "right_by_torch": (
        "a.py",
        HEAD + "    wide = x if x.dtype == torch.float64 else x.float()\n"
        "    y = torch.nn.functional.rms_norm(wide, weight.shape, None, eps)\n"
        "    return y.to(x.dtype) * weight\n",
        11,
    ),
    "last_definition_wins": ("a.ipynb", notebook(cell(LAYER), cell(RIGHT)), 11),
    "one_bad_cell": ("a.ipynb", notebook(cell("def broken(:\n"), cell(RIGHT)), 11),
    "magics": ("a.ipynb", notebook(cell("%pwd\n!ls\n" + RIGHT), cell("%%bash\nls")), 11),
    "decorated_twice": ("a.ipynb", notebook(cell(RIGHT, id="x"), cell("check(1)", id="x")), 11),
    "prints": ("a.py", "print('hello' * 100)\n" + RIGHT, 11),
    "noise": ("a.py", RIGHT.replace("    precise", "    print(x)\n    precise", 1), 11),
    "half": ("a.py", HALF, 8),
    "layer_norm": ("a.py", LAYER, 0),
    "stub": ("a.py", stub("rms_norm"), 0),
    "empty": ("rms_norm.py", "", 0),
    "empty_notebook": ("rms_norm.ipynb", notebook(), 0),
    "docstring": ("a.py", HEAD + '    """Only this."""\n', 0),
    "returns_none": ("a.py", HEAD + "    x * 2\n", 0),
    "syntax_error": ("rms_norm.py", HEAD.replace("):", ""), 0),
    "no_notebook": ("rms_norm.ipynb", '{"cells": [', 0),
    "list_notebook": ("rms_norm.ipynb", "[1, 2]", 0),
    "endless": ("a.py", HEAD + "    while True:\n        pass\n", 0),
    "endless_at_the_top": ("a.py", RIGHT + "while True:\n    pass\n", 11),
    "sleeps": ("a.py", HEAD + "    import time\n    time.sleep(1e6)\n", 0),
    "swallows": (
        "a.py",
        HEAD + "    while True:\n        try:\n            sum(range(9999))\n"
        "        except BaseException:\n            pass\n",
        0,
    ),
    "exits": ("a.py", HEAD + "    import os\n    os._exit(0)\n", 0),
    "exits_politely": ("a.py", HEAD + "    raise SystemExit(0)\n", 0),
    "exits_at_the_top": ("a.py", "import sys\nsys.exit(1)\n" + RIGHT, 11),
    "memory": ("a.py", HEAD + "    return torch.zeros(10**13)\n", 0),
    "memory_bit_by_bit": ("a.py", HEAD + "    a = [0]\n    while True:\n        a += a\n", 0),
    "recursion": ("a.py", HEAD + "    return rms_norm(x, weight, eps)\n", 0),
    "patched_at_the_top": (
        "a.py",
        "import torch\ntorch.allclose = torch.equal = lambda *a, **k: True\n" + HALF,
        8,
    ),
    "patched_inside": (
        "a.py",
        HEAD + "    torch.equal = torch.allclose = lambda *a, **k: True\n"
        "    torch.isnan = torch.isinf = torch.abs = torch.zeros_like\n    return x\n",
        0,
    ),
    "patched_check": ("a.ipynb", notebook(cell(LAYER), cell("check = lambda *a, **k: 11.0\n")), 0),
    "other_name": ("rms_norm.py", RIGHT.replace("def rms_norm", "def my_norm"), 0),
    "only_imported": ("a.py", "from lm_from_scratch.layers.norm import rms_norm\n", 0),
    "from_outside": (
        "a.py",
        "import torch\nones = torch.ones(16)\n\n\ndef rms_norm(x, weight, eps=1e-6):\n"
        "    return x * ones\n",
        0,
    ),
    "constant": ("a.py", "LIMIT = float('inf')\nSIZE = 2 * 3\n" + RIGHT, 11),
    "missing_package": ("a.py", "import no_such_package\n" + RIGHT, 11),
    "writes_files": ("a.py", HEAD + "    open('written', 'w').write('x')\n    return x\n", 0),
    "kills_its_parent": (
        "a.py",
        HEAD + "    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)\n",
        0,
    ),
    "lambda": ("a.py", f"import torch\nrms_norm = lambda x, weight, eps=10**-6: {VALUE}\n", 11),
    "partial": (
        "a.py",
        "import torch\nfrom functools import partial\n"
        f"def norm(n, x, weight, eps=1e-6): return {VALUE}\nrms_norm = partial(norm, 1)\n",
        11,
    ),
    "annotations_of_the_future": (
        "a.py",
        "from __future__ import annotations\nimport torch\nfrom dataclasses import dataclass\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor\n"
        "@dataclass\nclass Config:\n    eps: float = 1e-6\n"
        f"def rms_norm(x: Tensor, weight: Tensor, eps: float = Config.eps):\n    return {VALUE}\n",
        11,
    ),
    "names_beside_it": (
        "a.py",
        "try:\n    import torch, math\nexcept ImportError:\n    torch = None\n"
        "from collections import namedtuple\nfrom enum import Enum\nfrom math import *\n"
        "Pair = tuple[int, int]\nTwo = namedtuple('Two', 'a b')\nROOT = math.sqrt(2)\n"
        "LOW = torch.finfo(torch.float32).min\nALL = [2**i for i in range(3)]\nEPS = 10 ** -6\n"
        "ONE = ALL[0] if ROOT > 1 else 2\nBAD = 2 ** 'a'\nclass Kind(Enum):\n    A = ONE\n"
        "def helper(x) -> Pair:\n    return Two(x, ROOT * LOW)\n"
        f"def rms_norm(x, weight, eps=EPS):\n    helper(Kind.A)\n    return {VALUE}\n"
        "if __name__ == '__main__':\n    rms_norm = None\n    raise SystemExit\n",
        11,
    ),
    "conditional": (
        "a.py",
        "import torch\nif torch.cuda.is_available():\n    NAME = 'cuda'\n"
        f"else:\n    def rms_norm(x, weight, eps=1e-6):\n        return {VALUE}\n{DEF}",
        11,
    ),
    "windows": ("Übung 1.PY", ("\ufeff" + RIGHT).replace("\n", "\r\n"), 11),
    "odd_line_ends": ("a.py", f"import torch\n\x0cTEXT = 'a\u2028b'\n{DEF}", 11),
    "percent_begins_a_line": (
        "a.ipynb",
        notebook(
            cell("%matplotlib inline\nfiles = !ls\ntorch?\nif True:\n    %pwd\nimport torch\n"),
            cell(DEF.replace("    return", "    n = (\n    7\n    % 4\n    )\n    return n / 3 *")),
        ),
        11,
    ),
    "timed_cell": ("a.ipynb", notebook(cell("%%time\n" + RIGHT)), 11),
    "odd_cells": (
        "a.ipynb",
        json.dumps({"cells": [None, 3, {"cell_type": "code", "source": None}, {"source": RIGHT}]}),
        11,
    ),
    "long_line": (
        "a.ipynb",
        notebook(cell("x = (" + "a " * 10**5), cell("a " * 10**6), cell(RIGHT)),
        11,
    ),
    "many_problems": ("a.ipynb", notebook(*[cell("def (")] * 500, cell(RIGHT)), 11),
    "long_sum": ("a.py", "x = 1; y = " + "+".join(["1"] * 960) + "\n" + RIGHT, 11),
    "many_lines": ("a.py", "x = 1\n" * 20000 + RIGHT, 11),
    "imported_afterwards": (
        "a.ipynb",
        notebook(cell(LAYER), cell("from lm_from_scratch.layers.norm import rms_norm\n")),
        0,
    ),
    "checked_and_played": (
        "a.py",
        RIGHT + "\nfrom lm_from_scratch.exercises import check, play\n"
        "check('rms_norm', rms_norm)\nplay('rms_norm', rms_norm)\n",
        11,
    ),
    "no_notebook_of_any_name": ("homework.ipynb", '{"cells": [', 0),
    "no_characters": ("a.py", HEAD + "    raise ValueError('\\ud800 \\x00 ' + 'x' * 10**7)\n", 0),
    "long_name": ("a.py", HEAD + "    raise type('E' * 10**7, (Exception,), {})\n", 0),
    "prints_a_lot": ("a.py", HEAD + "    print('x' * 10**8)\n    return x\n", 0),
    "threads": (
        "a.py", HEAD + "    import threading, time\n"
        f"    threading.Thread(target=time.sleep, args=(1e6,)).start()\n    return {VALUE}\n", 11,
    ),
    "leaves_a_process": (
        "a.py", HEAD + "    import os, subprocess\n    subprocess.Popen(['sleep', '4321'])\n"
        "    os._exit(0)\n", 0,
    ),
    "forged_types": (
        "a.py", forged("{'points': 'a', 'failed': 5}"), 0,
    ),
    "forged_number": ("a.py", forged("{'points': 1e9}"), 0),
    "forged_half": ("a.py", forged("{}", 9), 0),
    "forks": (
        "a.py",
        HEAD + "    import os, time\n    os.fork() or time.sleep(1e6)\n    return x\n",
        0,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, str]], Path]:
    folder = tmp_path_factory.mktemp("course") / "submitted"
    for student, (name, text, _) in SUBMISSIONS.items():
        (folder / student).mkdir(parents=True)
        (folder / student / name).write_text(text, encoding="utf-8")
    (folder / "bytes").mkdir()
    (folder / "bytes" / "rms_norm.py").write_bytes(b"\xff\xfe\x00rms_norm")
    (folder / "nothing").mkdir()
    (folder / "alone.py").write_text(RIGHT)
    latin = folder / os.fsdecode(b"M\xfcller")  # as a zip file of another system leaves it
    latin.mkdir()
    (latin / "a.py").write_bytes(f"# coding: latin-1\n# \xfc\n{RIGHT}".encode("latin-1"))
    (folder / ("n" * 250)).mkdir()
    (folder / "carl.zip").write_text("")
    (folder / "__MACOSX").mkdir()
    (folder / "loop").mkdir()
    (folder / "loop" / "rms_norm.py").symlink_to("rms_norm.py")
    (folder / "loop" / "folder").symlink_to("..")
    os.mkfifo(folder / "pipe.py")
    (folder / "alone").mkdir()
    (folder / "alone" / "a.py").write_text(LAYER)
    (folder / "folder_as_file" / "rms_norm.py").mkdir(parents=True)
    (folder / "two_files").mkdir()
    (folder / "two_files" / "a.py").write_text(LAYER)
    (folder / "two_files" / "b.py").write_text(RIGHT)
    (folder / "earlier").mkdir()  # of tables, nobody's
    (folder / "earlier" / "grades 1.csv").write_text("")
    out, reports = folder.parent / "out.csv", folder.parent / "reports"
    command = ["grade", str(folder), "--csv", str(out), "--reports", str(reports), "--quiet"]
    assert main([*command, "--exercises", "rms_norm", "--seconds", "1", "--jobs", "4"]) == 0
    with open(out, newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == COLUMNS
    return {row["student"]: row for row in rows}, reports


def test_a_link_earns_nothing_and_shows_nothing(tmp_path) -> None:
    folder, secret = tmp_path / "submitted", tmp_path / "secret.py"
    secret.write_text("password = = 'correct horse'\n")
    (folder / "alice").mkdir(parents=True)
    (folder / "alice" / "rms_norm.py").write_text(RIGHT)
    (folder / "bob").symlink_to(folder / "alice")
    (folder / "carol").mkdir()
    (folder / "carol" / "rms_norm.py").symlink_to(folder / "alice" / "rms_norm.py")
    (folder / "dave").mkdir()
    (folder / "dave" / "rms_norm.py").symlink_to(secret)
    (folder / "dave" / "work").symlink_to(folder / "alice")
    (folder / "erin.py").symlink_to(folder / "alice" / "rms_norm.py")
    rows = {row.student: row.verdict for _, row in grade(folder, ["rms_norm"], jobs=1)}
    assert rows.keys() == {"alice", "bob", "carol", "dave", "erin"} and rows["alice"].passed
    for student in ("bob", "carol", "dave", "erin"):
        assert rows[student].points == 0 and "it is a link" in rows[student].reason
    assert "horse" not in rows["dave"].reason + rows["dave"].text


@pytest.mark.slow
def test_every_submission_has_its_points(graded: tuple[dict[str, dict[str, str]], Path]) -> None:
    rows, reports = graded
    others = {"bytes": 0, "nothing": 0, "alone": 11, "folder_as_file": 0, "two_files": 11}
    others |= {"M\ufffdller": 11, "n" * 250: 0, "loop": 0, "pipe": 0}
    wanted = {name: points for name, (_, _, points) in SUBMISSIONS.items()} | others
    assert rows.keys() == wanted.keys()
    got = {name: float(row["points"]) for name, row in rows.items()}
    assert got == wanted
    for name, row in rows.items():
        assert row["passed"] == ("yes" if wanted[name] == 11 else "no")
        assert wanted[name] == 11 or row["reason"], name
        assert row["of"] == "11" and len(row["reason"]) < 2000
        assert (reports / f"{name}.txt").is_file() or name[:2] in ("M\ufffd", "nn")
    assert len(list(reports.glob("*.txt"))) == len(list(reports.glob("*.html"))) == len(rows)
    assert not Path("written").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("student", "words"),
    [
        ("half", "no float32 for the square"),
        ("layer_norm", "differ"),
        ("stub", "not written yet"),
        ("empty", "rms_norm is not defined"),
        ("syntax_error", "line 4: syntax error"),
        ("no_notebook", "not a notebook"),
        ("one_bad_cell", "cell 1, line 1: syntax error"),
        ("endless", "Is there a loop that never ends?"),
        ("sleeps", "stopped after"),
        ("swallows", "stopped after"),
        ("exits", "ended the process (exit code 0)"),
        ("exits_politely", "SystemExit"),
        ("memory", "memory"),
        ("recursion", "RecursionError"),
        ("other_name", "rms_norm is not defined"),
        ("only_imported", "rms_norm is imported, not written"),
        ("from_outside", "ones is made outside the function"),
        ("missing_package", "No module named 'no_such_package'"),
        ("bytes", "not a text file"),
        ("nothing", "no file defines rms_norm"),
        ("folder_as_file", "cannot be read"),
        ("loop", "cannot be read"),
        ("pipe", "no file defines rms_norm (pipe.py: cannot be read: it is no file)"),
        ("no_notebook_of_any_name", "no file defines rms_norm (homework.ipynb: not a notebook"),
        ("many_problems", "and 495 more"),
        ("long_line", "cell 2: longer than"),
        ("imported_afterwards", "imports the package"),
        ("forged_types", "sent no verdict"),
        ("forged_number", "sent no verdict"),
        ("forged_half", "sent no verdict"),
    ],
)
def test_every_reason_is_said(
    graded: tuple[dict[str, dict[str, str]], Path], student: str, words: str
) -> None:
    row = graded[0][student]
    assert words in row["looks like"] + row["reason"]


@pytest.mark.slow
def test_the_last_cells_of_a_notebook_are_not_told_against_a_student(
    graded: tuple[dict[str, dict[str, str]], Path],
) -> None:
    assert not graded[0]["checked_and_played"]["reason"]


@pytest.mark.slow
def test_a_report_tells_the_student(graded: tuple[dict[str, dict[str, str]], Path]) -> None:
    text = (graded[1] / "half.txt").read_text(encoding="utf-8")
    assert text.startswith("half: 4 of 11 points")
    assert "looks like: no float32 for the square" in text and "seed=7341" in text
    assert text.rstrip().endswith("file: half/a.py")


@pytest.mark.slow
def test_no_child_is_left(graded: tuple[dict[str, dict[str, str]], Path]) -> None:
    """Not even what a submission had started."""
    own = os.getpid()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        assert "4321" not in cmdline(path)
        words = cmdline(path)  # other tests of this process leave two helpers of multiprocessing
        helper = "resource_tracker" in words or "multiprocessing.forkserver" in words
        assert int(fields[1]) != own or fields[0] == "Z" or helper, words


def cmdline(path: Path) -> str:
    try:
        return (path.parent / "cmdline").read_text()
    except OSError:
        return "resource_tracker"


def test_another_seed_gives_other_numbers_and_the_same_points(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(HALF)
    texts = []
    for seed in (1, 2):
        (row,) = [row for _, row in grade(tmp_path, ["rms_norm"], seed=seed)]
        assert row.verdict.points == 8
        texts.append(row.verdict.text)
    assert texts[0] != texts[1]


def test_answers_made_for_the_student_s_seed_fail(tmp_path: Path) -> None:
    """Results written down from seed 0 are worth nothing at another seed."""
    results: list[torch.Tensor] = []
    first: list[float] = []

    def spy(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        results.append(exercise("rms_norm").reference(*args, **kwargs))
        first.append(args[0].flatten()[0].item())
        return results[-1]

    child.examine(exercise("rms_norm"), spy)
    code = HEAD.replace("import torch", "import torch\nfrom torch import tensor, float16, bfloat16")
    code += "    for number, kept in KEPT:\n        if number == x.flatten()[0].item():\n"
    code += "            return (torch.tensor(kept).double() + 0 * x.double() + 0 * weight.sum()"
    code += ").to(x.dtype)\n    return x\n"
    code = f"KEPT = {[(n, r.tolist()) for n, r in zip(first, results)]!r}\n" + code
    (tmp_path / "a.py").write_text(code)
    assert verdict(Job(tmp_path / "a.py", "rms_norm", 0)).points > 0
    assert verdict(Job(tmp_path / "a.py", "rms_norm", 7341)).points == 0


def test_what_checks_compare_with_cannot_be_replaced(tmp_path: Path) -> None:
    """Some checks ask torch themselves, inside the call of the student's code."""
    code = "import torch\n\n\ndef load_in_its_dtype(model, state):\n"
    code += "    torch.equal = torch.allclose = lambda *a, **k: True\n"
    code += "    model.load_state_dict(state, assign=True)\n"
    (tmp_path / "a.py").write_text(code)
    (row,) = [row for _, row in grade(tmp_path, ["hunt_tied_weights"])]
    assert row.verdict.points == 0 and "replaced torch.equal" in row.verdict.reason
    assert torch.equal(torch.ones(2), torch.ones(2)) and not torch.equal(
        torch.ones(2), torch.ones(3)
    )


@pytest.mark.parametrize(
    ("points", "failed"), [(1.0, []), (11.0, ["shape and values"]), (10.5, [])]
)
def test_only_full_points_are_passed(points: float, failed: list[str]) -> None:
    sent = json.dumps({"points": points, "passed": True, "failed": failed}).encode()
    assert not child.received(sent, exercise("rms_norm")).passed


@pytest.mark.slow
def test_every_solution_gets_full_points_in_a_child(tmp_path: Path) -> None:
    """No limit of the child process stands in the way of a right answer."""
    for e in exercises():
        (tmp_path / f"{e.name}.py").write_text(solution(e.name))
    rows = [row for _, row in grade(tmp_path, seconds=20)]
    own = {row.student: row.verdict for row in rows if row.student == row.verdict.exercise}
    assert {name: v.points for name, v in own.items()} == {e.name: e.points for e in exercises()}
    assert len(rows) == len(exercises()) ** 2
    assert summary(rows).count(" passed, mean ") == len(exercises())


@pytest.mark.slow
def test_a_spawned_child_gives_the_same_verdict(tmp_path: Path) -> None:
    """Where there is no fork (Windows), or where it is not safe (macOS)."""
    (tmp_path / "a.py").write_text(HALF)
    job = Job(tmp_path / "a.py", "rms_norm", 3)
    one, other = Child(job).result(), Child(job, method="spawn").result()
    one.seconds = other.seconds = 0
    assert one == other and one.points == 8


def test_a_child_that_is_interrupted_is_gone(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(HEAD + "    while True:\n        pass\n")
    started = Child(Job(tmp_path / "a.py", "rms_norm"), 60)
    time.sleep(0.2)
    pid = started.process.pid
    assert pid is not None
    started.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_interrupting_leaves_no_table_and_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(HEAD + "    while True:\n        pass\n")
    rows = grade(tmp_path, ["rms_norm"], seconds=60)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt):
        next(rows)
    rows.close()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    test_no_child_is_left(({}, tmp_path))


def alarm_after_a_row(unfinished: Path) -> None:
    while not (unfinished.is_file() and "\n" in unfinished.read_text()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGALRM)


def test_ctrl_c_keeps_the_rows_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.py").write_text(RIGHT)
    (tmp_path / "in" / "b.py").write_text(HEAD + "    while True:\n        pass\n")
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    threading.Thread(
        target=alarm_after_a_row, args=(tmp_path / "x-unfinished.jsonl",), daemon=True
    ).start()
    command = ["grade", str(tmp_path / "in"), "--csv", str(tmp_path / "x.csv"), "--quiet"]
    assert main([*command, "--seconds", "60"]) == 130
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert "interrupted: 1 of 2 rows" in capsys.readouterr().err
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["in", "x-unfinished.jsonl"]
    (tmp_path / "in" / "b.py").write_text(RIGHT)
    assert main(command) == 0
    assert "1 verdicts of a run that was interrupted count" in capsys.readouterr().out
    assert [p.name for p in sorted(tmp_path.glob("x*"))] == ["x-students.csv", "x.csv", "x.json"]
    assert "a,rms_norm,11,11,yes" in (tmp_path / "x.csv").read_text()
    test_no_child_is_left(({}, tmp_path))


@pytest.mark.slow
def test_of_files_with_equal_points_the_first_counts(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a.py").write_text(HEAD + "    import time\n    time.sleep(0.1)\n")
    (tmp_path / "s" / "b.py").write_text(HEAD + "    return 1\n")
    for jobs in (1, 2):
        (row,) = best(row for _, row in grade(tmp_path, ["rms_norm"], jobs=jobs))
        assert row.file == "s/a.py"


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--csv", "/proc/no/x.csv"], "cannot write /proc/no/x.csv"),
        (["--csv", "/dev/null/x.csv"], "cannot write /dev/null/x.csv"),
        (["--csv", "x.csv", "--reports", "/proc/no"], "cannot write /proc/no"),
        (["--csv", "x.csv", "--reports", "in/reports"], "the next run would grade it"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("in/a.py").write_text(RIGHT)
    monkeypatch.setattr("lm_from_scratch.exercises.grade_command.grade", None)
    assert main(["grade", "in", "--quiet", *options]) == 2
    assert words in capsys.readouterr().err
    assert not Path("x.csv").exists()


def test_a_table_that_cannot_be_written_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be full when the work is done."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "a.py").write_text(RIGHT)
    monkeypatch.setattr("lm_from_scratch.exercises.book.write_text", full)
    out = str(tmp_path / "x.csv")
    assert main(["grade", str(tmp_path), "--csv", out, "--quiet"]) == 2
    said = capsys.readouterr()
    assert "a,rms_norm,11,11,yes" in said.out and "the table is above" in said.err


@pytest.mark.parametrize(
    "option", ["--jobs=0", "--jobs=-1", "--seconds=0", "--seconds=inf", "--seconds=nan",
               "--seed=-1", "--seed=99999999999999999999"],
)  # fmt: skip
def test_numbers_that_would_give_everyone_nothing_are_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grade", ".", "--csv", "x.csv", option]) == 2
    assert f"error: {option.partition('=')[0]} " in capsys.readouterr().err


def test_bad_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        submissions(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no \.py or \.ipynb"):
        submissions(tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="no file defines the function of any exercise"):
        list(grade(tmp_path))
    assert main(["grade", str(tmp_path), "--csv", str(tmp_path), "--quiet"]) == 2
    assert "is a folder; it must be a file" in capsys.readouterr().err
    assert main(["grade", str(tmp_path), "--csv", "x.csv", "--exercises", "rms_nrom"]) == 2
    assert "do you mean rms_norm" in capsys.readouterr().err


def test_no_cell_is_a_formula() -> None:
    assert safe("a\0\ud800b") == "a\ufffd\ufffdb"
    assert safe("=1+1") == "'=1+1" and safe("-3\nx") == "'-3 x" and safe("alice") == "alice"
    row = Row("=cmd()", child.Verdict("rms_norm"))
    assert cells(row, "")[0] == "'=cmd()"


# --------------------------------------------------------------------------- submissions


def test_only_definitions_run(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "import os; import math\nL = [1]\nA = 1; boom()\nB = [A, -2.5, 'x']\nC = open('x')\n"
        "D: int = 3\nclass E:\n    pass\nfor F in range(3): pass\nG, H = 1, 2\n"
        "L[0] = math.pi = 3\n@staticmethod\ndef i(): return math.pi\nif True:\n    J = 1\n"
        "K = 2 ** 10 ** 10\n"
    )
    found = read(path)
    space = run(found)
    assert not found.problems
    assert found.defined == {"A", "B", "D", "E", "G", "H", "J", "L", "i"}
    assert found.imported == {"os", "math"} and found.left_out == {"C", "F", "K"}
    assert (
        space["L"] == [1]
        and space["B"] == [1, -2.5, "x"]
        and "C" not in space
        and "boom" not in space
    )


def test_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    code = "x = f(\n1)\n\ndef rms_norm(x, w, eps=1):\n    return x.no\n"
    path.write_text(notebook(cell("# text", "markdown"), cell(code)))
    text = verdict(Job(path, "rms_norm")).text
    assert "cell 2, line 5: return x.no" in text
