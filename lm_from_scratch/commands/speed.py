"""What commands do to be fast here: measure, choose, and say so in one line."""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lm_from_scratch.instruments.layout import (
    LAYOUTS,
    TRAINING,
    Way,
    faster_dtype,
    lay_out_,
    simplest_fast,
    time_products,
)
from lm_from_scratch.runs.distributed import Processes
from lm_from_scratch.weights.quantize import quantized_weights

# ------------------------------------------------------------------------------- inference


def add_layout_options(p: argparse.ArgumentParser) -> None:
    """``--dtype`` and ``--layout`` of a model that answers."""
    p.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="auto: float32, or bfloat16 if the model is stored so and is measured to be faster; "
        "default: auto",
    )
    p.add_argument(
        "--layout",
        choices=["measured", *LAYOUTS, "off"],
        default="measured",
        help="how weights lie in memory: what is measured to be the fastest, or one for all, or "
        "off: as they come; default: measured",
    )


def make_fast(model: nn.Module, args: argparse.Namespace, rows: int = 1) -> None:
    """Lay out a model for inference as ``--layout`` says, and say how on stderr."""
    if args.layout == "off" or args.device != "cpu":
        return
    layout = lay_out_(model, rows, LAYOUTS if args.layout == "measured" else [args.layout])
    if layout.chosen and sys.stderr is not None:
        print(f"{layout} (--layout)", file=sys.stderr)


def in_dtype(model: nn.Module, wanted: str, rows: int = 1) -> None:
    """Put a model into the dtype that is ``wanted``: with ``auto`` float32, or bfloat16 if the
    model is stored in it and multiplies faster so."""
    if quantized_weights(model):  # whose kernels want the dtype of the file
        return
    dtype = torch.bfloat16 if wanted == "bfloat16" else torch.float32
    stored = {p.dtype for p in model.parameters()}
    if wanted == "auto" and stored == {torch.bfloat16}:
        dtype = faster_dtype(model, rows)
    model.to(dtype)


# -------------------------------------------------------------------------------- training


def add_products_options(p: argparse.ArgumentParser) -> None:
    """``--dtype`` and ``--library``."""
    dtypes, libraries = (list(dict.fromkeys(words)) for words in zip(*TRAINING, strict=True))
    p.add_argument(
        "--dtype",
        choices=["auto", *dtypes],
        default=argparse.SUPPRESS,
        help="of the matrix products; auto: what is measured to be faster; default: float32",
    )
    p.add_argument(
        "--library",
        choices=["auto", *libraries],
        default="auto",
        help="of float32 products on a CPU; default: auto, what is measured to be faster",
    )


def choose_products(
    model: nn.Module, args: argparse.Namespace, begun: Mapping[str, Any], group: Processes
) -> tuple[str, str]:
    """The dtype of a run's matrix products, and the library that computes them: as the options say,
    else as the run has ``begun``, else as it is fastest here. The first process decides."""
    said = [
        value if value != "auto" else begun.get(name, "auto")
        for name, value in (("dtype", args.dtype), ("library", args.library))
    ]
    ways = [
        way
        for way in TRAINING
        if all(word in (part, "auto") for word, part in zip(said, way, strict=True))
    ]
    if not ways:
        raise ValueError(f"--library {said[1]} is for --dtype float32, not {said[0]}")
    on_cpu = torch.device(args.device).type == "cpu"
    if not on_cpu or args.kernels:
        if args.library == "onednn":
            other = f"--device {args.device}" if not on_cpu else "--kernels"
            raise ValueError(f"--library onednn does not work with {other}")
        ways = [("bfloat16", "torch")] if said[0] == "auto" else [(said[0], "torch")]
    chosen = ways[0]
    asked_for_bfloat16 = chosen[0] == "bfloat16" and not begun
    if group.rank == 0 and on_cpu and (len(ways) > 1 or asked_for_bfloat16):
        times = time_products(model, args.batch_size * args.block_size)
        if able := {way: times[way] for way in ways if way in times}:
            chosen = simplest_fast(able)
        say_products(times, ways, chosen)
    (number,) = group.total(TRAINING.index(chosen) if group.rank == 0 else 0)
    return TRAINING[int(number)]


def say_products(times: Mapping[Way, float], ways: list[Way], chosen: Way) -> None:
    """One line: what multiplies, and what that brings or costs."""
    if chosen not in times:
        return
    text = f"matrix products: {chosen[0]} by {chosen[1]}"
    if len(ways) > 1:
        slowest = max((way for way in ways if way in times), key=times.__getitem__)
        text += f", {times[slowest] / times[chosen]:.2f}x as fast as {slowest[0]} by {slowest[1]}"
    print(text)
    best = min(times, key=times.__getitem__)
    if len(ways) == 1 and times[chosen] > 1.2 * times[best] and sys.stderr is not None:
        cost = times[chosen] / times[best]
        print(
            f"warning: --dtype {chosen[0]} is slow on this processor: its products take "
            f"{cost:.1f} times as long as in {best[0]}",
            file=sys.stderr,
        )
