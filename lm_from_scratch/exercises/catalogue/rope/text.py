# %% [markdown]
# # RoPE
#
# Turn queries or keys by the angle of their position. The $D$ features of a head are $D/2$ pairs.
# The pairs are half-split: feature $i$ belongs to feature $i + D/2$. A token at position $t$ turns
# its pair $(a, b)$ by the angle $t\,\omega_i$, for $i = 0 \dots D/2 - 1$:
#
# $$a' = a \cos t\omega_i - b \sin t\omega_i, \qquad
# b' = a \sin t\omega_i + b \cos t\omega_i, \qquad \omega_i = \theta^{-2i/D}$$
#
# What holds for your function:
#
# - `x` has shape `(B, H, T, D)`: rows, heads, tokens, features of a head. D is even. The order in
#   memory is any: models pass transposed tensors.
# - `positions` holds whole numbers in shape `(B, T)`, one for each token, the same for all heads.
#   Each row has its own. They start anywhere, are in any order, leave gaps, and have no largest
#   value.
# - `theta` is 10000 if the caller does not give it.
# - The result has the shape and the dtype of `x`, and each feature stays in its place.
# - For float16 and bfloat16, angles, cosines, sines and products are float32. Only the result is
#   rounded to the dtype of `x`. For float64 all of it is float64.
# - `x` stays as it is, and gradients reach it.

# %%
import torch
from torch import Tensor


# %%
def rope(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Turn the half-split pairs of x (B, H, T, D) by the angles of positions (B, T)."""
    ### BEGIN SOLUTION
    half = x.shape[-1] // 2
    wide = x if x.dtype == torch.float64 else x.float()
    i = torch.arange(half, device=x.device, dtype=wide.dtype)
    speeds = 1.0 / theta ** (i / half)  # (D/2,)
    angles = positions[:, None, :, None] * speeds  # (B, 1, T, D/2)
    cos, sin = angles.cos(), angles.sin()
    a, b = wide[..., :half], wide[..., half:]
    turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    return turned.to(x.dtype)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("rope", rope)
### BEGIN HIDDEN TESTS
points = min(points, check("rope", rope, seed=7341))
### END HIDDEN TESTS
float(points)
