# %% [markdown]
# # Which drafts are kept
#
# A cheap drafter has proposed K tokens for each row, and one pass of the model has judged them. You
# hold the model's probabilities p and the drafter's probabilities q at each place. A draft x is
# accepted with probability $\min(1, p(x) / q(x))$, and the first that is rejected is replaced by a
# draw from what the accepted ones leave over:
#
# $$r(y) = \frac{\max(0,\, p(y) - q(y))}{\sum_z \max(0,\, p(z) - q(z))}$$
#
# What follows a rejected draft is void. If all drafts of a row are accepted, the token after them is
# drawn from p. So every row gets some of its drafts, and one token more.
#
# Write this rule. All random numbers are passed in, so the result is certain.
#
# What holds for your function:
#
# - `p` has shape `(B, K + 1, V)`: the model's probabilities at the places of the K drafts, and after
#   the last. `q` has shape `(B, K, V)`: the probabilities that the drafts were drawn from, so q(x) is
#   above 0 for each draft x. Both are float32 or float64, and sum to 1 up to rounding.
# - `draft` has shape `(B, K)`, int64. A row with fewer drafts is filled with -1 at its end. There q
#   means nothing: it may hold any numbers that are not negative. K may be 0.
# - `u` has shape `(B, K + 1)`, numbers in [0, 1), of the dtype of p. `u[:, 0]` draws the token, and
#   `u[:, 1 + k]` judges draft k: it is accepted if `u * q(x) < p(x)`, less and not equal. So a draft
#   with p(x) = 0 is never accepted.
# - The result is a tuple of two int64 tensors of shape `(B,)`: how many drafts of each row are
#   accepted, and the token that follows them.
# - The token is drawn by the function `pick`, which is given: from weights (B, V), which need not
#   sum to 1, and one number for each row.
# - Rounding may reject a draft where p is nowhere above q, so that nothing is left over. Then the
#   token is drawn from p at that place.
# - The arguments stay as they are.

# %%
import torch
import torch.nn.functional as F
from torch import Tensor


def pick(weights: Tensor, u: Tensor) -> Tensor:
    """One token of each row, with probabilities in proportion to the weights (B, V)."""
    line = weights.double().cumsum(-1)
    point = u.double()[:, None] * line[:, -1:]
    token = torch.searchsorted(line, point, right=True)[:, 0]
    return token.clamp(max=weights.shape[-1] - 1)


# %%
def accept_drafts(
    p: Tensor, q: Tensor, draft: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """How many drafts of each row are kept, and the token that follows them: (B,) and (B,)."""
    ### BEGIN SOLUTION
    real = draft >= 0
    x = draft.clamp(min=0)[:, :, None]
    p_x, q_x = p[:, :-1].gather(2, x)[:, :, 0], q.gather(2, x)[:, :, 0]
    accepted = real & (u[:, 1:] * q_x < p_x)
    n = accepted.cumprod(1).sum(1)
    q = q.masked_fill(~real[:, :, None], 0)  # no draft: nothing to subtract
    q = F.pad(q, (0, 0, 0, 1))
    rows = torch.arange(len(n))
    p, q = p[rows, n], q[rows, n]
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.any(1, keepdim=True), rest, p)
    return n, pick(rest, u[:, 0])
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("speculative", accept_drafts)
### BEGIN HIDDEN TESTS
points = min(points, check("speculative", accept_drafts, seed=7341))
### END HIDDEN TESTS
float(points)
