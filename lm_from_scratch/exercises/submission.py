"""Take the student's definitions out of a script or a notebook, and leave the rest of it alone.

Only imports, functions, classes and plain constants are kept. Other code at the top level (prints,
training loops, a replaced ``torch.allclose``) never runs here. Metadata of notebooks are ignored: a
cell that was copied, or lost its tags, counts like any other. A syntax error costs its own cell.
"""

import ast
import json
import linecache
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LARGEST = 20_000_000  # bytes of a file: more is a mistake, outputs with pictures stay below


@dataclass
class Submission:
    """What a file defines.

    parts     (file name for tracebacks, code) of each cell; a script is one
    defined   functions, classes and constants by name
    imported  names that imports bind
    left_out  names that other code at the top level binds, which does not run
    problems  what could not be read, in words
    """

    path: Path
    parts: list[tuple[str, str]] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)
    imported: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def read(path: Path) -> Submission:
    """Read a script or a notebook. Whatever is wrong with the file is in `problems`."""
    found = Submission(path)
    try:
        if path.stat().st_size > LARGEST:
            found.problems.append(f"larger than {LARGEST // 10**6} MB")
            return found
        text = path.read_text(encoding="utf-8-sig")
        pieces = notebook_cells(text) if path.suffix == ".ipynb" else [("", text)]
    except UnicodeDecodeError:
        found.problems.append("not a text file (UTF-8)")
    except OSError as error:
        found.problems.append(f"cannot be read: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found.problems.append(f"not a notebook: {error}")
    else:
        for label, code in pieces:
            keep(found, label, code)
    return found


def notebook_cells(text: str) -> list[tuple[str, str]]:
    """The code cells of a notebook, numbered from 1 as among all cells."""
    cells = json.loads(text)["cells"]
    return [
        (f"cell {n}", "".join(cell["source"]))
        for n, cell in enumerate(cells, start=1)
        if cell["cell_type"] == "code"
    ]


def keep(found: Submission, label: str, code: str) -> None:
    """Add what a piece of code defines; its lines keep their numbers."""
    if code.lstrip().startswith("%%"):  # a cell in another language
        return
    lines = code.splitlines()
    lines = ["" if line.lstrip()[:1] in ("%", "!") else line for line in lines]
    try:
        tree = ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        at = f"line {error.lineno}" if isinstance(error, SyntaxError) else "somewhere"
        where = ", ".join(part for part in (label, at) if part)
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        line = (getattr(error, "text", None) or "").strip()
        found.problems.append(f"{where}: syntax error: {said}" + (f": {line}" if line else ""))
        return
    kept = [""] * len(lines)
    for node in tree.body:
        names = bound(node)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.imported |= names
        elif is_definition(node):
            found.defined |= names
        else:
            found.left_out |= names
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        last = node.end_lineno or node.lineno
        kept[first - 1 : last] = lines[first - 1 : last]
        # Two statements of one line: what follows the kept one would come along.
        if sum(other.lineno <= last <= (other.end_lineno or 0) for other in tree.body) > 1:
            kept[first - 1 : last] = [ast.unparse(node)] + [""] * (last - first)
    name = f"{found.path.name}, {label}" if label else found.path.name
    found.parts.append((name, "\n".join(kept) + "\n"))


def is_definition(node: ast.stmt) -> bool:
    """Functions, classes, and names for constants: numbers, texts, torch.int8."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return True
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(is_name(t) for t in targets) and is_constant(node.value)
    return False


def is_name(node: ast.expr) -> bool:
    """A name, or several in a tuple: not a[0], not a.b, which change what is there already."""
    return isinstance(node, ast.Name) or (
        isinstance(node, (ast.Tuple, ast.List)) and all(is_name(part) for part in node.elts)
    )


def is_constant(node: ast.expr) -> bool:
    allowed = (
        ast.Constant, ast.Name, ast.Attribute, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.List,
        ast.Dict, ast.Set, ast.operator, ast.unaryop, ast.expr_context,
    )  # fmt: skip
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            if not (isinstance(part.func, ast.Name) and part.func.id in ("float", "int")):
                return False
        elif isinstance(part, ast.BinOp) and isinstance(part.op, ast.Pow):
            if not isinstance(part.right, ast.Constant) or abs(part.right.value) > 64:  # type: ignore[arg-type]
                return False
        elif not isinstance(part, allowed):
            return False
    return True


def bound(node: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in stored if isinstance(n.ctx, ast.Store)}


def run(found: Submission) -> dict[str, Any]:
    """Run what was kept, one definition after the other in one space; what raises is added to
    `problems`, and the others still count."""
    space: dict[str, Any] = {"__name__": "submission"}
    for name, code in found.parts:
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        for node in ast.parse(code).body:
            try:
                exec(compile(ast.Module([node], []), name, "exec"), space)
            except (Exception, SystemExit) as error:
                cell = name.partition(", ")[2]
                where = f"{cell}, line {node.lineno}" if cell else f"line {node.lineno}"
                found.problems.append(f"{where}: {type(error).__name__}: {error}"[:300])
    return space
