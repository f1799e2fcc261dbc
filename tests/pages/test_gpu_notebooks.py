"""Pages on GPU kernels: what is stored in each notebook, and how it comes there.

That it runs to the same outputs is nbval's affair: `make test` calls it."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from gallery import downloads, folding, gpu_notebooks, pages
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from notebook_lint import lint_notebook

NOTEBOOKS = pages.notebooks()
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
SLOW = pytest.mark.slow
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed here"
)

#: What differs from run to run or from machine to machine, and has no place in an output.
VARYING = {
    r"0x[0-9a-f]{6,}": "an address",
    r"/tmp/|/home/|/root/|/usr/|site-packages": "a path",
    r"cuda:\d|device=": "a device",
}


def stored(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in stored(path).cells if cell.cell_type == "code"]


def outputs(path: Path) -> list[Any]:
    return [output for cell in code_cells(path) for output in cell.outputs]


def text_of(output: Any) -> str:
    return output.text if output.output_type == "stream" else output.data.get("text/plain", "")


# -- the stored notebooks --------------------------------------------------------------------


def test_the_pages_are_numbered() -> None:
    names = [path.name for path in pages.GPU.glob("*.ipynb")]
    assert [name for name in names if not re.fullmatch(r"\d+[a-z]?_\w+\.ipynb", name)] == []
    lessons = [number for number, letter in map(pages.number, NOTEBOOKS) if not letter]
    assert lessons == list(range(1, len(lessons) + 1)) != []


@each_notebook
def test_text_is_clean(path: Path) -> None:
    notebook = stored(path)
    nbformat.validate(notebook)
    assert lint_notebook(notebook) == []
    assert notebook.cells[0].source.lstrip().startswith("# ")


@each_notebook
def test_the_last_cell_says_where_outputs_come_from(path: Path) -> None:
    """If this fails: python docs/_ext gallery.gpu_notebooks NAME"""
    last = stored(path).cells[-1]
    assert last.id == pages.ORIGIN
    assert last.source == gpu_notebooks.origin(stored(path).metadata[pages.METADATA])


@each_notebook
def test_every_cell_ran_in_order(path: Path) -> None:
    counts = [cell.execution_count for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1)) != []
    assert [output for output in outputs(path) if output.output_type == "error"] == []
    assert [output for output in outputs(path) if output.get("name") == "stderr"] == []


@each_notebook
def test_no_cell_is_exempt(path: Path) -> None:
    """A tag or a marker would keep nbval from comparing a cell."""
    assert all(set(cell.metadata) <= {"mystnb", "jupyter"} for cell in stored(path).cells)
    for cell in code_cells(path):
        assert not re.search(r"#\s*(NBVAL|PYTEST_VALIDATE)|^\s*[%!]", cell.source, flags=re.M)


@each_notebook
def test_figures_are_stored_with_their_text(path: Path) -> None:
    for cell in code_cells(path):
        drawn = [output for output in cell.outputs if "image/png" in output.get("data", {})]
        assert bool(drawn) == bool(re.search(r"^\s*(\w+\.)?show\(", cell.source, re.M))
        assert bool(drawn) == bool(cell.metadata.get("mystnb", {}).get("image", {}).get("alt"))


@each_notebook
def test_outputs_hold_nothing_that_varies(path: Path) -> None:
    for text in map(text_of, outputs(path)):
        for pattern, meaning in VARYING.items():
            assert not re.search(pattern, text), f"{meaning}: {text[:300]}"


@needs_triton
@each_notebook
def test_source_is_printed_as_it_is(path: Path) -> None:
    """If this fails: python docs/_ext gallery.gpu_notebooks NAME"""
    names: dict[str, Any] = {}
    line = re.compile(r"print\(inspect\.getsource\([\w.]+\)\)")
    for cell in code_cells(path):
        tree = ast.parse(cell.source)
        imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        exec(compile(ast.Module(imports, []), path.name, "exec"), names)
        if all(line.fullmatch(written) for written in cell.source.strip().splitlines()):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(cell.source, names)
            assert "".join(output.text for output in cell.outputs) == printed.getvalue()


@each_notebook
def test_an_answer_is_hidden_until_a_reader_opens_it(path: Path) -> None:
    asks = False
    for cell in stored(path).cells:
        if cell.cell_type == "markdown":
            asks = "**Predict first.**" in cell.source
        else:
            assert cell.metadata.get("jupyter", {}).get("outputs_hidden", False) == asks


@each_notebook
def test_code_that_the_site_folds_is_hidden_in_cells_of_its_own(path: Path) -> None:
    cells = code_cells(path)
    parts = folding.parts(tuple(cell.source.removesuffix(";") for cell in cells))
    hidden = [[cell.metadata.get("jupyter", {}).get("source_hidden", False)] for cell in cells]
    assert hidden == [[bool(part.kinds) for part in of_cell] for of_cell in parts]


def test_text_becomes_the_markup_of_scripts() -> None:
    text = (
        "## A part\n\n[one](1_one.ipynb), ``f[i](x)``, $x_i$:\n\n\\begin{align}a &= b\\end{align}\n"
    )
    assert pages.in_markup_of_scripts(text) == (
        "A part\n------\n\n`one <1_one.ipynb>`_, ``f[i](x)``, :math:`x_i`:\n\n"
        ".. math::\n\n   a &= b\n"
    )


# -- what stores them, on a small page -------------------------------------------------------

PRINTS = "import matplotlib.pyplot as plt\n\nprint('matches:', 1 + 1 == 2)"
DRAWS = "_, ax = plt.subplots()\nax.set_title('a title')\nplt.show()"
CODE = {
    PRINTS: "matches: True\n",
    DRAWS: "<Figure size 640x480 with 1 Axes>",
    "1 + 1 == 2": "True",
}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "1_page.ipynb"
    cells = [new_markdown_cell("# A page"), *map(new_code_cell, CODE)]
    metadata = {pages.METADATA: {"needs": ["../1_gpt2/1_tokens"]}}
    nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
    monkeypatch.setattr(pages, "notebooks", lambda: [path])
    monkeypatch.setattr(sys, "argv", ["gpu_notebooks.py", "1_page"])
    return path


@pytest.mark.slow
@needs_triton
def test_a_page_is_executed_and_stored(page: Path) -> None:
    for _ in range(2):  # the second time what is stored is replaced
        gpu_notebooks.main()
        assert [path.name for path in page.parent.iterdir()] == ["1_page.ipynb"]
        assert [text_of(output) for output in outputs(page)] == [*CODE.values()]
        first, second, third = code_cells(page)
        assert [cell.execution_count for cell in (first, second, third)] == [1, 2, 3]
        assert "image/png" in second.outputs[0].data and second.outputs[0].metadata == {}
        assert second.metadata == {"mystnb": {"image": {"alt": "a title"}}}
        about = stored(page).metadata[pages.METADATA]
        assert about["needs"] == ["../1_gpt2/1_tokens"]
        assert set(about) == {"needs", "device", "torch", "triton", "date"}
        assert stored(page).cells[-1].source == gpu_notebooks.origin(about)
        assert len(stored(page).cells) == 5


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("1 / 0", CellExecutionError, "ZeroDivisionError"),
        ("import warnings\nwarnings.warn('old')", ValueError, "^1_page.ipynb.* wrote to stderr"),
        pytest.param(
            "plt.plot([1])\nplt.show()", ValueError, "^1_page.ipynb.* no title", marks=SLOW
        ),
        pytest.param("import os\nos._exit(1)", DeadKernelError, "Kernel died", marks=SLOW),
        pytest.param("import time\ntime.sleep(600)", CellTimeoutError, "timed out", marks=SLOW),
    ],
)
def test_a_page_with_a_fault_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, page: Path, code: str, error: type[Exception], words: str
) -> None:
    notebook = stored(page)
    notebook.cells.append(new_code_cell(code))
    nbformat.write(notebook, page)
    before = page.read_bytes()
    monkeypatch.setattr(gpu_notebooks, "SECONDS_OF_A_CELL", 5)
    with pytest.raises(error, match=words):
        gpu_notebooks.main()
    assert page.read_bytes() == before
    assert len(list(page.parent.iterdir())) == 1


def test_the_last_words_name_the_device() -> None:
    about = dict(device="NVIDIA H100", torch="2", triton="3", date="2026-01-01")
    assert gpu_notebooks.origin(about) == (
        "The outputs on this page come from the compiled kernels, on a GPU: NVIDIA H100."
        "\n\n```text\ntorch 2, triton 3, 2026-01-01\n```"
    )
    assert "interpreter" in gpu_notebooks.origin({**about, "device": gpu_notebooks.INTERPRETER})


def test_a_page_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_notebooks.py", "99_nothing"])
    with pytest.raises(SystemExit):
        gpu_notebooks.main()
    assert "no page 99_nothing" in capsys.readouterr().err


# -- for readers -----------------------------------------------------------------------------


@each_notebook
def test_readers_run_a_notebook_themselves(path: Path) -> None:
    notebook = downloads.to_run(path)
    nbformat.validate(notebook)
    assert [cell["source"] for cell in notebook["cells"]] == [
        cell["source"].splitlines(keepends=True) for cell in stored(path).cells[:-1]
    ]
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in code)
