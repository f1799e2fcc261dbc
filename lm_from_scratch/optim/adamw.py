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
Regularization*, 2019, arXiv:1711.05101.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from lm_from_scratch.optim.config import BITS
from lm_from_scratch.optim.eight_bit import MOMENTS, decoded, is_coded, stored, stored_shapes

Number = float | Tensor


def adam_direction(
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Number,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""The direction :math:`d_t`, then the new :math:`m_t` and :math:`v_t`, all of one shape with
    the ``grad``, its means ``exp_avg`` and ``exp_avg_sq``, of any shape.

    ``step`` is :math:`t`, 1 for the first. :math:`\epsilon` is added after the bias correction.
    """
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    mean = exp_avg / (1 - beta1**step)
    mean_square = exp_avg_sq / (1 - beta2**step)
    return mean / (mean_square.sqrt() + eps), exp_avg, exp_avg_sq


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
) -> tuple[Tensor, Tensor, Tensor]:
    """The new ``param``, of one shape with ``grad``, ``exp_avg`` and ``exp_avg_sq``, any shape,
    then the new moments."""
    direction, exp_avg, exp_avg_sq = adam_direction(grad, exp_avg, exp_avg_sq, step, betas, eps)
    return (1 - lr * weight_decay) * param - lr * direction, exp_avg, exp_avg_sq


class AdamW(torch.optim.Optimizer):
    """:func:`adamw` for every parameter. It loads a ``state_dict`` of ``torch.optim.AdamW``, which
    loads one of this optimizer.

    Steps are counted per parameter: one that gets its first gradient in step 10 takes a first step
    then. A parameter without a gradient is left alone. ``fused`` calls torch's kernel instead, with
    the same result within rounding: all parameters at once, one pass over memory.

    ``optim_bits``, named as in bitsandbytes, is 32, or 8 for moments of one byte a number
    (:mod:`lm_from_scratch.optim.eight_bit`) where they have at least 4096 numbers. They are decoded
    for one parameter at a time, into float32 at least. torch's AdamW takes the codes
    for numbers, and ruins the weights. An option that is changed takes effect with the next step.

    Raises ``ValueError`` for a sparse gradient and ``FloatingPointError`` for one that is not
    finite, before any parameter or state is changed. The check of finiteness reads one number back
    from the device.
    """

    optional = frozenset[str]()  # state that need not be in a file
    after_zero_grad: Callable[[], None] | None = None  # what else is to be forgotten then

    def __init__(
        self,
        params: Iterable[Any],
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        fused: bool | None = None,
        optim_bits: int = 32,
    ) -> None:
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused,
            optim_bits=optim_bits,
        )  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; what it does not say, the defaults say."""
        if isinstance(param_group["params"], Iterator):  # it can be read only once
            param_group = {**param_group, "params": list(param_group["params"])}
        self.check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ``ValueError`` for an option that is unknown or out of range, and for parameters
        that are no floating-point numbers."""
        known = {*self.defaults, "params", "param_names", "initial_lr"}  # the last: of schedulers
        if unknown := group.keys() - known:
            raise ValueError(
                f"{sorted(unknown)[0]!r} is no option of {type(self).__name__}, which has "
                f"{sorted(self.defaults)}"
            )
        if not isinstance(group["betas"], (tuple, list)):
            raise ValueError(f"betas={group['betas']} must be two numbers in [0, 1)")
        numbers = group["lr"], *group["betas"]
        if any(isinstance(number, Tensor) and number.numel() != 1 for number in numbers):
            raise ValueError(f"lr={group['lr']} and betas={group['betas']} must be single numbers")
        for name in ("lr", "eps", "weight_decay"):
            if not isinstance(group[name], Real | Tensor) or not 0.0 <= group[name] < math.inf:
                raise ValueError(f"{name}={group[name]} must be finite and not negative")
        if len(group["betas"]) != 2 or not all(0.0 <= beta < 1.0 for beta in group["betas"]):
            raise ValueError(f"betas={group['betas']} must be two numbers in [0, 1)")
        BITS.check("optim_bits", group)
        for p in tensors_of(group):
            if not p.is_floating_point():
                raise ValueError(f"a parameter is {p.dtype}; {type(self).__name__} takes real ones")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient; returns what ``closure`` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.check_gradients(group["params"])
        for group in self.param_groups:
            self.update([p for p in group["params"] if p.grad is not None], group)
        return loss

    def check_gradients(self, params: Iterable[Tensor]) -> None:
        """Raises ``ValueError`` for a gradient that is sparse, ``FloatingPointError`` for one that
        is not finite."""
        with_grad = [(i, p, p.grad) for i, p in enumerate(params) if p.grad is not None]
        for i, p, grad in with_grad:
            if grad.layout is not torch.strided:
                raise ValueError(
                    f"the gradient of parameter {i}, shape {tuple(p.shape)}, is sparse "
                    f"({grad.layout}); sparse gradients are not supported: torch.optim.SparseAdam "
                    "is"
                )
        if not with_grad:
            return
        # One sum finds NaN and infinity; a sum that overflowed is looked at again.
        device = with_grad[0][2].device
        sums = [grad.detach().sum().to(device, torch.float32) for _, _, grad in with_grad]
        if math.isfinite(self.gathered(torch.stack(sums)).abs().sum().item()):
            return
        for i, p, grad in with_grad:
            if self.gathered((~torch.isfinite(grad)).sum()).item() > 0:
                raise FloatingPointError(
                    f"the gradient of parameter {i}, shape {tuple(p.shape)}, is not finite: "
                    "nothing was changed"
                )

    def gathered(self, x: Tensor) -> Tensor:
        """A sum over gradients, ``x`` (any shape), of all processes; here there is one."""
        return x

    @torch.no_grad()
    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """One step for ``params``, parameters of ``group`` whose gradients were checked."""
        for p in params:
            if not self.state[p]:
                self.state[p].update(self.new_state(p, group))
        bits = group["optim_bits"]
        coded = [p for p in params if is_coded(self.state[p], bits)]
        self.update_all([p for p in params if not is_coded(self.state[p], bits)], group)
        for p in coded:
            wide = torch.promote_types(p.dtype, torch.float32)
            # torch's kernel wants the weight and its moments in one dtype, and in one order
            alike = p.dtype == wide and p.is_contiguous()
            with decoded(self.state[p], bits, wide):
                self.update_all([p], {**group, "fused": group["fused"] and alike})
            for name in MOMENTS if bits == 32 else ():  # as those that never were codes
                self.state[p][name] = torch.empty_like(p).copy_(self.state[p][name])

    def update_all(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """The step of ``params``, whose moments are numbers."""
        fused: list[Tensor] = []
        for p in params:
            if group["fused"] and is_dense(p):
                fused.append(p)
            else:
                self.update_one(p, group)
        grads = [p.grad for p in fused if p.grad is not None]
        fused_step(fused, grads, [self.state[p] for p in fused], group)

    def update_one(self, p: Tensor, group: dict[str, Any]) -> None:
        """The step of one parameter, as the formula says."""
        state, grad = self.state[p], p.grad
        assert grad is not None
        state["step"] += 1
        old = p, state["exp_avg"], state["exp_avg_sq"]
        wide = state["exp_avg"].dtype  # that of p, unless the moments were codes
        new = adamw(
            p.to(wide), grad.to(wide), state["exp_avg"], state["exp_avg_sq"], state["step"].item(),
            group["lr"], group["betas"], group["eps"], group["weight_decay"],
        )  # fmt: skip
        for tensor, value in zip(old, new, strict=True):
            tensor.copy_(value.view_as(tensor))  # a learning rate of shape (1,) adds a dimension

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, also those that were added up inside the backward pass."""
        super().zero_grad(set_to_none)
        if self.after_zero_grad is not None:
            self.after_zero_grad()

    def new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state before the first step: zeros."""
        zeros = {
            name: torch.zeros_like(p, memory_format=torch.preserve_format)
            for name in ("exp_avg", "exp_avg_sq")
        }
        step = torch.zeros((), device=p.device if group["fused"] else "cpu")
        return stored({"step": step, **zeros}, group["optim_bits"])

    def state_shapes(self, p: Tensor) -> dict[str, torch.Size]:
        """The names and shapes of the state that a parameter has after its first step."""
        return self.shapes_in(self.group_of(p), p)

    def shapes_in(self, group: dict[str, Any], p: Tensor) -> dict[str, torch.Size]:
        """:meth:`state_shapes` of a parameter with the options of any group."""
        shapes = {"step": torch.Size(), "exp_avg": p.shape, "exp_avg_sq": p.shape}
        return stored_shapes(shapes, group["optim_bits"])

    def group_of(self, p: Tensor) -> dict[str, Any]:
        """The group that a parameter belongs to."""
        for group in self.param_groups:
            if any(p is other for other in group["params"]):
                return group
        raise ValueError(f"a parameter of shape {tuple(p.shape)} is in none of the groups")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in every optimizer of torch, the options of the groups come from the file, too. Raises
        ``ValueError``, before anything is changed, if it is of another optimizer or does not fit a
        parameter."""
        groups = [without_switches(group) for group in state_dict["param_groups"]]
        for group in groups:
            if missing := self.defaults.keys() - group.keys():
                raise ValueError(
                    f"the state has no option {sorted(missing)[0]!r}: it is not one of "
                    f"{type(self).__name__}"
                )
            self.check_group({name: value for name, value in group.items() if name != "params"})
        state_dict = {**state_dict, "param_groups": groups}
        for p, group, state in self.pairs(state_dict):
            if state:
                wanted = self.shapes_in(group, p)
                for name in sorted((state.keys() | wanted.keys()) - self.optional):
                    shape, size = getattr(state.get(name), "shape", None), wanted.get(name)
                    if shape != size:
                        shapes = [None if x is None else tuple(x) for x in (shape, size)]
                        raise ValueError(
                            f"the state {name!r} of a parameter of shape {tuple(p.shape)} has "
                            f"shape {shapes[0]}, expected {shapes[1]}"
                        )
        super().load_state_dict(state_dict)
        # torch has given all of it the dtype of the parameter; codes and scales have their own
        for p, group, state in self.pairs(state_dict):
            like = self.new_state(p, group) if state else {}
            for name, value in (state or {}).items():
                x = like.get(name, value)
                self.state[p][name] = value.detach().to(x.device, x.dtype, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it to every optimizer

    def pairs(self, state_dict: dict[str, Any]) -> list[tuple[Tensor, dict[str, Any], Any]]:
        """Every parameter with its group and its state in a ``state_dict``."""
        return [
            (p, theirs, state_dict["state"].get(key))
            for ours, theirs in zip(self.param_groups, state_dict["param_groups"], strict=False)
            for p, key in zip(ours["params"], theirs["params"], strict=False)
        ]


def tensors_of(group: dict[str, Any]) -> list[Tensor]:
    """The parameters of a group as a caller gives it: one, several, or several with names."""
    params = group.get("params", ())
    listed = [params] if isinstance(params, Tensor) else params
    unnamed = [p[1] if isinstance(p, tuple) else p for p in listed]
    return [p for p in unnamed if isinstance(p, Tensor)]  # torch refuses the others by name


def without_switches(group: dict[str, Any]) -> dict[str, Any]:
    """A group of a file without the options that only torch's AdamW has. Raises ``ValueError``
    where one of them asks for another step."""
    if not group.get("decoupled_weight_decay", True):
        raise ValueError("the state is one of Adam with an L2 penalty, not of AdamW")
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise ValueError(f"the state has {name}=True, a step that only torch.optim.AdamW takes")
    theirs = {
        "decoupled_weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable"
    }  # fmt: skip
    options = {name: value for name, value in group.items() if name not in theirs}
    return {"optim_bits": 32, **options}  # what torch's AdamW has


def is_dense(p: Tensor) -> bool:
    """Whether a weight fills its memory without gaps, in any order: torch's kernel steps through
    memory, and would move what lies in the gaps of a slice."""
    return p.is_contiguous() or torch.empty_like(p, device="meta").stride() == p.stride()


def fused_step(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    """The step of all parameters by torch's kernel, in place."""
    if not params:
        return
    (beta1, beta2), lr, eps, decay = (group[n] for n in ("betas", "lr", "eps", "weight_decay"))
    torch_adamw(
        params, grads, [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states], [], [state["step"] for state in states],
        fused=True, amsgrad=False, maximize=False,
        beta1=beta1, beta2=beta2, lr=lr, eps=eps, weight_decay=decay,
    )  # fmt: skip
