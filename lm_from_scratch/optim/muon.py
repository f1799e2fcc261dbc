r"""Muon: a step of the same size in every direction of a matrix.

A gradient of a weight matrix is a sum of a few strong directions and many weak ones: its singular
values differ by factors of hundreds. Muon keeps the directions and makes all the values 1. With
the running mean :math:`B_t` of the gradients, and :math:`B = U \Sigma V^\top`:

.. math::

   B_t = \mu B_{t-1} + (1 - \mu) \, G_t, \qquad
   W_t = (1 - \eta \lambda) \, W_{t-1}
       - \eta \, \alpha \, s \, \mathrm{orthogonalize}(\mu B_t + (1 - \mu) \, G_t)

where orthogonalize gives nearly :math:`U V^\top`, and :math:`s` depends on the shape of the matrix.
(The argument is Nesterov's momentum; without it, it is :math:`B_t`.) One number is kept for each
weight, half of what AdamW keeps.

No singular value decomposition is needed. An odd polynomial of a matrix,
:math:`a X + b \, X X^\top X + c \, (X X^\top)^2 X`, acts on each singular value alone, as
:math:`a \sigma + b \sigma^3 + c \sigma^5`, and leaves the directions. Applied again and again (a
Newton-Schulz iteration) it brings every value near 1. The usual coefficients do not converge to 1:
they trade that for speed. Five steps leave values of at least a hundredth of the Frobenius norm
between 0.68 and 1.14; weaker ones are on their way, and none is above 1.21.

Muon is for the matrices within a model. The rows of an embedding and of a head belong to one token
each, biases and norms have no directions: these stay with AdamW.

Sources: Jordan et al., *Muon: An optimizer for hidden layers in neural networks*, 2024,
https://kellerjordan.github.io/posts/muon/; Liu et al., *Muon is Scalable for LLM Training*, 2025,
arXiv:2502.16982 (decay, and the scale that matches AdamW); Bernstein, Newhouse, *Old Optimizer, New
Norm*, 2024, arXiv:2409.20325.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.optim.adamw import AdamW, Number
from lm_from_scratch.optim.config import MOMENTUM_BITS

#: The steepest at 0, so that the weakest directions grow fastest: by 3.4 in each step.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

#: A matrix below this norm stays as small as it is, instead of becoming rounding of size 1.
SMALLEST_NORM = 1e-7

SCALES = ("original", "match_rms_adamw")
DTYPES = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}


def orthogonalize(
    G: Tensor, steps: int = 5, coefficients: tuple[float, float, float] = COEFFICIENTS
) -> Tensor:
    """Nearly the matrix U V^T of ``G`` = U S V^T (m, n), in its dtype: the same singular vectors,
    and singular values near 1.

    Raises ``ValueError`` for anything but a matrix.
    """
    if G.dim() != 2:
        raise ValueError(f"a tensor of shape {tuple(G.shape)} must be a matrix to have directions")
    a, b, c = coefficients
    X = G.mT if G.shape[0] > G.shape[1] else G  # (s, l): the smaller side first
    X = X / X.norm().clamp(min=SMALLEST_NORM)  # no singular value is above 1
    for _ in range(steps):
        gram = X @ X.mT  # (s, s)
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)  # b A + c A A
        X = torch.addmm(X, polynomial, X, beta=a)  # a X + (b A + c A A) X
    return X.mT if G.shape[0] > G.shape[1] else X


def scale_of(m: int, n: int, adjust_lr_fn: str = "match_rms_adamw") -> float:
    """What an orthogonal (m, n) matrix, of rms 1 / sqrt(max(m, n)), is multiplied with.

    ``original``: sqrt(m / n) for a tall one, so that a step changes outputs alike in all shapes.
    ``match_rms_adamw``: to an rms of 0.2 in all shapes, about that of AdamW's direction, so that
    its learning rates fit.
    """
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, m / n))
    return 0.2 * math.sqrt(max(m, n))


class Muon(AdamW):
    """Muon for the matrices of the groups that name a ``momentum``, AdamW for everything else.

    .. code-block:: python

       matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
       others = [p for p in model.parameters() if all(p is not m for m in matrices)]
       optimizer = Muon([{"params": matrices, "momentum": 0.95}, {"params": others}], lr=2e-3)

    A group has AdamW's options and these; most names are those of ``torch.optim.Muon``:

    * ``momentum``: μ; ``None`` is plain AdamW. A weight of three dimensions, like that of experts,
      is a stack of matrices. All others, and matrices of one row or column, are left to AdamW.
    * ``nesterov``: look ahead, as in the formula above.
    * ``ns_steps`` and ``ns_coefficients``: of :func:`orthogonalize`.
    * ``adjust_lr_fn``: ``match_rms_adamw`` or ``original``, see :func:`scale_of`.
    * ``scale``: α, another factor of the step. The decay is not multiplied.
    * ``ns_dtype``: of the products in it, ``float32`` or ``bfloat16``; ``None`` is the weight's.
      torch has bfloat16, which is faster on a GPU, and on most processors slower.

    The state of a matrix is its ``momentum_buffer``. For parameters that are spread over several
    processes there is :class:`~lm_from_scratch.runs.sharded.ShardedMuon`. Raises ``ValueError`` for
    ``optim_bits=8`` in a group with momentum.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        momentum: float | None = None,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        adjust_lr_fn: str = "match_rms_adamw",
        scale: float = 1.0,
        ns_dtype: str | None = None,
        fused: bool | None = None,
        optim_bits: int = 32,
    ) -> None:
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused, momentum=momentum,
            nesterov=nesterov, ns_steps=ns_steps, ns_coefficients=ns_coefficients,
            adjust_lr_fn=adjust_lr_fn, scale=scale, ns_dtype=ns_dtype, optim_bits=optim_bits,
        )  # fmt: skip
        torch.optim.Optimizer.__init__(self, params, defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ``ValueError`` for an option that is unknown or out of range."""
        super().check_group(group)
        momentum, steps, numbers = (group[n] for n in ("momentum", "ns_steps", "ns_coefficients"))
        if momentum is not None and not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum={momentum} must be None or in [0, 1)")
        if type(steps) is not int or not 1 <= steps < 100:
            raise ValueError(f"ns_steps={steps!r} must be a whole number from 1 to 99")
        if not isinstance(numbers, (tuple, list)) or len(numbers) != 3:
            raise ValueError(f"ns_coefficients={numbers!r} must be three numbers")
        for name, known in (("adjust_lr_fn", SCALES), ("ns_dtype", tuple(DTYPES))):
            if group[name] not in known:
                raise ValueError(f"{name}={group[name]!r} must be one of {known}")
        if not 0.0 < group["scale"] < math.inf:
            raise ValueError(f"scale={group['scale']} must be above 0 and finite")
        if momentum is not None:
            MOMENTUM_BITS.check("optim_bits", {**group, "optimizer": "muon"})

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """One step for ``params``, parameters of ``group`` whose gradients were checked."""
        super().update([p for p in params if not is_orthogonalized(p, group)], group)
        for p in params:
            if is_orthogonalized(p, group):
                self.update_matrix(p, group)

    @torch.no_grad()
    def update_matrix(self, p: Tensor, group: dict[str, Any]) -> None:
        """The step of one matrix, as the formula says."""
        if not self.state[p]:
            self.state[p].update(self.new_state(p, group))
        grad, mean, momentum = p.grad, self.state[p]["momentum_buffer"], group["momentum"]
        assert grad is not None
        mean.lerp_(grad, 1 - momentum)
        direction = self.orthogonal(grad.lerp(mean, momentum) if group["nesterov"] else mean, group)
        lr = float(group["lr"])
        factor = scale_of(p.shape[-2], p.shape[-1], group["adjust_lr_fn"])
        p.mul_(1 - lr * group["weight_decay"])
        p.add_(direction, alpha=-lr * group["scale"] * factor)

    def orthogonal(self, mean: Tensor, group: dict[str, Any]) -> Tensor:
        """:func:`orthogonalize` with the options of a group, of a ``mean`` (m, n) or (E, m, n)."""
        if mean.dim() == 3:
            return torch.stack([self.orthogonal(one, group) for one in mean])
        mean = mean.to(DTYPES[group["ns_dtype"]] or mean.dtype)
        return orthogonalize(mean, group["ns_steps"], group["ns_coefficients"])

    def shapes_in(self, group: dict[str, Any], p: Tensor) -> dict[str, torch.Size]:
        if not is_orthogonalized(p, group):
            return super().shapes_in(group, p)
        return {"momentum_buffer": p.shape}

    def new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state before the first step: zeros."""
        if not is_orthogonalized(p, group):
            return super().new_state(p, group)
        return {"momentum_buffer": torch.zeros_like(p, memory_format=torch.preserve_format)}


def is_orthogonalized(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether a parameter of this group takes Muon's steps."""
    return group["momentum"] is not None and p.dim() in (2, 3) and min(p.shape[-2:]) > 1
