"""The numbers that define an optimizer and its steps, with their defaults and limits.

Nothing here needs torch: the command line shows them before it is loaded.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from lm_from_scratch.limits import Count, Limit, NotNegative, Positive, check, is_plain

Optimizer = Literal["adamw", "galore", "muon"]
ProjectionType = Literal["std", "reverse_std", "left", "right", "full", "random"]
Moments = Literal["keep", "rotate", "reset"]
Basis = Literal["svd", "gram", "subspace"]

#: The numbers that an optimizer has alone.
NUMBERS_OF = {
    "galore": ("rank", "update_proj_gap", "scale", "projection_type", "moments", "basis"),
    "muon": ("muon_scale",),
}

_SHARES = Limit(
    "must be two numbers in [0, 1)",
    lambda betas: (
        isinstance(betas, (tuple, list))
        and len(betas) == 2
        and all(is_plain(beta) and 0 <= beta < 1 for beta in betas)
    ),
)
_ABOVE_0 = Limit("must be above 0", lambda x: x == math.inf or (is_plain(x) and x > 0))
_FACTOR = Limit("must be above 0 and finite", lambda x: is_plain(x) and x > 0)
BITS = Limit("must be 8 or 32", lambda bits: bits in (8, 32))
#: Of the moments and the optimizer: Muon has one momentum, and never in 8 bits.
MOMENTUM_BITS = Limit(
    "is for AdamW and GaLore: Muon keeps its momentum in 32",
    lambda bits, optimizer: bits == 32 or optimizer != "muon",
    "optimizer",
)
#: Of the largest norm and of steps within the backward pass, which never see it.
NOT_CLIPPED = Limit(
    "must be inf with update_in_backward: the norm of all gradients is known only when all weights "
    "have been updated",
    lambda norm, in_backward: norm == math.inf or not in_backward,
    "update_in_backward",
)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The numbers that define an optimizer and its steps."""

    lr: Positive = 1e-3  # highest learning rate
    betas: Annotated[tuple[float, float], _SHARES] = (0.9, 0.95)  # of the moments
    weight_decay: NotNegative = 0.1  # shrinks matrices, not biases and norms
    max_grad_norm: Annotated[float, _ABOVE_0, NOT_CLIPPED] = 1.0  # math.inf does not clip
    optimizer: Optimizer = "adamw"  # of the blocks' matrices
    optim_bits: Annotated[Count, BITS, MOMENTUM_BITS] = 32  # of each number in the moments: 32, 8
    rank: Count = 128  # galore: directions of each matrix
    update_proj_gap: Count = 200  # galore: steps for one basis
    scale: Annotated[float, _FACTOR] = 0.25  # galore: lr * scale is the matrices' learning rate
    projection_type: ProjectionType = "std"  # galore: which side of a matrix is projected
    moments: Moments = "keep"  # galore: what a new basis does to them
    basis: Basis = "gram"  # galore: how it is found
    muon_scale: Positive = 1.0  # muon: factor of the matrices' steps
    update_in_backward: bool = False  # step within the backward pass: less memory, no clipping

    def __post_init__(self) -> None:
        check(self)
