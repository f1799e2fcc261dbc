# %% [markdown]
# # A doubly stochastic mix
#
# A model with several residual streams mixes them in every block by a matrix. Its entries are not
# negative, and its rows *and* its columns sum to 1, so that no product of such matrices grows. Write
# Sinkhorn's algorithm, which makes one of any scores.
#
# Begin with $M = e^{Z}$, entry by entry. Then divide
#
# 1. each column by its sum: $M_{ij} \leftarrow M_{ij} / \sum_k M_{kj}$
# 2. each row by its sum: $M_{ij} \leftarrow M_{ij} / \sum_k M_{ik}$
# 3. each column again, each row again, and so on.
#
# One round is the columns alone. Every further round is the rows and then the columns, so the columns
# are always the last.
#
# What holds for your function:
#
# - `scores` has shape `(..., n, n)`: any number of matrices, none of which knows of the others. Rows are
#   the next to last dimension.
# - `rounds` is at least 1.
# - Scores may be large: 300, say, whose exponential is no number any more. A number that is subtracted
#   from *all* scores of a matrix changes nothing in the result. The scores of one matrix lie within 20
#   of each other.
# - The result has the shape and the dtype of `scores`. For float16 and bfloat16 all is computed in
#   float32 and rounded once at the end; for float64 all is float64.
# - `scores` stays as it is, and gradients reach it through all rounds.

# %%
import torch
from torch import Tensor


# %%
def doubly_stochastic(scores: Tensor, rounds: int = 20) -> Tensor:
    """Matrices (..., n, n) whose columns sum to 1, and whose rows nearly do."""
    ### BEGIN SOLUTION
    wide = scores if scores.dtype == torch.float64 else scores.float()
    top = wide.amax(dim=(-2, -1), keepdim=True)
    start = (wide - top).exp()
    mix = start / start.sum(dim=-2, keepdim=True)
    for _ in range(rounds - 1):
        even = mix / mix.sum(dim=-1, keepdim=True)
        mix = even / even.sum(dim=-2, keepdim=True)
    return mix.to(scores.dtype)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("sinkhorn", doubly_stochastic)
### BEGIN HIDDEN TESTS
points = min(points, check("sinkhorn", doubly_stochastic, seed=7341))
### END HIDDEN TESTS
float(points)
