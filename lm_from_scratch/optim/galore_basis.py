r"""The basis of GaLore: how it is made from a gradient, and what it means for numbers in it.

An orthonormal basis :math:`P` (m, r) holds r directions of a gradient's columns, :math:`Q` (n, r)
of its rows. :math:`R = P^\top G \, Q` are the coordinates of a gradient in them, and
:math:`P R \, Q^\top` is the nearest matrix that the bases can express. Everything here is a pure
function; :mod:`lm_from_scratch.optim.galore` says when it is called.

Sources: Halko, Martinsson, Tropp, *Finding Structure with Randomness*, 2011, arXiv:0909.4061
(subspace iteration); Robert et al., *LDAdam*, 2025, arXiv:2410.16103 (rotated moments).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

PROJECTION_TYPES = ("std", "reverse_std", "left", "right", "full", "random")
BASES = ("svd", "gram", "subspace")
#: Of subspace iteration: the share of a gradient's energy at which it ends, and its end without it.
ENOUGH, MOST_ROUNDS = 0.999, 2
Matmul = Callable[[Tensor, Tensor], Tensor]
Bases = tuple[Tensor | None, Tensor | None]  # left (m, r) and right (n, r); not every one is there

# ------------------------------------------------------------------------------ the projection


def sides(shape: tuple[int, int], projection_type: str) -> tuple[bool, bool]:
    """Whether a matrix of this shape has a left basis, and whether it has a right one.

    ``std`` (and ``random``) takes the shorter side, ``reverse_std`` the longer one; a square matrix
    counts as tall.
    """
    tall = shape[0] >= shape[1]
    return {
        "left": (True, False),
        "right": (False, True),
        "full": (True, True),
        "std": (not tall, tall),
        "random": (not tall, tall),
        "reverse_std": (tall, not tall),
    }[projection_type]


def project(
    grad: Tensor, left: Tensor | None, right: Tensor | None, *, matmul: Matmul = torch.matmul
) -> Tensor:
    r"""Coordinates :math:`P^\top G Q` of a ``grad`` (m, n) in the bases ``left`` (m, r) and
    ``right`` (n, r); one that is ``None`` is absent."""
    if left is not None:
        grad = matmul(left.mT, grad)  # (r, n)
    if right is not None:
        grad = matmul(grad, right)  # (m, r) or (r, r)
    return grad


def project_back(
    low: Tensor, left: Tensor | None, right: Tensor | None, *, matmul: Matmul = torch.matmul
) -> Tensor:
    r"""The matrix :math:`P R Q^\top`, of shape (m, n), that has the coordinates ``low``
    (r or m, r or n) in the bases ``left`` (m, r) and ``right`` (n, r)."""
    if left is not None:
        low = matmul(left, low)
    if right is not None:
        low = matmul(low, right.mT)
    return low


# ----------------------------------------------------------------------------------- the basis


def singular_basis(
    grad: Tensor,
    rank: int,
    left: bool,
    right: bool,
    method: str = "svd",
    start: Bases = (None, None),
    matmul: Matmul = torch.matmul,
) -> Bases:
    """Orthonormal bases (m, r) and (n, r) of the directions in which ``grad`` (m, n) is largest.

    r is ``rank``, or the smaller side of the matrix if that is less. Three methods:

    * ``svd``: the leading singular vectors, from the full decomposition. Exact, and the slowest.
    * ``gram``: the leading eigenvectors of the smaller one of G G^T and G^T G. The same space, in
      exact arithmetic. Squaring loses directions that are 3000 times weaker than the strongest
      (in float32), which hold no more than 1e-7 of the gradient's energy each.
    * ``subspace``: a few rounds of subspace iteration from the basis ``start``, the one that is
      being replaced. Nearly the same space. Without a ``start`` of this rank, ``gram``.

    The sign of a singular vector is arbitrary. It is fixed here, so that rounding flips it only
    where two entries tie: the largest entry is positive, or, after subspace iteration, the vector
    continues the one that it came from. Computed in float32 or the dtype of the gradient, whichever
    is wider.
    """
    grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
    rank = min(rank, *grad.shape)
    if method == "svd":
        u, _, vh = torch.linalg.svd(grad, full_matrices=False)
        return signed(u[:, :rank]) if left else None, signed(vh[:rank].mT) if right else None
    grad = grad / largest_size(grad)
    return (
        leading_left(grad, rank, method, start[0], matmul) if left else None,
        leading_left(grad.mT, rank, method, start[1], matmul) if right else None,
    )


def leading_left(
    grad: Tensor, rank: int, method: str, start: Tensor | None, matmul: Matmul = torch.matmul
) -> Tensor:
    """An orthonormal basis (m, r) of the leading left singular vectors of ``grad`` (m, n), from the
    basis ``start`` (m, r)."""
    if method == "subspace" and start is not None and start.shape[1] == rank:
        return iterated(grad, start.to(grad.dtype), matmul)
    m, n = grad.shape
    gram = matmul(grad, grad.mT) if m <= n else matmul(grad.mT, grad)  # (s, s), s the smaller side
    basis = torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1)  # (s, r), largest first
    return signed(orthonormal(matmul(grad, basis)) if m > n else basis)  # (m, r)


def iterated(grad: Tensor, basis: Tensor, matmul: Matmul = torch.matmul) -> Tensor:
    """Subspace iteration: each round multiplies the ``basis`` (m, r) with G G^T, ``grad`` (m, n)
    being G, and so turns it towards the strongest directions. One that holds ``ENOUGH`` of the
    gradient's energy, by every seventh column, is done; no other space of this rank could hold much
    more."""
    # a little of every direction: iteration alone cannot leave a space for a better one
    generator = torch.Generator().manual_seed(0)
    basis = basis + 1e-3 * torch.randn(basis.shape, generator=generator).to(basis)
    sample = grad[:, ::7].contiguous()  # 7: what heads do repeats after powers of two
    enough = math.sqrt(ENOUGH) * torch.linalg.vector_norm(sample)
    for _ in range(MOST_ROUNDS):
        low = matmul(basis.mT, grad)  # (r, n)
        basis = orthonormal(matmul(low, grad.mT).mT)  # (m, r)
        if torch.linalg.vector_norm(matmul(basis.mT, sample)) > enough:
            break
    return basis


def orthonormal(columns: Tensor) -> Tensor:
    """The orthonormal basis that Gram and Schmidt would make of the ``columns`` (m, r), in their
    order."""
    q, r = torch.linalg.qr(columns)
    return (q * torch.where(r.diagonal() < 0, -1.0, 1.0)).contiguous()


def signed(columns: Tensor) -> Tensor:
    """The ``columns`` (m, r), those turned round whose largest entry is negative; never a view."""
    entry = columns.gather(0, columns.abs().argmax(0, keepdim=True))  # (1, r)
    return (columns * torch.where(entry < 0, -1.0, 1.0)).contiguous()


def random_basis(grad: Tensor, rank: int, left: bool, right: bool, seed: int) -> Bases:
    """Orthonormal bases of random directions for a ``grad`` (m, n), which depend on ``seed``
    alone."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.promote_types(grad.dtype, torch.float32)
    rank = min(rank, *grad.shape)

    def random(size: int) -> Tensor:
        gaussian = torch.randn(size, rank, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(gaussian).Q.to(grad.device, dtype).contiguous()

    return random(grad.shape[0]) if left else None, random(grad.shape[1]) if right else None


# ------------------------------------------------------------------------- numbers in a basis


def rotate_moments(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    old: Bases,
    new: Bases,
    corrections: tuple[float, float] = (1.0, 1.0),
) -> tuple[Tensor, Tensor]:
    r"""The moments ``exp_avg`` and ``exp_avg_sq`` (r or m, r or n) of the same gradients in the
    coordinates of another basis.

    The first moment is linear, so it is turned exactly, as far as the new basis can express it:
    :math:`m' = C m` with :math:`C = P_{new}^\top P_{old}`. The second moment is not: the mean of
    squares says nothing about how two coordinates vary together. Taken as uncorrelated (LDAdam),
    their variances add up with the squares of C:

    .. math:: v' = (C \circ C)(v - m \circ m) + (C m) \circ (C m)

    ``corrections`` are :math:`1 - \beta_1^t` and :math:`1 - \beta_2^t`: the formula is for the
    corrected moments.
    """
    turn = [None if a is None or b is None else a.mT @ b for a, b in zip(old, new, strict=True)]
    squares = [None if c is None else c.square() for c in turn]
    mean, mean_square = exp_avg / corrections[0], exp_avg_sq / corrections[1]
    variance = (mean_square - mean.square()).clamp(min=0.0)
    mean = project(mean, *turn)
    mean_square = project(variance, *squares) + mean.square()
    return mean * corrections[0], mean_square * corrections[1]


def without_rounding(low: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Coordinates ``low`` (r or m, r or n) in new bases ``left`` (m, r) and ``right`` (n, r), of
    which those that are only rounding are set to zero.

    A gradient of few tokens has fewer directions than the basis; the coordinates along the others
    should be 0. With two bases, everything beside the diagonal should be. What stands there instead
    is rounding, and Adam, where it divides a number by itself, would turn it into steps of full
    size. What goes is below 100 roundings of the largest.
    """
    scaled = low / largest_size(low)
    if left is not None and right is not None:
        size = scaled.abs()
    else:  # of whole columns or rows: (1, r) or (r, 1)
        dim = 0 if left is None else 1
        size = scaled.square().sum(dim, keepdim=True).sqrt()
    large = size >= 100 * torch.finfo(low.dtype).eps * size.amax()
    return low * large.to(low.dtype)


def captured_energy(low: Tensor, grad: Tensor) -> Tensor:
    r"""The share :math:`\lVert R \rVert^2 / \lVert G \rVert^2` of a ``grad`` (m, n) that its
    projection ``low`` (r or m, r or n) keeps; 1 for a gradient of zeros."""
    grad = grad.to(low.dtype)
    scale = largest_size(grad)
    total, kept = ((x / scale).square().sum() for x in (grad, low))
    return torch.where(total > 0, kept / total, 1.0).to(torch.float32)


def largest_size(x: Tensor) -> Tensor:
    """The largest size of an entry of ``x`` (any shape), or 1 if all are 0. Divided by it, no
    square is too large for its dtype, and none that counts is too small."""
    low, high = torch.aminmax(x)
    size = torch.maximum(-low, high)
    return torch.where(size > 0, size, 1.0)
