"""``convert``: a model in another dtype, in files of another size, or with its adapter added.

A cache needs no such command: ``load_cache`` reads each file that ``save_cache`` ever wrote, and a
legacy cache, a tuple of tensors, has no file that can be read without unpickling it.
"""

from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from lm_from_scratch.checkpoint.folders import ADAPTER, local_folder
from lm_from_scratch.checkpoint.weights import save_pretrained
from lm_from_scratch.commands.loading import new_folder, tokenizer_folder
from lm_from_scratch.commands.options import ConvertOptions
from lm_from_scratch.interop.peft import load_with_adapter
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.text.tokenizer_files import files_in, read_bytes, write_bytes
from lm_from_scratch.weights.quantize import quantized_weights


def run(options: ConvertOptions) -> int:
    """Write the model to a folder of its own."""
    folder = local_folder(options.model)
    out = new_folder(options.out, folder)
    if (folder / ADAPTER).is_file() != options.merge:
        reason = "has no adapter to --merge" if options.merge else (
            "has an adapter: --merge adds it to the weights"
        )  # fmt: skip
        raise ValueError(f"{folder} {reason}")
    checkpoint = load_with_adapter(folder)
    model = checkpoint.model
    was = dtype_of(model)
    if options.dtype:
        if quantized_weights(model):
            raise ValueError(
                f"{folder} has quantised weights, whose dtype is part of them: quantize --dtype "
                "makes them anew"
            )
        to_dtype(model, getattr(torch, options.dtype), folder, options.quiet)
    files = files_in(tokenizer_folder(folder))
    tokenizer = Tokenizer.load(files["tokenizer.json"]) if "tokenizer.json" in files else None
    save_pretrained(model, out, tokenizer, options.max_shard, checkpoint.published)
    if tokenizer is None:  # older files perhaps, vocab.json and merges.txt
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
