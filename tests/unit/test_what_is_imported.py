"""What is imported is what is needed. One process is asked after each step: torch takes seconds."""

import json
import subprocess
import sys

import pytest

STEPS = """if True:
    import json, sys
    found = {}
    from lm_from_scratch.exercises import check
    from lm_from_scratch.exercises.exercise import exercise
    exercise("rms_norm")
    found["a check"] = [*sys.modules]
    from lm_from_scratch.checkpoint.weights import load_shipped
    for name in ("gpt2-docs", "qwen2-docs"):
        load_shipped(name)
    found["a model"] = [*sys.modules]
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {step: set(names) for step, names in json.loads(done.stdout).items()}


def test_checks_import_torch_and_the_standard_library_only(imported: dict[str, set[str]]) -> None:
    """No notebook, grader or test framework: a check runs wherever torch does."""
    bad = {
        "nbgrader", "otter", "pytest", "IPython", "jupytext", "nbformat", "transformers",
        "matplotlib", "triton",
    }  # fmt: skip
    assert not bad & imported["a check"]


def test_loading_imports_no_compiler(imported: dict[str, set[str]]) -> None:
    """torch imports its compiler to draw numbers on the meta device, and that takes seconds."""
    assert "torch" in imported["a model"] and "torch._dynamo" not in imported["a model"]
