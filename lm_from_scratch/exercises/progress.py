"""What a student has done: one small file, no account, no network.

The file is ``~/.lm_from_scratch/progress.json``, or where ``LM_FROM_SCRATCH_PROGRESS`` says. It can
be copied to another machine. A file that cannot be written or read never stops a check; one that
makes no sense is set aside, not overwritten. Several programs may write at the same time.
"""

import json
import os
import sys
from collections.abc import Callable
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
    return {name: entry for name, entry in record().items() if isinstance(entry, dict)}


def record() -> dict[str, Any]:
    """All that is in the file. Raises ``ValueError`` and ``OSError`` as :func:`load`."""
    file = path()
    try:
        if not file.is_file() and file.exists():  # a pipe would be waited for
            raise ValueError(f"{file} is no file: set {VARIABLE} to one, or to a new name")
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError:
        return set_aside(file)
    try:
        contents = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return set_aside(file)
    return contents if isinstance(contents, dict) else set_aside(file)


def set_aside(file: Path) -> dict[str, Any]:
    """Give a damaged file a name under which nothing overwrites it, and say so; then nothing is
    known."""
    number = 1
    while (place := file.with_name(f"{file.stem}-damaged-{number}{file.suffix}")).exists():
        number += 1
    try:
        file.replace(place)
    except FileNotFoundError:  # another program was faster
        return {}
    print(f"{file} is damaged. It is now {place}, and a new one begins.", file=sys.stderr)
    return {}


def change(name: str, new: Callable[[Entry], Entry]) -> str:
    """Change what is known about one exercise to what ``new`` makes of it; the file is replaced as
    a whole, by one program at a time. Why it could not be, or an empty string."""
    from filelock import FileLock

    try:
        file = Path(os.path.realpath(path()))  # a link stays one
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_name(f".{file.name}.lock"), timeout=PATIENCE):
            known = record()
            entry = known.get(name)
            entry = entry if isinstance(entry, dict) else {}
            if (changed := new(entry)) != entry:
                known[name] = changed
                write_text(file, json.dumps(known, indent=1, sort_keys=True) + "\n")
    except ValueError as error:
        return str(error)
    except (OSError, RecursionError, NotImplementedError):  # the last: no locks here
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
