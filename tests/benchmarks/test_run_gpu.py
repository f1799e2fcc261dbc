"""run_gpu.py: what is skipped is named, and nothing that failed passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import run_gpu
import torch
from run_gpu import Stage


def test_every_stage_runs_and_a_failure_counts(capsys: pytest.CaptureFixture[str]) -> None:
    ran = []

    def stage(name: str, passes: bool, *needs: str) -> Stage:
        return Stage(name, needs, lambda: ran.append(name) or passes)

    assert run_gpu.run([stage("one", True), stage("two", True, "no_such_module", "torch")])
    assert ran == ["one"]
    summary = capsys.readouterr().out.partition("==> summary\n")[2]
    assert "two               skipped: there is no no_such_module\n" in summary
    assert not run_gpu.run([stage("one", False), stage("two", True, "torch")])
    assert ran == ["one", "one", "two"]
    summary = capsys.readouterr().out.partition("==> summary\n")[2]
    assert "one               FAILED" in summary and "two               ok" in summary


def test_a_command_fails_with_its_child() -> None:
    assert run_gpu.command(sys.executable, "-c", "pass")()
    assert not run_gpu.command(sys.executable, "-c", "raise SystemExit(3)")()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    script = tmp_path / "1_page.py"
    script.write_text("x = 1\nprint('one')\nx\nprint('two')\n")
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["one\n"]},
        {"output_type": "execute_result", "data": {"text/plain": "1"}},
        {"output_type": "stream", "name": "stdout", "text": ["two\n"]},
    ]
    cells = [{"cell_type": "markdown", "source": []}, {"cell_type": "code", "outputs": outputs}]
    script.with_suffix(".ipynb").write_text(json.dumps({"cells": cells}))
    return script


def test_a_page_prints_what_is_stored(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_gpu.pages([script])
    script.write_text(script.read_text().replace("two", "three"))
    assert not run_gpu.pages([script])
    script.write_text("1 / 0\n")
    assert not run_gpu.pages([script])
    script.with_suffix(".ipynb").unlink()
    script.write_text("")
    assert not run_gpu.pages([script])
    out = capsys.readouterr().out
    for words in ("prints what is stored", "prints something else", "ZeroDivision", "no stored"):
        assert words in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_it_needs_a_gpu() -> None:
    run = subprocess.run([sys.executable, run_gpu.__file__], capture_output=True, text=True)
    assert run.returncode == 1
    assert "make gpu needs" in run.stderr
