"""Adapters on disk, in the format of the ``peft`` library: either reads what the other wrote."""

import math
import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lm_from_scratch.checkpoint.folders import (
    ADAPTER,
    carry_over,
    check_replaceable,
    local_folder,
    read_json,
    replace_folder,
    save_file,
    temporary_folder,
    write_json,
)
from lm_from_scratch.checkpoint.published import GENERATION, NOTHING, Published, read_generation
from lm_from_scratch.checkpoint.tensors import read_file
from lm_from_scratch.checkpoint.weights import Checkpoint, load_checkpoint
from lm_from_scratch.limits import Count, Positive, require, shown
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.text.tokenizer_files import NAMES as TOKENIZER_FILES
from lm_from_scratch.weights.lora import (
    adapters,
    backbone_linears,
    merge_lora_,
    put_adapters_,
)
from lm_from_scratch.weights.quantized_weight import QuantizedWeight

PREFIX = "base_model.model."
NAMES = {".lora_a": ".lora_A.weight", ".lora_b": ".lora_B.weight"}

#: What ``peft`` may switch on that ours does not do, and the value that means "off".
PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": False,
    "lora_bias": False,
    "trainable_token_indices": None,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "velora_config": None,
}

#: What says which maps have adapters, as the names of the tensors do, or how they were made, and
#: what is read below.
KNOWN = {
    *PLAIN, "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern",
    "init_lora_weights", "target_modules", "target_parameters", "modules_to_save",
    "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying",
    "base_model_name_or_path", "revision", "task_type", "auto_mapping", "inference_mode",
    "peft_version", "fan_in_fan_out", "qalora_group_size", "megatron_core", "megatron_config",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
}  # fmt: skip

#: The other ways in which ``peft`` begins change the frozen weights, too.
INITS = (None, True, False, "gaussian", "orthogonal", "eva")

#: In a family with experts, ``peft`` takes these for the maps of all experts in one. The weight of
#: such a map that is none of theirs has to be named as a parameter.
OF_EXPERTS = re.compile(r"(^|\.)(gate|gate_proj|up_proj|down_proj)$")

#: A name in ``rank_pattern``, which may be a regular expression there.
NAME = re.compile(r"\^?[\w.]+")

#: The files that a folder of adapters consists of.
FILES = (ADAPTER, "adapter_model.safetensors", GENERATION, *TOKENIZER_FILES)
WRITTEN = "|".join(map(re.escape, FILES))


def their_name(name: str) -> str:
    """What ``peft`` calls a parameter of ours."""
    stem, end = name[: -len(".lora_a")], name[-len(".lora_a") :]
    return PREFIX + (stem + NAMES[end] if end in NAMES else name)


def our_name(name: str) -> str:
    """What we call a parameter of ``peft``."""
    name = name.removeprefix(PREFIX)
    for ours, theirs in NAMES.items():
        name = name.removesuffix(theirs) + ours if name.endswith(theirs) else name
    return name


def save_lora(
    model: nn.Module,
    folder: str | Path,
    base: str | None = None,
    tokenizer: Tokenizer | None = None,
    published: Published = NOTHING,
) -> None:
    """Write the adapters, and whatever else is trained, to a folder that ``peft`` can load.

    Like there, a module that is trained in part is written whole. ``base`` names the model that
    they belong to, a folder or a name on the hub; with it the folder can be opened by itself
    (:func:`load_with_adapter`), and with the ``tokenizer`` and where texts end, of ``published``,
    its model can speak. In a family with experts ``peft`` has no dropout for the maps of an MLP: if
    any has an adapter, the file says 0.

    A folder that holds adapters and nothing else is replaced, as by
    :func:`~lm_from_scratch.checkpoint.weights.save_pretrained`; any other is left as it is. Raises
    ``ValueError`` for it, and for a model without adapters or with unequal dropout.
    """
    model = getattr(model, "_orig_mod", model)  # of a compiled model, the model
    maps = adapters(model)
    if not maps:
        raise ValueError("the model has no adapters")
    folder = Path(folder).resolve()
    check_replaceable(folder, WRITTEN)
    first = next(iter(maps.values()))
    if len(dropouts := {m.dropout for m in maps.values()}) > 1:
        raise ValueError(f"the adapters differ in their dropout: {sorted(dropouts)}")
    parameters = dict(model.named_parameters())
    modules = {name.rpartition(".")[0] for name, p in parameters.items() if p.requires_grad}
    tensors = {
        their_name(name): p.detach().cpu().contiguous()
        for name, p in parameters.items()
        if p.requires_grad
        or name.endswith((".lora_a", ".lora_b"))
        or name.rpartition(".")[0] in modules - set(maps)
    }
    family = getattr(getattr(model, "backbone", None), "config", None)
    experts = {n for n in maps if hasattr(family, "n_expert") and OF_EXPERTS.search(n)}
    called = {name: f"{name}.weight" if name in experts else name for name in maps}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if isinstance(model, CausalLM) else None,
        "base_model_name_or_path": base,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "rank_pattern": {called[n]: m.rank for n, m in maps.items() if m.rank != first.rank},
        "alpha_pattern": {called[n]: m.alpha for n, m in maps.items() if m.alpha != first.alpha},
        "lora_dropout": 0.0 if experts else first.dropout,
        "target_modules": sorted(maps.keys() - experts),
        "target_parameters": sorted(called[name] for name in experts) or None,
        "modules_to_save": sorted(modules - set(maps)),
        "fan_in_fan_out": isinstance(family, GPT2Config),  # there, stored as (in, out)
        "bias": "none",
        "inference_mode": True,
    }
    with temporary_folder(folder) as temporary:
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(temporary / ADAPTER, config)
        if tokenizer is not None:
            tokenizer.save(temporary)
        if published.generation_config:
            write_json(temporary / GENERATION, published.generation_config)
        carry_over(folder, temporary, () if tokenizer else TOKENIZER_FILES)
        carry_over(folder, temporary, [GENERATION] if published == NOTHING else [])
        replace_folder(temporary, folder)


def base_folder(folder: Path) -> Path:
    """Where the model of a folder lies: there, or, of an adapter alone, in the folder that the
    adapter names, from here, from the adapter's folder, or beside it, or on the hub. Where a full
    path is gone, a neighbour of the same name may be another model.

    Raises ``ValueError`` for an adapter whose base is not at hand.
    """
    if (folder / "config.json").is_file() or not (folder / ADAPTER).is_file():
        return folder
    config = read_json(folder / ADAPTER)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    remedy = f"write the path of its model to base_model_name_or_path of {folder / ADAPTER}"
    if not isinstance(base, str) or not base:
        raise ValueError(f"{folder} holds an adapter that does not say of which model: {remedy}")
    beside = folder.resolve().parent
    neighbour = folder if Path(base).is_absolute() else beside / Path(base).name
    for place in (Path(base), folder / base, beside / base, neighbour):
        if (place / "config.json").is_file():
            return place
    try:
        if revision not in (None, "main"):
            raise ValueError(f"its revision={shown(revision)} is not fetched")
        return local_folder(base)
    except ValueError as error:
        raise ValueError(
            f"{folder} holds an adapter of {shown(base)}, which is not at hand ({error}): put that "
            f"model's folder beside it, or {remedy}"
        ) from error


def load_with_adapter(
    folder: str | Path, kind: Literal["causal_lm", "classifier"] | None = None
) -> Checkpoint[Any]:
    """Like :func:`~lm_from_scratch.checkpoint.weights.load_checkpoint`, with the adapter that lies
    beside the model, or that the folder holds alone (:func:`base_folder`), added to the weights."""
    folder = local_folder(folder)
    base = base_folder(folder)
    if not (folder / ADAPTER).is_file():
        return load_checkpoint(base, kind)
    checkpoint = load_checkpoint(base, kind, without_adapter=base == folder)
    load_lora_(checkpoint.model, folder)
    merge_lora_(checkpoint.model)
    for parameter in checkpoint.model.parameters():
        parameter.requires_grad_(not isinstance(parameter, QuantizedWeight))
    generation = read_generation(folder) or checkpoint.published.generation_config
    return Checkpoint(checkpoint.model, Published(checkpoint.published.config, generation))


def load_lora_(model: nn.Module, folder: str | Path) -> None:
    """Add the adapters that :func:`save_lora` or ``peft`` wrote to a built model, in place.

    The alpha of an rsLoRA, which divides by the root of the rank, becomes the one that divides by
    the rank. Raises ``ValueError`` for a file that does not fit, and for an option of ``peft`` that
    is not supported.
    """
    folder = Path(folder)
    config = read_json(folder / ADAPTER)
    try:
        check_options(config)
    except ValueError as error:
        raise ValueError(
            f"{folder / ADAPTER}: {error}; peft's merge_and_unload makes a model without it"
        ) from error
    loaded = read_adapters(folder / "adapter_model.safetensors")
    targets = {name.removesuffix(".lora_a") for name in loaded if name.endswith(".lora_a")}
    others = {name for name in loaded if not name.endswith((".lora_a", ".lora_b"))}
    shapes = {name: p.shape for name, p in model.named_parameters() if name in others}
    sizes: dict[str, tuple[int, float]] = {}
    for name, module in backbone_linears(model).items():
        if name in targets:
            r = pattern_value(config.get("rank_pattern"), name, config["r"])
            alpha = pattern_value(config.get("alpha_pattern"), name, config["lora_alpha"])
            sizes[name] = (r, alpha * math.sqrt(r) if config.get("use_rslora") else alpha)
            shapes[f"{name}.lora_a"] = torch.Size([r, module.in_features])
            shapes[f"{name}.lora_b"] = torch.Size([module.out_features, r])
    wrong = [f"unexpected {shown(name)}" for name in sorted(set(loaded) - set(shapes))]
    wrong += [f"missing {name}" for name in sorted(set(shapes) - set(loaded))]
    dtype = next(model.parameters()).dtype
    for name in sorted(set(shapes) & set(loaded)):
        tensor = loaded[name]
        if tensor.shape != shapes[name]:
            wrong.append(f"{name} has shape {tuple(tensor.shape)}, not {tuple(shapes[name])}")
        elif not tensor.is_floating_point() or not tensor.to(dtype).isfinite().all():
            wrong.append(f"{name} ({tensor.dtype}) holds other things than finite numbers")
    try:
        if wrong:
            raise ValueError("it does not fit the model: " + "; ".join(wrong[:8]))
        put_adapters_(model, sizes, config.get("lora_dropout", 0.0), others.__contains__)
    except ValueError as error:
        raise ValueError(f"the adapter in {folder}: {error}") from error
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in loaded.items():
            parameters[name].copy_(tensor)


def read_adapters(file: Path) -> dict[str, Tensor]:
    """The tensors of an adapter, by our names. Raises ``ValueError`` for a file that cannot be
    read, or has a name twice."""
    pickled = file.with_suffix(".bin")
    if pickled.exists() and not file.exists():
        raise ValueError(
            f"{pickled} may run code when it is read: peft opens it, and its save_pretrained "
            f"writes {file.name}"
        )
    tensors = read_file(file)
    renamed = {our_name(name): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        raise ValueError(f"{file} has a name twice, with and without the prefix {PREFIX}")
    return renamed


def check_options(config: dict[str, Any]) -> None:
    """Raises ``ValueError`` for what an ``adapter_config.json`` switches on and ours does not do,
    or may not know of."""
    for key, plain in PLAIN.items():
        if (config.get(key) or plain) != plain:
            raise ValueError(f"{key}={shown(config[key])} is not supported, only {plain!r}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ValueError(f"r={shown(rank)} and lora_alpha={shown(alpha)} must be numbers")
    for key in sorted(config.keys() - KNOWN):
        if config[key]:
            raise ValueError(f"{key}={shown(config[key])} is not known here: peft may do more")
    if (init := config.get("init_lora_weights")) not in INITS:
        raise ValueError(
            f"init_lora_weights={shown(init)} is not supported: it is not one of {INITS}"
        )
    require(bool, use_rslora=config.get("use_rslora", False))
    names = config.get("target_parameters") or []
    if not isinstance(names, list) or not all(str(name).endswith(".weight") for name in names):
        raise ValueError(
            f"target_parameters={shown(names)} is not supported: only weights of linear maps have "
            "adapters here, no experts in one tensor"
        )
    for key, limit in (("rank_pattern", Count), ("alpha_pattern", Positive)):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict) or not all(NAME.fullmatch(name) for name in patterns):
            raise ValueError(f"{key}={shown(patterns)} is not supported, only names of maps")
        for name, value in patterns.items():
            require(limit, **{f"{key} of {name}": value})


def pattern_value(patterns: dict[str, Any] | None, name: str, default: Any) -> Any:
    """What ``peft`` gives a map: the value of the first pattern that is its name or ends it."""
    for pattern, value in (patterns or {}).items():
        if any(re.match(rf"(.*\.)?({pattern})$", each) for each in (name, f"{name}.weight")):
            return value
    return default
