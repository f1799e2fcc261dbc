"""Decoding with quantised weights beside transformers and beside memory: ``make bench``.

One token reads every weight once. Fewer bytes mean a lower limit, which each row of the table is
measured against, with the bandwidth of the same run. All models have the same random weights and
take turns, as in ``bench_decoding.py``; ratios are of neighbours, as a median and its range. A run
reads a prompt, too, in which a quantised weight is decoded as a whole.

The second table says where the time of one step goes. The products with weights and attention are
what torch's profiler counts for these operators; the rest of the step, as it takes without a
profiler, is everything else: norms, activations, the cache, Python.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_decoding import (
    PROMPT,
    SHAPES,
    bandwidth,
    in_turns,
    new_report,
    our_run,
    seconds_of,
    their_run,
    twins,
    weight_bytes,
)
from torch.profiler import ProfilerActivity, profile

from lm_from_scratch.cache import cache_for
from lm_from_scratch.generate import decode, prefill
from lm_from_scratch.models import CausalLM, Config
from lm_from_scratch.onednn import use_packed_weights_
from lm_from_scratch.quantize import quantize_

PEERS = ("transformers fp32", "transformers bf16")
PRODUCTS = ("addmm", "mm", "mkldnn_linear", "_linear_pointwise", "int8pack_mm", "int4pack_mm")


def models_of(config: Config, batch: int) -> tuple[dict[str, CausalLM], dict[str, Any]]:
    """Ours and theirs by name, all with the same weights."""
    fp32, their_fp32 = twins(config, torch.float32)
    bf16, their_bf16 = twins(config, torch.bfloat16)
    packed, int8, int4 = (copy.deepcopy(bf16) for _ in range(3))
    use_packed_weights_(packed, rows=batch)
    quantize_(int8, bits=8)
    quantize_(int4, bits=4)
    ours = {"fp32": fp32, "bf16": bf16, "bf16, packed": packed, "int8": int8, "int4": int4}
    return ours, dict(zip(PEERS, (their_fp32, their_bf16), strict=True))


def spread(values: Sequence[float]) -> list[float]:
    """Median, smallest and largest."""
    return [round(f(values), 3) for f in (statistics.median, min, max)]


def speed(
    ours: dict[str, CausalLM], theirs: dict[str, Any], idx: torch.Tensor, n: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Tokens a second of each, over transformers and as a share of its own limit."""
    runs: dict[str, Callable[[], object]] = {k: their_run(m, idx, n) for k, m in theirs.items()}
    runs |= {kind: our_run(model, idx, n) for kind, model in ours.items()}
    read = {kind: weight_bytes(model) for kind, model in ours.items()}
    read |= dict(zip(PEERS, (read["fp32"], read["bf16"]), strict=True))
    for run in runs.values():
        run()  # warms up
    seconds, bandwidths = in_turns(runs, rounds)
    rows: dict[str, dict[str, Any]] = {}
    for kind, times in seconds.items():
        pairs = zip(times, bandwidths, strict=True)
        rows[kind] = {
            "MB read": round(read[kind] / 1e6, 1),
            "tokens/s": spread([len(idx) * n / time for time in times]),
            "of the limit": spread([read[kind] / each * n / time for time, each in pairs]),
        }
        for peer in PEERS:
            ratios = [b / a for a, b in zip(times, seconds[peer], strict=True)]
            rows[kind][f"over {peer}"] = spread(ratios)
    return rows


def where(model: CausalLM, idx: torch.Tensor, rounds: int = 6) -> dict[str, float]:
    """Milliseconds of one step after ``idx``: in all, and of it in products and attention."""
    cache = cache_for(model.config.windows, reserve=idx.shape[1] + 10 * rounds + 1)
    prefill(model, idx, None, cache)

    def step() -> None:
        decode(model, idx[:, -1], None, cache)

    step()
    took: dict[str, list[float]] = {"step": [], "products": [], "attention": []}
    for _ in range(rounds):
        took["step"] += [1e3 * seconds_of(step) for _ in range(5)]
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(5):
                step()
        for part, names in (("products", PRODUCTS), ("attention", ("_scaled_dot_product",))):
            found = [
                event.self_cpu_time_total
                for event in profiled.key_averages()
                if event.key.split("::")[-1].removeprefix("_weight_").startswith(names)
            ]
            took[part].append(sum(found) / 5 / 1e3)
    row = {part: statistics.median(times) for part, times in took.items()}
    row["rest"] = row["step"] - row["products"] - row["attention"]
    row["limit"] = weight_bytes(model) / bandwidth() * 1e3
    return {part: round(time, 3) for part, time in row.items()}


def as_table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows in Markdown; of a spread, the median with its range."""

    def cell(value: Any) -> str:
        if not isinstance(value, list):
            return f"{value:g}"
        return "{:.3g} ({:.3g} to {:.3g})".format(*value)

    columns = list(next(iter(rows.values())))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for kind, row in rows.items():
        lines.append(f"| {kind} | " + " | ".join(cell(v) for v in row.values()) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each model; default 5")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a run; default 128")
    shapes = ["GPT-2 small", "Qwen2-0.5B"]
    parser.add_argument("--shapes", nargs="+", default=shapes, choices=SHAPES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--out", default="build/bench/quantize.json", help="and .md beside it")
    args = parser.parse_args()
    out = Path(args.out)
    report = new_report(out)
    text = [", ".join(f"{k} {v}" for k, v in report.items()) + " GB/s"]
    print(text[0])
    for shape in args.shapes:
        for batch in args.batches:
            config, title = SHAPES[shape], f"{shape}, batch {batch}"
            ours, theirs = models_of(config, batch)
            generator = torch.Generator().manual_seed(1)
            length = PROMPT + args.tokens // 2  # for the profile: the middle of a run
            idx = torch.randint(0, config.vocab_size, (batch, length), generator=generator)
            tables = {
                "": speed(ours, theirs, idx[:, :PROMPT], args.tokens, args.rounds),
                f", milliseconds of a step after {length} tokens": {
                    kind: where(model, idx) for kind, model in ours.items()
                },
            }
            for what, rows in tables.items():
                report[title + what] = rows
                text.append(f"{title}{what}\n\n{as_table(rows)}")
                print(f"\n{text[-1]}", flush=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    out.with_suffix(".md").write_text("\n\n".join(text) + "\n")
    print(f"\nwritten to {out} and {out.with_suffix('.md')}")


if __name__ == "__main__":
    main()
