# %% [markdown]
# # Muon's step: the same size in every direction
#
# The gradient of a weight matrix has a few strong directions and many weak ones. Muon keeps the directions and makes
# all of them about equally strong. In terms of the singular value decomposition $G = U \Sigma V^\top$ it wants
# $U V^\top$. It gets close to that without computing the decomposition, by repeating
#
# $$X \leftarrow a X + b \, X X^\top X + c \, (X X^\top)^2 X, \qquad (a, b, c) = (3.4445, \; -4.7750, \; 2.0315)$$
#
# This does to each singular value what a polynomial does to a number,
# $\sigma \leftarrow a \sigma + b \sigma^3 + c \sigma^5$, and nothing else changes. It works for values from 0 to 1. So
# the matrix is first divided by its Frobenius norm, the root of the sum of all squares. That is cheap, and at least as
# large as the largest singular value.
#
# If all singular values of a matrix (m, n) are 1, its entries have a root mean square of $1 / \sqrt{\max(m, n)}$. To
# make steps as large as AdamW's, the result is multiplied by $0.2 \sqrt{\max(m, n)}$.
#
# What holds for your function:
#
# - `G` has shape `(m, n)`, float32 or float64, any order in memory. m may be smaller than n, larger, or equal.
# - `steps` is the number of repetitions, 5 by default; 0 leaves only the division and the factor at the end.
# - A norm below $10^{-7}$ counts as $10^{-7}$: such a matrix stays small, and zeros stay zeros.
# - The result has the shape and dtype of `G`; float64 is computed in float64.
# - You can work with $X X^\top$ or with $X^\top X$. No tensor that you make may have more than m · n numbers, so choose
#   with care, for tall matrices and for wide ones.
# - `G` stays as it is. No gradient is needed.

# %%
import math

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


# %%
def newton_schulz(G: Tensor, steps: int = 5) -> Tensor:
    """The step of Muon for a gradient (m, n): nearly orthogonal, then scaled."""
    ### BEGIN SOLUTION
    a, b, c = COEFFICIENTS
    m, n = G.shape
    X = G.mT if m > n else G  # the smaller side first
    X = X / torch.linalg.matrix_norm(X).clamp(min=1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    X = X * 0.2 * math.sqrt(max(m, n))
    return X.mT if m > n else X
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("newton_schulz", newton_schulz)
### BEGIN HIDDEN TESTS
points = min(points, check("newton_schulz", newton_schulz, seed=7341))
### END HIDDEN TESTS
float(points)
