r"""AdamW in one pass over memory, in place.

With the gradient g, the running means m and v, and the constants that a step t gives:

.. math::

   m' &= \beta_1 m + (1 - \beta_1) \, g, \qquad v' = \beta_2 v + (1 - \beta_2) \, g^2 \\
   \theta' &= (1 - \eta\lambda) \, \theta
   - \eta \, \frac{m' / (1 - \beta_1^t)}{\sqrt{v' / (1 - \beta_2^t)} + \epsilon}

Four tensors are read (:math:`\theta`, g, m, v) and three written: 7 tensors of traffic and some 15
operations for each weight, which a GPU does while it waits. In place, no memory is needed beyond
what the optimizer holds anyway.

Everything that depends on the step alone is computed once on the host, in the float64 of Python.
In float32, :math:`1 - \beta_2` of 0.999 would be wrong in its fifth digit, and so would v.

Sources: Kingma, Ba, *Adam*, 2015, arXiv:1412.6980; Loshchilov, Hutter, *Decoupled Weight Decay
Regularization*, 2019, arXiv:1711.05101.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lm_from_scratch.kernels.device import DTYPES, check_device
from lm_from_scratch.optim import adamw as reference
from lm_from_scratch.optim.adamw import Number

BLOCK = 1024  # weights of a program: 8 for each of its 128 threads


@triton.jit
def adamw_kernel(
    param, grad, exp_avg, exp_avg_sq, n,
    beta1, rest1, beta2, rest2, eps, decay, lr, correction1, correction2, of_the_step,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if of_the_step is not None:  # the host does not know these numbers
        decay, lr = tl.load(of_the_step), tl.load(of_the_step + 1)
        correction1, correction2 = tl.load(of_the_step + 2), tl.load(of_the_step + 3)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    p = tl.load(param + offsets, mask=inside).to(tl.float32)
    g = tl.load(grad + offsets, mask=inside).to(tl.float32)
    m = tl.load(exp_avg + offsets, mask=inside).to(tl.float32)
    v = tl.load(exp_avg_sq + offsets, mask=inside).to(tl.float32)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    direction = m / correction1 / (tl.sqrt(v / correction2) + eps)
    tl.store(param + offsets, decay * p - lr * direction, mask=inside)
    tl.store(exp_avg + offsets, m, mask=inside)
    tl.store(exp_avg_sq + offsets, v, mask=inside)


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Number,
    lr: Number = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> None:
    """:func:`adamw` that overwrites ``param``, ``exp_avg`` and ``exp_avg_sq``; ``grad`` is of the
    same shape.

    Raises ``ValueError`` as :func:`adamw`, and for a tensor that cannot be overwritten.
    """
    check(param, grad, exp_avg, exp_avg_sq, step, lr, betas)
    check_overwritten("adamw", param=param, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    beta1, beta2 = betas
    numbers = [beta1, 1 - beta1, beta2, 1 - beta2, eps]
    if not isinstance(step, Tensor) and not isinstance(lr, Tensor):
        numbers += [1 - lr * weight_decay, lr, 1 - beta1**step, 1 - beta2**step]
        adamw_in_place(param, grad, exp_avg, exp_avg_sq, [float(x) for x in numbers], None)
        return
    t, rate = (
        torch.as_tensor(x, dtype=torch.float64, device=param.device).reshape(()) for x in (step, lr)
    )
    of_the_step = torch.stack([1 - rate * weight_decay, rate, 1 - beta1**t, 1 - beta2**t]).float()
    adamw_in_place(param, grad, exp_avg, exp_avg_sq, [*numbers, 0.0, 0.0, 1.0, 1.0], of_the_step)


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Number,
    lr: Number = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`lm_from_scratch.optim.adamw.adamw`: the new parameter and moments, each in the dtype
    of the old one, on copies. ``param``, ``grad``, ``exp_avg`` and ``exp_avg_sq`` have one shape.
    No gradient flows through the step.

    Half-precision tensors are computed in float32 and rounded once, at the end. ``step`` and ``lr``
    may be tensors of one number, which the host does not read. Raises ``ValueError`` for tensors
    that do not fit or are not where kernels run, and for gradients.
    """
    new = param.clone(), exp_avg.clone(), exp_avg_sq.clone()
    adamw_(new[0], grad, *new[1:], step, lr, betas, eps, weight_decay)
    return new


def check(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Number,
    lr: Number,
    betas: tuple[float, float],
) -> None:
    """Raises ``ValueError`` for what the kernel cannot do."""
    instead = "lm_from_scratch.optim.adamw.adamw can do that"
    tensors = dict(param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    check_device("adamw", **tensors)
    for name, x in tensors.items():
        if x.shape != param.shape or x.dtype not in DTYPES:
            raise ValueError(
                f"adamw: param has shape {tuple(param.shape)}, {name} is {x.dtype} of shape "
                f"{tuple(x.shape)}; all must have one shape, and be of {DTYPES}"
            )
    if any(isinstance(beta, Tensor) for beta in betas):
        raise ValueError(f"adamw: betas={betas} must be numbers; {instead}")
    check_numbers("adamw", step=step, lr=lr)
    for name, value in {**tensors, "step": step, "lr": lr}.items():
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"adamw: {name} requires a gradient, and the kernel's step has none: call it under "
                f"torch.no_grad(); {instead}"
            )


def check_numbers(kernel: str, **numbers: Number) -> None:
    """Raises ``ValueError`` for a tensor of several numbers."""
    for name, x in numbers.items():
        if isinstance(x, Tensor) and x.numel() != 1:
            raise ValueError(f"{kernel}: {name} has shape {tuple(x.shape)}; it must be one number")


def check_overwritten(kernel: str, **tensors: Tensor) -> None:
    """Raises ``ValueError`` for what ``expand`` made: one number in several places, of several
    programs.

    Other ways to overlap, as those of ``as_strided``, are not looked for.
    """
    for name, x in tensors.items():
        if any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(
                f"{kernel}: {name} of shape {tuple(x.shape)} has strides {x.stride()}; a number "
                "that stands in several places cannot be overwritten: call contiguous() on it"
            )


@torch.library.custom_op("lm_from_scratch::adamw_", mutates_args=("param", "exp_avg", "exp_avg_sq"))
def adamw_in_place(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    numbers: list[float],
    of_the_step: Tensor | None,
) -> None:
    p, g, m, v = (x.contiguous() for x in (param, grad, exp_avg, exp_avg_sq))
    n = p.numel()
    adamw_kernel[(triton.cdiv(n, BLOCK),)](p, g, m, v, n, *numbers, of_the_step, BLOCK=BLOCK)
    for old, new in (param, p), (exp_avg, m), (exp_avg_sq, v):
        if new is not old:  # it has other strides
            old.copy_(new)


@adamw_in_place.register_fake
def _(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    numbers: list[float],
    of_the_step: Tensor | None,
) -> None:
    pass


class AdamW(reference.AdamW):
    """:class:`lm_from_scratch.optim.adamw.AdamW` whose step is :func:`adamw_`, one launch for each
    parameter. Either loads the other's ``state_dict``.

    Options that need another step are refused.
    """

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ``ValueError`` also for an option that needs another step."""
        super().check_group(group)
        use = "use lm_from_scratch.optim.adamw.AdamW"
        for name, other in (("fused", group["fused"]), ("optim_bits", group["optim_bits"] != 32)):
            if other:
                raise ValueError(f"{name}={group[name]}: the kernel cannot do that; {use}")
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            raise ValueError(f"betas={group['betas']}: the kernel takes numbers; {use}")
        for p in reference.tensors_of(group):
            if p.dtype not in DTYPES or hasattr(p, "full_tensor"):
                raise ValueError(
                    f"a parameter is {type(p).__name__} of {p.dtype}: the kernel takes whole "
                    f"tensors of {DTYPES}; {use}"
                )
            check_overwritten(type(self).__name__, parameter=p)

    def update_one(self, p: Tensor, group: dict[str, Any]) -> None:
        """The step of one parameter, in one launch."""
        state, grad = self.state[p], p.grad
        assert grad is not None
        state["step"] += 1
        adamw_(
            p, grad, state["exp_avg"], state["exp_avg_sq"], state["step"].item(),
            group["lr"], group["betas"], group["eps"], group["weight_decay"],
        )  # fmt: skip
