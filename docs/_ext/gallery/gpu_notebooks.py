"""The pages on GPU kernels as executed notebooks.

    python docs/_ext gallery.gpu_notebooks [NAME ...]

Each script of `tutorials/gpu` becomes the notebook beside it, with its outputs. It is executed by
this machine: compiled on a GPU, interpreted on a CPU; a page prints the same on both. A notebook
whose code is that of its script, and whose measurements are those stored, keeps its outputs: new
words are written around them, and the source that a page prints is printed again. Use --force
after a change of what the package computes, or on another machine; nbval tells whether outputs
differ. Names are those of the scripts, with or without `.py`.
"""

import argparse
import ast
import contextlib
import datetime
import hashlib
import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from nbformat.v4 import new_markdown_cell, new_notebook, new_output

from gallery import downloads, folding, pages
from gallery.lessons import PREDICT
from lm_from_scratch.instruments.roofline import FILE

METADATA = "lm_from_scratch"
SECONDS_OF_A_CELL = 600
#: Where the outputs come from if there is no GPU, and what a page says of it.
INTERPRETER, CPU = "CPU, Triton's interpreter", "CPU"
WITHOUT_GPU = {
    INTERPRETER: "a CPU, where Triton's interpreter ran the kernels",
    CPU: "a CPU, where kernels were compiled and none ran",
}

# The kernel begins with it: a figure carries the titles of its axes, which become its alt text.
KEEP_TITLES = """
def keep_titles():
    from matplotlib_inline import backend_inline

    plain = backend_inline._fetch_figure_metadata

    def with_titles(figure):
        titles = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
        return {**(plain(figure) or {}), "titles": [title for title in titles if title]}

    backend_inline._fetch_figure_metadata = with_titles

keep_titles()
del keep_titles
"""


def notebook_path(script: Path) -> Path:
    return script.with_suffix(".ipynb")


def cells(script: Path) -> list[Any]:
    """What the notebook of a script holds before it is executed."""
    page = nbformat.reads(json.dumps(downloads.convert(script)), as_version=4).cells
    asks = False
    for i, cell in enumerate(page):
        jupyter = cell.metadata.get("jupyter", {})
        if cell.cell_type == "markdown":
            # A heading of the fourth level would stand below one of the second.
            cell.source = re.sub(r"<h4>(.*?)</h4>", r"<strong>\1</strong>", cell.source)
            asks = f"**{PREDICT}**" in cell.source
        elif asks:
            jupyter = {**jupyter, "outputs_hidden": True}  # the answer, until a reader opens it
        cell.update(id=f"cell-{i:02}", metadata={"jupyter": jupyter} if jupyter else {})
    return page


def made_from(page: list[Any]) -> dict[str, str]:
    """What the outputs of a page depend on, besides the package, as SHA-256: its code, and the
    measurements that `roofline.show` draws, or "none"."""
    source = json.dumps([cell["source"] for cell in code(page)])
    path = pages.ROOT / FILE
    measured = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "none"
    return {"sha256": hashlib.sha256(source.encode()).hexdigest(), "measurements": measured}


def code(page: list[Any]) -> list[Any]:
    return [cell for cell in page if cell["cell_type"] == "code"]


def is_fresh(script: Path) -> bool:
    """Whether the stored notebook was executed from the code and measurements as they are now."""
    path = notebook_path(script)
    if not path.is_file():
        return False
    stored = nbformat.read(path, as_version=4).metadata.get(METADATA, {})
    return made_from(cells(script)).items() <= stored.items()


def environment() -> dict[str, str]:
    """That of the kernel which executes a page, and of the one that checks it."""
    paths = [str(pages.ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # The page decides whether Triton interprets, and the kernel draws into the notebook.
    for name in ("TRITON_INTERPRET", "MPLBACKEND"):
        env.pop(name, None)
    return env


def execute(script: Path, page: list[Any]) -> dict[str, Any]:
    """Execute every cell in order by a new kernel; where its outputs come from. A cell that fails,
    takes too long or ends the kernel is an error of nbclient."""
    import torch
    import triton

    client = nbclient.NotebookClient(
        new_notebook(cells=page),
        timeout=SECONDS_OF_A_CELL,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR", f"--IPKernelApp.exec_lines={KEEP_TITLES}"],
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(script.parent)}},
    )
    start = time.perf_counter()
    client.execute(env=environment())
    for i, cell in enumerate(page):
        finish(cell, f"{script.name}, cell {i}")
    interprets = any('["TRITON_INTERPRET"] = "1"' in cell.source for cell in code(page))
    on_cpu = INTERPRETER if interprets else CPU
    return {
        "script": script.name,
        **made_from(page),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else on_cpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.perf_counter() - start),
    }


def finish(cell: Any, where: str) -> None:
    """Refuse what no reader should see; the titles of the figures become their alt text."""
    titles: list[str] = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream" and output.name == "stderr":
            raise ValueError(f"{where} wrote to stderr:\n{output.text}")
        if "image/png" in output.get("data", {}):
            found = output.metadata.pop("titles", [])
            if not found:
                raise ValueError(f"{where} draws a figure whose axes have no title")
            titles += found
    if titles:
        cell.metadata["mystnb"] = {"image": {"alt": "; ".join(titles)}}


def origin(provenance: dict[str, Any]) -> str:
    """The last words of a page: where its outputs come from. Versions and a date are no prose: a
    translation would be out of date with each run."""
    device = provenance["device"]
    how = WITHOUT_GPU.get(device, f"the compiled kernels, on a GPU: {device}")
    versions = "torch {torch}, triton {triton}, {date}".format(**provenance)
    return f"The outputs on this page come from {how}.\n\n```text\n{versions}\n```"


def print_again(page: list[Any]) -> None:
    """Put the source as it is now into cells that print it: no notebook runs for a docstring."""
    names: dict[str, Any] = {}
    for cell in code(page):
        tree = ast.parse("".join(cell["source"]))
        imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        exec(compile(ast.Module(imports, []), "imports", "exec"), names)
        if folding.prints_source("".join(cell["source"])):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]), names)
            cell["outputs"] = [new_output("stream", name="stdout", text=printed.getvalue())]


def build(script: Path, force: bool = False) -> str:
    """Store the notebook of a script: executed, or with new words around its stored outputs."""
    page = cells(script)
    if not force and is_fresh(script):
        stored = nbformat.read(notebook_path(script), as_version=4)
        provenance, said = stored.metadata[METADATA], "the outputs are those of this code"
        for cell, before in zip(code(page), code(stored.cells), strict=True):
            cell.update({**before, "id": cell.id, "metadata": {**before.metadata, **cell.metadata}})
        print_again(page)
    else:
        provenance = execute(script, page)
        said = "{seconds} s on {device}".format(**provenance)
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
        METADATA: provenance,
    }
    last = new_markdown_cell(origin(provenance), id=f"cell-{len(page):02}")
    notebook = new_notebook(cells=[*page, last], metadata=metadata, nbformat_minor=5)
    nbformat.validate(notebook)
    nbformat.write(notebook, notebook_path(script))
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="pages to build; all without a name")
    parser.add_argument("--force", action="store_true", help="execute fresh notebooks too")
    options = parser.parse_args()
    scripts = {script.stem: script for script in pages.gpu_scripts()}
    names = [name.removesuffix(".py") for name in options.names] or list(scripts)
    if unknown := set(names) - set(scripts):
        parser.error(f"no script {', '.join(sorted(unknown))}; there are {', '.join(scripts)}")
    for name in names:
        print(name, end=": ", flush=True)
        print(build(scripts[name], options.force))


if __name__ == "__main__":
    main()
