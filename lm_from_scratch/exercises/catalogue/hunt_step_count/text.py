# %% [markdown]
# # Bug hunt: the late parameter
#
# An AdamW was written for models whose parameters do not all get a gradient in every step: a layer is
# unfrozen later, an expert is chosen by the router now and then. In the tests, where every parameter
# had a gradient in every step, it agreed with torch to the last digits.
#
# Then two reports came in. In the first, a parameter got its first gradient in step 10, at a learning
# rate of 0.01. Torch moved it by -0.01, this code by -0.0048. In the second, a training loop caught
# the error about a sparse gradient and went on with the next batch, as if that step had never been.
# The weights had changed all the same.
#
# Below is the function that moves all parameters of a group. Find what is wrong and fix it.
#
# What holds for your function:
#
# - `params` is a list of tensors of any shapes, in float32 or float64, changed in place: a model
#   holds the same tensors. `grads` has one entry for each: a tensor of the same shape and dtype, or
#   `None`. The gradients stay as they are.
# - `state` is a dict, empty before the first call, and the same one in every call of a run. What you
#   keep in it is your own affair. The parameters are known by their place in the list.
# - `lr`, `betas`, `eps` and `weight_decay` are those of AdamW, and the same in every call of a run.
#   `eps` is added after the bias correction.
# - A parameter without a gradient (`None`) is left alone: no decay, and its running means stay.
# - A call moves each parameter with a gradient as torch.optim.AdamW would.
# - If any gradient of a call is sparse (`grad.is_sparse`), the call raises a `ValueError`, wherever
#   in the list that gradient is. Neither parameters nor later calls show that it ever happened.

# %%
import torch
from torch import Tensor


# %%
def update_group_as_found(
    params: list[Tensor],
    grads: list[Tensor | None],
    state: dict,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of AdamW for the parameters of a group."""
    state["step"] = state.get("step", 0) + 1
    correction1 = 1 - betas[0] ** state["step"]
    correction2 = 1 - betas[1] ** state["step"]
    for i, p in enumerate(params):
        grad = grads[i]
        if grad is None:
            continue
        if grad.is_sparse:
            raise ValueError("sparse gradients are not supported")
        if i not in state:
            state[i] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
        m, v = state[i]["m"], state[i]["v"]
        m.mul_(betas[0]).add_(grad, alpha=1 - betas[0])
        v.mul_(betas[1]).add_(grad.square(), alpha=1 - betas[1])
        direction = (m / correction1) / ((v / correction2).sqrt() + eps)
        p.mul_(1 - lr * weight_decay).sub_(lr * direction)


# %%
from lm_from_scratch.exercises import check

check("hunt_step_count", update_group_as_found)

# %% [markdown]
# Write the fixed function here. What the code already does right must stay right.


# %%
def update_group(
    params: list[Tensor],
    grads: list[Tensor | None],
    state: dict,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of AdamW for the parameters of a group."""
    ### BEGIN SOLUTION
    if any(grad is not None and grad.is_sparse for grad in grads):
        raise ValueError("sparse gradients are not supported")
    for i, p in enumerate(params):
        grad = grads[i]
        if grad is None:
            continue
        if i not in state:
            zeros = torch.zeros_like(p)
            state[i] = {"step": 0, "m": zeros, "v": zeros.clone()}
        state[i]["step"] += 1
        correction1 = 1 - betas[0] ** state[i]["step"]
        correction2 = 1 - betas[1] ** state[i]["step"]
        m, v = state[i]["m"], state[i]["v"]
        m.mul_(betas[0]).add_(grad, alpha=1 - betas[0])
        v.mul_(betas[1]).add_(grad.square(), alpha=1 - betas[1])
        direction = (m / correction1) / ((v / correction2).sqrt() + eps)
        p.mul_(1 - lr * weight_decay).sub_(lr * direction)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_step_count", update_group)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_step_count", update_group, seed=7341))
### END HIDDEN TESTS
float(points)
