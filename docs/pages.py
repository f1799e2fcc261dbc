"""Pages written from the tree: one API page per module, and the learning path of the landing page.

Nothing is imported: module names and public objects are read from the source files, so a new file
in the package has a page with the next build.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import gallery

PACKAGE = "lm_from_scratch"
ALL_CHAPTERS = "auto_tutorials/index"  # the page of all chapters, which the gallery writes
#: Wrong and right answers of every exercise: nothing is secret, but no page shows them.
CATALOGUE = f"{PACKAGE}.exercises.catalogue"
#: Modules without a page: commands are explained by their help.
NOT_SHOWN = (CATALOGUE, f"{PACKAGE}.commands")

#: The index of the API: what one looks for, and the modules and packages where it is.
GROUPS = {
    "Layers": ["layers", "norm", "activation", "heads", "lora"],
    "Models": ["models", "gradient_checkpointing"],
    "Attention": ["visibility", "attention", "gqa", "online_softmax", "varlen", "flex"]
    + ["conformance", "record"],
    "Key-value cache": ["cache", "interop"],
    "Generation": ["generate", "sampling", "logit_processors", "beam_search", "speculative"]
    + ["engine"],
    "Text and tokens": ["tokenizer", "text"],
    "Training": ["train", "training", "loss", "runs"],
    "Optimizers": ["optim"],
    "Quantised and swapped weights": ["weights", "swap", "references", "onednn"],
    "Files": ["checkpoint", "interop", "pretrained"],
    "Kernels for a GPU": ["kernels", "roofline"],
    "Figures": ["plot"],
    "Checks of the exercises": ["exercises"],
}
#: Names that an index leaves out: what others call, and the inside of a kernel.
INSIDE = re.compile(r"^(check|keep|backward)(_|$)|_(kernel|forward|backward)$")
#: What makes of a function an object that autodoc passes over.
WRAPPED = r"triton\.jit|torch\.library\.custom_op"


def modules() -> dict[str, Path]:
    """Public modules and packages by dotted name; names with an underscore are private."""
    found = {}
    for path in sorted((gallery.ROOT / PACKAGE).rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(gallery.ROOT / PACKAGE).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        module = ".".join(parts)
        if any(part.startswith("_") for part in parts) or module.startswith(NOT_SHOWN):
            continue
        found[module] = path
    return found


@cache
def parse(text: str) -> ast.Module:
    """Each file is asked for its names some eighty times."""
    return ast.parse(text)


def tree(path: Path) -> ast.Module:
    return parse(path.read_text(encoding="utf-8"))


def summary(path: Path) -> str:
    """First line of a module's docstring."""
    docstring = ast.get_docstring(tree(path)) or ""
    return docstring.strip().partition("\n")[0].strip()


def public_names(path: Path) -> list[str]:
    """Functions and classes that a file defines, in its order."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = [node.name for node in tree(path).body if isinstance(node, definitions)]
    return [name for name in names if not name.startswith("_")]


def documented(path: Path) -> list[str]:
    """The public names that have a place on an API page, to which a link can lead."""
    wrapped = {
        node.name
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef)
        and any(re.match(WRAPPED, ast.unparse(decorator)) for decorator in node.decorator_list)
    }
    return [name for name in public_names(path) if name not in wrapped]


def has_objects(path: Path) -> bool:
    """Whether a file says anything: an empty package file gets no page."""
    return bool(summary(path) or public_names(path))


def api_page(module: str, path: Path) -> str:
    title = module.removeprefix(PACKAGE + ".")
    title = f"``{title}``"
    lines = [title, "=" * len(title), "", *used_on(module, path), f".. automodule:: {module}"]
    # What a package file only re-exports is documented where it is defined.
    if path.name != "__init__.py" or public_names(path):
        # What is not documented is `forward`, or an override: its class or its base says it.
        lines += ["   :members:", "   :show-inheritance:"]
    if path.name != "__init__.py":
        source = Path("../..") / path.relative_to(gallery.ROOT)
        lines += ["", "The whole file", "--------------", ""]
        lines += [f".. literalinclude:: {source.as_posix()}", "   :language: python"]
    return "\n".join(lines) + "\n"


def table(rows: list[list[str]], *options: str) -> list[str]:
    """The lines of a table: rows of cells, the first of them the header."""
    lines = [".. list-table::", "   :header-rows: 1", *(f"   {option}" for option in options), ""]
    for row in rows:
        lines += [f"   {'* ' if i == 0 else '  '}- {cell}".rstrip() for i, cell in enumerate(row)]
    return [*lines, ""]


def used_on(module: str, path: Path) -> list[str]:
    """Links to the pages that use a module, and to the exercises; many of them folded."""
    links = [
        f":doc:`/auto_tutorials/{script.parent.name}/{script.stem}`"
        for script in gallery.scripts()
        if uses(script, module, path)
    ]
    links += [f":doc:`/gpu/{s.stem}`" for s in gallery.gpu_scripts() if uses(s, module, path)]
    catalogue = gallery.ROOT / CATALOGUE.replace(".", "/")
    links += [
        f":doc:`/exercises/{file.parent.name}`"
        for file in sorted(catalogue.glob("*/checks.py"))
        if uses(file, module, path)
    ]
    if not links:
        return []
    if len(links) <= 4:
        return [".. rst-class:: used-on", "", "Used on: " + ", ".join(links) + ".", ""]
    rows = [f"   * {link}" for link in links]
    return [f".. dropdown:: {len(links)} pages use it", "", *rows, ""]


def uses(script: Path, module: str, path: Path) -> bool:
    """Whether a script imports a module, or something that it defines from the package above."""
    found, (parent, _, name) = imported(script), module.rpartition(".")
    above = {f"{parent}.{public}" for public in [name, *public_names(path)]}
    return module in {source for source, _ in found} or not above.isdisjoint(
        f"{source}.{name}" for source, name in found
    )


@cache
def imported(script: Path) -> set[tuple[str, str]]:
    """Module and name of all that a script imports; a module as a whole has an empty name."""
    found = set()
    for node in ast.walk(tree(script)):
        if isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
    return found


def grouped(listed: dict[str, Path]) -> dict[str, list[str]]:
    """The modules of each group; a package brings its own. One that no group names is last."""
    left = list(listed)
    groups = {}
    for title, names in GROUPS.items():
        roots = [f"{PACKAGE}.{name}" for name in names]
        own = [m for root in roots for m in left if m == root or m.startswith(f"{root}.")]
        groups[title] = own
        left = [module for module in left if module not in own]
    return groups | ({"Others": left} if left else {})


def api_index(listed: dict[str, Path]) -> str:
    """The modules by what one looks for, each with its line and the names that it defines."""
    title = "API"
    lines = [title, "=" * len(title), ""]
    lines += [
        "One page per file of the package, by what you look for. Each file holds one concept, and "
        "its page begins with the tutorials and exercises that use it.",
        "",
        "What depends on what, and why: :doc:`/architecture`.",
        "",
    ]
    groups = grouped(listed)
    for title, modules_ in groups.items():
        lines += [title, "-" * len(title), ""]
        for module in modules_:
            path = listed[module]
            lines += [f"* :doc:`{module.removeprefix(PACKAGE + '.')} <{module}>`: {summary(path)}"]
            names = [name for name in documented(path) if not INSIDE.search(name)]
            if names and not module.startswith(f"{PACKAGE}.exercises."):
                links = ", ".join(f":py:obj:`~{module}.{name}`" for name in names)
                lines += ["", f"  {links}", ""]
        lines.append("")
    lines += [".. toctree::", "   :hidden:", "", "   /architecture"]
    lines += [f"   {module}" for own in groups.values() for module in own]
    return "\n".join(lines) + "\n"


def learning_path() -> str:
    """A card with its pages for each chapter."""
    import course  # both import this module
    import exercise_pages

    lines = [".. grid:: 1", "   :gutter: 3", "   :class-container: learning-path", ""]
    for chapter in gallery.chapters():
        title, intro = gallery.header_text(chapter)
        lines += [
            f"   .. grid-item-card:: {title}",
            "",
            f"      {intro}",
            "",
        ]
        for page_number, script in enumerate(gallery.pages(chapter), start=1):
            page = f"/auto_tutorials/{chapter.name}/{script.stem}"
            lines.append(f"      {page_number}. :doc:`{page}`")
        lines += ["", f"      {course.time_to_read(chapter)}.", ""]
    if gallery.gpu_scripts():
        title, intro = gallery.header_text(gallery.GPU)
        lines += [f"   .. grid-item-card:: {title}", "", f"      {intro}", ""]
        for number, script in enumerate(gallery.gpu_scripts(), start=1):
            lines.append(f"      {number}. :doc:`/gpu/{script.stem}`")
        lines += ["", f"      {course.time_to_read(gallery.GPU)}.", ""]
    lines += [f"   .. grid-item-card:: {exercise_pages.TITLE}", "", f"      {exercise_pages.INTRO}"]
    lines += ["", *(f"      {line}" for line in exercise_pages.path_card()), ""]
    return "\n".join(lines) + "\n"


def with_chapter(page: str, title: str, intro: str, links: list[str], index: str) -> str:
    """The page of all chapters with one more behind the last: a section, and its place in the
    table of contents."""
    section = "\n".join([title, "-" * len(title), "", intro, "", *links, "", ""])
    head, toctree, tail = page.rpartition(".. toctree::")
    entries = re.compile(r"((?:^   /.*\n)+)", re.M)
    return head + section + toctree + entries.sub(rf"\1   {index}\n", tail, count=1)


def write(app) -> None:
    listed = {module: path for module, path in modules().items() if has_objects(path)}
    listed.pop(PACKAGE, None)
    api = Path(app.srcdir) / "api"
    texts = {api / f"{module}.rst": api_page(module, path) for module, path in listed.items()}
    texts[api / "index.rst"] = api_index(listed)
    texts[Path(app.srcdir) / "generated" / "learning_path.rst"] = learning_path()
    for old in api.glob("*.rst"):
        if old not in texts:
            old.unlink()
    # The page of a script that was renamed or removed goes with it.
    current = {f"{script.parent.name}/{script.stem}" for script in gallery.scripts()}
    for old in (Path(app.srcdir) / "auto_tutorials").glob("[0-9]*/[0-9]*.rst"):
        if f"{old.parent.name}/{old.stem}" not in current:
            old.unlink()
    write_texts(texts)


def write_texts(texts: dict[Path, str]) -> None:
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        # An unchanged file keeps its time, so the next build does not read it again.
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
