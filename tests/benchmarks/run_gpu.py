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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "tutorials" / "gpu"
MEASUREMENTS = PAGES / "measurements.json"
PROCESSES = str(min(8, os.cpu_count() or 1))
#: The rows of bench_kernels.py whose times matter most, in this order.
MAIN = (
    *("flash_attention", "linear_cross_entropy", "cross_entropy", "decoding", "int8", "matmul"),
    *("rms_norm", "rope", "swiglu"),
)
OF_MODELS = ("safetensors", "tokenizers", "tqdm")
OF_PAGES = ("matplotlib", *OF_MODELS)
OF_NOTEBOOKS = ("nbformat", "nbclient", "ipykernel", "sphinx_gallery", *OF_PAGES)


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

    def read(self) -> str:
        return digest(path.read_bytes() for path in self.reads if path.is_file())

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


def digest(texts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


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
    main_times = [*kept, folder / "main_times.json", "--uncompiled", "--only", *MAIN]
    # Compiling takes most of the time. The plugin of that name warns of processes, an error here.
    tests = [python, "-m", "pytest", "-q", "-p", "no:nbval", "-p", "no:benchmark"]
    if importlib.util.find_spec("xdist"):
        tests += ["-n", PROCESSES, "--dist", "worksteal"]
    kernels = sorted((ROOT / "tests" / "kernels").glob(f"test_kernels_{'s' * dry}*.py"))
    notebooks = sorted(PAGES.glob("[12]_*.ipynb" if dry else "[0-9]*.ipynb"))
    execute = [python, "docs/_ext", "gallery.gpu_notebooks", *(path.stem for path in notebooks)]
    into = ["--into", folder / "notebooks"] if dry else []
    scripts = [python, __file__, "--pages", *notebooks]
    nbval = [python, "-m", "pytest", "-q", "--nbval", "--nbval-current-env", *notebooks]
    inline = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    check = ["compute-sanitizer", "--error-exitcode", "1", "--tool"]
    smoke = [*bench[:2], "--smoke"]
    of_check = (check[0], *OF_MODELS)
    # Each tensor has memory of its own, so that a step beyond it leaves what may be touched.
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return [
        Stage("main times", 240, main_times),
        Stage("kernel tests", 240, [*tests, *kernels], ("pytest", "hypothesis", *OF_MODELS)),
        Stage("pages as scripts", 180, scripts, OF_PAGES),
        Stage("times", 540, [*kept, folder / "times.json"], OF_MODELS),
        Stage("notebooks", 300, [*execute, *into], OF_NOTEBOOKS, (MEASUREMENTS,)),
        Stage("nbval", 300, nbval, ("pytest", "nbval", *OF_PAGES), (MEASUREMENTS,), inline),
        Stage("memcheck", 300, [*check, "memcheck", *smoke], of_check, variables=alone),
        Stage("racecheck", 300, [*check, "racecheck", *smoke], of_check),
    ]


# -- pages as scripts ------------------------------------------------------------------------------


def code_and_text(notebook: Path) -> tuple[str, str]:
    """The code of a stored notebook, and the text that it has printed."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    printed = [o["text"] for cell in code for o in cell["outputs"] if o["output_type"] == "stream"]
    return "\n".join("".join(cell["source"]) for cell in code), "".join(map("".join, printed))


def pages(notebooks: Sequence[Path]) -> bool:
    """Whether each page, as a plain script, prints here what its notebook has stored."""
    good = True
    with ThreadPoolExecutor(int(PROCESSES)) as pool:
        for notebook, problem in zip(notebooks, pool.map(problem_of, notebooks), strict=True):
            print(f"{notebook.stem}: {problem or 'prints what is stored'}", flush=True)
            good = good and not problem
    return good


def problem_of(notebook: Path) -> str:
    """Triton reads a kernel's source, so the script is a file."""
    code, printed = code_and_text(notebook)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, f"{notebook.stem}.py")
        script.write_text(code, encoding="utf-8")
        run = subprocess.run(
            [sys.executable, script], cwd=notebook.parent, env=environment(),
            capture_output=True, text=True,
        )  # fmt: skip
    if run.returncode:
        return f"FAILED\n{run.stderr[-2000:]}"
    return "" if run.stdout == printed else f"prints something else than is stored:\n{run.stdout}"


# -- what is done ----------------------------------------------------------------------------------


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
    """The stages that have passed, in a file that is whole at any time. What else is in its folder,
    such as rows of times, belongs to it: all goes where device, versions or code are others."""

    def __init__(self, folder: Path, about: dict[str, str], again: bool) -> None:
        self.path, self.about = folder / "done.json", about
        self.stages: dict[str, list[str]] = {}
        found = json.loads(self.path.read_text()) if self.path.is_file() else {"about": {}}
        if again or found["about"] != about:
            print(f"{folder} begins anew", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
        else:
            self.stages = found["stages"]
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"about": self.about, "stages": self.stages}, indent=1) + "\n")
        new.replace(self.path)

    def verdict(self, stage: Stage) -> str | None:
        verdict, read = self.stages.get(stage.name, (None, None))
        return verdict if read == stage.read() else None

    def add(self, stage: Stage, verdict: str) -> None:
        self.stages[stage.name] = [verdict, stage.read()]
        self.write()


def run(stages: Iterable[Stage], done: Done, end: float = float("inf")) -> bool:
    """Every stage that has not passed yet, whatever became of others; then a line for each."""
    summary, good = [], True
    for stage in stages:
        print(f"\n==> {stage.name}", flush=True)
        left = end - time.monotonic()
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
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--again", action="store_true", help="what has passed, too")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin nothing that may take longer"
    )
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
    if options.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
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
        passed = run(stages(folder, options.dry_run), done, start + 60 * options.minutes)
    except KeyboardInterrupt:
        sys.exit("\nstopped: what has passed is kept, and the same command goes on")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
