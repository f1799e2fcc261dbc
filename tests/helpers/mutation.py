"""Planted mistakes: a line of the real source says something else while laws run.

A row of a table is (what is wrong, the text as it is, the text that is wrong): the first text
stands exactly once in the source of the function that the table names, or as often as a number
behind them says. The function gets the code of the changed source, and stays the object that it is:
the mistake is wherever the function is, imported by name, in a registry or on a built model. A law
is a function that raises; most are tests of the package. Before anything is changed, all must hold.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import linecache
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

Law = Callable[[], object]
TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutant:
    """A mistake: in the function ``where`` (``module:name``) ``wrong`` stands for ``right``."""

    where: str
    right: str
    wrong: str
    times: int = 1


def mutants(table: Mapping[str, list[tuple]]) -> list[Any]:
    """The rows of a table, by function, as parameters of a test."""
    return [
        pytest.param(Mutant(where, *patch), id=label)
        for where, rows in table.items()
        for label, *patch in rows
    ]


def killer(mutant: Mutant, laws: Mapping[str, Law]) -> str | None:
    """The first law that does not hold with the mistake in place. An error of shapes or values is
    as good as a wrong number; a name that does not exist is the table's own mistake: raised."""
    for law in laws.values():
        hold(law)
    with planted(mutant), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, of the numbers that a mistake makes
        for name, law in laws.items():
            try:
                law()
            except (AssertionError, IndexError, RuntimeError, ValueError, pytest.fail.Exception):
                return name
            except pytest.skip.Exception:
                pass
    return None


@cache
def hold(law: Law) -> None:
    """The law holds on the code as it is. What it computes by other means it may keep from here."""
    with suppress(pytest.skip.Exception):
        law()


@cache
def laws_in(*files: str, names: str = "", most: int = 3) -> dict[str, Law]:
    """The quick tests of files below ``tests/`` that need no fixture and whose name matches
    ``names``, each with about ``most`` of its cases. Those of hypothesis are left out: they would
    look for the smallest failure."""
    laws: dict[str, Law] = {}
    for path in (TESTS / file for file in files):
        if str(path.parent) not in sys.path:  # as pytest does
            sys.path.insert(0, str(path.parent))
        for name, test in vars(importlib.import_module(path.stem)).items():
            if re.match(f"test_.*({names})", name) and not hasattr(test, "hypothesis"):
                cases = list(parameters(test))
                some = cases[:: max(1, len(cases) // most)]
                laws |= {f"{name}[{i}]": partial(test, **case) for i, case in enumerate(some)}
    return laws


def parameters(test: Any) -> Iterator[dict[str, Any]]:
    """The arguments of a test, case by case, as its marks say; none for one that needs more."""
    columns = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "slow":
            return
        if mark.name == "parametrize":
            names, values = mark.args
            names = re.findall(r"\w+", names) if isinstance(names, str) else names
            rows = [getattr(v, "values", v if len(names) > 1 else [v]) for v in values]
            plain = [not getattr(v, "marks", ()) for v in values]
            columns.append([dict(zip(names, row)) for row in itertools.compress(rows, plain)])
    for case in itertools.product(*columns):
        arguments = {name: value for column in case for name, value in column.items()}
        if arguments.keys() == inspect.signature(test).parameters.keys():
            yield arguments


def count(mutant: Mutant) -> int:
    """How often the text that is right stands in the source of the function."""
    return inspect.getsource(function_of(mutant.where)[1]).count(mutant.right)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The mistake is in place. Raises ``LookupError`` where the source has changed."""
    holder, function = function_of(mutant.where)
    path, (lines, start) = inspect.getfile(function), inspect.getsourcelines(function)
    source, file = "".join(lines), [*linecache.getlines(path)]
    if (times := count(mutant)) != mutant.times:
        raise LookupError(
            f"{path}:{start}: {mutant.right!r} stands {times} times in "
            f"{mutant.where}, not {mutant.times}: has the code changed? Look at its mutant"
        )
    file[start - 1 : start - 1 + len(lines)] = [source.replace(mutant.right, mutant.wrong)]
    text, name = "".join(file), f"{path} with a mistake"
    code = next(
        code
        for code in codes(compile(text, name, "exec", dont_inherit=True))
        if (code.co_qualname, code.co_firstlineno) == (function.__qualname__, start)
    )
    rewritten = getattr(holder, "rewritten_fn", {})  # Triton's interpreter reads source, and keeps
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(linecache.cache, name, (len(text), None, text.splitlines(True), name))
        patch.setattr(function, "__code__", code)
        rewritten.pop(function, None)
        try:
            yield
        finally:
            rewritten.pop(function, None)


def function_of(where: str) -> tuple[Any, Any]:
    """What has that name, and the function in it: of a property, an operator, a kernel."""
    module, _, path = where.partition(":")
    holder: Any = importlib.import_module(f"lm_from_scratch.{module}")
    for name in path.split("."):
        holder = inspect.getattr_static(holder, name)
    function = holder
    for inside in ("__func__", "fget", "_init_fn", "fn"):
        function = getattr(function, inside, function)
    return holder, inspect.unwrap(function)


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a module and of everything in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)
