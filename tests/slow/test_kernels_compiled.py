"""kernels/: every kernel compiles to machine code for three architectures, and fits on them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed here", exc_type=ImportError)

ROOT = Path(__file__).parents[2]

#: The limits of shared memory are NVIDIA's; written here again, so that a typing error is seen.
SHARED_LIMIT = {80: 166_912, 86: 101_376, 90: 232_448}


@pytest.fixture(scope="module", params=SHARED_LIMIT, ids=lambda arch: f"sm_{arch}")
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the kernels become: compiled in a process of its own, which does not interpret."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "tests/slow/compile_kernels.py", str(request.param)]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    print(run.stderr)
    found: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return found


def kernels_in_the_package() -> set[str]:
    """The functions under ``@triton.jit`` that are launched: their names end with ``_kernel``."""
    found = set()
    for path in (ROOT / "lm_from_scratch" / "kernels").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(node.name)
    return found


def test_every_kernel_is_compiled(rows: list[dict[str, Any]]) -> None:
    assert {row["kernel"] for row in rows} == kernels_in_the_package()


def test_it_fits(rows: list[dict[str, Any]]) -> None:
    assert rows
    for row in rows:
        assert row["shared"] <= SHARED_LIMIT[row["arch"]], row
        assert 0 < row["registers"] <= 255, row
        assert row["spills"] == 0, row
