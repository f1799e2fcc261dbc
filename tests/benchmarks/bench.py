"""Every benchmark beside its peers, in one run: ``make bench``.

Writes a file for this processor into ``docs/benchmarks``, from which the site draws its page. A
finished benchmark is written at once: stop with Ctrl-C whenever you like, and go on with
``--resume``. ``make gpu`` times the kernels of the GPU; ``bench_galore_loss.py`` takes an hour, and
is run by hand.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure
from tqdm import tqdm

#: The function that yields the rows of each, in the order of the page.
BENCHMARKS = {
    "training": "bench_training.rows",
    "qwen2": "bench_qwen2.rows",
    "loss": "bench_loss.rows",
    "layers": "bench_layers.rows",
    "decoding": "bench_decoding.rows",
    "first_token": "bench_decoding.first_token",
    "context": "bench_decoding.context",
    "engine": "bench_engine.rows",
    "quantize": "bench_quantize.rows",
    "galore": "bench_galore.rows",
    "experts": "bench_experts.rows",
    "latent": "bench_latent.rows",
    "delta_rule": "bench_delta_rule.rows",
    "pages": "bench_pages.rows",
}
#: Their results are stored elsewhere.
BY_HAND = ("bench_galore_loss", "bench_kernels")


def run(
    names: Sequence[str], size: measure.Size, report: dict[str, Any], out: Path | None
) -> dict[str, Any]:
    """The rows of these benchmarks, added to the report, which is written after each."""
    with tqdm(names, position=0) as bar:
        for name in bar:
            bar.set_description(name)
            module, _, function = BENCHMARKS[name].partition(".")
            start, rows = time.perf_counter(), []
            for row in getattr(importlib.import_module(module), function)(size):
                rows.append(row)
                tqdm.write(line(row))
            measure.add(report, name, rows, time.perf_counter() - start)
            if out is not None:
                measure.write(report, out)
    return report


def line(row: measure.Row) -> str:
    """A row as a line of text."""
    if not row.rounds:
        return f"{row.setting}: {row.kind}: {row.note}"
    text = f"{row.setting}: {row.kind} {row.ours:g} {row.unit}, {row.peer} {row.theirs:g}: "
    text += "{:.2f}x ({:.2f} to {:.2f})".format(*row.ratio)
    if row.share:
        text += f", {row.share[0]:.0%} of the limit ({row.limit})"
    if row.target:
        text += f", target {row.target:g}x"
    if row.note:
        text += f" ({row.note})"
    return text


def started(args: argparse.Namespace, size: measure.Size, out: Path) -> dict[str, Any]:
    """A new report, or the stored one of this machine where results of it shall be kept."""
    report = measure.new_report(size)
    if out.is_file() and (args.resume or args.only):
        stored = measure.read(out)
        if measure.same_setup(stored, report):
            return stored
        print(f"{out} is of another machine, or of other versions: it begins anew")
    return report


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, help="measure these anew")
    parser.add_argument("--resume", action="store_true", help="measure what is not stored yet")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds and models, in build/bench"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only whether it runs")
    parser.add_argument("--out", type=Path, help="default in docs/benchmarks, or in build/bench")
    args = parser.parse_args(argv)
    size = measure.SMOKE if args.smoke else measure.QUICK if args.quick else measure.FULL
    out = args.out
    if out is None and size is measure.FULL:
        out = measure.stored(measure.new_report(size))
    elif out is None:
        out = measure.ROOT / "build" / "bench" / f"{size.name}.json"
    sys.path.append(str(measure.PEERS))
    report = started(args, size, out)
    names = args.only or list(BENCHMARKS)
    if args.resume:
        names = [name for name in names if name not in report["benchmarks"]]
    try:
        run(names, size, report, out)
    except KeyboardInterrupt:
        print("\nstopped: finished benchmarks are kept, and --resume goes on")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
