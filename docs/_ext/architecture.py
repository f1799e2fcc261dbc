"""The rooms of the package as a table: what each is for, its files, and what it imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import api
import gallery
import modules
import rst
from modules import PACKAGE


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """The files of the package that a file imports, inside functions too."""
    found = set()
    for source, name in modules.imported(path):
        found.add(next((m for m in (f"{source}.{name}", source) if m in known), PACKAGE))
    return found - {PACKAGE}


def graph(root: Path = gallery.ROOT) -> dict[str, set[str]]:
    """What each file of the package imports from it."""
    known = modules.modules(root)
    return {name: imports(path, known) - {name} for name, path in known.items()}


def between_rooms() -> dict[str, set[str]]:
    """What each room imports from others; a file in no room counts as none."""
    found: dict[str, set[str]] = {}
    for module, imported in graph().items():
        here = found.setdefault(modules.room(module), set())
        here |= {modules.room(other) for other in imported} - {modules.room(module), ""}
    return found


def rooms() -> str:
    """The highest first, so that a room imports from those below it."""
    known, below = modules.modules(), between_rooms()
    rows = [["room", "what it is for", "files", "imports from"]]
    for name, members in reversed(api.by_room().items()):
        purpose = ""
        if name:
            purpose = modules.summary(known[f"{PACKAGE}.{name}"])
            name, link = f"``{name}``", f"{PACKAGE}.{name}"
            name = f":doc:`{name.strip('`')} </api/{link}>`" if link in members else name
        files = [m for m in members if modules.room(m) != m.rpartition(".")[2]]
        links = ", ".join(f":doc:`{m.rpartition('.')[2]} </api/{m}>`" for m in files)
        imported = below.get(modules.room(members[0]), set())
        lower = [f"``{other}``" for other in reversed(modules.rooms()) if other in imported]
        rows.append([name or "beside the rooms", purpose, links, ", ".join(lower)])
    return "\n".join(rst.table(rows, ":widths: 14 30 34 22"))


def chapters() -> str:
    lines = [
        f"* ``{folder.name}/``: {gallery.header_text(folder)[0]}"
        for folder in [*gallery.chapters(), gallery.GPU]
    ]
    return "\n".join(lines) + "\n"


def write(app: Any) -> None:
    folder = Path(app.srcdir) / "generated"
    rst.write({folder / "rooms.rst": rooms(), folder / "chapters.rst": chapters()})


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
