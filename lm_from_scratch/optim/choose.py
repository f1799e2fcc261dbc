"""Which optimizer takes the steps of a run: the one that a config asks for.

AdamW moves every weight, or GaLore or Muon the matrices of the blocks, and AdamW the others.

Source: Loshchilov, Hutter, *Decoupled Weight Decay Regularization*, 2019, arXiv:1711.05101.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from lm_from_scratch.models.blocks import blocks
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.config import NUMBERS_OF, OptimizerConfig
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.optim.muon import Muon


def galore_options(config: OptimizerConfig) -> dict[str, Any]:
    """The options of a group of matrices that GaLore projects."""
    return {name: getattr(config, name) for name in NUMBERS_OF["galore"]}


def muon_options(config: OptimizerConfig) -> dict[str, Any]:
    """The options of a group of matrices that Muon moves."""
    return {"momentum": 0.95, "scale": config.muon_scale}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for the matrices; none for biases and norms, which it would only push to 0."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if p.requires_grad:  # the biases of stacked experts have two dimensions
            (decayed if p.dim() >= 2 and not name.endswith("bias") else others).append(p)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def make_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    kind_of: Callable[[type[AdamW]], type[AdamW]] = lambda kind: kind,
) -> AdamW:
    """AdamW; or GaLore or Muon for the matrices of the blocks, and AdamW for all other weights.

    The embedding, the head, the norms and the biases stay with AdamW, as in the papers: the rows
    of an embedding each have a gradient of their own. ``kind_of`` says which class takes the steps
    of another on this model, where its parameters are spread over processes. Raises ``ValueError``
    for a model without anything to train.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("all parameters are frozen (requires_grad=False): nothing can be trained")
    groups = parameter_groups(model, config.weight_decay)
    options: dict[str, Any] = dict(
        lr=config.lr, betas=config.betas, fused=True, optim_bits=config.optim_bits
    )
    if config.optimizer == "adamw":
        return kind_of(AdamW)(groups, **options)
    of_blocks = {id(parameter) for parameter in blocks(model).parameters()}
    matrices, others = groups
    within = [p for p in matrices["params"] if id(p) in of_blocks]
    matrices["params"] = [p for p in matrices["params"] if id(p) not in of_blocks]
    is_muon = config.optimizer == "muon"
    special = muon_options(config) if is_muon else galore_options(config)
    groups = [{**matrices, "params": within, **special}, matrices, others]
    return kind_of(Muon if is_muon else GaLore)(groups, **options)


def state_bytes(model: nn.Module, config: OptimizerConfig) -> int:
    """How many bytes the optimizer of a run will keep between two steps."""
    optimizer = make_optimizer(model, config)
    return sum(
        value.nbytes
        for group in optimizer.param_groups
        for p in group["params"]
        for value in optimizer.new_state(p.to("meta"), group).values()
    )
