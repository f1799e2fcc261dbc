"""Every proof that is recorded, as the tree has them: exercises, a second person's answers,
mutants, kernels for three architectures, pages, stored notebooks, test files that take long."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from reach import Tree, code_digest
from records import Proof, Records

ROOT = Path(__file__).resolve().parents[2]
SLOW = ROOT / "tests" / "slow"
PACKAGE = ROOT / "lm_from_scratch"
#: Files that read others, whoever imports them.
DATA = {
    "lm_from_scratch/pretrained/__init__.py": "lm_from_scratch/pretrained/*/*.[js]*",
    "lm_from_scratch/checkpoint/folders.py": "lm_from_scratch/pretrained/*/*.[js]*",
    "lm_from_scratch/instruments/roofline.py": "tutorials/gpu/measurements.json",
}
SEARCH = (
    "", "tests/helpers", "tests/slow", "tests/slow/exercise_proof", "tests/benchmarks", "docs/_ext",
)  # fmt: skip
#: Files that import others by names which they make.
MADE = {"lm_from_scratch/__main__.py": "lm_from_scratch/commands/[a-z]*.py"}
TREE = Tree(ROOT, SEARCH, DATA, MADE)


def records(again: bool = False, write: bool = True) -> Records:
    return Records(SLOW / "recorded", TREE, again, write)


@cache
def proofs() -> list[Proof]:
    found = pages, stored, exercises, second_person, compiled, mutants, suites
    return [proof for kind in found for proof in kind()]


def without_triton() -> str:
    return "" if importlib.util.find_spec("triton") else "there is no Triton"


def called(module: str, function: str, *args: Any) -> Callable[[], Any]:
    """A function of a file beside this one, which is imported when it is called: a list of proofs
    needs neither torch nor Triton."""
    return lambda: getattr(importlib.import_module(module), function)(*args)


# ---------------------------------------------------------------------------------- notebooks


def pages() -> Iterator[Proof]:
    """Each tutorial runs as a notebook. (That the notebook holds the script's code is in
    tests/pages.)"""
    for script in sorted(ROOT.glob("tutorials/[0-9]*/[0-9]*.py")):
        yield Proof(
            "page",
            f"{script.parent.name}.{script.stem}",
            called("run_notebooks", "run_page", script),
            code=(script,),
            alone=(SLOW / "run_notebooks.py",),
            pins=("nbclient", "ipykernel"),
        )


def stored() -> Iterator[Proof]:
    """Each page on GPU kernels prints what its stored notebook holds, but for source: a docstring
    of the package is nothing that a page computes."""
    import folding
    from run_notebooks import code_cells

    for script in sorted(ROOT.glob("tutorials/gpu/[0-9]*.py")):
        cells = code_cells(script.with_suffix(".ipynb"))
        cells = [cell for cell in cells if not folding.prints_source("".join(cell["source"]))]
        yield Proof(
            "stored notebook",
            script.stem,
            called("run_notebooks", "run_stored", script),
            code=(script,),
            alone=(SLOW / "run_notebooks.py",),
            facts=[[code_digest("".join(cell["source"])), cell["outputs"]] for cell in cells],
            pins=("nbval", "ipykernel"),
            lacks=without_triton,
        )


# ---------------------------------------------------------------------------------- exercises

CATALOGUE = PACKAGE / "exercises" / "catalogue"
PROVE = SLOW / "exercise_proof" / "prove.py"
SECOND = SLOW / "exercise_proof" / "test_second_person.py"


def parts(name: str) -> tuple[Path, Path]:
    """The checks of an exercise and its text, whose solution counts."""
    return CATALOGUE / name / "checks.py", CATALOGUE / name / "text.py"


def prove(name: str) -> str:
    """All gates at 100 and 30 seeds; the table that the site shows."""
    module = importlib.import_module("prove")
    return module.dump(module.prove(name))


def answered(name: str) -> dict[str, str]:
    """The right answers pass, the wrong ones do not, and the report names them as it is stored."""
    module = importlib.import_module("test_second_person")
    module.prove_answers(name)
    return module.diagnosis(name)


def lacks(name: str) -> str:
    """What an exercise needs and is not here."""
    from lm_from_scratch.exercises.exercise import exercise
    from lm_from_scratch.exercises.report import missing

    return missing(exercise(name))


def exercises() -> Iterator[Proof]:
    """Each exercise that is no draft: it has a stored proof."""
    for product in sorted(CATALOGUE.glob("*/proof.json")):
        name = product.parent.name
        yield Proof(
            "exercise", name, partial(prove, name), (PROVE, *parts(name)), product=product,
            lacks=partial(lacks, name),
        )  # fmt: skip


def second_person() -> Iterator[Proof]:
    """What a second person wrote from the text alone."""
    folder = SECOND.with_name("second_person")
    for path in sorted(folder.glob("*.py")):
        name, diagnosis = path.stem, json.loads((folder / "diagnosis.json").read_text("utf-8"))
        yield Proof(
            "second person", name, partial(answered, name), (SECOND, path, *parts(name)),
            facts=diagnosis.get(name), lacks=partial(lacks, name),
        )  # fmt: skip


# ------------------------------------------------------------------------- kernels and mutants

#: Architectures, and the shared memory that NVIDIA gives a block there.
SHARED_LIMIT = {80: 166_912, 86: 101_376, 90: 232_448}


def compiled() -> Iterator[Proof]:
    """Every kernel becomes machine code for three architectures, and fits on them. One that no
    launch reaches counts too."""
    files = sorted((PACKAGE / "kernels").glob("*.py"))
    kernels = [n for f in files for part in TREE.parts(f) for n in sorted(part.binds)]
    kernels = [name for name in kernels if name.endswith("_kernel")]
    for arch, limit in SHARED_LIMIT.items():
        prove = called("compile_kernels", "compiled_in_a_process", arch, limit)
        code = (SLOW / "compile_kernels.py",)
        yield Proof(
            "compiled kernels", f"sm_{arch}", prove, code, facts=kernels, lacks=without_triton
        )


def mutants() -> Iterator[Proof]:
    """Classic mistakes, put in place and run."""
    later = "mutants_since_qwen2.py"
    bad_tiles = called("compile_kernels", "prove_bad_tiles", 80, SHARED_LIMIT[80])
    for name, file, prove, pins in (
        ("model", "mutants.py", called("mutants", "prove"), ("transformers",)),
        ("since_qwen2", later, called(later[:-3], "prove"), ("transformers",)),
        ("kernels", "kernel_mutants.py", called("kernel_mutants", "prove"), ()),
        ("compiler", "compile_kernels.py", bad_tiles, ()),
    ):
        lacks = str if "transformers" in pins else without_triton
        yield Proof("mutants", name, prove, (SLOW / file,), pins=pins, lacks=lacks)


# --------------------------------------------------------------------------------- test files


def suites() -> Iterator[Proof]:
    """Test files that take long and find the same each time. By hand: pytest FILE."""
    for path in sorted((SLOW / "suites").glob("test_*.py")):
        triton = path.stem.startswith("test_kernels") or path.stem == "test_bench_kernels"
        yield Proof(
            "suite",
            path.stem.removeprefix("test_"),
            partial(passed, path),
            code=(path, ROOT / "tests" / "conftest.py"),
            pins=("pytest", "hypothesis"),
            lacks=without_triton if triton else str,
        )


def passed(path: Path) -> dict[str, int]:
    """How many tests of a file there are, of which none fails."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *words, str(path)],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert run.returncode == 0, f"{path.name}: {run.stdout[-3000:]}{run.stderr[-1000:]}"
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    assert tests > skipped, f"{path.name}: all of its tests were skipped"
    return {"tests": tests}
