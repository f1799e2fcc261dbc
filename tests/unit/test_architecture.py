"""What files of the package may import; a contract in pyproject.toml has the order of the rooms."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from api import package
from gallery.pages import ROOT
from sources import modules

#: What belongs to notebooks, graders and tests: the checks must run without any of it.
FRAMEWORKS = {
    "pytest", "_pytest", "unittest", "doctest", "hypothesis", "nbval", "nbformat", "nbclient",
    "nbconvert", "nbgrader", "IPython", "ipykernel", "ipywidgets", "jupyter", "jupytext",
}  # fmt: skip
EXTENSIONS = ROOT / "docs" / "_ext"
#: What no wheel holds.
OUTSIDE = {path.stem for folder in ("docs/_ext", "tests") for path in (ROOT / folder).glob("*")}
OUTSIDE |= {"docs", "tests", "tutorials"}


def circles(edges: dict[str, set[str]]) -> list[str]:
    """Files that import each other, as the ways round."""
    found: list[str] = []
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> None:
        if module in way:
            found.append(" imports ".join([*way[way.index(module) :], module]))
        elif module not in done:
            for other in sorted(edges.get(module, ())):
                visit(other, [*way, module])
            done.add(module)

    for module in edges:
        visit(module, [])
    return found


def faults(root: Path) -> list[str]:
    """Everything that is wrong with the imports of a package."""
    found = circles(package.graph(root))
    for name, path in modules.modules(root).items():
        names = {source.partition(".")[0] for source, _ in modules.imported(path)}
        if "triton" in names and ".kernels." not in name:
            found.append(f"{name} imports triton")
        if ".exercises" in name and (bad := names & FRAMEWORKS):
            found.append(f"{name} imports {', '.join(sorted(bad))}")
        if bad := names & OUTSIDE:
            found.append(f"{name} imports {', '.join(sorted(bad))}, which no wheel holds")
    return found


def test_imports_are_as_they_should_be() -> None:
    assert faults(ROOT) == []


def test_extensions_of_the_site_import_one_way() -> None:
    """Between its rooms, too."""
    files = {f"{path.parent.name}.{path.stem}": path for path in EXTENSIONS.glob("*/*.py")}
    edges: dict[str, set[str]] = {}
    for file, path in files.items():
        others = {name for pair in modules.imported(path) if (name := ".".join(pair)) in files}
        edges[file] = others
        room = file.partition(".")[0]
        edges.setdefault(room, set()).update({name.partition(".")[0] for name in others} - {room})
    assert circles(edges) == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("def f():\n    import triton.language as tl", "a imports triton"),
        ("import gallery", "a imports gallery, which no wheel holds"),
        ("from lm_from_scratch import b", "a imports lm_from_scratch.b imports lm_from_scratch.a"),
        ("def f():\n    from lm_from_scratch.b import x", "b imports lm_from_scratch.a"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, line: str, fault: str) -> None:
    package = tmp_path / modules.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "b.py").write_text("import lm_from_scratch.a\nx = 1\n")
    (package / "a.py").write_text("")
    assert faults(tmp_path) == []
    # Files are read once, so a changed one has another place.
    shutil.copytree(tmp_path, tmp_path / "planted", ignore=lambda *_: ["planted"])
    (tmp_path / "planted" / modules.PACKAGE / "a.py").write_text(line + "\n")
    found = faults(tmp_path / "planted")
    assert any(fault in one for one in found), found


def test_rooms_have_the_order_of_the_contract(tmp_path: Path) -> None:
    for name in ("low", "middle", "beside", "top"):
        (tmp_path / modules.PACKAGE / name).mkdir(parents=True)
        (tmp_path / modules.PACKAGE / name / "__init__.py").write_text("")
    layers = '["top", "middle | beside", "low", "gone"]'
    contract = f'[[tool.importlinter.contracts]]\ntype = "layers"\nlayers = {layers}\n'
    (tmp_path / "pyproject.toml").write_text(contract)
    assert modules.rooms(tmp_path) == ["low", "middle", "beside", "top"]
