# %% [markdown]
# # Targets of multi-token prediction
#
# A model that predicts several tokens has several depths. Depth 0 is the model itself: at token
# $x_i$ its target is $x_{i+1}$. Depth 1 has seen $x_{i+1}$, so its target is $x_{i+2}$; depth d has
# seen d tokens more, and its target is $x_{i+d+1}$.
#
# Rows are packed with several documents and may be padded. A target must be a token of the same document.
# Where there is none, it is -100, which the loss leaves out.
#
# What holds for your function:
#
# - `idx` has shape `(B, T)`: token ids, int64. `positions` has the same shape: a token's place in its
#   document, which counts 0, 1, 2, ... A document ends where the next token has position 0, or at the end
#   of the row. Position -1 is padding, on the left or on the right of a row, and is no document.
# - A document may have one token, and a row may have nothing but padding. Two documents may hold the same
#   tokens, and one may begin with the token that the other ends with.
# - `n_depth` is a number of at least 1, and may exceed T.
# - The result is int64, `(n_depth, B, T)`: the targets of depths 0 to n_depth - 1.
# - Padding has no target and is none, whatever token is there.
# - The inputs stay as they are.

# %%
import torch
from torch import Tensor


# %%
def mtp_targets(idx: Tensor, positions: Tensor, n_depth: int) -> Tensor:
    """The target of each token at each depth, or -100: (n_depth, B, T)."""
    ### BEGIN SOLUTION
    B, T = idx.shape
    targets = torch.full((n_depth, B, T), -100)
    for d in range(min(n_depth, T)):
        ahead, here = positions[:, d + 1 :], positions[:, : T - d - 1]
        same = (here >= 0) & (ahead == here + d + 1)
        targets[d, :, : T - d - 1] = idx[:, d + 1 :].masked_fill(~same, -100)
    return targets
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("mtp_targets", mtp_targets)
### BEGIN HIDDEN TESTS
points = min(points, check("mtp_targets", mtp_targets, seed=7341))
### END HIDDEN TESTS
float(points)
