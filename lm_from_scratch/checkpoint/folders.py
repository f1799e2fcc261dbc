"""Folders that are written whole or not at all, like the files of :mod:`lm_from_scratch.files`,
and where a model's folder is."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from lm_from_scratch.files import temporary_path, to_disk, whole_file

#: The small models that come with the package; their READMEs say how they were made.
#:
#: :meta hide-value:
PRETRAINED = Path(__file__).parents[1] / "pretrained"

#: No file that is meant is nested deeper; what is could not be written again.
MAX_DEPTH = 50

SHIPPED = PRETRAINED / "gpt2-docs"

#: What a folder with an adapter in the format of ``peft`` has, beside a model or without one.
ADAPTER = "adapter_config.json"


def local_folder(name: str | Path) -> Path:
    """``name`` itself if it is a folder; else the package's model, or the hub's files, of that name
    (fetched once).

    Raises ``ValueError`` if there is none.
    """
    folder = Path(name)
    if folder.is_dir():
        if not is_model(folder):
            for model in [folder / "model", *sorted(folder.glob("step-*"), reverse=True)]:
                if is_model(model):
                    raise ValueError(f"{folder} is a run, no model; its model is {model}")
            if (folder / "training.json").is_file():
                raise ValueError(
                    f"{folder} has adapters that are being trained: the run writes a folder that "
                    f"can be opened, {folder.parent / 'model'}, when it ends"
                )
        return folder
    if (PRETRAINED / folder / "config.json").is_file():
        return PRETRAINED / folder
    if folder.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") > 1:
        raise ValueError(f"no folder {name}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.jinja", "merges.txt", "*.safetensors"]
    try:
        return Path(snapshot_download(str(name), allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{str(name)!r} is no folder here, and the hub gave no model of that name "
            f"({type(error).__name__}); with the package come {', '.join(shipped())}"
        ) from error


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model, or an adapter for one."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER))


def shipped() -> list[str]:
    """The names of the models that come with the package. Raises ``ValueError`` if it lies in a zip
    file, where no model can be mapped into memory."""
    if not PRETRAINED.is_dir():
        raise ValueError(f"there is no folder {PRETRAINED}; install the package, unpacked")
    return sorted(path.parent.name for path in PRETRAINED.glob("*/config.json"))


def shipped_folder(name: str) -> Path:
    """The folder of a model that comes with the package. Raises ``ValueError`` for another name."""
    folder = PRETRAINED / name
    if not (folder / "config.json").is_file():
        raise ValueError(f"no model {name!r} comes with the package; there are {shipped()}")
    return folder


def shipped_steps(name: str) -> dict[int, Path]:
    """The steps of its training after which a model that comes with the package was kept, and the
    folder of each; the last is that of the model. Raises ``ValueError`` for another name."""
    folder = shipped_folder(name)
    earlier = {int(path.name[len("step-") :]): path for path in sorted(folder.glob("step-*"))}
    return earlier | {read_json(folder / "record.json")["steps"]: folder}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ``ValueError`` for anything else."""
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}")
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    level = [contents]
    for _ in range(MAX_DEPTH):
        level = [value for one in level for value in _inner(one)]
    if level:
        raise ValueError(f"{path} is nested more than {MAX_DEPTH} deep")
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds no JSON object, but a {type(contents).__name__}")
    return contents


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    """Write a JSON file: all of it, or nothing."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def save_file(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file: all of it, or nothing. Raises ``OSError`` where it cannot be."""
    with whole_file(path) as temporary:
        try:
            on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            safetensors.save_file(on_cpu, temporary, metadata)
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code)) from error


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """An empty folder beside ``target``, to be filled and renamed; removed if it was not."""
    temporary = temporary_path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_replaceable(folder: Path, written: str) -> None:
    """Raises ``ValueError`` for a file, and for a folder with files whose names ``written``, a
    pattern, does not match (below a name that it does match, only templates may be);
    ``PermissionError`` for a folder that is read-only."""

    def is_ours(path: Path) -> bool:
        named = re.fullmatch(written, path.name) is not None
        return named and all(inner.suffix == ".jinja" for inner in path.rglob("*"))

    if folder.exists():
        if not folder.is_dir():
            raise ValueError(f"{folder} is a file, not a folder")
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        others = [path.name for path in folder.iterdir() if not is_ours(path)]
        if others:
            raise ValueError(
                f"{folder} is left as it is, because it holds other files too: {sorted(others)[:5]}"
            )


def carry_over(folder: Path, to: Path, names: Iterable[str]) -> None:
    """Copy what an earlier ``folder`` has under these names, where nothing new has its place."""
    for name in names:
        if (folder / name).exists() and not (to / name).exists():
            copy = shutil.copytree if (folder / name).is_dir() else shutil.copy2
            copy(folder / name, to / name)


def replace_folder(temporary: Path, target: Path) -> None:
    """Give the finished folder its name; what stood there before goes away afterwards.

    No system renames a folder over another one. A program that is killed between the two renames
    leaves the earlier contents as ``.NAME.old`` beside the target. An empty folder, and the one in
    which the program stands, get new files instead, ``config.json`` last: a shell may stand there.
    """
    for file in temporary.rglob("*"):
        if file.is_file():
            to_disk(file)  # the contents must be there before the name is
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if not target.exists():
        temporary.rename(target)
        return
    renames = [(target, old), (temporary, target)]
    if not any(target.iterdir()) or (os.path.exists(".") and target.samefile(".")):
        old.mkdir()
        last = sorted(temporary.iterdir(), key=lambda file: file.name == "config.json")
        renames = [(file, old / file.name) for file in target.iterdir()]
        renames += [(file, target / file.name) for file in last]
    try:
        for source, to in renames:
            source.rename(to)
    except BaseException:  # Ctrl-C, too
        for source, to in reversed(renames):
            if not os.path.lexists(source):
                to.rename(source)
        if old.exists():
            old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)
