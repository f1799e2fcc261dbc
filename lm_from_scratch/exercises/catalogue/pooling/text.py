# %% [markdown]
# # The last real token
#
# A causal model gives a state for every token, and each state knows only what is before it. The last token alone
# has read the whole text, so a classifier takes its state and forgets the others.
#
# With one text, this is the last column. In a padded batch the last column of a row may be padding, and nothing raises
# an error: the classifier just gets worse. The positions say where the text is: -1 for padding, 0 or more for a token.
#
# Write the function that takes from each row the state of its last real token.
#
# What holds for your function:
#
# - `x` has shape `(B, T, C)` and any floating-point dtype. `positions` has shape `(B, T)` and is int64. Both may have
#   any order in memory. The result has shape `(B, C)` and the dtype of `x`.
# - Without `positions`, which is None by default, no token is padding.
# - A token is real if its position is 0 or more. The last real token is the rightmost one. Padding may be on the
#   left, on the right, on both sides, or between tokens.
# - A position is not a column. Positions may go on from an earlier part of the text, and begin at 7. Where a row holds
#   two texts one after the other, they start again at 0 in the middle.
# - The states of padding mean nothing and may be NaN. No NaN may get from there into the result.
# - A row of padding alone has no last token. Whatever you return for it is right, but it must not stop the others.
# - Other shapes of `positions` than `(B, T)` are refused with a `ValueError`.
# - `x` and `positions` stay as they are. Gradients reach the chosen states of `x`.

# %%
import torch
from torch import Tensor


# %%
def last_state(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """The states (B, C) of the last real token of each row of x (B, T, C)."""
    ### BEGIN SOLUTION
    if positions is None:
        return x[:, -1]
    B, T, _ = x.shape
    if positions.shape != (B, T):
        raise ValueError(f"positions {positions.shape} for x {x.shape}")
    last = torch.where(positions >= 0, torch.arange(T), 0).amax(1)  # (B,)
    return x[torch.arange(B), last]
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("pooling", last_state)
### BEGIN HIDDEN TESTS
points = min(points, check("pooling", last_state, seed=7341))
### END HIDDEN TESTS
float(points)
