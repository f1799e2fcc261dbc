"""What several commands read from their options."""

import argparse

import torch

from lm_from_scratch.models import CausalLM

KERNELS_HELP = "compute with Triton kernels, on a CUDA device"


def option(name: str) -> str:
    """How the command line calls a value."""
    return "--galore-scale" if name == "scale" else "--" + name.replace("_", "-")


def device_named(name: str) -> str:
    """``name`` if torch has such a device here."""
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name} cannot be used here: {reason}") from error
    return name


def use_kernels(model: CausalLM) -> None:
    """Make the model compute with Triton kernels, or say why it cannot."""
    try:
        from lm_from_scratch.kernels.model import use_kernels_
    except ImportError as error:
        raise ValueError(
            f"--kernels need Triton (pip install triton, on Linux): {error}"
        ) from error
    use_kernels_(model)


def positive(text: str) -> int:
    """An option's value that must be a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
