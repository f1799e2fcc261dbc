"""Whether a text that students get holds a line of a solution."""

from __future__ import annotations

import json
from functools import cache

from lm_from_scratch.exercises.source import written


@cache
def secrets(name: str) -> tuple[str, ...]:
    """Lines of a solution that nothing given holds, read from the source without its parser.

    Lines of up to 12 characters are left out: `return x` is in many texts.
    """
    own, given, inside, hidden = [], [], False, False
    for line in written(name).splitlines():
        word = line.strip()
        if word.startswith("### "):
            inside, hidden = word == "### BEGIN SOLUTION", word == "### BEGIN HIDDEN TESTS"
        elif inside:
            own.append(word)
        elif not hidden:
            given.append(line)
    known = "\n".join(given)
    found = [line for line in own if len(line) > 12 and line not in known]
    return tuple(line for line in found if not line.startswith(("#", '"""')))


def leaks(text: str, name: str, allowed: str = "") -> list[str]:
    """Lines of a solution, and marks of hidden tests, in what a student gets."""
    marks = ["BEGIN SOLUTION", "HIDDEN TESTS", "seed=7341"]
    return [line for line in (*secrets(name), *marks) if line in text and line not in allowed]


def plain(notebook: str) -> str:
    """All sources of a notebook as one text: JSON has its own escapes."""
    return "\n".join("".join(cell["source"]) for cell in json.loads(notebook)["cells"])
