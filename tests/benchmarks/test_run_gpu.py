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


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_it_needs_a_gpu() -> None:
    run = subprocess.run([sys.executable, run_gpu.__file__], capture_output=True, text=True)
    assert run.returncode == 1
    assert "make gpu needs" in run.stderr
