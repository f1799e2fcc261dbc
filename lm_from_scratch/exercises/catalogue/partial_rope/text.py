# %% [markdown]
# # Partial RoPE
#
# Many models of today rotate only the first part of each head. The first $R$ of its $D$ features turn
# with the position, and the others never learn where they are. (GLM-4.5 turns a half, Qwen3-Next
# a quarter.)
#
# Within the R features, pairs are half-split: feature $i$ belongs to feature $i + R/2$. A token at
# position $t$ turns its pair $(a, b)$ by the angle $t\,\omega_i$, for $i = 0 \dots R/2 - 1$:
#
# $$a' = a \cos t\omega_i - b \sin t\omega_i, \qquad
# b' = a \sin t\omega_i + b \cos t\omega_i, \qquad \omega_i = \theta^{-2i/R}$$
#
# What holds for your function:
#
# - `x` has shape `(B, H, T, D)`: rows, heads, tokens, features of a head. The order in memory is any.
# - `positions` holds whole numbers in shape `(B, T)`, one for each token. Each row has its own.
#   They start anywhere, and there is no largest one.
# - `share` is the part that turns, above 0 and at most 1: R is `share * D`, rounded *down* to a whole
#   number. R is even.
# - `theta` is 10000 if the caller does not give it.
# - The result has the shape and the dtype of `x`, and each feature stays in its place. What does not
#   turn comes back as it is, to the last bit.
# - For float16 and bfloat16, angles, cosines, sines and products are float32. For float64 all of it is
#   float64.
# - `x` stays as it is, and gradients reach it.

# %%
import torch
from torch import Tensor


# %%
def partial_rope(
    x: Tensor, positions: Tensor, share: float, theta: float = 10000.0
) -> Tensor:
    """Turn the first features of x (B, H, T, D) by the angles of positions (B, T)."""
    ### BEGIN SOLUTION
    R = int(share * x.shape[3])
    wide = x if x.dtype == torch.float64 else x.float()
    i = torch.arange(0, R, 2, dtype=wide.dtype)
    angles = positions[:, None, :, None] * theta ** (-i / R)  # (B, 1, T, R/2)
    cos, sin = angles.cos(), angles.sin()
    a, b = wide[..., : R // 2], wide[..., R // 2 : R]
    turned = torch.cat([a * cos - b * sin, a * sin + b * cos], 3).to(x.dtype)
    return torch.cat([turned, x[..., R:]], 3)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("partial_rope", partial_rope)
### BEGIN HIDDEN TESTS
points = min(points, check("partial_rope", partial_rope, seed=7341))
### END HIDDEN TESTS
float(points)
