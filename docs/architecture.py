"""The layers of the package, the picture of what imports what, and the tree of the repository.

Nothing is imported: imports and first lines of docstrings are read from the source files.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import course
import gallery
import pages

PACKAGE = pages.PACKAGE
#: The layers, lowest first. A file imports from its own layer and from those before it; a test
#: fails where it does not. A folder takes all of its files along.
LAYERS = {
    "layers": "layers visibility norm activation gqa online_softmax varlen flex attention "
    "conformance",
    "caches": "cache interop",
    "optimizers": "optim",
    "weights": "swap references weights onednn",
    "data and loss": "tokenizer text loss training.processes",
    "models": "models",
    "checkpoints": "heads checkpoint lora interop",
    "generation": "sampling logit_processors generate beam_search speculative engine",
    "training": "record gradient_checkpointing train training runs",
    "figures": "plot roofline",
    "kernels": "kernels",
    "exercises": "exercises",
    "commands": "pretrained commands __main__",
}


def modules(root: Path = gallery.ROOT) -> dict[str, Path]:
    """Every file of the package by its name in it: "cache.paged"; "" is the package itself."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if path.match("catalogue/*/text.py"):
            continue  # read as text, never imported
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: Iterable[str]) -> set[str]:
    """The files of the package that a file imports, inside functions too."""
    found = set()
    for source, name in pages.imported(path):
        if f"{source}.".startswith(f"{PACKAGE}."):
            module = source.partition(".")[2]
            file = f"{module}.{name}" if module else name
            found.add(file if name and file in known else module)
    return found


def graph(root: Path = gallery.ROOT) -> dict[str, set[str]]:
    """What each file of the package imports from it."""
    known = modules(root)
    return {name: imports(path, known) - {name} for name, path in known.items()}


def layer(module: str) -> str | None:
    """The layer of a file, or None where nobody has said it."""
    for title, members in LAYERS.items():
        if any(f"{module}.".startswith(f"{member}.") for member in members.split()):
            return title
    return None


def problems(edges: dict[str, set[str]]) -> list[str]:
    """Files without a layer, imports that point up, and circles of imports."""
    order = list(LAYERS)
    found = []
    for module, imported in edges.items():
        if module and layer(module) is None:
            found.append(f"{module} is in no layer: add it to LAYERS of docs/architecture.py")
        for other in sorted(imported - {""}):
            here, there = layer(module), layer(other)
            # The package itself stands above nothing: it may import no file.
            if here is None or (there in order and order.index(there) > order.index(here)):
                found.append(f"{module or PACKAGE} ({here}) imports {other} ({there})")
    return found + [" imports ".join(circle) for circle in circles(edges)]


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Files that import each other, as the ways round."""
    found, done = [], set()

    def visit(module: str, way: list[str]) -> None:
        if module in way:
            found.append([*way[way.index(module) :], module])
        elif module not in done:
            for other in sorted(edges.get(module, ())):
                visit(other, [*way, module])
            done.add(module)

    for module in edges:
        visit(module, [])
    return found


# -- the picture -----------------------------------------------------------------------------

WIDTH, LEFT, LINE = 360, 74, 17


def between_layers(edges: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Which layer imports which, without those that follow from others."""
    direct = {
        (here, there)
        for module, imported in edges.items()
        for other in imported
        if (here := layer(module)) and (there := layer(other)) and here != there
    }
    reached = set(direct)
    for middle in LAYERS:
        into = [a for a, b in reached if b == middle]
        reached |= {(a, c) for a in into for b, c in list(reached) if b == middle}
    return {
        (a, c)
        for a, c in direct
        if not any((a, b) in reached and (b, c) in reached for b in LAYERS)
    }


def lines_of_links(title: str) -> list[list[tuple[str, str]]]:
    """The files of a layer in lines that fit into its box, each with the address of its page."""
    rows: list[list[tuple[str, str]]] = [[]]
    with_page = pages.modules()
    for name, path in modules().items():
        module = f"{PACKAGE}.{name}"
        if not name or layer(name) != title or module.startswith(pages.NOT_SHOWN):
            continue
        folder, _, file = name.rpartition(".")
        shown = file if folder else name
        if path.name == "__init__.py":
            shown = f"{name}/"
        page = f"api/{module}.html" if module in with_page else ""
        if sum(len(text) + 2 for text, _ in rows[-1]) + len(shown) > 40:
            rows.append([])
        rows[-1].append((shown, page))
    return rows


def picture() -> str:
    """The layers from the commands down to the layers of a model: every arrow points down."""
    boxes, at, y = [], {}, 4
    for title in reversed(LAYERS):
        rows = lines_of_links(title)
        height = 24 + LINE * len(rows)
        boxes.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 4}" height="{height}" rx="4"/>'
        )
        boxes.append(f'<text x="{LEFT + 8}" y="{y + 16}" class="layer">{escape(title)}</text>')
        for number, row in enumerate(rows):
            x = LEFT + 8.0
            for text, page in row:
                label = f'<text x="{x:.1f}" y="{y + 33 + LINE * number}">{escape(text)}</text>'
                boxes.append(f'<a href="{page}">{label}</a>' if page else label)
                x += 6.65 * (len(text) + 2)
        at[title] = (y, y + height)
        y += height + 8
    arcs, edges = [], between_layers(graph())
    for above, below in sorted(edges):
        # Leave in the lower half of a box, arrive in the upper half: ends do not touch.
        start, end = at[above][1] - 9, at[below][0] + 9
        reach = min(LEFT - 6, 12 + (end - start) ** 0.5 * 2.5)
        arcs.append(course.arc(LEFT - 1, start, end, reach))
    return "\n".join([
        ".. raw:: html",
        "",
        f'   <svg class="architecture" viewBox="0 0 {WIDTH} {y}" role="group" '
        'aria-labelledby="layers-of-the-package">',
        f"   {course.ARROW}",
        *(f"   {line}" for line in arcs + boxes),
        "   </svg>",
        "",
        "The arrows as a list:",
        "",
        *(
            f"* **{above}** imports from **{'**, **'.join(sorted(below, key=list(LAYERS).index))}**"
            for above in reversed(LAYERS)
            if (below := [b for a, b in edges if a == above])
        ),
        "",
    ])  # fmt: skip


# -- the tree --------------------------------------------------------------------------------


def first_line(path: Path) -> str:
    """The first line of a module's docstring, its single backticks made reStructuredText."""
    line = pages.summary(path)
    return line if "``" in line else line.replace("`", "``")


def tree() -> str:
    """Folders and files with a line on each."""
    lines = [f"``{PACKAGE}/``", "~" * (len(PACKAGE) + 5), ""]
    with_page = pages.modules()
    for title in LAYERS:
        lines += [f"**{title}**", ""]
        for name, path in modules().items():
            module = f"{PACKAGE}.{name}"
            if not name or layer(name) != title or module.startswith(pages.NOT_SHOWN):
                continue
            shown = path.relative_to(gallery.ROOT / PACKAGE).as_posix()
            link = f":doc:`{shown} </api/{module}>`" if module in with_page else f"``{shown}``"
            lines.append(f"* {link}: {first_line(path)}")
        lines.append("")
    lines += ["``tutorials/``", "~" * 14, ""]
    for folder in [*gallery.chapters(), gallery.GPU]:
        lines.append(f"* ``{folder.name}/``: {gallery.header_text(folder)[0]}")
    lines.append("")
    for folder, rest in {
        "docs": "The site. Pages that no program writes, like this one, lie beside its programs.",
        "tests": "One ``test_FILE.py`` for each file of the package, and for pages, exercises and "
        "requirements. ``tests/site/`` checks the built site.",
    }.items():
        lines += [f"``{folder}/``", "~" * (len(folder) + 5), "", rest, ""]
        for path in sorted((gallery.ROOT / folder).glob("*.py")):
            if not path.name.startswith("test_"):
                lines.append(f"* ``{path.name}``: {first_line(path)}")
        lines.append("")
    return "\n".join(lines)


def write(app: Any) -> None:
    folder = Path(app.srcdir) / "generated"
    pages.write_texts({
        folder / "architecture_picture.rst": picture(),
        folder / "architecture_tree.rst": tree(),
    })  # fmt: skip
