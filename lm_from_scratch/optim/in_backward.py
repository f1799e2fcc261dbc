"""Optimizer steps inside the backward pass: one gradient at a time.

A training step usually holds the gradients of all weights at once, as much memory as the weights
themselves. Yet the backward pass finishes them one after another, from the last layer to the first.
:func:`update_in_backward` updates a weight as soon as its gradient is complete, and frees the
gradient.

What cannot be had then is anything that needs all gradients before the first update: clipping by
their global norm, and refusing a step whole when the gradient of an early layer is not finite.

Source: Lv et al., *Full Parameter Fine-tuning for Large Language Models with Limited Resources*
(LOMO), 2023, arXiv:2306.09782.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lm_from_scratch.optim.adamw import AdamW, check_gradients
from lm_from_scratch.optim.galore import GaLore, is_projected, project_back

ACTIVE: set[int] = set()  # the ids of the parameters in a context


@contextmanager
def update_in_backward(optimizer: AdamW, grad_accumulation: int = 1) -> Iterator[None]:
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
    if type(grad_accumulation) is not int or grad_accumulation < 1:
        raise ValueError(f"grad_accumulation={grad_accumulation!r} must be at least 1")
    if not isinstance(optimizer, AdamW):
        raise ValueError(
            f"optimizer={type(optimizer).__module__}.{type(optimizer).__name__} must be AdamW or "
            "GaLore of lm_from_scratch.optim"
        )
    groups = enumerate(optimizer.param_groups)
    number = {p: i for i, group in groups for p in group["params"] if p.requires_grad}
    params = list(number)
    if any(id(p) in ACTIVE for p in params):
        raise ValueError("a parameter of this optimizer is in a context of update_in_backward")
    passes: dict[Tensor, int] = {}
    sums: dict[Tensor, Tensor] = {}  # of projected gradients

    def group_of(p: Tensor) -> dict[str, Any]:  # loading a state makes new groups
        return optimizer.param_groups[number[p]]

    def after(p: Tensor) -> None:
        group = group_of(p)
        try:
            check_gradients([p], group)
        except FloatingPointError:
            forget()
            raise FloatingPointError(
                f"the gradient of a parameter of shape {tuple(p.shape)} is not finite: the "
                "parameters whose gradients were complete before it are updated"
            ) from None
        passes[p] = passes.get(p, 0) % grad_accumulation + 1
        last = passes[p] == grad_accumulation
        if isinstance(optimizer, GaLore) and is_projected(p, group):
            low = optimizer.low_gradient(p, group, may_renew=passes[p] == 1)
            p.grad = None
            low = sums.pop(p) + low if p in sums else low
            if last:
                optimizer.update_projected(p, low, group)
            else:
                sums[p] = low
        elif last:
            optimizer.update([p], group)
            p.grad = None

    def before_step(*_: Any) -> None:
        for group in optimizer.param_groups:
            check_gradients(group["params"], group)
        for p, low in sums.items():
            assert isinstance(optimizer, GaLore)
            optimizer.update_projected(p, low, group_of(p))
        forget()

    def forget() -> None:
        sums.clear()
        passes.clear()

    def zero_grad(set_to_none: bool = True) -> None:
        forget()
        type(optimizer).zero_grad(optimizer, set_to_none)

    hooks = [p.register_post_accumulate_grad_hook(after) for p in params]
    hooks.append(optimizer.register_step_pre_hook(before_step))
    ACTIVE.update(id(p) for p in params)
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    try:
        yield
    except BaseException:
        forget()
        raise
    finally:
        del optimizer.zero_grad
        ACTIVE.difference_update(id(p) for p in params)
        for hook in hooks:
            hook.remove()
        for p, low in sums.items():
            assert isinstance(optimizer, GaLore)
            state, sign = optimizer.state[p], -1 if group_of(p)["maximize"] else 1
            back = sign * project_back(low, state.get("left"), state.get("right"))
            p.grad = back.view(p.shape).to(p.dtype)
