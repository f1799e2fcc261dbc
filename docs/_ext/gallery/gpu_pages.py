"""The chapter on GPU kernels: its index page, and its executed notebooks as pages of the site.

The gallery runs what it shows, but the machine that builds the site may have no GPU. So these
notebooks are stored with their outputs (`gpu_notebooks`); here they are copied to where myst-nb
renders them as they are.
"""

import json
import re
import statistics
from pathlib import Path
from typing import Any

from gallery import pages
from lm_from_scratch.instruments.roofline import MARKERS, measurements

#: A link to another notebook.
LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./(\w+)/)?(\d\w*)\.ipynb\)")


def page(stored: Path) -> str:
    """A stored notebook as a page: formulas and links to pages are those of the other pages, and a
    link to the notebook is its last cell, in a box that the gallery shows beside the text, too."""
    name = f"gpu/{stored.stem}"
    notebook = json.loads(stored.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            text = re.sub(r"\\(begin|end)\{align\}", r"\\\1{align*}", "".join(cell["source"]))
            cell["source"] = LINK.sub(
                lambda link: f"{{doc}}`{link[1]} <{pages.document(pages.target(name, link))}>`",
                text,
            )
        else:
            cell["source"] = "".join(cell["source"]).removesuffix(";")
    link = download(name, "{download}", "Download Jupyter notebook")
    source = f"```{{container}} sphx-glr-download sphx-glr-download-jupyter\n{link}\n```"
    if deeper := pages.in_depth(name):
        listed = "\n".join(f"/{page}" for page in deeper)
        source += f"\n\n```{{toctree}}\n:hidden:\n\n{listed}\n```"
    cell = {"cell_type": "markdown", "id": "downloads", "metadata": {}, "source": source}
    notebook["cells"].append(cell)
    return json.dumps(notebook, indent=1)


def download(page: str, role: str = ":download:", text: str = "notebook") -> str:
    """A link to the notebook of a page, as it is in the repository."""
    return f"{role}`{text} <../../tutorials/{page}.ipynb>`"


def index() -> dict[str, Any]:
    title, _, text = next(pages.GPU.glob("*.rst")).read_text(encoding="utf-8").partition("\n")
    names = [f"gpu/{path.stem}" for path in pages.notebooks()]
    return {
        "title": title,
        "header": "\n".join(text.strip().splitlines()[2:]),
        "lessons": [name for name in names if pages.is_lesson(name)],
        "in_depth": pages.in_depth,
        "text_of": pages.text_of,
        "download": download,
        "stored": measurements(),
        "markers": list(MARKERS),
        "median": statistics.median,
    }
