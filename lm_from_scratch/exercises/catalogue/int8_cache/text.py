# %% [markdown]
# # Keys and values in eight bits
#
# A quantised cache lays a ruler with 256 marks over each group of N neighbouring
# features of a head. It keeps the smallest number, the distance of two marks, and
# for each number the index of its nearest mark:
#
# $$s = \frac{\max x - \min x}{255}, \qquad
# c = \mathrm{round}\!\left(\frac{x - \min x}{s}\right), \qquad
# \hat x = \min x + s\,c$$
#
# Write both directions. What holds for your class `EightBits(group)`:
#
# - `group` is 32 by default. One object takes heads of any size, one after the
#   other. A head with fewer features than `group` is one group. If D features
#   cannot be cut into whole groups, `encode` raises `ValueError`.
# - `encode(x)` takes keys or values `(B, H, T, D)`, in any order in memory, and
#   returns three tensors: codes `(B, H, T, G, N)`, uint8; the smallest number and
#   the step of each group, `(B, H, T, G, 1)`, both in the dtype of `x`. Group 0
#   are the first N features of a head. No group holds numbers of two tokens.
# - `decode(parts)` takes these three and returns `(B, H, T, D)` in the dtype of the
#   smallest numbers.
# - In float16 and bfloat16 all is computed in float32, in float64 in float64. The
#   step is rounded to the dtype of `x` first, and the codes are counted in the step
#   *as it is kept*. The result of `decode` is rounded once.
# - Codes go from 0 to 255: what a rounded step would put above is 255.
# - A group whose step is 0 has the codes 0. So a group of equal numbers comes back
#   as it was. Numbers around 1e-9 are rounded as finely as others.
# - `x` and the parts stay as they are.

# %%
import torch
from torch import Tensor


# %%
class EightBits:
    """Numbers as codes of eight bits, a minimum and a step for each group."""

    def __init__(self, group: int = 32) -> None:
        ### BEGIN SOLUTION
        self.group = group
        ### END SOLUTION

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes (B, H, T, G, N), minimum and step (B, H, T, G, 1)."""
        ### BEGIN SOLUTION
        group = min(self.group, x.shape[-1])
        if x.shape[-1] % group:
            raise ValueError(f"{x.shape[-1]} features, groups of {group}")
        x = x.unflatten(-1, (-1, group))
        fine = x.to(torch.promote_types(x.dtype, torch.float32))
        low, high = fine.amin(-1, keepdim=True), fine.amax(-1, keepdim=True)
        step = ((high - low) / 255).to(x.dtype)
        codes = ((fine - low) / step).round().clamp(max=255)
        codes = torch.where(step == 0, 0.0, codes)
        return codes.to(torch.uint8), low.to(x.dtype), step
        ### END SOLUTION

    def decode(self, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The numbers (B, H, T, D), each at its mark."""
        ### BEGIN SOLUTION
        codes, low, step = parts
        fine = torch.promote_types(low.dtype, torch.float32)
        x = step.to(fine) * codes + low
        return x.to(low.dtype).flatten(-2)
        ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("int8_cache", EightBits)
### BEGIN HIDDEN TESTS
points = min(points, check("int8_cache", EightBits, seed=7341))
### END HIDDEN TESTS
float(points)
