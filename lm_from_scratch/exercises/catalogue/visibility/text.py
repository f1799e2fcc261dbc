# %% [markdown]
# # Who sees whom
#
# Write the one rule that makes every mask of these pages: causal, padded, after a cache, with a
# window, for documents in one row, for a ring buffer. Each token carries its *position*: where it
# is in its own sequence, or -1 if it is padding or an unused slot. A key is visible to a query
# if
#
# - it is real: its position is not -1,
# - it is not after the query,
# - it is within the window, if there is one,
# - it is in the same document, if there are several.
#
# What holds for your function:
#
# - `query_positions` is an integer tensor `(B, T)`, `key_positions` is `(B, S)`. Either may have
#   one row, which then holds for all rows. T and S may differ. Both stay as they are.
# - Positions may start at any number and are in any order: only they count, never the column.
#   Position 0 is a token like any other.
# - `window` is a number of keys, the query's own included: with 3, a query at position 7 sees
#   positions 5, 6 and 7. `None` is no window. A window below 1 raises `ValueError`.
# - `query_documents` and `key_documents`, shaped like the positions, number the documents in any
#   order, from any number. Both are given or neither, and a window may be given with them.
# - A query that is padding sees nothing.
# - The result is a `bool` tensor `(B, 1, T, S)`, True where the key is visible. The axis of size 1
#   is for the heads.

# %%
import torch


# %%
def visible(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    window: int | None = None,
    query_documents: torch.Tensor | None = None,
    key_documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which keys each query may see, from positions alone."""
    ### BEGIN SOLUTION
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1")
    query = query_positions[:, None, :, None]  # (B, 1, T, 1)
    key = key_positions[:, None, None, :]  # (B, 1, 1, S)
    mask = (key >= 0) & (key <= query)
    if window is not None:
        mask = mask & (key > query - window)
    if query_documents is not None:
        asking = query_documents[:, None, :, None]
        asked = key_documents[:, None, None, :]
        mask = mask & (asking == asked)
    return mask
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("visibility", visible)
### BEGIN HIDDEN TESTS
points = min(points, check("visibility", visible, seed=7341))
### END HIDDEN TESTS
float(points)
