"""Tutorials and exercises as notebooks in a folder of the reader's."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import nbformat
import pytest

from lm_from_scratch.__main__ import main
from lm_from_scratch.exercises import notebooks_command
from lm_from_scratch.exercises.exercise import exercises


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tutorial, as a build packs it."""
    folder = tmp_path / "packed"
    (folder / "1_gpt2").mkdir(parents=True)
    (folder / "1_gpt2" / "1_tokens.ipynb").write_text(json.dumps({"cells": []}))
    monkeypatch.setattr(notebooks_command, "PACKED", folder)
    return folder


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_all_are_written_and_a_changed_one_is_kept(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my course"
    assert main(["notebooks", str(folder)]) == 0
    names = {f"exercises/{found.name}.ipynb" for found in exercises()}
    assert files(folder) >= {"1_gpt2/1_tokens.ipynb", "exercises/AGENTS.md", *names}
    assert f"jupyter lab '{folder}'" in capsys.readouterr().out
    for name in names:
        nbformat.validate(nbformat.read(folder / name, as_version=4))

    mine, other = folder / "exercises" / "rms_norm.ipynb", folder / "1_gpt2" / "1_tokens.ipynb"
    mine.write_text("mine")
    (packed / "1_gpt2" / "1_tokens.ipynb").write_text("a newer one")
    assert main(["notebooks", str(folder)]) == 0
    assert f"{mine} is kept" in capsys.readouterr().out
    assert mine.read_text() == "mine" and other.read_text() == "a newer one"

    mine.write_bytes(b"\xff mine")  # no text at all
    record = folder / ".generated.json"
    for text in ("[" * 100_000, "[]", '{"a":'):
        record.write_text(text)
        assert main(["notebooks", str(folder)]) == 2
        assert f"{record} " in (error := capsys.readouterr().err) and "Remove it" in error
        assert record.read_text() == text
    record.write_text('{"exercises/rms_norm.ipynb": [1], "exercises/rope.ipynb": null}')
    assert main(["notebooks", str(folder)]) == 0
    assert mine.read_bytes() == b"\xff mine"
    record.unlink()
    assert main(["notebooks", str(folder)]) == 0
    assert mine.read_bytes() == b"\xff mine"


def test_it_opens_them(
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where there is no JupyterLab, nothing is written."""
    ran: list[list[str]] = []

    class Jupyter:
        """Gets Ctrl-C, and then another signal."""

        def __init__(self, command: list[str]) -> None:
            ran.append(command)
            self.signals = [KeyboardInterrupt(n) for n in (signal.SIGINT, signal.SIGTERM)]
            self.ended = False

        def wait(self) -> int:
            if self.signals:
                raise self.signals.pop(0)
            return 3 if self.ended else 4

        def terminate(self) -> None:
            assert not self.signals
            self.ended = True

    monkeypatch.setattr(notebooks_command.subprocess, "Popen", Jupyter)
    folder = str(tmp_path / "mine")
    assert main(["notebooks", folder, "--open"]) == 3
    assert ran == [[sys.executable, "-m", "jupyterlab", folder]]
    monkeypatch.setattr(notebooks_command.importlib.util, "find_spec", lambda name: None)
    assert main(["notebooks", str(tmp_path / "other"), "--open"]) == 2
    assert "JupyterLab is not installed here" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_clone_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notebooks_command, "PACKED", tmp_path / "none")
    assert main(["notebooks", str(tmp_path / "out")]) == 2
    assert "python make.py lab" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_exercise_starts_as_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["start", "rms_norm", "rms_norm.ipynb"]) == 0
    nbformat.validate(nbformat.read("rms_norm.ipynb", as_version=4))
    assert main(["check", "rms_norm"]) == 1
    assert "not written yet" in capsys.readouterr().out
