"""Decoding with quantised weights beside transformers and beside memory.

Fewer bytes mean a lower limit, which each row is measured against. All models have the same random
weights and take turns, as in ``bench_decoding.py``. A run reads a prompt, too, in which a quantised
weight is decoded as a whole.

A row's note says by how much the logits differ from those in float32, and where the time of one
step goes. The products with weights and attention are what torch's profiler counts for these
operators; the rest of the step, as it takes without a profiler, is everything else: norms,
activations, the cache, Python.
"""

import copy
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import measure
import torch
from bench_decoding import our_run, prompt, shapes, twins, weight_bytes
from measure import Row, Size, seconds_of
from peers import transformers_run
from torch.profiler import ProfilerActivity, profile

from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.generation.generate import decode, prefill
from lm_from_scratch.instruments.onednn import multiplies, use_packed_weights_
from lm_from_scratch.models.causal_lm import CausalLM, Config
from lm_from_scratch.weights.quantize import quantize_

PEERS = ("transformers fp32", "transformers bf16")
PRODUCTS = ("addmm", "mm", "mkldnn_linear", "_linear_pointwise", "int8pack_mm", "int4pack_mm")
PACKED = "bf16, packed"
AIMS = {("int8", PEERS[0]), ("int4", PEERS[1])}
#: shape, kind: over float32 for int8, over bfloat16 for int4
TARGETS = {
    ("GPT-2 small", "int8"): 3.0,
    ("GPT-2 small", "int4"): 4.4,
    ("Qwen2-0.5B", "int8"): 3.0,
    ("Qwen2-0.5B", "int4"): 3.0,
}


def models_of(config: Config) -> tuple[dict[str, CausalLM], dict[str, Any]]:
    """Ours and theirs by name, all with the same weights."""
    fp32, their_fp32 = twins(config, torch.float32)
    bf16, their_bf16 = twins(config, torch.bfloat16)
    int8, int4 = copy.deepcopy(bf16), copy.deepcopy(bf16)
    quantize_(int8, bits=8)
    quantize_(int4, bits=4)
    ours = {"fp32": fp32, "int8": int8, "int4": int4}
    if multiplies(torch.bfloat16):
        use_packed_weights_(bf16)
        ours = {"fp32": fp32, PACKED: bf16, "int8": int8, "int4": int4}
    return ours, dict(zip(PEERS, (their_fp32, their_bf16), strict=True))


def rows(size: Size) -> Iterator[Row]:
    n = 4 if size.smoke else 32
    for shape, config in shapes(size).items():
        if shape == "10 M parameters":
            continue
        ours, theirs = models_of(config)
        idx = prompt(config, 1)
        runs: dict[str, Callable[[], object]] = {
            k: transformers_run(m, idx, n) for k, m in theirs.items()
        }
        runs |= {k: our_run(model, idx, n) for k, model in ours.items() if k != "fp32"}
        limits = {"bandwidth": measure.bandwidth(size)}
        title = f"{shape}, batch 1"
        times = measure.in_turns(runs, size.rows(3), limits, title=title)
        if PACKED not in ours:
            yield from (measure.absent(title, PACKED, peer, "tokens/s") for peer in PEERS)
        exact = prefill(ours["fp32"], idx, cache_for(config.windows))
        for kind in list(runs)[2:]:
            model = ours[kind]
            logits = prefill(model, idx, cache_for(config.windows)).float()
            off = ((logits - exact).square().mean().sqrt() / exact.std()).item()
            note = f"logits differ from float32 by {off:.1%} (rms); {where(model, idx, size)}"
            for peer in PEERS:
                aim = TARGETS.get((shape, kind)) if (kind, peer) in AIMS else None
                yield times.row(
                    title, kind, peer, tokens=n, limit="bandwidth", work=weight_bytes(model) * n,
                    target=aim, note=note,
                )  # fmt: skip


def where(model: CausalLM, idx: torch.Tensor, size: Size) -> str:
    """Of one step after ``idx``, what the products with weights and attention take."""
    rounds = size.rows(3)
    cache = cache_for(model.config.windows, reserve=idx.shape[1] + 10 * rounds + 1)
    prefill(model, idx, cache)

    def step() -> None:
        decode(model, idx[:, -1], cache)

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
    return (
        f"of a step's {row['step']:.1f} ms, products take {row['products']:.1f} and attention "
        f"{row['attention']:.1f}"
    )
