"""The layers of the package (docs/architecture.py): imports point one way, and few files may import
Triton, a notebook or a test framework."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import architecture
import pytest
from gallery import ROOT

#: What belongs to notebooks, graders and tests: the checks must run without any of it.
FRAMEWORKS = {
    "pytest", "_pytest", "unittest", "doctest", "hypothesis", "nbval", "nbformat", "nbclient",
    "nbconvert", "nbgrader", "IPython", "ipykernel", "ipywidgets", "jupyter", "jupytext",
}  # fmt: skip


def imported(path: Path) -> set[str]:
    """Top names of every import of a file, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names.add(str(node.module).partition(".")[0])
    return names


def faults(root: Path) -> list[str]:
    """Everything that is wrong with the imports of a package."""
    found = architecture.problems(architecture.graph(root))
    scripts = {path.stem for folder in ("docs", "tests") for path in (ROOT / folder).glob("*.py")}
    for name, path in architecture.modules(root).items():
        names = imported(path)
        if "triton" in names and not name.startswith("kernels."):
            found.append(f"{name} imports triton")
        if name.startswith("exercises") and (bad := names & FRAMEWORKS):
            found.append(f"{name} imports {', '.join(sorted(bad))}")
        if bad := names & (scripts | {"docs", "tests", "tutorials"}):
            found.append(f"{name} imports {', '.join(sorted(bad))}, which no wheel holds")
    return found


def test_imports_point_one_way() -> None:
    assert faults(ROOT) == []


def test_layers_name_what_exists() -> None:
    known = architecture.modules()
    names = " ".join(architecture.LAYERS.values()).split()
    assert len(names) == len(set(names))
    assert [name for name in names if name not in known] == []


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        (
            "norm.py",
            "from lm_from_scratch.training.train import train",
            "norm (layers) imports train",
        ),
        ("rope.py", "import lm_from_scratch.cache.paged", "rope (layers) imports cache.paged"),
        ("norm.py", "from lm_from_scratch.models import heads", "norm (layers) imports heads"),
        (
            "__init__.py",
            "from lm_from_scratch.layers import norm",
            "lm_from_scratch (None) imports norm",
        ),
        ("train.py", "def f():\n    import lm_from_scratch.exercises.run", "imports exercises.run"),
        ("norm.py", "from lm_from_scratch.rope import *\n", "norm imports rope imports norm"),
        ("swap.py", "def f():\n    import triton.language as tl", "swap imports triton"),
        ("exercises/run.py", "from IPython import display", "exercises.run imports IPython"),
        ("exercises/run.py", "import pytest", "exercises.run imports pytest"),
        ("plot.py", "import gallery", "plot imports gallery, which no wheel holds"),
        ("new_concept.py", "", "new_concept is in no layer"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, file: str, line: str, fault: str) -> None:
    package = tmp_path / architecture.PACKAGE
    left_out = shutil.ignore_patterns("*.safetensors", "catalogue", "kernels")
    shutil.copytree(ROOT / architecture.PACKAGE, package, ignore=left_out)
    for copied in [package, *package.rglob("*")]:
        copied.chmod(0o755)  # the package itself may be read-only
    if "norm imports rope imports norm" in fault:
        (package / "rope.py").write_text("import lm_from_scratch.layers.norm\n")
    path = package / file
    path.write_text((path.read_text() if path.exists() else "") + "\n" + line)
    assert any(fault in found for found in faults(tmp_path)), faults(tmp_path)


def test_the_picture_has_every_layer_and_points_down() -> None:
    drawn = architecture.picture()
    assert all(f'class="layer">{title}<' in drawn for title in architecture.LAYERS)
    arrows = [line.split() for line in drawn.splitlines() if "marker-end" in line]
    ends = [(float(words[3]), float(words[10].strip('"'))) for words in arrows]
    assert len(ends) == len(architecture.between_layers(architecture.graph())) > 10
    assert all(start < end for start, end in ends)
