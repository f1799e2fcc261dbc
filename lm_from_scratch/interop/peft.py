"""Adapters on disk, in the format of the ``peft`` library: either reads what the other wrote."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lm_from_scratch.checkpoint.folders import (
    check_replaceable,
    read_json,
    replace_folder,
    save_file,
    temporary_folder,
    write_json,
)
from lm_from_scratch.checkpoint.tensors import read_file
from lm_from_scratch.limits import shown
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.weights.lora import adapters, add_lora_, backbone_linears

PREFIX = "base_model.model."
NAMES = {".lora_a": ".lora_A.weight", ".lora_b": ".lora_B.weight"}

#: What ``peft`` may switch on that ours does not do, and the value that means "off".
PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "use_qalora": False,
    "use_bdlora": False,
    "lora_bias": False,
    "target_parameters": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
}

#: The other ways in which ``peft`` begins change the frozen weights, too.
INITS = (None, True, False, "gaussian", "orthogonal", "eva")

WRITTEN = r"adapter_config\.json|adapter_model\.safetensors"


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


def save_lora(model: nn.Module, folder: str | Path) -> None:
    """Write the adapters, and whatever else is trained, to a folder that ``peft`` can load.

    Like there, a module that is trained in part is written whole. A folder that holds adapters and
    nothing else is replaced; any other is left as it is. Raises ``ValueError`` for it, and for a
    model without adapters or with unequal ones.
    """
    model = getattr(model, "_orig_mod", model)  # of a compiled model, the model
    maps = adapters(model)
    if not maps:
        raise ValueError("the model has no adapters")
    folder = Path(folder).resolve()
    check_replaceable(folder, WRITTEN)
    first = next(iter(maps.values()))
    kinds = {(m.rank, m.alpha, m.dropout) for m in maps.values()}
    if len(kinds) > 1:
        raise ValueError(f"the adapters differ in (rank, alpha, dropout): {sorted(kinds)}")
    parameters = dict(model.named_parameters())
    modules = {name.rpartition(".")[0] for name, p in parameters.items() if p.requires_grad}
    tensors = {
        their_name(name): p.detach().cpu().contiguous()
        for name, p in parameters.items()
        if p.requires_grad
        or name.endswith((".lora_a", ".lora_b"))
        or name.rpartition(".")[0] in modules - set(maps)
    }
    gpt2 = isinstance(getattr(getattr(model, "backbone", None), "config", None), GPT2Config)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if isinstance(model, CausalLM) else None,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "target_modules": sorted(maps),
        "modules_to_save": sorted(modules - set(maps)),
        "fan_in_fan_out": gpt2,  # there, its linear maps are stored as (in, out)
        "bias": "none",
        "inference_mode": True,
    }
    with temporary_folder(folder) as temporary:
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(temporary / "adapter_config.json", config)
        replace_folder(temporary, folder)


def load_lora_(model: nn.Module, folder: str | Path) -> None:
    """Add the adapters that :func:`save_lora` or ``peft`` wrote to a built model, in place.

    Raises ``ValueError`` for a file that does not fit, and for an option of ``peft`` that is not
    supported.
    """
    folder = Path(folder)
    config = read_json(folder / "adapter_config.json")
    for key, plain in PLAIN.items():
        if (config.get(key) or plain) != plain:
            raise ValueError(f"{key}={shown(config[key])} is not supported, only {plain!r}")
    if (init := config.get("init_lora_weights")) not in INITS:
        raise ValueError(
            f"init_lora_weights={shown(init)} is not supported: it is not one of {INITS}"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ValueError(
            f"{folder} has r={shown(rank)} and lora_alpha={shown(alpha)}: they must be numbers"
        )
    file = folder / "adapter_model.safetensors"
    read = read_file(file)
    loaded = {our_name(name): tensor for name, tensor in read.items()}
    if len(loaded) < len(read):
        raise ValueError(f"{file} has a name twice, with and without the prefix {PREFIX}")
    targets = {name.removesuffix(".lora_a") for name in loaded if name.endswith(".lora_a")}
    others = {name for name in loaded if not name.endswith((".lora_a", ".lora_b"))}
    shapes = {name: p.shape for name, p in model.named_parameters() if name in others}
    for name, module in backbone_linears(model).items():
        if name in targets:
            shapes[f"{name}.lora_a"] = torch.Size([rank, module.in_features])
            shapes[f"{name}.lora_b"] = torch.Size([module.out_features, rank])
    wrong = [f"unexpected {name}" for name in sorted(set(loaded) - set(shapes))]
    wrong += [f"missing {name}" for name in sorted(set(shapes) - set(loaded))]
    dtype = next(model.parameters()).dtype
    for name in sorted(set(shapes) & set(loaded)):
        tensor = loaded[name]
        if tensor.shape != shapes[name]:
            wrong.append(f"{name} has shape {tuple(tensor.shape)}, not {tuple(shapes[name])}")
        elif not tensor.is_floating_point() or not tensor.to(dtype).isfinite().all():
            wrong.append(f"{name} ({tensor.dtype}) holds other things than finite numbers")
    if wrong:
        raise ValueError(f"{file} does not fit the model: " + "; ".join(wrong[:8]))
    dropout = config.get("lora_dropout", 0.0)
    add_lora_(model, rank, alpha, dropout, targets.__contains__, others.__contains__)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in loaded.items():
            parameters[name].copy_(tensor)
