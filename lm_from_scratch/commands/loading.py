"""What several commands read: a model's folder and tokenizer, lines of text, a device."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

import torch

from lm_from_scratch.checkpoint.architectures import Config
from lm_from_scratch.checkpoint.folders import shipped
from lm_from_scratch.checkpoint.state import checkpoints
from lm_from_scratch.files import as_utf8, check_zeros, naming, open_text
from lm_from_scratch.interop.peft import base_folder
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.text.tokenizer import Tokenizer


@contextmanager
def about(what: str, more: str = "") -> Iterator[None]:
    """In the block, a ``ValueError`` is about ``what``, and ends with ``more``."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}{more}") from error


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
    with as_utf8(file), naming(file), ExitStack() as stack:
        if file == "-":
            first = sys.stdin.readline().removeprefix("\ufeff")  # which some programs put first
            lines: Iterator[str] = (line for line in chain([first], sys.stdin) if line)
        else:
            lines = stack.enter_context(open_text(file))
        for line in lines:
            check_zeros(line, file)
            yield line.rstrip("\n")


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a model."""
    return Tokenizer.load(tokenizer_folder(folder))


def tokenizer_folder(folder: Path) -> Path:
    """The folder of a model's tokenizer, which a run keeps beside its checkpoints, and an adapter
    may leave to its base."""
    if (folder / "tokenizer.json").is_file():
        return folder
    run = folder.resolve().parent
    return run if folder.resolve() in checkpoints(run) else base_folder(folder)


def check_together(tokenizer: Tokenizer, config: Config, folder: Path) -> None:
    """Raises ``ValueError`` for a tokenizer that gives a text tokens without a row in the model. A
    special token that no text begins or ends with, as for padding, may lie above the rows."""
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {token for token, name in added.items() if name.special}
    used = {*tokenizer.backend.get_vocab().values()} - special
    used |= {*chain(*tokenizer.around), tokenizer.eos_token_id or 0}
    if max(used) >= config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {max(used) + 1} tokens, the model "
            f"{config.vocab_size}: they do not belong together"
        )
