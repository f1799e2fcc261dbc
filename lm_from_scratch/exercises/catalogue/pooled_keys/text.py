# %% [markdown]
# # Pool keys to entries
#
# A compressed cache keeps one entry for a block of m tokens. Every token s offers values $c_s$ and gates
# $z_s$, both of D features. In the entry each feature $f$ is a mean over the tokens of the block, weighted
# by a softmax of that feature's gates:
#
# $$e_{wf} = \sum_{s \in w} \frac{e^{z_{sf}}}{\sum_{r \in w} e^{z_{rf}}} \, c_{sf}$$
#
# Block 0 has the tokens at positions 0 to m - 1, block 1 the next m, and so on. An entry can be read by
# queries at or after the position of the *last* token of its block.
#
# What holds for your function:
#
# - `values` and `gates` have shape `(B, T, D)`. The token in column t stands at position t.
# - `m` is at least 1. A last block that is not complete has no entry.
# - It returns the entries in shape `(B, N, D)`, with N the number of complete blocks, which may be 0,
#   and a mask of bools in shape `(T, N)`: True where the query at that position may read that entry.
# - Gates may be large, and a token whose gate is minus infinity has no part in that feature. (One token
#   of a block always has a finite one.)
# - Entries have the dtype of `values`. For float16 and bfloat16 the softmax and the sum are computed in
#   float32, and the sum is rounded once.
# - The arguments stay as they are, and gradients reach both.

# %%
import torch
from torch import Tensor


# %%
def pooled_keys(
    values: Tensor, gates: Tensor, m: int
) -> tuple[Tensor, Tensor]:
    """Entries (B, N, D) of blocks of m tokens, and who may read them (T, N)."""
    ### BEGIN SOLUTION
    T = values.shape[1]
    N = T // m
    work = torch.promote_types(values.dtype, torch.float32)
    c = values[:, : N * m].to(work).unflatten(1, (N, m))  # (B, N, m, D)
    z = gates[:, : N * m].to(work).unflatten(1, (N, m))
    entries = (z.softmax(dim=2) * c).sum(dim=2).to(values.dtype)
    last = torch.arange(N) * m + m - 1
    return entries, last <= torch.arange(T)[:, None]
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("pooled_keys", pooled_keys)
### BEGIN HIDDEN TESTS
points = min(points, check("pooled_keys", pooled_keys, seed=7341))
### END HIDDEN TESTS
float(points)
