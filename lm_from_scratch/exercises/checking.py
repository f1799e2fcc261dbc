"""The commands that check an answer: once, or again after every save."""

import json
import os
import select
import sys
import time
from dataclasses import asdict
from pathlib import Path

from lm_from_scratch.exercises import progress
from lm_from_scratch.exercises.card import following
from lm_from_scratch.exercises.child import Child, Job, Verdict, start_method, verdict, warned
from lm_from_scratch.exercises.exercise import Exercise, exercise
from lm_from_scratch.exercises.options import CheckOptions, WatchOptions
from lm_from_scratch.exercises.report import examine, say
from lm_from_scratch.exercises.source import plain_title
from lm_from_scratch.exercises.submission import find_file

Stamp = tuple[int, int, int]
POLL = 0.25  # seconds: editors and network drives do not always report a change


def check_command(options: CheckOptions) -> int:
    """Check a file; the exit code is 0 only if all cases pass."""
    wanted = exercise(options.name)
    file = find_file(wanted.name, options.file)
    job = Job(file, wanted.name, options.seed, options.case)
    result = warned(verdict(job, options.seconds), job.file)
    show(result, options)
    return 0 if result.passed else 1


def show(result: Verdict, options: WatchOptions) -> bool:
    """Print a report and keep its result; whether it is kept."""
    if isinstance(options, CheckOptions) and options.json:
        print(json.dumps(asdict(result), indent=1), flush=True)
        return False
    say(result.text)
    if options.case is not None:
        return False
    trouble = progress.keep(result.exercise, result.points, result.passed, options.seed)
    if trouble:
        print(f"This is not kept: {trouble}.", flush=True)
    return not trouble


def watch_command(options: WatchOptions) -> int:
    """Check again after every save, until Ctrl-C."""
    wanted = exercise(options.name)
    file = find_file(wanted.name, options.file)
    warm(wanted)
    print(f"Watching {file}. Enter checks again, Ctrl-C ends.", flush=True)
    try:
        while True:
            now = stamp(file)
            if now is not None:
                report(wanted, file, options, now)
            while stamp(file) in (now, None) and not entered():
                pass
    except KeyboardInterrupt:
        print()
    return 0


def report(wanted: Exercise, file: Path, options: WatchOptions, now: Stamp) -> None:
    """One check in a child, so that no loop or crash ends the watch. A save ends it: what it would
    say is about another text."""
    child = Child(Job(file, wanted.name, options.seed, options.case), options.seconds)
    try:
        while not child.is_done():
            if stamp(file) not in (now, None):
                return
            child.pipe.poll(POLL)
        result = child.result()
    finally:
        child.end()
    print(f"\n{time.strftime('%H:%M:%S')}")
    if show(result, options) and result.passed and (card := following()):
        print(f"Next: {card.name} ({plain_title(card.name)})", flush=True)


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
