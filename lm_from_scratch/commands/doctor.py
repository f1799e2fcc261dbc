"""``doctor``: what runs here, and how to fix what does not."""

import importlib.metadata
import math
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.commands.fields import NoOptions
from lm_from_scratch.generation.generate import forward_seconds
from lm_from_scratch.generation.text import generate_text
from lm_from_scratch.instruments.layout import time_products
from lm_from_scratch.models.interface import CausalLM

#: What is installed, for what, and the extra that brings it; without one, the package itself does.
PACKAGES = (
    ("torch", "everything", ""),
    ("tokenizers", "text to tokens", ""),
    ("safetensors", "weights on disk", ""),
    ("matplotlib", "figures", ""),
    ("jupyterlab", "notebooks (make lab)", "lab"),
    ("transformers", "comparisons in tests and pages", "lab"),
    ("sphinx-gallery", "the site (make docs)", "docs"),
    ("nbval", "the notebook tests (make test)", "test"),
)


@dataclass
class Finding:
    """Something ``ok``, or not and then to ``fix``; None is neither, a note."""

    ok: bool | None
    what: str
    fix: str = ""

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FIX ", None: "note"}[self.ok]
        return f"{mark}  {self.what}" + (f"\n      -> {self.fix}" if self.ok is False else "")


def note(what: str) -> Finding:
    """A finding that needs no judgement."""
    return Finding(None, what)


def run(options: NoOptions) -> int:
    """Print what was found, and for each thing that is missing what to do about it."""
    problems = 0
    for part in (software, machine, models):
        for finding in part():
            print(finding)
            problems += finding.ok is False
    print("\nall well" if not problems else f"\n{problems} to fix")
    return 1 if problems else 0


def software() -> Iterator[Finding]:
    """Python and the packages."""
    system = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    fix = "install Python 3.11 or newer and make the environment again"
    yield Finding(sys.version_info >= (3, 11), system, fix)
    in_clone = (Path(__file__).resolve().parents[2] / "pyproject.toml").is_file()
    if not in_clone:
        yield note("the package alone; the pages, the site and the tests are in the repository")
    for package, why, extra in PACKAGES:
        try:
            yield Finding(True, f"{package} {importlib.metadata.version(package)}: {why}")
        except importlib.metadata.PackageNotFoundError:
            if in_clone or not extra:  # what extras are for is in the repository alone
                target = f'".[{extra}]"' if extra else "."
                command = f"pip install -c constraints.txt -e {target}"
                yield Finding(False, f"{package} is missing: {why}", command)
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    is_new = f"torch {torch.__version__} is 2.13 or newer"
    yield Finding(release >= (2, 13), is_new, "make clean test")


def machine() -> Iterator[Finding]:
    """Processor, GPU and disk."""
    yield note(f"{os.cpu_count()} CPU cores, torch uses {torch.get_num_threads()} threads")
    gpu = torch.cuda.is_available()
    if gpu:
        yield note(f"GPU: {torch.cuda.get_device_name()}; use --device cuda")
    else:
        yield note("no CUDA GPU: every page runs on the CPU")
    try:
        kernels = "run (--kernels)" if gpu else "are interpreted by tests and notebooks"
        yield note(f"triton {importlib.metadata.version('triton')}: kernels {kernels}")
    except importlib.metadata.PackageNotFoundError:
        yield note("no triton, which exists for Linux: everything but the kernels works")
    a = torch.randn(64, 64)
    error = (a.bfloat16() @ a.bfloat16() - a @ a).abs().max().item()
    yield Finding(math.isfinite(error), "bfloat16 matrix products work (--dtype bfloat16)")
    layer = torch.nn.Linear(1024, 1024)
    rates = [
        f"{dtype} by {library} {6 * 128 * 1024**2 / seconds / 1e9:.0f}"
        for (dtype, library), seconds in time_products(layer, 128).items()
    ]
    yield note(f"GFLOP/s of matrix products in training: {', '.join(rates)}")
    here = Path.cwd()
    free = shutil.disk_usage(here).free / 2**30
    fix = "the environment and the site need about 3 GiB"
    yield Finding(free > 3, f"{free:.0f} GiB free here", fix)
    yield Finding(os.access(here, os.W_OK), f"{here} can be written", "change to another folder")


def models() -> Iterator[Finding]:
    """The models that ship, and how fast one is here."""
    try:
        for name in ("qwen2-docs", "gpt2-docs"):
            model, tokenizer = load_shipped(name)
            text = "".join(generate_text(model, tokenizer, "Return the", 8))
            yield Finding(bool(text), f"{name} says: Return the{text!r}")
        total = sum(p.numel() for p in model.parameters())
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        yield note(f"it has {total} parameters, {trainable} of them trainable")
        yield from speed(model)
    except ValueError as error:
        yield Finding(False, f"the shipped models: {error}", "install the package again")


def speed(model: CausalLM) -> Iterator[Finding]:
    """The time of a forward pass, with all threads and with one."""
    idx, threads = torch.zeros(1, 10, dtype=torch.long), torch.get_num_threads()
    milliseconds = {}
    for n in {threads, 1}:
        torch.set_num_threads(n)
        milliseconds[n] = 1000 * forward_seconds(model, idx, repeats=9)
    torch.set_num_threads(threads)
    yield note(f"it reads 10 tokens in {milliseconds[threads]:.1f} ms with {threads} thread(s)")
    if milliseconds[threads] > 1.1 * milliseconds[1]:
        yield note(f"1 thread is faster, {milliseconds[1]:.1f} ms: export OMP_NUM_THREADS=1")
    elif threads > 1:
        alone = f"1 thread: {milliseconds[1]:.1f} ms"
        yield Finding(True, f"more threads do not slow it down ({alone})")
