"""What a build says while pages run."""

from __future__ import annotations

from pathlib import Path

import pytest
from gallery import running


def test_without_a_terminal_there_is_a_line_for_ten_pages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = [(Path(f"1_gpt2/{number}.py"), {"passing": True}) for number in range(12)]
    assert list(running.shown(iter(done), len(done))) == done
    lines = ["10 of 12 pages have run", "12 of 12 pages have run"]
    assert capsys.readouterr().out.splitlines() == lines
