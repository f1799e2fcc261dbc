"""Everything that only a GPU can show, in one command: `make gpu`.

The kernel tests run compiled, the machine checks a small run for stray accesses and races, the
pages print on the GPU what they printed on a CPU, every kernel is timed, and the notebooks are
executed and compared. What needs a package that is not installed is skipped, and named.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "tutorials" / "gpu"
#: What conftest.py imports; without them the tests that do not need it still run.
OF_CONFTEST = ("hypothesis", "tokenizers", "safetensors", "tqdm")
OF_NOTEBOOKS = ("nbformat", "nbclient", "ipykernel", "sphinx_gallery", "matplotlib")


@dataclass
class Stage:
    """A step: what it is called, the modules and programs it needs, and what runs it."""

    name: str
    needs: tuple[str, ...]
    run: Callable[[], bool]

    def missing(self) -> list[str]:
        return [n for n in self.needs if not (importlib.util.find_spec(n) or shutil.which(n))]


def environment(**variables: str) -> dict[str, str]:
    """That of a child process: it finds the package, and draws without a screen."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "MPLBACKEND": "agg", **variables}


def command(*words: str, **variables: str) -> Callable[[], bool]:
    """A child process in the repository's root; it passes if it exits with 0."""

    def run() -> bool:
        print("$", " ".join(words), flush=True)
        return subprocess.run(words, cwd=ROOT, env=environment(**variables)).returncode == 0

    return run


def kernel_tests() -> Callable[[], bool]:
    """Without what conftest.py imports, it and files with tiny models are left out, and named."""
    files = sorted((ROOT / "tests" / "kernels").glob("test_kernels_*.py"))
    options = ["-q"]
    if any(importlib.util.find_spec(name) is None for name in OF_CONFTEST):
        left_out = [path for path in files if "from tiny_models import" in path.read_text()]
        files = [path for path in files if path not in left_out]
        options.append("--noconftest")
        print("left out, they need tiny_models.py:", *(path.name for path in left_out))
    names = [path.relative_to(ROOT).as_posix() for path in files]
    return command(sys.executable, "-m", "pytest", *options, *names)


def code_and_text(notebook: Path) -> tuple[str, str]:
    """The code of a stored notebook, and the text that it has printed."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    printed = [o["text"] for cell in code for o in cell["outputs"] if o["output_type"] == "stream"]
    return "\n".join("".join(cell["source"]) for cell in code), "".join(map("".join, printed))


def number_and_letter(page: Path) -> tuple[int, str]:
    """The order of pages: 2, 6, 6a, 10."""
    digits = "".join(itertools.takewhile(str.isdigit, page.name))
    return int(digits), page.name


def pages(notebooks: Iterable[Path]) -> bool:
    """Whether the code of each page, as a plain script, prints here what its notebook has stored.
    Triton reads a kernel's source, so the script is a file."""
    good = True
    for notebook in notebooks:
        code, printed = code_and_text(notebook)
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, f"{notebook.stem}.py")
            script.write_text(code, encoding="utf-8")
            run = subprocess.run(
                [sys.executable, script],
                cwd=notebook.parent,
                env=environment(),
                capture_output=True,
                text=True,
            )
        if run.returncode:
            verdict = f"FAILED\n{run.stderr[-2000:]}"
        elif run.stdout != printed:
            verdict = f"prints something else than is stored:\n{run.stdout}"
        else:
            print(f"{notebook.stem}: prints what is stored", flush=True)
            continue
        good = False
        print(f"{notebook.stem}: {verdict}", flush=True)
    return good


def stages() -> list[Stage]:
    python = sys.executable
    sanitizer = ("compute-sanitizer", "--error-exitcode", "1", "--tool")
    smoke = (python, "tests/benchmarks/bench_kernels.py", "--smoke")
    nbval = (python, "-m", "pytest", "-q", "--nbval", "--nbval-current-env", "tutorials/gpu")
    # Each tensor has memory of its own, so that a step beyond it leaves what may be touched.
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    of_models = ("safetensors", "tokenizers", "tqdm")
    notebooks = sorted(PAGES.glob("[0-9]*.ipynb"), key=number_and_letter)
    return [
        Stage("kernel tests", ("pytest",), lambda: kernel_tests()()),
        Stage(
            "memcheck",
            ("compute-sanitizer", *of_models),
            command(*sanitizer, "memcheck", *smoke, **alone),
        ),
        Stage(
            "racecheck", ("compute-sanitizer", *of_models), command(*sanitizer, "racecheck", *smoke)
        ),
        Stage("pages as scripts", ("matplotlib", *of_models), lambda: pages(notebooks)),
        Stage("times", of_models, command(python, "tests/benchmarks/bench_kernels.py")),
        Stage("notebooks", OF_NOTEBOOKS, command(python, "docs/_ext", "gallery.gpu_notebooks")),
        Stage(
            "nbval",
            ("pytest", "nbval", *OF_NOTEBOOKS, *OF_CONFTEST),
            command(*nbval, MPLBACKEND="module://matplotlib_inline.backend_inline"),
        ),
    ]


def run(stages: Iterable[Stage]) -> bool:
    """Every stage, whether or not one before it failed; then a line for each."""
    summary, good = [], True
    for stage in stages:
        print(f"\n==> {stage.name}", flush=True)
        if missing := stage.missing():
            verdict = f"skipped: there is no {', '.join(missing)}"
            print(verdict)
        else:
            start = time.perf_counter()
            passed = stage.run()
            verdict = f"{'ok' if passed else 'FAILED'}, {time.perf_counter() - start:.0f} s"
            good = good and passed
        summary.append(f"{stage.name:18}{verdict}")
    print("\n==> summary", *summary, sep="\n")
    return good


def main() -> None:
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            sys.exit(f"make gpu needs {name}; {sys.executable} has none")
    import torch

    if not torch.cuda.is_available():
        sys.exit("make gpu needs a CUDA device; torch sees none. On a CPU: make test")
    # Set, it would make Triton interpret here, too.
    os.environ.pop("TRITON_INTERPRET", None)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    sys.exit(0 if run(stages()) else 1)


if __name__ == "__main__":
    main()
