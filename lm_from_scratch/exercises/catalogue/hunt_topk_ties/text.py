# %% [markdown]
# # Bug hunt: the test of causality fails, and the mask is right
#
# In a model with sparse attention each query reads the k keys with the highest scores. Its test of
# causality reads a text, then the beginning of the text alone, and compares the logits of the
# beginning. They differed by 5.7. Somebody searched the mask for a leak, for days. There is none:
# with *other* later tokens, but as many, nothing changed.
#
# Then two things were noticed. A score is a sum of ReLUs, so that many scores are exactly 0. And
# somebody counted: the first query of a text saw a single key, and was said to read eight.
#
# Find what is wrong, and write the function again. What holds for it:
#
# - `scores` is float32, `(T, S)`: one row for each query. Scores may be equal, negative, a hair apart
#   or far from 0, but none is infinite or NaN. `k` is a number of at least 1, and may exceed S.
# - `query_positions` `(T,)` and `key_positions` `(S,)` are int64: where each token is in the text,
#   from 0, and -1 for padding. Keys may lie in any order, as in a ring buffer. No two real keys have
#   one position.
# - A query sees a key that is real and is not after it; its own key is one of them. A query
#   that is padding sees nothing.
# - The result is `bool`, `(T, S)`, True where a query reads a key: of those that it sees, the k with
#   the highest scores, or all if there are no more than k.
# - Of equal scores the key at the latest *position* wins, wherever it lies.
# - The inputs stay as they are.

# %%
import torch
from torch import Tensor


# %%
def choose_keys_as_found(
    scores: Tensor, query_positions: Tensor, key_positions: Tensor, k: int
) -> Tensor:
    """The keys that each query reads: (T, S)."""
    visible = (key_positions >= 0) & (key_positions <= query_positions[:, None])
    scores = scores.masked_fill(~visible, -torch.inf)
    best = scores.topk(min(k, scores.shape[1])).indices
    return torch.zeros_like(visible).scatter(-1, best, True)


# %%
from lm_from_scratch.exercises import check

check("hunt_topk_ties", choose_keys_as_found)

# %% [markdown]
# Now yours.


# %%
def choose_keys(
    scores: Tensor, query_positions: Tensor, key_positions: Tensor, k: int
) -> Tensor:
    """The keys that each query reads: (T, S)."""
    ### BEGIN SOLUTION
    visible = (key_positions >= 0) & (key_positions <= query_positions[:, None])
    latest = key_positions.argsort(descending=True)
    ordered = scores.masked_fill(~visible, -torch.inf)[:, latest]
    best = ordered.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = torch.zeros_like(visible).scatter(-1, latest[best], True)
    return chosen & visible
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_topk_ties", choose_keys)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_topk_ties", choose_keys, seed=7341))
### END HIDDEN TESTS
float(points)
