"""What commands do to be fast here: measure, choose, and say so in one line."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lm_from_scratch.commands.options import SpeedOptions
from lm_from_scratch.commands.train_options import TrainOptions
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

#: More rows than this want no other layout.
MANY = 64


def make_fast(model: nn.Module, options: SpeedOptions, rows: int) -> str:
    """Lay out a model for inference as ``--layout`` says; a line about it, empty if nothing was
    done."""
    if options.layout == "off":
        return ""
    layout = lay_out_(model, rows, LAYOUTS if options.layout == "measured" else [options.layout])
    return f"{layout} (--layout off leaves them)" if layout.chosen else ""


def note(line: str) -> None:
    """Say a line beside the output, if there is a terminal."""
    if line and sys.stderr is not None and sys.stderr.isatty():
        print(line, file=sys.stderr)


def in_dtype(model: nn.Module, wanted: str, rows: int) -> None:
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


def choose_products(
    model: nn.Module, options: TrainOptions, begun: Mapping[str, Any], group: Processes
) -> Way:
    """The dtype of a run's matrix products, and the library that computes them: as the options say,
    else as the run has ``begun``, else as it is fastest here. The first process decides."""
    ways = possible_ways(options, begun)
    chosen, on_cpu = ways[0], torch.device(options.run.device).type == "cpu"
    new_in_bfloat16 = options.steps.dtype == "bfloat16" and not begun
    if group.rank == 0 and on_cpu and (len(ways) > 1 or new_in_bfloat16):
        times = time_products(model, options.steps.batch_size * options.steps.block_size)
        if able := {way: times[way] for way in ways if way in times}:
            chosen = simplest_fast(able)
            say_products(times, able, chosen)
    (number,) = group.total(TRAINING.index(chosen) if group.rank == 0 else 0)
    return TRAINING[int(number)]


def possible_ways(options: TrainOptions, begun: Mapping[str, Any] | None = None) -> list[Way]:
    """What the options, and a run that has ``begun``, leave to choose from. Raises ``ValueError``
    where that is nothing."""
    begun = begun or {}
    dtype = begun.get("dtype", "auto") if options.steps.dtype == "auto" else options.steps.dtype
    library = begun.get("library", "auto") if options.run.library == "auto" else options.run.library
    on_cpu = torch.device(options.run.device).type == "cpu"
    if options.run.library == "auto" and (not on_cpu or options.kernels):
        library = "torch"
    for other, so in (
        (f"--device {options.run.device}", not on_cpu),
        ("--kernels", options.kernels),
    ):
        if library == "onednn" and so:
            raise ValueError(f"--library onednn does not work with {other}")
    ways = [w for w in TRAINING if dtype in (w[0], "auto") and library in (w[1], "auto")]
    if not ways:
        raise ValueError(f"--library {library} is for --dtype float32, not {dtype}")
    return ways if on_cpu else ways[-1:]  # a GPU is faster in bfloat16


def say_products(times: Mapping[Way, float], able: Mapping[Way, float], chosen: Way) -> None:
    """One line: what multiplies, and what that brings or costs."""
    text = f"matrix products in {chosen[0]} by {chosen[1]}"
    if len(able) > 1:
        other = max((way for way in able if way != chosen), key=able.__getitem__)
        gain = able[other] / able[chosen]
        fast = f"{gain:.2f}x as fast as" if gain >= 1.01 else "about as fast as"
        text += f", {fast} in {other[0]} by {other[1]}"
    print(text)
    best = min(times, key=times.__getitem__)
    if chosen[0] != best[0] and len(able) == 1 and sys.stderr is not None:
        cost = times[chosen] / times[best]
        print(
            f"warning: on this processor products in {chosen[0]} take {cost:.1f} times as long as "
            f"in {best[0]}",
            file=sys.stderr,
        )
