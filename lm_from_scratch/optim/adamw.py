r"""AdamW: every weight gets a step of its own size.

Adam keeps two running means for every weight, of its gradient :math:`g_t` and of the gradient's
square, and divides one by the root of the other:

.. math::

   m_t &= \beta_1 m_{t-1} + (1 - \beta_1) \, g_t, \qquad
   v_t = \beta_2 v_{t-1} + (1 - \beta_2) \, g_t^2 \\
   \hat m_t &= \frac{m_t}{1 - \beta_1^t}, \qquad
   \hat v_t = \frac{v_t}{1 - \beta_2^t}, \qquad
   d_t = \frac{\hat m_t}{\sqrt{\hat v_t} + \epsilon}

Both means start at 0, so the first of them are too small; the hats correct that. The direction
:math:`d_t` has no unit: multiply the loss by 1000, and it stays. Where a gradient keeps its sign it
is near 1 in size, where the sign flips it is near 0. AdamW then moves the weight, and shrinks it
apart from its gradient:

.. math::

   \theta_t = (1 - \eta \lambda) \, \theta_{t-1} - \eta \, d_t

The decay :math:`\lambda` is not an L2 penalty. A penalty would be part of :math:`g_t`, and Adam
would divide it away where gradients are large.

Sources: Kingma, Ba, *Adam*, 2015, arXiv:1412.6980; Loshchilov, Hutter, *Decoupled Weight Decay
Regularization*, 2019, arXiv:1711.05101; Reddi, Kale, Kumar, *On the Convergence of Adam and
Beyond*, 2018, arXiv:1904.09237 (AMSGrad).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from lm_from_scratch.optim.sharded import whole

Number = float | Tensor


def adam_direction(
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Number,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: float = 1e-8,
    max_exp_avg_sq: Tensor | None = None,
) -> tuple[Tensor, ...]:
    r"""The direction :math:`d_t`, then the new :math:`m_t` and :math:`v_t`, all of one shape with
    the ``grad``, its means ``exp_avg`` and ``exp_avg_sq``, of any shape.

    ``step`` is :math:`t`, 1 for the first. :math:`\epsilon` is added after the bias correction.
    Given ``max_exp_avg_sq``, the largest :math:`v` so far (AMSGrad), the direction divides by the
    new one, which is then returned too.
    """
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    largest = [] if max_exp_avg_sq is None else [torch.maximum(max_exp_avg_sq, exp_avg_sq)]
    mean = exp_avg / (1 - beta1**step)
    mean_square = (largest[0] if largest else exp_avg_sq) / (1 - beta2**step)
    return mean / (mean_square.sqrt() + eps), exp_avg, exp_avg_sq, *largest


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Number,
    lr: Number = 1e-3,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    max_exp_avg_sq: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The new ``param``, of one shape with ``grad``, ``exp_avg``, ``exp_avg_sq`` and
    ``max_exp_avg_sq``, any shape, then what :func:`adam_direction` returns behind its direction."""
    direction, *moments = adam_direction(
        grad, exp_avg, exp_avg_sq, step, betas, eps, max_exp_avg_sq
    )
    return (1 - lr * weight_decay) * param - lr * direction, *moments


class AdamW(torch.optim.Optimizer):
    """:func:`adamw` for every parameter, with the options and the state of ``torch.optim.AdamW``.

    Either optimizer loads the other's ``state_dict``. Steps are counted per parameter: one that
    gets its first gradient in step 10 takes a first step then. A parameter without a gradient is
    left alone.

    ``foreach`` and ``fused`` call torch's kernels instead, with the same result within rounding:
    all parameters at once, one pass over memory. ``capturable`` keeps the step count on the
    device; ``differentiable`` lets gradients flow through the step.

    Raises ``ValueError`` for a sparse gradient and ``FloatingPointError`` for one that is not
    finite, before any parameter or state is changed. The check of finiteness reads one number back
    from the device, which ``capturable`` and ``differentiable`` do without.
    """

    optional = frozenset[str]()  # state that need not be in a file

    def __init__(
        self,
        params: Iterable[Any],
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            dict(
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                amsgrad=amsgrad,
                maximize=maximize,
                foreach=foreach,
                capturable=capturable,
                differentiable=differentiable,
                fused=fused,
            ),
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; what it does not say, the defaults say.

        Raises ``ValueError`` as :meth:`check_group`.
        """
        if isinstance(param_group["params"], Iterator):  # it can be read only once
            param_group = {**param_group, "params": list(param_group["params"])}
        self.check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ``ValueError`` for an option that is unknown or out of range."""
        known = {*self.defaults, "params", "param_names", "initial_lr"}  # the last: of schedulers
        if unknown := group.keys() - known:
            raise ValueError(
                f"{sorted(unknown)[0]!r} is no option of {type(self).__name__}, which has "
                f"{sorted(self.defaults)}"
            )
        if not isinstance(group["betas"], (tuple, list)):
            raise ValueError(f"betas={group['betas']} must be two numbers in [0, 1)")
        numbers = group["lr"], *group["betas"]
        tensors = [number for number in numbers if isinstance(number, Tensor)]
        if any(tensor.numel() != 1 for tensor in tensors):
            raise ValueError(f"lr={group['lr']} and betas={group['betas']} must be single numbers")
        if tensors and group["foreach"] and not group["capturable"]:
            raise ValueError("foreach=True takes lr and betas as tensors with capturable=True only")
        for name in ("lr", "eps", "weight_decay"):
            if not (0.0 <= group[name] < math.inf):
                raise ValueError(f"{name}={group[name]} must be finite and not negative")
        if len(group["betas"]) != 2 or not all(0.0 <= beta < 1.0 for beta in group["betas"]):
            raise ValueError(f"betas={group['betas']} must be two numbers in [0, 1)")
        if group["fused"] and (group["foreach"] or group["differentiable"]):
            other = "foreach" if group["foreach"] else "differentiable"
            raise ValueError(f"fused=True and {other}=True exclude each other")
        if group["foreach"] and group["differentiable"]:
            raise ValueError("foreach=True and differentiable=True exclude each other")
        for p in tensors_of(group):
            if p.is_complex() and group["fused"]:
                raise ValueError(f"fused=True is for real parameters, not for {p.dtype}")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient; returns what ``closure`` returned.

        Raises ``ValueError`` for a gradient that is sparse, ``FloatingPointError`` for one that is
        not finite.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_gradients(group["params"], group)
        for group in self.param_groups:
            self.update([p for p in group["params"] if p.grad is not None], group)
        return loss

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """One step for ``params``, parameters of ``group`` whose gradients were checked."""
        for p in params:
            if not self.state[p]:
                self.state[p].update(self.new_state(p, group))
        with torch.set_grad_enabled(group["differentiable"]):
            if group["foreach"] or group["fused"]:
                grads = [p.grad for p in params if p.grad is not None]
                torch_step(params, grads, [self.state[p] for p in params], group)
            else:
                for p in params:
                    self.update_one(p, group)

    def new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state before the first step: zeros."""
        on_device = group["capturable"] or group["fused"]
        device = p.device if on_device else torch.device("cpu")
        zeros = {
            name: torch.zeros_like(p, memory_format=torch.preserve_format)
            for name in moment_names(group)
        }
        return {"step": torch.zeros((), dtype=torch.float32, device=device), **zeros}

    def update_one(self, p: Tensor, group: dict[str, Any]) -> None:
        """The step of one parameter, as the formula says."""
        state, grad = self.state[p], p.grad
        assert grad is not None
        step = state["step"].add_(1)
        moments = [state[name] for name in moment_names(group)]
        tensors = [p, -grad if group["maximize"] else grad, *moments]
        if p.is_complex():  # two real numbers each
            tensors = [torch.view_as_real(tensor) for tensor in tensors]
        old_p, _, *old_moments = tensors
        if group["differentiable"]:  # what autograd remembers must not be overwritten below
            tensors = [tensor.clone() for tensor in tensors]
        first, grad, exp_avg, exp_avg_sq, *largest = tensors
        new = adamw(
            first, grad, exp_avg, exp_avg_sq,
            step.clone() if group["capturable"] or group["differentiable"] else step.item(),
            group["lr"], group["betas"], group["eps"], group["weight_decay"], *largest,
        )  # fmt: skip
        for old, tensor in zip([old_p, *old_moments], new, strict=True):
            old.copy_(tensor.view_as(old))  # a learning rate of shape (1,) adds a dimension

    def state_shapes(self, p: Tensor) -> dict[str, torch.Size]:
        """The names and shapes of the state that a parameter has after its first step."""
        return self.shapes_in(self.group_of(p), p)

    def shapes_in(self, group: dict[str, Any], p: Tensor) -> dict[str, torch.Size]:
        """:meth:`state_shapes` of a parameter with the options of any group."""
        return {"step": torch.Size(), **dict.fromkeys(moment_names(group), p.shape)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in every optimizer of torch, the options of the groups come from the file, too. Raises
        ``ValueError``, before anything is changed, if it is of another optimizer or does not fit a
        parameter."""
        for group in state_dict["param_groups"]:
            if missing := self.defaults.keys() - group.keys():
                raise ValueError(
                    f"the state has no option {sorted(missing)[0]!r}: it is not one of "
                    f"{type(self).__name__}"
                )
            if not group.get("decoupled_weight_decay", True):
                raise ValueError("the state is one of Adam with an L2 penalty, not of AdamW")
            own = {k: v for k, v in group.items() if k not in ("params", "decoupled_weight_decay")}
            self.check_group(own)
        for p, group, state in self.pairs(state_dict):
            if state:
                wanted = self.shapes_in(group, p)
                for name in sorted((state.keys() | wanted.keys()) - self.optional):
                    found, size = getattr(state.get(name), "shape", None), wanted.get(name)
                    if found != size:
                        shapes = [None if x is None else tuple(x) for x in (found, size)]
                        raise ValueError(
                            f"the state {name!r} of a parameter of shape {tuple(p.shape)} has "
                            f"shape {shapes[0]}, expected {shapes[1]}"
                        )
        super().load_state_dict(state_dict)

    def pairs(self, state_dict: dict[str, Any]) -> list[tuple[Tensor, dict[str, Any], Any]]:
        """Every parameter with its group and its state in a ``state_dict``."""
        return [
            (p, theirs, state_dict["state"].get(key))
            for ours, theirs in zip(self.param_groups, state_dict["param_groups"], strict=False)
            for p, key in zip(ours["params"], theirs["params"], strict=False)
        ]

    def group_of(self, p: Tensor) -> dict[str, Any]:
        """The group that a parameter belongs to. Raises ``ValueError`` if it is in none."""
        for group in self.param_groups:
            if any(p is other for other in group["params"]):
                return group
        raise ValueError(f"a parameter of shape {tuple(p.shape)} is in none of the groups")


def tensors_of(group: dict[str, Any]) -> list[Tensor]:
    """The parameters of a group as a caller gives it: one, several, or several with names."""
    params = group.get("params", ())
    listed = [params] if isinstance(params, Tensor) else params
    unnamed = [p[1] if isinstance(p, tuple) else p for p in listed]
    return [p for p in unnamed if isinstance(p, Tensor)]  # torch refuses the others by name


def moment_names(group: dict[str, Any]) -> list[str]:
    """The state that has the shape of the parameter, in the order of :func:`adamw`."""
    return ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]


def torch_step(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    """The step of all parameters by torch's kernels, in place."""
    if not params:
        return
    options = (
        "foreach", "fused", "capturable", "differentiable", "amsgrad", "lr", "weight_decay", "eps",
        "maximize",
    )  # fmt: skip
    torch_adamw(
        params,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states if group["amsgrad"]],
        [state["step"] for state in states],
        has_complex=any(p.is_complex() for p in params),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        **{name: group[name] for name in options},
    )


def check_gradients(params: Iterable[Tensor], group: dict[str, Any]) -> None:
    """Raises ``ValueError`` for a gradient that is sparse, ``FloatingPointError`` for one that is
    not finite."""
    with_grad = [(i, p, p.grad) for i, p in enumerate(params) if p.grad is not None]
    for i, p, grad in with_grad:
        if grad.layout is not torch.strided:
            raise ValueError(
                f"the gradient of parameter {i}, shape {tuple(p.shape)}, is sparse "
                f"({grad.layout}); sparse gradients are not supported: torch.optim.SparseAdam is"
            )
    if group["capturable"] or group["differentiable"] or not with_grad:
        return
    # One sum finds NaN and infinity; a sum that overflowed is looked at again.
    grads = [torch.view_as_real(g) if g.is_complex() else g for _, _, g in with_grad]
    sums = [grad.detach().sum().to(grads[0].device, torch.float32) for grad in grads]
    if math.isfinite(whole(torch.stack(sums)).abs().sum().item()):
        return
    for i, p, grad in with_grad:
        if not whole(torch.isfinite(grad).all().float()).item():
            raise FloatingPointError(
                f"the gradient of parameter {i}, shape {tuple(p.shape)}, is not finite: nothing "
                "was changed"
            )
