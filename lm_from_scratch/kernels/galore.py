r"""The step of GaLore in three launches, which leave nothing of the weight's size behind.

.. math::

   R = P^\top G \, Q, \qquad
   d = \mathrm{Adam}(R), \qquad
   W \leftarrow (1 - \eta \lambda) \, W - \eta \, \alpha \, P \, d \, Q^\top

with a weight and a gradient of shape (m, n), and usually one of the bases, :math:`P` (m, r) or
:math:`Q` (n, r):

1. *project* is a product, of a transpose that only exists as strides;
2. *Adam* is one pass over the few numbers of :math:`R`, (r, n) or (m, r);
3. *project back* is a product, each tile of which meets its part of the weight before it is stored.

In PyTorch, a weight of bfloat16 and its gradient are first copied to float32, and the change
:math:`P d Q^\top` is a third matrix (m, n) that is written and read again. Here the weight is read
and written once, in its own dtype, and everything between is float32.

Both products together have 4 m n r operations: with a rank of 128, 512 for each number of the
weight. Where AdamW waits for memory, GaLore computes.

Source: Zhao et al., *GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection*, 2024,
arXiv:2403.03507.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lm_from_scratch.kernels.adamw import AdamW, check_numbers, check_overwritten
from lm_from_scratch.kernels.device import check_alike, check_device
from lm_from_scratch.kernels.matmul import launch
from lm_from_scratch.optim import galore as reference
from lm_from_scratch.optim.adamw import Number, tensors_of
from lm_from_scratch.optim.galore import is_projected

BLOCK = 1024  # numbers of a program of the elementwise kernel


@triton.jit
def adam_direction_kernel(
    low, exp_avg, exp_avg_sq, direction, n,
    beta1, rest1, beta2, rest2, correction1, correction2, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    g = tl.load(low + offsets, mask=inside)
    m = beta1 * tl.load(exp_avg + offsets, mask=inside) + rest1 * g
    v = beta2 * tl.load(exp_avg_sq + offsets, mask=inside) + rest2 * g * g
    d = m / correction1 / (tl.sqrt(v / correction2) + eps)
    tl.store(exp_avg + offsets, m, mask=inside)
    tl.store(exp_avg_sq + offsets, v, mask=inside)
    tl.store(direction + offsets, d, mask=inside)


def galore_step_(
    param: Tensor,
    grad: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Number,
    lr: Number = 1e-3,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    scale: float = 0.25,
) -> None:
    """:func:`galore_step` that overwrites the ``param`` (m, n) and the moments ``exp_avg`` and
    ``exp_avg_sq`` (r or m, r or n), with its ``grad`` (m, n) and the bases ``left`` (m, r) and
    ``right`` (n, r).

    The parameter and its gradient have one dtype and any strides. Bases and moments are float32,
    and the moments contiguous. Raises ``ValueError`` for others, without a basis, for gradients,
    and where kernels do not run.
    """
    check_step(param, grad, left, right, exp_avg, exp_avg_sq)
    check_overwritten("galore_step", param=param)  # moments are contiguous
    check_numbers("galore_step", step=step, lr=lr, beta1=betas[0], beta2=betas[1])
    low = project_forward(grad, left, right)
    update_(
        param, low, left, right, exp_avg, exp_avg_sq,
        float(step), float(lr), [float(beta) for beta in betas], eps, weight_decay, scale,
    )  # fmt: skip


def galore_step(
    param: Tensor,
    grad: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Number,
    lr: Number = 1e-3,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    scale: float = 0.25,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`lm_from_scratch.optim.galore.galore_step`, on copies, and without a gradient: of
    ``param`` (m, n), ``grad`` (m, n), ``left`` (m, r), ``right`` (n, r), ``exp_avg`` and
    ``exp_avg_sq`` (r or m, r or n)."""
    param, exp_avg, exp_avg_sq = (
        tensor.clone(memory_format=torch.contiguous_format)
        for tensor in (param, exp_avg, exp_avg_sq)
    )
    options = step, lr, betas, eps, weight_decay, scale
    galore_step_(param, grad, left, right, exp_avg, exp_avg_sq, *options)
    return param, exp_avg, exp_avg_sq


def check_step(
    param: Tensor,
    grad: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
) -> None:
    """Raises ``ValueError`` for what the kernels cannot do."""
    others = dict(left=left, right=right, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    check_device("galore_step", param=param, grad=grad, **others)
    check_alike("galore_step", param=param, grad=grad)
    if param.dim() != 2:
        raise ValueError(
            f"galore_step: param has shape {tuple(param.shape)} and must be a matrix: view a "
            "weight of more dimensions as (out, everything else)"
        )
    for name, tensor in dict(param=param, grad=grad, **others).items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"galore_step: {name} requires a gradient, which the kernels do not compute: call "
                "it under torch.no_grad(), or use lm_from_scratch.optim.galore.galore_step"
            )
    if left is None and right is None:
        raise ValueError("galore_step: left and right are None; without a basis, adamw is the step")
    m, n = param.shape
    rank_left = m if left is None else left.shape[-1]
    rank_right = n if right is None else right.shape[-1]
    low = rank_left, rank_right
    wanted = dict(left=(m, rank_left), right=(n, rank_right), exp_avg=low, exp_avg_sq=low)
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.shape != wanted[name] or tensor.dtype != torch.float32:
            raise ValueError(
                f"galore_step: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}; with a "
                f"param of shape {(m, n)} it must be float32 of shape {wanted[name]}"
            )
        if name.startswith("exp") and not tensor.is_contiguous():
            raise ValueError(
                f"galore_step: {name} has strides {tensor.stride()}; call contiguous() on it"
            )


@torch.library.custom_op("lm_from_scratch::galore_project", mutates_args=())
def project_forward(grad: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """The coordinates, in float32, of a gradient of any dtype."""
    low = grad
    if left is not None:  # as (G^T P)^T: the operand that may be narrow stands first
        low = left.new_empty(left.shape[1], grad.shape[1])  # (r, n)
        launch(grad.mT, left, low.mT)
    if right is not None:
        first, low = low, right.new_empty(low.shape[0], right.shape[1])  # (m, r) or (r, r)
        launch(first, right, low)
    return low


@project_forward.register_fake
def _(grad: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    rows = grad.shape[0] if left is None else left.shape[1]
    columns = grad.shape[1] if right is None else right.shape[1]
    return grad.new_empty(rows, columns, dtype=torch.float32)


@torch.library.custom_op(
    "lm_from_scratch::galore_update", mutates_args=("param", "exp_avg", "exp_avg_sq")
)
def update_(
    param: Tensor,
    low: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: float,
    lr: float,
    betas: list[float],
    eps: float,
    weight_decay: float,
    scale: float,
) -> None:
    """The step of a matrix from its coordinates ``low``, which stay as they are."""
    direction, n = torch.empty_like(low), low.numel()
    # 1 - beta in float32 would be wrong in the fifth digit
    (beta1, rest1), (beta2, rest2) = ((beta, 1 - beta) for beta in betas)
    corrections = (1 - beta**step for beta in betas)
    adam_direction_kernel[(triton.cdiv(n, BLOCK),)](
        low, exp_avg, exp_avg_sq, direction, n,
        beta1, rest1, beta2, rest2, *corrections, eps, BLOCK=BLOCK,
    )  # fmt: skip
    if left is None:
        assert right is not None
        a, b = direction, right.mT
    elif right is None:
        a, b = left, direction
    else:
        a, b = left, direction.new_empty(len(direction), len(right))  # (m, r), (r, n)
        launch(direction, right.mT, b)
    launch(a, b, param, param, beta=1 - lr * weight_decay, alpha=-lr * scale)


class GaLore(reference.GaLore, AdamW):
    """:class:`lm_from_scratch.optim.galore.GaLore` that takes these steps; what is not projected
    takes those of :func:`~lm_from_scratch.kernels.adamw.adamw_`.

    Bases are made by PyTorch. Either optimizer loads the other's ``state_dict``. Refused are the
    options that :class:`~lm_from_scratch.kernels.adamw.AdamW` refuses, and a weight of three or
    more dimensions whose memory is not a matrix.
    """

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ``ValueError`` also for a weight of more dimensions whose memory is not a
        matrix."""
        super().check_group(group)
        for p in tensors_of(group):
            if is_projected(p, group) and p.dim() > 2 and not p.is_contiguous():
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} has strides {p.stride()}; the kernels "
                    "take it as a matrix, for which it must be contiguous"
                )

    def coordinates(self, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        """The ``grad`` (m, n) in the coordinates of the basis."""
        left, right = state.get("left"), state.get("right")
        check_step(grad, grad, left, right, state["exp_avg"], state["exp_avg_sq"])
        return project_forward(grad, left, right).nan_to_num_()  # as in the reference

    @torch.no_grad()
    def update_projected(self, p: Tensor, low: Tensor, group: dict[str, Any]) -> None:
        """The step of one matrix from its projected gradient ``low`` (r or m, r or n)."""
        state = self.state[p]
        state["age"] += 1
        state["step"] += 1
        left, right = state.get("left"), state.get("right")
        betas = [float(beta) for beta in group["betas"]]
        update_(
            p.view(len(p), -1), low, left, right, state["exp_avg"], state["exp_avg_sq"],
            state["step"].item(), float(group["lr"]), betas, group["eps"], group["weight_decay"],
            group["scale"],
        )  # fmt: skip
