"""MathJax from this site: those parts of `sphinx-mathjax-offline` that a page loads."""

import shutil
from pathlib import Path
from typing import Any


def prune(app: Any, exception: Exception | None) -> None:
    """24 MB become 6 MB, none outside HTML."""
    folder = Path(app.outdir) / "_static" / "mathjax"
    if not folder.is_dir():
        return
    if app.builder.format != "html":
        shutil.rmtree(folder)
        return
    for script in folder.glob("*.js"):
        if script.name != "tex-chtml.js":
            script.unlink()
    for speech in folder.glob("sre/mathmaps/*.js*"):
        if speech.stem not in {"base", "en"}:
            speech.unlink()


def setup(app: Any) -> dict[str, bool]:
    app.setup_extension("sphinx.ext.mathjax")
    app.setup_extension("sphinx-mathjax-offline")
    # The extension only copies files; without this a build with -j refuses to start.
    app.extensions["sphinx-mathjax-offline"].parallel_read_safe = True
    app.connect("build-finished", prune, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
