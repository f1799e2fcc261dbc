"""The tensors of a folder: one ``safetensors`` file, or several and an index of them.

No file is ever unpickled: a safetensors file is numbers alone, while a pickle can run any program
when it is opened.
"""

import os
import re
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lm_from_scratch.checkpoint.folders import read_json, save_file, write_json
from lm_from_scratch.limits import shown

#: Constants that old checkpoints carry along: the causal triangle, the rotation's frequencies.
CONSTANTS = re.compile(r"(^|\.)(h\.\d+\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")

#: What stays in float32 at least, whatever the dtype of the weights: it moves in small steps.
PRECISE = re.compile(r"\.(e_score_correction_bias|ffn\.gate\.bias)$")

#: How files that are opened by unpickling end.
PICKLED = {".bin", ".pt", ".pth", ".ckpt"}

MAX_SHARD_BYTES = 5 * 10**9

DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of ``model.safetensors``, or of the shards that its index names; no constants.

    Raises ``ValueError`` for a folder without them, and for shards and an index that disagree.
    """
    index = folder / "model.safetensors.index.json"
    weight_map: dict[str, str] = {}
    if (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    elif index.is_file():
        weight_map = read_json(index).get("weight_map")  # type: ignore[assignment]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map that says where the tensors are")
        files = sorted({str(file) for file in weight_map.values()})
    else:
        raise ValueError(
            f"{folder} has neither model.safetensors nor {index.name}{pickled(folder)}"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        if Path(file).name != file or not os.path.isfile(folder / file):
            raise ValueError(f"{folder} has no shard {shown(file)}, which its index names")
        for name, tensor in read_file(folder / file).items():
            if name in tensors:
                raise ValueError(f"{folder / file} holds {shown(name)}, as another shard does")
            if (place := weight_map.get(name, file)) != file:
                raise ValueError(f"{index} places {shown(name)} in {place}, but {file} holds it")
            tensors[name] = tensor
    if missing := [name for name in weight_map if name not in tensors]:
        raise ValueError(f"{index} names {shown(missing[0])}, which no shard holds")
    return {name: tensor for name, tensor in tensors.items() if not CONSTANTS.search(name)}


def pickled(folder: Path) -> str:
    """What to do where a folder's weights are in files that are unpickled."""
    names = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
    if not names:
        return " (pickled weights, *.bin, are not read)"
    return (
        f": {shown(names[0])} is pickled and could run any program; in transformers "
        "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder) writes safetensors"
    )


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file. Raises ``ValueError`` for a missing or damaged one."""
    if not path.exists():
        raise ValueError(f"{path.parent} has no {path.name}")
    try:
        with open(path, "rb"):  # a missing permission is called one
            pass
        return load_file(path)
    except PermissionError:
        raise
    except (SafetensorError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is damaged or incomplete: {reason}") from error


def to_one_dtype(tensors: Mapping[str, Tensor], contents: Mapping[str, Any]) -> dict[str, Tensor]:
    """Floating-point tensors of several dtypes in one: the one that ``config.json`` names, as
    ``transformers`` takes it, else the widest. Of one dtype they stay as they are. The correction
    biases of experts come in float32 at least."""
    precise = {
        name: tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        for name, tensor in tensors.items()
        if PRECISE.search(name)
    }
    others = {n: t for n, t in tensors.items() if t.is_floating_point() and n not in precise}
    dtypes = {tensor.dtype for tensor in others.values()}
    if len(dtypes) < 2 or not dtypes <= DTYPES:
        return {**tensors, **precise}
    named = f"torch.{contents.get('dtype') or contents.get('torch_dtype')}"
    dtype = next((d for d in DTYPES if str(d) == named), reduce(torch.promote_types, dtypes))
    return {**tensors, **precise, **{name: tensor.to(dtype) for name, tensor in others.items()}}


def write_tensors(
    tensors: dict[str, Tensor], folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """One safetensors file, or several of at most ``max_shard_bytes`` and an index of them."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)
