"""Everything that only a GPU can show, in one command: ``make gpu``.

The times that matter most come first, in minutes; then the kernel tests run compiled, the pages
print on the GPU what they printed on a CPU, every kernel is timed, the notebooks are executed and
compared, and the machine checks a small run for stray accesses and races. What needs a package that
is not installed is skipped, and named.

A stage that has passed is written down at once in ``build/gpu``: the same command goes on from
there, as long as device, versions and code are the same. ``--minutes 12`` begins no stage that may
take longer than what is left, and ``--dry-run`` runs every stage on a CPU, tiny.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "tutorials" / "gpu"
MEASUREMENTS = PAGES / "measurements.json"
TESTS = ROOT / "tests" / "kernels"
#: The rows of bench_kernels.py whose times matter most, in this order.
MAIN = (
    *("flash_attention", "linear_cross_entropy", "cross_entropy", "decoding", "int8", "matmul"),
    *("rms_norm", "rope", "swiglu"),
)
#: What conftest.py imports, among others; without them the tests that do not need it still run.
OF_MODELS = ("safetensors", "tokenizers", "tqdm")
OF_CONFTEST = ("hypothesis", *OF_MODELS)
OF_NOTEBOOKS = ("nbformat", "nbclient", "ipykernel", "sphinx_gallery", "matplotlib")


@dataclass
class Stage:
    """A command, what it needs (modules and programs), and the most seconds that it may take.

    It has to run again where a file of ``reads`` has changed since it passed.
    """

    name: str
    limit: float
    words: Sequence[str | Path]
    needs: Sequence[str] = ()
    reads: Sequence[Path] = ()
    variables: dict[str, str] = field(default_factory=dict)

    def missing(self) -> list[str]:
        return [n for n in self.needs if not (importlib.util.find_spec(n) or shutil.which(n))]

    def run(self) -> str:
        """``ok``, ``FAILED`` or ``TIMED OUT``. Nothing that it has started outlives it."""
        print("$", *self.words, flush=True)
        child = subprocess.Popen(
            self.words, cwd=ROOT, env=environment(**self.variables), process_group=0
        )
        try:
            return "FAILED" if child.wait(self.limit) else "ok"
        except subprocess.TimeoutExpired:
            return "TIMED OUT"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def environment(**variables: str) -> dict[str, str]:
    """That of a child: it finds the package, draws without a screen, and prints at once."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    of_all = {"PYTHONPATH": path, "MPLBACKEND": "agg", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **of_all, **variables}


def stages(folder: Path, dry: bool) -> list[Stage]:
    """In the order of what is worth most. A dry run has all of them, tiny."""
    python = sys.executable
    bench = [python, "tests/benchmarks/bench_kernels.py", *(["--smoke"] if dry else [])]
    kept = [*bench, "--resume", "--kept"]
    notebooks = sorted(PAGES.glob("[12]_*.ipynb" if dry else "[0-9]*.ipynb"))
    execute = [python, "docs/_ext", "gallery.gpu_notebooks", *(path.stem for path in notebooks)]
    into = ["--into", folder / "notebooks"] if dry else []
    nbval = [python, "-m", "pytest", "-q", "--nbval", "--nbval-current-env", *notebooks]
    of_nbval = ("pytest", "nbval", *OF_NOTEBOOKS, *OF_CONFTEST)
    inline = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    check = ["compute-sanitizer", "--error-exitcode", "1", "--tool"]
    smoke = [*bench[:2], "--smoke"]
    of_check = ("compute-sanitizer", *OF_MODELS)
    # Each tensor has memory of its own, so that a step beyond it leaves what may be touched.
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    main_times = [*kept, folder / "main_times.json", "--uncompiled", "--only", *MAIN]
    scripts = [python, __file__, "--pages", *notebooks]
    return [
        Stage("main times", 240, main_times),
        Stage("kernel tests", 240, kernel_tests(dry), ("pytest",)),
        Stage("pages as scripts", 180, scripts, ("matplotlib", *OF_MODELS)),
        Stage("times", 540, [*kept, folder / "times.json"], OF_MODELS),
        Stage("notebooks", 300, [*execute, *into], OF_NOTEBOOKS, (MEASUREMENTS,)),
        Stage("nbval", 300, nbval, of_nbval, (MEASUREMENTS,), inline),
        Stage("memcheck", 300, [*check, "memcheck", *smoke], of_check, variables=alone),
        Stage("racecheck", 300, [*check, "racecheck", *smoke], of_check),
    ]


def kernel_tests(dry: bool) -> list[str | Path]:
    """Without what conftest.py imports, it and files with tiny models are left out, and named."""
    files = sorted(TESTS.glob("test_kernels_s*.py" if dry else "test_kernels_*.py"))
    options: list[str | Path] = [sys.executable, "-m", "pytest", "-q"]
    if not all(map(importlib.util.find_spec, OF_CONFTEST)):
        left_out = [path for path in files if "from tiny_models import" in path.read_text()]
        files = [path for path in files if path not in left_out]
        options.append("--noconftest")
        print("left out, they need tiny_models.py:", *(path.name for path in left_out))
    return [*options, *files]


# -- pages as scripts ------------------------------------------------------------------------------


def code_and_text(notebook: Path) -> tuple[str, str]:
    """The code of a stored notebook, and the text that it has printed."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    printed = [o["text"] for cell in code for o in cell["outputs"] if o["output_type"] == "stream"]
    return "\n".join("".join(cell["source"]) for cell in code), "".join(map("".join, printed))


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
                [sys.executable, script], cwd=notebook.parent, env=environment(),
                capture_output=True, text=True,
            )  # fmt: skip
        verdict = "prints what is stored"
        if run.returncode:
            verdict = f"FAILED\n{run.stderr[-2000:]}"
        elif run.stdout != printed:
            verdict = f"prints something else than is stored:\n{run.stdout}"
        good = good and run.returncode == 0 and run.stdout == printed
        print(f"{notebook.stem}: {verdict}", flush=True)
    return good


# -- what is done ----------------------------------------------------------------------------------


def digest(texts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def about(device: str) -> dict[str, str]:
    """What must be the same for a run to go on: outputs of notebooks may change, code may not."""
    folders = [ROOT / name for name in ("lm_from_scratch", "tests", "docs/_ext")]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    notebooks = (code_and_text(path)[0].encode() for path in sorted(PAGES.glob("*.ipynb")))
    versions = {
        name: str(importlib.import_module(name).__version__) for name in ("torch", "triton")
    }
    code = digest([*(path.read_bytes() for path in files), *notebooks])
    return {"device": device, "code": code, "python": platform.python_version(), **versions}


class Done:
    """The stages that have passed, in a file that is whole at any time."""

    def __init__(self, folder: Path, about: dict[str, str], again: bool) -> None:
        self.path = folder / "done.json"
        self.stored: dict[str, Any] = {"about": about, "stages": {}}
        found = json.loads(self.path.read_text()) if self.path.is_file() else self.stored
        if again or found["about"] != about:
            print(f"{folder} is emptied: {'--again' if again else 'device or code have changed'}")
            shutil.rmtree(folder, ignore_errors=True)
        else:
            self.stored = found
        folder.mkdir(parents=True, exist_ok=True)

    def verdict(self, stage: Stage) -> str | None:
        known = self.stored["stages"].get(stage.name)
        return known["verdict"] if known and known["read"] == self.read(stage) else None

    def add(self, stage: Stage, verdict: str) -> None:
        self.stored["stages"][stage.name] = {"verdict": verdict, "read": self.read(stage)}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.stored, indent=1) + "\n")
        new.replace(self.path)

    def read(self, stage: Stage) -> str:
        return digest(path.read_bytes() for path in stage.reads if path.is_file())


def run(stages: Iterable[Stage], done: Done, minutes: float | None = None) -> bool:
    """Every stage that has not passed yet, whatever became of others; then a line for each."""
    summary, good = [], True
    start = time.monotonic()
    for stage in stages:
        print(f"\n==> {stage.name}", flush=True)
        left = float("inf") if minutes is None else 60 * minutes - (time.monotonic() - start)
        if before := done.verdict(stage):
            verdict = f"{before}, in a run before"
        elif missing := stage.missing():
            verdict = f"skipped: there is no {', '.join(missing)}"
        elif stage.limit > left:
            verdict = f"left out: it may take {stage.limit:.0f} s, and {left:.0f} s are left"
        else:
            begin = time.monotonic()
            result = stage.run()
            verdict = f"{result}, {time.monotonic() - begin:.0f} s"
            good = good and result == "ok"
            if result == "ok":
                done.add(stage, verdict)
        print(verdict, flush=True)
        summary.append(f"{stage.name:18}{verdict}")
    print("\n==> summary", *summary, sep="\n")
    return good


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--again", action="store_true", help="what has passed, too")
    parser.add_argument("--minutes", type=float, help="begin nothing that may take longer")
    parser.add_argument("--dry-run", action="store_true", help="every stage, tiny, on a CPU")
    parser.add_argument("--pages", nargs="+", type=Path, help="these notebooks as scripts alone")
    options = parser.parse_args(arguments)
    # Set, it would make Triton interpret on a GPU, too.
    os.environ.pop("TRITON_INTERPRET", None)
    if options.pages:
        sys.exit(not pages(options.pages))
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            sys.exit(f"make gpu needs {name}; {sys.executable} has none")
    device = "a dry run"
    if not options.dry_run:
        import torch

        if not torch.cuda.is_available():
            sys.exit("make gpu needs a CUDA device; torch sees none. On a CPU: GPU=--dry-run")
        device = torch.cuda.get_device_name()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a stage's processes end with this one
    folder = ROOT / "build" / ("gpu_dry_run" if options.dry_run else "gpu")
    found = about(device)
    print(*found.values())
    done = Done(folder, found, options.again)
    try:
        sys.exit(not run(stages(folder, options.dry_run), done, options.minutes))
    except KeyboardInterrupt:
        sys.exit("\nstopped: what has passed is kept, and the same command goes on")


if __name__ == "__main__":
    main()
