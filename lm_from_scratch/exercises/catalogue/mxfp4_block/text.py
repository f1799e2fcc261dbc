# %% [markdown]
# # A block in MXFP4
#
# A code of four bits is a sign, two bits of exponent and one of mantissa. Its lowest three bits
# number the magnitudes
#
# $$0,\; 0.5,\; 1,\; 1.5,\; 2,\; 3,\; 4,\; 6$$
#
# from 0 to 7, and its highest bit, worth 8, is the sign. 32 neighbours share a power of two, $2^e$,
# which makes the largest of them lie between 4 and 8:
#
# $$e = \lfloor \log_2 \max_k |x_k| \rfloor - 2$$
#
# Write a function that rounds blocks to MXFP4, and also returns the numbers that its codes stand
# for.
#
# What holds for your function:
#
# - `x` is `(N, 32)`: N blocks, in float32 or bfloat16.
# - The first result is the codes, uint8 `(N, 32)`, one in a byte.
# - The second one is the scales, uint8 `(N,)`: $e + 127$ for each block. $e$ is at least -127, also
#   in a block of zeros. No number of ours needs an $e$ above 127.
# - The third one is the numbers, float32 `(N, 32)`: the sign, the magnitude, times $2^e$.
# - Each $x_k / 2^e$ goes to the nearest magnitude. Between two that are equally near, it goes to the
#   one with an even number. What is above 6 becomes 6.
# - A negative number has the sign in its code even if its magnitude is rounded to 0: its code is 8.
#   No case has a zero that is negative itself.
# - `x` stays as it is.

# %%
import torch
from torch import Tensor


# %%
def mxfp4_block(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (N, 32), scales (N,) and the numbers (N, 32) of blocks ``x`` (N, 32)."""
    ### BEGIN SOLUTION
    size = x.float().abs()
    largest = size.amax(dim=1, keepdim=True)  # (N, 1)
    exponent = (largest.log2().floor() - 2).clamp(min=-127)
    scaled = size / 2.0**exponent
    step = 0.5 + 0.5 * (scaled >= 2) + 1.0 * (scaled >= 4)
    rounded = (step * (scaled / step).round()).clamp(max=6)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.searchsorted(magnitudes, rounded) + 8 * (x < 0)
    numbers = torch.where(x < 0, -rounded, rounded) * 2.0**exponent
    scales = (exponent + 127).to(torch.uint8)[:, 0]
    return codes.to(torch.uint8), scales, numbers
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("mxfp4_block", mxfp4_block)
### BEGIN HIDDEN TESTS
points = min(points, check("mxfp4_block", mxfp4_block, seed=7341))
### END HIDDEN TESTS
float(points)
