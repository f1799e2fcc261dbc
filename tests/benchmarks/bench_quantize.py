"""Decoding with quantised weights beside transformers and beside memory.

Fewer bytes mean a lower limit, which each row is measured against. All models have the same random
weights and take turns, as in ``bench_decoding.py``. A run reads a prompt, too. "int8" rounds
activations to 8 bits, row by row; its other parts compute in bfloat16, or in float32 where the row
says so. "weight only" leaves activations as they are.

A row's note says by how much the logits differ from those in float32, and where the time of one
step goes. The products with weights and attention are what torch's profiler counts for these
operators; the rest of the step, as it takes without a profiler, is everything else: norms,
activations, the cache, Python.
"""

import copy
import importlib.util
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
from lm_from_scratch.checkpoint.architectures import Config
from lm_from_scratch.generation.generate import decode, prefill
from lm_from_scratch.instruments.layout import lay_out_
from lm_from_scratch.instruments.onednn import multiplies
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.weights.packed_int8 import PackedInt8Weight
from lm_from_scratch.weights.quantize import quantize_, quantized_weights

PEERS = ("transformers fp32", "transformers bf16")
TORCHAO = "torchao int8, dynamic"
PRODUCTS = (
    "addmm", "mm", "mkldnn_linear", "_linear_pointwise", "int8pack_mm", "int4pack_mm", "int_mm",
    "_int_mm", "linear_with_input_q_dq",
)  # fmt: skip
PACKED, DYNAMIC, WEIGHT_ONLY = "bf16, packed", "int8", "int8, weight only"
AIMS = {(DYNAMIC, PEERS[0]), ("int4", PEERS[1])}
#: shape, rows, kind: over float32 for int8, over bfloat16 for int4
TARGETS = {
    ("GPT-2 small", 1, DYNAMIC): 3.0,
    ("GPT-2 small", 8, DYNAMIC): 3.3,
    ("GPT-2 small", 1, "int4"): 4.4,
    ("Qwen2-0.5B", 1, DYNAMIC): 3.0,
    ("Qwen2-0.5B", 1, "int4"): 3.0,
}


def models_of(config: Config) -> tuple[dict[str, CausalLM], dict[str, Any]]:
    """Ours and theirs by name, all with the same weights."""
    fp32, their_fp32 = twins(config, torch.float32)
    bf16, their_bf16 = twins(config, torch.bfloat16)
    ours = {"fp32": fp32}
    for kind, options in (
        (DYNAMIC, dict(bits=8)), (WEIGHT_ONLY, dict(bits=8, weight_only=True)),
        ("int4", dict(bits=4)),
    ):  # fmt: skip
        ours[kind] = copy.deepcopy(bf16)
        quantize_(ours[kind], **options)
    ours[DYNAMIC + ", fp32"] = copy.deepcopy(fp32)
    quantize_(ours[DYNAMIC + ", fp32"], bits=8)
    if multiplies(torch.bfloat16):
        lay_out_(bf16, layouts=["packed"])
        ours[PACKED] = bf16
    theirs = dict(zip(PEERS, (their_fp32, their_bf16), strict=True))
    if importlib.util.find_spec("torchao"):
        theirs[TORCHAO] = by_torchao(copy.deepcopy(their_fp32))
    return ours, theirs


def by_torchao(model: Any) -> Any:
    """Their model in float32, with 8-bit weights and activations by torchao."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig
    from torchao.quantization import quantize_ as theirs

    theirs(model, Int8DynamicActivationInt8WeightConfig())
    return model


def bytes_read(model: CausalLM) -> int:
    """As :func:`weight_bytes`, without what packing fills up and keeps for look-ups."""
    packed = [w for w in quantized_weights(model).values() if isinstance(w, PackedInt8Weight)]
    return weight_bytes(model) - sum(w.packed.nbytes - w.numel() for w in packed)


def rows(size: Size) -> Iterator[Row]:
    n = 4 if size.smoke else 32
    for shape, config in shapes(size).items():
        if shape == "10 M parameters":
            continue
        ours, theirs = models_of(config)
        for batch in (1, 8):
            yield from rows_of(shape, batch, ours, theirs, n if batch == 1 else n // 2, size)


def rows_of(
    shape: str, batch: int, ours: dict[str, CausalLM], theirs: dict[str, Any], n: int, size: Size
) -> Iterator[Row]:
    config = ours["fp32"].config
    idx = prompt(config, batch)
    runs: dict[str, Callable[[], object]] = {
        k: transformers_run(m, idx, n) for k, m in theirs.items()
    }
    runs |= {k: our_run(model, idx, n) for k, model in ours.items() if k != "fp32"}
    limits = {"bandwidth": measure.bandwidth(size)}
    title = f"{shape}, batch {batch}"
    times = measure.in_turns(runs, size.rows(3), limits, title=title)
    if PACKED not in ours:
        yield from (measure.absent(title, PACKED, peer, "tokens/s") for peer in PEERS)
    exact = prefill(ours["fp32"], idx, cache_for(config.windows))
    for kind, model in ours.items():
        if kind == "fp32":
            continue
        logits = prefill(model, idx, cache_for(config.windows)).float()
        off = ((logits - exact).square().mean().sqrt() / exact.std()).item()
        held = sum(p.nbytes for p in model.parameters()) / 1e6
        note = f"holds {held:.0f} MB; logits differ from float32 by {off:.1%} (rms); "
        note += where(model, idx, size)
        if kind == DYNAMIC and TORCHAO not in theirs:
            note += "; torchao is not installed here"
        for peer in theirs:
            if peer == TORCHAO and not kind.startswith(DYNAMIC):
                continue
            aim = TARGETS.get((shape, batch, kind)) if (kind, peer) in AIMS else None
            yield times.row(
                title, kind, peer, tokens=batch * n, limit="bandwidth", work=bytes_read(model) * n,
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
