# %% [markdown]
# # Bug hunt: the table of cosines
#
# Early code for models with RoPE kept tables of the cosines and sines $\cos t\omega_i$ and
# $\sin t\omega_i$, with $\omega_i = \theta^{-2i/D}$, and looked up the rows of the positions $t$.
# The code below does what the first Qwen2 code of transformers did. Tests in float32, on texts from
# position 0 on, find nothing wrong. This is what else was seen:
#
# - A model in bfloat16 is right for short texts. In a text of 1024 tokens a cosine is wrong by 2.0,
#   which is as much as two cosines can differ.
# - A model in float32 is right, until it is called once in bfloat16 on a long text. From then on its
#   float32 results are wrong.
# - A text that is a piece of a longer one has the positions 5 to 8, and 4 keys. The call ends with
#   `IndexError: index 5 is out of bounds for dimension 0 with size 4`.
# - A variant took the length from the last position instead. Then positions in another order are
#   out of bounds.
#
# Find the causes and fix them. What holds for your class:
#
# - `Rotary(dim, theta=10000.0)` is an `nn.Module`. Two objects share nothing.
# - A call `rotary(x, positions, key_length)` returns two tensors, cosines and sines, of shape
#   `(B, 1, T, dim/2)` for `positions` of shape `(B, T)`. Of `x` only the dtype matters: the results
#   are rounded to it, once, from float32.
# - `positions` may be in any order, differ by row, and be as large as they like. `key_length` is
#   the number of keys, and no limit for them.
# - No result depends on earlier calls, or on a `.to(torch.bfloat16)` of the module.
# - The module has no parameters, and its state dict stays empty: old checkpoints must load.
# - Whether a table stays is up to you.

# %%
import torch
from torch import Tensor, nn

# %% [markdown]
# The code as it was found.


# %%
class Rotary_as_found(nn.Module):
    """Cosines and sines of the angles of RoPE, from a table that grows."""

    def __init__(self, dim: int, theta: float = 10000.0):
        super().__init__()
        speeds = 1.0 / theta ** (torch.arange(0, dim, 2) / dim)
        self.register_buffer("speeds", speeds, persistent=False)
        self.grow(16, torch.float32)

    def grow(self, length: int, dtype: torch.dtype) -> None:
        self.length = length
        t = torch.arange(length).type_as(self.speeds)
        angles = torch.outer(t, self.speeds)
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, x: Tensor, positions: Tensor, key_length: int):
        if key_length > self.length:
            self.grow(key_length, x.dtype)
        cos = self.cos[:key_length].to(x.dtype)
        sin = self.sin[:key_length].to(x.dtype)
        return cos[positions][:, None], sin[positions][:, None]


# %%
from lm_from_scratch.exercises import check

check("hunt_rotary_table", Rotary_as_found)

# %% [markdown]
# Write it again, or copy it and change what is wrong.


# %%
class Rotary(nn.Module):
    """Cosines and sines of the angles of RoPE, right in every dtype and at every position."""

    def __init__(self, dim: int, theta: float = 10000.0):
        super().__init__()
        ### BEGIN SOLUTION
        self.dim, self.theta = dim, theta
        ### END SOLUTION

    def forward(self, x: Tensor, positions: Tensor, key_length: int):
        ### BEGIN SOLUTION
        i2 = torch.arange(0, self.dim, 2, device=positions.device)
        speeds = 1.0 / self.theta ** (i2 / self.dim)
        angles = (
            positions[:, None, :, None] * speeds
        )  # (B, 1, T, dim/2), float32
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_rotary_table", Rotary)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_rotary_table", Rotary, seed=7341))
### END HIDDEN TESTS
float(points)
