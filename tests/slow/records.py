"""Proofs that need not be repeated: what each depends on, as a digest, and what it found.

A *proof* takes seconds to minutes and finds the same on each run. Its *record*,
``recorded/KIND/NAME.json``, holds what was found and a digest of all that it depends on:

* the code: a file's statements without comments, docstrings and formatting, and in every file of
  the repository that it imports, in functions too, the definitions that it reaches by name
  (reach.py)
* data byte for byte, and the pinned versions of the libraries that this code uses

While the digest fits, the proof need not be repeated. The seal keeps an outcome from being edited
by hand or copied to another name; who forges the seal, too, meets a proof that CI repeats.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reach import Tree, sha


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
    lacks: Callable[[], str] = str  # why it cannot be repeated here, or nothing

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    def digest(self, tree: Tree) -> str:
        """Of everything that the proof depends on."""
        code, libraries = tree.reach(self.code)
        exact = {*self.exact}
        for path in code.keys() & tree.data.keys():
            exact |= set(tree.root.glob(tree.data[path]))
        wanted = {tree.plain(name) for name in (*libraries, *self.pins)}
        return sha(
            {
                "code": {tree.name(p): digest for p, digest in code.items()},
                "alone": {tree.name(p): tree.whole(p) for p in self.alone},
                "exact": {tree.name(p): tree.bytes(p) for p in exact if p.is_file()},
                "facts": self.facts,
                "pins": {name: v for name, v in tree.pins.items() if name in wanted},
            }
        )


@dataclass
class Records:
    """The stored records of a folder."""

    folder: Path
    tree: Tree
    again: bool = False  # repeat whatever the records say, and compare
    write: bool = True  # a record that is not current is written again; otherwise it is an error

    def path(self, proof: Proof) -> Path:
        return self.folder / proof.kind.replace(" ", "_") / f"{proof.name}.json"

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
        if digest != proof.digest(self.tree):
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
        outcome = sha(found) if proof.product else found
        if state == "current":
            stored = self.read(proof)["outcome"]
            assert outcome == stored, f"{proof}: found {outcome}, the record says {stored}"
            return
        if proof.product:
            put(proof.product, found)
        digest = proof.digest(self.tree)
        record = {"digest": digest, "outcome": outcome, "seal": seal(proof, digest, outcome)}
        record["seconds"] = round(time.perf_counter() - start)
        put(self.path(proof), json.dumps(record, indent=1) + "\n")

    def orphans(self, proofs: Iterable[Proof]) -> list[str]:
        """Files of the kinds' folders that no proof owns: their subject was removed or has another
        name. (A file beside these folders is no record: `plays.json` is measured, not proved.)"""
        owned = {self.path(proof) for proof in proofs}
        files = (path for path in self.folder.glob("*/**/*") if path.is_file())
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
