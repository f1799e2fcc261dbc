# %% [markdown]
# # Causal attention after a cache, with shared key heads
#
# Write the attention that a model runs while it generates. A cache holds the keys and values of
# earlier tokens, so there are T queries and S keys with T at most S, and the queries are the *last*
# T of the S tokens. Each query takes a mean of the values that it may see:
#
# $$y_t = \sum_s a_{ts}\, v_s, \qquad a_{ts} = \mathrm{softmax}_s\!\left(\frac{q_t \cdot k_s}{\sqrt{D}}\right)$$
#
# What holds for your function:
#
# - `q` has shape `(B, H, T, D)`, `k` has `(B, Hkv, S, D)` and `v` has `(B, Hkv, S, Dv)`. `Dv` may
#   differ from `D`. The result has shape `(B, H, T, Dv)` and the dtype of `q`. T may be 1.
# - Query t is token S - T + t. It sees its own key and all keys before it, and nothing of the
#   future.
# - H is a multiple of Hkv. Query heads that share a key head are side by side: with H = 6 and
#   Hkv = 2, heads 0, 1, 2 read key head 0, and heads 3, 4, 5 read key head 1.
# - Scores may have any size: hundreds above zero, or 20000 below it for keys that are *visible*.
# - In float16 and bfloat16 the scores and the softmax are computed in float32. In float64 nothing
#   is rounded to float32.
# - The inputs may have any order in memory. They stay as they are, and gradients reach all three.

# %%
import math

import torch
from torch import Tensor


# %%
def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last T of S tokens, each to itself and what is before it."""
    ### BEGIN SOLUTION
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = q.to(work) @ k.to(work).mT / math.sqrt(q.shape[-1])
    T, S = q.shape[2], k.shape[2]
    future = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return weights.to(q.dtype) @ v
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("attention", causal_attention)
### BEGIN HIDDEN TESTS
points = min(points, check("attention", causal_attention, seed=7341))
### END HIDDEN TESTS
float(points)
