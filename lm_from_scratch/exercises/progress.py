"""What a student has done: one small file, no account, no network.

The file is ``~/.lm_from_scratch/progress.json``, or where ``LM_FROM_SCRATCH_PROGRESS`` says. It can
be copied to another machine. A file that cannot be written or read never stops a check; one that
makes no sense is set aside, not overwritten. Several programs may write at the same time.
"""

import errno
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

VARIABLE = "LM_FROM_SCRATCH_PROGRESS"
PATIENCE = 10.0  # seconds for another program to write the file

Entry = dict[str, Any]


def path() -> Path:
    """Where the progress is kept. Raises ``ValueError`` where no home folder is known."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    try:
        return Path.home() / ".lm_from_scratch" / "progress.json"
    except RuntimeError as error:
        raise ValueError(
            f"there is no home folder to keep what is done in: set {VARIABLE} to a file"
        ) from error


def load() -> dict[str, Entry]:
    """For each exercise: best `points`, `passed`, `seed` of that check, `hints` and `asked` times
    for the solution. Empty if there is no file, or none that makes sense, which is set aside.

    Raises ``ValueError`` where something else than a file is in its place, ``OSError`` where it
    cannot be read.
    """
    file = path()
    contents = contents_of(file)
    if contents is None:  # unless somebody repairs it now
        with locked(file):
            contents = record(file)
    return {name: entry for name, entry in contents.items() if isinstance(entry, dict)}


def real(file: Path) -> Path:
    """The file itself, where it is behind a link, which stays one."""
    return Path(os.path.realpath(file))


def contents_of(file: Path) -> dict[str, Any] | None:
    """All that is in the file; None for what makes no sense. Raises ``ValueError`` and ``OSError``
    as :func:`load`."""
    if not file.is_file() and file.exists():  # a pipe would be waited for
        raise ValueError(f"{file} is no file: set {VARIABLE} to one, or to a new name")
    try:
        contents = json.loads(file.read_text(encoding="utf-8-sig") or "{}")
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        return None
    return contents if isinstance(contents, dict) else None


def locked(file: Path) -> AbstractContextManager[Any]:
    """In the block, no other program writes or sets aside the file. Raises ``OSError`` if one does
    so for long, and where files cannot be locked."""
    from filelock import FileLock

    place = real(file)
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(place.with_name(f".{place.name}.lock")).acquire(timeout=PATIENCE)
    except NotImplementedError as error:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(file)) from error


def record(file: Path) -> dict[str, Any]:
    """All that is in a file that is locked. What makes no sense gets a name under which nothing
    overwrites it, that is said, and nothing is known."""
    contents = contents_of(file)
    if contents is not None:
        return contents
    number, damaged = 1, real(file)
    while (place := damaged.with_name(f"{damaged.stem}-damaged-{number}{damaged.suffix}")).exists():
        number += 1
    damaged.replace(place)
    print(f"{file} is damaged. It is now {place}, and a new one begins.", file=sys.stderr)
    return {}


def change(name: str, new: Callable[[Entry], Entry]) -> str:
    """Change what is known about one exercise to what ``new`` makes of it; the file is replaced as
    a whole, by one program at a time. Why it could not be, or an empty string."""
    try:
        file = path()
        with locked(file):
            known = record(file)
            entry = known.get(name)
            entry = entry if isinstance(entry, dict) else {}
            if (changed := new(entry)) != entry:
                known[name] = changed
                write_text(real(file), json.dumps(known, indent=1, sort_keys=True) + "\n")
    except ValueError as error:
        return str(error)
    except (OSError, RecursionError):
        return f"{path()} cannot be read or written"
    return ""


def update(name: str, **changes: Any) -> str:
    """Set some of what is known about one exercise. Why it could not be, or an empty string."""
    return change(name, lambda entry: {**entry, **changes})


def keep(name: str, points: float, passed: bool, seed: int) -> str:
    """Keep a result if it is better than what is known of its exercise. Why it could not be, or an
    empty string."""

    def better(entry: Entry) -> Entry:
        more = points > number(entry.get("points")) or (passed and not entry.get("passed"))
        return {**entry, "points": points, "passed": passed, "seed": seed} if more else entry

    return change(name, better)


def write_text(path: Path, text: str) -> None:
    """Write a file: all of it, or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # A name of a file or a message may hold what is no character.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def number(value: object) -> float:
    """A number of the file, which a reader may have edited."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e6:
        return value
    return 0
