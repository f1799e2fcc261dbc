# %% [markdown]
# # A weight in 8 bits
#
# Keep a matrix as small whole numbers, the *codes*, with one step for each row, the *scale*. Then
# turn it back:
#
# $$s_n = \frac{\max_k |W_{nk}|}{127}, \qquad c_{nk} = \text{round}\Bigl(\frac{W_{nk}}{s_n}\Bigr),
# \qquad \hat W_{nk} = s_n \, c_{nk}$$
#
# The code 0 stands for 0, and 127 or -127 for the largest number of the row. In between a number
# moves by half a step at most.
#
# What holds for your class:
#
# - `Int8Rows(weight)` takes a matrix `(N, K)` in float16, bfloat16, float32 or float64, in any
#   order in memory. It may be a parameter of a model.
# - `codes` is int8 `(N, K)`, and lies in memory row by row. `scale` is `(N, 1)` in the dtype of
#   `weight`.
# - A code is the nearest whole number of steps, and a half goes to the even one, as in
#   `torch.round`. The step is the scale *as it is stored*, rounded to the dtype of `weight`. In
#   float16 and bfloat16 the quotient is computed in float32, in float64 in float64. Next to a half
#   the last digit decides, so that a product with $1 / s_n$ may round otherwise: both are right.
# - Codes are never outside -127 to 127. This matters where float16 rounds a very small scale down.
# - Where the scale is 0, all codes of the row are 0. That is a row of zeros, or in float16 a row
#   whose scale is too small to be stored. Any other scale is as the formula says, however small.
# - `dequantize()` returns `(N, K)` in the dtype of `scale`, computed from `codes` and `scale` as
#   they are at that moment.
# - `weight` stays as it is. Neither `scale` nor the result of `dequantize` has a gradient.

# %%
import torch
from torch import Tensor


# %%
class Int8Rows:
    """A matrix as int8 codes, with a scale for each row."""

    codes: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor):
        """Round each number to the nearest code of its row."""
        ### BEGIN SOLUTION
        weight = weight.detach()
        precise = weight if weight.dtype == torch.float64 else weight.float()
        largest = precise.abs().amax(dim=1, keepdim=True)
        self.scale = (largest / 127).to(weight.dtype)
        steps = torch.where(self.scale == 0, 0, precise / self.scale)
        codes = steps.round().clamp(-127, 127)
        self.codes = codes.to(torch.int8).contiguous()
        ### END SOLUTION

    def dequantize(self) -> Tensor:
        """The matrix that the codes stand for."""
        ### BEGIN SOLUTION
        return self.codes * self.scale
        ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("int8_weight", Int8Rows)
### BEGIN HIDDEN TESTS
points = min(points, check("int8_weight", Int8Rows, seed=7341))
### END HIDDEN TESTS
float(points)
