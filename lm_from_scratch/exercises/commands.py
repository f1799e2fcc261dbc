"""Commands of a student and a teacher, from start and check to play and grade."""

import argparse
import json
import os
import select
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lm_from_scratch.exercises import notebooks_command, play_command, progress
from lm_from_scratch.exercises.child import Child, Job, Verdict, start_method, verdict
from lm_from_scratch.exercises.exercise import Exercise, drafts, exercise, exercises
from lm_from_scratch.exercises.grade_command import (
    HELP,
    SECONDS,
    SEEDS,
    add_options,
    grade_command,
)
from lm_from_scratch.exercises.notebook import dump, notebook
from lm_from_scratch.exercises.report import examine, say
from lm_from_scratch.exercises.source import RULES, rules, script, solution, title
from lm_from_scratch.exercises.submission import find_file
from lm_from_scratch.program import PROGRAM

Stamp = tuple[int, int, int]
POLL = 0.25  # seconds: editors and network drives do not always report a change


def check_command(args: argparse.Namespace) -> int:
    """Check a file; the exit code is 0 only if all cases pass."""
    wanted = exercise(args.name)
    file = find_file(wanted.name, args.file)
    found = verdict(Job(file, wanted.name, args.seed, args.case), args.seconds)
    show(found, args)
    return 0 if found.passed else 1


def show(found: Verdict, args: argparse.Namespace) -> None:
    """Print a report and keep its result."""
    if args.json:
        print(json.dumps(asdict(found), indent=1), flush=True)
        return
    say(found.text)
    if args.case is None and not progress.keep(
        found.exercise, found.points, found.passed, args.seed
    ):
        print(f"This is not kept: {progress.path()} cannot be written.", flush=True)


def watch_command(args: argparse.Namespace) -> int:
    """Check again after every save, until Ctrl-C."""
    wanted = exercise(args.name)
    file = find_file(wanted.name, args.file)
    warm(wanted)
    print(f"Watching {file}. Enter checks again, Ctrl-C ends.", flush=True)
    try:
        while True:
            now = stamp(file)
            if now is not None:
                report(wanted, file, args, now)
            while stamp(file) in (now, None) and not entered():
                pass
    except KeyboardInterrupt:
        print()
    return 0


def report(wanted: Exercise, file: Path, args: argparse.Namespace, now: Stamp) -> None:
    """One check in a child, so that no loop or crash ends the watch. A save ends it: what it would
    say is about another text."""
    child = Child(Job(file, wanted.name, args.seed, args.case), args.seconds)
    try:
        while not child.is_done():
            if stamp(file) not in (now, None):
                return
            child.pipe.poll(POLL)
        found = child.result()
    finally:
        child.end()
    print(f"\n{time.strftime('%H:%M:%S')}")
    show(found, args)
    if found.passed:
        following = next_exercise()
        if following:
            print(f"Next: {following.name} ({plain_title(following)})", flush=True)


def warm(wanted: Exercise) -> None:
    """Run the reference once, so that a child has all it needs in memory."""
    if start_method() == "fork":
        examine(wanted, wanted.reference)


def stamp(file: Path) -> Stamp | None:
    """What changes when a file is saved; None while an editor replaces it."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def entered() -> bool:
    """Wait a moment; whether Enter was pressed in it."""
    if os.name == "nt" or not sys.stdin or sys.stdin.closed:
        time.sleep(POLL)
        return False
    try:
        readable = bool(select.select([sys.stdin], [], [], POLL)[0])
    except (OSError, ValueError):  # no input at all
        time.sleep(POLL)
        return False
    if readable and not sys.stdin.readline():  # the end of the input
        time.sleep(POLL)
        return False
    return readable


def hint_command(args: argparse.Namespace) -> int:
    """The next hint; each request shows one more."""
    wanted = exercise(args.name)
    hints = wanted.hints
    seen = int(progress.number(progress.load().get(wanted.name, {}).get("hints")))
    seen = len(hints) if args.all else min(max(seen, 0) + 1, len(hints))
    everything = args.all
    if not progress.update(wanted.name, hints=seen):  # without it, this would be the first for ever
        print(f"{progress.path()} cannot be written: here are all hints.")
        everything, seen = True, len(hints)
    for number in range(1 if everything else seen, seen + 1):
        print(f"hint {number} of {len(hints)}: {hints[number - 1]}")
    if seen == len(hints):
        print(f"This was the last one. Then: {PROGRAM} solution {wanted.name}")
    return 0


def solution_command(args: argparse.Namespace) -> int:
    """The solution: after the exercise is solved, or when it is asked for again."""
    wanted = exercise(args.name)
    known = progress.load().get(wanted.name, {})
    first = not known.get("passed") and not progress.number(known.get("asked"))
    if first and progress.update(wanted.name, asked=1):
        left = len(wanted.hints) - int(progress.number(known.get("hints")))
        hints = f"Hints left: {left} ({PROGRAM} hint {wanted.name}). "
        print(f"{wanted.name} is not solved yet. {hints if left > 0 else ''}Ask again to see it.")
        return 1
    print(solution(wanted.name), end="")
    return 0


def list_command(args: argparse.Namespace) -> int:
    """All exercises with what is done."""
    known = progress.load()
    chapter = None
    for found in exercises():
        folder, _, _ = found.page.partition("/")
        if folder != chapter:
            chapter = folder
            print(folder)
        print(row(found, known))
    if waiting := drafts():
        print("drafts, whose checks are not proved and may be wrong")
        print("\n".join(row(found, known) for found in waiting))
    done = sum(bool(known.get(found.name, {}).get("passed")) for found in exercises())
    kept = f"Kept in {progress.path()}" if progress.path().is_file() else "Nothing is kept yet"
    print(f"{done} of {len(exercises())} done; * is easy, *** is hard. {kept}.")
    return 0


def row(found: Exercise, known: dict[str, dict[str, Any]]) -> str:
    """An exercise in a line, with what is done of it."""
    entry = known.get(found.name, {})
    points = progress.number(entry.get("points"))
    mark = "done" if entry.get("passed") else f"{points:g}/{found.points}" if points else "-"
    stars = "*" * found.difficulty
    return f"  {mark:>5}  {found.name:<24} {stars:<3} {found.minutes:>3} min  {plain_title(found)}"


def plain_title(found: Exercise) -> str:
    """The heading of an exercise, without marks of code."""
    return title(found.name).replace("`", "")


def next_exercise() -> Exercise | None:
    """The first exercise of the path that is not solved."""
    known = progress.load()
    return next((e for e in exercises() if not known.get(e.name, {}).get("passed")), None)


def next_command(args: argparse.Namespace) -> int:
    """What to do now."""
    found = next_exercise()
    if found is None:
        print("All exercises are done.")
        return 0
    print(
        f"{found.name}: {plain_title(found)} ({found.minutes} minutes, after the page {found.page})"
    )
    print(f"{PROGRAM} start {found.name}")
    return 0


def start_command(args: argparse.Namespace) -> int:
    """Write the exercise as a script or a notebook to work in, and the rules for AI helpers beside
    it.

    Raises ``ValueError`` for a file that is there already.
    """
    wanted = exercise(args.name)
    path = Path(args.file or f"{wanted.name}.py")
    texts = {".py": script, ".ipynb": lambda name: dump(notebook(exercise(name)))}
    if path.suffix not in texts:
        raise ValueError(f"{path} must end in .py or .ipynb")
    if path.exists():
        raise ValueError(f"{path} exists already; remove it, or name another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    progress.write_text(path, texts[path.suffix](wanted.name))
    named = shlex.quote(str(path))
    print(f"Write in {path}, then: {PROGRAM} check {wanted.name} {named}")
    helper = path.with_name(RULES)
    if not helper.exists():
        progress.write_text(helper, rules())
        print(f"{helper} says to AI helpers: explain, and do not write the answer")
    return 0


def add_commands(commands: Any, keep: Any) -> None:
    """Add the commands to those of the package."""

    def add(name: str, run: Any, text: str, **options: Any) -> argparse.ArgumentParser:
        p = commands.add_parser(name, help=text, description=text + ".", **options)
        p.set_defaults(run=run)
        return p

    for name, run, text in (
        ("check", check_command, "check your answer to an exercise"),
        ("watch", watch_command, "check it again after every save"),
    ):
        p = add(name, run, text)
        p.add_argument("name", help="of the exercise; list shows all")
        p.add_argument("file", nargs="?", help="script or notebook; default: NAME.py or .ipynb")
        p.add_argument("--seed", type=SEEDS, default=0, help="other numbers; default: 0")
        p.add_argument("--case", type=int, help="one case alone, with all that your code prints")
        p.set_defaults(json=False)
        if name == "check":
            p.add_argument("--json", action="store_true", help="for programs; nothing is kept")
        p.add_argument(
            "--seconds", type=SECONDS, default=20.0, help="of processor time; default: 20"
        )
    p = add("play", play_command.play_command, "let a model run with your answers",
            formatter_class=keep, epilog=play_command.HELP)  # fmt: skip
    play_command.add_options(p)
    p = add("hint", hint_command, "show the next hint of an exercise")
    p.add_argument("name", help="of the exercise")
    p.add_argument("--all", action="store_true", help="all hints at once")
    p = add("solution", solution_command, "show a solution: when solved, or asked for twice")
    p.add_argument("name", help="of the exercise")
    add("list", list_command, "list all exercises and what is done")
    add("next", next_command, "say which exercise comes next")
    p = add("start", start_command, "write an exercise as a file to work in")
    p.add_argument("name", help="of the exercise")
    p.add_argument("file", nargs="?", help="script or notebook; default: NAME.py")
    p = add("notebooks", notebooks_command.run, "write all tutorials and exercises as notebooks")
    notebooks_command.add_options(p)

    p = add("grade", grade_command, "grade a folder of submissions", formatter_class=keep,
            epilog=HELP)  # fmt: skip
    add_options(p)
