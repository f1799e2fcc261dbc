"""Editions of the site in other languages: the switch between them, and what a translator meets."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from typing import Any

from babel.messages.pofile import read_po
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace
from sphinx.util.nodes import is_translatable
from sphinx.versioning import add_uids

#: Code of a language, and its name as its readers write it. The first edition is built into the
#: site's own folder, every other one into a folder of its code inside it. The switch in the
#: navigation bar appears with the second entry.
EDITIONS = {"en": "English"}

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


def context(language: str, editions: dict[str, str] = EDITIONS) -> dict[str, Any]:
    """What `_templates/language_switch.html` reads."""
    return {"editions": editions, "edition": language}


def extract(doctrees: Path, out: Path) -> None:
    """Write the catalogues of a site that is built, from the pages as Sphinx has kept them.

    `sphinx -b gettext` would read every page again: it takes none that was read for HTML, where
    what can be translated is not marked.
    """
    with open(doctrees / "environment.pickle", "rb") as file:
        env = pickle.load(file)
    names = ["project", "version", "copyright"]
    names += ["gettext_compact", "gettext_location", "gettext_uuid"]
    given = {name: env.config[name] for name in names}
    given["templates_path"] = ["_templates"]  # the theme, which adds its own, is translated already
    here = Path(__file__).resolve().parent
    with docutils_namespace():
        app = Sphinx(
            here, None, out, out / ".doctrees", "gettext", given,
            status=None, exception_on_warning=True,
        )  # fmt: skip
        builder: Any = app.builder
        builder._extract_from_template()
        builder.env.tocs = env.tocs
        for name in sorted(env.found_docs):
            with open(doctrees / f"{name}.doctree", "rb") as file:
                document = pickle.load(file)
            list(add_uids(document, is_translatable))
            builder.write_doc(name, document)
        builder.finish()


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
    if len(sys.argv) != 3:
        sys.exit("usage: python docs/translation.py docs/_build/doctrees build/catalogues")
    extract(Path(sys.argv[1]), Path(sys.argv[2]))
    found = messages(Path(sys.argv[2]))
    print(f"{len(found)} catalogues, {sum(map(len, found.values()))} messages in {sys.argv[2]}")
    if faults := volatile(found):
        sys.exit("\n".join(faults))
