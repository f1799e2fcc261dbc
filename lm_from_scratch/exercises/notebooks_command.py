"""``notebooks``: the tutorials and the exercises as notebooks, in a folder of the reader's.

A build of the package converts the tutorials and packs them; in a clone they lie beside it, and
`docs/_ext/gallery/downloads.py` converts them.
"""

import hashlib
import importlib.util
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lm_from_scratch.checkpoint.folders import read_json
from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import exercises
from lm_from_scratch.exercises.notebook import dump, notebook
from lm_from_scratch.exercises.options import NotebooksOptions
from lm_from_scratch.exercises.progress import write_text
from lm_from_scratch.files import sha256

# Where a build puts the tutorials.
PACKED = Path(__file__).resolve().parents[1] / "notebooks"
#: What this command has written, by digests: the rest is the reader's.
RECORD = ".generated.json"


def run(options: NotebooksOptions) -> int:
    """Write all notebooks; those that the reader has changed are kept, and named.

    Raises ``ValueError`` in a clone, whose tutorials are scripts, and where JupyterLab is to be
    opened and is not installed.
    """
    if not PACKED.is_dir():
        raise ValueError("in a clone the notebooks come from: python make.py lab")
    if options.open and importlib.util.find_spec("jupyterlab") is None:
        raise ValueError("JupyterLab is not installed here: pip install jupyterlab")
    tutorials = (
        (path.relative_to(PACKED), path.read_text(encoding="utf-8"))
        for path in sorted(PACKED.rglob("*.ipynb"))
    )
    folder = Path(options.folder)
    report(folder, [*tutorials, *exercise_files()])
    return opened(folder) if options.open else 0


def opened(folder: Path) -> int:
    """JupyterLab's exit code. At Ctrl-C it asks what is meant; another signal ends it."""
    jupyter = subprocess.Popen([sys.executable, "-m", "jupyterlab", str(folder)])
    while True:
        try:
            return jupyter.wait()
        except KeyboardInterrupt as error:
            if signal.SIGINT not in error.args:
                jupyter.terminate()


def exercise_files() -> Iterator[tuple[Path, str]]:
    """A notebook of each exercise, and the rules for AI helpers, by their places in the folder."""
    for exercise in exercises():
        yield Path("exercises", f"{exercise.name}.ipynb"), dump(notebook(exercise))
    yield Path("exercises", source.RULES), source.rules()


def report(folder: Path, texts: Iterable[tuple[Path, str]]) -> None:
    """Write the notebooks and say so."""
    unchanged, number = [], 0
    for path, written in write(folder, texts):
        number += written
        unchanged += [] if written else [path]
    print(f"{number} files are in {folder}. Open them: jupyter lab {shlex.quote(str(folder))}")
    for path in unchanged:
        print(f"{path} is kept: you changed it (delete it for the new version)")


def write(folder: Path, texts: Iterable[tuple[Path, str]]) -> Iterator[tuple[Path, bool]]:
    """Write files by their places; yield the path of each and whether it was written (False: kept,
    since its reader has changed it). Raises ``ValueError`` for a record that is damaged."""
    path_of_record = folder / RECORD
    try:
        record = read_json(path_of_record) if path_of_record.exists() else {}
    except ValueError as error:
        raise ValueError(f"{error}. Remove it: what you have changed stays") from error
    for relative, text in texts:
        path, key = folder / relative, relative.as_posix()
        known = [record.get(key), digest(text)]  # what a damaged record holds need not be a text
        untouched = not path.exists() or sha256(path) in known
        if untouched:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
            record[key] = digest(text)
        yield path, untouched
    write_text(path_of_record, json.dumps(record, indent=2))


def digest(text: str) -> str:
    """What the record keeps of a file."""
    return hashlib.sha256(text.encode()).hexdigest()
