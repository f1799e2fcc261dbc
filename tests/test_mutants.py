"""mutants.py: every planted mistake still finds its place in the code."""

import pytest
from mutants import MUTANTS, ROOT


@pytest.mark.parametrize(("name", "file", "old", "new"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_a_mutant_changes_one_place(name: str, file: str, old: str, new: str) -> None:
    text = (ROOT / "lm_from_scratch" / f"{file}.py").read_text()
    assert text.count(old) == 1, name
    compile(text.replace(old, new), file, "exec")
