"""Proofs that need not be repeated: what each depends on, as a digest, and what it found.

A *proof* takes seconds to minutes and finds the same on each run. Its *record*,
``recorded/KIND/NAME.json``, holds what was found and a digest of all that it depends on: Python
files without comments, docstrings and formatting; every file of the repository that they import, in
functions too, or name in a string; data byte for byte; the pinned versions of the libraries among
those imports. While the digest fits, the proof need not be repeated. The seal keeps an outcome from
being edited by hand or copied to another name; who forges it too meets a proof that CI repeats.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Proof:
    """What is proved, and what that depends on."""

    kind: str
    name: str
    prove: Callable[[], Any]  # what it found, as JSON; an error says what does not hold
    code: tuple[Path, ...] = ()  # Python files, with all that they import
    alone: tuple[Path, ...] = ()  # Python files, without what they import
    exact: tuple[Path, ...] = ()  # byte for byte
    facts: Any = None  # JSON
    pins: tuple[str, ...] = ()  # libraries that no file imports
    product: Path | None = None  # the file that holds the text which `prove` returns
    needs: tuple[str, ...] = ()  # without these modules it cannot be repeated

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    def missing(self) -> str:
        return ", ".join(name for name in self.needs if importlib.util.find_spec(name) is None)


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
    return repr(node)


def is_string(node: Any) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and is_string(node.value)


def code_digest(text: str) -> str:
    """The digest of what a text of Python does. Lines that begin with ### are marks that programs
    read: they count, at the place where they stand."""
    tree = ast.parse(text)
    lines = [node.lineno for node in ast.walk(tree) if hasattr(node, "lineno")]
    marks = [
        (line, sum(n <= number for n in lines))
        for number, line in enumerate(text.splitlines(), start=1)
        if line.startswith("### ")
    ]
    return sha([repr(shape(tree)), marks])


class Tree:
    """The files of a repository, each read once: their code, and what they import.

    ``search`` names the folders where a name is looked up after the file's own; ``data`` the files
    (as globs) that some file reads, whoever imports it.
    """

    def __init__(
        self, root: Path, search: Iterable[str] = ("",), data: dict[str, str] | None = None
    ) -> None:
        self.root = root
        self.search = [root / folder for folder in search]
        self.data = {root / path: glob for path, glob in (data or {}).items()}
        packages = sorted(path.parent.name for path in root.glob("*/__init__.py"))
        self.in_strings = re.compile(rf"\b(?:{'|'.join(packages) or '(?!)'})\b(?:\.\w+)*")
        self.code = cache(lambda path: code_digest(path.read_text(encoding="utf-8")))
        self.bytes = cache(lambda path: hashlib.sha256(path.read_bytes()).hexdigest())
        self.imports = cache(self._imports)

    def _imports(self, path: Path) -> tuple[frozenset[Path], frozenset[str]]:
        """The files that a file imports or names, and the libraries."""
        files: set[Path] = set()
        libraries = set()
        for name, folder in self.names(path):
            found = self.find(name, folder)
            files |= found
            if not found:
                libraries.add(name.partition(".")[0])
        return frozenset(files - {path}), frozenset(libraries)

    def names(self, path: Path) -> Iterator[tuple[str, Path]]:
        """What a file imports, and from where it looks. ``from a import b`` may mean a file b."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = {node.value for node in ast.walk(tree) if is_text(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, path.parent) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                folder = path.parents[max(node.level - 1, 0)]
                head = f"{node.module}." if node.module else ""
                yield from ((head + alias.name, folder) for alias in node.names)
            elif is_string(node) and node not in texts:
                for name in self.in_strings.findall(node.value):
                    yield name, path.parent
                    if name == node.value or f"-m {name}" in node.value:
                        yield f"{name}.__main__", path.parent  # as in `python -m name`

    def find(self, name: str, folder: Path) -> set[Path]:
        """The files that are read when ``name`` is imported, packages included."""
        for place in [folder, *self.search]:
            found = set()
            for part in name.split("."):
                place = place / part
                found |= {
                    p for p in (place / "__init__.py", place.with_suffix(".py")) if p.is_file()
                }
            if found:
                return found
        return set()

    def closure(self, paths: Iterable[Path]) -> tuple[set[Path], set[str]]:
        """The files and all that they import, and the libraries among that."""
        files: set[Path] = set()
        libraries: set[str] = set()
        todo = list(paths)
        while todo:
            path = todo.pop()
            if path not in files:
                files.add(path)
                more, named = self.imports(path)
                libraries |= named
                todo += more
        return files, libraries

    @cached_property
    def pins(self) -> dict[str, str]:
        """The tested version of each library, by the name that it is imported under."""
        lines = (self.root / "constraints.txt").read_text(encoding="utf-8").splitlines()
        pairs = (line.split("==") for line in lines if "==" in line)
        return {name.lower().replace("-", "_"): version for name, version in pairs}

    def digest(self, proof: Proof) -> str:
        """Of everything that a proof depends on."""
        files, libraries = self.closure(proof.code)
        exact = {*proof.exact}
        for path in files & self.data.keys():
            exact |= set(self.root.glob(self.data[path]))
        wanted = {name.lower().replace("-", "_") for name in (*libraries, *proof.pins)}
        return sha(
            {
                "code": {self.name(p): self.code(p) for p in files | {*proof.alone}},
                "exact": {self.name(p): self.bytes(p) for p in exact if p.is_file()},
                "facts": proof.facts,
                "pins": {name: v for name, v in self.pins.items() if name in wanted},
            }
        )

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


@dataclass
class Records:
    """The stored records of a folder."""

    folder: Path
    tree: Tree
    again: bool = False  # repeat whatever the records say, and compare
    write: bool = True  # a record that is not current is written again; otherwise it is an error
    repeated: list[str] = field(default_factory=list)

    def path(self, proof: Proof) -> Path:
        return self.folder / proof.kind / f"{proof.name}.json"

    def read(self, proof: Proof) -> dict[str, Any]:
        try:
            found = json.loads(self.path(proof).read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        except (OSError, ValueError):
            return {}

    def state(self, proof: Proof) -> str:
        """``current``; or ``missing``, ``forged`` (no record of this proof, or not as it was
        written), ``stale`` (something that the proof depends on has changed)."""
        record = self.read(proof)
        if not self.path(proof).is_file():
            return "missing"
        digest, outcome = record.get("digest"), record.get("outcome")
        if record.get("seal") != seal(proof, digest, outcome):
            return "forged"
        if digest != self.tree.digest(proof):
            return "stale"
        return "current" if fits(proof.product, outcome) else "forged"

    def hold(self, proof: Proof) -> None:
        """Pass at once where the record is current, else repeat the proof and write its record.
        Raises ``AssertionError`` with one line for what does not hold."""
        state = self.state(proof)
        if state == "current" and not self.again:
            return
        assert self.write or state == "current", f"{proof}: its record is {state}: make records"
        start = time.perf_counter()
        found = proof.prove()
        self.repeated.append(str(proof))
        outcome = sha(found) if proof.product else found
        if state == "current":
            stored = self.read(proof)["outcome"]
            assert outcome == stored, f"{proof}: found {outcome}, the record says {stored}"
            return
        if proof.product:
            put(proof.product, found)
        digest = self.tree.digest(proof)
        record = {"digest": digest, "outcome": outcome, "seal": seal(proof, digest, outcome)}
        record["seconds"] = round(time.perf_counter() - start)
        put(self.path(proof), json.dumps(record, indent=1) + "\n")

    def orphans(self, proofs: Iterable[Proof]) -> list[str]:
        """Files of the folder that no proof owns: their subject was removed or has another name."""
        owned = {self.path(proof) for proof in proofs}
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.folder)) for path in files if path not in owned)

    def seconds(self, proof: Proof) -> float:
        """What the proof took when it was recorded; without a record, longer than all others."""
        return self.read(proof).get("seconds", float("inf"))

    def chosen(self, proofs: Iterable[Proof], commit: str, limit: float = 20) -> list[Proof]:
        """One proof of each kind, as the commit draws it among those that take few seconds."""
        drawn: dict[str, Proof] = {}
        for proof in sorted(proofs, key=lambda proof: sha(f"{commit} {proof}")):
            if self.seconds(proof) <= limit:
                drawn.setdefault(proof.kind, proof)
        return list(drawn.values())


def seal(proof: Proof, digest: Any, outcome: Any) -> str:
    return sha([proof.kind, proof.name, digest, outcome])


def fits(product: Path | None, outcome: Any) -> bool:
    """Whether the file that a proof made, if it makes one, is as it was made."""
    return product is None or (
        product.is_file() and outcome == hashlib.sha256(product.read_bytes()).hexdigest()
    )


def put(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
