"""What is wrong with the text of a page, in its notebook or in its script."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gallery.pages import blocks

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
    r"(?<![|<])\|\w[\w -]*\|(?![|>])": "a substitution",  # a special token is none: <|name|>
    r"::\s*$": "a literal block by ::",
    r"(?<![`\\])`[^`\n]+`(?!`)": "single backticks",
    r"``\\": "an escape behind code",
    r"^\s*%%": "a block marker that was not understood",
    r"\{\.interpreted-text": "an rST role",
    r":::": "a fenced directive",
    r"file://": "an image that stays on the author's disk",
}


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
    """Faults that show on the page only: a notebook renders a dollar sign or a lone & as
    mathematics."""
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
