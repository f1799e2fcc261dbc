# %% [markdown]
# # Top-k and top-p
#
# Before a token is drawn, the tail of unlikely tokens is cut off: its logits become minus infinity,
# so that the softmax gives these tokens nothing. *Top-k* keeps the k largest logits. *Top-p* keeps
# the smallest set of most likely tokens whose probability reaches p:
#
# $$\text{smallest } m \text{ with } p_1 + p_2 + \dots + p_m \ge p, \qquad p_1 \ge p_2 \ge \dots$$
#
# Write both in one function. Top-k comes first. Top-p then works on what is left, with the
# probabilities that these tokens have among themselves.
#
# What holds for your function:
#
# - `logits` has shape `(B, V)`, in any order in memory. The result has its shape and its dtype. Each
#   row is cut on its own.
# - The logits that are kept stay as they are, in their places. All others become minus infinity.
#   Those that are minus infinity already stay so.
# - `top_k=0` and `top_p=1.0` are off, and are the defaults: then even the least likely token stays.
#   A `top_k` above V keeps everything.
# - Top-k also keeps tokens that are equal to the k-th largest. Top-p keeps no more than it needs:
#   of equally likely tokens at the border only as many as it takes to reach p, and any of them will
#   do. If the probability is exactly p after m tokens, these m are kept.
# - The most likely token always stays, however small `top_p` is. A `top_p` of 0 or less is an error:
#   it raises `ValueError`.
# - Logits may be as large as 1000, as small as -1000, or in bfloat16. The probabilities and their
#   sums are computed at least in float32.
# - `logits` stays as it is.

# %%
import math

import torch
from torch import Tensor


# %%
def cut_tail(logits: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The logits (B, V) with minus infinity for tokens that may not be drawn."""
    ### BEGIN SOLUTION
    if top_p <= 0.0:
        raise ValueError(f"top_p is {top_p}, and must be above 0")
    if top_k:
        k = min(top_k, logits.shape[1])
        smallest = logits.topk(k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if top_p < 1.0:
        ordered, order = logits.float().sort(dim=1, descending=True)
        probability = ordered.softmax(dim=1)
        before = probability.cumsum(dim=1) - probability
        removed = torch.zeros_like(logits, dtype=torch.bool)
        removed = removed.scatter(1, order, before >= top_p)
        logits = logits.masked_fill(removed, -math.inf)
    return logits
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("top_p", cut_tail)
### BEGIN HIDDEN TESTS
points = min(points, check("top_p", cut_tail, seed=7341))
### END HIDDEN TESTS
float(points)
