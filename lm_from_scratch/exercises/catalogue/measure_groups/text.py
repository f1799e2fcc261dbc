# %% [markdown]
# # Measure: how coarse a weight may be
#
# Eight bits for a number, and one scale for a whole row: that is the smallest form of a matrix. One large number makes
# the scale of its row coarse for all others, though. Shorter groups, each with a scale of its own, follow the numbers
# better and take more bytes. **Which groups are the cheapest that are still good enough?** Try them, and measure.
#
# A row of $K$ numbers is cut into groups of $g$ numbers that are side by side. In each group
#
# $$s = \frac{\max |w|}{127}, \qquad c = \text{round}\Bigl(\frac{w}{s}\Bigr), \qquad \hat w = s\,c$$
#
# and the error of the matrix is measured beside its size:
#
# $$e = \sqrt{\frac{\sum (W - \hat W)^2}{\sum W^2}}$$
#
# What holds for your function:
#
# - `weight` is a matrix `(N, K)` of float32 or bfloat16, not all zeros. It may be a
#   transposed view, and stays as it is.
# - `sizes` are lengths of groups to choose from, in any order. Each divides $K$.
# - The result is a tuple: the size that takes the fewest bytes among those with $e \le$ `bound`, how many bytes that
#   is, and its error $e$, a `float`. If none is good enough, the result is `None`.
# - A code takes a byte. A scale takes as many bytes as a number of `weight`, and is rounded to its dtype before it is used.
#   Quotients, products and the error are computed in float32 or better.
# - A group of zeros has scale 0 and codes 0. No error lies within 2 % of `bound`.
#
# By hand: the row 127, 1, -2.6, 0.2 has scale 1 as one group, so the last two become -3 and 0. In groups of two the
# second scale is 2.6 / 127, and both are kept well. That takes two scales: 4 + 2 · 4 = 12 bytes in float32.

# %%
import torch
from torch import Tensor


# %%
def cheapest_groups(
    weight: Tensor, sizes: list[int], bound: float
) -> tuple[int, int, float] | None:
    """The length of groups with the fewest bytes whose error is within a bound, bytes and error."""
    ### BEGIN SOLUTION
    wide = weight.double()
    found = []
    for size in sizes:
        groups = wide.unflatten(1, (-1, size))  # (N, K / size, size)
        largest = groups.abs().amax(2, keepdim=True)
        scale = (largest / 127).to(weight.dtype).double()
        codes = torch.where(scale == 0, 0, groups / scale).round()
        lost = (groups - codes * scale).square().sum() / wide.square().sum()
        error = lost.sqrt().item()
        if error <= bound:
            total = weight.numel() + scale.numel() * weight.element_size()
            found.append((total, size, error))
    if not found:
        return None
    total, size, error = min(found)
    return size, total, error
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("measure_groups", cheapest_groups)
### BEGIN HIDDEN TESTS
points = min(points, check("measure_groups", cheapest_groups, seed=7341))
### END HIDDEN TESTS
float(points)
