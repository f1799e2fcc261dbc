"""The chapter on GPU kernels: its index page, and its executed notebooks as pages of the site.

The gallery runs what it shows, but the machine that builds the site may have no GPU. So
`gpu_notebooks.py` executes these notebooks and stores them; here they are copied to where myst-nb
renders them as they are. The patterns below match what `gpu_notebooks.py` writes.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import gallery
import modules
import page as pages
import rst
from sphinx.util import logging

#: An alert of the notebook, as gpu_notebooks.py leaves it.
ALERT = re.compile(
    r'<div class="alert alert-\w+"><strong>(Note|Warning)</strong>\n\n(.*?)\n\n</div>', re.S
)

#: A link to another notebook.
LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./(\w+)/)?(\d\w*)\.ipynb\)")

#: Where the outputs come from, as gpu_notebooks.py says it: a sentence, versions and a date.
ORIGIN = re.compile(r"^(The outputs on this page come from .*?) \((.*)\)\.$", re.M)


def page(script: Path) -> str | None:
    """The stored notebook of a script as a page: alerts, formulas and links to pages are those of
    the other pages, and links to both files are its last cell."""
    name = f"{gallery.GPU.name}/{script.stem}"
    path = script.with_suffix(".ipynb")
    if not path.is_file():
        logging.getLogger(__name__).warning(
            "%s has no notebook: python docs/_ext/gpu_notebooks.py",
            script.relative_to(gallery.ROOT),
        )
        return None
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            text = ALERT.sub(
                lambda found: f":::{{{found[1].lower()}}}\n{found[2]}\n:::", "".join(cell["source"])
            )
            text = re.sub(r"\\(begin|end)\{align\}", r"\\\1{align*}", text)  # no numbers
            # Versions and a date are no prose: a translation would be out of date with each run.
            text = ORIGIN.sub(r"\1.\n\n```text\n\2\n```", text)
            cell["source"] = LINK.sub(lambda link: to_page(name, link), text)
    source = f"Download: {downloads(script, '{download}')}"
    cell = {"cell_type": "markdown", "id": "downloads", "metadata": {}, "source": source}
    notebook["cells"].append(cell)
    return json.dumps(notebook, indent=1)


def to_page(name: str, link: re.Match[str]) -> str:
    return f"{{doc}}`{link[1]} <{gallery.document(pages.target(name, link))}>`"


def downloads(script: Path, role: str = ":download:") -> str:
    """Links to the notebook and to the script of a page, as they are in the repository."""
    files = {"notebook": script.with_suffix(".ipynb"), "script": script}
    folder = Path("../..") / gallery.GPU.relative_to(gallery.ROOT)
    links = [f"{role}`{name} <{(folder / path.name).as_posix()}>`" for name, path in files.items()]
    return ", ".join(links)


def lessons(script: Path) -> list[str]:
    """What a page says under "You will learn"."""
    said = pages.said(f"{gallery.GPU.name}/{script.stem}", "You will learn")
    return [" ".join(bullet.split()) for bullet in re.split(r"^\* ", said, flags=re.M)[1:]]


def index() -> str:
    rows = [["page", "what it teaches", "files"]]
    for number, script in enumerate(gallery.gpu_scripts(), start=1):
        learnt = "\n".join(f"* {lesson}" for lesson in lessons(script))
        rows.append([f"{number}. :doc:`/gpu/{script.stem}`", learnt, downloads(script)])
    title, _, text = next(gallery.GPU.glob("*.rst")).read_text(encoding="utf-8").partition("\n")
    header = [*rst.heading(title, "="), *text.strip().splitlines()[2:]]
    prefix = f"{modules.PACKAGE}.kernels."
    kernels = [
        (module, module.removeprefix(prefix), modules.summary(path))
        for module, path in modules.modules().items()
        if module.startswith(prefix) and "_kernel(" in path.read_text(encoding="utf-8")
    ]
    return rst.render(
        "gpu.rst",
        header="\n".join(header),
        pages="\n".join(rst.table(rows, ":widths: 28 54 18")),
        kernels=kernels,
        measured="\n".join(measured()),
        scripts=gallery.gpu_scripts(),
    )


def measured() -> list[str]:
    """What a GPU measured, as a table; a sentence where none has."""
    from lm_from_scratch.instruments.roofline import MARKERS, measurements

    stored = measurements()
    if stored is None:
        return ["No GPU has measured these kernels yet: ``make gpu`` does."]
    names = list(MARKERS)
    lines = [
        ".. code-block:: text",
        "",
        "   {device}, driver {driver}, torch {torch}, triton {triton}, {date}".format(
            **stored.provenance
        ),
        "   copy {copy:.2f} TB/s, matrix product in bfloat16 {matmul:.0f} TFLOP/s".format(
            copy=stored.ceilings["copy"] / 1e12,
            matmul=stored.ceilings["matmul"] / 1e12,
        ),
        "",
        "A share is that of the roof which these two make; each time is a median in microseconds.",
        "",
    ]
    rows = [["function", "sizes", "share", *names]]
    for result in stored.results:
        times = [
            f"{1e6 * result.median(name):.1f}" if name in result.seconds else "–" for name in names
        ]
        share = f"{result.shares(stored.gpu)[names[0]]:.0%}"
        rows.append([result.kernel, f"{result.dtype} {result.shape}", share, *times])
    lines += rst.table(rows)
    if stored.decoding:
        rows = [["model", "rows", "computed by", "tokens per second"]]
        for entry in stored.decoding:
            speed = f"{statistics.median(entry['tokens_per_second']):.0f}"
            rows.append([entry["model"], str(entry["batch"]), entry["implementation"], speed])
        lines += ["Greedy decoding, tokens per second of all rows together:", "", *rst.table(rows)]
    return lines


def write(app: Any) -> None:
    folder = Path(app.srcdir) / "gpu"
    texts = {folder / f"{script.stem}.ipynb": page(script) for script in gallery.gpu_scripts()}
    made = {path: text for path, text in texts.items() if text}
    rst.write_folder(folder, "*.*", {folder / "index.rst": index(), **made})


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
