"""The pages on GPU kernels: notebooks, executed by this machine and stored with their outputs.

    python docs/_ext gallery.gpu_notebooks [NAME ...]

A kernel is compiled on a GPU and interpreted on a CPU; a page prints the same on both. Run it after
a change of a page's code, of what the package computes, of the stored measurements, or on another
machine. Whether the stored text is what the code prints, nbval tells; no test looks at a stored
figure. Figures get the titles of their axes as alt text, and the last cell says where the outputs
come from. A notebook with a fault stays as it is.
"""

import argparse
import datetime
import os
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from nbformat.v4 import new_markdown_cell

from gallery import pages

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


def environment() -> dict[str, str]:
    """That of the kernel which executes a page, and of the one that checks it."""
    paths = [str(pages.ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # The page decides whether Triton interprets, and the kernel draws into the notebook.
    for name in ("TRITON_INTERPRET", "MPLBACKEND"):
        env.pop(name, None)
    return env


def execute(path: Path, into: Path | None = None) -> None:
    """Execute every cell in order by a new kernel, and store the notebook, in its place or in a
    folder. A cell that fails, takes too long or ends the kernel is an error of nbclient."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.id != pages.ORIGIN]
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS_OF_A_CELL,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR", f"--IPKernelApp.exec_lines={KEEP_TITLES}"],
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute(env=environment())
    for i, cell in enumerate(notebook.cells):
        finish(cell, f"{path.name}, cell {i}")
    about = {**notebook.metadata.get(pages.METADATA, {}), **machine(notebook.cells)}
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python", "pygments_lexer": "ipython3"},
            pages.METADATA: about,
        }
    )
    notebook.cells.append(new_markdown_cell(origin(about), id=pages.ORIGIN))
    nbformat.validate(notebook)
    nbformat.write(notebook, into / path.name if into else path)


def finish(cell: Any, where: str) -> None:
    """Refuse what no reader should see; the titles of the figures become their alt text."""
    cell.metadata.pop("mystnb", None)
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


def machine(cells: list[Any]) -> dict[str, str]:
    """What the outputs were made by, and when."""
    import torch
    import triton

    interprets = any('["TRITON_INTERPRET"] = "1"' in cell.source for cell in cells)
    on_cpu = INTERPRETER if interprets else CPU
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else on_cpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }


def origin(about: dict[str, str]) -> str:
    """The last words of a page: where its outputs come from. Versions and a date are no prose: a
    translation would be out of date with each run."""
    device = about["device"]
    how = WITHOUT_GPU.get(device, f"the compiled kernels, on a GPU: {device}")
    versions = "torch {torch}, triton {triton}, {date}".format(**about)
    return f"The outputs on this page come from {how}.\n\n```text\n{versions}\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="pages to execute; all without a name")
    notebooks = {path.stem: path for path in pages.notebooks()}
    parser.add_argument("--into", type=Path, help="write them here, and leave those stored")
    options = parser.parse_args()
    if options.into:
        options.into.mkdir(parents=True, exist_ok=True)
    names = [Path(name).stem for name in options.names] or list(notebooks)
    if unknown := set(names) - set(notebooks):
        parser.error(f"no page {', '.join(sorted(unknown))}; there are {', '.join(notebooks)}")
    for name in names:
        print(name, end=": ", flush=True)
        start = time.perf_counter()
        execute(notebooks[name], options.into)
        print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
