"""The pages on the package: its files by room, for each who uses it, tables of the architecture.

`autosummary` writes a page per file from `_templates/autosummary/module.rst`. What it cannot know,
the order of the rooms and the pages of the site that import a file, is read from the source files:
GPU pages and exercises are in no gallery whose back references could say it.
"""

import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from gallery import pages
from sources import modules
from sources.modules import PACKAGE

from lm_from_scratch.exercises.card import folder
from lm_from_scratch.exercises.exercise import exercises

#: Names that an index leaves out: what others call, and the inside of a kernel.
INSIDE = re.compile(r"^(check|keep|backward)(_|$)|_(kernel|forward|backward)$")
#: The files that a newcomer should read first, in this order.
FIRST = (
    "attention.visibility",
    "models.gpt2",
    "generation.generate",
    "cache.growing",
    "training.train",
)
#: The rooms with tools for this project itself, which the index names last.
FOR_AUTHORS = ("drawings", "instruments", "commands", "exercises", "pretrained")


@cache
def listed() -> dict[str, Path]:
    """The files that have a page. Those of an exercise hold its answers, and a command and its
    options are explained by its help: they have none."""
    without = (f"{PACKAGE}.exercises.catalogue", f"{PACKAGE}.exercises.options")
    return {
        module: path
        for module, path in modules.modules().items()
        if module != PACKAGE
        and not any(part.startswith("_") for part in module.split("."))
        and not module.startswith((*without, f"{PACKAGE}.commands."))
    }


def used_on(module: str) -> list[str]:
    """Links to the pages and exercises that use a file."""
    return [
        f":doc:`{pages.document(page)}`"
        for page in pages.in_order()
        if module in modules.sources(pages.source(page))
    ] + [
        f":doc:`/exercises/{one.name}`"
        for one in exercises()
        if module in modules.sources(folder(one.name) / "checks.py")
    ]


def by_room() -> dict[str, list[str]]:
    """The files with a page by their room, in the order of the rooms; last those in none."""
    rooms: dict[str, list[str]] = {name: [] for name in [*modules.rooms(), ""]}
    for module in listed():
        rooms[modules.room(module)].append(module)
    return {name: members for name, members in rooms.items() if members}


def members_of_rooms() -> dict[str, list[str]]:
    """For the page of each room, the pages of its files, which hang below it in the menu."""
    return {room: rest for room, *rest in (m for name, m in by_room().items() if name)}


def named(module: str) -> list[str]:
    """What an index names of a file; of what checks an exercise, nothing."""
    if modules.room(module) == "exercises":
        return []
    return [n for n in modules.public_names(listed()[module]) if not INSIDE.search(n)]


def index() -> dict[str, Any]:
    """First where to begin, then the files by room, each with its line and the names that it
    defines; last the rooms for authors."""
    rooms = by_room()
    return {
        "first": [f"{PACKAGE}.{name}" for name in FIRST],
        "parts": [
            {name: rooms[name] for name in rooms if (name in FOR_AUTHORS) == apart}
            for apart in (False, True)
        ],
        "package": PACKAGE,
        "inside": [module for members in members_of_rooms().values() for module in members],
        "about": {module: modules.summary(path) for module, path in listed().items()},
        "named": named,
    }


def kernels() -> list[tuple[str, str, str]]:
    """The files that hold kernels: their dotted name, a short one, their line."""
    prefix = f"{PACKAGE}.kernels."
    return [
        (module, module.removeprefix(prefix), modules.summary(path))
        for module, path in listed().items()
        if module.startswith(prefix) and "_kernel(" in path.read_text(encoding="utf-8")
    ]


# -- tables of the architecture --------------------------------------------------------------------


@cache
def graph(root: Path = pages.ROOT) -> dict[str, set[str]]:
    """What each file of the package imports from it, inside functions too."""
    known = modules.modules(root)
    return {
        module: {
            next((m for m in (f"{source}.{name}", source) if m in known), PACKAGE)
            for source, name in modules.imported(path)
        }
        - {module, PACKAGE}
        for module, path in known.items()
    }


def below(room: str) -> list[str]:
    """The rooms that a room imports from, the highest first; a file in no room counts as none."""
    lower = {
        modules.room(other)
        for module, imported in graph().items()
        if modules.room(module) == room
        for other in imported
    }
    return [name for name in reversed(modules.rooms()) if name in lower - {room}]


def rooms() -> list[list[str]]:
    """The highest first, so that a room imports from those below it."""
    rows = [["room", "what it is for", "files", "imports from"]]
    for room, members in reversed(by_room().items()):
        own = f"{PACKAGE}.{room}"
        name = f":doc:`{room} </api/{own}>`" if own in members else f"``{room}``"
        purpose = modules.summary(modules.modules()[own]) if room else ""
        files = [m.rpartition(".")[::2] for m in members if m != own]
        links = ", ".join(f":doc:`{file} </api/{folder}.{file}>`" for folder, file in files)
        lower = ", ".join(f"``{other}``" for other in below(room))
        rows.append([name if room else "beside the rooms", purpose, links, lower])
    return rows


def config_names() -> list[list[str]]:
    """The fields of both configs that `transformers` calls something else."""
    from lm_from_scratch.checkpoint.configs import GPT2_NAMES
    from lm_from_scratch.checkpoint.dialects import DECODER_NAMES
    from lm_from_scratch.models.gpt2 import GPT2Config
    from lm_from_scratch.models.qwen2 import Qwen2Config

    rows = [["here", "GPT-2 in ``transformers``", "Qwen2 in ``transformers``"]]
    for name in dict.fromkeys([*GPT2_NAMES, *DECODER_NAMES, "n_layer", "n_head", "n_embd"]):
        theirs = [
            f"``{names.get(name, name)}``" if name in {f.name for f in fields(config)} else "–"
            for config, names in ((GPT2Config, GPT2_NAMES), (Qwen2Config, DECODER_NAMES))
        ]
        rows.append([f"``{name}``", *theirs])
    return rows
