# %% [markdown]
# # Attention in tiles, with a softmax in one pass
#
# Attention divides by a sum over all keys, and the scores of all keys need not exist at once for
# it. Read the keys in tiles. For each query keep three things: the largest score so far $m$, the
# sum of the exponentials relative to it $\ell$, and the sum of the values weighted by these
# exponentials $a$. When a tile with scores $s_j$ brings a larger maximum $m'$, one factor puts right
# what was added up before:
#
# $$\ell' = e^{m - m'}\, \ell + \sum_j e^{s_j - m'}, \qquad
# a' = e^{m - m'}\, a + \sum_j e^{s_j - m'} v_j$$
#
# After the last tile the result is $a / \ell$.
#
# What holds for your function:
#
# - `q` is `(T, D)`, `k` and `v` are `(S, D)`: one head of one row. `visible` is a `bool` tensor
#   `(T, S)`, True where a query sees a key. The result is `(T, D)`, in the dtype of `q`. The scores
#   are divided by the root of D.
# - `tile` is the number of keys in a tile. It need not divide S, and may exceed it.
# - The function makes no floating-point tensor of T times S numbers or more.
# - A tile may be hidden from a query as a whole, the first one too. A query that sees no key gets
#   zeros.
# - Scores may be hundreds above or below zero. From one tile to the next the largest may rise or
#   fall by hundreds. Hidden scores may be far above all visible ones.
# - The inputs are float32 or float16. In float16 scores and sums are computed in float32. The
#   inputs stay as they are.
# - Gradients are not asked for.

# %%
import math

import torch
from torch import Tensor


# %%
def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, tile: int
) -> Tensor:
    """Attention that reads the keys in tiles, and never holds all scores."""
    ### BEGIN SOLUTION
    T, D = q.shape
    m = torch.full((T, 1), torch.finfo(torch.float32).min)
    l = torch.zeros(T, 1)
    a = torch.zeros(T, D)
    for start in range(0, len(k), tile):
        keys = slice(start, start + tile)
        scores = q.float() @ k[keys].float().T / math.sqrt(D)
        scores = scores.masked_fill(~visible[:, keys], -torch.inf)
        new_m = torch.maximum(m, scores.amax(1, keepdim=True))
        rescale = torch.exp(m - new_m)
        p = torch.exp(scores - new_m)
        l = rescale * l + p.sum(1, keepdim=True)
        a = rescale * a + p @ v[keys].float()
        m = new_m
    return (a / l.clamp(min=1)).to(q.dtype)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("online_softmax", tiled_attention)
### BEGIN HIDDEN TESTS
points = min(points, check("online_softmax", tiled_attention, seed=7341))
### END HIDDEN TESTS
float(points)
