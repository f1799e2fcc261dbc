"""``doctor``: what runs here, and how to fix what does not."""

import argparse
import importlib.metadata
import math
import os
import platform
import shutil
import sys
from pathlib import Path

import torch

from lm_from_scratch.checkpoint import (
    load_shipped,
)
from lm_from_scratch.generate import forward_seconds, generate_text


def doctor_command(args: argparse.Namespace) -> int:
    """Print what was found, and for each thing that is missing what to do about it."""
    problems = 0

    def report(ok: bool, what: str, fix: str = "") -> None:
        nonlocal problems
        problems += not ok
        print(f"{'ok  ' if ok else 'MEND'}  {what}" + (f"\n      -> {fix}" if not ok else ""))

    def note(what: str) -> None:
        print(f"note  {what}")

    version = platform.python_version()
    report(
        sys.version_info >= (3, 11),
        f"Python {version} on {platform.system()} {platform.machine()}",
        "install Python 3.11 or newer and make the environment again",
    )
    in_clone = (Path(__file__).resolve().parents[2] / "pyproject.toml").is_file()
    if not in_clone:
        note("the package alone; the pages, the site and the tests are in the repository")
    for package, why, extra in (
        ("torch", "everything", ""),
        ("tokenizers", "text to tokens", ""),
        ("safetensors", "weights on disk", ""),
        ("matplotlib", "figures", ""),
        ("jupyterlab", "notebooks (make lab)", "lab"),
        ("sphinx-gallery", "the site (make docs)", "docs"),
        ("nbval", "the notebook tests (make test)", "test"),
        ("transformers", "comparisons in tests and pages", "test"),
    ):
        try:
            report(True, f"{package} {importlib.metadata.version(package)}: {why}")
        except importlib.metadata.PackageNotFoundError:
            if not in_clone and extra:  # what these are for is in the repository alone
                continue
            target = f'".[{extra}]"' if extra else "."
            command = f"pip install -c constraints.txt -e {target}"
            report(False, f"{package} is missing: {why}", command)
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    report(release >= (2, 13), f"torch {torch.__version__} is 2.13 or newer", "make clean test")
    note(f"{os.cpu_count()} CPU cores, torch uses {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        note(f"GPU: {torch.cuda.get_device_name()}; use --device cuda")
    else:
        note("no CUDA GPU: every page runs on the CPU")
    try:
        triton = f"triton {importlib.metadata.version('triton')}: kernels "
        on_gpu = torch.cuda.is_available()
        note(triton + ("run (--kernels)" if on_gpu else "are interpreted by tests and notebooks"))
    except importlib.metadata.PackageNotFoundError:
        note("no triton, which exists for Linux: everything but the kernels works")
    a = torch.randn(64, 64)
    error = (a.bfloat16() @ a.bfloat16() - a @ a).abs().max().item()
    report(math.isfinite(error), "bfloat16 matrix products work (--dtype bfloat16)")
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    report(free > 3, f"{free:.0f} GiB free here", "the environment and the site need about 3 GiB")
    report(
        os.access(Path.cwd(), os.W_OK), f"{Path.cwd()} can be written", "change to another folder"
    )
    try:
        for name in ("qwen2-docs", "gpt2-docs"):
            model, tokenizer = load_shipped(name)
            text = "".join(generate_text(model, tokenizer, "Return the", 8))
            report(bool(text), f"{name} says: Return the{text!r}")
        total = sum(p.numel() for p in model.parameters())
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        note(f"it has {total} parameters, {trainable} of them trainable")
        idx, threads = torch.zeros(1, 10, dtype=torch.long), torch.get_num_threads()
        milliseconds = {}
        for n in {threads, 1}:
            torch.set_num_threads(n)
            milliseconds[n] = 1000 * forward_seconds(model, idx, repeats=9)
        torch.set_num_threads(threads)
        note(f"it reads 10 tokens in {milliseconds[threads]:.1f} ms with {threads} thread(s)")
        if milliseconds[threads] > 1.1 * milliseconds[1]:
            note(f"1 thread is faster, {milliseconds[1]:.1f} ms: export OMP_NUM_THREADS=1")
        elif threads > 1:
            report(True, f"more threads do not slow it down (1 thread: {milliseconds[1]:.1f} ms)")
    except ValueError as error_text:
        report(False, f"the shipped models: {error_text}", "install the package again")
    print("\nall well" if not problems else f"\n{problems} to mend")
    return 1 if problems else 0
