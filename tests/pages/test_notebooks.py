"""Every tutorial as a notebook: its text is clean Markdown, its code is that of the script.

That each of them runs is the build's affair; how one runs as a notebook is tried on a few."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import nbclient
import nbformat
import pytest
from gallery import downloads, folding, gpu_notebooks, pages
from notebook_lint import lint, lint_notebook, lint_script

from lm_from_scratch.exercises import notebooks_command

SCRIPTS = pages.scripts()
CHAPTERS = sorted({script.parent for script in SCRIPTS if script.parent.name[0].isdigit()})
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
converted = cache(downloads.convert)


def test_every_script_is_on_a_page() -> None:
    """A file that the gallery would leave out is a page that nobody finds."""
    chapters = [chapter for chapter in pages.chapters() if chapter.name[0].isdigit()]
    stray = {path for chapter in chapters for path in chapter.glob("*.py")} - set(SCRIPTS)
    assert stray == set()


def test_file_names_are_plain() -> None:
    """They become addresses: letters, digits, underscores."""
    names = [script.relative_to(pages.TUTORIALS).as_posix() for script in SCRIPTS]
    assert [name for name in names if not re.fullmatch(r"\w+/\w+\.py", name)] == []


def test_there_is_a_tutorial() -> None:
    assert SCRIPTS


@each_script
def test_text_is_clean(script: Path) -> None:
    assert lint_script(script) == []
    assert lint_notebook(converted(script)) == []


@each_script
def test_notebook_is_valid(script: Path) -> None:
    notebook = converted(script)
    nbformat.validate(notebook)
    first, *_ = notebook["cells"]
    assert "".join(first["source"]).lstrip().startswith("# ")
    assert all("".join(cell["source"]).strip() for cell in notebook["cells"])


def lines(sources: list[str]) -> list[str]:
    return [line for line in "\n".join(sources).split("\n") if line.strip()]


@each_script
def test_a_notebook_has_every_line_of_its_script(script: Path) -> None:
    """Which the build runs."""
    blocks = [block.content for block in pages.blocks(script) if block.type == "code"]
    cells = converted(script)["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert [line.removesuffix(";") for line in lines(code)] == lines(blocks) != []


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [next(s for s in SCRIPTS if s.parent == c) for c in CHAPTERS], ids=lambda s: s.stem
)
def test_a_notebook_runs_from_a_folder_of_its_own(script: Path, tmp_path: Path) -> None:
    """The first page of each chapter: what a build does not have is IPython, and another folder."""
    notebook = nbformat.reads(json.dumps(downloads.convert(script)), as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place)
    client.execute(env=gpu_notebooks.environment())
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)) != []


@each_script
def test_a_notebook_hides_what_the_site_folds(script: Path) -> None:
    """By a cell's own metadata. Nothing else of a cell is out of a reader's sight."""
    cells = converted(script)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    blocks = [block.content for block in pages.blocks(script) if block.type == "code"]
    parts = [part for block in folding.parts(tuple(blocks)) for part in block]
    hidden = ["jupyter" in cell["metadata"] for cell in code]
    assert hidden == [bool(part.kinds) for part in parts]
    sources = ["".join(cell["source"]).removesuffix(";") for cell in code]
    assert sources == [part.text for part in parts]


def test_a_value_above_a_hidden_check_is_not_shown(tmp_path: Path) -> None:
    """It is not the end of its block, so the page does not show it."""
    script = tmp_path / "1_page.py"
    script.write_text(
        '"""\nA page\n======\n"""\n\nx = [1]\nx.pop()\nassert not x\n# %%\n# On.\nx\n'
    )
    cells = [cell for cell in downloads.convert(script)["cells"] if cell["cell_type"] == "code"]
    assert ["".join(cell["source"]) for cell in cells] == ["x = [1]\nx.pop();", "assert not x", "x"]


def test_every_tutorial_has_its_place() -> None:
    places = [place for place, _ in downloads.tutorials()]
    assert len(places) == len(set(places))
    assert {Path(script.parent.name, f"{script.stem}.ipynb") for script in SCRIPTS} < set(places)


@pytest.mark.parametrize(
    "markdown",
    [
        ".. tip::\n\n   Read this.",
        "   .. list-table::",
        "See :func:`torch.add`.",
        "See :py:class:`torch.Tensor`.",
        "\\begin{align}:label: loss\n\n  x\\end{align}",
        "\\begin{align}x = 1\n\n  y = 2\\end{align}",
        "[text](https://example.org)_",
        "#. first",
        "| a line block",
        ":Time: ten minutes",
        "=====  =====\nA      B\n=====  =====",
        "+-----+-----+\n| a   | b   |",
        "As shown before [1]_.",
        "Version |release| of it.",
        "An example::",
        "A `single` pair.",
        "``a``\\ s",
        "%% md",
        "`x`{.interpreted-text role='func'}",
        "::: note",
        '<img src="file://figure.png">',
    ],
)
def test_lint_finds(markdown: str) -> None:
    assert lint(f"Text before.\n\n{markdown}\n\nText after.\n") != []


def test_lint_accepts_the_subset(tmp_path: Path) -> None:
    script = tmp_path / "1_page.py"
    script.write_text(SUBSET)
    notebook = downloads.convert(script)
    assert lint_notebook(notebook) == []
    assert lint_script(script) == []
    text = "".join(notebook["cells"][0]["source"])
    for expected in [
        "# A page",
        "## A section",
        "$x_i$",
        "\\begin{align}",
        "alert-info",
        "```python",
    ]:
        assert expected in text
    assert "[a paper](https://example.org/paper)" in text


def test_lint_finds_a_dollar_in_text(tmp_path: Path) -> None:
    script = tmp_path / "1_page.py"
    script.write_text('"""\nA page\n======\n\nThe loss $x$.\n"""\n\nprint("costs $5")\n')
    assert len(lint_script(script)) == 1


def test_lint_finds_a_lone_ampersand(tmp_path: Path) -> None:
    script = tmp_path / "1_page.py"
    text = 'r"""\nA page\n======\n\n.. math::\n\n   a &= b{}\n"""\n\nprint(1)\n'
    script.write_text(text.format(""))
    assert len(lint_script(script)) == 1
    script.write_text(text.format(r" \\" + "\n   c &= d"))
    assert lint_script(script) == []


def test_changed_notebook_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "tutorials" / "1_a" / "1_page.py"
    script.parent.mkdir(parents=True)
    script.write_text(SUBSET)
    monkeypatch.setattr(pages, "scripts", lambda: [script])
    monkeypatch.setattr(pages, "notebooks", list)
    out = tmp_path / "out"

    def write() -> dict[Path, bool]:
        return dict(notebooks_command.write(out, downloads.tutorials()))

    (path,) = write()
    script.write_text(SUBSET.replace("A page", "B page"))
    assert write() == {path: True}
    assert "B page" in path.read_text()
    path.write_text(path.read_text() + "\n")
    mine = path.read_text()
    script.write_text(SUBSET.replace("A page", "C page"))
    assert write() == {path: False}
    assert path.read_text() == mine


SUBSET = r'''r"""
A page
======

Words, *stress*, **more stress**, ``code`` and :math:`x_i`. From `a paper <https://example.org/paper>`_.

.. math::

   a &= b | c \\
   \mathcal{L} &= \sum_i x_i

A section
---------

* a list,
* of two.

1. One.
2. Two.

.. note::

   A note with ``code``.

.. code-block:: python

   x = {"a": 1}
"""

x = 1
'''
