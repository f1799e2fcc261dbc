"""Weights on disk, in the format of the published checkpoints, and the state of a training run.

A model folder holds ``config.json``, the weights in one or several ``safetensors`` files, and often
``tokenizer.json``. :func:`from_pretrained` reads one written by ``transformers``, and
``transformers`` reads one written by :func:`save_pretrained`. No file is ever unpickled: a
safetensors file is numbers alone, while a pickle can run any program when it is opened.

Everything is checked before the first weight is copied, and every folder is written under a
temporary name and renamed when it is complete. A quantised weight is stored as the plain tensors
that it holds, and never becomes a matrix of numbers on its way to the disk or back.

The folder of a training run is never without a complete checkpoint, because each has a name of its
own. A run in several processes writes several files (torch's distributed checkpoint, in the same
format), and any number of processes reads them.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lm_from_scratch.distributed import ALONE, Processes
from lm_from_scratch.models.causal_lm import CausalLM, Config, build
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.models.heads import Classifier, SequenceClassifier, TokenClassifier
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.quantize import WEIGHTS, QuantizedWeight
from lm_from_scratch.rope import DynamicNTKScaling, scaling_from_dict, scaling_to_dict
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.weights.swap import swap_parameters_

#: The small models that come with the package; their READMEs say how they were made.
#:
#: :meta hide-value:
PRETRAINED = Path(__file__).parent / "pretrained"
SHIPPED = PRETRAINED / "gpt2-docs"

AnyModel = TypeVar("AnyModel", bound=CausalLM | Classifier)

# ------------------------------------------------------------------------------------- configs

#: Our names and the names in a checkpoint's ``config.json``; the others are the same.
GPT2_NAMES = {
    "block_size": "n_positions",
    "intermediate_size": "n_inner",
    "activation": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
}
QWEN2_NAMES = {
    "block_size": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "activation": "hidden_act",
}

#: What a GPT-2 config may switch on that ours does not do, and the value that means "off".
NOT_SUPPORTED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}

#: What ``transformers`` takes for a key that a Qwen2 ``config.json`` leaves out, where it is not
#: our default.
QWEN2_ABSENT: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "tie_word_embeddings": False,
    "max_window_layers": 28,
    "sliding_window": 4096,
    "eos_token_id": None,
}


def config_from_dict(config: Mapping[str, Any]) -> Config:
    """A config from the contents of a ``config.json``; keys that it does not know pass.

    Raises ``ValueError`` for another ``model_type``, and for what our models do not do.
    """
    model_type = config.get("model_type")
    if model_type == "gpt2":
        return gpt2_config_from_dict(config)
    if model_type == "qwen2":
        return qwen2_config_from_dict(config)
    raise ValueError(f"model_type is {model_type!r}; only 'gpt2' and 'qwen2' can be loaded")


def config_to_dict(config: Config) -> dict[str, Any]:
    """The contents of a ``config.json`` that ``transformers`` understands."""
    return (
        gpt2_config_to_dict(config)
        if isinstance(config, GPT2Config)
        else qwen2_config_to_dict(config)
    )


def gpt2_config_from_dict(config: Mapping[str, Any]) -> GPT2Config:
    """The config of a GPT-2 ``config.json``. Raises ``ValueError`` for what our model does not
    do."""
    for key, off in NOT_SUPPORTED.items():
        if config.get(key, off) != off:
            raise ValueError(f"{key}={config[key]} is not supported, only {key}={off}")
    names = {f.name: GPT2_NAMES.get(f.name, f.name) for f in fields(GPT2Config)}
    return GPT2Config(**{our: config[name] for our, name in names.items() if name in config})


def gpt2_config_to_dict(config: GPT2Config) -> dict[str, Any]:
    """The inverse of :func:`gpt2_config_from_dict`."""
    values = {GPT2_NAMES.get(f.name, f.name): getattr(config, f.name) for f in fields(config)}
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **values}


def qwen2_config_from_dict(config: Mapping[str, Any]) -> Qwen2Config:
    """Old configs say ``rope_theta`` and ``rope_scaling``, new ones ``rope_parameters``; the layers
    that slide are listed in new ones, and follow from two numbers and a switch in old ones.

    Raises ``ValueError`` for what our model does not do.
    """
    config = {**QWEN2_ABSENT, **config}
    names = {f.name: QWEN2_NAMES.get(f.name, f.name) for f in fields(Qwen2Config)}
    for derived in (
        "rope_theta",
        "rope_scaling",
        "sliding_window",
        "layer_types",
        "max_window_layers",
    ):
        del names[derived]
    known = {our: config[name] for our, name in names.items() if name in config}
    length = config.get("max_position_embeddings", Qwen2Config.block_size)
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key) or {}, Mapping):
            raise ValueError(f"{key}={config[key]!r} must be an object")
        rope |= config.get(key) or {}
    theta, known["rope_scaling"] = scaling_from_dict(rope, length)
    known["rope_theta"] = theta or config.get("rope_theta", 10000.0)
    if isinstance(known.get("eos_token_id"), list):
        known["eos_token_id"] = known["eos_token_id"][0]  # of several ends the model's own
    types = config.get("layer_types")
    if config.get("use_sliding_window") and config["sliding_window"] is not None:
        known["sliding_window"] = config["sliding_window"]
        key = "max_window_layers" if types is None else "layer_types"
        known[key] = config["max_window_layers"] if types is None else tuple(types)
    elif others := set(types or ()) - {FULL}:
        raise ValueError(
            f"layer_types has {sorted(others)}, but "
            f"use_sliding_window={config.get('use_sliding_window', False)} and "
            f"sliding_window={config['sliding_window']}"
        )
    return Qwen2Config(**known)


def qwen2_config_to_dict(config: Qwen2Config) -> dict[str, Any]:
    """The inverse of :func:`qwen2_config_from_dict`. Raises ``ValueError`` for a scaling that the
    file cannot express."""
    values = {QWEN2_NAMES.get(f.name, f.name): getattr(config, f.name) for f in fields(config)}
    scaling = values.pop("rope_scaling")
    if isinstance(scaling, DynamicNTKScaling) and scaling.original_length != config.block_size:
        raise ValueError(
            f"original_length={scaling.original_length} of the dynamic scaling is not "
            f"block_size={config.block_size}: transformers would take the latter for it"
        )
    rope = scaling_to_dict(config.rope_theta, scaling)
    layers = [FULL if window is None else SLIDING for window in config.windows]
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        **values,
        "rope_parameters": rope,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "use_sliding_window": SLIDING in layers,
        "layer_types": layers,
        "max_window_layers": layers.index(SLIDING) if SLIDING in layers else config.n_layer,
    }


# ------------------------------------------------------------------------------------- weights

#: GPT-2's published linear maps are stored as (in, out); ``nn.Linear`` wants (out, in).
TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")

#: Constants that old checkpoints carry along: the causal triangle, the rotation's frequencies.
CONSTANTS = re.compile(r"(^|\.)(h\.\d+\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")

MAX_SHARD_BYTES = 5 * 10**9

#: The files that a saved model consists of.
WRITTEN = r"config\.json|tokenizer\.json|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"

#: How a ``config.json`` calls our quantised weights.
FORMAT = "lm_from_scratch"

DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


def from_pretrained(folder: str | Path) -> CausalLM:
    """Read a GPT-2 or a Qwen2 from a local folder, or from the hub if ``folder`` is a name there,
    like ``gpt2`` or ``Qwen/Qwen2-0.5B``. ``gpt2-docs`` and ``qwen2-docs`` are in the package.

    The model comes back in evaluation mode, in the dtype of the file, and with the quantised
    weights that :func:`save_pretrained` wrote. Raises ``ValueError`` for a folder that cannot be
    read, and names a missing, unexpected or wrongly shaped tensor.
    """
    folder = local_folder(folder)
    contents = read_json(folder / "config.json")
    if (architecture := _architecture(contents)).endswith("Classification"):
        raise ValueError(f"{folder} holds a {architecture}: classifier_from_pretrained reads it")
    with torch.device("meta"):
        model = build(config_from_dict(contents))
    return _fill(model, folder, contents)


def classifier_from_pretrained(folder: str | Path) -> SequenceClassifier | TokenClassifier:
    """Read a classifier, like :func:`from_pretrained`; which one, its ``config.json`` says.

    Raises ``ValueError`` for a folder with anything else.
    """
    folder = local_folder(folder)
    contents = read_json(folder / "config.json")
    config = config_from_dict(contents)
    architecture = _architecture(contents)
    n_labels = len(contents.get("id2label") or {}) or 2  # transformers leaves out two
    named = (contents.get(key) for key in ("classifier_dropout", "hidden_dropout"))
    dropout = next((value for value in named if value is not None), 0.1)
    with torch.device("meta"):
        backbone = build(config).backbone
        model: SequenceClassifier | TokenClassifier
        if architecture.endswith("ForSequenceClassification"):
            model = SequenceClassifier(backbone, n_labels)
        elif architecture.endswith("ForTokenClassification"):
            model = TokenClassifier(backbone, n_labels, dropout)
        else:
            raise ValueError(f"{folder} holds a {architecture!r}, no classifier")
    return _fill(model, folder, contents)


def _architecture(contents: Mapping[str, Any]) -> str:
    """The class that a ``config.json`` names, or an empty string."""
    return str((contents.get("architectures") or [""])[0])


def _fill(model: AnyModel, folder: Path, contents: Mapping[str, Any]) -> AnyModel:
    """Put the weights of a folder into a model that was built on the meta device."""
    quantize_skeleton(model, contents.get("quantization_config"), folder)
    loaded = rename(read_tensors(folder), model)
    wanted = model.state_dict()
    check_tensors(loaded, plain_tensors(wanted), folder)
    for name, weight in wanted.items():
        if isinstance(weight, QuantizedWeight):
            parts = {part: loaded.pop(f"{name}.{part}") for part in weight.parts()}
            loaded[name] = weight.from_parts(parts)
    model.load_state_dict(loaded, assign=True)
    model.eval()
    return model


def shipped() -> list[str]:
    """The names of the models that come with the package. Raises ``ValueError`` if it lies in a zip
    file, where no model can be mapped into memory."""
    if not PRETRAINED.is_dir():
        raise ValueError(f"there is no folder {PRETRAINED}; install the package, unpacked")
    return sorted(path.parent.name for path in PRETRAINED.glob("*/config.json"))


def load_shipped(name: str = "gpt2-docs") -> tuple[CausalLM, Tokenizer]:
    """A small model that comes with the package, in float32, and its tokenizer.

    ``gpt2-docs`` and ``qwen2-docs`` have the same size, and were trained alike on the same text.

    Raises ``ValueError`` for another name.
    """
    folder = PRETRAINED / name
    if not (folder / "config.json").is_file():
        raise ValueError(f"no model {name!r} comes with the package; there are {shipped()}")
    return from_pretrained(folder).float(), Tokenizer.load(folder)


def save_pretrained(
    model: CausalLM | Classifier,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the model (and its tokenizer) to a new folder that ``transformers`` can load.

    One with quantised weights can be loaded by :func:`from_pretrained` alone; ``transformers``
    refuses it.

    A classifier is written without a ``pad_token_id``, because ours finds padding by position. To
    give ``transformers`` padded rows, set it there, to a token that no text ends with.

    A folder that holds what this function writes, and nothing else, is replaced as a whole; any
    other is left as it is. Raises ``ValueError`` for it, and for a model with adapters or of
    several dtypes.
    """
    folder = Path(folder).resolve()
    check_replaceable(folder, WRITTEN)
    if any(name.endswith(".lora_a") for name, _ in model.named_parameters()):
        raise ValueError("the model has adapters: save_lora writes them, merge_lora_ adds them")
    with temporary_folder(folder) as temporary:
        write_model(model, temporary, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(temporary)
        replace_folder(temporary, folder)


def write_model(
    model: CausalLM | Classifier, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write ``config.json`` and the weights into an existing folder.

    Raises ``ValueError`` for several dtypes.
    """
    model = getattr(model, "_orig_mod", model)  # of a compiled model, the model
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        raise ValueError(f"the parameters have different dtypes: {sorted(map(str, dtypes))}")
    tensors = published(model)
    config = config_to_dict(model.backbone.config)
    if isinstance(model, Classifier):
        family = config["architectures"][0].removesuffix("LMHeadModel").removesuffix("ForCausalLM")
        kind = "Sequence" if isinstance(model, SequenceClassifier) else "Token"
        config["architectures"] = [f"{family}For{kind}Classification"]
        labels = [f"LABEL_{i}" for i in range(model.score.out_features)]
        config["id2label"] = {str(i): label for i, label in enumerate(labels)}
        config["label2id"] = {label: i for i, label in enumerate(labels)}
        if isinstance(model, TokenClassifier):
            config["classifier_dropout"] = model.dropout.p
            if family == "GPT2":  # whose token head has another name
                tensors = {name.replace("score.", "classifier."): t for name, t in tensors.items()}
    if quantized := {n: t for n, t in tensors.items() if isinstance(t, QuantizedWeight)}:
        config["quantization_config"] = describe(quantized)
    tensors = {name: t.cpu().contiguous() for name, t in plain_tensors(tensors).items()}
    write_tensors(tensors, folder, max_shard_bytes)
    config["dtype"] = str(*dtypes).removeprefix("torch.")
    write_json(folder / "config.json", config)


def published(model: nn.Module) -> dict[str, Tensor]:
    """The weights under the names and in the layout of a checkpoint; no weight is copied."""
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        if TRANSPOSED.search(name) and not isinstance(tensor, QuantizedWeight):
            tensor = tensor.T
        tensors[name] = tensor.detach()
    return tensors


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Of the :func:`published` weights those that training changes."""
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    return {name: tensor for name, tensor in published(model).items() if name in names}


def frozen_digest(model: nn.Module) -> str | None:
    """A number that tells whether the frozen weights are the same; ``None`` without any."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    digest = hashlib.sha256()
    for name, tensor in plain_tensors(frozen).items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        flat = tensor.detach().cpu().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest() if frozen else None


def local_folder(name: str | Path) -> Path:
    """``name`` itself if it is a folder; else the package's model, or the hub's files, of that name
    (fetched once).

    Raises ``ValueError`` if there is none.
    """
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file() and (folder / "model" / "config.json").is_file():
            raise ValueError(f"{folder} is a run, no model; its model is {folder / 'model'}")
        return folder
    if (PRETRAINED / folder / "config.json").is_file():
        return PRETRAINED / folder
    if folder.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") > 1:
        raise ValueError(f"no folder {name}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["config.json", "tokenizer.json", "*.safetensors", "*.safetensors.index.json"]
    try:
        return Path(snapshot_download(str(name), allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{str(name)!r} is no folder here, and the hub gave no model of that name "
            f"({type(error).__name__}); {' and '.join(shipped())} come with the package"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ``ValueError`` for anything else."""
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}")
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds no JSON object, but a {type(contents).__name__}")
    return contents


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    """Write a JSON file: all of it, or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of ``model.safetensors``, or of the shards that its index names.

    Raises ``ValueError`` if they are not there.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    elif index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map that says where the tensors are")
        files = sorted({str(file) for file in weight_map.values()})
    else:
        raise ValueError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json "
            "(pickled weights, *.bin, are not read)"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():
            raise ValueError(f"{folder} has no shard {file!r}, which its index names")
        tensors.update(read_file(folder / file))
    return tensors


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file. Raises ``ValueError`` for a damaged one."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or incomplete: {error}") from error


def rename(tensors: Mapping[str, Tensor], model: CausalLM | Classifier) -> dict[str, Tensor]:
    """From a checkpoint's names and layout to those of ``model``.

    Files of a bare backbone have no ``transformer.`` or ``model.`` prefix. A stored head must equal
    the token embedding where ours is the embedding. Raises ``ValueError`` for a name that stands
    there twice, and for a head that our model cannot have.
    """
    tied = not isinstance(model, Classifier) and not hasattr(model, "lm_head")
    renamed = {}
    for name, tensor in tensors.items():
        if CONSTANTS.search(name):
            continue
        name = _our_name(name, model)
        if name in renamed:
            raise ValueError(f"{name} is there twice, with and without the prefix")
        renamed[name] = tensor.T.contiguous() if TRANSPOSED.search(name) else tensor
    if tied and "lm_head.weight" in renamed:
        head = renamed.pop("lm_head.weight")
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        embedding = names[id(model.head_weight)]
        if not torch.equal(head, renamed.setdefault(embedding, head)):
            raise ValueError(
                f"lm_head.weight differs from {embedding}: the head of this model is the "
                "token embedding, so the checkpoint cannot be represented"
            )
    return renamed


def _our_name(name: str, model: CausalLM | Classifier) -> str:
    prefix = f"{model.backbone.prefix}."
    name = name.replace("classifier.", "score.") if name.startswith("classifier.") else name
    return name if name.startswith((prefix, "lm_head.", "score.")) else prefix + name


def check_tensors(loaded: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: Path) -> None:
    """Raises ``ValueError`` that lists everything missing, unexpected or of the wrong shape.

    Codes must be integers of their own dtype, scales finite, and all other tensors of one dtype.
    """
    problems = [f"missing {name}" for name in wanted if name not in loaded]
    problems += [f"unexpected {name}" for name in loaded if name not in wanted]
    for name in [name for name in wanted if name in loaded]:
        found, want = loaded[name], wanted[name]
        if found.shape != want.shape:
            problems.append(f"{name} has shape {tuple(found.shape)}, not {tuple(want.shape)}")
        if not want.is_floating_point() and found.dtype != want.dtype:
            problems.append(f"{name} is {found.dtype}, not {want.dtype}")
        numbers = name.endswith((".scale", ".zero")) and found.dtype in DTYPES
        if numbers and not found.isfinite().all():
            problems.append(f"{name} has numbers that are not finite")
    codes = {name for name, tensor in wanted.items() if not tensor.is_floating_point()}
    dtypes = {tensor.dtype for name, tensor in loaded.items() if name not in codes}
    if len(dtypes) > 1:
        problems.append(f"the tensors have different dtypes: {sorted(map(str, dtypes))}")
    elif not dtypes <= DTYPES:
        problems.append(f"the tensors are {next(iter(dtypes))}, which is no dtype to compute in")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"{where} does not fit the model: " + "; ".join(problems[:8]) + more)


def write_tensors(tensors: dict[str, Tensor], folder: Path, max_shard_bytes: int) -> None:
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


# ---------------------------------------------------------------------------- quantised weights


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
    return described


def quantize_skeleton(model: CausalLM | Classifier, described: Any, where: Path) -> None:
    """Give a model on the meta device quantised weights as :func:`describe` tells; no numbers.

    Raises ``ValueError`` for a description that is not of this model.
    """
    if described is None:
        return
    if not isinstance(described, Mapping) or described.get("format") != FORMAT:
        raise ValueError(f"{where} is quantised in a way that cannot be read here: {described}")
    weights = dict(model.named_parameters())
    new: dict[str, Tensor] = {}
    for bits, kind in WEIGHTS.items():
        groups = described.get(f"int{bits}", {})
        if not isinstance(groups, Mapping):
            raise ValueError(f"{where}: int{bits}={groups!r} must be an object")
        for name, group_size in groups.items():
            weight = weights.get(_our_name(name, model))
            if weight is None or type(group_size) is not int or group_size < 1:
                raise ValueError(
                    f"{where}: int{bits} of {name!r} with group_size={group_size!r}: the name must "
                    "be a weight of the model, and the size at least 1"
                )
            try:
                new[_our_name(name, model)] = kind.quantize(weight.detach(), group_size)
            except ValueError as error:
                raise ValueError(f"{where}: int{bits} of {name!r}: {error}") from error
    swap_parameters_(model, new)


# -------------------------------------------------------------------------------- training runs


def save_training_state(
    folder: str | Path,
    model: CausalLM,
    optimizer: AdamW,
    recipe: Mapping[str, Any],
    step: int,
    processes: Processes = ALONE,
) -> None:
    """Write ``step-NNNNNNNN`` inside ``folder``: a model folder plus what training needs.

    The new checkpoint is complete before it gets its name, and the older ones are removed after
    that: a run that is killed at any moment leaves one that can be resumed.

    Frozen weights are not written: of a model that has any, the folder holds what is trained.

    In several ``processes`` all of them call this, and each writes its share, into a folder that
    all of them see.
    """
    folder = Path(folder)
    target = folder / f"step-{step:08}"
    names = {id(p): name for name, p in model.named_parameters()}
    state: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            values = optimizer.state.get(p) or optimizer.new_state(p, group)  # no gradient so far
            state |= {f"{key}/{names[id(p)]}": value.detach() for key, value in values.items()}
    with temporary_folder(target, processes) as temporary:
        whole = all(parameter.requires_grad for parameter in model.parameters())
        if processes.parallel is None:
            if whole:
                write_model(model, temporary)
            else:
                state |= trained(model)
            state = {name: value.cpu().contiguous() for name, value in state.items()}
            save_file(state, temporary / "optimizer.safetensors")
        else:
            write_shares(trained(model), temporary, join=True)
            write_shares(state, temporary)
        if processes.rank == 0:
            if processes.parallel is not None and whole:
                dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
                config = {**config_to_dict(model.config), "dtype": dtype}
                write_json(temporary / "config.json", config)
            write_json(temporary / "training.json", {"step": step, "recipe": recipe})
            replace_folder(temporary, target)
            for old in checkpoints(folder):
                if old.name < target.name:
                    shutil.rmtree(old, ignore_errors=True)
    processes.meet()


def write_shares(tensors: Mapping[str, Tensor], folder: Path, join: bool = False) -> None:
    """Every process writes the tensors, or the pieces of them, that it has: one file each.

    A tensor that all have is written by one. With ``join`` the first process makes one file of all
    files, as :func:`from_pretrained` reads it. (torch 2.13 loses a tensor without dimensions then.)
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=join)
    dcp.save({name: t.contiguous() for name, t in tensors.items()}, storage_writer=writer)
    if join:
        shutil.rmtree(folder / "sharded", ignore_errors=True)


def read_shares(tensors: dict[str, Tensor], folder: Path, alone: bool) -> None:
    """Fill the tensors, or the pieces of them that this process has, from all files of a folder.

    It does not matter how many processes wrote the files. Names and shapes are compared before the
    first tensor is filled, and no piece may be missing. Raises ``ValueError`` otherwise.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError) as error:
        raise ValueError(f"a file of {folder} is damaged or incomplete: {error}") from error
    if wrong := sorted(set(found) ^ set(tensors))[:3]:
        raise ValueError(f"{folder} does not fit the model and its optimizer: {wrong}")
    for name, tensor in tensors.items():
        stored: Any = found[name]
        complete = sum(c.sizes.numel() for c in stored.chunks) == stored.size.numel()
        if stored.size != tensor.shape or not complete:
            raise ValueError(
                f"{folder} does not fit the model and its optimizer: the shapes differ, "
                f"{name} is {tuple(stored.size)}, not {tuple(tensor.shape)}"
                if complete
                else f"{folder} is incomplete: pieces of {name} are missing"
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)


def checkpoints(folder: str | Path) -> list[Path]:
    """The complete checkpoints of a run, the newest last."""
    found = Path(folder).glob("step-*")
    return sorted(p for p in found if re.fullmatch(r"step-\d{8}", p.name) and p.is_dir())


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, or ``None``."""
    found = checkpoints(folder)
    return found[-1] if found else None


def load_training_state(
    checkpoint: Path,
    model: CausalLM,
    optimizer: AdamW,
    recipe: Mapping[str, Any],
    processes: Processes = ALONE,
) -> int:
    """Put the checkpoint into the model and the optimizer; return the number of its last step.

    The run that goes on must be the run that was begun: a different model, schedule or data order
    is refused. Raises ``ValueError`` with the first value that differs.
    """
    record = read_json(checkpoint / "training.json")
    if not isinstance(record.get("recipe"), dict) or type(record.get("step")) is not int:
        raise ValueError(f"{checkpoint / 'training.json'} is no record of a run")
    difference = _difference("recipe", record["recipe"], dict(recipe))
    if difference:
        raise ValueError(
            f"{checkpoint} was made by another run: {difference}. Give the same numbers to resume "
            "it, or another folder to begin a new run"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    state = {
        p: optimizer.new_state(p, group)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    tensors = trained(model)  # filled in place
    for p, values in state.items():
        tensors |= {f"{key}/{names[id(p)]}": value for key, value in values.items()}
    read_shares(tensors, checkpoint, alone=processes.parallel is None)
    optimizer.state.update(state)
    return record["step"]


def _difference(name: str, theirs: Any, ours: Any) -> str:
    """The first value that differs, as a sentence; empty if none does."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        parts = (_difference(key, theirs.get(key), ours.get(key)) for key in {**theirs, **ours})
        return next((part for part in parts if part), "")
    return "" if theirs == ours else f"{name} was {theirs}, now it is {ours}"


# ------------------------------------------------------------------------------- atomic folders


@contextmanager
def temporary_folder(target: Path, processes: Processes = ALONE) -> Iterator[Path]:
    """An empty folder beside ``target``, to be filled and renamed; removed if it was not."""
    temporary = target.parent / f".{target.name}.tmp"
    if processes.rank == 0:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    processes.meet()
    try:
        yield temporary
    finally:
        if processes.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def check_replaceable(folder: Path, written: str) -> None:
    """Raises ``ValueError`` for a file, and for a folder with files whose names ``written``, a
    pattern, does not match."""
    if folder.exists():
        if not folder.is_dir():
            raise ValueError(f"{folder} is a file, not a folder")
        others = [p.name for p in folder.iterdir() if not re.fullmatch(written, p.name)]
        if others:
            raise ValueError(
                f"{folder} is left as it is, because it holds other files too: {sorted(others)[:5]}"
            )


def replace_folder(temporary: Path, target: Path) -> None:
    """Give the finished folder its name; what stood there before goes away afterwards.

    No system renames a folder over another one. A program that is killed between the two renames
    leaves the earlier contents as ``.NAME.old`` beside the target.
    """
    for file in temporary.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)  # the contents must be on disk before the name is
        os.close(descriptor)
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if not target.exists():
        temporary.rename(target)
        return
    here = os.path.exists(".") and target.samefile(".")
    target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        old.rename(target)
        raise
    if here:
        os.chdir(target)  # the folder in which the program stands is the one that goes away
    shutil.rmtree(old, ignore_errors=True)
