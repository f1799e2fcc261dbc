# %% [markdown]
# # A clamped SwiGLU
#
# An expert of gpt-oss multiplies a gate by a linear part, *up*, as SwiGLU does, and differs from it in
# three places. Both parts are cut off at a limit $L$, so that no product explodes. The sigmoid has a
# factor $\alpha$. And 1 is added to up, so that a feature whose up is 0 still passes its gate on:
#
# $$y = (\bar u + 1)\; \bar g\, \sigma(\alpha\, \bar g), \qquad
# \bar g = \min(g, L), \quad \bar u = \min(\max(u, -L), L)$$
#
# The gate is cut off from above alone: far below 0 the sigmoid makes the product nearly 0 anyway.
#
# What holds for your function:
#
# - `both` has shape `(..., 2F)`, with any number of axes before the last, and any order in memory. The
#   columns take turns: column $2i$ is gate $i$, and column $2i + 1$ is up $i$.
# - `alpha` and `limit` are positive.
# - The result has shape `(..., F)` and the dtype of `both`. In float16 and bfloat16 you may round after
#   each step. float64 keeps its digits.
# - Gates may be as low as -1000, where the result is nearly 0.
# - `both` stays as it is. Gradients reach it, and none of them is NaN. What is cut off has a gradient of
#   0. No case has a number that lies exactly on the limit.

# %%
import torch
from torch import Tensor


# %%
def clamped_swiglu(
    both: Tensor,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """The gated product (..., F) of gates and ups, whose columns (..., 2F) take turns."""
    ### BEGIN SOLUTION
    gate, up = both[..., ::2], both[..., 1::2]
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("clamped_swiglu", clamped_swiglu)
### BEGIN HIDDEN TESTS
points = min(points, check("clamped_swiglu", clamped_swiglu, seed=7341))
### END HIDDEN TESTS
float(points)
