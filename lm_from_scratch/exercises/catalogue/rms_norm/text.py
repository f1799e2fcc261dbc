# %% [markdown]
# # RMSNorm
#
# Write the norm of Qwen2. For each vector of the last axis, divide by the root of the mean square,
# then multiply by a weight for each feature:
#
# $$y_c = \frac{x_c}{\sqrt{\frac{1}{C}\sum_i x_i^2 + \epsilon}}\, w_c$$
#
# What holds for your function:
#
# - `x` has shape `(..., C)`, with any number of axes before the last, and any order in memory.
#   `weight` has shape `(C,)`. `eps` is 1e-6 if the caller does not give it.
# - The result has the shape of `x`, and its dtype. Only a `weight` with more digits, as float32
#   beside a bfloat16 `x`, lends the result its own dtype, as in any product of the two.
# - In float16 and bfloat16 the squares and the mean are computed in float32. The normalised vector
#   is then rounded to the dtype of `x`, *before* the weight multiplies it. In float64 nothing is
#   rounded to float32.
# - `x` and `weight` stay as they are, and gradients reach both.

# %%
import torch
from torch import Tensor


# %%
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale each vector of the last axis to a mean square of 1, then by the weight."""
    ### BEGIN SOLUTION
    precise = x if x.dtype == torch.float64 else x.float()
    mean_square = precise.pow(2).mean(-1, keepdim=True)
    return (precise * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("rms_norm", rms_norm)
### BEGIN HIDDEN TESTS
points = min(points, check("rms_norm", rms_norm, seed=7341))
### END HIDDEN TESTS
float(points)
