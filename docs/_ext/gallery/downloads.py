"""What readers download of a page: its script, its notebook, an archive of both.

They have no widgets. What the site folds is in cells of its own in a notebook, whose code
JupyterLab and VS Code hide until a reader opens it: a check below a question tells its answer.

    python docs/_ext gallery.downloads FOLDER

writes every tutorial and exercise as the notebook that the site offers. One that its reader has
changed is kept.
"""

import ast
import io
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx_gallery import gen_gallery, notebook

from gallery import folding, pages

#: The directive of a widget in a script or a text: its line, its options, one empty line.
WIDGET = re.compile(r"^((?:# ?)?)\.\. live::.*\n(?:\1 +:.*\n)*(?:#?\n)?", re.M)
HIDDEN = {"jupyter": {"source_hidden": True}}


def without_widgets(text: str) -> str:
    return WIDGET.sub("", text)


def for_readers(written: dict[str, Any]) -> dict[str, Any]:
    """A notebook as the gallery writes it, for readers."""
    texts = ["".join(cell["source"]) for cell in written["cells"]]
    is_code = [cell["cell_type"] == "code" for cell in written["cells"]]
    parts = iter(folding.parts(tuple(t for t, code in zip(texts, is_code, strict=True) if code)))
    cells = []
    for cell, text, code in zip(written["cells"], texts, is_code, strict=True):
        if code:
            *above, last = next(parts)
            for part in (*above, last):
                metadata = {**cell["metadata"], **(HIDDEN if part.kinds else {})}
                source = part.text if part is last else silent(part.text)
                cells.append({**cell, "metadata": metadata, "source": [source]})
        else:
            cells.append({**cell, "source": [without_widgets(text)]})
    return {**written, "cells": cells}


def silent(code: str) -> str:
    """Code at whose end IPython shows no value, since in its block it is not the end."""
    last = ast.parse(code).body[-1]
    shows = isinstance(last, ast.Expr) and not folding.is_call_of(last, "print")
    return f"{code};" if shows else code


def file(name: str, content: bytes) -> bytes:
    """A file of the gallery, by its name, as readers download it."""
    if name.endswith(".py"):
        return without_widgets(content.decode()).encode()
    if name.endswith(".ipynb"):
        return json.dumps(for_readers(json.loads(content)), indent=1).encode()
    if name.endswith(".zip"):
        packed = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(packed, "w") as new:
            for entry in old.infolist():
                new.writestr(entry, file(entry.filename, old.read(entry)))
        return packed.getvalue()
    return content


def finish(app: Any, error: Exception | None) -> None:
    if error or app.builder.format != "html":
        return
    for source, (_, target) in app.env.dlfiles.items():
        path = Path(app.srcdir, source)
        if path.is_relative_to(pages.DOCS / "auto_tutorials"):
            content = file(path.name, path.read_bytes())
            Path(app.outdir, "_downloads", target).write_bytes(content)


def last_section(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """The gallery looks for the box with the links in all of a page, where each word of code is a
    node. It stands in the last section."""
    while tree and (sections := [node for node in tree if isinstance(node, nodes.section)]):
        tree = sections[-1]
    gen_gallery.setup_template_link_getters(app, page, template, context, tree)


def setup(app: Any) -> dict[str, bool]:
    app.connect("html-page-context", last_section, priority=600)  # the gallery comes at 500
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


# -- notebooks without a build ---------------------------------------------------------------------

CONF = {
    **gen_gallery.DEFAULT_GALLERY_CONF, "notebook_images": True, "src_dir": str(pages.DOCS),
}  # fmt: skip


def convert(script: Path) -> dict[str, Any]:
    """The notebook of a script: by the gallery's own converter, a cell for each block."""
    target = pages.DOCS / "auto_tutorials" / script.parent.name
    return for_readers(notebook.jupyter_notebook(pages.blocks(script), CONF, target))


def to_run(stored: Path) -> dict[str, Any]:
    """A stored notebook without its outputs, and without what hides and describes them."""
    cells = pages.cells(stored)
    for cell in cells:
        if cell["cell_type"] == "code":
            hidden = cell["metadata"].get("jupyter", {}).get("source_hidden", False)
            cell |= {"execution_count": None, "metadata": HIDDEN if hidden else {}, "outputs": []}
    written = json.loads(stored.read_text(encoding="utf-8"))
    del written["metadata"][pages.METADATA]
    return {**written, "cells": cells}


def tutorials() -> Iterator[tuple[Path, str]]:
    """Every tutorial by its place in the folder of all notebooks."""
    for source in [*pages.scripts(), *pages.notebooks()]:
        place = Path(source.parent.name, f"{source.stem}.ipynb")
        written = to_run(source) if source.suffix == ".ipynb" else convert(source)
        yield place, json.dumps(written, indent=2)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/_ext gallery.downloads FOLDER")
    from lm_from_scratch.exercises.notebooks_command import exercise_files, report

    report(Path(sys.argv[1]), [*tutorials(), *exercise_files()])


if __name__ == "__main__":
    main()
