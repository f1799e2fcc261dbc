"""The text of an exercise: `catalogue/NAME/text.py`, its one source.

It is a script of cells. `# %% [markdown]` begins a text cell, `# %%` a code cell. One code cell
holds the solution between `### BEGIN SOLUTION` and `### END SOLUTION`, the markers of nbgrader; the
code cells before it are given. What a student gets is the same text with the solution replaced.
"""

import linecache
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from lm_from_scratch.exercises.card import folder, has_part

if TYPE_CHECKING:  # its text is read without torch
    from lm_from_scratch.exercises.exercise import Exercise

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
HIDDEN = re.compile(r"^### BEGIN HIDDEN TESTS\n.*?^### END HIDDEN TESTS\n?", re.M | re.S)
SOLUTION = re.compile(rf"^( *){BEGIN}\n(.*?)^ *{END}$", re.M | re.S)
#: A file that many AI helpers read by themselves.
RULES = "AGENTS.md"
#: The cell with which an answer runs a model.
PLAY = "\n\n# %%\nfrom lm_from_scratch.exercises import play\n\n{}\n"
#: What holds for every exercise: the end of its first text.
EVERY = """\
#
# Each check calls your code twice, the second time with other numbers; tensors may then have
# another order in memory, as after a transpose. What you are not asked to change stays as it was.
"""
#: What nbgrader puts instead of a solution.
STUB = "# YOUR CODE HERE\nraise NotImplementedError()"


@dataclass(frozen=True)
class Cell:
    """One cell of a source; the text of a text cell is Markdown without comment signs."""

    kind: str  # markdown, code
    text: str

    @property
    def is_code(self) -> bool:
        """Whether it runs."""
        return self.kind == "code"

    @property
    def is_solution(self) -> bool:
        """Whether the student writes here."""
        return self.kind == "code" and BEGIN in self.text

    @property
    def is_check(self) -> bool:
        """Whether this cell gives the points: it holds the hidden tests."""
        return self.kind == "code" and HIDDEN.search(self.text) is not None


def written(name: str) -> str:
    """The whole source: its author's, and what holds for every exercise."""
    text = (folder(name) / "text.py").read_text(encoding="utf-8")
    return re.sub(r"(?<=\n)\n+# %%", lambda next_cell: EVERY + next_cell[0], text, count=1)


def cells(text: str) -> list[Cell]:
    """The cells of a source."""
    parts = []
    for part in re.split(r"^# %%", text, flags=re.M)[1:]:
        head, _, body = part.partition("\n")
        kind = "markdown" if "[markdown]" in head else "code"
        body = body.strip("\n")
        if kind == "markdown":
            body = re.sub(r"^# ?", "", body, flags=re.M)
        parts.append(Cell(kind, body))
    return parts


@cache
def source(name: str) -> list[Cell]:
    """The cells of an exercise; the last one lets a model run with the answer, if it can."""
    return cells(written(name) + playing(name))


def playing(name: str) -> str:
    """The cell that plays an answer, whose name the cell of the check says; empty for an exercise
    without a place in a model."""
    if not has_part(name):
        return ""
    checked = re.search(r"check\(\"\w+\", \w+\)", written(name))
    assert checked is not None
    return PLAY.format(checked[0].replace("check", "play", 1))


def student(text: str) -> str:
    """A cell's text as a student gets it: no solution, no hidden test."""
    stub = SOLUTION.sub(
        lambda match: "\n".join(match[1] + line for line in STUB.splitlines()), text
    )
    return HIDDEN.sub("", stub)


def solved(text: str) -> str:
    """A cell's text with the solution, without its markers."""
    return re.sub(rf"^ *{BEGIN}\n|^ *{END}\n?", "", f"{text}\n", flags=re.M)


def program(name: str, own: Callable[[str], str]) -> str:
    """The given code and the cell of the solution, `own` of it, as a script that runs alone. A
    cell that shows the check, as in a bug hunt, or plays the answer is no part of it."""
    parts = [
        own(cell.text) if cell.is_solution else cell.text
        for cell in source(name)
        if cell.kind == "code" and "lm_from_scratch.exercises import" not in cell.text
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def solution(name: str, with_given: bool = True) -> str:
    """The solution's code; ``with_given`` cells before it, so that it runs alone."""
    if with_given:
        return program(name, solved)
    (own,) = (solved(cell.text).strip("\n") for cell in source(name) if cell.is_solution)
    return own + "\n"


def stub(name: str) -> str:
    """The code a student starts from, as a script that runs alone."""
    return program(name, student)


def script(name: str) -> str:
    """The whole exercise as a student gets it: text, given code, stub and check."""
    return student(written(name) + playing(name))


def rules() -> str:
    """What a student's folder asks of an AI helper: the text of its file `RULES`."""
    return Path(__file__).with_name(RULES).read_text(encoding="utf-8")


def title(name: str) -> str:
    """The first heading of an exercise."""
    match = re.search(r"^# (.*)$", source(name)[0].text, re.M)
    return match[1] if match else name


def plain_title(name: str) -> str:
    """The heading without marks of code."""
    return title(name).replace("`", "")


def load(code: str, file: str) -> dict[str, Any]:
    """Run code under a made-up file name, whose lines tracebacks and Triton can read."""
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    space: dict[str, Any] = {"__name__": file}
    exec(compile(code, file, "exec"), space)
    return space


@cache
def _loaded(name: str, file: str, changes: tuple[tuple[str, str], ...], function: str) -> Any:
    code = solution(name)
    own = solution(name, with_given=False)
    changed = own
    for old, new in changes:
        if changed.count(old) != 1:
            raise ValueError(f"{name}: the solution has {changed.count(old)} times {old!r}")
        changed = changed.replace(old, new)
    return load(code.replace(own, changed), file)[function]


def answer(
    exercise: "Exercise", given: Callable[..., Any] | Mapping[str, str] | None = None
) -> Callable[..., Any]:
    """A planted answer as a function: the solution, with changes, or the function itself.

    Raises ``ValueError`` for a change that is not found once.
    """
    if given is not None and not isinstance(given, Mapping):
        return given
    changes = tuple((given or {}).items())
    label = f"{exercise.name}-{crc32(repr(changes).encode()):x}" if changes else exercise.name
    return _loaded(exercise.name, f"<solution {label}>", changes, exercise.function)
