"""The command that lets a model run with what students wrote: one answer, all of them, a class.

``playing`` is imported where it is used: it brings the models, which ``--help`` does without.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lm_from_scratch.commands.options import not_empty
from lm_from_scratch.exercises.child import Child, Job
from lm_from_scratch.exercises.exercise import Exercise, exercise, exercises, has_part
from lm_from_scratch.exercises.grade_command import SECONDS
from lm_from_scratch.exercises.report import say
from lm_from_scratch.exercises.submission import PLACES, defined, find_file, read
from lm_from_scratch.program import PROGRAM

HELP = """FOLDER/student/.../file or FOLDER/student.ipynb, as for grade.

With --all, the answers of each student run in a process of their own. Otherwise they run in this
one, after their checks. Run the code of people you do not trust in a container.

examples
  python -m lm_from_scratch play rms_norm
  python -m lm_from_scratch play
  python -m lm_from_scratch play --all submitted
"""


def play_command(args: argparse.Namespace) -> int:
    """Let a model run with one answer, with all that pass their checks, or with those of a class.
    Raises ``ValueError`` for options that do not go together, and if there is nothing to play."""
    if sum(given is not None for given in (args.name, args.folder, args.all)) > 1:
        raise ValueError("give the name of an exercise, or --folder, or --all")
    if args.all is not None:
        return play_all(args)
    return play_own(args) if args.name is None else play_one(args)


def play_one(args: argparse.Namespace) -> int:
    """One answer, which need not be right."""
    from lm_from_scratch.exercises import playing

    wanted = exercise(args.name)
    playing.place_of(wanted.name)
    function = written_in(find_file(wanted.name, args.file), wanted)
    if not args.json:
        return 0 if playing.play(wanted.name, function) else 1
    found = playing.alone(wanted.name, function)
    print(json.dumps({wanted.name: asdict(found)}, indent=1))
    return 0 if found.whole else 1


def play_own(args: argparse.Namespace) -> int:
    """All answers in a folder that pass their checks, at once."""
    functions, states = {}, {}
    for wanted in (e for e in exercises() if has_part(e.name)):
        places = PLACES if args.folder is None else (Path(args.folder),)
        files = [p for place in places for p in sorted(place.glob(f"{wanted.name}.*"))]
        for file in (p for p in files if p.suffix in (".py", ".ipynb")):
            found = Child(Job(file, wanted.name), args.seconds).result()
            states[wanted.name] = found.reason or f"{found.points:g} of {found.of:g} points"
            if found.passed:
                functions[wanted.name] = written_in(file, wanted)
                break
    missing = {name: state for name, state in states.items() if name not in functions}
    if not functions:
        where = f"in {args.folder}" if args.folder else "here"
        raise ValueError(f"nothing is solved {where}; begin with: {PROGRAM} start rms_norm")
    from lm_from_scratch.exercises import playing

    if not args.json:
        return 0 if playing.play_together(functions, missing) else 1
    parts: dict[str, Any] = {name: playing.alone(name, own) for name, own in functions.items()}
    whole = {
        title: playing.agreement(own, right)
        for title, (own, right, _) in playing.together(functions).items()
    }
    said = {
        "parts": {name: asdict(found) for name, found in parts.items()},
        "missing": missing,
        "together": {title: asdict(found) for title, found in whole.items()},
    }
    print(json.dumps(said, indent=1))
    return 0 if all(found.whole for found in [*parts.values(), *whole.values()]) else 1


def play_all(args: argparse.Namespace) -> int:
    """The answers of each student, in a line for each."""
    from lm_from_scratch.exercises.play_class import play_class

    students = []
    for student in play_class(Path(args.all), args.seconds):
        students.append(student.as_json())
        if not args.json:
            say(student.line())
    if args.json:
        print(json.dumps(students, indent=1))
    return 0


def written_in(file: Path, wanted: Exercise) -> Any:
    """The function of an exercise that a file defines. Raises ``ValueError`` if it does not."""
    try:
        return defined(read(file), wanted.function)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def add_options(p: argparse.ArgumentParser) -> None:
    """The options of the command."""
    p.add_argument("name", nargs="?", help="of the exercise; default: all that pass their checks")
    p.add_argument("file", nargs="?", help="script or notebook; default: NAME.py or .ipynb")
    p.add_argument("--folder", type=not_empty, help="where all are looked for; default: here")
    p.add_argument(
        "--all", type=not_empty, metavar="FOLDER", help="a line for each student in a folder"
    )
    p.add_argument(
        "--json", action="store_true", help="for programs: what is the same, of how many"
    )
    p.add_argument(
        "--seconds", type=SECONDS, default=20.0, help="of processor time for each check; 20"
    )
