"""``convert``: a model in another dtype, or in files of another size.

A cache needs no such command: ``load_cache`` reads each file that ``save_cache`` ever wrote, and a
legacy cache, a tuple of tensors, has no file that can be read without unpickling it.
"""

import argparse
import re
from fractions import Fraction
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from lm_from_scratch.checkpoint.folders import local_folder
from lm_from_scratch.checkpoint.tensors import MAX_SHARD_BYTES
from lm_from_scratch.checkpoint.weights import load_checkpoint, save_pretrained
from lm_from_scratch.commands.generate import tokenizer_folder
from lm_from_scratch.commands.options import new_folder, not_empty
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.text.tokenizer_files import files_in, read_bytes, write_bytes
from lm_from_scratch.weights.quantize import quantized_weights

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def run(args: argparse.Namespace) -> int:
    """Write the model to a folder of its own."""
    folder = local_folder(args.model)
    out = new_folder(args.out, folder)
    checkpoint = load_checkpoint(folder)
    model = checkpoint.model
    was = dtype_of(model)
    if args.dtype:
        if quantized_weights(model):
            raise ValueError(
                f"{folder} has quantised weights, whose dtype is part of them: quantize --dtype "
                "makes them anew"
            )
        to_dtype(model, getattr(torch, args.dtype), folder, args.quiet)
    files = files_in(tokenizer_folder(folder))
    tokenizer = Tokenizer.load(files["tokenizer.json"]) if "tokenizer.json" in files else None
    save_pretrained(model, out, tokenizer, args.max_shard, checkpoint.published)
    if tokenizer is None:  # older files perhaps, vocab.json and merges.txt, which are not read here
        write_bytes(read_bytes(files), out)
    sizes = [file.stat().st_size for file in out.glob("*.safetensors")]
    print(
        f"model written to {out}: {dtype_of(model)}, was {was}; {sum(sizes)} bytes of weights in "
        f"{len(sizes)} file{'s' if len(sizes) > 1 else ''}"
    )
    return 0


def dtype_of(model: nn.Module) -> str:
    """The dtype that a model computes in."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def to_dtype(model: nn.Module, dtype: torch.dtype, folder: Path, quiet: bool) -> None:
    """Give all weights another dtype. Raises ``ValueError`` for one that is too large for it."""
    weights = [*model.named_parameters()]
    for name, weight in tqdm(weights, unit="weight", delay=1, disable=quiet):
        weight.data = weight.data.to(dtype)
        if not weight.isfinite().all():
            raise ValueError(
                f"{name} of {folder} has numbers that are not finite in {dtype_of(model)}"
            )


def size(text: str) -> int:
    """An option's value that must be a number of bytes, like 500M or 2GB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.upper())
    bytes_ = int(Fraction(found[1]) * UNITS[found[2]]) if found else 0
    if bytes_ < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 500M or 2GB")
    return bytes_


EXAMPLES = """examples
  python -m lm_from_scratch convert path/or/hub-name --dtype bfloat16 --out build/half
  python -m lm_from_scratch convert run/model --max-shard 200M --out build/parts
"""


def add_options(p: argparse.ArgumentParser) -> None:
    """A model, a folder for the new one, and what changes."""
    p.description = (
        "Write a model, or a classifier, in another dtype or in files of another size, with its\n"
        "tokenizer, its chat templates and all that its config files say; other files, a README\n"
        "say, stay behind. quantize makes weights of 8 or 4 bits."
    )
    p.epilog = EXAMPLES
    p.add_argument("model", type=not_empty, help="a folder, or a name on the hub")
    p.add_argument("--out", type=not_empty, required=True, help="folder of the new model")
    p.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32", "float64"],
        help="of the weights; default: as they are",
    )
    p.add_argument(
        "--max-shard",
        type=size,
        metavar="SIZE",
        default=MAX_SHARD_BYTES,
        help="largest file of weights, like 500M or 2GB (K is 1000; a tensor stays whole); "
        "default: 5GB",
    )
    p.add_argument("--quiet", action="store_true", help="no progress bar")
