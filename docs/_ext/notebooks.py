"""Every tutorial as the notebook that the site offers: `python docs/_ext/notebooks.py FOLDER`.

The notebooks come from the gallery's own converter with the gallery's own settings. Those of the
exercises, without solutions, are beside them. A notebook that its reader has changed is kept.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import downloads
import gallery
from page import blocks, settings
from sphinx_gallery import notebook


def convert(script: Path) -> dict[str, Any]:
    return downloads.notebook(as_written(script))


def as_written(script: Path) -> dict[str, Any]:
    """A cell for each block of the script."""
    target = gallery.DOCS / "auto_tutorials" / script.parent.name
    return notebook.jupyter_notebook(blocks(script), settings(), target)


def name(script: Path) -> Path:
    """Where a script's notebook lies, relative to the folder of all notebooks."""
    return Path(script.parent.name) / f"{script.stem}.ipynb"


def tutorials() -> Iterator[tuple[Path, str]]:
    """Every tutorial by its place in the folder."""
    for script in [*gallery.scripts(), *gallery.gpu_scripts()]:
        yield name(script), json.dumps(convert(script), indent=2)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/_ext/notebooks.py FOLDER")
    from lm_from_scratch.exercises.notebooks_command import exercise_files, report

    report(Path(sys.argv[1]), [*tutorials(), *exercise_files()])


if __name__ == "__main__":
    main()
