"""Every tutorial as the notebook that the site offers: `python docs/_ext/notebooks.py FOLDER`.

The notebooks come from the gallery's own converter with the gallery's own settings. Those of the
exercises, without solutions, are beside them. A notebook that its reader has changed is kept.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import exercises
import gallery
from page import blocks, settings
from sphinx_gallery import notebook

RECORD = ".generated.json"

# What the gallery's converter leaves raw in a Markdown cell. CONTRIBUTING.md lists what to write.
FAULTS = {
    r"^\s*\.\. ": "an rST directive or comment",
    r":[\w:-]+:`": "an rST role",
    r"\\begin\{align\}\s*:\w+:": "an option of a math directive",
    r"\\begin\{align\}(?:(?!\\end\{align\})[\s\S])*?\n[ \t]*\n": "a blank line inside a formula",
    r"\]\([^)\s]*\)_": "a link with two underscores",
    r"^\s*#\. ": "a list numbered by #.",
    r"^\| ": "a line block or a table",
    r"^:[A-Z][\w ]*: ": "a field list",
    r"^\s*(?:={3,}( +={3,})+|\+[-=]{3,}(\+[-=]*)*\+?)\s*$": "an rST table",
    r"\[(?:\d+|#\w*)\]_": "a footnote",
    r"(?<!\|)\|\w[\w -]*\|(?!\|)": "a substitution",
    r"::\s*$": "a literal block by ::",
    r"(?<![`\\])`[^`\n]+`(?!`)": "single backticks",
    r"``\\": "an escape behind code",
    r"^\s*%%": "a block marker that was not understood",
    r"\{\.interpreted-text": "an rST role",
    r":::": "a fenced directive",
    r"file://": "an image that stays on the author's disk",
}


def convert(script: Path) -> dict[str, Any]:
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
        yield exercises.name(found), exercises.dump(exercises.notebook(found, exercises.as_student))


def write(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Write every notebook; yield its path and whether it was written (False: kept, changed)."""
    record_path = folder / RECORD
    record = json.loads(record_path.read_text()) if record_path.exists() else {}
    for relative, text in texts():
        path = folder / relative
        untouched = not path.exists() or _digest(path.read_text()) in {
            record.get(relative.as_posix()),
            _digest(text),
        }
        if untouched:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            record[relative.as_posix()] = _digest(text)
        yield path, untouched
    folder.mkdir(parents=True, exist_ok=True)
    record_path.write_text(json.dumps(record, indent=2))


def lint(markdown: str) -> list[str]:
    """What is wrong with the text of a Markdown cell."""
    # Code blocks, links, formulas and data of images may hold anything.
    prose = re.sub(r"^```.*?^```", "", markdown, flags=re.M | re.S)
    prose = re.sub(r'src="data:[^"]*"', "", prose)
    found = []
    for pattern, meaning in FAULTS.items():
        for match in re.finditer(pattern, prose, flags=re.M):
            found.append(f"{meaning}: {match[0].strip()[:60]!r}")
    return found


def lint_notebook(notebook: dict[str, Any]) -> list[str]:
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    return [fault for cell in cells for fault in lint("".join(cell["source"]))]


def lint_script(script: Path) -> list[str]:
    """Faults of the page that its notebook hides: there, a dollar and a lone & are mathematics."""
    faults = []
    for block in blocks(script):
        if block.type != "text":
            continue
        if "$" in block.content:
            faults.append(f"line {block.lineno}: a dollar sign in text")
        for formula in re.findall(r"^\.\. math::(.*(?:\n+ +.*)*)", block.content, flags=re.M):
            # The page aligns at & only where a line ends with two backslashes.
            aligned = "\\\\" in formula or "\\begin{" in formula
            if re.search(r"(?<!\\)&", formula) and not aligned:
                faults.append(
                    f"line {block.lineno}: & in a formula of one line: {formula.strip()!r}"
                )
    return faults


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/_ext/notebooks.py FOLDER")
    for path, written in write(Path(sys.argv[1])):
        note = "written" if written else "kept: you changed it (delete it for the new version)"
        print(f"{path}  {note}")


if __name__ == "__main__":
    main()
