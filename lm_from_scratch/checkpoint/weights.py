"""Models as published folders: ``config.json``, the weights, and often ``tokenizer.json``.

:func:`from_pretrained` reads a folder written by ``transformers``, and ``transformers`` reads one
written by :func:`save_pretrained`. The weights are one or several ``safetensors`` files
(:mod:`~lm_from_scratch.checkpoint.tensors`).

Everything is checked before the first weight is copied. A quantised weight is stored as the plain
tensors that it holds, and never becomes a matrix of numbers on its way to the disk or back.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lm_from_scratch.checkpoint.architectures import Config, build
from lm_from_scratch.checkpoint.experts import unpacked, unstacked
from lm_from_scratch.checkpoint.folders import (
    ADAPTER,
    carry_over,
    check_replaceable,
    local_folder,
    replace_folder,
    shipped_folder,
    shipped_steps,
    temporary_folder,
    write_json,
)
from lm_from_scratch.checkpoint.names import (
    TABLE,
    TRANSPOSED,
    check_sizes,
    of_text,
    our_name,
    published_name,
    rename,
    unwrapped,
    without_mtp,
    without_unread,
)
from lm_from_scratch.checkpoint.published import (
    GENERATION,
    NOTHING,
    Published,
    model_to_dict,
    read_published,
)
from lm_from_scratch.checkpoint.tensors import (
    DTYPES,
    MAX_SHARD_BYTES,
    PRECISE,
    read_tensors,
    to_one_dtype,
    write_tensors,
)
from lm_from_scratch.limits import shown
from lm_from_scratch.models.gpt2 import GPT2Model
from lm_from_scratch.models.heads import Classifier, SequenceClassifier, TokenClassifier
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.text.tokenizer_files import NAMES as TOKENIZER_FILES
from lm_from_scratch.weights.packed_int8 import PackedInt8Weight, use_packed_int8_
from lm_from_scratch.weights.quantize import WEIGHTS, dequantize_
from lm_from_scratch.weights.quantized_weight import QuantizedWeight
from lm_from_scratch.weights.swap import swap_parameters_

AnyModel = TypeVar("AnyModel", bound=CausalLM | Classifier)

#: The files that a saved model consists of.
WRITTEN = "|".join(
    [
        r"(generation_)?config\.json",
        r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?",
        *map(re.escape, TOKENIZER_FILES),
    ]
)

#: How a ``config.json`` calls our quantised weights.
FORMAT = "lm_from_scratch"


@dataclass(frozen=True)
class Checkpoint(Generic[AnyModel]):
    """What a folder holds: a model, and what its files say besides the weights."""

    model: AnyModel
    published: Published


def from_pretrained(folder: str | Path) -> CausalLM:
    """Read a GPT-2, or a decoder of a family in ``dialects``, from a local folder, or from the hub
    if ``folder`` is a name there, like ``gpt2`` or ``Qwen/Qwen2-0.5B``. ``gpt2-docs`` and
    ``qwen2-docs`` are in the package.

    The model comes back in evaluation mode, in the dtype of the file (of several, in that of its
    ``config.json``, else in the widest), with the quantised weights that :func:`save_pretrained`
    wrote. What else the folder says, the names of labels and where texts end, is not part of a
    model: :func:`load_checkpoint` returns it as well, for :func:`save_pretrained` to write.

    Layers for multi-token prediction are left in the file: the model writes without them. Of a
    model for pictures or sound too (a Qwen3.5, a Gemma 3 or 4) the part for text is read, and saved
    as a folder of its own.

    Raises ``ValueError`` for a folder that cannot be read, and names a missing, unexpected or
    wrongly shaped tensor.
    """
    model = load_checkpoint(folder, "causal_lm").model
    assert not isinstance(model, Classifier)
    return model


def classifier_from_pretrained(folder: str | Path) -> SequenceClassifier | TokenClassifier:
    """Read a classifier, like :func:`from_pretrained`; which one, its ``config.json`` says.

    Raises ``ValueError`` for a folder with anything else.
    """
    model = load_checkpoint(folder, "classifier").model
    assert isinstance(model, SequenceClassifier | TokenClassifier)
    return model


def load_checkpoint(
    folder: str | Path,
    kind: Literal["causal_lm", "classifier"] | None = None,
    without_adapter: bool = False,
) -> Checkpoint[Any]:
    """Read the model of a folder, of either kind or of the one that is asked for, and what else
    the folder says: the names of labels, where texts end. :func:`save_pretrained` writes both.

    Raises ``ValueError`` as :func:`from_pretrained` does, for a model of the other kind, and for a
    folder with an adapter, unless it is opened ``without_adapter``.
    """
    folder = local_folder(folder)
    if (folder / ADAPTER).is_file() and not without_adapter:
        raise ValueError(
            f"{folder} holds an adapter ({ADAPTER}), without which its model is another: "
            "interop.peft.load_with_adapter reads it as well, and every command"
        )
    published, config = read_published(folder)
    architecture, n_labels = published.architecture, published.n_labels
    classifies = architecture.endswith("Classification")
    if classifies and kind == "causal_lm":
        raise ValueError(
            f"{folder} holds a {architecture}: classifier_from_pretrained reads it, and "
            "the command classify"
        )
    heads = ("ForSequenceClassification", "ForTokenClassification")
    if (classifies or kind == "classifier") and not architecture.endswith(heads):
        raise ValueError(f"{folder} holds a {architecture!r}, no classifier")

    def skeleton() -> CausalLM | Classifier:
        model = build(config)
        if not classifies:
            return model
        if architecture.endswith("ForSequenceClassification"):
            return SequenceClassifier(model.backbone, n_labels)
        return TokenClassifier(model.backbone, n_labels, published.dropout)

    return Checkpoint(_fill(skeleton, config, folder, published), published)


def _fill(
    make: Callable[[], AnyModel], config: Config, folder: Path, published: Published
) -> AnyModel:
    """Make a model without numbers, and put the weights of its folder into it."""
    tensors = read_tensors(folder)  # mapped into memory: no number is read before it is needed
    tensors = of_text(unwrapped(tensors, folder))
    tensors = without_mtp(tensors, config.n_layer, published.config)
    tensors = without_unread(tensors, config)
    described = published.config.get("quantization_config")
    if isinstance(described, Mapping) and described.get("quant_method") == "mxfp4":
        try:
            tensors, described = unpacked(tensors), None
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
    check_sizes(config, tensors, folder)
    try:
        with torch.device("meta"), _NothingDrawn():
            model = make()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{folder / 'config.json'}: no tensor is that large: {reason}") from error
    quantize_skeleton(model, described, folder)
    wanted = model.state_dict()
    if not any(isinstance(weight, QuantizedWeight) for weight in wanted.values()):
        tensors = to_one_dtype(tensors, published.config)
    try:
        loaded = rename(tensors, model)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    check_tensors(loaded, plain_tensors(wanted), folder)
    for name, weight in wanted.items():
        if isinstance(weight, QuantizedWeight):
            parts = {part: loaded.pop(f"{name}.{part}") for part in weight.parts()}
            loaded[name] = weight.from_parts(parts)
    model.load_state_dict(loaded, assign=True)
    use_packed_int8_(
        model, (published.config.get("quantization_config") or {}).get("weight_only") is True
    )
    model.eval()
    return model


class _NothingDrawn(TorchFunctionMode):
    """No weights are drawn: for a model on the meta device, which has no place for them. torch
    would import its compiler to draw them there, and that takes as long as the rest of loading a
    small model."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (nn.init.normal_, Tensor.normal_, Tensor.uniform_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs or {})


def load_shipped(name: str = "gpt2-docs", step: int | None = None) -> tuple[CausalLM, Tokenizer]:
    """A small model that comes with the package, in float32, and its tokenizer.

    ``gpt2-docs`` and ``qwen2-docs`` have the same size, and were trained alike on the same text.
    ``tasks`` answers the questions of :mod:`~lm_from_scratch.text.tasks`. ``worlds`` tells stories,
    and is also there as it was after an earlier ``step`` of its training
    (:func:`~lm_from_scratch.checkpoint.folders.shipped_steps` lists them).

    Raises ``ValueError`` for another name, and for a step that was not kept.
    """
    folder = shipped_folder(name)
    if step is None:
        return from_pretrained(folder).float(), Tokenizer.load(folder)
    steps = shipped_steps(name)
    if step not in steps:
        raise ValueError(f"{name} was not kept after step {step!r}; there are {[*steps]}")
    model = from_pretrained(steps[step]).float()
    dequantize_(model)  # which freezes them
    return model.requires_grad_(), Tokenizer.load(folder)


def save_pretrained(
    model: CausalLM | Classifier,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    published: Published = NOTHING,
) -> None:
    """Write the model (and its tokenizer) to a new folder that ``transformers`` can load.

    One with quantised weights can be loaded by :func:`from_pretrained` alone; ``transformers``
    refuses it.

    What came with the model, ``published`` of :func:`load_checkpoint`, is written back as it was,
    but for what has changed since. Without it, the names of labels and ``generation_config.json``
    of the folder that the model came from are not written.

    A classifier whose config has no ``pad_token_id`` is written without one: it finds padding by
    position. To give ``transformers`` padded rows, set it there, to a token that no text ends with.

    A folder that holds what this function writes, and nothing else, is replaced as a whole; but a
    tokenizer that stands there stays where none is given, and ``generation_config.json`` without
    ``published``. Any other folder is left as it is. Raises ``ValueError`` for it, and for a model
    with adapters or of several dtypes.
    """
    folder = Path(folder).resolve()
    check_replaceable(folder, WRITTEN)
    if any(name.endswith(".lora_a") for name, _ in model.named_parameters()):
        raise ValueError("the model has adapters: save_lora writes them, merge_lora_ adds them")
    with temporary_folder(folder) as temporary:
        write_model(model, temporary, max_shard_bytes, published)
        if tokenizer is not None:
            tokenizer.save(temporary)
        carry_over(folder, temporary, () if tokenizer else TOKENIZER_FILES)
        carry_over(folder, temporary, [GENERATION] if published == NOTHING else [])
        replace_folder(temporary, folder)


def write_model(
    model: CausalLM | Classifier,
    folder: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    published: Published = NOTHING,
) -> None:
    """Write ``config.json`` and the weights into an existing folder.

    Raises ``ValueError`` for several dtypes.
    """
    model = getattr(model, "_orig_mod", model)  # of a compiled model, the model
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        raise ValueError(f"the parameters have different dtypes: {sorted(map(str, dtypes))}")
    write_config(model, folder, published)
    tensors, config = unstacked(plain_tensors(stored(model))), model.backbone.config
    named = {published_name(name, config): tensor for name, tensor in tensors.items()}
    write_tensors(named, folder, max_shard_bytes)


def write_config(
    model: CausalLM | Classifier, folder: Path, published: Published = NOTHING
) -> None:
    """Write ``config.json``, and ``generation_config.json`` if the model came with one."""
    config = model_to_dict(model, published)
    config.pop("quantization_config", None)
    if quantized := {n: t for n, t in stored(model).items() if isinstance(t, QuantizedWeight)}:
        config["quantization_config"] = describe(quantized)
    for key in {"dtype", "torch_dtype"} & {*config} or {"dtype"}:
        config[key] = str(next(model.parameters()).dtype).removeprefix("torch.")
    write_json(folder / "config.json", config)
    if published.generation_config:
        write_json(folder / GENERATION, published.generation_config)


def stored(model: nn.Module, without: Collection[str] = ()) -> dict[str, Tensor]:
    """The weights, but for some, under the names and in the layout of a checkpoint, with the
    experts of a layer in one tensor; no weight is copied."""
    renamed = isinstance(model, TokenClassifier) and isinstance(model.backbone, GPT2Model)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name in without:
            continue
        if TRANSPOSED.search(name) and not isinstance(tensor, QuantizedWeight):
            tensor = tensor.T
        name = name.replace("score.", "classifier.") if renamed else name
        tensors[name] = tensor.detach()
    return tensors


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Of the :func:`stored` weights those that training changes. A buffer is one of them: what
    keeps experts busy is moved without a gradient."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    return stored(model, without=frozen)


def check_tensors(loaded: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: Path) -> None:
    """Raises ``ValueError`` that lists everything missing, unexpected or of the wrong shape.

    Codes must be integers of their own dtype, scales finite, and all other tensors of one dtype,
    but for correction biases.
    """
    problems = [f"missing {name}" for name in wanted if name not in loaded]
    problems += [f"unexpected {name}" for name in loaded if name not in wanted]
    for name in [name for name in wanted if name in loaded]:
        tensor, want = loaded[name], wanted[name]
        if tensor.shape != want.shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, not {tuple(want.shape)}")
        if not want.is_floating_point() and tensor.dtype != want.dtype:
            problems.append(f"{name} is {tensor.dtype}, not {want.dtype}")
        numbers = name.endswith((".scale", ".zero")) and tensor.dtype in DTYPES
        if numbers and not tensor.isfinite().all():
            problems.append(f"{name} has numbers that are not finite")
        router = wanted.get(f"{name.removesuffix(TABLE)}.weight") if name.endswith(TABLE) else None
        if router is not None and not ((tensor >= 0) & (tensor < len(router))).all():
            problems.append(f"{name} names experts that are not among the {len(router)} there are")
    codes = {name for name, tensor in wanted.items() if not tensor.is_floating_point()}
    others = [name for name in loaded if name not in codes and not PRECISE.search(name)]
    dtypes = {loaded[name].dtype for name in others}
    if len(dtypes) > 1:
        problems.append(f"the tensors have different dtypes: {sorted(map(str, dtypes))}")
    elif not dtypes <= DTYPES:
        problems.append(f"the tensors are {next(iter(dtypes))}, which is no dtype to compute in")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"{where} does not fit the model: " + "; ".join(problems[:8]) + more)


def plain_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is stored: a quantised weight ``NAME`` as its parts, ``NAME.codes``, ``NAME.scale``."""
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if isinstance(weight, QuantizedWeight):
            tensors |= {f"{name}.{part}": tensor for part, tensor in weight.parts().items()}
        else:
            tensors[name] = weight
    return tensors


def describe(quantized: Mapping[str, QuantizedWeight]) -> dict[str, Any]:
    """The ``quantization_config`` of a ``config.json``: bits, name, and size of a group."""
    # Without a quant_method, transformers refuses the folder. With one that it does not know, it
    # warns, leaves the codes out and gives the model random weights.
    described: dict[str, Any] = {"format": FORMAT}
    for name, weight in quantized.items():
        described.setdefault(f"int{weight.bits}", {})[name] = weight.group_size
        if isinstance(weight, PackedInt8Weight) and weight.weight_only:
            described["weight_only"] = True
    return described


def quantize_skeleton(model: CausalLM | Classifier, described: Any, where: Path) -> None:
    """Give a model on the meta device quantised weights as :func:`describe` tells; no numbers."""
    if described is None:
        return
    if not isinstance(described, Mapping) or described.get("format") != FORMAT:
        raise ValueError(
            f"{where} is quantised in a way that cannot be read here: "
            f"quantization_config={shown(described)}"
        )
    weights = dict(model.named_parameters())
    new: dict[str, Tensor] = {}
    for bits, kind in WEIGHTS.items():
        groups = described.get(f"int{bits}", {})
        if not isinstance(groups, Mapping):
            raise ValueError(f"{where}: int{bits}={shown(groups)} must be an object")
        for name, group_size in groups.items():
            weight = weights.get(our_name(name, model))
            if weight is None or type(group_size) is not int or group_size < 1:
                raise ValueError(
                    f"{where}: int{bits} of {shown(name)} with group_size={shown(group_size)}: the "
                    "name must be a weight of the model, and the size at least 1"
                )
            try:
                new[our_name(name, model)] = kind.quantize(weight.detach(), group_size)
            except ValueError as error:
                raise ValueError(f"{where}: int{bits} of {name!r}: {error}") from error
    swap_parameters_(model, new)
