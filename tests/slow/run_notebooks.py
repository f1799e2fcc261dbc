"""Pages as a reader runs them: every cell in a new kernel, in order."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def run_page(script: Path) -> dict[str, int]:
    """Execute the notebook of a tutorial from a folder of its own."""
    import gallery
    import nbclient
    import nbformat
    import notebooks

    notebook = nbformat.reads(json.dumps(notebooks.convert(script)), as_version=4)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(gallery.ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        client = nbclient.NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources=place
        )
        client.execute(env=environment)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)) != []
    return {"cells": len(counts)}


def run_stored(script: Path) -> dict[str, int]:
    """Execute the stored notebook of a page on GPU kernels and compare every text: compiled on a
    GPU, interpreted on a CPU. Source that it prints is compared with the source as it is now."""
    import gpu_notebooks
    import nbformat
    from nbval_run import run_nbval

    path = gpu_notebooks.notebook_path(script)
    notebook = nbformat.read(path, as_version=4)
    gpu_notebooks.print_again(notebook.cells)
    with tempfile.TemporaryDirectory() as folder:
        now = Path(folder, path.name)
        nbformat.write(notebook, now)
        status, log, suite = run_nbval(now, Path(folder), gpu_notebooks.environment())
    force = f"python docs/_ext/gpu_notebooks.py --force {script.stem}"
    assert status == 0, f"{log}\nIf this is right: {force}"
    assert int(suite["tests"]) == len(code_cells(path)) > 0
    assert suite["skipped"] == suite["failures"] == suite["errors"] == "0"
    return {"cells": int(suite["tests"])}


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]
