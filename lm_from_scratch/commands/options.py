"""Options of a command, made from the fields of the dataclass that they fill."""

import argparse
import inspect
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import torch

from lm_from_scratch.checkpoint.folders import shipped
from lm_from_scratch.models.interface import CausalLM

KERNELS_HELP = "compute with Triton kernels, on a CUDA device"


def add_fields(
    p: argparse.ArgumentParser,
    config: type,
    names: Iterable[str],
    choices: Mapping[str, Collection[str]] | None = None,
    **defaults: Any,
) -> None:
    """Options for the fields ``names`` of a dataclass.

    Name, type and default are the field's. The help is the comment beside it, up to a bracket.
    ``choices`` are the words that a plain ``str`` may be. ``defaults`` are shown instead of the
    field's own; None shows none. What is not given is not in the parsed arguments, so that the
    dataclass decides.
    """
    comment = r"^    (\w+): .*?  # (.+?)(?: \(.*\))?$"
    text = dict(re.findall(comment, inspect.getsource(config), re.M))
    known = {field.name: field for field in fields(config)}
    for name in names:
        field = known[name]
        kind, *others = get_args(field.type) or (field.type,)  # of `Count | None`: Count
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind  # and of that: int
        help = text.get(name, "").replace("_", "-")
        if kind is bool:
            p.add_argument(option(name), dest=name, action="store_true", help=help)
            continue
        words: Any = (choices or {}).get(name)
        if isinstance(kind, str):  # Literal["a", "b"]
            kind, words = str, (kind, *others)
        default = defaults.get(name, field.default)
        if default not in (None, MISSING):
            help += f"; default: {default}"
        p.add_argument(
            option(name), dest=name, type=kind, choices=words, default=argparse.SUPPRESS, help=help
        )


def given(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """The fields of a dataclass that the command line says."""
    names = {field.name for field in fields(config)}
    return {name: value for name, value in vars(args).items() if name in names}


def option(name: str) -> str:
    """How the command line calls a value."""
    return "--galore-scale" if name == "scale" else "--" + name.replace("_", "-")


def not_empty(text: str) -> str:
    """An option's value that must not be empty: an empty path would be the folder one is in."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty name; a dot is the folder that you are in")
    return text


def positive(text: str) -> int:
    """An option's value that must be a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def device_named(name: str) -> str:
    """``name`` if torch has such a device here."""
    try:
        torch.zeros(1, device=name).item()  # of "meta", numbers cannot be read
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


def new_folder(out: str, source: str | Path | None = None) -> Path:
    """The folder of a new model. Raises ``ValueError`` for that of its ``source``, and for a name
    that models of the package have: a folder here would stand in their place."""
    if source is not None and os.path.realpath(source) == os.path.realpath(out):
        raise ValueError(f"--out {out} is the model itself; give another folder")
    if out in shipped():
        raise ValueError(f"--out {out}: a model of the package has that name; give another")
    return Path(out)


def lines_of(file: str) -> Iterator[str]:
    """The lines of a file; of ``-``, what is typed or piped. Raises ``ValueError`` for bytes that
    are no text."""
    try:
        if file == "-":
            first = sys.stdin.readline().removeprefix("\ufeff")  # which some programs put first
            yield from (line.rstrip("\n") for line in chain([first], sys.stdin) if line)
            return
        with open(Path(file), encoding="utf-8-sig") as lines:
            yield from (line.rstrip("\n") for line in lines)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error
