r"""LoRA: train two small matrices beside a large one that stays as it is.

A linear map :math:`W` (out, in) is frozen, and the product of two thin matrices is added to it,
:math:`A` (r, in) and :math:`B` (out, r), which alone have gradients and optimizer state:

.. math::

   y = W x + \frac{\alpha}{r} B A x

B starts at zero, so the model begins as it was. W may be quantised: then a large model is trained
in little memory (QLoRA). :func:`merge_lora_` adds :math:`\frac{\alpha}{r} B A` to W and leaves the
plain model.

Adapters are surgery on a built model, and are written and read in the format of the ``peft``
library.

Sources: Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models*, 2021, arXiv:2106.09685
(which draws A from a normal distribution; its authors' code and ``peft`` draw it uniformly, and so
does this); Dettmers et al., *QLoRA: Efficient Finetuning of Quantized LLMs*, 2023,
arXiv:2305.14314.
"""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from lm_from_scratch.checkpoint import (
    check_replaceable,
    read_file,
    read_json,
    replace_folder,
    temporary_folder,
    write_json,
)
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.quantize import QuantizedWeight
from lm_from_scratch.weights.swap import swap_parameters_


class LoRALinear(nn.Linear):
    """A linear map with an adapter: ``lora_a`` (r, in) and ``lora_b`` (out, r), for ``x``
    (..., in)."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    alpha: float
    dropout: float

    @property
    def rank(self) -> int:
        """r."""
        return self.lora_a.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.dropout(x, self.dropout, self.training), self.lora_a)  # (..., r)
        added = F.linear(low, self.lora_b) * (self.alpha / self.rank)
        return F.linear(x, self.weight, self.bias) + added

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha}"


def nothing(name: str) -> bool:
    """Selects no name."""
    return False


def everything(name: str) -> bool:
    """Selects every name."""
    return True


def add_lora_(
    model: nn.Module,
    rank: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    select: Callable[[str], bool] = everything,
    also_train: Callable[[str], bool] = nothing,
    seed: int = 0,
) -> None:
    """Give linear maps of a built model adapters, and freeze all its other parameters, in place.

    ``select`` says by name which of the linear maps of the backbone get one; ``also_train`` by name
    which other parameters stay trainable (norms, the head of a classifier). The result of the model
    does not change before the first step. Make the optimizer afterwards.

    Raises ``ValueError`` for numbers out of range, for a model with adapters, and for what ``peft``
    has no place for: to train a weight or a bias of those linear maps, or an embedding that is the
    head, too.
    """
    check_numbers(rank, alpha, dropout, seed)
    if adapters(model):
        raise ValueError("the model has adapters already: merge_lora_ or a new model comes first")
    maps = backbone_linears(model)
    linears = {name: module for name, module in maps.items() if select(name)}
    if not linears:
        raise ValueError("no linear map was selected")
    check_linears(model, linears, rank)
    extra = {name: p for name, p in model.named_parameters() if also_train(name)}
    for name, parameter in extra.items():
        if isinstance(parameter, QuantizedWeight):
            raise ValueError(f"{name} is quantised, so it cannot be trained")
        if name.rpartition(".")[0] in maps:
            raise ValueError(f"{name} is part of a linear map, of which only an adapter is trained")
        if parameter is getattr(model, "head_weight", None) and name != "lm_head.weight":
            raise ValueError(f"{name} is the head as well: peft would train only one of the two")
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for module in linears.values():
        weight, bound = module.weight, 1 / math.sqrt(module.in_features)
        a = torch.empty(rank, module.in_features, device="cpu")
        a.uniform_(-bound, bound, generator=generator)
        b = torch.zeros(module.out_features, rank, device="cpu")
        pairs.append([nn.Parameter(t.to(weight.device, weight.dtype)) for t in (a, b)])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in extra)
        if name not in extra:
            parameter.grad = None  # or clipping would count it
    for module, pair in zip(linears.values(), pairs, strict=True):
        module.__class__ = LoRALinear
        adapted = cast(LoRALinear, module)
        adapted.lora_a, adapted.lora_b = pair
        adapted.alpha, adapted.dropout = alpha, dropout


def check_numbers(rank: int, alpha: float, dropout: float, seed: int) -> None:
    """Raises ``ValueError`` for numbers that no adapter can have."""
    if type(rank) is not int or rank < 1:
        raise ValueError(f"rank={rank!r} must be an integer, at least 1")
    if not isinstance(alpha, int | float) or not 0.0 < alpha < math.inf:
        raise ValueError(f"alpha={alpha!r} must be a positive number")
    if not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout={dropout!r} must be in [0, 1)")
    if type(seed) is not int:
        raise ValueError(f"seed={seed!r} must be an integer")


def check_linears(model: nn.Module, linears: dict[str, nn.Linear], rank: int) -> None:
    """Raises ``ValueError`` for a linear map of the model that cannot have an adapter."""
    holders = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    for name, module in linears.items():
        if holders[id(module.weight)] > 1:
            raise ValueError(
                f"{name} shares its weight: merging would change the other module, too"
            )
        if type(module) is not nn.Linear:
            raise ValueError(f"{name} is a {type(module).__name__}, not a plain nn.Linear")
        if rank > min(module.in_features, module.out_features):
            raise ValueError(
                f"rank={rank} exceeds what {name} can have, "
                f"{min(module.in_features, module.out_features)}"
            )


def backbone_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear maps of the backbone, or of a model that has none, by their names in the model."""
    inside = set(getattr(model, "backbone", model).modules())
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module in inside
    }


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    """The linear maps with adapters, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


@torch.no_grad()
def merge_lora_(model: nn.Module) -> None:
    """Add each adapter's matrix to its weight and take the adapter away, in place.

    The sum is taken in float64 and rounded once, to the weight's dtype. A quantised weight becomes
    a plain one: rounding the sum to codes again would lose most of a small change (``quantize_``
    does it, if you ``select`` the weights that had adapters). The new weights are swapped in; they
    stay frozen. Raises ``ValueError`` for a model without adapters.
    """
    found = adapters(model)
    if not found:
        raise ValueError("the model has no adapters")
    merged: dict[str, Tensor] = {}
    for name, module in found.items():
        weight = module.weight
        plain = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        change = module.lora_b.double() @ module.lora_a.double() * (module.alpha / module.rank)
        merged[f"{name}.weight".lstrip(".")] = (plain.double() + change).to(weight.dtype)
    swap_parameters_(model, merged)
    for module in found.values():
        del module.lora_a, module.lora_b
        cast(nn.Linear, module).__class__ = nn.Linear


# ------------------------------------------------------------------------------ adapters on disk

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
    found = adapters(model)
    if not found:
        raise ValueError("the model has no adapters")
    folder = Path(folder).resolve()
    check_replaceable(folder, WRITTEN)
    first = next(iter(found.values()))
    kinds = {(m.rank, m.alpha, m.dropout) for m in found.values()}
    if len(kinds) > 1:
        raise ValueError(f"the adapters differ in (rank, alpha, dropout): {sorted(kinds)}")
    parameters = dict(model.named_parameters())
    modules = {name.rpartition(".")[0] for name, p in parameters.items() if p.requires_grad}
    tensors = {
        their_name(name): p.detach().cpu().contiguous()
        for name, p in parameters.items()
        if p.requires_grad
        or name.endswith((".lora_a", ".lora_b"))
        or name.rpartition(".")[0] in modules - set(found)
    }
    gpt2 = isinstance(getattr(getattr(model, "backbone", None), "config", None), GPT2Config)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if hasattr(model, "head_weight") else None,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "target_modules": sorted(found),
        "modules_to_save": sorted(modules - set(found)),
        "fan_in_fan_out": gpt2,  # there, its linear maps are stored as (in, out)
        "bias": "none",
        "inference_mode": True,
    }
    with temporary_folder(folder) as temporary:
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(temporary / "adapter_config.json", config)
        replace_folder(temporary, folder)


def load_lora_(model: nn.Module, folder: str | Path) -> None:
    """Add the adapters that :func:`save_lora` or ``peft`` wrote to a built model, in place. Raises
    ``ValueError`` for a file that does not fit, and for an option of ``peft`` that is not
    supported.

    Raises ``ValueError`` for a file that does not fit, and for an option of ``peft`` that is not
    supported.
    """
    folder = Path(folder)
    config = read_json(folder / "adapter_config.json")
    for key, plain in PLAIN.items():
        if (config.get(key) or plain) != plain:
            raise ValueError(f"{key}={config[key]!r} is not supported, only {plain!r}")
    if (init := config.get("init_lora_weights")) not in INITS:
        raise ValueError(f"init_lora_weights={init!r} is not supported: it is not one of {INITS}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ValueError(f"{folder} has r={rank!r} and lora_alpha={alpha!r}: they must be numbers")
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
