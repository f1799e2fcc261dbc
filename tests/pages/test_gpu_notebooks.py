"""Pages on GPU kernels: each notebook belongs to its script.

That it runs to the same outputs is nbval's affair: `make test` calls it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from gallery import downloads, gpu_notebooks, pages
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from notebook_lint import lint_notebook, lint_script

SCRIPTS = pages.gpu_scripts()
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed here"
)

PROVENANCE = {"script", "sha256", "measurements", "device", "torch", "triton", "date", "seconds"}

#: What differs from run to run or from machine to machine, and has no place in an output.
VARYING = {
    r"0x[0-9a-f]{6,}": "an address",
    r"/tmp/|/home/|/root/|/usr/|site-packages": "a path",
    r"cuda:\d|device=": "a device",
}


def stored(script: Path) -> Any:
    return nbformat.read(gpu_notebooks.notebook_path(script), as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(output: Any) -> str:
    return output.text if output.output_type == "stream" else output.data.get("text/plain", "")


# -- the stored notebooks --------------------------------------------------------------------


def test_the_pages_are_numbered() -> None:
    names = [script.name for script in SCRIPTS]
    assert [name for name in names if not re.fullmatch(r"\d+[a-z]?_\w+\.py", name)] == []
    lessons = [number for number, letter in map(pages.number, SCRIPTS) if not letter]
    assert lessons == list(range(1, len(lessons) + 1))


def test_no_notebook_is_without_its_script() -> None:
    assert {path.stem for path in pages.GPU.glob("*.ipynb")} == {s.stem for s in SCRIPTS}


@each_script
def test_text_is_clean(script: Path) -> None:
    assert lint_script(script) == []
    assert lint_notebook(downloads.convert(script)) == []
    text = "\n".join(cell.source for cell in gpu_notebooks.cells(script))
    assert text.lstrip().startswith("# ")


@each_script
def test_the_notebook_belongs_to_the_script(script: Path) -> None:
    """If this fails: python docs/_ext gallery.gpu_notebooks"""
    assert gpu_notebooks.is_fresh(script)
    notebook = stored(script)
    nbformat.validate(notebook)
    *cells, last = notebook.cells
    expected = gpu_notebooks.cells(script)
    for name in ("id", "cell_type", "source"):
        assert [cell[name] for cell in cells] == [cell[name] for cell in expected]
    provenance = notebook.metadata[gpu_notebooks.METADATA]
    assert set(provenance) == PROVENANCE
    assert provenance.script == script.name
    assert all(str(value) for value in provenance.values())
    assert last.cell_type == "markdown" and last.source == gpu_notebooks.origin(provenance)


@each_script
def test_every_cell_ran_in_order(script: Path) -> None:
    cells = code_cells(stored(script))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error"] == []
    assert [output for output in outputs if output.get("name") == "stderr"] == []


@each_script
def test_no_cell_is_exempt(script: Path) -> None:
    """A tag or a marker would keep nbval from comparing a cell."""
    for cell in stored(script).cells:
        assert set(cell.metadata) <= {"mystnb", "jupyter"}
        assert not re.search(r"#\s*(NBVAL|PYTEST_VALIDATE)|^\s*[%!]", cell.source, flags=re.M) or (
            cell.cell_type == "markdown"
        )


@each_script
def test_figures_are_stored_with_their_text(script: Path) -> None:
    for cell in code_cells(stored(script)):
        drawn = [o for o in cell.outputs if "image/png" in o.get("data", {})]
        assert bool(drawn) == bool(re.search(r"^\s*(\w+\.)?show\(", cell.source, re.M))
        if drawn:
            assert cell.metadata.mystnb.image.alt


@each_script
def test_outputs_hold_nothing_that_varies(script: Path) -> None:
    texts = [text_of(output) for cell in code_cells(stored(script)) for output in cell.outputs]
    for text in texts:
        for pattern, meaning in VARYING.items():
            assert not re.search(pattern, text), f"{meaning}: {text[:300]}"


@needs_triton
@each_script
def test_source_is_printed_as_it_is(script: Path) -> None:
    """If this fails: python docs/_ext gallery.gpu_notebooks"""
    stored_cells, now = stored(script).cells, stored(script).cells
    gpu_notebooks.print_again(now)
    assert now == stored_cells


@each_script
def test_an_answer_is_hidden_until_a_reader_opens_it(script: Path) -> None:
    cells, asks = stored(script).cells, False
    for cell in cells:
        if cell.cell_type == "markdown":
            asks = "**Predict first.**" in cell.source
        else:
            assert bool(cell.metadata.get("jupyter", {}).get("outputs_hidden")) == asks


# -- what makes them, on a small page --------------------------------------------------------

PAGE = r'''r"""
A page
======

.. note::

   A note.
"""

import matplotlib.pyplot as plt

verdict = 1 + 1 == 2
print("matches:", verdict)

# %%
# A section
# ---------
#
# And a figure.

_, ax = plt.subplots()
ax.set_title("a title")
plt.show()

# %%
# The end.

verdict
'''


@pytest.fixture
def page(tmp_path: Path) -> Path:
    script = tmp_path / "1_page.py"
    script.write_text(PAGE)
    return script


@needs_triton
def test_a_page_becomes_a_notebook_that_nbval_compares(page: Path, tmp_path: Path) -> None:
    assert not gpu_notebooks.is_fresh(page)
    gpu_notebooks.build(page)
    assert gpu_notebooks.is_fresh(page)
    assert {path.name for path in tmp_path.iterdir()} == {"1_page.py", "1_page.ipynb"}
    notebook = stored(page)
    first, second, third = code_cells(notebook)
    assert [cell.execution_count for cell in (first, second, third)] == [1, 2, 3]
    assert [text_of(output) for output in first.outputs] == ["matches: True\n"]
    assert "image/png" in second.outputs[0].data
    assert second.outputs[0].metadata == {}
    alt = {"mystnb": {"image": {"alt": "a title"}}}
    assert second.metadata == {"jupyter": {"source_hidden": True}, **alt}  # it draws, no more
    assert third.outputs[0].data == {"text/plain": "True"}
    assert "<strong>Note</strong>" in notebook.cells[0].source
    assert notebook.metadata[gpu_notebooks.METADATA].script == "1_page.py"

    path = gpu_notebooks.notebook_path(page)
    whole = path.read_text()
    edited = whole
    for old, new in [('"matches: True\\n"', '"matches: False\\n"'), ('"True"', '"False"')]:
        assert whole.count(old) == 1
        edited = edited.replace(old, new)
    path.write_text(edited)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path)]
    command += ["-p", "no:cacheprovider", "--nbval", "--nbval-current-env", str(path)]
    run = subprocess.run(command, env=gpu_notebooks.environment(), capture_output=True, text=True)
    assert "2 failed, 1 passed" in run.stdout, run.stdout + run.stderr

    page.write_text(PAGE.replace("1 + 1", "1 + 2"))
    assert not gpu_notebooks.is_fresh(page)


@needs_triton
def test_new_words_keep_the_outputs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands around code changes nothing that it prints."""
    gpu_notebooks.build(page)
    before = stored(page)
    gpu_notebooks.build(page)
    assert stored(page) == before
    page.write_text(PAGE.replace("The end", "An end").replace("And a figure.", "And.\n#\n# Two."))
    assert gpu_notebooks.is_fresh(page)
    monkeypatch.setattr(gpu_notebooks, "execute", None)
    gpu_notebooks.build(page)
    now = stored(page)
    assert [cell.source for cell in now.cells[:-1]] == [
        cell.source for cell in gpu_notebooks.cells(page)
    ]
    assert [cell.outputs for cell in code_cells(now)] == [
        cell.outputs for cell in code_cells(before)
    ]
    assert now.metadata == before.metadata


@needs_triton
def test_printed_source_is_new_without_a_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import inspect\n\nfrom lm_from_scratch.drawings import canvas\n\nseen = 1\n"
    page.write_text(f"{PAGE}\n# %%\n# On.\n\n{source}\n# %%\n# Its source.\n\n")
    with page.open("a") as file:
        file.write("print(inspect.getsource(canvas.tint))\n")
    gpu_notebooks.build(page)
    before = stored(page)
    *_, last = code_cells(before)
    assert "def tint(" in text_of(last.outputs[0])
    last.outputs[0].text = "def tint(): as it was\n"
    nbformat.write(before, gpu_notebooks.notebook_path(page))
    monkeypatch.setattr(gpu_notebooks, "execute", None)
    gpu_notebooks.build(page)
    *_, last = code_cells(stored(page))
    assert "def tint(colour" in text_of(last.outputs[0])


@needs_triton
@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("1 / 0", CellExecutionError, "ZeroDivisionError"),
        ("import warnings\nwarnings.warn('old')", ValueError, "^1_page.py.* wrote to stderr"),
        ("plt.plot([1])\nplt.show()", ValueError, "^1_page.py.* no title"),
        ("import os\nos._exit(1)", DeadKernelError, "Kernel died"),
        ("import time\ntime.sleep(600)", CellTimeoutError, "timed out"),
    ],
)
def test_a_page_with_a_fault_is_not_stored(
    monkeypatch: pytest.MonkeyPatch,
    page: Path,
    code: str,
    error: type[Exception],
    words: str,
) -> None:
    old = gpu_notebooks.notebook_path(page)
    old.write_text("old")
    page.write_text(PAGE + "\n# %%\n# More.\n\n" + code + "\n")
    monkeypatch.setattr(gpu_notebooks, "SECONDS_OF_A_CELL", 5)
    monkeypatch.setattr(pages, "gpu_scripts", lambda: [page])
    monkeypatch.setattr(sys, "argv", ["gpu_notebooks.py", "--force"])
    with pytest.raises(error, match=words):
        gpu_notebooks.main()
    assert old.read_text() == "old"
    assert len(list(page.parent.iterdir())) == 2


def test_new_measurements_make_a_notebook_old(
    monkeypatch: pytest.MonkeyPatch, page: Path, tmp_path: Path
) -> None:
    """What `roofline.show` prints and draws is another one then."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    found = gpu_notebooks.made_from(gpu_notebooks.cells(page))
    assert found["measurements"] == "none"
    notebook = nbformat.v4.new_notebook(metadata={gpu_notebooks.METADATA: found})
    nbformat.write(notebook, gpu_notebooks.notebook_path(page))
    assert gpu_notebooks.is_fresh(page)
    measurements = tmp_path / "tutorials" / "gpu" / "measurements.json"
    measurements.parent.mkdir(parents=True)
    measurements.write_text("{}")
    assert not gpu_notebooks.is_fresh(page)


def test_the_last_words_name_the_device() -> None:
    provenance = dict(device="NVIDIA H100", torch="2", triton="3", date="2026-01-01")
    assert gpu_notebooks.origin(provenance) == (
        "The outputs on this page come from the compiled kernels, on a GPU: NVIDIA H100."
        "\n\n```text\ntorch 2, triton 3, 2026-01-01\n```"
    )
    assert "interpreter" in gpu_notebooks.origin(
        {**provenance, "device": gpu_notebooks.INTERPRETER}
    )


def test_a_page_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_notebooks.py", "99_nothing"])
    with pytest.raises(SystemExit):
        gpu_notebooks.main()
    assert "no script 99_nothing" in capsys.readouterr().err
