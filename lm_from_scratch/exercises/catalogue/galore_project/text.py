# %% [markdown]
# # Project a gradient, and project back
#
# GaLore keeps Adam's two moments in a few directions of the gradient. It takes the $r$ leading
# singular vectors of one gradient $G$ of shape $(m, n)$ as the columns of a basis, and uses them
# for many gradients after it. The basis is on one side, $Q$ on the right or $P$ on the left:
#
# $$R = G Q, \quad \tilde G = R Q^\top \quad \text{(right)} \qquad
# R = P^\top G, \quad \tilde G = P R \quad \text{(left)}$$
#
# Write this as a class with a basis and two methods.
#
# What holds for your class:
#
# - `GradientProjection(grad, rank, projection_type)` makes the basis from `grad` of shape `(m, n)`.
#   Later calls of the methods do not change it.
# - `projection_type` is `"std"`, which is also the default, or `"reverse_std"`. `std` takes the side
#   with the smaller basis: the right one if the matrix is tall (`m > n`) or square, the left one if
#   it is wide. `reverse_std` takes the other side.
# - `basis` is a tensor of shape `(n, r)` on the right and `(m, r)` on the left. Its columns are
#   orthonormal, and span the directions in which `grad` is largest. Their order and their signs are
#   free. `r` is `rank`, or the smaller one of `m` and `n` if that is less.
# - `project(grad)` gives the coordinates, of shape `(m, r)` on the right and `(r, n)` on the left.
#   `project_back(low)` gives a matrix of shape `(m, n)`. Its side is that of the basis, which the
#   shape of `low` does not tell: coordinates may be square, wide or tall on either side.
# - The SVD and the products are computed in float32, or in float64 for a gradient of float64. Basis
#   and results have that dtype. `wide` below converts.
# - An optimizer holds the object for hundreds of steps. The tensors in it keep no more memory alive
#   than the numbers of the basis need: neither the gradient nor the rest of the SVD.
# - The arguments stay as they are.

# %%
import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """In float32, or in float64 if that is what x has."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# %%
class GradientProjection:
    """The leading singular vectors of a gradient, and the coordinates in them."""

    def __init__(
        self, grad: Tensor, rank: int, projection_type: str = "std"
    ) -> None:
        """Make the basis."""
        ### BEGIN SOLUTION
        is_wide = grad.shape[0] < grad.shape[1]
        self.left = is_wide if projection_type == "std" else not is_wide
        U, _, Vh = torch.linalg.svd(wide(grad), full_matrices=False)
        leading = U[:, :rank] if self.left else Vh[:rank].mT
        self.basis = leading.clone()
        ### END SOLUTION

    def project(self, grad: Tensor) -> Tensor:
        """The coordinates of a gradient (m, n)."""
        ### BEGIN SOLUTION
        grad = wide(grad)
        return self.basis.mT @ grad if self.left else grad @ self.basis
        ### END SOLUTION

    def project_back(self, low: Tensor) -> Tensor:
        """The matrix (m, n) that has these coordinates."""
        ### BEGIN SOLUTION
        return self.basis @ low if self.left else low @ self.basis.mT
        ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("galore_project", GradientProjection)
### BEGIN HIDDEN TESTS
points = min(points, check("galore_project", GradientProjection, seed=7341))
### END HIDDEN TESTS
float(points)
