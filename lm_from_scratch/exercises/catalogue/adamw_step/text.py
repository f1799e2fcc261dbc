# %% [markdown]
# # One step of AdamW
#
# Write the step that moves one weight tensor. Adam keeps two running means for each number, of its
# gradient $g_t$ and of the square of its gradient:
#
# $$m_t = \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2$$
#
# Both start at 0, so the first ones are too small. The bias correction fixes that:
#
# $$\hat m_t = \frac{m_t}{1 - \beta_1^t} \qquad \hat v_t = \frac{v_t}{1 - \beta_2^t} \qquad
# d_t = \frac{\hat m_t}{\sqrt{\hat v_t} + \epsilon}$$
#
# The weight moves against $d_t$, and the decay shrinks it apart from its gradient:
#
# $$\theta_t = (1 - \eta \lambda)\, \theta_{t-1} - \eta\, d_t$$
#
# What holds for your function:
#
# - `param`, `grad`, `exp_avg` ($m$) and `exp_avg_sq` ($v$) have one shape and one dtype. The shape
#   may be any, and so may the order in memory. Every number has a step of its own.
# - `step` is $t$, 1 for the first step. `lr` is $\eta$ and `weight_decay` is $\lambda$.
# - Without other values `lr` is 1e-3, `betas` are 0.9 and 0.999, `eps` is 1e-8 and `weight_decay`
#   is 1e-2.
# - The result is three tensors: the new parameter, then $m_t$ and $v_t$ as the next step needs
#   them, all in the dtype of `param`. In float64 nothing is rounded to float32.
# - $\epsilon$ is where the formula has it, and a gradient may be as small as $\epsilon$.
# - The four tensors stay as they are: the caller replaces the old ones.

# %%
import torch
from torch import Tensor


# %%
def adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new parameter and the two new running means."""
    ### BEGIN SOLUTION
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad.square()
    mean = exp_avg / (1 - beta1**step)
    mean_square = exp_avg_sq / (1 - beta2**step)
    direction = mean / (torch.sqrt(mean_square) + eps)
    new = (1 - lr * weight_decay) * param - lr * direction
    return new, exp_avg, exp_avg_sq
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("adamw_step", adamw_step)
### BEGIN HIDDEN TESTS
points = min(points, check("adamw_step", adamw_step, seed=7341))
### END HIDDEN TESTS
float(points)
