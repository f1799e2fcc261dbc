"""mutants.py, kernel_mutants.py: every planted mistake still finds its place in the code."""

import kernel_mutants
import pytest
from mutants import MUTANTS, ROOT


@pytest.mark.parametrize(("name", "file", "old", "new"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_a_mutant_changes_one_place(name: str, file: str, old: str, new: str) -> None:
    text = (ROOT / "lm_from_scratch" / f"{file}.py").read_text()
    assert text.count(old) == 1, name
    compile(text.replace(old, new), file, "exec")


@pytest.mark.parametrize("mutant", kernel_mutants.MUTANTS, ids=lambda mutant: mutant[0])
def test_a_mutant_of_a_kernel_changes_one_place(mutant: tuple[str, ...]) -> None:
    name, file, old, new, _ = mutant
    text = (ROOT / "lm_from_scratch" / "kernels" / f"{file}.py").read_text()
    assert text.count(old) == 1, name
    compile(text.replace(old, new), file, "exec")
