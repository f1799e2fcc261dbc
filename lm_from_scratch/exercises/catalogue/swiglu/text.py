# %% [markdown]
# # SwiGLU
#
# Write the gated MLP of Qwen2. Two maps look at the same state. One, the *gate*, goes through silu
# and says how much of the other, *up*, passes, feature by feature. A third map brings the product
# back:
#
# $$\operatorname{MLP}(x) = W_d \bigl( \operatorname{silu}(W_g x) \odot W_u x \bigr), \qquad
# \operatorname{silu}(z) = z\,\sigma(z) = \frac{z}{1 + e^{-z}}$$
#
# What holds for your function:
#
# - `x` has shape `(..., C)`, with any number of axes before the last, and any order in memory.
# - The three weights are those of `nn.Linear`, with the outputs first: `gate` and `up` have shape
#   `(I, C)`, `down` has `(C, I)`. There are no biases. I may equal C.
# - The result has the shape and the dtype of `x`, which is that of the weights too.
# - The gate may be large: in float32, $e^{z}$ is infinite from 89 on, and silu(100) is 100 all the
#   same. Where the gate is -200, silu is 0.
# - In bfloat16 you may round after each step. float64 keeps its digits.
# - The arguments stay as they are. Gradients reach all four, and none of them is NaN, however far
#   below 0 the gate is.

# %%
import torch
import torch.nn.functional as F  # noqa: F401
from torch import Tensor


# %%
def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Map x (..., C) to I features twice, let the gate decide, and map back."""
    ### BEGIN SOLUTION
    z = x @ gate.T
    passed = z * torch.sigmoid(z)
    return (passed * (x @ up.T)) @ down.T
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("swiglu", gated_mlp)
### BEGIN HIDDEN TESTS
points = min(points, check("swiglu", gated_mlp, seed=7341))
### END HIDDEN TESTS
float(points)
