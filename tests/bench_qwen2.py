"""Forward and backward of Qwen2 beside transformers', in time and memory: ``make bench``.

Both have the same weights and get the same batch; the loss is part of the step. Their steps
alternate, so that a slow moment of the machine meets all. Memory is the growth of a process of its
own during its first steps, because a process never gives its peak back.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lm_from_scratch.checkpoint import config_to_dict
from lm_from_scratch.loss import causal_lm_loss, chunked_causal_lm_loss
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.onednn import use_onednn_
from lm_from_scratch.train import autocast

#: rows, tokens in a row, and the model
SHAPES = {
    "10 M parameters": (8, 256, dict(
        vocab_size=8192, n_layer=10, n_head=8, n_kv_head=2, n_embd=256, intermediate_size=768,
    )),
    "one layer of Qwen2-0.5B and its head": (1, 512, dict(n_layer=1)),
}  # fmt: skip

KINDS = ("transformers", "ours", "ours, chunked loss", "ours, oneDNN")


def steps(shape: str, kinds: tuple[str, ...], dtype: str) -> dict[str, Callable[[], None]]:
    """One forward and backward pass of each kind."""
    from transformers import Qwen2Config as HFConfig
    from transformers import Qwen2ForCausalLM as HFModel

    B, T, sizes = SHAPES[shape]
    config = Qwen2Config(block_size=T, eos_token_id=None, **sizes)
    torch.manual_seed(0)
    idx = torch.randint(0, config.vocab_size, (B, T))
    targets = torch.full_like(idx, -100)
    targets[:, :-1] = idx[:, 1:]
    cpu = torch.device("cpu")
    made = {}
    for kind in kinds:
        torch.manual_seed(0)
        if kind == "transformers":
            theirs = HFModel(HFConfig(**config_to_dict(config), use_cache=False)).train()

            def step(model=theirs) -> None:
                model.zero_grad(set_to_none=True)
                with autocast(cpu, dtype):
                    loss = model(idx, labels=idx).loss
                loss.backward()

        else:
            ours = Qwen2ForCausalLM(config)
            if kind == "ours, oneDNN":
                use_onednn_(ours)
            chunked = kind == "ours, chunked loss"

            def step(model=ours, chunked=chunked) -> None:
                model.zero_grad(set_to_none=True)
                with autocast(cpu, dtype):
                    if chunked:
                        loss = chunked_causal_lm_loss(model.model(idx), model.head_weight, targets)
                    else:
                        loss = causal_lm_loss(model(idx), targets)
                loss.backward()

        made[kind] = step
    return made


def time_of(shape: str, dtype: str, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of every kind, and how often it fits into a step of transformers."""
    kinds = tuple(k for k in KINDS if dtype == "float32" or "oneDNN" not in k)
    made = steps(shape, kinds, dtype)
    seconds: dict[str, list[float]] = {kind: [] for kind in made}
    for number in range(rounds + 1):
        for kind, step in made.items():
            start = time.perf_counter()
            step()
            if number:  # the first round warms up
                seconds[kind].append(time.perf_counter() - start)
    rows = {}
    for kind, times in seconds.items():
        ratios = [b / a for a, b in zip(times, seconds["transformers"], strict=True)]
        rows[kind] = {
            "seconds": round(statistics.median(times), 4),
            "over_transformers": round(statistics.median(ratios), 2),
            "from": round(min(ratios), 2),
            "to": round(max(ratios), 2),
        }
    return rows


def memory_of(shape: str, kind: str, dtype: str) -> int:
    """MB by which a fresh process grows in three steps, weights and gradients not counted."""
    code = f"from bench_qwen2 import grow; grow({shape!r}, {kind!r}, {dtype!r})"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return int(found.stdout.split()[-1])


def grow(shape: str, kind: str, dtype: str) -> None:
    step = steps(shape, (kind,), dtype)[kind]
    model = step.__defaults__[0]  # type: ignore[attr-defined]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = peak_megabytes()
    for _ in range(3):
        step()
    print(peak_megabytes() - before)


def peak_megabytes() -> int:
    """The most memory that this process has held. (Linux; ``ru_maxrss`` would start at the
    parent's.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="steps of each model; default 7")
    parser.add_argument("--out", default="build/bench/qwen2.json")
    args = parser.parse_args()
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = f"{platform.machine()}, {torch.get_num_threads()} thread(s)"
    report: dict[str, object] = {"machine": machine, "torch": torch.__version__}
    for shape in SHAPES:
        for dtype in ("float32", "bfloat16"):
            rows = time_of(shape, dtype, args.rounds)
            for kind, row in rows.items():
                grown = sorted(memory_of(shape, kind, dtype) for _ in range(3))
                row["megabytes"] = grown[1]
                row["megabytes_from"], row["megabytes_to"] = grown[0], grown[2]
            report[f"{shape}, {dtype}"] = rows
            print(f"\n{shape}, {dtype}")
            for kind, row in rows.items():
                print(f"  {kind:20}" + ", ".join(f"{key} {value}" for key, value in row.items()))
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
