"""What readers download of a page: its script, its notebook, an archive of both.

They have no widgets. What the site folds is in cells of its own in a notebook, whose code
JupyterLab and VS Code hide until a reader opens it: a check below a question tells its answer.
"""

import ast
import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import folding
import gallery
import rst

#: The directive of a widget in a script or a text: its line, its options, one empty line.
WIDGET = re.compile(r"^((?:# ?)?)\.\. live::.*\n(?:\1 +:.*\n)*(?:#?\n)?", re.M)
HIDDEN = {"jupyter": {"source_hidden": True}}


def without_widgets(text: str) -> str:
    return WIDGET.sub("", text)


def notebook(written: dict[str, Any]) -> dict[str, Any]:
    """A notebook as the gallery writes it, for readers."""
    texts = ["".join(cell["source"]) for cell in written["cells"]]
    is_code = [cell["cell_type"] == "code" for cell in written["cells"]]
    parts = iter(folding.parts([t for t, code in zip(texts, is_code, strict=True) if code]))
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
        return json.dumps(notebook(json.loads(content)), indent=1).encode()
    if name.endswith(".zip"):
        made = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
            for entry in old.infolist():
                new.writestr(entry, file(entry.filename, old.read(entry)))
        return made.getvalue()
    return content


def finish(app: Any, error: Exception | None) -> None:
    if error or app.builder.format != "html":
        return
    for source, (_, target) in app.env.dlfiles.items():
        path = Path(app.srcdir, source)
        if path.is_relative_to(gallery.DOCS / "auto_tutorials"):
            rst.write({Path(app.outdir, "_downloads", target): file(path.name, path.read_bytes())})


def setup(app: Any) -> dict[str, bool]:
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
