# %% [markdown]
# # Measure: which learning rates diverge
#
# Near a minimum every smooth loss looks like a bowl, $\frac12 x^\top H x$, and its gradient is $H x$. A step that is too
# long lands on the other side, higher than it began, and the next one higher still. **Which of these learning rates
# will blow up?** You may compute it, or let it run and look; both are good ways to find out, and people do both. For a
# run, 1,000 steps of each rate are enough.
#
# The optimizer is `torch.optim.SGD`. From $x_0$, with $v_0 = 0$, a step is
#
# $$g = H x + \lambda x, \qquad v \leftarrow \mu v + g, \qquad x \leftarrow x - \eta v$$
#
# with the learning rate $\eta$, the momentum $\mu$ and the weight decay $\lambda$.
#
# What holds for your function:
#
# - `H` is a symmetric matrix `(n, n)`, float64. It need not be diagonal. Its bowl may be steep in one direction and flat
#   in another, and may even fall: then nothing holds the run.
# - `rates` is a list of learning rates above 0. The result is a list of as many `bool`: True where the run diverges,
#   which means that `x` grows without end from a start $x_0$ that lies in no special direction.
# - `momentum` is from 0 to 0.95, `decay` at least 0. Both are 0 if the caller does not give them.
# - No rate lies within 3 % of the border between the two. In a flat direction `x` stays where it is, or drifts to a point
#   and stays there: this is no divergence.
# - `H` stays as it is.
#
# By hand: if $H = (4)$, then $x \leftarrow (1 - 4 \eta)\, x$. With $\eta = 0.45$ the factor is $-0.8$ and `x` shrinks. With
# $\eta = 0.55$ it is $-1.2$: diverged.

# %%
import torch
from torch import Tensor


# %%
def diverges(
    H: Tensor, rates: list[float], momentum: float = 0.0, decay: float = 0.0
) -> list[bool]:
    """For each learning rate, whether SGD diverges on the bowl of H."""
    ### BEGIN SOLUTION
    curvature = torch.linalg.eigvalsh(H) + decay
    lowest, highest = curvature.min().item(), curvature.max().item()
    if lowest < -1e-9:
        return [True] * len(rates)
    return [rate * highest > 2 * (1 + momentum) for rate in rates]
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("measure_rate", diverges)
### BEGIN HIDDEN TESTS
points = min(points, check("measure_rate", diverges, seed=7341))
### END HIDDEN TESTS
float(points)
