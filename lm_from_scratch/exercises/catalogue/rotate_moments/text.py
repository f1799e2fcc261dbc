# %% [markdown]
# # Turn the moments into a new basis
#
# GaLore keeps Adam's moments as coordinates in a basis. When it makes a new basis, the old numbers
# mean other directions than before. This function turns them. The matrix between the coordinates is
# $C = P_{new}^\top P_{old}$ for a left basis: column vectors in the old coordinates become columns
# in the new ones. A right basis $Q$ does the same to the rows.
#
# The first moment $m$ is linear in the gradients, so its coordinates in the new basis are those of
# the matrix that it stands for. The second moment $v$ is a mean of squares. The coordinates are
# taken as uncorrelated, so that variances add up with the squares of the factors, and a mean square
# is a variance plus the square of a mean:
#
# $$m' = C\, m \qquad v'_i = \sum_j C_{ij}^2\, (v_j - m_j^2) + (m'_i)^2$$
#
# What holds for your function:
#
# - `old` and `new` are pairs of a left basis and a right basis. Left bases have shape `(m, r)`, right
#   bases `(n, r)`, with orthonormal columns. Where both pairs have `None`, there is no basis on that
#   side. One of the two sides or both may have one.
# - `exp_avg` ($m$) and `exp_avg_sq` ($v$) have the shape of the coordinates: `(r, n)` with a left
#   basis, `(m, r)` with a right one, `(r, r)` with both.
# - The new basis may have another number of columns than the old one.
# - The result is two tensors, the new `exp_avg` and `exp_avg_sq`.
# - `corrections` are $1 - \beta_1^t$ and $1 - \beta_2^t$. The formula is for the corrected moments,
#   `exp_avg` divided by the first and `exp_avg_sq` by the second. The function takes and returns
#   moments that are not corrected. Without other values both corrections are 1.
# - A variance $v_j - m_j^2$ below 0 counts as 0 in the sum. This happens in real runs, because the two
#   moments remember the past for different times.
# - The arguments stay as they are, and float64 stays float64.

# %%
import torch
from torch import Tensor

Basis = tuple[Tensor | None, Tensor | None]


def project(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """The coordinates of x in a left basis, a right one, or both."""
    if left is not None:
        x = left.mT @ x
    if right is not None:
        x = x @ right
    return x


# %%
def rotate_moments(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    old: Basis,
    new: Basis,
    corrections: tuple[float, float] = (1.0, 1.0),
) -> tuple[Tensor, Tensor]:
    """The moments in the coordinates of the new basis."""
    ### BEGIN SOLUTION
    turns, squares = [], []
    for before, after in zip(old, new):
        turn = None if before is None else before.mT @ after  # (r, r')
        turns.append(turn)
        squares.append(None if turn is None else turn.square())
    mean = exp_avg / corrections[0]
    variance = exp_avg_sq / corrections[1] - mean.square()
    variance = torch.clamp(variance, min=0.0)
    mean = project(mean, *turns)
    mean_square = project(variance, *squares) + mean.square()
    return mean * corrections[0], mean_square * corrections[1]
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("rotate_moments", rotate_moments)
### BEGIN HIDDEN TESTS
points = min(points, check("rotate_moments", rotate_moments, seed=7341))
### END HIDDEN TESTS
float(points)
