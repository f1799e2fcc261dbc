# %% [markdown]
# # Bug hunt: a mask that is nearly minus infinity
#
# A script of GPT-2 hides keys as below. With ordinary weights its tests passed. With weights of 60
# times their size, other tokens *under the padding* moved the logits of real tokens by 2.1: what
# was hidden had a say.
#
# Other code took a far more negative number for the same line. In float32 this was better. In
# float16 it gave NaN in rows of real tokens, but only with left padding and strongly negative
# scores.
#
# Find what is wrong and write the function again. What holds for it:
#
# - `q` is `(B, H, T, D)`, `k` and `v` are `(B, H, S, D)`; T may be less than S. `visible` is `bool`,
#   `(B, 1, T, S)`, True where a query sees a key. The result is `(B, H, T, D)` and has the dtype of
#   `q`, float32 or float16. The scores are divided by the root of D.
# - A hidden key has no part in the result, whatever its score and its value, as long as they are
#   finite. Scores may be far from zero: hidden ones in the millions, visible ones at -200000, or at
#   -20000 in float16.
# - A query that sees no key (padding) gets zeros. A layer above reads these rows as values.
# - The inputs stay as they are. Gradients reach q, k and v, and are 0, not NaN, where nothing is
#   visible.

# %%
import math

import torch
from torch import Tensor


# %%
def masked_attention_as_found(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor
) -> Tensor:
    """Attention of each query to the keys that are visible to it."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    bias = (1.0 - visible.to(q.dtype)) * -10000.0
    weights = (scores + bias).softmax(-1)
    return weights @ v


# %%
from lm_from_scratch.exercises import check

check("hunt_mask_fill", masked_attention_as_found)

# %% [markdown]
# Now yours.


# %%
def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor
) -> Tensor:
    """Attention of each query to the keys that are visible to it."""
    ### BEGIN SOLUTION
    hidden = ~visible
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).masked_fill(hidden, 0.0)
    return weights @ v
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_mask_fill", masked_attention)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_mask_fill", masked_attention, seed=7341))
### END HIDDEN TESTS
float(points)
