"""Optimizer steps inside the backward pass: one gradient at a time.

A training step usually holds the gradients of all weights at once, as much memory as the weights
themselves. Yet the backward pass finishes them one after another, from the last layer to the first.
:class:`update_in_backward` updates a weight as soon as its gradient is complete, and frees the
gradient.

What cannot be had then is anything that needs all gradients before the first update: clipping by
their global norm, and refusing a step whole when the gradient of an early layer is not finite.

Source: Lv et al., *Full Parameter Fine-tuning for Large Language Models with Limited Resources*
(LOMO), 2023, arXiv:2306.09782.
"""

from types import TracebackType

from torch import Tensor

from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.galore import GaLore, is_projected
from lm_from_scratch.optim.galore_basis import project_back


class update_in_backward:  # a context, and so in small letters, as torch.no_grad
    """Inside this context every ``grad_accumulation``-th backward pass updates the weights.

    The rest of the loop can stay as it is: ``optimizer.step()`` finds no gradients, and does
    nothing. The result is that of ordinary steps, bit for bit, as long as nothing stands between
    the backward pass and the step.

    Backward passes before the last one of a step add up their gradients. A matrix that
    :class:`~lm_from_scratch.optim.galore.GaLore` projects adds up the projected ones, which is the
    same sum, because a projection is linear; its full gradient is freed at once. The one
    difference: a basis that is due is made from the first backward pass's gradient, not from the
    sum. All other parameters keep their gradient between the passes.

    A parameter that is not in every one of these passes is updated by ``optimizer.step()``, from
    the passes that it was in.

    Leaving the context in the middle of a step puts what was added up into ``p.grad``, as far as
    the basis expresses it. A function between the backward pass and the step, like clipping by the
    norm, finds no gradients. A scheduler wants ``optimizer.step()`` before its own, as always.

    ``backward`` raises ``FloatingPointError`` for a gradient that is not finite; layers behind it
    are updated by then. Raises ``ValueError`` for another optimizer than those of
    :mod:`lm_from_scratch.optim`, and for contexts of one parameter inside each other.
    """

    def __init__(self, optimizer: AdamW, grad_accumulation: int = 1) -> None:
        if type(grad_accumulation) is not int or grad_accumulation < 1:
            raise ValueError(f"grad_accumulation={grad_accumulation!r} must be at least 1")
        if not isinstance(optimizer, AdamW):
            raise ValueError(
                f"optimizer={type(optimizer).__module__}.{type(optimizer).__name__} must be AdamW "
                "or GaLore of lm_from_scratch.optim"
            )
        self.optimizer, self.grad_accumulation = optimizer, grad_accumulation
        self.passes: dict[Tensor, int] = {}  # of this step, in which a parameter was
        self.sums: dict[Tensor, Tensor] = {}  # of projected gradients

    def __enter__(self) -> None:
        groups = enumerate(self.optimizer.param_groups)
        self.group = {p: i for i, group in groups for p in group["params"] if p.requires_grad}
        if any(hasattr(p, "updated_in_backward") for p in self.group):
            raise ValueError("a parameter of this optimizer is in a context of update_in_backward")
        for p in self.group:
            p.updated_in_backward = True
        self.hooks = [p.register_post_accumulate_grad_hook(self.after) for p in self.group]
        self.hooks.append(self.optimizer.register_step_pre_hook(self.before_step))
        self.optimizer.after_zero_grad = self.forget

    def after(self, p: Tensor) -> None:
        """The gradient of ``p`` is complete: use it, or add it up, and free it. Raises
        ``FloatingPointError`` if it is not finite."""
        optimizer, group = self.optimizer, self.optimizer.param_groups[self.group[p]]
        self.check(p)
        self.passes[p] = self.passes.get(p, 0) % self.grad_accumulation + 1
        last = self.passes[p] == self.grad_accumulation
        if isinstance(optimizer, GaLore) and is_projected(p, group):
            low = optimizer.low_gradient(p, group, may_renew=self.passes[p] == 1)
            p.grad = None
            self.sums[p] = self.sums[p] + low if p in self.sums else low
            if last:
                optimizer.update_projected(p, self.sums.pop(p), group)
        elif last:
            optimizer.update([p], group)
            p.grad = None

    def check(self, p: Tensor) -> None:
        """Raises ``FloatingPointError`` for a gradient that is not finite."""
        try:
            self.optimizer.check_gradients([p])
        except FloatingPointError:
            self.forget()
            raise FloatingPointError(
                f"the gradient of a parameter of shape {tuple(p.shape)} is not finite: the "
                "parameters whose gradients were complete before it are updated"
            ) from None

    def before_step(self, *_: object) -> None:
        """Update the matrices that were not in every pass; ``step`` does so for the others."""
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            optimizer.check_gradients(group["params"])
        for p, low in self.sums.items():
            assert isinstance(optimizer, GaLore)
            optimizer.update_projected(p, low, optimizer.param_groups[self.group[p]])
        self.forget()

    def forget(self) -> None:
        """The next backward pass is the first one of a step."""
        self.sums.clear()
        self.passes.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.optimizer.after_zero_grad = None
        for hook in self.hooks:
            hook.remove()
        for p in self.group:
            del p.updated_in_backward
        if kind is None:
            for p, low in self.sums.items():
                state = self.optimizer.state[p]
                back = project_back(low, state.get("left"), state.get("right"))
                p.grad = back.view(p.shape).to(p.dtype)
        self.forget()
