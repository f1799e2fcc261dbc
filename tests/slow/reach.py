"""What a piece of Python depends on within the repository, read from its source.

A file is a row of *parts*, its statements at the left margin. A part reaches others by the names
that it uses: ``draw`` is the function above it or the one that it imports, ``plot.style`` the
definition ``style`` of the file ``plot``; a module that is passed around counts as a whole. So a
page that draws with one function of a file does not depend on the others. What a file does when it
is imported (calls, loops, registrations) is reached wherever it is imported.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

WHOLE, ACTS = "*", "!"
Imports = dict[str, list[tuple[str, int]]]  # name: what it may be, level
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def sha(value: Any) -> str:
    """SHA-256 of a text, or of anything that JSON can hold."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def shape(node: Any) -> Any:
    """A syntax tree as lists, the same in every version of Python; a string that is a statement
    says something to readers alone."""
    if isinstance(node, ast.AST):
        fields = ((name, getattr(node, name, None)) for name in node._fields)
        kept = [[name, shape(x)] for name, x in fields if x is not None and x != []]
        return [type(node).__name__, *(x for x in kept if x[0] not in ("ctx", "kind"))]
    if isinstance(node, list):
        return [shape(x) for x in node if not is_text(x)]
    return ascii(node)


def is_string(node: Any) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_attribute(node: Any) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute)


def is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and is_string(node.value)


def code_digest(text: str) -> str:
    """Of what a text of Python does."""
    return sha(repr(shape(ast.parse(text))))


@dataclass
class Part:
    """A statement at the left margin: what it does, binds and uses."""

    digest: str
    binds: set[str] = field(default_factory=set)
    uses: set[tuple[str, str]] = field(default_factory=set)  # a name, and an attribute or nothing
    imports: Imports = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)  # meant as a whole
    marks: set[str] = field(default_factory=set)  # names in decorators
    acts: bool = False  # when the file is imported


def part_of(node: ast.stmt, packages: re.Pattern[str]) -> Part:
    part = Part(sha(repr(shape(node))))
    inner = list(ast.walk(node))
    texts = {id(x.value) for x in inner if is_text(x)}
    attributes = {id(x.value): x.attr for x in inner if isinstance(x, ast.Attribute)}
    for x in inner:
        if isinstance(x, ast.Name):
            part.uses.add((x.id, attributes.get(id(x), "")))
            part.binds |= {x.id} if isinstance(x.ctx, ast.Store) else set()
        elif isinstance(x, DEFINITION):
            part.binds.add(x.name)
        elif isinstance(x, ast.Import | ast.ImportFrom):
            add_import(part, x)
        elif is_string(x) and id(x) not in texts:
            part.modules |= set(packages.findall(x.value))
        elif isinstance(x, ast.List | ast.Tuple | ast.Call):
            words = [*getattr(x, "elts", []), *getattr(x, "args", [])]
            words = [word.value if is_string(word) else "" for word in words]
            for flag, name in pairwise(words):
                part.modules |= {f"{name}.__main__"} if flag == "-m" else set()  # python -m name
    if isinstance(node, DEFINITION):
        part.binds = {node.name}  # what it binds inside is its own
        part.marks = {name for mark in node.decorator_list for name in names_in(mark)}
        words = {x.attr for mark in node.decorator_list for x in ast.walk(mark) if is_attribute(x)}
        part.acts = node.name in ("_", "__getattr__") or any("register" in word for word in words)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        part.acts = not all(isinstance(target, ast.Name | ast.Tuple) for target in targets)
    elif isinstance(node, ast.If):
        part.acts = not names_in(node.test) & {"__name__", "TYPE_CHECKING"}
    else:
        part.acts |= not isinstance(node, ast.Import | ast.ImportFrom)
    if not isinstance(node, DEFINITION):
        part.binds |= part.imports.keys()
    return part


def add_import(part: Part, node: ast.Import | ast.ImportFrom) -> None:
    level = getattr(node, "level", 0)
    head = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
    for alias in node.names:
        if alias.name == "*":
            part.modules.add(head[:-1])
            part.acts = True
        elif isinstance(node, ast.Import) and not alias.asname:
            part.modules |= {alias.name} if "." in alias.name else set()
            first = alias.name.partition(".")[0]
            part.imports.setdefault(first, []).append((first, 0))
        else:
            name = alias.asname or alias.name
            part.imports.setdefault(name, []).append((head + alias.name, level))


def names_in(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


class Tree:
    """The files of a repository, each read once.

    ``search`` names the folders where a name is looked up after the file's own; ``data`` the files
    (as globs) that some file reads, whoever imports it; ``made`` those that it imports by a name
    that no reader of the source can know.
    """

    def __init__(
        self,
        root: Path,
        search: Iterable[str] = ("",),
        data: dict[str, str] | None = None,
        made: dict[str, str] | None = None,
    ) -> None:
        self.root = root
        self.search = [root / folder for folder in search]
        self.data = {root / path: glob for path, glob in (data or {}).items()}
        self.made = {root / path: glob for path, glob in (made or {}).items()}
        packages = sorted(path.parent.name for path in root.glob("*/__init__.py"))
        self.packages = re.compile(rf"\b(?:{'|'.join(packages) or '(?!)'})(?:\.\w+)+")
        self.bytes = cache(lambda path: hashlib.sha256(path.read_bytes()).hexdigest())
        self.parts = cache(self._parts)
        self.names = cache(self._names)
        self.find = cache(self._find)

    def _parts(self, path: Path) -> list[Part]:
        """Lines that begin with ### are marks that programs read: a part of their own."""
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        parts = [part_of(node, self.packages) for node in tree.body if not is_text(node)]
        marks = {n: line for n, line in enumerate(text.splitlines(), 1) if line.startswith("### ")}
        if marks:
            lines = [node.lineno for node in ast.walk(tree) if hasattr(node, "lineno")]
            placed = [(line, sum(other <= n for other in lines)) for n, line in marks.items()]
            parts.append(Part(sha(placed)))
        return parts

    def whole(self, path: Path) -> str:
        """The digest of all that a file does, without what it imports."""
        return sha([part.digest for part in self.parts(path)])

    def _names(self, path: Path) -> tuple[dict[str, list[int]], Imports]:
        """The parts that define each name, and what the file imports. Who decorates with a function
        of the repository may register something: it acts."""
        defined: dict[str, list[int]] = {}
        aliases: Imports = {}
        for i, part in enumerate(self.parts(path)):
            found = part.binds & part.imports.keys()
            for name in found:
                aliases.setdefault(name, []).extend(part.imports[name])
            for name in part.binds - found:
                defined.setdefault(name, []).append(i)
        ours = {n for n, x in aliases.items() if any(self.find(w, path, level) for w, level in x)}
        registers = defined.keys() | ours
        acting = [i for i, p in enumerate(self.parts(path)) if p.acts or p.marks & registers]
        return {**defined, ACTS: acting}, aliases

    def reach(self, paths: Iterable[Path]) -> tuple[dict[Path, str], set[str]]:
        """The digest of what is reached in each file, and the libraries that it uses."""
        reached: dict[Path, set[int]] = {}
        outside: dict[Path, set[str]] = {}  # names of libraries
        several: dict[Path, set[str]] = {}  # names that are imported twice: the order says which
        seen: set[tuple[Path, str]] = set()
        todo = [(path, WHOLE) for path in paths]

        def follow(path: Path, name: str, what: str, level: int, attribute: str = "") -> None:
            found = self.find(f"{what}.{attribute}" if attribute else what, path, level)
            todo.extend(found)
            if not found:
                outside.setdefault(path, set()).add(f"{what} as {name}")

        while todo:
            path, wanted = step = todo.pop()
            if step in seen:
                continue
            seen.add(step)
            defined, aliases = self.names(path)
            if path not in reached:  # what it imports is imported, whatever of that is used
                reached[path] = set()
                if path in self.made:
                    todo += [(file, WHOLE) for file in self.root.glob(self.made[path])]
                for what, level in set().union(*aliases.values()):
                    todo += [(file, "") for file, _ in self.find(what, path, level)]
            for what, level in aliases.get(wanted, ()):
                follow(path, wanted, what, level)
            parts = self.parts(path)
            chosen = range(len(parts)) if wanted == WHOLE else defined.get(wanted, [])
            for i in {*chosen, *defined[ACTS]} - reached[path]:
                part = parts[i]
                reached[path].add(i)
                for name, attribute in part.uses:
                    meant = part.imports.get(name) or aliases.get(name, [])
                    if len(meant) > 1:
                        several.setdefault(path, set()).add(f"{name} is {meant}")
                    for what, level in meant:
                        follow(path, name, what, level, attribute)
                    if name in defined:
                        todo.append((path, name))
                for module in part.modules:
                    follow(path, module, module, 0)
        digests = {}
        for path, chosen in reached.items():
            code = [self.parts(path)[i].digest for i in sorted(chosen)]
            names = sorted(outside.get(path, set()) | several.get(path, set()))
            digests[path] = sha([code, names])
        named = {name.split(" ")[0] for names in outside.values() for name in names}
        return digests, {name.partition(".")[0] for name in named}

    def _find(self, dotted: str, path: Path, level: int) -> list[tuple[Path, str]]:
        """The files that an import of ``dotted`` reads, packages included, each with the name that
        is meant in it: a definition of the last one, or all of it where it is meant itself."""
        if level:
            places = [path.parents[level - 1]]
        else:
            inside = (path.parent / "__init__.py").is_file()
            places = [*([] if inside else [path.parent]), *self.search]
        for place in places:
            found: list[tuple[Path, str]] = []
            names = dotted.split(".")
            for i, name in enumerate(names):
                folder, file = place / name / "__init__.py", place / f"{name}.py"
                rest = names[i + 1] if i + 1 < len(names) else WHOLE
                if folder.is_file():
                    found.append((folder, rest))
                elif file.is_file():
                    found.append((file, rest))
                    break
                elif not (place / name).is_dir():
                    break
                place = place / name
            if found:
                return found
        return []

    def imports(self, path: Path) -> tuple[Path, ...]:
        """The files that a file itself imports."""
        _, aliases = self.names(path)
        named = set().union(*aliases.values())
        found = (self.find(what, path, level)[-1:] for what, level in named)
        return tuple(sorted({file for step in found for file, _ in step}))

    @cached_property
    def pins(self) -> dict[str, str]:
        """The tested version of each library, by the name that it is imported under."""
        lines = (self.root / "constraints.txt").read_text(encoding="utf-8").splitlines()
        pairs = (line.split("==") for line in lines if "==" in line)
        return {self.plain(name): version for name, version in pairs}

    @staticmethod
    def plain(library: str) -> str:
        return library.lower().replace("-", "_")

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()
