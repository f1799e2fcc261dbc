"""Pages written from the tree: one API page per module, and the learning path of the landing page.

Nothing is imported: module names and public objects are read from the source files, so a new file
in the package has a page with the next build.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import gallery

PACKAGE = "lm_from_scratch"
ALL_CHAPTERS = "auto_tutorials/index"  # the page of all chapters, which the gallery writes
#: Wrong and right answers of every exercise: nothing is secret, but no page shows them.
NOT_SHOWN = f"{PACKAGE}.exercises.catalogue"


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


def summary(path: Path) -> str:
    """First line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.strip().partition("\n")[0].strip()


def public_names(path: Path) -> list[str]:
    """Functions and classes that a file defines, in its order."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, definitions)]
    return [name for name in names if not name.startswith("_")]


def has_objects(path: Path) -> bool:
    """Whether a file says anything: an empty package file gets no page."""
    return bool(summary(path) or public_names(path))


def api_page(module: str, path: Path) -> str:
    title = module.removeprefix(PACKAGE + ".")
    title = f"``{title}``"
    lines = [title, "=" * len(title), "", f".. automodule:: {module}"]
    # What a package file only re-exports is documented where it is defined.
    if path.name != "__init__.py" or public_names(path):
        lines += ["   :members:", "   :undoc-members:", "   :show-inheritance:"]
    names = [f"{module}.{name}" for name in public_names(path)]
    if names:
        lines += ["", ".. minigallery::", "   :add-heading: Tutorials that use it"]
        lines += ["   :heading-level: -", ""]
        lines += [f"   {name}" for name in names]
    users = [script for script in gallery.gpu_scripts() if uses(script, module)]
    if users:
        lines += ["", "GPU pages that use it", "---------------------", ""]
        lines += [f"* :doc:`/gpu/{script.stem}`" for script in users]
    if path.name != "__init__.py":
        source = Path("../..") / path.relative_to(gallery.ROOT)
        lines += ["", "The whole file", "--------------", ""]
        lines += [f".. literalinclude:: {source.as_posix()}", "   :language: python"]
    return "\n".join(lines) + "\n"


def uses(script: Path, module: str) -> bool:
    """Whether a script imports a module, or something from it."""
    parent, _, name = module.rpartition(".")
    text = script.read_text(encoding="utf-8")
    imports = rf"^(from {re.escape(module)} import|import {re.escape(module)}\b)"
    return bool(
        re.search(imports, text, re.M)
        or re.search(rf"^from {re.escape(parent)} import .*\b{name}\b", text, re.M)
    )


def api_index(listed: dict[str, Path]) -> str:
    title = "API"
    lines = [
        title,
        "=" * len(title),
        "",
        "One page per file of the package. Each file holds one concept. A page links to the "
        "tutorials that use its functions.",
        "",
    ]
    for module, path in listed.items():
        name = module.removeprefix(PACKAGE + ".")
        line = f"* :doc:`{name} <{module}>`"
        lines.append(f"{line}: {summary(path)}" if summary(path) else line)
    lines += ["", ".. toctree::", "   :hidden:", ""]
    lines += [f"   {module}" for module in listed]
    return "\n".join(lines) + "\n"


def learning_path() -> str:
    """A card with its pages for each chapter."""
    import exercise_pages  # it imports this module

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
        lines.append("")
    if gallery.gpu_scripts():
        title, intro = gallery.header_text(gallery.GPU)
        lines += [f"   .. grid-item-card:: {title}", "", f"      {intro}", ""]
        for number, script in enumerate(gallery.gpu_scripts(), start=1):
            lines.append(f"      {number}. :doc:`/gpu/{script.stem}`")
        lines.append("")
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
