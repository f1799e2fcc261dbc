"""Every task is a Python command; the Makefile calls it."""

from __future__ import annotations

import io
import os
import runpy
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "make.py"))


def fake_python(folder: Path, name: str, prints: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{prints}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_lists_and_passes_on(tmp_path: Path) -> None:
    def said(*command: str) -> str:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    tasks = said(sys.executable, "make.py")
    assert said("make", "-s") == said("make", "-s", "help") == tasks
    assert "  check-site " in tasks
    done = subprocess.run(["make", "nonsuch"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "There is no task 'nonsuch'. The tasks: install, wheels," in done.stderr


def test_values_follow_the_task(make: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As for make. One in the environment holds as well."""
    monkeypatch.setenv("PY", "python-of-mine")
    monkeypatch.setenv("WEEKS", "6")
    for name in ("OMP_NUM_THREADS", "GALLERY_JOBS", "MYPY_NUM_WORKERS"):
        monkeypatch.setenv(name, "7")
    ran: list[tuple[str, ...]] = []
    here = make["main"].__globals__
    monkeypatch.setitem(here, "run", lambda *words, **more: ran.append(words))
    monkeypatch.setitem(here, "built", lambda: None)
    monkeypatch.setenv("LAB_FLAGS", "")
    make["main"](
        ["serve", "PORT=9000", "lab", "LAB_FLAGS=--ip '0.0.0.0' --allow-root", "exercises"]
    )
    served, _, lab, weeks = ran
    assert served[0] == "python-of-mine" and served[-1] == "9000"
    assert lab[-3:] == ("--ip", "0.0.0.0", "--allow-root")
    assert weeks[1:] == ("docs/_ext", "course.hand_out", "build/weeks_6", "6")


def test_a_command_that_fails_ends_the_task(make: dict[str, Any]) -> None:
    for code, ends in (("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)):
        with pytest.raises(SystemExit) as stopped:
            make["run"](sys.executable, "-c", code)
        assert stopped.value.code == ends


@pytest.mark.skipif(sys.platform == "win32", reason="another process gets no Ctrl-C there")
def test_a_command_may_answer_ctrl_c(tmp_path: Path) -> None:
    """The task waits for it, and ends as it ends."""
    command = (
        "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: sys.exit(7)); "
        "print('ready', flush=True); time.sleep(60)"
    )
    task = f"import runpy, sys; runpy.run_path('make.py')['run'](sys.executable, '-c', {command!r})"
    started = subprocess.Popen(
        [sys.executable, "-c", task], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    assert started.stdout is not None and started.stdout.readline() == b"ready\n"
    os.killpg(started.pid, signal.SIGINT)
    assert started.wait(timeout=30) == 7
    started.stdout.close()


def test_where_an_environment_has_its_python(make: dict[str, Any]) -> None:
    folder = Path("a b")
    assert Path(make["venv_python"](folder, windows=False)) == folder / "bin" / "python"
    assert Path(make["venv_python"](folder, windows=True)) == folder / "Scripts" / "python.exe"


@pytest.mark.skipif(sys.platform == "win32", reason="its scripts are no shell scripts")
def test_which_python_makes_the_environment(
    make: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make["base_python"]
    monkeypatch.delenv("PYTHON", raising=False)
    assert base() == sys.executable
    old = fake_python(tmp_path, "python3", "echo 3.9")
    new = fake_python(tmp_path, "python3.12", "echo 3.12")
    broken = fake_python(tmp_path, "python3.11", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", old)
    assert base() == "python3.12"
    Path(new).unlink()
    with pytest.raises(SystemExit, match=r"3\.11 or newer is needed.*python3\.11 does not start"):
        base()
    for name, fault in ((old, "is 3.9"), (broken, "does not start"), ("py7", "There is no py7")):
        monkeypatch.setenv("PYTHON", name)
        with pytest.raises(SystemExit, match=fault):
            base()


def test_a_linux_without_a_gpu_gets_the_cpu_build_of_torch(
    make: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def opened(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO()

    def silent(url: str, timeout: float) -> io.BytesIO:
        raise urllib.error.URLError("no such host")

    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)

    def builds() -> list[str]:
        return make["torch_builds"](sys.executable)

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", opened)
    place = make["CPU_TORCH"]
    assert builds() == ["--extra-index-url", place]
    assert asked == [f"{place}/torch/"]
    monkeypatch.setattr(urllib.request, "urlopen", silent)
    assert builds() == []
    monkeypatch.setattr(urllib.request, "urlopen", opened)
    settings = tmp_path / "pip.conf"
    settings.write_text("[global]\nindex-url = https://packages.invalid/simple\n")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE"):
        with monkeypatch.context() as told:
            told.setenv(name, str(settings))
            assert builds() == []
    with monkeypatch.context() as other:
        other.setattr(sys, "platform", "darwin")
        assert builds() == []
    fake_python(tmp_path, "nvidia-smi", "")
    assert builds() == []
    assert len(asked) == 1


def test_with_wheels_at_hand_no_network_is_asked(
    make: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    here = make["main"].__globals__
    fake_python(tmp_path, "python", "echo yes")
    monkeypatch.setitem(here, "venv_python", lambda: str(tmp_path / "python"))
    monkeypatch.setitem(here, "VENV", tmp_path / "venv")
    monkeypatch.setitem(here, "WHEELS", tmp_path)
    monkeypatch.setitem(here, "torch_builds", lambda python: pytest.fail("the network is asked"))
    ran: list[tuple[str, ...]] = []
    monkeypatch.setitem(here, "succeeds", lambda *words: bool(ran.append(words)))
    with pytest.raises(
        SystemExit, match=r"needs wheels for this system in .*, or that folder gone"
    ):
        make["install"]()
    assert {"--no-index", "--find-links", str(tmp_path)} <= set(ran[0])


@pytest.mark.parametrize("path", ["/", "/etc/nowhere", "", ".", "..", "../nowhere", "docs/../../x"])
def test_nothing_outside_the_project_is_removed(
    make: dict[str, Any], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(make["main"].__globals__, "ROOT", tmp_path / "project")
    monkeypatch.setitem(make["main"].__globals__, "shutil", None)  # whose rmtree is not reached
    with pytest.raises(ValueError, match="is not inside"):
        make["remove"](path)


def test_clean_keeps_the_environment(
    make: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = make["main"].__globals__
    monkeypatch.setitem(here, "ROOT", tmp_path)
    monkeypatch.setitem(here, "VENV", tmp_path / ".venv")
    keep = [".venv/x/__pycache__/a.pyc", "build/notebooks/mine.ipynb", "docs/index.rst"]
    gone = [
        "docs/_build/a.html",
        "docs/book.rst",
        "build/bdist.linux/a",
        "tests/__pycache__/a.pyc",
        ".ruff_cache/a",
    ]
    for name in (*keep, *gone):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    make["clean"]()
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(keep)
