# %% [markdown]
# # Positions in a padded batch
#
# A batch of unequal texts is filled up with padding, mostly on the left, so that all texts end in the last column and
# generation goes on from there. An attention mask says which columns are real: 1 for a token, 0 for padding. The
# model needs more than that: the position of each token in its own text. With positions a padded row can give what
# the text gives alone; without them the text starts in the middle of nowhere.
#
# | mask | positions | next |
# |---|---|---|
# | `0 0 1 1 1` | `-1 -1 0 1 2` | `3` |
#
# Write the function that turns the mask into positions. It also returns where the next token of each row is,
# which the first step of generation needs.
#
# What holds for your function:
#
# - `attention_mask` has shape `(B, T)` and holds 1 for a token and 0 for padding. It may be bool, a whole number of any
#   size, or a floating-point number such as bfloat16.
# - The first result has shape `(B, T)` and is int64. Real tokens of a row count 0, 1, 2, ... from left to right.
#   Padding gets -1.
# - The padding may be on the left, on the right, on both sides, or between tokens: it is not counted anywhere. A row
#   may be padding alone, and T may be 1, or several hundred.
# - The second result has shape `(B,)` and is int64: the position of the token that would come next in each row. For a
#   row of padding alone this is 0.
# - A mask that has not two axes is refused with a `ValueError`. So is one that holds another number than 0 and 1, for
#   example an additive mask of 0 and minus infinity.
# - `attention_mask` stays as it is.

# %%
import torch
from torch import Tensor

PADDING = -1


# %%
def padded_positions(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (B, T) of the tokens, -1 for padding, and the next position (B,) of each row."""
    ### BEGIN SOLUTION
    real = attention_mask == 1
    if attention_mask.dim() != 2 or not (real | (attention_mask == 0)).all():
        raise ValueError("attention_mask must be (B, T), of 0 and 1")
    positions = torch.where(real, real.cumsum(1) - 1, PADDING)
    return positions, real.sum(1)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("left_padding", padded_positions)
### BEGIN HIDDEN TESTS
points = min(points, check("left_padding", padded_positions, seed=7341))
### END HIDDEN TESTS
float(points)
