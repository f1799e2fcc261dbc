r"""LoRA: train two small matrices beside a large one that stays as it is.

A linear map :math:`W` (out, in) is frozen, and the product of two thin matrices is added to it,
:math:`A` (r, in) and :math:`B` (out, r), which alone have gradients and optimizer state:

.. math::

   y = W x + \frac{\alpha}{r} B A x

B starts at zero, so the model begins as it was. W may be quantised: then a large model is trained
in little memory (QLoRA). :func:`merge_lora_` adds :math:`\frac{\alpha}{r} B A` to W and leaves the
plain model.

Adapters are surgery on a built model. :mod:`lm_from_scratch.interop.peft` writes and reads them.

Sources: Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models*, 2021, arXiv:2106.09685
(which draws A from a normal distribution; its authors' code and ``peft`` draw it uniformly, and so
does this); Dettmers et al., *QLoRA: Efficient Finetuning of Quantized LLMs*, 2023,
arXiv:2305.14314.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.layers.head import TiedHead
from lm_from_scratch.limits import Count, Positive, Share, require
from lm_from_scratch.weights.quantized_weight import QuantizedWeight
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


def add_lora_(
    model: nn.Module,
    rank: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    select: Callable[[str], bool] | None = None,
    also_train: Callable[[str], bool] = nothing,
    seed: int = 0,
) -> None:
    """Give linear maps of a built model adapters, and freeze all its other parameters, in place.

    ``select`` says by name which of the linear maps of the backbone get one, by default all but
    those with a single output (the gate of an expert): an adapter would be as large as the map.
    ``also_train`` says by name which other parameters stay trainable (norms, the head of a
    classifier). The result of the model does not change before the first step. Make the optimizer
    afterwards.

    Raises ``ValueError`` for numbers out of range, for a model with adapters, and for what ``peft``
    has no place for: to train a weight or a bias of those linear maps, or an embedding that is the
    head, too.
    """
    check_numbers(rank, alpha, dropout, seed)
    linears = {
        name: module
        for name, module in backbone_linears(model).items()
        if (select(name) if select else module.out_features > 1)
    }
    for name, module in linears.items():
        if rank > (most := min(module.in_features, module.out_features)):
            raise ValueError(f"rank={rank} exceeds what {name} can have, {most}")
    put_adapters_(model, dict.fromkeys(linears, (rank, alpha)), dropout, also_train, seed)


def put_adapters_(
    model: nn.Module,
    sizes: Mapping[str, tuple[int, float]],
    dropout: float = 0.0,
    also_train: Callable[[str], bool] = nothing,
    seed: int = 0,
) -> None:
    """:func:`add_lora_` for the linear maps that ``sizes`` names, each with a rank and an alpha of
    its own: adapters from elsewhere may have more rank than a map can use. Raises ``ValueError`` as
    it does."""
    for rank, alpha in sizes.values():
        check_numbers(rank, alpha, dropout, seed)
    if adapters(model):
        raise ValueError("the model has adapters already: merge_lora_ or a new model comes first")
    maps = backbone_linears(model)
    linears = {name: module for name, module in maps.items() if name in sizes}
    if not linears:
        raise ValueError("no linear map was selected")
    check_linears(model, linears)
    extra = {name: p for name, p in model.named_parameters() if also_train(name)}
    for name, parameter in extra.items():
        if isinstance(parameter, QuantizedWeight):
            raise ValueError(f"{name} is quantised, so it cannot be trained")
        if name.rpartition(".")[0] in maps:
            raise ValueError(f"{name} is part of a linear map, of which only an adapter is trained")
        if any(isinstance(m, TiedHead) and m.weight is parameter for m in model.modules()):
            raise ValueError(f"{name} is the head as well: peft would train only one of the two")
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for name, module in linears.items():
        weight, bound = module.weight, 1 / math.sqrt(module.in_features)
        a = torch.empty(sizes[name][0], module.in_features, device="cpu")
        a.uniform_(-bound, bound, generator=generator)
        b = torch.zeros(module.out_features, len(a), device="cpu")
        pairs.append([nn.Parameter(t.to(weight.device, weight.dtype)) for t in (a, b)])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in extra)
        if name not in extra:
            parameter.grad = None  # or clipping would count it
    for (name, module), pair in zip(linears.items(), pairs, strict=True):
        module.__class__ = LoRALinear
        adapted = cast(LoRALinear, module)
        adapted.lora_a, adapted.lora_b = pair
        adapted.alpha, adapted.dropout = sizes[name][1], dropout


def check_numbers(rank: int, alpha: float, dropout: float, seed: int) -> None:
    """Raises ``ValueError`` for numbers that no adapter can have."""
    require(Count, rank=rank)
    require(Positive, alpha=alpha)
    require(Share, dropout=dropout)
    require(int, seed=seed)


def check_linears(model: nn.Module, linears: dict[str, nn.Linear]) -> None:
    """Raises ``ValueError`` for a linear map of the model that cannot have an adapter."""
    holders = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    for name, module in linears.items():
        if holders[id(module.weight)] > 1:
            raise ValueError(
                f"{name} shares its weight: merging would change the other module, too"
            )
        if type(module) is not nn.Linear:
            raise ValueError(f"{name} is a {type(module).__name__}, not a plain nn.Linear")


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
    maps = adapters(model)
    if not maps:
        raise ValueError("the model has no adapters")
    merged: dict[str, Tensor] = {}
    for name, module in maps.items():
        weight = module.weight
        plain = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        change = module.lora_b.double() @ module.lora_a.double() * (module.alpha / module.rank)
        merged[f"{name}.weight".lstrip(".")] = (plain.double() + change).to(weight.dtype)
    swap_parameters_(model, merged)
    for module in maps.values():
        del module.lora_a, module.lora_b
        cast(nn.Linear, module).__class__ = nn.Linear
