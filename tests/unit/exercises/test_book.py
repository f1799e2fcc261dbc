"""The tables of a class: nothing in them is lost, whatever ends a run or edits a file."""

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lm_from_scratch.__main__ import main
from lm_from_scratch.exercises.book import Book, read_own, replace
from lm_from_scratch.exercises.child import Verdict
from lm_from_scratch.exercises.exercise import exercise
from lm_from_scratch.exercises.feedback import page, text
from lm_from_scratch.exercises.grade import Row, date, submissions
from lm_from_scratch.exercises.marks import best, days_late, mark, points, students
from lm_from_scratch.exercises.report import examine
from lm_from_scratch.exercises.source import solution

RIGHT = solution("rms_norm")
HEAD = "import torch\n\n\ndef rms_norm(x, weight, eps=1e-6):\n"
HALF = HEAD + "    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight\n"
LOOP = HEAD + "    while True:\n        pass\n"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def hand_in(path: str, code: str = RIGHT) -> None:
    file = Path("in", path, "a.py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)


def graded(*options: str, code: int = 0) -> None:
    command = ["grade", "in", "--csv", "grades.csv", "--quiet", "--jobs", "2"]
    assert main([*command, *options]) == code


def table(path: str = "grades-students.csv") -> dict[str, dict[str, str]]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        return {row["student"]: row for row in csv.DictReader(file)}


def edit(student: str, **cells: str) -> None:
    """What a teacher does with the table of students."""
    rows = table()
    rows[student] |= cells
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    with open("grades-students.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows.values())


def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are run from now on."""
    from lm_from_scratch.exercises import grade

    seen, before = [], grade.Child

    def child(job: object, seconds: float) -> object:
        seen.append(job.file.relative_to(Path.cwd()).as_posix())  # type: ignore[attr-defined]
        return before(job, seconds)  # type: ignore[arg-type]

    monkeypatch.setattr(grade, "Child", child)
    return seen


# --------------------------------------------------------------------------- nothing is overwritten


def test_a_second_run_is_refused_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    hand_in("anna")
    graded("--reports", "feedback")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    hand_in("anna", HALF)
    graded("--reports", "feedback", code=2)
    said = capsys.readouterr().err
    assert "grades.csv is there already. --update keeps what is in it" in said
    for path in ("grades.csv", "grades.json"):  # one of the others is enough
        Path(path).unlink()
        graded(code=2)
        del before[Path(path)]
    del before[Path("in/anna/a.py")]
    assert all(path.read_bytes() == data for path, data in before.items())


def test_an_update_grades_what_is_new_and_keeps_points_and_notes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hand_in("anna")
    hand_in("bob", HALF)
    graded()
    assert table()["bob"]["marks"] == table()["bob"]["total"] == "4"
    edit("bob", manual="2,5", note='said why, "well"; see me', seat="=B12")
    hand_in("bob", HEAD + "    return x\n")
    hand_in("carla", f"{RIGHT}# anna's own file would not be run again\n")
    seen = runs(monkeypatch)
    graded("--update")
    assert sorted(seen) == ["in/bob/a.py", "in/carla/a.py"]
    bob = table()["bob"]
    assert (bob["marks"], bob["manual"], bob["total"]) == ("0", "2,5", "2.5")
    assert bob["note"] == 'said why, "well"; see me' and bob["seat"] == "=B12"
    assert table()["anna"]["total"] == table()["carla"]["total"] == "11"
    assert "bob,rms_norm,8,11,no,4" in Path("earlier/grades 1.csv").read_text(encoding="utf-8")
    assert "see me" in Path("earlier/grades-students 1.csv").read_text(encoding="utf-8")
    seen.clear()
    graded("--update")
    assert not seen and len(list(Path("earlier").iterdir())) == 3  # nothing changed


@pytest.mark.slow
def test_one_student_is_graded_again_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for student in ("anna", "bob"):
        hand_in(student, HALF)
    graded()
    for student in ("anna", "bob"):
        hand_in(student, RIGHT)
    seen = runs(monkeypatch)
    graded("--students", "bob")
    assert seen == ["in/bob/a.py"]
    assert table()["bob"]["done"] == "1" and table()["anna"]["done"] == "0"
    graded("--students", "bob")  # although nothing changed
    assert len(seen) == 2
    graded("--students", "bib", code=2)
    assert "in holds nothing of bib" in capsys.readouterr().err


def test_another_week_goes_into_the_same_tables() -> None:
    hand_in("anna")
    hand_in("bob")
    graded("--exercises", "rms_norm")
    Path("in").rename("week 1")
    hand_in("anna", solution("swiglu"))
    graded("--exercises", "swiglu", "--update")
    anna, bob = table()["anna"], table()["bob"]
    assert anna["done"] == "2" and bob["done"] == "1" and anna["of"] == bob["of"]
    assert bob["swiglu"] == "" and bob["rms_norm"] == "11"


@pytest.mark.slow
def test_what_no_student_is_called_is_kept_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    hand_in("007")
    hand_in("bob", HALF)
    graded()
    found = Path("grades-students.csv").read_text(encoding="utf-8-sig")
    found = found.replace(",", ";").replace("007;1;11;11;;;;11;", "7;1;11;11;;;3;11;schön")
    Path("grades-students.csv").write_bytes(found.encode("cp1252"))  # as a spreadsheet saves it
    edit_cell = read_own(Path("grades-students.csv"))
    assert edit_cell["7"] == {"manual": "3", "note": "schön"}
    graded("--update")
    assert table()["7"]["note"] == "schön" and table()["7"]["manual"] == "3"
    assert table()["007"]["manual"] == ""
    assert "nobody is called 7; what you wrote is kept" in capsys.readouterr().out
    edit("bob", manual="two")
    graded("--update")
    assert "bob has 'two' for points, which is no number" in capsys.readouterr().out
    assert table()["bob"]["manual"] == "two" and table()["bob"]["total"] == "4"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one submission, graded."""
    folder = tmp_path_factory.mktemp("graded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        hand_in("anna")
        graded()
    return folder


@pytest.mark.parametrize(
    ("path", "data", "words"),
    [
        ("grades-students.csv", "name,manual\nanna,3\n", "has no column student"),
        ("grades.json", "{", "is no table of grades"),
        ("grades.json", '{"rows": [3], "seed": 1, "due": ""}', "is no table of grades"),
        ("grades.json", '{"rows": [], "seed": 1e999, "due": ""}', "is no table of grades"),
        ("grades.json", "[" * 100_000, "is no table of grades"),
        ("grades-students.csv", "student,note\nanna," + "x" * 200_000, "line 2: field larger than"),
    ],
)
def test_a_table_that_makes_no_sense_is_left_alone(
    tables: Path, capsys: pytest.CaptureFixture[str], path: str, data: str, words: str
) -> None:
    shutil.copytree(tables, ".", dirs_exist_ok=True)
    Path(path).write_text(data)
    graded("--update", code=2)
    assert words in capsys.readouterr().err and Path(path).read_text() == data


@pytest.mark.slow
def test_any_other_value_in_the_table_for_programs_is_taken_or_refused_by_name(
    tmp_path: Path,
) -> None:
    verdict = Verdict("rope", 3.0, 9.0, False, ["a case"], "looks", "reason", "text", 1.0)
    row = Row("anna", verdict, "a/rope.py", "2026-11-05T18:00", "ff")
    book = Book(tmp_path / "grades.csv", [row], seed=1, due="2026-11-04")
    book.write()
    record, cases = json.loads(book.all.read_text()), 0
    for part in (record, record["rows"][0], record["rows"][0]["verdict"]):
        for key, value in list(part.items()):
            for other in (None, "x", 5, -1.5, [], {}, [[]], math.nan, True, "\ud800"):
                part[key] = other
                book.all.write_text(json.dumps(record))
                damaged = Book(tmp_path / "grades.csv")
                try:
                    damaged.read()
                except ValueError as error:
                    refusal = str(error)
                else:
                    refusal = f"{book.all} is no table of grades"
                    damaged.write()
                    book.students.unlink()
                assert f"{book.all} is no table of grades" in refusal
                cases += 1
            part[key] = value
    assert cases > 200


def test_one_seed_for_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    hand_in("anna")
    graded("--seed", "5")
    graded("--update")
    assert json.loads(Path("grades.json").read_text())["seed"] == 5
    graded("--update", "--seed", "6", code=2)
    assert "has seed 5: one seed for a class" in capsys.readouterr().err


def test_a_file_is_replaced_only_by_other_text(tmp_path: Path) -> None:
    for n in range(3):
        for _ in range(2):
            replace(tmp_path / "a.txt", f"text {n}")
    assert [p.name for p in sorted((tmp_path / "earlier").iterdir())] == ["a 1.txt", "a 2.txt"]
    assert (tmp_path / "earlier" / "a 2.txt").read_text() == "text 1"
    assert submissions_of(tmp_path) == ["b"]


def submissions_of(folder: Path) -> list[str]:
    """A folder that also holds the tables."""
    (folder / "b.py").write_text(RIGHT)
    return sorted(submissions(folder))


# --------------------------------------------------------------------------- dates


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("2026-11-05", "2026-11-05T00:00"),
        ("2026-11-05_18-30", "2026-11-05T18:30"),
        ("2026-11-05T1830", "2026-11-05T18:30"),
        ("2026-11-05 second try", "2026-11-05T00:00"),
        ("2026-13-05", ""),
        ("2026-11-051", ""),
        ("week 2026-11-05", ""),
        ("anna", ""),
    ],
)
def test_dates_of_folders(name: str, wanted: str) -> None:
    assert date(name) == wanted


@pytest.mark.parametrize(
    ("came", "due", "days"),
    [
        ("2026-11-05T23:59", "2026-11-05", 0),
        ("2026-11-06T00:00", "2026-11-05", 1),
        ("2026-11-07T00:00", "2026-11-05", 2),
        ("2026-11-05T18:00", "2026-11-05T18:00", 0),
        ("2026-11-05T18:01", "2026-11-05T18:00", 1),
        ("2026-11-06T18:01", "2026-11-05T18:00", 2),
        ("", "2026-11-05", 0),
        ("2026-11-06T00:00", "", 0),
    ],
)
def test_days_late(came: str, due: str, days: int) -> None:
    assert days_late(Row("anna", Verdict("rms_norm"), "a.py", came), due) == days


@pytest.mark.slow
def test_the_best_of_several_dates_counts() -> None:
    hand_in("2026-11-05/anna", HALF)
    hand_in("2026-11-07/anna", RIGHT)
    hand_in("2026-11-09/anna", RIGHT)
    hand_in("2026-11-05/bob", RIGHT)
    hand_in("2026-11-07/bob", HALF)
    hand_in("carla/2026-11-06", HALF)  # the other way round is understood too
    hand_in("dora", HALF)
    graded("--due", "2026-11-05")
    rows = table("grades.csv")
    assert rows.keys() == {"anna", "bob", "carla", "dora"}
    assert rows["anna"]["file"] == "2026-11-07/anna/a.py" and rows["anna"]["late"] == "2"
    assert rows["bob"]["file"] == "2026-11-05/bob/a.py" and rows["bob"]["late"] == "0"
    assert rows["carla"]["late"] == "1" and rows["carla"]["date"] == "2026-11-06"
    assert rows["dora"]["date"] == rows["dora"]["late"] == ""
    lines = table()
    assert [lines[s]["marks"] for s in ("anna", "bob", "carla")] == ["11", "11", "4"]
    assert [lines[s]["in time"] for s in ("anna", "bob", "carla")] == ["4", "11", "0"]
    everything = json.loads(Path("grades.json").read_text())
    assert sum(row["student"] == "anna" for row in everything["rows"]) == 3  # of all dates
    graded("--update")  # --due is kept, and so are dates whose folder is gone
    assert table()["anna"]["late"] == "2"
    Path("in/2026-11-05").rename("away")
    hand_in("2026-11-12/bob", HALF)
    graded("--update")
    assert table("grades.csv")["bob"]["file"] == "2026-11-05/bob/a.py"


def test_a_due_date_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["grade", "in", "--csv", "x.csv", "--due", "Friday"])
    assert "'Friday' is no date as 2026-11-05T18:00" in capsys.readouterr().err
    hand_in("anna")
    assert main(["grade", "in", "--csv", "x.json"]) == 2
    assert "must not end in .json" in capsys.readouterr().err


def test_without_submissions_no_folder_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", "in", "--csv", "new/grades.csv"]) == 2
    assert "in is not a folder" in capsys.readouterr().err
    assert not Path("new").exists()


# --------------------------------------------------------------------------- marks and feedback


def test_done_gives_all_and_anything_else_at_most_half() -> None:
    assert mark(Verdict("rms_norm", 11.0, 11.0, True)) == 11
    assert mark(Verdict("rms_norm", 10.0, 11.0, False)) == 5
    rows = [
        Row("anna", Verdict("rms_norm", 8.0, 11.0), "a.py"),
        Row("anna", Verdict("rms_norm", 11.0, 11.0, True), "b.py"),
        Row("anna", Verdict("swiglu", 0.0, 9.0)),
    ]
    assert [row.file for row in best(rows)] == ["b.py", ""]
    (line,) = students(rows, own={"anna": {"manual": "-1"}})
    assert (line.marks, line.of, line.done, line.total) == (11, 20, 1, 10)
    assert [points(cell) for cell in ("1,5", " 2 ", "", "x", "nan", "1e999")] == [
        1.5, 2.0, None, None, None, None,
    ]  # fmt: skip


def test_feedback_is_one_page_that_runs_nothing() -> None:
    hand_in("<b>anna", HEAD + "    raise ValueError('<script>alert(1)</script> & more')\n")
    graded("--reports", "feedback")
    edit("<b>anna", manual="1", note="<i>see</i> me")
    graded("--reports", "feedback", "--update")
    found = Path("feedback/<b>anna.html").read_text(encoding="utf-8")
    assert "<script" not in found and "<i>" not in found and "<b>" not in found
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in found
    assert "Note: &lt;i&gt;see&lt;/i&gt; me" in found and "By your teacher: 1 points." in found
    assert "color-scheme: light dark" in found and "default-src 'none'" in found
    assert not re.findall(r"src=|href=\"(?!#)", found)
    assert "Note: <i>see</i> me" in Path("feedback/<b>anna.txt").read_text(encoding="utf-8")
    assert Path("feedback/earlier/<b>anna 1.html").is_file()


def test_feedback_says_which_file_and_how_late() -> None:
    verdict = Verdict("rms_norm", 8.0, 11.0, False, text="rms_norm: 8 of 11")
    (line,) = students([Row("anna", verdict, "d/a.py", "2026-11-06T00:00", "x")], "2026-11-05")
    assert "file: d/a.py, 1 day late" in text(line, "2026-11-05")
    assert "<td>4</td><td>8 of 11</td><td>no</td>" in page(line, "2026-11-05")


# --------------------------------------------------------------------------- the reference first


@pytest.mark.parametrize("name", ["rsqrt", "mean", "square"])
def test_replacing_torch_inside_the_function_fools_no_check(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import torch

    def lies(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        monkeypatch.setattr(torch, name, lambda t, *a, **k: torch.ones_like(t), raising=False)
        monkeypatch.setattr(torch.Tensor, name, lambda t, *a, **k: t * 0 + 1, raising=False)
        return (x * weight).to(x.dtype)

    report = examine(exercise("rms_norm"), lies)
    monkeypatch.undo()
    assert report.points == 0


# --------------------------------------------------------------------------- a run that is ended


@pytest.mark.parametrize(
    ("how", "number"),
    [
        pytest.param(signal.SIGKILL, 20, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 60, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 60, marks=pytest.mark.slow),
    ],
)
def test_submissions_interrupted_are_graded_to_the_end(
    how: signal.Signals, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C or a crash the same command goes on, runs no file twice, and leaves no trace."""
    for n in range(number):
        hand_in(f"s{n:02}", f"# {n}\n{RIGHT if n % 3 else HALF}")
    hand_in(f"s{number - 1}", f"{LOOP}# slow, so that there is something to interrupt\n")
    command = [sys.executable, "-m", "lm_from_scratch", "grade", "in", "--csv", "grades.csv"]
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [*command, "--jobs", "2", "--quiet"], env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
    )  # fmt: skip
    unfinished, end = Path("grades-unfinished.jsonl"), time.monotonic() + 120
    while not unfinished.exists() or unfinished.read_text().count("\n") < number // 3:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(how)
    said = process.communicate(timeout=30)[1].decode()
    assert process.returncode == (130 if how == signal.SIGINT else -9)
    assert ("The same command goes on" in said) == (how == signal.SIGINT)
    assert not Path("grades.csv").exists()
    known = unfinished.read_text().count("\n")
    with unfinished.open("a") as file:
        file.write('{"student": "s5')  # as a crash leaves it
    hand_in(f"s{number - 1}", RIGHT)
    seen = runs(monkeypatch)
    graded()
    assert len(seen) == len({*seen}) == number - known
    assert not unfinished.exists() and not Path("earlier").exists()
    lines = table()
    assert len(lines) == number
    done = [int(line["done"]) for line in lines.values()]
    assert done == [*(int(n % 3 > 0) for n in range(number - 1)), 1]
    for child in Path("/proc").glob("[0-9]*/cmdline"):  # none that goes on without its parent
        try:
            assert b"grades.csv" not in child.read_bytes()
        except OSError:
            continue
