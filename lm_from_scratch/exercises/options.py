"""What the commands of a student and a teacher take: a frozen dataclass of options each."""

from argparse import ArgumentTypeError
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from lm_from_scratch.commands.fields import Command, Name, NoOptions, Options, option
from lm_from_scratch.limits import Limit


def within(low: float, high: float) -> Limit:
    """The limit of a number between two others."""
    return Limit(f"is not a number from {low:g} to {high:g}", lambda x: low <= x <= high)


Seed = Annotated[int, within(0, 2**32)]
Seconds = Annotated[float, within(0.1, 86400)]


def due_date(text: str) -> str:
    """The value of --due: a date, or a date and a time."""
    try:
        due = datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no date as 2026-11-05T18:00") from None
    return due.isoformat(timespec="minutes") if ":" in text else due.date().isoformat()


@dataclass(frozen=True, kw_only=True)
class WatchOptions(Options):
    """An answer, and how it is checked."""

    name: str = option("of the exercise; list shows all", positional=True)
    file: str | None = option("script or notebook; default: NAME.py or .ipynb", None,
                              positional=True)  # fmt: skip
    seed: Seed = option("other numbers; default: 0", 0)
    case: int | None = option("one case alone, with all that your code prints", None)
    seconds: Seconds = option("of processor time", 20.0)


@dataclass(frozen=True, kw_only=True)
class CheckOptions(WatchOptions):
    """The same, once."""

    json: bool = option("for programs; nothing is kept", False)


@dataclass(frozen=True, kw_only=True)
class HintOptions(Options):
    """An exercise, and how much of its hints."""

    name: str = option("of the exercise", positional=True)
    all: bool = option("all hints at once", False)


@dataclass(frozen=True, kw_only=True)
class SolutionOptions(Options):
    """An exercise."""

    name: str = option("of the exercise", positional=True)


@dataclass(frozen=True, kw_only=True)
class StartOptions(Options):
    """An exercise, and where to write it."""

    name: str = option("of the exercise", positional=True)
    file: str | None = option("script or notebook; default: NAME.py", None, positional=True)


@dataclass(frozen=True, kw_only=True)
class PlayOptions(Options):
    """One answer, those of a folder, or those of a class."""

    name: str | None = option("of the exercise; default: all that pass their checks", None,
                              positional=True)  # fmt: skip
    file: str | None = option("script or notebook; default: NAME.py or .ipynb", None,
                              positional=True)  # fmt: skip
    folder: Name | None = option("where all are looked for; default: here", None)
    all: Name | None = option("a line for each student in a folder", None, metavar="FOLDER")
    json: bool = option("for programs: what is the same, of how many", False)
    seconds: Seconds = option("of processor time for each check", 20.0)


@dataclass(frozen=True, kw_only=True)
class NotebooksOptions(Options):
    """The folder, and what follows."""

    folder: str = option("new, or one that this command has written before", positional=True)
    open: bool = option("then open it in JupyterLab", False)


@dataclass(frozen=True, kw_only=True)
class GradeOptions(Options):
    """A folder of files, and the tables of a class."""

    folder: Name = option("with a file or a folder for each student", positional=True)
    csv: Name = option("the table to write")
    reports: Name | None = option("folder for a page and a text a student", None)
    update: bool = option("grade what is new, keep all the rest", False)
    exercises: tuple[str, ...] | None = option("default: all that any file has", None,
                                               metavar="NAME")  # fmt: skip
    students: tuple[str, ...] | None = option("grade these again, nobody else", None,
                                              metavar="NAME")  # fmt: skip
    due: str | None = option("a date, for days late; needs folders by date", None, type=due_date)
    seed: Seed | None = option("the same for all; default: 7341", None)
    seconds: Seconds = option("for one file and exercise", 10.0)
    jobs: Annotated[int, within(1, 1000)] | None = option(
        "processes at a time; default: all processors", None
    )
    quiet: bool = option("no progress bar", False)


PLAY = """FOLDER/student/.../file or FOLDER/student.ipynb, as for grade.

With --all, the answers of each student run in a process of their own. Otherwise they run in this
one, after their checks. Run the code of people you do not trust in a container.

examples
  python -m lm_from_scratch play rms_norm
  python -m lm_from_scratch play
  python -m lm_from_scratch play --all submitted
"""

GRADE = """FOLDER/student/.../file or FOLDER/student.ipynb; scripts and notebooks, any names. A date
may be the name of a folder, as FOLDER/2026-11-05/student/file: of all dates the best file counts.

Beside grades.csv (a row for each student and exercise) this writes grades-students.csv (a row for
each student, with columns for your own points and notes) and grades.json. Nothing is overwritten:
--update keeps your columns, and what the files said before is copied to a folder `earlier`.

A student's functions run in processes of their own, with limits on time, memory and files. This
stops accidents, not attacks: run the code of people you do not trust in a container.

examples
  python -m lm_from_scratch grade submitted --csv grades.csv
  python -m lm_from_scratch grade submitted --csv grades.csv --reports feedback --exercises rope
  python -m lm_from_scratch grade submitted --csv grades.csv --reports feedback --update
  python -m lm_from_scratch grade submitted --csv grades.csv --students anna --due 2026-11-05
"""

_HERE = "lm_from_scratch.exercises"
COMMANDS = {
    "check": Command("check your answer to an exercise", (CheckOptions,),
                     f"{_HERE}.checking:check_command"),
    "watch": Command("check it again after every save", (WatchOptions,),
                     f"{_HERE}.checking:watch_command"),
    "play": Command("let a model run with your answers", (PlayOptions,),
                    f"{_HERE}.play_command:play_command", examples=PLAY),
    "hint": Command("show the next hint of an exercise", (HintOptions,),
                    f"{_HERE}.commands:hint_command"),
    "solution": Command("show a solution: when solved, or asked for twice", (SolutionOptions,),
                        f"{_HERE}.commands:solution_command"),
    "list": Command("list all exercises and what is done", (NoOptions,),
                    f"{_HERE}.commands:list_command"),
    "next": Command("say which exercise comes next", (NoOptions,),
                    f"{_HERE}.commands:next_command"),
    "start": Command("write an exercise as a file to work in", (StartOptions,),
                     f"{_HERE}.commands:start_command"),
    "notebooks": Command("write all tutorials and exercises as notebooks", (NotebooksOptions,),
                         f"{_HERE}.notebooks_command:run"),
    "grade": Command("grade a folder of submissions", (GradeOptions,),
                     f"{_HERE}.grade_command:grade_command", examples=GRADE),
}  # fmt: skip
