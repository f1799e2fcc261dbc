# %% [markdown]
# # Bug hunt: a bias that should only choose
#
# A router like DeepSeek-V3's keeps its experts busy without a loss for it. After each step, a bias
# rises for experts that had too few tokens and falls for those that had too many. The bias takes part
# in the *choice* of experts and in nothing else.
#
# In a fresh model all biases are 0, and every test passes. After a thousand steps two things are
# noticed. The outputs change with every step of the balance, although no weight has moved. And some
# tokens visit experts of a group that was closed to them.
#
# Find what is wrong, and write the function again. What holds for it:
#
# - `logits` has shape `(N, E)`: the router's score of each of N tokens for each of E experts, between
#   -20 and 20. `bias` has shape `(E,)`, of any size and sign. `k` experts are chosen for each token.
# - The score of an expert is the sigmoid of its logit. What is compared is the score plus the bias. No
#   two of these sums are equal.
# - Experts are in `n_group` groups of neighbours, of equal size, at least 2. A group is worth the sum
#   of its *two* best sums. Of the groups only the `top_group` best are open, and the k experts come from
#   those. They have at least k.
# - The weights of the chosen experts are their *scores*, divided by the sum of these k scores, times
#   `scale`.
# - The result is `(N, E)`: the weight of each expert, 0 where it was not chosen. Gradients reach the
#   logits; the bias gets none. The inputs stay as they are.

# %%
import torch
from torch import Tensor


# %%
def expert_weights_as_found(
    logits: Tensor,
    bias: Tensor,
    k: int,
    n_group: int,
    top_group: int,
    scale: float,
) -> Tensor:
    """The weights of all experts for each token: (N, E)."""
    scores = logits.sigmoid() + bias
    groups = scores.unflatten(-1, (n_group, -1))
    worth = groups.topk(2, dim=-1).values.sum(-1)
    best = worth.topk(top_group, dim=-1).indices
    is_open = torch.zeros_like(worth).scatter(-1, best, 1.0)
    scores = (groups * is_open[..., None]).flatten(1)
    weights, experts = scores.topk(k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True) * scale
    return torch.zeros_like(logits).scatter(-1, experts, weights)


# %%
from lm_from_scratch.exercises import check

check("hunt_expert_bias", expert_weights_as_found)

# %% [markdown]
# Now yours.


# %%
def expert_weights(
    logits: Tensor,
    bias: Tensor,
    k: int,
    n_group: int,
    top_group: int,
    scale: float,
) -> Tensor:
    """The weights of all experts for each token: (N, E)."""
    ### BEGIN SOLUTION
    scores = logits.sigmoid()
    groups = (scores + bias).unflatten(1, (n_group, -1))
    worth = groups.topk(2).values.sum(2)
    best = worth.topk(top_group).indices
    closed = torch.ones_like(worth).scatter(1, best, 0.0).bool()
    sums = groups.masked_fill(closed[..., None], -torch.inf).flatten(1)
    experts = sums.topk(k).indices
    weights = scores.gather(1, experts)
    weights = weights / weights.sum(1, keepdim=True) * scale
    return torch.zeros_like(logits).scatter(1, experts, weights)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_expert_bias", expert_weights)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_expert_bias", expert_weights, seed=7341))
### END HIDDEN TESTS
float(points)
