# %% [markdown]
# # Bug hunt: gates of other heads
#
# In Qwen3-Next each head has a gate: a sigmoid that decides, feature by feature, how much of the
# head's result passes. One projection makes queries and gates together.
#
# Somebody wrote such a model and loaded a published file. All shapes fit. With one head the logits are
# right; with two or more they are wrong, and no number is missing. A second person closed every gate
# by hand, with -100 in all of them: the output should be 0 everywhere, and it was the mean of the
# values.
#
# Find what is wrong, and write the function again. What holds for it:
#
# - `projected` has shape `(B, T, H * 2 * D)`: for each of H heads, one after the other, the D features
#   of its query, then the D numbers of its gate, before the sigmoid.
# - `k` and `v` have shape `(B, Hkv, S, D)`. H is a multiple of Hkv: heads 0 to H / Hkv - 1 share the
#   first key head, and so on.
# - The T queries are the *last* T of the S tokens. Each sees its own token and all before it.
# - Scores are divided by $\sqrt{D}$. The gate multiplies what a head has read, and nothing else.
# - The result has shape `(B, T, H * D)`: the heads side by side, as the next matrix wants them.
# - The inputs stay as they are, and gradients reach all three.

# %%
import math

import torch
from torch import Tensor


# %%
def gated_heads_as_found(projected: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What gated heads read, side by side: (B, T, H * D)."""
    (B, T, _), (S, D) = projected.shape, k.shape[2:]
    q, gate = projected.chunk(2, dim=-1)
    q, gate = (x.reshape(B, T, -1, D).transpose(1, 2) for x in (q, gate))
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    scores = (q * gate.sigmoid()) @ k.mT / math.sqrt(D)
    future = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
    y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    return y.transpose(1, 2).reshape(B, T, -1)


# %%
from lm_from_scratch.exercises import check

check("hunt_split_gate", gated_heads_as_found)

# %% [markdown]
# Now yours.


# %%
def gated_heads(projected: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What gated heads read, side by side: (B, T, H * D)."""
    ### BEGIN SOLUTION
    (B, T, _), (S, D) = projected.shape, k.shape[2:]
    q, gate = projected.reshape(B, T, -1, 2 * D).transpose(1, 2).split(D, dim=3)
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = q @ k.mT / math.sqrt(D)
    future = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
    y = scores.masked_fill(future, -torch.inf).softmax(3) @ v
    return (y * gate.sigmoid()).transpose(1, 2).reshape(B, T, -1)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_split_gate", gated_heads)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_split_gate", gated_heads, seed=7341))
### END HIDDEN TESTS
float(points)
