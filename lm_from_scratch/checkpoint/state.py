"""The state of a training run on disk: what the next step needs, and nothing else.

The folder of a run is never without a complete checkpoint, because each has a name of its own,
``step-NNNNNNNN``, and the one before the newest stays: a disk may damage what was written, which
the digests of all files tell. A run in several processes writes several files (torch's distributed
checkpoint, in the same format), and any number of processes reads them.
"""

import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lm_from_scratch.checkpoint.folders import (
    read_json,
    replace_folder,
    save_file,
    temporary_folder,
    write_json,
)
from lm_from_scratch.checkpoint.published import NOTHING, Published
from lm_from_scratch.checkpoint.tensors import write_tensors
from lm_from_scratch.checkpoint.weights import trained, write_config
from lm_from_scratch.files import sha256
from lm_from_scratch.models.heads import Classifier
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.optim.adamw import AdamW

#: What differs between two recipes, where the numbers say nothing to a reader.
DIFFERENCES = {
    "text": "the text, or its tokenizer, has changed since this run began",
    "reference": "the model that it is compared with has changed since this run began",
}


class Damaged(ValueError):
    """A checkpoint whose files are not those that were written."""


def save_training_state(
    folder: str | Path,
    model: CausalLM | Classifier,
    optimizer: AdamW,
    recipe: Mapping[str, Any],
    step: int,
    published: Published = NOTHING,
) -> None:
    """Write ``step-NNNNNNNN`` inside ``folder``: a model folder plus what training needs.

    The new checkpoint is complete before it gets its name, and all but one of the older ones are
    removed after that: a run that is killed at any moment leaves one that can be resumed.

    Frozen weights are not written: of a model that has any, the folder holds what is trained.
    """
    target = checkpoint_folder(folder, step)
    state = optimizer_tensors(model, optimizer)
    with temporary_folder(target) as temporary:
        if is_trained_whole(model):
            write_config(model, temporary, published)
            write_tensors(trained(model), temporary)
        else:
            state |= trained(model)
        save_file(state, temporary / "optimizer.safetensors")
        finish_checkpoint(temporary, target, recipe, step)


def checkpoint_folder(folder: str | Path, step: int) -> Path:
    """The folder of the checkpoint after ``step``, in the ``folder`` of the run."""
    return Path(folder) / f"step-{step:08}"


def is_trained_whole(model: nn.Module) -> bool:
    """Whether no weight is frozen."""
    return all(parameter.requires_grad for parameter in model.parameters())


def optimizer_tensors(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """The state of the optimizer: what it keeps of each weight, as ``KEY/NAME``."""
    names = {id(p): name for name, p in model.named_parameters()}
    state: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            values = optimizer.state.get(p) or optimizer.new_state(p, group)  # no gradient so far
            state |= {f"{key}/{names[id(p)]}": value.detach() for key, value in values.items()}
    return state


def finish_checkpoint(temporary: Path, target: Path, recipe: Mapping[str, Any], step: int) -> None:
    """Give a folder that holds all tensors its record and its name, and remove older ones, except
    for the one before."""
    digests = {file.name: sha256(file) for file in sorted(temporary.iterdir())}
    record = {"step": step, "recipe": recipe, "sha256": digests}
    write_json(temporary / "training.json", record)
    replace_folder(temporary, target)
    older = [path for path in checkpoints(target.parent) if path.name < target.name]
    for old in filter(is_ours, older[:-1]):
        shutil.rmtree(old, ignore_errors=True)
    for old in target.parent.glob(".step-*"):
        if re.fullmatch(r"\.step-\d{8}\.(tmp|old)", old.name):  # what a killed run left
            shutil.rmtree(old, ignore_errors=True)


def is_ours(checkpoint: Path) -> bool:
    """Whether nobody has put another file into a checkpoint."""
    try:
        written = {*read_json(checkpoint / "training.json")["sha256"], "training.json"}
    except (ValueError, KeyError, TypeError):
        return True  # a damaged one
    return {path.name for path in checkpoint.iterdir()} <= written


def check_digests(checkpoint: Path, digests: Mapping[str, str]) -> None:
    """Raises ``Damaged`` for the first file that is not as it was written."""
    for name, written in digests.items():
        if sha256(checkpoint / name) != written:
            raise Damaged(f"{checkpoint / name} is damaged: it is not what was written")


def read_shares(tensors: dict[str, Tensor], folder: Path, digests: Mapping[str, str]) -> None:
    """Fill the tensors, or the pieces of them that this process has, from all files of a folder.

    It does not matter how many processes wrote the files. Names, shapes and ``digests`` are
    compared before the first tensor is filled, and no piece may be missing. Raises ``ValueError``
    otherwise.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with open(file, "rb"), safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise Damaged(f"{file} is damaged or incomplete: {error}") from error
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    if wrong := sorted(set(metadata) ^ set(tensors))[:3]:
        raise ValueError(f"{folder} does not fit the model and its optimizer: {wrong}")
    for name, tensor in tensors.items():
        stored: Any = metadata[name]
        complete = sum(c.sizes.numel() for c in stored.chunks) == stored.size.numel()
        if stored.size != tensor.shape or not complete:
            raise ValueError(
                f"{folder} does not fit the model and its optimizer: the shapes differ, "
                f"{name} is {tuple(stored.size)}, not {tuple(tensor.shape)}"
                if complete
                else f"{folder} is incomplete: pieces of {name} are missing"
            )
    check_digests(folder, digests)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def checkpoints(folder: str | Path) -> list[Path]:
    """The complete checkpoints of a run, the newest last."""
    paths = Path(folder).glob("step-*")
    return sorted(p for p in paths if re.fullmatch(r"step-\d{8}", p.name) and p.is_dir())


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, or ``None``."""
    paths = checkpoints(folder)
    return paths[-1] if paths else None


def load_training_state(
    checkpoint: Path, model: CausalLM | Classifier, optimizer: AdamW, recipe: Mapping[str, Any]
) -> int:
    """Put the checkpoint into the model and the optimizer; return the number of its last step.

    The run that goes on must be the run that was begun: a different model, schedule or data order
    is refused. Raises ``ValueError`` with the first value that differs, and ``Damaged``, which is
    one, for files that are not as they were written.
    """
    try:
        record = read_json(checkpoint / "training.json")
    except ValueError as error:
        raise Damaged(str(error)) from error
    if not isinstance(record.get("recipe"), dict) or type(record.get("step")) is not int:
        raise Damaged(f"{checkpoint / 'training.json'} is no record of a run")
    difference = _difference("recipe", record["recipe"], dict(recipe))
    if difference:
        raise ValueError(
            f"{checkpoint} was made by another run: {difference}. Give the same numbers to resume "
            "it, or another folder to begin a new run"
        )
    digests = record.get("sha256")
    digests = digests if isinstance(digests, dict) else {}
    for name in digests:
        if not (checkpoint / name).is_file():
            raise Damaged(f"{checkpoint / name} is missing")
    names = {id(p): name for name, p in model.named_parameters()}
    state = {
        p: optimizer.new_state(p, group)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    tensors = trained(model)  # filled in place
    for p, values in state.items():
        tensors |= {f"{key}/{names[id(p)]}": value for key, value in values.items()}
    read_shares(tensors, checkpoint, digests)
    optimizer.state.update(state)
    return record["step"]


def _difference(name: str, theirs: Any, ours: Any) -> str:
    """The first value that differs, as a sentence; empty if none does. What an older record does
    not know was off."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys = [key for key in {**theirs, **ours} if key in theirs or ours[key]]
        parts = (_difference(key, theirs.get(key), ours.get(key)) for key in keys)
        return next((part for part in parts if part), "")
    return "" if theirs == ours else DIFFERENCES.get(name, f"{name} was {theirs}, now it is {ours}")
