"""What a translator of the site meets: `python tests/helpers/catalogues.py FOLDER` checks the
catalogues that `sphinx -b gettext` wrote there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from babel.messages.pofile import read_po

#: Catalogues that nobody translates: pages on code, and pages of numbers that a command writes.
STAY_ENGLISH = ("api/", "benchmarks", "exercises/proof")

#: Text that is another one tomorrow, or on another machine. In a catalogue it would make the
#: translation of its paragraph out of date with every build.
VOLATILE = {
    "a date": r"\b20\d\d-\d\d-\d\d\b|\b\d\d? (January|February|March|April|May|June|July|August|"
    r"September|October|November|December) 20\d\d\b",
    "a time of day": r"\b\d\d:\d\d:\d\d\b",
    "a running time": r"\b\d+\.\d+ (s|ms|µs|seconds|minutes)\b",
    "a version": r"\b(torch|PyTorch|Python|[Tt]riton|NumPy|transformers)[ =]+\d+\.\d+\.\d+\b",
    "a path of one machine": r"(?<![\w.~/`-])/(home|root|tmp|work|usr|opt|Users)/|\b[A-Z]:\\",
    "an address in memory": r"\b0x[0-9a-f]{8,}\b",
}


def messages(folder: Path) -> dict[str, list[str]]:
    """The messages of every catalogue below a folder, by its name: "auto_tutorials/index"."""
    found = {}
    for path in sorted(folder.rglob("*.pot")):
        with open(path, "rb") as file:
            listed = [str(message.id) for message in read_po(file) if message.id]
        found[path.relative_to(folder).with_suffix("").as_posix()] = listed
    return found


def volatile(listed: dict[str, list[str]]) -> list[str]:
    """Messages that hold text which does not stay."""
    return [
        f"{name}: {what}: {message[:80]}"
        for name, texts in listed.items()
        if not name.startswith(STAY_ENGLISH)
        for message in texts
        for what, pattern in VOLATILE.items()
        if re.search(pattern, message)
    ]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/helpers/catalogues.py build/catalogues")
    found = messages(Path(sys.argv[1]))
    print(f"{len(found)} catalogues, {sum(map(len, found.values()))} messages in {sys.argv[1]}")
    if faults := volatile(found):
        sys.exit("\n".join(faults))
