"""Notebooks that open in a browser without an installation, and the links to them.

    python docs/_ext/cloud.py FOLDER

writes what the branch `notebooks` holds: every notebook, with a first cell that installs the
release of this clone, and `requirements.txt` for Binder. The repository is the `Repository` of
`[project.urls]` in `pyproject.toml`; while there is none, the site has no links.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import exercises
import gallery
import rst
from modules import project
from notebooks import tutorials

from lm_from_scratch.exercises.notebooks_command import exercise_files

BRANCH = "notebooks"
SERVICES = {
    "Colab": "https://colab.research.google.com/github/{repository}/blob/{branch}/{path}",
    "ModelScope": "https://modelscope.cn/notebook/share/github/{repository}/blob/{branch}/{path}",
    "Binder": "https://mybinder.org/v2/gh/{repository}/{branch}?urlpath=lab/tree/{path}",
}
#: A service that has the package, as Binder has it from `requirements.txt`, installs nothing.
FIRST_CELL = """\
import importlib.util

if importlib.util.find_spec("lm_from_scratch") is None:
    %pip install --quiet "{requirement}"
"""


def address() -> str:
    return project()["project"].get("urls", {}).get("Repository", "")


def links(repository: str, document: str) -> dict[str, str]:
    """For each service, where it opens the notebook of a document of the site; nothing without a
    repository on GitHub, or for a document that is no notebook."""
    owner = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", repository)
    is_exercise = document in {f"exercises/{found.name}" for found in exercises.written()}
    page = document if is_exercise else gallery.page_of(document)
    if owner is None or page is None:
        return {}
    place = dict(repository=owner[1], branch=BRANCH, path=f"{page}.ipynb")
    return {name: url.format(**place) for name, url in SERVICES.items()}


def release(repository: str) -> str:
    """The requirement of the release of this clone, by its tag."""
    own = project()["project"]
    return f"{own['name']}[lab] @ git+{repository}@v{own['version']}"


def with_installation(text: str, requirement: str) -> str:
    """A notebook that begins with the installation."""
    notebook = json.loads(text)
    cell: dict[str, Any] = {"cell_type": "code", "execution_count": None, "outputs": []}
    cell |= {"metadata": {}, "source": [FIRST_CELL.format(requirement=requirement)]}
    if notebook["nbformat_minor"] >= 5:
        cell["id"] = "installation"
    notebook["cells"].insert(0, cell)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def files(requirement: str) -> Iterator[tuple[Path, str]]:
    """What the branch holds, by its place there."""
    for place, text in [*tutorials(), *exercise_files()]:
        yield place, with_installation(text, requirement) if place.suffix == ".ipynb" else text
    yield Path("requirements.txt"), f"{requirement}\n"
    yield Path("README.md"), rst.render("cloud.md")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/_ext/cloud.py FOLDER")
    if not (repository := address()):
        sys.exit("Name the repository first: Repository, in [project.urls] of pyproject.toml")
    folder = Path(sys.argv[1])
    written = {folder / place: text for place, text in files(release(repository))}
    rst.write(written)
    print(f"{len(written)} files are in {folder}: the content of the branch {BRANCH}")


def add_links(app: Any, pagename: str, template: str, context: dict[str, Any], tree: Any) -> None:
    context["cloud"] = links(app.config.repository, pagename)


def setup(app: Any) -> dict[str, bool]:
    # Before the theme looks which parts of the sidebar are empty.
    app.connect("html-page-context", add_links, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    main()
