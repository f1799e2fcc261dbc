"""The pages on the package: its files by room, and for each who uses it.

`autosummary` writes a page per file from `_templates/autosummary/module.rst`. What it cannot know,
the order of the rooms and the pages of the site that import a file, is read from the source files:
GPU pages and exercises are in no gallery whose back references could say it.
"""

import re
from functools import cache
from pathlib import Path

import exercises
import gallery
import modules
import rst
from modules import PACKAGE

from lm_from_scratch.exercises.exercise import folder

#: Names that an index leaves out: what others call, and the inside of a kernel.
INSIDE = re.compile(r"^(check|keep|backward)(_|$)|_(kernel|forward|backward)$")
#: The files that a newcomer should read first, in this order.
FIRST = (
    "attention.attention",
    "models.gpt2",
    "generation.generate",
    "cache.growing",
    "training.train",
)
#: The rooms with tools for this project itself, which the index names last.
FOR_AUTHORS = ("instruments", "commands", "exercises", "pretrained")


@cache
def listed() -> dict[str, Path]:
    """The files that have a page. Those of an exercise hold its answers, and a command is explained
    by its help: they have none."""
    return {
        module: path
        for module, path in modules.modules().items()
        if module != PACKAGE
        and not any(part.startswith("_") for part in module.split("."))
        and not module.startswith((f"{PACKAGE}.exercises.catalogue", f"{PACKAGE}.commands."))
    }


def used_on(module: str) -> str:
    """Links to the pages and exercises that use a file; many of them folded."""
    links = [
        f":doc:`{gallery.document(page)}`"
        for page in gallery.in_order()
        if modules.uses(gallery.script(page), module)
    ]
    links += [
        f":doc:`/exercises/{one.name}`"
        for one in exercises.written()
        if modules.uses(folder(one.name) / "checks.py", module)
    ]
    return rst.render("used_on.rst", links=links)


def by_room() -> dict[str, list[str]]:
    """The files with a page by their room, in the order of the rooms; last those in none."""
    names = [*modules.rooms(), ""]
    found = {name: [m for m in listed() if modules.room(m) == name] for name in names}
    return {name: members for name, members in found.items() if members}


def named(module: str) -> list[str]:
    """What an index names of a file; of what checks an exercise, nothing."""
    if modules.room(module) == "exercises":
        return []
    return [n for n in modules.public_names(listed()[module]) if not INSIDE.search(n)]


def index() -> str:
    """First where to begin, then the files by room, each with its line and the names that it
    defines; last the rooms for authors."""
    rooms = by_room()
    parts = [
        {name: rooms[name] for name in rooms if (name in FOR_AUTHORS) == apart}
        for apart in (False, True)
    ]
    return rst.render(
        "api.rst",
        first=[f"{PACKAGE}.{name}" for name in FIRST],
        parts=parts,
        package=PACKAGE,
        about={module: modules.summary(path) for module, path in listed().items()},
        named=named,
    )


def texts() -> dict[str, str]:
    """The index, the list from which `autosummary` writes a page a file, and their first lines."""
    made = {f"generated/used_on/{name}.rst": used_on(name) for name in listed()}
    made["generated/api.rst"] = rst.render("autosummary.rst", modules=listed())
    return made | {"api/index.rst": index()}
