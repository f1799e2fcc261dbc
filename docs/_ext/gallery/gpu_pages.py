"""The chapter on GPU kernels: its index page, and its executed notebooks as pages of the site.

The gallery runs what it shows, but the machine that builds the site may have no GPU. So
`gpu_notebooks` executes these notebooks and stores them; here they are copied to where myst-nb
renders them as they are. The patterns below match what `gpu_notebooks` writes.
"""

import json
import re
import statistics
from pathlib import Path

from sources import modules, templates

from gallery import pages
from lm_from_scratch.instruments.roofline import MARKERS, measurements

#: An alert of the notebook, as `gpu_notebooks` leaves it.
ALERT = re.compile(
    r'<div class="alert alert-\w+"><strong>(Note|Warning)</strong>\n\n(.*?)\n\n</div>', re.S
)
#: A link to another notebook.
LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./(\w+)/)?(\d\w*)\.ipynb\)")


def page(script: Path) -> str:
    """The stored notebook of a script as a page: alerts, formulas and links to pages are those of
    the other pages, and links to both files are its last cell."""
    name = f"gpu/{script.stem}"
    notebook = json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            text = ALERT.sub(
                lambda found: f":::{{{found[1].lower()}}}\n{found[2]}\n:::", "".join(cell["source"])
            )
            text = re.sub(r"\\(begin|end)\{align\}", r"\\\1{align*}", text)  # no numbers
            cell["source"] = LINK.sub(
                lambda link: f"{{doc}}`{link[1]} <{pages.document(pages.target(name, link))}>`",
                text,
            )
        else:
            cell["source"] = "".join(cell["source"]).removesuffix(";")
    source = f"Download: {downloads(script, '{download}')}"
    if deeper := pages.in_depth(name):
        listed = "\n".join(f"/{page}" for page in deeper)
        source += f"\n\n```{{toctree}}\n:hidden:\n\n{listed}\n```"
    cell = {"cell_type": "markdown", "id": "downloads", "metadata": {}, "source": source}
    notebook["cells"].append(cell)
    return json.dumps(notebook, indent=1)


def downloads(script: Path, role: str = ":download:") -> str:
    """Links to the notebook and to the script of a page, as they are in the repository."""
    place = f"../../tutorials/gpu/{script.stem}"
    return f"{role}`notebook <{place}.ipynb>`, {role}`script <{place}.py>`"


def index() -> str:
    title, _, text = next(pages.GPU.glob("*.rst")).read_text(encoding="utf-8").partition("\n")
    prefix = f"{modules.PACKAGE}.kernels."
    names = [f"gpu/{path.stem}" for path in pages.gpu_scripts()]
    return templates.render(
        "gpu.rst",
        title=title,
        header="\n".join(text.strip().splitlines()[2:]),
        lessons=[name for name in names if pages.is_lesson(name)],
        in_depth=pages.in_depth,
        script=pages.script,
        said=pages.said,
        downloads=downloads,
        kernels=[
            (module, module.removeprefix(prefix), modules.summary(path))
            for module, path in modules.modules().items()
            if module.startswith(prefix) and "_kernel(" in path.read_text(encoding="utf-8")
        ],
        stored=measurements(),
        markers=list(MARKERS),
        median=statistics.median,
    )
