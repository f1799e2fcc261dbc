"""Every row of every table is about the source as it is: quick, and no law runs."""

import importlib
from pathlib import Path

import pytest
from mutation import Mutant, count

FILES = sorted(Path(__file__).parent.glob("test_mutants_*.py"))


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_the_text_of_each_mistake_is_in_the_source(name: str) -> None:
    tables = [value for value in vars(importlib.import_module(name)).values() if is_table(value)]
    assert tables
    for table in tables:
        for where, rows in table.items():
            for label, *patch in rows:
                mutant = Mutant(where, *patch)
                assert count(mutant) == mutant.times, f"{label}: {mutant.right!r} in {where}"


def is_table(value: object) -> bool:
    """Whether it is a table of mistakes: functions as ``module:name``, each with its rows."""
    return (
        isinstance(value, dict)
        and {*map(type, value.values())} == {list}
        and all(isinstance(where, str) and ":" in where for where in value)
    )
