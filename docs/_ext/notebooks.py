"""Every tutorial as the notebook that the site offers: `python docs/_ext/notebooks.py FOLDER`.

The notebooks come from the gallery's own converter with the gallery's own settings. Those of the
exercises, without solutions, are beside them. A notebook that its reader has changed is kept.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import downloads
import exercises
import gallery
import rst
from page import blocks, settings
from sphinx_gallery import notebook

RECORD = ".generated.json"


def convert(script: Path) -> dict[str, Any]:
    return downloads.notebook(as_written(script))


def as_written(script: Path) -> dict[str, Any]:
    """A cell for each block of the script."""
    target = gallery.DOCS / "auto_tutorials" / script.parent.name
    return notebook.jupyter_notebook(blocks(script), settings(), target)


def name(script: Path) -> Path:
    """Where a script's notebook lies, relative to the folder of all notebooks."""
    return Path(script.parent.name) / f"{script.stem}.ipynb"


def texts() -> Iterator[tuple[Path, str]]:
    """Every notebook by its place in the folder: tutorials, then exercises."""
    for script in [*gallery.scripts(), *gallery.gpu_scripts()]:
        yield name(script), json.dumps(convert(script), indent=2)
    for found in exercises.written():
        text = exercises.dump(exercises.notebook(found, exercises.as_student))
        yield Path("exercises") / f"{found.name}.ipynb", text


def write(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Write every notebook; yield its path and whether it was written (False: kept, changed)."""
    record_path = folder / RECORD
    record = json.loads(record_path.read_text()) if record_path.exists() else {}
    for relative, text in texts():
        path, key = folder / relative, relative.as_posix()
        known = {record.get(key), digest(text)}
        untouched = not path.exists() or digest(path.read_text(encoding="utf-8")) in known
        if untouched:
            rst.write({path: text})
            record[key] = digest(text)
        yield path, untouched
    rst.write({record_path: json.dumps(record, indent=2)})


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/_ext/notebooks.py FOLDER")
    for path, written in write(Path(sys.argv[1])):
        note = "written" if written else "kept: you changed it (delete it for the new version)"
        print(f"{path}  {note}")


if __name__ == "__main__":
    main()
