"""Python files, read and not imported: what a file defines, says of itself, and imports."""

import ast
import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2]
ROOT = DOCS.parent
PACKAGE = "lm_from_scratch"
#: What makes of a function an object that autodoc passes over.
WRAPPED = r"triton\.jit|torch\.library\.custom_op"


@cache
def project(root: Path = ROOT) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


@cache
def tree(path: Path) -> ast.Module:
    """Each file is asked for its names some eighty times."""
    return ast.parse(code(path))


def code(path: Path) -> str:
    """The text of a file, or of the code cells of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def summary(path: Path) -> str:
    """First line of a file's docstring; single backticks are made reStructuredText."""
    line = (ast.get_docstring(tree(path)) or "").partition("\n")[0]
    return re.sub(r"(?<![:`])`([^`]+)`(?!`)", r"``\1``", line)


def public_names(path: Path) -> list[str]:
    """Functions and classes that a file defines and an API page shows, in its order."""
    return [
        node.name
        for node in tree(path).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and not any(re.match(WRAPPED, ast.unparse(one)) for one in node.decorator_list)
    ]


@cache
def imported(path: Path) -> set[tuple[str, str]]:
    """Module and name of all that a file imports; a module as a whole has an empty name."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            names |= {(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {(alias.name, "") for alias in node.names}
    return names


@cache
def sources(path: Path) -> set[str]:
    """The modules that a file imports, or imports something from, among names that are none."""
    return {place for source, name in imported(path) for place in (source, f"{source}.{name}")}


@cache
def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every file of the package by its dotted name; a folder has the name of its `__init__`. The
    text of an exercise is no module."""
    files = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if not path.match("catalogue/*/text.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            files[name.removesuffix(".__init__")] = path
    return files


@cache
def rooms(root: Path = ROOT) -> list[str]:
    """The folders of the package, lowest first: the contract on layers in `pyproject.toml` has
    their order, and names every one."""
    contracts = project(root)["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    names = [name for layer in reversed(layers) for name in re.findall(r"\w+", layer)]
    return [name for name in names if (root / PACKAGE / name / "__init__.py").is_file()]


def room(module: str) -> str:
    """The room of a file; empty for a file that lies in none."""
    parts = module.split(".")
    return parts[1] if len(parts) > 2 or (len(parts) == 2 and parts[1] in rooms()) else ""
