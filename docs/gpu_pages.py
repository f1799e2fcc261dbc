"""The chapter on GPU kernels: its index page, and its executed notebooks as pages of the site.

The gallery runs what it shows, which a GPU page cannot rely on. `gpu_notebooks.py` executes those
notebooks and stores them; here they are copied to where myst-nb renders them as they are.
"""

from __future__ import annotations

import ast
import json
import re
import statistics
from pathlib import Path
from typing import Any

import exercise_pages
import gallery
import pages
from sphinx.util import logging

#: An alert of the notebook, as gpu_notebooks.py leaves it.
ALERT = re.compile(
    r'<div class="alert alert-\w+"><strong>(Note|Warning)</strong>\n\n(.*?)\n\n</div>', re.S
)

#: Where the outputs come from, as gpu_notebooks.py says it: a sentence, versions and a date.
ORIGIN = re.compile(r"^(The outputs on this page come from .*?) \((.*)\)\.$", re.M)


def page(script: Path) -> str | None:
    """The stored notebook of a script as a page: alerts and formulas look like those of the other
    pages, and links to both files are its last cell."""
    path = script.with_suffix(".ipynb")
    if not path.is_file():
        logging.getLogger(__name__).warning(
            "%s has no notebook: python docs/gpu_notebooks.py", script.relative_to(gallery.ROOT)
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
            cell["source"] = ORIGIN.sub(r"\1.\n\n```text\n\2\n```", text)
    exercise_pages.add_links_to_notebook(notebook["cells"], f"{gallery.GPU.name}/{script.stem}")
    source = f"Download: {downloads(script, '{download}')}"
    cell = {"cell_type": "markdown", "id": "downloads", "metadata": {}, "source": source}
    notebook["cells"].append(cell)
    return json.dumps(notebook, indent=1)


def downloads(script: Path, role: str = ":download:") -> str:
    """Links to the notebook and to the script of a page, as they are in the repository."""
    files = {"notebook": script.with_suffix(".ipynb"), "script": script}
    folder = Path("../..") / gallery.GPU.relative_to(gallery.ROOT)
    links = [f"{role}`{name} <{(folder / path.name).as_posix()}>`" for name, path in files.items()]
    return ", ".join(links)


def lessons(script: Path) -> list[str]:
    """What a page says under "You will learn"."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    section = re.search(r"^You will learn\n-+\n+((?:\*.*\n(?:  .*\n)*\n?)+)", text, re.M)
    bullets = re.split(r"^\* ", section[1], flags=re.M)[1:] if section else []
    return [" ".join(bullet.split()) for bullet in bullets]


def index() -> str:
    header = next(gallery.GPU.glob("*.rst")).read_text(encoding="utf-8")
    title, _, text = header.partition("\n")
    lines = [title, "=" * len(title), *text.strip().splitlines()[1:], ""]
    lines += ["Pages", "-----", "", ".. list-table::", "   :header-rows: 1", "   :widths: 28 54 18"]
    lines += ["", "   * - page", "     - what it teaches", "     - files"]
    for number, script in enumerate(gallery.gpu_scripts(), start=1):
        lines.append(f"   * - {number}. :doc:`/gpu/{script.stem}`")
        bullets = [f"* {bullet}" for bullet in lessons(script)] or [""]
        lines += [f"     {'  ' if i else '- '}{bullet}" for i, bullet in enumerate(bullets)]
        lines.append(f"     - {downloads(script)}")
    lines += ["", "Kernels", "-------", ""]
    for module, path in pages.modules().items():
        name = module.removeprefix(f"{pages.PACKAGE}.kernels.")
        if name != module and any(n.endswith("_kernel") for n in pages.public_names(path)):
            lines.append(f"* :doc:`{name} </api/{module}>`: {pages.summary(path)}")
    lines += ["", "Measured", "--------", "", *measured(), ""]
    lines += [".. toctree::", "   :hidden:", ""]
    lines += [f"   {script.stem}" for script in gallery.gpu_scripts()]
    return "\n".join(lines) + "\n"


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
        ".. list-table::",
        "   :header-rows: 1",
        "",
        "   * - function",
    ]
    lines += [f"     - {name}" for name in ["sizes", "share", *names]]
    for result in stored.results:
        lines += [f"   * - {result.kernel}", f"     - {result.dtype} {result.shape}"]
        lines.append(f"     - {result.shares(stored.gpu)[names[0]]:.0%}")
        for name in names:
            time = f"{1e6 * result.median(name):.1f}" if name in result.seconds else "–"
            lines.append(f"     - {time}")
    if stored.decoding:
        lines += ["", "Greedy decoding, tokens per second of all rows together:", ""]
        lines += [".. list-table::", "   :header-rows: 1", ""]
        lines += ["   * - model", "     - rows", "     - computed by", "     - tokens per second"]
    for entry in stored.decoding:
        lines += [f"   * - {entry['model']}", f"     - {entry['batch']}"]
        lines.append(f"     - {entry['implementation']}")
        lines.append(f"     - {statistics.median(entry['tokens_per_second']):.0f}")
    return lines


def outdated(app: Any, env: Any, added: set[str], changed: set[str], removed: set[str]) -> set[str]:
    """That page is read in every build: what is added to it is in no file that Sphinx compares."""
    return {pages.ALL_CHAPTERS} & env.found_docs


def add_chapter(app: Any, docname: str, source: list[str]) -> None:
    """Put the GPU pages behind the last chapter of the gallery's own index page."""
    if docname == pages.ALL_CHAPTERS and gallery.gpu_scripts():
        title, intro = gallery.header_text(gallery.GPU)
        links = [f"* :doc:`/gpu/{script.stem}`" for script in gallery.gpu_scripts()]
        source[0] = pages.with_chapter(source[0], title, intro, links, "/gpu/index")


def write(app: Any) -> None:
    folder = Path(app.srcdir) / "gpu"
    texts = {}
    if gallery.gpu_scripts():
        texts[folder / "index.rst"] = index()
    for script in gallery.gpu_scripts():
        if text := page(script):
            texts[folder / f"{script.stem}.ipynb"] = text
    for old in folder.glob("*.*"):
        if old not in texts:
            old.unlink()
    pages.write_texts(texts)
