"""The command that lets a model run with what students wrote: one answer, all of them, a class."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lm_from_scratch.exercises import playing
from lm_from_scratch.exercises.card import has_part
from lm_from_scratch.exercises.child import Child, Job
from lm_from_scratch.exercises.exercise import Exercise, exercise, exercises
from lm_from_scratch.exercises.options import PlayOptions
from lm_from_scratch.exercises.play_class import play_class
from lm_from_scratch.exercises.report import say
from lm_from_scratch.exercises.submission import PLACES, defined, find_file, read
from lm_from_scratch.program import PROGRAM


def play_command(options: PlayOptions) -> int:
    """Let a model run with one answer, with all that pass their checks, or with those of a class.
    Raises ``ValueError`` for options that do not go together, and if there is nothing to play."""
    if sum(given is not None for given in (options.name, options.folder, options.all)) > 1:
        raise ValueError("give the name of an exercise, or --folder, or --all")
    if options.all is not None:
        return play_all(options, Path(options.all))
    return play_own(options) if options.name is None else play_one(options, exercise(options.name))


def play_one(options: PlayOptions, wanted: Exercise) -> int:
    """One answer, which need not be right."""
    function = written_in(find_file(wanted.name, options.file), wanted)
    if not options.json:
        return 0 if playing.play(wanted.name, function) else 1
    result = playing.alone(wanted.name, function)
    print(json.dumps({wanted.name: asdict(result)}, indent=1))
    return 0 if result.complete else 1


def play_own(options: PlayOptions) -> int:
    """All answers in a folder that pass their checks, at once."""
    functions, states = {}, {}
    for wanted in (e for e in exercises() if has_part(e.name)):
        places = PLACES if options.folder is None else (Path(options.folder),)
        files = [p for place in places for p in sorted(place.glob(f"{wanted.name}.*"))]
        for file in (p for p in files if p.suffix in (".py", ".ipynb")):
            result = Child(Job(file, wanted.name), options.seconds).result()
            states[wanted.name] = result.reason or f"{result.points:g} of {result.of:g} points"
            if result.passed:
                functions[wanted.name] = written_in(file, wanted)
                break
    missing = {name: state for name, state in states.items() if name not in functions}
    if not functions:
        where = f"in {options.folder}" if options.folder else "here"
        raise ValueError(f"nothing is solved {where}; begin with: {PROGRAM} start rms_norm")
    if not options.json:
        return 0 if playing.play_together(functions, missing) else 1
    parts: dict[str, Any] = {name: playing.alone(name, own) for name, own in functions.items()}
    models = {
        title: playing.agreement(own, right)
        for title, (own, right, _) in playing.together(functions).items()
    }
    record = {
        "parts": {name: asdict(result) for name, result in parts.items()},
        "missing": missing,
        "together": {title: asdict(result) for title, result in models.items()},
    }
    print(json.dumps(record, indent=1))
    return 0 if all(result.complete for result in [*parts.values(), *models.values()]) else 1


def play_all(options: PlayOptions, folder: Path) -> int:
    """The answers of each student, in a line for each."""
    students = []
    for student in play_class(folder, options.seconds):
        students.append(student.as_json())
        if not options.json:
            say(student.line())
    if options.json:
        print(json.dumps(students, indent=1))
    return 0


def written_in(file: Path, wanted: Exercise) -> Any:
    """The function of an exercise that a file defines. Raises ``ValueError`` if it does not."""
    try:
        return defined(read(file), wanted.function)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
