"""The commands of a student: start, check, hint, solution, list, next, watch."""

import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lm_from_scratch.__main__ import main
from lm_from_scratch.exercises import catalogue, progress
from lm_from_scratch.exercises.card import folder
from lm_from_scratch.exercises.exercise import drafts, exercise, exercises
from lm_from_scratch.exercises.grade import plan
from lm_from_scratch.exercises.source import rules, script, solution

ROOT = Path(__file__).parents[3]
WRONG = "import torch\n\n\ndef rms_norm(x, weight, eps=1e-6):\n    return x * weight\n"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An own folder, and no progress yet."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("LM_FROM_SCRATCH_PROGRESS", str(tmp_path / "progress.json"))


def said(capsys: pytest.CaptureFixture[str], *command: str, code: int = 0) -> str:
    assert main(list(command)) == code
    out, err = capsys.readouterr()
    return out + err


def test_from_start_to_done(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "start", "rms_norm")
    assert "check rms_norm rms_norm.py" in text
    assert Path("rms_norm.py").read_text() == script("rms_norm")
    assert "not written yet" in said(capsys, "check", "rms_norm", code=1)
    assert progress.load() == {}
    Path("rms_norm.py").write_text(WRONG)
    text = said(capsys, "check", "rms_norm", code=1)
    assert "FAIL" in text and "this case is about:" in text
    Path("rms_norm.py").write_text(solution("rms_norm"))
    text = said(capsys, "check", "rms_norm", "rms_norm.py")
    assert "8 of 8 checks, 11 of 11 points" in text
    assert progress.load()["rms_norm"] == {"points": 11.0, "passed": True, "seed": 0}
    assert " done  rms_norm" in said(capsys, "list")
    assert f"1 of {len(exercises())} done" in said(capsys, "list")
    assert "check rms_norm 'a b/c d.py'" in said(capsys, "start", "rms_norm", "a b/c d.py")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_an_answer_in_the_root_of_a_clone_disturbs_no_tool(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`make lint` and `git status` pass over what `start` writes there, and see what is below."""
    for name in (".gitignore", "pyproject.toml"):
        shutil.copy(ROOT / name, name)
    Path("tests").mkdir()
    Path("tests/test_mine.py").write_text("")
    subprocess.run(["git", "init", "--quiet"], check=True)
    said(capsys, "start", "rms_norm")
    lint = [sys.executable, "-m", "ruff", "check", "--no-cache", "."]
    subprocess.run(lint, check=True, stdout=subprocess.DEVNULL)
    command = ["git", "status", "--short", "--untracked-files=all"]
    seen = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert sorted(seen.split()[1::2]) == [".gitignore", "pyproject.toml", "tests/test_mine.py"]
    Path("tests/test_mine.py").write_text("import os\n")
    assert subprocess.run(lint, stdout=subprocess.DEVNULL, check=False).returncode == 1


def test_a_check_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    """For continuous integration; the exit code is the same."""
    Path("a.py").write_text(WRONG)
    found = json.loads(said(capsys, "check", "rms_norm", "a.py", "--json", code=1))
    assert (found["exercise"], found["points"], found["of"], found["passed"]) == (
        "rms_norm", 0, 11, False,
    )  # fmt: skip
    assert "shape and values" in found["failed"] and "FAIL" in found["text"]
    Path("a.py").write_text(solution("rms_norm"))
    assert json.loads(said(capsys, "check", "rms_norm", "a.py", "--json"))["passed"]
    assert progress.load() == {}


def test_rules_for_ai_helpers_are_beside_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """In each folder once; those that a teacher has written are kept."""
    assert "AGENTS.md says" in said(capsys, "start", "rms_norm")
    assert Path("AGENTS.md").read_text(encoding="utf-8") == rules()
    Path("AGENTS.md").write_text("The rules of this course.")
    assert "AGENTS.md" not in said(capsys, "start", "rope")
    assert Path("AGENTS.md").read_text() == "The rules of this course."
    said(capsys, "start", "rope", "deeper/rope.py")
    assert Path("deeper/AGENTS.md").read_text(encoding="utf-8") == rules()


def test_a_case_and_a_seed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.py").write_text(WRONG)
    text = said(capsys, "check", "rms_norm", "a.py", "--case", "2", "--seed", "4", code=1)
    assert "0 of 1 checks" in text and "case=2, seed=4" in text
    assert progress.load() == {}


def test_hints_come_one_by_one_and_the_solution_on_the_second_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hints = exercise("rms_norm").hints
    for number, hint in enumerate(hints, start=1):
        text = said(capsys, "hint", "rms_norm")
        assert f"hint {number} of {len(hints)}: {hint}" in text
        assert ("the last one" in text) == (number == len(hints))
    assert hints[-1] in said(capsys, "hint", "rms_norm")
    assert said(capsys, "hint", "rope", "--all").count("hint ") >= 2
    text = said(capsys, "solution", "rms_norm", code=1)
    assert "Ask again" in text and "def rms_norm" not in text
    assert said(capsys, "solution", "rms_norm") == solution("rms_norm")


def test_the_solution_is_shown_at_once_when_it_is_solved(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress.keep("rms_norm", 11.0, True, 0)
    assert said(capsys, "solution", "rms_norm") == solution("rms_norm")


def test_the_solution_is_shown_where_nothing_can_be_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LM_FROM_SCRATCH_PROGRESS", "/proc/no/such/place.json")
    assert said(capsys, "solution", "rms_norm") == solution("rms_norm")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"rms_norm": {"a":' + "[" * 100_000, "1e", "5", "[]", "\udcff", "cut"]
)
def test_a_damaged_progress_is_set_aside_and_that_is_said(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """Nothing that an eye can still read is overwritten, also by the next one that is damaged."""
    file = progress.path()
    if text == "cut":
        for number in range(40):
            assert not progress.update(f"exercise {number}", hints=1)
        text = file.read_text()[:-30]
    for number in (1, 2):
        file.write_bytes(text.encode(errors="surrogateescape"))
        place = file.with_name(f"progress-damaged-{number}.json")
        assert f"{file} is damaged. It is now {place}" in said(capsys, "hint", "rope")
        assert place.read_bytes() == text.encode(errors="surrogateescape")
        assert progress.load() == {"rope": {"hints": 1}}
    assert not progress.keep("rope", 11.0, True, 0)
    assert progress.load()["rope"]["points"] == 11.0


def test_a_progress_that_is_repaired_meanwhile_is_not_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the reading of it and the lock another program has written a good one."""
    good, read = {"rope": {"hints": 2}}, progress.contents_of
    progress.path().write_text("{")

    def repaired_afterwards(file: Path) -> dict[str, object] | None:
        contents = read(file)
        file.write_text(json.dumps(good))
        return contents

    monkeypatch.setattr(progress, "contents_of", repaired_afterwards)
    assert progress.load() == good
    assert json.loads(progress.path().read_text()) == good
    assert not list(progress.path().parent.glob("*damaged*"))


def test_a_damaged_progress_behind_a_link_is_kept(tmp_path: Path) -> None:
    real = tmp_path / "work" / "elsewhere.json"
    real.write_text('{"rope": ')
    progress.path().symlink_to(real)
    assert not progress.update("rope", hints=1)
    assert progress.path().is_symlink() and progress.load() == {"rope": {"hints": 1}}
    assert real.with_name("elsewhere-damaged-1.json").read_text() == '{"rope": '


def test_where_nothing_can_be_locked_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(*args: object, **options: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr("filelock.FileLock.acquire", acquire)
    assert "cannot be read or written" in progress.keep("rope", 9.0, True, 0)
    progress.path().write_text("{")
    with pytest.raises(OSError, match="progress"):
        progress.load()
    assert progress.path().read_text() == "{"


@pytest.mark.parametrize("text", ["", "\n{}", '\ufeff{"rms_norm": 5, "rope": {"hints": 1}}'])
def test_a_progress_that_an_editor_has_touched_is_none_that_is_damaged(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    progress.path().write_text(text, encoding="utf-8")
    assert "damaged" not in said(capsys, "hint", "swiglu")
    known = json.loads(progress.path().read_text())
    assert known == {**json.loads(text.strip("\ufeff\n") or "{}"), "swiglu": {"hints": 1}}


def test_a_progress_that_may_not_be_read_is_not_overwritten(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress.keep("rms_norm", 11.0, True, 0)
    before, read = progress.path().read_bytes(), Path.read_text

    def refuse(path: Path, *args: str, **options: str) -> str:
        if path.name == "progress.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert "progress.json: Permission denied" in said(capsys, "list", code=2)
    Path("rope.py").write_text(solution("rope"))
    assert "progress.json cannot be read or written" in said(capsys, "check", "rope")
    assert progress.path().read_bytes() == before


def test_programs_that_write_at_the_same_time_keep_all_of_it() -> None:
    code = (
        "import sys\nfrom lm_from_scratch.exercises import progress\n"
        "for n in range(100): assert not progress.update(f'{sys.argv[1]} {n}', hints=1)"
    )
    programs = [subprocess.Popen([sys.executable, "-c", code, name], cwd=ROOT) for name in "ab"]
    assert [program.wait() for program in programs] == [0, 0]
    assert len(progress.load()) == 200


def test_a_link_to_the_progress_stays_one(tmp_path: Path) -> None:
    progress.path().symlink_to(tmp_path / "work" / "elsewhere.json")
    assert not progress.update("rope", hints=1)
    assert progress.path().is_symlink() and progress.load() == {"rope": {"hints": 1}}


@pytest.mark.skipif(os.name == "nt", reason="no such files")
@pytest.mark.parametrize("kind", ["pipe", "/dev/full", "/dev/null", "folder"])
def test_the_progress_is_kept_in_a_file_and_in_nothing_else(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo("pipe")
    Path("folder").mkdir()
    monkeypatch.setenv("LM_FROM_SCRATCH_PROGRESS", kind)
    for command in ("list", "next", "hint rope", "solution rope"):
        text = said(capsys, *command.split(), code=2)
        assert text.startswith(f"error: {kind} is no file: set LM_FROM_SCRATCH_PROGRESS to one")
        assert text.count("\n") == 1
    Path("rms_norm.py").write_text(solution("rms_norm"))
    assert f"This is not kept: {kind} is no file: set" in said(capsys, "check", "rms_norm")
    assert Path("/dev/null").is_char_device()


def test_without_a_home_folder_the_variable_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user has no name."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LM_FROM_SCRATCH_PROGRESS")
    monkeypatch.setattr(Path, "home", home)
    for command in ("list", "next", "hint rope", "solution rope"):
        text = said(capsys, *command.split(), code=2)
        assert "set LM_FROM_SCRATCH_PROGRESS to a file" in text and text.count("\n") == 1
    Path("rms_norm.py").write_text(solution("rms_norm"))
    assert "This is not kept: there is no home folder" in said(capsys, "check", "rms_norm")


def test_a_progress_that_cannot_be_kept_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LM_FROM_SCRATCH_PROGRESS", "/proc/no/such/place.json")
    assert said(capsys, "hint", "rms_norm").count("hint ") >= len(exercise("rms_norm").hints)
    Path("rms_norm.py").write_text(solution("rms_norm"))
    assert "/proc/no/such/place.json cannot be read or written" in said(capsys, "check", "rms_norm")
    assert "Nothing is kept yet" in said(capsys, "list")


def test_a_loop_that_never_ends_ends(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.py").write_text(WRONG.replace("return x * weight", "while True: pass"))
    text = said(capsys, "check", "rms_norm", "a.py", "--seconds", "1", code=1)
    assert "Is there a loop that never ends?" in text


def test_an_interrupted_check_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.py").write_text(WRONG.replace("return x * weight", "raise KeyboardInterrupt"))
    assert said(capsys, "check", "rms_norm", "a.py", code=130) == "interrupted\n"


def test_next_follows_the_path(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = exercises()[:2]
    assert said(capsys, "next").startswith(f"{first.name}: ")
    progress.keep(first.name, 1.0, True, 0)
    assert said(capsys, "next").startswith(f"{second.name}: ")
    for e in exercises():
        progress.keep(e.name, float(e.points), True, 0)
    assert said(capsys, "next") == "All exercises are done.\n"


def test_a_draft_can_be_done_and_is_not_in_the_course(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rms_norm", "swiglu"):
        shutil.copytree(folder(name), tmp_path / "catalogue" / name)
    checks = tmp_path / "catalogue" / "swiglu" / "checks.py"
    checks.write_text(
        checks.read_text().replace("EXERCISE = Exercise(", "EXERCISE = Exercise(\n    draft=True,")
    )
    monkeypatch.setattr(catalogue, "__path__", [str(tmp_path / "catalogue")])
    exercises.cache_clear()
    try:
        assert [e.name for e in exercises()] == ["rms_norm"]
        assert [e.name for e in drafts()] == ["swiglu"]
        course, _, after = said(capsys, "list").partition("drafts, whose checks are not proved")
        assert "rms_norm" in course and "swiglu" not in course and "swiglu" in after
        assert "0 of 1 done" in after
        Path("swiglu.py").write_text(solution("swiglu"))
        assert "All checks hold" in said(capsys, "check", "swiglu")
        assert said(capsys, "next").startswith("rms_norm: ")
        graded, *_ = plan({"somebody": [Path("swiglu.py")]}, None)
        assert [e.name for e in graded] == ["swiglu"]
    finally:
        exercises.cache_clear()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["check", "rms_nrom"], "no exercise 'rms_nrom'; do you mean rms_norm"),
        (["check", "rms_norm"], "there is no rms_norm.py and no rms_norm.ipynb here"),
        (["check", "rms_norm", "no.py"], "there is no file no.py"),
        (["watch", "rms_norm", "no.py"], "there is no file no.py"),
        (["check", "rms_norm", "there.py", "--case", "99"], "has cases 1 to 8, not 99"),
        (["start", "rms_norm", "there.py"], "there.py exists already"),
        (["start", "rms_norm", "a.txt"], "a.txt must end in .py or .ipynb"),
        (["check", "zzz"], "there is no exercise 'zzz'; list shows all"),
        (["hint", "nothing"], "no exercise 'nothing'"),
        (["solution", "nothing"], "no exercise 'nothing'"),
    ],
)
def test_bad_commands_are_refused(
    capsys: pytest.CaptureFixture[str], command: list[str], words: str
) -> None:
    Path("there.py").write_text(WRONG)
    assert words in said(capsys, *command, code=2)
    assert Path("there.py").read_text() == WRONG


def test_the_newest_file_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    Path("build/notebooks/exercises").mkdir(parents=True)
    Path("build/notebooks/exercises/rms_norm.py").write_text(solution("rms_norm"))
    assert "11 of 11" in said(capsys, "check", "rms_norm")
    Path("rms_norm.py").write_text(WRONG)
    os.utime("rms_norm.py", (time.time() + 5, time.time() + 5))
    assert "FAIL" in said(capsys, "check", "rms_norm", code=1)


def test_what_no_console_can_show_and_no_folder_can_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("a.py").write_text(WRONG.replace("return x * weight", "raise ValueError('\\ud800')"))
    assert "ValueError: \\ud800" in said(capsys, "check", "rms_norm", "a.py", code=1)
    assert "error: /proc/" in said(capsys, "start", "rms_norm", "/proc/no/a.py", code=2)


def test_a_broken_file_of_progress_is_no_trouble(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    entry = '{"hints": Infinity, "points": NaN, "asked": 1e999}'
    (tmp_path / "progress.json").write_text(f'{{"rms_norm": {entry}}}')
    assert "hint 1 of" in said(capsys, "hint", "rms_norm")
    assert "rms_norm" in said(capsys, "list")


# --------------------------------------------------------------------------- watch


class Watch:
    """The command in a process of its own, read as it speaks."""

    def __init__(self, file: Path):
        command = [sys.executable, "-m", "lm_from_scratch", "watch", "rms_norm", str(file)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [*command, "--seconds", "2"], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def until(self, words: str, seconds: float = 60) -> str:
        assert self.process.stdout is not None
        text, end = "", time.monotonic() + seconds
        while words not in text:
            left = end - time.monotonic()
            assert left > 0 and select.select([self.process.stdout], [], [], left)[0], text
            part = os.read(self.process.stdout.fileno(), 65536).decode()
            assert part, text
            text += part
        return text

    def close(self) -> int:
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(10)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return code


@pytest.mark.slow
def test_watch_checks_after_every_save(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(WRONG)
    watch = Watch(file)
    try:
        watch.until("again: check")
        file.write_text(solution("rms_norm"))
        assert "Next: " in watch.until("Next: ")
        file.unlink()  # as some editors do
        time.sleep(0.5)
        file.write_text("def rms_norm(:\n")
        watch.until("syntax error")
        file.write_text(WRONG.replace("return x * weight", "import os; os._exit(3)"))
        watch.until("exit code 3")
        file.write_text(WRONG.replace("return x * weight", "while True: pass"))
        watch.until("Is there a loop that never ends?")
        file.write_text(WRONG.replace("return x * weight", "while True: pass  # again"))
        time.sleep(0.6)  # it is being checked now, and a save ends that
        other = tmp_path / "other.py"
        other.write_text(solution("rms_norm"))
        other.replace(file)
        watch.until("All checks hold")
        assert watch.process.stdin is not None
        watch.process.stdin.write(b"\n")  # Enter
        watch.process.stdin.flush()
        watch.until("All checks hold")
    finally:
        assert watch.close() == 0
    assert progress.load()["rms_norm"]["passed"]
