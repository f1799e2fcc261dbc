"""run_gpu.py: what matters most comes first, a run goes on where it was, and nothing that failed,
hung or was left out passes for done."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import run_gpu
import torch
from run_gpu import Done, Stage

HERE = {"device": "a chip", "code": "1"}


@pytest.fixture
def done(tmp_path: Path) -> Callable[..., Done]:
    """What is done in a folder."""
    return lambda about=HERE, again=False: Done(tmp_path / "gpu", about, again)


@pytest.fixture
def stage(tmp_path: Path) -> Callable[..., Stage]:
    """A stage that writes its name, and ends with this code."""

    def made(name: str, code: int = 0, limit: float = 60, **more: Sequence[object]) -> Stage:
        line = f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} '); raise SystemExit({code})"
        return Stage(name, limit, [sys.executable, "-S", "-c", line], **more)

    return made


@pytest.fixture
def ran(tmp_path: Path) -> Callable[[], list[str]]:
    """The names written since it was called last."""

    def names() -> list[str]:
        path = tmp_path / "ran"
        found = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return found

    return names


def summary(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = capsys.readouterr().out.partition("==> summary\n")[2].splitlines()
    return {line[:18].strip(): line[18:] for line in lines}


def test_a_failure_counts_and_stops_nothing(
    stage: Callable[..., Stage], done: Callable[..., Done], ran: Callable[[], list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    stages = [stage("one", 3), stage("two"), stage("three", needs=("no_such_module", "torch"))]
    assert not run_gpu.run(stages, done())
    assert ran() == ["one", "two"]
    said = summary(capsys)
    assert said["one"].startswith("FAILED, ") and said["two"].startswith("ok, ")
    assert said["three"] == "skipped: there is no no_such_module"
    assert not run_gpu.run(stages, done())  # it has not passed, so it runs again
    assert ran() == ["one"]
    assert summary(capsys)["two"].endswith("in a run before")
    assert run_gpu.run([stage("one"), *stages[1:]], done())
    assert ran() == ["one"]
    assert run_gpu.run(stages, done()) and ran() == []


def test_it_begins_anew_on_another_device_or_code(
    stage: Callable[..., Stage], done: Callable[..., Done], ran: Callable[[], list[str]],
    tmp_path: Path,
) -> None:  # fmt: skip
    rows = tmp_path / "gpu" / "times.json"
    for about, again, runs in [
        (HERE, False, True), (HERE, False, False), (HERE, True, True), (HERE, False, False),
        (HERE | {"code": "2"}, False, True), (HERE | {"device": "other"}, False, True),
    ]:  # fmt: skip
        found = done(about, again)
        assert rows.exists() != runs
        rows.touch()
        assert run_gpu.run([stage("one")], found)
        assert ran() == ["one"] * runs
    assert sorted(path.name for path in rows.parent.iterdir()) == ["done.json", "times.json"]
    done(again=True)
    rows.touch()  # of a stage that was stopped before any had passed
    done()
    assert rows.exists()
    done(HERE | {"code": "2"})
    assert not rows.exists()


def test_what_reads_a_changed_file_runs_again(
    stage: Callable[..., Stage], done: Callable[..., Done], ran: Callable[[], list[str]],
    tmp_path: Path,
) -> None:  # fmt: skip
    """The notebooks show the times."""
    times = tmp_path / "measurements.json"
    stages = [stage("one"), stage("two", reads=(times,))]
    for text, names in [(None, ["one", "two"]), ("1", ["two"]), ("1", []), ("2", ["two"])]:
        if text:
            times.write_text(text)
        assert run_gpu.run(stages, done())
        assert ran() == names
    named = [stage.name for stage in run_gpu.stages(tmp_path, dry=False) if stage.reads]
    assert named == ["notebooks", "nbval"]


def alive(pid: int) -> bool:
    """Whether it runs; who has ended and waits to be asked for its code does not."""
    status = Path(f"/proc/{pid}/stat")
    with_name = status.read_text() if status.exists() else ") Z"
    return with_name.rpartition(")")[2].split()[0] not in "ZX"


def wait_for(what: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not (found := what()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


#: Starts a process, writes its number, and hangs with it.
HANGS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
new = pathlib.Path(sys.argv[1]).with_suffix(".new")
new.write_text(str(child.pid))
new.rename(sys.argv[1])
time.sleep(60)
"""


def test_one_that_hangs_is_stopped_with_what_it_started(
    stage: Callable[..., Stage], done: Callable[..., Done], ran: Callable[[], list[str]],
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pid = tmp_path / "pid"
    hangs = Stage("hangs", 2, [sys.executable, "-S", "-c", HANGS, pid])
    assert not run_gpu.run([hangs, stage("two")], done())
    assert ran() == ["two"]
    assert summary(capsys)["hangs"].startswith("TIMED OUT, ")
    assert wait_for(lambda: not alive(int(pid.read_text())))
    assert done().verdict(hangs) is None and done().verdict(stage("two"))


def test_what_does_not_fit_is_left_out(
    stage: Callable[..., Stage], done: Callable[..., Done], ran: Callable[[], list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    stages = [stage("one", limit=61), stage("two", limit=30)]
    assert run_gpu.run(stages, done(), end=time.monotonic() + 60)
    assert ran() == ["two"]
    assert summary(capsys)["one"].startswith("left out: it may take 61 s, and ")
    assert run_gpu.run(stages, done(), end=time.monotonic() + 120)
    assert ran() == ["one"]


#: The stage "one" passes; "two" hangs the first time.
RUN = f"""
import pathlib, sys
sys.path.insert(0, {str(Path(run_gpu.__file__).parent)!r})
import run_gpu
from run_gpu import Stage
folder = pathlib.Path(sys.argv[1])
python = (sys.executable, "-S", "-c")
write = "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + ' ')"
two = (*python, {HANGS!r}, folder / "pid")
if (folder / "pid").exists():
    two = (*python, write, folder / "ran", "two")
run_gpu.stages = lambda *_: [
    Stage("one", 60, (*python, write, folder / "ran", "one")), Stage("two", 60, two)
]
run_gpu.about = lambda device: {{"device": device}}
run_gpu.ROOT = folder
run_gpu.main(["--dry-run"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_goes_on(
    number: signal.Signals, ran: Callable[[], list[str]], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", RUN, tmp_path]
    pid = tmp_path / "pid"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as first:
        assert wait_for(pid.exists)
        first.send_signal(number)
        assert first.wait(30) != 0
        if number == signal.SIGKILL:  # nobody is left to stop the stage
            os.killpg(os.getpgid(int(pid.read_text())), signal.SIGKILL)
    assert wait_for(lambda: not alive(int(pid.read_text())))
    assert ran() == ["one"]
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert ran() == ["two"]
    assert re.search(r"^one +ok, \d+ s, in a run before$", second.stdout, re.MULTILINE)


def test_code_counts_and_what_a_run_writes_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = tmp_path / "tutorials" / "gpu"
    monkeypatch.setattr(run_gpu, "ROOT", tmp_path)
    monkeypatch.setattr(run_gpu, "PAGES", pages)
    for folder in (pages, tmp_path / "lm_from_scratch", tmp_path / "tests" / "kernels"):
        folder.mkdir(parents=True)

    def code(**files: str) -> str:
        for place, text in files.items():
            if place == "page":
                source, _, printed = text.partition(":")
                outputs = [{"output_type": "stream", "text": [printed]}]
                cell = {"cell_type": "code", "source": [source], "outputs": outputs}
                (pages / "1_page.ipynb").write_text(json.dumps({"cells": [cell]}))
            elif place == "measured":
                (pages / "measurements.json").write_text(text)
            else:
                (tmp_path / place / "kernels" if place == "tests" else tmp_path / place).joinpath(
                    "a.py"
                ).write_text(text)
        return run_gpu.about("a chip")["code"]

    first = code(lm_from_scratch="1", tests="1", page="1:one", measured="{}")
    assert code(page="1:two", measured="[]") == first
    assert len({first, code(lm_from_scratch="2"), code(tests="2"), code(page="2:two")}) == 4
    assert {"device", "torch", "triton", "python"} < set(run_gpu.about("a chip"))


def test_what_matters_most_comes_first(tmp_path: Path) -> None:
    names = ["main times", "kernel tests", "pages as scripts", "times", "notebooks", "nbval"]
    for dry in (False, True):
        stages = run_gpu.stages(tmp_path, dry)
        assert [stage.name for stage in stages] == [*names, "memcheck", "racecheck"]
        assert all(str(tmp_path) in str(stages[i].words) for i in (0, 3))  # rows are kept there
    assert stages[0].limit <= 240 and not stages[0].missing()
    assert stages[0].words[-len(run_gpu.MAIN) :] == [*run_gpu.MAIN]
    bench_kernels = pytest.importorskip("bench_kernels", exc_type=ImportError)
    assert set(run_gpu.MAIN) < set(bench_kernels.ROWS)


def test_a_page_prints_what_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = tmp_path / "1_page.ipynb"
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["one\n"]},
        {"output_type": "execute_result", "data": {"text/plain": "1"}},
        {"output_type": "stream", "name": "stdout", "text": ["two\n"]},
    ]
    for code, verdict in [
        ("x = 1\nprint('one')\nx\nprint('two')", "prints what is stored"),
        ("print('one')\nprint('three')", "prints something else"),
        ("1 / 0", "ZeroDivision"),
    ]:
        cell = {"cell_type": "code", "source": code.splitlines(keepends=True), "outputs": outputs}
        cells = [{"cell_type": "markdown", "source": ["Text."]}, cell]
        notebook.write_text(json.dumps({"cells": cells}))
        assert run_gpu.pages([notebook]) == (verdict == "prints what is stored")
        assert verdict in capsys.readouterr().out


def process(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, run_gpu.__file__, *options], capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_it_needs_a_gpu() -> None:
    run = process()
    assert run.returncode == 1
    assert "make gpu needs" in run.stderr


@pytest.mark.slow
def test_the_dry_run_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Every stage that this machine has the programs for; the second time nothing is to do."""
    pytest.importorskip("triton", exc_type=ImportError)
    stages = run_gpu.stages(Path(), dry=True)
    for options, wanted in [(["--again"], "ok, "), ([], "in a run before")]:
        run = process("--dry-run", *options)
        assert run.returncode == 0, run.stdout + run.stderr
        print(run.stdout)
        said = summary(capsys)
        for stage in stages:
            assert ("skipped: there is no" if stage.missing() else wanted) in said[stage.name]
