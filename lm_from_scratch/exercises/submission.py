"""Take the student's definitions out of a script or a notebook, and leave the rest of it alone.

Only imports, functions, classes and plain constants are kept, and `if` and `try` around nothing but
these. Other code at the top level (prints, training loops, a replaced ``torch.allclose``) never
runs here. Metadata of notebooks are ignored: a cell that was copied, or lost its tags, counts like
any other. A syntax error costs its own cell.
"""

import __future__

import ast
import json
import linecache
import re
import sys
import tokenize
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from lm_from_scratch.program import PROGRAM

LARGEST = 20_000_000  # bytes of a file: more is a mistake, outputs with pictures stay below
CODE = 1_000_000  # characters of one cell: the parser takes a kilobyte for each short line
#: Lines of a notebook that are no Python, and cells of Python with such a first line.
MAGIC = re.compile(r"\s*[%!?]|.*\?\s*$|[\w\s.,]+=\s*[%!]")
PYTHON_CELL = re.compile(r"\s*%%(time|capture|prun)\b")
#: What may be called in a constant: it changes nothing, and makes no tensor.
CALLS = {
    "float", "int", "bool", "str", "len", "range", "tuple", "list", "dict", "set", "frozenset",
    "min", "max", "abs", "round", "sqrt", "log", "exp", "finfo", "iinfo", "device", "namedtuple",
    "TypeVar", "NewType", "partial", "is_available",
}  # fmt: skip


#: Where a file without a name is looked for: beside you, and where `make lab` puts the notebooks.
#:
#: :meta hide-value:
PLACES = (Path("."), Path("build/notebooks/exercises"))


def find_file(name: str, given: str | None) -> Path:
    """The student's file; Raises ``ValueError`` that says where it was looked for."""
    if given is not None:
        path = Path(given)
        if not path.is_file():
            raise ValueError(f"there is no file {path}; {PROGRAM} start {name} {path}")
        return path
    names = [f"{name}.py", f"{name}.ipynb"]
    files = [place / file for place in PLACES for file in names if (place / file).is_file()]
    if not files:
        raise ValueError(
            f"there is no {names[0]} and no {names[1]} here; name the file, or begin with: "
            f"{PROGRAM} start {name}"
        )
    return max(files, key=lambda path: path.stat().st_mtime)


@dataclass
class Submission:
    """What a file defines.

    * ``parts``: (file name for tracebacks, code, what is kept of it) of each cell; a script is one
    * ``defined``: functions, classes and constants by name
    * ``imported``: names that imports bind
    * ``left_out``: names that other code at the top level binds, which does not run
    * ``problems``: what could not be read, in words
    """

    path: Path
    parts: list[tuple[str, str, list[ast.stmt]]] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)
    imported: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """The problems in one line; of many the first."""
        more = len(self.problems) - 5
        return "; ".join(self.problems[:5]) + (f"; and {more} more" if more > 0 else "")


def read(path: Path) -> Submission:
    """Read a script or a notebook. Whatever is wrong with the file is in `problems`."""
    submission = Submission(path)
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            submission.problems.append("cannot be read: it is no file")
            return submission
        if path.stat().st_size > LARGEST:
            submission.problems.append(f"larger than {LARGEST // 10**6} MB")
            return submission
        if path.suffix.lower() == ".ipynb":
            pieces = notebook_cells(path.read_text(encoding="utf-8-sig"))
        else:
            with tokenize.open(path) as file:  # a line may name another coding than UTF-8
                pieces = [("", file.read())]
    except (UnicodeDecodeError, SyntaxError):
        submission.problems.append("not a text file (UTF-8)")
    except OSError as error:
        submission.problems.append(f"cannot be read: {error.strerror}")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        submission.problems.append(f"not a notebook: {error}")
    else:
        for label, code in pieces:
            keep(submission, label, code)
    return submission


def notebook_cells(text: str) -> list[tuple[str, str]]:
    """The code cells of a notebook, numbered from 1 as among all cells."""
    cells = []
    for n, cell in enumerate(json.loads(text)["cells"], start=1):
        source = cell.get("source") if isinstance(cell, dict) else None
        if isinstance(source, list):
            source = "".join(str(line) for line in source)
        if isinstance(source, str) and cell.get("cell_type", "code") == "code":
            cells.append((f"cell {n}", source))
    return cells


def keep(submission: Submission, label: str, code: str) -> None:
    """Add what a piece of code defines."""
    if len(code) > CODE:
        submission.problems.append(f"{label or 'code'}: longer than {CODE} characters")
        return
    # Not splitlines: for Python a form feed ends no line.
    lines = code.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if label and lines[0].lstrip().startswith("%%"):
        if not PYTHON_CELL.match(lines[0]):  # a cell in another language
            return
        lines[0] = ""
    nodes = []
    try:
        for node in parse(lines, label).body:
            names = bound(node)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                submission.imported |= names
            elif is_definition(node):
                submission.defined |= names
            else:
                submission.left_out |= names
                continue
            nodes.append(node)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        at = f"line {error.lineno}" if isinstance(error, SyntaxError) else "somewhere"
        where = ", ".join(part for part in (label, at) if part)
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        line = (getattr(error, "text", None) or "").strip()[:100]
        message += f": {line}" if line else ""
        submission.problems.append(f"{where}: syntax error: {message}")
    name = f"{submission.path.name}, {label}" if label else submission.path.name
    submission.parts.append((name, "\n".join(lines) + "\n", nodes))


def parse(lines: list[str], label: str) -> ast.Module:
    """Parse code. Lines of a notebook that are no Python become `pass`, but only where Python stops
    at them: a line may begin with % in the middle of an expression."""
    for _ in range(100):
        try:
            return ast.parse("\n".join(lines))
        except SyntaxError as error:
            n = (error.lineno or 0) - 1
            if not (label and 0 <= n < len(lines) and MAGIC.match(lines[n])):
                raise
            lines[n] = re.sub(r"\S.*", "pass", lines[n])
    return ast.parse("\n".join(lines))


def is_definition(node: ast.stmt) -> bool:
    """Functions, classes, names for constants (numbers, texts, torch.int8, types, a lambda), and
    `if` and `try` around these and around imports."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return True
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(is_name(t) for t in targets) and is_constant(node.value)
    if isinstance(node, ast.If):
        return is_constant(node.test) and all(is_inside(n) for n in node.body + node.orelse)
    if isinstance(node, ast.Try):
        handlers = [n for handler in node.handlers for n in handler.body]
        return all(is_inside(n) for n in node.body + handlers + node.orelse + node.finalbody)
    return False


def is_inside(node: ast.stmt) -> bool:
    """What may stand in an ``if`` or a ``try``."""
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass)) or is_definition(node)


def is_name(node: ast.expr) -> bool:
    """A name, or several in a tuple: not a[0], not a.b, which change what is there already."""
    return isinstance(node, ast.Name) or (
        isinstance(node, (ast.Tuple, ast.List)) and all(is_name(part) for part in node.elts)
    )


def is_constant(node: ast.expr) -> bool:
    """An expression that changes nothing, and ends soon."""
    allowed = (
        ast.Constant, ast.Name, ast.Attribute, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.List,
        ast.Dict, ast.Set, ast.operator, ast.unaryop, ast.expr_context, ast.Subscript, ast.Slice,
        ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.IfExp, ast.JoinedStr, ast.Starred,
        ast.FormattedValue, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
        ast.comprehension, ast.keyword,
    )  # fmt: skip
    todo: list[ast.AST] = [node]
    while todo:
        part = todo.pop()
        if isinstance(part, ast.Lambda):  # what it calls is not called here
            continue
        if isinstance(part, ast.Call):
            called = part.func
            if isinstance(called, ast.Attribute):
                called = ast.Name(called.attr)
            if not (isinstance(called, ast.Name) and called.id in CALLS):
                return False
        elif isinstance(part, ast.BinOp) and isinstance(part.op, ast.Pow):
            if not is_exponent(part.right):
                return False
        elif not isinstance(part, allowed):
            return False
        todo += ast.iter_child_nodes(part)
    return True


def is_exponent(node: ast.expr) -> bool:
    """A name or a small number: 2**10**10 would take all the memory."""
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and abs(node.value) <= 64
    return isinstance(node, ast.Name)


def bound(node: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    names: set[str] = set()
    todo: list[ast.AST] = [node]
    while todo:
        part = todo.pop()
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(part.name)
        elif isinstance(part, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in part.names}
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names.add(part.id)
        else:
            todo += ast.iter_child_nodes(part)
    return names


def run(submission: Submission) -> dict[str, Any]:
    """Run what was kept, one definition after the other in one space; what raises is added to
    `problems`, and the others still count. An import does not replace what the file defines."""
    module = sys.modules["submission"] = ModuleType("submission")  # dataclasses look there
    space, flags = module.__dict__, 0
    for name, code, nodes in submission.parts:
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        for node in nodes:
            own: dict[str, Any] = {}
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                own = {n: space[n] for n in bound(node) & submission.defined if n in space}
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                features = [getattr(__future__, alias.name, None) for alias in node.names]
                flags |= sum(getattr(f, "compiler_flag", 0) for f in features)
            try:
                exec(compile(ast.Module([node], []), name, "exec", flags, True), space)
                space.update(own)
            except (Exception, SystemExit) as error:
                cell = name.partition(", ")[2]
                where = f"{cell}, line {node.lineno}" if cell else f"line {node.lineno}"
                submission.problems.append(f"{where}: {type(error).__name__}: {error}"[:300])
    return space


def defined(submission: Submission, name: str) -> Any:
    """The function or class of this name, after the code has run. Raises ``ValueError``, which says
    why there is none."""
    space = run(submission)
    if name in submission.defined and name in space:
        return space[name]
    if name in submission.imported:
        reason = f"{name} is imported, not written"
    elif name in submission.left_out - submission.defined:
        reason = f"{name} is not defined by def or class"
    else:
        reason = f"{name} is not defined"
    problems = submission.summary()
    raise ValueError(f"{problems}; so {reason}" if problems else reason)
